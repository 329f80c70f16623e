//! Checkpoints of a run: `checkpoint-<step>/` holds the master weights as they are stored, the optimizer's state, the
//! state of the run, and the model's small files. [`super::saving`] writes them; this file finds, judges and reads them.
//!
//! What a step computes depends on its number alone, so that these files are all that a resumed run needs.

use crate::{
    CliError, durable,
    progress::Reading,
    replaced::STEP_MODE,
    report,
    run::optimizer_file,
    run::results::RESULTS,
    settings::{ResumeFrom, Settings},
    train::chunked_adamw::ChunkedAdamw,
    train::guard,
};
use backend_nvfp4::{LinearSpec, MasterKind, Nvfp4Kernels, Nvfp4Linear, Packed, Scaling};
use burn::tensor::backend::Backend;
use model_qwen3::{
    ModelError,
    config::Qwen3Config,
    container::Container,
    file, json,
    model::Qwen3,
    names,
    safetensors::WHOLE,
    tensors::{Put, Stored, Tensors, row_ranges},
    weights::{self, Purpose},
};
use serde::{Deserialize, Serialize};
use std::{
    ops::Range,
    path::{Path, PathBuf},
};

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
    /// Passes over the data done.
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
    /// Seconds that the steps took.
    #[serde(default)]
    pub seconds: f64,
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
            guard: guard::Record::default(),
            thinking: None,
            settings: settings.absolute(),
        }
    }

    /// This state, after the steps of a checkpoint.
    #[must_use]
    pub fn after(self, saved: &Self) -> Self {
        let Self { global_step, epoch, last_norm, seconds, ref guard, .. } = *saved;
        Self { global_step, epoch, last_norm, seconds, guard: guard.clone(), ..self }
    }

    /// Scale levels of exported NVFP4 weights.
    pub fn scaling(&self) -> Scaling {
        if self.two_level { Scaling::Two } else { Scaling::Single }
    }
}

/// A checkpoint to resume from.
#[derive(Debug, Clone)]
pub struct Resumed {
    /// The run folder.
    pub run: PathBuf,
    /// The checkpoint's folder.
    pub folder: PathBuf,
    /// The state of the run when the checkpoint was saved.
    pub state: TrainerState,
}

/// Where a run resumes.
#[derive(Debug, Clone)]
pub enum Resume {
    /// After the steps of a checkpoint.
    At(Box<Resumed>),
    /// At its beginning: the process ended before the first checkpoint of this run folder.
    Beginning(PathBuf),
}

/// Finds the checkpoint that is to be resumed; the latest is one of `output_dir`. None if nothing is to be resumed. Only its
/// state is verified and read, which is fast: [`verified`] reads the rest, once the run that resumes is known to be possible.
///
/// # Errors
/// If there is no such checkpoint or run, the state of the checkpoint is broken, or it has another layout.
pub fn resume(from: &ResumeFrom, output_dir: Option<&Path>) -> Result<Option<Resume>, CliError> {
    let usage = |text: String| CliError::Usage(text);
    let Some((run, folder)) = named(from, output_dir)? else { return Ok(None) };
    if folder.is_none() && has_not_begun(run, from)? {
        return Ok(Some(Resume::Beginning(run.to_owned())));
    }
    if !run.is_dir() {
        let text = "there is no such checkpoint and no such run folder";
        return Err(usage(format!("--resume-from-checkpoint {}: {text}", run.display())));
    }
    let same = |a: &Path, b: &Path| a.canonicalize().ok() == b.canonicalize().ok();
    if let Some(dir) = output_dir.filter(|dir| !same(dir, run)) {
        let text = format!("--output-dir {}: the checkpoint belongs to {}", dir.display(), run.display());
        return Err(usage(text + "; leave out --output-dir"));
    }
    let (folder, state) = match folder {
        Some(folder) => (folder.to_owned(), verified_state(folder)?),
        None => match newest_state(run)? {
            Some(found) => found,
            // It says what is wrong.
            None => latest(run)?,
        },
    };
    refuse_whole_graphs(&folder)?;
    Ok(Some(Resume::At(Box::new(Resumed { run: run.to_owned(), folder, state }))))
}

/// The checkpoint that [`resume`] has found, with all its files verified: if it was not named and is broken, the newest good one
/// of its run.
///
/// # Errors
/// If the checkpoint that was named is broken, or every checkpoint of the run.
pub fn verified(from: &ResumeFrom, found: Resumed) -> Result<Resumed, CliError> {
    let (folder, state) = match named(from, Some(found.run.as_path()))? {
        Some((_, Some(folder))) => (folder.to_owned(), open(folder)?),
        _ => latest(&found.run)?,
    };
    refuse_whole_graphs(&folder)?;
    Ok(Resumed { folder, state, ..found })
}

