# The promise: one table that gives trouble, or one key, holds up no other.
#
# Whoever may create a table may make one of our type, put a trigger on a store
# of his own, or refer to keys.  None of that may crash the server, stop the
# sweep of other tables, or keep keys that could go.

use strict;
use warnings;

use FindBin;
use lib $FindBin::RealBin;

use PgIdemTest;
use Test::More;

my $node = new_node('trouble');

$node->safe_psql('postgres', <<'EOS');
CREATE EXTENSION pg_idem;
CREATE ROLE app LOGIN;
SELECT idem_grant('app');
CREATE SCHEMA app AUTHORIZATION app;
EOS

sub swept_to
{
	my ($store, $left, $name) = @_;
	ok( $node->poll_query_until(
			'postgres',
			"SELECT coalesce(string_agg(key, ' ' ORDER BY key), '') FROM $store",
			$left),
		$name);
	return;
}

# Wait until a sweep of the default store has begun and ended since now.
sub another_sweep
{
	$node->safe_psql('postgres', expired_keys('mark*1', 'idempotency_keys'));
	return $node->poll_query_until('postgres',
		"SELECT count(*) = 0 FROM idempotency_keys WHERE key LIKE 'mark%'");
}

#
# A table of the type that is no store
#
my $offset = log_end($node);
my $app = PgIdemTest::Session->new($node, 'postgres', 'app');
$app->query(<<'EOS');
CREATE TABLE app.t OF idempotency_key;
INSERT INTO app.t (expires_at, state) VALUES (now() - interval '1 hour', 'completed');
EOS
ok( wait_for_log_line(
		$node,
		qr/LOG:  1 table of type idempotency_key is no store, and is not swept\n.*DETAIL:  Table "t": A store needs a valid primary key/,
		$offset),
	'a table of the type without a primary key is told of');
ok(another_sweep() && another_sweep() && another_sweep(), 'others are swept');
is($node->safe_psql('postgres', 'SELECT idem_expire(); SELECT count(*) FROM app.t'),
	"0\n1", 'it is passed over by hand, too');
my @told = log_since($node, $offset) =~ /is no store, and is not swept/g;
is(scalar @told, 1, 'it is told of once');
$app->query(<<'EOS');
CREATE TABLE app.u OF idempotency_key (PRIMARY KEY (key, tenant, route));
ALTER TABLE app.u DROP CONSTRAINT u_pkey;
ALTER TABLE app.u ALTER key DROP NOT NULL, ALTER tenant DROP NOT NULL, ALTER route DROP NOT NULL;
INSERT INTO app.u (expires_at) VALUES ('2000-01-01');
CREATE TABLE app.v OF idempotency_key (PRIMARY KEY (tenant, key, route));
EOS
ok( wait_for_log_line(
		$node, qr/LOG:  3 tables of type idempotency_key are no stores/, $offset),
	'more of them are told of again');
$app->query('DROP TABLE app.t, app.u, app.v');

#
# A store with rows that no function of ours would have written
#
$node->safe_psql('postgres', <<'EOS');
SELECT idem_create_table('app.odd');
ALTER TABLE app.odd OWNER TO app;
EOS
$app->query(<<'EOS');
ALTER TABLE app.odd ALTER state DROP NOT NULL, ALTER attempt DROP NOT NULL,
	ALTER result_dropped DROP NOT NULL, ALTER created_at DROP NOT NULL,
	ALTER expires_at DROP NOT NULL;
INSERT INTO app.odd (key, tenant, route) VALUES ('all null', '', '');
INSERT INTO app.odd (key, tenant, route, expires_at, lease_until) VALUES ('no state', '', '', '-infinity', '-infinity');
INSERT INTO app.odd (key, tenant, route, expires_at, state) VALUES ('no attempt', '', '', '2000-01-01', 'in_progress');
INSERT INTO app.odd (key, tenant, route, expires_at, state) VALUES ('gone', '', '', '2000-01-01', 'failed');
INSERT INTO app.odd (key, tenant, route, expires_at, state)
SELECT repeat('x', 600) || i, '', '', '2000-01-01', 'failed' FROM generate_series(1, 5) i;
EOS
swept_to('app.odd', 'all null no attempt', 'rows with NULLs and long names');
$app->query('DROP TABLE app.odd');

