//! Allocates, writes, reads and copies the rows of a KV cache in either number format.

use crate::{
    cache::{CacheBuffer, CacheFormat},
    kernels::Nvfp4Kernels,
    primitive::{primitive, tensor},
};
use burn::tensor::{BasicOps, DType, Element, Int, Tensor, TensorData, backend::Backend, s};
use kernels_cubecl::e4m3::BYTES_PER_WORD;
use std::ops::Range;

impl<B: Nvfp4Kernels> CacheBuffer<B> {
    /// Allocates room for `rows` tokens with `width` numbers each, for a model that computes in `dtype`.
    pub fn zeros([rows, width]: [usize; 2], format: CacheFormat, dtype: DType, device: &B::Device) -> Self {
        // Made flat: CUDA pads the rows of a matrix, and kernels read them without strides.
        match format {
            CacheFormat::Native => {
                let flat = Tensor::<B, 1>::zeros([rows * width], (device, dtype));
                Self::Native(primitive(flat.reshape([rows, width])))
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
    pub fn write(self, rows: &[Range<usize>], new: Tensor<B, 2>) -> Self {
        match self {
            Self::Native(buffer) => Self::Native(primitive(with_rows(tensor(buffer), rows, new))),
            Self::E4m3(words) => {
                let new = Tensor::<B, 2, Int>::from_primitive(B::e4m3_encode(primitive(new)));
                Self::E4m3(with_rows(Tensor::from_primitive(words), rows, new).into_primitive())
            }
        }
    }

    /// The numbers of these rows as they are stored, range after range: `[S, G*E]` in `dtype`, the number format in which the
    /// model computes.
    pub fn read(&self, rows: &[Range<usize>], dtype: DType) -> Tensor<B, 2> {
        match self {
            Self::Native(buffer) => rows_of(tensor(buffer.clone()), rows),
            Self::E4m3(words) => {
                let words = rows_of(Tensor::<B, 2, Int>::from_primitive(words.clone()), rows);
                tensor(B::e4m3_decode(words.into_primitive(), dtype))
            }
        }
    }

    /// Copies rows to as many others.
    #[must_use]
    pub fn copy_rows(self, from: Range<usize>, to: Range<usize>) -> Self {
        match self {
            Self::Native(buffer) => Self::Native(primitive(with_copy(tensor::<B, 2>(buffer), from, to))),
            Self::E4m3(words) => {
                Self::E4m3(with_copy(Tensor::<B, 2, Int>::from_primitive(words), from, to).into_primitive())
            }
        }
    }
}

/// The matrix with `new` in these rows.
fn with_rows<B: Backend, Numbers>(
    matrix: Tensor<B, 2, Numbers>,
    rows: &[Range<usize>],
    new: Tensor<B, 2, Numbers>,
) -> Tensor<B, 2, Numbers>
where
    Numbers: BasicOps<B>,
    Numbers::Elem: Element,
{
    let mut first = 0;
    let write = |matrix: Tensor<B, 2, Numbers>, range: &Range<usize>| {
        let part = new.clone().slice(s![first..first + range.len(), ..]);
        first += range.len();
        matrix.slice_assign(s![range.clone(), ..], part)
    };
    rows.iter().fold(matrix, write)
}

/// These rows of a matrix. One range is no copy, because rows are contiguous; several are copied by one launch.
fn rows_of<B: Backend, Numbers>(matrix: Tensor<B, 2, Numbers>, rows: &[Range<usize>]) -> Tensor<B, 2, Numbers>
where
    Numbers: BasicOps<B>,
    Numbers::Elem: Element,
{
    match rows {
        [range] => matrix.slice(s![range.clone(), ..]),
        ranges => matrix.clone().select(0, indices(ranges, &matrix.device())),
    }
}

/// The matrix with a copy of some of its rows in place of others.
fn with_copy<B: Backend, Numbers>(
    matrix: Tensor<B, 2, Numbers>,
    from: Range<usize>,
    to: Range<usize>,
) -> Tensor<B, 2, Numbers>
where
    Numbers: BasicOps<B>,
    Numbers::Elem: Element,
{
    // A slice would hold the buffer, so that it could not be written in place. Selected rows have a buffer of their own.
    let rows = matrix.clone().select(0, indices(&[from], &matrix.device()));
    matrix.slice_assign(s![to, ..], rows)
}

fn indices<B: Backend>(ranges: &[Range<usize>], device: &B::Device) -> Tensor<B, 1, Int> {
    let rows: Vec<i32> = ranges.iter().flat_map(|range| range.clone().map(|row| row as i32)).collect();
    let count = rows.len();
    Tensor::from_data(TensorData::new(rows, [count]), device)
}
