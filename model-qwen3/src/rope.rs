//! Rotary position angles (Su et al., arXiv 2104.09864), in the half-split form of Qwen3:
//! `x' = x * cos + rotate_half(x) * sin`, `rotate_half([a, b]) = [-b, a]`, angle `p * theta^(-2i/E)`.

use backend_nvfp4::Rotary;
use burn::tensor::{DType, Int, Tensor, TensorData, backend::Backend};
use rayon::{
    iter::{IndexedParallelIterator, ParallelIterator},
    slice::ParallelSliceMut,
};

/// Rows of a table that a thread computes at least. One thread alone needs 12 ms for both tables of 8,192 rows of 64 angles, and
/// the device waits for them.
const ROWS: usize = 64;

/// Makes a table of angles from the smallest to the largest position, and the row of each token in it. The angles are
/// computed in f32 on the host, as in Hugging Face's implementation.
pub fn rotary<B: Backend>(positions: Vec<u32>, head_dim: usize, theta: f64, device: &B::Device) -> Rotary<B> {
    let half = head_dim / 2;
    let end = positions.iter().max().map_or(0, |p| *p as usize + 1);
    // The table begins at the smallest position, so that a decode step computes a single row.
    let first = positions.iter().min().map_or(0, |p| *p as usize);
    let inverse: Vec<f32> = (0..half).map(|i| 1.0 / (theta as f32).powf(2.0 * i as f32 / head_dim as f32)).collect();
    let table = |f: fn(f32) -> f32| {
        let mut values = vec![0.0; (end - first) * half];
        let fill = |(row, angles): (usize, &mut [f32])| {
            angles.iter_mut().zip(&inverse).for_each(|(x, w)| *x = f((first + row) as f32 * w));
        };
        // Rows that two threads would not share stay on this thread, as the single row of a decode step does.
        if end - first < 2 * ROWS {
            values.chunks_mut(half).enumerate().for_each(fill);
        } else {
            values.par_chunks_mut(half).enumerate().with_min_len(ROWS).for_each(fill);
        }
        let data = TensorData::new(values, [end - first, half]);
        Tensor::<B, 2>::from_data(data, (device, DType::F32)).into_primitive().tensor()
    };
    let len = positions.len();
    let positions: Vec<i32> = positions.into_iter().map(|p| p as i32 - first as i32).collect();
    Rotary {
        cos: table(f32::cos),
        sin: table(f32::sin),
        positions: Tensor::<B, 1, Int>::from_data(TensorData::new(positions, [len]), device).into_primitive(),
    }
}
