//! What only an inner backend computes: quantization, products, decoding, backward passes, the optimizer.
//!
//! `Autodiff` does not implement [`Nvfp4Kernels`]: nothing here has a gradient, and code that is generic over
//! [`Nvfp4Backend`] alone, as the forward of a model is, cannot reach it.

use crate::{
    asked::Asked,
    attention::{AttentionSpec, Documents, Rotary},
    decode::{DecodeBlock, DecodeTokens},
    draw::{Draw, Drawn, Penalty},
    gradient::Gradient,
    held_codes::HeldPrimitive,
    ops::{Activations, Nvfp4Backend},
    optim::{AdamwState, Judged, StateKind},
    packed::{Nvfp4Primitive, Nvfp4Tensor, Operand},
    primitive::{primitive, tensor},
    recipe::{GivenScale, LinearSpec, Precision},
};
use burn::tensor::{
    DType, Int, Tensor,
    backend::Backend,
    ops::{FloatTensor, IntTensor},
};
use kernels_cubecl::{
    adamw::{AdamwStep, Master},
    operands::Product,
    quantize::QuantizeSpec,
    rng::Stream,
};

/// A backend that quantizes, multiplies, runs backward passes and steps weights.
pub trait Nvfp4Kernels: Nvfp4Backend {
    /// Quantizes a float matrix `[rows, cols]` along its rows.
    fn nvfp4_quantize(x: FloatTensor<Self>, spec: QuantizeSpec) -> Nvfp4Primitive<Self>;

    /// Quantizes float matrices of one dtype with one tensor scale: that of a matrix with all of their values.
    fn nvfp4_quantize_together(xs: Vec<FloatTensor<Self>>, spec: QuantizeSpec) -> Vec<Nvfp4Primitive<Self>>;

    /// Quantizes the transpose of a float matrix `[rows, cols]` along its columns; `rows` is a multiple of 16. If `rotated`, the
    /// random Hadamard transform rotates every 16 values first.
    fn nvfp4_quantize_across(x: FloatTensor<Self>, spec: QuantizeSpec, rotated: bool) -> Nvfp4Primitive<Self>;

    /// The result of [`Self::nvfp4_quantize_across`] for one product, in the form that [`Self::products`] reads fastest.
    fn nvfp4_operand_across(x: FloatTensor<Self>, spec: QuantizeSpec, rotated: bool) -> Operand<Self> {
        Operand::Packed(Self::nvfp4_quantize_across(x, spec, rotated))
    }

    /// Quantizes a float matrix `[rows, cols]` along its rows as `along` says, and its transpose as
    /// [`Self::nvfp4_operand_across`] does with `across` and `rotated`.
    fn nvfp4_operands(
        x: FloatTensor<Self>,
        along: QuantizeSpec,
        across: QuantizeSpec,
        rotated: bool,
    ) -> (Nvfp4Primitive<Self>, Operand<Self>) {
        (Self::nvfp4_quantize(x.clone(), along), Self::nvfp4_operand_across(x, across, rotated))
    }

    /// Quantizes a float matrix `[rows, cols]` as a master weight: two-level, to nearest, with block scales that have room
    /// to grow by [`MASTER_ROOM`](crate::reference::MASTER_ROOM).
    fn nvfp4_quantize_master(x: FloatTensor<Self>) -> Nvfp4Primitive<Self>;

