--
-- RECIPES
-- The recipes of the README as they stand there, for two accounts that send
-- the same key with the same body: both are charged, each gets its own answer,
-- and gets it again.  And what the one-statement form does with a request that
-- its work cannot take: nothing of the work may be computed before the claim
-- has decided, whatever the plan.  (What else there is to the recipes is in
-- lease, natural, receive and test/t.)
--
CREATE TABLE charges (id bigint GENERATED ALWAYS AS IDENTITY, account text, payment text, amount int);
CREATE TABLE bookings (seat text PRIMARY KEY, account text);

--
-- A transaction of several statements
--
CREATE FUNCTION charge_in_steps(account text, key text, request jsonb)
RETURNS TABLE (outcome text, status int, response jsonb) LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
	c idem_claim;
BEGIN
	SELECT * INTO c FROM idem_begin(key, 'POST /charges', idem_hash(request), tenant => account);
	IF c.proceed THEN
		INSERT INTO charges (account, amount) VALUES (account, (request ->> 'amount')::int)
		RETURNING 201, jsonb_build_object('id', id) INTO c.status, c.response;
		PERFORM idem_finish(key, c.response, status => 201, tenant => account);
	END IF;
	RETURN QUERY VALUES (c.outcome, c.status, c.response);
END $$;
SELECT * FROM charge_in_steps('alice', 'order-1', '{"amount": 7}');
SELECT * FROM charge_in_steps('bob', 'order-1', '{"amount": 7}');
SELECT * FROM charge_in_steps('alice', 'order-1', '{"amount": 7}');
SELECT * FROM charge_in_steps('bob', 'order-1', '{"amount": 7}');
SELECT * FROM charge_in_steps('bob', 'order-1', '{"amount": 8}');
SELECT account, id, amount FROM charges ORDER BY id;
TRUNCATE charges, idempotency_keys RESTART IDENTITY;

--
-- In one round trip.  The types of the parameters are left to the server, as
-- most drivers leave them.
--
PREPARE charge AS
WITH c AS MATERIALIZED (SELECT *, $2 AS account, $4::int AS amount
                        FROM idem_begin($1, 'POST /charges', $3, tenant => $2)),
     w AS (INSERT INTO charges (account, amount) SELECT c.account, c.amount FROM c
           WHERE c.proceed RETURNING id),
     f AS MATERIALIZED (SELECT w.id, idem_finish($1, jsonb_build_object('id', w.id), status => 201,
                                                 route => 'POST /charges', tenant => $2) FROM w)
SELECT c.outcome, coalesce(c.status, 201) AS status,
       CASE WHEN c.proceed THEN jsonb_build_object('id', f.id) ELSE c.response END AS response
FROM c LEFT JOIN f ON true;
SELECT parameter_types FROM pg_prepared_statements WHERE name = 'charge';
EXECUTE charge('order-1', 'alice', idem_hash('{"amount": 7}'::jsonb), 7);
EXECUTE charge('order-1', 'bob', idem_hash('{"amount": 7}'::jsonb), 7);
EXECUTE charge('order-1', 'alice', idem_hash('{"amount": 7}'::jsonb), 7);
EXECUTE charge('order-1', 'bob', idem_hash('{"amount": 7}'::jsonb), 7);
-- values that the columns cannot take are an error where the work is to be
-- done, and nothing where it is not: a mismatch, a request in progress
ALTER TABLE charges ALTER account TYPE varchar(5), ALTER amount TYPE smallint;
SELECT outcome FROM idem_begin('order-3', 'POST /charges', '\x01', tenant => 'somebody');
SET plan_cache_mode = force_custom_plan;
EXECUTE charge('order-1', 'bob', '\x02', 70000);
EXECUTE charge('order-2', 'bob', '\x02', 70000);
EXECUTE charge('order-3', 'somebody', '\x01', 7);
SET plan_cache_mode = force_generic_plan;
EXECUTE charge('order-1', 'bob', '\x02', 70000);
EXECUTE charge('order-2', 'bob', '\x02', 70000);
EXECUTE charge('order-3', 'somebody', '\x01', 7);
RESET plan_cache_mode;
ALTER TABLE charges ALTER account TYPE text, ALTER amount TYPE int;
SELECT account, id, amount FROM charges ORDER BY id;
SELECT key, tenant, state FROM idempotency_keys ORDER BY key, tenant;
DEALLOCATE charge;
TRUNCATE charges, idempotency_keys RESTART IDENTITY;

