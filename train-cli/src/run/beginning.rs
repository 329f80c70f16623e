//! What a model was before the first step of its run: its answers to the sample prompts, and its NVFP4 codes. They lie in
//! the run folder, so that a resumed run compares with them too.
//!
//! The file is safetensors: a u32 tensor of codes for each quantized layer, and the answers as JSON in the metadata.

use crate::{
    CliError, durable, report,
    run::sample_answers::{MAX_TOKENS, MAX_TOKENS_OF_RANDOM, Samples, beginning},
    train::codes::Codes,
};
use backend_nvfp4::{LinearSpec, Nvfp4Kernels};
use model_qwen3::{bytes, file, model::Qwen3};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use std::{collections::HashMap, path::Path, sync::Arc, time::Instant};

/// The file in the run folder.
pub const FILE: &str = "beginning.safetensors";
/// Largest file that is read, which is read whole. That of Qwen3-32B has 16 GB of codes.
const LARGEST: u64 = 64 << 30;

/// What a model was before its first step.
pub struct Beginning {
    /// Prompts and answers.
    answers: Vec<(String, String)>,
    /// The codes; none under a recipe that quantizes nothing.
    pub codes: Arc<Codes>,
    /// Seconds of an answer, if this was just recorded and there is one.
    pub answering: Option<f64>,
}

impl Beginning {
    /// Asks the model, and writes what it is into the run folder. A model of random weights, which `is_random` says, answers in a
    /// few tokens.
    ///
    /// # Errors
    /// If the device fails or the file cannot be written.
    pub fn record<B: Nvfp4Kernels>(
        run: &Path,
        model: &Qwen3<B>,
        samples: &Samples,
        is_random: bool,
        spec: LinearSpec,
    ) -> Result<Self, CliError> {
        let began = Instant::now();
        let most = if is_random { MAX_TOKENS_OF_RANDOM } else { MAX_TOKENS };
        let answers: Vec<_> = samples.prompts.iter().cloned().zip(samples.answers_within(most, model)?).collect();
        // Longer answers take as much longer.
        let share = MAX_TOKENS as f64 / most as f64;
        let answering = (!answers.is_empty()).then(|| began.elapsed().as_secs_f64() * share / answers.len() as f64);
        let found = Self { answers, codes: Arc::new(Codes::of(model, spec)?), answering };
        durable::write_bytes(&run.join(FILE), &found.to_bytes())?;
        Ok(found)
    }

    /// Reads the file of a run. None, and a warning, if it is missing or damaged: it serves comparisons only.
    pub fn read(run: &Path, spec: LinearSpec) -> Option<Self> {
        let path = run.join(FILE);
        let found = file::read_bytes(&path, LARGEST, "").ok().and_then(|bytes| Self::from_bytes(&bytes, spec));
        if found.is_none() {
            let text = "is missing or damaged; the run cannot say what it changed";
            report::line(format!("warning: {} {text}", path.display()));
        }
        found
    }

    /// Prints the answers before training, and those of `model` after `step` steps of `run`. The run may have logged them.
    /// Returns the share of NVFP4 codes that changed, if there are any.
    ///
    /// # Errors
    /// If the device fails, or the log cannot be read.
    pub fn compare<B: Nvfp4Kernels>(
        &self,
        model: &Qwen3<B>,
        samples: &Samples,
        run: &Path,
        step: usize,
    ) -> Result<Option<f64>, CliError> {
        let answers = match samples.logged(run, step)? {
            Some(answers) => answers,
            None => samples.answers(model)?,
        };
        for (prompt, after) in samples.prompts.iter().zip(answers) {
            if let Some((_, before)) = self.answers.iter().find(|(asked, _)| asked == prompt) {
                report::label("before", format!("{} → {}", beginning(prompt), beginning(before)));
            }
            report::label("after", format!("{} → {}", beginning(prompt), beginning(&after)));
        }
        let changed = self.codes.changed_in(model)?;
        if let Some(share) = changed {
            report::label("nvfp4", format!("{:.1}% of codes changed", share * 100.0));
        }
        Ok(changed)
    }

    fn to_bytes(&self) -> Vec<u8> {
        let layers: Vec<Vec<u8>> =
            self.codes.words().iter().map(|words| bytes::of_u32s(words.iter().copied())).collect();
        let views = layers.iter().enumerate().map(|(n, bytes)| {
            let view = TensorView::new(Dtype::U32, vec![bytes.len() / 4], bytes);
            (format!("codes.{n}"), view.expect("the data are as long as the shape says"))
        });
        let answers = serde_json::to_string(&self.answers).expect("plain data serializes");
        safetensors::serialize(views, Some(HashMap::from([("answers".to_owned(), answers)])))
            .expect("flat tensors serialize")
    }

    fn from_bytes(file: &[u8], spec: LinearSpec) -> Option<Self> {
        let (_, header) = SafeTensors::read_metadata(file).ok()?;
        let answers = serde_json::from_str(header.metadata().as_ref()?.get("answers")?).ok()?;
        let tensors = SafeTensors::deserialize(file).ok()?;
        let words = |n: usize| tensors.tensor(&format!("codes.{n}")).ok().map(|layer| bytes::to_u32s(layer.data()));
        let words: Vec<Vec<u32>> = (0..tensors.len()).map(words).collect::<Option<_>>()?;
        Some(Self { answers, codes: Arc::new(Codes::from_words(spec, words)), answering: None })
    }
}
