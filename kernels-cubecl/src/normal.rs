//! Normal random numbers, four from four words of [`crate::rng`] (Box & Muller, "A note on the generation of random
//! normal deviates", 1958):
//! ```text
//! u, v = (word + 1/2) / 2^32      radius = std * sqrt(-2 ln u)      a = radius cos(2 pi v)      b = radius sin(2 pi v)
//! for each four values { x = a, b of words 0 and 1, then a, b of words 2 and 3 }   // the plain loop
//! ```
//! A value depends only on its position and on the stream. It is computed in f32; devices differ by the errors of
//! their logarithm and cosine. The kernel reads nothing and writes each value once: bound by arithmetic.

use crate::{
    device::flat_launch,
    error::{KernelError, index},
    rng::{Cipher, Stream, cipher, philox},
};
use cubecl::prelude::*;

/// Fills `x` (float of type `dtype`) with normal numbers of mean 0 and standard deviation `std`.
///
/// # Errors
/// If `x` has 2^32 values or more.
pub fn normal<R: Runtime>(
    client: &ComputeClient<R>,
    x: ArrayArg<R>,
    dtype: StorageType,
    std: f32,
    stream: Stream,
) -> Result<(), KernelError> {
    index("normal", "values of x", x.size())?;
    let (count, dim) = flat_launch(x.size().div_ceil(4));
    // SAFETY: units write inside `x` only.
    unsafe {
        normal_kernel::launch_unchecked(client, count, dim, x, std, cipher(stream), dtype);
    }
    Ok(())
}

#[cube(launch_unchecked)]
fn normal_kernel<F: Float>(x: &mut Array<F>, std: f32, cipher: &Cipher, #[define(F)] _dtype: StorageType) {
    let first = ABSOLUTE_POS * 4usize;
    if first < x.len() {
        let mut random = Array::<u32>::new(4usize);
        philox(ABSOLUTE_POS as u32, cipher, 0u32, &mut random);
        #[unroll]
        for pair in 0..2usize {
            // The factor is 2^-32; the half keeps the logarithm finite.
            let u = (f32::cast_from(random[comptime!(2 * pair)]) + 0.5f32) * 2.328_306_4e-10f32;
            let v = (f32::cast_from(random[comptime!(2 * pair + 1)]) + 0.5f32) * 2.328_306_4e-10f32;
            // The logarithm of a number near 1 may come out slightly positive.
            let radius = std * max(-2.0f32 * u.ln(), 0.0f32).sqrt();
            let angle = 6.283_185_5f32 * v;
            let at = first + comptime!(2 * pair);
            if at < x.len() {
                x[at] = F::cast_from(radius * angle.cos());
            }
            if at + 1usize < x.len() {
                x[at + 1usize] = F::cast_from(radius * angle.sin());
            }
        }
    }
}
