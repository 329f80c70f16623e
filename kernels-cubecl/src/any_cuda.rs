//! One CubeCL runtime for GPUs and for devices without a GPU:
//! ```text
//! AnyCudaDevice::Gpu(index)     → CubeCL's CUDA runtime
//! AnyCudaDevice::Source(device) → kernels as CUDA C++, recorded or run by the host (crate::cuda_source)
//! ```
//! CubeCL finds a compiled kernel by a key that depends on the type of the runtime. Both kinds of devices have the same
//! runtime, so that a kernel has the same key on both. Therefore a kernel that a rehearsal recorded can be compiled before a
//! GPU needs it ([`crate::compile_ahead`]).

use crate::cuda_source::{Compiler, SourceDevice, SourceServer, one_at_a_time};
use burn_backend::DeviceOps;
use cubecl::{
    CubeCount, Runtime,
    client::ComputeClient,
    cuda::{CudaDevice, CudaRuntime},
    device::{DeviceId, ServerUtilitiesHandle},
    ir::TargetProperties,
    server::{
        Binding, ComputeServer, CopyDescriptor, ExecutionMode, IoError, KernelArguments, ProfileError, ProfilingToken,
        ServerCommunication, ServerError, ServerUtilities,
    },
    zspace::{Shape, Strides},
};
use cubecl_common::{
    backtrace::BackTrace,
    bytes::Bytes,
    device::{Device, DeviceService},
    future::DynFut,
    profile::ProfileDuration,
    stream_id::StreamId,
};
use cubecl_runtime::{
    allocator::PitchedMemoryLayoutPolicy,
    compiler::CubeTask,
    logging::ServerLogger,
    memory_management::{ManagedMemoryHandle, MemoryAllocationMode, MemoryUsage},
    storage::{BytesResource, BytesStorage, ManagedResource},
};
use std::sync::Arc;

/// The runtime of every device that takes CUDA C++.
#[derive(Debug, Clone)]
pub struct AnyCudaRuntime;

/// A device that takes CUDA C++.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AnyCudaDevice {
    /// The GPU of this number.
    Gpu(usize),
    /// A device without a GPU.
    Source(SourceDevice),
}

impl Default for AnyCudaDevice {
    fn default() -> Self {
        Self::Gpu(0)
    }
}

/// The type in the identifiers of devices without a GPU. GPUs have type 0, as in CubeCL's own runtime.
const SOURCE: u16 = 1;

impl Device for AnyCudaDevice {
    fn from_id(id: DeviceId) -> Self {
        match id.type_id {
            SOURCE => Self::Source(SourceDevice::numbered(id.index_id)),
            _ => Self::Gpu(usize::from(id.index_id)),
        }
    }

    fn to_id(&self) -> DeviceId {
        match self {
            Self::Gpu(index) => CudaDevice { index: *index }.to_id(),
            Self::Source(device) => DeviceId { type_id: SOURCE, index_id: device.number() },
        }
    }
}

impl DeviceOps for AnyCudaDevice {}

type GpuServer = <CudaRuntime as Runtime>::Server;

/// The server of a device.
#[derive(Debug)]
pub struct AnyCudaServer {
    kind: Kind,
    utilities: Arc<ServerUtilities<Self>>,
}

#[derive(Debug)]
enum Kind {
    Gpu(Box<GpuServer>),
    Source(Box<SourceServer>),
}

/// Calls a method of the server that this one stands for.
macro_rules! delegate {
    ($self:ident.$method:ident($($argument:expr),*)) => {
        match &mut $self.kind {
            Kind::Gpu(server) => server.$method($($argument),*),
            Kind::Source(server) => server.$method($($argument),*),
        }
    };
}

impl DeviceService for AnyCudaServer {
    fn init(id: DeviceId) -> Self {
        match id.type_id {
            SOURCE => {
                let server = SourceServer::init(id);
                Self { utilities: utilities(&ComputeServer::utilities(&server)), kind: Kind::Source(Box::new(server)) }
            }
            _ => {
                let server = GpuServer::init(id);
                Self { utilities: utilities(&ComputeServer::utilities(&server)), kind: Kind::Gpu(Box::new(server)) }
            }
        }
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        self.utilities.clone() as ServerUtilitiesHandle
    }
}

/// What clients know of a server.
fn utilities<Server>(of: &ServerUtilities<Server>) -> Arc<ServerUtilities<AnyCudaServer>>
where
    Server: ComputeServer<Info = (), MemoryLayoutPolicy = PitchedMemoryLayoutPolicy>,
{
    let layout = PitchedMemoryLayoutPolicy::new(of.properties.memory.alignment as usize);
    Arc::new(ServerUtilities::new(of.properties.clone(), of.logger.clone(), (), layout))
}

