//! RMS normalisation of rows (Zhang & Sennrich, arXiv 1910.07467), as Qwen3 rounds it, and its gradient:
//! ```text
//! r = 1 / sqrt(mean(x^2) + eps)      n = x * r      y = round(n) * w
//! g = dy * w      dx = r * (g - n * mean(g * n))    dw = sum over rows of dy * n
//! for row { sum x^2; for c { y[c] = x[c] * r * w[c] } }                             // the plain loop
//! ```
//! The forward can add a residual on the way (`x = round(a + b)`, which it stores) and leave the largest `|y|` of each
//! cube, which is what a quantiser of y asks first. The backward can add to dx the gradient that x has already.
//! Statistics and sums are f32; `n` is rounded to the type of x before the weight, as Hugging Face does. A cube
//! takes one row after another, each unit keeps its few vectors of it in registers; backward has the next row on its way
//! while it sums one, keeps its share of `dw` for all the rows it meets and writes it once, so that one short sum over
//! cubes remains.
//! Moves x in and y out (x, dy in, dx out backward, in the place of dy): bound by memory.

use crate::{
    device::{bit_casts, liberties, processors, vector_size},
    error::{KernelError, expect_len, index},
    reduce::{cube_max, cube_sum, cube_sums, lanes, largest},
};
use cubecl::prelude::*;

/// Registers of a multiprocessor that units share.
const REGISTERS: usize = 1 << 16;
/// Cubes of a forward launch that leaves maxima, at most: each leaves one.
const MEASURED_CUBES: usize = 4096;

/// What a norm does on the way.
pub struct Fused<R: Runtime> {
    /// Added to x, and where the sum goes: both as x.
    pub residual: Option<[ArrayArg<R>; 2]>,
    /// f32, [`maxima_len`]: takes the largest `|y|` of each cube, NaN ignored.
    pub maxima: Option<ArrayArg<R>>,
}

impl<R: Runtime> Fused<R> {
    /// Nothing.
    pub fn none() -> Self {
        Self { residual: None, maxima: None }
    }
}

/// `y` from `x` (`rows` x `cols`, type `dtype`) and `w` (f32, `cols`).
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
    let (mut added, mut sum, mut tops) = (SequenceArg::new(), SequenceArg::new(), SequenceArg::new());
    if let Some([a, b]) = residual {
        expect_len(NAME, "residual", a.size(), rows * cols)?;
        expect_len(NAME, "sum", b.size(), rows * cols)?;
        added.push(a);
        sum.push(b);
    }
    if let Some(maxima) = maxima {
        expect_len(NAME, "maxima", maxima.size(), maxima_len(rows))?;
        tops.push(maxima);
    }
    if rows == 0 {
        return Ok(());
    }
    let cubes = if tops.values.is_empty() { rows.min(65_535) } else { maxima_len(rows) };
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
            added,
            sum,
            tops,
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

/// Cubes of a forward launch over `rows` rows that leaves maxima.
pub fn maxima_len(rows: usize) -> usize {
    rows.min(MEASURED_CUBES)
}

/// Vector size, vectors a unit and units of a cube for rows of `cols`.
fn row_launch<R: Runtime>(client: &ComputeClient<R>, dtype: StorageType, cols: usize) -> (usize, usize, u32) {
    let vector = vector_size(client, dtype, cols);
    let width = cols / vector;
    let most = (client.properties().hardware.max_units_per_cube as usize).min(256);
    let passes = width.div_ceil(most);
    (vector, passes, width.div_ceil(passes).next_multiple_of(32) as u32)
}

/// Rows of the `partial` that [`rms_norm_backward`] needs: one a cube. All cubes find a place at once where registers, some
/// 56 for a vector of a row and 16 besides, are what they compete for: a second wave would be a part of one, and each leaves
/// a row of sums to be added up: at most eight a multiprocessor, and four rows for each.
pub fn partial_rows<R: Runtime>(client: &ComputeClient<R>, dtype: StorageType, [rows, cols]: [usize; 2]) -> usize {
    let (_, passes, units) = row_launch(client, dtype, cols);
    let together = REGISTERS / ((56 * passes + 16) * units as usize);
    rows.div_ceil(4).clamp(1, processors(client) * together.clamp(1, 8))
}

/// `dy` becomes `dx`, plus `so_far` if there is some; `partial` (f32, [`partial_rows`] x `cols`) gets sums whose column
/// sums are `dw`.
///
/// # Errors
/// If a buffer does not fit the shape.
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
    let mut more = SequenceArg::new();
    if let Some(so_far) = so_far {
        expect_len(NAME, "gradient so far", so_far.size(), rows * cols)?;
        more.push(so_far);
    }
    let (vector, passes, units) = row_launch(client, dtype, cols);
    // SAFETY: as above; a unit writes what it alone read.
    unsafe {
        rms_norm_backward_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(units),
            vector,
            x,
            w,
            dy,
            more,
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

#[cube(launch_unchecked, fast_math = liberties(_approximate))]
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
                #[unroll]
                for i in 0..added.len() {
                    value = Vector::cast_from(
                        Vector::<f32, N>::cast_from(value) + Vector::cast_from(added.index(i)[first + (c as usize)]),
                    );
                    sum.index_mut(i)[first + (c as usize)] = value;
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
                // Weighted in the type of x: the product of two rounded values is rounded once.
                let weighted = normal * Vector::<F, N>::cast_from(w[c as usize]);
                y[first + (c as usize)] = weighted;
                if comptime!(maxima.len() == 1) {
                    top = max(top, largest(weighted));
                }
            }
        }
        row += CUBE_COUNT_X;
    }
    #[unroll]
    for i in 0..maxima.len() {
        let top = cube_max(top);
        if UNIT_POS == 0u32 {
            maxima.index_mut(i)[CUBE_POS_X as usize] = top;
        }
    }
}

#[cube(launch_unchecked, fast_math = liberties(_approximate))]
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
            let inner = Vector::<f32, N>::cast_from(own_dy[pass]);
            let mut grad = (inner * weight(w, pass, width) - value * Vector::new(along)) * Vector::new(scale);
            if c < width {
                if comptime!(so_far.len() == 1) {
                    grad += Vector::cast_from(more[pass]);
                }
                dy[first + (c as usize)] = Vector::cast_from(grad);
            }
            dw[pass] += inner * value * Vector::new(scale);
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

/// This unit's vector of a row; zeros past the last one and in rows that are not there.
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

/// Its weights, read anew for every row: they stay in the cache and leave registers to the rows.
#[cube]
fn weight<N: Size>(w: &Array<Vector<f32, N>>, #[comptime] pass: usize, width: u32) -> Vector<f32, N> {
    w[min(comptime!(pass as u32) * CUBE_DIM + UNIT_POS, width - 1u32) as usize]
}
