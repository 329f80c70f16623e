//! The gate of the MLP (Shazeer, arXiv 2002.05202) and its gradient, with `s = 1 / (1 + exp(-g))`:
//! ```text
//! y = g * s * u        du = dy * g * s        dg = dy * u * s * (1 + g * (1 - s))
//! for i { y[i] = silu(g[i]) * u[i] }                                               // the plain loop
//! ```
//! Computed in f32, rounded once. Moves g, u in and y out (g, u, dy in, dg, du out): bound by memory. The gradients
//! take the place of g and u, the largest activations of a block.

use crate::{
    device::{flat_launch, vector_size},
    error::{KernelError, expect_len},
};
use cubecl::prelude::*;

/// `y = silu(gate) * up`, all of type `dtype`.
///
/// # Errors
/// If the buffers differ in length.
pub fn swiglu<R: Runtime>(
    client: &ComputeClient<R>,
    gate: ArrayArg<R>,
    up: ArrayArg<R>,
    y: ArrayArg<R>,
    dtype: StorageType,
) -> Result<(), KernelError> {
    const NAME: &str = "swiglu";
    let len = gate.size();
    expect_len(NAME, "up", up.size(), len)?;
    expect_len(NAME, "y", y.size(), len)?;
    let vector = vector_size(client, dtype, len);
    let (count, dim) = flat_launch(len / vector);
    // SAFETY: the three buffers are equally long; units past their end stop.
    unsafe { swiglu_kernel::launch_unchecked(client, count, dim, vector, gate, up, y, dtype) };
    Ok(())
}

/// `gate` and `up` become `dgate` and `dup`.
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
    // SAFETY: the three buffers are equally long; units past their end stop, and each writes what it alone read.
    unsafe { swiglu_backward_kernel::launch_unchecked(client, count, dim, vector, gate, up, dy, dtype) };
    Ok(())
}

#[cube(launch_unchecked)]
fn swiglu_kernel<F: Float, N: Size>(
    gate: &Array<Vector<F, N>>,
    up: &Array<Vector<F, N>>,
    y: &mut Array<Vector<F, N>>,
    #[define(F)] _dtype: StorageType,
) {
    if ABSOLUTE_POS < y.len() {
        let g = Vector::<f32, N>::cast_from(gate[ABSOLUTE_POS]);
        let u = Vector::<f32, N>::cast_from(up[ABSOLUTE_POS]);
        y[ABSOLUTE_POS] = Vector::cast_from(g * sigmoid(g) * u);
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
        let g = Vector::<f32, N>::cast_from(gate[ABSOLUTE_POS]);
        let u = Vector::<f32, N>::cast_from(up[ABSOLUTE_POS]);
        let d = Vector::<f32, N>::cast_from(dy[ABSOLUTE_POS]);
        let s = sigmoid(g);
        let one = Vector::<f32, N>::new(1.0f32);
        up[ABSOLUTE_POS] = Vector::cast_from(d * g * s);
        gate[ABSOLUTE_POS] = Vector::cast_from(d * u * s * (one + g * (one - s)));
    }
}

#[cube]
fn sigmoid<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    let one = Vector::<f32, N>::new(1.0f32);
    one / (one + (Vector::<f32, N>::new(0.0f32) - x).exp())
}
