/*-------------------------------------------------------------------------
 *
 * hash.c
 *	  Request fingerprints, idem_hash() and its kin, and keys for
 *	  calls downstream, idem_child_key(); all by SHA-256.
 *
 * text and bytea are hashed as they are, so a client can compute the same
 * value.  jsonb is hashed by value: two documents that jsonb calls equal have
 * one fingerprint, whatever their white space, the order of their keys or
 * the trailing zeros of their numbers (jsonb calls 1 and 1.0 equal, while it
 * prints them differently).  For that the document is walked, and each token
 * goes into the digest behind a tag and, where its length varies, behind its
 * length in network byte order, so no two documents feed the same bytes.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "common/sha2.h"
#include "port/pg_bswap.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/numeric.h"
#include "utils/uuid.h"

#include "hash.h"
#include "args.h"

PG_FUNCTION_INFO_V1(idem_hash_bytes);
PG_FUNCTION_INFO_V1(idem_hash_jsonb);
PG_FUNCTION_INFO_V1(idem_child_key);

/*
 * The digest in progress.  A cryptohash context may hold resources of
 * OpenSSL; the server's resource owner frees them if an error is thrown.
 */
pg_cryptohash_ctx *
idem_digest_begin(void)
{
	pg_cryptohash_ctx *ctx = pg_cryptohash_create(PG_SHA256);

	if (ctx == NULL || pg_cryptohash_init(ctx) < 0)
		ereport(ERROR,
				(errcode(ERRCODE_OUT_OF_MEMORY),
				 errmsg("could not start a SHA-256 digest: %s",
						pg_cryptohash_error(ctx))));
	return ctx;
}

void
idem_digest_add(pg_cryptohash_ctx *ctx, const void *data, size_t len)
{
	if (pg_cryptohash_update(ctx, data, len) < 0)
		ereport(ERROR,
				(errcode(ERRCODE_SYSTEM_ERROR),
				 errmsg("could not compute a SHA-256 digest: %s",
						pg_cryptohash_error(ctx))));
}

bytea *
idem_digest_end(pg_cryptohash_ctx *ctx)
{
	bytea	   *result = palloc(VARHDRSZ + PG_SHA256_DIGEST_LENGTH);

	SET_VARSIZE(result, VARHDRSZ + PG_SHA256_DIGEST_LENGTH);
	if (pg_cryptohash_final(ctx, (uint8 *) VARDATA(result),
							PG_SHA256_DIGEST_LENGTH) < 0)
		ereport(ERROR,
				(errcode(ERRCODE_SYSTEM_ERROR),
				 errmsg("could not compute a SHA-256 digest: %s",
						pg_cryptohash_error(ctx))));
	pg_cryptohash_free(ctx);
	return result;
}

/* A tag, the length of what follows, and the bytes */
void
idem_digest_add_tagged(pg_cryptohash_ctx *ctx, char tag,
					   const char *data, size_t len)
{
	char		head[1 + sizeof(uint32)];
	uint32		netlen = pg_hton32((uint32) len);

	head[0] = tag;
	memcpy(head + 1, &netlen, sizeof(netlen));
	idem_digest_add(ctx, head, sizeof(head));
	idem_digest_add(ctx, data, len);
}

static void
digest_add_number(pg_cryptohash_ctx *ctx, Numeric number)
{
	Datum		trimmed = DirectFunctionCall1(numeric_trim_scale,
											  NumericGetDatum(number));
	char	   *digits = DatumGetCString(DirectFunctionCall1(numeric_out,
															 trimmed));

	idem_digest_add_tagged(ctx, 'n', digits, strlen(digits));
	pfree(digits);
	pfree(DatumGetPointer(trimmed));
}

