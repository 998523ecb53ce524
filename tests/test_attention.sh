#!/usr/bin/env bash
#
# Tests what the attention harness refuses and how it prints, and whether the exercises tell right from wrong.
#
# Usage: tests/test_attention.sh BUILD      BUILD has attention-cpu, exercises and exercises-solved; default: build/cc

set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
. tests/lib.sh

build=${1-build/cc}
attention=$build/attention-cpu
errors=$build/attention-errors

refused() { # PATTERN ARGUMENT...: it has to end with an error that matches PATTERN, in one line, before it prints anything
    local pattern=$1 error; shift
    error=$("$attention" "$@" 2>&1) && wrong "it accepts $*"
    grep -qE -- "^error: .*$pattern" <<<"$error" || wrong "it does not say '$pattern' to $*: $error"
    [ "$(wc -l <<<"$error")" = 1 ] || wrong "more than a line: $error"
}

begin 'what does not exist is refused with what does'
refused "no variant 'v9'; there are: naive, v1, v2, v3, trainer" test v9
refused "no command 'teste'; there are: test and bench" teste
refused 'no option --ful; there are: --full' bench --ful
refused 'no case has' test v2 'T 77777'
end

begin 'shapes that make no sense are refused'
refused "T is '0'; expected a whole number from 1" bench v2 1 0 2 64
refused "B is '-1'; expected" bench v2 -1 64 2 64
refused "T is '6x'; expected" bench v2 1 6x 2 64
refused "NH is '2.5'; expected" bench v2 1 64 2.5 64
refused 'a shape is four numbers' bench v2 1 64 2
refused "HS is '99999999999'; expected" bench v2 1 64 2 99999999999
refused 'GiB of device memory' bench v2 100000 100000 12 64
end

begin 'a head size without a kernel is refused with those that have one'
refused 'v1 has no kernels for head size 80; it has them for 32, 64 and 128' bench v1 1 64 2 80
refused 'v2 has no kernels for head size 65; it has them for 32, 64 and 128' bench v2 1 64 2 65
refused 'v3 has no kernels for head size 32; it has them for 64 and 128' bench v3 1 64 2 32
refused 'head size 80 is not supported; 32, 64 and 128 are' bench trainer 1 64 2 80
refused 'v3 has no kernels for head size 20; it has them for 64 and 128' test v3 'HS 20'
end

begin 'a GPU that is too old, or has too little shared memory, is refused with what is needed'
CUDA_ON_CPU_CAPABILITY=7.5 refused 'capability 7.5, and the kernels need 8.0' test v2
CUDA_ON_CPU_SHARED_KB=64 refused 'v2 needs [0-9]* KiB of shared memory a block for head size 128, and this GPU has 64' bench v2 1 64 2 128
CUDA_ON_CPU_SHARED_KB=96 refused 'head size 128 needs 97 KiB of shared memory a block, and this GPU has 96' bench trainer 1 64 2 128
CUDA_ON_CPU_SHARED_KB=64 refused 'v1 needs [0-9]* KiB of shared memory a block for head size 64, and this GPU has 64' bench v1 1 64 2 64
CUDA_ON_CPU_SHARED_KB=99 refused 'v3 needs [0-9]* KiB of shared memory a block for head size 128, and this GPU has 99' bench v3 1 64 2 128
CUDA_ON_CPU_CAPABILITY=8.0 refused 'the kernels for Hopper need compute capability 9.0, and this GPU has 8.0' bench v3 1 64 2 64
end

begin 'tests of what a variant for some GPUs only does not support are skipped, with the reason'
tests=$(CUDA_ON_CPU_CAPABILITY=10.0 "$attention" test v3 'T 1 ') || wrong "they end with $?"
[ "$(grep -c '^skip - v3: .*: the kernels for Hopper need compute capability 9.0, and this GPU has 10.0' <<<"$tests")" = 4 ] || wrong "it says: $tests"
[ "$(grep -c '^skip - v3: .* HS 32 .*: v3 has no kernels for head size 32' <<<"$tests")" = 2 ] || wrong "it says: $tests"
grep -qx '0 passed, 0 failed, 6 skipped' <<<"$tests" || wrong "the sum is not as expected: $tests"
CUDA_ON_CPU_SHARED_KB=64 "$attention" test v2 'T 1 NH 3 HS 128 causal' >/dev/null && wrong 'v2 need not support what is required of it'
end

