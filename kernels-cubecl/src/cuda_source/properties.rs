//! What CubeCL's CUDA runtime finds on a GPU of a compute capability: types, tensor-core shapes, sizes, compiler options.

use cubecl::ir::{
    BarrierLevel, DeviceProperties, ElemType, FloatKind, HardwareProperties, MemoryDeviceProperties, OpaqueType,
    SemanticType, StorageType, Type, VectorSize,
    features::{AtomicUsage, Plane, Tma, TypeUsage},
};
use cubecl_common::profile::TimingMethod;
use cubecl_cpp::{
    cuda::{arch::CudaArchitecture, mma::CudaWmmaCompiler},
    register_supported_types,
    shared::{
        CompilationOptions, CppSupportedFeatures, DialectWmmaCompiler, register_mma_features,
        register_scaled_mma_features, register_wmma_features,
    },
};
use cudarc::driver::sys::CUDA_VERSION;

/// Bytes to which the CUDA runtime aligns buffers.
pub(super) const ALIGNMENT: usize = 512;

/// The sizes of the memory of a device.
pub(super) fn memory() -> MemoryDeviceProperties {
    MemoryDeviceProperties { max_page_size: 1 << 40, alignment: ALIGNMENT as u64 }
}

/// The options of the compiler to CUDA C++.
pub(super) fn options(arch: u32) -> CompilationOptions {
    let supports_features = CppSupportedFeatures {
        fast_math: true,
        grid_constants: true,
        clusters: arch >= 90,
        elect_sync: arch >= 90,
        fast_tanh: arch >= 75 && CUDA_VERSION >= 12080,
    };
    CompilationOptions { warp_size: 32, supports_features }
}

/// The properties that kernels ask for.
pub(super) fn properties(arch: u32) -> DeviceProperties {
    let mut props = DeviceProperties::new(Default::default(), memory(), hardware(arch), TimingMethod::System);
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
    let version = CudaArchitecture { version: arch };
    register_wmma_features(CudaWmmaCompiler::supported_wmma_combinations(&version), &mut props);
    register_mma_features(CudaWmmaCompiler::supported_mma_combinations(&version), &mut props);
    register_scaled_mma_features(CudaWmmaCompiler::supported_scaled_mma_combinations(&version), &mut props);
    props
}

/// The limits of a GPU. Only shared memory depends on the architecture: an A100 (8.0) has 163 KiB for a cube, a H100
/// (9.0) 227 KiB, and the GPUs of a desktop (8.6, 8.9, 12.0, 12.1) 99 KiB.
fn hardware(arch: u32) -> HardwareProperties {
    let shared = match arch {
        80 => 163 << 10,
        90 => 227 << 10,
        _ => 99 << 10,
    };
    HardwareProperties {
        load_width: 128,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 1024,
        max_shared_memory_size: shared,
        max_cube_count: (i32::MAX as u32, 65535, 65535),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: Some(100),
        num_tensor_cores: Some(4),
        min_tensor_cores_dim: Some(8),
        num_cpu_cores: None,
        max_vector_size: VectorSize::MAX,
    }
}
