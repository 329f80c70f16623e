//! What a program asks of a device besides computing: which kernels it has, how fast they are, how much memory is in use.

use crate::error::Nvfp4Error;
use burn::tensor::backend::Backend;
use kernels_cubecl::bench;

/// The memory of a device, which is the same whether operations are recorded or not.
pub trait DeviceMemory: Backend {
    /// The memory that the backend holds for tensors, or `None` if the backend does not count it.
    fn memory_in_use(device: &Self::Device) -> Option<MemoryUse>;
}

/// Questions about a device.
pub trait DeviceServices: DeviceMemory {
    /// Names the implementations of products with packed operands that the device has, in the order in which they are
    /// tried.
    fn tiers(device: &Self::Device) -> Vec<&'static str>;

    /// Times every kernel whose name contains `filter` and hands each result to `show`. The rate of a plain copy comes
    /// first.
    ///
    /// # Errors
    /// If the backend has no kernels or the device fails.
    fn bench_kernels(device: &Self::Device, filter: &str, show: &mut dyn FnMut(bench::Row)) -> Result<(), Nvfp4Error>;
}

/// Device memory in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryUse {
    /// Bytes in live tensors.
    pub in_use: u64,
    /// Bytes taken from the device, including free pages.
    pub reserved: u64,
}
