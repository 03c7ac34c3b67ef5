/*-------------------------------------------------------------------------
 *
 * claim.h
 *	  Claims: made, fenced, finished.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#ifndef PG_IDEM_CLAIM_H
#define PG_IDEM_CLAIM_H

#include "policy.h"
#include "store.h"

/* claim_begin.c */

/* What a key is to be claimed with ... */
typedef struct IdemClaimRequest
{
	IdemKey		key;
	bytea	   *hash;			/* NULL: this caller takes no fingerprints */
	IdemPolicy	policy;			/* of the route, under the arguments */
	bool		has_first_sent;
	TimestampTz first_sent;
	Oid			store;			/* InvalidOid: the default one */

	/* ... and, by the clock of the current look at it */
	TimestampTz now;
	TimestampTz lease_until;
	TimestampTz expires_at;
} IdemClaimRequest;

extern void idem_arg_claim(FunctionCallInfo fcinfo, int argno,
						   IdemClaimRequest *req);
extern Datum idem_claim_key(IdemClaimRequest *req);

/* claim_fence.c */

/* What a caller says of the claim that it means */
typedef struct IdemClaimRef
{
	IdemKey		key;
	bool		has_attempt;
	int32		attempt;
} IdemClaimRef;

extern void idem_arg_claim_ref(FunctionCallInfo fcinfo, int argno,
							   IdemClaimRef *ref);
extern void idem_find_and_lock_claim(IdemStore *store,
									 const IdemClaimRef *ref);

/* claim_finish.c */

extern void idem_finish_claim(const IdemClaimRef *ref, IdemResult *result,
							  const Interval *ttl, Oid storeid);

#endif							/* PG_IDEM_CLAIM_H */
