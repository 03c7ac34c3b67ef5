--
-- NULLS
-- A table's owner may drop NOT NULL constraints, and put NULL where the
-- library always writes a value.  A call that needs the value says so
-- (23502); no call takes a NULL for zero, or crashes.
--
\set VERBOSITY terse
\set SHOW_CONTEXT never
SELECT idem_create_table('regress_nulls');
ALTER TABLE regress_nulls ALTER state DROP NOT NULL, ALTER attempt DROP NOT NULL,
	ALTER result_dropped DROP NOT NULL, ALTER created_at DROP NOT NULL,
	ALTER expires_at DROP NOT NULL;

-- a row of each kind, for each of these columns; its key says which is NULL
INSERT INTO regress_nulls (key, tenant, route, request_hash, attempt, created_at, expires_at,
	state, lease_until, status, response, result_dropped, finished_at)
SELECT k || ' without ' || c, '', 'r', idem_hash('1'::jsonb), nullif(1, CASE c WHEN 'attempt' THEN 1 END),
	CASE WHEN c <> 'created_at' THEN now() - interval '1 hour' END,
	CASE WHEN c <> 'expires_at' THEN now() + interval '1 hour' END,
	CASE WHEN c <> 'state' THEN s::idem_state END, lease, status, '1',
	CASE WHEN c <> 'result_dropped' THEN false END, finished
FROM unnest('{state, attempt, created_at, expires_at, result_dropped}'::text[]) c,
	(VALUES ('leased', 'in_progress', now() + interval '1 hour', NULL, NULL),
		('lost', 'in_progress', now() - interval '1 minute', NULL, NULL),
		('completed', 'completed', NULL, 200, now()),
		('failed', 'failed', NULL, 500, now())) r (k, s, lease, status, finished);
INSERT INTO regress_nulls (key, tenant, route) VALUES ('nothing but a key', '', 'r');

CREATE FUNCTION work(jsonb) RETURNS jsonb LANGUAGE sql AS 'SELECT $1';
-- what a call comes to; it is undone
CREATE FUNCTION result_of(call text, key text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE format('SELECT %s', format(call, key));
	RAISE EXCEPTION USING ERRCODE = 'UU000';
EXCEPTION
	WHEN SQLSTATE 'UU000' THEN RETURN 'done';
	WHEN OTHERS THEN RETURN SQLSTATE;
END $$;
SELECT key,
	result_of($$idem_begin(%L, 'r', idem_hash('1'::jsonb), store => 'regress_nulls')$$, key) AS begin,
	result_of($$idem_finish(%L, '1', attempt => 1, store => 'regress_nulls')$$, key) AS finish,
	result_of($$idem_lookup(%L, 'r', store => 'regress_nulls')$$, key) AS lookup,
	result_of($$idem_checkpoint(%L, 's', attempt => 1, store => 'regress_nulls')$$, key) AS "check",
	result_of($$idem_release(%L, attempt => 1, store => 'regress_nulls')$$, key) AS release,
	result_of($$idem_resume(key => %L, store => 'regress_nulls')$$, key) AS resume,
	result_of($$idem_receive('r', %L, store => 'regress_nulls')$$, key) AS receive,
	result_of($$idem_receive_batch('r', ARRAY['new', %L], store => 'regress_nulls')$$, key) AS batch,
	result_of($$idem_call(%L, 'r', '1', 'work(jsonb)', store => 'regress_nulls')$$, key) AS call
FROM regress_nulls ORDER BY key;

-- the error says which column
SELECT idem_begin('completed without state', 'r', NULL, store => 'regress_nulls');
\set VERBOSITY default
SELECT idem_finish('lost without attempt', '1', attempt => 0, store => 'regress_nulls');
\set VERBOSITY terse

-- and one that this transaction has written
BEGIN;
SELECT outcome FROM idem_begin('new', 'r', NULL, store => 'regress_nulls');
UPDATE regress_nulls SET expires_at = NULL WHERE key = 'new';
SAVEPOINT s;
SELECT idem_finish('new', '1', store => 'regress_nulls');
ROLLBACK TO s;
UPDATE regress_nulls SET state = NULL WHERE key = 'new';
SAVEPOINT s;
SELECT idem_finish('new', '1', store => 'regress_nulls');
ROLLBACK TO s;
SELECT idem_begin('new', 'r', NULL, store => 'regress_nulls');
ROLLBACK;

-- a table of policies without its key, and with nothing in its rows
BEGIN;
ALTER TABLE idem_route_policies DROP CONSTRAINT idem_route_policies_pkey, ALTER route DROP NOT NULL;
INSERT INTO idem_route_policies (route) VALUES (NULL), (NULL), ('bare');
INSERT INTO idem_route_policies (route, ttl) VALUES (NULL, '1 s');
SELECT outcome FROM idem_begin('k', 'bare', NULL);
SELECT idem_finish('k', '1');
SELECT expires_at - created_at FROM idem_lookup('k', 'bare');
ROLLBACK;

-- the outbox
BEGIN;
ALTER TABLE idem_outbox ALTER message_id DROP NOT NULL, ALTER topic DROP NOT NULL,
	ALTER created_at DROP NOT NULL, ALTER max_attempts DROP NOT NULL,
	ALTER available_at DROP NOT NULL, ALTER attempt DROP NOT NULL;
CREATE FUNCTION message(col text, grp text, OUT id bigint, OUT topic text) LANGUAGE plpgsql AS $$
BEGIN
	topic := 'without ' || col || coalesce(', grouped by ' || grp, '');
	PERFORM idem_publish(topic, '1', group_key => grp);
	id := max(o.id) FROM idem_outbox o;
	UPDATE idem_outbox o SET attempt = 1 WHERE o.id = message.id;
	EXECUTE format('UPDATE idem_outbox SET %I = NULL WHERE id = $1', col) USING id;
END $$;
CREATE FUNCTION dead(message bigint) RETURNS bigint LANGUAGE sql AS
	'UPDATE idem_outbox SET dead_at = now() WHERE id = message RETURNING id';
SELECT col, grp, take, done, fail, bury, redrive
FROM unnest('{message_id, topic, created_at, max_attempts, available_at, attempt}'::text[]) col,
	unnest('{NULL, g}'::text[]) grp, LATERAL message(col, grp) m,
	LATERAL result_of($$count(*) FROM idem_outbox_take(%L)$$, topic) take,
	LATERAL result_of($$idem_outbox_done(%L, 1)$$, m.id::text) done,
	LATERAL result_of($$idem_outbox_fail(%L, 1, 'e')$$, m.id::text) fail,
	LATERAL result_of($$idem_outbox_fail(%L, 1, 'e', dead => true)$$, m.id::text) bury,
	LATERAL result_of($$idem_outbox_redrive(id => dead(%s))$$, m.id::text) redrive;
ROLLBACK;

DROP TABLE regress_nulls;
DROP FUNCTION work, result_of;
