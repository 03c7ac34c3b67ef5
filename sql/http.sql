--
-- HTTP
-- What the outside of a request is made of: the Idempotency-Key header, the
-- problem details of an answer, entity tags and If-Match.  The handler of the
-- README, which puts them together, is in recipes.
--

--
-- idem_parse_key: RFC 9651, an Item that is a String
--
SELECT idem_parse_key('"8e03978e-40d5-43dd-bc93-6894a57f9324"');
SELECT idem_parse_key(NULL) IS NULL AS no_header;
-- the two escapes, and all that needs none
SELECT idem_parse_key('"a\"b\\c"') AS escapes, idem_parse_key('"\""') AS quote, idem_parse_key('"\\"') AS backslash;
SELECT idem_parse_key('"a, b;c (d) :e: ?1 @2 %41 =''"') AS others;
SELECT count(*) AS all_of_ascii FROM generate_series(32, 126) i, format('%s', chr(i)) c
WHERE idem_parse_key('"' || CASE WHEN c IN ('"', '\') THEN '\' ELSE '' END || c || '"') = c;
-- spaces around it are not the key's, those within are
SELECT idem_parse_key('   "a"   ') AS around, '<' || idem_parse_key('" a "') || '>' AS within,
	octet_length(idem_parse_key('" "')) AS only;
-- 255 bytes, counted without the escapes
SELECT octet_length(idem_parse_key('"' || repeat('k', 255) || '"')) AS plain,
	octet_length(idem_parse_key('"' || repeat('\\', 255) || '"')) AS escaped;
SELECT idem_parse_key('"' || repeat('k', 256) || '"');

-- what is refused
SELECT idem_parse_key('""');
SELECT idem_parse_key('"abc');
SELECT idem_parse_key('"');
SELECT idem_parse_key('"abc\"');
SELECT idem_parse_key('"abc\');
SELECT idem_parse_key('"a\nb"');
SELECT idem_parse_key('"\u0041"');
SELECT idem_parse_key(E'"a\tb"');
SELECT idem_parse_key(E'"a\x7f"');
SELECT idem_parse_key(E'"gr\xc3\xbcn"');
SELECT idem_parse_key('"a"b');
SELECT idem_parse_key('"a" b');
SELECT idem_parse_key('"a""b"');
SELECT idem_parse_key(E'"a"\n');
-- a list, and a header that came twice
SELECT idem_parse_key('"a", "b"');
SELECT idem_parse_key('"a","a"');
SELECT idem_parse_key('"a";p=1 , "a"');
SELECT idem_parse_key('"a",');
SELECT idem_parse_key(',"a"');

-- every control character, within and around, in quotes and bare
CREATE FUNCTION sqlstate_of_key(header text) RETURNS text LANGUAGE sql AS
	$$ SELECT sqlstate_of(format('SELECT idem_parse_key(%L)', header)) $$;
SELECT sqlstate_of_key(format(pattern, chr(i))), count(*)
FROM (SELECT generate_series(1, 31) UNION ALL VALUES (127)) c (i),
	unnest(ARRAY['"%s"', '"x%sx"', '%s"x"', '"x"%s', '"x";p=%s', '"x";p="%s"', '"x";p=%%"%s"',
		'%s', 'x%sx', '%sx', 'x%s']) pattern
GROUP BY 1;

-- parameters mean nothing, but have to be well-formed
SELECT header, idem_parse_key(header)
FROM unnest(ARRAY['"k";a', '"k";a;b', '"k";a;a=1', '"k";  a=1', '"k";*', '"k";*a_b-c.d*9=1',
	'"k";a="b"', '"k";a="\"\\ ;,"', '"k";a=""',
	'"k";a=1', '"k";a=-1', '"k";a=0', '"k";a=-0', '"k";a=007', '"k";a=999999999999999', '"k";a=-999999999999999',
	'"k";a=1.5', '"k";a=-0.125', '"k";a=999999999999.999', '"k";a=00.0',
	'"k";a=t', '"k";a=*', '"k";a=*t:/', '"k";a=T!#$%&''*+-.^_`|~:/9z',
	'"k";a=::', '"k";a=:aGVsbG8=:', '"k";a=:aGVsbG8:', '"k";a=:+/09azAZ==:',
	'"k";a=?0', '"k";a=?1', '"k";a=@0', '"k";a=@-1659578233', '"k";a=@999999999999999',
	'"k";a=%""', '"k";a=%"x y"', '"k";a=%"gr%c3%bcn"', '"k";a=%"%f0%9f%92%a9"', '"k";a=%"%22%25\"', '"k";a=%"%00"',
	'"k";a=1;b=?0;c="x";d=:eA==:;e=@1;f=%"x";g=t;h  ']) header;
SELECT sqlstate_of_key(header), count(*)
FROM unnest(ARRAY['"k";', '"k";;a', '"k";1=2', '"k";A', '"k";-a', '"k";aB', '"k";"a"', '"k";a b', '"k" ;a',
	'"k";a=', '"k";a =1', '"k";a= 1', '"k";a="b', '"k";a="\b"', '"k";a="b"c',
	'"k";a=-', '"k";a=--1', '"k";a=+1', '"k";a=1-', '"k";a=1000000000000000', '"k";a=1.', '"k";a=.5', '"k";a=1.2345',
	'"k";a=1000000000000.5', '"k";a=1.2.3', '"k";a=1e3', '"k";a=1x',
	'"k";a=t"', '"k";a=t(', '"k";a=_t', '"k";a=t,', '"k";a=(1 2)', '"k";a=()',
	'"k";a=:', '"k";a=:a', '"k";a=:a b:', '"k";a=:a-_:', '"k";a=:YQ==:x',
	'"k";a=?', '"k";a=?2', '"k";a=?T', '"k";a=?01',
	'"k";a=@', '"k";a=@1.5', '"k";a=@x', '"k";a=@1000000000000000',
	'"k";a=%', '"k";a=%x', '"k";a=%"', '"k";a=%"a', '"k";a=%"%"', '"k";a=%"%4"', '"k";a=%"%zz"',
	'"k";a=%"%C3%BC"', '"k";a=%"%c3"', '"k";a=%"%c3%28"', '"k";a=%"%c3%00%bc"', '"k";a=%"%ed%a0%80"', '"k";a=%"%ff"']) header
GROUP BY 1;
SELECT idem_parse_key('"k";a=1.');
SELECT idem_parse_key(E'"k";a="gr\xc3\xbcn"');

-- bare, as most clients send it: the same key as in quotes
SELECT key, idem_parse_key(key) = key AND idem_parse_key('"' || key || '"') = key AS same
FROM unnest(ARRAY['8e03978e-40d5-43dd-bc93-6894a57f9324', '01ARZ3NDEKTSV4RRFFQ69G5FAV', '42', '-1', '1.5', '007', 'a', '*',
	'KG5LxwFBepaKHyUD', 'aGVsbG8+d29ybGQ/Cg==', '+/x=', '=', '/v1/charges', 'order:42/line:7', 'a?b', 'a@b.example', 'a(b)',
	'{7f3a9c1e}', '<7f3a9c1e>', '[1]', 'W/x', '~user.name_x-y', '$key', '#1', 'a&b=c', '100%', '%41', 'it''s', '`x`', '!|^']) key;
SELECT chr(i) AS within_no_bare_key
FROM generate_series(32, 126) i WHERE sqlstate_of_key(format('x%sx', chr(i))) <> '00000' ORDER BY i;
SELECT chr(i) AS begins_no_bare_key
FROM generate_series(32, 126) i WHERE sqlstate_of_key(format('%sx', chr(i))) <> '00000' ORDER BY i;
SELECT idem_parse_key('   a   ') AS around, octet_length(idem_parse_key(repeat('k', 255))) AS longest;
SELECT idem_parse_key(repeat('k', 256));
SELECT idem_parse_key('a b');
SELECT idem_parse_key('a,b');
SELECT idem_parse_key('a, a');
SELECT idem_parse_key('a;b=1');
SELECT idem_parse_key('a"b"');
SELECT idem_parse_key('a\b');
SELECT idem_parse_key(E'\ta');
SELECT idem_parse_key(E'gr\xc3\xbcn');
-- values of other types
SELECT idem_parse_key(':aGVsbG8=:');
SELECT idem_parse_key('?1');
SELECT idem_parse_key('@1659578233');
SELECT idem_parse_key('%"gr%c3%bcn"');
SELECT idem_parse_key('("a" "b")');
SELECT idem_parse_key('(a)');
-- a header that is there without a key in it
SELECT idem_parse_key('');
SELECT idem_parse_key('   ');
-- the header is in no message
SELECT idem_parse_key('"' || repeat('secret', 1000) || '"');

--
-- idem_problem
--
SELECT jsonb_pretty(idem_problem(NULL));
SELECT outcome, status, p->'status' = to_jsonb(status) AS same_status, p->>'title' AS title, p->>'retry_after' AS retry_after
FROM (VALUES ('in_progress', 409), ('mismatch', 422), ('expired', 410), ('expired', 412), ('unknown', 409), ('throttled', 429)) v (outcome, status),
	idem_problem(ROW(false, outcome, status, NULL, NULL, NULL, NULL, NULL, NULL, '1s'::interval, NULL)) p;
-- each has a type of its own, and a detail
SELECT count(DISTINCT p->>'type') AS types, count(DISTINCT p->>'detail') AS details,
	bool_and(p->>'type' ~ '^urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$') AS urns,
	bool_and((SELECT array_agg(m ORDER BY m) FROM jsonb_object_keys(p) m) = ARRAY['detail', 'status', 'title', 'type']) AS members
FROM (SELECT idem_problem(NULL) UNION ALL
	SELECT idem_problem(ROW(false, outcome, status, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL))
	FROM (VALUES ('in_progress', 409), ('mismatch', 422), ('expired', 410), ('expired', 412), ('unknown', 409), ('throttled', 429)) v (outcome, status)) s (p);
-- clients tell problems by the type, so it must never change
SELECT idem_problem(ROW(false, outcome, status, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL))->>'type' AS type
FROM (VALUES ('in_progress', 409), ('mismatch', 422), ('expired', 410), ('expired', 412), ('unknown', 409), ('throttled', 429)) v (outcome, status);
-- retry_after: whole seconds, rounded up, never 0
SELECT i AS retry_after, idem_problem(ROW(false, 'in_progress', 409, NULL, NULL, NULL, NULL, NULL, NULL, i, NULL))->'retry_after' AS seconds
FROM unnest(ARRAY['1 us', '0', '-1 day', '999999 us', '1s', '1.000001s', '2s', '59.5s', '1 day', '1 mon 1 day 1 us', '1 mon -30 days', '178000000 years']::interval[]) i;
-- no problem
SELECT outcome, status, idem_problem(ROW(outcome <> 'replayed', outcome, status, NULL, NULL, NULL, 1, NULL, NULL, NULL, NULL)) IS NULL AS none
FROM (VALUES ('started', NULL), ('started', 200), ('resumed', NULL), ('replayed', 201), ('replayed', 503), ('replayed', NULL)) v (outcome, status);
-- no claim at all
SELECT idem_problem(ROW(NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)) = idem_problem(NULL) AS row_of_nulls,
	idem_problem(c) = idem_problem(NULL) AS outer_join
FROM (VALUES (1)) v LEFT JOIN idem_begin('never', 'http', NULL) c ON false;
-- claims that idem_begin never makes
SELECT idem_problem(ROW(false, 'nonsense', 409, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL));
SELECT idem_problem(ROW(false, 'in_progress', 200, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL));
SELECT idem_problem(ROW(false, 'expired', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL));

-- all claims that idem_begin does make
SELECT outcome, idem_problem(c) FROM idem_begin(idem_parse_key('"p"'), 'http', '\x01') c;
SELECT outcome, idem_problem(c)->>'status' AS status, idem_problem(c)->>'retry_after' AS retry_after
FROM idem_begin('p', 'http', '\x01') c;
SELECT outcome, idem_problem(c)->>'status' AS status FROM idem_begin('p', 'http', '\x02') c;
SELECT outcome, idem_problem(c)->>'status' AS status FROM idem_begin('p', 'http', '\x01', first_sent => '-infinity') c;
SELECT idem_finish('p', '"done"', attempt => 1);
SELECT outcome, idem_problem(c), c.response FROM idem_begin('p', 'http', '\x01') c;
SET pg_idem.max_response_size = 1;
SELECT idem_finish('p2', '"too large"') FROM idem_begin('p2', 'http', NULL);
RESET pg_idem.max_response_size;
SELECT outcome, idem_problem(c)->>'status' AS status FROM idem_begin('p2', 'http', NULL) c;
SET pg_idem.max_attempts = 1;
SELECT outcome, idem_problem(c) FROM idem_begin('p3', 'http', NULL) c;
SELECT idem_release('p3', attempt => 1);
SELECT outcome, idem_problem(c)->>'status' AS status FROM idem_begin('p3', 'http', NULL) c;
RESET pg_idem.max_attempts;
SELECT outcome, idem_problem(c) FROM idem_begin('p3', 'http', NULL) c;

--
-- idem_etag
--
CREATE TYPE http_colour AS ENUM ('red', 'green');
CREATE DOMAIN http_money AS numeric(10, 2);
CREATE TYPE http_pair AS (a int, b text);
CREATE DOMAIN http_pair_domain AS http_pair;
CREATE TABLE http_all (
	id int PRIMARY KEY, t text, n numeric, f float8, b bool, by bytea, ts timestamptz, d date, i interval,
	j jsonb, a int[], m money, e http_colour, dm http_money, p http_pair, pd http_pair_domain, r int4range,
	u uuid, ta text[], pa http_pair[], c "char", x json, nm name, bp char(5));
INSERT INTO http_all VALUES (1, 't', 1.0, 0.1, true, '\x00', '2026-01-01 00:00:00.5+00', '2026-01-01', '1 mon 2 days 3 s',
	'{"a": 1}', '{1,2}', 3, 'red', 4, '(1,x)', '(2,y)', '[1,2)', '8e03978e-40d5-43dd-bc93-6894a57f9324', '{a,NULL}',
	'{"(1,x)","(2,)"}', 'c', '{"a": 1}', 'n', 'b');
-- a strong tag as RFC 9110 has them; an unchanged row has an unchanged one
SELECT idem_etag(t.*) ~ '^"[0-9a-f]{32}"$' AS tag, idem_etag(t.*) = idem_etag(t.*) AS same, idem_etag(t.*) = idem_etag((SELECT s FROM http_all s)) AS again
FROM http_all t;
SELECT idem_etag(NULL::http_all) IS NULL AS no_row, idem_etag(NULL::int) IS NULL AS no_value, idem_etag(t.*) IS NULL AS outer_join
FROM (VALUES (1)) v LEFT JOIN http_all t ON false;
-- a column is taken before a row of the same name
SELECT idem_etag(t) = idem_etag('t'::text) AS the_column, idem_etag(t) = idem_etag(t.*) AS the_row FROM http_all t;
-- every column counts
CREATE TABLE http_seen (change text, tag text);
INSERT INTO http_seen SELECT 'none', idem_etag(t.*) FROM http_all t;
CREATE FUNCTION tag_after(change text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	tag text;
BEGIN
	EXECUTE 'UPDATE http_all SET ' || change;
	SELECT idem_etag(t.*) INTO STRICT tag FROM http_all t;
	RAISE SQLSTATE 'TAG00' USING MESSAGE = tag;
EXCEPTION WHEN SQLSTATE 'TAG00' THEN
	RETURN SQLERRM;		-- and the change is undone
END $$;
INSERT INTO http_seen SELECT change, tag_after(change)
FROM unnest(ARRAY['id = 2', 't = ''T''', 't = ''''', 't = NULL', 't = ''t ''', 'n = 2', 'n = 1.00', 'n = 1', 'n = ''NaN''', 'f = 0.1::float8 + 2e-17',
	'f = ''-0''', 'f = 0', 'b = false', 'b = NULL', 'by = ''\x0000''', 'by = ''''', 'ts = ts + ''1 us''', 'd = d + 1', 'i = ''32 days 3 s''',
	'j = ''{"a": 2}''', 'j = ''{"a": 1.0}''', 'j = ''{"a": "1"}''', 'j = ''{}''', 'a = ''{1,2,3}''', 'a = ''{2,1}''', 'a = ''{}''', 'a = ''[0:1]={1,2}''',
	'a = ''{{1,2}}''', 'a = ''{{1},{2}}''', 'a = ''{1,NULL}''', 'a = ''{NULL,1}''', 'a = NULL', 'm = 4', 'e = ''green''', 'dm = 5', 'p = ''(1,y)''', 'p = ''(1,)''',
	'p = ''(,x)''', 'p = ''(,)''', 'p = NULL', 'pd = ''(2,z)''', 'r = ''[1,3)''', 'r = ''empty''', 'u = NULL', 'ta = ''{a,"NULL"}''', 'ta = ''{a,""}''',
	'pa = ''{"(1,x)","(2,\"\")"}''', 'pa = ''{"(1,x)"}''', 'c = ''d''', 'x = ''{"a":1}''', 'nm = ''nn''', 'bp = ''c''']) change;
SELECT count(*) AS changes, count(DISTINCT tag) AS tags FROM http_seen;
-- a change of place is one
SELECT idem_etag(ROW('a', NULL)) = idem_etag(ROW(NULL, 'a')) AS moved, idem_etag(ROW('ab', 'c')) = idem_etag(ROW('a', 'bc')) AS split,
	idem_etag(ROW('a', 'b')) = idem_etag(ROW(ROW('a', 'b'))) AS nested, idem_etag(ROW(1, ROW(2), 3)) = idem_etag(ROW(1, ROW(2, 3))) AS bracket,
	idem_etag(ARRAY['a', 'b']) = idem_etag(ARRAY['ab']) AS joined, idem_etag(ARRAY[ARRAY[1], ARRAY[2]]) = idem_etag(ARRAY[1, 2]) AS flat;

-- no setting of the session counts
SELECT idem_etag(t.*) AS tag FROM http_all t \gset
SET DateStyle = 'German';
SET TimeZone = 'Asia/Kolkata';
SET IntervalStyle = 'iso_8601';
SET extra_float_digits = -5;
SET bytea_output = 'escape';
SET quote_all_identifiers = on;
SET client_encoding = 'LATIN1';
SET search_path = pg_catalog;
SELECT public.idem_etag(t.*) = :'tag' AS same FROM public.http_all t;
RESET DateStyle;
RESET TimeZone;
RESET IntervalStyle;
RESET extra_float_digits;
RESET bytea_output;
RESET quote_all_identifiers;
RESET client_encoding;
RESET search_path;
-- nor does which session it is, where that has numbers of its own for the
-- types of anonymous rows
SELECT idem_etag(ROW(1, ROW('x', 2), ARRAY[ROW(1, 2), ROW(3, 4)])) AS tag \gset
\c -
SELECT count(*) FROM (SELECT ROW(true, true), ROW(1, 'x'::text, true)) s;
SELECT idem_etag(ROW(1, ROW('x', 2), ARRAY[ROW(1, 2), ROW(3, 4)])) = :'tag' AS same;

-- neither does how a value is stored: short, plain, compressed, out of line
CREATE TABLE http_stored (id int, t text, p http_pair, ta text[], pa http_pair[]);
INSERT INTO http_stored
SELECT i, v, ROW(1, v)::http_pair, ARRAY[v, v], ARRAY[ROW(1, v)::http_pair]
FROM (VALUES (1, 'short'), (2, repeat('compressed', 1000)), (3, (SELECT string_agg(md5(i::text), '') FROM generate_series(1, 1000) i))) v (i, v);
SELECT pg_relation_size(reltoastrelid) > 0 AS out_of_line FROM pg_class WHERE oid = 'http_stored'::regclass;
SELECT s.id, pg_column_size(s.t) < octet_length(s.t) AS compressed,
	idem_etag(s.*) = idem_etag(ROW(s.id, v, ROW(1, v), ARRAY[v, v], ARRAY[ROW(1, v)])) AS row,
	idem_etag(s.t) = idem_etag(v) AS text, idem_etag(s.pa) = idem_etag(ARRAY[ROW(1, v)]) AS pairs
FROM http_stored s, LATERAL (SELECT s.t || '') l (v) ORDER BY s.id;
CREATE TABLE http_plain (LIKE http_stored);
ALTER TABLE http_plain ALTER t SET STORAGE external, ALTER ta SET STORAGE external, ALTER pa SET STORAGE external;
INSERT INTO http_plain
SELECT id, t || '', ROW(1, t || '')::http_pair, ARRAY[t || '', t], ARRAY[ROW(1, t || '')::http_pair] FROM http_stored;
SELECT a.id, pg_column_size(a.t) <> pg_column_size(b.t) AS stored_otherwise, idem_etag(a.*) = idem_etag(b.*) AS same
FROM http_stored a JOIN http_plain b USING (id) ORDER BY a.id;
-- an array whose NULL has been overwritten, and one that plpgsql has expanded
CREATE FUNCTION tag_of_expanded() RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	a int[] := '{1,NULL}';
	r http_pair;
BEGIN
	a[2] := 2;
	r.a := 1;
	r.b := 'x';
	RETURN idem_etag(ROW(a, r));
END $$;
SELECT tag_of_expanded() = idem_etag(ROW('{1,2}'::int[], '(1,x)'::http_pair)) AS same;

-- columns that were added and dropped
CREATE TABLE http_columns (gone int, id int, t text);
INSERT INTO http_columns VALUES (0, 1, 'x');
SELECT idem_etag(t.*) AS tag FROM http_columns t \gset
ALTER TABLE http_columns DROP COLUMN gone;
SELECT idem_etag(t.*) = :'tag' AS same_as_with_it, idem_etag(t.*) = idem_etag(ROW(1, 'x'::text)) AS same_as_never_there FROM http_columns t;
SELECT idem_etag(t.*) AS tag FROM http_columns t \gset
ALTER TABLE http_columns ADD COLUMN n int DEFAULT 5;
SELECT idem_etag(t.*) = :'tag' AS same_as_without, idem_etag(t.*) = idem_etag(ROW(1, 'x'::text, 5)) AS same_as_written FROM http_columns t;
SELECT idem_etag(t.*) AS tag FROM http_columns t \gset
UPDATE http_columns SET n = n;
VACUUM FULL http_columns;
SELECT idem_etag(t.*) = :'tag' AS same_after_rewrite FROM http_columns t;
-- any value, and a choice of columns
SELECT idem_etag(42) = idem_etag(42) AS int, idem_etag(42) = idem_etag(43) AS other, idem_etag('x'::text) = idem_etag('x'::varchar) AS text,
	idem_etag(4::http_money) = idem_etag(4.00) AS domain;
SELECT idem_etag((id, t)) = idem_etag(ROW(1, 'x'::text)) AS chosen FROM http_columns;
-- a whole that is made of several rows
SELECT idem_etag(ROW(c.*, ARRAY(SELECT s FROM http_stored s WHERE s.id >= c.id ORDER BY s.id))) =
	idem_etag(ROW(c.*, (SELECT array_agg(s ORDER BY s.id) FROM http_plain s))) AS same
FROM http_columns c;
SELECT idem_etag('x');
-- in a parallel worker
SET parallel_setup_cost = 0;
SET parallel_tuple_cost = 0;
CREATE TABLE http_many WITH (parallel_workers = 2) AS
SELECT i AS id, ROW(i, i::text)::http_pair AS p FROM generate_series(1, 10000) i;
ANALYZE http_many;
EXPLAIN (COSTS OFF) SELECT m.id, idem_etag(ROW(id, ROW(p))) AS tag FROM http_many m WHERE idem_etag(m.*) <> '';
SELECT count(*) AS rows, count(DISTINCT tag) AS tags
FROM (SELECT idem_etag(ROW(id, ROW(p))) AS tag FROM http_many m WHERE idem_etag(m.*) <> '') s;
RESET parallel_setup_cost;
RESET parallel_tuple_cost;

--
-- idem_if_match
--
SELECT header, idem_if_match(header, '"a"') AS of_a, idem_if_match(header, NULL) AS of_none
FROM unnest(ARRAY[NULL, '*', ' * ', E'\t*\t', '"a"', '"b"', '"A"', '""', '"a", "b"', '"b", "a"', '"b","a"', E'"b"\t,\t"a"', '  "a"  ',
	'"b", "c"', '"aa"', '', ' ', ',', ', ,', ',"a"', '"a",', '"b", , ,"a"', 'W/"a"', 'W/"a", "b"', 'W/"a", "a"', 'W/""',
	'"a\"', '"a\\"', '"*"', '"a,b"', '"W/"']) header;
-- strong comparison: a weak tag matches none, itself not either
SELECT idem_if_match('W/"a"', 'W/"a"') AS both, idem_if_match('"a"', 'W/"a"') AS current, idem_if_match('*', 'W/"a"') AS any;
-- byte for byte, without escapes
SELECT idem_if_match('"\"', '"\"') AS backslash, idem_if_match('"a,b", "c"', '"a,b"') AS comma, idem_if_match('""', '""') AS empty,
	idem_if_match(E'"gr\xc3\xbcn"', E'"gr\xc3\xbcn"') AS obs_text, idem_if_match(E'"gr\xc3\xbcn"', E'"gr\xc3\xbdn"') AS other;
SELECT count(*) AS characters FROM generate_series(33, 126) i WHERE i <> 34 AND idem_if_match(format('"%s"', chr(i)), format('"%s"', chr(i)));
-- malformed: an error, whatever else matches
SELECT idem_if_match('a', '"a"');
SELECT idem_if_match('"a', '"a"');
SELECT idem_if_match('"a" "b"', '"a"');
SELECT idem_if_match('"a"b', '"a"');
SELECT idem_if_match('"a", *', '"a"');
SELECT idem_if_match('*, "a"', '"a"');
SELECT idem_if_match('w/"a"', '"a"');
SELECT idem_if_match('W/ "a"', '"a"');
SELECT idem_if_match('W/a', '"a"');
SELECT idem_if_match('"a a"', '"a"');
SELECT idem_if_match(E'"a\x7f"', '"a"');
SELECT idem_if_match(E'"a"\n', '"a"');
SELECT idem_if_match('"a";q=1', '"a"');
SELECT idem_if_match('a', NULL);
-- what is no tag
SELECT idem_if_match('"3"', '3');
SELECT idem_if_match('"3"', '"3" ');
SELECT idem_if_match('"3"', '');
SELECT idem_if_match('*', '3') AS any, idem_if_match(NULL, '3') AS no_header;

DROP FUNCTION sqlstate_of_key(text), tag_after(text), tag_of_expanded();
DROP TABLE http_seen, http_all, http_stored, http_plain, http_columns, http_many;
DROP DOMAIN http_pair_domain, http_money;
DROP TYPE http_pair, http_colour;
DELETE FROM idempotency_keys;

-- a header of any length is read once (and not once for each character)
SET statement_timeout = '1min';
SELECT idem_parse_key(repeat('a', 4000000));
SELECT idem_parse_key('"' || repeat('a', 4000000));
RESET statement_timeout;

--
-- idem_request_problem: what to answer where there is no claim
--
SELECT idem_request_problem('key_missing') = idem_problem(NULL) AS same;
SELECT jsonb_pretty(idem_request_problem('key_malformed'));
SELECT jsonb_pretty(idem_request_problem('request_invalid', 'amount must be a number'));
SELECT count(DISTINCT idem_request_problem(r) ->> 'type'), count(DISTINCT idem_request_problem(r) ->> 'title')
FROM unnest(ARRAY['key_missing', 'key_malformed', 'request_invalid']) r;
SELECT idem_request_problem(NULL);
SELECT idem_request_problem('in_progress');
