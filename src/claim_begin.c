/*-------------------------------------------------------------------------
 *
 * claim_begin.c
 *	  Claiming a key: idem_begin, and idem_lookup, which only reads it.
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
 * No lock is taken here but through store.c, which tells the protocol, and
 * those of shared memory while something is counted (registry.c).
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/snapmgr.h"
#include "utils/typcache.h"

#include "claim.h"
#include "args.h"
#include "registry.h"
#include "timespan.h"

PG_FUNCTION_INFO_V1(idem_begin);
PG_FUNCTION_INFO_V1(idem_lookup);

/*
 * When to look again at a key that somebody is at: nobody can know when a
 * running transaction or a live lease will end, so this is a hint, cut short
 * where the lease ends sooner.
 */
#define RETRY_AFTER_USECS		USECS_PER_SEC

static const char *const outcome_name[] = {
	[IDEM_STARTED] = "started",
	[IDEM_RESUMED] = "resumed",
	[IDEM_REPLAYED] = "replayed",
	[IDEM_WAS_IN_PROGRESS] = "in_progress",
	[IDEM_MISMATCH] = "mismatch",
	[IDEM_EXPIRED] = "expired",
	[IDEM_UNKNOWN] = "unknown",
	[IDEM_THROTTLED] = "throttled"
};

StaticAssertDecl(lengthof(outcome_name) == IDEM_NOUTCOMES,
				 "every outcome needs a name");

/* What it has decided to do ... */
typedef enum Action
{
	ACTION_ANSWER,				/* nothing to be written */
	ACTION_INSERT,				/* write the first row of this key */
	ACTION_RECLAIM,				/* start anew on an expired key's row */
	ACTION_RESUME				/* take over the row's claim */
} Action;

/* ... and to say */
typedef struct Answer
{
	IdemOutcome outcome;
	int			status;			/* 0: the stored one, or none */
	int64		retry_after;	/* microseconds; 0: none */
	bool		spends;			/* does it need the retry budget's leave? */
	bool		tell_row;		/* may attempt and expires_at be told? */
	bool		others;			/* may the wait for others change it? */
} Answer;

/* ----------------------------------------------------------------
 *		Columns of a row
 * ----------------------------------------------------------------
 */

/*
 * Does the row's fingerprint differ from the request's?  A missing one
 * equals only another missing one.
 */
static bool
hash_differs(const IdemClaimRequest *req, TupleTableSlot *row)
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
answer(Answer *ans, IdemOutcome outcome, int status)
{
	ans->outcome = outcome;
	ans->status = status;
	return ACTION_ANSWER;
}

static Action
in_progress(Answer *ans, int64 retry_after)
{
	ans->retry_after = Max(Min(retry_after, RETRY_AFTER_USECS), 1);
	return answer(ans, IDEM_WAS_IN_PROGRESS, 409);
}

static Action
take_over(Answer *ans)
{
	ans->outcome = IDEM_RESUMED;
	return ACTION_RESUME;
}

static inline bool
row_attempts_are_used_up(const IdemClaimRequest *req, TupleTableSlot *row)
{
	return idem_row_attempt(row) >= req->policy.max_attempts;
}

static bool
row_result_is_over(const IdemPolicy *policy, TupleTableSlot *row,
				   TimestampTz now)
{
	TimestampTz finished_at = idem_row_isnull(row, Anum_key_finished_at) ?
		DT_NOEND :
		DatumGetTimestampTz(idem_row_datum(row, Anum_key_finished_at));

	return idem_result_is_over(policy,
							   DatumGetBool(idem_row_datum(row, Anum_key_result_dropped)),
							   finished_at, now);
}

/* A result is told again, unless it is no longer there. */
static Action
replay(const IdemClaimRequest *req, Answer *ans, TupleTableSlot *row)
{
	if (row_result_is_over(&req->policy, row, req->now))
		return answer(ans, IDEM_EXPIRED, 410);
	return answer(ans, IDEM_REPLAYED, 0);
}

/*
 * A claim committed in progress: its owner works outside a transaction.  One
 * that its owner has released (lease_until is -infinity) is not in doubt, so
 * the policy for lost leases does not hold for it.
 */
static Action
decide_in_progress(const IdemClaimRequest *req, Answer *ans,
				   TupleTableSlot *row)
{
	TimestampTz lease_until = idem_row_lease_until(row);

	if (lease_until > req->now)
		return in_progress(ans, TIMESTAMP_IS_NOEND(lease_until) ?
						   RETRY_AFTER_USECS : lease_until - req->now);

	if (row_attempts_are_used_up(req, row) ||
		(req->policy.on_lost_lease == IDEM_LOST_HOLD &&
		 !TIMESTAMP_IS_NOBEGIN(lease_until)))
		return answer(ans, IDEM_UNKNOWN, 409);
	return take_over(ans);
}

