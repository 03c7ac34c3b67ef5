/*-------------------------------------------------------------------------
 *
 * claim_finish.c
 *	  idem_finish: the result of a claim.
 *
 * The claim is found, fenced and locked first (claim_fence.c).
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "common/int.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/snapmgr.h"

#include "claim.h"
#include "args.h"
#include "http.h"
#include "registry.h"
#include "timespan.h"

PG_FUNCTION_INFO_V1(idem_finish);

/*
 * When a key that is being finished expires.  Retention counts from the
 * finish.  A key created a moment ago in this same transaction keeps the time
 * that it was given then, as long as nine tenths of it are left: then the
 * update changes no indexed column and is HOT.
 */
static TimestampTz
retention_end(IdemStore *store, TimestampTz now, const Interval *ttl)
{
	TupleTableSlot *row = store->row;
	TimestampTz created_at =
		DatumGetTimestampTz(idem_row_datum(row, Anum_key_created_at));
	TimestampTz expires_at =
		DatumGetTimestampTz(idem_row_datum(row, Anum_key_expires_at));
	TimestampTz counted_from = created_at;
	Interval	span;

	if (ttl != NULL)
		return idem_time_after(now, ttl, "ttl");
	if (TIMESTAMP_NOT_FINITE(expires_at))
		return expires_at;

	if (!idem_row_isnull(row, Anum_key_finished_at))
		counted_from = DatumGetTimestampTz(idem_row_datum(row,
														  Anum_key_finished_at));

	/* times that the owner of the table has written may be too far apart */
	memset(&span, 0, sizeof(span));
	if (TIMESTAMP_NOT_FINITE(counted_from) ||
		pg_sub_s64_overflow(expires_at, counted_from, &span.time))
		return expires_at;
	span.time = Max(span.time, 1);

	if (idem_store_row_is_ours(store) && idem_row_attempt(row) == 1 &&
		created_at >= GetCurrentTransactionStartTimestamp() &&
		now - created_at <= span.time / 10)
		return expires_at;
	return idem_time_after(now, &span, "ttl");
}

/* Store a result that does not fit without its content. */
static void
drop_large_result(IdemResult *result, const IdemKey *key)
{
	ereport(WARNING,
			(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
			 errmsg("result for idempotency key \"%s\" is too large to be stored",
					text_to_cstring(key->key)),
			 errdetail("It is larger than pg_idem.max_response_size; replays will say that it has expired.")));
	result->headers = NULL;
	result->response = NULL;
	result->body = NULL;
}

static void
finish(IdemStore *store, const IdemKey *key, IdemResult *result,
	   const Interval *ttl)
{
	TimestampTz now = GetCurrentTimestamp();
	bool		fits = idem_result_fits(result);
	text	   *route = idem_row_text(store->row, Anum_key_route);
	TupleTableSlot *next;
	IdemPolicy	policy;
	bool		kept;
	int64		run_time;

	if (!fits)
		drop_large_result(result, key);
	idem_policy_of_route(route, &policy);
	kept = idem_status_is_kept(policy.keep, result->status);

	next = idem_store_new_version(store, true);
	idem_set_column(next, Anum_key_state,
			   idem_state_to_datum(kept ? IDEM_COMPLETED : IDEM_FAILED));
	next->tts_isnull[Anum_key_lease_until - 1] = true;
	idem_set_column(next, Anum_key_status, Int32GetDatum(result->status));
	idem_set_column_or_null(next, Anum_key_headers, result->headers);
	idem_set_column_or_null(next, Anum_key_response, result->response);
	idem_set_column_or_null(next, Anum_key_body, result->body);
	idem_set_column(next, Anum_key_result_dropped, BoolGetDatum(!fits));
	idem_set_column(next, Anum_key_finished_at, TimestampTzGetDatum(now));
	idem_set_column(next, Anum_key_expires_at,
			   TimestampTzGetDatum(retention_end(store, now, ttl)));

	/*
	 * The row has no start of a later attempt, and its owner may have put
	 * -infinity there.
	 */
	if (idem_row_attempt(store->row) != 1 ||
		pg_sub_s64_overflow(now, DatumGetTimestampTz(idem_row_datum(store->row,
																	Anum_key_created_at)),
							&run_time))
		run_time = -1;
	idem_store_update(store);
	idem_count_finish(route, kept, run_time);
}

/*
 * Store the result of a claim.  ttl is NULL where the key keeps its own.
 */
void
idem_finish_claim(const IdemClaimRef *ref, IdemResult *result,
				  const Interval *ttl, Oid storeid)
{
	IdemStore	store;

	idem_store_open(&store, storeid, RowExclusiveLock);
	idem_find_and_lock_claim(&store, ref);
	finish(&store, &ref->key, result, ttl);
	idem_store_close(&store);
}

/*
 * idem_finish(key, response, status, headers, body, route, tenant, attempt,
 *			   ttl, store) returns void
 */
Datum
idem_finish(PG_FUNCTION_ARGS)
{
	IdemClaimRef ref;
	IdemResult	result;
	Interval	ttl;

	PreventCommandIfReadOnly("idem_finish()");

	idem_arg_claim_ref(fcinfo, 5, &ref);
	result.response = PG_ARGISNULL(1) ? NULL : PG_GETARG_JSONB_P(1);
	result.status = idem_arg_status(fcinfo, 2);
	result.headers = PG_ARGISNULL(3) ? NULL :
		idem_headers_to_keep(PG_GETARG_JSONB_P(3));
	result.body = PG_ARGISNULL(4) ? NULL : PG_GETARG_BYTEA_PP(4);
	idem_arg_interval(fcinfo, 8, &ttl);

	idem_finish_claim(&ref, &result, PG_ARGISNULL(8) ? NULL : &ttl,
					  idem_arg_store(fcinfo, 9));
	PG_RETURN_VOID();
}
