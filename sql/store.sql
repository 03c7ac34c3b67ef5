--
-- STORE
-- idem_create_table makes a store that is like the default one in every way;
-- claims in several stores do not meet; further indexes on a store are kept
-- up to date by rows that are written below the executor.
--
CREATE SCHEMA billing;
SELECT idem_create_table('billing.idempotency_keys');
SELECT idem_create_table('regress_store');
SELECT idem_create_table('"Odd ""name"", with. dots"');
SELECT idem_create_table('billing."; DROP TABLE x; --"');
-- the name may be unqualified: the first schema of the path
SET search_path = billing, public;
SELECT idem_create_table('here');
RESET search_path;

-- What a store is, apart from its name
CREATE FUNCTION describe(rel regclass) RETURNS SETOF text LANGUAGE sql AS $$
	SELECT format('table %s %s %s %s', relkind, relpersistence, reloftype::regtype, reloptions)
	FROM pg_class WHERE oid = rel
	UNION ALL
	SELECT format('column %s %s %s %s %s %s', attnum, attname, format_type(atttypid, atttypmod),
		attnotnull, attcollation::regcollation, attstorage)
	FROM pg_attribute WHERE attrelid = rel AND attnum > 0
	UNION ALL
	SELECT format('index %s %s %s %s %s %s', (SELECT array_agg(attname ORDER BY n)
			FROM unnest(indkey) WITH ORDINALITY AS k (i, n), pg_attribute
			WHERE attrelid = rel AND attnum = i), indisprimary, indisunique, indimmediate,
		(SELECT amname FROM pg_am WHERE oid = relam), reloptions)
	FROM pg_index JOIN pg_class ON oid = indexrelid WHERE indrelid = rel
	UNION ALL
	SELECT format('constraint %s %s %s', contype, conkey, condeferrable)
	FROM pg_constraint WHERE conrelid = rel
$$;
SELECT d FROM describe('idempotency_keys') d WHERE d !~ '^(column|constraint)' ORDER BY d COLLATE "C";
SELECT attname FROM pg_attribute WHERE attrelid = 'idempotency_keys'::regclass
	AND attnotnull AND attnum > 0 ORDER BY attname COLLATE "C";
-- no differences
SELECT s, d FROM unnest('{billing.idempotency_keys, regress_store, billing.here,
	"\"Odd \"\"name\"\", with. dots\"", "billing.\"; DROP TABLE x; --\""}'::text[]) s,
	LATERAL ((SELECT * FROM describe('idempotency_keys') EXCEPT ALL SELECT * FROM describe(s::regclass))
		UNION ALL
		(SELECT * FROM describe(s::regclass) EXCEPT ALL SELECT * FROM describe('idempotency_keys'))) x (d);
DROP FUNCTION describe;
-- it belongs to the caller, who may do what an owner may
SELECT relowner::regrole = current_user::regrole AS mine FROM pg_class WHERE oid = 'regress_store'::regclass;

\set SHOW_CONTEXT never
-- Refused: temporary, there already, no such schema, no name
SELECT idem_create_table('pg_temp.t');
SELECT idem_create_table('regress_store');
SELECT idem_create_table('nowhere.t');
SELECT idem_create_table('a.b.c');
SELECT idem_create_table('');
SELECT idem_create_table('a b');
SELECT idem_create_table(NULL) IS NULL AS nothing;
BEGIN READ ONLY;
SELECT idem_create_table('regress_read_only');
ROLLBACK;
-- undone with the transaction, and then made again
BEGIN;
SELECT idem_create_table('regress_undone');
SELECT outcome FROM idem_begin('k', 'r', '\x01', store => 'regress_undone');
SELECT idem_finish('k', '1', store => 'regress_undone');
SELECT outcome FROM idem_begin('k', 'r', '\x01', store => 'regress_undone');
ROLLBACK;
SELECT idem_create_table('regress_undone');
SELECT outcome FROM idem_begin('k', 'r', '\x01', store => 'regress_undone');
-- TRUNCATE, REINDEX and CLUSTER change the files under a backend
TRUNCATE regress_undone;
SELECT outcome FROM idem_begin('k', 'r', '\x01', store => 'regress_undone');
REINDEX TABLE regress_undone;
SELECT outcome FROM idem_begin('k', 'r', '\x01', store => 'regress_undone');
REINDEX TABLE CONCURRENTLY regress_undone;
SELECT outcome FROM idem_begin('k', 'r', '\x01', store => 'regress_undone');
CLUSTER regress_undone USING regress_undone_pkey;
SELECT outcome FROM idem_begin('k', 'r', '\x01', store => 'regress_undone');
VACUUM FULL regress_undone;
SELECT idem_finish('k', '1', attempt => 1, store => 'regress_undone');
ALTER TABLE regress_undone RENAME TO regress_renamed;
SELECT outcome FROM idem_begin('k', 'r', '\x01', store => 'regress_renamed');
ALTER TABLE regress_renamed DROP CONSTRAINT regress_undone_pkey;
ALTER TABLE regress_renamed ADD PRIMARY KEY (key, tenant, route);
SELECT outcome FROM idem_begin('k', 'r', '\x01', store => 'regress_renamed');
DROP TABLE regress_renamed;

