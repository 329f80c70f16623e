//! The thread that owns the model. It takes questions from a queue, makes all answers together, and sends each piece where it
//! is waited for.

use super::{metrics::Metrics, refusal::Refusal};
use crate::{
    CliError,
    model_files::TextFiles,
    talk::{
        answer::Answer,
        batch::{Batch, Job, Listener},
    },
};
use axum::http::StatusCode;
use backend_nvfp4::Nvfp4Kernels;
use model_qwen3::{generate::GenerateOptions, model::Qwen3};
use std::sync::Arc;
use tokio::sync::mpsc;

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
}

/// A piece of an answer.
#[derive(Debug)]
pub(super) enum Piece {
    /// More text.
    Text(String),
    /// The whole answer.
    Complete(Box<Answer>),
    /// There is no answer.
    Refused(Refusal),
}

/// Makes the answers to what comes through the queue.
pub struct Engine {
    /// Questions that wait.
    pub(super) queue: mpsc::Receiver<Question>,
    /// What is counted.
    pub(super) metrics: Arc<Metrics>,
}

impl Engine {
    /// Answers until nobody can ask any more. `parallel` answers are made at once, each with room for `context` tokens, which is
    /// allocated now.
    ///
    /// # Errors
    /// If the device fails.
    pub fn run<B: Nvfp4Kernels>(
        mut self,
        model: &Qwen3<B>,
        text: &TextFiles,
        context: usize,
        parallel: usize,
    ) -> Result<(), CliError> {
        let mut batch = Batch::new(model, text, context, parallel);
        batch.allocate()?;
        loop {
            if batch.running() == 0 {
                let Some(question) = self.queue.blocking_recv() else { return Ok(()) };
                self.begin(&mut batch, question);
            }
            while batch.has_room()
                && let Ok(question) = self.queue.try_recv()
            {
                self.begin(&mut batch, question);
            }
            self.metrics.running.set(batch.running());
            self.metrics.waiting.set(self.queue.len());
            batch.step()?;
            self.metrics.running.set(batch.running());
        }
    }

    fn begin<B: Nvfp4Kernels>(&self, batch: &mut Batch<'_, B, Ear>, question: Question) {
        let Question { prompt, options, ends, index, heard_by } = question;
        let ear = Ear { index, heard_by: heard_by.clone(), metrics: self.metrics.clone() };
        if !ear.listens() {
            return;
        }
        if let Err(error) = batch.begin(Job { prompt, options, ends, listener: ear }) {
            let refusal = Refusal::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string());
            // Whoever has hung up needs no refusal.
            let _ = heard_by.send((index, Piece::Refused(refusal)));
        }
    }
}

/// The end of a channel through which an answer is heard.
struct Ear {
    index: usize,
    heard_by: mpsc::UnboundedSender<(usize, Piece)>,
    metrics: Arc<Metrics>,
}

impl Listener for Ear {
    fn listens(&self) -> bool {
        !self.heard_by.is_closed()
    }

    fn hear(&mut self, piece: &str) {
        // Nobody hears it any more: `listens` ends the answer.
        let _ = self.heard_by.send((self.index, Piece::Text(piece.to_owned())));
    }

    fn complete(self, answer: Answer) {
        self.metrics.answered(&answer);
        let _ = self.heard_by.send((self.index, Piece::Complete(Box::new(answer))));
    }
}
