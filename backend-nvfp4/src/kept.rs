//! Keys or values of past tokens, as a cache keeps them: in the number format in which the model computes, or as 8-bit numbers in
//! half the memory of 16-bit ones.

use crate::{
    kernels::Nvfp4Kernels,
    primitive::{primitive, tensor},
};
use burn::tensor::{
    DType, Int, Tensor,
    backend::Backend,
    ops::{FloatTensor, IntTensor},
    s,
};
use kernels_cubecl::e4m3::BYTES_PER_WORD;

/// How a cache keeps keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CacheFormat {
    /// In the number format in which the model computes.
    #[default]
    Computed,
    /// As E4M3 bytes without a scale: see [`kernels_cubecl::e4m3`]. A row has a multiple of 4 numbers.
    E4m3,
}

impl CacheFormat {
    /// Whether a row of a cache can have `width` numbers.
    pub fn fits(self, width: usize) -> bool {
        self == Self::Computed || width.is_multiple_of(BYTES_PER_WORD)
    }
}

/// Keys or values of a sequence, `[capacity, G*E]`. They are written in place when nothing else holds them.
#[derive(Debug, Clone)]
pub enum Kept<B: Backend> {
    /// In the number format in which the model computes.
    Computed(FloatTensor<B>),
    /// E4M3 bytes, four in a U32 word: `[capacity, G*E / 4]`.
    E4m3(IntTensor<B>),
}

impl<B: Nvfp4Kernels> Kept<B> {
    /// Room for `capacity` tokens with `width` numbers each, for a model that computes in `dtype`.
    pub fn zeros([capacity, width]: [usize; 2], format: CacheFormat, dtype: DType, device: &B::Device) -> Self {
        match format {
            CacheFormat::Computed => Self::Computed(primitive(Tensor::<B, 2>::zeros([capacity, width], (device, dtype)))),
            CacheFormat::E4m3 => {
                // Made flat: CUDA pads the rows of a matrix, and kernels read words without strides.
                let words = width / BYTES_PER_WORD;
                let flat = Tensor::<B, 1, Int>::zeros([capacity * words], (device, DType::U32));
                Self::E4m3(flat.reshape([capacity, words]).into_primitive())
            }
        }
    }

    /// Writes the rows `new` `[T, G*E]` behind the first `past` rows. Returns the numbers of all rows as they are kept,
    /// `[S, G*E]` in the number format of `new`.
    pub fn append(self, new: Tensor<B, 2>, past: usize) -> (Self, Tensor<B, 2>) {
        let end = past + new.dims()[0];
        match self {
            Self::Computed(buffer) => {
                let buffer = tensor::<B, 2>(buffer).slice_assign(s![past..end, ..], new);
                // The slice is no copy, because the first rows of a matrix are contiguous.
                (Self::Computed(primitive(buffer.clone())), buffer.slice(s![0..end, ..]))
            }
            Self::E4m3(words) => {
                let dtype = new.dtype();
                let new = Tensor::<B, 2, Int>::from_primitive(B::e4m3_encode(primitive(new)));
                let words = Tensor::<B, 2, Int>::from_primitive(words).slice_assign(s![past..end, ..], new);
                let all = words.clone().slice(s![0..end, ..]);
                (Self::E4m3(words.into_primitive()), tensor(B::e4m3_decode(all.into_primitive(), dtype)))
            }
        }
    }
}
