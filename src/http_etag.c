/*-------------------------------------------------------------------------
 *
 * http_etag.c
 *	  Entity tags (RFC 9110): idem_etag() makes one of a row, and
 *	  idem_if_match() holds an If-Match header against one.
 *
 * A tag is the start of a SHA-256 over the value as it is in memory, so each
 * change of it shows, be it one that "=" would not see, such as 1.0 and 1.00.
 * Two other forms of a value would not do.  Its text depends on the session's
 * settings, and so does what the types' send functions make (they convert to
 * the client's encoding; some types have none; and others may be anybody's
 * code).
 *
 * What may differ between two copies of one value does not go into the
 * digest.  So rows and arrays are taken apart, down to values of other types:
 * those hold how their parts are stored, or numbers that a session gives to
 * the types of its anonymous rows.  Compressed and out-of-line values are
 * fetched, and dropped columns are passed over.  (Ranges are not taken apart:
 * one of rows keeps what its bounds were made of.)
 *
 * In memory an enum, a regclass and the like are OIDs.  So a restored dump,
 * or a logical replica, may have other tags than the original.  That fails
 * on the safe side: the client has to read again.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/tupmacs.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/datum.h"
#include "utils/lsyscache.h"
#include "utils/typcache.h"

#include "http.h"
#include "hash.h"

PG_FUNCTION_INFO_V1(idem_etag);
PG_FUNCTION_INFO_V1(idem_if_match);

/* How much of the digest makes a tag */
#define ETAG_BYTES	16

/* Optional white space, as headers have it */
#define OWS			" \t"

static void add_value(pg_cryptohash_ctx *ctx, Oid type, Datum value,
					  bool isnull);

/* ----------------------------------------------------------------
 *		Making a tag
 *
 * Each value goes into the digest so that its end can be told: behind its
 * length, or between brackets.  So no two values feed the same bytes.
 * ----------------------------------------------------------------
 */

static void
add_row(pg_cryptohash_ctx *ctx, Datum row)
{
	HeapTupleHeader header = DatumGetHeapTupleHeader(row);
	TupleDesc	desc = lookup_rowtype_tupdesc(HeapTupleHeaderGetTypeId(header),
											  HeapTupleHeaderGetTypMod(header));
	Datum	   *values = palloc(desc->natts * sizeof(Datum));
	bool	   *isnull = palloc(desc->natts * sizeof(bool));
	HeapTupleData tuple;

	memset(&tuple, 0, sizeof(tuple));
	tuple.t_len = HeapTupleHeaderGetDatumLength(header);
	ItemPointerSetInvalid(&tuple.t_self);
	tuple.t_data = header;
	heap_deform_tuple(&tuple, desc, values, isnull);

	idem_digest_add(ctx, "(", 1);
	for (int i = 0; i < desc->natts; i++)
	{
		Form_pg_attribute att = TupleDescAttr(desc, i);

		if (!att->attisdropped)
			add_value(ctx, att->atttypid, values[i], isnull[i]);
	}
	idem_digest_add(ctx, ")", 1);

	ReleaseTupleDesc(desc);
	pfree(values);
	pfree(isnull);
}

static void
add_array(pg_cryptohash_ctx *ctx, Datum datum)
{
	ArrayType  *array = DatumGetArrayTypeP(datum);
	Oid			element_type = ARR_ELEMTYPE(array);
	Size		bounds_size = ARR_NDIM(array) * sizeof(int);
	int16		typlen;
	bool		typbyval;
	char		typalign;
	Datum	   *values;
	bool	   *isnull;
	int			n;

	get_typlenbyvalalign(element_type, &typlen, &typbyval, &typalign);
	deconstruct_array(array, element_type, typlen, typbyval, typalign,
					  &values, &isnull, &n);

	idem_digest_add_tagged(ctx, '[', (char *) ARR_DIMS(array), bounds_size);
	idem_digest_add(ctx, ARR_LBOUND(array), bounds_size);
	for (int i = 0; i < n; i++)
	{
		CHECK_FOR_INTERRUPTS();
		add_value(ctx, element_type, values[i], isnull[i]);
	}
	idem_digest_add(ctx, "]", 1);

	pfree(values);
	pfree(isnull);
}

/* Neither a row nor an array: the bytes of the value */
static void
add_plain(pg_cryptohash_ctx *ctx, Oid type, Datum value)
{
	int16		typlen;
	bool		typbyval;

	get_typlenbyval(type, &typlen, &typbyval);
	if (typbyval)
	{
		Datum		bytes;

		store_att_byval(&bytes, value, typlen);
		idem_digest_add_tagged(ctx, 'v', (char *) &bytes, typlen);
	}
	else if (typlen == -1)
	{
		struct varlena *bytes = PG_DETOAST_DATUM_PACKED(value);

		idem_digest_add_tagged(ctx, 'v', VARDATA_ANY(bytes),
							   VARSIZE_ANY_EXHDR(bytes));
		if ((Pointer) bytes != DatumGetPointer(value))
			pfree(bytes);
	}
	else
		idem_digest_add_tagged(ctx, 'v', DatumGetPointer(value),
							   datumGetSize(value, typbyval, typlen));
}

