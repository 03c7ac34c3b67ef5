# chaos.pl: one client of the chaos run
#
#	chaos.pl FOLDER NUMBER run|complete
#
# Started, killed and started again by test/chaos/chaos.pl, which says what is
# proved.  FOLDER has what both of them know:
#
#	plan			seed, number of clients, steps of each
#	where			how to connect, just now
#	allowed			how many steps each may have done by now
#	progress		at which step each client is: four bytes each
#	history.N		what client N has sent and was told, a line each
#
# The request with the number n is the same for whoever draws it.  Client N
# serves n = step * clients + N at each step, again and again until there is
# an answer, or until it is tired; what then has none is completed in the
# end.  Every fourth request of its neighbour it serves as well, at about the
# same time as the neighbour does.
#
# Copyright (c) 2026, pg_idem contributors

use strict;
use warnings FATAL => 'all';

use DBI;
use Digest::SHA qw(sha256);
use Time::HiRes qw(sleep time);

# How often a request is tried before it is left for the end, and in the end.
use constant TRIES => 6;
use constant TRIES_IN_THE_END => 3000;

# A server that recovers must be back within this many seconds.
use constant CONNECT_SECONDS => 180;

# Short, so that workers lose their claims while they are at work.
use constant LEASE => '300 ms';

my ($folder, $number, $mode) = @ARGV;
my ($seed, $clients, $steps) = split ' ', slurp("$folder/plan");

open(my $history, '>>', "$folder/history.$number") or die "history: $!";
open(my $progress, '+<', "$folder/progress") or die "progress: $!";

my $db;
my %answered = already_answered();

# ---------------------------------------------------------------------
# The plan
# ---------------------------------------------------------------------

# Ways to serve a request, and how many in a hundred
my @kinds = (
	[ 26, 'transaction', \&transaction ],
	[ 8, 'declined', \&transaction ],
	[ 10, 'published', \&transaction ],
	[ 8, 'prepared', \&transaction ],
	[ 14, 'statement', \&statement ],
	[ 10, 'call', \&call ],
	[ 10, 'worker', \&worker ],
	[ 8, 'message', \&message ],
	[ 6, 'batch', \&batch ]);

# What becomes of one try
my @fates = (
	[ 58, 'goes well' ],
	[ 8, 'rolls back' ],    # after all is done
	[ 6, 'holds' ],         # on to it for a while before the commit
	[ 6, 'undoes' ],        # the work by a savepoint, and does it again
	[ 6, 'fails' ],         # with 503, to be tried again
	[ 5, 'is cut' ],        # its connection, before the commit
	[ 5, 'is not heard' ],  # its commit, or the answer to that
	[ 6, 'is in a hurry' ]);    # has little time for each statement

sub pick
{
	my ($dice, @choices) = @_;

	$dice %= 100;
	foreach my $choice (@choices)
	{
		return $choice if $dice < $choice->[0];
		$dice -= $choice->[0];
	}
	die 'choices do not add up';
}

# Three neighbours have one key and one route, each as another tenant.
sub request
{
	my ($n) = @_;
	my $group = int($n / 3);
	my ($dice) = unpack('N', sha256("$seed $group"));
	my (undef, $kind, $way) = @{ pick($dice, @kinds) };
	my $tenant = 'tenant ' . $n % 3;

	return {
		n => $n, kind => $kind, way => $way,
		key => "key $group", tenant => $tenant, route => "POST /$kind",
		name => "$tenant, $group",
		body => qq({"n": $n, "amount": $dice}) };
}

# ---------------------------------------------------------------------
# Serving a request.  Returns [ outcome, status, response ], or nothing if there
# is no answer yet.
# ---------------------------------------------------------------------

sub claim
{
	my ($q, $more) = @_;

	return row(
		'SELECT proceed, outcome, status, response, attempt, step'
		  . " FROM idem_begin(?, ?, idem_hash(?::jsonb), tenant => ?$more)",
		@{$q}{qw(key route body tenant)});
}

# What a claim says that is not to proceed
sub answer_of
{
	my ($claim) = @_;

	return if $claim->{outcome} =~ /^(?:in_progress|throttled)$/;
	return [ @{$claim}{qw(outcome status response)} ];
}

# An answer that names who has made it, so that no two are alike
sub new_answer
{
	my ($q) = @_;
	my $nonce = "$number $$ " . time . rand();
	my $status = $q->{kind} eq 'declined' ? 402 : 201;

	return ($status,
		qq({"n": $q->{n}, "tenant": "$q->{tenant}", "nonce": "$nonce"}), $nonce);
}

