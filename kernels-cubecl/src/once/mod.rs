//! Launches every kernel once, on zeros of a small shape, for compile checks and memory checkers. No result is checked.

use crate::{KernelError, adamw::AdamwStep, matmul::PackedArgs, mma, rng::Stream};
use cubecl::{
    ir::{ElemType, FloatKind},
    prelude::*,
};

mod optimizer;
mod portable;
mod tensor_cores;

const F32: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::F32));

/// Launches every kernel that the device can run for values of type `dtype`, with `rows` tokens: the portable kernels
/// always, the others if the device has tensor cores for `dtype`.
///
/// # Errors
/// If a launch is refused, which is a bug.
pub fn once<R: Runtime>(client: &ComputeClient<R>, dtype: StorageType, rows: usize) -> Result<(), KernelError> {
    let zeros = Zeros { client, dtype };
    portable::quantizers(&zeros, rows)?;
    portable::products(&zeros, rows)?;
    portable::small_operations(&zeros, rows)?;
    optimizer::optimizer(&zeros, rows * portable::COLS)?;
    if dtype == F32 || !mma::supported(client, dtype) {
        return Ok(());
    }
    tensor_cores::gemms(&zeros, rows)?;
    tensor_cores::block_scaled_products(&zeros, rows)?;
    tensor_cores::gemvs(&zeros, rows)?;
    tensor_cores::attention(&zeros, rows)
}

/// A device, and buffers of zeros on it.
struct Zeros<'a, R: Runtime> {
    client: &'a ComputeClient<R>,
    /// The type of values.
    dtype: StorageType,
}

impl<R: Runtime> Zeros<'_, R> {
    /// `len` elements of `size` bytes.
    fn sized(&self, len: usize, size: usize) -> ArrayArg<R> {
        let handle = self.client.create_from_slice(&vec![0u8; len * size]);
        // SAFETY: the buffer was made with this length.
        unsafe { ArrayArg::from_raw_parts(handle, len) }
    }

    /// `len` bytes.
    fn bytes(&self, len: usize) -> ArrayArg<R> {
        self.sized(len, 1)
    }

    /// `len` f32 values, or words.
    fn floats(&self, len: usize) -> ArrayArg<R> {
        self.sized(len, 4)
    }

    /// `len` values of the type that is asked for.
    fn values(&self, len: usize) -> ArrayArg<R> {
        self.sized(len, self.dtype.size())
    }

    fn packed(&self, rows: usize, cols: usize) -> PackedArgs<R> {
        let (codes, scales) = (self.floats(rows * cols / 8), self.bytes(rows * cols / 16));
        PackedArgs { codes, scales, global: self.floats(1), rows, cols }
    }
}

/// A stream of random numbers, whichever.
const STREAM: Stream = Stream { seed: 1, step: 2, stream: 3 };

/// A step of the optimizer, whichever.
pub(crate) const SOME_STEP: AdamwStep = AdamwStep {
    lr: 1e-4,
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    weight_decay: 0.1,
    bias1: 0.1,
    bias2: 0.05,
    grad_scale: 1.0,
    stream: STREAM,
};
