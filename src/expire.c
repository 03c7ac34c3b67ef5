/*-------------------------------------------------------------------------
 *
 * expire.c
 *	  The sweep: removes expired keys, by idem_expire() or from a worker.
 *
 * What is done: results past their route's response_ttl are dropped (by a
 * worker once an hour), and keys are removed: finished ones past expires_at,
 * and claims left in progress once both their lease and their expires_at are
 * over, unless on_lost_lease is "hold".  Each of the latter is logged.  From
 * the outbox go dead letters past pg_idem.outbox_dead_ttl; each is logged.
 *
 * How: with SQL, in batches of at most pg_idem.expire_batch rows and about
 * half a second, oldest first, each batch a transaction of its own in the
 * worker.  A batch locks its rows with SKIP
 * LOCKED, so the sweep waits for no claim, and no claim for more than one
 * batch.  The next batch starts behind the last row of the one before, so
 * rows that cannot go are met once a sweep and hold up nothing.  If a batch
 * fails (a business row still refers to a key), each half is tried on its
 * own, down to single rows; those that fail are reported and left, and the
 * launcher comes back to this database ever more rarely.
 *
 * As whom: as the store's owner, under SECURITY_RESTRICTED_OPERATION and
 * with a safe search_path, for a DELETE may fire the owner's triggers, and
 * the worker is a superuser.  Deferred constraints of the store are made
 * immediate meanwhile, so that no trigger is left for the commit, when the
 * switch is over.
 *
 * In whose way: a worker asks before each batch whether somebody wants the
 * database, and never waits for the lock on a store.  As it may be held up by
 * a trigger, its time is limited.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "pg_idem.h"

#include "access/table.h"
#include "access/xact.h"
#include "catalog/namespace.h"
#include "catalog/pg_class.h"
#include "catalog/pg_constraint.h"
#include "catalog/pg_type.h"
#include "commands/trigger.h"
#include "executor/spi.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/lmgr.h"
#include "tcop/tcopprot.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/resowner.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timeout.h"

PG_FUNCTION_INFO_V1(idem_expire);

/* How long the rows of a batch may take to delete, in milliseconds */
#define MAX_BATCH_MSECS	500
#define MAX_SLICE_MSECS	50

/*
 * What a worker may take: a step of it, before it is cancelled, and all of
 * it, before it leaves the rest to the next one.  (The launcher ends a worker
 * that a trigger holds up for longer still.)
 */
#define MAX_STEP_MSECS	10000
#define MAX_SWEEP_MSECS	30000

/* Columns of the query that picks a batch */
#define PICK_COLUMNS \
	"ctid, expires_at, key, tenant, route, state = 'in_progress', attempt"
#define PICK_CTID		1
#define PICK_EXPIRES_AT	2
#define PICK_KEY		3
#define PICK_TENANT		4
#define PICK_ROUTE		5
#define PICK_UNFINISHED	6
#define PICK_ATTEMPT	7

/*
 * How far a sweep of one store has come.  The strings live in the memory
 * context that was current when the sweep started.
 */
typedef struct Sweep
{
	Oid			relid;
	bool		may_wait;		/* for the lock on the store? */
	TimestampTz deadline;		/* of a worker; the rest has time */
	MemoryContext context;
	TimestampTz now;			/* what is expired at the start of the sweep */
	TimestampTz expires_at;		/* last row met ... */
	text	   *key;
	text	   *tenant;
	text	   *route;
	ItemPointerData dropped_to; /* last row whose result was dropped */
	int64		last_dead_letter;	/* id of the last one met */
	int64		removed;
	int64		failed;			/* rows that could not go */
	bool		broken_off;		/* by an error */
} Sweep;

/* A step of a sweep: one batch of a kind; false when there is no more */
typedef bool (*SweepStep) (Sweep *sweep, const char *store_name, int size);

static void
sweep_start(Sweep *sweep, Oid relid, bool may_wait)
{
	memset(sweep, 0, sizeof(*sweep));
	sweep->relid = relid;
	sweep->may_wait = may_wait;
	sweep->context = CurrentMemoryContext;
	sweep->now = GetCurrentTimestamp();
	sweep->expires_at = DT_NOBEGIN;
	sweep->key = cstring_to_text("");
	sweep->tenant = cstring_to_text("");
	sweep->route = cstring_to_text("");
	ItemPointerSet(&sweep->dropped_to, 0, 0);
}

