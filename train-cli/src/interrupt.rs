//! SIGINT (Ctrl-C), SIGTERM and SIGHUP while a run trains or a server answers: the first one is noted, so that the run can
//! finish its step and save, and the server its answers; a second one ends the process at once. SIGUSR1 asks a run to
//! save a checkpoint and to continue. SIGXFSZ, which a write beyond the limit on file sizes raises, ends no process.

use signal_hook::{
    consts::{SIGINT, SIGTERM},
    flag,
};
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

/// A signal that asks the program to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signal(i32);

impl Signal {
    /// What Ctrl-C sends.
    pub const CTRL_C: Self = Self(SIGINT);

    /// The name of the signal.
    pub fn name(self) -> &'static str {
        match self.0 {
            SIGINT => "SIGINT",
            SIGTERM => "SIGTERM",
            _ => "SIGHUP",
        }
    }

    /// The exit code of a program that ends because of it: 128 and its number.
    pub fn exit_code(self) -> u8 {
        128 + self.0 as u8
    }
}

/// Waits for signals until it is dropped. From then on a signal ends the process.
#[derive(Debug)]
pub struct Interruption {
    number: Arc<AtomicUsize>,
    ends_at_once: Arc<AtomicBool>,
}

impl Interruption {
    /// Waits for signals from now on.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn listen() -> std::io::Result<Self> {
        let (number, ends_at_once) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        for signal in SIGNALS.into_iter().filter(|signal| *signal != HANGUP || !ignores_hangup()) {
            // The actions of a signal run in this order: only a second signal finds the flag set.
            flag::register_conditional_default(signal, ends_at_once.clone())
                .and_then(|_| flag::register(signal, ends_at_once.clone()))
                .and_then(|_| flag::register_usize(signal, number.clone(), signal as usize))?;
        }
        Ok(Self { number, ends_at_once })
    }

    /// The signal that has arrived, if one has.
    pub fn received(&self) -> Option<Signal> {
        let number = self.number.load(Ordering::Relaxed);
        (number > 0).then_some(Signal(number as i32))
    }
}

impl Drop for Interruption {
    fn drop(&mut self) {
        self.ends_at_once.store(true, Ordering::Relaxed);
    }
}

/// Lets a write beyond the limit on the sizes of files (`ulimit -f`) be an error, as any other write that fails. Without a handler
/// of SIGXFSZ, it would end the process without a word.
///
/// # Errors
/// If the system refuses.
pub fn fail_writes_beyond_the_limit() -> std::io::Result<()> {
    // Nobody asks for the flag: the write itself fails.
    #[cfg(unix)]
    flag::register(signal_hook::consts::SIGXFSZ, Arc::new(AtomicBool::new(false)))?;
    Ok(())
}

/// Requests for a checkpoint, each made by a signal SIGUSR1. Windows has no such signal, and there are no requests.
#[derive(Debug, Clone, Default)]
pub struct SaveRequests(Arc<AtomicBool>);

impl SaveRequests {
    /// Waits for the signal from now on, to the end of the process.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn listen() -> std::io::Result<Self> {
        let requests = Self::default();
        #[cfg(unix)]
        flag::register(signal_hook::consts::SIGUSR1, requests.0.clone())?;
        Ok(requests)
    }

    /// Whether a checkpoint was asked for since the last call.
    pub fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

/// Ctrl-C (SIGINT) ends an answer while one is made, and the program at any other time.
#[derive(Debug)]
pub struct CtrlC {
    pressed: Arc<AtomicBool>,
    ends_program: Arc<AtomicBool>,
}

impl CtrlC {
    /// Waits for the signal from now on.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn new() -> std::io::Result<Self> {
        let (pressed, ends_program) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(true)));
        flag::register_conditional_default(SIGINT, ends_program.clone())?;
        flag::register(SIGINT, pressed.clone())?;
        Ok(Self { pressed, ends_program })
    }

    /// Does work that may ask whether Ctrl-C was pressed meanwhile.
    pub fn during<T>(&self, work: impl FnOnce(&dyn Fn() -> bool) -> T) -> T {
        self.pressed.store(false, Ordering::Relaxed);
        self.ends_program.store(false, Ordering::Relaxed);
        let done = work(&|| self.pressed.load(Ordering::Relaxed));
        self.ends_program.store(true, Ordering::Relaxed);
        done
    }
}

/// Whether the program was started so that a closed terminal does not end it: `nohup` lets it ignore SIGHUP. (Shells let what
/// runs in the background ignore SIGINT, but a run that somebody interrupts all the same is to be saved.)
#[cfg(target_os = "linux")]
fn ignores_hangup() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    ignored >> (HANGUP - 1) & 1 == 1
}

/// Other systems do not say what a process ignores.
#[cfg(not(target_os = "linux"))]
fn ignores_hangup() -> bool {
    false
}

#[cfg(unix)]
const HANGUP: i32 = signal_hook::consts::SIGHUP;
/// No signal has this number: Windows knows none for a closed terminal.
#[cfg(not(unix))]
const HANGUP: i32 = 0;

#[cfg(unix)]
const SIGNALS: [i32; 3] = [SIGINT, SIGTERM, HANGUP];
#[cfg(not(unix))]
const SIGNALS: [i32; 2] = [SIGINT, SIGTERM];

#[cfg(test)]
mod tests {
    #[cfg(unix)]
    #[test]
    fn a_signal_asks_for_one_checkpoint() {
        let requests = super::SaveRequests::listen().unwrap();
        assert!(!requests.take());
        for _ in 0..2 {
            signal_hook::low_level::raise(signal_hook::consts::SIGUSR1).unwrap();
        }
        assert!(requests.take() && !requests.take());
    }
}
