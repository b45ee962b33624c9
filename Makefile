# make test    the test suite            make demo    generate with and without hqmq
# make lint    ruff                      make bench   speed and memory
# make eval    quality of the output     make clean   removes everything made here but models
#
# The first call makes .venv and installs what the target needs; later calls install nothing.
#   make test PYTHON=python3.12 VENV=/tmp/venv    another interpreter, another place
#   make test VENV=                               the current python as it is, nothing installed
#                                                 or downloaded; tests of real models may be skipped
#   make test PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
#                                                 spares a machine without a GPU the CUDA libraries
#   make test ARGS="-k codec"                     arguments of pytest, of the demo, ...
#   make bench BENCHMARKS=memory                  one of them

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
ARGS ?=
MODEL ?= smollm2
BENCHMARKS ?= cpu_decode memory compile_time $(GPU_BENCHMARKS)
# Nothing where torch sees no GPU. Evaluated when `bench` runs, with torch installed by then.
GPU_BENCHMARKS ?= $(shell $(RUN) -c "import torch; \
	print('decode_attention write_path end_to_end' if torch.cuda.is_available() else '')")
# Of the models that were fetched; also: paper_tables behaviour. ARGS="--cases all": every baseline.
EVALUATIONS ?= quality

ifeq ($(strip $(VENV)),)
  RUN := $(PYTHON)
  DEMO_READY :=
  DEV_READY :=
  MODEL_READY :=
else
  RUN := $(VENV)/bin/python
  DEMO_READY := $(VENV)/.hqmq-demo
  DEV_READY := $(VENV)/.hqmq-dev
  MODEL_READY := model
endif

# Not compiling installed files saves a third of the time; Python compiles those it imports.
INSTALL = $(RUN) -m pip install --quiet --disable-pip-version-check --no-compile \
	--constraint constraints.txt $(PIP_ARGS)

# torchao's own kernels are of no use here, and failing to load them prints warnings.
export TORCHAO_FORCE_SKIP_LOADING_SO_FILES ?= 1

.PHONY: test demo lint bench eval clean model
.DELETE_ON_ERROR:

test: $(DEV_READY) $(MODEL_READY)
	$(RUN) -m pytest -q $(ARGS)

demo: $(DEMO_READY) $(MODEL_READY)
	$(RUN) -m examples.demo --model $(MODEL) $(ARGS)

lint: $(DEV_READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

bench: $(DEMO_READY) $(MODEL_READY)
	@set -e; for name in $(BENCHMARKS); do \
	  echo "== benchmarks.$$name"; $(RUN) -m benchmarks.$$name $(ARGS); done

eval: $(DEMO_READY) $(MODEL_READY)
	@set -e; for name in $(EVALUATIONS); do \
	  echo "== benchmarks.$$name"; $(RUN) -m benchmarks.$$name $(ARGS); done

# Brings the small real model (92 MB) into ~/.cache/hqmq-compile, once.
model: $(DEMO_READY)
	@$(RUN) -m benchmarks.models fetch $(MODEL)

ifneq ($(strip $(VENV)),)
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(DEMO_READY): pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing torch, transformers and what the demo needs into $(VENV): a minute or two"
	$(INSTALL) --editable ".[demo]"
	@touch $@

$(DEV_READY): pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing torch, transformers, triton, torchao, test tools into $(VENV): a minute or two"
	$(INSTALL) --editable ".[dev]"
	@touch $@ $(DEMO_READY)
endif

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
ifneq ($(strip $(VENV)),)
	rm -rf $(VENV)
endif
