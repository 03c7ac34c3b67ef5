
# A backend has ten callbacks for changes of tables, and some sixty for those
# of catalog entries, which PostgreSQL itself and all extensions share.  Who
# asks for one more ends the backend.  Citus takes five of the ten, PostgreSQL
# two; one is all that may be asked for.
#
# What another extension has distributed, such as a table of Citus, is empty
# here, whatever its rows are elsewhere: a key that was claimed on one node
# would be free on the next.  So such a table is refused, also in a session
# that has been using it.

use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;
use PgIdemTest;
use Test::More;

my $node = new_node('main', "pg_idem.expire = off\n");
my $module = "$FindBin::RealBin/../modules/take_slots/take_slots";

$node->safe_psql('postgres', <<EOS);
CREATE EXTENSION pg_idem;
CREATE ROLE app;
CREATE FUNCTION take_slots(relcache int, syscache int) RETURNS void
	AS '$module' LANGUAGE C;
CREATE FUNCTION work(jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT \$1';
EOS

# ---------------------------------------------------------------------
# Few callbacks are left
# ---------------------------------------------------------------------

# Seven are all that PostgreSQL's own two and one of ours leave.
sub crowded_session
{
	my $psql = PgIdemTest::Session->new($node, 'postgres');

	$psql->query('SELECT take_slots(7, 30)');
	return $psql;
}

my $psql = crowded_session();

is($psql->query(<<'EOS'), "further\nstarted\n\nreplayed\nstarted", 'claims');
SELECT idem_create_table('further');
SELECT outcome FROM idem_begin('k', 'r', '\x01');
SELECT idem_finish('k', '1', attempt => 1);
SELECT outcome FROM idem_begin('k', 'r', '\x01');
SELECT outcome FROM idem_begin('k', 'r', '\x01', store => 'further');
EOS
is( $psql->query(<<'EOS'), "t\n\nt\n200", 'leases, calls and lookups');
SELECT idem_checkpoint('k', 's', attempt => 1, store => 'further') > now();
SELECT idem_release('k', attempt => 1, store => 'further');
SELECT outcome IS NOT NULL FROM idem_call('c', 'r', '1', 'work(jsonb)');
SELECT status FROM idem_lookup('c', 'r');
EOS
is( $psql->query(<<'EOS'), "2\nt\nt\n0", 'consumers, policies and the sweep');
SELECT attempt FROM idem_resume(store => 'further');
SELECT idem_receive('consumer', 'm');
INSERT INTO idem_route_policies (route, ttl) VALUES ('r', '1 h');
SELECT expires_at < now() + interval '2 h' FROM idem_begin('brief', 'r', NULL);
SELECT idem_expire();
EOS
is( $psql->query(<<'EOS'), "t\n1\n\nt\nclosed\n1", 'the outbox and shared memory');
SELECT idem_publish('topic', '1') IS NOT NULL;
SELECT attempt FROM idem_outbox_take('topic');
SELECT idem_outbox_done(id, 1) FROM idem_outbox;
SELECT idem_breaker_allow('service');
SELECT idem_breaker_record('service', true);
SELECT count(*) FROM idem_stat_services;
EOS

# Those that have not been called, if only with NULL: an error of their own is
# as good as a result.
my $functions = <<'EOS';
SELECT format('SELECT * FROM %s(%s)', p.oid::regproc, coalesce(arguments, '')) AS call
FROM pg_proc p JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid
	AND d.deptype = 'e'
	JOIN pg_extension e ON e.oid = d.refobjid AND e.extname = 'pg_idem',
	LATERAL (SELECT string_agg('NULL::' || CASE t WHEN 'anyelement'::regtype THEN 'text'
		ELSE t::regtype::text END, ', ' ORDER BY n) AS arguments
		FROM unnest(proargtypes::oid[]) WITH ORDINALITY AS a (t, n)) a
WHERE prorettype <> 'trigger'::regtype
EOS
is( $psql->query(<<EOS), 't', 'every function there is');
DO \$\$
DECLARE f record; called int := 0;
BEGIN
	FOR f IN $functions LOOP
		BEGIN
			called := called + 1;
			EXECUTE f.call;
		EXCEPTION WHEN OTHERS THEN
			NULL;
		END;
	END LOOP;
	CREATE TEMP TABLE calls AS SELECT called;
END \$\$;
SELECT called = (SELECT count(*) FROM ($functions) f) AND called > 30 FROM calls;
EOS

# Another session changes what this one remembers of each kind of thing.
sub elsewhere
{
	my ($sql) = @_;
	$node->safe_psql('postgres', $sql);
	return;
}

elsewhere("UPDATE idem_route_policies SET ttl = '1 day' WHERE route = 'r'");
is($psql->query(<<'EOS'), 't', 'a policy that was changed is noticed');
SELECT expires_at > now() + interval '2 h' FROM idem_begin('long', 'r', NULL);
EOS
elsewhere('ALTER TABLE further ADD CHECK (key IS NOT NULL)');
is($psql->error("SELECT idem_begin('k', 'r', NULL, store => 'further')"),
	'0A000', 'a store that was changed is noticed');
elsewhere('ALTER TABLE further DROP CONSTRAINT further_key_check');
elsewhere('ALTER TABLE idem_outbox RENAME last_error TO l');
is($psql->error("SELECT idem_publish('topic', '1')"),
	'55000', 'an outbox that was changed is noticed');
elsewhere('ALTER TABLE idem_outbox RENAME l TO last_error');
is($psql->query("SELECT idem_publish('topic', '1') IS NOT NULL"),
	't', '... and that it was changed back');
elsewhere('DROP TABLE further; DROP EXTENSION pg_idem; CREATE EXTENSION pg_idem');
is($psql->query("SELECT outcome FROM idem_begin('k', 'r', '\\x01')"),
	'started', 'a new extension is noticed');
$psql->quit;

# Each function may be the first of a backend.
my @unhappy = grep {
	my $first = crowded_session();
	my $state = eval { $first->error($_) } || 'gone';
	$first->quit;
	$state =~ /gone|^XX|^57/
} split /\n/, $node->safe_psql('postgres', $functions);
is_deeply(\@unhappy, [], 'any function may be called first');

# ---------------------------------------------------------------------
# A table is distributed
# ---------------------------------------------------------------------

# Stands for Citus's; the columns that we do not look at are few here.
my $catalog = <<'EOS';
SET allow_system_table_mods = on;
CREATE TABLE pg_catalog.pg_dist_partition (partmethod "char" NOT NULL,
	logicalrelid regclass NOT NULL);
EOS

# What is done with a table goes with an invalidation of it.
sub distribute
{
	my ($table) = @_;
	elsewhere(<<EOS);
BEGIN;
INSERT INTO pg_dist_partition VALUES ('h', '$table');
ALTER TABLE $table SET (autovacuum_enabled = on);
COMMIT;
EOS
	return;
}

sub make_plain
{
	my ($table) = @_;
	elsewhere(<<EOS);
BEGIN;
DELETE FROM pg_dist_partition WHERE logicalrelid = '$table'::regclass;
ALTER TABLE $table RESET (autovacuum_enabled);
COMMIT;
EOS
	return;
}

# A table of that name elsewhere, or another object there, is nobody's.
elsewhere(<<'EOS');
SELECT idem_create_table('further');
CREATE TABLE public.pg_dist_partition (logicalrelid regclass);
INSERT INTO public.pg_dist_partition VALUES ('further'), ('idempotency_keys');
SET allow_system_table_mods = on;
CREATE VIEW pg_catalog.pg_dist_partition AS SELECT 'further'::regclass AS logicalrelid;
EOS
$psql = PgIdemTest::Session->new($node, 'postgres');
my $begin_further = q(SELECT outcome FROM idem_begin('d', 'r', NULL, store => 'further'));
my $begin = q(SELECT outcome FROM idem_begin('d', 'r', NULL));
is($psql->query("BEGIN; $begin_further; ROLLBACK"),
	'started', 'a view of that name says nothing');
elsewhere(<<'EOS');
SET allow_system_table_mods = on;
DROP VIEW pg_catalog.pg_dist_partition;
CREATE TABLE pg_catalog.pg_dist_partition (logicalrelid text);
INSERT INTO pg_catalog.pg_dist_partition VALUES ('further');
ALTER TABLE further SET (autovacuum_enabled = on);
EOS
is($psql->query("BEGIN; $begin_further; ROLLBACK"),
	'started', 'nor does a column of another type');
elsewhere(<<'EOS');
SET allow_system_table_mods = on;
DROP TABLE pg_catalog.pg_dist_partition;
CREATE TYPE pg_catalog.pg_dist_partition AS (logicalrelid regclass);
ALTER TABLE further RESET (autovacuum_enabled);
EOS
is($psql->query("BEGIN; $begin_further; ROLLBACK"), 'started', 'nor does a type');
elsewhere("SET allow_system_table_mods = on; DROP TYPE pg_catalog.pg_dist_partition; DROP TABLE public.pg_dist_partition; $catalog");
is($psql->query("BEGIN; $begin_further; ROLLBACK"),
	'started', 'an empty catalog distributes nothing');

distribute('further');
is($psql->error($begin_further), '55000', 'an open session refuses a store that was distributed');
like($psql->{err}, qr/DETAIL:  A store must not be distributed.*HINT:  /s,
	'... and says what to do');
foreach my $call ("idem_finish('d', '1', store => 'further')",
	"idem_lookup('d', 'r', store => 'further')",
	"idem_resume(store => 'further')",
	"idem_receive('r', 'd', store => 'further')")
{
	is($psql->error("SELECT $call"), '55000', "... $call too");
}
is($psql->query($begin), 'started', 'other stores work');
distribute('idempotency_keys');
is($psql->error($begin), '55000', 'the default store is refused, too');

# A sweep has no business in the shell either.
my $expired = <<'EOS';
INSERT INTO %s (key, tenant, route, state, attempt, result_dropped, created_at, expires_at)
VALUES ('old', '', 'r', 'completed', 1, false, '2000-01-01', '2000-01-01');
EOS
elsewhere(sprintf($expired, $_)) foreach ('further', 'idempotency_keys');
my $dead = "SELECT count(*) FROM idem_outbox WHERE dead_at IS NOT NULL";
elsewhere("SELECT idem_publish('topic', '1'); UPDATE idem_outbox SET dead_at = '2000-01-01'");
distribute('idem_outbox');
my $old = "SELECT count(*) FROM (SELECT FROM further WHERE key = 'old'"
  . " UNION ALL SELECT FROM idempotency_keys WHERE key = 'old') k";
is($psql->query("SELECT idem_expire(); $old; $dead"),
	"0\n2\n1", 'a sweep by hand leaves what is distributed alone');
my $offset = log_end($node);
elsewhere('ALTER SYSTEM SET pg_idem.expire = on; SELECT pg_reload_conf()');
ok( wait_for_log_line(
		$node,
		qr/LOG:  2 tables of type idempotency_key are no stores.*DETAIL:  Table "[a-z_]+": A store must not be distributed/s,
		$offset),
	'so does that of the worker, and says so');
elsewhere('ALTER SYSTEM RESET pg_idem.expire; SELECT pg_reload_conf()');
is($psql->query("$old; $dead"), "2\n1", '... and nothing is gone');
make_plain('idem_outbox');

make_plain($_) foreach ('further', 'idempotency_keys');
is($psql->query("$begin; $begin_further"),
	"in_progress\nstarted", 'once they are plain again, they work');
# (a worker may be at it still)
ok( wait_until(sub { $psql->query("SELECT FROM idem_expire(); $old; $dead") eq "0\n0" }),
	'... and are swept');

# rows that the library reads without a statement are in other tables as well
distribute('idem_outbox');
is($psql->error("SELECT idem_publish('topic', '1')"),
	'55000', 'a distributed outbox is refused');
make_plain('idem_outbox');
is($psql->query("SELECT idem_publish('topic', '1') IS NOT NULL"),
	't', '... until it is plain again');
distribute('idem_route_policies');
is($psql->error($begin), '55000', 'a distributed table of policies is refused');
make_plain('idem_route_policies');
is($psql->query($begin), 'in_progress', '... until it is plain again');
distribute('idem_service_policies');
is($psql->error("SELECT idem_breaker_allow('another')"),
	'55000', 'so is that of services');
make_plain('idem_service_policies');
is($psql->query("SELECT idem_breaker_allow('another')"),
	't', '... until it is plain again');

$psql->quit;
$node->stop;
done_testing();
