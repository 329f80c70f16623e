"""Writes encodings.json: strings and their ids by Hugging Face tokenizers. See ../README.md.

    make_tokenizer.py TOKENIZER_JSON    Qwen3-4B-Instruct-2507's tokenizer.json
"""

import hashlib
import json
import sys
from pathlib import Path

import tokenizers

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "hello  world   with    runs of     spaces",
    "   leading and trailing   ",
    "\ttabs\t\tand\nnewlines\n\n\nand\r\nCRLF\r\n\r\nend\n",
    " \n \n  \n\t \n x",
    "The quick brown fox jumps over the lazy dog. It's 10:45; they're late, I'VE said, we'll see, don't!",
    "1234567890 3.14159 1e-5 0xFF 2,688 50%",
    "我是用 Rust 訓練的小小 Qwen3。",
    "你是誰？請自我介紹一下，謝謝！",
    "人工智能正在改变世界，但是中文和English混排也要正确。",
    "「全形」（括號）、頓號……以及——破折號",
    "こんにちは、世界。カタカナとひらがな。",
    "안녕하세요 세계",
    "Привет, мир! Größe, naïve café, Ærø, İstanbul",
    "مرحبا بالعالم — שלום עולם — สวัสดีชาวโลก — नमस्ते",
    "🦀🚀 emoji 👩‍👩‍👧‍👦 family, flag 🇹🇼, skin 👍🏽, heart ❤️",
    "fn main() {\n    let x: u8 = 0b1010_0101;\n    println!(\"{x:?} {}\", x as f32 * 0.5);\n}\n",
    "def f(a, b=None):\n\treturn [i**2 for i in range(a)] if b is None else {**b, 'k': f\"{a!r}\"}\n",
    "<html><body class=\"x\">&amp; &lt;p&gt;</body></html>",
    "{\"name\": \"get_weather\", \"arguments\": {\"city\": \"台北\", \"n\": -3}}",
    "∑_{i=0}^{n} x_i² ≤ √(π·e) ⇒ ∀ε>0 ½",
    "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>assistant\n<think>\n\n</think>\n\nHi<|im_end|><|endoftext|>",
    "<tool_call>\n{}\n</tool_call><tool_response>x</tool_response> <|fim_prefix|>a<|fim_suffix|>",
    "not special: <|im_start |> < |im_end|> <|im_end| > <|unknown|> <|IM_END|>",
    "text<|im_end|>glued<|endoftext|> and  <|im_end|>  spaced",
    "e\u0301 decomposed, \u1100\u1161 jamo, \uff21 full width, \ufb01 ligature, \u212b angstrom",
    "zero\u200bwidth\u00a0nbsp\u3000ideographic\u2028line\ufeffbom",
    "control \x00\x01\x1b[0m\x7f bytes",
    "\U0010ffff\ue000 private \U00020000 rare 𠮷",
    "a" * 100,
    "ab" * 40 + "!" * 33 + "\n" * 17,
    "supercalifragilisticexpialidocious antidisestablishmentarianism https://example.com/a/b?c=d&e=%20f#g",
]


def main():
    path = Path(sys.argv[1])
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    lines = []
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        lines.append(json.dumps({"text": text, "ids": ids, "decoded": decoded}, ensure_ascii=False))
    head = f'"tokenizer_sha256": "{hashlib.sha256(path.read_bytes()).hexdigest()}"'
    body = ",\n".join(lines)
    out = f'{{\n{head},\n"encodings": [\n{body}\n]\n}}\n'
    json.loads(out)
    Path(__file__).with_name("encodings.json").write_text(out, "utf-8")
    print(len(lines), "strings, tokenizers", tokenizers.__version__)


if __name__ == "__main__":
    main()
