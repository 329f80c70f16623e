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
//! A block is 1x16 (one row, 16 columns) or 16x16. One unit owns 16 columns of one row, read once as vectors and
//! kept in registers, where they may be rotated first ([`crate::hadamard`]); for 16x16 it owns two rows, and the amax
//! goes through shared memory. The transpose is quantised in place: a cube brings 64 of its columns and 64 of its rows
//! into shared memory along the rows of what is stored and takes them out across, and the codes back the same way, so
//! that both sides of memory see whole sectors. The input is read twice (tensor amax, then codes; once if single-level)
//! and 4.5 bits a value are written: bound by memory, next by integer operations. No rounded product ever
//! feeds a sum, so that no backend can contract it into a fused multiply-add: codes and scales are the reference's bit for bit.

use crate::{
    codec::{e2m1_encode_number, e4m3_scale},
    error::{KernelError, expect_blocks, expect_len, index},
    hadamard::{SIGNS, rotate},
    layout::{BLOCK, place_code, scale_index, scales_per_row, words_per_row},
    reduce::cube_max,
    rng::{Stream, draw_of, philox},
};
use cubecl::prelude::*;

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

/// Rows, columns and strides of a dense matrix. Swapped strides quantise the transpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct View {
    /// Rows R.
    pub rows: usize,
    /// Columns C: blocks run along them.
    pub cols: usize,
    /// Elements from a row to the next.
    pub row_stride: usize,
    /// Elements from a column to the next.
    pub col_stride: usize,
}

impl View {
    /// A contiguous row-major matrix.
    pub fn row_major(rows: usize, cols: usize) -> Self {
        Self { rows, cols, row_stride: cols, col_stride: 1 }
    }

    /// The transpose of a contiguous row-major matrix of `rows` x `cols`: `cols` rows, `rows` columns.
    pub fn transposed(rows: usize, cols: usize) -> Self {
        Self { rows: cols, cols: rows, row_stride: 1, col_stride: cols }
    }
}

/// Quantises `x` (float of type `dtype`, laid out as `view`) into `codes` (u32, R x C/8), `scales`
/// (u8, R x C/16) and `global` (f32, 1). `amax` (f32, 3) comes from [`amax`] or, if blocks are to be `rotated`, from
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

/// As [`amax`] of the matrix with every 16 columns rotated. Two launches.
///
/// # Errors
/// If C is not a multiple of 16 or a buffer does not fit.
pub fn amax_rotated<R: Runtime>(
    client: &ComputeClient<R>,
    x: ArrayArg<R>,
    dtype: StorageType,
    view: View,
    out: ArrayArg<R>,
) -> Result<(), KernelError> {
    const NAME: &str = "amax rotated";
    expect_blocks(NAME, "columns", view.cols)?;
    expect_len(NAME, "x", x.size(), view.rows * view.cols)?;
    expect_len(NAME, "out", out.size(), AMAX_LEN)?;
    let plan = Plan::new(client, dtype, view, Block::Row)?;
    let scratch = client.empty(plan.cubes * 4);
    let float = f32::as_type_native_unchecked().storage_type();
    // SAFETY: `scratch` holds one f32 a cube, `out` three; units outside the matrix contribute 0.
    unsafe {
        let partial = || ArrayArg::from_raw_parts(scratch.clone(), plan.cubes);
        amax_rotated_kernel::launch_unchecked(
            client,
            plan.count,
            plan.dim,
            plan.vector,
            x,
            partial(),
            plan.place,
            plan.along,
            dtype,
        );
        let (one, dim) = (CubeCount::Static(1, 1, 1), CubeDim::new_1d(256));
        amax_kernel::launch_unchecked(client, one, dim, 1, partial(), out, 1.0, true, float);
    }
    Ok(())
}

/// Units of a cube.
const UNITS: u32 = 256;
/// Rows, and columns, of the transpose that a cube takes.
const TILE: u32 = 64;
/// Values from a row of the tile to the next: of 16 bits an odd number of words, against bank conflicts.
const PITCH: u32 = TILE + 2;

/// How a matrix is cut into cubes and units: see [`own()`].
struct Plan<R: Runtime> {
    count: CubeCount,
    cubes: usize,
    dim: CubeDim,
    vector: usize,
    /// Whether columns are neighbours in memory; else rows are.
    along: bool,
    /// Rows of a block that a unit owns, eight apart.
    lines: usize,
    place: PlaceLaunch<R>,
}