-- Claims in two stores do not meet
BEGIN;
SELECT outcome FROM idem_begin('k', 'r', '\x01');
SELECT outcome FROM idem_begin('k', 'r', '\x02', store => 'regress_store');
SELECT outcome FROM idem_begin('k', 'r', '\x03', store => 'billing.idempotency_keys');
SELECT outcome FROM idem_begin('k', 'r', '\x04', store => '"Odd ""name"", with. dots"');
SELECT idem_finish('k', '2', store => 'regress_store');
SELECT idem_finish('k', '4', store => '"Odd ""name"", with. dots"');
SELECT idem_finish('k', '1', store => 'idempotency_keys');
COMMIT;
SELECT outcome, response FROM idem_begin('k', 'r', '\x01');
SELECT outcome, response FROM idem_begin('k', 'r', '\x02', store => 'regress_store');
SELECT outcome FROM idem_begin('k', 'r', '\x03', store => 'billing.idempotency_keys');
SELECT outcome, response FROM idem_begin('k', 'r', '\x04', store => '"Odd ""name"", with. dots"');
SELECT (idem_lookup('k', 'r', store => 'regress_store')).response;
SELECT idem_finish('k', '1', attempt => 1, store => 'billing.here');

-- Another owner's store is closed, to those who may use the default one, too
CREATE ROLE regress_idem_app;
SELECT idem_grant('regress_idem_app');
SET ROLE regress_idem_app;
SELECT idem_begin('k', 'r', '\x02', store => 'regress_store');
SELECT idem_lookup('k', 'r', store => 'regress_store');
SELECT idem_finish('k', '1', store => 'regress_store');
-- named explicitly, the default store is the default store
SELECT outcome FROM idem_begin('k', 'r', '\x01', store => 'idempotency_keys');
RESET ROLE;
SELECT idem_revoke('regress_idem_app');
DROP ROLE regress_idem_app;

-- Further indexes: plain, partial, on expressions, and other access methods.
-- Each must know of every row as it is now.
CREATE INDEX regress_status ON regress_store (status);
CREATE INDEX regress_failed ON regress_store (key) WHERE state = 'failed';
CREATE INDEX regress_open ON regress_store (key) WHERE state = 'in_progress';
CREATE INDEX regress_expr ON regress_store (upper(key), (response->>'id'));
CREATE INDEX regress_partial_expr ON regress_store ((response->>'id')) WHERE status = 200;
CREATE INDEX regress_hash ON regress_store USING hash (attempt);
CREATE INDEX regress_gin ON regress_store USING gin (headers);
CREATE INDEX regress_brin ON regress_store USING brin (finished_at);
CREATE INDEX regress_incl ON regress_store (route) INCLUDE (state);
TRUNCATE regress_store;
DO $$
DECLARE st text := 'regress_store'; s int;
BEGIN
	FOR i IN 1..300 LOOP
		-- five kinds: in progress, completed, failed, failed and resumed, undone
		IF i % 5 = 4 THEN
			BEGIN
				PERFORM idem_begin('k' || i, 'r', '\x01', store => st::regclass);
				PERFORM idem_finish('k' || i, '{"id": "undone"}', 200, '{"etag": "undone"}', store => st::regclass);
				RAISE EXCEPTION 'undo';
			EXCEPTION WHEN raise_exception THEN CONTINUE;
			END;
		END IF;
		PERFORM idem_begin('k' || i, 'r', '\x01', store => st::regclass);
		CONTINUE WHEN i % 5 = 0;
		s := CASE i % 5 WHEN 1 THEN 200 ELSE 500 END;
		PERFORM idem_finish('k' || i, jsonb_build_object('id', i), s,
			jsonb_build_object('etag', i), store => st::regclass);
	END LOOP;
