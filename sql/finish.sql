--
-- FINISH
-- Storing a result: which statuses are kept, who may finish a claim, how long
-- a result is remembered, which headers are stored, that a replay gives back
-- what was stored to the last byte, and that a result which is too large
-- never means a second run.
--

-- What becomes of each status, by pg_idem.keep
CREATE FUNCTION finish_all(mode text) RETURNS TABLE (state idem_state, statuses int[])
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE s int;
BEGIN
	PERFORM set_config('pg_idem.keep', mode, true);
	FOREACH s IN ARRAY '{100, 199, 200, 201, 204, 299, 300, 304, 399, 400, 401, 402, 403,
		404, 407, 408, 409, 410, 422, 424, 425, 426, 429, 430, 451, 499, 500, 501, 502,
		503, 504, 599}'::int[]
	LOOP
		PERFORM idem_begin('keep' || s, mode, NULL);
		PERFORM idem_finish('keep' || s, to_jsonb(s), s, route => mode);
	END LOOP;
	RETURN QUERY SELECT k.state, array_agg(k.status ORDER BY k.status)
		FROM idempotency_keys k WHERE k.route = mode GROUP BY 1 ORDER BY 1;
END $$;
SELECT * FROM finish_all('final');
SELECT * FROM finish_all('success');
SELECT * FROM finish_all('all');
DROP FUNCTION finish_all;
-- in the transaction that stored it, a failure is a result like any other
BEGIN;
SELECT outcome FROM idem_begin('same', 'r', '\x01');
SELECT idem_finish('same', '"down"', 503);
SELECT outcome, status, response FROM idem_begin('same', 'r', '\x01');
ROLLBACK;

-- A failure is resumed, until no attempts are left; then it is the answer
SET pg_idem.max_attempts = 3;
SELECT outcome, attempt FROM idem_begin('fail', 'r', '\x01');
SELECT idem_finish('fail', '"first"', 500, '{"etag": "a"}', 'body', attempt => 1);
SELECT state, status, response FROM idem_lookup('fail', 'r');
SELECT outcome, status FROM idem_begin('fail', 'r', '\x02');
UPDATE idempotency_keys SET step = 'one', step_data = '{"n": 1}' WHERE key = 'fail';
BEGIN;
SELECT proceed, outcome, attempt, status, headers, response, body, step, step_data
FROM idem_begin('fail', 'r', '\x01');
SELECT state, attempt, step, status, headers, response, body, finished_at IS NOT NULL AS failed_before
FROM idem_lookup('fail', 'r');
ROLLBACK;
SELECT state, attempt, status, response FROM idem_lookup('fail', 'r');
BEGIN;
SELECT outcome, attempt FROM idem_begin('fail', 'r', '\x01');
SELECT idem_finish('fail', '"second"', 502);
COMMIT;
SELECT outcome, attempt FROM idem_begin('fail', 'r', '\x01');
SELECT idem_finish('fail', '"third"', 503, attempt => 3);
SELECT proceed, outcome, status, response, attempt FROM idem_begin('fail', 'r', '\x01');
SELECT outcome FROM idem_begin('fail', 'r', '\x02');
-- a setting that is raised gives it more attempts
SET pg_idem.max_attempts = 4;
SELECT outcome, attempt FROM idem_begin('fail', 'r', '\x01');
SELECT idem_finish('fail', '"fourth"', 200, attempt => 4);
SELECT outcome, status, response, attempt FROM idem_begin('fail', 'r', '\x01');
RESET pg_idem.max_attempts;

