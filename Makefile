# Two commands for a machine that has Python 3.11 or newer and make:
#   make train    installs, then trains a mixture-of-experts model on two CPU processes
#   make test     installs, then runs the tests
# PYTHON picks the interpreter, VENV the environment, TORCH another torch release (a CUDA build of several GB).

PYTHON ?= python3
VENV ?= .venv
RANKS ?= 2
CONFIG ?= configs/debug_moe_cpu.toml
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed

# Without a GPU: the pinned CPU build. With one, or with TORCH=x.y.z: what PyPI has.
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo yes)
ifdef TORCH
  TORCH_INSTALL = torch==$(TORCH)
  override VENV = .venv-torch-$(TORCH)
else ifeq ($(HAS_GPU),yes)
  TORCH_INSTALL = "torch>=2.13,<2.16"
else
  TORCH_INSTALL = -r .ci/constraints-cpu.txt
endif

.PHONY: train test lint bench tables clean

train: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(RANKS) train.py --config $(CONFIG) $(ARGS)

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)
	$(BIN)/pip install -q -e '.[dev]'
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/fsdp-symm bench tables --check

bench: $(STAMP)
	$(BIN)/fsdp-symm bench host --csv profiles/host_vs_gloo.csv

tables: $(STAMP)
	$(BIN)/fsdp-symm bench tables

$(STAMP): pyproject.toml .ci/constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(TORCH_INSTALL)
	$(BIN)/python -m pip install -q -e '.[train,test]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) .venv-torch-* outputs .pytest_cache .hypothesis
