//! Attention of a few new tokens over a long cache: as [`crate::attention`], the keys split among cubes.
//! ```text
//! for split { m, l, y = online softmax over the split's keys }      m* = max m     y = sum y e^(m - m*) / sum l e^(m - m*)
//! ```
//! A cube takes one key head, its share of the keys and all the queries that read them: the `H/K` heads of a group
//! times the new tokens, at most 16 rows. Blocks of 64 keys are loaded one ahead by cp.async; each of the four planes
//! takes 16 keys of a block with a maximum, sum and output of its own, which meet in shared memory at the end. A
//! second kernel joins the splits. Reads every key and value once: bound by memory.

use crate::{
    attention::{AttentionShape, BLOCK, HIDDEN, UNITS, key_blocks, send_block, turn_block},
    error::{KernelError, expect_len, index},
    mma::{Chunk, Pair, as_left, left, multiply, right, zero_sums},
};
use cubecl::prelude::*;

/// Rows of a cube's fragment.
const ROWS: u32 = 16;
/// Cubes that fill a large card twice over.
const CUBES: usize = 264;

/// Whether the kernel takes the call: at most 16 rows of queries a key head.
pub fn fits(shape: AttentionShape) -> bool {
    shape.fits() && shape.queries * shape.heads <= ROWS as usize * shape.kv_heads
}

/// Shares of the keys, and values of the scratch that [`decode_attention`] needs.
pub fn scratch(shape: AttentionShape) -> (usize, usize) {
    let blocks = shape.keys.div_ceil(BLOCK as usize);
    let splits = (CUBES / shape.kv_heads).clamp(1, blocks.max(1));
    (splits, splits * shape.kv_heads * ROWS as usize * (shape.head_dim + 2))
}

/// `out` `[T, H, E]` from `q`, `k`, `v` of type `dtype`; every query sees all keys up to its own. `scratch` is f32.
///
/// # Errors
/// If a buffer does not fit the shape or [`fits`] is false.
pub fn decode_attention<R: Runtime>(
    client: &ComputeClient<R>,
    [q, k, v]: [ArrayArg<R>; 3],
    starts: ArrayArg<R>,
    partial: [ArrayArg<R>; 2],
    out: ArrayArg<R>,
    dtype: StorageType,
    shape: AttentionShape,
) -> Result<(), KernelError> {
    const NAME: &str = "decode attention";
    let (splits, len) = scratch(shape);
    let (rows, cols) = (shape.queries * shape.heads, shape.head_dim);
    expect_len(NAME, "rows that do not fit", usize::from(!fits(shape)), 0)?;
    expect_len(NAME, "keys", shape.keys, shape.queries + shape.past)?;
    for (what, arg, expected) in [
        ("q", &q, rows * cols),
        ("out", &out, rows * cols),
        ("k", &k, shape.keys * shape.kv_heads * cols),
        ("v", &v, shape.keys * shape.kv_heads * cols),
        ("starts", &starts, shape.queries),
        ("scratch", &partial[0], len),
        ("scratch", &partial[1], len),
    ] {
        expect_len(NAME, what, arg.size(), expected)?;
    }
    let keys = index(NAME, "keys", shape.keys)?;
    let [write, read] = partial;
    // SAFETY: buffer lengths were checked; keys past the last are not loaded and hidden.
    unsafe {
        split_kernel::launch_unchecked(
            client,
            CubeCount::Static(shape.kv_heads as u32, splits as u32, 1),
            CubeDim::new_1d(UNITS),
            q,
            k,
            v,
            starts,
            write,
            shape.queries as u32,
            keys,
            shape.past as u32,
            1.0 / (cols as f32).sqrt(),
            shape.heads as u32,
            shape.kv_heads as u32,
            cols as u32,
            dtype,
        );
        join_kernel::launch_unchecked(
            client,
            CubeCount::Static(rows as u32, 1, 1),
            CubeDim::new_1d(cols as u32),
            read,
            out,
            splits as u32,
            shape.heads as u32,
            shape.kv_heads as u32,
            cols as u32,
            dtype,
        );
    }
    Ok(())
}

