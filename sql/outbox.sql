--
-- OUTBOX
-- Messages in the caller's transaction: publish, take, done, fail, dead
-- letters and redrive, with the fence before each.  Where a lease or a backoff
-- must be over, the row is changed; what needs two sessions at a time is in
-- test/isolation, and relays that die are in test/t.
--

CREATE FUNCTION lose_leases() RETURNS void
BEGIN ATOMIC
	UPDATE idem_outbox SET lease_until = '2000-01-01' WHERE lease_until IS NOT NULL;
END;
-- empty, and ids from 1 again
CREATE FUNCTION reset_outbox() RETURNS void LANGUAGE sql
	AS 'TRUNCATE idem_outbox RESTART IDENTITY';

-- Only who has taken a message can answer for it
SELECT idem_publish('fence', '1') IS NOT NULL AS published;
SELECT idem_outbox_done(1, 0);
SELECT idem_outbox_fail(1, 0, dead => true);
SELECT idem_outbox_done(1, 1);
SELECT count(*) FROM idem_outbox;
SELECT reset_outbox();

-- ids that do not ascend would break the order of a group
SELECT idem_publish('ids', '1', 'g') IS NOT NULL AS published;
ALTER TABLE idem_outbox ALTER id RESTART WITH 100;
SELECT idem_publish('ids', '2', 'g') IS NOT NULL AS published;
ALTER TABLE idem_outbox ALTER id RESTART WITH 50;
SELECT idem_publish('ids', '3', 'g');
SELECT idem_publish('ids', '4', 'h') IS NOT NULL AS published, idem_publish('ids', '5') IS NOT NULL AS published;
SELECT reset_outbox();

-- A message is there if its transaction is
BEGIN;
SELECT idem_publish('orders', '{"order": 1}') IS NOT NULL AS published;
ROLLBACK;
BEGIN;
SELECT idem_publish('orders', '{"order": 2}') IS NOT NULL AS published;
SAVEPOINT s;
SELECT idem_publish('orders', '{"order": 3}', 'customer 1') IS NOT NULL AS published;
ROLLBACK TO s;
SELECT payload, attempt FROM idem_outbox_take('orders', 10);
COMMIT;
SELECT payload, attempt, lease_until > now() + interval '59 min' AS leased, dead_at, last_error FROM idem_outbox;
-- the lease is live
SELECT payload FROM idem_outbox_take('orders', 10);
SELECT lose_leases();
SELECT payload, attempt FROM idem_outbox_take('orders', 10);
-- another topic
SELECT payload FROM idem_outbox_take('order', 10);
SELECT idem_outbox_done(id, 2) FROM idem_outbox;
SELECT count(*) FROM idem_outbox;

-- What is told comes back as it was
SELECT reset_outbox();
SELECT idem_publish('t', '{"a": [1.10, null]}', 'g "1"', '{"content-type": "x"}',
	'6d25a684-9558-11e9-aa94-efccd7a0659b', max_attempts => 3);
SELECT idem_publish('t', NULL, headers => '{}', message_id => '6d25a684-9558-11e9-aa94-efccd7a0659b');
SELECT id, message_id, topic, group_key, payload, headers, created_at = available_at AS due,
	max_attempts, attempt, dead_at, last_error
FROM idem_outbox_take('t', 10);
-- without one, each message has its own message_id
SELECT count(DISTINCT idem_publish('u', to_jsonb(i))) FROM generate_series(1, 100) i;
SELECT count(DISTINCT message_id) FROM idem_outbox WHERE topic = 'u';
-- oldest first, max at the most
SELECT payload FROM idem_outbox_take('u');
SELECT payload FROM idem_outbox_take('u', 3);
SELECT payload FROM idem_outbox_take('u', 0);
SELECT count(*), min(payload::text::int), max(payload::text::int) FROM idem_outbox_take('u', NULL);
-- as part of a statement
SELECT reset_outbox();
WITH o AS (SELECT i FROM generate_series(1, 3) i)
SELECT count(idem_publish('t', to_jsonb(o.i))) FROM o;
SELECT payload, idem_outbox_done(id, attempt) FROM idem_outbox_take('t', 2);
SELECT (idem_outbox_take('t')).payload;
SELECT payload FROM idem_outbox;
-- a lease of one's own
SELECT lose_leases();
SELECT lease_until > now() + interval '59 min' AS long FROM idem_outbox_take('t', lease => '1h');
SET pg_idem.lease = '2h';
SELECT lose_leases();
SELECT lease_until > now() + interval '119 min' AS long FROM idem_outbox_take('t');
RESET pg_idem.lease;

