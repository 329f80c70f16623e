//! The test of a device's quantizer against the reference, byte by byte, and of its products against sums in f64.

use crate::CliError;
use backend_nvfp4::{
    BlockShape, Nvfp4Kernels, Nvfp4Tensor, Operand, Precision, Product, QuantizeSpec, Rounding, Scaling, View,
    reference,
};
use burn::tensor::{DType, Tensor, TensorData, TensorPrimitive};
use model_qwen3::weights::to_host;

/// Output features, and input features.
const SHAPE: [usize; 2] = [64, 256];

/// The rows that a packed weight is multiplied by.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Rows {
    Any,
    /// Each is the newest token of a sequence.
    NewestTokens,
    Packed,
}

/// Values between -1 and 1 that repeat nowhere.
pub(super) fn values(len: usize, seed: f32) -> Vec<f32> {
    (0..len).map(|i| (i as f32 * 0.37 + seed).sin()).collect()
}

/// A matrix of [`values`] on the device.
pub(super) fn matrix<B: Nvfp4Kernels>(
    [rows, columns]: [usize; 2],
    seed: f32,
    dtype: DType,
    device: &B::Device,
) -> Tensor<B, 2> {
    Tensor::from_data(TensorData::new(values(rows * columns, seed), [rows, columns]), (device, dtype))
}

const SPEC: QuantizeSpec = QuantizeSpec { scaling: Scaling::Two, block: BlockShape::Row, rounding: Rounding::Nearest };

/// Tests the quantizer.
///
/// # Errors
/// If the device fails.
pub(super) fn quantizer<B: Nvfp4Kernels>(device: &B::Device) -> Result<Option<String>, CliError> {
    let [n, k] = SHAPE;
    let packed = Nvfp4Tensor::quantize(matrix::<B>(SHAPE, 1.0, DType::F32, device), SPEC);
    let expected = reference::quantize(&values(n * k, 1.0), View::row_major(n, k), SPEC);
    Ok((packed.to_packed().map_err(failed)? != expected).then(|| "it gives other bytes than the reference".into()))
}

/// Tests the product of a matrix of `m` rows and a packed weight, with a result of type `out`.
///
/// # Errors
/// If the device fails.
pub(super) fn product<B: Nvfp4Kernels>(
    device: &B::Device,
    precision: Precision,
    m: usize,
    rows: Rows,
    out: DType,
) -> Result<Option<String>, CliError> {
    let [n, k] = SHAPE;
    let weight = Nvfp4Tensor::quantize(matrix::<B>(SHAPE, 1.0, DType::F32, device), SPEC);
    let x = matrix::<B>([m, k], 0.0, precision.dtype(), device);
    let packed = (rows == Rows::Packed).then(|| Nvfp4Tensor::quantize(x.clone(), SPEC));
    let dense = || x.clone().into_primitive().tensor();
    let made = match &packed {
        None if rows == Rows::NewestTokens => {
            let weights = vec![Operand::Packed(weight.primitive())];
            B::token_products(Operand::Dense(dense()), weights, precision).remove(0)
        }
        None => B::nvfp4_matmul(dense(), &weight.primitive(), Product::Nt, out),
        Some(x) => B::nvfp4_matmul_packed(&x.primitive(), &weight.primitive(), Product::Nt, precision.dtype(), out),
    };
    let made = to_host(Tensor::<B, 2>::from_primitive(TensorPrimitive::Float(made)))?;
    let dense = |packed: &Nvfp4Tensor<B>, rows: usize| {
        Ok::<_, CliError>(reference::dequantize(&packed.to_packed().map_err(failed)?, rows, k))
    };
    let left = packed.as_ref().map_or_else(|| Ok(to_host(x.clone())?), |x| dense(x, m))?;
    let right = dense(&weight, n)?;
    for (i, y) in made.iter().enumerate() {
        let (row, column) = (&left[i / n * k..][..k], &right[i % n * k..][..k]);
        let terms = || row.iter().zip(column).map(|(a, b)| f64::from(*a) * f64::from(*b));
        let (sum, size) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
        // A result of 16 bits is rounded to 8 bits.
        let rounding = if out == DType::F32 { 0.0 } else { sum.abs() / 256.0 };
        let off = (f64::from(*y) - sum).abs();
        if off.is_nan() || off > 1e-5 * size + rounding {
            return Ok(Some(format!("it multiplies wrongly: {y} instead of {sum}")));
        }
    }
    Ok(None)
}

fn failed(error: backend_nvfp4::Nvfp4Error) -> CliError {
    CliError::DeviceFailed(error.to_string())
}
