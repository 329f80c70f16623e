//! The forward kernel of attention:
//! ```text
//! for block of 64 keys { scores = q kᵀ; hide; online softmax; y += p v }      y /= total      // the plain loop
//! ```
//! A cube of four planes takes 128 queries of one head, 32 rows a plane, and walks the blocks of keys, which `cp.async`
//! loads one ahead. The online softmax keeps the maximum and the sum of every row and rescales the output only where a
//! maximum rises.

use super::{
    AttentionShape, BLOCK_ROWS, Call, HIDDEN, Heads, Instructions, key_blocks, product_across, product_along,
    send_block, turn_block,
};
use crate::{
    cuda_text::hopper::attention::{self as hopper, Kernel},
    error::{KernelError, expect_len, index},
    mma::{Octet, Pair, UNITS, fill, lane_col, lane_row, row_max, row_sum, whole_rows, zero_sums},
};
use cubecl::prelude::*;

/// Queries of a cube.
const ROWS: u32 = 128;
/// Row fragments of a plane, of 16 rows each.
const FRAGMENTS: usize = 2;
/// Rows of a plane whose sums a lane holds: two in each fragment, eight rows apart.
const LANE_ROWS: usize = 4;

/// Computes `out` (`[T, H, E]`) and `lse` (f32, `[H, T]`) from `q`, `k` and `v` of type `dtype` and `starts` (u32,
/// `[T]`).
///
/// # Errors
/// If a buffer does not fit the shape, or the kernels do not take its heads.
pub fn forward<R: Runtime>(
    client: &ComputeClient<R>,
    instructions: Instructions,
    [q, k, v]: [ArrayArg<R>; 3],
    starts: ArrayArg<R>,
    out: ArrayArg<R>,
    lse: ArrayArg<R>,
    dtype: StorageType,
    shape: AttentionShape,
) -> Result<(), KernelError> {
    const NAME: &str = "attention";
    shape.check(NAME)?;
    shape.check_qkv(NAME, [&q, &k, &v])?;
    expect_len(NAME, "out", out.size(), shape.query_len())?;
    expect_len(NAME, "starts", starts.size(), shape.queries)?;
    expect_len(NAME, "lse", lse.size(), shape.queries * shape.heads)?;
    if instructions == Instructions::Wgmma {
        return hopper::launch(client, Kernel::Forward, vec![q, k, v, out], vec![starts, lse], dtype, shape);
    }
    let tiles = index(NAME, "T", shape.queries)?.div_ceil(ROWS);
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
            shape.call(NAME)?,
            shape.compiled_heads(),
            dtype,
        );
    }
    Ok(())
}

#[cube(launch_unchecked, fast_math = FastMath::all())]
#[allow(clippy::too_many_arguments, reason = "a kernel takes its buffers one by one")]
fn forward_kernel<F: Float>(
    q: &Array<Octet<F>>,
    k: &Array<Octet<F>>,
    v: &Array<Octet<F>>,
    starts: &Array<u32>,
    out: &mut Array<Pair<F>>,
    lse: &mut Array<f32>,
    call: Call,
    #[comptime] heads: Heads,
    #[define(F)] _dtype: StorageType,
) {
    let Heads { dim, .. } = comptime!(heads);
    let width = heads.width();
    let mut q_tile = SharedMemory::<Octet<F>>::new_aligned(comptime!((ROWS * width) as usize), 128usize);

    // The longest rows come first.
    let first_query = (call.queries.div_ceil(ROWS) - 1u32 - CUBE_POS_Y) * ROWS;
    let head = CUBE_POS_X;
    let queries = whole_rows(call.queries, comptime!(heads.heads * width));
    let mut keys = key_blocks::<F>(call.keys, head / heads.group(), heads);

    let last = min(first_query + ROWS, call.queries) - 1u32;
    let first_block = starts[first_query as usize] / BLOCK_ROWS;
    let end_block = (last + call.past) / BLOCK_ROWS + 1u32;
    // From this key on the start of no row's document hides anything.
    let full_from = starts[last as usize];
    let plane_row = UNIT_POS / 32u32 * 32u32;
    let mut rows = own_rows(starts, first_query + plane_row + lane_row(), call.queries);
    let mut mixed = zero_sums(comptime!(FRAGMENTS * dim as usize / 8));

    fill(q, queries, first_query, head * width, &mut q_tile, 0u32, ROWS, width);
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
                let mut scores = zero_sums(comptime!(FRAGMENTS * BLOCK_ROWS as usize / 8));
                product_along::<F>(&q_tile, plane_row, &keys.k, base, 0u32, &mut scores, FRAGMENTS, dim);
                let key = now * BLOCK_ROWS;
                if key + BLOCK_ROWS - 1u32 > first_query + call.past || key < full_from {
                    hide(&mut scores, &rows, key, call.past);
                }
                soften(&mut scores, &mut mixed, &mut rows, call.scale, dim);
                product_across::<F>(&scores, &keys.v, base, &mut mixed, FRAGMENTS, dim);
            }
        }
        block += 2u32;
        phase ^= 1u32;
    }
    store::<F>(&mixed, &rows, out, lse, head, call, heads);
}