/* ----------------------------------------------------------------
 *		One batch
 * ----------------------------------------------------------------
 */

/*
 * SET CONSTRAINTS for those constraints of the store that are deferrable or,
 * to set them back, those that are so at first.  While they are immediate,
 * their triggers fire at the end of our statements, as the store's owner.
 * (The server itself refuses to leave a deferred trigger behind under
 * SECURITY_RESTRICTED_OPERATION.)
 */
static void
set_constraints(Relation rel, bool deferred)
{
	TriggerDesc *triggers = rel->trigdesc;
	List	   *constraints = NIL;
	StringInfoData sql;
	const char *separator = "SET CONSTRAINTS ";
	ListCell   *lc;

	/* before any look-up: that may rebuild the relation's triggers */
	for (int i = 0; triggers != NULL && i < triggers->numtriggers; i++)
	{
		Trigger    *trigger = &triggers->triggers[i];

		if (OidIsValid(trigger->tgconstraint) &&
			(deferred ? trigger->tginitdeferred : trigger->tgdeferrable))
			constraints = lappend_oid(constraints, trigger->tgconstraint);
	}

	initStringInfo(&sql);
	foreach(lc, constraints)
	{
		HeapTuple	tuple;
		Form_pg_constraint form;

		tuple = SearchSysCache1(CONSTROID,
								ObjectIdGetDatum(lfirst_oid(lc)));
		if (!HeapTupleIsValid(tuple))
			continue;
		form = (Form_pg_constraint) GETSTRUCT(tuple);
		appendStringInfo(&sql, "%s%s", separator,
						 quote_qualified_identifier(get_namespace_name(form->connamespace),
													NameStr(form->conname)));
		separator = ", ";
		ReleaseSysCache(tuple);
	}
	if (sql.len > 0)
	{
		appendStringInfoString(&sql, deferred ? " DEFERRED" : " IMMEDIATE");
		SPI_execute(sql.data, false, 0);
	}
	pfree(sql.data);
}

/*
 * The routes whose on_lost_lease is not what the setting says, as text[]:
 * the held ones among those that resume, or the other way round.
 */
static Datum
exceptional_routes(void)
{
	List	   *routes = idem_route_policies();
	Datum	   *names = palloc((list_length(routes) + 1) * sizeof(Datum));
	int			n = 0;
	ListCell   *lc;

	foreach(lc, routes)
	{
		IdemRoutePolicy *route = lfirst(lc);

		if ((int) route->policy.on_lost_lease != idem_on_lost_lease)
			names[n++] = PointerGetDatum(route->route);
	}
	return PointerGetDatum(construct_array(names, n, TEXTOID, -1, false,
										   TYPALIGN_INT));
}

/* Lock the next rows to go; they are in SPI_tuptable. */
static void
pick_batch(Sweep *sweep, const char *store_name, int size)
{
	StringInfoData sql;
	Oid			types[7] = {TIMESTAMPTZOID, TIMESTAMPTZOID, TEXTOID, TEXTOID,
	TEXTOID, INT4OID, TEXTARRAYOID};
	Datum		values[7];

	/* a released claim has the lease -infinity, and is not held */
	initStringInfo(&sql);
	appendStringInfo(&sql,
					 "SELECT " PICK_COLUMNS " FROM ONLY %s"
					 " WHERE expires_at <= $1"
					 " AND (expires_at, key, tenant, route) > ($2, $3, $4, $5)"
					 " AND (state <> 'in_progress' OR lease_until = '-infinity'"
					 " OR (lease_until <= $1 AND route %s ($7)))"
					 " ORDER BY expires_at, key, tenant, route"
					 " LIMIT $6 FOR UPDATE SKIP LOCKED",
					 store_name,
					 idem_on_lost_lease == IDEM_LOST_HOLD ?
					 "= ANY" : "<> ALL");

	values[0] = TimestampTzGetDatum(sweep->now);
	values[1] = TimestampTzGetDatum(sweep->expires_at);
	values[2] = PointerGetDatum(sweep->key);
	values[3] = PointerGetDatum(sweep->tenant);
	values[4] = PointerGetDatum(sweep->route);
	values[5] = Int32GetDatum(size);
	values[6] = exceptional_routes();
	if (SPI_execute_with_args(sql.data, 7, types, values, NULL, false, 0) !=
		SPI_OK_SELECT)
		elog(ERROR, "could not pick expired keys: %s",
			 SPI_result_code_string(SPI_result));
	pfree(sql.data);
}

