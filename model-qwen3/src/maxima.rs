//! The largest magnitudes of matrices, for matrices that share a tensor scale. Each matrix is read once for it.

use crate::{
    ModelError, names,
    tensors::{Tensors, row_ranges},
};
use std::{collections::HashMap, sync::Mutex};

/// Values of a matrix that are read at a time.
const CHUNK: usize = 1 << 22;

/// The largest magnitudes of the matrices of a source.
pub(crate) struct Maxima<'a> {
    source: &'a dyn Tensors,
    /// Those that are known.
    known: Mutex<HashMap<String, f32>>,
}

impl<'a> Maxima<'a> {
    /// Knows none yet.
    pub(crate) fn new(source: &'a dyn Tensors) -> Self {
        Self { source, known: Mutex::default() }
    }

    /// The largest magnitude of the matrices that are multiplied together with this one, itself included.
    pub(crate) fn together(&self, name: &str) -> Result<f32, ModelError> {
        names::multiplied_together(name).iter().try_fold(0.0f32, |amax, name| Ok(amax.max(self.of(name)?)))
    }

    fn of(&self, name: &str) -> Result<f32, ModelError> {
        let mut known = self.known.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(amax) = known.get(name) {
            return Ok(*amax);
        }
        let stored = self.source.stored(name).ok_or_else(|| ModelError::missing(self.source.path(), name))?;
        let mut amax = 0.0f32;
        for rows in row_ranges(&stored.shape(), CHUNK) {
            amax = self.source.values(name, rows)?.iter().fold(amax, |a, v| a.max(v.abs()));
        }
        known.insert(name.to_owned(), amax);
        Ok(amax)
    }
}
