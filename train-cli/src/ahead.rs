//! Kernels that are compiled before they are needed, on all processors. A job rehearses the work on a device that only records
//! which kernels it launches; those that are written in CUDA C++ are then compiled while the program goes on, for example while
//! a model is loaded.

use crate::{
    CliError,
    device::{COMPILING, Job, quietly},
    report,
    settings::DeviceChoice,
};
use backend_nvfp4::Precision;
use burn_cubecl::CubeBackend;
use cubecl::{
    Runtime,
    config::{CubeClRuntimeConfig, RuntimeConfig},
    cuda::{CudaDevice, CudaRuntime},
};
use cudarc::driver::CudaContext;
use kernels_cubecl::{
    compile_ahead::compile_ahead,
    cuda_source::{Launch, SourceDevice, SourceRuntime},
    hopper,
};
use std::{
    thread::{self, JoinHandle},
    time::Instant,
};

/// Work that launches the kernels that are needed soon.
pub trait Rehearsal: Job<Output = ()> {
    /// The GPUs that have kernels in CUDA C++ for this work.
    const ON: Gpus;
}

/// Kinds of GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gpus {
    /// Those that CUDA knows.
    All,
    /// Those with Hopper's matrix instructions.
    Hopper,
}

/// Kernels that are being compiled.
#[must_use = "they are needed only after `finish`"]
pub struct Ahead {
    begun: Instant,
    /// `None` if there is nothing to compile.
    thread: Option<JoinHandle<Result<usize, CliError>>>,
}

impl Ahead {
    /// Begins to compile the kernels in CUDA C++ that `rehearsal` launches. Only a GPU whose compiled kernels are kept on disk can
    /// be helped; a rehearsal that fails leaves each kernel to its first launch.
    pub fn compile<J: Rehearsal>(choice: DeviceChoice, precision: Precision, rehearsal: J) -> Self {
        let begun = Instant::now();
        let thread = match quietly(|| begin(choice, precision, rehearsal)) {
            Some(Ok(thread)) => thread,
            Some(Err(error)) => {
                warn(&error.to_string());
                None
            }
            None => {
                warn("the rehearsal panicked");
                None
            }
        };
        Self { begun, thread }
    }

    /// Waits until they are compiled, and says how many there were.
    pub fn finish(self) {
        let Self { begun, thread } = self;
        match thread.map(JoinHandle::join) {
            None | Some(Ok(Ok(0))) => {}
            Some(Ok(Ok(count))) => {
                let seconds = begun.elapsed().as_secs_f64();
                report::label("kernels", format!("{count} compiled ahead in {seconds:.1} s"));
            }
            Some(Ok(Err(error))) => warn(&error.to_string()),
            Some(Err(_)) => warn("NVRTC or the directory of compiled kernels cannot be used"),
        }
    }
}

fn warn(reason: &str) {
    report::line(format!("warning: kernels are compiled one by one, as they are needed: {reason}"));
}

/// Rehearses, and starts the thread that compiles.
fn begin<J: Rehearsal>(
    choice: DeviceChoice,
    precision: Precision,
    rehearsal: J,
) -> Result<Option<JoinHandle<Result<usize, CliError>>>, CliError> {
    let (DeviceChoice::Cuda(index), Some(cache)) = (choice, &CubeClRuntimeConfig::get().compilation.cache) else {
        return Ok(None);
    };
    let failed = move |reason: String| CliError::Device { device: format!("cuda:{index}"), reason };
    let (major, minor) = CudaContext::new(index)
        .and_then(|context| context.compute_capability())
        .map_err(|error| failed(error.to_string()))?;
    let arch = (10 * major + minor) as u32;
    let client = CudaRuntime::client(&CudaDevice { index });
    // Kernels in CUDA C++ compute in 16 bits.
    if precision.dtype().size() != 2 || J::ON == Gpus::Hopper && !hopper::is_hopper(&client) {
        return Ok(None);
    }
    let properties = client.properties().clone();
    let launches = rehearsed(SourceDevice::rehearsing(arch, properties), precision, rehearsal)?;
    let folder = cache.root();
    let compile = move || compile_ahead(&launches, arch, &folder).map_err(|error| failed(error.to_string()));
    let started = thread::Builder::new().name(COMPILING.to_owned()).spawn(compile);
    started.map(Some).map_err(CliError::no_thread("compiling kernels"))
}

/// The kernels that a job launches on a device that only records them.
///
/// # Errors
/// If the job fails.
pub fn rehearsed<J: Job>(device: SourceDevice, precision: Precision, job: J) -> Result<Vec<Launch>, CliError> {
    let done = job.run::<CubeBackend<SourceRuntime, f32, i32, u8>>(device.clone(), precision);
    let client = SourceRuntime::client(&device);
    let synced = cubecl::future::block_on(client.sync());
    client.memory_cleanup();
    let launches = device.take_launches();
    device.give_back();
    done?;
    synced.map_err(|error| CliError::Device { device: "for the rehearsal".into(), reason: format!("{error:?}") })?;
    Ok(launches)
}
