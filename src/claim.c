/*-------------------------------------------------------------------------
 *
 * claim.c
 *	  The state machine of a key: idem_begin, idem_finish, idem_lookup.
 *
 * idem_begin looks at the key (store.c), decides (decide(), which is a pure
 * function of the request, the row seen and the time), acts on the decision
 * and answers.  If somebody else was faster, it looks again.  So whatever it
 * answers was true at one moment during the call.
 *
 * The states of a row, and what changes them:
 *
 *		(none) --begin--> in_progress --finish--> completed
 *							^    |				  failed
 *							|    | lease over		|
 *							+----+-----begin--------+
 *						   (attempt + 1)
 *
 * completed and failed rows past expires_at count as none.  A row whose
 * writer still runs is in progress whatever its state column says: the
 * writer may yet roll back.  Only its request hash is used, and that only to
 * tell a mismatch.
 *
 * No lock is taken here but through store.c, which tells the protocol.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "pg_idem.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/snapmgr.h"
#include "utils/typcache.h"

PG_FUNCTION_INFO_V1(idem_begin);
PG_FUNCTION_INFO_V1(idem_finish);
PG_FUNCTION_INFO_V1(idem_lookup);

/*
 * When to look again at a key that somebody is at: nobody can know when a
 * running transaction or a live lease will end, so this is a hint, cut short
 * where the lease ends sooner.
 */
#define RETRY_AFTER_USECS		USECS_PER_SEC

/* Waiting callers look again after 1 ms, then 2, 4, ... up to this many */
#define MAX_WAIT_MSECS			25

/*
 * Rounds of "insert, conflict, look again" after which something must be
 * broken, such as an index that disagrees with its table.
 */
#define MAX_ROUNDS				1000

typedef enum Outcome
{
	OUTCOME_STARTED,
	OUTCOME_RESUMED,
	OUTCOME_REPLAYED,
	OUTCOME_IN_PROGRESS,
	OUTCOME_MISMATCH,
	OUTCOME_EXPIRED,
	OUTCOME_UNKNOWN
} Outcome;

static const char *const outcome_name[] = {
	[OUTCOME_STARTED] = "started",
	[OUTCOME_RESUMED] = "resumed",
	[OUTCOME_REPLAYED] = "replayed",
	[OUTCOME_IN_PROGRESS] = "in_progress",
	[OUTCOME_MISMATCH] = "mismatch",
	[OUTCOME_EXPIRED] = "expired",
	[OUTCOME_UNKNOWN] = "unknown"
};

/* What idem_begin was called with */
typedef struct Request
{
	IdemKey		key;
	bytea	   *hash;			/* NULL: this caller takes no fingerprints */
	Interval	ttl;
	Interval	lease;
	bool		has_first_sent;
	TimestampTz first_sent;

	/* by the clock of the current look at the key */
	TimestampTz now;
	TimestampTz lease_until;
	TimestampTz expires_at;
} Request;

/* What it has decided to do ... */
typedef enum Action
{
	ACTION_ANSWER,				/* nothing to be written */
	ACTION_INSERT,				/* write the first row of this key */
	ACTION_RECLAIM,				/* start anew on the row of an expired key */
	ACTION_RESUME				/* take over the row's claim */
} Action;

/* ... and to say */
typedef struct Answer
{
	Outcome		outcome;
	int			status;			/* 0: the stored one, or none */
	int64		retry_after;	/* microseconds; 0: none */
	bool		tell_row;		/* may attempt and expires_at be told? */
	bool		others;			/* may the wait for others change it? */
} Answer;

/* ----------------------------------------------------------------
 *		Columns of a row
 * ----------------------------------------------------------------
 */

static inline IdemState
row_state(TupleTableSlot *row)
{
	return idem_state_from_datum(idem_row_datum(row, Anum_key_state));
}

static inline int32
row_attempt(TupleTableSlot *row)
{
	return DatumGetInt32(idem_row_datum(row, Anum_key_attempt));
}

/* Is a timestamp column at or before now?  NULL never is. */
static inline bool
row_time_is_over(TupleTableSlot *row, AttrNumber attno, TimestampTz now)
{
	return !idem_row_isnull(row, attno) &&
		DatumGetTimestampTz(idem_row_datum(row, attno)) <= now;
}

