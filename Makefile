# The two commands of the README, and those that developers use. Each does its own set-up.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# the package with its runtime dependencies, and the same with what tests and linters, or the
# documentation, need
READY := $(VENV)/.ready
TESTS_READY := $(VENV)/.ready-for-tests
DOCS_READY := $(VENV)/.ready-for-docs
# processes that run tests, one more than cores (tests/conftest.py); they take a gigabyte each
SIDE_BY_SIDE := --numprocesses auto --maxprocesses 4 --dist worksteal

# each value of each parameter of a test, and at most three cases of a test of Triton kernels, since
# Triton's interpreter is slow; `make test-ptx` executes more of them as compiled code, and
# `make test-all` runs all cases
CASES := --cover --triton-cases 3

# Triton kernels as compiled code that is executed on the CPU: all of them for sm_90, of each test at
# most 8 cases, and few cases for other architectures
PTX_TESTS := tests/ptx tests/kernels tests/features tests/tune
PTX_ARCHS := 80 100
RUN_PTX = TRITON_CACHE_DIR=$(CURDIR)/$(VENV)/ptx-cache $(BIN)/python -m pytest -p tests.ptx_plugin \
	--ptx-all-kernels --numprocesses 2 --dist worksteal

# slow tests that CI runs, too: 2,000 random schedules of the loader, and a whole dry run of gpu-session
SCHEDULES := tests/loader/test_happens_before.py::test_all_accesses_are_ordered_in_ten_thousand_schedules
GPU_RULES_TESTS := '$(SCHEDULES)[TransferProgram-0]' '$(SCHEDULES)[LoaderProgram-0]' \
	'$(SCHEDULES)[TypedLoaderProgram-0]' \
	tests/bench/test_gpu_session.py::test_a_whole_dry_run_passes_in_a_bare_checkout_without_git_and_network

# bin/install leaves bytecode to the first import of a module
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-processes test-ptx test-gpu-rules test-all lint docs gpu-session clean

demo: $(READY)  ## train on the built-in graph
	$(BIN)/gcnzc train --epochs 3

test: $(TESTS_READY)  ## the test suite
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(CASES) -m "not (slow or compiled or processes)"

test-processes: $(TESTS_READY)  ## commands that are interrupted or killed, several workers and machines
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "processes and not slow"

test-ptx: $(TESTS_READY)  ## the tests of Triton kernels, as compiled code that the CPU executes
	$(RUN_PTX) -m "(triton or budget) and not slow" --ptx-cases 8 $(PTX_TESTS)
	set -e; for arch in $(PTX_ARCHS); do \
		$(RUN_PTX) -m "(triton or budget) and not slow" --ptx-cases 1 --ptx-arch $$arch $(PTX_TESTS); done
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "compiled and not slow"

test-gpu-rules: $(TESTS_READY)  ## streams in random schedules, and gpu-session on a fake GPU
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal $(GPU_RULES_TESTS)

test-all: $(TESTS_READY)  ## the test suite with what takes minutes
	$(BIN)/python -m pytest $(SIDE_BY_SIDE)
	$(RUN_PTX) -m "triton or budget" $(PTX_TESTS)

lint: $(TESTS_READY)  ## format, lint and types, as CI does
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy gcnzc

docs: $(DOCS_READY)  ## the documentation site, in docs/_build/html
	$(BIN)/python -m sphinx -W --keep-going -n -q docs docs/_build/html

gpu-session: $(TESTS_READY)  ## ten minutes on a GPU: what works there, into runs/gpu-session
	$(BIN)/python -m bench.gpu.session --out runs/gpu-session

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "error: gcnzc needs Python 3.10 or newer, and $(PYTHON) is older" >&2; \
		  echo "hint: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	PYTHON=$(BIN)/python ./bin/install .
	@touch $@

$(TESTS_READY): $(READY)
	PYTHON=$(BIN)/python ./bin/install '.[test]'
	@touch $@

$(DOCS_READY): $(READY)
	PYTHON=$(BIN)/python ./bin/install '.[docs]'
	@touch $@

clean:  ## remove the environment
	rm -rf $(VENV)
