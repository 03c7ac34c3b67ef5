--
-- PRELOAD
-- What of the other files needs the library in shared_preload_libraries.
--
SELECT name, boot_val, unit, context, min_val, max_val
FROM pg_settings WHERE name = 'pg_idem.max_tracked';

-- the tenant is the role, whatever the caller says
CREATE ROLE regress_idem_app;
SELECT idem_grant('regress_idem_app');
SET pg_idem.tenant_is_role = on;
SET ROLE regress_idem_app;
SET pg_idem.tenant = 'other';
SELECT outcome FROM idem_begin('grant', 'r', NULL, tenant => '');
SELECT outcome FROM idem_begin('grant', 'r', NULL, tenant => 'another');
RESET ROLE;
RESET pg_idem.tenant;
RESET pg_idem.tenant_is_role;
SELECT tenant, state FROM idempotency_keys ORDER BY tenant;
SET pg_idem.tenant_is_role = on;
SET ROLE regress_idem_app;
SELECT idem_receive('billing', 'm1'), idem_receive('billing', 'm1', tenant => 'acme');
SELECT idem_receive_batch('billing', ARRAY['m1', 'm2'], tenant => 'acme');
RESET ROLE;
RESET pg_idem.tenant_is_role;
SELECT key, tenant FROM idempotency_keys WHERE route = 'billing' ORDER BY key;
SELECT idem_revoke('regress_idem_app');
DROP ROLE regress_idem_app;
DELETE FROM idempotency_keys;

-- a message is counted as the route that it is
SELECT idem_stats_reset();
SELECT idem_receive('counted', 'a'), idem_receive('counted', 'a'), idem_receive_batch('counted', ARRAY['a', 'b', 'c']);
SELECT outcome FROM idem_begin('claim', 'counted', NULL);
SELECT idem_receive('counted', 'claim');
SELECT started, replayed, in_progress FROM idem_stat_routes WHERE route = 'counted';
DELETE FROM idempotency_keys;

-- a table of policies without its key, and with nothing in its rows
BEGIN;
ALTER TABLE idem_service_policies DROP CONSTRAINT idem_service_policies_pkey,
	ALTER service DROP NOT NULL;
INSERT INTO idem_service_policies (service) VALUES (NULL), (NULL), ('bare');
SELECT idem_breaker_allow('bare'), idem_budget_allow('bare', false);
ROLLBACK;
