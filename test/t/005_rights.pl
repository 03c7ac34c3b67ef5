# The promise: nothing is granted to PUBLIC but the pure helpers.  An
# application can neither read nor tamper with stored responses except through
# the functions, cannot pass for another tenant where the tenant is the role,
# and gains nothing by what it plants in a schema, in a trigger or in a
# deferred constraint.  Stored responses never get into the server log.
#
# A store of responses is a store of everybody's personal data, and the sweep
# is a superuser that runs code of whoever owns a store.

use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use PgIdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# The worker is switched on where it has its scene.
my $node = new_node('main', <<EOC);
pg_idem.expire = off
log_min_messages = debug1
log_error_verbosity = verbose
log_min_error_statement = panic
EOC

$node->safe_psql(
	'postgres', q(
CREATE EXTENSION pg_idem;
CREATE ROLE plain LOGIN;
CREATE ROLE app LOGIN;
CREATE ROLE other LOGIN;
CREATE ROLE keeper LOGIN;
CREATE SCHEMA keeper AUTHORIZATION keeper;
CREATE TABLE secret AS SELECT jsonb '"MARKER-4711"' AS response;
GRANT SELECT ON secret TO app;
));
my $super = PgIdemTest::Session->new($node, 'postgres');
my $plain = PgIdemTest::Session->new($node, 'postgres', 'plain');
my $app = PgIdemTest::Session->new($node, 'postgres', 'app');
my $keeper = PgIdemTest::Session->new($node, 'postgres', 'keeper');

my %call = (
	idem_begin => "SELECT idem_begin('k', 'r', NULL)",
	idem_finish => "SELECT idem_finish('k', '1')",
	idem_lookup => "SELECT idem_lookup('k', 'r')",
	idem_receive => "SELECT idem_receive('r', 'm')",
	'idem_receive_batch' => "SELECT idem_receive_batch('r', ARRAY['m'])",
	idem_expire => "SELECT idem_expire()",
	idem_create_table => "SELECT idem_create_table('plain_keys')",
	idem_grant => "SELECT idem_grant('plain')",
	idem_revoke => "SELECT idem_revoke('plain')",
	idem_budget_allow => "SELECT idem_budget_allow('s', false)",
	idem_breaker_allow => "SELECT idem_breaker_allow('s')",
	idem_breaker_record => "SELECT idem_breaker_record('s', true)",
	idem_breaker_retry_after => "SELECT idem_breaker_retry_after('s')",
	idem_hedge_after => "SELECT idem_hedge_after('r')",
	_idem_stat_routes => 'SELECT _idem_stat_routes()',
	_idem_stat_services => 'SELECT _idem_stat_services()',
	idem_stats_reset => 'SELECT idem_stats_reset()');
my $granted = qr/begin|finish|lookup|receive|budget|breaker|hedge/;

my @on_table = (
	'SELECT FROM idempotency_keys',
	'SELECT key FROM idempotency_keys FOR UPDATE',
	'DELETE FROM idempotency_keys',
	"UPDATE idempotency_keys SET response = '2'",
	'INSERT INTO idempotency_keys SELECT',
	'TRUNCATE idempotency_keys',
	'COPY idempotency_keys TO STDOUT',
	'CREATE TABLE t (FOREIGN KEY (a, b, c) REFERENCES idempotency_keys, a text, b text, c text)',
	'CREATE TRIGGER t BEFORE DELETE ON idempotency_keys'
	  . ' FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()',
	'ALTER TABLE idempotency_keys OWNER TO CURRENT_USER',
	'DROP TABLE idempotency_keys',
	'DELETE FROM idem_route_policies',
	'DELETE FROM idem_service_policies',
	map { ("SELECT FROM $_", "COPY (TABLE $_) TO STDOUT") }
	  qw(idem_route_policies idem_service_policies idem_stat_routes idem_stat_services));

