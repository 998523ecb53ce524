#!/usr/bin/env bash
#
# Tests data/tokenize.c: the shard's every byte, and what it refuses.
#
# Usage: tests/test_tokenize.sh [PROGRAM]    (default: ./tokenize)

set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
. tests/lib.sh

program=$(realpath "${1-./tokenize}")
tmp=$(mktemp -d "${TMPDIR:-/tmp}/test_tokenize.XXXXXX") || { echo 'not ok - setup: mktemp failed'; exit 1; }
trap 'rm -rf "$tmp"' EXIT
cd "$tmp" || exit 1

words() { od -An -v -t "$1" -j "$2" -N "$3" "$4" | xargs; }
refused() { # MESSAGE ARGUMENT...: it has to end with an error that contains MESSAGE
    local message=$1; shift
    "$program" "$@" >out 2>err && wrong "it accepts $*"
    grep -q -- "$message" err || wrong "it does not say '$message': $(cat err)"
}

begin 'two texts become one shard'
printf 'Hi\377' >a.txt
printf '\0\n' >b.txt
"$program" a.txt b.txt ab.bin >out || wrong "exit status $?"
[ "$(wc -c <ab.bin)" = 1038 ] || wrong "$(wc -c <ab.bin) bytes instead of 4 * 256 + 2 * 7"
[ "$(words d4 0 16 ab.bin)" = '20240520 1 7 257' ] || wrong "the header starts with $(words d4 0 16 ab.bin)"
[ "$(tail -c +17 ab.bin | head -c 1008 | tr -d '\0' | wc -c)" = 0 ] || wrong 'the rest of the header is not zero'
[ "$(words u2 1024 14 ab.bin)" = '72 105 255 256 0 10 256' ] || wrong "the tokens are $(words u2 1024 14 ab.bin)"
end

begin 'a text longer than the buffer'
head -c 200001 /dev/urandom >long.txt
"$program" long.txt long.bin >out || wrong "exit status $?"
[ "$(words d4 8 4 long.bin)" = 200002 ] || wrong 'the number of tokens is wrong'
od -An -v -t u1 -w1 long.txt | tr -d ' ' >expected
echo 256 >>expected
tail -c +1025 long.bin | od -An -v -t u2 -w2 | tr -d ' ' | cmp -s - expected || wrong 'the tokens are wrong'
end

begin 'what it refuses'
refused 'ab.bin exists' a.txt ab.bin
[ "$(wc -c <ab.bin)" = 1038 ] || wrong 'it wrote over an existing file'
refused 'cannot open missing.txt' a.txt missing.txt new.bin
refused 'cannot write no/folder/new.bin' a.txt no/folder/new.bin
refused 'usage' a.txt
refused 'usage'
refused 'cannot read .*directory' . new.bin
echo mine >kept.bin.tmp
refused 'cannot write kept.bin.tmp: File exists' a.txt kept.bin
[ "$(<kept.bin.tmp)" = mine ] || wrong 'it wrote over a .tmp file'
(trap '' XFSZ; ulimit -f 100; "$program" long.txt full.bin >out 2>err) && wrong 'it accepts a full disk'
grep -q 'cannot write the shard: File too large' err || wrong "a full disk: $(cat err)"
for file in new.bin* full.bin*; do [ ! -e "$file" ] || wrong "it leaves $file behind"; done
end

exit "$failed"
