//! The thread that owns the model. It takes questions from a queue, makes all answers together, and sends each piece of an
//! answer to the connection that asked.

use super::{metrics::Metrics, refusal::Refusal};
use crate::{
    CliError, device_failure,
    model_files::TextFiles,
    talk::{
        answer::Answer,
        batch::{Batch, Listener, NewAnswer},
    },
};
use axum::http::StatusCode;
use backend_nvfp4::{DeviceMemory, Nvfp4Kernels};
use model_qwen3::{
    model::Qwen3,
    sampling::Logprobs,
    session::{GenerateOptions, Generation},
};
use std::{collections::VecDeque, sync::Arc, thread::JoinHandle};
use tokio::sync::{OwnedSemaphorePermit, mpsc};

/// One answer that is wanted.
#[derive(Debug)]
pub(super) struct Question {
    /// The tokens of the prompt.
    pub(super) prompt: Vec<u32>,
    /// How the answer is made.
    pub(super) options: GenerateOptions,
    /// Texts that end it.
    pub(super) ends: Vec<String>,
    /// Which answer of the request it is.
    pub(super) index: usize,
    /// Where its pieces go.
    pub(super) heard_by: mpsc::UnboundedSender<(usize, Piece)>,
    /// The question's place in the queue, which is free when it begins or nobody waits for it any more.
    pub(super) place: OwnedSemaphorePermit,
}

/// A piece of an answer.
#[derive(Debug)]
pub(super) enum Piece {
    /// More text, and the log probabilities of the tokens since the piece before, if they are wanted.
    Text(String, Vec<(u32, Logprobs)>),
    /// The whole answer.
    Complete(Box<Answer>),
    /// There is no answer.
    Refused(Refusal),
}

/// Makes the answers to what comes through the queue.
pub struct Engine {
    /// Questions that wait.
    pub(super) queue: mpsc::UnboundedReceiver<Question>,
    /// What is counted.
    pub(super) metrics: Arc<Metrics>,
    /// The thread of the listener, which ends when a signal arrives.
    pub(super) listener: JoinHandle<std::io::Result<()>>,
}

impl Engine {
    /// Answers until the listener has ended. At most `parallel` answers are made at once, with `tokens` tokens of prompts and
    /// answers together. When the room for these is allocated, `ready` is called.
    ///
    /// # Errors
    /// If the device or the listener fails.
    pub fn run<B: Nvfp4Kernels + DeviceMemory>(
        mut self,
        model: &Qwen3<B>,
        text: &TextFiles,
        tokens: usize,
        parallel: usize,
        ready: impl FnOnce(),
    ) -> Result<(), CliError> {
        let mut batch = Batch::new(model, text, tokens, parallel)?;
        // A device allocates when it is waited for.
        let synced = B::sync(&model.device());
        device_failure::check()?;
        synced.map_err(|e| CliError::DeviceFailed(format!("{e:?}")))?;
        ready();
        let mut waiting: VecDeque<Question> = VecDeque::new();
        loop {
            if batch.running() == 0 && waiting.is_empty() {
                let Some(question) = self.queue.blocking_recv() else { return self.ended() };
                waiting.push_back(question);
            }
            while let Ok(question) = self.queue.try_recv() {
                waiting.push_back(question);
            }
            waiting.retain(|question| !question.heard_by.is_closed());
            // Nobody overtakes a long question that waits for room.
            while waiting.front().is_some_and(|next| batch.has_room(next.prompt.len(), &next.options))
                && let Some(question) = waiting.pop_front()
            {
                self.begin(&mut batch, question);
            }
            self.metrics.waiting.set(waiting.len());
            self.metrics.running.set(batch.running());
            batch.step()?;
            self.metrics.running.set(batch.running());
        }
    }

    /// How the listener ended.
    fn ended(self) -> Result<(), CliError> {
        let ended = self.listener.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        ended.map_err(CliError::io("the listener".as_ref()))
    }

    fn begin<B: Nvfp4Kernels + DeviceMemory>(&self, batch: &mut Batch<'_, B, Ear>, question: Question) {
        let Question { prompt, options, ends, index, heard_by, place } = question;
        drop(place);
        let ear = Ear { index, told: 0, heard_by: heard_by.clone(), metrics: self.metrics.clone() };
        if let Err(error) = batch.begin(NewAnswer { prompt, options, ends, listener: ear }) {
            let refusal = Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string());
            // A client that has disconnected needs no refusal.
            let _ = heard_by.send((index, Piece::Refused(refusal)));
        }
    }
}

/// The end of a channel through which an answer is heard.
struct Ear {
    index: usize,
    /// Number of tokens whose log probabilities were sent.
    told: usize,
    heard_by: mpsc::UnboundedSender<(usize, Piece)>,
    metrics: Arc<Metrics>,
}

impl Listener for Ear {
    fn listens(&self) -> bool {
        !self.heard_by.is_closed()
    }

    fn hear(&mut self, piece: &str, generation: &Generation) {
        let tokens = generation.ids.iter().zip(&generation.logprobs).skip(self.told);
        let fresh: Vec<_> = tokens.map(|(id, logprobs)| (*id, logprobs.clone())).collect();
        self.told += fresh.len();
        // Nobody hears it any more: `listens` ends the answer.
        let _ = self.heard_by.send((self.index, Piece::Text(piece.to_owned(), fresh)));
    }

    fn complete(self, answer: Result<Answer, CliError>) {
        let piece = match answer {
            Ok(answer) => {
                self.metrics.answered(&answer);
                Piece::Complete(Box::new(answer))
            }
            Err(error) => Piece::Refused(error.into()),
        };
        let _ = self.heard_by.send((self.index, piece));
    }
}
