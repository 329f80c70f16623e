//! Attention of a few new tokens over a long cache: the same as [`crate::attention`], with the keys split among cubes.
//! ```text
//! for split { top, total, y = online softmax over the keys of the split }
//! best = max top      y = sum y exp(top - best) / sum total exp(top - best)               // the plain loop
//! ```
//! A cube takes one key head, its share of the keys, and all queries that read them: the new tokens times the `H/G`
//! heads of the group, at most 16 rows. `cp.async` loads blocks of 64 keys one ahead. Each of the four planes takes 16
//! keys of a block and has a maximum, a sum and an output of its own; they are joined in shared memory at the end. A
//! second kernel joins the splits. Every key and value is read once: bound by memory.

use crate::{
    attention::{
        AttentionShape, BLOCK_ROWS, Call, HIDDEN, Heads, key_blocks, product_across, product_along, send_block,
        turn_block,
    },
    error::{KernelError, expect_len, require},
    mma::{Octet, Pair, UNITS, lane_col, lane_row, place, row_max, row_sum, zero_sums},
};
use cubecl::prelude::*;

/// Rows of a cube: one fragment.
const ROWS: u32 = 16;
/// Cubes that fill a large GPU twice.
const CUBES: usize = 264;

/// Whether the kernel takes the call: at most 16 rows of queries for a key head.
pub fn fits(shape: AttentionShape) -> bool {
    shape.fits() && shape.queries * shape.heads <= ROWS as usize * shape.kv_heads
}

/// Computes `out` (`[T, H, E]`) from `q`, `k` and `v` of type `dtype`. Every query sees the keys from its `start` to
/// its own.
///
/// # Errors
/// If a buffer does not fit the shape or [`fits`] is false.
pub fn decode_attention<R: Runtime>(
    client: &ComputeClient<R>,
    [q, k, v]: [ArrayArg<R>; 3],
    starts: ArrayArg<R>,
    out: ArrayArg<R>,
    dtype: StorageType,
    shape: AttentionShape,
) -> Result<(), KernelError> {
    const NAME: &str = "decode attention";
    shape.check(NAME)?;
    shape.check_qkv(NAME, [&q, &k, &v])?;
    require(NAME, fits(shape), || {
        let group = shape.heads / shape.kv_heads;
        format!("{} new tokens times {group} heads of a group are more than {ROWS} rows", shape.queries)
    })?;
    expect_len(NAME, "out", out.size(), shape.query_len())?;
    expect_len(NAME, "starts", starts.size(), shape.queries)?;
    let (splits, len) = splits(shape);
    let scratch = client.empty(len * 4);
    let heads = shape.compiled_heads();
    // SAFETY: buffer lengths were checked and `scratch` holds `len` f32; keys past the last are hidden and not loaded.
    unsafe {
        let partial = || ArrayArg::from_raw_parts(scratch.clone(), len);
        split_kernel::launch_unchecked(
            client,
            CubeCount::Static(shape.kv_heads as u32, splits as u32, 1),
            CubeDim::new_1d(UNITS),
            q,
            k,
            v,
            starts,
            partial(),
            shape.call(NAME)?,
            heads,
            dtype,
        );
        join_kernel::launch_unchecked(
            client,
            CubeCount::Static((shape.queries * shape.heads) as u32, 1, 1),
            CubeDim::new_1d(heads.dim),
            partial(),
            out,
            splits as u32,
            heads,
            dtype,
        );
    }
    Ok(())
}

/// The number of shares of the keys, and of the f32 values that all shares leave.
fn splits(shape: AttentionShape) -> (usize, usize) {
    let blocks = shape.keys.div_ceil(BLOCK_ROWS as usize);
    let splits = (CUBES / shape.kv_heads).clamp(1, blocks.max(1));
    (splits, splits * shape.kv_heads * ROWS as usize * (shape.head_dim + 2))
}

