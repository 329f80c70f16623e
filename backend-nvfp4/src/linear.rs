//! The linear layer `y = x · Wᵀ` under a recipe: forward here, gradients in `autodiff`.

use crate::{LinearSpec, Nvfp4Backend, Nvfp4Primitive, Nvfp4Tensor, Precision, Product, Recipe, tensor::float};
use burn::{
    module::{Module, Param},
    tensor::{Tensor, TensorMetadata, backend::Backend, ops::FloatTensor},
};

/// A linear layer without bias, weight `[N, K]`.
#[derive(Module, Debug)]
pub enum Nvfp4Linear<B: Backend> {
    /// A master weight in f32: training moves it, each forward quantises it as the recipe says.
    Master(Param<Tensor<B, 2>>),
    /// A weight that no recipe quantises, f32.
    Dense(Param<Tensor<B, 2>>),
    /// Packed NVFP4 codes, for inference.
    Packed(Nvfp4Tensor<B>),
}

impl<B: Nvfp4Backend> Nvfp4Linear<B> {
    /// `x` `[M, K]` in the spec's dtype to `[M, N]`.
    pub fn forward(&self, x: Tensor<B, 2>, spec: LinearSpec) -> Tensor<B, 2> {
        let x = x.into_primitive().tensor();
        match self {
            Self::Master(weight) => float(B::nvfp4_linear(x, weight.val().into_primitive().tensor(), spec)),
            Self::Dense(weight) => {
                let spec = LinearSpec { recipe: Recipe::Bf16, ..spec };
                float(B::nvfp4_linear(x, weight.val().into_primitive().tensor(), spec))
            }
            Self::Packed(weight) => {
                let weight = weight.primitive();
                float(match spec.recipe {
                    Recipe::Bf16 | Recipe::W4 => {
                        let dtype = x.dtype();
                        B::nvfp4_matmul(x, &weight, Product::Nt, dtype)
                    }
                    Recipe::W4a4 => {
                        let dtype = x.dtype();
                        let x = B::nvfp4_quantize(x, spec.activations());
                        B::nvfp4_matmul_packed(&x, &weight, dtype)
                    }
                })
            }
        }
    }

    /// Output and input features, N and K.
    pub fn dims(&self) -> [usize; 2] {
        match self {
            Self::Master(weight) | Self::Dense(weight) => weight.dims(),
            Self::Packed(weight) => weight.dims(),
        }
    }
}

/// A dense batched product, differentiable, in the given number format.
pub fn matmul<B: Nvfp4Backend, const D: usize>(
    lhs: Tensor<B, D>,
    rhs: Tensor<B, D>,
    precision: Precision,
) -> Tensor<B, D> {
    let (lhs, rhs) = (lhs.into_primitive().tensor(), rhs.into_primitive().tensor());
    float(B::dense_matmul(lhs, rhs, precision, precision.dtype()))
}

/// What the backward of a linear layer reads.
#[derive(Debug, Clone)]
pub(crate) enum Saved<B: Backend> {
    /// The operands, cast but not quantised.
    Dense { x: FloatTensor<B>, w: FloatTensor<B> },
    /// Packed weight, dense activations.
    W4 { x: FloatTensor<B>, w: Nvfp4Primitive<B> },
    /// Both packed.
    W4a4 { x: Nvfp4Primitive<B>, w: Nvfp4Primitive<B> },
}

/// `y` and what the backward needs.
pub(crate) fn forward<B: Nvfp4Backend>(
    x: FloatTensor<B>,
    w: FloatTensor<B>,
    spec: LinearSpec,
) -> (FloatTensor<B>, Saved<B>) {
    let dtype = spec.precision.dtype();
    debug_assert_eq!(x.dtype(), dtype, "activations are cast at the model's door");
    match spec.recipe {
        Recipe::Bf16 => {
            let w = cast::<B>(w, dtype);
            let wt = B::float_transpose(w.clone());
            let y = B::dense_matmul(x.clone(), wt, spec.precision, dtype);
            (y, Saved::Dense { x, w })
        }
        Recipe::W4 => {
            let w = B::nvfp4_quantize(w, spec.weights());
            (B::nvfp4_matmul(x.clone(), &w, Product::Nt, dtype), Saved::W4 { x, w })
        }
        Recipe::W4a4 => {
            let w = B::nvfp4_quantize(w, spec.weights());
            let x = B::nvfp4_quantize(x, spec.activations());
            (B::nvfp4_matmul_packed(&x, &w, dtype), Saved::W4a4 { x, w })
        }
    }
}

/// `dx = dy · W`, with the weight that the forward used.
pub(crate) fn dgrad<B: Nvfp4Backend>(dy: FloatTensor<B>, saved: &Saved<B>, spec: LinearSpec) -> FloatTensor<B> {
    match saved {
        Saved::Dense { w, .. } => B::dense_matmul(dy, w.clone(), spec.precision, spec.precision.dtype()),
        Saved::W4 { w, .. } | Saved::W4a4 { w, .. } => B::nvfp4_matmul(dy, w, Product::Nn, spec.precision.dtype()),
    }
}

/// `dW = dyᵀ · x` in f32, with the activations that the forward used.
pub(crate) fn wgrad<B: Nvfp4Backend>(dy: FloatTensor<B>, saved: &Saved<B>, spec: LinearSpec) -> FloatTensor<B> {
    let f32 = burn::tensor::DType::F32;
    match saved {
        Saved::Dense { x, .. } | Saved::W4 { x, .. } => {
            B::dense_matmul(B::float_transpose(dy), x.clone(), spec.precision, f32)
        }
        Saved::W4a4 { x, .. } => B::nvfp4_matmul(dy, x, Product::Tn, f32),
    }
}

fn cast<B: Backend>(x: FloatTensor<B>, dtype: burn::tensor::DType) -> FloatTensor<B> {
    let to: burn::tensor::FloatDType = dtype.into();
    if x.dtype() == dtype { x } else { B::float_cast(x, to) }
}
