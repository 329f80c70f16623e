//! The small operations of a block. The launches of the norm and the gate also measure the maximum that the quantizer needs; the
//! quantizer takes one matrix, or several with one tensor scale; heads are normalized and rotated.

use super::{
    launch::{arg, dims, empty, launched, writable},
    packed_cube::PackedCube,
};
use crate::{
    attention::Rotary,
    burn_ops,
    ops::Activations,
    packed::{Operand, Packed, Unscaled},
    recipe::LinearSpec,
};
use burn::tensor::{DType, TensorMetadata, backend::Backend};
use burn_cubecl::{CubeRuntime, kernel::into_contiguous, tensor::CubeTensor};
use kernels_cubecl::{
    block_scaled, column_sums,
    layout::{scales_per_row, words_per_row},
    mma,
    quantize::{self, QuantizeOutput, QuantizeSpec, View},
    rms_norm,
    rope::{self, RopeArgs, RopeShape},
    swiglu,
};

/// The results of a norm.
pub(super) struct Normed<R: CubeRuntime> {
    /// The matrix that was normalized.
    pub(super) x: CubeTensor<R>,
    /// The norm.
    pub(super) y: CubeTensor<R>,
    /// The largest `|y|` that each cube of the launch found, if they were wanted.
    pub(super) maxima: Option<CubeTensor<R>>,
}

/// Normalizes `x`, or `x + added`.
pub(super) fn normed<R: CubeRuntime>(
    x: CubeTensor<R>,
    added: Option<CubeTensor<R>>,
    w: CubeTensor<R>,
    eps: f64,
    wants_maxima: bool,
) -> Normed<R> {
    let (x, w, added) = (into_contiguous(x), into_contiguous(w), added.map(into_contiguous));
    let [rows, cols] = dims(&x);
    let y = empty(&x, [rows, cols], x.dtype);
    let sum = added.as_ref().map(|_| empty(&x, [rows, cols], x.dtype));
    let maxima = wants_maxima.then(|| empty(&x, [rms_norm::maxima_len(rows)], DType::F32));
    let fused = rms_norm::Fused {
        residual: added.as_ref().zip(sum.as_ref()).map(|(added, sum)| [arg(added), arg(sum)]),
        maxima: maxima.as_ref().map(arg),
    };
    let dtype = x.dtype.into();
    launched(rms_norm::rms_norm(&x.client, arg(&x), arg(&w), arg(&y), fused, dtype, [rows, cols], eps as f32));
    Normed { x: sum.unwrap_or(x), y, maxima }
}

/// Normalizes, weights and rotates each head of `x` `[M, heads*E]`.
pub(super) fn norm_rope<B, R>(x: CubeTensor<R>, w: CubeTensor<R>, rotary: &Rotary<B>, eps: f64) -> CubeTensor<R>
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    let shape = rope_shape(&x, &w, eps);
    if !shape.fits() {
        return burn_ops::norm_rope::<B>(x, w, rotary, eps);
    }
    let (x, w) = (into_contiguous(x), into_contiguous(w));
    let y = empty(&x, dims(&x), x.dtype);
    launched(rope::norm_rope(&x.client, arg(&x), rope_args(&w, rotary), arg(&y), x.dtype.into(), shape));
    y
}

/// Returns `dx` and `dw` of [`norm_rope`].
pub(super) fn norm_rope_backward<B, R>(
    x: CubeTensor<R>,
    w: CubeTensor<R>,
    rotary: &Rotary<B>,
    dy: CubeTensor<R>,
    eps: f64,
) -> (CubeTensor<R>, CubeTensor<R>)
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    let shape = rope_shape(&x, &w, eps);
    if !shape.fits() {
        return burn_ops::norm_rope_backward::<B>(x, w, rotary, dy, eps);
    }
    let (x, w, dx) = (into_contiguous(x), into_contiguous(w), writable(dy));
    let partial = empty(&x, [shape.partial_rows(), shape.head_dim], DType::F32);
    let (dtype, args) = (x.dtype.into(), rope_args(&w, rotary));
    launched(rope::norm_rope_backward(&x.client, arg(&x), args, arg(&dx), arg(&partial), dtype, shape));
    (dx, column_sums(&partial))
}

