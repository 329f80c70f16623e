//! What differs between devices, asked at launch.

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
