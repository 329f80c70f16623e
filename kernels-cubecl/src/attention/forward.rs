//! Forward: a cube of four planes takes 128 queries of one head, each plane 32 rows, and walks blocks of 64 keys that
//! cp.async loads one ahead. The online softmax keeps a row's maximum and sum and rescales the output only where the maximum rose.

use super::{AttentionShape, BLOCK, HIDDEN, UNITS, key_blocks, scale, send_block, turn_block};
use crate::{
    error::{KernelError, expect_len, index},
    mma::{Chunk, Pair, as_left, fill, left, multiply, right, whole_rows, zero_sums},
};
use cubecl::prelude::*;

/// Queries of a cube.
const ROWS: u32 = 128;

/// `out` `[T, H, E]` and `lse` (f32, `[H, T]`) from `q`, `k`, `v` of type `dtype` and `starts` (u32, T).
///
/// # Errors
/// If a buffer does not fit the shape or E is neither 64 nor 128.
pub fn forward<R: Runtime>(
    client: &ComputeClient<R>,
    [q, k, v]: [ArrayArg<R>; 3],
    starts: ArrayArg<R>,
    out: ArrayArg<R>,
    lse: ArrayArg<R>,
    dtype: StorageType,
    shape: AttentionShape,
) -> Result<(), KernelError> {
    const NAME: &str = "attention";
    shape.check(NAME)?;
    expect_len(NAME, "q", q.size(), shape.query_len())?;
    expect_len(NAME, "k", k.size(), shape.key_len())?;
    expect_len(NAME, "v", v.size(), shape.key_len())?;
    expect_len(NAME, "out", out.size(), shape.query_len())?;
    expect_len(NAME, "starts", starts.size(), shape.queries)?;
    expect_len(NAME, "lse", lse.size(), shape.queries * shape.heads)?;
    let tiles = index(NAME, "queries", shape.queries)?.div_ceil(ROWS);
    // SAFETY: buffer lengths were checked; rows outside are neither loaded nor stored.
    unsafe {
        forward_kernel::launch_unchecked(
            client,
            CubeCount::Static(shape.heads as u32, tiles, 1),
            CubeDim::new_1d(UNITS),
            q,
            k,
            v,
            starts,
            out,
            lse,
            shape.queries as u32,
            index(NAME, "keys", shape.keys)?,
            shape.past as u32,
            scale(shape),
            shape.heads as u32,
            shape.kv_heads as u32,
            shape.head_dim as u32,
            dtype,
        );
    }
    Ok(())
}

