/*-------------------------------------------------------------------------
 *
 * pg_idem.c
 *	  Module load: settings, shared memory, the launcher's registration.
 *
 * The library works when it is loaded on first use.  The background launcher
 * and what is kept in shared memory need it in shared_preload_libraries.
 *
 * Copyright (c) 2026, pg_idem contributors
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <float.h>
#include <limits.h>

#include "miscadmin.h"
#include "utils/guc.h"

#include "pg_idem.h"
#include "expire.h"
#include "http.h"
#include "policy.h"
#include "registry.h"

PG_MODULE_MAGIC_EXT(.name = "pg_idem", .version = "1.0");

int			idem_ttl = 24 * 60 * 60;
int			idem_lease = 60 * 1000;
int			idem_wait = 0;
int			idem_max_attempts = 10;
int			idem_on_lost_lease = IDEM_LOST_RESUME;
int			idem_keep = IDEM_KEEP_FINAL;
char	   *idem_replay_headers = NULL;
int			idem_max_response_size = 1024 * 1024;
char	   *idem_tenant = NULL;
bool		idem_tenant_is_role = false;
bool		idem_preloaded = false;
double		idem_retry_ratio = 0.2;
double		idem_retry_min_per_second = 10;
int			idem_max_tracked = 1000;
bool		idem_expire_enabled = true;
int			idem_expire_naptime = 10;
int			idem_expire_batch = 1000;
int			idem_outbox_max_attempts = 25;
int			idem_outbox_dead_ttl = 30 * 24 * 60 * 60;
bool		idem_outbox_notify = true;

static const struct config_enum_entry on_lost_lease_options[] = {
	{"resume", IDEM_LOST_RESUME, false},
	{"hold", IDEM_LOST_HOLD, false},
	{NULL, 0, false}
};

static const struct config_enum_entry keep_options[] = {
	{"final", IDEM_KEEP_FINAL, false},
	{"success", IDEM_KEEP_SUCCESS, false},
	{"all", IDEM_KEEP_ALL, false},
	{NULL, 0, false}
};

PGDLLEXPORT void _PG_init(void);

static void
define_claim_settings(void)
{
	DefineCustomIntVariable("pg_idem.ttl",
							"How long a key is remembered.",
							"After that time a request with the same key is a new request.",
							&idem_ttl,
							24 * 60 * 60, 1, INT_MAX,
							PGC_USERSET, GUC_UNIT_S,
							NULL, NULL, NULL);

	DefineCustomIntVariable("pg_idem.lease",
							"How long a claim committed in progress is left to its owner.",
							"After that time another request may take it over.",
							&idem_lease,
							60 * 1000, 1, INT_MAX,
							PGC_USERSET, GUC_UNIT_MS,
							NULL, NULL, NULL);

	DefineCustomIntVariable("pg_idem.wait",
							"How long idem_begin and idem_receive wait for another that has the key.",
							"Zero answers at once.",
							&idem_wait,
							0, 0, INT_MAX,
							PGC_USERSET, GUC_UNIT_MS,
							NULL, NULL, NULL);

	DefineCustomIntVariable("pg_idem.max_attempts",
							"How many times a key may be executed.",
							"After that the last failure is replayed; a claim whose lease is over then is left for a person to decide.",
							&idem_max_attempts,
							10, 1, INT_MAX,
							PGC_USERSET, 0,
							NULL, NULL, NULL);

	DefineCustomEnumVariable("pg_idem.on_lost_lease",
							 "What becomes of a claim whose lease is over.",
							 "\"resume\" lets the next request take it over, \"hold\" keeps it for a person to decide. The setting of whoever asks counts; prefer table idem_route_policies.",
							 &idem_on_lost_lease,
							 IDEM_LOST_RESUME, on_lost_lease_options,
							 PGC_USERSET, 0,
							 NULL, NULL, NULL);

	DefineCustomEnumVariable("pg_idem.keep",
							 "Which results are final, and replayed until the key expires.",
							 "\"final\": 2xx, 3xx and most of 4xx; \"success\": 2xx and 3xx; \"all\": everything.",
							 &idem_keep,
							 IDEM_KEEP_FINAL, keep_options,
							 PGC_USERSET, 0,
							 NULL, NULL, NULL);

	DefineCustomStringVariable("pg_idem.replay_headers",
							   "Which response headers are stored and replayed.",
							   "Credentials, hop-by-hop headers and Date never are, even if they are listed.",
							   &idem_replay_headers,
							   "content-type, content-language, content-location, location, etag, last-modified, link, cache-control, retry-after",
							   PGC_SUSET, GUC_LIST_INPUT,
							   idem_check_replay_headers, NULL, NULL);

	DefineCustomIntVariable("pg_idem.max_response_size",
							"Largest result that is stored, before compression.",
							"The work of a request with a larger one commits, and its replays say that the result is gone.",
							&idem_max_response_size,
							1024 * 1024, 0, INT_MAX,
							PGC_SUSET, GUC_UNIT_BYTE,
							NULL, NULL, NULL);

	DefineCustomStringVariable("pg_idem.tenant",
							   "Tenant of calls that name none.",
							   "Keys of different tenants are different keys.",
							   &idem_tenant,
							   "",
							   PGC_USERSET, 0,
							   NULL, NULL, NULL);

	DefineCustomBoolVariable("pg_idem.tenant_is_role",
							 "Makes the current role the tenant, whatever the caller says.",
							 NULL,
							 &idem_tenant_is_role,
							 false,
							 PGC_SUSET, 0,
							 NULL, NULL, NULL);
}

static void
define_retry_settings(void)
{
	DefineCustomRealVariable("pg_idem.retry_ratio",
							 "Retries that a retry budget allows for each request.",
							 "Those of pg_idem.retry_min_per_second come on top.",
							 &idem_retry_ratio,
							 0.2, 0, DBL_MAX,
							 PGC_USERSET, 0,
							 NULL, NULL, NULL);

	DefineCustomRealVariable("pg_idem.retry_min_per_second",
							 "Retries per second that a retry budget allows in any case.",
							 NULL,
							 &idem_retry_min_per_second,
							 10, 0, DBL_MAX,
							 PGC_USERSET, 0,
							 NULL, NULL, NULL);

	/*
	 * A setting of the postmaster's can be made only while libraries are
	 * preloaded.  Loaded later, the library knows it all the same, lest it
	 * complain of a line in postgresql.conf; it has no effect then.
	 */
	DefineCustomIntVariable("pg_idem.max_tracked",
							"Most routes and services that are kept in shared memory.",
							"Those that have not been used for the longest time make room for others.",
							&idem_max_tracked,
							1000, 1, 100000,
							process_shared_preload_libraries_in_progress ?
							PGC_POSTMASTER : PGC_SIGHUP, 0,
							NULL, NULL, NULL);
}