#
# Nothing for PUBLIC
#
is( $super->query(q(
SELECT string_agg(DISTINCT p.proname, ',')
FROM pg_proc p, pg_depend d, pg_extension e,
	aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
WHERE d.classid = 'pg_proc'::regclass AND d.objid = p.oid
	AND d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid
	AND e.extname = 'pg_idem' AND a.grantee = 0;)),
	'idem_backoff,idem_etag,idem_hash,idem_hash_bytes,idem_hash_text,idem_if_match,idem_parse_key,idem_problem,idem_request_problem,idem_retry,idem_retryable',
	'functions open to PUBLIC');
is( $super->query(q(
SELECT count(*)
FROM pg_type t, pg_depend d, pg_extension e,
	aclexplode(coalesce(t.typacl, acldefault('T', t.typowner))) a
WHERE d.classid = 'pg_type'::regclass AND d.objid = t.oid
	AND d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid
	AND e.extname = 'pg_idem' AND a.grantee = 0
	AND t.typelem = 0	-- an array has its element's rights
	AND t.typrelid <> 'idempotency_keys'::regclass;)),
	0,
	'types open to PUBLIC');
is( $super->query(q(
SELECT string_agg(concat_ws(' ', c.relname, a.privilege_type, a.grantee::regrole), ',' ORDER BY c.relname)
FROM pg_class c, pg_depend d, pg_extension e,
	aclexplode(coalesce(c.relacl, acldefault('r', c.relowner))) a
WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid
	AND d.refclassid = 'pg_extension'::regclass AND d.refobjid = e.oid
	AND e.extname = 'pg_idem' AND a.grantee <> c.relowner;)),
	'idem_stat_routes SELECT pg_read_all_stats,idem_stat_services SELECT pg_read_all_stats',
	'tables open to anybody but their owner');

is($plain->error($call{$_}), '42501', "a role without rights: $_")
  foreach sort keys %call;
is($plain->error($_), '42501', "a role without rights: $_")
  foreach @on_table;
is($plain->error('CREATE TABLE t OF idempotency_key'),
	'42501', 'a role without rights: CREATE TABLE OF');
is( $plain->query(
		"SELECT length(idem_hash_text('x')), idem_parse_key('\"k\"'),"
		  . " idem_problem(NULL)->>'status',"
		  . " idem_if_match('*', idem_etag(1))"
	),
	'32|k|400|t',
	'the pure helpers are for all');

#
# idem_grant
#
$super->query("SELECT idem_grant('app')");
is( $app->query(
		q(SELECT proceed, outcome FROM idem_begin('k', 'r', '\x01');)
		  . "SELECT idem_finish('k', (SELECT response FROM secret), attempt => 1);"
		  . "SELECT response FROM idem_begin('k', 'r', '\\x01');"
		  . "SELECT (idem_lookup('k', 'r')).state;"
		  . "SELECT idem_receive('r', 'm');"
		  . "SELECT idem_receive_batch('r', ARRAY['m', 'm2'])"),
	qq(t|started\n\n"MARKER-4711"\ncompleted\nt\nm2),
	'a role with rights: begin, finish, replay, lookup, receive');
is($app->error($call{$_}), '42501', "a role with rights: not $_")
  foreach grep { !/$granted/ } sort keys %call;
is($app->error($call{$_}), '00000', "a role with rights: $_")
  foreach grep { /budget|breaker|hedge/ } sort keys %call;
is($app->error($_), '42501', "a role with rights: not $_") foreach @on_table;
is($app->query("SELECT proceed FROM idem_begin('k2', 'r', NULL, store => 'idempotency_keys')"),
	't', 'the default store may be named');
is($plain->error($call{idem_begin}), '42501', 'nobody else got anything');

# Who may read the server's statistics may read these, and no more.
$super->query('CREATE ROLE watcher LOGIN IN ROLE pg_read_all_stats; CREATE ROLE monitor LOGIN IN ROLE pg_monitor');
foreach my $role (qw(watcher monitor))
{
	my $watcher = PgIdemTest::Session->new($node, 'postgres', $role);

	is( $watcher->query("SELECT started > 0 FROM idem_stat_routes WHERE route = 'r';"
			  . "SELECT service, calls_ok FROM idem_stat_services"),
		"t\ns|1", "$role: the views");
	is($watcher->error($call{$_}), '42501', "$role: not $_")
	  foreach grep { !/^_idem_stat/ } sort keys %call;
	is($watcher->error("SELECT FROM $_"), '42501', "$role: not $_")
	  foreach qw(idempotency_keys idem_route_policies idem_service_policies idem_unfinished);
	$watcher->quit;
}

