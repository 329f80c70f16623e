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
//! A block is 1x16 (one row, 16 columns) or 16x16. A unit keeps the 16 columns of a row that it owns (`tile.rs`) in
//! registers, where they may be rotated first ([`crate::hadamard`]); for 16x16 it owns two rows, and the amax goes through
//! shared memory. The input is read twice (tensor amax, then codes; once if single-level) and 4.5 bits a value are written:
//! bound by memory, next by integer operations. No rounded product ever feeds a sum, so that no backend can contract it
//! into a fused multiply-add: codes and scales are the reference's bit for bit.

use crate::{
    codec::{e2m1_encode_number, e4m3_scale},
    error::{KernelError, expect_blocks, expect_len},
    hadamard::{SIGNS, rotate},
    layout::{place_code, scale_index, scales_per_row, words_per_row},
    rng::{Stream, draw_of, philox},
};
use cubecl::prelude::*;

mod amax;
mod tile;

use amax::amax_of;
pub use amax::{AMAX_LEN, amax, amax_of_maxima, amax_rotated};
pub use tile::View;
use tile::{Place, Plan, UNITS, own, row_across, row_of, store_across};

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
            stream.seed as u32,
            (stream.seed >> 32) as u32,
            stream.step,
            stream.stream,
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
    key_low: u32,
    key_high: u32,
    step: u32,
    stream: u32,
    #[comptime] two_level: bool,
    #[comptime] square: bool,
    #[comptime] stochastic: bool,
    #[comptime] along: bool,
    #[comptime] lines: usize,
    #[comptime] rotated: bool,
    #[define(F)] _dtype: StorageType,
) {
    let (row, col) = own(along, lines);
    let cols = place.cols;
    let mut rows = Sequence::<Array<f32>>::new();
    let mut block_amax = 0.0f32;
    #[unroll]
    for line in 0..lines {
        let mut values = if comptime!(along) {
            row_of::<F, N>(x, row + comptime!(line as u32 * 8), col, place)
        } else {
            row_across::<F, N>(x, place)
        };
        if comptime!(rotated) {
            rotate(&mut values, SIGNS.runtime());
        }
        block_amax = max(block_amax, amax_of(&values));
        rows.push(values);
    }
    if comptime!(square) {
        let group = comptime!(16 / lines as u32);
        let mut shared = SharedMemory::<f32>::new(comptime!(UNITS as usize));
        shared[UNIT_POS as usize] = block_amax;
        sync_cube();
        #[unroll]
        for i in 0..group {
            block_amax = max(block_amax, shared[(UNIT_POS / group * group + i) as usize]);
        }
    }

    let (scale, encode) = if comptime!(two_level) {
        let (byte, value) = e4m3_scale(min(block_amax * amax[1], 448.0f32));
        (byte, min(1.0f32 / (value * amax[2]), 3.402_823_5e38f32))
    } else {
        let (byte, value) = e4m3_scale(clamp(block_amax / 6.0f32, 0.015625f32, 448.0f32));
        (byte, 1.0f32 / value)
    };
    if ABSOLUTE_POS == 0usize {
        let mut g = 1.0f32;
        if comptime!(two_level) {
            g = amax[0] / 2688.0f32;
        }
        global[0] = g;
    }
    #[unroll]
    for line in 0..lines {
        let row = row + comptime!(line as u32 * 8);
        let mut random = Array::<u32>::new(comptime!(if stochastic { 8usize } else { 1usize }));
        if comptime!(stochastic) {
            let first = row * (cols / 8u32) + col / 8u32;
            draws(first, step, stream, key_low, key_high, &mut random);
        }
        let words = encoded(rows.index(line), encode, &random, stochastic);
        if comptime!(along) {
            if row < place.rows && col < cols {
                let at = scale_index(row, col, cols);
                codes[at] = words;
                scales[at] = u8::cast_from(scale);
            }
        } else {
            store_across(words, scale, codes, scales, place);
        }
    }
}

/// Eight words for 16 values, from two counters.
#[cube]
fn draws(first: u32, step: u32, stream: u32, key_low: u32, key_high: u32, out: &mut Array<u32>) {
    #[unroll]
    for half in 0..2u32 {
        let mut four = Array::<u32>::new(4usize);
        philox(first + half, step, stream, key_low, key_high, &mut four);
        #[unroll]
        for i in 0..4usize {
            out[comptime!(half as usize * 4 + i)] = four[i];
        }
    }
}

/// The codes of 16 values times `encode`.
#[cube]
#[allow(clippy::eq_op)]
fn encoded(
    values: &Array<f32>,
    encode: f32,
    random: &Array<u32>,
    #[comptime] stochastic: bool,
) -> Vector<u32, Const<2>> {
    let mut scaled = Array::<f32>::new(16usize);
    let mut sum = 0.0f32;
    #[unroll]
    for i in 0..16usize {
        scaled[i] = values[i] * encode;
        sum += values[i];
    }
    // A product that is not a number shows here: looked for only where the block's sum is not finite.
    let finite = sum.abs() < 3.0e38f32;
    if !finite {
        #[unroll]
        for i in 0..16usize {
            let x = scaled[i];
            scaled[i] = select(x == x, x, 6.0f32);
        }
    }
    let mut words = Vector::<u32, Const<2>>::new(0u32);
    #[unroll]
    for half in 0..2usize {
        let mut word = 0u32;
        #[unroll]
        for i in 0..8usize {
            let at = comptime!(half * 8 + i);
            let mut draw = 0u32;
            if comptime!(stochastic) {
                draw = draw_of(random[comptime!(at / 2)], comptime!(i as u32 % 2));
            }
            word += place_code(e2m1_encode_number(scaled[at], draw, stochastic), comptime!(i as u32));
        }
        words[half] = word;
    }
    words
}
