#!/usr/bin/env bash
#
# Tests scripts/demo.sh in a copy of the repository, with few steps: without a network, with the data there, twice, and
# interrupted. How low the loss gets in the whole demo is in the README; it takes two minutes and so is not tested here.
#
# Usage: tests/test_demo.sh

set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
. tests/lib.sh

tmp=$(mktemp -d "${TMPDIR:-/tmp}/test_demo.XXXXXX") || { echo 'not ok - setup: mktemp failed'; exit 1; }
trap 'rm -rf "$tmp"' EXIT
cp -r Makefile train_gpt2.c gpt scripts data dev tests "$tmp"
cd "$tmp" || exit 1
rm -f data/*.txt
unset DATA_DIR
export MIRRORS=http://127.0.0.1:9/nothing  # nothing listens there: as good as no network

begin 'make demo builds, and runs the script'
make -n demo >plan 2>&1 || wrong "$(tail -n 1 plan)"
grep -q 'train_gpt2.c' plan || wrong 'it does not build the trainer'
grep -q '^scripts/demo.sh' plan || wrong 'it does not run the script'
make -s train_gpt2 2>err || wrong "make train_gpt2: $(tail -n 1 err)"
end

begin 'without a network it learns from the sources'
scripts/demo.sh --steps 30 --tokens 20 >out 2>err || wrong "exit status $?: $(tail -n 1 err)"
grep -q 'source files of this repository instead' out || wrong 'it does not say so'
grep -q 'step 30/30 | validation loss' out || wrong 'no validation loss'
grep -q '^static void' out || wrong 'no sample'
grep -q -- '--model runs/demo --prompt' out || wrong 'no word on what to try next'
[ -f runs/demo/ckpt-00000030/model.safetensors ] || wrong 'no checkpoint'
end

begin 'a second demo leaves the first alone'
before=$(cat runs/demo/ckpt-*/* runs/demo/log.jsonl | cksum)
scripts/demo.sh --steps 5 --tokens 5 >out 2>err || wrong "exit status $?: $(tail -n 1 err)"
[ -d runs/demo-2/ckpt-00000005 ] || wrong 'no runs/demo-2'
[ "$(cat runs/demo/ckpt-*/* runs/demo/log.jsonl | cksum)" = "$before" ] || wrong 'the first run was changed'
end

begin 'with the data there it learns from the data'
yes 'To be, or not to be' | head -n 2000 >data/tinyshakespeare.txt
EXPECT_BYTES=$(wc -c <data/tinyshakespeare.txt) EXPECT_SHA256=$(sha256sum <data/tinyshakespeare.txt | cut -d ' ' -f 1) \
    scripts/demo.sh --steps 5 --tokens 5 >out 2>err || wrong "exit status $?: $(tail -n 1 err)"
grep -q 'Training on data/tinyshakespeare.txt' out || wrong 'another text was used'
grep -q '^ROMEO:' out || wrong 'no sample'
end

begin 'interrupted, it saves and says how to go on'
rm -f data/tinyshakespeare.txt
set -m  # in a process group of its own, which gets the signal as from a terminal
scripts/demo.sh --steps 100000 --out runs/stopped --log-every 1 >out 2>err &
set +m
for ((i = 0; i < 100; i++)); do grep -q 'step *[1-9]' out && break; sleep 0.1; done
grep -q 'step *[1-9]' out || wrong 'it does not train'
kill -INT -- "-$!"
wait $!
status=$?
[ $status = 130 ] || wrong "exit status $status instead of 130"
grep -q -- '--out runs/stopped --resume auto' out || wrong 'it does not say how to go on'
compgen -G 'runs/stopped/ckpt-*' >/dev/null || wrong 'no checkpoint'
end

exit "$failed"
