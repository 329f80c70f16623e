//! Normal random numbers, four from four words of [`crate::rng`] (Box & Muller, "A note on the generation of random
//! normal deviates", 1958):
//! ```text
//! u, v = (word + 1/2) / 2^32      r = std * sqrt(-2 ln u)      x = r cos(2 pi v)      y = r sin(2 pi v)
//! for i in 0..len/4 { x[4i..4i+4] = four of philox(i) }                            // the plain loop
//! ```
//! A value depends on its place and the stream alone. Computed in f32: devices agree up to their logarithm and cosine.
//! Written once, nothing read: bound by arithmetic.

use crate::{
    device::flat_launch,
    error::{KernelError, index},
    rng::{Cipher, Stream, cipher, philox},
};
use cubecl::prelude::*;

/// Fills `x` (float of type `dtype`).
///
/// # Errors
/// If `x` is longer than its index is wide.
pub fn normal<R: Runtime>(
    client: &ComputeClient<R>,
    x: ArrayArg<R>,
    dtype: StorageType,
    std: f32,
    stream: Stream,
) -> Result<(), KernelError> {
    index("normal", "values of x", x.size())?;
    let (count, dim) = flat_launch(x.size().div_ceil(4));
    // SAFETY: units write where `x` is, and nowhere past its end.
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
            // 2^-32; half a word keeps the logarithm finite.
            let u = (f32::cast_from(random[comptime!(2 * pair)]) + 0.5f32) * 2.328_306_4e-10f32;
            let v = (f32::cast_from(random[comptime!(2 * pair + 1)]) + 0.5f32) * 2.328_306_4e-10f32;
            // A logarithm near 1 may come out on the wrong side of 0.
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
