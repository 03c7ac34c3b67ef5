/* sql/pg_idem--1.0.sql */

-- complain if script is sourced in psql, rather than via CREATE EXTENSION
\echo Use "CREATE EXTENSION pg_idem" to load this file. \quit

--
-- Types and the default store
--

CREATE TYPE @extschema@.idem_state AS ENUM
	('in_progress', 'completed', 'failed');

COMMENT ON TYPE @extschema@.idem_state IS
	'state of an idempotency key';

CREATE TYPE @extschema@.idempotency_key AS (
	key				pg_catalog.text COLLATE pg_catalog."C",
	tenant			pg_catalog.text COLLATE pg_catalog."C",
	route			pg_catalog.text COLLATE pg_catalog."C",
	request_hash	pg_catalog.bytea,
	attempt			pg_catalog.int4,
	created_at		pg_catalog.timestamptz,
	expires_at		pg_catalog.timestamptz,
	state			@extschema@.idem_state,
	lease_until		pg_catalog.timestamptz,
	step			pg_catalog.text,
	step_data		pg_catalog.jsonb,
	status			pg_catalog.int4,
	headers			pg_catalog.jsonb,
	response		pg_catalog.jsonb,
	body			pg_catalog.bytea,
	result_dropped	pg_catalog.bool,
	finished_at		pg_catalog.timestamptz
);

COMMENT ON TYPE @extschema@.idempotency_key IS
	'an idempotency key, its claim and its stored result; the row type of every store';
COMMENT ON COLUMN @extschema@.idempotency_key.key IS
	'the key as the client sent it, 1 to 255 bytes';
COMMENT ON COLUMN @extschema@.idempotency_key.tenant IS
	'whose key it is; empty where there is one tenant';
COMMENT ON COLUMN @extschema@.idempotency_key.route IS
	'what the key is for, such as "POST /v1/charges"';
COMMENT ON COLUMN @extschema@.idempotency_key.request_hash IS
	'fingerprint of the first request';
COMMENT ON COLUMN @extschema@.idempotency_key.attempt IS
	'counts executions; the fencing token';
COMMENT ON COLUMN @extschema@.idempotency_key.created_at IS
	'when the key was first claimed';
COMMENT ON COLUMN @extschema@.idempotency_key.expires_at IS
	'when the key is forgotten';
COMMENT ON COLUMN @extschema@.idempotency_key.state IS
	'in_progress, completed or failed';
COMMENT ON COLUMN @extschema@.idempotency_key.lease_until IS
	'while in_progress: when the claim may be taken over';
COMMENT ON COLUMN @extschema@.idempotency_key.step IS
	'last checkpoint';
COMMENT ON COLUMN @extschema@.idempotency_key.step_data IS
	'data of the last checkpoint';
COMMENT ON COLUMN @extschema@.idempotency_key.status IS
	'stored result: HTTP status';
COMMENT ON COLUMN @extschema@.idempotency_key.headers IS
	'stored result: headers on the list pg_idem.replay_headers';
COMMENT ON COLUMN @extschema@.idempotency_key.response IS
	'stored result: JSON';
COMMENT ON COLUMN @extschema@.idempotency_key.body IS
	'stored result: bytes';
COMMENT ON COLUMN @extschema@.idempotency_key.result_dropped IS
	'the result is not stored, though the key is finished';
COMMENT ON COLUMN @extschema@.idempotency_key.finished_at IS
	'when the key was finished';

-- The same definition is in src/admin.c, for further stores.
CREATE TABLE @extschema@.idempotency_keys OF @extschema@.idempotency_key (
	state			WITH OPTIONS NOT NULL,
	attempt			WITH OPTIONS NOT NULL,
	result_dropped	WITH OPTIONS NOT NULL,
	created_at		WITH OPTIONS NOT NULL,
	expires_at		WITH OPTIONS NOT NULL,
	PRIMARY KEY (key, tenant, route)
) WITH (fillfactor = 50);

CREATE INDEX ON @extschema@.idempotency_keys (expires_at);

COMMENT ON TABLE @extschema@.idempotency_keys IS
	'the default store of idempotency keys';

-- keys survive pg_dump
SELECT pg_catalog.pg_extension_config_dump(c.oid, '')
FROM pg_catalog.pg_extension e
JOIN pg_catalog.pg_class c
	ON c.relnamespace OPERATOR(pg_catalog.=) e.extnamespace
WHERE e.extname OPERATOR(pg_catalog.=) 'pg_idem'
	AND c.relname OPERATOR(pg_catalog.=) 'idempotency_keys';

CREATE TYPE @extschema@.idem_claim AS (
	proceed			pg_catalog.bool,
	outcome			pg_catalog.text,
	status			pg_catalog.int4,
	headers			pg_catalog.jsonb,
	response		pg_catalog.jsonb,
	body			pg_catalog.bytea,
	attempt			pg_catalog.int4,
	step			pg_catalog.text,
	step_data		pg_catalog.jsonb,
	retry_after		pg_catalog.interval,
	expires_at		pg_catalog.timestamptz
);

COMMENT ON TYPE @extschema@.idem_claim IS
	'answer of idem_begin: do the work if proceed, otherwise answer with status, headers and response or body';

--
-- The claim
--

CREATE FUNCTION @extschema@.idem_begin(
	key				pg_catalog.text,
	route			pg_catalog.text,
	hash			pg_catalog.bytea,
	tenant			pg_catalog.text DEFAULT NULL,
	wait			pg_catalog.interval DEFAULT NULL,
	ttl				pg_catalog.interval DEFAULT NULL,
	lease			pg_catalog.interval DEFAULT NULL,
	first_sent		pg_catalog.timestamptz DEFAULT NULL,
	store			pg_catalog.regclass DEFAULT NULL)
