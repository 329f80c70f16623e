//! Keys and values of past tokens, in buffers allocated once for the longest sequence.

use crate::{ModelError, config::Qwen3Config};
use burn::tensor::{DType, Tensor, backend::Backend, s};

/// The cache of one sequence.
#[derive(Debug, Clone)]
pub struct KvCache<B: Backend> {
    layers: Vec<LayerCache<B>>,
    len: usize,
    capacity: usize,
}

/// Keys and values of one block, `[capacity, G*E]` each.
#[derive(Debug, Clone)]
pub struct LayerCache<B: Backend> {
    // `None` only while a buffer is written: nothing else holds it then, and it is updated in place.
    k: Option<Tensor<B, 2>>,
    v: Option<Tensor<B, 2>>,
}

impl<B: Backend> KvCache<B> {
    /// Allocates room for `capacity` tokens.
    pub fn new(config: &Qwen3Config, capacity: usize, dtype: DType, device: &B::Device) -> Self {
        let shape = [capacity, config.num_key_value_heads * config.head_dim];
        let zeros = || Some(Tensor::zeros(shape, (device, dtype)));
        let layers = (0..config.num_hidden_layers).map(|_| LayerCache { k: zeros(), v: zeros() }).collect();
        Self { layers, len: 0, capacity }
    }

    /// Number of tokens in the cache.
    pub fn tokens(&self) -> usize {
        self.len
    }

    /// Checks that `more` tokens fit.
    ///
    /// # Errors
    /// If they exceed the capacity.
    pub fn reserve(&self, more: usize) -> Result<(), ModelError> {
        let value = self.len + more;
        if value > self.capacity {
            return Err(ModelError::TooLarge { what: "sequence length", value, limit: self.capacity });
        }
        Ok(())
    }

    /// The cache of one block.
    pub fn layer(&mut self, layer: usize) -> &mut LayerCache<B> {
        &mut self.layers[layer]
    }

    /// Forgets all tokens but the first `len`. What follows overwrites them.
    pub fn rewind(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Counts `tokens` more tokens, after every layer has appended them.
    pub fn advance(&mut self, tokens: usize) {
        self.len += tokens;
    }
}

impl<B: Backend> LayerCache<B> {
    /// Takes keys and values out, for an operation that updates them in place. [`Self::put`] brings them back.
    pub(crate) fn take(&mut self) -> [Tensor<B, 2>; 2] {
        [&mut self.k, &mut self.v].map(|slot| slot.take().expect("put back before it is taken again"))
    }

    /// Puts keys and values back.
    pub(crate) fn put(&mut self, [k, v]: [Tensor<B, 2>; 2]) {
        (self.k, self.v) = (Some(k), Some(v));
    }

    /// Writes `k` and `v` `[T, G*E]` behind the first `past` tokens and returns the keys and values of all tokens,
    /// `[S, G*E]`.
    pub fn append(&mut self, k: Tensor<B, 2>, v: Tensor<B, 2>, past: usize) -> (Tensor<B, 2>, Tensor<B, 2>) {
        let write = |slot: &mut Option<Tensor<B, 2>>, new: Tensor<B, 2>| {
            let end = past + new.dims()[0];
            let buffer = slot.take().expect("put back below").slice_assign(s![past..end, ..], new);
            *slot = Some(buffer.clone());
            // This is no copy, because the first rows of a matrix are contiguous.
            buffer.slice(s![0..end, ..])
        };
        (write(&mut self.k, k), write(&mut self.v, v))
    }
}
