# A thin front door: each target is one line of what a person would type. `make help` lists them.
# Variables: BUILD_TYPE=Release, PREFIX=/usr/local, JOBS=number of cores, MPI=AUTO|ON|OFF, MODULE= and TEST= of quick and test,
# WERROR=ON: warnings are errors, as in make check

BUILD_TYPE ?= Release
PREFIX ?= /usr/local
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
MPI ?= AUTO

GROUPS = build
configure_in = scripts/configure.sh $(1) "$(GROUPS)" -DTAGC_MPI=$(MPI) # <folder>, then options of cmake
SANITIZE = -DCMAKE_BUILD_TYPE=None -DCMAKE_C_FLAGS="-O1 -g1" -DTAGC_WERROR=ON
# One test more than there are processors, and one more that mostly waits: many wait for another of their processes, too. A test
# takes two of ctest's slots, one that mostly waits takes one (tests/CMakeLists.txt).
CTEST = ctest --output-on-failure --no-tests=error -j$$((2 * $(JOBS) + 3))
# Tests whose code others run under the address sanitizer in less time; and those that say nothing about what is left out, or much of
# what others say.
NO_NEW_ADDRESSES = ^test_(fsdp_levels|cli_bench)$$
NO_FENCES = ^test_(model|model_large|layout|layout_planted|gpu_script|exchange_reducer_direct)$$
.DEFAULT_GOAL := all
.PHONY: help all configure build lib test-build setup demo report check test quick python lab-check asan asan-build tsan tsan-build fences fences-build aarch64 aarch64-build wheels bench format format-check lint analyze install uninstall clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

all: build ## same as build

configure:
	@$(call configure_in,build) -DCMAKE_BUILD_TYPE=$(BUILD_TYPE) -DCMAKE_INSTALL_PREFIX="$(abspath $(PREFIX))" $(if $(WERROR),-DTAGC_WERROR=$(WERROR))

build: configure ## install what is missing (or print the line), configure, compile the library and the command into build/
	@cmake --build build -j$(JOBS)

lib: GROUPS = lib
lib: ## the same of libtagc alone, into build-lib/, which needs a C compiler and CMake
	@$(call configure_in,build-lib) -DCMAKE_BUILD_TYPE=$(BUILD_TYPE) -DCMAKE_INSTALL_PREFIX="$(abspath $(PREFIX))" -DTAGC_TRAINER=OFF -DBUILD_TESTING=OFF
	@cmake --build build-lib -j$(JOBS)
	@echo "build-lib/ has libtagc.so and libtagc.a; cmake --install build-lib installs them"

test-build test quick lint analyze bench asan-build tsan-build fences-build: GROUPS = build tests
test-build: configure ## build, and compile the tests, the fuzzers and the benchmarks, too
	@cmake --build build -j$(JOBS) --target all tests

setup: ## install what is missing (apt), or print the one line that does
	@scripts/setup.sh

demo: ## two to three minutes: train a small GPT-2 on two ranks, FSDP against TAGC, and compare
	@scripts/demo.sh

