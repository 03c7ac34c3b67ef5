/*-------------------------------------------------------------------------
 *
 * admin.c
 *	  For administrators: idem_create_table, idem_grant, idem_revoke.
 *
 * These run DDL, as the caller and with the caller's privileges.  Every name
 * in it is qualified, so the caller's search_path decides nothing but where
 * a table with an unqualified name is created.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/namespace.h"
#include "catalog/pg_extension.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "nodes/makefuncs.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/regproc.h"
#include "utils/varlena.h"

#include "catalog.h"

PG_FUNCTION_INFO_V1(idem_create_table);
PG_FUNCTION_INFO_V1(idem_grant);
PG_FUNCTION_INFO_V1(idem_revoke);

/*
 * Definition of a store, after CREATE TABLE name OF type.  The same as that
 * of the default store in the install script; sql/store.sql compares them.
 */
#define STORE_DEFINITION \
	" (state WITH OPTIONS NOT NULL," \
	" attempt WITH OPTIONS NOT NULL," \
	" result_dropped WITH OPTIONS NOT NULL," \
	" created_at WITH OPTIONS NOT NULL," \
	" expires_at WITH OPTIONS NOT NULL," \
	" PRIMARY KEY (key, tenant, route))" \
	" WITH (fillfactor = 50)"

/* What an application calls; PUBLIC may call the pure helpers anyway */
static const char *const application_functions[] = {
	"idem_begin", "idem_breaker_allow", "idem_breaker_record",
	"idem_breaker_retry_after", "idem_budget_allow", "idem_call", "idem_checkpoint",
	"idem_child_key", "idem_finish", "idem_hedge_after", "idem_lookup",
	"idem_outbox_done", "idem_outbox_fail", "idem_outbox_take",
	"idem_publish", "idem_receive", "idem_receive_batch", "idem_release",
	"idem_resume"
};

static const char *const application_types[] = {
	"idempotency_key", "idem_claim", "idem_result", "idem_state"
};

static void
run(const char *sql)
{
	if (SPI_execute(sql, false, 0) != SPI_OK_UTILITY)
		elog(ERROR, "could not run \"%s\": %s", sql,
			 SPI_result_code_string(SPI_result));
}

/*
 * idem_create_table(name text) returns regclass
 */
Datum
idem_create_table(PG_FUNCTION_ARGS)
{
	List	   *names = textToQualifiedNameList(PG_GETARG_TEXT_PP(0));
	RangeVar   *rv = makeRangeVarFromNameList(names);
	Oid			namespace = RangeVarGetCreationNamespace(rv);
	char	   *table;

	if (isAnyTempNamespace(namespace))
		ereport(ERROR,
				(errcode(ERRCODE_WRONG_OBJECT_TYPE),
				 errmsg("cannot create store \"%s\" as a temporary table",
						rv->relname),
				 errdetail("A store must be a permanent plain table.")));

	table = quote_qualified_identifier(get_namespace_name(namespace),
									   rv->relname);
	SPI_connect();
	run(psprintf("CREATE TABLE %s OF %s" STORE_DEFINITION, table,
				 quote_qualified_identifier(idem_extension_schema(),
											"idempotency_key")));
	run(psprintf("CREATE INDEX ON %s (expires_at)", table));
	SPI_finish();

	PG_RETURN_OID(get_relname_relid(rv->relname, namespace));
}

/*
 * GRANT or REVOKE what an application needs.  The server itself only warns
 * where the caller may not; here that is an error.
 */
static void
change_privileges(Oid roleid, bool grant)
{
	const char *schema = idem_extension_schema();
	const char *role = quote_identifier(GetUserNameFromId(roleid, false));
	const char *verb = grant ? "GRANT" : "REVOKE";
	const char *to = grant ? "TO" : "FROM";

	if (!object_ownercheck(ExtensionRelationId, idem_catalog()->extension,
						   GetUserId()))
		aclcheck_error(ACLCHECK_NOT_OWNER, OBJECT_EXTENSION, "pg_idem");

	SPI_connect();

	/* our own functions only, whatever else may have the same name */
	for (int i = 0; i < lengthof(application_functions); i++)
	{
		List	   *functions = idem_member_functions(application_functions[i]);
		ListCell   *lc;

		foreach(lc, functions)
			run(psprintf("%s EXECUTE ON FUNCTION %s %s %s", verb,
						 format_procedure_qualified(lfirst_oid(lc)), to, role));
	}
	for (int i = 0; i < lengthof(application_types); i++)
		run(psprintf("%s USAGE ON TYPE %s %s %s", verb,
					 quote_qualified_identifier(schema, application_types[i]),
					 to, role));

	/* the schema may serve others too, so its USAGE is never taken away */
	if (grant && !idem_has_schema_usage(get_namespace_oid(schema, false),
										roleid))
		run(psprintf("GRANT USAGE ON SCHEMA %s TO %s",
					 quote_identifier(schema), role));
	SPI_finish();
}

/*
 * idem_grant(role regrole) returns void
 */
Datum
idem_grant(PG_FUNCTION_ARGS)
{
	change_privileges(PG_GETARG_OID(0), true);
	PG_RETURN_VOID();
}

/*
 * idem_revoke(role regrole) returns void
 */
Datum
idem_revoke(PG_FUNCTION_ARGS)
{
	change_privileges(PG_GETARG_OID(0), false);
	PG_RETURN_VOID();
}
