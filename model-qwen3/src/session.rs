//! From the ids of a prompt to the ids of an answer. The prompt is read in chunks, then the answer is made token by token
//! until a stop token, the limit, or the caller ends it. A session keeps what it has read, so that the next prompt of a
//! conversation costs only what is new in it. Several answers can be made together: [`step`]. This module knows no text.

use crate::{
    ModelError,
    kv_cache::{KvCache, KvPool, NewTokens},
    model::{Qwen3, below_each_other, ids_tensor},
    next_token::{Choice, Newest, NextToken, Received, newest_ids},
    pages::PAGE,
    sampling::{self, Logprobs, Sampling, Seen},
    weights::to_host,
};
use backend_nvfp4::{Drawn, Nvfp4Kernels};
use burn::tensor::{Int, Tensor, backend::Backend};
use std::{ops::ControlFlow, sync::Arc};

/// Number of prompt tokens in one forward, at most. Chunks bound the attention scores `[H, T, S]`, and how long answers wait
/// for the prompts of others. A chunk ends at a multiple of this number, or in front of the last token of its prompt, which is
/// read like a token of the answer.
pub const PREFILL_CHUNK: usize = 512;

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
    /// The tokens in the cache. The cache may hold one more, which the host does not know yet.
    ids: Vec<u32>,
    /// The number of tokens at the beginning that were read as a prompt. Tokens behind them were made for an answer, or read after
    /// one: their keys and values may differ in the last bits from those of a prompt, so other sessions do not get them.
    of_prompt: usize,
}

impl<'a, B: Nvfp4Kernels> Session<'a, B> {
    /// A session with room for `capacity` tokens.
    ///
    /// # Errors
    /// If that exceeds the longest sequence of the model, or the format of its caches does not take its sizes.
    pub fn new(model: &'a Qwen3<B>, capacity: usize) -> Result<Self, ModelError> {
        let limit = model.config().max_position_embeddings;
        if capacity > limit {
            return Err(ModelError::TooLarge { what: "prompt and answer", value: capacity, limit });
        }
        let cache = model.pool(capacity)?.cache(&[], capacity).expect("a new pool has room for its tokens");
        Ok(Self { model, cache, ids: vec![], of_prompt: 0 })
    }

    /// A session with room for `capacity` tokens of a pool, which is to read `prompt`. It holds the beginning of the prompt
    /// that other sessions of the pool have read. `None` if the pool has no room now.
    pub fn of_pool(model: &'a Qwen3<B>, pool: &KvPool<B>, prompt: &[u32], capacity: usize) -> Option<Self> {
        let cache = pool.cache(prompt, capacity)?;
        let ids = prompt[..cache.tokens()].to_vec();
        Some(Self { model, cache, of_prompt: ids.len(), ids })
    }

    /// Lets later sessions of the pool begin with the tokens that this one has read as a prompt, in whole pages.
    pub fn share(&self) {
        self.cache.share(&self.ids[..self.of_prompt], false);
    }

    /// Ends the session, and lets later sessions of the pool begin with all tokens that it has read as a prompt.
    pub fn end(self) {
        self.cache.share(&self.ids[..self.of_prompt], true);
    }

    /// The device of the model.
    pub fn device(&self) -> B::Device {
        self.model.device()
    }

    /// Number of tokens in the cache.
    pub fn tokens(&self) -> usize {
        self.ids.len()
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
        let mut answering = Answering::new(self, prompt, options)?;
        while !answering.has_ended() {
            let reads = answering.reads_prompt();
            let token = step(&mut [(&mut *self, &mut answering)])?.pop().flatten();
            let chunk = reads.then(|| Progress::Read(self.tokens()));
            let goes_on = chunk.into_iter().chain(token.map(Progress::Token)).all(|news| progress(news).is_continue());
            if !goes_on {
                answering.end(StopReason::Caller);
            }
        }
        answering.into_generation()
    }

