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
	key				text COLLATE "C",
	tenant			text COLLATE "C",
	route			text COLLATE "C",
	request_hash	bytea,
	attempt			int4,
	created_at		timestamptz,
	expires_at		timestamptz,
	state			@extschema@.idem_state,
	lease_until		timestamptz,
	step			text,
	step_data		jsonb,
	status			int4,
	headers			jsonb,
	response		jsonb,
	body			bytea,
	result_dropped	bool,
	finished_at		timestamptz
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
	'when the key was finished last';

CREATE TYPE @extschema@.idem_claim AS (
	proceed			bool,
	outcome			text,
	status			int4,
	headers			jsonb,
	response		jsonb,
	body			bytea,
	attempt			int4,
	step			text,
	step_data		jsonb,
	retry_after		interval,
	expires_at		timestamptz
);

COMMENT ON TYPE @extschema@.idem_claim IS
	'answer of idem_begin: do the work if proceed, otherwise answer with status, headers and response or body';
COMMENT ON COLUMN @extschema@.idem_claim.proceed IS
	'do the work, then call idem_finish; otherwise answer with the rest';
COMMENT ON COLUMN @extschema@.idem_claim.outcome IS
	'started, resumed, replayed, in_progress, mismatch, expired, unknown or throttled';
COMMENT ON COLUMN @extschema@.idem_claim.status IS
	'HTTP status to answer with; NULL when proceed';
COMMENT ON COLUMN @extschema@.idem_claim.headers IS
	'stored headers, when replayed';
COMMENT ON COLUMN @extschema@.idem_claim.response IS
	'stored JSON, when replayed';
COMMENT ON COLUMN @extschema@.idem_claim.body IS
	'stored bytes, when replayed';
COMMENT ON COLUMN @extschema@.idem_claim.attempt IS
	'which execution of the key; the fencing token';
COMMENT ON COLUMN @extschema@.idem_claim.step IS
	'last checkpoint, when resumed';
COMMENT ON COLUMN @extschema@.idem_claim.step_data IS
	'data of the last checkpoint, when resumed';
COMMENT ON COLUMN @extschema@.idem_claim.retry_after IS
	'when to ask again, when in_progress or throttled';
COMMENT ON COLUMN @extschema@.idem_claim.expires_at IS
	'when the key is forgotten';

CREATE TYPE @extschema@.idem_result AS (
	status			int4,
	headers			jsonb,
	response		jsonb,
	body			bytea
);

COMMENT ON TYPE @extschema@.idem_result IS
	'what the work of idem_call may return, where status 200 and a JSON response are not enough';
COMMENT ON COLUMN @extschema@.idem_result.status IS
	'HTTP status; NULL: that of the call';
COMMENT ON COLUMN @extschema@.idem_result.headers IS
	'headers, an object';
COMMENT ON COLUMN @extschema@.idem_result.response IS
	'JSON';
COMMENT ON COLUMN @extschema@.idem_result.body IS
	'bytes';

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

--
-- The claim
--

CREATE FUNCTION @extschema@.idem_begin(
	key				text,
	route			text,
	hash			bytea,
	tenant			text DEFAULT NULL,
	ttl				interval DEFAULT NULL,
	lease			interval DEFAULT NULL,
	wait			interval DEFAULT NULL,
	first_sent		timestamptz DEFAULT NULL,
	store			regclass DEFAULT NULL)
RETURNS @extschema@.idem_claim
AS 'MODULE_PATHNAME', 'idem_begin'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_begin IS
	'claim a key for this transaction, or get the answer of the request that has it';

CREATE FUNCTION @extschema@.idem_finish(
	key				text,
	response		jsonb DEFAULT NULL,
	status			int4 DEFAULT 200,
	headers			jsonb DEFAULT NULL,
	body			bytea DEFAULT NULL,
	route			text DEFAULT NULL,
	tenant			text DEFAULT NULL,
	attempt			int4 DEFAULT NULL,
	ttl				interval DEFAULT NULL,
	store			regclass DEFAULT NULL)
RETURNS void
AS 'MODULE_PATHNAME', 'idem_finish'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_finish IS
	'store the result of a claimed key';

CREATE FUNCTION @extschema@.idem_lookup(
	key				text,
	route			text,
	tenant			text DEFAULT NULL,
	store			regclass DEFAULT NULL)
RETURNS @extschema@.idempotency_key
AS 'MODULE_PATHNAME', 'idem_lookup'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_lookup IS
	'read a key without claiming it; NULL if there is none';

--
-- Claims that outlive their transaction
--

CREATE FUNCTION @extschema@.idem_checkpoint(
	key				text,
	step			text,
	data			jsonb DEFAULT NULL,
	route			text DEFAULT NULL,
	tenant			text DEFAULT NULL,
	attempt			int4 DEFAULT NULL,
	lease			interval DEFAULT NULL,
	store			regclass DEFAULT NULL)
RETURNS timestamptz
AS 'MODULE_PATHNAME', 'idem_checkpoint'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_checkpoint IS
	'record how far the work of a claim has come and renew its lease; returns when that ends';

CREATE FUNCTION @extschema@.idem_release(
	key				text,
	route			text DEFAULT NULL,
	tenant			text DEFAULT NULL,
	attempt			int4 DEFAULT NULL,
	store			regclass DEFAULT NULL)
RETURNS void
AS 'MODULE_PATHNAME', 'idem_release'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_release IS
	'give a claim up: the next request resumes it at once';

CREATE FUNCTION @extschema@.idem_resume(
	max				int4 DEFAULT 1,
	route			text DEFAULT NULL,
	tenant			text DEFAULT NULL,
	key				text DEFAULT NULL,
	lease			interval DEFAULT NULL,
	held			bool DEFAULT false,
	store			regclass DEFAULT NULL)
RETURNS SETOF @extschema@.idempotency_key
AS 'MODULE_PATHNAME', 'idem_resume'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_resume IS
	'take over claims whose lease is over, max at the most, each for one caller';

