//! A model whose next token is written down: its logits depend on the last token alone and are what a table says. So a
//! test can know every answer of the real program, whatever the sampler does with the logits.

use crate::support::files::demo_file;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;
use std::{collections::BTreeMap, path::Path};

/// Tokens of the demo's tokenizer.
pub(crate) const VOCABULARY: usize = 512;
/// The token `<|im_end|>`, which ends an answer.
pub(crate) const STOP: u32 = 511;

/// Writes a model folder. After token `t` the logits are the pairs of `next(t)`; every other token has the logit -9.
///
/// The embedding of a token is its unit vector, the only block adds zero, and row `v` of the head holds the logits of
/// token `v` after each other token, divided by what the final norm multiplies with.
pub(crate) fn scripted_model(folder: &Path, next: impl Fn(u32) -> Vec<(u32, f32)>) {
    scripted_model_with(folder, &[], next);
}

/// Writes a model folder whose tokenizer has these texts as tokens behind those of the demo.
pub(crate) fn scripted_model_with(folder: &Path, tokens: &[&str], next: impl Fn(u32) -> Vec<(u32, f32)>) {
    std::fs::create_dir_all(folder).unwrap();
    let read = |name: &str| std::fs::read(demo_file(name)).unwrap();
    std::fs::write(folder.join("tokenizer_config.json"), read("tokenizer_config.json")).unwrap();
    let mut tokenizer: Value = serde_json::from_slice(&read("tokenizer.json")).unwrap();
    for (i, token) in tokens.iter().enumerate() {
        tokenizer["added_tokens"].as_array_mut().unwrap().push(serde_json::json!({
            "id": VOCABULARY + i, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": false,
        }));
    }
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    // NVFP4 blocks need a multiple of 16. The last ids have no text.
    let known = VOCABULARY + tokens.len();
    let n = known.next_multiple_of(16);
    let config = serde_json::json!({
        "model_type": "qwen3", "vocab_size": n, "hidden_size": n, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": false,
        "rope_theta": 10000, "rms_norm_eps": 1e-6, "eos_token_id": STOP, "max_position_embeddings": 2048,
    });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();

    let mut embedding = vec![0.0f32; n * n];
    (0..n).for_each(|t| embedding[t * n + t] = 1.0);
    let mut head = vec![0.0f32; n * n];
    let norm = (1.0 / n as f64 + 1e-6).sqrt();
    for token in 0..n {
        let mut logits = vec![-9.0f32; n];
        let next = if token < known { next(token as u32) } else { vec![] };
        next.into_iter().for_each(|(id, logit)| logits[id as usize] = logit);
        (0..n).for_each(|id| head[id * n + token] = (f64::from(logits[id]) * norm) as f32);
    }
    let mut tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)> = BTreeMap::new();
    let mut put = |name: &str, shape: &[usize], values: Vec<f32>| {
        tensors.insert(name.to_owned(), (shape.to_vec(), values));
    };
    put("model.embed_tokens.weight", &[n, n], embedding);
    put("lm_head.weight", &[n, n], head);
    put("model.norm.weight", &[n], vec![1.0; n]);
    for (part, rows, cols) in [
        ("self_attn.q_proj", 16, n),
        ("self_attn.k_proj", 16, n),
        ("self_attn.v_proj", 16, n),
        ("self_attn.o_proj", n, 16),
        ("mlp.gate_proj", 16, n),
        ("mlp.up_proj", 16, n),
        ("mlp.down_proj", n, 16),
    ] {
        put(&format!("model.layers.0.{part}.weight"), &[rows, cols], vec![0.0; rows * cols]);
    }
    for (part, len) in
        [("self_attn.q_norm", 16), ("self_attn.k_norm", 16), ("input_layernorm", n), ("post_attention_layernorm", n)]
    {
        put(&format!("model.layers.0.{part}.weight"), &[len], vec![1.0; len]);
    }
    write_tensors(&folder.join("model.safetensors"), &tensors);
}

/// Writes f32 tensors as a safetensors file.
pub(crate) fn write_tensors(path: &Path, tensors: &BTreeMap<String, (Vec<usize>, Vec<f32>)>) {
    let bytes: Vec<(&String, &Vec<usize>, Vec<u8>)> = tensors
        .iter()
        .map(|(name, (shape, values))| (name, shape, values.iter().flat_map(|v| v.to_le_bytes()).collect()))
        .collect();
    let views =
        bytes.iter().map(|(name, shape, bytes)| (*name, TensorView::new(Dtype::F32, (*shape).clone(), bytes).unwrap()));
    std::fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// Reads the f32 tensors of a safetensors file.
pub(crate) fn read_tensors(path: &Path) -> BTreeMap<String, (Vec<usize>, Vec<f32>)> {
    let bytes = std::fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let floats = |view: &TensorView<'_>| -> Vec<f32> {
        assert_eq!(view.dtype(), Dtype::F32);
        view.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    };
    file.tensors().iter().map(|(name, view)| (name.clone(), (view.shape().to_vec(), floats(view)))).collect()
}

/// A tokenizer whose texts spell the ids: `<7><12>`.
pub(crate) fn numbers_tokenizer(vocabulary: usize) -> Value {
    let vocab: serde_json::Map<String, Value> = (0..vocabulary).map(|id| (format!("<{id}>"), id.into())).collect();
    serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "<[0-9]+>"}, "behavior": "Isolated", "invert": false},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        // A number is a token by itself; nothing is merged.
        "model": {"type": "BPE", "vocab": vocab, "merges": [], "ignore_merges": true, "unk_token": "<0>"},
    })
}
