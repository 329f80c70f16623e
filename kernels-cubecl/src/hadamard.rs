//! The random Hadamard transform of groups of 16 columns: `y = x · diag(signs) · H16 / 4`.
//! ```text
//! for each group { for i { for c { y[i] += signs[c] * x[c] * H16[c][i] / 4 } } }   // the plain loop
//! ```
//! `H16` is Sylvester's matrix. `signs` is one fixed vector of ±1, as in NVIDIA's recipe (arXiv 2509.25149, §4.2),
//! stored as 16 bits (1 means minus). The transform is orthogonal: applied to both operands of a product along the
//! summed index, it cancels. The sums form a butterfly with distances 1, 2, 4 and 8, and end with `+ 0`, so that a
//! zero sum is +0 as in a matrix product. The factors ±1 and 1/4 are exact, so every backend computes the same bits.
//! The quantizer transforms what it has in registers ([`crate::quantize`]).

use cubecl::prelude::*;

/// The sign vector of TransformerEngine, [1,1,1,-1,1,-1,-1,-1,-1,-1,-1,1,-1,1,-1,-1]; bit i is set for -1.
pub const SIGNS: u32 = 0b1101_0111_1110_1000;

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