/// The rows whose sums a lane holds, and the state of their online softmax.
#[derive(CubeType)]
struct SoftmaxRows {
    /// The first row; the others are 8, 16 and 24 below.
    first: u32,
    /// First key of each row's document.
    start: Array<u32>,
    /// Largest score so far, before scaling.
    top: Array<f32>,
    /// Sum so far of `exp(scale * (score - top))`, over this lane's columns.
    total: Array<f32>,
}

#[cube]
fn own_rows(starts: &Array<u32>, first: u32, queries: u32) -> SoftmaxRows {
    let mut start = Array::<u32>::new(LANE_ROWS);
    let mut top = Array::<f32>::new(LANE_ROWS);
    let mut total = Array::<f32>::new(LANE_ROWS);
    #[unroll]
    for n in 0..LANE_ROWS {
        let row = first + comptime!(n as u32 * 8);
        start[n] = starts[min(row, queries - 1u32) as usize];
        top[n] = HIDDEN;
        total[n] = 0.0f32;
    }
    SoftmaxRows { first, start, top, total }
}

/// Hides the scores of keys that are ahead of the query or in another document. The block begins at `key`.
#[cube]
fn hide(scores: &mut Sequence<Array<Pair<f32>>>, rows: &SoftmaxRows, key: u32, past: u32) {
    #[unroll]
    for n in 0..LANE_ROWS {
        let last = rows.first + comptime!(n as u32 * 8) + past;
        #[unroll]
        for g in 0..8usize {
            let scores = scores.index_mut(comptime!(n / 2 * 8 + g));
            let mut pair = scores[comptime!(n % 2)];
            #[unroll]
            for c in 0..2usize {
                let key = key + lane_col() + comptime!(g as u32 * 8 + c as u32);
                pair[c] = select(key > last || key < rows.start[n], HIDDEN, pair[c]);
            }
            scores[comptime!(n % 2)] = pair;
        }
    }
}

/// One step of the online softmax: turns scores into weights, and rescales the output so far.
#[cube]
fn soften(
    scores: &mut Sequence<Array<Pair<f32>>>,
    mixed: &mut Sequence<Array<Pair<f32>>>,
    rows: &mut SoftmaxRows,
    scale: f32,
    #[comptime] dim: u32,
) {
    #[unroll]
    for n in 0..LANE_ROWS {
        let mut best = rows.top[n];
        #[unroll]
        for g in 0..8usize {
            let pair = scores.index(comptime!(n / 2 * 8 + g))[comptime!(n % 2)];
            best = max(best, max(pair[0], pair[1]));
        }
        let best = row_max(best);
        // Once the maximum has settled there is nothing to rescale.
        if plane_any(best > rows.top[n]) {
            let shrink = ((rows.top[n] - best) * scale).exp();
            rows.total[n] *= shrink;
            #[unroll]
            for g in 0..comptime!(dim as usize / 8) {
                let mixed = mixed.index_mut(comptime!(n / 2 * (dim as usize / 8) + g));
                mixed[comptime!(n % 2)] = mixed[comptime!(n % 2)] * Pair::new(shrink);
            }
            rows.top[n] = best;
        }
        // While all keys of a row are hidden, `best` is HIDDEN. A compiler may fuse the product and the difference below, and the
        // rounding error of HIDDEN * scale, which is a large number, would then be the exponent.
        let shift = select(best == HIDDEN, 0.0f32, best * scale);
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
        rows.total[n] += sum;
    }
}

/// Divides the output by the sums of the softmax and stores it, and `lse` beside it.
#[cube]
fn store<F: Float>(
    mixed: &Sequence<Array<Pair<f32>>>,
    rows: &SoftmaxRows,
    out: &mut Array<Pair<F>>,
    lse: &mut Array<f32>,
    head: u32,
    call: Call,
    #[comptime] heads: Heads,
) {
    let pairs = comptime!(heads.dim as usize / 2);
    #[unroll]
    for n in 0..LANE_ROWS {
        let row = rows.first + comptime!(n as u32 * 8);
        let sum = row_sum(rows.total[n]);
        if row < call.queries {
            let at = ((row as usize) * comptime!(heads.heads as usize) + (head as usize)) * pairs;
            let inverse = 1.0f32 / sum;
            #[unroll]
            for g in 0..comptime!(heads.dim as usize / 8) {
                let pair = mixed.index(comptime!(n / 2 * (heads.dim as usize / 8) + g))[comptime!(n % 2)];
                out[at + comptime!(g * 4) + (lane_col() / 2u32) as usize] = Pair::cast_from(pair * Pair::new(inverse));
            }
            if lane_col() == 0u32 {
                lse[(head * call.queries + row) as usize] = rows.top[n] * call.scale + sum.ln();
            }
        }
    }
}
