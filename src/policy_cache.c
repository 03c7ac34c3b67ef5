/*-------------------------------------------------------------------------
 *
 * policy_cache.c
 *	  Tables of policies, kept in each backend.
 *
 * All rows of such a table (idem_route_policies, idem_service_policies) are
 * kept in a hash table of each backend, so a call reads no table while they
 * have not changed.  A trigger on the table sends a relcache invalidation of
 * it, which every backend takes in when the change commits, and the backend
 * that made the change at its next command; the rows are then read again,
 * under a fresh snapshot, by the next call.  A change rolled back is undone in
 * the same way.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/relation.h"
#include "access/tableam.h"
#include "catalog/pg_class.h"
#include "catalog/pg_type.h"
#include "commands/trigger.h"
#include "utils/builtins.h"
#include "utils/hsearch.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

#include "policy.h"
#include "catalog.h"
#include "inval.h"
#include "timespan.h"

PG_FUNCTION_INFO_V1(idem_policy_changed);

/* all caches in use */
static IdemPolicyCache *caches = NULL;

/*
 * The table was changed, or a transaction that changed it ended.  Changes are
 * counted, so that one during a load is noticed.
 */
void
idem_policies_relation_changed(Oid relid)
{
	for (IdemPolicyCache *cache = caches; cache != NULL; cache = cache->next)
	{
		if (!OidIsValid(relid) || relid == cache->relid)
		{
			cache->valid = false;
			cache->invalidations++;
		}
	}
}

/*
 * Trigger on a table of policies, after every change: have all backends read
 * it again once the change commits.  For each row, since the changes that
 * logical replication applies fire no others.
 */
Datum
idem_policy_changed(PG_FUNCTION_ARGS)
{
	if (!CALLED_AS_TRIGGER(fcinfo))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("function \"%s\" was not called by trigger manager",
						"idem_policy_changed")));
	CacheInvalidateRelcache(((TriggerData *) fcinfo->context)->tg_relation);
	PG_RETURN_POINTER(NULL);
}

/* The type of a column of each kind, and the size of what it is kept as */
static const struct
{
	Oid			type;
	Size		size;
}			kinds[] = {
	[IDEM_POLICY_INTERVAL] = {INTERVALOID, sizeof(Interval)},
	[IDEM_POLICY_USECS] = {INTERVALOID, sizeof(int64)},
	[IDEM_POLICY_INT] = {INT4OID, sizeof(int32)},
	[IDEM_POLICY_FLOAT] = {FLOAT8OID, sizeof(double)},
	[IDEM_POLICY_WORD] = {TEXTOID, sizeof(int)}
};

/* Which of a column's words is this?  A CHECK constraint keeps others out. */
static int
find_word(const IdemPolicyColumn *column, Datum value)
{
	char	   *word = TextDatumGetCString(value);

	for (int i = 1; column->words[i] != NULL; i++)
	{
		if (strcmp(column->words[i], word) == 0)
			return i;
	}
	return 0;
}

static void
load_column(const IdemPolicyColumn *column, Datum value, char *policy)
{
	void	   *to = policy + column->offset;

	switch (column->kind)
	{
		case IDEM_POLICY_INTERVAL:
			*(Interval *) to = *DatumGetIntervalP(value);
			break;
		case IDEM_POLICY_USECS:
			*(int64 *) to = idem_interval_usecs(DatumGetIntervalP(value),
												column->name);
			break;
		case IDEM_POLICY_INT:
			*(int32 *) to = DatumGetInt32(value);
			break;
		case IDEM_POLICY_FLOAT:
			*(double *) to = DatumGetFloat8(value);
			break;
		case IDEM_POLICY_WORD:
			*(int *) to = find_word(column, value);
			break;
	}
}

static void
load_row(IdemPolicyCache *cache, HTAB *table, TupleTableSlot *slot)
{
	char		name[IDEM_MAX_NAME + 1];
	IdemPolicyRow *row;

	slot_getallattrs(slot);

	/* the primary key, which has no longer values than can be looked for */
	if (slot->tts_isnull[0])
		return;
	text_to_cstring_buffer(DatumGetTextPP(slot->tts_values[0]), name,
						   sizeof(name));
	row = hash_search(table, name, HASH_ENTER, NULL);
	memset(row->policy, 0, cache->size);
	for (int i = 0; i < cache->ncolumns; i++)
	{
		row->has[i] = !slot->tts_isnull[i + 1];
		if (row->has[i])
			load_column(&cache->columns[i], slot->tts_values[i + 1],
						(char *) row->policy);
	}
}

