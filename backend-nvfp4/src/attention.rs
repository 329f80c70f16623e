//! What attention needs to know besides queries, keys and values: positions, which tokens see each other, sizes.

use crate::recipe::Precision;
use burn::tensor::{
    Bool, Int, Tensor, TensorData,
    backend::{AutodiffBackend, Backend},
    ops::{FloatTensor, IntTensor},
};
use std::sync::Arc;

/// The angles of rotary position embeddings, and which of them each token uses.
#[derive(Debug, Clone)]
pub struct Rotary<B: Backend> {
    /// Cosines, f32 `[L, E/2]`.
    pub cos: FloatTensor<B>,
    /// Sines, f32 `[L, E/2]`.
    pub sin: FloatTensor<B>,
    /// The row of `cos` and `sin` that each token uses, `[M]`.
    pub positions: IntTensor<B>,
}

impl<AB: AutodiffBackend> Rotary<AB> {
    /// The same angles for the inner backend.
    pub fn inner(&self) -> Rotary<AB::InnerBackend> {
        Rotary {
            cos: AB::inner(self.cos.clone()),
            sin: AB::inner(self.sin.clone()),
            positions: AB::int_inner(self.positions.clone()),
        }
    }
}

/// Which tokens see each other. M new tokens form rows of equal length, each row is cut into documents, and a token
/// sees the tokens of its own document up to itself.
#[derive(Debug, Clone)]
pub struct Documents<B: Backend> {
    /// Number of rows in the batch.
    pub rows: usize,
    /// Number of tokens of each row that earlier calls have put into the cache.
    pub past: usize,
    /// The first key of each token's document, counted over the new tokens of the rows before and the keys of its own row, `[M]`.
    /// Without a past this is the number of the key in all rows.
    pub starts: IntTensor<B>,
    /// One past the last new token of each token's document, counted over the new tokens of all rows, `[M]`.
    pub ends: IntTensor<B>,
    /// The first key of each token's document, counted within its row.
    row_starts: Arc<[u32]>,
}

impl<B: Backend> Documents<B> {
    /// `row_starts[m]` is the first key that token `m` sees in its row. The keys of a row are `past` old ones and then
    /// M/rows new ones. Within a row, `row_starts` never decreases.
    pub fn new(rows: usize, past: usize, row_starts: Vec<u32>, device: &B::Device) -> Self {
        let len = row_starts.len();
        let t = len / rows.max(1);
        let mut ends = vec![0i32; len];
        for m in (0..len).rev() {
            let last = (m + 1) % t == 0 || row_starts[m + 1] != row_starts[m];
            ends[m] = if last { m as i32 + 1 } else { ends[m + 1] };
        }
        let starts: Vec<i32> = row_starts.iter().enumerate().map(|(m, s)| (m / t * t) as i32 + *s as i32).collect();
        let ints = |v: Vec<i32>| Tensor::<B, 1, Int>::from_data(TensorData::new(v, [len]), device).into_primitive();
        Self { rows, past, starts: ints(starts), ends: ints(ends), row_starts: row_starts.into() }
    }

    /// Number of new tokens, M.
    pub fn tokens(&self) -> usize {
        self.row_starts.len()
    }

    /// A mask `[rows, 1, T, keys]` that is true where a query must not look, or `None` if every query sees every key. A row has
    /// `keys` keys. Those behind its newest token are padding.
    pub(crate) fn hidden(&self, keys: usize, device: &B::Device) -> Option<Tensor<B, 4, Bool>> {
        let t = self.tokens() / self.rows.max(1);
        if t == 1 && keys == self.past + 1 && self.row_starts.iter().all(|start| *start == 0) {
            return None;
        }
        let sees = |m: usize, j: usize| j >= self.row_starts[m] as usize && j <= self.past + m % t;
        let mask: Vec<bool> = (0..self.tokens()).flat_map(|m| (0..keys).map(move |j| !sees(m, j))).collect();
        Some(Tensor::from_data(TensorData::new(mask, [self.rows, 1, t, keys]), device))
    }
}

impl<AB: AutodiffBackend> Documents<AB> {
    /// The same documents for the inner backend.
    pub fn inner(&self) -> Documents<AB::InnerBackend> {
        Documents {
            rows: self.rows,
            past: self.past,
            starts: AB::int_inner(self.starts.clone()),
            ends: AB::int_inner(self.ends.clone()),
            row_starts: self.row_starts.clone(),
        }
    }
}

/// The sizes of an attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionSpec {
    /// Number of query heads, H.
    pub heads: usize,
    /// Number of key and value heads, G.
    pub kv_heads: usize,
    /// Size of a head, E.
    pub head_dim: usize,
    /// Number format of the products.
    pub precision: Precision,
}
