--
-- CALL
-- idem_call: claim, work and finish in one call.  The work runs once, with
-- the caller's rights; an error in it leaves no claim.
--

CREATE TABLE charges (id int GENERATED ALWAYS AS IDENTITY, amount int CHECK (amount < 1000));
CREATE FUNCTION take_payment(request jsonb) RETURNS jsonb LANGUAGE sql AS $$
	INSERT INTO charges (amount) VALUES ((request->>'amount')::int)
	RETURNING jsonb_build_object('id', id, 'amount', amount)
$$;

SELECT proceed, outcome, status, response, attempt, retry_after, expires_at > now() AS expires
FROM idem_call('k', 'POST /charges', '{"amount": 1}', 'take_payment(jsonb)');
SELECT proceed, outcome, status, response, attempt, retry_after
FROM idem_call('k', 'POST /charges', '{"amount": 1.0}', 'take_payment(jsonb)');
SELECT proceed, outcome, status, response FROM idem_call('k', 'POST /charges', '{"amount": 2}', 'take_payment(jsonb)');
SELECT proceed, outcome, status, response FROM idem_call('k', 'POST /charges', NULL, 'take_payment(jsonb)');
-- it is the same key that idem_begin sees
SELECT outcome, response FROM idem_begin('k', 'POST /charges', idem_hash('{"amount": 1}'::jsonb));
SELECT amount FROM charges;

-- An error in the work leaves neither work nor claim
\set VERBOSITY terse
SELECT * FROM idem_call('e', 'POST /charges', '{"amount": 1000}', 'take_payment(jsonb)');
\set VERBOSITY default
SELECT key FROM idempotency_keys WHERE key = 'e';
SELECT outcome, response->'amount' AS amount FROM idem_call('e', 'POST /charges', '{"amount": 999}', 'take_payment(jsonb)');