fn rope_shape<R: CubeRuntime>(x: &CubeTensor<R>, w: &CubeTensor<R>, eps: f64) -> RopeShape {
    let ([rows, cols], head_dim) = (dims(x), w.shape()[0]);
    RopeShape { rows, heads: cols / head_dim, head_dim, eps: eps as f32 }
}

fn rope_args<B, R>(w: &CubeTensor<R>, rotary: &Rotary<B>) -> RopeArgs<R>
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    let table = |x: &CubeTensor<R>| arg(&into_contiguous(x.clone()));
    RopeArgs { w: arg(w), cos: table(&rotary.cos), sin: table(&rotary.sin), positions: arg(&rotary.positions) }
}

/// The sums of the columns of a matrix.
pub(super) fn column_sums<R: CubeRuntime>(x: &CubeTensor<R>) -> CubeTensor<R> {
    let shape = dims(x);
    let sums = empty(x, [shape[1]], DType::F32);
    launched(column_sums::column_sums(&x.client, arg(x), arg(&sums), shape));
    sums
}

/// Computes `silu(gate) * up`, and if `wants_maxima` the largest magnitude that each cube of the launch found.
pub(super) fn gated<R: CubeRuntime>(
    gate: CubeTensor<R>,
    up: CubeTensor<R>,
    wants_maxima: bool,
) -> (CubeTensor<R>, Option<CubeTensor<R>>) {
    let (gate, up) = (into_contiguous(gate), into_contiguous(up));
    let (y, dtype) = (empty(&gate, dims(&gate), gate.dtype), gate.dtype.into());
    let len = swiglu::maxima_len(&gate.client, dtype, gate.meta.num_elements());
    let maxima = wants_maxima.then(|| empty(&gate, [len], DType::F32));
    launched(swiglu::swiglu(&gate.client, arg(&gate), arg(&up), arg(&y), maxima.as_ref().map(arg), dtype));
    (y, maxima)
}

/// Activations for linear layers. They are quantized by the maxima, if the kernel that made the values found them.
pub(super) fn activations<B, R>(
    values: CubeTensor<R>,
    maxima: Option<CubeTensor<R>>,
    spec: LinearSpec,
) -> Activations<B>
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    let packed = maxima.map(|maxima| {
        let amax = empty(&values, [quantize::AMAX_LEN], DType::F32);
        launched(quantize::amax_of_maxima(&values.client, arg(&maxima), 1.0, arg(&amax)));
        let [rows, cols] = dims(&values);
        coded(&values, amax, View::row_major(rows, cols), spec.activations(), false)
    });
    Activations { values, packed }
}

/// Quantizes the matrix that `view` sees in `x`.
pub(super) fn quantized<R: CubeRuntime>(
    x: &CubeTensor<R>,
    view: View,
    spec: QuantizeSpec,
    rotated: bool,
) -> PackedCube<R> {
    coded(x, amax_of(x, view, rotated), view, spec, rotated)
}

/// The same for one product: the values of the codes, without the tensor scale.
pub(super) fn unscaled<B, R>(x: &CubeTensor<R>, view: View, spec: QuantizeSpec, rotated: bool) -> Operand<B>
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    unscaled_of(x, amax_of(x, view, rotated), view, spec, rotated)
}

/// Whether products on this device read values, so that codes would have to be decoded for them.
pub(super) fn products_read_values<R: CubeRuntime>(x: &CubeTensor<R>) -> bool {
    x.dtype != DType::F32 && mma::supported(&x.client, x.dtype.into()) && !block_scaled::trusted(&x.client)
}

