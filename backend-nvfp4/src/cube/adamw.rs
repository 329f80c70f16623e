//! One AdamW step over a tensor: where it writes, and a launch for each chunk. A buffer that nothing else holds is updated
//! in place; one that is held elsewhere, as the undo copy of a step holds it, stays as it is, and a new one is written.

use super::{
    activations::coded,
    launch::{arg, dims, empty, launched, writable},
    packed_cube::PackedCube,
};
use crate::{
    held_codes::HeldPrimitive,
    optim::{AdamwState, Judged, Moment, StateKind},
    packed::Packed,
};
use burn::tensor::{DType, TensorMetadata, backend::Backend};
use burn_cubecl::{
    CubeRuntime, kernel::into_contiguous, ops::numeric::empty_device_contiguous_dtype, tensor::CubeTensor,
};
use kernels_cubecl::{
    adamw::{self, AdamwStep, Chunk, CodesArgs, DenseArgs, JudgedArgs, Master, StateArgs},
    operands::PackedArgs,
    quantize::{self, QuantizeSpec, Rounding, Scaling, View},
};

/// See [`Nvfp4Kernels::adamw`](crate::Nvfp4Kernels::adamw).
pub(super) fn dense<B, R>(
    w: CubeTensor<R>,
    form: Master,
    grad: Judged<B>,
    mut state: AdamwState<B>,
    step: AdamwStep,
    chunk: usize,
) -> (CubeTensor<R>, AdamwState<B>)
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    let left =
        state.codes.take().and_then(|codes| LeftCodes::of(codes, state.kind, grad.gradient.meta.num_elements(), chunk));
    let (w, grad, state) = (UpdatedTensor::of(w), contiguous(grad), UpdatedState::of(state));
    let client = grad.gradient.client.clone();
    for chunk in chunks(grad.gradient.meta.num_elements(), chunk) {
        let residual = state.residual.as_ref().map(UpdatedTensor::args);
        let args = DenseArgs { w: w.args(), dtype: w.new.dtype.into(), residual, master: form };
        let gradient = judged(&grad);
        launched(match state.kind.coding() {
            None => {
                let [m, v] = &state.moments;
                let states = (m.values.new.dtype.into(), state.kind == StateKind::Bf16);
                adamw::adamw_float(&client, args, gradient, [m.values.args(), v.values.args()], states, step, chunk)
            }
            Some(coding) => {
                let codes = left.as_ref().map(LeftCodes::args);
                adamw::adamw_quantized(&client, args, gradient, state.quantized(), coding, codes, step, chunk)
            }
        });
    }
    let codes = left.map(|left| left.of_new(&w.new));
    (w.new, AdamwState { codes, ..state.into_new() })
}

/// See [`Nvfp4Kernels::nvfp4_held`](crate::Nvfp4Kernels::nvfp4_held).
pub(super) fn held<B, R>(w: CubeTensor<R>, kind: StateKind, spec: QuantizeSpec) -> Option<HeldPrimitive<B>>
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    let [rows, cols] = dims(&w);
    maxima_len(&w, kind, [rows, cols], spec)?;
    let w = into_contiguous(w);
    let amax = empty(&w, [quantize::AMAX_LEN], DType::U32);
    launched(quantize::amax(&w.client, arg(&w), w.dtype.into(), 1.0, arg(&amax)));
    Some(HeldPrimitive { packed: coded(&w, amax.clone(), View::row_major(rows, cols), spec, false), amax, spec })
}

/// The number of partial maxima that a step on the device of `like` leaves with codes. `None` if it leaves none.
fn maxima_len<R: CubeRuntime>(
    like: &CubeTensor<R>,
    kind: StateKind,
    [rows, cols]: [usize; 2],
    spec: QuantizeSpec,
) -> Option<usize> {
    kind.coding()?;
    let nearest = spec.scaling == Scaling::Two && spec.rounding == Rounding::Nearest;
    nearest.then(|| adamw::maxima_len(&like.client, rows, cols, spec.block)).flatten()
}

/// The codes that a step over a whole matrix leaves.
struct LeftCodes<R: CubeRuntime> {
    packed: PackedCube<R>,
    held: CubeTensor<R>,
    maxima: CubeTensor<R>,
    spec: QuantizeSpec,
}

impl<R: CubeRuntime> LeftCodes<R> {
    /// Codes in the place of those of the weight before the step. `None` if the step cannot leave any.
    fn of<B>(codes: HeldPrimitive<B>, kind: StateKind, len: usize, chunk: usize) -> Option<Self>
    where
        B: Backend<IntTensorPrimitive = CubeTensor<R>>,
    {
        let HeldPrimitive { packed, amax: held, spec } = codes;
        if chunk < len {
            return None;
        }
        let maxima = empty(&held, [maxima_len(&held, kind, packed.dims(), spec)?], DType::F32);
        // The tensor scale is written only if it changes.
        let (codes, scales) = (UpdatedTensor::of(packed.codes).new, UpdatedTensor::of(packed.scales).new);
        let packed = Packed { codes, scales, global: writable(packed.global) };
        Some(Self { packed, held, maxima, spec })
    }

    fn args(&self) -> CodesArgs<R> {
        let (packed, held, maxima) = (self.packed.args(), arg(&self.held), arg(&self.maxima));
        CodesArgs { packed, held, maxima, block: self.spec.block }
    }

