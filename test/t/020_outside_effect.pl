# The promise: a worker that calls a card network between two transactions may
# die anywhere, and still there is one payment, one charge and one answer.
# Either the client's retry completes what was begun, or a completer does, and
# no key is left unfinished.
#
# The card network, the worker and the completer are those of test/clients,
# which the README points at: they talk over real sockets, and what dies is a
# process.  A lease is made to end by setting it into the past, not by waiting
# for it.

use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use HTTP::Tiny;
use JSON::PP;
use PgIdemTest;
use POSIX qw(:sys_wait_h SIGSTOP);
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $clients = "$FindBin::RealBin/../clients";
my $node = new_node('main');

# Nothing in this table keeps a charge from being there twice.
$node->safe_psql('postgres', <<'EOS');
CREATE EXTENSION pg_idem;
CREATE TABLE charges (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	account text NOT NULL,
	key text NOT NULL,
	payment text NOT NULL,
	amount bigint NOT NULL
);
EOS
my $psql = PgIdemTest::Session->new($node, 'postgres');

# the clients find the server, and the card network, by their environment
$ENV{PGHOST} = $node->host;
$ENV{PGPORT} = $node->port;
$ENV{PGDATABASE} = 'postgres';

# no lease ends but by end_leases, however slow the machine is
my $bound = $PostgreSQL::Test::Utils::timeout_default || 180;
@ENV{qw(LEASE CALL_SECONDS)} = ('1 day', $bound);

# ---------------------------------------------------------------------
# The card network
# ---------------------------------------------------------------------

# ends with our end of the pipe, that is with us
my $network = '';
my ($network_in, $network_log) = ('', '');
my $network_timer = IPC::Run::timeout($bound);
my $network_run = IPC::Run::start(
	[ $^X, "$clients/card_network.pl" ], '<', \$network_in,
	'>', \$network, '2>', \$network_log, $network_timer);
$network_run->pump until $network =~ /\n/;
chomp $network;
$ENV{CARD_NETWORK} = $network;

my $http = HTTP::Tiny->new(proxy => undef, http_proxy => undef);

sub ask_network
{
	my ($method, $path) = @_;
	my $answer = $http->request($method, "$network$path");

	die "$method $path: $answer->{content}" unless $answer->{success};
	return decode_json($answer->{content});
}

# How many payments the network has made for a key of an account
sub payments
{
	my ($key, $account) = @_;
	$account ||= 'alice';
	my $child = $psql->query(
		"SELECT idem_child_key('$key', 'charge', 'POST /charges', '$account')");

	return
	  scalar grep { $_->{key} eq $child }
	  @{ ask_network('GET', '/payments')->{payments} };
}

sub times_asked
{
	return ask_network('GET', '/payments')->{asked};
}

# ---------------------------------------------------------------------
# Workers
# ---------------------------------------------------------------------

my $stderr_file = "$PostgreSQL::Test::Utils::tmp_check/worker.err";
my $stdout_file = "$PostgreSQL::Test::Utils::tmp_check/worker.out";

# Start a worker, for a request of Alice's if it is given a key and a body;
# returns its PID.  %env is its environment besides ours.
sub start_worker
{
	my ($env, @arguments) = @_;
	unshift @arguments, 'alice' if @arguments == 2;
	my $pid = fork;

	die "cannot fork: $!" unless defined $pid;
	return $pid if $pid;

	# the child must not run our END blocks, whatever happens
	%ENV = (%ENV, %$env);
	open(STDIN, '<', '/dev/null')
	  && open(STDOUT, '>', $stdout_file)
	  && open(STDERR, '>', $stderr_file)
	  && exec($^X, "$clients/charge_worker.pl", @arguments);
	POSIX::_exit(127);
}

# Run a worker to its end, whatever that is.  Returns its wait status.
sub run_worker
{
	my $pid = start_worker(@_);

	waitpid($pid, 0);
	return $?;
}

sub request
{
	my ($amount) = @_;
	return qq({"amount": $amount, "card": "4242 4242"});
}

