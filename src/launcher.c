/*-------------------------------------------------------------------------
 *
 * launcher.c
 *	  The background launcher: whose keys are swept when.
 *
 * One static background worker, connected to the shared catalogs only.  It
 * keeps a list of the connectable databases and, for each that is due, starts
 * a short-lived worker (expire.c), one at a time.  That worker says what the
 * sweep came to:
 *
 *		swept		due again after pg_idem.expire_naptime
 *		absent		(no extension) due again after twice as long as the last
 *					time, up to an hour; CREATE EXTENSION makes the database
 *					due at once
 *		trouble		as for absent, so that a key which cannot be removed, or
 *					a database which cannot be entered, fills no log; if it
 *					was in a further store only, the default store is swept
 *					as ever and the further ones are passed over meanwhile
 *
 * so a cluster of a thousand databases that do not use pg_idem pays for one
 * look at pg_database every naptime.
 *
 * The launcher holds no transaction open while it sleeps or waits for a
 * worker, so it keeps no xmin back; it is connected to no database, so it
 * stands in nobody's way.  A sweep gives way to whoever wants its database;
 * see idem_database_is_wanted().
 *
 * SHARED MEMORY
 *
 * One small struct, guarded by one spinlock that is held for a few
 * assignments only:
 *	latch			the launcher's, NULL while there is no launcher
 *	wake_database,	which databases to make due: one, or all of them where a
 *	wake_all		second came before the first was taken
 *	report			what the worker now running has said
 * Without shared_preload_libraries there is no struct and no launcher, and
 * all the functions here do nothing.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "pg_idem.h"

#include <limits.h>

#include "access/genam.h"
#include "access/heapam.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/objectaccess.h"
#include "catalog/pg_database.h"
#include "catalog/pg_extension.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/lmgr.h"
#include "storage/lwlock.h"
#include "storage/proc.h"
#include "storage/shmem.h"
#include "storage/spin.h"
#include "tcop/tcopprot.h"
#include "utils/guc.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

/* Longest time between two looks at a database with nothing to sweep */
#define MAX_BACKOFF_SECS		3600

/*
 * Time between two sweeps of a database that also drop results, for which
 * its stores are read through; and how the worker is told
 */
#define DROP_RESULTS_SECS	3600
#define DROP_RESULTS		'd'
#define FURTHER_STORES		'f'

/* Longest life of a worker, which ends by itself after half a minute */
#define MAX_WORKER_SECS		45

typedef struct LauncherShared
{
	slock_t		mutex;
	Latch	   *latch;
	Oid			wake_database;
	bool		wake_all;
	IdemReport	report;
} LauncherShared;

static LauncherShared *shared = NULL;

/* What the launcher knows of a database */
typedef struct DatabaseState
{
	Oid			oid;			/* hash key */
	TimestampTz due;
	TimestampTz drop_due;		/* when results are to be dropped, too */
	int			backoff_secs;	/* 0 while sweeps go well */
	TimestampTz further_due;	/* when further stores are swept, too */
	int			further_backoff_secs;
	bool		seen;			/* in pg_database at the last look? */
} DatabaseState;

static HTAB *databases = NULL;

/* a transaction of this backend ran CREATE EXTENSION */
static bool created_extension = false;

static shmem_request_hook_type prev_shmem_request_hook = NULL;
static shmem_startup_hook_type prev_shmem_startup_hook = NULL;
static object_access_hook_type prev_object_access_hook = NULL;

/* ----------------------------------------------------------------
 *		In any backend: wake the launcher
 * ----------------------------------------------------------------
 */

/* Make a database due, and wake the launcher. */
static void
wake_launcher(Oid database)
{
	Latch	   *latch;

	SpinLockAcquire(&shared->mutex);
	if (OidIsValid(shared->wake_database) &&
		shared->wake_database != database)
		shared->wake_all = true;
	shared->wake_database = database;
	latch = shared->latch;
	SpinLockRelease(&shared->mutex);

	/* a latch of a process that has gone is one of a free PGPROC: harmless */
	if (latch != NULL)
		SetLatch(latch);
}

static void
at_transaction_end(XactEvent event, void *arg)
{
	switch (event)
	{
		case XACT_EVENT_COMMIT:
			if (created_extension && shared != NULL)
				wake_launcher(MyDatabaseId);
			created_extension = false;
			break;
		case XACT_EVENT_ABORT:
		case XACT_EVENT_PREPARE:
			created_extension = false;
			break;
		default:
			break;
	}
}

/*
 * Object access hook.  Any extension will do: its name cannot be looked up
 * yet, CREATE EXTENSION is rare, and a needless look is cheap.
 */
static void
notice_create_extension(ObjectAccessType access, Oid classId, Oid objectId,
						int subId, void *arg)
{
	static bool registered = false;

	if (prev_object_access_hook)
		prev_object_access_hook(access, classId, objectId, subId, arg);

	if (access == OAT_POST_CREATE && classId == ExtensionRelationId)
	{
		if (!registered)
		{
			RegisterXactCallback(at_transaction_end, NULL);
			registered = true;
		}
		created_extension = true;
	}
}

