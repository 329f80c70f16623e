//! Dense matrix to NVFP4: `x[r, c] -> code[r, c], scale[r, c / 16], g`.
//!
//! Two-level (TransformerEngine's formula, all in f32; `A` the tensor's amax, `a` the block's):
//! ```text
//! S = min(2688 / A, FLT_MAX), 1 if A = 0        g = A / 2688
//! s = e4m3(min(a * (S * (1/6)), 448))
//! code = e2m1(x * min(1 / (s * (1/S)), FLT_MAX))
//! ```
//! Single-level (torchao's): `s = e4m3(clamp(a / 6, 2^-6, 448))`, `code = e2m1(x * (1/s))`, `g = 1`.
//!
//! A block is 1x16 (one row, 16 columns) or 16x16. A unit keeps the 16 columns of the row, or of the two, that it owns
//! (`tile.rs`) in registers, where they may be rotated first ([`crate::hadamard`]); the amax of 16x16 goes through shared
//! memory. The input is read twice (tensor amax, then codes; once if single-level) and 4.5 bits a value are written:
//! bound by memory, next by integer operations. A rounded product feeds sums by its magnitude only, is read for its sign as
//! well, and may have been replaced on the way, so that no backend contracts it into a fused multiply-add: codes and
//! scales are the reference's bit for bit.

use crate::{
    codec::{e2m1_bounded, e2m1_word, e4m3_scale},
    error::{KernelError, expect_blocks, expect_len},
    layout::{scale_index, scales_per_row, words_per_row},
    rng::{Cipher, Stream, cipher, philox},
};
use cubecl::prelude::*;

mod amax;
mod tile;

pub use amax::{AMAX_LEN, amax, amax_of_maxima, amax_rotated};
pub use tile::View;
use tile::{Place, Plan, Row, gap, own, rotated_row, rows_of, store_across, units};

/// How many scales a tensor has besides its codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scaling {
    /// E4M3 block scales only.
    Single,
    /// E4M3 block scales and one f32 tensor scale.
    Two,
}

/// Which values share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Block {
    /// One row, 16 columns.
    Row,
    /// 16 rows, 16 columns: a matrix and its transpose then have the same codes.
    Square,
}

/// How a value between two codes is rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    /// To nearest, ties to the even code.
    Nearest,
    /// Up with the probability that makes the mean exact.
    Stochastic(Stream),
}

/// A quantiser's choices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantizeSpec {
    /// Single- or two-level.
    pub scaling: Scaling,
    /// 1x16 or 16x16.
    pub block: Block,
    /// Nearest or stochastic.
    pub rounding: Rounding,
}

/// Quantises `x` (float of type `dtype`, laid out as `view`) into `codes` (u32, R x C/8), `scales`
/// (u8, R x C/16) and `global` (f32, 1). `amax` (f32, 3) comes from [`amax()`] or, if blocks are to be `rotated`, from
/// [`amax_rotated`]; single-level ignores it.
///
/// # Errors
/// If C is not a multiple of 16 (for 16x16 blocks R too) or a buffer does not fit the shape.
pub fn quantize<R: Runtime>(
    client: &ComputeClient<R>,
    x: ArrayArg<R>,
    dtype: StorageType,
    amax: ArrayArg<R>,
    codes: ArrayArg<R>,
    scales: ArrayArg<R>,
    global: ArrayArg<R>,
    view: View,
    spec: QuantizeSpec,
    rotated: bool,
) -> Result<(), KernelError> {
    const NAME: &str = "quantize";
    let View { rows, cols, .. } = view;
    expect_blocks(NAME, "columns", cols)?;
    if spec.block == Block::Square {
        expect_blocks(NAME, "rows", rows)?;
    }
    expect_len(NAME, "x", x.size(), rows * cols)?;
    expect_len(NAME, "codes", codes.size(), rows * words_per_row(cols))?;
    expect_len(NAME, "scales", scales.size(), rows * scales_per_row(cols))?;
    expect_len(NAME, "global", global.size(), 1)?;
    expect_len(NAME, "amax", amax.size(), AMAX_LEN)?;
    if rows == 0 || cols == 0 {
        return Ok(());
    }

    let (stochastic, stream) = match spec.rounding {
        Rounding::Nearest => (false, Stream { seed: 0, step: 0, stream: 0 }),
        Rounding::Stochastic(stream) => (true, stream),
    };
    let plan = Plan::new(client, dtype, view, spec.block)?;
    // SAFETY: buffer lengths were checked against the shape; units outside it write nothing.
    unsafe {
        quantize_kernel::launch_unchecked(
            client,
            plan.count,
            plan.dim,
            plan.vector,
            x,
            amax,
            codes,
            scales,
            global,
            plan.place,
            cipher(stream),
            spec.scaling == Scaling::Two,
            spec.block == Block::Square,
            stochastic,
            plan.along,
            plan.lines,
            rotated,
            dtype,
        );
    }
    Ok(())
}