CREATE FUNCTION @extschema@.idem_child_key(
	key				text,
	step			text,
	route			text,
	tenant			text DEFAULT NULL)
RETURNS uuid
AS 'MODULE_PATHNAME', 'idem_child_key'
LANGUAGE C STABLE PARALLEL SAFE;

COMMENT ON FUNCTION @extschema@.idem_child_key IS
	'idempotency key for a call downstream, the same on every attempt';

CREATE FUNCTION @extschema@.idem_call(
	key				text,
	route			text,
	request			jsonb,
	work			regprocedure,
	status			int4 DEFAULT 200,
	tenant			text DEFAULT NULL,
	ttl				interval DEFAULT NULL,
	lease			interval DEFAULT NULL,
	wait			interval DEFAULT NULL,
	first_sent		timestamptz DEFAULT NULL,
	store			regclass DEFAULT NULL)
RETURNS @extschema@.idem_claim
AS 'MODULE_PATHNAME', 'idem_call'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_call IS
	'claim a key, call work(request) and store what it returns, in one call';

CREATE VIEW @extschema@.idem_unfinished AS
SELECT key, tenant, route, attempt, request_hash, created_at, lease_until,
	step, step_data, expires_at
FROM @extschema@.idempotency_keys
WHERE state OPERATOR(pg_catalog.=) 'in_progress'
	AND lease_until OPERATOR(pg_catalog.<=) pg_catalog.clock_timestamp();

COMMENT ON VIEW @extschema@.idem_unfinished IS
	'claims in the default store whose lease is over or that were released';
COMMENT ON COLUMN @extschema@.idem_unfinished.key IS
	'the key as the client sent it, 1 to 255 bytes';
COMMENT ON COLUMN @extschema@.idem_unfinished.tenant IS
	'whose key it is; empty where there is one tenant';
COMMENT ON COLUMN @extschema@.idem_unfinished.route IS
	'what the key is for, such as "POST /v1/charges"';
COMMENT ON COLUMN @extschema@.idem_unfinished.attempt IS
	'counts executions; the fencing token';
COMMENT ON COLUMN @extschema@.idem_unfinished.request_hash IS
	'fingerprint of the first request';
COMMENT ON COLUMN @extschema@.idem_unfinished.created_at IS
	'when the key was first claimed';
COMMENT ON COLUMN @extschema@.idem_unfinished.step IS
	'last checkpoint';
COMMENT ON COLUMN @extschema@.idem_unfinished.step_data IS
	'data of the last checkpoint';
COMMENT ON COLUMN @extschema@.idem_unfinished.expires_at IS
	'when the key is forgotten';
COMMENT ON COLUMN @extschema@.idem_unfinished.lease_until IS
	'when the lease ended; -infinity if it was released';

--
-- Fingerprints
--

CREATE FUNCTION @extschema@.idem_hash(request jsonb)
RETURNS bytea
AS 'MODULE_PATHNAME', 'idem_hash_jsonb'
LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE;

COMMENT ON FUNCTION @extschema@.idem_hash IS
	'fingerprint of a JSON document by value: SHA-256, the same for equal documents';

CREATE FUNCTION @extschema@.idem_hash_text(request text)
RETURNS bytea
AS 'MODULE_PATHNAME', 'idem_hash_bytes'
LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE;

COMMENT ON FUNCTION @extschema@.idem_hash_text IS
	'fingerprint of a text: SHA-256 of its bytes';

CREATE FUNCTION @extschema@.idem_hash_bytes(request bytea)
RETURNS bytea
AS 'MODULE_PATHNAME', 'idem_hash_bytes'
LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE;

COMMENT ON FUNCTION @extschema@.idem_hash_bytes IS
	'fingerprint of bytes: SHA-256';

--
-- Policies of routes
--

CREATE TABLE @extschema@.idem_route_policies (
	route			text COLLATE "C" PRIMARY KEY,
	ttl				interval,
	lease			interval,
	wait			interval,
	max_attempts	int4,
	on_lost_lease	text,
	keep			text,
	response_ttl	interval,
	retry_ratio		float8,
	retry_min_per_second	float8,
	CONSTRAINT idem_route_policies_route_check CHECK (
		pg_catalog.octet_length(route) OPERATOR(pg_catalog.>=) 1
		AND pg_catalog.octet_length(route) OPERATOR(pg_catalog.<=) 255),
	CONSTRAINT idem_route_policies_ttl_check CHECK (
		ttl OPERATOR(pg_catalog.>) '0'::interval),
	CONSTRAINT idem_route_policies_lease_check CHECK (
		lease OPERATOR(pg_catalog.>) '0'::interval),
	CONSTRAINT idem_route_policies_wait_check CHECK (
		wait OPERATOR(pg_catalog.>=) '0'::interval),
	CONSTRAINT idem_route_policies_max_attempts_check CHECK (
		max_attempts OPERATOR(pg_catalog.>=) 1),
	CONSTRAINT idem_route_policies_on_lost_lease_check CHECK (
		on_lost_lease OPERATOR(pg_catalog.=) 'resume'
		OR on_lost_lease OPERATOR(pg_catalog.=) 'hold'),
	CONSTRAINT idem_route_policies_keep_check CHECK (
		keep OPERATOR(pg_catalog.=) 'all'
		OR keep OPERATOR(pg_catalog.=) 'final'
		OR keep OPERATOR(pg_catalog.=) 'success'),
	CONSTRAINT idem_route_policies_response_ttl_check CHECK (
		response_ttl OPERATOR(pg_catalog.>) '0'::interval
		AND response_ttl OPERATOR(pg_catalog.<=) '1000 years'::interval),
	CONSTRAINT idem_route_policies_retry_ratio_check CHECK (
		retry_ratio OPERATOR(pg_catalog.>=) 0
		AND retry_ratio OPERATOR(pg_catalog.<) 'NaN'),
	CONSTRAINT idem_route_policies_retry_min_per_second_check CHECK (
		retry_min_per_second OPERATOR(pg_catalog.>=) 0
		AND retry_min_per_second OPERATOR(pg_catalog.<) 'NaN')
);

