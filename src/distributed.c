/*-------------------------------------------------------------------------
 *
 * distributed.c
 *	  Is a table empty here because another extension keeps its rows
 *	  elsewhere?
 *
 * Citus leaves of a table that it has distributed, or made a reference table,
 * an empty shell, and sends statements on it to where the rows are.  Rows that
 * are read and written without a statement would pass that by: a key claimed
 * on one node would be free on the next.  So such a table has to be refused.
 *
 * Citus has a row for each of its tables in pg_catalog.pg_dist_partition, by
 * the OID in column logicalrelid.  The table is looked up by its name, for it
 * belongs to nobody that we could link to; where there is none, nothing more
 * is done.  When a row comes or goes, Citus invalidates the relcache entry of
 * the table that it is about, so what was found may be kept until then.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/relation.h"
#include "catalog/pg_namespace.h"
#include "catalog/pg_type.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"

#include "catalog.h"

/* Column logicalrelid, if this is a table, as it is with Citus */
static AttrNumber
oid_column(Relation partitions)
{
	AttrNumber	attno = get_attnum(RelationGetRelid(partitions),
								   "logicalrelid");
	Oid			type = attno == InvalidAttrNumber ? InvalidOid :
		get_atttype(RelationGetRelid(partitions), attno);

	if (partitions->rd_rel->relkind != RELKIND_RELATION ||
		(type != REGCLASSOID && type != OIDOID))
		return InvalidAttrNumber;
	return attno;
}

static bool
has_row(Relation partitions, AttrNumber attno, Oid relid)
{
	ScanKeyData key;
	SysScanDesc scan;
	bool		found;

	ScanKeyInit(&key, attno, BTEqualStrategyNumber, F_OIDEQ,
				ObjectIdGetDatum(relid));
	scan = systable_beginscan(partitions, InvalidOid, false, NULL, 1, &key);
	found = HeapTupleIsValid(systable_getnext(scan));
	systable_endscan(scan);
	return found;
}

bool
idem_is_distributed(Relation rel)
{
	Oid			catalog = get_relname_relid("pg_dist_partition",
											PG_CATALOG_NAMESPACE);
	Relation	partitions;
	AttrNumber	attno;
	bool		found = false;

	if (!OidIsValid(catalog))
		return false;
	partitions = try_relation_open(catalog, AccessShareLock);
	if (partitions == NULL)
		return false;
	attno = oid_column(partitions);
	if (attno != InvalidAttrNumber)
		found = has_row(partitions, attno, RelationGetRelid(rel));
	relation_close(partitions, AccessShareLock);
	return found;
}

/* Refuse a table of the extension's, other than a store. */
void
idem_refuse_distributed(Relation rel)
{
	if (idem_is_distributed(rel))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("table \"%s\" is distributed by another extension",
						RelationGetRelationName(rel)),
				 errdetail("Its rows are not where pg_idem reads and writes them."),
				 errhint("Make it a plain table again.")));
}
