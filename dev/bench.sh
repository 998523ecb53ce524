#!/usr/bin/env bash
#
# Speed and memory of the CPU trainer, all in one run: make bench. Nothing else should run on the machine.

set -euo pipefail
cd "$(dirname "$0")/.."
CC=${CC:-cc}
echo "$(nproc) cores: $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo 2>/dev/null | head -n 1)"
if pkg-config --exists openblas 2>/dev/null; then
    make -s CC="$CC" VARIANT=build/bench build/bench/bench_gpt2
    build/bench/bench_gpt2 speed
fi
make -s CC="$CC" BLAS=0 VARIANT=build/bench-own build/bench-own/bench_gpt2
build/bench-own/bench_gpt2 speed
echo 'tiny, B = 1, built-in matrix products:'
build/bench-own/bench_gpt2 memory