-- Who may finish
SELECT idem_finish('nothing', '1');									-- IK002
SELECT outcome FROM idem_begin('fence', 'r', '\x01');
SELECT idem_finish('fence', '1');									-- IK001
SELECT idem_finish('fence', '1', attempt => 2);						-- IK001
SELECT idem_finish('fence', '1', attempt => 0);						-- IK001
SELECT idem_finish('fence', '1', attempt => 1, tenant => 'acme');	-- IK002
SELECT idem_finish('fence', '1', attempt => 1, route => 'other');	-- IK002
SELECT state FROM idem_lookup('fence', 'r');
-- the fence also holds for one's own claim
BEGIN;
SELECT outcome FROM idem_begin('fence2', 'r', '\x01');
SELECT idem_finish('fence2', '1', attempt => 2);
ROLLBACK;
SELECT idem_finish('fence', '1', attempt => 1);
SELECT idem_finish('fence', '2', attempt => 1);						-- IK003
SELECT idem_finish('fence', '2');									-- IK003
-- the attempt is looked at before anything else
SELECT idem_finish('fence', '2', attempt => 2);						-- IK001
SELECT response FROM idem_lookup('fence', 'r');
-- a failed key is finished, too
SELECT outcome FROM idem_begin('fence3', 'r', '\x01');
SELECT idem_finish('fence3', '1', 500, attempt => 1);
SELECT idem_finish('fence3', '2', attempt => 1);					-- IK003
-- a worker that lost its claim loses its business rows
CREATE TABLE regress_charges (id int);
SELECT outcome FROM idem_begin('lost', 'r', '\x01');
UPDATE idempotency_keys SET lease_until = '2000-01-01' WHERE key = 'lost';
SELECT outcome, attempt FROM idem_begin('lost', 'r', '\x01');
BEGIN;
INSERT INTO regress_charges VALUES (1);
SELECT idem_finish('lost', '1', attempt => 1);						-- IK001
COMMIT;
SELECT count(*) FROM regress_charges;
-- as SQLSTATEs
\set VERBOSITY sqlstate
SELECT idem_finish('nothing', '1');
SELECT idem_finish('lost', '1');
SELECT idem_finish('lost', '1', attempt => 1);
SELECT idem_finish('fence', '1');
\set VERBOSITY default

-- Several routes: the claim in progress, or else the route must be named
BEGIN;
SELECT outcome FROM idem_begin('routes', 'a', '\x01');
SELECT outcome FROM idem_begin('routes', 'b', '\x01');
SAVEPOINT s;
SELECT idem_finish('routes', '1');
ROLLBACK TO s;
SELECT idem_finish('routes', '"b"', route => 'b');
SELECT idem_finish('routes', '"a"');
SAVEPOINT s;
SELECT idem_finish('routes', '1');
ROLLBACK TO s;
SELECT idem_finish('routes', '1', route => 'a');
ROLLBACK TO s;
SELECT route, response FROM idempotency_keys WHERE key = 'routes' ORDER BY route;
-- one finished, one in progress, whichever comes first in the index
SELECT outcome FROM idem_begin('routes', 'c', '\x01');
SELECT idem_finish('routes', '"c"');
SELECT outcome FROM idem_begin('routes', '0', '\x01');
SELECT idem_finish('routes', '"0"');
COMMIT;
SELECT route, response FROM idempotency_keys WHERE key = 'routes' ORDER BY route;
-- The claim of this transaction is the one that is meant, whatever others have
SELECT outcome FROM idem_begin('others', 'in progress', '\x01');
SELECT outcome FROM idem_begin('others', 'in progress too', '\x01');
SELECT outcome FROM idem_begin('others', 'expired', '\x01', ttl => '1 microsecond', lease => '1 microsecond');
BEGIN; SELECT outcome FROM idem_begin('others', 'finished', '\x01'); SELECT idem_finish('others', '"f"', route => 'finished'); COMMIT;
BEGIN;
SELECT outcome FROM idem_begin('others', 'a', '\x01');
SELECT idem_checkpoint('others', 'half') IS NOT NULL AS renewed;
SELECT idem_finish('others', '"a"');
COMMIT;
BEGIN;
SELECT outcome FROM idem_begin('others', 'b', '\x01');
SELECT idem_release('others');
SELECT outcome FROM idem_begin('others', 'c', '\x01');
SAVEPOINT s;
SELECT idem_finish('others', '"c"');	-- b is still in progress, and this transaction's, too
ROLLBACK TO s;
SELECT idem_finish('others', '"c"', route => 'c');
SELECT idem_finish('others', '"b"');
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE;
SELECT outcome FROM idem_begin('others', 'd', '\x01');
SELECT idem_finish('others', '"d"');
COMMIT;
SELECT idem_finish('others', '1', attempt => 1);	-- none is this transaction's, several are in progress
SELECT route, state, response FROM idempotency_keys WHERE key = 'others' ORDER BY route;
-- No response, or another kind of it
BEGIN;
SELECT a.outcome, b.outcome FROM idem_begin('none', 'r', '\x01') a, idem_begin('bytes', 'r', '\x01') b;
SELECT idem_finish('none'), idem_finish('bytes', body => '\xff00');
COMMIT;
SELECT outcome, status, response, body FROM idem_begin('none', 'r', '\x01');
SELECT outcome, status, response, body FROM idem_begin('bytes', 'r', '\x01');
-- other tenants do not count
BEGIN;
SELECT outcome FROM idem_begin('tenants', 'r', '\x01');
SELECT outcome FROM idem_begin('tenants', 'r', '\x01', tenant => 't');
SELECT idem_finish('tenants', '"none"');
SELECT idem_finish('tenants', '"t"', tenant => 't');
COMMIT;
SELECT tenant, response FROM idempotency_keys WHERE key = 'tenants' ORDER BY tenant;

