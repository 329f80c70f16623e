//! RMS normalization of rows (Zhang & Sennrich, arXiv 1910.07467), rounded as Qwen3 rounds it, and its gradient:
//! ```text
//! scale = 1 / sqrt(mean(x^2) + eps)      normal = x * scale      y = round(normal) * w
//! dx = scale * (dy * w - normal * mean(dy * w * normal))        dw = sum over rows of dy * normal
//! for row { sum x^2; for c { y[row][c] = x[row][c] * scale * w[c] } }              // the plain loop
//! ```
//! The forward can add a residual first (`x = round(a + b)`, which it stores), and it can store the largest `|y|` of
//! each cube, which a quantizer of y needs first. The backward can add to dx a gradient of x from elsewhere.
//!
//! Statistics and sums are f32. `normal` is rounded to the type of x before it is multiplied by the weight, as
//! Hugging Face does. A cube takes one row after another, and each unit keeps its few vectors of the row in
//! registers. The backward loads the next row while it sums one. It keeps its share of `dw` over all its rows and
//! stores it once, so that a short sum over cubes remains ([`crate::column_sums`]). Reads x and writes y (backward:
//! reads x and dy, and writes dx in the place of dy): bound by memory.

use crate::{
    device::{bit_casts, fast_math_if, processors, sequence, vector_size},
    error::{KernelError, expect_len, index},
    reduce::{cube_max, cube_sum, cube_sums, lanes, largest},
};
use cubecl::prelude::*;

/// Number of registers of a multiprocessor, which its units share.
const REGISTERS: usize = 1 << 16;
/// The most cubes of a forward launch that stores maxima; each stores one.
const MEASURED_CUBES: usize = 4096;

/// What a norm does besides normalizing.
pub struct Fused<R: Runtime> {
    /// The residual that is added to x, and the buffer that receives the sum, both shaped as x.
    pub residual: Option<[ArrayArg<R>; 2]>,
    /// Receives the largest `|y|` of each cube (f32, [`maxima_len`]); NaN is ignored.
    pub maxima: Option<ArrayArg<R>>,
}

impl<R: Runtime> Fused<R> {
    /// A norm that does nothing else.
    pub fn none() -> Self {
        Self { residual: None, maxima: None }
    }
}

/// Computes `y` from `x` (`rows` x `cols`, type `dtype`) and `w` (f32, `cols`).
///
/// # Errors
/// If a buffer does not fit the shape.
pub fn rms_norm<R: Runtime>(
    client: &ComputeClient<R>,
    x: ArrayArg<R>,
    w: ArrayArg<R>,
    y: ArrayArg<R>,
    Fused { residual, maxima }: Fused<R>,
    dtype: StorageType,
    [rows, cols]: [usize; 2],
    eps: f32,
) -> Result<(), KernelError> {
    const NAME: &str = "rms_norm";
    expect_len(NAME, "x", x.size(), rows * cols)?;
    expect_len(NAME, "y", y.size(), rows * cols)?;
    expect_len(NAME, "w", w.size(), cols)?;
    if let Some([added, sum]) = &residual {
        expect_len(NAME, "residual", added.size(), rows * cols)?;
        expect_len(NAME, "sum", sum.size(), rows * cols)?;
    }
    if let Some(maxima) = &maxima {
        expect_len(NAME, "maxima", maxima.size(), maxima_len(rows))?;
    }
    if rows == 0 {
        return Ok(());
    }
    let cubes = if maxima.is_none() { rows.min(65_535) } else { maxima_len(rows) };
    let (added, sum) = residual.map_or((None, None), |[added, sum]| (Some(added), Some(sum)));
    let (vector, passes, units) = row_launch(client, dtype, cols);
    // SAFETY: buffer lengths were checked; cubes step over rows up to the last.
    unsafe {
        rms_norm_kernel::launch_unchecked(
            client,
            CubeCount::Static(index(NAME, "cubes", cubes)?, 1, 1),
            CubeDim::new_1d(units),
            vector,
            x,
            w,
            y,
            sequence(added),
            sequence(sum),
            sequence(maxima),
            rows as u32,
            index(NAME, "columns", cols)?,
            eps,
            passes,
            bit_casts(client),
            dtype,
        );
    }
    Ok(())
}

/// Number of cubes of a forward launch over `rows` rows that stores maxima.
pub fn maxima_len(rows: usize) -> usize {
    rows.min(MEASURED_CUBES)
}

/// The length of a vector, the vectors of a unit, and the units of a cube, for rows of `cols` values.
fn row_launch<R: Runtime>(client: &ComputeClient<R>, dtype: StorageType, cols: usize) -> (usize, usize, u32) {
    let vector = vector_size(client, dtype, cols);
    let width = cols / vector;
    let most = (client.properties().hardware.max_units_per_cube as usize).min(256);
    let passes = width.div_ceil(most);
    (vector, passes, width.div_ceil(passes).next_multiple_of(32) as u32)
}

