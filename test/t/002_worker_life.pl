# The promise: expired keys go away by themselves, in every database that
# uses pg_idem, and nothing else does: not a claim that may still be running,
# not one that is on hold for a person.  And the worker is a good citizen: it
# leaves alone what it has no business with, fills no log when it cannot run,
# and comes back when it was ended.
#
# Without this, keys would pile up for ever, or worse, vanish early and let a
# payment run twice.

use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use PgIdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main', <<EOC);
log_min_messages = debug2
EOC

# A key committed in progress; its lease and its retention end as told.
sub unfinished
{
	my ($key, $lease, $retention) = @_;
	return "INSERT INTO idempotency_keys (key, tenant, route, state, attempt,"
	  . " result_dropped, created_at, lease_until, expires_at)"
	  . " VALUES ('$key', '', 'r', 'in_progress', 3, false,"
	  . " now() - interval '2 days', now() + interval '$lease',"
	  . " now() + interval '$retention');";
}

sub no_key_like
{
	my ($pattern, $store) = @_;
	$store ||= 'idempotency_keys';
	return "SELECT count(*) = 0 FROM $store WHERE key LIKE '$pattern'";
}

# How many workers were started for a database, by its OID
sub workers_started
{
	my ($oid, $offset) = @_;
	my @n = log_since($node, $offset) =~
	  /starting background worker process "pg_idem expiry worker for database $oid"/g;
	return scalar @n;
}

sub wait_for_no_worker
{
	ok( $node->poll_query_until(
			'postgres',
			"SELECT count(*) = 0 FROM pg_stat_activity"
			  . " WHERE backend_type = 'pg_idem expiry worker'"),
		'no worker runs');
	return;
}

#
# There is a launcher, and it says so.
#
ok( $node->poll_query_until(
		'postgres',
		"SELECT count(*) = 1 FROM pg_stat_activity"
		  . " WHERE backend_type = 'pg_idem launcher'"),
	'the launcher shows in pg_stat_activity');

#
# Several databases, and the ones that are left alone
#
$node->safe_psql('postgres', 'CREATE EXTENSION pg_idem');
$node->safe_psql('postgres', "CREATE DATABASE one");
$node->safe_psql('one', 'CREATE SCHEMA idem; CREATE EXTENSION pg_idem SCHEMA idem');
$node->safe_psql('postgres', 'CREATE DATABASE absent');
$node->safe_psql('postgres',
	'CREATE DATABASE closed TEMPLATE postgres ALLOW_CONNECTIONS false');
$node->safe_psql('postgres',
	'CREATE DATABASE stencil TEMPLATE postgres IS_TEMPLATE true');
# one that is read-only by default, and one whose store cannot be swept, for
# its owner may not even look at it
$node->safe_psql('postgres', 'CREATE DATABASE readonly');
$node->safe_psql('readonly',
	'CREATE EXTENSION pg_idem; ' . expired_keys('r*5')
	  . 'ALTER DATABASE readonly SET default_transaction_read_only = on;'
	  . "ALTER DATABASE readonly SET default_transaction_isolation = 'serializable'");
$node->safe_psql('postgres', 'CREATE DATABASE broken');
$node->safe_psql(
	'broken', q(
CREATE EXTENSION pg_idem;
CREATE ROLE keeper;
CREATE SCHEMA locked;
SELECT idem_create_table('locked.keys');
ALTER TABLE locked.keys OWNER TO keeper;));

# and one with a key that cannot go, for business data refer to it
$node->safe_psql('postgres', 'CREATE DATABASE tied');
$node->safe_psql('tied',
	'CREATE EXTENSION pg_idem; BEGIN; ' . expired_keys('f*100')
	  . 'CREATE TABLE charges (key text, tenant text, route text,'
	  . ' FOREIGN KEY (key, tenant, route) REFERENCES idempotency_keys'
	  . ' DEFERRABLE INITIALLY DEFERRED);'
	  . "INSERT INTO charges VALUES ('f7', '', 'r'); COMMIT;");

