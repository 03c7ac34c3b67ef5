--
-- LEASE
-- Claims that outlive their transaction: checkpoint, release, resume, the
-- fence before each of them, and the view of what is unfinished.  Where a
-- lease must be over, the row is changed; what needs two sessions at a time
-- is in test/isolation and test/t.
--

CREATE FUNCTION lose_lease() RETURNS void
BEGIN ATOMIC
	UPDATE idempotency_keys SET lease_until = '2000-01-01' WHERE state = 'in_progress';
END;

-- A checkpoint is what the next attempt starts from, and renews the lease
SELECT outcome, attempt, step, step_data FROM idem_begin('k', 'r', '\x01');
SELECT idem_checkpoint('k', 'charged', '{"id": "ch_1"}', lease => '1h', attempt => 1) > now() + interval '59 min' AS renewed;
SELECT outcome, attempt, step, step_data FROM idem_begin('k', 'r', '\x01');
SELECT lose_lease();
SELECT key, tenant, route, attempt, step, step_data FROM idem_unfinished;
SELECT outcome, attempt, step, step_data FROM idem_begin('k', 'r', '\x02');
SELECT outcome, attempt, step, step_data FROM idem_begin('k', 'r', '\x01');
SELECT key FROM idem_unfinished;
-- the lease of the setting, where none is given; without a step only the lease
-- is renewed, without data there is none
SELECT idem_checkpoint('k', NULL, attempt => 2) > now() AS renewed;
SELECT step, step_data FROM idempotency_keys;
SELECT idem_checkpoint('k', NULL, '1', attempt => 2);
SELECT idem_checkpoint('k', 'mailed', attempt => 2) > now() AS renewed;
SELECT step, step_data, request_hash FROM idempotency_keys;

-- The fence
SELECT idem_checkpoint('k', 'late', attempt => 1);
SELECT idem_checkpoint('k', 'late', attempt => 3);
SELECT idem_checkpoint('k', 'late');
SELECT idem_release('k', attempt => 1);
SELECT idem_release('k');
SELECT idem_finish('k', '1', attempt => 1);
SELECT step, attempt, state FROM idempotency_keys;
SELECT idem_checkpoint('none', 'x', attempt => 1);
SELECT idem_release('none', attempt => 1);

-- Its own transaction's claim needs no attempt
BEGIN;
SELECT outcome FROM idem_begin('own', 'r', NULL);
SELECT idem_checkpoint('own', 'a') IS NOT NULL AS renewed;
SELECT idem_checkpoint('own', 'b', '[1]') IS NOT NULL AS renewed;
SELECT idem_finish('own', '"done"');
SELECT idem_checkpoint('own', 'c');
ROLLBACK;

-- A released claim is resumed at once, whatever the policy; it is not in doubt
SET pg_idem.on_lost_lease = 'hold';
SELECT idem_release('k', attempt => 2);
SELECT key, lease_until FROM idem_unfinished;
SELECT outcome, attempt FROM idem_begin('k', 'r', '\x01');
SELECT lose_lease();
SELECT outcome, attempt FROM idem_begin('k', 'r', '\x01');
RESET pg_idem.on_lost_lease;
SELECT idem_finish('k', '"done"', attempt => 3);
SELECT idem_checkpoint('k', 'x', attempt => 3);
SELECT idem_release('k', attempt => 3);
SELECT idem_release('k', attempt => 2);
SELECT outcome, response, attempt FROM idem_begin('k', 'r', '\x01');
-- a released claim with no attempts left is unknown all the same
SET pg_idem.max_attempts = 1;
SELECT outcome FROM idem_begin('last', 'r', NULL);
SELECT idem_release('last', attempt => 1);
SELECT outcome, status FROM idem_begin('last', 'r', NULL);
RESET pg_idem.max_attempts;