-- Later
SELECT reset_outbox();
SELECT idem_publish('t', '"later"', delay => '1h') IS NOT NULL AS published;
SELECT idem_publish('t', '"now"', delay => '0') IS NOT NULL AS published;
SELECT available_at - created_at AS delay FROM idem_outbox ORDER BY id;
SELECT payload FROM idem_outbox_take('t', 10);

-- A failure: tried again after a backoff of up to 1, 2, 4 ... seconds, or when
-- the relay says; dead when its attempts are used up
SELECT reset_outbox();
SELECT idem_publish('t', '1', max_attempts => 3) IS NOT NULL AS published;
SELECT attempt FROM idem_outbox_take('t');
SELECT idem_outbox_fail(1, 1, 'connection refused') <= clock_timestamp() + interval '1 s' AS soon;
SELECT attempt, lease_until, last_error, dead_at FROM idem_outbox;
SELECT idem_outbox_fail(1, 1, 'still', '1h') > now() + interval '59 min' AS later;
SELECT count(*) FROM idem_outbox_take('t');
SELECT topic, pending, taken, failing, oldest = created_at AS oldest, dead FROM idem_outbox_topics JOIN idem_outbox USING (topic);
SELECT idem_outbox_fail(1, 1, retry_after => '0') <= clock_timestamp() AS now;
SELECT attempt, last_error FROM idem_outbox_take('t');
SELECT topic, pending, taken, failing, dead FROM idem_outbox_topics;
SELECT idem_outbox_fail(1, 2, 'no', '0') IS NULL AS dead;
SELECT attempt FROM idem_outbox_take('t');
SELECT idem_outbox_fail(1, 3, 'no more', '0') IS NULL AS dead;
SELECT count(*) FROM idem_outbox_take('t');
SELECT id, topic, payload, attempt, dead_at <= clock_timestamp() AS dead, last_error FROM idem_outbox_dead;
SELECT topic, pending, taken, failing, oldest, dead FROM idem_outbox_topics;
-- a relay that knows better
SELECT idem_publish('t', '2') IS NOT NULL AS published;
SELECT idem_outbox_fail(id, attempt, 'no such customer', dead => true) IS NULL AS dead FROM idem_outbox_take('t');
SELECT payload, attempt, last_error FROM idem_outbox_dead ORDER BY id;
-- the backoff: never more than its bound, and not always the same.  It is
-- counted from a moment within the call.
CREATE FUNCTION backoffs(attempt int, OUT at_least interval, OUT at_most interval) RETURNS SETOF record LANGUAGE plpgsql AS $$
DECLARE
	before timestamptz;
	due timestamptz;
BEGIN
	FOR i IN 1..100 LOOP
		before := clock_timestamp();
		due := idem_outbox_fail(1, attempt);
		at_least := due - clock_timestamp();
		at_most := due - before;
		RETURN NEXT;
	END LOOP;
END $$;
SELECT reset_outbox();
SELECT idem_publish('t', '1', max_attempts => 1000000) IS NOT NULL AS published;
UPDATE idem_outbox SET attempt = 5;
SELECT bool_and(at_most >= '0' AND at_least <= '16 s') AS bounded, max(at_most) > '8 s' AS spread, min(at_least) < '8 s' AS jitter
FROM backoffs(5);
UPDATE idem_outbox SET attempt = 999999;
SELECT bool_and(at_most >= '0' AND at_least <= '5 min') AS bounded, max(at_most) > '2 min' AS spread
FROM backoffs(999999);
DROP FUNCTION backoffs;
-- a long error is cut, between characters
SELECT idem_outbox_fail(1, 999999, 'x' || repeat('é', 1000)) IS NULL AS dead;
SELECT octet_length(last_error), right(last_error, 1) FROM idem_outbox;