impl<R: Runtime> Plan<R> {
    fn new(client: &ComputeClient<R>, dtype: StorageType, view: View, block: Block) -> Result<Self, KernelError> {
        const NAME: &str = "quantize";
        let View { rows, cols, row_stride, col_stride } = view;
        let along = col_stride == 1;
        expect_len(NAME, "stride of what lies side by side", if along { 1 } else { row_stride }, 1)?;
        let (count, step, whole) = if along { (rows, row_stride, cols) } else { (cols, col_stride, rows) };
        expect_len(NAME, "stride of what does not", if count > 1 { step } else { whole }, whole)?;
        let (blocks, lines) = (index(NAME, "columns", scales_per_row(cols))?, index(NAME, "rows", rows)?);
        let own_lines = if along && block == Block::Square { 2 } else { 1 };
        let (x, y) = if along {
            (blocks.div_ceil(16), lines.div_ceil(16 * own_lines))
        } else {
            (lines.div_ceil(TILE), blocks.div_ceil(TILE / 16))
        };
        Ok(Self {
            count: CubeCount::Static(x, y, 1),
            cubes: (x * y) as usize,
            dim: CubeDim::new_1d(UNITS),
            vector: if step.is_multiple_of(BLOCK) { vector_size(client, dtype, 8) } else { 1 },
            along,
            lines: own_lines as usize,
            place: PlaceLaunch::new(lines, index(NAME, "columns", cols)?, index(NAME, "stride", step)?),
        })
    }
}

/// [`View`] on the device.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Place {
    rows: u32,
    cols: u32,
    /// From a row to the next, or from a column to the next where rows lie side by side.
    stride: u32,
}

/// The (first) row and the first column that a unit owns. Sixteen units one after another, or eight with two rows each,
/// share a 16x16 block.
#[cube]
fn own(#[comptime] along: bool, #[comptime] lines: usize) -> (u32, u32) {
    if comptime!(!along) {
        (CUBE_POS_X * TILE + UNIT_POS % TILE, CUBE_POS_Y * TILE + UNIT_POS / TILE * 16u32)
    } else if comptime!(lines == 2) {
        let row = CUBE_POS_Y * 32u32 + UNIT_POS / 128u32 * 16u32 + UNIT_POS % 8u32;
        (row, CUBE_POS_X * 256u32 + UNIT_POS / 8u32 % 16u32 * 16u32)
    } else {
        (CUBE_POS_Y * 16u32 + UNIT_POS / 16u32, CUBE_POS_X * 256u32 + UNIT_POS % 16u32 * 16u32)
    }
}

/// 16 columns of `row` where columns lie side by side, zeros outside the matrix.
#[cube]
fn row_of<F: Float, N: Size>(x: &Array<Vector<F, N>>, row: u32, col: u32, place: Place) -> Array<f32> {
    let mut values = zeros();
    if row < place.rows && col < place.cols {
        let n = N::value();
        let first = ((row as usize) * (place.stride as usize) + (col as usize)) / n;
        #[unroll]
        for part in 0..comptime!(16 / n) {
            let vector = x[first + part];
            #[unroll]
            for i in 0..n {
                values[comptime!(part * n + i)] = f32::cast_from(vector[i]);
            }
        }
    }
    values
}

/// The same where rows lie side by side: all units fill the cube's tile and take their 16 columns out of it.
#[cube]
fn row_across<F: Float, N: Size>(x: &Array<Vector<F, N>>, place: Place) -> Array<f32> {
    let n = N::value();
    let n = comptime!(n as u32);
    let mut tile = SharedMemory::<F>::new(comptime!((TILE * PITCH) as usize));
    let (row0, col0) = (CUBE_POS_X * TILE, CUBE_POS_Y * TILE);
    let width = comptime!(TILE / n);
    #[unroll]
    for pass in 0..comptime!(TILE * width / UNITS) {
        let at = UNIT_POS + comptime!(pass * UNITS);
        let (down, along) = (at / width, at % width * n);
        let (row, col) = (row0 + along, col0 + down);
        let mut vector = Vector::<F, N>::new(F::new(0.0));
        if row < place.rows && col < place.cols {
            vector = x[((col as usize) * (place.stride as usize) + (row as usize)) / comptime!(n as usize)];
        }
        #[unroll]
        for i in 0..comptime!(n as usize) {
            tile[(down * PITCH + along + comptime!(i as u32)) as usize] = vector[i];
        }
    }
    sync_cube();
    let mut values = zeros();
    let first = UNIT_POS / TILE * comptime!(16 * PITCH) + UNIT_POS % TILE;
    #[unroll]
    for i in 0..16usize {
        values[i] = f32::cast_from(tile[(first + comptime!(i as u32 * PITCH)) as usize]);
    }
    values
}

#[cube]
fn zeros() -> Array<f32> {
    let mut values = Array::<f32>::new(16usize);
    #[unroll]
    for i in 0..16usize {
        values[i] = 0.0f32;
    }
    values
}

#[cube]
fn amax_of(values: &Array<f32>) -> f32 {
    let mut amax = 0.0f32;
    #[unroll]
    for i in 0..16usize {
        amax = max(amax, values[i].abs());
    }
    amax
}

#[cube(launch_unchecked)]
fn amax_rotated_kernel<F: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    out: &mut Array<f32>,
    place: Place,
    #[comptime] along: bool,
    #[define(F)] _dtype: StorageType,
) {
    let (row, col) = own(along, 1usize);
    let mut values = if comptime!(along) { row_of::<F, N>(x, row, col, place) } else { row_across::<F, N>(x, place) };
    rotate(&mut values, SIGNS.runtime());
    let amax = cube_max(amax_of(&values));
    if UNIT_POS == 0u32 {
        out[(CUBE_POS_Y * CUBE_COUNT_X + CUBE_POS_X) as usize] = amax;
    }
}

