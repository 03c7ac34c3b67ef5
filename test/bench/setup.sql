-- What pg_idem is compared with: a bare table of the same shape, and the
-- table and transaction that teams write by hand.
CREATE EXTENSION pg_idem;

CREATE TABLE bare (LIKE idempotency_keys INCLUDING ALL);

CREATE TABLE charges (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	key text NOT NULL,
	amount int NOT NULL
);

CREATE TABLE by_hand (
	key text NOT NULL,
	tenant text NOT NULL,
	route text NOT NULL,
	state text NOT NULL,
	request_hash bytea NOT NULL,
	status int,
	response jsonb,
	created_at timestamptz NOT NULL DEFAULT now(),
	expires_at timestamptz NOT NULL,
	PRIMARY KEY (key, tenant, route)
);
CREATE INDEX ON by_hand (expires_at);

-- one finished key, to be read and replayed
BEGIN;
SELECT proceed FROM idem_begin('done', 'POST /charges', '\x0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef') \g /dev/null
SELECT idem_finish('done', '{"id": "ch_1", "status": "succeeded"}', 201) \g /dev/null
COMMIT;
