//! The gradients of keys and values:
//! ```text
//! for block of 64 keys { for head of the group { for block of 64 queries {
//!     p = exp(scale * k qᵀ - lse)       dv += p dy       dk += (p * (v dyᵀ - delta)) q
//! } } }                                                                             // the plain loop
//! ```
//! A cube owns 64 keys of one key head, 16 a plane, and walks the queries of all heads of its group. Products are
//! transposed, with keys as rows, so that sums over queries stay in one plane.

use super::{AttentionShape, QueryBuffers, QueryBuffersLaunch, Saved, check, own_row, reserved, store_rows};
use crate::{
    attention::{BLOCK_ROWS, Call, Heads, Instructions, product_across, product_along},
    cuda_text::hopper::attention::{self as hopper, Kernel},
    error::{KernelError, expect_len, index},
    mma::{Octet, Pair, UNITS, fill, lane_col, ring, sent, whole_rows, zero_sums},
};
use cubecl::prelude::{barrier::Barrier, *};

/// Computes `dk` and `dv` (`[T, G, E]`). `ends` (u32, `[T]`) is one past the last token of each token's document.
///
/// # Errors
/// If a buffer does not fit the shape, or keys of an earlier call (`past`) are among them.
#[allow(clippy::too_many_arguments, reason = "a launch takes its buffers one by one")]
pub fn backward_kv<R: Runtime>(
    client: &ComputeClient<R>,
    instructions: Instructions,
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
    check(NAME, &saved, &dy, &delta, &starts, shape)?;
    expect_len(NAME, "ends", ends.size(), shape.queries)?;
    expect_len(NAME, "dk", dk.size(), shape.key_len())?;
    expect_len(NAME, "dv", dv.size(), shape.key_len())?;
    if instructions == Instructions::Wgmma {
        let Saved { q, k, v, lse } = saved;
        let (matrices, buffers) = (vec![q, k, v, dy, dk, dv], vec![lse, delta, starts, ends]);
        return hopper::launch(client, Kernel::Keys, matrices, buffers, dtype, shape);
    }
    let tiles = index(NAME, "S", shape.keys)?.div_ceil(BLOCK_ROWS);
    // SAFETY: buffer lengths were checked; rows outside are neither loaded nor stored.
    unsafe {
        backward_kv_kernel::launch_unchecked(
            client,
            CubeCount::Static(shape.kv_heads as u32, tiles, 1),
            CubeDim::new_1d(UNITS),
            QueryBuffersLaunch::new(saved.q, dy, saved.lse, delta, starts),
            saved.k,
            saved.v,
            ends,
            dk,
            dv,
            shape.call(NAME)?,
            shape.compiled_heads(),
            dtype,
        );
    }
    Ok(())
}

#[cube(launch_unchecked, fast_math = FastMath::all())]
#[allow(clippy::too_many_arguments, reason = "a kernel takes its buffers one by one")]
fn backward_kv_kernel<F: Float>(
    queries: &QueryBuffers<Octet<F>>,
    k: &Array<Octet<F>>,
    v: &Array<Octet<F>>,
    ends: &Array<u32>,
    dk: &mut Array<Pair<F>>,
    dv: &mut Array<Pair<F>>,
    call: Call,
    #[comptime] heads: Heads,
    #[define(F)] _dtype: StorageType,
) {
    let Heads { kv_heads, dim, .. } = comptime!(heads);
    let width = heads.width();
    let mut k_tile = reserved::<F>(1u32, heads);
    let mut v_tile = reserved::<F>(1u32, heads);
    let mut blocks = query_blocks::<F>(heads);

    let len = call.keys;
    let first_key = CUBE_POS_Y * BLOCK_ROWS;
    let kv_head = CUBE_POS_X;
    let keys = whole_rows(len, comptime!(kv_heads * width));
    let last = min(first_key + BLOCK_ROWS, len) - 1u32;
    let first_block = CUBE_POS_Y;
    // Query blocks of a head, and of all heads of the group.
    let each = (ends[last as usize] - 1u32) / BLOCK_ROWS + 1u32 - first_block;
    let steps = each * heads.group();
    let plane_row = UNIT_POS / 32u32 * 16u32;

    let mut dk_sums = zero_sums(comptime!(dim as usize / 8));
    let mut dv_sums = zero_sums(comptime!(dim as usize / 8));

    fill(k, keys, first_key, kv_head * width, &mut k_tile, 0u32, BLOCK_ROWS, width);
    fill(v, keys, first_key, kv_head * width, &mut v_tile, 0u32, BLOCK_ROWS, width);
    send_queries(queries, &mut blocks, first_block * BLOCK_ROWS, kv_head * heads.group(), len, 0usize, heads);

    let mut step = 0u32;
    let mut phase = 0u32;
    while step < steps {
        #[unroll]
        for stage in 0..2usize {
            let now = step + comptime!(stage as u32);
            if now < steps {
                blocks.filled.index(stage).wait_parity(phase);
                // From here on no unit reads the other stage.
                sync_cube();
                if now + 1u32 < steps {
                    let head = kv_head * heads.group() + (now + 1u32) / each;
                    let row = (first_block + (now + 1u32) % each) * BLOCK_ROWS;
                    send_queries(queries, &mut blocks, row, head, len, comptime!(1 - stage), heads);
                }
                let base = comptime!(stage as u32 * BLOCK_ROWS * width);
                let first_query = (first_block + now % each) * BLOCK_ROWS;
                let mut p = zero_sums(8usize);
                product_along::<F>(&k_tile, plane_row, &blocks.q, base, 0u32, &mut p, 1usize, dim);
                probabilities::<F>(&mut p, &blocks, first_query, first_key, call, stage);
                product_across::<F>(&p, &blocks.dy, base, &mut dv_sums, 1usize, dim);

                let mut ds = zero_sums(8usize);
                product_along::<F>(&v_tile, plane_row, &blocks.dy, base, 0u32, &mut ds, 1usize, dim);
                score_gradients::<F>(&mut ds, &p, &blocks, stage);
                product_across::<F>(&ds, &blocks.q, base, &mut dk_sums, 1usize, dim);
            }
        }
        step += 2u32;
        phase ^= 1u32;
    }
    let row = own_row(first_key);
    store_rows::<F>(&dv_sums, dv, 1.0f32, row, len, kv_head, kv_heads, dim);
    store_rows::<F>(&dk_sums, dk, call.scale, row, len, kv_head, kv_heads, dim);
}

