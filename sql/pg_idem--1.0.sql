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
	'when the key was finished last';

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
COMMENT ON COLUMN @extschema@.idempotency_keys.key IS
	'the key as the client sent it, 1 to 255 bytes';
COMMENT ON COLUMN @extschema@.idempotency_keys.tenant IS
	'whose key it is; empty where there is one tenant';
COMMENT ON COLUMN @extschema@.idempotency_keys.route IS
	'what the key is for, such as "POST /v1/charges"';
COMMENT ON COLUMN @extschema@.idempotency_keys.request_hash IS
	'fingerprint of the first request';
COMMENT ON COLUMN @extschema@.idempotency_keys.attempt IS
	'counts executions; the fencing token';
COMMENT ON COLUMN @extschema@.idempotency_keys.created_at IS
	'when the key was first claimed';
COMMENT ON COLUMN @extschema@.idempotency_keys.expires_at IS
	'when the key is forgotten';
COMMENT ON COLUMN @extschema@.idempotency_keys.state IS
	'in_progress, completed or failed';
COMMENT ON COLUMN @extschema@.idempotency_keys.lease_until IS
	'while in_progress: when the claim may be taken over';
COMMENT ON COLUMN @extschema@.idempotency_keys.step IS
	'last checkpoint';
COMMENT ON COLUMN @extschema@.idempotency_keys.step_data IS
	'data of the last checkpoint';
COMMENT ON COLUMN @extschema@.idempotency_keys.status IS
	'stored result: HTTP status';
COMMENT ON COLUMN @extschema@.idempotency_keys.headers IS
	'stored result: headers on the list pg_idem.replay_headers';
COMMENT ON COLUMN @extschema@.idempotency_keys.response IS
	'stored result: JSON';
COMMENT ON COLUMN @extschema@.idempotency_keys.body IS
	'stored result: bytes';
COMMENT ON COLUMN @extschema@.idempotency_keys.result_dropped IS
	'the result is not stored, though the key is finished';
COMMENT ON COLUMN @extschema@.idempotency_keys.finished_at IS
	'when the key was finished last';

--
-- Policies of routes
--

CREATE TABLE @extschema@.idem_routes (
	route			pg_catalog.text COLLATE pg_catalog."C" PRIMARY KEY,
	ttl				pg_catalog.interval,
	lease			pg_catalog.interval,
	wait			pg_catalog.interval,
	max_attempts	pg_catalog.int4,
	on_lost_lease	pg_catalog.text,
	keep			pg_catalog.text,
	response_ttl	pg_catalog.interval,
	retry_ratio		pg_catalog.float8,
	retry_min_per_second	pg_catalog.float8,
	CONSTRAINT idem_routes_route_check CHECK (
		pg_catalog.octet_length(route) OPERATOR(pg_catalog.>=) 1
		AND pg_catalog.octet_length(route) OPERATOR(pg_catalog.<=) 255),
	CONSTRAINT idem_routes_ttl_check CHECK (
		ttl OPERATOR(pg_catalog.>) '0'::pg_catalog.interval),
	CONSTRAINT idem_routes_lease_check CHECK (
		lease OPERATOR(pg_catalog.>) '0'::pg_catalog.interval),
	CONSTRAINT idem_routes_wait_check CHECK (
		wait OPERATOR(pg_catalog.>=) '0'::pg_catalog.interval),
	CONSTRAINT idem_routes_max_attempts_check CHECK (
		max_attempts OPERATOR(pg_catalog.>=) 1),
	CONSTRAINT idem_routes_on_lost_lease_check CHECK (
		on_lost_lease OPERATOR(pg_catalog.=) 'resume'
		OR on_lost_lease OPERATOR(pg_catalog.=) 'hold'),
	CONSTRAINT idem_routes_keep_check CHECK (
		keep OPERATOR(pg_catalog.=) 'all'
		OR keep OPERATOR(pg_catalog.=) 'final'
		OR keep OPERATOR(pg_catalog.=) 'success'),
	CONSTRAINT idem_routes_response_ttl_check CHECK (
		response_ttl OPERATOR(pg_catalog.>) '0'::pg_catalog.interval
		AND response_ttl OPERATOR(pg_catalog.<=) '1000 years'::pg_catalog.interval),
	CONSTRAINT idem_routes_retry_ratio_check CHECK (
		retry_ratio OPERATOR(pg_catalog.>=) 0
		AND retry_ratio OPERATOR(pg_catalog.<) 'NaN'),
	CONSTRAINT idem_routes_retry_min_per_second_check CHECK (
		retry_min_per_second OPERATOR(pg_catalog.>=) 0
		AND retry_min_per_second OPERATOR(pg_catalog.<) 'NaN')
);

COMMENT ON TABLE @extschema@.idem_routes IS
	'policies of single routes; NULL is the setting of the same name';
COMMENT ON COLUMN @extschema@.idem_routes.route IS
	'the route that the row is for';
COMMENT ON COLUMN @extschema@.idem_routes.ttl IS
	'how long a key is remembered';
COMMENT ON COLUMN @extschema@.idem_routes.lease IS
	'how long a committed claim is left to its owner';
