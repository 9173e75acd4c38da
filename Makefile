# `make demo` and `make test` are all that a newcomer needs: each sets up .venv on its first run.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
ARGS ?=
# Files of tests that run at once; 0 for a debugger. One more than CPUs, up to eight: tests wait for time-outs.
JOBS ?= $(shell cpus=$$(nproc); echo $$((cpus < 8 ? cpus + 1 : 8)))
# Which tests `make test` runs; CONTRIBUTING.md says what the others are.
TESTS ?= not gpu and not nightly

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
PYTHON_DIRS := $(wildcard llm_comm tests bench_serving examples tools)
CPP_FILES = $(shell find csrc tests llm_comm -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu')
# Directories are listed too: their times change when a file is added or removed.
BUILD_INPUTS := CMakeLists.txt pyproject.toml $(shell find csrc cmake configs -not -name '.*' 2>/dev/null)

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo check check-amd test test-gpu nightly soak fuzz sanitize mutants lint format docs dist wheels release clean

help: ## List the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.installed ## Tensor-parallel decoding through llm_comm, on GPUs or emulated ones (ARGS="--help")
	$(VENV)/bin/llm-comm demo $(ARGS)

RUN_TESTS = PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) -m pytest -m "$(TESTS)" -n $(JOBS) --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed ## All tests that need no GPU (ARGS="tests/unit -k two_shot")
	@$(MAKE) --no-print-directory build/amd-env/.installed || echo "without a compiler for GPUs of AMD: tests/amd is skipped"
	$(RUN_TESTS) $(ARGS)

# One file of each operation; the ranks of all of them are the same processes.
QUICK := tests/unit $(addprefix tests/emulated/test_,all_reduce.py fused.py all_gather.py reduce_scatter.py linear.py inputs.py)

check: lint $(VENV)/.installed ## Before a commit: lint, unit tests, one file of emulated tests an operation (5 minutes)
	$(RUN_TESTS) $(QUICK) $(ARGS)

check-amd: $(VENV)/.installed build/amd-env/.installed ## Kernels for GPUs of AMD: compiled, their machine code checked and interpreted
	$(RUN_TESTS) tests/amd $(ARGS)

test-gpu: $(VENV)/.installed ## The tests that need a GPU, or several (ARGS="-k soak")
	$(PY) -m pytest -m gpu $(ARGS)

nightly: ## All that needs no GPU: all tests, ten minutes of each fuzzer and of schedules, sanitizers, mutants (hours)
	$(MAKE) test TESTS="not gpu"
	$(MAKE) soak
	$(MAKE) fuzz ARGS="--seconds 600"
	$(MAKE) sanitize
	$(MAKE) mutants

soak: $(VENV)/.base ## Ten minutes of schedules of the deterministic emulator (ARGS="--replay SEED")
	PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) tests/deterministic/driver.py --seconds 600 $(ARGS)

fuzz: $(VENV)/.fuzz ## Hostile configuration files, tables and messages, a minute of them (ARGS="--seconds 600")
	$(PY) tests/fuzz/fuzz.py $(ARGS)

sanitize: $(VENV)/.base ## The emulator and the host code under AddressSanitizer, UBSan and ThreadSanitizer
	for kind in address thread; do \
	  $(VENV)/bin/cmake -S tests/sanitizers -B build/sanitize-$$kind -G Ninja -DLLM_COMM_SANITIZE=$$kind \
	    -DCMAKE_MAKE_PROGRAM="$(abspath $(VENV))/bin/ninja" \
	  && $(VENV)/bin/cmake --build build/sanitize-$$kind \
	  && $(VENV)/bin/ctest --test-dir build/sanitize-$$kind --output-on-failure --timeout 300 --parallel $(JOBS) || exit 1; \
	done

mutants: $(VENV)/.installed ## Small bugs in copies of the sources: do the tests notice? (ARGS="--list", ARGS="-k overlap")
	PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) tests/mutation/run.py $(ARGS)

lint: $(VENV)/.dev ## clang-format, ruff and mypy
	$(VENV)/bin/clang-format --dry-run -Werror $(CPP_FILES)
	$(VENV)/bin/ruff check $(PYTHON_DIRS)
	$(VENV)/bin/ruff format --check $(PYTHON_DIRS)
	$(VENV)/bin/mypy

format: $(VENV)/.dev ## Rewrite the sources as lint wants them
	$(VENV)/bin/clang-format -i $(CPP_FILES)
	$(VENV)/bin/ruff check --fix $(PYTHON_DIRS)
	$(VENV)/bin/ruff format $(PYTHON_DIRS)

docs: build/docs-env/.installed ## The pages as a web site with plots of the result files, in build/site
	NO_MKDOCS_2_WARNING=1 build/docs-env/bin/mkdocs build --strict -f tools/mkdocs.yml

dist: $(VENV)/.dev ## An sdist, and a wheel built from it in a clean environment
	$(PY) -m build --outdir dist

wheels: ## Wheels for the versions of Python that are here, in wheelhouse/ (ARGS="--no-cuda", ARGS=path/to/python)
	$(PYTHON) tools/build_wheels.py $(ARGS)