/// Number of rows of the `partial` that [`rms_norm_backward`] needs: one for each cube. More cubes than fit at once
/// would leave a nearly empty second wave, and each cube writes one more partial sum. So there are as many as
/// registers allow (some 56 for a vector of a row and 16 besides), at most eight a multiprocessor, and at least four
/// rows for each.
pub fn partial_rows<R: Runtime>(client: &ComputeClient<R>, dtype: StorageType, [rows, cols]: [usize; 2]) -> usize {
    let (_, passes, units) = row_launch(client, dtype, cols);
    let together = REGISTERS / ((56 * passes + 16) * units as usize);
    rows.div_ceil(4).clamp(1, processors(client) * together.clamp(1, 8))
}

/// Replaces `dy` by `dx`, plus `so_far` if there is such a gradient. `partial` (f32, [`partial_rows`] x `cols`)
/// receives sums whose column sums are `dw`.
///
/// # Errors
/// If a buffer does not fit the shape.
#[allow(clippy::too_many_arguments, reason = "a launch takes its buffers one by one")]
pub fn rms_norm_backward<R: Runtime>(
    client: &ComputeClient<R>,
    x: ArrayArg<R>,
    w: ArrayArg<R>,
    dy: ArrayArg<R>,
    so_far: Option<ArrayArg<R>>,
    partial: ArrayArg<R>,
    dtype: StorageType,
    [rows, cols]: [usize; 2],
    eps: f32,
) -> Result<(), KernelError> {
    const NAME: &str = "rms_norm backward";
    for (name, arg) in [("x", &x), ("dy", &dy)] {
        expect_len(NAME, name, arg.size(), rows * cols)?;
    }
    let cubes = partial_rows(client, dtype, [rows, cols]);
    expect_len(NAME, "w", w.size(), cols)?;
    expect_len(NAME, "partial", partial.size(), cubes * cols)?;
    if let Some(so_far) = &so_far {
        expect_len(NAME, "gradient so far", so_far.size(), rows * cols)?;
    }
    let (vector, passes, units) = row_launch(client, dtype, cols);
    // SAFETY: buffer lengths were checked; cubes step over rows up to the last, and a unit writes only what it alone
    // read.
    unsafe {
        rms_norm_backward_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(units),
            vector,
            x,
            w,
            dy,
            sequence(so_far),
            partial,
            index(NAME, "rows", rows)?,
            index(NAME, "columns", cols)?,
            eps,
            passes,
            bit_casts(client),
            dtype,
        );
    }
    Ok(())
}

#[cube(launch_unchecked, fast_math = fast_math_if(_approximate))]
#[allow(clippy::too_many_arguments, reason = "a kernel takes its buffers one by one")]
fn rms_norm_kernel<F: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    w: &Array<Vector<f32, N>>,
    y: &mut Array<Vector<F, N>>,
    added: &Sequence<Array<Vector<F, N>>>,
    sum: &mut Sequence<Array<Vector<F, N>>>,
    maxima: &mut Sequence<Array<f32>>,
    rows: u32,
    cols: u32,
    eps: f32,
    #[comptime] passes: usize,
    #[comptime] _approximate: bool,
    #[define(F)] _dtype: StorageType,
) {
    let width = cols / (N::value() as u32);
    let mut top = 0.0f32;
    let mut row = CUBE_POS_X;
    while row < rows {
        let first = (row as usize) * (width as usize);
        let mut values = Array::<Vector<f32, N>>::new(passes);
        let mut squares = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for pass in 0..passes {
            let c = comptime!(pass as u32) * CUBE_DIM + UNIT_POS;
            values[pass] = Vector::new(0.0f32);
            if c < width {
                let mut value = x[first + (c as usize)];
                if comptime!(added.len() == 1) {
                    value = Vector::cast_from(
                        Vector::<f32, N>::cast_from(value)
                            + Vector::cast_from(added.index(0usize)[first + (c as usize)]),
                    );
                    sum.index_mut(0usize)[first + (c as usize)] = value;
                }
                values[pass] = Vector::cast_from(value);
                squares += values[pass] * values[pass];
            }
        }
        let scale = 1.0f32 / (cube_sum(lanes(squares)) / f32::cast_from(cols) + eps).sqrt();
        #[unroll]
        for pass in 0..passes {
            let c = comptime!(pass as u32) * CUBE_DIM + UNIT_POS;
            if c < width {
                let normal = Vector::<F, N>::cast_from(values[pass] * Vector::new(scale));
                // The product of two rounded values is rounded once, in the type of x.
                let weighted = normal * Vector::<F, N>::cast_from(w[c as usize]);
                y[first + (c as usize)] = weighted;
                if comptime!(maxima.len() == 1) {
                    top = max(top, largest(weighted));
                }
            }
        }
        row += CUBE_COUNT_X;
    }
    if comptime!(maxima.len() == 1) {
        let top = cube_max(top);
        if UNIT_POS == 0u32 {
            maxima.index_mut(0usize)[CUBE_POS_X as usize] = top;
        }
    }
}

