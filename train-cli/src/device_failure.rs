//! Failures of a device. CubeCL reports them by panics on threads of its own, or by errors that are known by their words only. Here
//! they get the error and the exit code that they mean.

use crate::CliError;
use backend_nvfp4::Nvfp4Error;
use kernels_cubecl::compile_ahead;
use model_qwen3::{ModelError, limits};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::OnceLock,
};

/// What helps any job.
pub(crate) const END_OTHERS: &str = "end other programs that use it";

/// Asks a driver that panics where it is not installed: None if it does. The panic is not printed.
pub fn quietly<T>(ask: impl FnOnce() -> T) -> Option<T> {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let answer = catch_unwind(AssertUnwindSafe(ask));
    std::panic::set_hook(hook);
    answer.ok()
}

/// The first failure of a device in this process, if there was one: CubeCL's threads panic where an allocation or a launch
/// fails, and later results are meaningless. Burn's Learner panics where the system gives it no thread.
///
/// # Errors
/// If a device has failed, or a library got no thread.
pub fn check() -> Result<(), CliError> {
    FAILURE.get().map_or(Ok(()), |reason| Err(failure(reason)))
}

/// What a panic of a library means.
fn failure(reason: &str) -> CliError {
    // Rust's words about the panic say nothing about the device.
    let reason = reason.rsplit_once("`Err` value: ").map_or(reason, |(_, cause)| cause);
    match reason {
        reason if of_threads(reason) => CliError::no_thread("work of a library")(std::io::Error::other(reason)),
        reason if of_memory(reason) => out_of_memory(reason),
        reason => CliError::DeviceFailed(reason.to_owned()),
    }
}

/// Whether a library has panicked because the system gave it no thread: the words of Rust's standard library, of an error that
/// was unwrapped, of tokio and of rayon.
fn of_threads(reason: &str) -> bool {
    let unwrapped = reason.strip_prefix("called `Result::unwrap()` on an `Err` value: ").unwrap_or(reason);
    reason.starts_with("failed to spawn thread")
        || reason.starts_with("OS can't spawn worker thread")
        || reason.contains("ThreadPoolBuildError")
        || unwrapped.starts_with("Os {") && unwrapped.contains("WouldBlock")
}

/// An allocation on the device failed. [`crate::device::run`] adds what is known besides.
fn out_of_memory(reason: &str) -> CliError {
    CliError::OutOfMemory { reason: reason.to_owned(), free: None, remedy: END_OTHERS }
}

/// An error of a device that is one of memory gets that name: a kernel that is loaded when no memory is free ends so. Others say
/// what is to be done.
pub(crate) fn named(error: CliError) -> CliError {
    match &error {
        CliError::Device { reason, .. }
        | CliError::Model(ModelError::Device(reason) | ModelError::Nvfp4 { source: Nvfp4Error::Device(reason), .. })
            if of_memory(reason) =>
        {
            out_of_memory(cause(reason))
        }
        CliError::Model(ModelError::Device(reason) | ModelError::Nvfp4 { source: Nvfp4Error::Device(reason), .. }) => {
            CliError::DeviceFailed(innermost(reason).to_owned())
        }
        _ => error,
    }
}

/// Whether a device's message is about memory that it has not. It is known by its words only.
fn of_memory(reason: &str) -> bool {
    let lower = reason.to_ascii_lowercase();
    // An illegal address is "memory" too, and no lack of it.
    let lack = [
        "out of memory",
        "out_of_memory",
        "outofmemory",
        "out_of_device_memory",
        "out_of_host_memory",
        "not enough memory",
        "memory allocation",
        "buffertoobig",
        "allocate",
        "memory page",
    ];
    lack.iter().any(|words| lower.contains(words))
}

/// The line of an error of CubeCL that led to the others. It is the last one in front of the call stack.
fn innermost(reason: &str) -> &str {
    let message = reason.split("Backtrace:").next().unwrap_or(reason);
    message.lines().map(str::trim).rfind(|line| !line.is_empty() && *line != "Caused by:").unwrap_or(reason)
}

/// The line of an error of CubeCL that speaks of memory. An error that led to others stands below them, and a call stack
/// may follow.
fn cause(reason: &str) -> &str {
    reason.lines().find(|line| of_memory(line)).unwrap_or(reason).trim()
}

static FAILURE: OnceLock<String> = OnceLock::new();

/// Keeps the message of a panic on a thread of CubeCL, or for want of a thread, for [`check`], and does not print the panics that
/// follow from it. It does not print panics of a chat template, which become errors, nor panics of compiling ahead, which become
/// warnings. Every other panic is printed as always.
pub(crate) fn watch() {
    let printed = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let thread = std::thread::current();
        let name = thread.name().unwrap_or_default();
        let text = panic.payload_as_str().unwrap_or("it panicked").lines().next().unwrap_or_default();
        if name.starts_with(limits::THREAD) || name == compile_ahead::THREAD {
            return;
        }
        if DEVICE_THREADS.iter().any(|start| name.starts_with(start)) || of_threads(text) {
            // Later ones follow from the first.
            let _ = FAILURE.set(text.to_owned());
        } else if FAILURE.get().is_none() {
            printed(panic);
        }
    }));
}

/// How the names of the threads begin in which CubeCL serves a device.
const DEVICE_THREADS: [&str; 2] = ["DSD-", "DSU-"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_cubecl_get_their_exit_codes() {
        // As they were seen on an H200 and an H100.
        let full = "called `Result::unwrap()` on an `Err` value: can't allocate buffer of size: 41943040";
        for (reason, code) in [(full, 4), ("Memory page 0 doesn't exist", 4), ("an illegal address was encountered", 7)]
        {
            assert_eq!(failure(reason).exit_code(), code, "{reason}");
        }
        // What was asked for is a number for people, and so is what is free, where the device tells.
        let CliError::OutOfMemory { reason, remedy, .. } = failure(full) else { panic!("an error of memory") };
        let text = CliError::OutOfMemory { reason, free: Some(3 << 30), remedy }.to_string();
        assert!(text.contains("40 MiB were asked for in one piece, and 3.0 GiB are free now"), "{text}");
    }

    #[test]
    fn a_kernel_that_finds_no_memory_is_an_error_of_memory() {
        let reason = "An error happened during execution\nCaused by:\n  The server is in an invalid state\nCaused by:\n  Unable to load the PTX: \
                      DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")\nBacktrace:\n   0: main";
        let memory = named(ModelError::Device(reason.to_owned()).into());
        assert_eq!(memory.exit_code(), 4);
        let text = memory.to_string();
        assert!(text.starts_with("the device is out of memory (") && text.contains("end other programs"), "{text}");
        assert!(text.contains("Unable to load the PTX") && !text.contains("Backtrace"), "{text}");
        // As it was seen on an H200 when a kernel had failed.
        let reason = "An error happened during execution\nCaused by:\n  An error happened during execution\nCaused by:\n  \
                      DriverError(CUDA_ERROR_LAUNCH_FAILED, \"unspecified launch failure\")\nBacktrace:\nNo backtrace available";
        let failed = named(ModelError::Device(reason.to_owned()).into());
        let text = failed.to_string();
        let cause = "the device failed (DriverError(CUDA_ERROR_LAUNCH_FAILED, \"unspecified launch failure\")); ";
        assert!(failed.exit_code() == 7 && text.starts_with(cause) && text.contains("resume"), "{text}");
        let other = "an illegal memory access was encountered".to_owned();
        assert_eq!(named(CliError::Device { device: "cuda:0".into(), reason: other }).exit_code(), 7);
    }
}
