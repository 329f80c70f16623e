//! The threads that share the work on a large matrix.

use std::{
    sync::{Mutex, OnceLock, PoisonError},
    thread,
};

/// The number of cores. The system reads files for its answer, so that it is asked once.
pub(super) fn threads() -> usize {
    static CORES: OnceLock<usize> = OnceLock::new();
    *CORES.get_or_init(|| thread::available_parallelism().map_or(1, usize::from))
}

/// Does the work on each part by a thread of its own. Where the system gives no thread, or there is one part only, this one does
/// it.
pub(super) fn share<Part: Send>(parts: impl Iterator<Item = Part>, work: impl Fn(Part) + Sync) {
    let work = &work;
    let mut parts = parts.peekable();
    let Some(first) = parts.next() else { return };
    if parts.peek().is_none() {
        return work(first);
    }
    let parts = std::iter::once(first).chain(parts);
    let parts: Vec<_> = parts.map(|part| Mutex::new(Some(part))).collect();
    thread::scope(|scope| {
        for part in &parts {
            let take = || part.lock().unwrap_or_else(PoisonError::into_inner).take();
            let run = move || take().map_or((), work);
            if thread::Builder::new().spawn_scoped(scope, run).is_err() {
                run();
            }
        }
    });
}
