//! Which checkpoint a run resumes from: the one that was named, or the newest good one of its run. A run that ended before its
//! first checkpoint begins again. The checkpoint that is chosen loads the model and the optimizer of the resumed run.

use super::checkpoint::{
    CONFIG, FINAL, HeadStorage, MODEL, OPTIMIZER, STALE, TrainerState, is_checkpoint, list, open, recorded, step_of,
    verified_state,
};
use crate::{
    CliError, durable, progress::Reading, replaced::STEP_MODE, report, run::optimizer_file, run::results::RESULTS,
    settings::ResumeFrom, train::chunked_adamw::ChunkedAdamw,
};
use backend_nvfp4::{LinearSpec, MasterKind, Nvfp4Kernels, Packed};
use model_qwen3::{
    ModelError,
    config::Qwen3Config,
    container::Container,
    model::Qwen3,
    names,
    tensors::{Put, Stored, Tensors},
    weights::{self, Purpose},
};
use std::{
    ops::Range,
    path::{Path, PathBuf},
};

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

/// Finds where a run resumes; the latest checkpoint is that of `output_dir`. None if nothing is to be resumed. Only the state of
/// the checkpoint is verified and read, which is fast. [`verified`] reads the rest, once it is known that the run can resume.
///
/// # Errors
/// If there is no such checkpoint or run, the state of the checkpoint is broken, or it has another layout.
pub fn find(from: &ResumeFrom, output_dir: Option<&Path>) -> Result<Option<Resume>, CliError> {
    let usage = |text: String| CliError::Usage(text);
    let Some((run, folder)) = named(from, output_dir)? else { return Ok(None) };
    if folder.is_none() && has_not_begun(&run, from)? {
        return Ok(Some(Resume::Beginning(run)));
    }
    if !run.is_dir() {
        let text = "there is no such checkpoint and no such run folder";
        return Err(usage(format!("--resume-from-checkpoint {}: {text}", run.display())));
    }
    let same = |a: &Path, b: &Path| a.canonicalize().ok() == b.canonicalize().ok();
    if let Some(dir) = output_dir.filter(|dir| !same(dir, &run)) {
        let text = format!("--output-dir {}: the checkpoint belongs to {}", dir.display(), run.display());
        return Err(usage(text + "; leave out --output-dir"));
    }
    let (folder, state) = match folder {
        Some(folder) => {
            let state = verified_state(&folder)?;
            (folder, state)
        }
        None => match newest_state(&run)? {
            Some(found) => found,
            // The state of every checkpoint is broken: `latest` returns the error.
            None => latest(&run)?,
        },
    };
    refuse_whole_graphs(&folder)?;
    Ok(Some(Resume::At(Box::new(Resumed { run, folder, state }))))
}

/// Verifies all files of the checkpoint that [`find`] has found. If it is broken and was not named, the newest good checkpoint of
/// its run is taken.
///
/// # Errors
/// If the checkpoint that was named is broken, or every checkpoint of the run.
pub fn verified(from: &ResumeFrom, found: Resumed) -> Result<Resumed, CliError> {
    let (folder, state) = match named(from, Some(found.run.as_path()))? {
        Some((_, Some(folder))) => {
            let state = open(&folder)?;
            (folder, state)
        }
        _ => latest(&found.run)?,
    };
    refuse_whole_graphs(&folder)?;
    Ok(Resumed { folder, state, ..found })
}

/// The folder of the run that is to be resumed, if there is one.
///
/// # Errors
/// If nothing says which run that is, or a checkpoint lies in no run folder.
pub fn resumed_run(from: &ResumeFrom, output_dir: Option<&Path>) -> Result<Option<PathBuf>, CliError> {
    let Some((run, _)) = named(from, output_dir)?.filter(|(run, _)| run.is_dir()) else { return Ok(None) };
    // Nothing is written into a folder that is no run.
    let holds_a_run =
        run.join(CONFIG).exists() || !list(&run)?.is_empty() || has_results(&run)? || durable::is_untouched(&run)?;
    Ok(holds_a_run.then_some(run))
}

/// The run that is to be resumed, and its checkpoint, if one is named. None if nothing is to be resumed.
fn named(from: &ResumeFrom, output_dir: Option<&Path>) -> Result<Option<(PathBuf, Option<PathBuf>)>, CliError> {
    Ok(match (from, output_dir) {
        (ResumeFrom::Nothing, _) => None,
        (ResumeFrom::Latest, None) => {
            let text = "--resume-from-checkpoint needs the run folder; give --output-dir RUN";
            return Err(CliError::Usage(text.into()));
        }
        (ResumeFrom::Latest, Some(run)) => Some((run.to_owned(), None)),
        (ResumeFrom::Path(given), _) if is_checkpoint(given) || step_of(given).is_some() => {
            let checkpoint = in_its_run(given);
            let run = durable::parent(&checkpoint).to_owned();
            // A run of an older version has no run.json.
            if checkpoint.is_dir() && !run.join(CONFIG).is_file() {
                let (shown, around) = (given.display(), run.display());
                let model = report::quoted(&shown.to_string());
                return Err(CliError::Usage(format!(
                    "--resume-from-checkpoint {shown}: it lies in {around}, which is no run folder, and the resumed run would \
                     write there; put the checkpoint back into its run, or start a new run from its weights: train-cli fit -m {model}"
                )));
            }
            Some((run, Some(checkpoint)))
        }
        (ResumeFrom::Path(given), _) => Some((given.clone(), None)),
    })
}

/// The path of a checkpoint in its own run. If the given path is a link, or `.`, the folder above it is not that run. A path that
/// is neither stays as it was typed.
fn in_its_run(given: &Path) -> PathBuf {
    let Ok(real) = given.canonicalize() else { return given.to_owned() };
    let above = durable::parent(given).canonicalize();
    let as_typed = given.file_name().zip(above.ok()).map(|(name, run)| run.join(name));
    if as_typed.as_ref() == Some(&real) { given.to_owned() } else { real }
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

/// Whether the checkpoint of an error may be good: it has another layout, or the system refuses to read it. No older one is
/// taken in its place.
fn is_not_damage(error: &CliError) -> bool {
    matches!(error, CliError::Usage(_)) || error.is_of_the_system()
}

/// The newest checkpoint of a run whose state is good, whatever its other files are.
fn newest_state(run: &Path) -> Result<Option<(PathBuf, TrainerState)>, CliError> {
    for (_, folder) in list(run)? {
        match verified_state(&folder) {
            Ok(state) => return Ok(Some((folder, state))),
            Err(error) if is_not_damage(&error) => return Err(error),
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
/// If a checkpoint has another layout, or the system refuses to read one.
pub fn newest(run: &Path, most: usize) -> Result<Option<Resumed>, CliError> {
    let mut found = None;
    for (step, folder) in list(run)? {
        match open(&folder) {
            Ok(state) => found = Some(Resumed { run: run.to_owned(), folder, state }),
            Err(error) if is_not_damage(&error) => return Err(error),
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
