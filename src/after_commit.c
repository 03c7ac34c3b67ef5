/*-------------------------------------------------------------------------
 *
 * after_commit.c
 *	  Log lines that tell of something done: written once it is committed.
 *
 * "removed unfinished idempotency key" must not stand in the log while the
 * row may yet come back.  So a line is kept until the transaction commits;
 * a rolled back transaction or savepoint takes its lines with it.  A prepared
 * transaction writes them when it is prepared, since nobody but the server is
 * there when it commits.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "utils/memutils.h"

#include "after_commit.h"

typedef struct LogLine
{
	SubTransactionId subid;		/* whose rollback takes it away */
	char	   *message;
	char	   *detail;
} LogLine;

/* in the order of their making; the transaction's memory */
static List *lines = NIL;

/*
 * The transaction is committed, and an error would make the server PANIC.  So
 * the lines go to the server's log alone, since their names may not exist in
 * the client's encoding, and if one cannot be written, the rest is dropped.
 */
static void
write_lines(void)
{
	MemoryContext context = CurrentMemoryContext;

	PG_TRY();
	{
		ListCell   *lc;

		foreach(lc, lines)
		{
			const LogLine *line = lfirst(lc);

			ereport(LOG_SERVER_ONLY,
					(errmsg_internal("%s", line->message),
					 errdetail_internal("%s", line->detail)));
		}
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(context);
		FlushErrorState();
	}
	PG_END_TRY();
}

static void
transaction_ended(XactEvent event, void *arg)
{
	switch (event)
	{
		case XACT_EVENT_COMMIT:
		case XACT_EVENT_PREPARE:
			write_lines();
			lines = NIL;
			break;

		case XACT_EVENT_ABORT:
			lines = NIL;
			break;

		default:
			break;
	}
}

/*
 * A subtransaction has a higher number than all that started before it.  So
 * what was noted in this one or in its own ones, committed into it by now,
 * are the lines at the end of the list with this number or a higher one.
 */
static void
subtransaction_ended(SubXactEvent event, SubTransactionId subid,
					 SubTransactionId parent, void *arg)
{
	if (event != SUBXACT_EVENT_ABORT_SUB)
		return;
	while (lines != NIL && ((LogLine *) llast(lines))->subid >= subid)
		lines = list_delete_last(lines);
}

/* Write a line to the log once this transaction has committed. */
void
idem_log_after_commit(const char *message, const char *detail)
{
	static bool registered = false;
	MemoryContext oldcontext;
	LogLine    *line;

	if (!registered)
	{
		RegisterXactCallback(transaction_ended, NULL);
		RegisterSubXactCallback(subtransaction_ended, NULL);
		registered = true;
	}

	oldcontext = MemoryContextSwitchTo(TopTransactionContext);
	line = palloc(sizeof(LogLine));
	line->subid = GetCurrentSubTransactionId();
	line->message = pstrdup(message);
	line->detail = pstrdup(detail);
	lines = lappend(lines, line);
	MemoryContextSwitchTo(oldcontext);
}
