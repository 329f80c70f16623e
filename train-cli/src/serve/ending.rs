//! The end of a server. Answers that are being made when it is asked to end may take some more time. What is not complete then
//! is cut, and its client is told.

use super::refusal::Refusal;
use axum::http::StatusCode;
use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::{sync::watch, time::timeout};

/// How long a client may take to read that its answer is cut.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// What all requests know about the end of the server.
#[derive(Debug, Default)]
pub(super) struct Ending {
    /// Whether answers are cut.
    cut: watch::Sender<bool>,
    /// Answers that are not complete.
    unfinished: AtomicUsize,
}

impl Ending {
    /// Waits until `closed` says that all connections are closed. Answers that are not complete after `limit` are cut. Returns
    /// their number.
    pub(super) async fn after(&self, closed: impl Future<Output = ()>, limit: Duration) -> usize {
        let mut closed = pin!(closed);
        if timeout(limit, closed.as_mut()).await.is_ok() {
            return 0;
        }
        let unfinished = self.unfinished();
        self.cut.send_replace(true);
        // A client that does not read is not told.
        let _ = timeout(LAST_WORDS, closed).await;
        unfinished
    }

    /// Waits until answers are cut. Returns what a client is told then.
    pub(super) async fn cut(&self) -> Refusal {
        let mut cut = self.cut.subscribe();
        // It fails only if the sender is gone, and `self` holds the sender.
        drop(cut.wait_for(|cut| *cut).await);
        Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "the server ends, and the answer is not complete")
    }

    /// The number of answers that are not complete.
    pub(super) fn unfinished(&self) -> usize {
        self.unfinished.load(Ordering::Relaxed)
    }

    /// Counts an answer that begins.
    pub(super) fn begun(self: &Arc<Self>) -> Unfinished {
        self.unfinished.fetch_add(1, Ordering::Relaxed);
        Unfinished(self.clone())
    }
}

/// An answer that is not complete. It is dropped when the answer is complete, or nobody waits for it any more.
#[derive(Debug)]
pub(super) struct Unfinished(Arc<Ending>);

impl Drop for Unfinished {
    fn drop(&mut self) {
        self.0.unfinished.fetch_sub(1, Ordering::Relaxed);
    }
}
