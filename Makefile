# pg_idem: see README.md
#
#	make && make install		build and install, as for any extension
#	make installcheck			test it in the running server (PGHOST and so on)
#	make demo|check|bench|storm|model|lint|fuzz|chaos|coverage|ubsan
#								need nothing installed: see test/throwaway

MODULE_big = pg_idem
OBJS = \
	src/admin.o \
	src/after_commit.o \
	src/args.o \
	src/catalog.o \
	src/claim_begin.o \
	src/claim_call.o \
	src/claim_fence.o \
	src/claim_finish.o \
	src/claim_lease.o \
	src/claim_receive.o \
	src/distributed.o \
	src/expire_launcher.o \
	src/expire_shared.o \
	src/expire_sweep.o \
	src/expire_worker.o \
	src/hash.o \
	src/http_date.o \
	src/http_etag.o \
	src/http_headers.o \
	src/http_key.o \
	src/http_problem.o \
	src/inval.o \
	src/outbox.o \
	src/outbox_pick.o \
	src/outbox_table.o \
	src/owner.o \
	src/pg_idem.o \
	src/policy_cache.o \
	src/policy_result.o \
	src/policy_route.o \
	src/policy_service.o \
	src/registry.o \
	src/registry_breaker.o \
	src/registry_budget.o \
	src/registry_stats.o \
	src/retry.o \
	src/store.o \
	src/store_check.o \
	src/timespan.o

EXTENSION = pg_idem
DATA = $(wildcard sql/pg_idem--*.sql)
PGFILEDESC = "pg_idem - idempotency keys inside the caller's transaction"

REGRESS = setup begin finish input utf8 infinite hash store expire routes \
	lease call retry budget breaker stats http natural receive prepared \
	outbox nulls conformance circuit recipes preload
ENCODING = UTF8
NO_LOCALE = 1
ISOLATION = two-begins finish takeover reclaim wait levels serializable \
	foreign-key clock own-claim one-statement new-index routes resume \
	if-match version-guard receive outbox-take outbox-group outbox-fence \
	outbox-redrive
ISOLATION_OPTS = --inputdir=test/isolation
TAP_TESTS = 1
PROVE_TESTS = test/t/*.pl
TEST_MODULE = test/modules/take_slots/take_slots
EXTRA_CLEAN = tmp_check tmp_check_iso output_iso results regression.diffs \
	regression.out log $(TEST_MODULE).o $(TEST_MODULE)$(DLSUFFIX)

PG_CONFIG ?= pg_config
PGXS := $(shell $(PG_CONFIG) --pgxs 2>/dev/null)

# These install what they need themselves, so they must not depend on
# anything that may be missing, PGXS included.
.PHONY: demo check bench storm model lint fuzz chaos coverage ubsan
ifneq ($(filter demo check bench storm model lint fuzz chaos coverage ubsan,$(MAKECMDGOALS)),)
demo check bench storm model lint fuzz chaos coverage ubsan:
	@test/throwaway $@
else ifeq ($(wildcard $(PGXS)),)
$(error "$(PG_CONFIG)" names no PostgreSQL with its server headers; install them (on Debian: postgresql-server-dev-NN) or set PG_CONFIG)
else

# The tests run in the running server, in databases of their own, and what it
# lacks is not run; or in servers of their own (make check), with all that.
ifdef OWN_SERVERS
REGRESS_OPTS = --temp-instance=./tmp_check --temp-config=test/pg_idem.conf
ISOLATION_OPTS += --temp-instance=./tmp_check_iso \
	--temp-config=test/pg_idem.conf
else ifneq ($(filter installcheck,$(MAKECMDGOALS)),)
include test/installcheck.mk
endif

include $(PGXS)

# a library of the TAP tests, which load it from here
ifneq ($(strip $(TAP_TESTS)),)
installcheck: $(TEST_MODULE)$(DLSUFFIX)
endif

$(OBJS): $(wildcard src/*.h)
endif
