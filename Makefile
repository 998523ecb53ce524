# `make` lists what can be made. Settings, given as `make train_gpt2 BLAS=0`:
#   CC        compiler: gcc or clang (default: cc)
#   BLAS      0 uses the built-in matrix products even where OpenBLAS is installed
#   SANITIZE  address,undefined builds with these sanitizers, for finding faults
#   ARCH      the processor to build for (default: native, this machine's)

ARCH ?= native
WARNINGS := -Wall -Wextra
# -Ofast and -ffast-math would make isfinite(NAN) true; these two give most of their speed and change no result.
CFLAGS ?= -O3 -fno-math-errno -fno-trapping-math

# Does the compiler take these flags, for a whole program?
takes = $(shell echo 'int main(void) { return 0; }' | $(CC) $(1) -x c - -o /dev/null 2>/dev/null && echo $(1))

ifneq ($(filter train_gpt2 tokenize demo build/%,$(MAKECMDGOALS)),)
ifeq ($(shell command -v $(firstword $(CC))),)
$(error there is no compiler $(CC); on Debian: apt-get install gcc, and leave CC= out)
endif
MARCH := $(call takes,-march=$(ARCH))
ifeq ($(MARCH)$(filter native,$(ARCH)),)
$(error $(CC) does not know ARCH=$(ARCH))
endif
OPENMP := $(call takes,-fopenmp)
ifeq ($(OPENMP),)
$(warning $(CC) has no OpenMP here, so the program will use one core; on Debian: apt-get install libomp-dev, on macOS: brew install libomp)
OPENMP := $(call takes,-fopenmp-simd) -Wno-unknown-pragmas
endif
ifneq ($(BLAS),0)
BLAS_FLAGS := $(shell pkg-config --exists openblas 2>/dev/null && echo -DUSE_OPENBLAS $$(pkg-config --cflags openblas))
BLAS_LIBS := $(if $(BLAS_FLAGS),$(shell pkg-config --libs openblas))
endif
endif

# -Wno-pass-failed: at -O1 clang does not turn loops into vector instructions, and would say so for each.
FLAGS = -std=gnu11 -D_GNU_SOURCE $(WARNINGS) $(CFLAGS) $(MARCH) $(OPENMP) $(if $(SANITIZE),-g -O1 -fsanitize=$(SANITIZE) -fno-sanitize-recover=all -Wno-pass-failed)
HEADERS := $(wildcard gpt/*.h)
VARIANT := build/$(notdir $(lastword $(filter-out -%,$(CC))))$(if $(filter 0,$(BLAS)),-own)$(if $(SANITIZE),-sanitized)

help:
	@echo 'make demo         train a small GPT for about two minutes and let it write'
	@echo 'make train_gpt2   the trainer on the CPU; ./train_gpt2 --help lists its options'
	@echo 'make tokenize     the program that turns texts into .bin shards'
	@echo 'make test         all tests that this machine can run'
	@echo 'make bench        speed beside its targets, and memory'
	@echo 'make asan         the tests again, with address and undefined-behaviour sanitizers only'
	@echo 'make clean        remove what was built; data, runs and checkpoints stay'
	@echo 'Settings go behind: make train_gpt2 CC=clang, BLAS=0 (built-in matrix products), ARCH=x86-64-v3'

# What was built with other flags is built again.
$(VARIANT)/flags: always
	@mkdir -p $(@D)
	@echo '$(CC) $(FLAGS) $(BLAS_FLAGS)' | cmp -s - $@ || echo '$(CC) $(FLAGS) $(BLAS_FLAGS)' > $@

$(VARIANT)/train_gpt2: train_gpt2.c
$(VARIANT)/test_gpt2: test_gpt2.c train_gpt2.c tests/frame.h
$(VARIANT)/bench_gpt2: dev/bench_gpt2.c train_gpt2.c
$(VARIANT)/test_host: tests/test_host.c tests/frame.h
$(VARIANT)/tokenize: data/tokenize.c
$(addprefix $(VARIANT)/,train_gpt2 test_gpt2 bench_gpt2 test_host tokenize): $(HEADERS) $(VARIANT)/flags
	$(CC) $(FLAGS) $(BLAS_FLAGS) -I. $(filter %/$(@F).c $(@F).c,$^) -o $@ $(BLAS_LIBS) -lm

train_gpt2 tokenize: %: $(VARIANT)/% always
	@cmp -s $< $@ || cp -f $< $@

demo: train_gpt2
	scripts/demo.sh

test:
	tests/run.sh

asan:
	tests/run.sh sanitized

bench:
	dev/bench.sh

clean:
	rm -rf build train_gpt2 tokenize

always:
.PHONY: help demo test asan bench clean always
.DELETE_ON_ERROR:
