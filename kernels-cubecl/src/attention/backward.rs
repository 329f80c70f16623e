//! Backward in two kernels, so that no atomic is needed and a run is repeatable: one owns 64 keys and walks the queries
//! (dk, dv), one owns 64 queries and walks the keys (dq); both recompute `p = exp(s - lse)`. That is 7 products where the
//! atomic form has 5.

use super::{AttentionShape, BLOCK, UNITS, key_blocks, scale, send_block, turn_block};
use crate::{
    device::flat_launch,
    error::{KernelError, expect_len, index},
    mma::{Chunk, Pair, as_left, fill, left, multiply, right, ring, sent, whole_rows, zero_sums},
};
use cubecl::prelude::*;

/// What the backward reads besides the gradient.
pub struct Saved<R: Runtime> {
    /// `[T, H, E]`.
    pub q: ArrayArg<R>,
    /// `[T, K, E]`.
    pub k: ArrayArg<R>,
    /// `[T, K, E]`.
    pub v: ArrayArg<R>,
    /// f32, `[H, T]`.
    pub lse: ArrayArg<R>,
}

/// `delta[h, i] = dy[i, h] . y[i, h]` (f32), which both gradient kernels read.
///
/// # Errors
/// If a buffer does not fit the shape.
pub fn delta<R: Runtime>(
    client: &ComputeClient<R>,
    dy: ArrayArg<R>,
    y: ArrayArg<R>,
    delta: ArrayArg<R>,
    dtype: StorageType,
    shape: AttentionShape,
) -> Result<(), KernelError> {
    const NAME: &str = "attention delta";
    expect_len(NAME, "dy", dy.size(), shape.query_len())?;
    expect_len(NAME, "y", y.size(), shape.query_len())?;
    expect_len(NAME, "delta", delta.size(), shape.queries * shape.heads)?;
    let (count, dim) = flat_launch(shape.queries * shape.heads);
    // SAFETY: buffer lengths were checked; units past the last row stop.
    unsafe {
        delta_kernel::launch_unchecked(
            client,
            count,
            dim,
            dy,
            y,
            delta,
            shape.queries as u32,
            shape.heads as u32,
            shape.head_dim as u32,
            dtype,
        );
    }
    Ok(())
}

/// `dk` and `dv` `[T, K, E]`. `ends` (u32, T) is one past the last token of each token's document.
///
/// # Errors
/// If a buffer does not fit the shape, or keys of an earlier call (`past`) are among them.
pub fn backward_kv<R: Runtime>(
    client: &ComputeClient<R>,
    saved: Saved<R>,
    dy: ArrayArg<R>,
    delta: ArrayArg<R>,
    starts: ArrayArg<R>,
    ends: ArrayArg<R>,
    [dk, dv]: [ArrayArg<R>; 2],
    dtype: StorageType,
    shape: AttentionShape,
) -> Result<(), KernelError> {
    const NAME: &str = "attention backward kv";
    check_backward(NAME, &saved, &dy, &delta, shape)?;
    expect_len(NAME, "starts", starts.size(), shape.queries)?;
    expect_len(NAME, "ends", ends.size(), shape.queries)?;
    expect_len(NAME, "dk", dk.size(), shape.key_len())?;
    expect_len(NAME, "dv", dv.size(), shape.key_len())?;
    let tiles = index(NAME, "keys", shape.keys)?.div_ceil(BLOCK);
    // SAFETY: as above.
    unsafe {
        backward_kv_kernel::launch_unchecked(
            client,
            CubeCount::Static(shape.kv_heads as u32, tiles, 1),
            CubeDim::new_1d(UNITS),
            saved.q,
            saved.k,
            saved.v,
            saved.lse,
            dy,
            delta,
            starts,
            ends,
            dk,
            dv,
            shape.queries as u32,
            scale(shape),
            shape.heads as u32,
            shape.kv_heads as u32,
            shape.head_dim as u32,
            dtype,
        );
    }
    Ok(())
}

