//! Compiles kernels before a device needs them, on all processors at once. CubeCL compiles a kernel at its first launch, one
//! after another, and each twice: NVRTC compiles the text for the card, and the driver compiles NVRTC's PTX once more.
//! Here NVRTC's machine code goes into CubeCL's cache on disk, under CubeCL's own key:
//! ```text
//! launches recorded by a rehearsal → NVRTC, a thread a processor → the cache → the device
//! ```
//! A device reads what others have written to the cache whenever it adds a kernel of its own. A kernel that no
//! rehearsal has launched is compiled by CubeCL at its first launch.

use crate::{cuda_source::Launch, error::KernelError};
use cubecl_common::{cache::CacheOption, compilation_cache::CompilationCache, hash::StableHash};
use cudarc::nvrtc::{result, sys};
use serde::{Deserialize, Serialize};
use std::{
    ffi::{CString, c_char},
    fmt,
    path::Path,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

/// The name of the threads that compile.
pub const THREAD: &str = "compiling ahead";

/// CubeCL's cache of CUDA kernels on disk.
pub struct KernelCache(CompilationCache<StableHash, CacheEntry>);

impl KernelCache {
    /// Opens the cache in `folder`, which is the one that CubeCL was configured with.
    ///
    /// # Panics
    /// If it cannot be read or made: CubeCL panics there.
    pub fn open(folder: &Path) -> Self {
        Self(CompilationCache::new("ptx", CacheOption::default().name("cuda").root(folder)))
    }

    /// Whether the kernel of this key was in the cache when it was last read or written.
    pub fn has(&self, key: StableHash) -> bool {
        self.0.get(&key).is_some()
    }

    fn insert(&mut self, launch: &Launch, ptx: Vec<c_char>) -> Result<(), KernelError> {
        let entry = CacheEntry { entrypoint_name: launch.entry.clone(), shared_mem_bytes: launch.shared, ptx };
        self.0.insert(launch.key, entry).map_err(|e| failed("the cache of kernels", &format!("{e:?}")))
    }
}

impl fmt::Debug for KernelCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KernelCache").finish_non_exhaustive()
    }
}

/// Compiles the kernels of `launches` that `cache` lacks, for compute capability `arch` (90 is 9.0), until `stop` is set.
/// `cuda` is the folder of CUDA, in which the headers are. After each kernel, `told` hears how many are done, and of how many.
/// Returns the number of compiled kernels.
///
/// # Errors
/// If a kernel does not compile, or the system gives no thread. The kernels that did compile are in the cache all the same.
///
/// # Panics
/// If NVRTC is not installed, or the cache cannot be written: cudarc and CubeCL panic there.
pub fn compile_ahead(
    launches: &[Launch],
    arch: u32,
    cuda: Option<&Path>,
    cache: &mut KernelCache,
    stop: &AtomicBool,
    told: &(dyn Fn(usize, usize) + Sync),
) -> Result<usize, KernelError> {
    let mut missing: Vec<&Launch> = launches.iter().filter(|launch| !cache.has(launch.key)).collect();
    // The longest take longest, and begin first. They are taken from the end.
    missing.sort_by_key(|launch| launch.text.len());
    let options = options(arch, cuda);
    let all = missing.len();
    let threads = thread::available_parallelism().map_or(1, usize::from).min(all);
    let (missing, compiled) = (Mutex::new(missing), Mutex::new(Vec::new()));
    let work = || {
        let next = || missing.lock().unwrap_or_else(PoisonError::into_inner).pop();
        while !stop.load(Ordering::Relaxed)
            && let Some(launch) = next()
        {
            let code = machine_code(&launch.text, &options).map_err(|reason| failed(&launch.entry, &reason));
            let mut compiled = compiled.lock().unwrap_or_else(PoisonError::into_inner);
            compiled.push((launch, code));
            told(compiled.len(), all);
        }
    };
    let mut result = thread::scope(|scope| {
        for _ in 0..threads {
            let thread = thread::Builder::new().name(THREAD.to_owned());
            thread.spawn_scoped(scope, work).map_err(|e| failed("a thread", &e.to_string()))?;
        }
        Ok(0)
    });
    for (launch, code) in compiled.into_inner().unwrap_or_else(PoisonError::into_inner) {
        let kept = code.and_then(|code| cache.insert(launch, code));
        result = result.and_then(|count| kept.map(|()| count + 1));
    }
    result
}

/// An entry of CubeCL's cache, with CubeCL's names. The driver takes machine code in place of PTX.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct CacheEntry {
    entrypoint_name: String,
    shared_mem_bytes: usize,
    ptx: Vec<c_char>,
}

/// The options that CubeCL gives NVRTC.
fn options(arch: u32, cuda: Option<&Path>) -> Vec<String> {
    let suffix = if arch >= 90 { "a" } else { "" };
    let mut options = vec![format!("--gpu-architecture=sm_{arch}{suffix}"), "-lineinfo".to_owned()];
    // Without headers a kernel that includes one does not compile. Those that are written in CUDA C++ include none.
    if let Some(include) = cuda.map(|folder| folder.join("include")) {
        options.extend([include.clone(), include.join("cccl")].map(|at| format!("--include-path={}", at.display())));
    }
    options
}

/// The machine code of a text, or what NVRTC says is wrong with it.
fn machine_code(text: &str, options: &[String]) -> Result<Vec<c_char>, String> {
    let words = |e: result::NvrtcError| e.to_string();
    let text = CString::new(text).map_err(|e| e.to_string())?;
    let program = result::create_program(&text, None).map_err(words)?;
    // SAFETY: the program was created above and is destroyed once, after its last use. NVRTC writes as many bytes of machine
    // code as it has just said that there are.
    unsafe {
        let log = |error| result::get_program_log(program).map_or_else(|_| words(error), |log| text_of(&log));
        let size = || {
            let mut size = 0;
            sys::nvrtcGetCUBINSize(program, &raw mut size).result().map(|()| size)
        };
        let read = |size| {
            let mut code = vec![0; size];
            sys::nvrtcGetCUBIN(program, code.as_mut_ptr()).result().map(|()| code)
        };
        let compiled = result::compile_program(program, options).map_err(log);
        let code = compiled.and_then(|()| size().and_then(read).map_err(words));
        result::destroy_program(program).map_err(words)?;
        code
    }
}

/// A text of C, which ends with a zero.
fn text_of(text: &[c_char]) -> String {
    text.iter().take_while(|byte| **byte != 0).map(|byte| char::from(*byte as u8)).collect()
}

fn failed(what: &str, reason: &str) -> KernelError {
    KernelError::Device { reason: format!("{what}: {reason}") }
}
