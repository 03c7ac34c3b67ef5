/*-------------------------------------------------------------------------
 *
 * fuzz.c
 *	  What the fuzzer (libFuzzer, part of clang) feeds its inputs to: the
 *	  parsers of src/, as they are, one a program (FUZZ names it).
 *
 * The sanitizers see reads and writes out of bounds and undefined behaviour.
 * What is looked at here is what a parser returns; its only SQLSTATE is 22023.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "utils/builtins.h"
#include "utils/datetime.h"
#include "utils/timestamp.h"

#include "args.h"
#include "http.h"
#include "timespan.h"
#include "shim.h"

extern Datum idem_parse_key(PG_FUNCTION_ARGS);
extern Datum idem_if_match(PG_FUNCTION_ARGS);

extern int	LLVMFuzzerTestOneInput(const uint8 *data, size_t size);

/* The rest of the input as a string, up to its first NUL */
static char *
rest_of(const uint8 *data, size_t size)
{
	size_t		len = strnlen((const char *) data, size);
	char	   *s = palloc(len + 1);

	memcpy(s, data, len);
	s[len] = '\0';
	return s;
}

/*
 * idem_parse_key: a key has 1 to 255 visible characters and blanks, and is
 * the same when it is sent as this says it, in quotes.
 */
static char *
parse_key(const char *header)
{
	Datum		key;

	return SHIM_TRY(key = shim_call(idem_parse_key, header, NULL)) ?
		TextDatumGetCString(key) : NULL;
}

static void
fuzz_key(const uint8 *data, size_t size)
{
	char	   *key = parse_key(rest_of(data, size));
	char		quoted[2 * IDEM_MAX_NAME + 3];
	char	   *q = quoted;
	char	   *again;

	if (key == NULL)
		return;
	shim_expect(strlen(key) >= 1 && strlen(key) <= IDEM_MAX_NAME, "length");

	*q++ = '"';
	for (char *c = key; *c != '\0'; c++)
	{
		shim_expect(*c >= ' ' && *c <= '~', "characters of a key");
		if (*c == '"' || *c == '\\')
			*q++ = '\\';
		*q++ = *c;
	}
	*q++ = '"';
	*q = '\0';

	again = parse_key(quoted);
	shim_expect(again != NULL && strcmp(again, key) == 0, "the same in quotes");
}

/*
 * idem_parse_retry_after: a date that is ahead is the same in each of the
 * three forms in which it can be written.  The first byte chooses the time
 * that it is.
 */
static void
expect_date(char *s, int64 usecs)
{
	int64		again;

	shim_expect(idem_parse_retry_after(s, &again) && again == usecs,
				"the same date in another form");
}

static void
fuzz_date(const uint8 *data, size_t size)
{
	static const int years[] = {100, 1850, 1999, 2000, 2026, 2050, 9950};
	struct pg_tm tm;
	fsec_t		fsec;
	int			this_year;
	int64		usecs = -1;
	char		s[64];

	if (size < 1)
		return;
	this_year = years[data[0] % lengthof(years)];
	memset(&tm, 0, sizeof(tm));
	tm.tm_year = this_year;
	tm.tm_mon = tm.tm_mday = 1;
	tm2timestamp(&tm, 0, NULL, &shim_now);

	if (!idem_parse_retry_after(rest_of(data + 1, size - 1), &usecs))
		return;
	shim_expect(usecs >= 0, "a wait is not negative");
	if (usecs == 0 || usecs > INT64CONST(400000000000000000) - shim_now)
		return;
	timestamp2tm(shim_now + usecs, NULL, &tm, &fsec, NULL, NULL);
	if (tm.tm_year > 9999)
		return;

	snprintf(s, sizeof(s), "\tSun, %02d %s %04d %02d:%02d:%02d GMT ",
			 tm.tm_mday, months[tm.tm_mon - 1], tm.tm_year, tm.tm_hour,
			 tm.tm_min, tm.tm_sec);
	expect_date(s, usecs);
	snprintf(s, sizeof(s), "Sun %s %2d %02d:%02d:%02d %04d",
			 months[tm.tm_mon - 1], tm.tm_mday, tm.tm_hour, tm.tm_min,
			 tm.tm_sec, tm.tm_year);
	expect_date(s, usecs);
	if (tm.tm_year > this_year + 50)
		return;
	snprintf(s, sizeof(s), "Sunday, %02d-%s-%02d %02d:%02d:%02d GMT",
			 tm.tm_mday, months[tm.tm_mon - 1], tm.tm_year % 100, tm.tm_hour,
			 tm.tm_min, tm.tm_sec);
	expect_date(s, usecs);
}

