//! The tensors of a model in memory, as [`Tensors`] that can be written to a file.

use super::{
    Field, fields,
    host::{HostRows, PIECES, TRANSFER, as_in_files, not_finite, rows_to_data},
};
use crate::{
    ModelError,
    bytes::FloatType,
    model::Qwen3,
    tensors::{Put, Stored, Tensors, row_count, row_width},
};
use backend_nvfp4::{Nvfp4Kernels, Nvfp4Tensor, Packed, QuantizeSpec, Scaling};
use burn::tensor::{TensorData, backend::Backend};
use std::{
    ops::Range,
    path::Path,
    sync::{Mutex, PoisonError},
};

/// A model's tensors, read from its device: packed weights in NVFP4, the others as floats. A value that is not finite is
/// an error.
pub struct Live<'a, B: Backend> {
    fields: Vec<(String, Field<'a, B>)>,
    /// Bytes that are read from the device at a time, unless a reader asks for more.
    transfer: usize,
    /// What was read last: writers read one range of rows after another and one tensor after another, and one transfer
    /// serves many.
    fetched: Mutex<Vec<Fetched>>,
}

/// Rows of a tensor on the host.
struct Fetched {
    name: String,
    rows: Range<usize>,
    data: TensorData,
}

impl<'a, B: Nvfp4Kernels> Live<'a, B> {
    /// Shows a model's tensors.
    pub fn new(model: &'a Qwen3<B>) -> Self {
        Self { fields: fields(model), transfer: TRANSFER, fetched: Mutex::default() }
    }

    /// Reads about so many bytes from the device at a time.
    pub fn in_transfers_of(self, bytes: usize) -> Self {
        Self { transfer: bytes, ..self }
    }

    /// No file gets such a value: it would replace a good one.
    fn not_finite(&self, name: &str, value: f32) -> ModelError {
        ModelError::weights(self.path(), format!("{name:?} holds the value {value}; nothing was written"))
    }

    /// Reads codes and scales to the host.
    fn on_the_host(&self, name: &str, tensor: &Nvfp4Tensor<B>) -> Result<Packed, ModelError> {
        let packed = tensor.to_packed().map_err(ModelError::nvfp4(name))?;
        // E4M3 has no infinity, and its NaN has all bits but the sign.
        let scales_are_finite = packed.scales.iter().all(|scale| scale & 0x7f != 0x7f);
        match packed.global.is_finite() {
            true if scales_are_finite => Ok(packed),
            true => Err(self.not_finite(name, f32::NAN)),
            false => Err(self.not_finite(name, packed.global)),
        }
    }

    fn field(&self, name: &str) -> Option<&Field<'a, B>> {
        self.fields.iter().find(|(n, _)| n == name).map(|(_, f)| f)
    }

    /// Gives the bytes of some rows, piece by piece, and the type of their values to `take`.
    fn with_rows(
        &self,
        name: &str,
        mut rows: Range<usize>,
        mut take: impl FnMut(FloatType, &[u8]) -> Result<(), ModelError>,
    ) -> Result<(), ModelError> {
        let field = self.field(name).ok_or_else(|| ModelError::missing(self.path(), name))?;
        let mut fetched = self.fetched.lock().unwrap_or_else(PoisonError::into_inner);
        while !rows.is_empty() {
            let holds = |f: &&Fetched| f.name == name && f.rows.contains(&rows.start);
            if fetched.iter().find(holds).is_none() {
                let last = fetched.pop().map(|f| f.name);
                fetched.clear(); // The host never holds two transfers.
                *fetched = self.fetch(name, &rows, last.as_deref())?;
            }
            let Fetched { rows: held, data, .. } = fetched.iter().find(holds).expect("it was just fetched");
            let float = as_in_files(data.dtype)
                .ok_or_else(|| ModelError::Device(format!("{name:?} has values of type {:?}", data.dtype)))?;
            let (width, end) = (row_width(&field.shape()) * float.size(), rows.end.min(held.end));
            take(float, &data.bytes[(rows.start - held.start) * width..(end - held.start) * width])?;
            rows.start = end;
        }
        Ok(())
    }

    /// Reads at least these rows of a tensor. Reads what follows it too, as much as one transfer takes, if tensors are read in
    /// order so far: `last` is the one that was read before.
    fn fetch(&self, name: &str, rows: &Range<usize>, last: Option<&str>) -> Result<Vec<Fetched>, ModelError> {
        let place = |name: &str| self.fields.iter().position(|(n, _)| n == name);
        let in_order = last.is_none_or(|last| last == name || place(last).map(|at| at + 1) == place(name));
        let (mut wanted, mut size) = (Vec::new(), 0);
        for (next, field) in self.fields.iter().skip_while(|(n, _)| n != name) {
            let shape = field.shape();
            let (all, width) = (row_count(&shape), row_width(&shape) * field.float().size());
            let range = if next == name {
                rows.start..all.min(rows.start + (self.transfer / width).max(rows.len()))
            } else if in_order && field.packed().is_none() && size + all * width <= self.transfer {
                0..all
            } else {
                break;
            };
            size += range.len() * width;
            wanted.push((next, field, range));
        }
        let matrices = wanted.iter().map(|(_, field, rows)| (field.matrix(), rows.clone())).collect();
        let pieces = rows_to_data(matrices, self.transfer / PIECES)?.into_iter();
        let checked = pieces.map(|HostRows { matrix, rows, data }| {
            let name = wanted[matrix].0;
            match not_finite(&data) {
                Some(value) => Err(self.not_finite(name, value)),
                None => Ok(Fetched { name: name.clone(), rows, data }),
            }
        });
        checked.collect()
    }
}

impl<B: Nvfp4Kernels> Tensors for Live<'_, B> {
    fn path(&self) -> &Path {
        Path::new("model in memory")
    }

    fn names(&self) -> Vec<String> {
        self.fields.iter().map(|(n, _)| n.clone()).collect()
    }

    fn stored(&self, name: &str) -> Option<Stored> {
        let field = self.field(name)?;
        Some(match field.packed() {
            Some(w) => {
                let [rows, cols] = w.dims();
                Stored::Packed { rows, cols, scaling: Scaling::Two }
            }
            None => Stored::Dense { float: field.float(), shape: field.shape() },
        })
    }

    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<Vec<f32>, ModelError> {
        let width = self.field(name).map_or(0, |field| row_width(&field.shape()));
        let mut values = Vec::with_capacity(rows.len() * width);
        self.with_rows(name, rows, |float, bytes| {
            values.extend(float.decode(bytes));
            Ok(())
        })?;
        Ok(values)
    }

    fn put_rows(&self, name: &str, rows: Range<usize>, put: Put) -> Result<(), ModelError> {
        self.with_rows(name, rows, |_, bytes| put(bytes))
    }

    fn read_packed(&self, name: &str) -> Result<Packed, ModelError> {
        match self.field(name).and_then(Field::packed) {
            Some(w) => self.on_the_host(name, w),
            _ => Err(ModelError::weights(self.path(), format!("{name:?} is dense; NVFP4 is needed"))),
        }
    }

    fn quantized(&self, name: &str, spec: QuantizeSpec) -> Result<Packed, ModelError> {
        let field = self.field(name).ok_or_else(|| ModelError::missing(self.path(), name))?;
        let quantized = self.on_the_host(name, &Nvfp4Tensor::quantize(field.matrix(), spec));
        // The codes do not tell which value is not finite; the values do.
        quantized.or_else(|error| self.read_rows(name, 0..row_count(&field.shape())).and(Err(error)))
    }
}
