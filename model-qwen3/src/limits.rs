//! Runs a library over a file that somebody else made, within limits: on another thread, with a bound on memory and, where the
//! library gives one answer, a bound on time.

use backend_nvfp4::host_memory;
use std::{
    any::Any,
    cell::{OnceCell, RefCell},
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
    thread::JoinHandle,
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

/// Most threads at a time that were given up and have not ended. Each keeps a processor or its memory.
const MOST_GIVEN_UP: usize = 4;

/// The threads that were given up and have not ended.
static GIVEN_UP: AtomicUsize = AtomicUsize::new(0);

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
    /// Earlier work took too much and still keeps its threads.
    #[error("earlier work took too much memory or time, {0} times, and still keeps its threads; restart the program")]
    GivenUp(usize),
    /// The library panicked.
    #[error("the library panicked on it: {0}")]
    Panic(String),
}

/// What a thread says of its work.
enum Said<Answer> {
    /// The folder in which the system tells of the thread, and how long the thread has had a processor before.
    Begins(PathBuf, Duration),
    /// The answer, or what the work panicked with.
    Ends(Result<Answer, Box<dyn Any + Send>>),
    TakesTooMuch,
}

/// A piece of work.
type Work = Box<dyn FnOnce() + Send>;

/// A thread that does one work of a kind after another. It ends when this is dropped and its work is done.
struct Worker {
    what: &'static str,
    works: mpsc::Sender<Work>,
}

/// Workers that wait for work, at most one of each kind: a worker keeps the part of its stack that it has used. A template is
/// rendered for each row of a file, and to start a thread takes longer than that (doc/notebook/log.md, 2026-11-29).
static IDLE: Mutex<Places> = Mutex::new([const { None }; KINDS]);

/// The workers that wait.
type Places = [Option<Worker>; KINDS];

/// At least as many as there are kinds of work: chat templates, texts to tokenize, Parquet files.
const KINDS: usize = 8;

thread_local! {
    /// How this thread says that it takes too much memory.
    static TAKES_TOO_MUCH: RefCell<Option<Box<dyn Fn()>>> = const { RefCell::new(None) };
    /// The folder in which the system tells of this thread, if it does.
    static FOLDER: OnceCell<Option<PathBuf>> = const { OnceCell::new() };
}

/// Runs `work` with at most `memory` bytes. `what` names its kind. A thread cannot be ended: after an error by time or memory it
/// keeps what it has, so the program should end. A program that does not end refuses further work while `MOST_GIVEN_UP` such
/// threads are left.
///
/// # Errors
/// If the work reaches a limit or panics, or if earlier work has left too many threads.
pub fn within<Answer: Send + 'static>(
    what: &'static str,
    memory: usize,
    work: impl FnOnce() -> Answer + Send + 'static,
) -> Result<Answer, Limit> {
    check_given_up()?;
    let (sender, said) = mpsc::channel();
    let ended = Arc::new(AtomicBool::new(false));
    let at_end = AtEnd(ended.clone());
    let limited = Box::new(move || {
        let _at_end = at_end;
        let folder = FOLDER.with(|folder| folder.get_or_init(folder_of_this_thread).clone());
        if let Some((folder, before)) = folder.and_then(|folder| processor_time(&folder).map(|time| (folder, time))) {
            // Nobody listens if the system gave this thread no time at all.
            let _ = sender.send(Said::Begins(folder, before));
        }
        let too_much = sender.clone();
        TAKES_TOO_MUCH.set(Some(Box::new(move || drop(too_much.send(Said::TakesTooMuch)))));
        limit_this_thread(memory);
        let answer = catch_unwind(AssertUnwindSafe(work));
        // What the thread does between two works has no limit.
        limit_this_thread(usize::MAX);
        // Nobody listens any more if a limit was reached.
        let _ = sender.send(Said::Ends(answer));
    });
    let worker = assign(what, limited)?;
    let (began, mut told) = (Instant::now(), None);
    loop {
        match said.recv_timeout(LOOK) {
            Ok(Said::Begins(folder, before)) => {
                told = Some((folder, before));
                continue;
            }
            Ok(Said::Ends(Ok(answer))) => {
                keep(worker);
                return Ok(answer);
            }
            Ok(Said::Ends(Err(panic))) => return Err(panicked(Some(panic))),
            Ok(Said::TakesTooMuch) => return Err(give_up(&ended, Limit::Memory(memory))),
            Err(mpsc::RecvTimeoutError::Disconnected) => return Err(panicked(None)),
            Err(mpsc::RecvTimeoutError::Timeout) => {}
        }
        let taken = told.as_ref().and_then(|(folder, before)| Some(processor_time(folder)?.saturating_sub(*before)));
        if taken.is_some_and(|time| time > LONGEST_TIME) {
            return Err(give_up(&ended, Limit::Time));
        }
        if began.elapsed() > LONGEST_WAIT {
            return Err(give_up(&ended, Limit::Wait));
        }
    }
}

