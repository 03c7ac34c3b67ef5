/*-------------------------------------------------------------------------
 *
 * registry.c
 *	  The table of routes and entries in shared memory.
 *
 * One entry for each route that idem_begin has seen, and for each service that
 * idem_budget_allow or a breaker was asked for, with its counters
 * (registry_stats.c), its retry budget (registry_budget.c) and its circuit
 * breaker (registry_breaker.c).  Databases share the table but no entry.  It
 * has room for pg_idem.max_tracked entries; when it is full, those that have
 * not been used for the longest time make room.
 *
 * LOCKING PROTOCOL
 *
 * "lock" (an LWLock) guards which entries there are.  It is held in shared
 * mode while an entry is looked up and used, so that the entry stays, and in
 * exclusive mode to add one or to take some out.
 *
 * An entry's "mutex" (a spinlock) guards everything in it but its key and
 * "live", which change only under the LWLock.  It is taken with that lock
 * held, for as long as an entry takes to be changed or copied: nothing is
 * allocated, looked up or thrown under it, and no second one is taken.
 *
 * So the order is LWLock, then one spinlock, and nothing else is ever waited
 * for.  What is counted is counted at once, whatever becomes of the caller's
 * transaction.  A backend that ends by itself or is terminated leaves neither
 * lock behind: a spinlock cannot be held where interrupts or errors are
 * served, and the LWLock is released with all others.  One that is killed
 * makes the postmaster start everything anew, with an empty table.
 *
 * Without shared_preload_libraries there is no table: idem_begin and
 * idem_finish then count nothing and have no budget, and functions that need
 * it say so.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "portability/instr_time.h"
#include "storage/ipc.h"
#include "storage/lwlock.h"
#include "storage/shmem.h"
#include "utils/builtins.h"
#include "utils/hsearch.h"

#include "registry.h"

/*
 * Where the table is full, the entries go whose last use lies in the oldest
 * twentieth of the time since the oldest use of all.
 */
#define EVICTED_PART	20

typedef struct RegistryShared
{
	LWLock	   *lock;
} RegistryShared;

static RegistryShared *shared = NULL;
static HTAB *entries = NULL;

static shmem_request_hook_type prev_shmem_request_hook = NULL;
static shmem_startup_hook_type prev_shmem_startup_hook = NULL;

/* ----------------------------------------------------------------
 *		In the postmaster
 * ----------------------------------------------------------------
 */

static void
request_shared_memory(void)
{
	if (prev_shmem_request_hook)
		prev_shmem_request_hook();
	RequestAddinShmemSpace(MAXALIGN(sizeof(RegistryShared)));
	RequestAddinShmemSpace(hash_estimate_size(idem_max_tracked,
											  sizeof(IdemEntry)));
	RequestNamedLWLockTranche("pg_idem", 1);
}

static void
attach_shared_memory(void)
{
	HASHCTL		ctl;
	bool		found;

	if (prev_shmem_startup_hook)
		prev_shmem_startup_hook();

	memset(&ctl, 0, sizeof(ctl));
	ctl.keysize = sizeof(IdemEntryKey);
	ctl.entrysize = sizeof(IdemEntry);

	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	shared = ShmemInitStruct("pg_idem registry", sizeof(RegistryShared),
							 &found);
	if (!found)
		shared->lock = &(GetNamedLWLockTranche("pg_idem"))->lock;
	entries = idem_shmem_init_hash("pg_idem registry hash", idem_max_tracked,
								   &ctl, HASH_ELEM | HASH_BLOBS);
	LWLockRelease(AddinShmemInitLock);
}

/* Called from _PG_init, while shared_preload_libraries is processed. */
void
idem_registry_init(void)
{
	prev_shmem_request_hook = shmem_request_hook;
	shmem_request_hook = request_shared_memory;
	prev_shmem_startup_hook = shmem_startup_hook;
	shmem_startup_hook = attach_shared_memory;
}

/* ----------------------------------------------------------------
 *		In any backend
 * ----------------------------------------------------------------
 */

/* For functions that are nothing without the table */
void
idem_require_registry(void)
{
	if (entries == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("pg_idem must be loaded via shared_preload_libraries"),
				 errdetail("Retry budgets, circuit breakers and statistics are kept in shared memory."),
				 errhint("Add pg_idem to shared_preload_libraries in postgresql.conf, then restart the server.")));
}

