/*-------------------------------------------------------------------------
 *
 * outbox.c
 *	  The transactional outbox: idem_publish, idem_outbox_take,
 *	  idem_outbox_done, idem_outbox_fail, idem_outbox_redrive.
 *
 * A message is a row of idem_outbox, inserted by the transaction that it
 * tells about.  A relay takes messages, delivers them outside of any
 * transaction, and says what came of each.  The states of a row:
 *
 *		publish			 take			 done
 *		--------> pending ------> taken --------> (no row)
 *				   ^   ^			|  |				^
 *				   |   +------------+  | fail, or lease |
 *				   |	lease over,	   | over, with no	| time
 *				   |	or fail		   | attempts left	| over
 *				   |				   v				|
 *				   +----------------- dead -------------+
 *						redrive
 *
 * Pending is a row without dead_at; taken, one whose lease_until is still to
 * come.  A message that is done is deleted at once, so the table holds what
 * is left to do, and stays small.
 *
 * NOTHING IS LOST
 *
 * No position in the table is remembered anywhere.  A take looks for pending
 * rows, so a transaction that commits late with a low id is merely taken
 * late.  attempt counts when a message is taken, not when it has failed: a
 * message that kills every relay runs out of attempts like any other.
 *
 * THE FENCE
 *
 * done and fail name the attempt.  A relay that was thought dead finds another
 * attempt (IK001), or no such id (IK002).  Redrive starts the attempts anew,
 * but under another id.  The message_id never changes.
 *
 * In what order messages are taken is told in outbox_pick.c.
 *
 * The table is changed with SQL, as its owner (owner.c), by statements that are
 * prepared once in a session.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "pg_idem.h"

#include "access/table.h"
#include "catalog/pg_type.h"
#include "commands/async.h"
#include "common/hashfn.h"
#include "executor/spi.h"
#include "funcapi.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "storage/lock.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/uuid.h"

PG_FUNCTION_INFO_V1(idem_publish);
PG_FUNCTION_INFO_V1(idem_outbox_take);
PG_FUNCTION_INFO_V1(idem_outbox_done);
PG_FUNCTION_INFO_V1(idem_outbox_fail);
PG_FUNCTION_INFO_V1(idem_outbox_redrive);

/* Relays LISTEN to this; the payload is the topic */
#define CHANNEL				"idem_outbox"

/*
 * Publishers of a group take an advisory lock of a kind that
 * pg_advisory_lock() cannot take: its fourth field is neither 1 nor 2.
 */
#define GROUP_LOCK_KIND		9110
#define NGROUP_LOCKS		1024

/* Wait before attempt n + 1: up to 1 s, 2 s, 4 s, ... , 5 min */
#define BACKOFF_BASE_USECS	USECS_PER_SEC
#define BACKOFF_CAP_USECS	(300 * USECS_PER_SEC)

/* Most bytes of an error that are kept */
#define MAX_ERROR			1000

/* ----------------------------------------------------------------
 *		Statements on the table
 * ----------------------------------------------------------------
 */

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

typedef enum Statement
{
	INSERT_MESSAGE,
	TAKE_MESSAGE,
	BURY_MESSAGE,
	DELETE_MESSAGE,
	FAIL_MESSAGE,
	GET_ATTEMPT,
	PICK_DEAD,
	REVIVE_MESSAGE
} Statement;

#define NSTATEMENTS		(REVIVE_MESSAGE + 1)
#define MAX_PARAMETERS	8