#[cube(launch_unchecked, fast_math = FastMath::all())]
fn split_kernel<F: Float>(
    q: &Array<F>,
    k: &Array<Chunk<F>>,
    v: &Array<Chunk<F>>,
    starts: &Array<u32>,
    partial: &mut Array<f32>,
    queries: u32,
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
    let group = comptime!(heads / kv_heads);
    let mut q_tile = SharedMemory::<Chunk<F>>::new_aligned(comptime!((ROWS * width) as usize), 128usize);
    let kv_head = CUBE_POS_X;
    let mut keys = key_blocks::<F>(k_len, kv_head, kv_heads, dim);
    let blocks = k_len.div_ceil(BLOCK);
    let share = blocks.div_ceil(CUBE_COUNT_Y);
    let first = min(CUBE_POS_Y * share, blocks);
    let end = min(first + share, blocks);
    let plane = UNIT_POS / 32u32;
    let col0 = (UNIT_POS_PLANE % 4u32) * 2u32;

    // Row r is query r / group of head r % group.
    let mut slot = UNIT_POS;
    while slot < comptime!(ROWS * width) {
        let row = slot / width;
        let chunk = slot % width;
        let mut values = Chunk::<F>::new(F::new(0.0f32));
        if row < queries * group {
            let head = kv_head * group + row % group;
            let at = ((row / group * heads + head) * dim + chunk * 8u32) as usize;
            #[unroll]
            for i in 0..8usize {
                values[i] = q[at + i];
            }
        }
        q_tile[crate::mma::place(row, chunk, width) as usize] = values;
        slot += UNITS;
    }
    let mut seen = Array::<u32>::new(2usize);
    let mut start = Array::<u32>::new(2usize);
    let mut top = Array::<f32>::new(2usize);
    let mut total = Array::<f32>::new(2usize);
    #[unroll]
    for half in 0..2usize {
        let query = min((UNIT_POS_PLANE / 4u32 + comptime!(half as u32 * 8)) / group, queries - 1u32);
        seen[half] = query + past;
        start[half] = starts[query as usize];
        top[half] = HIDDEN;
        total[half] = 0.0f32;
    }
    let mut mixed = zero_sums(comptime!(dim as usize / 8));

    if first < end {
        send_block(k, v, &mut keys, first, 0usize);
    }
    let mut block = first;
    let mut phase = 0u32;
    while block < end {
        #[unroll]
        for stage in 0..2usize {
            let now = block + comptime!(stage as u32);
            if now < end {
                turn_block(k, v, &mut keys, now, end, phase, stage);
                let base = comptime!(stage as u32 * block_len);
                let mut scores = zero_sums(2usize);
                #[unroll]
                for part in 0..comptime!(dim / 16) {
                    let rows = left::<F>(&q_tile, 0u32, 0u32, 0u32, part, width, false);
                    let cols = right::<F>(&keys.k, base, plane * 16u32, 0u32, part, width, false);
                    #[unroll]
                    for half in 0..2usize {
                        multiply::<F>(&rows, &cols, half, scores.index_mut(half));
                    }
                }
                let key0 = now * BLOCK + plane * 16u32 + col0;
                #[unroll]
                for half in 0..2usize {
                    let mut best = top[half];
                    #[unroll]
                    for g in 0..2usize {
                        let scores = scores.index_mut(g);
                        let mut pair = scores[half];
                        #[unroll]
                        for c in 0..2usize {
                            let key = key0 + comptime!(g as u32 * 8 + c as u32);
                            pair[c] = select(key > seen[half] || key < start[half], HIDDEN, pair[c] * scale);
                            best = max(best, pair[c]);
                        }
                        scores[half] = pair;
                    }
                    best = max(best, plane_shuffle_xor(best, 1u32));
                    best = max(best, plane_shuffle_xor(best, 2u32));
                    let shrink = (top[half] - best).exp();
                    top[half] = best;
                    let mut sum = 0.0f32;
                    #[unroll]
                    for g in 0..2usize {
                        let scores = scores.index_mut(g);
                        let mut pair = scores[half];
                        #[unroll]
                        for c in 0..2usize {
                            // Where nothing is seen yet, the maximum is the hidden score itself.
                            pair[c] = select(pair[c] > -1.0e29f32, (pair[c] - best).exp(), 0.0f32);
                            sum += pair[c];
                        }
                        scores[half] = pair;
                    }
                    total[half] = total[half] * shrink + sum;
                    #[unroll]
                    for g in 0..comptime!(dim as usize / 8) {
                        let mixed = mixed.index_mut(g);
                        mixed[half] = mixed[half] * Pair::new(shrink);
                    }
                }
                let weights = as_left::<F>(scores.index(0usize), scores.index(1usize));
                let row = base + plane * 16u32 * width;
                #[unroll]
                for g in 0..comptime!(dim as usize / 16) {
                    let cols = right::<F>(&keys.v, row, 0u32, comptime!(g as u32 * 16), 0u32, width, true);
                    #[unroll]
                    for half in 0..2usize {
                        multiply::<F>(&weights, &cols, half, mixed.index_mut(comptime!(g * 2 + half)));
                    }
                }
            }
        }
        block += 2u32;
        phase ^= 1u32;
    }

    // Join the planes, one after another, in shared memory: [row][E values, maximum, sum].
    let line = comptime!(dim + 2);
    let mut joined = SharedMemory::<f32>::new(comptime!((ROWS * line) as usize));
    #[unroll]
    for p in 0..4u32 {
        sync_cube();
        if plane == p {
            #[unroll]
            for half in 0..2usize {
                let mut sum = total[half];
                sum += plane_shuffle_xor(sum, 1u32);
                sum += plane_shuffle_xor(sum, 2u32);
                let row = (UNIT_POS_PLANE / 4u32 + comptime!(half as u32 * 8)) * line;
                let mut old_top = f32::new(HIDDEN);
                let mut old_sum = 0.0f32;
                if comptime!(p > 0) {
                    old_top = joined[(row + dim) as usize];
                    old_sum = joined[(row + dim + 1u32) as usize];
                }
                let best = max(old_top, top[half]);
                let old_share = (old_top - best).exp();
                let own_share = (top[half] - best).exp();
                #[unroll]
                for g in 0..comptime!(dim as usize / 8) {
                    let pair = mixed.index(g)[half];
                    #[unroll]
                    for c in 0..2usize {
                        let at = (row + col0 + comptime!(g as u32 * 8 + c as u32)) as usize;
                        let mut value = pair[c] * own_share;
                        if comptime!(p > 0) {
                            value += joined[at] * old_share;
                        }
                        joined[at] = value;
                    }
                }
                sync_plane();
                if col0 == 0u32 {
                    joined[(row + dim) as usize] = best;
                    joined[(row + dim + 1u32) as usize] = old_sum * old_share + sum * own_share;
                }
            }
        }
    }
    sync_cube();
    let base = (CUBE_POS_Y * kv_heads + kv_head) * comptime!(ROWS * line);
    let mut slot = UNIT_POS;
    while slot < comptime!(ROWS * line) {
        partial[(base + slot) as usize] = joined[slot as usize];
        slot += UNITS;
    }
}

