--
-- HASH
-- Fingerprints.  text and bytea are plain SHA-256, so a client can compute
-- them; jsonb is by value, so that a retry which was serialised anew is the
-- same request, and no two different documents are.
--
SELECT idem_hash_text('abc');
SELECT idem_hash_text('') = sha256('') AS empty,
	idem_hash_bytes('') = sha256('') AS empty_bytes,
	idem_hash_text('abc') = sha256('abc') AS text,
	idem_hash_bytes('\x00ff80') = sha256('\x00ff80') AS bytes,
	idem_hash_text(repeat('x', 1000000)) = sha256(repeat('x', 1000000)::bytea) AS large;
SELECT idem_hash_text(NULL) IS NULL AS text, idem_hash_bytes(NULL) IS NULL AS bytea,
	idem_hash(NULL::jsonb) IS NULL AS jsonb;
-- an argument without a type is a JSON document, and nothing else is
\set VERBOSITY terse
SELECT idem_hash('{"a": 1}') = idem_hash('{ "a":1.0 }'::jsonb) AS json;
SELECT idem_hash('abc');
SELECT idem_hash('abc'::text);
SELECT idem_hash('abc'::bytea);
\set VERBOSITY default
-- stored out of line and compressed
CREATE TEMP TABLE docs (t text, b bytea, j jsonb);
INSERT INTO docs SELECT t, t::bytea, jsonb_build_object('a', t)
FROM (SELECT string_agg(md5(i::text), '') || repeat('x', 100000) AS t FROM generate_series(1, 5000) i) s;
SELECT idem_hash_text(t) = sha256(b) AS t, idem_hash_bytes(b) = sha256(b) AS b,
	idem_hash(j) = idem_hash(jsonb_build_object('a', t)) AS j FROM docs;

-- The format is stored in every key, so it must never change: known values
SELECT j, encode(idem_hash(j), 'hex') AS hash
FROM unnest(ARRAY['null', 'true', '0', '-1.5', '""', '"x"', '[]', '{}',
	'{"amount": 999, "currency": "eur", "items": [1, {"a": null}]}']::jsonb[]) j;

-- Equal documents
SELECT a, b, idem_hash(a::jsonb) = idem_hash(b::jsonb) AS same
FROM (VALUES
	('{"a": 1, "b": 2}', '{"b":2,"a":1}'),
	('{"a": 1, "bb": {"d": 4, "c": 3}}', E'{ "bb" :\n{"c":3,\t"d":4}, "a":1 }'),
	('{"a": 1, "a": 2}', '{"a": 2}'),
	('1', '1.0'), ('1', '1e0'), ('100', '1e2'), ('0.10', '0.1'), ('0', '-0'), ('0', '0.000'),
	('1000000000000000000000000000000.0', '1e30'),
	('{"a": [1.00, 2]}', '{"a":[1,2.0]}'),
	('"\u0041"', '"A"'), ('"\/"', '"/"'), ('[ ]', '[]'), ('{ }', '{}')) v (a, b);

-- Different documents: as many fingerprints as documents, and as jsonb itself
-- can tell apart
CREATE TEMP TABLE different (j jsonb);
INSERT INTO different VALUES
	('null'), ('"null"'), ('true'), ('"true"'), ('false'), ('0'), ('"0"'), ('1'), ('"1"'),
	('-1'), ('0.1'), ('10'), ('1e-1000'), ('1e1000'),
	('""'), ('" "'), ('"\u0001"'), ('"["'), ('"{}"'),
	('[]'), ('{}'), ('[[]]'), ('[{}]'), ('[[], []]'), ('[[[]]]'), ('[null]'), ('[""]'), ('[0]'),
	('[[1], 2]'), ('[1, [2]]'), ('[[1, 2]]'), ('[1, 2]'), ('[2, 1]'), ('[12]'), ('[1, "2"]'),
	('[[1], [2]]'), ('[["a"], "b"]'), ('["a", ["b"]]'),
	('["ab"]'), ('["a", "b"]'), ('["a,b"]'), ('["a", "b", ""]'), ('["", "a", "b"]'),
	('{"a": "b"}'), ('{"b": "a"}'), ('["a", "b", "c", "d"]'), ('{"a": "b", "c": "d"}'),
	('{"a": {"b": "c"}}'), ('{"a": ["b", "c"]}'), ('{"a": "b", "c": null}'), ('{"a": null, "c": "b"}'),
	('{"a": null}'), ('{"": null}'), ('{"": ""}'), ('{"a": []}'), ('{"a": {}}'), ('{"a": ""}'), ('{"a": 0}'),
	('[{"a": 1}, {"b": 2}]'), ('[{"a": 1, "b": 2}]'), ('{"a": [{"b": 1}], "c": 2}'),
	('{"a": [{"b": 1, "c": 2}]}'), ('{"a": [1, 2], "b": 3}'), ('{"a": [1], "b": [2, 3]}');
SELECT count(*) AS documents, count(DISTINCT j) AS distinct_documents,
	count(DISTINCT idem_hash(j)) AS fingerprints FROM different;
-- many documents, all different, in many shapes
SELECT count(DISTINCT j) = count(DISTINCT idem_hash(j)) AS same_number
FROM (SELECT jsonb_build_object('a', i % 7, 'b', jsonb_build_array(i % 11, (i % 3)::text), 'c',
	CASE i % 2 WHEN 0 THEN 'null'::jsonb ELSE to_jsonb(i % 5 + 0.50) END) AS j
	FROM generate_series(1, 2000) i) s;
-- deep
SELECT idem_hash((repeat('[', 1000) || repeat(']', 1000))::jsonb) =
	idem_hash((repeat('[', 999) || repeat(']', 999))::jsonb) AS same;