# The client's retry: again and again, until there is an answer.  Returns it.
# ("in_progress" is what a client may be told while the server has not yet
# noticed that the one who died is gone.)
sub retry
{
	my ($key, $request) = @_;
	my $said = '';

	wait_until(
		sub {
			run_worker({}, $key, $request);
			$said = slurp_file($stdout_file);
			return $said ne '' && $said !~ /^in_progress /;
		});
	chomp $said;
	return $said;
}

# A completer that comes round until there is nothing left for it to do.
sub complete_all
{
	return wait_until(
		sub {
			run_worker({});
			return unfinished() == 0;
		});
}

# Claims that are neither finished nor under a live lease
sub unfinished
{
	return $psql->query('SELECT count(*) FROM idem_unfinished');
}

# The leases of all claims end.  (Waits for a worker's transaction, if the
# server has not yet noticed that it is gone.)
sub end_leases
{
	$psql->query(<<'EOS');
UPDATE idempotency_keys SET lease_until = clock_timestamp() - interval '1 s'
WHERE state = 'in_progress'
EOS
	return;
}

# What must hold for each key in the end
sub is_charged_once
{
	my ($key, $request, $what) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my $first = retry($key, $request);
	my $payment_id =
	  $psql->query("SELECT string_agg(payment, ',') FROM charges WHERE key = '$key'");

	is(payments($key), 1, "$what: one payment");
	like($payment_id, qr/^pay_\d+$/, "$what: one charge");
	like(
		$first,
		qr/^replayed 201 \{.*"payment":"$payment_id"\}$/,
		"$what: its answer is replayed");
	is(retry($key, $request), $first, "$what: and is always the same");
	is( $psql->query(
			"SELECT count(*) FROM idempotency_keys"
			  . " WHERE key = '$key' AND state = 'completed'"),
		1,
		"$what: one response is stored");
	is(unfinished(), 0, "$what: no claim is left unfinished");
	return;
}

# ---------------------------------------------------------------------
# Nobody dies
# ---------------------------------------------------------------------

is(run_worker({}, 'alive', request(1)), 0, 'a worker that lives')
  or diag(slurp_file($stderr_file));
like(
	slurp_file($stdout_file),
	qr/^started 201 \{"amount":1,"id":1,"payment":"pay_1"\}$/,
	'charges');
is_charged_once('alive', request(1), 'alive');
is(times_asked(), 1, 'and replays do not ask the network');
like(retry('alive', request(2)), qr/^mismatch 422 /, 'another request with its key');
is(run_worker({}, 'bob', 'alive', request(1)), 0, 'another account with the same key and body');
like(slurp_file($stdout_file), qr/^started 201 /, 'is charged itself');
is(payments('alive') . payments('alive', 'bob'), '11', 'each by a payment of its own');
is($psql->query("SELECT string_agg(account, ' ' ORDER BY account) FROM charges WHERE key = 'alive'"),
	'alice bob', 'and has a charge of its own');

run_worker({}, 'declined', '{"amount": 1, "card": "4000 0002"}');
like(slurp_file($stdout_file), qr/^started 402 .*card declined/, 'a card is declined');
like(
	retry('declined', '{"amount": 1, "card": "4000 0002"}'),
	qr/^replayed 402 .*card declined/,
	'which is an answer like any other');
is($psql->query("SELECT count(*) FROM charges WHERE key = 'declined'"),
	0, 'without a charge');

# ---------------------------------------------------------------------
# Death at each step
# ---------------------------------------------------------------------

# The step; what the card network is told to do; how many times it is asked
# in the end; and what stands in the claim when the worker is gone.
my @deaths = (
	[ 'before the call', undef, 1, 'received' ],
	[ 'during the call', 'before', 2, 'received' ],
	[ 'with the answer lost', 'after', 2, 'received' ],
	[ 'after the call', undef, 2, 'received' ],
	[ 'after the checkpoint', undef, 1, 'charged' ],
	[ 'before the commit', undef, 1, 'charged' ],
	[ 'after the finish', undef, 1, undef ]);

my $amount = 100;