END $$;
DO $$
BEGIN
	FOR i IN 1..300 LOOP
		CONTINUE WHEN i % 5 <> 3;
		PERFORM idem_begin('k' || i, 'r', '\x01', store => 'regress_store');
		CONTINUE WHEN i % 2 = 0;
		PERFORM idem_finish('k' || i, jsonb_build_object('id', 'again' || i), 200,
			jsonb_build_object('etag', 'again'), store => 'regress_store');
	END LOOP;
END $$;
-- what is there
SELECT state, attempt, count(*) FROM regress_store GROUP BY 1, 2 ORDER BY 1, 2;
-- what each index finds, and that it is the index that was asked
CREATE FUNCTION by_index(index text, condition text) RETURNS TABLE (seqscan bigint, by_index bigint, used bool)
LANGUAGE plpgsql SET enable_indexonlyscan = off AS $$
DECLARE line text; q text := 'SELECT count(*) FROM regress_store WHERE ' || condition;
BEGIN
	SET LOCAL enable_seqscan = on; SET LOCAL enable_indexscan = off; SET LOCAL enable_bitmapscan = off;
	EXECUTE q INTO seqscan;
	SET LOCAL enable_seqscan = off; SET LOCAL enable_indexscan = on; SET LOCAL enable_bitmapscan = on;
	EXECUTE q INTO by_index;
	used := false;
	FOR line IN EXECUTE 'EXPLAIN (COSTS OFF) ' || q LOOP
		used := used OR line LIKE '%' || index || '%';
	END LOOP;
	RETURN NEXT;
END $$;
SELECT i, b.*
FROM (VALUES ('regress_status', 'status >= 200 AND status < 300'), ('regress_status', 'status = 500'),
	('regress_status', 'status IS NULL'),
	('regress_failed', $$state = 'failed' AND key >= 'k'$$),
	('regress_open', $$state = 'in_progress' AND key >= 'k'$$),
	('regress_expr', $$upper(key) = 'K3' AND response->>'id' = 'again3'$$),
	('regress_expr', $$upper(key) >= 'K'$$),
	('regress_partial_expr', $$status = 200 AND response->>'id' >= 'again'$$),
	('regress_hash', 'attempt = 1'), ('regress_hash', 'attempt = 2'),
	('regress_gin', $$headers @> '{"etag": "again"}'$$),
	('regress_gin', $$headers @> '{"etag": 1}'$$),
	('regress_brin', $$finished_at > '2001-01-01'$$),
	('regress_incl', $$route = 'r'$$),
	('regress_store_expires_at_idx', $$expires_at > '2001-01-01'$$),
	('regress_store_pkey', $$key >= 'k'$$)) v (i, c), by_index(i, c) b;
DROP FUNCTION by_index;
-- an index that is not ready, as CREATE INDEX CONCURRENTLY leaves one behind
-- when it fails, is not in the way
CREATE INDEX CONCURRENTLY regress_broken ON regress_store ((1 / (status - 500)));
SELECT indisvalid FROM pg_index WHERE indexrelid = 'regress_broken'::regclass;
DROP INDEX regress_broken;
-- a second unique index on the key, as REINDEX CONCURRENTLY has it for a time
CREATE UNIQUE INDEX regress_second ON regress_store (key, tenant, route);
SELECT outcome FROM idem_begin('k1', 'r', '\x01', store => 'regress_store');
SELECT outcome FROM idem_begin('new', 'r', '\x01', store => 'regress_store');
SELECT idem_finish('new', '1', attempt => 1, store => 'regress_store');
SELECT outcome FROM idem_begin('new', 'r', '\x01', store => 'regress_store');

