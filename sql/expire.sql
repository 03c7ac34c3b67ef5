--
-- EXPIRE
-- The sweep by hand: what may go, in which order, what is kept, and that one
-- key which cannot go holds up nothing.  The background worker runs the same
-- code; its life is tested in test/t.
--
CREATE FUNCTION make_key(k text, state idem_state, expires timestamptz, lease timestamptz DEFAULT NULL)
RETURNS void LANGUAGE sql AS $$
	INSERT INTO idempotency_keys (key, tenant, route, state, attempt, lease_until, status,
		result_dropped, created_at, expires_at)
	VALUES (k, '', 'r', state, 1, lease, CASE WHEN state <> 'in_progress' THEN 200 END,
		false, '1999-01-01', expires)
$$;
CREATE FUNCTION left_over() RETURNS text LANGUAGE sql AS
	$$ SELECT string_agg(key, ' ' ORDER BY key) FROM idempotency_keys $$;

-- what may go
SELECT make_key('completed', 'completed', '2000-01-01'), make_key('failed', 'failed', '2000-01-01'),
	make_key('lost', 'in_progress', '2000-01-01', '2000-01-02'),
	make_key('kept-completed', 'completed', '2200-01-01'), make_key('kept-failed', 'failed', '2200-01-01'),
	make_key('kept-for-ever', 'completed', 'infinity'),
	make_key('kept-leased', 'in_progress', '2000-01-01', '2200-01-01'),
	make_key('kept-lost', 'in_progress', '2200-01-01', '2000-01-01'),
	make_key('kept-no-lease', 'in_progress', '2000-01-01', NULL);
-- nothing unfinished goes while claims are on hold
SET pg_idem.on_lost_lease = 'hold';
BEGIN;
SELECT idem_expire();
SELECT left_over();
ROLLBACK;
RESET pg_idem.on_lost_lease;
-- unfinished ones are reported, in the server's log alone
SET client_min_messages = log;
SELECT idem_expire();
RESET client_min_messages;
SELECT left_over();
SELECT idem_expire();
DELETE FROM idempotency_keys;

-- oldest first, no more than asked for
SELECT make_key('c', 'completed', '2000-01-03'), make_key('a', 'completed', '2000-01-01'),
	make_key('e', 'completed', '2000-01-05'), make_key('b', 'completed', '2000-01-02'),
	make_key('d1', 'completed', '2000-01-04'), make_key('d2', 'completed', '2000-01-04');
SELECT idem_expire(0);
SELECT left_over();
SELECT idem_expire(2);
SELECT left_over();
SELECT idem_expire(2);
SELECT left_over();
SELECT idem_expire(max => 100);
SELECT left_over();
SELECT idem_expire(-1);
SELECT idem_expire(NULL);
-- undone with the transaction
SELECT make_key('undone', 'completed', '2000-01-01');
BEGIN;
SELECT idem_expire();
ROLLBACK;
SELECT left_over();
SELECT idem_expire();

-- a swept key is free, and so is one that is not yet swept
SELECT make_key('free', 'completed', '2000-01-01');
SELECT outcome FROM idem_begin('free', 'r', '\x01');
SELECT idem_expire();
SELECT left_over();
DELETE FROM idempotency_keys;
-- the transaction's own keys
BEGIN;
SELECT outcome FROM idem_begin('own', 'r', '\x01');
SELECT idem_finish('own', '1', ttl => '1 microsecond');
UPDATE idempotency_keys SET expires_at = '2000-01-01';
SELECT idem_expire();
SELECT outcome FROM idem_begin('own', 'r', '\x01');
ROLLBACK;

-- Business rows may refer to keys: those stay, the others go, and the sweep
-- comes past them in every batch (1000 keys by default)
CREATE TABLE regress_charges (key text COLLATE "C", tenant text COLLATE "C" DEFAULT '',
	route text COLLATE "C" DEFAULT 'r',
	CONSTRAINT regress_charges_key FOREIGN KEY (key, tenant, route) REFERENCES idempotency_keys);
