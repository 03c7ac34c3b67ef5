/*-------------------------------------------------------------------------
 *
 * call.c
 *	  idem_call: claim, work and finish in one call.
 *
 * The work is a function of the caller's, work(request jsonb) returning
 * jsonb, called with the caller's rights.  An error in it fails the
 * statement, and so leaves no claim.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "pg_idem.h"

#include "access/htup_details.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/regproc.h"
#include "utils/syscache.h"
#include "utils/typcache.h"

PG_FUNCTION_INFO_V1(idem_call);

/* Arguments of idem_begin and idem_finish */
#define BEGIN_NARGS		9
#define FINISH_NARGS	10

/* Check that work is a function jsonb -> jsonb which the caller may call. */
static void
check_work(Oid work)
{
	HeapTuple	tuple = SearchSysCache1(PROCOID, ObjectIdGetDatum(work));
	Form_pg_proc proc;

	if (!HeapTupleIsValid(tuple))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_FUNCTION),
				 errmsg("function with OID %u does not exist", work)));
	proc = (Form_pg_proc) GETSTRUCT(tuple);
	if (proc->prokind != PROKIND_FUNCTION || proc->proretset ||
		proc->pronargs != 1 || proc->proargtypes.values[0] != JSONBOID ||
		proc->prorettype != JSONBOID)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_FUNCTION_DEFINITION),
				 errmsg("function %s cannot be called by idem_call()",
						format_procedure(work)),
				 errdetail("The work must be a function of one jsonb argument that returns jsonb.")));
	ReleaseSysCache(tuple);

	if (!idem_has_execute(work, GetUserId()))
		aclcheck_error(ACLCHECK_NO_PRIV, OBJECT_FUNCTION, get_func_name(work));
}

/* Call the work.  False if it returned NULL. */
static bool
do_work(Oid work, FunctionCallInfo caller, Datum *response)
{
	LOCAL_FCINFO(fcinfo, 1);
	FmgrInfo	flinfo;

	fmgr_info(work, &flinfo);
	InitFunctionCallInfoData(*fcinfo, &flinfo, 1, InvalidOid, NULL, NULL);
	fcinfo->args[0] = caller->args[2];
	if (flinfo.fn_strict && fcinfo->args[0].isnull)
		return false;
	*response = FunctionCallInvoke(fcinfo);
	return !fcinfo->isnull;
}

static void
set_arg(FunctionCallInfo fcinfo, int argno, Datum value, bool isnull)
{
	fcinfo->args[argno].value = value;
	fcinfo->args[argno].isnull = isnull;
}

/* idem_begin with the caller's arguments; the claim's columns come back. */
static void
begin_claim(FunctionCallInfo caller, TupleDesc desc, Datum *values,
			bool *isnull)
{
	LOCAL_FCINFO(fcinfo, BEGIN_NARGS);
	Datum		hash = (Datum) 0;
	HeapTupleData tuple;
	HeapTupleHeader header;

	if (!caller->args[2].isnull)
		hash = DirectFunctionCall1(idem_hash_jsonb, caller->args[2].value);

	InitFunctionCallInfoData(*fcinfo, NULL, BEGIN_NARGS, InvalidOid, NULL,
							 NULL);
	fcinfo->args[0] = caller->args[0];
	fcinfo->args[1] = caller->args[1];
	set_arg(fcinfo, 2, hash, caller->args[2].isnull);
	for (int i = 3; i < BEGIN_NARGS; i++)
		fcinfo->args[i] = caller->args[i + 1];	/* behind the work */

	header = DatumGetHeapTupleHeader(idem_begin(fcinfo));
	tuple.t_len = HeapTupleHeaderGetDatumLength(header);
	ItemPointerSetInvalid(&tuple.t_self);
	tuple.t_tableOid = InvalidOid;
	tuple.t_data = header;
	heap_deform_tuple(&tuple, desc, values, isnull);
}

/* idem_finish of the claim that begin_claim has made */
static void
finish_claim(FunctionCallInfo caller, Datum response, bool response_isnull,
			 Datum attempt)
{
	LOCAL_FCINFO(fcinfo, FINISH_NARGS);

	InitFunctionCallInfoData(*fcinfo, NULL, FINISH_NARGS, InvalidOid, NULL,
							 NULL);
	fcinfo->args[0] = caller->args[0];
	set_arg(fcinfo, 1, response, response_isnull);
	set_arg(fcinfo, 2, Int32GetDatum(200), false);
	set_arg(fcinfo, 3, (Datum) 0, true);	/* headers */
	set_arg(fcinfo, 4, (Datum) 0, true);	/* body */
	fcinfo->args[5] = caller->args[1];	/* route */
	fcinfo->args[6] = caller->args[4];	/* tenant */
	set_arg(fcinfo, 7, attempt, false);
	set_arg(fcinfo, 8, (Datum) 0, true);	/* ttl */
	fcinfo->args[9] = caller->args[9];	/* store */
	(void) idem_finish(fcinfo);
}

/*
 * idem_call(key, route, request, work, tenant, wait, ttl, lease, first_sent,
 *			 store) returns idem_claim
 *
 * The claim carries the result either way, and never says to proceed.
 */
Datum
idem_call(PG_FUNCTION_ARGS)
{
	TupleDesc	desc;
	Datum		values[Natts_claim];
	bool		isnull[Natts_claim];
	Datum		response = (Datum) 0;
	Datum		result;

	if (PG_ARGISNULL(3))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("work must not be null")));
	check_work(PG_GETARG_OID(3));

	desc = lookup_rowtype_tupdesc_copy(idem_catalog()->claim_type, -1);
	begin_claim(fcinfo, desc, values, isnull);

	if (DatumGetBool(values[Anum_claim_proceed - 1]))
	{
		bool		has_response;

		/* it may have been dropped, or taken away, while we waited */
		AcceptInvalidationMessages();
		check_work(PG_GETARG_OID(3));
		has_response = do_work(PG_GETARG_OID(3), fcinfo, &response);

		finish_claim(fcinfo, response, !has_response,
					 values[Anum_claim_attempt - 1]);
		values[Anum_claim_proceed - 1] = BoolGetDatum(false);
		values[Anum_claim_status - 1] = Int32GetDatum(200);
		isnull[Anum_claim_status - 1] = false;
		values[Anum_claim_response - 1] = response;
		isnull[Anum_claim_response - 1] = !has_response;
	}

	result = HeapTupleGetDatum(heap_form_tuple(desc, values, isnull));
	PG_RETURN_DATUM(result);
}
