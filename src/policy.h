/*-------------------------------------------------------------------------
 *
 * policy.h
 *	  Policies of routes and services: tables over settings.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#ifndef PG_IDEM_POLICY_H
#define PG_IDEM_POLICY_H

#include "pg_idem.h"

#include "datatype/timestamp.h"
#include "executor/tuptable.h"
#include "utils/jsonb.h"

/* policy_cache.c: tables of policies */

/* What a column is kept as */
typedef enum IdemPolicyKind
{
	IDEM_POLICY_INTERVAL,		/* an Interval */
	IDEM_POLICY_USECS,			/* an interval as an int64, in microseconds */
	IDEM_POLICY_INT,			/* an int32 */
	IDEM_POLICY_FLOAT,			/* a double */
	IDEM_POLICY_WORD			/* a text as an enum: which of the words */
} IdemPolicyKind;

typedef struct IdemPolicyColumn
{
	const char *name;
	IdemPolicyKind kind;
	Size		offset;			/* in the struct of the policy */
	const char *const *words;	/* up to NULL; any other is the first */
} IdemPolicyColumn;

#define IDEM_MAX_POLICY_COLUMNS	12

/* A row of such a table */
typedef struct IdemPolicyRow
{
	char		name[IDEM_MAX_NAME + 1];	/* hash key: the first column */
	bool		has[IDEM_MAX_POLICY_COLUMNS];	/* not null? */
	int64		policy[FLEXIBLE_ARRAY_MEMBER];	/* the struct, aligned */
} IdemPolicyRow;

/* A table's rows; the first three members are its owner's to set */
typedef struct IdemPolicyCache
{
	int			ncolumns;		/* that are known, behind the name ... */
	const IdemPolicyColumn *columns;
	Size		size;			/* ... and of the struct that they go into */

	bool		registered;
	bool		valid;
	Oid			relid;
	uint64		invalidations;
	struct HTAB *rows;
	MemoryContext context;		/* they live in here */
	struct IdemPolicyCache *next;
} IdemPolicyCache;

extern struct HTAB *idem_policies(IdemPolicyCache *cache, Oid relid);
extern void idem_apply_policy(const IdemPolicyCache *cache,
							  const IdemPolicyRow *row, void *policy);
extern IdemPolicyRow *idem_find_policy(IdemPolicyCache *cache, Oid relid,
									   const text *name);
extern void idem_policies_relation_changed(Oid relid);

/* policy_route.c: the policy of a route */

/* What a retry budget allows */
typedef struct IdemBudgetPolicy
{
	double		ratio;			/* retries per request ... */
	double		min_per_second; /* ... and these on top */
} IdemBudgetPolicy;

typedef struct IdemPolicy
{
	Interval	ttl;
	Interval	lease;
	Interval	wait;
	int			max_attempts;
	IdemOnLostLease on_lost_lease;
	IdemKeep	keep;
	bool		has_response_ttl;
	Interval	response_ttl;
	IdemBudgetPolicy budget;
} IdemPolicy;

/* a row of idem_route_policies, with the settings where it has NULL */
typedef struct IdemPolicyOfRoute
{
	text	   *route;
	IdemPolicy	policy;
} IdemPolicyOfRoute;

extern void idem_policy_of_route(text *route, IdemPolicy *policy);
extern List *idem_policies_of_routes(void);

/* policy_service.c: the policy of a service */

/* Has a person decided what the breaker says? */
typedef enum IdemForced
{
	IDEM_NOT_FORCED,
	IDEM_FORCED_OPEN,
	IDEM_FORCED_CLOSED
} IdemForced;

/* Longest window, in calls; idem_service_policies has it in a CHECK */
#define IDEM_MAX_WINDOW_CALLS	1000

/* Spans of time are in microseconds */
typedef struct IdemBreakerPolicy
{
	double		failure_ratio;
	double		slow_call_ratio;
	int64		slow_call_time;
	int32		window_calls;
	int32		minimum_calls;
	int64		open_time;
	int64		max_open_time;
	int32		half_open_calls;
	int64		half_open_time;
	IdemForced	forced;
} IdemBreakerPolicy;

typedef struct IdemServicePolicy
{
	IdemBudgetPolicy budget;
	IdemBreakerPolicy breaker;
} IdemServicePolicy;

extern void idem_policy_of_service(text *service, IdemServicePolicy *policy);

/* policy_result.c: what becomes of a result */

/* What is stored of the work; each but the status may be NULL */
typedef struct IdemResult
{
	int			status;
	Jsonb	   *headers;		/* only those that are kept */
	Jsonb	   *response;
	bytea	   *body;
} IdemResult;

extern bool idem_status_is_kept(IdemKeep keep, int status);
extern bool idem_result_is_over(const IdemPolicy *policy, bool is_dropped,
								TimestampTz finished_at, TimestampTz now);
extern bool idem_result_fits(const IdemResult *result);

#endif							/* PG_IDEM_POLICY_H */
