"""PyTorch's figures for a training step of Qwen3-4B on the machine it runs on: Hugging Face transformers, bf16, fused
AdamW, random weights and tokens, batch 1. The rows that `train-cli fit --synthetic` is compared with.

    python3 doc/notebook/train_torch.py CONFIG.json

The last row is compiled by torch.compile, which takes a minute.
"""
import json
import sys
import time

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

config = Qwen3Config(**json.load(open(sys.argv[1])))
print(torch.cuda.get_device_name(), "torch", torch.__version__)
for tokens, checkpointing, compiled in [(2048, False, False), (4096, True, False), (2048, False, True)]:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    call = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(0, config.vocab_size, (1, tokens), device="cuda")
    times = []
    for _ in range(8):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    step = sorted(times[2:])[3]
    peak = torch.cuda.max_memory_allocated() / 2**30
    mode = "gradient checkpointing" if checkpointing else "compiled" if compiled else "plain"
    print(f"{tokens} tokens, {mode}: {step * 1e3:.0f} ms, {tokens / step:.0f} tokens/s, {peak:.1f} GiB peak")
    del model, call, optimizer