-- NULL is a result, and so is JSON null; a strict function is not called for
-- a NULL request
CREATE FUNCTION nothing(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
CREATE FUNCTION json_null(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$ BEGIN RETURN 'null'; END $$;
CREATE FUNCTION strict(request jsonb) RETURNS jsonb STRICT LANGUAGE plpgsql AS $$ BEGIN RAISE 'called'; END $$;
SELECT outcome, status, response FROM idem_call('n', 'r', '1', 'nothing(jsonb)');
SELECT outcome, status, response FROM idem_call('n', 'r', '1', 'nothing(jsonb)');
SELECT outcome, status, response FROM idem_call('j', 'r', '1', 'json_null(jsonb)');
SELECT outcome, status, response FROM idem_call('j', 'r', '1', 'json_null(jsonb)');
SELECT outcome, status, response FROM idem_call('s', 'r', NULL, 'strict(jsonb)');

-- The work may use other keys, and is in progress for its own
CREATE FUNCTION nested(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN
	RETURN jsonb_build_object(
		'own', (SELECT outcome FROM idem_begin('nest', 'r', idem_hash(request))),
		'other', (SELECT response FROM idem_call('nest/1', 'r', request, 'json_null(jsonb)')));
END $$;
SELECT outcome, response FROM idem_call('nest', 'r', '{}', 'nested(jsonb)');
-- ... and cannot finish it behind idem_call's back
CREATE FUNCTION finishes(request jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
BEGIN PERFORM idem_finish('own', '1'); RETURN '2'; END $$;
SELECT outcome, response FROM idem_call('own', 'r', '{}', 'finishes(jsonb)');

-- Another status than 200: of the call, or of the work, which may return
-- headers and bytes as well.  The first answer and the replays are the same.
SELECT outcome, status, response FROM idem_call('created', 'r', '{}', 'json_null(jsonb)', status => 201);
SELECT outcome, status, response FROM idem_call('created', 'r', '{}', 'json_null(jsonb)', 201);
SELECT idem_call('bad status', 'r', '{}', 'json_null(jsonb)', 99);
SELECT idem_call('bad status', 'r', '{}', 'json_null(jsonb)', NULL);
CREATE FUNCTION full_result(request jsonb) RETURNS idem_result LANGUAGE sql AS $$
	SELECT ROW ((request ->> 'status')::int, '{"Location": "/charges/1", "Set-Cookie": "s"}', '{"id": 1}', '\xff00')::idem_result
$$;
CREATE FUNCTION no_result_at_all(request jsonb) RETURNS idem_result LANGUAGE sql AS 'SELECT NULL::idem_result';
SELECT outcome, status, headers, response, body FROM idem_call('full', 'r', '{"status": 402}', 'full_result(jsonb)');
SELECT outcome, status, headers, response, body FROM idem_call('full', 'r', '{"status": 402}', 'full_result(jsonb)');
SELECT outcome, status, headers, response, body FROM idem_call('full 2', 'r', '{"status": null}', 'full_result(jsonb)', 202);
SELECT outcome, status, headers, response, body FROM idem_call('full 2', 'r', '{"status": null}', 'full_result(jsonb)', 202);
SELECT outcome, status, headers, response, body FROM idem_call('none', 'r', '{}', 'no_result_at_all(jsonb)');
SELECT outcome, status, headers, response, body FROM idem_call('none', 'r', '{}', 'no_result_at_all(jsonb)');
SELECT idem_call('full 3', 'r', '{"status": 600}', 'full_result(jsonb)');
-- one that is not kept is a failure, and the work is done again
SELECT outcome, status, attempt FROM idem_call('full 4', 'r', '{"status": 503}', 'full_result(jsonb)');
SELECT outcome, status, attempt FROM idem_call('full 4', 'r', '{"status": 503}', 'full_result(jsonb)');
DROP FUNCTION full_result, no_result_at_all;
-- A failed claim is run again, a claim under way is told
BEGIN;
SELECT outcome FROM idem_begin('again', 'r', idem_hash('{}'::jsonb));
SELECT idem_finish('again', '"no"', 503);
COMMIT;
SELECT proceed, outcome, status, response, attempt FROM idem_call('again', 'r', '{}', 'json_null(jsonb)');
SELECT outcome FROM idem_begin('open', 'r', idem_hash('{}'::jsonb));
SELECT proceed, outcome, status, retry_after > '0' AS later FROM idem_call('open', 'r', '{}', 'json_null(jsonb)');

-- Tenant and store are passed on
SELECT idem_create_table('claims');
SELECT outcome FROM idem_call('k', 'r', '{}', 'json_null(jsonb)', tenant => 'acme', store => 'claims');
SELECT tenant, state, response FROM claims;

-- What cannot be the work
CREATE FUNCTION no_jsonb(request text) RETURNS jsonb LANGUAGE sql AS $$ SELECT '1'::jsonb $$;
CREATE FUNCTION no_result(request jsonb) RETURNS int LANGUAGE sql AS $$ SELECT 1 $$;
CREATE FUNCTION two(request jsonb, b int) RETURNS jsonb LANGUAGE sql AS $$ SELECT '1'::jsonb $$;
CREATE FUNCTION several(request jsonb) RETURNS SETOF jsonb LANGUAGE sql AS $$ SELECT '1'::jsonb $$;
CREATE PROCEDURE proc(request jsonb) LANGUAGE plpgsql AS $$ BEGIN END $$;
SELECT * FROM idem_call('w', 'r', '{}', NULL);
SELECT * FROM idem_call('w', 'r', '{}', 'no_jsonb(text)');
SELECT * FROM idem_call('w', 'r', '{}', 'no_result(jsonb)');
SELECT * FROM idem_call('w', 'r', '{}', 'two(jsonb, int)');
SELECT * FROM idem_call('w', 'r', '{}', 'several(jsonb)');
SELECT * FROM idem_call('w', 'r', '{}', 'proc(jsonb)');
SELECT * FROM idem_call('w', 'r', '{}', 4294967295::oid::regprocedure);
SELECT * FROM idem_call('w', 'r', '{}', 'no_such_function(jsonb)');

-- EXECUTE on the work is the caller's affair
CREATE ROLE regress_idem_caller;
SELECT idem_grant('regress_idem_caller');
REVOKE EXECUTE ON FUNCTION json_null FROM PUBLIC;
SET ROLE regress_idem_caller;
SELECT * FROM idem_call('acl', 'r', '{}', 'json_null(jsonb)');
RESET ROLE;
GRANT EXECUTE ON FUNCTION json_null TO regress_idem_caller;
SET ROLE regress_idem_caller;
SELECT outcome FROM idem_call('acl', 'r', '{}', 'json_null(jsonb)');
RESET ROLE;
SELECT idem_revoke('regress_idem_caller');
REVOKE ALL ON SCHEMA public FROM regress_idem_caller;
DROP FUNCTION json_null;
DROP ROLE regress_idem_caller;

TRUNCATE idempotency_keys;
DROP TABLE charges, claims;
DROP FUNCTION take_payment, nothing, strict, nested, finishes, no_jsonb, no_result, two, several;
DROP PROCEDURE proc;
