
# The promise: whatever a caller passes, and whatever the owner of a table puts
# into it or makes of it, a call ends with a result or with an error that the
# README lists.  No crash, no assertion, no internal error, in backends and in
# workers.
#
# The functions are those that belong to the extension, so a new one is fuzzed
# by itself.  Calls are drawn at random, in transactions of all kinds that are
# open at the same time.  SEED and CALLS may be set; a seed draws the same.

use strict;
use warnings;

use FindBin;
use lib "$FindBin::RealBin/../t";
use PgIdemTest;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

eval { require DBD::Pg; 1 }
  or plan skip_all => 'the fuzzer needs DBD::Pg';

my $seed = $ENV{SEED} || 1 + int rand 2**31;
my $calls = $ENV{CALLS} || 3000;
my $round = 500;    # calls until all is made anew
srand $seed;
note "SEED=$seed CALLS=$calls";

my $node = new_node('main', <<EOC);
log_line_prefix = '%b %e '
statement_timeout = 150ms
deadlock_timeout = 20ms
EOC
my $readme = slurp_file("$FindBin::RealBin/../../README.md");
my ($table) = $readme =~ /^### Errors$(.*?)^###/ms;
my %documented = map { $_ => 1 } $table =~ /^\| ([0-9A-Z]{5}) \|/mg;

sub any { return $_[ rand @_ ] }
sub chance { return rand() < $_[0] }

#
# Values by type, as SQL.  Half of the names are valid and few, so that calls
# meet; the rest is hostile.
#
my @names = ("'k'", "'r'", "'s1'", "'full'", "'idem_outbox'", "'resume'", "'1'", "'2xx'", "'40001'");
my @hostile = (
	"''", "' '", "repeat('x', 255)", "repeat('x', 256)",
	"repeat(E'\\u00e9', 127)", "repeat(E'\\u00e9', 128)", "repeat('y', 100000)",
	"E'a\\x01b'", "E'\\x7f'", "E'\\u0085'", "E'\\n'", "'%s%n%d'", "'\"a\"'",
	"'\"a\\\"'", "'W/\"x\"'", "'*'", "'\"a\", W/\"b\"'", "'a.b.c.d'", "'\"'",
	"E'\\U0010ffff'", "'Sun, 06 Nov 1994 08:49:37 GMT'", "'99999999999999999999'",
	"'-1'", "'pg_catalog.x'", "'no_schema.t'", "repeat('n', 63)");
my @json = (
	"'null'", "'1'", "'1e1000'", "'-0.0'", "'\"s\"'", "'\"\"'", "'[]'", "'{}'", "'true'",
	"'[1, [2, {\"a\": null}]]'", "'{\"ETag\": \"x\", \"Location\": [1]}'", "'{\"\": {}}'",
	"'{\"content-type\": \"a\", \"Content-Type\": \"b\"}'",
	"(repeat('[', 1000) || repeat(']', 1000))", "to_json(repeat('j', 2000000))::text",
	"(SELECT json_object_agg(i, i)::text FROM generate_series(1, 2000) i)");
