--
-- NATURAL
-- Writes that need no idempotency key, since the data tells that they have
-- been done: the recipes of the README.  What they are like under concurrency
-- is in test/isolation: if-match, version-guard.
--

--
-- A natural key: the second copy finds the row of the first
--
CREATE TABLE natural_payments (invoice text PRIMARY KEY, amount int NOT NULL, id int GENERATED ALWAYS AS IDENTITY);
PREPARE pay(text, int) AS
	INSERT INTO natural_payments (invoice, amount) VALUES ($1, $2) ON CONFLICT (invoice) DO NOTHING;
PREPARE paid(text, int) AS
	SELECT id, amount = $2 AS same_request FROM natural_payments WHERE invoice = $1;
EXECUTE pay('2026-001', 999);
EXECUTE paid('2026-001', 999);
EXECUTE pay('2026-001', 999);
EXECUTE paid('2026-001', 999);
-- another request under the same natural key changes nothing, and shows
EXECUTE pay('2026-001', 1);
EXECUTE paid('2026-001', 1);
SELECT invoice, amount, id FROM natural_payments;

--
-- PUT: the request is the new state, all of it
--
CREATE TABLE natural_docs (id int PRIMARY KEY, title text, body text);
PREPARE put(int, text, text) AS
	INSERT INTO natural_docs AS d (id, title, body) VALUES ($1, $2, $3)
	ON CONFLICT (id) DO UPDATE SET title = EXCLUDED.title, body = EXCLUDED.body
	WHERE (d.title, d.body) IS DISTINCT FROM (EXCLUDED.title, EXCLUDED.body)
	RETURNING title, body;
EXECUTE put(1, 'A', 'a');
-- the same again writes nothing: no row, no new version of it
SELECT xmin AS before FROM natural_docs WHERE id = 1 \gset
EXECUTE put(1, 'A', 'a');
SELECT xmin = :'before'::xid AS same_version FROM natural_docs WHERE id = 1;
-- what the request leaves out is not left as it was
EXECUTE put(1, 'B', NULL);
EXECUTE put(1, 'B', NULL);
SELECT * FROM natural_docs;

--
-- If-Match: a change of what the client has seen, and of nothing else
--
PREPARE change(int, text, text) AS
	UPDATE natural_docs d SET title = $3
	WHERE d.id = $1 AND idem_if_match($2, idem_etag(d.*))
	RETURNING title, idem_etag(d.*) AS etag;
SELECT idem_etag(d.*) AS first FROM natural_docs d WHERE id = 1 \gset
-- one writer, who gets the new tag
EXECUTE change(1, :'first', 'C') \gset
SELECT :'title' AS title, :'etag' = idem_etag(d.*) AS tag_of_new_row, :'etag' <> :'first' AS changed FROM natural_docs d WHERE id = 1;
-- another who has seen the same as the first one, and a retry: no row, 412
EXECUTE change(1, :'first', 'D');
EXECUTE change(1, :'first', 'C');
SELECT title FROM natural_docs WHERE id = 1;
-- a list of tags, any version, no condition, a weak tag, no such row
PREPARE changed(int, text, text) AS
	WITH u AS (UPDATE natural_docs d SET title = $3
		WHERE d.id = $1 AND idem_if_match($2, idem_etag(d.*)) RETURNING 1)
	SELECT count(*) AS changed FROM u;
EXECUTE changed(1, '"other", ' || :'etag', 'D');
EXECUTE changed(1, '*', 'E');
EXECUTE changed(1, NULL, 'F');
SELECT 'W/' || idem_etag(d.*) AS weak FROM natural_docs d WHERE id = 1 \gset
EXECUTE changed(1, :'weak', 'G');
EXECUTE changed(2, '*', 'G');
-- a malformed header changes nothing either
EXECUTE changed(1, 'F', 'G');
-- a row that was changed and changed back is what the client has seen
SELECT idem_etag(d.*) AS seen FROM natural_docs d WHERE id = 1 \gset
UPDATE natural_docs SET title = 'G' WHERE id = 1;
EXECUTE changed(1, :'seen', 'H');
UPDATE natural_docs SET title = 'F' WHERE id = 1;
EXECUTE changed(1, :'seen', 'H');
-- DELETE
DELETE FROM natural_docs d WHERE d.id = 1 AND idem_if_match(:'seen', idem_etag(d.*));
SELECT idem_etag(d.*) AS seen FROM natural_docs d WHERE id = 1 \gset
DELETE FROM natural_docs d WHERE d.id = 1 AND idem_if_match(:'seen', idem_etag(d.*)) RETURNING d.*;