static Datum
picked(SPITupleTable *rows, uint64 i, int column)
{
	bool		isnull;

	return SPI_getbinval(rows->vals[i], rows->tupdesc, column, &isnull);
}

static char *
picked_text(SPITupleTable *rows, uint64 i, int column)
{
	return text_to_cstring(DatumGetTextPP(picked(rows, i, column)));
}

/* Remember the last row of the batch: the next one starts behind it. */
static void
advance(Sweep *sweep, SPITupleTable *rows, uint64 last)
{
	MemoryContext old = MemoryContextSwitchTo(sweep->context);

	pfree(sweep->key);
	pfree(sweep->tenant);
	pfree(sweep->route);
	sweep->expires_at = DatumGetTimestampTz(picked(rows, last,
												   PICK_EXPIRES_AT));
	sweep->key = DatumGetTextPCopy(picked(rows, last, PICK_KEY));
	sweep->tenant = DatumGetTextPCopy(picked(rows, last, PICK_TENANT));
	sweep->route = DatumGetTextPCopy(picked(rows, last, PICK_ROUTE));
	MemoryContextSwitchTo(old);
}

/* Some of the rows picked, [first, last] */
typedef struct Slice
{
	const char *store_name;
	SPITupleTable *rows;
	uint64		first;
	uint64		last;
} Slice;

/*
 * Delete a slice.  Those that went are in SPI_tuptable, in the columns of the
 * query that picked them.
 */
static void
delete_slice(void *arg)
{
	const Slice *slice = arg;
	int			n = (int) (slice->last - slice->first + 1);
	Datum	   *ctids = palloc(n * sizeof(Datum));
	Oid			type = TIDARRAYOID;
	Datum		value;
	char	   *sql = psprintf("DELETE FROM ONLY %s WHERE ctid = ANY ($1)"
							   " RETURNING " PICK_COLUMNS, slice->store_name);

	for (int i = 0; i < n; i++)
		ctids[i] = picked(slice->rows, slice->first + i, PICK_CTID);
	value = PointerGetDatum(construct_array(ctids, n, TIDOID,
											sizeof(ItemPointerData), false,
											TYPALIGN_SHORT));
	if (SPI_execute_with_args(sql, 1, &type, &value, NULL, false, 0) !=
		SPI_OK_DELETE_RETURNING)
		elog(ERROR, "could not delete expired keys: %s",
			 SPI_result_code_string(SPI_result));
	pfree(sql);
}

/* Say in the log which unfinished claims are among the rows that went. */
static void
log_unfinished(SPITupleTable *rows, uint64 n)
{
	for (uint64 i = 0; i < n; i++)
	{
		if (DatumGetBool(picked(rows, i, PICK_UNFINISHED)))
			ereport(LOG,
					(errmsg("removed unfinished idempotency key \"%s\"",
							picked_text(rows, i, PICK_KEY)),
					 errdetail("Tenant \"%s\", route \"%s\", attempt %d; its lease and its retention are over.",
							   picked_text(rows, i, PICK_TENANT),
							   picked_text(rows, i, PICK_ROUTE),
							   DatumGetInt32(picked(rows, i, PICK_ATTEMPT)))));
	}
}

/*
 * Delete rows [first, last] of those picked: all at once or, if one resists,
 * each half on its own.
 */
