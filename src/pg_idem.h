/*-------------------------------------------------------------------------
 *
 * pg_idem.h
 *	  What every file of pg_idem knows: limits, SQLSTATEs, settings.
 *
 * Each module has a header of its own beside this one.  A file includes those
 * of the modules that it may use, so that what it must not know does not
 * compile:
 *
 *		claim_*		SQL entry: what a call means, and its answer
 *		  -> policy_*	what settings and tables of policies say of it
 *		  -> store*		rows, locks, index entries; knows no policy
 *		  -> registry*	routes and services in shared memory
 *		outbox*		stands beside that, with a table of its own
 *		expire_*	the sweep
 *		http_*, retry	pure: they know no table
 *		args, timespan, hash, owner, catalog, inval, ...	serve them all
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#ifndef PG_IDEM_H
#define PG_IDEM_H

#include "compat.h"
#include "fmgr.h"
#include "utils/guc.h"

/* Longest key, tenant or route, and longest fingerprint, in bytes */
#define IDEM_MAX_NAME	255

/* Own SQLSTATEs */
#define ERRCODE_IDEM_STALE_CLAIM		MAKE_SQLSTATE('I','K','0','0','1')
#define ERRCODE_IDEM_NO_CLAIM			MAKE_SQLSTATE('I','K','0','0','2')
#define ERRCODE_IDEM_ALREADY_FINISHED	MAKE_SQLSTATE('I','K','0','0','3')

/* settings, by the names of the settings */

typedef enum IdemKeep
{
	IDEM_KEEP_FINAL,
	IDEM_KEEP_SUCCESS,
	IDEM_KEEP_ALL
} IdemKeep;

typedef enum IdemOnLostLease
{
	IDEM_LOST_RESUME,
	IDEM_LOST_HOLD
} IdemOnLostLease;

extern int	idem_ttl;			/* seconds */
extern int	idem_lease;			/* milliseconds */
extern int	idem_wait;			/* milliseconds */
extern int	idem_max_attempts;
extern int	idem_on_lost_lease;
extern int	idem_keep;
extern char *idem_replay_headers;
extern int	idem_max_response_size; /* bytes */
extern char *idem_tenant;
extern bool idem_tenant_is_role;
extern bool idem_preloaded;		/* by shared_preload_libraries? */
extern double idem_retry_ratio;
extern double idem_retry_min_per_second;
extern int	idem_max_tracked;
extern bool idem_expire_enabled;
extern int	idem_expire_naptime;	/* seconds */
extern int	idem_expire_batch;
extern int	idem_outbox_max_attempts;
extern int	idem_outbox_dead_ttl;	/* seconds */
extern bool idem_outbox_notify;

#endif							/* PG_IDEM_H */
