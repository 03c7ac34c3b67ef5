--
-- RETRY
-- When and whether to retry: idem_backoff, idem_retryable, idem_retry.  With
-- a seed they are functions of their arguments, so nothing here depends on
-- chance but where it is said.
--
-- without jitter: base * 2^retry, capped, and no overflow ever
SELECT retry, idem_backoff(retry, jitter => 'none') AS wait,
	idem_backoff(retry, '1 us', 'infinity'::text::interval, 'none') AS uncapped
FROM unnest('{0,1,2,8,9,61,62,63,64,1000000000,2147483647}'::int[]) retry
WHERE current_setting('server_version_num')::int >= 170000
UNION ALL
SELECT retry, idem_backoff(retry, jitter => 'none') AS wait,
	idem_backoff(retry, '1 us', '2562047788:00:54.775807', 'none') AS uncapped
FROM unnest('{0,1,2,8,9,61,62,63,64,1000000000,2147483647}'::int[]) retry
WHERE current_setting('server_version_num')::int < 170000
ORDER BY retry;

-- bases and caps at the edges
SELECT idem_backoff(5, '1 h', '1 s', 'none') AS cap_below_base,
	idem_backoff(5, '0', '1 s', 'none') AS zero_base,
	idem_backoff(5, '1 s', '0', 'none') AS zero_cap,
	idem_backoff(5, '0', '0', 'full') AS both,
	idem_backoff(40, '0', jitter => 'equal') AS zero_base_equal,
	idem_backoff(0, '1 mon', '1 year', 'none') = '30 days' AS months,
	idem_backoff(70, '178000000 years', '178000000 years', 'none') > '100000 years' AS saturated;
