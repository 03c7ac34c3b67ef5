
# Whoever owns a further store may put a DELETE trigger on it that never ends.
# That must not stop expiry elsewhere: neither in the default store of the
# same database, nor in other databases, nor for good in its own.
#
# The owner may also write to it what no function of ours would, such as names
# of any length.  What is counted of them in shared memory must stay in bounds.

use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;

use PgIdemTest;
use Test::More;

my $node = new_node('hostile_store', undef, extra => [ '--encoding=UTF8', '--no-locale' ]);

$node->safe_psql('postgres', <<'EOS');
CREATE DATABASE other;
CREATE ROLE mallory LOGIN;
CREATE EXTENSION pg_idem;
SELECT idem_create_table('public.evil');
ALTER TABLE evil OWNER TO mallory;
CREATE FUNCTION hang() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	LOOP
		BEGIN
			PERFORM pg_sleep(3600);
		EXCEPTION WHEN query_canceled THEN
			NULL;
		END;
	END LOOP;
END $$;
CREATE TRIGGER hang BEFORE DELETE ON evil FOR EACH ROW EXECUTE FUNCTION hang();
EOS
$node->safe_psql('other', 'CREATE EXTENSION pg_idem');

# Put an expired key into a store, and wait for its end.
sub expired_key
{
	my ($db, $store, $key) = @_;
	$node->safe_psql($db, expired_keys($key, $store));
	return;
}

sub is_swept
{
	my ($db, $key, $name) = @_;
	ok( wait_until(
			sub {
				$node->safe_psql($db,
					"SELECT count(*) FROM idempotency_keys WHERE key = '$key'") eq '0';
			}),
		$name);
	return;
}

expired_key('postgres', 'evil', 'never');
ok( wait_until(
		sub {
			$node->safe_psql('postgres',
				"SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'pg_idem expiry worker' AND wait_event = 'PgSleep'"
			) eq '1';
		}),
	'a worker hangs in the trigger');

expired_key('postgres', 'idempotency_keys', 'a');
expired_key('other', 'idempotency_keys', 'b');
is_swept('other', 'b', 'other databases are swept');
is_swept('postgres', 'a', 'so is the default store');
expired_key('postgres', 'idempotency_keys', 'c');
is_swept('postgres', 'c', 'time and again');
is($node->safe_psql('postgres', 'SELECT count(*) FROM evil'),
	'1', 'the key that cannot go is still there');

$node->safe_psql('postgres', 'DROP TRIGGER hang ON evil');
# the worker may have been quicker, or be at it
ok( wait_until(
		sub {
			$node->safe_psql('postgres', 'SELECT idem_expire()');
			$node->safe_psql('postgres', 'SELECT count(*) FROM evil') eq '0';
		}),
	'without the trigger it goes');

# A route that is longer than a route may be, with two bytes to a character
$node->safe_psql('postgres', <<'EOS');
SELECT idem_grant('mallory');
INSERT INTO evil (key, tenant, route, state, attempt, result_dropped, created_at, expires_at, lease_until)
SELECT key, '', repeat('é', 100000), 'in_progress', 1, false, now(), 'infinity', '-infinity'
FROM unnest(ARRAY['finish', 'resume', 'stale']) key;
EOS
my $mallory = PgIdemTest::Session->new($node, 'postgres', 'mallory');
$mallory->query("SELECT idem_finish('finish', NULL, attempt => 1, store => 'evil')");
is($mallory->query("SELECT key, attempt FROM idem_resume(1, key => 'resume', store => 'evil')"),
	'resume|2', 'a claim with a route that is too long');
is($mallory->error("SELECT idem_finish('stale', NULL, attempt => 2, store => 'evil')"),
	'IK001', 'a stale one');
is($node->safe_psql('postgres',
		"SELECT length(route), completed, resumed, stale FROM idem_stat_routes WHERE route LIKE repeat('é', 100) || '%'"),
	'127|1|1|1', 'they are counted under what there is room for');

