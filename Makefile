# `make` lists what can be made. Settings, given as `make train_gpt2 BLAS=0`:
#   CC        compiler: gcc or clang (default: cc)
#   BLAS      0 uses the built-in matrix products even where OpenBLAS is installed
#   SANITIZE  address,undefined builds with these sanitizers, for finding faults
#   ARCH      the processor to build for (default: native, this machine's)
#   PTXAS     flags for ptxas, as PTXAS=-warn-spills,-Werror
#   GPU       compute capabilities to build for, as in GPU="8.0 9.0a" (default: the GPUs of this machine, or 8.0, 9.0a, 10.0 and 12.0)

ARCH ?= native
WARNINGS := -Wall -Wextra
# -Ofast and -ffast-math would make isfinite(NAN) true; these two give most of their speed and change no result.
CFLAGS ?= -O3 -fno-math-errno -fno-trapping-math

# Does the compiler take these flags, for a whole program?
takes = $(shell echo 'int main(void) { return 0; }' | $(CC) $(1) -x c - -o /dev/null 2>/dev/null && echo $(1))

NVCC ?= $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
DEMO_ON_GPU := $(and $(filter demo,$(MAKECMDGOALS)),$(NVCC),$(shell nvidia-smi -L >/dev/null 2>&1 && echo yes))
ifneq ($(filter train_gpt2 tokenize demo attention-cpu exercises build/%,$(MAKECMDGOALS)),)
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