/* %1$s is the table */
static const struct
{
	const char *sql;
	Oid			types[MAX_PARAMETERS];
}			statements[NSTATEMENTS] = {
	[INSERT_MESSAGE] = {
		"INSERT INTO %1$s AS m (message_id, topic, group_key, payload, headers,"
		" created_at, available_at, max_attempts)"
		" VALUES (coalesce($1, gen_random_uuid()), $2, $3, $4, $5, $6, $7, $8)"
		" RETURNING message_id, EXISTS (SELECT FROM ONLY %1$s o"
		" WHERE o.topic = $2 AND o.group_key = $3 AND o.dead_at IS NULL"
		" AND o.id > m.id)",
		{UUIDOID, TEXTOID, TEXTOID, JSONBOID, JSONBOID, TIMESTAMPTZOID,
		TIMESTAMPTZOID, INT4OID}
	},

	[TAKE_MESSAGE] = {
		"UPDATE ONLY %1$s SET attempt = attempt + 1, lease_until = $2"
		" WHERE id = $1 RETURNING *",
		{INT8OID, TIMESTAMPTZOID}
	},
	[BURY_MESSAGE] = {
		"UPDATE ONLY %1$s SET lease_until = NULL, dead_at = $2,"
		" last_error = format('attempt %%s ended without an answer', attempt)"
		" WHERE id = $1"
		" RETURNING topic, message_id::text, attempt, dead_at IS NOT NULL",
		{INT8OID, TIMESTAMPTZOID}
	},
	[DELETE_MESSAGE] = {
		"DELETE FROM ONLY %1$s WHERE id = $1 AND attempt = $2",
		{INT8OID, INT4OID}
	},

	/* id, attempt, error, when again, now, dead */
	[FAIL_MESSAGE] = {
		"UPDATE ONLY %1$s SET lease_until = NULL, last_error = $3,"
		" available_at = $4, dead_at = coalesce(dead_at,"
		" CASE WHEN $6 OR attempt >= max_attempts THEN $5 END)"
		" WHERE id = $1 AND attempt = $2"
		" RETURNING topic, message_id::text, attempt, dead_at IS NOT NULL",
		{INT8OID, INT4OID, TEXTOID, TIMESTAMPTZOID, TIMESTAMPTZOID, BOOLOID}
	},
	[GET_ATTEMPT] = {
		"SELECT attempt FROM ONLY %1$s WHERE id = $1",
		{INT8OID}
	},

	/* topic, id, how many */
	[PICK_DEAD] = {
		"SELECT id, topic, group_key FROM ONLY %1$s"
		" WHERE dead_at IS NOT NULL AND ($1 IS NULL OR topic = $1)"
		" AND ($2 IS NULL OR id = $2)"
		" ORDER BY id LIMIT $3 FOR UPDATE SKIP LOCKED",
		{TEXTOID, INT8OID, INT8OID}
	},
	[REVIVE_MESSAGE] = {
		"WITH gone AS (DELETE FROM ONLY %1$s WHERE id = $1 RETURNING *)"
		" INSERT INTO %1$s (message_id, topic, group_key, payload, headers,"
		" created_at, max_attempts, available_at, last_error)"
		" SELECT message_id, topic, group_key, payload, headers,"
		" created_at, max_attempts, $2, last_error FROM gone",
		{INT8OID, TIMESTAMPTZOID}
	}
};

/* The table open for one call, by its owner */
typedef struct Outbox
{
	Relation	rel;
	IdemCaller	caller;
} Outbox;

/*
 * Statements prepared in this session, for the table of this OID and name.
 */
static struct
{
	Oid			relid;
	char	   *name;
	SPIPlanPtr	plan[NSTATEMENTS];
}			prepared;

/*
 * Forget the statements if the table is another one by now, or has another
 * name.  They are not freed, as one of them may be running: a trigger of the
 * table's owner could have come here.  It costs some memory once in a while.
 */
static void
check_prepared(Relation rel)
{
	char	   *name = idem_qualified_name(rel);

	if (prepared.relid != RelationGetRelid(rel) ||
		strcmp(prepared.name, name) != 0)
	{
		memset(&prepared, 0, sizeof(prepared));
		prepared.name = MemoryContextStrdup(TopMemoryContext, name);
		prepared.relid = RelationGetRelid(rel);
	}
	pfree(name);
}