/*
 * Time in microseconds that no change of the clock moves, the same in all
 * processes; starts anywhere.
 */
int64
idem_monotonic_usecs(void)
{
	instr_time	now;

	INSTR_TIME_SET_CURRENT(now);
	return (int64) INSTR_TIME_GET_MICROSEC(now);
}

/* The wall clock's idea of a monotonic time */
TimestampTz
idem_monotonic_to_timestamp(int64 usecs)
{
	int64		from_now = usecs - idem_monotonic_usecs();
	TimestampTz now = GetCurrentTimestamp();

	return from_now < END_TIMESTAMP - now ? now + from_now : DT_NOEND;
}

/*
 * Names that are arguments have been checked.  That of a row need not have
 * been, as a store's owner can write to it directly; a longer one is cut.
 */
static void
set_key(IdemEntryKey *key, IdemEntryKind kind, const text *name)
{
	memset(key, 0, sizeof(*key));
	key->database = MyDatabaseId;
	key->kind = kind;
	text_to_cstring_buffer(name, key->name, sizeof(key->name));
}

/*
 * Take out the entries that have not been used for the longest time, at least
 * one, though all may have been used since "now", when the caller began to
 * wait for the lock.  Those that are to be kept (a breaker that is open:
 * callers leave the service alone, and would find the breaker closed) are
 * spared as long as there are others.  Needs the lock in exclusive mode, so no
 * entry's mutex is held.
 */
static void
evict(int64 now)
{
	HASH_SEQ_STATUS seq;
	IdemEntry  *entry;
	int64		oldest = PG_INT64_MAX;
	int64		oldest_to_go = PG_INT64_MAX;
	int64		limit;
	bool		spare;

	hash_seq_init(&seq, entries);
	while ((entry = hash_seq_search(&seq)) != NULL)
	{
		oldest = Min(oldest, entry->last_used);
		if (entry->keep_until < now)
			oldest_to_go = Min(oldest_to_go, entry->last_used);
	}
	spare = (oldest_to_go != PG_INT64_MAX);
	if (spare)
		oldest = oldest_to_go;

	limit = oldest + Max(now - oldest, 0) / EVICTED_PART;
	hash_seq_init(&seq, entries);
	while ((entry = hash_seq_search(&seq)) != NULL)
	{
		if (entry->last_used > limit ||
			(spare && entry->keep_until >= now))
			continue;
		entry->live = false;
		hash_search(entries, &entry->key, HASH_REMOVE, NULL);
	}
}

/*
 * Add an entry, unless another backend has by now.  Returns it with its mutex
 * held, and the lock in exclusive mode.
 */
static IdemEntry *
add_entry(IdemEntryKind kind, const text *name, int64 now)
{
	IdemEntryKey key;
	IdemEntry  *entry;
	TimestampTz since = GetCurrentTimestamp();
	bool		found;

	set_key(&key, kind, name);
	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	if (hash_get_num_entries(entries) >= idem_max_tracked &&
		hash_search(entries, &key, HASH_FIND, NULL) == NULL)
		evict(now);
	entry = hash_search(entries, &key, HASH_ENTER, &found);
	if (!found)
	{
		memset((char *) entry + sizeof(IdemEntryKey), 0,
			   sizeof(IdemEntry) - sizeof(IdemEntryKey));
		SpinLockInit(&entry->mutex);
		entry->live = true;
		entry->since = since;
		entry->last_used = now;
	}
	SpinLockAcquire(&entry->mutex);
	return entry;
}

/* Is this the entry of a route or service?  Needs the lock. */
static bool
is_entry_of(const IdemEntry *entry, IdemEntryKind kind,
			const text *name)
{
	size_t		len = VARSIZE_ANY_EXHDR(name);

	return entry->live && entry->key.database == MyDatabaseId &&
		entry->key.kind == kind && len <= IDEM_MAX_NAME &&
		memcmp(entry->key.name, VARDATA_ANY(name), len) == 0 &&
		entry->key.name[len] == '\0';
}

/*
 * Find an entry.  Needs the lock; returns NULL if there is none.
 *
 * The last entry of each kind is remembered, since looking a name up takes
 * longer than all the rest.  It may be another's by now, or nobody's, but
 * remains a place in the table.
 */