#[cube(launch_unchecked)]
fn quantize_kernel<F: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    amax: &Array<f32>,
    codes: &mut Array<Vector<u32, Const<2>>>,
    scales: &mut Array<u8>,
    global: &mut Array<f32>,
    place: Place,
    cipher: &Cipher,
    #[comptime] two_level: bool,
    #[comptime] square: bool,
    #[comptime] stochastic: bool,
    #[comptime] along: bool,
    #[comptime] lines: usize,
    #[comptime] rotated: bool,
    #[define(F)] _dtype: StorageType,
) {
    let (row, col) = own(along, lines);
    let mut rows = rows_of::<F, N>(x, row, col, place, along, lines);
    if comptime!(rotated) {
        #[unroll]
        for line in 0..lines {
            rotated_row(rows.index_mut(line));
        }
    }
    let mut square_amax = 0.0f32;
    if comptime!(square) {
        square_amax = amax_of_square(&rows, along, lines);
    }
    if UNIT_POS_X == 0u32 && CUBE_POS_X == 0u32 && CUBE_POS_Y == 0u32 {
        let mut g = 1.0f32;
        if comptime!(two_level) {
            g = amax[0] / 2688.0f32;
        }
        global[0] = g;
    }
    let mut words = Sequence::<Vector<u32, Const<2>>>::new();
    let mut bytes = Sequence::<u32>::new();
    #[unroll]
    for line in 0..lines {
        let block_amax = if comptime!(square) { square_amax } else { rows.index(line).amax };
        let (byte, encode) = scale_of(block_amax, amax, two_level);
        let mut random = Array::<u32>::new(4usize);
        if comptime!(stochastic) {
            let row = row + comptime!(line as u32 * gap(along));
            philox(scale_index(row, col, place.cols) as u32, cipher, 0u32, &mut random);
        }
        words.push(encoded(rows.index(line), block_amax, encode, &random, stochastic));
        bytes.push(byte);
    }
    if comptime!(along) {
        #[unroll]
        for line in 0..lines {
            let row = row + comptime!(line as u32 * gap(true));
            if row < place.rows && col < place.cols {
                let at = scale_index(row, col, place.cols);
                codes[at] = *words.index(line);
                scales[at] = u8::cast_from(*bytes.index(line));
            }
        }
    } else {
        store_across(&words, &bytes, codes, scales, place);
    }
}

/// The largest magnitude of the 16x16 block in which all rows of a unit lie.
#[cube]
fn amax_of_square(rows: &Sequence<Row>, #[comptime] along: bool, #[comptime] lines: usize) -> f32 {
    // Units that share a block: each has two of its rows.
    let group = 8u32;
    let mut amax = 0.0f32;
    #[unroll]
    for line in 0..lines {
        amax = max(amax, rows.index(line).amax);
    }
    let mut shared = SharedMemory::<f32>::new(comptime!(units(along) as usize));
    shared[UNIT_POS_X as usize] = amax;
    sync_cube();
    #[unroll]
    for i in 0..group {
        amax = max(amax, shared[(UNIT_POS_X / group * group + i) as usize]);
    }
    amax
}

/// A block's scale byte, and what its values are multiplied by.
#[cube]
fn scale_of(block_amax: f32, amax: &Array<f32>, #[comptime] two_level: bool) -> (u32, f32) {
    if comptime!(two_level) {
        let (byte, value) = e4m3_scale(min(block_amax * amax[1], 448.0f32));
        (byte, min(1.0f32 / (value * amax[2]), 3.402_823_5e38f32))
    } else {
        let (byte, value) = e4m3_scale(clamp(block_amax / 6.0f32, 0.015625f32, 448.0f32));
        (byte, 1.0f32 / value)
    }
}

/// The codes of a row's values times `encode`, where `amax` is the largest magnitude of their block.
#[cube]
fn encoded(
    row: &Row,
    amax: f32,
    encode: f32,
    random: &Array<u32>,
    #[comptime] stochastic: bool,
) -> Vector<u32, Const<2>> {
    let mut scaled = Array::<f32>::new(16usize);
    #[unroll]
    for i in 0..16usize {
        scaled[i] = row.values[i] * encode;
    }
    // Only if one of these is not so can a product be too large, or not a number.
    let small = amax * encode < 7.0f32 && row.sum.abs() < 3.0e38f32;
    if !small {
        #[unroll]
        for i in 0..16usize {
            scaled[i] = e2m1_bounded(scaled[i]);
        }
    }
    let mut words = Vector::<u32, Const<2>>::empty();
    words[0] = e2m1_word(&scaled, 0usize, random, 4usize, stochastic);
    words[1] = e2m1_word(&scaled, 8usize, random, 4usize, stochastic);
    words
}
