//! RMS normalisation of rows (Zhang & Sennrich, arXiv 1910.07467), as Qwen3 rounds it, and its gradient:
//! ```text
//! r = 1 / sqrt(mean(x^2) + eps)      n = x * r      y = round(n) * w
//! g = dy * w      dx = r * (g - n * mean(g * n))    dw = sum over rows of dy * n
//! for row { sum x^2; for c { y[c] = x[c] * r * w[c] } }                             // the plain loop
//! ```
//! Statistics and sums are f32; `n` is rounded to the type of x before the weight, as Hugging Face does. A cube
//! takes one row after another, 256 units side by side, each with its own columns; backward keeps its share of
//! `dw` for all the rows it meets and writes it once, so that one short sum over cubes remains.
//! Moves x in and y out (x, dy in, dx out backward): bound by memory. The second reading of a row is cached.

use crate::{
    error::{KernelError, expect_len, index},
    quantize::vector_size,
};
use cubecl::prelude::*;

const UNITS: u32 = 256;
/// Cubes of a backward launch at most: each leaves one row of partial sums.
const CUBES: usize = 264;

/// `y` from `x` (`rows` x `cols`, type `dtype`) and `w` (f32, `cols`).
///
/// # Errors
/// If a buffer does not fit the shape.
pub fn rms_norm<R: Runtime>(
    client: &ComputeClient<R>,
    x: ArrayArg<R>,
    w: ArrayArg<R>,
    y: ArrayArg<R>,
    dtype: StorageType,
    [rows, cols]: [usize; 2],
    eps: f32,
) -> Result<(), KernelError> {
    const NAME: &str = "rms_norm";
    expect_len(NAME, "x", x.size(), rows * cols)?;
    expect_len(NAME, "y", y.size(), rows * cols)?;
    expect_len(NAME, "w", w.size(), cols)?;
    if rows == 0 {
        return Ok(());
    }
    let vector = vector_size(client, dtype, cols);
    let cubes = index(NAME, "rows", rows)?.min(65_535);
    // SAFETY: buffer lengths were checked; cubes step over rows up to the last.
    unsafe {
        rms_norm_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes, 1, 1),
            CubeDim::new_1d(UNITS),
            vector,
            x,
            w,
            y,
            rows as u32,
            index(NAME, "columns", cols)?,
            eps,
            dtype,
        );
    }
    Ok(())
}

/// Rows of the `partial` that [`rms_norm_backward`] needs for `rows` rows.
pub fn partial_rows(rows: usize) -> usize {
    rows.clamp(1, CUBES)
}

/// `dx` and `partial` (f32, [`partial_rows`] x `cols`), whose column sums are `dw`.
///
/// # Errors
/// If a buffer does not fit the shape.
pub fn rms_norm_backward<R: Runtime>(
    client: &ComputeClient<R>,
    x: ArrayArg<R>,
    w: ArrayArg<R>,
    dy: ArrayArg<R>,
    dx: ArrayArg<R>,
    partial: ArrayArg<R>,
    dtype: StorageType,
    [rows, cols]: [usize; 2],
    eps: f32,
) -> Result<(), KernelError> {
    const NAME: &str = "rms_norm backward";
    for (name, arg) in [("x", &x), ("dy", &dy), ("dx", &dx)] {
        expect_len(NAME, name, arg.size(), rows * cols)?;
    }
    let cubes = partial_rows(rows);
    expect_len(NAME, "w", w.size(), cols)?;
    expect_len(NAME, "partial", partial.size(), cubes * cols)?;
    let vector = vector_size(client, dtype, cols);
    let passes = (cols / vector).div_ceil(UNITS as usize);
    // SAFETY: as above.
    unsafe {
        rms_norm_backward_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(UNITS),
            vector,
            x,
            w,
            dy,
            dx,
            partial,
            index(NAME, "rows", rows)?,
            index(NAME, "columns", cols)?,
            eps,
            passes,
            dtype,
        );
    }
    Ok(())
}

