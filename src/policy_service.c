/*-------------------------------------------------------------------------
 *
 * policy_service.c
 *	  The policy of a service: table idem_service_policies over defaults.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"


#include "policy.h"
#include "catalog.h"

static const char *const breaker_words[] = {
	"", "forced_open", "forced_closed", NULL
};

#define COLUMN(name, kind, member) \
	{name, IDEM_POLICY_##kind, offsetof(IdemServicePolicy, member), NULL}

/* idem_service_policies behind its column service */
static const IdemPolicyColumn columns[] = {
	COLUMN("retry_ratio", FLOAT, budget.ratio),
	COLUMN("retry_min_per_second", FLOAT, budget.min_per_second),
	COLUMN("failure_ratio", FLOAT, breaker.failure_ratio),
	COLUMN("slow_call_ratio", FLOAT, breaker.slow_call_ratio),
	COLUMN("slow_call_time", USECS, breaker.slow_call_time),
	COLUMN("window_calls", INT, breaker.window_calls),
	COLUMN("minimum_calls", INT, breaker.minimum_calls),
	COLUMN("open_time", USECS, breaker.open_time),
	COLUMN("max_open_time", USECS, breaker.max_open_time),
	COLUMN("half_open_calls", INT, breaker.half_open_calls),
	COLUMN("half_open_time", USECS, breaker.half_open_time),
	{"breaker", IDEM_POLICY_WORD, offsetof(IdemServicePolicy, breaker.forced),
	breaker_words}
};

StaticAssertDecl(lengthof(columns) <= IDEM_MAX_POLICY_COLUMNS,
				 "too many columns of policies");
StaticAssertDecl(sizeof(IdemForced) == sizeof(int), "words are kept as int");

static IdemPolicyCache services = {
	.ncolumns = lengthof(columns),
	.columns = columns,
	.size = sizeof(IdemServicePolicy)
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

/* The policy of a service: its row over the settings and defaults */
void
idem_policy_of_service(text *service, IdemServicePolicy *policy)
{
	int32	   *window_calls = &policy->breaker.window_calls;
	IdemPolicyRow *row;

	default_policy(policy);
	row = idem_find_policy(&services, idem_catalog()->service_policies,
						   service);
	if (row != NULL)
		idem_apply_policy(&services, row, policy);

	/*
	 * Shared memory has no room for a longer window, and a CHECK constraint
	 * is only as good as the table's owner.
	 */
	*window_calls = Max(Min(*window_calls, IDEM_MAX_WINDOW_CALLS), 1);
}
