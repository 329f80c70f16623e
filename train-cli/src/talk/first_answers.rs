//! The rehearsal of answers: a prompt and two tokens after it, with a small model of zeros, on a device that only records which
//! kernels are launched. Those that are written in CUDA C++ are compiled while the model is loaded ([`crate::ahead`]).

use crate::{
    CliError,
    ahead::{Gpus, Rehearsal},
    device::Job,
    run::stored_model::StoredModel,
};
use backend_nvfp4::{DeviceServices, Nvfp4Kernels, Precision, Recipe};
use model_qwen3::{
    sampling::Sampling,
    session::{Answering, GenerateOptions, PREFILL_CHUNK, Session, step},
};

/// The answers that are expected, as far as kernels depend on them.
#[derive(Debug, Clone, Copy)]
pub struct Expected {
    /// Tokens of a prompt.
    pub prompt: usize,
    /// Answers that are made together, at most.
    pub together: usize,
}

/// The first answers of a model.
pub struct FirstAnswers<'a> {
    /// The model.
    pub stored: &'a StoredModel,
    /// How it computes.
    pub recipe: Recipe,
    /// Which answers are expected.
    pub expected: Expected,
}

/// The token that follows a prompt is made of its last token, and only the next one by a step of its own.
const TOKENS: usize = 2;

impl Rehearsal for FirstAnswers<'_> {
    const ON: Gpus = Gpus::All;
}

impl Job for FirstAnswers<'_> {
    type Output = ();

    fn run<B: Nvfp4Kernels + DeviceServices>(self, device: B::Device, precision: Precision) -> Result<(), CliError> {
        let Self { stored, recipe, expected } = self;
        let model = stored.outline::<B>(recipe, precision, &device)?;
        let options =
            GenerateOptions { max_tokens: TOKENS, sampling: Sampling::GREEDY, stop_ids: vec![], logprobs: None };
        // Kernels have places for a power of two tokens.
        let mut together = 1;
        while together < 2 * expected.together {
            let count = together.min(expected.together);
            // One prompt is read: of several equal chunks, one is enough. The other prompts have one token, whose forward is
            // that of an answer.
            let (chunks, rest) = (expected.prompt / PREFILL_CHUNK, expected.prompt % PREFILL_CHUNK);
            let prompt = vec![0; if together == 1 { chunks.min(1) * PREFILL_CHUNK + rest } else { 1 }];
            let new = |_| Session::new(&model, prompt.len() + TOKENS);
            let mut sessions = (0..count).map(new).collect::<Result<Vec<_>, _>>()?;
            let answers = sessions.iter_mut().map(|session| Answering::new(session, &prompt, &options));
            let mut answers = answers.collect::<Result<Vec<_>, _>>()?;
            while answers.iter().any(|answer| !answer.has_ended()) {
                step(&mut sessions.iter_mut().zip(&mut answers).collect::<Vec<_>>())?;
            }
            together *= 2;
        }
        Ok(())
    }
}
