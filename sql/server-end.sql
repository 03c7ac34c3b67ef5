--
-- SERVER-END
-- The database may be dropped again.
--
DO $$
BEGIN
	EXECUTE format('ALTER DATABASE %I IS_TEMPLATE false', current_database());
END $$;