begin 'the smallest GPUs have shared memory enough'
CUDA_ON_CPU_SHARED_KB=99 "$attention" bench 1 65 1 128 >/dev/null || wrong 'head size 128 fails with 99 KiB'
CUDA_ON_CPU_SHARED_KB=99 "$attention" bench 1 65 1 64 >/dev/null || wrong 'head size 64 fails with 99 KiB'
end

begin 'a table and its JSON have a row for each variant'
table=$("$attention" bench 1 65 1 64) || wrong "bench ends with $?"
for variant in naive v1 v2 v3 trainer; do grep -qE "^$variant +[0-9.]+ " <<<"$table" || wrong "no row for $variant"; done
if command -v python3 >/dev/null; then
    "$attention" bench 1 65 1 32 --json | python3 -c '
import json, sys
rows = list(map(json.loads, sys.stdin))
assert [row["variant"] for row in rows] == ["naive", "v1", "v2", "v3", "trainer"], rows
refused = rows.pop(3)
assert refused["forward_ms"] is None and "head size 32" in refused["why_not"], refused
assert all(row["forward_ms"] > 0 and row["backward_ms"] > 0 and row["workspace_bytes"] > 0 for row in rows), rows
assert all(row["T"] == 65 and row["causal"] and row["out_error"] < 0.02 for row in rows), rows
assert rows[0]["speedup_over_naive"] == 1, rows' || wrong 'the JSON is not as expected'
fi
end

begin 'results that cannot be written are an error'
if [ -e /dev/full ]; then
    "$attention" bench 1 64 1 32 --json >/dev/full 2>"$errors" && wrong 'a full disk is success'
    "$attention" >/dev/full 2>>"$errors" && wrong 'a full disk is success for the usage'
    grep -q 'error: the results cannot be written' "$errors" || wrong "it says: $(cat "$errors")"
    rm -f "$errors"
fi
end

begin 'settings that make no sense are refused'
TEST_RUNS=0 refused "TEST_RUNS is '0'; expected a whole number" test v2 'T 1 '
TEST_SEED=abc refused "TEST_SEED is 'abc'; expected a whole number" test v2 'T 1 '
TEST_SEED=-1 refused "TEST_SEED is '-1'; expected a whole number" test v2 'T 1 '
CUDA_ON_CPU_SEED=x refused "CUDA_ON_CPU_SEED is 'x'; expected a whole number" test v2 'T 1 '
CUDA_ON_CPU_CAPABILITY=8.-1 refused "CUDA_ON_CPU_CAPABILITY is '8.-1'; expected two numbers" test v2 'T 1 '
CUDA_ON_CPU_CAPABILITY=9.0a refused "CUDA_ON_CPU_CAPABILITY is '9.0a'; expected two numbers" test v2 'T 1 '
refused 'no command; there are: test and bench' --full
end

begin 'without arguments it explains itself'
help=$("$attention") || wrong "it ends with $?"
grep -q 'usage: attention test' <<<"$help" || wrong 'no usage'
[ "$help" = "$("$attention" --help)" ] || wrong '--help says something else'
end

begin 'the exercises reject what is not solved yet, and accept their solutions'
unsolved=$("$build/exercises") && wrong 'unsolved exercises pass'
[ "$(grep -c '^not ok' <<<"$unsolved")" = 3 ] || wrong "3 should fail: $unsolved"
grep -q '^ok - worked_example' <<<"$unsolved" || wrong "the worked example fails: $unsolved"
solved=$("$build/exercises-solved") || wrong "solved exercises fail: $(grep '^not ok' <<<"$solved")"
end

exit "$failed"