my %oid =
  map { $_ => $node->safe_psql('postgres',
		"SELECT oid FROM pg_database WHERE datname = '$_'") }
  qw(postgres one broken absent closed stencil template0 template1);

my $offset = log_end($node);
$node->safe_psql('stencil', expired_keys('t*5'));
$node->safe_psql('postgres',
	expired_keys('a*2500') . unfinished('live', '1 hour', '-1 hour')
	  . unfinished('lost', '-1 hour', '-1 hour')
	  . unfinished('kept', '-1 hour', '1 hour'));
$node->safe_psql('one',
	"SET search_path = idem, public; SELECT idem_create_table('further');"
	  . expired_keys('b*10')
	  . "INSERT INTO further SELECT * FROM idempotency_keys;");

ok($node->poll_query_until('postgres', no_key_like('a%')),
	'expired keys are removed, more than one batch of them');
ok( $node->poll_query_until(
		'one', no_key_like('b%', 'idem.idempotency_keys')),
	'in another database, whatever the schema of the extension');
ok($node->poll_query_until('one', no_key_like('b%', 'idem.further')),
	'from a further store');
ok($node->poll_query_until('readonly', no_key_like('r%')),
	'from a database that is read-only by default');

ok( $node->poll_query_until(
		'tied',
		"SELECT string_agg(key, ',') FROM idempotency_keys", 'f7'),
	'a key that cannot be removed does not keep the others');
ok( wait_for_log_line(
		$node,
		qr/LOG:  could not remove expired idempotency key "f7" from public.idempotency_keys: .*foreign key/),
	'and the log says which');

#
# What was left in progress
#
ok($node->poll_query_until('postgres', no_key_like('lost')),
	'a claim goes when its lease and its retention are over');
like(
	log_since($node, $offset),
	qr/LOG:  removed unfinished idempotency key "lost"\n.*DETAIL:  Tenant "", route "r", attempt 3/,
	'and the log says which');
is( $node->safe_psql(
		'postgres', 'SELECT key FROM idempotency_keys ORDER BY key'),
	"kept\nlive",
	'a live lease, or retention to come, keeps a claim');

#
# A key that is finished is gone for idem_begin before any sweep; one that is
# being worked on right now is not taken away from under its transaction.
#
my $session = PgIdemTest::Session->new($node, 'postgres');
$session->query("BEGIN; SELECT idem_begin('mine', 'r', NULL,"
	  . " ttl => '1 millisecond', lease => '1 millisecond')");
$node->safe_psql('postgres', expired_keys('after*1'));
ok($node->poll_query_until('postgres', no_key_like('after%')),
	'the sweep does not wait for a running claim');
$session->query(
	"SELECT idem_finish('mine', '1', ttl => '1 hour'); COMMIT");
is( $node->safe_psql('postgres', "SELECT (idem_lookup('mine', 'r')).state"),
	'completed', 'nor does it remove one');
$session->quit;

#
# pg_idem.on_lost_lease = hold: a person decides.  (Set for one database.)
#
$node->safe_psql('postgres',
	'ALTER DATABASE one SET pg_idem.on_lost_lease = hold');
# a worker that started before that may still be at it
wait_for_no_worker();
$node->safe_psql('one', 'SET search_path = idem;'
	  . unfinished('held', '-1 day', '-1 day') . expired_keys('c*1'));
ok( $node->poll_query_until(
		'one', no_key_like('c%', 'idem.idempotency_keys')),
	'with "hold", finished keys go');
is( $node->safe_psql(
		'one', 'SELECT string_agg(key, \',\') FROM idem.idempotency_keys'),
	'held', 'with "hold", a claim stays whatever is over');

#
# Who is looked at how often
#
ok( wait_until(sub { workers_started($oid{postgres}, $offset) >= 8 }),
	'a database with the extension is looked at again and again');
cmp_ok(workers_started($oid{absent}, $offset), '<',
	workers_started($oid{postgres}, $offset) - 1,
	'one without it ever more rarely');
my @complaints =
  log_since($node, $offset) =~ /ERROR:  permission denied for schema locked/g;
