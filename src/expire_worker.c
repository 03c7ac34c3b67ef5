/*-------------------------------------------------------------------------
 *
 * expire_worker.c
 *	  The short-lived worker that sweeps the tables of one database.
 *
 * First come the default store and the outbox, with half of the time, then
 * the further stores, beginning behind the one that had the last turn; so
 * a table that takes long holds up the others for one round at most.  A table
 * in trouble is put off for a while, or swept from behind the rows that cannot
 * go (expire_shared.c); the others are swept as ever.
 *
 * In whose way: a worker asks before each batch whether somebody wants the
 * database, and never waits for the lock on a table.  As it may be held up by
 * a trigger or a foreign key, each step has a limit, and so has the wait for
 * any lock.  The launcher ends a worker that is held up all the same.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/pg_database.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/lmgr.h"
#include "storage/proc.h"
#include "tcop/tcopprot.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/timeout.h"

#include "expire.h"
#include "catalog.h"

/*
 * What a worker may take: a step of it, before it is cancelled, and all of
 * it, before it leaves the rest to the next one.
 */
#define MAX_STEP_MSECS	10000
#define MAX_SWEEP_MSECS	30000

/* The worker and what it has found out */
typedef struct Worker
{
	IdemOrder	order;
	IdemReport	report;
	TimestampTz start;
	Oid			default_store;
	Oid			outbox;
	List	   *further_stores; /* in the order of their turns */
	const char *defect;			/* of the first table that is no store */
} Worker;

/*
 * Settings of the database or the server that must not reach a sweep.
 * Foreign keys must protect the keys that they refer to; an error must not
 * end the worker, nor a limit that is not its own; and no standby is waited
 * for: nobody was told that the keys are gone, and a dead standby must not
 * hold up a shutdown.
 */
static void
override_settings(void)
{
	static const char *const settings[][2] = {
		{"default_transaction_isolation", "read committed"},
		{"default_transaction_read_only", "off"},
		{"default_transaction_deferrable", "off"},
		{"session_replication_role", "origin"},
		{"exit_on_error", "off"},
		{"row_security", "on"},
		{"transaction_timeout", "0"}
	};

	for (int i = 0; i < lengthof(settings); i++)
	{
		/* not every server has them all */
		if (GetConfigOption(settings[i][0], true, false) != NULL)
			SetConfigOption(settings[i][0], settings[i][1],
							PGC_SUSET, PGC_S_OVERRIDE);
	}
	if (synchronous_commit > SYNCHRONOUS_COMMIT_LOCAL_FLUSH)
		SetConfigOption("synchronous_commit", "local",
						PGC_SUSET, PGC_S_OVERRIDE);
}

/*
 * Does somebody want this database to themselves: DROP DATABASE, ALTER
 * DATABASE RENAME or SET TABLESPACE, CREATE DATABASE ... TEMPLATE?  All of
 * them lock the database and then wait, 5 seconds long, for the others in it
 * to leave.
 */
static bool
database_is_wanted(void)
{
	LOCKTAG		tag;

	SET_LOCKTAG_OBJECT(tag, InvalidOid, DatabaseRelationId, MyDatabaseId, 0);
	if (LockAcquire(&tag, RowExclusiveLock, false, true) ==
		LOCKACQUIRE_NOT_AVAIL)
		return true;
	LockRelease(&tag, RowExclusiveLock, false);
	return false;
}

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
	QueryCancelPending = false; /* it was for what is done by now */
	pgstat_report_stat(true);
	pgstat_report_activity(STATE_IDLE, NULL);
}

/* What STATEMENT_TIMEOUT or an error has broken off */
static void
abort_step(void)
{
	HOLD_INTERRUPTS();
	disable_timeout(STATEMENT_TIMEOUT, false);
	QueryCancelPending = false;
	EmitErrorReport();
	AbortCurrentTransaction();
	FlushErrorState();
	pgstat_report_stat(true);
	pgstat_report_activity(STATE_IDLE, NULL);
	RESUME_INTERRUPTS();
}