INSERT INTO idempotency_keys (key, tenant, route, state, attempt, status, result_dropped, created_at, expires_at)
SELECT to_char(i, 'FM00000'), '', 'r', 'completed', 1, 200, false, '1999-01-01',
	'2000-01-01'::timestamptz + i * interval '1 s'
FROM generate_series(1, 2500) i;
INSERT INTO regress_charges SELECT to_char(i, 'FM00000') FROM generate_series(1, 2500) i WHERE i IN (1, 1000, 1001, 2500);
SET client_min_messages = log;
SELECT idem_expire();
RESET client_min_messages;
SELECT left_over();
-- with a limit, those that cannot go do not count
SELECT make_key('z1', 'completed', '2001-01-01'), make_key('z2', 'completed', '2001-01-01'),
	make_key('z3', 'completed', '2001-01-01');
SELECT idem_expire(2);
SELECT left_over();
DELETE FROM regress_charges WHERE key = '00001';
SELECT idem_expire();
SELECT left_over();
-- By hand, constraints are the caller's affair: where they are deferred, keys
-- stay, and nothing fails at the commit
ALTER TABLE regress_charges ALTER CONSTRAINT regress_charges_key DEFERRABLE INITIALLY DEFERRED;
SELECT make_key('z4', 'completed', '2001-01-01');
BEGIN;
SELECT idem_expire();
COMMIT;
SELECT left_over();
BEGIN;
SET CONSTRAINTS ALL IMMEDIATE;
SELECT idem_expire();
COMMIT;
SELECT left_over();
-- What is deferred stays so, whether there was something to remove or not ...
SELECT make_key('z5', 'completed', '2001-01-01');
BEGIN;
INSERT INTO regress_charges VALUES ('later');
SELECT idem_expire();
SELECT outcome FROM idem_begin('later', 'r', '\x01');
COMMIT;
SELECT left_over();
-- ... and what is immediate, too
BEGIN;
SET CONSTRAINTS ALL IMMEDIATE;
SELECT idem_expire();
INSERT INTO regress_charges VALUES ('never');
ROLLBACK;
DELETE FROM regress_charges;
BEGIN;
SET CONSTRAINTS ALL IMMEDIATE;
SELECT idem_expire();
COMMIT;
-- Constraints may have the same name
CREATE TABLE regress_refunds (key text, tenant text, route text,
	CONSTRAINT regress_charges_key FOREIGN KEY (route, tenant, key) REFERENCES idempotency_keys (route, tenant, key));
CREATE TABLE regress_parts (key varchar(40), tenant name, route text COLLATE "C",
	CONSTRAINT regress_charges_key FOREIGN KEY (key, tenant, route) REFERENCES idempotency_keys) PARTITION BY LIST (key);
CREATE TABLE regress_part PARTITION OF regress_parts DEFAULT;
ALTER TABLE regress_charges ALTER CONSTRAINT regress_charges_key DEFERRABLE INITIALLY IMMEDIATE;
SELECT make_key('s1', 'completed', '2001-01-01'), make_key('s2', 'completed', '2001-01-02'),
	make_key('s3', 'completed', '2001-01-03'), make_key('s4', 'completed', '2001-01-04');
INSERT INTO regress_refunds VALUES ('s1', '', 'r'), (NULL, '', 'r');
INSERT INTO regress_parts VALUES ('s3', '', 'r'), ('s3', '', 'r');
INSERT INTO regress_charges VALUES ('s1');
SET client_min_messages = log;
SELECT idem_expire();
RESET client_min_messages;
SELECT left_over();
DELETE FROM regress_charges;
DROP TABLE regress_refunds, regress_parts;
-- ON DELETE CASCADE and SET NULL are the owner's wish
ALTER TABLE regress_charges DROP CONSTRAINT regress_charges_key;
ALTER TABLE regress_charges ADD FOREIGN KEY (key, tenant, route) REFERENCES idempotency_keys ON DELETE CASCADE;
SELECT make_key('z5', 'completed', '2001-01-01');
INSERT INTO regress_charges VALUES ('z5');
SELECT idem_expire();
SELECT count(*) FROM regress_charges;
DROP TABLE regress_charges;
DELETE FROM idempotency_keys;

