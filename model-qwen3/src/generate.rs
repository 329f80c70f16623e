//! From prompt ids to an answer: prefill in chunks, then one token at a time, until a stop token, the
//! limit, or the caller says so. Knows ids only, no text.

use crate::{
    ModelError,
    kv_cache::KvCache,
    model::{Qwen3, ids_tensor},
    sample::{self, Sampling},
    weights::to_host,
};
use backend_nvfp4::Nvfp4Backend;
use std::ops::ControlFlow;

/// Prompt tokens in one forward. Scores are `[H, T, S]`: chunks bound them.
const PREFILL_CHUNK: usize = 512;

/// Limits of a generation.
#[derive(Debug, Clone)]
pub struct GenerateOptions {
    /// Most tokens of the answer.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Ids that end the answer; they are not part of it.
    pub stop_ids: Vec<u32>,
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// A stop token.
    StopToken(u32),
    /// The limit on tokens.
    MaxTokens,
    /// The caller.
    Caller,
}

/// An answer.
#[derive(Debug, Clone)]
pub struct Generation {
    /// Its ids, without the stop token.
    pub ids: Vec<u32>,
    /// Why it ended.
    pub stop: StopReason,
}

/// Answers a prompt, showing each token to `on_token`.
///
/// # Errors
/// If the prompt is empty or holds foreign ids, prompt and answer exceed the model's longest
/// sequence, or the device fails.
pub fn generate<B: Nvfp4Backend>(
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
pub fn prefill<B: Nvfp4Backend>(
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

fn forward<B: Nvfp4Backend>(model: &Qwen3<B>, ids: &[u32], cache: &mut KvCache<B>) -> Result<Vec<f32>, ModelError> {
    cache.reserve(ids.len())?;
    let input = ids_tensor(&[ids.to_vec()], model.config(), &model.device())?;
    let hidden = model.forward(input, Some(cache));
    let last = hidden.narrow(0, ids.len() - 1, 1);
    let logits = to_host(model.logits(last))?;
    if logits.iter().any(|x| x.is_nan()) {
        return Err(ModelError::Device("the model computed NaN: weights are broken or the format overflows".into()));
    }
    Ok(logits)
}
