/*-------------------------------------------------------------------------
 *
 * expire_launcher.c
 *	  The background launcher: whose keys are swept when.
 *
 * One static background worker, connected to the shared catalogs only.  It
 * keeps a list of the connectable databases and, for each that is due, starts
 * a short-lived worker (expire_worker.c), one at a time.  That worker says
 * what the sweep came to:
 *
 *		done		due again after pg_idem.expire_naptime; a table that gives
 *					trouble is put off by itself (expire_shared.c)
 *		not now		(the extension is just being made or dropped) due again
 *					soon
 *		absent		(no extension) due again after twice as long as the last
 *					time, up to an hour; CREATE EXTENSION makes the database
 *					due at once
 *		died		if it was at a table, that one is put off; else, such as
 *					in a database that cannot be entered, as for absent
 *
 * so a cluster of a thousand databases that do not use pg_idem pays for one
 * look at pg_database every naptime.  The first sweeps are a naptime after the
 * launcher's start: if one of them crashes the server, it does not do so in
 * each moment that the server is up.
 *
 * The launcher holds no transaction open while it sleeps or waits for a
 * worker, so it keeps no xmin back; it is connected to no database, so it
 * stands in nobody's way.  A database that somebody has locked, to drop or
 * rename it, is passed over.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/heapam.h"
#include "access/table.h"
#include "access/tableam.h"
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
#include "utils/guc.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

#include "expire.h"
#include "catalog.h"

PG_FUNCTION_INFO_V1(idem_created);

/*
 * Time between two sweeps of a database that also drop results, for which
 * its stores are read through
 */
#define DROP_RESULTS_SECS	3600

/* Time until another look at a database where the extension is changing */
#define SOON_SECS			10

/* Longest life of a worker, which ends by itself after half a minute */
#define MAX_WORKER_SECS		45

StaticAssertDecl(sizeof(IdemOrder) <= BGW_EXTRALEN,
				 "an order must fit into bgw_extra");

/* What the launcher knows of a database */
typedef struct DatabaseState
{
	Oid			oid;			/* hash key */
	TimestampTz due;
	TimestampTz drop_due;		/* when results are to be dropped, too */
	int			backoff_secs;	/* 0 while sweeps go well */
	IdemOrder	order;			/* for the next worker */
	bool		seen;			/* in pg_database at the last look? */
} DatabaseState;

static HTAB *databases = NULL;

/* ----------------------------------------------------------------
 *		In a backend that runs CREATE EXTENSION
 * ----------------------------------------------------------------
 */

/* this transaction has run the script of the extension */
static bool has_created = false;

static void
tell_what_is_missing(void)
{
	ereport(NOTICE,
			(errmsg("pg_idem is not in shared_preload_libraries"),
			 errdetail("Without it no background worker removes expired keys, and there are no retry budgets, circuit breakers and statistics."),
			 errhint("Add pg_idem to shared_preload_libraries and restart the server; until then, call idem_expire() at regular times.")));
}

static void
transaction_ended(XactEvent event, void *arg)
{
	if (!has_created)
		return;
	switch (event)
	{
		case XACT_EVENT_PRE_COMMIT:
		case XACT_EVENT_PRE_PREPARE:
			/* a savepoint may have been rolled back */
			has_created = idem_catalog_exists();
			if (has_created && !idem_expire_has_shmem())
				tell_what_is_missing();
			break;

		case XACT_EVENT_COMMIT:
		case XACT_EVENT_PREPARE:
			/* nobody tells of COMMIT PREPARED: the worker will see it come */
			if (idem_expire_has_shmem())
				idem_wake_launcher(MyDatabaseId);
			has_created = false;
			break;

		case XACT_EVENT_ABORT:
			has_created = false;
			break;

		default:
			break;
	}
}

/*
 * Called at the end of the install script.  What it has to say is said at
 * commit, since scripts run with client_min_messages at "warning".
 */
Datum
idem_created(PG_FUNCTION_ARGS)
{
	static bool registered = false;

	if (!registered)
		RegisterXactCallback(transaction_ended, NULL);
	registered = true;
	has_created = true;
	PG_RETURN_VOID();
}