/// `dq` `[T, H, E]`.
///
/// # Errors
/// As [`backward_kv`].
pub fn backward_q<R: Runtime>(
    client: &ComputeClient<R>,
    saved: Saved<R>,
    dy: ArrayArg<R>,
    delta: ArrayArg<R>,
    starts: ArrayArg<R>,
    dq: ArrayArg<R>,
    dtype: StorageType,
    shape: AttentionShape,
) -> Result<(), KernelError> {
    const NAME: &str = "attention backward q";
    check_backward(NAME, &saved, &dy, &delta, shape)?;
    expect_len(NAME, "starts", starts.size(), shape.queries)?;
    expect_len(NAME, "dq", dq.size(), shape.query_len())?;
    let tiles = index(NAME, "queries", shape.queries)?.div_ceil(BLOCK);
    // SAFETY: as above.
    unsafe {
        backward_q_kernel::launch_unchecked(
            client,
            CubeCount::Static(shape.heads as u32, tiles, 1),
            CubeDim::new_1d(UNITS),
            saved.q,
            saved.k,
            saved.v,
            saved.lse,
            dy,
            delta,
            starts,
            dq,
            shape.queries as u32,
            scale(shape),
            shape.heads as u32,
            shape.kv_heads as u32,
            shape.head_dim as u32,
            dtype,
        );
    }
    Ok(())
}

fn check_backward<R: Runtime>(
    name: &'static str,
    saved: &Saved<R>,
    dy: &ArrayArg<R>,
    delta: &ArrayArg<R>,
    shape: AttentionShape,
) -> Result<(), KernelError> {
    shape.check(name)?;
    expect_len(name, "past", shape.past, 0)?;
    for (what, arg) in [("q", &saved.q), ("dy", dy)] {
        expect_len(name, what, arg.size(), shape.query_len())?;
    }
    for (what, arg) in [("k", &saved.k), ("v", &saved.v)] {
        expect_len(name, what, arg.size(), shape.key_len())?;
    }
    for (what, arg) in [("lse", &saved.lse), ("delta", delta)] {
        expect_len(name, what, arg.size(), shape.queries * shape.heads)?;
    }
    Ok(())
}

#[cube(launch_unchecked)]
fn delta_kernel<F: Float>(
    dy: &Array<Chunk<F>>,
    y: &Array<Chunk<F>>,
    delta: &mut Array<f32>,
    q_len: u32,
    heads: u32,
    #[comptime] dim: u32,
    #[define(F)] _dtype: StorageType,
) {
    if ABSOLUTE_POS < delta.len() {
        let row = ABSOLUTE_POS * comptime!(dim as usize / 8);
        let mut sum = Vector::<f32, Const<8>>::new(0.0f32);
        #[unroll]
        for c in 0..comptime!(dim as usize / 8) {
            sum += Vector::<f32, Const<8>>::cast_from(dy[row + c]) * Vector::<f32, Const<8>>::cast_from(y[row + c]);
        }
        let mut all = 0.0f32;
        #[unroll]
        for c in 0..8usize {
            all += sum[c];
        }
        let at = u32::cast_from(ABSOLUTE_POS);
        delta[((at % heads) * q_len + at / heads) as usize] = all;
    }
}

