/*-------------------------------------------------------------------------
 *
 * store.h
 *	  Stores: what a table must be to be one, and its rows.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#ifndef PG_IDEM_STORE_H
#define PG_IDEM_STORE_H

#include "catalog.h"
#include "row.h"

#include "datatype/timestamp.h"
#include "executor/tuptable.h"
#include "utils/snapshot.h"

/* What a claim is found by.  route is NULL where the caller names none. */
typedef struct IdemKey
{
	text	   *key;
	text	   *tenant;
	text	   *route;
} IdemKey;

/* store.c: rows of a store */

/* Who stands behind the row that a probe found */
typedef enum IdemSighting
{
	IDEM_SEEN_NOTHING,			/* no row; whether the key is free, only
								 * idem_store_insert can tell */
	IDEM_SEEN_SETTLED,			/* committed, and nobody is changing it */
	IDEM_SEEN_OURS,				/* this transaction wrote it */
	IDEM_SEEN_ARRIVING,			/* written by a transaction still running */
	IDEM_SEEN_LEAVING			/* committed, but a running transaction is
								 * changing or deleting it */
} IdemSighting;

typedef enum IdemLocked
{
	IDEM_LOCKED,				/* ours until the transaction ends */
	IDEM_LOCK_BUSY,				/* another transaction has it (no waiting) */
	IDEM_LOCK_CHANGED			/* not the row it was: look again */
} IdemLocked;

/* A store opened for the length of one call */
typedef struct IdemStore
{
	MemoryContext context;		/* what it opens later lives here, too */
	Relation	rel;
	Relation	pkey;
	TupleTableSlot *row;		/* the row found; pins its page */
	TupleTableSlot *spare;		/* a row seen on the way, or NULL */
	TupleTableSlot *next;		/* new version being built, or NULL */
	struct IndexScanDescData *scan; /* open scan, or NULL */
	int			nindexes;
	struct IdemIndex *indexes;	/* open for new entries, or NULL */
	struct EState *estate;		/* for expressions in indexes, or NULL */
} IdemStore;

/* Columns of a deformed row, be it found or being built */

/* columns of a row that are often needed */
static inline IdemState
idem_row_state(TupleTableSlot *row)
{
	return idem_state_from_datum(idem_row_datum(row, Anum_key_state));
}

static inline int32
idem_row_attempt(TupleTableSlot *row)
{
	return DatumGetInt32(idem_row_datum(row, Anum_key_attempt));
}

/* When the claim may be taken over; without a lease, never */
static inline TimestampTz
idem_row_lease_until(TupleTableSlot *row)
{
	return idem_row_isnull(row, Anum_key_lease_until) ? DT_NOEND :
		DatumGetTimestampTz(idem_row_datum(row, Anum_key_lease_until));
}

/* A finished key whose retention is over counts as gone. */
static inline bool
idem_row_is_gone(TupleTableSlot *row, TimestampTz now)
{
	return idem_row_state(row) != IDEM_IN_PROGRESS &&
		DatumGetTimestampTz(idem_row_datum(row, Anum_key_expires_at)) <= now;
}

extern void idem_store_open(IdemStore *store, Oid relid, LOCKMODE lockmode);
extern void idem_store_close(IdemStore *store);
extern IdemSighting idem_store_probe(IdemStore *store, const IdemKey *key);
extern void idem_store_forget(IdemStore *store);
extern void idem_store_wait(IdemStore *store, int *msecs, TimestampTz now,
							TimestampTz deadline);
extern void idem_store_look_again(IdemStore *store, const IdemKey *key,
								  int *rounds);
extern void idem_store_scan(IdemStore *store, const IdemKey *key,
							Snapshot snapshot);
extern bool idem_store_scan_next(IdemStore *store);
extern void idem_store_scan_keep(IdemStore *store);
extern void idem_store_scan_end(IdemStore *store);
extern bool idem_store_recall(IdemStore *store, const IdemKey *key);
extern bool idem_store_fetch(IdemStore *store, ItemPointer tid);
extern bool idem_store_row_is_ours(IdemStore *store);
extern IdemLocked idem_store_lock(IdemStore *store, bool wait);
extern TupleTableSlot *idem_store_new_version(IdemStore *store,
											  bool copy_row);
extern bool idem_store_insert(IdemStore *store);
extern void idem_store_update(IdemStore *store);
extern void idem_store_relation_changed(Oid relid);

/* store_check.c: what a store may be */

/* Why a table is no store; hint is NULL where there is none */
typedef struct IdemStoreDefect
{
	int			sqlstate;
	const char *detail;
	const char *hint;
} IdemStoreDefect;

extern bool idem_is_store(Relation rel, IdemStoreDefect *defect);
extern Oid	idem_store_primary_key(Relation rel);
extern void idem_store_check_relation_changed(Oid relid);

#endif							/* PG_IDEM_STORE_H */
