/*-------------------------------------------------------------------------
 *
 * store.c
 *	  Rows of a store, reached through the table and index access methods.
 *
 * This file knows no policy: it finds rows, says who stands behind them,
 * locks, inserts and updates them.  What a row means is decided in
 * claim_begin.c.
 *
 * THE LOCKING PROTOCOL
 *
 * The primary key decides who has a key.  There are no advisory locks and no
 * locks in shared memory; all there is are rows, written by the caller's own
 * transaction, and the unique index over them.  So a claim ends exactly as
 * its transaction does: ROLLBACK, ROLLBACK TO SAVEPOINT, a crash or a killed
 * backend free the key, COMMIT and PREPARE TRANSACTION keep it.
 *
 * Relation locks.  The store and its indexes are opened with RowExclusiveLock
 * (AccessShareLock by readers).  The lock on the table is held until the
 * transaction ends, as for any INSERT, so a store cannot be altered under a
 * claim.
 *
 * Probe.  idem_store_probe() reads the primary key under a dirty snapshot: it
 * sees what is committed now and what other transactions have not committed
 * yet, and never waits for them.  (It waits in one case: for a speculative
 * insertion, which is settled within microseconds by a backend that itself
 * waits for nothing.)  Such a scan is not a snapshot.  A row that is being
 * moved to a new index entry can be missed, when its old version is already
 * dead and its new entry lies behind the scan; so "nothing seen" never means
 * "free".
 *
 * Insert.  Only the unique index says "free": idem_store_insert() inserts
 * speculatively, as INSERT ... ON CONFLICT does.  If the index knows of a
 * rival, the row is killed again before anyone could take it for real, and
 * the caller looks again.  Two backends may kill each other's row, never
 * both keep theirs.
 *
 * Lock and update.  A row that stands already is locked before it is changed
 * (idem_store_lock(), no key exclusive).  An update of the row by others is
 * thereby excluded until the transaction ends; FOR KEY SHARE, which foreign
 * keys take, is not in the way.  Rows that this transaction wrote need no
 * lock, for nobody else can change them.  A take-over locks without waiting.
 * To finish, renew or release a claim waits, and then looks at the newest
 * version.
 *
 * Lock order.  A begin or a finish locks one row, a lookup none.  While it
 * waits for nothing it can be part of no deadlock of its own making; a finish
 * that waits for a row is seen by the server's deadlock detector.  A batch of
 * messages (claim_receive.c) takes its rows in the order of their keys.
 *
 * Isolation.  Under REPEATABLE READ and SERIALIZABLE nothing below the
 * executor stops a transaction from changing a row newer than its snapshot;
 * idem_store_update() does, with SQLSTATE 40001.  Reading such a row is
 * allowed, since that is the point of a replay.  A dirty scan takes no
 * predicate locks; that is right, as the unique index and the row locks
 * serialize what is decided here: who does the work of a key, and that it is
 * done.  (Not what else a transaction reads: one that was told of a row newer
 * than its snapshot does not see the other rows of that row's transaction.)
 *
 * Command ids.  Every change is followed by CommandCounterIncrement(), so
 * that the next call in the same statement sees it.  Cursors opened before
 * do not, for their command id is older.
 *
 * What a store may be is told and checked in store_check.c.  No pointer is
 * kept between calls.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/relscan.h"
#include "access/table.h"
#include "access/transam.h"
#include "access/xact.h"
#include "catalog/index.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "nodes/execnodes.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

#include "store.h"
#include "inval.h"

/* Waiting callers look again after 1 ms, then 2, 4, ... up to this many */
#define MAX_WAIT_MSECS	25

/*
 * Rounds of "insert, conflict, look again" after which something must be
 * broken, such as an index that disagrees with its table.
 */
#define MAX_ROUNDS		1000

/* An index of an open store, open for new entries */
typedef struct IdemIndex
{
	Relation	rel;
	IndexInfo  *info;
} IdemIndex;

/*
 * The row that this backend inserted last: where idem_finish most likely
 * finds its claim.  Only a hint, good for the transaction xid, and void after
 * any change of the store's definition; see idem_store_recall().
 */
