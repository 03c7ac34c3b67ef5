# The promise: without shared_preload_libraries everything works but the worker
# and what is kept in shared memory.  Many a hosted server lets nobody preload a library; there the keys
# must be as safe, and idem_expire() is called by hand or by any scheduler.
#
# A library that is loaded late finds settings that were made before it could
# check them, by somebody who may not make them.  That must gain nothing.

use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use PgIdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main', <<EOC);
shared_preload_libraries = ''
pg_idem.lease = 30s
pg_idem.max_tracked = 10
pg_idem.retry_ratio = 0
pg_idem.retry_min_per_second = 0
pg_idem.nonsense = 1
EOC

# CREATE EXTENSION says what is missing, once it is certain to stay; not to
# those who do not want to hear.
my @notice = $node->psql('postgres', 'CREATE EXTENSION pg_idem');
like($notice[2],
	qr/NOTICE:  pg_idem is not in shared_preload_libraries\n.*HINT:  Add pg_idem to shared_preload_libraries and restart the server/s,
	'CREATE EXTENSION says that the library is not preloaded');
foreach my $sql (
	'BEGIN; DROP EXTENSION pg_idem; CREATE EXTENSION pg_idem; ROLLBACK',
	'BEGIN; DROP EXTENSION pg_idem; SAVEPOINT a; CREATE EXTENSION pg_idem; ROLLBACK TO a; COMMIT',
	'SET client_min_messages = warning; CREATE EXTENSION pg_idem')
{
	@notice = $node->psql('postgres', $sql);
	unlike($notice[2], qr/NOTICE/, "but not: $sql");
}
my $psql = PgIdemTest::Session->new($node, 'postgres');
my $other = PgIdemTest::Session->new($node, 'postgres');

#
# The claim
#
is( $psql->query(
		q(BEGIN; SELECT proceed, outcome FROM idem_begin('k', 'r', idem_hash('{}'::jsonb));)
	),
	't|started',
	'idem_begin');
is($other->query("SELECT proceed, outcome FROM idem_begin('k', 'r', idem_hash('{}'::jsonb))"),
	'f|in_progress', 'a duplicate in flight is answered at once');
is($other->query("SELECT proceed, outcome FROM idem_begin('k', 'r', NULL)"),
	'f|mismatch', 'a mismatch with a claim in flight');
is($psql->query(q(SELECT idem_finish('k', '{"id": 1}', 201); COMMIT)),
	'', 'idem_finish');
is( $other->query(
		"SELECT outcome, status, response FROM idem_begin('k', 'r', idem_hash('{}'::jsonb))"
	),
	'replayed|201|{"id": 1}',
	'a replay');
is($other->query("SELECT (idem_lookup('k', 'r')).state"), 'completed',
	'idem_lookup');
is( $other->query(q(
SELECT idem_create_table('further');
SELECT outcome FROM idem_begin('k', 'r', NULL, store => 'further');)),
	"further\nstarted",
	'a further store');

# A waiting caller gets its answer when the other one is done.
$psql->query("BEGIN; SELECT idem_begin('w', 'r', NULL)");
$other->start("SELECT outcome FROM idem_begin('w', 'r', NULL, wait => '1 hour')");
ok( $node->poll_query_until(
		'postgres',
		"SELECT wait_event_type = 'Extension' FROM pg_stat_activity"
		  . " WHERE pid = $other->{pid}"),
	'a caller waits');
$psql->query("SELECT idem_finish('w', '1'); COMMIT");
is($other->result, 'replayed', 'and has the answer');

#
# Budgets, breakers and statistics say what they need; a key that has failed is
# executed again without a budget.
#
my $what_to_do =
  qr/HINT:  Add pg_idem to shared_preload_libraries in postgresql.conf, then restart the server\./;
foreach my $call ("idem_budget_allow('s', true)", "idem_budget_allow('s', false)",
	"idem_breaker_allow('s')", "idem_breaker_record('s', true)",
	"idem_breaker_retry_after('s')", "idem_hedge_after('r')",
	'count(*) FROM idem_stat_routes', 'count(*) FROM idem_stat_services', 'idem_stats_reset()')
{
	is($psql->error("SELECT $call"), '55000', $call);
	like($psql->{err}, qr/must be loaded via shared_preload_libraries.*$what_to_do/s,
		'which says why, and what to do');
}
is( $psql->query(q(
BEGIN; SELECT outcome FROM idem_begin('f', 'r', NULL); SELECT idem_finish('f', '1', 503); COMMIT;
BEGIN; SELECT outcome FROM idem_begin('f', 'r', NULL); SELECT idem_finish('f', '1', 503); COMMIT;
SELECT outcome, attempt FROM idem_begin('f', 'r', NULL);)),
	"started\n\nresumed\n\nresumed|3",
	'a key that has failed');
