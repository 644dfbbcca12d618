# make demo    set up, convert the example checkpoint, prove the result
# make test    set up, run all tests (in three processes, some of which wait; plain `pytest` uses one)
# make check   set up without torch, lint, run the fast tests: under a minute
# make test-fast  the fast tests alone
# make asan    the C library alone, with AddressSanitizer and UndefinedBehaviorSanitizer
# make tsan    its threads, with ThreadSanitizer
# make lint    ruff, mypy, clang-format, compiler warnings as errors
# make format  rewrite sources the way lint wants them
# make bench   speed of the kernels, of packing and of a whole conversion
# make fuzz    the readers of files, with coverage guidance, for SECONDS=60
# make fuzz-native  random calls of the C library, sanitized and between unreadable pages
# make numa    where weights lie on emulated machines with several NUMA nodes: MACHINES=two
# make torture kills, full disks, power losses, shared outputs: KILLS=1000 SHARE=1 SEED=1 SUBJECTS=
# make mutants small wrong changes of the packers, audit, planner and journal, EACH of a source: hours
# make docs    the documentation as a site, with links checked: build/site
# make wheels  wheels for x86-64 and aarch64, checked, and a source distribution: dist/
# make clean   remove everything that make made

PYTHON ?= python3
CC     ?= cc
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

C_SOURCES := $(shell find native -name '*.c')
C_HEADERS := $(shell find native -name '*.h')
SETUP     := pyproject.toml setup.py constraints.txt native/build_ffi.py $(C_SOURCES) $(C_HEADERS)
WARNINGS  := -std=c11 -Wall -Wextra -Wconversion -Wshadow -Wstrict-prototypes -Werror

.PHONY: demo test check test-fast asan tsan neon lint format bench fuzz fuzz-native numa torture mutants docs wheels clean

demo: $(VENV)/.core
	rm -rf build/demo
	$(BIN)/ktconv quantize-cpu docs/example/tiny-moe build/demo --method int4 --numa 2
	$(BIN)/ktconv inspect build/demo
	$(BIN)/ktconv verify build/demo --source docs/example/tiny-moe

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 3 --dist worksteal --durations=30

# Every room has some; none is about PyTorch or waits for processes that are killed.
FAST := $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not torch"

