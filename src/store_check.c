/*-------------------------------------------------------------------------
 *
 * store_check.c
 *	  What a store may be.
 *
 * A permanent plain heap OF idempotency_key that no table inherits from, with
 * its primary key on (key, tenant, route), valid and not deferrable.  Since
 * rows are written below the executor, whatever the executor would have done
 * is either done in store.c or refused here:
 *	- kept up to date are further plain, partial and expression indexes, as
 *	  long as they use the server's own functions only; foreign keys that
 *	  point to the store work, and so do triggers for DELETE, for rows are
 *	  deleted by SQL;
 *	- refused are triggers for INSERT or UPDATE, rules, CHECK and further NOT
 *	  NULL constraints, foreign keys of the store's own, further unique or
 *	  exclusion constraints and FORCE ROW LEVEL SECURITY.
 * Row-level security without FORCE does not apply to a table's owner, with
 * whose rights the functions work.  Generated columns cannot be had in a
 * typed table.
 *
 * The checks are made once per backend and store, and again after every
 * relcache invalidation of it, so ALTER TABLE, REINDEX and CREATE TRIGGER are
 * noticed.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "pg_idem.h"

#include "access/htup_details.h"
#include "access/transam.h"
#include "catalog/pg_am.h"
#include "catalog/pg_collation.h"
#include "catalog/pg_inherits.h"
#include "catalog/pg_opfamily.h"
#include "catalog/pg_trigger.h"
#include "commands/trigger.h"
#include "executor/executor.h"
#include "nodes/nodeFuncs.h"
#include "utils/hsearch.h"
#include "utils/inval.h"
#include "utils/rel.h"

/* What this backend has found out about a store; see check_store() */
typedef struct CheckedStore
{
	Oid			relid;			/* hash key */
	bool		valid;			/* no invalidation since the check? */
	Oid			pkey;
} CheckedStore;

static HTAB *checked_stores = NULL;

static void
store_changed(Datum arg, Oid relid)
{
	CheckedStore *checked;

	if (OidIsValid(relid))
	{
		checked = hash_search(checked_stores, &relid, HASH_FIND, NULL);
		if (checked != NULL)
			checked->valid = false;
	}
	else
	{
		HASH_SEQ_STATUS seq;

		hash_seq_init(&seq, checked_stores);
		while ((checked = hash_seq_search(&seq)) != NULL)
			checked->valid = false;
	}
}

static CheckedStore *
lookup_checked_store(Oid relid)
{
	CheckedStore *checked;
	bool		found;

	if (checked_stores == NULL)
	{
		HASHCTL		ctl;

		memset(&ctl, 0, sizeof(ctl));
		ctl.keysize = sizeof(Oid);
		ctl.entrysize = sizeof(CheckedStore);
		checked_stores = hash_create("pg_idem stores", 8, &ctl,
									 HASH_ELEM | HASH_BLOBS);
		CacheRegisterRelcacheCallback(store_changed, (Datum) 0);
	}

	checked = hash_search(checked_stores, &relid, HASH_ENTER, &found);
	if (!found)
		checked->valid = false;
	return checked;
}

static void
refuse_store(Relation rel, int sqlstate, const char *detail,
			 const char *hint)
{
	ereport(ERROR,
			(errcode(sqlstate),
			 errmsg("relation \"%s\" cannot be a store of idempotency keys",
					RelationGetRelationName(rel)),
			 errdetail("%s", detail),
			 hint != NULL ? errhint("%s", hint) : 0));
}

