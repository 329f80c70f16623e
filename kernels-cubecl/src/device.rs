//! What a launch asks of its device, and how many cubes it takes.

use cubecl::prelude::*;
use enumset::EnumSet;

/// Whether registers can be read as vectors of another type, which also marks the compilers that know approximate
/// division, square root and exponential: CUDA's, not SPIR-V's.
pub(crate) fn bit_casts<R: Runtime>(client: &ComputeClient<R>) -> bool {
    client.features().memory_reinterpret
}

/// The liberties of a kernel that runs `approximate`ly: 2 ulp in divisions, roots and exponentials.
pub(crate) fn liberties(approximate: bool) -> EnumSet<FastMath> {
    if approximate { FastMath::all() } else { EnumSet::empty() }
}

/// The same for divisions only. CubeCL's name for a root with all liberties is the slow, correctly rounded one.
pub(crate) fn quick_division(approximate: bool) -> EnumSet<FastMath> {
    use FastMath::{AllowReciprocal, NotInf, ReducedPrecision, UnsignedZero};
    if approximate { AllowReciprocal | ReducedPrecision | UnsignedZero | NotInf } else { EnumSet::empty() }
}

/// The widest vector of at most eight elements of `dtype` that the device reads at once and that divides `len`.
pub(crate) fn vector_size<R: Runtime>(client: &ComputeClient<R>, dtype: StorageType, len: usize) -> usize {
    client.io_optimized_vector_sizes(dtype.size()).find(|v| *v <= 8 && len.is_multiple_of(*v)).unwrap_or(1)
}

/// Multiprocessors, as many as an H200's where the device does not tell.
pub(crate) fn processors<R: Runtime>(client: &ComputeClient<R>) -> usize {
    client.properties().hardware.num_streaming_multiprocessors.unwrap_or(132) as usize
}

/// Cubes of 256 units that cover `len` elements, spread over two dimensions past 65,535 cubes.
pub(crate) fn flat_launch(len: usize) -> (CubeCount, CubeDim) {
    let cubes = len.div_ceil(256).max(1) as u32;
    let x = cubes.min(65_535);
    (CubeCount::Static(x, cubes.div_ceil(x), 1), CubeDim::new_1d(256))
}
