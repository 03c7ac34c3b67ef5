/*-------------------------------------------------------------------------
 *
 * after_commit.h
 *	  Log lines that wait for the commit.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#ifndef PG_IDEM_AFTER_COMMIT_H
#define PG_IDEM_AFTER_COMMIT_H


extern void idem_log_after_commit(const char *message, const char *detail);

#endif							/* PG_IDEM_AFTER_COMMIT_H */
