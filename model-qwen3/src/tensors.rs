//! Tensors by name, whether they are in a container, in a model on a device, or about to be converted. A tensor is read
//! whole or in ranges of rows, so that no caller needs more than one in memory.

use crate::{ModelError, bytes::FloatType};
use backend_nvfp4::{
    GivenScale, Packed, QuantizeSpec, Scaling, View,
    layout::{scales_per_row, words_per_row},
    reference,
};
use std::{ops::Range, path::Path};

/// How a tensor is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stored {
    /// As floats.
    Dense {
        /// The type of the floats.
        float: FloatType,
        /// The tensor's shape.
        shape: Vec<usize>,
    },
    /// As NVFP4 codes and scales.
    Packed {
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix.
        cols: usize,
        /// Whether the tensor has a scale of its own.
        scaling: Scaling,
    },
}

impl Stored {
    /// The type of its values, if they are floats.
    pub fn float(&self) -> Option<FloatType> {
        match self {
            Self::Dense { float, .. } => Some(*float),
            Self::Packed { .. } => None,
        }
    }

    /// The tensor's logical shape.
    pub fn shape(&self) -> Vec<usize> {
        match self {
            Self::Dense { shape, .. } => shape.clone(),
            Self::Packed { rows, cols, .. } => vec![*rows, *cols],
        }
    }
}

/// What takes the bytes of a file, piece by piece.
pub type Put<'a> = &'a mut dyn FnMut(&[u8]) -> Result<(), ModelError>;

/// Named tensors that can be read one at a time.
pub trait Tensors: Sync {
    /// The file or folder that the tensors come from, for messages.
    fn path(&self) -> &Path;

    /// The names of all tensors, in file order.
    fn names(&self) -> Vec<String>;

    /// How a tensor is stored, if it exists.
    fn stored(&self, name: &str) -> Option<Stored>;

    /// Whether any of these tensors is NVFP4.
    fn holds_nvfp4(&self) -> bool {
        self.names().iter().any(|name| matches!(self.stored(name), Some(Stored::Packed { .. })))
    }

    /// Whether training quantizes a head of this name. It does if the file holds the head in NVFP4.
    fn trains_quantized(&self, name: &str) -> bool {
        matches!(self.stored(name), Some(Stored::Packed { .. }))
    }

    /// Whether training keeps this tensor's codes unchanged, because a run froze them.
    fn keeps_codes(&self, _name: &str) -> bool {
        false
    }

    /// Whether these tensors are an outline ([`crate::weights::outline()`]), whose matrices have no values and are not read.
    fn is_outline(&self) -> bool {
        false
    }

    /// Reads the rows `rows` of a dense tensor as f32. A vector has one row.
    ///
    /// # Errors
    /// If the tensor is missing or NVFP4, the system fails, or a value is not finite.
    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<Vec<f32>, ModelError>;

    /// Hands over the rows `rows` of a dense tensor as a file holds them, in order, in one piece or in several.
    ///
    /// # Errors
    /// As [`Self::read_rows`], or if `put` fails.
    fn put_rows(&self, name: &str, rows: Range<usize>, put: Put) -> Result<(), ModelError> {
        match self.stored(name) {
            Some(Stored::Dense { float, .. }) => put(&float.encode(&self.read_rows(name, rows)?)),
            Some(Stored::Packed { .. }) => {
                Err(ModelError::weights(self.path(), format!("{name:?} is NVFP4; floats are needed")))
            }
            None => Err(ModelError::missing(self.path(), name)),
        }
    }

    /// Reads the codes and scales of an NVFP4 tensor.
    ///
    /// # Errors
    /// If the tensor is missing or dense, the system fails, or a file holds scales that are NaN or negative.
    fn read_packed(&self, name: &str) -> Result<Packed, ModelError>;

    /// Reads the codes and scales of the rows `rows` of an NVFP4 tensor. No rows give its tensor scale.
    ///
    /// # Errors
    /// As [`Self::read_packed`].
    fn read_packed_rows(&self, name: &str, rows: Range<usize>) -> Result<Packed, ModelError> {
        let packed = self.read_packed(name)?;
        let cols = row_width(&self.stored(name).ok_or_else(|| ModelError::missing(self.path(), name))?.shape());
        let (words, scales) = (words_per_row(cols), scales_per_row(cols));
        Ok(Packed {
            codes: packed.codes[rows.start * words..rows.end * words].to_vec(),
            scales: packed.scales[rows.start * scales..rows.end * scales].to_vec(),
            global: packed.global,
        })
    }