# Who may change policies needs no more for it, and is heard by all.
$super->query('CREATE ROLE operator LOGIN; GRANT SELECT, INSERT, DELETE ON idem_service_policies TO operator');
my $operator = PgIdemTest::Session->new($node, 'postgres', 'operator');
$operator->query("INSERT INTO idem_service_policies (service, breaker) VALUES ('s', 'forced_open')");
is($app->query($call{idem_breaker_allow}), 'f', 'an operator forces a breaker open');
$operator->query('DELETE FROM idem_service_policies');
is($app->query($call{idem_breaker_allow}), 't', 'and closed again');
$operator->quit;

# Who may not grant gets an error, not a warning.
$super->query('GRANT EXECUTE ON FUNCTION idem_grant, idem_revoke TO app');
is($app->error("SELECT idem_grant('plain')"),
	'42501', 'idem_grant by a role that does not own the extension');
is($app->error("SELECT idem_revoke('app')"),
	'42501', 'idem_revoke by a role that does not own the extension');
is($plain->error($call{idem_begin}), '42501', 'and it had no effect');
$super->query('REVOKE EXECUTE ON FUNCTION idem_grant, idem_revoke FROM app');

# An overload that somebody has put next to a function of ours
$super->query("CREATE FUNCTION idem_begin(int) RETURNS int"
	  . " LANGUAGE sql AS 'SELECT 1'");
is( $super->error(
		"SELECT idem_grant('app'), idem_revoke('app'), idem_grant('app')"),
	'00000',
	'idem_grant is not led astray by an overloaded function');
$super->query("DROP FUNCTION idem_begin(int); SELECT idem_grant('app')");

#
# A further store needs its owner's privileges.
#
$super->query("SELECT idem_grant('keeper');"
	  . "GRANT EXECUTE ON FUNCTION idem_create_table TO keeper");
$keeper->query("SELECT idem_create_table('keeper.keys')");
is( $super->query(
		"SELECT relowner::regrole FROM pg_class WHERE oid = 'keeper.keys'::regclass"
	),
	'keeper',
	'idem_create_table: the caller owns the store');
is( $keeper->query(
		"SELECT proceed FROM idem_begin('k', 'r', NULL, store => 'keeper.keys')"
	),
	't',
	'the owner may use it');
$keeper->query("GRANT ALL ON keeper.keys TO app; GRANT ALL ON SCHEMA keeper TO app");
foreach my $call (
	"idem_begin('x', 'r', NULL, store => 'keeper.keys')",
	"idem_finish('k', '1', attempt => 1, store => 'keeper.keys')",
	"idem_lookup('k', 'r', store => 'keeper.keys')",
	"idem_receive('r', 'm', store => 'keeper.keys')",
	"idem_receive_batch('r', ARRAY['m'], store => 'keeper.keys')")
{
	is($app->error("SELECT $call"), '42501', "not the owner: $call");
}
is($keeper->error("SELECT idem_create_table('public.more_keys')"),
	'42501', 'idem_create_table: not in a schema where the caller may not create');
$super->query('GRANT keeper TO app');
is( $app->query(
		"SELECT outcome FROM idem_begin('x', 'r', NULL, store => 'keeper.keys')"
	),
	'started',
	'a member of the owner may use it');
$super->query('REVOKE keeper FROM app');

#
# The tenant is the role.
#
$super->query("SELECT idem_grant('other');"
	  . "ALTER DATABASE postgres SET pg_idem.tenant_is_role = on");
$_->quit foreach $app, $super;
$app = PgIdemTest::Session->new($node, 'postgres', 'app');
$super = PgIdemTest::Session->new($node, 'postgres');
my $other = PgIdemTest::Session->new($node, 'postgres', 'other');

