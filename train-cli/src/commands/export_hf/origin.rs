//! The run that made the model of an export: its folder, its settings, and the step after which the weights are those of the model.

use crate::{
    CliError,
    model_files::ModelFiles,
    run::{
        checkpoint::{CONFIG, FINAL, TrainerState},
        history::is_run,
        results::Results,
    },
    settings::{Layer, Settings},
};
use std::path::{Path, PathBuf};

/// What is known of the run.
pub(super) struct ExportOrigin {
    /// Its folder, if the model is in it.
    pub(super) run: Option<PathBuf>,
    /// Its settings, with absolute paths.
    pub(super) settings: Option<Settings>,
    /// The step of the model.
    pub(super) step: Option<usize>,
    /// The record of the run, if it is complete.
    pub(super) results: Option<Results>,
}

impl ExportOrigin {
    /// The run of a model. `state` is that of a checkpoint.
    ///
    /// # Errors
    /// If the folder of the run cannot be read.
    pub(super) fn of(files: &ModelFiles, state: Option<&TrainerState>) -> Result<Self, CliError> {
        let run = run_of(&files.folder, state.is_some())?;
        let results = run.as_deref().map(Results::whole).transpose()?.flatten();
        let settings = match (state, &run) {
            (Some(state), _) => Some(state.settings.clone()),
            (None, Some(run)) => Some(Layer::of_file(&run.join(CONFIG))?.over_defaults()?),
            (None, None) => None,
        };
        let exported = |results: &Results| results.exported_step.unwrap_or(results.global_step);
        let step = state.map(|state| state.global_step).or_else(|| results.as_ref().map(exported));
        Ok(Self { run, settings, step, results })
    }
}

/// The folder of the run that exported a folder or saved it as a checkpoint, if a run did. A folder that is neither may also lie
/// beside a config.toml.
fn run_of(folder: &Path, is_checkpoint: bool) -> Result<Option<PathBuf>, CliError> {
    let folder = folder.canonicalize().map_err(CliError::io(folder))?;
    let of_run = is_checkpoint || folder.file_name().is_some_and(|name| name == FINAL);
    Ok(folder.parent().filter(|run| of_run && is_run(run)).map(Path::to_owned))
}
