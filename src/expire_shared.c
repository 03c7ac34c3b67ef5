/*-------------------------------------------------------------------------
 *
 * expire_shared.c
 *	  What launcher and workers keep in shared memory: wake-ups, reports, and
 *	  which tables give trouble.
 *
 * TABLES IN TROUBLE
 *
 * A worker lives for half a minute, so what it has learnt of a table has to be
 * kept for the next one.  There is an entry for each table that could not be
 * swept as it should, and for no other:
 *	- the whole table is put off, after an error, or a sweep that had to be
 *	  ended from outside;
 *	- some rows could not go, such as keys that a foreign key refers to.
 *	  Sweeps then begin behind the last of these, so that younger keys have
 *	  their turn, and from time to time at the start of the table.
 * Both times double with each failure, up to an hour.  The entry goes when a
 * sweep from the start has met no trouble.  Where there is no room, the entry
 * that was noted first makes some: its table is then swept like any other.
 *
 * AFTER A CRASH
 *
 * A crash of one backend makes the postmaster throw shared memory away and
 * start anew.  If a sweep was the cause, perhaps for what a table's owner has
 * put there, it would be the cause again, and again.  So before the memory
 * goes, the postmaster copies the entries into its own, and puts off the
 * table that a sweep was at; they are what the new memory starts with.  It
 * takes no lock for that, as all others have gone by then, and trusts none of
 * the entries but for their size.
 *
 * LOCKS
 *
 * One LWLock guards the entries.  The rest, a few words, is guarded by a
 * spinlock that is held for some assignments only.  No lock is taken under
 * either, and nothing is thrown.
 *
 * Without shared_preload_libraries there is nothing of all this.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/lwlock.h"
#include "storage/shmem.h"
#include "utils/timestamp.h"

#include "expire.h"

/* Longest time for which anything is put off, in seconds */
#define MAX_BACKOFF_SECS	3600

#define MAX_TROUBLES		128

#define TRANCHE				"pg_idem expiry"

typedef struct ExpireShared
{
	slock_t		mutex;			/* guards these: */
	Latch	   *launcher;		/* its latch, NULL while there is none */
	bool		is_woken;
	Oid			wake_database;	/* InvalidOid: several, look at all */
	IdemReport	report;			/* of the worker that runs, or ran last */
	Oid			at_database;	/* where that is; InvalidOid: it has ended */
	Oid			at_relid;		/* InvalidOid: at no table */

	LWLock	   *lock;			/* guards these: */
	IdemTrouble troubles[MAX_TROUBLES]; /* free: database is InvalidOid */
} ExpireShared;

static ExpireShared *shared = NULL;

/* in the postmaster: the entries, from one start to the next */
static IdemTrouble saved_troubles[MAX_TROUBLES];

static shmem_request_hook_type prev_shmem_request_hook = NULL;
static shmem_startup_hook_type prev_shmem_startup_hook = NULL;

bool
idem_expire_has_shmem(void)
{
	return shared != NULL;
}

/* ----------------------------------------------------------------
 *		The launcher is woken
 * ----------------------------------------------------------------
 */

/* Make a database due, and wake the launcher. */
void
idem_wake_launcher(Oid database)
{
	Latch	   *latch;

	SpinLockAcquire(&shared->mutex);
	shared->wake_database = shared->is_woken &&
		shared->wake_database != database ? InvalidOid : database;
	shared->is_woken = true;
	latch = shared->launcher;
	SpinLockRelease(&shared->mutex);

	/* a latch of a process that has gone is one of a free PGPROC: harmless */
	if (latch != NULL)
		SetLatch(latch);
}

static void
detach_launcher(int code, Datum arg)
{
	SpinLockAcquire(&shared->mutex);
	shared->launcher = NULL;
	SpinLockRelease(&shared->mutex);
}

/* This process is the launcher, until it ends. */
void
idem_launcher_attach(void)
{
	before_shmem_exit(detach_launcher, (Datum) 0);
	SpinLockAcquire(&shared->mutex);
	shared->launcher = MyLatch;
	SpinLockRelease(&shared->mutex);
}

