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
 *	  long as they use the server's own functions and types only; foreign
 *	  keys that point to the store work, and so do triggers for DELETE, for rows are
 *	  deleted by SQL;
 *	- refused are triggers for INSERT or UPDATE, rules, CHECK and further NOT
 *	  NULL constraints, foreign keys of the store's own, further unique or
 *	  exclusion constraints, FORCE ROW LEVEL SECURITY, and what another
 *	  extension has distributed.
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
#include "postgres.h"

#include "access/htup_details.h"
#include "access/transam.h"
#include "catalog/pg_am.h"
#include "catalog/pg_collation.h"
#include "catalog/pg_inherits.h"
#include "catalog/pg_opfamily.h"
#include "catalog/pg_publication.h"
#include "catalog/pg_trigger.h"
#include "commands/trigger.h"
#include "nodes/nodeFuncs.h"
#include "utils/builtins.h"
#include "utils/hsearch.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/syscache.h"

#include "store.h"
#include "inval.h"

#define CREATE_STORES_SO	"Create stores with idem_create_table()."
#define NEEDS_PRIMARY_KEY \
	"A store needs a valid primary key, not deferrable, on (key, tenant, route)."

/* What this backend has found out about a store; see check_store() */
typedef struct CheckedStore
{
	Oid			relid;			/* hash key */
	bool		valid;			/* no invalidation since the check? */
	Oid			pkey;
} CheckedStore;

static HTAB *checked_stores = NULL;

void
idem_store_check_relation_changed(Oid relid)
{
	CheckedStore *checked;

	if (checked_stores == NULL)
		return;
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
	}
	idem_watch_invalidations();

	checked = hash_search(checked_stores, &relid, HASH_ENTER, &found);
	if (!found)
		checked->valid = false;
	return checked;
}

/* Say why a table is no store; always false, for callers to return. */
static bool
is_defect(IdemStoreDefect *defect, int sqlstate, const char *detail,
		  const char *hint)
{
	defect->sqlstate = sqlstate;
	defect->detail = detail;
	defect->hint = hint;
	return false;
}

static bool
has_store_kind(Relation rel, IdemStoreDefect *defect)
{
	if (rel->rd_rel->relkind != RELKIND_RELATION ||
		rel->rd_rel->relpersistence != RELPERSISTENCE_PERMANENT)
		return is_defect(defect, ERRCODE_WRONG_OBJECT_TYPE,
						 "A store must be a permanent plain table.",
						 CREATE_STORES_SO);
	if (rel->rd_rel->relam != HEAP_TABLE_AM_OID)
		return is_defect(defect, ERRCODE_FEATURE_NOT_SUPPORTED,
						 "A store must use the table access method \"heap\".",
						 NULL);
	if (rel->rd_rel->reloftype != idem_catalog()->key_type ||
		RelationGetDescr(rel)->natts != Natts_key)
		return is_defect(defect, ERRCODE_WRONG_OBJECT_TYPE,
						 "A store must be a table of type idempotency_key.",
						 CREATE_STORES_SO);

	/* relhassubclass stays set for a while when the last child has gone */
	if (rel->rd_rel->relhassubclass &&
		find_inheritance_children(RelationGetRelid(rel), NoLock) != NIL)
		return is_defect(defect, ERRCODE_WRONG_OBJECT_TYPE,
						 "A store must not be inherited from.", NULL);
	return true;
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
static bool
has_store_constraints(Relation rel, IdemStoreDefect *defect)
{
	TupleDesc	desc = RelationGetDescr(rel);

	if (desc->constr != NULL && desc->constr->num_check > 0)
		return is_defect(defect, ERRCODE_FEATURE_NOT_SUPPORTED,
						 "A store must not have CHECK constraints.", NULL);
	for (int i = 0; i < desc->natts; i++)
	{
		Form_pg_attribute att = TupleDescAttr(desc, i);

		if (att->attnotnull && !is_never_null(att->attnum))
			return is_defect(defect, ERRCODE_FEATURE_NOT_SUPPORTED,
							 psprintf("Column \"%s\" of a store must not be NOT NULL.",
									  NameStr(att->attname)),
							 NULL);
	}
	return true;
}

/* A trigger for INSERT or UPDATE would be passed over here. */
static bool
has_store_triggers(Relation rel, IdemStoreDefect *defect)
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
				return is_defect(defect, ERRCODE_FEATURE_NOT_SUPPORTED,
								 "A store must not have foreign keys of its own.",
								 NULL);
			default:
				return is_defect(defect, ERRCODE_FEATURE_NOT_SUPPORTED,
								 "A store must not have triggers for INSERT or UPDATE.",
								 "Triggers for DELETE are allowed.");
		}
	}
	return true;
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

