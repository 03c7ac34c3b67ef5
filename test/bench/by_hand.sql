\set r random(1, 9000000000000000000)
BEGIN;
SELECT state, request_hash, status, response FROM by_hand WHERE key = :r::text AND tenant = '' AND route = 'POST /charges' FOR UPDATE;
INSERT INTO by_hand (key, tenant, route, state, request_hash, expires_at) VALUES (:r::text, '', 'POST /charges', 'in_progress', '\x0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef', now() + interval '24 hours');
INSERT INTO charges (key, amount) VALUES (:r::text, 999);
UPDATE by_hand SET state = 'completed', status = 201, response = '{"id": "ch_1", "status": "succeeded"}' WHERE key = :r::text AND tenant = '' AND route = 'POST /charges';
COMMIT;
