/*-------------------------------------------------------------------------
 *
 * retry.c
 *	  The retrying side, in pure functions: idem_backoff, idem_retryable,
 *	  idem_retry.
 *
 * Spans of time are microseconds in an int64.  Whatever does not fit is as
 * long as can be told (PG_INT64_MAX), so nothing overflows.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "pg_idem.h"

#include "common/int.h"
#include "common/pg_prng.h"
#include "utils/builtins.h"
#include "utils/datetime.h"

PG_FUNCTION_INFO_V1(idem_backoff);
PG_FUNCTION_INFO_V1(idem_retryable_status);
PG_FUNCTION_INFO_V1(idem_retryable_sqlstate);
PG_FUNCTION_INFO_V1(idem_retry);

#define DEFAULT_BASE	(100 * INT64CONST(1000))
#define DEFAULT_CAP		(30 * USECS_PER_SEC)

typedef enum Jitter
{
	JITTER_NONE,
	JITTER_FULL,
	JITTER_EQUAL,
	JITTER_DECORRELATED
} Jitter;

/* How to wait between retries; the arguments that both functions take */
typedef struct Backoff
{
	int64		base;
	int64		cap;
	Jitter		jitter;
	int64		previous;
	bool		seeded;
	pg_prng_state prng;			/* if seeded */
} Backoff;

/* ----------------------------------------------------------------
 *		Spans of time
 * ----------------------------------------------------------------
 */

static int64
add_saturated(int64 a, int64 b)
{
	int64		sum;

	return pg_add_s64_overflow(a, b, &sum) ? PG_INT64_MAX : sum;
}

static int64
multiply_saturated(int64 a, int64 b)
{
	int64		product;

	return pg_mul_s64_overflow(a, b, &product) ? PG_INT64_MAX : product;
}

/*
 * An interval argument in microseconds, a month being 30 days as where
 * intervals are compared; the default where it is NULL.
 */
int64
idem_arg_usecs(FunctionCallInfo fcinfo, int argno, const char *what,
			   int64 default_usecs)
{
	return PG_ARGISNULL(argno) ? default_usecs :
		idem_interval_usecs(PG_GETARG_INTERVAL_P(argno), what);
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

/* base * 2^n, but not more than cap */
int64
idem_exponential(int64 base, int64 cap, int32 n)
{
	if (base == 0)
		return 0;
	if (n >= 63 || base > (cap >> n))
		return cap;
	return base << n;
}

/* ----------------------------------------------------------------
 *		Backoff
 * ----------------------------------------------------------------
 */

/* Any span from low to high, both included, with the same probability */
static int64
uniform(Backoff *backoff, int64 low, int64 high)
{
	return (int64) pg_prng_uint64_range(backoff->seeded ? &backoff->prng :
										&pg_global_prng_state,
										(uint64) low, (uint64) high);
}

static int64
next_wait(Backoff *backoff, int32 retry)
{
	int64		v = idem_exponential(backoff->base, backoff->cap, retry);
	int64		high;

	switch (backoff->jitter)
	{
		case JITTER_NONE:
			break;
		case JITTER_FULL:
			return uniform(backoff, 0, v);
		case JITTER_EQUAL:
			return v / 2 + uniform(backoff, 0, v - v / 2);
		case JITTER_DECORRELATED:
			high = multiply_saturated(backoff->previous, 3);
			v = uniform(backoff, Min(backoff->base, high),
						Max(backoff->base, high));
			return Min(v, backoff->cap);
	}
	return v;
}

/* A wait with full jitter, for what the server itself puts off */
int64
idem_full_jitter(int64 base, int64 cap, int32 retry)
{
	Backoff		backoff = {.base = base, .cap = cap, .jitter = JITTER_FULL};

	return next_wait(&backoff, retry);
}

static Jitter
arg_jitter(FunctionCallInfo fcinfo, int argno)
{
	static const char *const name[] = {
		[JITTER_NONE] = "none",
		[JITTER_FULL] = "full",
		[JITTER_EQUAL] = "equal",
		[JITTER_DECORRELATED] = "decorrelated"
	};
	char	   *given;

	if (PG_ARGISNULL(argno))
		return JITTER_FULL;
	given = text_to_cstring(PG_GETARG_TEXT_PP(argno));
	for (int i = 0; i < lengthof(name); i++)
	{
		if (strcmp(given, name[i]) == 0)
			return (Jitter) i;
	}
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("jitter \"%s\" is not known", given),
			 errhint("It can be none, full, equal or decorrelated.")));
	return JITTER_NONE;			/* keep the compiler quiet */
}

