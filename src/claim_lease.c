/*-------------------------------------------------------------------------
 *
 * claim_lease.c
 *	  Claims that outlive their transaction: idem_checkpoint, idem_release,
 *	  idem_resume.
 *
 * Work that calls the outside world cannot be done in one transaction.  Its
 * claim is committed in progress and belongs to its owner for the length of
 * a lease.  idem_checkpoint says how far the work has come and renews the
 * lease, idem_release gives it up, and idem_resume hands claims whose lease
 * is over to a completer.
 *
 * A checkpoint or a release finds, fences and locks the claim as idem_finish
 * does (claim_fence.c).  A resume looks for claims with a query, which may use
 * any index that the store has, and then locks each row that it likes without
 * waiting (store.c): a claim goes to one completer, and one whose owner is
 * just now finishing it goes to none.
 *
 * A released claim has the lease -infinity: its owner has said that it is
 * not at work, so it is not in doubt, and on_lost_lease does not matter.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/portal.h"
#include "utils/rel.h"
#include "utils/tuplestore.h"

#include "claim.h"
#include "args.h"
#include "owner.h"
#include "registry.h"
#include "timespan.h"

PG_FUNCTION_INFO_V1(idem_checkpoint);
PG_FUNCTION_INFO_V1(idem_release);
PG_FUNCTION_INFO_V1(idem_resume);

/* Candidates fetched at a time by idem_resume */
#define RESUME_CHUNK	100

/* ----------------------------------------------------------------
 *		The owner of a claim
 * ----------------------------------------------------------------
 */

/*
 * idem_checkpoint(key, step, data, route, tenant, attempt, lease, store)
 *		returns timestamptz
 *
 * Without a step, only the lease is renewed.  Returns when that ends.
 */
Datum
idem_checkpoint(PG_FUNCTION_ARGS)
{
	IdemStore	store;
	IdemClaimRef ref;
	text	   *step;
	Jsonb	   *data;
	IdemPolicy	policy;
	TupleTableSlot *next;
	TimestampTz lease_until;

	PreventCommandIfReadOnly("idem_checkpoint()");
	idem_arg_claim_ref(fcinfo, 3, &ref);
	step = PG_ARGISNULL(1) ? NULL : idem_arg_name(fcinfo, 1, "step");
	data = PG_ARGISNULL(2) ? NULL : PG_GETARG_JSONB_P(2);
	if (step == NULL && data != NULL)
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("step must not be null where data is not")));

	idem_store_open(&store, idem_arg_store(fcinfo, 7), RowExclusiveLock);
	idem_find_and_lock_claim(&store, &ref);

	idem_policy_of_route(idem_row_text(store.row, Anum_key_route), &policy);
	idem_arg_interval(fcinfo, 6, &policy.lease);
	lease_until = idem_time_after(GetCurrentTimestamp(), &policy.lease,
								  "lease");

	next = idem_store_new_version(&store, true);
	idem_set_column(next, Anum_key_lease_until,
					TimestampTzGetDatum(lease_until));
	if (step != NULL)
	{
		idem_set_column_or_null(next, Anum_key_step, step);
		idem_set_column_or_null(next, Anum_key_step_data, data);
	}
	idem_store_update(&store);
	idem_store_close(&store);
	PG_RETURN_TIMESTAMPTZ(lease_until);
}

/*
 * idem_release(key, route, tenant, attempt, store) returns void
 */
Datum
idem_release(PG_FUNCTION_ARGS)
{
	IdemStore	store;
	IdemClaimRef ref;

	PreventCommandIfReadOnly("idem_release()");
	idem_arg_claim_ref(fcinfo, 1, &ref);

	idem_store_open(&store, idem_arg_store(fcinfo, 4), RowExclusiveLock);
	idem_find_and_lock_claim(&store, &ref);
	idem_set_column(idem_store_new_version(&store, true),
					Anum_key_lease_until, TimestampTzGetDatum(DT_NOBEGIN));
	idem_store_update(&store);
	idem_store_close(&store);
	PG_RETURN_VOID();
}

/* ----------------------------------------------------------------
 *		Completers
 * ----------------------------------------------------------------
 */

/* What idem_resume was called with */
typedef struct ResumeRequest
{
	int64		max;
	text	   *key;			/* NULL: any */
	text	   *route;			/* NULL: any */
	text	   *tenant;			/* NULL: any */
	bool		has_lease;
	Interval	lease;
	bool		held;			/* also those that need a person's decision */
} ResumeRequest;

/*
 * Open a cursor over claims whose lease is over, as the store's owner: the
 * caller may have no privileges on the table.
 */