/* A finished key whose retention is over counts as gone. */
static inline bool
row_is_gone(TupleTableSlot *row, TimestampTz now)
{
	return row_state(row) != IDEM_IN_PROGRESS &&
		row_time_is_over(row, Anum_key_expires_at, now);
}

static inline void
set_column(TupleTableSlot *row, AttrNumber attno, Datum value)
{
	row->tts_values[attno - 1] = value;
	row->tts_isnull[attno - 1] = false;
}

static inline void
set_column_or_null(TupleTableSlot *row, AttrNumber attno, const void *value)
{
	row->tts_values[attno - 1] = PointerGetDatum(value);
	row->tts_isnull[attno - 1] = (value == NULL);
}

/*
 * Does the row's fingerprint differ from the request's?  A missing one
 * equals only another missing one.
 */
static bool
hash_differs(const Request *req, TupleTableSlot *row)
{
	bytea	   *stored;
	bool		differs;

	if (idem_row_isnull(row, Anum_key_request_hash))
		return req->hash != NULL;
	if (req->hash == NULL)
		return true;

	stored = DatumGetByteaPP(idem_row_datum(row, Anum_key_request_hash));
	differs = VARSIZE_ANY_EXHDR(stored) != VARSIZE_ANY_EXHDR(req->hash) ||
		memcmp(VARDATA_ANY(stored), VARDATA_ANY(req->hash),
			   VARSIZE_ANY_EXHDR(stored)) != 0;
	return differs;
}

/* ----------------------------------------------------------------
 *		The decision
 * ----------------------------------------------------------------
 */

static Action
answer(Answer *ans, Outcome outcome, int status)
{
	ans->outcome = outcome;
	ans->status = status;
	return ACTION_ANSWER;
}

static Action
in_progress(Answer *ans, int64 retry_after)
{
	ans->retry_after = Max(Min(retry_after, RETRY_AFTER_USECS), 1);
	return answer(ans, OUTCOME_IN_PROGRESS, 409);
}

static Action
take_over(Answer *ans)
{
	ans->outcome = OUTCOME_RESUMED;
	return ACTION_RESUME;
}

/* A result is told again, unless it is no longer there. */
static Action
replay(Answer *ans, TupleTableSlot *row)
{
	if (DatumGetBool(idem_row_datum(row, Anum_key_result_dropped)))
		return answer(ans, OUTCOME_EXPIRED, 410);
	return answer(ans, OUTCOME_REPLAYED, 0);
}

/* A claim committed in progress: its owner works outside a transaction. */
static Action
decide_in_progress(Answer *ans, TupleTableSlot *row, TimestampTz now)
{
	if (!row_time_is_over(row, Anum_key_lease_until, now))
	{
		TimestampTz lease_until =
			idem_row_isnull(row, Anum_key_lease_until) ? DT_NOEND :
			DatumGetTimestampTz(idem_row_datum(row, Anum_key_lease_until));

		return in_progress(ans, TIMESTAMP_IS_NOEND(lease_until) ?
						   RETRY_AFTER_USECS : lease_until - now);
	}

	if (idem_on_lost_lease == IDEM_LOST_HOLD ||
		row_attempt(row) >= idem_max_attempts)
		return answer(ans, OUTCOME_UNKNOWN, 409);
	return take_over(ans);
}

/*
 * Is the request older than the memory of its first copy may be?  Then that
 * nothing is stored proves nothing.
 */
static bool
was_sent_too_long_ago(const Request *req)
{
	if (!req->has_first_sent || TIMESTAMP_IS_NOEND(req->first_sent))
		return false;
	if (TIMESTAMP_IS_NOBEGIN(req->first_sent))
		return true;
	return idem_time_after(req->first_sent, &req->ttl, "ttl") <= req->now;
}

/*
 * Decide what a request gets that has seen this, now.  Reads store->row,
 * except when nothing was seen; the order of the tests is the contract.
 */
