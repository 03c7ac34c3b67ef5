# The promise: claim, work and stored response are one transaction.  A crash
# anywhere, of one backend or of the whole server, leaves all of them or none:
# the key is free, or it is finished and its work is there.  It is never
# stuck, and the work is never there without the memory of it.
#
# What an outside effect needs, a claim committed in progress or a prepared
# transaction, survives the crash as it stood.

use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use PgIdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main', <<EOC);
restart_after_crash = on
EOC

$node->safe_psql('postgres',
	'CREATE EXTENSION pg_idem; CREATE TABLE charges (key text)');

sub begin
{
	my ($key, $more) = @_;
	$more ||= '';
	return "SELECT proceed, outcome, response"
	  . " FROM idem_begin('$key', 'POST /charges', idem_hash_text('$key')$more);";
}

# claim and work, up to the finish or beyond
sub work
{
	my ($key) = @_;
	return "BEGIN; " . begin($key) . "INSERT INTO charges VALUES ('$key');";
}

sub finish
{
	my ($key) = @_;
	return "SELECT idem_finish('$key', '{\"charged\": \"$key\"}', 201);";
}

# for all that needs no session of its own
my $psql = PgIdemTest::Session->new($node, 'postgres');

sub charges
{
	my ($key) = @_;
	return $psql->query("SELECT count(*) FROM charges WHERE key = '$key'");
}

# A retry must find the key free, run, and be the only one to have run.
sub is_free
{
	my ($key, $what) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is(charges($key), 0, "$what: no work is left");
	is($psql->query(begin($key)),
		't|started|', "$what: the key is free at once");
	return;
}

# A retry must be answered with the result, and the work must be there once.
sub is_replayed
{
	my ($key, $what) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is( $psql->query(begin($key)),
		qq(f|replayed|{"charged": "$key"}),
		"$what: the key is replayed");
	is(charges($key), 1, "$what: the work was done once");
	return;
}

sub is_in_progress
{
	my ($key, $what) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is($psql->query(begin($key)),
		'f|in_progress|', "$what: the claim stands");
	return;
}

# What every crash is to find
sub set_scene
{
	my ($n) = @_;
	my @session = map { PgIdemTest::Session->new($node, 'postgres') } 1 .. 4;

	$session[0]->query(work("claimed$n"));
	$session[1]->query(work("finished$n") . finish("finished$n"));
	$session[2]->query(work("committed$n") . finish("committed$n") . 'COMMIT');
	$session[3]->query("BEGIN; SAVEPOINT a;"
		  . begin("rolledback$n")
		  . "ROLLBACK TO a;"
		  . begin("inner$n")
		  . finish("inner$n"));

	# committed in progress: a worker does its outside effect
	$psql->query(begin("outside$n"));
	# a claim and a finished key, each in a prepared transaction
	$psql->query(
		work("prepclaim$n") . "PREPARE TRANSACTION 'claim$n'");
	$psql->query(
		work("prepfinish$n")
		  . finish("prepfinish$n")
		  . "PREPARE TRANSACTION 'finish$n'");
	is_in_progress("prepclaim$n", 'a prepared claim');
	is_in_progress("prepfinish$n", 'a prepared finish');
	return @session;
}

sub check_scene
{
	my ($n, $what) = @_;

	is_free("claimed$n", "$what after begin");
	is_free("finished$n", "$what after finish");
	is_replayed("committed$n", "$what after commit");
	is_free("rolledback$n", "$what after a savepoint");
	is_free("inner$n", "$what within a savepoint");
	is_in_progress("outside$n", "$what after a claim was committed");
	is_in_progress("prepclaim$n", "$what after a claim was prepared");
	is_in_progress("prepfinish$n", "$what after a finish was prepared");

	# both ways out of a prepared transaction
	if ($n % 2)
	{
		$psql->query("COMMIT PREPARED 'claim$n'");
		$psql->query("COMMIT PREPARED 'finish$n'");
		is(charges("prepclaim$n"), 1, 'the work of a prepared claim is there');
		is_in_progress("prepclaim$n", 'a prepared claim that is committed');
		is_replayed("prepfinish$n", 'a prepared finish that is committed');
	}
	else
	{
		$psql->query("ROLLBACK PREPARED 'claim$n'");
		$psql->query("ROLLBACK PREPARED 'finish$n'");
		is_free("prepclaim$n", 'a prepared claim that is rolled back');
		is_free("prepfinish$n", 'a prepared finish that is rolled back');
	}

	# the worker of the outside effect comes back and finishes
	$psql->query(
		"INSERT INTO charges VALUES ('outside$n');"
		  . "SELECT idem_finish('outside$n', '{\"charged\": \"outside$n\"}',"
		  . " attempt => 1)");
	is_replayed("outside$n", 'a claim finished after the crash');
	return;
}

#
# A backend that is told to end
#
my $session = PgIdemTest::Session->new($node, 'postgres');
$session->query(work('terminated'));
is_in_progress('terminated', 'before its end');
$node->safe_psql('postgres', "SELECT pg_terminate_backend($session->{pid})");
ok( $node->poll_query_until(
		'postgres',
		"SELECT count(*) = 0 FROM pg_stat_activity"
		  . " WHERE pid = $session->{pid}"),
	'a backend is gone');
$session->abandon;
is_free('terminated', 'pg_terminate_backend');

#
# kill -9 of a backend between begin and finish.  The server restarts all
# of them.
#
my @session = set_scene(1);
my $offset = log_end($node);
kill 9, $session[0]->{pid};
ok(wait_for_log_line($node, qr/all server processes terminated; reinitializing/, $offset),
	'the server restarts after a backend was killed');
ok($node->poll_query_until('postgres', 'SELECT 1', '1'), 'and is back');
$_->abandon foreach @session, $psql;
$psql = PgIdemTest::Session->new($node, 'postgres');
check_scene(1, 'kill -9 of a backend');

#
# The whole server, without a checkpoint: pg_ctl stop -m immediate
#
@session = set_scene(2);
$node->stop('immediate');
$_->abandon foreach @session, $psql;
$node->start;
$psql = PgIdemTest::Session->new($node, 'postgres');
check_scene(2, 'immediate shutdown');

#
# After both, the worker is there again.
#
$node->safe_psql('postgres',
	'BEGIN; '
	  . begin('short', ", ttl => '1 millisecond'")
	  . finish('short')
	  . 'COMMIT');
ok( $node->poll_query_until(
		'postgres',
		"SELECT count(*) = 0 FROM idempotency_keys WHERE key = 'short'"),
	'expired keys are removed after a crash');

#
# The table and its primary key agree.
#
my $keys = "SELECT string_agg(key || state, ',' ORDER BY key)"
  . " FROM idempotency_keys WHERE key > '';";
is( $node->safe_psql(
		'postgres', "SET enable_seqscan = off; SET enable_bitmapscan = off; $keys"),
	$node->safe_psql(
		'postgres',
		"SET enable_indexscan = off; SET enable_bitmapscan = off; $keys"),
	'the index has what the table has');

$psql->quit;
done_testing();
