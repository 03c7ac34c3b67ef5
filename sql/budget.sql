--
-- BUDGET
-- Retry budgets: idem_budget_allow for services, and idem_begin's own for the
-- re-executions of a route.  The window is ten seconds long, so each case has
-- a service or route of its own, and none waits for the window to move.  What
-- has to happen within a window happens once more, with an empty one, if the
-- machine took longer (022_shared_state.pl has many connections).
--

-- Wait until nothing that was counted is left in the window.
CREATE PROCEDURE empty_window(name text) LANGUAGE plpgsql AS $$
BEGIN
	FOR i IN 1..1000 LOOP
		PERFORM FROM idem_stat_services WHERE service = name AND window_requests + window_retries > 0
		UNION ALL
		SELECT FROM idem_stat_routes WHERE route = name AND window_requests + window_retries > 0;
		EXIT WHEN NOT FOUND;
		PERFORM pg_sleep(0.1);
	END LOOP;
END $$;

-- Did what began then fit into a window?  No: make ready for the next try.
CREATE FUNCTION fits(began timestamptz, try int, name text) RETURNS bool LANGUAGE plpgsql AS $$
BEGIN
	IF clock_timestamp() < began + interval '10 s' THEN
		RETURN true;
	ELSIF try >= 20 THEN
		RAISE 'too slow for the window of a retry budget';
	END IF;
	CALL empty_window(name);
	RETURN false;
END $$;

-- retries <= ratio * requests + minimum per second * 10
CREATE FUNCTION one_storm(service text, requests int, retries int) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	allowed int := 0;
BEGIN
	FOR i IN 1..requests LOOP
		IF NOT idem_budget_allow(service, false) THEN
			RAISE 'a request was refused';
		END IF;
		FOR j IN 1..retries LOOP
			allowed := allowed + idem_budget_allow(service, true)::int;
		END LOOP;
	END LOOP;
	RETURN format('%s requests, %s of %s retries', requests, allowed, requests * retries);
END $$;
CREATE FUNCTION storm(service text, requests int, retries int) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	began timestamptz;
	result text;
BEGIN
	FOR try IN 1..20 LOOP
		began := clock_timestamp();
		result := one_storm(service, requests, retries);
		EXIT WHEN fits(began, try, service);
	END LOOP;
	RETURN result;
END $$;
SELECT storm('default', 1000, 5);
SET pg_idem.retry_min_per_second = 0;
SELECT storm('ratio only', 1000, 5);
SET pg_idem.retry_ratio = 0;
SELECT storm('nothing', 100, 5);
SET pg_idem.retry_min_per_second = 1.5;
SELECT storm('minimum only', 100, 5);
SET pg_idem.retry_ratio = 2.5;
SET pg_idem.retry_min_per_second = 0;
SELECT storm('more than one', 100, 5);
-- a ratio that no binary fraction is
SET pg_idem.retry_ratio = 0.29;
SELECT storm('0.29', 100, 5);
-- no request, no ratio; the minimum is there all the same
SELECT idem_budget_allow('idle', true);
RESET pg_idem.retry_min_per_second;
SELECT idem_budget_allow('idle', true);
RESET pg_idem.retry_ratio;

-- a service's own, over the settings; none at all with an infinite one
INSERT INTO idem_service_policies (service, retry_ratio, retry_min_per_second)
VALUES ('free', 'infinity', 0), ('free from the start', 'infinity', 0);
SELECT storm('free', 1000, 5);
SELECT idem_budget_allow('free from the start', true);
CREATE PROCEDURE two_storms(INOUT tenth text DEFAULT NULL, INOUT rest_of_a_fifth text DEFAULT NULL)
LANGUAGE plpgsql AS $$
DECLARE
	began timestamptz;
BEGIN
	FOR try IN 1..20 LOOP
		INSERT INTO idem_service_policies (service, retry_ratio, retry_min_per_second) VALUES ('two', 0.1, 0);
		COMMIT;
		began := clock_timestamp();
		tenth := one_storm('two', 1000, 5);
		UPDATE idem_service_policies SET retry_ratio = NULL WHERE service = 'two';
		COMMIT;
		rest_of_a_fifth := one_storm('two', 500, 5);
		EXIT WHEN fits(began, try, 'two');
		DELETE FROM idem_service_policies WHERE service = 'two';
	END LOOP;
END $$;
CALL two_storms();
-- refused
INSERT INTO idem_service_policies (service, retry_ratio) VALUES ('x', -0.1);
INSERT INTO idem_service_policies (service, retry_ratio) VALUES ('x', 'NaN');
INSERT INTO idem_service_policies (service, retry_min_per_second) VALUES ('x', -1);
INSERT INTO idem_service_policies (service) VALUES ('');
INSERT INTO idem_service_policies (service) VALUES (repeat('x', 256));
INSERT INTO idem_route_policies (route, retry_ratio) VALUES ('x', 'NaN');
DELETE FROM idem_service_policies;

-- what is spent is spent, whatever becomes of the transaction
CREATE PROCEDURE roll_back(INOUT requests bigint DEFAULT NULL, INOUT retries bigint DEFAULT NULL,
	INOUT refused bigint DEFAULT NULL) LANGUAGE plpgsql AS $$
DECLARE
	began timestamptz;
BEGIN
	FOR try IN 1..20 LOOP
		PERFORM idem_stats_reset();
		began := clock_timestamp();
		PERFORM one_storm('rolled back', 10, 3);
		ROLLBACK;
		SELECT window_requests, window_retries, retries_refused INTO requests, retries, refused
		FROM idem_stat_services WHERE service = 'rolled back';
		EXIT WHEN fits(began, try, 'rolled back');
	END LOOP;
END $$;
CALL roll_back();