static struct
{
	Oid			relid;
	TransactionId xid;
	ItemPointerData tid;
}			last_insert;

void
idem_store_relation_changed(Oid relid)
{
	if (!OidIsValid(relid) || relid == last_insert.relid)
		last_insert.relid = InvalidOid;
}

/* ----------------------------------------------------------------
 *		Opening a store
 * ----------------------------------------------------------------
 */

static Relation
open_default_store(LOCKMODE lockmode)
{
	Relation	rel = idem_open_member(&idem_catalog()->default_store,
									   lockmode);

	if (rel == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_TABLE),
				 errmsg("the default store of pg_idem does not exist")));
	return rel;
}

static void
check_owner(Oid relid)
{
	if (SearchSysCacheExists1(RELOID, ObjectIdGetDatum(relid)) &&
		!object_ownercheck(RelationRelationId, relid, GetUserId()))
		aclcheck_error(ACLCHECK_NOT_OWNER,
					   get_relkind_objtype(get_rel_relkind(relid)),
					   get_rel_name(relid));
}

/* Open another store, for a caller who has its owner's privileges. */
static Relation
open_further_store(Oid relid, LOCKMODE lockmode)
{
	Relation	rel;

	/*
	 * Before, so that no lock is taken, not even for a moment, on what is not
	 * the caller's; and after, as the owner may have changed meanwhile.
	 */
	check_owner(relid);
	rel = try_table_open(relid, lockmode);
	if (rel != NULL)
		check_owner(relid);
	if (rel == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_TABLE),
				 errmsg("store with OID %u does not exist", relid)));
	return rel;
}

/* A slot that lives as long as the store is open */
static TupleTableSlot *
make_slot(IdemStore *store, const TupleTableSlotOps *ops)
{
	MemoryContext oldcontext = MemoryContextSwitchTo(store->context);
	TupleTableSlot *slot = MakeSingleTupleTableSlot(RelationGetDescr(store->rel),
													ops);

	MemoryContextSwitchTo(oldcontext);
	return slot;
}

/* A slot for a row that is found */
static TupleTableSlot *
make_row_slot(IdemStore *store)
{
	return make_slot(store, table_slot_callbacks(store->rel));
}

/*
 * Open a store for one call.  InvalidOid is the default store, open to
 * everyone who may call the function; any other needs its owner's rights.
 * idem_store_close() must follow, unless an error is thrown.
 */
void
idem_store_open(IdemStore *store, Oid relid, LOCKMODE lockmode)
{
	memset(store, 0, sizeof(*store));
	store->context = CurrentMemoryContext;

	if (OidIsValid(relid) && relid != idem_catalog()->default_store)
		store->rel = open_further_store(relid, lockmode);
	else
		store->rel = open_default_store(lockmode);

	store->pkey = index_open(idem_store_primary_key(store->rel), lockmode);
	store->row = make_row_slot(store);
}

/*
 * Close a store.  The locks on the table and its indexes stay until the
 * transaction ends.
 */
void
idem_store_close(IdemStore *store)
{
	idem_store_scan_end(store);
	for (int i = 0; i < store->nindexes; i++)
	{
		index_insert_cleanup(store->indexes[i].rel, store->indexes[i].info);
		index_close(store->indexes[i].rel, NoLock);
	}
	if (store->estate != NULL)
		FreeExecutorState(store->estate);
	ExecDropSingleTupleTableSlot(store->row);
	if (store->spare != NULL)
		ExecDropSingleTupleTableSlot(store->spare);
	if (store->next != NULL)
		ExecDropSingleTupleTableSlot(store->next);
	index_close(store->pkey, NoLock);
	table_close(store->rel, NoLock);
}

/* ----------------------------------------------------------------
 *		Finding rows
 * ----------------------------------------------------------------
 */

/*
 * Start a scan of the primary key for the rows of a key: one at most where
 * the route is given, else one a route.  The snapshot must stay until the
 * scan is over.
 */