static void
delete_batch(Sweep *sweep, const char *store_name, SPITupleTable *rows,
			 uint64 first, uint64 last)
{
	Slice		slice = {store_name, rows, first, last};
	ErrorData  *error = NULL;

	CHECK_FOR_INTERRUPTS();
	if (idem_try(delete_slice, &slice, &error))
	{
		sweep->removed += SPI_processed;
		log_unfinished(SPI_tuptable, SPI_processed);
		SPI_freetuptable(SPI_tuptable);
	}
	else if (first < last)
	{
		uint64		middle = first + (last - first) / 2;

		FreeErrorData(error);
		delete_batch(sweep, store_name, rows, first, middle);
		delete_batch(sweep, store_name, rows, middle + 1, last);
	}
	else
	{
		/* once a sweep in detail; the sum is reported at its end */
		if (sweep->failed++ == 0)
			ereport(LOG,
					(errcode(error->sqlerrcode),
					 errmsg("could not remove expired idempotency key \"%s\" from %s: %s",
							picked_text(rows, first, PICK_KEY), store_name,
							error->message)));
		FreeErrorData(error);
	}
}

/*
 * Drop the next results whose response_ttl is over.  Returns false when there
 * are no more.  There is no index on finished_at, so that idem_finish is HOT;
 * the table is read through once, batch by batch in the order of its pages.
 */
static bool
drop_batch(Sweep *sweep, const char *store_name, int size)
{
	List	   *routes = idem_route_policies();
	Datum	   *names = palloc((list_length(routes) + 1) * sizeof(Datum));
	Datum	   *ttls = palloc((list_length(routes) + 1) * sizeof(Datum));
	Oid			types[5] = {TIMESTAMPTZOID, TIDOID, TEXTARRAYOID,
	INTERVALARRAYOID, INT4OID};
	Datum		values[5];
	ListCell   *lc;
	char	   *sql;
	int			n = 0;

	foreach(lc, routes)
	{
		IdemRoutePolicy *route = lfirst(lc);

		if (!route->policy.has_response_ttl)
			continue;
		names[n] = PointerGetDatum(route->route);
		ttls[n++] = IntervalPGetDatum(&route->policy.response_ttl);
	}
	if (n == 0)
		return false;

	sql = psprintf("WITH picked AS MATERIALIZED ("
				   "SELECT k.ctid FROM ONLY %s k"
				   " WHERE k.ctid > $2 AND NOT k.result_dropped"
				   " AND EXISTS (SELECT FROM unnest($3, $4) AS r (route, ttl)"
				   " WHERE r.route = k.route AND k.finished_at + r.ttl <= $1)"
				   " LIMIT $5 FOR UPDATE OF k SKIP LOCKED)"
				   " UPDATE ONLY %s SET headers = NULL, response = NULL,"
				   " body = NULL, result_dropped = true"
				   " WHERE ctid = ANY (ARRAY (SELECT ctid FROM picked))"
				   " RETURNING (SELECT max(ctid) FROM picked)",
				   store_name, store_name);
	values[0] = TimestampTzGetDatum(sweep->now);
	values[1] = PointerGetDatum(&sweep->dropped_to);
	values[2] = PointerGetDatum(construct_array(names, n, TEXTOID, -1, false,
												TYPALIGN_INT));
	values[3] = PointerGetDatum(construct_array(ttls, n, INTERVALOID,
												sizeof(Interval), false,
												TYPALIGN_DOUBLE));
	values[4] = Int32GetDatum(size);
	if (SPI_execute_with_args(sql, 5, types, values, NULL, false, 0) !=
		SPI_OK_UPDATE_RETURNING)
		elog(ERROR, "could not drop results: %s",
			 SPI_result_code_string(SPI_result));
	if (SPI_processed == 0)
		return false;
	ItemPointerCopy((ItemPointer) DatumGetPointer(picked(SPI_tuptable, 0, 1)),
					&sweep->dropped_to);
	return SPI_processed == (uint64) size;
}

/*
 * Remove the next dead letters whose time is over.  Returns false when there
 * are no more.
 */
static bool
remove_dead_letters(Sweep *sweep, const char *outbox_name, int size)
{
	if (idem_outbox_dead_ttl == 0)
		return false;
	return idem_outbox_purge(outbox_name,
							 sweep->now - idem_outbox_dead_ttl * USECS_PER_SEC,
							 &sweep->last_dead_letter, size, &sweep->failed);
}

