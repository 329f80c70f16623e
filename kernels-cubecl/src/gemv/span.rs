//! A span: one tile's rows times 256 columns times all tokens.
//!
//! A lane holds two vectors of 32 codes of each of its one or two rows, side by side, and the four scales of both, and
//! decodes codes where they lie, as pairs four apart ([`crate::codec`]): the order of the summed columns is free as long
//! as tokens' values are paired alike. `code * unit` of a pair costs three instructions; the unit, a power of two, is
//! given back at the end.
//!
//! * **Several tokens** are the columns of the right operand. Codes are multiplied by their scale before, exactly in
//!   either format: a product of tensor cores sums columns of four blocks.
//! * **One token** would leave seven of the eight columns idle. So each column is the token at one of the span's eight
//!   vectors and zero elsewhere: sums of different blocks stay apart and take their scales afterwards, one product for
//!   16 codes. bf16 values are times 2^63 then, so that codes' units do not take sums below the normal numbers.

use super::{
    SPAN,
    plan::{Plan, Tokens},
};
use crate::{
    codec::{e2m1_pairs, e4m3_pair},
    mma::{Chunk, Pair, multiply as multiply_fragments, sent, zero_sums},
};
use cubecl::prelude::{
    barrier::{Barrier, copy_async_checked},
    *,
};

/// Starts the loads of a span's codes and scales into `slot`.
#[cube]
pub(super) fn load(
    codes: &Array<Vector<u32, Const<4>>>,
    scales: &Array<u32>,
    codes_ahead: &mut Array<Vector<u32, Const<4>>>,
    scales_ahead: &mut Array<u32>,
    #[comptime] slot: usize,
    tile: u32,
    span: u32,
    #[comptime] n: u32,
    #[comptime] plan: Plan,
) {
    let halves = plan.halves();
    #[unroll]
    for half in 0..halves {
        let row = tile * plan.height() + UNIT_POS_PLANE / 4u32 + comptime!(half as u32 * 8);
        // Vectors of 32 codes; scales come for two of them, in a word: bytes would be taken apart, and waited for, here.
        let row = if comptime!(n.is_multiple_of(plan.lines())) { row } else { min(row, n - 1u32) };
        let at = (row * comptime!(plan.k / 32) + span * 8u32 + UNIT_POS_PLANE % 4u32 * 2u32) as usize;
        let to = comptime!(slot * halves + half);
        codes_ahead[comptime!(to * 2)] = codes[at];
        codes_ahead[comptime!(to * 2 + 1)] = codes[at + 1usize];
        scales_ahead[to] = scales[at / 2usize];
    }
}

/// Brings the tokens' values into shared memory, as pairs four apart, if they all lie there.
#[cube]
pub(super) fn stage<F: Float>(
    x: &Array<Chunk<F>>,
    out: &mut SharedMemory<Chunk<F>>,
    rows: u32,
    #[comptime] plan: Plan,
) {
    if comptime!(!plan.windows()) {
        let chunks = comptime!(plan.k / 8);
        let one = comptime!(plan.tokens == Tokens::One);
        let unit = Pair::<F>::new(F::new(comptime!(plan.value_unit())));
        let all = if comptime!(one) { chunks.runtime() } else { rows * chunks };
        let mut at = UNIT_POS;
        while at < all {
            let pairs = pairs_of(x[at as usize], 4usize);
            let mut chunk = Chunk::<F>::empty();
            #[unroll]
            for i in 0..4usize {
                let pair = if comptime!(one) { pairs[i] * unit } else { pairs[i] };
                chunk[comptime!(i * 2)] = pair[0];
                chunk[comptime!(i * 2 + 1)] = pair[1];
            }
            let within = at % chunks;
            let to = if comptime!(one) { at } else { at / chunks * plan.stride() + within + within / 8u32 };
            out[to as usize] = chunk;
            at += plan.units();
        }
        // What lanes of other columns multiply, in banks that the others do not ask.
        if comptime!(one) && UNIT_POS < 4u32 {
            out[(chunks + 2u32 + UNIT_POS) as usize] = Chunk::new(F::new(0.0));
        }
        sync_cube();
    }
}