-- Only the store's own rows go: a table that inherits from it may have others
-- in the same places
DO $$
BEGIN
	CREATE TABLE regress_child () INHERITS (idempotency_keys);
	INSERT INTO regress_child (key, tenant, route, state, attempt, result_dropped, created_at, expires_at)
	VALUES ('child', '', 'r', 'completed', 1, false, '1999-01-01', '2200-01-01');
EXCEPTION WHEN wrong_object_type THEN NULL;
END $$;
TRUNCATE ONLY idempotency_keys;
SELECT make_key('parent', 'completed', '2000-01-01');
SELECT idem_expire() < 2 AS not_both;
SELECT to_regclass('regress_child') IS NULL OR left_over() LIKE '%child%' AS kept;
DROP TABLE IF EXISTS regress_child;
DELETE FROM idempotency_keys;

-- A trigger for DELETE fires, as the store's owner, who cannot be tricked
CREATE ROLE regress_idem_owner;
CREATE SCHEMA regress_owned AUTHORIZATION regress_idem_owner;
SELECT idem_grant('regress_idem_owner');
GRANT EXECUTE ON FUNCTION idem_create_table TO regress_idem_owner;
SET ROLE regress_idem_owner;
SELECT idem_create_table('regress_owned.keys');
CREATE TABLE regress_owned.log (key text, who name, path text);
CREATE FUNCTION regress_owned.log() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO regress_owned.log VALUES (old.key, current_user, current_setting('search_path'));
	RETURN old;
END $$;
CREATE TRIGGER t BEFORE DELETE ON regress_owned.keys FOR EACH ROW EXECUTE FUNCTION regress_owned.log();
RESET ROLE;
-- several stores in one sweep
SELECT make_key('one', 'completed', '2000-01-01'), make_key('two', 'completed', '2000-01-01');
INSERT INTO regress_owned.keys SELECT * FROM idempotency_keys;
SELECT idem_expire();
SELECT left_over();
SELECT * FROM regress_owned.log ORDER BY key;
SELECT current_user = session_user AS back, current_setting('search_path') AS path;
-- a limit is for all stores together
SELECT make_key('one', 'completed', '2000-01-01'), make_key('two', 'completed', '2000-01-01');
INSERT INTO regress_owned.keys SELECT * FROM idempotency_keys;
SELECT idem_expire(3);
SELECT left_over();
SELECT count(*) FROM regress_owned.keys;
SELECT idem_expire(3);
-- a trigger that keeps a row
SET ROLE regress_idem_owner;
CREATE OR REPLACE FUNCTION regress_owned.log() RETURNS trigger LANGUAGE plpgsql AS
	'BEGIN IF old.key = ''two'' THEN RETURN NULL; END IF; RETURN old; END';
RESET ROLE;
SELECT make_key('one', 'completed', '2000-01-01'), make_key('two', 'completed', '2000-01-01'),
	make_key('three', 'completed', '2000-01-01');
INSERT INTO regress_owned.keys SELECT * FROM idempotency_keys;
DELETE FROM idempotency_keys;
SELECT idem_expire();
SELECT key FROM regress_owned.keys;
-- a trigger that fails keeps its row, not the others
SET ROLE regress_idem_owner;
CREATE OR REPLACE FUNCTION regress_owned.log() RETURNS trigger LANGUAGE plpgsql AS
	'BEGIN IF old.key = ''two'' THEN RAISE ''not this one''; END IF; RETURN old; END';
RESET ROLE;
SELECT make_key('one', 'completed', '2000-01-01'), make_key('three', 'completed', '2000-01-01');
INSERT INTO regress_owned.keys SELECT * FROM idempotency_keys;
SET client_min_messages = log;
SELECT idem_expire();
RESET client_min_messages;
SELECT key FROM regress_owned.keys;
-- a trigger cannot become somebody else, nor leave anything behind
SET ROLE regress_idem_owner;
CREATE OR REPLACE FUNCTION regress_owned.log() RETURNS trigger LANGUAGE plpgsql AS
	'BEGIN EXECUTE ''RESET ROLE''; RETURN old; END';
