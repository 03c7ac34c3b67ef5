# The promise: what a backend remembers of the extension and of its stores
# never outlives them.  A connection pool keeps connections for days, while an
# administrator drops and creates the extension, moves the store, rebuilds its
# indexes.  A remembered OID or index that is used after that means an error
# in the best case, and a claim in a table that is gone in the worst.
#
# The same holds for the worker, which must cope with an extension that comes
# and goes while it looks.

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
log_min_messages = debug1
EOC
my $psql = PgIdemTest::Session->new($node, 'postgres');
my $admin = PgIdemTest::Session->new($node, 'postgres');

# A whole life of a key: three calls, and what each of them says
my $n = 0;

sub life
{
	my ($schema, $store) = @_;
	my $key = 'k' . ++$n;
	my $more = defined $store ? ", store => '$store'" : '';

	return $psql->query("SET search_path = $schema, public;"
		  . "BEGIN; SELECT outcome FROM idem_begin('$key', 'r', NULL$more);"
		  . "SELECT idem_finish('$key', '$n'$more); COMMIT;"
		  . "SELECT outcome, response FROM idem_begin('$key', 'r', NULL$more);"
		  . "SELECT (idem_lookup('$key', 'r'$more)).state");
}

sub is_alive
{
	my ($what, $schema, $store) = @_;
	my $said = life($schema || 'public', $store);

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is($said, "started\n\nreplayed|$n\ncompleted", $what);
	return;
}

#
# DROP and CREATE EXTENSION, by another session and by this one
#
$admin->query('CREATE EXTENSION pg_idem; CREATE SCHEMA idem');
is_alive('a first call');
$admin->query('DROP EXTENSION pg_idem');
is($psql->error("SELECT idem_begin('k', 'r', NULL)"),
	'42883', 'a dropped extension');
$admin->query('CREATE EXTENSION pg_idem SCHEMA idem');
is_alive('after DROP and CREATE EXTENSION in another schema', 'idem');
$psql->query('DROP EXTENSION pg_idem; CREATE EXTENSION pg_idem SCHEMA public');
is_alive('after the session itself has done so');
$psql->query('BEGIN; DROP EXTENSION pg_idem; CREATE EXTENSION pg_idem SCHEMA idem');
is($psql->query("SELECT outcome FROM idem.idem_begin('k', 'r', NULL)"),
	'started', 'within the transaction that does so');
$psql->query('ROLLBACK');
is_alive('after that was rolled back');
$psql->query('BEGIN; SAVEPOINT a; DROP EXTENSION pg_idem; ROLLBACK TO a;');
is($psql->query("SELECT outcome FROM idem_begin('k', 'r', NULL)"),
	'started', 'after DROP EXTENSION was rolled back to a savepoint');
$psql->query('ROLLBACK');

#
# Policies are remembered too, those of routes and of services.
#
my $rules = "INSERT INTO idem_route_policies (route, lease) VALUES ('ruled', '3 hours');"
  . "INSERT INTO idem_service_policies (service, breaker) VALUES ('ruled', 'forced_open');";
# which of the two this session goes by
my $ruled = "DO \$\$ BEGIN PERFORM idem_begin('x', 'ruled', NULL); END \$\$;"
  . "SELECT lease_until > now() + interval '2 hours', NOT idem_breaker_allow('ruled')"
  . " FROM idempotency_keys WHERE route = 'ruled';"
  . "DELETE FROM idempotency_keys WHERE route = 'ruled'";
my $anew = 'DROP EXTENSION pg_idem; CREATE EXTENSION pg_idem;';
is($psql->query($ruled), 'f|f', 'no policies');
is($psql->query($rules . $ruled), 't|t', 'policies');
is($psql->query($anew . $ruled), 'f|f', 'a new extension has none');
is($psql->query($anew . $rules . $ruled), 't|t', 'or others');
is($psql->query("BEGIN; $anew $ruled; ROLLBACK; $ruled"), "f|f\nt|t", 'one that was rolled back');
is($psql->query("BEGIN; SAVEPOINT a; TRUNCATE idem_route_policies, idem_service_policies; $ruled; ROLLBACK TO a; $ruled; COMMIT"),
	"f|f\nt|t", 'nor does TRUNCATE last that was rolled back to a savepoint');
$admin->query($anew);
is($psql->query($ruled), 'f|f', 'another session makes a new extension');
$admin->query($rules);
is($psql->query($ruled), 't|t', 'and policies');
is($psql->query("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1; $ruled"), "1\nt|t", 'in a transaction');
$admin->query("UPDATE idem_route_policies SET lease = '1 hour'; UPDATE idem_service_policies SET breaker = NULL");
is($psql->query("$ruled; COMMIT"), 'f|f', 'that began before they were changed');
$admin->query('ALTER TABLE idem_service_policies SET SCHEMA idem; ALTER TABLE idem_route_policies RENAME TO r');
isnt($psql->error("SELECT idem_breaker_allow('ruled')"), 'XX000', 'a table of policies that was renamed');
$admin->query('ALTER TABLE idem.idem_service_policies SET SCHEMA public; ALTER TABLE r RENAME TO idem_route_policies');
is($psql->query($ruled), 'f|f', 'and back');
$admin->query("ALTER TABLE idem_service_policies ADD COLUMN more int");
is($psql->query($ruled), 'f|f', 'a further column does no harm');
$admin->query("ALTER TABLE idem_service_policies DROP COLUMN retry_ratio");
is($psql->error("SELECT idem_breaker_allow('ruled')"), '55000', 'one without a column is refused');
$admin->query($anew);
is($psql->query($ruled), 'f|f', 'until it is made anew');