/// Two stages of blocks of 64 queries.
#[derive(CubeType)]
struct QueryBlocks<F: Float> {
    q: SharedMemory<Octet<F>>,
    dy: SharedMemory<Octet<F>>,
    /// For each stage `lse` of its queries, then `delta`.
    values: SharedMemory<f32>,
    /// First token of each query's document.
    starts: SharedMemory<u32>,
    filled: Sequence<Shared<Barrier>>,
}

#[cube]
fn query_blocks<F: Float>(#[comptime] heads: Heads) -> QueryBlocks<F> {
    QueryBlocks::<F> {
        q: reserved::<F>(2u32, heads),
        dy: reserved::<F>(2u32, heads),
        values: SharedMemory::<f32>::new(comptime!((4 * BLOCK_ROWS) as usize)),
        starts: SharedMemory::<u32>::new(comptime!((2 * BLOCK_ROWS) as usize)),
        filled: ring(2usize),
    }
}

/// Starts the copies of the 64 queries of `head` from `row` on into `stage`, and marks the end of this unit's copies.
#[cube]
fn send_queries<F: Float>(
    queries: &QueryBuffers<Octet<F>>,
    blocks: &mut QueryBlocks<F>,
    row: u32,
    head: u32,
    len: u32,
    #[comptime] stage: usize,
    #[comptime] heads: Heads,
) {
    let width = heads.width();
    let source = whole_rows(len, comptime!(heads.heads * width));
    let base = comptime!(stage as u32 * BLOCK_ROWS * width);
    fill(&queries.q, source, row, head * width, &mut blocks.q, base, BLOCK_ROWS, width);
    fill(&queries.dy, source, row, head * width, &mut blocks.dy, base, BLOCK_ROWS, width);
    if UNIT_POS < BLOCK_ROWS {
        let row = min(row + UNIT_POS, len - 1u32);
        let at = (head * len + row) as usize;
        let first = comptime!(stage as u32 * BLOCK_ROWS);
        blocks.values[(comptime!(2 * first) + UNIT_POS) as usize] = queries.lse[at];
        blocks.values[(comptime!(2 * first + BLOCK_ROWS) + UNIT_POS) as usize] = queries.delta[at];
        blocks.starts[(first + UNIT_POS) as usize] = queries.starts[row as usize];
    }
    sent(&blocks.filled, stage);
}

/// Turns the products of 16 keys and 64 queries into probabilities, 0 where a key is hidden from a query.
#[cube]
fn probabilities<F: Float>(
    p: &mut Sequence<Array<Pair<f32>>>,
    blocks: &QueryBlocks<F>,
    first_query: u32,
    first_key: u32,
    call: Call,
    #[comptime] stage: usize,
) {
    let rows = comptime!(BLOCK_ROWS as usize);
    let partly = first_query < first_key + BLOCK_ROWS - 1u32
        || blocks.starts[comptime!((stage + 1) * rows - 1)] > first_key
        || first_query + BLOCK_ROWS > call.queries;
    #[unroll]
    for g in 0..8usize {
        let p = p.index_mut(g);
        #[unroll]
        for half in 0..2usize {
            let mut pair = p[half];
            #[unroll]
            for c in 0..2usize {
                let col = (lane_col() as usize) + comptime!(g * 8 + c);
                pair[c] = (pair[c] * call.scale - blocks.values[comptime!(stage * 2 * rows) + col]).exp();
                if partly {
                    let key = own_row(first_key) + comptime!(half as u32 * 8);
                    let query = first_query + (col as u32);
                    let start = blocks.starts[comptime!(stage * rows) + col];
                    pair[c] = select(key > query || key < start || query >= call.queries, 0.0f32, pair[c]);
                }
            }
            p[half] = pair;
        }
    }
}

/// `ds = p * (ds - delta)`.
#[cube]
fn score_gradients<F: Float>(
    ds: &mut Sequence<Array<Pair<f32>>>,
    p: &Sequence<Array<Pair<f32>>>,
    blocks: &QueryBlocks<F>,
    #[comptime] stage: usize,
) {
    #[unroll]
    for g in 0..8usize {
        let p = p.index(g);
        let ds = ds.index_mut(g);
        #[unroll]
        for half in 0..2usize {
            let mut pair = ds[half];
            #[unroll]
            for c in 0..2usize {
                let col = (lane_col() as usize) + comptime!(g * 8 + c);
                let delta = blocks.values[comptime!((stage * 2 + 1) * BLOCK_ROWS as usize) + col];
                pair[c] = p[half][c] * (pair[c] - delta);
            }
            ds[half] = pair;
        }
    }
}