    /// The codes once the step has written the weight `w`: it is quantized again if its largest magnitude is a new one.
    fn of_new<B>(self, w: &CubeTensor<R>) -> HeldPrimitive<B>
    where
        B: Backend<IntTensorPrimitive = CubeTensor<R>>,
    {
        let Self { packed, held, maxima, spec } = self;
        let (client, dtype, amax) = (&w.client, w.dtype.into(), empty(&held, [quantize::AMAX_LEN], DType::U32));
        launched(quantize::amax_of_maxima(client, arg(&maxima), 1.0, arg(&amax)));
        launched(quantize::renew(client, arg(w), dtype, arg(&amax), arg(&held), packed.args(), spec.block));
        HeldPrimitive { packed, amax, spec }
    }
}

/// See [`Nvfp4Kernels::adamw_packed`](crate::Nvfp4Kernels::adamw_packed).
pub(super) fn packed<B, R>(
    w: PackedCube<R>,
    grad: Judged<B>,
    state: AdamwState<B>,
    step: AdamwStep,
    chunk: usize,
) -> (PackedCube<R>, AdamwState<B>)
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    let [rows, cols] = w.dims();
    let (codes, scales) = (UpdatedTensor::of(w.codes), UpdatedTensor::of(w.scales));
    let (grad, state) = (contiguous(grad), UpdatedState::of(state));
    let client = grad.gradient.client.clone();
    let coding = state.kind.coding().expect("an NVFP4 master has quantized moments");
    for chunk in chunks(grad.gradient.meta.num_elements(), chunk) {
        let w = PackedArgs { codes: codes.args(), scales: scales.args(), global: arg(&w.global), rows, cols };
        let gradient = judged(&grad);
        launched(adamw::adamw_packed(&client, w, gradient, state.quantized(), coding, step, chunk));
    }
    (Packed { codes: codes.new, scales: scales.new, global: w.global }, state.into_new())
}

fn contiguous<B, R>(grad: Judged<B>) -> Judged<B>
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>>,
{
    Judged { gradient: into_contiguous(grad.gradient), verdict: grad.verdict }
}

/// The gradient and the verdict as a kernel takes them.
fn judged<B, R>(grad: &Judged<B>) -> JudgedArgs<R>
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>>,
{
    JudgedArgs { values: arg(&grad.gradient), dtype: grad.gradient.dtype.into(), verdict: arg(&grad.verdict) }
}

fn chunks(len: usize, chunk: usize) -> impl Iterator<Item = Chunk> {
    (0..len).step_by(chunk).map(move |start| Chunk { start, end: (start + chunk).min(len) })
}

/// The tensor that a step reads, and the one that it writes. All chunks together write the whole of it.
struct UpdatedTensor<R: CubeRuntime> {
    old: CubeTensor<R>,
    new: CubeTensor<R>,
}

impl<R: CubeRuntime> UpdatedTensor<R> {
    fn of(x: CubeTensor<R>) -> Self {
        let old = into_contiguous(x);
        let new = if old.can_mut() {
            old.clone()
        } else {
            empty_device_contiguous_dtype(old.client.clone(), old.device.clone(), old.shape(), old.dtype)
        };
        Self { old, new }
    }

    /// The buffers as a kernel takes them.
    fn args(&self) -> adamw::Updated<R> {
        adamw::Updated { old: arg(&self.old), new: arg(&self.new) }
    }
}

/// [`AdamwState`] as a step reads and writes it.
struct UpdatedState<R: CubeRuntime> {
    kind: StateKind,
    moments: [UpdatedMoment<R>; 2],
    residual: Option<UpdatedTensor<R>>,
}

struct UpdatedMoment<R: CubeRuntime> {
    /// Floats or codes.
    values: UpdatedTensor<R>,
    /// The absmax of each block of codes, and the two tables: of values, and for the search.
    scales: Option<(UpdatedTensor<R>, [CubeTensor<R>; 2])>,
}

impl<R: CubeRuntime> UpdatedState<R> {
    fn of<B>(state: AdamwState<B>) -> Self
    where
        B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
    {
        let moments = [state.m, state.v].map(|moment| match moment {
            Moment::Float(x) => UpdatedMoment { values: UpdatedTensor::of(x), scales: None },
            Moment::Quantized { codes, absmax, table, search } => {
                let scales = Some((UpdatedTensor::of(absmax), [table, search]));
                UpdatedMoment { values: UpdatedTensor::of(codes), scales }
            }
        });
        Self { kind: state.kind, moments, residual: state.residual.map(UpdatedTensor::of) }
    }

    /// The buffers of quantized moments.
    fn quantized(&self) -> [StateArgs<R>; 2] {
        self.moments.each_ref().map(|moment| {
            let (absmax, [table, search]) = moment.scales.as_ref().expect("quantized moments have scales");
            StateArgs { codes: moment.values.args(), absmax: absmax.args(), table: arg(table), search: arg(search) }
        })
    }

    /// The state after the step.
    fn into_new<B>(self) -> AdamwState<B>
    where
        B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
    {
        let [m, v] = self.moments.map(|moment| match moment.scales {
            None => Moment::Float(moment.values.new),
            Some((absmax, [table, search])) => {
                Moment::Quantized { codes: moment.values.new, absmax: absmax.new, table, search }
            }
        });
        AdamwState { kind: self.kind, m, v, residual: self.residual.map(|residual| residual.new), codes: None }
    }
}
