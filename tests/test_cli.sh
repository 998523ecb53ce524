#!/usr/bin/env bash
#
# Tests the trainer from end to end, as a user runs it: options, training, resuming, signals, bad and odd inputs, writing
# text, a full disk. Tiny models on generated text; no network.
#
# Usage: tests/test_cli.sh [PROGRAM]     (default: ./train_gpt2)
#        TEST_SEED=N tests/test_cli.sh   with the generated text of a run that printed this seed
#
# Prints "ok - NAME", "not ok - NAME: reason" or "skip - NAME: reason" for each case; exits with 1 if any case is not ok.
# KEEP=1 keeps the temporary folder.

set -uo pipefail
program=$(realpath -- "${1:-./train_gpt2}")
cd "$(dirname "$0")/.." || exit 1
. tests/lib.sh
table=$PWD/gpt/options.h # where the options are declared
[ -x "$program" ] || { echo "not ok - setup: there is no program $program; make it, or name another"; exit 1; }
tmp=$(mktemp -d "${TMPDIR:-/tmp}/test_cli.XXXXXX") || { echo 'not ok - setup: mktemp failed'; exit 1; }
pid=''
# shellcheck disable=SC2317 # called by the trap
tidy() {
    if [ -n "$pid" ]; then kill -KILL "$pid"; wait "$pid"; fi 2>/dev/null
    if [ -n "${KEEP-}" ]; then echo "# kept $tmp"; else rm -rf "$tmp"; fi
}
trap tidy EXIT
export OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive LC_ALL=C # passive: other work on the machine does not stall it

seed=${TEST_SEED:-$RANDOM}
echo "# TEST_SEED=$seed"
RANDOM=$seed
a=(big old red shy tame cold warm loud) n=(dog cat king tree child river house teacher)
v=(sees finds likes hears paints follows watches remembers)
for ((i = 0; i < 1400; i++)); do
    printf 'The %s %s %s the %s %s.\n' "${a[RANDOM % 8]}" "${n[RANDOM % 8]}" "${v[RANDOM % 8]}" "${a[RANDOM % 8]}" "${n[RANDOM % 8]}"
done >"$tmp/text.txt"
head -c 500 "$tmp/text.txt" >"$tmp/short.txt" # 14 windows of 32 tokens: 7 batches of 2
model=(--layers 1 --heads 2 --channels 32 --seq 32 --batch 2)
text=(--data "$tmp/text.txt" "${model[@]}")
short=(--data "$tmp/short.txt" "${model[@]}" --val-fraction 0)
hour=(--steps 9 --total-batch 640000000)                    # that long takes a step
endless=(--steps 1000000 --lr-schedule constant --warmup 0) # a shorter run with the same options begins the same

# ---- helpers -----------------------------------------------------------------------------------------------------------

