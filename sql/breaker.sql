--
-- BREAKER
-- Circuit breakers, in one connection (022_shared_state.pl has many).  Times
-- are either so short that they are over at once, or an hour.
--
CREATE FUNCTION record(service text, ok bool, n int DEFAULT 1, duration interval DEFAULT NULL)
RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	states text[] := '{}';
BEGIN
	FOR i IN 1..n LOOP
		states := states || idem_breaker_record(service, ok, duration);
	END LOOP;
	-- the states, and after how many calls each began
	RETURN (SELECT string_agg(format('%s from %s', state, at), ', ' ORDER BY at)
		FROM (SELECT state, min(i) AS at FROM unnest(states) WITH ORDINALITY s (state, i) GROUP BY state) s);
END $$;
CREATE FUNCTION allowed(service text, n int) RETURNS bigint LANGUAGE sql AS
$$ SELECT count(*) FILTER (WHERE idem_breaker_allow(service)) FROM generate_series(1, n) $$;

-- a breaker that nobody knows is closed
SELECT idem_breaker_allow('new'), idem_breaker_retry_after('new'), idem_breaker_retry_after('unknown');
SELECT service, breaker FROM idem_stat_services WHERE service IN ('new', 'unknown');

-- the defaults: half of the last 100 calls, not before there are 100
SELECT record('default', false, 99), record('default', false);
SELECT idem_breaker_allow('default') AS allow,
	idem_breaker_retry_after('default') BETWEEN '1 s' AND '60 s' AS retry_after;
SELECT breaker, window_calls, open_until BETWEEN now() AND now() + interval '2 min' AS open_until,
	opened, calls_ok, calls_failed, calls_slow, calls_refused
FROM idem_stat_services WHERE service = 'default';
-- one call too few: 49 of 100; then the window slides, and the call that
-- crosses the line opens it
SELECT record('half', true, 51), record('half', false, 49);
SELECT record('half', false, 1) AS "out goes one of the good ones";
-- results that have left the window do not count
SELECT record('slides', false, 40), record('slides', true, 60), record('slides', true, 40),
	record('slides', false, 49), record('slides', false, 1);
-- slow calls: by default only if all are, and longer than a minute
SELECT record('slow', true, 99, '61 s'), record('slow', true, 1, '60 s'), record('slow', true, 99, '61 s'),
	record('slow', true, 1, '61 s');
-- a call that opens it is not seen by one that ends later
SELECT record('slow', true, 1000);

-- settings of a service
INSERT INTO idem_service_policies (service, failure_ratio, window_calls, minimum_calls, open_time,
	half_open_calls)
VALUES ('quick', 0.5, 10, 4, '1 us', 3), ('long', 0.5, 10, 4, '1 h', 3);
SELECT record('quick', false, 3), record('quick', false, 1);
-- its time is over: so many trials are let through, and no more
SELECT breaker, open_until <= clock_timestamp() AS over FROM idem_stat_services WHERE service = 'quick';
SELECT allowed('quick', 10);
SELECT breaker FROM idem_stat_services WHERE service = 'quick';
SELECT idem_breaker_retry_after('quick') > '0' AS retry_after;
-- two of three failed: open again; its time is over at once
SELECT record('quick', true, 1), record('quick', false, 2);
SELECT allowed('quick', 10);
-- one of three failed: closed
SELECT record('quick', false, 1), record('quick', true, 2);
SELECT allowed('quick', 10), idem_breaker_retry_after('quick');
-- and starts with an empty window
SELECT record('quick', false, 3), record('quick', false, 1);
SELECT opened FROM idem_stat_services WHERE service = 'quick';
-- trials are let through one by one as they are asked for; results that
-- belong to none of them do not count
SELECT allowed('quick', 1), record('quick', true, 5);
SELECT allowed('quick', 5), record('quick', true, 5);

-- while open, nothing gets through, and results change nothing
SELECT record('long', false, 4), allowed('long', 100), record('long', true, 100);
SELECT idem_breaker_retry_after('long') BETWEEN '59 min' AND '1 h' AS retry_after;

-- the time grows, twice as long each time that trials fail, up to a limit
CREATE FUNCTION open_for(name text) RETURNS interval LANGUAGE sql AS $$
	SELECT date_trunc('hour', idem_breaker_retry_after(name) + interval '5 min') $$;
