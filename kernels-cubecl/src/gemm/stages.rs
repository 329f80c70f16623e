//! The sum of one tile:
//! ```text
//! for step of 64 along r { copy 64 columns of a and b into a stage; for 16 of them { sums += a bᵀ by mma.sync } }
//! ```
//! A ring of three stages in shared memory is filled ahead by `cp.async`. Each plane keeps the sums of 64 rows and of
//! half of the columns in registers. Two cubes share a multiprocessor: one computes while the other waits.

use super::{
    form::{GemmForm, TilePlace},
    tiles::{DEPTH, STAGES, TILE},
};
use crate::mma::{Octet, Pair, TileSource, fill, left, multiply, right, ring, sent};
use cubecl::prelude::*;

/// Octets of the left operand in one stage.
const STAGE: u32 = TILE * DEPTH / 8;

/// The ring of stages of one cube.
#[derive(CubeType)]
pub(super) struct Tiles<F: Float> {
    a: SharedMemory<Octet<F>>,
    b: SharedMemory<Octet<F>>,
}

/// Reserves shared memory for the ring.
#[cube]
pub(super) fn reserved_tiles<F: Float>(#[comptime] form: GemmForm) -> Tiles<F> {
    Tiles::<F> {
        a: SharedMemory::new_aligned(comptime!(STAGES * STAGE as usize), 128usize),
        b: SharedMemory::new_aligned(comptime!(STAGES * (form.cols * DEPTH / 8) as usize), 128usize),
    }
}

/// Adds a product's tile to the sums.
#[cube]
pub(super) fn add_product<F: Float>(
    a: &Array<Octet<F>>,
    b: &Array<Octet<F>>,
    tiles: &mut Tiles<F>,
    sums: &mut Sequence<Array<Pair<f32>>>,
    at: TilePlace,
    #[comptime] form: GemmForm,
) {
    // Other units may still read the last stages of another product.
    sync_cube();
    let filled = ring(STAGES);
    let steps = at.r_len.div_ceil(DEPTH);
    #[unroll]
    for stage in 0..comptime!(STAGES - 1) {
        let ahead = comptime!(stage as u32).runtime();
        if ahead < steps {
            fill_stage(a, b, tiles, ahead, at, comptime!(stage as u32), form);
            sent(&filled, stage);
        }
    }
    let mut step = 0u32;
    let mut phase = 0u32;
    while step < steps {
        #[unroll]
        for stage in 0..STAGES {
            let now = step + comptime!(stage as u32);
            if now < steps {
                filled.index(stage).wait_parity(phase);
                // From here on no unit reads the stage before this one, which is filled again.
                sync_cube();
                let ahead = now + comptime!(STAGES as u32 - 1);
                let freed = comptime!((stage + STAGES - 1) % STAGES);
                if ahead < steps {
                    fill_stage(a, b, tiles, ahead, at, comptime!(freed as u32), form);
                    sent(&filled, freed);
                }
                multiply_stage::<F>(tiles, sums, comptime!(stage as u32), form);
            }
        }
        step += comptime!(STAGES as u32);
        phase ^= 1u32;
    }
}

/// Starts the copies of step `step` into a stage.
#[cube]
fn fill_stage<F: Float>(
    a: &Array<Octet<F>>,
    b: &Array<Octet<F>>,
    tiles: &mut Tiles<F>,
    step: u32,
    at: TilePlace,
    #[comptime] stage: u32,
    #[comptime] form: GemmForm,
) {
    let GemmForm { cols, a_across, b_across, .. } = comptime!(form);
    let base = comptime!(stage * STAGE);
    let rows = OuterRange { first: at.i0, len: at.i_len, r_len: at.r_len };
    fill_operand::<F>(a, &mut tiles.a, base, step, rows, TILE, a_across);
    let base = comptime!(stage * cols * DEPTH / 8);
    let columns = OuterRange { first: at.j0, len: at.j_len, r_len: at.r_len };
    fill_operand::<F>(b, &mut tiles.b, base, step, columns, cols, b_across);
}