/* base, cap, jitter, previous, seed: the arguments from argno on */
static void
arg_backoff(FunctionCallInfo fcinfo, int argno, Backoff *backoff)
{
	backoff->base = idem_arg_usecs(fcinfo, argno, "base", DEFAULT_BASE);
	backoff->cap = idem_arg_usecs(fcinfo, argno + 1, "cap", DEFAULT_CAP);
	backoff->jitter = arg_jitter(fcinfo, argno + 2);
	backoff->previous = idem_arg_usecs(fcinfo, argno + 3, "previous",
									   backoff->base);
	backoff->seeded = !PG_ARGISNULL(argno + 4);
	if (backoff->seeded)
		pg_prng_seed(&backoff->prng, (uint64) PG_GETARG_INT64(argno + 4));
}

/* How many retries there have been: 0 before the first one */
static int32
arg_retry(FunctionCallInfo fcinfo, int argno)
{
	if (PG_ARGISNULL(argno))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("retry must not be null")));
	if (PG_GETARG_INT32(argno) < 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("retry must not be negative"),
				 errdetail("It is 0 for the first retry.")));
	return PG_GETARG_INT32(argno);
}

/*
 * idem_backoff(retry, base, cap, jitter, previous, seed) returns interval
 */
Datum
idem_backoff(PG_FUNCTION_ARGS)
{
	int32		retry = arg_retry(fcinfo, 0);
	Backoff		backoff;

	arg_backoff(fcinfo, 1, &backoff);
	PG_RETURN_DATUM(idem_usecs_to_interval(next_wait(&backoff, retry)));
}

/* ----------------------------------------------------------------
 *		What is retryable
 * ----------------------------------------------------------------
 */

/*
 * May a request that got this status be sent again as it is?  Of the errors
 * of a server, those that tell of its configuration or of the request itself
 * will not go away.
 */
static bool
status_is_retryable(int status)
{
	switch (status)
	{
		case 408:				/* Request Timeout */
		case 425:				/* Too Early */
		case 429:				/* Too Many Requests */
			return true;
		case 501:				/* Not Implemented */
		case 505:				/* HTTP Version Not Supported */
		case 506:				/* Variant Also Negotiates */
		case 508:				/* Loop Detected */
		case 510:				/* Not Extended */
		case 511:				/* Network Authentication Required */
			return false;
		default:
			return status >= 500 && status <= 599;
	}
}

/*
 * idem_retryable(status int) returns bool
 *
 * NULL for 409: whether to retry depends on the state of the resource.
 */
Datum
idem_retryable_status(PG_FUNCTION_ARGS)
{
	if (PG_ARGISNULL(0))
		PG_RETURN_BOOL(true);	/* no answer */
	if (PG_GETARG_INT32(0) == 409)
		PG_RETURN_NULL();
	PG_RETURN_BOOL(status_is_retryable(PG_GETARG_INT32(0)));
}

/*
 * idem_retryable(sqlstate text) returns bool
 */