COMMENT ON TABLE @extschema@.idem_route_policies IS
	'policies of single routes; NULL is the setting of the same name';
COMMENT ON COLUMN @extschema@.idem_route_policies.route IS
	'the route that the row is for';
COMMENT ON COLUMN @extschema@.idem_route_policies.ttl IS
	'how long a key is remembered';
COMMENT ON COLUMN @extschema@.idem_route_policies.lease IS
	'how long a committed claim is left to its owner';
COMMENT ON COLUMN @extschema@.idem_route_policies.wait IS
	'how long idem_begin and idem_receive wait for another that has the key';
COMMENT ON COLUMN @extschema@.idem_route_policies.max_attempts IS
	'how many times a key may be executed';
COMMENT ON COLUMN @extschema@.idem_route_policies.on_lost_lease IS
	'what becomes of a claim whose lease is over: resume or hold';
COMMENT ON COLUMN @extschema@.idem_route_policies.keep IS
	'which results are final: final, success or all';
COMMENT ON COLUMN @extschema@.idem_route_policies.response_ttl IS
	'how long a result is kept, if not as long as its key';
COMMENT ON COLUMN @extschema@.idem_route_policies.retry_ratio IS
	'retry budget: retries allowed per request';
COMMENT ON COLUMN @extschema@.idem_route_policies.retry_min_per_second IS
	'retry budget: retries allowed per second in any case';

--
-- The retrying side
--

CREATE FUNCTION @extschema@.idem_backoff(
	retry			int4,
	base			interval DEFAULT '100 ms',
	cap				interval DEFAULT '30 s',
	jitter			text DEFAULT 'full',
	previous		interval DEFAULT NULL,
	seed			int8 DEFAULT NULL)
RETURNS interval
AS 'MODULE_PATHNAME', 'idem_backoff'
LANGUAGE C VOLATILE PARALLEL SAFE;

COMMENT ON FUNCTION @extschema@.idem_backoff IS
	'how long to wait before a retry: exponential, capped, with jitter';

CREATE FUNCTION @extschema@.idem_retryable(status int4)
RETURNS bool
AS 'MODULE_PATHNAME', 'idem_retryable_status'
LANGUAGE C IMMUTABLE PARALLEL SAFE;

COMMENT ON FUNCTION @extschema@.idem_retryable(int4) IS
	'may a request that got this HTTP status be retried? NULL status: no answer; NULL result: it depends';

CREATE FUNCTION @extschema@.idem_retryable(sqlstate text)
RETURNS bool
AS 'MODULE_PATHNAME', 'idem_retryable_sqlstate'
LANGUAGE C IMMUTABLE PARALLEL SAFE;

COMMENT ON FUNCTION @extschema@.idem_retryable(text) IS
	'may a transaction that failed with this SQLSTATE be retried? NULL SQLSTATE: no answer';

CREATE FUNCTION @extschema@.idem_retry(
	retry			int4,
	status			int4,
	retry_after		text DEFAULT NULL,
	expires_at		timestamptz DEFAULT NULL,
	max_attempts	int4 DEFAULT NULL,
	base			interval DEFAULT '100 ms',
	cap				interval DEFAULT '30 s',
	jitter			text DEFAULT 'full',
	previous		interval DEFAULT NULL,
	seed			int8 DEFAULT NULL)
RETURNS interval
AS 'MODULE_PATHNAME', 'idem_retry'
LANGUAGE C VOLATILE PARALLEL SAFE;

COMMENT ON FUNCTION @extschema@.idem_retry IS
	'how long to wait before a request that got this status is retried; NULL: give up';

CREATE FUNCTION @extschema@.idem_budget_allow(
	service			text,
	is_retry		bool)
RETURNS bool
AS 'MODULE_PATHNAME', 'idem_budget_allow'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_budget_allow IS
	'count a call to a service; false if it is a retry that the budget refuses';

CREATE FUNCTION @extschema@.idem_breaker_allow(service text)
RETURNS bool
AS 'MODULE_PATHNAME', 'idem_breaker_allow'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_breaker_allow IS
	'may the service be called? Counts as a trial while its breaker is half open';

CREATE FUNCTION @extschema@.idem_breaker_record(
	service			text,
	ok				bool,
	duration		interval DEFAULT NULL)
RETURNS text
AS 'MODULE_PATHNAME', 'idem_breaker_record'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_breaker_record IS
	'tell a breaker how a call to the service went; returns its state after that';

CREATE FUNCTION @extschema@.idem_breaker_retry_after(service text)
RETURNS interval
AS 'MODULE_PATHNAME', 'idem_breaker_retry_after'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_breaker_retry_after IS
	'when to ask a breaker again that refuses; NULL if it lets calls through';

CREATE FUNCTION @extschema@.idem_breaker_reset(service text)
RETURNS void
AS 'MODULE_PATHNAME', 'idem_breaker_reset'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_breaker_reset IS
	'close a breaker and forget what it knows';

CREATE FUNCTION @extschema@.idem_hedge_after(
	route			text,
	quantile		float8 DEFAULT 0.95)
RETURNS interval
AS 'MODULE_PATHNAME', 'idem_hedge_after'
LANGUAGE C VOLATILE PARALLEL RESTRICTED;

COMMENT ON FUNCTION @extschema@.idem_hedge_after IS
	'after how long a second copy of a request is worth sending: a quantile of measured run times';

--
-- Policies of services
--

