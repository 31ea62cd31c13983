# `make demo` and `make test` do their own set-up. All they need lies inside the checkout:
# .venv (packages), .cache (the target) and runs (results).

PYTHON ?= python3
RECIPE ?= smollm2_mtp_cpu

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input

.PHONY: help setup demo test check verify-serving clean

help:
	@echo "make demo            train, evaluate and export a draft head for a small model"
	@echo "make test            run the tests"
	@echo "make check           formatting, lint and types"
	@echo "make verify-serving  serve the demo's head in stock vLLM and compare its counters"
	@echo "make setup           only the environment and the target"
	@echo "make clean           remove the environments and the target; runs/ stays"

demo: setup
	@$(BIN)/mtp-train run recipe=$(RECIPE)

# One worker per core, one thread each: on small matrices threads wait for each other.
test: setup
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --dist worksteal

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

verify-serving: setup
	@PYTHON=$(PYTHON) tools/setup_serving.sh
	@$(BIN)/python tools/verify_serving.py --table docs/serving.md

setup: $(READY)
	@$(BIN)/python tools/get_target.py

# The stamp is written last: after an interruption the next call goes on from here.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: Python >= 3.11 is needed, $(PYTHON) is: $$($(PYTHON) -V 2>&1);" \
	    "try: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: $(PYTHON) has no venv module; install it (Debian: python3-venv)" >&2; exit 1; }
	@$(PIP) --version >/dev/null 2>&1 || { \
	  echo "setup: creating $(VENV)" && $(PYTHON) -m venv --clear $(VENV); }
	@echo "setup: installing the pinned packages (once, some minutes)"
	@$(PIP) install -qq --constraint constraints.txt --editable '.[test,trackers,target-gguf,deepspeed,quantised]'
	@touch $@

clean:
	rm -rf $(VENV) .venv-serving .venv-peer .cache build dist .pytest_cache .mypy_cache .ruff_cache
	find mtp_train tests tools recipes -name __pycache__ -type d -prune -exec rm -rf {} +