void
idem_store_scan(IdemStore *store, const IdemKey *key, Snapshot snapshot)
{
	ScanKeyData skey[3];
	int			nkeys = key->route != NULL ? 3 : 2;

	ScanKeyInit(&skey[0], 1, BTEqualStrategyNumber, F_TEXTEQ,
				PointerGetDatum(key->key));
	ScanKeyInit(&skey[1], 2, BTEqualStrategyNumber, F_TEXTEQ,
				PointerGetDatum(key->tenant));
	if (nkeys == 3)
		ScanKeyInit(&skey[2], 3, BTEqualStrategyNumber, F_TEXTEQ,
					PointerGetDatum(key->route));

	store->scan = idem_index_beginscan(store->rel, store->pkey, snapshot,
									   nkeys);
	index_rescan(store->scan, skey, nkeys, NULL, 0);
}

/* Fetch the next row into store->row, deformed.  False at the end. */
bool
idem_store_scan_next(IdemStore *store)
{
	if (!index_getnext_slot(store->scan, ForwardScanDirection, store->row))
		return false;
	slot_getallattrs(store->row);
	return true;
}

/* Put the row just fetched aside, as store->spare; the scan goes on. */
void
idem_store_scan_keep(IdemStore *store)
{
	TupleTableSlot *other = store->spare;

	if (other == NULL)
		other = make_row_slot(store);
	store->spare = store->row;
	store->row = other;
}

void
idem_store_scan_end(IdemStore *store)
{
	if (store->scan != NULL)
		index_endscan(store->scan);
	store->scan = NULL;
}

/* Let go of the rows found, and of the pins on their pages. */
void
idem_store_forget(IdemStore *store)
{
	idem_store_scan_end(store);
	ExecClearTuple(store->row);
	if (store->spare != NULL)
		ExecClearTuple(store->spare);
}

/*
 * Wait before the next look at a key that others have; the row is let go of
 * meanwhile.  Cancellable, and never past the deadline.  *msecs is 1 at the
 * first time.
 */