bool
idem_launcher_is_woken(void)
{
	bool		is_woken;

	SpinLockAcquire(&shared->mutex);
	is_woken = shared->is_woken;
	SpinLockRelease(&shared->mutex);
	return is_woken;
}

/*
 * Has the launcher been woken since the last call, and for which database?
 * InvalidOid stands for all of them.
 */
bool
idem_launcher_take_wake_up(Oid *database)
{
	bool		was_woken;

	SpinLockAcquire(&shared->mutex);
	was_woken = shared->is_woken;
	*database = shared->wake_database;
	shared->is_woken = false;
	SpinLockRelease(&shared->mutex);
	return was_woken;
}

/* ----------------------------------------------------------------
 *		A worker and its launcher
 * ----------------------------------------------------------------
 */

/* The worker: what has come of it */
void
idem_report(const IdemReport *report)
{
	SpinLockAcquire(&shared->mutex);
	shared->report = *report;
	SpinLockRelease(&shared->mutex);
}

/*
 * The launcher: take the report, if there is one, and make room for another.
 */
void
idem_take_report(IdemReport *report)
{
	SpinLockAcquire(&shared->mutex);
	*report = shared->report;
	memset(&shared->report, 0, sizeof(shared->report));
	SpinLockRelease(&shared->mutex);
}

/*
 * A sweep is at this table now; InvalidOid: at none.  Before it ends, both are
 * InvalidOid.
 */
void
idem_sweep_is_at(Oid database, Oid relid)
{
	SpinLockAcquire(&shared->mutex);
	shared->at_database = database;
	shared->at_relid = relid;
	SpinLockRelease(&shared->mutex);
}

/*
 * Called when the worker has gone: was it in the middle of something, and of
 * which table?
 */
bool
idem_sweep_ended_at(Oid *relid)
{
	bool		in_the_middle;

	SpinLockAcquire(&shared->mutex);
	in_the_middle = OidIsValid(shared->at_database);
	*relid = shared->at_relid;
	shared->at_database = InvalidOid;
	shared->at_relid = InvalidOid;
	SpinLockRelease(&shared->mutex);
	return in_the_middle;
}

/* ----------------------------------------------------------------
 *		Tables in trouble
 * ----------------------------------------------------------------
 */

int
idem_longer_backoff(int secs)
{
	return Max(idem_expire_naptime, Min(secs * 2, MAX_BACKOFF_SECS));
}

/*
 * When something is due that was to be due at a time noted before: not later
 * than this many seconds from now, nor than a naptime.  By now the naptime may
 * be shorter than it was, and the clock may have been set back.
 */
TimestampTz
idem_not_later_than(TimestampTz due, TimestampTz now, int secs)
{
	return Min(due, now + Max(secs, idem_expire_naptime) * USECS_PER_SEC);
}

/*
 * The entry of a table among these; or, if there is none and one is wanted,
 * an empty one, for which another may have to go.
 */
static IdemTrouble *
find_trouble(IdemTrouble *troubles, Oid database, Oid relid, bool make)
{
	IdemTrouble *oldest = &troubles[0];

	for (int i = 0; i < MAX_TROUBLES; i++)
	{
		IdemTrouble *trouble = &troubles[i];

		if (trouble->database == database && trouble->relid == relid)
			return trouble;
		if (OidIsValid(oldest->database) &&
			(!OidIsValid(trouble->database) ||
			 trouble->noted_at < oldest->noted_at))
			oldest = trouble;
	}
	if (!make)
		return NULL;

	memset(oldest, 0, sizeof(*oldest));
	oldest->database = database;
	oldest->relid = relid;
	return oldest;
}

/* Put a table off, for twice as long as the last time. */
static void
put_off(IdemTrouble *trouble, TimestampTz now)
{
	trouble->noted_at = now;
	trouble->backoff_secs = idem_longer_backoff(trouble->backoff_secs);
	trouble->put_off_until = now + trouble->backoff_secs * USECS_PER_SEC;
}

