//! Runs a job on the backend of the chosen device. One binary holds three backends. A job is written once over
//! `B: Nvfp4Kernels + DeviceServices`. This file says which types these are; [`crate::ahead`] uses the one of CUDA for a device
//! that only records kernels.

use crate::{
    CliError,
    device_failure::{self, END_OTHERS, quietly},
    kernel_cache, nvrtc, report,
    settings::{DeviceChoice, defaults::compute_dtype},
};
use backend_nvfp4::{DeviceServices, Nvfp4Kernels, Precision};
use burn::backend::NdArray;
use burn_cubecl::{CubeBackend, CubeRuntime};
use cubecl::{
    config::{CubeClRuntimeConfig, RuntimeConfig, cache::CacheConfig, memory::PersistentMemory},
    wgpu::{WgpuDevice, WgpuRuntime},
};
use cudarc::driver::CudaContext;
use kernels_cubecl::{
    any_cuda::{AnyCudaDevice, AnyCudaRuntime},
    vulkan,
};
use std::sync::{Mutex, PoisonError};

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
            if is_there(choice) {
                check_compiler(choice)?;
            }
            on_cube::<AnyCudaRuntime, J>(&choice.to_string(), AnyCudaDevice::Gpu(index), precision, job)
        }
        DeviceChoice::Vulkan => on_cube::<WgpuRuntime, J>("vulkan", WgpuDevice::DefaultDevice, precision, job),
    };
    ran.map_err(|error| match device_failure::named(error) {
        CliError::OutOfMemory { reason, .. } => CliError::OutOfMemory { reason, free: free(choice), remedy },
        error => error,
    })
}

/// Refuses a card whose kernels would have to be compiled, where that is not possible.
fn check_compiler(choice: DeviceChoice) -> Result<(), CliError> {
    if kernel_cache::has_kernels() {
        return Ok(());
    }
    nvrtc::missing().map_or(Ok(()), |wrong| {
        let reason = format!("kernels cannot be compiled: {wrong}; {}", nvrtc::INSTALL);
        Err(CliError::Device { device: choice.to_string(), reason })
    })
}

/// The remedy of the last job that was begun.
static REMEDY: Mutex<&str> = Mutex::new(END_OTHERS);
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
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| job.run::<B<R>>(device, precision)));
    // A failed device is the cause of whatever error or panic followed, and makes a result that seems good worthless.
    device_failure::check()?;
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

/// Configures CubeCL for this process. It must run before a device is opened. Memory pools have buffers of exact sizes
/// instead of pages of a quarter of the card, and one pool serves all threads. Compiled kernels are kept on disk (see
/// [`kernel_cache`]).
pub fn configure() {
    device_failure::watch();
    let mut config = CubeClRuntimeConfig::default();
    config.memory.persistent_memory = PersistentMemory::Enforced;
    config.streaming.max_streams = 1;
    config.compilation.cache = kernel_cache::directory().map(CacheConfig::File);
    CubeClRuntimeConfig::set(config);
}
