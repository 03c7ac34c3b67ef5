/*-------------------------------------------------------------------------
 *
 * registry_breaker.c
 *	  Circuit breakers: when to leave a service alone.
 *
 *				 too many of the last calls failed or were slow
 *		closed ---------------------------------------------------> open
 *		  ^														   |  ^
 *		  | enough trials went well			   the open time is over, |  |
 *		  +----------------------- half_open <---- and somebody asks -+  |
 *									   | too many trials did not		 |
 *									   +----------- open for longer -----+
 *
 * Callers ask before each call, and tell of its end.  In closed, the results
 * of the last calls are kept in a ring.  In half_open, a few calls are let
 * through as trials, and their results decide; those that are not told of
 * within half_open_time of the last one count as failed and as slow, so that a
 * caller that died does not hold the breaker up.  A person can force a breaker
 * open or closed in table idem_service_policies, which takes effect when the
 * breaker is next asked for; one that was forced is closed afterwards.
 *
 * The state is part of a service's entry in shared memory, and so is changed
 * only while that is held: all connections see a change at once, and no two
 * get the same trial.  See registry.c.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "common/int.h"
#include "utils/builtins.h"

#include "registry.h"
#include "args.h"
#include "retry.h"
#include "timespan.h"

PG_FUNCTION_INFO_V1(idem_breaker_allow);
PG_FUNCTION_INFO_V1(idem_breaker_record);
PG_FUNCTION_INFO_V1(idem_breaker_retry_after);
PG_FUNCTION_INFO_V1(idem_breaker_reset);

/* Results of calls, in bits of the ring */
#define CALL_FAILED		0x01
#define CALL_SLOW		0x02

/* When to ask again where that depends on other calls */
#define RETRY_AFTER_USECS	USECS_PER_SEC

static const char *const state_name[] = {
	[IDEM_BREAKER_CLOSED] = "closed",
	[IDEM_BREAKER_OPEN] = "open",
	[IDEM_BREAKER_HALF_OPEN] = "half_open"
};

/* The state's name, for people */
const char *
idem_breaker_state_name(const IdemBreaker *breaker,
						const IdemBreakerPolicy *policy)
{
	switch (policy->forced)
	{
		case IDEM_FORCED_OPEN:
			return "forced_open";
		case IDEM_FORCED_CLOSED:
			return "forced_closed";
		case IDEM_NOT_FORCED:
			break;
	}
	return state_name[breaker->state];
}

/*
 * Done with the entry of a service.  A breaker that is not closed is kept for
 * an hour after its trials were due; then it is not in use any more.
 */
static void
release(IdemEntry *service)
{
	const IdemBreaker *breaker = &service->breaker;
	int64		since = 0;

	switch (breaker->state)
	{
		case IDEM_BREAKER_OPEN:
			since = breaker->open_until;
			break;
		case IDEM_BREAKER_HALF_OPEN:
			since = breaker->last_trial;
			break;
		case IDEM_BREAKER_CLOSED:
			break;
	}
	service->keep_until = since == 0 ? 0 :
		idem_add_usecs(since, SECS_PER_HOUR * USECS_PER_SEC);
	idem_entry_release(service);
}

/* ----------------------------------------------------------------
 *		The state machine.  The service's entry must be held.
 * ----------------------------------------------------------------
 */

static void
enter_state(IdemBreaker *breaker, IdemBreakerState state)
{
	breaker->state = state;
	breaker->next = 0;
	memset(&breaker->window, 0, sizeof(breaker->window));
	memset(&breaker->trials, 0, sizeof(breaker->trials));
	breaker->trials_allowed = 0;
}

static void
close_breaker(IdemBreaker *breaker)
{
	enter_state(breaker, IDEM_BREAKER_CLOSED);
	breaker->openings = 0;
}

/* Open, for twice as long as the last time if it was not closed since */
static void
open_breaker(IdemBreaker *breaker, const IdemBreakerPolicy *policy, int64 now)
{
	int64		length = idem_exponential(policy->open_time,
										  Max(policy->open_time,
											  policy->max_open_time),
										  breaker->openings);

	enter_state(breaker, IDEM_BREAKER_OPEN);
	if (pg_add_s64_overflow(now, length, &breaker->open_until))
		breaker->open_until = PG_INT64_MAX;
	if (breaker->openings < PG_INT32_MAX)
		breaker->openings++;
	breaker->opened++;
}

/*
 * Does one of the ratios reach its limit?  The quotient is rounded as the
 * limit is, so 55 of 100 are 0.55; a product need not be.
 */