    /// The values of the rows `rows` of an NVFP4 tensor, with the arithmetic of the library whose format the file has.
    ///
    /// # Errors
    /// As [`Self::read_packed`].
    fn dequantize_rows(&self, name: &str, rows: Range<usize>) -> Result<Vec<f32>, ModelError> {
        let cols = row_width(&self.stored(name).ok_or_else(|| ModelError::missing(self.path(), name))?.shape());
        Ok(reference::dequantize(&self.read_packed_rows(name, rows.clone())?, rows.len(), cols))
    }

    /// The values of the rows `rows` of a tensor, dense or NVFP4.
    ///
    /// # Errors
    /// As [`Self::read_rows`] or [`Self::read_packed`].
    fn values(&self, name: &str, rows: Range<usize>) -> Result<Vec<f32>, ModelError> {
        match self.stored(name) {
            Some(Stored::Packed { .. }) => self.dequantize_rows(name, rows),
            _ => self.read_rows(name, rows),
        }
    }

    /// Quantizes the values of a matrix. Those of a model on a device are quantized there, to the same bits.
    ///
    /// # Errors
    /// As [`Self::values`].
    fn quantized(&self, name: &str, spec: QuantizeSpec) -> Result<Packed, ModelError> {
        let shape = self.stored(name).ok_or_else(|| ModelError::missing(self.path(), name))?.shape();
        let (rows, cols) = (row_count(&shape), row_width(&shape));
        let values = self.values(name, 0..rows)?;
        Ok(reference::quantize(&values, View::row_major(rows, cols), spec))
    }

    /// Whether the library whose format the file has divides by the reciprocal of this NVFP4 tensor's scale, so that the values of
    /// [`Self::dequantize_rows`] are rounded in another way than those of [`Self::read_packed`].
    fn divides(&self, _name: &str) -> bool {
        false
    }

    /// The reciprocal of an NVFP4 tensor's scale, for files that hold that.
    ///
    /// # Errors
    /// As [`Self::read_packed`].
    fn reciprocal_scale(&self, _name: &str, packed: &Packed) -> Result<f32, ModelError> {
        Ok(1.0 / packed.global)
    }

    /// Whether the file gives a tensor scale for the activations of this layer.
    fn gives_input_scale(&self, _name: &str) -> bool {
        false
    }

    /// Whether the file gives a tensor scale for the activations of any layer.
    fn has_input_scales(&self) -> bool {
        self.names().iter().any(|name| self.gives_input_scale(name))
    }

    /// The tensor scale that the file gives the activations of this layer, if it gives one.
    ///
    /// # Errors
    /// If it is not a positive number, or the system fails.
    fn input_scale(&self, _name: &str) -> Result<Option<GivenScale>, ModelError> {
        Ok(None)
    }

    /// Reads a whole dense tensor as f32.
    ///
    /// # Errors
    /// As [`Self::read_rows`].
    fn read_dense(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        let stored = self.stored(name).ok_or_else(|| ModelError::missing(self.path(), name))?;
        self.read_rows(name, 0..row_count(&stored.shape()))
    }
}

/// The ranges of rows to read one after another, so that a range has about `values` values.
pub fn row_ranges(shape: &[usize], values: usize) -> impl Iterator<Item = Range<usize>> {
    let rows = row_count(shape);
    let step = (values / row_width(shape).max(1)).max(1);
    (0..rows).step_by(step).map(move |start| start..(start + step).min(rows))
}

/// Values in a row. A vector is one row.
pub fn row_width(shape: &[usize]) -> usize {
    if shape.len() < 2 { shape.iter().product() } else { shape[1..].iter().product() }
}

/// Rows of a tensor. A vector is one row.
pub(crate) fn row_count(shape: &[usize]) -> usize {
    if shape.len() < 2 { 1 } else { shape[0] }
}
