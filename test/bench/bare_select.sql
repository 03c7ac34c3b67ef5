SELECT * FROM idempotency_keys WHERE key = 'done' AND tenant = '' AND route = 'POST /charges';