/// Devices do not exchange data: this program uses one.
impl ServerCommunication for AnyCudaServer {
    const SERVER_COMM_ENABLED: bool = false;
}

impl ComputeServer for AnyCudaServer {
    type Kernel = Box<dyn CubeTask<Compiler>>;
    type Info = ();
    type MemoryLayoutPolicy = PitchedMemoryLayoutPolicy;
    type Storage = BytesStorage;

    fn initialize_memory(&mut self, memory: ManagedMemoryHandle, size: u64, stream: StreamId) {
        delegate!(self.initialize_memory(memory, size, stream));
    }

    fn staging(&mut self, sizes: &[usize], stream: StreamId) -> Result<Vec<Bytes>, ServerError> {
        delegate!(self.staging(sizes, stream))
    }

    fn logger(&self) -> Arc<ServerLogger> {
        self.utilities.logger.clone()
    }

    fn utilities(&self) -> Arc<ServerUtilities<Self>> {
        self.utilities.clone()
    }

    fn read(&mut self, descriptors: Vec<CopyDescriptor>, stream: StreamId) -> DynFut<Result<Vec<Bytes>, ServerError>> {
        delegate!(self.read(descriptors, stream))
    }

    fn write(&mut self, descriptors: Vec<(CopyDescriptor, Bytes)>, stream: StreamId) {
        delegate!(self.write(descriptors, stream));
    }

    fn sync(&mut self, stream: StreamId) -> DynFut<Result<(), ServerError>> {
        delegate!(self.sync(stream))
    }

    /// The memory of a device without a GPU. The memory of a GPU has another type; nobody asks for it.
    fn get_resource(
        &mut self,
        binding: Binding,
        stream: StreamId,
    ) -> Result<ManagedResource<BytesResource>, ServerError> {
        match &mut self.kind {
            Kind::Source(server) => server.get_resource(binding, stream),
            Kind::Gpu(_) => Err(IoError::UnsupportedIoOperation { backtrace: BackTrace::capture() }.into()),
        }
    }

    // SAFETY: CubeCL declares a launch unsafe because a kernel may access memory that is not its own. The caller promises
    // that it does not.
    unsafe fn launch(
        &mut self,
        kernel: Self::Kernel,
        count: CubeCount,
        arguments: KernelArguments,
        mode: ExecutionMode,
        stream: StreamId,
    ) {
        match &mut self.kind {
            Kind::Gpu(server) => {
                // CubeCL compiles a kernel at its first launch, which may be this one.
                let _one_at_a_time = one_at_a_time();
                // SAFETY: the caller's promise is handed on.
                unsafe { server.launch(kernel, count, arguments, mode, stream) }
            }
            // SAFETY: the caller's promise is handed on.
            Kind::Source(server) => unsafe { server.launch(kernel, count, arguments, mode, stream) },
        }
    }

    fn flush(&mut self, stream: StreamId) -> Result<(), ServerError> {
        delegate!(self.flush(stream))
    }

    fn memory_usage(&mut self, stream: StreamId) -> Result<MemoryUsage, ServerError> {
        delegate!(self.memory_usage(stream))
    }

    fn memory_cleanup(&mut self, stream: StreamId) {
        delegate!(self.memory_cleanup(stream));
    }

    fn start_profile(&mut self, stream: StreamId) -> Result<ProfilingToken, ServerError> {
        delegate!(self.start_profile(stream))
    }

    fn end_profile(&mut self, stream: StreamId, token: ProfilingToken) -> Result<ProfileDuration, ProfileError> {
        delegate!(self.end_profile(stream, token))
    }

    fn allocation_mode(&mut self, mode: MemoryAllocationMode, stream: StreamId) {
        delegate!(self.allocation_mode(mode, stream));
    }
}

impl Runtime for AnyCudaRuntime {
    type Compiler = Compiler;
    type Server = AnyCudaServer;
    type Device = AnyCudaDevice;

    fn client(device: &AnyCudaDevice) -> ComputeClient<Self> {
        ComputeClient::load(device)
    }

    fn name(_: &ComputeClient<Self>) -> &'static str {
        "cuda"
    }

    fn require_array_lengths() -> bool {
        CudaRuntime::require_array_lengths()
    }

    fn max_cube_count() -> (u32, u32, u32) {
        CudaRuntime::max_cube_count()
    }

    fn can_read_tensor(shape: &Shape, strides: &Strides) -> bool {
        CudaRuntime::can_read_tensor(shape, strides)
    }

    fn target_properties() -> TargetProperties {
        CudaRuntime::target_properties()
    }

    fn enumerate_devices(kind: u16, info: &()) -> Vec<DeviceId> {
        match kind {
            SOURCE => Vec::new(),
            _ => CudaRuntime::enumerate_devices(kind, info),
        }
    }
}