report: ## the page of the demo, runs/demo/report.html; needs Python
	@test -e runs/demo/all-legs || scripts/demo.sh
	@scripts/report.sh --make
	@scripts/report.sh --out runs/demo/report.html --title "tagc: the demo" runs/demo/fsdp runs/demo/tagc-10x runs/demo/all-legs runs/demo/*.trace.json

ifeq ($(origin TEST),command line)
test: quick
else
test: test-build ## compile and run the tests; TEST=test_codec_select: one of them; SHORT=1: without the long ones
	@cd build && $(CTEST) $(if $(SHORT),-LE '^long$$')
	@scripts/python.sh say
endif

quick: configure ## run the tests of one module (MODULE=codec, MODULE=python/hooks), or one test (TEST=test_codec_select)
	@JOBS=$(JOBS) scripts/quick.sh $(if $(TEST),test '$(TEST)',module '$(MODULE)')

python: ## the environment (torch, pytest) of the Python tests, made once in ~/.cache/tagc
	@scripts/setup.sh python
	@scripts/python.sh make

check: ## what CI runs: setup of everything that tests use, lint, tests, then both sanitizers; LONG=1: with the long tests, and for aarch64
	@scripts/setup.sh build text tests lint lab browser abi model ccache aarch64 python
	@scripts/python.sh make || test $$? -eq 77
	@LONG=$(LONG) scripts/check.sh

lab-check: test-build ## the lab's tests and lint (lab/README.md); make check runs its smoke test alone
	@scripts/setup.sh lab
	@JOBS=$(JOBS) scripts/lint.sh lab
	@cd build && $(CTEST) -C lab -L '^lab$$'

asan-build:
	@$(call configure_in,build-asan) $(SANITIZE) -DTAGC_SANITIZE=address,undefined
	@cmake --build build-asan -j$(JOBS) --target all tests

asan: asan-build ## tests under the address and undefined behaviour sanitizers
	@cd build-asan && $(CTEST) -E '$(NO_NEW_ADDRESSES)'

tsan-build:
	@$(call configure_in,build-tsan) $(SANITIZE) -DTAGC_SANITIZE=thread -DTAGC_MPI=OFF -DTAGC_TRAINER=$(if $(SHORT),OFF,ON)
	@cmake --build build-tsan -j$(JOBS) --target all tests

tsan: tsan-build ## tests of what has threads under the thread sanitizer, less the slow ones whose threads others have, too; SHORT=1: of libtagc alone
	@cd build-tsan && TSAN_OPTIONS=halt_on_error=1 $(CTEST) -L '^(core|codec|transport|exchange|unit|paper|gpu|fsdp|cli|cuda)$$'

FENCES = -DCMAKE_BUILD_TYPE=$(BUILD_TYPE) -DTAGC_TRAINER=OFF -DTAGC_MPI=OFF -DTAGC_WERROR=ON
fences-build:
	@$(call configure_in,build-fences/no-paper) $(FENCES) -DTAGC_PAPER=OFF
	@$(call configure_in,build-fences/no-gpu) $(FENCES) -DTAGC_GPU=OFF
	@$(call configure_in,build-fences/neither) $(FENCES) -DTAGC_PAPER=OFF -DTAGC_GPU=OFF -DTAGC_NATIVE=OFF
	@for without in paper gpu; do cmake --build build-fences/no-$$without -j$(JOBS) --target tagc_shared test_fences || exit 1; done
	@cmake --build build-fences/neither -j$(JOBS) --target all tests

fences: fences-build ## libtagc without lib/paper, without lib/gpu, and without both: the tests that remain
	@for without in paper gpu; do (cd build-fences/no-$$without && $(CTEST) -R '^test_fences$$') || exit 1; done
	@cd build-fences/neither && $(CTEST) -LE '^(level|fuzz|python|install|long)$$' -E '$(NO_FENCES)'

aarch64-build:
	@JOBS=$(JOBS) scripts/aarch64.sh build

aarch64: ## cross build for aarch64; tests of core, codec and exchange under qemu-user
	@JOBS=$(JOBS) scripts/aarch64.sh

wheels: ## what a release uploads, into dist/: wheels for glibc and musl on x86-64 and aarch64
	@scripts/wheels.sh

bench: test-build ## codec and exchange against the memory floor
	@for source in bench/bench_*.c; do \
	    name=$$(basename $$source .c); program=build/bench/$$name; run=; \
	    echo "== $$name"; \
	    if [ ! -x $$program ]; then echo "skipped: not in this build"; continue; fi; \
	    if [ $$name = bench_transport ]; then \
	        if ! command -v mpiexec >/dev/null; then echo "skipped: no mpiexec"; continue; fi; \
	        run="env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 mpiexec -n 2"; \
	    fi; \
	    $$run $$program || [ $$? -eq 77 ] || exit 1; \
	done

format: ## clang-format and ruff over all sources
	@JOBS=$(JOBS) scripts/lint.sh fix

format-check: ## what make format would change; changes nothing
	@JOBS=$(JOBS) scripts/lint.sh format

lint: configure ## format-check, ruff's rules, and clang-tidy without its analyzer, in under a minute
	@cmake --build build --target tagc_commit >/dev/null
	@JOBS=$(JOBS) scripts/lint.sh

analyze: build ## clang-tidy with clang's analyzer, which takes minutes
	@JOBS=$(JOBS) scripts/lint.sh analyze

install: build ## library, headers, pkg-config and CMake package, the tagc command with its man page and completions, to PREFIX
	@scripts/install.sh build "$(abspath $(PREFIX))"

uninstall: ## remove what make install put there
	@scripts/install.sh --uninstall build

clean: ## remove the build folders
	@rm -rf build build-lib build-asan build-tsan build-fences build-aarch64 build-wheels
