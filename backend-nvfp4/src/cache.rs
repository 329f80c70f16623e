//! What a cache does with the rows that it keeps: it makes room for them, writes, reads and copies them.

use crate::{
    kept::{CacheFormat, Kept},
    kernels::Nvfp4Kernels,
    primitive::{primitive, tensor},
};
use burn::tensor::{DType, Int, Tensor, TensorData, backend::Backend, s};
use kernels_cubecl::e4m3::BYTES_PER_WORD;
use std::ops::Range;

impl<B: Nvfp4Kernels> Kept<B> {
    /// Room for `rows` tokens with `width` numbers each, for a model that computes in `dtype`.
    pub fn zeros([rows, width]: [usize; 2], format: CacheFormat, dtype: DType, device: &B::Device) -> Self {
        // Made flat: CUDA pads the rows of a matrix, and kernels read them without strides.
        match format {
            CacheFormat::Computed => {
                let flat = Tensor::<B, 1>::zeros([rows * width], (device, dtype));
                Self::Computed(primitive(flat.reshape([rows, width])))
            }
            CacheFormat::E4m3 => {
                let words = width / BYTES_PER_WORD;
                let flat = Tensor::<B, 1, Int>::zeros([rows * words], (device, DType::U32));
                Self::E4m3(flat.reshape([rows, words]).into_primitive())
            }
        }
    }

    /// Writes the numbers `new` `[T, G*E]` of T tokens to these rows, range after range.
    #[must_use]
    pub fn written(self, rows: &[Range<usize>], new: Tensor<B, 2>) -> Self {
        let mut first = 0;
        let mut part_of = |range: &Range<usize>| {
            first += range.len();
            s![first - range.len()..first, ..]
        };
        match self {
            Self::Computed(buffer) => {
                let write = |buffer: Tensor<B, 2>, range: &Range<usize>| {
                    buffer.slice_assign(s![range.clone(), ..], new.clone().slice(part_of(range)))
                };
                Self::Computed(primitive(rows.iter().fold(tensor(buffer), write)))
            }
            Self::E4m3(words) => {
                let new = Tensor::<B, 2, Int>::from_primitive(B::e4m3_encode(primitive(new)));
                let write = |words: Tensor<B, 2, Int>, range: &Range<usize>| {
                    words.slice_assign(s![range.clone(), ..], new.clone().slice(part_of(range)))
                };
                Self::E4m3(rows.iter().fold(Tensor::from_primitive(words), write).into_primitive())
            }
        }
    }

    /// The numbers of these rows as they are kept, range after range: `[S, G*E]` in `dtype`, the number format in which the
    /// model computes. One range of [`Self::Computed`] is no copy, because the rows of a matrix are contiguous. Several are copied
    /// by one launch.
    pub fn read(&self, rows: &[Range<usize>], dtype: DType) -> Tensor<B, 2> {
        match self {
            Self::Computed(buffer) => {
                let all: Tensor<B, 2> = tensor(buffer.clone());
                match rows {
                    [range] => all.slice(s![range.clone(), ..]),
                    ranges => all.clone().select(0, indices(ranges, &all.device())),
                }
            }
            Self::E4m3(words) => {
                let all = Tensor::<B, 2, Int>::from_primitive(words.clone());
                let words = match rows {
                    [range] => all.slice(s![range.clone(), ..]),
                    ranges => all.clone().select(0, indices(ranges, &all.device())),
                };
                tensor(B::e4m3_decode(words.into_primitive(), dtype))
            }
        }
    }

    /// Copies rows to as many others.
    #[must_use]
    pub fn copied(self, from: Range<usize>, to: Range<usize>) -> Self {
        // Selected rows are a copy. A slice would hold the buffer, so that it could not be written in place.
        match self {
            Self::Computed(buffer) => {
                let buffer: Tensor<B, 2> = tensor(buffer);
                let rows = buffer.clone().select(0, indices(&[from], &buffer.device()));
                Self::Computed(primitive(buffer.slice_assign(s![to, ..], rows)))
            }
            Self::E4m3(words) => {
                let words = Tensor::<B, 2, Int>::from_primitive(words);
                let rows = words.clone().select(0, indices(&[from], &words.device()));
                Self::E4m3(words.slice_assign(s![to, ..], rows).into_primitive())
            }
        }
    }
}

fn indices<B: Backend>(ranges: &[Range<usize>], device: &B::Device) -> Tensor<B, 1, Int> {
    let rows: Vec<i32> = ranges.iter().flat_map(|range| range.clone().map(|row| row as i32)).collect();
    let count = rows.len();
    Tensor::from_data(TensorData::new(rows, [count]), device)
}
