
# Whoever owns a further store may put a DELETE trigger on it that never ends.
# That must not stop expiry elsewhere: neither in the default store of the
# same database, nor in other databases, nor for good in its own.

use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;

use PgIdemTest;
use Test::More;

my $node = new_node('hostile_store');

$node->safe_psql('postgres', <<'EOS');
CREATE DATABASE other;
CREATE ROLE mallory;
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
	$node->safe_psql($db,
		"INSERT INTO $store (key, tenant, route, state, attempt, result_dropped, created_at, expires_at)"
		  . " VALUES ('$key', '', 'r', 'completed', 1, false, '2000-01-01', '2000-01-02')");
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
is($node->safe_psql('postgres', 'SELECT idem_expire()'),
	'1', 'without the trigger it goes');

$node->stop('fast');
done_testing();