#
# Keys that foreign keys refer to; more of them than a sweep could try one by
# one, and one table of which nobody has the same constraint's name alone
#
$node->safe_psql('postgres', <<'EOS');
CREATE TABLE charges (key text, tenant text, route text,
	CONSTRAINT idem_fk FOREIGN KEY (key, tenant, route) REFERENCES idempotency_keys DEFERRABLE INITIALLY DEFERRED);
CREATE TABLE refunds (key text, tenant text, route text,
	CONSTRAINT idem_fk FOREIGN KEY (key, tenant, route) REFERENCES idempotency_keys);
EOS
# (in one transaction, lest a sweep come by before they are referred to)
$node->safe_psql('postgres', 'BEGIN;' . expired_keys('held*30000', 'idempotency_keys')
	  . <<'EOS' . expired_keys('zfree*100', 'idempotency_keys') . 'COMMIT');
INSERT INTO charges SELECT key, tenant, route FROM idempotency_keys WHERE key LIKE 'held%';
UPDATE idempotency_keys SET expires_at = '1999-01-01' WHERE key LIKE 'held%';
EOS
my $xids = 'SELECT pg_snapshot_xmax(pg_current_snapshot())';
my $before = $node->safe_psql('postgres', $xids);
ok( $node->poll_query_until(
		'postgres',
		"SELECT count(*) = 0 FROM idempotency_keys WHERE key LIKE 'zfree%'"),
	'keys that nothing refers to go from behind those that are referred to');
ok(another_sweep() && another_sweep(), 'and more of them');
cmp_ok($node->safe_psql('postgres', $xids) - $before,
	'<', 1000, 'a key that has to stay costs no transaction ids');
is($node->safe_psql('postgres', "SELECT count(*) FROM idempotency_keys WHERE key LIKE 'held%'"),
	30000, 'they all stay');
$node->safe_psql('postgres', <<'EOS' . expired_keys('free*10', 'idempotency_keys'));
TRUNCATE charges;
DELETE FROM idempotency_keys;
DROP TABLE charges, refunds;
EOS
swept_to('idempotency_keys', '', 'when nothing refers to them any more, they go');

#
# Keys that a trigger keeps, many more than a sweep tries
#
$node->safe_psql('postgres', <<'EOS' . expired_keys('poison*350', 'idempotency_keys') . expired_keys('tail*20', 'idempotency_keys'));
CREATE FUNCTION poison() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	IF old.key LIKE 'poison%' THEN RAISE 'not this one'; END IF;
	RETURN old;
END $$;
CREATE TRIGGER poison BEFORE DELETE ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION poison();
UPDATE idempotency_keys SET expires_at = expires_at + interval '1 month' WHERE key LIKE 'tail%';
EOS
ok( $node->poll_query_until(
		'postgres',
		"SELECT count(*) = 350 FROM idempotency_keys WHERE key NOT LIKE 'mark%'"),
	'keys go from behind those that a trigger keeps');
ok(another_sweep(), 'time and again');
ok(wait_for_log_line($node, qr/LOG:  could not remove expired idempotency key "poison1" from public.idempotency_keys: not this one/),
	'the log says which, and why');
$node->safe_psql('postgres', 'DROP TRIGGER poison ON idempotency_keys; DELETE FROM idempotency_keys');

#
# Keys that are slow to go: a step may take ten seconds
#
$node->safe_psql('postgres', <<'EOS' . expired_keys('slow*9', 'idempotency_keys'));
CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_sleep(1.3); RETURN old; END $$;
CREATE TRIGGER slow BEFORE DELETE ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION slow();
EOS
swept_to('idempotency_keys', '', 'keys that are slow to go');
$node->safe_psql('postgres', 'DROP TRIGGER slow ON idempotency_keys');

