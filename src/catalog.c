/*-------------------------------------------------------------------------
 *
 * catalog.c
 *	  Finds the extension's own objects and remembers their OIDs.
 *
 * The objects are found as members of the extension: pg_extension gives the
 * extension's OID, pg_depend its members.  No name is looked up in a schema,
 * so neither search_path nor an object planted in another schema can lead
 * anywhere else, and a default store moved to another schema or renamed is
 * still found.
 *
 * The OIDs are kept for the life of the backend, and dropped when
 *	- one of the types is changed or dropped (the hash value is compared, for
 *	  every CREATE TABLE of the database changes types), or
 *	- the default store, a table of policies or the outbox is changed or
 *	  dropped.
 * DROP EXTENSION does both, so OIDs never outlive DROP + CREATE EXTENSION.
 * That the extension is missing is never remembered.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/relation.h"
#include "access/table.h"
#include "catalog/dependency.h"
#include "catalog/indexing.h"
#include "catalog/pg_class.h"
#include "catalog/pg_depend.h"
#include "catalog/pg_enum.h"
#include "catalog/pg_extension.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "commands/extension.h"
#include "miscadmin.h"
#include "storage/lock.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

#include "catalog.h"
#include "inval.h"

static IdemCatalog catalog;
static bool catalog_valid = false;

/* hash values of the types' syscache entries, to tell that one has changed */
static uint32 key_type_hash;
static uint32 claim_type_hash;
static uint32 result_type_hash;
static uint32 state_type_hash;

static const char *const state_label[IDEM_NSTATES] = {
	"in_progress", "completed", "failed"
};

/* what this .so expects of the composite types */
static const Oid key_column_type[Natts_key] = {
	TEXTOID, TEXTOID, TEXTOID, BYTEAOID, INT4OID, TIMESTAMPTZOID,
	TIMESTAMPTZOID, InvalidOid /* idem_state */ , TIMESTAMPTZOID, TEXTOID,
	JSONBOID, INT4OID, JSONBOID, JSONBOID, BYTEAOID, BOOLOID, TIMESTAMPTZOID
};
static const Oid claim_column_type[Natts_claim] = {
	BOOLOID, TEXTOID, INT4OID, JSONBOID, JSONBOID, BYTEAOID, INT4OID,
	TEXTOID, JSONBOID, INTERVALOID, TIMESTAMPTZOID
};
static const Oid result_column_type[Natts_result] = {
	INT4OID, JSONBOID, JSONBOID, BYTEAOID
};

void
idem_catalog_type_changed(uint32 hashvalue)
{
	if (hashvalue == 0 ||
		hashvalue == key_type_hash ||
		hashvalue == claim_type_hash ||
		hashvalue == result_type_hash ||
		hashvalue == state_type_hash)
		catalog_valid = false;
}

void
idem_catalog_relation_changed(Oid relid)
{
	if (!OidIsValid(relid) || relid == catalog.default_store ||
		relid == catalog.routes || relid == catalog.service_policies ||
		relid == catalog.outbox)
		catalog_valid = false;
}

/*
 * Refuse to work with a type whose columns are not the ones that this
 * library was compiled for: the .so of one version with the SQL of another.
 * Returns false if the type was dropped meanwhile.
 */
static bool
check_columns(Oid type, const Oid *expected, int natts, Oid state_type)
{
	Relation	rel = try_relation_open(get_typ_typrelid(type),
										AccessShareLock);
	TupleDesc	desc;
	bool		same;

	if (rel == NULL)
		return false;
	desc = RelationGetDescr(rel);
	same = (desc->natts == natts);

	for (int i = 0; same && i < natts; i++)
	{
		Form_pg_attribute att = TupleDescAttr(desc, i);
		Oid			want = expected[i];

		if (!OidIsValid(want))
			want = state_type;
		same = (!att->attisdropped && att->atttypid == want);
	}
	relation_close(rel, AccessShareLock);

	if (!same)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("type \"%s\" is not the one that this version of the pg_idem library works with",
						format_type_be(type)),
				 errhint("Run ALTER EXTENSION pg_idem UPDATE, or install the library of the extension's version.")));
	return true;
}