/* ----------------------------------------------------------------
 *		In the sweeping worker
 * ----------------------------------------------------------------
 */

/* Tell the launcher what the sweep of this database came to. */
void
idem_launcher_report(IdemReport report)
{
	if (shared == NULL)
		return;
	SpinLockAcquire(&shared->mutex);
	shared->report = report;
	SpinLockRelease(&shared->mutex);
}

/* Is this worker to sweep further stores than the default one? */
bool
idem_launcher_wants_further_stores(void)
{
	return MyBgworkerEntry->bgw_extra[1] == FURTHER_STORES;
}

/* Is this worker also to drop results whose response_ttl is over? */
bool
idem_launcher_wants_results_dropped(void)
{
	return MyBgworkerEntry->bgw_extra[0] == DROP_RESULTS;
}

/*
 * Does somebody want this database to themselves: DROP DATABASE, ALTER
 * DATABASE RENAME or SET TABLESPACE, CREATE DATABASE ... TEMPLATE?  All of
 * them lock the database and then wait, 5 seconds long, for the others in it
 * to leave.  Must be called in a transaction.
 */
bool
idem_database_is_wanted(void)
{
	LOCKTAG		tag;

	SET_LOCKTAG_OBJECT(tag, InvalidOid, DatabaseRelationId, MyDatabaseId, 0);
	if (LockAcquire(&tag, RowExclusiveLock, false, true) ==
		LOCKACQUIRE_NOT_AVAIL)
		return true;
	LockRelease(&tag, RowExclusiveLock, false);
	return false;
}

/* ----------------------------------------------------------------
 *		The launcher
 * ----------------------------------------------------------------
 */

static void
detach_launcher(int code, Datum arg)
{
	SpinLockAcquire(&shared->mutex);
	shared->latch = NULL;
	SpinLockRelease(&shared->mutex);
}

/* Note a row of pg_database: new databases are due at once. */
static void
note_database(Form_pg_database db, TimestampTz now)
{
	DatabaseState *state;
	bool		found;

	if (db->datistemplate || !db->datallowconn ||
		db->datconnlimit == DATCONNLIMIT_INVALID_DB)
		return;

	state = hash_search(databases, &db->oid, HASH_ENTER, &found);
	if (!found)
	{
		state->due = now;
		state->drop_due = now;
		state->backoff_secs = 0;
		state->further_due = now;
		state->further_backoff_secs = 0;
	}
	state->seen = true;
}

/* Bring the list of databases up to date with pg_database. */
static void
refresh_databases(void)
{
	TimestampTz now = GetCurrentTimestamp();
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
		note_database((Form_pg_database) GETSTRUCT(tuple), now);
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
	bool		all;

	SpinLockAcquire(&shared->mutex);
	database = shared->wake_database;
	all = shared->wake_all;
	shared->wake_database = InvalidOid;
	shared->wake_all = false;
	SpinLockRelease(&shared->mutex);

	if (!OidIsValid(database))
		return;
	hash_seq_init(&seq, databases);
	while ((state = hash_seq_search(&seq)) != NULL)
	{
		if (all || state->oid == database)
		{
			state->due = now;
			state->backoff_secs = 0;
		}
	}
}

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

/* Start the worker that sweeps a database.  False if there is no slot. */
static bool
start_sweep(Oid database, bool drop_results, bool further_stores,
			BackgroundWorkerHandle **handle)
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
			 "pg_idem expiry worker for database %u", database);
	strlcpy(worker.bgw_type, "pg_idem expiry worker", BGW_MAXLEN);
	worker.bgw_main_arg = ObjectIdGetDatum(database);
	worker.bgw_extra[0] = drop_results ? DROP_RESULTS : '\0';
	worker.bgw_extra[1] = further_stores ? FURTHER_STORES : '\0';
	worker.bgw_notify_pid = MyProcPid;
	return RegisterDynamicBackgroundWorker(&worker, handle);
}

static int
longer_backoff(int secs)
{
	return Max(idem_expire_naptime, Min(secs * 2, MAX_BACKOFF_SECS));
}

