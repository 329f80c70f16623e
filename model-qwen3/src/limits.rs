//! Work of a library over a file that somebody else made, within limits: on a thread of its own, with bounds on its
//! time and its memory.

use backend_nvfp4::host_memory;
use std::{
    cell::OnceCell,
    io,
    path::{Path, PathBuf},
    sync::mpsc,
    time::{Duration, Instant},
};

/// Stack of the thread: 4 KiB for each byte of the longest template. A stack that is full still ends the program.
const STACK: usize = 256 << 20;
/// Longest time of a processor that the work may take. A template for a thousand messages takes milliseconds.
const LONGEST_TIME: Duration = Duration::from_secs(2);
/// Longest time that the caller waits for it, on a machine that is busy otherwise.
const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// How often the time is looked at.
const LOOK: Duration = Duration::from_millis(2);

/// How the name of a thread begins that works within limits. A panic there becomes an error.
pub const THREAD: &str = "limited: ";

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum Limit {
    /// The system gives no thread.
    #[error("the system gives no thread: {0}")]
    Thread(io::Error),
    /// The memory limit, in bytes.
    #[error("it took more than {} MiB of memory", .0 >> 20)]
    Memory(usize),
    /// The processor time is spent.
    #[error("it took more than {} seconds", LONGEST_TIME.as_secs())]
    Time,
    /// The caller has waited long enough.
    #[error("it did not end within {} seconds", LONGEST_WAIT.as_secs())]
    Wait,
    /// The library panicked.
    #[error("the library panicked on it: {0}")]
    Panic(String),
}

/// What a thread says.
enum Said<Answer> {
    /// The folder in which the system tells of the thread.
    Begins(PathBuf),
    Ends(Answer),
    TakesTooMuch,
}

thread_local! {
    /// How this thread says that it takes too much memory.
    static TAKES_TOO_MUCH: OnceCell<Box<dyn Fn()>> = const { OnceCell::new() };
}

/// Runs `work` with at most `memory` bytes. `what` names it. A thread cannot be ended: after an error by time or memory it
/// keeps what it has, so that the program should end.
///
/// # Errors
/// If the work reaches a limit or panics.
pub fn within<Answer: Send + 'static>(
    what: &str,
    memory: usize,
    work: impl FnOnce() -> Answer + Send + 'static,
) -> Result<Answer, Limit> {
    let (sender, said) = mpsc::channel();
    // Nobody listens any more if a limit was reached.
    let limited = move || {
        if let Ok(name) = std::fs::read_link("/proc/thread-self") {
            let _ = sender.send(Said::Begins(Path::new("/proc").join(name)));
        }
        let too_much = sender.clone();
        let _ = TAKES_TOO_MUCH.with(|tell| tell.set(Box::new(move || drop(too_much.send(Said::TakesTooMuch)))));
        host_memory::limit_thread(memory, || {
            let _ = TAKES_TOO_MUCH.try_with(|tell| tell.get().map(|tell| tell()));
            wait()
        });
        let _ = sender.send(Said::Ends(work()));
    };
    let thread = std::thread::Builder::new().name(format!("{THREAD}{what}")).stack_size(STACK);
    let thread = thread.spawn(limited).map_err(Limit::Thread)?;
    let (began, mut told) = (Instant::now(), None);
    loop {
        match said.recv_timeout(LOOK) {
            Ok(Said::Begins(folder)) => told = Some(folder),
            Ok(Said::Ends(answer)) => return Ok(answer),
            Ok(Said::TakesTooMuch) => return Err(Limit::Memory(memory)),
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => {}
        }
        if told.as_deref().and_then(processor_time).is_some_and(|time| time > LONGEST_TIME) {
            return Err(Limit::Time);
        }
        if began.elapsed() > LONGEST_WAIT {
            return Err(Limit::Wait);
        }
    }
    let panic = thread.join().err();
    let text = panic
        .as_ref()
        .and_then(|panic| panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied()));
    Err(Limit::Panic(text.unwrap_or("without a message").to_owned()))
}

/// Waits for the end of the program.
fn wait() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

/// How long the thread of a folder in /proc has had a processor; None where the system does not say.
fn processor_time(thread: &Path) -> Option<Duration> {
    let text = std::fs::read_to_string(thread.join("schedstat")).ok()?;
    text.split(' ').next()?.parse().ok().map(Duration::from_nanos)
}
