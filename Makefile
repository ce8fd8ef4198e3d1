# Every target does its own set-up (a .venv with pinned versions); the second time it starts at once.
#   make test PYTHON=python3.12                                  choose the interpreter (3.10 to 3.13)
#   make test TORCH_INDEX=https://download.pytorch.org/whl/cpu   PyTorch's own CPU build: smaller, no CUDA
#   make demo ARGS="--dir /tmp/demo"                             options for demo, bench and the tests

VENV ?= .venv
BIN := $(VENV)/bin
# One file of tests more at a time than there are cores, since many wait, and four at most, the longest first; what the tests of a
# file share is made once.
WORKERS ?= $(shell cores=$$(nproc); echo $$((cores < 4 ? cores + 1 : 4)))
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Compiled modules are kept, whatever the machine says: hundreds of processes import them.
unexport PYTHONDONTWRITEBYTECODE
SETUP := VENV='$(VENV)' PYTHON='$(PYTHON)' TORCH_INDEX='$(TORCH_INDEX)' scripts/setup_venv.sh
ADD_MEGATRON := VENV='$(VENV)' scripts/add_megatron.sh

.DEFAULT_GOAL := help
# Where trainers' own packages lie, each release in a folder of its own.
TRAINERS ?= $(VENV)-trainers

.PHONY: help setup setup-demo demo test test-newest test-oldest test-unit test-all test-trainers check fmt fuzz bench docs clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup:  ## Make .venv with everything for development
	@$(SETUP) megatron,hf,dev
	@$(ADD_MEGATRON) 0.13.1 0.16.1

setup-demo:
	@$(SETUP) megatron

demo: setup-demo  ## Train, kill, reshape and resume a real Megatron model on the CPU, with proof; MEGATRON=0.16.1 for another release
	$(if $(MEGATRON),@$(ADD_MEGATRON) $(MEGATRON))
	$(if $(MEGATRON),PYTHONPATH='$(VENV)/megatron-$(MEGATRON)') $(BIN)/mcore-rlhf demo $(ARGS)

test: test-newest test-oldest  ## All tests that need neither a GPU nor a long time

test-newest: setup
	$(PYTEST) -m 'not slow and not gpu' $(ARGS)

test-oldest: setup
	$(PYTEST) -n 2 -m 'oldest and not slow' --megatron 0.16.1 tests/reference $(ARGS)
	$(PYTEST) -n 0 -m 'oldest and not slow' --megatron 0.13.1 tests/reference/test_reshape.py tests/reference/test_unchanged.py $(ARGS)

test-unit: setup  ## The pure parts only, in seconds
	$(PYTEST) -m 'not slow and not gpu' tests/unit tests/contract $(ARGS)

test-all: setup  ## All tests, and those that run Megatron on all its releases; without a GPU those that need one are skipped
	@$(ADD_MEGATRON) 0.13.1 0.14.0 0.15.3 0.17.1 0.18.2
	@$(BIN)/python -m pip install -q 'ray>=2.9,<3' || echo 'Ray cannot be installed here: its test is skipped'
	$(PYTEST) $(ARGS)
	for folder in $(VENV)/megatron-*; do $(PYTEST) --megatron "$${folder##*megatron-}" tests/reference $(ARGS) || exit; done

test-trainers: setup  ## verl, OpenRLHF, TRL, torchtitan, RLinf, NeMo-RL themselves load what we write; TRAINERS=FOLDER for their packages
	VENV='$(VENV)' scripts/add_trainers.sh '$(TRAINERS)'
	$(BIN)/python -m pytest tests/trainers --trainers '$(TRAINERS)' $(ARGS)

check: setup  ## Lint, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

fmt: setup  ## Format, and fix what can be fixed by itself
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

fuzz: setup  ## Mutate every golden: make fuzz CASES=5000 SEED=1, or ONLY=17 SEED=1 for one case
	$(BIN)/python -m tests.fuzz $(if $(CASES),--cases $(CASES)) $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY)) $(ARGS)

bench: setup  ## Measure the rows of benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks $(ARGS)

docs:  ## Build the pages as a site, in site/ (python3 -m http.server -d site); a dead link fails
	@VENV='$(VENV)-docs' PYTHON='$(PYTHON)' scripts/setup_venv.sh docs
	$(VENV)-docs/bin/python -m mkdocs build --strict $(ARGS)

clean:  ## Remove everything that was made, .venv included
	rm -rf $(VENV) $(VENV)-docs $(VENV)-trainers site .setup.lock .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