-- bad input
SELECT idem_budget_allow(NULL, false);
SELECT idem_budget_allow('x', NULL);
SELECT idem_budget_allow('', false);
SELECT idem_budget_allow(repeat('x', 256), false);
SELECT idem_budget_allow(E'a\nb', false);
SELECT storm(repeat('x', 255), 1, 0);
SET pg_idem.retry_ratio = -1;
SET pg_idem.retry_min_per_second = -1;

--
-- idem_begin
--
CREATE FUNCTION fail(key text, route text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	c idem_claim := idem_begin(key, route, NULL);
BEGIN
	IF c.proceed THEN
		PERFORM idem_finish(key, NULL, 503, route => route, attempt => c.attempt);
	END IF;
	RETURN c.outcome;
END $$;
-- each failed key is executed again as long as the budget lasts: in a storm
-- of 100 requests with 5 retries each there are 20 re-executions
SET pg_idem.retry_min_per_second = 0;
CREATE TABLE outcomes (n int GENERATED ALWAYS AS IDENTITY, outcome text);
CREATE PROCEDURE storm_of_failures(name text, requests int, retries int, INOUT counted text DEFAULT NULL)
LANGUAGE plpgsql AS $$
DECLARE
	began timestamptz;
BEGIN
	FOR try IN 1..20 LOOP
		DELETE FROM idempotency_keys WHERE route = name;
		TRUNCATE outcomes;
		PERFORM idem_stats_reset();
		COMMIT;
		began := clock_timestamp();
		FOR i IN 1..requests LOOP
			PERFORM fail('k' || i, name);
			COMMIT;
		END LOOP;
		FOR j IN 1..retries LOOP
			FOR i IN 1..requests LOOP
				INSERT INTO outcomes (outcome) VALUES (fail('k' || i, name));
				COMMIT;
			END LOOP;
		END LOOP;
		SELECT format('started %s, resumed %s, throttled %s, failed %s; window: requests %s, retries %s',
			started, resumed, throttled, failed, window_requests, window_retries)
		INTO counted FROM idem_stat_routes WHERE route = name;
		EXIT WHEN fits(began, try, name);
	END LOOP;
END $$;
CALL storm_of_failures('storm', 100, 5);
SELECT outcome, count(*) FROM outcomes GROUP BY 1 ORDER BY 1;
-- the answer to one that is throttled: nothing was done, come back later
SELECT proceed, outcome, status, headers, response, body, attempt, step,
	retry_after BETWEEN '1 s' AND '10 s' AS retry_after, expires_at > now() AS expires
FROM idem_begin('k100', 'storm', NULL);
SELECT state, attempt, status FROM idem_lookup('k100', 'storm');
-- ... at another time each
SELECT count(DISTINCT (idem_begin('k100', 'storm', NULL)).retry_after) > 10 AS apart
FROM generate_series(1, 20);
-- the budget is the route's
CALL storm_of_failures('other', 5, 1);
SELECT outcome FROM outcomes ORDER BY n;
-- a policy of the route's, over the settings
INSERT INTO idem_route_policies (route, retry_ratio) VALUES ('storm', 'infinity');
SELECT outcome, attempt FROM idem_begin('k100', 'storm', NULL);
SELECT idem_finish('k100', '{"at": "last"}', route => 'storm', attempt => 2);
UPDATE idem_route_policies SET retry_ratio = 0;
-- never refused: replays, mismatches, what is in progress, lost leases, and
-- the last failure of a key without attempts
SELECT outcome FROM idem_begin('k100', 'storm', NULL);
SELECT outcome FROM idem_begin('k100', 'storm', '\x00');
SELECT outcome FROM idem_begin('lost', 'storm', NULL, lease => '1 us');
SELECT outcome FROM idem_begin('held', 'storm', NULL);
SELECT outcome, attempt FROM idem_begin('lost', 'storm', NULL);
SELECT outcome FROM idem_begin('held', 'storm', NULL);
SET pg_idem.max_attempts = 1;
SELECT outcome, status FROM idem_begin('k99', 'storm', NULL);
RESET pg_idem.max_attempts;
SELECT outcome, status FROM idem_begin('k99', 'storm', NULL);
-- a take-over of a lost lease counts as a retry all the same
CREATE PROCEDURE take_over(INOUT outcome text DEFAULT NULL, INOUT before bigint DEFAULT NULL,
	INOUT after bigint DEFAULT NULL) LANGUAGE plpgsql AS $$
DECLARE
	began timestamptz;
BEGIN
	FOR try IN 1..20 LOOP
		began := clock_timestamp();
		PERFORM idem_begin('lost ' || try, 'take-over', NULL, lease => '1 us');
		COMMIT;
		SELECT window_retries INTO before FROM idem_stat_routes WHERE route = 'take-over';
		SELECT c.outcome INTO take_over.outcome FROM idem_begin('lost ' || try, 'take-over', NULL) c;
		SELECT window_retries INTO after FROM idem_stat_routes WHERE route = 'take-over';
		EXIT WHEN fits(began, try, 'take-over');
	END LOOP;
END $$;
CALL take_over();
-- idem_call says the same
CREATE FUNCTION work(jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT $1 $$;
SELECT outcome FROM idem_begin('called', 'storm', idem_hash('1'::jsonb));
SELECT idem_finish('called', NULL, 503, attempt => 1);
SELECT proceed, outcome, status, response, retry_after IS NOT NULL AS retry_after
FROM idem_call('called', 'storm', '1', 'work(jsonb)');

RESET pg_idem.retry_min_per_second;
DELETE FROM idem_route_policies;
DELETE FROM idempotency_keys;
DROP TABLE outcomes;
DROP PROCEDURE two_storms, roll_back, storm_of_failures, take_over, empty_window;
DROP FUNCTION storm, one_storm, fits, fail, work;