static SPIPlanPtr
prepare(Statement statement)
{
	const Oid  *types = statements[statement].types;
	char	   *sql = psprintf(statements[statement].sql, prepared.name);
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
static uint64
run(Statement statement, Datum *values, const char *nulls)
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

/* A column of a row that a statement has returned */
static Datum
returned(SPITupleTable *rows, uint64 i, int column, bool *isnull)
{
	return SPI_getbinval(rows->vals[i], rows->tupdesc, column, isnull);
}

static int64
returned_int8(SPITupleTable *rows, uint64 i, int column)
{
	bool		isnull;

	return DatumGetInt64(returned(rows, i, column, &isnull));
}

static bool
returned_bool(SPITupleTable *rows, uint64 i, int column)
{
	bool		isnull;

	return DatumGetBool(returned(rows, i, column, &isnull));
}

static int32
returned_int4(SPITupleTable *rows, uint64 i, int column)
{
	bool		isnull;

	return DatumGetInt32(returned(rows, i, column, &isnull));
}

static text *
returned_text(SPITupleTable *rows, uint64 i, int column)
{
	bool		isnull;
	Datum		value = returned(rows, i, column, &isnull);

	return isnull ? NULL : DatumGetTextPP(value);
}

/*
 * Is this table what the library knows as the outbox?  Its owner may have
 * changed it, or it is of another version.  Further columns do no harm.
 */
bool
idem_is_outbox(Relation rel)
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
	return true;
}

/*
 * Open the outbox, for anybody who may call the function.  What is allocated
 * from here on goes when it is closed.
 */
static void
outbox_open(Outbox *outbox)
{
	outbox->rel = idem_open_member(&idem_catalog()->outbox, RowExclusiveLock);
	if (outbox->rel == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_TABLE),
				 errmsg("the outbox of pg_idem does not exist")));
	if (!idem_is_outbox(outbox->rel))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("table \"%s\" is not the one that this version of the pg_idem library works with",
						RelationGetRelationName(outbox->rel)),
				 errhint("Restore it as it was created; after an upgrade, run ALTER EXTENSION pg_idem UPDATE.")));
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
static void
outbox_close(Outbox *outbox)
{
	SPI_finish();
	idem_become_caller(&outbox->caller);
	table_close(outbox->rel, NoLock);
}

/* A trigger or a rule of the table's owner has undone what we did. */
static void
not_accepted(const char *what)
{
	ereport(ERROR,
			(errcode(ERRCODE_TRIGGERED_ACTION_EXCEPTION),
			 errmsg("the outbox of pg_idem did not accept %s", what),
			 errdetail("A trigger or a rule on the table has kept it out.")));
}

/* ----------------------------------------------------------------
 *		Publishers
 * ----------------------------------------------------------------
 */

/*
 * Wait until every other publisher of this group has committed or rolled
 * back, and keep others waiting until we have.  Groups share a number of
 * locks, lest a transaction with many groups takes up all the room that the
 * server has for locks; that some groups wait for each other does no harm.
 */
static void
lock_group(text *topic, text *group)
{
	uint64		hash;
	LOCKTAG		tag;

	hash = hash_bytes_extended((unsigned char *) VARDATA_ANY(topic),
							   VARSIZE_ANY_EXHDR(topic), 0);
	hash = hash_bytes_extended((unsigned char *) VARDATA_ANY(group),
							   VARSIZE_ANY_EXHDR(group), hash);
	SET_LOCKTAG_ADVISORY(tag, MyDatabaseId, 0, (uint32) (hash % NGROUP_LOCKS),
						 GROUP_LOCK_KIND);
	(void) LockAcquire(&tag, ExclusiveLock, false, false);
}

/* Wake the relays of a topic once this transaction has committed. */
static void
wake_relays(text *topic)
{
	if (idem_outbox_notify)
		Async_Notify(CHANNEL, text_to_cstring(topic));
}

/* The headers of a message: an object, or none */
static Jsonb *
arg_headers(FunctionCallInfo fcinfo, int argno)
{
	Jsonb	   *headers;

	if (PG_ARGISNULL(argno))
		return NULL;
	headers = PG_GETARG_JSONB_P(argno);
	if (!JB_ROOT_IS_OBJECT(headers))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("headers must be a JSON object")));
	return headers;
}

static int32
arg_max_attempts(FunctionCallInfo fcinfo, int argno)
{
	int32		max_attempts = PG_ARGISNULL(argno) ?
		idem_outbox_max_attempts : PG_GETARG_INT32(argno);

	if (max_attempts < 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("max_attempts must be positive")));
	return max_attempts;
}