new() { begin "$1"; rm -rf "$tmp/work"; mkdir "$tmp/work"; cd "$tmp/work" || exit 1; } # NAME: a case in an empty folder
go() { # ARGUMENT...: runs the program; sets rc and err, and leaves its output in $tmp/out
    timeout -k 1 100 "$program" "$@" >"$tmp/out" 2>"$tmp/err" </dev/null
    rc=$? err=$(<"$tmp/err")
}
ended() { # STATUS PATTERN: the last run, with this on stderr
    # shellcheck disable=SC2053 # a pattern it is
    [[ $rc = "$1" && $err == $2 ]] || wrong "exit status $rc instead of $1, or not '$2' but: $err"
}
fine() { go "$@"; [ "$rc$err" = 0 ] || wrong "exit status $rc ($err) of: $*"; }
says() { grep -aq -e "$1" "$tmp/out" || wrong "the output does not say '$1'"; }
files() { ls -lR --full-time "${1-.}"; } # names, sizes and times of all but .lock
refuse() { # PATTERN ARGUMENT...: exit status 1, one line on stderr that is like this, and no file made or changed
    local pattern=$1 before
    before=$(files)
    shift; go "$@"
    ended 1 "error: $pattern"
    [[ $err != *$'\n'* ]] || wrong "more than one line: $err"
    [ "$(files)" = "$before" ] || wrong "files were made or changed by: $*"
}
losses() { sed 's/"ms": [^,]*, "tokens_per_second": [0-9.]*//' "$1/log.jsonl"; }
same_losses() { cmp -s <(losses "$1") <(losses "$2") || wrong "the logs of $1 and $2 differ"; }
same() { # CHECKPOINT CHECKPOINT [FILE...]
    local file
    for file in "${@:3}"; do cmp -s "$1/$file" "$2/$file" || wrong "$file of $1 and $2 differ"; done
    [ $# -gt 2 ] || diff -rq "$1" "$2" >"$tmp/diff" 2>&1 || wrong "$(head -n 1 "$tmp/diff")"
}
arrays=(model.safetensors optimizer.safetensors)
stopping=$'\nstopping; once more to stop at once'
logged() { # FOLDER N: an object for each of the steps 1 to N, in order, and all lines well-formed
    local x='-?[0-9.]+(e[-+][0-9]+)?'
    cmp -s <(sed -n 's/.*"step": \([0-9]*\), "loss".*/\1/p' "$1/log.jsonl") <(seq "$2") || wrong "$1/log.jsonl is not of steps 1 to $2"
    x="\"loss\": ($x|null), \"norm\": ($x|null), \"lr\": $x, \"ms\": $x, \"tokens_per_second\": $x(, \"skipped\": true)?|\"val_loss\": $x"
    ! grep -vE "^\{\"step\": [0-9]+, ($x)\}$" "$1/log.jsonl" >"$tmp/bad" || wrong "$1/log.jsonl has the line $(head -n 1 "$tmp/bad")"
}
newest() { printf '%s\n' run/ckpt-???????? | tail -n 1; } # ends in ? if there is none
holds() { [ "$(cd run && echo *)" = "$*" ] || wrong "instead of $* there are: $(cd run && echo *)"; }
damage() { printf '\xde\xad\xbe\xef' | dd of="$1" bs=1 seek="${2:-5000}" conv=notrunc status=none; }
finite() { # CHECKPOINT: all numbers of its arrays are
    local file
    for file in "${arrays[@]/#/"$1/"}"; do
        ! od -An -v -tf4 -w4 -j $((8 + $(od -An -tu8 -N8 "$file"))) "$file" | grep -qiE 'nan|inf' || wrong "$file is not finite"
    done
}

start() { : >"$tmp/out"; "$program" "$@" >"$tmp/out" 2>"$tmp/err" </dev/null & pid=$!; }
await() { # COMMAND...: until it succeeds
    local i
    for ((i = 0; i < 1000; i++)); do
        "$@" 2>/dev/null && return
        kill -0 "$pid" 2>/dev/null || break
        sleep 0.02
    done
    wrong "waited in vain for: $*"
}
finish() { wait "$pid" 2>/dev/null; rc=$? err=$(<"$tmp/err") pid=''; }
signal_first_step() { # SIGNAL FOLDER ARGUMENTS...: starts a run, and signals in its first step; if before that, once more
    local i
    for i in 1 2 3 4 5; do
        rm -rf "$2"; start "${@:3}" --out "$2"
        await [ -e "$2/log.jsonl" ]
        sleep "0.0$i"; kill "-$1" "$pid"; sleep 0.2
        grep -q 'after step 0$' "$tmp/out" || return
        finish
    done
    wrong 'five signals came before the first step'
}

le32() { # NUMBER...: as 32-bit little-endian
    local x
    for x; do printf '%b' "$(printf '\\0%o' $((x & 255)) $((x >> 8 & 255)) $((x >> 16 & 255)) $((x >> 24)))"; done
}
shard() { { le32 "${@:2}"; head -c 1008 /dev/zero; cat; } >"$1"; } # FILE MAGIC VERSION TOKENS VOCABULARY; tokens on stdin
tokens() { # TEXT: its bytes and the end of text, 16 bits each
    printf '%b' "$(od -An -v -to1 -w1 "$1" | sed 's/ *\(...\)/\\0\1\\0000/' | tr -d '\n')" '\0000\0001'
}

# ---- help, dry run -----------------------------------------------------------------------------------------------------

new 'help lists every option of the table'
fine --help
names=$(sed -nE 's/^ *OPTION\([A-Z]+, ([a-z0-9_]+), .*/\1/p' "$table" | tr _ -)
[ "$(wc -w <<<"$names")" -ge 30 ] || wrong "found too few options in $table"
for name in $names; do says "^  --${name}[ ,]"; done
[ "$(grep -c '^  --' "$tmp/out")" = "$(wc -w <<<"$names")" ] || wrong 'it lists something that is not in the table'
end

new 'without arguments it says what to give'; refuse 'nothing to do: give --data FILE*--prompt TEXT*--help*'; end

new 'dry run: what it would take, and nothing written'
before=$(files)
fine "${text[@]}" --steps 30 --save-every 10 --dry-run
says '^parameters *22016 ' # 257*32 + 32*32 + 12*32*32 + 13*32 + 2*32
says '^memory *[0-9.]* MiB'; says '^disk *1.0 MiB: up to 4 checkpoints of 0.3 MiB'; says '^steps *30 of 64 tokens (1 x 2 x 32)'
[ "$(files)" = "$before" ] || wrong 'it wrote files'
end

# ---- training and resuming ---------------------------------------------------------------------------------------------

new 'training reaches the loss that the text allows'
# In nats: of a byte given the one before, which is all that a model without attention can use, and of the text's source,
# five words out of eight for a line, below which nothing can get that does not see the future.
read -r pairs source < <(od -An -v -tu1 -w1 "$tmp/text.txt" | awk '
    { if (NR > 1) { pair[last " " $1]++; first[last]++ }; last = $1 }
    END { for (p in pair) { split(p, byte, " "); h -= pair[p] * log(pair[p] / first[byte[1]]) }; print h / NR, 1400 * 5 * log(8) / NR }')
fine "${text[@]}" --batch 8 --steps 500 --lr 0.01 --beta2 0.99 --val-steps 0 --out run
logged run 500
loss=$(sed -n 's/.*"step": 500, "val_loss": \([0-9.]*\)}/\1/p' run/log.jsonl)
awk -v l="${loss:-99}" -v p="$pairs" -v s="$source" 'BEGIN { exit !(l < 0.5 * p && l > 0.9 * s) }' ||
    wrong "validation loss $loss is not between $source and half of $pairs"
holds ckpt-00000500 log.jsonl
cp -r run "$tmp/trained"
end

for how in 'within an epoch' 'across epochs' 'with accumulation'; do
    new "resume to the bit: $how"
    case $how in within*) run=("${text[@]}") ;; across*) run=("${short[@]}") ;; *) run=("${short[@]}" --total-batch 192) ;; esac
    fine "${run[@]}" --steps 20 --save-every 10 --keep 0 --val-every 5 --out a
    cp -r a b; rm -r b/ckpt-00000020; cp -r b c # the log goes on beyond the checkpoint, as after a crash
    fine --resume auto --out b
    same a/ckpt-00000020 b/ckpt-00000020; same_losses a b; logged b 20
    fine --resume c/ckpt-00000010 --out d
    same a/ckpt-00000020 d/ckpt-00000020
    end
