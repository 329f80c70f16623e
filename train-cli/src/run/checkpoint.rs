//! What a checkpoint of a run holds: `checkpoint-<step>/` has the master weights as they are stored, the optimizer's state, the
//! state of the run, and the model's small files. [`super::saving`] writes them. This file verifies and reads them, and
//! [`super::resume`] chooses the checkpoint that a run resumes from.
//!
//! What a step computes depends on its number and on the epochs before it, so that these files are all that a resumed run needs.

use crate::{CliError, durable, run::optimizer_file, settings::Settings, train::guard};
use backend_nvfp4::{LinearSpec, Nvfp4Linear, Scaling};
use burn::tensor::backend::Backend;
use model_qwen3::{
    container::Container,
    file, json,
    model::Qwen3,
    safetensors::WHOLE,
    tensors::{Stored, Tensors, row_ranges},
};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The layout of checkpoints that this program writes and reads.
const VERSION: u64 = 2;

/// The file of master weights in a checkpoint.
pub const MODEL: &str = WHOLE;
/// The file of the optimizer's states.
pub(super) const OPTIMIZER: &str = "optimizer.safetensors";
/// The file of a [`TrainerState`].
pub(super) const STATE: &str = "trainer_state.json";
/// Largest file of a state that is read. It has about 4 KB, and a hundred bytes for each step that is left out.
const LARGEST_STATE: u64 = 64 << 20;

/// The settings of a run, in its folder.
pub const CONFIG: &str = "config.toml";
/// The folder in a run folder that holds the exported model.
pub const FINAL: &str = "final";
/// The start of the name of a checkpoint that was set aside.
pub(super) const STALE: &str = "stale-";

/// How files store the output head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HeadStorage {
    /// The head is the embedding.
    Tied,
    /// The head is a tensor of its own and is not quantized.
    Dense,
    /// The head is a tensor of its own in NVFP4.
    Nvfp4,
}

impl HeadStorage {
    /// The head of a model.
    pub fn of<B: Backend>(model: &Qwen3<B>) -> Self {
        match &model.lm_head {
            None => Self::Tied,
            Some(Nvfp4Linear::Dense(_)) => Self::Dense,
            Some(_) => Self::Nvfp4,
        }
    }
}

/// The state of a run besides its tensors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainerState {
    /// Version of the checkpoint layout.
    version: u64,
    /// Optimizer steps done.
    pub global_step: usize,
    /// Optimizer steps of the whole run.
    pub max_steps: usize,
    /// Number of passes over the data that are done. It decides with which row the next step begins.
    pub epoch: f64,
    /// SHA-256 of the training files, config.json, the tokenizer and the chat template.
    pub inputs_sha256: String,
    /// Number format of activations.
    pub precision: String,
    /// How files store the output head.
    pub head: HeadStorage,
    /// Whether exported NVFP4 weights have a tensor scale.
    pub two_level: bool,
    /// Gradient norm of the last step, which the next step may use for clipping.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_norm: Option<f32>,
    /// Seconds of the training, with evaluations, sample answers and checkpoints, in all processes of the run.
    #[serde(default)]
    pub seconds: f64,
    /// Seconds of a sample answer before the first step, for the estimate of the time that is left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answering: Option<f64>,
    /// Steps that are left out.
    #[serde(default)]
    pub guard: guard::Record,
    /// Whether the answers of the training rows think, if their chat template knows thoughts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thinking: Option<bool>,
    /// The settings of the run, with absolute paths.
    pub settings: Settings,
}

impl TrainerState {
    /// The state of a run of `max_steps` steps before its first step.
    pub fn new(settings: Settings, max_steps: usize, inputs_sha256: &str, spec: LinearSpec, head: HeadStorage) -> Self {
        Self {
            version: VERSION,
            global_step: 0,
            max_steps,
            epoch: 0.0,
            inputs_sha256: inputs_sha256.to_owned(),
            precision: spec.precision.name().to_owned(),
            head,
            two_level: spec.scaling == Scaling::Two,
            last_norm: None,
            seconds: 0.0,
            answering: None,
            guard: guard::Record::default(),
            thinking: None,
            settings: settings.absolute(),
        }
    }

    /// This state, after the steps of a checkpoint.
    #[must_use]
    pub fn after(self, saved: &Self) -> Self {
        let Self { global_step, epoch, last_norm, seconds, answering, ref guard, .. } = *saved;
        Self { global_step, epoch, last_norm, seconds, answering, guard: guard.clone(), ..self }
    }

    /// Scale levels of exported NVFP4 weights.
    pub fn scaling(&self) -> Scaling {
        if self.two_level { Scaling::Two } else { Scaling::Single }
    }
}

/// Verifies a checkpoint and reads its state.
///
/// # Errors
/// If the checkpoint is missing or broken, holds weights or optimizer states that are not finite or do not belong together,
/// or has another layout.
pub fn open(folder: &Path) -> Result<TrainerState, CliError> {
    is_there(folder)?;
    durable::verify(folder)?;
    let state = read_state(folder)?;
    plausible(folder, &state)?;
    let weights = Container::open(&folder.join(MODEL))?;
    all_finite(&weights)?;
    let form = optimizer_file::StateLayout::of(&state.settings, &state.precision);
    optimizer_file::judge(&folder.join(OPTIMIZER), &weights, form, state.global_step)?;
    Ok(state)
}