void
idem_store_wait(IdemStore *store, int *msecs, TimestampTz now,
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

/*
 * Let go of the row before the next look at a key, since somebody else was
 * faster.  *rounds is 0 at the first time.
 */
void
idem_store_look_again(IdemStore *store, const IdemKey *key, int *rounds)
{
	if (++*rounds > MAX_ROUNDS)
		ereport(ERROR,
				(errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
				 errmsg("could not settle who has idempotency key \"%s\"",
						text_to_cstring(key->key)),
				 errhint("Retry the transaction; if this goes on, check the store's primary key with amcheck.")));
	idem_store_forget(store);
	CHECK_FOR_INTERRUPTS();
}

/* Does a column of the row found have this value? */
static bool
row_name_is(IdemStore *store, AttrNumber attno, text *name)
{
	text	   *stored = DatumGetTextPP(idem_row_datum(store->row, attno));

	return VARSIZE_ANY_EXHDR(stored) == VARSIZE_ANY_EXHDR(name) &&
		memcmp(VARDATA_ANY(stored), VARDATA_ANY(name),
			   VARSIZE_ANY_EXHDR(name)) == 0;
}

/*
 * If the row inserted last by this transaction is the one with this key and
 * route, and has not been changed since, fetch it into store->row without a
 * descent of the index.
 */
bool
idem_store_recall(IdemStore *store, const IdemKey *key)
{
	if (last_insert.relid != RelationGetRelid(store->rel) ||
		last_insert.xid != GetTopTransactionIdIfAny() ||
		!table_tuple_fetch_row_version(store->rel, &last_insert.tid,
									   SnapshotSelf, store->row))
		return false;
	slot_getallattrs(store->row);
	return row_name_is(store, Anum_key_key, key->key) &&
		row_name_is(store, Anum_key_tenant, key->tenant) &&
		row_name_is(store, Anum_key_route, key->route);
}

/*
 * Fetch the row at tid into store->row, if a fresh snapshot sees a row there.
 * For callers that have found it by a query of their own.
 */
bool
idem_store_fetch(IdemStore *store, ItemPointer tid)
{
	Snapshot	snapshot = RegisterSnapshot(GetLatestSnapshot());
	bool		found;

	found = table_tuple_fetch_row_version(store->rel, tid, snapshot,
										  store->row);
	UnregisterSnapshot(snapshot);
	if (found)
		slot_getallattrs(store->row);
	return found;
}

/*
 * Did the current transaction write the row found?  (The raw xmin will not
 * do: that of a frozen row is a number of an earlier age, which may be ours
 * by now.)
 */
bool
idem_store_row_is_ours(IdemStore *store)
{
	HeapTuple	tuple = ExecFetchSlotHeapTuple(store->row, false, NULL);

	return TransactionIdIsCurrentTransactionId(HeapTupleHeaderGetXmin(tuple->t_data));
}

/*
 * Look at the key as it stands this moment, committed or not, without
 * waiting for any transaction.  The row seen, if any, is in store->row.
 *
 * While a row is being changed both of its versions can turn up.  The new
 * one is preferred, as it says what the key will be if its transaction
 * commits; so an old one is kept aside until the scan has shown that no new
 * one follows (a delete, or an update that has not written it yet).
 */
IdemSighting
idem_store_probe(IdemStore *store, const IdemKey *key)
{
	SnapshotData dirty;
	IdemSighting seen;

	InitDirtySnapshot(dirty);

retry:
	seen = IDEM_SEEN_NOTHING;
	idem_store_scan(store, key, &dirty);
	while (idem_store_scan_next(store))
	{
		/*
		 * The snapshot says which running transaction wrote (xmin) or is
		 * changing (xmax) this row.  It names none of our own, but a
		 * subtransaction of ours must never be taken for another's.
		 */
		if (TransactionIdIsValid(dirty.xmin) &&
			!TransactionIdIsCurrentTransactionId(dirty.xmin))
		{
			if (dirty.speculativeToken != 0)
			{
				TransactionId writer = dirty.xmin;
				uint32		token = dirty.speculativeToken;

				idem_store_forget(store);
				SpeculativeInsertionWait(writer, token);
				CHECK_FOR_INTERRUPTS();
				goto retry;
			}
			seen = IDEM_SEEN_ARRIVING;
			break;
		}

		if (TransactionIdIsValid(dirty.xmax) &&
			!TransactionIdIsCurrentTransactionId(dirty.xmax))
		{
			seen = IDEM_SEEN_LEAVING;
			idem_store_scan_keep(store);
			continue;
		}

		seen = idem_store_row_is_ours(store) ?
			IDEM_SEEN_OURS : IDEM_SEEN_SETTLED;
		break;
	}
	idem_store_scan_end(store);

	if (seen == IDEM_SEEN_LEAVING)
		idem_store_scan_keep(store);	/* swap it back */
	return seen;
}

/* ----------------------------------------------------------------
 *		Changing rows
 * ----------------------------------------------------------------
 */

/* Same error as the executor's for a row changed behind the snapshot */
static void
serialization_failure(void)
{
	ereport(ERROR,
			(errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
			 errmsg("could not serialize access due to concurrent update")));
}

/*
 * Lock the row found, so that this transaction may update it; store->row is
 * refreshed.  Without wait, a row that another transaction has is
 * IDEM_LOCK_BUSY, and one that is no longer the newest IDEM_LOCK_CHANGED.
 * With wait, the newest version is locked, which may say something else than
 * the one found did; IDEM_LOCK_CHANGED then means that the row is gone.
 */
IdemLocked
idem_store_lock(IdemStore *store, bool wait)
{
	ItemPointerData tid = store->row->tts_tid;
	TM_FailureData failure;
	TM_Result	result;

	result = table_tuple_lock(store->rel, &tid, GetActiveSnapshot(),
							  store->row, GetCurrentCommandId(false),
							  LockTupleNoKeyExclusive,
							  wait ? LockWaitBlock : LockWaitSkip,
							  wait ? TUPLE_LOCK_FLAG_FIND_LAST_VERSION : 0,
							  &failure);
	switch (result)
	{
		case TM_Ok:
			slot_getallattrs(store->row);
			return IDEM_LOCKED;

		case TM_WouldBlock:
			return IDEM_LOCK_BUSY;

		case TM_Updated:
		case TM_Deleted:
			return IDEM_LOCK_CHANGED;

		case TM_SelfModified:

			/*
			 * Changed by a later command of this transaction: a function
			 * called by an UPDATE of the store itself.
			 */
			ereport(ERROR,
					(errcode(ERRCODE_TRIGGERED_DATA_CHANGE_VIOLATION),
					 errmsg("idempotency key was already modified by the current command")));
			break;

		case TM_Invisible:
		case TM_BeingModified:
			/* the row was visible, and a lock waits or says "would block" */
			elog(ERROR, "unexpected result %d of a row lock", (int) result);
	}
	return IDEM_LOCK_CHANGED;	/* keep the compiler quiet */
}

/*
 * Start a new row: a copy of the one found, or all NULL.  The caller sets
 * columns, then calls idem_store_insert() or idem_store_update().
 */
TupleTableSlot *
idem_store_new_version(IdemStore *store, bool copy_row)
{
	TupleTableSlot *next = store->next;

	if (next == NULL)
		next = store->next = make_slot(store, &TTSOpsVirtual);
	ExecClearTuple(next);
	if (copy_row)
	{
		memcpy(next->tts_values, store->row->tts_values,
			   Natts_key * sizeof(Datum));
		memcpy(next->tts_isnull, store->row->tts_isnull,
			   Natts_key * sizeof(bool));
	}
	else
	{
		memset(next->tts_values, 0, Natts_key * sizeof(Datum));
		memset(next->tts_isnull, true, Natts_key * sizeof(bool));
	}
	ExecStoreVirtualTuple(next);
	return next;
}

/*
 * Open the indexes for new entries, once for as long as the store is open.
 * That misses none: whoever creates an index meanwhile waits, before it needs
 * new rows to be in it, for those who have a lock on the table.
 */
static void
open_indexes(IdemStore *store)
{
	MemoryContext oldcontext;
	List	   *indexes;
	ListCell   *lc;

	if (store->indexes != NULL)
		return;

	oldcontext = MemoryContextSwitchTo(store->context);
	indexes = RelationGetIndexList(store->rel);
	store->indexes = palloc(list_length(indexes) * sizeof(IdemIndex));
	foreach(lc, indexes)
	{
		IdemIndex  *index = &store->indexes[store->nindexes];

		index->rel = index_open(lfirst_oid(lc), RowExclusiveLock);

		/*
		 * One that is being created takes no entries yet, and may have come
		 * after the store was checked: its expressions are not for us to
		 * look at.
		 */
		if (!index->rel->rd_index->indisready)
		{
			index_close(index->rel, RowExclusiveLock);
			continue;
		}
		index->info = BuildIndexInfo(index->rel);
		store->nindexes++;

		/* the two indexes of every store need no expressions evaluated */
		if (store->estate == NULL &&
			(index->info->ii_Predicate != NIL ||
			 index->info->ii_Expressions != NIL))
			store->estate = CreateExecutorState();
	}
	list_free(indexes);
	MemoryContextSwitchTo(oldcontext);
}

/* Does the row belong into a partial index? */
static bool
satisfies_predicate(IdemStore *store, IndexInfo *info)
{
	Assert(store->estate != NULL);
	if (info->ii_PredicateState == NULL)
		info->ii_PredicateState = ExecPrepareQual(info->ii_Predicate,
												  store->estate);
	return ExecQual(info->ii_PredicateState,
					GetPerTupleExprContext(store->estate));
}

/*
 * Add one index's entry for a row just written.  Returns false if the index
 * found a rival to a speculative row.
 */
static bool
insert_index_entry(IdemStore *store, IdemIndex *index, bool speculative)
{
	TupleTableSlot *row = store->next;
	Datum		values[INDEX_MAX_KEYS];
	bool		isnull[INDEX_MAX_KEYS];
	IndexUniqueCheck check = UNIQUE_CHECK_NO;
	bool		unrivalled;

	if (index->rel->rd_index->indisunique)
		check = speculative ? UNIQUE_CHECK_PARTIAL : UNIQUE_CHECK_YES;

	FormIndexDatum(index->info, row, store->estate, values, isnull);
	unrivalled = index_insert(index->rel, values, isnull, &row->tts_tid,
							  store->rel, check, false, index->info);
	return unrivalled || check != UNIQUE_CHECK_PARTIAL;
}

/*
 * Add the index entries of store->next, all or only those of summarizing
 * indexes.  Returns false if a unique index found a rival.
 */
static bool
insert_index_entries(IdemStore *store, bool speculative, bool only_summaries)
{
	bool		unrivalled = true;

	open_indexes(store);
	if (store->estate != NULL)
		GetPerTupleExprContext(store->estate)->ecxt_scantuple = store->next;

	for (int i = 0; i < store->nindexes; i++)
	{
		IdemIndex  *index = &store->indexes[i];
		IndexInfo  *info = index->info;

		if (only_summaries && !IDEM_INDEX_IS_SUMMARY(info))
			continue;
		if (info->ii_Predicate != NIL && !satisfies_predicate(store, info))
			continue;
		if (!insert_index_entry(store, index, speculative))
			unrivalled = false;
	}
	if (store->estate != NULL)
		ResetPerTupleExprContext(store->estate);
	return unrivalled;
}

/*
 * Insert store->next.  Returns false, with nothing left behind, if the
 * primary key knows of another row with this key: the caller looks again.
 */
bool
idem_store_insert(IdemStore *store)
{
	TransactionId xid = GetCurrentTransactionId();
	uint32		token = SpeculativeInsertionLockAcquire(xid);
	bool		unrivalled;

	table_tuple_insert_speculative(store->rel, store->next,
								   GetCurrentCommandId(true), 0, NULL, token);
	unrivalled = insert_index_entries(store, true, false);
	table_tuple_complete_speculative(store->rel, store->next, token,
									 unrivalled);

	/* wakes whoever met the row while it was speculative */
	SpeculativeInsertionLockRelease(xid);

	if (unrivalled)
	{
		idem_watch_invalidations();
		last_insert.relid = RelationGetRelid(store->rel);
		last_insert.xid = GetTopTransactionId();
		last_insert.tid = store->next->tts_tid;
		CommandCounterIncrement();
	}
	return unrivalled;
}

/*
 * Make store->next the new version of store->row, which this transaction has
 * written itself or has locked.  Throws 40001 if a transaction that keeps its
 * snapshot cannot see the row.
 */
void
idem_store_update(IdemStore *store)
{
	TM_FailureData failure;
	LockTupleMode lockmode;
	IdemUpdateIndexes updates;
	TM_Result	result;

	if (IsolationUsesXactSnapshot() &&
		!table_tuple_satisfies_snapshot(store->rel, store->row,
										GetTransactionSnapshot()))
		serialization_failure();

	result = idem_table_tuple_update(store->rel, &store->row->tts_tid,
									 store->next, GetCurrentCommandId(true),
									 GetActiveSnapshot(), &failure,
									 &lockmode, &updates);
	switch (result)
	{
		case TM_Ok:
			break;

		case TM_SelfModified:
			ereport(ERROR,
					(errcode(ERRCODE_TRIGGERED_DATA_CHANGE_VIOLATION),
					 errmsg("idempotency key was already modified by the current command")));
			break;

		case TM_Updated:
		case TM_Deleted:
			/* excluded by the lock */
			serialization_failure();
			break;

		case TM_Invisible:
		case TM_BeingModified:
		case TM_WouldBlock:
			elog(ERROR, "unexpected result %d of an update", (int) result);
	}

	if (!IDEM_UPDATES_NO_INDEX(updates))
		(void) insert_index_entries(store, false,
									IDEM_UPDATES_ONLY_SUMMARIES(updates));
	CommandCounterIncrement();
}