/*
 * Is the request older than the memory of its first copy may be?  Then that
 * nothing is stored proves nothing.
 */
static bool
was_sent_too_long_ago(const IdemClaimRequest *req)
{
	if (!req->has_first_sent || req->first_sent >= req->now)
		return false;
	if (TIMESTAMP_IS_NOBEGIN(req->first_sent))
		return true;
	return idem_time_after(req->first_sent, &req->policy.ttl, "ttl") <= req->now;
}

/*
 * Decide what a request gets that has seen this, now.  Reads store->row,
 * except when nothing was seen; the order of the tests is the contract.
 */
static Action
decide(const IdemClaimRequest *req, IdemSighting seen, TupleTableSlot *row,
	   Answer *ans)
{
	TimestampTz now = req->now;

	memset(ans, 0, sizeof(*ans));

	if (was_sent_too_long_ago(req))
		return answer(ans, IDEM_EXPIRED, 412);

	switch (seen)
	{
		case IDEM_SEEN_NOTHING:
			ans->outcome = IDEM_STARTED;
			return ACTION_INSERT;

		case IDEM_SEEN_ARRIVING:
			ans->others = true;
			if (hash_differs(req, row))
				return answer(ans, IDEM_MISMATCH, 422);
			return in_progress(ans, RETRY_AFTER_USECS);

		case IDEM_SEEN_LEAVING:

			/*
			 * The committed version binds the key to its hash for as long as
			 * it lives.  A row that is gone is being swept, or reclaimed by a
			 * request whose own row we have not seen.
			 */
			ans->others = true;
			if (!idem_row_is_gone(row, now) && hash_differs(req, row))
				return answer(ans, IDEM_MISMATCH, 422);
			return in_progress(ans, RETRY_AFTER_USECS);

		case IDEM_SEEN_SETTLED:
			if (idem_row_is_gone(row, now))
			{
				ans->outcome = IDEM_STARTED;
				return ACTION_RECLAIM;
			}
			/* FALLTHROUGH */

		case IDEM_SEEN_OURS:
			break;
	}

	if (hash_differs(req, row))
		return answer(ans, IDEM_MISMATCH, 422);

	ans->tell_row = true;
	switch (idem_row_state(row))
	{
		case IDEM_COMPLETED:
			return replay(req, ans, row);

		case IDEM_IN_PROGRESS:
			if (seen == IDEM_SEEN_OURS)
				return in_progress(ans, RETRY_AFTER_USECS);
			ans->others = true;
			return decide_in_progress(req, ans, row);

		case IDEM_FAILED:
			/* within one transaction a second run would be no new attempt */
			if (seen == IDEM_SEEN_OURS ||
				row_attempts_are_used_up(req, row))
				return replay(req, ans, row);
			ans->spends = true;
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
new_claim(IdemStore *store, const IdemClaimRequest *req)
{
	TupleTableSlot *next = idem_store_new_version(store, false);

	idem_set_column_or_null(next, Anum_key_key, req->key.key);
	idem_set_column_or_null(next, Anum_key_tenant, req->key.tenant);
	idem_set_column_or_null(next, Anum_key_route, req->key.route);
	idem_set_column(next, Anum_key_state,
					idem_state_to_datum(IDEM_IN_PROGRESS));
	idem_set_column(next, Anum_key_attempt, Int32GetDatum(1));
	idem_set_column_or_null(next, Anum_key_request_hash, req->hash);
	idem_set_column(next, Anum_key_lease_until,
			   TimestampTzGetDatum(req->lease_until));
	idem_set_column(next, Anum_key_result_dropped, BoolGetDatum(false));
	idem_set_column(next, Anum_key_created_at, TimestampTzGetDatum(req->now));
	idem_set_column(next, Anum_key_expires_at,
			   TimestampTzGetDatum(req->expires_at));
}

/*
 * The next attempt at a claim: everything but its result stays.  finished_at
 * does too, as the time of the last finish, from which the retention that the
 * claim has now was counted.
 */
static void
next_attempt(IdemStore *store, const IdemClaimRequest *req)
{
	TupleTableSlot *next = idem_store_new_version(store, true);

	idem_set_column(next, Anum_key_state,
					idem_state_to_datum(IDEM_IN_PROGRESS));
	idem_set_column(next, Anum_key_attempt,
			   Int32GetDatum(idem_row_attempt(store->row) + 1));
	idem_set_column(next, Anum_key_lease_until,
			   TimestampTzGetDatum(req->lease_until));
	next->tts_isnull[Anum_key_status - 1] = true;
	next->tts_isnull[Anum_key_headers - 1] = true;
	next->tts_isnull[Anum_key_response - 1] = true;
	next->tts_isnull[Anum_key_body - 1] = true;
	idem_set_column(next, Anum_key_result_dropped, BoolGetDatum(false));
}

/*
 * Take the row that was decided on, to start anew or to resume.  Returns
 * false if it has changed, and the caller must look again.
 *
 * The retry budget is asked before the row is locked, so that a request that
 * it refuses keeps nobody from the row.  It gets the retry back if the row is
 * not to be had; what an error spends is spent.
 */
static bool
take_row(IdemStore *store, const IdemClaimRequest *req, Action action,
		 Answer *ans)
{
	IdemLocked	locked;

	if (ans->spends &&
		!idem_route_spend_retry(req->key.route, &req->policy.budget))
	{
		ans->retry_after = idem_budget_retry_after();
		answer(ans, IDEM_THROTTLED, 429);
		return true;
	}

	locked = idem_store_lock(store, false);
	if (locked == IDEM_LOCKED)
	{
		if (action == ACTION_RECLAIM)
			new_claim(store, req);
		else
			next_attempt(store, req);
		idem_store_update(store);
		return true;
	}

	if (ans->spends)
		idem_route_refund_retry(req->key.route);
	if (locked == IDEM_LOCK_CHANGED)
		return false;
	memset(ans, 0, sizeof(*ans));
	ans->others = true;
	in_progress(ans, RETRY_AFTER_USECS);
	return true;
}

/*
 * Carry out a decision.  Returns false if somebody else was faster, and the
 * caller must look again.
 */
static bool
act(IdemStore *store, const IdemClaimRequest *req, Action action, Answer *ans)
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
			return take_row(store, req, action, ans);
	}
	return true;				/* keep the compiler quiet */
}

