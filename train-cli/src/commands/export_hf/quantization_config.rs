//! What a folder of `export-hf` says about its quantization, as compressed-tensors and nvidia-modelopt write it. Activations are
//! NVFP4 if the tensors give scales for them.

use model_qwen3::{
    foreign::Library,
    names,
    tensors::{Stored, Tensors},
};
use serde_json::{Value, json};

/// The `quantization_config` that loaders of the library's format read.
pub(super) fn of_config(tensors: &dyn Tensors, library: Library) -> Value {
    let quantized = tensors.has_input_scales();
    let nvfp4 = json!({"dynamic": false, "num_bits": 4, "type": "float", "group_size": 16});
    match library {
        Library::CompressedTensors => {
            let mut weights = nvfp4;
            weights["strategy"] = "tensor_group".into();
            weights["symmetric"] = true.into();
            weights["scale_dtype"] = "torch.float8_e4m3fn".into();
            let mut inputs = Value::Null;
            if quantized {
                inputs = weights.clone();
                // The tensor scale is stored, and those of 16 values are computed from them.
                inputs["dynamic"] = "local".into();
                inputs["observer"] = "static_minmax".into();
            }
            let group = json!({
                "format": "nvfp4-pack-quantized", "targets": ["Linear"], "weights": weights,
                "input_activations": inputs, "output_activations": null,
            });
            json!({
                "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
                "quantization_status": "compressed", "config_groups": {"group_0": group}, "ignore": not_quantized(tensors),
                "kv_cache_scheme": null, "global_compression_ratio": null, "moe_sparsity_config": null,
                "sparsity_config": {}, "transform_config": {}, "version": "0.20.0",
            })
        }
        Library::ModelOpt => {
            let mut group = json!({"weights": nvfp4.clone(), "targets": ["Linear"]});
            if quantized {
                group["input_activations"] = nvfp4;
            }
            json!({
                "quant_method": "modelopt", "quant_algo": algorithm(tensors), "producer": producer(),
                "config_groups": {"group_0": group}, "ignore": excluded(tensors),
            })
        }
    }
}

/// ModelOpt's name for NVFP4 weights with NVFP4 activations, or with activations that are not quantized.
fn algorithm(tensors: &dyn Tensors) -> &'static str {
    if tensors.has_input_scales() { "NVFP4" } else { "W4A16_NVFP4" }
}

/// ModelOpt's own file beside config.json.
pub(super) fn of_modelopt(tensors: &dyn Tensors) -> Value {
    json!({
        "producer": producer(),
        "quantization": {
            "quant_algo": algorithm(tensors), "kv_cache_quant_algo": null, "group_size": 16,
            "exclude_modules": excluded(tensors),
        },
    })
}

/// The modules with weights that stay in bf16, as ModelOpt lists them: the embedding is one of them.
fn excluded(tensors: &dyn Tensors) -> Vec<String> {
    let mut modules = not_quantized(tensors);
    modules.insert(1, names::layer(names::EMBEDDING).to_owned());
    modules
}

fn producer() -> Value {
    json!({"name": "train-cli", "version": env!("CARGO_PKG_VERSION")})
}

/// The modules of linear layers that stay in bf16. A head that is the embedding is named too.
fn not_quantized(tensors: &dyn Tensors) -> Vec<String> {
    let module = |name: &str| names::layer(name).to_owned();
    let dense = |name: &String| matches!(tensors.stored(name), Some(Stored::Dense { .. }));
    let layers = tensors.names().into_iter().filter(|name| names::is_projection(name) && dense(name));
    std::iter::once(module(names::HEAD)).chain(layers.map(|name| module(&name))).collect()
}
