//! The next token of each answer of a step. A GPU draws it: the next forward then begins before the host knows the token. On a
//! CPU it is drawn from the logits when they are asked for.

use crate::{ModelError, config::Qwen3Config, model::ids_tensor, weights::to_host};
use backend_nvfp4::{Asked, Draw, Drawn, Nvfp4Error, Nvfp4Kernels, Penalty, draw, penalize, words_of};
use burn::tensor::{Int, Tensor, backend::Backend};
use std::sync::Arc;

/// The next token of an answer, which the device may still be computing.
#[derive(Debug)]
pub(crate) enum NextToken<B: Backend> {
    /// A row of what the device draws, and the question for its logits before the penalty, if they are wanted.
    Drawn(Arc<Drawn<B>>, usize, Option<Asked>),
    /// Logits `[1, V]`, from which the host is to draw.
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
    /// How its token is drawn.
    pub(crate) draw: Draw,
    /// The repetition penalty that is applied to the logits before the draw.
    pub(crate) penalty: Option<Penalty<'a>>,
    /// Whether the host wants the logits, too.
    pub(crate) wants_logits: bool,
}

/// The next token, or the logits to draw it from, on the host.
pub(crate) enum Received {
    /// Its id, and the logits of all tokens if they are wanted.
    Token(u32, Option<Vec<f32>>),
    /// The logits of all tokens.
    Logits(Vec<f32>),
    /// A chunk of the prompt was read.
    Chunk,
    /// The model computed NaN.
    NotANumber,
}

impl<B: Nvfp4Kernels> NextToken<B> {
    /// The next token of each row of logits `[M, V]`, whose newest tokens are `newest` `[1, M]`.
    pub(crate) fn of(logits: Tensor<B, 2>, newest: Tensor<B, 2, Int>, choices: &[Choice<'_>]) -> Vec<Self> {
        let row = |n: usize| logits.clone().slice(n..n + 1);
        let draws: Vec<Draw> = choices.iter().map(|choice| choice.draw).collect();
        let drawn = penalized(logits.clone(), newest, choices).and_then(|rows| draw(rows, &draws)).map(Arc::new);
        let next = |(n, choice): (usize, &Choice<'_>)| match &drawn {
            Some(drawn) => Self::Drawn(drawn.clone(), n, choice.wants_logits.then(|| words_of(row(n)))),
            None => Self::Logits(row(n)),
        };
        choices.iter().enumerate().map(next).collect()
    }

    /// Waits for the device.
    ///
    /// # Errors
    /// If the device fails.
    pub(crate) fn wait(self) -> Result<Received, ModelError> {
        match self {
            Self::Drawn(drawn, row, logits) => {
                let failed = |e: Nvfp4Error| ModelError::Device(e.to_string());
                let token = drawn.token(row).map_err(failed)?;
                if token.has_nan {
                    return Ok(Received::NotANumber);
                }
                let floats = |bits: &[u32]| bits.iter().copied().map(f32::from_bits).collect();
                let logits = logits.map(|mut asked| asked.answer().map(floats)).transpose().map_err(failed)?;
                Ok(Received::Token(token.id, logits))
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

/// Logits after the repetition penalties. `None` where the host applies them as fast.
fn penalized<B: Nvfp4Kernels>(
    logits: Tensor<B, 2>,
    newest: Tensor<B, 2, Int>,
    choices: &[Choice<'_>],
) -> Option<Tensor<B, 2>> {
    if choices.iter().all(|choice| choice.penalty.is_none()) {
        return Some(logits);
    }
    let penalties: Vec<_> = choices.iter().map(|choice| choice.penalty.unwrap_or(Penalty::NONE)).collect();
    penalize(logits, newest.reshape([penalties.len()]), &penalties)
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
