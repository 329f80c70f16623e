//! The server of a device without a GPU: it keeps buffers in host memory, compiles kernels to CUDA C++, and records a
//! launch or hands it to the device's executor.

use super::{
    launch::{Compiler, Launch, OnLaunch, TensorMap, devices},
    properties,
};
use crate::host_memory;
use cubecl::{
    CubeCount,
    device::{DeviceId, ServerUtilitiesHandle},
    server::{
        Binding, ComputeServer, CopyDescriptor, ExecutionMode, IoError, KernelArguments, ProfileError, ProfilingToken,
        ServerCommunication, ServerError, ServerUtilities, TensorMapMeta,
    },
};
use cubecl_common::{
    backtrace::BackTrace, bytes::Bytes, device::DeviceService, future::DynFut, hash::StableHash,
    profile::ProfileDuration, stream_id::StreamId,
};
use cubecl_cpp::shared::CompilationOptions;
use cubecl_runtime::{
    allocator::PitchedMemoryLayoutPolicy,
    compiler::CubeTask,
    id::KernelId,
    kernel::KernelMetadata,
    logging::ServerLogger,
    memory_management::{
        ManagedMemoryHandle, MemoryAllocationMode, MemoryConfiguration, MemoryManagement, MemoryManagementOptions,
        MemoryUsage,
    },
    storage::{BytesResource, BytesStorage, ManagedResource},
    tma::{OobFill, TensorMapFormat, TensorMapInterleave, TensorMapSwizzle},
    validation::{validate_cube_dim, validate_units},
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// To be held while a kernel is compiled to CUDA C++. CubeCL numbers temporaries with one counter for the whole process, which
/// begins at 0 for each kernel: of two that are compiled at once, one may have a number twice.
pub(crate) fn one_at_a_time() -> MutexGuard<'static, ()> {
    static COMPILING: Mutex<()> = Mutex::new(());
    // A kernel that panicked as it was compiled has left nothing behind.
    COMPILING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Compiles and records, or runs by the device's executor.
pub(crate) struct SourceServer {
    device: usize,
    options: CompilationOptions,
    utilities: Arc<ServerUtilities<Self>>,
    memory: MemoryManagement<BytesStorage>,
}

impl std::fmt::Debug for SourceServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SourceServer").field("device", &self.device).finish_non_exhaustive()
    }
}

impl DeviceService for SourceServer {
    fn init(id: DeviceId) -> Self {
        let device = usize::from(id.index_id);
        let (arch, other) = devices().get(device).map_or((0, None), |entry| (entry.arch, entry.stands_for().cloned()));
        let properties = other.unwrap_or_else(|| properties::properties(arch));
        let logger = Arc::new(ServerLogger::default());
        let memory = MemoryManagement::from_configuration(
            BytesStorage::default(),
            &properties::memory(),
            MemoryConfiguration::ExclusivePages,
            logger.clone(),
            MemoryManagementOptions::new("host memory of a device without a GPU"),
        );
        let layout = PitchedMemoryLayoutPolicy::new(properties::ALIGNMENT);
        let utilities = ServerUtilities::new(properties, logger, (), layout);
        Self { device, options: properties::options(arch), utilities: Arc::new(utilities), memory }
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        self.utilities.clone() as ServerUtilitiesHandle
    }
}

impl ServerCommunication for SourceServer {
    const SERVER_COMM_ENABLED: bool = false;
}

impl SourceServer {
    fn resource(&mut self, binding: Binding) -> Result<BytesResource, IoError> {
        self.memory.get_resource(binding.memory, binding.offset_start, binding.offset_end)
    }

    fn healthy(&mut self) -> Result<(), ServerError> {
        let error = devices().get_mut(self.device).and_then(|entry| entry.error.take());
        error.map_or(Ok(()), |reason| Err(failed(reason)))
    }

    /// Keeps an error for the next synchronization, unless there is one already.
    fn remember(&self, error: String) {
        if let Some(entry) = devices().get_mut(self.device) {
            entry.error.get_or_insert(error);
        }
    }

    /// Whether the device stands for another, so that values do not matter.
    fn rehearses(&self) -> bool {
        devices().get(self.device).is_some_and(|entry| entry.stands_for().is_some())
    }

