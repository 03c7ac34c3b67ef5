--
-- STATS
-- What idem_stat_routes counts, the run times of a route, idem_hedge_after.
--
SELECT idem_stats_reset();
CREATE FUNCTION counts(name text) RETURNS TABLE (counts jsonb) LANGUAGE sql AS $$
	SELECT jsonb_strip_nulls(jsonb_object_agg(key, nullif(value, '0')))
	FROM idem_stat_routes s, jsonb_each(to_jsonb(s) - '{since,run_time_p50,run_time_p95,run_time_p99}'::text[])
	WHERE route = name
$$;

-- every outcome
SELECT outcome FROM idem_begin('k', 'stats', '\x01');
SELECT outcome FROM idem_begin('k', 'stats', '\x01');
SELECT outcome FROM idem_begin('k', 'stats', '\x02');
SELECT outcome FROM idem_begin('k', 'stats', '\x01', first_sent => '2000-01-01');
SELECT idem_finish('k', '1', attempt => 2);
SELECT idem_finish('k', '1');
SELECT idem_finish('k', '1', attempt => 1);
SELECT outcome FROM idem_begin('k', 'stats', '\x01');
SELECT outcome FROM idem_begin('lost', 'stats', NULL, lease => '1 us');
SELECT outcome FROM idem_begin('lost', 'stats', NULL, lease => '1 us');
SELECT key, attempt FROM idem_resume(1, 'stats', lease => '1 us');
SET pg_idem.on_lost_lease = hold;
SELECT outcome FROM idem_begin('lost', 'stats', NULL);
RESET pg_idem.on_lost_lease;
SELECT idem_finish('lost', NULL, 503, attempt => 3);
SET pg_idem.retry_ratio = 0;
SET pg_idem.retry_min_per_second = 0;
SELECT outcome FROM idem_begin('lost', 'stats', NULL);
RESET pg_idem.retry_ratio;
RESET pg_idem.retry_min_per_second;
SELECT idem_checkpoint('k', 's', attempt => 7);
SELECT * FROM counts('stats');

-- reading counts nothing, and makes no entry
SELECT outcome IS NULL AS nothing FROM idem_lookup('k', 'unseen') l, (SELECT NULL) o (outcome);
SELECT idem_hedge_after('unseen');
SELECT count(*) FROM idem_stat_routes WHERE route = 'unseen';
-- what is rolled back was counted all the same
BEGIN;
SELECT outcome FROM idem_begin('k', 'rolled back', NULL);
ROLLBACK;
SELECT * FROM counts('rolled back');

--
-- Run times.  A claim's is the time since created_at, so claims that began
-- earlier have any that are wanted.  What each took in the end is in the store.
--
CREATE FUNCTION run(route text, took interval, status int DEFAULT 200) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	id text := gen_random_uuid();
BEGIN
	PERFORM idem_begin(id, route, NULL);
	UPDATE idempotency_keys k SET created_at = clock_timestamp() - took WHERE k.key = id;
	PERFORM idem_finish(id, NULL, status, route => run.route, attempt => 1);
END $$;
-- how far a is from b, in parts of b
CREATE FUNCTION error(a interval, b interval) RETURNS float8 LANGUAGE sql AS
$$ SELECT extract(epoch FROM a) / extract(epoch FROM b) - 1 $$;
-- too few to tell
DO $$ BEGIN FOR i IN 1..19 LOOP PERFORM run('times', i * interval '1 h'); END LOOP; END $$;
SELECT idem_hedge_after('times');
SELECT run('times', '20 h');
SELECT q, abs(error(idem_hedge_after('times', q), q * interval '20 h')) < 1 / 32.0 AS close
FROM unnest('{0.05,0.25,0.5,0.75,0.9,0.95}'::float8[]) q;
SELECT idem_hedge_after('times') = idem_hedge_after('times', 0.95) AS default_is_95;
SELECT idem_hedge_after('times', 0.96) AS "one in 25 of 20";
SELECT abs(error(run_time_p50, '10 h')) < 1 / 32.0 AS p50, abs(error(run_time_p95, '19 h')) < 1 / 32.0 AS p95,
	run_time_p99