is($app->error('SET pg_idem.tenant_is_role = off'),
	'42501', 'a role cannot switch tenant_is_role off');
is($app->error("SELECT set_config('pg_idem.tenant_is_role', 'off', true)"),
	'42501', 'by no means');
$app->query("SET pg_idem.tenant = 'other';"
	  . "SELECT idem_begin('shared', 'r', NULL, tenant => 'other');"
	  . "SELECT idem_finish('shared', '\"of app\"', attempt => 1, tenant => 'other')");
is( $super->query(
		"SELECT string_agg(tenant, ',') FROM idempotency_keys WHERE key = 'shared'"
	),
	'app',
	'neither argument nor setting changes the tenant');
is($other->query("SELECT outcome FROM idem_begin('shared', 'r', NULL)"),
	'started', 'the key is free for another role');
is( $other->query(
		"SELECT (idem_lookup('shared', 'r', tenant => 'app')).state"),
	'in_progress',
	'which cannot look at the first one\'s');
is( $other->error(
		"SELECT idem_finish('shared', '1', attempt => 7, tenant => 'app')"),
	'IK001',
	'nor finish it');
$super->query('ALTER DATABASE postgres RESET pg_idem.tenant_is_role');

#
# idem_revoke
#
$super->query("SELECT idem_revoke('app')");
is($app->error($call{$_}), '42501', "after idem_revoke: not $_")
  foreach grep { /$granted/ } sort keys %call;
is($app->error('CREATE TABLE t OF idempotency_key'),
	'42501', 'after idem_revoke: not CREATE TABLE OF');
$_->quit foreach $app, $other, $plain, $super;

#
# Triggers on a store that a plain role owns.  They tell who they run as, and
# try to become more.
#
$node->safe_psql(
	'postgres', q(
SET ROLE keeper;
DELETE FROM keeper.keys;
CREATE TABLE keeper.seen (trigger text, as_user text, outcome text);
CREATE TABLE keeper.bait (key text);
CREATE FUNCTION keeper.climb() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE attempt text;
BEGIN
	FOREACH attempt IN ARRAY ARRAY[
		'ALTER ROLE keeper SUPERUSER',
		'RESET ROLE',
		'SET ROLE NONE',
		'SET SESSION AUTHORIZATION DEFAULT',
		'RESET SESSION AUTHORIZATION',
		'GRANT pg_read_all_data TO keeper',
		'CREATE TEMP TABLE t AS SELECT 1',
		'SELECT count(*) FROM public.secret'] LOOP
		BEGIN
			EXECUTE attempt;
			INSERT INTO keeper.seen VALUES (TG_NAME, current_user, attempt);
		EXCEPTION WHEN OTHERS THEN
			NULL;
		END;
	END LOOP;
	INSERT INTO keeper.seen VALUES (TG_NAME, current_user, 'fired');
	SET search_path = keeper, pg_catalog;
	RETURN OLD;
END$$;
CREATE TRIGGER a_before BEFORE DELETE ON keeper.keys
	FOR EACH ROW EXECUTE FUNCTION keeper.climb();
CREATE TRIGGER b_after AFTER DELETE ON keeper.keys
	FOR EACH ROW EXECUTE FUNCTION keeper.climb();
CREATE TRIGGER c_statement AFTER DELETE ON keeper.keys
	FOR EACH STATEMENT EXECUTE FUNCTION keeper.climb();
CREATE CONSTRAINT TRIGGER d_deferred AFTER DELETE ON keeper.keys
	DEFERRABLE INITIALLY DEFERRED
	FOR EACH ROW EXECUTE FUNCTION keeper.climb();
CREATE CONSTRAINT TRIGGER e_deferred AFTER INSERT ON keeper.bait
	DEFERRABLE INITIALLY DEFERRED
	FOR EACH ROW EXECUTE FUNCTION keeper.climb();
));

