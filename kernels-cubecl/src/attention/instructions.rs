//! Which matrix instructions the kernels of attention use.

use crate::cuda_text::hopper::attention::takes;
use cubecl::prelude::*;

/// The matrix instructions by which a kernel multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Instructions {
    /// `mma.sync`, which every tensor core of 16-bit numbers has.
    MmaSync,
    /// `wgmma`, which Hopper GPUs have.
    Wgmma,
}

impl Instructions {
    /// The fastest ones that the device has for numbers of this type.
    pub fn of<R: Runtime>(client: &ComputeClient<R>, dtype: StorageType) -> Self {
        if takes(client, dtype) { Self::Wgmma } else { Self::MmaSync }
    }
}
