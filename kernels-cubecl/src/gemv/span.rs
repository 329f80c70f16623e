//! One span: 256 columns of a tile of the weight, times the activations of all tokens.
//! ```text
//! for row of the tile { for token { for r in span { sum[row][token] += w[row][r] * x[token][r] } } }
//! ```
//! A lane holds two neighboring vectors of 32 codes for each of its two rows, and their four scales. It
//! decodes codes in place, as pairs that are four apart ([`crate::codec`]); the order of the summed columns is free
//! as long as activations are paired in the same way. A pair of `code * unit` costs three instructions, and the unit,
//! a power of two, is divided out at the end.
//!
//! Tokens are the columns of the right operand: a single one leaves seven columns idle. Codes are multiplied by their scale
//! first, exactly in either format, because one instruction sums columns of four blocks.

use super::gemv_plan::{GemvPlan, HEIGHT, SPAN};
use crate::{
    codec::{e2m1_pairs, e4m3_pair},
    mma::{Octet, Pair, multiply as multiply_fragments, sent},
    operands::PackedBuffers,
};
use cubecl::prelude::{
    barrier::{Barrier, copy_async_checked},
    *,
};

/// A weight as this kernel reads it: 32 codes in a vector, four scales in a word.
pub(super) type WeightBuffers = PackedBuffers<Vector<u32, Const<4>>, u32>;

/// Rows of a tile whose sums a lane holds: eight rows lie between them.
pub(super) const HALVES: usize = 2;
/// Tokens of a right operand whose sums a lane holds.
pub(super) const COLUMNS: usize = 2;

/// The codes and scales that a lane has loaded ahead.
#[derive(CubeType)]
pub(super) struct Ahead {
    codes: Array<Vector<u32, Const<4>>>,
    scales: Array<u32>,
}

#[cube]
pub(super) fn nothing_ahead(#[comptime] plan: GemvPlan) -> Ahead {
    Ahead {
        codes: Array::<Vector<u32, Const<4>>>::new(comptime!(plan.depth * HALVES * 2)),
        scales: Array::<u32>::new(comptime!(plan.depth * HALVES)),
    }
}

/// Starts the loads of the codes and scales of a span into `slot`. The weight has `weight_rows` rows.
#[cube]
pub(super) fn load(
    weight: &WeightBuffers,
    ahead: &mut Ahead,
    #[comptime] slot: usize,
    tile: u32,
    span: u32,
    #[comptime] weight_rows: u32,
    #[comptime] plan: GemvPlan,
) {
    #[unroll]
    for half in 0..HALVES {
        let row = tile * HEIGHT + UNIT_POS_PLANE / 4u32 + comptime!(half as u32 * 8);
        // One vector has 32 codes. The scales of two vectors are loaded as one word; bytes would have to be taken
        // apart here, which would wait for the load.
        let row = if comptime!(weight_rows.is_multiple_of(plan.lines())) { row } else { min(row, weight_rows - 1u32) };
        let at = (row * comptime!(plan.r_len / 32) + span * 8u32 + UNIT_POS_PLANE % 4u32 * 2u32) as usize;
        let to = comptime!(slot * HALVES + half);
        ahead.codes[comptime!(to * 2)] = weight.codes[at];
        ahead.codes[comptime!(to * 2 + 1)] = weight.codes[at + 1usize];
        ahead.scales[to] = weight.scales[at / 2usize];
    }
}

/// Copies the activations of all tokens into shared memory, as pairs that are four apart, unless they lie in windows.
#[cube]
pub(super) fn stage<F: Float>(
    x: &Array<Octet<F>>,
    out: &mut SharedMemory<Octet<F>>,
    rows: u32,
    #[comptime] plan: GemvPlan,
) {
    if comptime!(!plan.windows) {
        let octets = comptime!(plan.r_len / 8);
        let mut at = UNIT_POS;
        while at < rows * octets {
            let pairs = pairs_of(x[at as usize], 4usize);
            let mut octet = Octet::<F>::empty();
            #[unroll]
            for i in 0..4usize {
                octet[comptime!(i * 2)] = pairs[i][0];
                octet[comptime!(i * 2 + 1)] = pairs[i][1];
            }
            let within = at % octets;
            out[(at / octets * plan.stride() + within + within / 8u32) as usize] = octet;
            at += plan.units();
        }
        sync_cube();
    }
}