-- A page that is full: with many claims open at once, finish is no longer HOT
-- and writes index entries
BEGIN;
SELECT count(*) FROM generate_series(1, 500) i, idem_begin('full' || i, 'r', '\x01') c WHERE c.outcome = 'started';
SELECT count(idem_finish('full' || i, to_jsonb(repeat('x', 200) || i))) FROM generate_series(1, 500) i;
COMMIT;
SELECT count(*) FROM generate_series(1, 500) i, idem_begin('full' || i, 'r', '\x01') c
WHERE c.outcome = 'replayed' AND c.response = to_jsonb(repeat('x', 200) || i);
SET enable_seqscan = off;
SELECT count(*) FROM idempotency_keys WHERE key LIKE 'full%';
SELECT count(*) FROM idempotency_keys WHERE expires_at > '2001-01-01' AND key LIKE 'full%';
RESET enable_seqscan;
-- one connection, one key after the other: all of them HOT
CREATE FUNCTION hot_share(n int) RETURNS numeric LANGUAGE plpgsql AS $$
DECLARE before_upd bigint; before_hot bigint; after_upd bigint; after_hot bigint;
BEGIN
	SELECT n_tup_upd, n_tup_hot_upd INTO before_upd, before_hot
	FROM pg_stat_xact_user_tables WHERE relid = 'idempotency_keys'::regclass;
	FOR i IN 1..n LOOP
		PERFORM idem_begin('hot' || i, 'r', '\x01');
		PERFORM idem_finish('hot' || i, '{"id": 1}');
	END LOOP;
	SELECT n_tup_upd, n_tup_hot_upd INTO after_upd, after_hot
	FROM pg_stat_xact_user_tables WHERE relid = 'idempotency_keys'::regclass;
	RETURN round((after_hot - before_hot)::numeric / nullif(after_upd - before_upd, 0), 2);
END $$;
SELECT hot_share(500) >= 0.95 AS hot;
DROP FUNCTION hot_share;

-- ALTER TYPE changes all stores at once; a library that does not know the new
-- type says so, rather than write rows that are too short
BEGIN;
ALTER TYPE idempotency_key ADD ATTRIBUTE extra text CASCADE;
SELECT count(*) FROM pg_attribute WHERE attname = 'extra' AND attrelid IN ('idempotency_keys'::regclass, 'regress_store'::regclass);
SAVEPOINT s;
SELECT outcome FROM idem_begin('extra', 'r', '\x01');
ROLLBACK TO s;
SELECT idem_finish('k', '1');
ROLLBACK;
SELECT outcome FROM idem_begin('k', 'r', '\x01');

-- DROP and CREATE under the same name is another table
DROP TABLE regress_store;
SELECT idem_create_table('regress_store');
SELECT outcome FROM idem_begin('k1', 'r', '\x01', store => 'regress_store');

SET client_min_messages = warning;
DROP SCHEMA billing CASCADE;
DROP TABLE regress_store, "Odd ""name"", with. dots";
RESET client_min_messages;
DELETE FROM idempotency_keys;

