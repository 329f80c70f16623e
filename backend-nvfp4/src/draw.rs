//! Tokens that a device draws from logits ([`mod@kernels_cubecl::draw`]). Whoever needs them on the device has them at once. The
//! host asks for them right away, too, and reads them when it wants: what is launched in between does not delay it.

use crate::{asked::Asked, error::Nvfp4Error};
use burn::tensor::{Int, Tensor, backend::Backend};
pub use kernels_cubecl::{draw::Draw, penalty::Penalty};
use std::{
    fmt,
    sync::{Mutex, PoisonError},
};

/// The tokens of some rows.
pub struct Drawn<B: Backend> {
    tokens: Tensor<B, 1, Int>,
    /// The tokens on the host, and behind them whether logits were NaN.
    words: Mutex<Asked>,
    rows: usize,
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
    /// The tokens of so many rows on the device, and what the host has asked for.
    pub(crate) fn new(tokens: Tensor<B, 1, Int>, words: Asked, rows: usize) -> Self {
        Self { tokens, words: Mutex::new(words), rows }
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
        let known = words.answer()?;
        Ok(DrawnToken { id: known[row], has_nan: known[self.rows + row] != 0 })
    }
}

impl<B: Backend> fmt::Debug for Drawn<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Drawn").field("rows", &self.rows).finish_non_exhaustive()
    }
}
