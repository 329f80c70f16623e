//! What a launch consists of, and the list of devices that record or execute launches.

use cubecl::ir::DeviceProperties;
use cubecl_common::hash::StableHash;
use cubecl_cpp::{
    cuda::{CudaDialect, mma::CudaWmmaCompiler},
    shared::CppCompiler,
};
use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard},
};

pub(crate) type Compiler = CppCompiler<CudaDialect<CudaWmmaCompiler>>;

/// One launch: the text of its kernel, and the arguments that the CUDA runtime would pass to it.
#[derive(Debug, Clone)]
pub struct Launch {
    /// The key under which CubeCL keeps the compiled kernel.
    pub key: StableHash,
    /// Name of the kernel's entry point.
    pub entry: String,
    /// CUDA C++.
    pub text: String,
    /// Bytes of shared memory.
    pub shared: usize,
    /// Cubes in each dimension (CUDA's grid).
    pub cubes: [u32; 3],
    /// Units of a cube in each dimension (CUDA's block).
    pub units: [u32; 3],
    /// Tensor maps, the first arguments. The first buffer arguments are the buffers behind them.
    pub maps: Vec<TensorMap>,
    /// The buffer that each buffer argument points to. Arguments that are the same memory have the same number.
    pub arguments: Vec<usize>,
    /// The constant `info` argument: scalars and static metadata, then the dynamic metadata.
    pub info: Vec<u64>,
    /// Words of `info` before the dynamic metadata, which is passed as one more buffer where there is any.
    pub static_info: usize,
}

/// How the copy engine finds boxes of a row-major matrix in a buffer. Boxes in shared memory have the 128-byte swizzle.
#[derive(Debug, Clone, Copy)]
pub struct TensorMap {
    /// Rows and columns of the matrix.
    pub dims: [usize; 2],
    /// Rows and columns of a box.
    pub tile: [usize; 2],
    /// Bytes of a number.
    pub size: usize,
}

/// Runs a launch on its buffers. The error text says what the kernel did wrong.
pub type Executor = Arc<dyn Fn(&Launch, &mut [Vec<u8>]) -> Result<(), String> + Send + Sync>;

/// Says of a kernel's key whether the kernel is compiled.
pub type IsCompiled = Box<dyn Fn(StableHash) -> bool + Send>;

/// What a device does with a launch.
#[derive(Default)]
pub enum OnLaunch {
    /// Records it and computes nothing.
    #[default]
    Record,
    /// Runs it. An error of the executor is the error of the next read or synchronization.
    Run(Executor),
    /// Records it as the launch of a GPU that the device stands for: each kernel once, and none that the GPU would refuse. The
    /// device keeps no values, and every value that is read from it is 0.
    Rehearse {
        /// The properties of the GPU.
        properties: Box<DeviceProperties>,
        /// Kernels that are compiled are not recorded.
        is_compiled: IsCompiled,
    },
}

/// What a device is, and the launches that it has recorded.
#[derive(Default)]
pub(super) struct Entry {
    pub(super) arch: u32,
    pub(super) on_launch: OnLaunch,
    pub(super) launches: Vec<Launch>,
    /// The keys of the kernels that a rehearsal has launched.
    pub(super) seen: HashSet<StableHash>,
    /// The first error since the last synchronization.
    pub(super) error: Option<String>,
    /// Whether the device was given back, so that the next one of its architecture may take its place.
    pub(super) idle: bool,
}

impl Entry {
    /// The properties of the GPU that the device stands for, if it does.
    pub(super) fn stands_for(&self) -> Option<&DeviceProperties> {
        match &self.on_launch {
            OnLaunch::Rehearse { properties, .. } => Some(properties),
            OnLaunch::Record | OnLaunch::Run(_) => None,
        }
    }
}

static DEVICES: Mutex<Vec<Entry>> = Mutex::new(Vec::new());

pub(super) fn devices() -> MutexGuard<'static, Vec<Entry>> {
    DEVICES.lock().expect("nothing panics while it holds the list of devices")
}
