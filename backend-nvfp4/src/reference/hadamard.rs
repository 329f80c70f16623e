//! The random Hadamard transform of 16 values.

use kernels_cubecl::layout::BLOCK;

/// Computes `y = x · diag(signs) · H16 / 4` over each 16 consecutive values, as a butterfly in f32.
pub fn hadamard(x: &[f32], signs: u32) -> Vec<f32> {
    let mut y = x.to_vec();
    for group in y.chunks_exact_mut(BLOCK) {
        for (i, v) in group.iter_mut().enumerate() {
            if signs >> i & 1 == 1 {
                *v = -*v;
            }
        }
        for distance in [1, 2, 4, 8] {
            for low in (0..BLOCK).filter(|i| i / distance % 2 == 0) {
                let (a, b) = (group[low], group[low + distance]);
                group[low] = a + b;
                group[low + distance] = a - b;
            }
        }
        group.iter_mut().for_each(|v| *v = *v * 0.25 + 0.0);
    }
    y
}
