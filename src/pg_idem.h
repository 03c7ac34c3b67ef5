/*-------------------------------------------------------------------------
 *
 * pg_idem.h
 *	  What the files of pg_idem share, grouped by the file that owns it.
 *
 * A call flows one way:
 *
 *		SQL entry (claim.c, finish.c, receive.c, admin.c, expire_sweep.c)
 *		  -> policy (policy.c, http.c): what the arguments and settings mean
 *		  -> store (store.c, catalog.c): rows, locks, index entries
 *		  -> answer (claim.c)
 *
 * store.c knows no policy; claim.c, finish.c and receive.c touch no buffer;
 * policy.c, http.c, hash.c, key.c, problem.c, etag.c and retry.c touch no
 * table.  Budgets, breakers and counters (budget.c, breaker.c, stats.c) are in
 * shared memory (shmem.c).  The outbox (outbox.c, outbox_pick.c) stands beside
 * all that, with a table of its own.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#ifndef PG_IDEM_H
#define PG_IDEM_H

#include "postgres.h"

#include "compat.h"
#include "common/cryptohash.h"
#include "datatype/timestamp.h"
#include "executor/tuptable.h"
#include "fmgr.h"
#include "storage/spin.h"
#include "utils/guc.h"
#include "utils/jsonb.h"
#include "utils/relcache.h"

/*
 * Columns of type idempotency_key, the row of every store.  Those that
 * idem_finish leaves alone come first: WAL of an update leaves out what the
 * old and the new version begin with.
 */
#define Anum_key_key			1
#define Anum_key_tenant			2
#define Anum_key_route			3
#define Anum_key_request_hash	4
#define Anum_key_attempt		5
#define Anum_key_created_at		6
#define Anum_key_expires_at		7
#define Anum_key_state			8
#define Anum_key_lease_until	9
#define Anum_key_step			10
#define Anum_key_step_data		11
#define Anum_key_status			12
#define Anum_key_headers		13
#define Anum_key_response		14
#define Anum_key_body			15
#define Anum_key_result_dropped	16
#define Anum_key_finished_at	17
#define Natts_key				17

/* Columns of type idem_claim, the answer of idem_begin */
#define Anum_claim_proceed		1
#define Anum_claim_outcome		2
#define Anum_claim_status		3
#define Anum_claim_headers		4
#define Anum_claim_response		5
#define Anum_claim_body			6
#define Anum_claim_attempt		7
#define Anum_claim_step			8
#define Anum_claim_step_data	9
#define Anum_claim_retry_after	10
#define Anum_claim_expires_at	11
#define Natts_claim				11

/* Columns of type idem_result, what the work of idem_call may return */
#define Anum_result_status		1
#define Anum_result_headers		2
#define Anum_result_response	3
#define Anum_result_body		4
#define Natts_result			4

/* Labels of type idem_state; the order is the enum's */
typedef enum IdemState
{
	IDEM_IN_PROGRESS,
	IDEM_COMPLETED,
	IDEM_FAILED
} IdemState;

#define IDEM_NSTATES	3

/* Longest key, tenant or route, and longest fingerprint, in bytes */
#define IDEM_MAX_NAME	255

/* Own SQLSTATEs */
#define ERRCODE_IDEM_STALE_CLAIM		MAKE_SQLSTATE('I','K','0','0','1')
#define ERRCODE_IDEM_NO_CLAIM			MAKE_SQLSTATE('I','K','0','0','2')
#define ERRCODE_IDEM_ALREADY_FINISHED	MAKE_SQLSTATE('I','K','0','0','3')

/* What a claim is found by.  route is NULL where the caller names none. */
typedef struct IdemKey
{
	text	   *key;
	text	   *tenant;
	text	   *route;
} IdemKey;

/* ---------------- pg_idem.c: settings ---------------- */

typedef enum IdemKeep
{
	IDEM_KEEP_FINAL,
	IDEM_KEEP_SUCCESS,
	IDEM_KEEP_ALL
} IdemKeep;

typedef enum IdemOnLostLease
{
	IDEM_LOST_RESUME,
	IDEM_LOST_HOLD
} IdemOnLostLease;