    /// Reads tokens in one forward, and returns the logits `[V]` of the last. A single token is computed like one of an answer,
    /// several like those of a prompt.
    ///
    /// # Errors
    /// As [`Self::answer`].
    pub fn read(&mut self, ids: &[u32]) -> Result<Vec<f32>, ModelError> {
        // An answer that has ended may have left a token that was read ahead.
        if self.cache.tokens() > self.ids.len() {
            self.rewind(self.ids.len());
        }
        let new = if ids.len() == 1 { NewTokens::Answer } else { NewTokens::Prompt(ids.len()) };
        let model = self.model;
        let logits = to_host(model.logits_cached(read_together(&mut [(self, ids, new)])?))?;
        if logits.iter().any(|x| x.is_nan()) { Err(ModelError::NotANumber) } else { Ok(logits) }
    }

    /// Forgets all tokens.
    pub fn forget(&mut self) {
        self.rewind(0);
    }

    /// Forgets all tokens but the first `len`, and returns how many are left.
    fn rewind(&mut self, len: usize) -> usize {
        let left = self.cache.rewind(len);
        self.ids.truncate(left);
        self.of_prompt = self.of_prompt.min(left);
        left
    }
}

/// An answer in the making.
#[derive(Debug)]
pub struct Answering<B: Backend> {
    /// The prompt, and the answer so far.
    ids: Vec<u32>,
    /// How many of them the session has read.
    read_count: usize,
    prompt: usize,
    options: GenerateOptions,
    /// The tokens of `ids`, if they are penalized.
    seen: Option<Seen>,
    generation: Generation,
    ended: bool,
    /// Whether the model computed NaN.
    failed: bool,
    /// The token behind `ids`, once the session reads or has read all of them; or a chunk of the prompt that is being read.
    next: Option<NextToken<B>>,
    /// The token behind that one, if the session reads ahead.
    ahead: Option<NextToken<B>>,
}

impl<B: Nvfp4Kernels> Answering<B> {
    /// Begins the answer to a prompt. The session keeps the tokens that the prompt shares with earlier ones, and forgets the
    /// others.
    ///
    /// # Errors
    /// If the prompt is empty.
    pub fn new(session: &mut Session<'_, B>, prompt: &[u32], options: &GenerateOptions) -> Result<Self, ModelError> {
        if prompt.is_empty() {
            return Err(ModelError::Tokenizer("the prompt has no tokens".into()));
        }
        let read_count = session.rewind(session.cached(prompt));
        let mut seen = options.sampling.penalizes().then(|| Seen::new(session.model.config().vocab_size));
        seen.iter_mut().for_each(|seen| seen.extend(prompt));
        Ok(Self {
            ids: prompt.to_vec(),
            read_count,
            prompt: prompt.len(),
            options: options.clone(),
            seen,
            generation: Generation { ids: vec![], stop: StopReason::Caller, logprobs: vec![] },
            ended: false,
            failed: false,
            next: None,
            ahead: None,
        })
    }

    /// Whether a chunk of the prompt is read next.
    pub fn reads_chunk(&self) -> bool {
        self.next.is_none() && !self.chunk().is_empty()
    }

    /// Whether tokens of the prompt are read next.
    fn reads_prompt(&self) -> bool {
        self.read_count < self.prompt
    }

    /// Whether the host has waited for everything that was computed from the prompt: only then would it know of NaN in it.
    pub fn is_prompt_checked(&self) -> bool {
        self.next.is_none() || !self.generation.ids.is_empty()
    }

    /// Whether the answer is complete.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// The tokens of the answer so far.
    pub fn generated(&self) -> &Generation {
        &self.generation
    }

    /// Ends the answer.
    pub fn end(&mut self, reason: StopReason) {
        self.generation.stop = reason;
        self.ended = true;
    }

    /// The answer.
    ///
    /// # Errors
    /// If the model computed NaN.
    pub fn into_generation(self) -> Result<Generation, ModelError> {
        if self.failed { Err(ModelError::NotANumber) } else { Ok(self.generation) }
    }

