/*-------------------------------------------------------------------------
 *
 * expire_sweep.c
 *	  The sweep of one table, in batches; and idem_expire(), by hand.
 *
 * What goes: keys that are finished, once expires_at has passed, and claims
 * left in progress once both their lease and expires_at have, unless
 * on_lost_lease is "hold"; each of the latter is logged.  From the outbox go
 * dead letters past pg_idem.outbox_dead_ttl.  Results past their route's
 * response_ttl are dropped, while their keys stay.
 *
 * How: with SQL.  Expired keys are picked without a lock, the oldest first,
 * some thousands at a time.  Those that a foreign key refers to are left out;
 * one query finds them, so that a key which cannot go costs next to nothing.
 * The others are removed in batches of about half a second and at most
 * pg_idem.expire_batch rows.  A batch locks and deletes them in slices, each
 * in a subtransaction; what is locked by others by then, or has not expired
 * any more, is passed over.  The first slice is one row, and the next is as
 * large as promises to be done quickly, for a trigger of the owner's may take
 * its time.  After a failure it is one row again, so that the row which cannot
 * go is found, and the others go.  So a sweep waits for no claim, and no claim
 * for more than a batch.  A worker's sweep ends after MAX_FAILURES, and the
 * next one goes on behind them.
 *
 * As whom: as the table's owner, under SECURITY_RESTRICTED_OPERATION and with
 * a safe search_path (owner.c), for a DELETE may fire the owner's triggers,
 * and the worker is a superuser.  The server refuses to leave a trigger behind
 * for the commit, when the switch is over.  A worker therefore makes all
 * constraints immediate; in a caller's transaction they are the caller's own
 * affair, and a key that has a deferred trigger stays.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/table.h"
#include "access/xact.h"
#include "catalog/pg_class.h"
#include "catalog/pg_constraint.h"
#include "catalog/pg_operator.h"
#include "catalog/pg_type.h"
#include "commands/trigger.h"
#include "executor/spi.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "storage/lmgr.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/syscache.h"

#include "expire.h"
#include "after_commit.h"
#include "catalog.h"
#include "outbox.h"
#include "owner.h"
#include "policy.h"
#include "store.h"

PG_FUNCTION_INFO_V1(idem_expire);

/* How long a batch may take, and a slice of it, in milliseconds */
#define MAX_BATCH_MSECS		500
#define MAX_SLICE_MSECS		50

/*
 * Keys that are picked at a time, unless a batch is larger, and the bytes of
 * their names: those that the owner of a store has written have no limit
 */
#define MAX_PICKED			20000
#define MAX_PICKED_BYTES	(16 * 1024 * 1024)

/* Slices that may fail in a worker's sweep of a table; each costs some xids */
#define MAX_FAILURES		100

/* An expired key that was picked */
typedef struct IdemExpired
{
	ItemPointerData tid;
	TimestampTz expires_at;
	text	   *key;
	text	   *tenant;
	text	   *route;
	bool		is_referred_to; /* by a foreign key: it cannot go */
} IdemExpired;

/*
 * What has expired.  $1 is the time, $2 the routes whose on_lost_lease is not
 * what the setting says.  A released claim has the lease -infinity, and is not
 * held.
 */
#define HAS_EXPIRED(in) \
	"expires_at <= $1 AND (state <> 'in_progress'" \
	" OR lease_until = '-infinity'" \
	" OR (lease_until <= $1 AND route " in " ($2)))"

void
idem_sweep_start(IdemSweep *sweep, Oid relid)
{
	memset(sweep, 0, sizeof(*sweep));
	sweep->relid = relid;
	sweep->max = PG_INT64_MAX;
	sweep->now = GetCurrentTimestamp();
	sweep->position.expires_at = DT_NOBEGIN;
	sweep->context = AllocSetContextCreate(CurrentMemoryContext,
										   "pg_idem expired keys",
										   ALLOCSET_DEFAULT_SIZES);
	sweep->slice = 1;
	sweep->pages = 32;
}

static bool
is_over(TimestampTz start, int msecs)
{
	return TimestampDifferenceExceeds(start, GetCurrentTimestamp(), msecs);
}

/* Twice as much, or half, by whether the last piece of work took too long */
static int64
next_size(int64 size, TimestampTz start)
{
	return is_over(start, MAX_SLICE_MSECS) ? Max(size / 2, 1) : size * 2;
}

