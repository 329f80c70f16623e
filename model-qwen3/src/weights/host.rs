//! The values of a tensor on the host.

use crate::{ModelError, bytes::FloatType};
use burn::tensor::{DType, Tensor, TensorData, backend::Backend};
use half::bf16;

/// Bytes that are transferred at a time. CubeCL reads into pinned memory, which it keeps, and of which it takes pages that
/// are up to eight times as large as what is read: pages for a whole embedding took 9 GiB and four seconds on an H200.
pub const TRANSFER: usize = 32 << 20;

/// Reads the values of a float tensor to the host.
///
/// # Errors
/// If the device failed.
pub fn to_host<B: Backend, const D: usize>(x: Tensor<B, D>) -> Result<Vec<f32>, ModelError> {
    let data = to_data(x)?;
    // `iter` goes value by value through a boxed iterator, and each generated token reads a whole vocabulary of logits.
    Ok(match data.dtype {
        DType::F32 => data.into_vec().map_err(failed)?,
        DType::BF16 => data.into_vec::<bf16>().map_err(failed)?.into_iter().map(bf16::to_f32).collect(),
        _ => data.iter().collect(),
    })
}

/// Reads the values of a float tensor to the host, in the type that they have on the device.
///
/// # Errors
/// If the device failed.
pub(super) fn to_data<B: Backend, const D: usize>(x: Tensor<B, D>) -> Result<TensorData, ModelError> {
    x.try_into_data().map_err(failed)
}

/// The first value that is not finite.
pub(super) fn not_finite(data: &TensorData) -> Option<f32> {
    match data.dtype {
        DType::F32 => first(data.as_slice::<f32>().ok()?, |x| x.is_finite()).copied(),
        DType::BF16 => first(data.as_slice::<bf16>().ok()?, |x| x.is_finite()).map(|x| x.to_f32()),
        _ => data.iter().find(|x: &f32| !x.is_finite()),
    }
}

/// The first value that is not good. Whole pieces are looked at without a branch, many values at a time.
fn first<T>(values: &[T], good: impl Fn(&T) -> bool) -> Option<&T> {
    let bad = |piece: &&[T]| !piece.iter().fold(true, |all, x| all & good(x));
    values.chunks(4096).find(bad)?.iter().find(|x| !good(x))
}

/// The type of values in a file, if a device hands values of this type over as the file holds them.
pub(super) fn as_in_files(dtype: DType) -> Option<FloatType> {
    match dtype {
        DType::F32 => Some(FloatType::F32),
        DType::BF16 => Some(FloatType::Bf16),
        _ => None,
    }
}

fn failed(e: impl std::fmt::Debug) -> ModelError {
    ModelError::Device(format!("{e:?}"))
}