/* Is a table in trouble?  *trouble is good, and as of a new one, anyway. */
bool
idem_recall_trouble(Oid database, Oid relid, IdemTrouble *trouble)
{
	TimestampTz now = GetCurrentTimestamp();
	IdemTrouble *found;

	memset(trouble, 0, sizeof(*trouble));
	trouble->database = database;
	trouble->relid = relid;

	LWLockAcquire(shared->lock, LW_SHARED);
	found = find_trouble(shared->troubles, database, relid, false);
	if (found != NULL)
		*trouble = *found;
	LWLockRelease(shared->lock);

	trouble->put_off_until = idem_not_later_than(trouble->put_off_until, now,
												 trouble->backoff_secs);
	trouble->start_over_at = idem_not_later_than(trouble->start_over_at, now,
												 trouble->backoff_secs);
	return found != NULL;
}

void
idem_note_trouble(const IdemTrouble *trouble)
{
	IdemTrouble *entry;
	TimestampTz now = GetCurrentTimestamp();

	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	entry = find_trouble(shared->troubles, trouble->database, trouble->relid,
						 true);
	*entry = *trouble;
	entry->noted_at = now;
	LWLockRelease(shared->lock);
}

void
idem_forget_trouble(Oid database, Oid relid)
{
	IdemTrouble *entry;

	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	entry = find_trouble(shared->troubles, database, relid, false);
	if (entry != NULL)
		memset(entry, 0, sizeof(*entry));
	LWLockRelease(shared->lock);
}

/* Put a table off, or, without one, the database. */
void
idem_put_off(Oid database, Oid relid)
{
	TimestampTz now = GetCurrentTimestamp();

	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	put_off(find_trouble(shared->troubles, database, relid, true), now);
	LWLockRelease(shared->lock);
}

/* ----------------------------------------------------------------
 *		In the postmaster
 * ----------------------------------------------------------------
 */

/* Shared memory is about to go, after a crash or at the end. */
static void
save_troubles(int code, Datum arg)
{
	memcpy(saved_troubles, shared->troubles, sizeof(saved_troubles));
	for (int i = 0; i < MAX_TROUBLES; i++)
	{
		IdemSweepPosition *position = &saved_troubles[i].position;

		position->key[IDEM_MAX_NAME] = '\0';
		position->tenant[IDEM_MAX_NAME] = '\0';
		position->route[IDEM_MAX_NAME] = '\0';
	}
	if (OidIsValid(shared->at_database))
		put_off(find_trouble(saved_troubles, shared->at_database,
							 shared->at_relid, true),
				GetCurrentTimestamp());
}

static void
request_shared_memory(void)
{
	if (prev_shmem_request_hook)
		prev_shmem_request_hook();
	RequestAddinShmemSpace(MAXALIGN(sizeof(ExpireShared)));
	RequestNamedLWLockTranche(TRANCHE, 1);
}

static void
attach_shared_memory(void)
{
	bool		found;

	if (prev_shmem_startup_hook)
		prev_shmem_startup_hook();

	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	shared = ShmemInitStruct("pg_idem expiry", sizeof(ExpireShared), &found);
	if (!found)
	{
		memset(shared, 0, sizeof(*shared));
		SpinLockInit(&shared->mutex);
		shared->lock = &(GetNamedLWLockTranche(TRANCHE))->lock;
		memcpy(shared->troubles, saved_troubles, sizeof(saved_troubles));
	}
	LWLockRelease(AddinShmemInitLock);

	if (!IsUnderPostmaster)
		on_shmem_exit(save_troubles, (Datum) 0);
}

/* Called from _PG_init, while shared_preload_libraries is processed. */
void
idem_expire_shmem_init(void)
{
	prev_shmem_request_hook = shmem_request_hook;
	shmem_request_hook = request_shared_memory;
	prev_shmem_startup_hook = shmem_startup_hook;
	shmem_startup_hook = attach_shared_memory;
}
