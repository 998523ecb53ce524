#!/usr/bin/env python3
"""Training speed on one GPU, ours beside PyTorch's: GPT-2 at T = 1024, 524,288 tokens an update, random tokens.

    make train_gpt2cu && python3 dev/bench_gpu.py        d12, d24 and d48; PyTorch's figures if it is installed
    python3 dev/bench_gpu.py d12 --recompute 0           one of them, with options of ./train_gpt2cu

Both take the median of their updates after the first two, which warm up, one after the other in the same run. PyTorch's side is
compiled, in bf16 by autocast, with its fastest attention (cuDNN's) and a fused AdamW. Tokens are drawn from a distribution like that
of words, as embeddings cost more with tokens that repeat. Nothing is left behind.
"""
import array, json, math, os, random, shutil, statistics, subprocess, sys, tempfile, time

SIZES = {"d12": (12, 12, 768, 64, 8), "d24": (24, 16, 1024, 32, 5), "d48": (48, 25, 1600, 16, 4)}  # L, NH, C, B, updates
T, VOCABULARY, TOKENS, WARM_UP = 1024, 50257, 524288, 2


def write_shard(path, count):
    """A .bin shard (data/README.md) of `count` tokens; token t is about 1 / t as frequent as the first."""
    words = array.array("I")
    words.frombytes(random.Random(1).randbytes(4 * count))
    scale = math.log(VOCABULARY) / 2**32
    tokens = array.array("H", (int(math.exp(word * scale)) - 1 for word in words))
    header = array.array("i", [20240520, 1, count] + [0] * 253)
    with open(path, "wb") as file:
        file.write(header.tobytes() + tokens.tobytes())


def ours(size, shard, folder, options):
    """Tokens a second, seconds from the command to the end of the first update, MiB of GPU memory."""
    B, updates = SIZES[size][3:]
    command = ["./train_gpt2cu", "--data", shard, "--model", size, "--batch", str(B), "--total-batch", str(TOKENS), "--steps", str(updates),
               "--val-fraction", "0", "--save-every", "0", "--out", folder, "--log-every", "1", *options]
    start, first, memory = time.time(), None, None
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("memory"):
            memory = float(line.split()[1])
        if first is None and line.startswith("step "):
            first = time.time() - start
        if line.startswith(f"step {updates}/"):  # saving what random tokens taught is of no use
            process.kill()
    if process.wait() > 0:
        sys.exit(f"{' '.join(command)} failed, see above")
    with open(os.path.join(folder, "log.jsonl")) as log:
        speeds = [json.loads(line)["tokens_per_second"] for line in log]
    return statistics.median(speeds[WARM_UP:]), first, memory


def pytorch(size):
    """Prints tokens a second and MiB of GPU memory."""
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
    L, NH, C, B, updates = SIZES[size]
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.ln1, self.ln2 = nn.LayerNorm(C), nn.LayerNorm(C)
            self.qkv, self.proj, self.fc, self.fcproj = (nn.Linear(*shape) for shape in ((C, 3 * C), (C, C), (C, 4 * C), (4 * C, C)))

        def forward(self, x):
            q, k, v = (t.view(B, T, NH, C // NH).transpose(1, 2) for t in self.qkv(self.ln1(x)).split(C, dim=2))
            att = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(att.transpose(1, 2).reshape(B, T, C))
            return x + self.fcproj(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))

    class GPT2(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(50304, C), nn.Embedding(T, C)  # a multiple of 128, which is faster
            self.blocks, self.lnf = nn.ModuleList(Block() for _ in range(L)), nn.LayerNorm(C)
            for p in self.parameters():
                if p.dim() > 1:
                    nn.init.normal_(p, std=0.02)

        def forward(self, tokens, targets):
            x = self.wte(tokens) + self.wpe.weight
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy(F.linear(self.lnf(x), self.wte.weight).flatten(0, 1).float(), targets.flatten())

    model = GPT2().cuda()
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    window = torch.exp(torch.rand(B, T + 1, device="cuda") * math.log(VOCABULARY)).long() - 1
    accumulation, times = TOKENS // (B * T), []
    for _ in range(updates):
        start = time.perf_counter()
        for _ in range(accumulation):
            with torch.autocast("cuda", torch.bfloat16), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                loss = compiled(window[:, :-1], window[:, 1:]) / accumulation
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    print(TOKENS / statistics.median(times[WARM_UP:]), torch.cuda.max_memory_allocated() / 2**20)


def main():
    if sys.argv[1:2] == ["--pytorch"]:
        return pytorch(sys.argv[2])
    if "--help" in sys.argv or "-h" in sys.argv:
        return print(__doc__)
    if not os.access("./train_gpt2cu", os.X_OK):
        sys.exit("there is no ./train_gpt2cu; make train_gpt2cu, and run this in the same folder")
    sizes = [word for word in sys.argv[1:] if word in SIZES] or list(SIZES)
    options = [word for word in sys.argv[1:] if word not in SIZES]
    has_pytorch = subprocess.run([sys.executable, "-c", "import torch"], stderr=subprocess.DEVNULL).returncode == 0
    if not shutil.which("nvidia-smi") or subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.DEVNULL).returncode:
        sys.exit("there is no NVIDIA GPU here to measure")
    with tempfile.TemporaryDirectory() as folder:
        shard = os.path.join(folder, "random.bin")
        write_shard(shard, 1 << 23)
        print("size    tokens/s    first update after    memory, GiB    PyTorch    its memory    ratio")
        for size in sizes:
            speed, first, memory = ours(size, shard, os.path.join(folder, size), options)
            print(f"{size:4} {speed:11.0f} {first:19.1f} s {memory / 1024:14.1f}", end="", flush=True)
            if has_pytorch:
                output = subprocess.run([sys.executable, __file__, "--pytorch", size], stdout=subprocess.PIPE, text=True).stdout
                if output:
                    other, other_memory = map(float, output.split())
                    print(f" {other:10.0f} {other_memory / 1024:13.1f} {speed / other:8.3f}", end="")
            print(flush=True)


main()
