//! A dense matrix to NVFP4: `x[row, c] -> code[row, c], scale[row, c / 16], g`.
//!
//! Two-level scaling follows TransformerEngine, all in f32. `amax` is the largest magnitude of the tensor,
//! `block_amax` that of a block, and `full` scales the tensor to the full range of code times scale (6 * 448 = 2688):
//! ```text
//! full = min(2688 / amax, FLT_MAX), 1 if amax is 0 or infinite        g = amax / 2688
//! scale = e4m3(min(block_amax * (full * (1/6)), 448))
//! code = e2m1(x * min(1 / (scale * (1/full)), FLT_MAX))
//! for row { for block of 16 columns { amax of the block; scale; for c in block { code } } }      // the plain loop
//! ```
//! Single-level scaling follows torchao: `scale = e4m3(clamp(block_amax / 6, 2^-6, 448))`, `code = e2m1(x *
//! (1/scale))`, `g = 1`, or infinity if amax is.
//!
//! A block has 1x16 values (one row, 16 columns) or 16x16. A unit keeps 16 columns of one row, or of two, in
//! registers (`tile.rs`), where they can be Hadamard-transformed first ([`crate::hadamard`]). The largest magnitude
//! of a 16x16 block goes through shared memory. The input is read twice (for the tensor's largest magnitude, then for
//! the codes), and a value takes 4.5 bits of the output. For a product that is made at once,
//! `code * scale` is written in place of the code, so that nothing has to decode it ([`QuantizeOutput::Values`]). The
//! kernel is bound by memory, next by integer operations.
//!
//! Codes and scales are the reference's bit for bit. For that no compiler may contract a product and a sum into a
//! fused multiply-add: a rounded product enters a sum only as a magnitude, its sign is read separately, and it may
//! have been replaced in between.

use crate::{
    codec::{e2m1_bounded, e2m1_decode, e2m1_word, e4m3_decode, e4m3_scale},
    dequantize::values_by_pairs,
    device::{bit_casts, sequence, vector_size},
    error::{KernelError, expect_blocks, expect_len, require},
    layout::{code_of, scale_index},
    operands::PackedArgs,
    rng::{Cipher, Stream, cipher, philox},
};
use cubecl::{
    ir::{ElemType, FloatKind},
    prelude::*,
};

mod amax;
mod rows;
mod spec;
mod tile;

pub(crate) use amax::infinity_if_nan;
pub use amax::{AMAX_LEN, amax, amax_of_maxima, amax_rotated, amax_together};
pub use rows::rounded_rows;
pub use spec::{BlockShape, QuantizeSpec, Rounding, Scaling};
pub use tile::View;
use tile::{
    DeviceView, MadeBlock, QuantizeGrid, RowBlock, gap, load_rows, moved_across, own, place_across, rotate_row, units,
};

/// What a quantized matrix becomes.
pub enum QuantizeOutput<R: Runtime> {
    /// Codes, block scales and tensor scale.
    Packed(PackedArgs<R>),
    /// For a product that is made at once: each `code * scale`, of the type of `x` and row-major, and the tensor scale.
    Values {
        /// `rows x cols` values.
        values: ArrayArg<R>,
        /// f32, 1.
        global: ArrayArg<R>,
    },
}

/// Quantizes `x` (float of type `dtype`, laid out as `view`) into `out`. If `rotated`, every 16 columns are Hadamard-transformed
/// first. `amax` (f32, 3) comes from [`amax()`], from [`amax_together`] if matrices share a tensor scale, or from
/// [`amax_rotated`] if `rotated`; single-level scaling only reads whether it is infinite.
///
/// # Errors
/// If the columns (and for 16x16 blocks the rows) are not a multiple of 16, or a buffer does not fit the shape.
#[allow(clippy::too_many_arguments, reason = "a launch takes its buffers one by one")]
pub fn quantize<R: Runtime>(
    client: &ComputeClient<R>,
    x: ArrayArg<R>,
    dtype: StorageType,
    amax: ArrayArg<R>,
    out: QuantizeOutput<R>,
    view: View,
    spec: QuantizeSpec,
    rotated: bool,
) -> Result<(), KernelError> {
    launch(client, x, dtype, (amax, None), out, view, spec, rotated)
}

