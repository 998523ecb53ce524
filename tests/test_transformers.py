#!/usr/bin/env python3
"""Opens a checkpoint with Hugging Face Transformers, and one of theirs with our trainer.

    python3 tests/test_transformers.py [PROGRAM]      (default: ./train_gpt2)

Trains a small model on its own source first. Skipped where Transformers or PyTorch is not installed.
"""
import glob, os, subprocess, sys, tempfile

try:
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, __version__
except ImportError as error:
    print(f"skip - a checkpoint in Transformers: {error}")
    sys.exit(0)

program = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else "train_gpt2")
source = os.path.abspath("train_gpt2.c" if os.path.exists("train_gpt2.c") else __file__)
failed = False


def check(name, right, why=""):
    global failed
    failed = failed or not right
    print(f"ok - {name}" if right else f"not ok - {name}: {why}")


def write(folder, prompt, tokens):
    """What our program writes after the prompt, always taking the likeliest token."""
    return subprocess.run([program, "--model", folder, "--prompt", prompt, "--tokens", str(tokens), "--temperature", "0"],
                          check=True, capture_output=True).stdout[:-1].decode("utf-8", "replace")


def continue_greedily(model, tokenizer, prompt, tokens):
    """The same with Transformers. Also returns the smallest lead of a chosen token over the next likely one."""
    ids = [tokenizer.eos_token_id] + tokenizer.encode(prompt)
    lead = float("inf")
    for _ in range(tokens):
        top = torch.topk(model(torch.tensor([ids])).logits[0, -1].double(), 2)
        lead = min(lead, (top.values[0] - top.values[1]).item())
        ids.append(top.indices[0].item())
        if ids[-1] == tokenizer.eos_token_id:
            break
    return tokenizer.decode(ids[1:]), lead


with tempfile.TemporaryDirectory() as folder, torch.no_grad():
    subprocess.run([program, "--data", source, "--out", f"{folder}/run", "--steps", "150", "--channels", "64", "--heads", "2"],
                   check=True, capture_output=True)
    checkpoint = glob.glob(f"{folder}/run/ckpt-*")[0]
    model, loading = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    model.eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    problems = {key: value for key, value in loading.items() if value}
    check(f"Transformers {__version__} opens a checkpoint with nothing missing or left over", not problems, problems)

    text = "To be, or nöt to be:\n\tthat is 問題 <b>  "
    check("its tokenizer gives a text's bytes", tokenizer.encode(text) == list(text.encode()), tokenizer.encode(text))
    check("and the text back", tokenizer.decode(tokenizer.encode(text)) == text, repr(tokenizer.decode(tokenizer.encode(text))))

    # A lead of 1e-3 is a thousand times what the order of summation in float32 can change at logits of about 10.
    theirs, lead = continue_greedily(model, tokenizer, "static int ", 100)
    ours = write(f"{folder}/run", "static int ", 100)
    check("both write the same text", ours == theirs or lead < 1e-3, f"{ours!r} instead of {theirs!r}")

    model.save_pretrained(f"{folder}/theirs")
    check("our program opens what Transformers saves", write(f"{folder}/theirs", "static int ", 100) == ours, "another text")

sys.exit(failed)
