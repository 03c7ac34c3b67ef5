--
-- UTF8
-- Keys, routes, tenants and fingerprints beyond ASCII: limits are in bytes,
-- C1 control characters are two bytes each, and nothing is normalised.
--
-- Only for databases in UTF-8; the alternative output is for the others.
--
SELECT getdatabaseencoding() <> 'UTF8' AS skip_test \gset
\if :skip_test
\quit
\endif
SET client_encoding = utf8;

-- é precomposed and decomposed are two keys
SELECT outcome FROM idem_begin(U&'\00e9', 'r', NULL);
SELECT outcome FROM idem_begin(U&'e\0301', 'r', NULL);
SELECT outcome FROM idem_begin(U&'\00e9', 'r', NULL);
SELECT key, octet_length(key) FROM idempotency_keys ORDER BY key;
DELETE FROM idempotency_keys;

-- 255 bytes, not characters
CREATE FUNCTION sqlstate_of(key text, route text, tenant text) RETURNS text LANGUAGE sql AS
	$$ SELECT sqlstate_of(format('SELECT idem_begin(%L, %L, NULL, %L)', key, route, tenant)) $$;
SELECT length(n), octet_length(n), sqlstate_of(n, 'r', '') AS key, sqlstate_of('k', n, '') AS route,
	sqlstate_of('k', 'r', n) AS tenant
FROM unnest(ARRAY[repeat(U&'\00e9', 127), repeat(U&'\00e9', 127) || 'x', repeat(U&'\00e9', 128),
	repeat(U&'\+01F600', 63) || 'xyz', repeat(U&'\+01F600', 64),
	repeat(U&'\20ac', 85), repeat(U&'\20ac', 85) || 'x']) n;

-- each C1 control character, at each place, in each argument
SELECT sqlstate_of(arg[1], arg[2], arg[3]), count(*)
FROM generate_series(128, 159) i,
	unnest(ARRAY['%s', '%sx', 'x%s', 'x%sx', U&'\00e9%s\00e9', U&'\20ac%s\+01F600']) AS pattern,
	generate_series(1, 3) pos,
	LATERAL (SELECT ARRAY(SELECT CASE j WHEN pos THEN format(pattern, chr(i)) ELSE 'x' END
		FROM generate_series(1, 3) j) AS arg) a
GROUP BY 1;
SELECT idem_begin('k', 'r', NULL, tenant => U&'\00e9\0085');
-- the bytes 80 to 9F within other characters are none: everything else from
-- A0 on is accepted, no-break space, zero-width and unassigned characters too
SELECT sqlstate_of(chr(i), chr(i), chr(i)), count(*)
FROM (SELECT i FROM generate_series(160, 2000) i
	UNION VALUES (8203), (8232), (8364), (65279), (65535), (128512), (1114111)) c (i)
GROUP BY 1;
SELECT count(DISTINCT key) FROM idempotency_keys WHERE length(key) = 1;

-- text is hashed in the database's encoding, jsonb by its characters
SELECT idem_hash_text(U&'\00e9\+01F600') = sha256('\xc3a9f09f9880') AS text,
	idem_hash('"\u00e9\ud83d\ude00"'::jsonb) = idem_hash(to_jsonb(U&'\00e9\+01F600'::text)) AS jsonb,
	encode(idem_hash('{"é": "€"}'::jsonb), 'hex') AS known;

-- results come back exactly, and their size is counted in bytes
SELECT sqlstate_of('exact', 'r', '');
SELECT idem_finish('exact', '"\u00e9\ud83d\ude00\n"', attempt => 1);
SELECT response, response = to_jsonb(U&'\00e9\+01F600\000a'::text) AS exact FROM idem_begin('exact', 'r', NULL);
SET pg_idem.max_response_size = 100;
BEGIN;
SELECT outcome FROM idem_begin('fits', 'r', NULL);
SELECT idem_finish('fits', to_jsonb(repeat(U&'\00e9', 46)));
SELECT outcome FROM idem_begin('large', 'r', NULL);
SELECT idem_finish('large', to_jsonb(repeat(U&'\00e9', 47)));
COMMIT;
RESET pg_idem.max_response_size;
SELECT key, result_dropped FROM idempotency_keys WHERE key IN ('fits', 'large') ORDER BY key;

-- what is logged once the transaction has committed can be no error any more,
-- whatever the client's encoding
SELECT idem_publish(U&'\4F60', '1') IS NOT NULL AS published;
SET client_min_messages = log;
SET client_encoding = latin1;
SELECT idem_outbox_fail(id, attempt, dead => true) FROM idem_outbox_take(chr(20320));
RESET client_encoding;
RESET client_min_messages;
SELECT dead_at IS NOT NULL AS dead FROM idem_outbox;
TRUNCATE idem_outbox RESTART IDENTITY;

DROP FUNCTION sqlstate_of(text, text, text);
DELETE FROM idempotency_keys;
