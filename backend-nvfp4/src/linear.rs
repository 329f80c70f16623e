//! The linear layer `y = x · Wᵀ` under a recipe: forward here, gradients in `autodiff`.

use crate::{
    LinearSpec, Nvfp4Backend, Nvfp4Parts, Nvfp4Primitive, Nvfp4Tensor, Precision, Product, Recipe, tensor::float,
};
use burn::{
    module::{Module, Param},
    tensor::{DType, Shape, Tensor, TensorMetadata, backend::Backend, ops::FloatTensor},
};

/// A linear layer without bias, weight `[N, K]`.
#[derive(Module, Debug)]
pub enum Nvfp4Linear<B: Backend> {
    /// A master weight, f32 or bf16: training moves it, each forward quantises it as the recipe says.
    Master(Param<Tensor<B, 2>>),
    /// A weight that no recipe quantises.
    Dense(Param<Tensor<B, 2>>),
    /// Packed NVFP4 codes, for inference.
    Packed(Nvfp4Tensor<B>),
    /// Packed NVFP4 codes that training moves.
    PackedMaster(PackedMaster<B>),
}

/// An NVFP4 master weight.
#[derive(Module, Debug)]
pub struct PackedMaster<B: Backend> {
    /// Takes the gradient `[N, K]`: autodiff knows no gradient of codes. One value, expanded; never read.
    pub gradient: Param<Tensor<B, 2>>,
    /// The codes.
    pub weight: Nvfp4Tensor<B>,
}

/// The weight of a linear layer, `[N, K]`.
#[derive(Debug, Clone)]
pub enum LinearWeight<B: Backend> {
    /// A master, f32 or bf16.
    Float(FloatTensor<B>),
    /// Codes, and what takes their gradient.
    Packed {
        /// The codes.
        codes: Nvfp4Primitive<B>,
        /// See [`PackedMaster::gradient`].
        gradient: FloatTensor<B>,
    },
}

impl<B: Nvfp4Backend> Nvfp4Linear<B> {
    /// `x` `[M, K]` in the spec's dtype to `[M, N]`.
    pub fn forward(&self, x: Tensor<B, 2>, spec: LinearSpec) -> Tensor<B, 2> {
        let x = x.into_primitive().tensor();
        let primitive = |p: &Param<Tensor<B, 2>>| p.val().into_primitive().tensor();
        float(match self {
            Self::Master(weight) => B::nvfp4_linear(x, LinearWeight::Float(primitive(weight)), spec),
            Self::Dense(weight) => {
                let spec = LinearSpec { recipe: Recipe::Bf16, ..spec };
                B::nvfp4_linear(x, LinearWeight::Float(primitive(weight)), spec)
            }
            Self::Packed(weight) => packed_forward::<B>(x, weight.primitive(), spec).0,
            Self::PackedMaster(weight) => {
                let (codes, gradient) = (weight.weight.primitive(), primitive(&weight.gradient));
                B::nvfp4_linear(x, LinearWeight::Packed { codes, gradient }, spec)
            }
        })
    }

    /// Output and input features, N and K.
    pub fn dims(&self) -> [usize; 2] {
        match self {
            Self::Master(weight) | Self::Dense(weight) => weight.dims(),
            Self::Packed(weight) => weight.dims(),
            Self::PackedMaster(weight) => weight.weight.dims(),
        }
    }
}