#[cube(launch_unchecked)]
fn rms_norm_kernel<F: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    w: &Array<Vector<f32, N>>,
    y: &mut Array<Vector<F, N>>,
    rows: u32,
    cols: u32,
    eps: f32,
    #[define(F)] _dtype: StorageType,
) {
    let width = cols / (N::value() as u32);
    let mut row = CUBE_POS_X;
    while row < rows {
        let first = (row as usize) * (width as usize);
        let mut squares = Vector::<f32, N>::new(0.0f32);
        let mut c = UNIT_POS;
        while c < width {
            let value = Vector::<f32, N>::cast_from(x[first + (c as usize)]);
            squares += value * value;
            c += UNITS;
        }
        let scale = 1.0f32 / (sum_over(lanes(squares), UNITS) / f32::cast_from(cols) + eps).sqrt();
        let mut c = UNIT_POS;
        while c < width {
            let at = first + (c as usize);
            let normal = Vector::<F, N>::cast_from(Vector::<f32, N>::cast_from(x[at]) * Vector::new(scale));
            // Weighted in the type of x: the product of two rounded values is rounded once.
            let weight = Vector::<F, N>::cast_from(w[c as usize]);
            y[at] = Vector::cast_from(Vector::<f32, N>::cast_from(normal) * Vector::<f32, N>::cast_from(weight));
            c += UNITS;
        }
        row += CUBE_COUNT_X;
    }
}

#[cube(launch_unchecked)]
fn rms_norm_backward_kernel<F: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    w: &Array<Vector<f32, N>>,
    dy: &Array<Vector<F, N>>,
    dx: &mut Array<Vector<F, N>>,
    partial: &mut Array<Vector<f32, N>>,
    rows: u32,
    cols: u32,
    eps: f32,
    #[comptime] passes: usize,
    #[define(F)] _dtype: StorageType,
) {
    let width = cols / (N::value() as u32);
    let mut dw = Array::<Vector<f32, N>>::new(passes);
    #[unroll]
    for pass in 0..passes {
        dw[pass] = Vector::new(0.0f32);
    }
    let mut row = CUBE_POS_X;
    while row < rows {
        let first = (row as usize) * (width as usize);
        let mut squares = Vector::<f32, N>::new(0.0f32);
        let mut dots = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for pass in 0..passes {
            let c = comptime!(pass as u32 * UNITS) + UNIT_POS;
            if c < width {
                let at = first + (c as usize);
                let value = Vector::<f32, N>::cast_from(x[at]);
                squares += value * value;
                dots += value * w[c as usize] * Vector::<f32, N>::cast_from(dy[at]);
            }
        }
        let mean = 1.0f32 / f32::cast_from(cols);
        let scale = 1.0f32 / (sum_over(lanes(squares), UNITS) * mean + eps).sqrt();
        let along = sum_over(lanes(dots), UNITS) * mean * scale * scale;
        #[unroll]
        for pass in 0..passes {
            let c = comptime!(pass as u32 * UNITS) + UNIT_POS;
            if c < width {
                let at = first + (c as usize);
                let value = Vector::<f32, N>::cast_from(x[at]);
                let grad = Vector::<f32, N>::cast_from(dy[at]);
                let inner = grad * w[c as usize] - value * Vector::new(along);
                dx[at] = Vector::cast_from(inner * Vector::new(scale));
                dw[pass] += grad * value * Vector::new(scale);
            }
        }
        row += CUBE_COUNT_X;
    }
    #[unroll]
    for pass in 0..passes {
        let c = comptime!(pass as u32 * UNITS) + UNIT_POS;
        if c < width {
            partial[(CUBE_POS_X as usize) * (width as usize) + (c as usize)] = dw[pass];
        }
    }
}

/// The sum of a vector's elements.
#[cube]
pub(crate) fn lanes<N: Size>(x: Vector<f32, N>) -> f32 {
    let mut sum = x[0];
    #[unroll]
    for i in 1..N::value() {
        sum += x[i];
    }
    sum
}

/// The sum of `x` over each `width` neighbouring units, a power of two. Every unit of the cube takes part.
#[cube]
pub(crate) fn sum_over(x: f32, #[comptime] width: u32) -> f32 {
    let mut shared = SharedMemory::<f32>::new(256usize);
    // The last call's result may still be read.
    sync_cube();
    shared[UNIT_POS as usize] = x;
    sync_cube();
    let mut half = comptime!(width / 2).runtime();
    while half > 0u32 {
        if UNIT_POS % width < half {
            let own = shared[UNIT_POS as usize] + shared[(UNIT_POS + half) as usize];
            shared[UNIT_POS as usize] = own;
        }
        sync_cube();
        half /= 2u32;
    }
    shared[(UNIT_POS / width * width) as usize]
}
