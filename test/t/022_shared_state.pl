# The promise: budgets and breakers are one for all connections.  However many
# hammer one service at the same time, no count is lost, no retry and no trial
# is given out twice, and what opens a breaker is seen by all at once.  However
# many names come along, the table of them does not grow, and a service in use
# keeps what is known of it.
#
# Times are an hour, which never passes here, or none at all, which has passed
# at once; so nothing in here waits for a clock.

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
max_connections = 120
EOC
my @clients = ('--client=64', '--transactions=1');

$node->safe_psql(
	'postgres', q(
CREATE EXTENSION pg_idem;
CREATE TABLE answers (what text, yes bigint, no bigint, most bigint);
CREATE TABLE big AS SELECT i FROM generate_series(1, 10000) i;
));
my $one = PgIdemTest::Session->new($node, 'postgres');
my $two = PgIdemTest::Session->new($node, 'postgres');

# Set the policy of a service, by name and value of columns.
sub policy
{
	my ($service, %column) = @_;
	my $names = join ', ', 'service', sort keys %column;
	my $values = join ', ',
	  map { defined $column{$_} ? "'$column{$_}'" : 'NULL' } sort keys %column;

	$one->query("DELETE FROM idem_service_policies WHERE service = '$service';"
		  . "INSERT INTO idem_service_policies ($names) VALUES ('$service', $values)");
	return;
}

# A column of view idem_stat_services
sub service
{
	my ($service, $columns) = @_;
	return $two->query("SELECT $columns FROM idem_stat_services WHERE service = '$service'");
}

sub allow
{
	my ($session, $service) = @_;
	return $session->query("SELECT idem_breaker_allow('$service')");
}

sub record
{
	my ($session, $service, $how) = @_;
	return $session->query("SELECT idem_breaker_record('$service', $how)");
}

#
# Budgets: requests and retries from 64 connections at once, and then all the
# retries that are left
#
my @counts = in_one_window(
	sub {
		my ($n, $part) = @_;
		my $calls = 2 * (int(2000 * $part) || 1);

		$one->query('TRUNCATE answers');
		policy("budget$n", retry_ratio => 0.125, retry_min_per_second => 0.5);
		hammer($node, '64 clients, requests and retries', <<"EOS", @clients);
INSERT INTO answers
SELECT 'budget', count(*) FILTER (WHERE yes), count(*) FILTER (WHERE NOT yes)
FROM (SELECT i % 2 = 0 AS retry, idem_budget_allow('budget$n', i % 2 = 0) AS yes
	FROM generate_series(1, $calls) i OFFSET 0) b
WHERE retry;
EOS
		my $allowed = $one->query('SELECT sum(yes) FROM answers');
		my $refused = $one->query('SELECT sum(no) FROM answers');
		my $counted = service("budget$n",
			'window_requests, window_retries, retries_refused');
		my $limit = 0.125 * 64 * $calls / 2 + 0.5 * 10;
		my $rest = $one->query("SELECT count(*) FILTER (WHERE idem_budget_allow('budget$n', true))"
			  . " FROM generate_series(1, $limit + 100)");
		my $fits = service("budget$n", "clock_timestamp() < since + interval '9 s'");
		return ($fits, 64 * $calls / 2, $limit, $counted, $allowed, $refused, $rest);
	});
my ($requests, $limit, $counted, $allowed, $refused, $rest) = @counts;
note("$requests requests, and as many retries");
is($counted, join('|', $requests, $allowed, $refused),
	'no request is lost, and no retry, allowed or refused');
is($allowed + $refused, $requests, 'each retry was one or the other');
cmp_ok($allowed, '<=', $limit, 'there are not too many of them');
is($allowed + $rest, $limit, 'and in the end exactly as many as may be');

# A ratio that allows all, and one that allows none
policy('all', retry_ratio => 'Infinity', retry_min_per_second => 0);
policy('none', retry_ratio => 0, retry_min_per_second => 0);
is($one->query("SELECT idem_budget_allow('all', true), idem_budget_allow('none', false), idem_budget_allow('none', true)"),
	't|t|f', 'a ratio without limit, and one of nothing');