impl<B: Nvfp4Backend> PackedMaster<B> {
    /// A master of these codes; `gradient` is a parameter's id and one value `[1, 1]`.
    pub fn new(weight: Nvfp4Tensor<B>, gradient: Param<Tensor<B, 2>>) -> Self {
        let dims = weight.dims();
        let (id, value, mapper) = gradient.consume();
        let gradient = Param::from_mapped_value(id, value.expand(dims).detach().require_grad(), mapper);
        Self { gradient, weight }
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
    /// Packed weight; the backward packs activations and gradients its own way.
    Nvfp4 { x: FloatTensor<B>, w: Nvfp4Primitive<B>, parts: Nvfp4Parts },
}

/// `y` and what the backward needs.
pub(crate) fn forward<B: Nvfp4Backend>(
    x: FloatTensor<B>,
    w: LinearWeight<B>,
    spec: LinearSpec,
) -> (FloatTensor<B>, Saved<B>) {
    let dtype = spec.precision.dtype();
    debug_assert_eq!(x.dtype(), dtype, "activations are cast at the model's door");
    match (w, spec.recipe) {
        (LinearWeight::Float(w), Recipe::Bf16) => {
            let w = cast::<B>(w, dtype);
            let wt = B::float_transpose(w.clone());
            let y = B::dense_matmul(x.clone(), wt, spec.precision, dtype);
            (y, Saved::Dense { x, w })
        }
        (LinearWeight::Float(w), _) => packed_forward(x, B::nvfp4_quantize(w, spec.weights()), spec),
        (LinearWeight::Packed { codes, .. }, _) => packed_forward(x, codes, spec),
    }
}

/// With a weight that is packed, whatever made it so.
fn packed_forward<B: Nvfp4Backend>(
    x: FloatTensor<B>,
    w: Nvfp4Primitive<B>,
    spec: LinearSpec,
) -> (FloatTensor<B>, Saved<B>) {
    let dtype = spec.precision.dtype();
    match spec.recipe {
        Recipe::Bf16 | Recipe::W4 => (B::nvfp4_matmul(x.clone(), &w, Product::Nt, dtype), Saved::W4 { x, w }),
        Recipe::W4a4 => {
            let x = B::nvfp4_quantize(x, spec.activations());
            (B::nvfp4_matmul_packed(&x, &w, Product::Nt, dtype, dtype), Saved::W4a4 { x, w })
        }
        Recipe::Nvfp4(parts) => {
            let packed = B::nvfp4_quantize(x.clone(), spec.activations());
            (B::nvfp4_matmul_packed(&packed, &w, Product::Nt, dtype, dtype), Saved::Nvfp4 { x, w, parts })
        }
    }
}

/// `dx = dy · W` and `dW = dyᵀ · x` in f32, with the operands that the forward used, each if it is `wanted`. The weight's
/// gradient comes first: with it the activations go, before `dx` takes their place.
pub(crate) fn backward<B: Nvfp4Backend>(
    dy: FloatTensor<B>,
    saved: Saved<B>,
    spec: LinearSpec,
    wanted: [bool; 2],
) -> [Option<FloatTensor<B>>; 2] {
    let ([for_x, for_w], dtype, f32) = (wanted, spec.precision.dtype(), DType::F32);
    let dense_dw =
        |dy: &FloatTensor<B>, x| for_w.then(|| B::dense_matmul(B::float_transpose(dy.clone()), x, spec.precision, f32));
    let packed_dx = |dy, w| for_x.then(|| B::nvfp4_matmul(dy, w, Product::Nn, dtype));
    match saved {
        Saved::Dense { x, w } => {
            let dw = dense_dw(&dy, x);
            [for_x.then(|| B::dense_matmul(dy, w, spec.precision, dtype)), dw]
        }
        Saved::W4 { x, w } => {
            let dw = dense_dw(&dy, x);
            [packed_dx(dy, &w), dw]
        }
        Saved::W4a4 { x, w } => {
            let dw = for_w.then(|| B::nvfp4_matmul(dy.clone(), &x, Product::Tn, f32));
            drop(x);
            [packed_dx(dy, &w), dw]
        }
        Saved::Nvfp4 { x, w, parts } => {
            let dw = for_w.then(|| {
                // Blocks run along the tokens, which are summed over. The rotation cancels in the product.
                let across = |x, spec| B::nvfp4_quantize_across(in_blocks_of_16::<B>(x), spec, parts.hadamard);
                let dy = across(dy.clone(), spec.gradients(parts, true));
                let x = across(x, spec.activations());
                B::nvfp4_matmul_packed(&dy, &x, Product::Nt, dtype, f32)
            });
            let dx = for_x.then(|| {
                let dy = B::nvfp4_quantize(dy, spec.gradients(parts, false));
                B::nvfp4_matmul_packed(&dy, &w, Product::Nn, dtype, dtype)
            });
            [dx, dw]
        }
    }
}

/// `x` with rows of zeros up to a multiple of 16.
fn in_blocks_of_16<B: Nvfp4Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let [rows, cols] = x.shape().dims();
    let missing = rows.next_multiple_of(16) - rows;
    if missing == 0 {
        return x;
    }
    let zeros = B::float_zeros(Shape::new([missing, cols]), &B::float_device(&x), x.dtype().into());
    B::float_cat(vec![x, zeros], 0)
}

fn cast<B: Backend>(x: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    let to: burn::tensor::FloatDType = dtype.into();
    if x.dtype() == dtype { x } else { B::float_cast(x, to) }
}
