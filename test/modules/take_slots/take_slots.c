/*-------------------------------------------------------------------------
 *
 * take_slots.c
 *	  For the tests: a neighbour that has taken callbacks of this backend.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "utils/inval.h"
#include "utils/syscache.h"

PG_MODULE_MAGIC;

PG_FUNCTION_INFO_V1(take_slots);

static void
ignore_relation(Datum arg, Oid relid)
{
}

static void
ignore_entry(Datum arg, int cacheid, uint32 hashvalue)
{
}

/*
 * take_slots(relcache int, syscache int) returns void
 */
PGDLLEXPORT Datum
take_slots(PG_FUNCTION_ARGS)
{
	for (int i = 0; i < PG_GETARG_INT32(0); i++)
		CacheRegisterRelcacheCallback(ignore_relation, (Datum) 0);
	for (int i = 0; i < PG_GETARG_INT32(1); i++)
		CacheRegisterSyscacheCallback(TYPEOID, ignore_entry, (Datum) 0);
	PG_RETURN_VOID();
}
