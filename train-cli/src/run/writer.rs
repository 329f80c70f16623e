//! A thread that writes a checkpoint beside the training, and what training wants to know of it: whether the checkpoint is
//! committed, which a kill cannot undo, and whether the thread has ended, which also reads it back and deletes older ones.

use crate::CliError;
use std::{
    convert::Infallible,
    path::PathBuf,
    sync::mpsc::{self, Receiver, RecvTimeoutError, Sender},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// The folder of a checkpoint that a thread has written, and the seconds that this took.
pub(super) type Written = (PathBuf, f64);

/// A thread that writes a checkpoint.
#[derive(Debug)]
pub(super) struct Writer {
    thread: JoinHandle<Result<Written, CliError>>,
    /// Closed when the checkpoint is committed. None once somebody has waited for that.
    commit: Option<Receiver<Infallible>>,
}

impl Writer {
    /// Starts a thread that calls `write`, which drops what it is given as soon as the checkpoint is committed.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub(super) fn begin(
        write: impl FnOnce(Sender<Infallible>) -> Result<PathBuf, CliError> + Send + 'static,
    ) -> Result<Self, CliError> {
        let (committing, commit) = mpsc::channel();
        let timed = move || {
            let began = Instant::now();
            write(committing).map(|folder| (folder, began.elapsed().as_secs_f64()))
        };
        let thread = thread::Builder::new().name("checkpoint".into()).spawn(timed);
        Ok(Self { thread: thread.map_err(CliError::no_thread("checkpoint"))?, commit: Some(commit) })
    }

    /// Waits until the checkpoint is committed or could not be, but not longer than `at_most`. Returns whether that was long
    /// enough; None if this was asked before.
    pub(super) fn commits_within(&mut self, at_most: Duration) -> Option<bool> {
        let commit = self.commit.take()?;
        Some(commit.recv_timeout(at_most) == Err(RecvTimeoutError::Disconnected))
    }

    /// Whether the thread has ended.
    pub(super) fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Waits until the thread has ended.
    pub(super) fn join(self) -> thread::Result<Result<Written, CliError>> {
        self.thread.join()
    }
}