-- No code of the owner's runs while a row is inserted: indexes may use the
-- server's own functions and types only
SELECT idem_create_table('regress_coded');
CREATE FUNCTION coded(text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS
	'BEGIN RAISE ''called''; END';
CREATE DOMAIN coded_text AS text CHECK (coded(VALUE) IS NOT NULL);
\set VERBOSITY terse
CREATE INDEX regress_coded_i ON regress_coded (lower(coded(key)));
SELECT outcome FROM idem_begin('k', 'r', NULL, store => 'regress_coded');
DROP INDEX regress_coded_i;
CREATE INDEX regress_coded_i ON regress_coded (step) WHERE coded(step) > 'x';
SELECT outcome FROM idem_begin('k', 'r', NULL, store => 'regress_coded');
DROP INDEX regress_coded_i;
CREATE INDEX regress_coded_i ON regress_coded ((step::coded_text));
SELECT outcome FROM idem_begin('k', 'r', NULL, store => 'regress_coded');
DROP INDEX regress_coded_i;
CREATE INDEX regress_coded_i ON regress_coded (lower(step), (response->>'id')) WHERE state = 'in_progress';
SELECT outcome FROM idem_begin('k', 'r', NULL, store => 'regress_coded');
DROP INDEX regress_coded_i;
-- the server's functions for a range call those of its type
CREATE FUNCTION coded_diff(text, text) RETURNS float8 IMMUTABLE LANGUAGE sql AS 'SELECT 1.0';
CREATE TYPE coded_range AS RANGE (subtype = text, subtype_diff = coded_diff);
CREATE INDEX regress_coded_i ON regress_coded USING gist
	((CASE WHEN key > 'm' THEN '[m,z)'::coded_range ELSE '[a,c)' END));
SELECT outcome FROM idem_begin('k', 'r', NULL, store => 'regress_coded');
DROP INDEX regress_coded_i;
CREATE INDEX regress_coded_i ON regress_coded (key) WHERE '[a,m)'::coded_range @> key;
SELECT outcome FROM idem_begin('k', 'r', NULL, store => 'regress_coded');
DROP INDEX regress_coded_i;
CREATE INDEX regress_coded_i ON regress_coded (key)
	WHERE state IN ('in_progress', 'failed') AND int4range(attempt, NULL) @> 2;
SELECT outcome FROM idem_begin('k2', 'r', NULL, store => 'regress_coded');
DROP INDEX regress_coded_i;
-- nor while the store is looked at: the call of a constant is not made
CREATE OR REPLACE FUNCTION coded(text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS
	'BEGIN RETURN $1; END';
CREATE INDEX regress_coded_i ON regress_coded ((step || coded('x')));
CREATE OR REPLACE FUNCTION coded(text) RETURNS text IMMUTABLE LANGUAGE plpgsql AS
	'BEGIN RAISE ''called''; END';
\c -
SELECT outcome FROM idem_begin('k', 'r', NULL, store => 'regress_coded');
\set VERBOSITY default
DROP TABLE regress_coded;
DROP DOMAIN coded_text;
DROP TYPE coded_range;
DROP FUNCTION coded, coded_diff;

-- A default store that is none for a while is found again
ALTER TABLE idempotency_keys NOT OF;
SELECT outcome FROM idem_begin('back', 'r', NULL);
ALTER TABLE idempotency_keys OF idempotency_key;
SELECT outcome FROM idem_begin('back', 'r', NULL);
DELETE FROM idempotency_keys;

-- A second unique index is one on the key only if it compares byte by byte
SELECT idem_create_table('regress_collated');
CREATE UNIQUE INDEX regress_collated_i ON regress_collated (key COLLATE "POSIX", tenant, route);
\set VERBOSITY terse
SELECT outcome FROM idem_begin('k', 'r', NULL, store => 'regress_collated');
\set VERBOSITY default
DROP INDEX regress_collated_i;
SELECT outcome FROM idem_begin('k', 'r', NULL, store => 'regress_collated');
DROP TABLE regress_collated;

-- A store that is published needs a replica identity, or its rows could be
-- inserted, but never finished
SELECT idem_create_table('regress_published');
SET client_min_messages = error;
CREATE PUBLICATION regress_publication FOR TABLE regress_published;
RESET client_min_messages;
SELECT outcome FROM idem_begin('k', 'r', NULL, store => 'regress_published');
ALTER TABLE regress_published REPLICA IDENTITY NOTHING;
SELECT outcome FROM idem_begin('l', 'r', NULL, store => 'regress_published');
ALTER TABLE regress_published REPLICA IDENTITY FULL;
SELECT outcome FROM idem_begin('l', 'r', NULL, store => 'regress_published');
ALTER TABLE regress_published REPLICA IDENTITY DEFAULT;
\set VERBOSITY terse
ALTER PUBLICATION regress_publication SET TABLE regress_published WHERE (step IS NULL);
SELECT outcome FROM idem_begin('m', 'r', NULL, store => 'regress_published');
ALTER PUBLICATION regress_publication SET TABLE regress_published (key, route);
SELECT outcome FROM idem_begin('m', 'r', NULL, store => 'regress_published');
ALTER PUBLICATION regress_publication SET (publish = 'insert');
SELECT outcome FROM idem_begin('m', 'r', NULL, store => 'regress_published');
\set VERBOSITY default
DROP PUBLICATION regress_publication;
DROP TABLE regress_published;
