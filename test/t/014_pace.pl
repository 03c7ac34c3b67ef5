# The promise: sweeps keep their pace, whatever happens to the server, its
# settings and its databases.  A crash that a sweep has caused does not come
# again at once; nothing that is locked, cancelled or half done makes expiry
# stop, or wait for longer than it has to.

use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;

use PgIdemTest;
use Test::More;

my $node = new_node('pace', 'restart_after_crash = on');

sub is_swept
{
	my ($db, $key, $name) = @_;
	ok( $node->poll_query_until(
			$db, "SELECT count(*) = 0 FROM idempotency_keys WHERE key = '$key'"),
		$name);
	return;
}

sub workers_started
{
	my ($db_oid, $offset) = @_;
	my @n = log_since($node, $offset) =~
	  /starting background worker process "pg_idem expiry worker for database $db_oid"/g;
	return scalar @n;
}

sub oid_of
{
	my ($db) = @_;
	return $node->safe_psql('postgres',
		"SELECT oid FROM pg_database WHERE datname = '$db'");
}

# A setting, in force in the launcher: it naps again after the reload.
sub set_naptime
{
	my ($naptime) = @_;
	$node->append_conf('postgresql.conf', "pg_idem.expire_naptime = $naptime");
	$node->reload;
	return $node->poll_query_until('postgres',
		"SELECT setting::int * interval '1 s' = '$naptime' FROM pg_settings WHERE name = 'pg_idem.expire_naptime'");
}

$node->append_conf('postgresql.conf', 'log_min_messages = debug1');
$node->reload;
$node->safe_psql('postgres', 'CREATE EXTENSION pg_idem');
my $postgres = oid_of('postgres');

#
# pg_cancel_backend() does not end the launcher: there is nothing to cancel.
#
my $launcher = launcher_pid($node);
$node->safe_psql('postgres', "SELECT pg_cancel_backend($launcher)");
$node->safe_psql('postgres', expired_keys('cancel'));
is_swept('postgres', 'cancel', 'the launcher goes on after pg_cancel_backend()');
is(launcher_pid($node), $launcher, 'and is the same');

#
# A database that somebody has locked is passed over.
#
$node->safe_psql('postgres', 'CREATE DATABASE bobs');
$node->safe_psql('bobs', 'CREATE EXTENSION pg_idem;' . expired_keys('b'));
is_swept('bobs', 'b', 'a database is swept');
my $bobs = oid_of('bobs');
my $session = PgIdemTest::Session->new($node, 'postgres');
$session->query("SET client_min_messages = error");
ok( wait_until(
		sub {
			$session->error('BEGIN; ALTER DATABASE bobs RENAME TO bobs2') eq '00000'
			  or !$session->query('ROLLBACK');
		}),
	'somebody renames it, and does not commit');
my $offset = log_end($node);
foreach my $key ('during1', 'during2', 'during3')
{
	$node->safe_psql('postgres', expired_keys($key));
	is_swept('postgres', $key, "another database is swept: $key");
}
is(workers_started($bobs, $offset), 0, 'no worker waits for the one that is locked');
$session->query('ROLLBACK');
$node->safe_psql('bobs', expired_keys('after'));
is_swept('bobs', 'after', 'unlocked, it is swept again');

#
# An extension that is being dropped is not taken for absent.
#
$session->quit;
$session = PgIdemTest::Session->new($node, 'bobs');
$session->query('BEGIN; DROP EXTENSION pg_idem');
$offset = log_end($node);
ok( wait_until(sub { workers_started($postgres, $offset) >= 12 }),
	'time goes by');
cmp_ok(workers_started($bobs, $offset), '>=', 6,
	'a database whose extension is being dropped is looked at as often as others');
$session->query('ROLLBACK');
$session->quit;

#
# Settings of a database do not stop its sweep.
#
$node->safe_psql('bobs', <<'EOS' . join '', map { expired_keys("exit$_") } 1 .. 9);
ALTER DATABASE bobs SET exit_on_error = on;
ALTER DATABASE bobs SET lock_timeout = '1ms';
ALTER DATABASE bobs SET statement_timeout = '1ms';
ALTER DATABASE bobs SET row_security = off;
CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	IF old.key = 'exit5' THEN RAISE 'not this one'; END IF;
	RETURN old;