static void
check_store_kind(Relation rel)
{
	if (rel->rd_rel->relkind != RELKIND_RELATION ||
		rel->rd_rel->relpersistence != RELPERSISTENCE_PERMANENT)
		refuse_store(rel, ERRCODE_WRONG_OBJECT_TYPE,
					 "A store must be a permanent plain table.",
					 "Create stores with idem_create_table().");
	if (rel->rd_rel->relam != HEAP_TABLE_AM_OID)
		refuse_store(rel, ERRCODE_FEATURE_NOT_SUPPORTED,
					 "A store must use the table access method \"heap\".",
					 NULL);
	if (rel->rd_rel->reloftype != idem_catalog()->key_type ||
		RelationGetDescr(rel)->natts != Natts_key)
		refuse_store(rel, ERRCODE_WRONG_OBJECT_TYPE,
					 "A store must be a table of type idempotency_key.",
					 "Create stores with idem_create_table().");

	/* relhassubclass stays set for a while when the last child has gone */
	if (rel->rd_rel->relhassubclass &&
		find_inheritance_children(RelationGetRelid(rel), NoLock) != NIL)
		refuse_store(rel, ERRCODE_WRONG_OBJECT_TYPE,
					 "A store must not be inherited from.", NULL);
}

/* Columns that are never NULL here, and so may be declared NOT NULL */
static bool
is_never_null(AttrNumber attno)
{
	switch (attno)
	{
		case Anum_key_key:
		case Anum_key_tenant:
		case Anum_key_route:
		case Anum_key_attempt:
		case Anum_key_created_at:
		case Anum_key_expires_at:
		case Anum_key_state:
		case Anum_key_result_dropped:
			return true;
		default:
			return false;
	}
}

/* No constraint may say no to a row that is written here. */
static void
check_store_constraints(Relation rel)
{
	TupleDesc	desc = RelationGetDescr(rel);

	if (desc->constr != NULL && desc->constr->num_check > 0)
		refuse_store(rel, ERRCODE_FEATURE_NOT_SUPPORTED,
					 "A store must not have CHECK constraints.", NULL);
	for (int i = 0; i < desc->natts; i++)
	{
		Form_pg_attribute att = TupleDescAttr(desc, i);

		if (att->attnotnull && !is_never_null(att->attnum))
			refuse_store(rel, ERRCODE_FEATURE_NOT_SUPPORTED,
						 psprintf("Column \"%s\" of a store must not be NOT NULL.",
								  NameStr(att->attname)),
						 NULL);
	}
}

/* A trigger for INSERT or UPDATE would be passed over here. */
static void
check_store_triggers(Relation rel)
{
	TriggerDesc *triggers = rel->trigdesc;

	for (int i = 0; triggers != NULL && i < triggers->numtriggers; i++)
	{
		Trigger    *trigger = &triggers->triggers[i];

		if (trigger->tgenabled == TRIGGER_DISABLED ||
			!(TRIGGER_FOR_INSERT(trigger->tgtype) ||
			  TRIGGER_FOR_UPDATE(trigger->tgtype)))
			continue;

		switch (RI_FKey_trigger_type(trigger->tgfoid))
		{
			case RI_TRIGGER_PK:
				/* a foreign key to the store: its key never changes */
				break;
			case RI_TRIGGER_FK:
				refuse_store(rel, ERRCODE_FEATURE_NOT_SUPPORTED,
							 "A store must not have foreign keys of its own.",
							 NULL);
				break;
			default:
				refuse_store(rel, ERRCODE_FEATURE_NOT_SUPPORTED,
							 "A store must not have triggers for INSERT or UPDATE.",
							 "Triggers for DELETE are allowed.");
		}
	}
}

/*
 * Has the index the columns of a primary key, in its order and compared byte
 * by byte?
 */
static bool
is_on_key_columns(Relation index)
{
	static const AttrNumber columns[] = {
		Anum_key_key, Anum_key_tenant, Anum_key_route
	};

	if (index->rd_index->indnkeyatts != lengthof(columns))
		return false;
	for (int i = 0; i < lengthof(columns); i++)
	{
		if (index->rd_index->indkey.values[i] != columns[i] ||
			index->rd_indcollation[i] != C_COLLATION_OID ||
			index->rd_opfamily[i] != TEXT_BTREE_FAM_OID)
			return false;
	}
	return true;
}