#[cube(launch_unchecked, fast_math = fast_math_if(_approximate))]
#[allow(clippy::too_many_arguments, reason = "a kernel takes its buffers one by one")]
fn rms_norm_backward_kernel<F: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    w: &Array<Vector<f32, N>>,
    dy: &mut Array<Vector<F, N>>,
    so_far: &Sequence<Array<Vector<F, N>>>,
    partial: &mut Array<Vector<f32, N>>,
    rows: u32,
    cols: u32,
    eps: f32,
    #[comptime] passes: usize,
    #[comptime] _approximate: bool,
    #[define(F)] _dtype: StorageType,
) {
    let width = cols / (N::value() as u32);
    let mut dw = Array::<Vector<f32, N>>::new(passes);
    let mut own_x = Array::<Vector<F, N>>::new(passes);
    let mut own_dy = Array::<Vector<F, N>>::new(passes);
    let mut next_x = Array::<Vector<F, N>>::new(passes);
    let mut next_dy = Array::<Vector<F, N>>::new(passes);
    let mut row = CUBE_POS_X;
    #[unroll]
    for pass in 0..passes {
        dw[pass] = Vector::new(0.0f32);
        own_x[pass] = loaded(x, row, rows, pass, width);
        own_dy[pass] = loaded(dy, row, rows, pass, width);
    }
    let mean = 1.0f32 / f32::cast_from(cols);
    while row < rows {
        let ahead = row + CUBE_COUNT_X;
        let mut more = Array::<Vector<F, N>>::new(comptime!((passes * so_far.len()).max(1)));
        #[unroll]
        for pass in 0..comptime!(passes * so_far.len()) {
            more[pass] = loaded(so_far.index(0usize), row, rows, pass, width);
        }
        #[unroll]
        for pass in 0..passes {
            next_x[pass] = loaded(x, ahead, rows, pass, width);
            next_dy[pass] = loaded(dy, ahead, rows, pass, width);
        }
        let mut squares = Vector::<f32, N>::new(0.0f32);
        let mut dots = Vector::<f32, N>::new(0.0f32);
        #[unroll]
        for pass in 0..passes {
            let value = Vector::<f32, N>::cast_from(own_x[pass]);
            squares += value * value;
            dots += value * weight(w, pass, width) * Vector::cast_from(own_dy[pass]);
        }
        let (square, dot) = cube_sums(lanes(squares), lanes(dots));
        let scale = 1.0f32 / (square * mean + eps).sqrt();
        let along = dot * mean * scale * scale;
        let first = (row as usize) * (width as usize);
        #[unroll]
        for pass in 0..passes {
            let c = comptime!(pass as u32) * CUBE_DIM + UNIT_POS;
            let value = Vector::<f32, N>::cast_from(own_x[pass]);
            let gradient = Vector::<f32, N>::cast_from(own_dy[pass]);
            let mut grad = (gradient * weight(w, pass, width) - value * Vector::new(along)) * Vector::new(scale);
            if c < width {
                if comptime!(so_far.len() == 1) {
                    grad += Vector::cast_from(more[pass]);
                }
                dy[first + (c as usize)] = Vector::cast_from(grad);
            }
            dw[pass] += gradient * value * Vector::new(scale);
            own_x[pass] = next_x[pass];
            own_dy[pass] = next_dy[pass];
        }
        row = ahead;
    }
    #[unroll]
    for pass in 0..passes {
        let c = comptime!(pass as u32) * CUBE_DIM + UNIT_POS;
        if c < width {
            partial[(CUBE_POS_X as usize) * (width as usize) + (c as usize)] = dw[pass];
        }
    }
}

/// Loads this unit's vector of a row; zeros past the last vector and past the last row.
#[cube]
fn loaded<F: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    row: u32,
    rows: u32,
    #[comptime] pass: usize,
    width: u32,
) -> Vector<F, N> {
    let c = comptime!(pass as u32) * CUBE_DIM + UNIT_POS;
    let mut value = Vector::<F, N>::new(F::new(0.0));
    if row < rows && c < width {
        value = x[(row as usize) * (width as usize) + (c as usize)];
    }
    value
}

/// Loads this unit's weights. They are loaded again for every row: they stay in the cache and leave the registers to
/// the rows.
#[cube]
fn weight<N: Size>(w: &Array<Vector<f32, N>>, #[comptime] pass: usize, width: u32) -> Vector<f32, N> {
    w[min(comptime!(pass as u32) * CUBE_DIM + UNIT_POS, width - 1u32) as usize]
}