/*
 * Does a value of this type bring code along that the server's own functions
 * call?  A range has a canonical and a subtype_diff function, a domain has its
 * CHECKs.  An enum has none.
 */
static bool
is_user_type(Oid type)
{
	Oid			element = get_element_type(type);

	if (OidIsValid(element))
		type = element;
	return type >= FirstNormalObjectId && get_typtype(type) != TYPTYPE_ENUM;
}

/*
 * Is it where a value of such a type comes from?  The server's functions make
 * one only out of another.
 */
static bool
makes_user_type(Node *node)
{
	switch (nodeTag(node))
	{
		case T_Const:
		case T_FuncExpr:
		case T_RelabelType:
		case T_CoerceViaIO:
		case T_CoerceToDomain:
		case T_ArrayExpr:
		case T_ArrayCoerceExpr:
		case T_RowExpr:
		case T_ConvertRowtypeExpr:
			return is_user_type(exprType(node));
		default:
			return false;
	}
}

/* Does an expression run anything but the server's own code? */
static bool
runs_user_code(Node *node, void *context)
{
	if (node == NULL)
		return false;
	if (makes_user_type(node) ||
		check_functions_in_node(node, is_user_function, NULL))
		return true;
	return expression_tree_walker(node, runs_user_code, context);
}

/*
 * The same of an index's expressions or its predicate, a column of pg_index.
 * They are taken as they were written: the relcache has them with constants
 * folded, and to fold them it calls their functions.
 */
static bool
index_runs_user_code(Relation index, AttrNumber attno)
{
	bool		isnull;
	Datum		written = SysCacheGetAttr(INDEXRELID, index->rd_indextuple,
										  attno, &isnull);

	return !isnull &&
		runs_user_code(stringToNode(TextDatumGetCString(written)), NULL);
}

/* A unique constraint that says no only where the primary key does */
static bool
is_second_key(Relation index)
{
	return index->rd_index->indimmediate && is_on_key_columns(index) &&
		heap_attisnull(index->rd_indextuple, Anum_pg_index_indpred, NULL);
}

/*
 * The primary key must decide, and no other constraint may say no.  A second
 * unique index on the same columns is fine: REINDEX CONCURRENTLY makes one.
 * And no code of the owner's may run in the middle of an insertion, where it
 * would meet the row half made, and with the caller's rights.
 */
static bool
is_store_index(Relation index, bool is_pkey, IdemStoreDefect *defect)
{
	Form_pg_index form = index->rd_index;

	if (is_pkey)
	{
		if (!form->indisvalid || !form->indimmediate ||
			index->rd_rel->relam != BTREE_AM_OID || !is_on_key_columns(index))
			return is_defect(defect, ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
							 NEEDS_PRIMARY_KEY, CREATE_STORES_SO);
	}
	else if (form->indisexclusion ||
			 (form->indisunique && !is_second_key(index)))
		return is_defect(defect, ERRCODE_FEATURE_NOT_SUPPORTED,
						 "A store must have no unique or exclusion constraint but its primary key.",
						 NULL);
	if (index_runs_user_code(index, Anum_pg_index_indexprs) ||
		index_runs_user_code(index, Anum_pg_index_indpred))
		return is_defect(defect, ERRCODE_FEATURE_NOT_SUPPORTED,
						 "Indexes of a store must not use functions or types that are not the server's own.",
						 NULL);
	return true;
}

static bool
has_store_indexes(Relation rel, Oid *pkey, IdemStoreDefect *defect)
{
	List	   *indexes = RelationGetIndexList(rel);
	bool		good = true;
	ListCell   *lc;

	*pkey = idem_primary_key_index(rel);
	if (!list_member_oid(indexes, *pkey))
		return is_defect(defect, ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
						 NEEDS_PRIMARY_KEY, CREATE_STORES_SO);
	foreach(lc, indexes)
	{
		Relation	index = index_open(lfirst_oid(lc), AccessShareLock);

		good = is_store_index(index, lfirst_oid(lc) == *pkey, defect);
		index_close(index, AccessShareLock);
		if (!good)
			break;
	}
	list_free(indexes);
	return good;
}