COMMENT ON COLUMN @extschema@.idem_routes.wait IS
	'how long idem_begin and idem_receive wait for another that has the key';
COMMENT ON COLUMN @extschema@.idem_routes.max_attempts IS
	'how many times a key may be executed';
COMMENT ON COLUMN @extschema@.idem_routes.on_lost_lease IS
	'what becomes of a claim whose lease is over: resume or hold';
COMMENT ON COLUMN @extschema@.idem_routes.keep IS
	'which results are final: final, success or all';
COMMENT ON COLUMN @extschema@.idem_routes.response_ttl IS
	'how long a result is kept, if not as long as its key';
COMMENT ON COLUMN @extschema@.idem_routes.retry_ratio IS
	'retry budget: retries allowed per request';
COMMENT ON COLUMN @extschema@.idem_routes.retry_min_per_second IS
	'retry budget: retries allowed per second in any case';

--
-- Policies of services
--

CREATE TABLE @extschema@.idem_service_policies (
	service			pg_catalog.text COLLATE pg_catalog."C" PRIMARY KEY,
	retry_ratio		pg_catalog.float8,
	retry_min_per_second	pg_catalog.float8,
	failure_ratio	pg_catalog.float8,
	slow_call_ratio	pg_catalog.float8,
	slow_call_time	pg_catalog.interval,
	window_calls	pg_catalog.int4,
	minimum_calls	pg_catalog.int4,
	open_time		pg_catalog.interval,
	max_open_time	pg_catalog.interval,
	half_open_calls	pg_catalog.int4,
	half_open_time	pg_catalog.interval,
	breaker			pg_catalog.text,
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
		slow_call_time OPERATOR(pg_catalog.>=) '0'::pg_catalog.interval),
	CONSTRAINT idem_service_policies_window_calls_check CHECK (
		window_calls OPERATOR(pg_catalog.>=) 1
		AND window_calls OPERATOR(pg_catalog.<=) 1000),
	CONSTRAINT idem_service_policies_minimum_calls_check CHECK (
		minimum_calls OPERATOR(pg_catalog.>=) 1),
	CONSTRAINT idem_service_policies_open_time_check CHECK (
		open_time OPERATOR(pg_catalog.>=) '0'::pg_catalog.interval),
	CONSTRAINT idem_service_policies_max_open_time_check CHECK (
		max_open_time OPERATOR(pg_catalog.>=) '0'::pg_catalog.interval),
	CONSTRAINT idem_service_policies_half_open_calls_check CHECK (
		half_open_calls OPERATOR(pg_catalog.>=) 1),
	CONSTRAINT idem_service_policies_half_open_time_check CHECK (
		half_open_time OPERATOR(pg_catalog.>=) '0'::pg_catalog.interval),
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

CREATE FUNCTION @extschema@.idem_policy_changed()
RETURNS trigger
AS 'MODULE_PATHNAME', 'idem_policy_changed'
LANGUAGE C;

COMMENT ON FUNCTION @extschema@.idem_policy_changed() IS
	'trigger of the tables of policies: lets all backends know of a change';

CREATE TRIGGER idem_routes_changed
	AFTER INSERT OR UPDATE OR DELETE ON @extschema@.idem_routes
	FOR EACH ROW EXECUTE FUNCTION @extschema@.idem_policy_changed();
CREATE TRIGGER idem_routes_truncated
	AFTER TRUNCATE ON @extschema@.idem_routes
	FOR EACH STATEMENT EXECUTE FUNCTION @extschema@.idem_policy_changed();
CREATE TRIGGER idem_service_policies_changed
	AFTER INSERT OR UPDATE OR DELETE ON @extschema@.idem_service_policies
	FOR EACH ROW EXECUTE FUNCTION @extschema@.idem_policy_changed();
CREATE TRIGGER idem_service_policies_truncated
	AFTER TRUNCATE ON @extschema@.idem_service_policies
	FOR EACH STATEMENT EXECUTE FUNCTION @extschema@.idem_policy_changed();

-- also for changes that logical replication applies
ALTER TABLE @extschema@.idem_routes
	ENABLE ALWAYS TRIGGER idem_routes_changed,
	ENABLE ALWAYS TRIGGER idem_routes_truncated;
ALTER TABLE @extschema@.idem_service_policies
	ENABLE ALWAYS TRIGGER idem_service_policies_changed,
	ENABLE ALWAYS TRIGGER idem_service_policies_truncated;

--
-- The outbox
--

-- Columns that a take changes come last, and none of them is indexed.  What the
-- indexes are for is told in src/outbox_pick.c, which looks for them.
CREATE TABLE @extschema@.idem_outbox (
	id				pg_catalog.int8 GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	message_id		pg_catalog.uuid NOT NULL,
	topic			pg_catalog.text COLLATE pg_catalog."C" NOT NULL,
	group_key		pg_catalog.text COLLATE pg_catalog."C",
	payload			pg_catalog.jsonb,
	headers			pg_catalog.jsonb,
	created_at		pg_catalog.timestamptz NOT NULL,
	max_attempts	pg_catalog.int4 NOT NULL,
	available_at	pg_catalog.timestamptz NOT NULL,
	attempt			pg_catalog.int4 NOT NULL DEFAULT 0,
	lease_until		pg_catalog.timestamptz,
	dead_at			pg_catalog.timestamptz,
	last_error		pg_catalog.text,
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
	topic			pg_catalog.text,
	payload			pg_catalog.jsonb,
	group_key		pg_catalog.text DEFAULT NULL,
	headers			pg_catalog.jsonb DEFAULT NULL,
	message_id		pg_catalog.uuid DEFAULT NULL,
	delay			pg_catalog.interval DEFAULT NULL,
	max_attempts	pg_catalog.int4 DEFAULT NULL)
