//! What a launch takes, and the checks of its buffers.

use crate::{
    e4m3::BYTES_PER_WORD,
    error::{KernelError, expect_len, require},
    operands::PackedArgs,
};
use cubecl::prelude::*;

pub(super) const NAME: &str = "decoder block";
/// The most tokens of a launch.
pub const MAX_TOKENS: usize = 16;

/// The sizes of a block.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecoderShape {
    /// Values of a hidden state.
    pub hidden: usize,
    /// Values inside the MLP.
    pub intermediate: usize,
    /// Query heads, H.
    pub heads: usize,
    /// Key heads, G.
    pub kv_heads: usize,
    /// Values of a head, E.
    pub head_dim: usize,
    /// The epsilon of the norms.
    pub eps: f32,
}

/// A weight: codes, or 16-bit values (`[rows, cols]`, bf16).
pub enum Weight<R: Runtime> {
    /// NVFP4 codes.
    Packed(PackedArgs<R>),
    /// bf16.
    Dense(ArrayArg<R>),
}

/// How the activations of a product are rounded.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ActivationRounding {
    /// To bf16 alone.
    Not,
    /// To NVFP4, each token with a tensor scale of its own ([`crate::quantize::rounded_rows`]).
    EachRow,
    /// To NVFP4 with the tensor scale `1 / full`.
    By {
        /// The reciprocal of the scale.
        full: f32,
    },
}

/// Tokens of a page of caches.
pub const PAGE: usize = 16;

/// The keys and values of all sequences, in pages of [`PAGE`] tokens. A page belongs to the sequences that name it.
pub struct Caches<R: Runtime> {
    /// The keys, `[rows, G, E]`: a row for each token of each page.
    pub keys: ArrayArg<R>,
    /// The values, likewise.
    pub values: ArrayArg<R>,
    /// Whether both hold E4M3 bytes, four in a u32 word ([`crate::e4m3`]). Else they hold bf16.
    pub bytes: bool,
    /// The pages of each sequence in the order of its tokens, u32 `[tokens, n]`. All lie within the keys and values.
    pub pages: ArrayArg<R>,
    /// The number of tokens that each sequence has. The new token is written behind them, to a page that no other sequence
    /// names.
    pub pasts: Vec<usize>,
}

/// A block and its tokens.
pub struct DecoderBlock<R: Runtime> {
    /// The sizes.
    pub shape: DecoderShape,
    /// Hidden states `[tokens, hidden]`, bf16.
    pub x: ArrayArg<R>,
    /// The result, likewise.
    pub y: ArrayArg<R>,
    /// The weights of the norms, f32: before attention (`hidden` values), of queries and of keys (E), before the MLP (`hidden`).
    pub norms: [ArrayArg<R>; 4],
    /// Cosines and sines, f32, lines of E/2; the line of each token, u32.
    pub rotary: [ArrayArg<R>; 3],
    /// q, k, v, o, gate, up and down. Weights that read the same activations are all packed, or all dense.
    pub weights: [Weight<R>; 7],
    /// How the activations of q, k and v, of o, of gate and up, and of down are rounded.
    pub rounded: [ActivationRounding; 4],
    /// The sequences of the tokens.
    pub caches: Caches<R>,
}

impl<R: Runtime> DecoderBlock<R> {
    /// Checks the lengths of all buffers.
    pub(super) fn check(&self) -> Result<(), KernelError> {
        let DecoderShape { hidden, intermediate, heads, kv_heads, head_dim, .. } = self.shape;
        let tokens = self.caches.pasts.len();
        let (queries, keys) = (heads * head_dim, kv_heads * head_dim);
        for (name, arg, len) in [
            ("x", &self.x, tokens * hidden),
            ("y", &self.y, tokens * hidden),
            ("norm before attention", &self.norms[0], hidden),
            ("norm of queries", &self.norms[1], head_dim),
            ("norm of keys", &self.norms[2], head_dim),
            ("norm before the MLP", &self.norms[3], hidden),
            ("lines", &self.rotary[2], tokens),
        ] {
            expect_len(NAME, name, arg.size(), len)?;
        }
        let rows = [queries, keys, keys, hidden, intermediate, intermediate, hidden];
        let cols = [hidden, hidden, hidden, queries, hidden, hidden, intermediate];
        for (weight, (rows, cols)) in self.weights.iter().zip(rows.into_iter().zip(cols)) {
            match weight {
                Weight::Packed(w) => {
                    w.check(NAME)?;
                    require(NAME, (w.rows, w.cols) == (rows, cols), || {
                        format!("a weight is {} x {}, the shape needs {rows} x {cols}", w.rows, w.cols)
                    })?;
                }
                Weight::Dense(w) => expect_len(NAME, "a weight", w.size(), rows * cols)?,
            }
        }
        self.caches.check(keys)
    }
}

impl<R: Runtime> Caches<R> {
    /// Checks that all buffers fit sequences whose tokens have this many key values.
    fn check(&self, width: usize) -> Result<(), KernelError> {
        let Self { keys, values, bytes, pages, pasts } = self;
        let page = PAGE * width / if *bytes { BYTES_PER_WORD } else { 1 };
        require(NAME, keys.size() == values.size() && keys.size().is_multiple_of(page), || {
            format!("caches of {} and {} numbers; a page has {page}", keys.size(), values.size())
        })?;
        let room = self.pages_of_each() * PAGE;
        require(NAME, pages.size().is_multiple_of(pasts.len()) && pasts.iter().all(|past| *past < room), || {
            format!("a cache with room for {room} tokens; the sequences have {pasts:?} already")
        })
    }

    /// Places for pages of each sequence.
    pub(super) fn pages_of_each(&self) -> usize {
        self.pages.size() / self.pasts.len()
    }
}