-- Poison: what kills its relay, which then never says so, is out of attempts
-- too.  Those that were taken with it are handed out one by one, so that it
-- does not take them with it.
SELECT reset_outbox();
SELECT idem_publish('t', to_jsonb(i), max_attempts => 2) IS NOT NULL AS published FROM generate_series(1, 3) i;
SELECT payload, attempt FROM idem_outbox_take('t', 10);
SELECT idem_publish('t', '4') IS NOT NULL AS published;
SELECT lose_leases();
SELECT payload, attempt FROM idem_outbox_take('t', 10);
SELECT payload, attempt FROM idem_outbox_take('t', 10);
SELECT idem_outbox_done(2, 2);
SELECT lose_leases();
SELECT payload, attempt FROM idem_outbox_take('t', 10);
SELECT payload, attempt FROM idem_outbox_take('t', 10);
SELECT id, attempt, last_error FROM idem_outbox_dead;
-- ... nor with others that come first
SELECT idem_outbox_done(id, attempt) FROM idem_outbox WHERE id > 1;
SELECT idem_publish('t', to_jsonb(i)) IS NOT NULL AS published FROM generate_series(5, 7) i;
UPDATE idem_outbox SET lease_until = '2000-01-01' WHERE payload = '6';
SELECT payload FROM idem_outbox_take('t', 10);
SELECT payload FROM idem_outbox_take('t', 10);
-- who was given up for dead may still say that it is done
SELECT idem_outbox_done(1, 1);
SELECT idem_outbox_fail(1, 2, 'I saw it die') IS NULL AS dead;
SELECT id, last_error FROM idem_outbox_dead;
SELECT idem_outbox_done(1, 2);
SELECT id FROM idem_outbox_dead;

-- The fence
SELECT reset_outbox();
SELECT idem_publish('t', '1') IS NOT NULL AS published;
SELECT attempt FROM idem_outbox_take('t');
SELECT lose_leases();
SELECT attempt FROM idem_outbox_take('t');
SELECT idem_outbox_done(1, 1);
SELECT idem_outbox_fail(1, 1, 'late');
SELECT idem_outbox_done(1, 3);
SELECT idem_outbox_fail(1, 0);
SELECT attempt, last_error FROM idem_outbox;
SELECT idem_outbox_done(1, 2);
SELECT idem_outbox_done(1, 2);
SELECT idem_outbox_fail(1, 2);
-- the whole transaction fails with it
CREATE TABLE delivered (id bigint);
SELECT idem_publish('t', '2') IS NOT NULL AS published;
BEGIN;
INSERT INTO delivered SELECT id FROM idem_outbox_take('t');
SELECT idem_outbox_done(id, 7) FROM delivered;
COMMIT;
SELECT count(*) FROM delivered;
SELECT attempt FROM idem_outbox;
DROP TABLE delivered;

-- Groups: one at a time, in order; other groups, and messages of none, pass
SELECT reset_outbox();
SELECT count(idem_publish('t', to_jsonb(g || i), g)) FROM generate_series(1, 3) i, unnest(ARRAY['a', 'b']) g;
SELECT idem_publish('t', '"free"') IS NOT NULL AS published;
SELECT idem_publish('u', '"elsewhere"', 'a') IS NOT NULL AS published;
SELECT payload FROM idem_outbox_take('t', 10);
SELECT payload FROM idem_outbox_take('t', 10);
SELECT payload FROM idem_outbox_take('u', 10);
-- done, put off, dead
SELECT idem_outbox_done(id, 1) FROM idem_outbox WHERE payload = '"a1"';
SELECT idem_outbox_fail(id, 1, retry_after => '1h') IS NULL AS dead FROM idem_outbox WHERE payload = '"b1"';
SELECT payload FROM idem_outbox_take('t', 10);
SELECT idem_outbox_fail(id, 1, dead => true) IS NULL AS dead FROM idem_outbox WHERE payload = '"a2"';
SELECT payload FROM idem_outbox_take('t', 10);
-- what was published for later is waited for
SELECT reset_outbox();
SELECT idem_publish('t', '1', 'g', delay => '1h') IS NOT NULL AS published;
SELECT idem_publish('t', '2', 'g') IS NOT NULL AS published;
SELECT count(*) FROM idem_outbox_take('t', 10);
UPDATE idem_outbox SET available_at = now();
SELECT payload FROM idem_outbox_take('t', 10);
-- out of attempts: the next one is handed out by the same call
SELECT reset_outbox();
SELECT idem_publish('t', to_jsonb(i), 'g', max_attempts => 1) IS NOT NULL AS published FROM generate_series(1, 4) i;
UPDATE idem_outbox SET attempt = 1, lease_until = '2000-01-01' WHERE id < 3;
SELECT payload FROM idem_outbox_take('t', 10);
SELECT id, last_error FROM idem_outbox_dead ORDER BY id;

