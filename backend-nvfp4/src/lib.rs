//! NVFP4 as a Burn backend extension.
//!
//! [`Nvfp4Backend`] adds quantise, dequantise, products with packed operands, a straight-through
//! linear layer and a fused AdamW to a Burn backend. It is implemented for `NdArray` (running the
//! scalar [`mod@reference`]), for `CubeBackend` on any runtime (launching `kernels-cubecl`) and for
//! `Autodiff` of either. A model written over `B: Nvfp4Backend` runs on all of them.
//!
//! Shape letters: `M` rows of activations (tokens), `N` output features, `K` input features.

#![forbid(unsafe_code)]

mod autodiff;
mod cube;
mod error;
mod linear;
mod ndarray;
mod optim;
mod recipe;
pub mod reference;
mod tensor;

pub use error::Nvfp4Error;
pub use kernels_cubecl::{
    adamw::AdamwStep,
    layout,
    matmul::Product,
    quantize::{self, Block, QuantizeSpec, Rounding, Scaling, View},
    rng::Stream,
};
pub use linear::{Nvfp4Linear, matmul};
pub use optim::{AdamwState, Moment8, StateKind, reference_adamw};
pub use recipe::{LinearSpec, Precision, Recipe};
pub use tensor::{Nvfp4Primitive, Nvfp4Tensor};

use burn::tensor::{
    DType,
    backend::Backend,
    ops::{FloatTensor, IntTensor},
};

/// A Burn backend that computes with NVFP4 operands.
///
/// Dense operands of one call share one dtype; the operations check shapes and panic on a mismatch,
/// which is a bug of the caller: user input is checked where it enters ([`Nvfp4Tensor::new`]).
pub trait Nvfp4Backend: Backend {
    /// Quantises a float matrix `[R, C]` along C. Not differentiable.
    fn nvfp4_quantize(x: FloatTensor<Self>, spec: QuantizeSpec) -> Nvfp4Primitive<Self>;

    /// The values `[R, C]` of a packed matrix as `dtype`.
    fn nvfp4_dequantize(w: &Nvfp4Primitive<Self>, dtype: DType) -> FloatTensor<Self>;

    /// A product of a dense and a packed matrix (see [`Product`]), in the dense one's dtype.
    /// `Nt`: `[M, K] x [N, K] -> [M, N]`; `Nn`: `[M, N] x [N, K] -> [M, K]`;
    /// `Tn`: `[M, N] x [M, K] -> [N, K]`. Differentiable in the dense operand for `Nt`.
    fn nvfp4_matmul(a: FloatTensor<Self>, w: &Nvfp4Primitive<Self>, product: Product) -> FloatTensor<Self>;

    /// `[M, K] x [N, K] -> [M, N]`, both packed, as `dtype`. Not differentiable.
    fn nvfp4_matmul_packed(a: &Nvfp4Primitive<Self>, w: &Nvfp4Primitive<Self>, dtype: DType) -> FloatTensor<Self>;

    /// A dense batched product in the given number format, as `out`. Equal batch dimensions.
    fn dense_matmul(
        lhs: FloatTensor<Self>,
        rhs: FloatTensor<Self>,
        precision: Precision,
        out: DType,
    ) -> FloatTensor<Self>;

    /// `y = x · Wᵀ` with a master weight: `x` `[M, K]` in the spec's dtype, `w` `[N, K]` f32, the
    /// recipe's quantisation on the way. Gradients pass straight through; that of `w` is f32.
    fn nvfp4_linear(x: FloatTensor<Self>, w: FloatTensor<Self>, spec: LinearSpec) -> FloatTensor<Self> {
        linear::forward::<Self>(x, w, spec).0
    }

    /// One AdamW step over a whole tensor, `chunk` elements a launch (a multiple of 256).
    /// `w` and `grad` are f32 and equally shaped; `w` is updated in place when nothing else holds it.
    fn adamw(
        w: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        state: AdamwState<Self>,
        step: AdamwStep,
        chunk: usize,
    ) -> (FloatTensor<Self>, AdamwState<Self>);

    /// Bytes that the backend holds on `device` for tensors, where it can tell.
    fn memory_in_use(_device: &Self::Device) -> Option<MemoryUse> {
        None
    }

    /// An Int tensor's device data, as a host vector of `u32`.
    ///
    /// # Errors
    /// If the device failed before or during the read.
    fn read_words(x: IntTensor<Self>) -> Result<Vec<u32>, Nvfp4Error> {
        tensor::read_words::<Self>(x)
    }
}

/// Device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryUse {
    /// Bytes in live tensors.
    pub in_use: u64,
    /// Bytes taken from the device, free pages included.
    pub reserved: u64,
}
