# The bars of this project. `make` alone lists them. Needs Linux, make, and python3 with venv; nothing else by hand.
#
#   PYTHON=python3.12   the interpreter that .venv is made from
#   ARGS="-k name"      further arguments for pytest (make test, test-long, coverage), the demo (make demo) or tools/check_wheel.py (make wheel)
#   WORKERS=0           test files at a time: one more than there are cores, unless told; 0 is in pytest's own process

PYTHON ?= python3
VENV ?= .venv
DOCS_VENV ?= .venv-docs
ARGS ?=
# One more than cores: ranks that wait for one another leave cores idle.
WORKERS ?= $(shell echo $$(($$(nproc) + 1)))

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-long coverage check format docs wheel clean

BIN := $(VENV)/bin
SOURCES := fleet_train tools tests
# Tests start hundreds of processes, which would each compile the package where Python may keep nothing.
COMPILE := $(BIN)/python -m compileall -q fleet_train
# One worker runs all tests of a file: what a file's tests share is made once. In the order of tests/conftest.py.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# A stamp carries the hash of what was installed and of the interpreter: a changed pin or another PYTHON installs again.
hash = $(shell { cat $(1); $(PYTHON) --version; } 2>/dev/null | sha256sum | cut -c1-16)
RUN_STAMP := $(VENV)/.installed-run-$(call hash,requirements.txt tools/make_venv.sh)
DEV_STAMP := $(VENV)/.installed-dev-$(call hash,requirements.txt requirements-dev.txt tools/make_venv.sh)
DOCS_STAMP := $(DOCS_VENV)/.installed-docs-$(call hash,requirements.txt requirements-docs.txt)

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 18

demo: $(RUN_STAMP) ## Train a small network on handwritten digits on two "nodes" of this machine
	$(BIN)/python tools/demo.py $(ARGS)

test: $(DEV_STAMP) ## Run every test but those marked long; ARGS="-k plan" selects
	@$(COMPILE)
	$(PYTEST) -m "not long" $(ARGS)

test-long: $(DEV_STAMP) ## Run the tests marked long: engines, browser, soaks, lab, doctor, faults with long waits
	@$(COMPILE)
	$(PYTEST) -m long $(ARGS)

coverage: $(DEV_STAMP) ## Branch coverage of fleet_train by unit and parallel tests: a summary, and htmlcov/index.html
	$(PYTEST) -m "not long" --cov --cov-report=term:skip-covered --cov-report=html tests/unit tests/parallel $(ARGS)

check: $(DEV_STAMP) ## Format, lint, strict types, profile schema, direction of imports, drawn pages
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/python -m fleet_train.profile.export --check
	$(BIN)/python -m pytest -q tests/unit/test_layers.py
	$(BIN)/python -m tools.docs_site.layout --check
	$(BIN)/python -m tools.docs_site.fleet_1_8 --check

format: $(DEV_STAMP) ## Rewrite the sources as `make check` wants them
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

# A link that leads nowhere, a page that the navigation forgets, or anything from the network in a page stops it. The
# variable silences an advertisement of the theme's makers.
docs: $(DOCS_STAMP) ## Build the documentation as a site: site/index.html
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --strict
	@echo "site/index.html; search needs a server: $(DOCS_VENV)/bin/python -m http.server --bind 127.0.0.1 --directory site"

wheel: $(RUN_STAMP) ## Build the wheel into dist/, install it where nothing else is, and train with it there
	$(BIN)/python tools/check_wheel.py $(ARGS)

clean: ## Remove .venv, .venv-docs, caches, the site and build folders; runs/ stays
	rm -rf $(VENV) $(DOCS_VENV) site build dist htmlcov mutants .coverage .coverage.* *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUN_STAMP): requirements.txt
	@tools/make_venv.sh $(PYTHON) $(VENV) requirements.txt
	@touch $@

# The development requirements contain the others.
$(DEV_STAMP): requirements.txt requirements-dev.txt
	@tools/make_venv.sh $(PYTHON) $(VENV) requirements-dev.txt
	@touch $@ $(RUN_STAMP)

$(DOCS_STAMP): requirements.txt requirements-docs.txt
	@tools/make_venv.sh $(PYTHON) $(DOCS_VENV) requirements-docs.txt
	@touch $@