Datum
idem_retryable_sqlstate(PG_FUNCTION_ARGS)
{
	char	   *sqlstate;
	int			code;

	if (PG_ARGISNULL(0))
		PG_RETURN_BOOL(true);	/* no answer */
	sqlstate = text_to_cstring(PG_GETARG_TEXT_PP(0));
	if (strlen(sqlstate) != 5 ||
		strspn(sqlstate, "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ") != 5)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("\"%s\" is not an SQLSTATE", sqlstate),
				 errdetail("An SQLSTATE has five digits or capital letters."),
				 errhint("An HTTP status is to be passed as an integer.")));

	code = MAKE_SQLSTATE(sqlstate[0], sqlstate[1], sqlstate[2], sqlstate[3],
						 sqlstate[4]);
	switch (code)
	{
		case ERRCODE_T_R_SERIALIZATION_FAILURE:
		case ERRCODE_T_R_DEADLOCK_DETECTED:
		case ERRCODE_LOCK_NOT_AVAILABLE:
		case ERRCODE_ADMIN_SHUTDOWN:
		case ERRCODE_CRASH_SHUTDOWN:
		case ERRCODE_CANNOT_CONNECT_NOW:
			PG_RETURN_BOOL(true);
	}
	switch (ERRCODE_TO_CATEGORY(code))
	{
		case ERRCODE_CONNECTION_EXCEPTION:	/* class 08 */
		case ERRCODE_INSUFFICIENT_RESOURCES:	/* class 53 */
			PG_RETURN_BOOL(true);
	}
	PG_RETURN_BOOL(false);
}

/* ----------------------------------------------------------------
 *		Retry-After
 * ----------------------------------------------------------------
 */

static int
month_number(const char *name)
{
	for (int i = 0; i < MONTHS_PER_YEAR; i++)
	{
		if (strcmp(months[i], name) == 0)
			return i + 1;
	}
	return 0;
}

/*
 * The full year of a date that has two digits of it: RFC 9110 wants one that
 * seems to be more than 50 years ahead to be of the past.
 */
static int
full_year(int two_digits, int this_year)
{
	int			year = this_year - this_year % 100 + two_digits;

	return year > this_year + 50 ? year - 100 : year;
}

/*
 * Does s look as the shape does?  There, "a" is any letter, "0" any digit and
 * "_" a digit or a blank.
 */
static bool
has_shape(const char *s, const char *shape)
{
	for (; *shape != '\0'; s++, shape++)
	{
		bool		is_letter = (*s >= 'a' && *s <= 'z') ||
			(*s >= 'A' && *s <= 'Z');
		bool		is_digit = *s >= '0' && *s <= '9';

		if (*shape == 'a' ? !is_letter :
			*shape == '0' ? !is_digit :
			*shape == '_' ? !is_digit && *s != ' ' :
			*s != *shape)
			return false;
	}
	return *s == '\0';
}

/*
 * Read an HTTP date, in any of the three forms that RFC 9110 has.  The name
 * of the day is not compared with the date.
 */
static bool
parse_http_date(const char *s, TimestampTz now, TimestampTz *result)
{
	struct pg_tm tm;
	fsec_t		fsec;
	int			utc = 0;
	int			this_year;
	char		month[4];
	size_t		day_name = strspn(s, "abcdefghijklmnopqrstuvwxyz"
								  "ABCDEFGHIJKLMNOPQRSTUVWXYZ");

	if (timestamp2tm(now, &utc, &tm, &fsec, NULL, NULL) != 0)
		return false;
	this_year = tm.tm_year;
	utc = 0;
	memset(&tm, 0, sizeof(tm));

	/* Sun, 06 Nov 1994 08:49:37 GMT */
	if (has_shape(s, "aaa, 00 aaa 0000 00:00:00 GMT"))
		(void) sscanf(s + day_name, ", %2d %3s %4d %2d:%2d:%2d",
					  &tm.tm_mday, month, &tm.tm_year, &tm.tm_hour,
					  &tm.tm_min, &tm.tm_sec);

	/* Sunday, 06-Nov-94 08:49:37 GMT */
	else if (day_name > 0 &&
			 has_shape(s + day_name, ", 00-aaa-00 00:00:00 GMT"))
	{
		(void) sscanf(s + day_name, ", %2d-%3s-%2d %2d:%2d:%2d",
					  &tm.tm_mday, month, &tm.tm_year, &tm.tm_hour,
					  &tm.tm_min, &tm.tm_sec);
		tm.tm_year = full_year(tm.tm_year, this_year);
	}

	/* Sun Nov  6 08:49:37 1994 */
	else if (has_shape(s, "aaa aaa _0 00:00:00 0000"))
		(void) sscanf(s + day_name, " %3s %2d %2d:%2d:%2d %4d",
					  month, &tm.tm_mday, &tm.tm_hour, &tm.tm_min,
					  &tm.tm_sec, &tm.tm_year);
	else
		return false;

	tm.tm_mon = month_number(month);
	if (tm.tm_mon == 0 || tm.tm_year < 1 ||
		tm.tm_mday < 1 ||
		tm.tm_mday > day_tab[isleap(tm.tm_year)][tm.tm_mon - 1] ||
		tm.tm_hour < 0 || tm.tm_hour > 23 ||
		tm.tm_min < 0 || tm.tm_min > 59 ||
		tm.tm_sec < 0 || tm.tm_sec > 60)
		return false;
	return tm2timestamp(&tm, 0, &utc, result) == 0;
}

