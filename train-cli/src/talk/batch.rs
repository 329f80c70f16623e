//! Several answers at once. Each forward makes the next token of every answer, so that the weights are read once for all of
//! them. An answer may begin and end at any time. Its session then waits for the next prompt, and keeps what it has read: of
//! the sessions that wait, the one that shares the longest beginning with a prompt answers it.

use crate::{
    CliError,
    model_files::TextFiles,
    talk::answer::{Answer, Growing},
};
use backend_nvfp4::Nvfp4Kernels;
use model_qwen3::{
    model::Qwen3,
    session::{Answering, GenerateOptions, Generation, Session, StopReason, step},
};

/// A prompt to answer, and who hears the answer.
pub struct Asked<L> {
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

/// The answers that are being made, and the sessions that wait for a prompt.
pub struct Batch<'a, B: Nvfp4Kernels, L> {
    model: &'a Qwen3<B>,
    text: &'a TextFiles,
    /// Tokens of a prompt and its answer, at most.
    capacity: usize,
    /// Answers that are made at once, at most.
    most: usize,
    /// Sessions that answer nothing now. The one that was used longest ago comes first.
    waiting: Vec<Session<'a, B>>,
    running: Vec<Running<'a, B, L>>,
    /// Parts of prompts that were read since freed buffers were given back.
    parts: usize,
}

struct Running<'a, B: Nvfp4Kernels, L> {
    session: Session<'a, B>,
    answering: Answering,
    growing: Growing,
    listener: L,
    /// Why there is no answer.
    failure: Option<CliError>,
}

/// Parts of prompts after which freed buffers are given back to the device: each length leaves some of its own.
const PARTS: usize = 16;

impl<'a, B: Nvfp4Kernels, L: Listener> Batch<'a, B, L> {
    /// A batch of at most `most` answers. Prompt and answer together have at most `capacity` tokens. A session is made when
    /// it is first needed.
    pub fn new(model: &'a Qwen3<B>, text: &'a TextFiles, capacity: usize, most: usize) -> Self {
        Self { model, text, capacity, most, waiting: vec![], running: vec![], parts: 0 }
    }

    /// Makes all sessions now, so that a lack of memory shows before the first answer.
    ///
    /// # Errors
    /// If the capacity exceeds the longest sequence of the model.
    pub fn allocate(&mut self) -> Result<(), CliError> {
        while self.waiting.len() + self.running.len() < self.most {
            self.waiting.push(Session::new(self.model, self.capacity)?);
        }
        Ok(())
    }

    /// Number of answers that are being made.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Whether another answer can begin.
    pub fn has_room(&self) -> bool {
        self.running.len() < self.most
    }

    /// Begins an answer.
    ///
    /// # Errors
    /// If the prompt is empty or longer than the capacity, or the device has no memory for another session.
    pub fn begin(&mut self, asked: Asked<L>) -> Result<(), CliError> {
        let Asked { prompt, options, ends, listener } = asked;
        let mut session = self.session(&prompt)?;
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
        self.parts += usize::from(self.running.iter().any(|running| running.answering.reads_prompt()));
        let mut answers: Vec<_> = self.running.iter_mut().map(|r| (&mut r.session, &mut r.answering)).collect();
        let tokens = step(&mut answers)?;
        for (running, token) in self.running.iter_mut().zip(tokens) {
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
        if self.parts >= PARTS || self.parts > 0 && self.running.is_empty() {
            B::memory_cleanup(&self.model.device());
            self.parts = 0;
        }
        Ok(())
    }

    /// Tells the listener of an answer that it has ended. Its session waits for the next prompt.
    fn complete(&mut self, running: Running<'a, B, L>) {
        let Running { mut session, answering, growing, mut listener, failure } = running;
        let generation = failure.map_or_else(|| answering.into_generation().map_err(CliError::from), Err);
        let answer = generation.and_then(|generation| growing.finish(generation, &self.text.tokenizer));
        if answer.is_err() {
            // What it has computed is worth nothing.
            session.forget();
        }
        let answer = answer.map(|(answer, rest)| {
            if !rest.is_empty() {
                listener.hear(&rest, &answer.generation);
            }
            answer
        });
        listener.complete(answer);
        self.waiting.push(session);
    }

    /// The session that answers a prompt: the one that has read most of it, if that is half of the prompt or half of what it
    /// has read, so that it is the same conversation. Or else one that was never used, or was used longest ago.
    fn session(&mut self, prompt: &[u32]) -> Result<Session<'a, B>, CliError> {
        let shared = |i: &usize| self.waiting[*i].cached(prompt);
        let same = |i: &usize| shared(i) > 0 && 2 * shared(i) >= prompt.len().min(self.waiting[*i].tokens());
        match (0..self.waiting.len()).max_by_key(shared).filter(same) {
            Some(best) => Ok(self.waiting.remove(best)),
            None if self.waiting.len() + self.running.len() < self.most => Ok(Session::new(self.model, self.capacity)?),
            None => Ok(self.waiting.remove(0)),
        }
    }
}
