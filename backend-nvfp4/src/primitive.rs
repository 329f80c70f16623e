//! Conversions between Burn's `Tensor`, which models are written in, and the primitives that backend operations take.

use burn::tensor::{Tensor, TensorPrimitive, backend::Backend, ops::FloatTensor};

/// Wraps a float primitive in a `Tensor`.
pub(crate) fn tensor<B: Backend, const RANK: usize>(x: FloatTensor<B>) -> Tensor<B, RANK> {
    Tensor::from_primitive(TensorPrimitive::Float(x))
}

/// Takes the float primitive out of a `Tensor`.
pub(crate) fn primitive<B: Backend, const RANK: usize>(x: Tensor<B, RANK>) -> FloatTensor<B> {
    x.into_primitive().tensor()
}
