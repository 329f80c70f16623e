//! Ends a program whose device no longer answers. A step that waits for such a device never returns, and neither does an
//! evaluation. So the work runs on a thread of its own, and the main thread counts the time since the last sign of progress.

use crate::{CliError, device_failure};
use std::{
    fmt,
    sync::{
        Mutex, MutexGuard, PoisonError,
        mpsc::{RecvTimeoutError, channel},
    },
    thread,
    time::Duration,
};

/// Work may stand still for this many times the median of the steps so far.
const TIMES_THE_MEDIAN: u32 = 10;
/// Work may stand still for so long in any case. Kernels of a new shape take half a minute to compile.
const SHORTEST: Duration = Duration::from_secs(300);
/// The first step, the first evaluation and the first sample answers of a process may stand still for so long. They compile
/// their kernels, perhaps twenty for one block, and how fast the device is may not be known yet. The longest work without a
/// sign of progress is the head. On a CPU with 11 billion operations a second, an hour is enough for the head of Qwen3-4B over
/// 16,384 tokens.
const FIRST: Duration = Duration::from_secs(3600);
/// The length of a turn of the watch. Turns are counted, and not the clock read: a process that was stopped (Ctrl-Z) and
/// continued has made no turns meanwhile.
const TURN: Duration = Duration::from_millis(500);
/// Stack of the thread that works.
const STACK: usize = 64 << 20;

/// Runs the work of the program. Returns an error when watched work stands still for too long, although the work has not ended
/// then: the caller ends the process.
///
/// # Errors
/// The errors of the work, and work that stands still.
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
            Err(RecvTimeoutError::Timeout) => {
                let overdue = clock().turn();
                if let Some(error) = overdue {
                    let last = LAST.lock().unwrap_or_else(PoisonError::into_inner).take();
                    last.into_iter().for_each(|last| last(&error));
                    return Err(error);
                }
            }
            // The work has panicked, and says so.
            Err(RecvTimeoutError::Disconnected) => match thread.join() {
                Ok(()) => return Ok(()),
                Err(panic) => return device_failure::check().and_then(|()| std::panic::resume_unwind(panic)),
            },
        }
    }
}

/// What is done with the error when watched work stands still for too long, before [`run`] returns it.
type Last = Box<dyn FnOnce(&CliError) + Send>;

static LAST: Mutex<Option<Last>> = Mutex::new(None);

/// Says what is done, on the main thread, when watched work stands still for too long.
pub fn when_stuck(last: impl FnOnce(&CliError) + Send + 'static) {
    *LAST.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(last));
}

/// Work whose standing still is noticed.
#[derive(Debug, Clone, Copy)]
pub enum Work {
    /// A step, counted from 1.
    Step(usize),
    /// The evaluation after a step.
    Evaluation(usize),
    /// The sample answers after a step.
    Samples(usize),
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Step(step) => write!(f, "step {step}"),
            Self::Evaluation(step) => write!(f, "the evaluation after step {step}"),
            Self::Samples(step) => write!(f, "answering the sample prompts after step {step}"),
        }
    }
}

/// Work that is being done; it ends when this is dropped.
#[derive(Debug)]
pub struct Watched(());

impl Watched {
    /// The work begins.
    pub fn begin(work: Work) -> Self {
        clock().running = Some(Running { work, taken: Duration::ZERO, still: Duration::ZERO });
        Self(())
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let mut clock = clock();
        if let Some(running) = clock.running.take() {
            clock.end(running);
        }
    }
}

/// A sign of progress: the work that is watched, if any is, has come to the next block, chunk or token.
pub fn moved() {
    clock().moved();
}

/// Whether an evaluation was watched in this process.
#[cfg(test)]
pub(crate) fn has_seen_an_evaluation() -> bool {
    clock().has_evaluated
}

/// Work that is being done.
struct Running {
    work: Work,
    /// The time since it began.
    taken: Duration,
    /// The time since its last sign of progress.
    still: Duration,
}

/// The times of this process, in whole turns.
struct Clock {
    running: Option<Running>,
    /// The times of the steps that were made.
    steps: Vec<Duration>,
    has_evaluated: bool,
    has_answered: bool,
}

impl Clock {
    const NEW: Self = Self { running: None, steps: vec![], has_evaluated: false, has_answered: false };
}

static CLOCK: Mutex<Clock> = Mutex::new(Clock::NEW);

