/*-------------------------------------------------------------------------
 *
 * http_key.c
 *	  The Idempotency-Key header: idem_parse_key().
 *
 * The header is a Structured Field (RFC 9651), an Item that is a String: the
 * key in double quotes, perhaps followed by parameters.  No parameter means
 * anything here, so they are only checked.
 *
 * Most clients send the key as it is, without quotes.  Such a bare key is
 * taken where it cannot be meant as anything else: it is made of the visible
 * ASCII characters but the four that Structured Fields give a meaning
 * within a value, " , ; \, and does not begin with one of ( : ? @, with which
 * values of other types begin.  Tokens and numbers are bare keys like any
 * other.  A bare key has no parameters: its client may not know of any, and
 * if they were left out "a;b" and "a;c" would be one key.
 *
 * Messages tell where the header is wrong, not what it holds.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "lib/stringinfo.h"
#include "mb/pg_wchar.h"
#include "utils/builtins.h"

#include "http.h"
#include "args.h"

PG_FUNCTION_INFO_V1(idem_parse_key);

#define BAD_PARAMETER	"There is a malformed parameter"

/* A header's value, and how far it has been read; NUL is its end */
typedef struct Header
{
	const char *start;
	const char *next;
} Header;

static void parse_string(Header *header, StringInfo value);

static void
malformed(const Header *header, const char *what)
{
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("malformed Idempotency-Key header"),
			 errdetail("%s at byte %d.", what,
					   (int) (header->next - header->start) + 1),
			 errhint("Send one key, in double quotes.")));
}

/* Read the character c, if it is the next one. */
static bool
take(Header *header, char c)
{
	if (*header->next != c)
		return false;
	header->next++;
	return true;
}

/* Is the next character one of these?  The end is none. */
static bool
next_is(const Header *header, const char *set)
{
	return *header->next != '\0' && strchr(set, *header->next) != NULL;
}

/* Read all that is made of these characters; returns how many there were. */
static size_t
skip(Header *header, const char *set)
{
	size_t		len = strspn(header->next, set);

	header->next += len;
	return len;
}

/* Read a character of a quoted string or a bare key: SP or visible ASCII */
static char
next_character(Header *header)
{
	char		c = *header->next;

	if (c == '\0')
		malformed(header, "A closing quote is missing");
	if (IS_HIGHBIT_SET(c))
		malformed(header, "There is a character outside of ASCII");
	if (c < 0x20 || c == 0x7F)
		malformed(header, "There is a control character");
	header->next++;
	return c;
}

/* ----------------------------------------------------------------
 *		Parameters
 * ----------------------------------------------------------------
 */

/*
 * An Integer of up to 15 digits, or a Decimal of up to 12 before the point
 * and up to 3 behind it
 */
static void
skip_number(Header *header, bool may_have_point)
{
	size_t		digits;

	(void) take(header, '-');
	digits = skip(header, IDEM_DIGITS);
	if (digits < 1 || digits > 15)
		malformed(header, BAD_PARAMETER);

	if (may_have_point && take(header, '.'))
	{
		size_t		decimals = skip(header, IDEM_DIGITS);

		if (digits > 12 || decimals < 1 || decimals > 3)
			malformed(header, BAD_PARAMETER);
	}
}

/* The two digits that stand for an octet in a Display String */
static char
parse_octet(Header *header)
{
	const char *const hex = "0123456789abcdef";
	int			octet = 0;

	for (int i = 0; i < 2; i++)
	{
		if (!next_is(header, hex))
			malformed(header, BAD_PARAMETER);
		octet = octet * 16 + (int) (strchr(hex, *header->next) - hex);
		header->next++;
	}
	return (char) octet;
}

