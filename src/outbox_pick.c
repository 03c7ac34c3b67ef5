/*-------------------------------------------------------------------------
 *
 * outbox_pick.c
 *	  Which messages of the outbox may be taken now, and in what order.
 *
 * A message may be taken if it is pending, due, in nobody's hands and, where
 * it has a group, the lowest of its group.  The oldest come first, by the
 * time since when they are due.
 *
 * THE ORDER INSIDE A GROUP
 *
 * Of the messages of a group that are pending, only the one with the lowest
 * id may be taken, and it stays in the table, in the others' way, until it is
 * done or dead.  That is enough, because "R is the lowest of its group" once
 * true stays true for as long as R is pending:
 *
 *	- Publishers of a group take a lock that they hold until they commit, and
 *	  draw their id under it (outbox.c).  So by the time that R can be seen,
 *	  every lower id of its group has been committed or rolled back; none
 *	  turns up later.
 *	- A dead row does not become pending again.  Redrive makes another row of
 *	  it, with the next id, as any publisher would.
 *
 * So a snapshot that is a bit old can only be too strict: it may still show a
 * head that is done by now, and then the message behind it is not taken yet.
 * A row that is found is locked without waiting.  If somebody has it locked,
 * or has changed it after the snapshot, it is passed over, and the rows behind
 * it in its group are still behind it.
 *
 * HOW
 *
 * By scans of the table's own partial indexes, with no planner in between:
 * a queue is empty one moment and has a million rows the next, and no
 * statistics tell which.  Two of them are in the order of age, one for the
 * messages with a group and one for those without; they are merged.  That is
 * all, unless many messages have to wait behind others of their groups.  Then
 * it would cost too much to look at each of them at every take, and the groups
 * have their turn one after the other: the third index leads from each group
 * to the next, whatever is behind its head.  Messages without a group have
 * theirs in between.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/relscan.h"
#include "access/xact.h"
#include "catalog/pg_am.h"
#include "catalog/pg_collation.h"
#include "miscadmin.h"
#include "nodes/primnodes.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/hsearch.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

#include "outbox.h"
#include "row.h"

/* Messages that wait behind another before the groups have their turns */
#define MAX_WAITING		100

/* One of the indexes, and what a scan of it has found */
typedef struct Stream
{
	Relation	index;
	IndexScanDesc scan;
	TupleTableSlot *row;
	bool		found;
} Stream;

/*
 * What is remembered of a topic in this session, so that all have their turn
 */
typedef struct Turn
{
	char		topic[IDEM_MAX_NAME + 1];	/* hash key */
	char		group[IDEM_MAX_NAME + 1];	/* had its turn last */
	bool		passed_over;	/* was a message, which comes first now? */
} Turn;

static HTAB *turns = NULL;

typedef struct Pick
{
	Relation	rel;
	text	   *topic;
	TimestampTz now;
	Snapshot	snapshot;
	Stream		ungrouped;		/* by age */
	Stream		grouped;		/* by age */
	Stream		groups;			/* by group */
	Turn	   *turn;
	bool		suspects_only;	/* only those that a lost relay has had */
	bool		enough;
	IdemConsider consider;
	void	   *arg;
} Pick;

/* ----------------------------------------------------------------
 *		Scans
 * ----------------------------------------------------------------
 */

/* Does a list of conditions have this one?  Nothing but such tests is ours. */
static bool
has_null_test(List *predicate, AttrNumber column, NullTestType type)
{
	ListCell   *lc;

	foreach(lc, predicate)
	{
		NullTest   *test = lfirst(lc);

		if (IsA(test, NullTest) && test->nulltesttype == type &&
			IsA(test->arg, Var) && ((Var *) test->arg)->varattno == column)
			return true;
	}
	return false;
}

/*
 * Is this the index on topic, the given column and id, of pending messages
 * with a group, or without?  The owner may have made others.  Its texts must
 * be in the order of the table's columns, which our scans expect; in another
 * one they would miss messages.
 */
