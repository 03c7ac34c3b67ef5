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
 * In what order messages are taken is told in outbox_pick.c; what the table
 * is, and the statements on it, in outbox_table.c.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "commands/async.h"
#include "common/hashfn.h"
#include "executor/spi.h"
#include "funcapi.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "storage/lock.h"
#include "utils/builtins.h"
#include "utils/jsonb.h"
#include "utils/tuplestore.h"
#include "utils/uuid.h"

#include "outbox.h"
#include "after_commit.h"
#include "args.h"
#include "retry.h"
#include "row.h"
#include "timespan.h"

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

/* Wait before attempt n + 1: up to 1 s, 2 s, 4 s, ... , 5 min */
#define BACKOFF_BASE_USECS	USECS_PER_SEC
#define BACKOFF_CAP_USECS	(300 * USECS_PER_SEC)

/* Looks for messages by one take, in case a trigger revives what it buries */
#define MAX_ROUNDS			100

/* Most bytes of an error that are kept */
#define MAX_ERROR			1000

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
 * back, and keep others waiting until we have.  That two groups may share a
 * lock, by a freak of the hash, does no harm.
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
	SET_LOCKTAG_ADVISORY(tag, MyDatabaseId, (uint32) (hash >> 32),
						 (uint32) hash, GROUP_LOCK_KIND);
	(void) LockAcquire(&tag, ExclusiveLock, false, false);
}

/*
 * The order inside a group is that of the ids, so a new one must be the
 * highest.  A sequence that caches, or was set back, would break it.
 */
static void
check_order(text *topic, text *group, int64 id)
{
	Datum		values[3];

	values[0] = PointerGetDatum(topic);
	values[1] = PointerGetDatum(group);
	values[2] = Int64GetDatum(id);
	if (idem_outbox_run(IDEM_FIND_HIGHER_ID, values, NULL) > 0)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("ids of the outbox of pg_idem do not ascend"),
				 errdetail("A message of the same group that was published before has a higher id."),
				 errhint("Restore its sequence: INCREMENT 1, CACHE 1, NO CYCLE, and not set back.")));
}

/*
 * Refuse a message that a trigger has left without one of the columns that
 * its statement returns: no take would find it, and it would be lost without
 * a word.  Returns its id.
 */
