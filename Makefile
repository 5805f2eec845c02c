# `make test` and `make demo` need Python >= 3.10 and make, and set up the rest in .venv.

PYTHON ?= $(firstword $(foreach python,python3 python3.13 python3.12 python3.11 python3.10 python, \
	$(shell $(python) -c 'import sys; sys.version_info >= (3, 10) and print("$(python)")' 2>/dev/null)))

BIN := .venv/bin
UV := $(BIN)/uv
INSTALL := $(UV) pip install --quiet --python $(BIN)/python
SOURCES := pyproject.toml README.md LICENSE $(shell find celery_pglock -name '__pycache__' -prune -o -print)

# Never fetch an interpreter: the one at hand is the one to test with.
export UV_PYTHON_DOWNLOADS := never
# Trust what the machine trusts: behind a proxy that is more than what uv brings along.
export UV_NATIVE_TLS := true
# A home that can't be written to (a service account, a container) has no place for a cache.
ifneq ($(shell mkdir -p "$${UV_CACHE_DIR:-$${XDG_CACHE_HOME:-$$HOME/.cache}/uv}/." 2>/dev/null && echo yes),yes)
export UV_CACHE_DIR := $(CURDIR)/.venv/cache
endif

.PHONY: test demo bench chaos lint types format clean

# Most tests wait most of the time.
JOBS ?= 2

test: .venv/installed
	$(BIN)/pytest --numprocesses=$(JOBS) --dist=worksteal $(ARGS)

demo: .venv/installed
	@PYTHONPATH=tools:. $(BIN)/python -m example_project $(ARGS)

bench: .venv/bench .venv/installed
	PYTHONPATH=tools:. $(BIN)/python -m benchmarks $(ARGS)

# Ten minutes of random faults; PGLOCK_CHAOS_SEED=n replays the choice of a run.
chaos: .venv/installed
	PGLOCK_CHAOS_SECONDS=$${PGLOCK_CHAOS_SECONDS:-600} $(BIN)/pytest -s --timeout=1200 tests/faults/test_chaos.py -k storm $(ARGS)

lint: .venv/lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: .venv/lint
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: .venv/lint .venv/installed
	$(BIN)/mypy

clean:
	rm -rf .venv .tox .hypothesis .mypy_cache .pytest_cache .ruff_cache dist

# The wheel is what gets tested, so that what is missing in it is missed.
.venv/installed: .venv/test $(SOURCES)
	rm -rf .venv/dist
	$(UV) build --quiet --wheel --out-dir .venv/dist
	$(INSTALL) --reinstall-package celery-pglock .venv/dist/*.whl
	@touch $@

.venv/test .venv/bench .venv/lint: .venv/%: $(UV) pyproject.toml
	$(INSTALL) --group $*
	@touch $@

# Debian's python3 without python3-venv makes a venv without pip; then the system's pip fills it.
$(UV):
	@test -n "$(PYTHON)" || { echo "no Python >= 3.10 found: name one with make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -m venv --clear .venv >/dev/null 2>&1 && $(BIN)/python -m pip install --quiet uv \
	|| { $(PYTHON) -m venv --clear --without-pip .venv && $(PYTHON) -m pip --python $(BIN)/python install --quiet uv; } \
	|| { uv venv --quiet --clear --python $(PYTHON) .venv && uv pip install --quiet --python $(BIN)/python uv; } \
	|| { rm -rf .venv; echo "no pip: install python3-venv, or python3-pip, or uv" >&2; exit 1; }
