//! Each row quantized by itself, or with a given tensor scale, and decoded again: `y[row, c] = (code[row, c] * scale[row, c /
//! 16]) * g[row]`. ```text for row { amax of the row; g; for block of 16 columns { scale; for c in block { code; y } } }    //
//! the plain loop ``` Scales and codes are those of [`crate::quantize`] with two levels and `full = 1 / g`, where `g` is the
//! smallest power of two that is at least `amax / 2688`, but not below 2^-100. A value then has at most six significant bits, so
//! that 16-bit types store it exactly. In f16 this holds for multiples of 2^-24, which all values of a row are if its `amax` is
//! at least 0.17; other values round to such a multiple. A given `full` replaces that of every row; then `g = 1 / full`, and
//! 16-bit types round the values.
//!
//! A cube takes one row after another, and reads it twice: for the largest magnitude, then for the values, which mostly lie in a
//! cache by then. With a given scale it reads a row once. A unit takes a block of 16 columns at a time. Reads and writes one
//! value each: bound by memory, and for a few rows by the latency of a launch.

use super::{
    BlockShape, View, encoded,
    tile::{DeviceView, QuantizeGrid, load_rows},
    two_level_scale,
};
use crate::{
    codec::{e2m1_decode, e4m3_magnitude},
    error::{KernelError, expect_blocks, expect_len},
    layout::{code_of, scales_per_row},
    reduce::cube_max,
};
use cubecl::prelude::*;

/// Writes the rounded rows of `x` (`rows` x `cols`, type `dtype`) to `y`, with the tensor scale `1 / full` if `full` is given.
///
/// # Errors
/// If the columns are not a multiple of 16 or a buffer does not fit the shape.
pub fn rounded_rows<R: Runtime>(
    client: &ComputeClient<R>,
    x: ArrayArg<R>,
    y: ArrayArg<R>,
    dtype: StorageType,
    [rows, cols]: [usize; 2],
    full: Option<f32>,
) -> Result<(), KernelError> {
    const NAME: &str = "rounded rows";
    expect_blocks(NAME, "columns", cols)?;
    expect_len(NAME, "x", x.size(), rows * cols)?;
    expect_len(NAME, "y", y.size(), rows * cols)?;
    if rows == 0 || cols == 0 {
        return Ok(());
    }
    let grid = QuantizeGrid::new(client, dtype, View::row_major(rows, cols), BlockShape::Row)?;
    let most = (client.properties().hardware.max_units_per_cube as usize).min(256);
    let units = scales_per_row(cols).next_multiple_of(32).min(most) as u32;
    let cubes = CubeCount::Static(rows.min(65_535) as u32, 1, 1);
    // SAFETY: buffer lengths were checked against the shape; cubes step over rows up to the last, and units over blocks.
    unsafe {
        let dim = CubeDim::new_1d(units);
        let given = full.unwrap_or(1.0);
        let (inverse, is_given) = (1.0 / given, full.is_some());
        rounded_rows_kernel::launch_unchecked(
            client,
            cubes,
            dim,
            grid.vector,
            x,
            y,
            grid.place,
            given,
            inverse,
            is_given,
            dtype,
        );
    }
    Ok(())
}

#[cube(launch_unchecked)]
fn rounded_rows_kernel<F: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    y: &mut Array<Vector<F, N>>,
    place: DeviceView,
    given: f32,
    inverse: f32,
    #[comptime] is_given: bool,
    #[define(F)] _dtype: StorageType,
) {
    let n = N::value();
    let random = Array::<u32>::new(4usize);
    let mut row = CUBE_POS_X;
    while row < place.rows {
        let mut g = inverse;
        let mut full = given;
        if comptime!(!is_given) {
            let mut amax = 0.0f32;
            let mut col = UNIT_POS * 16u32;
            while col < place.cols {
                let rows = load_rows::<F, N>(x, row, col, place, true, 1usize);
                let block_amax = rows.index(0usize).amax;
                // What `max` returns for a block of NaN depends on the device.
                amax = select(block_amax > amax, block_amax, amax);
                col += CUBE_DIM * 16u32;
            }
            let (of_row, reciprocal) = row_scale(cube_max(amax));
            g = of_row;
            full = reciprocal;
        }
        let mut col = UNIT_POS * 16u32;
        while col < place.cols {
            let rows = load_rows::<F, N>(x, row, col, place, true, 1usize);
            let block = rows.index(0usize);
            let (byte, encode) = two_level_scale(block.amax, full * (1.0f32 / 6.0f32), g);
            let words = encoded(block, block.amax, encode, &random, false);
            let scale = e4m3_magnitude(byte);
            let first = ((row as usize) * (place.cols as usize) + (col as usize)) / n;
            #[unroll]
            for part in 0..comptime!(16 / n) {
                let mut values = Vector::<f32, N>::empty();
                #[unroll]
                for i in 0..n {
                    let at = comptime!(part * n + i);
                    let code = code_of(words[comptime!(at / 8)], comptime!((at % 8) as u32));
                    values[i] = (e2m1_decode(code) * scale) * g;
                }
                y[first + part] = Vector::cast_from(values);
            }
            col += CUBE_DIM * 16u32;
        }
        row += CUBE_COUNT_X;
    }
}

/// The tensor scale of a row with this largest magnitude, and its reciprocal. 2688 is `1.3125 * 2^11`, so the exponent of
/// `amax` goes up by one if its significand is above 1.3125. Integer operations, because divisions may round differently
/// from device to device.
#[cube]
fn row_scale(amax: f32) -> (f32, f32) {
    let exponent = max((u32::reinterpret(amax) + 0x0057_FFFFu32) >> 23u32, 38u32) - 11u32;
    (f32::reinterpret(exponent << 23u32), f32::reinterpret((254u32 - exponent) << 23u32))
}