/// Values that [`amax`] writes.
pub const AMAX_LEN: usize = 3;

/// `out = [A, S / 6, 1 / S]` with `A = room * max |x|`, NaN ignored, and `S` as above. `room` is 1, or how far the values
/// may grow before block scales saturate. Two launches: a maximum for each of up
/// to 1,024 cubes, then one cube.
///
/// # Errors
/// If `out` does not hold three elements.
pub fn amax<R: Runtime>(
    client: &ComputeClient<R>,
    x: ArrayArg<R>,
    dtype: StorageType,
    room: f32,
    out: ArrayArg<R>,
) -> Result<(), KernelError> {
    expect_len("amax", "out", out.size(), AMAX_LEN)?;
    let vector = vector_size(client, dtype, x.size());
    let cubes = (x.size() / vector).div_ceil(256 * 8).clamp(1, 1024);
    let scratch = client.empty(cubes * 4);
    let float = f32::as_type_native_unchecked().storage_type();
    let dim = CubeDim::new_1d(256);
    // SAFETY: `scratch` holds one f32 a cube, `out` three; both kernels stop at the end of what they read.
    unsafe {
        let scratch_arg = || ArrayArg::from_raw_parts(scratch.clone(), cubes);
        amax_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            dim,
            vector,
            x,
            scratch_arg(),
            1.0,
            false,
            dtype,
        );
        let one = CubeCount::Static(1, 1, 1);
        amax_kernel::launch_unchecked(client, one, dim, 1, scratch_arg(), out, room, true, float);
    }
    Ok(())
}

/// The widest vector of at most eight elements of `dtype` that the device reads at once and that divides `len`.
pub(crate) fn vector_size<R: Runtime>(client: &ComputeClient<R>, dtype: StorageType, len: usize) -> usize {
    client.io_optimized_vector_sizes(dtype.size()).find(|v| *v <= 8 && len.is_multiple_of(*v)).unwrap_or(1)
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

/// Brings what the units of a cube made across their tile back along it: four of them write a row's 32 bytes of codes.
#[cube]
fn store_across(
    words: Vector<u32, Const<2>>,
    scale: u32,
    codes: &mut Array<Vector<u32, Const<2>>>,
    scales: &mut Array<u8>,
    place: Place,
) {
    let mut made = SharedMemory::<u32>::new(comptime!((TILE * 13) as usize));
    let at = ((UNIT_POS % TILE) * 13u32 + UNIT_POS / TILE * 3u32) as usize;
    made[at] = words[0];
    made[at + 1usize] = words[1];
    made[at + 2usize] = scale;
    sync_cube();
    let (down, block) = (UNIT_POS / 4u32, UNIT_POS % 4u32);
    let (row, col) = (CUBE_POS_X * TILE + down, CUBE_POS_Y * TILE + block * 16u32);
    if row < place.rows && col < place.cols {
        let from = (down * 13u32 + block * 3u32) as usize;
        let mut words = Vector::<u32, Const<2>>::empty();
        words[0] = made[from];
        words[1] = made[from + 1usize];
        let at = scale_index(row, col, place.cols);
        codes[at] = words;
        scales[at] = u8::cast_from(made[from + 2usize]);
    }
}

#[cube(launch_unchecked)]
fn amax_kernel<F: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    out: &mut Array<f32>,
    room: f32,
    #[comptime] last: bool,
    #[define(F)] _dtype: StorageType,
) {
    let mut amax = 0.0f32;
    let mut at = ABSOLUTE_POS;
    let step = (CUBE_COUNT_X * 256u32) as usize;
    while at < x.len() {
        let vector = x[at];
        #[unroll]
        for i in 0..N::value() {
            let value = f32::cast_from(vector[i]).abs();
            amax = select(value > amax, value, amax);
        }
        at += step;
    }
    let amax = cube_max(amax);
    if UNIT_POS == 0u32 {
        if comptime!(last) {
            let amax = amax * room;
            out[0usize] = amax;
            let full = select(amax == 0.0f32, 1.0f32, min(2688.0f32 / amax, 3.402_823_5e38f32));
            out[1] = full * (1.0f32 / 6.0f32);
            out[2] = 1.0f32 / full;
        } else {
            out[CUBE_POS_X as usize] = amax;
        }
    }
}

/// Cubes of 256 units that cover `len` elements, spread over two dimensions past 65,535 cubes.
pub(crate) fn flat_launch(len: usize) -> (CubeCount, CubeDim) {
    let cubes = len.div_ceil(256).max(1) as u32;
    let x = cubes.min(65_535);
    (CubeCount::Static(x, cubes.div_ceil(x), 1), CubeDim::new_1d(256))
}
