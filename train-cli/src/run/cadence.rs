//! How often a run evaluates if nobody says: so often that its evaluations and sample answers take at most about
//! [`EVALUATION_SHARE`] of its time, and at most twenty times. It is estimated from counts of tokens, so that a run evaluates after the same steps wherever
//! it runs.

use super::inputs::Inputs;
use crate::{
    plan::Plan,
    settings::defaults::{EVALUATION_SHARE, part_of_the_run},
};

/// A forward pass takes a third of the time of a step over the same tokens.
const FORWARD: f64 = 1.0 / 3.0;

/// An answer is made token by token, and each takes as long as so many tokens of a step: 7 ms of 83 µs a token for 4B on one
/// H200.
const DECODED: f64 = 84.0;

/// The number of steps from one evaluation to the next, where one takes as long as `cost` steps. More than the steps of the run
/// if only the last is evaluated. A run that chooses a step by its evaluation makes twenty, whatever they take.
pub(super) fn evaluation(plan: &Plan, inputs: &Inputs, cost: f64) -> usize {
    let cost = if plan.settings.compares_evaluations() { 0.0 } else { cost };
    between(inputs.order(plan).steps, cost)
}

/// How long an evaluation and `answers` tokens of sample answers take, in steps.
pub(super) fn cost(plan: &Plan, inputs: &Inputs, answers: usize) -> f64 {
    let tokens = |samples: &[crate::data::sample::Sample]| samples.iter().map(|s| s.ids.len()).sum::<usize>() as f64;
    // Weights are evaluated in 4 bits and as master weights, without quantized activations. A recipe that quantizes activations is
    // evaluated as in training, too.
    let forms = if plan.recipe.packs_activations() { 3.0 } else { 2.0 };
    let step = tokens(&inputs.train) / inputs.train.len().max(1) as f64 * plan.sequences_per_step() as f64;
    let one = forms * FORWARD * tokens(&inputs.eval) + DECODED * answers as f64;
    one / step.max(1.0)
}

/// The steps between evaluations of a run of `steps` steps, where one takes as long as `cost` steps.
fn between(steps: usize, cost: f64) -> usize {
    part_of_the_run(steps).max((cost / EVALUATION_SHARE).ceil() as usize)
}

#[cfg(test)]
mod tests {
    use super::between;

    #[test]
    fn evaluations_take_a_tenth_of_the_time_at_most() {
        // Cheap evaluations are made twenty times.
        assert_eq!((between(1000, 0.5), between(1001, 0.0), between(20, 0.0)), (50, 51, 1));
        // One that takes as long as seven steps is made every seventy.
        assert_eq!((between(1000, 7.0), between(20, 7.0)), (70, 70));
    }
}