/// The folder of the run that is to be resumed, if there is one.
///
/// # Errors
/// If nothing says which run that is.
pub fn resumed_run(from: &ResumeFrom, output_dir: Option<&Path>) -> Result<Option<PathBuf>, CliError> {
    let Some((run, _)) = named(from, output_dir)?.filter(|(run, _)| run.is_dir()) else { return Ok(None) };
    // Nothing is written into a folder that is no run.
    let is_run =
        run.join(CONFIG).exists() || !list(run)?.is_empty() || has_results(run)? || durable::is_untouched(run)?;
    Ok(is_run.then(|| run.to_owned()))
}

/// The run that is to be resumed, and its checkpoint, if one is named. None if nothing is to be resumed.
fn named<'a>(
    from: &'a ResumeFrom,
    output_dir: Option<&'a Path>,
) -> Result<Option<(&'a Path, Option<&'a Path>)>, CliError> {
    Ok(match (from, output_dir) {
        (ResumeFrom::Nothing, _) => None,
        (ResumeFrom::Latest, None) => {
            let text = "--resume-from-checkpoint needs the run folder; give --output-dir RUN";
            return Err(CliError::Usage(text.into()));
        }
        (ResumeFrom::Latest, Some(run)) => Some((run, None)),
        (ResumeFrom::Path(given), _) if given.join(STATE).exists() || step_of(given).is_some() => {
            let parent = durable::parent(given);
            Some((parent, Some(given.as_path())))
        }
        (ResumeFrom::Path(given), _) => Some((given.as_path(), None)),
    })
}

/// Refuses the checkpoint of a run that made its steps in another way, which clipped by another norm.
fn refuse_whole_graphs(folder: &Path) -> Result<(), CliError> {
    let (_, state) = recorded(folder)?;
    if state["settings"]["step_mode"] != "whole" {
        return Ok(());
    }
    Err(CliError::Usage(format!(
        "{0}: the run was begun with --step-mode whole: {STEP_MODE}. Start a new run from its weights: train-cli fit -m {0}",
        folder.display()
    )))
}

/// Whether a run folder holds no checkpoint because its process ended before the first one. It holds the settings of the
/// run, or nothing of it; a process that ended still earlier has not made the folder.
fn has_not_begun(run: &Path, from: &ResumeFrom) -> Result<bool, CliError> {
    if !run.exists() {
        return Ok(*from == ResumeFrom::Latest);
    }
    if !run.is_dir() || !list(run)?.is_empty() || has_results(run)? {
        return Ok(false);
    }
    Ok(run.join(CONFIG).exists() || durable::is_untouched(run)?)
}

