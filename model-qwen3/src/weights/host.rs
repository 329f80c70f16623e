//! The values of a tensor on the host.

use crate::{ModelError, bytes::FloatType};
use burn::tensor::{DType, Tensor, TensorData, Transaction, backend::Backend};
use half::bf16;
use rayon::{iter::ParallelIterator, slice::ParallelSlice};
use std::ops::Range;

/// Bytes that are read from a device at a time. Each read waits for whatever the device has been given to do, which beside a
/// training is up to a step. Larger reads take more pinned memory, for which the first of them waits: beside steps of 0.19 s on
/// an H100, a first checkpoint of 15 GiB cost 0.8 s with reads of 256 MiB, and 0.6 s with half of that; the next one cost 0.3 s
/// and 0.1 s. With 64 MiB the thread that writes it was no longer done before the next one.
pub const TRANSFER: usize = 128 << 20;

/// The pieces of a transfer, each of which is read by itself. CubeCL reads into pinned memory, which it keeps, and of which
/// it takes pages that are up to eight times as large as a piece: pages for a whole embedding took 9 GiB and four seconds.
pub const PIECES: usize = 8;

/// Reads the values of a float tensor to the host.
///
/// # Errors
/// If the device failed.
pub fn to_host<B: Backend, const RANK: usize>(x: Tensor<B, RANK>) -> Result<Vec<f32>, ModelError> {
    let data = to_data(x)?;
    // `iter` goes value by value through a boxed iterator, and each generated token reads a whole vocabulary of logits.
    Ok(match data.dtype {
        DType::F32 => data.into_vec().map_err(failed)?,
        DType::BF16 => data.into_vec::<bf16>().map_err(failed)?.into_iter().map(bf16::to_f32).collect(),
        _ => data.iter().collect(),
    })
}

/// Reads the values of a float tensor to the host, in the type that they have on the device.
///
/// # Errors
/// If the device failed.
pub(super) fn to_data<B: Backend, const RANK: usize>(x: Tensor<B, RANK>) -> Result<TensorData, ModelError> {
    x.try_into_data().map_err(failed)
}

/// Some rows of a matrix on the host.
pub(super) struct HostRows {
    /// The number of the matrix among those that were asked for.
    pub matrix: usize,
    pub rows: Range<usize>,
    pub data: TensorData,
}

/// Reads some rows of each matrix to the host, all in one transfer, in pieces of about `piece` bytes, in order.
///
/// # Errors
/// If the device failed.
pub(super) fn rows_to_data<B: Backend>(
    matrices: Vec<(Tensor<B, 2>, Range<usize>)>,
    piece: usize,
) -> Result<Vec<HostRows>, ModelError> {
    let (mut transfer, mut parts) = (Transaction::<B>::default(), Vec::new());
    for (number, (matrix, rows)) in matrices.into_iter().enumerate() {
        let step = rows_of(piece, matrix.dims()[1] * matrix.dtype().size());
        for start in rows.clone().step_by(step) {
            let part = start..rows.end.min(start + step);
            // A part that is the whole matrix is a slice, too. On the CPU, Burn copies a slice at once, but reads a buffer that
            // something else holds value by value. On a GPU a slice is a view.
            transfer = transfer.register(matrix.clone().slice(part.clone()));
            parts.push((number, part));
        }
    }
    let read = transfer.try_execute().map_err(failed)?;
    Ok(parts.into_iter().zip(read).map(|((matrix, rows), data)| HostRows { matrix, rows, data }).collect())
}

/// How many rows of so many bytes a piece has: as many as fit, but at least one.
fn rows_of(piece: usize, row: usize) -> usize {
    (piece / row.max(1)).max(1)
}

/// The first value that is not finite.
pub(super) fn not_finite(data: &TensorData) -> Option<f32> {
    match data.dtype {
        DType::F32 => first(data.as_slice::<f32>().ok()?, |x| x.is_finite()).copied(),
        DType::BF16 => first(data.as_slice::<bf16>().ok()?, |x| x.is_finite()).map(|x| x.to_f32()),
        _ => data.iter().find(|x: &f32| !x.is_finite()),
    }
}

/// The first value that is not good. Every thread looks at whole pieces without a branch, many values at a time.
fn first<Value: Sync>(values: &[Value], good: impl Fn(&Value) -> bool + Sync) -> Option<&Value> {
    let bad = |piece: &&[Value]| !piece.iter().fold(true, |all, x| all & good(x));
    values.par_chunks(1 << 16).find_first(bad)?.iter().find(|x| !good(x))
}

/// The type of values in a file, if a device hands values of this type over as the file holds them.
pub(super) fn as_in_files(dtype: DType) -> Option<FloatType> {
    match dtype {
        DType::F32 => Some(FloatType::F32),
        DType::BF16 => Some(FloatType::Bf16),
        _ => None,
    }
}

fn failed(e: impl std::fmt::Debug) -> ModelError {
    ModelError::Device(format!("{e:?}"))
}

#[cfg(test)]
mod tests {
    use super::rows_of;

    #[test]
    fn a_piece_has_as_many_rows_as_fit() {
        assert_eq!(rows_of(1000, 90), 11);
        assert_eq!(rows_of(99, 100), 1, "a row that is larger than a piece is read whole");
        assert_eq!(rows_of(1000, 0), 1000, "rows may be empty");
    }
}
