/*-------------------------------------------------------------------------
 *
 * policy_result.c
 *	  What becomes of a result: is it kept, for how long, and does it fit?
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "policy.h"
#include "timespan.h"

/*
 * Is a result with this status kept for good ("completed")?  Otherwise the
 * attempt counts as failed, and a later request may run again.
 */
bool
idem_status_is_kept(IdemKeep keep, int status)
{
	if (keep == IDEM_KEEP_ALL)
		return true;
	if (status >= 200 && status < 400)
		return true;
	if (keep == IDEM_KEEP_SUCCESS)
		return false;

	switch (status)
	{
		case 401:				/* the credentials may be renewed */
		case 403:
		case 408:				/* nothing was decided */
		case 409:
		case 425:
		case 429:
			return false;
		default:
			return status >= 400 && status < 500;
	}
}

/*
 * Is a finished key's result gone, though the key is not: dropped, or never
 * stored for its size, or past the route's response_ttl, whether a sweep has
 * dropped it yet or not?  finished_at is DT_NOEND where it is not known.
 */
bool
idem_result_is_over(const IdemPolicy *policy, bool is_dropped,
					TimestampTz finished_at, TimestampTz now)
{
	if (is_dropped)
		return true;
	if (!policy->has_response_ttl || TIMESTAMP_IS_NOEND(finished_at))
		return false;
	return idem_time_after(finished_at, &policy->response_ttl,
						   "response_ttl") <= now;
}

/*
 * Is a result within pg_idem.max_response_size?  What counts are the bytes
 * that the values take, before compression.
 */
bool
idem_result_fits(const IdemResult *result)
{
	int64		size = 0;

	if (result->headers != NULL)
		size += VARSIZE_ANY_EXHDR(result->headers);
	if (result->response != NULL)
		size += VARSIZE_ANY_EXHDR(result->response);
	if (result->body != NULL)
		size += VARSIZE_ANY_EXHDR(result->body);
	return size <= idem_max_response_size;
}