#[cube(launch_unchecked, fast_math = FastMath::all())]
fn split_kernel<F: Float>(
    q: &Array<F>,
    k: &Array<Octet<F>>,
    v: &Array<Octet<F>>,
    starts: &Array<u32>,
    partial: &mut Array<f32>,
    call: Call,
    #[comptime] heads: Heads,
    #[define(F)] _dtype: StorageType,
) {
    let Heads { kv_heads, dim, .. } = comptime!(heads);
    let width = heads.width();
    let mut q_tile = SharedMemory::<Octet<F>>::new_aligned(comptime!((ROWS * width) as usize), 128usize);
    let kv_head = CUBE_POS_X;
    let mut keys = key_blocks::<F>(call.keys, kv_head, heads);
    let blocks = call.keys.div_ceil(BLOCK_ROWS);
    let share = blocks.div_ceil(CUBE_COUNT_Y);
    let first = min(CUBE_POS_Y * share, blocks);
    let end = min(first + share, blocks);
    let plane_key = UNIT_POS / 32u32 * 16u32;

    load_queries::<F>(q, &mut q_tile, kv_head, call.queries, heads);
    let mut rows = own_rows(starts, call, heads);
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
                let base = comptime!(stage as u32 * BLOCK_ROWS * width);
                let mut scores = zero_sums(2usize);
                product_along::<F>(&q_tile, 0u32, &keys.k, base, plane_key, &mut scores, 1usize, dim);
                let key = now * BLOCK_ROWS + plane_key + lane_col();
                soften(&mut scores, &mut mixed, &mut rows, key, call.scale, dim);
                let base = base + plane_key * width;
                product_across::<F>(&scores, &keys.v, base, &mut mixed, 1usize, dim);
            }
        }
        block += 2u32;
        phase ^= 1u32;
    }

    let joined = joined_planes(&mixed, &rows, dim);
    let line = comptime!(dim + 2);
    let base = (CUBE_POS_Y * kv_heads + kv_head) * comptime!(ROWS * line);
    let mut slot = UNIT_POS;
    while slot < comptime!(ROWS * line) {
        partial[(base + slot) as usize] = joined[slot as usize];
        slot += UNITS;
    }
}

/// Copies the queries of a group into a tile. Row `row` is token `row / group`, head `row % group` of the group.
#[cube]
fn load_queries<F: Float>(
    q: &Array<F>,
    tile: &mut SharedMemory<Octet<F>>,
    kv_head: u32,
    queries: u32,
    #[comptime] heads: Heads,
) {
    let width = heads.width();
    let group = heads.group();
    let mut slot = UNIT_POS;
    while slot < comptime!(ROWS * width) {
        let row = slot / width;
        let octet = slot % width;
        let mut values = Octet::<F>::new(F::new(0.0f32));
        if row < queries * group {
            let head = kv_head * group + row % group;
            let at = ((row / group * heads.heads + head) * heads.dim + octet * 8u32) as usize;
            #[unroll]
            for i in 0..8usize {
                values[i] = q[at + i];
            }
        }
        tile[place(row, octet, width) as usize] = values;
        slot += UNITS;
    }
}

/// The two rows whose sums a lane holds, eight rows apart, and the state of their online softmax.
#[derive(CubeType)]
struct DecodeRows {
    /// The last key that each row sees.
    last: Array<u32>,
    /// The first one.
    start: Array<u32>,
    /// Largest scaled score so far.
    top: Array<f32>,
    /// Sum so far of `exp(score - top)`, over this lane's columns.
    total: Array<f32>,
}

#[cube]
fn own_rows(starts: &Array<u32>, call: Call, #[comptime] heads: Heads) -> DecodeRows {
    let mut last = Array::<u32>::new(2usize);
    let mut start = Array::<u32>::new(2usize);
    let mut top = Array::<f32>::new(2usize);
    let mut total = Array::<f32>::new(2usize);
    #[unroll]
    for half in 0..2usize {
        let query = min((lane_row() + comptime!(half as u32 * 8)) / heads.group(), call.queries - 1u32);
        last[half] = query + call.past;
        start[half] = starts[query as usize];
        top[half] = HIDDEN;
        total[half] = 0.0f32;
    }
    DecodeRows { last, start, top, total }
}

