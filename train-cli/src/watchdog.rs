//! Ends a program whose device has stopped to answer. A step that waits for such a device never returns, so the work runs on
//! a thread of its own, and the main thread looks at the time that the step takes.

use crate::CliError;
use std::{
    sync::{
        Mutex, MutexGuard,
        mpsc::{RecvTimeoutError, channel},
    },
    thread,
    time::{Duration, Instant},
};

/// A step may take this many times the median of the steps before it.
const TIMES_THE_MEDIAN: u32 = 10;
/// A step may take so long in any case. Kernels of a new shape take half a minute to compile.
const SHORTEST: Duration = Duration::from_secs(300);
/// How often the time is looked at.
const EVERY: Duration = Duration::from_millis(500);
/// Stack of the thread that works.
const STACK: usize = 64 << 20;

/// Runs the work of the program. Returns an error when a step takes too long, although the work has not ended then: the
/// caller ends the process.
///
/// # Errors
/// Those of the work, and a step that takes too long.
pub fn run(work: impl FnOnce() -> Result<(), CliError> + Send + 'static) -> Result<(), CliError> {
    let (sender, ended) = channel();
    let work = move || {
        let result = work();
        // Nobody waits for the result of work that was given up.
        let _ = sender.send(result);
    };
    let thread = thread::Builder::new().name("main".into()).stack_size(STACK).spawn(work);
    let thread = thread.map_err(CliError::io("thread".as_ref()))?;
    loop {
        match ended.recv_timeout(EVERY) {
            Ok(result) => return result,
            Err(RecvTimeoutError::Timeout) => clock().overdue(Instant::now()).map_or(Ok(()), Err)?,
            // The work has panicked, and says so.
            Err(RecvTimeoutError::Disconnected) => match thread.join() {
                Ok(()) => return Ok(()),
                Err(panic) => std::panic::resume_unwind(panic),
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
        clock().running = Some((step, Instant::now()));
        Self(())
    }
}

impl Drop for Step {
    fn drop(&mut self) {
        let mut clock = clock();
        if let Some((_, began)) = clock.running.take() {
            clock.done.push(began.elapsed());
        }
    }
}

/// The times of the steps of this process.
#[derive(Default)]
struct Clock {
    running: Option<(usize, Instant)>,
    done: Vec<Duration>,
}

static CLOCK: Mutex<Clock> = Mutex::new(Clock { running: None, done: vec![] });

fn clock() -> MutexGuard<'static, Clock> {
    CLOCK.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl Clock {
    /// The error of a step that takes too long at this moment.
    fn overdue(&self, now: Instant) -> Option<CliError> {
        let (step, began) = self.running?;
        let mut done = self.done.clone();
        done.sort_unstable();
        let limit = SHORTEST.max(*done.get(done.len() / 2)? * TIMES_THE_MEDIAN);
        let taken = now.saturating_duration_since(began);
        (taken > limit).then_some(CliError::Stuck { step, seconds: taken.as_secs() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_may_take_ten_medians_and_at_least_five_minutes() {
        let began = Instant::now();
        let overdue = |done: &[u64], after: u64| {
            let done = done.iter().map(|seconds| Duration::from_secs(*seconds)).collect();
            let clock = Clock { running: Some((7, began)), done };
            clock.overdue(began + Duration::from_secs(after)).map(|error| (error.exit_code(), error.to_string()))
        };
        assert_eq!(overdue(&[1, 2, 3], 299), None);
        let (code, text) = overdue(&[1, 2, 3], 301).unwrap();
        assert!(code == 7 && text.contains("step 7 has taken 301 s"), "{text}");
        assert_eq!(overdue(&[100, 90, 80], 899), None);
        assert!(overdue(&[100, 90, 80], 901).is_some());
        assert_eq!(overdue(&[], 100_000), None, "the first step compiles");
        assert!(Clock { running: None, done: vec![SHORTEST] }.overdue(began + SHORTEST * 100).is_none());
    }

    #[test]
    fn the_result_of_the_work_is_that_of_the_program() {
        run(|| Ok(())).unwrap();
        assert_eq!(run(|| Err(CliError::Usage("no".into()))).unwrap_err().to_string(), "no");
    }
}
