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
mod blocks;
mod cube;
mod error;
mod head;
mod linear;
mod ndarray;
mod operand;
mod optim;
mod products;
mod recipe;
pub mod reference;
mod tensor;

pub use blocks::{AttentionSaved, AttentionSpec, Documents, Rotary};
pub use error::Nvfp4Error;
pub use head::HeadLoss;
pub use kernels_cubecl::{
    adamw::{AdamwStep, Master},
    bench, layout,
    matmul::Product,
    quantize::{self, Block, QuantizeSpec, Rounding, Scaling, View},
    rng::Stream,
};
pub use linear::{Activations, LinearWeight, Nvfp4Linear, PackedMaster, linears, matmul};
pub use operand::Operand;
pub use optim::{
    AdamwState, MasterKind, MasterWeight, Moment, StateKind, reference_adamw, reference_repack, reference_round,
};
pub use recipe::{LinearSpec, Nvfp4Parts, Precision, Recipe};
pub use tensor::{Nvfp4Primitive, Nvfp4Tensor, read_words};

use burn::tensor::{
    DType, Shape, TensorMetadata,
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

    /// Quantises the transpose `[C, R]` of a float matrix `[R, C]` along R, a multiple of 16, every 16 values rotated
    /// first by the random Hadamard transform if `rotated`. Not differentiable.
    fn nvfp4_quantize_across(x: FloatTensor<Self>, spec: QuantizeSpec, rotated: bool) -> Nvfp4Primitive<Self> {
        let across = Self::float_transpose(x);
        Self::nvfp4_quantize(if rotated { Self::hadamard(across) } else { across }, spec)
    }

    /// Quantises a float matrix `[R, C]` as an NVFP4 master: two-level, to nearest, its block scales with room to grow
    /// by [`reference::MASTER_ROOM`]. Not differentiable.
    fn nvfp4_quantize_master(x: FloatTensor<Self>) -> Nvfp4Primitive<Self>;

    /// A float matrix of `dims`, normal around 0 with deviation `std`, as `dtype`: a value depends on its place and
    /// the stream alone.
    fn normal(dims: [usize; 2], std: f32, stream: Stream, dtype: DType, device: &Self::Device) -> FloatTensor<Self>;

    /// A float matrix that is to be filled. Its rows lie side by side: the ordinary constructor pads them on CUDA, and
    /// kernels read without strides.
    fn unfilled(dims: [usize; 2], dtype: DType, device: &Self::Device) -> FloatTensor<Self> {
        Self::float_zeros(Shape::new(dims), device, dtype.into())
    }

    /// The values `[R, C]` of a packed matrix as `dtype`.
    fn nvfp4_dequantize(w: &Nvfp4Primitive<Self>, dtype: DType) -> FloatTensor<Self>;

    /// A product of a dense and a packed matrix (see [`Product`]), as `out`: the dense one's dtype or f32.
    /// `Nt`: `[M, K] x [N, K] -> [M, N]`; `Nn`: `[M, N] x [N, K] -> [M, K]`;
    /// `Tn`: `[M, N] x [M, K] -> [N, K]`. Not differentiable.
    fn nvfp4_matmul(a: FloatTensor<Self>, w: &Nvfp4Primitive<Self>, product: Product, out: DType) -> FloatTensor<Self>;

    /// A product of two packed matrices, computed on values of type `operand` and stored as `out`. `Nt` or `Nn`, as in
    /// [`Self::nvfp4_matmul`]. Not differentiable.
    fn nvfp4_matmul_packed(
        a: &Nvfp4Primitive<Self>,
        w: &Nvfp4Primitive<Self>,
        product: Product,
        operand: DType,
        out: DType,
    ) -> FloatTensor<Self>;

    /// Every 16 columns of a matrix rotated by the random Hadamard transform. Not differentiable.
    fn hadamard(x: FloatTensor<Self>) -> FloatTensor<Self>;

    /// A dense batched product in the given number format, as `out`. Equal batch dimensions.
    fn dense_matmul(
        lhs: FloatTensor<Self>,
        rhs: FloatTensor<Self>,
        precision: Precision,
        out: DType,
    ) -> FloatTensor<Self>;

    /// The products of one operand with each of others, or of pairs: a list of one goes with every one of the other list.
    /// Shapes as in [`Self::nvfp4_matmul`], sums in f32. Not differentiable.
    fn products(
        product: Product,
        a: Vec<Operand<Self>>,
        b: Vec<Operand<Self>>,
        precision: Precision,
        out: DType,
    ) -> Vec<FloatTensor<Self>> {
        let joint = Self::joint_products(product, &a, &b, precision, out, false);
        joint.unwrap_or_else(|| operand::each(product, &a, &b, precision, out))
    }

    /// The sum of the products of pairs. Not differentiable.
    fn product_sum(
        product: Product,
        a: Vec<Operand<Self>>,
        b: Vec<Operand<Self>>,
        precision: Precision,
        out: DType,
    ) -> FloatTensor<Self> {
        let joint = Self::joint_products(product, &a, &b, precision, out, true);
        let products = joint.unwrap_or_else(|| operand::each(product, &a, &b, precision, out));
        products.into_iter().reduce(Self::float_add).expect("a sum has a product")
    }

    /// [`Self::products`], or if `summed` [`Self::product_sum`] as the only one, in one launch; `None` where a device has no
    /// such launch or is quicker without.
    fn joint_products(
        _product: Product,
        _a: &[Operand<Self>],
        _b: &[Operand<Self>],
        _precision: Precision,
        _out: DType,
        _summed: bool,
    ) -> Option<Vec<FloatTensor<Self>>> {
        None
    }

    /// `y = x · Wᵀ` of layers that read the same activations `[M, K]`: weights `[N, K]`, specifications that differ in
    /// their streams alone, the recipe's quantisation on the way. Gradients pass straight through; those of weights are f32.
    fn nvfp4_linears(x: Activations<Self>, layers: Vec<(LinearWeight<Self>, LinearSpec)>) -> Vec<FloatTensor<Self>> {
        let spec = layers[0].1;
        linear::forward::<Self>(x, layers.into_iter().map(|(w, _)| w).collect(), spec).0
    }

    /// `x / rms(x) * w` over the columns of `x` `[M, C]`, `w` f32 `[C]`: in f32, rounded to the type of x, weighted.
    fn rms_norm(x: FloatTensor<Self>, w: FloatTensor<Self>, eps: f64) -> FloatTensor<Self> {
        blocks::rms_norm::<Self>(x, w, eps)
    }

    /// [`Self::rms_norm`] for linear layers of this specification.
    fn rms_norm_activations(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        eps: f64,
        spec: LinearSpec,
    ) -> Activations<Self> {
        Activations::new(Self::rms_norm(x, w, eps), spec)
    }

    /// The sum `x + added` in their type, and its [`Self::rms_norm_activations`].
    fn add_rms_norm(
        x: FloatTensor<Self>,
        added: FloatTensor<Self>,
        w: FloatTensor<Self>,
        eps: f64,
        spec: LinearSpec,
    ) -> (FloatTensor<Self>, Activations<Self>) {
        let sum = Self::float_add(x, added);
        (sum.clone(), Self::rms_norm_activations(sum, w, eps, spec))
    }

    /// `dx` and `dw` (f32) of [`Self::rms_norm`], `dx` added to the gradient that x has `so_far`.
    fn rms_norm_backward(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        dy: FloatTensor<Self>,
        so_far: Option<FloatTensor<Self>>,
        eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (dx, dw) = blocks::rms_norm_backward::<Self>(x, w, dy, eps);
        (
            match so_far {
                Some(so_far) => Self::float_add(dx, so_far),
                None => dx,
            },
            dw,
        )
    }

    /// Heads of queries or keys `[M, heads*E]`: normalised over E, weighted by `w` f32 `[E]`, rotated.
    fn norm_rope(x: FloatTensor<Self>, w: FloatTensor<Self>, rotary: &Rotary<Self>, eps: f64) -> FloatTensor<Self> {
        blocks::norm_rope::<Self>(x, w, rotary, eps)
    }

    /// `dx` and `dw` (f32) of [`Self::norm_rope`].
    fn norm_rope_backward(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        rotary: &Rotary<Self>,
        dy: FloatTensor<Self>,
        eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        blocks::norm_rope_backward::<Self>(x, w, rotary, dy, eps)
    }

    /// `silu(gate) * up`, `[M, F]`.
    fn swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        blocks::swiglu::<Self>(gate, up)
    }

    /// [`Self::swiglu`] for linear layers of this specification.
    fn swiglu_activations(gate: FloatTensor<Self>, up: FloatTensor<Self>, spec: LinearSpec) -> Activations<Self> {
        Activations::new(Self::swiglu(gate, up), spec)
    }

    /// `dgate` and `dup` of [`Self::swiglu`].
    fn swiglu_backward(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        dy: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        blocks::swiglu_backward::<Self>(gate, up, dy)
    }

    /// Causal grouped-query attention within documents: `q` `[M, H*E]`, `k`, `v` `[S, K*E]` to `[M, H*E]`.
    fn causal_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        docs: &Documents<Self>,
        spec: AttentionSpec,
    ) -> FloatTensor<Self> {
        Self::attention_saving(q, k, v, docs, spec).0
    }

    /// As [`Self::causal_attention`], with the log-sums f32 `[H, M]` where a kernel keeps them for the backward.
    fn attention_saving(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        docs: &Documents<Self>,
        spec: AttentionSpec,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
        (blocks::attention::<Self>(q, k, v, docs, spec), None)
    }

    /// `dq`, `dk` and `dv` of [`Self::causal_attention`].
    fn attention_backward(
        saved: AttentionSaved<Self>,
        dy: FloatTensor<Self>,
        docs: &Documents<Self>,
        spec: AttentionSpec,
    ) -> [FloatTensor<Self>; 3] {
        blocks::attention_backward::<Self>(saved, dy, docs, spec)
    }

    /// `sum over rows of -log softmax(h · wᵀ)[target]`, f32 `[1]`: `h` `[M, D]`, `w` `[V, D]` f32, `targets` `[M]`.
    fn head_loss(
        h: FloatTensor<Self>,
        w: FloatTensor<Self>,
        targets: IntTensor<Self>,
        precision: Precision,
    ) -> FloatTensor<Self> {
        Self::head_loss_saving(h, w, targets, precision, false).loss
    }

    /// As [`Self::head_loss`], with its gradients if wanted: they come from the same pass.
    fn head_loss_saving(
        h: FloatTensor<Self>,
        w: FloatTensor<Self>,
        targets: IntTensor<Self>,
        precision: Precision,
        gradients: bool,
    ) -> HeadLoss<Self> {
        head::head_loss::<Self>(h, w, targets, precision, gradients)
    }

    /// One AdamW step over a whole tensor, `chunk` elements a launch (a multiple of 256). `grad` is f32 or bf16 and
    /// shaped like the weight, which is updated in place when nothing else holds it.
    fn adamw(
        w: MasterWeight<Self>,
        grad: FloatTensor<Self>,
        state: AdamwState<Self>,
        step: AdamwStep,
        chunk: usize,
    ) -> (MasterWeight<Self>, AdamwState<Self>);

    /// A zero, f32 `[1]`, whose backward hands `dy` to `y`: where a backward begins in the middle of a model.
    fn seeded(y: FloatTensor<Self>, _dy: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_zeros(Shape::new([1]), &Self::float_device(&y), DType::F32.into())
    }

    /// The sum of the squares of a gradient of any shape, f32 `[1]`.
    fn square_sum(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let x = Self::float_reshape(x.clone(), Shape::new([x.shape().num_elements()]));
        let x = tensor::float::<Self, 1>(x).cast(DType::F32);
        (x.clone() * x).sum().into_primitive().tensor()
    }

    /// `sum + x`, in place when nothing else holds `sum`, in its type.
    fn accumulated(sum: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_add(sum, x)
    }

    /// Rows `ids` `[M]` of an embedding `[V, D]` as `dtype`. Its gradient is f32 whatever it is stored in.
    fn token_rows(w: FloatTensor<Self>, ids: IntTensor<Self>, dtype: DType) -> FloatTensor<Self> {
        let rows = tensor::float::<Self, 2>(Self::float_select(w, 0, ids));
        rows.cast(dtype).into_primitive().tensor()
    }

    /// The tiers of products with packed operands that a device has, in the order in which they are tried.
    fn tiers(_device: &Self::Device) -> Vec<&'static str> {
        vec!["scalar reference"]
    }

    /// Times every kernel whose name contains `filter` on `device`, handing rows to `show`; the copy rate comes first.
    ///
    /// # Errors
    /// If the backend has no kernels or the device fails.
    fn bench_kernels(
        _device: &Self::Device,
        _filter: &str,
        _show: &mut dyn FnMut(bench::Row),
    ) -> Result<(), Nvfp4Error> {
        Err(Nvfp4Error::Device("this device runs no kernels: there is nothing to time".into()))
    }

    /// Bytes that the backend holds on `device` for tensors, where it can tell.
    fn memory_in_use(_device: &Self::Device) -> Option<MemoryUse> {
        None
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
