/*-------------------------------------------------------------------------
 *
 * timespan.h
 *	  Spans of time: from a start to an end, and in microseconds.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#ifndef PG_IDEM_TIMESPAN_H
#define PG_IDEM_TIMESPAN_H

#include "datatype/timestamp.h"

extern TimestampTz idem_time_after(TimestampTz start, const Interval *span,
								   const char *what);
extern TimestampTz idem_time_not_before(TimestampTz start,
										const Interval *span,
										const char *what);
extern int64 idem_interval_usecs(const Interval *span, const char *what);
extern int64 idem_interval_seconds(const Interval *span);
extern Datum idem_usecs_to_interval(int64 usecs);
extern int64 idem_add_usecs(int64 a, int64 b);
extern int64 idem_multiply_usecs(int64 a, int64 b);

#endif							/* PG_IDEM_TIMESPAN_H */
