//! One AdamW step over a tensor: its buffers made writable, and a launch for each chunk.

use super::launch::{arg, launched, writable};
use crate::{
    optim::{AdamwState, MasterWeight, Moment, StateKind},
    packed::Packed,
};
use burn::tensor::backend::Backend;
use burn_cubecl::{CubeRuntime, kernel::into_contiguous, tensor::CubeTensor};
use kernels_cubecl::adamw::{self, AdamwStep, Chunk, Coding, DenseArgs, Master, StateArgs};

/// See [`Nvfp4Kernels::adamw`](crate::Nvfp4Kernels::adamw).
pub(super) fn adamw<B, R>(
    w: MasterWeight<B>,
    grad: CubeTensor<R>,
    state: AdamwState<B>,
    step: AdamwStep,
    chunk: usize,
) -> (MasterWeight<B>, AdamwState<B>)
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    let grad = into_contiguous(grad);
    let len = grad.meta.num_elements();
    let client = grad.client.clone();
    let gradient = || (arg(&grad), grad.dtype.into());
    let moments = [state.m, state.v].map(writable_moment);
    let w = writable_weight(w);
    for start in (0..len).step_by(chunk) {
        let chunk = Chunk { start, end: (start + chunk).min(len) };
        let [m, v] = &moments;
        launched(match (&w, [m, v]) {
            (MasterWeight::Dense { w, master, residual }, [Moment::Float(m), Moment::Float(v)]) => {
                let w = dense_args(w, *master, residual.as_ref(), len);
                let states = (m.dtype.into(), state.kind == StateKind::Bf16);
                adamw::adamw_float(&client, w, gradient(), [arg(m), arg(v)], states, step, chunk)
            }
            (MasterWeight::Dense { w, master, residual }, moments) => {
                let (coding, args) = quantized(state.kind, moments);
                let w = dense_args(w, *master, residual.as_ref(), len);
                adamw::adamw_quantised(&client, w, gradient(), args, coding, step, chunk)
            }
            (MasterWeight::Packed(w), moments) => {
                let (coding, args) = quantized(state.kind, moments);
                adamw::adamw_packed(&client, w.args(), gradient(), args, coding, step, chunk)
            }
        });
    }
    let [m, v] = moments;
    (w, AdamwState { kind: state.kind, m, v })
}

fn writable_moment<B, R>(moment: Moment<B>) -> Moment<B>
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    match moment {
        Moment::Float(x) => Moment::Float(writable(x)),
        Moment::Quantized { codes, absmax, table } => {
            Moment::Quantized { codes: writable(codes), absmax: writable(absmax), table }
        }
    }
}

fn writable_weight<B, R>(w: MasterWeight<B>) -> MasterWeight<B>
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    match w {
        MasterWeight::Dense { w, master, residual } => {
            MasterWeight::Dense { w: writable(w), master, residual: residual.map(writable) }
        }
        MasterWeight::Packed(w) => {
            MasterWeight::Packed(Packed { codes: writable(w.codes), scales: writable(w.scales), global: w.global })
        }
    }
}

/// A dense master for the kernel. A form without a residual passes the buffer of the weight in its place, which the
/// kernel never touches.
fn dense_args<R: CubeRuntime>(
    w: &CubeTensor<R>,
    master: Master,
    residual: Option<&CubeTensor<R>>,
    len: usize,
) -> DenseArgs<R> {
    let residual = arg(residual.unwrap_or(w));
    debug_assert_eq!(residual.size(), len);
    DenseArgs { w: arg(w), dtype: w.dtype.into(), residual, master }
}

/// The coding and the buffers of quantized moments.
fn quantized<B, R>(kind: StateKind, moments: [&Moment<B>; 2]) -> (Coding, [StateArgs<R>; 2])
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    let args = moments.map(|moment| match moment {
        Moment::Float(_) => panic!("an NVFP4 master has quantized moments"),
        Moment::Quantized { codes, absmax, table } => {
            StateArgs { codes: arg(codes), scales: arg(codes), absmax: arg(absmax), table: arg(table) }
        }
    });
    (kind.coding().expect("a kind with codes"), args)
}