-- Retention counts from the finish, if a later transaction finishes
DELETE FROM idempotency_keys;
SELECT outcome FROM idem_begin('k', 'r', NULL, ttl => '1h');
UPDATE idempotency_keys SET created_at = created_at - interval '30 min', expires_at = expires_at - interval '30 min';
SELECT idem_finish('k', NULL, attempt => 1);
SELECT expires_at - finished_at AS retention FROM idempotency_keys;
-- ... also one that has changed the claim before
DELETE FROM idempotency_keys;
SELECT outcome FROM idem_begin('k', 'r', NULL, ttl => '1h');
UPDATE idempotency_keys SET created_at = created_at - interval '30 min', expires_at = expires_at - interval '30 min';
BEGIN;
SELECT idem_checkpoint('k', 'x', attempt => 1) IS NOT NULL AS renewed;
SELECT idem_finish('k', NULL);
COMMIT;
SELECT expires_at - finished_at AS retention FROM idempotency_keys;

-- ... and it does not grow when a failed attempt is run again, by another
-- transaction than the one that failed
DELETE FROM idempotency_keys;
SELECT outcome FROM idem_begin('k', 'r', NULL, ttl => '1h');
UPDATE idempotency_keys SET created_at = created_at - interval '50 min';
SELECT idem_finish('k', NULL, 503, attempt => 1, ttl => '1h');
SELECT outcome, attempt FROM idem_begin('k', 'r', NULL);
SELECT idem_finish('k', NULL, 503, attempt => 2);
SELECT expires_at - finished_at AS retention FROM idempotency_keys;
SELECT outcome, attempt FROM idem_begin('k', 'r', NULL);
SELECT idem_finish('k', NULL, attempt => 3);
SELECT expires_at - finished_at AS retention FROM idempotency_keys;
-- a long transaction leaves the key its whole retention all the same
BEGIN;
SELECT outcome FROM idem_begin('long', 'r', NULL, ttl => '1h');
UPDATE idempotency_keys SET created_at = created_at - interval '30 min',
	expires_at = expires_at - interval '30 min' WHERE key = 'long';
SELECT idem_finish('long', NULL);
SELECT expires_at - finished_at AS retention FROM idempotency_keys WHERE key = 'long';
COMMIT;

-- Bad input
\set VERBOSITY sqlstate
SELECT idem_checkpoint(NULL, 'x');
SELECT outcome FROM idem_begin('open', 'r', NULL);
SELECT idem_checkpoint('open', '', attempt => 1);
SELECT idem_checkpoint('open', 'x', lease => '0', attempt => 1);
SELECT idem_checkpoint('none', '', lease => '0', attempt => 1);
SELECT idem_release(NULL);
SELECT idem_resume(-1);
SELECT idem_resume(1, '');
SELECT idem_resume(1, 'r', lease => '0');
SELECT idem_resume(1, key => '');
BEGIN TRANSACTION READ ONLY;
SELECT idem_checkpoint('k', 'x');
ROLLBACK;
BEGIN TRANSACTION READ ONLY;
SELECT idem_release('k');
ROLLBACK;
BEGIN TRANSACTION READ ONLY;
SELECT idem_resume();
ROLLBACK;
\set VERBOSITY default

-- A completer: oldest lease first, max at the most, one route if it says so,
-- nothing that is on hold, alive or finished
DELETE FROM idempotency_keys;
INSERT INTO idem_route_policies (route, on_lost_lease) VALUES ('held', 'hold');
SELECT count(*) FROM unnest(ARRAY['a', 'b', 'c', 'd']) k, unnest(ARRAY['r', 's', 'held']) r,
	LATERAL idem_begin(k, r, '\x01', lease => '1h');