/// Quantizes `x` (float of type `dtype`, row-major) into `out` again, unless its largest magnitude is still the one of `held`, to
/// the bit. Both `amax` and `held` (f32, 3) come from [`amax()`]. Rounding is to nearest, and there are two levels of scales.
///
/// # Errors
/// As [`quantize()`].
pub fn renew<R: Runtime>(
    client: &ComputeClient<R>,
    x: ArrayArg<R>,
    dtype: StorageType,
    amax: ArrayArg<R>,
    held: ArrayArg<R>,
    out: PackedArgs<R>,
    block: BlockShape,
) -> Result<(), KernelError> {
    expect_len("quantize", "held", held.size(), AMAX_LEN)?;
    let view = View::row_major(out.rows, out.cols);
    let spec = QuantizeSpec { scaling: Scaling::Two, block, rounding: Rounding::Nearest };
    launch(client, x, dtype, (amax, Some(held)), QuantizeOutput::Packed(out), view, spec, false)
}

/// [`quantize()`], or [`renew()`] if a held magnitude is given.
#[allow(clippy::too_many_arguments, reason = "a launch takes its buffers one by one")]
fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    x: ArrayArg<R>,
    dtype: StorageType,
    (amax, held): (ArrayArg<R>, Option<ArrayArg<R>>),
    out: QuantizeOutput<R>,
    view: View,
    spec: QuantizeSpec,
    rotated: bool,
) -> Result<(), KernelError> {
    const NAME: &str = "quantize";
    let View { rows, cols, .. } = view;
    let (codes, scales, values, global) = match out {
        QuantizeOutput::Packed(out) => {
            out.check(NAME)?;
            require(NAME, [out.rows, out.cols] == [rows, cols], || {
                format!("codes of {}x{} for a matrix of {rows}x{cols}", out.rows, out.cols)
            })?;
            (Some(out.codes), Some(out.scales), None, out.global)
        }
        QuantizeOutput::Values { values, global } => {
            expect_blocks(NAME, "columns", cols)?;
            expect_len(NAME, "values", values.size(), rows * cols)?;
            expect_len(NAME, "global", global.size(), 1)?;
            (None, None, Some(values), global)
        }
    };
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
    let bf16 = dtype == StorageType::Scalar(ElemType::Float(FloatKind::BF16));
    let by_pairs = bit_casts(client) && dtype.size() == 2;
    // SAFETY: buffer lengths were checked against the shape; units outside it write nothing.
    unsafe {
        quantize_kernel::launch_unchecked(
            client,
            grid.count,
            grid.dim,
            grid.vector,
            vector_size(client, dtype, 8),
            x,
            amax,
            sequence(held),
            sequence(codes),
            sequence(scales),
            sequence(values),
            global,
            grid.place,
            cipher(stream),
            spec.scaling == Scaling::Two,
            spec.block == BlockShape::Square,
            stochastic,
            grid.along,
            grid.lines,
            rotated,
            by_pairs,
            bf16,
            dtype,
        );
    }
    Ok(())
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments, reason = "a kernel takes its buffers one by one")]
fn quantize_kernel<F: Float, N: Size, Width: Size>(
    x: &Array<Vector<F, N>>,
    amax: &Array<f32>,
    held: &Sequence<Array<f32>>,
    codes: &mut Sequence<Array<Vector<u32, Const<2>>>>,
    scales: &mut Sequence<Array<u8>>,
    values: &mut Sequence<Array<Vector<F, Width>>>,
    global: &mut Array<f32>,
    place: DeviceView,
    cipher: &Cipher,
    #[comptime] two_level: bool,
    #[comptime] square: bool,
    #[comptime] stochastic: bool,
    #[comptime] along: bool,
    #[comptime] lines: usize,
    #[comptime] rotated: bool,
    #[comptime] by_pairs: bool,
    #[comptime] bf16: bool,
    #[define(F)] _dtype: StorageType,
) {
    if comptime!(held.len() == 1) {
        // The whole launch agrees, so that no unit waits for another at a barrier.
        if u32::reinterpret(held.index(0usize)[0]) == u32::reinterpret(amax[0]) {
            terminate!();
        }
    }
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
        let mut g = amax[0] / 2688.0f32;
        if comptime!(!two_level) {
            g = select(amax[0] <= 3.402_823_5e38f32, 1.0f32, amax[0]);
        }
        global[0] = g;
    }
    let mut made = Sequence::<MadeBlock>::new();
    #[unroll]
    for line in 0..lines {
        let block_amax = if comptime!(square) { square_amax } else { rows.index(line).amax };
        let (byte, encode) = scale_of(block_amax, amax, two_level);
        let mut random = Array::<u32>::new(4usize);
        if comptime!(stochastic) {
            let row = row + comptime!(line as u32 * gap(along));
            philox(scale_index(row, col, place.cols) as u32, cipher, 0u32, &mut random);
        }
        made.push(MadeBlock { words: encoded(rows.index(line), block_amax, encode, &random, stochastic), scale: byte });
    }
    let stored = if comptime!(along) { made } else { moved_across(&made) };
    #[unroll]
    for line in 0..lines {
        let (row, col) =
            if comptime!(along) { (row + comptime!(line as u32 * gap(true)), col) } else { place_across(line) };
        if row < place.rows && col < place.cols {
            let at = scale_index(row, col, place.cols);
            let block = stored.index(line);
            if comptime!(values.len() == 1) {
                store_values::<F, Width>(block, at, values.index_mut(0usize), by_pairs, bf16);
            } else {
                codes.index_mut(0usize)[at] = block.words;
                scales.index_mut(0usize)[at] = u8::cast_from(block.scale);
            }
        }
    }
}