-- many that wait behind others: the groups have their turns, in order
SELECT reset_outbox();
SELECT count(idem_publish('t', to_jsonb(g || i), g)) FROM unnest(ARRAY['c', 'a', 'b']) g, generate_series(1, 150) i;
SELECT idem_publish('t', '"free"') IS NOT NULL AS published;
SELECT idem_publish('t', '"d1"', 'd') IS NOT NULL AS published;
SELECT payload FROM idem_outbox_take('t');
SELECT payload FROM idem_outbox_take('t', 2);
SELECT idem_outbox_done(id, 1) FROM idem_outbox WHERE payload IN ('"a1"', '"free"');
SELECT payload FROM idem_outbox_take('t');
SELECT payload FROM idem_outbox_take('t');
SELECT idem_outbox_done(id, 1) FROM idem_outbox WHERE payload IN ('"d1"', '"b1"');
SELECT payload FROM idem_outbox_take('t', 10);
SELECT payload FROM idem_outbox_take('t', 10);
--
-- Groups taking turns: neither a suspect nor a message without a group waits
-- for ever behind groups that have work
--
SELECT count(idem_publish('turns', '0', 'zz blocked', delay => CASE WHEN i = 1 THEN interval '1 day' ELSE '0' END))
FROM generate_series(1, 103) i;
SELECT idem_publish('turns', '"suspect"', 'e') IS NOT NULL AS published,
	idem_publish('turns', '"behind it"', 'e') IS NOT NULL AS published,
	idem_publish('turns', '"suspect alone"') IS NOT NULL AS published;
SELECT payload FROM idem_outbox_take('turns', 2);
UPDATE idem_outbox SET lease_until = '2000-01-01' WHERE payload IN ('"suspect"', '"suspect alone"');
-- a group with a backlog that is older than they are
SELECT count(idem_publish('turns', '0', 'old')) FROM generate_series(1, 300);
UPDATE idem_outbox SET available_at = '2000-01-01' WHERE group_key = 'old';
SELECT count(idem_publish('turns', '0', g)) FROM unnest('{a,b,c,d,f,h,i,j}'::text[]) g, generate_series(1, 30);
SELECT count(idem_publish('turns', '"alone"')) FROM generate_series(1, 10);
-- in so many takes, fewer than there are messages of the groups
CREATE TABLE taken (n int, payload jsonb);
DO $$
BEGIN
	FOR n IN 1..20 LOOP
		-- another topic on the same connection
		PERFORM idem_outbox_take('none', 1);
		INSERT INTO taken
		SELECT n, m.payload FROM idem_outbox_take('turns', 5) m, idem_outbox_done(m.id, m.attempt) d;
	END LOOP;
END $$;
SELECT count(*) FILTER (WHERE payload = '"suspect"') AS suspect,
	count(*) FILTER (WHERE payload = '"suspect alone"') AS suspect_alone,
	count(*) FILTER (WHERE payload = '"behind it"') AS behind_it,
	count(*) FILTER (WHERE payload = '"alone"') > 5 AS alone,
	count(*) FILTER (WHERE payload = '0') > 20 AS others
FROM taken;
SELECT count(*) = 1 AS each_alone FROM taken WHERE n IN (SELECT n FROM taken WHERE payload = '"suspect"');
DROP TABLE taken;
SELECT reset_outbox();

-- a dead letter whose new row a trigger keeps out is not lost
SELECT idem_publish('kept', '1', max_attempts => 1) IS NOT NULL AS published;
SELECT idem_outbox_fail(id, attempt) FROM idem_outbox_take('kept');
CREATE FUNCTION keep_out() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
CREATE TRIGGER keep_out BEFORE INSERT ON idem_outbox FOR EACH ROW EXECUTE FUNCTION keep_out();
SELECT idem_outbox_redrive('kept');
SELECT count(*) FROM idem_outbox;
DROP TRIGGER keep_out ON idem_outbox;
DROP FUNCTION keep_out();
SELECT reset_outbox();

-- nor does a transaction with an old snapshot take its own answer for another's
SELECT idem_publish('old', '1') IS NOT NULL AS published;
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT idem_outbox_done(1, 1);
ROLLBACK;
SELECT reset_outbox();

-- it is for every index to be there
SELECT idem_outbox_take('none');
BEGIN;
UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'idem_outbox_groups'::regclass;
SELECT idem_outbox_take('t');
ROLLBACK;
-- in the order of its table's columns: in another, messages would be missed
BEGIN;
DROP INDEX idem_outbox_groups;
CREATE INDEX idem_outbox_groups ON idem_outbox (topic, group_key COLLATE "POSIX", id)
	WHERE dead_at IS NULL AND group_key IS NOT NULL;