check: $(VENV)/.check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(C_SOURCES) $(C_HEADERS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	$(FAST)

test-fast: $(VENV)/.check
	$(FAST)

asan: $(addprefix build/asan/,check placement_check moe_check train_check train_calls_check gradients_check strips_check random_check threads_check pool_check portable_pool_check pool_crowd)
	build/asan/check
	build/asan/placement_check
	build/asan/moe_check
	build/asan/train_check
	build/asan/train_calls_check
	build/asan/gradients_check
	build/asan/strips_check
	build/asan/random_check
	build/asan/threads_check
	build/asan/pool_check
	build/asan/portable_pool_check
	build/asan/pool_crowd 1 2 9 150

ASAN     := -std=c11 -g1 -fsanitize=address,undefined -fno-sanitize=object-size -fno-sanitize-recover=all
EMULATOR := $(filter $(shell uname -m),x86_64)
LIBRARY  := $(patsubst native/%.c,build/asan/%.o,$(filter native/src/%,$(C_SOURCES)))
# Vector instructions take long to compile and run for a moment, plain loops the opposite.
VECTORS  = $(filter-out packed_% encode_% encoded_%,$(filter %_avx2 %_avx512 %_amx,$(notdir $*)))

build/asan/%.o: native/%.c $(C_HEADERS)
	@mkdir -p $(@D)
	$(CC) $(ASAN) -O$(if $(VECTORS),0,1) -Inative/include -c $< -o $@

build/asan/check build/asan/placement_check build/asan/train_calls_check build/asan/threads_check build/asan/pool_check build/asan/pool_crowd: build/asan/%: $(LIBRARY) build/asan/test/%.o
	$(CC) $(ASAN) $^ -lm -pthread -o $@

build/asan/moe_check build/asan/train_check build/asan/gradients_check build/asan/strips_check build/asan/random_check: build/asan/%: $(LIBRARY) build/asan/test/%.o $(EMULATOR:x86_64=build/asan/test/amx_emulator.o)
	$(CC) $(ASAN) $^ -lm -pthread -o $@

# How threads of the pool sleep where there is no futex.
POOL := native/test/pool_check.c $(filter native/src/pool/%,$(C_SOURCES))

build/asan/portable_pool_check: $(POOL) $(C_HEADERS)
	@mkdir -p $(@D)
	$(CC) $(ASAN) -O1 -U__linux__ -Inative/include $(POOL) -lm -pthread -o $@

TSAN := -std=c11 -g1 -O1 -fsanitize=thread

build/tsan/%.o: native/%.c $(C_HEADERS)
	@mkdir -p $(@D)
	$(CC) $(TSAN) -Inative/include -c $< -o $@

build/tsan/pool_check build/tsan/threads_check: build/tsan/%: $(patsubst build/asan/%,build/tsan/%,$(LIBRARY)) build/tsan/test/%.o
	$(CC) $(TSAN) $^ -lm -pthread -o $@

build/tsan/portable_pool_check: $(POOL) $(C_HEADERS)
	@mkdir -p $(@D)
	$(CC) $(TSAN) -U__linux__ -Inative/include $(POOL) -lm -pthread -o $@

tsan: build/tsan/pool_check build/tsan/portable_pool_check build/tsan/threads_check
	build/tsan/pool_check
	build/tsan/portable_pool_check
	build/tsan/threads_check

AARCH64 := aarch64-linux-gnu-gcc
QEMU    := qemu-aarch64

build/aarch64/%.o: native/%.c $(C_HEADERS)
	@mkdir -p $(@D)
	$(AARCH64) -std=c11 -g1 -O2 -Inative/include -c $< -o $@

build/aarch64/check build/aarch64/moe_check build/aarch64/train_check build/aarch64/strips_check build/aarch64/pool_check: build/aarch64/%: $(patsubst build/asan/%,build/aarch64/%,$(LIBRARY)) build/aarch64/test/%.o
	$(AARCH64) -static $^ -lm -pthread -o $@

neon: $(addprefix build/aarch64/,check moe_check train_check strips_check pool_check)
	$(QEMU) build/aarch64/check > build/aarch64/check.log || { cat build/aarch64/check.log; exit 1; }
	grep -x 'levels: scalar neon' build/aarch64/check.log
	$(QEMU) build/aarch64/moe_check
	$(QEMU) build/aarch64/train_check
	$(QEMU) build/aarch64/strips_check
	$(QEMU) build/aarch64/pool_check "no fork"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(C_SOURCES) $(C_HEADERS)
	$(CC) $(WARNINGS) -O1 -Inative/include -fsyntax-only $(filter native/src/%,$(C_SOURCES))

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(C_SOURCES) $(C_HEADERS)

bench: $(VENV)/.core
	rm -rf build/bench
	$(BIN)/ktconv bench
	$(BIN)/ktconv bench --stage pack
	$(BIN)/python benchmarks/make_checkpoint.py build/bench/model --preset qwen3-30b --layers 1
	$(BIN)/python benchmarks/convert.py build/bench/model --work build/bench/out

SECONDS ?= 60

fuzz: $(VENV)/.fuzz
	$(BIN)/python tests/fuzz/run.py --seconds $(SECONDS)

fuzz-native: $(VENV)/.check build/asan/random_check
	$(BIN)/python tests/fuzz/native.py --seconds $(SECONDS) build/asan/random_check

MACHINES ?=

numa: $(VENV)/.core
	$(BIN)/python tests/numa/run.py $(MACHINES)

KILLS    ?= 1000
SHARE    ?= 1
SEED     ?= 1
SUBJECTS ?=

torture: $(VENV)/.dev
	$(BIN)/python tests/torture/run.py --kills $(KILLS) --share $(SHARE) --seed $(SEED) $(SUBJECTS)

EACH ?= 8

mutants: $(VENV)/.check
	$(BIN)/python tests/mutation/run.py --each $(EACH)

docs: $(VENV)/.check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

wheels: $(VENV)/.wheels
	$(BIN)/python packaging/wheels.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -rf src/*.egg-info src/ktconv/_native.c src/ktconv/_native*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.python:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.core: $(VENV)/.python $(SETUP)
	$(PIP) -e .
	touch $@

$(VENV)/.check: $(VENV)/.python $(SETUP)
	$(PIP) -e '.[check]'
	touch $@ $(VENV)/.core

$(VENV)/.wheels: $(VENV)/.python $(SETUP)
	$(PIP) -e '.[wheels]'
	touch $@ $(VENV)/.core

$(VENV)/.fuzz: $(VENV)/.python $(SETUP)
	$(PIP) -e '.[fuzz]'
	touch $@ $(VENV)/.check $(VENV)/.core

$(VENV)/.dev: $(VENV)/.python $(SETUP)
	$(PIP) -e '.[dev]'
	touch $@ $(VENV)/.check $(VENV)/.core