my $fill = q(
INSERT INTO keeper.keys (key, tenant, route, state, attempt,
	result_dropped, created_at, finished_at, expires_at)
SELECT 'k' || i, '', 'r', 'completed', 1, false,
	now() - interval '2 days', now() - interval '2 days',
	now() - interval '1 day' FROM generate_series(1, 3) i;);

sub nothing_gained
{
	my ($what) = @_;

	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is( $node->safe_psql(
			'postgres',
			"SELECT DISTINCT trigger, as_user FROM keeper.seen ORDER BY 1, 2"),
		"a_before|keeper\nb_after|keeper\nc_statement|keeper\nd_deferred|keeper",
		"$what: every trigger has run as the owner");
	is( $node->safe_psql(
			'postgres',
			"SELECT string_agg(DISTINCT outcome, ',') FROM keeper.seen"),
		'fired',
		"$what: and could do nothing else");
	is( $node->safe_psql(
			'postgres',
			"SELECT rolsuper, pg_has_role('keeper', 'pg_read_all_data', 'member')"
			  . " FROM pg_roles WHERE rolname = 'keeper'"),
		'f|f',
		"$what: the owner is what it was");
	$node->safe_psql('postgres', 'TRUNCATE keeper.seen');
	return;
}

is( $node->safe_psql(
		'postgres', $fill . 'SELECT idem_expire(); SELECT count(*) FROM keeper.seen'),
	"0\n0", 'a deferred trigger of the owner is not left to the commit of who calls');
is( $node->safe_psql(
		'postgres',
		'BEGIN; SET CONSTRAINTS ALL IMMEDIATE; SELECT idem_expire(); COMMIT;'
		  . 'SHOW search_path'),
	qq(3\n"\$user", public),
	'a trigger does not change the settings of who calls idem_expire');
nothing_gained('idem_expire by a superuser');
is( $node->safe_psql('postgres',
		$fill . 'BEGIN; SET CONSTRAINTS ALL DEFERRED; SELECT idem_expire(); COMMIT;'
		  . 'SELECT count(*) FROM keeper.seen; TRUNCATE keeper.keys, keeper.seen'),
	"0\n0", 'idem_expire with deferred constraints');

$node->append_conf('postgresql.conf', 'pg_idem.expire = on');
$node->reload;
$node->safe_psql('postgres', $fill);
ok( $node->poll_query_until(
		'postgres', 'SELECT count(*) = 0 FROM keeper.keys'),
	'the worker sweeps the store');
nothing_gained('the worker');

# A trigger that leaves another table's deferred trigger behind, to be run at
# the commit, when the worker is superuser again
my $offset = log_end($node);
$node->safe_psql(
	'postgres', q(
SET ROLE keeper;
CREATE FUNCTION keeper.lay_bait() RETURNS trigger LANGUAGE plpgsql AS
$$BEGIN INSERT INTO keeper.bait VALUES (OLD.key); RETURN OLD; END$$;
CREATE TRIGGER f_bait BEFORE DELETE ON keeper.keys
	FOR EACH ROW EXECUTE FUNCTION keeper.lay_bait();) . $fill);
ok( $node->poll_query_until(
		'postgres', 'SELECT count(*) = 0 FROM keeper.keys'),
	'a deferred trigger of another table');
is( $node->safe_psql(
		'postgres',
		"SELECT DISTINCT as_user FROM keeper.seen WHERE trigger = 'e_deferred'"),
	'keeper',
	'has run before the commit, as the owner');
is( $node->safe_psql(
		'postgres', "SELECT rolsuper FROM pg_roles WHERE rolname = 'keeper'"),
	'f',
	'the owner is what it was');
$node->append_conf('postgresql.conf', 'pg_idem.expire = off');
$node->reload;
$node->safe_psql('postgres', 'DROP TABLE keeper.keys');
$keeper->quit;