sub have_effect
{
	my ($q, $nonce) = @_;

	run('INSERT INTO effects (kind, name, nonce) VALUES (?, ?, ?)',
		$q->{kind}, $q->{name}, $nonce);
	run(
		'SELECT idem_publish(?, ?::jsonb, ?, message_id => md5(?)::uuid)',
		'chaos', qq({"name": "$q->{name}"}),
		rand() < 0.5 ? 'group ' . $q->{n} % 5 : undef, $q->{name})
	  if $q->{kind} eq 'published';
	return;
}

sub finish
{
	my ($q, $status, $response, $attempt) = @_;

	run(
		'SELECT idem_finish(?, ?::jsonb, ?, route => ?, tenant => ?, attempt => ?)',
		$q->{key}, $response, $status, @{$q}{qw(route tenant)}, $attempt);
	return;
}

sub transaction
{
	my ($q, $fate) = @_;

	begin($fate);
	my $claim = claim($q, '');
	if (!$claim->{proceed})
	{
		run('COMMIT');
		return answer_of($claim);
	}

	my ($status, $response, $nonce) = new_answer($q);
	my $attempt = rand() < 0.5 ? $claim->{attempt} : undef;
	if ($fate =~ /^(?:undoes|fails)$/ || $q->{kind} eq 'declined')
	{
		run('SAVEPOINT work');
		have_effect($q, $nonce);
		run('ROLLBACK TO work');
	}
	if ($fate eq 'fails')
	{
		finish($q, 503, '{"error": "busy"}', $attempt);
		run('COMMIT');
		return;
	}
	have_effect($q, $nonce) unless $q->{kind} eq 'declined';
	finish($q, $status, $response, $attempt);
	return unless $q->{kind} eq 'prepared' ? prepare($fate) : end($fate);
	return [ 'started', $status, $response ];
}

# One round trip
sub statement
{
	my ($q, $fate) = @_;
	my ($status, $response, $nonce) = new_answer($q);

	begin($fate) if $fate ne 'goes well';
	my $answer = row(
		q{WITH c AS MATERIALIZED (
				SELECT * FROM idem_begin($1, $2, idem_hash($3::jsonb), tenant => $4)),
			w AS (INSERT INTO effects (kind, name, nonce)
				SELECT 'statement', $5, $6 FROM c WHERE c.proceed RETURNING name),
			f AS MATERIALIZED (
				SELECT idem_finish($1, $7::jsonb, $8::int, route => $2, tenant => $4) FROM w)
		SELECT c.outcome, coalesce(c.status, $8) AS status,
			CASE WHEN c.proceed THEN $7::jsonb ELSE c.response END AS response
		FROM c LEFT JOIN f ON true},
		@{$q}{qw(key route body tenant name)}, $nonce, $response, $status);
	return unless $fate eq 'goes well' || end($fate);
	return answer_of($answer);
}

sub call
{
	my ($q, $fate) = @_;
	my (undef, $response, $nonce) = new_answer($q);

	# what is not part of the request, the work finds in a setting
	begin($fate) if $fate ne 'goes well';
	run(q{SELECT set_config('chaos.response', ?, false),
			set_config('chaos.name', ?, false)}, $response, $q->{name});
	my $answer = row(
		q{SELECT outcome, status, response FROM idem_call(?, ?, ?::jsonb,
			'chaos_work(jsonb)', 201, tenant => ?)},
		@{$q}{qw(key route body tenant)});
	return unless $fate eq 'goes well' || end($fate);
	return answer_of($answer);
}

# A claim that is committed in progress, an effect elsewhere, one together with
# a checkpoint, and one together with the answer.  Who sleeps loses the claim.
sub worker
{
	my ($q, $fate) = @_;
	my @who = @{$q}{qw(route tenant)};

	my $claim = claim($q, ", lease => '" . LEASE . "'");
	return answer_of($claim) unless $claim->{proceed};

	if (($claim->{step} || '') ne 'reserved')
	{
		run(q{INSERT INTO outside (name, child_key)
				VALUES (?, idem_child_key(?, 'charge', ?, ?))},
			$q->{name}, $q->{key}, @who);
		sleep(0.4) if $fate eq 'holds';
		begin('');
		run(q{INSERT INTO effects (kind, name) VALUES ('reserved', ?)}, $q->{name});
		run(q{SELECT idem_checkpoint(?, 'reserved', NULL, ?, ?, ?, ?)},
			$q->{key}, @who, $claim->{attempt}, LEASE);
		run('COMMIT');
	}
	if ($fate eq 'rolls back' && rand() < 0.5)
	{
		run('SELECT idem_release(?, ?, ?, ?)', $q->{key}, @who, $claim->{attempt});
		return;
	}

	my ($status, $response, $nonce) = new_answer($q);
	sleep(0.4) if $fate eq 'undoes';
	begin($fate);
	have_effect($q, $nonce);
	if ($fate eq 'fails')
	{
		run('ROLLBACK');
		finish($q, 503, '{"error": "busy"}', $claim->{attempt});
		return;
	}
	finish($q, $status, $response, $claim->{attempt});
	return unless end($fate);
	return [ 'started', $status, $response ];
}