static void
run_sql(const char *sql, int nargs, Oid *types, Datum *values, int expected)
{
	int			rc = SPI_execute_with_args(sql, nargs, types, values, NULL,
										   false, 0);

	if (rc != expected)
		elog(ERROR, "could not run \"%s\": %s", sql,
			 SPI_result_code_string(rc));
}

/*
 * The first row of the sweep that cannot go is logged with the reason; all are
 * counted, and the sum is told at the end.
 */
static void
note_stuck(IdemSweep *sweep, const char *name, const IdemExpired *expired,
		   const char *reason)
{
	if (sweep->stuck++ == 0)
		ereport(LOG,
				(errmsg("could not remove expired idempotency key \"%s\" from %s: %s",
						text_to_cstring(expired->key), name, reason)));
}

/* ----------------------------------------------------------------
 *		Picking
 * ----------------------------------------------------------------
 */

static const char *
expired_condition(void)
{
	return idem_on_lost_lease == IDEM_LOST_HOLD ?
		HAS_EXPIRED("= ANY") : HAS_EXPIRED("<> ALL");
}

/*
 * The routes whose on_lost_lease is not what the setting says, as text[]:
 * the held ones among those that resume, or the other way round.
 */
static Datum
exceptional_routes(void)
{
	List	   *routes = idem_policies_of_routes();
	Datum	   *names = palloc((list_length(routes) + 1) * sizeof(Datum));
	int			n = 0;
	ListCell   *lc;

	foreach(lc, routes)
	{
		IdemPolicyOfRoute *route = lfirst(lc);

		if ((int) route->policy.on_lost_lease != idem_on_lost_lease)
			names[n++] = PointerGetDatum(route->route);
	}
	return PointerGetDatum(construct_array(names, n, TEXTOID, -1, false,
										   TYPALIGN_INT));
}

/*
 * Keep the rows that SPI has returned, beyond the end of its connection; the
 * first of them, if all would be too large.
 */
static void
keep_picked(IdemSweep *sweep, SPITupleTable *rows, uint64 n)
{
	MemoryContext oldcontext;
	Size		bytes = 0;

	MemoryContextReset(sweep->context);
	oldcontext = MemoryContextSwitchTo(sweep->context);
	sweep->picked = palloc(n * sizeof(IdemExpired));
	for (uint64 i = 0; i < n; i++)
	{
		IdemExpired *row = &sweep->picked[i];

		row->tid = *(ItemPointer) DatumGetPointer(idem_returned(rows, i, 1));
		row->expires_at = DatumGetTimestampTz(idem_returned(rows, i, 2));
		row->key = DatumGetTextPCopy(idem_returned(rows, i, 3));
		row->tenant = DatumGetTextPCopy(idem_returned(rows, i, 4));
		row->route = DatumGetTextPCopy(idem_returned(rows, i, 5));
		row->is_referred_to = false;
		bytes += VARSIZE(row->key) + VARSIZE(row->tenant) +
			VARSIZE(row->route);
		if (bytes > MAX_PICKED_BYTES)
			n = i + 1;
	}
	MemoryContextSwitchTo(oldcontext);
	sweep->npicked = (int) n;
	sweep->next = 0;
}

/*
 * Remember the last row met.  Returns false if that is where we were before:
 * names are cut that no function of ours would have stored.
 */
static bool
advance(IdemSweep *sweep, const IdemExpired *row)
{
	IdemSweepPosition position;

	memset(&position, 0, sizeof(position));
	position.expires_at = row->expires_at;
	text_to_cstring_buffer(row->key, position.key, sizeof(position.key));
	text_to_cstring_buffer(row->tenant, position.tenant,
						   sizeof(position.tenant));
	text_to_cstring_buffer(row->route, position.route,
						   sizeof(position.route));
	if (memcmp(&position, &sweep->position, sizeof(position)) == 0)
		return false;
	sweep->position = position;
	return true;
}

/* ----------------------------------------------------------------
 *		Leaving out what foreign keys refer to
 *
 * Without this each such row would cost a subtransaction that fails.  It is
 * only a short cut: whatever is missed here, or begins to be referred to
 * after, is still kept by the foreign key itself.
 * ----------------------------------------------------------------
 */

