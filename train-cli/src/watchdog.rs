//! Ends a program whose device no longer answers. A step that waits for such a device never returns, so the work runs on a
//! thread of its own, and the main thread counts the time that the step takes.

use crate::{CliError, device};
use std::{
    sync::{
        Mutex, MutexGuard,
        mpsc::{RecvTimeoutError, channel},
    },
    thread,
    time::Duration,
};

/// A step may take this many times the median of the steps before it.
const TIMES_THE_MEDIAN: u32 = 10;
/// A step may take so long in any case. Kernels of a new shape take half a minute to compile.
const SHORTEST: Duration = Duration::from_secs(300);
/// The length of a turn of the watch. Turns are counted, and not the clock read: a process that was stopped (Ctrl-Z) and
/// continued has made no turns meanwhile.
const TURN: Duration = Duration::from_millis(500);
/// Stack of the thread that works.
const STACK: usize = 64 << 20;

/// Runs the work of the program. Returns an error when a step takes too long, although the work has not ended then: the
/// caller ends the process.
///
/// # Errors
/// The errors of the work, and a step that takes too long.
pub fn run(work: impl FnOnce() -> Result<(), CliError> + Send + 'static) -> Result<(), CliError> {
    let (sender, ended) = channel();
    let work = move || {
        let result = work();
        // Nobody waits for the result of work that was given up.
        let _ = sender.send(result);
    };
    let thread = thread::Builder::new().name("main".into()).stack_size(STACK).spawn(work);
    let thread = thread.map_err(CliError::no_thread("command"))?;
    loop {
        match ended.recv_timeout(TURN) {
            Ok(result) => return result,
            Err(RecvTimeoutError::Timeout) => clock().turn().map_or(Ok(()), Err)?,
            // The work has panicked, and says so.
            Err(RecvTimeoutError::Disconnected) => match thread.join() {
                Ok(()) => return Ok(()),
                Err(panic) => return device::check().and_then(|()| std::panic::resume_unwind(panic)),
            },
        }
    }
}

/// A step that is being made; it ends when this is dropped.
#[derive(Debug)]
pub struct Step(());

impl Step {
    /// Step `step`, counted from 1, begins. The first step that a process makes compiles kernels and has no limit.
    pub fn begin(step: usize) -> Self {
        clock().running = Some((step, Duration::ZERO));
        Self(())
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        let mut clock = clock();
        if let Some((_, taken)) = clock.running.take() {
            clock.done.push(taken);
        }
    }
}

/// The times of the steps of this process, in whole turns.
struct Clock {
    /// The step that is being made, and the time that it has taken.
    running: Option<(usize, Duration)>,
    done: Vec<Duration>,
}

static CLOCK: Mutex<Clock> = Mutex::new(Clock { running: None, done: vec![] });

fn clock() -> MutexGuard<'static, Clock> {
    CLOCK.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl Clock {
    /// Counts a turn. Returns the error of a step that takes too long.
    fn turn(&mut self) -> Option<CliError> {
        let (step, taken) = self.running.as_mut()?;
        *taken += TURN;
        let mut done = self.done.clone();
        done.sort_unstable();
        let limit = SHORTEST.max(*done.get(done.len() / 2)? * TIMES_THE_MEDIAN);
        (*taken > limit).then_some(CliError::Stuck { step: *step, seconds: taken.as_secs() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_may_take_ten_medians_and_at_least_five_minutes() {
        let overdue = |done: &[u64], after: u64| {
            let done = done.iter().map(|seconds| Duration::from_secs(*seconds)).collect();
            let mut clock = Clock { running: Some((7, Duration::from_secs(after) - TURN)), done };
            clock.turn().map(|error| (error.exit_code(), error.to_string()))
        };
        assert_eq!(overdue(&[1, 2, 3], 300), None);
        let (code, text) = overdue(&[1, 2, 3], 301).unwrap();
        assert!(code == 7 && text.contains("step 7 has taken 301 s"), "{text}");
        assert_eq!(overdue(&[100, 90, 80], 900), None);
        assert!(overdue(&[100, 90, 80], 901).is_some());
        assert_eq!(overdue(&[], 100_000), None, "the first step compiles");
        assert!(Clock { running: None, done: vec![SHORTEST] }.turn().is_none());
    }

    #[test]
    fn the_result_of_the_work_is_that_of_the_program() {
        run(|| Ok(())).unwrap();
        assert_eq!(run(|| Err(CliError::Usage("no".into()))).unwrap_err().to_string(), "no");
    }
}
