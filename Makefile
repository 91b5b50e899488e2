# Needs python3 (3.11 or later) with pip and venv; everything else is installed into .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One requirements line per purpose, so that constraints.txt is made from exactly what set-up installs.
EVERYTHING := -e .[all,testing] --group dev
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# It looks at the packages of the first python on the PATH, whatever else it is told.
PYRIGHT := PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pyright
PINNED := -c constraints.txt --build-constraint constraints.txt
# Three more than there are cores: many tests wait for a server, a lease or a time-out to end.
WORKERS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 3)
# Percent of the lines and branches that the tests of `make test` must reach.
FLOOR := 97

# `make demo SECONDS=10`. Some shells treat a variable of that name as a clock: keep it out of recipes.
SECONDS ?=
unexport SECONDS
# `make chaos STORE=redis SEED=1`: which database, and which faults; others are pgbouncer, mariadb, sqlite and redis-stream.
STORE ?= postgres
SEED ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help: ## Say what can be made.
	@grep -hE '^[a-z][a-z-]*:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

.PHONY: setup
setup: $(VENV)/.full ## Install everything that the tests need (implied by the targets below).

.PHONY: demo
demo: $(VENV)/.runtime ## Show postroom at work; SECONDS=10 says for how long.
	$(BIN)/postroom demo $(if $(SECONDS),--seconds $(SECONDS))

.PHONY: check
check: setup ## Lint, formatting, types and the direction of imports.
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(PYRIGHT)
	$(PYRIGHT) --verifytypes postroom --ignoreexternal
	$(BIN)/lint-imports

.PHONY: quick
quick: setup ## Test the kernel, the stores in memory and SQLite, and the contract on PostgreSQL: under three minutes.
	$(BIN)/pytest --tier quick -n $(WORKERS) --dist worksteal -q

.PHONY: test
test: check ## Check, then test on one server of each kind with coverage: what CI runs, under twelve minutes.
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest --tier test -n $(WORKERS) --dist worksteal
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --fail-under=$(FLOOR)

.PHONY: prove
prove: setup ## Prove everything, on every server and Python there is: under 75 minutes; ONLY=postgres-13,python a part.
	ONLY=$(ONLY) $(BIN)/python -m scripts.prove

.PHONY: prove-tests
prove-tests: setup # without coverage, which `make test` measures and which takes half as much processor time again
	$(BIN)/pytest --tier prove -n $(WORKERS) --dist worksteal

.PHONY: mutate
mutate: setup ## Change one line at a time and see which changes no test notices; SEED=7 COUNT=100 chooses them.
	scripts/mutate; fixed=$$?; scripts/mutate --seed $(or $(SEED),7) $(if $(COUNT),--count $(COUNT)) && exit $$fixed

.PHONY: chaos
chaos: setup ## Break things under load and check every promise; SECONDS=60 STORE=postgres SEED=1 say how.
	@$(BIN)/python -m chaos --store $(STORE) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED))

.PHONY: isolation
isolation: setup ## Measure healthy messages beside destinations that are down, on every store; SECONDS=30 STORE=redis say how.
	@$(BIN)/python -m tests.isolation.scenario $(if $(SECONDS),--seconds $(SECONDS)) $(if $(filter command line,$(origin STORE)),--store $(STORE))

.PHONY: bench
bench: $(VENV)/.bench ## Measure against bare commands and the peers; QUICK=1 takes three minutes, ONLY=postgres.add a part, BASE=<commit> compares with that commit.
	$(BIN)/python -m bench $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY)) $(if $(BASE),--base $(BASE))

.PHONY: format
format: setup ## Format the code and apply the safe fixes.
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

.PHONY: sql
sql: setup ## Render the SQL snapshots under tests/sql anew.
	UPDATE_SQL=1 $(BIN)/pytest tests/test_sql_snapshots.py

.PHONY: constraints
constraints: ## Pin the newest allowed version of everything in constraints.txt.
	rm -rf $(VENV)-constraints
	$(PYTHON) -m venv $(VENV)-constraints
	$(MAKE) --no-print-directory VENV=$(VENV)-constraints constraints.txt-anew
	rm -rf $(VENV)-constraints

.PHONY: constraints.txt-anew
constraints.txt-anew:
	$(PIP_INSTALL) --upgrade pip
	$(PIP_INSTALL) $(EVERYTHING) --group bench --group mysqlclient
	{ sed -n '/^#/p' constraints.txt; $(BIN)/python -m pip freeze --all --exclude-editable --exclude setuptools; } > $(VENV)/constraints.txt
	cp $(VENV)/constraints.txt constraints.txt

.PHONY: clean
clean: ## Remove everything that can be made again.
	rm -rf $(VENV) $(VENV)-* .servers build dist htmlcov .coverage .coverage.* \
		.hypothesis .import_linter_cache .mutation .mypy_cache .pytest_cache .ruff_cache
	find src tests -name __pycache__ -prune -exec rm -rf {} +

# A new pip first: the one that comes with an older Python knows neither --group nor --build-constraint.
$(VENV)/.pip: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --upgrade pip -c constraints.txt
	@touch $@

$(VENV)/.runtime: $(VENV)/.pip pyproject.toml
	$(PIP_INSTALL) -e .[cli] $(PINNED)
	@touch $@

$(VENV)/.full: $(VENV)/.pip pyproject.toml scripts/setup-servers scripts/setup-pgbouncer
	$(PIP_INSTALL) $(EVERYTHING) $(PINNED)
	scripts/setup-servers
	$(PIP_INSTALL) --group mysqlclient $(PINNED) || echo 'mysqlclient could not be built, its output is above: its tests will be SKIPPED here, and FAIL where CI is set.' >&2
	@touch $(VENV)/.runtime $@

$(VENV)/.bench: $(VENV)/.full bench/arq.txt
	$(PIP_INSTALL) $(EVERYTHING) --group bench $(PINNED)
	$(BIN)/python -m venv --clear --without-pip $(VENV)/peers/arq
	$(BIN)/python -m pip --python $(VENV)/peers/arq/bin/python install --quiet --disable-pip-version-check -r bench/arq.txt
	@touch $@
