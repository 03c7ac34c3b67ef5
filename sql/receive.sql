--
-- RECEIVE
-- The consumers' side: a message is new once, to each consumer, for as long
-- as it is remembered.  What needs two sessions at a time is in
-- test/isolation and test/t.
--

-- New the first time; to another consumer, or under another tenant, it is
-- another message
SELECT idem_receive('billing', 'm1');
SELECT idem_receive('billing', 'm1');
SELECT idem_receive('mailing', 'm1'), idem_receive('billing', 'm2'),
	idem_receive('billing', 'm1', tenant => 'acme'), idem_receive('billing', 'M1'), idem_receive('billing', 'm1 ');
SELECT idem_receive('mailing', 'm1'), idem_receive('billing', 'm2'),
	idem_receive('billing', 'm1', tenant => 'acme'), idem_receive('billing', 'M1'), idem_receive('billing', 'm1 ');

-- One row, complete from the start
SELECT key, tenant, route, state, attempt, request_hash, lease_until, step, status, headers, response, body,
	result_dropped, finished_at = created_at AS at_once, expires_at - created_at AS ttl
FROM idempotency_keys WHERE key = 'm1' ORDER BY route, tenant;

-- In one transaction and in one statement
BEGIN;
SELECT idem_receive('billing', 'm3');
SELECT idem_receive('billing', 'm3');
COMMIT;
SELECT idem_receive('billing', m) FROM unnest(ARRAY['m4', 'm4', 'm3']) m;
-- with the work, in one statement
CREATE TABLE work (message text);
WITH m AS MATERIALIZED (SELECT m FROM unnest(ARRAY['w1', 'w2', 'w1', 'm3']) m WHERE idem_receive('billing', m))
INSERT INTO work SELECT m FROM m RETURNING message;

-- What is rolled back is new again
BEGIN;
SELECT idem_receive('billing', 'r1');
ROLLBACK;
SELECT idem_receive('billing', 'r1');
BEGIN;
SELECT idem_receive('billing', 'r2');
SAVEPOINT a;
SELECT idem_receive('billing', 'r3');
SELECT idem_receive('billing', 'r3');
ROLLBACK TO a;
SELECT idem_receive('billing', 'r2'), idem_receive('billing', 'r3');
ROLLBACK TO a;
SAVEPOINT b;
SELECT idem_receive('billing', 'r4');
RELEASE b;
SELECT idem_receive('billing', 'r3'), idem_receive('billing', 'r4');
COMMIT;
SELECT idem_receive('billing', 'r2'), idem_receive('billing', 'r3'), idem_receive('billing', 'r4');
-- a work that fails, caught
DO $$
BEGIN
	IF idem_receive('billing', 'r5') THEN
		INSERT INTO work SELECT 1 / 0;
	END IF;
EXCEPTION WHEN division_by_zero THEN
	NULL;
END $$;
SELECT idem_receive('billing', 'r5');

-- Forgotten after its ttl, and then new again, on its old row
SELECT idem_receive('billing', 't1', ttl => '1h');
SELECT expires_at - created_at AS ttl FROM idempotency_keys WHERE key = 't1';
UPDATE idempotency_keys SET expires_at = '2000-01-01', attempt = 7, status = 200, response = '1', step = 's'
WHERE key = 't1';
BEGIN;
SELECT idem_receive('billing', 't1', ttl => '2h');
SELECT idem_receive('billing', 't1');
ROLLBACK;
SELECT idem_receive_batch('billing', ARRAY['t1', 't1'], ttl => '2h');
SELECT idem_receive('billing', 't1');
SELECT state, attempt, status, response, step, finished_at = created_at AS at_once, expires_at - created_at AS ttl
FROM idempotency_keys WHERE key = 't1';
-- but never within one transaction
BEGIN;
SELECT idem_receive('billing', 't2', ttl => '1 microsecond');
SELECT idem_receive('billing', 't2'), clock_timestamp() > expires_at AS expired FROM idempotency_keys WHERE key = 't2';
COMMIT;
SELECT idem_receive('billing', 't2');

-- The policies are those of the route, which is the consumer
SET pg_idem.ttl = '3h';
INSERT INTO idem_route_policies (route, ttl) VALUES ('slow', '7 days');
SELECT idem_receive('fast', 's1'), idem_receive('slow', 's1'), idem_receive('slow', 's2', ttl => '1h');
SELECT route, key, expires_at - created_at AS ttl FROM idempotency_keys WHERE route IN ('fast', 'slow') ORDER BY route, key;
SELECT idem_receive_batch('slow', ARRAY['s3']);
SELECT expires_at - created_at AS ttl FROM idempotency_keys WHERE key = 's3';
RESET pg_idem.ttl;
TRUNCATE idem_route_policies;

