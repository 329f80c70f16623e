//! The tensors of a model as they will be stored in another format. [`Repacked`] computes each tensor when it is read,
//! so that at most one is in memory; [`crate::write`] streams them to a file.

use crate::{
    ModelError,
    bytes::FloatType,
    container::Container,
    maxima::Maxima,
    names,
    tensors::{Put, Stored, Tensors},
};
use backend_nvfp4::{BlockShape, Packed, QuantizeSpec, Rounding, Scaling, View, layout::BLOCK, reference};
use std::{ops::Range, path::Path};

/// How tensors will be stored.
#[derive(Debug, Clone, Copy)]
pub enum StoreAs<'a> {
    /// Every tensor dense, with values of one type.
    Float(FloatType),
    /// Linear layers in NVFP4, other tensors in f16.
    Nvfp4 {
        /// Whether a tensor has a scale of its own.
        scaling: Scaling,
        /// How the head is stored.
        head: HeadAs,
        /// Which values share a block scale.
        block: BlockShape,
        /// Whether matrices that are multiplied together (q, k and v; gate and up) share one tensor scale.
        shares_scale: bool,
        /// The first transformer block whose linear layers stay dense.
        dense_from: usize,
    },
    /// Each tensor as this file stores it. A tensor that did not change keeps its bytes. A tensor that has another
    /// shape in this file is missing.
    Like(&'a Container),
}

/// How the head is stored beside linear layers in NVFP4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadAs {
    /// Dense, with values of this type. A head that is the embedding is not stored.
    Float(FloatType),
    /// In NVFP4, if it is not the embedding. A head that is the embedding is not stored.
    OwnNvfp4,
    /// In NVFP4. If the head is the embedding, its NVFP4 copy becomes a tensor of its own.
    Nvfp4,
}

/// Tensors as they will be stored.
pub struct Repacked<'a> {
    source: &'a dyn Tensors,
    format: StoreAs<'a>,
    /// Whether a linear layer that the source keeps dense stays dense.
    keeps_dense: bool,
    maxima: Maxima<'a>,
}

impl<'a> Repacked<'a> {
    /// Shows `source` in another format.
    pub fn new(source: &'a dyn Tensors, format: StoreAs<'a>) -> Self {
        Self { source, format, keeps_dense: false, maxima: Maxima::new(source) }
    }

    /// The same, for the tensors of a model that is finished: if it has NVFP4 weights, linear layers that it keeps dense stay
    /// dense. (Of a model in training some weights may have their final codes, and others not yet.)
    #[must_use]
    pub fn of_finished(self) -> Self {
        Self { keeps_dense: self.source.holds_nvfp4(), ..self }
    }

    /// Names of the source for which the format has no place.
    pub fn left_out(&self) -> Vec<String> {
        let names = self.names();
        self.source.names().into_iter().filter(|n| !names.contains(n)).collect()
    }

    /// The tensor of the source that has the values of `name`. A file may spell out a tied head; its values are those of
    /// the embedding.
    fn origin<'n>(&self, name: &'n str) -> &'n str {
        if name == names::HEAD && self.source.stored(name).is_none() { names::EMBEDDING } else { name }
    }

    fn becomes_nvfp4(&self, name: &str, head: HeadAs, dense_from: usize) -> bool {
        let stays_dense = self.keeps_dense && matches!(self.source.stored(name), Some(Stored::Dense { .. }));
        let quantized = !stays_dense && names::block_of(name).is_none_or(|block| block < dense_from);
        names::is_projection(name) && quantized || name == names::HEAD && !matches!(head, HeadAs::Float(_))
    }

    fn bad(&self, reason: String) -> ModelError {
        ModelError::weights(self.path(), reason)
    }
}