static bool
is_index_on(Relation index, AttrNumber column, NullTestType group)
{
	Form_pg_index form = index->rd_index;
	List	   *predicate = RelationGetIndexPredicate(index);

	return form->indisvalid && index->rd_rel->relam == BTREE_AM_OID &&
		form->indnkeyatts == 3 &&
		form->indkey.values[0] == Anum_outbox_topic &&
		form->indkey.values[1] == column &&
		form->indkey.values[2] == Anum_outbox_id &&
		index->rd_indoption[0] == 0 && index->rd_indoption[1] == 0 &&
		index->rd_indoption[2] == 0 &&
		index->rd_indcollation[0] == C_COLLATION_OID &&
		(column != Anum_outbox_group_key ||
		 index->rd_indcollation[1] == C_COLLATION_OID) &&
		list_length(predicate) == 2 &&
		has_null_test(predicate, Anum_outbox_dead_at, IS_NULL) &&
		has_null_test(predicate, Anum_outbox_group_key, group);
}

static void
open_stream(Pick *pick, Stream *stream, AttrNumber column, NullTestType group,
			int nkeys)
{
	ListCell   *lc;

	stream->index = NULL;
	foreach(lc, RelationGetIndexList(pick->rel))
	{
		stream->index = index_open(lfirst_oid(lc), AccessShareLock);
		if (is_index_on(stream->index, column, group))
			break;
		index_close(stream->index, AccessShareLock);
		stream->index = NULL;
	}
	if (stream->index == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("an index of table \"%s\" is missing or invalid",
						RelationGetRelationName(pick->rel)),
				 errhint("Run REINDEX, or create it again as the extension did.")));
	stream->scan = idem_index_beginscan(pick->rel, stream->index,
										pick->snapshot, nkeys);
	stream->row = table_slot_create(pick->rel, NULL);
	stream->found = false;
}

static void
close_stream(Stream *stream)
{
	ExecDropSingleTupleTableSlot(stream->row);
	index_endscan(stream->scan);
	index_close(stream->index, NoLock);
}

static void
topic_is(ScanKey key, const Pick *pick)
{
	ScanKeyInit(key, 1, BTEqualStrategyNumber, F_TEXTEQ,
				PointerGetDatum(pick->topic));
}

static bool
next_row(Stream *stream)
{
	stream->found = index_getnext_slot(stream->scan, ForwardScanDirection,
									   stream->row);
	if (stream->found)
		slot_getallattrs(stream->row);
	return stream->found;
}

/*
 * Has the row what every message has?  The table's owner may have dropped a
 * NOT NULL constraint.  A row without is passed over, and if it is the first
 * of its group, the group waits until the owner has mended it.  (That it has
 * a topic is known from the index.)
 */
static bool
is_complete(TupleTableSlot *row)
{
	return !idem_row_isnull(row, Anum_outbox_id) &&
		!idem_row_isnull(row, Anum_outbox_message_id) &&
		!idem_row_isnull(row, Anum_outbox_created_at) &&
		!idem_row_isnull(row, Anum_outbox_available_at) &&
		!idem_row_isnull(row, Anum_outbox_attempt) &&
		!idem_row_isnull(row, Anum_outbox_max_attempts);
}

/* Is the row due, and in nobody's hands? */
static bool
is_due(const Pick *pick, TupleTableSlot *row)
{
	return is_complete(row) &&
		DatumGetTimestampTz(idem_row_datum(row, Anum_outbox_available_at)) <= pick->now &&
		(idem_row_isnull(row, Anum_outbox_lease_until) ||
		 DatumGetTimestampTz(idem_row_datum(row, Anum_outbox_lease_until)) <= pick->now);
}

static bool
next_due_row(const Pick *pick, Stream *stream)
{
	while (next_row(stream))
	{
		CHECK_FOR_INTERRUPTS();
		if (is_due(pick, stream->row))
			return true;
	}
	return false;
}

/* Start with the oldest message that is due. */
static void
start_by_age(Pick *pick, Stream *stream)
{
	ScanKeyData key[2];

	topic_is(&key[0], pick);
	ScanKeyInit(&key[1], 2, BTLessEqualStrategyNumber, F_TIMESTAMPTZ_LE,
				TimestampTzGetDatum(pick->now));
	index_rescan(stream->scan, key, 2, NULL, 0);
	next_due_row(pick, stream);
}

