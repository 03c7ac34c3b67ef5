/*-------------------------------------------------------------------------
 *
 * services.c
 *	  The policy of a service: table idem_service_policies over defaults.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "pg_idem.h"

#include "catalog/pg_type.h"

/* Columns of idem_service_policies */
#define Anum_services_service			1
#define Anum_services_retry_ratio		2
#define Anum_services_retry_min			3
#define Anum_services_failure_ratio		4
#define Anum_services_slow_call_ratio	5
#define Anum_services_slow_call_time	6
#define Anum_services_window_calls		7
#define Anum_services_minimum_calls		8
#define Anum_services_open_time			9
#define Anum_services_max_open_time		10
#define Anum_services_half_open_calls	11
#define Anum_services_half_open_time	12
#define Anum_services_breaker			13
#define Natts_services					13

static const Oid column_type[Natts_services] = {
	TEXTOID, FLOAT8OID, FLOAT8OID, FLOAT8OID, FLOAT8OID, INTERVALOID, INT4OID,
	INT4OID, INTERVALOID, INTERVALOID, INT4OID, INTERVALOID, TEXTOID
};

/* A row of idem_service_policies; what is NULL there is not set here */
typedef struct ServiceRow
{
	IdemPolicyRow base;
	IdemServicePolicy policy;
} ServiceRow;

static int64
usecs_column(TupleTableSlot *slot, AttrNumber attno, const char *what)
{
	Interval	span = idem_policy_interval(slot, attno);

	return idem_interval_usecs(&span, what);
}

static void
load_service(IdemPolicyRow *row, TupleTableSlot *slot)
{
	IdemServicePolicy *policy = &((ServiceRow *) row)->policy;
	IdemBreakerPolicy *breaker = &policy->breaker;
	const char *forced = idem_policy_text(slot, Anum_services_breaker);

	policy->budget.ratio = idem_policy_float(slot, Anum_services_retry_ratio);
	policy->budget.min_per_second =
		idem_policy_float(slot, Anum_services_retry_min);
	breaker->failure_ratio =
		idem_policy_float(slot, Anum_services_failure_ratio);
	breaker->slow_call_ratio =
		idem_policy_float(slot, Anum_services_slow_call_ratio);
	breaker->slow_call_time =
		usecs_column(slot, Anum_services_slow_call_time, "slow_call_time");

	/*
	 * Shared memory has no room for a longer window, and a CHECK constraint
	 * is only as good as the table's owner.
	 */
	breaker->window_calls = idem_policy_int(slot, Anum_services_window_calls);
	breaker->window_calls = Max(Min(breaker->window_calls,
									IDEM_MAX_WINDOW_CALLS), 1);

	breaker->minimum_calls =
		idem_policy_int(slot, Anum_services_minimum_calls);
	breaker->open_time =
		usecs_column(slot, Anum_services_open_time, "open_time");
	breaker->max_open_time =
		usecs_column(slot, Anum_services_max_open_time, "max_open_time");
	breaker->half_open_calls =
		idem_policy_int(slot, Anum_services_half_open_calls);
	breaker->half_open_time =
		usecs_column(slot, Anum_services_half_open_time, "half_open_time");

	/* another word, which a CHECK constraint keeps out, is none */
	breaker->forced = strcmp(forced, "forced_open") == 0 ? IDEM_FORCED_OPEN :
		strcmp(forced, "forced_closed") == 0 ? IDEM_FORCED_CLOSED :
		IDEM_NOT_FORCED;
}

static IdemPolicyCache services = {
	.natts = Natts_services,
	.types = column_type,
	.rowsize = sizeof(ServiceRow),
	.load = load_service
};

/* The policy that holds where there is no row for a service */
static void
default_policy(IdemServicePolicy *policy)
{
	policy->budget.ratio = idem_retry_ratio;
	policy->budget.min_per_second = idem_retry_min_per_second;
	policy->breaker.failure_ratio = 0.5;
	policy->breaker.slow_call_ratio = 1.0;
	policy->breaker.slow_call_time = 60 * USECS_PER_SEC;
	policy->breaker.window_calls = 100;
	policy->breaker.minimum_calls = 100;
	policy->breaker.open_time = 60 * USECS_PER_SEC;
	policy->breaker.max_open_time = 600 * USECS_PER_SEC;
	policy->breaker.half_open_calls = 10;
	policy->breaker.half_open_time = 60 * USECS_PER_SEC;
	policy->breaker.forced = IDEM_NOT_FORCED;
}

/* Put what a row of idem_service_policies says over the defaults. */
static void
apply_service(IdemServicePolicy *policy, const ServiceRow *service)
{
	const bool *has = service->base.has;
	const IdemBreakerPolicy *from = &service->policy.breaker;
	IdemBreakerPolicy *to = &policy->breaker;

	if (has[Anum_services_retry_ratio])
		policy->budget.ratio = service->policy.budget.ratio;
	if (has[Anum_services_retry_min])
		policy->budget.min_per_second = service->policy.budget.min_per_second;
	if (has[Anum_services_failure_ratio])
		to->failure_ratio = from->failure_ratio;
	if (has[Anum_services_slow_call_ratio])
		to->slow_call_ratio = from->slow_call_ratio;
	if (has[Anum_services_slow_call_time])
		to->slow_call_time = from->slow_call_time;
	if (has[Anum_services_window_calls])
		to->window_calls = from->window_calls;
	if (has[Anum_services_minimum_calls])
		to->minimum_calls = from->minimum_calls;
	if (has[Anum_services_open_time])
		to->open_time = from->open_time;
	if (has[Anum_services_max_open_time])
		to->max_open_time = from->max_open_time;
	if (has[Anum_services_half_open_calls])
		to->half_open_calls = from->half_open_calls;
	if (has[Anum_services_half_open_time])
		to->half_open_time = from->half_open_time;
	to->forced = from->forced;
}

/* The policy of a service: its row over the settings and defaults */
void
idem_policy_of_service(text *service, IdemServicePolicy *policy)
{
	ServiceRow *found;

	default_policy(policy);
	found = idem_policy_find(&services, idem_catalog()->service_policies,
							 service);
	if (found != NULL)
		apply_service(policy, found);
}
