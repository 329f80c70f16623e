//! The gradients of attention, in two kernels, so that no atomics are needed and a run is repeatable:
//! ```text
//! p = exp(scale * q kᵀ - lse)        ds = p * (dy vᵀ - delta)        delta[t] = dy[t] . y[t]
//! dv = pᵀ dy                         dk = scale * dsᵀ q                dq = scale * ds k
//! for key block { for query block { p; ds; dv += …; dk += … } }        // `kv`: owns keys, walks the queries
//! for query block { for key block { p; ds; dq += … } }                 // `q`: owns queries, walks the keys
//! ```
//! Both recompute `p`. That makes 7 products, where one kernel with atomics would have 5.

use super::{AttentionShape, BLOCK_ROWS, Heads};
use crate::{
    KernelError,
    error::{expect_len, require},
    mma::{Octet, Pair, lane_col},
};
use cubecl::prelude::*;

mod delta;
mod kv;
mod q;

pub use delta::delta;
pub use kv::backward_kv;
pub use q::backward_q;

/// What the backward reads besides the gradient.
pub struct Saved<R: Runtime> {
    /// `[T, H, E]`.
    pub q: ArrayArg<R>,
    /// `[T, G, E]`.
    pub k: ArrayArg<R>,
    /// `[T, G, E]`.
    pub v: ArrayArg<R>,
    /// f32, `[H, T]`.
    pub lse: ArrayArg<R>,
}

/// The buffers of a backward kernel that have a row for each query.
#[derive(CubeType, CubeLaunch)]
struct QueryBuffers<Element: CubePrimitive> {
    q: Array<Element>,
    dy: Array<Element>,
    lse: Array<f32>,
    delta: Array<f32>,
    starts: Array<u32>,
}

/// Checks what both kernels read. Gradients are computed without a cache: there are as many keys as queries.
fn check<R: Runtime>(
    name: &'static str,
    saved: &Saved<R>,
    dy: &ArrayArg<R>,
    delta: &ArrayArg<R>,
    starts: &ArrayArg<R>,
    shape: AttentionShape,
) -> Result<(), KernelError> {
    shape.check(name)?;
    require(name, shape.past == 0, || format!("past = {}; gradients need past = 0", shape.past))?;
    shape.check_qkv(name, [&saved.q, &saved.k, &saved.v])?;
    expect_len(name, "dy", dy.size(), shape.query_len())?;
    expect_len(name, "lse", saved.lse.size(), shape.queries * shape.heads)?;
    expect_len(name, "delta", delta.size(), shape.queries * shape.heads)?;
    expect_len(name, "starts", starts.size(), shape.queries)
}

/// The first of the rows whose sums a lane holds in a block of 64 rows that begins at `block`: each plane has 16 rows.
#[cube]
fn own_row(block: u32) -> u32 {
    block + UNIT_POS / 32u32 * 16u32 + UNIT_POS_PLANE / 4u32
}

/// Stores the 16 rows of a plane's sums, times `factor`, as rows `row` and `row + 8` of head `head` of `[len, heads,
/// E]`.
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
                out[at + comptime!(g * 4) + (lane_col() / 2u32) as usize] = Pair::cast_from(pair * Pair::new(factor));
            }
        }
    }
}

/// Reserves shared memory for `blocks` blocks of 64 rows of a head.
#[cube]
fn reserved<F: Float>(#[comptime] blocks: u32, #[comptime] heads: Heads) -> SharedMemory<Octet<F>> {
    SharedMemory::<Octet<F>>::new_aligned(comptime!((blocks * BLOCK_ROWS * heads.width()) as usize), 128usize)
}