SELECT idem_checkpoint('b', 'half', '{"x": [1, 2]}', route => 's', attempt => 1) IS NOT NULL AS renewed;
SELECT idem_finish('c', NULL, attempt => 1, route => 's');
UPDATE idempotency_keys SET lease_until = timestamptz '2000-01-01' + (ascii(key) - 96) * interval '1 day'
WHERE state = 'in_progress' AND key <> 'd';
SELECT count(*) FROM idem_unfinished;
SELECT key, route, state, attempt, step, step_data, request_hash FROM idem_resume(1, 's');
SELECT key, route, attempt, step, step_data, lease_until > now() + interval '9 min' AS leased
FROM idem_resume(10, 's', lease => '10 min');
SELECT key, route, attempt FROM idem_resume(2);
SELECT key, route, attempt FROM idem_resume(NULL);
SELECT count(*) FROM idem_resume(0, held => true);
SELECT key, route, attempt FROM idem_resume(NULL, held => true, key => 'b');
SELECT key, route, attempt FROM idem_resume(1, held => true);
SELECT key, route, attempt FROM idem_resume(NULL, held => true);
SELECT count(*) FROM idem_unfinished;
-- what it has taken over can be finished with its attempt, or in this same
-- transaction without one
SELECT idem_finish('a', NULL, route => 'r', attempt => 1);
SELECT idem_finish('a', '"completed"', route => 'r', attempt => 2);
SELECT lose_lease();
BEGIN;
SELECT key FROM idem_resume(NULL, 's') ORDER BY key;
SELECT idem_finish('a', '"completed"', route => 's');
COMMIT;
SELECT key, route, response FROM idempotency_keys WHERE response IS NOT NULL ORDER BY route;
-- no attempts left: only a person may decide
UPDATE idempotency_keys SET attempt = 10 WHERE route = 'r' AND state = 'in_progress';
SELECT count(*) FROM idem_resume(100, 'r');
SELECT key, attempt FROM idem_resume(100, 'r', held => true) ORDER BY key;
TRUNCATE idem_route_policies, idempotency_keys;

-- Tenants: all of them, or one
SELECT count(*) FROM unnest(ARRAY['', 'acme', 'zorg']) t, LATERAL idem_begin('k', 'r', NULL, tenant => t);
SELECT lose_lease();
SELECT tenant FROM idem_resume(10, tenant => 'acme');
SELECT tenant FROM idem_resume(10) ORDER BY tenant;

-- In a further store
SELECT idem_create_table('claims');
SELECT outcome FROM idem_begin('k', 'r', NULL, store => 'claims');
SELECT idem_checkpoint('k', 's', attempt => 1, store => 'claims') IS NOT NULL AS renewed;
SELECT idem_release('k', attempt => 1, store => 'claims');
SELECT key, attempt, step FROM idem_resume(10, store => 'claims');
SELECT idem_finish('k', NULL, attempt => 2, store => 'claims');
SELECT state, attempt FROM claims;

-- The savepoint recipe: the work is undone, its 402 is kept
CREATE TABLE orders (id int);
BEGIN;
SELECT outcome FROM idem_begin('402', 'r', NULL);
SAVEPOINT work;
INSERT INTO orders VALUES (1);
ROLLBACK TO work;
SELECT idem_finish('402', '{"error": "card declined"}', 402);
COMMIT;
SELECT count(*) FROM orders;
SELECT outcome, status, response FROM idem_begin('402', 'r', NULL);

-- Keys for calls downstream: the same on every attempt, another one for each
-- name; where one name ends and the next begins makes a difference
SELECT idem_child_key('k', 'charge', 'r') = idem_child_key('k', 'charge', 'r') AS same;
SELECT count(DISTINCT c) FROM (VALUES
	(idem_child_key('k', 'charge', 'r')), (idem_child_key('k', 'mail', 'r')),
	(idem_child_key('k', 'charge', 's')), (idem_child_key('l', 'charge', 'r')),
	(idem_child_key('kc', 'harge', 'r')), (idem_child_key('k', 'charger', 'r')),
	(idem_child_key('k', 'charge', 'r', 'acme'))) v (c);
SELECT idem_child_key('7f3a9c1e', 'charge', 'POST /charges');
SELECT idem_child_key('k', 'charge', 'r')::text ~ '^[0-9a-f]{8}-[0-9a-f]{4}-8[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$' AS version_8;
SET pg_idem.tenant = 'acme';
SELECT idem_child_key('k', 'charge', 'r') = idem_child_key('k', 'charge', 'r', 'acme') AS same;
RESET pg_idem.tenant;
\set VERBOSITY sqlstate
SELECT idem_child_key(NULL, 'charge', 'r');
SELECT idem_child_key('k', '', 'r');

TRUNCATE idempotency_keys;
DROP TABLE orders, claims;
DROP FUNCTION lose_lease;