/* Rows, and a foreign key that may refer to some of them */
typedef struct References
{
	IdemExpired *rows;
	int			n;
	HeapTuple	constraint;		/* of pg_constraint */
	Relation	rel;			/* the table that has it */
	int			found;			/* how many that we did not know of ... */
	int			first;			/* ... and the first of them */
} References;

/* A column of the rows as text[] */
static Datum
names_of(const IdemExpired *rows, int n, AttrNumber attno)
{
	Datum	   *names = palloc(n * sizeof(Datum));

	for (int i = 0; i < n; i++)
		names[i] = PointerGetDatum(attno == Anum_key_key ? rows[i].key :
								   attno == Anum_key_tenant ? rows[i].tenant :
								   rows[i].route);
	return PointerGetDatum(construct_array(names, n, TEXTOID, -1, false,
										   TYPALIGN_INT));
}

/* The operator of this OID, for use in SQL */
static char *
qualified_operator(Oid oprid)
{
	HeapTuple	tuple = SearchSysCache1(OPEROID, ObjectIdGetDatum(oprid));
	Form_pg_operator form;
	char	   *result;

	if (!HeapTupleIsValid(tuple))
		elog(ERROR, "cache lookup failed for operator %u", oprid);
	form = (Form_pg_operator) GETSTRUCT(tuple);
	result = psprintf("OPERATOR(%s.%s)",
					  quote_identifier(get_namespace_name(form->oprnamespace)),
					  NameStr(form->oprname));
	ReleaseSysCache(tuple);
	return result;
}

/* Which of the rows does the foreign key refer to? */
static void
find_referred_to(void *arg)
{
	References *refs = arg;
	AttrNumber	columns[INDEX_MAX_KEYS];
	AttrNumber	key_columns[INDEX_MAX_KEYS];
	Oid			operators[INDEX_MAX_KEYS];
	int			nkeys;
	Oid			types[3] = {TEXTARRAYOID, TEXTARRAYOID, TEXTARRAYOID};
	Datum		values[3];
	StringInfoData sql;
	IdemCaller	caller;

	DeconstructFkConstraintRow(refs->constraint, &nkeys, columns, key_columns,
							   operators, NULL, NULL, NULL, NULL);
	initStringInfo(&sql);
	appendStringInfo(&sql,
					 "SELECT k.n FROM unnest($1, $2, $3)"
					 " WITH ORDINALITY AS k (c1, c2, c3, n)"
					 " WHERE EXISTS (SELECT FROM %s%s f WHERE true",
					 refs->rel->rd_rel->relkind == RELKIND_PARTITIONED_TABLE ?
					 "" : "ONLY ", idem_qualified_name(refs->rel));
	for (int i = 0; i < nkeys; i++)
		appendStringInfo(&sql, " AND k.c%d %s f.%s", key_columns[i],
						 qualified_operator(operators[i]),
						 quote_identifier(get_attname(RelationGetRelid(refs->rel),
													  columns[i], false)));
	appendStringInfoChar(&sql, ')');

	for (int i = 0; i < 3; i++)
		values[i] = names_of(refs->rows, refs->n, i + 1);
	idem_become_owner(refs->rel, &caller);
	run_sql(sql.data, 3, types, values, SPI_OK_SELECT);
	for (uint64 i = 0; i < SPI_processed; i++)
	{
		int			n = (int) DatumGetInt64(idem_returned(SPI_tuptable, i, 1));

		if (refs->rows[n - 1].is_referred_to)
			continue;
		refs->rows[n - 1].is_referred_to = true;
		refs->first = refs->found++ == 0 ? n - 1 : Min(refs->first, n - 1);
	}
	SPI_freetuptable(SPI_tuptable);
	idem_become_caller(&caller);
}

/* The constraints that may keep a key of the store from going */
static List *
constraints_on(Relation store)
{
	TriggerDesc *triggers = store->trigdesc;
	List	   *constraints = NIL;

	for (int i = 0; triggers != NULL && i < triggers->numtriggers; i++)
	{
		Trigger    *trigger = &triggers->triggers[i];

		if (trigger->tgenabled != TRIGGER_DISABLED &&
			(trigger->tgfoid == F_RI_FKEY_NOACTION_DEL ||
			 trigger->tgfoid == F_RI_FKEY_RESTRICT_DEL))
			constraints = list_append_unique_oid(constraints,
												 trigger->tgconstraint);
	}
	return constraints;
}

