//! The losses of a run's steps: whether one stands out, and whether they have risen above those at the beginning.
//!
//! The loss of the first step is that of the model before any update. So a run that diverges within its first steps is
//! noticed, too.

use super::log::{Logged, StepFigures};
use std::collections::VecDeque;

/// The losses so far.
#[derive(Debug, Clone, Default)]
pub(super) struct Losses {
    /// The loss of the first step.
    first: Option<f32>,
    /// The median of the first [`RECENT`] losses.
    beginning: Option<f32>,
    last: VecDeque<f32>,
    /// Whether a rise within the first steps was warned of.
    warned_early: bool,
    /// Whether a rise of the median was warned of.
    warned: bool,
    warnings: Vec<String>,
}

/// Losses whose median is compared with the next loss.
const RECENT: usize = 20;
/// A loss that is so many times the median stands out, and so does one that is so many times the first loss.
const SPIKE: f32 = 3.0;
/// A loss also exceeds the first one by this, before it counts as risen: the losses of single rows differ.
const MARGIN: f32 = 1.0;
/// A median that is so many times that of the beginning has risen.
const RISEN: f32 = 1.5;
/// Warnings that are kept. A run that has more is told by these.
const MOST: usize = 20;

impl Losses {
    /// The losses that the lines of a run's log hold.
    pub(super) fn of(lines: &[Logged]) -> Self {
        Self::of_steps(lines.iter().filter_map(|line| if let Logged::Step(step) = line { Some(step) } else { None }))
    }

    /// The losses of steps.
    pub(super) fn of_steps<'a>(steps: impl IntoIterator<Item = &'a StepFigures>) -> Self {
        let mut losses = Self::default();
        for step in steps {
            losses.add(step.step, step.loss as f32);
        }
        losses
    }

    /// Adds a loss. Returns a warning if it stands out, or if losses have risen above those at the beginning.
    pub(super) fn add(&mut self, step: usize, loss: f32) -> Option<String> {
        let median = (self.last.len() >= RECENT).then(|| median(&self.last));
        self.last.push_back(loss);
        if self.last.len() > RECENT {
            self.last.pop_front();
        }
        let first = *self.first.get_or_insert(loss);
        let warning = match median {
            None => self.early(step, loss, first),
            Some(median) => self.late(step, loss, first, median),
        };
        self.warnings.extend(warning.clone().filter(|_| self.warnings.len() < MOST));
        warning
    }

    /// The warnings so far, those of earlier processes of the run included. Of many, the first.
    pub(super) fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// A warning about one of the first steps.
    fn early(&mut self, step: usize, loss: f32, first: f32) -> Option<String> {
        if !has_risen(first, loss) || std::mem::replace(&mut self.warned_early, true) {
            return None;
        }
        Some(format!(
            "the loss has risen from {first:.3} (first step) to {loss:.3} (step {step}). If it stays so high, the run \
             diverges: {REMEDY}"
        ))
    }

    /// A warning about a later step.
    fn late(&mut self, step: usize, loss: f32, first: f32, median: f32) -> Option<String> {
        let beginning = *self.beginning.get_or_insert(median);
        if loss > SPIKE * median {
            return Some(format!(
                "the loss of step {step} is {loss:.3}, the median of the {RECENT} before is {median:.3}"
            ));
        }
        let from_first = has_risen(first, median);
        if !(from_first || median > RISEN * beginning) || std::mem::replace(&mut self.warned, true) {
            return None;
        }
        let from = if from_first { format!("{first:.3} (first step)") } else { format!("{beginning:.3}") };
        Some(format!(
            "the loss has risen from {from} to {median:.3} (medians of {RECENT} steps): the run diverges; {REMEDY}"
        ))
    }
}

const REMEDY: &str = "stop it, and start again with a lower --learning-rate";

/// Whether a loss is far above that of the model before its first update.
fn has_risen(first: f32, loss: f32) -> bool {
    loss > SPIKE * first && loss > first + MARGIN
}

fn median(losses: &VecDeque<f32>) -> f32 {
    let mut sorted: Vec<f32> = losses.iter().copied().collect();
    sorted.sort_by(f32::total_cmp);
    sorted[sorted.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn warnings(losses: &mut Losses, values: &[f32]) -> Vec<String> {
        values.iter().enumerate().filter_map(|(step, loss)| losses.add(step + 1, *loss)).collect()
    }

    #[test]
    fn a_loss_that_stands_out_or_rises_is_warned_of() {
        let mut losses = Losses::default();
        assert!(warnings(&mut losses, &[2.0; 30]).is_empty());
        let spike = warnings(&mut losses, &[7.0, 2.0]);
        assert!(spike.len() == 1 && spike[0].contains("7.000") && spike[0].contains("2.000"), "{spike:?}");
        let risen = warnings(&mut losses, &[4.0; 60]);
        assert!(risen.len() == 1 && risen[0].contains("from 2.000 to 4.000"), "{risen:?}");
        assert_eq!(losses.warnings(), [spike, risen].concat());
    }

    #[test]
    fn a_run_that_diverges_in_its_first_steps_is_warned_of() {
        let mut all = vec![6.0];
        all.extend([189.0; 40]);
        let mut losses = Losses::default();
        let found = warnings(&mut losses, &all);
        // Once at once, and once more when the median says so.
        assert!(found.len() == 2 && found[0].contains("6.000 (first step) to 189.000 (step 2)"), "{found:?}");
        assert!(found[1].contains("6.000 (first step) to 189.000 (medians"), "{found:?}");
        assert_eq!(warnings(&mut Losses::default(), &[6.0, 189.0]).len(), 1);
        // Rows differ.
        assert!(warnings(&mut Losses::default(), &[0.2, 1.1, 0.4, 0.3]).is_empty());
        // A resumed run knows the losses of before.
        let line = |(i, loss): (usize, &f32)| {
            Logged::Step(StepFigures { step: i + 1, loss: f64::from(*loss), ..StepFigures::default() })
        };
        let mut lines: Vec<Logged> = all.iter().enumerate().map(line).collect();
        lines.insert(3, serde_json::from_str(r#"{"step": 3, "eval_loss": 0.1}"#).unwrap());
        assert_eq!(Losses::of(&lines).warnings(), found);
        assert!(warnings(&mut Losses::of(&lines[..10]), &[189.0; 5]).is_empty(), "a warning came again");
    }
}