fn clock() -> MutexGuard<'static, Clock> {
    CLOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Clock {
    /// Counts a turn. Returns the error of work that stands still for too long.
    fn turn(&mut self) -> Option<CliError> {
        let running = self.running.as_mut()?;
        running.taken += TURN;
        running.still += TURN;
        let (work, still) = (running.work, running.still);
        // No limit is shorter, so the median is computed only for work that may be overdue.
        (still > SHORTEST && still > self.limit(work))
            .then(|| CliError::Stuck { work: work.to_string(), seconds: still.as_secs() })
    }

    /// How long work may stand still.
    fn limit(&self, work: Work) -> Duration {
        let is_first = match work {
            Work::Step(_) => self.steps.is_empty(),
            Work::Evaluation(_) => !self.has_evaluated,
            Work::Samples(_) => !self.has_answered,
        };
        let mut steps = self.steps.clone();
        steps.sort_unstable();
        let median = steps.get(steps.len() / 2).copied().unwrap_or_default();
        (median * TIMES_THE_MEDIAN).max(if is_first { FIRST } else { SHORTEST })
    }

    fn moved(&mut self) {
        if let Some(running) = &mut self.running {
            running.still = Duration::ZERO;
        }
    }

    fn end(&mut self, running: Running) {
        match running.work {
            Work::Step(_) => self.steps.push(running.taken),
            Work::Evaluation(_) => self.has_evaluated = true,
            Work::Samples(_) => self.has_answered = true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A clock that has seen steps of so many seconds, and work that stands still for `still` seconds with the next turn.
    fn clock_of(steps: &[u64], work: Work, still: u64) -> Clock {
        let steps = steps.iter().map(|seconds| Duration::from_secs(*seconds)).collect();
        let still = Duration::from_secs(still) - TURN;
        Clock { running: Some(Running { work, taken: still, still }), steps, ..Clock::NEW }
    }

    #[test]
    fn a_step_may_stand_still_for_ten_medians_and_at_least_five_minutes() {
        let overdue = |steps: &[u64], still: u64| {
            clock_of(steps, Work::Step(7), still).turn().map(|error| (error.exit_code(), error.to_string()))
        };
        assert_eq!(overdue(&[1, 2, 3], 300), None);
        let (code, text) = overdue(&[1, 2, 3], 301).unwrap();
        assert!(code == 7 && text.contains("step 7 has made no progress for 301 s"), "{text}");
        assert_eq!(overdue(&[100, 90, 80], 900), None);
        assert!(overdue(&[100, 90, 80], 901).is_some());
        assert!(Clock { steps: vec![SHORTEST], ..Clock::NEW }.turn().is_none(), "nothing is watched");
    }

    #[test]
    fn the_first_work_of_a_kind_may_stand_still_for_an_hour_and_no_longer() {
        let is_overdue = |steps: &[u64], work: Work, still: u64| clock_of(steps, work, still).turn().is_some();
        for work in [Work::Step(1), Work::Evaluation(4), Work::Samples(4)] {
            assert!(!is_overdue(&[], work, 3600) && is_overdue(&[], work, 3601), "{work}");
        }
        // Steps that are slower still say that the device is.
        assert!(!is_overdue(&[1000], Work::Evaluation(4), 10_000));
        assert!(is_overdue(&[1000], Work::Evaluation(4), 10_001));
        // A second evaluation is bounded as a step is.
        for work in [Work::Evaluation(4), Work::Samples(4)] {
            let mut clock = clock_of(&[1], work, 3601);
            let first = clock.running.take().unwrap();
            clock.end(first);
            let second = Duration::from_secs(300);
            clock.running = Some(Running { work, taken: second, still: second });
            let text = clock.turn().unwrap().to_string();
            assert!(text.contains(&format!("{work} has made no progress for 300 s")), "{text}");
        }
    }

    #[test]
    fn work_that_makes_progress_may_take_as_long_as_it_needs() {
        for work in [Work::Step(1), Work::Evaluation(4), Work::Samples(4)] {
            let mut clock = clock_of(&[], work, 3600);
            for _ in 0..5 {
                assert!(clock.turn().is_none(), "{work}");
                clock.moved();
                let running = clock.running.as_mut().unwrap();
                assert_eq!(running.still, Duration::ZERO);
                running.taken += FIRST;
                running.still += FIRST - TURN;
            }
        }
        let mut clock = clock_of(&[], Work::Step(1), 9);
        assert!(clock.turn().is_none());
        let step = clock.running.take().unwrap();
        clock.end(step);
        assert_eq!(clock.steps, [Duration::from_secs(9)], "the whole step counts");
    }

    #[test]
    fn the_result_of_the_work_is_that_of_the_program() {
        run(|| Ok(())).unwrap();
        assert_eq!(run(|| Err(CliError::Usage("no".into()))).unwrap_err().to_string(), "no");
    }
}