static void
define_expiry_settings(void)
{
	DefineCustomBoolVariable("pg_idem.expire",
							 "Lets background workers remove expired keys.",
							 NULL,
							 &idem_expire_enabled,
							 true,
							 PGC_SIGHUP, 0,
							 NULL, NULL, NULL);

	DefineCustomIntVariable("pg_idem.expire_naptime",
							"Time between two sweeps of a database.",
							"Databases without the extension, or with keys that cannot be removed, are looked at more rarely.",
							&idem_expire_naptime,
							10, 1, INT_MAX / 1000,
							PGC_SIGHUP, GUC_UNIT_S,
							NULL, NULL, NULL);

	DefineCustomIntVariable("pg_idem.expire_batch",
							"Most keys that one transaction of a sweep removes.",
							NULL,
							&idem_expire_batch,
							1000, 1, 1000000,
							PGC_SIGHUP, 0,
							NULL, NULL, NULL);
}

static void
define_outbox_settings(void)
{
	DefineCustomIntVariable("pg_idem.outbox_max_attempts",
							"How many times a message is tried that was published without a number of its own.",
							"After that it is a dead letter.",
							&idem_outbox_max_attempts,
							25, 1, INT_MAX,
							PGC_USERSET, 0,
							NULL, NULL, NULL);

	DefineCustomIntVariable("pg_idem.outbox_dead_ttl",
							"How long dead letters are kept.",
							"Zero keeps them until somebody removes them.",
							&idem_outbox_dead_ttl,
							30 * 24 * 60 * 60, 0, INT_MAX,
							PGC_SIGHUP, GUC_UNIT_S,
							NULL, NULL, NULL);

	DefineCustomBoolVariable("pg_idem.outbox_notify",
							 "Wakes relays by NOTIFY when a transaction that has published commits.",
							 "The server lets one such transaction commit at a time.",
							 &idem_outbox_notify,
							 true,
							 PGC_USERSET, 0,
							 NULL, NULL, NULL);
}

void
_PG_init(void)
{
	idem_preloaded = process_shared_preload_libraries_in_progress;
	define_claim_settings();
	define_retry_settings();
	define_expiry_settings();
	define_outbox_settings();
	MarkGUCPrefixReserved("pg_idem");

	if (!process_shared_preload_libraries_in_progress)
		return;
	idem_registry_init();

	/* pg_upgrade needs the settings, and must meet no worker */
	if (!IsBinaryUpgrade)
		idem_launcher_init();
}
