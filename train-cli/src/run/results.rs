//! The record of a complete run: `train_results.json` in its folder. Most of its names are those of Hugging Face's Trainer.

use super::record_file;
use crate::{
    CliError,
    durable::{self, FileRecord},
};
use model_qwen3::ModelError;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The file of the record.
pub const RESULTS: &str = "train_results.json";
/// Largest record that is read. It has less than 10 KB.
const LARGEST: u64 = 1 << 20;

/// What a run has made, when it is complete.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Results {
    /// Passes over the data.
    pub epoch: f64,
    /// Steps that are made or left out.
    pub global_step: usize,
    /// Seconds of the training, with evaluations, sample answers and checkpoints, in all processes of the run.
    pub train_runtime: f64,
    /// Rows that were read, counted each time.
    pub train_samples: f64,
    /// Rows in a second.
    pub train_samples_per_second: f64,
    /// Steps in a second.
    pub train_steps_per_second: f64,
    /// The loss of the last evaluation.
    pub eval_loss: Option<f64>,
    /// The step whose model is exported. Older records do not say: it was the last one.
    pub exported_step: Option<usize>,
    /// Percentage of the NVFP4 codes that differ from those before the first step.
    pub codes_changed_pct: Option<f64>,
    /// Steps that were left out.
    #[serde(default)]
    pub steps_left_out: usize,
    /// The file of `--output-dat`.
    pub output_dat: Option<FileRecord>,
    /// What was said about the losses.
    #[serde(default)]
    pub loss_warnings: Vec<String>,
}

impl Results {
    /// Reads the record of a run; None if there is none.
    ///
    /// # Errors
    /// If it cannot be read, or is broken.
    pub fn read(run: &Path) -> Result<Option<Self>, CliError> {
        record_file::read(&run.join(RESULTS), LARGEST)
    }

    /// Reads the record of a run; None if there is none, or if it is broken and will be made again.
    ///
    /// # Errors
    /// If the system does not let it be read.
    pub fn whole(run: &Path) -> Result<Option<Self>, CliError> {
        match Self::read(run) {
            Err(error @ (CliError::Io { .. } | CliError::Model(ModelError::Io { .. }))) => Err(error),
            read => Ok(read.unwrap_or_default()),
        }
    }

    /// Writes the record into the folder of its run.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write(&self, run: &Path) -> Result<(), CliError> {
        let text = serde_json::to_string_pretty(self).expect("plain data is always valid JSON");
        durable::write_bytes(&run.join(RESULTS), text.as_bytes()).map(|_| ())
    }
}
