#!/usr/bin/env bash
#
# Tests the trainer from end to end, as a user runs it: options, training,
# resuming, signals, bad and odd inputs, writing text, a full disk. Tiny
# models on generated text; no network.
#
# Usage: tests/test_cli.sh [PROGRAM]            default: ./train_gpt2
#        TEST_SEED=N tests/test_cli.sh          repeat a run's generated text
#
# Prints "ok - NAME", "not ok - NAME: reason" or "skip - NAME: reason" for each
# case; exits with 1 if any case is not ok. KEEP=1 keeps the temporary folder.

# shellcheck disable=SC1091,SC2154 # lib.sh is checked on its own; it sets `failed`
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
trap 'exit 130' INT
trap 'exit 143' TERM
export OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive LC_ALL=C # passive: other work on the machine does not stall it

seed=${TEST_SEED:-$RANDOM}
echo "# TEST_SEED=$seed"
RANDOM=$seed
adjectives=(big old red shy tame cold warm loud) nouns=(dog cat king tree child river house teacher)
verbs=(sees finds likes hears paints follows watches remembers)
for ((i = 0; i < 1400; i++)); do
    echo "The ${adjectives[RANDOM % 8]} ${nouns[RANDOM % 8]} ${verbs[RANDOM % 8]} the ${adjectives[RANDOM % 8]} ${nouns[RANDOM % 8]}."
done >"$tmp/text.txt"
printf '%s\n' "${adjectives[@]}" "${nouns[@]}" "${verbs[@]}" >"$tmp/words"
head -c 500 "$tmp/text.txt" >"$tmp/short.txt" # 14 windows of 32 tokens: 7 batches of 2
size=(--layers 1 --heads 2 --channels 32 --seq 32)
text=(--data "$tmp/text.txt" "${size[@]}" --batch 2)
short=(--data "$tmp/short.txt" "${size[@]}" --batch 2 --val-fraction 0)

# ---- helpers ----------------------------------------------------------------

new() { # NAME: a case begins in an empty folder
    begin "$1"
    rm -rf "$tmp/work"; mkdir "$tmp/work"; cd "$tmp/work" || exit 1
}
go() { # ARGUMENT...: runs the program; sets rc and err, and leaves its output in $tmp/out
    timeout -k 1 100 "$program" "$@" >"$tmp/out" 2>"$tmp/err" </dev/null
    rc=$? err=$(<"$tmp/err")
}
fine() { # ARGUMENT...: exit status 0 and nothing on stderr
    go "$@"
    [[ $rc = 0 && -z $err ]] || wrong "exit status $rc ($err) of: $*"
}
says() { grep -aq -e "$1" "$tmp/out" || wrong "the output does not say '$1'"; }
state() { ls -lR --full-time .; } # names, sizes and times of all files but .lock
refuse() { # PATTERN ARGUMENT...: exit status 1, one line on stderr that is like this, and no file made or changed
    local pattern=$1 before
    before=$(state)
    shift; go "$@"
    [ "$rc" = 1 ] || wrong "exit status $rc instead of 1 of: $*"
    # shellcheck disable=SC2053 # a pattern it is
    [[ $err == "error: "$pattern ]] || wrong "not the message '$pattern': $err"
    [[ $err != *$'\n'* ]] || wrong "more than one line: $err"
    [ "$(state)" = "$before" ] || wrong "files were made or changed by: $*"
}
losses() { sed 's/"ms": [^,]*, "tokens_per_second": [0-9.]*//' "$1/log.jsonl"; }
same_losses() { cmp -s <(losses "$1") <(losses "$2") || wrong "the logs of $1 and $2 differ"; }
same() { # FOLDER FOLDER: checkpoints
    diff -rq "$1" "$2" >/dev/null 2>&1 || wrong "$1 and $2 differ: $(diff -rq "$1" "$2" 2>&1 | head -n 1)"
}
same_arrays() {
    cmp -s "$1/model.safetensors" "$2/model.safetensors" || wrong "the weights of $1 and $2 differ"
    cmp -s "$1/optimizer.safetensors" "$2/optimizer.safetensors" || wrong "the moments of $1 and $2 differ"
}
logged() { # FOLDER N: an object for each of the steps 1 to N, in order, and all lines well-formed
    local number='-?[0-9.]+(e[-+][0-9]+)?'
    cmp -s <(sed -n 's/.*"step": \([0-9]*\), "loss".*/\1/p' "$1/log.jsonl") <(seq "$2") || wrong "$1/log.jsonl is not of steps 1 to $2"
    ! grep -vE "^\{\"step\": [0-9]+, (\"val_loss\": $number|\"loss\": ($number|null), \"norm\": ($number|null), \"lr\": $number, \"ms\": $number, \"tokens_per_second\": $number(, \"skipped\": true)?)\}$" \
        "$1/log.jsonl" >"$tmp/bad" || wrong "$1/log.jsonl has the line $(head -n 1 "$tmp/bad")"
}
newest() { printf '%s\n' run/ckpt-???????? | tail -n 1; }
damage() { printf '\xde\xad\xbe\xef' | dd of="$1" bs=1 seek="${2:-5000}" conv=notrunc status=none; }
not_finite() { # FILE: how many numbers of a safetensors file are not finite
    od -An -v -tf4 -w4 -j $((8 + $(od -An -tu8 -N8 "$1"))) "$1" | grep -ciE 'nan|inf'
}

