/*-------------------------------------------------------------------------
 *
 * claim_receive.c
 *	  The consumers' side: idem_receive, and idem_receive_batch.
 *
 * A message is a key, and the consumer is its route.  Nobody will ask for the
 * result of a message, so there is nothing to finish: its row is written
 * completed, once, and stays or goes with the transaction that does the work.
 *
 * A consumer acknowledges what is not new to it.  So "not new" is said only
 * of a message whose work has been committed, or is part of this transaction;
 * while another transaction has the message, it may yet roll back, and a
 * message acknowledged on the strength of it would be lost.  Then the answer
 * is to wait, and in the end an error, after which the message is delivered
 * again.
 *
 * The same holds for a claim of idem_begin under this key, in progress or
 * failed.  Its work is not done, so the message is not "not new"; nor is it
 * new, for the claim has attempts, perhaps a checkpoint, and an owner, of
 * which a consumer knows nothing.  Once it is completed, or expired, it is as
 * any message.
 *
 * A batch takes its messages in the order of their ids' bytes.  Two batches
 * with messages in common therefore never wait for each other, whatever order
 * they were given them in: the one that is ahead at the first message that
 * they share stays ahead.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/tuplestore.h"

#include "claim.h"
#include "args.h"
#include "registry.h"
#include "timespan.h"

PG_FUNCTION_INFO_V1(idem_receive);
PG_FUNCTION_INFO_V1(idem_receive_batch);

/* What a consumer asks for */
typedef struct Request
{
	IdemKey		message;		/* of a batch, the one at hand */
	Interval	ttl;
	TimestampTz deadline;		/* of the whole call */
} Request;

/* What a message is found to be */
typedef enum Verdict
{
	VERDICT_NEW,				/* nothing is known of it */
	VERDICT_EXPIRED,			/* new again, on its old row */
	VERDICT_RECEIVED,			/* not new */
	VERDICT_BUSY,				/* a running transaction has it */
	VERDICT_CLAIMED				/* idem_begin has it, and it is not completed */
} Verdict;

/* The messages of a batch */
typedef struct Batch
{
	int			n;
	Datum	   *ids;			/* as the caller has them */
	int		   *order;			/* numbers of the ids, by their bytes */
	bool	   *is_new;			/* by the number of the id */
} Batch;

/* ----------------------------------------------------------------
 *		One message
 * ----------------------------------------------------------------
 */

static Verdict
judge(IdemSighting seen, TupleTableSlot *row, TimestampTz now)
{
	switch (seen)
	{
		case IDEM_SEEN_NOTHING:
			return VERDICT_NEW;

		case IDEM_SEEN_ARRIVING:
		case IDEM_SEEN_LEAVING:
			return VERDICT_BUSY;

		case IDEM_SEEN_SETTLED:
			if (idem_row_is_gone(row, now))
				return VERDICT_EXPIRED;
			/* FALLTHROUGH */

		case IDEM_SEEN_OURS:
			/* within one transaction a message is never new twice */
			break;
	}
	return idem_row_state(row) == IDEM_COMPLETED ?
		VERDICT_RECEIVED : VERDICT_CLAIMED;
}

/* The row of a message, complete from the start */
static void
build_row(IdemStore *store, const Request *req, TimestampTz now)
{
	TupleTableSlot *next = idem_store_new_version(store, false);

	idem_set_column_or_null(next, Anum_key_key, req->message.key);
	idem_set_column_or_null(next, Anum_key_tenant, req->message.tenant);
	idem_set_column_or_null(next, Anum_key_route, req->message.route);
	idem_set_column(next, Anum_key_attempt, Int32GetDatum(1));
	idem_set_column(next, Anum_key_created_at, TimestampTzGetDatum(now));
	idem_set_column(next, Anum_key_expires_at,
					TimestampTzGetDatum(idem_time_after(now, &req->ttl, "ttl")));
	idem_set_column(next, Anum_key_state, idem_state_to_datum(IDEM_COMPLETED));
	idem_set_column(next, Anum_key_result_dropped, BoolGetDatum(false));
	idem_set_column(next, Anum_key_finished_at, TimestampTzGetDatum(now));
}