/// One step of the online softmax: scales and hides scores, turns them into weights, and rescales the output so far.
/// `key` is the first key whose score this lane holds.
#[cube]
fn soften(
    scores: &mut Sequence<Array<Pair<f32>>>,
    mixed: &mut Sequence<Array<Pair<f32>>>,
    rows: &mut DecodeRows,
    key: u32,
    scale: f32,
    #[comptime] dim: u32,
) {
    #[unroll]
    for half in 0..2usize {
        let mut best = rows.top[half];
        #[unroll]
        for g in 0..2usize {
            let scores = scores.index_mut(g);
            let mut pair = scores[half];
            #[unroll]
            for c in 0..2usize {
                let key = key + comptime!(g as u32 * 8 + c as u32);
                pair[c] = select(key > rows.last[half] || key < rows.start[half], HIDDEN, pair[c] * scale);
                best = max(best, pair[c]);
            }
            scores[half] = pair;
        }
        let best = row_max(best);
        let shrink = (rows.top[half] - best).exp();
        rows.top[half] = best;
        let mut sum = 0.0f32;
        #[unroll]
        for g in 0..2usize {
            let scores = scores.index_mut(g);
            let mut pair = scores[half];
            #[unroll]
            for c in 0..2usize {
                // A row that has seen no key yet has the hidden score as its maximum.
                pair[c] = select(pair[c] > -1.0e29f32, (pair[c] - best).exp(), 0.0f32);
                sum += pair[c];
            }
            scores[half] = pair;
        }
        rows.total[half] = rows.total[half] * shrink + sum;
        #[unroll]
        for g in 0..comptime!(dim as usize / 8) {
            let mixed = mixed.index_mut(g);
            mixed[half] = mixed[half] * Pair::new(shrink);
        }
    }
}

/// Joins the planes of a cube, one after another, in shared memory: for each row E values, the maximum and the sum.
#[cube]
fn joined_planes(mixed: &Sequence<Array<Pair<f32>>>, rows: &DecodeRows, #[comptime] dim: u32) -> SharedMemory<f32> {
    let line = comptime!(dim + 2);
    let mut joined = SharedMemory::<f32>::new(comptime!((ROWS * line) as usize));
    #[unroll]
    for plane in 0..4u32 {
        sync_cube();
        if UNIT_POS / 32u32 == plane {
            #[unroll]
            for half in 0..2usize {
                let sum = row_sum(rows.total[half]);
                let row = (lane_row() + comptime!(half as u32 * 8)) * line;
                let mut old_top = f32::new(HIDDEN);
                let mut old_sum = 0.0f32;
                if comptime!(plane > 0) {
                    old_top = joined[(row + dim) as usize];
                    old_sum = joined[(row + dim + 1u32) as usize];
                }
                let best = max(old_top, rows.top[half]);
                let old_share = (old_top - best).exp();
                let own_share = (rows.top[half] - best).exp();
                #[unroll]
                for g in 0..comptime!(dim as usize / 8) {
                    let pair = mixed.index(g)[half];
                    #[unroll]
                    for c in 0..2usize {
                        let at = (row + lane_col() + comptime!(g as u32 * 8 + c as u32)) as usize;
                        let mut value = pair[c] * own_share;
                        if comptime!(plane > 0) {
                            value += joined[at] * old_share;
                        }
                        joined[at] = value;
                    }
                }
                sync_plane();
                if lane_col() == 0u32 {
                    joined[(row + dim) as usize] = best;
                    joined[(row + dim + 1u32) as usize] = old_sum * old_share + sum * own_share;
                }
            }
        }
    }
    sync_cube();
    joined
}

/// Joins the splits: a cube takes one token and head, a unit one value of it.
#[cube(launch_unchecked)]
fn join_kernel<F: Float>(
    partial: &Array<f32>,
    out: &mut Array<F>,
    splits: u32,
    #[comptime] shape: Heads,
    #[define(F)] _dtype: StorageType,
) {
    let Heads { heads, kv_heads, dim } = comptime!(shape);
    let line = comptime!(dim + 2);
    let group = shape.group();
    let query = CUBE_POS_X / heads;
    let head = CUBE_POS_X % heads;
    let first = head / group * comptime!(ROWS * line) + (query * group + head % group) * line;
    let step = comptime!(kv_heads * ROWS * line);
    let mut best = f32::new(HIDDEN);
    for split in 0..splits {
        best = max(best, partial[(first + split * step + dim) as usize]);
    }
    let mut sum = 0.0f32;
    let mut value = 0.0f32;
    for split in 0..splits {
        let at = first + split * step;
        let share = (partial[(at + dim) as usize] - best).exp();
        sum += partial[(at + dim + 1u32) as usize] * share;
        value += partial[(at + UNIT_POS) as usize] * share;
    }
    out[(CUBE_POS_X * dim + UNIT_POS) as usize] = F::cast_from(value / sum);
}
