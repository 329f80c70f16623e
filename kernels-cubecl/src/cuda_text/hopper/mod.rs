//! Matrix products and attention on Hopper's own instructions, which CubeCL 0.10 does not have: CUDA C++ with inline
//! assembly, launched in the same stream as every other kernel. [`crate::gemm`] and [`crate::attention`] choose these
//! kernels where the device has the instructions; a CubeCL that has them replaces this folder.
//!
//! | file | what it holds |
//! |---|---|
//! | `mod.rs` | which device has the instructions, and the maps by which its copy engine (TMA) finds a matrix |
//! | `text.rs`, `instructions.cuh` | what every text begins with: the instructions, as functions |
//! | `gemm/` | the products of [`crate::gemm`] |
//! | `attention/` | the kernels of [`crate::attention`] |

use cubecl::{
    ir::{ElemType, FloatKind, StorageType, features::Tma},
    prelude::*,
    server::{Binding, TensorMapBinding, TensorMapMeta},
    zspace::metadata::Metadata,
};
use cubecl_runtime::tma::{
    OobFill, TensorMapFormat, TensorMapInterleave, TensorMapPrefetch, TensorMapSwizzle, TiledArgs,
};

pub(crate) mod attention;
pub(crate) mod gemm;
mod text;

pub use gemm::{hopper_columns, hopper_gemm_in, hopper_squares};

/// Bytes of shared memory that a cube of these GPUs can have.
const SHARED: usize = 227 << 10;
/// Bytes to which a text aligns its part of shared memory, and bytes behind everything else: the two barriers of each stage, and in
/// `gemm` eight sums behind those of its at most six stages.
const ALIGNMENT: usize = 1024;
const BARRIERS: usize = 256;
/// 16-bit values in a row of shared memory: with the 128-byte swizzle a row has 128 bytes.
const PIECE: usize = 64;

/// Whether the device is a Hopper GPU: it has the copy engine and no 4-bit floats, which came with Blackwell.
pub fn is_hopper<R: Runtime>(client: &ComputeClient<R>) -> bool {
    let e2m1 = StorageType::Scalar(ElemType::Float(FloatKind::E2M1));
    let properties = client.properties();
    client.features().tma.contains(Tma::Base)
        && properties.type_usage(e2m1).is_empty()
        && properties.hardware.max_shared_memory_size >= SHARED
}

/// A number's type, as these kernels know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Number {
    F16,
    Bf16,
    F32,
}

impl Number {
    /// The number of this storage type, if there is one.
    fn of(storage: StorageType) -> Option<Self> {
        match storage {
            StorageType::Scalar(ElemType::Float(FloatKind::F16)) => Some(Self::F16),
            StorageType::Scalar(ElemType::Float(FloatKind::BF16)) => Some(Self::Bf16),
            StorageType::Scalar(ElemType::Float(FloatKind::F32)) => Some(Self::F32),
            _ => None,
        }
    }

    /// The name of the type in an instruction that knows 16-bit numbers only. Results in f32 are not converted.
    fn ptx(self) -> &'static str {
        if self == Self::F16 { "f16" } else { "bf16" }
    }
}

/// The map by which the copy engine finds boxes of `tile` in a row-major matrix of `dims`.
fn tensor_map(buffer: Binding, ty: StorageType, dims: [usize; 2], tile: [usize; 2]) -> TensorMapBinding {
    let map = TensorMapMeta {
        format: TensorMapFormat::Tiled(TiledArgs { tile_size: tile.into() }),
        metadata: Metadata::new(dims, [dims[1], 1]),
        elem_stride: [1, 1].into(),
        interleave: TensorMapInterleave::None,
        swizzle: TensorMapSwizzle::B128,
        prefetch: TensorMapPrefetch::B256,
        oob_fill: OobFill::Zero,
        storage_ty: ty,
    };
    TensorMapBinding { binding: buffer, map }
}