start() { # ARGUMENT...: in the background
    "$program" "$@" >"$tmp/out" 2>"$tmp/err" </dev/null & pid=$!
}
await() { # COMMAND...: until it succeeds
    local n
    for ((n = 0; n < 1200; n++)); do
        "$@" 2>/dev/null && return
        kill -0 "$pid" 2>/dev/null || break
        sleep 0.02
    done
    wrong "waited in vain for: $*"
}
finish() { wait "$pid" 2>/dev/null; rc=$? pid=''; }
hour=(--steps 9 --total-batch 640000000) # that long takes a step
endless=(--steps 1000000 --lr-schedule constant --warmup 0) # a shorter run with the same options begins the same

le32() { # NUMBER...: as 32-bit little-endian
    local n
    for n; do printf '%b' "$(printf '\\0%o' $((n & 255)) $((n >> 8 & 255)) $((n >> 16 & 255)) $((n >> 24)))"; done
}
shard() { # FILE MAGIC VERSION TOKENS VOCABULARY: stdin holds the tokens, 16 bits each
    { le32 "${@:2}"; head -c 1008 /dev/zero; cat; } >"$1"
}
text_tokens() { # FILE: as a shard's tokens, with the end of the text
    printf '%b' "$(od -An -v -to1 -w1 "$1" | sed 's/ *\(...\)/\\0\1\\0000/' | tr -d '\n')" '\0000\0001'
}

# ---- help, dry run ----------------------------------------------------------

new 'help lists every option of the table'
fine --help
names=$(sed -nE 's/^ *OPTION\([A-Z]+, ([a-z0-9_]+), .*/\1/p' "$table" | tr _ -)
[ "$(wc -w <<<"$names")" -ge 30 ] || wrong "found too few options in $table"
for name in $names; do says "^  --${name}[ ,]"; done
[ "$(grep -c '^  --' "$tmp/out")" = "$(wc -w <<<"$names")" ] || wrong 'it lists something that is not in the table'
fine -h
end

new 'without arguments it says what to give'
refuse 'nothing to do: give --data FILE*--prompt TEXT*--help*'
end

new 'dry run: what it would take, and nothing written'
before=$(state)
fine "${text[@]}" --steps 30 --save-every 10 --dry-run
says '^parameters *22016 ' # 257*32 + 32*32 + 12*32*32 + 13*32 + 2*32
says '^memory *[0-9.]* MiB'; says '^disk *1.0 MiB: up to 4 checkpoints of 0.3 MiB'; says '^steps *30 of 64 tokens (1 x 2 x 32)'
[ "$(state)" = "$before" ] || wrong 'it wrote files'
end

# ---- training -----------------------------------------------------------------