/* Sweep one database and wait for the end of it. */
static void
sweep_database(DatabaseState *state)
{
	static bool complained = false;
	BackgroundWorkerHandle *handle;
	IdemReport	report;
	TimestampTz start = GetCurrentTimestamp();
	bool		drop_results = state->drop_due <= start;
	bool		further_stores = state->further_due <= start;
	bool		terminated = false;
	pid_t		pid;
	BgwHandleStatus status;

	SpinLockAcquire(&shared->mutex);
	shared->report = IDEM_REPORT_TROUBLE;	/* unless told otherwise */
	SpinLockRelease(&shared->mutex);

	if (!start_sweep(state->oid, drop_results, further_stores, &handle))
	{
		if (!complained)
			ereport(LOG,
					(errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
					 errmsg("pg_idem could not start an expiry worker"),
					 errdetail("All background worker slots are in use; expired keys are not removed meanwhile."),
					 errhint("Raise max_worker_processes.")));
		complained = true;
		state->due = GetCurrentTimestamp() +
			idem_expire_naptime * USECS_PER_SEC;
		return;
	}
	complained = false;

	/* the worker's end sets our latch; it ends at once on a shutdown too */
	while ((status = GetBackgroundWorkerPid(handle, &pid)) != BGWH_STOPPED)
	{
		if (status == BGWH_POSTMASTER_DIED)
			proc_exit(1);
		if (!nap(1000L))
		{
			TerminateBackgroundWorker(handle);
			break;
		}
		if (!terminated &&
			TimestampDifferenceExceeds(start, GetCurrentTimestamp(),
									   MAX_WORKER_SECS * 1000))
		{
			TerminateBackgroundWorker(handle);
			terminated = true;
		}
	}
	pfree(handle);

	SpinLockAcquire(&shared->mutex);
	report = shared->report;
	SpinLockRelease(&shared->mutex);

	if (report == IDEM_REPORT_SWEPT || report == IDEM_REPORT_FURTHER_TROUBLE)
		state->backoff_secs = 0;
	else
		state->backoff_secs = longer_backoff(state->backoff_secs);
	if (report == IDEM_REPORT_FURTHER_TROUBLE)
	{
		state->further_backoff_secs =
			longer_backoff(state->further_backoff_secs);
		state->further_due = GetCurrentTimestamp() +
			state->further_backoff_secs * USECS_PER_SEC;
	}
	else if (report == IDEM_REPORT_SWEPT && further_stores)
		state->further_backoff_secs = 0;
	state->due = GetCurrentTimestamp() +
		Max(state->backoff_secs, idem_expire_naptime) * USECS_PER_SEC;
	if (drop_results)
		state->drop_due = GetCurrentTimestamp() +
			DROP_RESULTS_SECS * USECS_PER_SEC;
}

/* Sweep every database that is due, one after the other. */
static void
sweep_due_databases(void)
{
	HASH_SEQ_STATUS seq;
	DatabaseState *state;

	hash_seq_init(&seq, databases);
	while ((state = hash_seq_search(&seq)) != NULL)
	{
		if (ShutdownRequestPending || !idem_expire_enabled)
		{
			hash_seq_term(&seq);
			return;
		}
		if (state->due <= GetCurrentTimestamp())
			sweep_database(state);
	}
}

/*
 * Was a database made due while we waited for a worker?  The latch may have
 * been reset by then.
 */
static bool
wake_up_is_pending(void)
{
	bool		pending;

	SpinLockAcquire(&shared->mutex);
	pending = OidIsValid(shared->wake_database);
	SpinLockRelease(&shared->mutex);
	return pending;
}

/* Milliseconds until the next database is due, a naptime at the most */
static long
time_to_next_sweep(void)
{
	TimestampTz now = GetCurrentTimestamp();
	long		msecs = idem_expire_naptime * 1000L;
	HASH_SEQ_STATUS seq;
	DatabaseState *state;

	if (wake_up_is_pending())
		return 0;
	hash_seq_init(&seq, databases);
	while ((state = hash_seq_search(&seq)) != NULL)
		msecs = Min(msecs, TimestampDifferenceMilliseconds(now, state->due));
	return msecs;
}

void
idem_launcher_main(Datum arg)
{
	HASHCTL		ctl;

	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	pqsignal(SIGTERM, SignalHandlerForShutdownRequest);
	BackgroundWorkerUnblockSignals();
	BackgroundWorkerInitializeConnection(NULL, NULL, 0);
	pgstat_report_appname("pg_idem launcher");

	before_shmem_exit(detach_launcher, (Datum) 0);
	SpinLockAcquire(&shared->mutex);
	shared->latch = MyLatch;
	SpinLockRelease(&shared->mutex);

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

/* ----------------------------------------------------------------
 *		In the postmaster
 * ----------------------------------------------------------------
 */

static void
request_shared_memory(void)
{
	if (prev_shmem_request_hook)
		prev_shmem_request_hook();
	RequestAddinShmemSpace(MAXALIGN(sizeof(LauncherShared)));
}

static void
attach_shared_memory(void)
{
	bool		found;

	if (prev_shmem_startup_hook)
		prev_shmem_startup_hook();

	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	shared = ShmemInitStruct("pg_idem launcher", sizeof(LauncherShared),
							 &found);
	if (!found)
	{
		memset(shared, 0, sizeof(*shared));
		SpinLockInit(&shared->mutex);
	}
	LWLockRelease(AddinShmemInitLock);
}

/* Called from _PG_init, while shared_preload_libraries is processed. */
void
idem_launcher_init(void)
{
	BackgroundWorker worker;

	prev_shmem_request_hook = shmem_request_hook;
	shmem_request_hook = request_shared_memory;
	prev_shmem_startup_hook = shmem_startup_hook;
	shmem_startup_hook = attach_shared_memory;
	prev_object_access_hook = object_access_hook;
	object_access_hook = notice_create_extension;

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
