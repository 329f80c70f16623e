//! A packed matrix in the buffers of a CubeCL device.

use super::launch::{arg, empty, launched};
use crate::packed::Packed;
use burn::tensor::DType;
use burn_cubecl::{CubeRuntime, tensor::CubeTensor};
use kernels_cubecl::{dequantize::dequantize, operands::PackedArgs};

/// A packed matrix in device buffers.
pub(super) type PackedCube<R> = Packed<CubeTensor<R>, CubeTensor<R>, CubeTensor<R>>;

impl<R: CubeRuntime> Packed<CubeTensor<R>, CubeTensor<R>, CubeTensor<R>> {
    /// The buffers as kernels take them.
    pub(super) fn args(&self) -> PackedArgs<R> {
        let [rows, cols] = self.dims();
        PackedArgs { codes: arg(&self.codes), scales: arg(&self.scales), global: arg(&self.global), rows, cols }
    }

    /// Computes `code * scale` as `dtype`, which holds it exactly, and multiplies by the tensor scale if `scaled`.
    pub(super) fn values(&self, dtype: DType, scaled: bool) -> CubeTensor<R> {
        let [rows, cols] = self.dims();
        let y = empty(&self.codes, [rows, cols], dtype);
        launched(dequantize(&self.codes.client, self.args(), scaled, arg(&y), dtype.into()));
        y
    }
}
