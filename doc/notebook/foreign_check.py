"""Loads what train-cli exports with the packages that it is for, and compares weights, logits and greedy tokens.

    python3 doc/notebook/foreign_check.py TRAIN_CLI FIXTURE LLAMA_SOURCE LLAMA_LIBRARIES

foreign_check.sh installs the packages, and runs this script for both fixtures. FIXTURE is
tests/golden/hf-qwen3/tiny-tied or tiny-untied. LLAMA_SOURCE is llama_cpp_python-0.3.36/vendor/llama.cpp, of which the
headers and the converter are used. LLAMA_LIBRARIES is package/bins/linux-x64, llama.cpp's libraries; a C compiler links a small
program to them. (PyPI's torch needs its CUDA packages even where no GPU is.) The fixtures have no tokenizer: the demo's is cut
to the size of their vocabulary.

Each line says what is compared and how far it is apart. A comparison that fails ends the script with exit code 1 at its end.
"""
import json
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile

import gguf
import numpy
import torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors import safe_open
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

program, fixture, llama_source, llama_libraries = (pathlib.Path(word).resolve() for word in sys.argv[1:5])
root = pathlib.Path(__file__).resolve().parents[2]
folder = pathlib.Path(tempfile.mkdtemp(prefix="foreign-check-"))
name = fixture.name
failures = []


def check(what, passed, figure):
    print(f"{'ok  ' if passed else 'FAIL'} {name}: {what}: {figure}", flush=True)
    if not passed:
        failures.append(what)


def run(*words, fails=False):
    done = subprocess.run([program, *map(str, words)], capture_output=True, text=True)
    assert fails or done.returncode == 0, (words, done.stderr)
    return done.stderr if fails else done.stdout


def tensors_of(path, framework="np"):
    found = {}
    for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
        with safe_open(file, framework) as opened:
            found.update({key: opened.get_tensor(key) for key in opened.keys()})
    return found


