//! How long the rest of a run takes: the times of what was made so far, and what is still to be done.

use std::time::Instant;

/// What is still to be done between steps, if the run makes all its steps.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StillToDo {
    /// Number of evaluations, with their sample answers.
    pub evaluations: usize,
    /// Number of checkpoints.
    pub saves: usize,
    /// Expected time of the passes of an evaluation, in steps. It counts until the first evaluation was measured.
    pub pass_cost: f64,
    /// Expected time of the sample answers of an evaluation, in steps, for a large model on a GPU.
    pub answer_cost: f64,
    /// Seconds that these answers took before the first step, if that was measured.
    pub answer_seconds: Option<f64>,
    /// Seconds that training waited for the newest checkpoint. If there is none, what a fast disk needs for one.
    pub save_seconds: f64,
    /// Seconds from the last step until its checkpoint is complete, for which the run waits.
    pub last_save_seconds: f64,
    /// The share of the time that checkpoints before the last one may take, if those that would take more are left out.
    pub saving_share: Option<f64>,
}

/// A stopwatch.
pub(super) struct StepClock(Instant);

impl StepClock {
    pub(super) fn new() -> Self {
        Self(Instant::now())
    }

    /// Seconds since the last lap.
    pub(super) fn lap(&mut self) -> f64 {
        let now = Instant::now();
        (now - std::mem::replace(&mut self.0, now)).as_secs_f64()
    }
}

/// How long things took so far.
#[derive(Debug, Clone, Default)]
pub(super) struct Mean {
    /// Seconds of the first, in which kernels are compiled and buffers allocated.
    first: Option<f64>,
    /// Seconds of the others.
    others: f64,
    count: usize,
}

impl Mean {
    pub(super) fn add(&mut self, seconds: f64) {
        if self.first.is_none() {
            self.first = Some(seconds);
        } else {
            self.others += seconds;
            self.count += 1;
        }
    }

    /// The mean without the first. None until there are two.
    pub(super) fn settled(&self) -> Option<f64> {
        (self.count > 0).then(|| self.others / self.count as f64)
    }

    /// Seconds of the next one: the mean without the first, if there were others.
    fn next(&self) -> Option<f64> {
        self.settled().or(self.first)
    }
}

/// How long the parts of a run take, from those that were made.
#[derive(Debug, Clone, Default)]
pub(super) struct Pace {
    pub(super) steps: Mean,
    pub(super) evaluations: Mean,
}

impl Pace {
    /// Counts the time of a step if it was made. One that the guard leaves out is skipped or undone, and says nothing about the
    /// others.
    pub(super) fn add_step(&mut self, seconds: f64, is_made: bool) {
        if is_made {
            self.steps.add(seconds);
        }
    }

    /// Seconds until the end of a run that still makes so many steps, and what is `ahead` between them. None until two steps are
    /// measured, unless nothing is left.
    ///
    /// Until the first evaluation, sample answers are expected to take as long as those before the first step. These may have
    /// waited for kernels. So their time counts only if it is shorter than the estimate from counts of tokens. That estimate is for
    /// a large model on a GPU, where a token of an answer takes as long as 84 tokens of a step; a small model on a CPU needs a
    /// tenth of that.
    pub(super) fn left(&self, steps: usize, ahead: StillToDo) -> Option<f64> {
        if steps + ahead.evaluations + ahead.saves == 0 {
            return Some(0.0);
        }
        let step = self.steps.settled()?;
        let answers = (ahead.answer_cost * step).min(ahead.answer_seconds.unwrap_or(f64::INFINITY));
        let evaluation = self.evaluations.next().unwrap_or(ahead.pass_cost * step + answers);
        let others = steps as f64 * step + ahead.evaluations as f64 * evaluation;
        let last = ahead.saves.min(1) as f64 * ahead.last_save_seconds;
        let share = ahead.saving_share.map_or(f64::INFINITY, |share| share * others);
        let before = (ahead.saves.saturating_sub(1) as f64 * ahead.save_seconds).min(share);
        Some(others + last + before)
    }
}