CREATE TABLE @extschema@.idem_service_policies (
	service			text COLLATE "C" PRIMARY KEY,
	retry_ratio		float8,
	retry_min_per_second	float8,
	failure_ratio	float8,
	slow_call_ratio	float8,
	slow_call_time	interval,
	window_calls	int4,
	minimum_calls	int4,
	open_time		interval,
	max_open_time	interval,
	half_open_calls	int4,
	half_open_time	interval,
	breaker			text,
	CONSTRAINT idem_service_policies_service_check CHECK (
		pg_catalog.octet_length(service) OPERATOR(pg_catalog.>=) 1
		AND pg_catalog.octet_length(service) OPERATOR(pg_catalog.<=) 255),
	CONSTRAINT idem_service_policies_retry_ratio_check CHECK (
		retry_ratio OPERATOR(pg_catalog.>=) 0
		AND retry_ratio OPERATOR(pg_catalog.<) 'NaN'),
	CONSTRAINT idem_service_policies_retry_min_per_second_check CHECK (
		retry_min_per_second OPERATOR(pg_catalog.>=) 0
		AND retry_min_per_second OPERATOR(pg_catalog.<) 'NaN'),
	CONSTRAINT idem_service_policies_failure_ratio_check CHECK (
		failure_ratio OPERATOR(pg_catalog.>) 0
		AND failure_ratio OPERATOR(pg_catalog.<) 'NaN'),
	CONSTRAINT idem_service_policies_slow_call_ratio_check CHECK (
		slow_call_ratio OPERATOR(pg_catalog.>) 0
		AND slow_call_ratio OPERATOR(pg_catalog.<) 'NaN'),
	CONSTRAINT idem_service_policies_slow_call_time_check CHECK (
		slow_call_time OPERATOR(pg_catalog.>=) '0'::interval),
	CONSTRAINT idem_service_policies_window_calls_check CHECK (
		window_calls OPERATOR(pg_catalog.>=) 1
		AND window_calls OPERATOR(pg_catalog.<=) 1000),
	CONSTRAINT idem_service_policies_minimum_calls_check CHECK (
		minimum_calls OPERATOR(pg_catalog.>=) 1),
	CONSTRAINT idem_service_policies_open_time_check CHECK (
		open_time OPERATOR(pg_catalog.>=) '0'::interval),
	CONSTRAINT idem_service_policies_max_open_time_check CHECK (
		max_open_time OPERATOR(pg_catalog.>=) '0'::interval),
	CONSTRAINT idem_service_policies_half_open_calls_check CHECK (
		half_open_calls OPERATOR(pg_catalog.>=) 1),
	CONSTRAINT idem_service_policies_half_open_time_check CHECK (
		half_open_time OPERATOR(pg_catalog.>=) '0'::interval),
	CONSTRAINT idem_service_policies_breaker_check CHECK (
		breaker OPERATOR(pg_catalog.=) 'forced_open'
		OR breaker OPERATOR(pg_catalog.=) 'forced_closed')
);

COMMENT ON TABLE @extschema@.idem_service_policies IS
	'retry budgets and circuit breakers of single services; NULL is the setting of the same name or the default';
COMMENT ON COLUMN @extschema@.idem_service_policies.service IS
	'the service that the row is for';
COMMENT ON COLUMN @extschema@.idem_service_policies.retry_ratio IS
	'retry budget: retries allowed per request';
COMMENT ON COLUMN @extschema@.idem_service_policies.retry_min_per_second IS
	'retry budget: retries allowed per second in any case';
COMMENT ON COLUMN @extschema@.idem_service_policies.failure_ratio IS
	'breaker: part of the calls that must have failed to open it; default 0.5';
COMMENT ON COLUMN @extschema@.idem_service_policies.slow_call_ratio IS
	'breaker: part of the calls that must have been slow to open it; default 1';
COMMENT ON COLUMN @extschema@.idem_service_policies.slow_call_time IS
	'breaker: a call that takes longer is slow; default one minute';
COMMENT ON COLUMN @extschema@.idem_service_policies.window_calls IS
	'breaker: how many of the last calls count, up to 1000; default 100';
COMMENT ON COLUMN @extschema@.idem_service_policies.minimum_calls IS
	'breaker: with fewer calls in the window it does not open; window_calls if that is less; default 100';
COMMENT ON COLUMN @extschema@.idem_service_policies.open_time IS
	'breaker: how long it stays open at first, and twice as long each time that trials fail; default one minute';
COMMENT ON COLUMN @extschema@.idem_service_policies.max_open_time IS
	'breaker: how long it stays open at the most; default ten minutes';
COMMENT ON COLUMN @extschema@.idem_service_policies.half_open_calls IS
	'breaker: how many calls are let through as trials; default 10';
COMMENT ON COLUMN @extschema@.idem_service_policies.half_open_time IS
	'breaker: trials that take longer have failed, counted from the last; default one minute';
COMMENT ON COLUMN @extschema@.idem_service_policies.breaker IS
	'breaker: forced_open or forced_closed by a person; NULL: by itself';

--
-- Changes of policies reach all backends
--

CREATE FUNCTION @extschema@._idem_policy_changed()
RETURNS trigger
AS 'MODULE_PATHNAME', 'idem_policy_changed'
LANGUAGE C;

COMMENT ON FUNCTION @extschema@._idem_policy_changed IS
	'trigger of the tables of policies: lets all backends know of a change';

CREATE TRIGGER idem_route_policies_changed
	AFTER INSERT OR UPDATE OR DELETE ON @extschema@.idem_route_policies
	FOR EACH ROW EXECUTE FUNCTION @extschema@._idem_policy_changed();
CREATE TRIGGER idem_route_policies_truncated
	AFTER TRUNCATE ON @extschema@.idem_route_policies
	FOR EACH STATEMENT EXECUTE FUNCTION @extschema@._idem_policy_changed();
CREATE TRIGGER idem_service_policies_changed
	AFTER INSERT OR UPDATE OR DELETE ON @extschema@.idem_service_policies
	FOR EACH ROW EXECUTE FUNCTION @extschema@._idem_policy_changed();
