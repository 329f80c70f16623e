//! Decoding: the blocks of a model, for one new token of each of several sequences, are one operation. A backend can then make a
//! block in one launch. The host needs longer to launch its kernels one by one than a large GPU needs to run them.

use crate::{
    attention::{AttentionSpec, Rotary},
    cache::CacheBuffer,
    ops::LinearLayer,
};
use burn::tensor::{
    backend::Backend,
    ops::{FloatTensor, IntTensor},
};
pub use kernels_cubecl::cuda_text::decoder::PAGE;

/// A transformer block, and its KV cache.
#[derive(Debug, Clone)]
pub struct DecodeBlock<B: Backend> {
    /// The weights of the norms in f32: before attention `[D]`, of queries and of keys `[E]`, before the MLP `[D]`.
    pub norms: [FloatTensor<B>; 4],
    /// q, k, v, o, gate, up and down.
    pub layers: [LinearLayer<B>; 7],
    /// Keys and values of the tokens of all sequences, both in one format. They are updated in place when nothing else holds
    /// them.
    pub cache: [CacheBuffer<B>; 2],
}

/// The new tokens, one of each sequence, and what all blocks share.
#[derive(Debug, Clone)]
pub struct DecodeTokens<B: Backend> {
    /// The angles of each token.
    pub rotary: Rotary<B>,
    /// The pages of each sequence in the order of its tokens, U32 `[M, n]`. Page p is the [`PAGE`] rows of the
    /// cache from row `PAGE * p` on.
    pub pages: IntTensor<B>,
    /// Number of tokens that each sequence has. The new token is written behind them, to a page that no other sequence has.
    pub pasts: Vec<usize>,
    /// The sizes of attention.
    pub attention: AttentionSpec,
    /// The epsilon of the norms.
    pub eps: f64,
}
