//! The largest magnitudes of what linear layers read, over forwards of a model. Other libraries take the tensor scales of 4-bit
//! activations from them.

use crate::{ModelError, names, weights::to_host};
use burn::tensor::{Tensor, backend::Backend};
use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

/// Takes the largest magnitude of each input of a linear layer, in all forwards that are given this.
#[derive(Debug)]
pub struct InputMaxima<B: Backend> {
    /// For a weight that reads the input: the largest magnitude so far, `[1]`.
    seen: Mutex<BTreeMap<String, Tensor<B, 1>>>,
}

impl<B: Backend> Default for InputMaxima<B> {
    fn default() -> Self {
        Self { seen: Mutex::default() }
    }
}

impl<B: Backend> InputMaxima<B> {
    /// Takes in what the layer `part` of a block reads, and all layers that read the same with it.
    pub(crate) fn take_in(&self, block: usize, part: &str, x: Tensor<B, 2>) {
        let amax = x.abs().max();
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let name = names::in_block(block, part);
        let amax = match seen.remove(&name) {
            Some(before) => before.max_pair(amax),
            None => amax,
        };
        seen.insert(name, amax);
    }

    /// The largest magnitude that each linear layer of the blocks has read, by the name of its weight. Layers that read the
    /// same have the same.
    ///
    /// # Errors
    /// If the device failed.
    pub fn by_weight(&self) -> Result<BTreeMap<String, f32>, ModelError> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.is_empty() {
            return Ok(BTreeMap::new());
        }
        let values = to_host(Tensor::cat(seen.values().cloned().collect(), 0))?;
        let readers =
            |(name, amax): (&String, f32)| names::multiplied_together(name).into_iter().map(move |name| (name, amax));
        Ok(seen.keys().zip(values).flat_map(readers).collect())
    }
}
