/*-------------------------------------------------------------------------
 *
 * routes.c
 *	  The policy of a route: table idem_routes over the settings.
 *
 * All rows of idem_routes are kept in a hash table of each backend, so a call
 * reads no table while they have not changed.  A statement trigger on the
 * table sends a relcache invalidation of it, which every backend takes in
 * when the change commits, and the backend that made the change at its next
 * command; the rows are then read again, under a fresh snapshot, by the next
 * call.  A change rolled back is undone in the same way.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "pg_idem.h"

#include "access/table.h"
#include "access/tableam.h"
#include "commands/trigger.h"
#include "utils/builtins.h"
#include "utils/hsearch.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

PG_FUNCTION_INFO_V1(idem_routes_changed);

/* Columns of idem_routes */
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

/* A row of idem_routes; what is NULL there is not set here */
typedef struct RoutePolicy
{
	char		route[IDEM_MAX_NAME + 1];	/* hash key */
	bool		has[Natts_routes + 1];	/* by attribute number */
	IdemPolicy	policy;
} RoutePolicy;

static HTAB *routes = NULL;
static MemoryContext routes_context = NULL; /* it lives in here */
static bool routes_valid = false;
static Oid	routes_relid = InvalidOid;

/* counts invalidations, so that one during a load is noticed */
static uint64 routes_invalidations = 0;

static void
routes_invalidated(Datum arg, Oid relid)
{
	if (!OidIsValid(relid) || relid == routes_relid)
	{
		routes_valid = false;
		routes_invalidations++;
	}
}

/*
 * Trigger on idem_routes, after every change: have all backends read it again
 * once the change commits.  For each row, since the changes that logical
 * replication applies fire no others.
 */
Datum
idem_routes_changed(PG_FUNCTION_ARGS)
{
	if (!CALLED_AS_TRIGGER(fcinfo))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("function \"%s\" was not called by trigger manager",
						"idem_routes_changed")));
	CacheInvalidateRelcache(((TriggerData *) fcinfo->context)->tg_relation);
	PG_RETURN_POINTER(NULL);
}

static Interval
interval_column(TupleTableSlot *slot, AttrNumber attno)
{
	Interval	zero = {0};

	return slot->tts_isnull[attno - 1] ? zero :
		*DatumGetIntervalP(slot->tts_values[attno - 1]);
}

static const char *
text_column(TupleTableSlot *slot, AttrNumber attno)
{
	return slot->tts_isnull[attno - 1] ? "" :
		TextDatumGetCString(slot->tts_values[attno - 1]);
}

static void
load_route(HTAB *table, TupleTableSlot *slot)
{
	char		name[IDEM_MAX_NAME + 1];
	RoutePolicy *route;
	IdemPolicy *policy;
	const char *keep;

	slot_getallattrs(slot);
	strlcpy(name, text_column(slot, Anum_routes_route), sizeof(name));
	route = hash_search(table, name, HASH_ENTER, NULL);

	for (int i = 1; i <= Natts_routes; i++)
		route->has[i] = !slot->tts_isnull[i - 1];
	policy = &route->policy;
	policy->ttl = interval_column(slot, Anum_routes_ttl);
	policy->lease = interval_column(slot, Anum_routes_lease);
	policy->wait = interval_column(slot, Anum_routes_wait);
	policy->response_ttl = interval_column(slot, Anum_routes_response_ttl);
	policy->max_attempts = route->has[Anum_routes_max_attempts] ?
		DatumGetInt32(slot->tts_values[Anum_routes_max_attempts - 1]) : 0;

	/* a CHECK constraint lets in no other words */
	policy->on_lost_lease =
		strcmp(text_column(slot, Anum_routes_on_lost_lease), "hold") == 0 ?
		IDEM_LOST_HOLD : IDEM_LOST_RESUME;
	keep = text_column(slot, Anum_routes_keep);
	policy->keep = strcmp(keep, "all") == 0 ? IDEM_KEEP_ALL :
		strcmp(keep, "success") == 0 ? IDEM_KEEP_SUCCESS : IDEM_KEEP_FINAL;
}

/*
 * Read idem_routes into a new hash table, and put it in the place of the old
 * one when it is complete.  If that fails, there is no valid one, and the
 * next call tries again.
 */
