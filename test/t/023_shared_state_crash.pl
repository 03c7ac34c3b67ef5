# The promise: whoever dies, holds up nobody.  A backend that is cancelled or
# terminated in the middle of anything that budgets, breakers and statistics
# do leaves no lock behind.  One that is killed makes the server start anew,
# with nothing counted, and with the policies that are in a table.

use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use IPC::Run;
use PgIdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# Room for half of the names that are used, so that entries come and go
my $node = new_node('main', <<EOC);
restart_after_crash = on
max_connections = 120
pg_idem.expire = off
pg_idem.max_tracked = 40
EOC

$node->safe_psql(
	'postgres', q(
CREATE EXTENSION pg_idem;
INSERT INTO idem_service_policies (service, breaker) VALUES ('forced', 'forced_open');
INSERT INTO idem_service_policies (service, minimum_calls, open_time, half_open_calls, slow_call_time)
SELECT 's' || i, 2, '0', 2, '0' FROM generate_series(0, 39, 3) i;
CREATE PROCEDURE hammer() LANGUAGE plpgsql AS $$
DECLARE
	n text;
	c idem_claim;
BEGIN
	LOOP
		n := 's' || floor(random() * 40);
		PERFORM idem_budget_allow(n, false), idem_budget_allow(n, true), idem_breaker_allow(n),
			idem_breaker_record(n, random() < 0.5, '1 s'), idem_breaker_retry_after(n),
			idem_hedge_after(n);
		PERFORM count(*) FROM idem_stat_services;
		PERFORM count(*) FROM idem_stat_routes;
		PERFORM idem_stats_reset();
		c := idem_begin('k' || pg_backend_pid(), n, NULL);
		IF c.proceed THEN
			PERFORM idem_finish('k' || pg_backend_pid(), NULL, 503, route => n,
				attempt => c.attempt);
		END IF;
		COMMIT;
	END LOOP;
END $$;
));
my $script = $node->basedir . '/hammer.sql';
append_to_file($script, 'CALL hammer();');
my $hammering = "FROM pg_stat_activity WHERE query = 'CALL hammer();' AND state = 'active'";
my $ignored;

# 64 connections that hammer all functions, without an end
sub start_hammer
{
	my $run = IPC::Run::start(
		[
			$node->installed_command('pgbench'), '--no-vacuum',
			'--client=64', '--jobs=2', '--transactions=1',
			"--file=$script", $node->connstr('postgres')
		],
		'<', \undef, '>', \$ignored, '2>', \$ignored);

	ok($node->poll_query_until('postgres', "SELECT count(*) = 64 $hammering"),
		'64 clients hammer');
	return $run;
}

# Every function answers, within the time that a session of the tests has.
sub answers
{
	my ($what) = @_;
	my $session = PgIdemTest::Session->new($node, 'postgres');
	my $said = $session->query(
		q(
SELECT idem_budget_allow('alive', false), idem_budget_allow('alive', true), idem_breaker_allow('alive'),
	idem_breaker_record('alive', true), idem_breaker_retry_after('alive') IS NULL,
	idem_hedge_after('alive') IS NULL, idem_breaker_allow('forced');
SELECT count(*) <= 40 FROM idem_stat_services;
SELECT count(*) <= 40 FROM idem_stat_routes;
SELECT idem_stats_reset();
BEGIN;
SELECT outcome FROM idem_begin('alive', 'alive', NULL);
SELECT idem_finish('alive', '1', route => 'alive');
ROLLBACK;
));
	$session->quit;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is($said, "t|t|t|closed|t|t|f\nt\nt\n\nstarted\n", "$what: every function answers");
	return;
}

#
# Cancelled and terminated
#
my $run = start_hammer();
answers('64 clients');
foreach my $end (qw(pg_cancel_backend pg_terminate_backend))
{
	for (my $left = 56; $left >= 32; $left -= 8)
	{
		my $now = $end eq 'pg_cancel_backend' ? $left : $left - 32;

		$node->safe_psql('postgres',
			"SELECT count($end(pid)) FROM (SELECT pid $hammering ORDER BY random() LIMIT 8) p");
		ok($node->poll_query_until('postgres', "SELECT count(*) = $now $hammering"),
			"$end: $now are left");
		answers("$end, $now are left") if $now % 32 == 0;
	}
}
eval { $run->finish };
is($node->safe_psql('postgres', "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'pg_idem'"),
	0, 'nobody waits');
unlike(log_since($node), qr/PANIC|terminated by signal|stuck spinlock/, 'nothing has crashed');

#
# Killed
#
$run = start_hammer();
my $offset = log_end($node);
my $session = PgIdemTest::Session->new($node, 'postgres');
$session->query("SELECT idem_breaker_record('lost', false)");
kill 9, $node->safe_psql('postgres', "SELECT pid $hammering LIMIT 1");
ok(wait_for_log_line($node, qr/all server processes terminated; reinitializing/, $offset),
	'the server restarts after a backend was killed');
eval { $run->finish };
$session->abandon;
ok($node->poll_query_until('postgres', 'SELECT 1', '1'), 'and is back');

is($node->safe_psql('postgres', 'SELECT count(*) FROM idem_stat_services'),
	0, 'nothing is known of services');
is($node->safe_psql('postgres', 'SELECT count(*) FROM idem_stat_routes'),
	0, 'nor of routes');
is( $node->safe_psql('postgres',
		"SELECT idem_breaker_allow('forced'); SELECT breaker, calls_refused FROM idem_stat_services"),
	"f\nforced_open|1", 'what a table forces holds');
answers('after the crash');

$run = start_hammer();
answers('after the crash, 64 clients');
$node->safe_psql('postgres', "SELECT count(pg_terminate_backend(pid)) $hammering");
eval { $run->finish };

$node->stop;
done_testing();