#
# A breaker that is hammered opens once.  Of 64 * 200 calls that fail, the
# 1000th opens it.
#
policy('open', minimum_calls => 1000, window_calls => 1000, open_time => '1 hour');
hammer($node, '64 clients, failures', <<'EOS', @clients);
INSERT INTO answers
SELECT 'open', count(*) FILTER (WHERE state = 'closed'), count(*) FILTER (WHERE state = 'open')
FROM (SELECT idem_breaker_record('open', false) AS state
	FROM generate_series(1, 200) OFFSET 0) b;
EOS
is($one->query("SELECT sum(yes), sum(no) FROM answers WHERE what = 'open'"),
	'999|11801', 'the call that crosses the line opens the breaker');
is(service('open', 'breaker, opened, calls_failed, calls_ok'),
	'open|1|12800|0', 'once, and no call is lost');

# ... and all connections know
policy('seen', minimum_calls => 4, open_time => '1 hour');
is(allow($two, 'seen') . record($one, 'seen', 'true') x 2, 'tclosedclosed', 'two');
$two->query('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1');
is(record($one, 'seen', 'true') . record($one, 'seen', 'false') . record($one, 'seen', 'false'),
	'closedclosedopen', 'half of four calls failed');
is(allow($two, 'seen') . allow($one, 'seen'), 'ff', 'all sessions are refused at once');
$two->query('ROLLBACK');
is($two->query(q(
SELECT r > '59 minutes' AND r <= '1 hour' FROM idem_breaker_retry_after('seen') r)),
	't', 'and told for how long');
is(record($one, 'seen', 'true'), 'open', 'a call from before that ends now changes nothing');
is(service('seen', 'breaker, opened, calls_ok, calls_failed, calls_refused'),
	'open|1|3|2|2', 'and is counted');
is($two->query("SELECT open_until > now(), open_until < now() + interval '61 minutes'"
		  . " FROM idem_stat_services WHERE service = 'seen'"), 't|t', 'open_until');

# The default: 100 calls, the last 100 of them
is($one->query(q(
SELECT count(*) FILTER (WHERE s = 'closed'), min(i) FILTER (WHERE s = 'open')
FROM (SELECT i, idem_breaker_record('default', false) AS s
	FROM generate_series(1, 100) i OFFSET 0) b)),
	'99|100', 'the default opens with the 100th call');

# The window slides, and starts anew where its length changes
policy('window', window_calls => 10, minimum_calls => 100, open_time => '1 hour');
record($one, 'window', 'true') foreach 1 .. 10;
record($one, 'window', 'false') foreach 1 .. 4;
is(service('window', 'breaker, window_calls, window_failed'), 'closed|10|4', 'a window of ten');
record($one, 'window', 'true') foreach 1 .. 7;
is(service('window', 'breaker, window_calls, window_failed'), 'closed|10|3', 'slides');
record($one, 'window', 'true') foreach 1 .. 9;
is(service('window', 'window_failed'), 0, 'until nothing is left of a failure');
record($one, 'window', 'false') foreach 1 .. 4;
is(record($two, 'window', 'false'), 'open', 'half of it failed');
policy('window2', window_calls => 10);
record($one, 'window2', 'true') foreach 1 .. 5;
policy('window2', window_calls => 20);
record($two, 'window2', 'true');
is(service('window2', 'window_calls'), 1, 'a window of another length starts anew');

# A policy table that has lost its constraint is no way out of bounds.
$one->query('ALTER TABLE idem_service_policies'
	  . ' DROP CONSTRAINT idem_service_policies_window_calls_check');
