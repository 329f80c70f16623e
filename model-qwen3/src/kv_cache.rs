//! Keys and values of past tokens, in buffers allocated once for the longest sequence.

use crate::{ModelError, config::Qwen3Config};
use backend_nvfp4::{CacheFormat, Kept, Nvfp4Kernels};
use burn::tensor::{DType, Tensor, backend::Backend};

/// The cache of one sequence.
#[derive(Debug, Clone)]
pub struct KvCache<B: Backend> {
    layers: Vec<LayerCache<B>>,
    len: usize,
    capacity: usize,
}

/// Keys and values of one block.
#[derive(Debug, Clone)]
pub struct LayerCache<B: Backend> {
    // `None` only while a buffer is written: nothing else holds it then, and it is updated in place.
    k: Option<Kept<B>>,
    v: Option<Kept<B>>,
}

impl<B: Nvfp4Kernels> KvCache<B> {
    /// Allocates room for `capacity` tokens of a model that computes in `dtype`.
    ///
    /// # Errors
    /// If the format does not take the sizes of the model.
    pub(crate) fn new(
        config: &Qwen3Config,
        capacity: usize,
        format: CacheFormat,
        dtype: DType,
        device: &B::Device,
    ) -> Result<Self, ModelError> {
        let width = config.num_key_value_heads * config.head_dim;
        if !format.fits(width) {
            return Err(ModelError::CacheWidth { width });
        }
        let zeros = || Some(Kept::zeros([capacity, width], format, dtype, device));
        let layers = (0..config.num_hidden_layers).map(|_| LayerCache { k: zeros(), v: zeros() }).collect();
        Ok(Self { layers, len: 0, capacity })
    }
}

impl<B: Backend> KvCache<B> {
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

impl<B: Nvfp4Kernels> LayerCache<B> {
    /// Takes keys and values out, for an operation that updates them in place. [`Self::put`] brings them back.
    pub(crate) fn take(&mut self) -> [Kept<B>; 2] {
        [&mut self.k, &mut self.v].map(|slot| slot.take().expect("put back before it is taken again"))
    }

    /// Puts keys and values back.
    pub(crate) fn put(&mut self, [k, v]: [Kept<B>; 2]) {
        (self.k, self.v) = (Some(k), Some(v));
    }

    /// Writes `k` and `v` `[T, G*E]` behind the first `past` tokens and returns the keys and values of all tokens as they are
    /// kept, `[S, G*E]`.
    pub fn append(&mut self, k: Tensor<B, 2>, v: Tensor<B, 2>, past: usize) -> (Tensor<B, 2>, Tensor<B, 2>) {
        let write = |slot: &mut Option<Kept<B>>, new: Tensor<B, 2>| {
            let (kept, all) = slot.take().expect("put back below").append(new, past);
            *slot = Some(kept);
            all
        };
        (write(&mut self.k, k), write(&mut self.v, v))
    }
}
