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
    generate::{Answering, GenerateOptions, Session, StopReason, step},
    model::Qwen3,
};

/// A prompt to answer, and who hears the answer.
pub struct Job<L> {
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

    /// Hears text of the answer.
    fn hear(&mut self, piece: &str);

    /// Hears that the answer is complete.
    fn complete(self, answer: Answer);
}

/// The answers that are being made, and the sessions that wait for a prompt.
pub struct Batch<'a, B: Nvfp4Kernels, L> {
    model: &'a Qwen3<B>,
    text: &'a TextFiles,
    /// Tokens of a prompt and its answer, at most.
    capacity: usize,
    /// Answers that are made at once, at most.
    most: usize,
    waiting: Vec<Session<'a, B>>,
    running: Vec<Running<'a, B, L>>,
}

struct Running<'a, B: Nvfp4Kernels, L> {
    session: Session<'a, B>,
    answering: Answering,
    growing: Growing,
    listener: L,
}

impl<'a, B: Nvfp4Kernels, L: Listener> Batch<'a, B, L> {
    /// A batch of at most `most` answers. Prompt and answer together have at most `capacity` tokens. A session is made when
    /// it is first needed.
    pub fn new(model: &'a Qwen3<B>, text: &'a TextFiles, capacity: usize, most: usize) -> Self {
        Self { model, text, capacity, most, waiting: vec![], running: vec![] }
    }

    /// Makes all sessions now, so that memory that is missing is missed before an answer begins.
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
    pub fn begin(&mut self, job: Job<L>) -> Result<(), CliError> {
        let Job { prompt, options, ends, listener } = job;
        let mut session = self.session(&prompt)?;
        let growing = Growing::new(prompt.len(), session.cached(&prompt), &ends);
        let answering = Answering::new(&mut session, &prompt, &options)?;
        self.running.push(Running { session, answering, growing, listener });
        Ok(())
    }

    /// Makes the next token of every answer, and tells the listeners.
    ///
    /// # Errors
    /// If the device or the tokenizer fails.
    pub fn step(&mut self) -> Result<(), CliError> {
        let mut parts: Vec<_> = self.running.iter_mut().map(|r| (&mut r.session, &mut r.answering)).collect();
        let tokens = step(&mut parts)?;
        for (running, token) in self.running.iter_mut().zip(tokens) {
            let piece = token.map(|id| running.growing.push(id, &self.text.tokenizer)).transpose()?;
            if let Some(piece) = piece.filter(|piece| !piece.is_empty()) {
                running.listener.hear(&piece);
            }
            if running.growing.has_ended() || !running.listener.listens() {
                running.answering.end(StopReason::Caller);
            }
        }
        for Running { session, answering, growing, mut listener } in
            self.running.extract_if(.., |running| running.answering.has_ended())
        {
            let (answer, rest) = growing.finish(answering.into_generation(), &self.text.tokenizer)?;
            if !rest.is_empty() {
                listener.hear(&rest);
            }
            listener.complete(answer);
            self.waiting.push(session);
        }
        Ok(())
    }

    /// The session that answers a prompt.
    fn session(&mut self, prompt: &[u32]) -> Result<Session<'a, B>, CliError> {
        let shared = |session: &Session<'_, B>| session.cached(prompt);
        let best = (0..self.waiting.len()).max_by_key(|i| shared(&self.waiting[*i]));
        match best {
            // A new session costs memory, but keeps what the others have read.
            Some(best) if shared(&self.waiting[best]) > 0 || self.waiting.len() + self.running.len() >= self.most => {
                Ok(self.waiting.remove(best))
            }
            _ => Ok(Session::new(self.model, self.capacity)?),
        }
    }
}
