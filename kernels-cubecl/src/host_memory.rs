//! The end of the host's memory. Rust ends a program by an abort where the host gives it no more memory. A program that
//! allocates with [`Allocator`] says by [`on_exhausted`] how it ends instead.
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

static END: OnceLock<fn(usize) -> !> = OnceLock::new();
/// Whether a thread is ending the program.
static ENDING: AtomicBool = AtomicBool::new(false);

thread_local! {
    static MAY_BE_REFUSED: Cell<bool> = const { Cell::new(false) };
    /// Whether it is this thread that is ending the program.
    static ENDS: Cell<bool> = const { Cell::new(false) };
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
    end(bytes)
}

// SAFETY: every call is the system's allocator's, with the caller's arguments; what it gives is handed on unchanged. `checked`
// never unwinds: it returns, or ends the program.
unsafe impl GlobalAlloc for Allocator {
    // SAFETY: the caller keeps the contract of `GlobalAlloc`.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the contract is the system's too.
        checked(unsafe { System.alloc(layout) }, layout.size())
    }

    // SAFETY: the caller keeps the contract of `GlobalAlloc`.
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the contract is the system's too.
        checked(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    // SAFETY: the caller keeps the contract of `GlobalAlloc`.
    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: the contract is the system's too, and `memory` came from it.
        checked(unsafe { System.realloc(memory, layout, bytes) }, bytes)
    }

    // SAFETY: the caller keeps the contract of `GlobalAlloc`.
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the contract is the system's too, and `memory` came from it.
        unsafe { System.dealloc(memory, layout) }
    }
}
