//! The gradient of an embedding: the gradients of tokens, added to the rows of their ids. ```text for id { sum = 0; for token of
//! this id, in order { sum += dy[token] }; gradient[id] += sum }                // the plain loop ``` The host sorts the tokens
//! by their ids. A unit has some columns of an id and goes through the id's tokens, so that sums are f32, have one order, and
//! need no atomic operations. Reads each row of dy once, and the rows of the ids once more: bound by memory, or by latency if one
//! id has most of the tokens.

use crate::{
    device::vector_size,
    error::{KernelError, expect_len, index, require},
};
use cubecl::prelude::*;

const NAME: &str = "segment_sum";
/// Units of a cube.
const UNITS: usize = 128;
/// Words of an id: the id, where its tokens begin among all, and how many it has.
const WORDS: usize = 3;

/// Adds row t of `dy` (of type `dtype`, a row of `cols` values for each of `ids`) to row `ids[t]` of `gradient` (f32, rows of
/// `cols` values).
///
/// # Errors
/// If a buffer does not fit, or an id is no row of `gradient`.
pub fn segment_sum<R: Runtime>(
    client: &ComputeClient<R>,
    gradient: ArrayArg<R>,
    ids: &[u32],
    (dy, dtype): (ArrayArg<R>, StorageType),
    cols: usize,
) -> Result<(), KernelError> {
    expect_len(NAME, "dy", dy.size(), ids.len() * cols)?;
    let rows = gradient.size() / cols.max(1);
    expect_len(NAME, "gradient", gradient.size(), rows * cols)?;
    let most = ids.iter().copied().max().unwrap_or(0) as usize;
    require(NAME, ids.is_empty() || most < rows, || format!("id {most}; the gradient has {rows} rows"))?;
    if ids.is_empty() || cols == 0 {
        return Ok(());
    }
    let (order, segments) = sorted(ids);
    let count = segments.len() / WORDS;
    // Each number of different ids would leave buffers of other sizes behind.
    let padded: Vec<u32> = segments.into_iter().chain(std::iter::repeat(0)).take(ids.len() * WORDS).collect();
    let [order_handle, segments] = [&order, &padded].map(|words| client.create_from_slice(u32::as_bytes(words)));
    let vector = vector_size(client, dtype, cols).min(4);
    let wide = cols / vector;
    let cubes = CubeCount::Static(index(NAME, "ids", count)?, wide.div_ceil(UNITS) as u32, 1);
    // SAFETY: buffer lengths and ids were checked; a unit reads rows of tokens, and writes columns of a row that no other unit has.
    unsafe {
        let order = ArrayArg::from_raw_parts(order_handle, order.len());
        let segments = ArrayArg::from_raw_parts(segments, padded.len());
        segment_sum_kernel::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            vector,
            gradient,
            order,
            segments,
            dy,
            wide as u32,
            dtype,
        );
    }
    Ok(())
}

/// The tokens, sorted by their ids, and the [`WORDS`] of each id.
fn sorted(ids: &[u32]) -> (Vec<u32>, Vec<u32>) {
    let mut order: Vec<u32> = (0..ids.len() as u32).collect();
    order.sort_by_key(|token| ids[*token as usize]);
    let mut segments = Vec::new();
    let mut begin = 0;
    for segment in order.chunk_by(|a, b| ids[*a as usize] == ids[*b as usize]) {
        segments.extend([ids[segment[0] as usize], begin, segment.len() as u32]);
        begin += segment.len() as u32;
    }
    (order, segments)
}

#[cube(launch_unchecked)]
fn segment_sum_kernel<F: Float, N: Size>(
    gradient: &mut Array<Vector<f32, N>>,
    order: &Array<u32>,
    segments: &Array<u32>,
    dy: &Array<Vector<F, N>>,
    wide: u32,
    #[define(F)] _dtype: StorageType,
) {
    let column = CUBE_POS_Y * comptime!(UNITS as u32) + UNIT_POS;
    if column < wide {
        let segment = (CUBE_POS_X * comptime!(WORDS as u32)) as usize;
        let begin = segments[segment + 1];
        let end = begin + segments[segment + 2];
        let mut sum = Vector::<f32, N>::new(0.0f32);
        for n in begin..end {
            let token = (order[n as usize] as usize) * (wide as usize);
            sum += Vector::<f32, N>::cast_from(dy[token + column as usize]);
        }
        let own = (segments[segment] as usize) * (wide as usize) + column as usize;
        gradient[own] += sum;
    }
}
