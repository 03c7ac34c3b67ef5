/*-------------------------------------------------------------------------
 *
 * timespan.c
 *	  Spans of time: from a start to an end, and in microseconds.
 *
 * In microseconds, what does not fit into an int64 is as long as can be told
 * (PG_INT64_MAX), so nothing overflows.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "common/int.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/timestamp.h"

#include "timespan.h"
#include "compat.h"

/*
 * start + span.  Plain hours, minutes and seconds, the usual case, need no
 * calendar.
 */
static TimestampTz
add_interval(TimestampTz start, const Interval *span)
{
	TimestampTz end;

	if (span->month == 0 && span->day == 0 && !INTERVAL_NOT_FINITE(span) &&
		!pg_add_s64_overflow(start, span->time, &end) &&
		IS_VALID_TIMESTAMP(end))
		return end;

	return DatumGetTimestampTz(DirectFunctionCall2(timestamptz_pl_interval,
												   TimestampTzGetDatum(start),
												   IntervalPGetDatum(span)));
}

static TimestampTz
not_in_range(const char *what, const char *range)
{
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("%s must %s", what, range)));
	return 0;					/* keep the compiler quiet */
}

/* start + span, where the span must be positive (a ttl, a lease) */
TimestampTz
idem_time_after(TimestampTz start, const Interval *span, const char *what)
{
	TimestampTz end = add_interval(start, span);

	return end > start ? end : not_in_range(what, "be positive");
}

/* start + span, where the span may also be zero (a wait) */
TimestampTz
idem_time_not_before(TimestampTz start, const Interval *span,
					 const char *what)
{
	TimestampTz end = add_interval(start, span);

	return end >= start ? end : not_in_range(what, "not be negative");
}

/* Sums and products of spans that end at what can be told */

int64
idem_add_usecs(int64 a, int64 b)
{
	int64		sum;

	return pg_add_s64_overflow(a, b, &sum) ? PG_INT64_MAX : sum;
}

int64
idem_multiply_usecs(int64 a, int64 b)
{
	int64		product;

	return pg_mul_s64_overflow(a, b, &product) ? PG_INT64_MAX : product;
}

/* Length of an interval, which must not be negative, in microseconds */
int64
idem_interval_usecs(const Interval *span, const char *what)
{
	/* 32-bit months and days in 64 bits: fits */
	int64		days = span->month * INT64CONST(30) + span->day;
	int64		usecs;

	if (pg_mul_s64_overflow(days, USECS_PER_DAY, &usecs) ||
		pg_add_s64_overflow(usecs, span->time, &usecs))
		usecs = days > 0 ? PG_INT64_MAX : PG_INT64_MIN;
	if (usecs < 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must not be negative", what)));
	return usecs;
}

Datum
idem_usecs_to_interval(int64 usecs)
{
	Interval   *result = palloc0(sizeof(Interval));

	result->time = usecs;
	return IntervalPGetDatum(result);
}

/*
 * An interval in whole seconds, rounded up, as Retry-After has them: at
 * least one.  Months and days are taken as long as intervals compare.
 */
int64
idem_interval_seconds(const Interval *interval)
{
	int64		days = (int64) interval->month * DAYS_PER_MONTH + interval->day;
	int64		seconds = interval->time / USECS_PER_SEC;

	if (interval->time % USECS_PER_SEC > 0)
		seconds++;
	return Max(days * SECS_PER_DAY + seconds, 1);
}
