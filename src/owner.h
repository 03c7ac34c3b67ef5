/*-------------------------------------------------------------------------
 *
 * owner.h
 *	  SQL as a table's owner, and what it returns.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#ifndef PG_IDEM_OWNER_H
#define PG_IDEM_OWNER_H

#include "pg_idem.h"

#include "utils/relcache.h"

/* Who called, and with what settings */
typedef struct IdemCaller
{
	Oid			userid;
	int			sec_context;
	int			settings_level;
} IdemCaller;

extern void idem_become_owner(Relation rel, IdemCaller *caller);
extern void idem_become_caller(const IdemCaller *caller);
extern bool idem_try(void (*work) (void *arg), void *arg, ErrorData **error);

struct SPITupleTable;

pg_noreturn extern void idem_refuse_null(const char *column);
extern Datum idem_returned_or_null(struct SPITupleTable *rows, uint64 i,
								   int column, bool *isnull);
extern Datum idem_returned(struct SPITupleTable *rows, uint64 i, int column);
extern char *idem_returned_string(struct SPITupleTable *rows, uint64 i,
								  int column);

#endif							/* PG_IDEM_OWNER_H */
