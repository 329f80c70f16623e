"""PyTorch's figures beside those of `train-cli bench decode` and `bench prefill`: Hugging Face's Qwen3 in bf16 with random weights.

    python3 doc/notebook/decode_torch.py CONFIG.json

Prints the tokens a second of answers of 128 tokens after 1,024, one at a time and 16 at a time, without `torch.compile`; the
same of one answer with a static cache and CUDA graphs (`torch.compile`, mode "reduce-overhead"); and of a prompt of 4,096
tokens, up to the first token of its answer. Each is the median of five measurements after a first one.
"""
import sys
import time

import torch
import transformers

CONTEXT, ANSWER, PROMPT = 1024, 128, 4096
config = transformers.Qwen3Config.from_json_file(sys.argv[1])
torch.manual_seed(1)
with torch.device("cuda"):
    model = transformers.Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
print(torch.cuda.get_device_name(), "torch", torch.__version__, "transformers", transformers.__version__, flush=True)


def seconds(call, runs=5):
    times = []
    for _ in range(runs + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[runs // 2]


def answers(batch, **more):
    """Tokens a second after the first token, whose time is taken off."""
    ids = torch.randint(0, config.vocab_size, (batch, CONTEXT), device="cuda")

    def generate(tokens):
        flags = dict(do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=0, **more)
        return lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **flags)

    return batch * (ANSWER - 1) / (seconds(generate(ANSWER)) - seconds(generate(1)))


with torch.inference_mode():
    prompt = torch.randint(0, config.vocab_size, (1, PROMPT), device="cuda")
    took = seconds(lambda: model(prompt, logits_to_keep=1).logits.argmax())
    print(f"prefill {PROMPT}: {PROMPT / took:.0f} tokens/s", flush=True)
    for batch in (1, 16):
        print(f"decode, {batch} at a time, context {CONTEXT}: {answers(batch):.1f} tokens/s", flush=True)
    graphs = dict(cache_implementation="static", compile_config=transformers.CompileConfig(mode="reduce-overhead"))
    print(f"decode, 1 at a time, static cache and CUDA graphs: {answers(1, **graphs):.1f} tokens/s", flush=True)
