//! The next token of each answer, drawn on the device from its logits, so that the next forward begins before the host knows the
//! token.
//! ```text
//! for row { w[id] = exp((x[row][id] - max x[row]) / temperature)
//!           sort the ids by x[row], the largest first, of equal ones the first id; keep the first `kept` of them
//!           of these, keep the first ones whose sum of w reaches top_p * sum(w), and of these the ones with w >= min_p
//!           take the id with the largest w[id] / e[id], where e[id] = -ln(1 - u[id]) }                       // the plain loop
//! ```
//! The source of the filters and of their order is Hugging Face (temperature, top-k, top-p, min-p). u has one random number below 1 for
//! each id. The ratios w / e are a race of exponential clocks: an id is the first with the probability w / sum(w) (Efraimidis & Spirakis,
//! "Weighted random sampling with a reservoir", 2006). So a draw needs neither an order of the ids nor a sum. A greedy row keeps one
//! id. [`few`] draws from at most [`MOST`] ids, which [`mod@crate::likeliest`] has found, and [`all`] from any number.

mod all;
mod few;

use crate::{
    error::{KernelError, expect_len, index, require},
    likeliest::{MOST, MOST_COLUMNS},
    rng::{Stream, cipher_of, philox},
};
use cubecl::prelude::*;

const NAME: &str = "draw";
/// How many of the most likely tokens are found: for greedy answers, for the top-k that Qwen3's model card recommends, and for others.
const LISTS: [usize; 3] = [1, 20, MOST];
/// Words that a row is drawn with.
const WORDS: usize = 8;
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
    fn words(&self, row: u32) -> [u32; WORDS] {
        let [temperature, top_p, min_p] = [self.temperature, self.top_p, self.min_p].map(f32::to_bits);
        let [low, high] = [self.seed as u32, (self.seed >> 32) as u32];
        [row, self.kept as u32, self.position, low, high, temperature, top_p, min_p]
    }

    /// Whether a row of so many logits is drawn from a list of its most likely tokens.
    fn is_of_few(&self, cols: usize) -> bool {
        (1..=MOST.min(cols)).contains(&self.kept)
    }
}

/// Draws a token of each row of logits `x` (f32, a row of `cols` for each draw), as `draws` says. Writes the tokens of all rows to
/// `out` (u32), and behind them for each row whether a logit is NaN (0 or 1). Rows with few candidates and rows with many are drawn by
/// launches of their own, so `x` and `out` give the buffer to each launch.
///
/// # Errors
/// If a buffer does not fit the number of draws, or a row has too many columns or none.
pub fn draw<R: Runtime>(
    client: &ComputeClient<R>,
    x: impl Fn() -> ArrayArg<R>,
    draws: &[Draw],
    out: impl Fn() -> ArrayArg<R>,
    cols: usize,
) -> Result<(), KernelError> {
    let rows = draws.len();
    require(NAME, (1..=MOST_COLUMNS).contains(&cols), || format!("{cols} columns; it takes 1 to {MOST_COLUMNS}"))?;
    expect_len(NAME, "x", x().size(), rows * cols)?;
    expect_len(NAME, "out", out().size(), 2 * rows)?;
    index(NAME, "rows", rows)?;
    let numbered = draws.iter().zip(0u32..);
    let (few, all): (Vec<_>, Vec<_>) = numbered.partition(|(draw, _)| draw.is_of_few(cols));
    let most = few.iter().map(|(draw, _)| draw.kept).max();
    // A list's length is compiled in, so that there are few lengths.
    let kept = most.and_then(|most| LISTS.into_iter().find(|length| *length >= most)).map(|length| length.min(cols));
    let words = |rows: &[(&Draw, u32)]| rows.iter().flat_map(|(draw, row)| draw.words(*row)).collect::<Vec<u32>>();
    if let Some(kept) = kept {
        few::draw(client, x(), &words(&few), out(), [rows, cols], kept)?;
    }
    if !all.is_empty() {
        all::draw(client, x(), &words(&all), out(), [rows, cols]);
    }
    Ok(())
}

/// How a row is drawn, on the device.
#[derive(CubeType)]
pub(crate) struct Drawing {
    row: u32,
    kept: u32,
    position: u32,
    seed_low: u32,
    seed_high: u32,
    temperature: f32,
    top_p: f32,
    min_p: f32,
}

/// Reads how the row of this cube is drawn.
#[cube]
fn drawing(words: &Array<u32>) -> Drawing {
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
fn weight(logit: f32, top: f32, temperature: f32) -> f32 {
    // Both may be infinite, and their difference is then no number.
    select(logit >= top, 1.0f32, ((logit - top) / temperature).exp())
}

/// The random words of the ids from `4 * four` on.
#[cube]
fn random_words(four: u32, drawing: &Drawing, out: &mut Array<u32>) {
    let cipher = cipher_of(drawing.seed_low, drawing.seed_high, drawing.position, STREAM);
    philox(four, &cipher, 0u32, out);
}

/// -ln(1 - u) for the random number u = (word + 1/2) / 2^32.
#[cube]
fn exponential(word: u32) -> f32 {
    // The factor is 2^-32. A word may be rounded up to 2^32, whose logarithm would be infinite.
    let u = min((f32::cast_from(word) + 0.5f32) * 2.328_306_4e-10f32, 0.999_999_94f32);
    // The id that is drawn has a small u most often, whose difference to 1 has few digits: then the first terms of the series.
    let series = u * (1.0f32 + u * (0.5f32 + u * (0.333_333_34f32 + u * (0.25f32 + u * 0.2f32))));
    select(u < 0.03125f32, series, 0.0f32 - (1.0f32 - u).ln())
}
