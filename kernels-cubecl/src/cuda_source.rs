//! A CubeCL runtime that runs nothing: a launch turns the kernel into CUDA C++ and keeps the text.
//! With it every CUDA kernel is compiled for cards that are not there, by NVRTC, which needs no GPU.

use cubecl::{
    CubeCount, Runtime,
    client::ComputeClient,
    device::{DeviceId, ServerUtilitiesHandle},
    ir::{
        BarrierLevel, DeviceProperties, ElemType, FloatKind, HardwareProperties, MemoryDeviceProperties, OpaqueType,
        SemanticType, StorageType, TargetProperties, Type, VectorSize,
        features::{AtomicUsage, Plane, Tma, TypeUsage},
    },
    server::{
        Binding, ComputeServer, CopyDescriptor, ExecutionMode, KernelArguments, ProfileError, ProfilingToken,
        ServerCommunication, ServerError, ServerUtilities,
    },
    zspace::{Shape, Strides},
};
use cubecl_common::{
    backtrace::BackTrace,
    bytes::Bytes,
    device::{Device, DeviceService},
    future::DynFut,
    profile::{ProfileDuration, TimingMethod},
    stream_id::StreamId,
};
use cubecl_cpp::{
    cuda::{CudaDialect, arch::CudaArchitecture, mma::CudaWmmaCompiler},
    register_supported_types,
    shared::{
        CompilationOptions, CppCompiler, CppSupportedFeatures, DialectWmmaCompiler, register_mma_features,
        register_scaled_mma_features, register_wmma_features,
    },
};
use cubecl_runtime::{
    allocator::ContiguousMemoryLayoutPolicy,
    compiler::CubeTask,
    kernel::KernelMetadata,
    logging::ServerLogger,
    memory_management::{ManagedMemoryHandle, MemoryAllocationMode, MemoryUsage},
    storage::{BytesStorage, ComputeStorage, ManagedResource},
};
use std::sync::{Arc, Mutex};

type Compiler = CppCompiler<CudaDialect<CudaWmmaCompiler>>;
type Architecture = CudaWmmaCompiler;

/// One compiled kernel.
pub struct Source {
    /// Its entry point.
    pub entry: String,
    /// CUDA C++.
    pub text: String,
    /// Bytes of shared memory.
    pub shared: usize,
}

static SOURCES: Mutex<Vec<Source>> = Mutex::new(Vec::new());

/// What was launched since the last call.
pub fn take_sources() -> Vec<Source> {
    std::mem::take(&mut SOURCES.lock().expect("no launch panicked"))
}

/// A device of which only the compute capability is known.
#[derive(Debug, Clone, Default)]
pub struct SourceDevice(pub u32);

impl Device for SourceDevice {
    fn from_id(id: DeviceId) -> Self {
        Self(u32::from(id.index_id))
    }
    fn to_id(&self) -> DeviceId {
        DeviceId { type_id: 0, index_id: self.0 as u16 }
    }
}

/// The runtime.
#[derive(Debug, Clone)]
pub struct SourceRuntime;

impl Runtime for SourceRuntime {
    type Compiler = Compiler;
    type Server = SourceServer;
    type Device = SourceDevice;

    fn client(device: &SourceDevice) -> ComputeClient<Self> {
        ComputeClient::load(device)
    }
    fn name(_: &ComputeClient<Self>) -> &'static str {
        "cuda source"
    }
    fn require_array_lengths() -> bool {
        true
    }
    fn max_cube_count() -> (u32, u32, u32) {
        (i32::MAX as u32, 65535, 65535)
    }
    fn can_read_tensor(_: &Shape, _: &Strides) -> bool {
        true
    }
    fn target_properties() -> TargetProperties {
        cubecl::cuda::CudaRuntime::target_properties()
    }
    fn enumerate_devices(_: u16, _: &()) -> Vec<DeviceId> {
        Vec::new()
    }
}

/// Compiles; allocates and computes nothing.
#[derive(Debug)]
pub struct SourceServer {
    options: CompilationOptions,
    utilities: Arc<ServerUtilities<Self>>,
}

