//! Makes the parameters of a model: their ids, the types in which they lie on the device, and the forms of masters.

use super::host::to_host;
use crate::{
    ModelError,
    bytes::FloatType,
    tensors::{Tensors, row_ranges},
};
use backend_nvfp4::{LinearSpec, Master, MasterKind, Nvfp4Kernels, Nvfp4Linear, Nvfp4Tensor, PackedMaster};
use burn::{
    module::{Param, ParamId},
    tensor::{DType, Tensor, TensorData, TensorPrimitive, backend::Backend},
};
use half::bf16;

/// Values of a tensor that go to the device at once. The host holds this many of it in f32.
const CHUNK: usize = 1 << 20;
/// Values that go to the device at once as the file holds them. Several threads read them together.
const STORED_CHUNK: usize = 8 << 20;

/// Makes parameters in the order of their ids.
pub(super) struct Forge<'a, B: Backend> {
    /// The form of masters. `None` for inference.
    pub(super) master: Option<MasterKind>,
    pub(super) spec: LinearSpec,
    pub(super) device: &'a B::Device,
    /// How many ids are taken.
    pub(super) next_id: u64,
}

/// How a dense matrix lies on the device.
#[derive(Clone, Copy)]
pub(super) struct DenseForm {
    pub(super) dtype: DType,
    /// Whether values are rounded to bf16 first. Masters of bf16 are, even on a device that computes in f32.
    pub(super) through_bf16: bool,
}

impl<B: Nvfp4Kernels> Forge<'_, B> {
    /// The form of dense matrices. A matrix that is not trained has the type in which it is multiplied.
    pub(super) fn dense(&self) -> DenseForm {
        let computed = self.spec.precision.dtype();
        match self.master.map(MasterKind::dense) {
            None => DenseForm { dtype: computed, through_bf16: false },
            Some(Master::Exact) => DenseForm { dtype: DType::F32, through_bf16: false },
            Some(_) => DenseForm { dtype: computed, through_bf16: true },
        }
    }

    /// Uploads a matrix, one range of rows after another, so that the host never holds all of it.
    pub(super) fn upload(
        &self,
        tensors: &dyn Tensors,
        name: &str,
        shape: [usize; 2],
        form: DenseForm,
    ) -> Result<Tensor<B, 2>, ModelError> {
        let ([_, width], DenseForm { dtype, .. }) = (shape, form);
        let mut tensor = Tensor::<B, 2>::from_primitive(TensorPrimitive::Float(B::unfilled(shape, dtype, self.device)));
        if tensors.is_outline() {
            return Ok(tensor);
        }
        let stored = tensors.stored(name).and_then(|stored| stored.float()).map(FloatType::dtype);
        let as_stored = stored.filter(|stored| self.converts(*stored, form));
        for range in row_ranges(&shape, if as_stored.is_some() { STORED_CHUNK } else { CHUNK }) {
            let part = [range.len(), width];
            let rows = match as_stored {
                Some(stored) => {
                    let mut data = Vec::with_capacity(part[0] * part[1] * stored.size());
                    tensors.put_rows(name, range.clone(), &mut |bytes| {
                        data.extend_from_slice(bytes);
                        Ok(())
                    })?;
                    let data = TensorData::from_bytes_vec(data, part, stored);
                    Tensor::<B, 2>::from_data(data, (self.device, stored)).cast(dtype)
                }
                None if tensors.divides(name) => {
                    self.converted(tensors.dequantize_rows(name, range.clone())?, part, form)
                }
                None => self.converted(tensors.read_rows(name, range.clone())?, part, form),
            };
            tensor = tensor.slice_assign([range, 0..width], rows);
        }
        Ok(tensor)
    }

    /// Whether the device itself converts 16-bit values of a file to `form`, with the bits that the host would compute: it keeps
    /// them, or rounds f16 to bf16 once. The host converts value by value, and the embedding of a 4B has 389 million values.
    fn converts(&self, stored: DType, form: DenseForm) -> bool {
        let takes = |from, to| stored == from && form.dtype == to;
        let exact = takes(DType::BF16, DType::BF16) || takes(DType::F16, DType::F16) && !form.through_bf16;
        (exact || takes(DType::F16, DType::BF16)) && B::supports_dtype(self.device, stored)
    }

    /// Uploads values in a form.
    fn converted(&self, mut values: Vec<f32>, part: [usize; 2], form: DenseForm) -> Tensor<B, 2> {
        let DenseForm { dtype, through_bf16 } = form;
        let data = if through_bf16 && dtype == DType::BF16 {
            TensorData::new(values.into_iter().map(bf16::from_f32).collect(), part)
        } else {
            if through_bf16 {
                values.iter_mut().for_each(|v| *v = bf16::from_f32(*v).to_f32());
            }
            TensorData::new(values, part)
        };
        Tensor::from_data(data, (self.device, dtype))
    }

    /// Makes the weight of a norm.
    pub(super) fn vector(&mut self, values: Vec<f32>) -> Param<Tensor<B, 1>> {
        let len = values.len();
        self.param(Tensor::from_data(TensorData::new(values, [len]), (self.device, DType::F32)))
    }

    /// Makes a dense matrix of values that are on the device.
    pub(super) fn matrix(&mut self, values: Tensor<B, 2>) -> Result<Param<Tensor<B, 2>>, ModelError> {
        let DenseForm { dtype, through_bf16 } = self.dense();
        let rounded = if through_bf16 && dtype == DType::F32 { rounded_to_bf16(values)? } else { values.cast(dtype) };
        Ok(self.param(rounded))
    }

    /// Makes the master weight of a linear layer of values that are on the device.
    pub(super) fn linear(&mut self, values: Tensor<B, 2>) -> Result<Nvfp4Linear<B>, ModelError> {
        if self.master != Some(MasterKind::Nvfp4) {
            return Ok(Nvfp4Linear::Master(self.matrix(values)?.into()));
        }
        let weight = B::nvfp4_quantize_master(values.into_primitive().tensor());
        Ok(self.packed_master(Nvfp4Tensor::from_primitive(weight)))
    }

    /// Makes an NVFP4 master weight.
    pub(super) fn packed_master(&mut self, weight: Nvfp4Tensor<B>) -> Nvfp4Linear<B> {
        let gradient = self.param(Tensor::zeros([1, 1], (self.device, DType::F32)));
        Nvfp4Linear::PackedMaster(PackedMaster::new(weight, gradient))
    }

    /// Makes a parameter with the next id.
    pub(super) fn param<const RANK: usize>(&mut self, tensor: Tensor<B, RANK>) -> Param<Tensor<B, RANK>> {
        self.next_id += 1;
        Param::initialized(ParamId::from(self.next_id), tensor)
    }
}

/// Rounds values to bf16 and keeps them in f32. The host does it, because the device may not know bf16.
fn rounded_to_bf16<B: Backend>(x: Tensor<B, 2>) -> Result<Tensor<B, 2>, ModelError> {
    let (device, dims) = (x.device(), x.dims());
    let values: Vec<f32> = to_host(x)?.into_iter().map(|v| bf16::from_f32(v).to_f32()).collect();
    Ok(Tensor::from_data(TensorData::new(values, dims), (&device, DType::F32)))
}
