//! What happens when the host has no more memory, or a thread takes more than it may. Rust aborts a program to which the host
//! refuses memory. A program that allocates with [`Allocator`] ends as it has chosen with [`on_exhausted`], and
//! [`limit_thread`] says what happens to a thread that takes too much.
//!
//! It has nothing to do with kernels, and is here because an allocator is unsafe code, all of which is in this crate.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

/// Gives memory of the system.
#[derive(Debug)]
pub struct Allocator;

/// Lets `end` end the program when the host refuses memory. It gets the number of bytes that were asked for. If there is no
/// memory for what it does, the program ends by an abort.
pub fn on_exhausted(end: fn(usize) -> !) {
    // Only the first call counts, so that nobody can take it back.
    let _ = END.set(end);
}

/// Asks for memory that may be refused: `ask` gets the refusal, and the program goes on.
pub fn may_be_refused<Answer>(ask: impl FnOnce() -> Answer) -> Answer {
    let before = MAY_BE_REFUSED.replace(true);
    let answer = ask();
    MAY_BE_REFUSED.set(before);
    answer
}

/// Lets this thread take at most `bytes` more than it gives back, whoever took that. At a request for more the limit is lifted,
/// and `exceeded` is called; the request is never answered. It works only in a program that allocates with [`Allocator`].
pub fn limit_thread(bytes: usize, exceeded: fn() -> !) {
    EXCEEDED.set(exceeded);
    LEFT.set(i64::try_from(bytes).unwrap_or(i64::MAX));
}

/// What happens to a thread without a limit, if it takes 2^63 bytes.
fn unlimited() -> ! {
    std::process::abort()
}

static END: OnceLock<fn(usize) -> !> = OnceLock::new();
/// Whether a thread is ending the program.
static ENDING: AtomicBool = AtomicBool::new(false);

thread_local! {
    static MAY_BE_REFUSED: Cell<bool> = const { Cell::new(false) };
    /// Whether it is this thread that is ending the program.
    static ENDS: Cell<bool> = const { Cell::new(false) };
    /// Bytes that this thread may still take.
    static LEFT: Cell<i64> = const { Cell::new(i64::MAX) };
    static EXCEEDED: Cell<fn() -> !> = const { Cell::new(unlimited) };
}

/// Counts bytes that this thread takes, or gives back where they are negative.
fn count(bytes: i64) {
    let left = LEFT.get().saturating_sub(bytes);
    LEFT.set(left);
    if left < 0 {
        // What is called may take memory.
        LEFT.set(i64::MAX);
        let _unwinds = AbortsOnUnwinding;
        EXCEEDED.get()()
    }
}

/// Ends the program if a function panics that the allocator calls.
struct AbortsOnUnwinding;

impl Drop for AbortsOnUnwinding {
    fn drop(&mut self) {
        std::process::abort()
    }
}

/// Looks at what the system gave.
fn checked(given: *mut u8, bytes: usize) -> *mut u8 {
    if given.is_null() && !MAY_BE_REFUSED.get() && !ENDS.get() {
        refused(bytes);
    }
    given
}

/// Ends the program, if it has said how.
#[cold]
fn refused(bytes: usize) {
    let Some(end) = END.get() else { return };
    if ENDING.swap(true, Ordering::AcqRel) {
        // An abort of this thread would come before the end that another one makes.
        loop {
            std::thread::sleep(Duration::from_secs(1));
        }
    }
    ENDS.set(true);
    let _unwinds = AbortsOnUnwinding;
    end(bytes)
}

// SAFETY: every call goes to the system's allocator, with the caller's arguments; what it gives is handed on unchanged. `checked`
// and `count` never unwind: they return, end the program, or never come back. A panic in what they call ends the program.
unsafe impl GlobalAlloc for Allocator {
    // SAFETY: the caller keeps the contract of `GlobalAlloc`.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the system's allocator has the same contract.
        checked(unsafe { System.alloc(layout) }, layout.size())
    }

    // SAFETY: the caller keeps the contract of `GlobalAlloc`.
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the system's allocator has the same contract.
        checked(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    // SAFETY: the caller keeps the contract of `GlobalAlloc`.
    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count(bytes as i64 - layout.size() as i64);
        // SAFETY: the system's allocator has the same contract, and `memory` came from it.
        checked(unsafe { System.realloc(memory, layout, bytes) }, bytes)
    }

    // SAFETY: the caller keeps the contract of `GlobalAlloc`.
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: the system's allocator has the same contract, and `memory` came from it.
        unsafe { System.dealloc(memory, layout) }
    }
}