/// Starts the copies of what all planes multiply in step `step` into window `slot`.
#[cube]
pub(super) fn send<F: Float>(
    x: &Array<Chunk<F>>,
    out: &mut SharedMemory<Chunk<F>>,
    filled: &Sequence<Shared<Barrier>>,
    #[comptime] slot: usize,
    step: u32,
    rows: u32,
    #[comptime] plan: Plan,
) {
    let chunks = comptime!(plan.k / 8);
    let wide = comptime!(plan.shares * SPAN as u32 / 8);
    let mut at = UNIT_POS;
    while at < rows * wide {
        let (token, within) = (at / wide, at % wide);
        let col = step * wide + within;
        let from = (token * chunks + col) as usize;
        let to = (token * plan.stride() + within + within / 8u32) as usize + comptime!(slot * plan.window());
        // A copy of length 0 reads nothing and writes zeros: past the last column.
        let end = from + select(col < chunks, 1usize, 0usize);
        copy_async_checked(&x.slice(from, end), &mut out.slice_mut(to, to + 1usize), 8u32);
        at += plan.units();
    }
    sent(filled, slot);
}

/// Adds the span in `slot`, in a window that of plane `share`, times all tokens to the sums.
#[cube]
pub(super) fn multiply<F: Float>(
    x_shared: &SharedMemory<Chunk<F>>,
    codes: &Array<Vector<u32, Const<4>>>,
    scales: &Array<u32>,
    sums: &mut Sequence<Array<Pair<f32>>>,
    #[comptime] slot: usize,
    span: u32,
    share: u32,
    rows: u32,
    #[comptime] plan: Plan,
) {
    if comptime!(plan.tokens == Tokens::One) {
        multiply_one::<F>(x_shared, codes, scales, sums, slot, span, plan);
    } else {
        let within = if comptime!(plan.windows()) { share } else { span };
        multiply_few::<F>(x_shared, codes, scales, sums, slot, within, rows, plan);
    }
}

#[cube]
fn multiply_one<F: Float>(
    x_shared: &SharedMemory<Chunk<F>>,
    codes: &Array<Vector<u32, Const<4>>>,
    scales: &Array<u32>,
    sums: &mut Sequence<Array<Pair<f32>>>,
    #[comptime] slot: usize,
    span: u32,
    #[comptime] plan: Plan,
) {
    let halves = plan.halves();
    let column = UNIT_POS_PLANE / 4u32;
    let zero = comptime!(plan.k / 8 + 2);
    #[unroll]
    for block in 0..2usize {
        let mut apart = zero_sums(1usize);
        #[unroll]
        for turn in 0..2u32 {
            // Column `c` is the token at the span's vector `c`, which lane `c / 2` of a row decodes.
            let own = column == UNIT_POS_PLANE % 4u32 * 2u32 + turn;
            let at = select(own, span * 32u32 + column * 4u32, zero.runtime()) as usize;
            #[unroll]
            for word in 0..2usize {
                let j = comptime!(block * 2 + word);
                let mut left = fragments::<F>();
                #[unroll]
                for half in 0..halves {
                    let vector = comptime!((slot * halves + half) * 2 + turn as usize);
                    let pairs = e2m1_pairs::<F>(codes[vector][j], plan.bf16);
                    #[unroll]
                    for i in 0..4usize {
                        left.index_mut(comptime!(i / 2))[comptime!(i % 2 * 2 + half)] = pairs[i];
                    }
                }
                let right = pairs_of(x_shared[at + j], 1usize);
                #[unroll]
                for step in 0..2usize {
                    multiply_fragments::<F>(left.index(step), &right, step, apart.index_mut(0usize));
                }
            }
        }
        #[unroll]
        for half in 0..halves {
            let four = scales[comptime!(slot * halves + half)];
            let mut scale = Pair::<f32>::empty();
            #[unroll]
            for c in 0..2usize {
                scale[c] = scale_of(four, comptime!(c as u32 * 2 + block as u32));
            }
            sums.index_mut(0usize)[half] += apart.index(0usize)[half] * scale;
        }
    }
}