# A prepared statement, and a function that was called before
$psql->query("PREPARE p AS SELECT outcome FROM idem_begin(\$1, 'r', NULL);"
	  . "EXECUTE p('prep1')");
$admin->query('DROP EXTENSION pg_idem; CREATE EXTENSION pg_idem');
is($psql->query("EXECUTE p('prep1')"),
	'started', 'a prepared statement finds the new store');
$psql->query('DEALLOCATE p');

#
# The default store moves.
#
$admin->query('ALTER TABLE public.idempotency_keys SET SCHEMA idem');
is_alive('after ALTER TABLE SET SCHEMA');
$admin->query('ALTER TABLE idem.idempotency_keys RENAME TO keys');
is_alive('after ALTER TABLE RENAME');
is($admin->query('SELECT count(*) > 0 FROM idem.keys'),
	't', 'the keys are in the table that was moved');
is($admin->query("SET pg_idem.ttl = 1; BEGIN; SELECT idem_begin('e', 'r', NULL, ttl => '1 microsecond') IS NULL;"
		  . "SELECT idem_finish('e', NULL); COMMIT; SELECT idem_expire(); RESET pg_idem.ttl;"),
	"f\n\n1", 'idem_expire finds it too');
$admin->query('ALTER TABLE idem.keys RENAME TO idempotency_keys;'
	  . 'ALTER TABLE idem.idempotency_keys SET SCHEMA public');
is_alive('back again');

#
# Indexes and pages are rebuilt, while a claim is open in another transaction
# or between two calls of one.
#
foreach my $ddl (
	'REINDEX TABLE idempotency_keys',
	'REINDEX TABLE CONCURRENTLY idempotency_keys',
	'REINDEX INDEX CONCURRENTLY idempotency_keys_pkey',
	'VACUUM FULL idempotency_keys',
	'CLUSTER idempotency_keys USING idempotency_keys_pkey',
	'VACUUM (INDEX_CLEANUP on) idempotency_keys',
	'CREATE INDEX extra ON idempotency_keys (created_at)',
	'DROP INDEX extra',
	'CREATE INDEX extra ON idempotency_keys (lower(route)) WHERE tenant = \'\'',
	'DROP INDEX CONCURRENTLY extra',
	'ALTER TABLE idempotency_keys SET (fillfactor = 80)',
	'ANALYZE idempotency_keys',
	'TRUNCATE idempotency_keys')
{
	$admin->query($ddl);
	is_alive("after $ddl");
}
# the primary key is another index, under another name
$admin->query(q(
CREATE UNIQUE INDEX new_pkey ON idempotency_keys (key, tenant, route);
BEGIN;
ALTER TABLE idempotency_keys DROP CONSTRAINT idempotency_keys_pkey;
ALTER TABLE idempotency_keys ADD PRIMARY KEY USING INDEX new_pkey;
COMMIT;));
is_alive('after the primary key was exchanged');

# ... and where the store is no store any more
$admin->query('ALTER TABLE idempotency_keys DROP CONSTRAINT new_pkey');
is($psql->error("SELECT idem_begin('k', 'r', NULL)"),
	'55000', 'a store without its primary key is refused');
$admin->query('ALTER TABLE idempotency_keys ADD PRIMARY KEY (key, tenant, route)');
is_alive('with a new one it works again');
$admin->query('CREATE FUNCTION t() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RETURN NEW; END$$;'
	  . 'CREATE TRIGGER t BEFORE INSERT ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION t()');
is($psql->error("SELECT idem_begin('k', 'r', NULL)"),
	'0A000', 'a store with a trigger for INSERT is refused');
$admin->query('DROP TRIGGER t ON idempotency_keys');
is_alive('without it, it works again');

# A further store
$admin->query("SELECT idem_create_table('further')");
is_alive('a further store', 'public', 'further');
$admin->query('ALTER TABLE further SET SCHEMA idem');
is_alive('a further store that was moved', 'public', 'idem.further');
$admin->query("DROP TABLE idem.further; SELECT idem_create_table('idem.further')");
is_alive('a further store that was made anew', 'public', 'idem.further');
$admin->query('DROP TABLE idem.further');