/* How many: NULL is all */
static int64
arg_max(FunctionCallInfo fcinfo, int argno)
{
	int64		max = PG_ARGISNULL(argno) ? PG_INT64_MAX :
		PG_GETARG_INT32(argno);

	if (max < 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("max must not be negative")));
	return max;
}

/*
 * idem_publish(topic, payload, group_key, headers, message_id, delay,
 *				max_attempts) returns uuid
 */
Datum
idem_publish(PG_FUNCTION_ARGS)
{
	pg_uuid_t  *message_id = palloc(sizeof(pg_uuid_t));
	text	   *topic;
	text	   *group;
	Jsonb	   *headers;
	Interval	delay = {0};
	TimestampTz now;
	TimestampTz available_at;
	Outbox		outbox;
	Datum		values[8];
	char		nulls[9] = "        ";
	bool		isnull;

	PreventCommandIfReadOnly("idem_publish()");

	topic = idem_arg_name(fcinfo, 0, "topic");
	group = PG_ARGISNULL(2) ? NULL : idem_arg_name(fcinfo, 2, "group_key");
	headers = arg_headers(fcinfo, 3);
	idem_arg_interval(fcinfo, 5, &delay);
	values[7] = Int32GetDatum(arg_max_attempts(fcinfo, 6));

	outbox_open(&outbox);
	if (group != NULL)
		lock_group(topic, group);
	now = GetCurrentTimestamp();
	available_at = idem_time_not_before(now, &delay, "delay");

	values[0] = PG_ARGISNULL(4) ? (Datum) 0 : PG_GETARG_DATUM(4);
	nulls[0] = PG_ARGISNULL(4) ? 'n' : ' ';
	values[1] = PointerGetDatum(topic);
	values[2] = PointerGetDatum(group);
	nulls[2] = group == NULL ? 'n' : ' ';
	values[3] = PG_ARGISNULL(1) ? (Datum) 0 : PG_GETARG_DATUM(1);
	nulls[3] = PG_ARGISNULL(1) ? 'n' : ' ';
	values[4] = PointerGetDatum(headers);
	nulls[4] = headers == NULL ? 'n' : ' ';
	values[5] = TimestampTzGetDatum(now);
	values[6] = TimestampTzGetDatum(available_at);
	if (run(INSERT_MESSAGE, values, nulls) != 1)
		not_accepted("a message");
	if (returned_bool(SPI_tuptable, 0, 2))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("ids of the outbox of pg_idem do not ascend"),
				 errdetail("A message of the same group that was published before has a higher id."),
				 errhint("Restore its sequence: INCREMENT 1, CACHE 1, NO CYCLE, and not set back.")));
	*message_id = *DatumGetUUIDP(returned(SPI_tuptable, 0, 1, &isnull));
	outbox_close(&outbox);

	if (available_at == now)
		wake_relays(topic);
	PG_RETURN_UUID_P(message_id);
}

/* ----------------------------------------------------------------
 *		Relays
 * ----------------------------------------------------------------
 */

/* For statements that return topic, message_id and attempt */
static void
log_dead_letter(SPITupleTable *rows)
{
	ereport(LOG,
			(errmsg("message %s of topic \"%s\" is a dead letter",
					text_to_cstring(returned_text(rows, 0, 2)),
					text_to_cstring(returned_text(rows, 0, 1))),
			 errdetail("It was tried %d times.", returned_int4(rows, 0, 3))));
}

/*
 * A message whose last attempt has ended without an answer is dead: its relay
 * died, perhaps of it.  Returns how many have died: 1, or 0 if a trigger has
 * kept it alive.
 */
static int
bury(int64 id, TimestampTz now)
{
	Datum		values[2];
	bool		died;

	values[0] = Int64GetDatum(id);
	values[1] = TimestampTzGetDatum(now);
	died = run(BURY_MESSAGE, values, NULL) > 0 &&
		returned_bool(SPI_tuptable, 0, 4);
	if (died)
		log_dead_letter(SPI_tuptable);
	SPI_freetuptable(SPI_tuptable);
	return died ? 1 : 0;
}

