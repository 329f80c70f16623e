//! The repetition penalty (Keskar et al., arXiv 1909.05858, as Hugging Face applies it): tokens that a sequence already has become
//! less likely, before its next token is drawn.
//! ```text
//! for row { for id { y[row][id] = x[row][id], or, if the row has the token id:
//! x[row][id] / factor if it is above 0, else x[row][id] * factor } }                         // the plain loop ``` The host
//! knows all tokens of a row, but perhaps not the newest one, which the device has drawn. Reads and writes each logit once: bound
//! by memory.

use crate::{
    error::{KernelError, expect_len, index, require},
    likeliest::MOST_COLUMNS,
};
use cubecl::prelude::*;

const NAME: &str = "penalize";
/// Units of a cube; each has a column.
const UNITS: u32 = 256;
/// Tokens of a word of [`Penalty::seen`].
const BITS: usize = 32;

/// The penalty of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Penalty<'a> {
    /// Divides logits above 0, and multiplies the others.
    pub factor: f32,
    /// Which tokens the row has: bit `id % 32` of word `id / 32`. A missing word counts as 0.
    pub seen: &'a [u32],
}

impl Penalty<'_> {
    /// Changes no logit.
    pub const NONE: Self = Self { factor: 1.0, seen: &[] };
}

/// Applies the penalties to the logits `x` (f32, a row of `cols` for each penalty), and writes the results to `y`. A row's token in
/// `newest` (u32) counts as one that the row has.
///
/// # Errors
/// If a buffer does not fit the number of penalties, or a row has too many columns.
pub fn penalize<R: Runtime>(
    client: &ComputeClient<R>,
    x: ArrayArg<R>,
    newest: ArrayArg<R>,
    penalties: &[Penalty<'_>],
    y: ArrayArg<R>,
    cols: usize,
) -> Result<(), KernelError> {
    let (rows, words) = (penalties.len(), cols.div_ceil(BITS));
    require(NAME, cols <= MOST_COLUMNS, || format!("{cols} columns; it takes at most {MOST_COLUMNS}"))?;
    expect_len(NAME, "x", x.size(), rows * cols)?;
    expect_len(NAME, "y", y.size(), rows * cols)?;
    expect_len(NAME, "newest", newest.size(), rows)?;
    if rows * cols == 0 {
        return Ok(());
    }
    let factors: Vec<f32> = penalties.iter().map(|penalty| penalty.factor).collect();
    let mut seen = vec![0u32; rows * words];
    for (row, penalty) in seen.chunks_mut(words).zip(penalties) {
        row.iter_mut().zip(penalty.seen).for_each(|(word, seen)| *word = *seen);
    }
    let [factors_handle, seen_handle] =
        [f32::as_bytes(&factors), u32::as_bytes(&seen)].map(|bytes| client.create_from_slice(bytes));
    let cubes = CubeCount::Static((cols as u32).div_ceil(UNITS), index(NAME, "rows", rows)?, 1);
    // SAFETY: buffer lengths were checked; a unit reads and writes a column below the end of its row.
    unsafe {
        let factors = ArrayArg::from_raw_parts(factors_handle, rows);
        let seen = ArrayArg::from_raw_parts(seen_handle, rows * words);
        penalize_kernel::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(UNITS),
            x,
            newest,
            factors,
            seen,
            y,
            cols as u32,
            words as u32,
        );
    }
    Ok(())
}

#[cube(launch_unchecked)]
fn penalize_kernel(
    x: &Array<f32>,
    newest: &Array<u32>,
    factors: &Array<f32>,
    seen: &Array<u32>,
    y: &mut Array<f32>,
    cols: u32,
    words: u32,
) {
    let (row, column) = (CUBE_POS_Y, CUBE_POS_X * UNITS + UNIT_POS);
    if column < cols {
        let bits = comptime!(BITS as u32);
        let word = seen[(row * words + column / bits) as usize];
        let is_seen = (word >> (column % bits)) & 1u32 == 1u32 || newest[row as usize] == column;
        let at = (row as usize) * (cols as usize) + (column as usize);
        let factor = select(is_seen, factors[row as usize], 1.0f32);
        let logit = x[at];
        y[at] = select(logit > 0.0f32, logit / factor, logit * factor);
    }
}
