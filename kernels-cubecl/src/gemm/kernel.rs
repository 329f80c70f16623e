//! The kernel of [`super::gemm()`]: which cube makes which tile of which product, and where the result goes.
//! ```text
//! for product { for tile { sums = 0 or out; sums += a b; out = sums * tensor scales } }       // several products
//! for tile { sums = 0; for product { sums += a b * tensor scales }; out = sums }              // one sum
//! for tile { for plane { squares = sum of the plane's out^2 } }                               // of measured products
//! ```
//! Each product has code of its own, so that the loop over `r` does not ask which buffers to read.

use super::{
    form::{GemmForm, TilePlace},
    stages::{add_product, own_rows_and_half, reserved_tiles},
    tiles::{PLANES, TILE},
};
use crate::mma::{Octet, Pair, lane_col, lane_row, zero_sums};
use cubecl::prelude::*;

/// Rows of tiles whose columns are walked together, so that both operands stay in the L2 cache.
const GROUP: u32 = 8;

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments, reason = "a kernel takes its buffers one by one")]
pub(super) fn gemm_kernel<F: Float, Out: Float>(
    a: &Sequence<Array<Octet<F>>>,
    b: &Sequence<Array<Octet<F>>>,
    scales: &Sequence<Array<f32>>,
    out: &mut Sequence<Array<Pair<Out>>>,
    squares: &mut Sequence<Array<f32>>,
    i_len: u32,
    j_len: u32,
    r_len: u32,
    #[comptime] form: GemmForm,
    #[comptime] accumulate: bool,
    #[define(F)] _operand: StorageType,
    #[define(Out)] _result: StorageType,
) {
    let cols = comptime!(form.cols);
    let mut tiles = reserved_tiles::<F>(form);
    let parts = comptime!(a.len().max(b.len()));
    if comptime!(parts > 1 && out.len() == 1) {
        let at = corner(CUBE_POS_X, i_len, j_len, cols);
        let mut sums = zero_sums(form.sums());
        let mut scale = 1.0f32;
        #[unroll]
        for p in 0..parts {
            let factor = factor_of(scales, p, parts);
            // A product with a scale of 0 is left out: the sums could not be divided by it.
            if factor != 0.0f32 {
                if comptime!(scales.len() >= parts) {
                    rescale(&mut sums, scale / factor);
                }
                scale = factor;
                let r_len = (a.index(p).len() * 8usize / (i_len as usize)) as u32;
                let place = TilePlace { i0: at.0, j0: at.1, i_len, j_len, r_len };
                add_product::<F>(a.index(p), b.index(p), &mut tiles, &mut sums, place, form);
            }
        }
        let place = TilePlace { i0: at.0, j0: at.1, i_len, j_len, r_len };
        store::<Out>(&sums, out.index_mut(0usize), squares, 0usize, scale, place, form);
    } else {
        let mut first = 0u32;
        #[unroll]
        for p in 0..parts {
            // The dimension that the products do not share follows from the length of their operands.
            let (a, b) = (
                a.index(if comptime!(a.len() > 1) { p } else { 0usize }),
                b.index(if comptime!(b.len() > 1) { p } else { 0usize }),
            );
            let mut i_own = i_len;
            let mut j_own = j_len;
            if comptime!(parts > 1) {
                i_own = (a.len() * 8usize / (r_len as usize)) as u32;
                j_own = (b.len() * 8usize / (r_len as usize)) as u32;
            }
            let end = first + i_own.div_ceil(TILE) * j_own.div_ceil(cols);
            if comptime!(parts == 1) || (CUBE_POS_X >= first && CUBE_POS_X < end) {
                let at = corner(CUBE_POS_X - first, i_own, j_own, cols);
                let place = TilePlace { i0: at.0, j0: at.1, i_len: i_own, j_len: j_own, r_len };
                let mut sums = zero_sums(form.sums());
                if comptime!(accumulate) {
                    load::<Out>(&mut sums, out.index(p), place, form);
                }
                add_product::<F>(a, b, &mut tiles, &mut sums, place, form);
                store::<Out>(&sums, out.index_mut(p), squares, p, factor_of(scales, p, parts), place, form);
            }
            first = end;
        }
    }
}

/// The first row and column of tile number `tile`. Cubes walk `GROUP` rows of tiles column by column.
#[cube]
fn corner(tile: u32, i_len: u32, j_len: u32, #[comptime] width: u32) -> (u32, u32) {
    let rows = i_len.div_ceil(TILE);
    let cols = j_len.div_ceil(width);
    let first = tile / (GROUP * cols) * GROUP;
    let height = min(rows - first, GROUP);
    let within = tile % (GROUP * cols);
    ((first + within % height) * TILE, (within / height) * width)
}

