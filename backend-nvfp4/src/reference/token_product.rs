//! The product of the newest tokens of sequences, a row each, with a weight:
//! ```text
//! for m in 0..M { for n in 0..N { y[m][n] = sum_k x[m][k] * w[n][k] } }                                // the plain loop
//! ```
//! A product of large matrices first copies them into the order in which it reads them. For a few rows that would take longer
//! than the product. Each sum has the same order for any number of rows, so that the result for a token does not depend on
//! the others.

use super::{
    quantize::append_row,
    threads::{share, threads},
};
use crate::packed::Packed;

/// Sums that run side by side, so that the processor can add several values at once.
const LANES: usize = 16;

/// Multiplications below which the work is not shared among threads: starting one takes longer than they do.
const SHARED_FROM: usize = 1 << 19;

/// A weight `[N, K]`, row-major.
#[derive(Debug, Clone, Copy)]
pub enum Weight<'a> {
    /// Its values.
    Dense(&'a [f32]),
    /// Its codes.
    Packed(Packed<&'a [u32], &'a [u8]>),
}

/// Multiplies `x` `[M, K]` by the transpose of a weight `[N, K]`. Returns `[M, N]`.
pub fn token_product(x: &[f32], weight: Weight<'_>, [n, k]: [usize; 2]) -> Vec<f32> {
    let m = x.len() / k;
    // The transpose of the result: each part of the weight's rows makes a part of it.
    let mut y_nm = vec![0.0f32; n * m];
    let rows_of = |first: usize, y: &mut [f32]| {
        let mut decoded = Vec::with_capacity(k);
        for (row, y) in (first..).zip(y.chunks_exact_mut(m)) {
            let w = match weight {
                Weight::Dense(w) => &w[row * k..][..k],
                Weight::Packed(w) => {
                    decoded.clear();
                    append_row(&mut decoded, w, row, k);
                    &decoded
                }
            };
            y.iter_mut().zip(x.chunks_exact(k)).for_each(|(y, x)| *y = dot(x, w));
        }
    };
    let part = if n * m * k < SHARED_FROM { n } else { n.div_ceil(threads()) };
    if part == n {
        rows_of(0, &mut y_nm);
    } else {
        share(y_nm.chunks_mut(part * m).enumerate(), |(i, y)| rows_of(i * part, y));
    }
    if m == 1 {
        return y_nm;
    }
    (0..m).flat_map(|row| y_nm[row..].iter().step_by(m)).copied().collect()
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut sums = [0.0f32; LANES];
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    for (sum, (a, b)) in sums.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *sum += a * b;
    }
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{dequantize, normals, quantize};
    use kernels_cubecl::{
        quantize::{BlockShape, QuantizeSpec, Rounding, Scaling, View},
        rng::Stream,
    };

    /// Sums in f64, of values and of codes, for sizes that are shared among threads and sizes that are not.
    #[test]
    fn it_is_the_product_and_a_row_does_not_depend_on_the_others() {
        let spec = QuantizeSpec { scaling: Scaling::Two, block: BlockShape::Row, rounding: Rounding::Nearest };
        for [m, n, k] in [[1, 1, 16], [3, 5, 48], [2, 7, 19], [5, 1025, 112], [1, 2048, 272]] {
            let x = normals(m * k, 1.0, Stream { seed: 1, step: 0, stream: 0 });
            let w = normals(n * k, 1.0, Stream { seed: 2, step: 0, stream: 0 });
            check(&x, Weight::Dense(&w), &w, [n, k]);
            if k.is_multiple_of(16) {
                let packed = quantize(&w, View::row_major(n, k), spec);
                let codes = Packed { codes: &packed.codes[..], scales: &packed.scales[..], global: packed.global };
                check(&x, Weight::Packed(codes), &dequantize(&packed, n, k), [n, k]);
            }
        }
    }

    fn check(x: &[f32], weight: Weight<'_>, values: &[f32], [n, k]: [usize; 2]) {
        let y = token_product(x, weight, [n, k]);
        assert_eq!(y.len(), x.len() / k * n);
        for ((x, own), m) in x.chunks_exact(k).zip(y.chunks_exact(n)).zip(0..) {
            assert!(token_product(x, weight, [n, k]) == own, "row {m} of {n}x{k} alone");
            for (w, y) in values.chunks_exact(k).zip(own) {
                let terms = || x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w));
                let (sum, size) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
                assert!((f64::from(*y) - sum).abs() <= size * 1e-6, "{y} is not {sum}, {n}x{k}");
            }
        }
    }
}
