# On a fresh machine: `make train` sets everything up and trains; `make test` sets everything up and tests.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help train test lint format bench figures clean

help:  ## show this help
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/'

train: $(VENV)/.train  ## train the embedded model on arithmetic with the predictive divergence mask
	$(BIN)/predmask train arithmetic

test: $(VENV)/.dev  ## run all tests that need no GPU
	$(BIN)/python -m pytest

lint: $(VENV)/.dev  ## style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(VENV)/.dev  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev  ## benchmarks: sampling throughput, and the operator beside its peers (half an hour)
	$(BIN)/python benchmarks/rollout_throughput.py
	$(BIN)/python benchmarks/ops.py

figures: $(VENV)/.dev  ## train and draw what the README's figures show (half an hour)
	$(BIN)/python scripts/make_figures.py run
	$(BIN)/python scripts/make_figures.py stress

clean:  ## remove the virtual environment and caches (runs/ stays)
	rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "predmask needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip --version > /dev/null \
		|| { rm -rf $(VENV); echo "could not make a virtual environment (Debian: apt install python3-venv)"; exit 1; }

$(VENV)/.train: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing into $(VENV) (once)"
	$(PIP) -e '.[train,instruments]'
	@touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing into $(VENV) (once)"
	$(PIP) -e '.[dev]'
	@touch $@
