/*-------------------------------------------------------------------------
 *
 * http_headers.c
 *	  The HTTP side of a stored result: which headers are kept.
 *
 * Only headers on the list pg_idem.replay_headers are stored and replayed.
 * Some are never stored, listed or not: credentials (a replay may go to
 * another client of the same tenant), hop-by-hop headers (they describe one
 * connection) and Date (it describes one answer).
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "utils/guc.h"

#include "http.h"
#include "pg_idem.h"

static const char *const never_kept =
	"authentication-info, authorization, connection, cookie, date, "
	"keep-alive, proxy-authenticate, proxy-authentication-info, "
	"proxy-authorization, proxy-connection, set-cookie, set-cookie2, te, "
	"trailer, transfer-encoding, upgrade, www-authenticate";

/*
 * Take the next name off a comma-separated list.  Returns its start and
 * length and moves *list behind it; NULL at the end of the list.
 */
static const char *
next_name(const char **list, size_t *len)
{
	const char *const separators = ", \t\r\n";
	const char *start = *list + strspn(*list, separators);

	*len = strcspn(start, separators);
	*list = start + *len;
	return *len > 0 ? start : NULL;
}

/* Is a header of this name, in any case, on the list? */
static bool
is_listed(const char *list, const char *name, size_t namelen)
{
	const char *entry;
	size_t		len;

	while ((entry = next_name(&list, &len)) != NULL)
	{
		if (len == namelen && pg_strncasecmp(entry, name, len) == 0)
			return true;
	}
	return false;
}

/* GUC check hook of pg_idem.replay_headers */
bool
idem_check_replay_headers(char **newval, void **extra, GucSource source)
{
	const char *list = *newval;
	const char *entry;
	size_t		len;

	while ((entry = next_name(&list, &len)) != NULL)
	{
		if (strspn(entry, IDEM_TOKEN_CHARS) < len)
		{
			GUC_check_errdetail("\"%.*s\" is not the name of a header.",
								(int) len, entry);
			return false;
		}
	}
	return true;
}

/*
 * The headers of a result that may be stored: a JSON object in, an object
 * with fewer members out.  Anything but an object is an error.
 */
Jsonb *
idem_headers_to_keep(Jsonb *headers)
{
	JsonbInState state = {0};
	JsonbIterator *it;
	JsonbValue	value;
	JsonbIteratorToken token;
	bool		keep = true;

	if (!JB_ROOT_IS_OBJECT(headers))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("headers must be a JSON object")));

	it = JsonbIteratorInit(&headers->root);

	/* the values are taken whole, so only the outer object is walked */
	while ((token = JsonbIteratorNext(&it, &value, true)) != WJB_DONE)
	{
		if (token == WJB_KEY)
		{
			const char *name = value.val.string.val;
			size_t		len = value.val.string.len;

			keep = is_listed(idem_replay_headers, name, len) &&
				!is_listed(never_kept, name, len);
		}
		if (keep || token == WJB_END_OBJECT)
			idem_push_jsonb_value(&state, token,
								  token == WJB_BEGIN_OBJECT ||
								  token == WJB_END_OBJECT ? NULL : &value);
	}
	return JsonbValueToJsonb(state.result);
}
