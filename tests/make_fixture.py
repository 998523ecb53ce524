#!/usr/bin/env python3
"""Makes the fixtures: tiny GPT-2s with reference results from PyTorch.

tests/tiny_gpt2.safetensors: the weights are float32 values; everything else is computed from
them in float64: logits, loss and gradients of one batch, then ten clipped AdamW steps on ten
batches. tests/tiny_gpt2_32.safetensors, for the trainer on GPUs: one head of 32 channels, as
its attention wants it, weights that are bf16 values, too, and the ten steps only: five times
on two batches, so that a loss says much about the updates before it.

    apt-get install python3-torch
    python3 tests/make_fixture.py

Nobody needs this script, or PyTorch, to run the tests: the files it makes are committed.
"""
import json, math, os, struct
import torch

L, V, T_MAX = 2, 67, 24
B, T, STEPS = 3, 21, 10
LR, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1


def draw_weights(C, dtype):
    """All weights by Hugging Face name, exact in dtype; linear weights are (in, out)."""
    linears = {"attn.c_attn": (C, 3 * C), "attn.c_proj": (C, C), "mlp.c_fc": (C, 4 * C), "mlp.c_proj": (4 * C, C)}
    shapes = {"wte.weight": (V, C), "wpe.weight": (T_MAX, C)}
    for i in range(L):
        for name in "ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj":
            shape = linears.get(name, (C,))
            shapes.update({f"h.{i}.{name}.weight": shape, f"h.{i}.{name}.bias": shape[-1:]})
    shapes.update({"ln_f.weight": (C,), "ln_f.bias": (C,)})
    weights = {}
    for name, shape in shapes.items():
        x = torch.randn(shape) * (0.15 if len(shape) == 2 else 0.1)
        x += len(shape) == 1 and name.endswith("weight")  # layernorm weights are near 1
        weights["transformer." + name] = x.to(dtype).double()
    return weights


def forward(weights, NH, tokens, targets):
    """Logits (b, t, V) and the mean cross-entropy over all b*t positions."""
    def get(name):
        return [weights[f"transformer.{name}.{part}"] for part in ("weight", "bias")]

    def norm(name, x):
        w, b = get(name)
        d = x - x.mean(-1, keepdim=True)
        return d / torch.sqrt((d * d).mean(-1, keepdim=True) + 1e-5) * w + b

    def linear(name, x):
        w, b = get(name)
        return x @ w + b

    def gelu(x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    n, t = tokens.shape
    wte, wpe = weights["transformer.wte.weight"], weights["transformer.wpe.weight"]
    C = wte.shape[1]
    future = torch.ones(t, t).triu(1).bool()
    x = wte[tokens] + wpe[:t]
    for h in (f"h.{i}." for i in range(L)):
        qkv = linear(h + "attn.c_attn", norm(h + "ln_1", x))
        q, k, v = (z.view(n, t, NH, C // NH).transpose(1, 2) for z in qkv.split(C, -1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(C // NH)
        att = torch.softmax(scores.masked_fill(future, -math.inf), -1)
        x = x + linear(h + "attn.c_proj", (att @ v).transpose(1, 2).reshape(n, t, C))
        x = x + linear(h + "mlp.c_proj", gelu(linear(h + "mlp.c_fc", norm(h + "ln_2", x))))
    logits = norm("ln_f", x) @ wte.T
    return logits, -torch.log_softmax(logits, -1).gather(-1, targets[..., None]).mean()


@torch.no_grad()
def check_gradients(weights, NH, tokens, targets, step=1e-5):
    """Central differences at the largest gradient of every weight tensor."""
    for name, p in weights.items():
        flat, j = p.view(-1), p.grad.abs().argmax()
        keep, ends = flat[j].item(), []
        for flat[j] in (keep + step, keep - step):
            ends.append(forward(weights, NH, tokens, targets)[1].item())
        flat[j] = keep
        want, got = (ends[0] - ends[1]) / (2 * step), p.grad.view(-1)[j].item()
        assert abs(got - want) < 1e-7 * abs(want) + 1e-9, (name, got, want)


def train(weights, NH, inputs, targets, max_norm):
    """One AdamW step per batch, in place; losses and gradient norms are from before each step."""
    params = list(weights.values())
    groups = [{"params": [p for p in params if p.ndim >= 2], "weight_decay": DECAY},
              {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    losses, norms = [], []
    for x, y in zip(inputs, targets):
        optimizer.zero_grad()
        loss = forward(weights, NH, x, y)[1]
        loss.backward()
        losses.append(loss.item())
        norms.append(math.sqrt(sum((p.grad**2).sum().item() for p in params)))
        for p in params:
            p.grad *= min(1.0, max_norm / norms[-1])
        optimizer.step()
    assert min(norms) < max_norm < max(norms), norms  # both sides of the clipping are tested
    return torch.tensor(losses), torch.tensor(norms)


def save(path, tensors, metadata):
    """Safetensors: header length (8 bytes), JSON header, the data without gaps."""
    header, data = {"__metadata__": metadata}, b""
    for name, (dtype, x) in tensors.items():
        begin, code = len(data), {"F32": "f", "F64": "d", "I32": "i"}[dtype]
        data += struct.pack(f"<{x.numel()}{code}", *x.reshape(-1).tolist())
        header[name] = {"dtype": dtype, "shape": list(x.shape), "data_offsets": [begin, len(data)]}
        assert begin % (8 if dtype == "F64" else 4) == 0, name
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + data)


def make(file, C, NH, dtype, batches, max_norm, kept):
    """Writes a fixture; `kept` says by a tensor's name if it is to be in it."""
    torch.manual_seed(1337)
    initial = draw_weights(C, dtype)
    weights, trained = ({k: x.clone().requires_grad_() for k, x in initial.items()} for _ in range(2))
    tokens, targets = torch.randint(V, (2, B, T))
    train_tokens, train_targets = torch.randint(V, (2, batches, B, T)).repeat(1, STEPS // batches, 1, 1)

    logits, loss = forward(weights, NH, tokens, targets)
    loss.backward()
    check_gradients(weights, NH, tokens, targets)
    losses, norms = train(trained, NH, train_tokens, train_targets, max_norm)
    print(f"{file}: loss {loss.item()}\nlosses {losses.tolist()}\nnorms {norms.tolist()}")

    tensors = {
        **{name: ("F32", x) for name, x in initial.items()},
        "input": ("I32", tokens), "target": ("I32", targets),
        "logits": ("F64", logits), "loss": ("F64", loss.view(1)),
        **{"grad." + name: ("F64", p.grad) for name, p in weights.items()},
        "train.input": ("I32", train_tokens), "train.target": ("I32", train_targets),
        "train.losses": ("F64", losses), "train.norms": ("F64", norms),
        "train.max_norm": ("F64", torch.tensor([max_norm])),
        "train.final.wte": ("F64", trained["transformer.wte.weight"]),
        "train.final.qkv": ("F64", trained["transformer.h.1.attn.c_attn.weight"]),
    }
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), file)
    save(path, {k: x for k, x in tensors.items() if kept(k)},
         {"heads": str(NH), "torch": torch.__version__, "made_by": "tests/make_fixture.py"})


def main():
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    make("tiny_gpt2.safetensors", 16, 2, torch.float32, 10, 1.0, lambda name: True)
    make("tiny_gpt2_32.safetensors", 32, 1, torch.bfloat16, 2, 1.5,
         lambda name: name.startswith(("transformer.", "train.")) and "final" not in name)


if __name__ == "__main__":
    main()
