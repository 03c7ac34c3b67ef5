--
-- ROUTES
-- The policy of a route: each column of idem_route_policies wins over the setting, an
-- argument wins over both, and a change is seen at once by the session that
-- made it, undone if it rolls back.  That other sessions see it at its
-- commit is in test/isolation.
--

-- What may be written there
\set VERBOSITY sqlstate
INSERT INTO idem_route_policies (route) VALUES (NULL);
INSERT INTO idem_route_policies (route) VALUES ('');
INSERT INTO idem_route_policies (route) VALUES (repeat('x', 256));
INSERT INTO idem_route_policies (route, ttl) VALUES ('r', '0');
INSERT INTO idem_route_policies (route, lease) VALUES ('r', '-1 s');
INSERT INTO idem_route_policies (route, wait) VALUES ('r', '-1 s');
INSERT INTO idem_route_policies (route, max_attempts) VALUES ('r', 0);
INSERT INTO idem_route_policies (route, on_lost_lease) VALUES ('r', 'forget');
INSERT INTO idem_route_policies (route, keep) VALUES ('r', 'some');
INSERT INTO idem_route_policies (route, response_ttl) VALUES ('r', '0');
INSERT INTO idem_route_policies (route, response_ttl) VALUES ('r', '2000 years');
SELECT count(*) FROM idem_route_policies;
\set VERBOSITY default

-- ttl and lease: the row, under the argument, over the setting
SET pg_idem.ttl = '1h';
SET pg_idem.lease = '2h';
CREATE FUNCTION terms(route text) RETURNS TABLE (ttl interval, lease interval)
BEGIN ATOMIC
	SELECT expires_at - created_at, lease_until - created_at
	FROM idempotency_keys k WHERE k.route = $1;
END;
SELECT outcome FROM idem_begin('r1', 'setting', NULL);
SELECT * FROM terms('setting');
INSERT INTO idem_route_policies (route, ttl, lease) VALUES ('row', '3h', '4h'), ('nulls', NULL, NULL);
SELECT outcome FROM idem_begin('r1', 'row', NULL);
SELECT * FROM terms('row');
SELECT outcome FROM idem_begin('r1', 'nulls', NULL);
SELECT * FROM terms('nulls');
DELETE FROM idempotency_keys WHERE route = 'row';
SELECT outcome FROM idem_begin('r1', 'row', NULL, ttl => '5h', lease => '6h');
SELECT * FROM terms('row');
RESET pg_idem.ttl;
RESET pg_idem.lease;

-- wait: zero seconds of it here, or this would wait for ever for no one
UPDATE idem_route_policies SET wait = '0' WHERE route = 'row';
SET pg_idem.wait = '1d';
SELECT outcome FROM idem_begin('r1', 'row', NULL);
RESET pg_idem.wait;

-- keep, looked up by the route of the claim, not of the call
INSERT INTO idem_route_policies (route, keep) VALUES ('all', 'all'), ('success', 'success'), ('final', 'final');
SET pg_idem.keep = 'success';
CREATE FUNCTION kept(route text, status int) RETURNS idem_state
LANGUAGE plpgsql AS $$
DECLARE
	key text := route || status;
BEGIN
	PERFORM idem_begin(key, route, NULL);
	PERFORM idem_finish(key, NULL, status);
	RETURN (idem_lookup(key, route)).state;
END $$;
SELECT r AS route, s AS status, kept(r, s)
FROM unnest(ARRAY['all', 'success', 'final', 'setting']) r, unnest(ARRAY[201, 402, 429, 500]) s;
RESET pg_idem.keep;

-- max_attempts and on_lost_lease
INSERT INTO idem_route_policies (route, max_attempts) VALUES ('twice', 2);
INSERT INTO idem_route_policies (route, on_lost_lease) VALUES ('hold', 'hold'), ('resume', 'resume');
CREATE FUNCTION lose_lease() RETURNS void
BEGIN ATOMIC
	UPDATE idempotency_keys SET lease_until = '2000-01-01' WHERE state = 'in_progress';