SELECT idem_outbox_take('t');
ROLLBACK;
SELECT payload FROM idem_outbox_take('t', 10);
-- not even one is there
BEGIN;
DO $$
DECLARE c name;
BEGIN
	FOR c IN SELECT conname FROM pg_constraint
			 WHERE conrelid = 'idem_outbox'::regclass AND conindid <> 0
	LOOP
		EXECUTE format('ALTER TABLE idem_outbox DROP CONSTRAINT %I', c);
	END LOOP;
	FOR c IN SELECT relname FROM pg_index JOIN pg_class i ON i.oid = indexrelid
			 WHERE indrelid = 'idem_outbox'::regclass
	LOOP
		EXECUTE format('DROP INDEX %I', c);
	END LOOP;
END $$;
SELECT idem_outbox_take('t');
ROLLBACK;

-- others do not confuse it, also where they are found first
SELECT reset_outbox();
CREATE INDEX few ON idem_outbox (topic, available_at, id) WHERE dead_at IS NULL AND group_key IS NULL AND attempt > 5;
CREATE INDEX odd ON idem_outbox (topic, available_at, id) WHERE attempt < 5 AND topic <> 'x';
CREATE INDEX back ON idem_outbox (topic, available_at DESC, id) WHERE dead_at IS NULL AND group_key IS NULL;
REINDEX INDEX CONCURRENTLY idem_outbox_ungrouped;
REINDEX INDEX CONCURRENTLY idem_outbox_grouped;
SELECT idem_publish('t', to_jsonb(i)) IS NOT NULL AS published FROM generate_series(1, 3) i;
SELECT idem_publish('t', '4', 'g') IS NOT NULL AS published;
SELECT payload FROM idem_outbox_take('t', 3);
SELECT payload FROM idem_outbox_take('t', 3);
DROP INDEX few, odd, back;

-- Redrive: published again under another id, with the same message_id
SELECT reset_outbox();
SELECT idem_publish('t', to_jsonb(i), 'g', message_id => ('00000000-0000-0000-0000-00000000000' || i)::uuid, max_attempts => 1)
FROM generate_series(1, 4) i;
SELECT idem_publish('u', '5') IS NOT NULL AS published;
UPDATE idem_outbox SET attempt = 1, dead_at = now(), last_error = 'no', created_at = '2000-01-01' WHERE id <> 3;
SELECT idem_outbox_redrive('none'), idem_outbox_redrive(id => 3), idem_outbox_redrive(max => 0), idem_outbox_redrive('u', 1);
SELECT idem_outbox_redrive('t', 2);
SELECT idem_outbox_redrive('t', max => 1);
SELECT id, message_id, group_key, payload, attempt, max_attempts, dead_at IS NOT NULL AS dead, created_at < '2000-01-02' AS old,
	available_at > '2000-01-02' AS due, last_error FROM idem_outbox WHERE topic = 't' ORDER BY id;
SELECT idem_outbox_redrive();
SELECT count(*) FROM idem_outbox_dead;
-- who has the old id is told
SELECT idem_outbox_done(1, 1);
SELECT idem_outbox_done(id, attempt), payload FROM idem_outbox_take('t');
SELECT idem_outbox_done(id, attempt), payload FROM idem_outbox_take('t');
SELECT idem_outbox_done(id, attempt), payload FROM idem_outbox_take('t');
SELECT idem_outbox_done(id, attempt), payload FROM idem_outbox_take('t');

-- Bad arguments
SELECT idem_publish(NULL, '1');
SELECT idem_publish('', '1');
SELECT idem_publish(repeat('t', 256), '1');
SELECT idem_publish(E'a\nb', '1');
SELECT idem_publish('t', '1', '');
SELECT idem_publish('t', '1', repeat('g', 256));
SELECT idem_publish('t', '1', headers => '[]');
SELECT idem_publish('t', '1', headers => '"x"');
SELECT idem_publish('t', '1', delay => '-1 s');
SELECT idem_publish('t', '1', delay => '300000 years');
SELECT idem_publish('t', '1', max_attempts => 0);
SELECT idem_outbox_take(NULL);
SELECT idem_outbox_take('');
SELECT idem_outbox_take('t', -1);
SELECT idem_outbox_take('t', lease => '0');
SELECT idem_outbox_take('t', lease => '-1 s');
SELECT idem_outbox_done(NULL, 1);
SELECT idem_outbox_done(1, NULL);
SELECT idem_outbox_fail(NULL, 1);
SELECT idem_outbox_fail(1, NULL);
SELECT idem_outbox_fail(1, 1, retry_after => '-1 s');
SELECT idem_outbox_redrive(max => -1);
SELECT idem_outbox_redrive('');
BEGIN READ ONLY;
SELECT idem_publish('t', '1');
ROLLBACK;
BEGIN READ ONLY;
SELECT idem_outbox_take('t');
ROLLBACK;
BEGIN READ ONLY;
SELECT idem_outbox_done(1, 1);
ROLLBACK;
BEGIN READ ONLY;
SELECT idem_outbox_fail(1, 1);
ROLLBACK;
BEGIN READ ONLY;
SELECT idem_outbox_redrive();
ROLLBACK;
SELECT count(*) FROM idem_outbox;

