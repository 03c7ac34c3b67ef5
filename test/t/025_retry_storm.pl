
# Retry storms.  What a budget promises is counted exactly, over many
# connections: that takes no clock.  Then the simulation of test/storm, which
# "make storm" draws, has to show what retries do to a service that is sick,
# and that a budget and a breaker end it.

use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;

use PgIdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('storm', "max_connections = 220\n");

$node->safe_psql('postgres', <<'EOS');
CREATE EXTENSION pg_idem;
INSERT INTO idem_service_policies (service, retry_ratio, retry_min_per_second)
VALUES ('ratio', 0.2, 0), ('minimum', 0, 3), ('both', 0.2, 3);

CREATE TABLE budget_calls (service text, is_retry bool);

-- One request.  The service always fails, and the client always retries.
CREATE FUNCTION make_failing_request(service text, has_budget bool)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	FOR retry IN 0 .. 5 LOOP
		IF NOT has_budget OR idem_budget_allow(service, retry > 0) THEN
			INSERT INTO budget_calls VALUES (service, retry > 0);
		END IF;
	END LOOP;
END
$$;
EOS

# ---- Every request fails, and every client retries five times

my $requests = 32 * 25;
my $wanted = 5 * $requests;

# Run a storm.  Returns how many retries got through to the service, and in
# how many windows of ten seconds that can have been.
sub storm
{
	my ($service, $has_budget) = @_;
	my $script = $node->basedir . "/$service.sql";
	my $began = time;

	append_to_file($script, "SELECT make_failing_request('$service', $has_budget);\n");
	$node->command_ok(
		[
			'pgbench', '--no-vacuum', '--client=32', '--jobs=2',
			'--transactions=25', "--file=$script", 'postgres'
		],
		"$service: 32 connections, 25 requests each");
	is( $node->safe_psql('postgres',
			"SELECT count(*) FROM budget_calls WHERE service = '$service' AND NOT is_retry"),
		$requests, "$service: all requests got through");
	return (
		$node->safe_psql('postgres',
			"SELECT count(*) FROM budget_calls WHERE service = '$service' AND is_retry"),
		1 + int((time - $began + 1) / 10));
}

sub refused_is
{
	my ($service, $expected) = @_;

	is( $node->safe_psql('postgres',
			"SELECT retries_refused FROM idem_stat_services WHERE service = '$service'"),
		$expected, "$service: each refusal was counted");
	return;
}

my ($retries, $windows) = storm('no_budget', 'false');
is($retries, $wanted, 'without a budget there are 6 calls a request');

($retries, $windows) = storm('ratio', 'true');
cmp_ok($retries, '<=', 0.2 * $requests, 'with one of 20 % there are 1.2 at the most');
cmp_ok($retries, '>', 0.1 * $requests, 'and not much fewer');
refused_is('ratio', $wanted - $retries);

($retries, $windows) = storm('minimum', 'true');
cmp_ok($retries, '<=', 30 * $windows, 'a minimum of 3 a second allows 30 retries in ten seconds');
cmp_ok($retries, '>=', 30, 'and not fewer');
refused_is('minimum', $wanted - $retries);

($retries, $windows) = storm('both', 'true');
cmp_ok($retries, '<=', 0.2 * $requests + 30 * $windows, 'ratio and minimum add up');
cmp_ok($retries, '>', 0.1 * $requests + 30, 'both of them');
refused_is('both', $wanted - $retries);

# ---- A service is slow for a while, and clients lose patience

# The clients are to make their requests when they are due.  If the machine is
# too slow for that, all is done again with twice the time.
my $db;
my $stretch = 1;

sub simulate
{
	$db = "stretch_$stretch";
	$node->safe_psql('postgres', "CREATE DATABASE $db");
	local $ENV{PGDATABASE} = $db;
	local $ENV{STRETCH} = $stretch;
	$node->command_ok(["$FindBin::RealBin/../storm/simulate"],
		"the simulation runs, stretched by $stretch");
	note(
		$node->safe_psql($db,
			'SELECT policy, sick_load, peak, failed, last_good, recovered_after, late FROM results'));
	return $node->safe_psql($db,
		'SELECT max(late) <= timeout FROM results, scenario GROUP BY timeout') eq 't';
}

until (simulate())
{
	$stretch *= 2;
	die 'the machine is too slow for the simulation' if $stretch > 32;
}

# Columns of view "results", as a list
sub result
{
	my ($policy, $columns) = @_;
	return split /\|/,
	  $node->safe_psql($db, "SELECT $columns FROM results WHERE policy = '$policy'");
}

is( $node->safe_psql($db,
		'SELECT count(*) FROM results
			WHERE requests <> (SELECT count(*) FROM arrivals) / 5'),
	'0',
	'each service got all requests');

my ($budget_calls) = result('budget', 'sick_calls');
foreach my $policy ('none', 'backoff', 'jitter')
{
	my ($sick_calls, $last_requests, $last_good) =
	  result($policy, 'sick_calls, last_requests, last_good');

	cmp_ok($sick_calls, '>', 2 * $budget_calls,
		"$policy: more than twice the calls that there are with a budget");
	cmp_ok($last_good, '<', $last_requests / 4, "$policy: the storm outlives its cause");
}
foreach my $policy ('budget', 'breaker')
{
	my ($last_requests, $last_good) = result($policy, 'last_requests, last_good');

	cmp_ok($last_good, '>', $last_requests * 3 / 4, "$policy: the service recovers");
}

# A whole window never has more retries than the budget allows, and the run
# is not longer than so many.
my ($allowed) = $node->safe_psql($db,
	q(SELECT 0.2 * count(*) + 2 * (1 + floor((
			SELECT extract(epoch FROM max(at) - min(at)) FROM calls WHERE service = 'budget') / 10))
		FROM requests WHERE policy = 'budget'));
($retries) = result('budget', 'retries');
cmp_ok($retries, '<=', $allowed, 'budget: no more retries than it allows');

my ($sick_requests, $sick_calls) = result('breaker', 'sick_requests, sick_calls');
cmp_ok($sick_calls, '<', $sick_requests / 2,
	'breaker: most requests are kept off the sick service');

# What the library has counted is what clients have seen.
is( $node->safe_psql($db,
		q(SELECT count(*) FROM results JOIN idem_stat_services ON service = policy
			WHERE policy = 'breaker' AND opened > 0 AND calls = calls_ok + calls_failed)),
	'1',
	'breaker: it opened, and all calls were recorded');
is( $node->safe_psql($db,
		q(SELECT count(*) FROM idem_stat_services s
			WHERE service IN ('budget', 'breaker') AND
				retries_refused + calls_refused = (
					SELECT count(*) FROM requests
					WHERE policy = service AND NOT ok AND calls < 6))),
	'2',
	'budget, breaker: each request that was given up early was refused by one of them');

$node->stop;
done_testing();