# Tables of policies whose owner has changed them: refused, whatever is read
# of them, and at once good again
foreach my $change (
	[ 'idem_service_policies', 'DROP CONSTRAINT idem_service_policies_breaker_check, ALTER breaker TYPE int USING 1' ],
	[ 'idem_service_policies', 'DROP CONSTRAINT idem_service_policies_open_time_check, ALTER open_time TYPE int8 USING 5' ],
	[ 'idem_service_policies', 'DROP COLUMN open_time' ],
	[ 'idem_service_policies', 'RENAME TO idem_nothing' ],
	[ 'idem_route_policies', 'DROP CONSTRAINT idem_route_policies_keep_check, ALTER keep TYPE int USING 1' ],
	[ 'idem_route_policies', 'DROP COLUMN response_ttl' ],
	[ 'idem_outbox', 'ALTER available_at TYPE text' ],
	[ 'idem_outbox', 'RENAME topic TO t2' ],
	[ 'idem_outbox', 'SET UNLOGGED' ],
	[ 'idem_outbox', 'ALTER max_attempts TYPE text' ])
{
	my ($table, $action) = @$change;
	my $call = {
		idem_route_policies => "idem_begin('k', 'r', NULL)",
		idem_service_policies => "idem_breaker_allow('s')",
		idem_outbox => "idem_outbox_take('t')"
	}->{$table};

	sqlstate_is($node, 'postgres', undef, <<EOS, $action =~ /^RENAME TO/ ? '42P01' : '55000', "$table: $action");
INSERT INTO idem_service_policies (service, open_time) VALUES ('a', '1 h');
INSERT INTO idem_route_policies (route, keep) VALUES ('a', 'all');
SELECT idem_publish('t', '{}', 'g'), idem_publish('t', '{}');
SELECT $call;
BEGIN;
ALTER TABLE $table $action;
SELECT $call;
EOS
	sqlstate_is($node, 'postgres', undef, <<EOS, '00000', 'and good again');
SELECT $call;
DELETE FROM idem_service_policies;
DELETE FROM idem_route_policies;
EOS
}
# A table whose statements would find other columns than were checked; the
# worker leaves it alone, too, and goes on with what it knows.
$node->safe_psql('postgres', <<'EOS');
DELETE FROM idem_outbox;
ALTER TABLE idem_outbox ADD COLUMN m int8 DEFAULT 1234567890;
SELECT idem_publish('m', '1');
EOS
is( $node->safe_psql('postgres', "SELECT topic, attempt, m FROM idem_outbox_take('m')"),
	'm|1|1234567890', 'a further column called m');
$node->safe_psql('postgres', <<'EOS');
UPDATE idem_outbox SET dead_at = '2000-01-01';
ALTER TABLE idem_outbox RENAME topic TO t2;
ALTER TABLE idem_outbox ADD topic int8 DEFAULT 4096;
EOS
expired_key('postgres', 'idempotency_keys', 'd');
is_swept('postgres', 'd', 'keys are swept beside an outbox that was changed');
$node->safe_psql('postgres', <<'EOS');
ALTER TABLE idem_outbox DROP topic;
ALTER TABLE idem_outbox RENAME t2 TO topic;
EOS
# A dead letter that cannot go stops neither the others nor the keys.
$node->safe_psql('postgres', <<'EOS');
SELECT count(idem_publish('fk', '1')) FROM generate_series(1, 3);
UPDATE idem_outbox SET dead_at = '2000-01-01';
CREATE TABLE audit (id bigint REFERENCES idem_outbox);
INSERT INTO audit SELECT min(id) FROM idem_outbox WHERE topic = 'fk';
EOS
expired_key('postgres', 'idempotency_keys', 'e');
$node->safe_psql('postgres', 'SELECT idem_expire()');
is( $node->safe_psql('postgres',
		"SELECT (SELECT count(*) FROM idem_outbox WHERE topic = 'fk'), (SELECT count(*) FROM idempotency_keys WHERE key = 'e')"),
	'1|0', 'a dead letter that is referred to stays, and nothing else');
$node->safe_psql('postgres', 'DROP TABLE audit; DELETE FROM idem_outbox');
# Nor does the purge run for ever where looking for dead letters alone takes
# longer than it may look: here, because of a policy that is asked for each row.
$node->safe_psql('postgres', <<'EOS');
BEGIN;
SELECT count(idem_publish('slow', '1')) FROM generate_series(1, 2);
UPDATE idem_outbox SET dead_at = '2000-01-01';
CREATE FUNCTION is_slow() RETURNS bool LANGUAGE plpgsql AS
	$$ BEGIN PERFORM pg_sleep(0.6); RETURN true; END $$;
CREATE POLICY slow ON idem_outbox USING (is_slow());
ALTER TABLE idem_outbox OWNER TO mallory, ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
COMMIT;
EOS
ok( wait_until(
		sub {
			$node->safe_psql('postgres', 'SELECT count(*) FROM idem_outbox') eq '0';
		}),
	'dead letters that are slow to be found are removed');
$node->safe_psql('postgres', <<'EOS');
DROP POLICY slow ON idem_outbox;
DROP FUNCTION is_slow();
ALTER TABLE idem_outbox OWNER TO CURRENT_USER, DISABLE ROW LEVEL SECURITY, NO FORCE ROW LEVEL SECURITY;
EOS
# Further columns do no harm, nor do they once they have gone.
is( $node->safe_psql('postgres', <<'EOS'), "started\nt\nstarted\nt", 'further columns');
ALTER TABLE idem_route_policies ADD note text;
ALTER TABLE idem_service_policies ADD note text;
SELECT outcome FROM idem_begin('note1', 'r', NULL);
SELECT idem_breaker_allow('s');
ALTER TABLE idem_route_policies DROP note;
ALTER TABLE idem_service_policies DROP note;
SELECT outcome FROM idem_begin('note2', 'r', NULL);
SELECT idem_breaker_allow('s');
EOS
# A claim needs no policies of services.
is( $node->safe_psql('postgres', <<'EOS'), 'started', 'without policies of services');
ALTER TABLE idem_service_policies RENAME TO idem_nothing;
SELECT outcome FROM idem_begin('note3', 'r', NULL);
ALTER TABLE idem_nothing RENAME TO idem_service_policies;
EOS
$mallory->quit;

$node->stop('fast');
unlike(log_since($node), qr/PANIC|terminated by signal/, 'nothing has crashed');
done_testing();
