/*-------------------------------------------------------------------------
 *
 * args.h
 *	  Arguments of SQL functions: names, tenants, fingerprints, statuses.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#ifndef PG_IDEM_ARGS_H
#define PG_IDEM_ARGS_H

#include "pg_idem.h"

#include "datatype/timestamp.h"

extern void idem_check_name(const char *name, int len, const char *what,
							bool may_be_empty);
extern int	idem_check_status(int status);
extern text *idem_arg_name(FunctionCallInfo fcinfo, int argno,
						   const char *what);
extern text *idem_arg_tenant(FunctionCallInfo fcinfo, int argno);
extern Oid	idem_arg_store(FunctionCallInfo fcinfo, int argno);
extern bytea *idem_arg_hash(FunctionCallInfo fcinfo, int argno);
extern int	idem_arg_status(FunctionCallInfo fcinfo, int argno);
extern void idem_arg_interval(FunctionCallInfo fcinfo, int argno,
							  Interval *result);
extern int64 idem_arg_usecs(FunctionCallInfo fcinfo, int argno,
							const char *what, int64 default_usecs);

#endif							/* PG_IDEM_ARGS_H */
