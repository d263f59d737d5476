# make example | test | test-slow | test-all | test-full | test-versions | kernels-ci | build | cross | cross-newest
#      | cross-12 | lint | format | clean
#
# PYTHON      interpreter of the environment (default python3)
# VENV        the environment's folder; none: use PYTHON and install nothing
# WORKERS     processes that run the tests (default logical: one for each core)
# CUDA12      a toolkit of CUDA 12.6 or 12.8, for cross-12 (default /usr/local/cuda-12.6)
# BUILD_FLAGS, EXAMPLE_ARGS, PYTEST_ARGS   passed on to build_variant.py, generate.py and pytest

PYTHON ?= python3
VENV ?= .venv
BUILD_FLAGS ?=
EXAMPLE_ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= logical
CUDA12 ?= /usr/local/cuda-12.6

NEWEST_CUDA := .build/toolchains/13.2
NEWER_PTXAS := .build/toolchains/12-ptxas-12.9
OLDER_DIFFUSERS := $(patsubst requirements/%.txt,%,$(wildcard requirements/diffusers-*.txt))
VIDEO := outputs/ltx_video.mp4
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | grep -c GPU)

ifeq ($(VENV),none)
  RUN := $(PYTHON)
  BIN :=
  STAMPS :=
else
  RUN := $(VENV)/bin/python
  BIN := $(VENV)/bin/
  STAMPS := $(VENV)/.stamp-
endif
# Python compiles what it imports, once. pip would compile all of Torch.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL := -m pip install --disable-pip-version-check --no-compile -qq
PIP := $(RUN) $(PIP_INSTALL)

# The parts of the environment that targets need. Empty with VENV=none.
needs = $(if $(STAMPS),$(addprefix $(STAMPS),$(1)))

CXX_SOURCES = $(shell find kernel_src torch-ext benchmarks/ceilings -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \
  -o -name '*.h' ! -name registration.h)

.PHONY: help example test test-slow test-all test-full test-versions kernels-ci build cross cross-newest cross-12 lint \
  format clean $(OLDER_DIFFUSERS:%=test-%)
help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

example: build
	$(RUN) examples/generate.py --model ltx --output $(VIDEO) $(EXAMPLE_ARGS)

# tests/selection.py says what is drawn.
PYTEST = $(RUN) -m pytest --numprocesses $(WORKERS) --dist worksteal --slowest 20
test: build $(call needs,test)
	$(PYTEST) -m "not slow" --draw=all $(PYTEST_ARGS)

test-slow: build $(call needs,test)
	$(PYTEST) -m slow --draw=slow $(PYTEST_ARGS)

# All cases, except that those of slow functions are drawn.
test-all: build $(call needs,test)
	$(PYTEST) --draw=slow $(PYTEST_ARGS)

# All cases, for a machine with a GPU, or a night.
test-full: build $(call needs,test)
	$(PYTEST) $(PYTEST_ARGS)

# The models of each family with older versions of diffusers, side by side. An environment is a folder of
# packages in front of the main environment's.
test-versions: build $(call needs,test)
	$(MAKE) --jobs --output-sync=target $(OLDER_DIFFUSERS:%=test-%)

$(OLDER_DIFFUSERS:%=test-%): export OMP_NUM_THREADS = 1
$(OLDER_DIFFUSERS:%=test-%): test-%: .build/%/.installed
	export PYTHONPATH=$(CURDIR)/.build/$*; \
	$(RUN) -c "import diffusers; assert '$*.' in 'diffusers-' + diffusers.__version__" && \
	  $(RUN) -m pytest tests/test_diffusers_versions.py $(PYTEST_ARGS)

.build/diffusers-%/.installed: requirements/diffusers-%.txt | $(call needs,venv)
	rm -rf $(@D)
	$(PIP) --no-deps --target $(@D) -r $<
	@touch $@

# The tests that kernel-builder runs on each build, with its files and packages and no others.
kernels-ci: build $(call needs,test)
	$(RUN) tools/kernel_builder_tests.py

build: $(call needs,example $(if $(filter-out 0,$(HAS_GPU)),cuda-tools))
	$(RUN) tools/build_variant.py $(BUILD_FLAGS)

