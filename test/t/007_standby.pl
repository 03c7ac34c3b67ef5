# The promise: on a hot standby, and in a READ ONLY transaction, whatever would
# write says so with the server's own read-only error; idem_lookup reads there
# too.  The worker stays away from a standby and starts after promotion, when
# claims work, and what was claimed on the old primary still stands.
#
# After a failover the retries of a whole minute arrive at once; a key that was
# forgotten on the way, or a claim handed out by a standby, is a double charge.

use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use PgIdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $primary = new_node('primary', <<EOC, allows_streaming => 1);
pg_idem.expire = off
EOC
$primary->backup('backup');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($primary, 'backup', has_streaming => 1);
# here it is on: only that this is a standby can keep the worker away
$standby->append_conf('postgresql.conf', <<EOC);
pg_idem.expire = on
log_min_messages = debug1
EOC
$standby->start;

$primary->safe_psql(
	'postgres', q(
CREATE EXTENSION pg_idem;
SELECT idem_create_table('further');
BEGIN;
SELECT idem_begin('done', 'r', '\x01');
SELECT idem_finish('done', '{"id": 1}', 201);
COMMIT;
SELECT idem_begin('open', 'r', '\x01');
INSERT INTO idempotency_keys (key, tenant, route, state, attempt,
	result_dropped, created_at, finished_at, expires_at)
VALUES ('old', '', 'r', 'completed', 1, false,
	'2020-01-01', '2020-01-01', '2020-01-02');
BEGIN;
SELECT idem_begin('prepared', 'r', NULL);
PREPARE TRANSACTION 'p';
INSERT INTO idem_service_policies (service, retry_ratio, retry_min_per_second) VALUES ('none', 0, 0);
INSERT INTO idem_service_policies (service, minimum_calls, open_time) VALUES ('s', 2, '1 hour');
INSERT INTO idem_service_policies (service, breaker) VALUES ('forced', 'forced_open');
));
$primary->wait_for_catchup($standby, 'replay',
	$primary->lsn('insert'));

my %writes = (
	idem_begin => "SELECT idem_begin('new', 'r', NULL)",
	'idem_begin of a finished key' => "SELECT idem_begin('done', 'r', '\\x01')",
	'idem_begin in a further store' =>
	  "SELECT idem_begin('new', 'r', NULL, store => 'further')",
	idem_finish => "SELECT idem_finish('open', '1', attempt => 1)",
	idem_receive => "SELECT idem_receive('r', 'm')",
	'idem_receive_batch' => "SELECT idem_receive_batch('r', ARRAY['m'])",
	idem_publish => "SELECT idem_publish('t', '1', 'g')",
	idem_outbox_take => "SELECT idem_outbox_take('t')",
	idem_outbox_done => "SELECT idem_outbox_done(1, 1)",
	idem_outbox_fail => "SELECT idem_outbox_fail(1, 1)",
	idem_outbox_redrive => "SELECT idem_outbox_redrive()",
	idem_expire => "SELECT idem_expire()",
	idem_create_table => "SELECT idem_create_table('more')",
	idem_grant => "SELECT idem_grant(CURRENT_USER::regrole)");

# what a session can do where nothing may be written
sub is_read_only
{
	my ($session, $where) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	foreach my $what (sort keys %writes)
	{
		is($session->error("BEGIN READ ONLY; $writes{$what}"),
			'25006', "$where: $what");
		$session->query('ROLLBACK');
	}
	is( $session->query(
			"SELECT state, status, response FROM idem_lookup('done', 'r')"),
		'completed|201|{"id": 1}',
		"$where: idem_lookup of a finished key");
	is( $session->query("SELECT state, attempt FROM idem_lookup('open', 'r')"),
		'in_progress|1',
		"$where: idem_lookup of a claim");
	is( $session->query(
			"SELECT idem_lookup('old', 'r') IS NULL,"
			  . " idem_lookup('none', 'r') IS NULL,"
			  . " idem_lookup('prepared', 'r') IS NULL,"
			  . " idem_lookup('done', 'r', store => 'further') IS NULL"),
		't|t|t|t',
		"$where: idem_lookup of nothing");
	is($session->query("SELECT length(idem_hash_text('x'))"),
		32, "$where: idem_hash");

	# what is kept in shared memory can be changed anywhere
	is( $session->query(
			'BEGIN READ ONLY;'
			  . "SELECT idem_budget_allow('s', false), idem_budget_allow('none', true), idem_breaker_allow('forced');"
			  . "SELECT idem_breaker_record('s', true), idem_breaker_record('s', false), idem_breaker_allow('s');"
			  . "SELECT idem_breaker_retry_after('s') > '1 min', idem_hedge_after('r') IS NULL;"
			  . 'SELECT service, breaker, calls_ok, calls_failed, calls_refused, retries_refused,'
			  . ' window_requests FROM idem_stat_services ORDER BY 1;'
			  . 'SELECT count(*) FROM idem_stat_routes WHERE started < 0;'
			  . 'SELECT idem_stats_reset();'
			  . 'SELECT sum(calls_failed), count(*) FROM idem_stat_services; COMMIT'),
		"t|f|f\nclosed|open|f\nt|t\n"
		  . "forced|forced_open|0|0|1|0|0\nnone|closed|0|0|0|1|0\ns|open|1|1|1|0|1\n0\n\n0|3",
		"$where: budgets, breakers and statistics");
	return;
}