/* ----------------------------------------------------------------
 *		The list of databases
 * ----------------------------------------------------------------
 */

/*
 * Note a row of pg_database.  A database that is new to us has its first sweep
 * at the given time.
 */
static void
note_database(Form_pg_database db, TimestampTz first)
{
	DatabaseState *state;
	bool		found;

	if (db->datistemplate || !db->datallowconn ||
		db->datconnlimit == DATCONNLIMIT_INVALID_DB)
		return;

	state = hash_search(databases, &db->oid, HASH_ENTER, &found);
	if (!found)
	{
		memset((char *) state + sizeof(Oid), 0,
			   sizeof(DatabaseState) - sizeof(Oid));
		state->due = first;
		state->drop_due = first;
	}
	state->seen = true;
}

/* Bring the list of databases up to date with pg_database. */
static void
refresh_databases(void)
{
	TimestampTz first = GetCurrentTimestamp() +
		idem_expire_naptime * USECS_PER_SEC;
	HASH_SEQ_STATUS seq;
	DatabaseState *state;
	Relation	rel;
	TableScanDesc scan;
	HeapTuple	tuple;

	hash_seq_init(&seq, databases);
	while ((state = hash_seq_search(&seq)) != NULL)
		state->seen = false;

	StartTransactionCommand();
	(void) GetTransactionSnapshot();
	rel = table_open(DatabaseRelationId, AccessShareLock);
	scan = table_beginscan_catalog(rel, 0, NULL);
	while (HeapTupleIsValid(tuple = heap_getnext(scan, ForwardScanDirection)))
		note_database((Form_pg_database) GETSTRUCT(tuple), first);
	table_endscan(scan);
	table_close(rel, AccessShareLock);
	CommitTransactionCommand();

	hash_seq_init(&seq, databases);
	while ((state = hash_seq_search(&seq)) != NULL)
	{
		if (!state->seen)
			hash_search(databases, &state->oid, HASH_REMOVE, NULL);
	}
}

/* Make due what other backends have asked for. */
static void
take_wake_ups(void)
{
	TimestampTz now = GetCurrentTimestamp();
	HASH_SEQ_STATUS seq;
	DatabaseState *state;
	Oid			database;

	if (!idem_launcher_take_wake_up(&database))
		return;
	hash_seq_init(&seq, databases);
	while ((state = hash_seq_search(&seq)) != NULL)
	{
		if (!OidIsValid(database) || state->oid == database)
		{
			state->due = now;
			state->backoff_secs = 0;
		}
	}
}

/* When a database is due, by the settings and the clock as they are now */
static TimestampTz
time_of_next_sweep(DatabaseState *state, TimestampTz now)
{
	state->due = idem_not_later_than(state->due, now, state->backoff_secs);
	state->drop_due = idem_not_later_than(state->drop_due, now,
										  DROP_RESULTS_SECS);
	return state->due;
}

static TimestampTz
after_naptime(void)
{
	return GetCurrentTimestamp() + idem_expire_naptime * USECS_PER_SEC;
}

/* ----------------------------------------------------------------
 *		A sweep
 * ----------------------------------------------------------------
 */

/*
 * Sleep until the latch is set or the time is up; then do what every loop
 * must.  Returns false when the launcher is to end.
 */
static bool
nap(long msecs)
{
	(void) WaitLatch(MyLatch,
					 WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
					 msecs, IDEM_WAIT_EVENT("IdemLauncherMain"));
	ResetLatch(MyLatch);
	CHECK_FOR_INTERRUPTS();
	if (ConfigReloadPending)
	{
		ConfigReloadPending = false;
		ProcessConfigFile(PGC_SIGHUP);
	}
	return !ShutdownRequestPending;
}

/*
 * Has somebody locked the database against new connections?  A worker would
 * wait for that.
 */
static bool
database_is_locked(Oid database)
{
	LOCKTAG		tag;
	bool		locked;

	SET_LOCKTAG_OBJECT(tag, InvalidOid, DatabaseRelationId, database, 0);
	StartTransactionCommand();
	locked = LockAcquire(&tag, RowExclusiveLock, false, true) ==
		LOCKACQUIRE_NOT_AVAIL;
	CommitTransactionCommand();
	return locked;
}

