//! Kernels that are compiled before they are needed, on all processors. A job rehearses the work on a device that only records
//! which kernels it launches. They are then compiled on threads, and the program does other work meanwhile, for example loads a
//! model.

use crate::{
    CliError,
    device::{CudaBackend, Job},
    device_failure::quietly,
    progress::{self, Line},
    report,
    settings::DeviceChoice,
};
use backend_nvfp4::Precision;
use cubecl::{
    Runtime,
    config::{CubeClRuntimeConfig, RuntimeConfig},
    cuda::install,
};
use cudarc::driver::CudaContext;
use kernels_cubecl::{
    any_cuda::{AnyCudaDevice, AnyCudaRuntime},
    block_scaled,
    compile_ahead::{KernelCache, THREAD, compile_ahead},
    cuda_source::{Launch, OnLaunch, SourceDevice},
};
use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Instant,
};

/// Kernels that are being compiled. Dropping this begins no further kernel and waits for those in progress: the program must not
/// end while a library compiles.
#[derive(Default)]
pub struct Ahead {
    stop: Arc<AtomicBool>,
    /// Whether the program does nothing else meanwhile, so that a terminal shows how many kernels are compiled.
    waits: Arc<AtomicBool>,
    /// `None` if there is nothing to compile.
    thread: Option<JoinHandle<Result<Compiled, CliError>>>,
}

/// What was compiled.
struct Compiled {
    count: usize,
    seconds: f64,
}

impl Ahead {
    /// Begins to compile the kernels that `rehearsal` launches. Only a CUDA GPU whose compiled kernels are kept on disk can be
    /// helped; a rehearsal that fails leaves each kernel to its first launch.
    pub fn compile<J: Job<Output = ()>>(choice: DeviceChoice, precision: Precision, rehearsal: J) -> Self {
        match quietly(|| begin(choice, precision, rehearsal)) {
            Some(Ok(ahead)) => ahead,
            // The work itself will say what is wrong with a model.
            Some(Err(CliError::Model(_))) => Self::default(),
            Some(Err(error)) => Self::failed(&error.to_string()),
            None => Self::failed("the rehearsal panicked"),
        }
    }

    fn failed(reason: &str) -> Self {
        warn(reason);
        Self::default()
    }

    /// Waits until they are compiled, and says how many there were. A terminal shows meanwhile how many are done.
    pub fn finish(mut self) {
        self.waits.store(true, Ordering::Relaxed);
        let line = self.thread.as_ref().map(|_| Line::of("compiling kernels"));
        let ended = self.thread.take().map(JoinHandle::join);
        drop(line);
        match ended {
            None | Some(Ok(Ok(Compiled { count: 0, .. }))) => {}
            Some(Ok(Ok(Compiled { count, seconds }))) => {
                report::label("kernels", format!("{count} compiled ahead in {seconds:.1} s"));
            }
            Some(Ok(Err(error))) => warn(&error.to_string()),
            Some(Err(_)) => warn("NVRTC or the directory of compiled kernels cannot be used"),
        }
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // What it would say is of no use any more.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// How many kernels are compiled, in words.
fn counted(done: usize, all: usize) -> String {
    format!("compiled {done} of {}", report::count(all, "kernel"))
}

fn warn(reason: &str) {
    report::line(format!("warning: kernels are compiled one by one, as they are needed: {reason}"));
}

/// Rehearses, and starts the thread that compiles.
fn begin<J: Job<Output = ()>>(choice: DeviceChoice, precision: Precision, rehearsal: J) -> Result<Ahead, CliError> {
    let (DeviceChoice::Cuda(index), Some(cache)) = (choice, &CubeClRuntimeConfig::get().compilation.cache) else {
        return Ok(Ahead::default());
    };
    let begun = Instant::now();
    let failed = move |reason: String| CliError::Device { device: format!("cuda:{index}"), reason };
    let (major, minor) = CudaContext::new(index)
        .and_then(|context| context.compute_capability())
        .map_err(|error| failed(error.to_string()))?;
    let arch = (10 * major + minor) as u32;
    let client = AnyCudaRuntime::client(&AnyCudaDevice::Gpu(index));
    // A process asks once whether NVFP4 tensor cores are right, and a device that computes nothing would say no.
    block_scaled::trusted(&client);
    let properties = Box::new(client.properties().clone());
    let cache = Arc::new(Mutex::new(KernelCache::open(&cache.root())));
    let asked = cache.clone();
    let is_compiled = Box::new(move |key| asked.lock().unwrap_or_else(PoisonError::into_inner).has(key));
    let device = SourceDevice::new(arch, OnLaunch::Rehearse { properties, is_compiled });
    let launches = rehearsed(device, precision, rehearsal)?;
    let (stop, waits) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
    let (stopped, waited) = (stop.clone(), waits.clone());
    let told = move |done, all| {
        // While the program loads a model, the terminal's line is about that.
        if waited.load(Ordering::Relaxed) {
            progress::doing(&counted(done, all));
        }
    };
    let compile = move || {
        let mut cache = cache.lock().unwrap_or_else(PoisonError::into_inner);
        let headers = install::cuda_path();
        let count = compile_ahead(&launches, arch, headers.as_deref(), &mut cache, &stopped, &told)
            .map_err(|error| failed(error.to_string()))?;
        Ok(Compiled { count, seconds: begun.elapsed().as_secs_f64() })
    };
    let thread = thread::Builder::new().name(THREAD.to_owned()).spawn(compile);
    Ok(Ahead { stop, waits, thread: Some(thread.map_err(CliError::no_thread("compiling kernels"))?) })
}

/// The kernels that a job launches on a device that only records them.
///
/// # Errors
/// If the job fails.
pub fn rehearsed<J: Job>(device: SourceDevice, precision: Precision, job: J) -> Result<Vec<Launch>, CliError> {
    let device = GivenBack(device);
    let source = AnyCudaDevice::Source(device.0.clone());
    let client = AnyCudaRuntime::client(&source);
    let done = job.run::<CudaBackend>(source, precision);
    let synced = cubecl::future::block_on(client.sync());
    client.memory_cleanup();
    let launches = device.0.take_launches();
    drop(device);
    done?;
    synced.map_err(|error| CliError::Device { device: "for the rehearsal".into(), reason: format!("{error:?}") })?;
    Ok(launches)
}

/// A device that is given back however its job ends.
struct GivenBack(SourceDevice);

impl Drop for GivenBack {
    fn drop(&mut self) {
        self.0.give_back();
    }
}

#[cfg(test)]
mod tests {
    use super::counted;

    #[test]
    fn a_terminal_shows_how_many_kernels_are_compiled() {
        assert_eq!(counted(12, 59), "compiled 12 of 59 kernels");
        assert_eq!(counted(0, 1), "compiled 0 of 1 kernel");
    }
}
