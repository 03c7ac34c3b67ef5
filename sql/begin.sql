--
-- BEGIN
-- The claim: what idem_begin answers for everything that it may find, line by
-- line of the table in the contract, and what transactions, savepoints,
-- prepared transactions and cursors do to a claim.  What needs a second
-- session at the same time is in test/isolation.
--
-- Volatile values are not shown, and nothing waits for a clock: where a time
-- must have passed, the row is changed.
--

-- A duplicate within the transaction is in progress, after finish replayed
BEGIN;
SELECT proceed, outcome, status, attempt, retry_after, step, expires_at > now() AS expires
FROM idem_begin('b1', 'POST /charges', '\x01');
SELECT proceed, outcome, status, attempt, retry_after > '0' AND retry_after <= '1s' AS soon
FROM idem_begin('b1', 'POST /charges', '\x01');
SELECT idem_finish('b1', '{"id": "ch_1"}', 201, '{"Location": "/charges/1"}');
SELECT proceed, outcome, status, headers, response, body, attempt, retry_after
FROM idem_begin('b1', 'POST /charges', '\x01');
COMMIT;
SELECT proceed, outcome, status, headers, response, body, attempt, retry_after
FROM idem_begin('b1', 'POST /charges', '\x01');
SELECT key, tenant, route, state, attempt, request_hash, lease_until, step,
	step_data, status, headers, response, body, result_dropped,
	created_at <= finished_at AS finished, expires_at - created_at AS ttl
FROM idempotency_keys;

-- Mismatch, in any state; NULL differs from a value, not from NULL
SELECT proceed, outcome, status, headers, response, body, attempt, retry_after, expires_at
FROM idem_begin('b1', 'POST /charges', '\x02');
SELECT outcome FROM idem_begin('b1', 'POST /charges', NULL);
SELECT outcome FROM idem_begin('b1', 'POST /charges', '');
SELECT outcome FROM idem_begin('b1', 'POST /charges', '\x0100');
SELECT outcome FROM idem_begin('b2', 'r', NULL);
SELECT outcome FROM idem_begin('b2', 'r', NULL);
SELECT outcome FROM idem_begin('b2', 'r', '\x01');
SELECT outcome FROM idem_begin('b2', 'r', '');
SELECT idem_finish('b2', NULL, attempt => 1);
SELECT outcome FROM idem_begin('b2', 'r', NULL);
SELECT outcome FROM idem_begin('b2', 'r', '\x01');
BEGIN;
SELECT outcome FROM idem_begin('b3', 'r', '\x01');
SELECT outcome FROM idem_begin('b3', 'r', '\x02');
SELECT outcome FROM idem_begin('b3', 'r', NULL);
ROLLBACK;

-- The same key under another route or tenant is another key; case and
-- trailing spaces count, and nothing is normalised
SELECT outcome FROM idem_begin('b1', 'POST /refunds', '\x02');
SELECT outcome FROM idem_begin('b1', 'POST /charges', '\x02', tenant => 'acme');
SELECT outcome FROM idem_begin('B1', 'POST /charges', '\x02');
SELECT outcome FROM idem_begin('b1 ', 'POST /charges', '\x02');
SELECT outcome FROM idem_begin(' b1', 'POST /charges', '\x02');
SELECT outcome FROM idem_begin('b1', 'POST /charges ', '\x02');
SELECT outcome FROM idem_begin('b1', 'POST /charges', '\x02', tenant => ' ');
-- pg_idem.tenant is the tenant of calls that name none
SET pg_idem.tenant = 'acme';
SELECT outcome FROM idem_begin('b1', 'POST /charges', '\x02');
SELECT outcome FROM idem_begin('b1', 'POST /charges', '\x01', tenant => '');
RESET pg_idem.tenant;
SELECT key, tenant, route FROM idempotency_keys WHERE key ILIKE '%b1%' ORDER BY 1, 2, 3;

-- Several keys in one transaction
BEGIN;
SELECT i, c.outcome FROM generate_series(1, 3) i, idem_begin('several' || i, 'r', '\x01') c;
SELECT i, c.outcome FROM generate_series(1, 3) i, idem_begin('several' || i, 'r', '\x01') c;
SELECT idem_finish('several' || i, to_jsonb(i)) FROM generate_series(1, 3) i;
COMMIT;
SELECT i, c.outcome, c.response
FROM generate_series(1, 3) i, idem_begin('several' || i, 'r', '\x01') c;

