//! The gate of the MLP (Shazeer, arXiv 2002.05202) and its gradient, with `s = 1 / (1 + exp(-g))`:
//! ```text
//! y = g * s * u        du = dy * g * s        dg = dy * u * s * (1 + g * (1 - s))
//! for i { y[i] = silu(g[i]) * u[i] }                                               // the plain loop
//! ```
//! Computed in f32, rounded once. The forward can leave the largest `|y|` of each cube, which is what a quantiser of y asks
//! first. Moves g, u in and y out (g, u, dy in, dg, du out): bound by memory. The gradients
//! take the place of g and u, the largest activations of a block.

use crate::{
    device::{flat_launch, vector_size},
    error::{KernelError, expect_len},
    reduce::{cube_max, largest},
};
use cubecl::prelude::*;

/// Cubes of a forward launch at most: each leaves one maximum.
const CUBES: usize = 4096;

/// `y = silu(gate) * up`, all of type `dtype`. `maxima` (f32, [`maxima_len`]) takes the largest `|y|` of each cube, NaN
/// ignored.
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
    let mut tops = SequenceArg::new();
    if let Some(maxima) = maxima {
        expect_len(NAME, "maxima", maxima.size(), maxima_len(client, dtype, len))?;
        tops.push(maxima);
    }
    let vector = vector_size(client, dtype, len);
    let count = CubeCount::Static(maxima_len(client, dtype, len) as u32, 1, 1);
    // SAFETY: the three buffers are equally long; units stop at their end, and there is a maximum a cube.
    unsafe { swiglu_kernel::launch_unchecked(client, count, CubeDim::new_1d(256), vector, gate, up, y, tops, dtype) };
    Ok(())
}

/// Cubes of a forward launch over `len` values.
pub fn maxima_len<R: Runtime>(client: &ComputeClient<R>, dtype: StorageType, len: usize) -> usize {
    (len / vector_size(client, dtype, len)).div_ceil(256).clamp(1, CUBES)
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
    maxima: &mut Sequence<Array<f32>>,
    #[define(F)] _dtype: StorageType,
) {
    let mut top = 0.0f32;
    let mut at = ABSOLUTE_POS;
    while at < y.len() {
        let g = Vector::<f32, N>::cast_from(gate[at]);
        let u = Vector::<f32, N>::cast_from(up[at]);
        let value = Vector::<F, N>::cast_from(g * sigmoid(g) * u);
        y[at] = value;
        if comptime!(maxima.len() == 1) {
            top = max(top, largest(value));
        }
        at += (CUBE_COUNT_X * 256u32) as usize;
    }
    #[unroll]
    for i in 0..maxima.len() {
        let top = cube_max(top);
        if UNIT_POS == 0u32 {
            maxima.index_mut(i)[CUBE_POS_X as usize] = top;
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
