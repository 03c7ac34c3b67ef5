--
-- PREPARED
-- Prepared transactions: nobody is connected, and still somebody has the key.
-- Needs max_prepared_transactions.
--
-- PREPARE TRANSACTION keeps the claim, for everybody
BEGIN;
SELECT outcome FROM idem_begin('prep1', 'r', '\x01');
PREPARE TRANSACTION 'regress_idem_1';
BEGIN;
SELECT outcome FROM idem_begin('prep2', 'r', '\x01');
SELECT idem_finish('prep2', '2');
PREPARE TRANSACTION 'regress_idem_2';
BEGIN;
SELECT outcome FROM idem_begin('prep3', 'r', '\x01');
PREPARE TRANSACTION 'regress_idem_3';
SELECT key, proceed, outcome, status, response, attempt,
	retry_after > '0' AND retry_after <= '1s' AS soon
FROM unnest('{prep1, prep2, prep3}'::text[]) key, idem_begin(key, 'r', '\x01');
SELECT key, outcome FROM unnest('{prep1, prep2, prep3}'::text[]) key, idem_begin(key, 'r', '\x02');
-- it is nobody else's to finish
SELECT idem_finish('prep1', '1');
SELECT idem_lookup('prep1', 'r') IS NULL AS not_there;
-- waiting for it ends with the time, or with a cancel
SELECT outcome FROM idem_begin('prep1', 'r', '\x01', wait => '30ms');
SET pg_idem.wait = '30ms';
SELECT outcome FROM idem_begin('prep2', 'r', '\x01');
RESET pg_idem.wait;
BEGIN;
SET LOCAL statement_timeout = '30ms';
SELECT outcome FROM idem_begin('prep1', 'r', '\x01', wait => '1 hour');
ROLLBACK;
SELECT outcome FROM idem_begin('prep1', 'r', '\x02', wait => '1 hour');
COMMIT PREPARED 'regress_idem_1';
COMMIT PREPARED 'regress_idem_2';
ROLLBACK PREPARED 'regress_idem_3';
SELECT key, outcome, status, response, attempt
FROM unnest('{prep1, prep2, prep3}'::text[]) key, idem_begin(key, 'r', '\x01');
SELECT idem_finish('prep1', '1', attempt => 1);
SELECT outcome, response FROM idem_begin('prep1', 'r', '\x01');

DELETE FROM idempotency_keys;

CREATE TABLE work (message text);
-- PREPARE TRANSACTION keeps a message, and nobody may take it for received before
-- COMMIT PREPARED
BEGIN;
SELECT idem_receive('billing', 'p1');
SELECT idem_receive_batch('billing', ARRAY['p2', 'p3']);
PREPARE TRANSACTION 'p';
SELECT idem_receive('billing', 'p1');
SELECT idem_receive_batch('billing', ARRAY['new', 'p3']);
SELECT idem_receive('billing', 'p2', wait => '10ms');
COMMIT PREPARED 'p';
SELECT idem_receive('billing', 'p1'), idem_receive('billing', 'p2');
SELECT idem_receive_batch('billing', ARRAY['new', 'p3']);

DROP TABLE work;
DELETE FROM idempotency_keys;