my %values = (
	bool => [ 'true', 'false' ],
	int2 => [ 0, 1, -32768, 32767 ],
	int4 => [ 0, 1, 1, 1, 2, 3, 200, 200, 201, 409, 422, 500, 503, 599, 600, -1, -2147483648, 2147483647 ],
	int8 => [ 0, 1, 2, 3, 4, 5, -1, "'-9223372036854775808'", "'9223372036854775807'" ],
	float8 => [ 0, 1, 0.5, 0.95, -1, "'NaN'", "'Infinity'", "'-Infinity'", "'1e308'", "'5e-324'" ],
	numeric => [ 0, "'NaN'", "'Infinity'", "'1e131071'" ],
	interval => [
		"'0'", "'1 ms'", "'1 s'", "'1 h'", "'1 day'", "'-1 s'", "'1 mon -30 days'", "'1 mon -31 days'",
		"'178000000 years'", "'-178000000 years'", "'2147483647 days'", "'-2147483648 days'",
		"'2147483647 mons 2147483647 days'", "'9223372036854775807 us'", "'-9223372036854775808 us'" ],
	timestamptz => [ "'infinity'", "'-infinity'", "'294276-12-31'", "'4713-01-01 BC'", 'now()',
		"now() - interval '1 h'", "now() + interval '1 h'", "'epoch'" ],
	bytea => [ "''", "'\\x00'", "'a'", "'a'", "decode(repeat('00', 255), 'hex')",
		"decode(repeat('ff', 256), 'hex')", "convert_to(repeat('b', 2000000), 'UTF8')" ],
	uuid => [ "'00000000-0000-0000-0000-000000000000'", 'gen_random_uuid()' ],
	regclass => [ "'s1'", "'s1'", "'s2'", "'s2'", "'idempotency_keys'", "'plain'", "'s1_pkey'", "'seen'", "'ids'",
		"'parts'", "'mat'", "'pg_class'", "'pg_authid'", "'pg_stat_activity'", "'idem_outbox'", "'idem_unfinished'",
		"'idem_route_policies'", "'0'", "'4294967295'", "'temp_store'" ],
	regprocedure => [ "'echo(jsonb)'", "'echo(jsonb)'", "'full(jsonb)'", "'fails(jsonb)'", "'again(jsonb)'",
		"'nothing(jsonb)'", "'set_of(jsonb)'", "'now()'", "'sum(int)'", "'jsonb_typeof(jsonb)'", "'0'", "'4294967295'" ],
	regrole => [ "'app'", "'own'", "'postgres'", "'pg_monitor'", "'0'", "'4294967295'" ]);
$values{text} = [ @names, @names, @names, @hostile ];
$values{name} = [ grep { !/000|U0010/ } @names, "repeat('n', 70)" ];
$values{jsonb} = $values{json} = \@json;
my @types = sort keys %values;
my %composite;    # the column types of the extension's row types
my %enum;

sub value
{
	my ($type) = @_;

	return value(any(@types, sort keys %composite)) if $type =~ /^any/;
	return "NULL::$type" if chance(0.12);
	return any(map { "'$_'::$type" } @{ $enum{$type} }) if $enum{$type};
	return 'ROW(' . join(', ', map { value($_) } @{ $composite{$type} }) . ")::$type"
	  if $composite{$type};
	if ($type =~ /^(.*)\[\]$/)
	{
		my $element = $1;
		return any("'{}'::$type", "'{NULL}'::$type",
			"ARRAY[[" . value($element) . '],[' . value($element) . "]]::$type",
			"array_fill(" . value($element) . ", '{300}', '{-5}')")
		  if chance(0.3);
		return 'ARRAY[' . join(', ', map { value($element) } 0 .. rand 4) . "]::$type";
	}
	my $values = $values{$type} or return "NULL::$type";
	my $value = any(@$values);
	# one that is not there (any more) is NULL
	return "to_$type($value)" if $type =~ /^reg/ && $value =~ /[a-z]/;
	return "($value)::$type";
}

#
# The world: the extension, stores and other tables of an ordinary owner, and
# an application.  It is made anew now and then, for much gets broken.
#
my %session;    # by name: handle, role, transaction or none
my @functions;

sub connect_as
{
	my ($role) = @_;
	return DBI->connect(
		'dbi:Pg:dbname=postgres;host=' . $node->host . ';port=' . $node->port,
		$role, undef,
		{ AutoCommit => 1, RaiseError => 0, PrintError => 0, PrintWarn => 0 });
}

sub make_world
{
	$_->{dbh}->disconnect for values %session;
	%session = ();
	$node->safe_psql('postgres', <<'EOS');
SET statement_timeout = 0;
SET client_min_messages = error;
DO $$ BEGIN
	IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'own') THEN
		EXECUTE 'DROP OWNED BY own, app CASCADE';
	END IF;
	IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'own') THEN
		CREATE ROLE own LOGIN;
		CREATE ROLE app LOGIN;
	END IF;
