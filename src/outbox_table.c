/*-------------------------------------------------------------------------
 *
 * outbox_table.c
 *	  The table of the outbox: what it has to be, the statements on it, and
 *	  its purge.
 *
 * The table is changed with SQL, as its owner (owner.c), by statements that
 * are prepared once in a session.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/table.h"
#include "catalog/pg_collation.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/rel.h"

#include "outbox.h"
#include "after_commit.h"
#include "catalog.h"
#include "inval.h"

/*
 * Columns of idem_outbox.  The statements go by their names, outbox_pick.c by
 * their numbers, and neither looks at types again; see idem_is_outbox().
 */
static const struct
{
	const char *name;
	Oid			type;
}			columns[] = {
	{"id", INT8OID},
	{"message_id", UUIDOID},
	{"topic", TEXTOID},
	{"group_key", TEXTOID},
	{"payload", JSONBOID},
	{"headers", JSONBOID},
	{"created_at", TIMESTAMPTZOID},
	{"max_attempts", INT4OID},
	{"available_at", TIMESTAMPTZOID},
	{"attempt", INT4OID},
	{"lease_until", TIMESTAMPTZOID},
	{"dead_at", TIMESTAMPTZOID},
	{"last_error", TEXTOID}
};

/* What every message has; an insert returns it to be looked at */
#define REQUIRED \
	"id, message_id, topic, created_at, max_attempts, available_at, attempt"

/* columns that a trigger may have set NULL, which must not be in the way */
#define FOR_THE_LOG \
	"coalesce(topic, '?'), coalesce(message_id::text, '?'), coalesce(attempt, 0)"

#define NSTATEMENTS		(IDEM_REVIVE_MESSAGE + 1)
#define MAX_PARAMETERS	8

/* %1$s is the table, %2$s its further columns, each with a comma before it */
static const struct
{
	const char *sql;
	Oid			types[MAX_PARAMETERS];
}			statements[NSTATEMENTS] = {
	[IDEM_INSERT_MESSAGE] = {
		"INSERT INTO %1$s (message_id, topic, group_key, payload, headers,"
		" created_at, available_at, max_attempts)"
		" VALUES (coalesce($1, gen_random_uuid()), $2, $3, $4, $5, $6, $7, $8)"
		" RETURNING " REQUIRED,
		{UUIDOID, TEXTOID, TEXTOID, JSONBOID, JSONBOID, TIMESTAMPTZOID,
		TIMESTAMPTZOID, INT4OID}
	},

	/* topic, group, id */
	[IDEM_FIND_HIGHER_ID] = {
		"SELECT FROM ONLY %1$s WHERE topic = $1 AND group_key = $2"
		" AND dead_at IS NULL AND id > $3 LIMIT 1",
		{TEXTOID, TEXTOID, INT8OID}
	},

	[IDEM_TAKE_MESSAGE] = {
		"UPDATE ONLY %1$s SET attempt = greatest(attempt, 0) + 1,"
		" lease_until = $2"
		" WHERE id = $1 RETURNING *",
		{INT8OID, TIMESTAMPTZOID}
	},
	[IDEM_BURY_MESSAGE] = {
		"UPDATE ONLY %1$s SET lease_until = NULL, dead_at = $2,"
		" last_error = format('attempt %%s ended without an answer', attempt)"
		" WHERE id = $1"
		" RETURNING " FOR_THE_LOG ", dead_at IS NOT NULL",
		{INT8OID, TIMESTAMPTZOID}
	},
	[IDEM_DELETE_MESSAGE] = {
		"DELETE FROM ONLY %1$s WHERE id = $1 AND attempt = $2",
		{INT8OID, INT4OID}
	},

	/*
	 * id, attempt, error, when again, now, dead; returns whether it is dead,
	 * and whether it is only now
	 */
	[IDEM_FAIL_MESSAGE] = {
		"UPDATE ONLY %1$s SET lease_until = NULL, last_error = $3,"
		" available_at = $4, dead_at = coalesce(dead_at,"
		" CASE WHEN $6 OR attempt >= max_attempts THEN $5 END)"
		" WHERE id = $1 AND attempt = $2"
		" RETURNING " FOR_THE_LOG ", dead_at IS NOT NULL,"
		" dead_at IS NOT DISTINCT FROM $5",
		{INT8OID, INT4OID, TEXTOID, TIMESTAMPTZOID, TIMESTAMPTZOID, BOOLOID}
	},
	[IDEM_GET_ATTEMPT] = {
		"SELECT attempt FROM ONLY %1$s WHERE id = $1",
		{INT8OID}
	},

	/* topic, id, how many; only what relays could take */
	[IDEM_PICK_DEAD] = {
		"SELECT id, topic, group_key FROM ONLY %1$s"
		" WHERE dead_at IS NOT NULL AND ($1 IS NULL OR topic = $1)"
		" AND ($2 IS NULL OR id = $2)"
		" AND num_nulls(id, message_id, created_at, max_attempts) = 0"
		" AND octet_length(topic) BETWEEN 1 AND 255"
		" ORDER BY id LIMIT $3 FOR UPDATE SKIP LOCKED",
		{TEXTOID, INT8OID, INT8OID}
	},
	[IDEM_REVIVE_MESSAGE] = {
		"WITH gone AS (DELETE FROM ONLY %1$s WHERE id = $1 RETURNING *)"
		" INSERT INTO %1$s (message_id, topic, group_key, payload, headers,"
		" created_at, max_attempts, available_at, last_error%2$s)"
		" OVERRIDING SYSTEM VALUE"
		" SELECT message_id, topic, group_key, payload, headers,"
		" created_at, max_attempts, $2, last_error%2$s FROM gone"
		" RETURNING " REQUIRED,
		{INT8OID, TIMESTAMPTZOID}
	}
};

