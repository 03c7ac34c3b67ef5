/*-------------------------------------------------------------------------
 *
 * claim_fence.c
 *	  Finding a claim that stands, and fencing it.
 *
 * A claim that this transaction made is found at once, and is its own to
 * change.  Any other is looked for under a fresh MVCC snapshot, since a dirty
 * one can miss a row that is there.  It is locked, waiting if need be, and
 * what was checked before the wait is checked again after it: that is the
 * fence.  A worker that lost its claim finds another attempt, or a finished
 * key, and its whole transaction fails.
 *
 * No lock is taken here but through store.c, which tells the protocol, and
 * those of shared memory while something is counted (registry.c).
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/snapmgr.h"

#include "claim.h"
#include "args.h"
#include "registry.h"

static char *
describe_key(const IdemKey *key)
{
	return text_to_cstring(key->key);
}

static void
count_stale(IdemStore *store)
{
	idem_count(idem_row_text(store->row, Anum_key_route), IDEM_COUNT_STALE);
}

/*
 * The claim that a caller names: by key, and from argno on by route, tenant
 * and attempt
 */
void
idem_arg_claim_ref(FunctionCallInfo fcinfo, int argno, IdemClaimRef *ref)
{
	ref->key.key = idem_arg_name(fcinfo, 0, "key");
	ref->key.route = PG_ARGISNULL(argno) ? NULL :
		idem_arg_name(fcinfo, argno, "route");
	ref->key.tenant = idem_arg_tenant(fcinfo, argno + 1);
	ref->has_attempt = !PG_ARGISNULL(argno + 2);
	ref->attempt = ref->has_attempt ? PG_GETARG_INT32(argno + 2) : 0;
}

/* The fence: the caller's attempt, if given, must be the row's. */
static void
check_attempt(IdemStore *store, const IdemClaimRef *ref)
{
	int32		current = idem_row_attempt(store->row);

	if (ref->has_attempt)
	{
		if (ref->attempt == current)
			return;
		count_stale(store);
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_STALE_CLAIM),
				 errmsg("claim on idempotency key \"%s\" is stale",
						describe_key(&ref->key)),
				 errdetail("The caller has attempt %d; the current attempt is %d.",
						   ref->attempt, current),
				 errhint("Another attempt has taken the claim over. Roll back, and answer 409: the client will find out what came of it when it retries.")));
	}

	if (idem_row_state(store->row) == IDEM_IN_PROGRESS &&
		!idem_store_row_is_ours(store))
	{
		count_stale(store);
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_STALE_CLAIM),
				 errmsg("claim on idempotency key \"%s\" was not made by this transaction",
						describe_key(&ref->key)),
				 errhint("Call idem_begin() and idem_finish() in one transaction; is autocommit on? Pass the attempt only where the claim was committed on purpose, for work outside of the database.")));
	}
}

/* A finished key is immutable, whoever asks. */
static void
check_unfinished(IdemStore *store, const IdemKey *key)
{
	if (idem_row_state(store->row) != IDEM_IN_PROGRESS)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_ALREADY_FINISHED),
				 errmsg("idempotency key \"%s\" is already finished",
						describe_key(key)),
				 errhint("Where idem_begin() says that proceed is false, answer with what it returns, and do no work.")));
}

/*
 * Fetch the claim from an open scan: the one in progress or, if none is, the
 * one finished row.  Returns how many of the kind there are, which is more
 * than one only where the caller has not named the route.
 */
static int
fetch_claim(IdemStore *store)
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
	if (unfinished + finished > 0)
		idem_store_scan_keep(store);	/* swap it back */
	return unfinished > 0 ? unfinished : finished;
}

static void
refuse_several(const IdemKey *key)
{
	ereport(ERROR,
			(errcode(ERRCODE_CARDINALITY_VIOLATION),
			 errmsg("idempotency key \"%s\" has claims under several routes",
					describe_key(key)),
			 errhint("Pass the route.")));
}

static inline bool
is_own_claim(IdemStore *store)
{
	return idem_row_state(store->row) == IDEM_IN_PROGRESS &&
		idem_store_row_is_ours(store);
}

/*
 * Find the claim on the key that this transaction has made, whatever others
 * have under other routes.  The usual case.  It takes no snapshot and, under
 * SERIALIZABLE, no predicate lock, which would make others that use the same
 * index page fail.  Such a scan can miss a row that another transaction is
 * moving, but none of our own; so what it says of our own is certain.
 */
static bool
find_own_claim(IdemStore *store, const IdemKey *key)
{
	int			n = 0;

	if (key->route != NULL && idem_store_recall(store, key) &&
		is_own_claim(store))
		return true;

	idem_store_scan(store, key, SnapshotSelf);
	while (idem_store_scan_next(store))
	{
		if (is_own_claim(store) && n++ == 0)
			idem_store_scan_keep(store);
	}
	if (n > 0)
		idem_store_scan_keep(store);	/* swap it back */
	idem_store_scan_end(store);

	if (n > 1)
		refuse_several(key);
	if (n == 0)
		idem_store_forget(store);
	return n == 1;
}

/*
 * Find the claim of a key; it is in store->row.  The snapshot is a fresh
 * one, so that a claim committed after the caller's is found too, under
 * every isolation level.
 */
static void
find_claim(IdemStore *store, const IdemKey *key)
{
	Snapshot	snapshot;
	int			n;

	if (find_own_claim(store, key))
		return;

	snapshot = RegisterSnapshot(GetLatestSnapshot());
	idem_store_scan(store, key, snapshot);
	n = fetch_claim(store);
	idem_store_scan_end(store);
	UnregisterSnapshot(snapshot);

	if (n == 0)
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_NO_CLAIM),
				 errmsg("there is no claim on idempotency key \"%s\"",
						describe_key(key)),
				 errhint("Call idem_begin() first, with the same tenant, route and store.")));
	if (n > 1)
		refuse_several(key);
}

/*
 * Find the caller's claim and lock it, so that it can be changed; the row is
 * in store->row.  Whatever the claim of another transaction said when it was
 * found, it is looked at again once the lock is held.
 */
void
idem_find_and_lock_claim(IdemStore *store, const IdemClaimRef *ref)
{
	for (;;)
	{
		find_claim(store, &ref->key);
		check_attempt(store, ref);
		check_unfinished(store, &ref->key);
		if (idem_store_row_is_ours(store))
			return;

		if (idem_store_lock(store, true) == IDEM_LOCKED)
		{
			check_attempt(store, ref);
			check_unfinished(store, &ref->key);
			return;
		}
		/* the row is gone: say so, or find its successor */
		idem_store_forget(store);
		CHECK_FOR_INTERRUPTS();
	}
}