release: ## Wheels and sdist of this version, installed and tried, with SHA256SUMS, in wheelhouse/ (ARGS="--no-cuda")
	$(PYTHON) tools/release.py $(ARGS)

clean: ## Remove what the builds wrote, .venv included
	rm -rf $(VENV) build dist wheelhouse .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- The environment -------------------------------------------------------------------------------------------

# On a machine with GPUs, a torch built for CUDA that $(PYTHON) already has is used as it is: it matches the driver,
# and the pinned torch might come without CUDA and hide the GPUs. A .pth file names the directories of that Python
# rather than `venv --system-site-packages`, which skips them when that Python is itself a virtual environment.
$(VENV)/.base:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("llm_comm needs Python 3.10 or newer; this is " + sys.version.split()[0] + ". Name another: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	@if nvidia-smi -L >/dev/null 2>&1 \
	   && $(PYTHON) -c 'import sys, torch; sys.exit(torch.version.cuda is None)' 2>/dev/null; then \
	  echo "GPUs found: using the CUDA torch that $(PYTHON) has"; \
	  $(PYTHON) -c 'import sys; print(*(f"import site; site.addsitedir({p!r})" for p in sys.path if p.endswith("-packages")), sep="\n")' \
	    > "$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/cuda_torch_of_outer_python.pth"; \
	else \
	  echo "installing $(TORCH) into $(VENV) (once)"; \
	  $(PIP) install --quiet $(TORCH); \
	fi
	$(PIP) install --quiet scikit-build-core pybind11 cmake ninja
	@touch $@

# Kernels are compiled for the GPUs of this machine, and for none where there is none: unless CUDAARCHS or CMAKE_ARGS ask
# for them, as .ci/run does.
ifeq ($(CUDAARCHS)$(findstring LLM_COMM_CUDA=,$(CMAKE_ARGS)),)
  GPU_ARCHS := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d . | grep -xE '[0-9]+' | sort -u | paste -sd ';')
  ifeq ($(GPU_ARCHS),)
    export CMAKE_ARGS += -DLLM_COMM_CUDA=OFF
    BUILT_FOR := for emulated GPUs, as there is no GPU here: 2 to 4 minutes the first time
  else
    export CUDAARCHS := $(GPU_ARCHS)
    BUILT_FOR := for sm $(GPU_ARCHS) and emulated GPUs: 3 to 15 minutes the first time
  endif
else
  BUILT_FOR := as CUDAARCHS and CMAKE_ARGS say: up to 30 minutes the first time
endif

# Without isolation, so that the compiled objects and the build tools stay where the next build finds them. Of pip's output
# the progress of the compiler is shown, and all of it where it fails.
define install
@echo "building llm_comm $(BUILT_FOR) (CONTRIBUTING.md, \"CUDA or not\")"
@mkdir -p build
@$(PIP) install --verbose --no-build-isolation --editable '.[$(1)]' 2>&1 | tee build/install.log \
  | sed -unE 's|^ *(\[[0-9]+/[0-9]+\]).* ([^ ]*/)?([^ ]+)$$|\1 \3|p' || { cat build/install.log; exit 1; }
@$(PY) -c 'import llm_comm; print("llm_comm is built", "with CUDA kernels" if llm_comm.cuda_compiled() else "without CUDA kernels: emulated GPUs only")'
@touch $(VENV)/.installed
endef

$(VENV)/.installed: $(VENV)/.base $(BUILD_INPUTS)
	$(call install,test)

# The fuzzer comes as a wheel for some versions of Python only; to build it takes clang.
$(VENV)/.fuzz: $(VENV)/.installed
	$(PIP) install --quiet --only-binary :all: 'atheris>=3,<4'
	@touch $@

# Not made anew when C++ changes: linting needs no build.
$(VENV)/.dev: $(VENV)/.base pyproject.toml
	$(call install,dev)
	@touch $@

# A clang for GPUs of AMD, and of a wheel of triton (for any Python) the headers of HIP. Nothing of it gets into $(VENV).
build/amd-env/.installed: tests/amd/requirements.txt
	rm -rf build/amd-env
	$(PYTHON) -m venv build/amd-env
	build/amd-env/bin/python -m pip --disable-pip-version-check install --quiet $$(grep ziglang $<)
	build/amd-env/bin/python -m pip --disable-pip-version-check download --quiet --no-deps -d build/amd-env/wheel \
	  --only-binary :all: --python-version 3.12 $$(grep triton $<)
	build/amd-env/bin/python -c 'import glob, zipfile; wheel = zipfile.ZipFile(*glob.glob("build/amd-env/wheel/*")); \
	  wheel.extractall("build/amd-env", [name for name in wheel.namelist() if name.startswith("triton/backends/amd/include/")])'
	rm -r build/amd-env/wheel
	@touch $@

# The tools of the extra `docs` alone: pip would build llm_comm for '.[docs]'.
build/docs-env/.installed: pyproject.toml
	$(PYTHON) -m venv build/docs-env
	build/docs-env/bin/python -m pip --disable-pip-version-check install --quiet \
	  $$(sed -n '/^docs = \[/,/^\]/s/^ *"\(.*\)",$$/\1/p' pyproject.toml)
	@touch $@