-- The settings of whoever publishes
SET pg_idem.outbox_max_attempts = 2;
SELECT idem_publish('t', '1') IS NOT NULL AS published;
RESET pg_idem.outbox_max_attempts;
SELECT max_attempts FROM idem_outbox;

-- Names that no function would store are not stored by hand either; where the
-- owner lets them in, takes come past them all the same.  (Groups have their
-- turns where many messages wait for others of their groups.)
SELECT reset_outbox();
\set VERBOSITY terse
INSERT INTO idem_outbox (message_id, topic, group_key, created_at, available_at, max_attempts)
	VALUES (gen_random_uuid(), 't', repeat('g', 256), now(), now(), 1);
INSERT INTO idem_outbox (message_id, topic, created_at, available_at, max_attempts)
	VALUES (gen_random_uuid(), '', now(), now(), 1);
\set VERBOSITY default
ALTER TABLE idem_outbox DROP CONSTRAINT idem_outbox_group_key_check;
SELECT count(idem_publish('t', '1', 'a')) FROM generate_series(1, 200);
SELECT attempt FROM idem_outbox_take('t');
INSERT INTO idem_outbox (message_id, topic, group_key, created_at, available_at, max_attempts)
	SELECT gen_random_uuid(), 't', repeat('g', 300) || i, now(), now(), 1 FROM generate_series(1, 3) i;
SELECT idem_publish('t', '2', 'z') IS NOT NULL AS published;
SELECT length(group_key), right(group_key, 1) FROM idem_outbox_take('t', 10);
DELETE FROM idem_outbox;
ALTER TABLE idem_outbox ADD CONSTRAINT idem_outbox_group_key_check CHECK (octet_length(group_key) BETWEEN 1 AND 255);

-- The owner may let NULLs in: an error that says so, or a row that is passed over
SELECT reset_outbox();
CREATE FUNCTION regress_null() RETURNS trigger LANGUAGE plpgsql AS
	$$ BEGIN new.message_id := NULL; RETURN new; END $$;
ALTER TABLE idem_outbox ALTER message_id DROP NOT NULL, ALTER topic DROP NOT NULL, ALTER available_at DROP NOT NULL,
	ALTER attempt DROP NOT NULL, ALTER max_attempts DROP NOT NULL, ALTER created_at DROP NOT NULL;
SELECT idem_publish('t', '1') IS NOT NULL AS published, idem_publish('t', '2') IS NOT NULL AS published;
CREATE TRIGGER regress_null BEFORE INSERT OR UPDATE ON idem_outbox FOR EACH ROW EXECUTE FUNCTION regress_null();
SELECT idem_publish('t', '3');
SELECT message_id, payload, attempt FROM idem_outbox_take('t');
SELECT idem_outbox_fail(id, attempt, 'poison', dead => true) FROM idem_outbox WHERE attempt = 1;
SELECT idem_outbox_redrive();
SELECT message_id, payload, attempt FROM idem_outbox_take('t');
-- without a message_id it is taken no more
SELECT lose_leases();
SELECT payload FROM idem_outbox_take('t');
UPDATE idem_outbox SET attempt = max_attempts;
ALTER TABLE idem_outbox DISABLE TRIGGER regress_null;
UPDATE idem_outbox SET message_id = '00000000-0000-0000-0000-000000000002' WHERE dead_at IS NULL;
ALTER TABLE idem_outbox ENABLE TRIGGER regress_null;
SELECT idem_outbox_take('t');
SELECT payload, message_id, dead_at IS NOT NULL AS dead FROM idem_outbox ORDER BY id;
DROP TRIGGER regress_null ON idem_outbox;
DELETE FROM idem_outbox;
INSERT INTO idem_outbox (topic, group_key, message_id, created_at, available_at, max_attempts, attempt)
	VALUES ('t', 'g1', gen_random_uuid(), now(), NULL, 1, 0), ('t', 'g2', gen_random_uuid(), now(), now(), NULL, 0),
		('t', NULL, gen_random_uuid(), now(), now(), 1, NULL), ('t', 'g3', gen_random_uuid(), now(), now(), 0, -5),
		('t', 'g4', gen_random_uuid(), 'infinity', '-infinity', 5, -5), ('t', 'g1', gen_random_uuid(), now(), now(), 1, 0),
		(NULL, 'g5', gen_random_uuid(), now(), now(), 1, 0), ('t', 'g6', NULL, now(), now(), 1, 0),
		('t', NULL, gen_random_uuid(), NULL, now(), 1, 0);
