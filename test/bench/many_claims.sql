\set r random(1, 9000000000000000)
BEGIN;
SELECT count(b.proceed) FROM generate_series(1, 16) g, LATERAL idem_begin('payment-' || :r || '-' || g, 'POST /charges', '\x0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef') b;
SELECT count(idem_finish('payment-' || :r || '-' || g, '{"id": "ch_1", "status": "succeeded"}', 201, route => 'POST /charges')) FROM generate_series(1, 16) g;
COMMIT;
