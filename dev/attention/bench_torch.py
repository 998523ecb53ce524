"""How fast PyTorch's FlashAttention-2 and cuDNN are, to set beside `./attention bench`: the same shapes, FLOPs counted alike.

usage: bench_torch.py [B T NH HS]     needs a GPU and PyTorch (pip install torch)
"""
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from triton.testing import do_bench


def measure(backend, B, T, NH, HS):
    """Median milliseconds of forward and of backward, causal, on random bf16 tensors (B, T, NH, HS), contiguous each."""
    q, k, v, dout = (torch.randn(B, T, NH, HS, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    with sdpa_kernel(backend):
        forward = lambda: scaled_dot_product_attention(q, k, v, is_causal=True)
        out = forward()
        backward = lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        return [do_bench(f, warmup=100, rep=300, return_mode="median") for f in (forward, backward)]


shapes = [tuple(int(n) for n in sys.argv[1:5])] if len(sys.argv) == 5 else [
    (64, 1024, 12, 64), (16, 1024, 32, 64), (8, 2048, 32, 64), (4, 4096, 32, 64), (1, 16384, 32, 64),
    (16, 1024, 16, 128), (4, 4096, 16, 128), (1, 16384, 16, 128)]
print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
print(" B      T NH  HS  backend           fwd ms    bwd ms  fwd TF/s  bwd TF/s")
for B, T, NH, HS in shapes:
    for name, backend in (("FlashAttention-2", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        forward, backward = measure(backend, B, T, NH, HS)
        gflops = 4 * B * NH * T * T * HS / 2 / 1e9
        print(f"{B:2} {T:6} {NH:2} {HS:3}  {name:16} {forward:8.3f} {backward:9.3f} {gflops / forward:9.1f} {2.5 * gflops / backward:9.1f}")