/* The stores but the default one, those behind the given one first */
static List *
further_stores(List *stores, Oid default_store, Oid after)
{
	List	   *behind = NIL;
	List	   *before = NIL;
	ListCell   *lc;

	list_sort(stores, list_oid_cmp);
	foreach(lc, stores)
	{
		Oid			relid = lfirst_oid(lc);

		if (relid == default_store)
			continue;
		if (relid > after)
			behind = lappend_oid(behind, relid);
		else
			before = lappend_oid(before, relid);
	}
	return list_concat(behind, before);
}

/*
 * Find the tables to sweep.  False, with the reason in the report, if the
 * extension is not there, or not for us to use.
 */
static bool
find_tables(Worker *worker)
{
	MemoryContext context = CurrentMemoryContext;
	bool		found = false;

	begin_step("looking for extension pg_idem");
	if (idem_lock_extension() && idem_catalog_exists())
	{
		List	   *stores = idem_stores();

		MemoryContextSwitchTo(context);
		worker->default_store = idem_catalog()->default_store;
		worker->outbox = idem_catalog()->outbox;
		worker->further_stores = further_stores(stores, worker->default_store,
												worker->order.after);
		found = true;
	}
	else
		worker->report.end = idem_extension_is_changing() ?
			IDEM_SWEEP_NOT_NOW : IDEM_SWEEP_ABSENT;
	end_step();
	MemoryContextSwitchTo(context);
	return found;
}

/* One step in a transaction of its own; false if it was the last. */
static bool
run_step(IdemSweep *sweep, IdemSweepStep step)
{
	bool		more = false;
	char	   *name;

	begin_step("removing what is expired");
	name = get_rel_name(sweep->relid);
	if (name != NULL && idem_lock_extension() && idem_catalog_exists() &&
		!database_is_wanted())
	{
		pgstat_report_activity(STATE_RUNNING,
							   psprintf("removing what is expired from \"%s\"",
										name));
		more = idem_sweep_step(sweep, step);
	}
	end_step();
	return more;
}

/*
 * Take one step after the other until there is no more to do, or no more time.
 * False if an error has broken it off, which is in the log by then.
 */
static bool
run_steps(IdemSweep *sweep, IdemSweepStep step, TimestampTz deadline)
{
	MemoryContext context = CurrentMemoryContext;
	volatile bool done = true;

	PG_TRY();
	{
		while (run_step(sweep, step) && GetCurrentTimestamp() < deadline)
		{
			CHECK_FOR_INTERRUPTS();
			MemoryContextSwitchTo(context);
		}
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(context);
		abort_step();
		done = false;
	}
	PG_END_TRY();
	MemoryContextSwitchTo(context);
	return done;
}

/* What could not be removed is told, whatever has ended the sweep. */
static void
tell(IdemSweep *sweep)
{
	if (sweep->stuck == 0)
		return;
	begin_step("removing what is expired");
	idem_sweep_tell(sweep);
	end_step();
}

/*
 * Remember of a sweep what the next one has to know.  It started where it did,
 * behind what gave trouble before, or at the start of the table.
 */
static void
note_outcome(const IdemSweep *sweep, IdemTrouble *trouble, bool was_known,
			 bool from_start)
{
	TimestampTz now = GetCurrentTimestamp();
	bool		results_left = sweep->results_block > 0;

	if (sweep->stuck > 0 && from_start)
	{
		trouble->backoff_secs = idem_longer_backoff(trouble->backoff_secs);
		trouble->start_over_at = now + trouble->backoff_secs * USECS_PER_SEC;
	}
	if (sweep->stuck > 0)
		trouble->position = sweep->position;
	trouble->put_off_until = 0;
	trouble->results_block = sweep->results_block;

	if (sweep->stuck > 0 || results_left || !from_start)
		idem_note_trouble(trouble);
	else if (was_known)
		idem_forget_trouble(trouble->database, trouble->relid);
}

