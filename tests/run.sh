#!/usr/bin/env bash
#
# Runs every test that this machine can run; what it cannot run is skipped, with the reason.
#
# Usage: tests/run.sh              all of them: make test
#        tests/run.sh gpu          only those on a GPU: make test-gpu
#        tests/run.sh sanitized    only those built with sanitizers: make asan
#        TEST_SEED=N tests/run.sh  with the random inputs of a run that printed this seed
#
# Each test prints "ok - NAME", "not ok - NAME: reason" or "skip - NAME: reason". The last line is the sum; the exit
# status is 1 if any failed.

set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

only=${1-all}
log=build/tests.log
mkdir -p build
: >"$log"
have() { command -v "$1" >/dev/null 2>&1; }
report() { printf '%s\n' "$*" | tee -a "$log"; }
skip() { report "skip - $1: $2"; }

# Runs a command that prints test lines, under a title. One that fails without naming a test counts as a failed test.
suite() {
    local title=$1 failed; shift
    failed=$(grep -c '^not ok' "$log")
    report "# $title"
    "$@" 2>&1 | tee -a "$log"
    if [ "${PIPESTATUS[0]}" != 0 ] && [ "$(grep -c '^not ok' "$log")" = "$failed" ]; then
        report "not ok - $title: it ended with an error"
    fi
}

# A check that is one test: prints its output only if it fails.
check() {
    local name=$1 output; shift
    if output=$("$@" 2>&1); then report "ok - $name"; else report "not ok - $name: $output"; fi
}

# Builds programs with the given settings of the Makefile, warnings being errors. One is only an "info" of ptxas: that it serializes a
# kernel's wgmma instructions, which makes it slow.
make_strictly() {
    local output
    output=$(make "$@" 2>&1) && ! grep -q 'wgmma.*serialized' <<<"$output" && return
    echo "$output"
    return 1
}
build() {
    local name=$1; shift
    check "builds without a warning: $name" make_strictly -s -j"$(nproc 2>/dev/null || echo 2)" WARNINGS='-Wall -Wextra -Werror' "$@"
}

# Can the compiler do this at all? Some parts of a compiler are packages of their own.
able() { echo 'int main(void) { return 0; }' | "$@" - -o /dev/null 2>/dev/null; }

# The CUDA sources built by nvcc, and what only a GPU can show of them.
with_nvcc() {
    if ! have nvcc && [ ! -x /usr/local/cuda/bin/nvcc ]; then skip "nvcc, and a GPU" "the CUDA toolkit is not installed"; return; fi
    report "# building with nvcc, which takes minutes"
    if ! nvidia-smi -L >/dev/null 2>&1; then
        build "nvcc, without register spills" build/nvcc/{attention,train_gpt2cu,test_gpt2cu,test_hopper} GPU='8.0 9.0a 12.0' PTXAS=-warn-spills,-Werror
        skip "on a GPU" "there is none"
        return
    fi
    build "nvcc" build/nvcc/{attention,attention-late,train_gpt2cu,test_gpt2cu,test_hopper} build/cc/train_gpt2 build/cc/attention-cpu
    suite "Hopper's instructions on the GPU" build/nvcc/test_hopper
    suite "attention on the GPU" build/nvcc/attention test
    suite "attention on the GPU, without its kernels for Hopper" env ATTENTION_NO_SM90=1 build/nvcc/attention test trainer
    for part in 'T 129 ' 'T 1000 ' 'T 2048 '; do
        suite "30 runs of attention on the GPU, with delays" env TEST_RUNS=30 build/nvcc/attention-late test trainer "$part"
    done
    suite "the trainer's numbers on the GPU" build/nvcc/test_gpt2cu
    suite "the trainer's command line on the GPU" tests/test_train_gpt2cu.sh build/nvcc/train_gpt2cu build/cc/train_gpt2
    local sanitizer
    sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
    if [ ! -x "$sanitizer" ]; then skip "compute-sanitizer" "it is not installed"; return; fi
    check "memcheck finds nothing in attention" "$sanitizer" --tool memcheck --error-exitcode 9 build/nvcc/attention test trainer 'T 129 '
    check "memcheck finds nothing" env TEST_SMALL=1 "$sanitizer" --tool memcheck --error-exitcode 9 build/nvcc/test_gpt2cu
    check "racecheck finds nothing in training" env TEST_SMALL=1 "$sanitizer" --tool racecheck --error-exitcode 9 build/nvcc/test_gpt2cu \
        training_as_pytorch
}