RETURNS pg_catalog.uuid
AS 'MODULE_PATHNAME', 'idem_publish'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_publish(pg_catalog.text, pg_catalog.jsonb, pg_catalog.text, pg_catalog.jsonb, pg_catalog.uuid, pg_catalog.interval, pg_catalog.int4) IS
	'put a message into the outbox, in this transaction; returns its message_id';

CREATE FUNCTION @extschema@.idem_outbox_take(
	topic			pg_catalog.text,
	max				pg_catalog.int4 DEFAULT 1,
	lease			pg_catalog.interval DEFAULT NULL)
RETURNS SETOF @extschema@.idem_outbox
AS 'MODULE_PATHNAME', 'idem_outbox_take'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_outbox_take(pg_catalog.text, pg_catalog.int4, pg_catalog.interval) IS
	'take messages of a topic for delivery, max at the most, each for one caller';

CREATE FUNCTION @extschema@.idem_outbox_done(
	id				pg_catalog.int8,
	attempt			pg_catalog.int4)
RETURNS pg_catalog.void
AS 'MODULE_PATHNAME', 'idem_outbox_done'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_outbox_done(pg_catalog.int8, pg_catalog.int4) IS
	'a message was delivered: remove it';

CREATE FUNCTION @extschema@.idem_outbox_fail(
	id				pg_catalog.int8,
	attempt			pg_catalog.int4,
	error			pg_catalog.text DEFAULT NULL,
	retry_after		pg_catalog.interval DEFAULT NULL,
	dead			pg_catalog.bool DEFAULT false)
RETURNS pg_catalog.timestamptz
AS 'MODULE_PATHNAME', 'idem_outbox_fail'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_outbox_fail(pg_catalog.int8, pg_catalog.int4, pg_catalog.text, pg_catalog.interval, pg_catalog.bool) IS
	'a message was not delivered; returns when it is tried again, NULL if it is a dead letter';

CREATE FUNCTION @extschema@.idem_outbox_redrive(
	topic			pg_catalog.text DEFAULT NULL,
	id				pg_catalog.int8 DEFAULT NULL,
	max				pg_catalog.int4 DEFAULT NULL)
RETURNS pg_catalog.int8
AS 'MODULE_PATHNAME', 'idem_outbox_redrive'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_outbox_redrive(pg_catalog.text, pg_catalog.int8, pg_catalog.int4) IS
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

