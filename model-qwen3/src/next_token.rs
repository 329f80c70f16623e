//! The next token of each answer of a step. The device draws it where it can: the next forward then begins before the host knows
//! the token. Otherwise the host chooses it from all logits.

use crate::{ModelError, weights::to_host};
use backend_nvfp4::{Draw, Drawn, Nvfp4Error, Nvfp4Kernels, draw};
use burn::tensor::{Int, Tensor, backend::Backend};
use std::sync::Arc;

/// The next token of an answer, which the device may still be computing.
#[derive(Debug)]
pub(crate) enum NextToken<B: Backend> {
    /// A row of what the device draws.
    Drawn(Arc<Drawn<B>>, usize),
    /// Logits `[1, V]`, from which the host is to choose.
    Logits(Tensor<B, 2>),
}

/// What is known of the next token.
pub(crate) enum Known {
    /// Its id.
    Token(u32),
    /// The logits of all tokens.
    Logits(Vec<f32>),
    /// The model computed NaN.
    NotANumber,
}

impl<B: Nvfp4Kernels> NextToken<B> {
    /// The next token of each row of logits `[M, V]`: drawn if the row has a draw.
    pub(crate) fn of(logits: Tensor<B, 2>, draws: &[Option<Draw>]) -> Vec<Self> {
        let row = |n: usize| logits.clone().slice(n..n + 1);
        let asked: Vec<usize> = (0..draws.len()).filter(|n| draws[*n].is_some()).collect();
        let drawn = if asked.is_empty() {
            None
        } else if asked.len() == draws.len() {
            draw(logits.clone(), &draws.iter().flatten().copied().collect::<Vec<_>>())
        } else {
            let rows = Tensor::cat(asked.iter().map(|n| row(*n)).collect(), 0);
            draw(rows, &draws.iter().flatten().copied().collect::<Vec<_>>())
        };
        let drawn = drawn.map(Arc::new);
        let next = |n: usize| match (&drawn, asked.binary_search(&n)) {
            (Some(drawn), Ok(place)) => Self::Drawn(drawn.clone(), place),
            _ => Self::Logits(row(n)),
        };
        (0..draws.len()).map(next).collect()
    }

    /// Waits for the device.
    ///
    /// # Errors
    /// If the device fails.
    pub(crate) fn wait(self) -> Result<Known, ModelError> {
        match self {
            Self::Drawn(drawn, row) => {
                let token = drawn.token(row).map_err(|e: Nvfp4Error| ModelError::Device(e.to_string()))?;
                Ok(if token.has_nan { Known::NotANumber } else { Known::Token(token.id) })
            }
            Self::Logits(logits) => {
                let logits = to_host(logits)?;
                Ok(if logits.iter().any(|x| x.is_nan()) { Known::NotANumber } else { Known::Logits(logits) })
            }
        }
    }
}

/// The ids `[1, M]` of drawn tokens on the device.
pub(crate) fn drawn_ids<B: Nvfp4Kernels>(rows: &[(&Arc<Drawn<B>>, usize)]) -> Tensor<B, 2, Int> {
    let (first, _) = rows[0];
    let is_whole = first.rows() == rows.len()
        && rows.iter().enumerate().all(|(n, (drawn, row))| n == *row && Arc::ptr_eq(first, drawn));
    let ids = if is_whole {
        first.tokens()
    } else {
        Tensor::cat(rows.iter().map(|(drawn, row)| drawn.tokens().slice(*row..*row + 1)).collect(), 0)
    };
    ids.reshape([1, rows.len()])
}