/* OID of the label of idem_state with this name */
static Oid
state_label_oid(Oid state_type, const char *label)
{
	Oid			oid = GetSysCacheOid2(ENUMTYPOIDNAME, Anum_pg_enum_oid,
									  ObjectIdGetDatum(state_type),
									  CStringGetDatum(label));

	if (!OidIsValid(oid))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("type \"%s\" has no label \"%s\"",
						format_type_be(state_type), label),
				 errhint("Run ALTER EXTENSION pg_idem UPDATE, or install the library of the extension's version.")));
	return oid;
}

/* OIDs of the extension's members of one class, from pg_depend */
static List *
extension_members(Oid extension, Oid classid)
{
	Relation	depend = table_open(DependRelationId, AccessShareLock);
	ScanKeyData key[2];
	SysScanDesc scan;
	HeapTuple	tuple;
	List	   *members = NIL;

	ScanKeyInit(&key[0], Anum_pg_depend_refclassid, BTEqualStrategyNumber,
				F_OIDEQ, ObjectIdGetDatum(ExtensionRelationId));
	ScanKeyInit(&key[1], Anum_pg_depend_refobjid, BTEqualStrategyNumber,
				F_OIDEQ, ObjectIdGetDatum(extension));
	scan = systable_beginscan(depend, DependReferenceIndexId, true,
							  NULL, 2, key);
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		Form_pg_depend dep = (Form_pg_depend) GETSTRUCT(tuple);

		if (dep->deptype == DEPENDENCY_EXTENSION && dep->objsubid == 0 &&
			dep->classid == classid)
			members = lappend_oid(members, dep->objid);
	}
	systable_endscan(scan);
	table_close(depend, AccessShareLock);
	return members;
}

/* Find the types among the extension's members, by name. */
static void
find_types(IdemCatalog *found)
{
	ListCell   *lc;

	foreach(lc, extension_members(found->extension, TypeRelationId))
	{
		Oid			type = lfirst_oid(lc);
		HeapTuple	tuple = SearchSysCache1(TYPEOID, ObjectIdGetDatum(type));
		const char *name;

		if (!HeapTupleIsValid(tuple))
			continue;
		name = NameStr(((Form_pg_type) GETSTRUCT(tuple))->typname);
		if (strcmp(name, "idempotency_key") == 0)
			found->key_type = type;
		else if (strcmp(name, "idem_claim") == 0)
			found->claim_type = type;
		else if (strcmp(name, "idem_result") == 0)
			found->result_type = type;
		else if (strcmp(name, "idem_state") == 0)
			found->state_type = type;
		ReleaseSysCache(tuple);
	}
}

/* The row type that a typed table was made OF, or InvalidOid */
static Oid
typed_table_of(Oid relid)
{
	HeapTuple	tuple = SearchSysCache1(RELOID, ObjectIdGetDatum(relid));
	Oid			type;

	if (!HeapTupleIsValid(tuple))
		return InvalidOid;
	type = ((Form_pg_class) GETSTRUCT(tuple))->reloftype;
	ReleaseSysCache(tuple);
	return type;
}

/* Find the tables: the default store by its type, the others by name. */
static void
find_tables(IdemCatalog *found)
{
	ListCell   *lc;

	foreach(lc, extension_members(found->extension, RelationRelationId))
	{
		Oid			relid = lfirst_oid(lc);
		const char *name = get_rel_name(relid);

		if (typed_table_of(relid) == found->key_type)
			found->default_store = relid;
		else if (name != NULL && strcmp(name, "idem_route_policies") == 0)
			found->routes = relid;
		else if (name != NULL && strcmp(name, "idem_service_policies") == 0)
			found->service_policies = relid;
		else if (name != NULL && strcmp(name, "idem_outbox") == 0)
			found->outbox = relid;
	}
}

/*
 * Fill the cache.  Returns false if the extension, or one of the objects
 * that every call needs, is not there (not yet, while CREATE EXTENSION runs).
 */
