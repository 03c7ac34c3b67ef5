--
-- SERVER
-- In a server that is somebody's: expired keys of the tests must stay until
-- they are asked for, so no worker may come.  None does to a template.
--
DO $$
BEGIN
	EXECUTE format('ALTER DATABASE %I IS_TEMPLATE true', current_database());
	EXECUTE format('ALTER DATABASE %I SET pg_idem.lease = %L', current_database(), '1h');
END $$;
