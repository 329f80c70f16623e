"""PyTorch's figures for the rows of `train-cli bench kernels`, on the machine it runs on.

Prints cuBLAS products at the Qwen3-4B shapes (TFLOP/s), causal attention forward and backward (TFLOP/s, 2.5 forward
products counted for the backward) and a device-to-device copy (GB/s, read plus written). Medians of CUDA events.
"""
import torch
import torch.nn.functional as F


def median(call, n=20):
    for _ in range(3):
        call()
    times = []
    for _ in range(n):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[n // 2]


def bf16(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


print(torch.cuda.get_device_name(), "torch", torch.__version__)
source, target = torch.empty(1 << 30, dtype=torch.uint8, device="cuda"), torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
print(f"copy 1 GiB: {2 * (1 << 30) / median(lambda: target.copy_(source)) / 1e9:.0f} GB/s")

for m in (2048, 4096, 8192):
    for name, n, k in (
        ("q", 4096, 2560), ("k, v", 1024, 2560), ("q + k + v", 6144, 2560), ("o", 2560, 4096), ("gate, up", 9728, 2560),
        ("gate + up", 19456, 2560), ("down", 2560, 9728),
    ):
        x, w, dy = bf16(m, k), bf16(n, k), bf16(m, n)
        work = 2 * m * n * k / 1e12
        forward, dgrad, wgrad = (work / median(c) for c in (lambda: x @ w.t(), lambda: dy @ w, lambda: dy.t() @ x))
        print(f"cuBLAS {name} {m}x{n}x{k}: forward {forward:.0f}, dgrad {dgrad:.0f}, wgrad {wgrad:.0f} TFLOP/s")

# The head in chunks of tokens, as `bench kernels` has it, and of all tokens: logits, dgrad and wgrad, one after another.
for m in (1024, 2048, 4096, 8192):
    h, w, logits = bf16(m, 2560), bf16(151_936, 2560), bf16(m, 151_936)
    three = median(lambda: (h @ w.t(), logits @ w, logits.t() @ h))
    print(f"cuBLAS head, its three products alone {m}x151936x2560: {6 * m * 151_936 * 2560 / 1e12 / three:.0f} TFLOP/s")
    del h, w, logits

for t in (2048, 4096, 8192):
    q, k, v = (bf16(1, 32, t, 128).requires_grad_() for _ in range(3))
    work = 2 * t * t * 4096 / 1e12
    attend = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    y = attend()
    dy = torch.randn_like(y)
    backward = median(lambda: torch.autograd.grad(y, (q, k, v), dy, retain_graph=True))
    print(f"SDPA causal {t}: forward {work / median(attend):.0f}, backward {2.5 * work / backward:.0f} TFLOP/s")
