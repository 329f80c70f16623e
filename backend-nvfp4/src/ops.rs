//! The differentiable operations of a training forward, which [`Nvfp4Backend`] collects.
//!
//! A model calls the functions of this module, which take and return `Tensor`s. Each function calls a method of the
//! trait. A backend may fuse what it likes inside a method: the norm of a sum is one operation, because a kernel adds,
//! normalizes and measures the result in a single pass.

use crate::{
    attention::{AttentionSpec, Documents, Rotary},
    held_codes::HeldPrimitive,
    packed::Nvfp4Primitive,
    primitive::{primitive, tensor},
    recipe::{LinearSpec, Precision},
};
use burn::tensor::{
    DType, Int, Tensor, TensorMetadata,
    backend::Backend,
    ops::{FloatTensor, IntTensor},
};

/// A Burn backend that can run the forward of an NVFP4 model. All of its methods are differentiable.
///
/// The float operands of one call share one dtype. The methods check shapes and panic on a mismatch, because a
/// mismatch is a bug of the caller: user input is checked where it enters.
pub trait Nvfp4Backend: Backend {
    /// Computes `y = x · Wᵀ` for layers that read the same activations `[M, K]`. Weights are `[N, K]`, and the
    /// specifications of the layers differ in their random streams only. Operands are quantized as the recipe says.
    /// Gradients pass through the quantization unchanged; the gradients of weights are f32.
    fn nvfp4_linears(x: Activations<Self>, layers: Vec<LinearLayer<Self>>) -> Vec<FloatTensor<Self>>;

    /// Returns `h` and `h / rms(h) * w`, where `h` is `x`, or `x + added`. The norm runs over the columns of `h`
    /// `[M, D]` in f32, is rounded to the dtype of `x`, and is then weighted by `w` f32 `[D]`. The result is ready
    /// for linear layers of the given specification.
    fn rms_norm(
        x: FloatTensor<Self>,
        added: Option<FloatTensor<Self>>,
        w: FloatTensor<Self>,
        eps: f64,
        spec: LinearSpec,
    ) -> (FloatTensor<Self>, Activations<Self>);

    /// Normalizes each head of queries or keys `[M, heads*E]` over E, weights it by `w` f32 `[E]`, and rotates it.
    fn norm_rope(x: FloatTensor<Self>, w: FloatTensor<Self>, rotary: &Rotary<Self>, eps: f64) -> FloatTensor<Self>;

    /// Computes `silu(gate) * up`, `[M, F]`, ready for linear layers of the given specification.
    fn swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>, spec: LinearSpec) -> Activations<Self>;

    /// Computes causal grouped-query attention within documents: `q` `[M, H*E]`, `k` and `v` `[S, G*E]` give
    /// `[M, H*E]`. S counts the past of `docs`, which training does not have, and the M new tokens.
    fn causal_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        docs: &Documents<Self>,
        spec: AttentionSpec,
    ) -> FloatTensor<Self>;

    /// Sums `-log softmax(h · wᵀ)[target]` over rows, f32 `[1]`: `h` `[M, D]`, `w` `[V, D]`, `targets` `[M]`.
    fn head_loss(
        h: FloatTensor<Self>,
        w: FloatTensor<Self>,
        targets: IntTensor<Self>,
        precision: Precision,
    ) -> FloatTensor<Self>;

    /// Looks up the rows `ids` `[M]` of an embedding `[V, D]` as `dtype`. The gradient of the embedding is f32
    /// whatever the embedding is stored in.
    fn token_rows(w: FloatTensor<Self>, ids: IntTensor<Self>, dtype: DType) -> FloatTensor<Self>;
}

/// What linear layers read: activations `[M, K]`, also quantized where an operation has done that already.
#[derive(Debug, Clone)]
pub struct Activations<B: Backend> {
    /// The values in the dtype of the specification.
    pub values: FloatTensor<B>,
    /// The values quantized along K. Layers that multiply codes quantize them if nothing has.
    pub packed: Option<Nvfp4Primitive<B>>,
}

