/*-------------------------------------------------------------------------
 *
 * shim.c
 *	  As much of a server as the parsers of src/ need, for the fuzzer.
 *
 * Each allocation is a malloc of its own, so that the sanitizer sees where one
 * ends.  An error is a jump to whoever called.  The calendar is written anew:
 * it is what the server's is compared with, too.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "lib/stringinfo.h"
#include "mb/pg_wchar.h"
#include "utils/builtins.h"
#include "utils/datetime.h"
#include "utils/guc.h"
#include "utils/jsonb.h"
#include "utils/timestamp.h"

#include "shim.h"

TimestampTz shim_now;
const char *shim_header_name;
size_t		shim_header_len;
bool		shim_header_kept;
sigjmp_buf	shim_on_error;
int			shim_sqlstate;

/* settings of pg_idem, which are in pg_idem.c */
char	   *idem_replay_headers;
char	   *idem_tenant;
bool		idem_tenant_is_role;
bool		idem_preloaded;

char	   *GUC_check_errdetail_string;

void
shim_expect(bool holds, const char *what)
{
	if (!holds)
	{
		fprintf(stderr, "does not hold: %s\n", what);
		abort();
	}
}

/* ----------------------------------------------------------------
 *		Memory
 * ----------------------------------------------------------------
 */

typedef struct Chunk
{
	void	   *memory;
	struct Chunk *next;
} Chunk;

static Chunk *chunks;

void *
palloc(Size size)
{
	Chunk	   *chunk = malloc(sizeof(Chunk));

	chunk->memory = malloc(size);
	chunk->next = chunks;
	chunks = chunk;
	return chunk->memory;
}

void *
palloc0(Size size)
{
	return memset(palloc(size), 0, size);
}

void
pfree(void *memory)
{
	for (Chunk *chunk = chunks; chunk != NULL; chunk = chunk->next)
	{
		if (chunk->memory == memory)
		{
			free(memory);
			chunk->memory = NULL;
			return;
		}
	}
	shim_expect(false, "what is freed was allocated");
}

void
shim_free_all(void)
{
	while (chunks != NULL)
	{
		Chunk	   *chunk = chunks;

		chunks = chunk->next;
		free(chunk->memory);
		free(chunk);
	}
}

/* ----------------------------------------------------------------
 *		Errors
 * ----------------------------------------------------------------
 */

bool
errstart(int elevel, const char *domain)
{
	shim_expect(elevel == ERROR, "there are only errors");
	shim_sqlstate = ERRCODE_INTERNAL_ERROR;
	return true;
}

bool
errstart_cold(int elevel, const char *domain)
{
	return errstart(elevel, domain);
}

void
errfinish(const char *filename, int lineno, const char *funcname)
{
	siglongjmp(shim_on_error, 1);
}

int
errcode(int sqlerrcode)
{
	shim_sqlstate = sqlerrcode;
	return 0;
}

/* A message is formed, so that the sanitizer sees what it reads. */
static int
form_message(const char *fmt, va_list args)
{
	char		message[4096];

	(void) vsnprintf(message, sizeof(message), fmt, args);
	return 0;
}

#define MESSAGE_FUNCTION(name) \
	int \
	name(const char *fmt,...) \
	{ \
		va_list		args; \
		va_start(args, fmt); \
		(void) form_message(fmt, args); \
		va_end(args); \
		return 0; \
	}

MESSAGE_FUNCTION(errmsg)
MESSAGE_FUNCTION(errmsg_internal)
MESSAGE_FUNCTION(errdetail)
MESSAGE_FUNCTION(errhint)

void
pre_format_elog_string(int errnumber, const char *domain)
{
}

char *
format_elog_string(const char *fmt,...)
{
	va_list		args;

	va_start(args, fmt);
	(void) form_message(fmt, args);
	va_end(args);
	return NULL;
}

void
ExceptionalCondition(const char *condition,
#if PG_VERSION_NUM < 160000
					 const char *type,
#endif
					 const char *file, int line)
{
	fprintf(stderr, "%s:%d: ", file, line);
	shim_expect(false, condition);
	abort();
}

/* ----------------------------------------------------------------
 *		Strings
 * ----------------------------------------------------------------
 */

struct varlena *
pg_detoast_datum_packed(struct varlena *datum)
{
	return datum;
}

text *
cstring_to_text_with_len(const char *s, int len)
{
	text	   *result = palloc(VARHDRSZ + len);

	SET_VARSIZE(result, VARHDRSZ + len);
	memcpy(VARDATA(result), s, len);
	return result;
}

text *
cstring_to_text(const char *s)
{
	return cstring_to_text_with_len(s, strlen(s));
}

char *
text_to_cstring(const text *t)
{
	size_t		len = VARSIZE_ANY_EXHDR(t);
	char	   *result = palloc(len + 1);

	memcpy(result, VARDATA_ANY(t), len);
	result[len] = '\0';
	return result;
}