#
# A hostile search_path: objects planted in front of everything
#
my $plant = q(
CREATE FUNCTION @.planted(anyelement, anyelement) RETURNS pg_catalog.bool
	LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'planted'; END$$;
CREATE FUNCTION @.now() RETURNS pg_catalog.timestamptz
	LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'planted'; END$$;
CREATE FUNCTION @.clock_timestamp() RETURNS pg_catalog.timestamptz
	LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'planted'; END$$;
CREATE FUNCTION @.pg_extension_config_dump(pg_catalog.oid, pg_catalog.text)
	RETURNS pg_catalog.void
	LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'planted'; END$$;
CREATE FUNCTION @.sha256(pg_catalog.bytea) RETURNS pg_catalog.bytea
	LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'planted'; END$$;
DO $do$
DECLARE op pg_catalog.text; type pg_catalog.text;
BEGIN
	FOREACH op IN ARRAY ARRAY['=', '<>', '<', '<=', '>', '>=', '||'] LOOP
		FOREACH type IN ARRAY ARRAY['text', 'timestamptz', 'tid', 'oid',
			'name', 'int4', 'bool', 'bytea', 'record', 'anyenum'] LOOP
			EXECUTE pg_catalog.format('CREATE FUNCTION @.f(pg_catalog.%1$s,
				pg_catalog.%1$s) RETURNS pg_catalog.bool LANGUAGE plpgsql AS
				$$BEGIN RAISE EXCEPTION %2$L; END$$', type, 'planted');
			EXECUTE pg_catalog.format('CREATE OPERATOR @.%s (FUNCTION = @.f,
				LEFTARG = pg_catalog.%2$s, RIGHTARG = pg_catalog.%2$s)',
				op, type);
			EXECUTE pg_catalog.format('ALTER FUNCTION @.f(pg_catalog.%1$s,
				pg_catalog.%1$s) RENAME TO f%2$s', type,
				pg_catalog.md5(pg_catalog.concat(op, type)));
		END LOOP;
	END LOOP;
END$do$;
CREATE TYPE @.text AS (planted pg_catalog.int4);
CREATE TYPE @.jsonb AS (planted pg_catalog.int4);
CREATE TYPE @.bytea AS (planted pg_catalog.int4);
CREATE TYPE @.timestamptz AS (planted pg_catalog.int4);
CREATE TYPE @.bool AS (planted pg_catalog.int4);
CREATE TYPE @.int4 AS (planted pg_catalog.int4);
CREATE TABLE @.pg_class (planted pg_catalog.int4);
CREATE TABLE @.pg_extension (planted pg_catalog.int4);
);
my $plant_ours = q(
CREATE TYPE @.idempotency_key AS (planted pg_catalog.int4);
CREATE TYPE @.idem_claim AS (planted pg_catalog.int4);
CREATE TYPE @.idem_state AS ENUM ('planted');
CREATE TABLE @.idempotency_keys (key pg_catalog.text, tenant pg_catalog.text,
	route pg_catalog.text, expires_at pg_catalog.timestamptz);
INSERT INTO @.idempotency_keys VALUES ('planted', '', 'r', '-infinity');
CREATE TABLE @.idem_service_policies (service pg_catalog.text, breaker pg_catalog.text);
INSERT INTO @.idem_service_policies VALUES ('s', 'forced_closed');
CREATE FUNCTION @._idem_stat_services() RETURNS pg_catalog.int4
	LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'planted'; END$$;
CREATE FUNCTION @.idem_begin(pg_catalog.text, pg_catalog.text,
	pg_catalog.bytea) RETURNS pg_catalog.int4
	LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'planted'; END$$;
);

sub plant_in
{
	my ($schema, $what) = @_;
	$what =~ s/\@\./$schema./g;
	return $what;
}

$node->safe_psql('postgres', 'CREATE DATABASE hostile');
$super = PgIdemTest::Session->new($node, 'hostile');
$super->query('CREATE SCHEMA idem; CREATE SCHEMA evil;'
	  . plant_in('evil', $plant . $plant_ours));
$super->query('SET search_path = evil, pg_temp, pg_catalog');
$super->query('CREATE EXTENSION pg_idem SCHEMA idem');
$super->query(plant_in('pg_temp', $plant_ours));
is( $super->query("SELECT proceed, outcome"
		  . " FROM idem.idem_begin('k', 'r', idem.idem_hash('{}'::pg_catalog.jsonb))"
	),
	't|started',
	'hostile search_path: idem_begin, idem_hash');
