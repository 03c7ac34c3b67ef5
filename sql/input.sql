--
-- INPUT
-- Bad input gives a clear error with its SQLSTATE; nothing is lost, and the
-- session goes on.  What a store may be, and what is honoured or refused on
-- one.
--
-- Most errors are shown as SQLSTATE only, as that is what clients look at.
--
BEGIN;
SELECT outcome FROM idem_begin('before', 'r', '\x01');
SELECT idem_finish('before', '1');
COMMIT;

-- NULL: 22004
\set VERBOSITY sqlstate
SELECT idem_begin(NULL, 'r', NULL);
SELECT idem_begin('k', NULL, NULL);
SELECT idem_finish(NULL, '1');
SELECT idem_finish('k', '1', NULL);
SELECT idem_lookup(NULL, 'r');
SELECT idem_lookup('k', NULL);
-- empty, too long, control characters: 22023
SELECT idem_begin('', 'r', NULL);
SELECT idem_begin('k', '', NULL);
SELECT idem_finish('', '1');
SELECT idem_finish('k', '1', route => '');
SELECT idem_lookup('', 'r');
SELECT idem_begin(repeat('k', 256), 'r', NULL);
SELECT idem_begin('k', repeat('r', 256), NULL);
SELECT idem_begin('k', 'r', NULL, tenant => repeat('t', 256));
SELECT idem_finish(repeat('k', 256), '1');
SELECT idem_lookup('k', repeat('r', 256));
SELECT idem_begin(repeat('k', 100000), 'r', NULL);
SELECT idem_begin('k', 'r', decode(repeat('00', 256), 'hex'));
SET pg_idem.tenant = E'a\tb';
SELECT idem_begin('k', 'r', NULL);
RESET pg_idem.tenant;
-- each control character, at each place, in each argument
SELECT sqlstate_of(format('SELECT idem_begin(%L, %L, NULL, %L)', arg[1], arg[2], arg[3])),
	count(*)
FROM (SELECT i FROM generate_series(1, 31) i UNION ALL VALUES (127)) c,
	unnest(ARRAY['%s', '%sx', 'x%s', 'x%sx']) AS pattern,
	generate_series(1, 3) pos,
	LATERAL (SELECT ARRAY(SELECT CASE j WHEN pos THEN format(pattern, chr(i)) ELSE 'x' END
		FROM generate_series(1, 3) j) AS arg) a
GROUP BY 1;
-- everything else in ASCII is accepted, and 255 bytes of it
SELECT sqlstate_of(format('SELECT idem_begin(%L, %L, NULL, %L)', arg, arg, arg)), count(*)
FROM (SELECT chr(i) AS arg FROM generate_series(32, 126) i
	UNION ALL VALUES ('  '), (' x '), (repeat('k', 255))) a
GROUP BY 1;
SELECT count(*), max(octet_length(key)), max(octet_length(tenant)), max(octet_length(route))
FROM idempotency_keys WHERE key <> 'before';
DELETE FROM idempotency_keys WHERE key <> 'before';
-- an empty tenant and an empty hash are values
SELECT outcome FROM idem_begin('empty', 'r', '', tenant => '');

-- intervals: 22023 where not positive, 22008 where the time is out of range
SELECT idem_begin('k', 'r', NULL, ttl => '0');
SELECT idem_begin('k', 'r', NULL, ttl => '-1 hour');
SELECT idem_begin('k', 'r', NULL, ttl => '1 month -40 days');
SELECT idem_begin('k', 'r', NULL, lease => '0');
SELECT idem_begin('k', 'r', NULL, lease => '-1 second');
SELECT idem_begin('k', 'r', NULL, wait => '-1 second');
SELECT idem_begin('k', 'r', NULL, ttl => '1000000 years');
SELECT idem_begin('k', 'r', NULL, ttl => '2562047788 hours');
SELECT idem_begin('k', 'r', NULL, lease => '1000000 years');
SELECT idem_begin('k', 'r', NULL, wait => '1000000 years');
BEGIN;
SELECT outcome FROM idem_begin('span', 'r', NULL);
SAVEPOINT s;
SELECT idem_finish('span', '1', ttl => '0');
ROLLBACK TO s;
SELECT idem_finish('span', '1', ttl => '-1 hour');
ROLLBACK TO s;
SELECT idem_finish('span', '1', ttl => '1000000 years');
ROLLBACK TO s;
SELECT idem_finish('span', '1', 99);
ROLLBACK TO s;
SELECT idem_finish('span', '1', 600);
ROLLBACK TO s;
SELECT idem_finish('span', '1', -200);
ROLLBACK TO s;
SELECT idem_finish('span', '1', headers => '[]');
ROLLBACK TO s;
SELECT outcome FROM idem_begin('span', 'r', NULL);
SELECT idem_finish('span', '1', ttl => '1 microsecond');
COMMIT;
-- a calendar's spans are accepted
SELECT outcome FROM idem_begin('calendar', 'r', NULL, ttl => '1 year 2 months 3 days 04:05:06', lease => '1 day');
-- bad settings
SET pg_idem.ttl = 0;
SET pg_idem.lease = '-1s';
SET pg_idem.max_attempts = 0;
SET pg_idem.keep = 'some';
SET pg_idem.on_lost_lease = 'give up';
SET pg_idem.replay_headers = 'a b, c:d';
SET pg_idem.max_response_size = -1;
SET pg_idem.expire_naptime = '1s';
\set VERBOSITY default