cmp_ok(scalar @complaints, '>', 0, 'a store that cannot be swept is logged');
cmp_ok(
	scalar @complaints, '<',
	workers_started($oid{postgres}, $offset) - 1,
	'but not in every round');
is(workers_started($oid{closed}, $offset), 0,
	'never one that allows no connections');
is(workers_started($oid{stencil}, $offset), 0, 'never a template');
is(workers_started($oid{template0}), 0, 'never template0');
is(workers_started($oid{template1}), 0, 'never template1');
is($node->safe_psql('stencil', 'SELECT count(*) FROM idempotency_keys'),
	5, 'so the keys in a template stay');

#
# A launcher that somebody ended comes back.  Meanwhile expiry was switched
# off, so the new one must not do anything before it is on again.
#
my $launcher = launcher_pid($node);
$node->append_conf('postgresql.conf', 'pg_idem.expire = off');
$node->reload;
$node->safe_psql('postgres', "SELECT pg_terminate_backend($launcher)");
ok( $node->poll_query_until(
		'postgres',
		"SELECT count(*) = 1 FROM pg_stat_activity"
		  . " WHERE backend_type = 'pg_idem launcher' AND pid <> $launcher"
		  . " AND wait_event_type = 'Extension'"),
	'a launcher that was ended is started again');
wait_for_no_worker();
$offset = log_end($node);
$node->safe_psql('postgres', expired_keys('off*3'));
is($node->safe_psql('postgres', "SELECT idem_expire()"),
	3, 'idem_expire() works all the same');
$node->safe_psql('postgres', expired_keys('on*3'));
$node->append_conf('postgresql.conf', 'pg_idem.expire = on');
is( $node->safe_psql(
		'postgres',
		"SELECT count(*) FROM idempotency_keys WHERE key LIKE 'on%'"),
	3, 'nothing is removed while it is off');
is(workers_started('\d+', $offset), 0, 'and no worker is started');
$node->reload;
ok($node->poll_query_until('postgres', no_key_like('on%')),
	'switched on again, it works');

#
# CREATE EXTENSION wakes the launcher.  With a naptime of ten minutes nothing
# else can explain that a key goes.
#
$node->safe_psql('postgres', 'CREATE DATABASE busy');
$node->safe_psql('postgres', 'CREATE DATABASE late');
$offset = log_end($node);
$node->restart;
my @connectable = split /\n/,
  $node->safe_psql('postgres',
	'SELECT oid FROM pg_database WHERE datallowconn AND NOT datistemplate');
ok( wait_until(
		sub { !grep { !workers_started($_, $offset) } @connectable }),
	'the first round looks at every database');

# (a restart, for after a reload those that were looked at with the short
# naptime would be due once more)
$node->append_conf('postgresql.conf', 'pg_idem.expire_naptime = 600s');
$node->restart;
ok($node->poll_query_until('postgres', 'SHOW pg_idem.expire_naptime', '10min'),
	'the naptime is long');
wait_for_no_worker();
$node->safe_psql('absent',
	"BEGIN; CREATE EXTENSION pg_idem;" . expired_keys('new*3') . "COMMIT");
ok($node->poll_query_until('absent', no_key_like('new%')),
	'CREATE EXTENSION wakes the launcher');

# ... but does not switch on what is off
$node->append_conf('postgresql.conf', 'pg_idem.expire = off');
$node->reload;
ok($node->poll_query_until('postgres', 'SHOW pg_idem.expire', 'off'),
	'expiry is off');
$node->safe_psql('absent',
	"BEGIN; DROP EXTENSION pg_idem; CREATE EXTENSION pg_idem;"
	  . expired_keys('off*3') . "COMMIT");
is($node->safe_psql('absent', 'SELECT count(*) FROM idempotency_keys'),
	3, 'then CREATE EXTENSION changes nothing');
$node->append_conf('postgresql.conf', 'pg_idem.expire = on');
$node->reload;
ok($node->poll_query_until('absent', no_key_like('off%')),
	'until it is on again');