#
# REINDEX CONCURRENTLY while claims run: no key is executed twice, none is
# lost, and there is no error.
#
$admin->query('TRUNCATE idempotency_keys');
my @client = map { PgIdemTest::Session->new($node, 'postgres') } 1 .. 3;
my $round = 0;
for (my $i = 0; $i < 8; $i++)
{
	# all of them try the same 200 keys, each key in a transaction of its own
	$round++;
	foreach my $client (@client)
	{
		$client->start(qq(
DO \$\$
DECLARE c idem_claim;
BEGIN
	FOR i IN 1 .. 200 LOOP
		c := idem_begin('r' || $round || '-' || i, 'r', NULL);
		IF c.proceed THEN
			PERFORM idem_finish('r' || $round || '-' || i, to_jsonb(i));
			INSERT INTO done VALUES ($round, i);
		END IF;
		COMMIT;
	END LOOP;
END\$\$)) if $i > 0;
	}
	if ($i == 0)
	{
		$admin->query('CREATE TABLE done (round int, i int)');
		next;
	}
	$admin->query('REINDEX TABLE CONCURRENTLY idempotency_keys');
	$_->result foreach @client;
	is(join('', map { $_->{err} } @client), '', "claims during REINDEX CONCURRENTLY, round $round");
}
is( $admin->query(
		'SELECT count(*), count(DISTINCT (round, i)) FROM done'),
	'1400|1400',
	'each key was executed once');
$_->quit foreach @client;

#
# Who holds a claim keeps the store: DROP EXTENSION waits.
#
$psql->query("BEGIN; SELECT idem_begin('held', 'r', NULL)");
$admin->start('DROP EXTENSION pg_idem');
ok( $node->poll_query_until(
		'postgres',
		"SELECT wait_event_type = 'Lock' FROM pg_stat_activity"
		  . " WHERE pid = $admin->{pid}"),
	'DROP EXTENSION waits for a claim');
is($psql->query("SELECT idem_finish('held', '1')"), '', 'which can be finished');
$psql->query('COMMIT');
$admin->result;
is($admin->{err}, '', 'then the extension is gone');

# ... and the other way round: who comes while it is being dropped and made
# anew waits, and gets the new one.
$admin->query('CREATE EXTENSION pg_idem');
is_alive('a new extension');
my $fresh = PgIdemTest::Session->new($node, 'postgres');
$admin->query('BEGIN; DROP EXTENSION pg_idem; CREATE EXTENSION pg_idem');
foreach my $waiter ($psql, $fresh)
{
	# (in FROM, the server itself would look at the type that goes)
	$waiter->start("SELECT idem_begin('k$waiter->{pid}', 'r', NULL)::text");
	ok( $node->poll_query_until(
			'postgres',
			"SELECT wait_event_type = 'Lock' FROM pg_stat_activity"
			  . " WHERE pid = $waiter->{pid}"),
		'a begin waits for DROP and CREATE EXTENSION');
}
$admin->query('COMMIT');
foreach my $waiter ($psql, $fresh)
{
	$waiter->result;
	like(
		$waiter->{out} . $waiter->{err},
		qr/started|ERROR:  42(?:704|P01|883)/,
		'and has its claim in the new store, or a clear error');
}
$fresh->quit;
is_alive('the next one works');

#
# The worker, and an extension that comes and goes
#
my $fill = "INSERT INTO idempotency_keys (key, tenant, route, state, attempt,"
  . " result_dropped, created_at, finished_at, expires_at)"
  . " SELECT 'w' || i, '', 'r', 'completed', 1, false,"
  . " '2020-01-01', '2020-01-01', '2020-01-02' FROM generate_series(1, 2000) i;";
# one that is about to go: the worker does not wait for the end of that, for
# then no other database would be swept
$admin->query('BEGIN; DROP EXTENSION pg_idem');
my $offset = log_end($node);
$node->append_conf('postgresql.conf', 'pg_idem.expire = on');
$node->reload;
ok( wait_for_log_line(
		$node, qr/starting background worker process "pg_idem expiry worker/,
		$offset),
	'a worker comes to a database whose extension is being dropped');
ok( $node->poll_query_until(
		'postgres',
		"SELECT count(*) = 0 FROM pg_stat_activity"
		  . " WHERE backend_type = 'pg_idem expiry worker'"),
	'and goes');
$admin->query('COMMIT; CREATE EXTENSION pg_idem;');

# every CREATE EXTENSION wakes the launcher, so there are many encounters
for (my $i = 0; $i < 60; $i++)
{
	$admin->query('DROP EXTENSION pg_idem; CREATE EXTENSION pg_idem;' . $fill);
}
ok( $node->poll_query_until(
		'postgres', 'SELECT count(*) = 0 FROM idempotency_keys'),
	'the worker finds the last one');
$psql->quit;
$admin->quit;
$node->stop;
my $log = log_since($node, $offset);
my @errors = grep { !/due to administrator command/ }
  $log =~ /^.*(?:WARNING|ERROR|FATAL|PANIC):  .*$/mg;
is("@errors", '', 'and says nothing about those that are gone');
unlike(log_since($node), qr/terminated by signal/, 'nothing has crashed');

done_testing();