is($psql->error("SELECT idem_finish('f', '1', attempt => 1)"), 'IK001', 'a stale finish');
is( $psql->query("SELECT idem_release('f', attempt => 3); SELECT attempt FROM idem_resume(NULL, key => 'f')"),
	"\n4", 'idem_resume');
is($psql->query("SELECT idem_backoff(3, jitter => 'none'), idem_retryable(503), idem_retry(9, 503) IS NULL"),
	'00:00:00.8|t|t', 'the pure helpers');

#
# Expiry, by hand
#
is( $psql->query(q(
BEGIN;
SELECT outcome FROM idem_begin('short', 'r', NULL, ttl => '1 microsecond');
SELECT idem_finish('short', '1');
COMMIT;
SELECT idem_lookup('short', 'r') IS NULL;
SELECT outcome FROM idem_begin('short', 'r', NULL, ttl => '1 microsecond');
SELECT idem_finish('short', '1', attempt => 1, ttl => '1 microsecond');
SELECT count(*) FROM idempotency_keys WHERE key = 'short';)),
	"started\n\nt\nstarted\n\n1",
	'an expired key is free before it is swept');
is($psql->query('SELECT idem_expire(0), idem_expire(), idem_expire()'),
	'0|1|0', 'idem_expire');
is($node->safe_psql(
		'postgres',
		"SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'pg_idem%'"),
	0, 'there is no launcher and no worker');

# The extension can come and go: nobody is there to be woken.
$node->safe_psql('postgres',
	'BEGIN; DROP EXTENSION pg_idem CASCADE; CREATE EXTENSION pg_idem; COMMIT');
is($psql->query("SELECT outcome FROM idem_begin('k', 'r', NULL)"),
	'started', 'DROP and CREATE EXTENSION');

#
# Settings, made before the library is there and after
#
my $fresh = PgIdemTest::Session->new($node, 'postgres');
$fresh->query("SET pg_idem.ttl = '1h'; SET pg_idem.unknown = 1; SET pg_idem.wait = 'no time'");
$fresh->query("SELECT idem_begin('s', 'r', NULL)");
like($fresh->{err}, qr/WARNING: .*invalid value for parameter "pg_idem.wait"/,
	'a bad value set before is told');
like($fresh->{err}, qr/WARNING: .*pg_idem.unknown/,
	'so is a name that does not exist');
unlike($fresh->{err}, qr/max_tracked/, 'a setting of the server is no reason to complain');
is( $fresh->query(
		"SELECT expires_at - created_at, lease_until - created_at"
		  . " FROM idem_lookup('s', 'r')"),
	'01:00:00|00:00:30',
	'settings made before the library was loaded count');
is($fresh->query('SHOW pg_idem.max_tracked'), 10, 'though it has no effect');
is($fresh->error('SET pg_idem.max_tracked = 1'), '55P02', 'nor can it be set');
is($fresh->query('SHOW pg_idem.wait'), 0, 'a bad one does not');
is($fresh->error('SET pg_idem.unknown = 1'),
	'42602', 'an unknown setting is refused');
is($fresh->error("SET pg_idem.ttl = 0"), '22023', 'a bad value is refused');
is($fresh->error('SET pg_idem.expire_naptime = 1'),
	'55P02', 'the worker is not set up by a session');
is($fresh->query("SET pg_idem.ttl = '90min'; SHOW pg_idem.ttl"),
	'90min', 'settings have units');
$fresh->quit;

# ... by somebody who may not make them
$node->safe_psql(
	'postgres', q(
CREATE ROLE app LOGIN;
SELECT idem_grant('app');
ALTER DATABASE postgres SET pg_idem.max_response_size = 5;));
my $app = PgIdemTest::Session->new($node, 'postgres', 'app');
$app->start("SET pg_idem.max_response_size = '1GB'; SET pg_idem.replay_headers = 'x-secret'");
$app->result;
is( $app->query(
		"SELECT outcome FROM idem_begin('t', 'r', NULL);"
		  . q(SELECT idem_finish('t', '"too long"', headers => '{"x-secret": "1"}', attempt => 1);)
	),
	"started\n",
	'a role that set them before');
is( $node->safe_psql(
		'postgres',
		"SELECT tenant, headers, response, result_dropped"
		  . " FROM idempotency_keys WHERE key = 't'"),
	'|||t',
	'a role cannot set beforehand what it may not set later');
$app->quit;

# ... and nobody is to rely on a tenant that a client might displace at the
# start of its session
$node->safe_psql('postgres',
	'ALTER DATABASE postgres SET pg_idem.tenant_is_role = on');
$app = PgIdemTest::Session->new($node, 'postgres', 'app');
is($app->error("SELECT idem_begin('u', 'r', NULL)"),
	'55000', 'tenant_is_role is refused');
like($app->{err}, qr/needs pg_idem in shared_preload_libraries.*$what_to_do/s,
	'which says what to do');
$_->quit foreach $psql, $other, $app;

$node->stop;
unlike(log_since($node), qr/PANIC|terminated by signal/, 'nothing has crashed');

done_testing();
