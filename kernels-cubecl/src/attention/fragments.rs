//! The two products of attention on fragments of `mma.sync` ([`crate::mma`]), for a plane that owns `16 * FRAGMENTS`
//! rows:
//! ```text
//! product_along    sums[t, s] += sum_e rows[t, e] * tile[s, e]        (scores: q kᵀ)
//! product_across   sums[t, e] += sum_s weights[t, s] * tile[s, e]     (mixing: p v)
//! for t { for s { for e { … } } }                                      // the plain loops
//! ```
//! Sums are listed row fragment by row fragment, and inside a row fragment from left to right, eight columns each.

use crate::mma::{Octet, Pair, as_left, left, multiply, right};
use cubecl::prelude::*;

/// Adds `rows_tile · cols_tileᵀ`, summed over the `dim` values of a head. The plane's rows begin at `row` of
/// `rows_tile`; the columns begin at row `col` of the `cols_tile` at `base`, as many as `sums` holds for `fragments`
/// row fragments.
#[cube]
pub(crate) fn product_along<F: Float>(
    rows_tile: &SharedMemory<Octet<F>>,
    row: u32,
    cols_tile: &SharedMemory<Octet<F>>,
    base: u32,
    col: u32,
    sums: &mut Sequence<Array<Pair<f32>>>,
    #[comptime] fragments: usize,
    #[comptime] dim: u32,
) {
    let width = comptime!(dim / 8);
    let columns = comptime!(sums.len() / fragments);
    #[unroll]
    for part in 0..comptime!(dim / 16) {
        let mut rows = Sequence::<Array<Pair<F>>>::new();
        #[unroll]
        for f in 0..comptime!(fragments as u32) {
            rows.push(left::<F>(rows_tile, 0u32, row, comptime!(f * 16), part, width, false));
        }
        #[unroll]
        for pair in 0..comptime!(columns / 2) {
            let cols = right::<F>(cols_tile, base, col, comptime!(pair as u32 * 16), part, width, false);
            #[unroll]
            for half in 0..2usize {
                #[unroll]
                for f in 0..fragments {
                    let sum = sums.index_mut(comptime!(f * columns + pair * 2 + half));
                    multiply::<F>(rows.index(f), &cols, half, sum);
                }
            }
        }
    }
}

/// Adds `weights · tile`, summed over the columns of `weights`, which are the rows of the `tile` at `base`. `sums`
/// holds the `dim` values of a head.
#[cube]
pub(crate) fn product_across<F: Float>(
    weights: &Sequence<Array<Pair<f32>>>,
    tile: &SharedMemory<Octet<F>>,
    base: u32,
    sums: &mut Sequence<Array<Pair<f32>>>,
    #[comptime] fragments: usize,
    #[comptime] dim: u32,
) {
    let summed = comptime!(weights.len() / fragments);
    let columns = comptime!(dim as usize / 8);
    #[unroll]
    for part in 0..comptime!(summed / 2) {
        let mut rows = Sequence::<Array<Pair<F>>>::new();
        #[unroll]
        for f in 0..fragments {
            let at = comptime!(f * summed + part * 2);
            rows.push(as_left::<F>(weights.index(at), weights.index(comptime!(at + 1))));
        }
        #[unroll]
        for pair in 0..comptime!(columns / 2) {
            let offset = comptime!(pair as u32 * 16);
            let cols = right::<F>(tile, base, 0u32, offset, comptime!(part as u32), comptime!(dim / 8), true);
            #[unroll]
            for half in 0..2usize {
                #[unroll]
                for f in 0..fragments {
                    let sum = sums.index_mut(comptime!(f * columns + pair * 2 + half));
                    multiply::<F>(rows.index(f), &cols, half, sum);
                }
            }
        }
    }
}
