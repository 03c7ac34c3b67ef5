/*-------------------------------------------------------------------------
 *
 * shmem.c
 *	  The table of routes and services in shared memory.
 *
 * One entry for each route that idem_begin has seen, and for each service
 * that idem_budget_allow or a breaker was asked for, with its counters (stats.c),
 * its retry budget (budget.c) and its circuit breaker (breaker.c).  Databases
 * share the table but no entry.  It has room for pg_idem.max_tracked
 * entries; when it is full, those that have not been used for the longest
 * time make room.
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
#include "pg_idem.h"

#include "miscadmin.h"
#include "portability/instr_time.h"
#include "storage/ipc.h"
#include "storage/lwlock.h"
#include "storage/shmem.h"
#include "utils/builtins.h"
#include "utils/hsearch.h"

/*
 * Where the table is full, entries go that have not been used since the first
 * such part of the time that passed between the oldest use and now.
 */
#define EVICTED_PART	20

typedef struct ServicesShared
{
	LWLock	   *lock;
} ServicesShared;

static ServicesShared *shared = NULL;
static HTAB *services = NULL;

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
	RequestAddinShmemSpace(MAXALIGN(sizeof(ServicesShared)));
	RequestAddinShmemSpace(hash_estimate_size(idem_max_tracked,
											  sizeof(IdemService)));
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
	ctl.keysize = sizeof(IdemServiceKey);
	ctl.entrysize = sizeof(IdemService);

	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	shared = ShmemInitStruct("pg_idem services", sizeof(ServicesShared),
							 &found);
	if (!found)
		shared->lock = &(GetNamedLWLockTranche("pg_idem"))->lock;
	services = ShmemInitHash("pg_idem services hash", idem_max_tracked,
							 idem_max_tracked, &ctl,
							 HASH_ELEM | HASH_BLOBS);
	LWLockRelease(AddinShmemInitLock);
}