# The CUDA build, its checks and the programs of benchmarks/ceilings. None of them needs a GPU.
cross: $(call needs,test cuda-tools)
	$(RUN) tools/build_variant.py --backend cuda $(BUILD_FLAGS)
	$(RUN) tools/check_abi.py build/torch-stable-abi*
	$(RUN) tools/kernel_resources.py .build/cu[0-9]*
	$(RUN) benchmarks/ceilings/run.py --compile-only

# The same build with kernel-builder's newest CUDA.
cross-newest: $(call needs,test cuda-tools) $(NEWEST_CUDA)/.installed
	$(RUN) tools/build_variant.py --backend cuda --nvcc $(NEWEST_CUDA)/nvidia/cu13/bin/nvcc $(BUILD_FLAGS)
	$(RUN) tools/check_abi.py build/torch-stable-abi*
	$(RUN) tools/kernel_resources.py .build/cu[0-9]*

# kernel-builder uses CUDA 13.0, like pip's Torch, and this version.
$(NEWEST_CUDA)/.installed: requirements/cuda-compiler-13.2.txt | $(call needs,venv)
	rm -rf $(@D)
	$(PIP) --no-deps --target $(@D) -r $<
	@touch $@

# The same build as kernel-builder makes it with CUDA 12.6: with the ptxas of 12.9 (flake.nix). pip has no nvcc of
# CUDA 12, so CI does not run this.
cross-12: $(call needs,test cuda-tools) $(NEWER_PTXAS)/.installed
	$(RUN) tools/build_variant.py --backend cuda --nvcc $(NEWER_PTXAS)/bin/nvcc $(BUILD_FLAGS)
	$(RUN) tools/check_abi.py build/torch-stable-abi*
	$(RUN) tools/kernel_resources.py .build/cu[0-9]*

# Links to the toolkit. nvcc calls the programs beside the link.
$(NEWER_PTXAS)/.installed: requirements/cuda-ptxas-12.9.txt $(CUDA12)/bin/nvcc | $(call needs,venv)
	rm -rf $(@D)
	$(PIP) --no-deps --target $(@D)/newer -r $<
	mkdir $(@D)/bin
	ln -s $(filter-out %/bin,$(wildcard $(abspath $(CUDA12))/*)) $(@D)
	ln -s $(abspath $(CUDA12))/bin/* $(@D)/bin
	ln -sf ../newer/nvidia/cuda_nvcc/bin/ptxas $(@D)/bin/ptxas
	@touch $@

# Runs the hooks of .pre-commit-config.yaml, which find their programs on PATH. mypy also reads the packages
# that the tests import.
lint: $(call needs,lint test)
	$(if $(BIN),PATH="$(abspath $(BIN)):$$PATH") pre-commit run --all-files --show-diff-on-failure

format: $(call needs,lint)
	$(BIN)ruff check --fix
	$(BIN)ruff format
	$(BIN)clang-format -i $(CXX_SOURCES)

# Removes the output of all other targets except the environment.
clean:
	rm -rf build .build outputs .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

ifneq ($(STAMPS),)
$(STAMPS)venv:
	$(PYTHON) -m venv $(VENV)
	@touch $@

# Without a GPU, Torch's CPU build from pip's configured index, otherwise from Torch's own.
$(STAMPS)torch: requirements/torch.txt | $(STAMPS)venv
ifeq ($(HAS_GPU),0)
	torch=$$(grep '^torch' $<)+cpu; $(PIP) "$$torch" 2>/dev/null \
	  || $(PIP) "$$torch" --extra-index-url https://download.pytorch.org/whl/cpu
else
	$(PIP) -r $<
endif
	@touch $@

$(STAMPS)example: requirements/example.txt $(STAMPS)torch
	$(PIP) -r $<
	@touch $@

$(STAMPS)test: requirements/test.txt $(STAMPS)example
	$(PIP) -r $<
	@touch $@

$(STAMPS)lint: requirements/lint.txt | $(STAMPS)venv
	$(PIP) -r $<
	@touch $@

# pip's CUDA tools, unless this machine has its own.
$(STAMPS)cuda-tools: requirements/cuda-tools.txt $(STAMPS)example
	$(RUN) tools/builder/toolchain.py nvcc cuobjdump nvdisasm 2>/dev/null || $(PIP) -r $<
	@touch $@
endif