new 'training reaches the loss that the text allows'
# In nats: of a byte given the one before, which is all that a model without attention can use, and of the text's
# source, five words out of eight for a line, below which nothing can get that does not see the future.
read -r pairs source < <(od -An -v -tu1 -w1 "$tmp/text.txt" | awk '
    { if (NR > 1) { pair[last " " $1]++; first[last]++ }; last = $1 }
    END { for (p in pair) { split(p, byte, " "); h -= pair[p] * log(pair[p] / first[byte[1]]) }; print h / NR, 1400 * 5 * log(8) / NR }')
fine --data "$tmp/text.txt" "${size[@]}" --batch 8 --steps 300 --lr 0.01 --val-steps 0 --out run
logged run 300
loss=$(sed -n 's/.*"step": 300, "val_loss": \([0-9.]*\)}/\1/p' run/log.jsonl)
awk -v l="${loss:-99}" -v p="$pairs" -v s="$source" 'BEGIN { exit !(l < 0.8 * p && l > 0.9 * s) }' ||
    wrong "validation loss $loss is not between $source and 0.8 times $pairs"
[ -f run/ckpt-00000300/model.safetensors ] || wrong 'no checkpoint was saved'
cp -r run "$tmp/trained"
end

resume_to_the_bit() { # ARGUMENT...: 20 steps at once, and 10 more from a checkpoint of step 10, whose log went on
    fine "$@" --steps 20 --save-every 10 --keep 0 --val-every 5 --out a
    cp -r a b; rm -r b/ckpt-00000020; cp -r b c
    fine --resume auto --out b
    same a/ckpt-00000020 b/ckpt-00000020; same_losses a b; logged b 20
    fine --resume c/ckpt-00000010 --out d
    same a/ckpt-00000020 d/ckpt-00000020
}
new 'resume to the bit: within an epoch'; resume_to_the_bit "${text[@]}"; end
new 'resume to the bit: across epochs'; resume_to_the_bit "${short[@]}"; end
new 'resume to the bit: with accumulation'; resume_to_the_bit "${short[@]}" --total-batch 192; end
new 'resume to the bit: from a .damaged and a .tmp beside'
fine "${short[@]}" --steps 10 --save-every 4 --keep 0 --out run
cp -r run/ckpt-00000010 "$tmp/work/whole"; mkdir run/ckpt-00000099.tmp; touch run/ckpt-00000099.tmp/model.safetensors
for file in model.safetensors optimizer.safetensors config.json manifest.json; do
    damage "run/ckpt-00000010/$file" 100
    go --resume auto --out run
    [[ $rc = 0 && $err == "warning: "*damaged*ckpt-00000010.damaged*'checkpoint before it is used' ]] || wrong "$file: exit status $rc, $err"
    says '^resumes from *run/ckpt-00000008, step 8'
    same whole run/ckpt-00000010; logged run 10
    [ -d run/ckpt-00000010.damaged ] || wrong "$file: the damaged checkpoint is gone"
    rm -rf run/ckpt-00000010.damaged
done
[ ! -e run/ckpt-00000099.tmp ] || wrong 'the rest of an interrupted save is still there'
end

new 'two runs are the same to the bit, with any number of threads'
fine "${text[@]}" --steps 20 --out a
fine "${text[@]}" --steps 20 --out b
same a/ckpt-00000020 b/ckpt-00000020; same_losses a b
for threads in 1 3; do
    OMP_NUM_THREADS=$threads fine "${text[@]}" --steps 20 --out "c$threads"
    same a/ckpt-00000020 "c$threads/ckpt-00000020"; same_losses a "c$threads"
done
fine "${text[@]}" --steps 20 --seed 7 --out d
! cmp -s a/ckpt-00000020/model.safetensors d/ckpt-00000020/model.safetensors || wrong 'another seed gives the same weights'
end

new '--keep and --save-every'
fine "${text[@]}" --steps 20 --save-every 3 --keep 2 --out run
[ "$(cd run && echo *)" = 'ckpt-00000018 ckpt-00000020 log.jsonl' ] || wrong "there are: $(cd run && echo *)"
end

# ---- signals ------------------------------------------------------------------

for how in INT.130 TERM.143; do
    IFS=. read -r signal status <<<"$how"
    new "SIG$signal: finishes the step, saves, says how to go on"
    start "${short[@]}" "${endless[@]}" --total-batch 512 --out run
    await grep -q '"step": 5,' run/log.jsonl
    kill "-$signal" "$pid"; finish
    [[ $rc = "$status" && ! -s $tmp/err ]] || wrong "exit status $rc instead of $status ($(<"$tmp/err"))"
    step=$(sed -n 's/.*"step": \([0-9]*\), "loss".*/\1/p' run/log.jsonl | tail -n 1)
    says "^stopped by a signal after step $step; to go on: ./train_gpt2 "
    read -ra arguments < <(sed -n 's/.*to go on: [^ ]* //p' "$tmp/out")
    fine "${short[@]}" "${endless[@]}" --total-batch 512 --out whole --steps "$step"
    same_arrays "$(newest)" "$(printf 'whole/ckpt-%08d' "$step")"
    fine "${arguments[@]}" --steps $((step + 3))
    logged run $((step + 3))
    end
done

for how in INT.INT.130 TERM.TERM.143 INT.TERM.143; do
    IFS=. read -r signal second status <<<"$how"
    new "SIG$signal and then SIG$second: ends at once"
    start "${short[@]}" "${hour[@]}" --out run
    await [ -e run/log.jsonl ]
    kill "-$signal" "$pid"; sleep 0.2
    kill -0 "$pid" 2>/dev/null || wrong 'the first one ended it in the middle of a step'
    kill "-$second" "$pid"
    (sleep 5; kill -KILL "$pid") 2>/dev/null & guard=$!
    finish; kill "$guard" 2>/dev/null; wait "$guard" 2>/dev/null
    [ $rc != 137 ] || wrong 'it does not end'
    [ $rc = "$status" ] || wrong "exit status $rc instead of $status"
    [[ $(newest) == *\? && ! -s $tmp/err ]] || wrong 'it saved or complained'
    end
done

new 'kill -9, three times; --resume auto goes on'
# shellcheck disable=SC2317 # called by await
advanced() { [[ $(newest) != *\? && $(newest) != "$last" ]]; }
last='' often=(--save-every 3 --keep 2)
start "${short[@]}" "${endless[@]}" "${often[@]}" --out run
for i in 1 2 3; do
    await advanced
    sleep "0.0$((RANDOM % 10))"
    kill -KILL "$pid"; finish
    last=$(newest)
    [ $i = 3 ] || start --resume auto --out run
done
step=$((10#${last#run/ckpt-} + 5))
fine --resume auto --out run --steps $step
fine "${short[@]}" "${endless[@]}" "${often[@]}" --steps $step --out whole
same "$(newest)" "$(printf 'whole/ckpt-%08d' $step)"; logged run $step; same_losses run whole
[ "$(cd run && echo ./* | wc -w)" = 3 ] || wrong "there are: $(cd run && echo *)"
end

# ---- bad inputs -----------------------------------------------------------------

fine "${text[@]}" --steps 10 --save-every 5 --out "$tmp/base"

new 'bad data files'
small=("${size[@]}" --batch 2 --steps 10)
mkdir folder; : >empty.txt; : >empty.bin; printf 'ten bytes.' >ten.txt; head -c 200 "$tmp/text.txt" >200.txt
refuse 'cannot open the data file nothing.txt: No such file*--data takes*' --data nothing.txt "${small[@]}"
refuse 'cannot open the data file nothing.txt: *' --data "$tmp/text.txt" --val-data nothing.txt "${small[@]}"
refuse "no data file matches '\*.text'*--data takes*" --data '*.text' "${small[@]}"
refuse "no data file matches 'folder/*--data takes*" --data folder "${small[@]}"
refuse 'the data file empty.txt is empty; it should hold *' --data empty.txt "${small[@]}"
refuse 'the data file empty.bin is empty; it should hold *' --data empty.bin "${small[@]}"
refuse '--data has 11 tokens*T = 32 needs 33; give more text, a smaller --seq*' --val-fraction 0 --data ten.txt "${small[@]}"
refuse 'the held-out part of --data has 20 tokens*needs 33; give more*' --data 200.txt "${small[@]}"
refuse '--val-data has 11 tokens*needs 33; give more*' --data "$tmp/text.txt" --val-data ten.txt "${small[@]}"
end

new 'bad shards'
text_tokens "$tmp/short.txt" | tee tokens | shard good.bin 20240520 1 501 257
fine --data good.bin "${small[@]}" --val-fraction 0 --dry-run
shard promise.bin 20240520 1 502 257 <tokens
head -c 600 good.bin >header.bin
shard version.bin 20240520 2 501 257 <tokens
shard model.bin 20240326 3 501 257 <tokens
gzip -c "$tmp/text.txt" >zipped.bin
cp "$tmp/text.txt" text.bin
refuse 'the shard promise.bin is truncated*promises 502 tokens and the file holds 501; download or make it again' --data promise.bin "${small[@]}"
refuse 'the shard header.bin is truncated*promises 501 tokens and the file holds 0; *' --data header.bin "${small[@]}"
refuse 'the shard version.bin has version 2; this program reads version 1' --data version.bin "${small[@]}"
refuse 'model.bin is an llm.c model checkpoint, not a shard*tokenize*' --data model.bin "${small[@]}"
refuse 'zipped.bin looks like a gzip archive, not a shard*tokenize*' --data zipped.bin "${small[@]}"
refuse 'text.bin looks like plain text, not a shard*rename a text to .txt*tokenize*' --data text.bin "${small[@]}"
refuse '--prompt needs a model of bytes*300 tokens*' --data good.bin --vocab 300 --prompt The "${small[@]}"
refuse '--vocab 100 is too small for *text.txt, whose bytes need 257' --data "$tmp/text.txt" --vocab 100 "${small[@]}"
end

new 'a token that the vocabulary lacks: the mended command works at once'
{ head -c 40 /dev/zero; printf '\x2c\x01'; head -c 24 /dev/zero; } | shard high.bin 20240520 1 33 257
mended=(--data high.bin --val-fraction 0 "${small[@]}" --out run)
go "${mended[@]}"
[[ $rc = 1 && $err == 'error: the data file high.bin has token 300 at position 20, and the vocabulary has 257 '*'--vocab'* ]] || wrong "exit status $rc, $err"
fine "${mended[@]}" --vocab 301
end

new 'bad folders to write to'
touch file; cp -r "$tmp/base" run
refuse 'cannot make the folder file/x: Not a directory; choose another --out' "${text[@]}" --steps 1 --out file/x
refuse 'cannot write to the folder file: Not a directory; choose another --out' "${text[@]}" --steps 1 --out file
refuse 'cannot make the folder /proc/x/y: *; choose another --out' "${text[@]}" --steps 1 --out /proc/x/y
! grep -q '^step ' "$tmp/out" || wrong 'it trained before it looked'
refuse 'run already holds a run, saved at step 10; --resume auto *--out *' "${text[@]}" --steps 20 --out run
refuse 'run holds a later checkpoint, of step 10, *choose another --out*' --resume run/ckpt-00000005 --out run
rm -r run
start "${short[@]}" "${hour[@]}" --out run
await [ -e run/log.jsonl ]
refuse "the folder run is in use by another run (process $pid); *another --out" "${text[@]}" --steps 1 --out run
kill -KILL "$pid"; finish
end

new 'bad checkpoints'
cp -r "$tmp/base" run; mkdir none
refuse 'there is no checkpoint nowhere; --resume takes *' "${text[@]}" --resume nowhere
refuse '--model nowhere is neither a preset (tiny, *) nor a folder with a checkpoint' "${text[@]}" --model nowhere
refuse '--model none is neither a preset *' "${text[@]}" --model none
while read -r name other has; do
    refuse "--$name $other does not fit the checkpoint run/ckpt-00000010, which has $has; *" --resume auto --out run "--$name" "$other"
    refuse "--$name $other does not fit the checkpoint run/ckpt-00000010, which has $has; *" --data "$tmp/text.txt" --model run --out x "--$name" "$other"
done <<'SHAPE'
layers 2 1
heads 4 2
channels 64 32
seq 16 32
vocab 300 257
SHAPE
refuse '--layers 4 does not fit *which has 1; *' --resume auto --out run --model tiny
damage run/ckpt-00000010/model.safetensors
refuse 'run/ckpt-00000010 is damaged: the checksum of model.safetensors is wrong*' --resume run/ckpt-00000010 --steps 20
refuse 'run/ckpt-00000010 is damaged*' --resume run --steps 20 --out x
truncate -s -4 run/ckpt-00000010/model.safetensors
refuse '*ckpt-00000010/model.safetensors is *cut short*' --data "$tmp/text.txt" --model run/ckpt-00000010 --out x
end

new 'a damaged checkpoint with none before it: starts anew, from step 1'
cp -r "$tmp/base" run; rm -r run/ckpt-00000005
damage run/ckpt-00000010/model.safetensors
go "${text[@]}" --steps 10 --save-every 5 --resume auto --out run
[[ $rc = 0 && $err == 'warning: '*damaged* ]] || wrong "exit status $rc, $err"
logged run 10
same "$tmp/base/ckpt-00000010" run/ckpt-00000010
end

new 'bad options'
refuse 'unknown option --bath; did you mean --batch? *' --data x --bath 3
refuse 'unknown option --sedes; did you mean --seed? *' --sedes=3
refuse 'unknown option --nonsense-option; --help*' --nonsense-option
refuse 'unknown option book.txt; *--data FILE' book.txt
refuse '--batch needs a value; --help*' "${text[@]}" --batch
refuse "--lr-schedule 'bumpy' is not known; it is one of cosine|linear|constant|wsd" "${text[@]}" --lr-schedule bumpy
refuse '--total-batch 100 is no multiple of*2 x 32 = 64; *' "${text[@]}" --total-batch 100
refuse '--channels 32 is not a multiple of --heads 3; *' "${text[@]}" --heads 3
refuse 'a head has 200 channels*at most 128 *' "${text[@]}" --heads 1 --channels 200
refuse '--steps 0 trains nothing; add --prompt TEXT*' "${text[@]}" --steps 0
refuse '--prompt needs a trained model: give --model FOLDER*' --prompt Once
refuse '--prompt is 1024 characters long; at most 1023 fit' --prompt "$(printf '%1024s' x)"
end

new 'numbers out of range, or no numbers'
count=0
while read -r name type least most; do
    name=${name//_/-} count=$((count + 1))
    if [ "$type" = INT ]; then below=$((least - 1)) above=$((most + 1))
    else read -r below above < <(awk -v a="$least" -v b="$most" 'BEGIN { print a - 0.001, b * 1.001 }'); fi
    for value in "$below" "$above"; do refuse "--$name $value is out of range; it goes from *" "${text[@]}" "--$name" "$value"; done
    for value in many nan -inf '' 5x; do refuse "--$name '$value' is not a *number" "${text[@]}" "--$name=$value"; done
    [ "$type" = REAL ] || refuse "--$name '1.5' is not a whole number" "${text[@]}" "--$name" 1.5
    for value in "$least" "$most"; do # within range; other rules may still forbid them
        go --dry-run "--$name" "$value"
        [[ $rc$err == 0 || $rc$err == '1error: '* && $err != *'out of range'* && $err != *$'\n'* ]] || wrong "--$name $value: exit status $rc, $err"
    done
done < <(sed -nE 's/^ *OPTION\((INT|REAL), ([a-z0-9_]+), "[a-z]*", "[^"]*", ([^,]+), ([^,]+), .*/\2 \1 \3 \4/p' "$table")
[ $count = "$(grep -cE '^ *OPTION\((INT|REAL),' "$table")" ] || wrong "only $count of the numbers were found in $table"
refuse '--eps 0 is out of range; *' "${text[@]}" --eps 0
go --dry-run --batch 1 --seq 1 --total-batch 1000000000000
[[ $rc = 1 && $err == 'error: --total-batch '* ]] || says '(1000000000000 x 1 x 1)'
end

# ---- odd but good inputs ----------------------------------------------------------

new 'odd texts: any bytes, CRLF, no newline at the end, odd names'
for ((i = 0; i < 2000; i++)); do printf '%b' "$(printf '\\0%o' $((RANDOM & 255)))"; done >bytes.txt
sed 's/$/\r/' "$tmp/short.txt" >crlf.txt
printf '%s' "$(<"$tmp/short.txt")" >'my text [1].txt'
for file in bytes.txt crlf.txt 'my text [1].txt'; do
    fine --data "$file" "${size[@]}" --batch 2 --steps 3 --val-fraction 0 --out "run $file"
    says "^data *$(($(wc -c <"$file") + 1)) tokens to train on in 1 file, 0 to validate"
    logged "run $file" 3
    ! grep -q val_loss "run $file/log.jsonl" || wrong 'it validated on nothing'
    fine --resume auto --steps 4 --out "run $file"
done
end

new 'a shard, two files by glob, and a folder give the losses of the same tokens'
same_data() { # NAME ARGUMENT...
    fine --data "$2" "${size[@]}" --batch 2 --steps 10 --val-every 5 --out "$1" "${@:3}"
    same_losses "$1" text
}
mkdir texts; head -c 3000 "$tmp/text.txt" >a.txt; tail -c 2000 "$tmp/text.txt" >b.txt
same_data text a.txt
text_tokens a.txt | shard a.bin 20240520 1 3001 257
same_data shard a.bin
cp a.txt b.txt texts
rm -r text; same_data text '[ab].txt'
says '^data *4502 tokens to train on in 2 files, 500 to validate'
{ text_tokens a.txt; text_tokens b.txt; } | shard ab.bin 20240520 1 5002 257
same_data 'both in a shard' ab.bin
same_data braces '{a,b}.txt'
same_data folder texts
end

new 'a folder with brackets in its name'
mkdir 'my [texts]'; cp "$tmp/text.txt" 'my [texts]'
fine --data 'my [texts]' "${size[@]}" --batch 2 --steps 2 --out run
end

new '--val-data'
head -c 1000 "$tmp/text.txt" >val.txt
fine "${text[@]}" --steps 4 --val-every 2 --val-data val.txt --out run
says "^data *$(($(wc -c <"$tmp/text.txt") + 1)) tokens to train on in 1 file, 1001 to validate"
[ "$(grep -c val_loss run/log.jsonl)" = 2 ] || wrong 'not two validations'
logged run 4
end

# ---- writing text -----------------------------------------------------------------

new 'writing text'
write() { # FILE ARGUMENT...
    fine --tokens 100 "${@:2}"; cp "$tmp/out" "$1"
}
begins_with() { # FILE TEXT
    cmp -s <(head -c "$(printf %s "$2" | wc -c)" "$1") <(printf %s "$2") || wrong "the text does not begin with its prompt: $(head -c 60 "$1" | tr -d '\0')"
    [ "$(wc -c <"$1")" -gt "$(printf %s "$2" | wc -c)" ] || wrong 'nothing follows the prompt'
}
differ() { ! cmp -s "$1" "$2" || wrong "$1 and $2 are the same"; }
equal() { cmp -s "$1" "$2" || wrong "$1 and $2 differ"; }
model=$tmp/trained
before=$(ls -lR --full-time "$model")
write plain --model "$model" --prompt 'The big '; begins_with plain 'The big '
write again --model "$model/ckpt-00000300" --prompt 'The big '; equal plain again
write other --model "$model" --prompt 'The big ' --seed 2; differ plain other
write greedy --model "$model" --prompt 'The big ' --temperature 0; differ plain greedy
write greedy2 --model "$model" --prompt 'The big ' --temperature 0 --seed 2; equal greedy greedy2
write top1 --model "$model" --prompt 'The big ' --top-k 1; equal greedy top1
write top0 --model "$model" --prompt 'The big ' --top-p 0; equal greedy top0
known=$(tr -cs A-Za-z '\n' <greedy | grep -cxF -e The -e the -f "$tmp/words") # of about 20
[ "$known" -ge 15 ] || wrong "it writes few words that it has read: $(tr -d '\0' <greedy)"
write utf8 --model "$model" --prompt 'Füße ☃ 猫 '; begins_with utf8 'Füße ☃ 猫 '
long=$(head -c 1023 "$tmp/text.txt"); write long --model "$model" --prompt "$long"; begins_with long "$long"
[ "$(ls -lR --full-time "$model")" = "$before" ] || wrong "it changed the model's folder"
[ ! -e run ] || wrong 'it made an output folder'
end

new 'samples while training, which change nothing'
fine "${text[@]}" --steps 20 --out a
fine "${text[@]}" --steps 20 --out b --sample-every 5 --prompt 'Sample:' --tokens 9
[ "$(grep -ac '^Sample:' "$tmp/out")" = 5 ] || wrong "$(grep -ac '^Sample:' "$tmp/out") texts instead of 4 samples and the last"
same_arrays a/ckpt-00000020 b/ckpt-00000020; same_losses a b
end

# ---- what goes wrong on the way ---------------------------------------------------

new 'not finite: five updates skipped, then an end that loses nothing'
cp -r "$tmp/base/ckpt-00000010" model
printf '\0\0\xc0\x7f' | dd of=model/model.safetensors bs=1 seek=$(($(wc -c <model/model.safetensors) - 4)) conv=notrunc status=none
go --data "$tmp/text.txt" --batch 2 --model model --steps 50 --out run
[[ $rc = 1 && $err == 'error: 5 updates in a row '*'not finite'*'--lr'* && $err != *$'\n'* ]] || wrong "exit status $rc, $err"
logged run 5
[ "$(grep -c '"loss": null.*"skipped": true' run/log.jsonl)" = 5 ] || wrong 'the log does not have 5 skipped updates'
cmp -s model/model.safetensors run/ckpt-00000005/model.safetensors || wrong 'the weights changed'
[ "$(not_finite run/ckpt-00000005/optimizer.safetensors)" = 0 ] || wrong 'moments are not finite'
end

new 'a huge learning rate never leaves weights that are not finite'
go "${text[@]}" --lr 1000 --steps 60 --out run
[[ $rc$err == 0 || $rc$err == '1error: 5 updates in a row '* ]] || wrong "exit status $rc, $err"
[ "$(not_finite "$(newest)/model.safetensors")" = 0 ] || wrong 'weights are not finite'
[ "$(not_finite "$(newest)/optimizer.safetensors")" = 0 ] || wrong 'moments are not finite'
end

new 'disk full while saving: an error, and earlier checkpoints as they were'
fine "${text[@]}" --steps 20 --save-every 10 --keep 0 --out whole
cp -r whole run; rm -r run/ckpt-00000020; cp -r run/ckpt-00000010 before
(trap '' XFSZ; ulimit -f 50; go --resume auto --out run --save-every 5; echo "$rc" >"$tmp/rc") # weights take 88 KiB
err=$(<"$tmp/err")
[ "$(<"$tmp/rc")" = 1 ] || wrong "exit status $(<"$tmp/rc") instead of 1"
[[ $err == 'warning: cannot save the checkpoint run/ckpt-00000015: File too large; '*'training goes on'$'\n''error: cannot save the checkpoint run/ckpt-00000020: File too large; earlier checkpoints are untouched' ]] ||
    wrong "it says $err"
same before run/ckpt-00000010
[ "$(cd run && echo *)" = 'ckpt-00000010 log.jsonl' ] || wrong "there are: $(cd run && echo *)"
fine --resume auto --out run
same_arrays whole/ckpt-00000020 run/ckpt-00000020; same_losses whole run
end

if script -qec true /dev/null </dev/null >/dev/null 2>&1; then
    new 'lines are updated in place on a terminal, and only there'
    script -qec "$(printf '%q ' "$program" "${text[@]}" --steps 20 --out run)" /dev/null </dev/null >terminal 2>&1
    grep -q $'\r\e\[Kstep  *15/20' terminal || wrong 'no line was replaced on the terminal'
    fine "${text[@]}" --steps 20 --out run2
    ! grep -q $'[\r\e]' "$tmp/out" || wrong 'there are control characters in a file'
    [ "$(grep -c '^step .*tok/s' "$tmp/out")" = 3 ] || wrong 'not the steps 1, 10 and 20 in a file'
    end
else
    skip 'lines are updated in place on a terminal, and only there' 'script (of util-linux) is not installed'
fi

exit "$failed"
