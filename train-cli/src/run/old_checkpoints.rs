//! Checkpoints that a run no longer needs. After each save, it deletes those that [`Keep`] does not name. When it resumes, it
//! renames those of later steps than the checkpoint that it resumes from.

use super::checkpoint::{STALE, list};
use crate::{CliError, durable, report};
use std::path::{Path, PathBuf};

/// Which checkpoints of a run stay.
#[derive(Debug, Clone, Copy)]
pub struct Keep {
    /// The number of newest checkpoints that stay.
    pub newest: usize,
    /// Checkpoints stay whose steps are multiples of this.
    pub period: Option<usize>,
    /// The step whose checkpoint stays because it has the lowest evaluation loss.
    pub best: Option<usize>,
}

/// Deletes the checkpoints of a run that are not to be kept.
pub(super) fn delete_old(run: &Path, keep: Keep) -> Result<(), CliError> {
    let stays = |step: usize| keep.best == Some(step) || keep.period.is_some_and(|period| step.is_multiple_of(period));
    for (_, old) in list(run)?.into_iter().skip(keep.newest).filter(|(step, _)| !stays(*step)) {
        // The new checkpoint is safe: an old one too many does not end the run.
        if let Err(error) = durable::remove_folder(&old) {
            report::line(format!("warning: an old checkpoint cannot be deleted: {error}"));
        }
    }
    Ok(())
}

/// Renames checkpoints newer than `step`: a run that resumes from an older one writes its own.
///
/// # Errors
/// If the system fails.
pub(super) fn set_aside_newer(run: &Path, step: usize) -> Result<(), CliError> {
    for (newer, path) in list(run)?.into_iter().filter(|(s, _)| *s > step) {
        let aside = free_name_aside(run, newer);
        durable::rename(&path, &aside)?;
        report::line(format!("renamed {} to {}", path.display(), aside.display()));
    }
    Ok(())
}

/// Says which folders of a run may be deleted where the disk is full: no run reads a checkpoint that was set aside.
pub(super) fn note_stale(run: &Path) {
    let entries = std::fs::read_dir(run).into_iter().flatten().flatten();
    let stale = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(STALE)).count();
    if stale > 0 {
        let (count, folder) = (report::count(stale, "checkpoint"), run.join(format!("{STALE}*")));
        report::line(format!("note: {count} of older attempts can be deleted: {}", folder.display()));
    }
}

/// A name in the run's folder that no older checkpoint of this step has: a run that is resumed twice within a second sets
/// aside two.
fn free_name_aside(run: &Path, step: usize) -> PathBuf {
    let time = jiff::Timestamp::now().strftime("%Y%m%dT%H%M%SZ").to_string();
    let numbered = (2..).map(|number| format!("{time}.{number}"));
    std::iter::once(time.clone())
        .chain(numbered)
        .map(|time| run.join(format!("{STALE}{time}-checkpoint-{step}")))
        .find(|aside| !aside.exists())
        .expect("a folder holds finitely many names")
}

#[cfg(test)]
mod tests {
    use super::set_aside_newer;
    use std::fs;

    #[test]
    fn checkpoints_that_are_set_aside_within_a_second_keep_names_of_their_own() {
        let dir = tempfile::tempdir().unwrap();
        let checkpoint = dir.path().join("checkpoint-7");
        for content in ["first", "second", "third"] {
            fs::create_dir(&checkpoint).unwrap();
            fs::write(checkpoint.join("content"), content).unwrap();
            set_aside_newer(dir.path(), 5).unwrap();
        }
        let aside = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().path());
        let mut contents: Vec<_> = aside.map(|path| fs::read_to_string(path.join("content")).unwrap()).collect();
        contents.sort();
        assert_eq!(contents, ["first", "second", "third"]);
    }
}