static bool
is_too_bad(const IdemBreakerTally *tally, const IdemBreakerPolicy *policy)
{
	double		calls = tally->calls;

	return tally->failed / calls >= policy->failure_ratio ||
		tally->slow / calls >= policy->slow_call_ratio;
}

/* Decide a trial period whose results are in. */
static void
judge_trials(IdemBreaker *breaker, const IdemBreakerPolicy *policy, int64 now)
{
	if (is_too_bad(&breaker->trials, policy))
		open_breaker(breaker, policy, now);
	else
		close_breaker(breaker);
}

static void
tally_call(IdemBreakerTally *tally, uint8 result, int by)
{
	tally->calls += by;
	if (result & CALL_FAILED)
		tally->failed += by;
	if (result & CALL_SLOW)
		tally->slow += by;
}

/* Put a result into the ring, and open the breaker if that crosses a line. */
static void
record_closed(IdemBreaker *breaker, const IdemBreakerPolicy *policy,
			  uint8 result, int64 now)
{
	/* a ring of another length starts anew */
	if (breaker->window_size != policy->window_calls)
	{
		enter_state(breaker, IDEM_BREAKER_CLOSED);
		breaker->window_size = policy->window_calls;
	}

	if (breaker->window.calls == breaker->window_size)
		tally_call(&breaker->window, breaker->results[breaker->next], -1);
	breaker->results[breaker->next] = result;
	tally_call(&breaker->window, result, 1);
	breaker->next = (breaker->next + 1) % breaker->window_size;

	if (breaker->window.calls >= Min(policy->minimum_calls,
									 policy->window_calls) &&
		is_too_bad(&breaker->window, policy))
		open_breaker(breaker, policy, now);
}

/*
 * A force takes effect where it is first seen.  What it is released into is
 * a closed breaker.
 */
static void
apply_force(IdemBreaker *breaker, const IdemBreakerPolicy *policy)
{
	if (policy->forced != IDEM_NOT_FORCED &&
		(breaker->state != IDEM_BREAKER_CLOSED || breaker->window.calls > 0))
		close_breaker(breaker);
}

/* When trials that are not told of are given up */
static int64
trials_end(const IdemBreaker *breaker, const IdemBreakerPolicy *policy)
{
	int64		end;

	if (pg_add_s64_overflow(breaker->last_trial, policy->half_open_time, &end))
		return PG_INT64_MAX;
	return end;
}

/*
 * Decide the trials, if all that there are to be have been told of, or have
 * been let through and their time is over.
 */
static void
settle_trials(IdemBreaker *breaker, const IdemBreakerPolicy *policy,
			  int64 now)
{
	if (breaker->state != IDEM_BREAKER_HALF_OPEN ||
		breaker->trials_allowed < policy->half_open_calls)
		return;

	if (breaker->trials.calls < policy->half_open_calls)
	{
		if (trials_end(breaker, policy) > now)
			return;
		tally_call(&breaker->trials, CALL_FAILED | CALL_SLOW,
				   breaker->trials_allowed - breaker->trials.calls);
	}
	judge_trials(breaker, policy, now);
}

static bool
allow(IdemBreaker *breaker, const IdemBreakerPolicy *policy, int64 now)
{
	apply_force(breaker, policy);
	if (policy->forced != IDEM_NOT_FORCED)
		return policy->forced == IDEM_FORCED_CLOSED;

	settle_trials(breaker, policy, now);
	if (breaker->state == IDEM_BREAKER_OPEN && breaker->open_until <= now)
		enter_state(breaker, IDEM_BREAKER_HALF_OPEN);

	switch (breaker->state)
	{
		case IDEM_BREAKER_CLOSED:
			return true;
		case IDEM_BREAKER_OPEN:
			return false;
		case IDEM_BREAKER_HALF_OPEN:
			if (breaker->trials_allowed >= policy->half_open_calls)
				return false;
			breaker->trials_allowed++;
			breaker->last_trial = now;
			return true;
	}
	return true;				/* keep the compiler quiet */
}

static void
record(IdemBreaker *breaker, const IdemBreakerPolicy *policy, uint8 result,
	   int64 now)
{
	apply_force(breaker, policy);
	if (policy->forced != IDEM_NOT_FORCED)
		return;

	settle_trials(breaker, policy, now);
	switch (breaker->state)
	{
		case IDEM_BREAKER_CLOSED:
			record_closed(breaker, policy, result, now);
			break;

		case IDEM_BREAKER_OPEN:
			/* a call from before that ends now says nothing new */
			break;

		case IDEM_BREAKER_HALF_OPEN:
			if (breaker->trials.calls >= breaker->trials_allowed)
				break;
			tally_call(&breaker->trials, result, 1);
			settle_trials(breaker, policy, now);
			break;
	}
}

