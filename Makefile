# `make demo` and `make test` need Python 3.11 or later (as python3) and a C compiler, nothing else:
# they make their own environment in .venv.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed
STAMP_LOWER := .venv-lower/installed
# Without a GPU, torch comes in its CPU build; unconstrained it would bring gigabytes of CUDA.
CONSTRAINT = $(shell nvidia-smi -L >/dev/null 2>&1 || echo "-c constraints-cpu.txt")
# The training of docs/tutorials/first-search.md, and a budget in which it runs out of memory as it is.
DEMO_MEMORY ?= 42MiB
DEMO_ARGS := -- --layers 4 --width 96 --batch-size 16 --steps 200
DEMO_STORAGE := sqlite:///.demo/autofit.db
# How many processes `make faults` kills, and how many training loops `make loops` compares.
KILLS ?= 100
LOOPS ?= 2000
# More arguments for pytest: make test ARGS=tests/storage
ARGS ?=
# How many tests run side by side. Most start processes of their own, which need a core each.
WORKERS ?= 2
PYTEST_QUICK = -m pytest -m "quick and not full" -n $(WORKERS) --dist worksteal
# What of the quick tests depends on other packages most: run on the oldest releases allowed too.
LOWER_TESTS := tests/harness/session/test_hf_loops.py tests/harness/verification/test_transformers.py tests/storage \
	tests/cli/test_main.py tests/tuning/test_search.py tests/worker/cluster/test_cluster.py

.DEFAULT_GOAL := help
.PHONY: demo test test-lower test-full faults loops check docs clean help

# One thread: on busy cores, two threads that wait for each other in every kernel are 50 times slower.
demo: export OMP_NUM_THREADS = 1
demo: $(STAMP)  ## search the plan for an example that does not fit, and show it; goes on where it was
	mkdir -p .demo
	$(BIN)/autofit search examples/char_lm.py --memory $(DEMO_MEMORY) --storage $(DEMO_STORAGE) $(DEMO_ARGS)
	$(BIN)/autofit best examples/char_lm.py --storage $(DEMO_STORAGE) $(DEMO_ARGS)

test: $(STAMP)  ## run the quick tests (CI does)
	$(BIN)/python $(PYTEST_QUICK) $(ARGS)

test-lower: $(STAMP_LOWER)  ## run some of them with the oldest releases that pyproject.toml allows (CI does)
	.venv-lower/bin/python $(PYTEST_QUICK) $(LOWER_TESTS) $(ARGS)

test-full: $(STAMP)  ## run the quick and the full tests
	$(BIN)/python -m pytest -m "quick or full" $(ARGS)

faults: $(STAMP)  ## what may go wrong while a search or a run is on; kill -9, KILLS times
	$(BIN)/python -m pytest tests/faults $(ARGS)
	$(BIN)/python -m tests.faults.killing --count $(KILLS)

loops: $(STAMP)  ## LOOPS new random training loops, plainly and under random plans
	$(BIN)/python -m tests.loops --count $(LOOPS)

check: $(STAMP)  ## ruff (lint and format), import-linter and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

docs: $(STAMP)  ## build the documentation into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:  ## remove the environment and everything made
	rm -rf .venv .venv-lower .demo site build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints-cpu.txt
	@echo "Installing into .venv; this takes some minutes."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -e '.[dev]' $(CONSTRAINT)
	touch $@

$(STAMP_LOWER): pyproject.toml constraints-cpu.txt .ci/lower_bounds.py
	@echo "Installing into .venv-lower; this takes some minutes."
	$(PYTHON) -m venv --clear .venv-lower
	$(PYTHON) .ci/lower_bounds.py > .venv-lower/bounds.txt
	.venv-lower/bin/python -m pip install --quiet -e '.[peft]' transformers pytest pytest-timeout \
		pytest-xdist hypothesis -c .venv-lower/bounds.txt $(CONSTRAINT)
	touch $@
