# The promise: a sweep never stands in the way of whoever owns the database.
# DROP DATABASE, ALTER DATABASE RENAME and CREATE DATABASE ... TEMPLATE give
# up after 5 seconds if somebody is connected; DROP EXTENSION and ALTER TABLE
# wait for as long as somebody has a lock; a shutdown waits for everybody.
#
# Every scene plays in a database of its own, while a worker is at a backlog
# that takes it far longer than the command may.  Many extensions with
# background workers got this wrong, and it is found out at the worst moment.

use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use PgIdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# Small batches make the backlog last.
my $node = new_node('main', <<EOC);
pg_idem.expire_batch = 1
EOC

# A template with a backlog; a template is not swept itself.
$node->safe_psql('postgres', 'CREATE DATABASE backlog IS_TEMPLATE true');
$node->safe_psql(
	'backlog', q(
CREATE EXTENSION pg_idem;
INSERT INTO idempotency_keys (key, tenant, route, state, attempt,
	result_dropped, created_at, finished_at, expires_at)
SELECT 'k' || i, '', 'r', 'completed', 1, false,
	now() - interval '2 days', now() - interval '2 days',
	now() - interval '1 day'
FROM generate_series(1, 50000) i;));

# Make a database with the backlog, and wait until a worker is at it.
sub new_backlog
{
	my ($db) = @_;

	$node->safe_psql('postgres', "CREATE DATABASE $db TEMPLATE backlog");
	ok(being_swept($db), "$db: a sweep is going on");
	return;
}

sub being_swept
{
	my ($db) = @_;
	return $node->poll_query_until(
		'postgres',
		"SELECT count(*) = 1 FROM pg_stat_activity"
		  . " WHERE backend_type = 'pg_idem expiry worker'"
		  . " AND datname = '$db' AND query LIKE 'removing%idempotency_keys%'");
}

sub drop_database
{
	my ($db) = @_;
	sqlstate_is($node, 'postgres', undef, "DROP DATABASE $db", '00000',
		"$db: DROP DATABASE");
	return;
}

# Was there really something left to sweep?
sub still_backlog
{
	my ($db, $store) = @_;
	cmp_ok($node->safe_psql($db, "SELECT count(*) FROM $store"),
		'>', 0, "$db: the sweep was not at its end");
	return;
}

# DROP DATABASE
new_backlog('db_drop');
drop_database('db_drop');

# CREATE DATABASE ... TEMPLATE; the copy has the extension and a backlog too
new_backlog('db_source');
sqlstate_is($node, 'postgres', undef,
	'CREATE DATABASE db_copy TEMPLATE db_source',
	'00000', 'db_source: CREATE DATABASE ... TEMPLATE');
still_backlog('db_copy', 'idempotency_keys');
drop_database('db_copy');

# ... after which the sweep of the source goes on
ok(being_swept('db_source'), 'db_source: the sweep is taken up again');

# ALTER DATABASE RENAME
sqlstate_is($node, 'postgres', undef,
	'ALTER DATABASE db_source RENAME TO db_renamed',
	'00000', 'db_source: ALTER DATABASE RENAME');
still_backlog('db_renamed', 'idempotency_keys');
ok(being_swept('db_renamed'), 'db_renamed: the sweep is taken up again');
drop_database('db_renamed');

# Whatever locks the store, within a few batches
new_backlog('db_table');
foreach my $ddl (
	'ALTER TABLE idempotency_keys SET (fillfactor = 60)',
	'CREATE INDEX extra ON idempotency_keys (created_at)',
	'ALTER TABLE idempotency_keys RENAME TO keys',
	'LOCK TABLE keys IN ACCESS EXCLUSIVE MODE')
{
	ok( $node->poll_query_until(
			'postgres',
			"SELECT count(*) = 1 FROM pg_stat_activity"
			  . " WHERE backend_type = 'pg_idem expiry worker'"
			  . " AND datname = 'db_table'"),
		'db_table: a sweep is going on');
	sqlstate_is($node, 'db_table', undef,
		"SET lock_timeout = '5s'; BEGIN; $ddl; COMMIT;",
		'00000', "db_table: $ddl");
}
still_backlog('db_table', 'keys');