-- Retention counts from the finish, unless begin was in the same transaction
BEGIN;
SELECT outcome FROM idem_begin('keep1', 'r', '\x01', ttl => '2 hours');
SELECT idem_finish('keep1', '1');
COMMIT;
SELECT expires_at - created_at AS ttl FROM idem_lookup('keep1', 'r');
SELECT outcome FROM idem_begin('keep2', 'r', '\x01');
UPDATE idempotency_keys SET created_at = '2000-01-01 00:00 UTC',
	expires_at = '2000-01-03 00:00 UTC' WHERE key = 'keep2';
SELECT idem_finish('keep2', '1', attempt => 1);
SELECT expires_at - finished_at AS kept, finished_at > '2001-01-01' AS finished
FROM idem_lookup('keep2', 'r');
SELECT outcome FROM idem_begin('keep3', 'r', '\x01');
SELECT idem_finish('keep3', '1', attempt => 1, ttl => '1 hour');
BEGIN;
SELECT outcome FROM idem_begin('keep4', 'r', '\x01');
SELECT idem_finish('keep4', '1', ttl => '1 hour');
COMMIT;
SELECT key, expires_at - finished_at AS kept FROM idempotency_keys
WHERE key IN ('keep3', 'keep4') ORDER BY key;
-- a resumed claim has a whole life after its finish, too
SELECT outcome FROM idem_begin('keep5', 'r', '\x01');
UPDATE idempotency_keys SET created_at = '2000-01-01 00:00 UTC', lease_until = '2000-01-01',
	expires_at = '2000-01-02 12:00 UTC' WHERE key = 'keep5';
BEGIN;
SELECT outcome FROM idem_begin('keep5', 'r', '\x01');
SELECT idem_finish('keep5', '1');
COMMIT;
SELECT expires_at - finished_at AS kept FROM idem_lookup('keep5', 'r');
-- for ever stays for ever
SELECT outcome FROM idem_begin('keep6', 'r', '\x01');
UPDATE idempotency_keys SET expires_at = 'infinity' WHERE key = 'keep6';
SELECT idem_finish('keep6', '1', attempt => 1);
SELECT expires_at, lease_until FROM idem_lookup('keep6', 'r');
-- where nobody can tell how long that is, the key expires when it would have
SELECT outcome FROM idem_begin('keep7', 'r', '\x01');
UPDATE idempotency_keys SET created_at = '-infinity', expires_at = '3000-01-01 00:00 UTC'
WHERE key = 'keep7';
SELECT idem_finish('keep7', '1', attempt => 1);
SELECT outcome, expires_at = '3000-01-01 00:00 UTC' AS stands FROM idem_begin('keep7', 'r', '\x01');