/*
 * Write the row of a new message.  IDEM_LOCKED says that it is ours,
 * IDEM_LOCK_CHANGED that somebody else was faster.
 */
static IdemLocked
take(IdemStore *store, const Request *req, Verdict verdict, TimestampTz now)
{
	IdemLocked	locked;

	if (verdict == VERDICT_NEW)
	{
		build_row(store, req, now);
		return idem_store_insert(store) ? IDEM_LOCKED : IDEM_LOCK_CHANGED;
	}

	locked = idem_store_lock(store, false);
	if (locked == IDEM_LOCKED)
	{
		build_row(store, req, now);
		idem_store_update(store);
	}
	return locked;
}

/* The message is neither new nor not new, and the time to wait is over. */
static void
refuse(const IdemKey *message, Verdict verdict)
{
	idem_count_outcome(message->route, IDEM_WAS_IN_PROGRESS, false);
	ereport(ERROR,
			(errcode(ERRCODE_LOCK_NOT_AVAILABLE),
			 errmsg("could not receive message \"%s\" of consumer \"%s\"",
					text_to_cstring(message->key),
					text_to_cstring(message->route)),
			 verdict == VERDICT_BUSY ?
			 errdetail("Another transaction has it, and may yet roll back.") :
			 errdetail("It is claimed by idem_begin(), and not completed."),
			 errhint("Do not acknowledge the message: roll back, and let it be delivered again.")));
}

/* Receive req->message.  False if it is not new. */
static bool
receive(IdemStore *store, const Request *req)
{
	int			wait_msecs = 1;
	int			rounds = 0;

	for (;;)
	{
		TimestampTz now = GetCurrentTimestamp();
		IdemSighting seen = idem_store_probe(store, &req->message);
		Verdict		verdict = judge(seen, store->row, now);

		switch (verdict)
		{
			case VERDICT_RECEIVED:
				idem_count_outcome(req->message.route, IDEM_REPLAYED, false);
				return false;

			case VERDICT_NEW:
			case VERDICT_EXPIRED:
				switch (take(store, req, verdict, now))
				{
					case IDEM_LOCKED:
						idem_count_outcome(req->message.route, IDEM_STARTED,
										   false);
						return true;
					case IDEM_LOCK_CHANGED:
						idem_store_look_again(store, &req->message, &rounds);
						continue;
					case IDEM_LOCK_BUSY:
						verdict = VERDICT_BUSY;
						break;
				}
				break;

			case VERDICT_BUSY:
			case VERDICT_CLAIMED:
				break;
		}

		/* what we have ourselves will not change while we wait */
		if (seen == IDEM_SEEN_OURS || now >= req->deadline)
			refuse(&req->message, verdict);
		idem_store_wait(store, &wait_msecs, now, req->deadline);
	}
}

/* What both functions are called with, but for the messages */
static void
arg_request(FunctionCallInfo fcinfo, Request *req)
{
	TimestampTz now = GetCurrentTimestamp();
	IdemPolicy	policy;

	req->message.route = idem_arg_name(fcinfo, 0, "consumer");
	req->message.tenant = idem_arg_tenant(fcinfo, 2);
	idem_policy_of_route(req->message.route, &policy);
	idem_arg_interval(fcinfo, 3, &policy.ttl);
	idem_arg_interval(fcinfo, 4, &policy.wait);

	/* bad even if it turns out that no row is written */
	(void) idem_time_after(now, &policy.ttl, "ttl");
	req->ttl = policy.ttl;
	req->deadline = idem_time_not_before(now, &policy.wait, "wait");
}

/*
 * idem_receive(consumer, message_id, tenant, ttl, wait, store)
 *		returns boolean
 */
Datum
idem_receive(PG_FUNCTION_ARGS)
{
	IdemStore	store;
	Request		req;
	bool		is_new;

	PreventCommandIfReadOnly("idem_receive()");

	arg_request(fcinfo, &req);
	req.message.key = idem_arg_name(fcinfo, 1, "message_id");

	idem_store_open(&store, idem_arg_store(fcinfo, 5), RowExclusiveLock);
	is_new = receive(&store, &req);
	idem_store_close(&store);
	PG_RETURN_BOOL(is_new);
}