#
# Keys whose rows' rows somebody has locked: only those may stay
#
$node->safe_psql('postgres', <<'EOS' . expired_keys('l*500', 'idempotency_keys'));
CREATE TABLE charges (key text PRIMARY KEY, tenant text DEFAULT '', route text DEFAULT 'r',
	FOREIGN KEY (key, tenant, route) REFERENCES idempotency_keys ON DELETE CASCADE);
EOS
$node->append_conf('postgresql.conf', 'pg_idem.expire = off');
$node->reload;
ok($node->poll_query_until('postgres', 'SHOW pg_idem.expire', 'off'), 'expiry is off');
ok( $node->poll_query_until(
		'postgres',
		"SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'pg_idem expiry worker'"),
	'and no worker runs');
$node->safe_psql('postgres', 'DELETE FROM idempotency_keys;'
	  . expired_keys('l*500', 'idempotency_keys')
	  . 'INSERT INTO charges SELECT key FROM idempotency_keys');
my $session = PgIdemTest::Session->new($node, 'postgres');
$session->query("BEGIN; SELECT FROM charges WHERE key IN ('l7', 'l100', 'l400') FOR UPDATE");
$node->append_conf('postgresql.conf', 'pg_idem.expire = on');
$node->reload;
swept_to('idempotency_keys', 'l100 l400 l7', 'keys that somebody has locked keep no others');
$session->query('COMMIT');
$session->quit;
swept_to('idempotency_keys', '', 'and they go when he is done');
$node->safe_psql('postgres', 'DROP TABLE charges');

#
# What a cancelled step has not removed is not in the log
#
$offset = log_end($node);
$node->safe_psql('postgres', <<'EOS' . expired_keys('u*2', 'idempotency_keys', 'in_progress'));
CREATE FUNCTION hang() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	IF old.key = 'u2' THEN PERFORM pg_sleep(3600); END IF;
	RETURN old;
END $$;
CREATE TRIGGER hang BEFORE DELETE ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION hang();
EOS
ok(wait_for_log_line($node, qr/ERROR:  canceling statement due to statement timeout/, $offset),
	'a step is cancelled');
is($node->safe_psql('postgres', 'SELECT count(*) FROM idempotency_keys'), 2, 'nothing has gone');
unlike(log_since($node, $offset), qr/removed unfinished/, 'and nothing is said to have');
$node->safe_psql('postgres', 'DROP TRIGGER hang ON idempotency_keys');
swept_to('idempotency_keys', '', 'they go without the trigger');
ok(wait_for_log_line($node, qr/removed unfinished idempotency key "u1"/, $offset), 'and are told of');

#
# Further stores: one that hangs holds up no other, and those that take long
# have their turns.  The first one made comes first.
#
$node->safe_psql('postgres', join '', map { <<EOS } 'evil', 's1', 's2', 's3');
SELECT idem_create_table('app.$_');
ALTER TABLE app.$_ OWNER TO app;
EOS
$app->query(<<'EOS' . expired_keys('e*1', 'app.evil') . join '', map { <<EOS . expired_keys('k*7', "app.$_") } 's1', 's2', 's3');
CREATE FUNCTION app.hang() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_sleep(3600); RETURN old; END $$;
CREATE TRIGGER hang BEFORE DELETE ON app.evil FOR EACH ROW EXECUTE FUNCTION app.hang();
CREATE FUNCTION app.slow() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM pg_sleep(1); RETURN old; END $$;
EOS
CREATE TRIGGER slow BEFORE DELETE ON app.$_ FOR EACH ROW EXECUTE FUNCTION app.slow();
EOS
swept_to("app.$_", '', "app.$_ is swept") foreach 's1', 's2', 's3';
ok(another_sweep() && another_sweep(), 'so is the default store');
$app->query(expired_keys('again*1', 'app.s2'));
swept_to('app.s2', '', 'and app.s2 again');
is($app->query('SELECT count(*) FROM app.evil'), 1, 'what hangs is still there');
$app->quit;

$node->stop('fast');
unlike(log_since($node), qr/PANIC|terminated by signal/, 'nothing has crashed');
done_testing();