/* A call of idem_outbox_take, and how far it has come */
typedef struct Take
{
	int64		max;
	int64		taken;
	int			buried;
	bool		enough;
	TimestampTz now;
	TimestampTz lease_until;
	Tuplestorestate *result;
	TupleDesc	desc;			/* of the table, further columns and all */
} Take;

/*
 * Put a message that a statement has returned into the result, whose row type
 * is the table's: with the same columns, further ones too, and the places of
 * those that were dropped.
 */
static void
return_message(SPITupleTable *rows, Take *call)
{
	TupleDesc	desc = call->desc;
	Datum	   *values = palloc0(desc->natts * sizeof(Datum));
	bool	   *isnull = palloc(desc->natts * sizeof(bool));
	int			column = 0;

	for (int i = 0; i < desc->natts; i++)
	{
		Form_pg_attribute att = TupleDescAttr(desc, i);

		isnull[i] = true;
		if (att->attisdropped)
			continue;
		if (SPI_gettypeid(rows->tupdesc, ++column) != att->atttypid)
			ereport(ERROR,
					(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
					 errmsg("the outbox of pg_idem was changed during the call")));
		values[i] = returned(rows, 0, column, &isnull[i]);
	}
	tuplestore_putvalues(call->result, desc, values, isnull);
	pfree(values);
	pfree(isnull);
}

/*
 * Take a message that is locked.  Returns how many were: 1, or 0 if a trigger
 * has kept it out of our hands.
 */
static int
take_message(int64 id, Take *call)
{
	Datum		values[2];
	int			n;

	values[0] = Int64GetDatum(id);
	values[1] = TimestampTzGetDatum(call->lease_until);
	n = run(TAKE_MESSAGE, values, NULL);
	if (n > 0)
		return_message(SPI_tuptable, call);
	SPI_freetuptable(SPI_tuptable);
	return n;
}

/*
 * Take a message that may be taken, or bury it if it has no attempts left.
 *
 * A message whose last attempt has ended without an answer is suspect: it may
 * have killed its relay.  It is taken alone, so that those which were taken
 * with it the first time are not drawn into its death again; if others have
 * been taken, its turn is the next take.
 */
static IdemVerdict
consider(Relation rel, TupleTableSlot *row, void *arg)
{
	Take	   *call = arg;
	int64		id = DatumGetInt64(idem_row_datum(row, Anum_outbox_id));
	bool		has_attempts =
		DatumGetInt32(idem_row_datum(row, Anum_outbox_attempt)) <
		DatumGetInt32(idem_row_datum(row, Anum_outbox_max_attempts));
	bool		is_suspect = !idem_row_isnull(row, Anum_outbox_lease_until);
	int			n;

	if (has_attempts && is_suspect && call->taken > 0)
	{
		call->enough = true;
		return IDEM_BEFORE_THIS;
	}
	if (!idem_outbox_lock(rel, row))
		return IDEM_SHOW_MORE;

	if (!has_attempts)
	{
		call->buried += bury(id, call->now);
		return IDEM_SHOW_MORE;
	}
	n = take_message(id, call);
	call->taken += n;
	call->enough = call->taken >= call->max || (is_suspect && n > 0);
	return call->enough ? IDEM_ENOUGH : IDEM_SHOW_MORE;
}

/*
 * idem_outbox_take(topic, max, lease) returns setof idem_outbox
 */
Datum
idem_outbox_take(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	text	   *topic;
	Take		call;
	Interval	lease = {0};
	Outbox		outbox;

	PreventCommandIfReadOnly("idem_outbox_take()");

	memset(&call, 0, sizeof(call));
	topic = idem_arg_name(fcinfo, 0, "topic");
	call.max = arg_max(fcinfo, 1);
	lease.time = idem_lease * INT64CONST(1000);
	idem_arg_interval(fcinfo, 2, &lease);
	call.now = GetCurrentTimestamp();
	call.lease_until = idem_time_after(call.now, &lease, "lease");

	InitMaterializedSRF(fcinfo, 0);
	call.result = rsinfo->setResult;
	call.desc = rsinfo->setDesc;
	outbox_open(&outbox);
	call.enough = (call.max == 0);
	while (!call.enough)
	{
		call.buried = 0;
		idem_outbox_pick(outbox.rel, topic, call.now, consider, &call);

		/* the dead step aside, so there may be others in their place */
		if (call.buried == 0)
			break;
	}
	outbox_close(&outbox);
	return (Datum) 0;
}

