//! Several answers at once. Each forward makes the next token of every answer, so that the weights are read once for all of them.
//! An answer may begin and end at any time. All have their keys and values in one pool, which remembers the prompts that were
//! read until the room is needed: a prompt that begins like an earlier one, or continues an earlier conversation, is read from
//! there on only. Answers are not remembered, because their keys and values are rounded differently from those of a prompt.

use crate::{
    CliError,
    memory::surplus::Surplus,
    model_files::TextFiles,
    talk::answer::{Answer, Growing},
};
use backend_nvfp4::{DeviceMemory, Nvfp4Kernels};
use model_qwen3::{
    kv_cache::KvPool,
    model::Qwen3,
    session::{Answering, GenerateOptions, Generation, Session, StopReason, step},
};

/// A prompt to answer, and who hears the answer.
pub struct NewAnswer<L> {
    /// The tokens of the prompt.
    pub prompt: Vec<u32>,
    /// How to answer it.
    pub options: GenerateOptions,
    /// Texts in front of which the answer ends.
    pub ends: Vec<String>,
    /// Hears the answer.
    pub listener: L,
}

/// Hears an answer while it is made.
pub trait Listener {
    /// Whether the answer is still wanted.
    fn listens(&self) -> bool {
        true
    }

    /// Hears text of the answer. `generation` holds the tokens so far, those of the text among them.
    fn hear(&mut self, piece: &str, generation: &Generation);

    /// Hears that the answer is complete, or why there is none.
    fn complete(self, answer: Result<Answer, CliError>);
}

/// The answers that are being made, and the pool with what was read.
pub struct Batch<'a, B: Nvfp4Kernels, L> {
    model: &'a Qwen3<B>,
    text: &'a TextFiles,
    pool: KvPool<B>,
    /// Answers that are made at once, at most.
    most: usize,
    running: Vec<Running<'a, B, L>>,
    surplus: Surplus,
}

struct Running<'a, B: Nvfp4Kernels, L> {
    session: Session<'a, B>,
    answering: Answering<B>,
    growing: Growing,
    listener: L,
    /// Why there is no answer.
    failure: Option<CliError>,
}

impl<'a, B: Nvfp4Kernels + DeviceMemory, L: Listener> Batch<'a, B, L> {
    /// A batch of at most `most` answers, whose prompts and answers together have at most `tokens` tokens at once. The room for
    /// them is allocated.
    ///
    /// # Errors
    /// If the format of caches does not take the sizes of the model.
    pub fn new(model: &'a Qwen3<B>, text: &'a TextFiles, tokens: usize, most: usize) -> Result<Self, CliError> {
        Ok(Self { model, text, pool: model.pool(tokens)?, most, running: vec![], surplus: Surplus::default() })
    }

    /// Number of answers that are being made.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Whether an answer to a prompt of `prompt` tokens can begin now.
    pub fn has_room(&self, prompt: usize, options: &GenerateOptions) -> bool {
        self.running.len() < self.most && self.pool.has_room(capacity(prompt, options))
    }

    /// Begins an answer for which there is room.
    ///
    /// # Errors
    /// If the prompt is empty, or there is no room for the answer.
    pub fn begin(&mut self, asked: NewAnswer<L>) -> Result<(), CliError> {
        let NewAnswer { prompt, options, ends, listener } = asked;
        let capacity = capacity(prompt.len(), &options);
        let session = Session::of_pool(self.model, &self.pool, &prompt, capacity);
        let mut session =
            session.ok_or_else(|| CliError::Usage(format!("there is no room for {capacity} tokens now")))?;
        let growing = Growing::new(prompt.len(), session.cached(&prompt), &ends);
        let answering = Answering::new(&mut session, &prompt, &options)?;
        self.running.push(Running { session, answering, growing, listener, failure: None });
        Ok(())
    }

    /// Makes the next token of every answer, and tells the listeners.
    ///
    /// # Errors
    /// If the device fails. What fails for one answer is told to its listener.
    pub fn step(&mut self) -> Result<(), CliError> {
        let reads_chunks = self.running.iter().any(|running| running.answering.reads_chunk());
        let mut answers: Vec<_> = self.running.iter_mut().map(|r| (&mut r.session, &mut r.answering)).collect();
        let tokens = step(&mut answers)?;
        for (running, token) in self.running.iter_mut().zip(tokens) {
            if token.is_some() && running.answering.generated().ids.len() == 1 {
                // The prompt was read, and no number of it is NaN.
                running.session.share();
            }
            match token.map(|id| running.growing.push(id, &self.text.tokenizer)).transpose() {
                Ok(Some(piece)) if !piece.is_empty() => running.listener.hear(&piece, running.answering.generated()),
                Ok(_) => {}
                Err(error) => running.failure = Some(error),
            }
            if running.growing.has_ended() || running.failure.is_some() || !running.listener.listens() {
                running.answering.end(StopReason::Caller);
            }
        }
        let ended: Vec<_> = self.running.extract_if(.., |running| running.answering.has_ended()).collect();
        ended.into_iter().for_each(|running| self.complete(running));
        self.surplus.after_step::<B>(&self.model.device(), reads_chunks || self.running.is_empty());
        Ok(())
    }

    /// Tells the listener of an answer that it has ended. The pool caches its prompt, unless something failed or was not waited
    /// for: the numbers may then be wrong.
    fn complete(&self, running: Running<'a, B, L>) {
        let Running { session, answering, growing, mut listener, failure } = running;
        let is_checked = answering.is_prompt_checked();
        let generation = failure.map_or_else(|| answering.into_generation().map_err(CliError::from), Err);
        let answer = generation.and_then(|generation| growing.finish(generation, &self.text.tokenizer));
        if answer.is_ok() && is_checked {
            session.end();
        }
        let answer = answer.map(|(answer, rest)| {
            if !rest.is_empty() {
                listener.hear(&rest, &answer.generation);
            }
            answer
        });
        listener.complete(answer);
    }
}

/// Tokens of a prompt and its answer, at most.
fn capacity(prompt: usize, options: &GenerateOptions) -> usize {
    prompt.saturating_add(options.max_tokens)
}
