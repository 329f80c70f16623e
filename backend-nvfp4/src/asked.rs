//! Words of a buffer that the host has asked a device for. The device sends them before it runs what is launched later, and the
//! host waits for them when it needs them.

use crate::error::Nvfp4Error;
use std::fmt;

/// Waits for the words of a buffer.
type Waiting = Box<dyn FnOnce() -> Result<Vec<u32>, Nvfp4Error> + Send>;

/// A question, and the answer once it was waited for.
pub struct Asked {
    /// `None` once it was waited for.
    waiting: Option<Waiting>,
    answer: Result<Vec<u32>, Nvfp4Error>,
}

impl Asked {
    /// A question that `waiting` waits for.
    pub(crate) fn new(waiting: impl FnOnce() -> Result<Vec<u32>, Nvfp4Error> + Send + 'static) -> Self {
        Self { waiting: Some(Box::new(waiting)), answer: Ok(vec![]) }
    }

    /// The words. Waits for the device the first time.
    ///
    /// # Errors
    /// If the device failed.
    pub fn answer(&mut self) -> Result<&[u32], Nvfp4Error> {
        if let Some(waiting) = self.waiting.take() {
            self.answer = waiting();
        }
        self.answer.as_deref().map_err(Clone::clone)
    }
}

/// The device writes to the host's memory until it has answered, so that memory must not be freed before.
impl Drop for Asked {
    fn drop(&mut self) {
        // Nobody wants to know.
        let _ = self.answer();
    }
}

impl fmt::Debug for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Asked").finish_non_exhaustive()
    }
}