-- ROLLBACK frees the key
BEGIN;
SELECT outcome FROM idem_begin('rb', 'r', '\x01');
ROLLBACK;
BEGIN;
SELECT outcome FROM idem_begin('rb', 'r', '\x02');
SELECT idem_finish('rb', '1');
ROLLBACK;
SELECT outcome, attempt FROM idem_begin('rb', 'r', '\x03');

-- ROLLBACK TO SAVEPOINT frees it too, twice over, with another hash
BEGIN;
SAVEPOINT a;
SELECT outcome FROM idem_begin('sp', 'r', '\x01');
ROLLBACK TO a;
SELECT outcome FROM idem_begin('sp', 'r', '\x02');
SAVEPOINT b;
SELECT outcome FROM idem_begin('sp', 'r', '\x02');
SELECT idem_finish('sp', '1');
SELECT outcome FROM idem_begin('sp', 'r', '\x02');
ROLLBACK TO b;
SELECT outcome FROM idem_begin('sp', 'r', '\x02');
ROLLBACK TO a;
SELECT outcome FROM idem_begin('sp', 'r', '\x03');
SELECT idem_finish('sp', '3');
RELEASE a;
SELECT outcome, response FROM idem_begin('sp', 'r', '\x03');
COMMIT;
SELECT outcome, response FROM idem_begin('sp', 'r', '\x03');
SELECT count(*) FROM idempotency_keys WHERE key = 'sp';

-- A claim of a released savepoint is the transaction's; finish in a deeper one
BEGIN;
SAVEPOINT a;
SELECT outcome FROM idem_begin('sp2', 'r', '\x01');
RELEASE a;
SAVEPOINT b;
SELECT outcome FROM idem_begin('sp2', 'r', '\x01');
SAVEPOINT c;
SELECT idem_finish('sp2', '2');
RELEASE b;
COMMIT;
SELECT outcome, response FROM idem_begin('sp2', 'r', '\x01');

-- Keep a 4xx although the work failed: the recipe of the contract
CREATE TABLE regress_work (id int);
BEGIN;
SELECT outcome FROM idem_begin('declined', 'r', '\x01');
SAVEPOINT work;
INSERT INTO regress_work VALUES (1);
ROLLBACK TO work;
SELECT idem_finish('declined', '{"error": "card_declined"}', 402);
COMMIT;
SELECT outcome, status, response FROM idem_begin('declined', 'r', '\x01');
SELECT count(*) FROM regress_work;

-- Subtransactions of plpgsql
DO $$
DECLARE c idem_claim;
BEGIN
	BEGIN
		c := idem_begin('plpgsql', 'r', '\x01');
		RAISE NOTICE 'inside: %', c.outcome;
		PERFORM 1 / 0;
	EXCEPTION WHEN division_by_zero THEN
		c := idem_begin('plpgsql', 'r', '\x02');
		RAISE NOTICE 'in the handler: %', c.outcome;
	END;
	c := idem_begin('plpgsql', 'r', '\x02');
	RAISE NOTICE 'after: %', c.outcome;
	BEGIN
		PERFORM idem_finish('plpgsql', '"lost"');
		RAISE EXCEPTION 'undo';
	EXCEPTION WHEN raise_exception THEN
		NULL;
	END;
	c := idem_begin('plpgsql', 'r', '\x02');
	RAISE NOTICE 'after the undone finish: %', c.outcome;
	PERFORM idem_finish('plpgsql', '"kept"');
	c := idem_begin('plpgsql', 'r', '\x02');
	RAISE NOTICE 'in the end: % %', c.outcome, c.response;
END $$;
SELECT outcome, response FROM idem_begin('plpgsql', 'r', '\x02');

-- Committed unfinished: in progress under its lease, then resumed
SELECT outcome, attempt FROM idem_begin('lease', 'r', '\x01');
SELECT proceed, outcome, status, attempt,
	retry_after > '0' AND retry_after <= '1s' AS soon, expires_at IS NOT NULL AS expires
FROM idem_begin('lease', 'r', '\x01');
SELECT lease_until - created_at AS lease, expires_at - created_at AS ttl
FROM idempotency_keys WHERE key = 'lease';
UPDATE idempotency_keys SET lease_until = '2000-01-01', step = 'charged',
	step_data = '{"charge": 7}' WHERE key = 'lease';
SELECT outcome FROM idem_begin('lease', 'r', '\x02');
SELECT proceed, outcome, status, attempt, step, step_data, retry_after
FROM idem_begin('lease', 'r', '\x01');
SELECT outcome, attempt, step FROM idem_begin('lease', 'r', '\x01');
SELECT state, attempt, step, step_data, lease_until > now() AS leased,
	expires_at - created_at AS ttl
