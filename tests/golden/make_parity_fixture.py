"""Writes what a Hugging Face Qwen3 computes in float32: forward, gradients, greedy tokens, a training run.

    make_parity_fixture.py --model DIR --output expected.safetensors [--like FILE] [--no-train] [--tokens N] [--seed N]

Keys and settings: README.md beside this file.
"""

import argparse

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

IGNORED = -100
NEW_TOKENS = 48
STEPS, ROWS, WIDTH = 20, 2, 24


def load(path):
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    assert model.config.model_type == "qwen3", model.config.model_type
    return model.eval()


def random_inputs(vocab, tokens, seed):
    """Two rows of ids: row 0 has its first 30 % masked, row 1 its first half and its last tenth."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randint(0, vocab, shape, generator=g)
    ids = draw(ROWS, tokens)
    labels = ids.clone()
    labels[0, : max(1, tokens * 3 // 10)] = IGNORED
    labels[1, : tokens // 2] = IGNORED
    labels[1, tokens - tokens // 10 :] = IGNORED
    return {"input_ids": ids, "labels": labels, "generate.prompt": draw(1, 9), "train.data": draw(STEPS, ROWS, WIDTH)}


def forward_backward(model, ids, labels):
    model.zero_grad()
    out = model(input_ids=ids, labels=labels, output_hidden_states=True, use_cache=False)
    out.loss.backward()
    tensors = {"logits": out.logits, "loss": out.loss.reshape(1)}
    # The embedding's output, each block's output; the last one is after the final norm.
    tensors |= {f"hidden.{i}": h for i, h in enumerate(out.hidden_states)}
    tensors |= {f"grad.{name}": p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return tensors


@torch.no_grad()
def greedy(model, prompt):
    """The prompt and NEW_TOKENS argmax tokens after it; end tokens do not stop it."""
    ids, step, cache = prompt, prompt, None
    for _ in range(NEW_TOKENS):
        out = model(input_ids=step, past_key_values=cache, use_cache=True)
        cache, step = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, step], 1)
    return ids


def train(model, data):
    """Losses and gradient norms (before clipping), one batch a step, labels = inputs."""
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    losses, norms = [], []
    for batch in data:
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(params, 1.0))
        optimizer.step()
        losses.append(loss)
    return {"train.losses": torch.stack(losses), "train.grad_norms": torch.stack(norms)}


def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("--model", required=True, help="Hugging Face Qwen3 folder")
    args.add_argument("--output", required=True, help="safetensors file to write")
    args.add_argument("--like", help="take input_ids, labels, generate.prompt and train.data from this fixture")
    args.add_argument("--no-train", action="store_true", help="leave out train.*")
    args.add_argument("--tokens", type=int, default=37, help="length of the two random rows (default 37)")
    args.add_argument("--seed", type=int, default=0, help="seed of the random ids (default 0)")
    args = args.parse_args()

    model = load(args.model)
    inputs = random_inputs(model.config.vocab_size, args.tokens, args.seed)
    if args.like:
        like = load_file(args.like)
        inputs = {key: like[key].long() for key in inputs if key in like}
    if args.no_train:
        inputs.pop("train.data", None)

    tensors = {key: value.int() for key, value in inputs.items()}
    tensors |= forward_backward(model, inputs["input_ids"], inputs["labels"])
    tensors["generate.ids"] = greedy(model, inputs["generate.prompt"]).int()
    if "train.data" in inputs:
        tensors |= train(model, inputs["train.data"])  # last: it changes the weights
    tensors = {key: value.detach().contiguous().clone() for key, value in tensors.items()}
    save_file(tensors, args.output)
    print(f"{args.output}: {len(tensors)} tensors, loss {tensors['loss'].item():.6f}")


if __name__ == "__main__":
    main()