#[cube(launch_unchecked, fast_math = FastMath::all())]
fn backward_kv_kernel<F: Float>(
    q: &Array<Chunk<F>>,
    k: &Array<Chunk<F>>,
    v: &Array<Chunk<F>>,
    lse: &Array<f32>,
    dy: &Array<Chunk<F>>,
    delta: &Array<f32>,
    starts: &Array<u32>,
    ends: &Array<u32>,
    dk: &mut Array<Pair<F>>,
    dv: &mut Array<Pair<F>>,
    len: u32,
    scale: f32,
    #[comptime] heads: u32,
    #[comptime] kv_heads: u32,
    #[comptime] dim: u32,
    #[define(F)] _dtype: StorageType,
) {
    let width = comptime!(dim / 8);
    let block_len = comptime!(BLOCK * width);
    let mut k_tile = SharedMemory::<Chunk<F>>::new_aligned(comptime!(block_len as usize), 128usize);
    let mut v_tile = SharedMemory::<Chunk<F>>::new_aligned(comptime!(block_len as usize), 128usize);
    let mut q_tiles = SharedMemory::<Chunk<F>>::new_aligned(comptime!((2 * block_len) as usize), 128usize);
    let mut dy_tiles = SharedMemory::<Chunk<F>>::new_aligned(comptime!((2 * block_len) as usize), 128usize);
    // Of each query of a block: lse, delta; and its document's start.
    let mut row_values = SharedMemory::<f32>::new(comptime!((4 * BLOCK) as usize));
    let mut row_starts = SharedMemory::<u32>::new(comptime!((2 * BLOCK) as usize));
    let filled = ring(2usize);

    let group = comptime!(heads / kv_heads);
    let j0 = CUBE_POS_Y * BLOCK;
    let kv_head = CUBE_POS_X;
    let queries = whole_rows(len, comptime!(heads * width));
    let keys = whole_rows(len, comptime!(kv_heads * width));
    let last = min(j0 + BLOCK, len) - 1u32;
    let first_block = CUBE_POS_Y;
    let blocks = (ends[last as usize] - 1u32) / BLOCK + 1u32 - first_block;
    let steps = blocks * group;
    let plane_row = UNIT_POS / 32u32 * 16u32;
    let key0 = j0 + plane_row + UNIT_POS_PLANE / 4u32;
    let col0 = (UNIT_POS_PLANE % 4u32) * 2u32;

    let mut dk_sums = zero_sums(comptime!(dim as usize / 8));
    let mut dv_sums = zero_sums(comptime!(dim as usize / 8));

    fill(k, keys, j0, kv_head * width, &mut k_tile, 0u32, BLOCK, width, UNITS);
    fill(v, keys, j0, kv_head * width, &mut v_tile, 0u32, BLOCK, width, UNITS);
    let head = kv_head * group;
    fill(q, queries, first_block * BLOCK, head * width, &mut q_tiles, 0u32, BLOCK, width, UNITS);
    fill(dy, queries, first_block * BLOCK, head * width, &mut dy_tiles, 0u32, BLOCK, width, UNITS);
    fill_rows(lse, delta, starts, &mut row_values, &mut row_starts, 0u32, first_block * BLOCK, head, len);
    sent(&filled, 0usize);

    let mut step = 0u32;
    let mut phase = 0u32;
    while step < steps {
        #[unroll]
        for stage in 0..2usize {
            let now = step + comptime!(stage as u32);
            if now < steps {
                filled.index(stage).wait_parity(phase);
                sync_cube();
                let other = comptime!(1 - stage);
                if now + 1u32 < steps {
                    let next = comptime!(other as u32 * block_len);
                    let head = kv_head * group + (now + 1u32) / blocks;
                    let row = (first_block + (now + 1u32) % blocks) * BLOCK;
                    fill(q, queries, row, head * width, &mut q_tiles, next, BLOCK, width, UNITS);
                    fill(dy, queries, row, head * width, &mut dy_tiles, next, BLOCK, width, UNITS);
                    fill_rows(
                        lse,
                        delta,
                        starts,
                        &mut row_values,
                        &mut row_starts,
                        comptime!(other as u32),
                        row,
                        head,
                        len,
                    );
                    sent(&filled, other);
                }
                let base = comptime!(stage as u32 * block_len);
                let i0 = (first_block + now % blocks) * BLOCK;

                // 1. Probabilities, 16 keys by 64 queries a plane.
                let mut p = zero_sums(8usize);
                product_rows::<F>(&k_tile, &q_tiles, &mut p, plane_row, base, dim);
                let values = comptime!(stage * 2 * BLOCK as usize);
                let partly = i0 < j0 + BLOCK - 1u32
                    || row_starts[comptime!((stage + 1) * BLOCK as usize - 1)] > j0
                    || i0 + BLOCK > len;
                #[unroll]
                for g in 0..8usize {
                    let p = p.index_mut(g);
                    #[unroll]
                    for half in 0..2usize {
                        let mut pair = p[half];
                        #[unroll]
                        for c in 0..2usize {
                            let col = (col0 as usize) + comptime!(g * 8 + c);
                            pair[c] = (pair[c] * scale - row_values[comptime!(values) + col]).exp();
                            if partly {
                                let key = key0 + comptime!(half as u32 * 8);
                                let query = i0 + (col as u32);
                                let start = row_starts[comptime!(stage * BLOCK as usize) + col];
                                pair[c] = select(key > query || key < start || query >= len, 0.0f32, pair[c]);
                            }
                        }
                        p[half] = pair;
                    }
                }

                // 2. dv += pᵀ dy.
                mix::<F>(&p, &dy_tiles, &mut dv_sums, base, dim);

                // 3. ds = p * (dy vᵀ - delta), dk += dsᵀ q.
                let mut ds = zero_sums(8usize);
                product_rows::<F>(&v_tile, &dy_tiles, &mut ds, plane_row, base, dim);
                #[unroll]
                for g in 0..8usize {
                    let p = p.index(g);
                    let ds = ds.index_mut(g);
                    #[unroll]
                    for half in 0..2usize {
                        let mut pair = ds[half];
                        #[unroll]
                        for c in 0..2usize {
                            let col = (col0 as usize) + comptime!(g * 8 + c);
                            pair[c] = p[half][c] * (pair[c] - row_values[comptime!(values + BLOCK as usize) + col]);
                        }
                        ds[half] = pair;
                    }
                }
                mix::<F>(&ds, &q_tiles, &mut dk_sums, base, dim);
            }
        }
        step += 2u32;
        phase ^= 1u32;
    }
    store_rows::<F>(&dv_sums, dv, 1.0f32, key0, len, kv_head, kv_heads, dim);
    store_rows::<F>(&dk_sums, dk, scale, key0, len, kv_head, kv_heads, dim);
}