CREATE TRIGGER idem_service_policies_truncated
	AFTER TRUNCATE ON @extschema@.idem_service_policies
	FOR EACH STATEMENT EXECUTE FUNCTION @extschema@._idem_policy_changed();

-- also for changes that logical replication applies
ALTER TABLE @extschema@.idem_route_policies
	ENABLE ALWAYS TRIGGER idem_route_policies_changed,
	ENABLE ALWAYS TRIGGER idem_route_policies_truncated;
ALTER TABLE @extschema@.idem_service_policies
	ENABLE ALWAYS TRIGGER idem_service_policies_changed,
	ENABLE ALWAYS TRIGGER idem_service_policies_truncated;

--
-- Statistics
--

CREATE FUNCTION @extschema@._idem_stat_routes(
	OUT route			text,
	OUT started			int8,
	OUT resumed			int8,
	OUT replayed		int8,
	OUT in_progress		int8,
	OUT mismatch		int8,
	OUT expired			int8,
	OUT unknown			int8,
	OUT throttled		int8,
	OUT completed		int8,
	OUT failed			int8,
	OUT stale			int8,
	OUT run_time_p50	interval,
	OUT run_time_p95	interval,
	OUT run_time_p99	interval,
	OUT window_requests	int8,
	OUT window_retries	int8,
	OUT since			timestamptz)
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'idem_stat_routes'
LANGUAGE C VOLATILE PARALLEL RESTRICTED;

COMMENT ON FUNCTION @extschema@._idem_stat_routes IS
	'the rows of view idem_stat_routes';

CREATE VIEW @extschema@.idem_stat_routes AS
SELECT * FROM @extschema@._idem_stat_routes();

COMMENT ON VIEW @extschema@.idem_stat_routes IS
	'what was counted of each route in this database';
COMMENT ON COLUMN @extschema@.idem_stat_routes.route IS
	'the route';
COMMENT ON COLUMN @extschema@.idem_stat_routes.started IS
	'answers of idem_begin: started';
COMMENT ON COLUMN @extschema@.idem_stat_routes.resumed IS
	'answers of idem_begin: resumed; and claims that idem_resume took over';
COMMENT ON COLUMN @extschema@.idem_stat_routes.replayed IS
	'answers of idem_begin: replayed';
COMMENT ON COLUMN @extschema@.idem_stat_routes.in_progress IS
	'answers of idem_begin: in_progress';
COMMENT ON COLUMN @extschema@.idem_stat_routes.mismatch IS
	'answers of idem_begin: mismatch';
COMMENT ON COLUMN @extschema@.idem_stat_routes.expired IS
	'answers of idem_begin: expired';
COMMENT ON COLUMN @extschema@.idem_stat_routes.unknown IS
	'answers of idem_begin: unknown';
COMMENT ON COLUMN @extschema@.idem_stat_routes.throttled IS
	'answers of idem_begin: throttled';
COMMENT ON COLUMN @extschema@.idem_stat_routes.completed IS
	'calls of idem_finish whose result is kept';
COMMENT ON COLUMN @extschema@.idem_stat_routes.failed IS
	'calls of idem_finish whose result is not kept, so that the key may run again';
COMMENT ON COLUMN @extschema@.idem_stat_routes.stale IS
	'calls for a claim that failed with IK001';
COMMENT ON COLUMN @extschema@.idem_stat_routes.run_time_p50 IS
	'time from begin to finish that half of the first attempts stay within';
COMMENT ON COLUMN @extschema@.idem_stat_routes.run_time_p95 IS
	'time from begin to finish that 95 % of the first attempts stay within';
COMMENT ON COLUMN @extschema@.idem_stat_routes.run_time_p99 IS
	'time from begin to finish that 99 % of the first attempts stay within';
COMMENT ON COLUMN @extschema@.idem_stat_routes.window_requests IS
	'retry budget: first executions in the last ten seconds';
COMMENT ON COLUMN @extschema@.idem_stat_routes.window_retries IS
	'retry budget: re-executions in the last ten seconds';
COMMENT ON COLUMN @extschema@.idem_stat_routes.since IS
	'when counting began';

CREATE FUNCTION @extschema@._idem_stat_services(
	OUT service			text,
	OUT breaker			text,
	OUT window_calls	int4,
	OUT window_failed	int4,
	OUT window_slow		int4,
	OUT open_until		timestamptz,
	OUT opened			int8,
	OUT calls_ok		int8,
	OUT calls_failed	int8,
	OUT calls_slow		int8,
	OUT calls_refused	int8,
	OUT retries_refused	int8,
	OUT window_requests	int8,
	OUT window_retries	int8,
	OUT since			timestamptz)
RETURNS SETOF record
AS 'MODULE_PATHNAME', 'idem_stat_services'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@._idem_stat_services IS
	'the rows of view idem_stat_services';

CREATE VIEW @extschema@.idem_stat_services AS
SELECT * FROM @extschema@._idem_stat_services();

COMMENT ON VIEW @extschema@.idem_stat_services IS
	'retry budget and circuit breaker of each service in this database';
COMMENT ON COLUMN @extschema@.idem_stat_services.service IS
	'the service';
COMMENT ON COLUMN @extschema@.idem_stat_services.breaker IS
	'closed, open, half_open, forced_open or forced_closed';
COMMENT ON COLUMN @extschema@.idem_stat_services.window_calls IS
	'breaker: calls in its window';
COMMENT ON COLUMN @extschema@.idem_stat_services.window_failed IS
	'breaker: calls in its window that failed';
COMMENT ON COLUMN @extschema@.idem_stat_services.window_slow IS
	'breaker: calls in its window that were slow';
COMMENT ON COLUMN @extschema@.idem_stat_services.open_until IS
	'breaker: when an open one lets trials through';
COMMENT ON COLUMN @extschema@.idem_stat_services.opened IS
	'how often the breaker has opened';