/// The outer indices of an operand in a tile: from `first` on, of `len` in all. Its summed index has `r_len` values.
#[derive(CubeType, Clone, Copy)]
struct OuterRange {
    first: u32,
    len: u32,
    r_len: u32,
}

/// Starts the copies of one operand: `outer` outer indices by 64 summed ones. Where the operand is stored across, the
/// outer indices from 128 on have a region of their own behind the others.
#[cube]
fn fill_operand<F: Float>(
    x: &Array<Octet<F>>,
    tiles: &mut SharedMemory<Octet<F>>,
    base: u32,
    step: u32,
    range: OuterRange,
    #[comptime] outer: u32,
    #[comptime] across: bool,
) {
    if comptime!(across) {
        let source = TileSource { rows: range.r_len, stride: range.len / 8u32, end: range.len / 8u32 };
        let width = comptime!(outer.min(TILE) / 8);
        fill(x, source, step * DEPTH, range.first / 8u32, tiles, base, DEPTH, width);
        if comptime!(outer > TILE) {
            let (more, base) = (range.first / 8u32 + comptime!(TILE / 8), base + comptime!(DEPTH * TILE / 8));
            fill(x, source, step * DEPTH, more, tiles, base, DEPTH, comptime!((outer - TILE) / 8));
        }
    } else {
        let source = TileSource { rows: range.len, stride: range.r_len / 8u32, end: range.r_len / 8u32 };
        fill(x, source, range.first, step * 8u32, tiles, base, outer, comptime!(DEPTH / 8));
    }
}

/// Adds the products of one stage: four steps of 16 along `r`, each with four left operands and two, four or five
/// pairs of right ones.
#[cube]
fn multiply_stage<F: Float>(
    tiles: &Tiles<F>,
    sums: &mut Sequence<Array<Pair<f32>>>,
    #[comptime] stage: u32,
    #[comptime] form: GemmForm,
) {
    let GemmForm { cols, a_across, b_across, .. } = comptime!(form);
    let (plane_i, plane_j) = own_rows_and_half();
    let a_base = comptime!(stage * STAGE);
    let b_base = comptime!(stage * cols * DEPTH / 8);
    let a_width = comptime!(if a_across { TILE / 8 } else { DEPTH / 8 });
    let b_width = comptime!(if b_across { cols.min(TILE) / 8 } else { DEPTH / 8 });
    let groups = comptime!(cols as usize / 32);
    let first = plane_j * comptime!(cols.min(TILE) / 2);
    #[unroll]
    for part in 0..4u32 {
        let mut rows = Sequence::<Array<Pair<F>>>::new();
        #[unroll]
        for f in 0..4u32 {
            rows.push(left::<F>(&tiles.a, a_base, plane_i, comptime!(f * 16), part, a_width, a_across));
        }
        #[unroll]
        for group in 0..groups {
            let cols = if comptime!(group < 4) {
                right::<F>(&tiles.b, b_base, first, comptime!(group as u32 * 16), part, b_width, b_across)
            } else if comptime!(b_across) {
                let base = comptime!(b_base + DEPTH * TILE / 8);
                right::<F>(&tiles.b, base, plane_j * 16u32, 0u32, part, comptime!((cols - TILE) / 8), true)
            } else {
                right::<F>(&tiles.b, b_base, plane_j * 16u32, TILE, part, b_width, false)
            };
            #[unroll]
            for half in 0..2usize {
                #[unroll]
                for f in 0..4usize {
                    let sum = sums.index_mut(comptime!((f * groups + group) * 2 + half));
                    multiply::<F>(rows.index(f), &cols, half, sum);
                }
            }
        }
    }
}

/// The first of the 64 rows of a tile that a plane owns, and which half of its columns.
#[cube]
pub(super) fn own_rows_and_half() -> (u32, u32) {
    ((UNIT_POS / 64u32) * 64u32, UNIT_POS / 32u32 % 2u32)
}
