/*-------------------------------------------------------------------------
 *
 * inval.h
 *	  One ear for invalidations, for all caches of a backend.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#ifndef PG_IDEM_INVAL_H
#define PG_IDEM_INVAL_H


extern void idem_watch_invalidations(void);

#endif							/* PG_IDEM_INVAL_H */
