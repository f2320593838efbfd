# Every target sets up .venv by itself, and only when pyproject.toml or constraints.txt has changed.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
ARGS   ?=
# File by file, the long tests first; three processes, since many tests wait for others.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder
# Tests start hundreds of processes: what the first one has compiled, the others need not.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help train swarm test check lint format bench clean screenshots
.DELETE_ON_ERROR:

help:                         ## this list
	@echo "make TARGET [ARGS='--option value ...']"
	@sed -n 's/^\([a-z]*\):[^#]*## */\1#/p' $(firstword $(MAKEFILE_LIST)) | awk -F'#' '{printf "  %-11s %s\n", $$1, $$2}'

train: $(VENV)/.base          ## train a small model with two workers (about two minutes on two cores)
	$(BIN)/diloco train $(ARGS)

swarm: $(VENV)/.swarm         ## begin a run that others can join, of half an hour or more: it prints how
	$(BIN)/diloco train --engine swarm $(if $(findstring --steps,$(ARGS)),,--steps 20000) $(ARGS)

test: $(VENV)/.dev            ## the whole suite, real processes and kills included (about six minutes on two cores)
	$(PYTEST) $(ARGS)

check: lint                   ## before every commit: lint, then the fast tests
	$(PYTEST) -m "not slow" -q $(ARGS)

lint: $(VENV)/.dev            ## formatting, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(VENV)/.dev          ## format and fix with ruff
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.bench         ## speed, bytes and memory, side by side with torchft
	$(BIN)/python benchmarks/bookkeeping.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/sync.py $(ARGS)

screenshots: $(VENV)/.dev     ## train the runs of the README picture of the page, a swarm among them, and draw it (some minutes)
	$(BIN)/python tests/browser/screenshot.py build/screenshots docs/images/dashboard.png $(ARGS)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "diloco needs Python 3.11 or newer, and $(PYTHON) is older: run make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e .
	@touch $@

$(VENV)/.swarm: $(VENV)/.base
	$(PIP) -e '.[swarm]'
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) -e '.[dev]'
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	$(PIP) -e '.[dev,bench]'
	@touch $@

clean:                        ## remove .venv and caches
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
