//! Tokens that a device draws from logits ([`mod@kernels_cubecl::draw`]). Whoever needs them on the device has them at once. The host
//! asks for them right away, too, and reads them when it wants: what is launched in between does not delay it.

use crate::error::Nvfp4Error;
use burn::tensor::{Int, Tensor, backend::Backend};
pub use kernels_cubecl::{draw::Draw, likeliest::MOST as MOST_CANDIDATES, penalty::Penalty};
use std::{
    fmt,
    sync::{Mutex, PoisonError},
};

/// Waits for what was asked of a device.
pub type Awaited = Box<dyn FnOnce() -> Result<Vec<u32>, Nvfp4Error> + Send>;

/// The tokens of some rows.
pub struct Drawn<B: Backend> {
    tokens: Tensor<B, 1, Int>,
    words: Mutex<Words>,
    rows: usize,
}

/// The tokens on the host, and behind them whether logits were NaN.
struct Words {
    /// `None` once they are read.
    asked: Option<Awaited>,
    known: Result<Vec<u32>, Nvfp4Error>,
}

/// A token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DrawnToken {
    /// Its id.
    pub id: u32,
    /// Whether a logit of its row is NaN; the id then means nothing.
    pub has_nan: bool,
}

impl<B: Backend> Drawn<B> {
    /// The tokens of so many rows on the device, and what waits for them.
    pub(crate) fn new(tokens: Tensor<B, 1, Int>, words: Awaited, rows: usize) -> Self {
        Self { tokens, words: Mutex::new(Words { asked: Some(words), known: Ok(vec![]) }), rows }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The tokens of all rows on the device.
    pub fn tokens(&self) -> Tensor<B, 1, Int> {
        self.tokens.clone().slice(0..self.rows)
    }

    /// The token of a row. Waits for the device.
    ///
    /// # Errors
    /// If the device failed.
    pub fn token(&self, row: usize) -> Result<DrawnToken, Nvfp4Error> {
        let mut words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(asked) = words.asked.take() {
            words.known = asked();
        }
        let known = words.known.as_ref().map_err(Clone::clone)?;
        Ok(DrawnToken { id: known[row], has_nan: known[self.rows + row] != 0 })
    }
}

/// The device writes to the host's memory until it has answered, so that memory must not be freed before.
impl Drop for Words {
    fn drop(&mut self) {
        if let Some(asked) = self.asked.take() {
            // Nobody wants to know.
            let _ = asked();
        }
    }
}

impl<B: Backend> fmt::Debug for Drawn<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Drawn").field("rows", &self.rows).finish_non_exhaustive()
    }
}
