# What "make installcheck" can run in the server that PGHOST and so on name, and
# as this user.  What it cannot is said, a line for each reason.

NEEDS_PRELOAD = budget breaker stats circuit preload
NEEDS_PREPARED = prepared infinite

SERVER_HAS := $(shell test/server-has)
ifeq ($(filter server,$(SERVER_HAS)),)
$(error no server answers; set PGHOST, PGPORT and PGUSER as for psql)
endif
ifeq ($(filter preload,$(SERVER_HAS)),)
$(info not run: $(NEEDS_PRELOAD) (pg_idem is not in shared_preload_libraries))
REGRESS := $(filter-out $(NEEDS_PRELOAD),$(REGRESS))
endif
ifeq ($(filter prepared,$(SERVER_HAS)),)
$(info not run: $(NEEDS_PREPARED) (max_prepared_transactions is 0))
REGRESS := $(filter-out $(NEEDS_PREPARED),$(REGRESS))
endif

ifeq ($(shell id -u),0)
$(info not run: test/t (the servers that these tests start refuse root))
TAP_TESTS =
else ifneq ($(shell perl -MIPC::Run -MDBD::Pg -e 'print "all"' 2>/dev/null),all)
$(info not run: test/t (needs Perl's IPC::Run and DBD::Pg))
TAP_TESTS =
endif

REGRESS := server $(REGRESS) server-end
ISOLATION := server $(ISOLATION) server-end

# A run that broke off has left its databases as templates, which nobody drops.
installcheck: no-templates
.PHONY: no-templates
no-templates:
	@for db in contrib_regression isolation_regression; do \
		psql -XAtq -d postgres -c "ALTER DATABASE $$db IS_TEMPLATE false" \
			>/dev/null 2>&1 || true; \
	done