#[cfg(test)]
mod tests {
    use super::{Pace, StillToDo};

    #[test]
    fn the_time_left_counts_evaluations_and_checkpoints_to_come() {
        let mut pace = Pace::default();
        let ahead = StillToDo {
            evaluations: 3,
            pass_cost: 1.0,
            answer_cost: 3.0,
            answer_seconds: Some(1000.0),
            ..StillToDo::default()
        };
        // The first step says nothing about the others: kernels were compiled in it.
        assert_eq!(pace.left(10, ahead), None);
        pace.steps.add(5.0);
        assert_eq!(pace.left(10, ahead), None);
        assert_eq!(pace.left(0, StillToDo::default()), Some(0.0), "nothing is left, whatever a step takes");
        pace.steps.add(1.0);
        pace.steps.add(3.0);
        assert_eq!(pace.left(10, ahead), Some(10.0 * 2.0 + 3.0 * 4.0 * 2.0));
        // What was measured replaces what was expected.
        pace.evaluations.add(7.0);
        let ahead = StillToDo { saves: 2, save_seconds: 11.0, last_save_seconds: 13.0, ..ahead };
        assert_eq!(pace.left(10, ahead), Some(20.0 + 3.0 * 7.0 + 11.0 + 13.0));
        assert_eq!(pace.left(0, StillToDo { evaluations: 1, saves: 1, ..ahead }), Some(7.0 + 13.0));
        assert_eq!(pace.left(0, StillToDo::default()), Some(0.0));
    }

    /// The last checkpoint is always written, and those before it take no more than their share.
    #[test]
    fn the_time_left_counts_no_checkpoints_that_are_left_out() {
        let mut pace = Pace::default();
        (0..3).for_each(|_| pace.steps.add(1.0));
        let ahead = StillToDo {
            saves: 20,
            save_seconds: 11.0,
            last_save_seconds: 13.0,
            saving_share: Some(0.02),
            ..StillToDo::default()
        };
        assert_eq!(pace.left(100, ahead), Some(100.0 + 13.0 + 2.0));
        // Short ones are all written, and so are those that somebody has asked for.
        assert_eq!(pace.left(100, StillToDo { save_seconds: 0.0625, ..ahead }), Some(100.0 + 13.0 + 19.0 * 0.0625));
        assert_eq!(pace.left(1000, StillToDo { saves: 2, saving_share: None, ..ahead }), Some(1000.0 + 13.0 + 11.0));
    }

    #[test]
    fn a_step_that_is_left_out_says_nothing_about_the_time_of_the_others() {
        let mut pace = Pace::default();
        for _ in 0..3 {
            pace.add_step(1.0, true);
            pace.add_step(0.0, false);
        }
        assert_eq!(pace.left(10, StillToDo::default()), Some(10.0));
    }

    /// A small model on a CPU: 20 steps of 0.1 s, and an evaluation at the end, whose answers took 0.2 s before the first step.
    #[test]
    fn answers_before_the_first_step_say_how_long_answers_take() {
        let mut pace = Pace::default();
        let ahead = StillToDo {
            evaluations: 1,
            pass_cost: 0.5,
            answer_cost: 42.0,
            answer_seconds: Some(0.2),
            ..StillToDo::default()
        };
        for _ in 0..10 {
            pace.steps.add(0.1);
        }
        let left = |answer_seconds| pace.left(10, StillToDo { answer_seconds, ..ahead }).unwrap_or_default();
        assert!((left(Some(0.2)) - (1.0 + 0.05 + 0.2)).abs() < 1e-9, "{}", left(Some(0.2)));
        // Without them, only counts of tokens are known.
        assert!((left(None) - (1.0 + 0.05 + 4.2)).abs() < 1e-9, "{}", left(None));
    }
}