policy('bounds', window_calls => 2000000000, failure_ratio => 2);
$one->query("SELECT count(idem_breaker_record('bounds', true)) FROM generate_series(1, 3000)");
is(service('bounds', 'breaker, window_calls'), 'closed|1000', 'a window has its limit');
policy('bounds', window_calls => 0, failure_ratio => 2);
record($one, 'bounds', 'true') foreach 1 .. 2;
is(service('bounds', 'breaker, window_calls'), 'closed|1', 'and has room for one');
$one->query("DELETE FROM idem_service_policies WHERE service = 'bounds';"
	  . 'ALTER TABLE idem_service_policies ADD CONSTRAINT idem_service_policies_window_calls_check'
	  . ' CHECK (window_calls BETWEEN 1 AND 1000)');

#
# Slow calls, and what is none
#
policy('slow', minimum_calls => 4, slow_call_ratio => 0.5, slow_call_time => '1 s',
	failure_ratio => 2, open_time => '1 hour');
record($one, 'slow', "true, $_") foreach "'1 s'", 'NULL', "'1.000001 s'";
is(service('slow', 'breaker, window_slow'), 'closed|1', 'slow is what takes longer');
is(record($two, 'slow', "false, '1 day'"), 'open', 'half of the calls were slow');
is(service('slow', 'calls_ok, calls_failed, calls_slow'), '3|1|2', 'a failed call may be slow, too');
policy('off', minimum_calls => 1, failure_ratio => 1.001);
record($one, 'off', 'false') foreach 1 .. 200;
is(service('off', 'breaker, window_failed'), 'closed|100', 'a failure_ratio above one opens nothing');

#
# Half open: 64 connections ask at once, and there are as many trials as the
# policy says.
#
foreach my $n (1, 10, 1000)
{
	my $service = "half$n";

	policy($service, minimum_calls => 1, open_time => '0', half_open_calls => $n,
		half_open_time => '1 hour');
	is(record($one, $service, 'false'), 'open', "$n trials: open");
	hammer($node, "$n trials: 64 clients", <<"EOS", @clients);
INSERT INTO answers
SELECT '$service', count(*) FILTER (WHERE yes), count(*) FILTER (WHERE NOT yes)
FROM (SELECT idem_breaker_allow('$service') AS yes
	FROM generate_series(1, 300) OFFSET 0) b;
EOS
	is($one->query("SELECT sum(yes), sum(no) FROM answers WHERE what = '$service'"),
		"$n|" . (64 * 300 - $n), "$n trials: not one more or less");
	is(service($service, "breaker, calls_refused - " . (64 * 300 - $n)),
		'half_open|0', "$n trials: the rest is counted");
	is($two->query("SELECT idem_breaker_retry_after('$service')"),
		'00:00:01', "$n trials: come back when they are done");

	# what becomes of them
	policy($service, minimum_calls => 1, open_time => '1 hour', half_open_calls => $n,
		half_open_time => '1 hour', failure_ratio => 0.5);
	my $states = $one->query(qq(
SELECT string_agg(DISTINCT s, ',' ORDER BY s)
FROM (SELECT idem_breaker_record('$service', true) AS s
	FROM generate_series(1, $n) OFFSET 0) b));
	is($states, $n == 1 ? 'closed' : 'closed,half_open', "$n trials: success closes");
	is(allow($two, $service), 't', "$n trials: for all");
}

# No more results are taken than trials were given
policy('extra', minimum_calls => 1, open_time => '0', half_open_calls => 2, half_open_time => '1 hour');
record($one, 'extra', 'false');
allow($one, 'extra');
is(join(' ', map { record($two, 'extra', 'true') } 1 .. 5),
	'half_open half_open half_open half_open half_open',
	'results that belong to no trial decide nothing');
is(allow($one, 'extra') . record($one, 'extra', 'true'), 'tclosed', 'the second trial does');