/*
 * Statements prepared in this session, for the table of this OID and name with
 * these further columns
 */
static struct
{
	Oid			relid;
	char	   *name;
	char	   *further_columns;
	SPIPlanPtr	plan[NSTATEMENTS];
}			prepared;

/*
 * The columns that the owner has added and that can be written, for use in
 * SQL, each with a comma before it
 */
static char *
further_columns(Relation rel)
{
	TupleDesc	desc = RelationGetDescr(rel);
	StringInfoData names;

	initStringInfo(&names);
	for (int i = lengthof(columns); i < desc->natts; i++)
	{
		Form_pg_attribute att = TupleDescAttr(desc, i);

		if (!att->attisdropped && att->attgenerated == '\0')
			appendStringInfo(&names, ", %s",
							 quote_identifier(NameStr(att->attname)));
	}
	return names.data;
}

/*
 * Forget the statements if the table is another one by now, or has another
 * name or other columns.  They are not freed, as one of them may be running: a
 * trigger of the table's owner could have come here.  It costs some memory
 * once in a while.
 */
static void
check_prepared(Relation rel)
{
	char	   *name = idem_qualified_name(rel);
	char	   *further = further_columns(rel);

	if (prepared.relid != RelationGetRelid(rel) ||
		strcmp(prepared.name, name) != 0 ||
		strcmp(prepared.further_columns, further) != 0)
	{
		memset(&prepared, 0, sizeof(prepared));
		prepared.name = MemoryContextStrdup(TopMemoryContext, name);
		prepared.further_columns = MemoryContextStrdup(TopMemoryContext,
													   further);
		prepared.relid = RelationGetRelid(rel);
	}
	pfree(name);
	pfree(further);
}

static SPIPlanPtr
prepare(IdemStatement statement)
{
	const Oid  *types = statements[statement].types;
	char	   *sql = psprintf(statements[statement].sql, prepared.name,
							   prepared.further_columns);
	SPIPlanPtr	plan;
	int			nparams = 0;

	while (nparams < MAX_PARAMETERS && OidIsValid(types[nparams]))
		nparams++;
	plan = SPI_prepare_cursor(sql, nparams, (Oid *) types,
							  CURSOR_OPT_GENERIC_PLAN);
	if (plan == NULL || SPI_keepplan(plan) != 0)
		elog(ERROR, "could not prepare \"%s\": %s", sql,
			 SPI_result_code_string(SPI_result));
	pfree(sql);
	return plan;
}

