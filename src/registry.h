/*-------------------------------------------------------------------------
 *
 * registry.h
 *	  Routes and services in shared memory: counters, retry budgets, circuit
 *	  breakers.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#ifndef PG_IDEM_REGISTRY_H
#define PG_IDEM_REGISTRY_H

#include "policy.h"

#include "storage/spin.h"

typedef enum IdemOutcome
{
	IDEM_STARTED,
	IDEM_RESUMED,
	IDEM_REPLAYED,
	IDEM_WAS_IN_PROGRESS,
	IDEM_MISMATCH,
	IDEM_EXPIRED,
	IDEM_UNKNOWN,
	IDEM_THROTTLED
} IdemOutcome;

#define IDEM_NOUTCOMES	8

/* registry_stats.c: counters and run times */

/* What is counted: of a route, the outcomes of idem_begin and these ... */
typedef enum IdemCounter
{
	IDEM_COUNT_COMPLETED = IDEM_NOUTCOMES,
	IDEM_COUNT_FAILED,
	IDEM_COUNT_STALE,
	/* ... and of a service */
	IDEM_COUNT_CALLS_OK,
	IDEM_COUNT_CALLS_FAILED,
	IDEM_COUNT_CALLS_SLOW,
	IDEM_COUNT_CALLS_REFUSED,
	IDEM_COUNT_RETRIES_REFUSED
} IdemCounter;

#define IDEM_NCOUNTERS	(IDEM_COUNT_RETRIES_REFUSED + 1)

/* Histogram of run times; 16 buckets for each power of two up to 2^38 us */
#define IDEM_RUN_TIME_BUCKETS	560

typedef struct IdemRunTimes
{
	uint32		samples;
	uint16		buckets[IDEM_RUN_TIME_BUCKETS];
} IdemRunTimes;

extern void idem_count(const text *route, IdemCounter counter);
extern void idem_count_outcome(const text *route, IdemOutcome outcome,
							   bool has_spent);
extern void idem_count_finish(const text *route, bool kept, int64 run_time);

/* registry_budget.c: retry budgets */

/* Half seconds, the current one and those of ten seconds before it */
#define IDEM_BUDGET_SLOTS	21

typedef struct IdemBudget
{
	int64		slot;			/* number of the current one */
	uint64		requests;		/* in all slots together */
	uint64		retries;
	uint32		slot_requests[IDEM_BUDGET_SLOTS];
	uint32		slot_retries[IDEM_BUDGET_SLOTS];
} IdemBudget;

extern void idem_budget_advance(IdemBudget *budget, int64 now);
extern void idem_budget_count_request(IdemBudget *budget, int64 now);
extern void idem_budget_count_retry(IdemBudget *budget, int64 now);
extern int64 idem_budget_retry_after(void);
extern bool idem_route_spend_retry(const text *route,
								   const IdemBudgetPolicy *policy);
extern void idem_route_refund_retry(const text *route);

/* registry_breaker.c: circuit breakers */

typedef enum IdemBreakerState
{
	IDEM_BREAKER_CLOSED,
	IDEM_BREAKER_OPEN,
	IDEM_BREAKER_HALF_OPEN
} IdemBreakerState;

typedef struct IdemBreakerTally
{
	int32		calls;
	int32		failed;
	int32		slow;
} IdemBreakerTally;

/* Times are monotonic, in microseconds */
typedef struct IdemBreaker
{
	IdemBreakerState state;
	int32		openings;		/* since it was closed last */
	uint64		opened;			/* since the counters were reset */
	int64		open_until;		/* open: when trials may begin */

	/* half open */
	IdemBreakerTally trials;	/* that have been told of */
	int32		trials_allowed;
	int64		last_trial;		/* when the last one was let through */

	/* closed: the results of the last calls */
	IdemBreakerTally window;
	int32		window_size;
	int32		next;			/* where the next result goes */
	uint8		results[IDEM_MAX_WINDOW_CALLS]; /* must be last */
} IdemBreaker;

extern const char *idem_breaker_state_name(const IdemBreaker *breaker,
										   const IdemBreakerPolicy *policy);

/* registry.c: the table of routes and services */

typedef enum IdemEntryKind
{
	IDEM_ROUTE,
	IDEM_SERVICE
} IdemEntryKind;

#define IDEM_NKINDS		2

typedef struct IdemEntryKey
{
	Oid			database;
	IdemEntryKind kind;
	char		name[IDEM_MAX_NAME + 1];
} IdemEntryKey;

typedef struct IdemEntry
{
	IdemEntryKey key;			/* must be first */
	bool		live;			/* in the table, not only in its memory */
	slock_t		mutex;			/* guards all the rest */
	TimestampTz since;			/* when counting began */
	int64		last_used;		/* monotonic */
	int64		keep_until;		/* the same; others make room before */
	uint64		counters[IDEM_NCOUNTERS];	/* by outcome and IdemCounter */
	IdemBudget	budget;
	union
	{
		IdemRunTimes run_times; /* of a route */
		IdemBreaker breaker;	/* of a service */
	};
} IdemEntry;

extern void idem_registry_init(void);
extern void idem_require_registry(void);
extern int64 idem_monotonic_usecs(void);
extern TimestampTz idem_monotonic_to_timestamp(int64 usecs);
extern IdemEntry *idem_entry_acquire(IdemEntryKind kind,
										 const text *name, int64 now);
extern IdemEntry *idem_entry_find(IdemEntryKind kind,
									  const text *name, int64 now);
extern IdemEntry *idem_entry_copy(IdemEntryKind kind, const text *name);
extern void idem_entry_release(IdemEntry *service);
extern List *idem_entries(IdemEntryKind kind);
extern void idem_entries_reset(void);

#endif							/* PG_IDEM_REGISTRY_H */