--
-- An HTTP handler
--
PREPARE handle(text, text, text) AS
WITH c AS MATERIALIZED (SELECT b AS claim, b.*, $3 AS account, $2::jsonb AS request
                        FROM idem_begin($1, 'POST /charges', idem_hash($2::jsonb), tenant => $3) b),
     w AS (INSERT INTO charges (account, amount)
           SELECT c.account, (c.request ->> 'amount')::int FROM c
           WHERE c.proceed RETURNING id),
     f AS MATERIALIZED (SELECT w.id, idem_finish($1, jsonb_build_object('id', w.id), status => 201,
                                                 route => 'POST /charges', tenant => $3) FROM w)
SELECT c.outcome, coalesce(c.status, 201) AS status, c.headers, c.body,
       CASE WHEN c.proceed THEN jsonb_build_object('id', f.id) ELSE c.response END AS response,
       idem_problem(c.claim) ->> 'title' AS problem, ceil(extract(epoch FROM c.retry_after)) AS retry_after
FROM c LEFT JOIN f ON true;
EXECUTE handle(idem_parse_key('"order-1"'), '{"amount": 7}', 'alice');
EXECUTE handle(idem_parse_key('order-1'), '{"amount": 7}', 'bob');
EXECUTE handle(idem_parse_key('order-1'), '{"amount": 7}', 'alice');
EXECUTE handle(idem_parse_key('order-1'), '{"amount": 7}', 'bob');
EXECUTE handle(idem_parse_key('order-1'), '{"amount": 8}', 'bob');
SELECT outcome FROM idem_begin('busy', 'POST /charges', idem_hash('{"amount": 3}'::jsonb), tenant => 'alice');
EXECUTE handle(idem_parse_key('busy'), '{"amount": 3}', 'alice');
EXECUTE handle(idem_parse_key('busy'), '{"amount": 3}', 'bob');
SELECT account, amount FROM charges ORDER BY id;
-- Amounts that are no int.  7.0 is the same request as 7, so it is replayed;
-- the others are other requests.  Where the work is to be done they are errors,
-- and leave nothing behind.  A body that is no JSON is an error in any case.
CREATE TABLE requests (n int, request text);
INSERT INTO requests VALUES (1, '{"amount": 7.0}'), (2, '{"amount": "abc"}'), (3, '{"amount": 7}'),
	(4, '{"amount": 7.0}'), (5, '{"amount": "abc"}'), (6, '{"amount": 1e30}'), (7, '{}'), (8, '{"amount": 7');
CREATE FUNCTION answers_of(handler text, account text) RETURNS TABLE (request text, answer text) LANGUAGE plpgsql AS $$
DECLARE
	r record;
BEGIN
	FOR request IN SELECT q.request FROM requests q ORDER BY n LOOP
		BEGIN
			EXECUTE replace(replace(replace(handler, '$1', quote_literal('bad')),
				'$2', quote_literal(request)), '$3', quote_literal(account)) INTO r;
			answer := r.outcome || ' ' || r.status;
		EXCEPTION WHEN OTHERS THEN
			answer := SQLSTATE;
		END;
		RETURN NEXT;
	END LOOP;
END $$;
SET plan_cache_mode = force_custom_plan;
SELECT * FROM answers_of('EXECUTE handle($1, $2, $3)', 'carol');
SET plan_cache_mode = force_generic_plan;
SELECT * FROM answers_of('EXECUTE handle($1, $2, $3)', 'dave');
RESET plan_cache_mode;
-- with literals, from drivers that fill in the values themselves
SELECT regexp_replace(statement, '^PREPARE.*? AS\n', '') AS handle
FROM pg_prepared_statements WHERE name = 'handle' \gset
SELECT * FROM answers_of(:'handle', 'erin');
SELECT account, amount FROM charges WHERE account IN ('carol', 'dave', 'erin') ORDER BY account;
SELECT tenant, key, state FROM idempotency_keys WHERE key = 'bad' ORDER BY tenant;
-- nor is the account of a request that is in progress fitted into its column
ALTER TABLE charges ALTER account TYPE varchar(5);
SELECT outcome FROM idem_begin('order-3', 'POST /charges', idem_hash('{}'::jsonb), tenant => 'somebody');
SET plan_cache_mode = force_custom_plan;
EXECUTE handle('order-3', '{}', 'somebody');
SET plan_cache_mode = force_generic_plan;
EXECUTE handle('order-3', '{}', 'somebody');
RESET plan_cache_mode;
DEALLOCATE handle;
TRUNCATE charges, idempotency_keys RESTART IDENTITY;

--
-- A 4xx that is kept although the work failed
--
CREATE FUNCTION book(account text, key text, seat text)
RETURNS TABLE (outcome text, status int, response jsonb) LANGUAGE plpgsql AS $$
#variable_conflict use_variable
DECLARE
	c idem_claim;