impl DeviceService for SourceServer {
    fn init(id: DeviceId) -> Self {
        let arch = u32::from(id.index_id);
        let version = CudaArchitecture { version: arch };
        let hardware = HardwareProperties {
            load_width: 128,
            plane_size_min: 32,
            plane_size_max: 32,
            max_bindings: 1024,
            max_shared_memory_size: if arch == 90 { 227 << 10 } else { 99 << 10 },
            max_cube_count: (i32::MAX as u32, 65535, 65535),
            max_units_per_cube: 1024,
            max_cube_dim: (1024, 1024, 64),
            num_streaming_multiprocessors: Some(100),
            num_tensor_cores: Some(4),
            min_tensor_cores_dim: Some(8),
            num_cpu_cores: None,
            max_vector_size: VectorSize::MAX,
        };
        let memory = MemoryDeviceProperties { max_page_size: 1 << 40, alignment: 512 };
        let mut props = DeviceProperties::new(Default::default(), memory, hardware, TimingMethod::System);
        register_supported_types(&mut props);
        props.register_type_usage(ElemType::Float(FloatKind::TF32), TypeUsage::Conversion);
        props.register_semantic_type(SemanticType::Pipeline);
        for level in [BarrierLevel::Unit, BarrierLevel::Cube] {
            props.register_type_usage(OpaqueType::Barrier(level), TypeUsage::Buffer);
        }
        for float in [FloatKind::F16, FloatKind::BF16] {
            props.features.matmul.ldmatrix.insert(ElemType::Float(float).into());
        }
        props.features.copy_async = true;
        if arch >= 89 {
            for float in [FloatKind::E4M3, FloatKind::E5M2] {
                props.register_type_usage(ElemType::Float(float), TypeUsage::Conversion | TypeUsage::Buffer);
            }
        }
        if arch >= 90 {
            props.features.tma.insert(Tma::Base);
            props.register_semantic_type(SemanticType::TensorMap);
            for float in [FloatKind::F16, FloatKind::BF16] {
                props.features.matmul.stmatrix.insert(ElemType::Float(float).into());
            }
            for width in [2, 4] {
                props.register_atomic_type_usage(
                    Type::new(StorageType::Atomic(ElemType::Float(FloatKind::F32))).with_vector_size(width),
                    AtomicUsage::LoadStore | AtomicUsage::Add,
                );
            }
        }
        if arch >= 100 {
            let e2m1 = ElemType::Float(FloatKind::E2M1);
            props.register_type_usage(e2m1, TypeUsage::Conversion);
            props.register_type_usage(StorageType::Packed(e2m1, 2), TypeUsage::Conversion | TypeUsage::Buffer);
        }
        props.features.memory_reinterpret = true;
        props.features.alignment = true;
        for op in [Plane::Sync, Plane::Ops, Plane::NonUniformControlFlow] {
            props.features.plane.insert(op);
        }
        register_wmma_features(Architecture::supported_wmma_combinations(&version), &mut props);
        register_mma_features(Architecture::supported_mma_combinations(&version), &mut props);
        register_scaled_mma_features(Architecture::supported_scaled_mma_combinations(&version), &mut props);
        let supports_features = CppSupportedFeatures {
            fast_math: true,
            grid_constants: true,
            clusters: arch >= 90,
            elect_sync: arch >= 90,
            ..Default::default()
        };
        let options = CompilationOptions { warp_size: 32, supports_features };
        let logger = Arc::new(ServerLogger::default());
        let utilities = ServerUtilities::new(props, logger, (), ContiguousMemoryLayoutPolicy::new(512));
        Self { options, utilities: Arc::new(utilities) }
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        self.utilities.clone() as ServerUtilitiesHandle
    }
}

impl ServerCommunication for SourceServer {
    const SERVER_COMM_ENABLED: bool = false;
}

fn nothing() -> ServerError {
    ServerError::Generic { reason: "this runtime only writes source text".into(), backtrace: BackTrace::capture() }
}

impl ComputeServer for SourceServer {
    type Kernel = Box<dyn CubeTask<Compiler>>;
    type Info = ();
    type MemoryLayoutPolicy = ContiguousMemoryLayoutPolicy;
    type Storage = BytesStorage;

    fn initialize_memory(&mut self, _: ManagedMemoryHandle, _: u64, _: StreamId) {}
    fn logger(&self) -> Arc<ServerLogger> {
        self.utilities.logger.clone()
    }
    fn utilities(&self) -> Arc<ServerUtilities<Self>> {
        self.utilities.clone()
    }
    fn read(&mut self, _: Vec<CopyDescriptor>, _: StreamId) -> DynFut<Result<Vec<Bytes>, ServerError>> {
        Box::pin(async { Err(nothing()) })
    }
    fn write(&mut self, _: Vec<(CopyDescriptor, Bytes)>, _: StreamId) {}
    fn sync(&mut self, _: StreamId) -> DynFut<Result<(), ServerError>> {
        Box::pin(async { Ok(()) })
    }
    fn get_resource(
        &mut self,
        _: Binding,
        _: StreamId,
    ) -> Result<ManagedResource<<BytesStorage as ComputeStorage>::Resource>, ServerError> {
        Err(nothing())
    }
    // SAFETY: CubeCL declares a launch unsafe for what a kernel may do; this one is written down and never run.
    unsafe fn launch(
        &mut self,
        kernel: Self::Kernel,
        _: CubeCount,
        _: KernelArguments,
        mode: ExecutionMode,
        _: StreamId,
    ) {
        let compiled = kernel
            .compile(&mut Default::default(), &self.options, mode, kernel.address_type())
            .expect("the kernel compiles to CUDA C++");
        let shared = compiled.repr.as_ref().map_or(0, |repr| repr.shared_memory_size());
        SOURCES.lock().expect("no launch panicked").push(Source {
            entry: compiled.entrypoint_name,
            text: compiled.source,
            shared,
        });
    }
    fn flush(&mut self, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }
    fn memory_usage(&mut self, _: StreamId) -> Result<MemoryUsage, ServerError> {
        Err(nothing())
    }
    fn memory_cleanup(&mut self, _: StreamId) {}
    fn start_profile(&mut self, _: StreamId) -> Result<ProfilingToken, ServerError> {
        Err(nothing())
    }
    fn end_profile(&mut self, _: StreamId, _: ProfilingToken) -> Result<ProfileDuration, ProfileError> {
        Err(ProfileError::NotRegistered { backtrace: BackTrace::capture() })
    }
    fn allocation_mode(&mut self, _: MemoryAllocationMode, _: StreamId) {}
}
