//! Works that are done at the same time.

use crate::CliError;
use std::thread;

/// Does each work on a thread of its own; `what` names them. All have ended when the first error is returned.
///
/// # Errors
/// If a work fails, or if the system gives no thread for it.
pub(super) fn at_once<Done: Send>(
    what: &'static str,
    works: impl IntoIterator<Item = impl FnOnce() -> Result<Done, CliError> + Send>,
) -> Result<Vec<Done>, CliError> {
    thread::scope(|scope| {
        let begin = |work| thread::Builder::new().spawn_scoped(scope, work).map_err(CliError::no_thread(what));
        let threads: Vec<_> = works.into_iter().map(begin).collect();
        let ended: Vec<_> = threads.into_iter().map(|thread| thread.and_then(joined)).collect();
        ended.into_iter().collect()
    })
}

/// The result of a thread. If it panicked, so does the caller.
pub(super) fn joined<T>(thread: thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
