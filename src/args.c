/*-------------------------------------------------------------------------
 *
 * args.c
 *	  Arguments of SQL functions: names, tenants, fingerprints, statuses.
 *
 * A NULL tenant falls back to the setting; what other NULLs mean is their
 * functions' affair.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "common/int.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/numeric.h"

#include "args.h"
#include "timespan.h"

/*
 * Does the character at s, len bytes long in the database's encoding, belong
 * to the control characters C0, DEL or C1?  C1 is told apart only where the
 * encoding has it: in UTF-8 it is C2 80 .. C2 9F, in the ISO 8859 family the
 * single bytes 80 .. 9F.  Elsewhere those bytes are letters or lead bytes.
 */
static bool
is_control(const unsigned char *s, int len, int encoding)
{
	if (len == 1 && (s[0] < 0x20 || s[0] == 0x7F))
		return true;

	switch (encoding)
	{
		case PG_UTF8:
			return len == 2 && s[0] == 0xC2 && s[1] < 0xA0;
		case PG_LATIN1:
		case PG_LATIN2:
		case PG_LATIN3:
		case PG_LATIN4:
		case PG_LATIN5:
		case PG_LATIN6:
		case PG_LATIN7:
		case PG_LATIN8:
		case PG_LATIN9:
		case PG_LATIN10:
		case PG_ISO_8859_5:
		case PG_ISO_8859_6:
		case PG_ISO_8859_7:
		case PG_ISO_8859_8:
			return s[0] >= 0x80 && s[0] < 0xA0;
		default:
			return false;
	}
}

/*
 * Check a key, tenant or route: at most 255 bytes, no control characters,
 * and not empty unless allowed.
 */
void
idem_check_name(const char *name, int len, const char *what, bool may_be_empty)
{
	int			encoding = GetDatabaseEncoding();
	int			chlen;

	if (len == 0 && !may_be_empty)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must not be empty", what)));
	if (len > IDEM_MAX_NAME)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s is too long", what),
				 errdetail("It has %d bytes; at most %d are allowed.",
						   len, IDEM_MAX_NAME)));

	for (int i = 0; i < len; i += chlen)
	{
		const unsigned char *s = (const unsigned char *) name + i;

		chlen = IS_HIGHBIT_SET(*s) ? pg_mblen(name + i) : 1;
		if (is_control(s, Min(chlen, len - i), encoding))
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("%s must not contain control characters", what),
					 errdetail("There is one at byte %d.", i + 1)));
	}
}

/*
 * A key or route argument: checked, and never NULL.  The result has a
 * detoasted, possibly short header.
 */
text *
idem_arg_name(FunctionCallInfo fcinfo, int argno, const char *what)
{
	text	   *name;

	if (PG_ARGISNULL(argno))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("%s must not be null", what)));
	name = PG_GETARG_TEXT_PP(argno);
	idem_check_name(VARDATA_ANY(name), VARSIZE_ANY_EXHDR(name), what, false);
	return name;
}

/*
 * The tenant: with tenant_is_role the current role, whatever the argument
 * says; else the argument, or pg_idem.tenant.
 */
text *
idem_arg_tenant(FunctionCallInfo fcinfo, int argno)
{
	text	   *tenant;

	/*
	 * A library that is loaded on first use comes too late to keep a client
	 * from setting what only a superuser may set: its value displaces the
	 * server's before it is refused.  So whoever relies on this setting must
	 * preload.
	 */
	if (idem_tenant_is_role && !idem_preloaded)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("pg_idem.tenant_is_role needs pg_idem in shared_preload_libraries"),
				 errhint("Add pg_idem to shared_preload_libraries in postgresql.conf, then restart the server.")));

	if (idem_tenant_is_role)
		tenant = cstring_to_text(GetUserNameFromId(GetUserId(), false));
	else if (!PG_ARGISNULL(argno))
		tenant = PG_GETARG_TEXT_PP(argno);
	else
		tenant = cstring_to_text(idem_tenant);

	idem_check_name(VARDATA_ANY(tenant), VARSIZE_ANY_EXHDR(tenant),
					"tenant", true);
	return tenant;
}

/* The store: InvalidOid for the default one */
Oid
idem_arg_store(FunctionCallInfo fcinfo, int argno)
{
	if (PG_ARGISNULL(argno))
		return InvalidOid;
	if (!OidIsValid(PG_GETARG_OID(argno)))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_TABLE),
				 errmsg("store with OID %u does not exist", InvalidOid)));
	return PG_GETARG_OID(argno);
}

/* The request's fingerprint, or NULL for a caller that takes none */
bytea *
idem_arg_hash(FunctionCallInfo fcinfo, int argno)
{
	bytea	   *hash;

	if (PG_ARGISNULL(argno))
		return NULL;
	hash = PG_GETARG_BYTEA_PP(argno);
	if (VARSIZE_ANY_EXHDR(hash) > IDEM_MAX_NAME)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("request hash is too long"),
				 errdetail("It has %d bytes; at most %d are allowed.",
						   (int) VARSIZE_ANY_EXHDR(hash), IDEM_MAX_NAME),
				 errhint("Pass idem_hash(request) instead of the request.")));
	return hash;
}

/* An interval argument, if given, in place of what *result has */
void
idem_arg_interval(FunctionCallInfo fcinfo, int argno, Interval *result)
{
	if (!PG_ARGISNULL(argno))
		*result = *PG_GETARG_INTERVAL_P(argno);
}

/* The status of a result */
int
idem_arg_status(FunctionCallInfo fcinfo, int argno)
{
	if (PG_ARGISNULL(argno))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("status must not be null")));
	return idem_check_status(PG_GETARG_INT32(argno));
}

int
idem_check_status(int status)
{
	if (status < 100 || status > 599)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("status must be between 100 and 599")));
	return status;
}

/*
 * An interval argument in microseconds, a month being 30 days as where
 * intervals are compared; the default where it is NULL.
 */
int64
idem_arg_usecs(FunctionCallInfo fcinfo, int argno, const char *what,
			   int64 default_usecs)
{
	return PG_ARGISNULL(argno) ? default_usecs :
		idem_interval_usecs(PG_GETARG_INTERVAL_P(argno), what);
}
