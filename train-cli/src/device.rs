//! Runs a job on the backend of the chosen device. One binary holds three backends. A job is written once over
//! `B: Nvfp4Kernels + DeviceServices`. This file says which types these are; [`crate::ahead`] uses the one of CUDA for a device
//! that only records kernels.

use crate::{
    CliError, kernel_cache, report,
    settings::{DeviceChoice, defaults::compute_dtype},
};
use backend_nvfp4::{DeviceServices, Nvfp4Error, Nvfp4Kernels, Precision};
use burn::backend::NdArray;
use burn_cubecl::{CubeBackend, CubeRuntime};
use cubecl::{
    config::{CubeClRuntimeConfig, RuntimeConfig, cache::CacheConfig, memory::PersistentMemory},
    wgpu::{WgpuDevice, WgpuRuntime},
};
use cudarc::driver::CudaContext;
use kernels_cubecl::{
    any_cuda::{AnyCudaDevice, AnyCudaRuntime},
    compile_ahead, vulkan,
};
use model_qwen3::{ModelError, limits};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Mutex, OnceLock, PoisonError},
};

/// The backend of CUDA devices.
pub type CudaBackend = CubeBackend<AnyCudaRuntime, f32, i32, u8>;

/// Work that runs on any backend.
pub trait Job {
    /// The job's result.
    type Output;

    /// What helps if there is not enough memory for it.
    fn remedy(&self) -> &'static str {
        END_OTHERS
    }

    /// Runs on `device`, which computes in `precision`.
    ///
    /// # Errors
    /// If the job fails.
    fn run<B: Nvfp4Kernels + DeviceServices>(
        self,
        device: B::Device,
        precision: Precision,
    ) -> Result<Self::Output, CliError>;
}

/// The device that a choice means on this machine: `auto` is CUDA where there is a card, and else the CPU.
pub fn resolved(choice: DeviceChoice) -> DeviceChoice {
    match choice {
        DeviceChoice::Auto if probe::<AnyCudaRuntime>(&AnyCudaDevice::Gpu(0)).is_ok() => DeviceChoice::Cuda(0),
        DeviceChoice::Auto => DeviceChoice::Cpu,
        chosen => chosen,
    }
}

/// The number format that a device computes in: `asked`, or without it the default of its kind. The device is not opened.
pub fn precision(choice: DeviceChoice, asked: Option<Precision>) -> Precision {
    asked.unwrap_or_else(|| compute_dtype(matches!(choice, DeviceChoice::Cuda(_))))
}

/// Refuses a number format that a kind of device never computes in.
///
/// # Errors
/// If this one does not.
pub fn check_precision(choice: DeviceChoice, precision: Precision) -> Result<(), CliError> {
    match choice {
        DeviceChoice::Cpu | DeviceChoice::Auto if precision != Precision::F32 => {
            Err(unsupported("cpu", precision, "the CPU computes in f32; use f32 or auto"))
        }
        DeviceChoice::Vulkan if precision == Precision::Tf32 => {
            Err(unsupported("vulkan", precision, "only CUDA has TF32; use f32"))
        }
        _ => Ok(()),
    }
}

/// Refuses the CPU for `bench`.
///
/// # Errors
/// If the choice means the CPU on this machine.
pub fn check_gpu(choice: DeviceChoice) -> Result<(), CliError> {
    if resolved(choice) != DeviceChoice::Cpu {
        return Ok(());
    }
    let reason =
        "bench measures GPUs, not the CPU; give --device cuda or vulkan (train-cli doctor says what is missing)";
    Err(CliError::Device { device: choice.to_string(), reason: reason.to_owned() })
}

/// Whether a device can be opened on this machine.
pub fn is_there(choice: DeviceChoice) -> bool {
    match choice {
        DeviceChoice::Cpu | DeviceChoice::Auto => true,
        DeviceChoice::Cuda(index) => probe::<AnyCudaRuntime>(&AnyCudaDevice::Gpu(index)).is_ok(),
        DeviceChoice::Vulkan => probe::<WgpuRuntime>(&WgpuDevice::DefaultDevice).is_ok(),
    }
}

/// Bytes that are free on a GPU, as its driver says; None if it does not say, and for the CPU.
pub fn free(choice: DeviceChoice) -> Option<u64> {
    match choice {
        DeviceChoice::Cuda(index) => cuda_memory(index).map(|(free, _total)| free as u64),
        DeviceChoice::Vulkan => vulkan_adapter()?.free(),
        DeviceChoice::Cpu | DeviceChoice::Auto => None,
    }
}

/// Bytes that all programs together use on a CUDA device, as its driver says; None for others.
pub fn in_use(choice: DeviceChoice) -> Option<u64> {
    let DeviceChoice::Cuda(index) = resolved(choice) else { return None };
    cuda_memory(index).map(|(free, total)| (total - free) as u64)
}