# CUDA sources: with nvcc for GPUs, or with the C++ of $(CC) for the CPU, by way of dev/cuda_on_cpu.h.
CUDA_FLAGS = -x c++ -std=gnu++17 $(filter-out -std=gnu11,$(FLAGS)) -Wno-unknown-pragmas -I.
# The C++ library, and with clang the part of its sanitizers that C++ needs.
CUDA_LIBS = -lstdc++ -lm -pthread $(if $(SANITIZE),$(call takes,-fsanitize-link-c++-runtime))
CUDA_HEADERS := $(HEADERS) gpt/cuda.cuh gpt/tile.cuh gpt/hopper.cuh dev/cuda_on_cpu.h dev/hopper_on_cpu.h
# The variants register in the order in which they are linked: from the naive one on, and last what the trainer has.
ATTENTION := $(sort $(filter-out trainer,$(notdir $(basename $(wildcard dev/attention/*.cu))))) trainer
ifneq ($(filter train_gpt2cu attention build/nvcc%,$(MAKECMDGOALS))$(DEMO_ON_GPU),)
ifeq ($(NVCC),)
$(error there is no nvcc; install the CUDA toolkit, or make train_gpt2 and attention-cpu, which need none)
endif
# Code for 9.0 may use instructions of just this generation, which is the "a".
GPU ?= $(or $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -x '[0-9.]*' | sort -u | sed 's/^9\.0$$/&a/'),\
    8.0 9.0a 10.0 12.0)
# What is given is looked at here, as nvcc's own words would not say what to do.
ifneq ($(origin GPU),file)
ifneq ($(if $(strip $(GPU)),$(shell printf '%s\n' $(GPU) | grep -vxE '(8|9|1[0-9])\.[0-9][af]?'),none),)
$(error GPU is '$(GPU)'; expected compute capabilities from 8.0 on, as in GPU="8.0 9.0a")
endif
endif
NVCC_FLAGS = -std=c++17 -O3 -I. -DBUILT_FOR='"$(GPU)"' -lineinfo -Xcompiler -Wall,-Wextra,-fopenmp $(if $(PTXAS),-Xptxas=$(PTXAS)) \
    $(foreach gpu,$(subst .,,$(GPU)),-gencode arch=compute_$(gpu),code=sm_$(gpu))
endif

help:
	@echo 'make demo         train a small GPT, for about two minutes or, on a GPU, seconds, and let it write'
	@echo 'make train_gpt2cu the trainer on an NVIDIA GPU; needs the CUDA toolkit'
	@echo 'make train_gpt2   the trainer on the CPU; ./train_gpt2 --help lists the options of both'
	@echo 'make tokenize     the program that turns texts into .bin shards'
	@echo 'make attention    the attention kernels side by side, on a GPU; ./attention says what it can do'
	@echo 'make attention-cpu    the same kernels on the CPU, without a GPU or CUDA'
	@echo 'make exercises    do your answers to the exercises of dev/attention/README.md work?'
	@echo 'make test         all tests that this machine can run'
	@echo 'make test-gpu     only those of the GPU'
	@echo 'make bench        speed beside its targets, and memory'
	@echo 'make asan         the tests again, with address and undefined-behaviour sanitizers only'
	@echo 'make clean        remove what was built; data, runs and checkpoints stay'
	@echo 'Settings go behind: make train_gpt2 CC=clang, BLAS=0 (built-in matrix products), ARCH=x86-64-v3; make train_gpt2cu GPU=8.6;'
	@echo 'the head of the Makefile has all of them'

# What was built with other flags is built again.
$(VARIANT)/flags: always
	@mkdir -p $(@D)
	@echo '$(CC) $(FLAGS) $(BLAS_FLAGS)' | cmp -s - $@ || echo '$(CC) $(FLAGS) $(BLAS_FLAGS)' > $@
build/nvcc/flags: always
	@mkdir -p $(@D)
	@echo "$(NVCC) $(NVCC_FLAGS)" | cmp -s - $@ || echo "$(NVCC) $(NVCC_FLAGS)" > $@

$(VARIANT)/train_gpt2: train_gpt2.c
$(VARIANT)/test_gpt2: test_gpt2.c train_gpt2.c tests/frame.h
$(VARIANT)/bench_gpt2: dev/bench_gpt2.c train_gpt2.c
$(VARIANT)/test_host: tests/test_host.c tests/frame.h
$(VARIANT)/tokenize: data/tokenize.c
$(addprefix $(VARIANT)/,train_gpt2 test_gpt2 bench_gpt2 test_host tokenize): $(HEADERS) $(VARIANT)/flags
	$(CC) $(FLAGS) $(BLAS_FLAGS) -I. $(filter %/$(@F).c $(@F).c,$^) -o $@ $(BLAS_LIBS) -lm

ATTENTION_HEADERS := $(CUDA_HEADERS) attention.cuh attention_sm90.cuh $(wildcard dev/attention/*.h)
$(VARIANT)/%.o: dev/attention/%.cu $(ATTENTION_HEADERS) $(VARIANT)/flags
	$(CC) $(CUDA_FLAGS) -c $< -o $@
$(VARIANT)/attention-cpu: $(ATTENTION:%=$(VARIANT)/%.o)
	$(CC) $(FLAGS) $^ -o $@ $(CUDA_LIBS)
$(VARIANT)/attention-late: dev/attention/trainer.cu $(VARIANT)/main.o $(ATTENTION_HEADERS) $(VARIANT)/flags
	$(CC) $(CUDA_FLAGS) -include dev/attention/late.h $< -x none $(VARIANT)/main.o -o $@ $(CUDA_LIBS)
$(VARIANT)/test_cuda_on_cpu $(VARIANT)/test_hopper: $(VARIANT)/%: dev/%.cu $(CUDA_HEADERS) dev/planted.h tests/frame.h $(VARIANT)/flags
	$(CC) $(CUDA_FLAGS) $< -o $@ $(CUDA_LIBS)
build/nvcc/test_hopper: dev/test_hopper.cu $(CUDA_HEADERS) tests/frame.h build/nvcc/flags
	$(NVCC) $(NVCC_FLAGS) $< -o $@
$(VARIANT)/exercises $(VARIANT)/exercises-solved: dev/attention/exercises/test_exercises.cu $(wildcard dev/attention/exercises/*.h) \
    dev/attention/v2.cu $(ATTENTION_HEADERS) tests/frame.h $(VARIANT)/flags
	@$(CC) $(CUDA_FLAGS) $(if $(filter %-solved,$@),-DSOLUTIONS) $< -o $@ $(CUDA_LIBS)
build/nvcc/%.o: dev/attention/%.cu $(ATTENTION_HEADERS) build/nvcc/flags
	$(NVCC) $(NVCC_FLAGS) -c $< -o $@
build/nvcc/attention: $(ATTENTION:%=build/nvcc/%.o)
	$(NVCC) $^ -o $@ -Xcompiler -fopenmp -lcublas
build/nvcc/attention-late: dev/attention/trainer.cu build/nvcc/main.o $(ATTENTION_HEADERS) build/nvcc/flags
	$(NVCC) $(NVCC_FLAGS) -include dev/attention/late.h $< build/nvcc/main.o -o $@ -lcublas

# The GPU trainer; and, for tests, the same on the CPU.
build/nvcc/train_gpt2cu: train_gpt2.cu attention.cuh attention_sm90.cuh $(CUDA_HEADERS) build/nvcc/flags
	$(NVCC) $(NVCC_FLAGS) $< -o $@ -lcublasLt
$(VARIANT)/train_gpt2cu-cpu: train_gpt2.cu attention.cuh attention_sm90.cuh $(CUDA_HEADERS) $(VARIANT)/flags
	$(CC) $(CUDA_FLAGS) $< -o $@ $(CUDA_LIBS)
# The GPU trainer's test, on the CPU and on a GPU, beside train_gpt2.c, which is C.
$(VARIANT)/reference.o build/nvcc/reference.o: tests/reference.c tests/reference.h train_gpt2.c $(HEADERS) $(VARIANT)/flags
	@mkdir -p $(@D)
	$(CC) $(FLAGS) -I. -c $< -o $@
TEST_GPT2CU := test_gpt2.cu train_gpt2.cu attention.cuh attention_sm90.cuh tests/frame.h tests/reference.h $(CUDA_HEADERS)
$(VARIANT)/test_gpt2cu: $(TEST_GPT2CU) $(VARIANT)/reference.o $(VARIANT)/flags
	$(CC) $(CUDA_FLAGS) $< -x none $(VARIANT)/reference.o -o $@ $(CUDA_LIBS)
build/nvcc/test_gpt2cu: $(TEST_GPT2CU) build/nvcc/reference.o build/nvcc/flags
	$(NVCC) $(NVCC_FLAGS) $< build/nvcc/reference.o -o $@ -lcublasLt

train_gpt2 tokenize attention-cpu: %: $(VARIANT)/% always
	@cmp -s $< $@ || cp -f $< $@
train_gpt2cu attention: %: build/nvcc/% always
	@cmp -s $< $@ || cp -f $< $@

exercises: $(VARIANT)/exercises
	@$<

demo: $(if $(DEMO_ON_GPU),train_gpt2cu,train_gpt2)
	scripts/demo.sh ./$<

test:
	tests/run.sh
test-gpu:
	tests/run.sh gpu

asan:
	tests/run.sh sanitized

bench:
	dev/bench.sh

clean:
	rm -rf build train_gpt2 train_gpt2cu tokenize attention attention-cpu

always:
.PHONY: help demo exercises test test-gpu asan bench clean always
.DELETE_ON_ERROR:
