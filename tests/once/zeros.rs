//! Buffers of zeros, and arbitrary scalars, for launches whose results nobody reads.

use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cubecl::{
    client::ComputeClient,
    ir::{ElemType, FloatKind, StorageType},
    prelude::ArrayArg,
};
use kernels_cubecl::{
    adamw::Updated,
    any_cuda::{AnyCudaDevice, AnyCudaRuntime},
    operands::PackedArgs,
    rng::Stream,
};

pub(super) const F32: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::F32));

/// A device, and buffers of zeros on it.
pub(super) struct Zeros<'a> {
    pub(super) client: &'a ComputeClient<AnyCudaRuntime>,
    pub(super) device: &'a AnyCudaDevice,
    /// The type of values.
    pub(super) dtype: StorageType,
}

pub(super) type Buffer = ArrayArg<AnyCudaRuntime>;

impl Zeros<'_> {
    /// `len` elements of `size` bytes.
    pub(super) fn sized(&self, len: usize, size: usize) -> Buffer {
        self.filled(&vec![0; len * size], size)
    }

    /// These bytes, as elements of `size` bytes.
    pub(super) fn filled(&self, bytes: &[u8], size: usize) -> Buffer {
        // A launch takes the type of the elements as an argument of its own. The type of the buffer only counts them.
        let dtype = match size {
            1 => DType::U8,
            2 => DType::U16,
            4 => DType::U32,
            _ => unreachable!("elements of {size} bytes"),
        };
        let (shape, handle) = (Shape::new([bytes.len() / size]), self.client.create_from_slice(bytes));
        CubeTensor::new_contiguous(self.client.clone(), self.device.clone(), shape, handle, dtype).into_array_arg()
    }

    /// `len` bytes.
    pub(super) fn bytes(&self, len: usize) -> Buffer {
        self.sized(len, 1)
    }

    /// `len` f32 values, or words.
    pub(super) fn floats(&self, len: usize) -> Buffer {
        self.sized(len, 4)
    }

    /// `len` values of the type that is asked for.
    pub(super) fn values(&self, len: usize) -> Buffer {
        self.sized(len, self.dtype.size())
    }

    /// `len` elements of `size` bytes that a step of the optimizer writes to another buffer.
    pub(super) fn updated(&self, len: usize, size: usize) -> Updated<AnyCudaRuntime> {
        Updated { old: self.sized(len, size), new: self.sized(len, size) }
    }

    pub(super) fn packed(&self, rows: usize, cols: usize) -> PackedArgs<AnyCudaRuntime> {
        let (codes, scales) = (self.floats(rows * cols / 8), self.bytes(rows * cols / 16));
        PackedArgs { codes, scales, global: self.floats(1), rows, cols }
    }
}

/// An arbitrary stream of random numbers.
pub(super) const STREAM: Stream = Stream { seed: 1, step: 2, stream: 3 };