impl Tensors for Repacked<'_> {
    fn path(&self) -> &Path {
        self.source.path()
    }

    fn names(&self) -> Vec<String> {
        let mut names = match self.format {
            StoreAs::Like(original) => return original.names(),
            StoreAs::Float(_) | StoreAs::Nvfp4 { .. } => self.source.names(),
        };
        if matches!(self.format, StoreAs::Nvfp4 { head: HeadAs::Nvfp4, .. }) && !names.iter().any(|n| n == names::HEAD)
        {
            names.push(names::HEAD.to_owned());
        }
        names::in_model_order(names)
    }

    fn stored(&self, name: &str) -> Option<Stored> {
        let shape = self.source.stored(self.origin(name))?.shape();
        Some(match self.format {
            StoreAs::Float(float) => Stored::Dense { float, shape },
            StoreAs::Like(original) => original.stored(name).filter(|stored| stored.shape() == shape)?,
            StoreAs::Nvfp4 { scaling, head, dense_from, .. }
                if self.becomes_nvfp4(name, head, dense_from) && shape.len() == 2 && shape[1].is_multiple_of(BLOCK) =>
            {
                Stored::Packed { rows: shape[0], cols: shape[1], scaling }
            }
            StoreAs::Nvfp4 { head: HeadAs::Float(float), .. } if name == names::HEAD => Stored::Dense { float, shape },
            StoreAs::Nvfp4 { .. } => Stored::Dense { float: FloatType::F16, shape },
        })
    }

    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<Vec<f32>, ModelError> {
        let Some(Stored::Dense { float, .. }) = self.stored(name) else {
            return Err(self.bad(format!("{name:?} becomes NVFP4; floats are needed")));
        };
        let values = self.source.values(self.origin(name), rows)?;
        let rounded = float.decode(&float.encode(&values));
        if let Some(at) = rounded.iter().position(|v| !v.is_finite()) {
            let reason = format!("{name:?}: {} does not fit {}; use bf16 or f32", values[at], float.name());
            return Err(ModelError::Format { path: self.path().to_owned(), reason });
        }
        Ok(rounded)
    }

    fn put_rows(&self, name: &str, rows: Range<usize>, put: Put) -> Result<(), ModelError> {
        let Some(Stored::Dense { float, .. }) = self.stored(name) else {
            return self.read_rows(name, rows).map(drop);
        };
        let bytes = float.encode(&self.source.values(self.origin(name), rows.clone())?);
        if !float.are_finite(&bytes) {
            // Reading the values says which of them does not fit.
            return self.read_rows(name, rows).map(drop);
        }
        put(&bytes)
    }

    fn read_packed(&self, name: &str) -> Result<Packed, ModelError> {
        let Some(Stored::Packed { rows, cols, scaling }) = self.stored(name) else {
            return Err(self.bad(format!("{name:?} stays dense; NVFP4 is needed")));
        };
        let origin = self.origin(name);
        if let Some(Stored::Packed { scaling: old, .. }) = self.source.stored(origin)
            && old == scaling
        {
            return self.source.read_packed(origin);
        }
        match self.format {
            StoreAs::Like(original) => {
                let values = self.source.values(origin, 0..rows)?;
                Ok(reference::requantize(&values, rows, cols, &original.read_packed(name)?, scaling))
            }
            StoreAs::Nvfp4 { block, shares_scale, .. } => {
                // A vocabulary need not be a number of squares.
                let block = if rows.is_multiple_of(BLOCK) { block } else { BlockShape::Row };
                let spec = QuantizeSpec { scaling, block, rounding: Rounding::Nearest };
                if !shares_scale {
                    return self.source.quantized(origin, spec);
                }
                // The largest magnitude of several matrices is found on the host, where one of them after another is read.
                let (amax, values) = (self.maxima.together(origin)?, self.source.values(origin, 0..rows)?);
                Ok(reference::quantize_sharing(&values, View::row_major(rows, cols), spec, amax))
            }
            StoreAs::Float(_) => unreachable!("StoreAs::Float stores no tensor as NVFP4"),
        }
    }
}
