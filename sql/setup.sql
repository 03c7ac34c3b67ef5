--
-- SETUP
-- Installs the extension for the files that follow, and pins down what is
-- installed: every object, its comment, what PUBLIC may do, the settings.
-- A function, a column or a setting that is added, renamed or opened to
-- PUBLIC by accident shows here.
--
LOAD 'pg_idem';
-- it says where the library is not preloaded, which is no matter here
SET client_min_messages = warning;
CREATE EXTENSION pg_idem;
RESET client_min_messages;

-- keys are dumped; the schema is fixed
SELECT extversion, extrelocatable, extconfig::regclass[] AS dumped, extcondition
FROM pg_extension WHERE extname = 'pg_idem';

-- (without the array and row types that come with a type or a table, which
-- not every server version counts)
CREATE VIEW regress_members AS
	SELECT d.classid, d.objid
	FROM pg_depend d JOIN pg_extension e ON d.refobjid = e.oid
	WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
		AND e.extname = 'pg_idem'
		AND NOT (d.classid = 'pg_type'::regclass AND EXISTS
			(SELECT FROM pg_type t LEFT JOIN pg_class c ON c.oid = t.typrelid
			WHERE t.oid = d.objid AND (t.typelem <> 0 OR c.relkind <> 'c')));

-- what there is
\pset format unaligned
SELECT CASE classid WHEN 'pg_proc'::regclass THEN 'function'
		WHEN 'pg_type'::regclass THEN 'type'
		WHEN 'pg_class'::regclass THEN 'table' END AS kind, name, arguments, result
FROM regress_members, LATERAL (SELECT
	CASE classid WHEN 'pg_proc'::regclass THEN objid::regproc::text
		WHEN 'pg_type'::regclass THEN objid::regtype::text
		WHEN 'pg_class'::regclass THEN objid::regclass::text
		ELSE pg_describe_object(classid, objid, 0) END AS name,
	CASE classid WHEN 'pg_proc'::regclass
		THEN pg_get_function_arguments(objid) END AS arguments,
	CASE classid WHEN 'pg_proc'::regclass
		THEN pg_get_function_result(objid) END AS result) o
ORDER BY classid, name COLLATE "C", arguments COLLATE "C";
\pset format aligned

-- how the functions run: nothing but the pure helpers may be planned away or
-- run in a parallel worker, and no function runs with its owner's rights
SELECT proname, provolatile, proparallel, proisstrict, prosecdef, count(*)
FROM pg_proc JOIN regress_members ON classid = 'pg_proc'::regclass AND objid = oid
GROUP BY 1, 2, 3, 4, 5 ORDER BY proname COLLATE "C";

-- the columns of the two composite types; the claim's have an order, as a
-- caller may take them by position
SELECT a.attname, format_type(a.atttypid, a.atttypmod) AS type
FROM pg_type t JOIN pg_attribute a ON a.attrelid = t.typrelid
WHERE t.typname = 'idem_claim' AND a.attnum > 0 ORDER BY a.attnum;
SELECT a.attname, format_type(a.atttypid, a.atttypmod) AS type,
	nullif(a.attcollation, 'pg_catalog.default'::regcollation)::regcollation AS collation
FROM pg_type t JOIN pg_attribute a ON a.attrelid = t.typrelid
WHERE t.typname = 'idempotency_key' AND a.attnum > 0 ORDER BY a.attname COLLATE "C";

-- everything has a comment, a typed table by its type: no rows
SELECT pg_describe_object(classid, objid, 0) AS without_comment
FROM regress_members
WHERE obj_description(objid, classid::regclass::name) IS NULL;
SELECT c.relname, a.attname AS column_without_comment
FROM regress_members LEFT JOIN pg_type t ON classid = 'pg_type'::regclass AND t.oid = objid
	JOIN pg_class c ON c.oid = coalesce(t.typrelid, objid)
	JOIN pg_attribute a ON a.attrelid = c.oid
WHERE c.relkind IN ('c', 'r', 'v') AND a.attnum > 0 AND c.reloftype = 0
	AND col_description(a.attrelid, a.attnum) IS NULL;

-- PUBLIC may call the pure helpers, and nothing else
SELECT objid::regprocedure AS open_to_public
FROM regress_members JOIN pg_proc p ON p.oid = objid,
	aclexplode(coalesce(proacl, acldefault('f', proowner))) a
WHERE classid = 'pg_proc'::regclass AND a.grantee = 0
ORDER BY objid::regprocedure::text COLLATE "C";
SELECT typname AS type_open_to_public
FROM regress_members JOIN pg_type t ON t.oid = objid,
	aclexplode(coalesce(typacl, acldefault('T', typowner))) a
