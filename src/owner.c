/*-------------------------------------------------------------------------
 *
 * owner.c
 *	  SQL as a table's owner, on behalf of a caller without privileges on it,
 *	  and what it returns.
 *
 * Whoever calls, a statement may fire triggers of the table's owner.  They
 * run as the owner, under SECURITY_RESTRICTED_OPERATION and with a safe
 * search_path, so neither side can make the other do anything: the owner's
 * code does not run as the caller, who may be a superuser (the expiry worker
 * is one), and the caller's search_path does not reach the owner's code.
 * The server refuses to leave a deferred trigger behind meanwhile.
 *
 * After an error the transaction, or the savepoint, restores both.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/rel.h"
#include "utils/resowner.h"

#include "owner.h"
#include "row.h"

/*
 * From here on until idem_become_caller(), be the owner of rel.  Settings
 * made with GUC_ACTION_SAVE meanwhile hold for as long.
 */
void
idem_become_owner(Relation rel, IdemCaller *caller)
{
	GetUserIdAndSecContext(&caller->userid, &caller->sec_context);
	SetUserIdAndSecContext(rel->rd_rel->relowner,
						   caller->sec_context | SECURITY_RESTRICTED_OPERATION);
	caller->settings_level = NewGUCNestLevel();
	(void) set_config_option("search_path", "pg_catalog, pg_temp",
							 PGC_USERSET, PGC_S_SESSION, GUC_ACTION_SAVE,
							 true, 0, false);
}

void
idem_become_caller(const IdemCaller *caller)
{
	AtEOXact_GUC(false, caller->settings_level);
	SetUserIdAndSecContext(caller->userid, caller->sec_context);
}

/*
 * Is it the server that has been told to stop?  The owner's code may raise an
 * error of the same SQLSTATE.
 */
static bool
is_order_to_stop(const ErrorData *error)
{
	return (error->sqlerrcode == ERRCODE_QUERY_CANCELED ||
			error->sqlerrcode == ERRCODE_ADMIN_SHUTDOWN) &&
		error->funcname != NULL &&
		strcmp(error->funcname, "ProcessInterrupts") == 0;
}

/*
 * Do something in a subtransaction.  Returns false, with the error in *error,
 * if it failed; an order to stop is thrown on, as it is no fault of the work.
 */
bool
idem_try(void (*work) (void *arg), void *arg, ErrorData **error)
{
	MemoryContext context = CurrentMemoryContext;
	ResourceOwner owner = CurrentResourceOwner;
	volatile bool done = false;

	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(context);
	PG_TRY();
	{
		work(arg);
		done = true;
		ReleaseCurrentSubTransaction();
		MemoryContextSwitchTo(context);
		CurrentResourceOwner = owner;
	}
	PG_CATCH();
	{
		MemoryContextSwitchTo(context);
		*error = CopyErrorData();
		FlushErrorState();
		RollbackAndReleaseCurrentSubTransaction();
		MemoryContextSwitchTo(context);
		CurrentResourceOwner = owner;
		done = false;
	}
	PG_END_TRY();

	if (!done && is_order_to_stop(*error))
		ReThrowError(*error);
	return done;
}

/* ----------------------------------------------------------------
 *		What a statement has returned
 *
 * The table is its owner's to change: a constraint may have been dropped, and
 * a trigger may put anything anywhere.  So a value is NULL unless it has been
 * looked at.
 * ----------------------------------------------------------------
 */

/* Refuse a NULL where the library always writes a value. */
void
idem_refuse_null(const char *column)
{
	ereport(ERROR,
			(errcode(ERRCODE_NOT_NULL_VIOLATION),
			 errmsg("null value in column \"%s\" of a table of pg_idem",
					column),
			 errdetail("The library never writes one there; the table's owner, or a trigger, has."),
			 errhint("Restore the column's NOT NULL constraint, and the value.")));
}

/* The same, of a row that was read without SQL */
void
idem_refuse_null_in_row(TupleTableSlot *row, AttrNumber attno)
{
	idem_refuse_null(NameStr(TupleDescAttr(row->tts_tupleDescriptor,
										   attno - 1)->attname));
}

/* A column of a row that a statement has returned, which may be NULL */
Datum
idem_returned_or_null(SPITupleTable *rows, uint64 i, int column, bool *isnull)
{
	return SPI_getbinval(rows->vals[i], rows->tupdesc, column, isnull);
}

/* The same, where NULL is an error */
Datum
idem_returned(SPITupleTable *rows, uint64 i, int column)
{
	bool		isnull;
	Datum		value = idem_returned_or_null(rows, i, column, &isnull);

	if (isnull)
		idem_refuse_null(SPI_fname(rows->tupdesc, column));
	return value;
}

/* A text column as a C string */
char *
idem_returned_string(SPITupleTable *rows, uint64 i, int column)
{
	return TextDatumGetCString(idem_returned(rows, i, column));
}
