#!/usr/bin/env bash
#
# Trains a small GPT from scratch, in about two minutes on two cores, or a larger one in seconds on a GPU, and lets it write.
#
# Usage: make demo                                builds the trainer first: train_gpt2cu where there is a GPU, else train_gpt2
#        scripts/demo.sh [TRAINER] [OPTION...]    ./train_gpt2 or ./train_gpt2cu, and options of it: scripts/demo.sh --steps 20000
#
# The text is Tiny Shakespeare, downloaded by scripts/get_data.sh, or, where there is no network, the source files of
# this repository. The run goes to runs/demo, or to runs/demo-2 and so on if that exists: nothing is written over.

set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

trained() { compgen -G "$1/ckpt-*" >/dev/null; }

trainer=./train_gpt2
case ${1-} in ./train_gpt2*) trainer=$1; shift ;; esac
[ -x "$trainer" ] || { echo "demo.sh: there is no $trainer yet; make demo builds it and comes back here." >&2; exit 1; }
case $trainer in  # on a GPU the size of nanoGPT's character-level model; more steps would only learn the text by heart
*cu) set -- --layers 6 --heads 6 --channels 384 --seq 256 --batch 64 --steps 1000 --lr 0.001 --beta2 0.99 --weight-decay 2 --val-every 250 "$@" ;;
*) set -- --val-every 1000 "$@" ;;
esac

data=${DATA_DIR:-data}/tinyshakespeare.txt
name=$data
next='To be'
prompt=$'ROMEO:\n'
scripts/get_data.sh tinyshakespeare
status=$?
if [ $status -ge 128 ]; then exit $status; fi  # interrupted
if [ $status != 0 ]; then
    echo 'Tiny Shakespeare could not be fetched (see above), so the model learns from the source files of this repository instead.'
    data='{*.c,*.cu,*.cuh,gpt/*,data/*.c,dev/*.c,tests/*.c,scripts/*.sh,tests/*.sh}'
    name='the source files of this repository'
    next='static int'
    prompt='static void '
fi

out=runs/demo
for ((n = 2; n < 1000; n++)); do
    trained $out || break
    out=runs/demo-$n
done

echo
echo "Training on $name. Ctrl-C stops after the current step, saves, and says how to go on."
echo
"$trainer" --data "$data" --out "$out" --val-steps 0 --log-every 100 --prompt "$prompt" --tokens 500 "$@" || exit

trained "$out" || exit 0  # --dry-run, or another --out
cat <<TEXT

The model is in $out. What to try next:
  $trainer --model $out --prompt "$next" --tokens 1000
      lets it write more (--temperature, --top-k, --seed)
  $trainer --data mybook.txt --out runs/mybook
      trains on your own text
  $trainer --help
      lists all options; the README has more
TEXT
