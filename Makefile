# make demo and make test set up .venv themselves, once; `make` lists the targets.
PYTHON ?= python3
TORCH ?= torch==2.13.0

# All paths are relative: make cannot handle a space in a checkout's path.
VENV := .venv/bin/python
INSTALLED := .venv/.installed
BUILT := .venv/.built
NATIVE_SOURCES := $(shell find csrc -type f)
CXX_FILES := $(filter %.h %.cpp %.cu %.cuh,$(NATIVE_SOURCES))

# torch looks for ninja on PATH.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo test lint format cuda-check bench sanitize clean
# A recipe that fails must not leave a fresh stamp behind.
.DELETE_ON_ERROR:

help:  ## list the targets
	@grep -E '^[a-z-]+: .*## ' Makefile | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

demo: $(BUILT)  ## train a DenseNet three ways and print the table
	$(VENV) benchmarks/densenet.py

test: $(BUILT)  ## run the tests, native and in pure Python
	@echo "== tests with the native part"
	MEMSAVE_EXT_NATIVE=1 $(VENV) -m pytest -q
	@echo "== tests in pure Python"
	MEMSAVE_EXT_NATIVE=0 $(VENV) -m pytest -q

bench: $(BUILT)  ## run every benchmark
	$(VENV) benchmarks/checkpoint_overhead.py
	$(VENV) benchmarks/checkpoint_threads.py
	$(VENV) benchmarks/batch_norm.py
	$(VENV) benchmarks/adam.py
	$(VENV) benchmarks/adam_modes.py
	$(VENV) benchmarks/adam_memory.py
	$(VENV) benchmarks/distributed.py
	$(VENV) benchmarks/densenet.py

lint: $(INSTALLED)  ## check style and types
	$(VENV) -m ruff check .
	$(VENV) -m ruff format --check .
	$(VENV) -m mypy
	.venv/bin/clang-format --dry-run -Werror $(CXX_FILES)

format: $(INSTALLED)  ## rewrite the sources in the project's style
	$(VENV) -m ruff check --fix .
	$(VENV) -m ruff format .
	.venv/bin/clang-format -i $(CXX_FILES)

cuda-check: $(INSTALLED)  ## compile every CUDA source, without a GPU or a CUDA torch
	$(VENV) tools/cuda_check.py

sanitize: $(INSTALLED)  ## run the native tests with address, undefined-behaviour and thread sanitizers
	$(VENV) tools/sanitize.py address
	$(VENV) tools/sanitize.py thread

clean:  ## remove what was built, .venv too
	rm -rf .venv build dist *.egg-info memsave_ext/_C.*.so memsave_ext/_build_info.json
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Two stamps: a change in csrc compiles again, and does not install again.
$(INSTALLED): pyproject.toml
	@echo "== making .venv with $(PYTHON)"
	@$(PYTHON) -m venv .venv
	@echo "== installing $(TORCH) and the build tools"
	@$(VENV) -m pip install -q '$(TORCH)' 'setuptools>=77' wheel ninja
	@echo "== building memsave_ext (about a minute) and installing what it is tested with"
	@$(VENV) -m pip install -q --no-build-isolation -e '.[test,bench,lint]'
	@touch $@

$(BUILT): $(INSTALLED) setup.py tools/build_config.py $(NATIVE_SOURCES)
	@echo "== building the native part"
	@$(VENV) setup.py -q build_ext --inplace
	@touch $@