-- Batches: the new ones, each once, where it comes first
SELECT idem_receive_batch('batch', ARRAY['c', 'a', 'b', 'a', 'c', 'd']);
SELECT idem_receive_batch('batch', ARRAY['e', 'd', 'a', 'f', 'e']);
SELECT idem_receive_batch('batch', ARRAY['a', 'b', 'c', 'd', 'e', 'f']);
SELECT idem_receive_batch('batch', '{}'::text[]);
SELECT * FROM idem_receive_batch('batch', '[5:7]={x,y,x}'::text[]) WITH ORDINALITY;
SELECT m FROM idem_receive_batch('batch', message_ids => '{x,z}') m;
SELECT idem_receive('batch', 'z'), idem_receive('batch', 'zz');
SELECT idem_receive_batch('batch', ARRAY['zz']);
-- an untyped second argument is one message
SELECT idem_receive('batch', '{a,b}');
-- the order of the ids makes no difference
SELECT idem_receive_batch('batch', ARRAY['Z', '~', 'z1', '10', '9', 'Z', ' ', 'ab', 'aa', 'a', 'a ', '9']);
SELECT count(*) FROM idem_receive_batch('batch', ARRAY(SELECT 'n' || g % 1000 FROM generate_series(1, 3000) g));
SELECT count(*), count(DISTINCT m) FROM idem_receive_batch('batch', ARRAY(SELECT 'n' || g % 1500 FROM generate_series(1, 3000) g)) m;
-- one that is rolled back is new again, and so is one that fails half way
BEGIN;
SELECT idem_receive_batch('batch', ARRAY['q1', 'q2']);
ROLLBACK;
BEGIN;
SELECT idem_receive('batch', 'q2');
SAVEPOINT a;
SELECT idem_receive_batch('batch', ARRAY['q1', 'q2', 'q3', 'q1']);
ROLLBACK TO a;
SELECT idem_receive_batch('batch', ARRAY['q3', 'q2', 'q1']);
COMMIT;
SELECT idem_receive_batch('batch', ARRAY['q1', 'q2', 'q3', 'q4']);
-- with the work, in one statement
INSERT INTO work SELECT m FROM idem_receive_batch('batch', ARRAY['w9', 'w8', 'w9', 'q1']) m RETURNING message;
-- stopped after its first row, it has received all of them
SELECT m FROM idem_receive_batch('batch', ARRAY['l1', 'l2']) m LIMIT 1;
SELECT idem_receive_batch('batch', ARRAY['l1', 'l2']);

-- A claim of idem_begin under the same key: its work is done or it is not.
-- In progress:
SELECT outcome FROM idem_begin('k1', 'billing', NULL);
SELECT idem_receive('billing', 'k1');
SELECT idem_receive('billing', 'k1', wait => '10ms');
SELECT idem_receive_batch('billing', ARRAY['k0', 'k1']);
UPDATE idempotency_keys SET lease_until = '2000-01-01' WHERE key = 'k1';
SELECT idem_receive('billing', 'k1');
-- failed:
SELECT idem_finish('k1', NULL, 503, attempt => 1);
SELECT idem_receive('billing', 'k1');
-- completed:
SELECT outcome, attempt FROM idem_begin('k1', 'billing', NULL);
SELECT idem_finish('k1', NULL, attempt => 2);
SELECT idem_receive('billing', 'k1');
-- failed and expired:
SELECT outcome FROM idem_begin('k2', 'billing', NULL);
SELECT idem_finish('k2', NULL, 503, attempt => 1);
UPDATE idempotency_keys SET expires_at = '2000-01-01' WHERE key = 'k2';
SELECT idem_receive('billing', 'k2');
-- of this transaction, which need not wait for itself:
BEGIN;
SELECT outcome FROM idem_begin('k3', 'billing', NULL);
SAVEPOINT a;
SELECT idem_receive('billing', 'k3', wait => '1 hour');
ROLLBACK TO a;
SELECT idem_finish('k3', NULL, 503);
SAVEPOINT a;
SELECT idem_receive_batch('billing', ARRAY['k3'], wait => '1 hour');
ROLLBACK;
BEGIN;
SELECT outcome FROM idem_begin('k3', 'billing', NULL);
SELECT idem_finish('k3', NULL);
SELECT idem_receive('billing', 'k3');
COMMIT;
-- and a message as a key: it has been finished, without a result
SELECT proceed, outcome, status, response, attempt FROM idem_begin('m1', 'billing', NULL);
SELECT proceed, outcome FROM idem_begin('m1', 'billing', '\x01');
SELECT idem_finish('m1', '1', route => 'billing', tenant => '');
SELECT state, status FROM idem_lookup('m1', 'billing');

