\set r random(1, 9000000000000000000)
SELECT idem_finish(:r::text, '{"id": "ch_1", "status": "succeeded"}', 201, route => 'POST /charges') FROM idem_begin(:r::text, 'POST /charges', '\x0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef') WHERE proceed;
