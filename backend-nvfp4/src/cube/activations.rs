//! The quantiser, and the norm and the gate that leave it the maximum it asks for first.

use super::{arg, dims, empty, launched};
use crate::{
    Activations, LinearSpec, Nvfp4Primitive,
    quantize::{QuantizeSpec, Scaling, View},
};
use burn::tensor::{DType, backend::Backend};
use burn_cubecl::{CubeRuntime, kernel::into_contiguous, tensor::CubeTensor};
use kernels_cubecl::{
    layout::{scales_per_row, words_per_row},
    quantize, rms_norm, swiglu,
};

/// What a norm's launch made.
pub(super) struct Normed<R: CubeRuntime> {
    /// What was normalised.
    pub(super) x: CubeTensor<R>,
    pub(super) y: CubeTensor<R>,
    /// The largest `|y|` of each cube.
    pub(super) maxima: Option<CubeTensor<R>>,
}

pub(super) fn normed<R: CubeRuntime>(
    x: CubeTensor<R>,
    added: Option<CubeTensor<R>>,
    w: CubeTensor<R>,
    eps: f64,
    measured: bool,
) -> Normed<R> {
    let (x, w, added) = (into_contiguous(x), into_contiguous(w), added.map(into_contiguous));
    let [rows, cols] = dims(&x);
    let y = empty(&x, [rows, cols], x.dtype);
    let sum = added.as_ref().map(|_| empty(&x, [rows, cols], x.dtype));
    let maxima = measured.then(|| empty(&x, [rms_norm::maxima_len(rows)], DType::F32));
    let fused = rms_norm::Fused {
        residual: added.as_ref().zip(sum.as_ref()).map(|(added, sum)| [arg(added), arg(sum)]),
        maxima: maxima.as_ref().map(arg),
    };
    let dtype = x.dtype.into();
    launched(rms_norm::rms_norm(&x.client, arg(&x), arg(&w), arg(&y), fused, dtype, [rows, cols], eps as f32));
    Normed { x: sum.unwrap_or(x), y, maxima }
}

/// The gated up, and the largest magnitude of each cube of the launch.
pub(super) fn gated<R: CubeRuntime>(
    gate: CubeTensor<R>,
    up: CubeTensor<R>,
    measured: bool,
) -> (CubeTensor<R>, Option<CubeTensor<R>>) {
    let (gate, up) = (into_contiguous(gate), into_contiguous(up));
    let (y, dtype) = (empty(&gate, dims(&gate), gate.dtype), gate.dtype.into());
    let len = swiglu::maxima_len(&gate.client, dtype, gate.meta.num_elements());
    let maxima = measured.then(|| empty(&gate, [len], DType::F32));
    launched(swiglu::swiglu(&gate.client, arg(&gate), arg(&up), arg(&y), maxima.as_ref().map(arg), dtype));
    (y, maxima)
}

/// What linear layers read, its codes made with the maxima that the kernel which made it left.
pub(super) fn activations<B, R>(
    values: CubeTensor<R>,
    maxima: Option<CubeTensor<R>>,
    spec: LinearSpec,
) -> Activations<B>
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    let codes = maxima.map(|maxima| {
        let amax = empty(&values, [quantize::AMAX_LEN], DType::F32);
        launched(quantize::amax_of_maxima(&values.client, arg(&maxima), 1.0, arg(&amax)));
        let [rows, cols] = dims(&values);
        coded::<B, R>(&values, amax, View::row_major(rows, cols), spec.activations(), false)
    });
    Activations { values, codes }
}

/// The matrix that `view` sees in `x`, quantised.
pub(super) fn quantized<B, R>(x: &CubeTensor<R>, view: View, spec: QuantizeSpec, rotated: bool) -> Nvfp4Primitive<B>
where
    R: CubeRuntime,
    B: Backend<IntTensorPrimitive = CubeTensor<R>>,
{
    let (client, dtype) = (&x.client, x.dtype.into());
    let amax = empty(x, [quantize::AMAX_LEN], DType::F32);
    if spec.scaling == Scaling::Two {
        launched(if rotated {
            quantize::amax_rotated(client, arg(x), dtype, view, arg(&amax))
        } else {
            quantize::amax(client, arg(x), dtype, 1.0, arg(&amax))
        });
    }
    coded::<B, R>(x, amax, view, spec, rotated)
}

/// The matrix that `view` sees in `x`, quantised with what was measured of it.
pub(super) fn coded<B, R>(
    x: &CubeTensor<R>,
    amax: CubeTensor<R>,
    view: View,
    spec: QuantizeSpec,
    rotated: bool,
) -> Nvfp4Primitive<B>
where
    R: CubeRuntime,
    B: Backend<IntTensorPrimitive = CubeTensor<R>>,
{
    let View { rows, cols, .. } = view;
    let (client, dtype) = (&x.client, x.dtype.into());
    let codes = empty(x, [rows, words_per_row(cols)], DType::U32);
    let scales = empty(x, [rows, scales_per_row(cols)], DType::U8);
    let global = empty(x, [1], DType::U32);
    let out = (arg(&codes), arg(&scales), arg(&global));
    launched(quantize::quantize(client, arg(x), dtype, arg(&amax), out.0, out.1, out.2, view, spec, rotated));
    Nvfp4Primitive { codes, scales, global }
}