BEGIN
	SELECT * INTO c FROM idem_begin(key, 'POST /bookings', idem_hash(to_jsonb(seat)), tenant => account);
	IF c.proceed THEN
		BEGIN									-- SAVEPOINT work
			INSERT INTO bookings (seat, account) VALUES (seat, account);
			c.status := 201;
		EXCEPTION WHEN unique_violation THEN	-- ROLLBACK TO work
			c.status := 422;
			c.response := '{"error": "seat taken"}';
		END;
		PERFORM idem_finish(key, c.response, c.status, route => 'POST /bookings', tenant => account);
	END IF;
	RETURN QUERY VALUES (c.outcome, c.status, c.response);
END $$;
SELECT * FROM book('alice', 'seat', '17A');
SELECT * FROM book('bob', 'seat', '17A');
SELECT * FROM book('alice', 'seat', '17A');
SELECT * FROM book('bob', 'seat', '17A');
SELECT * FROM bookings;

--
-- An effect outside the database: claim, checkpoint, child key, finish
--
SELECT outcome, attempt FROM idem_begin('order-1', 'POST /charges', NULL, tenant => 'alice');
SELECT outcome, attempt FROM idem_begin('order-1', 'POST /charges', NULL, tenant => 'bob');
SELECT idem_checkpoint('order-1', 'charged', '"alice"', route => 'POST /charges', tenant => 'alice', attempt => 1) > now() AS renewed;
SELECT idem_checkpoint('order-1', 'charged', '"bob"', route => 'POST /charges', tenant => 'bob', attempt => 1) > now() AS renewed;
SELECT idem_child_key('order-1', 'charge', 'POST /charges', 'alice') <> idem_child_key('order-1', 'charge', 'POST /charges', 'bob') AS two_payments;
SELECT idem_release('order-1', route => 'POST /charges', tenant => 'bob', attempt => 1);
-- a completer passes on the tenant of the claim that it was given
SELECT key, tenant, attempt, step_data FROM idem_resume(10, 'POST /charges');
SELECT idem_finish('order-1', '"for bob"', 201, route => 'POST /charges', tenant => 'bob', attempt => 2);
SELECT idem_finish('order-1', '"for alice"', 201, route => 'POST /charges', tenant => 'alice', attempt => 1);
SELECT response FROM idem_begin('order-1', 'POST /charges', NULL, tenant => 'alice');
SELECT response FROM idem_begin('order-1', 'POST /charges', NULL, tenant => 'bob');
SELECT (idem_lookup('order-1', 'POST /charges', 'bob')).response;

--
-- The work as a function
--
CREATE FUNCTION take_payment(request jsonb) RETURNS jsonb LANGUAGE sql AS $$
	INSERT INTO charges (account, amount) VALUES (request ->> 'account', (request ->> 'amount')::int)
	RETURNING jsonb_build_object('id', id)
$$;
SELECT outcome, status, response FROM idem_call('order-2', 'POST /charges', '{"amount": 7}', 'take_payment(jsonb)', tenant => 'alice');
SELECT outcome, status, response FROM idem_call('order-2', 'POST /charges', '{"amount": 7}', 'take_payment(jsonb)', tenant => 'bob');
SELECT outcome, status, response FROM idem_call('order-2', 'POST /charges', '{"amount": 7}', 'take_payment(jsonb)', tenant => 'alice');
SELECT outcome, status, response FROM idem_call('order-2', 'POST /charges', '{"amount": 7.0}', 'take_payment(jsonb)', tenant => 'bob');

--
-- A consumer of two producers that number their messages
--
CREATE TABLE invoices (order_id text);
SELECT idem_receive('billing', '1', tenant => 'shop'), idem_receive('billing', '1', tenant => 'app');
INSERT INTO invoices (order_id)
SELECT m FROM idem_receive_batch('billing', '{1,2}', tenant => 'shop') m RETURNING order_id;
INSERT INTO invoices (order_id)
SELECT m FROM idem_receive_batch('billing', '{1,2}', tenant => 'app') m RETURNING order_id;
SELECT idem_receive('billing', '2', tenant => 'shop'), idem_receive('billing', '2', tenant => 'app');

-- The type of a parameter follows from the function's name alone, so that a
-- text that looks like an array is one message, and an array is many
PREPARE one AS SELECT idem_receive('billing', $1, tenant => 'drivers');
PREPARE many AS SELECT idem_receive_batch('billing', $1, tenant => 'drivers');
SELECT name, parameter_types FROM pg_prepared_statements ORDER BY name;
EXECUTE one('{1,2}');
EXECUTE many('{1,2}');
EXECUTE many('{1,2,3,"{1,2}"}');
DEALLOCATE ALL;

DROP FUNCTION charge_in_steps, answers_of, book, take_payment;
DROP TABLE charges, bookings, invoices, requests;
TRUNCATE idempotency_keys;