WHERE classid = 'pg_type'::regclass AND a.grantee = 0;
SELECT relname AS table_open_to_public
FROM regress_members JOIN pg_class c ON c.oid = objid,
	aclexplode(coalesce(relacl, acldefault('r', relowner))) a
WHERE classid = 'pg_class'::regclass AND a.grantee = 0;

-- what idem_grant gives is enough for an application and not more, and
-- idem_revoke takes all of it back (or DROP ROLE would fail)
CREATE ROLE regress_idem_app;
SELECT idem_grant('regress_idem_app');
SET ROLE regress_idem_app;
SELECT outcome FROM idem_begin('grant', 'r', NULL);
SELECT idem_finish('grant', '1', attempt => 1);
SELECT (idem_lookup('grant', 'r')).response;
SELECT count(*) FROM idempotency_keys;
DELETE FROM idempotency_keys;
SELECT idem_expire();
SELECT idem_grant('regress_idem_app');
SET pg_idem.tenant_is_role = on;
RESET ROLE;
SELECT objid::regprocedure AS open_to_application
FROM regress_members
WHERE classid = 'pg_proc'::regclass AND
	has_function_privilege('regress_idem_app', objid, 'EXECUTE')
ORDER BY objid::regprocedure::text COLLATE "C";
SELECT idem_revoke('regress_idem_app');
SET ROLE regress_idem_app;
SELECT outcome FROM idem_begin('grant', 'r', NULL);
RESET ROLE;
DROP ROLE regress_idem_app;
DELETE FROM idempotency_keys;

-- settings: units, defaults, who may change them
SELECT name, boot_val, unit, context, min_val, max_val, enumvals
FROM pg_settings WHERE name LIKE 'pg\_idem.%' AND name <> 'pg_idem.max_tracked' ORDER BY name COLLATE "C";
SELECT name FROM pg_settings WHERE name LIKE 'pg\_idem.%' AND short_desc IS NULL;
-- the prefix is reserved, so a mistyped setting is noticed
SET pg_idem.tll = '1h';

-- A backend remembers where the extension's objects are, and must notice when
-- they move, go and come back somewhere else, under an odd name too.
SELECT outcome FROM idem_begin('moved', 'r', NULL);
CREATE SCHEMA "Odd schema";
ALTER TABLE idempotency_keys SET SCHEMA "Odd schema";
ALTER TABLE "Odd schema".idempotency_keys RENAME TO "Odd keys";
SELECT outcome FROM idem_begin('moved', 'r', NULL);
SELECT idem_finish('moved', '1', attempt => 1);
SELECT key, state FROM "Odd schema"."Odd keys";
DROP EXTENSION pg_idem;
SET client_min_messages = warning;
CREATE EXTENSION pg_idem SCHEMA "Odd schema";
RESET client_min_messages;
SELECT outcome FROM "Odd schema".idem_begin('moved', 'r', NULL);
SELECT "Odd schema".idem_finish('moved', '1', attempt => 1);
-- under a hostile search_path
CREATE SCHEMA hostile;
CREATE TABLE hostile.idempotency_keys (key int);
CREATE TYPE hostile.idem_state AS ENUM ('planted');
CREATE FUNCTION hostile.planted(text, text) RETURNS bool LANGUAGE plpgsql
	AS $$ BEGIN RAISE 'planted operator called'; END $$;
CREATE OPERATOR hostile.= (LEFTARG = text, RIGHTARG = text,
	FUNCTION = hostile.planted);
SET search_path = hostile, "Odd schema", pg_catalog;
SELECT outcome FROM idem_begin('moved', 'r', NULL);
SELECT idem_finish('moved', '1');
SELECT (idem_lookup('moved', 'r')).status;
SELECT idem_create_table('hostile.store');
SELECT outcome FROM idem_begin('moved', 'r', NULL, store => 'hostile.store');
SELECT idem_expire();
RESET search_path;
DROP SCHEMA hostile CASCADE;
DROP EXTENSION pg_idem;
DROP SCHEMA "Odd schema";
SET client_min_messages = warning;
CREATE EXTENSION pg_idem;
RESET client_min_messages;
SELECT outcome FROM idem_begin('moved', 'r', NULL);
-- a DROP that is rolled back was none
BEGIN;
DROP EXTENSION pg_idem CASCADE;
ROLLBACK;
SELECT outcome FROM idem_begin('moved', 'r', NULL);

DELETE FROM idempotency_keys;
DROP VIEW regress_members;

-- for the files that follow: the SQLSTATE that a statement ends with
CREATE FUNCTION sqlstate_of(sql text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE sql;
	RETURN '00000';
EXCEPTION WHEN OTHERS THEN
	RETURN SQLSTATE;
END $$;
