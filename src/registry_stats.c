/*-------------------------------------------------------------------------
 *
 * registry_stats.c
 *	  What is counted of routes and services, and how long work takes.
 *
 * Counters and run times are part of the entries in shared memory, and so are
 * changed only while an entry is held; see registry.c.
 *
 * RUN TIMES
 *
 * The time from begin to finish of first attempts whose result was kept is
 * put into a histogram with buckets that grow with the value: 16 of the same
 * width between each power of two and the next, and one for each microsecond
 * below 16.  A quantile is told as the middle of its bucket, so it is off by
 * 1/32 (3.2 %) at the most.  When 32,768 run times have been counted, all
 * buckets are halved: older ones weigh less and less, and a bucket fits into
 * 16 bits.  Run times of 76 hours and more all go into the last bucket.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <math.h>

#include "funcapi.h"
#include "miscadmin.h"
#include "port/pg_bitutils.h"
#include "utils/builtins.h"
#include "utils/tuplestore.h"

#include "registry.h"
#include "args.h"
#include "timespan.h"

PG_FUNCTION_INFO_V1(idem_stat_routes);
PG_FUNCTION_INFO_V1(idem_stat_services);
PG_FUNCTION_INFO_V1(idem_stats_reset);
PG_FUNCTION_INFO_V1(idem_hedge_after);

/* Buckets between a power of two and the next: 2^BUCKET_BITS */
#define BUCKET_BITS		4
#define NBUCKETS		(1 << BUCKET_BITS)

/* Run times that are counted before all are halved */
#define MAX_SAMPLES		32768

/* A quantile of fewer run times than this is not told. */
#define MIN_SAMPLES		20

StaticAssertDecl(MAX_SAMPLES <= PG_UINT16_MAX,
				 "a bucket must hold all run times");

/* ----------------------------------------------------------------
 *		The histogram of run times
 * ----------------------------------------------------------------
 */

static int
bucket_of(int64 usecs)
{
	int			shift;
	int64		bucket;

	if (usecs < NBUCKETS)
		return (int) Max(usecs, 0);
	shift = pg_leftmost_one_pos64((uint64) usecs) - BUCKET_BITS;
	bucket = shift * (int64) NBUCKETS + (usecs >> shift);
	return (int) Min(bucket, IDEM_RUN_TIME_BUCKETS - 1);
}

/* The middle of a bucket, in microseconds */
static int64
bucket_middle(int bucket)
{
	int			shift = bucket / NBUCKETS - 1;

	if (shift <= 0)
		return bucket;
	return ((int64) (bucket % NBUCKETS + NBUCKETS) << shift) +
		((INT64CONST(1) << shift) >> 1);
}

static void
add_run_time(IdemRunTimes *times, int64 usecs)
{
	if (times->samples >= MAX_SAMPLES)
	{
		times->samples = 0;
		for (int i = 0; i < IDEM_RUN_TIME_BUCKETS; i++)
		{
			times->buckets[i] /= 2;
			times->samples += times->buckets[i];
		}
	}
	times->buckets[bucket_of(usecs)]++;
	times->samples++;
}

/*
 * The run time that this part of all does not exceed, in microseconds; -1 if
 * there are too few to tell.
 */
static int64
run_time_quantile(const IdemRunTimes *times, double quantile)
{
	uint32		samples = 0;
	uint32		seen = 0;
	double		rank;

	/* not times->samples: the histogram may have been copied as it changed */
	for (int i = 0; i < IDEM_RUN_TIME_BUCKETS; i++)
		samples += times->buckets[i];
	rank = ceil(quantile * samples);
	if (samples < MIN_SAMPLES || samples * (1 - quantile) < 1)
		return -1;
	for (int i = 0; i < IDEM_RUN_TIME_BUCKETS; i++)
	{
		seen += times->buckets[i];
		if (seen >= rank)
			return bucket_middle(i);
	}
	return -1;
}

/* ----------------------------------------------------------------
 *		Counting
 * ----------------------------------------------------------------
 */

void
idem_count(const text *route, IdemCounter counter)
{
	int64		now = idem_monotonic_usecs();
	IdemEntry  *service = idem_entry_acquire(IDEM_ROUTE, route, now);

	if (service == NULL)
		return;
	service->counters[counter]++;
	idem_entry_release(service);
}

/*
 * Count an answer of idem_begin.  A first execution is a request to the
 * route's retry budget.  A re-execution that did not ask the budget, since
 * its claim was lost and has to be taken up, is a retry all the same.
 */
void
idem_count_outcome(const text *route, IdemOutcome outcome, bool has_spent)
{
	int64		now = idem_monotonic_usecs();
	IdemEntry  *service = idem_entry_acquire(IDEM_ROUTE, route, now);

	if (service == NULL)
		return;
	service->counters[outcome]++;
	if (outcome == IDEM_STARTED)
		idem_budget_count_request(&service->budget, now);
	else if (outcome == IDEM_RESUMED && !has_spent)
		idem_budget_count_retry(&service->budget, now);
	idem_entry_release(service);
}