RETURNS @extschema@.idem_claim
AS 'MODULE_PATHNAME', 'idem_begin'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_begin(pg_catalog.text, pg_catalog.text, pg_catalog.bytea, pg_catalog.text, pg_catalog.interval, pg_catalog.interval, pg_catalog.interval, pg_catalog.timestamptz, pg_catalog.regclass) IS
	'claim a key for this transaction, or get the answer of the request that has it';

CREATE FUNCTION @extschema@.idem_finish(
	key				pg_catalog.text,
	response		pg_catalog.jsonb,
	status			pg_catalog.int4 DEFAULT 200,
	headers			pg_catalog.jsonb DEFAULT NULL,
	body			pg_catalog.bytea DEFAULT NULL,
	route			pg_catalog.text DEFAULT NULL,
	tenant			pg_catalog.text DEFAULT NULL,
	attempt			pg_catalog.int4 DEFAULT NULL,
	ttl				pg_catalog.interval DEFAULT NULL,
	store			pg_catalog.regclass DEFAULT NULL)
RETURNS pg_catalog.void
AS 'MODULE_PATHNAME', 'idem_finish'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_finish(pg_catalog.text, pg_catalog.jsonb, pg_catalog.int4, pg_catalog.jsonb, pg_catalog.bytea, pg_catalog.text, pg_catalog.text, pg_catalog.int4, pg_catalog.interval, pg_catalog.regclass) IS
	'store the result of a claimed key';

CREATE FUNCTION @extschema@.idem_lookup(
	key				pg_catalog.text,
	route			pg_catalog.text,
	tenant			pg_catalog.text DEFAULT NULL,
	store			pg_catalog.regclass DEFAULT NULL)
RETURNS @extschema@.idempotency_key
AS 'MODULE_PATHNAME', 'idem_lookup'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_lookup(pg_catalog.text, pg_catalog.text, pg_catalog.text, pg_catalog.regclass) IS
	'read a key without claiming it; NULL if there is none';

--
-- Fingerprints
--

CREATE FUNCTION @extschema@.idem_hash(request pg_catalog.jsonb)
RETURNS pg_catalog.bytea
AS 'MODULE_PATHNAME', 'idem_hash_jsonb'
LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE;

COMMENT ON FUNCTION @extschema@.idem_hash(pg_catalog.jsonb) IS
	'fingerprint of a JSON document by value: SHA-256, the same for equal documents';

CREATE FUNCTION @extschema@.idem_hash(request pg_catalog.text)
RETURNS pg_catalog.bytea
AS 'MODULE_PATHNAME', 'idem_hash_bytes'
LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE;

COMMENT ON FUNCTION @extschema@.idem_hash(pg_catalog.text) IS
	'fingerprint of a text: SHA-256 of its bytes';

CREATE FUNCTION @extschema@.idem_hash(request pg_catalog.bytea)
RETURNS pg_catalog.bytea
AS 'MODULE_PATHNAME', 'idem_hash_bytes'
LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE;

COMMENT ON FUNCTION @extschema@.idem_hash(pg_catalog.bytea) IS
	'fingerprint of bytes: SHA-256';

--
-- Administration
--

CREATE FUNCTION @extschema@.idem_expire(max pg_catalog.int4 DEFAULT NULL)
RETURNS pg_catalog.int8
AS 'MODULE_PATHNAME', 'idem_expire'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_expire(pg_catalog.int4) IS
	'remove expired keys now, max at the most; returns how many went';

CREATE FUNCTION @extschema@.idem_create_table(name pg_catalog.text)
RETURNS pg_catalog.regclass
AS 'MODULE_PATHNAME', 'idem_create_table'
LANGUAGE C VOLATILE STRICT PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_create_table(pg_catalog.text) IS
	'create a further store of idempotency keys, owned by the caller';

CREATE FUNCTION @extschema@.idem_grant(role pg_catalog.regrole)
RETURNS pg_catalog.void
AS 'MODULE_PATHNAME', 'idem_grant'
LANGUAGE C VOLATILE STRICT PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_grant(pg_catalog.regrole) IS
	'let a role call what an application needs';

CREATE FUNCTION @extschema@.idem_revoke(role pg_catalog.regrole)
RETURNS pg_catalog.void
AS 'MODULE_PATHNAME', 'idem_revoke'
LANGUAGE C VOLATILE STRICT PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_revoke(pg_catalog.regrole) IS
	'take back what idem_grant gave';

--
-- Nothing is granted to PUBLIC but the pure helpers (idem_hash).
--

REVOKE ALL ON FUNCTION
	@extschema@.idem_begin(pg_catalog.text, pg_catalog.text, pg_catalog.bytea, pg_catalog.text, pg_catalog.interval, pg_catalog.interval, pg_catalog.interval, pg_catalog.timestamptz, pg_catalog.regclass),
	@extschema@.idem_finish(pg_catalog.text, pg_catalog.jsonb, pg_catalog.int4, pg_catalog.jsonb, pg_catalog.bytea, pg_catalog.text, pg_catalog.text, pg_catalog.int4, pg_catalog.interval, pg_catalog.regclass),
	@extschema@.idem_lookup(pg_catalog.text, pg_catalog.text, pg_catalog.text, pg_catalog.regclass),
	@extschema@.idem_expire(pg_catalog.int4),
	@extschema@.idem_create_table(pg_catalog.text),
	@extschema@.idem_grant(pg_catalog.regrole),
	@extschema@.idem_revoke(pg_catalog.regrole)
FROM PUBLIC;

REVOKE ALL ON TYPE
	@extschema@.idem_state,
	@extschema@.idempotency_key,
	@extschema@.idem_claim
FROM PUBLIC;

REVOKE ALL ON TABLE @extschema@.idempotency_keys FROM PUBLIC;