#[cube(launch_unchecked, fast_math = FastMath::all())]
fn backward_q_kernel<F: Float>(
    q: &Array<Chunk<F>>,
    k: &Array<Chunk<F>>,
    v: &Array<Chunk<F>>,
    lse: &Array<f32>,
    dy: &Array<Chunk<F>>,
    delta: &Array<f32>,
    starts: &Array<u32>,
    dq: &mut Array<Pair<F>>,
    len: u32,
    scale: f32,
    #[comptime] heads: u32,
    #[comptime] kv_heads: u32,
    #[comptime] dim: u32,
    #[define(F)] _dtype: StorageType,
) {
    let width = comptime!(dim / 8);
    let block_len = comptime!(BLOCK * width);
    let mut q_tile = SharedMemory::<Chunk<F>>::new_aligned(comptime!(block_len as usize), 128usize);
    let mut dy_tile = SharedMemory::<Chunk<F>>::new_aligned(comptime!(block_len as usize), 128usize);

    let i0 = (len.div_ceil(BLOCK) - 1u32 - CUBE_POS_Y) * BLOCK;
    let head = CUBE_POS_X;
    let kv_head = head / comptime!(heads / kv_heads);
    let queries = whole_rows(len, comptime!(heads * width));
    let mut keys = key_blocks::<F>(len, kv_head, kv_heads, dim);
    let last = min(i0 + BLOCK, len) - 1u32;
    let first_block = starts[i0 as usize] / BLOCK;
    let end_block = last / BLOCK + 1u32;
    let full_from = starts[last as usize];
    let plane_row = UNIT_POS / 32u32 * 16u32;
    let row0 = i0 + plane_row + UNIT_POS_PLANE / 4u32;
    let col0 = (UNIT_POS_PLANE % 4u32) * 2u32;

    let mut own_start = Array::<u32>::new(2usize);
    let mut own_lse = Array::<f32>::new(2usize);
    let mut own_delta = Array::<f32>::new(2usize);
    #[unroll]
    for half in 0..2usize {
        let row = min(row0 + comptime!(half as u32 * 8), len - 1u32);
        own_start[half] = starts[row as usize];
        own_lse[half] = lse[(head * len + row) as usize];
        own_delta[half] = delta[(head * len + row) as usize];
    }
    let mut dq_sums = zero_sums(comptime!(dim as usize / 8));

    fill(q, queries, i0, head * width, &mut q_tile, 0u32, BLOCK, width, UNITS);
    fill(dy, queries, i0, head * width, &mut dy_tile, 0u32, BLOCK, width, UNITS);
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
                let mut p = zero_sums(8usize);
                product_rows::<F>(&q_tile, &keys.k, &mut p, plane_row, base, dim);
                let mut ds = zero_sums(8usize);
                product_rows::<F>(&dy_tile, &keys.v, &mut ds, plane_row, base, dim);
                let key0 = now * BLOCK;
                let partly = key0 + BLOCK - 1u32 > i0 || key0 < full_from;
                #[unroll]
                for g in 0..8usize {
                    let p = p.index(g);
                    let ds = ds.index_mut(g);
                    #[unroll]
                    for half in 0..2usize {
                        let mut pair = ds[half];
                        #[unroll]
                        for c in 0..2usize {
                            let mut chance = (p[half][c] * scale - own_lse[half]).exp();
                            if partly {
                                let key = key0 + col0 + comptime!(g as u32 * 8 + c as u32);
                                let hidden = key > row0 + comptime!(half as u32 * 8) || key < own_start[half];
                                chance = select(hidden, 0.0f32, chance);
                            }
                            pair[c] = chance * (pair[c] - own_delta[half]);
                        }
                        ds[half] = pair;
                    }
                }
                mix::<F>(&ds, &keys.k, &mut dq_sums, base, dim);
            }
        }
        block += 2u32;
        phase ^= 1u32;
    }
    store_rows::<F>(&dq_sums, dq, scale, row0, len, head, heads, dim);
}