static bool
is_user_function(Oid funcid, void *context)
{
	return funcid >= FirstNormalObjectId;
}

/* Does an expression run anything but the server's own functions? */
static bool
runs_user_code(Node *node, void *context)
{
	if (node == NULL)
		return false;
	if (IsA(node, CoerceToDomain) ||
		check_functions_in_node(node, is_user_function, NULL))
		return true;
	return expression_tree_walker(node, runs_user_code, context);
}

/*
 * The primary key must decide, and no other constraint may say no.  A second
 * unique index on the same columns is fine: REINDEX CONCURRENTLY makes one.
 * And no code of the owner's may run in the middle of an insertion, where it
 * would meet the row half made, and with the caller's rights.
 */
static Oid
check_store_indexes(Relation rel)
{
	List	   *indexes = RelationGetIndexList(rel);
	Oid			pkey = idem_primary_key_index(rel);
	bool		pkey_usable = false;
	ListCell   *lc;

	foreach(lc, indexes)
	{
		Relation	index = index_open(lfirst_oid(lc), AccessShareLock);
		Form_pg_index form = index->rd_index;

		if (form->indexrelid == pkey)
			pkey_usable = (form->indisvalid && form->indimmediate &&
						   index->rd_rel->relam == BTREE_AM_OID &&
						   is_on_key_columns(index));
		else if (form->indisexclusion ||
				 (form->indisunique &&
				  !(form->indimmediate && is_on_key_columns(index) &&
					heap_attisnull(index->rd_indextuple,
								   Anum_pg_index_indpred, NULL))))
			refuse_store(rel, ERRCODE_FEATURE_NOT_SUPPORTED,
						 "A store must have no unique or exclusion constraint but its primary key.",
						 NULL);
		if (runs_user_code((Node *) RelationGetIndexExpressions(index), NULL) ||
			runs_user_code((Node *) RelationGetIndexPredicate(index), NULL))
			refuse_store(rel, ERRCODE_FEATURE_NOT_SUPPORTED,
						 "Indexes of a store must not use functions that are not the server's own.",
						 NULL);
		index_close(index, AccessShareLock);
	}
	list_free(indexes);

	if (!pkey_usable)
		refuse_store(rel, ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
					 "A store needs a valid primary key, not deferrable, on (key, tenant, route).",
					 "Create stores with idem_create_table().");
	return pkey;
}

/*
 * Refuse a relation that is no store; see the head of this file.  The caller
 * holds a lock on it.  Returns the OID of the primary key's index.
 */
static Oid
check_store(Relation rel)
{
	Oid			pkey;

	check_store_kind(rel);
	check_store_triggers(rel);
	if (rel->rd_rules != NULL)
		refuse_store(rel, ERRCODE_FEATURE_NOT_SUPPORTED,
					 "A store must not have rules.", NULL);
	check_store_constraints(rel);
	if (rel->rd_rel->relrowsecurity && rel->rd_rel->relforcerowsecurity)
		refuse_store(rel, ERRCODE_FEATURE_NOT_SUPPORTED,
					 "A store must not have FORCE ROW LEVEL SECURITY.",
					 "Row-level security without FORCE is allowed; it holds for direct access to the table.");
	pkey = check_store_indexes(rel);
	CheckCmdReplicaIdentity(rel, CMD_UPDATE);
	return pkey;
}

/*
 * Check, once until something changes, that a table may be a store; an error
 * if not.  The caller holds a lock on it, which has let in every invalidation
 * that matters.  Returns the OID of the primary key's index.
 */
Oid
idem_store_primary_key(Relation rel)
{
	CheckedStore *checked = lookup_checked_store(RelationGetRelid(rel));

	if (!checked->valid || !OidIsValid(checked->pkey))
	{
		/* an invalidation during the check, or its failure, voids it */
		checked->valid = true;
		checked->pkey = InvalidOid;
		checked->pkey = check_store(rel);
	}
	return checked->pkey;
}