/*
 * Open the store, or the outbox, for a sweep; NULL if it is gone, is no store
 * any more, or is locked by somebody for whom we do not wait.
 */
static Relation
open_for_sweep(const Sweep *sweep)
{
	Relation	rel;

	if (!sweep->may_wait &&
		!ConditionalLockRelationOid(sweep->relid, RowExclusiveLock))
		return NULL;
	rel = try_table_open(sweep->relid,
						 sweep->may_wait ? RowExclusiveLock : NoLock);
	if (rel == NULL)
		return NULL;
	if (rel->rd_rel->relkind != RELKIND_RELATION ||
		rel->rd_rel->relpersistence != RELPERSISTENCE_PERMANENT ||
		(sweep->relid == idem_catalog()->outbox ? !idem_is_outbox(rel) :
		 rel->rd_rel->reloftype != idem_catalog()->key_type))
	{
		table_close(rel, NoLock);
		return NULL;
	}
	return rel;
}

/*
 * Delete the picked rows slice by slice, for as long as a batch may take: a
 * row may be slow to go, for a trigger or a foreign key without an index.
 * Returns how many of them have had their turn.
 */
static uint64
delete_slices(Sweep *sweep, const char *store_name, SPITupleTable *rows,
			  uint64 n)
{
	TimestampTz start = GetCurrentTimestamp();
	TimestampTz now = start;
	uint64		slice = 16;
	uint64		done = 0;

	while (done < n &&
		   !TimestampDifferenceExceeds(start, now, MAX_BATCH_MSECS))
	{
		TimestampTz slice_start = now;

		slice = Min(slice, n - done);
		delete_batch(sweep, store_name, rows, done, done + slice - 1);
		done += slice;

		now = GetCurrentTimestamp();
		if (TimestampDifferenceExceeds(slice_start, now, MAX_SLICE_MSECS))
			slice = Max(slice / 2, 1);
		else
			slice *= 2;
	}
	return done;
}

/* Delete the next expired keys.  Returns false when there are no more. */
static bool
remove_batch(Sweep *sweep, const char *store_name, int size)
{
	SPITupleTable *rows;
	uint64		n;
	uint64		done;

	pick_batch(sweep, store_name, size);
	n = SPI_processed;
	rows = SPI_tuptable;
	if (n == 0)
		return false;
	done = delete_slices(sweep, store_name, rows, n);
	advance(sweep, rows, done - 1);
	return n == (uint64) size || done < n;
}

/*
 * Run the next batch of one kind, as the store's owner.  Needs a transaction
 * and an active snapshot.  Returns false when there is no more to do in this
 * store.
 */
static bool
sweep_batch(Sweep *sweep, SweepStep step, int size)
{
	Relation	rel = open_for_sweep(sweep);
	char	   *store_name;
	IdemCaller	caller;
	bool		more;

	if (rel == NULL)
		return false;
	store_name = idem_qualified_name(rel);

	idem_become_owner(rel, &caller);
	SPI_connect();

	set_constraints(rel, false);
	more = step(sweep, store_name, size);
	set_constraints(rel, true);

	SPI_finish();
	idem_become_caller(&caller);
	table_close(rel, NoLock);
	return more;
}

/* Report what a sweep could not remove. */
static void
report_failures(const Sweep *sweep)
{
	if (sweep->failed > 0)
		ereport(LOG,
				(errmsg_plural("%lld expired idempotency key of store \"%s\" could not be removed",
							   "%lld expired idempotency keys of store \"%s\" could not be removed",
							   sweep->failed,
							   (long long) sweep->failed,
							   get_rel_name(sweep->relid)),
				 errhint("A foreign key to the store keeps a key for as long as a row refers to it.")));
}

/* ----------------------------------------------------------------
 *		By hand
 * ----------------------------------------------------------------
 */