/* Does the answer let the caller do the work? */
static inline bool
proceeds(const Answer *ans)
{
	return ans->outcome == IDEM_STARTED ||
		ans->outcome == IDEM_RESUMED;
}

/* Copy a column of the row, which may be NULL, into the answer's tuple. */
static inline void
tell(Datum *values, bool *isnull, int claim_attno,
	 TupleTableSlot *row, AttrNumber attno)
{
	values[claim_attno - 1] = row->tts_values[attno - 1];
	isnull[claim_attno - 1] = idem_row_isnull(row, attno);
}

/* The same for one that is never NULL. */
static inline void
tell_value(Datum *values, bool *isnull, int claim_attno,
		   TupleTableSlot *row, AttrNumber attno)
{
	values[claim_attno - 1] = idem_row_datum(row, attno);
	isnull[claim_attno - 1] = false;
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
	Datum		result;

	memset(isnull, true, sizeof(isnull));

	values[Anum_claim_proceed - 1] = BoolGetDatum(proceeds(ans));
	isnull[Anum_claim_proceed - 1] = false;
	values[Anum_claim_outcome - 1] =
		CStringGetTextDatum(outcome_name[ans->outcome]);
	isnull[Anum_claim_outcome - 1] = false;

	if (ans->status != 0)
	{
		values[Anum_claim_status - 1] = Int32GetDatum(ans->status);
		isnull[Anum_claim_status - 1] = false;
	}
	if (ans->outcome == IDEM_REPLAYED)
	{
		tell(values, isnull, Anum_claim_status, row, Anum_key_status);
		tell(values, isnull, Anum_claim_headers, row, Anum_key_headers);
		tell(values, isnull, Anum_claim_response, row, Anum_key_response);
		tell(values, isnull, Anum_claim_body, row, Anum_key_body);
	}
	if (ans->outcome == IDEM_RESUMED)
	{
		tell(values, isnull, Anum_claim_step, row, Anum_key_step);
		tell(values, isnull, Anum_claim_step_data, row, Anum_key_step_data);
	}
	if (ans->tell_row)
	{
		tell_value(values, isnull, Anum_claim_attempt,
				   row, Anum_key_attempt);
		tell_value(values, isnull, Anum_claim_expires_at,
				   row, Anum_key_expires_at);
	}
	if (ans->retry_after > 0)
	{
		values[Anum_claim_retry_after - 1] =
			idem_usecs_to_interval(ans->retry_after);
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
claim(IdemStore *store, IdemClaimRequest *req)
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
		req->lease_until = idem_time_after(req->now, &req->policy.lease, "lease");
		req->expires_at = idem_time_after(req->now, &req->policy.ttl, "ttl");
		if (deadline == 0)
			deadline = idem_time_not_before(req->now, &req->policy.wait,
											"wait");

		seen = idem_store_probe(store, &req->key);
		action = decide(req, seen, store->row, &ans);

		if (!act(store, req, action, &ans))
		{
			idem_store_look_again(store, &req->key, &rounds);
			continue;
		}

		if (ans.outcome == IDEM_WAS_IN_PROGRESS && ans.others &&
			req->now < deadline)
		{
			idem_store_wait(store, &wait_msecs, req->now, deadline);
			continue;
		}

		idem_count_outcome(req->key.route, ans.outcome, ans.spends);
		if (proceeds(&ans))
		{
			ans.tell_row = true;
			return form_claim(&ans, store->next);
		}
		return form_claim(&ans, store->row);
	}
}