foreach my $completes ('client', 'completer')
{
	foreach my $death (@deaths)
	{
		my ($step, $cut, $asked, $left) = @$death;
		my $what = "death $step, $completes";
		my $key = $what =~ s/\W+/-/gr;
		my $request = request(++$amount);
		my $before = times_asked();

		ask_network('POST', "/cut/$cut") if $cut;
		my $status = run_worker({ DIE_AT => $step }, $key, $request);
		if ($cut)
		{
			isnt($status, 0, "$what: the worker gives up");
			is(payments($key), $cut eq 'before' ? 0 : 1,
				"$what: and cannot know whether it was paid");
		}
		else
		{
			is($status & 127, 9, "$what: the worker is killed");
		}

		# a retry while the lease is live does nothing
		if ($left)
		{
			is( $psql->query(
					"SELECT state, step FROM idempotency_keys WHERE key = '$key'"
				),
				"in_progress|$left",
				"$what: what is left");
			run_worker({}, $key, $request);
			like(slurp_file($stdout_file), qr/^in_progress 409 /,
				"$what: a retry is told to wait");
		}

		end_leases();
		is(unfinished(), $left ? 1 : 0, "$what: unfinished");
		if ($completes eq 'completer')
		{
			ok(complete_all(), "$what: the completer finishes it")
			  or diag(slurp_file($stderr_file));
		}
		else
		{
			like(
				retry($key, $request),
				$left ? qr/^resumed 201 / : qr/^replayed 201 /,
				"$what: the retry finishes it");
		}

		is_charged_once($key, $request, $what);
		is(times_asked() - $before, $asked, "$what: calls of the network");
		is( $psql->query(
				"SELECT attempt FROM idempotency_keys WHERE key = '$key'"),
			$left ? 2 : 1,
			"$what: attempts");
	}
}

# The completer may die as well, and so may the next one.
{
	my $key = 'death-of-completers';
	my $request = request(++$amount);

	run_worker({ DIE_AT => 'before the call' }, $key, $request);
	foreach my $step ('after the call', 'after the checkpoint',
		'before the commit')
	{
		end_leases();
		is(run_worker({ DIE_AT => $step }) & 127,
			9, "the completer is killed $step");
	}
	end_leases();
	ok(complete_all(), 'the last one lives');
	is_charged_once($key, $request, 'death of completers');
}

# ---------------------------------------------------------------------
# Not dead at all
# ---------------------------------------------------------------------

# A worker that only seemed dead wakes up when its request has been completed
# by somebody else.  Whatever it does next, nothing comes of it.
foreach my $step ('before the call', 'after the call',
	'after the checkpoint')
{
	my $what = "asleep $step";
	my $key = $what =~ s/\W+/-/gr;
	my $request = request(++$amount);

	my $pid = start_worker({ DIE_AT => $step, DIE_BY => 'STOP' },
		$key, $request);
	waitpid($pid, WUNTRACED);
	ok(WIFSTOPPED(${^CHILD_ERROR_NATIVE}), "$what: the worker sleeps");

	end_leases();
	ok(complete_all(), "$what: the completer finishes its work");

	kill 'CONT', $pid;
	waitpid($pid, 0);
	isnt($?, 0, "$what: the worker wakes up, and fails");
	like(slurp_file($stderr_file), qr/claim .* is stale/,
		"$what: for it has lost its claim");
	is_charged_once($key, $request, $what);
}

# Two completers at once share the claims out.
{
	my @keys = map { "shared-$_" } 1 .. 8;

	run_worker({ DIE_AT => 'before the call' }, $_, request(7)) for @keys;
	end_leases();
	is(unfinished(), 8, 'eight claims');
	my @completers = map { start_worker({}) } 1 .. 3;
	my $failed = grep { waitpid($_, 0); $? != 0 } @completers;
	is($failed, 0, 'three completers at once');
	is_charged_once($_, request(7), $_) for @keys;
	is( $psql->query(
			"SELECT DISTINCT attempt FROM idempotency_keys WHERE key ~ '^shared-'"
		),
		2,
		'each claim went to one of them');
}

is($psql->query('SELECT count(*) FROM charges'),
	scalar @{ ask_network('GET', '/payments')->{payments} },
	'as many charges as payments');
is($psql->query('SELECT count(DISTINCT payment) FROM charges'),
	$psql->query('SELECT count(*) FROM charges'),
	'each for its own');

# its standard input ends, and so does it
$network_timer->start($bound);
$network_run->finish;
is($network_log, '', 'the card network has nothing to complain of');

$psql->quit;
$node->stop;
done_testing();