/* Sweep one store within the caller's transaction, max keys at the most. */
static int64
expire_store(Oid relid, int64 max)
{
	Sweep		sweep;
	bool		more = true;

	sweep_start(&sweep, relid, true);
	while (more && sweep.removed < max)
	{
		CHECK_FOR_INTERRUPTS();
		more = sweep_batch(&sweep, remove_batch,
						   (int) Min(max - sweep.removed, idem_expire_batch));
	}
	while (sweep_batch(&sweep, drop_batch, idem_expire_batch))
		CHECK_FOR_INTERRUPTS();
	report_failures(&sweep);
	return sweep.removed;
}

/* Sweep the outbox within the caller's transaction. */
static void
expire_dead_letters(void)
{
	Sweep		sweep;

	sweep_start(&sweep, idem_catalog()->outbox, true);
	while (sweep_batch(&sweep, remove_dead_letters, idem_expire_batch))
		CHECK_FOR_INTERRUPTS();
}

/*
 * idem_expire(max int) returns bigint
 *
 * Sweeps the default store, every other store whose owner's privileges the
 * caller has, and the outbox.  Returns how many keys were removed.
 */
Datum
idem_expire(PG_FUNCTION_ARGS)
{
	int64		max = PG_ARGISNULL(0) ? PG_INT64_MAX : PG_GETARG_INT32(0);
	Oid			default_store;
	int64		removed = 0;
	ListCell   *lc;

	PreventCommandIfReadOnly("idem_expire()");
	if (max < 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("max must not be negative")));

	default_store = idem_catalog()->default_store;
	foreach(lc, idem_stores())
	{
		Oid			relid = lfirst_oid(lc);

		if (removed >= max)
			break;
		if (relid != default_store &&
			(!SearchSysCacheExists1(RELOID, ObjectIdGetDatum(relid)) ||
			 !object_ownercheck(RelationRelationId, relid, GetUserId())))
			continue;
		removed += expire_store(relid, max - removed);
	}
	expire_dead_letters();
	PG_RETURN_INT64(removed);
}

/* ----------------------------------------------------------------
 *		In the worker
 * ----------------------------------------------------------------
 */

static void
begin_step(const char *activity)
{
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	PushActiveSnapshot(GetTransactionSnapshot());
	pgstat_report_activity(STATE_RUNNING, activity);
	enable_timeout_after(STATEMENT_TIMEOUT, MAX_STEP_MSECS);
}

static void
end_step(void)
{
	PopActiveSnapshot();
	CommitTransactionCommand();
	disable_timeout(STATEMENT_TIMEOUT, false);
	pgstat_report_stat(true);
	pgstat_report_activity(STATE_IDLE, NULL);
}

/*
 * The tables to sweep in this database, allocated in the caller's context:
 * the default store, the outbox, and the further stores.  Returns false if
 * there is not the extension at all.
 */
static bool
find_tables(List **tables, Oid *default_store, Oid *outbox)
{
	MemoryContext context = CurrentMemoryContext;
	bool		exists;

	begin_step("looking for extension pg_idem");
	exists = idem_lock_extension() && idem_catalog_exists();
	if (exists)
	{
		List	   *found = idem_stores();

		MemoryContextSwitchTo(context);
		*default_store = idem_catalog()->default_store;
		*outbox = idem_catalog()->outbox;
		*tables = list_insert_nth_oid(list_copy(found),
									  Min(1, list_length(found)), *outbox);
	}
	end_step();
	MemoryContextSwitchTo(context);
	return exists;
}

/*
 * One batch, one transaction.  Returns false when the sweep of this store is
 * over, or must be broken off.
 */
static bool
worker_batch(Sweep *sweep, SweepStep step)
{
	bool		more = false;
	char	   *name;

	begin_step("removing what is expired");
	name = get_rel_name(sweep->relid);
	if (name != NULL && idem_lock_extension() && idem_catalog_exists() &&
		!idem_database_is_wanted())
	{
		pgstat_report_activity(STATE_RUNNING,
							   psprintf("removing what is expired from \"%s\"",
										name));
		more = sweep_batch(sweep, step, idem_expire_batch);
		if (!more && step == remove_batch)
			report_failures(sweep);
	}
	end_step();
	return more;
}

