/*-------------------------------------------------------------------------
 *
 * registry_budget.c
 *	  Retry budgets: how many retries a service has to bear.
 *
 * A retry is allowed while, in a window of the last ten seconds,
 *
 *		retries <= ratio * requests + minimum per second * 10
 *
 * holds with it.  Retries are no requests, so that in a storm, when every
 * request fails and every client retries, the load grows by the ratio and not
 * by the number of retries that clients make.  The window is cut into slots;
 * the slot that began least recently leaves it as a whole, so the window is
 * never shorter than ten seconds, and half a second longer at the most.
 *
 * The budget is part of a service's entry in shared memory, and so is changed
 * only while that is held; see registry.c.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <math.h>

#include "common/pg_prng.h"

#include "registry.h"
#include "args.h"

PG_FUNCTION_INFO_V1(idem_budget_allow);

#define WINDOW_SECS		10
#define SLOT_USECS		(USECS_PER_SEC / 2)

StaticAssertDecl((IDEM_BUDGET_SLOTS - 1) * SLOT_USECS ==
				 WINDOW_SECS * USECS_PER_SEC,
				 "whole slots of a budget must cover its window");

/* Let what has left the window go. */
void
idem_budget_advance(IdemBudget *budget, int64 now)
{
	int64		slot = now / SLOT_USECS;

	if (slot - budget->slot >= IDEM_BUDGET_SLOTS)
	{
		memset(budget, 0, sizeof(*budget));
		budget->slot = slot;
	}
	while (budget->slot < slot)
	{
		int			i = ++budget->slot % IDEM_BUDGET_SLOTS;

		budget->requests -= budget->slot_requests[i];
		budget->retries -= budget->slot_retries[i];
		budget->slot_requests[i] = 0;
		budget->slot_retries[i] = 0;
	}
}

void
idem_budget_count_request(IdemBudget *budget, int64 now)
{
	idem_budget_advance(budget, now);
	budget->requests++;
	budget->slot_requests[budget->slot % IDEM_BUDGET_SLOTS]++;
}

void
idem_budget_count_retry(IdemBudget *budget, int64 now)
{
	idem_budget_advance(budget, now);
	budget->retries++;
	budget->slot_retries[budget->slot % IDEM_BUDGET_SLOTS]++;
}

/* Spend one retry, if the budget has one. */
static bool
spend(IdemBudget *budget, const IdemBudgetPolicy *policy, int64 now)
{
	double		over_minimum;

	idem_budget_advance(budget, now);
	over_minimum = budget->retries + 1 - policy->min_per_second * WINDOW_SECS;

	/* a quotient is rounded as the ratio is; a product need not be */
	if (over_minimum > 0 &&
		(budget->requests == 0 ? !isinf(policy->ratio) :
		 over_minimum / budget->requests > policy->ratio))
		return false;
	idem_budget_count_retry(budget, now);
	return true;
}

/* Give a retry back that was not made after all. */
static void
refund(IdemBudget *budget, int64 now)
{
	int			i;

	idem_budget_advance(budget, now);
	i = budget->slot % IDEM_BUDGET_SLOTS;

	/* if its slot is not the current one any more, it ages like any other */
	if (budget->slot_retries[i] > 0)
	{
		budget->slot_retries[i]--;
		budget->retries--;
	}
}

/*
 * When to come back to a budget that is spent, in microseconds: at any time
 * within the window that refuses, lest all come back at once
 */
int64
idem_budget_retry_after(void)
{
	return (int64) pg_prng_uint64_range(&pg_global_prng_state, USECS_PER_SEC,
										WINDOW_SECS * USECS_PER_SEC);
}

/* ----------------------------------------------------------------
 *		A route's budget, which idem_begin spends on re-executions
 * ----------------------------------------------------------------
 */

bool
idem_route_spend_retry(const text *route, const IdemBudgetPolicy *policy)
{
	int64		now = idem_monotonic_usecs();
	IdemEntry  *service = idem_entry_acquire(IDEM_ROUTE, route, now);
	bool		spent;

	if (service == NULL)
		return true;
	spent = spend(&service->budget, policy, now);
	idem_entry_release(service);
	return spent;
}

/* The re-execution is not going to be, or not now. */
void
idem_route_refund_retry(const text *route)
{
	int64		now = idem_monotonic_usecs();
	IdemEntry  *service = idem_entry_acquire(IDEM_ROUTE, route, now);

	if (service == NULL)
		return;
	refund(&service->budget, now);
	idem_entry_release(service);
}

/* ----------------------------------------------------------------
 *		SQL
 * ----------------------------------------------------------------
 */

/*
 * idem_budget_allow(service, is_retry) returns bool
 */
Datum
idem_budget_allow(PG_FUNCTION_ARGS)
{
	text	   *name = idem_arg_name(fcinfo, 0, "service");
	IdemServicePolicy policy;
	IdemEntry  *service;
	int64		now;
	bool		is_retry;
	bool		allowed = true;

	if (PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("is_retry must not be null")));
	is_retry = PG_GETARG_BOOL(1);
	idem_require_registry();
	idem_policy_of_service(name, &policy);

	now = idem_monotonic_usecs();
	service = idem_entry_acquire(IDEM_SERVICE, name, now);
	if (!is_retry)
		idem_budget_count_request(&service->budget, now);
	else if (!spend(&service->budget, &policy.budget, now))
	{
		service->counters[IDEM_COUNT_RETRIES_REFUSED]++;
		allowed = false;
	}
	idem_entry_release(service);
	PG_RETURN_BOOL(allowed);
}