FROM idempotency_keys WHERE key = 'lease';
-- a hint that never points past the end of a lease
UPDATE idempotency_keys SET lease_until = clock_timestamp() + '500ms' WHERE key = 'lease';
BEGIN;
SELECT coalesce(retry_after, '0') <= '500ms' AS soon FROM idem_begin('lease', 'r', '\x01');
ROLLBACK;
-- a claim without a lease is never taken over
UPDATE idempotency_keys SET lease_until = NULL WHERE key = 'lease';
SELECT outcome, retry_after FROM idem_begin('lease', 'r', '\x01');
UPDATE idempotency_keys SET lease_until = 'infinity' WHERE key = 'lease';
SELECT outcome, retry_after FROM idem_begin('lease', 'r', '\x01');
-- the resumed claim is undone by ROLLBACK
UPDATE idempotency_keys SET lease_until = '2000-01-01' WHERE key = 'lease';
BEGIN;
SELECT outcome, attempt FROM idem_begin('lease', 'r', '\x01');
SELECT outcome, attempt FROM idem_begin('lease', 'r', '\x01');
ROLLBACK;
BEGIN;
SELECT outcome, attempt FROM idem_begin('lease', 'r', '\x01');
SELECT idem_finish('lease', '"third"');
COMMIT;
SELECT outcome, attempt, response FROM idem_begin('lease', 'r', '\x01');

-- Within its own transaction a claim is in progress, its lease over or not
BEGIN;
SELECT outcome FROM idem_begin('own', 'r', '\x01', lease => '1 microsecond');
UPDATE idempotency_keys SET lease_until = '2000-01-01' WHERE key = 'own';
SELECT outcome, attempt FROM idem_begin('own', 'r', '\x01');
SELECT outcome FROM idem_begin('own', 'r', '\x01', wait => '1 hour');
-- and gone when the transaction deletes it
DELETE FROM idempotency_keys WHERE key = 'own';
SELECT outcome, attempt FROM idem_begin('own', 'r', '\x02');
COMMIT;

-- No attempts left, or on hold: nobody knows
SELECT outcome FROM idem_begin('unknown', 'r', '\x01');
UPDATE idempotency_keys SET lease_until = '2000-01-01' WHERE key = 'unknown';
SET pg_idem.on_lost_lease = 'hold';
SELECT proceed, outcome, status, attempt, retry_after FROM idem_begin('unknown', 'r', '\x01');
SELECT outcome, status FROM idem_begin('unknown', 'r', '\x02');
SELECT outcome FROM idem_begin('unknown', 'r', '\x01', wait => '1 hour');
RESET pg_idem.on_lost_lease;
SET pg_idem.max_attempts = 1;
SELECT proceed, outcome, status, attempt, retry_after FROM idem_begin('unknown', 'r', '\x01');
SET pg_idem.max_attempts = 2;
SELECT outcome, attempt FROM idem_begin('unknown', 'r', '\x01');
UPDATE idempotency_keys SET lease_until = '2000-01-01' WHERE key = 'unknown';
SELECT outcome, attempt FROM idem_begin('unknown', 'r', '\x01');
RESET pg_idem.max_attempts;

-- Expired and finished: gone, swept or not; a new life with all of it new
SELECT outcome FROM idem_begin('gone', 'r', '\x01');
SELECT idem_finish('gone', '1', 201, '{"etag": "x"}', 'body', attempt => 1);
UPDATE idempotency_keys SET expires_at = '2000-01-01', step = 's', step_data = '1',
	attempt = 7 WHERE key = 'gone';
SELECT idem_lookup('gone', 'r') IS NULL AS not_there;
BEGIN;
SELECT outcome, attempt FROM idem_begin('gone', 'r', '\x03');
ROLLBACK;
SELECT proceed, outcome, status, headers, response, body, attempt, step, step_data
FROM idem_begin('gone', 'r', '\x02');
SELECT state, attempt, request_hash, step, step_data, status, headers, response,
	body, finished_at, result_dropped, created_at > '2001-01-01' AS created,
	lease_until > now() AS leased, expires_at > now() AS expires
