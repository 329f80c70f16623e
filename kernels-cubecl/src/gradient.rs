//! Two operations on gradients between the products and the optimizer: the sum of their squares, for the global norm,
//! and the sum over micro-batches.
//!
//! ```text
//! out = sum_i x[i]^2                  sum[i] = sum[i] + x[i]
//! for i { out += x[i] * x[i] }        for i { sum[i] += x[i] }                     // the plain loops
//! if out is not finite { verdict += 1 }
//! ```
//! The verdict on the gradients of a step stays 0 as long as all are finite. The optimizer reads it on the device and changes
//! nothing once it is not 0.
//!
//! Sums are f32 and added in a fixed order. Each value is read once (and for the second operation written once):
//! bound by memory.

use crate::{
    device::{flat_launch, vector_size},
    error::{KernelError, expect_len, require},
    reduce::{cube_sum, lanes},
};
use cubecl::prelude::*;

/// `sums[place] = sum_i x[i]^2`, and `verdict[0] += 1` if that is not finite; both f32. Two launches: up to 1,024 cubes write one
/// sum each, then [`judged_sum()`] adds these.
///
/// # Errors
/// If `sums` has no such place, or `verdict` does not hold one element.
pub fn square_sum<R: Runtime>(
    client: &ComputeClient<R>,
    x: ArrayArg<R>,
    dtype: StorageType,
    sums_and_place: (ArrayArg<R>, usize),
    verdict: ArrayArg<R>,
) -> Result<(), KernelError> {
    let vector = vector_size(client, dtype, x.size());
    let cubes = (x.size() / vector).div_ceil(256 * 8).clamp(1, 1024);
    let scratch = client.empty(cubes * 4);
    let (count, dim) = (CubeCount::Static(cubes as u32, 1, 1), CubeDim::new_1d(256));
    // SAFETY: `scratch` holds one f32 a cube.
    let partial = || unsafe { ArrayArg::from_raw_parts(scratch.clone(), cubes) };
    // SAFETY: each cube writes its place of `scratch`, and stops at the end of `x`.
    unsafe { square_sum_kernel::launch_unchecked(client, count, dim, vector, x, partial(), true, dtype) };
    judged_sum(client, partial(), sums_and_place, verdict)
}

/// `sums[place] = sum_i x[i]`, and `verdict[0] += 1` if that is not finite; all f32. One cube adds, in an order that is always the
/// same.
///
/// # Errors
/// If `sums` has no such place, or `verdict` does not hold one element.
pub fn judged_sum<R: Runtime>(
    client: &ComputeClient<R>,
    x: ArrayArg<R>,
    (sums, place): (ArrayArg<R>, usize),
    verdict: ArrayArg<R>,
) -> Result<(), KernelError> {
    let places = sums.size();
    require("judged_sum", place < places, || format!("there is no place {place} among {places} sums"))?;
    expect_len("judged_sum", "verdict", verdict.size(), 1)?;
    let (dim, one) = (CubeDim::new_1d(256), CubeCount::Static(1, 1, 1));
    // SAFETY: `verdict` holds one f32, and `sums` has the place; the kernel stops at the end of `x`.
    unsafe { judged_sum_kernel::launch_unchecked(client, one, dim, x, sums, place as u32, verdict) };
    Ok(())
}

/// `out[0] = sum_i x[i]`, both in f32. One cube adds, in an order that is always the same.
///
/// # Errors
/// If `out` does not hold one element.
pub fn sum<R: Runtime>(client: &ComputeClient<R>, x: ArrayArg<R>, out: ArrayArg<R>) -> Result<(), KernelError> {
    expect_len("sum", "out", out.size(), 1)?;
    let float = f32::as_type_native_unchecked().storage_type();
    let (dim, one) = (CubeDim::new_1d(256), CubeCount::Static(1, 1, 1));
    // SAFETY: `out` holds one f32; the kernel stops at the end of `x`.
    unsafe { square_sum_kernel::launch_unchecked(client, one, dim, 1, x, out, false, float) };
    Ok(())
}

/// `sum[i] += x[i]` in f32, rounded to the type of `sum`.
///
/// # Errors
/// If the buffers differ in length.
pub fn accumulate<R: Runtime>(
    client: &ComputeClient<R>,
    sum: (ArrayArg<R>, StorageType),
    x: (ArrayArg<R>, StorageType),
) -> Result<(), KernelError> {
    let len = sum.0.size();
    expect_len("accumulate", "x", x.0.size(), len)?;
    let vector = vector_size(client, x.1, len).min(vector_size(client, sum.1, len));
    let (count, dim) = flat_launch(len.div_ceil(vector));
    // SAFETY: both buffers hold `len` elements; units past them do nothing.
    unsafe { accumulate_kernel::launch_unchecked(client, count, dim, vector, sum.0, x.0, sum.1, x.1) };
    Ok(())
}

#[cube(launch_unchecked)]
fn square_sum_kernel<F: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    out: &mut Array<f32>,
    #[comptime] square: bool,
    #[define(F)] _dtype: StorageType,
) {
    let total = sum_of_turns(x, square);
    if UNIT_POS == 0u32 {
        out[CUBE_POS_X as usize] = total;
    }
}

#[cube(launch_unchecked)]
fn judged_sum_kernel(
    partial: &Array<Vector<f32, Const<1>>>,
    sums: &mut Array<f32>,
    place: u32,
    verdict: &mut Array<f32>,
) {
    let total = sum_of_turns(partial, false);
    if UNIT_POS == 0u32 {
        sums[place as usize] = total;
        if u32::reinterpret(total) & 0x7F80_0000u32 == 0x7F80_0000u32 {
            verdict[0usize] += 1.0f32;
        }
    }
}

/// The sum of the values, or of their squares, that fall to this cube: its units take turns with those of all other cubes.
#[cube]
fn sum_of_turns<F: Float, N: Size>(x: &Array<Vector<F, N>>, #[comptime] square: bool) -> f32 {
    let mut sum = Vector::<f32, N>::new(0.0f32);
    let mut at = ABSOLUTE_POS;
    let step = (CUBE_COUNT_X * 256u32) as usize;
    while at < x.len() {
        let value = Vector::<f32, N>::cast_from(x[at]);
        sum += if comptime!(square) { value * value } else { value };
        at += step;
    }
    cube_sum(lanes(sum))
}

#[cube(launch_unchecked)]
fn accumulate_kernel<Total: Float, F: Float, N: Size>(
    sum: &mut Array<Vector<Total, N>>,
    x: &Array<Vector<F, N>>,
    #[define(Total)] _sum_dtype: StorageType,
    #[define(F)] _x_dtype: StorageType,
) {
    let at = ABSOLUTE_POS;
    if at < sum.len() {
        sum[at] = Vector::cast_from(Vector::<f32, N>::cast_from(sum[at]) + Vector::<f32, N>::cast_from(x[at]));
    }
}