/*
 * Run a statement; what it returns is in SPI_tuptable.  Returns how many rows
 * it has returned or changed.
 */
uint64
idem_outbox_run(IdemStatement statement, Datum *values, const char *nulls)
{
	int			rc;

	if (prepared.plan[statement] == NULL)
		prepared.plan[statement] = prepare(statement);
	rc = SPI_execute_plan(prepared.plan[statement], values, nulls, false, 0);
	if (rc < 0)
		elog(ERROR, "could not run a statement on the outbox: %s",
			 SPI_result_code_string(rc));
	return SPI_processed;
}

/* The table that was checked, as long as it does not change */
static struct
{
	Oid			relid;
	bool		is_outbox;
}			checked;

void
idem_outbox_relation_changed(Oid relid)
{
	if (!OidIsValid(relid) || relid == checked.relid)
		checked.relid = InvalidOid;
}

/* Are its columns those that the library works with? */
static bool
has_columns(Relation rel)
{
	TupleDesc	desc = RelationGetDescr(rel);

	if (rel->rd_rel->relkind != RELKIND_RELATION ||
		rel->rd_rel->relpersistence != RELPERSISTENCE_PERMANENT ||
		desc->natts < lengthof(columns))
		return false;
	for (int i = 0; i < lengthof(columns); i++)
	{
		Form_pg_attribute att = TupleDescAttr(desc, i);

		if (att->attisdropped || att->atttypid != columns[i].type ||
			strcmp(NameStr(att->attname), columns[i].name) != 0)
			return false;
	}

	/* outbox_pick.c compares them so */
	return TupleDescAttr(desc, Anum_outbox_topic - 1)->attcollation == C_COLLATION_OID &&
		TupleDescAttr(desc, Anum_outbox_group_key - 1)->attcollation == C_COLLATION_OID;
}

/*
 * Is this table what the library knows as the outbox?  Its owner may have
 * changed it, or it is of another version, or kept elsewhere.  Further
 * columns do no harm.  The caller holds a lock on it.
 */
bool
idem_is_outbox(Relation rel)
{
	bool		is_outbox;

	if (checked.relid == RelationGetRelid(rel) && checked.is_outbox)
		return true;

	/* an invalidation during the check, or an error, voids it */
	idem_watch_invalidations();
	checked.is_outbox = false;
	checked.relid = RelationGetRelid(rel);
	is_outbox = has_columns(rel) && !idem_is_distributed(rel);
	checked.is_outbox = is_outbox;
	return is_outbox;
}

/*
 * Open the outbox, for anybody who may call the function.  What is allocated
 * from here on goes when it is closed.
 */
void
idem_outbox_open(IdemOutbox *outbox)
{
	outbox->rel = idem_open_member(&idem_catalog()->outbox, RowExclusiveLock);
	if (outbox->rel == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_TABLE),
				 errmsg("the outbox of pg_idem does not exist")));
	if (!idem_is_outbox(outbox->rel))
	{
		idem_refuse_distributed(outbox->rel);
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("table \"%s\" is not the one that this version of the pg_idem library works with",
						RelationGetRelationName(outbox->rel)),
				 errhint("Restore it as it was created; after an upgrade, run ALTER EXTENSION pg_idem UPDATE.")));
	}
	check_prepared(outbox->rel);
	idem_become_owner(outbox->rel, &outbox->caller);

	/*
	 * A plan made for an empty table would read it through, and be kept when
	 * there are a million rows; so only indexes are offered.
	 */
	(void) set_config_option("enable_seqscan", "off",
							 PGC_USERSET, PGC_S_SESSION, GUC_ACTION_SAVE,
							 true, 0, false);
	SPI_connect();
}