done

new 'a damaged checkpoint is set aside, and the one before it used'
fine "${short[@]}" --steps 10 --save-every 4 --keep 0 --out run
cp -r run/ckpt-00000010 whole; mkdir run/ckpt-00000099.tmp; touch run/ckpt-00000099.tmp/model.safetensors
for file in model.safetensors optimizer.safetensors config.json manifest.json; do
    damage "run/ckpt-00000010/$file" 100
    go --resume auto --out run
    ended 0 "warning: *damaged: *; it is set aside as run/ckpt-00000010.damaged*"
    says '^resumes from *run/ckpt-00000008, step 8'
    same whole run/ckpt-00000010; logged run 10
done
holds ckpt-00000004 ckpt-00000008 ckpt-00000010 ckpt-00000010.damaged{,-2,-3,-4} log.jsonl # and no .tmp
fine --resume auto --out run; says 'the run is at step 10 of 10 already; a larger --steps '
same whole run/ckpt-00000010
end

new 'a damaged checkpoint with none before it: an error, and a log that is kept'
fine "${short[@]}" --steps 10 --out run
cp -r run/ckpt-00000010 whole; damage run/ckpt-00000010/model.safetensors
cp run/log.jsonl before
go "${short[@]}" --steps 10 --resume auto --out run
ended 1 'warning: *damaged*error: no whole checkpoint is left in run; *another --out'
cmp -s before run/log.jsonl || wrong 'the log was changed'
fine "${short[@]}" --steps 10 --resume auto --out run # insisting helps
same whole run/ckpt-00000010 "${arrays[@]}"; logged run 10; cmp -s before run/log.jsonl.old || wrong 'the old log is lost'
end

new 'two runs are the same to the bit, another seed is not'
fine "${text[@]}" --steps 20 --out a; fine "${text[@]}" --steps 20 --out b; fine "${text[@]}" --steps 20 --seed 7 --out c
same a/ckpt-00000020 b/ckpt-00000020; same_losses a b
! cmp -s {a,c}/ckpt-00000020/model.safetensors || wrong 'another seed gives the same weights'
end

name='any number of threads gives the same bits'
if grep -q '^computes.*OpenBLAS' "$tmp/out"; then
    skip "$name" 'OpenBLAS adds up in an order that depends on the size of the pieces, one for each thread'
else
    new "$name"
    for threads in 1 2 3 5; do OMP_NUM_THREADS=$threads fine "${text[@]}" --steps 20 --out $threads; done
    for threads in 2 3 5; do same 1/ckpt-00000020 $threads/ckpt-00000020; same_losses 1 $threads; done
    end
fi

new '--keep and --save-every; folders that are not ours stay'
mkdir -p run/ckpt-00000003.tmp-mine run/ckpt-mine run/ckpt-00000002.tmp
fine "${text[@]}" --steps 20 --save-every 3 --keep 2 --out run
holds ckpt-00000003.tmp-mine ckpt-00000018 ckpt-00000020 ckpt-mine log.jsonl
end

# ---- signals -----------------------------------------------------------------------------------------------------------

