//! The next token of each answer, drawn on the device from its logits, so that the next forward begins before the host knows the
//! token.
//! ```text
//! for row { w[id] = exp((x[row][id] - max x[row]) / temperature)
//!           sort the ids by x[row], the largest first, of equal ones the first id; keep the first `kept` of them
//!           of these, keep the first ones whose sum of w reaches top_p * sum(w), and of these the ones with w >= min_p
//! take the id with the largest w[id] / e[id], where e[id] = -ln(1 - u[id]) }                       // the plain loop ``` The
//! source of the filters and of their order is Hugging Face (temperature, top-k, top-p, min-p). u has one random number below 1
//! for each id. The ratios w / e are a race of exponential clocks: an id is the first with the probability w / sum(w) (Efraimidis
//! & Spirakis, "Weighted random sampling with a reservoir", 2006). So a draw among the ids that are kept needs neither an order
//! nor a sum. A greedy row keeps one id. `few.rs` draws from at most [`MOST`] ids, which [`mod@crate::likeliest`] has found, and
//! `all.rs` from any number.

mod all;
mod few;
mod row;

pub use row::Draw;

use crate::{
    error::{KernelError, expect_len, index, require},
    likeliest::{MOST, MOST_COLUMNS},
};
use cubecl::prelude::*;

const NAME: &str = "draw";
/// How many of the most likely tokens are found: for greedy answers, for the top-k that Qwen3's model card recommends, and for
/// others.
const LISTS: [usize; 3] = [1, 20, MOST];

/// Draws a token of each row of logits `x` (f32, a row of `cols` for each draw), as `draws` says. Writes the tokens of all rows
/// to `out` (u32), and behind them for each row whether a logit is NaN (0 or 1). Rows with few candidates and rows with many are
/// drawn by launches of their own, so `x` and `out` give the buffer to each launch.
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