SELECT group_key, attempt FROM idem_outbox_take('t', 100);
SELECT idem_outbox_done(id, 1) FROM idem_outbox WHERE attempt IS NULL;
SELECT group_key, dead_at IS NOT NULL AS dead FROM idem_outbox ORDER BY id;
UPDATE idem_outbox SET dead_at = '2000-01-01';
SELECT idem_outbox_redrive();
SELECT idem_expire();
DELETE FROM idem_outbox;
ALTER TABLE idem_outbox ALTER message_id SET NOT NULL, ALTER topic SET NOT NULL, ALTER available_at SET NOT NULL,
	ALTER attempt SET NOT NULL, ALTER max_attempts SET NOT NULL, ALTER created_at SET NOT NULL;
DROP FUNCTION regress_null();
-- what no take would ever find is not published
ALTER TABLE idem_outbox ALTER available_at DROP NOT NULL;
CREATE FUNCTION regress_never() RETURNS trigger LANGUAGE plpgsql AS
	$$ BEGIN new.available_at := NULL; RETURN new; END $$;
SELECT idem_publish('t', '1') IS NOT NULL AS published;
SELECT idem_outbox_fail(id, attempt, dead => true) FROM idem_outbox_take('t');
CREATE TRIGGER regress_never BEFORE INSERT ON idem_outbox FOR EACH ROW EXECUTE FUNCTION regress_never();
SELECT idem_publish('t', '2');
SELECT idem_outbox_redrive();
SELECT payload, dead_at IS NOT NULL AS dead FROM idem_outbox;
DROP FUNCTION regress_never() CASCADE;
ALTER TABLE idem_outbox ALTER available_at SET NOT NULL;
-- a message that was taken can be answered for, whatever its attempt was
UPDATE idem_outbox SET attempt = -5, available_at = now(), dead_at = NULL;
SELECT attempt FROM idem_outbox_take('t');
SELECT idem_outbox_done(id, attempt) FROM idem_outbox;
SELECT count(*) FROM idem_outbox;
-- a dead letter with a topic that no relay can name keeps no others back
ALTER TABLE idem_outbox DROP CONSTRAINT idem_outbox_topic_check;
INSERT INTO idem_outbox (message_id, topic, created_at, available_at, max_attempts, dead_at)
	SELECT gen_random_uuid(), topic, now(), now(), 1, now()
	FROM unnest(ARRAY['t', '', repeat('t', 256), repeat('t', 9000), 'u']) topic;
SELECT idem_outbox_redrive();
SELECT length(topic), dead_at IS NOT NULL AS dead FROM idem_outbox ORDER BY 1, 2;
DELETE FROM idem_outbox;
ALTER TABLE idem_outbox ADD CONSTRAINT idem_outbox_topic_check CHECK (octet_length(topic) BETWEEN 1 AND 255);

-- Redrive carries further columns over, and notices when they change
SELECT reset_outbox();
SELECT idem_publish('t', '1') IS NOT NULL AS published;
SELECT idem_outbox_fail(id, attempt, dead => true) FROM idem_outbox_take('t');
SELECT idem_outbox_redrive();
ALTER TABLE idem_outbox ADD dropped int, ADD "Odd name" text DEFAULT 'default', ADD twice int GENERATED ALWAYS AS (max_attempts * 2) STORED,
	ADD number int GENERATED ALWAYS AS IDENTITY;
ALTER TABLE idem_outbox DROP dropped;
UPDATE idem_outbox SET "Odd name" = 'kept';
SELECT idem_outbox_fail(id, attempt, dead => true) FROM idem_outbox_take('t');
SELECT idem_outbox_redrive();
SELECT payload, "Odd name", twice = max_attempts * 2 AS twice, number FROM idem_outbox;
ALTER TABLE idem_outbox RENAME "Odd name" TO name;
SELECT idem_outbox_fail(id, attempt, dead => true) FROM idem_outbox_take('t');
SELECT idem_outbox_redrive();
SELECT payload, name, number FROM idem_outbox;
ALTER TABLE idem_outbox DROP name, DROP twice, DROP number;
SELECT idem_outbox_fail(id, attempt, dead => true) FROM idem_outbox_take('t');
SELECT idem_outbox_redrive();