COMMENT ON COLUMN @extschema@.idem_stat_services.calls_ok IS
	'calls recorded that went well';
COMMENT ON COLUMN @extschema@.idem_stat_services.calls_failed IS
	'calls recorded that failed';
COMMENT ON COLUMN @extschema@.idem_stat_services.calls_slow IS
	'calls recorded that were slow, whether they failed or not';
COMMENT ON COLUMN @extschema@.idem_stat_services.calls_refused IS
	'calls that the breaker did not let through';
COMMENT ON COLUMN @extschema@.idem_stat_services.retries_refused IS
	'retries that the budget refused';
COMMENT ON COLUMN @extschema@.idem_stat_services.window_requests IS
	'retry budget: requests in the last ten seconds';
COMMENT ON COLUMN @extschema@.idem_stat_services.window_retries IS
	'retry budget: retries allowed in the last ten seconds';
COMMENT ON COLUMN @extschema@.idem_stat_services.since IS
	'when counting began';

CREATE FUNCTION @extschema@.idem_stats_reset()
RETURNS void
AS 'MODULE_PATHNAME', 'idem_stats_reset'
LANGUAGE C VOLATILE PARALLEL RESTRICTED;

COMMENT ON FUNCTION @extschema@.idem_stats_reset IS
	'set what was counted in this database to zero; budgets and breakers stay as they are';

--
-- HTTP
--

CREATE FUNCTION @extschema@.idem_parse_key(header text)
RETURNS text
AS 'MODULE_PATHNAME', 'idem_parse_key'
LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE;

COMMENT ON FUNCTION @extschema@.idem_parse_key IS
	'the key in an Idempotency-Key header, in quotes or bare';

CREATE FUNCTION @extschema@.idem_problem(claim @extschema@.idem_claim)
RETURNS jsonb
AS 'MODULE_PATHNAME', 'idem_problem'
LANGUAGE C STABLE PARALLEL SAFE;

COMMENT ON FUNCTION @extschema@.idem_problem IS
	'problem details to answer with; NULL for a claim that has a result or is to make one';

CREATE FUNCTION @extschema@.idem_request_problem(
	reason			text,
	detail			text DEFAULT NULL)
RETURNS jsonb
AS 'MODULE_PATHNAME', 'idem_request_problem'
LANGUAGE C IMMUTABLE PARALLEL SAFE;

COMMENT ON FUNCTION @extschema@.idem_request_problem IS
	'problem details, status 400, for a request that makes no claim: key_missing, key_malformed or request_invalid';

CREATE FUNCTION @extschema@.idem_etag(value anyelement)
RETURNS text
AS 'MODULE_PATHNAME', 'idem_etag'
LANGUAGE C STABLE STRICT PARALLEL SAFE;

COMMENT ON FUNCTION @extschema@.idem_etag IS
	'strong entity tag of a row or another value';

CREATE FUNCTION @extschema@.idem_if_match(
	header			text,
	etag			text)
RETURNS bool
AS 'MODULE_PATHNAME', 'idem_if_match'
LANGUAGE C IMMUTABLE PARALLEL SAFE;

COMMENT ON FUNCTION @extschema@.idem_if_match IS
	'does an If-Match header let the request go on, given the present entity tag?';

--
-- Consumers of messages
--

CREATE FUNCTION @extschema@.idem_receive(
	consumer		text,
	message_id		text,
	tenant			text DEFAULT NULL,
	ttl				interval DEFAULT NULL,
	wait			interval DEFAULT NULL,
	store			regclass DEFAULT NULL)
RETURNS bool
AS 'MODULE_PATHNAME', 'idem_receive'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_receive IS
	'receive a message in this transaction; false if it was received before';

CREATE FUNCTION @extschema@.idem_receive_batch(
	consumer		text,
	message_ids		text[],
	tenant			text DEFAULT NULL,
	ttl				interval DEFAULT NULL,
	wait			interval DEFAULT NULL,
	store			regclass DEFAULT NULL)
RETURNS SETOF text
AS 'MODULE_PATHNAME', 'idem_receive_batch'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_receive_batch IS
	'receive a batch of messages in this transaction; returns the new ones, each once';

--
-- The outbox
--

-- Columns that a take changes come last, and none of them is indexed.  What the
-- indexes are for is told in src/outbox_pick.c, which looks for them.
CREATE TABLE @extschema@.idem_outbox (
	id				int8 GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	message_id		uuid NOT NULL,
	topic			text COLLATE "C" NOT NULL,
	group_key		text COLLATE "C",
	payload			jsonb,
	headers			jsonb,
	created_at		timestamptz NOT NULL,
	max_attempts	int4 NOT NULL,
	available_at	timestamptz NOT NULL,
	attempt			int4 NOT NULL DEFAULT 0,
	lease_until		timestamptz,
	dead_at			timestamptz,
	last_error		text,
	CONSTRAINT idem_outbox_topic_check CHECK (
		pg_catalog.octet_length(topic) OPERATOR(pg_catalog.>=) 1
		AND pg_catalog.octet_length(topic) OPERATOR(pg_catalog.<=) 255),
	CONSTRAINT idem_outbox_group_key_check CHECK (
		pg_catalog.octet_length(group_key) OPERATOR(pg_catalog.>=) 1
		AND pg_catalog.octet_length(group_key) OPERATOR(pg_catalog.<=) 255)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01,
	vacuum_truncate = off);

CREATE INDEX idem_outbox_ungrouped ON @extschema@.idem_outbox (topic, available_at, id)
	WHERE dead_at IS NULL AND group_key IS NULL;
CREATE INDEX idem_outbox_grouped ON @extschema@.idem_outbox (topic, available_at, id)
	WHERE dead_at IS NULL AND group_key IS NOT NULL;
CREATE INDEX idem_outbox_groups ON @extschema@.idem_outbox (topic, group_key, id)
	WHERE dead_at IS NULL AND group_key IS NOT NULL;