/// Bytes that are free on a CUDA device, and bytes that it has.
fn cuda_memory(index: usize) -> Option<(usize, usize)> {
    quietly(|| CudaContext::new(index).and_then(|context| context.mem_get_info()).ok()).flatten()
}

/// The adapter that `--device vulkan` takes; None if there is none, or if it is not known which.
pub fn vulkan_adapter() -> Option<&'static vulkan::Adapter> {
    quietly(vulkan::default_adapter).flatten()
}

/// Runs a job on the chosen device and prints which one it is. `asked` is the number format that the user chose.
///
/// # Errors
/// If the device is missing or cannot compute in `precision`, or the job fails.
pub fn run<J: Job>(choice: DeviceChoice, asked: Option<Precision>, job: J) -> Result<J::Output, CliError> {
    let choice = resolved(choice);
    let precision = precision(choice, asked);
    check_precision(choice, precision)?;
    let remedy = job.remedy();
    *REMEDY.lock().unwrap_or_else(PoisonError::into_inner) = remedy;
    let ran = match choice {
        DeviceChoice::Cpu | DeviceChoice::Auto => {
            report::chosen_device("cpu", precision);
            job.run::<NdArray>(Default::default(), precision)
        }
        DeviceChoice::Cuda(index) => {
            on_cube::<AnyCudaRuntime, J>(&choice.to_string(), AnyCudaDevice::Gpu(index), precision, job)
        }
        DeviceChoice::Vulkan => on_cube::<WgpuRuntime, J>("vulkan", WgpuDevice::DefaultDevice, precision, job),
    };
    ran.map_err(|error| match named(error) {
        CliError::OutOfMemory { reason, .. } => CliError::OutOfMemory { reason, free: free(choice), remedy },
        error => error,
    })
}

/// The remedy of the last job that was begun.
static REMEDY: Mutex<&str> = Mutex::new(END_OTHERS);
/// What helps any job.
const END_OTHERS: &str = "end other programs that use it";

/// What helps the job that runs, if there is not enough memory for it.
pub fn remedy() -> &'static str {
    *REMEDY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Unit tests of this crate run no job on a GPU, and the code for GPUs is most of what there is to compile.
#[cfg(test)]
fn on_cube<R: CubeRuntime, J: Job>(
    name: &str,
    _: R::Device,
    precision: Precision,
    _: J,
) -> Result<J::Output, CliError> {
    Err(unsupported(name, precision, "unit tests run on the CPU"))
}

#[cfg(not(test))]
fn on_cube<R: CubeRuntime, J: Job>(
    name: &str,
    device: R::Device,
    precision: Precision,
    job: J,
) -> Result<J::Output, CliError> {
    probe::<R>(&device).map_err(|reason| CliError::Device { device: name.to_owned(), reason })?;
    use burn::tensor::{DType, backend::Backend};
    type B<R> = CubeBackend<R, f32, i32, u8>;
    if precision.dtype() != DType::F32 && !B::<R>::supports_dtype(&device, precision.dtype()) {
        return Err(unsupported(name, precision, "the device does not have this type; use --compute-dtype f32"));
    }
    report::chosen_device(name, precision);
    let result = catch_unwind(AssertUnwindSafe(|| job.run::<B<R>>(device, precision)));
    // A failed device is the cause of whatever error or panic followed, and makes a result that seems good worthless.
    check()?;
    result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn unsupported(device: &str, precision: Precision, reason: &str) -> CliError {
    let reason = format!("--compute-dtype {}: {reason}", precision.name());
    CliError::Usage(format!("device {device}: {reason}"))
}

/// Opens the device once. Without a driver the runtimes panic on threads of their own.
fn probe<R: CubeRuntime>(device: &R::Device) -> Result<(), String> {
    match quietly(|| R::client(device).memory_usage().map(|_| ()).map_err(|e| format!("{e:?}"))) {
        Some(Ok(())) => Ok(()),
        Some(Err(e)) => Err(format!("not usable: {e}")),
        None => Err("not found; check that its driver is installed, or use --device auto".into()),
    }
}

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

/// An allocation on the device failed. [`run`] adds what is known besides.
fn out_of_memory(reason: &str) -> CliError {
    CliError::OutOfMemory { reason: reason.to_owned(), free: None, remedy: END_OTHERS }
}

/// An error of a device that is one of memory gets that name: a kernel that is loaded when no memory is free ends so. Others say
/// what is to be done.
fn named(error: CliError) -> CliError {
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
fn watch_devices() {
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

/// Configures CubeCL for this process. It must run before a device is opened. Memory pools have buffers of exact sizes
/// instead of pages of a quarter of the card, and one pool serves all threads. Compiled kernels are kept on disk (see
/// [`kernel_cache`]).
pub fn configure() {
    watch_devices();
    let mut config = CubeClRuntimeConfig::default();
    config.memory.persistent_memory = PersistentMemory::Enforced;
    config.streaming.max_streams = 1;
    config.compilation.cache = kernel_cache::directory().map(CacheConfig::File);
    CubeClRuntimeConfig::set(config);
}

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