/* Microseconds until it is worth asking again; 0 if it is now */
static int64
retry_after(IdemBreaker *breaker, const IdemBreakerPolicy *policy, int64 now)
{
	apply_force(breaker, policy);
	switch (policy->forced)
	{
		case IDEM_FORCED_OPEN:
			return Max(policy->open_time, RETRY_AFTER_USECS);
		case IDEM_FORCED_CLOSED:
			return 0;
		case IDEM_NOT_FORCED:
			break;
	}

	settle_trials(breaker, policy, now);
	switch (breaker->state)
	{
		case IDEM_BREAKER_OPEN:
			return Max(breaker->open_until - now, 0);
		case IDEM_BREAKER_HALF_OPEN:
			if (breaker->trials_allowed < policy->half_open_calls)
				return 0;
			return Min(trials_end(breaker, policy) - now, RETRY_AFTER_USECS);
		case IDEM_BREAKER_CLOSED:
			break;
	}
	return 0;
}

/* ----------------------------------------------------------------
 *		SQL
 * ----------------------------------------------------------------
 */

/* The service and its policy; an error without shared memory */
static text *
arg_service(FunctionCallInfo fcinfo, IdemServicePolicy *policy)
{
	text	   *name = idem_arg_name(fcinfo, 0, "service");

	idem_require_registry();
	idem_policy_of_service(name, policy);
	return name;
}

/*
 * idem_breaker_allow(service) returns bool
 */
Datum
idem_breaker_allow(PG_FUNCTION_ARGS)
{
	IdemServicePolicy policy;
	text	   *name = arg_service(fcinfo, &policy);
	int64		now = idem_monotonic_usecs();
	IdemEntry  *service = idem_entry_acquire(IDEM_SERVICE, name, now);
	bool		allowed = allow(&service->breaker, &policy.breaker, now);

	if (!allowed)
		service->counters[IDEM_COUNT_CALLS_REFUSED]++;
	release(service);
	PG_RETURN_BOOL(allowed);
}

/*
 * idem_breaker_record(service, ok, duration) returns text, the state
 */
Datum
idem_breaker_record(PG_FUNCTION_ARGS)
{
	IdemServicePolicy policy;
	text	   *name = arg_service(fcinfo, &policy);
	int64		duration = idem_arg_usecs(fcinfo, 2, "duration", 0);
	uint8		result = 0;
	IdemEntry  *service;
	const char *state;
	int64		now;

	if (PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("ok must not be null")));
	if (!PG_GETARG_BOOL(1))
		result |= CALL_FAILED;
	if (duration > policy.breaker.slow_call_time)
		result |= CALL_SLOW;

	now = idem_monotonic_usecs();
	service = idem_entry_acquire(IDEM_SERVICE, name, now);
	service->counters[result & CALL_FAILED ? IDEM_COUNT_CALLS_FAILED :
					  IDEM_COUNT_CALLS_OK]++;
	if (result & CALL_SLOW)
		service->counters[IDEM_COUNT_CALLS_SLOW]++;
	record(&service->breaker, &policy.breaker, result, now);
	state = idem_breaker_state_name(&service->breaker, &policy.breaker);
	release(service);
	PG_RETURN_TEXT_P(cstring_to_text(state));
}

/*
 * idem_breaker_retry_after(service) returns interval
 *
 * NULL where the next call would be let through.
 */
Datum
idem_breaker_retry_after(PG_FUNCTION_ARGS)
{
	IdemServicePolicy policy;
	text	   *name = arg_service(fcinfo, &policy);
	int64		now = idem_monotonic_usecs();
	IdemEntry  *service = idem_entry_find(IDEM_SERVICE, name, now);
	IdemBreaker none = {.state = IDEM_BREAKER_CLOSED};
	int64		wait;

	if (service == NULL)
		wait = retry_after(&none, &policy.breaker, now);
	else
	{
		wait = retry_after(&service->breaker, &policy.breaker, now);
		release(service);
	}
	if (wait == 0)
		PG_RETURN_NULL();
	PG_RETURN_DATUM(idem_usecs_to_interval(wait));
}

/*
 * idem_breaker_reset(service) returns void
 */
Datum
idem_breaker_reset(PG_FUNCTION_ARGS)
{
	text	   *name = idem_arg_name(fcinfo, 0, "service");
	IdemEntry  *service;

	idem_require_registry();
	service = idem_entry_find(IDEM_SERVICE, name, idem_monotonic_usecs());
	if (service != NULL)
	{
		close_breaker(&service->breaker);
		release(service);
	}
	PG_RETURN_VOID();
}