/* Count a finish; run_time in microseconds, -1 if it is not known. */
void
idem_count_finish(const text *route, bool kept, int64 run_time)
{
	int64		now = idem_monotonic_usecs();
	IdemEntry  *service = idem_entry_acquire(IDEM_ROUTE, route, now);

	if (service == NULL)
		return;
	service->counters[kept ? IDEM_COUNT_COMPLETED : IDEM_COUNT_FAILED]++;
	if (kept && run_time >= 0)
		add_run_time(&service->run_times, run_time);
	idem_entry_release(service);
}

/* ----------------------------------------------------------------
 *		SQL
 * ----------------------------------------------------------------
 */

/* A row being built, column by column */
typedef struct Row
{
	Datum		values[32];
	bool		isnull[32];
	int			n;
} Row;

static void
put(Row *row, Datum value)
{
	row->values[row->n] = value;
	row->isnull[row->n++] = false;
}

static void
put_null(Row *row)
{
	row->values[row->n] = (Datum) 0;
	row->isnull[row->n++] = true;
}

static void
put_count(Row *row, uint64 count)
{
	put(row, Int64GetDatum((int64) count));
}

static void
put_run_time(Row *row, const IdemRunTimes *times, double quantile)
{
	int64		usecs = run_time_quantile(times, quantile);

	if (usecs < 0)
		put_null(row);
	else
		put(row, idem_usecs_to_interval(usecs));
}

static void
put_row(ReturnSetInfo *rsinfo, Row *row)
{
	Assert(row->n == rsinfo->setDesc->natts);
	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, row->values,
						 row->isnull);
	row->n = 0;
}

/*
 * idem_stat_routes() returns setof record: view idem_stat_routes
 */
Datum
idem_stat_routes(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	int64		now = idem_monotonic_usecs();
	Row			row = {.n = 0};
	ListCell   *lc;

	idem_require_registry();
	InitMaterializedSRF(fcinfo, 0);
	foreach(lc, idem_entries(IDEM_ROUTE))
	{
		IdemEntry  *route = lfirst(lc);

		CHECK_FOR_INTERRUPTS();
		put(&row, CStringGetTextDatum(route->key.name));
		for (int i = 0; i <= IDEM_COUNT_STALE; i++)
			put_count(&row, route->counters[i]);
		put_run_time(&row, &route->run_times, 0.5);
		put_run_time(&row, &route->run_times, 0.95);
		put_run_time(&row, &route->run_times, 0.99);
		idem_budget_advance(&route->budget, now);
		put_count(&row, route->budget.requests);
		put_count(&row, route->budget.retries);
		put(&row, TimestampTzGetDatum(route->since));
		put_row(rsinfo, &row);
	}
	return (Datum) 0;
}

/*
 * idem_stat_services() returns setof record: view idem_entries
 */
Datum
idem_stat_services(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	int64		now = idem_monotonic_usecs();
	Row			row = {.n = 0};
	ListCell   *lc;

	idem_require_registry();
	InitMaterializedSRF(fcinfo, 0);
	foreach(lc, idem_entries(IDEM_SERVICE))
	{
		IdemEntry  *service = lfirst(lc);
		const IdemBreaker *breaker = &service->breaker;
		text	   *name = cstring_to_text(service->key.name);
		IdemServicePolicy policy;

		CHECK_FOR_INTERRUPTS();
		idem_policy_of_service(name, &policy);
		put(&row, PointerGetDatum(name));
		put(&row, CStringGetTextDatum(idem_breaker_state_name(breaker,
															  &policy.breaker)));
		put(&row, Int32GetDatum(breaker->window.calls));
		put(&row, Int32GetDatum(breaker->window.failed));
		put(&row, Int32GetDatum(breaker->window.slow));
		if (breaker->state == IDEM_BREAKER_OPEN)
			put(&row, TimestampTzGetDatum(idem_monotonic_to_timestamp(breaker->open_until)));
		else
			put_null(&row);
		put_count(&row, breaker->opened);
		for (int i = IDEM_COUNT_CALLS_OK; i < IDEM_NCOUNTERS; i++)
			put_count(&row, service->counters[i]);
		idem_budget_advance(&service->budget, now);
		put_count(&row, service->budget.requests);
		put_count(&row, service->budget.retries);
		put(&row, TimestampTzGetDatum(service->since));
		put_row(rsinfo, &row);
	}
	return (Datum) 0;
}

/*
 * idem_stats_reset() returns void
 */
Datum
idem_stats_reset(PG_FUNCTION_ARGS)
{
	idem_require_registry();
	idem_entries_reset();
	PG_RETURN_VOID();
}

/*
 * idem_hedge_after(route, quantile) returns interval
 *
 * NULL if too few run times are known.
 */
Datum
idem_hedge_after(PG_FUNCTION_ARGS)
{
	text	   *route = idem_arg_name(fcinfo, 0, "route");
	double		quantile;
	IdemEntry  *copy;
	int64		usecs;

	if (PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("quantile must not be null")));
	quantile = PG_GETARG_FLOAT8(1);
	if (!(quantile > 0 && quantile < 1))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("quantile must be between 0 and 1")));
	idem_require_registry();

	copy = idem_entry_copy(IDEM_ROUTE, route);
	if (copy == NULL)
		PG_RETURN_NULL();
	usecs = run_time_quantile(&copy->run_times, quantile);
	if (usecs < 0)
		PG_RETURN_NULL();
	PG_RETURN_DATUM(idem_usecs_to_interval(usecs));
}
