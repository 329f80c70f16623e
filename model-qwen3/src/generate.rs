//! From the ids of a prompt to the ids of an answer. The prompt is read in chunks, then the answer is made token by token
//! until a stop token, the limit, or the caller ends it. This module knows no text.

use crate::{
    ModelError,
    kv_cache::KvCache,
    model::{Qwen3, ids_tensor},
    sample::{self, Sampling},
    weights::to_host,
};
use backend_nvfp4::Nvfp4Kernels;
use std::ops::ControlFlow;

/// Number of prompt tokens in one forward. Chunks bound the attention scores `[H, T, S]`.
const PREFILL_CHUNK: usize = 512;

/// Limits of a generation.
#[derive(Debug, Clone)]
pub struct GenerateOptions {
    /// Largest number of tokens in the answer.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Ids that end the answer and are not part of it.
    pub stop_ids: Vec<u32>,
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// This stop token was generated.
    StopToken(u32),
    /// The answer has `max_tokens` tokens.
    MaxTokens,
    /// The caller asked for it.
    Caller,
}

/// An answer.
#[derive(Debug, Clone)]
pub struct Generation {
    /// The ids of the answer, without the stop token.
    pub ids: Vec<u32>,
    /// Why the answer ended.
    pub stop: StopReason,
}

/// Answers a prompt and shows each token of the answer to `on_token`.
///
/// # Errors
/// If the prompt is empty or holds ids outside the vocabulary, if prompt and answer exceed the longest sequence of the
/// model, or if the device fails.
pub fn generate<B: Nvfp4Kernels>(
    model: &Qwen3<B>,
    prompt: &[u32],
    options: &GenerateOptions,
    mut on_token: impl FnMut(u32) -> ControlFlow<()>,
) -> Result<Generation, ModelError> {
    let config = model.config();
    let capacity = prompt.len().saturating_add(options.max_tokens);
    if capacity > config.max_position_embeddings {
        let limit = config.max_position_embeddings;
        return Err(ModelError::TooLarge { what: "prompt and answer", value: capacity, limit });
    }
    let mut cache = KvCache::new(config, capacity, model.spec().precision.dtype(), &model.device());
    let mut logits = prefill(model, prompt, &mut cache, PREFILL_CHUNK)?;
    let mut seen = prompt.to_vec();
    let mut ids = Vec::new();
    loop {
        if ids.len() == options.max_tokens {
            return Ok(Generation { ids, stop: StopReason::MaxTokens });
        }
        let id = sample::next(&mut logits, &seen, &options.sampling, ids.len() as u32);
        if options.stop_ids.contains(&id) {
            return Ok(Generation { ids, stop: StopReason::StopToken(id) });
        }
        ids.push(id);
        seen.push(id);
        if on_token(id).is_break() {
            return Ok(Generation { ids, stop: StopReason::Caller });
        }
        if ids.len() < options.max_tokens {
            logits = forward(model, &[id], &mut cache)?;
        }
    }
}

/// Runs a prompt through the model, `chunk` tokens at a time, and returns the last logits `[V]`.
///
/// # Errors
/// As [`generate`].
pub fn prefill<B: Nvfp4Kernels>(
    model: &Qwen3<B>,
    prompt: &[u32],
    cache: &mut KvCache<B>,
    chunk: usize,
) -> Result<Vec<f32>, ModelError> {
    let mut logits = None;
    for part in prompt.chunks(chunk) {
        logits = Some(forward(model, part, cache)?);
    }
    logits.ok_or(ModelError::Tokenizer("the prompt has no tokens".into()))
}

fn forward<B: Nvfp4Kernels>(model: &Qwen3<B>, ids: &[u32], cache: &mut KvCache<B>) -> Result<Vec<f32>, ModelError> {
    cache.reserve(ids.len())?;
    let input = ids_tensor(&[ids.to_vec()], model.config(), &model.device())?;
    let hidden = model.forward_cached(input, cache);
    let last = hidden.narrow(0, ids.len() - 1, 1);
    let logits = to_host(model.logits(last))?;
    if logits.iter().any(|x| x.is_nan()) {
        return Err(ModelError::Device("the model computed NaN: weights are broken or the format overflows".into()));
    }
    Ok(logits)
}
