/*-------------------------------------------------------------------------
 *
 * claim_call.c
 *	  idem_call: claim, work and finish in one call.
 *
 * The work is a function of the caller's, work(request jsonb), called with the
 * caller's rights.  It returns the JSON of the answer or, where status 200 and
 * JSON are not enough, an idem_result.  An error in it fails the statement,
 * and so leaves no claim.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "executor/executor.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/regproc.h"
#include "utils/syscache.h"
#include "utils/typcache.h"

#include "claim.h"
#include "args.h"
#include "hash.h"
#include "http.h"

PG_FUNCTION_INFO_V1(idem_call);

/* A function that does the work */
typedef struct Work
{
	Oid			function;
	bool		returns_result; /* idem_result, not jsonb */
} Work;

/*
 * Check that the work is a function that fits, and that the caller may call it
 */
static void
check_work(Work *work)
{
	HeapTuple	tuple = SearchSysCache1(PROCOID,
										ObjectIdGetDatum(work->function));
	Form_pg_proc proc;

	if (!HeapTupleIsValid(tuple))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_FUNCTION),
				 errmsg("function with OID %u does not exist",
						work->function)));
	proc = (Form_pg_proc) GETSTRUCT(tuple);
	work->returns_result = (proc->prorettype == idem_catalog()->result_type);
	if (proc->prokind != PROKIND_FUNCTION || proc->proretset ||
		proc->pronargs != 1 || proc->proargtypes.values[0] != JSONBOID ||
		(proc->prorettype != JSONBOID && !work->returns_result))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_FUNCTION_DEFINITION),
				 errmsg("function %s cannot be called by idem_call()",
						format_procedure(work->function)),
				 errdetail("The work must be a function of one jsonb argument that returns jsonb or idem_result.")));
	ReleaseSysCache(tuple);

	if (!idem_has_execute(work->function, GetUserId()))
		aclcheck_error(ACLCHECK_NO_PRIV, OBJECT_FUNCTION,
					   get_func_name(work->function));
}

/* Take an idem_result apart.  A NULL status is that of the call. */
static void
unpack_result(HeapTupleHeader row, IdemResult *result)
{
	Datum		value;
	bool		isnull;

	value = GetAttributeByNum(row, Anum_result_status, &isnull);
	if (!isnull)
		result->status = idem_check_status(DatumGetInt32(value));
	value = GetAttributeByNum(row, Anum_result_headers, &isnull);
	if (!isnull)
		result->headers = idem_headers_to_keep(DatumGetJsonbP(value));
	value = GetAttributeByNum(row, Anum_result_response, &isnull);
	if (!isnull)
		result->response = DatumGetJsonbP(value);
	value = GetAttributeByNum(row, Anum_result_body, &isnull);
	if (!isnull)
		result->body = DatumGetByteaPP(value);
}

/* Do the work.  The result has the call's status, and nothing else, so far. */
static void
do_work(const Work *work, NullableDatum request, IdemResult *result)
{
	LOCAL_FCINFO(fcinfo, 1);
	FmgrInfo	flinfo;
	Datum		value;

	fmgr_info(work->function, &flinfo);
	InitFunctionCallInfoData(*fcinfo, &flinfo, 1, InvalidOid, NULL, NULL);
	fcinfo->args[0] = request;
	if (flinfo.fn_strict && request.isnull)
		return;
	value = FunctionCallInvoke(fcinfo);
	if (fcinfo->isnull)
		return;
	if (work->returns_result)
		unpack_result(DatumGetHeapTupleHeader(value), result);
	else
		result->response = DatumGetJsonbP(value);
}

/*
 * Put a result into the columns of an idem_claim, which never says to proceed.
 */
static void
tell_result(const IdemResult *result, Datum *values, bool *isnull)
{
	values[Anum_claim_proceed - 1] = BoolGetDatum(false);
	values[Anum_claim_status - 1] = Int32GetDatum(result->status);
	isnull[Anum_claim_status - 1] = false;
	values[Anum_claim_headers - 1] = PointerGetDatum(result->headers);
	isnull[Anum_claim_headers - 1] = (result->headers == NULL);
	values[Anum_claim_response - 1] = PointerGetDatum(result->response);
	isnull[Anum_claim_response - 1] = (result->response == NULL);
	values[Anum_claim_body - 1] = PointerGetDatum(result->body);
	isnull[Anum_claim_body - 1] = (result->body == NULL);
}

/*
 * idem_call(key, route, request, work, status, tenant, ttl, lease, wait,
 *			 first_sent, store) returns idem_claim
 *
 * The claim carries the result either way.
 */
Datum
idem_call(PG_FUNCTION_ARGS)
{
	IdemClaimRequest req;
	IdemClaimRef ref;
	IdemResult	result = {0};
	IdemResult	stored;
	Work		work;
	TupleDesc	desc;
	HeapTupleData claim;
	Datum		values[Natts_claim];
	bool		isnull[Natts_claim];

	PreventCommandIfReadOnly("idem_call()");
	if (PG_ARGISNULL(3))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("work must not be null")));
	work.function = PG_GETARG_OID(3);
	check_work(&work);
	result.status = idem_arg_status(fcinfo, 4);
	idem_arg_claim(fcinfo, 5, &req);
	req.hash = PG_ARGISNULL(2) ? NULL :
		idem_hash_of_jsonb(PG_GETARG_JSONB_P(2));

	claim.t_data = DatumGetHeapTupleHeader(idem_claim_key(&req));
	claim.t_len = HeapTupleHeaderGetDatumLength(claim.t_data);
	ItemPointerSetInvalid(&claim.t_self);
	claim.t_tableOid = InvalidOid;
	desc = lookup_rowtype_tupdesc_copy(idem_catalog()->claim_type, -1);
	heap_deform_tuple(&claim, desc, values, isnull);
	if (!DatumGetBool(values[Anum_claim_proceed - 1]))
		PG_RETURN_HEAPTUPLEHEADER(claim.t_data);

	/* it may have been dropped, or taken away, while we waited */
	AcceptInvalidationMessages();
	check_work(&work);
	do_work(&work, fcinfo->args[2], &result);

	ref.key = req.key;
	ref.has_attempt = true;
	ref.attempt = DatumGetInt32(values[Anum_claim_attempt - 1]);
	stored = result;
	idem_finish_claim(&ref, &stored, NULL, req.store);

	tell_result(&result, values, isnull);
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(desc, values, isnull)));
}
