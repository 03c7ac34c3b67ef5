SELECT * FROM idem_begin('held', 'POST /charges', NULL);