/* id and attempt, which say what a relay believes to have */
static void
arg_taken(FunctionCallInfo fcinfo, Datum *values)
{
	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("id must not be null")));
	if (PG_ARGISNULL(1))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("attempt must not be null")));
	if (PG_GETARG_INT32(1) < 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("attempt must be positive"),
				 errdetail("It is what idem_outbox_take() has returned.")));
	values[0] = PG_GETARG_DATUM(0);
	values[1] = PG_GETARG_DATUM(1);
}

/* The fence: this message is not, or no longer, the caller's. */
static void
refuse_answer(int64 id, int32 attempt)
{
	Datum		value = Int64GetDatum(id);

	if (run(GET_ATTEMPT, &value, NULL) > 0)
	{
		int32		current = returned_int4(SPI_tuptable, 0, 1);

		if (attempt == current)
			not_accepted("an answer");
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_STALE_CLAIM),
				 errmsg("claim on message %lld is stale", (long long) id),
				 errdetail("The caller has attempt %d; the current attempt is %d.",
						   attempt, current)));
	}
	ereport(ERROR,
			(errcode(ERRCODE_IDEM_NO_CLAIM),
			 errmsg("there is no message %lld in the outbox", (long long) id),
			 errdetail("It is done, or was published again under another id by idem_outbox_redrive().")));
}

/*
 * idem_outbox_done(id, attempt) returns void
 *
 * A relay that overslept its lease may still say so, as long as nobody else
 * has taken the message, even if it was given up for dead meanwhile: it has
 * been delivered.
 */
Datum
idem_outbox_done(PG_FUNCTION_ARGS)
{
	Outbox		outbox;
	Datum		values[2];

	PreventCommandIfReadOnly("idem_outbox_done()");
	arg_taken(fcinfo, values);

	outbox_open(&outbox);
	if (run(DELETE_MESSAGE, values, NULL) == 0)
		refuse_answer(DatumGetInt64(values[0]), DatumGetInt32(values[1]));
	outbox_close(&outbox);
	PG_RETURN_VOID();
}

/* As much of an error as is kept; NULL if there is none */
static text *
arg_error(FunctionCallInfo fcinfo, int argno)
{
	text	   *error;

	if (PG_ARGISNULL(argno))
		return NULL;
	error = PG_GETARG_TEXT_PP(argno);
	return cstring_to_text_with_len(VARDATA_ANY(error),
									pg_mbcliplen(VARDATA_ANY(error),
												 VARSIZE_ANY_EXHDR(error),
												 MAX_ERROR));
}

/*
 * idem_outbox_fail(id, attempt, error, retry_after, dead)
 *		returns timestamptz
 *
 * Returns when it will be tried again; NULL if it is dead.
 */
Datum
idem_outbox_fail(PG_FUNCTION_ARGS)
{
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz available_at;
	Interval	retry_after = {0};
	text	   *error;
	Outbox		outbox;
	Datum		values[6];
	char		nulls[7] = "      ";
	bool		dead;

	PreventCommandIfReadOnly("idem_outbox_fail()");
	arg_taken(fcinfo, values);
	error = arg_error(fcinfo, 2);
	retry_after.time = idem_full_jitter(BACKOFF_BASE_USECS, BACKOFF_CAP_USECS,
										Max(DatumGetInt32(values[1]) - 1, 0));
	idem_arg_interval(fcinfo, 3, &retry_after);
	available_at = idem_time_not_before(now, &retry_after, "retry_after");

	values[2] = PointerGetDatum(error);
	nulls[2] = error == NULL ? 'n' : ' ';
	values[3] = TimestampTzGetDatum(available_at);
	values[4] = TimestampTzGetDatum(now);
	values[5] = BoolGetDatum(!PG_ARGISNULL(4) && PG_GETARG_BOOL(4));

	outbox_open(&outbox);
	if (run(FAIL_MESSAGE, values, nulls) == 0)
		refuse_answer(DatumGetInt64(values[0]), DatumGetInt32(values[1]));
	dead = returned_bool(SPI_tuptable, 0, 4);
	if (dead)
		log_dead_letter(SPI_tuptable);
	outbox_close(&outbox);

	if (dead)
		PG_RETURN_NULL();
	PG_RETURN_TIMESTAMPTZ(available_at);
}

