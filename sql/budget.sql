--
-- BUDGET
-- Retry budgets: idem_budget for services, and idem_begin's own for the
-- re-executions of a route.  The window is ten seconds long, so each case has
-- a service or route of its own, and none waits for the window to move; what
-- is counted exactly is counted within far less (022_shared_state.pl has many
-- connections).
--

-- retries <= ratio * requests + minimum per second * 10
CREATE FUNCTION storm(service text, requests int, retries int) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	allowed int := 0;
BEGIN
	FOR i IN 1..requests LOOP
		IF NOT idem_budget(service, false) THEN
			RAISE 'a request was refused';
		END IF;
		FOR j IN 1..retries LOOP
			allowed := allowed + idem_budget(service, true)::int;
		END LOOP;
	END LOOP;
	RETURN format('%s requests, %s of %s retries', requests, allowed, requests * retries);
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
SELECT idem_budget('idle', true);
RESET pg_idem.retry_min_per_second;
SELECT idem_budget('idle', true);
RESET pg_idem.retry_ratio;

-- a service's own, over the settings; none at all with an infinite one
INSERT INTO idem_service_policies (service, retry_ratio, retry_min_per_second)
VALUES ('tenth', 0.1, 0), ('free', 'infinity', 0), ('free from the start', 'infinity', 0);
SELECT storm('tenth', 1000, 5);
SELECT storm('free', 1000, 5);
SELECT idem_budget('free from the start', true);
UPDATE idem_service_policies SET retry_ratio = NULL WHERE service = 'tenth';
SELECT storm('tenth', 500, 5) AS rest_of_a_fifth;
-- refused
INSERT INTO idem_service_policies (service, retry_ratio) VALUES ('x', -0.1);
INSERT INTO idem_service_policies (service, retry_ratio) VALUES ('x', 'NaN');
INSERT INTO idem_service_policies (service, retry_min_per_second) VALUES ('x', -1);
INSERT INTO idem_service_policies (service) VALUES ('');
INSERT INTO idem_service_policies (service) VALUES (repeat('x', 256));
INSERT INTO idem_routes (route, retry_ratio) VALUES ('x', 'NaN');
DELETE FROM idem_service_policies;

-- what is spent is spent, whatever becomes of the transaction
BEGIN;
SELECT storm('rolled back', 10, 0);
ROLLBACK;
SELECT window_requests, window_retries, retries_refused FROM idem_services WHERE service = 'rolled back';

-- bad input
SELECT idem_budget(NULL, false);
SELECT idem_budget('x', NULL);
SELECT idem_budget('', false);
SELECT idem_budget(repeat('x', 256), false);
SELECT idem_budget(E'a\nb', false);
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
DO $$ BEGIN FOR i IN 1..100 LOOP PERFORM fail('k' || i, 'storm'); COMMIT; END LOOP; END $$;
CREATE TABLE outcomes (outcome text);
DO $$ BEGIN FOR n IN 1..5 LOOP FOR i IN 1..100 LOOP
	INSERT INTO outcomes VALUES (fail('k' || i, 'storm')); COMMIT; END LOOP; END LOOP; END $$;
SELECT outcome, count(*) FROM outcomes GROUP BY 1 ORDER BY 1;
SELECT started, resumed, throttled, failed, window_requests, window_retries
FROM idem_stats WHERE route = 'storm';
-- the answer to one that is throttled: nothing was done, come back later
SELECT proceed, outcome, status, headers, response, body, attempt, step,
	retry_after BETWEEN '1 s' AND '10 s' AS retry_after, expires_at > now() AS expires
FROM idem_begin('k100', 'storm', NULL);
SELECT state, attempt, status FROM idem_lookup('k100', 'storm');
-- ... at another time each
SELECT count(DISTINCT (idem_begin('k100', 'storm', NULL)).retry_after) > 10 AS apart
FROM generate_series(1, 20);
-- the budget is the route's
DO $$ BEGIN FOR i IN 1..5 LOOP PERFORM fail('k' || i, 'other'); COMMIT; END LOOP; END $$;
SELECT fail('k1', 'other');
SELECT fail('k2', 'other');
-- a policy of the route's, over the settings
INSERT INTO idem_routes (route, retry_ratio) VALUES ('storm', 1);
SELECT outcome, attempt FROM idem_begin('k100', 'storm', NULL);
SELECT idem_finish('k100', '{"at": "last"}', route => 'storm', attempt => 2);
UPDATE idem_routes SET retry_ratio = 0;
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
SELECT window_retries FROM idem_stats WHERE route = 'storm';
-- idem_call says the same
CREATE FUNCTION work(jsonb) RETURNS jsonb LANGUAGE sql AS $$ SELECT $1 $$;
SELECT outcome FROM idem_begin('called', 'storm', idem_hash('1'::jsonb));
SELECT idem_finish('called', NULL, 503, attempt => 1);
SELECT proceed, outcome, status, response, retry_after IS NOT NULL AS retry_after
FROM idem_call('called', 'storm', '1', 'work(jsonb)');

RESET pg_idem.retry_min_per_second;
DELETE FROM idem_routes;
DELETE FROM idempotency_keys;
DROP TABLE outcomes;
DROP FUNCTION storm, fail, work;
