-- A service that slows down for a while, and clients with a timeout that
-- retry.  Called by test/storm/simulate.
--
-- A service is a queue with one worker.  A call puts a job at its end, and is
-- told when that will be done.  A client does not wait for longer than its
-- timeout, but the job of one that has given up stays in the queue: the
-- service works for nobody, and has the less time for those who still wait.
-- That is what lets a storm outlive its cause.
--
-- Each policy has a service of its own, of the same name, and each service
-- gets the same requests at the same moments.  Times are since the beginning.
\set ON_ERROR_STOP on

CREATE EXTENSION IF NOT EXISTS pg_idem;

CREATE UNLOGGED TABLE scenario AS SELECT
	NULL::timestamptz AS began,
	30 / :stretch::float8 AS requests_per_second,		-- offered to each service
	:stretch * interval '8.333 ms' AS healthy_time,		-- of one job: 120 a second
	:stretch * interval '166.667 ms' AS sick_time,		-- 6 a second
	:stretch * interval '1.5 s' AS sick_from,
	:stretch * interval '6.5 s' AS sick_until,
	:stretch * interval '13 s' AS ends,
	:stretch * interval '100 ms' AS timeout,			-- of a client
	5 AS max_retries,
	:stretch * interval '50 ms' AS backoff_base,
	:stretch * interval '1 s' AS backoff_cap;

-- What clients do, from nothing to everything
CREATE UNLOGGED TABLE policies (
	n int NOT NULL,
	policy text PRIMARY KEY,
	title text NOT NULL,
	jitter text,				-- NULL: retry at once
	has_budget bool NOT NULL,
	has_breaker bool NOT NULL
);
INSERT INTO policies VALUES
	(1, 'none', 'retries at once', NULL, false, false),
	(2, 'backoff', 'backoff', 'none', false, false),
	(3, 'jitter', 'backoff and jitter', 'full', false, false),
	(4, 'budget', '... and a budget', 'full', true, false),
	(5, 'breaker', '... and a breaker', 'full', true, true);

INSERT INTO idem_service_policies (service, retry_ratio, retry_min_per_second)
VALUES ('budget', 0.2, 0.2), ('breaker', 0.2, 0.2);
UPDATE idem_service_policies SET
	failure_ratio = 0.5,
	window_calls = 20,
	minimum_calls = 20,
	open_time = :stretch * interval '500 ms',
	max_open_time = :stretch * interval '1 s',
	half_open_calls = 3,
	slow_call_time = :stretch * interval '1 s'
WHERE service = 'breaker';

-- The requests to come, at random moments that are the same in each run
CREATE UNLOGGED TABLE arrivals (
	n int PRIMARY KEY,
	policy text NOT NULL,
	at interval NOT NULL
);
SELECT setseed(0.5) \g /dev/null
INSERT INTO arrivals
SELECT row_number() OVER (ORDER BY at, n), policy, at
FROM (
	SELECT sum(gap) OVER (ORDER BY i) * interval '1 s' AS at
	FROM (SELECT i, -ln(1 - random()) / requests_per_second AS gap
		FROM scenario, generate_series(1, 1000) i) gaps) moments,
	policies, scenario
WHERE at < ends;

CREATE SEQUENCE next_arrival;

CREATE UNLOGGED TABLE services (
	service text PRIMARY KEY,
	free_at timestamptz			-- when all its jobs will be done
) WITH (fillfactor = 10);
INSERT INTO services SELECT policy FROM policies;

CREATE UNLOGGED TABLE calls (
	service text NOT NULL,
	at interval NOT NULL,
	retry int NOT NULL
);

CREATE UNLOGGED TABLE requests (
	policy text NOT NULL,
	at interval NOT NULL,
	late interval NOT NULL,		-- found no free client until then
	calls int NOT NULL,
	ok bool NOT NULL
);

-- Put a job into a service's queue.  Returns how long it will take.
CREATE FUNCTION call_service(the_service text, retry int) RETURNS interval
LANGUAGE plpgsql AS $$
DECLARE
	sc scenario;
	now timestamptz;
	start timestamptz;			-- of the job
	done timestamptz;
BEGIN
	SELECT * INTO sc FROM scenario;
	SELECT free_at INTO start FROM services WHERE service = the_service FOR UPDATE;
	now := clock_timestamp();
	start := greatest(start, now);
	done := start + CASE
		WHEN start >= sc.began + sc.sick_from AND start < sc.began + sc.sick_until
		THEN sc.sick_time ELSE sc.healthy_time END;

	UPDATE services SET free_at = done WHERE service = the_service;
	INSERT INTO calls VALUES (the_service, now - sc.began, retry);
	RETURN done - now;
