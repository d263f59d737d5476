# make example | test | test-all | test-versions | kernels-ci | build | cross | lint | format | clean
#
# PYTHON      interpreter of the environment (default python3)
# VENV        the environment's folder; none: use PYTHON and install nothing
# WORKERS     processes that run the tests (default logical: one for each core)
# BUILD_FLAGS, EXAMPLE_ARGS, PYTEST_ARGS   passed on to build_variant.py, generate.py and pytest

PYTHON ?= python3
VENV ?= .venv
BUILD_FLAGS ?=
EXAMPLE_ARGS ?=
PYTEST_ARGS ?=
WORKERS ?= logical

NEWEST_CUDA := .build/toolchains/13.2
OLDER_DIFFUSERS := $(patsubst requirements/%.txt,%,$(wildcard requirements/diffusers-*.txt))
KERNELS_CI := .build/kernels-ci
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

.PHONY: help example test test-all test-versions kernels-ci build cross lint format clean
help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

example: build
	$(RUN) examples/generate.py --model ltx --output $(VIDEO) $(EXAMPLE_ARGS)

PYTEST = $(RUN) -m pytest --numprocesses $(WORKERS) --dist worksteal
test: build $(call needs,test)
	$(PYTEST) -m "not slow" $(PYTEST_ARGS)

# With the tests marked slow.
test-all: build $(call needs,test)
	$(PYTEST) $(PYTEST_ARGS)

# The models of each family with older versions of diffusers. An environment is a folder of packages in front of
# the main environment's.
test-versions: build $(call needs,test) $(OLDER_DIFFUSERS:%=.build/%/.installed)
	for name in $(OLDER_DIFFUSERS); do \
	  export PYTHONPATH=$(CURDIR)/.build/$$name; \
	  $(RUN) -c "import diffusers; assert '$$name.' in 'diffusers-' + diffusers.__version__" || exit; \
	  $(RUN) -m pytest tests/test_diffusers_versions.py $(PYTEST_ARGS) || exit; \
	done

.build/diffusers-%/.installed: requirements/diffusers-%.txt | $(call needs,venv)
	rm -rf $(@D)
	$(PIP) --no-deps --target $(@D) -r $<
	@touch $@

# The tests that kernel-builder runs on each build, with its files and packages and no others.
kernels-ci: build $(KERNELS_CI)/.installed
	$(RUN) tools/kernel_builder_tests.py $(KERNELS_CI)/bin/python

$(KERNELS_CI)/.installed: flake.nix tools/kernel_builder_tests.py requirements/torch.txt requirements/example.txt \
  requirements/test.txt | $(call needs,example)
	rm -rf $(@D)
	$(MAKE) VENV=$(@D) $(@D)/.stamp-torch
	$(RUN) tools/kernel_builder_tests.py --requirements > $(@D)/requirements.txt
	$(@D)/bin/python $(PIP_INSTALL) -r $(@D)/requirements.txt -c requirements/example.txt
	@touch $@

build: $(call needs,example $(if $(filter-out 0,$(HAS_GPU)),cuda-compiler))
	$(RUN) tools/build_variant.py $(BUILD_FLAGS)

# The CUDA builds, their checks and the programs of benchmarks/ceilings. None of them needs a GPU.
cross: $(call needs,test cuda-compiler cuda-binutils) $(NEWEST_CUDA)/.installed
	$(RUN) tools/build_variant.py --backend cuda $(BUILD_FLAGS)
	$(RUN) tools/build_variant.py --backend cuda --nvcc $(NEWEST_CUDA)/nvidia/cu13/bin/nvcc $(BUILD_FLAGS)
	$(RUN) tools/check_abi.py build/torch-stable-abi*
	$(RUN) tools/kernel_resources.py .build/cu[0-9]*
	$(RUN) benchmarks/ceilings/run.py --compile-only

# kernel-builder uses CUDA 13.0, like pip's Torch, and this version.
$(NEWEST_CUDA)/.installed: requirements/cuda-compiler-13.2.txt | $(call needs,venv)
	rm -rf $(@D)
	$(PIP) --no-deps --target $(@D) -r $<
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
$(STAMPS)cuda-compiler: requirements/cuda-compiler.txt $(STAMPS)example
	$(RUN) tools/builder/toolchain.py nvcc 2>/dev/null || $(PIP) -r $<
	@touch $@

$(STAMPS)cuda-binutils: requirements/cuda-binutils.txt $(STAMPS)example
	$(RUN) tools/builder/toolchain.py cuobjdump nvdisasm 2>/dev/null \
	  || $(PIP) -r $<
	@touch $@
endif
