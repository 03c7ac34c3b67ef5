/*-------------------------------------------------------------------------
 *
 * finish.c
 *	  Finishing a claim: idem_finish.
 *
 * The claim is found under a fresh MVCC snapshot, since a dirty one can miss
 * a row that is there.  A row that this transaction wrote is its own to
 * change.  Any other is locked, waiting if need be, and what was checked
 * before the wait is checked again after it: that is the fence.  A worker
 * that lost its claim finds another attempt, or a finished key, and its whole
 * transaction fails.
 *
 * No lock is taken here but through store.c, which tells the protocol.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "pg_idem.h"

#include "access/xlog.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/snapmgr.h"

PG_FUNCTION_INFO_V1(idem_finish);

static char *
describe_key(const IdemKey *key)
{
	return text_to_cstring(key->key);
}

/* The fence: the caller's attempt, if given, must be the row's. */
static void
check_attempt(IdemStore *store, const IdemKey *key, bool has_attempt,
			  int32 attempt)
{
	int32		current = idem_row_attempt(store->row);

	if (has_attempt)
	{
		if (attempt == current)
			return;
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_STALE_CLAIM),
				 errmsg("claim on idempotency key \"%s\" is stale",
						describe_key(key)),
				 errdetail("The caller has attempt %d; the current attempt is %d.",
						   attempt, current)));
	}

	if (idem_row_state(store->row) == IDEM_IN_PROGRESS &&
		!idem_store_row_is_ours(store))
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_STALE_CLAIM),
				 errmsg("claim on idempotency key \"%s\" was not made by this transaction",
						describe_key(key)),
				 errhint("Pass the attempt that idem_begin() returned.")));
}

/* A finished key is immutable, whoever asks. */
static void
check_unfinished(IdemStore *store, const IdemKey *key)
{
	if (idem_row_state(store->row) != IDEM_IN_PROGRESS)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_ALREADY_FINISHED),
				 errmsg("idempotency key \"%s\" is already finished",
						describe_key(key))));
}

/*
 * Fetch the claim of a key whose route the caller has not named: the one in
 * progress or, if none is, the one finished row.  Returns false if there is
 * none at all; more than one is an error.
 */
static bool
fetch_claim_of_any_route(IdemStore *store, const IdemKey *key)
{
	int			unfinished = 0;
	int			finished = 0;

	while (idem_store_scan_next(store))
	{
		bool		is_finished = idem_row_state(store->row) != IDEM_IN_PROGRESS;

		if (is_finished)
			finished++;
		else
			unfinished++;

		/* keep the first of its kind; one in progress beats a finished one */
		if (is_finished ? unfinished + finished == 1 : unfinished == 1)
			idem_store_scan_keep(store);
	}

	if (unfinished > 1 || (unfinished == 0 && finished > 1))
		ereport(ERROR,
				(errcode(ERRCODE_CARDINALITY_VIOLATION),
				 errmsg("idempotency key \"%s\" has claims under several routes",
						describe_key(key)),
				 errhint("Pass the route.")));
	if (unfinished + finished == 0)
		return false;
	idem_store_scan_keep(store);	/* swap it back */
	return true;
}

/*
 * Find the claim of a key; it is in store->row.  The snapshot is a fresh
 * one, so that a claim committed after the caller's is found too, under
 * every isolation level.
 */
static void
find_claim(IdemStore *store, const IdemKey *key)
{
	Snapshot	snapshot = RegisterSnapshot(GetLatestSnapshot());
	bool		found;

	idem_store_scan(store, key, snapshot);
	if (key->route != NULL)
		found = idem_store_scan_next(store);
	else
		found = fetch_claim_of_any_route(store, key);
	idem_store_scan_end(store);
	UnregisterSnapshot(snapshot);

	if (!found)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_NO_CLAIM),
				 errmsg("there is no claim on idempotency key \"%s\"",
						describe_key(key)),
				 errhint("Call idem_begin() first, with the same tenant, route and store.")));
}

/*
 * Find the caller's claim and lock it, so that it can be changed.  Whatever
 * the claim of another transaction said when it was found, the attempt is
 * looked at again once the lock is held.
 */
static void
find_and_lock_claim(IdemStore *store, const IdemKey *key, bool has_attempt,
					int32 attempt)
{
	for (;;)
	{
		find_claim(store, key);
		check_attempt(store, key, has_attempt, attempt);
		check_unfinished(store, key);
		if (idem_store_row_is_ours(store))
			return;

		if (idem_store_lock(store, true) == IDEM_LOCKED)
		{
			check_attempt(store, key, has_attempt, attempt);
			check_unfinished(store, key);
			return;
		}
		/* the row is gone: say so, or find its successor */
		idem_store_forget(store);
		CHECK_FOR_INTERRUPTS();
	}
}

