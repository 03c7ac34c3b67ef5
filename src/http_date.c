/*-------------------------------------------------------------------------
 *
 * http_date.c
 *	  Dates in headers, and Retry-After (RFC 9110).
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "utils/datetime.h"
#include "utils/timestamp.h"

#include "http.h"
#include "timespan.h"

static int
month_number(const char *name)
{
	for (int i = 0; i < MONTHS_PER_YEAR; i++)
	{
		if (strcmp(months[i], name) == 0)
			return i + 1;
	}
	return 0;
}

/*
 * The full year of a date that has two digits of it: RFC 9110 wants one that
 * seems to be more than 50 years ahead to be of the past.  That of the next
 * century is not, once the end of this one is near.
 */
static int
full_year(int two_digits, int this_year)
{
	int			year = this_year - this_year % 100 + two_digits;

	if (year > this_year + 50)
		return year - 100;
	return year <= this_year - 50 ? year + 100 : year;
}

/*
 * Does s look as the shape does?  There, "a" is any letter, "0" any digit and
 * "_" a digit or a blank.
 */
static bool
has_shape(const char *s, const char *shape)
{
	for (; *shape != '\0'; s++, shape++)
	{
		bool		is_letter = (*s >= 'a' && *s <= 'z') ||
			(*s >= 'A' && *s <= 'Z');
		bool		is_digit = *s >= '0' && *s <= '9';

		if (*shape == 'a' ? !is_letter :
			*shape == '0' ? !is_digit :
			*shape == '_' ? !is_digit && *s != ' ' :
			*s != *shape)
			return false;
	}
	return *s == '\0';
}

/*
 * Read an HTTP date, in any of the three forms that RFC 9110 has.  The name
 * of the day is not compared with the date.
 */
static bool
parse_http_date(const char *s, TimestampTz now, TimestampTz *result)
{
	struct pg_tm tm;
	fsec_t		fsec;
	int			utc = 0;
	int			this_year;
	char		month[4];
	size_t		day_name = strspn(s, "abcdefghijklmnopqrstuvwxyz"
								  "ABCDEFGHIJKLMNOPQRSTUVWXYZ");

	if (timestamp2tm(now, &utc, &tm, &fsec, NULL, NULL) != 0)
		return false;
	this_year = tm.tm_year;
	utc = 0;
	memset(&tm, 0, sizeof(tm));

	/* Sun, 06 Nov 1994 08:49:37 GMT */
	if (has_shape(s, "aaa, 00 aaa 0000 00:00:00 GMT"))
		(void) sscanf(s + day_name, ", %2d %3s %4d %2d:%2d:%2d",
					  &tm.tm_mday, month, &tm.tm_year, &tm.tm_hour,
					  &tm.tm_min, &tm.tm_sec);

	/* Sunday, 06-Nov-94 08:49:37 GMT */
	else if (day_name > 0 &&
			 has_shape(s + day_name, ", 00-aaa-00 00:00:00 GMT"))
	{
		(void) sscanf(s + day_name, ", %2d-%3s-%2d %2d:%2d:%2d",
					  &tm.tm_mday, month, &tm.tm_year, &tm.tm_hour,
					  &tm.tm_min, &tm.tm_sec);
		tm.tm_year = full_year(tm.tm_year, this_year);
	}

	/* Sun Nov  6 08:49:37 1994 */
	else if (has_shape(s, "aaa aaa _0 00:00:00 0000"))
		(void) sscanf(s + day_name, " %3s %2d %2d:%2d:%2d %4d",
					  month, &tm.tm_mday, &tm.tm_hour, &tm.tm_min,
					  &tm.tm_sec, &tm.tm_year);
	else
		return false;

	tm.tm_mon = month_number(month);
	if (tm.tm_mon == 0 || tm.tm_year < 1 ||
		tm.tm_mday < 1 ||
		tm.tm_mday > day_tab[isleap(tm.tm_year)][tm.tm_mon - 1] ||
		tm.tm_hour < 0 || tm.tm_hour > 23 ||
		tm.tm_min < 0 || tm.tm_min > 59 ||
		tm.tm_sec < 0 || tm.tm_sec > 60)
		return false;
	return tm2timestamp(&tm, 0, &utc, result) == 0;
}

/*
 * How long a Retry-After header asks to wait; 0 for a date that has passed.
 * False if it is malformed: it comes from somebody else's server, and so is
 * no error of the caller's.
 */
bool
idem_parse_retry_after(char *s, int64 *usecs)
{
	const char *const blanks = " \t";
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz date;
	size_t		len;

	s += strspn(s, blanks);
	len = strlen(s);
	while (len > 0 && strchr(blanks, s[len - 1]) != NULL)
		s[--len] = '\0';

	if (len > 0 && strspn(s, "0123456789") == len)
	{
		*usecs = 0;
		for (; *s != '\0'; s++)
			*usecs = idem_add_usecs(idem_multiply_usecs(*usecs, 10), *s - '0');
		*usecs = idem_multiply_usecs(*usecs, USECS_PER_SEC);
		return true;
	}
	if (!parse_http_date(s, now, &date))
		return false;
	*usecs = Max(date - now, 0);
	return true;
}