static Action
decide(const Request *req, IdemSighting seen, TupleTableSlot *row,
	   Answer *ans)
{
	TimestampTz now = req->now;

	memset(ans, 0, sizeof(*ans));

	if (was_sent_too_long_ago(req))
		return answer(ans, OUTCOME_EXPIRED, 412);

	switch (seen)
	{
		case IDEM_SEEN_NOTHING:
			ans->outcome = OUTCOME_STARTED;
			return ACTION_INSERT;

		case IDEM_SEEN_ARRIVING:
			ans->others = true;
			if (hash_differs(req, row))
				return answer(ans, OUTCOME_MISMATCH, 422);
			return in_progress(ans, RETRY_AFTER_USECS);

		case IDEM_SEEN_LEAVING:

			/*
			 * The committed version binds the key to its hash for as long as
			 * it lives.  A row that is gone is being swept, or reclaimed by a
			 * request whose own row we have not seen.
			 */
			ans->others = true;
			if (!row_is_gone(row, now) && hash_differs(req, row))
				return answer(ans, OUTCOME_MISMATCH, 422);
			return in_progress(ans, RETRY_AFTER_USECS);

		case IDEM_SEEN_SETTLED:
			if (row_is_gone(row, now))
			{
				ans->outcome = OUTCOME_STARTED;
				return ACTION_RECLAIM;
			}
			/* FALLTHROUGH */

		case IDEM_SEEN_OURS:
			break;
	}

	if (hash_differs(req, row))
		return answer(ans, OUTCOME_MISMATCH, 422);

	ans->tell_row = true;
	switch (row_state(row))
	{
		case IDEM_COMPLETED:
			return replay(ans, row);

		case IDEM_IN_PROGRESS:
			if (seen == IDEM_SEEN_OURS)
				return in_progress(ans, RETRY_AFTER_USECS);
			ans->others = true;
			return decide_in_progress(ans, row, now);

		case IDEM_FAILED:
			/* within one transaction a second run would be no new attempt */
			if (seen == IDEM_SEEN_OURS ||
				row_attempt(row) >= idem_max_attempts)
				return replay(ans, row);
			return take_over(ans);
	}
	return ACTION_ANSWER;		/* keep the compiler quiet */
}

/* ----------------------------------------------------------------
 *		Acting on it
 * ----------------------------------------------------------------
 */

/* The first row of a key, or of its next life */
static void
new_claim(IdemStore *store, const Request *req)
{
	TupleTableSlot *next = idem_store_new_version(store, false);

	set_column_or_null(next, Anum_key_key, req->key.key);
	set_column_or_null(next, Anum_key_tenant, req->key.tenant);
	set_column_or_null(next, Anum_key_route, req->key.route);
	set_column(next, Anum_key_state, idem_state_to_datum(IDEM_IN_PROGRESS));
	set_column(next, Anum_key_attempt, Int32GetDatum(1));
	set_column_or_null(next, Anum_key_request_hash, req->hash);
	set_column(next, Anum_key_lease_until,
			   TimestampTzGetDatum(req->lease_until));
	set_column(next, Anum_key_result_dropped, BoolGetDatum(false));
	set_column(next, Anum_key_created_at, TimestampTzGetDatum(req->now));
	set_column(next, Anum_key_expires_at,
			   TimestampTzGetDatum(req->expires_at));
}

/* The next attempt at a claim: everything but its result stays */
static void
next_attempt(IdemStore *store, const Request *req)
{
	TupleTableSlot *next = idem_store_new_version(store, true);

	set_column(next, Anum_key_state, idem_state_to_datum(IDEM_IN_PROGRESS));
	set_column(next, Anum_key_attempt,
			   Int32GetDatum(row_attempt(store->row) + 1));
	set_column(next, Anum_key_lease_until,
			   TimestampTzGetDatum(req->lease_until));
	next->tts_isnull[Anum_key_status - 1] = true;
	next->tts_isnull[Anum_key_headers - 1] = true;
	next->tts_isnull[Anum_key_response - 1] = true;
	next->tts_isnull[Anum_key_body - 1] = true;
	set_column(next, Anum_key_result_dropped, BoolGetDatum(false));
	next->tts_isnull[Anum_key_finished_at - 1] = true;
}

/*
 * Carry out a decision.  Returns false if somebody else was faster, and the
 * caller must look again.
 */
