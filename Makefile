# Nothing but Python (>= 3.10) and make is needed: every target makes .venv and installs what is missing, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Which tests to run, all of them if empty: make test TESTS=tests/test_cli.py
TESTS ?=
# What the demo trains: make demo DEMO_ARGUMENTS="--steps 50 --degrees 2 1"
DEMO_ARGUMENTS ?= --degrees 4 4
OUTPUT ?= outputs/gpt
# How many random schedules of faults, and how many more in which lost ranks come back: make chaos SEEDS=500
SEEDS ?= 60
RETURNS ?= 200

.DELETE_ON_ERROR:
.PHONY: help install demo test chaos lint format bench clean

help:
	@echo "make install  the package with everything for development, into $(VENV)"
	@echo "make demo     trains a small GPT on CPU at degrees (4, 4), kills a rank and lets it come back; two minutes"
	@echo "make test     every test, or those in TESTS=path"
	@echo "make chaos    every slot at every point, long jobs and the like, then SEEDS=$(SEEDS) and RETURNS=$(RETURNS) random schedules; hours"
	@echo "make lint     ruff, formatting, types"
	@echo "make format   lets ruff repair what it can"
	@echo "make bench    every benchmark"
	@echo "make clean    removes $(VENV) and everything the targets above have written"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "lightning-ntp needs Python 3.10 or newer, but \
	$(PYTHON) is %d.%d; name another: make PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,examples]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python examples/gpt/train.py --accelerator cpu --output $(OUTPUT) $(DEMO_ARGUMENTS)

test: $(STAMP)
	$(BIN)/python -m pytest $(TESTS)

chaos: $(STAMP)
	@status=0; $(BIN)/python -m pytest -m chaos $(TESTS) || status=1; \
	[ -n "$(TESTS)" ] || $(BIN)/python -m tests.recovery.schedules --seeds 0 $(SEEDS) || status=1; \
	[ -n "$(TESTS)" ] || $(BIN)/python -m tests.recovery.schedules --rejoin --seeds 0 $(RETURNS) || status=1; \
	exit $$status

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	@set -e; for benchmark in benchmarks/*.py; do \
		case $$benchmark in */__init__.py|*/_*) continue;; esac; \
		[ -e "$$benchmark" ] || { echo "No benchmarks here yet."; exit 0; }; \
		echo "== $$benchmark"; $(BIN)/python "$$benchmark"; \
	done

clean:
	rm -rf $(VENV) build dist outputs lightning_logs checkpoints .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
