# The bars of this project. `make` alone lists them. Needs Linux, make, and python3 with venv; nothing else by hand.
#
#   PYTHON=python3.12   the interpreter that .venv is made from
#   ARGS="-k name"      further arguments for pytest (make test), the demo (make demo) or tools/check_wheel.py (make wheel)

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test check format wheel clean

BIN := $(VENV)/bin
SOURCES := fleet_train tools tests

# A stamp carries the hash of what was installed and of the interpreter: a changed pin or another PYTHON installs again.
hash = $(shell { cat $(1); $(PYTHON) --version; } 2>/dev/null | sha256sum | cut -c1-16)
RUN_STAMP := $(VENV)/.installed-run-$(call hash,requirements.txt)
DEV_STAMP := $(VENV)/.installed-dev-$(call hash,requirements.txt requirements-dev.txt)

help: ## List the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 18

demo: $(RUN_STAMP) ## Train a small network on handwritten digits on two "nodes" of this machine
	$(BIN)/python tools/demo.py $(ARGS)

test: $(DEV_STAMP) ## Run the whole test suite; ARGS="-k plan" selects
	$(BIN)/python -m pytest $(ARGS)

check: $(DEV_STAMP) ## Format, lint, strict types, profile schema, direction of imports
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/python -m fleet_train.profile.export --check
	$(BIN)/python -m pytest -q tests/unit/test_layers.py

format: $(DEV_STAMP) ## Rewrite the sources as `make check` wants them
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

wheel: $(RUN_STAMP) ## Build the wheel into dist/, install it where nothing else is, and train with it there
	$(BIN)/python tools/check_wheel.py $(ARGS)

clean: ## Remove .venv, caches and build folders; runs/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUN_STAMP): requirements.txt
	@tools/make_venv.sh $(PYTHON) $(VENV) requirements.txt
	@touch $@

# The development requirements contain the others.
$(DEV_STAMP): requirements.txt requirements-dev.txt
	@tools/make_venv.sh $(PYTHON) $(VENV) requirements-dev.txt
	@touch $@ $(RUN_STAMP)