FROM idempotency_keys WHERE key = 'gone';
SELECT outcome FROM idem_begin('gone', 'r', '\x01');
-- the same for a failed one
SELECT idem_finish('gone', '1', 500, attempt => 1);
UPDATE idempotency_keys SET expires_at = '2000-01-01', attempt = 10 WHERE key = 'gone';
SELECT outcome, attempt FROM idem_begin('gone', 'r', '\x04');
-- Expired, but in progress: never gone before its lease is over; then resumed
UPDATE idempotency_keys SET expires_at = '2000-01-01' WHERE key = 'gone';
SELECT outcome FROM idem_begin('gone', 'r', '\x04');
UPDATE idempotency_keys SET lease_until = '2000-01-01' WHERE key = 'gone';
SELECT outcome FROM idem_begin('gone', 'r', '\x01');
SELECT outcome, attempt FROM idem_begin('gone', 'r', '\x04');

-- A request too old to be remembered is refused before anything else
SELECT proceed, outcome, status, retry_after, attempt
FROM idem_begin('old', 'r', '\x01', first_sent => now() - interval '25 hours');
SELECT idem_lookup('old', 'r') IS NULL AS not_there;
SELECT outcome FROM idem_begin('old', 'r', '\x01', first_sent => '-infinity');
SELECT outcome FROM idem_begin('old', 'r', '\x01', first_sent => now() - interval '2 hours', ttl => '1 hour');
SELECT outcome FROM idem_begin('old', 'r', '\x01', first_sent => now() - interval '23 hours');
SELECT outcome FROM idem_begin('old', 'r', '\x01', first_sent => 'infinity');
SELECT outcome FROM idem_begin('old', 'r', '\x01', first_sent => '294276-12-31 12:00 UTC');
SELECT outcome FROM idem_begin('old', 'r', '\x02', first_sent => now() - interval '25 hours');
SELECT idem_finish('old', '1', attempt => 1);
SELECT outcome FROM idem_begin('old', 'r', '\x01', first_sent => now() - interval '25 hours');
SELECT outcome FROM idem_begin('old', 'r', '\x01', first_sent => now() - interval '23 hours');

-- ttl and lease: the argument, or else the setting
SELECT outcome FROM idem_begin('span1', 'r', '\x01', ttl => '2 hours', lease => '5 minutes');
SET pg_idem.ttl = '3h';
SET pg_idem.lease = '90s';
SELECT outcome FROM idem_begin('span2', 'r', '\x01');
RESET pg_idem.ttl;
RESET pg_idem.lease;
SELECT key, expires_at - created_at AS ttl, lease_until - created_at AS lease
FROM idempotency_keys WHERE key LIKE 'span%' ORDER BY key;

-- Times are the wall clock's, not the transaction's
BEGIN;
SELECT outcome FROM idem_begin('clock', 'r', '\x01');
SELECT created_at > now() AS later FROM idempotency_keys WHERE key = 'clock';
ROLLBACK;

-- A cursor shows what was there when it was opened, WITH HOLD or not
BEGIN;
DECLARE before CURSOR FOR SELECT key, state FROM idempotency_keys WHERE key = 'cursor';
DECLARE before_held CURSOR WITH HOLD FOR SELECT key, state FROM idempotency_keys WHERE key = 'cursor';
SELECT outcome FROM idem_begin('cursor', 'r', '\x01');
FETCH ALL FROM before;
DECLARE between CURSOR FOR SELECT key, state FROM idempotency_keys WHERE key = 'cursor';
DECLARE between_held CURSOR WITH HOLD FOR SELECT key, state FROM idempotency_keys WHERE key = 'cursor';
SELECT idem_finish('cursor', '1');
FETCH ALL FROM between;
DECLARE after CURSOR FOR SELECT key, state FROM idempotency_keys WHERE key = 'cursor';
FETCH ALL FROM after;
COMMIT;
FETCH ALL FROM before_held;
FETCH ALL FROM between_held;
CLOSE ALL;
-- a cursor that claims: each row once, also when it is read backwards
BEGIN;
DECLARE claims SCROLL CURSOR WITH HOLD FOR
	SELECT i, c.outcome FROM generate_series(1, 2) i, idem_begin('claims' || i, 'r', '\x01') c;
FETCH 1 FROM claims;
COMMIT;
FETCH ALL FROM claims;
FETCH FIRST FROM claims;
CLOSE claims;
SELECT key, attempt FROM idempotency_keys WHERE key LIKE 'claims%' ORDER BY key;
-- a statement does not see the claims that it makes itself
SELECT c.outcome, count(k.key) FROM idem_begin('statement', 'r', '\x01') c
LEFT JOIN idempotency_keys k ON k.key = 'statement' GROUP BY 1;

