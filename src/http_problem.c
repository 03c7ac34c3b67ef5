/*-------------------------------------------------------------------------
 *
 * http_problem.c
 *	  What to tell a client that is neither served nor replayed:
 *	  idem_problem() for a claim, idem_request_problem() for a request that
 *	  makes none.  Both return a problem details object (RFC 9457).
 *
 * Titles are those of draft-ietf-httpapi-idempotency-key-header, where it
 * has one.
 *
 * A problem's type is what a client is to tell it by; the status cannot do
 * it, as two are 409.  It has to be a URI that is nobody else's, and must
 * never change.  "about:blank" would say no more than the status, and goes
 * with a title that is the status's own phrase.  A name of pg_idem's own under
 * "urn:" needs a registered namespace, and an "https:" or "tag:" URI a domain
 * of the project.  UUIDs under "urn:uuid:" (RFC 9562) are free to take; these
 * were made at random, once.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/pg_type.h"
#include "executor/executor.h"
#include "executor/spi.h"
#include "utils/builtins.h"
#include "utils/jsonb.h"
#include "utils/numeric.h"
#include "utils/typcache.h"

#include "compat.h"
#include "timespan.h"

PG_FUNCTION_INFO_V1(idem_problem);
PG_FUNCTION_INFO_V1(idem_request_problem);

typedef struct Problem
{
	const char *reason;			/* the outcome of a claim, or another */
	int			status;
	const char *type;
	const char *title;
	const char *detail;
} Problem;

static const Problem request_problems[] = {
	{"key_missing", 400, "urn:uuid:375fa46b-c78f-4497-9118-04ed8bd12a0d",
		"Idempotency-Key is missing",
	"This operation needs an Idempotency-Key header: a key of your own for each request, the same each time that it is sent."},
	{"key_malformed", 400, "urn:uuid:935d6831-d33c-49ba-9109-af9b7d8b36d1",
		"Idempotency-Key is malformed",
	"The Idempotency-Key header must be a string in double quotes, or the same without quotes, of 1 to 255 bytes."},
	{"request_invalid", 400, "urn:uuid:0ee972c0-705d-45a5-8c17-bcef022c950d",
		"The request is invalid",
	"The request has not been processed. Sent again unchanged, it will not be either."}
};

/* what a claim is told that is none */
#define KEY_IS_MISSING	(&request_problems[0])

static const Problem problems[] = {
	{"in_progress", 409, "urn:uuid:d4db2c32-1e95-498f-b3c0-2e5bd39439a3",
		"A request is outstanding for this Idempotency-Key",
	"A request with this key is still being processed. Send it again later, with the same key."},
	{"mismatch", 422, "urn:uuid:f5f3b629-e0b0-4bcd-b54e-ad8e13c3780a",
		"Idempotency-Key is already used",
	"This key was first sent with another request. A new request needs a new key."},
	{"expired", 410, "urn:uuid:990d572c-a42b-4764-98b2-7777d46ac0e8",
		"The response for this Idempotency-Key is gone",
	"The request has been processed, but its response is no longer stored. Sent with a new key, it would be processed a second time."},
	{"expired", 412, "urn:uuid:de15037c-7455-436c-8908-139391aab11e",
		"Idempotency-Key is too old",
	"The request was first sent longer ago than its key is remembered, so it cannot be told whether it has been processed."},
	{"unknown", 409, "urn:uuid:dfcbfcfd-682c-4bc4-99bc-bfa40650fcce",
		"The outcome for this Idempotency-Key is unknown",
	"An attempt to process the request ended without a result, and may have taken effect. Sent with a new key, it could be processed a second time."},
	{"throttled", 429, "urn:uuid:88e0a221-b6c2-4508-a5e7-dd25e59e704a",
		"Too many retries",
	"Too many requests are being retried just now. Send it again later, with the same key."}
};

/* Outcomes that are answered with the work's own result */
static const char *const no_problem[] = {"started", "resumed", "replayed"};

/*
 * The problem that a claim of this outcome and status is; NULL if it is none.
 */
static const Problem *
find_problem(const char *outcome, int status)
{
	for (int i = 0; i < lengthof(no_problem); i++)
	{
		if (strcmp(no_problem[i], outcome) == 0)
			return NULL;
	}
	for (int i = 0; i < lengthof(problems); i++)
	{
		if (strcmp(problems[i].reason, outcome) == 0 &&
			problems[i].status == status)
			return &problems[i];
	}
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("there is no claim of outcome \"%s\" with status %d",
					outcome, status)));
	return NULL;				/* keep the compiler quiet */
}

