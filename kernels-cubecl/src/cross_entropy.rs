//! Softmax cross-entropy over a chunk of rows. The gradient replaces the logits:
//! ```text
//! lse[row] = log sum_c exp(x[row, c])           loss[row] = lse[row] - x[row, target[row]]
//! x[row, c] <- exp(x[row, c] - lse[row]) - (c == target[row])
//! for row { maximum; sum of exp; for c { x[row][c] = softmax - onehot } }                     // the plain loop
//! ```
//! A cube takes a row. Each of 256 units keeps a running maximum and sum (Milakov & Gimelshein, arXiv 1805.02867);
//! the cube merges them, then writes. Sums are f32. The row is read twice, the second time mostly from the cache, and
//! written once: bound by memory. The caller passes the tokens in chunks, so that the logits of all tokens never
//! exist at once.

use crate::{
    device::{bit_casts, fast_math_if, vector_size},
    error::{KernelError, expect_len, index},
    reduce::{cube_max, cube_sum},
};
use cubecl::prelude::*;

const UNITS: u32 = 256;

/// Computes `loss` (f32, `rows`) of `logits` (`rows` x `cols`, type `dtype`) at `targets` (i32, `rows`), and replaces
/// the logits by their gradient if `gradient`. A row with a negative target has no loss and no gradient.
///
/// # Errors
/// If a buffer does not fit the shape.
pub fn cross_entropy<R: Runtime>(
    client: &ComputeClient<R>,
    logits: ArrayArg<R>,
    targets: ArrayArg<R>,
    loss: ArrayArg<R>,
    dtype: StorageType,
    [rows, cols]: [usize; 2],
    gradient: bool,
) -> Result<(), KernelError> {
    const NAME: &str = "cross_entropy";
    expect_len(NAME, "logits", logits.size(), rows * cols)?;
    expect_len(NAME, "targets", targets.size(), rows)?;
    expect_len(NAME, "loss", loss.size(), rows)?;
    if rows == 0 {
        return Ok(());
    }
    let vector = vector_size(client, dtype, cols);
    // SAFETY: buffer lengths were checked; a cube stays in its row.
    unsafe {
        cross_entropy_kernel::launch_unchecked(
            client,
            CubeCount::Static(index(NAME, "rows", rows)?, 1, 1),
            CubeDim::new_1d(UNITS),
            vector,
            logits,
            targets,
            loss,
            index(NAME, "columns", cols)?,
            gradient,
            bit_casts(client),
            dtype,
        );
    }
    Ok(())
}

#[cube(launch_unchecked, fast_math = fast_math_if(_approximate))]
fn cross_entropy_kernel<F: Float, N: Size>(
    logits: &mut Array<Vector<F, N>>,
    targets: &Array<i32>,
    loss: &mut Array<f32>,
    cols: u32,
    #[comptime] gradient: bool,
    #[comptime] _approximate: bool,
    #[define(F)] _dtype: StorageType,
) {
    let n = N::value();
    let width = cols / (n as u32);
    let first = (CUBE_POS_X as usize) * (width as usize);
    let target = targets[CUBE_POS_X as usize];

    let mut top = f32::new(-1.0e30f32);
    let mut sum = 0.0f32;
    let mut c = UNIT_POS;
    while c < width {
        let x = Vector::<f32, N>::cast_from(logits[first + (c as usize)]);
        let mut best = top;
        #[unroll]
        for i in 0..n {
            best = max(best, x[i]);
        }
        sum *= (top - best).exp();
        #[unroll]
        for i in 0..n {
            sum += (x[i] - best).exp();
        }
        top = best;
        c += UNITS;
    }
    let row_top = cube_max(top);
    let lse = cube_sum(sum * (top - row_top).exp()).ln() + row_top;

    if UNIT_POS == 0u32 {
        let mut value = 0.0f32;
        if target >= 0i32 {
            let hot = u32::cast_from(target);
            let vector = logits[first + (hot / (n as u32)) as usize];
            let mut own = 0.0f32;
            #[unroll]
            for i in 0..n {
                own = select(hot % (n as u32) == (i as u32), f32::cast_from(vector[i]), own);
            }
            value = lse - own;
        }
        loss[CUBE_POS_X as usize] = value;
    }
    if comptime!(gradient) {
        // Unit 0 must have read the target's logit before any unit writes.
        sync_cube();
        let live = select(target >= 0i32, 1.0f32, 0.0f32);
        let hot = u32::cast_from(max(target, 0i32));
        let mut c = UNIT_POS;
        while c < width {
            let at = first + (c as usize);
            let x = Vector::<f32, N>::cast_from(logits[at]);
            let mut grad = Vector::<f32, N>::empty();
            #[unroll]
            for i in 0..n {
                let column = c * (n as u32) + (i as u32);
                let probability = (x[i] - lse).exp();
                grad[i] = (probability - select(column == hot, 1.0f32, 0.0f32)) * live;
            }
            logits[at] = Vector::cast_from(grad);
            c += UNITS;
        }
    }
}