/*
 * Mark those of the rows that one foreign key refers to.  False if its table
 * is locked by somebody: then no row can go just now.
 */
static bool
mark_referred_to(IdemSweep *sweep, const char *name, References *refs)
{
	Form_pg_constraint form = (Form_pg_constraint) GETSTRUCT(refs->constraint);
	ErrorData  *error = NULL;

	if (!sweep->waits &&
		!ConditionalLockRelationOid(form->conrelid, AccessShareLock))
		return false;
	refs->rel = try_table_open(form->conrelid,
							   sweep->waits ? AccessShareLock : NoLock);
	if (refs->rel == NULL)
		return true;

	refs->found = 0;
	if (!idem_try(find_referred_to, refs, &error))
		FreeErrorData(error);	/* then each row has to be tried */
	if (refs->found > 0)
	{
		note_stuck(sweep, name, &refs->rows[refs->first],
				   psprintf("foreign key constraint \"%s\" on table \"%s\" refers to it",
							NameStr(form->conname),
							RelationGetRelationName(refs->rel)));
		sweep->stuck += refs->found - 1;
	}
	table_close(refs->rel, NoLock);
	return true;
}

/* The same for all foreign keys that may keep a key of the store from going */
static bool
mark_all_referred_to(IdemSweep *sweep, Relation store, const char *name)
{
	References	refs = {.rows = sweep->picked,.n = sweep->npicked};
	ListCell   *lc;

	foreach(lc, constraints_on(store))
	{
		bool		known;

		refs.constraint = SearchSysCacheCopy1(CONSTROID,
											  ObjectIdGetDatum(lfirst_oid(lc)));
		if (!HeapTupleIsValid(refs.constraint))
			continue;
		known = mark_referred_to(sweep, name, &refs);
		heap_freetuple(refs.constraint);
		if (!known)
			return false;
	}
	return true;
}

/*
 * Pick the next expired keys.  False if there are none, or they cannot go just
 * now.
 */
static bool
pick(IdemSweep *sweep, Relation store, const char *name)
{
	Oid			types[7] = {TIMESTAMPTZOID, TEXTARRAYOID, TIMESTAMPTZOID,
	TEXTOID, TEXTOID, TEXTOID, INT8OID};
	Datum		values[7];
	SPITupleTable *rows;

	values[0] = TimestampTzGetDatum(sweep->now);
	values[1] = exceptional_routes();
	values[2] = TimestampTzGetDatum(sweep->position.expires_at);
	values[3] = CStringGetTextDatum(sweep->position.key);
	values[4] = CStringGetTextDatum(sweep->position.tenant);
	values[5] = CStringGetTextDatum(sweep->position.route);
	values[6] = Int64GetDatum(Max(Min(sweep->max - sweep->removed, MAX_PICKED),
								  idem_expire_batch));
	run_sql(psprintf("SELECT ctid, expires_at, key, tenant, route"
					 " FROM ONLY %s WHERE %s"
					 " AND (expires_at, key, tenant, route) > ($3, $4, $5, $6)"
					 " ORDER BY expires_at, key, tenant, route LIMIT $7",
					 name, expired_condition()),
			7, types, values, SPI_OK_SELECT);
	rows = SPI_tuptable;
	keep_picked(sweep, rows, SPI_processed);
	SPI_freetuptable(rows);
	return sweep->npicked > 0 && mark_all_referred_to(sweep, store, name);
}

/* ----------------------------------------------------------------
 *		Removing
 * ----------------------------------------------------------------
 */

/* Rows that are deleted in one go */
typedef struct Slice
{
	const char *name;			/* of the store */
	TimestampTz now;
	Datum	   *tids;
	int			n;
} Slice;

/* Say in the log, once it is certain, which unfinished claims have gone. */
static void
log_unfinished(SPITupleTable *rows, uint64 n)
{
	for (uint64 i = 0; i < n; i++)
	{
		if (DatumGetBool(idem_returned(rows, i, 4)))
			idem_log_after_commit(psprintf("removed unfinished idempotency key \"%s\"",
										   idem_returned_string(rows, i, 1)),
								  psprintf("Tenant \"%s\", route \"%s\", attempt %d; its lease and its retention are over.",
										   idem_returned_string(rows, i, 2),
										   idem_returned_string(rows, i, 3),
										   DatumGetInt32(idem_returned(rows, i, 5))));
	}
}