extern int	idem_ttl;			/* seconds */
extern int	idem_lease;			/* milliseconds */
extern int	idem_wait;			/* milliseconds */
extern int	idem_max_attempts;
extern int	idem_on_lost_lease;
extern int	idem_keep;
extern char *idem_replay_headers;
extern int	idem_max_response_size; /* bytes */
extern char *idem_tenant;
extern bool idem_tenant_is_role;
extern bool idem_preloaded;		/* by shared_preload_libraries? */
extern double idem_retry_ratio;
extern double idem_retry_min_per_second;
extern int	idem_max_tracked;
extern bool idem_expire_enabled;
extern int	idem_expire_naptime;	/* seconds */
extern int	idem_expire_batch;
extern int	idem_outbox_max_attempts;
extern int	idem_outbox_dead_ttl;	/* seconds */
extern bool idem_outbox_notify;

/* ---------------- catalog.c: the extension's own objects ---------------- */

typedef struct IdemCatalog
{
	Oid			extension;
	Oid			key_type;		/* idempotency_key */
	Oid			claim_type;		/* idem_claim */
	Oid			result_type;	/* idem_result */
	Oid			state_type;		/* idem_state ... */
	Oid			state[IDEM_NSTATES];	/* ... and its labels */
	Oid			default_store;	/* idempotency_keys */
	Oid			routes;			/* idem_route_policies */
	Oid			service_policies;	/* idem_service_policies */
	Oid			outbox;			/* idem_outbox */
} IdemCatalog;

extern const IdemCatalog *idem_catalog(void);
extern bool idem_catalog_exists(void);
extern Relation idem_open_member(const Oid *member, LOCKMODE lockmode);
extern bool idem_lock_extension(void);
extern bool idem_extension_is_changing(void);
extern List *idem_member_functions(const char *name);
extern IdemState idem_state_from_datum(Datum label);
extern Datum idem_state_to_datum(IdemState state);
extern List *idem_stores(void);
extern char *idem_extension_schema(void);
extern char *idem_qualified_name(Relation rel);
extern void idem_catalog_relation_changed(Oid relid);
extern void idem_catalog_type_changed(uint32 hashvalue);

/* ---------------- inval.c: one ear for invalidations ---------------- */

extern void idem_watch_invalidations(void);

/* ---------------- distributed.c: tables kept elsewhere ---------------- */

extern bool idem_is_distributed(Relation rel);
extern void idem_refuse_distributed(Relation rel);

/* ---------------- owner.c: SQL as a table's owner ---------------- */

/* Who called, and with what settings */
typedef struct IdemCaller
{
	Oid			userid;
	int			sec_context;
	int			settings_level;
} IdemCaller;

extern void idem_become_owner(Relation rel, IdemCaller *caller);
extern void idem_become_caller(const IdemCaller *caller);
extern bool idem_try(void (*work) (void *arg), void *arg, ErrorData **error);

struct SPITupleTable;

pg_noreturn extern void idem_refuse_null(const char *column);
pg_noreturn extern void idem_refuse_null_in_row(TupleTableSlot *row,
												AttrNumber attno) pg_attribute_cold;
extern Datum idem_returned_or_null(struct SPITupleTable *rows, uint64 i,
								   int column, bool *isnull);
extern Datum idem_returned(struct SPITupleTable *rows, uint64 i, int column);
extern char *idem_returned_string(struct SPITupleTable *rows, uint64 i,
								  int column);

/* ---------------- store.c: rows of a store ---------------- */

/* Who stands behind the row that a probe found */
typedef enum IdemSighting
{
	IDEM_SEEN_NOTHING,			/* no row; whether the key is free, only
								 * idem_store_insert can tell */
	IDEM_SEEN_SETTLED,			/* committed, and nobody is changing it */
	IDEM_SEEN_OURS,				/* this transaction wrote it */
	IDEM_SEEN_ARRIVING,			/* written by a transaction still running */
	IDEM_SEEN_LEAVING			/* committed, but a running transaction is
								 * changing or deleting it */
} IdemSighting;

typedef enum IdemLocked
{
	IDEM_LOCKED,				/* ours until the transaction ends */
	IDEM_LOCK_BUSY,				/* another transaction has it (no waiting) */
	IDEM_LOCK_CHANGED			/* not the row it was: look again */
} IdemLocked;