-- With a key, a retry of a change that went through gets its answer, not 412:
-- claim, change and result in one statement, both answers stored
INSERT INTO natural_docs VALUES (2, 'A', 'a');
PREPARE change_once(text, int, text, text, text) AS
	WITH c AS MATERIALIZED (SELECT b AS claim, b.*, $2 AS id, $3 AS if_match, $4 AS title FROM idem_begin(idem_parse_key($1), 'PATCH /docs',
				idem_hash(jsonb_build_array($2, $3, $4)), tenant => $5) b),
		 u AS (UPDATE natural_docs d SET title = c.title
			FROM c WHERE c.proceed AND d.id = c.id AND idem_if_match(c.if_match, idem_etag(d.*)) RETURNING d.title),
		 f AS MATERIALIZED (SELECT a.status, a.response, idem_finish(idem_parse_key($1), a.response, a.status, route => 'PATCH /docs', tenant => $5)
			FROM c, LATERAL (SELECT CASE WHEN count(*) = 1 THEN 200 ELSE 412 END AS status,
				jsonb_build_object('title', max(u.title)) AS response FROM u) a
			WHERE c.proceed)
	SELECT c.outcome, coalesce(f.status, c.status) AS status, coalesce(f.response, c.response, idem_problem(c.claim)) AS answer
	FROM c LEFT JOIN f ON true;
SELECT idem_etag(d.*) AS seen FROM natural_docs d WHERE id = 2 \gset
EXECUTE change_once('"p1"', 2, :'seen', 'B', 'alice');
EXECUTE change_once('p1', 2, :'seen', 'B', 'alice');
EXECUTE change_once('"p2"', 2, :'seen', 'C', 'alice');
EXECUTE change_once('"p2"', 2, :'seen', 'C', 'alice');
EXECUTE change_once('"p2"', 2, '*', 'C', 'alice');
-- another request under the key, whose condition would be an error, as would
-- be its title
ALTER TABLE natural_docs ALTER title TYPE varchar(3);
SET plan_cache_mode = force_custom_plan;
EXECUTE change_once('"p2"', 2, 'no tag', 'C', 'alice');
EXECUTE change_once('"p2"', 2, '*', 'too long', 'alice');
SET plan_cache_mode = force_generic_plan;
EXECUTE change_once('"p2"', 2, 'no tag', 'C', 'alice');
EXECUTE change_once('"p2"', 2, '*', 'too long', 'alice');
RESET plan_cache_mode;
SELECT title FROM natural_docs WHERE id = 2;

--
-- A consumer that keeps the newest state: a version guard
--
CREATE TABLE natural_stock (item text PRIMARY KEY, version int NOT NULL, quantity int NOT NULL, gone bool NOT NULL);
PREPARE consume(text, int, int, bool) AS
	INSERT INTO natural_stock AS s (item, version, quantity, gone) VALUES ($1, $2, $3, $4)
	ON CONFLICT (item) DO UPDATE SET version = EXCLUDED.version, quantity = EXCLUDED.quantity, gone = EXCLUDED.gone
	WHERE s.version < EXCLUDED.version
	RETURNING version;
EXECUTE consume('apple', 2, 20, false);
-- the same, and a late older one: no row
EXECUTE consume('apple', 2, 20, false);
EXECUTE consume('apple', 1, 10, false);
SELECT * FROM natural_stock;
EXECUTE consume('apple', 3, 30, false);
-- a deletion is a version too, or an older message would undo it
EXECUTE consume('apple', 4, 0, true);
EXECUTE consume('apple', 3, 30, false);
SELECT * FROM natural_stock;
-- three messages, in every order, up to three times each: always the same
CREATE FUNCTION consume(n int) RETURNS void LANGUAGE sql AS $$
	INSERT INTO natural_stock AS s VALUES ('pear', n, n * 10, n = 3)
	ON CONFLICT (item) DO UPDATE SET version = EXCLUDED.version, quantity = EXCLUDED.quantity, gone = EXCLUDED.gone
	WHERE s.version < EXCLUDED.version;
$$;
CREATE FUNCTION after_messages(versions int[]) RETURNS SETOF natural_stock LANGUAGE plpgsql AS $$
BEGIN
	DELETE FROM natural_stock;
	PERFORM consume(v) FROM unnest(versions) WITH ORDINALITY u (v, n) ORDER BY n;
	RETURN QUERY SELECT * FROM natural_stock;
END $$;
SELECT s.*, count(*) AS orders
FROM generate_series(1, 3) a, generate_series(1, 3) b, generate_series(1, 3) c, generate_series(1, 3) d, generate_series(1, 3) e,
	after_messages(ARRAY[a, b, c, d, e]) s
WHERE ARRAY[a, b, c, d, e] @> ARRAY[1, 2, 3]
GROUP BY s.item, s.version, s.quantity, s.gone;

DEALLOCATE ALL;
DROP FUNCTION after_messages(int[]), consume(int);
DROP TABLE natural_payments, natural_docs, natural_stock;
DELETE FROM idempotency_keys;