INSERT INTO idem_service_policies (service, minimum_calls, open_time, max_open_time, half_open_calls)
VALUES ('doubles', 1, '1 us', '1 us', 2);
SELECT record('doubles', false);
-- 2 trials, both failed, three times over
SELECT allowed('doubles', 5), record('doubles', false, 2);
SELECT allowed('doubles', 5), record('doubles', false, 2);
UPDATE idem_service_policies SET open_time = '1 h', max_open_time = '100 h' WHERE service = 'doubles';
SELECT allowed('doubles', 5), record('doubles', false, 2), open_for('doubles') AS "1 h doubled three times";
-- the limit
INSERT INTO idem_service_policies (service, minimum_calls, open_time, max_open_time, half_open_calls)
VALUES ('limited', 1, '1 us', '1 us', 1);
SELECT record('limited', false), allowed('limited', 1), record('limited', false);
UPDATE idem_service_policies SET open_time = '2 h', max_open_time = '3 h' WHERE service = 'limited';
SELECT allowed('limited', 1), record('limited', false), open_for('limited') AS "not 8 h";
-- a limit below the time itself is none
INSERT INTO idem_service_policies (service, minimum_calls, open_time, max_open_time) VALUES ('odd', 1, '2 h', '1 h');
SELECT record('odd', false), open_for('odd');
-- trials that are never told of have failed, so the next one to ask finds it
-- open again
INSERT INTO idem_service_policies (service, minimum_calls, open_time, half_open_calls, half_open_time)
VALUES ('silent', 1, '1 us', 2, '0');
SELECT record('silent', false), allowed('silent', 2);
UPDATE idem_service_policies SET open_time = '1 h', max_open_time = '10 h' WHERE service = 'silent';
SELECT allowed('silent', 5), open_for('silent');
SELECT breaker, opened FROM idem_stat_services WHERE service = 'silent';
-- told of too late is not told of, whether somebody asked meanwhile or not
INSERT INTO idem_service_policies (service, minimum_calls, open_time, max_open_time, half_open_calls, half_open_time)
VALUES ('late', 1, '1 us', '1 us', 1, '0');
SELECT record('late', false), allowed('late', 1);
UPDATE idem_service_policies SET open_time = '1 h' WHERE service = 'late';
SELECT record('late', true);
-- a slow trial is not a failed one where slow calls do not count
INSERT INTO idem_service_policies (service, minimum_calls, open_time, half_open_calls, slow_call_time, slow_call_ratio)
VALUES ('slow trial', 1, '1 us', 1, '0', 2);
SELECT record('slow trial', false), allowed('slow trial', 5), record('slow trial', true, 1, '1 s');
-- fewer trials are wanted than have been told of: that decides them
INSERT INTO idem_service_policies (service, minimum_calls, open_time, half_open_calls)
VALUES ('fewer', 1, '1 us', 10);
SELECT record('fewer', false), allowed('fewer', 3), record('fewer', true, 3);
UPDATE idem_service_policies SET half_open_calls = 3 WHERE service = 'fewer';
SELECT idem_breaker_retry_after('fewer'), idem_breaker_allow('fewer'), record('fewer', true);

-- a ratio above 1 is never reached; a window below the minimum lowers that
INSERT INTO idem_service_policies (service, failure_ratio, slow_call_ratio, window_calls)
VALUES ('never', 1.01, 1.01, 5), ('small', 0.5, 1, 5);
SELECT record('never', false, 1000, '1 h'), record('small', false, 5);
-- ratios that no binary fraction is are reached when they are, not one later
INSERT INTO idem_service_policies (service, failure_ratio) VALUES ('0.55', 0.55), ('0.07', 0.07);
SELECT record('0.55', true, 45), record('0.55', false, 60), record('0.07', true, 93), record('0.07', false, 10);
-- slow calls have a ratio of their own
INSERT INTO idem_service_policies (service, slow_call_ratio, slow_call_time, window_calls, minimum_calls)
VALUES ('sluggish', 0.2, '100 ms', 10, 10);
SELECT record('sluggish', true, 9, '100 ms'), record('sluggish', true, 1, '101 ms'), record('sluggish', true, 1, '1 day');
-- another window starts anew
INSERT INTO idem_service_policies (service, window_calls, minimum_calls) VALUES ('resized', 10, 10);
SELECT record('resized', false, 9);
UPDATE idem_service_policies SET window_calls = 20 WHERE service = 'resized';
SELECT record('resized', false, 9), record('resized', false, 1);
-- the largest
INSERT INTO idem_service_policies (service, window_calls, minimum_calls) VALUES ('large', 1000, 1000);
SELECT record('large', true, 1500), record('large', false, 500);

