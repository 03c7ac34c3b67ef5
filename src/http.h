/*-------------------------------------------------------------------------
 *
 * http.h
 *	  Headers and bodies of HTTP.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#ifndef PG_IDEM_HTTP_H
#define PG_IDEM_HTTP_H

#include "utils/guc.h"
#include "utils/jsonb.h"

/* Characters of a token, such as the name of a header (RFC 9110, "tchar") */
#define IDEM_LOWER			"abcdefghijklmnopqrstuvwxyz"
#define IDEM_UPPER			"ABCDEFGHIJKLMNOPQRSTUVWXYZ"
#define IDEM_DIGITS			"0123456789"
#define IDEM_TOKEN_CHARS	IDEM_LOWER IDEM_UPPER IDEM_DIGITS "!#$%&'*+-.^_`|~"

extern Jsonb *idem_headers_to_keep(Jsonb *headers);
extern bool idem_check_replay_headers(char **newval, void **extra,
									  GucSource source);

/* http_date.c */

extern bool idem_parse_retry_after(char *s, int64 *usecs);

#endif							/* PG_IDEM_HTTP_H */