impl<B: Backend> Activations<B> {
    /// The values.
    pub fn tensor(self) -> Tensor<B, 2> {
        tensor(self.values)
    }
}

impl<B: Backend> From<Tensor<B, 2>> for Activations<B> {
    fn from(x: Tensor<B, 2>) -> Self {
        Self { values: primitive(x), packed: None }
    }
}

/// A linear layer as [`Nvfp4Backend::nvfp4_linears`] takes it.
#[derive(Debug, Clone)]
pub struct LinearLayer<B: Backend> {
    /// The weight.
    pub weight: LayerWeight<B>,
    /// The specification of the layer.
    pub spec: LinearSpec,
}

/// The weight `[N, K]` of a linear layer.
#[derive(Debug, Clone)]
pub enum LayerWeight<B: Backend> {
    /// Float values, which the recipe quantizes.
    Dense(FloatTensor<B>),
    /// The same with codes that the optimizer has left.
    Held {
        /// The values.
        values: FloatTensor<B>,
        /// Their codes.
        codes: HeldPrimitive<B>,
    },
    /// An NVFP4 matrix.
    Packed {
        /// The matrix.
        packed: Nvfp4Primitive<B>,
        /// The float tensor `[N, K]` that takes the gradient of the matrix, because autodiff knows no gradient of integers. Its
        /// values are never read. `None` if the matrix is not trained.
        gradient: Option<FloatTensor<B>>,
    },
}

impl<B: Backend> LayerWeight<B> {
    /// Output and input features, N and K.
    pub fn dims(&self) -> [usize; 2] {
        match self {
            Self::Dense(w) | Self::Held { values: w, .. } => w.shape().dims(),
            Self::Packed { packed, .. } => packed.dims(),
        }
    }
}

/// See [`Nvfp4Backend::rms_norm`].
pub fn rms_norm<B: Nvfp4Backend>(
    x: Tensor<B, 2>,
    added: Option<Tensor<B, 2>>,
    weight: Tensor<B, 1>,
    eps: f64,
    spec: LinearSpec,
) -> (Tensor<B, 2>, Activations<B>) {
    let (h, y) = B::rms_norm(primitive(x), added.map(primitive), primitive(weight), eps, spec);
    (tensor(h), y)
}

/// See [`Nvfp4Backend::norm_rope`].
pub fn norm_rope<B: Nvfp4Backend>(x: Tensor<B, 2>, weight: Tensor<B, 1>, rotary: &Rotary<B>, eps: f64) -> Tensor<B, 2> {
    tensor(B::norm_rope(primitive(x), primitive(weight), rotary, eps))
}

/// See [`Nvfp4Backend::swiglu`].
pub fn swiglu<B: Nvfp4Backend>(gate: Tensor<B, 2>, up: Tensor<B, 2>, spec: LinearSpec) -> Activations<B> {
    B::swiglu(primitive(gate), primitive(up), spec)
}

/// See [`Nvfp4Backend::causal_attention`].
pub fn attention<B: Nvfp4Backend>(
    q: Tensor<B, 2>,
    k: Tensor<B, 2>,
    v: Tensor<B, 2>,
    docs: &Documents<B>,
    spec: AttentionSpec,
) -> Tensor<B, 2> {
    tensor(B::causal_attention(primitive(q), primitive(k), primitive(v), docs, spec))
}

/// See [`Nvfp4Backend::head_loss`].
pub fn head_loss<B: Nvfp4Backend>(
    h: Tensor<B, 2>,
    weight: Tensor<B, 2>,
    targets: Tensor<B, 1, Int>,
    precision: Precision,
) -> Tensor<B, 1> {
    tensor(B::head_loss(primitive(h), primitive(weight), targets.into_primitive(), precision))
}

/// See [`Nvfp4Backend::token_rows`].
pub fn token_rows<B: Nvfp4Backend>(embedding: Tensor<B, 2>, ids: Tensor<B, 1, Int>, dtype: DType) -> Tensor<B, 2> {
    tensor(B::token_rows(primitive(embedding), ids.into_primitive(), dtype))
}
