/*-------------------------------------------------------------------------
 *
 * expire.h
 *	  The sweep of expired keys: what its files share.
 *
 *		expire_launcher.c	when is which database swept?
 *		  -> expire_worker.c	which of its tables, and for how long?
 *			   -> expire_sweep.c	what goes from one table, batch by batch
 *		expire_shared.c		what they remember in shared memory
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#ifndef PG_IDEM_EXPIRE_H
#define PG_IDEM_EXPIRE_H

#include "pg_idem.h"

#include "storage/block.h"
#include "storage/itemptr.h"

/* ---------------- expire_shared.c: shared memory ---------------- */

/* What a worker is told, in its bgw_extra ... */
typedef struct IdemOrder
{
	Oid			after;			/* further stores: begin behind this one */
	int			no_stores;		/* tables that are no stores, as last logged */
	bool		drop_results;	/* those whose response_ttl is over, too? */
} IdemOrder;

/* ... and what it says in the end */
typedef enum IdemSweepEnd
{
	IDEM_SWEEP_DIED,			/* nothing was said */
	IDEM_SWEEP_ABSENT,			/* the extension is not there */
	IDEM_SWEEP_NOT_NOW,			/* it is just being created or dropped */
	IDEM_SWEEP_DONE
} IdemSweepEnd;

typedef struct IdemReport
{
	IdemSweepEnd end;
	Oid			after;			/* as in IdemOrder, for the next one */
	int			no_stores;
	bool		results_left;	/* there was no time for all of them */
} IdemReport;

/* Where a sweep has come to in a store, or in the outbox */
typedef struct IdemSweepPosition
{
	TimestampTz expires_at;
	char		key[IDEM_MAX_NAME + 1];
	char		tenant[IDEM_MAX_NAME + 1];
	char		route[IDEM_MAX_NAME + 1];
	int64		dead_letter;	/* id; of the outbox */
} IdemSweepPosition;

/* A table that could not be swept as it should; see expire_shared.c */
typedef struct IdemTrouble
{
	Oid			database;
	Oid			relid;			/* InvalidOid: the database as such */
	TimestampTz noted_at;
	int			backoff_secs;
	TimestampTz put_off_until;	/* leave the whole table alone */
	TimestampTz start_over_at;	/* until then, start at the position */
	IdemSweepPosition position;
	BlockNumber results_block;	/* where dropping results goes on */
} IdemTrouble;

extern void idem_expire_shmem_init(void);
extern bool idem_expire_has_shmem(void);
extern void idem_wake_launcher(Oid database);
extern void idem_launcher_attach(void);
extern bool idem_launcher_is_woken(void);
extern bool idem_launcher_take_wake_up(Oid *database);
extern void idem_report(const IdemReport *report);
extern void idem_take_report(IdemReport *report);
extern void idem_sweep_is_at(Oid database, Oid relid);
extern bool idem_sweep_ended_at(Oid *relid);
extern bool idem_recall_trouble(Oid database, Oid relid,
								IdemTrouble *trouble);
extern void idem_note_trouble(const IdemTrouble *trouble);
extern void idem_forget_trouble(Oid database, Oid relid);
extern void idem_put_off(Oid database, Oid relid);
extern int	idem_longer_backoff(int secs);
extern TimestampTz idem_not_later_than(TimestampTz due, TimestampTz now,
									   int secs);

/* ---------------- expire_sweep.c: one table ---------------- */

/*
 * How far a sweep of one table has come.  What it allocates lives in the
 * memory context that was current when it started.
 */
typedef struct IdemSweep
{
	Oid			relid;
	bool		by_hand;		/* in a caller's transaction? */
	bool		waits;			/* for who has a table locked? */
	int64		max;			/* most keys to remove */
	TimestampTz now;			/* what is expired at the start of the sweep */
	IdemSweepPosition position;	/* last row met */
	BlockNumber results_block;	/* where dropping results goes on */

	MemoryContext context;		/* of the rows picked */
	struct IdemExpired *picked;
	int			npicked;
	int			next;			/* the first of them not yet met */
	int			slice;			/* rows to be deleted in one go */
	BlockNumber pages;			/* to be searched in one go */

	int64		removed;
	int64		stuck;			/* rows that could not go */
	int			failures;		/* slices that could not, of one row or more */
	bool		is_no_store;	/* a table of our type, but not fit for it ... */
	const char *defect;			/* ... and why */
} IdemSweep;

/*
 * A step of a sweep is a batch of one kind, for a transaction of its own.
 * False: there is no more to do, or not now.
 */
typedef bool (*IdemSweepStep) (IdemSweep *sweep, Relation rel,
							   const char *name);

extern void idem_sweep_start(IdemSweep *sweep, Oid relid);
extern bool idem_sweep_step(IdemSweep *sweep, IdemSweepStep step);
extern bool idem_remove_keys(IdemSweep *sweep, Relation rel,
							 const char *name);
extern bool idem_drop_results(IdemSweep *sweep, Relation rel,
							  const char *name);
extern bool idem_remove_dead_letters(IdemSweep *sweep, Relation rel,
									 const char *name);
extern void idem_sweep_tell(const IdemSweep *sweep);

/* ---------------- expire_worker.c: one database ---------------- */

extern PGDLLEXPORT void idem_expire_main(Datum arg);

/* ---------------- expire_launcher.c: all databases ---------------- */

extern void idem_launcher_init(void);
extern PGDLLEXPORT void idem_launcher_main(Datum arg);

#endif							/* PG_IDEM_EXPIRE_H */
