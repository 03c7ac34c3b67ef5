--
-- INFINITE
-- Infinite spans, where the server has them (17 and later): a key that is
-- kept for ever, a lease that never ends.  The alternative output is for
-- servers that have no infinite intervals.
--
SELECT current_setting('server_version_num')::int < 170000 AS skip_test \gset
\if :skip_test
\quit
\endif

SELECT outcome, expires_at FROM idem_begin('ever', 'r', NULL, ttl => 'infinity', lease => 'infinity');
SELECT outcome, retry_after FROM idem_begin('ever', 'r', NULL);
SELECT created_at < now() AS created, lease_until, expires_at FROM idem_lookup('ever', 'r');
SELECT idem_expire();
SELECT idem_finish('ever', '1', attempt => 1);
SELECT finished_at < now() + interval '1 day' AS finished, expires_at FROM idem_lookup('ever', 'r');
SELECT outcome, expires_at FROM idem_begin('ever', 'r', NULL);
SELECT idem_expire();
BEGIN;
SELECT outcome FROM idem_begin('finish', 'r', NULL);
SELECT idem_finish('finish', '1', ttl => 'infinity');
COMMIT;
SELECT expires_at FROM idem_lookup('finish', 'r');
-- nothing is too old for a memory that never ends
SELECT outcome FROM idem_begin('old', 'r', NULL, ttl => 'infinity', first_sent => '1970-01-01');
-- waiting for ever for what is there
SELECT outcome FROM idem_begin('ever', 'r', NULL, wait => 'infinity');
BEGIN;
SELECT outcome FROM idem_begin('prepared', 'r', NULL);
PREPARE TRANSACTION 'regress_idem_infinite';
BEGIN;
SET LOCAL statement_timeout = '30ms';
SELECT outcome FROM idem_begin('prepared', 'r', NULL, wait => 'infinity');
ROLLBACK;
ROLLBACK PREPARED 'regress_idem_infinite';
-- no Retry-After can tell an infinite time
SELECT idem_problem(ROW(false, 'in_progress', 409, NULL, NULL, NULL, NULL, NULL, NULL, i, NULL)) ? 'retry_after' AS told
FROM unnest(ARRAY['1s', 'infinity', '-infinity']::interval[]) i;
-- the other way round is not positive
\set VERBOSITY sqlstate
SELECT idem_begin('k', 'r', NULL, ttl => '-infinity');
SELECT idem_begin('k', 'r', NULL, lease => '-infinity');
SELECT idem_begin('k', 'r', NULL, wait => '-infinity');
\set VERBOSITY default
DELETE FROM idempotency_keys;
