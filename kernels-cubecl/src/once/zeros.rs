//! Buffers of zeros, and arbitrary scalars, for launches whose results nobody reads.

use crate::{adamw::Updated, operands::PackedArgs, rng::Stream};
use cubecl::{
    ir::{ElemType, FloatKind},
    prelude::*,
};

pub(super) const F32: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::F32));

/// A device, and buffers of zeros on it.
pub(super) struct Zeros<'a, R: Runtime> {
    pub(super) client: &'a ComputeClient<R>,
    /// The type of values.
    pub(super) dtype: StorageType,
}

impl<R: Runtime> Zeros<'_, R> {
    /// `len` elements of `size` bytes.
    pub(super) fn sized(&self, len: usize, size: usize) -> ArrayArg<R> {
        let handle = self.client.create_from_slice(&vec![0u8; len * size]);
        // SAFETY: the buffer was made with this length.
        unsafe { ArrayArg::from_raw_parts(handle, len) }
    }

    /// `len` bytes.
    pub(super) fn bytes(&self, len: usize) -> ArrayArg<R> {
        self.sized(len, 1)
    }

    /// `len` f32 values, or words.
    pub(super) fn floats(&self, len: usize) -> ArrayArg<R> {
        self.sized(len, 4)
    }

    /// `len` values of the type that is asked for.
    pub(super) fn values(&self, len: usize) -> ArrayArg<R> {
        self.sized(len, self.dtype.size())
    }

    /// `len` elements of `size` bytes that a step of the optimizer writes to another buffer.
    pub(super) fn updated(&self, len: usize, size: usize) -> Updated<R> {
        Updated { old: self.sized(len, size), new: self.sized(len, size) }
    }

    pub(super) fn packed(&self, rows: usize, cols: usize) -> PackedArgs<R> {
        let (codes, scales) = (self.floats(rows * cols / 8), self.bytes(rows * cols / 16));
        PackedArgs { codes, scales, global: self.floats(1), rows, cols }
    }
}

/// An arbitrary stream of random numbers.
pub(super) const STREAM: Stream = Stream { seed: 1, step: 2, stream: 3 };