/* Sweep one table, unless it is put off. */
static void
sweep_table(Worker *worker, Oid relid, IdemSweepStep step,
			TimestampTz deadline)
{
	IdemSweep	sweep;
	IdemTrouble trouble;
	bool		was_known = idem_recall_trouble(MyDatabaseId, relid, &trouble);
	bool		from_start;
	bool		done;

	if (trouble.put_off_until > GetCurrentTimestamp())
		return;
	idem_sweep_start(&sweep, relid);
	from_start = (trouble.start_over_at <= sweep.now);
	if (!from_start)
		sweep.position = trouble.position;
	sweep.results_block = trouble.results_block;

	idem_sweep_is_at(MyDatabaseId, relid);
	done = run_steps(&sweep, step, deadline);
	if (done && worker->order.drop_results && step == idem_remove_keys &&
		!run_steps(&sweep, idem_drop_results, deadline))
		sweep.results_block = 0;	/* in an hour, and the keys go meanwhile */
	tell(&sweep);

	if (sweep.results_block > 0)
		worker->report.results_left = true;
	if (sweep.is_no_store && worker->report.no_stores++ == 0)
		worker->defect = sweep.defect;
	if (done)
		note_outcome(&sweep, &trouble, was_known, from_start);
	else
		idem_put_off(MyDatabaseId, relid);
	idem_sweep_is_at(MyDatabaseId, InvalidOid);
	MemoryContextDelete(sweep.context);
}

/*
 * Say in the log that there are tables of our type that are no stores; once,
 * unless they become more.
 */
static void
tell_no_stores(const Worker *worker)
{
	int			n = worker->report.no_stores;

	if (n <= worker->order.no_stores)
		return;
	ereport(LOG,
			(errmsg_plural("%d table of type idempotency_key is no store, and is not swept",
						   "%d tables of type idempotency_key are no stores, and are not swept",
						   n, n),
			 errdetail("%s", worker->defect)));
}

static void
sweep_tables(Worker *worker)
{
	TimestampTz half = TimestampTzPlusMilliseconds(worker->start,
												   MAX_SWEEP_MSECS / 2);
	TimestampTz whole = TimestampTzPlusMilliseconds(worker->start,
													MAX_SWEEP_MSECS);
	TimestampTz deadline = worker->further_stores == NIL ? whole : half;
	ListCell   *lc;

	sweep_table(worker, worker->default_store, idem_remove_keys, deadline);
	sweep_table(worker, worker->outbox, idem_remove_dead_letters, deadline);
	foreach(lc, worker->further_stores)
	{
		if (GetCurrentTimestamp() >= whole)
			break;
		worker->report.after = lfirst_oid(lc);
		sweep_table(worker, lfirst_oid(lc), idem_remove_keys, whole);
	}
	tell_no_stores(worker);

	/* not all have been looked at: there are as many as we knew of */
	if (lc != NULL)
		worker->report.no_stores = Max(worker->report.no_stores,
									   worker->order.no_stores);
}

/*
 * Entry point of the worker: sweep the tables of one database, tell the
 * launcher, end.
 */
void
idem_expire_main(Datum arg)
{
	Oid			database = DatumGetObjectId(arg);
	Worker		worker;

	memset(&worker, 0, sizeof(worker));
	memcpy(&worker.order, MyBgworkerEntry->bgw_extra, sizeof(IdemOrder));
	worker.start = GetCurrentTimestamp();
	worker.report.after = worker.order.after;
	idem_sweep_is_at(database, InvalidOid);

	/* the default of background workers would exit within the handler */
	pqsignal(SIGTERM, die);
	BackgroundWorkerUnblockSignals();

	/*
	 * Somebody may have locked the database, such as a forgotten ALTER
	 * DATABASE; the others must not wait for that.  It holds for all later
	 * locks too, those that a trigger or a foreign key waits for.
	 */
	SetConfigOption("lock_timeout", "1s", PGC_SUSET, PGC_S_OVERRIDE);
	BackgroundWorkerInitializeConnectionByOid(database, InvalidOid, 0);
	override_settings();
	MemoryContextSwitchTo(AllocSetContextCreate(TopMemoryContext,
												"pg_idem sweep",
												ALLOCSET_DEFAULT_SIZES));

	if (find_tables(&worker))
	{
		sweep_tables(&worker);
		worker.report.end = IDEM_SWEEP_DONE;
	}
	idem_sweep_is_at(InvalidOid, InvalidOid);
	idem_report(&worker.report);
	proc_exit(0);
}