FROM idem_stat_routes WHERE route = 'times';
-- all magnitudes, each within the error
DO $$
DECLARE
	took interval;
BEGIN
	FOREACH took IN ARRAY '{10 ms,1 s,10 s,1 min,3 min 7 s,17 min,1 h,7 h 7 min,30 h,75 h}'::interval[] LOOP
		FOR i IN 1..20 LOOP PERFORM run(took::text, took); END LOOP;
	END LOOP;
END $$;
SELECT route::interval, count(*), min(took) >= route::interval AS as_long,
	abs(error(idem_hedge_after(route, 0.5), percentile_disc(0.5) WITHIN GROUP (ORDER BY took))) <= 1 / 32.0 AS close
FROM (SELECT route, finished_at - created_at AS took FROM idempotency_keys) k
WHERE route LIKE '@%' GROUP BY route ORDER BY route::interval;
-- longer than the last bucket: told as that; negative, after a step of the
-- clock: not at all
DO $$ BEGIN FOR i IN 1..20 LOOP PERFORM run('long', '100 years'), run('negative', '-1 day'); END LOOP; END $$;
SELECT idem_hedge_after('long') BETWEEN '74 h' AND '77 h' AS last, idem_hedge_after('negative');
-- failures and later attempts have none
DO $$ BEGIN FOR i IN 1..20 LOOP PERFORM run('failures', '1 h', 503); END LOOP; END $$;
SELECT idem_hedge_after('failures');
-- old ones weigh less and less: after 500 long ones, 1.5 % of 33,000 are
-- long, and after twice as many others fewer than 1 %
CREATE FUNCTION run_quickly(n int) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	FOR i IN 1..n LOOP
		PERFORM idem_begin(i::text, 'aging', NULL), idem_finish(i::text, NULL, route => 'aging');
	END LOOP;
	DELETE FROM idempotency_keys WHERE route = 'aging';
END $$;
DO $$ BEGIN FOR i IN 1..500 LOOP PERFORM run('aging', '10 h'); END LOOP; END $$;
SELECT run_quickly(32500);
SELECT idem_hedge_after('aging', 0.99) > '9 h' AS long;
SELECT run_quickly(20000);
SELECT idem_hedge_after('aging', 0.99) > '9 h' AS long;
DROP FUNCTION run_quickly;
SELECT idem_hedge_after('times', NULL);
SELECT idem_hedge_after('times', 0);
SELECT idem_hedge_after('times', 1);
SELECT idem_hedge_after('times', 'NaN');
SELECT idem_hedge_after(NULL);
SELECT idem_hedge_after('');

-- reset: counters and run times go; budgets and breakers stay.  A budget's
-- requests leave it after ten seconds: once more, until that took less.
CREATE FUNCTION reset_stats() RETURNS TABLE (requests bool, reset bool, budgets bool, breaker text,
	breaker_calls int, breaker_failed int, calls_failed bigint, service_requests bigint) LANGUAGE plpgsql AS $$
DECLARE
	began timestamptz;
BEGIN
	FOR try IN 1..20 LOOP
		began := clock_timestamp();
		PERFORM idem_begin('reset ' || try, 'times', NULL);
		PERFORM idem_breaker_record('reset ' || try, false), idem_budget_allow('reset ' || try, false);
		SELECT window_requests > 0 INTO requests FROM idem_stat_routes WHERE route = 'times';
		PERFORM idem_stats_reset();
		SELECT bool_and(completed + started = 0 AND run_time_p50 IS NULL AND since >= began),
			bool_or(window_requests > 0)
		INTO reset, budgets FROM idem_stat_routes;
		SELECT s.breaker, window_calls, window_failed, s.calls_failed, window_requests
		INTO reset_stats.breaker, breaker_calls, breaker_failed, reset_stats.calls_failed, service_requests
		FROM idem_stat_services s WHERE service = 'reset ' || try;
		IF clock_timestamp() < began + interval '10 s' THEN
			RETURN NEXT;
			RETURN;
		END IF;
	END LOOP;
	RAISE 'too slow for the window of a retry budget';
END $$;
SELECT * FROM reset_stats();

DELETE FROM idempotency_keys;
DROP FUNCTION counts, run, error, reset_stats;
