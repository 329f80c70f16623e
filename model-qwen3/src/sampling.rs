//! How the next token is chosen from logits: after a repetition penalty, the most likely token (greedy), or a draw with
//! temperature, top-k, top-p and min-p, which `backend_nvfp4` computes. Also the log probabilities of tokens.

use backend_nvfp4::{Draw, Penalty, reference};
use rayon::{
    iter::{IndexedParallelIterator, ParallelIterator},
    slice::ParallelSlice,
};
use std::ops::RangeInclusive;

/// Logits that one thread looks at.
const PART: usize = 4096;

/// How to choose a token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Divides the logits. 0 always takes the most likely token.
    pub temperature: f32,
    /// Number of the most likely tokens to keep. 0 keeps all.
    pub top_k: usize,
    /// Keeps the most likely tokens until their probabilities add up to this. The token that reaches it is kept. 1 keeps
    /// all tokens.
    pub top_p: f32,
    /// Minimum probability, relative to the most likely token. 0 keeps all tokens.
    pub min_p: f32,
    /// Divides positive logits of tokens that were already seen, and multiplies negative ones. 1 is off.
    pub repetition_penalty: f32,
    /// Random seed of the draws.
    pub seed: u64,
}

impl Sampling {
    /// The values of [`Self::top_p`].
    pub const TOP_P: RangeInclusive<f32> = 0.0..=1.0;
    /// The values of [`Self::min_p`].
    pub const MIN_P: RangeInclusive<f32> = 0.0..=1.0;
    /// The values of [`Self::repetition_penalty`].
    pub const REPETITION_PENALTY: RangeInclusive<f32> = 0.01..=100.0;

    /// Always takes the most likely token.
    pub const GREEDY: Self =
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0, seed: 0 };
    /// What the model card of Qwen3 says for answers without thinking.
    pub const CARD: Self = Self { temperature: 0.7, top_p: 0.8, top_k: 20, ..Self::GREEDY };
    /// What it says for answers with thinking.
    pub const CARD_THINKING: Self = Self { temperature: 0.6, top_p: 0.95, ..Self::CARD };
}

/// Logarithms of probabilities (base e) at one position: those of the model, before penalty and temperature.
#[derive(Debug, Clone, PartialEq)]
pub struct Logprobs {
    /// The logarithm of the chosen token's probability.
    pub chosen: f32,
    /// The most likely tokens, the likeliest first.
    pub top: Vec<(u32, f32)>,
}

impl Logprobs {
    /// The logarithms for the token `chosen` and for the `count` most likely ones.
    pub fn of(logits: &[f32], chosen: u32, count: usize) -> Self {
        let most_of = |part: &[f32]| part.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let most = logits.par_chunks(PART).map(most_of).reduce(|| f32::NEG_INFINITY, f32::max);
        let part_of = |(n, part): (usize, &[f32])| {
            let sum: f64 = part.iter().map(|x| f64::from(x - most).exp()).sum();
            let ids = reference::likeliest(part, count).into_iter().map(|id| id + (n * PART) as u32);
            (sum, ids.collect::<Vec<u32>>())
        };
        let parts: Vec<_> = logits.par_chunks(PART).enumerate().map(part_of).collect();
        let sum: f64 = parts.iter().map(|(sum, _)| sum).sum();
        let logprob = |id: u32| (f64::from(logits[id as usize] - most) - sum.ln()) as f32;
        // The likeliest of all are among those of the parts.
        let ids: Vec<u32> = parts.into_iter().flat_map(|(_, ids)| ids).collect();
        let theirs: Vec<f32> = ids.iter().map(|id| logits[*id as usize]).collect();
        let top = reference::likeliest(&theirs, count).into_iter().map(|n| ids[n as usize]);
        let top = top.map(|id| (id, logprob(id))).collect();
        Self { chosen: logprob(chosen), top }
    }
}

impl Sampling {
    /// Whether logits of seen tokens are changed.
    pub fn penalizes(&self) -> bool {
        self.repetition_penalty != 1.0
    }