-- the messages name the argument and its limit
SELECT idem_begin(NULL, 'r', NULL);
SELECT idem_begin('', 'r', NULL);
SELECT idem_begin('k', repeat('r', 256), NULL);
SELECT idem_begin(E'a\nb', 'r', NULL);
SELECT idem_begin('k', 'r', NULL, tenant => E'xyz\177');
SELECT idem_begin('k', 'r', decode(repeat('00', 256), 'hex'));
SELECT idem_begin('k', 'r', NULL, ttl => '0');
SELECT idem_begin('k', 'r', NULL, lease => '-1s');
SELECT idem_begin('k', 'r', NULL, wait => '-1s');
SELECT idem_finish('k', '1', 42);
SELECT idem_finish('k', '1', headers => '"x"');

-- read-only transactions: the server's own error, 25006
BEGIN READ ONLY;
SELECT idem_begin('k', 'r', NULL);
ROLLBACK;
\set VERBOSITY sqlstate
BEGIN READ ONLY;
SELECT idem_begin('before', 'r', '\x01');
ROLLBACK;
BEGIN READ ONLY;
SELECT idem_finish('k', '1');
ROLLBACK;
BEGIN READ ONLY;
SELECT idem_expire();
ROLLBACK;

-- What a store may be.  Each of these is something else.
CREATE VIEW bad_view AS SELECT * FROM idempotency_keys;
CREATE MATERIALIZED VIEW bad_matview AS SELECT * FROM idempotency_keys;
CREATE SEQUENCE bad_sequence;
CREATE TEMP TABLE bad_temp OF idempotency_key (PRIMARY KEY (key, tenant, route));
CREATE UNLOGGED TABLE bad_unlogged OF idempotency_key (PRIMARY KEY (key, tenant, route));
CREATE TABLE bad_partitioned OF idempotency_key (PRIMARY KEY (key, tenant, route))
	PARTITION BY RANGE (key);
CREATE TABLE bad_partition PARTITION OF bad_partitioned DEFAULT;
CREATE TABLE bad_plain (LIKE idempotency_keys INCLUDING ALL);
CREATE FOREIGN DATA WRAPPER regress_idem_fdw;
CREATE SERVER regress_idem_server FOREIGN DATA WRAPPER regress_idem_fdw;
CREATE FOREIGN TABLE bad_foreign (key text) SERVER regress_idem_server;
CREATE TYPE bad_composite AS (key text);
CREATE TABLE bad_no_pkey OF idempotency_key;
CREATE TABLE bad_unique OF idempotency_key (UNIQUE (key, tenant, route));
CREATE TABLE bad_deferrable OF idempotency_key (PRIMARY KEY (key, tenant, route) DEFERRABLE);
CREATE TABLE bad_order OF idempotency_key (PRIMARY KEY (tenant, key, route));
CREATE TABLE bad_fewer OF idempotency_key (PRIMARY KEY (key, tenant));
CREATE TABLE bad_more OF idempotency_key (PRIMARY KEY (key, tenant, route, attempt));
CREATE TABLE bad_check OF idempotency_key (PRIMARY KEY (key, tenant, route), CHECK (attempt < 5));
CREATE TABLE bad_unique_more OF idempotency_key (PRIMARY KEY (key, tenant, route));
CREATE UNIQUE INDEX ON bad_unique_more (request_hash);
CREATE TABLE bad_unique_partial OF idempotency_key (PRIMARY KEY (key, tenant, route));
CREATE UNIQUE INDEX ON bad_unique_partial (key, tenant, route) WHERE attempt = 1;
CREATE TABLE bad_exclude OF idempotency_key (PRIMARY KEY (key, tenant, route),
	EXCLUDE USING btree (key WITH =));
