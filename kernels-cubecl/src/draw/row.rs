//! How the token of a row is drawn: what the host gives to the kernels, and what both kernels compute of a single token.

use crate::{
    likeliest::MOST,
    rng::{Stream, cipher_of, philox},
};
use cubecl::prelude::*;

/// Words that a row is drawn with.
pub(super) const WORDS: usize = 8;
/// What tells these random numbers from those of training with the same seed.
const STREAM: u32 = u32::MAX;

/// How the token of a row is drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Draw {
    /// How many of the most likely tokens are candidates: 1 takes the most likely one, and 0 stands for all.
    pub kept: usize,
    /// Divides the logits. Above 0.
    pub temperature: f32,
    /// Keeps the most likely tokens until their probabilities add up to this.
    pub top_p: f32,
    /// Minimum probability, relative to the most likely token.
    pub min_p: f32,
    /// Random seed of the answer.
    pub seed: u64,
    /// Position of the token in its answer.
    pub position: u32,
}

impl Draw {
    /// Takes the most likely token.
    pub const GREEDY: Self = Self { kept: 1, temperature: 1.0, top_p: 1.0, min_p: 0.0, seed: 0, position: 0 };

    /// The random numbers of this draw: four words for each four ids.
    pub fn stream(&self) -> Stream {
        Stream { seed: self.seed, step: self.position, stream: STREAM }
    }

    /// The words as the kernels read them. The last three are the bits of f32.
    pub(super) fn words(&self, row: u32) -> [u32; WORDS] {
        let [temperature, top_p, min_p] = [self.temperature, self.top_p, self.min_p].map(f32::to_bits);
        let [low, high] = [self.seed as u32, (self.seed >> 32) as u32];
        // No vocabulary has so many tokens, and 0 stands for all.
        let kept = u32::try_from(self.kept).unwrap_or(0);
        [row, kept, self.position, low, high, temperature, top_p, min_p]
    }

    /// Whether a row of so many logits is drawn from a list of its most likely tokens.
    pub(super) fn is_of_few(&self, cols: usize) -> bool {
        (1..=MOST.min(cols)).contains(&self.kept)
    }
}

/// How a row is drawn, on the device.
#[derive(CubeType)]
pub(super) struct Drawing {
    pub(super) row: u32,
    pub(super) kept: u32,
    pub(super) position: u32,
    pub(super) seed_low: u32,
    pub(super) seed_high: u32,
    pub(super) temperature: f32,
    pub(super) top_p: f32,
    pub(super) min_p: f32,
}

/// Reads how the row of this cube is drawn.
#[cube]
pub(super) fn drawing(words: &Array<u32>) -> Drawing {
    let first = (CUBE_POS_X * comptime!(WORDS as u32)) as usize;
    Drawing {
        row: words[first],
        kept: words[first + 1],
        position: words[first + 2],
        seed_low: words[first + 3],
        seed_high: words[first + 4],
        temperature: f32::reinterpret(words[first + 5]),
        top_p: f32::reinterpret(words[first + 6]),
        min_p: f32::reinterpret(words[first + 7]),
    }
}

/// The weight of a logit beside the largest one.
#[cube]
pub(super) fn weight(logit: f32, top: f32, temperature: f32) -> f32 {
    // Both may be infinite, and their difference is then no number.
    select(logit >= top, 1.0f32, ((logit - top) / temperature).exp())
}

/// The random words of the ids from `4 * four` on.
#[cube]
pub(super) fn random_words(four: u32, drawing: &Drawing, out: &mut Array<u32>) {
    let cipher = cipher_of(drawing.seed_low, drawing.seed_high, drawing.position, STREAM);
    philox(four, &cipher, 0u32, out);
}

/// -ln(1 - u) for the random number u = (word + 1/2) / 2^32.
#[cube]
pub(super) fn exponential(word: u32) -> f32 {
    // The factor is 2^-32. A word may be rounded up to 2^32, whose logarithm would be infinite.
    let u = min((f32::cast_from(word) + 0.5f32) * 2.328_306_4e-10f32, 0.999_999_94f32);
    // The id that is drawn has a small u most often, whose difference to 1 has few digits: then the first terms of the series.
    let series = u * (1.0f32 + u * (0.5f32 + u * (0.333_333_34f32 + u * (0.25f32 + u * 0.2f32))));
    select(u < 0.03125f32, series, 0.0f32 - (1.0f32 - u).ln())
}
