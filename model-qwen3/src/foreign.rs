//! A model's tensors with its linear layers in NVFP4 as compressed-tensors or nvidia-modelopt spell and quantize it. Other
//! tensors are bf16.
//!
//! NVFP4 weights keep their codes and block scales. Inference engines multiply q, k and v as one matrix, and gate and up as
//! another, which needs one tensor scale for each of the two: matrices that have a smaller one are rescaled, and
//! [`Foreign::rounded`] counts the block scales that this rounds. Dense weights are quantized by the library's own formula.

use crate::{
    ModelError,
    bytes::FloatType,
    names::{self, Spelling},
    repack::{Repacked, StoreAs},
    tensors::{Stored, Tensors, row_ranges},
};
use backend_nvfp4::{
    Packed, Scaling,
    layout::BLOCK,
    reference::{self, Dialect},
};
use std::{collections::HashMap, ops::Range, path::Path, sync::Mutex};

/// Values of a dense tensor that are read at a time.
const CHUNK: usize = 1 << 22;

/// A library that stores NVFP4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    /// compressed-tensors, whose format vLLM calls `nvfp4-pack-quantized`.
    CompressedTensors,
    /// nvidia-modelopt, which exports `W4A16_NVFP4`.
    ModelOpt,
}

impl Library {
    /// How the keys of NVFP4 tensors are spelled.
    pub fn spelling(self) -> Spelling {
        if self == Self::CompressedTensors { Spelling::CompressedTensors } else { Spelling::ModelOpt }
    }

    /// How weights that were stored in `float` are quantized.
    fn dialect(self, float: FloatType) -> Dialect {
        match self {
            Self::CompressedTensors => Dialect::CompressedTensors { bf16: float == FloatType::Bf16 },
            Self::ModelOpt => Dialect::ModelOpt,
        }
    }
}

/// A model's tensors as another library stores them.
pub struct Foreign<'a> {
    source: &'a dyn Tensors,
    /// The tensors that stay dense.
    dense: Repacked<'a>,
    library: Library,
    /// The first block whose dense linear layers stay dense.
    dense_from: usize,
    /// The largest magnitudes of dense matrices, which each matrix of a group asks for.
    amax: Mutex<HashMap<String, f32>>,
}

impl<'a> Foreign<'a> {
    /// Shows `source` as `library` stores it. Of a source without NVFP4, the linear layers of all blocks before
    /// `dense_from` are quantized.
    pub fn new(source: &'a dyn Tensors, library: Library, dense_from: usize) -> Self {
        let is_packed = |name: &String| matches!(source.stored(name), Some(Stored::Packed { .. }));
        // What a file with NVFP4 keeps dense stays dense.
        let dense_from = if source.names().iter().any(is_packed) { 0 } else { dense_from };
        let dense = Repacked::new(source, StoreAs::Float(FloatType::Bf16));
        Self { source, dense, library, dense_from, amax: Mutex::default() }
    }

    /// The block scales that a shared tensor scale rounds.
    ///
    /// # Errors
    /// If a tensor cannot be read.
    pub fn rounded(&self) -> Result<usize, ModelError> {
        let mut rounded = 0;
        for name in self.names() {
            let Some(Stored::Packed { .. }) = self.source.stored(&name) else { continue };
            if self.shared_scale(&name)? == self.source.read_packed_rows(&name, 0..0)?.global {
                continue;
            }
            let (own, ours) = (self.source.read_packed(&name)?, self.read_packed(&name)?);
            let value = |scale: &u8, packed: &Packed| reference::e4m3_decode(*scale) * packed.global;
            rounded += own.scales.iter().zip(&ours.scales).filter(|(a, b)| value(a, &own) != value(b, &ours)).count();
        }
        Ok(rounded)
    }

    /// The largest magnitude of the dense matrices that share a tensor scale with this one.
    fn shared_amax(&self, name: &str) -> Result<f32, ModelError> {
        names::multiplied_together(name).iter().try_fold(0.0f32, |amax, name| Ok(amax.max(self.amax(name)?)))
    }

    fn amax(&self, name: &str) -> Result<f32, ModelError> {
        let mut known = self.amax.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(amax) = known.get(name) {
            return Ok(*amax);
        }
        let shape = self.source.stored(name).ok_or_else(|| ModelError::missing(self.path(), name))?.shape();
        let mut amax = 0.0f32;
        for rows in row_ranges(&shape, CHUNK) {
            amax = self.source.read_rows(name, rows)?.iter().fold(amax, |a, v| a.max(v.abs()));
        }
        known.insert(name.to_owned(), amax);
        Ok(amax)
    }

    /// The largest tensor scale of the NVFP4 matrices that share one with this one.
    fn shared_scale(&self, name: &str) -> Result<f32, ModelError> {
        let mut shared = 0.0f32;
        for name in names::multiplied_together(name) {
            if matches!(self.source.stored(&name), Some(Stored::Packed { .. })) {
                shared = shared.max(self.source.read_packed_rows(&name, 0..0)?.global);
            }
        }
        Ok(shared)
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
        let packed = match self.source.stored(name)? {
            Stored::Packed { .. } => true,
            Stored::Dense { .. } => names::block_of(name).is_some_and(|block| block < self.dense_from),
        };
        let dense = self.dense.stored(name)?;
        match dense.shape()[..] {
            [rows, cols] if packed && names::is_projection(name) && cols.is_multiple_of(BLOCK) => {
                Some(Stored::Packed { rows, cols, scaling: Scaling::Two })
            }
            _ => Some(dense),
        }
    }

    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<Vec<f32>, ModelError> {
        self.dense.read_rows(name, rows)
    }

    fn reciprocal_scale(&self, name: &str, packed: &Packed) -> Result<f32, ModelError> {
        match self.source.stored(name) {
            // The library's own value, which a reciprocal of the reciprocal may miss.
            Some(Stored::Dense { float, .. }) => Ok(self.library.dialect(float).divisor(self.shared_amax(name)?)),
            _ => Ok(1.0 / packed.global),
        }
    }

    fn read_packed(&self, name: &str) -> Result<Packed, ModelError> {
        let mut packed = match self.source.stored(name) {
            Some(Stored::Packed { cols, .. }) => {
                let (own, shared) = (self.source.read_packed(name)?, self.shared_scale(name)?);
                if shared == own.global { own } else { reference::rescale(&own, cols, shared) }
            }
            Some(Stored::Dense { float, shape }) => {
                let values = self.source.read_dense(name)?;
                self.library.dialect(float).quantize(&values, shape[1], self.shared_amax(name)?)
            }
            None => return Err(ModelError::missing(self.path(), name)),
        };
        if self.library == Library::CompressedTensors {
            // What a reader of the file gets, which holds the reciprocal.
            packed.global = 1.0 / self.reciprocal_scale(name, &packed)?;
        }
        Ok(packed)
    }
}