/* A store opened for the length of one call */
typedef struct IdemStore
{
	MemoryContext context;		/* what it opens later lives here, too */
	Relation	rel;
	Relation	pkey;
	TupleTableSlot *row;		/* the row found; pins its page */
	TupleTableSlot *spare;		/* a row seen on the way, or NULL */
	TupleTableSlot *next;		/* new version being built, or NULL */
	struct IndexScanDescData *scan; /* open scan, or NULL */
	int			nindexes;
	struct IdemIndex *indexes;	/* open for new entries, or NULL */
	struct EState *estate;		/* for expressions in indexes, or NULL */
} IdemStore;

/* Columns of a deformed row, be it found or being built */

static inline bool
idem_row_isnull(TupleTableSlot *row, AttrNumber attno)
{
	return row->tts_isnull[attno - 1];
}

/* The value of a column, where NULL is an error */
static inline Datum
idem_row_datum(TupleTableSlot *row, AttrNumber attno)
{
	if (unlikely(idem_row_isnull(row, attno)))
		idem_refuse_null_in_row(row, attno);
	return row->tts_values[attno - 1];
}

/* more of the same, for columns that are often needed */
static inline IdemState
idem_row_state(TupleTableSlot *row)
{
	return idem_state_from_datum(idem_row_datum(row, Anum_key_state));
}

static inline int32
idem_row_attempt(TupleTableSlot *row)
{
	return DatumGetInt32(idem_row_datum(row, Anum_key_attempt));
}

/* When the claim may be taken over; without a lease, never */
static inline TimestampTz
idem_row_lease_until(TupleTableSlot *row)
{
	return idem_row_isnull(row, Anum_key_lease_until) ? DT_NOEND :
		DatumGetTimestampTz(idem_row_datum(row, Anum_key_lease_until));
}

/* A finished key whose retention is over counts as gone. */
static inline bool
idem_row_is_gone(TupleTableSlot *row, TimestampTz now)
{
	return idem_row_state(row) != IDEM_IN_PROGRESS &&
		DatumGetTimestampTz(idem_row_datum(row, Anum_key_expires_at)) <= now;
}

static inline void
idem_set_column(TupleTableSlot *row, AttrNumber attno, Datum value)
{
	row->tts_values[attno - 1] = value;
	row->tts_isnull[attno - 1] = false;
}

static inline void
idem_set_column_or_null(TupleTableSlot *row, AttrNumber attno, const void *value)
{
	row->tts_values[attno - 1] = PointerGetDatum(value);
	row->tts_isnull[attno - 1] = (value == NULL);
}

extern void idem_store_open(IdemStore *store, Oid relid, LOCKMODE lockmode);
extern void idem_store_close(IdemStore *store);
extern IdemSighting idem_store_probe(IdemStore *store, const IdemKey *key);
extern void idem_store_forget(IdemStore *store);
extern void idem_store_wait(IdemStore *store, int *msecs, TimestampTz now,
							TimestampTz deadline);
extern void idem_store_look_again(IdemStore *store, const IdemKey *key,
								  int *rounds);
extern void idem_store_scan(IdemStore *store, const IdemKey *key,
							Snapshot snapshot);
extern bool idem_store_scan_next(IdemStore *store);
extern void idem_store_scan_keep(IdemStore *store);
extern void idem_store_scan_end(IdemStore *store);
extern bool idem_store_recall(IdemStore *store, const IdemKey *key);
extern bool idem_store_fetch(IdemStore *store, ItemPointer tid);
extern bool idem_store_row_is_ours(IdemStore *store);
extern IdemLocked idem_store_lock(IdemStore *store, bool wait);
extern TupleTableSlot *idem_store_new_version(IdemStore *store,
											  bool copy_row);
extern bool idem_store_insert(IdemStore *store);
extern void idem_store_update(IdemStore *store);
extern void idem_store_relation_changed(Oid relid);

/* ---------------- store_check.c: what a store may be ---------------- */

/* Why a table is no store; hint is NULL where there is none */
typedef struct IdemStoreDefect
{
	int			sqlstate;
	const char *detail;
	const char *hint;
} IdemStoreDefect;

extern bool idem_is_store(Relation rel, IdemStoreDefect *defect);
extern Oid	idem_store_primary_key(Relation rel);
extern void idem_store_check_relation_changed(Oid relid);

/* ---------------- policy_cache.c: tables of policies ---------------- */