def raw(path):
    """Type, shape and bytes of every tensor of a safetensors file."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    at = 8 + length
    return {key: (entry["dtype"], entry["shape"], data[at + entry["data_offsets"][0] : at + entry["data_offsets"][1]])
            for key, entry in header.items()}


def apart(a, b):
    return float(numpy.abs(numpy.asarray(a, numpy.float32) - numpy.asarray(b, numpy.float32)).max())


# The model with a tokenizer: the demo's, cut to the size of the vocabulary.
model = folder / "model"
shutil.copytree(fixture, model)
size = json.loads((model / "config.json").read_text())["vocab_size"]
tokenizer = json.loads((root / "train-cli/assets/demo/tokenizer.json").read_text())
added = tokenizer["added_tokens"]
room = size - len(added)
vocab = {token: id for token, id in tokenizer["model"]["vocab"].items() if id < room}
pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in tokenizer["model"]["merges"]]
tokenizer["model"]["vocab"] = vocab
tokenizer["model"]["merges"] = [pair for pair in pairs if {*pair, "".join(pair)} <= set(vocab)]
for place, token in enumerate(added):
    token["id"] = room + place
(model / "tokenizer.json").write_text(json.dumps(tokenizer))
shutil.copy(root / "train-cli/assets/demo/tokenizer_config.json", model)
prompt = tensors_of(fixture / "expected.safetensors")["generate.prompt"][0].tolist()
INPUT = list(range(1, 17))
GREEDY = 48
# How far log probabilities of a model with 4-bit activations may be apart: its sums are rounded in another order. (Two sums with the
# boundary of a code between them would be further apart; these answers have none.)
W4A4_BOUND = 1e-5


def ours(path):
    """Logits of INPUT, and the greedy tokens after the prompt, by train-cli in f32."""
    rows = numpy.array([INPUT], numpy.int32)
    # The logits are not compared here: parity asks for values, and fails on these.
    expected = {"input_ids": rows, "labels": rows, "logits": numpy.zeros((1, len(INPUT), size), numpy.float32), "generate.prompt": numpy.array([prompt], numpy.int32),
                "generate.ids": numpy.array([prompt + [0] * GREEDY], numpy.int32)}
    save_file(expected, folder / "expected.safetensors")
    run("parity", "-m", path, "--expected", folder / "expected.safetensors", "--dump", folder / "ours.safetensors",
        "--device", "cpu", fails=True)
    dump = tensors_of(folder / "ours.safetensors")
    (folder / "ours.safetensors").unlink()
    return dump["logits"][0], dump["generate.ids"][0][len(prompt):].tolist()


def theirs(loaded):
    """The same by transformers."""
    with torch.no_grad():
        logits = loaded(torch.tensor([INPUT])).logits[0].float().numpy()
        ids = torch.tensor([prompt])
        for _ in range(GREEDY):
            ids = torch.cat([ids, loaded(ids).logits[:, -1:].argmax(-1)], 1)
    return logits, ids[0, len(prompt):].tolist()


def compare(what, a, b, bound, tokens=True):
    off, equal = apart(a[0], b[0]), sum(x == y for x, y in zip(a[1], b[1]))
    check(what, off <= bound and (equal == GREEDY or not tokens),
          f"logits {off:.2e} apart (bound {bound:g}, largest {numpy.abs(b[0]).max():.2f}), {equal} of {GREEDY} greedy tokens equal")


# compressed-tensors.
export = lambda library: run("export-hf", "-m", model, "-o", folder / library, "--format", library, "--device", "cpu")
convert = lambda source, to, dtype, *more: run("convert", source, to, "--dtype", dtype, *more)
export("compressed-tensors")
packed = tensors_of(folder / "compressed-tensors", "pt")
(folder / "f32").mkdir()
convert(folder / "compressed-tensors", folder / "f32/model.safetensors", "f32")
read = tensors_of(folder / "f32/model.safetensors")
scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
equal, count = 0, 0
for key in packed:
    if key.endswith("_packed"):
        base, codes = key.removesuffix("_packed"), packed[key]
        unpacked = unpack_fp4_from_uint8(codes, codes.shape[0], codes.shape[1] * 2, dtype=torch.float32)
        weight = dequantize(x_q=unpacked, scale=packed[base + "_scale"].float(), args=scheme.weights,
                            global_scale=packed[base + "_global_scale"], dtype=torch.float32)
        count += 1
        equal += numpy.array_equal(weight.numpy(), read[base])
check("compressed-tensors, weights by the package's decompressor", equal == count, f"{equal} of {count} matrices bit-equal in f32")
loaded = AutoModelForCausalLM.from_pretrained(folder / "compressed-tensors", dtype=torch.float32,
                                              quantization_config=CompressedTensorsConfig(dequantize=True))
(folder / "bf16").mkdir()
convert(folder / "compressed-tensors", folder / "bf16/model.safetensors", "bf16")
compare("compressed-tensors, transformers dequantize=True", theirs(loaded), ours(folder / "bf16"), 1e-4)

# nvidia-modelopt.
import modelopt.torch.quantization as mtq
from modelopt.torch.export import export_hf_checkpoint

export("modelopt")
dense = AutoModelForCausalLM.from_pretrained(fixture, dtype=torch.bfloat16)
dense = mtq.quantize(dense, mtq.W4A16_NVFP4_CFG, lambda m: m(torch.tensor([INPUT])))
export_hf_checkpoint(dense, export_dir=folder / "by-modelopt")
(folder / "as-bf16").mkdir()
convert(model, folder / "as-bf16/model.safetensors", "bf16")
run("export-hf", "-m", folder / "as-bf16", "-o", folder / "modelopt-of-bf16", "--format", "modelopt", "--device", "cpu")
a, b = raw(folder / "modelopt-of-bf16/model.safetensors"), raw(folder / "by-modelopt/model.safetensors")
check("ModelOpt, its own export", a == b, f"{sum(a.get(key) == value for key, value in b.items())} of {len(b)} tensors equal "
      f"in name, type, shape and bytes, {len(a.keys() - b.keys())} more")
config = lambda path: json.loads((path / "config.json").read_text())["quantization_config"] | {"producer": None}
check("ModelOpt, quantization_config", config(folder / "modelopt-of-bf16") == config(folder / "by-modelopt"), "equal but for the producer")

# 4-bit activations.
ROWS = "The quick brown fox jumps over the lazy dog. 1234567890\n"
PROMPTS = ["Who are you?", "The quick brown fox 1234", "jumps over the lazy dog 98765", "abc 5 xyz"]
(folder / "rows.txt").write_text(ROWS)
encode = lambda text: Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids


def export_w4a4(source, library, name):
    run("export-hf", "-m", source, "-o", folder / name, "--format", library, "--device", "cpu", "--activations", "nvfp4",
        "--calibration-data", folder / "rows.txt")


def our_logprobs(path, prompt):
    answer = json.loads(run("generate", "-m", path, "--raw", "-p", prompt, "--max-tokens", "1", "--temperature", "0", "--json",
                            "--logprobs", size, "--device", "cpu"))
    return {token["id"]: token["logprob"] for token in answer["logprobs"][0]["top"]}


# transformers runs compressed-tensors' own quantizer of activations with the scales of the folder, in f32 and with the weights
# that the package's decompressor gives in f32 (above). It would round them to bf16.
export_w4a4(model, "compressed-tensors", "w4a4")
(folder / "w4a4-f32").mkdir()
convert(folder / "w4a4", folder / "w4a4-f32/model.safetensors", "f32")
weights = tensors_of(folder / "w4a4-f32/model.safetensors")
loaded = AutoModelForCausalLM.from_pretrained(folder / "w4a4", dtype=torch.bfloat16)
with torch.no_grad():
    in_bf16 = loaded(torch.tensor([INPUT])).logits
    check("compressed-tensors W4A4, transformers in bf16", bool(torch.isfinite(in_bf16).all()), "loads and computes logits")
    torch.nn.Module.float(loaded)
    for key, parameter in loaded.named_parameters():
        if key in weights:
            parameter.data = torch.tensor(weights[key])
    plain = AutoModelForCausalLM.from_pretrained(fixture, dtype=torch.float32)
    for key, parameter in plain.named_parameters():
        parameter.data = torch.tensor(weights[key])
    off, moved = 0.0, 0.0
    for text in PROMPTS:
        a, b = ({n: float(x) for n, x in enumerate(m(torch.tensor([encode(text)])).logits[0, -1].log_softmax(-1))} for m in (loaded, plain))
        c = our_logprobs(folder / "w4a4", text)
        assert len(c) == size, len(c)
        off = max(off, *(abs(a[n] - c[n]) for n in c))
        moved = max(moved, *(abs(a[n] - b[n]) for n in c))
    # transformers reads each of our greedy answers once. Both must choose the same token wherever the lead of the first over the
    # second is more than both log probabilities can be off.
    positions, clear, same, far = 0, 0, 0, 0.0
    for text in PROMPTS:
        answer = json.loads(run("generate", "-m", folder / "w4a4", "--raw", "-p", text, "--max-tokens", GREEDY, "--temperature", "0",
                                "--json", "--logprobs", size, "--device", "cpu"))
        read_ids = encode(text)
        after = loaded(torch.tensor([read_ids + answer["ids"]])).logits[0, len(read_ids) - 1 : -1].log_softmax(-1)
        for row, id, found in zip(after, answer["ids"], answer["logprobs"], strict=True):
            assert len(found["top"]) == size, len(found["top"])
            far = max(far, *(abs(float(row[token["id"]]) - token["logprob"]) for token in found["top"]))
            (first, second), (chosen, _) = row.topk(2)
            positions += 1
            clear += bool(first - second > 2 * W4A4_BOUND)
            same += bool(first - second > 2 * W4A4_BOUND and chosen == id)
check("compressed-tensors W4A4, greedy answers by transformers with quantized activations",
      far <= W4A4_BOUND and same == clear and clear >= 0.9 * positions,
      f"log probabilities {far:.1e} apart (bound {W4A4_BOUND:g}); {clear} of {positions} above the margin, {same} equal")
check("compressed-tensors W4A4, transformers with quantized activations", off <= 1e-5,
      f"log probabilities of {len(PROMPTS)} prompts {off:.1e} apart (bound 1e-05); the quantization of activations moves them by {moved:.2f}")

# ModelOpt calibrates on the same row, in f32, and exports its model in bf16.
row = torch.tensor([encode(ROWS)])
dense = AutoModelForCausalLM.from_pretrained(folder / "as-bf16", dtype=torch.float32)
dense = mtq.quantize(dense, mtq.NVFP4_DEFAULT_CFG, lambda m: m(row))
for parameter in dense.parameters():
    parameter.data = parameter.data.bfloat16()
dense.config.dtype = torch.bfloat16
export_hf_checkpoint(dense, export_dir=folder / "w4a4-by-modelopt")
export_w4a4(folder / "as-bf16", "modelopt", "w4a4-modelopt")
a, b = raw(folder / "w4a4-modelopt/model.safetensors"), raw(folder / "w4a4-by-modelopt/model.safetensors")
value = lambda entry: struct.unpack("<f", entry[2])[0]
inputs = [key for key in b if key.endswith(".input_scale")]
far = max(abs(value(a[key]) / value(b[key]) - 1) for key in inputs)
equal = sum(a.get(key) == entry for key, entry in b.items() if key not in inputs)
check("ModelOpt W4A4, its own export", a.keys() == b.keys() and equal == len(b) - len(inputs) and far <= 1e-5,
      f"{equal} of {len(b) - len(inputs)} tensors equal in name, type, shape and bytes, {len(inputs)} scales of activations at most "
      f"{far:.1e} of their size apart (bound 1e-05), {len(a.keys() - b.keys())} tensors more")
check("ModelOpt W4A4, quantization_config", config(folder / "w4a4-modelopt") == config(folder / "w4a4-by-modelopt"), "equal but for the producer")

# llama.cpp's converter reads both folders.
CONVERTER = '''
import pathlib, runpy, sys
source, folder, out = sys.argv[1:4]
sys.path[:0] = [source, source + "/gguf-py"]
import json
from conversion import get_model_class
def set_vocab(self):
    size = self.hparams["vocab_size"]
    self.gguf_writer.add_tokenizer_model("gpt2")
    self.gguf_writer.add_tokenizer_pre("qwen2")
    self.gguf_writer.add_token_list([f"token{i}" for i in range(size)])
    self.gguf_writer.add_token_types([1] * size)
    self.gguf_writer.add_token_merges(["a b"])
get_model_class("Qwen3ForCausalLM").set_vocab = set_vocab
sys.argv = ["convert_hf_to_gguf.py", folder, "--outtype", "f32", "--outfile", out]
runpy.run_path(source + "/convert_hf_to_gguf.py", run_name="__main__")
'''
PARTS = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
         "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
         "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
         "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def decoded(path):
    """Every weight of a GGUF file by its Hugging Face name, by the gguf package; with the kinds of numbers."""
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    found, kinds = {}, {}
    for key, tensor in tensors.items():
        if key.endswith("scale"):
            continue
        kinds[tensor.tensor_type.name] = kinds.get(tensor.tensor_type.name, 0) + 1
        words = key.split(".")
        base = WHOLE[words[0]] if words[0] in WHOLE else f"model.layers.{words[1]}.{PARTS[words[2]]}"
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape([int(n) for n in reversed(tensor.shape)])
        scale = tensors.get(key.replace(".weight", ".scale"))
        found[base + ".weight"] = values if scale is None else values * scale.data[0]
    return found, kinds


def same_weights(what, path, expected, close=0.0):
    found, kinds = decoded(path)
    equal = sum(numpy.array_equal(values, expected[key]) for key, values in found.items())
    far = max(apart(values, expected[key]) / numpy.abs(expected[key]).max() for key, values in found.items())
    check(what, found.keys() == expected.keys() and (equal == len(found) or far <= close),
          f"{equal} of {len(found)} tensors bit-equal {kinds}, at most {far:.1e} of the largest weight apart")


suits = all(tensor.shape[1] % 64 == 0 for key, tensor in read.items() if "_proj" in key)
for library in ["compressed-tensors", "modelopt"] if suits else []:
    out = folder / f"{library}.gguf"
    done = subprocess.run([sys.executable, "-c", CONVERTER, llama_source, folder / library, out], capture_output=True, text=True)
    if done.returncode:
        check(f"llama.cpp's converter reads the {library} folder", False, done.stderr[-400:])
        continue
    (folder / f"{library}-f32").mkdir()
    convert(folder / library, folder / f"{library}-f32/model.safetensors", "f32")
    # code * scale * (1 / G) there, code * (scale / G) here: the last bits differ for compressed-tensors.
    same_weights(f"llama.cpp's converter reads the {library} folder", out, tensors_of(folder / f"{library}-f32/model.safetensors"), 3e-7)
for library in ["w4a4", "w4a4-modelopt"] if suits else []:
    out, mine = folder / f"{library}-theirs.gguf", folder / f"{library}.gguf"
    subprocess.run([sys.executable, "-c", CONVERTER, llama_source, folder / library, out], capture_output=True, check=True)
    convert(folder / library, mine, "nvfp4")
    (a, of_a), (b, of_b) = (({t.name: t.data for t in r.tensors}, r.fields) for r in (gguf.GGUFReader(mine), gguf.GGUFReader(out)))
    scales = [key for key in b if key.endswith("scale")]
    equal = sum(numpy.array_equal(a.get(key), b[key]) for key in scales)
    forbids = "general.tensor_extra.prec_a4"
    check(f"GGUF W4A4, llama.cpp's converter on the {library} folder",
          a.keys() == b.keys() and equal == len(scales) and (forbids in of_a) == (forbids in of_b) == False,
          f"the same {len(b)} tensors, {equal} of {len(scales)} scales equal, neither forbids 4-bit activations")
if not suits:
    said = run("convert", model, folder / "no.gguf", "--dtype", "nvfp4", fails=True)
    check("NVFP4 in GGUF is refused by tensor and K", "down_proj" in said or "K = " in said, said.strip().splitlines()[-1])

# GGUF: every weight by the gguf package, logits and tokens by llama.cpp.
LOGITS = r'''
#include "llama.h"
#include "ggml-backend.h"
#include <stdio.h>
#include <stdlib.h>
static void quiet(enum ggml_log_level level, const char *text, void *data) { (void)level; (void)text; (void)data; }
static const int width = 512;
static void decode(struct llama_context *c, const int *ids, int count, int at) {
    struct llama_batch b = llama_batch_init(width, 0, 1);
    b.n_tokens = count;
    for (int i = 0; i < count; i++) {
        b.token[i] = ids[i]; b.pos[i] = at + i; b.n_seq_id[i] = 1; b.seq_id[i][0] = 0; b.logits[i] = 1;
    }
    if (llama_decode(c, b)) { fprintf(stderr, "llama_decode failed\n"); exit(1); }
    llama_batch_free(b);
}
int main(int count, char **words) { /* LIBRARIES MODEL OUT GREEDY INPUTS INPUT... PROMPT... */
    llama_log_set(quiet, NULL);
    ggml_backend_load_all_from_path(words[1]);
    struct llama_model *m = llama_model_load_from_file(words[2], llama_model_default_params());
    if (!m) { fprintf(stderr, "the model does not load\n"); return 1; }
    struct llama_context_params p = llama_context_default_params();
    p.n_ctx = p.n_batch = p.n_ubatch = width;
    p.type_k = p.type_v = GGML_TYPE_F32;
    p.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    int greedy = atoi(words[4]), inputs = atoi(words[5]), vocab = llama_vocab_n_tokens(llama_model_get_vocab(m));
    int ids[512], total = count - 6;
    for (int i = 0; i < total; i++) ids[i] = atoi(words[6 + i]);
    FILE *out = fopen(words[3], "wb");
    struct llama_context *c = llama_init_from_model(m, p);
    decode(c, ids, inputs, 0);
    for (int i = 0; i < inputs; i++) fwrite(llama_get_logits_ith(c, i), 4, vocab, out);
    llama_free(c);
    c = llama_init_from_model(m, p);
    int *prompt = ids + inputs, length = total - inputs, next = 0;
    decode(c, prompt, length, 0);
    for (int n = 0, last = length - 1; n < greedy; n++, last = 0) {
        const float *l = llama_get_logits_ith(c, last);
        next = 0;
        for (int v = 1; v < vocab; v++) if (l[v] > l[next]) next = v;
        fwrite(&next, 4, 1, out);
        decode(c, &next, 1, length + n);
    }
    fclose(out);
    return 0;
}
'''
(folder / "logits.c").write_text(LOGITS)
subprocess.run(["gcc", "-O1", "-I", llama_source / "include", "-I", llama_source / "ggml/include", folder / "logits.c", "-o",
                folder / "logits", "-L", llama_libraries, "-l:libllama.v0.5.0.so", "-l:libggml.v0.5.0.so", "-l:libggml-base.so",
                "-Wl,--allow-shlib-undefined", f"-Wl,-rpath,{llama_libraries}"], check=True)


def llama(path):
    out = folder / "llama.bin"
    words = [folder / "logits", llama_libraries, path, out, GREEDY, len(INPUT), *INPUT, *prompt]
    subprocess.run(list(map(str, words)), check=True)
    data = numpy.fromfile(out, numpy.float32)
    return data[:-GREEDY].reshape(len(INPUT), size), data[-GREEDY:].view(numpy.int32).tolist()


convert(model, folder / "f32.gguf", "f32")
same_weights("GGUF F32, weights by the gguf package", folder / "f32.gguf", tensors_of(model / "model.safetensors"))
compare("GGUF F32, llama.cpp", llama(folder / "f32.gguf"), ours(model), 1e-5)
if suits:
    (folder / "nvfp4").mkdir()
    convert(model, folder / "nvfp4/model.dat", "nvfp4")
    (folder / "twin").mkdir()
    convert(folder / "nvfp4/model.dat", folder / "twin/model.safetensors", "f32")
    convert(folder / "nvfp4/model.dat", folder / "nvfp4.gguf", "nvfp4")
    convert(folder / "nvfp4/model.dat", folder / "twin.gguf", "f32")
    same_weights("GGUF NVFP4, weights by the gguf package", folder / "nvfp4.gguf", tensors_of(folder / "twin/model.safetensors"))
    mine = ours(folder / "nvfp4")
    compare("GGUF F32 twin of the NVFP4 file, llama.cpp", llama(folder / "twin.gguf"), mine, 1e-5)
    # llama.cpp multiplies NVFP4 weights with activations of 8 bits on a CPU.
    compare("GGUF NVFP4, llama.cpp with its 8-bit activations", llama(folder / "nvfp4.gguf"), mine, 0.15, tokens=False)

    # It reads a file with scales of activations, which its CPU kernels do not use.
    (folder / "w4a4-plain").mkdir()
    convert(folder / "w4a4-f32/model.safetensors", folder / "w4a4-plain/twin.gguf", "f32", "--tokenizer", model)
    compare("GGUF W4A4 in llama.cpp, against its F32 twin", llama(folder / "w4a4.gguf"), llama(folder / "w4a4-plain/twin.gguf"),
            0.15, tokens=False)

shutil.rmtree(folder)
print(f"{len(failures)} comparisons failed", *failures, sep="\n  ")
sys.exit(bool(failures))