/// Writes each `code * scale` of block number `at` of a matrix.
#[cube]
fn store_values<F: Float, Width: Size>(
    block: &MadeBlock,
    at: usize,
    values: &mut Array<Vector<F, Width>>,
    #[comptime] by_pairs: bool,
    #[comptime] bf16: bool,
) {
    let width = Width::value();
    #[unroll]
    for half in 0..2usize {
        let word = block.words[half];
        let mut eight = Array::<F>::new(8usize);
        if comptime!(by_pairs) {
            let pairs = values_by_pairs::<F>(word, block.scale, bf16);
            #[unroll]
            for i in 0..8usize {
                eight[i] = pairs[i];
            }
        } else {
            let scale = e4m3_decode(block.scale);
            #[unroll]
            for i in 0..8usize {
                eight[i] = F::cast_from(e2m1_decode(code_of(word, comptime!(i as u32))) * scale);
            }
        }
        #[unroll]
        for part in 0..comptime!(8 / width) {
            let mut vector = Vector::<F, Width>::empty();
            #[unroll]
            for i in 0..width {
                vector[i] = eight[comptime!(part * width + i)];
            }
            values[at * comptime!(16 / width) + comptime!(half * 8 / width + part)] = vector;
        }
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
pub(crate) fn two_level_scale(block_amax: f32, sixth: f32, inverse: f32) -> (u32, f32) {
    let (byte, value) = e4m3_scale(min(block_amax * sixth, 448.0f32));
    // A reciprocal is rounded correctly, also in a kernel whose divisions are quick.
    (byte, min((value * inverse).recip(), 3.402_823_5e38f32))
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
    let scaled = for_codes(&row.values, row.sum, amax, encode, 16usize);
    let mut words = Vector::<u32, Const<2>>::empty();
    words[0] = e2m1_word(&scaled, 0usize, random, 4usize, stochastic);
    words[1] = e2m1_word(&scaled, 8usize, random, 4usize, stochastic);
    words
}

/// `count` values times `encode`, in the range that has codes. `amax` is the largest magnitude of their block; `sum` is finite only
/// if they are.
#[cube]
pub(crate) fn for_codes(values: &Array<f32>, sum: f32, amax: f32, encode: f32, #[comptime] count: usize) -> Array<f32> {
    let mut scaled = Array::<f32>::new(count);
    #[unroll]
    for i in 0..count {
        scaled[i] = values[i] * encode;
    }
    // A product can be too large, or NaN, only if one of these conditions fails.
    let small = amax * encode < 7.0f32 && sum.abs() < 3.0e38f32;
    if !small {
        #[unroll]
        for i in 0..count {
            scaled[i] = e2m1_bounded(scaled[i]);
        }
    }
    scaled
}
