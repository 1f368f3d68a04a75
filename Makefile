# make demo and make test set up .venv themselves, once; `make` lists the targets.
PYTHON ?= python3
TORCH ?= torch==2.13.0
# Processes that run tests; 0: the one that make starts.
WORKERS ?= auto
# How long random programs are run, and what else tests/stress/run.py takes, such as --part adam.
MINUTES ?= 10
STRESS ?=

# All paths are relative: make cannot handle a space in a checkout's path.
VENV := .venv/bin/python
# Python compiles what it imports by itself, a third of what pip installs, and must keep that: what
# fake tensors import takes 12 seconds otherwise, in each of many processes.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(VENV) -m pip install -q --no-compile
INSTALLED := .venv/.installed
BUILT := .venv/.built
TOOLS := .venv/.tools
LINKED := .venv/.linked
TRAINERS := .venv/.trainers
DOCS := .venv/.docs
WHEEL := .venv/.wheel
NATIVE_SOURCES := memsave_ext/adam/format_rows.h $(shell find csrc -type f)
CXX_FILES := $(filter csrc/%.h %.cpp %.cu %.cuh,$(NATIVE_SOURCES))
# By files: what the tests of one share is often minutes of processes. In the order of their names,
# the longest first (tests/conftest.py), the last ones are short. A worker that hangs or crashes is
# not started again: the same test would be the next one.
PYTEST := $(VENV) -m pytest -q -n $(WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# Once, with the native part: tests that run whole programs for minutes, and those that are the same
# in pure Python, as they read files, start processes that choose their way themselves, or run on
# fake tensors, which are Python there, too. Tests of other files are marked with pytest.mark.once.
ONCE := tests/benchmarks tests/distributed/test_distributed_example.py
ONCE += tests/docs/test_contributing.py tests/docs/test_docs_site.py tests/docs/test_guide.py
ONCE += $(addprefix tests/predict/test_,fits.py caching.py workspaces.py strides.py others.py)
ONCE += $(addprefix tests/predict/test_,attention_on_cards.py)
ONCE += $(addprefix tests/predict/test_predict_,kinds.py loops.py autocast.py gradients.py)
ONCE += $(addprefix tests/predict/test_predict_,offload.py values.py remat.py around.py)
ONCE += $(addprefix tests/distributed/test_fsdp_,formats.py blocks.py blocks_saved.py clipping.py)
ONCE += $(addprefix tests/distributed/test_,fsdp_clipped_loops.py fsdp_collectives.py dtensors.py)
ONCE += $(addprefix tests/distributed/test_,fit_ranks.py trained_ranks.py predicted_ranks.py)
ONCE += $(addprefix tests/integrations/test_,fit_zoo.py fit_trainers.py zoo.py interrupts.py)
ONCE += $(addprefix tests/integrations/test_,blocks_with_caches.py causal_lm_zoo.py quantized.py)
ONCE += tests/integrations/test_trl.py tests/memory/test_memory_compile.py
ONCE += $(addprefix tests/packaging/test_,imports.py mistakes.py native.py packaging.py parts.py)

# What most changes touch, of each room, in about two minutes on two cores.
FAST := $(addprefix tests/checkpoint/test_checkpoint,.py _state.py _errors.py)
FAST += $(addprefix tests/batch_norm/test_batch_norm,.py _once.py)
FAST += $(addprefix tests/adam/test_adam,.py _in_backward.py _hooks.py _states.py)
FAST += tests/loss_head/test_loss.py tests/memory/test_memory.py tests/dry_run tests/store
FAST += $(addprefix tests/remat/test_,remat.py plan.py) tests/predict/test_predict.py
FAST += $(addprefix tests/packaging/test_,imports.py includes.py) tests/docs/test_contributing.py

# torch looks for ninja on PATH.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help build demo test test-full test-fast stress lint format cuda-check emulate emulate-full bench docs guide sanitize mistakes wheel clean
# A recipe that fails must not leave a fresh stamp behind.
.DELETE_ON_ERROR:

help:  ## list the targets
	@grep -E '^[a-z-]+: .*## ' Makefile | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 19

build: $(BUILT) $(LINKED)  ## compile the native part and install the package from here

demo: $(BUILT)  ## train a DenseNet with each checkpoint and print the table
	PYTHONPATH=. $(VENV) benchmarks/densenet.py --steps 24

test: build $(TRAINERS)  ## run the tests, native and in pure Python: a sample, of slow files those whose turn it is
	@echo "== tests with the native part"
	MEMSAVE_EXT_NATIVE=1 $(PYTEST)
	@echo "== tests in pure Python"
	MEMSAVE_EXT_NATIVE=0 $(PYTEST) $(ONCE:%=--ignore=%)

# A library that was installed for the tests and cannot be imported is an error.
test test-full: export MEMSAVE_EXT_LIBRARIES := 1

test-full: PYTEST += --full
test-full: test  ## the same with every case of every test

test-fast: build  ## run the tests that most changes need, in two minutes
	MEMSAVE_EXT_NATIVE=1 $(PYTEST) $(FAST)

stress: build $(TRAINERS)  ## run random programs against plain torch and float64, MINUTES=10
	$(VENV) tests/stress/run.py --minutes $(MINUTES) $(STRESS)

bench: build  ## run every benchmark, in one to two hours on two cores
	$(VENV) benchmarks/run_all.py

guide: build  ## run the guide's cells, write what they print into docs/guide.md
	$(VENV) tools/guide.py

lint: $(TOOLS)  ## check style and types
	$(VENV) -m ruff check .
	$(VENV) -m ruff format --check .
	$(VENV) -m mypy
	.venv/bin/clang-format --dry-run -Werror $(CXX_FILES)

format: $(TOOLS)  ## rewrite the sources in the project's style
	$(VENV) -m ruff check --fix .
	$(VENV) -m ruff format .
	.venv/bin/clang-format -i $(CXX_FILES)

cuda-check: $(TOOLS)  ## compile every CUDA source that has changed, without a GPU or a CUDA torch
	$(VENV) tools/cuda_check.py

emulate: build  ## run every CUDA kernel on the CPU; then the package on a CUDA device whose streams are checked
	$(VENV) tests/emulation/run.py --builds plain --part
	$(VENV) tests/emulation/streams.py

emulate-full: build  ## the same with all sanitizers, large tensors and more tests, and seeded mistakes
	$(VENV) tests/emulation/run.py --builds plain --large
	$(VENV) tests/emulation/operators.py
	$(VENV) tests/emulation/streams.py --full
	$(VENV) tests/emulation/run.py --builds address thread memory
	$(VENV) tests/emulation/seeded_bugs.py

docs: $(DOCS)  ## build the pages in site/, the guide also as a notebook; a warning is an error
	$(VENV) tools/guide.py --notebook
	NO_MKDOCS_2_WARNING=1 $(VENV) -m mkdocs build --strict

wheel: $(BUILT) $(WHEEL)  ## build a wheel for this torch in dist/, train with it in a new environment
	MAKEFLAGS= $(VENV) tools/make_wheel.py --torch '$(TORCH)'

mistakes: build $(TRAINERS)  ## switch on mistakes in every room, one by one, which the tests must see
	$(VENV) tests/mistakes/run.py

sanitize: $(TOOLS)  ## run the native tests with address, undefined-behaviour and thread sanitizers
	$(VENV) tools/sanitize.py address
	$(VENV) tools/sanitize.py thread

clean:  ## remove what was built, .venv too
	rm -rf .venv build dist site *.egg-info memsave_ext/_C.*.so memsave_ext/_build_info.json
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis

# A stamp for each, so that the demo waits for nothing that it does not need, checks of style for no
# build, and a change in csrc compiles and does not install. From INSTALLED over TOOLS and LINKED to
# TRAINERS one after the other: one pip must not look at what another one writes.
$(INSTALLED): pyproject.toml
	@echo "== making .venv with $(PYTHON)"
	@$(PYTHON) -m venv .venv
	@echo "== installing $(TORCH), what builds and what benchmarks need"
	@$(VENV) tools/requirements.py bench > $@.txt
	@$(INSTALL) '$(TORCH)' 'setuptools>=77' wheel ninja -r $@.txt
	@touch $@

# Without MAKEFLAGS, in which ninja finds a jobserver that it cannot use (of make before 4.4).
$(BUILT): $(INSTALLED) setup.py $(wildcard tools/build_*.py) $(NATIVE_SOURCES)
	@echo "== building the native part (minutes, the first time)"
	@MAKEFLAGS= $(VENV) setup.py -q build_ext --inplace
	@touch $@

$(TOOLS): $(INSTALLED)
	@echo "== installing what checks and tests"
	@$(VENV) tools/requirements.py test lint > $@.txt
	@$(INSTALL) -r $@.txt
	@touch $@

$(LINKED): $(TOOLS) | $(BUILT)
	@MAKEFLAGS= $(INSTALL) --no-build-isolation --no-deps -e .
	@touch $@

# torch is named again: torchvision would bring the torch that it fits.
$(TRAINERS): pyproject.toml | $(LINKED)
	@echo "== installing the libraries that train models, for tests/integrations"
	@$(VENV) tools/requirements.py integrations > $@.txt
	@$(INSTALL) -r $@.txt '$(TORCH)'
	@touch $@

$(DOCS): pyproject.toml | $(INSTALLED)
	@$(VENV) tools/requirements.py docs > $@.txt
	@$(INSTALL) -r $@.txt
	@touch $@

$(WHEEL): pyproject.toml | $(INSTALLED)
	@$(VENV) tools/requirements.py wheel > $@.txt
	@$(INSTALL) -r $@.txt
	@touch $@