/*
 * Claim a key, or find out what its claim has come to.  Returns the
 * idem_claim.
 */
Datum
idem_claim_key(IdemClaimRequest *req)
{
	IdemStore	store;
	Datum		result;

	idem_store_open(&store, req->store, RowExclusiveLock);
	result = claim(&store, req);
	idem_store_close(&store);
	return result;
}

/*
 * The arguments of a claim but for the fingerprint: key, route, and from argno
 * on tenant, ttl, lease, wait, first_sent, store
 */
void
idem_arg_claim(FunctionCallInfo fcinfo, int argno, IdemClaimRequest *req)
{
	req->key.key = idem_arg_name(fcinfo, 0, "key");
	req->key.route = idem_arg_name(fcinfo, 1, "route");
	req->key.tenant = idem_arg_tenant(fcinfo, argno);
	idem_policy_of_route(req->key.route, &req->policy);
	idem_arg_interval(fcinfo, argno + 1, &req->policy.ttl);
	idem_arg_interval(fcinfo, argno + 2, &req->policy.lease);
	idem_arg_interval(fcinfo, argno + 3, &req->policy.wait);
	req->has_first_sent = !PG_ARGISNULL(argno + 4);
	req->first_sent = req->has_first_sent ?
		PG_GETARG_TIMESTAMPTZ(argno + 4) : 0;
	req->store = idem_arg_store(fcinfo, argno + 5);
}

/*
 * idem_begin(key, route, hash, tenant, ttl, lease, wait, first_sent, store)
 *		returns idem_claim
 */
Datum
idem_begin(PG_FUNCTION_ARGS)
{
	IdemClaimRequest req;

	PreventCommandIfReadOnly("idem_begin()");
	idem_arg_claim(fcinfo, 3, &req);
	req.hash = idem_arg_hash(fcinfo, 2);
	PG_RETURN_DATUM(idem_claim_key(&req));
}

/* ----------------------------------------------------------------
 *		idem_lookup
 * ----------------------------------------------------------------
 */

/*
 * The row as a datum of type idempotency_key, without a result whose
 * response_ttl is over
 */
static Datum
form_key(TupleTableSlot *row, bool result_is_over)
{
	TupleDesc	desc = lookup_rowtype_tupdesc(idem_catalog()->key_type, -1);
	bool		isnull[Natts_key];
	Datum		result;

	memcpy(isnull, row->tts_isnull, sizeof(isnull));
	if (result_is_over)
	{
		isnull[Anum_key_headers - 1] = true;
		isnull[Anum_key_response - 1] = true;
		isnull[Anum_key_body - 1] = true;
	}
	result = HeapTupleGetDatum(heap_form_tuple(desc, row->tts_values,
											   isnull));
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
	IdemPolicy	policy;
	Snapshot	snapshot;
	TimestampTz now;
	Datum		result = (Datum) 0;
	bool		found;

	key.key = idem_arg_name(fcinfo, 0, "key");
	key.route = idem_arg_name(fcinfo, 1, "route");
	key.tenant = idem_arg_tenant(fcinfo, 2);

	idem_store_open(&store, idem_arg_store(fcinfo, 3), AccessShareLock);
	idem_policy_of_route(key.route, &policy);
	now = GetCurrentTimestamp();
	snapshot = RegisterSnapshot(GetLatestSnapshot());
	idem_store_scan(&store, &key, snapshot);
	found = idem_store_scan_next(&store) && !idem_row_is_gone(store.row, now);
	if (found)
		result = form_key(store.row,
						  row_result_is_over(&policy, store.row, now));
	idem_store_scan_end(&store);
	UnregisterSnapshot(snapshot);
	idem_store_close(&store);

	if (!found)
		PG_RETURN_NULL();
	PG_RETURN_DATUM(result);
}