/// Verifies the state of a checkpoint, none of its other files, and reads it.
pub(super) fn verified_state(folder: &Path) -> Result<TrainerState, CliError> {
    is_there(folder)?;
    durable::verify_listed(folder, |name| name == STATE)?;
    let state = read_state(folder)?;
    plausible(folder, &state)?;
    Ok(state)
}

/// Refuses the path of a checkpoint where there is no folder.
fn is_there(folder: &Path) -> Result<(), CliError> {
    if folder.is_dir() {
        return Ok(());
    }
    Err(CliError::Usage(format!("{}: no such checkpoint folder", folder.display())))
}

/// Refuses numbers that no run writes.
fn plausible(folder: &Path, state: &TrainerState) -> Result<(), CliError> {
    let bad = |text: String| Err(CliError::corrupt(&folder.join(STATE), text));
    let (done, steps) = (state.global_step, state.max_steps);
    if done > steps {
        return bad(format!("global_step is {done}, and max_steps {steps}"));
    }
    if let Some(named) = step_of(folder).filter(|named| *named != done) {
        return bad(format!("global_step is {done}, but the folder is that of step {named}"));
    }
    let numbers = [
        ("epoch", Some(state.epoch)),
        ("seconds", Some(state.seconds)),
        ("answering", state.answering),
        ("last_norm", state.last_norm.map(f64::from)),
    ];
    for (key, value) in numbers {
        if let Some(value) = value.filter(|value| !(value.is_finite() && *value >= 0.0)) {
            return bad(format!("{key} is {value}"));
        }
    }
    Ok(())
}

/// Whether a folder is a checkpoint, which may be damaged.
pub fn is_checkpoint(folder: &Path) -> bool {
    folder.join(STATE).exists()
}

/// The state that a checkpoint keeps beside its weights. None if the folder is no checkpoint; one that is gets verified.
///
/// # Errors
/// As [`open`].
pub fn state_beside(folder: &Path) -> Result<Option<TrainerState>, CliError> {
    if is_checkpoint(folder) { open(folder).map(Some) } else { Ok(None) }
}

/// Refuses master weights that are not finite: a run that resumed from them would be lost.
fn all_finite(tensors: &Container) -> Result<(), CliError> {
    for name in tensors.names() {
        // Reading refuses what is not finite.
        match tensors.stored(&name) {
            Some(Stored::Packed { .. }) => drop(tensors.read_packed(&name)?),
            Some(Stored::Dense { shape, .. }) => {
                row_ranges(&shape, 1 << 21).try_for_each(|rows| tensors.read_rows(&name, rows).map(drop))?;
            }
            None => {}
        }
    }
    Ok(())
}

/// The file of a checkpoint's state, and what it holds.
pub(super) fn recorded(folder: &Path) -> Result<(PathBuf, serde_json::Value), CliError> {
    let path = folder.join(STATE);
    let text = file::read_text(&path, LARGEST_STATE, "").map_err(CliError::damaged(&path))?;
    let state = json::parse(&text).map_err(|e| CliError::corrupt(&path, e))?;
    Ok((path, state))
}

/// Reads the state of a checkpoint without verifying its files.
///
/// # Errors
/// If it is missing or broken, or has another layout.
pub(super) fn read_state(folder: &Path) -> Result<TrainerState, CliError> {
    let (path, state) = recorded(folder)?;
    // Another layout has other fields: the version is checked before they are read.
    if state["version"].as_u64() != Some(VERSION) {
        let moments = match state["settings"]["optimizer_state_mode"].as_str() {
            Some("nvfp4") => " with NVFP4 optimizer moments, which no longer exist",
            _ => "",
        };
        return Err(CliError::Usage(format!(
            "{0}: the checkpoint has layout version {1}{moments}; this train-cli reads version {VERSION}. Resume or export \
             it with the train-cli that wrote it, or start a new run from its weights: train-cli fit -m {0}",
            folder.display(),
            state["version"],
        )));
    }
    serde_json::from_value(state).map_err(|e| CliError::corrupt(&path, e))
}

/// A run's checkpoints, newest first.
///
/// # Errors
/// If the run folder cannot be read.
pub fn list(run: &Path) -> Result<Vec<(usize, PathBuf)>, CliError> {
    let mut found: Vec<(usize, PathBuf)> = Vec::new();
    for entry in std::fs::read_dir(run).map_err(CliError::io(run))? {
        let path = entry.map_err(CliError::io(run))?.path();
        // A file or a pipe of such a name is no checkpoint.
        if let Some(step) = step_of(&path).filter(|_| path.is_dir()) {
            found.push((step, path));
        }
    }
    found.sort_by_key(|(step, _)| std::cmp::Reverse(*step));
    Ok(found)
}

/// The step in the name of a checkpoint's folder, if it is one.
pub(super) fn step_of(folder: &Path) -> Option<usize> {
    let step = folder.file_name()?.to_str()?.strip_prefix("checkpoint-")?;
    step.parse().ok().filter(|_| step.bytes().all(|b| b.is_ascii_digit()))
}