END;
SELECT outcome FROM idem_begin('m', 'twice', NULL);
SELECT lose_lease();
SELECT outcome, attempt FROM idem_begin('m', 'twice', NULL);
SELECT lose_lease();
SELECT outcome, attempt FROM idem_begin('m', 'twice', NULL);
SELECT outcome FROM idem_begin('m', 'hold', NULL);
SELECT lose_lease();
SELECT outcome, attempt FROM idem_begin('m', 'hold', NULL);
SET pg_idem.on_lost_lease = 'hold';
SELECT outcome FROM idem_begin('m', 'resume', NULL);
SELECT lose_lease();
SELECT outcome, attempt FROM idem_begin('m', 'resume', NULL);
RESET pg_idem.on_lost_lease;

-- a failure is run again until attempts run out, then told again
BEGIN;
SELECT outcome FROM idem_begin('f', 'twice', NULL);
SELECT idem_finish('f', '"first"', 503);
COMMIT;
BEGIN;
SELECT outcome, attempt FROM idem_begin('f', 'twice', NULL);
SELECT idem_finish('f', '"second"', 503);
COMMIT;
SELECT proceed, outcome, status, response, attempt FROM idem_begin('f', 'twice', NULL);

-- response_ttl: the result goes before the key does
INSERT INTO idem_route_policies (route, response_ttl) VALUES ('brief', '1h');
BEGIN;
SELECT outcome FROM idem_begin('d', 'brief', '\x01');
SELECT idem_finish('d', '"card data"', 201, '{"Location": "/d"}', '\x00');
COMMIT;
SELECT outcome, status, response FROM idem_begin('d', 'brief', '\x01');
UPDATE idempotency_keys SET finished_at = finished_at - interval '2h' WHERE route = 'brief';
SELECT proceed, outcome, status, headers, response, body FROM idem_begin('d', 'brief', '\x01');
SELECT outcome FROM idem_begin('d', 'brief', '\x02');
SELECT state, status, headers, response, body FROM idem_lookup('d', 'brief');
-- ... and a sweep takes it off the disk
SELECT result_dropped, response FROM idempotency_keys WHERE route = 'brief';
SELECT idem_expire();
SELECT result_dropped, headers, response, body, status, state FROM idempotency_keys WHERE route = 'brief';
SELECT outcome, status FROM idem_begin('d', 'brief', '\x01');

-- The sweep leaves what is on hold, by the route as by the setting
DELETE FROM idempotency_keys;
SELECT count(*) FROM unnest(ARRAY['hold', 'resume', 'setting']) r, LATERAL idem_begin('e', r, NULL);
UPDATE idempotency_keys SET lease_until = '2000-01-01', expires_at = '2000-01-02';
BEGIN;
SET LOCAL pg_idem.on_lost_lease = 'hold';
SELECT idem_expire();
SELECT route FROM idempotency_keys ORDER BY route;
ROLLBACK;
SELECT idem_expire();
SELECT route FROM idempotency_keys ORDER BY route;

-- A change is seen within its transaction, and forgotten with it
DELETE FROM idempotency_keys;
BEGIN;
UPDATE idem_route_policies SET on_lost_lease = 'resume' WHERE route = 'hold';
SELECT outcome FROM idem_begin('t', 'hold', NULL);
COMMIT;
UPDATE idempotency_keys SET lease_until = '2000-01-01';
BEGIN;
UPDATE idem_route_policies SET on_lost_lease = 'hold' WHERE route = 'hold';
SELECT outcome FROM idem_begin('t', 'hold', NULL);
SAVEPOINT s;
TRUNCATE idem_route_policies;
SELECT outcome FROM idem_begin('t', 'hold', NULL);
ROLLBACK TO s;
SELECT outcome FROM idem_begin('t', 'hold', NULL);
ROLLBACK;
SELECT outcome FROM idem_begin('t', 'hold', NULL);

-- While nothing changes, no call reads the table
BEGIN;
SELECT outcome FROM idem_begin('warm', 'hold', NULL);
SELECT pg_stat_get_xact_numscans('idem_route_policies'::regclass) AS scans \gset
SELECT count(*) FROM generate_series(1, 10) i, LATERAL idem_begin('warm' || i, 'r' || i, NULL);
SELECT idem_finish('warm', NULL);
SELECT pg_stat_get_xact_numscans('idem_route_policies'::regclass) - :scans AS scans;
ROLLBACK;

-- Only the trigger manager calls the trigger's function
SELECT _idem_policy_changed();

TRUNCATE idem_route_policies, idempotency_keys;
DROP FUNCTION terms, kept, lose_lease;
