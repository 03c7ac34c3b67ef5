/*-------------------------------------------------------------------------
 *
 * row.h
 *	  Columns of a row in a slot.
 *
 * A table is its owner's to change, so a value is looked at for NULL first.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#ifndef PG_IDEM_ROW_H
#define PG_IDEM_ROW_H

#include "executor/tuptable.h"

pg_noreturn extern void idem_refuse_null_in_row(TupleTableSlot *row,
												AttrNumber attno) pg_attribute_cold;

static inline bool
idem_row_isnull(TupleTableSlot *row, AttrNumber attno)
{
	return row->tts_isnull[attno - 1];
}

/* The value of a column, where NULL is an error */
static inline Datum
idem_row_datum(TupleTableSlot *row, AttrNumber attno)
{
	if (unlikely(idem_row_isnull(row, attno)))
		idem_refuse_null_in_row(row, attno);
	return row->tts_values[attno - 1];
}

/* A text column of the row found */
static inline text *
idem_row_text(TupleTableSlot *row, AttrNumber attno)
{
	return DatumGetTextPP(idem_row_datum(row, attno));
}

static inline void
idem_set_column(TupleTableSlot *row, AttrNumber attno, Datum value)
{
	row->tts_values[attno - 1] = value;
	row->tts_isnull[attno - 1] = false;
}

static inline void
idem_set_column_or_null(TupleTableSlot *row, AttrNumber attno, const void *value)
{
	row->tts_values[attno - 1] = PointerGetDatum(value);
	row->tts_isnull[attno - 1] = (value == NULL);
}

#endif							/* PG_IDEM_ROW_H */
