--
-- CONFORMANCE
-- Held against what others have published: the String items of the HTTP
-- working group's test corpus for Structured Fields, and the formulas of
-- backoff with jitter.  (Circuit breakers: circuit.)
--

--
-- Structured Fields (httpwg/structured-field-tests).  Each case is a header
-- and the string that it stands for, or NULL for one that must be refused.
--
CREATE FUNCTION key_or_null(header text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	RETURN idem_parse_key(header);
EXCEPTION WHEN invalid_parameter_value THEN
	RETURN NULL;
END $$;
CREATE VIEW corpus AS
-- string.json; a header that came in two lines is joined by a comma
VALUES ('basic', '"foo bar"', 'foo bar'),
	('empty', '""', ''),
	('long', '"' || repeat('foo ', 65) || '"', repeat('foo ', 65)),
	('white space', '"   "', '   '),
	('not ASCII', E'"f\u00fc\u00fc"', NULL),
	('tab', E'"\t"', NULL),
	('newline', E'" \n "', NULL),
	('single quotes', '''foo''', NULL),
	('unbalanced', '"foo', NULL),
	('escapes', '"foo \"bar\" \\ baz"', 'foo "bar" \ baz'),
	('escaped comma', '"foo \,"', NULL),
	('escaped closing quote', '"foo \"', NULL),
	('ends within an escape', '"foo \', NULL),
	('two lines', '"foo, bar"', 'foo, bar'),
-- item.json, whose items are numbers: as bare keys they are taken as sent
	('nothing', '', NULL),
	('tab in front', E' \t 1', NULL),
	('tab behind', E'1 \t ', NULL),
	('blanks', '  1  ', '1'),
	('many blanks', '     1  ', '1')
-- string-generated.json: each character of ASCII within a string, then
-- escaped; without NUL, which no text can hold
UNION ALL
SELECT format('0x%s', lpad(to_hex(i), 2, '0')), format('" %s "', chr(i)),
	CASE WHEN i BETWEEN 32 AND 126 AND chr(i) NOT IN ('"', '\') THEN format(' %s ', chr(i)) END
FROM generate_series(1, 127) i
UNION ALL
SELECT format('0x%s, escaped', lpad(to_hex(i), 2, '0')), format('"\%s"', chr(i)),
	CASE WHEN chr(i) IN ('"', '\') THEN chr(i) END
FROM generate_series(1, 127) i;

SELECT count(*) AS cases, count(column3) AS strings FROM corpus;
-- The differences, all of them wanted: a key must not be empty, nor longer
-- than 255 bytes; and what is in no double quotes is a bare key, as most
-- clients send it.
SELECT column1 AS differs, left(column2, 20) AS header, left(column3, 20) AS corpus, key_or_null(column2) AS key
FROM corpus WHERE key_or_null(column2) IS DISTINCT FROM column3 ORDER BY 1;
DROP VIEW corpus;
DROP FUNCTION key_or_null;

--
-- Backoff with jitter, as M. Brooker published it ("Exponential Backoff And
-- Jitter", 2015), sleep being in ms:
--	full			random between 0 and min(cap, base * 2 ** attempt)
--	equal			t / 2 + random between 0 and t / 2, t being that minimum
--	decorrelated	min(cap, random between base and last sleep * 3)
-- in numbers that retry does not have, and against the formulas' means.
--
CREATE FUNCTION ms(i interval) RETURNS float8 LANGUAGE sql AS
	$$ SELECT (1000 * extract(epoch FROM i))::float8 $$;
-- Of n independent draws out of a range, the mean is off by t ranges or more
-- with a probability of 2 exp(-2 n t^2) at the most (Hoeffding).  With 10000
-- and 0.04 that is 3 in 10^14, whatever the seed, for each of the rows.
-- None comes within a hundredth of the range's end with one of 0.99^10000, or,
-- where the cap takes three of four draws, of 0.9975^10000: 1 in 10^10.
SELECT jitter, retry, base, cap, previous,
	min(ms(wait)) >= low AND max(ms(wait)) <= high AS within,
	min(ms(wait)) < low + (high - low) / 100 AND max(ms(wait)) > high - (high - low) / 100 AS all_of_it,
	abs(avg(ms(wait)) - mean) < 0.04 * (high - low) AS mean
FROM (VALUES (0, 100, 10000, 100), (3, 100, 10000, 350), (6, 100, 10000, 3000), (7, 100, 10000, 5000),
		(30, 100, 10000, 10000), (1, 2000, 3000, 2000), (2000000000, 7, 777, 77)) n (retry, base, cap, previous),
	LATERAL (SELECT least(cap, base * 2.0 ^ least(retry, 50))::float8 AS t, least(cap, 3 * previous)::float8 AS d,
		3.0 * previous - base AS span) v,
	LATERAL (VALUES ('full', 0, t, t / 2), ('equal', t / 2, t, t * 3 / 4),
		-- uniform up to d, and d for all that is above it
		('decorrelated', base, d, ((d - base) * (d + base) / 2 + (3 * previous - d) * d) / span)) f (jitter, low, high, mean),
	LATERAL (SELECT idem_backoff(retry, base * interval '1 ms', cap * interval '1 ms', jitter, previous * interval '1 ms') AS wait
		FROM generate_series(1, 10000) WHERE jitter IS NOT NULL) w
GROUP BY jitter, retry, base, cap, previous, low, high, mean ORDER BY jitter, retry, base;
-- one sleep after the other: decorrelated sleeps never leave base and cap, and
-- never grow to more than three times the last
WITH RECURSIVE sleeps (n, last, sleep) AS (
	SELECT 1, interval '100 ms', idem_backoff(0, '100 ms', '10 s', 'decorrelated')
	UNION ALL
	SELECT n + 1, sleep, idem_backoff(n, '100 ms', '10 s', 'decorrelated', sleep) FROM sleeps WHERE n < 1000)
SELECT count(*), count(*) FILTER (WHERE sleep BETWEEN '100 ms' AND '10 s' AND sleep <= 3 * last) AS kept
FROM sleeps;
DROP FUNCTION ms;
