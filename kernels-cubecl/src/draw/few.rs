//! The draw of a token from a few most likely ones. A cube draws a row: its units compute weights and ratios, and the first unit
//! goes through them in order. Reads what [`mod@crate::likeliest`] wrote: bound by latency.

use super::row::{WORDS, drawing, exponential, random_words, weight};
use crate::{
    error::KernelError,
    likeliest::{MOST, likeliest, words},
};
use cubecl::prelude::*;

/// Draws a token of each row that `drawings` (its words) names, of at most `kept` candidates.
///
/// # Errors
/// As [`likeliest`].
pub(super) fn draw<R: Runtime>(
    client: &ComputeClient<R>,
    x: ArrayArg<R>,
    drawings: &[u32],
    out: ArrayArg<R>,
    [rows, cols]: [usize; 2],
    kept: usize,
) -> Result<(), KernelError> {
    let len = rows * words(kept);
    let handle = client.empty(len * 4);
    // SAFETY: the buffer was made with this length.
    let found = || unsafe { ArrayArg::from_raw_parts(handle.clone(), len) };
    likeliest(client, x, found(), [rows, cols], kept)?;
    let numbers = client.create_from_slice(u32::as_bytes(drawings));
    let cubes = CubeCount::Static((drawings.len() / WORDS) as u32, 1, 1);
    // SAFETY: the caller has checked the length of `out`; a cube reads and writes its own row, and no candidate behind `kept`.
    unsafe {
        let numbers = ArrayArg::from_raw_parts(numbers, drawings.len());
        few_kernel::launch_unchecked(
            client,
            cubes,
            CubeDim::new_1d(MOST as u32),
            found(),
            numbers,
            out,
            rows as u32,
            kept as u32,
        );
    }
    Ok(())
}

#[cube(launch_unchecked)]
fn few_kernel(found: &Array<u32>, numbers: &Array<u32>, out: &mut Array<u32>, rows: u32, #[comptime] count: u32) {
    let drawing = drawing(numbers);
    let first = drawing.row * comptime!(words(count as usize) as u32);
    let tokens = first + 1u32;
    let logits = tokens + count;
    let mut weights = SharedMemory::<f32>::new(comptime!(MOST));
    let mut ratios = SharedMemory::<f32>::new(comptime!(MOST));
    if UNIT_POS < count {
        let logit = f32::reinterpret(found[(logits + UNIT_POS) as usize]);
        let own = weight(logit, f32::reinterpret(found[logits as usize]), drawing.temperature);
        let id = found[(tokens + UNIT_POS) as usize];
        let mut random = Array::<u32>::new(4usize);
        random_words(id / 4u32, &drawing, &mut random);
        weights[UNIT_POS as usize] = own;
        ratios[UNIT_POS as usize] = own / exponential(random[(id % 4u32) as usize]);
    }
    sync_cube();
    if UNIT_POS == 0u32 {
        let nucleus = within_top_p(&weights, drawing.kept, drawing.top_p);
        let pick = largest_ratio(&weights, &ratios, nucleus, drawing.min_p);
        out[drawing.row as usize] = found[(tokens + pick) as usize];
        out[(rows + drawing.row) as usize] = found[first as usize];
    }
}

/// How many of the first `kept` weights reach the share `top_p` of their sum.
#[cube]
fn within_top_p(weights: &SharedMemory<f32>, kept: u32, top_p: f32) -> u32 {
    let mut total = 0.0f32;
    for n in 0..kept {
        total += weights[n as usize];
    }
    let mut sum = 0.0f32;
    let mut inside = 0u32;
    for n in 0..kept {
        // The token that reaches the share is kept.
        if n == 0u32 || sum < top_p * total {
            inside += 1u32;
        }
        sum += weights[n as usize];
    }
    inside
}

/// Which of the first `count` ratios is the largest, if its weight is at least `min_p`. The first weight is 1.
#[cube]
fn largest_ratio(weights: &SharedMemory<f32>, ratios: &SharedMemory<f32>, count: u32, min_p: f32) -> u32 {
    let mut best = 0.0f32;
    let mut pick = 0u32;
    for n in 0..count {
        if weights[n as usize] >= min_p && ratios[n as usize] > best {
            best = ratios[n as usize];
            pick = n;
        }
    }
    pick
}