static Portal
open_candidates(IdemStore *store, const ResumeRequest *req, TimestampTz now)
{
	Oid			types[4] = {TIMESTAMPTZOID, TEXTOID, TEXTOID, TEXTOID};
	Datum		values[4];
	char		nulls[5] = "    ";
	Portal		portal;
	IdemCaller	caller;
	char	   *sql;

	sql = psprintf("SELECT ctid FROM %s"
				   " WHERE state = 'in_progress' AND lease_until <= $1"
				   " AND ($2 IS NULL OR route = $2)"
				   " AND ($3 IS NULL OR tenant = $3)"
				   " AND ($4 IS NULL OR key = $4)"
				   " ORDER BY lease_until",
				   idem_qualified_name(store->rel));
	values[0] = TimestampTzGetDatum(now);
	values[1] = PointerGetDatum(req->route);
	nulls[1] = req->route != NULL ? ' ' : 'n';
	values[2] = PointerGetDatum(req->tenant);
	nulls[2] = req->tenant != NULL ? ' ' : 'n';
	values[3] = PointerGetDatum(req->key);
	nulls[3] = req->key != NULL ? ' ' : 'n';

	idem_become_owner(store->rel, &caller);
	portal = SPI_cursor_open_with_args(NULL, sql, 4, types, values, nulls,
									   false, CURSOR_OPT_NO_SCROLL);
	idem_become_caller(&caller);
	return portal;
}

/* May the row that was found be handed out?  It may have changed. */
static bool
is_resumable(TupleTableSlot *row, const ResumeRequest *req, TimestampTz now,
			 IdemPolicy *policy)
{
	TimestampTz lease_until;

	if (idem_row_state(row) != IDEM_IN_PROGRESS)
		return false;
	lease_until = idem_row_lease_until(row);
	if (lease_until > now)
		return false;

	idem_policy_of_route(idem_row_text(row, Anum_key_route), policy);
	if (req->held)
		return true;
	return idem_row_attempt(row) < policy->max_attempts &&
		(policy->on_lost_lease == IDEM_LOST_RESUME ||
		 TIMESTAMP_IS_NOBEGIN(lease_until));
}

/*
 * Take over the claim in the row at tid, if it is still there to be taken.
 * Returns its new version, or NULL.
 */
static TupleTableSlot *
resume(IdemStore *store, ItemPointer tid, const ResumeRequest *req,
	   TimestampTz now)
{
	TupleTableSlot *next;
	IdemPolicy	policy;

	if (!idem_store_fetch(store, tid) ||
		idem_store_row_is_ours(store) ||
		!is_resumable(store->row, req, now, &policy) ||
		idem_store_lock(store, false) != IDEM_LOCKED)
		return NULL;

	if (req->has_lease)
		policy.lease = req->lease;
	next = idem_store_new_version(store, true);
	idem_set_column(next, Anum_key_attempt,
					Int32GetDatum(idem_row_attempt(store->row) + 1));
	idem_set_column(next, Anum_key_lease_until,
					TimestampTzGetDatum(idem_time_after(now, &policy.lease,
														"lease")));
	idem_store_update(store);
	idem_count_outcome(idem_row_text(next, Anum_key_route), IDEM_RESUMED, false);
	return next;
}

/*
 * idem_resume(max, route, tenant, key, lease, held, store)
 *		returns setof idempotency_key
 */
Datum
idem_resume(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	IdemStore	store;
	ResumeRequest req;
	Portal		portal;
	TimestampTz now = GetCurrentTimestamp();
	int64		resumed = 0;

	PreventCommandIfReadOnly("idem_resume()");

	memset(&req, 0, sizeof(req));
	req.max = PG_ARGISNULL(0) ? PG_INT64_MAX : PG_GETARG_INT32(0);
	if (req.max < 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("max must not be negative")));
	req.route = PG_ARGISNULL(1) ? NULL : idem_arg_name(fcinfo, 1, "route");
	if (idem_tenant_is_role || !PG_ARGISNULL(2))
		req.tenant = idem_arg_tenant(fcinfo, 2);
	req.key = PG_ARGISNULL(3) ? NULL : idem_arg_name(fcinfo, 3, "key");
	req.has_lease = !PG_ARGISNULL(4);
	idem_arg_interval(fcinfo, 4, &req.lease);
	if (req.has_lease)
		(void) idem_time_after(now, &req.lease, "lease");
	req.held = !PG_ARGISNULL(5) && PG_GETARG_BOOL(5);

	InitMaterializedSRF(fcinfo, 0);
	idem_store_open(&store, idem_arg_store(fcinfo, 6), RowExclusiveLock);
	SPI_connect();
	portal = open_candidates(&store, &req, now);
	PinPortal(portal);
	while (resumed < req.max)
	{
		SPI_cursor_fetch(portal, true, RESUME_CHUNK);
		if (SPI_processed == 0)
			break;
		for (uint64 i = 0; i < SPI_processed && resumed < req.max; i++)
		{
			Datum		tid = idem_returned(SPI_tuptable, i, 1);
			TupleTableSlot *next = resume(&store, (ItemPointer) DatumGetPointer(tid),
										  &req, now);

			CHECK_FOR_INTERRUPTS();
			if (next == NULL)
				continue;
			tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc,
								 next->tts_values, next->tts_isnull);
			resumed++;
		}
		SPI_freetuptable(SPI_tuptable);
	}
	UnpinPortal(portal);
	SPI_cursor_close(portal);
	SPI_finish();
	idem_store_close(&store);
	return (Datum) 0;
}