END $$;
CREATE TRIGGER no BEFORE DELETE ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION no();
EOS
{
	# they would end our own look at it, too
	local $ENV{PGOPTIONS} = '-c statement_timeout=0 -c lock_timeout=0';
	ok( $node->poll_query_until(
			'bobs', "SELECT string_agg(key, ' ') FROM idempotency_keys",
			'exit5'),
		'exit_on_error and others do not stop a sweep');
}
$node->safe_psql('postgres', 'ALTER DATABASE bobs RESET ALL');

#
# A longer naptime, then a shorter one: it holds at once.
#
ok(set_naptime('10min'), 'a naptime of ten minutes');
my $many = workers_started('\d+');
$node->safe_psql('postgres', expired_keys('reload1'));
ok( $node->poll_query_until(
		'postgres',
		"SELECT count(*) = 1 FROM pg_stat_activity WHERE pid = $launcher AND wait_event_type = 'Extension'"
		  . " AND NOT EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'pg_idem expiry worker')"),
	'the launcher sleeps');
ok(set_naptime('1s'), 'a naptime of a second');
$node->safe_psql('postgres', expired_keys('reload2'));
is_swept('postgres', 'reload2', 'sweeps come at the pace of the new naptime');

#
# CREATE EXTENSION that is prepared, and committed later, wakes the launcher.
# With a naptime of ten minutes nothing else does.
#
ok(set_naptime('10min'), 'a naptime of ten minutes');
$node->safe_psql('postgres', 'CREATE DATABASE twophase');
$node->safe_psql('twophase',
	'BEGIN; CREATE EXTENSION pg_idem;' . expired_keys('p') . "PREPARE TRANSACTION 'p'");
$offset = log_end($node);
my $twophase = oid_of('twophase');
ok(wait_until(sub { workers_started($twophase, 0) > 0 }), 'a look at PREPARE TRANSACTION');
$node->safe_psql('twophase', "COMMIT PREPARED 'p'");
is_swept('twophase', 'p', 'CREATE EXTENSION in a prepared transaction');

#
# After a start nothing is due before a naptime is over.
#
$offset = log_end($node);
$node->safe_psql('postgres', expired_keys('stays'));
$node->restart;
ok( $node->poll_query_until(
		'postgres',
		"SELECT count(*) = 1 FROM pg_stat_activity"
		  . " WHERE backend_type = 'pg_idem launcher' AND wait_event_type = 'Extension'"),
	'after a restart the launcher sleeps');
is(workers_started('\d+', $offset), 0, 'before it does anything');
ok(set_naptime('1s'), 'a naptime of a second');
is_swept('postgres', 'stays', 'then it sweeps');

#
# A sweep that crashes the server is not repeated at once, and ever more
# rarely; others are not put off.
#
$node->safe_psql('postgres', <<'EOS' . expired_keys('boom', 'crash'));
SELECT idem_create_table('crash');
CREATE FUNCTION hang() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_sleep(3600); RETURN old; END $$;
CREATE TRIGGER hang BEFORE DELETE ON crash FOR EACH ROW EXECUTE FUNCTION hang();
EOS
my $worker = "SELECT pid FROM pg_stat_activity"
  . " WHERE backend_type = 'pg_idem expiry worker' AND wait_event = 'PgSleep'";
my $rounds;
for my $crash (1 .. 5)
{
	my $pid = '';

	ok( wait_until(
			sub {
				my ($rc, $out) = $node->psql('postgres', $worker);
				$pid = $out if defined $out && $out =~ /^\d+$/;
				return $pid ne '';
			}),
		"a worker is at the table that crashes it, $crash");
	$rounds = workers_started($postgres, $offset);
	$offset = log_end($node);
	kill 'KILL', $pid;
	ok(wait_for_log_line($node, qr/database system is ready to accept connections/, $offset),
		"the server has crashed and started anew, $crash");
	ok( wait_until(
			sub { ($node->psql('postgres', expired_keys("crash$crash")))[0] == 0 }),
		'it is up again');
	is_swept('postgres', "crash$crash", 'the default store is swept');
	is($node->safe_psql('postgres', 'SELECT count(*) FROM crash'), 1, 'the other key is still there');
}
cmp_ok($rounds, '>=', 3, 'a table is put off for longer the more often it has crashed the server');

$node->stop('fast');
done_testing();