/* ----------------------------------------------------------------
 *		Dead letters
 * ----------------------------------------------------------------
 */

/*
 * Publish a dead letter, which is locked, again.  It gets the next id, like
 * any message published now, under the same lock; so it comes last in its
 * group.
 */
static void
revive(int64 id, text *topic, text *group)
{
	Datum		values[2];

	if (group != NULL)
		lock_group(topic, group);
	values[0] = Int64GetDatum(id);
	values[1] = TimestampTzGetDatum(GetCurrentTimestamp());
	run(REVIVE_MESSAGE, values, NULL);
	wake_relays(topic);
}

/*
 * idem_outbox_redrive(topic, id, max) returns bigint
 */
Datum
idem_outbox_redrive(PG_FUNCTION_ARGS)
{
	Outbox		outbox;
	Datum		values[3];
	char		nulls[4] = "   ";
	SPITupleTable *rows;
	uint64		n;

	PreventCommandIfReadOnly("idem_outbox_redrive()");

	values[0] = PG_ARGISNULL(0) ? (Datum) 0 :
		PointerGetDatum(idem_arg_name(fcinfo, 0, "topic"));
	nulls[0] = PG_ARGISNULL(0) ? 'n' : ' ';
	values[1] = PG_ARGISNULL(1) ? (Datum) 0 : PG_GETARG_DATUM(1);
	nulls[1] = PG_ARGISNULL(1) ? 'n' : ' ';
	values[2] = Int64GetDatum(arg_max(fcinfo, 2));

	outbox_open(&outbox);
	n = run(PICK_DEAD, values, nulls);
	rows = SPI_tuptable;
	for (uint64 i = 0; i < n; i++)
	{
		CHECK_FOR_INTERRUPTS();
		revive(returned_int8(rows, i, 1), returned_text(rows, i, 2),
			   returned_text(rows, i, 3));
	}
	outbox_close(&outbox);
	PG_RETURN_INT64(n);
}

/* ----------------------------------------------------------------
 *		Purge, for the sweep (expire.c), which has become the owner
 * ----------------------------------------------------------------
 */

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
							   " RETURNING topic, message_id::text, attempt",
							   removal->table);

	if (SPI_execute_with_args(sql, 1, &type, &value, NULL, false, 0) !=
		SPI_OK_DELETE_RETURNING)
		elog(ERROR, "could not remove a dead letter: %s",
			 SPI_result_code_string(SPI_result));
	pfree(sql);
	if (SPI_processed > 0)
		ereport(LOG,
				(errmsg("removed dead letter %s of topic \"%s\"",
						text_to_cstring(returned_text(SPI_tuptable, 0, 2)),
						text_to_cstring(returned_text(SPI_tuptable, 0, 1))),
				 errdetail("It was tried %d times; pg_idem.outbox_dead_ttl is over.",
						   returned_int4(SPI_tuptable, 0, 3))));
	SPI_freetuptable(SPI_tuptable);
}

/*
 * Remove dead letters that died before a time, by their ids, those behind
 * *last, "size" at the most.  One that cannot go, such as one that a foreign
 * key refers to, is counted in *failed and passed over.  Returns whether there
 * may be more.  Needs a connection to SPI, and a table that idem_is_outbox().
 */
bool
idem_outbox_purge(const char *table, TimestampTz before, int64 *last,
				  int size, int64 *failed)
{
	Oid			types[3] = {TIMESTAMPTZOID, INT8OID, INT4OID};
	Datum		values[3];
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
		Removal		removal = {table, returned_int8(rows, i, 1)};
		ErrorData  *error = NULL;

		CHECK_FOR_INTERRUPTS();
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
