//! The next token of each answer of a step. The device draws it where it can: the next forward then begins before the host knows
//! the token. Otherwise the host chooses it from all logits.

use crate::{ModelError, config::Qwen3Config, model::ids_tensor, weights::to_host};
use backend_nvfp4::{Draw, Drawn, Nvfp4Error, Nvfp4Kernels, Penalty, draw, penalize};
use burn::tensor::{Int, Tensor, backend::Backend};
use std::sync::Arc;

/// The next token of an answer, which the device may still be computing.
#[derive(Debug)]
pub(crate) enum NextToken<B: Backend> {
    /// A row of what the device draws.
    Drawn(Arc<Drawn<B>>, usize),
    /// Logits `[1, V]`, from which the host is to choose.
    Logits(Tensor<B, 2>),
    /// None yet, because a chunk of the prompt is read: one number of its last hidden state.
    Chunk(Tensor<B, 2>),
}

/// A token that is to be read.
pub(crate) enum Newest<'a, B: Backend> {
    /// The host knows it.
    Known(u32),
    /// A row of what the device draws.
    Drawn(&'a Arc<Drawn<B>>, usize),
}

/// What is done with a row of logits on the device.
pub(crate) struct Choice<'a> {
    /// How its token is drawn. Without it, the host chooses.
    pub(crate) draw: Option<Draw>,
    /// The repetition penalty that is applied to the logits before the draw.
    pub(crate) penalty: Option<Penalty<'a>>,
}

/// The next token, or the logits to choose it from, on the host.
pub(crate) enum Received {
    /// Its id.
    Token(u32),
    /// The logits of all tokens.
    Logits(Vec<f32>),
    /// A chunk of the prompt was read.
    Chunk,
    /// The model computed NaN.
    NotANumber,
}

impl<B: Nvfp4Kernels> NextToken<B> {
    /// The next token of each row of logits `[M, V]`, whose newest tokens are `newest` `[1, M]`: drawn if the row has a draw.
    pub(crate) fn of(logits: Tensor<B, 2>, newest: Tensor<B, 2, Int>, choices: &[Choice<'_>]) -> Vec<Self> {
        let row = |n: usize| logits.clone().slice(n..n + 1);
        let asked: Vec<usize> = (0..choices.len()).filter(|n| choices[*n].draw.is_some()).collect();
        let own: Vec<Draw> = choices.iter().filter_map(|choice| choice.draw).collect();
        let rows = match own.len() {
            0 => None,
            count if count == choices.len() => Some((logits.clone(), newest)),
            _ => {
                let newest = asked.iter().map(|n| newest.clone().slice([0..1, *n..n + 1])).collect();
                Some((Tensor::cat(asked.iter().map(|n| row(*n)).collect(), 0), Tensor::cat(newest, 1)))
            }
        };
        let penalties: Vec<_> = asked.iter().map(|n| choices[*n].penalty).collect();
        let penalized = |(rows, newest): (Tensor<B, 2>, Tensor<B, 2, Int>)| {
            if penalties.iter().all(Option::is_none) {
                return Some(rows);
            }
            let penalties: Vec<_> = penalties.iter().map(|penalty| penalty.unwrap_or(Penalty::NONE)).collect();
            penalize(rows, newest.reshape([penalties.len()]), &penalties)
        };
        let drawn = rows.and_then(penalized).and_then(|rows| draw(rows, &own)).map(Arc::new);
        let next = |n: usize| match (&drawn, asked.binary_search(&n)) {
            (Some(drawn), Ok(place)) => Self::Drawn(drawn.clone(), place),
            _ => Self::Logits(row(n)),
        };
        (0..choices.len()).map(next).collect()
    }

    /// Waits for the device.
    ///
    /// # Errors
    /// If the device fails.
    pub(crate) fn wait(self) -> Result<Received, ModelError> {
        match self {
            Self::Drawn(drawn, row) => {
                let token = drawn.token(row).map_err(|e: Nvfp4Error| ModelError::Device(e.to_string()))?;
                Ok(if token.has_nan { Received::NotANumber } else { Received::Token(token.id) })
            }
            Self::Logits(logits) => {
                let logits = to_host(logits)?;
                Ok(if logits.iter().any(|x| x.is_nan()) { Received::NotANumber } else { Received::Logits(logits) })
            }
            Self::Chunk(number) => {
                let is_nan = to_host(number)?.iter().any(|x| x.is_nan());
                Ok(if is_nan { Received::NotANumber } else { Received::Chunk })
            }
        }
    }
}

/// The ids `[1, M]` of tokens on the device.
///
/// # Errors
/// If an id is outside the vocabulary.
pub(crate) fn newest_ids<B: Nvfp4Kernels>(
    tokens: &[Newest<'_, B>],
    config: &Qwen3Config,
    device: &B::Device,
) -> Result<Tensor<B, 2, Int>, ModelError> {
    let known: Vec<u32> =
        tokens.iter().filter_map(|token| if let Newest::Known(id) = token { Some(*id) } else { None }).collect();
    if known.len() == tokens.len() {
        return ids_tensor(&[known], config, device);
    }
    // Most often the device has drawn all of them, in this order.
    if let Newest::Drawn(first, _) = &tokens[0]
        && first.rows() == tokens.len()
        && tokens
            .iter()
            .enumerate()
            .all(|(n, token)| matches!(token, Newest::Drawn(drawn, row) if Arc::ptr_eq(first, drawn) && *row == n))
    {
        return Ok(first.tokens().reshape([1, tokens.len()]));
    }
    let known = if known.is_empty() { None } else { Some(ids_tensor::<B>(&[known], config, device)?) };
    let mut column = 0;
    let each = tokens.iter().filter_map(|token| match token {
        Newest::Drawn(drawn, row) => Some(drawn.tokens().slice(*row..*row + 1).reshape([1, 1])),
        Newest::Known(_) => {
            column += 1;
            known.as_ref().map(|known| known.clone().slice([0..1, column - 1..column]))
        }
    });
    Ok(Tensor::cat(each.collect(), 1))
}