/* Which of the two has the older message?  NULL if both are at their ends. */
static Stream *
older(Stream *a, Stream *b)
{
	TimestampTz time_a;
	TimestampTz time_b;

	if (!a->found || !b->found)
		return a->found ? a : b->found ? b : NULL;

	time_a = DatumGetTimestampTz(idem_row_datum(a->row,
												Anum_outbox_available_at));
	time_b = DatumGetTimestampTz(idem_row_datum(b->row,
												Anum_outbox_available_at));
	if (time_a != time_b)
		return time_a < time_b ? a : b;
	return DatumGetInt64(idem_row_datum(a->row, Anum_outbox_id)) <
		DatumGetInt64(idem_row_datum(b->row, Anum_outbox_id)) ? a : b;
}

/*
 * Find the first message of a group, or of the group that follows it; it is in
 * groups.row, due or not.
 */
static bool
find_head(Pick *pick, StrategyNumber strategy, Datum group)
{
	ScanKeyData key[2];

	topic_is(&key[0], pick);
	ScanKeyInit(&key[1], 2, strategy,
				strategy == BTEqualStrategyNumber ? F_TEXTEQ : F_TEXT_GT,
				group);
	index_rescan(pick->groups.scan, key, 2, NULL, 0);
	return next_row(&pick->groups);
}

/* Is this the lowest message of its group? */
static bool
is_head(Pick *pick, TupleTableSlot *row)
{
	return find_head(pick, BTEqualStrategyNumber,
					 idem_row_datum(row, Anum_outbox_group_key)) &&
		DatumGetInt64(idem_row_datum(pick->groups.row, Anum_outbox_id)) ==
		DatumGetInt64(idem_row_datum(row, Anum_outbox_id));
}

/* ----------------------------------------------------------------
 *		The order
 * ----------------------------------------------------------------
 */

/* Show a message.  Returns false if that is enough. */
static bool
show(Pick *pick, TupleTableSlot *row)
{
	if (pick->suspects_only && idem_row_isnull(row, Anum_outbox_lease_until))
		return true;

	switch (pick->consider(pick->rel, row, pick->arg))
	{
		case IDEM_SHOW_MORE:
			break;
		case IDEM_PASSED_OVER:
			pick->turn->passed_over = true;
			break;
		case IDEM_ENOUGH:
			pick->enough = true;
			break;
	}
	return !pick->enough;
}

/* Show the message that a stream by age has found, and go on to its next. */
static bool
show_next(Pick *pick, Stream *stream)
{
	if (!show(pick, stream->row))
		return false;
	next_due_row(pick, stream);
	return true;
}

/*
 * Give the groups behind this one, up to another, their turn, and with each
 * a message without a group.  Returns false if that is enough.
 */
static bool
go_by_groups(Pick *pick, const char *after, const char *up_to)
{
	char	   *name = pstrdup(after);	/* as long as it is, lest we stand still */

	for (;;)
	{
		text	   *group = cstring_to_text(name);
		bool		found = find_head(pick, BTGreaterStrategyNumber,
									  PointerGetDatum(group));

		CHECK_FOR_INTERRUPTS();
		pfree(group);
		pfree(name);
		if (!found)
			return true;
		name = TextDatumGetCString(idem_row_datum(pick->groups.row,
												  Anum_outbox_group_key));
		if (up_to != NULL && strcmp(name, up_to) > 0)
			return true;
		if (!is_due(pick, pick->groups.row))
			continue;

		if (!pick->suspects_only)
			strlcpy(pick->turn->group, name, sizeof(pick->turn->group));
		if (!show(pick, pick->groups.row))
			return false;
		if (pick->ungrouped.found && !show_next(pick, &pick->ungrouped))
			return false;
	}
}

/* Give all groups their turn, beginning where the last take has ended. */
static bool
go_round_groups(Pick *pick)
{
	char		start[IDEM_MAX_NAME + 1];

	strlcpy(start, pick->turn->group, sizeof(start));
	return go_by_groups(pick, start, NULL) && go_by_groups(pick, "", start);
}