#define IDEM_MAX_POLICY_COLUMNS	13

/* A row of such a table, which its owner's struct begins with */
typedef struct IdemPolicyRow
{
	char		name[IDEM_MAX_NAME + 1];	/* hash key: the first column */
	bool		has[IDEM_MAX_POLICY_COLUMNS + 1];	/* not null?  by number */
} IdemPolicyRow;

/* A table's rows; the first four members are its owner's to set */
typedef struct IdemPolicyCache
{
	int			natts;			/* columns that are known ... */
	const Oid  *types;			/* ... and their types */
	Size		rowsize;
	void		(*load) (IdemPolicyRow *row, TupleTableSlot *slot);

	bool		registered;
	bool		valid;
	Oid			relid;
	uint64		invalidations;
	struct HTAB *rows;
	MemoryContext context;		/* they live in here */
	struct IdemPolicyCache *next;
} IdemPolicyCache;

extern Interval idem_policy_interval(TupleTableSlot *slot, AttrNumber attno);
extern const char *idem_policy_text(TupleTableSlot *slot, AttrNumber attno);
extern int32 idem_policy_int(TupleTableSlot *slot, AttrNumber attno);
extern double idem_policy_float(TupleTableSlot *slot, AttrNumber attno);
extern struct HTAB *idem_policies(IdemPolicyCache *cache, Oid relid);
extern void *idem_policy_find(IdemPolicyCache *cache, Oid relid, text *name);
extern void idem_policies_relation_changed(Oid relid);

/* ---------------- routes.c: the policy of a route ---------------- */

/* What a retry budget allows */
typedef struct IdemBudgetPolicy
{
	double		ratio;			/* retries per request ... */
	double		min_per_second; /* ... and these on top */
} IdemBudgetPolicy;

typedef struct IdemPolicy
{
	Interval	ttl;
	Interval	lease;
	Interval	wait;
	int			max_attempts;
	IdemOnLostLease on_lost_lease;
	IdemKeep	keep;
	bool		has_response_ttl;
	Interval	response_ttl;
	IdemBudgetPolicy budget;
} IdemPolicy;

/* a row of idem_route_policies, with the settings where it has NULL */
typedef struct IdemPolicyOfRoute
{
	text	   *route;
	IdemPolicy	policy;
} IdemPolicyOfRoute;

extern void idem_policy_of_route(text *route, IdemPolicy *policy);
extern List *idem_policies_of_routes(void);

/* ---------------- services.c: the policy of a service ---------------- */

/* Has a person decided what the breaker says? */
typedef enum IdemForced
{
	IDEM_NOT_FORCED,
	IDEM_FORCED_OPEN,
	IDEM_FORCED_CLOSED
} IdemForced;

/* Spans of time are in microseconds */
typedef struct IdemBreakerPolicy
{
	double		failure_ratio;
	double		slow_call_ratio;
	int64		slow_call_time;
	int32		window_calls;
	int32		minimum_calls;
	int64		open_time;
	int64		max_open_time;
	int32		half_open_calls;
	int64		half_open_time;
	IdemForced	forced;
} IdemBreakerPolicy;

typedef struct IdemServicePolicy
{
	IdemBudgetPolicy budget;
	IdemBreakerPolicy breaker;
} IdemServicePolicy;

extern void idem_policy_of_service(text *service, IdemServicePolicy *policy);

/* ---------------- policy.c: what arguments and settings mean -------------- */

extern void idem_check_name(const char *name, int len, const char *what,
							bool may_be_empty);
extern text *idem_arg_name(FunctionCallInfo fcinfo, int argno,
						   const char *what);
extern text *idem_arg_tenant(FunctionCallInfo fcinfo, int argno);
extern Oid	idem_arg_store(FunctionCallInfo fcinfo, int argno);
extern bytea *idem_arg_hash(FunctionCallInfo fcinfo, int argno);
extern void idem_arg_interval(FunctionCallInfo fcinfo, int argno,
							  Interval *result);
extern int	idem_arg_status(FunctionCallInfo fcinfo, int argno);
extern int	idem_check_status(int status);
extern TimestampTz idem_time_after(TimestampTz start, const Interval *span,
								   const char *what);
extern TimestampTz idem_time_not_before(TimestampTz start,
										const Interval *span,
										const char *what);
