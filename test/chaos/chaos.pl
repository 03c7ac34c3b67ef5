# The promise under everything at once: many clients retry, hedge, give up, roll
# back and prepare, while they, their backends, the workers and the server are
# killed, slots and disk run out, and a standby takes over.
# However often a request was sent, its effect is there once, and everyone was
# told the answer that is stored with it.
#
# The clients are test/clients/chaos.pl.  Each writes down what it sends and
# what it is told; no constraint in the tables of the effects keeps anything
# from being there twice.  When all are through, what has no answer yet is
# completed in peace, and then the histories, the effects and the stores must
# agree.
#
# SEED repeats a run: the requests, their fates and the faults are drawn from
# it.  (What meets what is up to the machine.)  REQUESTS and FAULTS say how
# many.

use strict;
use warnings;

use DBI;
use FindBin;
use lib "$FindBin::RealBin/../t";
use PgIdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use POSIX qw(:sys_wait_h);
use Test::More;
use Time::HiRes qw(sleep);

my $seed = $ENV{SEED} // int(rand(1_000_000));
my $clients = 12;
my $steps = int(($ENV{REQUESTS} || 3_000) / $clients);
my $faults = $ENV{FAULTS} || 40;
my $failovers = 1 + int($faults / 200);
my $bound = $PostgreSQL::Test::Utils::timeout_default || 180;

my $folder = "$PostgreSQL::Test::Utils::tmp_check/chaos";
my $program = "$FindBin::RealBin/../clients/chaos.pl";
my %pid;               # of each client
my %done;              # clients that have come to the end of their plan
my %times;             # how many faults of each kind
my @after;             # what is to be done before the next fault

srand($seed);
diag("SEED=$seed REQUESTS=" . $steps * $clients . " FAULTS=$faults");

# ---------------------------------------------------------------------
# The server
# ---------------------------------------------------------------------

# Small segments of WAL: a limit on the size of files that lets them be
# written stands for a disk that is full for tables and indexes.
my $node = PostgreSQL::Test::Cluster->new('first');
$node->init(allows_streaming => 1, extra => ['--wal-segsize=1']);
$node->append_conf('postgresql.conf', <<EOC);
shared_preload_libraries = 'pg_idem'
pg_idem.expire_naptime = 1s
pg_idem.max_attempts = 10000
pg_idem.retry_ratio = 1000
max_prepared_transactions = 8
max_connections = 40
shared_buffers = 32MB
restart_after_crash = on
min_wal_size = 4MB
max_wal_size = 64MB
log_statement = none
log_min_messages = log
log_line_prefix = '%m [%p] %e %b '
EOC

sub write_file
{
	my ($name, $text) = @_;

	# in one step, for whoever reads it just now
	open(my $file, '>', "$folder/$name.new") or die "$folder/$name.new: $!";
	print $file $text;
	close $file;
	rename("$folder/$name.new", "$folder/$name") or die "rename: $!";
	return;
}

# A connection of our own, for which what is set for the clients does not count;
# the server may be recovering.
sub ask
{
	my ($sql, @values) = @_;
	my $answer;

	wait_until(sub {
		my $db = DBI->connect('dbi:Pg:' . $node->connstr('postgres')
			  . q{ options='-c statement_timeout=0 -c lock_timeout=0'},
			undef, undef, { PrintError => 0, RaiseError => 0, AutoCommit => 1 });
		return 0 unless $db;
		my $statement = $db->prepare($sql);
		if ($statement->execute(@values))
		{
			$answer = $statement->{NUM_OF_FIELDS} ? $statement->fetchall_arrayref : [];
		}
		my ($state, $error) = ($db->state, $db->errstr);
		$db->disconnect;
		die "$sql: $error"
		  unless !$state || $state =~ /^(?:08|25006|40|53|55P03|57|58)/;
		return !$state && $answer;
	}) or die "the server does not answer: $sql";
	return $answer;
}

# ---------------------------------------------------------------------
# The clients
# ---------------------------------------------------------------------

sub start_client
{
	my ($number, $mode) = @_;
	my $pid = fork() // die "fork: $!";

	if (!$pid)
	{
		exec($^X, $program, $folder, $number, $mode) or POSIX::_exit(127);
	}
	$pid{$number} = $pid;
	return;
}