# Trials that fail: open for one, two, four, five hours.  The first rounds are
# over at once.
foreach my $rounds (0 .. 4)
{
	my $service = "double$rounds";
	my %short = (minimum_calls => 1, open_time => '0', half_open_calls => 1,
		half_open_time => '1 hour');

	policy($service, %short);
	if ($rounds > 0)
	{
		record($one, $service, 'false');
		foreach (2 .. $rounds)
		{
			allow($one, $service);
			record($two, $service, 'false');
		}
		allow($two, $service);
	}
	policy($service, %short, open_time => '1 hour', max_open_time => '5 hours');
	is(record($one, $service, 'false'), 'open', "opened " . ($rounds + 1) . " times");
	my $hours = (1, 2, 4, 5, 5)[$rounds];
	is( $two->query(qq(
SELECT r > '$hours hours'::interval - '30 minutes'::interval, r <= '$hours hours'
FROM idem_breaker_retry_after('$service') r)),
		't|t', "for $hours hours");
	is(service($service, 'opened'), $rounds + 1, 'it is counted');
}

# A success in between starts from the beginning
policy('again', minimum_calls => 1, open_time => '0', half_open_calls => 1, half_open_time => '1 hour');
record($one, 'again', 'false');
foreach my $how (qw(false false true))
{
	allow($one, 'again');
	record($one, 'again', $how);
}
policy('again', minimum_calls => 1, open_time => '1 hour', max_open_time => '5 hours');
record($one, 'again', 'false');
is( $two->query("SELECT idem_breaker_retry_after('again') <= '1 hour'"),
	't', 'a breaker that was closed opens for the first time again');

# max_open_time below open_time, and times that no sum can hold
policy('least', minimum_calls => 1, open_time => '1 hour', max_open_time => '0');
record($one, 'least', 'false');
is(allow($two, 'least'), 'f', 'a smaller max_open_time does not shorten open_time');
policy('eternal', minimum_calls => 1, open_time => '100000000 years', max_open_time => '100000000 years');
record($one, 'eternal', 'false');
is(service('eternal', "breaker, open_until, idem_breaker_retry_after('eternal') > '200000 years'"),
	'open|infinity|t', 'open for ever');
policy('eternal2', minimum_calls => 1, open_time => '0', half_open_calls => 1,
	half_open_time => '100000000 years', slow_call_time => '100000000 years');
record($one, 'eternal2', 'false');
is(allow($one, 'eternal2') . allow($one, 'eternal2') . record($two, 'eternal2', "true, '100 years'"),
	'tfclosed', 'a call that may take for ever');

#
# Trials that nobody tells of are given up after half_open_time.
#
my %lost = (minimum_calls => 1, half_open_calls => 3, half_open_time => '1 hour');
policy('lost', %lost, open_time => '0');
record($one, 'lost', 'false');
is(join('', map { allow($one, 'lost') } 1 .. 4), 'tttf', 'three trials are under way');
record($one, 'lost', 'true');
policy('lost', %lost, open_time => '1 hour', half_open_time => '0');
is( $two->query("SELECT idem_breaker_retry_after('lost') > '30 minutes'"),
	't', 'two of them were given up: come back later');
is(allow($two, 'lost') . service('lost', 'breaker || opened'), 'fopen2', 'and the breaker is open');
policy('lost2', %lost, open_time => '0');
record($one, 'lost2', 'false');
allow($one, 'lost2') foreach 1 .. 3;
record($one, 'lost2', 'true') foreach 1 .. 2;
policy('lost2', %lost, open_time => '1 hour', half_open_time => '0');
is(allow($two, 'lost2') . service('lost2', 'breaker'), 'tclosed', 'one of three given up is not too bad');
# ... where failures count for nothing, a trial without an answer was slow
policy('lost3', %lost, open_time => '0', failure_ratio => 2);
is(record($one, 'lost3', "false, '1 day'"), 'open', 'slow calls alone open it');
allow($one, 'lost3') foreach 1 .. 3;
policy('lost3', %lost, open_time => '1 hour', half_open_time => '0', failure_ratio => 2);
is(allow($two, 'lost3') . service('lost3', 'breaker'), 'fopen', 'trials that hang are slow');

