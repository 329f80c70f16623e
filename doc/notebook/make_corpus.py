"""A corpus to pre-train a small Qwen3 on: the documentation comments and Markdown files of this project's
dependencies, at the versions that Cargo.lock names. They are free documentation (MIT, Apache-2.0 and the like);
the corpus itself is not kept here.

    cargo fetch --locked && pip install tokenizers
    python3 doc/notebook/make_corpus.py OUT

Writes OUT/train.txt, OUT/eval.txt (every 50th document) and a model folder OUT/lm: config.json (15.7 M parameters),
a byte-level BPE of 8,192 entries trained on train.txt, Qwen's chat template. Same Cargo.lock, same files.
"""

import hashlib
import json
import pathlib
import re
import sys

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

MOST = 24 << 20  # bytes of text
ROOT = pathlib.Path(__file__).parents[2]
DEMO = ROOT / "train-cli/assets/demo"


def sources():
    """Folders of the locked crates, sorted."""
    lock = (ROOT / "Cargo.lock").read_text()
    names = re.findall(r'name = "([^"]+)"\nversion = "([^"]+)"\nsource', lock)
    root = next((pathlib.Path.home() / ".cargo/registry/src").iterdir())
    return [p for p in (root / f"{n}-{v}" for n, v in sorted(names)) if p.exists()]


def prose(path):
    """The documentation of a file: Markdown whole, of Rust its doc comments."""
    text = path.read_text(encoding="utf-8", errors="ignore")
    if path.suffix == ".md":
        return text
    lines = (re.match(r"\s*//[/!] ?(.*)", line) for line in text.splitlines())
    return "\n".join(m.group(1) if m else "" for m in lines)


def documents():
    seen, size = set(), 0
    for folder in sources():
        for path in sorted([*folder.rglob("*.md"), *folder.rglob("*.rs")]):
            kept = []
            for paragraph in re.split(r"\n\s*\n", prose(path)):
                paragraph = paragraph.strip()
                digest = hashlib.sha256(paragraph.encode()).digest()
                # Generated bindings and repeated licenses teach nothing.
                if len(paragraph) < 40 or digest in seen:
                    continue
                seen.add(digest)
                kept.append(paragraph)
            text = "\n\n".join(kept)
            if len(text) > 200:
                size += len(text.encode())
                yield text
            if size > MOST:
                return


def main(out):
    out = pathlib.Path(out)
    (out / "lm").mkdir(parents=True, exist_ok=True)
    docs = sorted(documents(), key=lambda d: hashlib.sha256(d.encode()).digest())
    parts = {"train.txt": [d for i, d in enumerate(docs) if i % 50], "eval.txt": docs[::50][:60]}
    for name, kept in parts.items():
        (out / name).write_text("\n\n".join(kept), encoding="utf-8")
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json")).pre_tokenizer  # Qwen3's words
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8192, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train([str(out / "train.txt")], trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(out / "lm/tokenizer.json"))
    ids = {t: tokenizer.token_to_id(t) for t in special}
    text = json.loads((DEMO / "tokenizer_config.json").read_text())
    (out / "lm/tokenizer_config.json").write_text(json.dumps(text))
    stop = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    (out / "lm/generation_config.json").write_text(json.dumps({"eos_token_id": stop, "temperature": 0.7, "top_p": 0.8}))
    config = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 8192, "hidden_size": 384,
        "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6, "num_key_value_heads": 2,
        "head_dim": 64, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
        "rope_theta": 10000, "tie_word_embeddings": True, "attention_bias": False, "initializer_range": 0.02,
        "eos_token_id": ids["<|im_end|>"], "bos_token_id": ids["<|endoftext|>"],
    }
    (out / "lm/config.json").write_text(json.dumps(config))
    sizes = {n: sum(len(d.encode()) for d in kept) for n, kept in parts.items()}
    print(sizes, hashlib.sha256((out / "train.txt").read_bytes()).hexdigest()[:16])


if __name__ == "__main__":
    main(sys.argv[1])