/* with no room to spare, so that what is written behind the end shows */
void
initStringInfo(StringInfo str)
{
	str->data = palloc0(1);
	str->len = 0;
	str->maxlen = 1;
	str->cursor = 0;
}

void
appendStringInfoChar(StringInfo str, char c)
{
	char	   *data = palloc(str->len + 2);

	memcpy(data, str->data, str->len);
	data[str->len] = c;
	data[str->len + 1] = '\0';
	pfree(str->data);
	str->data = data;
	str->len++;
	str->maxlen = str->len + 1;
}

int
GetDatabaseEncoding(void)
{
	return PG_UTF8;
}

int
pg_mblen(const char *s)
{
	return pg_encoding_mblen(PG_UTF8, s);
}

Datum
shim_call(PGFunction function, const char *a, const char *b)
{
	LOCAL_FCINFO(fcinfo, 2);

	InitFunctionCallInfoData(*fcinfo, NULL, 2, InvalidOid, NULL, NULL);
	fcinfo->args[0].isnull = (a == NULL);
	fcinfo->args[0].value = a ? PointerGetDatum(cstring_to_text(a)) : 0;
	fcinfo->args[1].isnull = (b == NULL);
	fcinfo->args[1].value = b ? PointerGetDatum(cstring_to_text(b)) : 0;
	return function(fcinfo);
}

/* ----------------------------------------------------------------
 *		The calendar
 * ----------------------------------------------------------------
 */

const char *const months[] = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
	"Jul", "Aug", "Sep", "Oct", "Nov", "Dec", NULL};

const int	day_tab[2][13] = {
	{31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31, 0},
	{31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31, 0}
};

TimestampTz
GetCurrentTimestamp(void)
{
	return shim_now;
}

/* Days from 0001-01-01 to the first of January of a year */
static int64
days_before_year(int64 year)
{
	int64		y = year - 1;

	return y * 365 + y / 4 - y / 100 + y / 400;
}

int
tm2timestamp(struct pg_tm *tm, fsec_t fsec, int *tzp, Timestamp *result)
{
	int64		days = days_before_year(tm->tm_year) - days_before_year(2000);

	shim_expect(tm->tm_year >= 1 && tm->tm_mon >= 1 && tm->tm_mon <= 12,
				"a date has a year and a month");
	for (int i = 0; i < tm->tm_mon - 1; i++)
		days += day_tab[isleap(tm->tm_year)][i];
	days += tm->tm_mday - 1;
	*result = (((days * 24 + tm->tm_hour) * 60 + tm->tm_min) * 60 +
			   tm->tm_sec) * USECS_PER_SEC + fsec;
	return 0;
}

int
timestamp2tm(Timestamp dt, int *tzp, struct pg_tm *tm, fsec_t *fsec,
			 const char **tzn, pg_tz *attimezone)
{
	int64		days = dt / USECS_PER_DAY;
	int64		rest = dt % USECS_PER_DAY;

	if (rest < 0)
	{
		rest += USECS_PER_DAY;
		days--;
	}
	*fsec = rest % USECS_PER_SEC;
	rest /= USECS_PER_SEC;
	tm->tm_hour = rest / 3600;
	tm->tm_min = rest / 60 % 60;
	tm->tm_sec = rest % 60;

	days += days_before_year(2000);
	tm->tm_year = days / 366 + 1;
	while (days_before_year(tm->tm_year + 1) <= days)
		tm->tm_year++;
	days -= days_before_year(tm->tm_year);
	for (tm->tm_mon = 1;
		 days >= day_tab[isleap(tm->tm_year)][tm->tm_mon - 1]; tm->tm_mon++)
		days -= day_tab[isleap(tm->tm_year)][tm->tm_mon - 1];
	tm->tm_mday = days + 1;
	return 0;
}

/* ----------------------------------------------------------------
 *		A JSON object of one header
 * ----------------------------------------------------------------
 */

static int	json_step;

JsonbIterator *
JsonbIteratorInit(JsonbContainer *container)
{
	json_step = 0;
	shim_header_kept = false;
	return NULL;
}

JsonbIteratorToken
JsonbIteratorNext(JsonbIterator **it, JsonbValue *val, bool skipNested)
{
	val->type = jbvString;
	val->val.string.val = unconstify(char *, shim_header_name);
	val->val.string.len = shim_header_len;
	switch (json_step++)
	{
		case 0:
			return WJB_BEGIN_OBJECT;
		case 1:
			return WJB_KEY;
		case 2:
			return WJB_VALUE;
		case 3:
			return WJB_END_OBJECT;
		default:
			return WJB_DONE;
	}
}

JsonbValue *
pushJsonbValue(JsonbParseState **pstate, JsonbIteratorToken seq,
			   JsonbValue *jbval)
{
	if (seq == WJB_KEY)
		shim_header_kept = true;
	return NULL;
}

Jsonb *
JsonbValueToJsonb(JsonbValue *val)
{
	return NULL;
}
