SELECT * FROM idem_begin('done', 'POST /charges', '\x0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef');
