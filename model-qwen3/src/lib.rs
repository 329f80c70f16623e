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
//! Shape letters: `B` batch, `T` new tokens, `S` all tokens so far, `D` hidden size, `H` query heads,
//! `K` key/value heads, `G = H / K`, `E` head size, `F` MLP size, `V` vocabulary.

#![forbid(unsafe_code)]
// Names carry shape letters: `q_BHTE` is `[B, H, T, E]`.
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
