#!/usr/bin/env bash
#
# Tests the GPU trainer from end to end, beside the CPU's: the same losses, checkpoints that go on in the other, resuming to the bit,
# signals, and what only it refuses. tests/test_cli.sh tests what both share in gpt/.
#
# Usage: tests/test_train_gpt2cu.sh PROGRAM CPU_PROGRAM      PROGRAM is build/nvcc/train_gpt2cu, or train_gpt2cu-cpu, which needs no GPU

set -uo pipefail
program=$(realpath -- "${1:-build/nvcc/train_gpt2cu}") on_cpu=$(realpath -- "${2:-build/cc/train_gpt2}")
cd "$(dirname "$0")/.." || exit 1
. tests/lib.sh
if [ ! -x "$program" ] || [ ! -x "$on_cpu" ]; then echo "not ok - setup: there is no $program or no $on_cpu"; exit 1; fi
emulated=''
case $program in *-cpu) emulated=1 ;; esac
tmp=$(mktemp -d "${TMPDIR:-/tmp}/test_train_gpt2cu.XXXXXX") || { echo 'not ok - setup: mktemp failed'; exit 1; }
trap 'rm -rf "$tmp"' EXIT
head -c 7000 README.md >"$tmp/text.txt"  # 21 windows of 32 tokens to validate
cd "$tmp" || exit 1

# Two layers, two batches an update, so that gradients are accumulated; saved in the middle.
shape=(--layers 2 --heads 2 --channels 64 --seq 32 --batch 2)
text=(--data text.txt "${shape[@]}" --total-batch 128 --val-steps 2 --warmup 0 --steps 4 --save-every 2 --log-every 1)

go() { # PROGRAM ARGUMENT...: has to succeed in silence
    "$@" >out 2>err || wrong "exit status $?: $*: $(tail -n 1 err)"
    [ ! -s err ] || wrong "it warns: $(tail -n 1 err)"
}
refused() { # PATTERN ARGUMENT...: has to end with one line of error that matches, and to make nothing
    local pattern=$1; shift
    "$program" "$@" --out none >out 2>err && wrong "it accepts $*"
    [[ $(<err) =~ ^error:\ .*$pattern ]] || wrong "it does not say '$pattern' to $*: $(<err)"
    [ "$(wc -l <err)" = 1 ] || wrong "more than a line: $(<err)"
    [ ! -e none ] || wrong "it made files: $*"
}
numbers() { sed -nE "s/.*\"$2\": ([^,}]*).*/\1/p" "$1/log.jsonl"; } # RUN KEY
near() { # RUN RUN KEY PERCENT [COUNT]: numbers of the two logs, or the first so many, differ by no more than that
    paste <(numbers "$1" "$3") <(numbers "$2" "$3") | head -n "${5:-1000}" |
        awk -v percent="$4" 'NF != 2 || ($1 - $2)^2 > (percent / 100 * $2)^2 { bad = bad " " $1 " and " $2 } END { if (bad || !NR) { print "differ:" bad; exit 1 } }' >differ ||
        wrong "$3 of $1 and $2 $(<differ)"
}
same() { # CHECKPOINT CHECKPOINT: the same weights and moments, to the bit
    cmp -s "$1/model.safetensors" "$2/model.safetensors" || wrong "the weights of $1 and $2 differ"
    cmp -s "$1/optimizer.safetensors" "$2/optimizer.safetensors" || wrong "the moments of $1 and $2 differ"
}
continued() { # RUN STEP TO: a copy of a run as it was at that step
    mkdir "$3" && cp -r "$1/ckpt-0000000$2" "$3" && sed '/"step": '"$(($2 + 1))"'/,$d' "$1/log.jsonl" >"$3/log.jsonl"
}

# The CPU's fp32 and bf16 differ by single roundings of 2^-9. The first norm is one of them or two off; losses, means over 64 tokens, by
# far less than 1 %, though later ones are of weights that have gone another way where a small gradient had another sign.
begin 'it trains as train_gpt2 does'
go "$on_cpu" "${text[@]}" --out fp32
go "$program" "${text[@]}" --out bf16
near bf16 fp32 loss 1
near bf16 fp32 val_loss 1
near bf16 fp32 norm 0.5 1  # the others are of weights that are no longer the same
[ "$(numbers bf16 lr)" = "$(numbers fp32 lr)" ] || wrong 'another learning rate'
[ "$(numbers bf16 step)" = "$(numbers fp32 step)" ] || wrong 'other lines in the log'
grep -qE '^memory +[0-9.]+ MiB on the GPU: weights [0-9.]+, gradients [0-9.]+, moments [0-9.]+, activations [0-9.]+, working space [0-9.]+$' out ||
    wrong 'no memory plan'
end

begin 'a checkpoint of the CPU goes on here'
continued fp32 2 from-fp32
go "$program" --out from-fp32 --resume auto
near from-fp32 fp32 loss 1
end