CREATE INDEX idem_outbox_dead_letters ON @extschema@.idem_outbox (dead_at)
	WHERE dead_at IS NOT NULL;

COMMENT ON TABLE @extschema@.idem_outbox IS
	'messages that are to be delivered, and dead letters';
COMMENT ON COLUMN @extschema@.idem_outbox.id IS
	'names the message to idem_outbox_done and idem_outbox_fail; the order inside a group';
COMMENT ON COLUMN @extschema@.idem_outbox.message_id IS
	'what a consumer knows the message by, the same at every delivery';
COMMENT ON COLUMN @extschema@.idem_outbox.topic IS
	'what the message is about; relays take by topic';
COMMENT ON COLUMN @extschema@.idem_outbox.group_key IS
	'messages of one topic and group are taken in order; NULL if the order does not matter';
COMMENT ON COLUMN @extschema@.idem_outbox.payload IS
	'the message';
COMMENT ON COLUMN @extschema@.idem_outbox.headers IS
	'what goes with it: an object';
COMMENT ON COLUMN @extschema@.idem_outbox.created_at IS
	'when the message was published';
COMMENT ON COLUMN @extschema@.idem_outbox.max_attempts IS
	'how many times it may be taken';
COMMENT ON COLUMN @extschema@.idem_outbox.available_at IS
	'when it may be taken; later after a failure';
COMMENT ON COLUMN @extschema@.idem_outbox.attempt IS
	'how many times it was taken; the fencing token';
COMMENT ON COLUMN @extschema@.idem_outbox.lease_until IS
	'while a relay has it: when another may take it';
COMMENT ON COLUMN @extschema@.idem_outbox.dead_at IS
	'when it became a dead letter; NULL while it is pending';
COMMENT ON COLUMN @extschema@.idem_outbox.last_error IS
	'what went wrong at the last attempt';

COMMENT ON SEQUENCE @extschema@.idem_outbox_id_seq IS
	'ids of messages';

CREATE FUNCTION @extschema@.idem_publish(
	topic			text,
	payload			jsonb,
	group_key		text DEFAULT NULL,
	headers			jsonb DEFAULT NULL,
	message_id		uuid DEFAULT NULL,
	delay			interval DEFAULT NULL,
	max_attempts	int4 DEFAULT NULL)
RETURNS uuid
AS 'MODULE_PATHNAME', 'idem_publish'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_publish IS
	'put a message into the outbox, in this transaction; returns its message_id';

CREATE FUNCTION @extschema@.idem_outbox_take(
	topic			text,
	max				int4 DEFAULT 1,
	lease			interval DEFAULT NULL)
RETURNS SETOF @extschema@.idem_outbox
AS 'MODULE_PATHNAME', 'idem_outbox_take'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_outbox_take IS
	'take messages of a topic for delivery, max at the most, each for one caller';

CREATE FUNCTION @extschema@.idem_outbox_done(
	id				int8,
	attempt			int4)
RETURNS void
AS 'MODULE_PATHNAME', 'idem_outbox_done'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_outbox_done IS
	'a message was delivered: remove it';

CREATE FUNCTION @extschema@.idem_outbox_fail(
	id				int8,
	attempt			int4,
	error			text DEFAULT NULL,
	retry_after		interval DEFAULT NULL,
	dead			bool DEFAULT false)
RETURNS timestamptz
AS 'MODULE_PATHNAME', 'idem_outbox_fail'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_outbox_fail IS
	'a message was not delivered; returns when it is tried again, NULL if it is a dead letter';

CREATE FUNCTION @extschema@.idem_outbox_redrive(
	topic			text DEFAULT NULL,
	id				int8 DEFAULT NULL,
	max				int4 DEFAULT NULL)
RETURNS int8
AS 'MODULE_PATHNAME', 'idem_outbox_redrive'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_outbox_redrive IS
	'publish dead letters again, oldest first, max at the most; returns how many';

CREATE VIEW @extschema@.idem_outbox_dead AS
SELECT id, message_id, topic, group_key, payload, headers, created_at,
	attempt, dead_at, last_error
FROM ONLY @extschema@.idem_outbox
WHERE dead_at IS NOT NULL;

COMMENT ON VIEW @extschema@.idem_outbox_dead IS
	'dead letters: messages that are not tried any more';
COMMENT ON COLUMN @extschema@.idem_outbox_dead.id IS
	'names the message to idem_outbox_redrive';
COMMENT ON COLUMN @extschema@.idem_outbox_dead.message_id IS
	'what a consumer knows the message by';
COMMENT ON COLUMN @extschema@.idem_outbox_dead.topic IS
	'what the message is about';
COMMENT ON COLUMN @extschema@.idem_outbox_dead.group_key IS
	'its group, if it has one';
COMMENT ON COLUMN @extschema@.idem_outbox_dead.payload IS
	'the message';
COMMENT ON COLUMN @extschema@.idem_outbox_dead.headers IS
	'what goes with it';
COMMENT ON COLUMN @extschema@.idem_outbox_dead.created_at IS
	'when the message was published';
COMMENT ON COLUMN @extschema@.idem_outbox_dead.attempt IS
	'how many times it was taken';
COMMENT ON COLUMN @extschema@.idem_outbox_dead.dead_at IS
	'when it became a dead letter';
COMMENT ON COLUMN @extschema@.idem_outbox_dead.last_error IS
	'what went wrong at the last attempt';

CREATE VIEW @extschema@.idem_outbox_topics AS
SELECT topic,
	pg_catalog.count(*) FILTER (WHERE dead_at IS NULL) AS pending,
	pg_catalog.count(*) FILTER (WHERE dead_at IS NULL
		AND lease_until OPERATOR(pg_catalog.>) pg_catalog.clock_timestamp()) AS taken,
	pg_catalog.count(*) FILTER (WHERE dead_at IS NULL AND attempt OPERATOR(pg_catalog.>) 0
		AND lease_until IS NULL) AS failing,
	pg_catalog.min(created_at) FILTER (WHERE dead_at IS NULL) AS oldest,
	pg_catalog.count(dead_at) AS dead