sub message
{
	my ($q, $fate) = @_;

	begin($fate);
	have_effect($q, 'message')
	  if row('SELECT idem_receive(?, ?, ?) AS is_new', @{$q}{qw(route key tenant)})
	  ->{is_new};
	return unless end($fate);
	return [ 'received', undef, undef ];
}

# Two messages; neighbours have one of them in common
sub batch
{
	my ($q, $fate) = @_;

	begin($fate);
	run(
		q{INSERT INTO effects (kind, name, nonce) SELECT 'batch', m, 'message'
			FROM idem_receive_batch('batch', ?, 'all') m},
		[ names($q) ]);
	return unless end($fate);
	return [ 'received', undef, undef ];
}

# Names of the effects that a request has
sub names
{
	my ($q) = @_;

	return () if $q->{kind} eq 'declined';
	return ($q->{name}) if $q->{kind} ne 'batch';
	return map { "$q->{key}, part " . ($q->{n} % 3 + $_) } 0, 1;
}

# A relay and a consumer on the other side, of whatever there is
sub relay
{
	my $messages = $db->selectall_arrayref(
		q{SELECT id, attempt, message_id, payload FROM idem_outbox_take('chaos', 5, '1 s')},
		{ Slice => {} });

	foreach my $message (@$messages)
	{
		my $fate = fate();

		begin($fate);
		run(q{INSERT INTO effects (kind, name)
				SELECT 'delivered', ?::jsonb ->> 'name' WHERE idem_receive('relay', ?)},
			@{$message}{qw(payload message_id)});
		if (!end($fate))
		{
			run(q{SELECT idem_outbox_fail(?, ?, 'fate', '100 ms')},
				@{$message}{qw(id attempt)})
			  if $db;
			return unless $db;
			next;
		}
		run('SELECT idem_outbox_done(?, ?)', @{$message}{qw(id attempt)});
	}
	return scalar @$messages;
}

# A key that is soon forgotten, for the sweep
sub short_key
{
	run('BEGIN');
	my $key = "short $number $$ " . time;
	row(q{SELECT proceed FROM idem_begin(?, 'short', NULL, ttl => '10 ms')}, $key);
	run(q{SELECT idem_finish(?, NULL, route => 'short')}, $key);
	run('COMMIT');
	return;
}

# ---------------------------------------------------------------------
# The ends of a transaction
# ---------------------------------------------------------------------

sub fate { return pick(int(rand(100)), @fates)->[1] }

sub begin
{
	my ($fate) = @_;
	my $level =
	  (('READ COMMITTED') x 4, 'REPEATABLE READ', 'SERIALIZABLE')[ rand 6 ];

	run("BEGIN ISOLATION LEVEL $level");
	run('SET LOCAL statement_timeout = ' . (1 + int(rand(5))))
	  if $fate eq 'is in a hurry';
	return;
}

# Returns if the transaction is committed, and we know.
sub end
{
	my ($fate) = @_;

	sleep(rand(0.03)) if $fate =~ /^(?:holds|rolls back)$/;
	run('ROLLBACK') if $fate eq 'rolls back';
	cut() if $fate eq 'is cut';
	cut('COMMIT') if $fate eq 'is not heard';
	return 0 if $fate =~ /^(?:rolls back|is cut|is not heard)$/;
	run('COMMIT');
	return 1;
}

# The same in two phases.  What is left prepared, the director ends.
sub prepare
{
	my ($fate) = @_;
	my $name = "chaos $number $$ " . time;

	run("PREPARE TRANSACTION '$name'");
	return 0 if $fate =~ /^(?:is cut|is not heard)$/;
	sleep(rand(0.03)) if $fate eq 'holds';
	run(($fate eq 'rolls back' ? 'ROLLBACK' : 'COMMIT') . " PREPARED '$name'");
	return $fate ne 'rolls back';
}

# The connection breaks, perhaps with a statement under way.
sub cut
{
	my ($statement) = @_;

	$db->do($statement, { pg_async => DBD::Pg::PG_ASYNC() }) if $statement;
	open(my $socket, '+<&', $db->{pg_socket}) or die "dup: $!";
	shutdown($socket, 2);
	undef $db;
	return;
}

# ---------------------------------------------------------------------
# The database
# ---------------------------------------------------------------------

# Errors that faults bring about, and that leave nothing behind
my $expected = qr/^(?:
	08... | 57... |			# no connection, canceled, shut down
	40001 | 40P01 | 55P03 |	# somebody else was faster, or has it just now
	53... | 58... |			# out of slots, of space; cannot write
	25006 |					# not promoted yet
	IK00[123] |				# a worker was too slow
	)$/x;