-- Each call sees what those before it in the same statement have done (the
-- odd hashes are the same one; they make each call depend on the one before)
WITH a AS MATERIALIZED (SELECT outcome FROM idem_begin('calls', 'r', '\x01')),
	 b AS MATERIALIZED (SELECT a.outcome AS a, b.outcome FROM a, LATERAL idem_begin('calls', 'r', left('\x01' || a.outcome, 4)::bytea) b),
	 f AS MATERIALIZED (SELECT b.*, idem_finish('calls', to_jsonb(b.a)) FROM b),
	 d AS MATERIALIZED (SELECT f.*, d.outcome AS d, d.response FROM f, LATERAL idem_begin('calls', 'r', left('\x01' || f.a, 4)::bytea) d)
SELECT a, outcome AS b, d, response FROM d;
UPDATE idempotency_keys SET state = 'failed' WHERE key = 'calls';
WITH a AS MATERIALIZED (SELECT outcome, attempt FROM idem_begin('calls', 'r', '\x01')),
	 f AS MATERIALIZED (SELECT a.*, idem_finish('calls', to_jsonb(a.outcome), attempt => a.attempt) FROM a),
	 d AS MATERIALIZED (SELECT f.outcome AS a, d.outcome AS d, d.response FROM f, LATERAL idem_begin('calls', 'r', left('\x01' || f.outcome, 4)::bytea) d)
SELECT * FROM d;

-- One statement from any driver: claim, work, finish
CREATE TABLE regress_charges (id int GENERATED ALWAYS AS IDENTITY, account text, amount int);
PREPARE charge AS
WITH c AS MATERIALIZED (SELECT *, $5 AS account, $4::int AS amount FROM idem_begin($1, $2, $3, tenant => $5)),
	 w AS (INSERT INTO regress_charges (account, amount) SELECT c.account, c.amount FROM c WHERE c.proceed RETURNING id),
	 f AS MATERIALIZED (SELECT w.id, idem_finish($1, jsonb_build_object('id', w.id), tenant => $5) FROM w)
SELECT c.outcome, c.status, coalesce(c.response, jsonb_build_object('id', f.id)) AS response
FROM c LEFT JOIN f ON true;
EXECUTE charge('one', 'POST /charges', idem_hash('{"amount": 999}'::jsonb), 999, 'alice');
EXECUTE charge('one', 'POST /charges', idem_hash('{ "amount":999 }'::jsonb), 999, 'alice');
EXECUTE charge('one', 'POST /charges', idem_hash('{"amount": 1}'::jsonb), 1, 'alice');
EXECUTE charge('one', 'POST /charges', idem_hash('{"amount": 999}'::jsonb), 999, 'bob');
BEGIN;
EXECUTE charge('two', 'POST /charges', idem_hash('{"amount": 5}'::jsonb), 5, 'alice');
EXECUTE charge('two', 'POST /charges', idem_hash('{"amount": 5}'::jsonb), 5, 'alice');
ROLLBACK;
EXECUTE charge('two', 'POST /charges', idem_hash('{"amount": 5}'::jsonb), 5, 'alice');
BEGIN ISOLATION LEVEL REPEATABLE READ;
EXECUTE charge('three', 'POST /charges', idem_hash('{"amount": 7}'::jsonb), 7, 'alice');
EXECUTE charge('three', 'POST /charges', idem_hash('{"amount": 7}'::jsonb), 7, 'alice');
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE;
EXECUTE charge('four', 'POST /charges', idem_hash('{"amount": 8}'::jsonb), 8, 'alice');
EXECUTE charge('four', 'POST /charges', idem_hash('{"amount": 8}'::jsonb), 8, 'alice');
COMMIT;
SELECT account, amount, count(*) FROM regress_charges GROUP BY 1, 2 ORDER BY 2, 1;
-- work that fails takes the claim with it
ALTER TABLE regress_charges ADD CHECK (amount > 0);
EXECUTE charge('five', 'POST /charges', '\x01', 0, 'alice');
EXECUTE charge('five', 'POST /charges', '\x02', 1, 'alice');
DEALLOCATE charge;

-- idem_lookup reads, and claims nothing
SELECT state, attempt, status, response FROM idem_lookup('one', 'POST /charges', 'alice');
SELECT idem_lookup('one', 'POST /refunds') IS NULL AS not_there;
BEGIN READ ONLY;
SELECT state FROM idem_lookup('one', 'POST /charges', 'alice');
COMMIT;
BEGIN;
SELECT outcome FROM idem_begin('look', 'r', '\x01');
SELECT state, attempt FROM idem_lookup('look', 'r');
ROLLBACK;
SELECT idem_lookup('look', 'r') IS NULL AS not_there;

DROP TABLE regress_work, regress_charges;
DELETE FROM idempotency_keys;
