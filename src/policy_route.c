/*-------------------------------------------------------------------------
 *
 * policy_route.c
 *	  The policy of a route: table idem_route_policies over the settings.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "utils/builtins.h"
#include "utils/hsearch.h"

#include "policy.h"
#include "catalog.h"

static const char *const lost_lease_words[] = {"resume", "hold", NULL};
static const char *const keep_words[] = {"final", "success", "all", NULL};

#define COLUMN(name, kind, member) \
	{name, IDEM_POLICY_##kind, offsetof(IdemPolicy, member), NULL}

/* idem_route_policies behind its column route */
static const IdemPolicyColumn columns[] = {
	COLUMN("ttl", INTERVAL, ttl),
	COLUMN("lease", INTERVAL, lease),
	COLUMN("wait", INTERVAL, wait),
	COLUMN("max_attempts", INT, max_attempts),
	{"on_lost_lease", IDEM_POLICY_WORD, offsetof(IdemPolicy, on_lost_lease),
	lost_lease_words},
	{"keep", IDEM_POLICY_WORD, offsetof(IdemPolicy, keep), keep_words},
	COLUMN("response_ttl", INTERVAL, response_ttl),
	COLUMN("retry_ratio", FLOAT, budget.ratio),
	COLUMN("retry_min_per_second", FLOAT, budget.min_per_second)
};

/* the one whose default no setting has */
#define RESPONSE_TTL	6

StaticAssertDecl(lengthof(columns) <= IDEM_MAX_POLICY_COLUMNS,
				 "too many columns of policies");
StaticAssertDecl(sizeof(IdemOnLostLease) == sizeof(int) &&
				 sizeof(IdemKeep) == sizeof(int),
				 "words are kept as int");

static IdemPolicyCache routes = {
	.ncolumns = lengthof(columns),
	.columns = columns,
	.size = sizeof(IdemPolicy)
};

static void
set_default_interval(Interval *interval, int64 usecs)
{
	memset(interval, 0, sizeof(*interval));
	interval->time = usecs;
}

/* The policy that holds where there is no row for a route */
static void
default_policy(IdemPolicy *policy)
{
	memset(policy, 0, sizeof(*policy));
	set_default_interval(&policy->ttl, idem_ttl * USECS_PER_SEC);
	set_default_interval(&policy->lease, idem_lease * INT64CONST(1000));
	set_default_interval(&policy->wait, idem_wait * INT64CONST(1000));
	policy->max_attempts = idem_max_attempts;
	policy->on_lost_lease = idem_on_lost_lease;
	policy->keep = idem_keep;
	policy->budget.ratio = idem_retry_ratio;
	policy->budget.min_per_second = idem_retry_min_per_second;
}

static void
apply(const IdemPolicyRow *row, IdemPolicy *policy)
{
	idem_apply_policy(&routes, row, policy);
	policy->has_response_ttl = row->has[RESPONSE_TTL];
}

/* The policy of a route: its row in idem_route_policies over the settings */
void
idem_policy_of_route(text *route, IdemPolicy *policy)
{
	IdemPolicyRow *row;

	default_policy(policy);
	row = idem_find_policy(&routes, idem_catalog()->routes, route);
	if (row != NULL)
		apply(row, policy);
}

/*
 * All routes of idem_route_policies with their policies, as a list of
 * IdemPolicyOfRoute, allocated in the current memory context.
 */
List *
idem_policies_of_routes(void)
{
	HASH_SEQ_STATUS seq;
	IdemPolicyRow *row;
	List	   *result = NIL;

	hash_seq_init(&seq, idem_policies(&routes, idem_catalog()->routes));
	while ((row = hash_seq_search(&seq)) != NULL)
	{
		IdemPolicyOfRoute *entry = palloc(sizeof(IdemPolicyOfRoute));

		entry->route = cstring_to_text(row->name);
		default_policy(&entry->policy);
		apply(row, &entry->policy);
		result = lappend(result, entry);
	}
	return result;
}
