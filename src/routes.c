/*-------------------------------------------------------------------------
 *
 * routes.c
 *	  The policy of a route: table idem_route_policies over the settings.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "pg_idem.h"

#include "catalog/pg_type.h"
#include "utils/builtins.h"
#include "utils/hsearch.h"

/* Columns of idem_route_policies */
#define Anum_routes_route			1
#define Anum_routes_ttl				2
#define Anum_routes_lease			3
#define Anum_routes_wait			4
#define Anum_routes_max_attempts	5
#define Anum_routes_on_lost_lease	6
#define Anum_routes_keep			7
#define Anum_routes_response_ttl	8
#define Anum_routes_retry_ratio		9
#define Anum_routes_retry_min		10
#define Natts_routes				10

static const Oid column_type[Natts_routes] = {
	TEXTOID, INTERVALOID, INTERVALOID, INTERVALOID, INT4OID, TEXTOID, TEXTOID,
	INTERVALOID, FLOAT8OID, FLOAT8OID
};

/* A row of idem_route_policies; what is NULL there is not set here */
typedef struct RouteRow
{
	IdemPolicyRow base;
	IdemPolicy	policy;
} RouteRow;

static void
load_route(IdemPolicyRow *row, TupleTableSlot *slot)
{
	IdemPolicy *policy = &((RouteRow *) row)->policy;
	const char *keep = idem_policy_text(slot, Anum_routes_keep);

	policy->ttl = idem_policy_interval(slot, Anum_routes_ttl);
	policy->lease = idem_policy_interval(slot, Anum_routes_lease);
	policy->wait = idem_policy_interval(slot, Anum_routes_wait);
	policy->response_ttl = idem_policy_interval(slot,
												Anum_routes_response_ttl);
	policy->max_attempts = idem_policy_int(slot, Anum_routes_max_attempts);

	/* another word, which a CHECK constraint keeps out, is the default */
	policy->on_lost_lease =
		strcmp(idem_policy_text(slot, Anum_routes_on_lost_lease), "hold") == 0 ?
		IDEM_LOST_HOLD : IDEM_LOST_RESUME;
	policy->keep = strcmp(keep, "all") == 0 ? IDEM_KEEP_ALL :
		strcmp(keep, "success") == 0 ? IDEM_KEEP_SUCCESS : IDEM_KEEP_FINAL;

	policy->budget.ratio = idem_policy_float(slot, Anum_routes_retry_ratio);
	policy->budget.min_per_second = idem_policy_float(slot,
													  Anum_routes_retry_min);
}

static IdemPolicyCache routes = {
	.natts = Natts_routes,
	.types = column_type,
	.rowsize = sizeof(RouteRow),
	.load = load_route
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

/* Put what a row of idem_route_policies says over the settings. */
static void
apply_route(IdemPolicy *policy, const RouteRow *route)
{
	const bool *has = route->base.has;

	if (has[Anum_routes_ttl])
		policy->ttl = route->policy.ttl;
	if (has[Anum_routes_lease])
		policy->lease = route->policy.lease;
	if (has[Anum_routes_wait])
		policy->wait = route->policy.wait;
	if (has[Anum_routes_max_attempts])
		policy->max_attempts = route->policy.max_attempts;
	if (has[Anum_routes_on_lost_lease])
		policy->on_lost_lease = route->policy.on_lost_lease;
	if (has[Anum_routes_keep])
		policy->keep = route->policy.keep;
	policy->has_response_ttl = has[Anum_routes_response_ttl];
	policy->response_ttl = route->policy.response_ttl;
	if (has[Anum_routes_retry_ratio])
		policy->budget.ratio = route->policy.budget.ratio;
	if (has[Anum_routes_retry_min])
		policy->budget.min_per_second = route->policy.budget.min_per_second;
}

/* The policy of a route: its row in idem_route_policies over the settings */
void
idem_policy_of_route(text *route, IdemPolicy *policy)
{
	RouteRow   *found;

	default_policy(policy);
	found = idem_policy_find(&routes, idem_catalog()->routes, route);
	if (found != NULL)
		apply_route(policy, found);
}

/*
 * All routes of idem_route_policies with their policies, as a list of
 * IdemPolicyOfRoute, allocated in the current memory context.
 */
List *
idem_policies_of_routes(void)
{
	HASH_SEQ_STATUS seq;
	RouteRow   *route;
	List	   *result = NIL;

	hash_seq_init(&seq, idem_policies(&routes, idem_catalog()->routes));
	while ((route = hash_seq_search(&seq)) != NULL)
	{
		IdemPolicyOfRoute *entry = palloc(sizeof(IdemPolicyOfRoute));

		entry->route = cstring_to_text(route->base.name);
		default_policy(&entry->policy);
		apply_route(&entry->policy, route);
		result = lappend(result, entry);
	}
	return result;
}
