//! From the ids of a prompt to the ids of an answer. The prompt is read in chunks, then the answer is made token by token
//! until a stop token, the limit, or the caller ends it. A session keeps what it has read, so that the next prompt of a
//! conversation costs only what is new in it. This module knows no text.

use crate::{
    ModelError,
    kv_cache::KvCache,
    model::{Qwen3, ids_tensor},
    sample::{self, Logprobs, Sampling},
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
    /// Whether to return the logarithms of probabilities, and of how many of the most likely tokens.
    pub logprobs: Option<usize>,
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
    /// For each of the ids, if the options ask for them.
    pub logprobs: Vec<Logprobs>,
}

/// What happens in an answer, for the caller who waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// The cache now holds this many tokens of the prompt.
    Read(usize),
    /// The answer has a new token.
    Token(u32),
}

/// A model with the keys and values of the tokens that it has read.
#[derive(Debug)]
pub struct Session<'a, B: Nvfp4Kernels> {
    model: &'a Qwen3<B>,
    cache: KvCache<B>,
    /// The tokens in the cache.
    ids: Vec<u32>,
}

impl<'a, B: Nvfp4Kernels> Session<'a, B> {
    /// A session with room for `capacity` tokens.
    ///
    /// # Errors
    /// If that exceeds the longest sequence of the model.
    pub fn new(model: &'a Qwen3<B>, capacity: usize) -> Result<Self, ModelError> {
        let (config, limit) = (model.config(), model.config().max_position_embeddings);
        if capacity > limit {
            return Err(ModelError::TooLarge { what: "prompt and answer", value: capacity, limit });
        }
        let cache = KvCache::new(config, capacity, model.spec().precision.dtype(), &model.device());
        Ok(Self { model, cache, ids: vec![] })
    }

    /// Number of tokens in the cache.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether no token has been read.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Number of tokens at the beginning of `prompt` that the cache holds. The last token never counts, because its logits
    /// are needed.
    pub fn cached(&self, prompt: &[u32]) -> usize {
        let same = self.ids.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        same.min(prompt.len().saturating_sub(1))
    }

    /// Answers a prompt and tells `progress` of each chunk that is read and of each token. The cache keeps the tokens that
    /// the prompt shares with earlier ones, and forgets the others.
    ///
    /// # Errors
    /// If the prompt is empty or holds ids outside the vocabulary, if prompt and answer exceed the capacity, or if the
    /// device fails.
    pub fn answer(
        &mut self,
        prompt: &[u32],
        options: &GenerateOptions,
        mut progress: impl FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<Generation, ModelError> {
        let cached = self.cached(prompt);
        self.rewind(cached);
        let mut answer = Generation { ids: Vec::new(), stop: StopReason::Caller, logprobs: Vec::new() };
        let mut logits = Vec::new();
        for part in prompt[cached..].chunks(PREFILL_CHUNK) {
            logits = self.read(part)?;
            if progress(Progress::Read(self.len())).is_break() {
                return Ok(answer);
            }
        }
        if logits.is_empty() {
            return Err(ModelError::Tokenizer("the prompt has no tokens".into()));
        }
        let mut seen = prompt.to_vec();
        loop {
            if answer.ids.len() == options.max_tokens {
                return Ok(Generation { stop: StopReason::MaxTokens, ..answer });
            }
            // Sampling changes the logits of tokens that were seen.
            let own = options.logprobs.map(|_| logits.clone());
            let id = sample::next(&mut logits, &seen, &options.sampling, answer.ids.len() as u32);
            if options.stop_ids.contains(&id) {
                return Ok(Generation { stop: StopReason::StopToken(id), ..answer });
            }
            if let (Some(own), Some(count)) = (own, options.logprobs) {
                answer.logprobs.push(Logprobs::of(&own, id, count));
            }
            answer.ids.push(id);
            seen.push(id);
            if progress(Progress::Token(id)).is_break() {
                return Ok(answer);
            }
            if answer.ids.len() < options.max_tokens {
                logits = self.read(&[id])?;
            }
        }
    }

    /// Reads tokens in one forward, and returns the logits `[V]` of the last.
    ///
    /// # Errors
    /// As [`Self::answer`].
    pub fn read(&mut self, ids: &[u32]) -> Result<Vec<f32>, ModelError> {
        let logits = forward(self.model, ids, &mut self.cache)?;
        self.ids.extend_from_slice(ids);
        Ok(logits)
    }

    fn rewind(&mut self, len: usize) {
        self.cache.rewind(len);
        self.ids.truncate(len);
    }
}

/// Answers one prompt and shows each token of the answer to `on_token`.
///
/// # Errors
/// As [`Session::answer`], or if prompt and answer exceed the longest sequence of the model.
pub fn generate<B: Nvfp4Kernels>(
    model: &Qwen3<B>,
    prompt: &[u32],
    options: &GenerateOptions,
    mut on_token: impl FnMut(u32) -> ControlFlow<()>,
) -> Result<Generation, ModelError> {
    Session::new(model, prompt.len().saturating_add(options.max_tokens))?.answer(prompt, options, |progress| {
        match progress {
            Progress::Token(id) => on_token(id),
            Progress::Read(_) => ControlFlow::Continue(()),
        }
    })
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
