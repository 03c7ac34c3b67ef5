-- Everything that is installed has a comment, and nothing but the pure
-- helpers is open to PUBLIC.
CREATE EXTENSION pg_idem;
