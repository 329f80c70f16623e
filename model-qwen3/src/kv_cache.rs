//! Keys and values of past tokens, in buffers allocated once for the longest sequence.

use crate::{ModelError, config::Qwen3Config};
use burn::tensor::{DType, Tensor, backend::Backend, s};

/// The cache of one sequence batch.
#[derive(Debug, Clone)]
pub struct KvCache<B: Backend> {
    layers: Vec<LayerCache<B>>,
    len: usize,
    capacity: usize,
}

/// Keys and values of one block, `[B, K, capacity, E]` each.
#[derive(Debug, Clone)]
pub struct LayerCache<B: Backend> {
    // Taken out while they are written, so that the buffer is unshared and updated in place.
    k: Option<Tensor<B, 4>>,
    v: Option<Tensor<B, 4>>,
}

impl<B: Backend> KvCache<B> {
    /// Allocates room for `capacity` tokens of `batch` sequences.
    pub fn new(config: &Qwen3Config, batch: usize, capacity: usize, dtype: DType, device: &B::Device) -> Self {
        let shape = [batch, config.num_key_value_heads, capacity, config.head_dim];
        let zeros = || Some(Tensor::zeros(shape, (device, dtype)));
        let layers = (0..config.num_hidden_layers).map(|_| LayerCache { k: zeros(), v: zeros() }).collect();
        Self { layers, len: 0, capacity }
    }

    /// Tokens held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Checks that `more` tokens fit.
    ///
    /// # Errors
    /// If they do not.
    pub fn reserve(&self, more: usize) -> Result<(), ModelError> {
        let value = self.len + more;
        if value > self.capacity {
            return Err(ModelError::TooLarge { what: "sequence length", value, limit: self.capacity });
        }
        Ok(())
    }

    /// One block's cache, and how many tokens it held before this forward.
    pub fn layer(&mut self, layer: usize) -> (&mut LayerCache<B>, usize) {
        (&mut self.layers[layer], self.len)
    }

    /// Counts the tokens that every layer has appended.
    pub fn advance(&mut self, tokens: usize) {
        self.len += tokens;
    }
}

impl<B: Backend> LayerCache<B> {
    /// Writes `k` and `v` `[B, K, T, E]` behind the first `past` tokens and returns all, `[B, K, S, E]`.
    pub fn append(&mut self, k: Tensor<B, 4>, v: Tensor<B, 4>, past: usize) -> (Tensor<B, 4>, Tensor<B, 4>) {
        let end = past + k.dims()[2];
        let write = |slot: &mut Option<Tensor<B, 4>>, new: Tensor<B, 4>| {
            let buffer = slot.take().expect("put back below");
            let buffer = buffer.slice_assign(s![.., .., past..end, ..], new);
            let seen = buffer.clone().slice(s![.., .., 0..end, ..]);
            *slot = Some(buffer);
            seen
        };
        (write(&mut self.k, k), write(&mut self.v, v))
    }
}