# Take notice of clients that have ended; those that were killed go on where
# they were.
sub look_after_clients
{
	my ($mode) = @_;

	foreach my $number (sort keys %pid)
	{
		next unless waitpid($pid{$number}, WNOHANG) == $pid{$number};
		my $status = $?;
		delete $pid{$number};
		if ($status == 0) { $done{$number} = 1; }
		elsif (WIFSIGNALED($status) && WTERMSIG($status) == 9)
		{
			start_client($number, $mode);
		}
		else { die "client $number has failed: $status"; }
	}
	return;
}

sub progress
{
	my $sum = 0;

	$sum += $_ foreach unpack('N*', slurp_file("$folder/progress"));
	return $sum / ($steps * $clients);
}

# Let the clients work until they have done their part, or are through, or the
# last fault lets nobody through.
sub let_them_work
{
	my ($part) = @_;
	my ($last, $idle) = (progress(), 0);

	# a little further, so that nobody waits for whom the fault has stopped
	write_file('allowed', int($part * $steps) + 2);
	for (;;)
	{
		look_after_clients('run');
		my $now = progress();
		return if !%pid || $now >= $part;
		$idle = $now == $last ? $idle + 1 : 0;
		$last = $now;
		return if @after && $idle > 20;
		die 'the clients are stuck' if $idle > 50 * $bound;
		sleep(0.02);
	}
	return;
}

# ---------------------------------------------------------------------
# Faults
# ---------------------------------------------------------------------

sub backends
{
	my ($n, $type) = @_;

	return map { $_->[0] } @{
		ask('SELECT pid FROM pg_stat_activity WHERE application_name = ?
				OR backend_type = ? ORDER BY random() LIMIT ?',
			$type || 'chaos', $type || '', $n) };
}

sub signal_backends
{
	my ($function, @pids) = @_;

	ask("SELECT $function(p) FROM unnest(?::int[]) p", \@pids);
	return;
}

# The server starts anew.  Whoever needs it next waits until it is back.
sub crash
{
	my ($pid) = @_;

	# it may have gone just now
	kill 9, $pid if $pid;
	return;
}

sub restart
{
	my ($mode) = @_;

	$node->stop($mode);
	$node->start;
	return;
}

sub one_client { return $pid{ (sort keys %pid)[ rand keys %pid ] } }

# Those that a standby knows nothing of: a COMMIT that is canceled while it
# waits for the standby is done, as it says, and so may be lost with its server.
my @alone = (
	cancel => sub { signal_backends('pg_cancel_backend', backends(1)) },
	cancel => sub { signal_backends('pg_cancel_backend', backends(3)) },
	'cancel storm' => sub {
		signal_backends('pg_cancel_backend', backends(1000)) for 1 .. 10;
	},
	'statement timeout' => sub {
		set_for_a_while("statement_timeout = '4ms'");
	},
	'lock timeout' => sub { set_for_a_while("lock_timeout = '1ms'") },
	'kill -9 of a backend' => sub { crash(backends(1)) },
	'kill -9 of a worker' => sub {
		crash(backends(1, rand() < 0.5 ? 'pg_idem launcher' : 'pg_idem expiry worker'));
	},
	'immediate stop' => sub { restart('immediate') },
	'fast restart' => sub { restart('fast') },
	'disk full' => \&fill_disk,
	'disk full' => \&fill_disk,
	'slots exhausted' => \&exhaust_slots);

my @anywhere = (
	terminate => sub { signal_backends('pg_terminate_backend', backends(1)) },
	terminate => sub { signal_backends('pg_terminate_backend', backends(3)) },
	'terminate all' => sub { signal_backends('pg_terminate_backend', backends(1000)) },
	'terminate a worker' => sub {
		signal_backends('pg_terminate_backend', backends(1, 'pg_idem expiry worker'),
			backends(1, 'pg_idem launcher'));
	},
	'kill -9 of a client' => sub { kill 9, one_client() },
	'kill -9 of a client' => sub { kill 9, one_client() },
	'client stops' => sub {
		my $pid = one_client();
		kill 'STOP', $pid;
		push @after, sub { kill 'CONT', $pid };
	},
	'prepared transactions end' => \&end_prepared);

sub set_for_a_while
{
	my ($setting) = @_;
	my ($name) = split / /, $setting;

	# for those who connect from now on, and soon all do
	ask("ALTER DATABASE postgres SET $setting");
	push @after, sub { ask("ALTER DATABASE postgres RESET $name") };
	signal_backends('pg_terminate_backend', backends(3));
	return;
}

