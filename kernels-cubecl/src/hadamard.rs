//! The random Hadamard transform of groups of 16 columns: `y = x · diag(signs) · H16 / 4`.
//! ```text
//! for each group { for i { for c { y[i] += signs[c] * x[c] * H16[c][i] / 4 } } }   // the plain loop
//! ```
//! `H16` is Sylvester's matrix. `signs` is one fixed vector of ±1, as in NVIDIA's recipe (arXiv 2509.25149, §4.2),
//! stored as 16 bits (1 means minus). The transform is orthogonal: applied to both operands of a product along the
//! summed index, it cancels. The sums form a butterfly with distances 1, 2, 4 and 8, and end with `+ 0`, so that a
//! zero sum is +0 as in a matrix product. The factors ±1 and 1/4 are exact, so every backend computes the same bits.
//! A unit owns 16 columns and reads and writes each value once: bound by memory.

use crate::{
    device::flat_launch,
    error::{KernelError, expect_blocks, expect_len},
};
use cubecl::prelude::*;

/// The sign vector of TransformerEngine, [1,1,1,-1,1,-1,-1,-1,-1,-1,-1,1,-1,1,-1,-1]; bit i is set for -1.
pub const SIGNS: u32 = 0b1101_0111_1110_1000;

/// Transforms every 16 consecutive elements of `x` into `y`, both float of type `dtype`.
///
/// # Errors
/// If the length is not a multiple of 16 or differs between the buffers.
pub fn hadamard<R: Runtime>(
    client: &ComputeClient<R>,
    x: ArrayArg<R>,
    y: ArrayArg<R>,
    dtype: StorageType,
    signs: u32,
) -> Result<(), KernelError> {
    let len = x.size();
    expect_blocks("hadamard", "length", len)?;
    expect_len("hadamard", "y", y.size(), len)?;
    let (count, dim) = flat_launch(len / crate::layout::BLOCK);
    // SAFETY: both buffers hold `len` elements, a multiple of 16; the kernel stops at the last group.
    unsafe { hadamard_kernel::launch_unchecked(client, count, dim, x, y, signs, dtype) };
    Ok(())
}

/// Transforms 16 values in registers.
#[cube]
pub(crate) fn rotate(v: &mut Array<f32>, signs: u32) {
    #[unroll]
    for i in 0..16u32 {
        let at = comptime!(i as usize);
        let value = v[at];
        v[at] = select((signs >> i) & 1u32 == 1u32, -value, value);
    }
    #[unroll]
    for level in 0..4u32 {
        let distance = comptime!(1u32 << level);
        #[unroll]
        for pair in 0..8u32 {
            let low = comptime!(((pair / distance) * 2 * distance + pair % distance) as usize);
            let high = comptime!(low + distance as usize);
            let a = v[low];
            let b = v[high];
            v[low] = a + b;
            v[high] = a - b;
        }
    }
    #[unroll]
    for i in 0..16usize {
        v[i] = v[i] * 0.25f32 + 0.0f32;
    }
}

#[cube(launch_unchecked)]
fn hadamard_kernel<F: Float>(x: &Array<F>, y: &mut Array<F>, signs: u32, #[define(F)] _dtype: StorageType) {
    let first = ABSOLUTE_POS * 16usize;
    if first < x.len() {
        let mut v = Array::<f32>::new(16usize);
        #[unroll]
        for i in 0..16usize {
            v[i] = f32::cast_from(x[first + i]);
        }
        rotate(&mut v, signs);
        #[unroll]
        for i in 0..16usize {
            y[first + i] = F::cast_from(v[i]);
        }
    }
}
