//! The next token of each answer, drawn on the device from its most likely ones, so that the next forward begins before the
//! host knows the token.
//! ```text
//! for row { w[n] = exp((logit[n] - logit[0]) / temperature) for n < kept
//!           keep the first w whose sum reaches top_p * sum(w), and of these the first that are at least min_p * w[0]
//!           take the first n with uniform * sum(w) < w[0] + ... + w[n] }                                       // the plain loop
//! ```
//! The source is Hugging Face's order of filters (temperature, top-k, top-p, min-p). A greedy row has `kept` 1. A cube draws a row: its
//! units compute the weights, and the first unit adds them in order. Reads what [`mod@crate::likeliest`] wrote: bound by latency.

use crate::{
    error::{KernelError, expect_len, index, require},
    likeliest::{MOST, words},
};
use cubecl::prelude::*;

const NAME: &str = "draw";
/// Numbers that a row is drawn with.
const NUMBERS: usize = 5;

/// How the token of a row is drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Draw {
    /// How many of the most likely tokens are candidates: 1 takes the most likely one.
    pub kept: usize,
    /// Divides the logits. Above 0.
    pub temperature: f32,
    /// Keeps the most likely tokens until their probabilities add up to this.
    pub top_p: f32,
    /// Minimum probability, relative to the most likely token.
    pub min_p: f32,
    /// The random number, from 0 to 1.
    pub uniform: f32,
}

impl Draw {
    /// Takes the most likely token.
    pub const GREEDY: Self = Self { kept: 1, temperature: 1.0, top_p: 1.0, min_p: 0.0, uniform: 0.0 };

    /// The numbers as the kernel reads them.
    fn numbers(&self) -> [f32; NUMBERS] {
        [self.kept as f32, self.temperature, self.top_p, self.min_p, self.uniform]
    }
}

/// Draws a token of each row of `found`, as `draws` says. `found` (u32, [`words`] a row) is what
/// [`likeliest`](crate::likeliest::likeliest) wrote with this `count`. Writes the tokens of all rows to `out` (u32), and behind
/// them for each row whether a logit is NaN (0 or 1).
///
/// # Errors
/// If a buffer does not fit the number of draws, or a draw keeps more than `count` tokens.
pub fn draw<R: Runtime>(
    client: &ComputeClient<R>,
    found: ArrayArg<R>,
    draws: &[Draw],
    out: ArrayArg<R>,
    count: usize,
) -> Result<(), KernelError> {
    let (rows, most) = (draws.len(), count.min(MOST));
    require(NAME, draws.iter().all(|draw| (1..=most).contains(&draw.kept)), || {
        format!("{draws:?}; each keeps 1 to {most} tokens")
    })?;
    expect_len(NAME, "found", found.size(), rows * words(count))?;
    expect_len(NAME, "out", out.size(), 2 * rows)?;
    if rows == 0 {
        return Ok(());
    }
    let numbers: Vec<f32> = draws.iter().flat_map(Draw::numbers).collect();
    let handle = client.create_from_slice(f32::as_bytes(&numbers));
    // SAFETY: buffer lengths were checked; a cube reads and writes its own row, and no candidate behind `count`.
    unsafe {
        let numbers = ArrayArg::from_raw_parts(handle, numbers.len());
        draw_kernel::launch_unchecked(
            client,
            CubeCount::Static(index(NAME, "rows", rows)?, 1, 1),
            CubeDim::new_1d(MOST as u32),
            found,
            numbers,
            out,
            count as u32,
        );
    }
    Ok(())
}

#[cube(launch_unchecked)]
fn draw_kernel(found: &Array<u32>, numbers: &Array<f32>, out: &mut Array<u32>, #[comptime] count: u32) {
    let row = CUBE_POS_X;
    let first = row * comptime!(words(count as usize) as u32);
    let tokens = first + 1u32;
    let logits = tokens + count;
    let own = (row * comptime!(NUMBERS as u32)) as usize;
    let kept = u32::cast_from(numbers[own]);
    let mut weights = SharedMemory::<f32>::new(comptime!(MOST));
    if UNIT_POS < count {
        let logit = f32::reinterpret(found[(logits + UNIT_POS) as usize]);
        let top = f32::reinterpret(found[logits as usize]);
        weights[UNIT_POS as usize] = ((logit - top) / numbers[own + 1]).exp();
    }
    sync_cube();
    if UNIT_POS == 0u32 {
        let nucleus = within_top_p(&weights, kept, numbers[own + 2]);
        let (chosen, mass) = within_min_p(&weights, nucleus, numbers[own + 3]);
        let pick = at_share(&weights, chosen, numbers[own + 4] * mass);
        out[row as usize] = found[(tokens + pick) as usize];
        out[(CUBE_COUNT_X + row) as usize] = found[first as usize];
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

/// How many of the first `kept` weights are at least `min_p` times the first, which is always kept, and their sum.
#[cube]
fn within_min_p(weights: &SharedMemory<f32>, kept: u32, min_p: f32) -> (u32, f32) {
    let mut sum = 0.0f32;
    let mut inside = 0u32;
    for n in 0..kept {
        if n == 0u32 || weights[n as usize] >= min_p * weights[0usize] {
            inside += 1u32;
            sum += weights[n as usize];
        }
    }
    (inside, sum)
}

/// The first of `count` weights at which their sum exceeds `share`, or the last one.
#[cube]
fn at_share(weights: &SharedMemory<f32>, count: u32, share: f32) -> u32 {
    let mut sum = 0.0f32;
    let mut pick = 0u32;
    for n in 0..count - 1u32 {
        sum += weights[n as usize];
        if sum <= share {
            pick = n + 1u32;
        }
    }
    pick
}
