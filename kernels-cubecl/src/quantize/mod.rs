//! A dense matrix to NVFP4: `x[row, c] -> code[row, c], scale[row, c / 16], g`.
//!
//! Two-level scaling follows TransformerEngine, all in f32. `amax` is the largest magnitude of the tensor,
//! `block_amax` that of a block, and `full` scales the tensor to the full range of code times scale (6 * 448 = 2688):
//! ```text
//! full = min(2688 / amax, FLT_MAX), 1 if amax = 0        g = amax / 2688
//! scale = e4m3(min(block_amax * (full * (1/6)), 448))
//! code = e2m1(x * min(1 / (scale * (1/full)), FLT_MAX))
//! for row { for block of 16 columns { amax of the block; scale; for c in block { code } } }      // the plain loop
//! ```
//! Single-level scaling follows torchao: `scale = e4m3(clamp(block_amax / 6, 2^-6, 448))`, `code = e2m1(x *
//! (1/scale))`, `g = 1`.
//!
//! A block has 1x16 values (one row, 16 columns) or 16x16. A unit keeps 16 columns of one row, or of two, in
//! registers (`tile.rs`), where they can be Hadamard-transformed first ([`crate::hadamard`]). The largest magnitude
//! of a 16x16 block goes through shared memory. The input is read twice (for the tensor's largest magnitude, then for
//! the codes; single-level reads it once) and 4.5 bits a value are written: bound by memory, next by integer
//! operations.
//!
//! Codes and scales are the reference's bit for bit. For that no compiler may contract a product and a sum into a
//! fused multiply-add: a rounded product enters a sum only as a magnitude, its sign is read separately, and it may
//! have been replaced in between.

use crate::{
    codec::{e2m1_bounded, e2m1_word, e4m3_scale},
    error::{KernelError, expect_blocks, expect_len, require},
    layout::scale_index,
    matmul::PackedArgs,
    rng::{Cipher, Stream, cipher, philox},
};
use cubecl::prelude::*;

mod amax;
mod rows;
mod spec;
mod tile;

pub use amax::{AMAX_LEN, amax, amax_of_maxima, amax_rotated, amax_together};
pub use rows::rounded_rows;
pub use spec::{BlockShape, QuantizeSpec, Rounding, Scaling};
pub use tile::View;
use tile::{DeviceView, QuantizeGrid, RowBlock, gap, load_rows, own, rotate_row, store_across, units};

/// Quantizes `x` (float of type `dtype`, laid out as `view`) into `codes` (u32, `rows x cols/8`), `scales` (u8, `rows
/// x cols/16`) and `global` (f32, 1). If `rotated`, every 16 columns are Hadamard-transformed first. `amax` (f32, 3)
/// comes from [`amax()`], from [`amax_together`] if matrices share a tensor scale, or from [`amax_rotated`] if `rotated`;
/// single-level scaling ignores it.
///
/// # Errors
/// If the columns (and for 16x16 blocks the rows) are not a multiple of 16, or a buffer does not fit the shape.
#[allow(clippy::too_many_arguments, reason = "a launch takes its buffers one by one")]
pub fn quantize<R: Runtime>(
    client: &ComputeClient<R>,
    x: ArrayArg<R>,
    dtype: StorageType,
    amax: ArrayArg<R>,
    out: PackedArgs<R>,
    view: View,
    spec: QuantizeSpec,
    rotated: bool,
) -> Result<(), KernelError> {
    const NAME: &str = "quantize";
    let View { rows, cols, .. } = view;
    out.check(NAME)?;
    require(NAME, [out.rows, out.cols] == [rows, cols], || {
        format!("codes of {}x{} for a matrix of {rows}x{cols}", out.rows, out.cols)
    })?;
    if spec.block == BlockShape::Square {
        expect_blocks(NAME, "rows", rows)?;
    }
    expect_len(NAME, "x", x.size(), rows * cols)?;
    expect_len(NAME, "amax", amax.size(), AMAX_LEN)?;
    if rows == 0 || cols == 0 {
        return Ok(());
    }

    let (stochastic, stream) = match spec.rounding {
        Rounding::Nearest => (false, Stream { seed: 0, step: 0, stream: 0 }),
        Rounding::Stochastic(stream) => (true, stream),
    };
    let grid = QuantizeGrid::new(client, dtype, view, spec.block)?;
    // SAFETY: buffer lengths were checked against the shape; units outside it write nothing.
    unsafe {
        quantize_kernel::launch_unchecked(
            client,
            grid.count,
            grid.dim,
            grid.vector,
            x,
            amax,
            out.codes,
            out.scales,
            out.global,
            grid.place,
            cipher(stream),
            spec.scaling == Scaling::Two,
            spec.block == BlockShape::Square,
            stochastic,
            grid.along,
            grid.lines,
            rotated,
            dtype,
        );
    }
    Ok(())
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments, reason = "a kernel takes its buffers one by one")]
fn quantize_kernel<F: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    amax: &Array<f32>,
    codes: &mut Array<Vector<u32, Const<2>>>,
    scales: &mut Array<u8>,
    global: &mut Array<f32>,
    place: DeviceView,
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
    let mut rows = load_rows::<F, N>(x, row, col, place, along, lines);
    if comptime!(rotated) {
        #[unroll]
        for line in 0..lines {
            rotate_row(rows.index_mut(line));
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
fn amax_of_square(rows: &Sequence<RowBlock>, #[comptime] along: bool, #[comptime] lines: usize) -> f32 {
    // Eight units share a block: each owns two of its rows.
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

/// The scale byte of a block, and the factor that turns its values into codes.
#[cube]
fn scale_of(block_amax: f32, amax: &Array<f32>, #[comptime] two_level: bool) -> (u32, f32) {
    if comptime!(two_level) {
        two_level_scale(block_amax, amax[1], amax[2])
    } else {
        let (byte, value) = e4m3_scale(clamp(block_amax / 6.0f32, 0.015625f32, 448.0f32));
        (byte, 1.0f32 / value)
    }
}

/// The same for two levels, where the tensor scale gives `sixth = full / 6` and `inverse = 1 / full`.
#[cube]
fn two_level_scale(block_amax: f32, sixth: f32, inverse: f32) -> (u32, f32) {
    let (byte, value) = e4m3_scale(min(block_amax * sixth, 448.0f32));
    (byte, min(1.0f32 / (value * inverse), 3.402_823_5e38f32))
}

/// Encodes the values of a row times `encode`; `amax` is the largest magnitude of their block.
#[cube]
fn encoded(
    row: &RowBlock,
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
    // A product can be too large, or NaN, only if one of these conditions fails.
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
