//! The connections that are open, and which of them have asked something: a client that sends the head or the body of a request
//! slowly, or not at all, must not keep others out.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// Most connections at once.
pub(super) const MOST_CONNECTIONS: usize = 512;
/// How long a connection that must make room may take to close.
const PAUSE: Duration = Duration::from_millis(200);

/// A connection that may have asked nothing yet.
#[derive(Debug, Default)]
pub(super) struct Caller {
    /// Whether a whole request has arrived.
    asks: AtomicBool,
    /// Tells it to close.
    leave: Notify,
}

impl Caller {
    /// Notes that a whole request has arrived: the connection need not make room for others any more.
    pub(super) fn has_asked(&self) {
        self.asks.store(true, Ordering::Relaxed);
    }

    /// Waits until the connection must close to make room for another one.
    pub(super) async fn must_leave(&self) {
        self.leave.notified().await;
    }

    fn is_silent(&self) -> bool {
        !self.asks.load(Ordering::Relaxed)
    }
}

/// The connections that have asked nothing yet, the oldest first.
#[derive(Debug, Default)]
pub(super) struct Callers(VecDeque<Weak<Caller>>);

impl Callers {
    /// Adds a connection.
    pub(super) fn add(&mut self) -> Arc<Caller> {
        // Those that have asked, or are closed, are forgotten before the list grows beyond all connections.
        if self.0.len() >= 2 * MOST_CONNECTIONS {
            self.0.retain(|caller| caller.upgrade().is_some_and(|caller| caller.is_silent()));
        }
        let caller = Arc::new(Caller::default());
        self.0.push_back(Arc::downgrade(&caller));
        caller
    }

    /// A place for a connection. If all are taken, the oldest connection that has asked nothing is closed for it. None if all
    /// have asked: then the new one is too many.
    pub(super) async fn place(&mut self, places: &Arc<Semaphore>) -> Option<OwnedSemaphorePermit> {
        if let Ok(place) = places.clone().try_acquire_owned() {
            return Some(place);
        }
        let silent = |caller: &Arc<Caller>| caller.is_silent();
        let oldest = std::iter::from_fn(|| self.0.pop_front()).find_map(|caller| caller.upgrade().filter(silent))?;
        oldest.leave.notify_one();
        tokio::time::timeout(PAUSE, places.clone().acquire_owned()).await.ok()?.ok()
    }
}
