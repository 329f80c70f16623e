//! The gradient of queries:
//! ```text
//! for block of 64 queries { for block of 64 keys { p = exp(scale * q kᵀ - lse)      dq += (p * (dy vᵀ - delta)) k } }
//! ```
//! A cube owns 64 queries of one head, 16 a plane, and walks the blocks of keys.

use super::{AttentionShape, QueryBuffers, QueryBuffersLaunch, Saved, check, own_row, reserved, store_rows};
use crate::{
    attention::{
        BLOCK_ROWS, Call, Heads, Instructions, key_blocks, product_across, product_along, send_block, turn_block,
    },
    cuda_text::hopper::attention::{self as hopper, Kernel},
    error::{KernelError, expect_len, index},
    mma::{Octet, Pair, UNITS, fill, lane_col, whole_rows, zero_sums},
};
use cubecl::prelude::*;

/// Computes `dq` (`[T, H, E]`).
///
/// # Errors
/// The same as [`super::backward_kv()`].
#[allow(clippy::too_many_arguments, reason = "a launch takes its buffers one by one")]
pub fn backward_q<R: Runtime>(
    client: &ComputeClient<R>,
    instructions: Instructions,
    saved: Saved<R>,
    dy: ArrayArg<R>,
    delta: ArrayArg<R>,
    starts: ArrayArg<R>,
    dq: ArrayArg<R>,
    dtype: StorageType,
    shape: AttentionShape,
) -> Result<(), KernelError> {
    const NAME: &str = "attention backward q";
    check(NAME, &saved, &dy, &delta, &starts, shape)?;
    expect_len(NAME, "dq", dq.size(), shape.query_len())?;
    if instructions == Instructions::Wgmma {
        let Saved { q, k, v, lse } = saved;
        let (matrices, buffers) = (vec![q, k, v, dy, dq], vec![lse, delta, starts]);
        return hopper::launch(client, Kernel::Queries, matrices, buffers, dtype, shape);
    }
    let tiles = index(NAME, "T", shape.queries)?.div_ceil(BLOCK_ROWS);
    // SAFETY: buffer lengths were checked; rows outside are neither loaded nor stored.
    unsafe {
        backward_q_kernel::launch_unchecked(
            client,
            CubeCount::Static(shape.heads as u32, tiles, 1),
            CubeDim::new_1d(UNITS),
            QueryBuffersLaunch::new(saved.q, dy, saved.lse, delta, starts),
            saved.k,
            saved.v,
            dq,
            shape.call(NAME)?,
            shape.compiled_heads(),
            dtype,
        );
    }
    Ok(())
}

#[cube(launch_unchecked, fast_math = FastMath::all())]
fn backward_q_kernel<F: Float>(
    queries: &QueryBuffers<Octet<F>>,
    k: &Array<Octet<F>>,
    v: &Array<Octet<F>>,
    dq: &mut Array<Pair<F>>,
    call: Call,
    #[comptime] heads: Heads,
    #[define(F)] _dtype: StorageType,
) {
    let Heads { dim, .. } = comptime!(heads);
    let width = heads.width();
    let mut q_tile = reserved::<F>(1u32, heads);
    let mut dy_tile = reserved::<F>(1u32, heads);

    // The longest rows come first.
    let len = call.queries;
    let first_query = (len.div_ceil(BLOCK_ROWS) - 1u32 - CUBE_POS_Y) * BLOCK_ROWS;
    let head = CUBE_POS_X;
    let source = whole_rows(len, comptime!(heads.heads * width));
    let mut keys = key_blocks::<F>(len, head / heads.group(), heads);
    let last = min(first_query + BLOCK_ROWS, len) - 1u32;
    let first_block = queries.starts[first_query as usize] / BLOCK_ROWS;
    let end_block = last / BLOCK_ROWS + 1u32;
    // From this key on the start of no row's document hides anything.
    let full_from = queries.starts[last as usize];
    let plane_row = UNIT_POS / 32u32 * 16u32;
    let rows = own_rows(queries, own_row(first_query), head, len);
    let mut dq_sums = zero_sums(comptime!(dim as usize / 8));

    fill(&queries.q, source, first_query, head * width, &mut q_tile, 0u32, BLOCK_ROWS, width);
    fill(&queries.dy, source, first_query, head * width, &mut dy_tile, 0u32, BLOCK_ROWS, width);
    send_block(k, v, &mut keys, first_block, 0usize);

    let mut block = first_block;
    let mut phase = 0u32;
    while block < end_block {
        #[unroll]
        for stage in 0..2usize {
            let now = block + comptime!(stage as u32);
            if now < end_block {
                turn_block(k, v, &mut keys, now, end_block, phase, stage);
                let base = comptime!(stage as u32 * BLOCK_ROWS * width);
                let mut p = zero_sums(8usize);
                product_along::<F>(&q_tile, plane_row, &keys.k, base, 0u32, &mut p, 1usize, dim);
                let mut ds = zero_sums(8usize);
                product_along::<F>(&dy_tile, plane_row, &keys.v, base, 0u32, &mut ds, 1usize, dim);
                let key = now * BLOCK_ROWS;
                let partly = key + BLOCK_ROWS - 1u32 > first_query || key < full_from;
                score_gradients(&mut ds, &p, &rows, key, partly, call.scale);
                product_across::<F>(&ds, &keys.k, base, &mut dq_sums, 1usize, dim);
            }
        }
        block += 2u32;
        phase ^= 1u32;
    }
    store_rows::<F>(&dq_sums, dq, call.scale, rows.first, len, head, comptime!(heads.heads), dim);
}

/// The two rows whose sums a lane holds: `first` and `first + 8`.
#[derive(CubeType)]
struct GradientRows {
    first: u32,
    start: Array<u32>,
    lse: Array<f32>,
    delta: Array<f32>,
}

#[cube]
fn own_rows<Element: CubePrimitive>(queries: &QueryBuffers<Element>, first: u32, head: u32, len: u32) -> GradientRows {
    let mut start = Array::<u32>::new(2usize);
    let mut lse = Array::<f32>::new(2usize);
    let mut delta = Array::<f32>::new(2usize);
    #[unroll]
    for half in 0..2usize {
        let row = min(first + comptime!(half as u32 * 8), len - 1u32);
        start[half] = queries.starts[row as usize];
        lse[half] = queries.lse[(head * len + row) as usize];
        delta[half] = queries.delta[(head * len + row) as usize];
    }
    GradientRows { first, start, lse, delta }
}

/// `ds = p * (ds - delta)`, where `p` are the probabilities of the scores; 0 where a key is hidden. The block of keys
/// begins at `key`; keys are hidden in it only if `partly`.
#[cube]
fn score_gradients(
    ds: &mut Sequence<Array<Pair<f32>>>,
    scores: &Sequence<Array<Pair<f32>>>,
    rows: &GradientRows,
    key: u32,
    partly: bool,
    scale: f32,
) {
    #[unroll]
    for g in 0..8usize {
        let scores = scores.index(g);
        let ds = ds.index_mut(g);
        #[unroll]
        for half in 0..2usize {
            let mut pair = ds[half];
            #[unroll]
            for c in 0..2usize {
                let mut p = (scores[half][c] * scale - rows.lse[half]).exp();
                if partly {
                    let key = key + lane_col() + comptime!(g as u32 * 8 + c as u32);
                    let hidden = key > rows.first + comptime!(half as u32 * 8) || key < rows.start[half];
                    p = select(hidden, 0.0f32, p);
                }
                pair[c] = p * (pair[c] - rows.delta[half]);
            }
            ds[half] = pair;
        }
    }
}