# Files of these backends cannot grow beyond a megabyte.
sub fill_disk
{
	my @full = backends(4);

	limit_files(1024 * 1024, @full);
	push @after, sub { limit_files('unlimited', @full) };
	return;
}

sub limit_files
{
	my ($bytes, @pids) = @_;

	# those that have gone meanwhile need no limit
	foreach my $pid (@pids)
	{
		run_log([ 'prlimit', "--fsize=$bytes:", '--pid', $pid ]);
	}
	return;
}

sub exhaust_slots
{
	my @held;

	for (1 .. 50)
	{
		push @held,
		  DBI->connect('dbi:Pg:' . $node->connstr('postgres'), undef, undef,
			{ PrintError => 0, AutoInactiveDestroy => 1 }) || last;
	}
	push @after, sub { $_->disconnect foreach @held };

	# nobody else can connect now, so those who have to will be refused
	$held[0]->do(q{SELECT pg_terminate_backend(pid) FROM pg_stat_activity
			WHERE application_name = 'chaos' AND random() < 0.3})
	  if @held;
	return;
}

# What clients have left prepared ends one way or the other.
sub end_prepared
{
	foreach my $row (@{ ask('SELECT gid FROM pg_prepared_xacts') })
	{
		my $how = rand() < 0.5 ? 'COMMIT' : 'ROLLBACK';
		# its client may do it just now
		eval { ask("$how PREPARED '$row->[0]'") };
	}
	return;
}

# Do what ends the last fault, then another one.
sub fault
{
	my @kinds = @_;
	my $i = 2 * int(rand(@kinds / 2));

	calm();
	return unless %pid;
	# before the fault, which may leave no connection for it
	end_prepared() if rand() < 0.2;
	$kinds[ $i + 1 ]->();
	$times{ $kinds[$i] }++;
	return;
}

sub calm
{
	$_->() foreach splice @after;
	return;
}

# ---------------------------------------------------------------------
# A standby that takes over
# ---------------------------------------------------------------------

my $standby;

# A commit is answered when the standby has it.
sub attach_standby
{
	my ($name) = @_;

	# the last fault may be a crash
	ask('CHECKPOINT');
	$node->backup($name);
	$standby = PostgreSQL::Test::Cluster->new($name);
	$standby->init_from_backup($node, $name, has_streaming => 1);
	$standby->append_conf('postgresql.conf',
		"primary_conninfo = '" . $node->connstr . " application_name=standby'");
	$standby->start;
	ask(q{ALTER SYSTEM SET synchronous_standby_names = 'standby'});
	ask('SELECT pg_reload_conf()');
	wait_until(sub {
		ask(q{SELECT count(*) FROM pg_stat_replication
				WHERE sync_state = 'sync' AND state = 'streaming'})->[0][0];
	}) or die 'the standby does not stream';
	return;
}

sub fail_over
{
	my $old = $node;

	$old->stop('immediate');
	$standby->promote;
	$node = $standby;
	# it has the setting too, and no standby
	ask(q{ALTER SYSTEM SET synchronous_standby_names = ''});
	ask('SELECT pg_reload_conf()');
	write_file('where', $node->connstr('postgres'));
	$old->clean_node;
	return;
}

# ---------------------------------------------------------------------
# The run
# ---------------------------------------------------------------------

mkdir $folder or die "$folder: $!";
write_file('plan', "$seed $clients $steps");
write_file('allowed', 0);
write_file('progress', pack('N*', (0) x $clients));
write_file('where', $node->connstr('postgres'));
append_to_file("$folder/history.$_", '') foreach 0 .. $clients - 1;