/// Starts the copies of the activations that all planes multiply in step `step` into window `slot`.
#[cube]
pub(super) fn send<F: Float>(
    x: &Array<Octet<F>>,
    out: &mut SharedMemory<Octet<F>>,
    filled: &Sequence<Shared<Barrier>>,
    #[comptime] slot: usize,
    step: u32,
    rows: u32,
    #[comptime] plan: GemvPlan,
) {
    let octets = comptime!(plan.r_len / 8);
    let wide = comptime!(plan.shares * SPAN as u32 / 8);
    let mut at = UNIT_POS;
    while at < rows * wide {
        let (token, within) = (at / wide, at % wide);
        let col = step * wide + within;
        let from = (token * octets + col) as usize;
        let to = (token * plan.stride() + within + within / 8u32) as usize + comptime!(slot * plan.window());
        // A copy of length 0 writes zeros and reads nothing; columns past the last are copied so.
        let end = from + select(col < octets, 1usize, 0usize);
        copy_async_checked(&x.slice(from, end), &mut out.slice_mut(to, to + 1usize), 8u32);
        at += plan.units();
    }
    sent(filled, slot);
}

/// Adds the span in `slot`, times the activations of all tokens, to the sums. In a window the span is that of plane
/// `share`.
#[cube]
pub(super) fn multiply<F: Float>(
    x_shared: &SharedMemory<Octet<F>>,
    ahead: &Ahead,
    sums: &mut Sequence<Array<Pair<f32>>>,
    #[comptime] slot: usize,
    span: u32,
    share: u32,
    rows: u32,
    #[comptime] plan: GemvPlan,
) {
    let within = if comptime!(plan.windows) { share } else { span };
    let row = UNIT_POS_PLANE / 4u32;
    #[unroll]
    for turn in 0..2u32 {
        let vector = within * 8u32 + UNIT_POS_PLANE % 4u32 * 2u32 + turn;
        #[unroll]
        for j in 0..4usize {
            let mut left = fragments::<F>();
            #[unroll]
            for half in 0..HALVES {
                let own = comptime!(slot * HALVES + half);
                let byte = (ahead.scales[own] >> comptime!(turn * 16 + j as u32 / 2 * 8)) & 0xFFu32;
                let scale = e4m3_pair::<F>(byte, plan.bf16);
                let pairs = e2m1_pairs::<F>(ahead.codes[comptime!(own * 2 + turn as usize)][j], plan.bf16);
                #[unroll]
                for i in 0..4usize {
                    left.index_mut(comptime!(i / 2))[comptime!(i % 2 * 2 + half)] = pairs[i] * scale;
                }
            }
            #[unroll]
            for group in 0..plan.groups() {
                // Past the last token the last one is repeated; those sums are not stored.
                let token = min(row + comptime!(group as u32 * 8), rows - 1u32);
                // The octets of a vector lie between two that are left free.
                let at = token * plan.stride() + vector * 4u32 + vector / 2u32;
                let at = (at as usize) + comptime!(if plan.windows { slot * plan.window() + j } else { j });
                // A window is a plain copy, in which pairs are neighbors.
                let right = pairs_of(x_shared[at], comptime!(if plan.windows { 4usize } else { 1usize }));
                #[unroll]
                for step in 0..2usize {
                    multiply_fragments::<F>(left.index(step), &right, step, sums.index_mut(group));
                }
            }
        }
    }
}

/// Two left operands, of zeros.
#[cube]
fn fragments<F: Float>() -> Sequence<Array<Pair<F>>> {
    let mut left = Sequence::<Array<Pair<F>>>::new();
    #[unroll]
    for _ in 0..2usize {
        let mut a = Array::<Pair<F>>::new(4usize);
        #[unroll]
        for i in 0..4usize {
            a[i] = Pair::<F>::new(F::new(0.0));
        }
        left.push(a);
    }
    left
}

/// The values of an octet as pairs: four `apart`, as codes are decoded, or 1, where the octet was paired before.
#[cube]
fn pairs_of<F: Float>(values: Octet<F>, #[comptime] apart: usize) -> Array<Pair<F>> {
    let mut pairs = Array::<Pair<F>>::new(4usize);
    #[unroll]
    for i in 0..4usize {
        let first = comptime!(if apart == 1 { i * 2 } else { i });
        let mut pair = Pair::<F>::empty();
        pair[0] = values[first];
        pair[1] = values[comptime!(first + apart)];
        pairs[i] = pair;
    }
    pairs
}

/// One of a lane's finished sums, its token, and its row of the tile.
#[cube]
pub(super) fn sum_of(
    sums: &Sequence<Array<Pair<f32>>>,
    #[comptime] group: usize,
    #[comptime] half: usize,
    #[comptime] c: usize,
) -> (f32, u32, u32) {
    let pair = sums.index(group)[half];
    let token = UNIT_POS_PLANE % 4u32 * 2u32 + comptime!(group as u32 * 8 + c as u32);
    (pair[c], token, UNIT_POS_PLANE / 4u32 + comptime!(half as u32 * 8))
}