END $$;
DROP SCHEMA public CASCADE;
DROP EXTENSION IF EXISTS pg_idem CASCADE;
CREATE SCHEMA public;
CREATE EXTENSION pg_idem;
GRANT ALL ON SCHEMA public TO own, app;
GRANT EXECUTE ON FUNCTION idem_create_table TO own;
SELECT idem_grant('own'), idem_grant('app');
SET ROLE own;
SELECT idem_create_table('s1'), idem_create_table('s2');
CREATE TABLE plain (key text PRIMARY KEY, i int);
CREATE VIEW seen AS SELECT * FROM s1;
CREATE SEQUENCE ids;
CREATE TABLE parts (i int) PARTITION BY RANGE (i);
CREATE MATERIALIZED VIEW mat AS SELECT 1;
CREATE FUNCTION echo(jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $1';
CREATE FUNCTION set_of(jsonb) RETURNS SETOF jsonb LANGUAGE sql AS 'SELECT $1';
CREATE FUNCTION nothing(jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT NULL::jsonb';
CREATE FUNCTION full(jsonb) RETURNS idem_result LANGUAGE sql
	AS $$SELECT ROW (402, '{"ETag": "x"}', $1, 'b')::idem_result$$;
CREATE FUNCTION fails(jsonb) RETURNS jsonb LANGUAGE plpgsql AS 'BEGIN RAISE SQLSTATE ''WORK1''; END';
CREATE FUNCTION again(jsonb) RETURNS jsonb LANGUAGE sql
	AS $$SELECT to_jsonb(idem_begin('k', 'r', NULL))$$;
CREATE FUNCTION nulls() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
	n jsonb;
	bad text := (SELECT key FROM jsonb_object_keys(to_jsonb(NEW)) key ORDER BY random() LIMIT 1);
BEGIN
	RETURN CASE WHEN random() < 0.2 THEN NULL
		ELSE jsonb_populate_record(NEW, jsonb_build_object(bad, NULL)) END;
END $$;
EOS
	@functions = map { [ split /\|/, $_, -1 ] } split /\n/, $node->safe_psql('postgres', <<'EOS');
SELECT p.oid::regproc, pronargdefaults,
	(SELECT string_agg(coalesce(proargnames[n], ''), ',' ORDER BY n) FROM generate_series(1, pronargs) n),
	(SELECT string_agg(format('%s%s', coalesce(e.typname, t.typname), CASE WHEN e.oid IS NOT NULL THEN '[]' END), ',' ORDER BY n)
		FROM unnest(proargtypes) WITH ORDINALITY a (type, n)
		JOIN pg_type t ON t.oid = a.type LEFT JOIN pg_type e ON e.oid = t.typelem AND t.typcategory = 'A')
FROM pg_proc p JOIN pg_depend d ON d.objid = p.oid AND d.classid = 'pg_proc'::regclass
	AND d.deptype = 'e' AND d.refclassid = 'pg_extension'::regclass
	JOIN pg_extension x ON x.oid = d.refobjid AND x.extname = 'pg_idem'
WHERE p.prorettype NOT IN ('trigger'::regtype, 'event_trigger'::regtype)
ORDER BY p.oid::regprocedure::text COLLATE "C"
EOS
	foreach my $row (split /\n/, $node->safe_psql('postgres', <<'EOS'))
SELECT c.relname, string_agg(t.typname, ',' ORDER BY attnum)
FROM pg_class c JOIN pg_attribute a ON attrelid = c.oid JOIN pg_type t ON t.oid = atttypid
WHERE c.relkind = 'c' AND c.relnamespace = 'public'::regnamespace AND attnum > 0 GROUP BY 1
EOS
	{
		my ($name, $columns) = split /\|/, $row;
		$composite{$name} = [ split /,/, $columns ] if $name =~ /^idem/;
	}
	$enum{idem_state} = [ 'in_progress', 'completed', 'failed' ];
	$session{ $_->[0] } = { role => $_->[1], dbh => connect_as($_->[1]) }
	  for [ super => getpwuid $> ], [ own => 'own' ], [ own2 => 'own' ], [ app => 'app' ];
	$session{own}{dbh}->do("CREATE TEMP TABLE temp_store OF idempotency_key (PRIMARY KEY (key, tenant, route))");
	return;
}

#
# What is done
#
sub call
{
	my ($name, $defaults, $names, $types) = @{ any(@functions) };
	my @names = split /,/, $names // '';
	my @types = split /,/, $types // '';
	my @arguments;

	# the last ones may be left out, and those that have a name given by it
	my $positional = @names && chance(0.5) ? int rand 1 + @types : @types;
	foreach my $i (0 .. $#types)
	{
		my $value = value($types[$i]);

		next if $i >= @types - $defaults && $i >= $positional && chance(0.6);
		$positional = $i if $i < $positional && $types[$i] eq 'regclass' && chance(0.3);
		push @arguments, ($i < $positional ? '' : "$names[$i] => ") . $value;
	}
	return any('SELECT', 'SELECT * FROM') . " $name(" . join(', ', @arguments) . ')';
}

my @tables = (
	[ 'idempotency_keys', 'super' ], [ 'idem_outbox', 'super' ],
	[ 'idem_route_policies', 'super' ], [ 'idem_service_policies', 'super' ],
	[ 's1', 'own' ], [ 's2', 'own' ]);

sub columns
{
	my ($s, $table) = @_;
	return @{ $s->{dbh}->selectall_arrayref(
			"SELECT attname, typname FROM pg_attribute JOIN pg_type t ON t.oid = atttypid"
			  . " WHERE attrelid = to_regclass('$table') AND attnum > 0 AND NOT attisdropped ORDER BY attnum") || [] };
}

# A statement of a table's owner
sub owners_statement
{
	my ($s, $table) = @_;
	my @columns = columns($s, $table) or return 'SELECT 1';
	my ($column, $type) = @{ any(@columns) };

	return "INSERT INTO $table (" . join(', ', map { "\"$_->[0]\"" } @columns)
	  . ') OVERRIDING SYSTEM VALUE VALUES (' . join(', ', map { value($_->[1]) } @columns) . ')'
	  if chance(0.4);
	return "UPDATE $table SET \"$column\" = " . value($type) if chance(0.5);
	return any(
		"ALTER TABLE $table ALTER \"$column\" DROP NOT NULL",
		"ALTER TABLE $table DROP COLUMN \"$column\" CASCADE",
		"ALTER TABLE $table ADD COLUMN more int DEFAULT 1",
		"ALTER TABLE $table RENAME \"$column\" TO renamed",
		"ALTER TABLE $table ALTER \"$column\" TYPE " . any('text', 'int', 'bytea') . ' USING NULL',
		"ALTER TABLE $table NOT OF",
		"ALTER TABLE $table DROP CONSTRAINT ${table}_pkey CASCADE",
		"ALTER TABLE $table SET UNLOGGED",
		"ALTER TABLE $table ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY",
		"CREATE TRIGGER t BEFORE INSERT OR UPDATE ON $table FOR EACH ROW EXECUTE FUNCTION nulls()",
		"CREATE RULE r AS ON " . any('INSERT', 'UPDATE', 'DELETE') . " TO $table DO INSTEAD NOTHING",
		"CREATE INDEX ON $table ((1 / length(\"$column\"::text)))",
		"CREATE UNIQUE INDEX ON $table (\"$column\")",
		"TRUNCATE $table");
}

# The constraints that an owner may drop
sub drop_constraints
{
	my ($s, $table) = @_;

	$s->{dbh}->do("ALTER TABLE $table DROP CONSTRAINT \"$_\"")
	  foreach @{ $s->{dbh}->selectcol_arrayref(
			"SELECT conname FROM pg_constraint WHERE conrelid = to_regclass('$table') AND contype = 'c' ORDER BY 1") || [] };
	return;
}

my (%seen, @internal, %unlisted, $n);

# Run a statement.  Returns its SQLSTATE.
sub run
{
	my ($s, $sql, $is_call) = @_;
	my $sth = $s->{dbh}->prepare($sql, { pg_server_prepare => 0, pg_placeholder_dollaronly => 1 });
	my $state;

	$sth->execute and $sth->finish;
	$state = $s->{dbh}->state || '00000';
	$seen{$state}++ if $is_call;
	push @internal, "$state: $sql: " . $s->{dbh}->errstr if $state =~ /^XX/;
	$unlisted{$state} ||= "$sql: " . $s->{dbh}->errstr
	  if $is_call && $state !~ /^(00000|WORK1)$/ && !$documented{$state};
	return $state;
}

sub savepoint
{
	my ($s, $sql, $is_call) = @_;

	run($s, 'SAVEPOINT s');
	my $state = run($s, $sql, $is_call);
	run($s, $state ne '00000' || chance(0.1) ? 'ROLLBACK TO s' : 'RELEASE s');
	return;
}

sub step
{
	my ($s) = @_;

	if (!$s->{open})
	{
		return run($s, call(), ++$n) if chance(0.2);
		run($s, 'BEGIN ISOLATION LEVEL ' . any('READ COMMITTED', 'REPEATABLE READ', 'SERIALIZABLE')
			  . any('', '', '', '', ' READ ONLY'));
		$s->{open} = 1;

		# an owner at work: few of these stay
		$s->{broken} = chance(0.3);
		if ($s->{broken})
		{
			my $table = any(grep { ($_->[1] eq 'super') == ($s->{role} eq getpwuid $>) } @tables)->[0];

			$s->{broken} = 0 if $s->{role} eq 'app';
			return if $s->{role} eq 'app';
			run($s, 'SAVEPOINT c');
			drop_constraints($s, $table);
			run($s, 'ROLLBACK TO c') if $s->{dbh}->err;
			savepoint($s, owners_statement($s, $table)) for 0 .. rand 4;
		}
	}
	savepoint($s, call(), ++$n);
	if (chance(0.2))
	{
		run($s, $s->{broken} && chance(0.7) || chance(0.2) ? 'ROLLBACK' : 'COMMIT', 1);
		$s->{open} = 0;
	}
	return;
}

#
# Go
#
my $died = '';
for ($n = 0; $n < $calls;)
{
	my $until = $n + $round;

	make_world();
	while ($n < $until && $n < $calls)
	{
		my $s = $session{ any(sort keys %session) };
		step($s);
		next if $s->{dbh}->ping > 0;
		$died = "a session has gone after $n calls";
		last;
	}
	last if $died;
	run($_, 'ROLLBACK') for map { $session{$_} } sort keys %session;
	run($session{super}, 'SELECT idem_expire()', 1);
}

my $log = slurp_file($node->logfile);
my %worker = map { $_ => 1 } $log =~ /^.*? (XX\d\d\d) (?:ERROR|FATAL|PANIC|WARNING):/mg;

is($died, '', 'every session lives to the end');
unlike($log, qr/terminated by signal|TRAP:|PANIC/, 'the server neither crashed nor failed an assertion');
is(join("\n", @internal), '', 'no call ends with an internal error');
is(join(' ', sort keys %worker), '', 'nor does a worker');
is(join("\n", map { "$_: " . substr $unlisted{$_}, 0, 1000 } sort keys %unlisted),
	'', 'every SQLSTATE is in the table of README.md');
cmp_ok($seen{'00000'}, '>', $n / 10, 'many calls succeed');
note join ', ', map { "$_: $seen{$_}" } sort keys %seen;
diag "it was SEED=$seed CALLS=$calls" unless Test::More->builder->is_passing;

$_->{dbh}->disconnect for values %session;
$node->stop;
done_testing();