-- keys, policies and messages survive pg_dump, and so does the next id (one
-- statement for each: they all change the extension's row)
SELECT pg_catalog.pg_extension_config_dump(c.oid, '')
FROM pg_catalog.pg_extension e
JOIN pg_catalog.pg_class c
	ON c.relnamespace OPERATOR(pg_catalog.=) e.extnamespace
WHERE e.extname OPERATOR(pg_catalog.=) 'pg_idem'
	AND c.relname OPERATOR(pg_catalog.=) 'idempotency_keys';

SELECT pg_catalog.pg_extension_config_dump(c.oid, '')
FROM pg_catalog.pg_extension e
JOIN pg_catalog.pg_class c
	ON c.relnamespace OPERATOR(pg_catalog.=) e.extnamespace
WHERE e.extname OPERATOR(pg_catalog.=) 'pg_idem'
	AND c.relname OPERATOR(pg_catalog.=) 'idem_routes';

SELECT pg_catalog.pg_extension_config_dump(c.oid, '')
FROM pg_catalog.pg_extension e
JOIN pg_catalog.pg_class c
	ON c.relnamespace OPERATOR(pg_catalog.=) e.extnamespace
WHERE e.extname OPERATOR(pg_catalog.=) 'pg_idem'
	AND c.relname OPERATOR(pg_catalog.=) 'idem_service_policies';

SELECT pg_catalog.pg_extension_config_dump(c.oid, '')
FROM pg_catalog.pg_extension e
JOIN pg_catalog.pg_class c
	ON c.relnamespace OPERATOR(pg_catalog.=) e.extnamespace
WHERE e.extname OPERATOR(pg_catalog.=) 'pg_idem'
	AND c.relname OPERATOR(pg_catalog.=) 'idem_outbox';

SELECT pg_catalog.pg_extension_config_dump(c.oid, '')
FROM pg_catalog.pg_extension e
JOIN pg_catalog.pg_class c
	ON c.relnamespace OPERATOR(pg_catalog.=) e.extnamespace
WHERE e.extname OPERATOR(pg_catalog.=) 'pg_idem'
	AND c.relname OPERATOR(pg_catalog.=) 'idem_outbox_id_seq';

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
	response		pg_catalog.jsonb DEFAULT NULL,
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
-- Consumers of messages
--

CREATE FUNCTION @extschema@.idem_receive(
	consumer		pg_catalog.text,
	message_id		pg_catalog.text,
	ttl				pg_catalog.interval DEFAULT NULL,
	wait			pg_catalog.interval DEFAULT NULL,
	tenant			pg_catalog.text DEFAULT NULL,
	store			pg_catalog.regclass DEFAULT NULL)
RETURNS pg_catalog.bool
AS 'MODULE_PATHNAME', 'idem_receive'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_receive(pg_catalog.text, pg_catalog.text, pg_catalog.interval, pg_catalog.interval, pg_catalog.text, pg_catalog.regclass) IS
	'receive a message in this transaction; false if it was received before';

CREATE FUNCTION @extschema@.idem_receive_batch(
	consumer		pg_catalog.text,
	message_ids		pg_catalog.text[],
	ttl				pg_catalog.interval DEFAULT NULL,
	wait			pg_catalog.interval DEFAULT NULL,
	tenant			pg_catalog.text DEFAULT NULL,
	store			pg_catalog.regclass DEFAULT NULL)
RETURNS SETOF pg_catalog.text
AS 'MODULE_PATHNAME', 'idem_receive_batch'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_receive_batch(pg_catalog.text, pg_catalog.text[], pg_catalog.interval, pg_catalog.interval, pg_catalog.text, pg_catalog.regclass) IS
	'receive a batch of messages in this transaction; returns the new ones, each once';

--
-- Claims that outlive their transaction
--

CREATE FUNCTION @extschema@.idem_checkpoint(
	key				pg_catalog.text,
	step			pg_catalog.text,
	data			pg_catalog.jsonb DEFAULT NULL,
	lease			pg_catalog.interval DEFAULT NULL,
	route			pg_catalog.text DEFAULT NULL,
	tenant			pg_catalog.text DEFAULT NULL,
	attempt			pg_catalog.int4 DEFAULT NULL,
	store			pg_catalog.regclass DEFAULT NULL)
RETURNS pg_catalog.timestamptz
AS 'MODULE_PATHNAME', 'idem_checkpoint'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_checkpoint(pg_catalog.text, pg_catalog.text, pg_catalog.jsonb, pg_catalog.interval, pg_catalog.text, pg_catalog.text, pg_catalog.int4, pg_catalog.regclass) IS
	'record how far the work of a claim has come and renew its lease; returns when that ends';

CREATE FUNCTION @extschema@.idem_release(
	key				pg_catalog.text,
	route			pg_catalog.text DEFAULT NULL,
	tenant			pg_catalog.text DEFAULT NULL,
	attempt			pg_catalog.int4 DEFAULT NULL,
	store			pg_catalog.regclass DEFAULT NULL)
RETURNS pg_catalog.void
AS 'MODULE_PATHNAME', 'idem_release'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_release(pg_catalog.text, pg_catalog.text, pg_catalog.text, pg_catalog.int4, pg_catalog.regclass) IS
	'give a claim up: the next request resumes it at once';

CREATE FUNCTION @extschema@.idem_resume(
	max				pg_catalog.int4 DEFAULT 1,
	route			pg_catalog.text DEFAULT NULL,
	lease			pg_catalog.interval DEFAULT NULL,
	held			pg_catalog.bool DEFAULT false,
	tenant			pg_catalog.text DEFAULT NULL,
	key				pg_catalog.text DEFAULT NULL,
	store			pg_catalog.regclass DEFAULT NULL)
RETURNS SETOF @extschema@.idempotency_key
AS 'MODULE_PATHNAME', 'idem_resume'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_resume(pg_catalog.int4, pg_catalog.text, pg_catalog.interval, pg_catalog.bool, pg_catalog.text, pg_catalog.text, pg_catalog.regclass) IS
	'take over claims whose lease is over, max at the most, each for one caller';

CREATE FUNCTION @extschema@.idem_child_key(
	key				pg_catalog.text,
	step			pg_catalog.text,
	route			pg_catalog.text,
	tenant			pg_catalog.text DEFAULT NULL)
RETURNS pg_catalog.uuid
AS 'MODULE_PATHNAME', 'idem_child_key'
LANGUAGE C STABLE PARALLEL SAFE;

COMMENT ON FUNCTION @extschema@.idem_child_key(pg_catalog.text, pg_catalog.text, pg_catalog.text, pg_catalog.text) IS
	'idempotency key for a call downstream, the same on every attempt';

CREATE FUNCTION @extschema@.idem_call(
	key				pg_catalog.text,
	route			pg_catalog.text,
	request			pg_catalog.jsonb,
	work			pg_catalog.regprocedure,
	tenant			pg_catalog.text DEFAULT NULL,
	wait			pg_catalog.interval DEFAULT NULL,
	ttl				pg_catalog.interval DEFAULT NULL,
	lease			pg_catalog.interval DEFAULT NULL,
	first_sent		pg_catalog.timestamptz DEFAULT NULL,
	store			pg_catalog.regclass DEFAULT NULL)
RETURNS @extschema@.idem_claim
AS 'MODULE_PATHNAME', 'idem_call'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_call(pg_catalog.text, pg_catalog.text, pg_catalog.jsonb, pg_catalog.regprocedure, pg_catalog.text, pg_catalog.interval, pg_catalog.interval, pg_catalog.interval, pg_catalog.timestamptz, pg_catalog.regclass) IS
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
-- The retrying side
--

CREATE FUNCTION @extschema@.idem_backoff(
	retry			pg_catalog.int4,
	base			pg_catalog.interval DEFAULT '100 ms',
	cap				pg_catalog.interval DEFAULT '30 s',
	jitter			pg_catalog.text DEFAULT 'full',
	previous		pg_catalog.interval DEFAULT NULL,
	seed			pg_catalog.int8 DEFAULT NULL)
RETURNS pg_catalog.interval
AS 'MODULE_PATHNAME', 'idem_backoff'
LANGUAGE C VOLATILE PARALLEL SAFE;

COMMENT ON FUNCTION @extschema@.idem_backoff(pg_catalog.int4, pg_catalog.interval, pg_catalog.interval, pg_catalog.text, pg_catalog.interval, pg_catalog.int8) IS
	'how long to wait before a retry: exponential, capped, with jitter';

CREATE FUNCTION @extschema@.idem_retryable(status pg_catalog.int4)
RETURNS pg_catalog.bool
AS 'MODULE_PATHNAME', 'idem_retryable_status'
LANGUAGE C IMMUTABLE PARALLEL SAFE;

COMMENT ON FUNCTION @extschema@.idem_retryable(pg_catalog.int4) IS
	'may a request that got this HTTP status be retried? NULL status: no answer; NULL result: it depends';

CREATE FUNCTION @extschema@.idem_retryable(sqlstate pg_catalog.text)
RETURNS pg_catalog.bool
AS 'MODULE_PATHNAME', 'idem_retryable_sqlstate'
LANGUAGE C IMMUTABLE PARALLEL SAFE;

COMMENT ON FUNCTION @extschema@.idem_retryable(pg_catalog.text) IS
	'may a transaction that failed with this SQLSTATE be retried? NULL SQLSTATE: no answer';

CREATE FUNCTION @extschema@.idem_retry(
	retry			pg_catalog.int4,
	status			pg_catalog.int4,
	retry_after		pg_catalog.text DEFAULT NULL,
	expires_at		pg_catalog.timestamptz DEFAULT NULL,
	max_attempts	pg_catalog.int4 DEFAULT NULL,
	base			pg_catalog.interval DEFAULT '100 ms',
	cap				pg_catalog.interval DEFAULT '30 s',
	jitter			pg_catalog.text DEFAULT 'full',
	previous		pg_catalog.interval DEFAULT NULL,
	seed			pg_catalog.int8 DEFAULT NULL)
RETURNS pg_catalog.interval
AS 'MODULE_PATHNAME', 'idem_retry'
LANGUAGE C VOLATILE PARALLEL SAFE;

COMMENT ON FUNCTION @extschema@.idem_retry(pg_catalog.int4, pg_catalog.int4, pg_catalog.text, pg_catalog.timestamptz, pg_catalog.int4, pg_catalog.interval, pg_catalog.interval, pg_catalog.text, pg_catalog.interval, pg_catalog.int8) IS
	'how long to wait before a request that got this status is retried; NULL: give up';

CREATE FUNCTION @extschema@.idem_budget(
	service			pg_catalog.text,
	is_retry		pg_catalog.bool)
RETURNS pg_catalog.bool
AS 'MODULE_PATHNAME', 'idem_budget'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_budget(pg_catalog.text, pg_catalog.bool) IS
	'count a call to a service; false if it is a retry that the budget refuses';

CREATE FUNCTION @extschema@.idem_breaker_allow(service pg_catalog.text)
RETURNS pg_catalog.bool
AS 'MODULE_PATHNAME', 'idem_breaker_allow'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_breaker_allow(pg_catalog.text) IS
	'may the service be called? Counts as a trial while its breaker is half open';

CREATE FUNCTION @extschema@.idem_breaker_record(
	service			pg_catalog.text,
	ok				pg_catalog.bool,
	duration		pg_catalog.interval DEFAULT NULL)
RETURNS pg_catalog.text
AS 'MODULE_PATHNAME', 'idem_breaker_record'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_breaker_record(pg_catalog.text, pg_catalog.bool, pg_catalog.interval) IS
	'tell a breaker how a call to the service went; returns its state after that';

CREATE FUNCTION @extschema@.idem_breaker_retry_after(service pg_catalog.text)
RETURNS pg_catalog.interval
AS 'MODULE_PATHNAME', 'idem_breaker_retry_after'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_breaker_retry_after(pg_catalog.text) IS
	'when to ask a breaker again that refuses; NULL if it lets calls through';

CREATE FUNCTION @extschema@.idem_breaker_reset(service pg_catalog.text)
RETURNS pg_catalog.void
AS 'MODULE_PATHNAME', 'idem_breaker_reset'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_breaker_reset(pg_catalog.text) IS
	'close a breaker and forget what it knows';

CREATE FUNCTION @extschema@.idem_hedge_after(
	route			pg_catalog.text,
	quantile		pg_catalog.float8 DEFAULT 0.95)
RETURNS pg_catalog.interval
AS 'MODULE_PATHNAME', 'idem_hedge_after'
LANGUAGE C VOLATILE PARALLEL RESTRICTED;

COMMENT ON FUNCTION @extschema@.idem_hedge_after(pg_catalog.text, pg_catalog.float8) IS
	'after how long a second copy of a request is worth sending: a quantile of measured run times';

--
-- Statistics
--

CREATE FUNCTION @extschema@.idem_get_stats(
	OUT route			pg_catalog.text,
	OUT started			pg_catalog.int8,
	OUT resumed			pg_catalog.int8,
	OUT replayed		pg_catalog.int8,
	OUT in_progress		pg_catalog.int8,
	OUT mismatch		pg_catalog.int8,
	OUT expired			pg_catalog.int8,
	OUT unknown			pg_catalog.int8,
	OUT throttled		pg_catalog.int8,
	OUT completed		pg_catalog.int8,
	OUT failed			pg_catalog.int8,
	OUT stale			pg_catalog.int8,
	OUT run_time_p50	pg_catalog.interval,
	OUT run_time_p95	pg_catalog.interval,
	OUT run_time_p99	pg_catalog.interval,
	OUT window_requests	pg_catalog.int8,
	OUT window_retries	pg_catalog.int8,
	OUT since			pg_catalog.timestamptz)
RETURNS SETOF pg_catalog.record
AS 'MODULE_PATHNAME', 'idem_get_stats'
LANGUAGE C VOLATILE PARALLEL RESTRICTED;

COMMENT ON FUNCTION @extschema@.idem_get_stats() IS
	'the rows of view idem_stats';

CREATE VIEW @extschema@.idem_stats AS
SELECT * FROM @extschema@.idem_get_stats();

COMMENT ON VIEW @extschema@.idem_stats IS
	'what was counted of each route in this database';
COMMENT ON COLUMN @extschema@.idem_stats.route IS
	'the route';
COMMENT ON COLUMN @extschema@.idem_stats.started IS
	'answers of idem_begin: started';
COMMENT ON COLUMN @extschema@.idem_stats.resumed IS
	'answers of idem_begin: resumed; and claims that idem_resume took over';
COMMENT ON COLUMN @extschema@.idem_stats.replayed IS
	'answers of idem_begin: replayed';
COMMENT ON COLUMN @extschema@.idem_stats.in_progress IS
	'answers of idem_begin: in_progress';
COMMENT ON COLUMN @extschema@.idem_stats.mismatch IS
	'answers of idem_begin: mismatch';
COMMENT ON COLUMN @extschema@.idem_stats.expired IS
	'answers of idem_begin: expired';
COMMENT ON COLUMN @extschema@.idem_stats.unknown IS
	'answers of idem_begin: unknown';
COMMENT ON COLUMN @extschema@.idem_stats.throttled IS
	'answers of idem_begin: throttled';
COMMENT ON COLUMN @extschema@.idem_stats.completed IS
	'calls of idem_finish whose result is kept';
COMMENT ON COLUMN @extschema@.idem_stats.failed IS
	'calls of idem_finish whose result is not kept, so that the key may run again';
COMMENT ON COLUMN @extschema@.idem_stats.stale IS
	'calls for a claim that failed with IK001';
COMMENT ON COLUMN @extschema@.idem_stats.run_time_p50 IS
	'time from begin to finish that half of the first attempts stay within';
COMMENT ON COLUMN @extschema@.idem_stats.run_time_p95 IS
	'time from begin to finish that 95 % of the first attempts stay within';
COMMENT ON COLUMN @extschema@.idem_stats.run_time_p99 IS
	'time from begin to finish that 99 % of the first attempts stay within';
COMMENT ON COLUMN @extschema@.idem_stats.window_requests IS
	'retry budget: first executions in the last ten seconds';
COMMENT ON COLUMN @extschema@.idem_stats.window_retries IS
	'retry budget: re-executions in the last ten seconds';
COMMENT ON COLUMN @extschema@.idem_stats.since IS
	'when counting began';

CREATE FUNCTION @extschema@.idem_get_services(
	OUT service			pg_catalog.text,
	OUT breaker			pg_catalog.text,
	OUT window_calls	pg_catalog.int4,
	OUT window_failed	pg_catalog.int4,
	OUT window_slow		pg_catalog.int4,
	OUT open_until		pg_catalog.timestamptz,
	OUT opened			pg_catalog.int8,
	OUT calls_ok		pg_catalog.int8,
	OUT calls_failed	pg_catalog.int8,
	OUT calls_slow		pg_catalog.int8,
	OUT calls_refused	pg_catalog.int8,
	OUT retries_refused	pg_catalog.int8,
	OUT window_requests	pg_catalog.int8,
	OUT window_retries	pg_catalog.int8,
	OUT since			pg_catalog.timestamptz)
RETURNS SETOF pg_catalog.record
AS 'MODULE_PATHNAME', 'idem_get_services'
LANGUAGE C VOLATILE PARALLEL UNSAFE;

COMMENT ON FUNCTION @extschema@.idem_get_services() IS
	'the rows of view idem_services';

CREATE VIEW @extschema@.idem_services AS
SELECT * FROM @extschema@.idem_get_services();

COMMENT ON VIEW @extschema@.idem_services IS
	'retry budget and circuit breaker of each service in this database';
COMMENT ON COLUMN @extschema@.idem_services.service IS
	'the service';
COMMENT ON COLUMN @extschema@.idem_services.breaker IS
	'closed, open, half_open, forced_open or forced_closed';
COMMENT ON COLUMN @extschema@.idem_services.window_calls IS
	'breaker: calls in its window';
COMMENT ON COLUMN @extschema@.idem_services.window_failed IS
	'breaker: calls in its window that failed';
COMMENT ON COLUMN @extschema@.idem_services.window_slow IS
	'breaker: calls in its window that were slow';
COMMENT ON COLUMN @extschema@.idem_services.open_until IS
	'breaker: when an open one lets trials through';
COMMENT ON COLUMN @extschema@.idem_services.opened IS
	'how often the breaker has opened';
COMMENT ON COLUMN @extschema@.idem_services.calls_ok IS
	'calls recorded that went well';
COMMENT ON COLUMN @extschema@.idem_services.calls_failed IS
	'calls recorded that failed';
COMMENT ON COLUMN @extschema@.idem_services.calls_slow IS
	'calls recorded that were slow, whether they failed or not';
COMMENT ON COLUMN @extschema@.idem_services.calls_refused IS
	'calls that the breaker did not let through';
COMMENT ON COLUMN @extschema@.idem_services.retries_refused IS
	'retries that the budget refused';
COMMENT ON COLUMN @extschema@.idem_services.window_requests IS
	'retry budget: requests in the last ten seconds';
COMMENT ON COLUMN @extschema@.idem_services.window_retries IS
	'retry budget: retries allowed in the last ten seconds';
COMMENT ON COLUMN @extschema@.idem_services.since IS
	'when counting began';

CREATE FUNCTION @extschema@.idem_stats_reset()
RETURNS pg_catalog.void
AS 'MODULE_PATHNAME', 'idem_stats_reset'
LANGUAGE C VOLATILE PARALLEL RESTRICTED;

COMMENT ON FUNCTION @extschema@.idem_stats_reset() IS
	'set what was counted in this database to zero; budgets and breakers stay as they are';

--
-- HTTP
--

CREATE FUNCTION @extschema@.idem_key(header pg_catalog.text)
RETURNS pg_catalog.text
AS 'MODULE_PATHNAME', 'idem_key'
LANGUAGE C IMMUTABLE STRICT PARALLEL SAFE;

COMMENT ON FUNCTION @extschema@.idem_key(pg_catalog.text) IS
	'the key in an Idempotency-Key header, in quotes or bare';

CREATE FUNCTION @extschema@.idem_problem(claim @extschema@.idem_claim)
RETURNS pg_catalog.jsonb
AS 'MODULE_PATHNAME', 'idem_problem'
LANGUAGE C STABLE PARALLEL SAFE;

COMMENT ON FUNCTION @extschema@.idem_problem(@extschema@.idem_claim) IS
	'problem details to answer with; NULL for a claim that has a result or is to make one';

CREATE FUNCTION @extschema@.idem_request_problem(
	reason			pg_catalog.text,
	detail			pg_catalog.text DEFAULT NULL)
RETURNS pg_catalog.jsonb
AS 'MODULE_PATHNAME', 'idem_request_problem'
LANGUAGE C IMMUTABLE PARALLEL SAFE;

COMMENT ON FUNCTION @extschema@.idem_request_problem(pg_catalog.text, pg_catalog.text) IS
	'problem details, status 400, for a request that makes no claim: key_missing, key_malformed or request_invalid';

CREATE FUNCTION @extschema@.idem_etag(value pg_catalog.anyelement)
RETURNS pg_catalog.text
AS 'MODULE_PATHNAME', 'idem_etag'
LANGUAGE C STABLE STRICT PARALLEL SAFE;

COMMENT ON FUNCTION @extschema@.idem_etag(pg_catalog.anyelement) IS
	'strong entity tag of a row or another value';

CREATE FUNCTION @extschema@.idem_if_match(
	header			pg_catalog.text,
	etag			pg_catalog.text)
RETURNS pg_catalog.bool
AS 'MODULE_PATHNAME', 'idem_if_match'
LANGUAGE C IMMUTABLE PARALLEL SAFE;

COMMENT ON FUNCTION @extschema@.idem_if_match(pg_catalog.text, pg_catalog.text) IS
	'does an If-Match header let the request go on, given the present entity tag?';

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
-- Nothing is granted to PUBLIC but the pure helpers: idem_hash, idem_backoff,
-- idem_retryable, idem_retry, idem_key, idem_problem, idem_request_problem,
-- idem_etag, idem_if_match.  Whoever may read the server's statistics may read these.
--

REVOKE ALL ON FUNCTION
	@extschema@.idem_begin(pg_catalog.text, pg_catalog.text, pg_catalog.bytea, pg_catalog.text, pg_catalog.interval, pg_catalog.interval, pg_catalog.interval, pg_catalog.timestamptz, pg_catalog.regclass),
	@extschema@.idem_finish(pg_catalog.text, pg_catalog.jsonb, pg_catalog.int4, pg_catalog.jsonb, pg_catalog.bytea, pg_catalog.text, pg_catalog.text, pg_catalog.int4, pg_catalog.interval, pg_catalog.regclass),
	@extschema@.idem_lookup(pg_catalog.text, pg_catalog.text, pg_catalog.text, pg_catalog.regclass),
	@extschema@.idem_policy_changed(),
	@extschema@.idem_budget(pg_catalog.text, pg_catalog.bool),
	@extschema@.idem_breaker_allow(pg_catalog.text),
	@extschema@.idem_breaker_record(pg_catalog.text, pg_catalog.bool, pg_catalog.interval),
	@extschema@.idem_breaker_retry_after(pg_catalog.text),
	@extschema@.idem_breaker_reset(pg_catalog.text),
	@extschema@.idem_hedge_after(pg_catalog.text, pg_catalog.float8),
	@extschema@.idem_get_stats(),
	@extschema@.idem_get_services(),
	@extschema@.idem_stats_reset(),
	@extschema@.idem_receive(pg_catalog.text, pg_catalog.text, pg_catalog.interval, pg_catalog.interval, pg_catalog.text, pg_catalog.regclass),
	@extschema@.idem_receive_batch(pg_catalog.text, pg_catalog.text[], pg_catalog.interval, pg_catalog.interval, pg_catalog.text, pg_catalog.regclass),
	@extschema@.idem_checkpoint(pg_catalog.text, pg_catalog.text, pg_catalog.jsonb, pg_catalog.interval, pg_catalog.text, pg_catalog.text, pg_catalog.int4, pg_catalog.regclass),
	@extschema@.idem_release(pg_catalog.text, pg_catalog.text, pg_catalog.text, pg_catalog.int4, pg_catalog.regclass),
	@extschema@.idem_resume(pg_catalog.int4, pg_catalog.text, pg_catalog.interval, pg_catalog.bool, pg_catalog.text, pg_catalog.text, pg_catalog.regclass),
	@extschema@.idem_child_key(pg_catalog.text, pg_catalog.text, pg_catalog.text, pg_catalog.text),
	@extschema@.idem_call(pg_catalog.text, pg_catalog.text, pg_catalog.jsonb, pg_catalog.regprocedure, pg_catalog.text, pg_catalog.interval, pg_catalog.interval, pg_catalog.interval, pg_catalog.timestamptz, pg_catalog.regclass),
	@extschema@.idem_publish(pg_catalog.text, pg_catalog.jsonb, pg_catalog.text, pg_catalog.jsonb, pg_catalog.uuid, pg_catalog.interval, pg_catalog.int4),
	@extschema@.idem_outbox_take(pg_catalog.text, pg_catalog.int4, pg_catalog.interval),
	@extschema@.idem_outbox_done(pg_catalog.int8, pg_catalog.int4),
	@extschema@.idem_outbox_fail(pg_catalog.int8, pg_catalog.int4, pg_catalog.text, pg_catalog.interval, pg_catalog.bool),
	@extschema@.idem_outbox_redrive(pg_catalog.text, pg_catalog.int8, pg_catalog.int4),
	@extschema@.idem_expire(pg_catalog.int4),
	@extschema@.idem_create_table(pg_catalog.text),
	@extschema@.idem_grant(pg_catalog.regrole),
	@extschema@.idem_revoke(pg_catalog.regrole)
FROM PUBLIC;

REVOKE ALL ON TYPE
	@extschema@.idempotency_keys,
	@extschema@.idem_routes,
	@extschema@.idem_service_policies,
	@extschema@.idem_unfinished,
	@extschema@.idem_stats,
	@extschema@.idem_services,
	@extschema@.idem_outbox,
	@extschema@.idem_outbox_dead,
	@extschema@.idem_outbox_topics,
	@extschema@.idem_state,
	@extschema@.idempotency_key,
	@extschema@.idem_claim
FROM PUBLIC;

REVOKE ALL ON TABLE
	@extschema@.idempotency_keys,
	@extschema@.idem_routes,
	@extschema@.idem_service_policies,
	@extschema@.idem_unfinished,
	@extschema@.idem_stats,
	@extschema@.idem_services,
	@extschema@.idem_outbox,
	@extschema@.idem_outbox_dead,
	@extschema@.idem_outbox_topics
FROM PUBLIC;

REVOKE ALL ON SEQUENCE
	@extschema@.idem_outbox_id_seq
FROM PUBLIC;

GRANT EXECUTE ON FUNCTION
	@extschema@.idem_get_stats(),
	@extschema@.idem_get_services()
TO pg_read_all_stats;

GRANT SELECT ON TABLE
	@extschema@.idem_stats,
	@extschema@.idem_services
TO pg_read_all_stats;

--
-- Wakes the launcher when this commits, or says that there is none
--

CREATE FUNCTION @extschema@.idem_created()
RETURNS pg_catalog.void
AS 'MODULE_PATHNAME', 'idem_created'
LANGUAGE C;

SELECT @extschema@.idem_created();

DROP FUNCTION @extschema@.idem_created();