#
# Forced by a person: for all sessions, at the commit
#
foreach my $force (qw(forced_open forced_closed))
{
	my $forced = $force eq 'forced_open' ? 'f' : 't';
	my $free = $forced eq 't' ? 'f' : 't';
	my %own = (minimum_calls => 1, open_time => '1 hour');

	# what the force is against
	policy($force, %own);
	record($one, $force, $free eq 't' ? 'true' : 'false');
	is(allow($two, $force), $free, "$force: before");
	$two->query('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1');
	$one->query("BEGIN; UPDATE idem_service_policies SET breaker = '$force' WHERE service = '$force'");
	is(allow($two, $force), $free, "$force: not yet committed");
	$one->query('ROLLBACK');
	is(allow($two, $force) . allow($one, $force), "$free$free", "$force: rolled back");
	$one->query("UPDATE idem_service_policies SET breaker = '$force' WHERE service = '$force'");
	is(allow($two, $force) . allow($one, $force), "$forced$forced",
		"$force: committed, and seen by a transaction that began before");
	is(service($force, 'breaker'), $force, "$force: in the view");
	is($two->query("SELECT idem_breaker_retry_after('$force') IS NULL"), $forced, "$force: retry_after");
	$two->query('COMMIT');
	record($_, $force, 'false') foreach $one, $two, $one;
	is(allow($two, $force), $forced, "$force: whatever happens");
	$one->query("UPDATE idem_service_policies SET breaker = NULL WHERE service = '$force'");
	is(allow($two, $force) . service($force, 'breaker, window_calls'),
		'tclosed|0', "$force: what is released is closed and knows nothing");
	is(record($one, $force, 'false') . allow($two, $force), 'openf', "$force: and is on its own");
	is(service($force, 'calls_failed'), $force eq 'forced_open' ? 4 : 5, "$force: calls were counted");
}

# By INSERT, DELETE and TRUNCATE
$one->query("INSERT INTO idem_service_policies (service, breaker) VALUES ('row', 'forced_open')");
is(allow($two, 'row'), 'f', 'a row comes');
$one->query("DELETE FROM idem_service_policies WHERE service = 'row'");
is(allow($two, 'row'), 't', 'a row goes');
$one->query("INSERT INTO idem_service_policies (service, breaker) VALUES ('row', 'forced_open')");
is(allow($two, 'row') . $one->query('TRUNCATE idem_service_policies') . allow($two, 'row'),
	'ft', 'all rows go');

#
# Names: those of services and of routes, and of databases, are kept apart.
#
$node->safe_psql('postgres', 'CREATE DATABASE other');
$node->safe_psql('other', 'CREATE EXTENSION pg_idem');
@counts = in_one_window(
	sub {
		my ($n) = @_;
		my $apart = "apart$n";

		$node->safe_psql('other', "SELECT idem_budget_allow('$apart', true)");
		$one->query("SELECT idem_begin('$apart', '$apart', NULL),"
			  . " idem_budget_allow('$apart', false), idem_budget_allow('$apart', false)");
		my $here = $one->query("SELECT s.window_requests, t.started FROM idem_stat_services s, idem_stat_routes t"
			  . " WHERE s.service = '$apart' AND t.route = '$apart'");
		# the older one of the two, and so the one that says whether it fits
		return (
			split(/\|/, $node->safe_psql('other',
				"SELECT clock_timestamp() < since + interval '9 s', window_requests, window_retries"
				  . " FROM idem_stat_services WHERE service = '$apart'")),
			$here);
	});
is($counts[2], '2|1', 'a service, and a route of the same name');
is("$counts[0]|$counts[1]", '0|1', 'and a service in another database');
my $long = 'x' x 254;
is( $one->query("SELECT idem_budget_allow('${long}a', false), idem_budget_allow('${long}b', false);"
		  . "SELECT count(*), min(length(service)) FROM idem_stat_services WHERE service LIKE '$long%'"),
	"t|t\n2|255", 'names of 255 bytes that differ in the last one');

# In a query that runs in parallel, by a session that has to read policies
my $parallel = PgIdemTest::Session->new($node, 'postgres');
$parallel->query('SET parallel_setup_cost = 0; SET parallel_tuple_cost = 0;'
	  . 'SET min_parallel_table_scan_size = 0');
