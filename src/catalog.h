/*-------------------------------------------------------------------------
 *
 * catalog.h
 *	  The extension's own objects, and the columns of its types.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#ifndef PG_IDEM_CATALOG_H
#define PG_IDEM_CATALOG_H

#include "pg_idem.h"

#include "nodes/pg_list.h"
#include "utils/relcache.h"

/*
 * Columns of type idempotency_key, the row of every store.  Those that
 * idem_finish leaves alone come first: WAL of an update leaves out what the
 * old and the new version begin with.
 */
#define Anum_key_key			1
#define Anum_key_tenant			2
#define Anum_key_route			3
#define Anum_key_request_hash	4
#define Anum_key_attempt		5
#define Anum_key_created_at		6
#define Anum_key_expires_at		7
#define Anum_key_state			8
#define Anum_key_lease_until	9
#define Anum_key_step			10
#define Anum_key_step_data		11
#define Anum_key_status			12
#define Anum_key_headers		13
#define Anum_key_response		14
#define Anum_key_body			15
#define Anum_key_result_dropped	16
#define Anum_key_finished_at	17
#define Natts_key				17

/* Columns of type idem_claim, the answer of idem_begin */
#define Anum_claim_proceed		1
#define Anum_claim_outcome		2
#define Anum_claim_status		3
#define Anum_claim_headers		4
#define Anum_claim_response		5
#define Anum_claim_body			6
#define Anum_claim_attempt		7
#define Anum_claim_step			8
#define Anum_claim_step_data	9
#define Anum_claim_retry_after	10
#define Anum_claim_expires_at	11
#define Natts_claim				11

/* Columns of type idem_result, what the work of idem_call may return */
#define Anum_result_status		1
#define Anum_result_headers		2
#define Anum_result_response	3
#define Anum_result_body		4
#define Natts_result			4

/* Labels of type idem_state; the order is the enum's */
typedef enum IdemState
{
	IDEM_IN_PROGRESS,
	IDEM_COMPLETED,
	IDEM_FAILED
} IdemState;

#define IDEM_NSTATES	3

typedef struct IdemCatalog
{
	Oid			extension;
	Oid			key_type;		/* idempotency_key */
	Oid			claim_type;		/* idem_claim */
	Oid			result_type;	/* idem_result */
	Oid			state_type;		/* idem_state ... */
	Oid			state[IDEM_NSTATES];	/* ... and its labels */
	Oid			default_store;	/* idempotency_keys */
	Oid			routes;			/* idem_route_policies */
	Oid			service_policies;	/* idem_service_policies */
	Oid			outbox;			/* idem_outbox */
} IdemCatalog;

extern const IdemCatalog *idem_catalog(void);
extern bool idem_catalog_exists(void);
extern Relation idem_open_member(const Oid *member, LOCKMODE lockmode);
extern bool idem_lock_extension(void);
extern bool idem_extension_is_changing(void);
extern List *idem_member_functions(const char *name);
extern IdemState idem_state_from_datum(Datum label);
extern Datum idem_state_to_datum(IdemState state);
extern List *idem_stores(void);
extern char *idem_extension_schema(void);
extern char *idem_qualified_name(Relation rel);
extern void idem_catalog_relation_changed(Oid relid);
extern void idem_catalog_type_changed(uint32 hashvalue);

/* distributed.c: tables that another extension keeps elsewhere */

extern bool idem_is_distributed(Relation rel);
extern void idem_refuse_distributed(Relation rel);

#endif							/* PG_IDEM_CATALOG_H */