-- Further stores, with indexes of the owner's
SELECT idem_create_table('messages');
CREATE INDEX ON messages (lower(key)) WHERE route <> 'hidden';
CREATE INDEX ON messages (octet_length(key));
SELECT idem_receive('c', 'm1', store => 'messages'), idem_receive('hidden', 'm1', store => 'messages');
SELECT idem_receive_batch('c', ARRAY['M2', 'm1', 'M3', 'M2'], store => 'messages');
SELECT count(*) FROM idem_receive_batch('hidden', ARRAY(SELECT g::text FROM generate_series(1, 100) g), store => 'messages');
UPDATE messages SET expires_at = '2000-01-01' WHERE key = 'M2';
SELECT idem_receive_batch('c', ARRAY['M2', 'm1', 'M3', 'M2'], store => 'messages');
SET enable_seqscan = off;
SET enable_bitmapscan = off;
SELECT key, route FROM messages WHERE lower(key) IN ('m1', 'm2', 'm3') AND route <> 'hidden' ORDER BY key;
SELECT count(*) FROM messages WHERE octet_length(key) = 2;
SELECT count(*) FROM messages WHERE octet_length(key) < 4;
RESET enable_seqscan;
RESET enable_bitmapscan;
DROP TABLE messages;

-- Swept like any key
UPDATE idempotency_keys SET expires_at = '2000-01-01' WHERE route = 'mailing';
SELECT idem_expire();
SELECT idem_receive('mailing', 'm1');

-- idem_grant gives both functions, idem_revoke takes them back
CREATE ROLE regress_idem_consumer;
SELECT idem_grant('regress_idem_consumer');
SET ROLE regress_idem_consumer;
SELECT idem_receive('billing', 'granted'), idem_receive_batch('billing', ARRAY['granted', 'too']);
RESET ROLE;
SELECT idem_revoke('regress_idem_consumer');
SET ROLE regress_idem_consumer;
\set VERBOSITY sqlstate
SELECT idem_receive('billing', 'm1');
SELECT idem_receive_batch('billing', ARRAY['m1']);
\set VERBOSITY default
RESET ROLE;
REVOKE ALL ON SCHEMA public FROM regress_idem_consumer;
DROP ROLE regress_idem_consumer;

-- Bad input.  Nothing of a batch is received if one of its ids is bad.
SELECT idem_receive(NULL, 'm');
SELECT idem_receive('c', NULL);
SELECT idem_receive('c', '');
SELECT idem_receive('', 'm');
SELECT idem_receive('c', E'a\nb');
SELECT idem_receive('c', repeat('x', 256));
SELECT idem_receive('c', repeat('x', 255)), idem_receive_batch('c', ARRAY[repeat('x', 255)]);
SELECT idem_receive_batch('c', NULL::text[]);
SELECT idem_receive_batch('c', ARRAY['a', NULL]);
SELECT idem_receive_batch('c', ARRAY['a', '']);
SELECT idem_receive_batch('c', ARRAY['a', repeat('x', 256)]);
SELECT idem_receive_batch('c', ARRAY[['a', 'b'], ['c', 'd']]);
SELECT idem_receive('c', 'a', ttl => '0');
SELECT idem_receive_batch('c', '{}'::text[], ttl => '-1s');
SELECT idem_receive('c', 'a', wait => '-1s');
SELECT idem_receive_batch('c', ARRAY['a'], tenant => E'\t');
SELECT idem_receive_batch('c', ARRAY['a'], store => 'work');
SELECT idem_receive('c', 'a', store => 0);
BEGIN READ ONLY;
SELECT idem_receive('c', 'a');
ROLLBACK;
BEGIN READ ONLY;
SELECT idem_receive_batch('c', '{}'::text[]);
ROLLBACK;
SELECT idem_receive_batch('c', ARRAY['a']);

DROP TABLE work;
TRUNCATE idempotency_keys;