begin 'a checkpoint of the GPU goes on on the CPU'
continued bf16 2 from-bf16
go "$on_cpu" --out from-bf16 --resume auto
near from-bf16 bf16 loss 1
end

begin 'a resumed run gives the bits of one that was not interrupted'
continued bf16 2 resumed
go "$program" --out resumed --resume auto
same bf16/ckpt-00000004 resumed/ckpt-00000004
[ "$(numbers bf16 loss)" = "$(numbers resumed loss)" ] || wrong 'other losses'
end

begin 'so does one without fp32 weights'
go "$program" "${text[@]}" --master-weights 0 --out rounded
continued rounded 2 rounded-resumed
go "$program" --out rounded-resumed --resume auto
same rounded/ckpt-00000004 rounded-resumed/ckpt-00000004
near rounded bf16 loss 3
cmp -s rounded/ckpt-00000004/model.safetensors bf16/ckpt-00000004/model.safetensors && wrong 'the same weights as with fp32 ones'
end

begin 'what is computed again in the backward changes no bit'
for recompute in 0 2; do
    go "$program" "${text[@]}" --steps 2 --lr-schedule constant --recompute $recompute --out recompute-$recompute
done
go "$program" "${text[@]}" --steps 2 --lr-schedule constant -r 1 --out recompute-1
same recompute-0/ckpt-00000002 recompute-1/ckpt-00000002
same recompute-2/ckpt-00000002 recompute-1/ckpt-00000002
end

begin 'interrupted, it finishes the step, saves, and says how to go on'
"$program" "${text[@]}" --steps 1000000 --out stopped >out 2>err &
pid=$!
for ((i = 0; i < 300; i++)); do grep -q '^step *3/' out && break; sleep 0.1; done
kill -INT $pid
for ((i = 0; i < 300; i++)); do kill -0 $pid 2>/dev/null || break; sleep 0.1; done
kill -KILL $pid 2>/dev/null && wrong 'it goes on'
wait $pid
status=$?
[ $status = 130 ] || wrong "exit status $status"
grep -q -- '--out stopped --resume auto' out || wrong 'no word on how to go on'
step=$(numbers stopped step | tail -n 1)
[ -f "stopped/ckpt-$(printf %08d "$step")/manifest.json" ] || wrong "no checkpoint of step $step"
end

begin 'it writes with a model, its own or the CPU'\''s'
go "$program" --model bf16 --prompt 'The ' --tokens 5
[[ $(<out) == 'The '* ]] || wrong "it writes: $(<out)"
go "$program" --model fp32 --prompt 'The ' --tokens 3 --temperature 0
first=$(<out)
go "$on_cpu" --model fp32 --prompt 'The ' --tokens 3 --temperature 0
[ "$first" = "$(<out)" ] || wrong "greedily it writes '$first' and the CPU '$(<out)'"
end

begin 'samples, validation and a last incomplete batch'
odd=(--steps 2 --val-every 1 --val-steps 0 --batch 4 --total-batch 128)  # 5 batches and a quarter
go "$program" "${text[@]}" "${odd[@]}" --sample-every 1 --tokens 3 --out sampled
go "$on_cpu" "${text[@]}" "${odd[@]}" --out sampled-fp32
[ "$(numbers sampled val_loss | wc -l)" = 2 ] || wrong 'not two validations'
near sampled sampled-fp32 val_loss 1
end

begin 'a dry run says what it would take, and makes nothing'
go "$program" --data text.txt --model d12 --seq 128 --batch 4 --dry-run --out none
[ ! -e none ] || wrong 'it made files'
end

begin 'what does not fit says by how much, and what would'
refused 'needs [0-9.]+ MiB of GPU memory and [0-9.]+ MiB are free, [0-9.]+ MiB too few; --batch [0-9]+ would fit, and with --recompute 2 --batch [0-9]+$' \
    --data text.txt --model d12 --vocab 257 --seq 128 --batch 200000 --dry-run
refused 'not even --batch 1 would fit' --data text.txt --layers 1024 --heads 32 --channels 4096 --seq 128 --dry-run
end

begin 'what the kernels cannot do is refused with what they can'
refused 'head size 16 is not supported; 32, 64 and 128 are' --data text.txt --heads 4 --channels 64
refused 'channels 8192 is too wide .* up to 4096' --data text.txt --heads 64 --channels 8192
end

if [ -n "$emulated" ]; then
    begin 'a GPU that is too old is refused'
    CUDA_ON_CPU_CAPABILITY=7.5 refused 'capability 7.5, and at least 8.0 is needed' "${text[@]}"
    end
else
    begin 'without a GPU it says so'
    CUDA_VISIBLE_DEVICES='' refused 'no NVIDIA GPU can be used: .*; ./train_gpt2 trains on the CPU' "${text[@]}"
    end
fi

exit "$failed"