static void
delete_slice(void *arg)
{
	const Slice *slice = arg;
	Oid			types[3] = {TIMESTAMPTZOID, TEXTARRAYOID, TIDARRAYOID};
	Datum		values[3];
	char	   *sql;

	sql = psprintf("DELETE FROM ONLY %s WHERE ctid = ANY (ARRAY ("
				   "SELECT ctid FROM ONLY %s WHERE ctid = ANY ($3) AND %s"
				   " FOR UPDATE SKIP LOCKED))"
				   " RETURNING key, tenant, route,"
				   " state IS NOT DISTINCT FROM 'in_progress',"
				   " coalesce(attempt, 0)",
				   slice->name, slice->name, expired_condition());
	values[0] = TimestampTzGetDatum(slice->now);
	values[1] = exceptional_routes();
	values[2] = PointerGetDatum(construct_array(slice->tids, slice->n, TIDOID,
												sizeof(ItemPointerData), false,
												TYPALIGN_SHORT));
	run_sql(sql, 3, types, values, SPI_OK_DELETE_RETURNING);
	log_unfinished(SPI_tuptable, SPI_processed);
	pfree(sql);
}

/*
 * Delete as many of the next n rows as make a slice.  Returns how many have
 * had their turn, gone or not: 0 if one of them is in the way of the others.
 */
static int
remove_slice(IdemSweep *sweep, const char *name, int n)
{
	IdemExpired *rows = &sweep->picked[sweep->next];
	Slice		slice = {.name = name,.now = sweep->now};
	ErrorData  *error = NULL;
	TimestampTz start = GetCurrentTimestamp();
	int			met = 0;

	slice.tids = palloc(sweep->slice * sizeof(Datum));
	for (; met < n && slice.n < sweep->slice; met++)
	{
		if (!rows[met].is_referred_to)
			slice.tids[slice.n++] = PointerGetDatum(&rows[met].tid);
	}
	if (slice.n == 0)
		return met;

	if (idem_try(delete_slice, &slice, &error))
	{
		sweep->removed += SPI_processed;
		SPI_freetuptable(SPI_tuptable);
		sweep->slice = (int) Min(next_size(sweep->slice, start),
								 idem_expire_batch);
	}
	else
	{
		sweep->failures++;
		sweep->slice = 1;
		if (slice.n > 1)
			met = 0;
		else
			note_stuck(sweep, name, &rows[met - 1], error->message);
		FreeErrorData(error);
	}
	pfree(slice.tids);
	return met;
}

static bool
has_failed_too_often(const IdemSweep *sweep)
{
	return !sweep->by_hand && sweep->failures >= MAX_FAILURES;
}

/* Pick expired keys of a store, or remove some of those that were picked. */
bool
idem_remove_keys(IdemSweep *sweep, Relation rel, const char *name)
{
	TimestampTz start = GetCurrentTimestamp();
	int			size;
	int			done = 0;

	if (sweep->next == sweep->npicked)
		return pick(sweep, rel, name);

	size = (int) Min(Min(sweep->npicked - sweep->next, idem_expire_batch),
					 sweep->max - sweep->removed);
	while (done < size && !has_failed_too_often(sweep) &&
		   (done == 0 || !is_over(start, MAX_BATCH_MSECS)))
	{
		int			met = remove_slice(sweep, name, size - done);

		CHECK_FOR_INTERRUPTS();
		done += met;
		sweep->next += met;
	}

	if (done > 0 && !advance(sweep, &sweep->picked[sweep->next - 1]) &&
		sweep->next == sweep->npicked)
		return false;
	return !has_failed_too_often(sweep) && sweep->removed < sweep->max;
}

/*
 * Drop the results whose response_ttl is over, in the next pages of a store.
 * There is no index on finished_at, so that idem_finish is HOT; the table is
 * read through once, as many pages at a time as promise to be done quickly.
 */