END
$$;

-- One request: a call, and as many retries as the policy makes.  Commits
-- before it waits for the service, so that it holds no lock meanwhile.
CREATE PROCEDURE make_request(request arrivals)
LANGUAGE plpgsql AS $$
DECLARE
	sc scenario;
	p policies;
	late interval;
	calls int := 0;
	duration interval;
	ok bool := false;
BEGIN
	SELECT * INTO sc FROM scenario;
	SELECT * INTO p FROM policies WHERE policy = request.policy;
	late := clock_timestamp() - (sc.began + request.at);

	FOR retry IN 0 .. sc.max_retries LOOP
		-- Ask the budget before the breaker: what the breaker lets through
		-- may be a trial, and has to be made.
		EXIT WHEN p.has_budget AND NOT idem_budget_allow(p.policy, retry > 0);
		IF retry > 0 AND p.jitter IS NOT NULL THEN
			PERFORM pg_sleep_for(idem_backoff(retry - 1, sc.backoff_base,
											  sc.backoff_cap, p.jitter));
		END IF;
		EXIT WHEN p.has_breaker AND NOT idem_breaker_allow(p.policy);

		duration := call_service(p.policy, retry);
		COMMIT;
		calls := calls + 1;
		ok := duration <= sc.timeout;
		duration := least(duration, sc.timeout);
		PERFORM pg_sleep_for(duration);

		IF p.has_breaker THEN
			PERFORM idem_breaker_record(p.policy, ok, duration);
		END IF;
		EXIT WHEN ok;
	END LOOP;

	INSERT INTO requests VALUES (p.policy, request.at, late, calls, ok);
END
$$;

-- A client: makes requests when they are due, until there are no more.
CREATE PROCEDURE client()
LANGUAGE plpgsql AS $$
DECLARE
	request arrivals;
	due timestamptz;
BEGIN
	UPDATE scenario SET began = clock_timestamp() + interval '2 s'
	WHERE began IS NULL;
	COMMIT;
	LOOP
		request.n := nextval('next_arrival');
		SELECT * INTO request FROM arrivals WHERE n = request.n;
		EXIT WHEN NOT FOUND;
		SELECT began + request.at INTO due FROM scenario;
		COMMIT;
		PERFORM pg_sleep_for(due - clock_timestamp());
		CALL make_request(request);
		COMMIT;
	END LOOP;
END
$$;

-- Calls per second, for each half second
CREATE VIEW series AS
SELECT n, policy, extract(epoch FROM from_time) AS at, (
	SELECT 2 * count(*) FROM calls c
	WHERE service = policy
	AND c.at >= from_time AND c.at < from_time + interval '0.5 s') AS calls
FROM policies, scenario,
	LATERAL (SELECT g * interval '0.5 s' AS from_time
		FROM generate_series(0, 2 * extract(epoch FROM ends)::int - 1) g) slots;

-- What became of it.  A service has recovered when all requests from then on
-- succeed with their first call; recovered_after is counted from the end of
-- its sickness, and NULL if there was such a request in the last second.
CREATE VIEW results AS
SELECT n, policy, title, requests, failed, uncalled,
	total_calls AS calls, total_retries AS retries,
	sick_requests, sick_calls,
	round(sick_calls / sick_requests::numeric, 2) AS sick_load,
	(SELECT max(s.calls) FROM series s WHERE s.policy = p.policy) AS peak,
	last_requests, last_good,
	CASE WHEN last_bad < ends - :stretch * interval '1 s'
		THEN greatest(last_bad - sick_until, '0') END AS recovered_after,
	late
FROM policies p CROSS JOIN scenario
CROSS JOIN LATERAL (
	SELECT count(*) AS requests,
		count(*) FILTER (WHERE NOT ok) AS failed,
		count(*) FILTER (WHERE calls = 0) AS uncalled,
		count(*) FILTER (WHERE at >= sick_from AND at < sick_until) AS sick_requests,
		count(*) FILTER (WHERE at >= ends - :stretch * interval '2 s') AS last_requests,
		count(*) FILTER (WHERE at >= ends - :stretch * interval '2 s' AND ok AND calls = 1) AS last_good,
		coalesce(max(at) FILTER (WHERE NOT ok OR calls <> 1), '0') AS last_bad,
		max(late) AS late
	FROM requests r WHERE r.policy = p.policy) r
CROSS JOIN LATERAL (
	SELECT count(*) AS total_calls,
		count(*) FILTER (WHERE retry > 0) AS total_retries,
		count(*) FILTER (WHERE at >= sick_from AND at < sick_until) AS sick_calls
	FROM calls WHERE service = policy) c;