/* The lock on the table stays until the transaction ends. */
void
idem_outbox_close(IdemOutbox *outbox)
{
	SPI_finish();
	idem_become_caller(&outbox->caller);
	table_close(outbox->rel, NoLock);
}

/* ----------------------------------------------------------------
 *		Purge, for the sweep (expire_sweep.c), which has become the owner
 * ----------------------------------------------------------------
 */

/* One row may be slow to go, for a trigger or a foreign key */
#define MAX_PURGE_MSECS	500

/* A dead letter to be removed */
typedef struct Removal
{
	const char *table;
	int64		id;
} Removal;

static void
remove_dead_letter(void *arg)
{
	const Removal *removal = arg;
	Oid			type = INT8OID;
	Datum		value = Int64GetDatum(removal->id);
	char	   *sql = psprintf("DELETE FROM ONLY %s WHERE id = $1"
							   " RETURNING " FOR_THE_LOG, removal->table);

	if (SPI_execute_with_args(sql, 1, &type, &value, NULL, false, 0) !=
		SPI_OK_DELETE_RETURNING)
		elog(ERROR, "could not remove a dead letter: %s",
			 SPI_result_code_string(SPI_result));
	pfree(sql);
	if (SPI_processed > 0)
		idem_log_after_commit(psprintf("removed dead letter %s of topic \"%s\"",
									   idem_returned_string(SPI_tuptable, 0, 2),
									   idem_returned_string(SPI_tuptable, 0, 1)),
							  psprintf("It was tried %d times; pg_idem.outbox_dead_ttl is over.",
									   DatumGetInt32(idem_returned(SPI_tuptable, 0, 3))));
	SPI_freetuptable(SPI_tuptable);
}

/*
 * Remove dead letters that died before a time, by their ids, those behind
 * *last, "size" at the most, and for half a second, but at least one.  One
 * that cannot go, such as one that a foreign key refers to, is counted in
 * *failed and passed over.  Returns whether there may be more.  Needs a
 * connection to SPI, and a table that idem_is_outbox().
 */
bool
idem_outbox_purge(const char *table, TimestampTz before, int64 *last,
				  int size, int64 *failed)
{
	Oid			types[3] = {TIMESTAMPTZOID, INT8OID, INT4OID};
	Datum		values[3];
	TimestampTz start = GetCurrentTimestamp();
	SPITupleTable *rows;
	uint64		n;

	values[0] = TimestampTzGetDatum(before);
	values[1] = Int64GetDatum(*last);
	values[2] = Int32GetDatum(size);
	if (SPI_execute_with_args(psprintf("SELECT id FROM ONLY %s"
									   " WHERE dead_at <= $1 AND id > $2"
									   " ORDER BY id LIMIT $3"
									   " FOR UPDATE SKIP LOCKED", table),
							  3, types, values, NULL, false, 0) !=
		SPI_OK_SELECT)
		elog(ERROR, "could not look for dead letters: %s",
			 SPI_result_code_string(SPI_result));
	rows = SPI_tuptable;
	n = SPI_processed;
	for (uint64 i = 0; i < n; i++)
	{
		Removal		removal = {table, DatumGetInt64(idem_returned(rows, i, 1))};
		ErrorData  *error = NULL;

		CHECK_FOR_INTERRUPTS();

		/* to have found them may have taken all of the time already */
		if (i > 0 &&
			TimestampDifferenceExceeds(start, GetCurrentTimestamp(),
									   MAX_PURGE_MSECS))
			return true;
		*last = removal.id;
		if (idem_try(remove_dead_letter, &removal, &error))
			continue;
		if ((*failed)++ == 0)
			ereport(LOG,
					(errcode(error->sqlerrcode),
					 errmsg("could not remove dead letter %lld from %s: %s",
							(long long) removal.id, table, error->message)));
		FreeErrorData(error);
	}
	return n == (uint64) size;
}