RESET ROLE;
SELECT idem_expire();
SELECT key FROM regress_owned.keys;
SET ROLE regress_idem_owner;
CREATE OR REPLACE FUNCTION regress_owned.log() RETURNS trigger LANGUAGE plpgsql AS
	'BEGIN SET search_path = regress_owned; SET work_mem = ''123kB''; RETURN old; END';
RESET ROLE;
SELECT idem_expire();
SELECT current_setting('search_path') AS path, current_setting('work_mem') <> '123kB' AS work_mem;

-- Nobody's store keeps another's keys from going: not by an error that looks
-- like an order to stop, by rights that are missing, nor by dates at the end
-- of time
SET ROLE regress_idem_owner;
CREATE OR REPLACE FUNCTION regress_owned.log() RETURNS trigger LANGUAGE plpgsql AS
	'BEGIN RAISE ''stop'' USING errcode = ''57014''; END';
RESET ROLE;
SELECT make_key('one', 'completed', '2000-01-01');
INSERT INTO regress_owned.keys SELECT * FROM idempotency_keys;
SELECT idem_expire();
SELECT left_over() IS NULL AS gone, (SELECT string_agg(key, ' ') FROM regress_owned.keys) AS kept;
SET ROLE regress_idem_owner;
DROP TRIGGER t ON regress_owned.keys;
RESET ROLE;
INSERT INTO idem_route_policies (route, response_ttl) VALUES ('r', '1 day');
UPDATE regress_owned.keys SET finished_at = '294276-12-31', expires_at = '2200-01-01';
SELECT make_key('one', 'completed', '2000-01-01');
SELECT idem_expire();
SELECT left_over() IS NULL AS gone;
DELETE FROM idem_route_policies;
SET ROLE regress_idem_owner;
REVOKE ALL ON regress_owned.keys FROM regress_idem_owner;
RESET ROLE;
SELECT make_key('one', 'completed', '2000-01-01');
SELECT idem_expire();
SELECT left_over() IS NULL AS gone;
GRANT ALL ON regress_owned.keys TO regress_idem_owner;

-- Who may not own a store does not sweep it
GRANT EXECUTE ON FUNCTION idem_expire TO regress_idem_owner;
SELECT idem_create_table('regress_other');
SELECT make_key('one', 'completed', '2000-01-01');
INSERT INTO regress_other SELECT * FROM idempotency_keys;
SET ROLE regress_idem_owner;
SELECT idem_expire();
RESET ROLE;
SELECT left_over(), (SELECT count(*) FROM regress_other) AS other;
REVOKE EXECUTE ON FUNCTION idem_expire FROM regress_idem_owner;
DROP TABLE regress_other;

-- Tables that are of the type but no stores are left alone
CREATE UNLOGGED TABLE regress_unlogged OF idempotency_key (PRIMARY KEY (key, tenant, route));
CREATE TEMP TABLE regress_temp OF idempotency_key (PRIMARY KEY (key, tenant, route));
CREATE TABLE regress_parted OF idempotency_key PARTITION BY RANGE (key);
SELECT make_key('one', 'completed', '2000-01-01');
INSERT INTO regress_unlogged SELECT * FROM idempotency_keys;
INSERT INTO regress_temp SELECT * FROM idempotency_keys;
SELECT idem_expire();
SELECT (SELECT count(*) FROM regress_unlogged) AS unlogged, (SELECT count(*) FROM regress_temp) AS temp;
DROP TABLE regress_unlogged, regress_temp, regress_parted;

SET client_min_messages = warning;
DROP SCHEMA regress_owned CASCADE;
DROP OWNED BY regress_idem_owner;
DROP ROLE regress_idem_owner;
RESET client_min_messages;
DROP FUNCTION make_key, left_over;
DELETE FROM idempotency_keys;