CREATE TABLE bad_fkey OF idempotency_key (PRIMARY KEY (key, tenant, route));
CREATE TABLE regress_tenants (tenant text COLLATE "C" PRIMARY KEY);
ALTER TABLE bad_fkey ADD FOREIGN KEY (tenant) REFERENCES regress_tenants;
CREATE FUNCTION bad_trigger() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE TABLE bad_insert_trigger OF idempotency_key (PRIMARY KEY (key, tenant, route));
CREATE TRIGGER t BEFORE INSERT ON bad_insert_trigger FOR EACH ROW EXECUTE FUNCTION bad_trigger();
CREATE TABLE bad_update_trigger OF idempotency_key (PRIMARY KEY (key, tenant, route));
CREATE TRIGGER t AFTER UPDATE ON bad_update_trigger FOR EACH STATEMENT EXECUTE FUNCTION bad_trigger();
CREATE TABLE bad_rule OF idempotency_key (PRIMARY KEY (key, tenant, route));
CREATE RULE r AS ON INSERT TO bad_rule DO INSTEAD NOTHING;
CREATE TABLE bad_rls OF idempotency_key (PRIMARY KEY (key, tenant, route));
ALTER TABLE bad_rls ENABLE ROW LEVEL SECURITY;
ALTER TABLE bad_rls FORCE ROW LEVEL SECURITY;
-- every function refuses them, and nothing is written to any of them
SELECT c.relname,
	sqlstate_of(format('SELECT idem_begin(''k'', ''r'', NULL, store => %L)', c.oid::regclass)) AS "begin",
	sqlstate_of(format('SELECT idem_finish(''k'', ''1'', store => %L)', c.oid::regclass)) AS finish,
	sqlstate_of(format('SELECT idem_lookup(''k'', ''r'', store => %L)', c.oid::regclass)) AS lookup
FROM pg_class c WHERE relname LIKE 'bad\_%' AND relkind NOT IN ('i', 'I')
ORDER BY relname COLLATE "C";
SELECT sqlstate_of('SELECT idem_begin(''k'', ''r'', NULL, store => ''pg_class'')') AS catalog,
	sqlstate_of('SELECT idem_begin(''k'', ''r'', NULL, store => ''idempotency_keys_pkey'')') AS index,
	sqlstate_of('SELECT idem_begin(''k'', ''r'', NULL, store => ''no_such_table'')') AS no_name,
	sqlstate_of('SELECT idem_begin(''k'', ''r'', NULL, store => 999999::oid::regclass)') AS no_oid,
	-- nothing, given explicitly, is not the default store
	sqlstate_of('SELECT idem_begin(''k'', ''r'', NULL, store => 0::oid::regclass)') AS zero,
	sqlstate_of('SELECT idem_finish(''k'', ''1'', store => 0::oid::regclass)') AS zero_finish,
	sqlstate_of('SELECT idem_lookup(''k'', ''r'', store => 0::oid::regclass)') AS zero_lookup;
\set VERBOSITY default
SELECT idem_begin('k', 'r', NULL, store => 'bad_view');
SELECT idem_begin('k', 'r', NULL, store => 'bad_unlogged');
SELECT idem_begin('k', 'r', NULL, store => 'bad_plain');
SELECT idem_begin('k', 'r', NULL, store => 'bad_no_pkey');
SELECT idem_begin('k', 'r', NULL, store => 'bad_insert_trigger');
SELECT idem_begin('k', 'r', NULL, store => 'bad_fkey');
SELECT idem_begin('k', 'r', NULL, store => 'bad_check');
SELECT idem_begin('k', 'r', NULL, store => 'bad_rls');
SELECT idem_begin('k', 'r', NULL, store => 'bad_rule');
SELECT idem_begin('k', 'r', NULL, store => 'bad_unique_more');