like($parallel->query('EXPLAIN SELECT count(*) FROM big'), qr/Gather/, 'a parallel query');
foreach my $call ("idem_budget_allow('p', false)", "idem_breaker_allow('p')",
	"idem_breaker_record('p', true)", "idem_breaker_retry_after('p')",
	'(SELECT count(*) FROM idem_stat_services)', '(SELECT count(*) FROM idem_stat_routes)',
	"idem_hedge_after('p')", 'idem_stats_reset()')
{
	$one->query('TRUNCATE idem_service_policies');
	is($parallel->error("SELECT $call, count(*) FROM big"), '00000', "a parallel query: $call");
}
$_->quit foreach $one, $two, $parallel;

#
# More names than there is room for: 10,240 different ones from 64 connections.
# Each asks for a service whose breaker is open as well, every time.
#
my @ten = ('--client=64', '--transactions=16');
my $memory = "SELECT name, allocated_size FROM pg_shmem_allocations"
  . " WHERE name LIKE 'pg_idem%' OR name = '<anonymous>' OR name IS NULL ORDER BY 1";

foreach my $max (1000, 2, 1)
{
	$node->append_conf('postgresql.conf', "pg_idem.max_tracked = $max");
	$node->restart;
	is($node->safe_psql('postgres', 'SELECT count(*) FROM idem_stat_services'),
		0, "room for $max: a restart forgets all");
	$node->safe_psql(
		'postgres', q(
DROP SEQUENCE IF EXISTS names;
CREATE SEQUENCE names;
TRUNCATE answers, idem_service_policies;
INSERT INTO idem_service_policies (service, minimum_calls, open_time) VALUES ('busy', 1, '1 hour');
SELECT idem_breaker_record('busy', false);));

	my $before = $node->safe_psql('postgres', $memory);
	hammer($node, "room for $max: 64 clients, many names", <<'EOS', @ten);
SELECT count(idem_breaker_allow('busy')), count(idem_budget_allow('name ' || nextval('names'), false))
FROM generate_series(1, 10);
\if :client_id % 8 = 0
INSERT INTO answers (most) SELECT count(*) FROM idem_stat_services;
\endif
EOS
	is($node->safe_psql('postgres', 'SELECT last_value FROM names'),
		10240, "room for $max: so many names");
	cmp_ok($node->safe_psql('postgres', 'SELECT max(most) FROM answers'),
		'<=', $max, "room for $max: never more are there");
	cmp_ok($node->safe_psql('postgres', 'SELECT count(*) FROM idem_stat_services'),
		'>', 0, "room for $max: some are");
	is($node->safe_psql('postgres', $memory), $before, "room for $max: no memory was taken");
	is( $node->safe_psql('postgres',
			"SELECT breaker, opened, calls_refused FROM idem_stat_services WHERE service = 'busy'"),
		'open|1|10240',
		'a service in use keeps its breaker and its counters')
	  if $max == 1000;

	# routes take the same room
	is( $node->safe_psql(
			'postgres', q(
SELECT count(*) FROM generate_series(1, 2000) i, idem_begin('k', 'route ' || i, NULL);
SELECT (SELECT count(*) FROM idem_stat_services) + count(*) <= current_setting('pg_idem.max_tracked')::int,
	bool_or(route = 'route 2000') FROM idem_stat_routes;
TRUNCATE idempotency_keys;)),
		"2000\nt|t",
		"room for $max: routes take the same");

	# Callers that respect an open breaker do not ask for it.  With room for
	# one, it has to go all the same.
	$node->safe_psql('postgres', q(
UPDATE idem_service_policies SET service = 'left alone';
SELECT idem_breaker_record('left alone', false);
SELECT count(idem_budget_allow('flood ' || i, false)) FROM generate_series(1, 3000) i;));
	is( $node->safe_psql('postgres', "SELECT idem_breaker_allow('left alone')"),
		$max > 1 ? 'f' : 't', "room for $max: an open breaker that nobody asks for");
}

$node->stop;
unlike(log_since($node), qr/PANIC|terminated by signal|stuck spinlock|out of shared memory/,
	'nothing has crashed');

done_testing();