static void
add_value(pg_cryptohash_ctx *ctx, Oid type, Datum value, bool isnull)
{
	check_stack_depth();

	if (isnull)
		idem_digest_add(ctx, "z", 1);
	else if (type_is_rowtype(type))
		add_row(ctx, value);
	else if (OidIsValid(get_base_element_type(type)))
		add_array(ctx, value);
	else
		add_plain(ctx, type, value);
}

/*
 * idem_etag(value anyelement) returns text
 *
 * STABLE, as what a row holds depends on the catalogs.
 */
Datum
idem_etag(PG_FUNCTION_ARGS)
{
	Oid			type = get_fn_expr_argtype(fcinfo->flinfo, 0);
	pg_cryptohash_ctx *ctx;
	bytea	   *digest;
	char		tag[1 + 2 * ETAG_BYTES + 1];

	if (!OidIsValid(type))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("could not determine input data type")));

	ctx = idem_digest_begin();
	add_value(ctx, type, PG_GETARG_DATUM(0), false);
	digest = idem_digest_end(ctx);

	tag[0] = '"';
	(void) hex_encode(VARDATA(digest), ETAG_BYTES, tag + 1);
	tag[sizeof(tag) - 1] = '"';
	PG_RETURN_TEXT_P(cstring_to_text_with_len(tag, sizeof(tag)));
}

/* ----------------------------------------------------------------
 *		If-Match
 * ----------------------------------------------------------------
 */

typedef struct EntityTag
{
	bool		weak;
	const char *opaque;			/* what is between the quotes */
	size_t		len;
} EntityTag;

/* May c be between the quotes (RFC 9110, "etagc")? */
static bool
is_etag_char(unsigned char c)
{
	return c > ' ' && c != '"' && c != 0x7F;
}

/*
 * Read the entity tag at *next and move that behind it.  Returns false if
 * there is none.
 */
static bool
parse_entity_tag(const char **next, EntityTag *tag)
{
	const char *p = *next;

	tag->weak = (strncmp(p, "W/", 2) == 0);
	if (tag->weak)
		p += 2;
	if (*p != '"')
		return false;

	tag->opaque = ++p;
	while (is_etag_char(*p))
		p++;
	tag->len = p - tag->opaque;
	if (*p != '"')
		return false;
	*next = p + 1;
	return true;
}

/* The comparison of If-Match: a weak tag equals none. */
static bool
match_strongly(const EntityTag *a, const EntityTag *b)
{
	return !a->weak && !b->weak && a->len == b->len &&
		memcmp(a->opaque, b->opaque, a->len) == 0;
}

static void
malformed(const char *header, const char *next, const char *what)
{
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("malformed If-Match header"),
			 errdetail("%s at byte %d.", what, (int) (next - header) + 1),
			 errhint("Send * or entity tags, each in double quotes, with commas between them.")));
}

/*
 * Is the tag, NULL for none, in the list of tags that a header is?  The list
 * is read to its end in any case.  Elements may be empty, and so may it all.
 */
static bool
list_has_tag(const char *header, const EntityTag *tag)
{
	const char *next = header;
	bool		found = false;
	EntityTag	listed;

	for (;;)
	{
		next += strspn(next, OWS ",");
		if (*next == '\0')
			return found;

		if (!parse_entity_tag(&next, &listed))
			malformed(header, next, "There is no entity tag");
		if (tag != NULL && match_strongly(tag, &listed))
			found = true;

		next += strspn(next, OWS);
		if (*next != ',' && *next != '\0')
			malformed(header, next, "There is something behind an entity tag");
	}
}

/*
 * idem_if_match(header text, etag text) returns bool
 *
 * May the request go on?  Without a header it may; without a tag, that is
 * without a resource, it may not.
 */
Datum
idem_if_match(PG_FUNCTION_ARGS)
{
	const char *header;
	const char *next;
	EntityTag	current;

	if (PG_ARGISNULL(0))
		PG_RETURN_BOOL(true);
	header = text_to_cstring(PG_GETARG_TEXT_PP(0));

	next = header + strspn(header, OWS);
	if (*next == '*' && next[1 + strspn(next + 1, OWS)] == '\0')
		PG_RETURN_BOOL(!PG_ARGISNULL(1));

	if (PG_ARGISNULL(1))
		PG_RETURN_BOOL(list_has_tag(header, NULL));

	next = text_to_cstring(PG_GETARG_TEXT_PP(1));
	if (!parse_entity_tag(&next, &current) || *next != '\0')
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("etag is not an entity tag"),
				 errhint("Pass idem_etag(value), or a tag of your own in double quotes.")));
	PG_RETURN_BOOL(list_has_tag(header, &current));
}