sub run
{
	my ($sql, @values) = @_;

	$db->do($sql, undef, @values);
	return;
}

sub row
{
	my ($sql, @values) = @_;

	return $db->selectrow_hashref($sql, undef, @values);
}

sub connect_to_server
{
	my $deadline = time + CONNECT_SECONDS;

	until ($db)
	{
		my $where = slurp("$folder/where");

		$db = DBI->connect("dbi:Pg:$where application_name=chaos", undef, undef,
			{ AutoCommit => 1, PrintError => 0, PrintWarn => 0, RaiseError => 0,
				pg_server_prepare => 0 });
		next unless $db || sleep(0.05) < 0 || time > $deadline;
		die "no server: $DBI::errstr\n" unless $db;
		$db->{RaiseError} = 1;
	}
	return;
}

# ---------------------------------------------------------------------
# Trying
# ---------------------------------------------------------------------

# Do something that faults may hit; returns what it returns, or nothing.
sub try
{
	my ($what, $action) = @_;
	my $result;

	connect_to_server();
	return $result if eval { $result = $action->(); 1 };

	my $error = $@;
	my $state = $db && $db->state || '08000';
	# what DBD::Pg says where the server has said nothing
	$state = '08006' if $state eq '22000' && $error =~ /connection|server/;
	# a limit on files that stands for a full disk, which has no code of its own
	$state = '53100' if $state eq 'XX000' && $error =~ /: File too large/;
	note('bad', $what, $state, $error =~ s/\s+/ /gr)
	  unless $error =~ /^DBD::Pg/ && $state =~ $expected;
	note('error', $state);
	# what has become of the connection, the next one need not care
	eval { $db->disconnect } if $db;
	undef $db;
	return;
}

# Serve a request a number of times at the most.  Returns if it was answered.
sub serve
{
	my ($q, $tries) = @_;

	for my $try (1 .. $tries)
	{
		my $fate = $mode eq 'complete' ? 'goes well' : fate();

		note('sent', $q->{n}, $fate);
		my $answer = try($q->{n}, sub { $q->{way}->($q, $fate) });
		if ($answer)
		{
			note('answer', @{$q}{qw(n kind key tenant route)},
				join(';', names($q)), map { $_ // '' } @$answer);
			return 1;
		}
		sleep(0.005 + rand(0.01));
	}
	return 0;
}

# A request with the key of another one, which has been answered
sub misuse
{
	my ($q) = @_;
	my %other = (%$q, body => '{"n": "another"}');

	return if $q->{kind} =~ /^(?:message|batch)$/;
	my $claim = try($q->{n}, sub { return claim(\%other, '') });
	note('misused', $q->{n}, $claim->{outcome}, $claim->{response} // '')
	  if $claim;
	return;
}

# A line is there or not, however we die.
sub note
{
	my (@words) = @_;

	syswrite($history, join("\t", @words) . "\n");
	return;
}

sub already_answered
{
	my %n;
	foreach my $line (split /\n/, slurp("$folder/history.$number"))
	{
		$n{$1} = 1 if $line =~ /^answer\t(\d+)\t/;
	}
	return %n;
}

sub slurp
{
	my ($file) = @_;

	open(my $handle, '<', $file) or die "$file: $!";
	local $/ = undef;
	return scalar <$handle> // '';
}

# ---------------------------------------------------------------------
# The life of a client
# ---------------------------------------------------------------------

sub step
{
	my ($step) = @_;
	my $n = $step * $clients;
	my $q = request($n + $number);

	if (serve($q, TRIES))
	{
		$answered{ $q->{n} } = 1;
		misuse($q) if rand() < 0.05;
	}
	serve(request($n + ($number + 1) % $clients), 1) if rand() < 0.25;

	# once more what was answered some time ago
	if (rand() < 0.05)
	{
		my $old = int(rand($step + 1)) * $clients + $number;
		serve(request($old), 1) if $answered{$old};
	}
	try('short', \&short_key) if rand() < 0.02;
	try('relay', \&relay) if rand() < 0.1;
	return;
}

local $SIG{PIPE} = 'IGNORE';
if ($mode eq 'run')
{
	sysseek($progress, 4 * $number, 0);
	sysread($progress, my $packed, 4);
	for my $step (unpack('N', $packed) .. $steps - 1)
	{
		sleep(0.02) while $step >= slurp("$folder/allowed");
		srand(unpack('N', sha256("$seed $number $step")));
		step($step);
		sysseek($progress, 4 * $number, 0);
		syswrite($progress, pack('N', $step + 1));
	}
}
else
{
	foreach my $n (map { $_ * $clients + $number } 0 .. $steps - 1)
	{
		next if $answered{$n};
		note('stuck', $n) unless serve(request($n), TRIES_IN_THE_END);
	}
}