static void
go_by_age(Pick *pick)
{
	Stream	   *stream;
	int			waiting = 0;

	start_by_age(pick, &pick->ungrouped);
	start_by_age(pick, &pick->grouped);
	while ((stream = older(&pick->ungrouped, &pick->grouped)) != NULL)
	{
		if (stream == &pick->ungrouped || is_head(pick, stream->row))
		{
			if (!show_next(pick, stream))
				break;
		}
		else if (++waiting <= MAX_WAITING)
			next_due_row(pick, stream);
		else
		{
			if (!go_round_groups(pick))
				break;
			pick->grouped.found = false;
		}
	}
}

/* What is remembered of a topic */
static Turn *
turn_of(text *topic)
{
	char		name[IDEM_MAX_NAME + 1];
	Turn	   *turn;
	bool		found;

	if (turns == NULL)
	{
		HASHCTL		ctl;

		memset(&ctl, 0, sizeof(ctl));
		ctl.keysize = IDEM_MAX_NAME + 1;
		ctl.entrysize = sizeof(Turn);
		turns = hash_create("pg_idem turns", 16, &ctl,
							HASH_ELEM | HASH_STRINGS);
	}
	text_to_cstring_buffer(topic, name, sizeof(name));
	turn = hash_search(turns, name, HASH_ENTER, &found);
	if (!found)
	{
		turn->group[0] = '\0';
		turn->passed_over = false;
	}
	return turn;
}

/*
 * Show the messages of a topic that may be taken to consider(), one after the
 * other, until it has enough.
 */
void
idem_outbox_pick(Relation rel, text *topic, TimestampTz now,
				 IdemConsider consider, void *arg)
{
	Pick		pick;

	pick.rel = rel;
	pick.topic = topic;
	pick.now = now;
	pick.snapshot = RegisterSnapshot(GetTransactionSnapshot());
	pick.turn = turn_of(topic);
	pick.suspects_only = false;
	pick.enough = false;
	pick.consider = consider;
	pick.arg = arg;
	open_stream(&pick, &pick.ungrouped, Anum_outbox_available_at, IS_NULL, 2);
	open_stream(&pick, &pick.grouped, Anum_outbox_available_at, IS_NOT_NULL,
				2);
	open_stream(&pick, &pick.groups, Anum_outbox_group_key, IS_NOT_NULL, 2);

	/* one that the last take has passed over has waited for long enough */
	if (pick.turn->passed_over)
	{
		pick.turn->passed_over = false;
		pick.suspects_only = true;
		go_by_age(&pick);
		pick.suspects_only = false;
	}
	if (!pick.enough)
		go_by_age(&pick);

	close_stream(&pick.ungrouped);
	close_stream(&pick.grouped);
	close_stream(&pick.groups);
	UnregisterSnapshot(pick.snapshot);
}

/*
 * Lock a message that was shown, if nobody has it locked, or has changed it
 * since it was found.
 */
bool
idem_outbox_lock(Relation rel, TupleTableSlot *row)
{
	ItemPointerData tid = row->tts_tid;
	TM_FailureData failure;
	TM_Result	result;

	result = table_tuple_lock(rel, &tid, GetActiveSnapshot(), row,
							  GetCurrentCommandId(false),
							  LockTupleNoKeyExclusive, LockWaitSkip, 0,
							  &failure);
	switch (result)
	{
		case TM_Ok:
			slot_getallattrs(row);
			return true;

		case TM_WouldBlock:
			/* another relay is just taking it, or its publisher changes it */
		case TM_Updated:
		case TM_Deleted:
			/* it was taken, or is done, since the snapshot */
		case TM_SelfModified:
			/* by this call: it was buried, or a trigger has changed it */
		case TM_Invisible:
			/* written by a command of this transaction that still runs */
			return false;

		case TM_BeingModified:
			/* a lock that skips says "would block" instead */
			elog(ERROR, "unexpected result %d of a row lock", (int) result);
	}
	return false;				/* keep the compiler quiet */
}
