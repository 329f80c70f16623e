//! The rehearsal of answers: prompts and two tokens after each of them, computed with an outline of the model
//! ([`model_qwen3::weights::outline()`]) on a device that only records which kernels are launched. They are then
//! compiled while the model is loaded ([`crate::ahead`]).

use crate::{CliError, data::order::TILE, device::Job, run::stored_model::StoredModel};
use backend_nvfp4::{CacheFormat, DeviceServices, Nvfp4Kernels, PAGE, Precision, Recipe};
use model_qwen3::{
    kv_cache::KvPool,
    model::Qwen3,
    sampling::Sampling,
    session::{Answering, GenerateOptions, PREFILL_CHUNK, Session, step},
};

/// The answers that are expected, as far as kernels depend on them.
#[derive(Debug, Clone)]
pub struct Expected {
    /// Tokens of the prompts that are read together, for each such step.
    pub steps: Vec<Vec<usize>>,
    /// Answers that are made together, at most.
    pub together: usize,
}

impl Expected {
    /// Stands for prompts that are not known yet: one of a few tokens, a short one, one for each further number of tiles of rows
    /// that a chunk may have, one that is longer than a chunk, and two that share a chunk. The number of tiles decides how wide
    /// the tiles of a product are, and that width is compiled in.
    pub fn unknown(together: usize) -> Self {
        let tiles = (2..PREFILL_CHUNK / TILE).map(|tiles| tiles * TILE);
        let alone = [FEW, SHORT].into_iter().chain(tiles).chain([PREFILL_CHUNK + 2]).map(|length| vec![length]);
        let two = (together > 1).then(|| vec![SHORT; 2]);
        Self { steps: alone.chain(two).collect(), together }
    }
}

/// Tokens of a prompt without a chat template that is a word or two.
const FEW: usize = 8;
/// Tokens of a first message, with what the chat template puts around it.
const SHORT: usize = 32;

/// The first answers of a model.
pub struct FirstAnswers<'a> {
    /// The model.
    pub stored: &'a StoredModel,
    /// How it computes.
    pub recipe: Recipe,
    /// How its caches keep keys and values.
    pub cache: CacheFormat,
    /// Which answers are expected.
    pub expected: Expected,
}

/// A step reads the prompt and its last token; the next one reads the token that the device has drawn.
const TOKENS: usize = 2;

/// When answers begin.
#[derive(Clone, Copy, PartialEq)]
enum Begin {
    Together,
    /// The first one a step before the others, so that a forward reads tokens that the host knows and others.
    FirstAlone,
}

impl Job for FirstAnswers<'_> {
    type Output = ();

    fn run<B: Nvfp4Kernels + DeviceServices>(self, device: B::Device, precision: Precision) -> Result<(), CliError> {
        let Self { stored, recipe, cache, expected } = self;
        let model = stored.outline::<B>(recipe, precision, &device)?.with_cache_format(cache);
        // Kernels have places for a power of two tokens. A prompt of one token is read like a token of an answer.
        let doubled =
            std::iter::successors(Some(1), |count| Some(2 * count)).take_while(|count| *count < 2 * expected.together);
        let answers = doubled.map(|count| vec![1; count.min(expected.together)]);
        let longest = stored.config.max_position_embeddings.saturating_sub(TOKENS);
        // Of several equal chunks one is enough. The last token of a prompt is not in a chunk.
        let chunks = |length: usize| {
            let read = length.saturating_sub(1);
            (read / PREFILL_CHUNK).min(1) * PREFILL_CHUNK + read % PREFILL_CHUNK + 1
        };
        for lengths in expected.steps.into_iter().chain(answers) {
            let lengths: Vec<usize> = lengths.into_iter().map(|n| chunks(n).min(longest).max(1)).collect();
            answer(&model, &pool_for(&model, &lengths)?, &lengths, Begin::Together, Sampling::GREEDY)?;
        }
        // A draw from a list of each length, one from all tokens, and a penalty.
        let with = |top_k: usize| Sampling { top_k, ..Sampling::CARD };
        for sampling in [with(20), with(64), with(0), Sampling { repetition_penalty: 1.1, ..Sampling::GREEDY }] {
            answer(&model, &pool_for(&model, &[1])?, &[1], Begin::Together, sampling)?;
        }
        if expected.together > 1 {
            answer(&model, &pool_for(&model, &[1, 1])?, &[1, 1], Begin::FirstAlone, Sampling::GREEDY)?;
            // The second prompt begins like the first: it copies a part of a page, and reads pages that do not lie side by side.
            let length = (PAGE + PAGE / 2).min(longest);
            let pool = pool_for(&model, &[length; 2])?;
            for _ in 0..2 {
                answer(&model, &pool, &[length], Begin::Together, Sampling::GREEDY)?;
            }
        }
        Ok(())
    }
}

/// A pool with room for answers to prompts of these lengths.
fn pool_for<B: Nvfp4Kernels>(model: &Qwen3<B>, lengths: &[usize]) -> Result<KvPool<B>, CliError> {
    Ok(model.pool(lengths.iter().map(|length| (length + TOKENS).next_multiple_of(PAGE)).sum())?)
}

/// Answers prompts of these lengths together.
fn answer<B: Nvfp4Kernels>(
    model: &Qwen3<B>,
    pool: &KvPool<B>,
    lengths: &[usize],
    begin: Begin,
    sampling: Sampling,
) -> Result<(), CliError> {
    let options = GenerateOptions { max_tokens: TOKENS, sampling, stop_ids: vec![], logprobs: None };
    let prompts: Vec<Vec<u32>> = lengths.iter().map(|length| vec![0; *length]).collect();
    let new = |prompt: &Vec<u32>| {
        let session = Session::of_pool(model, pool, prompt, prompt.len() + TOKENS);
        session.expect("the pool has room for all prompts")
    };
    let mut sessions: Vec<_> = prompts.iter().map(new).collect();
    let begun = sessions.iter_mut().zip(&prompts);
    let answers = begun.map(|(session, prompt)| Answering::new(session, prompt, &options));
    let mut answers = answers.collect::<Result<Vec<_>, _>>()?;
    if begin == Begin::FirstAlone {
        step(&mut sessions.iter_mut().zip(&mut answers).take(1).collect::<Vec<_>>())?;
    }
    while answers.iter().any(|answer| !answer.has_ended()) {
        let open = sessions.iter_mut().zip(&mut answers).filter(|(_, answer)| !answer.has_ended());
        step(&mut open.collect::<Vec<_>>())?;
    }
    sessions.into_iter().for_each(Session::end);
    Ok(())
}