/*
 * How long a Retry-After header asks to wait; 0 for a date that has passed.
 * False if it is malformed: it comes from somebody else's server, and so is
 * no error of the caller's.
 */
static bool
parse_retry_after(char *s, int64 *usecs)
{
	const char *const blanks = " \t";
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz date;
	size_t		len;

	s += strspn(s, blanks);
	len = strlen(s);
	while (len > 0 && strchr(blanks, s[len - 1]) != NULL)
		s[--len] = '\0';

	if (len > 0 && strspn(s, "0123456789") == len)
	{
		*usecs = 0;
		for (; *s != '\0'; s++)
			*usecs = add_saturated(multiply_saturated(*usecs, 10), *s - '0');
		*usecs = multiply_saturated(*usecs, USECS_PER_SEC);
		return true;
	}
	if (!parse_http_date(s, now, &date))
		return false;
	*usecs = Max(date - now, 0);
	return true;
}

/* ----------------------------------------------------------------
 *		Whether and when to retry
 * ----------------------------------------------------------------
 */

/*
 * The server's wish and our own backoff together: never sooner than it says,
 * and with jitter not all at once either.
 */
static int64
wait_at_least(const Backoff *backoff, int64 wait, int64 asked)
{
	if (backoff->jitter == JITTER_NONE)
		return Max(wait, asked);
	return add_saturated(asked, wait);
}

/*
 * idem_retry(retry, status, retry_after, expires_at, max_attempts, base, cap,
 *			  jitter, previous, seed) returns interval
 *
 * NULL means: give up.
 */
Datum
idem_retry(PG_FUNCTION_ARGS)
{
	int32		retry = arg_retry(fcinfo, 0);
	int32		max_attempts = PG_ARGISNULL(4) ? idem_max_attempts :
		PG_GETARG_INT32(4);
	Backoff		backoff;
	bool		has_asked;
	int64		asked = 0;
	int64		wait;

	arg_backoff(fcinfo, 5, &backoff);
	if (max_attempts < 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("max_attempts must be positive")));

	has_asked = !PG_ARGISNULL(2) &&
		parse_retry_after(text_to_cstring(PG_GETARG_TEXT_PP(2)), &asked);

	if (!PG_ARGISNULL(1))
	{
		int			status = PG_GETARG_INT32(1);

		/* a 409 that names a time is a request still under way */
		if (status == 409 ? !has_asked : !status_is_retryable(status))
			PG_RETURN_NULL();
	}
	if (retry >= max_attempts - 1)
		PG_RETURN_NULL();

	wait = next_wait(&backoff, retry);
	if (has_asked)
		wait = wait_at_least(&backoff, wait, asked);

	/* once the key is forgotten, a retry would be a new request */
	if (!PG_ARGISNULL(3) &&
		PG_GETARG_TIMESTAMPTZ(3) <= add_saturated(GetCurrentTimestamp(), wait))
		PG_RETURN_NULL();

	PG_RETURN_DATUM(idem_usecs_to_interval(wait));
}