# An open transaction that has locked the store holds up the sweep of that
# store only, and the sweep does not wait for it: the worker ends.
my $session = PgIdemTest::Session->new($node, 'db_table');
$session->query('BEGIN; LOCK TABLE keys IN SHARE MODE');
ok( $node->poll_query_until(
		'postgres',
		"SELECT count(*) = 0 FROM pg_stat_activity"
		  . " WHERE backend_type = 'pg_idem expiry worker'"
		  . " AND datname = 'db_table'"),
	'db_table: the worker does not wait for a locked store');
is($node->safe_psql('postgres', 'SELECT count(*) FROM pg_locks WHERE NOT granted'),
	0, 'nobody waits');
$session->query('COMMIT');
$session->quit;
drop_database('db_table');

# DROP EXTENSION
new_backlog('db_extension');
sqlstate_is($node, 'db_extension', undef,
	"SET lock_timeout = '5s'; DROP EXTENSION pg_idem",
	'00000', 'db_extension: DROP EXTENSION');
drop_database('db_extension');

# Nothing keeps old row versions back: the launcher has no transaction open,
# neither while a worker runs nor while it sleeps.
new_backlog('db_last');
my $idle =
    "SELECT count(*) = 1 FROM pg_stat_activity"
  . " WHERE backend_type = 'pg_idem launcher'"
  . " AND backend_xmin IS NULL AND backend_xid IS NULL AND xact_start IS NULL"
  . " AND datname IS NULL";
ok($node->poll_query_until('postgres', $idle),
	'the launcher has no transaction open while it waits for a worker');

# A worker that is ended ends, and the launcher starts another.
my $worker =
    "FROM pg_stat_activity"
  . " WHERE backend_type = 'pg_idem expiry worker' AND datname = 'db_last'";
my $pid = $node->safe_psql('postgres', "SELECT pid $worker");
$node->safe_psql('postgres', "SELECT pg_terminate_backend($pid)");
ok( $node->poll_query_until(
		'postgres', "SELECT count(*) = 1 $worker AND pid <> $pid"),
	'db_last: a worker that was ended is followed by another');

# Where each row takes long to delete, here for a trigger, often for a foreign
# key without an index, a batch must not go on until it is full.
drop_database('db_last');
$node->append_conf('postgresql.conf', 'pg_idem.expire_batch = 1000');
$node->append_conf('postgresql.conf', 'pg_idem.expire = off');
$node->reload;
$node->safe_psql('postgres', 'CREATE DATABASE db_slow TEMPLATE backlog');
$node->safe_psql(
	'db_slow', q(
CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS
$$BEGIN PERFORM pg_sleep(0.02); RETURN OLD; END$$;
CREATE TRIGGER slow BEFORE DELETE ON idempotency_keys
FOR EACH ROW EXECUTE FUNCTION slow();));
$node->append_conf('postgresql.conf', 'pg_idem.expire = on');
$node->reload;
ok(being_swept('db_slow'), 'db_slow: a sweep is going on');
sqlstate_is($node, 'db_slow', undef,
	"SET lock_timeout = '5s'; ALTER TABLE idempotency_keys SET (fillfactor = 60)",
	'00000', 'db_slow: ALTER TABLE');
ok(being_swept('db_slow'), 'db_slow: a sweep is going on');
drop_database('db_slow');
$node->safe_psql('postgres', 'DROP DATABASE IF EXISTS db_slow WITH (FORCE)');

# A fast shutdown.  (With small batches from the first one on, lest the
# backlog be gone by then.)
$node->append_conf('postgresql.conf', 'pg_idem.expire_batch = 1');
$node->reload;
ok($node->poll_query_until('postgres', 'SHOW pg_idem.expire_batch', '1'),
	'small batches again');
new_backlog('db_last');
$node->stop('fast');
$node->append_conf('postgresql.conf', 'pg_idem.expire = off');
$node->start;
pass('a fast shutdown');
still_backlog('db_last', 'idempotency_keys');

# ... and it was one, not the end of a crash
$node->stop('fast');
my $log = log_since($node);
unlike($log, qr/not properly shut down/, 'no crash');
my %fatal;
$fatal{$_}++ foreach $log =~ /\[(\d+)\] FATAL:  terminating/g;
is(join(' ', grep { $fatal{$_} > 1 } keys %fatal),
	'', 'whoever is told to end does so once, and not within its own end');
my @errors = grep { !/due to administrator command/ && !/database .* does not exist/ }
  $log =~ /^.*(?:WARNING|ERROR|FATAL|PANIC):  .*$/mg;
is("@errors", '', 'nothing else in the log');

done_testing();
