/*-------------------------------------------------------------------------
 *
 * compat.h
 *	  Differences between the supported server versions, and nothing else.
 *
 * This is the only file that looks at PG_VERSION_NUM.  Wherever a call was
 * renamed or gained an argument, the newer name is used in the code and is
 * defined here for the older servers.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#ifndef PG_IDEM_COMPAT_H
#define PG_IDEM_COMPAT_H

#include "access/genam.h"
#include "access/tableam.h"
#include "catalog/pg_class.h"
#include "catalog/pg_database.h"
#include "catalog/pg_namespace.h"
#include "catalog/pg_proc.h"
#include "storage/latch.h"
#include "utils/acl.h"
#include "utils/jsonb.h"
#include "utils/relcache.h"
#include "utils/timestamp.h"
#include "utils/wait_event.h"

#if PG_VERSION_NUM < 150000
#error "pg_idem needs PostgreSQL 15 or newer"
#endif

/*
 * 16: varlena macros moved to a header of their own; the per-catalog
 * ownership checks became one function; an update tells which kinds of index
 * need an entry, not only whether any does.
 */
#if PG_VERSION_NUM >= 160000
#include "varatt.h"
#endif

#if PG_VERSION_NUM < 160000
#define object_ownercheck(classid, objectid, roleid) \
	((classid) == RelationRelationId ? \
	 pg_class_ownercheck((objectid), (roleid)) : \
	 pg_extension_ownercheck((objectid), (roleid)))
#define idem_has_schema_usage(nspoid, roleid) \
	(pg_namespace_aclcheck((nspoid), (roleid), ACL_USAGE) == ACLCHECK_OK)

#define idem_has_execute(procoid, roleid) \
	(pg_proc_aclcheck((procoid), (roleid), ACL_EXECUTE) == ACLCHECK_OK)

typedef bool IdemUpdateIndexes;
#define IDEM_UPDATES_NO_INDEX(u)		(!(u))
#define IDEM_UPDATES_ONLY_SUMMARIES(u)	false
#else
#define idem_has_schema_usage(nspoid, roleid) \
	(object_aclcheck(NamespaceRelationId, (nspoid), (roleid), \
					 ACL_USAGE) == ACLCHECK_OK)

#define idem_has_execute(procoid, roleid) \
	(object_aclcheck(ProcedureRelationId, (procoid), (roleid), \
					 ACL_EXECUTE) == ACLCHECK_OK)

typedef TU_UpdateIndexes IdemUpdateIndexes;
#define IDEM_UPDATES_NO_INDEX(u)		((u) == TU_None)
#define IDEM_UPDATES_ONLY_SUMMARIES(u)	((u) == TU_Summarizing)
#endif

/* 16: index AMs may be "summarizing"; before, each needs every entry. */
#if PG_VERSION_NUM < 160000
#define IDEM_INDEX_IS_SUMMARY(info)		false
#else
#define IDEM_INDEX_IS_SUMMARY(info)		((info)->ii_Summarizing)
#endif

/*
 * 17: indexes may keep state between insertions; intervals may be infinite;
 * extensions may name their own wait events; a half-dropped database is
 * marked (earlier majors mark it too, since their minors of 2023, but do not
 * all have the name).
 */
#if PG_VERSION_NUM < 170000
#define index_insert_cleanup(index, info)	((void) 0)
#define INTERVAL_NOT_FINITE(i)				false
#endif

#ifndef DATCONNLIMIT_INVALID_DB
#define DATCONNLIMIT_INVALID_DB		(-2)
#endif

#if PG_VERSION_NUM < 170000
#define IDEM_WAIT_EVENT(name)	PG_WAIT_EXTENSION
#else
static inline uint32
idem_wait_event(uint32 *slot, const char *name)
{
	if (*slot == 0)
		*slot = WaitEventExtensionNew(name);
	return *slot;
}

/* each place that uses it remembers its own number */
#define IDEM_WAIT_EVENT(name) \
	({ static uint32 slot_ = 0; idem_wait_event(&slot_, (name)); })
#endif

/* 18: a primary key may be deferrable and returned */
#if PG_VERSION_NUM < 180000
#define idem_primary_key_index(rel) \
	RelationGetPrimaryKeyIndex(rel)
#else
#define idem_primary_key_index(rel) \
	RelationGetPrimaryKeyIndex((rel), true)
#endif

/* 18: scans are instrumented; 19: they and updates have flags */
#if PG_VERSION_NUM < 180000
#define idem_index_beginscan(heap, index, snapshot, nkeys) \
	index_beginscan((heap), (index), (snapshot), (nkeys), 0)
#elif PG_VERSION_NUM < 190000
#define idem_index_beginscan(heap, index, snapshot, nkeys) \
	index_beginscan((heap), (index), (snapshot), NULL, (nkeys), 0)
#else
#define idem_index_beginscan(heap, index, snapshot, nkeys) \
	index_beginscan((heap), (index), (snapshot), NULL, (nkeys), 0, SO_NONE)
#endif

#if PG_VERSION_NUM < 190000
#define idem_table_beginscan(rel, snapshot) \
	table_beginscan((rel), (snapshot), 0, NULL)
#define idem_table_tuple_update(rel, tid, slot, cid, snapshot, failure, \
								lockmode, updates) \
	table_tuple_update((rel), (tid), (slot), (cid), (snapshot), \
					   InvalidSnapshot, true, (failure), (lockmode), \
					   (updates))
#else
#define idem_table_beginscan(rel, snapshot) \
	table_beginscan((rel), (snapshot), 0, NULL, SO_NONE)
#define idem_table_tuple_update(rel, tid, slot, cid, snapshot, failure, \
								lockmode, updates) \
	table_tuple_update((rel), (tid), (slot), (cid), 0, (snapshot), \
					   InvalidSnapshot, true, (failure), (lockmode), \
					   (updates))
#endif

/* 19: a table in shared memory has one size, and never grows */
#if PG_VERSION_NUM < 190000
#define idem_shmem_init_hash(name, size, info, flags) \
	ShmemInitHash((name), (size), (size), (info), (flags))
#else
#define idem_shmem_init_hash(name, size, info, flags) \
	ShmemInitHash((name), (size), (info), (flags))
#endif

/* 19: what is formed of pushed values is found in their state */
#if PG_VERSION_NUM < 190000
typedef struct JsonbInState
{
	JsonbValue *result;
	JsonbParseState *parseState;
} JsonbInState;

static inline void
idem_push_jsonb_value(JsonbInState *state, JsonbIteratorToken token,
					  JsonbValue *value)
{
	state->result = pushJsonbValue(&state->parseState, token, value);
}
#else
#define idem_push_jsonb_value(state, token, value) \
	pushJsonbValue((state), (token), (value))
#endif

/* 18: what does not return says so before its type */
#ifndef pg_noreturn
#define pg_noreturn		__attribute__((noreturn))
#endif

/* 18: the module's identity is part of its magic block */
#ifndef PG_MODULE_MAGIC_EXT
#define PG_MODULE_MAGIC_EXT(...)	PG_MODULE_MAGIC
#endif

/* 19: signal handlers have a second argument, which these do not have */
#ifndef PG_SIG_IGN
#define PG_SIG_IGN		SIG_IGN
#endif

#endif							/* PG_IDEM_COMPAT_H */
