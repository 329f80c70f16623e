//! Products and the rotation of their operands.

use kernels_cubecl::layout::BLOCK;

/// Computes `y[i, j] = sum_r a[i, r] b[j, r]` in f64.
pub fn matmul_nt(a: &[f32], b: &[f32], i: usize, j: usize, r: usize) -> Vec<f64> {
    let mut y = vec![0.0; i * j];
    for p in 0..i {
        for q in 0..j {
            y[p * j + q] = (0..r).map(|k| f64::from(a[p * r + k]) * f64::from(b[q * r + k])).sum();
        }
    }
    y
}

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
