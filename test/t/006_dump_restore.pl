# The promise: keys survive pg_dump and pg_restore, those in the default store
# and those in further ones, and the restored database answers a retry as the
# old one would have.  Whoever moves a database to a new server must not
# charge everybody again.

use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use PgIdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = new_node('main', "pg_idem.expire = off\n");
my $dir = PostgreSQL::Test::Utils::tempdir();

# Everything that a key can hold
my $scene = q(
CREATE ROLE app;
CREATE ROLE keeper;
CREATE SCHEMA idem;
CREATE SCHEMA billing AUTHORIZATION keeper;
CREATE EXTENSION pg_idem SCHEMA idem;
SET search_path = idem, public;
SELECT idem_grant('app');
SELECT idem_create_table('billing.keys');
ALTER TABLE billing.keys OWNER TO keeper;
ALTER TABLE billing.keys SET (fillfactor = 70, autovacuum_enabled = off);
CREATE INDEX by_route ON billing.keys (route);
GRANT SELECT ON billing.keys TO app;
CREATE TABLE public.charges (key text, tenant text, route text,
	FOREIGN KEY (key, tenant, route) REFERENCES billing.keys);

CREATE FUNCTION pg_temp.put(key text, status int, response jsonb, body bytea,
	headers jsonb DEFAULT NULL) RETURNS void LANGUAGE sql AS $$
	SELECT idem_begin(key, 'r', '\x00ff');
	SELECT idem_begin(key, 'r', '\x00ff', 'acme', store => 'billing.keys');
	SELECT idem_finish(key, response, status, headers, body);
	SELECT idem_finish(key, response, status, headers, body, tenant => 'acme',
		store => 'billing.keys');
$$;
SELECT pg_temp.put('null', 204, NULL, NULL);
SELECT pg_temp.put('json null', 200, 'null', '');
SELECT pg_temp.put('zero', 200, '0', '\x00');
SELECT pg_temp.put('empty', 200, '""', '\xfffe');
SELECT pg_temp.put('object', 201, '{"a": [1.10, "\u00e9"]}', '\x5c2e0a',
	'{"Location": "/x", "set-cookie": "no"}');
SELECT pg_temp.put(@ODD@, 200, '1', NULL);
SELECT pg_temp.put('failed', 500, '"later"', NULL);
SET pg_idem.max_response_size = 1;
SELECT pg_temp.put('large', 200, '"too large"', NULL);
RESET pg_idem.max_response_size;
SELECT idem_begin('open', 'r', NULL, lease => '10 years');
SELECT idem_begin('lost', 'r', '\x01', lease => '1 microsecond');
UPDATE idempotency_keys SET step = 'paid', step_data = '{"x": 1}'
	WHERE key = 'lost';
INSERT INTO public.charges VALUES ('zero', 'acme', 'r');
INSERT INTO idem_route_policies VALUES ('limited', '1 mon 1 day', '1 h', '0', 3, 'hold',
	'success', '1 day', 0.1, 'Infinity');
INSERT INTO idem_service_policies VALUES ('forced', 0.1, 1e-300, 0.3, 1e300,
	'1.000001 s', 1000, 7, '1 min', '1 mon', 3, '3 s', 'forced_open');
INSERT INTO idem_service_policies VALUES ('nulls'), (@ODD@);
GRANT SELECT ON idem_service_policies TO app;
);
# a key with everything that could go wrong in a script
my $odd = q('k' || chr(233) || 'y "\N" ''x''');
$scene =~ s/\@ODD\@/$odd/g;

# What the database is to be, before and after
my $state = q(
SELECT 'default', k.* FROM idem.idempotency_keys k
UNION ALL SELECT 'further', k.* FROM billing.keys k ORDER BY 1, 2;
SELECT * FROM idem.idem_route_policies ORDER BY 1;
SELECT * FROM idem.idem_service_policies ORDER BY 1;
);
my $structure = q(
SELECT c.oid::regclass, c.relowner::regrole, c.reloftype::regtype,
	c.reloptions, c.relacl
FROM pg_class c
WHERE c.oid IN ('idem.idempotency_keys'::regclass, 'billing.keys'::regclass,
	'idem.idem_service_policies'::regclass, 'idem.idem_stat_routes'::regclass,
	'idem.idem_stat_services'::regclass)
ORDER BY 1;
SELECT tgrelid::regclass, tgname, tgenabled FROM pg_trigger
WHERE NOT tgisinternal ORDER BY 1, 2;
SELECT indexdef FROM pg_indexes
WHERE tablename IN ('idempotency_keys', 'keys') ORDER BY 1;
SELECT conrelid::regclass, conname, pg_get_constraintdef(oid, true)
FROM pg_constraint
WHERE conrelid IN ('idem.idempotency_keys'::regclass,
	'billing.keys'::regclass, 'public.charges'::regclass) ORDER BY 1, 2;
SELECT attrelid::regclass, attname, atttypid::regtype, attnotnull,
	attcollation::regcollation
FROM pg_attribute
WHERE attrelid IN ('idem.idempotency_keys'::regclass,
	'billing.keys'::regclass) AND attnum > 0 ORDER BY 1, attnum;
SELECT p.proname, p.proacl FROM pg_proc p
WHERE p.pronamespace = 'idem'::regnamespace
ORDER BY p.oid::regprocedure::text;
SELECT t.typname, t.typacl FROM pg_type t
WHERE t.typnamespace = 'idem'::regnamespace ORDER BY 1;
SELECT pg_describe_object(classid, objid, 0) FROM pg_depend
WHERE refclassid = 'pg_extension'::regclass AND deptype = 'e'
	AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'pg_idem')