$super->query("SELECT idem.idem_finish('k', '1', attempt => 1)");
pass('hostile search_path: idem_finish');
is($super->query("SELECT (idem.idem_lookup('k', 'r')).status"),
	200, 'hostile search_path: idem_lookup');
is($super->query("SELECT idem.idem_begin('f', 'r', NULL, store => idem.idem_create_table('idem.further'))")
	  =~ /started/,
	1, 'hostile search_path: idem_create_table');
is( $super->query(q(
SELECT pg_catalog.count(*) FROM pg_catalog.pg_class c
WHERE c.reloftype OPERATOR(pg_catalog.=) 'idem.idempotency_key'::pg_catalog.regtype;)),
	2,
	'hostile search_path: it makes a store of our type');
$super->query("SELECT idem.idem_create_table('unqualified')");
is($super->query("SELECT pg_catalog.to_regclass('evil.unqualified')"),
	'unqualified', 'an unqualified store goes where the search_path says');
$super->query("SELECT idem.idem_grant('app')");
$super->query("SELECT idem.idem_revoke('app'); SELECT idem.idem_grant('app');");
pass('hostile search_path: idem_grant, idem_revoke');
$super->query("INSERT INTO idem.idempotency_keys (key, tenant, route, state,"
	  . " attempt, result_dropped, created_at, expires_at) VALUES ('old', '',"
	  . " 'r', 'completed', 1, false, '2020-01-01', '2020-01-02')");
is($super->query('SELECT idem.idem_expire()'),
	1, 'hostile search_path: idem_expire');
$super->query("INSERT INTO idem.idem_service_policies (service, retry_ratio, retry_min_per_second, breaker)"
	  . " VALUES ('s', 0, 0, 'forced_open')");
is( $super->query(q(
SELECT idem.idem_budget_allow('s', false), idem.idem_budget_allow('s', true), idem.idem_breaker_allow('s'),
	idem.idem_breaker_record('s', true), idem.idem_breaker_retry_after('s') IS NULL,
	idem.idem_hedge_after('r') IS NULL;
SELECT breaker, calls_ok FROM idem.idem_stat_services;
SELECT started FROM idem.idem_stat_routes WHERE pg_catalog.starts_with(route, 'r');
SELECT idem.idem_stats_reset();)),
	"t|f|f|forced_open|f|t\nforced_open|1\n2\n",
	'hostile search_path: budgets, breakers and statistics');
$super->query("UPDATE idem.idem_service_policies SET breaker = NULL");
is($super->query("SELECT idem.idem_breaker_allow('s')"), 't', 'hostile search_path: policies that change');
is($super->query('SELECT pg_catalog.count(*) FROM evil.idempotency_keys'),
	1, 'a planted table is not swept');
is( $super->query('SELECT pg_catalog.count(*) FROM pg_temp.idempotency_keys'),
	1, 'nor a temporary one');

# idem_grant has given what it takes in a schema of its own.
$app = PgIdemTest::Session->new($node, 'hostile', 'app');
is($app->query("SELECT outcome FROM idem.idem_begin('k', 'r', idem.idem_hash('{}'::jsonb))"),
	'replayed', 'idem_grant opens the schema of the extension');
is($app->error('SELECT FROM idem.idempotency_keys'),
	'42501', 'but not what is in it');
$app->quit;
$super->quit;

# CREATE EXTENSION in a schema where somebody has been before
$node->safe_psql('postgres', 'CREATE DATABASE laid');
$node->safe_psql('laid', 'CREATE SCHEMA idem;' . plant_in('idem', $plant));
is( $node->safe_psql(
		'laid',
		"CREATE EXTENSION pg_idem SCHEMA idem;"
		  . "SELECT outcome FROM idem.idem_begin('k', 'r', NULL);"
		  . "SELECT idem.idem_expire();"
		  . "SELECT idem.idem_create_table('idem.further');"),
	"started\n0\nidem.further",
	'CREATE EXTENSION among planted objects');