static int64
check_inserted(pg_uuid_t *message_id)
{
	for (int column = 1; column <= SPI_tuptable->tupdesc->natts; column++)
		(void) idem_returned(SPI_tuptable, 0, column);
	*message_id = *DatumGetUUIDP(idem_returned(SPI_tuptable, 0, 2));
	return DatumGetInt64(idem_returned(SPI_tuptable, 0, 1));
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
	IdemOutbox	outbox;
	int64		id;
	Datum		values[8];
	char		nulls[9] = "        ";

	PreventCommandIfReadOnly("idem_publish()");

	topic = idem_arg_name(fcinfo, 0, "topic");
	group = PG_ARGISNULL(2) ? NULL : idem_arg_name(fcinfo, 2, "group_key");
	headers = arg_headers(fcinfo, 3);
	idem_arg_interval(fcinfo, 5, &delay);
	values[7] = Int32GetDatum(arg_max_attempts(fcinfo, 6));

	idem_outbox_open(&outbox);
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
	if (idem_outbox_run(IDEM_INSERT_MESSAGE, values, nulls) != 1)
		not_accepted("a message");
	id = check_inserted(message_id);
	if (group != NULL)
		check_order(topic, group, id);
	idem_outbox_close(&outbox);

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
	idem_log_after_commit(psprintf("message %s of topic \"%s\" is a dead letter",
								   idem_returned_string(rows, 0, 2),
								   idem_returned_string(rows, 0, 1)),
						  psprintf("It was tried %d times.",
								   DatumGetInt32(idem_returned(rows, 0, 3))));
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
	died = idem_outbox_run(IDEM_BURY_MESSAGE, values, NULL) > 0 &&
		DatumGetBool(idem_returned(SPI_tuptable, 0, 4));
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
		values[i] = idem_returned_or_null(rows, 0, column, &isnull[i]);
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
	n = idem_outbox_run(IDEM_TAKE_MESSAGE, values, NULL);
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
 * been taken, the next take begins with it.
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
		return IDEM_PASSED_OVER;
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
	IdemOutbox	outbox;

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
	idem_outbox_open(&outbox);
	call.enough = (call.max == 0);
	for (int round = 0; !call.enough && round < MAX_ROUNDS; round++)
	{
		call.buried = 0;
		idem_outbox_pick(outbox.rel, topic, call.now, consider, &call);

		/* the dead step aside, so there may be others in their place */
		if (call.buried == 0)
			break;
	}
	idem_outbox_close(&outbox);
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

/*
 * The fence: this message is not, or no longer, the caller's.  A transaction
 * that keeps its snapshot may not see what it has taken in another one.
 */
static void
refuse_answer(int64 id, int32 attempt)
{
	Datum		value = Int64GetDatum(id);
	bool		found = idem_outbox_run(IDEM_GET_ATTEMPT, &value, NULL) > 0;
	int32		current = found ? DatumGetInt32(idem_returned(SPI_tuptable, 0, 1)) : 0;

	if (IsolationUsesXactSnapshot() && current < attempt)
		ereport(ERROR,
				(errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
				 errmsg("could not serialize access due to concurrent update"),
				 errhint("Answer for messages in READ COMMITTED.")));
	if (found)
	{
		if (attempt == current)
			not_accepted("an answer");
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_STALE_CLAIM),
				 errmsg("claim on message %lld is stale", (long long) id),
				 errdetail("The caller has attempt %d; the current attempt is %d.",
						   attempt, current),
				 errhint("Only the relay that took the message last may answer for it; go on with the next.")));
	}
	ereport(ERROR,
			(errcode(ERRCODE_IDEM_NO_CLAIM),
			 errmsg("there is no message %lld in the outbox", (long long) id),
			 errdetail("It is done, or was published again under another id by idem_outbox_redrive()."),
			 errhint("Go on with the next message.")));
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
	IdemOutbox	outbox;
	Datum		values[2];

	PreventCommandIfReadOnly("idem_outbox_done()");
	arg_taken(fcinfo, values);

	idem_outbox_open(&outbox);
	if (idem_outbox_run(IDEM_DELETE_MESSAGE, values, NULL) == 0)
		refuse_answer(DatumGetInt64(values[0]), DatumGetInt32(values[1]));
	idem_outbox_close(&outbox);
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
	IdemOutbox	outbox;
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

	idem_outbox_open(&outbox);
	if (idem_outbox_run(IDEM_FAIL_MESSAGE, values, nulls) == 0)
		refuse_answer(DatumGetInt64(values[0]), DatumGetInt32(values[1]));
	dead = DatumGetBool(idem_returned(SPI_tuptable, 0, 4));

	/* the log has it already if it was given up for dead before */
	if (DatumGetBool(idem_returned(SPI_tuptable, 0, 5)))
		log_dead_letter(SPI_tuptable);
	idem_outbox_close(&outbox);

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
revive(int64 dead_id, text *topic, text *group)
{
	pg_uuid_t	message_id;
	int64		id;
	Datum		values[2];

	if (group != NULL)
		lock_group(topic, group);
	values[0] = Int64GetDatum(dead_id);
	values[1] = TimestampTzGetDatum(GetCurrentTimestamp());
	if (idem_outbox_run(IDEM_REVIVE_MESSAGE, values, NULL) != 1)
		not_accepted("a message");
	id = check_inserted(&message_id);
	if (group != NULL)
		check_order(topic, group, id);
	wake_relays(topic);
}

/*
 * idem_outbox_redrive(topic, id, max) returns bigint
 */
Datum
idem_outbox_redrive(PG_FUNCTION_ARGS)
{
	IdemOutbox	outbox;
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

	idem_outbox_open(&outbox);
	n = idem_outbox_run(IDEM_PICK_DEAD, values, nulls);
	rows = SPI_tuptable;
	for (uint64 i = 0; i < n; i++)
	{
		bool		has_no_group;
		Datum		group = idem_returned_or_null(rows, i, 3, &has_no_group);

		CHECK_FOR_INTERRUPTS();
		revive(DatumGetInt64(idem_returned(rows, i, 1)),
			   DatumGetTextPP(idem_returned(rows, i, 2)),
			   has_no_group ? NULL : DatumGetTextPP(group));
	}
	idem_outbox_close(&outbox);
	PG_RETURN_INT64(n);
}