static bool
act(IdemStore *store, const Request *req, Action action, Answer *ans)
{
	switch (action)
	{
		case ACTION_ANSWER:
			return true;

		case ACTION_INSERT:
			new_claim(store, req);
			return idem_store_insert(store);

		case ACTION_RECLAIM:
		case ACTION_RESUME:
			switch (idem_store_lock(store, false))
			{
				case IDEM_LOCKED:
					break;
				case IDEM_LOCK_CHANGED:
					return false;
				case IDEM_LOCK_BUSY:
					memset(ans, 0, sizeof(*ans));
					ans->others = true;
					in_progress(ans, RETRY_AFTER_USECS);
					return true;
			}
			if (action == ACTION_RECLAIM)
				new_claim(store, req);
			else
				next_attempt(store, req);
			idem_store_update(store);
			return true;
	}
	return true;				/* keep the compiler quiet */
}

/*
 * Wait before the next look at the key; the row is let go of meanwhile.
 * Cancellable, and never past the deadline.
 */
static void
wait_for_others(IdemStore *store, int *msecs, TimestampTz now,
				TimestampTz deadline)
{
	long		left = TimestampDifferenceMilliseconds(now, deadline);

	idem_store_forget(store);
	(void) WaitLatch(MyLatch,
					 WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
					 Min(*msecs, Max(left, 1)),
					 IDEM_WAIT_EVENT("IdemWait"));
	ResetLatch(MyLatch);
	CHECK_FOR_INTERRUPTS();
	*msecs = Min(*msecs * 2, MAX_WAIT_MSECS);
}

/* Copy a column of the row into the answer's tuple. */
static inline void
tell(Datum *values, bool *isnull, int claim_attno,
	 TupleTableSlot *row, AttrNumber attno)
{
	values[claim_attno - 1] = idem_row_datum(row, attno);
	isnull[claim_attno - 1] = idem_row_isnull(row, attno);
}

/*
 * Form the idem_claim.  Reads the row, so it must still be held; values out
 * of line are fetched before it is let go of.
 */
static Datum
form_claim(const Answer *ans, TupleTableSlot *row)
{
	TupleDesc	desc = lookup_rowtype_tupdesc(idem_catalog()->claim_type, -1);
	Datum		values[Natts_claim];
	bool		isnull[Natts_claim];
	Interval	retry_after;
	Datum		result;

	memset(isnull, true, sizeof(isnull));

	values[Anum_claim_proceed - 1] =
		BoolGetDatum(ans->outcome == OUTCOME_STARTED ||
					 ans->outcome == OUTCOME_RESUMED);
	isnull[Anum_claim_proceed - 1] = false;
	values[Anum_claim_outcome - 1] =
		CStringGetTextDatum(outcome_name[ans->outcome]);
	isnull[Anum_claim_outcome - 1] = false;

	if (ans->status != 0)
	{
		values[Anum_claim_status - 1] = Int32GetDatum(ans->status);
		isnull[Anum_claim_status - 1] = false;
	}
	if (ans->outcome == OUTCOME_REPLAYED)
	{
		tell(values, isnull, Anum_claim_status, row, Anum_key_status);
		tell(values, isnull, Anum_claim_headers, row, Anum_key_headers);
		tell(values, isnull, Anum_claim_response, row, Anum_key_response);
		tell(values, isnull, Anum_claim_body, row, Anum_key_body);
	}
	if (ans->outcome == OUTCOME_RESUMED)
	{
		tell(values, isnull, Anum_claim_step, row, Anum_key_step);
		tell(values, isnull, Anum_claim_step_data, row, Anum_key_step_data);
	}
	if (ans->tell_row)
	{
		tell(values, isnull, Anum_claim_attempt, row, Anum_key_attempt);
		tell(values, isnull, Anum_claim_expires_at, row, Anum_key_expires_at);
	}
	if (ans->retry_after > 0)
	{
		memset(&retry_after, 0, sizeof(retry_after));
		retry_after.time = ans->retry_after;
		values[Anum_claim_retry_after - 1] = IntervalPGetDatum(&retry_after);
		isnull[Anum_claim_retry_after - 1] = false;
	}

	result = HeapTupleGetDatum(heap_form_tuple(desc, values, isnull));
	ReleaseTupleDesc(desc);
	return result;
}