    /// Whether the device does not record a kernel. A device that stands for a GPU records each kernel once, none that is
    /// compiled, and none that the GPU will refuse.
    fn leaves_out(&self, id: &KernelId) -> bool {
        let mut devices = devices();
        let Some(entry) = devices.get_mut(self.device) else { return false };
        let OnLaunch::Rehearse { properties, is_compiled } = &entry.on_launch else { return false };
        let key = id.stable_hash();
        let fits = validate_cube_dim(properties, id).is_ok() && validate_units(properties, id).is_ok();
        !fits || !entry.seen.insert(key) || is_compiled(key)
    }

    /// The launch, and the memory of its buffers.
    fn prepare(
        &mut self,
        (kernel, key): (Box<dyn CubeTask<Compiler>>, StableHash),
        count: CubeCount,
        arguments: KernelArguments,
        mode: ExecutionMode,
    ) -> Result<(Launch, Vec<BytesResource>), String> {
        let CubeCount::Static(x, y, z) = count else {
            return Err("the number of cubes is in a buffer, which a device without a GPU does not read".into());
        };
        let compiled = {
            let _one_at_a_time = one_at_a_time();
            kernel.compile(&mut Default::default(), &self.options, mode, kernel.address_type())
        };
        let compiled = compiled.map_err(|e| format!("a kernel does not compile to CUDA C++: {e:?}"))?;
        let mut buffers: Vec<BytesResource> = Vec::new();
        let mut numbers = Vec::new();
        let maps = arguments.tensor_maps.iter().map(|map| tensor_map(&map.map)).collect::<Result<_, _>>()?;
        // The order of the CUDA runtime: the buffers behind tensor maps come first.
        let behind_maps = arguments.tensor_maps.into_iter().map(|map| map.binding);
        for binding in behind_maps.chain(arguments.buffers) {
            let resource = self.resource(binding).map_err(|e| format!("{}: {e}", compiled.entrypoint_name))?;
            let place = resource.get_write_ptr_and_length();
            let known = buffers.iter().position(|other| other.get_write_ptr_and_length() == place);
            numbers.push(known.unwrap_or(buffers.len()));
            if known.is_none() {
                buffers.push(resource);
            }
        }
        let launch = Launch {
            key,
            shared: compiled.repr.as_ref().map_or(0, |repr| repr.shared_memory_size()),
            entry: compiled.entrypoint_name,
            text: compiled.source,
            cubes: [x, y, z],
            units: [compiled.cube_dim.x, compiled.cube_dim.y, compiled.cube_dim.z],
            maps,
            arguments: numbers,
            info: arguments.info.data,
            static_info: arguments.info.dynamic_metadata_offset,
        };
        Ok((launch, buffers))
    }

    fn run(&mut self, launch: Launch, mut buffers: Vec<BytesResource>) -> Result<(), String> {
        let executor = match devices().get_mut(self.device) {
            Some(entry) => match &entry.on_launch {
                OnLaunch::Run(executor) => executor.clone(),
                OnLaunch::Record | OnLaunch::Rehearse { .. } => {
                    let memory = entry.stands_for().map(|properties| properties.hardware.max_shared_memory_size);
                    if memory.is_none_or(|most| launch.shared <= most) {
                        entry.launches.push(launch);
                    }
                    return Ok(());
                }
            },
            None => return Err("the device is not in the list of devices".into()),
        };
        let mut contents: Vec<Vec<u8>> = buffers.iter().map(|buffer| buffer.read().to_vec()).collect();
        executor(&launch, &mut contents)?;
        for (buffer, content) in buffers.iter_mut().zip(&contents) {
            buffer.write().copy_from_slice(content);
        }
        Ok(())
    }
}

/// The map, if it is of the only kind that these devices know.
fn tensor_map(map: &TensorMapMeta) -> Result<TensorMap, String> {
    let (shape, strides) = (map.metadata.shape(), map.metadata.strides());
    let known = match (&map.format, &shape[..], &strides[..]) {
        (TensorMapFormat::Tiled(tiles), &[rows, cols], &[stride, 1]) if stride == cols => match tiles.tile_size[..] {
            [tile_rows, tile_cols] => Some(([rows, cols], [tile_rows, tile_cols])),
            _ => None,
        },
        _ => None,
    };
    let plain = map.swizzle == TensorMapSwizzle::B128
        && map.interleave == TensorMapInterleave::None
        && map.oob_fill == OobFill::Zero
        && map.elem_stride.iter().all(|stride| *stride == 1);
    match known {
        Some((dims, tile)) if plain => Ok(TensorMap { dims, tile, size: map.storage_ty.size() }),
        _ => Err(format!("a device without a GPU does not know the tensor map {map:?}")),
    }
}