/// The items that `make` gives on a thread of its own, one after another. Making an item may take at most `memory` bytes; the
/// memory of earlier items does not count. There is no limit of time, because the caller sees each item as it comes. `what`
/// names the work. After an error there are no items.
///
/// # Errors
/// If the system gives no thread, or if earlier work has left too many threads.
pub fn each_within<Item, Items>(
    what: &str,
    memory: usize,
    make: impl FnOnce() -> Items + Send + 'static,
) -> Result<impl Iterator<Item = Result<Item, Limit>>, Limit>
where
    Item: Send + 'static,
    Items: Iterator<Item = Item>,
{
    check_given_up()?;
    let (sender, made) = mpsc::sync_channel(1);
    let limited = move || {
        let too_much = sender.clone();
        let tell = move || {
            GIVEN_UP.fetch_add(1, Ordering::Relaxed);
            drop(too_much.send(Err(Limit::Memory(memory))));
        };
        TAKES_TOO_MUCH.set(Some(Box::new(tell)));
        limit_this_thread(memory);
        for item in make() {
            if sender.send(Ok(item)).is_err() {
                // Nobody wants more.
                break;
            }
            limit_this_thread(memory);
        }
    };
    let mut thread = Some(start(what, limited)?);
    Ok(std::iter::from_fn(move || {
        thread.as_ref()?;
        match made.recv() {
            Ok(Ok(item)) => Some(Ok(item)),
            Ok(Err(limit)) => {
                thread = None;
                Some(Err(limit))
            }
            Err(mpsc::RecvError) => {
                let thread = thread.take()?;
                thread.join().err().map(|panic| Err(panicked(Some(panic))))
            }
        }
    }))
}

/// The answer that `work` gives on a thread of its own, with at most `memory` bytes and without a limit of time. `what` names it.
///
/// # Errors
/// As [`each_within`].
pub fn memory_within<Answer: Send + 'static>(
    what: &str,
    memory: usize,
    work: impl FnOnce() -> Answer + Send + 'static,
) -> Result<Answer, Limit> {
    let answer = each_within(what, memory, move || std::iter::once(work()))?.next();
    answer.unwrap_or_else(|| Err(panicked(None)))
}

/// Refuses work while too many threads are left that were given up.
fn check_given_up() -> Result<(), Limit> {
    match GIVEN_UP.load(Ordering::Relaxed) {
        count if count >= MOST_GIVEN_UP => Err(Limit::GivenUp(count)),
        _ => Ok(()),
    }
}

/// Gives work to the worker of its kind that waits, or to a new one.
fn assign(what: &'static str, work: Work) -> Result<Worker, Limit> {
    let waiting = idle().iter_mut().find_map(|place| place.take_if(|worker| worker.what == what));
    let left = match waiting {
        Some(worker) => match worker.works.send(work) {
            Ok(()) => return Ok(worker),
            // It has ended.
            Err(mpsc::SendError(work)) => work,
        },
        None => work,
    };
    let (works, assigned) = mpsc::channel::<Work>();
    start(what, move || assigned.into_iter().for_each(|work| work()))?;
    let _ = works.send(left);
    Ok(Worker { what, works })
}

/// Lets a worker whose work is done wait for the next, unless another one of its kind waits.
fn keep(worker: Worker) {
    let mut idle = idle();
    let waits = idle.iter().flatten().any(|other| other.what == worker.what);
    if let Some(place) = idle.iter_mut().find(|place| !waits && place.is_none()) {
        *place = Some(worker);
    }
}

fn idle() -> MutexGuard<'static, Places> {
    IDLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The folder in which the system tells of this thread.
fn folder_of_this_thread() -> Option<PathBuf> {
    std::fs::read_link("/proc/thread-self").ok().map(|name| Path::new("/proc").join(name))
}

/// Starts a thread for the work that `what` names.
fn start(what: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, Limit> {
    let thread = std::thread::Builder::new().name(format!("{THREAD}{what}")).stack_size(STACK);
    thread.spawn(work).map_err(Limit::Thread)
}

/// Lets this thread take `memory` bytes from now on. It says so when it takes more, and is never given them.
fn limit_this_thread(memory: usize) {
    host_memory::limit_thread(memory, || {
        let _ = TAKES_TOO_MUCH.try_with(|tell| tell.try_borrow().map(|tell| tell.as_ref().map(|tell| tell())));
        wait()
    });
}

/// What a thread said when it panicked.
fn panicked(panic: Option<Box<dyn Any + Send>>) -> Limit {
    let text = panic
        .as_ref()
        .and_then(|panic| panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied()));
    Limit::Panic(text.unwrap_or("without a message").to_owned())
}

/// Counts a thread that has reached a limit, unless it has ended meanwhile.
fn give_up(ended: &AtomicBool, limit: Limit) -> Limit {
    GIVEN_UP.fetch_add(1, Ordering::AcqRel);
    if ended.swap(true, Ordering::AcqRel) {
        GIVEN_UP.fetch_sub(1, Ordering::AcqRel);
    }
    limit
}

/// Says at the end of a work, after a panic too, that it has ended. Its thread, if it was given up, does not count any more.
struct AtEnd(Arc<AtomicBool>);

impl Drop for AtEnd {
    fn drop(&mut self) {
        if self.0.swap(true, Ordering::AcqRel) {
            GIVEN_UP.fetch_sub(1, Ordering::AcqRel);
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    const MEMORY: usize = 1 << 20;

    #[test]
    fn a_thread_does_one_work_after_another_until_one_panics() {
        let thread = || within("a test of threads", MEMORY, || std::thread::current().id());
        let first = thread().unwrap();
        for _ in 0..100 {
            assert_eq!(thread().unwrap(), first);
        }
        let panicked = within::<()>("a test of threads", MEMORY, || panic!("no answer"));
        assert!(matches!(panicked, Err(Limit::Panic(text)) if text == "no answer"));
        assert_ne!(thread().unwrap(), first);
    }

    /// The time of a thread's earlier works does not count.
    #[test]
    fn each_work_has_its_own_time() {
        // Where the system does not tell the time of a thread, there is no limit of it.
        let spin = || {
            let time = || folder_of_this_thread().and_then(|folder| processor_time(&folder)).unwrap_or(Duration::MAX);
            let end = time().saturating_add(Duration::from_millis(800));
            while time() < end {}
            std::thread::current().id()
        };
        let threads: HashSet<_> = (0..3).map(|_| within("a test of time", MEMORY, spin).unwrap()).collect();
        assert_eq!(threads.len(), 1);
    }
}
