/*-------------------------------------------------------------------------
 *
 * inval.c
 *	  One ear for invalidations, for all caches of a backend.
 *
 * What the library remembers of tables and types is void when they change,
 * and the server tells by calling back.  It has few places for that: a
 * backend has ten callbacks for tables, which PostgreSQL itself and all
 * extensions share, and the eleventh ends the backend.  So the library takes
 * one, and one for types, and asks each module from here.
 *
 * They are registered when a cache is first filled, since a place is taken
 * for the life of the backend and most backends may never call us.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "utils/inval.h"
#include "utils/syscache.h"

#include "inval.h"
#include "catalog.h"
#include "outbox.h"
#include "policy.h"
#include "store.h"

/* A table was changed; any may have been, if relid is invalid. */
static void
relation_changed(Datum arg, Oid relid)
{
	idem_catalog_relation_changed(relid);
	idem_outbox_relation_changed(relid);
	idem_policies_relation_changed(relid);
	idem_store_relation_changed(relid);
	idem_store_check_relation_changed(relid);
}

/* The same of types, by the hash value of their syscache entries; 0: any */
static void
type_changed(Datum arg, int cacheid, uint32 hashvalue)
{
	idem_catalog_type_changed(hashvalue);
}

/* To be called before anything is remembered that an invalidation voids. */
void
idem_watch_invalidations(void)
{
	static bool watching = false;

	if (watching)
		return;
	CacheRegisterRelcacheCallback(relation_changed, (Datum) 0);
	CacheRegisterSyscacheCallback(TYPEOID, type_changed, (Datum) 0);
	watching = true;
}
