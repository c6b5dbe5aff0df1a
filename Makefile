# make quickstart and make test are all a newcomer needs; both make the environment first (.venv, by pip).
#   PYTHON=/path/to/python3.12   the interpreter for .venv (default: the first of python3.12, python3.11, python3 that works)
#   PYTEST_ARGS="-n 4 -k moe"    arguments for pytest (-n: workers of pytest-xdist, each with its own pool of ranks; test: -n 2)
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.made
PYTEST_ARGS ?=
QUICKSTART_ARGS ?= --resume
# Version in range, and able to make environments: shims and stripped system Pythons fail this.
USABLE := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))

.PHONY: help env quickstart test gpu soak lint format types doctest docs ci clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' Makefile | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	@for python in $(or $(PYTHON),python3.12 python3.11 python3); do \
	    if "$$python" -c '$(USABLE)' >/dev/null 2>&1; then found="$$python"; break; fi; \
	done; \
	if [ -z "$${found:-}" ]; then \
	    echo 'moekit needs Python 3.11 or 3.12 with the venv module; none of these works: $(or $(PYTHON),python3.12 python3.11 python3).' >&2; \
	    echo 'Install one (Debian and Ubuntu: python3 and python3-venv), or say which: make PYTHON=/path/to/python3.12 ...' >&2; \
	    exit 1; \
	fi; \
	echo "Making $(VENV) with $$("$$found" --version): this downloads torch once."; \
	"$$found" -m venv --clear $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --no-input -c constraints.txt -e '.[dev]'
	@touch $@

env: $(STAMP)  ## make .venv from pyproject.toml and constraints.txt

quickstart: $(STAMP)  ## train a small byte-level MoE on this machine (QUICKSTART_ARGS="--ep 1 --n-steps 900"; by default --resume)
	$(BIN)/python recipes/quickstart.py $(QUICKSTART_ARGS)

test: $(STAMP)  ## the whole suite, without the long checks (soak) and those for a GPU (gpu)
	$(BIN)/python -m pytest -m "not soak and not gpu" $(or $(PYTEST_ARGS),-n 2)

gpu: $(STAMP)  ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m "gpu and not soak" $(PYTEST_ARGS)

soak: $(STAMP)  ## the long checks
	$(BIN)/python -m pytest -m "soak and not gpu" $(PYTEST_ARGS)

lint: $(STAMP)  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)  ## pyright over moekit, the recipes and the benchmarks
	$(BIN)/pyright --pythonpath $(BIN)/python

doctest: $(STAMP)  ## run the examples of docs and docstrings, then build the pages; a warning is an error
	rm -rf docs/generated
	$(BIN)/sphinx-build -q -W --keep-going -b doctest docs docs/_build/doctest
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html

docs: $(STAMP)  ## build the pages: docs/_build/html/index.html
	$(BIN)/sphinx-build -b html docs docs/_build/html

ci:  ## what has to pass before a change lands
	bash .ci/run

clean:  ## remove .venv and everything built
	rm -rf $(VENV) build dist docs/_build docs/generated .pytest_cache .ruff_cache .hypothesis
