//! The one way from a path to a model's files. The path is a model folder, a `.dat` or `.safetensors` file, a run folder (its
//! export, or its newest checkpoint), or a checkpoint. Every command that takes a model finds it here.

use super::{
    checkpoint::{CONFIG, FINAL, is_checkpoint},
    resume,
};
use crate::{
    CliError,
    durable::{self, MANIFEST},
    model_files::ModelFiles,
    report,
};
use model_qwen3::{ModelError, file};
use std::path::Path;

/// What to do if nothing is at the path.
const HINT: &str =
    "give a model folder, a run folder, a checkpoint, or a .dat or .safetensors file; convert also takes a .gguf file";

/// The files of the model at a path, which `flag` gave. Says which model of a run folder was chosen.
///
/// # Errors
/// If nothing is there, or a pipe or a device is. If it is a run folder that has nothing yet, or whose checkpoints cannot be
/// read. If it is a GGUF file.
pub fn located(flag: &str, path: &Path) -> Result<ModelFiles, CliError> {
    let exported = path.join(FINAL);
    let found = if exported.is_dir() {
        exported
    // A model folder may have a config.toml of its own. A run folder has no config.json.
    } else if path.join(CONFIG).exists() && !path.join("config.json").exists() {
        let newest = resume::newest(path, usize::MAX)?;
        let nothing = || CliError::Usage(format!("{}: the run has no checkpoint and no export yet", path.display()));
        newest.ok_or_else(nothing)?.folder
    } else if path.exists() {
        if !path.is_dir() {
            file::open(path, HINT).map_err(CliError::of_flag(flag))?;
        }
        return ModelFiles::new(path).refuse_gguf();
    } else {
        return Err(CliError::of_flag(flag)(ModelError::Missing { path: path.to_owned(), hint: HINT.to_owned() }));
    };
    report::label("model", found.display().to_string());
    Ok(ModelFiles::new(&found))
}

/// Checks the files of an export, before another file is made of them: all of a folder's but README.md, which people edit, or
/// the one that was named. (A checkpoint is checked when its state is read.)
///
/// # Errors
/// If a file is not what the export's manifest says.
pub fn check_unchanged(files: &ModelFiles) -> Result<(), CliError> {
    if is_checkpoint(&files.folder) || !durable::is_listed_folder(&files.folder) {
        return Ok(());
    }
    let one = (!files.weights.is_dir()).then(|| files.weights.file_name()).flatten().map(|name| name.to_string_lossy());
    let read = |name: &str| one.as_ref().map_or(name != "README.md", |one| name == one);
    durable::verify_listed(&files.folder, read).map_err(|error| match error {
        CliError::Corrupt { path, reason } => {
            let remedy = format!("if you changed or removed the file yourself, delete {MANIFEST} and try again");
            CliError::corrupt(&path, format!("{reason}; {remedy}"))
        }
        other => other,
    })
}