compilers=''
for compiler in gcc clang; do
    if have $compiler; then compilers+=" $compiler"; else skip "$compiler" "it is not installed"; fi
done
[ -n "$compilers" ] || { report "not ok - compilers: neither gcc nor clang was found"; exit 1; }

if [ "$only" = gpu ]; then with_nvcc; fi
if [ "$only" = all ]; then
    for compiler in $compilers; do
        for header in gpt/*.h; do
            check "$header alone, $compiler, C11" "$compiler" -std=c11 -D_GNU_SOURCE -fopenmp-simd -Wall -Wextra -Werror \
                -Wno-unused-function -Wno-unused-variable -Wno-unknown-pragmas -fsyntax-only -x c "$header"
            able "$compiler" -x c++ || continue
            check "$header alone, $compiler, C++17" "$compiler" -std=c++17 -D_GNU_SOURCE -fopenmp-simd -Wall -Wextra -Werror \
                -Wno-unused-function -Wno-unused-variable -Wno-unknown-pragmas -fsyntax-only -x c++ "$header"
        done
        able "$compiler" -x c++ || skip "headers alone, $compiler, C++17" "it has no C++ here (on Debian: apt-get install g++)"
        v=build/$compiler-own
        build "$compiler, own matrix products" CC="$compiler" BLAS=0 "$v"/{train_gpt2,test_gpt2,bench_gpt2,test_host,tokenize}
        suite "host library, $compiler" "$v/test_host"
        suite "numbers, $compiler, own matrix products" "$v/test_gpt2"
        able "$compiler" -x c++ -lstdc++ || { skip "CUDA on the CPU, $compiler" "it has no C++ here"; continue; }
        build "$compiler, CUDA on the CPU" CC="$compiler" BLAS=0 "$v"/{test_cuda_on_cpu,test_hopper,attention-cpu,attention-late,exercises,exercises-solved,test_gpt2cu,train_gpt2cu-cpu}
        suite "CUDA on the CPU, $compiler" "$v/test_cuda_on_cpu"
        for order in 1 2 3; do  # of the threads, and speed of copies and products
            suite "Hopper's instructions on the CPU, $compiler, order $order" env CUDA_ON_CPU_SEED=$order "$v/test_hopper"
        done
        suite "the GPU trainer's numbers on the CPU, $compiler" "$v/test_gpt2cu"
    done
    first=${compilers# }; first=${first%% *}
    if pkg-config --exists openblas 2>/dev/null; then
        build "$first, OpenBLAS" CC="$first" "build/$first"/{train_gpt2,test_gpt2,bench_gpt2}
        suite "numbers, $first, OpenBLAS" "build/$first/test_gpt2"
    else
        skip "numbers with OpenBLAS" "pkg-config finds no openblas (on Debian: apt-get install libopenblas-dev pkg-config)"
    fi
    if [ "$(uname -m)" = x86_64 ]; then  # the vector widths that ARCH=native leaves out
        for arch in x86-64 x86-64-v3; do
            build "$first, $arch" CC="$first" BLAS=0 ARCH=$arch VARIANT="build/$arch" "build/$arch/test_gpt2"
            suite "numbers, $first, $arch" "build/$arch/test_gpt2"
        done
    else
        skip "narrower vectors" "they are those of x86-64"
    fi
    suite "command line" tests/test_cli.sh "build/$first-own/train_gpt2"
    if [ -x "build/$first-own/train_gpt2cu-cpu" ]; then
        suite "the GPU trainer's command line" tests/test_train_gpt2cu.sh "build/$first-own/train_gpt2cu-cpu" "build/$first-own/train_gpt2"
    else
        skip "the GPU trainer's command line" "it was not built"
    fi
    if [ -x "build/$first-own/attention-cpu" ]; then
        suite "attention's command line, and the exercises" tests/test_attention.sh "build/$first-own"
        for order in 1 2 3; do  # of the threads
            suite "attention on the CPU, order $order" env CUDA_ON_CPU_SEED=$order "build/$first-own/attention-cpu" test
            for part in 'T 200 ' 'T 10'; do  # 1000 and 1024: three blocks and more add to dQ
                suite "attention on the CPU with delays, order $order" env CUDA_ON_CPU_SEED=$order TEST_RUNS=5 \
                    "build/$first-own/attention-late" test trainer "$part"
            done
        done
        suite "attention on the CPU as on GPUs before Hopper" env CUDA_ON_CPU_CAPABILITY=8.0 "build/$first-own/attention-cpu" test trainer
    else
        skip "attention on the CPU" "it was not built"
    fi
    with_nvcc
    suite "tokenize" tests/test_tokenize.sh "build/$first-own/tokenize"
    suite "get_data.sh" tests/test_get_data.sh
    suite "make demo" tests/test_demo.sh
    if have python3; then suite "Transformers" python3 tests/test_transformers.py "build/$first-own/train_gpt2"
    else skip "Transformers" "python3 is not installed"; fi
    for script in .ci/run dev/*.sh scripts/*.sh tests/*.sh; do
        if have shellcheck; then check "shellcheck $script" shellcheck -x "$script"; else skip "shellcheck $script" "it is not installed"; fi
    done
fi

if [ "$only" = gpu ]; then compilers=''; fi
for compiler in $compilers; do
    if ! able "$compiler" -fsanitize=address,undefined -x c; then
        skip "$compiler, sanitizers" "their libraries are not installed (on Debian, for clang: apt-get install libclang-rt-dev)"
        continue
    fi
    v=build/$compiler-own-sanitized
    build "$compiler, sanitizers" CC="$compiler" BLAS=0 SANITIZE=address,undefined "$v"/{train_gpt2,test_gpt2,test_host,tokenize}
    suite "host library, $compiler, sanitizers" "$v/test_host"
    suite "numbers, $compiler, sanitizers" "$v/test_gpt2"
    suite "command line, $compiler, sanitizers" tests/test_cli.sh "$v/train_gpt2"
    able "$compiler" -x c++ -fsanitize=address,undefined -lstdc++ || { skip "CUDA on the CPU, $compiler, sanitizers" "no C++"; continue; }
    build "$compiler, CUDA on the CPU, sanitizers" CC="$compiler" BLAS=0 SANITIZE=address,undefined "$v"/test_{cuda_on_cpu,hopper}
    suite "CUDA on the CPU, $compiler, sanitizers" "$v/test_cuda_on_cpu"
    suite "Hopper's instructions on the CPU, $compiler, sanitizers" "$v/test_hopper"
    if [ "$compiler" = gcc ] || [ "$compilers" = ' clang' ]; then  # one of them is enough for this
        build "$compiler, the GPU trainer on the CPU, sanitizers" CC="$compiler" BLAS=0 SANITIZE=address,undefined "$v/test_gpt2cu"
        suite "the GPU trainer's numbers on the CPU, $compiler, sanitizers" "$v/test_gpt2cu"
    fi
done
# All of the attention tests would take minutes under a sanitizer, so it sees those of three lengths, with all inputs.
sanitized=${compilers# } sanitized=${sanitized%% *}  # of two compilers the first, gcc, needs less time for it
v=build/$sanitized-own-address
if [ -n "$sanitized" ] && able "$sanitized" -x c++ -fsanitize=address -lstdc++; then
    build "$sanitized, attention, address sanitizer" CC="$sanitized" SANITIZE=address VARIANT="$v" "$v/attention-cpu"
    for variant in naive v1 v2 v3 trainer; do
        for part in 'T 1 ' 'T 7 ' 'T 129 '; do
            suite "attention on the CPU, $sanitized, address sanitizer" "$v/attention-cpu" test "$variant" "$part"
        done
    done
fi

count() { grep -c "^$1 - " "$log"; }
if [ "$(count 'not ok')" != 0 ]; then echo '# failed:'; grep '^not ok - ' "$log"; fi
echo "$(count ok) passed, $(count 'not ok') failed, $(count skip) skipped"
[ "$(count 'not ok')" = 0 ]
