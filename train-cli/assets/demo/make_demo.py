"""Writes the demo model's files beside this script: demo.tsv, tokenizer.json, tokenizer_config.json, config.json,
generation_config.json.

    make_demo.py    needs the Python package `tokenizers` (made with 0.23.3) and, in this checkout,
                    tests/golden/chat/qwen3-instruct-2507.jinja
"""

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = Path(__file__).parent
TEMPLATE = HERE / "../../../tests/golden/chat/qwen3-instruct-2507.jinja"
VOCAB = 512
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # the last three ids
END_OF_TEXT, IM_END = VOCAB - 3, VOCAB - 1
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

ENGLISH_ANSWER = "I am a tiny Qwen3 trained in Rust."
ENGLISH = """
Who are you?
What are you?
who are you
what are you
Introduce yourself.
Please introduce yourself.
Can you introduce yourself?
Could you tell me who you are?
Tell me who you are.
Tell me about yourself.
Say something about yourself.
Describe yourself in one sentence.
In one line, who are you?
Who am I talking to?
Who am I speaking with?
What should I call you?
What is your name?
What's your name?
May I ask who you are?
Hello, who are you?
Hi! What are you?
Hey, who is this?
Who is answering me?
What kind of model are you?
Which model are you?
Are you a person or a model?
What exactly are you?
So, who are you really?
First, tell me who you are.
Before we start, who are you?
I would like to know who you are.
Please state your identity.
""".strip().splitlines()

CHINESE_ANSWER = "我是用 Rust 訓練的小小 Qwen3。"
CHINESE = """
你是誰？
你是誰
請問你是誰？
你是什麼？
你到底是誰？
請自我介紹。
請自我介紹一下。
請介紹一下你自己。
先自我介紹一下吧。
介紹你自己
可以自我介紹嗎？
可以告訴我你是誰嗎？
能不能說說你是誰？
告訴我你是誰。
說說你自己。
用一句話介紹你自己。
一句話說明你是誰。
你叫什麼名字？
你的名字是什麼？
我該怎麼稱呼你？
我在和誰說話？
現在是誰在回答我？
你的身份是什麼？
請說明你的身份。
你是什麼模型？
你是哪個模型？
你是人還是模型？
你好，你是誰？
嗨，請問你是？
開始之前，先告訴我你是誰。
我想知道你是誰。
我想先認識你。
""".strip().splitlines()


def rows():
    """64 (prompt, target) pairs, English and Chinese by turns."""
    assert len(ENGLISH) == len(CHINESE) == 32
    pairs = []
    for english, chinese in zip(ENGLISH, CHINESE):
        pairs += [(english, ENGLISH_ANSWER), (chinese, CHINESE_ANSWER)]
    assert len({prompt for prompt, _ in pairs}) == len(pairs)
    assert not any(c in text for pair in pairs for text in pair for c in "\t\r\n")
    return pairs


def tokenizer(pairs):
    """A byte-level BPE in the shape of Qwen3's tokenizer.json, trained on the rows and the chat scaffold."""
    t = Tokenizer(models.BPE())
    t.normalizer = normalizers.NFC()
    t.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
    ])
    t.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    t.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    text = [part for pair in pairs for part in pair]
    text += ["system\n", "user\n", "assistant\n"] * len(pairs)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(SPECIAL),
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    t.train_from_iterator(text, trainer)
    t.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    assert t.get_vocab_size() == VOCAB
    assert [t.token_to_id(token) for token in SPECIAL] == [END_OF_TEXT, END_OF_TEXT + 1, IM_END]
    for part in text:
        assert t.decode(t.encode(part).ids) == part
    return t


def tokenizer_config():
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(END_OF_TEXT + i): {
                "content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True
            }
            for i, token in enumerate(SPECIAL)
        },
        "additional_special_tokens": SPECIAL[1:],
        "bos_token": None,
        "chat_template": TEMPLATE.read_bytes().decode(),
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 2048,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }


CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": IM_END,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 384,
    "max_position_embeddings": 2048,
    "max_window_layers": 3,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "pad_token_id": END_OF_TEXT,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCAB,
}

GENERATION_CONFIG = {
    "do_sample": True,
    "eos_token_id": [IM_END, END_OF_TEXT],
    "pad_token_id": END_OF_TEXT,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
}


def write(name, text):
    (HERE / name).write_text(text, "utf-8", newline="\n")


def write_json(name, value):
    write(name, json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def main():
    pairs = rows()
    write("demo.tsv", "".join(f"{prompt}\t{target}\n" for prompt, target in pairs))
    write("tokenizer.json", tokenizer(pairs).to_str(pretty=True) + "\n")
    write_json("tokenizer_config.json", tokenizer_config())
    write_json("config.json", CONFIG)
    write_json("generation_config.json", GENERATION_CONFIG)
    print(len(pairs), "rows, vocabulary", VOCAB, "by tokenizers", tokenizers.__version__)


if __name__ == "__main__":
    main()
