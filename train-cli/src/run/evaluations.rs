//! The evaluation losses of a run: which evaluation is the best, and whether the losses have stopped falling.

use super::log::{self, EvaluationFigures, Logged};
use crate::CliError;
use std::path::Path;

/// The evaluations of a run.
#[derive(Debug, Clone, Default)]
pub struct Evaluations {
    /// The steps after which they were made, and the losses, in order.
    all: Vec<(usize, f32)>,
    /// The steps that were made before the recipe began. Losses there are not compared with later ones.
    before: usize,
}

impl Evaluations {
    /// Reads the evaluations from the log of a run, whose recipe begins after `before` steps.
    ///
    /// # Errors
    /// If the log cannot be read.
    pub fn logged(run: &Path, before: usize) -> Result<Self, CliError> {
        let lines: Vec<Logged> = log::lines(run, log::METRICS)?;
        let made = lines.iter().filter_map(|line| if let Logged::Evaluation(made) = line { Some(made) } else { None });
        Ok(Self::of(made, before))
    }

    /// These evaluations of a run, whose recipe begins after `before` steps.
    pub(super) fn of<'a>(all: impl IntoIterator<Item = &'a EvaluationFigures>, before: usize) -> Self {
        Self { all: all.into_iter().map(|made| (made.step, made.eval_loss as f32)).collect(), before }
    }

    /// Those after at most `step` steps.
    #[must_use]
    pub fn up_to(mut self, step: usize) -> Self {
        self.all.retain(|(made, _)| *made <= step);
        self
    }

    /// Adds the evaluation after a step.
    pub fn add(&mut self, step: usize, loss: f32) {
        self.all.push((step, loss));
    }

    /// Whether there was one after step `step`.
    pub fn has(&self, step: usize) -> bool {
        self.all.iter().any(|(made, _)| *made == step)
    }

    /// The loss after step `step`, if it is known and finite.
    pub fn after(&self, step: usize) -> Option<f32> {
        self.all.iter().find(|(made, _)| *made == step).map(|(_, loss)| *loss).filter(|loss| loss.is_finite())
    }

    /// The last loss.
    pub fn last(&self) -> Option<f32> {
        self.all.last().map(|(_, loss)| *loss)
    }

    /// The step of the lowest loss, and the loss; the earliest of several.
    pub fn best(&self) -> Option<(usize, f32)> {
        self.best_of(|_| true)
    }

    /// The best of those whose step is wanted.
    pub fn best_of(&self, wanted: impl Fn(usize) -> bool) -> Option<(usize, f32)> {
        let compared = |(step, loss): &(usize, f32)| *step > self.before && loss.is_finite() && wanted(*step);
        let compared = self.all.iter().copied().filter(compared);
        compared.min_by(|(_, a), (_, b)| a.total_cmp(b))
    }

    /// Whether the last `patience` evaluations were no better than the best before them.
    pub fn have_stalled(&self, patience: usize) -> bool {
        let best = self.best().map_or(self.before, |(step, _)| step);
        self.all.iter().filter(|(step, _)| *step > best).count() >= patience
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_loss_is_the_best_and_the_earliest_of_equals() {
        let mut all = Evaluations::default();
        assert!(all.best().is_none() && !all.have_stalled(1));
        let stalled: Vec<bool> = [(1, 3.0), (2, 2.0), (3, 2.0), (4, f32::NAN), (5, 1.5), (6, 1.6)]
            .into_iter()
            .map(|(step, loss)| {
                all.add(step, loss);
                all.have_stalled(2)
            })
            .collect();
        assert_eq!(stalled, [false, false, false, true, false, false]);
        assert_eq!((all.best(), all.best_of(|step| step < 5)), (Some((5, 1.5)), Some((2, 2.0))));
        assert_eq!((all.last(), all.has(4), all.has(7)), (Some(1.6), true, false));
        assert_eq!([2, 4, 7].map(|step| all.after(step)), [Some(2.0), None, None]);
        // A log has null for NaN, and gives the same evaluations again.
        let run = tempfile::tempdir().unwrap();
        let line = |(step, loss): &(usize, f32)| format!("{}\n", serde_json::json!({"step": step, "eval_loss": loss}));
        std::fs::write(run.path().join(log::METRICS), all.all.iter().map(line).collect::<String>()).unwrap();
        let again = Evaluations::logged(run.path(), 0).unwrap();
        assert_eq!((again.all.len(), again.best(), again.has(4)), (6, all.best(), true));
        // A run that resumes at an older checkpoint forgets those after it.
        assert!(again.clone().up_to(4).have_stalled(2) && !again.have_stalled(2));
        // Losses from before the recipe begins count for nothing.
        all.before = 5;
        assert!(all.best() == Some((6, 1.6)) && !all.have_stalled(1));
    }
}
