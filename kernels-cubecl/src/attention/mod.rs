//! Causal grouped-query attention over packed documents, after FlashAttention-2 (Dao, arXiv 2307.08691):
//! ```text
//! s[i, j] = scale * q[i] . k[j]   for start[i] <= j <= i + past, else hidden
//! y[i] = sum_j softmax_j(s[i])[j] * v[j]                 lse[i] = log sum_j exp(s[i, j])
//! for i { for j in start[i]..=i + past { online softmax; y[i] += p * v[j] } }    // the plain loop
//! ```
//! `q`, `y` are `[T, H, E]`, `k`, `v` `[S, K, E]`, f16 or bf16; query head `h` reads key head `h / (H/K)`.
//! `start` is the first token of each token's document and never falls, so a batch, a packed row and a
//! cached prefix are one kernel. Scores live in registers only. Sums are f32.
//!
//! Bound by the tensor cores and by reading fragments from shared memory; hidden blocks are skipped.

use crate::{KernelError, error::expect_len};

mod backward;
mod forward;
mod keys;

pub use backward::{Saved, backward_kv, backward_q, delta};
pub use forward::forward;
pub(crate) use keys::{key_blocks, send_block, turn_block};

pub(crate) const UNITS: u32 = 128;
/// Keys of a block, and both sides of a backward block.
pub(crate) const BLOCK: u32 = 64;
/// A score that is not seen: finite, so that differences stay numbers.
pub(crate) const HIDDEN: f32 = -1.0e30;

/// The shapes of one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// T, rows of queries.
    pub queries: usize,
    /// S, rows of keys.
    pub keys: usize,
    /// Keys before the first query's own.
    pub past: usize,
    /// H.
    pub heads: usize,
    /// K, a divisor of H.
    pub kv_heads: usize,
    /// E.
    pub head_dim: usize,
}

impl AttentionShape {
    /// Whether the kernels take this head size.
    pub fn fits(self) -> bool {
        matches!(self.head_dim, 64 | 128) && self.heads.is_multiple_of(self.kv_heads)
    }

    fn query_len(self) -> usize {
        self.queries * self.heads * self.head_dim
    }

    fn key_len(self) -> usize {
        self.keys * self.kv_heads * self.head_dim
    }

    fn check(self, name: &'static str) -> Result<(), KernelError> {
        expect_len(name, "head sizes other than 64 and 128", usize::from(!self.fits()), 0)?;
        expect_len(name, "keys", self.keys, self.queries + self.past)
    }
}

fn scale(shape: AttentionShape) -> f32 {
    1.0 / (shape.head_dim as f32).sqrt()
}
