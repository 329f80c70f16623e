//! The test of a device's quantizer against the reference, byte by byte, and of its products against sums in f64: those of the
//! forward pass, of new tokens, and of the backward pass.

use crate::CliError;
use backend_nvfp4::{
    BlockShape, Nvfp4Kernels, Nvfp4Tensor, Operand, Precision, Product, QuantizeSpec, Rounding, Scaling, View,
    reference,
};
use burn::tensor::{DType, Tensor, TensorData, TensorPrimitive, ops::FloatTensor};
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
    let k = SHAPE[1];
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
    let left = packed.as_ref().map_or_else(|| Ok(to_host(x.clone())?), |x| decoded(x, [m, k]))?;
    Ok(wrong::<B>(made, &left, &decoded(&weight, SHAPE)?, k, out != DType::F32)?.map(|what| format!("it {what}")))
}

/// Tests the products of the backward pass: `dx = dy w` with a packed weight, and `dw = dyᵀ x`, of `m` rows, with results in f32.
///
/// # Errors
/// If the device fails.
pub(super) fn gradients<B: Nvfp4Kernels>(
    device: &B::Device,
    precision: Precision,
    m: usize,
) -> Result<Option<String>, CliError> {
    let [n, k] = SHAPE;
    let weight = Nvfp4Tensor::quantize(matrix::<B>(SHAPE, 1.0, DType::F32, device), SPEC);
    let (x, dy) =
        (matrix::<B>([m, k], 0.0, precision.dtype(), device), matrix::<B>([m, n], 2.0, precision.dtype(), device));
    let dense = |x: &Tensor<B, 2>| x.clone().into_primitive().tensor();
    let dx = B::nvfp4_matmul(dense(&dy), &weight.primitive(), Product::Nn, DType::F32);
    let operands = [Operand::Dense(dense(&dy)), Operand::Dense(dense(&x))].map(|operand| vec![operand]);
    let [dys, xs] = operands;
    let dw = B::products(Product::Tn, dys, xs, precision, DType::F32).remove(0);
    let (x, dy, w) = (to_host(x)?, to_host(dy)?, decoded(&weight, SHAPE)?);
    let columns = transposed(&dy, [m, n]);
    for (name, made, left, right, terms) in
        [("dx", dx, &dy, transposed(&w, SHAPE), n), ("dw", dw, &columns, transposed(&x, [m, k]), m)]
    {
        if let Some(what) = wrong::<B>(made, left, &right, terms, false)? {
            return Ok(Some(format!("{name}: it {what}")));
        }
    }
    Ok(None)
}

/// What is wrong with the product of two matrices whose rows have `terms` values: each row of `left` with each of `right`.
fn wrong<B: Nvfp4Kernels>(
    made: FloatTensor<B>,
    left: &[f32],
    right: &[f32],
    terms: usize,
    is_rounded: bool,
) -> Result<Option<String>, CliError> {
    let made = to_host(Tensor::<B, 2>::from_primitive(TensorPrimitive::Float(made)))?;
    let (rows, columns) = (left.len() / terms, right.len() / terms);
    if made.len() != rows * columns {
        return Ok(Some(format!("makes {} values instead of {}", made.len(), rows * columns)));
    }
    for (i, y) in made.iter().enumerate() {
        let (row, column) = (&left[i / columns * terms..][..terms], &right[i % columns * terms..][..terms]);
        let products = || row.iter().zip(column).map(|(a, b)| f64::from(*a) * f64::from(*b));
        let (sum, size) = (products().sum::<f64>(), products().map(f64::abs).sum::<f64>());
        // A result of 16 bits is rounded to 8 bits.
        let rounding = if is_rounded { sum.abs() / 256.0 } else { 0.0 };
        let off = (f64::from(*y) - sum).abs();
        if off.is_nan() || off > 1e-5 * size + rounding {
            return Ok(Some(format!("multiplies wrongly: {y} instead of {sum}")));
        }
    }
    Ok(None)
}

/// The values of a packed matrix by the reference.
fn decoded<B: Nvfp4Kernels>(packed: &Nvfp4Tensor<B>, [rows, columns]: [usize; 2]) -> Result<Vec<f32>, CliError> {
    Ok(reference::dequantize(&packed.to_packed().map_err(failed)?, rows, columns))
}

/// The columns of a matrix as rows.
fn transposed(values: &[f32], [rows, columns]: [usize; 2]) -> Vec<f32> {
    (0..columns).flat_map(|column| (0..rows).map(move |row| values[row * columns + column])).collect()
}

fn failed(error: backend_nvfp4::Nvfp4Error) -> CliError {
    CliError::DeviceFailed(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::backend::NdArray;

    /// The right products pass, and one that differs in one value does not.
    #[test]
    fn a_wrong_product_is_found() {
        let device = Default::default();
        assert_eq!(gradients::<NdArray>(&device, Precision::F32, 32).unwrap(), None);
        let (left, right) = (values(6, 1.0), values(12, 2.0));
        let y = |row: usize, column: usize| (0..3).map(|i| left[row * 3 + i] * right[column * 3 + i]).sum::<f32>();
        let made: Vec<f32> = (0..8).map(|i| y(i / 4, i % 4)).collect();
        let found = |made: &[f32]| {
            let made = Tensor::<NdArray, 1>::from_floats(made, &device).reshape([2, made.len() / 2]);
            wrong::<NdArray>(made.into_primitive().tensor(), &left, &right, 3, false).unwrap()
        };
        assert_eq!(found(&made), None);
        for other in [f32::NAN, made[5] + 0.001] {
            let mut made = made.clone();
            made[5] = other;
            assert!(found(&made).is_some_and(|text| text.starts_with("multiplies wrongly: ")), "{other}");
        }
        assert!(found(&made[..6]).is_some());
    }
}
