//! The dot products of output gradient and output that both gradient kernels read:
//! ```text
//! for t { for h { delta[h][t] = sum_e dy[t][h][e] * y[t][h][e] } }                  // the plain loop
//! ```
//! A unit takes one row of one head. Reads dy and y once: bound by memory.

use super::AttentionShape;
use crate::{
    device::flat_launch,
    error::{KernelError, expect_len},
    mma::Octet,
};
use cubecl::prelude::*;

/// `delta[h, t] = dy[t, h] . y[t, h]` (f32).
///
/// # Errors
/// If a buffer does not fit the shape.
pub fn delta<R: Runtime>(
    client: &ComputeClient<R>,
    dy: ArrayArg<R>,
    y: ArrayArg<R>,
    delta: ArrayArg<R>,
    dtype: StorageType,
    shape: AttentionShape,
) -> Result<(), KernelError> {
    const NAME: &str = "attention delta";
    shape.check(NAME)?;
    expect_len(NAME, "dy", dy.size(), shape.query_len())?;
    expect_len(NAME, "y", y.size(), shape.query_len())?;
    expect_len(NAME, "delta", delta.size(), shape.queries * shape.heads)?;
    let (count, dim) = flat_launch(shape.queries * shape.heads);
    // SAFETY: buffer lengths were checked; units past the last row stop.
    unsafe {
        delta_kernel::launch_unchecked(
            client,
            count,
            dim,
            dy,
            y,
            delta,
            shape.queries as u32,
            shape.heads as u32,
            shape.head_dim as u32,
            dtype,
        );
    }
    Ok(())
}

#[cube(launch_unchecked)]
fn delta_kernel<F: Float>(
    dy: &Array<Octet<F>>,
    y: &Array<Octet<F>>,
    delta: &mut Array<f32>,
    queries: u32,
    heads: u32,
    #[comptime] dim: u32,
    #[define(F)] _dtype: StorageType,
) {
    if ABSOLUTE_POS < delta.len() {
        let row = ABSOLUTE_POS * comptime!(dim as usize / 8);
        let mut sum = Vector::<f32, Const<8>>::new(0.0f32);
        #[unroll]
        for o in 0..comptime!(dim as usize / 8) {
            sum += Vector::<f32, Const<8>>::cast_from(dy[row + o]) * Vector::<f32, Const<8>>::cast_from(y[row + o]);
        }
        let mut all = 0.0f32;
        #[unroll]
        for i in 0..8usize {
            all += sum[i];
        }
        let at = u32::cast_from(ABSOLUTE_POS);
        delta[((at % heads) * queries + at / heads) as usize] = all;
    }
}