bool
idem_drop_results(IdemSweep *sweep, Relation rel, const char *name)
{
	List	   *routes = idem_policies_of_routes();
	Datum	   *names = palloc((list_length(routes) + 1) * sizeof(Datum));
	Datum	   *ttls = palloc((list_length(routes) + 1) * sizeof(Datum));
	Oid			types[5] = {TIMESTAMPTZOID, TIDOID, TIDOID, TEXTARRAYOID,
	INTERVALARRAYOID};
	Datum		values[5];
	ItemPointerData from;
	ItemPointerData to;
	TimestampTz start = GetCurrentTimestamp();
	BlockNumber end = RelationGetNumberOfBlocks(rel);
	BlockNumber pages = Min(sweep->pages, end - Min(sweep->results_block, end));
	ListCell   *lc;
	int			n = 0;

	foreach(lc, routes)
	{
		IdemPolicyOfRoute *route = lfirst(lc);

		if (!route->policy.has_response_ttl)
			continue;
		names[n] = PointerGetDatum(route->route);
		ttls[n++] = IntervalPGetDatum(&route->policy.response_ttl);
	}
	if (n == 0 || pages == 0)
	{
		sweep->results_block = 0;
		return false;
	}

	ItemPointerSet(&from, sweep->results_block, 0);
	ItemPointerSet(&to, sweep->results_block + pages, 0);
	values[0] = TimestampTzGetDatum(sweep->now);
	values[1] = PointerGetDatum(&from);
	values[2] = PointerGetDatum(&to);
	values[3] = PointerGetDatum(construct_array(names, n, TEXTOID, -1, false,
												TYPALIGN_INT));
	values[4] = PointerGetDatum(construct_array(ttls, n, INTERVALOID,
												sizeof(Interval), false,
												TYPALIGN_DOUBLE));
	run_sql(psprintf("UPDATE ONLY %s SET headers = NULL, response = NULL,"
					 " body = NULL, result_dropped = true"
					 " WHERE ctid = ANY (ARRAY (SELECT k.ctid FROM ONLY %s k"
					 " WHERE k.ctid >= $2 AND k.ctid < $3"
					 " AND NOT k.result_dropped"
					 " AND EXISTS (SELECT FROM unnest($4, $5) AS r (route, ttl)"
					 " WHERE r.route = k.route"
					 " AND CASE WHEN k.finished_at <= $1"
					 " THEN k.finished_at + r.ttl <= $1 END)"
					 " FOR UPDATE OF k SKIP LOCKED))",
					 name, name),
			5, types, values, SPI_OK_UPDATE);

	sweep->results_block += pages;
	sweep->pages = (BlockNumber) Min(next_size(sweep->pages, start),
									 MaxBlockNumber / 2);
	return true;
}

/* Remove the next dead letters whose time is over, from the outbox. */
bool
idem_remove_dead_letters(IdemSweep *sweep, Relation rel, const char *name)
{
	int64		failed = 0;
	bool		more;

	if (idem_outbox_dead_ttl == 0)
		return false;
	more = idem_outbox_purge(name,
							 sweep->now - idem_outbox_dead_ttl * USECS_PER_SEC,
							 &sweep->position.dead_letter, idem_expire_batch,
							 &failed);
	sweep->stuck += failed;
	sweep->failures += (int) failed;
	return more && !has_failed_too_often(sweep);
}

/* ----------------------------------------------------------------
 *		A step, and the end
 * ----------------------------------------------------------------
 */

/* Open the table; NULL if it is gone, or somebody has it locked. */
static Relation
open_for_sweep(const IdemSweep *sweep)
{
	if (sweep->waits)
		return try_table_open(sweep->relid, RowExclusiveLock);
	if (!ConditionalLockRelationOid(sweep->relid, RowExclusiveLock))
		return NULL;
	return try_table_open(sweep->relid, NoLock);
}

/*
 * Is it what it is taken for?  Anybody may make a table of our type, and the
 * owner of the outbox may change it.
 */
static bool
may_be_swept(IdemSweep *sweep, Relation rel)
{
	IdemStoreDefect defect;

	if (sweep->relid == idem_catalog()->outbox)
		return idem_is_outbox(rel);
	if (idem_is_store(rel, &defect))
		return true;

	/* a temporary table is its session's own affair */
	if (rel->rd_rel->relpersistence != RELPERSISTENCE_TEMP)
	{
		sweep->is_no_store = true;
		sweep->defect =
			MemoryContextStrdup(MemoryContextGetParent(sweep->context),
								psprintf("Table \"%s\": %s",
										 RelationGetRelationName(rel),
										 defect.detail));
	}
	return false;
}