/// lse, delta and document start of 64 queries of one head, for stage `stage`.
#[cube]
fn fill_rows(
    lse: &Array<f32>,
    delta: &Array<f32>,
    starts: &Array<u32>,
    values: &mut SharedMemory<f32>,
    row_starts: &mut SharedMemory<u32>,
    stage: u32,
    row0: u32,
    head: u32,
    len: u32,
) {
    if UNIT_POS < BLOCK {
        let row = min(row0 + UNIT_POS, len - 1u32);
        let at = (head * len + row) as usize;
        values[(stage * 2u32 * BLOCK + UNIT_POS) as usize] = lse[at];
        values[(stage * 2u32 * BLOCK + BLOCK + UNIT_POS) as usize] = delta[at];
        row_starts[(stage * BLOCK + UNIT_POS) as usize] = starts[row as usize];
    }
}

/// `sums[16 rows, 64 columns] += rows_tile . cols_tileᵀ` over the head.
#[cube]
fn product_rows<F: Float>(
    rows_tile: &SharedMemory<Chunk<F>>,
    cols_tile: &SharedMemory<Chunk<F>>,
    sums: &mut Sequence<Array<Pair<f32>>>,
    row: u32,
    base: u32,
    #[comptime] dim: u32,
) {
    let width = comptime!(dim / 8);
    #[unroll]
    for part in 0..comptime!(dim / 16) {
        let rows = left::<F>(rows_tile, 0u32, row, 0u32, part, width, false);
        #[unroll]
        for g in 0..4usize {
            let cols = right::<F>(cols_tile, base, 0u32, comptime!(g as u32 * 16), part, width, false);
            #[unroll]
            for half in 0..2usize {
                multiply::<F>(&rows, &cols, half, sums.index_mut(comptime!(g * 2 + half)));
            }
        }
    }
}

/// `sums[16 rows, E] += weights[16 rows, 64] . tile[64, E]`.
#[cube]
fn mix<F: Float>(
    weights: &Sequence<Array<Pair<f32>>>,
    tile: &SharedMemory<Chunk<F>>,
    sums: &mut Sequence<Array<Pair<f32>>>,
    base: u32,
    #[comptime] dim: u32,
) {
    #[unroll]
    for part in 0..4usize {
        let rows = as_left::<F>(weights.index(comptime!(part * 2)), weights.index(comptime!(part * 2 + 1)));
        #[unroll]
        for g in 0..comptime!(dim as usize / 16) {
            let cols = right::<F>(
                tile,
                base,
                0u32,
                comptime!(g as u32 * 16),
                comptime!(part as u32),
                comptime!(dim / 8),
                true,
            );
            #[unroll]
            for half in 0..2usize {
                multiply::<F>(&rows, &cols, half, sums.index_mut(comptime!(g * 2 + half)));
            }
        }
    }
}

/// 16 rows of a plane's sums, times `factor`, to rows `row` and `row + 8` of a `[len, heads, E]` matrix.
#[cube]
fn store_rows<F: Float>(
    sums: &Sequence<Array<Pair<f32>>>,
    out: &mut Array<Pair<F>>,
    factor: f32,
    row: u32,
    len: u32,
    head: u32,
    #[comptime] heads: u32,
    #[comptime] dim: u32,
) {
    #[unroll]
    for half in 0..2usize {
        let r = row + comptime!(half as u32 * 8);
        if r < len {
            let at = ((r as usize) * comptime!(heads as usize) + (head as usize)) * comptime!(dim as usize / 2);
            #[unroll]
            for g in 0..comptime!(dim as usize / 8) {
                let pair = sums.index(g)[half];
                out[at + comptime!(g * 4) + (UNIT_POS_PLANE % 4u32) as usize] =
                    Pair::cast_from(pair * Pair::new(factor));
            }
        }
    }
}
