/*-------------------------------------------------------------------------
 *
 * retry.h
 *	  Backoff, for others than its SQL functions.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#ifndef PG_IDEM_RETRY_H
#define PG_IDEM_RETRY_H


extern int64 idem_exponential(int64 base, int64 cap, int32 n);
extern int64 idem_full_jitter(int64 base, int64 cap, int32 retry);

#endif							/* PG_IDEM_RETRY_H */
