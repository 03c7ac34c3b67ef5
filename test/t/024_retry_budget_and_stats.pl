# The promise: a storm of retries runs failed work again only as often as the
# route's budget allows; who is refused is told when to come back, and keeps
# nobody from the key.  What need not run again is never refused.  And what
# idem_stat_routes tells is what has happened.

use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use PgIdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main', <<EOC);
pg_idem.expire = off
pg_idem.max_attempts = 100
pg_idem.retry_ratio = 0
pg_idem.retry_min_per_second = 0
max_connections = 120
EOC
$node->safe_psql(
	'postgres', q(
CREATE EXTENSION pg_idem;
CREATE TABLE answers (outcome text);
CREATE FUNCTION work(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO answers VALUES ('worked');
	RETURN request;
END $$;
));
my $one = PgIdemTest::Session->new($node, 'postgres');
my $two = PgIdemTest::Session->new($node, 'postgres');

# What idem_begin answers, in a few words
sub begin
{
	my ($session, $key, $route, $columns, $hash) = @_;

	$columns ||= 'outcome';
	$hash ||= 'NULL';
	return $session->query("SELECT $columns FROM idem_begin('$key', '$route', $hash)");
}

sub finish
{
	my ($session, $key, $route, $status, $attempt) = @_;
	return $session->query("SELECT idem_finish('$key', NULL, $status, route => '$route', attempt => $attempt)");
}

# A key whose first attempt has failed
sub failed
{
	my ($key, $route) = @_;

	begin($one, $key, $route);
	finish($one, $key, $route, 503, 1);
	return;
}

# Columns of view idem_stat_routes
sub stats
{
	my ($route, $columns) = @_;
	return $two->query("SELECT $columns FROM idem_stat_routes WHERE route = '$route'");
}

# Columns of table idem_route_policies
sub route_policy
{
	my ($route, $ratio, $min) = @_;

	$two->query("INSERT INTO idem_route_policies (route, retry_ratio, retry_min_per_second)"
		  . " VALUES ('$route', $ratio, $min)");
	return;
}

#
# No budget at all
#
failed('k', 'none');
my $terms = 'proceed, outcome, status, attempt, expires_at IS NOT NULL, response, body, headers, step, '
  . "retry_after BETWEEN '1 s' AND '10 s'";
is(begin($one, 'k', 'none', $terms), 'f|throttled|429|1|t|||||t', 'a failed key is refused');
is( $one->query(q(
SELECT count(DISTINCT retry_after) > 10, min(retry_after) >= '1 s', max(retry_after) <= '10 s'
FROM generate_series(1, 100) i, LATERAL idem_begin('k', 'none', NULL, tenant => left('', i)))),
	't|t|t', 'not all are told to come back at once');
is(begin($one, 'k', 'none', 'outcome, retry_after IS NULL', "'\\x01'"),
	'mismatch|t', 'another request is a mismatch');

# ... keeps nobody from the key
$one->query("BEGIN; SELECT idem_begin('k', 'none', NULL)");
is(begin($one, 'k', 'none'), 'throttled', 'a transaction that was refused');
is($two->query('SET pg_idem.retry_min_per_second = 0.1; BEGIN;'
		  . "SELECT outcome, attempt FROM idem_begin('k', 'none', NULL)"),
	'resumed|2', 'leaves the key to one that is not');
is(begin($one, 'k', 'none'), 'in_progress', 'the first one sees it at work');
$two->query("SELECT idem_finish('k', NULL, 503, route => 'none'); COMMIT; RESET pg_idem.retry_min_per_second");
is(begin($one, 'k', 'none', 'outcome, attempt'), 'throttled|2', 'and its failure, and is refused again');
$one->query('ROLLBACK');
is( $two->query("SELECT count(*) FROM idempotency_keys WHERE key = 'k' AND state = 'failed' AND attempt = 2"),
	1, 'which has changed nothing');
$two->query('SET pg_idem.retry_min_per_second = 1e300');
is(begin($two, 'k', 'none'), 'resumed', 'a minimum that allows all');
finish($two, 'k', 'none', 200, 3);
$two->query('RESET pg_idem.retry_min_per_second');

# A ratio is one of the requests in the window, and of no request allows none.
my @counts = in_one_window(
	sub {
		my ($n) = @_;

		failed("k$n", "any$n");
		$two->query('SET pg_idem.retry_ratio = 1e300');
		my $said = begin($two, "k$n", "any$n");
		$two->query('RESET pg_idem.retry_ratio');
		return (stats("any$n", "clock_timestamp() < since + interval '9 s'"), $said);
	});
is($counts[0], 'resumed', 'a ratio that allows all');

# What need not run again is never refused
is(begin($one, 'k', 'none'), 'replayed', 'no budget: a replay');
failed('used up', 'none');
is($one->query("SET pg_idem.max_attempts = 1; SELECT outcome, status FROM idem_begin('used up', 'none', NULL)"),
	'replayed|503', 'no budget: the last failure');
$one->query('RESET pg_idem.max_attempts');
$one->query("BEGIN; SELECT idem_begin('running', 'none', NULL)");
is(begin($two, 'running', 'none'), 'in_progress', 'no budget: in progress');
$one->query('COMMIT');
is(begin($two, 'running', 'none'), 'in_progress', 'no budget: under a lease');
is( $one->query("BEGIN; SELECT idem_begin('own', 'none', NULL); SELECT idem_finish('own', NULL, 503);"
		  . "SELECT outcome FROM idem_begin('own', 'none', NULL); COMMIT") =~ s/.*\n//sr,
	'replayed', 'no budget: a failure of the same transaction');
failed('gone', 'none');
$two->query("UPDATE idempotency_keys SET expires_at = '2000-01-01' WHERE key = 'gone'");
is(begin($one, 'gone', 'none'), 'started', 'no budget: a key that has expired');

# idem_call
$one->query("BEGIN; SELECT idem_begin('call', 'none', idem_hash('1'::jsonb));"
	  . "SELECT idem_finish('call', NULL, 503, route => 'none'); COMMIT");
my $call = "SELECT proceed, outcome, status, attempt, response, retry_after >= '1 s'"
  . " FROM idem_call('call', 'none', '1', 'work(jsonb)')";
is($one->query($call), 'f|throttled|429|1||t', 'idem_call is refused');
is($one->query('SELECT count(*) FROM answers'), 0, 'and has not worked');
is($one->query("SET pg_idem.retry_min_per_second = 1e300; $call; RESET pg_idem.retry_min_per_second"),
	'f|resumed|200|2|1|', 'until it may');
is($one->query('SELECT count(*) FROM answers'), 1, 'once');

#
# Lost leases: taken over without asking, and counted
#
@counts = in_one_window(
	sub {
		my ($n) = @_;
		my $route = "lost$n";
		my @said;

		route_policy($route, 0, 0);
		begin($one, "$_$n", $route) foreach qw(lost released completer);
		$two->query("UPDATE idempotency_keys SET lease_until = '2000-01-01'"
			  . " WHERE key IN ('lost$n', 'completer$n')");
		$one->query("SELECT idem_release('released$n', '$route', attempt => 1)");
		push @said, begin($one, "lost$n", $route), begin($one, "released$n", $route),
		  $one->query("SELECT key, attempt FROM idem_resume(1, '$route', key => 'completer$n')");
		failed("failed$n", $route);

		# three retries have been; the fourth one is the last one
		$two->query("UPDATE idem_route_policies SET retry_min_per_second = 0.3 WHERE route = '$route'");
		push @said, begin($one, "failed$n", $route);
		$two->query("UPDATE idem_route_policies SET retry_min_per_second = 0.4 WHERE route = '$route'");
		push @said, begin($one, "failed$n", $route);
		finish($one, "failed$n", $route, 503, 2);
		push @said, begin($one, "failed$n", $route),
		  stats($route, 'resumed, throttled, window_requests, window_retries');
		return (stats($route, "clock_timestamp() < since + interval '9 s'"),
			join(' ', @said) =~ s/completer\d+/completer/r);
	});
is($counts[0], 'resumed resumed completer|2 throttled resumed throttled 4|2|4|4',
	'claims that were lost are taken over whatever the budget says, and count');

# A retry that is not to be had, as somebody holds the row, is not spent.
route_policy('busy', 0, 0.1);
failed('k', 'busy');
$two->query("BEGIN; SELECT FROM idempotency_keys WHERE route = 'busy' FOR UPDATE");
is(begin($one, 'k', 'busy', 'outcome, retry_after IS NOT NULL'), 'in_progress|t', 'a row in use')
  foreach 1 .. 3;
is($one->query("SELECT outcome FROM idem_begin('k', 'busy', NULL, wait => '50 ms')"),
	'in_progress', 'also for one who waits');
is(stats('busy', 'in_progress, resumed, throttled, window_retries'), '4|0|0|0', 'nothing is spent');
$two->query('ROLLBACK');
is(begin($one, 'k', 'busy'), 'resumed', 'the one retry is still there');

# The policy of a route wins over the settings, each column by itself.
@counts = in_one_window(
	sub {
		my ($n) = @_;
		my @said;

		$two->query('TRUNCATE idempotency_keys, idem_route_policies');
		route_policy("ratio$n", 0.5, 'NULL');
		route_policy("min$n", 'NULL', 0.1);
		foreach my $route ("ratio$n", "min$n", "no policy$n")
		{
			failed("k$_", $route) foreach 1 .. 4;
			push @said, map { begin($one, "k$_", $route) } 1 .. 4;
		}
		return (stats("ratio$n", "clock_timestamp() < since + interval '9 s'"), join(' ', @said));
	});
is( $counts[0],
	join(' ', qw(resumed resumed throttled throttled), qw(resumed throttled throttled throttled),
		('throttled') x 4),
	'routes with policies of their own');

#
# 64 connections, each with (up to) ten keys that have failed
#
@counts = in_one_window(
	sub {
		my ($n, $part) = @_;
		my $route = "storm$n";
		my $each = int(10 * $part) || 1;
		my $keys = 64 * $each;

		$two->query('TRUNCATE answers, idempotency_keys;'
			  . 'DROP SEQUENCE IF EXISTS keys; CREATE SEQUENCE keys');
		route_policy($route, 0.125, 0.5);
		$two->query(qq(
SELECT count(idem_begin(i::text, '$route', NULL)) FROM generate_series(1, $keys) i;
SELECT count(idem_finish(i::text, NULL, 503, attempt => 1)::text) FROM generate_series(1, $keys) i;));
		hammer($node, '64 clients, failed keys', <<"EOS", '--client=64', "--transactions=$each");
BEGIN;
SELECT nextval('keys') AS key \\gset
WITH c AS MATERIALIZED (SELECT * FROM idem_begin(:key::text, '$route', NULL)),
	a AS (INSERT INTO answers SELECT outcome FROM c)
SELECT idem_finish(:key::text, NULL, 503, attempt => c.attempt) FROM c WHERE c.proceed;
COMMIT;
EOS
		return (stats($route, "clock_timestamp() < since + interval '9 s'"), $keys,
			stats($route, 'started, resumed, throttled, failed, window_requests, window_retries'),
			$one->query("SELECT string_agg(o, ' ' ORDER BY o)"
				  . " FROM (SELECT outcome || count(*) AS o FROM answers GROUP BY outcome) a"));
	});
my ($keys, $counted, $told) = @counts;
my $may = 0.125 * $keys + 0.5 * 10;
my $not = $keys - $may;
note("$keys keys");
is( $counted, join('|', $keys, $may, $not, $keys + $may, $keys, $may),
	'as many run again as may, and no more');
is($told, "resumed$may throttled$not", 'all were told');

#
# What is counted
#
$two->query('TRUNCATE idempotency_keys, idem_route_policies');
my $all = 'started, resumed, replayed, in_progress, mismatch, expired, unknown, throttled,'
  . ' completed, failed, stale';
begin($one, "$_", 'all') foreach 1 .. 9;				# 9 started
begin($two, '1', 'all') foreach 1 .. 4;					# 4 in_progress
begin($two, '1', 'all', 'outcome', "'\\x01'") foreach 1 .. 3;	# 3 mismatch
finish($one, $_, 'all', 200, 1) foreach 1 .. 6;			# 6 completed
begin($two, $_, 'all') foreach 1 .. 5;					# 5 replayed
finish($one, $_, 'all', 500, 1) foreach 7, 8;			# 2 failed
begin($two, '7', 'all') foreach 1 .. 7;					# 7 throttled
$one->query("SELECT outcome FROM idem_begin('new', 'all', NULL, first_sent => '2000-01-01')");	# expired
$two->query("UPDATE idempotency_keys SET result_dropped = true WHERE key = '1'");
begin($two, '1', 'all');								# 2 expired
$two->query("UPDATE idempotency_keys SET lease_until = '2000-01-01' WHERE key = '9'");
$one->query("SET pg_idem.on_lost_lease = hold; SELECT idem_begin('9', 'all', NULL); RESET pg_idem.on_lost_lease")
  foreach 1 .. 8;										# 8 unknown
begin($two, '9', 'all');								# 1 resumed
is($one->error("SELECT idem_$_") , 'IK001', "stale: $_")
  foreach "finish('9', NULL, attempt => 1)", "finish('9', NULL)", "checkpoint('9', 'x', attempt => 1)",
  "release('9', attempt => 3)", "finish('1', NULL, attempt => 2)";	# 5 stale
$one->query("BEGIN; SELECT idem_begin('rolled back', 'all', NULL); ROLLBACK");	# 10 started
isnt($one->error($_), '00000', "no answer: $_")
  foreach "SELECT idem_begin('x', 'all', NULL, ttl => '0')",
  "SELECT idem_finish('none', NULL, route => 'all')",
  "SELECT idem_finish('1', NULL, route => 'all', attempt => 1)";
$one->query("SELECT idem_lookup('1', 'all'), idem_hedge_after('all')");
my $expected = '10|1|5|4|3|2|8|7|6|2|5';
is(stats('all', $all), $expected, 'every answer is counted, and nothing else');
is(stats('never', $all), '', 'no route is made up');
is($two->query("SELECT idem_hedge_after('never') IS NULL; SELECT count(*) FROM idem_stat_routes WHERE route = 'never'"),
	"t\n0", 'nor by idem_hedge_after');

# Databases are apart, and so is what is reset.
$node->safe_psql('postgres', 'CREATE DATABASE other');
$node->safe_psql('other', "CREATE EXTENSION pg_idem; SELECT idem_begin('k', 'all', NULL); SELECT idem_budget_allow('all', false)");
is($node->safe_psql('other', "SELECT $all FROM idem_stat_routes"), '1|0|0|0|0|0|0|0|0|0|0', 'another database');
is(stats('all', $all), $expected, 'has nothing to do with it');
$one->query("INSERT INTO idem_service_policies (service, minimum_calls, open_time) VALUES ('b', 1, '1 hour');"
	  . "SELECT idem_breaker_record('b', false, '1 day'), idem_breaker_allow('b'), idem_budget_allow('b', true)");
my $before = $node->safe_psql('postgres', 'SELECT clock_timestamp()');
$one->query('BEGIN; SELECT idem_stats_reset(); ROLLBACK');
is(stats('all', $all), join('|', (0) x 11), 'a reset');
is($two->query("SELECT bool_and(since >= '$before') FROM (SELECT since FROM idem_stat_routes UNION SELECT since FROM idem_stat_services) s"),
	't', 'since when');
is( $two->query('SELECT service, breaker, opened, calls_ok, calls_failed, calls_slow, calls_refused, retries_refused'
		  . " FROM idem_stat_services; SELECT idem_breaker_allow('b')"),
	"b|open|0|0|0|0|0|0\nf", 'leaves breakers alone');
is($node->safe_psql('other', "SELECT started FROM idem_stat_routes"), '1', 'and other databases');

#
# Run times.  How long each took is in the store, to the microsecond.
#
# Claims that began some time ago, of which $take says how long; finished now
sub take
{
	my ($route, $n, $take, $status) = @_;

	$two->query(qq(
INSERT INTO idempotency_keys (key, tenant, route, state, attempt, result_dropped, created_at, expires_at, lease_until)
SELECT 'run ' || nextval('runs'), '', '$route', 'in_progress', 1, false, clock_timestamp() - $take,
	'infinity', 'infinity' FROM generate_series(1, $n) i;
SELECT count(idem_finish(key, NULL, $status, route => route, attempt => 1)::text)
FROM idempotency_keys WHERE route = '$route' AND state = 'in_progress'));
	return;
}

# Are quantiles what they are in the store, within 1/32?
sub quantiles_are_right
{
	my ($route, $what, @quantiles) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is( $two->query(qq(
SELECT string_agg(q || ' ' || (abs(extract(epoch FROM told) / extract(epoch FROM run) - 1) <= 1 / 32.0), ', ' ORDER BY q)
FROM unnest(ARRAY[@{[join ',', @quantiles]}]::float8[]) q,
	LATERAL (SELECT percentile_disc(q) WITHIN GROUP (ORDER BY finished_at - created_at) AS run
		FROM idempotency_keys WHERE route = '$route' AND state = 'completed' AND attempt = 1) r,
	idem_hedge_after('$route', q) told)),
		join(', ', map { "$_ true" } @quantiles), $what);
	return;
}

$two->query('CREATE SEQUENCE runs');
take('runs', 19, "i * interval '17 minutes'", 200);
is($two->query("SELECT idem_hedge_after('runs', 0.5) IS NULL"), 't', '19 run times are too few');
take('runs', 30, "interval '3 hours'", 503);
is($two->query("SELECT idem_hedge_after('runs', 0.5) IS NULL"), 't', 'failures do not count');
begin($two, 'again', 'runs');
finish($two, 'again', 'runs', 503, 1);
$two->query("SET pg_idem.retry_min_per_second = 1e300");
is(begin($two, 'again', 'runs'), 'resumed', 'a second attempt');
finish($two, 'again', 'runs', 200, 2);
is($two->query("SELECT idem_hedge_after('runs', 0.5) IS NULL"), 't', 'does not count');
take('runs', 1, "interval '5 hours'", 422);
is($two->query("SELECT idem_hedge_after('runs', 0.5) IS NULL, idem_hedge_after('runs') IS NULL, idem_hedge_after('runs', 0.96) IS NULL"),
	'f|f|t', 'twenty are enough for one in twenty');
quantiles_are_right('runs', 'twenty run times', 0.05, 0.5, 0.94, 0.95);
take('runs', 200, "interval '1 ms' * 1.07 ^ i", 200);
quantiles_are_right('runs', 'from milliseconds to hours', 0.001, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99);
is(stats('runs', "run_time_p50 = idem_hedge_after('runs', 0.5) AND run_time_p95 = idem_hedge_after('runs')"
		  . " AND run_time_p99 = idem_hedge_after('runs', 0.99)"),
	't', 'idem_stat_routes tells the same');
$two->query(q(
DO $$ BEGIN FOR i IN 1 .. 300 LOOP
	PERFORM idem_begin(i::text, 'quick', NULL);
	PERFORM idem_finish(i::text, NULL, route => 'quick');
	COMMIT;
END LOOP; END $$));
quantiles_are_right('quick', 'real ones', 0.01, 0.5, 0.95, 0.99);
take('long', 20, "interval '10 years'", 200);
is($two->query("SELECT idem_hedge_after('long', 0.5) BETWEEN '74 hours' AND '76 hours'"),
	't', 'what took longer than can be told');
take('future', 20, "interval '-1 year'", 200);
is($two->query("SELECT idem_hedge_after('future', 0.5) IS NULL"), 't', 'a clock that was set back');

# After 32,768 run times all are halved, so that half as many new ones outweigh
# them.
take('halved', 32768, "interval '1 hour'", 200);
take('halved', 16000, "interval '10 hours'", 200);
is($two->query("SELECT idem_hedge_after('halved', 0.5) < '2 hours'"), 't', 'old run times');
take('halved', 1000, "interval '10 hours'", 200);
is($two->query("SELECT idem_hedge_after('halved', 0.5) > '9 hours', idem_hedge_after('halved', 0.4) < '2 hours'"),
	't|t', 'weigh less and less');

# Bad arguments
foreach my $q ('0', '1', '-1', "'NaN'", "'Infinity'")
{
	is($two->error("SELECT idem_hedge_after('runs', $q)"), '22023', "quantile $q");
}
is($two->error("SELECT idem_hedge_after('runs', NULL)"), '22004', 'quantile NULL');

$_->quit foreach $one, $two;
$node->stop;
unlike(log_since($node), qr/PANIC|terminated by signal/, 'nothing has crashed');

done_testing();
