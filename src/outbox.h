/*-------------------------------------------------------------------------
 *
 * outbox.h
 *	  The outbox: which message is next, and its table.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#ifndef PG_IDEM_OUTBOX_H
#define PG_IDEM_OUTBOX_H

#include "owner.h"

#include "datatype/timestamp.h"
#include "executor/tuptable.h"

/* outbox_pick.c: which messages may be taken */

/* Columns of idem_outbox that are read without SQL */
#define Anum_outbox_id				1
#define Anum_outbox_message_id		2
#define Anum_outbox_topic			3
#define Anum_outbox_group_key		4
#define Anum_outbox_created_at		7
#define Anum_outbox_max_attempts	8
#define Anum_outbox_available_at	9
#define Anum_outbox_attempt			10
#define Anum_outbox_lease_until		11
#define Anum_outbox_dead_at			12

/* What became of a message that may be taken, and was shown */
typedef enum IdemVerdict
{
	IDEM_SHOW_MORE,
	IDEM_PASSED_OVER,			/* show more, and this one first the next time */
	IDEM_ENOUGH
} IdemVerdict;

typedef IdemVerdict (*IdemConsider) (Relation rel, TupleTableSlot *row,
									 void *arg);

extern void idem_outbox_pick(Relation rel, text *topic, TimestampTz now,
							 IdemConsider consider, void *arg);
extern bool idem_outbox_lock(Relation rel, TupleTableSlot *row);

/* outbox_table.c: the table, and the statements on it */

/* What is done with it; each is a statement */
typedef enum IdemStatement
{
	IDEM_INSERT_MESSAGE,
	IDEM_FIND_HIGHER_ID,
	IDEM_TAKE_MESSAGE,
	IDEM_BURY_MESSAGE,
	IDEM_DELETE_MESSAGE,
	IDEM_FAIL_MESSAGE,
	IDEM_GET_ATTEMPT,
	IDEM_PICK_DEAD,
	IDEM_REVIVE_MESSAGE
} IdemStatement;

/* The table open for one call, by its owner */
typedef struct IdemOutbox
{
	Relation	rel;
	IdemCaller	caller;
} IdemOutbox;

extern bool idem_is_outbox(Relation rel);
extern void idem_outbox_relation_changed(Oid relid);
extern void idem_outbox_open(IdemOutbox *outbox);
extern void idem_outbox_close(IdemOutbox *outbox);
extern uint64 idem_outbox_run(IdemStatement statement, Datum *values,
							  const char *nulls);
extern bool idem_outbox_purge(const char *table, TimestampTz before,
							  int64 *last, int size, int64 *failed);

#endif							/* PG_IDEM_OUTBOX_H */