/// What the quantizer must know of all values of a matrix.
fn amax_of<R: CubeRuntime>(x: &CubeTensor<R>, view: View, rotated: bool) -> CubeTensor<R> {
    let (client, dtype) = (&x.client, x.dtype.into());
    let amax = empty(x, [quantize::AMAX_LEN], DType::F32);
    launched(if rotated {
        quantize::amax_rotated(client, arg(x), dtype, view, arg(&amax), None)
    } else {
        quantize::amax(client, arg(x), dtype, 1.0, arg(&amax))
    });
    amax
}

/// Quantizes `x` `[rows, cols]` along its rows as `along` says, and its transpose, which is `rotated` first, as `across` says.
/// One reading of `x` finds the largest magnitudes of both.
pub(super) fn quantized_both<B, R>(
    x: &CubeTensor<R>,
    [along, across]: [QuantizeSpec; 2],
    rotated: bool,
) -> (PackedCube<R>, Operand<B>)
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    let ([rows, cols], client, dtype) = (dims(x), &x.client, x.dtype.into());
    let view = View::transposed(rows, cols);
    let plain = empty(x, [quantize::AMAX_LEN], DType::F32);
    // Without a rotation both have the same magnitudes.
    let turned = if rotated { empty(x, [quantize::AMAX_LEN], DType::F32) } else { plain.clone() };
    launched(if rotated {
        quantize::amax_rotated(client, arg(x), dtype, view, arg(&turned), Some(arg(&plain)))
    } else {
        quantize::amax(client, arg(x), dtype, 1.0, arg(&plain))
    });
    let along = coded(x, plain, View::row_major(rows, cols), along, false);
    if products_read_values(x) {
        return (along, unscaled_of(x, turned, view, across, rotated));
    }
    (along, Operand::Packed(coded(x, turned, view, across, rotated)))
}

/// Quantizes matrices of one dtype with one tensor scale.
pub(super) fn quantized_together<R: CubeRuntime>(xs: Vec<CubeTensor<R>>, spec: QuantizeSpec) -> Vec<PackedCube<R>> {
    let xs: Vec<_> = xs.into_iter().map(into_contiguous).collect();
    let Some(first) = xs.first() else { return vec![] };
    let amax = empty(first, [quantize::AMAX_LEN], DType::F32);
    let (client, all) = (&first.client, xs.iter().map(arg).collect());
    launched(quantize::amax_together(client, all, first.dtype.into(), 1.0, arg(&amax)));
    let quantized = |x: &CubeTensor<R>| {
        let [rows, cols] = dims(x);
        coded(x, amax.clone(), View::row_major(rows, cols), spec, false)
    };
    xs.iter().map(quantized).collect()
}

/// Quantizes the matrix that `view` sees in `x`. `amax` has its largest magnitude and what follows from it ([`quantize::amax()`]).
pub(super) fn coded<R: CubeRuntime>(
    x: &CubeTensor<R>,
    amax: CubeTensor<R>,
    view: View,
    spec: QuantizeSpec,
    rotated: bool,
) -> PackedCube<R> {
    let View { rows, cols, .. } = view;
    let (client, dtype) = (&x.client, x.dtype.into());
    let codes = empty(x, [rows, words_per_row(cols)], DType::U32);
    let scales = empty(x, [rows, scales_per_row(cols)], DType::U8);
    let global = empty(x, [1], DType::U32);
    let packed = Packed { codes, scales, global };
    let out = QuantizeOutput::Packed(packed.args());
    launched(quantize::quantize(client, arg(x), dtype, arg(&amax), out, view, spec, rotated));
    packed
}

/// The same for one product.
fn unscaled_of<B, R>(
    x: &CubeTensor<R>,
    amax: CubeTensor<R>,
    view: View,
    spec: QuantizeSpec,
    rotated: bool,
) -> Operand<B>
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    let (values, global) = (empty(x, [view.rows, view.cols], x.dtype), empty(x, [1], DType::U32));
    let out = QuantizeOutput::Values { values: arg(&values), global: arg(&global) };
    launched(quantize::quantize(&x.client, arg(x), x.dtype.into(), arg(&amax), out, view, spec, rotated));
    Operand::Unscaled(Unscaled { values, global })
}