#[cube(launch_unchecked, fast_math = FastMath::all())]
fn forward_kernel<F: Float>(
    q: &Array<Chunk<F>>,
    k: &Array<Chunk<F>>,
    v: &Array<Chunk<F>>,
    starts: &Array<u32>,
    out: &mut Array<Pair<F>>,
    lse: &mut Array<f32>,
    q_len: u32,
    k_len: u32,
    past: u32,
    scale: f32,
    #[comptime] heads: u32,
    #[comptime] kv_heads: u32,
    #[comptime] dim: u32,
    #[define(F)] _dtype: StorageType,
) {
    let width = comptime!(dim / 8);
    let block_len = comptime!(BLOCK * width);
    let mut q_tile = SharedMemory::<Chunk<F>>::new_aligned(comptime!((ROWS * width) as usize), 128usize);

    // The longest rows first.
    let i0 = (q_len.div_ceil(ROWS) - 1u32 - CUBE_POS_Y) * ROWS;
    let head = CUBE_POS_X;
    let kv_head = head / comptime!(heads / kv_heads);
    let queries = whole_rows(q_len, comptime!(heads * width));
    let mut keys = key_blocks::<F>(k_len, kv_head, kv_heads, dim);

    let last = min(i0 + ROWS, q_len) - 1u32;
    let first_block = starts[i0 as usize] / BLOCK;
    let end_block = (last + past) / BLOCK + 1u32;
    let full_from = starts[last as usize];
    let plane_row = UNIT_POS / 32u32 * 32u32;
    let row0 = i0 + plane_row + UNIT_POS_PLANE / 4u32;
    let col0 = (UNIT_POS_PLANE % 4u32) * 2u32;

    let mut own_start = Array::<u32>::new(4usize);
    let mut top = Array::<f32>::new(4usize);
    let mut total = Array::<f32>::new(4usize);
    #[unroll]
    for n in 0..4usize {
        let row = row0 + comptime!(n as u32 * 8);
        own_start[n] = starts[min(row, q_len - 1u32) as usize];
        top[n] = HIDDEN;
        total[n] = 0.0f32;
    }
    let mut mixed = zero_sums(comptime!(dim as usize / 4));

    fill(q, queries, i0, head * width, &mut q_tile, 0u32, ROWS, width, UNITS);
    send_block(k, v, &mut keys, first_block, 0usize);

    let mut block = first_block;
    let mut phase = 0u32;
    while block < end_block {
        #[unroll]
        for stage in 0..2usize {
            let now = block + comptime!(stage as u32);
            if now < end_block {
                turn_block(k, v, &mut keys, now, end_block, phase, stage);
                let base = comptime!(stage as u32 * block_len);

                // 1. Scores, 32 rows by 64 keys a plane.
                let mut scores = zero_sums(16usize);
                #[unroll]
                for part in 0..comptime!(dim / 16) {
                    let mut rows = Sequence::<Array<Pair<F>>>::new();
                    #[unroll]
                    for f in 0..2u32 {
                        rows.push(left::<F>(&q_tile, 0u32, plane_row, comptime!(f * 16), part, width, false));
                    }
                    #[unroll]
                    for g in 0..4usize {
                        let cols = right::<F>(&keys.k, base, 0u32, comptime!(g as u32 * 16), part, width, false);
                        #[unroll]
                        for half in 0..2usize {
                            #[unroll]
                            for f in 0..2usize {
                                let at = comptime!(f * 8 + g * 2 + half);
                                multiply::<F>(rows.index(f), &cols, half, scores.index_mut(at));
                            }
                        }
                    }
                }

                // 2. Hide what lies ahead or in another document.
                let key0 = now * BLOCK;
                if key0 + BLOCK - 1u32 > i0 + past || key0 < full_from {
                    #[unroll]
                    for n in 0..4usize {
                        let seen = row0 + comptime!(n as u32 * 8) + past;
                        #[unroll]
                        for g in 0..8usize {
                            let scores = scores.index_mut(comptime!(n / 2 * 8 + g));
                            let mut pair = scores[comptime!(n % 2)];
                            #[unroll]
                            for c in 0..2usize {
                                let key = key0 + col0 + comptime!(g as u32 * 8 + c as u32);
                                pair[c] = select(key > seen || key < own_start[n], HIDDEN, pair[c]);
                            }
                            scores[comptime!(n % 2)] = pair;
                        }
                    }
                }

                // 3. Online softmax: a row lies in four neighbouring lanes.
                #[unroll]
                for n in 0..4usize {
                    let mut best = top[n];
                    #[unroll]
                    for g in 0..8usize {
                        let pair = scores.index(comptime!(n / 2 * 8 + g))[comptime!(n % 2)];
                        best = max(best, max(pair[0], pair[1]));
                    }
                    best = max(best, plane_shuffle_xor(best, 1u32));
                    best = max(best, plane_shuffle_xor(best, 2u32));
                    // Once the maximum has settled there is nothing to rescale.
                    if plane_any(best > top[n]) {
                        let shrink = ((top[n] - best) * scale).exp();
                        total[n] *= shrink;
                        #[unroll]
                        for g in 0..comptime!(dim as usize / 8) {
                            let mixed = mixed.index_mut(comptime!(n / 2 * (dim as usize / 8) + g));
                            mixed[comptime!(n % 2)] = mixed[comptime!(n % 2)] * Pair::new(shrink);
                        }
                        top[n] = best;
                    }
                    let shift = best * scale;
                    let mut sum = 0.0f32;
                    #[unroll]
                    for g in 0..8usize {
                        let scores = scores.index_mut(comptime!(n / 2 * 8 + g));
                        let mut pair = scores[comptime!(n % 2)];
                        pair[0] = (pair[0] * scale - shift).exp();
                        pair[1] = (pair[1] * scale - shift).exp();
                        sum += pair[0] + pair[1];
                        scores[comptime!(n % 2)] = pair;
                    }
                    total[n] += sum;
                }

                // 4. Mix values.
                #[unroll]
                for part in 0..4usize {
                    let mut rows = Sequence::<Array<Pair<F>>>::new();
                    #[unroll]
                    for f in 0..2usize {
                        let at = comptime!(f * 8 + part * 2);
                        rows.push(as_left::<F>(scores.index(at), scores.index(comptime!(at + 1))));
                    }
                    #[unroll]
                    for g in 0..comptime!(dim as usize / 16) {
                        let cols = right::<F>(
                            &keys.v,
                            base,
                            0u32,
                            comptime!(g as u32 * 16),
                            comptime!(part as u32),
                            width,
                            true,
                        );
                        #[unroll]
                        for half in 0..2usize {
                            #[unroll]
                            for f in 0..2usize {
                                let at = comptime!(f * (dim as usize / 8) + g * 2 + half);
                                multiply::<F>(rows.index(f), &cols, half, mixed.index_mut(at));
                            }
                        }
                    }
                }
            }
        }
        block += 2u32;
        phase ^= 1u32;
    }

    #[unroll]
    for n in 0..4usize {
        let row = row0 + comptime!(n as u32 * 8);
        let mut sum = total[n];
        sum += plane_shuffle_xor(sum, 1u32);
        sum += plane_shuffle_xor(sum, 2u32);
        if row < q_len {
            let at = ((row as usize) * comptime!(heads as usize) + (head as usize)) * comptime!(dim as usize / 2);
            let inverse = 1.0f32 / sum;
            #[unroll]
            for g in 0..comptime!(dim as usize / 8) {
                let pair = mixed.index(comptime!(n / 2 * (dim as usize / 8) + g))[comptime!(n % 2)];
                out[at + comptime!(g * 4) + (col0 / 2u32) as usize] = Pair::cast_from(pair * Pair::new(inverse));
            }
            if col0 == 0u32 {
                lse[(head * q_len + row) as usize] = top[n] * scale + sum.ln();
            }
        }
    }
}