/// The product of the tensor scales of product `part`.
#[cube]
fn factor_of(scales: &Sequence<Array<f32>>, #[comptime] part: usize, #[comptime] parts: usize) -> f32 {
    let each = comptime!(scales.len() / parts);
    let mut factor = 1.0f32;
    #[unroll]
    for s in 0..each {
        factor *= scales.index(comptime!(part * each + s))[0];
    }
    factor
}

/// Rescales the sums so far, so that the next product can be added to them.
#[cube]
fn rescale(sums: &mut Sequence<Array<Pair<f32>>>, ratio: f32) {
    #[unroll]
    for i in 0..sums.len() {
        let sum = sums.index_mut(i);
        sum[0usize] *= Pair::new(ratio);
        sum[1usize] *= Pair::new(ratio);
    }
}

/// The first column, within the tile, of a plane's block of eight: half of the first 64 or 128 columns are the
/// plane's, then half of the rest.
#[cube]
fn column_of(plane_j: u32, #[comptime] block: u32, #[comptime] blocks: u32) -> u32 {
    if comptime!(block >= 8) {
        plane_j * 16u32 + comptime!(TILE + (block - 8) * 8)
    } else {
        plane_j * comptime!(blocks.min(8) * 8) + comptime!(block * 8)
    }
}

/// Stores a plane's sums times `factor`. If the form is measured, it also stores the sum of the squares of these values. The sums
/// of squares of a result are in the order of its tiles, row by row, and within a tile in the order of its planes.
#[cube]
fn store<Out: Float>(
    sums: &Sequence<Array<Pair<f32>>>,
    out: &mut Array<Pair<Out>>,
    squares: &mut Sequence<Array<f32>>,
    #[comptime] result: usize,
    factor: f32,
    at: TilePlace,
    #[comptime] form: GemmForm,
) {
    let mut square = Pair::new(0.0f32);
    let (row, col, plane_j) = own_corner(at);
    let blocks = form.blocks();
    #[unroll]
    for f in 0..4usize {
        #[unroll]
        for block in 0..blocks {
            let sum = sums.index(comptime!(f * blocks + block));
            let j = col + column_of(plane_j, comptime!(block as u32), comptime!(blocks as u32));
            #[unroll]
            for half in 0..2usize {
                let i = row + comptime!(f as u32 * 16 + half as u32 * 8);
                if i < at.i_len && j < at.j_len {
                    let to = ((i as usize) * (at.j_len as usize) + (j as usize)) / 2usize;
                    let value = sum[half] * Pair::new(factor);
                    out[to] = Pair::<Out>::cast_from(value);
                    if comptime!(form.measured) {
                        square += value * value;
                    }
                }
            }
        }
    }
    if comptime!(form.measured) {
        let square = plane_sum(square[0] + square[1]);
        if UNIT_POS_PLANE == 0u32 {
            let tile = at.i0 / TILE * at.j_len.div_ceil(comptime!(form.cols)) + at.j0 / comptime!(form.cols);
            squares.index_mut(result)[(tile * PLANES + UNIT_POS / 32u32) as usize] = square;
        }
    }
}

/// Starts the sums from the values in `out`.
#[cube]
fn load<Out: Float>(
    sums: &mut Sequence<Array<Pair<f32>>>,
    out: &Array<Pair<Out>>,
    at: TilePlace,
    #[comptime] form: GemmForm,
) {
    let (row, col, plane_j) = own_corner(at);
    let blocks = form.blocks();
    #[unroll]
    for f in 0..4usize {
        #[unroll]
        for block in 0..blocks {
            let sum = sums.index_mut(comptime!(f * blocks + block));
            let j = col + column_of(plane_j, comptime!(block as u32), comptime!(blocks as u32));
            #[unroll]
            for half in 0..2usize {
                let i = row + comptime!(f as u32 * 16 + half as u32 * 8);
                if i < at.i_len && j < at.j_len {
                    let from = ((i as usize) * (at.j_len as usize) + (j as usize)) / 2usize;
                    sum[half] = Pair::cast_from(out[from]);
                }
            }
        }
    }
}

/// The first row and column whose sums this lane holds, and which half of the tile's columns its plane makes.
#[cube]
fn own_corner(at: TilePlace) -> (u32, u32, u32) {
    let (plane_i, plane_j) = own_rows_and_half();
    (at.i0 + plane_i + lane_row(), at.j0 + lane_col(), plane_j)
}