/*
 * idem_if_match, of a header and, behind a newline, a tag: one that matches is
 * in the header, and one that is put into a list matches.
 */
static bool
matches(const char *header, const char *tag, bool *result)
{
	return SHIM_TRY(*result = DatumGetBool(shim_call(idem_if_match, header,
													 tag)));
}

static void
fuzz_etag(const uint8 *data, size_t size)
{
	char	   *header = rest_of(data, size);
	char	   *tag = strchr(header, '\n');
	char	   *longer;
	bool		result;
	bool		strong;

	if (tag == NULL)
	{
		/* no resource: only a header that is none lets it pass */
		if (matches(header, NULL, &result))
			shim_expect(!result, "nothing matches what is not there");
		return;
	}
	*tag++ = '\0';
	if (!matches(header, tag, &result))
		return;
	if (result && strchr(header, '*') == NULL)
		shim_expect(strstr(header, tag) != NULL, "what matches is there");

	strong = (tag[0] == '"');
	if (header[strspn(header, " \t")] == '*')
		return;
	longer = palloc(strlen(header) + strlen(tag) + 3);
	sprintf(longer, "%s, %s", header, tag);
	shim_expect(matches(longer, tag, &result) && result == strong,
				"a strong tag in a list matches");
}

/*
 * The header filter, of a list and, behind a newline, a header's name: what is
 * kept is on the list, and a list that is refused has something odd in it.
 */
static void
fuzz_headers(const uint8 *data, size_t size)
{
	char	   *name = rest_of(data, size);
	char	   *list = strsep(&name, "\n");
	bool		valid = idem_check_replay_headers(&list, NULL, PGC_S_TEST);
	bool		listed = false;
	bool		odd = false;
	char	   *copy = rest_of((uint8 *) list, strlen(list));
	char	   *entry;
	uint32		object = JB_FOBJECT | 1;
	char	   *jsonb = palloc0(VARHDRSZ + sizeof(object));

	shim_header_name = name != NULL ? name : "";
	shim_header_len = strlen(shim_header_name);
	while ((entry = strsep(&copy, ", \t\r")) != NULL)
	{
		listed |= *entry != '\0' && strcasecmp(entry, shim_header_name) == 0;
		for (; *entry != '\0'; entry++)
			odd |= !isalnum((unsigned char) *entry) &&
				strchr("!#$%&'*+-.^_`|~", *entry) == NULL;
	}
	shim_expect(valid == !odd, "a list of names");

	idem_replay_headers = list;
	memcpy(jsonb + VARHDRSZ, &object, sizeof(object));
	(void) idem_headers_to_keep((Jsonb *) jsonb);
	shim_expect(!shim_header_kept || listed, "only what is listed");
	if (strcasecmp(shim_header_name, "set-cookie") == 0 ||
		strcasecmp(shim_header_name, "authorization") == 0)
		shim_expect(!shim_header_kept, "no credentials");
	else if (listed && strcasecmp(shim_header_name, "location") == 0)
		shim_expect(shim_header_kept, "what is listed");
}

/* Spans of time, of any interval and two numbers: nothing overflows. */
static void
fuzz_span(const uint8 *data, size_t size)
{
	int64		n[2];
	Interval	span;
	int64		usecs;

	if (size < sizeof(n) + sizeof(span))
		return;
	memcpy(n, data, sizeof(n));
	memcpy(&span, data + sizeof(n), sizeof(span));

	if (SHIM_TRY(usecs = idem_interval_usecs(&span, "span")))
		shim_expect(usecs >= 0, "a span is not negative");
	shim_expect(idem_interval_seconds(&span) >= 1, "at least a second");
	n[0] &= PG_INT64_MAX;
	n[1] &= PG_INT64_MAX;
	shim_expect(idem_add_usecs(n[0], n[1]) >= Max(n[0], n[1]), "sum");
	if (n[0] > 0 && n[1] > 0)
		shim_expect(idem_multiply_usecs(n[0], n[1]) >= Max(n[0], n[1]),
					"product");
}

int
LLVMFuzzerTestOneInput(const uint8 *data, size_t size)
{
	FUZZ(data, size);
	shim_free_all();
	return 0;
}