/*
 * Look, decide and act until something holds.  Returns the idem_claim.
 */
static Datum
claim(IdemStore *store, Request *req, const Interval *wait)
{
	TimestampTz deadline = 0;
	int			wait_msecs = 1;
	int			rounds = 0;
	Answer		ans;

	for (;;)
	{
		IdemSighting seen;
		Action		action;

		req->now = GetCurrentTimestamp();
		req->lease_until = idem_time_after(req->now, &req->lease, "lease");
		req->expires_at = idem_time_after(req->now, &req->ttl, "ttl");
		if (deadline == 0)
			deadline = idem_time_not_before(req->now, wait, "wait");

		seen = idem_store_probe(store, &req->key);
		action = decide(req, seen, store->row, &ans);

		if (!act(store, req, action, &ans))
		{
			if (++rounds > MAX_ROUNDS)
				ereport(ERROR,
						(errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
						 errmsg("could not settle who has idempotency key \"%s\"",
								text_to_cstring(req->key.key)),
						 errhint("Retry the transaction; if this goes on, check the store's primary key with amcheck.")));
			idem_store_forget(store);
			CHECK_FOR_INTERRUPTS();
			continue;
		}

		if (ans.outcome == OUTCOME_IN_PROGRESS && ans.others &&
			req->now < deadline)
		{
			wait_for_others(store, &wait_msecs, req->now, deadline);
			continue;
		}

		if (ans.outcome == OUTCOME_STARTED || ans.outcome == OUTCOME_RESUMED)
		{
			ans.tell_row = true;
			return form_claim(&ans, store->next);
		}
		return form_claim(&ans, store->row);
	}
}

/*
 * idem_begin(key, route, hash, tenant, wait, ttl, lease, first_sent, store)
 *		returns idem_claim
 */
Datum
idem_begin(PG_FUNCTION_ARGS)
{
	IdemStore	store;
	Request		req;
	Interval	wait;
	Datum		result;

	PreventCommandIfReadOnly("idem_begin()");
	PreventCommandDuringRecovery("idem_begin()");

	req.key.key = idem_arg_name(fcinfo, 0, "key");
	req.key.route = idem_arg_name(fcinfo, 1, "route");
	req.hash = idem_arg_hash(fcinfo, 2);
	req.key.tenant = idem_arg_tenant(fcinfo, 3);
	idem_arg_interval(fcinfo, 4, idem_wait * INT64CONST(1000), &wait);
	idem_arg_interval(fcinfo, 5, idem_ttl * USECS_PER_SEC, &req.ttl);
	idem_arg_interval(fcinfo, 6, idem_lease * INT64CONST(1000), &req.lease);
	req.has_first_sent = !PG_ARGISNULL(7);
	req.first_sent = req.has_first_sent ? PG_GETARG_TIMESTAMPTZ(7) : 0;

	idem_store_open(&store, PG_ARGISNULL(8) ? InvalidOid : PG_GETARG_OID(8),
					RowExclusiveLock);
	result = claim(&store, &req, &wait);
	idem_store_close(&store);
	PG_RETURN_DATUM(result);
}

/* ----------------------------------------------------------------
 *		idem_finish
 * ----------------------------------------------------------------
 */

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
	int32		current = row_attempt(store->row);

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

	if (row_state(store->row) == IDEM_IN_PROGRESS &&
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
	if (row_state(store->row) != IDEM_IN_PROGRESS)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_ALREADY_FINISHED),
				 errmsg("idempotency key \"%s\" is already finished",
						describe_key(key))));
}

/*
 * Find the claim of a key: the one in progress, or else the one finished
 * row; it is in store->row.  The snapshot is a fresh one, so that a claim
 * committed after the caller's is found too, under every isolation level.
 */