for how in INT.130 TERM.143 HUP.129; do
    IFS=. read -r signal status <<<"$how"
    new "SIG$signal: finishes the step, saves, says how to go on"
    start "${short[@]}" "${endless[@]}" --total-batch 512 --out run
    await grep -q '"step": 5,' run/log.jsonl
    kill "-$signal" "$pid"; finish
    ended "$status" "$stopping"
    step=$(sed -n 's/.*"step": \([0-9]*\), "loss".*/\1/p' run/log.jsonl | tail -n 1)
    says "^stopped by a signal after step $step; to go on: $program --out run --resume auto$"
    read -ra arguments < <(sed -n 's/.*to go on: [^ ]* //p' "$tmp/out")
    fine "${short[@]}" "${endless[@]}" --total-batch 512 --out whole --steps "$step"
    same "$(newest)" "$(printf 'whole/ckpt-%08d' "$step")" "${arrays[@]}"
    fine "${arguments[@]}" --steps $((step + 3))
    logged run $((step + 3))
    end
done

# shellcheck disable=SC2317 # called by await
gone() { ! kill -0 "$pid"; }
for how in INT.INT.130 TERM.TERM.143 INT.TERM.143; do
    IFS=. read -r signal second status <<<"$how"
    new "SIG$signal and then SIG$second: ends at once"
    signal_first_step "$signal" run "${short[@]}" "${hour[@]}"
    ! gone 2>/dev/null || wrong 'the first one ended it in the middle of a step'
    kill "-$second" "$pid"; await gone
    kill -KILL "$pid" 2>/dev/null; finish
    ended "$status" "$stopping"
    [[ $(newest) == *\? ]] || wrong 'it saved'
    end
done

new 'kill -9, three times; --resume auto goes on'
# shellcheck disable=SC2317 # called by await
advanced() { [[ $(newest) != *\? && $(newest) != "$last" ]]; }
last='' often=("${short[@]}" "${endless[@]}" --save-every 3 --keep 2)
start "${often[@]}" --out run
for i in 1 2 3; do
    await advanced
    sleep "0.0$((RANDOM % 10))"; kill -KILL "$pid"; finish
    last=$(newest)
    [ $i = 3 ] || start --resume auto --out run
