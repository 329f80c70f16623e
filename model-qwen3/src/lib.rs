//! Qwen3 (dense, 0.6B to 32B), written once over any [`backend_nvfp4::Nvfp4Backend`], and everything between a folder of
//! files and streamed text.
//!
//! | module | what it holds |
//! |---|---|
//! | [`config`] | config.json, checked |
//! | [`model`] | attention, MLP, block, model |
//! | [`rope`] | rotary position angles |
//! | [`kv_cache`], `pages` | keys and values of past tokens; which page holds which |
//! | [`calibration`] | the largest magnitudes of what linear layers read |
//! | [`weights`] | a model's tensors: loaded, drawn at random, listed, replaced |
//! | [`names`] | how checkpoints spell the names of tensors |
//! | [`tensors`] | tensors by name, wherever they are |
//! | [`container`] | the tensors of a `.dat` file or of safetensors |
//! | [`repack`], [`foreign`] | the same tensors in another format; as other libraries store NVFP4 |
//! | [`write`](mod@write), [`gguf`] | tensors streamed to a file; a model as a GGUF file |
//! | [`dat`] | the `.dat` format, byte for byte |
//! | [`safetensors`] | Hugging Face files, also in shards |
//! | [`bytes`], [`json`] | numbers as bytes; JSON whose keys stand once |
//! | [`tokenizer`], `pieces`, [`chat_template`], `template_cycles` | text to token ids, by the model's own files, and a piece at a time |
//! | [`limits`] | a library over a file that somebody else made, with bounds on time and memory |
//! | [`loss`] | cross-entropy over supervised tokens; L1 of hidden states |
//! | [`sampling`], `next_token`, [`session`] | choosing a token, on the host or on the device; prompt to answer |
//!
//! # Letters
//! A capital letter has one meaning in this crate. Names of tensors end in the letters of their shape.
//!
//! | letter | meaning |
//! |---|---|
//! | `R` | rows of a batch |
//! | `T` | new tokens of a row |
//! | `M` | new tokens of all rows, `R * T` |
//! | `S` | tokens of a row so far |
//! | `D` | hidden size |
//! | `H` | query heads |
//! | `G` | key and value heads |
//! | `E` | head size |
//! | `F` | MLP size |
//! | `V` | vocabulary |
//! | `K`, `N` | input and output features of a linear layer, in files |
//! | `B` | type parameter: the backend |
//!
//! Heads lie side by side in the columns of a matrix: `q_MHE` is `[M, H*E]`.

#![forbid(unsafe_code)]
// Names end in shape letters: `x_MD` is `[M, D]`.
#![allow(non_snake_case)]

pub mod bytes;
pub mod calibration;
pub mod chat_template;
pub mod config;
pub mod container;

pub mod dat;
mod decode;
mod error;
pub mod file;
pub mod foreign;
pub mod gguf;
pub mod json;
pub mod kv_cache;
pub mod limits;
pub mod loss;
mod maxima;
pub mod model;
pub mod names;
mod next_token;
mod pages;
mod pieces;
pub mod repack;
pub mod rope;
pub mod safetensors;
pub mod sampling;
pub mod session;
mod template_cycles;
pub mod tensors;
pub mod tokenizer;
pub mod weights;
pub mod write;

pub use error::ModelError;
