//! A model's tensors as other libraries store them: all in bf16, or the linear layers in NVFP4 as compressed-tensors or
//! nvidia-modelopt spell and quantize it.
//!
//! NVFP4 weights keep their codes and block scales. Inference engines multiply q, k and v as one matrix, and gate and up as
//! another, which needs one tensor scale for each of the two: matrices that have a smaller one are rescaled, and
//! [`Foreign::rounded`] counts the block scales that this rounds. Dense weights are quantized by the library's own formula.

use crate::{
    ModelError,
    bytes::FloatType,
    names::{self, Spelling},
    tensors::{Stored, Tensors, row_ranges},
};
use backend_nvfp4::{
    Packed, Scaling,
    layout::BLOCK,
    reference::{self, Dialect},
};
use std::{
    ops::Range,
    path::Path,
    sync::atomic::{AtomicUsize, Ordering},
};

/// Values of a dense tensor that are read at a time.
const CHUNK: usize = 1 << 22;

/// How the tensors are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ForeignFormat {
    /// Every tensor in bf16.
    Bf16,
    /// Linear layers as compressed-tensors stores them.
    CompressedTensors,
    /// Linear layers as nvidia-modelopt stores them.
    ModelOpt,
}

impl ForeignFormat {
    /// How the keys of NVFP4 tensors are spelled.
    pub fn spelling(self) -> Spelling {
        if self == Self::CompressedTensors { Spelling::CompressedTensors } else { Spelling::ModelOpt }
    }
}

/// A model's tensors as another library stores them.
pub struct Foreign<'a> {
    source: &'a dyn Tensors,
    format: ForeignFormat,
    /// The first block whose dense linear layers stay dense.
    dense_from: usize,
    rounded: AtomicUsize,
}

impl<'a> Foreign<'a> {
    /// Shows `source` in another library's format. Of a source without NVFP4, the linear layers of all blocks before
    /// `dense_from` are quantized.
    pub fn new(source: &'a dyn Tensors, format: ForeignFormat, dense_from: usize) -> Self {
        let is_packed = |name: &String| matches!(source.stored(name), Some(Stored::Packed { .. }));
        // What a file with NVFP4 keeps dense stays dense.
        let dense_from = if source.names().iter().any(is_packed) { 0 } else { dense_from };
        Self { source, format, dense_from, rounded: AtomicUsize::new(0) }
    }

    /// The block scales that a shared tensor scale has rounded in the tensors that were read so far.
    pub fn rounded(&self) -> usize {
        self.rounded.load(Ordering::Relaxed)
    }

    /// The linear layers that stay dense.
    pub fn dense_layers(&self) -> Vec<String> {
        let dense = |name: &String| matches!(self.stored(name), Some(Stored::Dense { .. }));
        let linear = |name: &String| names::is_projection(name) || name == names::HEAD;
        self.names().into_iter().filter(|name| linear(name) && dense(name)).collect()
    }

    fn dialect(&self, float: FloatType) -> Dialect {
        match self.format {
            ForeignFormat::ModelOpt => Dialect::ModelOpt,
            _ => Dialect::CompressedTensors { bf16: float == FloatType::Bf16 },
        }
    }

    /// The largest magnitude of the matrices that share a tensor scale with this one.
    fn shared_amax(&self, name: &str) -> Result<f32, ModelError> {
        let mut amax = 0.0f32;
        for name in names::multiplied_together(name) {
            let shape = self.source.stored(&name).ok_or_else(|| ModelError::missing(self.path(), &name))?.shape();
            for rows in row_ranges(&shape, CHUNK) {
                amax = self.source.read_rows(&name, rows)?.iter().fold(amax, |a, v| a.max(v.abs()));
            }
        }
        Ok(amax)
    }

    /// An NVFP4 tensor of the source, by the largest tensor scale of the matrices that share one.
    fn rescaled(&self, name: &str, cols: usize) -> Result<Packed, ModelError> {
        let own = self.source.read_packed(name)?;
        let mut shared = own.global;
        for other in names::multiplied_together(name) {
            if other != name && matches!(self.source.stored(&other), Some(Stored::Packed { .. })) {
                shared = shared.max(self.source.read_packed(&other)?.global);
            }
        }
        if shared == own.global {
            return Ok(own);
        }
        let rescaled = reference::rescale(&own, cols, shared);
        let differ = |(a, b): &(&u8, &u8)| {
            reference::e4m3_decode(**a) * own.global != reference::e4m3_decode(**b) * rescaled.global
        };
        let rounded = own.scales.iter().zip(&rescaled.scales).filter(differ).count();
        self.rounded.fetch_add(rounded, Ordering::Relaxed);
        Ok(rescaled)
    }
}

impl Tensors for Foreign<'_> {
    fn path(&self) -> &Path {
        self.source.path()
    }

    fn names(&self) -> Vec<String> {
        self.source.names()
    }

    fn stored(&self, name: &str) -> Option<Stored> {
        let stored = self.source.stored(name)?;
        let shape = stored.shape();
        let dense = Stored::Dense { float: FloatType::Bf16, shape: shape.clone() };
        if self.format == ForeignFormat::Bf16 || !names::is_projection(name) {
            return Some(dense);
        }
        let packed = match stored {
            Stored::Packed { .. } => true,
            Stored::Dense { .. } => names::block_of(name).is_some_and(|block| block < self.dense_from),
        };
        let fits = shape.len() == 2 && shape[1].is_multiple_of(BLOCK);
        if !(packed && fits) {
            return Some(dense);
        }
        Some(Stored::Packed { rows: shape[0], cols: shape[1], scaling: Scaling::Two })
    }

    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<Vec<f32>, ModelError> {
        let mut values = match self.source.stored(name) {
            Some(Stored::Packed { rows: all, cols, .. }) => {
                let values = reference::dequantize(&self.source.read_packed(name)?, all, cols);
                values[rows.start * cols..rows.end * cols].to_vec()
            }
            _ => self.source.read_rows(name, rows)?,
        };
        values = FloatType::Bf16.decode(&FloatType::Bf16.encode(&values));
        Ok(values)
    }

    fn reciprocal_scale(&self, name: &str, packed: &Packed) -> Result<f32, ModelError> {
        match self.source.stored(name) {
            // The library's own value, which a reciprocal of the reciprocal may miss.
            Some(Stored::Dense { float, .. }) => Ok(self.dialect(float).divisor(self.shared_amax(name)?)),
            _ => Ok(1.0 / packed.global),
        }
    }

    fn read_packed(&self, name: &str) -> Result<Packed, ModelError> {
        let mut packed = match self.source.stored(name) {
            Some(Stored::Packed { cols, .. }) => self.rescaled(name, cols)?,
            Some(Stored::Dense { float, shape }) => {
                let dialect = self.dialect(float);
                dialect.quantize(&self.source.read_dense(name)?, shape[1], self.shared_amax(name)?)
            }
            None => return Err(ModelError::missing(self.path(), name)),
        };
        if self.format == ForeignFormat::CompressedTensors {
            // What a reader of the file gets, which holds the reciprocal.
            packed.global = 1.0 / self.reciprocal_scale(name, &packed)?;
        }
        Ok(packed)
    }
}