# ... also when it is busy elsewhere at that moment: the sweep of one database
# is held up by a trigger that waits for us, while another gets the extension.
# What holds up a sweep for ten seconds is broken off; on a machine that has
# not got through in that time, all is done again.
sub is_held_up
{
	return $node->safe_psql('postgres',
		"SELECT count(*) FROM pg_stat_activity"
		  . " WHERE backend_type = 'pg_idem expiry worker' AND datname = 'busy'"
		  . " AND state = 'active' AND query LIKE 'removing%idempotency_keys%'");
}

# Returns whether the sweep was held up all the while, and then went on.
sub create_meanwhile
{
	my $holder = PgIdemTest::Session->new($node, 'busy');
	my $late = PgIdemTest::Session->new($node, 'late');

	$holder->query('BEGIN; SELECT pg_advisory_xact_lock(4711)');
	$late->query('DROP EXTENSION IF EXISTS pg_idem; BEGIN; CREATE EXTENSION pg_idem;'
		  . expired_keys('late*3'));
	$node->safe_psql(
		'busy', q(
DROP EXTENSION IF EXISTS pg_idem;
BEGIN;
CREATE EXTENSION pg_idem;
CREATE OR REPLACE FUNCTION hold_up() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	WHILE NOT pg_try_advisory_xact_lock(4711) LOOP
		PERFORM pg_sleep(0.01);
	END LOOP;
	RETURN OLD;
END $$;
CREATE TRIGGER hold_up BEFORE DELETE ON idempotency_keys
FOR EACH ROW EXECUTE FUNCTION hold_up();)
		  . expired_keys('d*1') . 'COMMIT');
	ok(wait_until(\&is_held_up), 'a sweep is held up');
	$late->query('COMMIT');
	my $was_held_up = is_held_up();
	$holder->query('COMMIT');
	ok(wait_until(sub { !is_held_up() }), 'and has an end');
	$_->quit foreach $holder, $late;
	return $was_held_up &&
	  $node->safe_psql('busy', no_key_like('d%')) eq 't';
}

my $tries = 0;
until (create_meanwhile())
{
	die 'too slow for a step of a sweep' if ++$tries == 20;
}
ok($node->poll_query_until('late', no_key_like('late%')),
	'CREATE EXTENSION in the meantime is not forgotten');

#
# Without a free worker slot: one line in the log, and nothing else.  There
# are many databases that want a worker, each of which could log one.
#
$node->append_conf('postgresql.conf', <<EOC);
max_worker_processes = 1
max_logical_replication_workers = 0
pg_idem.expire_naptime = 1s
EOC
$offset = log_end($node);
$node->restart;
ok( wait_for_log_line(
		$node, qr/LOG:  pg_idem could not start an expiry worker/, $offset),
	'the log says that there is no worker slot');
$node->safe_psql('postgres', expired_keys('slot*3'));
is($node->safe_psql('postgres', "SELECT idem_expire()"),
	3, 'idem_expire() needs no slot');
$node->append_conf('postgresql.conf', 'max_worker_processes = 2');
$node->safe_psql('postgres', expired_keys('slot*3'));
my $end = log_end($node);
$node->restart;
my @lines = substr(log_since($node, $offset), 0, $end - $offset) =~
  /pg_idem could not start an expiry worker/g;
is(scalar @lines, 1, 'it says so once');
ok($node->poll_query_until('postgres', no_key_like('slot%')),
	'with a slot it works');

#
# Nothing of all that is an error.
#
wait_for_no_worker();
$node->stop;
my @errors = grep {
	!/due to administrator command|permission denied for schema locked/
}
  log_since($node) =~ /^.*(?:WARNING|ERROR|FATAL|PANIC):  .*$/mg;
my @cancelled = grep { /canceling statement due to statement timeout/ } @errors;
cmp_ok(scalar @cancelled, '<=', $tries,
	'no step is broken off but those that were held up for too long');
@errors = grep { !/canceling statement due to statement timeout/ } @errors;
is("@errors", '', 'there is no error in the log');

done_testing();