    /// How the token at `position` of an answer is drawn from logits after the penalty.
    pub fn draw(&self, position: u32) -> Draw {
        let Self { temperature, top_k, top_p, min_p, repetition_penalty: _, seed } = *self;
        if temperature <= 0.0 {
            return Draw::GREEDY;
        }
        Draw { kept: top_k, temperature, top_p, min_p, seed, position }
    }
}

/// The tokens of a prompt and of the answer so far, a bit each.
#[derive(Debug, Clone)]
pub struct Seen(Vec<u32>);

impl Seen {
    /// Nothing yet of a vocabulary of so many tokens.
    pub fn new(vocabulary: usize) -> Self {
        Self(vec![0; vocabulary.div_ceil(u32::BITS as usize)])
    }

    /// Adds tokens. One outside the vocabulary is left out.
    pub fn extend(&mut self, ids: &[u32]) {
        for id in ids {
            if let Some(word) = self.0.get_mut((id / u32::BITS) as usize) {
                *word |= 1 << (id % u32::BITS);
            }
        }
    }

    /// How a device changes the logits of these tokens.
    pub fn penalty(&self, sampling: &Sampling) -> Penalty<'_> {
        Penalty { factor: sampling.repetition_penalty, seen: &self.0 }
    }

    /// Changes the logits of these tokens.
    fn penalize(&self, logits: &mut [f32], factor: f32) {
        for (word, logits) in self.0.iter().zip(logits.chunks_mut(u32::BITS as usize)).filter(|(word, _)| **word != 0) {
            for (_, x) in logits.iter_mut().enumerate().filter(|(bit, _)| word >> bit & 1 == 1) {
                *x = if *x > 0.0 { *x / factor } else { *x * factor };
            }
        }
    }
}

/// Chooses the token at `position` of an answer. `seen` holds the tokens of the prompt and of the answer so far, if these are
/// penalized.
pub fn next(logits: &mut [f32], seen: Option<&Seen>, sampling: &Sampling, position: u32) -> u32 {
    if let Some(seen) = seen {
        seen.penalize(logits, sampling.repetition_penalty);
    }
    reference::draw(logits, &sampling.draw(position))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logprobs_are_the_logarithms_of_probabilities() {
        // Probabilities .2, .5, .3; logits are known up to a constant.
        let logits = [0.2f32, 0.5, 0.3].map(|p| p.ln() + 7.0);
        let found = Logprobs::of(&logits, 0, 2);
        let near = |x: f32, p: f32| (x - p.ln()).abs() < 1e-6;
        assert!(near(found.chosen, 0.2) && near(found.top[0].1, 0.5) && near(found.top[1].1, 0.3), "{found:?}");
        assert_eq!([found.top[0].0, found.top[1].0], [1, 2]);
        assert_eq!(Logprobs::of(&logits, 2, 0).top, []);
        assert_eq!(Logprobs::of(&logits, 2, 9).top.len(), 3);
    }

    #[test]
    fn logprobs_of_several_parts_are_those_of_one_vocabulary() {
        let mut logits = vec![0.0f32; 3 * PART + 5];
        for (id, logit) in [(PART - 1, 2.0), (PART, 2.0), (3 * PART + 4, 3.0)] {
            logits[id] = logit;
        }
        let found = Logprobs::of(&logits, 0, 3);
        let sum = (3 * PART + 2) as f64 + 2.0 * 2f64.exp() + 3f64.exp();
        assert!((f64::from(found.chosen) + sum.ln()).abs() < 1e-6, "{found:?}");
        let ids: Vec<_> = found.top.iter().map(|(id, _)| *id as usize).collect();
        assert_eq!(ids, [3 * PART + 4, PART - 1, PART]);
    }

    #[test]
    fn a_penalty_makes_seen_tokens_less_likely() {
        assert_eq!(next(&mut [1.0, 3.0, 2.5], None, &Sampling::GREEDY, 0), 1);
        let penalty = Sampling { repetition_penalty: 2.0, ..Sampling::GREEDY };
        let mut seen = Seen::new(3);
        seen.extend(&[1, 1, 77]);
        assert_eq!(next(&mut [1.0, 3.0, 2.5], Some(&seen), &penalty, 0), 2);
    }
}