/*
 * Where the store is published, an update must be possible all the same: what
 * CheckCmdReplicaIdentity() refuses, without its error.
 */
static bool
is_replicated_well(Relation rel, IdemStoreDefect *defect)
{
	PublicationDesc published;

	RelationBuildPublicationDesc(rel, &published);
	if (!published.pubactions.pubupdate)
		return true;
	if (!published.rf_valid_for_update)
		return is_defect(defect, ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
						 "A publication of the table filters rows by a column that is not in its replica identity.",
						 "Set REPLICA IDENTITY FULL with ALTER TABLE, or change the publication.");
	if (!published.cols_valid_for_update)
		return is_defect(defect, ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
						 "A publication of the table leaves out a column of its replica identity.",
						 "Change the publication, or the table's replica identity.");
	if (rel->rd_rel->relreplident != REPLICA_IDENTITY_FULL &&
		!OidIsValid(RelationGetReplicaIndex(rel)))
		return is_defect(defect, ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
						 "The table is published, but has no replica identity, so that its rows cannot be updated.",
						 "Set REPLICA IDENTITY with ALTER TABLE.");
	return true;
}

/*
 * Is the table a store?  See the head of this file.  The caller holds a lock
 * on it.  *pkey is the OID of the primary key's index.
 */
static bool
check_store(Relation rel, Oid *pkey, IdemStoreDefect *defect)
{
	if (!has_store_kind(rel, defect))
		return false;
	if (idem_is_distributed(rel))
		return is_defect(defect, ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
						 "A store must not be distributed by another extension: its rows would not be where pg_idem reads and writes them.",
						 "Make it a plain table again, or use another store.");
	if (!has_store_triggers(rel, defect))
		return false;
	if (rel->rd_rules != NULL)
		return is_defect(defect, ERRCODE_FEATURE_NOT_SUPPORTED,
						 "A store must not have rules.", NULL);
	if (!has_store_constraints(rel, defect))
		return false;
	if (rel->rd_rel->relrowsecurity && rel->rd_rel->relforcerowsecurity)
		return is_defect(defect, ERRCODE_FEATURE_NOT_SUPPORTED,
						 "A store must not have FORCE ROW LEVEL SECURITY.",
						 "Row-level security without FORCE is allowed; it holds for direct access to the table.");
	return has_store_indexes(rel, pkey, defect) &&
		is_replicated_well(rel, defect);
}

/* The same, once until something changes */
static bool
check_store_once(Relation rel, Oid *pkey, IdemStoreDefect *defect)
{
	CheckedStore *checked = lookup_checked_store(RelationGetRelid(rel));

	if (!checked->valid || !OidIsValid(checked->pkey))
	{
		/* an invalidation during the check, or its failure, voids it */
		checked->valid = true;
		checked->pkey = InvalidOid;
		if (!check_store(rel, pkey, defect))
			return false;
		checked->pkey = *pkey;
	}
	*pkey = checked->pkey;
	return true;
}

/*
 * May this table be used as a store?  If not, *defect says why; no error is
 * thrown over the table, whatever it is.  The caller holds a lock on it,
 * which has let in every invalidation that matters.
 */
bool
idem_is_store(Relation rel, IdemStoreDefect *defect)
{
	Oid			pkey;

	return check_store_once(rel, &pkey, defect);
}

/*
 * The OID of the primary key's index of a table that may be used as a store;
 * an error for any other.
 */
Oid
idem_store_primary_key(Relation rel)
{
	Oid			pkey;
	IdemStoreDefect defect;

	if (!check_store_once(rel, &pkey, &defect))
		ereport(ERROR,
				(errcode(defect.sqlstate),
				 errmsg("relation \"%s\" cannot be a store of idempotency keys",
						RelationGetRelationName(rel)),
				 errdetail("%s", defect.detail),
				 defect.hint != NULL ? errhint("%s", defect.hint) : 0));
	return pkey;
}