SELECT s, sqlstate_of(s) FROM unnest(ARRAY[
	'SELECT idem_backoff(NULL)',
	'SELECT idem_backoff(-1)',
	'SELECT idem_backoff(0, base => ''-1 us'')',
	'SELECT idem_backoff(0, cap => ''-1 us'')',
	'SELECT idem_backoff(0, base => ''-178000000 years'')',
	'SELECT idem_backoff(0, previous => ''-1 us'')',
	'SELECT idem_backoff(0, jitter => ''Full'')',
	'SELECT idem_backoff(0, jitter => '''')',
	'SELECT idem_backoff(0, NULL, NULL, NULL, NULL, NULL)']) s;
SELECT idem_backoff(0, jitter => 'some');

-- the same seed gives the same wait, another one another
SELECT count(DISTINCT idem_backoff(10, seed => 42)) AS same,
	count(DISTINCT idem_backoff(10, seed => n)) AS different,
	count(DISTINCT idem_backoff(10)) > 990 AS unseeded
FROM generate_series(1, 1000) n;

-- jitter keeps within its formula ...
SELECT jitter, min(wait) >= low AS not_below, max(wait) <= high AS not_above,
	min(wait) < low + (high - low) / 100 AS reaches_low,
	max(wait) > high - (high - low) / 100 AS reaches_high
FROM (VALUES ('full', '0 ms'::interval, '6400 ms'::interval),
	('equal', '3200 ms', '6400 ms'),
	('decorrelated', '100 ms', '3 s')) j (jitter, low, high),
	LATERAL (SELECT idem_backoff(6, jitter => j.jitter, previous => '1 s', seed => n) AS wait
	FROM generate_series(1, 10000) n) w
GROUP BY jitter, low, high ORDER BY jitter;
-- ... and is uniform in it: Kolmogorov-Smirnov, against the bound for a
-- probability of error of 1 in 10^12, with seeds and without
CREATE FUNCTION distance_from_uniform(waits interval[], low interval, high interval)
RETURNS float8 LANGUAGE sql AS $$
	SELECT max(greatest(rank / n - f, f - (rank - 1) / n)) * sqrt(max(n))
	FROM (SELECT extract(epoch FROM w - low) / extract(epoch FROM high - low) AS f,
		row_number() OVER (ORDER BY w)::float8 AS rank, count(*) OVER ()::float8 AS n
		FROM unnest(waits) w) s
$$;
SELECT jitter, seeded, distance_from_uniform(array_agg(
	idem_backoff(6, jitter => j.jitter, previous => '1 s',
		seed => CASE WHEN seeded THEN n END)), low, high) < 3.76 AS uniform
FROM (VALUES ('full', '0 ms'::interval, '6400 ms'::interval),
	('equal', '3200 ms', '6400 ms'),
	('decorrelated', '100 ms', '3 s')) j (jitter, low, high),
	unnest('{t,f}'::bool[]) seeded, generate_series(1, 10000) n
GROUP BY jitter, seeded, low, high ORDER BY jitter, seeded;
-- the test can tell: equal jitter is not full jitter, and a generator that
-- repeats itself is not uniform
SELECT distance_from_uniform(array_agg(idem_backoff(6, jitter => 'equal', seed => n)),
		'0 ms', '6400 ms') > 3.76 AS wrong_formula,
	distance_from_uniform(array_agg(idem_backoff(6, seed => n % 100)),
		'0 ms', '6400 ms') > 3.76 AS repeats
FROM generate_series(1, 10000) n;
-- waits of successive retries are independent of one another: with the same
-- number of retries, half of them are longer than the one before
SELECT count(*) FILTER (WHERE wait > before) BETWEEN 4700 AND 5300 AS independent
FROM (SELECT wait, lag(wait) OVER (ORDER BY n) AS before
	FROM (SELECT n, idem_backoff(6, seed => n) AS wait FROM generate_series(1, 10001) n) w) p;

-- decorrelated: from base to three times the last wait, capped, the base
-- where there was none
SELECT max(idem_backoff(99, jitter => 'decorrelated', seed => n)) <= '300 ms' AS first,
	max(idem_backoff(0, cap => '2 s', jitter => 'decorrelated', previous => '10 s', seed => n)) AS capped,
	min(idem_backoff(0, cap => '2 s', jitter => 'decorrelated', previous => '10 s', seed => n)) < '1 s' AS not_all,
	max(idem_backoff(0, jitter => 'decorrelated', previous => '0', seed => n)) <= '100 ms' AS after_zero,
	max(idem_backoff(0, cap => '2562047788:00:54.775807', jitter => 'decorrelated',
		previous => '2562047788:00:54.775807', seed => n)) > '1000000000 h' AS saturated
FROM generate_series(1, 1000) n;

-- what is retryable: all statuses
SELECT idem_retryable(status) AS retryable, array_agg(status ORDER BY status) AS statuses
FROM unnest('{-1,0,99,100,200,204,301,304,400,401,403,404,408,409,410,412,422,423,425,428,429,
	499,500,501,502,503,504,505,506,507,508,509,510,511,520,529,598,599,600,2147483647}'::int[]) status
GROUP BY 1 ORDER BY 1;
SELECT idem_retryable(NULL::int) AS no_answer;
-- all SQLSTATEs that matter
SELECT idem_retryable(state) AS retryable, array_agg(state ORDER BY state COLLATE "C") AS states
FROM unnest('{00000,01000,02000,08000,08001,08003,08004,08006,08007,08P01,09000,22023,23505,
	25006,25P02,40000,40001,40002,40003,40P01,42501,42P01,53000,53100,53200,53300,53400,54000,
	55000,55006,55P03,57000,57014,57P01,57P02,57P03,57P04,57P05,58030,IK001,IK002,IK003,
	P0001,XX000}'::text[]) state
GROUP BY 1 ORDER BY 1;
SELECT idem_retryable(NULL::text) AS no_answer, idem_retryable(NULL) AS untyped;
SELECT s, sqlstate_of('SELECT idem_retryable(' || quote_literal(s) || '::text)')
FROM unnest('{"",4000,400011,4000a,40 01,503}'::text[]) s;
SELECT idem_retryable('503');

-- whether and when: give up, or wait
SELECT retry, status, idem_retry(retry, status, jitter => 'none') AS wait
FROM (VALUES (0, 503), (1, 503), (8, 503), (9, 503), (2147483647, 503),
	(3, NULL), (3, 200), (3, 400), (3, 409), (3, 422), (3, 429)) v (retry, status);
SELECT idem_retry(2, 503, max_attempts => 3) AS used_up,
	idem_retry(1, 503, max_attempts => 3) IS NOT NULL AS one_left,
	idem_retry(0, 503, max_attempts => 1) AS never;
SET pg_idem.max_attempts = 2;
SELECT idem_retry(0, 503, jitter => 'none') AS one, idem_retry(1, 503, jitter => 'none') AS none;
RESET pg_idem.max_attempts;
SELECT s, sqlstate_of(s) FROM unnest(ARRAY[
	'SELECT idem_retry(NULL, 503)',
	'SELECT idem_retry(-1, 503)',
	'SELECT idem_retry(0, 503, max_attempts => 0)',
	'SELECT idem_retry(0, 200, jitter => ''x'')',
	'SELECT idem_retry(0, 503, cap => ''-1 s'')']) s;

-- Retry-After in seconds; what is malformed counts as not there
SELECT header, idem_retry(0, 503, header, jitter => 'none') AS wait
FROM unnest(ARRAY['0', '1', '120', '  7	', '0000000003', '', ' ', '-1', '+1', '1.5', '1e3',
	'7 s', 'soon', '٣', '99999999999999999999999999', NULL]) header;
-- with jitter: never sooner than asked, and not all at once
SELECT min(wait) >= '2 min' AS not_sooner, max(wait) <= '2 min 6.4 s' AS not_much_later,
	count(DISTINCT wait) > 900 AS apart
FROM (SELECT idem_retry(6, 503, '120', seed => n) AS wait FROM generate_series(1, 1000) n) w;
-- a 409 that names a time is a request under way; others are not cured by it
SELECT idem_retry(0, 409, '1', jitter => 'none') AS in_progress,
	idem_retry(0, 409, 'soon', jitter => 'none') AS malformed,
	idem_retry(0, 422, '1', jitter => 'none') AS mismatch;

-- Retry-After as a date, in each form of RFC 9110
SET TimeZone = 'America/New_York';
CREATE FUNCTION utc(t timestamptz, format text) RETURNS text LANGUAGE sql AS
$$ SELECT to_char(t AT TIME ZONE 'UTC', format) $$;
SELECT form, idem_retry(0, 503, CASE WHEN form = 'asctime, short'
	THEN utc(t, 'Dy Mon ') || lpad(utc(t, 'FMDD'), 2) || utc(t, ' HH24:MI:SS YYYY')
	ELSE utc(t, format) END, jitter => 'none') BETWEEN '23 h' AND '24 h 1 s' AS a_day
FROM (SELECT clock_timestamp() + '1 day' AS t) now, (VALUES
	('IMF-fixdate', 'Dy, DD Mon YYYY HH24:MI:SS "GMT"'),
	('RFC 850', 'FMDay, DD-Mon-YY HH24:MI:SS "GMT"'),
	('asctime', 'Dy Mon DD HH24:MI:SS YYYY'),
	('asctime, short', '')) v (form, format);
-- a year of two digits is never more than 50 years ahead
SELECT y, idem_retry(0, 503, utc(clock_timestamp() + y * interval '1 year',
	'FMDay, DD-Mon-YY HH24:MI:SS "GMT"'), jitter => 'none') > '1 h' AS ahead
FROM unnest('{1,49,51,99}'::int[]) y;
-- far away, which is exact enough to be compared; past; malformed
SELECT header, idem_retry(0, 503, header, jitter => 'none') > '1000000 h' AS far,
	idem_retry(0, 503, header, jitter => 'none') = '100 ms' AS ignored
FROM unnest(ARRAY['Fri, 31 Dec 9999 23:59:59 GMT', 'Fri, 31 Dec 9999 23:59:60 GMT',
	'Fri Dec 31 23:59:59 9999', 'Mon, 29 Feb 2400 00:00:00 GMT',
	'Sun, 06 Nov 1994 08:49:37 GMT', 'Sunday, 06-Nov-94 08:49:37 GMT',
	'Sun Nov  6 08:49:37 1994',
	'Fri, 31 Dec 9999 23:59:59', 'Fri, 31 Dec 9999 23:59:59 UTC', 'Fri, 31 Dec 9999 23:59:59 GMT+1',
	'Fri, 31 Dec 9999 24:00:00 GMT', 'Fri, 31 Dec 9999 23:60:00 GMT', 'Fri, 31 Dec 9999 23:59:61 GMT',
	'Fri, 32 Dec 9999 23:59:59 GMT', 'Fri, 00 Dec 9999 23:59:59 GMT', 'Fri, 29 Feb 9999 23:59:59 GMT',
	'Fri, 31 Dez 9999 23:59:59 GMT', 'Fri, 31 Dec 99999 23:59:59 GMT', 'Fri, -1 Dec 9999 23:59:59 GMT',
	'Fri,31 Dec 9999 23:59:59 GMT', 'Fri, 31  Dec 9999 23:59:59 GMT', E'Fri, 31 Dec\n9999 23:59:59 GMT',
	'Fri, +1 Dec 9999 23:59:59 GMT', 'Fri, 31 Dec 9999  3:59:59 GMT', 'Fri Dec 1 23:59:59 9999',
	', 06-Nov-94 08:49:37 GMT', 'Sunday, 06-Nov--1 08:49:37 GMT', 'Fri, 31 Dec 9999 23:59:59 GMT ',
	'9999-12-31 23:59:59', 'infinity', 'Fri, 31 Dec 9999', repeat('9', 100000)]) WITH ORDINALITY h (header, n)
WHERE length(header) < 100 ORDER BY n;
SELECT idem_retry(0, 503, repeat('9', 100000), jitter => 'none') > '1000000 h' AS long_digits,
	idem_retry(0, 503, repeat('x', 100000), jitter => 'none') AS long_junk;
RESET TimeZone;

-- once the key is forgotten, a retry would be a new request
SELECT idem_retry(0, 503, expires_at => clock_timestamp() - interval '1 h', jitter => 'none') AS gone,
	idem_retry(0, 503, '7200', clock_timestamp() + interval '1 h', jitter => 'none') AS too_late,
	idem_retry(0, 503, '1800', clock_timestamp() + interval '1 h', jitter => 'none') AS in_time,
	idem_retry(0, 503, '7200', 'infinity', jitter => 'none') AS for_ever,
	idem_retry(0, 503, expires_at => '-infinity', jitter => 'none') AS never;

-- pure functions run in parallel workers, and for everybody
CREATE ROLE regress_idem_pure;
SET ROLE regress_idem_pure;
SELECT idem_backoff(0, jitter => 'none'), idem_retryable(503), idem_retryable('40001'),
	idem_retry(0, 503, jitter => 'none');
RESET ROLE;
DROP ROLE regress_idem_pure;

DROP FUNCTION distance_from_uniform, utc;
