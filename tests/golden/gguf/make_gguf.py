"""Makes a small GGUF file with the package gguf of llama.cpp, and what that package reads from it.

    pip install gguf
    python make_gguf.py [FOLDER]

`foreign.gguf` is an untied Qwen3 of random weights with the demo's tokenizer: the embedding in BF16, the head in F16, norms in
F32, linear layers in Q8_0, F16, BF16, F32 and NVFP4 (with a scale of the whole matrix). `foreign.json` holds the SHA-256 of
the f32 values of each tensor, by the names of Hugging Face, as the package dequantizes them, and the sizes of the model.
Without FOLDER the files are written beside this script.
"""

import hashlib
import json
import pathlib
import sys

import gguf
import numpy

here = pathlib.Path(__file__).parent
folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else here
demo = here / "../../../train-cli/assets/demo"
Q = gguf.GGMLQuantizationType
random = numpy.random.default_rng(20261128)
tokenizer = json.loads((demo / "tokenizer.json").read_text())
template = json.loads((demo / "tokenizer_config.json").read_text())["chat_template"]
HIDDEN, HEADS, KV_HEADS, HEAD, WIDE, BLOCKS = 64, 2, 1, 32, 128, 2

kept = {token["id"]: token for token in tokenizer["added_tokens"]}
ids = {number: text for text, number in tokenizer["model"]["vocab"].items()}
tokens = [kept[i]["content"] if i in kept else ids[i] for i in range(max([*ids, *kept]) + 1)]
kinds = [
    (gguf.TokenType.CONTROL if kept[i]["special"] else gguf.TokenType.USER_DEFINED) if i in kept else gguf.TokenType.NORMAL
    for i in range(len(tokens))
]
merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]

writer = gguf.GGUFWriter(folder / "foreign.gguf", "qwen3")
writer.add_name("a small stranger")
writer.add_block_count(BLOCKS)
writer.add_context_length(512)
writer.add_embedding_length(HIDDEN)
writer.add_feed_forward_length(WIDE)
writer.add_head_count(HEADS)
writer.add_head_count_kv(KV_HEADS)
writer.add_key_length(HEAD)
writer.add_value_length(HEAD)
writer.add_rope_freq_base(1e6)
writer.add_layer_norm_rms_eps(1e-6)
writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre("qwen2")
writer.add_token_list(tokens)
writer.add_token_types(kinds)
writer.add_token_merges(merges)
writer.add_eos_token_id(tokens.index("<|im_end|>"))
writer.add_bos_token_id(tokens.index("<|endoftext|>"))
writer.add_add_bos_token(False)
writer.add_chat_template(template)

digests = {}


def add(name, theirs, shape, kind):
    """Adds a tensor of random values, and remembers what the package reads from its bytes."""
    values = random.standard_normal(shape).astype(numpy.float32)
    values = 1 + values / 10 if len(shape) == 1 else values / numpy.sqrt(numpy.float32(shape[1]))
    if kind == Q.NVFP4:
        # The package has no quantizer for NVFP4. Every code and every scale but NaN may occur.
        rows, blocks = shape[0], shape[1] // 64
        data = random.integers(0, 256, (rows, blocks, 36), dtype=numpy.uint8)
        data[:, :, :4] = random.integers(0, 127, (rows, blocks, 4), dtype=numpy.uint8)
        data = data.reshape(rows, blocks * 36)
        scale = numpy.float32(0.0007)
        writer.add_tensor(theirs.replace(".weight", ".scale"), numpy.array([scale], numpy.float32))
        read = gguf.quants.dequantize(data, kind).astype(numpy.float32) * scale
    elif kind == Q.F32:
        data, read = values, values
    else:
        data = gguf.quants.quantize(values, kind)
        read = gguf.quants.dequantize(data, kind).astype(numpy.float32)
    if kind == Q.F32:
        writer.add_tensor(theirs, data)
    else:
        writer.add_tensor(theirs, data, raw_dtype=kind)
    assert read.shape == shape, (name, read.shape)
    # The package reads a code of minus zero as zero.
    digests[name] = hashlib.sha256(numpy.ascontiguousarray(read + 0, "<f4").tobytes()).hexdigest()


add("model.embed_tokens.weight", "token_embd.weight", (len(tokens), HIDDEN), Q.BF16)
add("lm_head.weight", "output.weight", (len(tokens), HIDDEN), Q.F16)
add("model.norm.weight", "output_norm.weight", (HIDDEN,), Q.F32)
for block in range(BLOCKS):
    packed = Q.NVFP4 if block else Q.Q8_0
    for ours, theirs, shape, kind in [
        ("input_layernorm", "attn_norm", (HIDDEN,), Q.F32),
        ("post_attention_layernorm", "ffn_norm", (HIDDEN,), Q.F32),
        ("self_attn.q_norm", "attn_q_norm", (HEAD,), Q.F32),
        ("self_attn.k_norm", "attn_k_norm", (HEAD,), Q.F32),
        ("self_attn.q_proj", "attn_q", (HEADS * HEAD, HIDDEN), packed),
        ("self_attn.k_proj", "attn_k", (KV_HEADS * HEAD, HIDDEN), Q.NVFP4 if block else Q.F16),
        ("self_attn.v_proj", "attn_v", (KV_HEADS * HEAD, HIDDEN), Q.NVFP4 if block else Q.BF16),
        ("self_attn.o_proj", "attn_output", (HIDDEN, HEADS * HEAD), packed),
        ("mlp.gate_proj", "ffn_gate", (WIDE, HIDDEN), packed),
        ("mlp.up_proj", "ffn_up", (WIDE, HIDDEN), Q.NVFP4 if block else Q.F32),
        ("mlp.down_proj", "ffn_down", (HIDDEN, WIDE), packed),
    ]:
        add(f"model.layers.{block}.{ours}.weight", f"blk.{block}.{theirs}.weight", shape, kind)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
config = {
    "hidden_size": HIDDEN, "intermediate_size": WIDE, "num_hidden_layers": BLOCKS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "vocab_size": len(tokens), "max_position_embeddings": 512,
}
(folder / "foreign.json").write_text(json.dumps({"config": config, "tensors": digests}, indent=1) + "\n")