-- What is said of a dead letter is said when it is certain
DELETE FROM idem_outbox;
SELECT idem_publish('t', '1', message_id => '00000000-0000-0000-0000-000000000001');
SET client_min_messages = log;
BEGIN;
SELECT idem_outbox_fail(id, attempt, dead => true) FROM idem_outbox_take('t');
ROLLBACK;
BEGIN;
SAVEPOINT s;
SAVEPOINT t;
SELECT idem_outbox_fail(id, attempt, dead => true) FROM idem_outbox_take('t');
RELEASE t;
ROLLBACK TO s;
COMMIT;
BEGIN;
SAVEPOINT s;
SELECT idem_outbox_fail(id, attempt, dead => true) FROM idem_outbox_take('t');
RELEASE s;
SAVEPOINT t;
ROLLBACK TO t;
COMMIT;
-- ... and once, also if a relay that overslept its lease has the same to say
SELECT idem_outbox_fail(id, attempt, 'late') IS NULL AS dead FROM idem_outbox;
DELETE FROM idem_outbox;
SELECT idem_publish('t', '2', message_id => '00000000-0000-0000-0000-000000000002', max_attempts => 1);
SELECT attempt FROM idem_outbox_take('t');
SELECT lose_leases();
SELECT attempt FROM idem_outbox_take('t');
SELECT idem_outbox_fail(id, attempt, 'late') IS NULL AS dead FROM idem_outbox;
SELECT last_error FROM idem_outbox_dead;
RESET client_min_messages;

-- A plan made while there was next to nothing does not read a million rows through
SELECT reset_outbox();
SELECT idem_publish('t', '1') IS NOT NULL AS published;
VACUUM ANALYZE idem_outbox;
SELECT idem_outbox_done(id, attempt) FROM idem_outbox_take('t');
INSERT INTO idem_outbox (message_id, topic, created_at, available_at, max_attempts)
	SELECT gen_random_uuid(), CASE WHEN i < 20000 THEN 'x' ELSE 't' END, now(), now(), 1 FROM generate_series(1, 20001) i;
SELECT pg_stat_force_next_flush();
SELECT seq_scan AS scans_before, seq_tup_read AS rows_before FROM pg_stat_user_tables WHERE relname = 'idem_outbox' \gset
SELECT count(idem_outbox_done(id, attempt)) FROM idem_outbox_take('t', 10);
SELECT pg_stat_force_next_flush();
SELECT seq_scan - :scans_before AS scans, seq_tup_read - :rows_before AS rows FROM pg_stat_user_tables WHERE relname = 'idem_outbox';

-- A backend remembers its statements, and must notice when the table moves,
-- goes and comes back
SELECT reset_outbox();
SELECT idem_publish('t', '1') IS NOT NULL AS published;
CREATE SCHEMA "Odd schema";
ALTER TABLE idem_outbox SET SCHEMA "Odd schema";
SELECT idem_publish('t', '2') IS NOT NULL AS published;
ALTER SCHEMA "Odd schema" RENAME TO "Odder schema";
SELECT payload FROM idem_outbox_take('t', 10);
ALTER TABLE "Odder schema".idem_outbox SET SCHEMA public;
-- (a column more comes back as well)
ALTER TABLE idem_outbox ADD COLUMN note text DEFAULT 'x';
SELECT lose_leases();
SELECT payload, note FROM idem_outbox_take('t');
DROP FUNCTION lose_leases();
DROP EXTENSION pg_idem;
SET client_min_messages = warning;
CREATE EXTENSION pg_idem SCHEMA "Odder schema";
RESET client_min_messages;
SELECT "Odder schema".idem_publish('t', '3') IS NOT NULL AS published;
SELECT payload, "Odder schema".idem_outbox_done(id, attempt) FROM "Odder schema".idem_outbox_take('t');
DROP EXTENSION pg_idem;
DROP SCHEMA "Odder schema";
SET client_min_messages = warning;
CREATE EXTENSION pg_idem;
RESET client_min_messages;
SELECT idem_publish('t', '4') IS NOT NULL AS published;
SELECT id, payload, idem_outbox_done(id, attempt) FROM idem_outbox_take('t');
DROP FUNCTION reset_outbox();
