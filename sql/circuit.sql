--
-- CIRCUIT
-- Circuit breakers held against what the documentation of Resilience4j says
-- of its count-based one, as far as breaker does not have it already.
--
-- A script is a letter for each call: o went well, f failed, s went well but
-- was slow, b failed and was slow, each told of without asking; a asks whether
-- to call.  What comes of them is a letter too: the state after the call (C,
-- O, H), and + or - for the answer.  No time passes: an open time is 0, and
-- so over when it is asked for, or an hour.
--
CREATE FUNCTION play(service text, script text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	c text;
	trail text := '';
BEGIN
	FOREACH c IN ARRAY string_to_array(script, NULL) LOOP
		trail := trail || CASE c WHEN ' ' THEN ' '
			WHEN 'a' THEN CASE WHEN idem_breaker_allow(service) THEN '+' ELSE '-' END
			ELSE upper(left(idem_breaker_record(service, c IN ('o', 's'),
				CASE WHEN c IN ('s', 'b') THEN interval '2 s' ELSE '1 s' END), 1)) END;
	END LOOP;
	RETURN trail;
END $$;

INSERT INTO idem_service_policies (service, window_calls, minimum_calls, failure_ratio, slow_call_ratio,
	slow_call_time, half_open_calls, open_time, max_open_time, half_open_time)
SELECT 'r4j ' || name, 10, 5, 0.5, slow, '1 s', 2, open, open, '1 h'
FROM (VALUES ('rates', 0.8::float8, interval '0'), ('stays open', 0.8, '1 h'), ('slow is well', 1.01, '0')) v (name, slow, open);

CREATE TEMP TABLE scenarios (n serial, says text, service text, script text, trail text);
INSERT INTO scenarios (says, service, script, trail) VALUES
('no rate is computed below the minimum number of calls', 'rates', 'ffff a', 'CCCC +'),
('a rate that equals the threshold opens it', 'rates', 'ooffof', 'CCCCCO'),
('one below it does not', 'rates', 'ooofof oooo a', 'CCCCCC CCCC +'),
('the oldest call is evicted when the window is full', 'rates', 'fooof ooooo ooooo ffff f', 'CCCCC CCCCC CCCCC CCCC O'),
('slow calls open it by a threshold of their own', 'rates', 'sosss', 'CCCCO'),
('... and not below it', 'rates', 'sosos a', 'CCCCC +'),
('a call that failed and was slow counts as failed', 'rates', 'bboob', 'CCCCO'),
('... and as slow', 'rates', 'bsssb', 'CCCCO'),
('... while one that was only one of them is not the other', 'rates', 'foofo sss', 'CCCCC CCC'),
('while open, calls are rejected, whatever is told of others', 'stays open', 'fffff aaa ooooo a', 'CCCCO --- OOOOO -'),
('half open, a number of calls is permitted, and further ones are rejected', 'rates', 'fffff aa aaa', 'CCCCO ++ ---'),
('... until all permitted ones have completed', 'rates', 'fffff aa o aaa o a', 'CCCCO ++ H --- C +'),
('the rates of the trials decide, without a minimum: closed below both', 'rates', 'fffff aaos', 'CCCCO ++HC'),
('... open where failures equal their threshold', 'rates', 'fffff aaof', 'CCCCO ++HO'),
('... or slow ones reach theirs', 'rates', 'fffff aass', 'CCCCO ++HO'),
('... again and again', 'rates', 'fffff aaff aafo aaoo a', 'CCCCO ++HO ++HO ++HC +'),
('a threshold that cannot be reached turns slow calls off', 'slow is well', 'sssss sssss a', 'CCCCC CCCCC +'),
('closed again, it has an empty window', 'rates', 'fffff aaoo ffff f', 'CCCCO ++HC CCCC O'),
('reset, it is closed with an empty window', 'rates', 'ffff', 'CCCC');

-- every scenario begins with a breaker that is reset; only differences show
CREATE FUNCTION play_all() RETURNS TABLE (says text, expected text, played text) LANGUAGE plpgsql AS $$
DECLARE
	s scenarios;
BEGIN
	FOR s IN SELECT * FROM scenarios ORDER BY n LOOP
		PERFORM idem_breaker_reset('r4j ' || s.service);
		played := play('r4j ' || s.service, s.script);
		CONTINUE WHEN played = s.trail;
		says := s.says;
		expected := s.trail;
		RETURN NEXT;
	END LOOP;
END $$;
SELECT count(*) FROM scenarios;
SELECT * FROM play_all();

-- What is different: where Resilience4j waits for ever for a trial that nobody
-- tells of (its maximum wait is 0 by default), half_open_time is over at some
-- time, and 0 is at once; then the breaker is open again.
UPDATE idem_service_policies SET half_open_time = '0', open_time = '0' WHERE service = 'r4j rates';
SELECT idem_breaker_reset('r4j rates');
SELECT play('r4j rates', 'fffff aa');
UPDATE idem_service_policies SET open_time = '1 h', max_open_time = '1 h' WHERE service = 'r4j rates';
SELECT play('r4j rates', 'a'), idem_breaker_retry_after('r4j rates') > '0' AS open;

DELETE FROM idem_service_policies WHERE service LIKE 'r4j%';
DROP TABLE scenarios;
DROP FUNCTION play, play_all;