extern bool idem_status_is_kept(IdemKeep keep, int status);
extern bool idem_result_is_over(const IdemPolicy *policy,
								TupleTableSlot *row, TimestampTz now);

/* ---------------- finish.c: a claim that stands ---------------- */

/* What a caller says of the claim that it means */
typedef struct IdemClaimRef
{
	IdemKey		key;
	bool		has_attempt;
	int32		attempt;
} IdemClaimRef;

/* What is stored of the work; each but the status may be NULL */
typedef struct IdemResult
{
	int			status;
	Jsonb	   *headers;		/* only those that are kept */
	Jsonb	   *response;
	bytea	   *body;
} IdemResult;

extern bool idem_result_fits(const IdemResult *result);

extern void idem_arg_claim_ref(FunctionCallInfo fcinfo, int argno,
							   IdemClaimRef *ref);
extern void idem_find_and_lock_claim(IdemStore *store,
									 const IdemClaimRef *ref);
extern void idem_finish_claim(const IdemClaimRef *ref, IdemResult *result,
							  const Interval *ttl, Oid storeid);

/* ---------------- retry.c: spans of time and backoff ---------------- */

extern int64 idem_arg_usecs(FunctionCallInfo fcinfo, int argno,
							const char *what, int64 default_usecs);
extern int64 idem_interval_usecs(const Interval *span, const char *what);
extern Datum idem_usecs_to_interval(int64 usecs);
extern int64 idem_exponential(int64 base, int64 cap, int32 n);
extern int64 idem_full_jitter(int64 base, int64 cap, int32 retry);

/* ---------------- claim.c: what idem_begin answers ---------------- */

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

/* What a key is to be claimed with ... */
typedef struct IdemClaimRequest
{
	IdemKey		key;
	bytea	   *hash;			/* NULL: this caller takes no fingerprints */
	IdemPolicy	policy;			/* of the route, under the arguments */
	bool		has_first_sent;
	TimestampTz first_sent;
	Oid			store;			/* InvalidOid: the default one */

	/* ... and, by the clock of the current look at it */
	TimestampTz now;
	TimestampTz lease_until;
	TimestampTz expires_at;
} IdemClaimRequest;

extern void idem_arg_claim(FunctionCallInfo fcinfo, int argno,
						   IdemClaimRequest *req);
extern Datum idem_claim_key(IdemClaimRequest *req);

/* ---------------- stats.c: counters and run times ---------------- */

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

/* ---------------- budget.c: retry budgets ---------------- */

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

/* ---------------- breaker.c: circuit breakers ---------------- */

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

/* Longest window, in calls; idem_service_policies has it in a CHECK */
#define IDEM_MAX_WINDOW_CALLS	1000

/* Times are monotonic, in microseconds */
typedef struct IdemBreaker
{
	IdemBreakerState state;
	int32		openings;		/* since it was closed last */
	uint64		opened;			/* since the counters were reset */
	int64		open_until;		/* open: when trials may begin */

	/* closed: the results of the last calls */
	IdemBreakerTally window;
	int32		window_size;
	int32		next;			/* where the next result goes */
	uint8		results[IDEM_MAX_WINDOW_CALLS];

	/* half open */
	IdemBreakerTally trials;	/* that have been told of */
	int32		trials_allowed;
	int64		last_trial;		/* when the last one was let through */
} IdemBreaker;

extern bool idem_breaker_is_at_rest(const IdemBreaker *breaker, int64 now);
extern const char *idem_breaker_state_name(const IdemBreaker *breaker,
										   const IdemBreakerPolicy *policy);

/* ---------------- shmem.c: routes and services ---------------- */

typedef enum IdemServiceKind
{
	IDEM_ROUTE,
	IDEM_SERVICE
} IdemServiceKind;

#define IDEM_NKINDS		2

typedef struct IdemServiceKey
{
	Oid			database;
	IdemServiceKind kind;
	char		name[IDEM_MAX_NAME + 1];
} IdemServiceKey;

typedef struct IdemService
{
	IdemServiceKey key;			/* must be first */
	bool		live;			/* in the table, not only in its memory */
	slock_t		mutex;			/* guards all the rest */
	TimestampTz since;			/* when counting began */
	int64		last_used;		/* monotonic */
	uint64		counters[IDEM_NCOUNTERS];	/* by outcome and IdemCounter */
	IdemRunTimes run_times;		/* of a route */
	IdemBudget	budget;
	IdemBreaker breaker;		/* of a service */
} IdemService;