/* Start the worker that sweeps a database.  False if there is no slot. */
static bool
start_worker(const DatabaseState *state, BackgroundWorkerHandle **handle)
{
	BackgroundWorker worker;

	memset(&worker, 0, sizeof(worker));
	worker.bgw_flags = BGWORKER_SHMEM_ACCESS |
		BGWORKER_BACKEND_DATABASE_CONNECTION;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = BGW_NEVER_RESTART;
	strlcpy(worker.bgw_library_name, "pg_idem", sizeof(worker.bgw_library_name));
	strlcpy(worker.bgw_function_name, "idem_expire_main",
			sizeof(worker.bgw_function_name));
	snprintf(worker.bgw_name, BGW_MAXLEN,
			 "pg_idem expiry worker for database %u", state->oid);
	strlcpy(worker.bgw_type, "pg_idem expiry worker", BGW_MAXLEN);
	worker.bgw_main_arg = ObjectIdGetDatum(state->oid);
	memcpy(worker.bgw_extra, &state->order, sizeof(IdemOrder));
	worker.bgw_notify_pid = MyProcPid;
	return RegisterDynamicBackgroundWorker(&worker, handle);
}

/*
 * Wait for the end of a worker, and end it if it takes too long.  Returns
 * false if the launcher is to end, and the worker with it.
 */
static bool
wait_for_worker(BackgroundWorkerHandle *handle)
{
	TimestampTz start = GetCurrentTimestamp();
	bool		terminated = false;
	BgwHandleStatus status;
	pid_t		pid;

	/* the worker's end sets our latch; it ends at once on a shutdown too */
	while ((status = GetBackgroundWorkerPid(handle, &pid)) != BGWH_STOPPED)
	{
		if (status == BGWH_POSTMASTER_DIED)
			proc_exit(1);
		if (!nap(1000L))
		{
			TerminateBackgroundWorker(handle);
			return false;
		}
		if (!terminated &&
			TimestampDifferenceExceeds(start, GetCurrentTimestamp(),
									   MAX_WORKER_SECS * 1000))
		{
			TerminateBackgroundWorker(handle);
			terminated = true;
		}
	}
	return true;
}

/* Decide when a database has its next sweep, by what came of this one. */
static void
note_report(DatabaseState *state, const IdemReport *report)
{
	TimestampTz now = GetCurrentTimestamp();
	int			naptime = idem_expire_naptime;
	bool		well = false;
	Oid			relid;

	switch (report->end)
	{
		case IDEM_SWEEP_DONE:
			well = true;
			if (state->order.drop_results && !report->results_left)
				state->drop_due = now + DROP_RESULTS_SECS * USECS_PER_SEC;
			state->order.after = report->after;
			state->order.no_stores = report->no_stores;
			break;

		case IDEM_SWEEP_NOT_NOW:
			naptime = Min(naptime, SOON_SECS);
			well = true;
			break;

		case IDEM_SWEEP_ABSENT:
			break;

		case IDEM_SWEEP_DIED:
			/* not of the database, if it was at one of the tables */
			if (idem_sweep_ended_at(&relid) && OidIsValid(relid))
			{
				idem_put_off(state->oid, relid);
				well = true;
			}
			break;
	}

	state->backoff_secs = well ? 0 : idem_longer_backoff(state->backoff_secs);
	state->due = now + Max(state->backoff_secs, naptime) * USECS_PER_SEC;
}

/* Sweep one database and wait for the end of it. */
static void
sweep_database(DatabaseState *state)
{
	static bool complained = false;
	BackgroundWorkerHandle *handle;
	IdemReport	report;
	IdemTrouble trouble;

	/* the server has crashed while a worker was starting there */
	if (idem_recall_trouble(state->oid, InvalidOid, &trouble))
	{
		idem_forget_trouble(state->oid, InvalidOid);
		state->backoff_secs = trouble.backoff_secs;
		state->due = trouble.put_off_until;
		return;
	}
	if (database_is_locked(state->oid))
	{
		state->due = after_naptime();
		return;
	}

	idem_take_report(&report);	/* what an earlier one may have left */
	state->order.drop_results = state->drop_due <= GetCurrentTimestamp();
	if (!start_worker(state, &handle))
	{
		if (!complained)
			ereport(LOG,
					(errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
					 errmsg("pg_idem could not start an expiry worker"),
					 errdetail("All background worker slots are in use; expired keys are not removed meanwhile."),
					 errhint("Raise max_worker_processes.")));
		complained = true;
		state->due = after_naptime();
		return;
	}
	complained = false;
	if (!wait_for_worker(handle))
		return;
	pfree(handle);
	idem_take_report(&report);
	note_report(state, &report);
}