/*
 * One step over a store.  An error is logged, and the next store has its
 * turn.
 */
static void
worker_sweep(Sweep *sweep, SweepStep step)
{
	MemoryContext context = CurrentMemoryContext;

	PG_TRY();
	{
		while (worker_batch(sweep, step) &&
			   GetCurrentTimestamp() < sweep->deadline)
		{
			CHECK_FOR_INTERRUPTS();
			MemoryContextSwitchTo(context);
		}
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(context);
		sweep->broken_off = true;
		disable_timeout(STATEMENT_TIMEOUT, false);
		EmitErrorReport();
		FlushErrorState();
		AbortCurrentTransaction();
		pgstat_report_activity(STATE_IDLE, NULL);
	}
	PG_END_TRY();
	MemoryContextSwitchTo(context);
}

/*
 * Settings of the database or the server that must not reach a sweep.
 * Foreign keys must protect the keys that they refer to; a lock that a
 * trigger or a foreign key waits for must not hold up the sweeps of other
 * databases; and no standby is waited for: nobody was told that the keys are
 * gone, and a dead standby must not hold up a shutdown.
 */
static void
override_settings(void)
{
	SetConfigOption("default_transaction_isolation", "read committed",
					PGC_SUSET, PGC_S_OVERRIDE);
	SetConfigOption("default_transaction_read_only", "off",
					PGC_SUSET, PGC_S_OVERRIDE);
	SetConfigOption("session_replication_role", "origin",
					PGC_SUSET, PGC_S_OVERRIDE);
	SetConfigOption("lock_timeout", "1s", PGC_SUSET, PGC_S_OVERRIDE);
	if (synchronous_commit > SYNCHRONOUS_COMMIT_LOCAL_FLUSH)
		SetConfigOption("synchronous_commit", "local",
						PGC_SUSET, PGC_S_OVERRIDE);
}

/*
 * Entry point of the short-lived worker: sweep the stores of one database,
 * tell the launcher, end.
 */
void
idem_expire_main(Datum arg)
{
	List	   *tables = NIL;
	ListCell   *lc;
	Oid			default_store;
	Oid			outbox;
	TimestampTz deadline = TimestampTzPlusMilliseconds(GetCurrentTimestamp(),
													   MAX_SWEEP_MSECS);
	bool		own_trouble = false;
	bool		further_trouble = false;

	/* the default of background workers would exit within the handler */
	pqsignal(SIGTERM, die);
	BackgroundWorkerUnblockSignals();
	BackgroundWorkerInitializeConnectionByOid(DatumGetObjectId(arg),
											  InvalidOid, 0);
	override_settings();
	MemoryContextSwitchTo(AllocSetContextCreate(TopMemoryContext,
												"pg_idem sweep",
												ALLOCSET_DEFAULT_SIZES));

	if (!find_tables(&tables, &default_store, &outbox))
	{
		idem_launcher_report(IDEM_REPORT_ABSENT);
		proc_exit(0);
	}

	foreach(lc, tables)
	{
		Sweep		sweep;
		bool		is_outbox = (lfirst_oid(lc) == outbox);
		bool		is_own = (is_outbox || lfirst_oid(lc) == default_store);

		/* what holds up a further store must not hold up our own tables */
		if (!is_own && !idem_launcher_wants_further_stores())
			continue;
		if (!is_own && !own_trouble)
			idem_launcher_report(IDEM_REPORT_FURTHER_TROUBLE);

		sweep_start(&sweep, lfirst_oid(lc), false);
		sweep.deadline = deadline;
		worker_sweep(&sweep, is_outbox ? remove_dead_letters : remove_batch);
		if (!is_outbox && idem_launcher_wants_results_dropped())
			worker_sweep(&sweep, drop_batch);
		if (sweep.broken_off || sweep.failed > 0)
		{
			if (is_own)
				own_trouble = true;
			else
				further_trouble = true;
		}
	}
	idem_launcher_report(own_trouble ? IDEM_REPORT_TROUBLE :
						 further_trouble ? IDEM_REPORT_FURTHER_TROUBLE :
						 IDEM_REPORT_SWEPT);
	proc_exit(0);
}