-- forced by a person
INSERT INTO idem_service_policies (service, breaker) VALUES ('forced', 'forced_open');
SELECT idem_breaker_allow('forced'), idem_breaker_retry_after('forced'), idem_breaker_record('forced', true);
UPDATE idem_service_policies SET breaker = 'forced_closed' WHERE service = 'forced';
SELECT idem_breaker_allow('forced'), idem_breaker_retry_after('forced'), record('forced', false, 1000);
SELECT breaker, window_calls, calls_failed FROM idem_stat_services WHERE service = 'forced';
-- a change that is rolled back was none
BEGIN;
UPDATE idem_service_policies SET breaker = 'forced_open' WHERE service = 'forced';
SELECT idem_breaker_allow('forced');
ROLLBACK;
SELECT idem_breaker_allow('forced');
-- released, it is closed, whatever it was before
SELECT breaker FROM idem_stat_services WHERE service = 'long';
UPDATE idem_service_policies SET breaker = 'forced_open' WHERE service = 'long';
SELECT idem_breaker_allow('long'), idem_breaker_record('long', true);
UPDATE idem_service_policies SET breaker = NULL WHERE service = 'long';
SELECT idem_breaker_allow('long'), idem_breaker_record('long', true);
-- unless nobody asked it meanwhile; a reset is there for that
INSERT INTO idem_service_policies (service, minimum_calls) VALUES ('reset', 1);
SELECT record('reset', false);
UPDATE idem_service_policies SET breaker = 'forced_closed' WHERE service = 'reset';
UPDATE idem_service_policies SET breaker = NULL WHERE service = 'reset';
SELECT idem_breaker_allow('reset');
SELECT idem_breaker_reset('reset');
SELECT idem_breaker_allow('reset'), idem_breaker_retry_after('reset');
SELECT breaker, opened FROM idem_stat_services WHERE service = 'reset';
SELECT idem_breaker_reset('unseen');
SELECT idem_breaker_reset(NULL);
SELECT count(*) FROM idem_stat_services WHERE service = 'unseen';
TRUNCATE idem_service_policies;
SELECT idem_breaker_record('never', false), idem_breaker_allow('forced');

-- refused
INSERT INTO idem_service_policies (service, failure_ratio) VALUES ('x', 0);
INSERT INTO idem_service_policies (service, failure_ratio) VALUES ('x', 'NaN');
INSERT INTO idem_service_policies (service, slow_call_ratio) VALUES ('x', 0);
INSERT INTO idem_service_policies (service, slow_call_time) VALUES ('x', '-1 s');
INSERT INTO idem_service_policies (service, window_calls) VALUES ('x', 0);
INSERT INTO idem_service_policies (service, window_calls) VALUES ('x', 1001);
INSERT INTO idem_service_policies (service, minimum_calls) VALUES ('x', 0);
INSERT INTO idem_service_policies (service, open_time) VALUES ('x', '-1 s');
INSERT INTO idem_service_policies (service, max_open_time) VALUES ('x', '-1 s');
INSERT INTO idem_service_policies (service, half_open_calls) VALUES ('x', 0);
INSERT INTO idem_service_policies (service, half_open_time) VALUES ('x', '-1 s');
INSERT INTO idem_service_policies (service, breaker) VALUES ('x', 'open');
SELECT idem_breaker_allow(NULL);
SELECT idem_breaker_allow('');
SELECT idem_breaker_record('x', NULL);
SELECT idem_breaker_record('x', true, '-1 us');
SELECT idem_breaker_record(E'\x01', true);
SELECT idem_breaker_retry_after(NULL);
SELECT count(*) FROM idem_stat_services WHERE service = 'x';

DROP FUNCTION record, allowed, open_for;