    /// The tokens of the prompt to be read next: the rest of a chunk, but not the last token. That one is read like a token of the
    /// answer, so that a prompt whose other tokens are cached costs no more than such a token.
    fn chunk(&self) -> &[u32] {
        let chunk_end = (self.read_count / PREFILL_CHUNK + 1) * PREFILL_CHUNK;
        self.ids.get(self.read_count..chunk_end.min(self.prompt - 1)).unwrap_or_default()
    }

    /// The token that the session is to read next, if it has read, or is reading, all tokens before it.
    fn newest(&self, session: &Session<'_, B>) -> Option<Newest<'_, B>> {
        if self.reads_ahead(session) {
            return self.drawn().map(|(drawn, row)| Newest::Drawn(drawn, row));
        }
        let is_next = self.next.is_none() && self.read_count + 1 == self.ids.len();
        self.ids.last().filter(|_| is_next).map(|id| Newest::Known(*id))
    }

    /// What the device does with the logits of the token behind `more` tokens that the host does not know yet.
    fn choice(&self, more: usize) -> Choice<'_> {
        let sampling = &self.options.sampling;
        let position = (self.generation.ids.len() + more) as u32;
        Choice {
            draw: sampling.draw(position),
            penalty: self.seen.as_ref().map(|seen| seen.penalty(sampling)),
            wants_logits: self.options.logprobs.is_some(),
        }
    }

    /// The next token on the device, if the answer goes on behind it unless it is a stop token.
    fn drawn(&self) -> Option<(&Arc<Drawn<B>>, usize)> {
        match &self.next {
            Some(NextToken::Drawn(drawn, row, _))
                if !self.reads_prompt() && self.generation.ids.len() + 1 < self.options.max_tokens =>
            {
                Some((drawn, *row))
            }
            _ => None,
        }
    }

    /// Whether the session is to read a token that the host does not know yet. Where there is no room for it, the answer may still
    /// end before that matters.
    fn reads_ahead(&self, session: &Session<'_, B>) -> bool {
        self.ahead.is_none() && self.drawn().is_some() && session.cache.reserve(1).is_ok()
    }

    /// Waits for what the session reads. Returns the token that follows, unless the prompt goes on or the answer ends. A token
    /// that is to be read ahead is not waited for yet: the next step asks the device to read it first.
    fn take(&mut self, session: &mut Session<'_, B>) -> Result<Option<u32>, ModelError> {
        if self.reads_ahead(session) {
            return Ok(None);
        }
        let (Some(next), ahead) = (self.next.take(), self.ahead.take()) else { return Ok(None) };
        let token = self.receive(next.wait()?);
        if let (Some(id), Some(ahead)) = (token, ahead) {
            session.ids.push(id);
            self.read_count += 1;
            self.next = Some(ahead);
        }
        Ok(token)
    }

    fn receive(&mut self, received: Received) -> Option<u32> {
        let (options, answer) = (&self.options, &mut self.generation);
        let (id, logits) = match received {
            Received::Chunk => return None,
            Received::NotANumber => {
                self.failed = true;
                self.end(StopReason::Caller);
                return None;
            }
            _ if options.max_tokens == 0 => {
                self.end(StopReason::MaxTokens);
                return None;
            }
            Received::Token(id, logits) => (id, logits),
            Received::Logits(mut logits) => {
                // Sampling changes the logits of tokens that were seen.
                let own = options.logprobs.map(|_| logits.clone());
                (sampling::next(&mut logits, self.seen.as_ref(), &options.sampling, answer.ids.len() as u32), own)
            }
        };
        if options.stop_ids.contains(&id) {
            self.end(StopReason::StopToken(id));
            return None;
        }
        let wanted = options.logprobs.zip(logits);
        answer.logprobs.extend(wanted.map(|(count, logits)| Logprobs::of(&logits, id, count)));
        answer.ids.push(id);
        self.ids.push(id);
        self.seen.iter_mut().for_each(|seen| seen.extend(&[id]));
        if answer.ids.len() == options.max_tokens {
            self.end(StopReason::MaxTokens);
        }
        Some(id)
    }
}

