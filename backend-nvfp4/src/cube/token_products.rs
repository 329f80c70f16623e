//! Products of the newest tokens of sequences, a row each, with packed weights. There are few rows, so [`gemv()`] reads the codes
//! themselves. It has one order of sums for any number of rows: the result for a token does not depend on other sequences.

use super::{
    joint_products::packed_of,
    launch::{arg, dims, empty, launched},
    packed_cube::PackedCube,
};
use crate::packed::Operand;
use burn::tensor::{DType, backend::Backend};
use burn_cubecl::{CubeRuntime, kernel::into_contiguous, tensor::CubeTensor};
use kernels_cubecl::{
    gemv::{self, Gemv, gemv},
    mma,
};
use std::ops::Range;

/// See [`Nvfp4Kernels::token_products`](crate::Nvfp4Kernels::token_products). `None` where the kernel does not take the operands.
pub(super) fn token_products<B, R>(x: &Operand<B>, w: &[Operand<B>]) -> Option<Vec<CubeTensor<R>>>
where
    R: CubeRuntime,
    B: Backend<FloatTensorPrimitive = CubeTensor<R>, IntTensorPrimitive = CubeTensor<R>>,
{
    let Operand::Dense(x) = x else { return None };
    let weights: Vec<&PackedCube<R>> = w.iter().map(packed_of).collect::<Option<_>>()?;
    let [count, cols] = dims(x);
    let on_tensor_cores = x.dtype != DType::F32 && mma::supported(&x.client, x.dtype.into());
    if count == 0 || !on_tensor_cores || !gemv::fits(1, cols) {
        return None;
    }
    // More rows than a launch takes are multiplied one group after another.
    let groups = (0..count).step_by(gemv::MAX_ROWS).map(|first| first..count.min(first + gemv::MAX_ROWS));
    let of_group = |rows: Range<usize>| {
        let own = if rows.len() == count { x.clone() } else { B::float_slice(x.clone(), &[rows.into()]) };
        group(&into_contiguous(own), &weights)
    };
    let mut parts: Vec<Vec<CubeTensor<R>>> = groups.map(of_group).collect();
    if parts.len() == 1 {
        return parts.pop();
    }
    let below_each_other = |n: usize| B::float_cat(parts.iter().map(|part| part[n].clone()).collect(), 0);
    Some((0..weights.len()).map(below_each_other).collect())
}

/// The products of rows for which one launch has room.
fn group<R: CubeRuntime>(x: &CubeTensor<R>, weights: &[&PackedCube<R>]) -> Vec<CubeTensor<R>> {
    let (rows, dtype) = (dims(x)[0], x.dtype.into());
    let ys: Vec<_> = weights.iter().map(|w| empty(x, [rows, w.dims()[0]], x.dtype)).collect();
    let args = Gemv {
        x: arg(x),
        rows,
        weights: weights.iter().map(|w| w.args()).collect(),
        ys: ys.iter().map(arg).collect(),
        dtype,
    };
    launched(args.plan(&x.client).and_then(|plan| gemv(&x.client, args, plan)));
    ys
}