/* What idem_finish stores */
typedef struct StoredResult
{
	int			status;
	Jsonb	   *headers;
	Jsonb	   *response;
	bytea	   *body;
} StoredResult;

/*
 * When a key that is being finished expires.  Retention counts from the
 * finish.  A claim made in this same transaction was given its time a moment
 * ago and keeps it: then the update changes no indexed column and is HOT.
 */
static TimestampTz
retention_end(IdemStore *store, TimestampTz now, const Interval *ttl)
{
	TupleTableSlot *row = store->row;
	TimestampTz created_at =
		DatumGetTimestampTz(idem_row_datum(row, Anum_key_created_at));
	TimestampTz expires_at =
		DatumGetTimestampTz(idem_row_datum(row, Anum_key_expires_at));
	Interval	span;

	if (ttl != NULL)
		return idem_time_after(now, ttl, "ttl");
	if ((idem_store_row_is_ours(store) && idem_row_attempt(row) == 1) ||
		TIMESTAMP_NOT_FINITE(expires_at))
		return expires_at;

	memset(&span, 0, sizeof(span));
	span.time = Max(expires_at - created_at, 1);
	return idem_time_after(now, &span, "ttl");
}

/* Store a result that does not fit without its content. */
static void
drop_large_result(StoredResult *result, const IdemKey *key)
{
	ereport(WARNING,
			(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
			 errmsg("result for idempotency key \"%s\" is too large to be stored",
					describe_key(key)),
			 errdetail("It is larger than pg_idem.max_response_size; replays will say that it has expired.")));
	result->headers = NULL;
	result->response = NULL;
	result->body = NULL;
}

static void
finish(IdemStore *store, const IdemKey *key, StoredResult *result,
	   const Interval *ttl)
{
	TimestampTz now = GetCurrentTimestamp();
	bool		fits = idem_result_fits(result->headers, result->response,
										result->body);
	TupleTableSlot *next;

	if (!fits)
		drop_large_result(result, key);

	next = idem_store_new_version(store, true);
	idem_set_column(next, Anum_key_state,
			   idem_state_to_datum(idem_status_is_kept(result->status) ?
								   IDEM_COMPLETED : IDEM_FAILED));
	next->tts_isnull[Anum_key_lease_until - 1] = true;
	idem_set_column(next, Anum_key_status, Int32GetDatum(result->status));
	idem_set_column_or_null(next, Anum_key_headers, result->headers);
	idem_set_column_or_null(next, Anum_key_response, result->response);
	idem_set_column_or_null(next, Anum_key_body, result->body);
	idem_set_column(next, Anum_key_result_dropped, BoolGetDatum(!fits));
	idem_set_column(next, Anum_key_finished_at, TimestampTzGetDatum(now));
	idem_set_column(next, Anum_key_expires_at,
			   TimestampTzGetDatum(retention_end(store, now, ttl)));
	idem_store_update(store);
}

static int
arg_status(FunctionCallInfo fcinfo, int argno)
{
	int			status;

	if (PG_ARGISNULL(argno))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("status must not be null")));
	status = PG_GETARG_INT32(argno);
	if (status < 100 || status > 599)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("status must be between 100 and 599")));
	return status;
}

/*
 * idem_finish(key, response, status, headers, body, route, tenant, attempt,
 *			   ttl, store) returns void
 */
Datum
idem_finish(PG_FUNCTION_ARGS)
{
	IdemStore	store;
	IdemKey		key;
	StoredResult result;
	Interval	ttl;

	PreventCommandIfReadOnly("idem_finish()");
	PreventCommandDuringRecovery("idem_finish()");

	key.key = idem_arg_name(fcinfo, 0, "key");
	result.response = PG_ARGISNULL(1) ? NULL : PG_GETARG_JSONB_P(1);
	result.status = arg_status(fcinfo, 2);
	result.headers = PG_ARGISNULL(3) ? NULL :
		idem_headers_to_keep(PG_GETARG_JSONB_P(3));
	result.body = PG_ARGISNULL(4) ? NULL : PG_GETARG_BYTEA_PP(4);
	key.route = PG_ARGISNULL(5) ? NULL : idem_arg_name(fcinfo, 5, "route");
	key.tenant = idem_arg_tenant(fcinfo, 6);
	idem_arg_interval(fcinfo, 8, 0, &ttl);

	idem_store_open(&store, idem_arg_store(fcinfo, 9), RowExclusiveLock);
	find_and_lock_claim(&store, &key, !PG_ARGISNULL(7),
						PG_ARGISNULL(7) ? 0 : PG_GETARG_INT32(7));
	finish(&store, &key, &result, PG_ARGISNULL(8) ? NULL : &ttl);
	idem_store_close(&store);
	PG_RETURN_VOID();
}