static void
find_claim(IdemStore *store, const IdemKey *key)
{
	Snapshot	snapshot = RegisterSnapshot(GetLatestSnapshot());
	int			unfinished = 0;
	int			finished = 0;
	bool		kept_finished = false;

	idem_store_scan(store, key, snapshot);
	while (idem_store_scan_next(store))
	{
		bool		in_progress = row_state(store->row) == IDEM_IN_PROGRESS;

		if (in_progress)
			unfinished++;
		else
			finished++;

		/* keep the first of its kind; one in progress beats a finished one */
		if (in_progress ? unfinished == 1 : unfinished + finished == 1)
		{
			idem_store_scan_keep(store);
			kept_finished = !in_progress;
		}
	}
	idem_store_scan_end(store);
	if (unfinished + finished > 0)
		idem_store_scan_keep(store);	/* swap it back */
	UnregisterSnapshot(snapshot);

	if (unfinished + finished == 0)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_NO_CLAIM),
				 errmsg("there is no claim on idempotency key \"%s\"",
						describe_key(key)),
				 errhint("Call idem_begin() first, with the same tenant and store.")));
	if (unfinished > 1 || (kept_finished && finished > 1))
		ereport(ERROR,
				(errcode(ERRCODE_CARDINALITY_VIOLATION),
				 errmsg("idempotency key \"%s\" has claims under several routes",
						describe_key(key)),
				 errhint("Pass the route.")));
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
	if ((idem_store_row_is_ours(store) && row_attempt(row) == 1) ||
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
	set_column(next, Anum_key_state,
			   idem_state_to_datum(idem_status_is_kept(result->status) ?
								   IDEM_COMPLETED : IDEM_FAILED));
	next->tts_isnull[Anum_key_lease_until - 1] = true;
	set_column(next, Anum_key_status, Int32GetDatum(result->status));
	set_column_or_null(next, Anum_key_headers, result->headers);
	set_column_or_null(next, Anum_key_response, result->response);
	set_column_or_null(next, Anum_key_body, result->body);
	set_column(next, Anum_key_result_dropped, BoolGetDatum(!fits));
	set_column(next, Anum_key_finished_at, TimestampTzGetDatum(now));
	set_column(next, Anum_key_expires_at,
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

	idem_store_open(&store, PG_ARGISNULL(9) ? InvalidOid : PG_GETARG_OID(9),
					RowExclusiveLock);
	find_and_lock_claim(&store, &key, !PG_ARGISNULL(7),
						PG_ARGISNULL(7) ? 0 : PG_GETARG_INT32(7));
	finish(&store, &key, &result, PG_ARGISNULL(8) ? NULL : &ttl);
	idem_store_close(&store);
	PG_RETURN_VOID();
}

/* ----------------------------------------------------------------
 *		idem_lookup
 * ----------------------------------------------------------------
 */

/* The row as a datum of type idempotency_key */
static Datum
form_key(TupleTableSlot *row)
{
	TupleDesc	desc = lookup_rowtype_tupdesc(idem_catalog()->key_type, -1);
	Datum		result;

	result = HeapTupleGetDatum(heap_form_tuple(desc, row->tts_values,
											   row->tts_isnull));
	ReleaseTupleDesc(desc);
	return result;
}

/*
 * idem_lookup(key, route, tenant, store) returns idempotency_key
 *
 * The key as committed now (or as this transaction has left it), NULL if
 * there is none.  Claims nothing, and so works on a standby and in a
 * read-only transaction.
 */
Datum
idem_lookup(PG_FUNCTION_ARGS)
{
	IdemStore	store;
	IdemKey		key;
	Snapshot	snapshot;
	Datum		result = (Datum) 0;
	bool		found;

	key.key = idem_arg_name(fcinfo, 0, "key");
	key.route = idem_arg_name(fcinfo, 1, "route");
	key.tenant = idem_arg_tenant(fcinfo, 2);

	idem_store_open(&store, PG_ARGISNULL(3) ? InvalidOid : PG_GETARG_OID(3),
					AccessShareLock);
	snapshot = RegisterSnapshot(GetLatestSnapshot());
	idem_store_scan(&store, &key, snapshot);
	found = idem_store_scan_next(&store) &&
		!row_is_gone(store.row, GetCurrentTimestamp());
	if (found)
		result = form_key(store.row);
	idem_store_scan_end(&store);
	UnregisterSnapshot(snapshot);
	idem_store_close(&store);

	if (!found)
		PG_RETURN_NULL();
	PG_RETURN_DATUM(result);
}
