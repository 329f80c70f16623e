//! The guard of a run: a step whose loss or gradient norm is not finite leaves no trace in the weights.
//!
//! Most of these steps are noticed before they update anything. They are left out: the next step follows, with its own rows and
//! learning rate. A step that streams its update and clips by the norm of the step before learns its norm too late. It is undone
//! from a copy of the weights and states of before the step, where memory allows one ([`crate::run::preflight::Undo`]). Without
//! one, the run goes back to its newest checkpoint, or to its beginning, and makes the same steps again without the bad one. A
//! run with `IN_A_ROW` bad steps in a row, or `OFTEN` of `WINDOW`, has gone wrong earlier: it goes back to a checkpoint at least
//! `FAR` steps older, and leaves out all steps from there to the last bad one. It does so at most `ROLLBACKS` times.

use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    ops::RangeInclusive,
    sync::{Arc, Mutex, MutexGuard},
};

/// Bad steps in a row after which a run goes far back.
const IN_A_ROW: usize = 3;
/// Bad steps among the last [`WINDOW`] after which a run goes far back.
const OFTEN: usize = 10;
/// Steps among which bad ones are counted.
const WINDOW: usize = 1000;
/// A run that goes far back goes to a checkpoint that is at least so many steps older.
pub const FAR: usize = 100;
/// How often a run goes far back before it ends.
const ROLLBACKS: usize = 2;

/// What a checkpoint keeps of the guard.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Record {
    /// Steps that are left out, counted from 1, and why.
    pub left_out: BTreeMap<usize, String>,
    /// Steps that were found bad since the run last went far back. The others in `left_out` lie between two of them.
    bad: Vec<usize>,
    /// How often the run has gone far back.
    rollbacks: usize,
}

/// Where a run goes back to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Back {
    /// To the newest checkpoint, because step `bad` had updated weights before it was found bad.
    Newest {
        /// The step.
        bad: usize,
    },
    /// To an older checkpoint, because of many bad steps, of which `bad` is the last.
    Older {
        /// The step.
        bad: usize,
    },
}

/// The guard of a run. Its clones are one guard: the training loop asks it, and whoever starts the loop again.
#[derive(Debug, Clone)]
pub struct Guard {
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    active: bool,
    record: Record,
    back: Option<Back>,
}

impl Guard {
    /// The guard of a run with this record. One that is not `active` ends the run at the first bad step.
    pub fn new(active: bool, record: Record) -> Self {
        Self { state: Arc::new(Mutex::new(State { active, record, back: None })) }
    }

    /// Why step `step`, counted from 1, is left out, if it is.
    pub fn leaves_out(&self, step: usize) -> Option<String> {
        self.state().record.left_out.get(&step).cloned()
    }

    /// Notes that step `step` was bad, why, and whether it has `updated` weights. If this returns true, the run goes on with
    /// the next step. If not, [`Self::back`] says where it goes back to, or that it ends.
    pub fn found_bad(&self, step: usize, reason: String, updated: bool) -> bool {
        let mut state = self.state();
        if !state.active {
            return false;
        }
        let record = &mut state.record;
        record.left_out.insert(step, reason);
        record.bad.push(step);
        let in_a_row = record.bad.iter().rev().zip((0..=step).rev()).take_while(|(bad, step)| *bad == step).count();
        let lately = record.bad.iter().filter(|bad| **bad + WINDOW > step).count();
        let often = in_a_row >= IN_A_ROW || lately >= OFTEN;
        let ends = often && record.rollbacks == ROLLBACKS;
        if often && !ends {
            record.rollbacks += 1;
            record.bad.clear();
        }
        state.back = match (often, updated) {
            (true, _) if ends => None,
            (true, _) => Some(Back::Older { bad: step }),
            (false, true) => Some(Back::Newest { bad: step }),
            (false, false) => return true,
        };
        false
    }

    /// Where the run that has just ended goes back to. None if it has ended for good.
    pub fn back(&self) -> Option<Back> {
        self.state().back.take()
    }

    /// Leaves out steps in which nothing was found bad.
    pub fn leave_out(&self, steps: RangeInclusive<usize>, reason: &str) {
        let record = &mut self.state().record;
        for step in steps {
            record.left_out.entry(step).or_insert_with(|| reason.to_owned());
        }
    }

    /// What a checkpoint keeps.
    pub fn record(&self) -> Record {
        self.state().record.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics while it holds the lock")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guard() -> Guard {
        Guard::new(true, Record::default())
    }

    fn bad(guard: &Guard, step: usize, updated: bool) -> (bool, Option<Back>) {
        (guard.found_bad(step, "the loss is NaN".into(), updated), guard.back())
    }

    #[test]
    fn a_bad_step_is_left_out_or_taken_back() {
        let guard = guard();
        assert_eq!(bad(&guard, 4, false), (true, None));
        assert_eq!(bad(&guard, 9, true), (false, Some(Back::Newest { bad: 9 })));
        assert_eq!([4, 5, 9].map(|step| guard.leaves_out(step).is_some()), [true, false, true]);
        let off = Guard::new(false, Record::default());
        assert_eq!((bad(&off, 4, false), off.leaves_out(4)), ((false, None), None));
    }

    #[test]
    fn three_in_a_row_go_far_back_and_the_third_time_ends() {
        let guard = guard();
        for (round, expected) in [Some(Back::Older { bad: 7 }), Some(Back::Older { bad: 17 }), None].iter().enumerate()
        {
            let first = 5 + 10 * round;
            assert_eq!(bad(&guard, first, false), (true, None));
            assert_eq!(bad(&guard, first + 1, false), (true, None));
            assert_eq!(bad(&guard, first + 2, false), (false, *expected));
        }
    }

    #[test]
    fn ten_of_a_thousand_go_far_back() {
        let guard = guard();
        for step in (100..=900).step_by(100) {
            assert_eq!(bad(&guard, step, false), (true, None));
        }
        // The first of them is a thousand steps ago.
        assert_eq!(bad(&guard, 1100, false), (true, None));
        assert_eq!(bad(&guard, 1101, false), (false, Some(Back::Older { bad: 1101 })));
    }
}