/* Put what a row says over a policy; what is NULL in it stays as it is. */
void
idem_apply_policy(const IdemPolicyCache *cache, const IdemPolicyRow *row,
				  void *policy)
{
	for (int i = 0; i < cache->ncolumns; i++)
	{
		const IdemPolicyColumn *column = &cache->columns[i];

		if (row->has[i])
			memcpy((char *) policy + column->offset,
				   (const char *) row->policy + column->offset,
				   kinds[column->kind].size);
	}
}

/*
 * Refuse to work with a table that is not what this library knows: that of
 * another version, or one that its owner has changed.  Further columns do no
 * harm.
 */
static void
check_table(const IdemPolicyCache *cache, Relation rel)
{
	TupleDesc	desc = RelationGetDescr(rel);
	bool		same = rel->rd_rel->relkind == RELKIND_RELATION &&
		desc->natts > cache->ncolumns &&
		TupleDescAttr(desc, 0)->atttypid == TEXTOID;

	for (int i = 0; same && i < cache->ncolumns; i++)
	{
		Form_pg_attribute att = TupleDescAttr(desc, i + 1);

		same = !att->attisdropped &&
			att->atttypid == kinds[cache->columns[i].kind].type;
	}
	if (!same)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("table \"%s\" is not the one that this version of the pg_idem library works with",
						RelationGetRelationName(rel)),
				 errhint("Restore the columns that it was created with; after an upgrade, run ALTER EXTENSION pg_idem UPDATE.")));
}

/*
 * Read the table into a new hash table, and put it in the place of the old
 * one when it is complete.  If that fails, there is no valid one, and the
 * next call tries again.
 */
static void
load(IdemPolicyCache *cache, Oid relid)
{
	MemoryContext context;
	HTAB	   *table;
	uint64		invalidations;
	Relation	rel;
	TableScanDesc scan;
	TupleTableSlot *slot;
	Snapshot	snapshot;
	HASHCTL		ctl;

	idem_watch_invalidations();
	if (!cache->registered)
	{
		cache->next = caches;
		caches = cache;
		cache->registered = true;
	}

	context = AllocSetContextCreate(CurrentMemoryContext, "pg_idem policies",
									ALLOCSET_SMALL_SIZES);
	memset(&ctl, 0, sizeof(ctl));
	ctl.keysize = IDEM_MAX_NAME + 1;
	ctl.entrysize = offsetof(IdemPolicyRow, policy) + cache->size;
	ctl.hcxt = context;
	table = hash_create("pg_idem policies", 16, &ctl,
						HASH_ELEM | HASH_STRINGS | HASH_CONTEXT);

	cache->relid = relid;
	rel = OidIsValid(relid) ? try_relation_open(relid, AccessShareLock) : NULL;
	if (rel == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_TABLE),
				 errmsg("a table of policies of pg_idem does not exist")));

	/* an invalidation that arrives from here on makes us read again */
	invalidations = cache->invalidations;
	check_table(cache, rel);
	idem_refuse_distributed(rel);

	snapshot = RegisterSnapshot(GetLatestSnapshot());
	slot = table_slot_create(rel, NULL);
	scan = idem_table_beginscan(rel, snapshot);
	while (table_scan_getnextslot(scan, ForwardScanDirection, slot))
		load_row(cache, table, slot);
	table_endscan(scan);
	ExecDropSingleTupleTableSlot(slot);
	UnregisterSnapshot(snapshot);
	relation_close(rel, AccessShareLock);

	MemoryContextSetParent(context, TopMemoryContext);
	if (cache->context != NULL)
		MemoryContextDelete(cache->context);
	cache->context = context;
	cache->rows = table;
	cache->valid = (invalidations == cache->invalidations);
}

/*
 * All rows of the table, up to date, by the name in their first column.
 * Other backends' commits are taken in here, as a transaction that already
 * has its locks would otherwise not notice them.
 */
HTAB *
idem_policies(IdemPolicyCache *cache, Oid relid)
{
	AcceptInvalidationMessages();
	if (!cache->valid || cache->relid != relid)
	{
		cache->valid = false;
		load(cache, relid);
	}
	return cache->rows;
}

/* The row for a name, or NULL; good until the next call */
IdemPolicyRow *
idem_find_policy(IdemPolicyCache *cache, Oid relid, const text *name)
{
	HTAB	   *rows = idem_policies(cache, relid);
	char		key[IDEM_MAX_NAME + 1];

	if (hash_get_num_entries(rows) == 0)
		return NULL;
	text_to_cstring_buffer(name, key, sizeof(key));
	return hash_search(rows, key, HASH_FIND, NULL);
}