/* Called from _PG_init, while shared_preload_libraries is processed. */
void
idem_shmem_init(void)
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
idem_require_shmem(void)
{
	if (services == NULL)
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
set_key(IdemServiceKey *key, IdemServiceKind kind, const text *name)
{
	memset(key, 0, sizeof(*key));
	key->database = MyDatabaseId;
	key->kind = kind;
	text_to_cstring_buffer(name, key->name, sizeof(key->name));
}

/*
 * Take out the entries that have not been used for the longest time, at least
 * one, though all may have been used since "now", when the caller began to
 * wait for the lock.  Those with a breaker that is not at rest are spared as
 * long as there are others: callers leave such a service alone, and would find
 * the breaker closed.  Needs the lock in exclusive mode, so no entry's mutex
 * is held.
 */
static void
evict(int64 now)
{
	HASH_SEQ_STATUS seq;
	IdemService *service;
	int64		oldest = PG_INT64_MAX;
	int64		oldest_at_rest = PG_INT64_MAX;
	int64		limit;
	bool		spare;

	hash_seq_init(&seq, services);
	while ((service = hash_seq_search(&seq)) != NULL)
	{
		oldest = Min(oldest, service->last_used);
		if (idem_breaker_is_at_rest(&service->breaker, now))
			oldest_at_rest = Min(oldest_at_rest, service->last_used);
	}
	spare = (oldest_at_rest != PG_INT64_MAX);
	if (spare)
		oldest = oldest_at_rest;

	limit = oldest + Max(now - oldest, 0) / EVICTED_PART;
	hash_seq_init(&seq, services);
	while ((service = hash_seq_search(&seq)) != NULL)
	{
		if (service->last_used > limit ||
			(spare && !idem_breaker_is_at_rest(&service->breaker, now)))
			continue;
		service->live = false;
		hash_search(services, &service->key, HASH_REMOVE, NULL);
	}
}

/*
 * Add an entry, unless another backend has by now.  Returns it with its mutex
 * held, and the lock in exclusive mode.
 */
static IdemService *
add_service(IdemServiceKind kind, const text *name, int64 now)
{
	IdemServiceKey key;
	IdemService *service;
	TimestampTz since = GetCurrentTimestamp();
	bool		found;

	set_key(&key, kind, name);
	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	if (hash_get_num_entries(services) >= idem_max_tracked &&
		hash_search(services, &key, HASH_FIND, NULL) == NULL)
		evict(now);
	service = hash_search(services, &key, HASH_ENTER, &found);
	if (!found)
	{
		memset((char *) service + sizeof(IdemServiceKey), 0,
			   sizeof(IdemService) - sizeof(IdemServiceKey));
		SpinLockInit(&service->mutex);
		service->live = true;
		service->since = since;
		service->last_used = now;
	}
	SpinLockAcquire(&service->mutex);
	return service;
}

/* Is this the entry of a route or service?  Needs the lock. */
static bool
is_entry_of(const IdemService *service, IdemServiceKind kind,
			const text *name)
{
	size_t		len = VARSIZE_ANY_EXHDR(name);

	return service->live && service->key.database == MyDatabaseId &&
		service->key.kind == kind && len <= IDEM_MAX_NAME &&
		memcmp(service->key.name, VARDATA_ANY(name), len) == 0 &&
		service->key.name[len] == '\0';
}

/*
 * The entry of a route or service with its mutex held: the caller changes it
 * and calls idem_service_release(), and nothing else in between.  NULL if
 * there is none, or no shared memory.
 *
 * The last entry of each kind is remembered, since looking a name up takes
 * longer than all the rest.  It may be another's by now, or nobody's, but
 * remains a place in the table.
 */
IdemService *
idem_service_find(IdemServiceKind kind, const text *name, int64 now)
{
	static IdemService *recent[IDEM_NKINDS];
	IdemService *service;

	if (services == NULL)
		return NULL;

	LWLockAcquire(shared->lock, LW_SHARED);
	service = recent[kind];
	if (service == NULL || !is_entry_of(service, kind, name))
	{
		IdemServiceKey key;

		set_key(&key, kind, name);
		service = hash_search(services, &key, HASH_FIND, NULL);
		if (service == NULL)
		{
			LWLockRelease(shared->lock);
			return NULL;
		}
		recent[kind] = service;
	}
	SpinLockAcquire(&service->mutex);
	service->last_used = Max(service->last_used, now);
	return service;
}

/* The same, but an entry is made if there is none. */
IdemService *
idem_service_acquire(IdemServiceKind kind, const text *name, int64 now)
{
	IdemService *service = idem_service_find(kind, name, now);

	if (service == NULL && services != NULL)
		service = add_service(kind, name, now);
	return service;
}

void
idem_service_release(IdemService *service)
{
	SpinLockRelease(&service->mutex);
	LWLockRelease(shared->lock);
}

/*
 * Copies of this database's entries of one kind, as a list of IdemService,
 * allocated in the current memory context.  The mutex in them means nothing.
 */
List *
idem_services(IdemServiceKind kind)
{
	HASH_SEQ_STATUS seq;
	IdemService *service;
	List	   *result = NIL;

	LWLockAcquire(shared->lock, LW_SHARED);
	hash_seq_init(&seq, services);
	while ((service = hash_seq_search(&seq)) != NULL)
	{
		IdemService *copy;

		if (service->key.database != MyDatabaseId ||
			service->key.kind != kind)
			continue;
		copy = palloc(sizeof(IdemService));
		result = lappend(result, copy);

		SpinLockAcquire(&service->mutex);
		memcpy(copy, service, sizeof(IdemService));
		SpinLockRelease(&service->mutex);
	}
	LWLockRelease(shared->lock);
	return result;
}

/* Forget what this database's entries have counted. */
void
idem_services_reset(void)
{
	HASH_SEQ_STATUS seq;
	IdemService *service;
	TimestampTz now = GetCurrentTimestamp();

	LWLockAcquire(shared->lock, LW_SHARED);
	hash_seq_init(&seq, services);
	while ((service = hash_seq_search(&seq)) != NULL)
	{
		if (service->key.database != MyDatabaseId)
			continue;
		SpinLockAcquire(&service->mutex);
		memset(&service->counters, 0, sizeof(service->counters));
		memset(&service->run_times, 0, sizeof(service->run_times));
		service->breaker.opened = 0;
		service->since = now;
		SpinLockRelease(&service->mutex);
	}
	LWLockRelease(shared->lock);
}
