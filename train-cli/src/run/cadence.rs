//! How often a run evaluates and saves if no flag says so. Evaluations and sample answers take at most about
//! [`EVALUATION_SHARE`] of its time, and there are at most twenty. Their time is estimated from counts of tokens, so that a run
//! evaluates after the same steps wherever it runs. A run leaves out checkpoints that would take more than [`SAVING_SHARE`] of its
//! time. [`Spent`] measures how much time they take from training. Before one was measured, the run expects what the fastest disk
//! would need.

use super::inputs::Inputs;
use crate::{
    plan::Plan,
    settings::defaults::{EVALUATION_SHARE, SAVING_SHARE, part_of_the_run},
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

/// How long the parts of an evaluation take, in steps.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cost {
    /// The passes over the evaluation rows.
    pub(super) passes: f64,
    /// The sample answers.
    pub(super) answers: f64,
}

impl Cost {
    /// Both.
    pub(super) fn total(self) -> f64 {
        self.passes + self.answers
    }
}

/// How long an evaluation and `answers` tokens of sample answers take.
pub(super) fn cost(plan: &Plan, inputs: &Inputs, answers: usize) -> Cost {
    let tokens = |samples: &[crate::data::sample::Sample]| samples.iter().map(|s| s.ids.len()).sum::<usize>() as f64;
    // Weights are evaluated in 4 bits and as master weights, without quantized activations. A recipe that quantizes activations is
    // evaluated as in training, too.
    let forms = if plan.recipe.packs_activations() { 3.0 } else { 2.0 };
    let step = tokens(&inputs.train) / inputs.train.len().max(1) as f64 * plan.sequences_per_step() as f64;
    let steps = |tokens: f64| tokens / step.max(1.0);
    Cost { passes: steps(forms * FORWARD * tokens(&inputs.eval)), answers: steps(DECODED * answers as f64) }
}

/// The steps between evaluations of a run of `steps` steps, where one takes as long as `cost` steps.
fn between(steps: usize, cost: f64) -> usize {
    part_of_the_run(steps).max((cost / EVALUATION_SHARE).ceil() as usize)
}

/// The time that checkpoints have taken from training since this attempt began, in seconds.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Spent {
    total: f64,
    last: Option<f64>,
}

impl Spent {
    /// Training has waited so many seconds for one more.
    pub(super) fn add(&mut self, seconds: f64) {
        self.total += seconds;
        self.last = Some(seconds);
    }

    /// The last one has taken so many seconds more, while steps were made.
    pub(super) fn add_to_last(&mut self, seconds: f64) {
        self.total += seconds;
        self.last = self.last.map(|last| last + seconds);
    }

    /// What the last one has taken, if there was one.
    pub(super) fn last(self) -> Option<f64> {
        self.last
    }

    /// Whether there is time for one more. If one was measured, one more is expected to take as long as the last one, and all
    /// together may take their share of the `elapsed` seconds. If none was, it is expected to take as long as the fastest disk
    /// needs for its `bytes`, and may take its share of the `expected` seconds of the whole attempt: so the first comes early,
    /// unless the attempt is short. Nobody notices a short time for all of them together.
    pub(super) fn has_time(self, bytes: u64, elapsed: f64, expected: f64) -> bool {
        let (total, of) = match self.last {
            Some(last) => (self.total + last, elapsed),
            None => (at_best(bytes), expected),
        };
        total < UNNOTICED || total <= SAVING_SHARE * of
    }
}

/// Seconds that the fastest disk needs for so many bytes.
pub(super) fn at_best(bytes: u64) -> f64 {
    bytes as f64 / FASTEST_DISK
}

/// Bytes that a disk writes in a second, at most.
const FASTEST_DISK: f64 = 2e9;

/// Seconds that nobody notices.
const UNNOTICED: f64 = 0.1;

#[cfg(test)]
mod tests {
    use super::{Spent, between};

    #[test]
    fn evaluations_take_8_percent_of_the_time_at_most() {
        // Cheap evaluations are made twenty times.
        assert_eq!((between(1000, 0.5), between(1001, 0.0), between(20, 0.0)), (50, 51, 1));
        // One that takes as long as eight steps is made every hundred.
        assert_eq!((between(1000, 8.0), between(20, 8.0)), (100, 100));
    }

    #[test]
    fn checkpoints_take_2_percent_of_the_time_at_most() {
        let mut spent = Spent::default();
        assert_eq!(spent.last(), None);
        spent.add(0.5);
        let has_time = |spent: Spent, elapsed| spent.has_time(0, elapsed, 1e9);
        assert!(!has_time(spent, 49.0) && has_time(spent, 50.1));
        spent.add(0.75);
        assert!(!has_time(spent, 99.0) && has_time(spent, 100.1));
        // A short one is no exception after these.
        spent.add(0.05);
        assert!(!has_time(spent, 67.0) && has_time(spent, 67.6));
        assert_eq!(spent.last(), Some(0.05));
    }

    /// Of a run of 20 steps of 4B, which take 4 s and save 15 GiB, only the last step is saved.
    #[test]
    fn the_first_checkpoint_of_a_short_run_is_left_out_if_it_is_large() {
        let spent = Spent::default();
        assert!(!spent.has_time(15 << 30, 0.2, 4.0) && !spent.has_time(15 << 30, 20.0, 400.0));
        // Of a longer run it is saved, so that its cost is known.
        assert!(spent.has_time(15 << 30, 20.5, 410.0));
        // The demo's checkpoint has 5 MB.
        assert!(spent.has_time(5 << 20, 0.0, 1.0));
    }

    /// Short ones are saved as long as all of them together are short.
    #[test]
    fn many_short_checkpoints_are_not_unnoticed() {
        let mut spent = Spent::default();
        let saved = (1..20).filter(|step| {
            let saves = spent.has_time(1 << 20, 0.1 * f64::from(*step), 2.0);
            if saves {
                spent.add(0.01);
                // A thread has written it while the next step was made.
                spent.add_to_last(0.02);
            }
            saves
        });
        assert_eq!(saved.collect::<Vec<_>>(), [1, 2, 3]);
    }
}
