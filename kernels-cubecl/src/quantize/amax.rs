//! The largest magnitude of a matrix, as it is or with every 16 columns Hadamard-transformed, and the factors that
//! quantizing needs.
//! ```text
//! amax = 0; for i { amax = max(amax, |x[i]|), infinity if x[i] is NaN }            // the plain loop
//! ```
//! Codes cannot say that a value is NaN. A NaN makes the tensor scale infinite instead, and with it every value of the matrix
//! infinite or NaN, which a training step notices.
//!
//! Reads the matrix once: bound by memory.

use super::{
    BlockShape, View,
    tile::{DeviceView, QuantizeGrid, gap, load_rows, own, rotate_row},
};
use crate::{
    device::vector_size,
    error::{KernelError, expect_blocks, expect_len},
    reduce::{cube_max, cube_maxima, largest},
};
use cubecl::prelude::*;

/// Number of values that [`amax()`] writes.
pub const AMAX_LEN: usize = 3;

/// `out = [amax, full / 6, 1 / full]` with `amax = room * max |x|` and `full` as in [`crate::quantize`]. `room` is 1, or the
/// factor by which values may grow before block scales saturate. Two launches: up to 1,024 cubes write one maximum each, then one
/// cube reduces these.
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
    amax_together(client, vec![x], dtype, room, out)
}

/// The same as [`amax()`] for the largest magnitude of several matrices. One launch for each, and one more.
///
/// # Errors
/// If `out` does not hold three elements.
pub fn amax_together<R: Runtime>(
    client: &ComputeClient<R>,
    xs: Vec<ArrayArg<R>>,
    dtype: StorageType,
    room: f32,
    out: ArrayArg<R>,
) -> Result<(), KernelError> {
    expect_len("amax", "out", out.size(), AMAX_LEN)?;
    let cubes = |x: &ArrayArg<R>| {
        let vector = vector_size(client, dtype, x.size());
        (x.size() / vector).div_ceil(256 * 8).clamp(1, 1024)
    };
    let all: usize = xs.iter().map(cubes).sum();
    let scratch = client.empty(all * 4);
    // SAFETY: `scratch` holds one f32 for each cube of all launches; the kernel stops at the end of what it reads.
    unsafe {
        let maxima = || ArrayArg::from_raw_parts(scratch.clone(), all);
        let mut first = 0;
        for x in xs {
            let (cubes, vector) = (cubes(&x), vector_size(client, dtype, x.size()));
            let (count, dim) = (CubeCount::Static(cubes as u32, 1, 1), CubeDim::new_1d(256));
            amax_kernel::launch_unchecked(client, count, dim, vector, x, maxima(), 1.0, first, false, dtype);
            first += cubes as u32;
        }
        amax_of_maxima(client, maxima(), room, out)
    }
}

/// The same as [`amax()`] for a matrix whose partial maxima (f32) were left by the kernel that made it. One launch.
///
/// # Errors
/// If `out` does not hold three elements.
pub fn amax_of_maxima<R: Runtime>(
    client: &ComputeClient<R>,
    maxima: ArrayArg<R>,
    room: f32,
    out: ArrayArg<R>,
) -> Result<(), KernelError> {
    expect_len("amax", "out", out.size(), AMAX_LEN)?;
    let float = f32::as_type_native_unchecked().storage_type();
    let vector = vector_size(client, float, maxima.size());
    let units = client.properties().hardware.max_units_per_cube.min(1024);
    let (one, dim) = (CubeCount::Static(1, 1, 1), CubeDim::new_1d(units));
    // SAFETY: `out` holds three f32; the kernel stops at the end of what it reads.
    unsafe { amax_kernel::launch_unchecked(client, one, dim, vector, maxima, out, room, 0, true, float) };
    Ok(())
}

/// The same as [`amax()`] for the matrix with every 16 columns Hadamard-transformed; with `plain`, which has as many
/// elements as `out`, for the matrix as it is too. Two launches.
///
/// # Errors
/// If the columns are not a multiple of 16 or a buffer does not fit.
pub fn amax_rotated<R: Runtime>(
    client: &ComputeClient<R>,
    x: ArrayArg<R>,
    dtype: StorageType,
    view: View,
    out: ArrayArg<R>,
    plain: Option<ArrayArg<R>>,
) -> Result<(), KernelError> {
    const NAME: &str = "amax rotated";
    expect_blocks(NAME, "columns", view.cols)?;
    expect_len(NAME, "x", x.size(), view.rows * view.cols)?;
    expect_len(NAME, "out", out.size(), AMAX_LEN)?;
    if let Some(plain) = &plain {
        expect_len(NAME, "plain", plain.size(), AMAX_LEN)?;
    }
    let grid = QuantizeGrid::new(client, dtype, view, BlockShape::Row)?;
    let both = plain.is_some();
    let len = if both { 2 * grid.cubes } else { grid.cubes };
    let scratch = client.empty(len * 4);
    // SAFETY: `scratch` holds one f32 a cube, and with `plain` two; units outside the matrix contribute 0. `out` and `plain`
    // hold three f32.
    unsafe {
        let partial = || ArrayArg::from_raw_parts(scratch.clone(), len);
        amax_rotated_kernel::launch_unchecked(
            client,
            grid.count,
            grid.dim,
            grid.vector,
            x,
            partial(),
            grid.place,
            grid.along,
            grid.lines,
            both,
            dtype,
        );
        let Some(plain) = plain else { return amax_of_maxima(client, partial(), 1.0, out) };
        let (two, dim) = (CubeCount::Static(2, 1, 1), CubeDim::new_1d(256));
        amax_of_both_kernel::launch_unchecked(client, two, dim, partial(), out, plain);
    }
    Ok(())
}