/// Whether a run folder holds what a run that begins again would delete.
pub(super) fn has_results(run: &Path) -> Result<bool, CliError> {
    for entry in std::fs::read_dir(run).map_err(CliError::io(run))? {
        if is_result(&entry.map_err(CliError::io(run))?.file_name().to_string_lossy()) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether an entry of a run folder is there only after the run has trained: its export, its record, a checkpoint that was
/// set aside.
pub(super) fn is_result(name: &str) -> bool {
    [FINAL, RESULTS].contains(&name) || name == durable::aside_name(FINAL) || name.starts_with(STALE)
}

/// The newest checkpoint of a run whose state is good, whatever its other files are.
fn newest_state(run: &Path) -> Result<Option<(PathBuf, TrainerState)>, CliError> {
    for (_, folder) in list(run)? {
        match verified_state(&folder) {
            Ok(state) => return Ok(Some((folder, state))),
            Err(error @ CliError::Usage(_)) => return Err(error),
            Err(_) => {}
        }
    }
    Ok(None)
}

/// The newest good checkpoint of a run. Names the broken checkpoints that it skips.
fn latest(run: &Path) -> Result<(PathBuf, TrainerState), CliError> {
    match newest(run, usize::MAX)? {
        Some(Resumed { folder, state, .. }) => Ok((folder, state)),
        None if has_results(run)? && list(run)?.is_empty() => Err(CliError::Usage(format!(
            "{} has no checkpoint to resume from, and holds what a run has left; start a new run in another folder",
            run.display()
        ))),
        None if list(run)?.is_empty() => {
            Err(CliError::Usage(format!("{} has no checkpoint to resume from; start a new run", run.display())))
        }
        None => Err(CliError::corrupt(
            run,
            "every checkpoint is damaged, so that there is nothing to resume from; start a new run in another folder",
        )),
    }
}

/// The newest good checkpoint of at most `most` steps; the oldest good one if all have more; None if none is good. Names
/// the broken checkpoints that it skips.
///
/// # Errors
/// If a checkpoint has another layout, or the system fails.
pub fn newest(run: &Path, most: usize) -> Result<Option<Resumed>, CliError> {
    let mut found = None;
    for (step, folder) in list(run)? {
        match open(&folder) {
            Ok(state) => found = Some(Resumed { run: run.to_owned(), folder, state }),
            Err(error @ CliError::Usage(_)) => return Err(error),
            Err(error) => {
                report::line(format!("warning: skipping {}: {error}", folder.display()));
                continue;
            }
        }
        if step <= most {
            break;
        }
    }
    Ok(found)
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
fn verified_state(folder: &Path) -> Result<TrainerState, CliError> {
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
    let numbers =
        [("epoch", Some(state.epoch)), ("seconds", Some(state.seconds)), ("last_norm", state.last_norm.map(f64::from))];
    for (key, value) in numbers {
        if let Some(value) = value.filter(|value| !(value.is_finite() && *value >= 0.0)) {
            return bad(format!("{key} is {value}"));
        }
    }
    Ok(())
}

/// The state that a checkpoint keeps beside its weights. None if the folder is no checkpoint; one that is gets verified.
///
/// # Errors
/// As [`open`].
pub fn state_beside(folder: &Path) -> Result<Option<TrainerState>, CliError> {
    if folder.join(STATE).exists() { open(folder).map(Some) } else { Ok(None) }
}

/// Refuses master weights that are not finite: a run that resumed from them would be lost.
fn all_finite(tensors: &Container) -> Result<(), CliError> {
    let bad = |name: &str, value: f32| CliError::corrupt(tensors.path(), format!("{name:?} holds the value {value}"));
    for name in tensors.names() {
        match tensors.stored(&name) {
            Some(Stored::Packed { .. }) => {
                let packed = tensors.read_packed(&name)?;
                if !packed.global.is_finite() {
                    return Err(bad(&name, packed.global));
                }
                // E4M3 has no infinity, and its NaN has all bits but the sign.
                if packed.scales.iter().any(|scale| scale & 0x7f == 0x7f) {
                    return Err(bad(&name, f32::NAN));
                }
            }
            Some(Stored::Dense { shape, .. }) => {
                for rows in row_ranges(&shape, 1 << 21) {
                    let values = tensors.read_rows(&name, rows)?;
                    if let Some(value) = values.iter().find(|value| !value.is_finite()) {
                        return Err(bad(&name, *value));
                    }
                }
            }
            None => {}
        }
    }
    Ok(())
}

/// The file of a checkpoint's state, and what it holds.
fn recorded(folder: &Path) -> Result<(PathBuf, serde_json::Value), CliError> {
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

impl Resumed {
    /// Loads the master weights.
    ///
    /// # Errors
    /// If the file does not fit the model.
    pub fn model<B: Nvfp4Kernels>(
        &self,
        config: &Qwen3Config,
        spec: LinearSpec,
        master: MasterKind,
        device: &B::Device,
    ) -> Result<Qwen3<B>, CliError> {
        let tensors = &Container::open(&self.folder.join(MODEL))?;
        let saved = Masters { tensors, quantized_head: self.state.head == HeadStorage::Nvfp4 };
        Ok(weights::load(&Reading::of(&saved, "loading"), config, spec, Purpose::Train(master), device)?)
    }

    /// Puts the optimizer's states back.
    ///
    /// # Errors
    /// If the file does not fit the model.
    pub fn optimizer<B: Nvfp4Kernels>(
        &self,
        model: &Qwen3<B>,
        optimizer: &mut ChunkedAdamw<B>,
    ) -> Result<(), CliError> {
        optimizer_file::read(&self.folder.join(OPTIMIZER), model, optimizer, self.state.global_step)
    }
}

/// The master weights of a checkpoint. The file stores the head as floats; training quantizes it if the model's own
/// files did.
struct Masters<'a> {
    tensors: &'a Container,
    quantized_head: bool,
}

impl Tensors for Masters<'_> {
    fn keeps_codes(&self, name: &str) -> bool {
        matches!(self.tensors.stored(name), Some(Stored::Packed { .. }))
    }

    fn path(&self) -> &Path {
        self.tensors.path()
    }

    fn names(&self) -> Vec<String> {
        self.tensors.names()
    }

    fn stored(&self, name: &str) -> Option<Stored> {
        self.tensors.stored(name)
    }

    fn trains_quantized(&self, name: &str) -> bool {
        name == names::HEAD && self.quantized_head
    }

    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<Vec<f32>, ModelError> {
        self.tensors.read_rows(name, rows)
    }

    fn put_rows(&self, name: &str, rows: Range<usize>, put: Put) -> Result<(), ModelError> {
        self.tensors.put_rows(name, rows, put)
    }

    fn read_packed(&self, name: &str) -> Result<Packed, ModelError> {
        self.tensors.read_packed(name)
    }
}