    /// Quantizes each row of a float matrix `[M, K]` along K with a tensor scale of its own, and returns the values of the
    /// codes in the dtype of `x`. See [`rounded_rows`](crate::reference::rounded_rows).
    fn nvfp4_rounded_rows(x: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Quantizes a float matrix `[M, K]` along K with this tensor scale, and returns the values of the codes in the dtype of
    /// `x`. See [`rounded_by`](crate::reference::rounded_by).
    fn nvfp4_rounded_by(x: FloatTensor<Self>, scale: GivenScale) -> FloatTensor<Self>;

    /// The values `[rows, cols]` of a packed matrix as `dtype`.
    fn nvfp4_dequantize(w: &Nvfp4Primitive<Self>, dtype: DType) -> FloatTensor<Self>;

    /// Multiplies a dense by a packed matrix (see [`Product`]) and stores the result as `out`, which is the dtype of
    /// the dense matrix or f32. `Nt`: `[M, K] x [N, K] -> [M, N]`; `Nn`: `[M, N] x [N, K] -> [M, K]`;
    /// `Tn`: `[M, N] x [M, K] -> [N, K]`.
    fn nvfp4_matmul(a: FloatTensor<Self>, w: &Nvfp4Primitive<Self>, product: Product, out: DType) -> FloatTensor<Self>;

    /// Multiplies two packed matrices on values of type `operand` and stores the result as `out`. The product is `Nt`
    /// or `Nn`, as in [`Self::nvfp4_matmul`].
    fn nvfp4_matmul_packed(
        a: &Nvfp4Primitive<Self>,
        w: &Nvfp4Primitive<Self>,
        product: Product,
        operand: DType,
        out: DType,
    ) -> FloatTensor<Self>;

    /// Multiplies dense batches of matrices in the given number format and stores the result as `out`. The batch
    /// dimensions of both operands are equal.
    fn dense_matmul(
        lhs: FloatTensor<Self>,
        rhs: FloatTensor<Self>,
        precision: Precision,
        out: DType,
    ) -> FloatTensor<Self>;

    /// Multiplies pairs of operands, with shapes as in [`Self::nvfp4_matmul`] and sums in f32. A list of one operand is
    /// paired with every operand of the other list.
    fn products(
        product: Product,
        a: Vec<Operand<Self>>,
        b: Vec<Operand<Self>>,
        precision: Precision,
        out: DType,
    ) -> Vec<FloatTensor<Self>>;

    /// The gradients `dyᵀ · x` of weights, in f32: [`Self::products`] of each `dy` with `x`, which are stored as `product`
    /// reads them. A kernel may sum the squares of what it makes.
    fn weight_gradients(
        product: Product,
        dys: Vec<Operand<Self>>,
        x: Operand<Self>,
        precision: Precision,
    ) -> Vec<Gradient<Self>> {
        Self::products(product, dys, vec![x], precision, DType::F32).into_iter().map(Gradient::unmeasured).collect()
    }

    /// Multiplies the rows of `x`, each the newest token of a sequence, by the weights of layers: `x · wᵀ` for each weight, in the
    /// dtype of the precision. There are few rows, which a backend may multiply by a kernel of their own; but the result for a row
    /// must not depend on the other rows, nor on how many there are.
    fn token_products(x: Operand<Self>, w: Vec<Operand<Self>>, precision: Precision) -> Vec<FloatTensor<Self>> {
        Self::products(Product::Nt, vec![x], w, precision, precision.dtype())
    }

    /// The sum of [`Self::products`].
    fn product_sum(
        product: Product,
        a: Vec<Operand<Self>>,
        b: Vec<Operand<Self>>,
        precision: Precision,
        out: DType,
    ) -> FloatTensor<Self>;

    /// Returns `dx` and `dw` (f32) of a norm without `added` (see [`Nvfp4Backend::rms_norm`]). `dx` is added to the
    /// gradient that x has `so_far`.
    fn rms_norm_backward(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        dy: FloatTensor<Self>,
        so_far: Option<FloatTensor<Self>>,
        eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// Returns `dx` and `dw` (f32) of [`Nvfp4Backend::norm_rope`].
    fn norm_rope_backward(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        rotary: &Rotary<Self>,
        dy: FloatTensor<Self>,
        eps: f64,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// Returns `dgate` and `dup` of [`Nvfp4Backend::swiglu`].
    fn swiglu_backward(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        dy: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// Computes [`Nvfp4Backend::causal_attention`] and, where a kernel keeps them for the backward, the log-sums of the
    /// softmax, f32 `[H, M]`.
    fn attention_saving(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        docs: &Documents<Self>,
        spec: AttentionSpec,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>);

    /// Returns `dq`, `dk` and `dv` of [`Nvfp4Backend::causal_attention`].
    fn attention_backward(
        saved: AttentionSaved<Self>,
        dy: FloatTensor<Self>,
        docs: &Documents<Self>,
        spec: AttentionSpec,
    ) -> [FloatTensor<Self>; 3];

    /// Float numbers `[M, K]` as E4M3 bytes, four in a U32 word, `[M, K/4]`: see [`e4m3`](kernels_cubecl::e4m3). K is a multiple
    /// of 4.
    fn e4m3_encode(x: FloatTensor<Self>) -> IntTensor<Self>;

    /// The numbers `[M, K]` of E4M3 bytes `[M, K/4]`, as `dtype`.
    fn e4m3_decode(words: IntTensor<Self>, dtype: DType) -> FloatTensor<Self>;

    /// Computes [`Nvfp4Backend::causal_attention`] of the next tokens of a prompt over the cache of its sequence: `q` `[M, H*E]`,
    /// `k` and `v` `[S, G*E]`, where S counts the past of `docs` and the M new tokens. Sums may take their terms in another order,
    /// if this makes them independent of how many tokens are read together.
    fn prompt_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        docs: &Documents<Self>,
        spec: AttentionSpec,
    ) -> FloatTensor<Self>;

    /// Computes attention of a sequence's newest tokens (a model reads one at a time) over its cache, as
    /// [`Self::prompt_attention`] does for prompts. Sums may take their terms in another order.
    fn cached_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        docs: &Documents<Self>,
        spec: AttentionSpec,
    ) -> FloatTensor<Self>;

    /// Computes the blocks of a model for one new token of each sequence: hidden states `[M, D]` to hidden states. Returns
    /// `None`, and changes nothing, where the backend has no kernel for these blocks; the caller then computes them by the
    /// other operations. Both compute the same up to the order of sums.
    fn decode_blocks(
        _x: FloatTensor<Self>,
        _blocks: &mut [DecodeBlock<Self>],
        _tokens: &DecodeTokens<Self>,
    ) -> Option<FloatTensor<Self>> {
        None
    }

    /// Draws the next token of each row of logits `[M, V]` in f32: see [`draw`](kernels_cubecl::draw::draw). Returns the tokens of
    /// all rows on the device, and the question for the host's copy: the tokens, and behind them for each row whether a logit is
    /// NaN. `None` where the host draws as fast.
    fn draw(_logits: FloatTensor<Self>, _draws: &[Draw]) -> Option<(IntTensor<Self>, Asked)> {
        None
    }

    /// Asks for the bits of a tensor in f32. The device sends them before it runs kernels that are launched later.
    fn words_of(x: FloatTensor<Self>) -> Asked;

    /// Applies repetition penalties to the rows of logits `[M, V]` in f32, whose newest tokens are `newest` `[M]`: see
    /// [`penalize`](kernels_cubecl::penalty::penalize). `None` where the host does it as fast.
    fn penalize(
        _logits: FloatTensor<Self>,
        _newest: IntTensor<Self>,
        _penalties: &[Penalty<'_>],
    ) -> Option<FloatTensor<Self>> {
        None
    }

    /// Computes [`Nvfp4Backend::head_loss`] and, if `gradients`, both gradients in the same pass, that of `w` up to its last
    /// product.
    fn head_loss_saving(
        h: FloatTensor<Self>,
        w: FloatTensor<Self>,
        targets: IntTensor<Self>,
        precision: Precision,
        gradients: bool,
    ) -> HeadLoss<Self>;

    /// Completes the gradient of the head's weight for a gradient `factor`, f32 `[1]`, of the loss.
    fn head_weight_gradient(
        rest: HeadWeightGradient<Self>,
        factor: FloatTensor<Self>,
        precision: Precision,
    ) -> FloatTensor<Self>;

    /// Makes one AdamW step on a float master weight of any shape, `chunk` elements (a multiple of 256) a launch. The
    /// weight is f32, or bf16 for a bf16 form (f32 if the device has no bf16). `grad` is f32 or bf16 and has the shape of
    /// the weight. The weight and the state are updated in place when nothing else holds them.
    ///
    /// If the state has codes, they become those of the new weight. They are `None` afterwards where this kind of step cannot
    /// leave codes.
    ///
    /// A step whose verdict is not 0 writes nothing: what is updated in place stays as it was, and what is not has no
    /// defined values.
    fn adamw(
        w: FloatTensor<Self>,
        form: Master,
        grad: Judged<Self>,
        state: AdamwState<Self>,
        step: AdamwStep,
        chunk: usize,
    ) -> (FloatTensor<Self>, AdamwState<Self>);

    /// Quantizes a master weight `[N, K]`, to nearest, for steps of AdamW with moments of this kind that leave codes. `None` if
    /// they cannot: the next forward then quantizes the weight.
    fn nvfp4_held(_w: FloatTensor<Self>, _kind: StateKind, _spec: QuantizeSpec) -> Option<HeldPrimitive<Self>> {
        None
    }

    /// Makes one AdamW step on an NVFP4 master weight, whose moments are quantized. The rest is as in [`Self::adamw`].
    fn adamw_packed(
        w: Nvfp4Primitive<Self>,
        grad: Judged<Self>,
        state: AdamwState<Self>,
        step: AdamwStep,
        chunk: usize,
    ) -> (Nvfp4Primitive<Self>, AdamwState<Self>);

    /// Writes the sum of the squares of a gradient to its place among the sums of a step, f32 `[N]`. The verdict on the gradients
    /// of the step, f32 `[1]`, grows by 1 if the sum is not finite. Returns the sums and the verdict, which are updated in place
    /// when nothing else holds them.
    fn square_sum(
        x: Gradient<Self>,
        sums_and_place: (FloatTensor<Self>, usize),
        verdict: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// Adds the gradient `dy` `[M, D]` of tokens to the gradient `[V, D]` of an embedding, f32: row m of `dy` to row `ids[m]`.
    /// Rows of one id are added to each other first, in order. The gradient is updated in place when nothing else holds it.
    fn segment_sum(gradient: FloatTensor<Self>, ids: &[u32], dy: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Returns `sum + x` in the dtype of `sum`, which is updated in place when nothing else holds it.
    fn accumulated(sum: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Makes a float matrix of normal numbers around 0 with deviation `std`. A value depends on its place in the matrix
    /// and on the stream only.
    fn normal(dims: [usize; 2], std: f32, stream: Stream, dtype: DType, device: &Self::Device) -> FloatTensor<Self>;

    /// Allocates a float matrix whose rows lie side by side, for the caller to fill. Burn's own constructor pads rows
    /// on CUDA, but kernels read without strides.
    fn unfilled(dims: [usize; 2], dtype: DType, device: &Self::Device) -> FloatTensor<Self>;
}

/// What the backward of attention reads.
#[derive(Debug, Clone)]
pub struct AttentionSaved<B: Backend> {
    /// Queries `[M, H*E]`.
    pub q: FloatTensor<B>,
    /// Keys `[M, G*E]`.
    pub k: FloatTensor<B>,
    /// Values `[M, G*E]`.
    pub v: FloatTensor<B>,
    /// The output `[M, H*E]`.
    pub y: FloatTensor<B>,
    /// The log-sums of the softmax, f32 `[H, M]`, from kernels that keep them.
    pub lse: Option<FloatTensor<B>>,
}

/// Bytes of logits that a GPU computes at a time for the loss of a short batch. A long batch gets twice as many.
const LOGITS: usize = 300 << 20;

/// Rows of logits that a GPU computes at a time for the loss of `tokens` tokens: those that 300 MiB hold, and twice as many for a
/// batch of at least three times as many tokens. Larger chunks are faster, because the gradient of the head's weight is read
/// and written once for each chunk. There are only two sizes of chunks, because the memory pool keeps a buffer for each size
/// that it has seen.
pub fn logits_rows(tokens: usize, vocabulary: usize, value_bytes: usize) -> usize {
    let short = (LOGITS / (vocabulary * value_bytes) / 128 * 128).max(128);
    if tokens >= 3 * short { 2 * short } else { short }
}

/// A loss with what its backward needs.
#[derive(Debug, Clone)]
pub struct HeadLoss<B: Backend> {
    /// The loss, f32 `[1]`.
    pub loss: FloatTensor<B>,
    /// Both gradients, if they were wanted.
    pub gradients: Option<HeadGradients<B>>,
}

/// The gradients of a head for a gradient of 1 of the loss.
#[derive(Debug, Clone)]
pub struct HeadGradients<B: Backend> {
    /// The gradient `[M, D]` of h, in the dtype of h.
    pub dh: FloatTensor<B>,
    /// The gradient of the weight.
    pub dw: HeadWeightGradient<B>,
}

/// The gradient `[V, D]` of a head's weight up to its last product: `sum + dlogitsᵀ · h`. That product also
/// multiplies the result by the factor of the loss: a pass of its own would read and write the largest gradient of a model.
#[derive(Debug, Clone)]
pub struct HeadWeightGradient<B: Backend> {
    /// The part of the gradient that is there, f32.
    pub sum: Option<FloatTensor<B>>,
    /// The gradient of the last chunk's logits, `[M', V]`.
    pub dlogits: FloatTensor<B>,
    /// The rows of h in the last chunk, `[M', D]`.
    pub h: FloatTensor<B>,
}

impl<B: Nvfp4Kernels> Activations<B> {
    /// Quantizes `values` if layers of this specification multiply codes, and all rows share a tensor scale.
    pub(crate) fn quantized(values: FloatTensor<B>, spec: LinearSpec) -> Self {
        let packed = spec.quantizes_early().then(|| B::nvfp4_quantize(values.clone(), spec.activations()));
        Self { values, packed }
    }
}

impl<B: Nvfp4Kernels> Nvfp4Tensor<B> {
    /// Quantizes a float matrix on its device.
    pub fn quantize(x: Tensor<B, 2>, spec: QuantizeSpec) -> Self {
        Self::from_primitive(B::nvfp4_quantize(primitive(x), spec))
    }

    /// Quantizes float matrices of one dtype on their device with one tensor scale.
    pub fn quantize_together(xs: Vec<Tensor<B, 2>>, spec: QuantizeSpec) -> Vec<Self> {
        let xs = xs.into_iter().map(primitive).collect();
        B::nvfp4_quantize_together(xs, spec).into_iter().map(Self::from_primitive).collect()
    }

    /// The values `[rows, cols]` as `dtype`.
    pub fn dequantize(&self, dtype: DType) -> Tensor<B, 2> {
        tensor(B::nvfp4_dequantize(&self.primitive(), dtype))
    }
}

/// Multiplies dense batches of matrices in the given number format.
pub(crate) fn matmul<B: Nvfp4Kernels, const RANK: usize>(
    lhs: Tensor<B, RANK>,
    rhs: Tensor<B, RANK>,
    precision: Precision,
) -> Tensor<B, RANK> {
    tensor(B::dense_matmul(primitive(lhs), primitive(rhs), precision, precision.dtype()))
}

/// Draws the next token of each row of logits `[M, V]`. `None` where the host draws as fast.
pub fn draw<B: Nvfp4Kernels>(logits: Tensor<B, 2>, draws: &[Draw]) -> Option<Drawn<B>> {
    let (tokens, words) = B::draw(primitive(logits), draws)?;
    Some(Drawn::new(Tensor::from_primitive(tokens), words, draws.len()))
}

/// See [`Nvfp4Kernels::segment_sum`].
pub fn segment_sum<B: Nvfp4Kernels>(gradient: Tensor<B, 2>, ids: &[u32], dy: Tensor<B, 2>) -> Tensor<B, 2> {
    tensor(B::segment_sum(primitive(gradient), ids, primitive(dy)))
}

/// See [`Nvfp4Kernels::words_of`].
pub fn words_of<B: Nvfp4Kernels>(x: Tensor<B, 2>) -> Asked {
    B::words_of(primitive(x))
}

/// See [`Nvfp4Kernels::penalize`].
pub fn penalize<B: Nvfp4Kernels>(
    logits: Tensor<B, 2>,
    newest: Tensor<B, 1, Int>,
    penalties: &[Penalty<'_>],
) -> Option<Tensor<B, 2>> {
    B::penalize(primitive(logits), newest.into_primitive(), penalties).map(tensor)
}

/// See [`Nvfp4Kernels::decode_blocks`].
pub fn decode_blocks<B: Nvfp4Kernels>(
    x: Tensor<B, 2>,
    blocks: &mut [DecodeBlock<B>],
    tokens: &DecodeTokens<B>,
) -> Option<Tensor<B, 2>> {
    B::decode_blocks(primitive(x), blocks, tokens).map(tensor)
}

/// See [`Nvfp4Kernels::prompt_attention`].
pub fn prompt_attention<B: Nvfp4Kernels>(
    q: Tensor<B, 2>,
    k: Tensor<B, 2>,
    v: Tensor<B, 2>,
    docs: &Documents<B>,
    spec: AttentionSpec,
) -> Tensor<B, 2> {
    tensor(B::prompt_attention(primitive(q), primitive(k), primitive(v), docs, spec))
}

/// See [`Nvfp4Kernels::cached_attention`].
pub fn cached_attention<B: Nvfp4Kernels>(
    q: Tensor<B, 2>,
    k: Tensor<B, 2>,
    v: Tensor<B, 2>,
    docs: &Documents<B>,
    spec: AttentionSpec,
) -> Tensor<B, 2> {
    tensor(B::cached_attention(primitive(q), primitive(k), primitive(v), docs, spec))
}

#[cfg(test)]
mod tests {
    use super::logits_rows;

    #[test]
    fn a_long_batch_takes_twice_as_many_logits_at_a_time() {
        let rows = |tokens| logits_rows(tokens, 151_936, 2);
        for (tokens, expected) in [(1, 1024), (2047, 1024), (3071, 1024), (3072, 2048), (4095, 2048), (16_383, 2048)] {
            assert_eq!(rows(tokens), expected, "{tokens} tokens");
        }
        assert_eq!(logits_rows(4095, 151_936, 4), 1024, "in f32 a chunk of a short batch has 512 rows");
        assert_eq!(logits_rows(100, 10_000_000, 4), 128, "a chunk has at least 128 rows, however large they are");
    }
}