/// Every cube writes its maximum of the rotated matrix, and if `both` that of the matrix behind the first of all cubes.
#[cube(launch_unchecked)]
fn amax_rotated_kernel<F: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    out: &mut Array<f32>,
    place: DeviceView,
    #[comptime] along: bool,
    #[comptime] lines: usize,
    #[comptime] both: bool,
    #[define(F)] _dtype: StorageType,
) {
    let (row, col) = own(along, lines);
    let mut rows = load_rows::<F, N>(x, row, col, place, along, lines);
    let mut plain = 0.0f32;
    let mut amax = 0.0f32;
    #[unroll]
    for line in 0..lines {
        let inside = row + comptime!(line as u32 * gap(along)) < place.rows && col < place.cols;
        if comptime!(both) && inside {
            plain = max(plain, infinity_if_nan(rows.index(line).amax, rows.index(line).sum));
        }
        rotate_row(rows.index_mut(line));
        if inside {
            amax = max(amax, infinity_if_nan(rows.index(line).amax, rows.index(line).sum));
        }
    }
    let cube = (CUBE_POS_Y * CUBE_COUNT_X + CUBE_POS_X) as usize;
    if comptime!(both) {
        let (amax, plain) = cube_maxima(amax, plain);
        if UNIT_POS == 0u32 {
            out[cube] = amax;
            out[cube + (CUBE_COUNT_X * CUBE_COUNT_Y) as usize] = plain;
        }
    } else {
        let amax = cube_max(amax);
        if UNIT_POS == 0u32 {
            out[cube] = amax;
        }
    }
}

/// `amax`, or infinity if the values whose sum is `sum` are not all numbers. Bits are compared because Mesa's driver did not see
/// every NaN in a comparison of the sum with itself.
#[cube]
pub(crate) fn infinity_if_nan(amax: f32, sum: f32) -> f32 {
    let is_nan = u32::reinterpret(sum) & 0x7FFF_FFFFu32 > 0x7F80_0000u32;
    f32::reinterpret(select(is_nan, 0x7F80_0000u32, u32::reinterpret(amax)))
}

/// The first of two cubes reduces the first half of the maxima, the second the second.
#[cube(launch_unchecked)]
fn amax_of_both_kernel(maxima: &Array<f32>, rotated: &mut Array<f32>, plain: &mut Array<f32>) {
    let half = maxima.len() / 2usize;
    let mut amax = 0.0f32;
    let mut at = UNIT_POS as usize;
    while at < half {
        amax = max(amax, maxima[CUBE_POS_X as usize * half + at]);
        at += CUBE_DIM as usize;
    }
    let amax = cube_max(amax);
    if UNIT_POS == 0u32 {
        if CUBE_POS_X == 0u32 {
            write_factors(rotated, amax);
        } else {
            write_factors(plain, amax);
        }
    }
}

/// Writes the largest magnitude and the factors that follow from it.
#[cube]
fn write_factors(out: &mut Array<f32>, amax: f32) {
    out[0usize] = amax;
    let is_usual = amax > 0.0f32 && amax <= 3.402_823_5e38f32;
    let full = select(is_usual, min(2688.0f32 / amax, 3.402_823_5e38f32), 1.0f32);
    out[1] = full * (1.0f32 / 6.0f32);
    out[2] = 1.0f32 / full;
}

#[cube(launch_unchecked)]
fn amax_kernel<F: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    out: &mut Array<f32>,
    room: f32,
    first: u32,
    #[comptime] last: bool,
    #[define(F)] _dtype: StorageType,
) {
    let mut amax = 0.0f32;
    let mut at = ABSOLUTE_POS;
    let step = (CUBE_COUNT_X * CUBE_DIM) as usize;
    while at < x.len() {
        amax = max(amax, largest(x[at]));
        at += step;
    }
    let amax = cube_max(amax);
    if UNIT_POS == 0u32 {
        if comptime!(last) {
            write_factors(out, amax * room);
        } else {
            out[(first + CUBE_POS_X) as usize] = amax;
        }
    }
}
