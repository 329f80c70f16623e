//! One AdamW step over a tensor: its buffers made writable, and a launch for each chunk.

use super::{
    launch::{arg, launched, writable},
    packed::PackedCube,
};
use crate::{
    optim::{AdamwState, Moment, StateKind},
    packed::Packed,
};
use burn::tensor::backend::Backend;
use burn_cubecl::{CubeRuntime, kernel::into_contiguous, tensor::CubeTensor};
use kernels_cubecl::adamw::{self, AdamwStep, Chunk, Coding, DenseArgs, Master, StateArgs};

/// See [`Nvfp4Kernels::adamw`](crate::Nvfp4Kernels::adamw).
pub(super) fn dense<B, R>(
    w: CubeTensor<R>,
    form: Master,
    grad: CubeTensor<R>,
    state: AdamwState<B>,
    step: AdamwStep,
    chunk: usize,
) -> (CubeTensor<R>, AdamwState<B>)
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    let (w, grad, state) = (writable(w), into_contiguous(grad), writable_state(state));
    let client = grad.client.clone();
    for chunk in chunks(grad.meta.num_elements(), chunk) {
        let residual = state.residual.as_ref().map(arg);
        let args = DenseArgs { w: arg(&w), dtype: w.dtype.into(), residual, master: form };
        let gradient = (arg(&grad), grad.dtype.into());
        launched(match (&state.m, &state.v) {
            (Moment::Float(m), Moment::Float(v)) => {
                let states = (m.dtype.into(), state.kind == StateKind::Bf16);
                adamw::adamw_float(&client, args, gradient, [arg(m), arg(v)], states, step, chunk)
            }
            _ => {
                let (coding, moments) = quantized(&state);
                adamw::adamw_quantized(&client, args, gradient, moments, coding, step, chunk)
            }
        });
    }
    (w, state)
}

/// See [`Nvfp4Kernels::adamw_packed`](crate::Nvfp4Kernels::adamw_packed).
pub(super) fn packed<B, R>(
    w: PackedCube<R>,
    grad: CubeTensor<R>,
    state: AdamwState<B>,
    step: AdamwStep,
    chunk: usize,
) -> (PackedCube<R>, AdamwState<B>)
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    let w = Packed { codes: writable(w.codes), scales: writable(w.scales), global: w.global };
    let (grad, state) = (into_contiguous(grad), writable_state(state));
    let client = grad.client.clone();
    for chunk in chunks(grad.meta.num_elements(), chunk) {
        let (coding, moments) = quantized(&state);
        let gradient = (arg(&grad), grad.dtype.into());
        launched(adamw::adamw_packed(&client, w.args(), gradient, moments, coding, step, chunk));
    }
    (w, state)
}

fn chunks(len: usize, chunk: usize) -> impl Iterator<Item = Chunk> {
    (0..len).step_by(chunk).map(move |start| Chunk { start, end: (start + chunk).min(len) })
}

fn writable_state<B, R>(state: AdamwState<B>) -> AdamwState<B>
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    let moment = |moment: Moment<B>| match moment {
        Moment::Float(x) => Moment::Float(writable(x)),
        Moment::Quantized { codes, absmax, table } => {
            Moment::Quantized { codes: writable(codes), absmax: writable(absmax), table }
        }
    };
    AdamwState { kind: state.kind, m: moment(state.m), v: moment(state.v), residual: state.residual.map(writable) }
}

/// The coding and the buffers of quantized moments.
fn quantized<B, R>(state: &AdamwState<B>) -> (Coding, [StateArgs<R>; 2])
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    let args = [&state.m, &state.v].map(|moment| match moment {
        Moment::Float(_) => panic!("an NVFP4 master has quantized moments"),
        Moment::Quantized { codes, absmax, table } => {
            StateArgs { codes: arg(codes), absmax: arg(absmax), table: arg(table) }
        }
    });
    (state.kind.coding().expect("a kind with codes"), args)
}