done
step=$((10#${last#run/ckpt-} + 5))
fine --resume auto --out run --steps $step
fine "${often[@]}" --steps $step --out whole
same "$(newest)" "$(printf 'whole/ckpt-%08d' $step)"; logged run $step; same_losses run whole
[ "$(cd run && echo * | wc -w)" = 3 ] || wrong "there are: $(cd run && echo *)"
end

# ---- bad inputs --------------------------------------------------------------------------------------------------------

fine "${text[@]}" --steps 10 --save-every 5 --out "$tmp/base"

new 'bad data files'
mkdir folder; : >empty.txt; : >empty.bin; printf 'ten bytes.' >ten.txt; head -c 200 "$tmp/text.txt" >200.txt
refuse 'cannot open the data file nothing.txt: No such file*--data takes*' "${text[@]}" --data nothing.txt
refuse 'cannot open the data file nothing.txt: *' "${text[@]}" --val-data nothing.txt
refuse "no data file matches '\*.text'*--data takes*" "${text[@]}" --data '*.text'
refuse "no data file matches 'folder/*--data takes*" "${text[@]}" --data folder
mkfifo pipe; refuse 'cannot read the data file pipe: it is not a regular file' "${text[@]}" --data pipe
refuse 'the data file empty.txt is empty; it should hold *' "${text[@]}" --data empty.txt
refuse 'the data file empty.bin is empty; it should hold *' "${text[@]}" --data empty.bin
refuse '--data has 11 tokens*T = 32 needs 33; give more text or a smaller --seq' "${short[@]}" --data ten.txt
refuse 'the held-out part of --data has 20 tokens*needs 33; give more*' "${text[@]}" --data 200.txt
refuse '--val-data has 11 tokens*needs 33; give more*' "${text[@]}" --val-data ten.txt
end

new 'bad shards'
tokens "$tmp/short.txt" | tee tokens | shard good.bin 20240520 1 501 257
fine "${short[@]}" --data good.bin --dry-run
shard promise.bin 20240520 1 502 257 <tokens
shard version.bin 20240520 2 501 257 <tokens
shard many.bin 20240520 1 501 65537 <tokens
refuse 'the shard many.bin is damaged: *a vocabulary of 65537*' "${text[@]}" --data many.bin
shard model.bin 20240326 3 501 257 <tokens
head -c 600 good.bin >header.bin; gzip -c "$tmp/text.txt" >zipped.bin; cp "$tmp/text.txt" text.bin
refuse 'the shard promise.bin is truncated*promises 502 tokens and the file holds 501; *make it again' "${text[@]}" --data promise.bin
refuse 'the shard header.bin is truncated*promises 501 tokens and the file holds 0; *' "${text[@]}" --data header.bin
refuse 'the shard version.bin has version 2; this program reads version 1' "${text[@]}" --data version.bin
refuse 'model.bin is an llm.c model checkpoint, not a shard*tokenize*' "${text[@]}" --data model.bin
refuse 'zipped.bin looks like a gzip archive, not a shard*tokenize*' "${text[@]}" --data zipped.bin
refuse 'text.bin looks like plain text, not a shard*rename a text to .txt*tokenize*' "${text[@]}" --data text.bin
tokens "$tmp/short.txt" | shard other.bin 20240520 1 501 0
refuse 'good.bin has tokens of a vocabulary of 257 and other.bin of 50257*' "${text[@]}" --data '{other,good}.bin'
refuse '--data has tokens of a vocabulary of 257 and --val-data of 50257; *' "${short[@]}" --data good.bin --val-data other.bin
refuse '--prompt needs a model of bytes*300 tokens*' "${text[@]}" --data good.bin --vocab 300 --prompt The
refuse '*text.txt is text*with a vocabulary of 257*of 100; leave --vocab out' "${text[@]}" --vocab 100
end

new 'a token that the vocabulary lacks; the mended command works at once'
{ head -c 40 /dev/zero; printf '\x2c\x01'; head -c 24 /dev/zero; } | shard high.bin 20240520 1 33 257
go "${short[@]}" --data high.bin --steps 10
ended 1 'error: the data file high.bin has token 300 at position 20, and the vocabulary has 257 *--vocab*'
fine "${short[@]}" --data high.bin --steps 10 --vocab 301
end

new 'bad folders to write to'
touch file; cp -r "$tmp/base" run
refuse 'cannot make the folder file/x: Not a directory; choose another --out' "${text[@]}" --out file/x
refuse 'cannot write to the folder file: Not a directory; choose another --out' "${text[@]}" --out file
refuse 'cannot make the folder /proc/x/y: *; choose another --out' "${text[@]}" --out /proc/x/y
! grep -q '^step ' "$tmp/out" || wrong 'it trained before it looked'
refuse 'the folder run already holds a run, saved at step 10; --resume auto *--out *' "${text[@]}" --out run
refuse 'the folder run holds a later checkpoint, of step 10, *choose another --out*' --resume run/ckpt-00000005 --out run
rm -r run
start "${short[@]}" "${hour[@]}" --out run
await [ -e run/log.jsonl ]
refuse "the folder run is in use by another run (process $pid); *another --out" "${text[@]}" --out run
kill -KILL "$pid"; finish
end

new 'bad checkpoints'
cp -r "$tmp/base" run; mkdir none
refuse 'there is no checkpoint nowhere; --resume takes *' "${text[@]}" --resume nowhere
refuse '--model nowhere is neither a preset (tiny, *) nor a folder with a checkpoint' "${text[@]}" --model nowhere
refuse '--model none is neither a preset *' "${text[@]}" --model none
while read -r name other has; do
    refuse "--$name $other does not fit the checkpoint run/ckpt-00000010, which has $has; *" --resume auto "--$name" "$other"
    refuse "--$name $other does not fit *ckpt-00000010, which has $has; *" --data "$tmp/text.txt" --model run --out x "--$name" "$other"
done < <(printf '%s\n' 'layers 2 1' 'heads 4 2' 'channels 64 32' 'seq 16 32' 'vocab 300 257')
refuse '--layers 4 does not fit *which has 1; *' --resume auto --model tiny
refuse '--resume goes on with the model of run/ckpt-00000010; --model *' --resume auto --model "$tmp/base"
refuse 'there is no checkpoint in typo to resume*--out *' --resume auto --out typo
cp -r "$tmp/base" other; refuse 'the folder other holds another run than *run/ckpt-00000010 *--out' --resume run --out other --steps 20
mkdir deep; sed 's/"n_layer": 1/"n_layer": 16777216/' run/ckpt-00000010/config.json >deep/config.json
refuse 'deep/config.json has no usable "n_layer": it goes from 1 to 1024' --model deep --prompt x
damage run/ckpt-00000010/model.safetensors
refuse 'run/ckpt-00000010 is damaged: the checksum of model.safetensors is wrong*' --resume run/ckpt-00000010 --steps 20
refuse 'run/ckpt-00000010 is damaged*' --resume run --steps 20 --out x
truncate -s -4 run/ckpt-00000010/model.safetensors
refuse 'run/ckpt-00000010 is damaged: model.safetensors has * bytes instead of *' --data "$tmp/text.txt" --model run --out x
rm run/ckpt-00000010/manifest.json # as if it were not ours
refuse 'run/ckpt-00000010/model.safetensors is *cut short*' --data "$tmp/text.txt" --model run --out x
end

new 'bad options'
refuse 'unknown option --bath; did you mean --batch? *' "${text[@]}" --bath 3
refuse 'unknown option --sedes; did you mean --seed? *' --sedes=3
refuse 'unknown option -z; --help*' -z
refuse '--out is empty; it names *' "${text[@]}" --out ''
refuse 'unknown option --nonsense-option; --help*' --nonsense-option
refuse 'unknown option book.txt; *--data FILE' book.txt
refuse '--batch needs a value; --help*' "${text[@]}" --batch
refuse "--lr-schedule 'bumpy' is not known; it is one of cosine|linear|constant|wsd" "${text[@]}" --lr-schedule bumpy
refuse 'a --total-batch of 100 is no multiple of*2 x 32 = 64; *' "${text[@]}" --total-batch 100
refuse '--channels 32 is not a multiple of --heads 3; *' "${text[@]}" --heads 3
refuse 'a head has 200 channels*at most 128 *' "${text[@]}" --heads 1 --channels 200
refuse '--steps 0 trains nothing; add --prompt TEXT*' "${text[@]}" --steps 0
refuse '--prompt needs a trained model: give --model FOLDER*' --prompt Once
refuse '--prompt is 1024 characters long; at most 1023 fit' --prompt "$(printf '%1024s' x)"
end

new 'numbers out of range, or no numbers'
count=0
while read -r name type least most; do
    name=${name//_/-} count=$((count + 1)) below=$((${least%e*} - 1)) above=$((${most%%[.e]*} + 1))
    [ "$type" = INT ] || above=$(awk -v x="$most" 'BEGIN { print x * 1.001 }')
    for value in "$below" "$above"; do refuse "--$name $value is out of range; it goes from *" "${text[@]}" "--$name" "$value"; done
    for value in many nan -inf '' 5x; do refuse "--$name '$value' is not a *number" "${text[@]}" "--$name=$value"; done
    [ "$type" = REAL ] || refuse "--$name '1.5' is not a whole number" "${text[@]}" "--$name" 1.5
    for value in "$least" "$most"; do # these are in range, though other rules may forbid them
        go --dry-run "--$name" "$value"
        [[ $rc$err == 0 || $rc$err == '1error: '* && $err != *'out of range'* && $err != *$'\n'* ]] || wrong "--$name $value: exit status $rc, $err"
    done
done < <(sed -nE 's/^ *OPTION\((INT|REAL), ([a-z0-9_]+), "[a-z]*", "[^"]*", ([^,]+), ([^,]+), .*/\2 \1 \3 \4/p' "$table")
[ $count = "$(grep -cE '^ *OPTION\((INT|REAL),' "$table")" ] || wrong "only $count of the numbers were found in $table"
refuse '--eps 0 is out of range; *' "${text[@]}" --eps 0
go --dry-run --batch 1 --seq 1 --total-batch 1000000000000
[[ $rc = 1 && $err == 'error: --total-batch '* ]] || says '(1000000000000 x 1 x 1)'
end

# ---- odd but good inputs -----------------------------------------------------------------------------------------------

new 'odd texts: any bytes, CRLF, no newline at the end, odd names'
for ((i = 0; i < 2000; i++)); do printf '%b' "$(printf '\\0%o' $((RANDOM & 255)))"; done >bytes.txt
sed 's/$/\r/' "$tmp/short.txt" >crlf.txt
printf '%s' "$(<"$tmp/short.txt")" >'my text [1].txt'
for file in bytes.txt crlf.txt 'my text [1].txt'; do
    fine "${short[@]}" --data "$file" --steps 3 --out "run $file"
    says "^data *$(($(wc -c <"$file") + 1)) tokens to train on in 1 file, 0 to validate"
    logged "run $file" 3
    ! grep -q val_loss "run $file/log.jsonl" || wrong 'it validated on nothing'
    fine --resume auto --steps 4 --out "run $file"
done
end

new 'a shard, two files by glob, and a folder give the losses of the same tokens'
train() { fine "${text[@]}" --steps 20 --val-every 5 --data "$2" --out "$1"; } # NAME DATA; an epoch and more
mkdir texts; head -c 600 "$tmp/text.txt" >texts/a.txt; tail -c 400 "$tmp/text.txt" >texts/b.txt
tokens texts/a.txt | shard a.bin 20240520 1 601 257
{ tokens texts/a.txt; tokens texts/b.txt; } | shard ab.bin 20240520 1 1002 257
train text texts/a.txt; train shard a.bin; same_losses text shard
train both ab.bin; says '^data *902 tokens to train on in 1 file, 100 to validate'
train glob 'texts/[ab].txt'; same_losses both glob; says '^data *902 tokens to train on in 2 files, 100 to validate'
train braces 'texts/{a,b}.txt'; same_losses both braces
train folder texts; same_losses both folder
end

new 'a folder with brackets in its name'
mkdir 'my [texts]'; cp "$tmp/text.txt" 'my [texts]'; fine "${text[@]}" --data 'my [texts]' --steps 2
end

new '--val-data'
head -c 1000 "$tmp/text.txt" >val.txt
fine "${text[@]}" --steps 4 --val-every 2 --val-data val.txt
says "^data *$(($(wc -c <"$tmp/text.txt") + 1)) tokens to train on in 1 file, 1001 to validate"
logged run 4; [ "$(grep -c val_loss run/log.jsonl)" = 2 ] || wrong 'not two validations'
end

# ---- writing text ------------------------------------------------------------------------------------------------------

new 'writing text'
trained=$tmp/trained before=$(files "$tmp/trained")
write() { # FILE PROMPT ARGUMENT...
    fine --model "$trained" --tokens 100 --prompt "${@:2}"; cp "$tmp/out" "$1"
    cmp -s <(head -c "$(printf %s "$2" | wc -c)" "$1") <(printf %s "$2") || wrong "$1 does not begin with the prompt"
    [ "$(wc -c <"$1")" -gt "$(printf %s "$2" | wc -c)" ] || wrong "nothing follows the prompt of $1"
}
equal() { cmp -s "$1" "$2" || wrong "$1 and $2 differ"; }
differ() { ! cmp -s "$1" "$2" || wrong "$1 and $2 are the same"; }
write plain 'The big '; write again 'The big ' --model "$trained/ckpt-00000500"; equal plain again
write other 'The big ' --seed 2; differ plain other
write greedy 'The big ' --temperature 0; differ plain greedy
write seed 'The big ' --temperature 0 --seed 2; equal greedy seed
write top-k 'The big ' --top-k 1; equal greedy top-k
write top-p 'The big ' --top-p 0; equal greedy top-p
learned=0
for word in chi.ld teac.her riv.er rem.embers watc.hes; do
    write word "The old ${word%.*}" --temperature 0
    if [[ $(tr -d '\0' <word) == "The old ${word/./}"* ]]; then learned=$((learned + 1)); fi
done
[ $learned -ge 3 ] || wrong "it completes $learned of 5 words that it has read"
write utf8 'Füße ☃ 猫 '; write long "$(head -c 1023 "$tmp/text.txt")"
if [ -w /dev/full ]; then
    "$program" --model "$trained" --prompt 'The ' --tokens 9 >/dev/full 2>"$tmp/err"; rc=$? err=$(<"$tmp/err")
    ended 1 'error: cannot write to the standard output: No space left on device'
fi
start --model "$trained" --prompt 'The ' --tokens 100000000
await test -s "$tmp/out"; kill -INT "$pid"; finish; ended 130 "$stopping"
[ "$(files "$trained")" = "$before" ] || wrong "it changed the model's folder"
[ ! -e run ] || wrong 'it made an output folder'
end

new 'samples while training, which change nothing'
fine "${text[@]}" --steps 20 --out a; fine "${text[@]}" --steps 20 --out b --sample-every 5 --prompt 'Sample:' --tokens 9
[ "$(grep -ac '^Sample:' "$tmp/out")" = 5 ] || wrong "$(grep -ac '^Sample:' "$tmp/out") texts instead of 4 samples and the last"
same {a,b}/ckpt-00000020 "${arrays[@]}"; same_losses a b
end

# ---- what goes wrong on the way ----------------------------------------------------------------------------------------

new 'not finite: five updates skipped, then an end that loses nothing'
cp -r "$tmp/base/ckpt-00000010" nan; rm nan/manifest.json
printf '\0\0\xc0\x7f' | dd of=nan/model.safetensors bs=1 seek=$(($(wc -c <nan/model.safetensors) - 4)) conv=notrunc status=none
go --data "$tmp/text.txt" --batch 2 --model nan --steps 50
ended 1 'error: 5 updates in a row *not finite*--lr*'; [[ $err != *$'\n'* ]] || wrong "more than one line: $err"
logged run 5; [ "$(grep -c '"loss": null.*"skipped": true' run/log.jsonl)" = 5 ] || wrong 'the log does not have 5 skipped updates'
same nan run/ckpt-00000005 model.safetensors
cp "$tmp/base/ckpt-00000010/model.safetensors" run/ckpt-00000005; finite run/ckpt-00000005 # the moments
end

new 'a huge learning rate never leaves weights that are not finite'
go "${text[@]}" --lr 1000 --steps 60
[ "$rc$err" = 0 ] || ended 1 'error: 5 updates in a row *'
finite "$(newest)"
end

new 'a signal lets a validation end, and come: the log is that of a run without it'
copies=20; [[ $program != *sanitized* ]] || copies=4 # a validation that takes a second or two, also where all is ten times slower
for ((i = 0; i < copies; i++)); do cat "$tmp/text.txt"; done >more.txt
more=(--data more.txt "${model[@]}" --steps 1 --total-batch 32000 --val-fraction 0.9 --val-steps 0)
fine "${more[@]}" --out quiet
start "${more[@]}" --out validating
await grep -q '^step 1/1 | loss' "$tmp/out"
kill -INT "$pid"; finish
[ "$rc" = 130 ] || wrong "exit status $rc"
signal_first_step INT stepping "${more[@]}"; finish
[ "$rc" = 130 ] || wrong "exit status $rc"
same_losses quiet validating; same_losses quiet stepping
end

new 'text is not written with tokens that are no bytes: said at the start'
printf '\1\0\2\0\3\0%.0s' {1..200} | shard tokens.bin 20240520 1 600 0
refuse '--sample-every needs a model of bytes *; this one has 50257 *' --data tokens.bin "${model[@]}" --sample-every 5
end

new 'a limit of file sizes is as a full disk: training goes on, and the end says what could not be saved'
(ulimit -f 20 && exec timeout 100 "$program" "${text[@]}" --steps 4 --save-every 2 >"$tmp/out" 2>"$tmp/err" </dev/null)
rc=$? err=$(<"$tmp/err")
ended 1 'warning: cannot save the checkpoint *: File too large; *; training goes on*error: cannot save the checkpoint *: File too large; *'
logged run 4
end

new 'disk full while saving: an error, and earlier checkpoints as they were'
fine "${text[@]}" --steps 20 --save-every 10 --keep 0 --out whole
cp -r whole run; rm -r run/ckpt-00000020; cp -r run/ckpt-00000010 before
(trap '' XFSZ; ulimit -f 50; go --resume auto --out run --save-every 5; exit "$rc") # KiB; the weights take 88
rc=$? err=$(<"$tmp/err")
ended 1 'warning: cannot save the checkpoint run/ckpt-00000015: File too large; *training goes on
error: cannot save the checkpoint run/ckpt-00000020: File too large; earlier checkpoints are untouched'
same before run/ckpt-00000010; holds ckpt-00000010 log.jsonl
fine --resume auto --out run
same {whole,run}/ckpt-00000020; same_losses whole run
end

new 'nobody reads the output, the folder vanishes, no standard streams: the weights are saved all the same'
"$program" "${text[@]}" --steps 200 --log-every 1 --out pipe 2>"$tmp/err" | head -n 1 >/dev/null
[ -d pipe/ckpt-00000200 ] || wrong 'not saved where the output is a closed pipe'
start "${text[@]}" "${endless[@]}" --out gone
await grep -q '"step": 5,' gone/log.jsonl
rm -r gone; kill -TERM "$pid"; finish
compgen -G 'gone/ckpt-*' >/dev/null || wrong "not saved where the folder was removed: $err"
"$program" "${text[@]}" --steps 3 --out closed <&- >&- 2>&- || wrong "exit status $? without standard streams"
logged closed 3
end

new 'the log of an earlier run is kept, and long lines in it'
fine "${text[@]}" --steps 2 --out run; { cat run/log.jsonl; printf '{"note": "%2000s"}\n' x; } >log
cp log run/log.jsonl; fine --resume auto --steps 4 --out run
cmp -s log <(head -n 4 run/log.jsonl) || wrong 'a long line cut the log'
for old in one two; do rm -r run/ckpt-*; echo $old >run/log.jsonl; fine "${text[@]}" --steps 1 --out run; done
[ "$(cat run/log.jsonl.old run/log.jsonl.old-2)" = $'one\ntwo' ] || wrong 'an old log was lost'
end

new 'other data on resuming: a warning'
cp -r "$tmp/base" run; { cat "$tmp/text.txt"; echo more; } >longer.txt
go --resume auto --out run --steps 12 --data longer.txt
ended 0 'warning: the data has * tokens to train on, and had * when run/ckpt-00000010 was saved*'
end

name='lines are updated in place on a terminal, and only there'
if script -qec true /dev/null </dev/null >/dev/null 2>&1; then
    new "$name"
    script -qec "$(printf '%q ' "$program" "${text[@]}" --steps 20)" /dev/null </dev/null >terminal 2>&1
    grep -q $'\r\e\[K\e\[?7lstep  *15/20' terminal || wrong 'no line was replaced on the terminal'
    fine "${text[@]}" --steps 20 --out run2
    ! grep -q $'[\r\e]' "$tmp/out" || wrong 'there are control characters in a file'
    [ "$(grep -c '^step .*tok/s' "$tmp/out")" = 3 ] || wrong 'not the steps 1, 10 and 20 in a file'
    end
else
    skip "$name" 'script, of util-linux, is not installed'
fi

exit "$failed"
