//! What every launch needs: contiguous buffers, their shapes, and a panic where a kernel refuses.

use burn::tensor::{DType, Shape, TensorMetadata};
use burn_cubecl::{
    CubeRuntime, kernel::into_contiguous, ops::numeric::empty_device_contiguous_dtype, tensor::CubeTensor,
};
use cubecl::prelude::ArrayArg;
use kernels_cubecl::KernelError;

/// Panics where a kernel refuses a launch. A kernel refuses only what this crate got wrong, because the shapes of
/// callers are checked where they enter.
pub(super) fn launched(result: Result<(), KernelError>) {
    if let Err(error) = result {
        panic!("{error}");
    }
}

/// The rows and columns of a matrix.
pub(super) fn dims<R: CubeRuntime>(x: &CubeTensor<R>) -> [usize; 2] {
    let shape = x.shape();
    assert_eq!(shape.rank(), 2, "a matrix is expected, got {shape:?}");
    [shape[0], shape[1]]
}

/// Allocates a contiguous tensor on the device of `like`. Burn's ordinary constructor pads rows on CUDA.
pub(super) fn empty<R: CubeRuntime, const RANK: usize>(
    like: &CubeTensor<R>,
    shape: [usize; RANK],
    dtype: DType,
) -> CubeTensor<R> {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), Shape::new(shape), dtype)
}

/// The buffer of a tensor as a kernel takes it.
pub(super) fn arg<R: CubeRuntime>(x: &CubeTensor<R>) -> ArrayArg<R> {
    assert!(x.is_contiguous(), "kernels read buffers without strides");
    x.clone().into_array_arg()
}

/// The tensor itself if nothing else holds its buffer, else a copy of it.
pub(super) fn writable<R: CubeRuntime>(x: CubeTensor<R>) -> CubeTensor<R> {
    let x = into_contiguous(x);
    if x.can_mut() { x } else { x.copy() }
}