my $session = PgIdemTest::Session->new($primary, 'postgres');
is_read_only($session, 'read-only transaction');
$session->query('SET default_transaction_read_only = on');
is($session->error($writes{idem_begin}), '25006', 'read-only by default');
$session->query('RESET default_transaction_read_only');
# a transaction that becomes read-only after its claim
$session->query("BEGIN; SELECT idem_begin('late', 'r', NULL); SET TRANSACTION READ ONLY");
is($session->error("SELECT idem_finish('late', '1')"),
	'25006', 'a transaction that became read-only');
$session->query('ROLLBACK');
is($session->query("SELECT idem_expire()"), 1, 'the primary can write');
$session->quit;

$primary->safe_psql(
	'postgres', q(
INSERT INTO idempotency_keys (key, tenant, route, state, attempt,
	result_dropped, created_at, finished_at, expires_at)
VALUES ('old', '', 'r', 'completed', 1, false,
	'2020-01-01', '2020-01-01', '2020-01-02');));
$primary->wait_for_catchup($standby, 'replay', $primary->lsn('insert'));
$session = PgIdemTest::Session->new($standby, 'postgres');
is_read_only($session, 'standby');
is($session->error($writes{idem_begin}), '25006', 'standby, without READ ONLY');
$primary->safe_psql('postgres',
	"UPDATE idem_service_policies SET breaker = 'forced_closed' WHERE service = 'forced'");
$primary->wait_for_catchup($standby, 'replay', $primary->lsn('insert'));
is($session->query("SELECT idem_breaker_allow('forced')"),
	't', 'a change of policies reaches an open session of the standby');
is($session->query('SELECT count(*) FROM idempotency_keys'),
	3, 'the keys of the primary are there');
is( $session->query(
		"SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'pg_idem%'"
	),
	0,
	'there is neither launcher nor worker');
$session->quit;
unlike(log_since($standby), qr/starting background worker process "pg_idem/,
	'nor was there one');

#
# Failover
#
$primary->stop('immediate');
$standby->promote;
ok($standby->poll_query_until('postgres', 'SELECT NOT pg_is_in_recovery()'),
	'promoted');
is( $standby->safe_psql(
		'postgres', q(
SELECT outcome, status, response FROM idem_begin('done', 'r', '\x01');
SELECT outcome FROM idem_begin('done', 'r', '\x02');
SELECT outcome FROM idem_begin('open', 'r', '\x01');
SELECT outcome FROM idem_begin('prepared', 'r', NULL);
SELECT outcome FROM idem_begin('new', 'r', NULL);
SELECT idem_finish('open', '2', attempt => 1);
SELECT outcome, response FROM idem_begin('open', 'r', '\x01');
COMMIT PREPARED 'p';
SELECT idem_finish('prepared', '3', attempt => 1);
SELECT outcome, response FROM idem_begin('prepared', 'r', NULL);
)),
	q(replayed|201|{"id": 1}
mismatch
in_progress
in_progress
started

replayed|2

replayed|3),
	'after the failover every key is what it was');
ok( $standby->poll_query_until(
		'postgres',
		"SELECT count(*) = 1 FROM pg_stat_activity"
		  . " WHERE backend_type = 'pg_idem launcher'"),
	'the launcher starts after promotion');
ok( $standby->poll_query_until(
		'postgres',
		"SELECT count(*) = 0 FROM idempotency_keys WHERE key = 'old'"),
	'and expired keys are removed');

$standby->stop;
unlike(log_since($standby), qr/PANIC|terminated by signal/,
	'nothing has crashed');

done_testing();