-- What was refused is accepted when its cause is gone, and the other way
-- round: a backend does not go by what it once found out
DROP TRIGGER t ON bad_insert_trigger;
SELECT outcome FROM idem_begin('k', 'r', NULL, store => 'bad_insert_trigger');
CREATE TRIGGER t BEFORE UPDATE ON bad_insert_trigger FOR EACH ROW EXECUTE FUNCTION bad_trigger();
\set VERBOSITY sqlstate
SELECT idem_finish('k', '1', attempt => 1, store => 'bad_insert_trigger');
ALTER TABLE bad_insert_trigger DISABLE TRIGGER t;
SELECT idem_finish('k', '1', attempt => 1, store => 'bad_insert_trigger');
SELECT state FROM bad_insert_trigger;
ALTER TABLE bad_rls NO FORCE ROW LEVEL SECURITY;
SELECT outcome FROM idem_begin('k', 'r', NULL, store => 'bad_rls');
DROP RULE r ON bad_rule;
SELECT outcome FROM idem_begin('k', 'r', NULL, store => 'bad_rule');
ALTER TABLE bad_check DROP CONSTRAINT bad_check_attempt_check;
SELECT outcome FROM idem_begin('k', 'r', NULL, store => 'bad_check');
ALTER TABLE bad_check ADD CHECK (attempt < 5);
SELECT outcome FROM idem_begin('k2', 'r', NULL, store => 'bad_check');
TRUNCATE bad_check;
ALTER TABLE bad_check DROP CONSTRAINT bad_check_attempt_check, ALTER response SET NOT NULL;
SELECT outcome FROM idem_begin('k3', 'r', NULL, store => 'bad_check');
ALTER TABLE bad_check ALTER response DROP NOT NULL, ALTER key SET NOT NULL;
SELECT outcome FROM idem_begin('k4', 'r', NULL, store => 'bad_check');
ALTER TABLE bad_no_pkey ADD PRIMARY KEY (key, tenant, route);
SELECT outcome FROM idem_begin('k', 'r', NULL, store => 'bad_no_pkey');
ALTER TABLE bad_no_pkey NOT OF;
SELECT outcome FROM idem_begin('k2', 'r', NULL, store => 'bad_no_pkey');
ALTER TABLE bad_unlogged SET LOGGED;
SELECT outcome FROM idem_begin('k', 'r', NULL, store => 'bad_unlogged');
-- a cause that is rolled back was none
BEGIN;
ALTER TABLE bad_unlogged ADD CHECK (attempt < 5);
SELECT outcome FROM idem_begin('k', 'r', NULL, store => 'bad_unlogged');
ROLLBACK;
SELECT outcome FROM idem_begin('k', 'r', NULL, store => 'bad_unlogged');
\set VERBOSITY default

-- A table that inherits from a store has rows of its own, which no primary
-- key decides about
DO $$
BEGIN
	CREATE TABLE bad_child () INHERITS (bad_unlogged);
EXCEPTION WHEN wrong_object_type THEN NULL;
END $$;
SELECT to_regclass('bad_child') IS NULL OR
	sqlstate_of('SELECT idem_begin(''k'', ''r'', NULL, store => ''bad_unlogged'')') <> '00000' AS refused;
DROP TABLE IF EXISTS bad_child;
SELECT outcome FROM idem_begin('k', 'r', NULL, store => 'bad_unlogged');

-- A foreign key to the store and a trigger for DELETE are honoured
SELECT idem_create_table('regress_store');
CREATE TABLE regress_log (key text);
CREATE FUNCTION log_delete() RETURNS trigger LANGUAGE plpgsql SET search_path = public AS
	'BEGIN INSERT INTO regress_log VALUES (old.key); RETURN old; END';
CREATE TRIGGER t AFTER DELETE ON regress_store FOR EACH ROW EXECUTE FUNCTION log_delete();
CREATE TABLE regress_charges (id int, key text COLLATE "C", tenant text COLLATE "C" DEFAULT '',
	route text COLLATE "C" DEFAULT 'r',
	FOREIGN KEY (key, tenant, route) REFERENCES regress_store);
BEGIN;
SELECT outcome FROM idem_begin('k1', 'r', '\x01', store => 'regress_store');
INSERT INTO regress_charges VALUES (1, 'k1');
SELECT idem_finish('k1', '1', 500, store => 'regress_store');
COMMIT;
BEGIN;
SELECT outcome, attempt FROM idem_begin('k1', 'r', '\x01', store => 'regress_store');
SELECT idem_finish('k1', '2', store => 'regress_store');
COMMIT;
INSERT INTO regress_charges VALUES (2, 'k2');
DELETE FROM regress_store;
-- a reclaim keeps the row that is referred to
UPDATE regress_store SET expires_at = '2000-01-01';
SELECT outcome, attempt FROM idem_begin('k1', 'r', '\x02', store => 'regress_store');
SELECT c.id, s.attempt FROM regress_charges c JOIN regress_store s USING (key, tenant, route);
DELETE FROM regress_charges;
DELETE FROM regress_store;
SELECT * FROM regress_log;
DROP TABLE regress_charges, regress_log, regress_store;
DROP FUNCTION log_delete;

-- Nothing was lost
SELECT outcome, response FROM idem_begin('before', 'r', '\x01');
SELECT key, state FROM idempotency_keys ORDER BY key;

SET client_min_messages = warning;
DROP TABLE bad_temp, bad_unlogged, bad_partitioned, bad_plain, bad_no_pkey, bad_unique,
	bad_deferrable, bad_order, bad_fewer, bad_more, bad_check, bad_unique_more,
	bad_unique_partial, bad_exclude, bad_fkey, bad_insert_trigger, bad_update_trigger,
	bad_rule, bad_rls, regress_tenants;
DROP VIEW bad_view;
DROP MATERIALIZED VIEW bad_matview;
DROP SEQUENCE bad_sequence;
DROP TYPE bad_composite;
DROP FOREIGN DATA WRAPPER regress_idem_fdw CASCADE;
DROP FUNCTION bad_trigger;
RESET client_min_messages;
DELETE FROM idempotency_keys;