FROM ONLY @extschema@.idem_outbox
GROUP BY topic;

COMMENT ON VIEW @extschema@.idem_outbox_topics IS
	'what is in the outbox, topic by topic';
COMMENT ON COLUMN @extschema@.idem_outbox_topics.topic IS
	'the topic';
COMMENT ON COLUMN @extschema@.idem_outbox_topics.pending IS
	'messages that are to be delivered';
COMMENT ON COLUMN @extschema@.idem_outbox_topics.taken IS
	'of these, how many a relay has just now';
COMMENT ON COLUMN @extschema@.idem_outbox_topics.failing IS
	'of these, how many have failed and wait for their next attempt';
COMMENT ON COLUMN @extschema@.idem_outbox_topics.oldest IS
	'when the oldest pending message was published';
COMMENT ON COLUMN @extschema@.idem_outbox_topics.dead IS
	'dead letters';

-- keys, policies and messages survive pg_dump, and so does the next id
SELECT pg_catalog.pg_extension_config_dump('idempotency_keys'::regclass, '');
SELECT pg_catalog.pg_extension_config_dump('idem_route_policies'::regclass, '');
SELECT pg_catalog.pg_extension_config_dump('idem_service_policies'::regclass, '');
SELECT pg_catalog.pg_extension_config_dump('idem_outbox'::regclass, '');
SELECT pg_catalog.pg_extension_config_dump('idem_outbox_id_seq'::regclass, '');

--
-- Administration
--

CREATE FUNCTION @extschema@.idem_expire(max int4 DEFAULT NULL)
RETURNS int8
AS 'MODULE_PATHNAME', 'idem_expire'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_expire IS
	'remove expired keys now, max at the most; returns how many went';

CREATE FUNCTION @extschema@.idem_create_table(name text)
RETURNS regclass
AS 'MODULE_PATHNAME', 'idem_create_table'
LANGUAGE C VOLATILE STRICT PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_create_table IS
	'create a further store of idempotency keys, owned by the caller';

CREATE FUNCTION @extschema@.idem_grant(role regrole)
RETURNS void
AS 'MODULE_PATHNAME', 'idem_grant'
LANGUAGE C VOLATILE STRICT PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_grant IS
	'let a role call what an application needs';

CREATE FUNCTION @extschema@.idem_revoke(role regrole)
RETURNS void
AS 'MODULE_PATHNAME', 'idem_revoke'
LANGUAGE C VOLATILE STRICT PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_revoke IS
	'take back what idem_grant gave';

--
-- Nothing is granted to PUBLIC but the pure helpers: idem_hash and its kin, idem_backoff,
-- idem_retryable, idem_retry, idem_parse_key, idem_problem, idem_request_problem,
-- idem_etag, idem_if_match.  Whoever may read the server's statistics may read these.
--

REVOKE ALL ON FUNCTION
	@extschema@.idem_begin,
	@extschema@.idem_finish,
	@extschema@.idem_lookup,
	@extschema@._idem_policy_changed,
	@extschema@.idem_budget_allow,
	@extschema@.idem_breaker_allow,
	@extschema@.idem_breaker_record,
	@extschema@.idem_breaker_retry_after,
	@extschema@.idem_breaker_reset,
	@extschema@.idem_hedge_after,
	@extschema@._idem_stat_routes,
	@extschema@._idem_stat_services,
	@extschema@.idem_stats_reset,
	@extschema@.idem_receive,
	@extschema@.idem_receive_batch,
	@extschema@.idem_checkpoint,
	@extschema@.idem_release,
	@extschema@.idem_resume,
	@extschema@.idem_child_key,
	@extschema@.idem_call,
	@extschema@.idem_publish,
	@extschema@.idem_outbox_take,
	@extschema@.idem_outbox_done,
	@extschema@.idem_outbox_fail,
	@extschema@.idem_outbox_redrive,
	@extschema@.idem_expire,
	@extschema@.idem_create_table,
	@extschema@.idem_grant,
	@extschema@.idem_revoke
FROM PUBLIC;

REVOKE ALL ON TYPE
	@extschema@.idempotency_keys,
	@extschema@.idem_route_policies,
	@extschema@.idem_service_policies,
	@extschema@.idem_unfinished,
	@extschema@.idem_stat_routes,
	@extschema@.idem_stat_services,
	@extschema@.idem_outbox,
	@extschema@.idem_outbox_dead,
	@extschema@.idem_outbox_topics,
	@extschema@.idem_state,
	@extschema@.idempotency_key,
	@extschema@.idem_claim,
	@extschema@.idem_result
FROM PUBLIC;

REVOKE ALL ON TABLE
	@extschema@.idempotency_keys,
	@extschema@.idem_route_policies,
	@extschema@.idem_service_policies,
	@extschema@.idem_unfinished,
	@extschema@.idem_stat_routes,
	@extschema@.idem_stat_services,
	@extschema@.idem_outbox,
	@extschema@.idem_outbox_dead,
	@extschema@.idem_outbox_topics
FROM PUBLIC;

REVOKE ALL ON SEQUENCE
	@extschema@.idem_outbox_id_seq
FROM PUBLIC;

GRANT EXECUTE ON FUNCTION
	@extschema@._idem_stat_routes,
	@extschema@._idem_stat_services
TO pg_read_all_stats;

GRANT SELECT ON TABLE
	@extschema@.idem_stat_routes,
	@extschema@.idem_stat_services
TO pg_read_all_stats;

--
-- Wakes the launcher when this commits, or says that there is none
--

CREATE FUNCTION @extschema@._idem_created()
RETURNS void
AS 'MODULE_PATHNAME', 'idem_created'
LANGUAGE C;

SELECT @extschema@._idem_created();

DROP FUNCTION @extschema@._idem_created();