/// A cube joins the splits of one query and head, a unit for each value.
#[cube(launch_unchecked)]
fn join_kernel<F: Float>(
    partial: &Array<f32>,
    out: &mut Array<F>,
    splits: u32,
    #[comptime] heads: u32,
    #[comptime] kv_heads: u32,
    #[comptime] dim: u32,
    #[define(F)] _dtype: StorageType,
) {
    let line = comptime!(dim + 2);
    let group = comptime!(heads / kv_heads);
    let query = CUBE_POS_X / heads;
    let head = CUBE_POS_X % heads;
    let first = head / group * comptime!(ROWS * line) + (query * group + head % group) * line;
    let step = comptime!(kv_heads * ROWS * line);
    let mut best = f32::new(HIDDEN);
    for s in 0..splits {
        best = max(best, partial[(first + s * step + dim) as usize]);
    }
    let mut sum = 0.0f32;
    let mut value = 0.0f32;
    for s in 0..splits {
        let at = first + s * step;
        let share = (partial[(at + dim) as usize] - best).exp();
        sum += partial[(at + dim + 1u32) as usize] * share;
        value += partial[(at + UNIT_POS) as usize] * share;
    }
    out[(CUBE_POS_X * dim + UNIT_POS) as usize] = F::cast_from(value / sum);
}