static void
load_routes(void)
{
	static bool registered = false;
	MemoryContext context;
	HTAB	   *table;
	uint64		invalidations;
	Relation	rel;
	TableScanDesc scan;
	TupleTableSlot *slot;
	Snapshot	snapshot;
	HASHCTL		ctl;

	if (!registered)
	{
		CacheRegisterRelcacheCallback(routes_invalidated, (Datum) 0);
		registered = true;
	}

	context = AllocSetContextCreate(CurrentMemoryContext, "pg_idem routes",
									ALLOCSET_SMALL_SIZES);
	memset(&ctl, 0, sizeof(ctl));
	ctl.keysize = IDEM_MAX_NAME + 1;
	ctl.entrysize = sizeof(RoutePolicy);
	ctl.hcxt = context;
	table = hash_create("pg_idem routes", 16, &ctl,
						HASH_ELEM | HASH_STRINGS | HASH_CONTEXT);

	routes_relid = idem_catalog()->routes;
	rel = try_table_open(routes_relid, AccessShareLock);
	if (rel == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_TABLE),
				 errmsg("the table of policies of pg_idem does not exist")));
	if (RelationGetDescr(rel)->natts != Natts_routes)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("table \"%s\" is not the one that this version of the pg_idem library works with",
						RelationGetRelationName(rel)),
				 errhint("Run ALTER EXTENSION pg_idem UPDATE, or install the library of the extension's version.")));

	/* an invalidation that arrives from here on makes us read again */
	invalidations = routes_invalidations;

	snapshot = RegisterSnapshot(GetLatestSnapshot());
	slot = table_slot_create(rel, NULL);
	scan = table_beginscan(rel, snapshot, 0, NULL);
	while (table_scan_getnextslot(scan, ForwardScanDirection, slot))
		load_route(table, slot);
	table_endscan(scan);
	ExecDropSingleTupleTableSlot(slot);
	UnregisterSnapshot(snapshot);
	table_close(rel, AccessShareLock);

	MemoryContextSetParent(context, TopMemoryContext);
	if (routes_context != NULL)
		MemoryContextDelete(routes_context);
	routes_context = context;
	routes = table;
	routes_valid = (invalidations == routes_invalidations);
}

/*
 * Make sure that the hash table is up to date.  Other backends' commits are
 * taken in here, as a transaction that already has its locks would otherwise
 * not notice them.
 */
static void
refresh_routes(void)
{
	AcceptInvalidationMessages();
	if (!routes_valid || routes_relid != idem_catalog()->routes)
	{
		routes_valid = false;
		load_routes();
	}
}

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
}

/* Put what a row of idem_routes says over the settings. */
static void
apply_route(IdemPolicy *policy, const RoutePolicy *route)
{
	if (route->has[Anum_routes_ttl])
		policy->ttl = route->policy.ttl;
	if (route->has[Anum_routes_lease])
		policy->lease = route->policy.lease;
	if (route->has[Anum_routes_wait])
		policy->wait = route->policy.wait;
	if (route->has[Anum_routes_max_attempts])
		policy->max_attempts = route->policy.max_attempts;
	if (route->has[Anum_routes_on_lost_lease])
		policy->on_lost_lease = route->policy.on_lost_lease;
	if (route->has[Anum_routes_keep])
		policy->keep = route->policy.keep;
	policy->has_response_ttl = route->has[Anum_routes_response_ttl];
	policy->response_ttl = route->policy.response_ttl;
}

/* The policy of a route: its row in idem_routes over the settings */
void
idem_policy_of_route(text *route, IdemPolicy *policy)
{
	char		name[IDEM_MAX_NAME + 1];
	RoutePolicy *found;

	default_policy(policy);
	refresh_routes();
	if (hash_get_num_entries(routes) == 0)
		return;
	text_to_cstring_buffer(route, name, sizeof(name));
	found = hash_search(routes, name, HASH_FIND, NULL);
	if (found != NULL)
		apply_route(policy, found);
}

/*
 * All routes of idem_routes with their policies, as a list of
 * IdemRoutePolicy, allocated in the current memory context.
 */
List *
idem_route_policies(void)
{
	HASH_SEQ_STATUS seq;
	RoutePolicy *route;
	List	   *result = NIL;

	refresh_routes();
	hash_seq_init(&seq, routes);
	while ((route = hash_seq_search(&seq)) != NULL)
	{
		IdemRoutePolicy *entry = palloc(sizeof(IdemRoutePolicy));

		entry->route = cstring_to_text(route->route);
		default_policy(&entry->policy);
		apply_route(&entry->policy, route);
		result = lappend(result, entry);
	}
	return result;
}
