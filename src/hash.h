/*-------------------------------------------------------------------------
 *
 * hash.h
 *	  Fingerprints and other digests, by SHA-256.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#ifndef PG_IDEM_HASH_H
#define PG_IDEM_HASH_H

#include "common/cryptohash.h"
#include "utils/jsonb.h"

extern pg_cryptohash_ctx *idem_digest_begin(void);
extern void idem_digest_add(pg_cryptohash_ctx *ctx, const void *data,
							size_t len);
extern void idem_digest_add_tagged(pg_cryptohash_ctx *ctx, char tag,
								   const char *data, size_t len);
extern bytea *idem_digest_end(pg_cryptohash_ctx *ctx);
extern bytea *idem_hash_of_jsonb(Jsonb *request);

#endif							/* PG_IDEM_HASH_H */
