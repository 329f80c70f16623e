"""Compares GGUF files that train-cli writes with ggml's own decoder and quantizer, and asks llama.cpp.

    pip install gguf safetensors xllamacpp
    python3 doc/notebook/gguf_check.py TRAIN_CLI MODEL [PROMPT [ENCODINGS.json]]

MODEL is what `convert` takes; with NVFP4 weights, the nvfp4 file must keep them. Every weight of each file is compared. Then
llama.cpp (by xllamacpp) and train-cli answer PROMPT with their most likely tokens. With ENCODINGS.json
(tests/golden/tokenizer/encodings.json, for a MODEL with the tokenizer of Qwen3) llama.cpp splits its texts into tokens.
The exit code is 1 if anything differs.
"""
import json
import pathlib
import subprocess
import sys
import tempfile
import urllib.request

import gguf
import numpy
from safetensors.numpy import load_file

program, model = sys.argv[1:3]
prompt = sys.argv[3] if len(sys.argv) > 3 else "Who are you?"
folder = pathlib.Path(tempfile.mkdtemp())
Q = gguf.GGMLQuantizationType
different_things = []


def differs(what):
    print("DIFFERENT", what)
    different_things.append(what)


def run(*words):
    done = subprocess.run([program, *map(str, words)], capture_output=True, text=True)
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout


def hugging_face(name):
    parts = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
             "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
             "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
             "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    whole = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    words = name.split(".")
    base = whole[words[0]] if words[0] in whole else f"model.layers.{words[1]}.{parts[words[2]]}"
    return base + ".weight"


run("convert", model, folder / "x.safetensors", "--to", "safetensors", "--dtype", "f32")
dense = load_file(folder / "x.safetensors")
for dtype in ["f32", "f16", "bf16", "q8-0", "nvfp4"]:
    path = folder / f"{dtype}.gguf"
    run("convert", model, path, "--to", "gguf", "--dtype", dtype)
    reader = gguf.GGUFReader(path)
    tensors = {t.name: t for t in reader.tensors}
    kinds = {}
    for name, tensor in tensors.items():
        if name.endswith(".scale"):
            continue
        kinds[tensor.tensor_type.name] = kinds.get(tensor.tensor_type.name, 0) + 1
        expected = dense[hugging_face(name)]
        raw = tensor.data
        if tensor.tensor_type == Q.Q8_0:
            same = numpy.array_equal(raw.reshape(-1), gguf.quants.quantize(expected, Q.Q8_0).reshape(-1))
        else:
            found = gguf.quants.dequantize(raw, tensor.tensor_type).reshape(expected.shape)
            if tensor.tensor_type == Q.NVFP4:
                found = found * tensors[name.replace(".weight", ".scale")].data[0]
            if tensor.tensor_type == Q.F16:
                expected = expected.astype(numpy.float16).astype(numpy.float32)
            if tensor.tensor_type == Q.BF16:
                expected = gguf.quants.dequantize(gguf.quants.quantize(expected, Q.BF16), Q.BF16).reshape(expected.shape)
            same = numpy.array_equal(found, expected)
        if not same and not (tensor.tensor_type == Q.NVFP4 and "nvfp4" not in run("inspect", model).lower()):
            differs(f"{dtype} {name} {tensor.tensor_type.name}")
    print(f"{dtype}: {kinds}, {path.stat().st_size} bytes, {len(reader.fields)} keys")

import xllamacpp

answer = run("generate", "-m", model, "-p", prompt, "--temperature", "0", "--max-tokens", "48", "--device", "cpu").strip()
print("train-cli:", repr(answer))
for dtype in ["f32", "bf16", "f16", "q8-0", "nvfp4"]:
    params = xllamacpp.CommonParams()
    params.model.path = str(folder / f"{dtype}.gguf")
    params.n_ctx, params.n_parallel, params.use_jinja, params.warmup = 512, 1, True, False
    server = xllamacpp.Server(params)
    reply = server.handle_chat_completions({"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 48})
    text = reply["choices"][0]["message"]["content"].strip()
    if text != answer:
        differs(f"answer of llama.cpp with {dtype}")
    print(f"llama.cpp {dtype}: {text!r}")
    del server

if len(sys.argv) > 4:
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup, params.port = str(folder / "bf16.gguf"), 256, False, 8199
    server = xllamacpp.Server(params)
    texts = json.load(open(sys.argv[4]))["encodings"]
    for text in texts:
        question = json.dumps({"content": text["text"], "add_special": False, "parse_special": True}).encode()
        request = urllib.request.Request(server.listening_address + "/tokenize", question, {"Content-Type": "application/json"})
        text["found"] = json.load(urllib.request.urlopen(request))["tokens"]
    different = [text["text"] for text in texts if text["found"] != text["ids"]]
    print(f"{len(texts)} texts, {len(different)} of them other tokens in llama.cpp")
    for text in different:
        differs(f"tokens of {text!r}")

sys.exit(1 if different_things else 0)
