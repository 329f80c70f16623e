//! Causal grouped-query attention over packed documents, after FlashAttention-2 (Dao, arXiv 2307.08691):
//! ```text
//! score[t, s] = scale * q[t] . k[s]   where start[t] <= s <= t + past; otherwise hidden
//! y[t] = sum_s softmax_s(score[t])[s] * v[s]             lse[t] = log sum_s exp(score[t, s])
//! for t { for s in start[t]..=t + past { online softmax; y[t] += p * v[s] } }    // the plain loop
//! ```
//! `q` and `y` are `[T, H, E]`, `k` and `v` `[S, G, E]`, in f16 or bf16. Query head `h` reads key head `h / (H/G)`.
//! `start[t]` is the first token of the document of token `t` and never falls, so that a batch, a row of several
//! documents and a cached prefix are one case. Scores never leave the registers. Sums are f32.
//!
//! Bound by the tensor cores and by reading fragments from shared memory. Blocks of hidden scores are skipped. The kernels of
//! this folder use `mma.sync`; those of [`crate::cuda_text::hopper`] use Hopper's own instructions.

use crate::{
    KernelError,
    error::{expect_len, index, require},
};
use cubecl::prelude::*;

mod backward;
mod forward;
mod fragments;
mod instructions;
mod keys;

pub use backward::{Saved, backward_kv, backward_q, delta};
pub use forward::forward;
pub(crate) use fragments::{product_across, product_along};
pub use instructions::Instructions;
pub(crate) use keys::{key_blocks, send_block, turn_block};

/// Keys of a block, and queries of a block of the backward kernels.
pub(crate) const BLOCK_ROWS: u32 = 64;
/// The score of a key that is hidden: finite, so that differences are numbers.
pub(crate) const HIDDEN: f32 = -1.0e30;

/// The shape of one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// T, rows of queries.
    pub queries: usize,
    /// S, rows of keys: `past + queries`.
    pub keys: usize,
    /// Keys before the first query's own.
    pub past: usize,
    /// H, query heads.
    pub heads: usize,
    /// G, key heads: a divisor of H.
    pub kv_heads: usize,
    /// E, values of a head.
    pub head_dim: usize,
}

impl AttentionShape {
    /// Whether the kernels take these heads.
    pub fn fits(self) -> bool {
        matches!(self.head_dim, 64 | 128) && self.kv_heads > 0 && self.heads.is_multiple_of(self.kv_heads)
    }

    pub(crate) fn query_len(self) -> usize {
        self.queries * self.heads * self.head_dim
    }

    pub(crate) fn key_len(self) -> usize {
        self.keys * self.kv_heads * self.head_dim
    }

    pub(crate) fn check(self, name: &'static str) -> Result<(), KernelError> {
        let Self { queries, keys, past, heads, kv_heads, head_dim } = self;
        require(name, self.fits(), || {
            format!("E = {head_dim}, H = {heads}, G = {kv_heads}: E must be 64 or 128, and H a multiple of G")
        })?;
        require(name, keys == queries + past, || format!("S = {keys} is not past + T = {past} + {queries}"))
    }

    /// Checks the buffers of queries, keys and values.
    pub(crate) fn check_qkv<R: Runtime>(
        self,
        name: &'static str,
        [q, k, v]: [&ArrayArg<R>; 3],
    ) -> Result<(), KernelError> {
        expect_len(name, "q", q.size(), self.query_len())?;
        expect_len(name, "k", k.size(), self.key_len())?;
        expect_len(name, "v", v.size(), self.key_len())
    }

    /// The lengths and the scale of scores, for the device.
    pub(crate) fn call<R: Runtime>(self, name: &'static str) -> Result<CallLaunch<R>, KernelError> {
        let (queries, keys) = (index(name, "T", self.queries)?, index(name, "S", self.keys)?);
        Ok(CallLaunch::new(queries, keys, self.past as u32, 1.0 / (self.head_dim as f32).sqrt()))
    }

    pub(crate) fn compiled_heads(self) -> Heads {
        Heads { heads: self.heads as u32, kv_heads: self.kv_heads as u32, dim: self.head_dim as u32 }
    }
}

/// What a kernel reads of an [`AttentionShape`] at run time.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Call {
    pub(crate) queries: u32,
    pub(crate) keys: u32,
    pub(crate) past: u32,
    /// `1 / sqrt(E)`.
    pub(crate) scale: f32,
}

/// What is compiled into a kernel of an [`AttentionShape`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Heads {
    pub(crate) heads: u32,
    pub(crate) kv_heads: u32,
    /// E, values of a head.
    pub(crate) dim: u32,
}

impl Heads {
    /// Query heads that read the same key head.
    pub(crate) fn group(self) -> u32 {
        self.heads / self.kv_heads
    }

    /// Octets of a head.
    pub(crate) fn width(self) -> u32 {
        self.dim / 8
    }
}
