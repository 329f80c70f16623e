//! What launches ask of a device, how many cubes they start, and how they hand over buffers.

use cubecl::prelude::*;
use enumset::EnumSet;

/// Whether the compiler can reinterpret a vector in registers as one of another type. This also tells CUDA's
/// compiler, which knows approximate division, square root and exponential, from SPIR-V's, which does not.
pub(crate) fn bit_casts<R: Runtime>(client: &ComputeClient<R>) -> bool {
    client.features().memory_reinterpret
}

/// The fast-math flags of a kernel that runs `approximate`ly: divisions, roots and exponentials may be off by 2 ulp.
pub(crate) fn fast_math_if(approximate: bool) -> EnumSet<FastMath> {
    if approximate { FastMath::all() } else { EnumSet::empty() }
}

/// The fast-math flags of a kernel that approximates divisions only. With all flags set CubeCL would replace the
/// approximate root by the slow, correctly rounded one.
pub(crate) fn quick_division(approximate: bool) -> EnumSet<FastMath> {
    use FastMath::{AllowReciprocal, NotInf, ReducedPrecision, UnsignedZero};
    if approximate { AllowReciprocal | ReducedPrecision | UnsignedZero | NotInf } else { EnumSet::empty() }
}

/// The widest vector, of at most eight elements of `dtype`, that the device reads at once and whose length divides
/// `len`.
pub(crate) fn vector_size<R: Runtime>(client: &ComputeClient<R>, dtype: StorageType, len: usize) -> usize {
    client.io_optimized_vector_sizes(dtype.size()).find(|v| *v <= 8 && len.is_multiple_of(*v)).unwrap_or(1)
}

/// The number of multiprocessors, or an H200's 132 if the device does not report it.
pub fn processors<R: Runtime>(client: &ComputeClient<R>) -> usize {
    known_processors(client).unwrap_or(132)
}

/// The number of multiprocessors, if the device reports it.
pub fn known_processors<R: Runtime>(client: &ComputeClient<R>) -> Option<usize> {
    client.properties().hardware.num_streaming_multiprocessors.map(|count| count as usize)
}

/// Cubes of 256 units that cover `len` elements, spread over two grid dimensions from 65,536 cubes on.
pub(crate) fn flat_launch(len: usize) -> (CubeCount, CubeDim) {
    (spread(len.div_ceil(256)), CubeDim::new_1d(256))
}

/// At least `cubes` cubes, and one at least, in two grid dimensions from 65,536 on.
pub(crate) fn spread(cubes: usize) -> CubeCount {
    let cubes = cubes.max(1) as u32;
    let x = cubes.min(65_535);
    CubeCount::Static(x, cubes.div_ceil(x), 1)
}

/// The arguments of an `Option` (none or one) or of a list, as kernels take what may be missing, or what there may be
/// several of.
pub(crate) fn sequence<R: Runtime, Arg: LaunchArg>(
    args: impl IntoIterator<Item = Arg::RuntimeArg<R>>,
) -> SequenceArg<R, Arg> {
    args.into_iter().collect()
}