/* ----------------------------------------------------------------
 *		The launcher
 * ----------------------------------------------------------------
 */

/* OIDs of the databases that are due */
static List *
due_databases(void)
{
	TimestampTz now = GetCurrentTimestamp();
	HASH_SEQ_STATUS seq;
	DatabaseState *state;
	List	   *due = NIL;

	hash_seq_init(&seq, databases);
	while ((state = hash_seq_search(&seq)) != NULL)
	{
		if (time_of_next_sweep(state, now) <= now)
			due = lappend_oid(due, state->oid);
	}
	return due;
}

/* Sweep every database that is due, one after the other. */
static void
sweep_due_databases(void)
{
	List	   *due = due_databases();
	ListCell   *lc;

	foreach(lc, due)
	{
		if (ShutdownRequestPending || !idem_expire_enabled)
			break;
		sweep_database(hash_search(databases, &lfirst_oid(lc), HASH_FIND,
								   NULL));
	}
	list_free(due);
}

/* Milliseconds until the next database is due, a naptime at the most */
static long
time_to_next_sweep(void)
{
	TimestampTz now = GetCurrentTimestamp();
	long		msecs = idem_expire_naptime * 1000L;
	HASH_SEQ_STATUS seq;
	DatabaseState *state;

	/* our latch may have been reset while we waited for a worker */
	if (idem_launcher_is_woken())
		return 0;
	hash_seq_init(&seq, databases);
	while ((state = hash_seq_search(&seq)) != NULL)
		msecs = Min(msecs, TimestampDifferenceMilliseconds(now,
														   time_of_next_sweep(state, now)));
	return msecs;
}

void
idem_launcher_main(Datum arg)
{
	HASHCTL		ctl;

	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	pqsignal(SIGINT, PG_SIG_IGN);	/* there is no query to be cancelled */
	pqsignal(SIGTERM, SignalHandlerForShutdownRequest);
	BackgroundWorkerUnblockSignals();
	BackgroundWorkerInitializeConnection(NULL, NULL, 0);
	pgstat_report_appname("pg_idem launcher");

	idem_launcher_attach();

	memset(&ctl, 0, sizeof(ctl));
	ctl.keysize = sizeof(Oid);
	ctl.entrysize = sizeof(DatabaseState);
	databases = hash_create("pg_idem databases", 64, &ctl,
							HASH_ELEM | HASH_BLOBS);

	for (;;)
	{
		long		msecs = idem_expire_naptime * 1000L;

		if (idem_expire_enabled)
		{
			refresh_databases();
			take_wake_ups();
			sweep_due_databases();
			msecs = time_to_next_sweep();
		}
		if (ShutdownRequestPending || !nap(msecs))
			break;
	}

	/*
	 * Not zero, so that the postmaster starts the launcher anew if it was
	 * told to end by hand.
	 */
	proc_exit(1);
}

/* Called from _PG_init, while shared_preload_libraries is processed. */
void
idem_launcher_init(void)
{
	BackgroundWorker worker;

	idem_expire_shmem_init();
	memset(&worker, 0, sizeof(worker));
	worker.bgw_flags = BGWORKER_SHMEM_ACCESS |
		BGWORKER_BACKEND_DATABASE_CONNECTION;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = 10;
	strlcpy(worker.bgw_library_name, "pg_idem", sizeof(worker.bgw_library_name));
	strlcpy(worker.bgw_function_name, "idem_launcher_main",
			sizeof(worker.bgw_function_name));
	strlcpy(worker.bgw_name, "pg_idem launcher", BGW_MAXLEN);
	strlcpy(worker.bgw_type, "pg_idem launcher", BGW_MAXLEN);
	RegisterBackgroundWorker(&worker);
}