/// A session, and the answer that it makes.
type Part<'p, 's, B> = (&'p mut Session<'s, B>, &'p mut Answering<B>);

/// Makes a step of several answers that have not ended. One forward reads chunks of prompts, at most `PREFILL_CHUNK` tokens
/// together: a chunk for which there is no room waits for a later step, and the first one never waits. Another forward reads
/// the newest token of each answer whose earlier tokens are read. Where the device draws tokens, it reads a token before the
/// host knows it, so that the device does not wait for the host: the first token of an answer is then returned one step later.
/// Returns the new token of each answer that has one.
///
/// | step | reads | the device draws | the host waits for, and returns |
/// |---|---|---|---|
/// | 1 | the last token of the prompt | token 1 (`next`) | nothing |
/// | 2 | token 1, which only the device knows | token 2 (`ahead`) | token 1; then token 2 is `next` |
/// | 3 | token 2 | token 3 (`ahead`) | token 2; then token 3 is `next` |
///
/// # Errors
/// As [`Session::answer`].
///
/// # Panics
/// If the sessions belong to different pools.
pub fn step<B: Nvfp4Kernels>(answers: &mut [Part<'_, '_, B>]) -> Result<Vec<Option<u32>>, ModelError> {
    read_chunks(answers)?;
    read_newest(answers)?;
    answers.iter_mut().map(|(session, answering)| answering.take(session)).collect()
}

/// Reads chunks of prompts.
fn read_chunks<B: Nvfp4Kernels>(answers: &mut [Part<'_, '_, B>]) -> Result<(), ModelError> {
    let mut room = PREFILL_CHUNK;
    let mut parts = Vec::new();
    for (session, answering) in answers.iter_mut().filter(|(_, answering)| answering.next.is_none()) {
        let ids = answering.chunk().to_vec();
        if !ids.is_empty() && ids.len() <= room {
            room -= ids.len();
            parts.push((&mut **session, &mut **answering, ids));
        }
    }
    if parts.is_empty() {
        return Ok(());
    }
    let mut reads: Vec<_> = parts
        .iter_mut()
        .map(|(session, _, ids)| (&mut **session, ids.as_slice(), NewTokens::Prompt(ids.len())))
        .collect();
    let hidden = read_together(&mut reads)?;
    for (n, (_, answering, ids)) in parts.iter_mut().enumerate() {
        answering.read_count += ids.len();
        let goes_on = !answering.chunk().is_empty();
        answering.next = goes_on.then(|| NextToken::Chunk(hidden.clone().slice([n..n + 1, 0..1])));
    }
    Ok(())
}

/// Reads the newest token of each answer, and what is to be known of the token behind it.
fn read_newest<B: Nvfp4Kernels>(answers: &mut [Part<'_, '_, B>]) -> Result<(), ModelError> {
    let mut parts: Vec<_> =
        answers.iter_mut().filter(|(session, answering)| answering.newest(session).is_some()).collect();
    for (session, _) in parts.iter().filter(|(_, answering)| answering.next.is_none()) {
        session.cache.reserve(1)?;
    }
    let Some((first, _)) = parts.first() else { return Ok(()) };
    let model = first.model;
    let newest: Vec<_> = parts.iter().filter_map(|(session, answering)| answering.newest(session)).collect();
    let ids = newest_ids(&newest, model.config(), &model.device())?;
    for (session, answering) in parts.iter_mut().filter(|(_, answering)| answering.next.is_none()) {
        session.ids.extend(answering.ids.last());
    }
    let mut sessions: Vec<_> = parts.iter_mut().map(|(session, _)| (&mut **session, NewTokens::Answer)).collect();
    let logits = model.logits_cached(forward(&mut sessions, ids.clone()));
    // A token that the device draws is read ahead, behind one that the host waits for.
    let choices: Vec<_> =
        parts.iter().map(|(_, answering)| answering.choice(usize::from(answering.next.is_some()))).collect();
    let next = NextToken::of(logits, ids, &choices);
    for ((_, answering), next) in parts.iter_mut().zip(next) {
        if answering.next.is_some() {
            answering.ahead = Some(next);
        } else {
            answering.read_count += 1;
            answering.next = Some(next);
        }
    }
    Ok(())
}

/// Reads tokens of several sessions of one model in one forward, and returns the hidden state `[R, D]` of the last token of each.
fn read_together<B: Nvfp4Kernels>(
    parts: &mut [(&mut Session<'_, B>, &[u32], NewTokens)],
) -> Result<Tensor<B, 2>, ModelError> {
    for (session, ids, _) in parts.iter() {
        session.cache.reserve(ids.len())?;
    }
    let model = parts[0].0.model;
    let all: Vec<u32> = parts.iter().flat_map(|(_, ids, _)| ids.iter().copied()).collect();
    let input = ids_tensor(&[all], model.config(), &model.device())?;
    let mut sessions: Vec<_> = parts.iter_mut().map(|(session, _, new)| (&mut **session, *new)).collect();
    let hidden = forward(&mut sessions, input);
    for (session, ids, new) in parts.iter_mut() {
        if !new.is_answer() && session.of_prompt == session.ids.len() {
            session.of_prompt += ids.len();
        }
        session.ids.extend_from_slice(ids);
    }
    Ok(hidden)
}

/// Reads the tokens `[1, M]` of several sessions and returns the hidden state `[R, D]` of the last token of each.
fn forward<B: Nvfp4Kernels>(parts: &mut [(&mut Session<'_, B>, NewTokens)], ids: Tensor<B, 2, Int>) -> Tensor<B, 2> {
    let model = parts[0].0.model;
    let mut sequences: Vec<_> = parts.iter_mut().map(|(session, new)| (&mut session.cache, *new)).collect();
    let hidden = model.forward_cached(ids, &mut sequences);
    if parts.iter().all(|(_, new)| new.count() == 1) {
        return hidden;
    }
    let mut end = 0;
    let lasts = parts.iter().map(|(_, new)| {
        end += new.count();
        hidden.clone().slice(end - 1..end)
    });
    below_each_other(lasts.collect())
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

/// Answers several prompts together: each step makes the next token of every answer whose prompt is read. Calls `on_step` after
/// each step. The answers are those of [`generate`].
///
/// # Errors
/// As [`generate`].
pub fn generate_together<B: Nvfp4Kernels>(
    model: &Qwen3<B>,
    prompts: &[Vec<u32>],
    options: &GenerateOptions,
    mut on_step: impl FnMut(),
) -> Result<Vec<Generation>, ModelError> {
    let limit = model.config().max_position_embeddings;
    let capacity = |prompt: &Vec<u32>| prompt.len().saturating_add(options.max_tokens);
    if let Some(value) = prompts.iter().map(capacity).find(|value| *value > limit) {
        return Err(ModelError::TooLarge { what: "prompt and answer", value, limit });
    }
    let pool = model.pool(prompts.iter().map(|prompt| capacity(prompt).next_multiple_of(PAGE)).sum())?;
    let session = |prompt: &Vec<u32>| Session::of_pool(model, &pool, prompt, capacity(prompt));
    let mut sessions: Vec<Session<'_, B>> =
        prompts.iter().map(|prompt| session(prompt).expect("the pool has room for all prompts and answers")).collect();
    let begun = sessions.iter_mut().zip(prompts).map(|(session, prompt)| Answering::new(session, prompt, options));
    let mut answers = begun.collect::<Result<Vec<_>, _>>()?;
    loop {
        let parts = sessions.iter_mut().zip(&mut answers);
        let mut running: Vec<_> = parts.filter(|(_, answering)| !answering.has_ended()).collect();
        if running.is_empty() {
            break;
        }
        step(&mut running)?;
        on_step();
    }
    answers.into_iter().map(Answering::into_generation).collect()
}