static bool
load_catalog(void)
{
	IdemCatalog found;

	idem_watch_invalidations();

	memset(&found, 0, sizeof(found));
	found.extension = get_extension_oid("pg_idem", true);
	if (!OidIsValid(found.extension))
		return false;
	find_types(&found);
	if (!OidIsValid(found.key_type) || !OidIsValid(found.claim_type) ||
		!OidIsValid(found.result_type) || !OidIsValid(found.state_type))
		return false;
	find_tables(&found);
	if (!OidIsValid(found.routes))
		return false;

	if (!check_columns(found.key_type, key_column_type, Natts_key,
					   found.state_type) ||
		!check_columns(found.claim_type, claim_column_type, Natts_claim,
					   found.state_type) ||
		!check_columns(found.result_type, result_column_type, Natts_result,
					   found.state_type))
	{
		/* dropped while we waited; perhaps created anew by then */
		if (get_extension_oid("pg_idem", true) == found.extension)
			return false;
		return load_catalog();
	}
	for (int i = 0; i < IDEM_NSTATES; i++)
		found.state[i] = state_label_oid(found.state_type, state_label[i]);

	key_type_hash = GetSysCacheHashValue1(TYPEOID,
										  ObjectIdGetDatum(found.key_type));
	claim_type_hash = GetSysCacheHashValue1(TYPEOID,
											ObjectIdGetDatum(found.claim_type));
	result_type_hash = GetSysCacheHashValue1(TYPEOID,
											 ObjectIdGetDatum(found.result_type));
	state_type_hash = GetSysCacheHashValue1(TYPEOID,
											ObjectIdGetDatum(found.state_type));

	/*
	 * The look-ups above may themselves have taken in an invalidation of what
	 * they found.  Whoever changes these objects holds a lock that a caller
	 * meets when it opens its store, and the callbacks then fire; so it is
	 * enough to be valid from here on.
	 */
	catalog = found;

	/* that something is missing is never remembered */
	catalog_valid = OidIsValid(found.default_store) &&
		OidIsValid(found.service_policies) && OidIsValid(found.outbox);
	return true;
}

/*
 * The extension's objects.  An error where the extension is not installed in
 * this database.
 */
const IdemCatalog *
idem_catalog(void)
{
	if (!catalog_valid && !load_catalog())
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("extension \"pg_idem\" is not installed in this database"),
				 errhint("Run CREATE EXTENSION pg_idem.")));
	return &catalog;
}

/* Is the extension installed in this database? */
bool
idem_catalog_exists(void)
{
	return catalog_valid || load_catalog();
}

/*
 * Open one of the extension's tables, named by where idem_catalog() has its
 * OID.  If the extension was dropped and created again while we waited for
 * the lock, the OID that we had is void and the catalog knows the new one.
 * NULL if there is none.
 */
Relation
idem_open_member(const Oid *member, LOCKMODE lockmode)
{
	Relation	rel = NULL;
	Oid			tried = InvalidOid;

	while (rel == NULL)
	{
		(void) idem_catalog();	/* brings *member up to date */
		if (*member == tried)
			break;
		tried = *member;
		if (OidIsValid(tried))
			rel = try_table_open(tried, lockmode);
	}
	return rel;
}

/*
 * For the worker: lock the extension against DROP EXTENSION until the
 * transaction ends, without waiting.  False if it is not there, or somebody
 * is dropping it.
 */
bool
idem_lock_extension(void)
{
	Oid			extension = get_extension_oid("pg_idem", true);
	LOCKTAG		tag;

	if (!OidIsValid(extension))
		return false;
	SET_LOCKTAG_OBJECT(tag, MyDatabaseId, ExtensionRelationId, extension, 0);
	if (LockAcquire(&tag, AccessShareLock, false, true) ==
		LOCKACQUIRE_NOT_AVAIL)
		return false;
	AcceptInvalidationMessages();
	return get_extension_oid("pg_idem", true) == extension;
}

/*
 * For the worker, which could not lock the extension: is some transaction,
 * running or prepared, about to create it, or to drop it?
 */
