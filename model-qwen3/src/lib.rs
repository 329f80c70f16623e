//! Qwen3 (dense, 0.6B to 32B), written once over any [`backend_nvfp4::Nvfp4Backend`], with all that
//! stands between a folder of files and streamed text.
//!
//! | module | its one idea |
//! |---|---|
//! | [`config`] | config.json, checked once, plain numbers afterwards |
//! | [`model`] | attention, MLP, block, model: read like the paper |
//! | [`rope`] | rotary position angles |
//! | [`kv_cache`] | keys and values of past tokens, allocated once |
//! | [`weights`] | key to field, each once; loading and listing |
//! | [`checkpoint`] | tensors by name out of a `.dat` or safetensors folder |
//! | [`convert`] | the same tensors in another format, streamed |
//! | [`dat`] | the `.dat` container, byte for byte |
//! | [`safetensors`] | Hugging Face files, sharded too |
//! | [`tokenizer`], [`chat_template`] | text to ids as the model's own files say |
//! | [`loss`] | masked cross-entropy, hidden-state L1 |
//! | [`sample`], [`generate`] | the next token; prefill, decode, stop |
//!
//! Shape letters: `B` rows of a batch, `T` new tokens of a row, `M = B * T` new tokens of all rows, `S` tokens of a row so
//! far, `D` hidden size, `H` query heads, `G` key and value heads, `E` head size, `F` MLP size, `V` vocabulary. Heads lie
//! side by side in the columns of a matrix: `q_MHE` is `[M, H*E]`.

#![forbid(unsafe_code)]
// Names end in shape letters: `x_MD` is `[M, D]`.
#![allow(non_snake_case)]

pub mod chat_template;
pub mod checkpoint;
pub mod config;
pub mod convert;
pub mod dat;
mod error;
pub mod generate;
pub mod kv_cache;
pub mod loss;
pub mod model;
pub mod rope;
pub mod safetensors;
pub mod sample;
pub mod tokenizer;
pub mod weights;

pub use error::ModelError;
