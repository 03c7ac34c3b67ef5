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
#include "postgres.h"

#include "common/int.h"
#include "common/pg_prng.h"
#include "utils/builtins.h"
#include "utils/datetime.h"

#include "retry.h"
#include "args.h"
#include "http.h"
#include "timespan.h"

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
			high = idem_multiply_usecs(backoff->previous, 3);
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
	return idem_add_usecs(asked, wait);
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
		idem_parse_retry_after(text_to_cstring(PG_GETARG_TEXT_PP(2)), &asked);

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
		PG_GETARG_TIMESTAMPTZ(3) <= idem_add_usecs(GetCurrentTimestamp(), wait))
		PG_RETURN_NULL();

	PG_RETURN_DATUM(idem_usecs_to_interval(wait));
}
