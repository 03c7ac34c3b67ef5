/*-------------------------------------------------------------------------
 *
 * shim.h
 *	  As much of a server as the parsers of src/ need, for the fuzzer.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#ifndef FUZZ_SHIM_H
#define FUZZ_SHIM_H

#include <setjmp.h>

#include "datatype/timestamp.h"
#include "fmgr.h"

/* what GetCurrentTimestamp() returns */
extern TimestampTz shim_now;

/* the header that a Jsonb has, and whether the filter has kept it */
extern const char *shim_header_name;
extern size_t shim_header_len;
extern bool shim_header_kept;

/* where an error goes, and its SQLSTATE */
extern sigjmp_buf shim_on_error;
extern int	shim_sqlstate;

/* Did expression run to its end?  If not, it was an error of the caller's. */
#define SHIM_TRY(expression) \
	(sigsetjmp(shim_on_error, 0) == 0 ? ((void) (expression), true) : \
	 (shim_expect(shim_sqlstate == ERRCODE_INVALID_PARAMETER_VALUE, \
				  "SQLSTATE 22023"), false))

/* A property that must hold; the fuzzer reports the input if it does not. */
extern void shim_expect(bool holds, const char *what);

/* Free all that was allocated. */
extern void shim_free_all(void);

/* Call a function of SQL with one or two texts; NULL is null. */
extern Datum shim_call(PGFunction function, const char *a, const char *b);

#endif							/* FUZZ_SHIM_H */
