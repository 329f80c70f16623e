//! The gate of the MLP (Shazeer, arXiv 2002.05202) and its gradient, with `s = 1 / (1 + exp(-gate))`:
//! ```text
//! y = gate * s * up        dup = dy * gate * s        dgate = dy * up * s * (1 + gate * (1 - s))
//! for i { y[i] = silu(gate[i]) * up[i] }                                           // the plain loop
//! ```
//! Computed in f32 and rounded once. The forward can store the largest `|y|` of each cube, which a quantizer of y
//! needs first. The gradients replace gate and up, the largest activations of a block. Reads two values and writes
//! one (backward: reads three, writes two): bound by memory.

use crate::{
    device::{flat_launch, sequence, vector_size},
    error::{KernelError, expect_len},
    reduce::{cube_max, largest},
};
use cubecl::prelude::*;

/// The most cubes of a forward launch; each stores one maximum.
const CUBES: usize = 4096;

/// `y = silu(gate) * up`, all of type `dtype`. `maxima` (f32, [`maxima_len`]) receives the largest `|y|` of each
/// cube; NaN is ignored.
///
/// # Errors
/// If the buffers differ in length.
pub fn swiglu<R: Runtime>(
    client: &ComputeClient<R>,
    gate: ArrayArg<R>,
    up: ArrayArg<R>,
    y: ArrayArg<R>,
    maxima: Option<ArrayArg<R>>,
    dtype: StorageType,
) -> Result<(), KernelError> {
    const NAME: &str = "swiglu";
    let len = gate.size();
    expect_len(NAME, "up", up.size(), len)?;
    expect_len(NAME, "y", y.size(), len)?;
    if let Some(maxima) = &maxima {
        expect_len(NAME, "maxima", maxima.size(), maxima_len(client, dtype, len))?;
    }
    let vector = vector_size(client, dtype, len);
    let count = CubeCount::Static(maxima_len(client, dtype, len) as u32, 1, 1);
    let maxima = sequence(maxima);
    // SAFETY: the three buffers are equally long and units stop at their end; there is room for one maximum a cube.
    unsafe { swiglu_kernel::launch_unchecked(client, count, CubeDim::new_1d(256), vector, gate, up, y, maxima, dtype) };
    Ok(())
}

/// Number of cubes of a forward launch over `len` values.
pub fn maxima_len<R: Runtime>(client: &ComputeClient<R>, dtype: StorageType, len: usize) -> usize {
    (len / vector_size(client, dtype, len)).div_ceil(256).clamp(1, CUBES)
}

/// Replaces `gate` and `up` by `dgate` and `dup`.
///
/// # Errors
/// If the buffers differ in length.
pub fn swiglu_backward<R: Runtime>(
    client: &ComputeClient<R>,
    gate: ArrayArg<R>,
    up: ArrayArg<R>,
    dy: ArrayArg<R>,
    dtype: StorageType,
) -> Result<(), KernelError> {
    const NAME: &str = "swiglu backward";
    let len = gate.size();
    for (name, arg) in [("up", &up), ("dy", &dy)] {
        expect_len(NAME, name, arg.size(), len)?;
    }
    let vector = vector_size(client, dtype, len);
    let (count, dim) = flat_launch(len / vector);
    // SAFETY: the three buffers are equally long; units past their end stop, and each unit writes only what it alone
    // read.
    unsafe { swiglu_backward_kernel::launch_unchecked(client, count, dim, vector, gate, up, dy, dtype) };
    Ok(())
}

#[cube(launch_unchecked)]
fn swiglu_kernel<F: Float, N: Size>(
    gate: &Array<Vector<F, N>>,
    up: &Array<Vector<F, N>>,
    y: &mut Array<Vector<F, N>>,
    maxima: &mut Sequence<Array<f32>>,
    #[define(F)] _dtype: StorageType,
) {
    let mut top = 0.0f32;
    let mut at = ABSOLUTE_POS;
    while at < y.len() {
        let gates = Vector::<f32, N>::cast_from(gate[at]);
        let ups = Vector::<f32, N>::cast_from(up[at]);
        let value = Vector::<F, N>::cast_from(gates * sigmoid(gates) * ups);
        y[at] = value;
        if comptime!(maxima.len() == 1) {
            top = max(top, largest(value));
        }
        at += (CUBE_COUNT_X * 256u32) as usize;
    }
    if comptime!(maxima.len() == 1) {
        let top = cube_max(top);
        if UNIT_POS == 0u32 {
            maxima.index_mut(0usize)[CUBE_POS_X as usize] = top;
        }
    }
}

#[cube(launch_unchecked)]
fn swiglu_backward_kernel<F: Float, N: Size>(
    gate: &mut Array<Vector<F, N>>,
    up: &mut Array<Vector<F, N>>,
    dy: &Array<Vector<F, N>>,
    #[define(F)] _dtype: StorageType,
) {
    if ABSOLUTE_POS < dy.len() {
        let gates = Vector::<f32, N>::cast_from(gate[ABSOLUTE_POS]);
        let ups = Vector::<f32, N>::cast_from(up[ABSOLUTE_POS]);
        let dys = Vector::<f32, N>::cast_from(dy[ABSOLUTE_POS]);
        let s = sigmoid(gates);
        let one = Vector::<f32, N>::new(1.0f32);
        up[ABSOLUTE_POS] = Vector::cast_from(dys * gates * s);
        gate[ABSOLUTE_POS] = Vector::cast_from(dys * ups * s * (one + gates * (one - s)));
    }
}

#[cube]
fn sigmoid<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    let one = Vector::<f32, N>::new(1.0f32);
    one / (one + (Vector::<f32, N>::new(0.0f32) - x).exp())
}
