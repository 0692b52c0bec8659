# Everything a person or CI does with this repository. `make help` lists the targets.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3
# Further arguments: `make up ARGS="--replicas 1"`, `make test ARGS="-k queues"`.
ARGS ?=
# Where pip takes torch from, when its default is not wanted: TORCH_ARGS="--index-url …".
TORCH_ARGS ?=
STAMP := $(VENV)/.installed
# Compiled modules are kept, whatever the caller's shell says: a test run starts hundreds of
# processes, and each would compile the project anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup lock up test coverage mutation lint types check format test-gpu bench \
	bench-peers-setup figures chaos soak fuzz generate docs clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 20

setup: $(STAMP) ## virtual environment with the pinned packages

# torch goes first and alone: were it resolved with the rest, pip could pick another build of it.
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11; name another: make PYTHON=python3.12 …" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "Python's venv module is missing; on Debian: apt-get install python3-venv" >&2; exit 1; }
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(TORCH_ARGS) "$$(grep '^torch==' requirements.lock)"
	$(BIN)/python -m pip install -r requirements.lock
	$(BIN)/python -m pip install --no-deps --no-build-isolation -e .
	@touch $@

lock: ## write requirements.lock from what is installed now
	@$(BIN)/python -m tools.lock > requirements.lock.new && mv requirements.lock.new requirements.lock

up: $(STAMP) ## the whole system on this machine; Ctrl-C stops it
	@exec $(BIN)/collm up $(ARGS)

# Three at a time: the tests mostly wait for processes to start. Files and the tests of one running
# system stay on one worker, slow ones begin (tests/conftest.py).
THREE := -n 3 --dist loadgroup --no-loadscope-reorder

# Each run has an order of its own and prints its seed; ARGS="--randomly-seed N" repeats one.
test: $(STAMP) ## the whole test suite, in a new order each time
	$(BIN)/python -m pytest $(THREE) $(ARGS)

coverage: $(STAMP) ## branch coverage of the whole test suite
	$(BIN)/python -m coverage erase
	$(BIN)/python -m pytest $(THREE) --cov --cov-report= --timeout 600 $(ARGS)
	$(BIN)/python -m coverage report

mutation: $(STAMP) ## mutants of what decides: how many do the tests find? (an hour of one core)
	@$(BIN)/python -c 'import mutmut' 2>/dev/null || \
		{ $(BIN)/python -m tools.dependencies mutation | $(BIN)/python -m pip install -r /dev/stdin; }
	nice -n 19 $(BIN)/python -m mutmut run --max-children 1 $(ARGS)
	$(BIN)/python -m tools.mutants

test-gpu: $(STAMP) ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu $(ARGS)

lint: $(STAMP) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP) ## mypy --strict
	$(BIN)/mypy

check: lint types test ## what CI runs

# Each prints one JSON line last; see docs/performance.md. `policies` and `pacing` replay the Azure
# traces: ARGS="--data FOLDER".
BENCHES := control engine sharing federated dispatch policies pacing overhead sim
.PHONY: $(addprefix bench-,$(BENCHES))
$(addprefix bench-,$(BENCHES)): bench-%: $(STAMP)
	$(BIN)/python -m bench.$* $(if $(and $(FULL),$(filter policies figures,$*)),--full) $(ARGS)

bench-peers-setup: $(STAMP) ## environments of the engines that `bench-engine` compares with
	$(BIN)/python -m bench.peers_setup $(ARGS)

bench: $(STAMP) ## every benchmark (hours; ARGS=--quick: about one), one table and one JSON line
	$(BIN)/python -m bench.all $(ARGS)

figures: $(STAMP) ## the evaluation's figures and page, into docs/evaluation (ARGS="--out FOLDER" elsewhere)
	$(BIN)/python -m bench.figures --out docs/evaluation $(if $(FULL),--full) $(ARGS)

chaos: $(STAMP) ## kills, stops and rubbish under load: MINUTES=10
	$(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),10) $(ARGS)

soak: $(STAMP) ## steady load; memory, descriptors, streams, keys watched: MINUTES=30
	$(BIN)/python -m tests.chaos.soak --minutes $(or $(MINUTES),30) $(ARGS)

fuzz: $(STAMP) ## random bytes into every decoder, stream and route: EXAMPLES=10000 each
	FUZZ_EXAMPLES=$(or $(EXAMPLES),10000) $(BIN)/python -m pytest -q --timeout 3600 tests/fuzz $(ARGS)

generate: $(STAMP) ## what is written from the code: configuration and metrics pages, dashboards
	$(BIN)/python -m tools.configuration
	$(BIN)/python -m tools.dashboards
	$(BIN)/python -m tools.metrics
	$(BIN)/python -m tools.monitoring

docs: $(STAMP) ## the documentation as a site in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## remove the virtual environment and what tools left (data/ stays)
	rm -rf $(VENV) site build mutants .pytest_cache .mypy_cache .ruff_cache .hypothesis