$node->start;
$node->safe_psql('postgres', <<'EOS');
CREATE EXTENSION pg_idem;
CREATE TABLE effects (kind text, name text, nonce text);
CREATE TABLE outside (name text, child_key uuid);
CREATE FUNCTION chaos_work(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
	response jsonb := current_setting('chaos.response');
BEGIN
	INSERT INTO effects VALUES ('call', current_setting('chaos.name'), response ->> 'nonce');
	RETURN response;
END $$;
-- no store, though of its type: the sweep passes it over
CREATE ROLE stranger;
CREATE SCHEMA strange AUTHORIZATION stranger;
SELECT idem_grant('stranger');
SET ROLE stranger;
CREATE TABLE strange.nameless OF idempotency_key;
INSERT INTO strange.nameless (state, expires_at)
SELECT 'completed', '2000-01-01' FROM generate_series(1, 10);
EOS

start_client($_, 'run') foreach 0 .. $clients - 1;
my @logs = ($node->logfile);

# One server, with whatever can happen to it, then two
my $alone = $faults - 8 * $failovers;
for my $i (1 .. $alone)
{
	let_them_work(0.8 * $i / ($alone + 1));
	fault(@alone, @anywhere);
}
calm();
for my $i (1 .. $failovers)
{
	attach_standby("standby$i");
	push @logs, $standby->logfile;
	for my $j (1 .. 7)
	{
		let_them_work(0.8 + 0.2 * ($i - 1 + $j / 8) / ($failovers + 1));
		fault(@anywhere);
	}
	calm();
	fail_over();
	$times{failover}++;
}
let_them_work(2);
is(scalar keys %done, $clients, 'all clients have got through');

# Peace: each client completes what it has no answer for.
calm();
end_prepared() while ask('SELECT count(*) FROM pg_prepared_xacts')->[0][0];
%done = ();
start_client($_, 'complete') foreach 0 .. $clients - 1;
ok( wait_until(sub { look_after_clients('complete'); return !%pid; }),
	'what had no answer was completed');

# ---------------------------------------------------------------------
# The verdict
# ---------------------------------------------------------------------

my (%sent, @bad, %seen);
my ($answers, $misuses) = ('', '');
foreach my $number (0 .. $clients - 1)
{
	foreach my $line (split /\n/, slurp_file("$folder/history.$number"))
	{
		my ($what, @rest) = split /\t/, $line, -1;

		$seen{$what}++;
		$seen{"error $rest[0]"}++ if $what eq 'error';
		push @bad, $line if $what =~ /^(?:bad|stuck)$/;
		$answers .= join("\t", map { s/\\/\\\\/gr } @rest) . "\n" if $what eq 'answer';
		$misuses .= join("\t", map { s/\\/\\\\/gr } @rest) . "\n" if $what eq 'misused';
	}
}
is(join("\n", @bad[ 0 .. ($#bad > 9 ? 9 : $#bad) ]),
	'', 'no client met an error that no fault explains');

write_file('answers', $answers);
write_file('misuses', $misuses);
$node->safe_psql('postgres', <<"EOS");
CREATE TABLE answers (n int, kind text, key text, tenant text, route text,
	names text, outcome text, status text, response text);
COPY answers FROM '$folder/answers';
CREATE TABLE misuses (n int, outcome text, response text);
COPY misuses FROM '$folder/misuses';
CREATE VIEW wanted AS
	SELECT DISTINCT kind, unnest(string_to_array(names, ';')) AS name FROM answers;
ANALYZE;
EOS

sub none
{
	my ($query, $what) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is($node->safe_psql('postgres', "$query LIMIT 5"), '', $what);
	return;
}

# messages of the outbox that are still on their way
ok( $node->poll_query_until('postgres', <<'EOS'), 'the outbox is delivered');
WITH m AS MATERIALIZED (SELECT * FROM idem_outbox_take('chaos', 1000, '1 s')),
	e AS (INSERT INTO effects (kind, name)
		SELECT 'delivered', m.payload ->> 'name' FROM m
		WHERE idem_receive('relay', m.message_id::text) RETURNING 1),
	d AS MATERIALIZED (SELECT idem_outbox_done(m.id, m.attempt) FROM m)
SELECT count(*) = 0 AND (SELECT count(*) FROM idem_outbox) = 0 FROM d
EOS

is($node->safe_psql('postgres', 'SELECT count(DISTINCT n) FROM answers'),
	$steps * $clients, 'every request has an answer');
none(<<'EOS', 'no effect is there twice');
SELECT kind, name, count(*) FROM effects GROUP BY 1, 2 HAVING count(*) > 1
EOS
none(<<'EOS', 'no effect is lost');
SELECT * FROM wanted w WHERE NOT EXISTS (
	SELECT FROM effects e WHERE e.kind = w.kind AND e.name = w.name)
EOS
none(<<'EOS', 'no effect is there that nobody asked for');
SELECT kind, name FROM effects WHERE kind NOT IN ('reserved', 'delivered')
EXCEPT SELECT kind, name FROM wanted
EOS
none(<<'EOS', 'every message that was published was delivered');
(SELECT name FROM effects WHERE kind = 'published'
	EXCEPT SELECT name FROM effects WHERE kind = 'delivered')
UNION ALL
(SELECT name FROM effects WHERE kind = 'delivered'
	EXCEPT SELECT name FROM effects WHERE kind = 'published')
EOS
none(<<'EOS', 'what goes with a checkpoint is there for each worker that has finished');
SELECT name FROM effects WHERE kind = 'worker'
EXCEPT SELECT name FROM effects WHERE kind = 'reserved'
EOS
none(<<'EOS', 'all attempts of a request name it alike elsewhere');
SELECT name FROM outside GROUP BY 1 HAVING count(DISTINCT child_key) > 1
EOS
none(<<'EOS', 'every answer is the one that is stored');
SELECT a.n, a.kind, a.outcome, a.status, a.response, k.status, k.response
FROM answers a LEFT JOIN idempotency_keys k USING (key, tenant, route)
WHERE a.kind NOT IN ('message', 'batch') AND
	(a.outcome IN ('started', 'resumed', 'replayed') AND k.state = 'completed' AND
		k.status::text = a.status AND k.response = a.response::jsonb) IS NOT TRUE
EOS
none(<<'EOS', 'every answer is for the request and its tenant');
SELECT n, tenant, response FROM answers
WHERE response <> '' AND
	(response::jsonb ->> 'tenant', response::jsonb ->> 'n') IS DISTINCT FROM (tenant, n::text)
EOS
none(<<'EOS', 'every answer tells of the effect that is there');
SELECT a.n, a.kind, a.response, e.nonce
FROM answers a JOIN effects e ON e.kind = a.kind AND e.name = a.names
WHERE a.response <> '' AND a.response::jsonb ->> 'nonce' IS DISTINCT FROM e.nonce
EOS
none(<<'EOS', 'another request under a used key is refused');
SELECT * FROM misuses WHERE outcome <> 'mismatch' OR response <> ''
EOS
none(<<'EOS', 'no key is stuck');
SELECT key, tenant, route, state, lease_until FROM idempotency_keys
WHERE state = 'in_progress' OR state = 'failed'
EOS
ok( $node->poll_query_until('postgres',
		q{SELECT count(*) = 0 FROM idempotency_keys WHERE route = 'short'}),
	'what was to be forgotten is forgotten');
is($node->safe_psql('postgres', 'SELECT count(*) FROM strange.nameless'),
	10, 'what is no store was left alone');

# the table and its primary key
my $sum = 'SELECT count(*), sum(hashtext(key || tenant || route || state)) FROM idempotency_keys';
is( $node->safe_psql('postgres',
		"SET enable_seqscan = off; SET enable_bitmapscan = off; $sum WHERE key > ''"),
	$node->safe_psql('postgres', "SET enable_indexscan = off;
		SET enable_indexonlyscan = off; SET enable_bitmapscan = off; $sum"),
	'the index has what the table has');

my $crashes = 0;
my @log;
foreach my $file (@logs)
{
	open(my $log, '<', $file) or next;
	while (my $line = <$log>)
	{
		$crashes++ if $line =~ /terminated by signal 9/;
		push @log, $line
		  if $line =~ /TRAP:|terminated by signal (?!9|15)|\] XX(?!.*: File too large)/;
	}
}
is(join('', @log[ 0 .. ($#log > 9 ? 9 : $#log) ]),
	'', 'the servers have not met what they should not');

# ---------------------------------------------------------------------
# Figures
# ---------------------------------------------------------------------

my $total = 0;
$total += $_ foreach values %times;
diag("$seen{sent} requests of " . $steps * $clients
	  . ' distinct ones, ' . ($seen{error} || 0) . " errors, $total faults");
diag('faults: ' . join(', ', map { "$times{$_} $_" } sort keys %times));
diag('errors: ' . join(', ', map { /^error (.*)/ ? "$seen{$_} $1" : () } sort keys %seen));
diag('outcomes: ' . join(', ', map { "$_->[1] $_->[0]" } @{
	ask('SELECT outcome, count(*) FROM answers GROUP BY 1 ORDER BY 1') }));
diag("to repeat it: SEED=$seed") unless Test::More->builder->is_passing;

$node->stop;
done_testing();

END
{
	# stopped ones, too
	kill 9, $_ foreach values %pid;
}