extern void idem_shmem_init(void);
extern void idem_require_shmem(void);
extern int64 idem_monotonic_usecs(void);
extern TimestampTz idem_monotonic_to_timestamp(int64 usecs);
extern IdemService *idem_service_acquire(IdemServiceKind kind,
										 const text *name, int64 now);
extern IdemService *idem_service_find(IdemServiceKind kind,
									  const text *name, int64 now);
extern void idem_service_release(IdemService *service);
extern List *idem_services(IdemServiceKind kind);
extern void idem_services_reset(void);

/* ---------------- hash.c: SHA-256 ---------------- */

extern pg_cryptohash_ctx *idem_digest_begin(void);
extern void idem_digest_add(pg_cryptohash_ctx *ctx, const void *data,
							size_t len);
extern void idem_digest_add_tagged(pg_cryptohash_ctx *ctx, char tag,
								   const char *data, size_t len);
extern bytea *idem_digest_end(pg_cryptohash_ctx *ctx);
extern bytea *idem_hash_of_jsonb(Jsonb *request);

/* ---------------- outbox_pick.c: which messages may be taken ------------- */

/* Columns of idem_outbox that are read without SQL */
#define Anum_outbox_id				1
#define Anum_outbox_topic			3
#define Anum_outbox_group_key		4
#define Anum_outbox_max_attempts	8
#define Anum_outbox_available_at	9
#define Anum_outbox_attempt			10
#define Anum_outbox_lease_until		11
#define Anum_outbox_dead_at			12

/* What became of a message that may be taken, and was shown */
typedef enum IdemVerdict
{
	IDEM_SHOW_MORE,
	IDEM_PASSED_OVER,			/* show more, and this one first the next time */
	IDEM_ENOUGH
} IdemVerdict;

typedef IdemVerdict (*IdemConsider) (Relation rel, TupleTableSlot *row,
									 void *arg);

extern void idem_outbox_pick(Relation rel, text *topic, TimestampTz now,
							 IdemConsider consider, void *arg);
extern bool idem_outbox_lock(Relation rel, TupleTableSlot *row);

/* ---------------- outbox_table.c: the table of the outbox ---------------- */

/* What is done with it; each is a statement */
typedef enum IdemStatement
{
	IDEM_INSERT_MESSAGE,
	IDEM_FIND_HIGHER_ID,
	IDEM_TAKE_MESSAGE,
	IDEM_BURY_MESSAGE,
	IDEM_DELETE_MESSAGE,
	IDEM_FAIL_MESSAGE,
	IDEM_GET_ATTEMPT,
	IDEM_PICK_DEAD,
	IDEM_REVIVE_MESSAGE
} IdemStatement;

/* The table open for one call, by its owner */
typedef struct IdemOutbox
{
	Relation	rel;
	IdemCaller	caller;
} IdemOutbox;

extern bool idem_is_outbox(Relation rel);
extern void idem_outbox_relation_changed(Oid relid);
extern void idem_outbox_open(IdemOutbox *outbox);
extern void idem_outbox_close(IdemOutbox *outbox);
extern uint64 idem_outbox_run(IdemStatement statement, Datum *values,
							  const char *nulls);
extern bool idem_outbox_purge(const char *table, TimestampTz before,
							  int64 *last, int size, int64 *failed);

/* ---------------- http.c: headers ---------------- */

/* Characters of a token, such as the name of a header (RFC 9110, "tchar") */
#define IDEM_LOWER			"abcdefghijklmnopqrstuvwxyz"
#define IDEM_UPPER			"ABCDEFGHIJKLMNOPQRSTUVWXYZ"
#define IDEM_DIGITS			"0123456789"
#define IDEM_TOKEN_CHARS	IDEM_LOWER IDEM_UPPER IDEM_DIGITS "!#$%&'*+-.^_`|~"

extern Jsonb *idem_headers_to_keep(Jsonb *headers);
extern bool idem_check_replay_headers(char **newval, void **extra,
									  GucSource source);

/* ---------------- after_commit.c: log lines ---------------- */

extern void idem_log_after_commit(const char *message, const char *detail);

#endif							/* PG_IDEM_H */