static IdemEntry *
look_up(IdemEntryKind kind, const text *name)
{
	static IdemEntry *recent[IDEM_NKINDS];
	IdemEntryKey key;
	IdemEntry  *entry = recent[kind];

	if (entry != NULL && is_entry_of(entry, kind, name))
		return entry;
	set_key(&key, kind, name);
	entry = hash_search(entries, &key, HASH_FIND, NULL);
	if (entry != NULL)
		recent[kind] = entry;
	return entry;
}

/*
 * The entry of a route or service with its mutex held: the caller changes it
 * and calls idem_entry_release(), and nothing else in between.  NULL if there
 * is none, or no shared memory.
 */
IdemEntry *
idem_entry_find(IdemEntryKind kind, const text *name, int64 now)
{
	IdemEntry  *entry;

	if (entries == NULL)
		return NULL;
	LWLockAcquire(shared->lock, LW_SHARED);
	entry = look_up(kind, name);
	if (entry == NULL)
	{
		LWLockRelease(shared->lock);
		return NULL;
	}
	SpinLockAcquire(&entry->mutex);
	entry->last_used = Max(entry->last_used, now);
	return entry;
}

/* The same, but an entry is made if there is none. */
IdemEntry *
idem_entry_acquire(IdemEntryKind kind, const text *name, int64 now)
{
	IdemEntry  *entry = idem_entry_find(kind, name, now);

	if (entry == NULL && entries != NULL)
		entry = add_entry(kind, name, now);
	return entry;
}

void
idem_entry_release(IdemEntry *entry)
{
	SpinLockRelease(&entry->mutex);
	LWLockRelease(shared->lock);
}

/*
 * Copy what the views show of an entry.  A histogram is large, so it is copied
 * without the mutex: each of its buckets is read at once, and what is counted
 * meanwhile makes no difference to a quantile.  The results of a breaker are
 * nobody's to see.
 */
static IdemEntry *
copy_entry(IdemEntry *entry)
{
	IdemEntry  *copy = palloc0(sizeof(IdemEntry));
	Size		size = offsetof(IdemEntry, breaker);

	if (entry->key.kind == IDEM_SERVICE)
		size += offsetof(IdemBreaker, results);
	SpinLockAcquire(&entry->mutex);
	memcpy(copy, entry, size);
	SpinLockRelease(&entry->mutex);
	if (entry->key.kind == IDEM_ROUTE)
		memcpy(&copy->run_times, &entry->run_times, sizeof(IdemRunTimes));
	return copy;
}

/* A copy of an entry, or NULL if there is none */
IdemEntry *
idem_entry_copy(IdemEntryKind kind, const text *name)
{
	IdemEntry  *entry;
	IdemEntry  *copy;

	LWLockAcquire(shared->lock, LW_SHARED);
	entry = look_up(kind, name);
	copy = entry == NULL ? NULL : copy_entry(entry);
	LWLockRelease(shared->lock);
	return copy;
}

/*
 * Copies of this database's entries of one kind, as a list of IdemEntry,
 * allocated in the current memory context.  The mutex in them means nothing.
 */
List *
idem_entries(IdemEntryKind kind)
{
	HASH_SEQ_STATUS seq;
	IdemEntry  *entry;
	List	   *result = NIL;

	LWLockAcquire(shared->lock, LW_SHARED);
	hash_seq_init(&seq, entries);
	while ((entry = hash_seq_search(&seq)) != NULL)
	{
		if (entry->key.database == MyDatabaseId && entry->key.kind == kind)
			result = lappend(result, copy_entry(entry));
	}
	LWLockRelease(shared->lock);
	return result;
}

/* Forget what this database's entries have counted. */
void
idem_entries_reset(void)
{
	HASH_SEQ_STATUS seq;
	IdemEntry  *entry;
	TimestampTz now = GetCurrentTimestamp();

	LWLockAcquire(shared->lock, LW_SHARED);
	hash_seq_init(&seq, entries);
	while ((entry = hash_seq_search(&seq)) != NULL)
	{
		if (entry->key.database != MyDatabaseId)
			continue;
		SpinLockAcquire(&entry->mutex);
		memset(&entry->counters, 0, sizeof(entry->counters));
		if (entry->key.kind == IDEM_ROUTE)
			memset(&entry->run_times, 0, sizeof(entry->run_times));
		else
			entry->breaker.opened = 0;
		entry->since = now;
		SpinLockRelease(&entry->mutex);
	}
	LWLockRelease(shared->lock);
}
