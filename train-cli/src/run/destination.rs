//! Where the checkpoints of a run go: into its folder, committed when they are complete, in place of older ones.

use super::{
    checkpoint::STATE,
    old_checkpoints::{self, Keep},
    snapshot::LARGE,
};
use crate::{
    CliError, device_failure,
    durable::{self, PendingFolder},
    model_files::Companions,
    report,
};
use model_qwen3::ModelError;
use std::{
    io::Write,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

/// Where checkpoints go.
#[derive(Debug, Clone)]
pub(super) struct Destination {
    pub(super) run: PathBuf,
    pub(super) companions: Companions,
    /// Whether the device failed in training, while a checkpoint was being written.
    pub(super) abandoned: Arc<AtomicBool>,
    /// Bytes that are read from the device at a time.
    pub(super) transfer: usize,
    /// Whether large files are read back too, which takes as long as to write them: not where training waits for it.
    pub(super) reads_all: bool,
}

impl Destination {
    /// The folder of the checkpoint after `step` steps.
    pub(super) fn target(&self, step: usize) -> PathBuf {
        self.run.join(format!("checkpoint-{step}"))
    }

    /// Writes the files of a checkpoint, commits it, calls `is_committed`, and deletes those that are not to be kept.
    pub(super) fn commit(
        &self,
        mut folder: PendingFolder,
        keep: Keep,
        is_committed: impl FnOnce(),
        write: impl Fn(&str, &mut dyn Write) -> Result<(), CliError> + Sync,
    ) -> Result<PathBuf, CliError> {
        // Each of the large ones waits for the device, while the other keeps the disk busy.
        folder.files(&LARGE, &write)?;
        folder.file(STATE, |out| write(STATE, out))?;
        self.companions.copy_into(&mut folder)?;
        device_failure::check()?;
        if self.abandoned.load(Ordering::Acquire) {
            let reason = "it failed in training while this checkpoint was read from it; nothing was saved".to_owned();
            return Err(ModelError::Device(reason).into());
        }
        let committed = folder.commit()?;
        is_committed();
        // The older checkpoints are given up only for one that can be read.
        let read_back = if self.reads_all { durable::read_back } else { durable::read_back_quickly };
        read_back(&committed)?;
        report::line(format!("{:>11}  {}", "saved", committed.display()));
        old_checkpoints::delete_old(&self.run, keep)?;
        Ok(committed)
    }
}