-- Headers: those on the list, in any case, as they are; never credentials,
-- hop-by-hop headers and Date
\set SHOW_CONTEXT never
CREATE FUNCTION kept_headers(headers jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE c idem_claim;
BEGIN
	DELETE FROM idempotency_keys WHERE key = 'headers';
	PERFORM idem_begin('headers', 'r', NULL);
	PERFORM idem_finish('headers', NULL, headers => kept_headers.headers);
	c := idem_begin('headers', 'r', NULL);
	RETURN c.headers;
END $$;
SELECT kept_headers('{"Content-Type": "application/json", "ETAG": "\"x\"", "location": "/1",
	"X-Request-Id": "7", "Set-Cookie": "session=secret", "Retry-After": 5,
	"content-typ": "no", "content-type-2": "no", "link": ["<a>", {"b": [null, true]}],
	"cache-control": null, "Last-Modified": "", "": "no", "etag\u0020": "no"}');
SELECT kept_headers('{}');
SELECT kept_headers('{"x-other": 1}');
SELECT kept_headers(NULL) IS NULL AS none;
SET pg_idem.replay_headers = 'X-Request-Id,	set-cookie,AUTHORIZATION , www-authenticate, date, connection, keep-alive, transfer-encoding, te, trailer, upgrade, proxy-authenticate, proxy-authorization, proxy-connection';
SELECT kept_headers('{"x-request-ID": "7", "Set-Cookie": "a", "set-cookie": "a", "Authorization": "a",
	"WWW-Authenticate": "a", "Date": "a", "Connection": "a", "Keep-Alive": "a",
	"Transfer-Encoding": "a", "TE": "a", "Trailer": "a", "Upgrade": "a",
	"Proxy-Authenticate": "a", "Proxy-Authorization": "a", "Proxy-Connection": "a",
	"content-type": "a"}');
SET pg_idem.replay_headers = E'etag,\r\n\tlink';
SET pg_idem.replay_headers = '';
SELECT kept_headers('{"content-type": "a", "": "b"}');
RESET pg_idem.replay_headers;
SELECT kept_headers('[]');
SELECT kept_headers('"content-type"');
SELECT kept_headers('null');
SELECT kept_headers('[{"content-type": "a"}]');
SET pg_idem.replay_headers = 'content type, x:y';
DROP FUNCTION kept_headers;
\set SHOW_CONTEXT errors

-- A replay gives back status, response and body exactly
CREATE TABLE results (id int, status int, response jsonb, body bytea);
INSERT INTO results VALUES
	(1, 200, '0', NULL), (2, 200, '""', NULL), (3, 200, '[]', NULL),
	(4, 200, '{}', NULL), (5, 200, 'null', NULL), (6, 200, NULL, NULL),
	(7, 204, NULL, ''), (8, 200, NULL, '\x00'), (9, 200, NULL, '\xfffe00c328ff'),
	(10, 200, 'false', '\x80'), (11, 201, '1.10', 'x'), (12, 201, '1e2', 'x'),
	(13, 404, '[null, [], {}, "", 0, "\u0001\n\"\\"]', NULL),
	(14, 422, '{"": {"": ""}, "a": null}', '');
INSERT INTO results
SELECT 15, 200, jsonb_build_object('big', string_agg(encode(sha256(i::text::bytea), 'base64'), '')),
	string_agg(sha256(('b' || i)::bytea), '')
FROM generate_series(1, 4000) i;
INSERT INTO results			-- compresses well
SELECT 16, 200, to_jsonb(repeat('x', 900000)), repeat('y', 100000)::bytea;
DO $$
DECLARE r results;
BEGIN
	FOR r IN SELECT * FROM results LOOP
		PERFORM idem_begin('result' || r.id, 'r', '\x01');
		PERFORM idem_finish('result' || r.id, r.response, r.status, body => r.body);
	END LOOP;
END $$;
CREATE VIEW replays AS
	SELECT r.*, c.status AS got_status, c.response AS got_response, c.body AS got_body, c.outcome
	FROM results r, idem_begin('result' || r.id, 'r', '\x01') c;
SELECT id, outcome, got_status, got_response, got_body FROM replays WHERE id < 15 ORDER BY id;
SELECT count(*),
	count(*) FILTER (WHERE outcome = 'replayed' AND status = got_status
		AND response::text IS NOT DISTINCT FROM got_response::text
		AND body IS NOT DISTINCT FROM got_body) AS exact
FROM replays;
-- the large ones are stored out of line, and returned whole: they can be kept
-- where the row that they came from is gone
SELECT key, pg_column_size(response) > 100000 AND pg_column_size(body) > 100000 AS large
FROM idempotency_keys WHERE key = 'result15';
CREATE TABLE kept_results AS
	SELECT idem_begin('result15', 'r', '\x01') AS claim, idem_lookup('result15', 'r') AS row;
DELETE FROM idempotency_keys WHERE key = 'result15';
VACUUM idempotency_keys;
SELECT (claim).outcome, (claim).response = response AND (claim).body = body AS claim,
	(row).response = response AND (row).body = body AS row
FROM kept_results, results WHERE id = 15;
-- a large failed result, large checkpoint data, and another large result over them
SELECT outcome FROM idem_begin('result15', 'r', '\x01');
SELECT idem_finish('result15', response, 500, body => body, attempt => 1) FROM results WHERE id = 15;
UPDATE idempotency_keys SET step = 's', step_data = response WHERE key = 'result15';
BEGIN;
SELECT outcome, step_data = (SELECT response FROM results WHERE id = 15) AS step_data
FROM idem_begin('result15', 'r', '\x01');
SELECT idem_finish('result15', response || '{"second": true}', 200, body => body || '\xff')
FROM results WHERE id = 15;
COMMIT;
VACUUM idempotency_keys;
SELECT c.outcome, c.response = r.response || '{"second": true}' AS response,
	c.body = r.body || '\xff' AS body, (idem_lookup('result15', 'r')).step_data = r.response AS step_data
FROM results r, idem_begin('result15', 'r', '\x01') c WHERE id = 15;
DROP TABLE kept_results;
DROP VIEW replays;
DROP TABLE results;

-- Too large a result: the work commits, a warning is given, and its replays
-- say that it is gone.  Counted is what a jsonb and a bytea take.
SET pg_idem.max_response_size = 100;
CREATE FUNCTION fits(response jsonb, headers jsonb, body bytea) RETURNS bool LANGUAGE plpgsql
SET client_min_messages = error AS $$
#variable_conflict use_variable
DECLARE c idem_claim;
BEGIN
	DELETE FROM idempotency_keys WHERE key = 'fits';
	PERFORM idem_begin('fits', 'r', NULL);
	PERFORM idem_finish('fits', response, headers => headers, body => body);
	c := idem_begin('fits', 'r', NULL);
	RETURN c.outcome = 'replayed';
END $$;
SELECT fits(NULL, NULL, repeat('x', 100)::bytea) AS body_100,
	fits(NULL, NULL, repeat('x', 101)::bytea) AS body_101,
	fits(to_jsonb(repeat('x', 92)), NULL, NULL) AS response_100,
	fits(to_jsonb(repeat('x', 93)), NULL, NULL) AS response_101,
	fits(to_jsonb(repeat('"', 92)), NULL, NULL) AS quotes_100;
SELECT fits(NULL, '{"etag": "1234567890"}', repeat('x', 74)::bytea) AS sum_100,
	fits(NULL, '{"etag": "1234567890"}', repeat('x', 75)::bytea) AS sum_101,
	fits(to_jsonb(repeat('x', 28)), '{"etag": "1234567890"}', repeat('x', 38)::bytea) AS all_100,
	fits(to_jsonb(repeat('x', 29)), '{"etag": "1234567890"}', repeat('x', 38)::bytea) AS all_101,
	fits(NULL, jsonb_build_object('x-dropped', repeat('x', 200)), NULL) AS dropped_header;
SET pg_idem.max_response_size = 0;
SELECT fits(NULL, NULL, NULL) AS nothing, fits(NULL, NULL, '') AS empty_body,
	fits('0', NULL, NULL) AS one_byte;
DROP FUNCTION fits;
SET pg_idem.max_response_size = 100;
BEGIN;
SELECT outcome FROM idem_begin('large', 'r', '\x01');
INSERT INTO regress_charges VALUES (2);
SELECT idem_finish('large', to_jsonb(repeat('x', 200)), 201, '{"etag": "x"}', 'body');
SELECT outcome, status FROM idem_begin('large', 'r', '\x01');
COMMIT;
SELECT id FROM regress_charges;
SELECT proceed, outcome, status, headers, response, body FROM idem_begin('large', 'r', '\x01');
SELECT outcome, status FROM idem_begin('large', 'r', '\x02');
SELECT state, status, headers, response, body, result_dropped FROM idem_lookup('large', 'r');
SELECT idem_finish('large', '1');
-- a failure that is too large is run again, and once more is gone
SET pg_idem.max_attempts = 2;
SELECT outcome FROM idem_begin('large2', 'r', '\x01');
SELECT idem_finish('large2', to_jsonb(repeat('x', 200)), 500, attempt => 1);
SELECT outcome, attempt FROM idem_begin('large2', 'r', '\x01');
SELECT result_dropped FROM idem_lookup('large2', 'r');
SELECT idem_finish('large2', to_jsonb(repeat('x', 200)), 500, attempt => 2);
SELECT outcome, status, attempt FROM idem_begin('large2', 'r', '\x01');
RESET pg_idem.max_attempts;
RESET pg_idem.max_response_size;
-- the default is a megabyte
BEGIN;
SELECT outcome FROM idem_begin('large3', 'r', '\x01');
SELECT idem_finish('large3', NULL, body => repeat('x', 1024 * 1024)::bytea);
SELECT outcome FROM idem_begin('large4', 'r', '\x01');
SELECT idem_finish('large4', NULL, body => repeat('x', 1024 * 1024 + 1)::bytea);
COMMIT;
SELECT key, result_dropped, length(body) FROM idempotency_keys
WHERE key IN ('large3', 'large4') ORDER BY key;

DROP TABLE regress_charges;
DELETE FROM idempotency_keys;

-- The claim inserted last is found by its place in the table, which is only a
-- hint: it may have been rolled back, moved, removed, or not be the one meant
BEGIN;
SELECT outcome FROM idem_begin('h1', 'r', NULL);
SELECT outcome FROM idem_begin('h2', 'r', NULL);
SELECT idem_finish('h1', '1', route => 'r');
SELECT idem_finish('h2', '2', route => 'r');
SELECT outcome FROM idem_begin('h3', 'r', NULL);
SELECT idem_checkpoint('h3', 'moved', route => 'r') IS NOT NULL AS moved;
SELECT idem_finish('h3', '3', route => 'r');
SELECT outcome FROM idem_begin('h4', 'r', NULL);
SELECT outcome FROM idem_begin('h4', 's', NULL);
SELECT idem_finish('h4', '4', route => 'r');
SELECT idem_finish('h4', '5', route => 's');
SAVEPOINT a;
SELECT outcome FROM idem_begin('h6', 'r', NULL);
ROLLBACK TO a;
SELECT outcome FROM idem_begin('h6', 'r', NULL);
SELECT idem_finish('h6', '6', route => 'r');
SELECT outcome FROM idem_begin('h7', 'r', NULL);
SAVEPOINT b;
DELETE FROM idempotency_keys WHERE key = 'h7';
SELECT idem_finish('h7', '7', route => 'r');
ROLLBACK TO b;
SELECT idem_finish('h7', '7', route => 'r');
SELECT outcome FROM idem_begin('h8', 'r', NULL);
SAVEPOINT c;
ROLLBACK TO a;
SELECT idem_finish('h8', '8', route => 'r');
ROLLBACK TO a;
SELECT key, route, response FROM idempotency_keys WHERE key LIKE 'h_' ORDER BY key, route;
SELECT outcome FROM idem_begin('h9', 'r', NULL);
TRUNCATE idempotency_keys;
SELECT idem_finish('h9', '9', route => 'r');
ROLLBACK;
BEGIN;
SELECT outcome FROM idem_begin('h10', 'r', NULL);
CLUSTER idempotency_keys USING idempotency_keys_pkey;
SELECT idem_finish('h10', '10', route => 'r');
SELECT outcome, response FROM idem_begin('h10', 'r', NULL);
ROLLBACK;