/// The value of one of four scales: an E4M3 byte's bits as those of an f32 are it times 2^-120, subnormal bytes as well.
/// CUDA keeps subnormal numbers.
#[cube]
fn scale_of(four: u32, #[comptime] i: u32) -> f32 {
    let bits = if comptime!(i < 3) { four << comptime!(20 - 8 * i.min(2)) } else { four >> 4u32 };
    f32::reinterpret(bits & 0x0FF0_0000u32) * comptime!(2.0f32.powi(120))
}

#[cube]
fn multiply_few<F: Float>(
    x_shared: &SharedMemory<Chunk<F>>,
    codes: &Array<Vector<u32, Const<4>>>,
    scales: &Array<u32>,
    sums: &mut Sequence<Array<Pair<f32>>>,
    #[comptime] slot: usize,
    within: u32,
    rows: u32,
    #[comptime] plan: Plan,
) {
    let halves = plan.halves();
    let row = UNIT_POS_PLANE / 4u32;
    #[unroll]
    for turn in 0..2u32 {
        let vector = within * 8u32 + UNIT_POS_PLANE % 4u32 * 2u32 + turn;
        #[unroll]
        for j in 0..4usize {
            let mut left = fragments::<F>();
            #[unroll]
            for half in 0..halves {
                let own = comptime!(slot * halves + half);
                let byte = (scales[own] >> comptime!(turn * 16 + j as u32 / 2 * 8)) & 0xFFu32;
                let scale = e4m3_pair::<F>(byte, plan.bf16);
                let pairs = e2m1_pairs::<F>(codes[comptime!(own * 2 + turn as usize)][j], plan.bf16);
                #[unroll]
                for i in 0..4usize {
                    left.index_mut(comptime!(i / 2))[comptime!(i % 2 * 2 + half)] = pairs[i] * scale;
                }
            }
            #[unroll]
            for group in 0..plan.groups() {
                // Tokens past the last repeat it: their sums are not stored.
                let token = min(row + comptime!(group as u32 * 8), rows - 1u32);
                // The chunks of a vector lie between two that are left free.
                let at = token * plan.stride() + vector * 4u32 + vector / 2u32;
                let at = (at as usize) + comptime!(if plan.windows() { slot * plan.window() + j } else { j });
                // Windows are copies of what lies in memory.
                let right = pairs_of(x_shared[at], comptime!(if plan.windows() { 4usize } else { 1usize }));
                #[unroll]
                for step in 0..2usize {
                    multiply_fragments::<F>(left.index(step), &right, step, sums.index_mut(group));
                }
            }
        }
    }
}

/// Two left operands; rows that a tile does not have are zero.
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

/// A chunk's values as pairs: four `apart`, as codes are decoded, or 1, where the chunk was paired before.
#[cube]
fn pairs_of<F: Float>(values: Chunk<F>, #[comptime] apart: usize) -> Array<Pair<F>> {
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

/// A lane's finished sum `c` of a right operand, its token, and its row of the tile. Of one token all four lanes of a
/// row get the sum and the first has the token.
#[cube]
pub(super) fn sum_of(
    sums: &Sequence<Array<Pair<f32>>>,
    #[comptime] group: usize,
    #[comptime] half: usize,
    #[comptime] c: usize,
    #[comptime] plan: Plan,
) -> (f32, u32, u32) {
    let pair = sums.index(group)[half];
    let line = UNIT_POS_PLANE / 4u32 + comptime!(half as u32 * 8);
    let part = UNIT_POS_PLANE % 4u32;
    if comptime!(plan.tokens == Tokens::One) {
        let mut sum = pair[0] + pair[1];
        sum += plane_shuffle_xor(sum, 1u32);
        sum += plane_shuffle_xor(sum, 2u32);
        (sum, part, line)
    } else {
        (pair[c], part * 2u32 + comptime!(group as u32 * 8 + c as u32), line)
    }
}