static void
digest_add_scalar(pg_cryptohash_ctx *ctx, const JsonbValue *value)
{
	switch (value->type)
	{
		case jbvNull:
			idem_digest_add(ctx, "z", 1);
			break;
		case jbvBool:
			idem_digest_add(ctx, value->val.boolean ? "t" : "f", 1);
			break;
		case jbvString:
			idem_digest_add_tagged(ctx, 's', value->val.string.val,
								   value->val.string.len);
			break;
		case jbvNumeric:
			digest_add_number(ctx, value->val.numeric);
			break;
		default:
			elog(ERROR, "unexpected jsonb value type %d", (int) value->type);
	}
}

/*
 * idem_hash_text(text) and idem_hash_bytes(bytea): SHA-256 of the bytes
 */
Datum
idem_hash_bytes(PG_FUNCTION_ARGS)
{
	bytea	   *data = PG_GETARG_BYTEA_PP(0);
	pg_cryptohash_ctx *ctx = idem_digest_begin();

	idem_digest_add(ctx, VARDATA_ANY(data), VARSIZE_ANY_EXHDR(data));
	PG_RETURN_BYTEA_P(idem_digest_end(ctx));
}

/* SHA-256 of a document's value */
bytea *
idem_hash_of_jsonb(Jsonb *jb)
{
	pg_cryptohash_ctx *ctx = idem_digest_begin();
	JsonbIterator *it = JsonbIteratorInit(&jb->root);
	JsonbValue	value;
	JsonbIteratorToken token;
	bool		scalar = JB_ROOT_IS_SCALAR(jb);

	while ((token = JsonbIteratorNext(&it, &value, false)) != WJB_DONE)
	{
		switch (token)
		{
			case WJB_BEGIN_ARRAY:
				/* a lone scalar is wrapped in an array that is not there */
				if (!scalar)
					idem_digest_add(ctx, "[", 1);
				break;
			case WJB_END_ARRAY:
				if (!scalar)
					idem_digest_add(ctx, "]", 1);
				break;
			case WJB_BEGIN_OBJECT:
				idem_digest_add(ctx, "{", 1);
				break;
			case WJB_END_OBJECT:
				idem_digest_add(ctx, "}", 1);
				break;
			case WJB_KEY:
			case WJB_ELEM:
			case WJB_VALUE:
				digest_add_scalar(ctx, &value);
				break;
			default:
				elog(ERROR, "unexpected jsonb token %d", (int) token);
		}
	}
	return idem_digest_end(ctx);
}

/*
 * idem_hash(request jsonb) returns bytea
 */
Datum
idem_hash_jsonb(PG_FUNCTION_ARGS)
{
	PG_RETURN_BYTEA_P(idem_hash_of_jsonb(PG_GETARG_JSONB_P(0)));
}

/*
 * idem_child_key(key, step, route, tenant) returns uuid
 *
 * A key for a call that this request makes downstream: the same on every
 * attempt, another one for each step.  A UUID of version 8 (RFC 9562), made
 * of the first bytes of a digest over all four names.
 */
Datum
idem_child_key(PG_FUNCTION_ARGS)
{
	text	   *names[4];
	pg_cryptohash_ctx *ctx;
	bytea	   *digest;
	pg_uuid_t  *uuid = palloc(sizeof(pg_uuid_t));

	names[0] = idem_arg_name(fcinfo, 0, "key");
	names[1] = idem_arg_name(fcinfo, 1, "step");
	names[2] = idem_arg_name(fcinfo, 2, "route");
	names[3] = idem_arg_tenant(fcinfo, 3);

	ctx = idem_digest_begin();
	for (int i = 0; i < lengthof(names); i++)
		idem_digest_add_tagged(ctx, 's', VARDATA_ANY(names[i]),
							   VARSIZE_ANY_EXHDR(names[i]));
	digest = idem_digest_end(ctx);

	memcpy(uuid->data, VARDATA(digest), UUID_LEN);
	uuid->data[6] = (uuid->data[6] & 0x0F) | 0x80;	/* version 8 */
	uuid->data[8] = (uuid->data[8] & 0x3F) | 0x80;	/* variant of RFC 9562 */
	PG_RETURN_UUID_P(uuid);
}
