//! The values of a tensor on the host.

use crate::ModelError;
use burn::tensor::{DType, Tensor, backend::Backend};
use half::bf16;

/// Reads the values of a float tensor to the host.
///
/// # Errors
/// If the device failed.
pub fn to_host<B: Backend, const D: usize>(x: Tensor<B, D>) -> Result<Vec<f32>, ModelError> {
    fn failed(e: impl std::fmt::Debug) -> ModelError {
        ModelError::Device(format!("{e:?}"))
    }
    let data = x.try_into_data().map_err(failed)?;
    // `iter` goes value by value through a boxed iterator, and each generated token reads a whole vocabulary of logits.
    Ok(match data.dtype {
        DType::F32 => data.into_vec().map_err(failed)?,
        DType::BF16 => data.into_vec::<bf16>().map_err(failed)?.into_iter().map(bf16::to_f32).collect(),
        _ => data.iter().collect(),
    })
}