fn failed(reason: String) -> ServerError {
    ServerError::Generic { reason, backtrace: BackTrace::capture() }
}

impl ComputeServer for SourceServer {
    type Kernel = Box<dyn CubeTask<Compiler>>;
    type Info = ();
    type MemoryLayoutPolicy = PitchedMemoryLayoutPolicy;
    type Storage = BytesStorage;

    fn initialize_memory(&mut self, memory: ManagedMemoryHandle, size: u64, _: StreamId) {
        let reserved = host_memory::may_be_refused(|| self.memory.reserve(size));
        let bound = reserved.and_then(|reserved| self.memory.bind(reserved, memory, 0));
        if let Err(e) = bound {
            self.remember(format!("{e}"));
        }
    }

    fn logger(&self) -> Arc<ServerLogger> {
        self.utilities.logger.clone()
    }

    fn utilities(&self) -> Arc<ServerUtilities<Self>> {
        self.utilities.clone()
    }

    fn read(&mut self, descriptors: Vec<CopyDescriptor>, _: StreamId) -> DynFut<Result<Vec<Bytes>, ServerError>> {
        let rehearses = self.rehearses();
        let read = self.healthy().and_then(|()| {
            let mut one = |d: CopyDescriptor| -> Result<Bytes, ServerError> {
                if rehearses {
                    let bytes = d.shape.iter().product::<usize>() * d.elem_size;
                    return Ok(Bytes::from_bytes_vec(vec![0; bytes]));
                }
                Ok(Bytes::from_bytes_vec(self.resource(d.handle)?.read().to_vec()))
            };
            descriptors.into_iter().map(&mut one).collect()
        });
        Box::pin(async { read })
    }

    fn write(&mut self, descriptors: Vec<(CopyDescriptor, Bytes)>, _: StreamId) {
        let rehearses = self.rehearses();
        for (descriptor, data) in descriptors.into_iter().filter(|_| !rehearses) {
            match self.resource(descriptor.handle) {
                Ok(mut resource) => resource.write()[..data.len()].copy_from_slice(&data),
                Err(e) => {
                    self.remember(format!("{e}"));
                }
            }
        }
    }

    fn sync(&mut self, _: StreamId) -> DynFut<Result<(), ServerError>> {
        let healthy = self.healthy();
        Box::pin(async { healthy })
    }

    fn get_resource(&mut self, binding: Binding, _: StreamId) -> Result<ManagedResource<BytesResource>, ServerError> {
        let memory = binding.memory.clone();
        Ok(ManagedResource::new(memory, self.resource(binding)?))
    }

    // SAFETY: CubeCL declares a launch unsafe because a kernel may access memory that is not its own. This server runs
    // no kernel: the executor gets copies of the buffers.
    unsafe fn launch(
        &mut self,
        kernel: Self::Kernel,
        count: CubeCount,
        arguments: KernelArguments,
        mode: ExecutionMode,
        _: StreamId,
    ) {
        let mut id = kernel.id();
        id.mode(mode);
        if self.leaves_out(&id) {
            return;
        }
        let key = id.stable_hash();
        let done =
            self.prepare((kernel, key), count, arguments, mode).and_then(|(launch, buffers)| self.run(launch, buffers));
        if let Err(e) = done {
            self.remember(e);
        }
    }

    fn flush(&mut self, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn memory_usage(&mut self, _: StreamId) -> Result<MemoryUsage, ServerError> {
        Ok(self.memory.memory_usage())
    }

    fn memory_cleanup(&mut self, _: StreamId) {
        self.memory.cleanup(true);
    }

    fn start_profile(&mut self, _: StreamId) -> Result<ProfilingToken, ServerError> {
        Err(failed("a device without a GPU does not measure time".into()))
    }

    fn end_profile(&mut self, _: StreamId, _: ProfilingToken) -> Result<ProfileDuration, ProfileError> {
        Err(ProfileError::NotRegistered { backtrace: BackTrace::capture() })
    }

    fn allocation_mode(&mut self, mode: MemoryAllocationMode, _: StreamId) {
        self.memory.mode(mode);
    }
}