/*
 * Run the next batch of one kind, as the table's owner.  Needs a transaction
 * and an active snapshot.
 */
bool
idem_sweep_step(IdemSweep *sweep, IdemSweepStep step)
{
	Relation	rel = open_for_sweep(sweep);
	IdemCaller	caller;
	bool		more;

	if (rel == NULL)
		return false;
	if (!may_be_swept(sweep, rel))
	{
		table_close(rel, NoLock);
		return false;
	}

	idem_become_owner(rel, &caller);

	/*
	 * Rows are looked for by expires_at, and then by their places.  A planner
	 * that thinks this dear reads the whole table instead, for each slice.
	 */
	(void) set_config_option("random_page_cost", "0.1", PGC_USERSET,
							 PGC_S_SESSION, GUC_ACTION_SAVE, true, 0, false);
	SPI_connect();
	if (!sweep->by_hand)
		run_sql("SET CONSTRAINTS ALL IMMEDIATE", 0, NULL, NULL,
				SPI_OK_UTILITY);
	more = step(sweep, rel, idem_qualified_name(rel));
	SPI_finish();
	idem_become_caller(&caller);
	table_close(rel, NoLock);
	return more;
}

/* Tell what a sweep could not remove: whoever called, or the log. */
void
idem_sweep_tell(const IdemSweep *sweep)
{
	char	   *name = get_rel_name(sweep->relid);

	if (sweep->stuck == 0 || name == NULL)
		return;
	ereport(sweep->by_hand ? NOTICE : LOG,
			(errmsg_plural("%lld expired row of table \"%s\" could not be removed",
						   "%lld expired rows of table \"%s\" could not be removed",
						   sweep->stuck, (long long) sweep->stuck, name),
			 errhint("A foreign key keeps a row for as long as another refers to it; a deferred trigger keeps it in a transaction that did not run SET CONSTRAINTS ALL IMMEDIATE.")));
}

/* ----------------------------------------------------------------
 *		By hand
 * ----------------------------------------------------------------
 */

/* One step after the other, in the caller's transaction */
static void
run_by_hand(IdemSweep *sweep, IdemSweepStep step)
{
	while (idem_sweep_step(sweep, step))
		CHECK_FOR_INTERRUPTS();
}

/*
 * Sweep one of the extension's own tables in the caller's transaction.
 * Returns how many keys went.
 */
static int64
sweep_by_hand(Oid relid, int64 max, IdemSweepStep step)
{
	IdemSweep	sweep;

	idem_sweep_start(&sweep, relid);
	sweep.by_hand = true;
	sweep.waits = true;
	sweep.max = max;
	run_by_hand(&sweep, step);
	idem_sweep_tell(&sweep);
	MemoryContextDelete(sweep.context);
	return sweep.removed;
}

static void
sweep_further_store(void *arg)
{
	IdemSweep  *sweep = arg;

	run_by_hand(sweep, idem_remove_keys);
	run_by_hand(sweep, idem_drop_results);
	idem_sweep_tell(sweep);
}

/*
 * Sweep a further store.  It may be anybody's, and its owner must not keep the
 * others' keys from going, by an error or by a lock.
 */
static int64
sweep_further_by_hand(Oid relid, int64 max)
{
	IdemSweep	sweep;
	ErrorData  *error = NULL;

	idem_sweep_start(&sweep, relid);
	sweep.by_hand = true;
	sweep.max = max;
	if (!idem_try(sweep_further_store, &sweep, &error))
	{
		ereport(WARNING,
				(errcode(error->sqlerrcode),
				 errmsg("could not remove expired keys from table \"%s\": %s",
						get_rel_name(relid), error->message)));
		FreeErrorData(error);
		sweep.removed = 0;
	}
	MemoryContextDelete(sweep.context);
	return sweep.removed;
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
		if (relid == default_store)
		{
			removed += sweep_by_hand(relid, max - removed, idem_remove_keys);
			(void) sweep_by_hand(relid, max, idem_drop_results);
		}
		else if (SearchSysCacheExists1(RELOID, ObjectIdGetDatum(relid)) &&
				 object_ownercheck(RelationRelationId, relid, GetUserId()))
			removed += sweep_further_by_hand(relid, max - removed);
	}
	(void) sweep_by_hand(idem_catalog()->outbox, max,
						 idem_remove_dead_letters);
	PG_RETURN_INT64(removed);
}