ORDER BY 1;
SELECT extname, nspname, extversion,
	extconfig::regclass[], extcondition
FROM pg_extension e JOIN pg_namespace n ON n.oid = extnamespace
WHERE extname = 'pg_idem';
SELECT nspacl FROM pg_namespace WHERE nspname = 'idem';
);

sub check_copy
{
	my ($db, $keys, $objects) = @_;

	is($node->safe_psql($db, $state), $keys, "$db: every key is as it was");
	is($node->safe_psql($db, $structure),
		$objects, "$db: so are the stores, their indexes, owners and rights");

	# Answers.  What is dropped, or not to be replayed, has its own answer.
	my $begin = "SELECT key, outcome, status, headers, response, body, attempt,"
	  . " step, step_data FROM (VALUES ($odd), ('null'),"
	  . " ('json null'), ('zero'), ('empty'), ('object'), ('large')) v (key),"
	  . " LATERAL idem.idem_begin(key, 'r', '\\x00ff'";
	my $expected = qq(k\x{c3}\x{a9}y "\\N" 'x'|replayed|200||1||1||
null|replayed|204||||1||
json null|replayed|200||null|\\x|1||
zero|replayed|200||0|\\x00|1||
empty|replayed|200||""|\\xfffe|1||
object|replayed|201|{"Location": "/x"}|{"a": [1.10, "\x{c3}\x{a9}"]}|\\x5c2e0a|1||
large|expired|410||||1||);
	is($node->safe_psql($db, "$begin)"), $expected, "$db: replays");
	is( $node->safe_psql($db, "$begin, 'acme', store => 'billing.keys')"),
		$expected,
		"$db: replays from a further store");
	is( $node->safe_psql(
			$db, q(
SELECT outcome FROM idem.idem_begin('zero', 'r', '\x01');
SELECT outcome FROM idem.idem_begin('open', 'r', NULL);
SELECT outcome, attempt, step, step_data FROM idem.idem_begin('lost', 'r', '\x01');
SELECT outcome, attempt FROM idem.idem_begin('failed', 'r', '\x00ff');
SELECT outcome FROM idem.idem_begin('new', 'r', NULL);
SELECT idem.idem_finish('new', '1', attempt => 1);
SELECT outcome FROM idem.idem_begin('new', 'r', NULL, store => 'billing.keys');
SET ROLE app;
SELECT outcome FROM idem.idem_begin('new', 'r', NULL);
SELECT idem.idem_breaker_allow('forced'), idem.idem_breaker_allow('nulls');
)),
		q(mismatch
in_progress
resumed|2|paid|{"x": 1}
resumed|2
started

started
replayed
f|t), "$db: and everything else");
	return;
}

$node->safe_psql('postgres',
	"CREATE DATABASE origin ENCODING 'UTF8' LOCALE 'C' TEMPLATE template0");
$node->safe_psql('origin', $scene);
my $keys = $node->safe_psql('origin', $state);
my $objects = $node->safe_psql('origin', $structure);
is(scalar(my @lines = split /\n/, $keys), 22, 'there is something to dump');

# pg_dump can be run by hand or in an archive, with data and in two parts.
my $url = $node->connstr('origin');
$node->command_ok([ 'pg_dump', '-Fp', '-f', "$dir/plain.sql", $url ],
	'pg_dump as a script');
$node->command_ok([ 'pg_dump', '-Fc', '-f', "$dir/archive", $url ],
	'pg_dump as an archive');

foreach my $db (qw(script archive parts))
{
	$node->safe_psql('postgres',
		"CREATE DATABASE $db ENCODING 'UTF8' LOCALE 'C' TEMPLATE template0");
}
$node->command_ok(
	[
		'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-f', "$dir/plain.sql",
		$node->connstr('script')
	],
	'script: restored');
$node->command_ok(
	[
		'pg_restore', '--exit-on-error', '-d', $node->connstr('archive'),
		"$dir/archive"
	],
	'archive: restored');
$node->command_ok(
	[
		'pg_restore', '--exit-on-error', '--section=pre-data',
		'--section=data', '-d', $node->connstr('parts'), "$dir/archive"
	],
	'parts: restored without indexes');
is( (sqlstate_of($node, 'parts',
			"SELECT idem.idem_begin('k', 'r', NULL, store => 'billing.keys')"))[0],
	'55000',
	'parts: a store without its primary key is refused');
$node->command_ok(
	[
		'pg_restore', '--exit-on-error', '--section=post-data',
		'-d', $node->connstr('parts'), "$dir/archive"
	],
	'parts: restored the rest');

check_copy($_, $keys, $objects) foreach qw(script archive parts);

# One more turn: what was restored can be dumped again.
$node->command_ok(
	[ 'pg_dump', '-Fc', '-f', "$dir/again", $node->connstr('script') ],
	'dumped again');
$node->safe_psql('postgres',
	"CREATE DATABASE again ENCODING 'UTF8' LOCALE 'C' TEMPLATE template0");
$node->command_ok(
	[
		'pg_restore', '--exit-on-error', '-d', $node->connstr('again'),
		"$dir/again"
	],
	'and restored again');
is($node->safe_psql('again', $state),
	$node->safe_psql('script', $state),
	'again: every key is as it was');

done_testing();