/* ----------------------------------------------------------------
 *		A batch
 * ----------------------------------------------------------------
 */

/* For qsort_arg: by bytes, and of equal ids the first one first */
static int
compare_ids(const void *a, const void *b, void *arg)
{
	const Datum *ids = arg;
	int			i = *(const int *) a;
	int			j = *(const int *) b;
	text	   *x = DatumGetTextPP(ids[i]);
	text	   *y = DatumGetTextPP(ids[j]);
	int			xlen = VARSIZE_ANY_EXHDR(x);
	int			ylen = VARSIZE_ANY_EXHDR(y);
	int			result = memcmp(VARDATA_ANY(x), VARDATA_ANY(y),
								Min(xlen, ylen));

	if (result == 0)
		result = xlen - ylen;
	return result != 0 ? result : i - j;
}

/* The message_ids argument: checked, put in order, and none of them new yet */
static void
arg_batch(FunctionCallInfo fcinfo, int argno, Batch *batch)
{
	ArrayType  *array;
	bool	   *nulls;

	if (PG_ARGISNULL(argno))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("message_ids must not be null")));
	array = PG_GETARG_ARRAYTYPE_P(argno);
	if (ARR_NDIM(array) > 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("message_ids must have one dimension")));

	deconstruct_array(array, TEXTOID, -1, false, TYPALIGN_INT,
					  &batch->ids, &nulls, &batch->n);
	batch->order = palloc(batch->n * sizeof(int));
	for (int i = 0; i < batch->n; i++)
	{
		text	   *id;

		if (nulls[i])
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("message_ids must not contain nulls")));
		id = DatumGetTextPP(batch->ids[i]);
		idem_check_name(VARDATA_ANY(id), VARSIZE_ANY_EXHDR(id),
						"message_id", false);
		batch->ids[i] = PointerGetDatum(id);
		batch->order[i] = i;
		CHECK_FOR_INTERRUPTS();
	}
	qsort_arg(batch->order, batch->n, sizeof(int), compare_ids, batch->ids);
	batch->is_new = nulls;		/* all false */
}

/*
 * Receive the messages of a batch in their order.  Of equal ids, which follow
 * each other, the first one may be new, and the others are then received.
 */
static void
receive_batch(IdemStore *store, Request *req, Batch *batch)
{
	MemoryContext context = AllocSetContextCreate(CurrentMemoryContext,
												  "pg_idem message",
												  ALLOCSET_DEFAULT_SIZES);
	MemoryContext oldcontext = MemoryContextSwitchTo(context);

	for (int i = 0; i < batch->n; i++)
	{
		int			nth = batch->order[i];

		CHECK_FOR_INTERRUPTS();
		req->message.key = DatumGetTextPP(batch->ids[nth]);
		batch->is_new[nth] = receive(store, req);
		MemoryContextReset(context);
	}
	MemoryContextSwitchTo(oldcontext);
	MemoryContextDelete(context);
}

/*
 * idem_receive_batch(consumer, message_ids, tenant, ttl, wait, store)
 *		returns setof text
 *
 * The new ones, each where it comes first in message_ids.
 */
Datum
idem_receive_batch(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	IdemStore	store;
	Request		req;
	Batch		batch;

	PreventCommandIfReadOnly("idem_receive_batch()");

	InitMaterializedSRF(fcinfo, MAT_SRF_USE_EXPECTED_DESC);
	arg_request(fcinfo, &req);
	arg_batch(fcinfo, 1, &batch);

	idem_store_open(&store, idem_arg_store(fcinfo, 5), RowExclusiveLock);
	receive_batch(&store, &req, &batch);
	idem_store_close(&store);

	for (int i = 0; i < batch.n; i++)
	{
		bool		isnull = false;

		if (batch.is_new[i])
			tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc,
								 &batch.ids[i], &isnull);
	}
	return (Datum) 0;
}
