//! The gradient of an embedding from the gradients of tokens: what [`kernels_cubecl::segment_sum`] computes.

use std::collections::BTreeMap;

/// Adds row m of `dy` `[M, cols]` to row `ids[m]` of `gradient` `[V, cols]`. Rows of one id are added to each other first, in
/// order.
///
/// # Panics
/// If an id is no row of `gradient`.
pub fn segment_sum(gradient: &mut [f32], ids: &[u32], dy: &[f32], cols: usize) {
    let mut sums = BTreeMap::<u32, Vec<f32>>::new();
    for (id, dy) in ids.iter().zip(dy.chunks_exact(cols)) {
        let sum = sums.entry(*id).or_insert_with(|| vec![0.0; cols]);
        sum.iter_mut().zip(dy).for_each(|(sum, dy)| *sum += dy);
    }
    for (id, sum) in sums {
        let row = &mut gradient[id as usize * cols..][..cols];
        row.iter_mut().zip(sum).for_each(|(gradient, sum)| *gradient += sum);
    }
}