static void
add_member(JsonbInState *state, const char *name, JsonbValue *value)
{
	JsonbValue	key;

	key.type = jbvString;
	key.val.string.val = unconstify(char *, name);
	key.val.string.len = strlen(name);
	idem_push_jsonb_value(state, WJB_KEY, &key);
	idem_push_jsonb_value(state, WJB_VALUE, value);
}

static void
add_string(JsonbInState *state, const char *name, const char *string)
{
	JsonbValue	value;

	value.type = jbvString;
	value.val.string.val = unconstify(char *, string);
	value.val.string.len = strlen(string);
	add_member(state, name, &value);
}

static void
add_number(JsonbInState *state, const char *name, int64 number)
{
	JsonbValue	value;

	value.type = jbvNumeric;
	value.val.numeric = int64_to_numeric(number);
	add_member(state, name, &value);
}

/*
 * The problem as JSON.  detail is NULL for the problem's own, and retry_after
 * where there is nothing to tell.
 */
static Jsonb *
form_problem(const Problem *problem, const char *detail,
			 const Interval *retry_after)
{
	JsonbInState state = {0};

	idem_push_jsonb_value(&state, WJB_BEGIN_OBJECT, NULL);
	add_string(&state, "type", problem->type);
	add_string(&state, "title", problem->title);
	add_number(&state, "status", problem->status);
	add_string(&state, "detail", detail != NULL ? detail : problem->detail);
	if (retry_after != NULL)
		add_number(&state, "retry_after", idem_interval_seconds(retry_after));
	idem_push_jsonb_value(&state, WJB_END_OBJECT, NULL);
	return JsonbValueToJsonb(state.result);
}

/*
 * A column of a claim, whose type is looked at too: the library may be of
 * another version than the extension's types.
 */
static Datum
claim_column(HeapTupleHeader claim, const char *name, Oid type, bool *isnull)
{
	TupleDesc	desc = lookup_rowtype_tupdesc(HeapTupleHeaderGetTypeId(claim),
											  HeapTupleHeaderGetTypMod(claim));
	Oid			found = SPI_gettypeid(desc, SPI_fnumber(desc, name));

	ReleaseTupleDesc(desc);
	if (found != type)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("type idem_claim is not the one that this version of the pg_idem library works with"),
				 errhint("Run ALTER EXTENSION pg_idem UPDATE, or install the library of the extension's version.")));
	return GetAttributeByName(claim, name, isnull);
}

/*
 * idem_problem(claim idem_claim) returns jsonb
 *
 * NULL for a claim that is answered with a result, be it a new or a stored
 * one.  No claim (NULL, or a row without an outcome, as variables of a row
 * type may be) stands for a request without a key.
 */
Datum
idem_problem(PG_FUNCTION_ARGS)
{
	HeapTupleHeader claim;
	const Problem *problem;
	Interval   *retry_after;
	Datum		value;
	int			status;
	char	   *outcome;
	bool		isnull;

	if (PG_ARGISNULL(0))
		PG_RETURN_JSONB_P(form_problem(KEY_IS_MISSING, NULL, NULL));

	claim = PG_GETARG_HEAPTUPLEHEADER(0);
	value = claim_column(claim, "outcome", TEXTOID, &isnull);
	if (isnull)
		PG_RETURN_JSONB_P(form_problem(KEY_IS_MISSING, NULL, NULL));
	outcome = TextDatumGetCString(value);
	value = claim_column(claim, "status", INT4OID, &isnull);
	status = isnull ? 0 : DatumGetInt32(value);
	problem = find_problem(outcome, status);
	if (problem == NULL)
		PG_RETURN_NULL();

	value = claim_column(claim, "retry_after", INTERVALOID, &isnull);
	retry_after = isnull ? NULL : DatumGetIntervalP(value);
	if (retry_after != NULL && INTERVAL_NOT_FINITE(retry_after))
		retry_after = NULL;
	PG_RETURN_JSONB_P(form_problem(problem, NULL, retry_after));
}

/*
 * idem_request_problem(reason text, detail text) returns jsonb
 */
Datum
idem_request_problem(PG_FUNCTION_ARGS)
{
	char	   *reason;
	char	   *detail;

	if (PG_ARGISNULL(0))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("reason must not be null")));
	reason = text_to_cstring(PG_GETARG_TEXT_PP(0));
	detail = PG_ARGISNULL(1) ? NULL : text_to_cstring(PG_GETARG_TEXT_PP(1));

	for (int i = 0; i < lengthof(request_problems); i++)
	{
		if (strcmp(request_problems[i].reason, reason) == 0)
			PG_RETURN_JSONB_P(form_problem(&request_problems[i], detail, NULL));
	}
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("there is no problem \"%s\" of a request", reason),
			 errhint("Reasons are \"key_missing\", \"key_malformed\" and \"request_invalid\".")));
	return (Datum) 0;			/* keep the compiler quiet */
}