/* A Display String, behind its %: UTF-8 in which any octet may be escaped */
static void
skip_display_string(Header *header)
{
	StringInfoData value;
	char		c;

	if (!take(header, '"'))
		malformed(header, BAD_PARAMETER);

	initStringInfo(&value);
	while ((c = next_character(header)) != '"')
	{
		if (c == '%')
			c = parse_octet(header);

		/* U+0000 is UTF-8 too, but not to the server */
		appendStringInfoChar(&value, c == '\0' ? ' ' : c);
	}
	if (pg_encoding_verifymbstr(PG_UTF8, value.data, value.len) != value.len)
		malformed(header, BAD_PARAMETER);
	pfree(value.data);
}

/* The value of a parameter, of whatever type its first character says */
static void
skip_value(Header *header)
{
	StringInfoData ignored;

	if (take(header, '"'))
	{
		initStringInfo(&ignored);
		parse_string(header, &ignored);
		pfree(ignored.data);
	}
	else if (take(header, '%'))
		skip_display_string(header);
	else if (take(header, '@'))
		skip_number(header, false);
	else if (take(header, '?'))
	{
		if (!take(header, '0') && !take(header, '1'))
			malformed(header, BAD_PARAMETER);
	}
	else if (take(header, ':'))
	{
		/* base64, with or without its padding; nobody wants the octets */
		(void) skip(header, IDEM_LOWER IDEM_UPPER IDEM_DIGITS "+/=");
		if (!take(header, ':'))
			malformed(header, BAD_PARAMETER);
	}
	else if (next_is(header, IDEM_LOWER IDEM_UPPER "*"))
		(void) skip(header, IDEM_TOKEN_CHARS ":/");
	else
		skip_number(header, true);
}

/* What may follow a String: ;name or ;name=value, any number of them */
static void
skip_parameters(Header *header)
{
	while (take(header, ';'))
	{
		(void) skip(header, " ");
		if (!next_is(header, IDEM_LOWER "*"))
			malformed(header, BAD_PARAMETER);
		(void) skip(header, IDEM_LOWER IDEM_DIGITS "_-.*");
		if (take(header, '='))
			skip_value(header);
	}
}

/* ----------------------------------------------------------------
 *		The key
 * ----------------------------------------------------------------
 */

/* A String, behind its opening quote: appends what it stands for to value. */
static void
parse_string(Header *header, StringInfo value)
{
	char		c;

	while ((c = next_character(header)) != '"')
	{
		if (c == '\\')
		{
			if (*header->next != '"' && *header->next != '\\')
				malformed(header, "There is an unknown escape");
			c = next_character(header);
		}
		appendStringInfoChar(value, c);
	}
}

static void
parse_bare_key(Header *header, StringInfo value)
{
	if (next_is(header, "(:?@") ||
		strncmp(header->next, "%\"", 2) == 0)
		malformed(header, "There is a value of another type than string");

	while (*header->next != '\0' && !next_is(header, " ,"))
	{
		if (next_is(header, "\";\\"))
			malformed(header, "There is a character that only a key in double quotes may have");
		appendStringInfoChar(value, next_character(header));
	}
}

/*
 * idem_parse_key(header text) returns text
 *
 * The key in an Idempotency-Key header, the same whether it was sent in
 * quotes or bare.  A header that is there but holds no key is an error, not
 * NULL: its client believes that it has sent one.
 */
Datum
idem_parse_key(PG_FUNCTION_ARGS)
{
	Header		header;
	StringInfoData key;

	header.start = header.next = text_to_cstring(PG_GETARG_TEXT_PP(0));
	initStringInfo(&key);

	(void) skip(&header, " ");
	if (take(&header, '"'))
	{
		parse_string(&header, &key);
		skip_parameters(&header);
	}
	else
		parse_bare_key(&header, &key);

	(void) skip(&header, " ");
	if (*header.next == ',')
		malformed(&header, "There is a comma, as in a list of keys or in a header that was sent twice,");
	if (*header.next != '\0')
		malformed(&header, "There is something behind the key");

	idem_check_name(key.data, key.len, "key", false);
	PG_RETURN_TEXT_P(cstring_to_text_with_len(key.data, key.len));
}
