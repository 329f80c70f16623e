"""Writes foreign.json: what compressed-tensors and nvidia-modelopt make of the tiny models of ../hf-qwen3, in f32, bf16 and f16.

Each tensor of their folders by name: type, shape, and the SHA-256 of its bytes. See ../README.md for the versions.
Writes activations.json: how they spell the scales of activations, and how compressed-tensors quantizes with a given scale.
Writes w4a4.json: what they make of the same models in bf16 for 4-bit activations, calibrated on the rows of tokens ROWS.

    pip install torch transformers compressed-tensors nvidia-modelopt safetensors
    python3 make_foreign.py
"""

import hashlib
import json
import struct
import tempfile
from pathlib import Path

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationStatus,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, compute_dynamic_scales_and_zp, generate_gparam
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
ROWS = [list(range(1, 17)), [250, 7, 7, 99, 3, 180, 42, 0, 211, 64, 5], [13]]


def tensors_of(folder):
    """Name: [type, shape, SHA-256] of every tensor in a folder's safetensors."""
    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            payload = data[8 + length + start : 8 + length + end]
            found[name] = [entry["dtype"], entry["shape"], hashlib.sha256(payload).hexdigest()]
    return found


def load(source, dtype):
    return AutoModelForCausalLM.from_pretrained(source, dtype=dtype)


def groups(model):
    """The linear layers, with those that are multiplied together in one list."""
    for layer in model.model.layers:
        a, m = layer.self_attn, layer.mlp
        yield from ([a.q_proj, a.k_proj, a.v_proj], [a.o_proj], [m.gate_proj, m.up_proj], [m.down_proj])


def in_bf16(source):
    """The model with weights that are rounded to bf16 and stored in f32, so that its forward computes in f32."""
    model = load(source, torch.float32)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


def run_rows(model):
    for row in ROWS:
        model(torch.tensor([row]))


def input_maxima(source):
    """The largest magnitude of the input of each linear layer over ROWS, by the name of the layer."""
    model, found = in_bf16(source), {}

    def watch(name):
        def hook(_, inputs):
            amax = inputs[0].detach().abs().max()
            found[name] = torch.maximum(found[name], amax) if name in found else amax

        return hook

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(watch(name))
    with torch.no_grad():
        run_rows(model)
    return found


def compressed_tensors(source, dtype, out, preset="NVFP4A16", inputs=None):
    model = load(source, dtype)
    names = {module: name for name, module in model.named_modules()}
    scheme = preset_name_to_scheme(preset, ["Linear"])
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=["lm_head"],
        format="nvfp4-pack-quantized",
        quantization_status=QuantizationStatus.FROZEN,
    )
    apply_quantization_config(model, config)
    for group in groups(model):
        amax = max(x.weight.abs().max() for x in group)
        for x in group:
            scale = generate_gparam(-amax, amax)
            blocks = x.weight.data.unflatten(1, (-1, 16))
            scales, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=scale)
            x.weight_global_scale.data = scale
            x.weight_scale.data = scales.to(x.weight_scale.dtype)
            if scheme.input_activations is not None:
                seen = torch.tensor(10.5) if inputs is None else inputs[names[x]]
                x.input_global_scale.data = generate_gparam(-seen, seen)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(out)


def modelopt(source, dtype, out, config="W4A16_NVFP4_CFG"):
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    model = load(source, dtype)
    ids = torch.arange(1, 17).reshape(1, -1)
    model = mtq.quantize(model, getattr(mtq, config), lambda m: m(ids))
    export_hf_checkpoint(model, export_dir=out)


def modelopt_w4a4(source, out):
    """ModelOpt calibrates in f32, and exports its model with the weights in bf16."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    model = mtq.quantize(in_bf16(source), mtq.NVFP4_DEFAULT_CFG, run_rows)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    model.config.dtype = torch.bfloat16
    export_hf_checkpoint(model, export_dir=out)


def w4a4():
    """Both libraries' folders of both models: rows, largest magnitudes of inputs, tensors, and the configs."""
    result = {"rows": ROWS}
    for name in ["tiny-tied", "tiny-untied"]:
        source = HERE.parent / "hf-qwen3" / name
        inputs = input_maxima(source)
        text = {key: amax.numpy().astype("<f4").tobytes().hex() for key, amax in inputs.items()}
        result[name] = {"maxima": text}
        writers = {
            "compressed-tensors": lambda out: compressed_tensors(source, torch.bfloat16, out, "NVFP4", inputs),
            "modelopt": lambda out: modelopt_w4a4(source, out),
        }
        for library, write in writers.items():
            with tempfile.TemporaryDirectory() as out:
                write(out)
                read = lambda file: json.loads((Path(out) / file).read_text())
                found = {"tensors": tensors_of(out), "quantization_config": read("config.json")["quantization_config"]}
                if library == "modelopt":
                    found["hf_quant_config"] = read("hf_quant_config.json")
                result[name][library] = found
    return result


def activations():
    """The keys of input scales, with type and shape, and values that compressed-tensors quantized and read back."""
    keys = {}
    writers = {
        "compressed-tensors": lambda out: compressed_tensors(source, torch.bfloat16, out, "NVFP4"),
        "modelopt": lambda out: modelopt(source, torch.bfloat16, out, "NVFP4_DEFAULT_CFG"),
    }
    source = HERE.parent / "hf-qwen3" / "tiny-tied"
    for library, write in writers.items():
        with tempfile.TemporaryDirectory() as out:
            write(out)
            found = {name: entry[:2] for name, entry in tensors_of(out).items() if ".input_scale" in name or ".input_global" in name}
            keys[library] = found
    torch.manual_seed(5)
    x = torch.randn(8, 48) * torch.logspace(-4, 1, 8).unsqueeze(1)
    x[3, 16:32] = 0
    text = lambda values: values.numpy().astype("<f4").tobytes().hex()
    args = preset_name_to_scheme("NVFP4", ["Linear"]).input_activations
    rounded = {}
    for reciprocal in [256.0, 700.0, 31.5]:
        scale = torch.tensor([reciprocal])
        scales, zeros = compute_dynamic_scales_and_zp(x, args, None, global_scale=scale)
        rounded[str(reciprocal)] = text(fake_quantize(x, scales, zeros, args, scale))
    return {"keys": keys, "columns": 48, "values": text(x), "rounded": rounded}


def main():
    (HERE / "activations.json").write_text(json.dumps(activations(), indent=0, sort_keys=True) + "\n")
    (HERE / "w4a4.json").write_text(json.dumps(w4a4(), indent=0, sort_keys=True) + "\n")
    result = {}
    for name in ["tiny-tied", "tiny-untied"]:
        for kind, write in [("compressed-tensors", compressed_tensors), ("modelopt", modelopt)]:
            for dtype in [torch.float32, torch.bfloat16, torch.float16]:
                if kind == "modelopt" and dtype == torch.float32:
                    continue  # Its export writes 16-bit models.
                with tempfile.TemporaryDirectory() as out:
                    write(HERE.parent / "hf-qwen3" / name, dtype, out)
                    config = json.loads((Path(out) / "config.json").read_text())
                    key = f"{name} {kind} {str(dtype).removeprefix('torch.')}"
                    result[key] = {"tensors": tensors_of(out), "quantization_config": config["quantization_config"]}
    text = json.dumps(result, indent=0, sort_keys=True)
    (HERE / "foreign.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