$node->safe_psql('postgres', 'CREATE DATABASE laid2');
$node->safe_psql('laid2', 'CREATE SCHEMA idem;'
	  . "CREATE FUNCTION idem.idem_expire(max int4 DEFAULT NULL) RETURNS int8 LANGUAGE sql AS 'SELECT 1'");
isnt( (sqlstate_of($node, 'laid2', 'CREATE EXTENSION pg_idem SCHEMA idem'))[0],
	'00000', 'CREATE EXTENSION takes over nothing that is there');

#
# What the log knows
#
$node->safe_psql('postgres', "SELECT idem_grant('app')");
$app = PgIdemTest::Session->new($node, 'postgres', 'app');
my $secret = '(SELECT response FROM secret)';
my $body = "(SELECT convert_to(response::text, 'UTF8') FROM secret)";
my $headers =
  "(SELECT jsonb_build_object('location', response, 'set-cookie', response) FROM secret)";
my $marker = 'MARKER-4711';
$app->query("SELECT idem_begin('log', 'r', NULL)");
is($app->error("SELECT idem_finish('log', $secret, headers => $headers, body => $body)"),
	'IK001', 'no attempt given');
is($app->error("SELECT idem_finish('log', $secret, 999, attempt => 1)"),
	'22023', 'a bad status');
is($app->error("SELECT idem_finish('log', $secret, headers => to_jsonb(ARRAY[$secret]), attempt => 1)"),
	'22023', 'bad headers');
is($app->error("SELECT idem_finish('no' || 'ne', $secret)"),
	'IK002', 'no claim');
$app->query("SELECT idem_finish('log', $secret, headers => $headers, body => $body, attempt => 1)");
is($app->error("SELECT idem_finish('log', $secret, attempt => 1)"),
	'IK003', 'finished twice');
is($app->query("SELECT outcome FROM idem_begin('log', 'r', '\\x00')"),
	'mismatch', 'a mismatch');
is($app->query("SELECT response FROM idem_begin('log', 'r', NULL)"),
	"\"$marker\"", 'a replay');
$app->query("SELECT idem_begin('large', 'r', NULL);");
$offset = log_end($node);
$node->safe_psql('postgres', 'ALTER SYSTEM SET pg_idem.max_response_size = 5');
$node->reload;
ok($node->poll_query_until('postgres', 'SHOW pg_idem.max_response_size', '5B'),
	'a small limit');
$app->quit;
$app = PgIdemTest::Session->new($node, 'postgres', 'app');
$app->query("SELECT idem_finish('large', $secret, attempt => 1)");
ok( wait_for_log_line(
		$node, qr/WARNING: .*result for idempotency key "large" is too large/,
		$offset),
	'a result that is too large is logged');
unlike($app->{err}, qr/$marker/, 'without the result');
# a sweep that fails, and one that removes what is unfinished
$node->safe_psql(
	'postgres', q(
SELECT idem_begin('lost', 'r', NULL);
UPDATE idempotency_keys SET expires_at = '2020-01-01', lease_until = '2020-01-01',
	response = (SELECT response FROM secret);
CREATE TABLE charges (key text, tenant text, route text,
	FOREIGN KEY (key, tenant, route) REFERENCES idempotency_keys);
INSERT INTO charges SELECT key, tenant, route FROM idempotency_keys WHERE key = 'log';
SELECT idem_expire();));
ok( wait_for_log_line(
		$node, qr/LOG: .*could not remove expired idempotency key "log"/,
		$offset),
	'a key that could not be removed is logged');
ok( wait_for_log_line(
		$node, qr/LOG: .*removed unfinished idempotency key "lost"/, $offset),
	'a removed claim is logged');
$app->quit;
$node->stop;
unlike(log_since($node), qr/$marker/,
	'a stored response is nowhere in the log');
unlike(log_since($node), qr/ERROR.*planted|PANIC/,
	'nothing planted was called');

done_testing();
