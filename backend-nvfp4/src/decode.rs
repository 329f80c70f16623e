//! Decoding: the blocks of a model, for one new token of each of several sequences, are one operation. A backend can then make a
//! block in one launch. The host needs longer to launch its kernels one by one than a large GPU needs to run them.

use crate::{
    attention::{AttentionSpec, Rotary},
    kept::Kept,
    ops::LinearLayer,
};
use burn::tensor::{backend::Backend, ops::FloatTensor};

/// A transformer block, and the caches of the sequences.
#[derive(Debug, Clone)]
pub struct DecodeBlock<B: Backend> {
    /// The weights of the norms in f32: before attention `[D]`, of queries and of keys `[E]`, before the MLP `[D]`.
    pub norms: [FloatTensor<B>; 4],
    /// q, k, v, o, gate, up and down.
    pub layers: [LinearLayer<B>; 7],
    /// Keys and values of each sequence, all kept in one format.
    pub caches: Vec<[Kept<B>; 2]>,
}

/// The new tokens, one of each sequence, and what all blocks share.
#[derive(Debug, Clone)]
pub struct DecodeTokens<B: Backend> {
    /// The angles of each token.
    pub rotary: Rotary<B>,
    /// Number of tokens that the cache of each sequence holds. The new token is written behind them.
    pub pasts: Vec<usize>,
    /// The sizes of attention.
    pub attention: AttentionSpec,
    /// The epsilon of the norms.
    pub eps: f64,
}