bool
idem_extension_is_changing(void)
{
	Relation	rel = table_open(ExtensionRelationId, AccessShareLock);
	SnapshotData dirty;
	ScanKeyData key;
	SysScanDesc scan;
	bool		found;

	InitDirtySnapshot(dirty);
	ScanKeyInit(&key, Anum_pg_extension_extname, BTEqualStrategyNumber,
				F_NAMEEQ, CStringGetDatum("pg_idem"));
	scan = systable_beginscan(rel, ExtensionNameIndexId, true, &dirty, 1,
							  &key);
	found = HeapTupleIsValid(systable_getnext(scan));
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	return found;
}

/* OIDs of the extension's functions of this name, one at least */
List *
idem_member_functions(const char *name)
{
	List	   *found = NIL;
	ListCell   *lc;

	foreach(lc, extension_members(idem_catalog()->extension,
								  ProcedureRelationId))
	{
		char	   *member = get_func_name(lfirst_oid(lc));

		if (member != NULL && strcmp(member, name) == 0)
			found = lappend_oid(found, lfirst_oid(lc));
	}
	if (found == NIL)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_FUNCTION),
				 errmsg("extension \"pg_idem\" has no function \"%s\"", name),
				 errhint("Run ALTER EXTENSION pg_idem UPDATE, or install the library of the extension's version.")));
	return found;
}

/*
 * Convert between a state and its enum label.  The catalog must have been
 * loaded by idem_catalog() in this call.
 */
IdemState
idem_state_from_datum(Datum label)
{
	for (int i = 0; i < IDEM_NSTATES; i++)
	{
		if (catalog.state[i] == DatumGetObjectId(label))
			return (IdemState) i;
	}
	ereport(ERROR,
			(errcode(ERRCODE_DATA_CORRUPTED),
			 errmsg("unknown state in an idempotency key"),
			 errhint("Run ALTER EXTENSION pg_idem UPDATE, or install the library of the extension's version.")));
	return IDEM_IN_PROGRESS;	/* keep the compiler quiet */
}

Datum
idem_state_to_datum(IdemState state)
{
	return ObjectIdGetDatum(catalog.state[state]);
}

/*
 * OIDs of all tables of type idempotency_key in this database, the default
 * store first.  Nothing is locked: each may be gone by the time it is used.
 */
List *
idem_stores(void)
{
	const IdemCatalog *cat = idem_catalog();
	Relation	pg_class = table_open(RelationRelationId, AccessShareLock);
	SysScanDesc scan;
	HeapTuple	tuple;
	ScanKeyData key;
	List	   *stores = NIL;

	ScanKeyInit(&key, Anum_pg_class_reloftype, BTEqualStrategyNumber,
				F_OIDEQ, ObjectIdGetDatum(cat->key_type));
	scan = systable_beginscan(pg_class, InvalidOid, false, NULL, 1, &key);
	while (HeapTupleIsValid(tuple = systable_getnext(scan)))
	{
		Oid			relid = ((Form_pg_class) GETSTRUCT(tuple))->oid;

		if (relid == cat->default_store)
			stores = lcons_oid(relid, stores);
		else
			stores = lappend_oid(stores, relid);
	}
	systable_endscan(scan);
	table_close(pg_class, AccessShareLock);
	return stores;
}

/* A table's name for use in SQL, schema and all */
char *
idem_qualified_name(Relation rel)
{
	return quote_qualified_identifier(get_namespace_name(RelationGetNamespace(rel)),
									  RelationGetRelationName(rel));
}

/* The schema that the extension's types and functions are in. */
char *
idem_extension_schema(void)
{
	const IdemCatalog *cat = idem_catalog();
	HeapTuple	tuple = SearchSysCache1(TYPEOID,
										ObjectIdGetDatum(cat->key_type));
	char	   *schema = NULL;

	if (HeapTupleIsValid(tuple))
	{
		schema = get_namespace_name(((Form_pg_type) GETSTRUCT(tuple))->typnamespace);
		ReleaseSysCache(tuple);
	}
	if (schema == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("extension \"pg_idem\" is not installed in this database")));
	return schema;
}
