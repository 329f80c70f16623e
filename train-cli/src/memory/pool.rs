//! Keeps the device's memory pool as small as a step allows. The pool reuses a free buffer only for a buffer of exactly
//! the same size. A step over batches of another length cannot use it and allocates more, so free buffers are returned
//! to the device when there are many. As long as all steps have one length, nothing is returned.

use backend_nvfp4::DeviceServices;

/// What is known about the device's pool.
#[derive(Debug)]
pub struct Pool {
    /// Limit on device memory, in bytes.
    limit: Option<u64>,
    /// The most memory that a step took that began without free buffers.
    needed: u64,
    /// Whether the pool may hold free buffers of earlier steps.
    stale: bool,
}

impl Pool {
    /// A pool before the first step, without free buffers.
    pub fn new(limit: Option<u64>) -> Self {
        Self { limit, needed: 0, stale: false }
    }

    /// Returns free buffers to the device if the pool is more than a tenth larger than a step needs, or if the run holds
    /// more memory than the limit. Returns whether it did.
    pub fn after_step<B: DeviceServices>(&mut self, device: &B::Device, held: u64) -> bool {
        let Some(memory) = B::memory_in_use(device) else { return false };
        if !std::mem::replace(&mut self.stale, true) {
            self.needed = self.needed.max(memory.reserved);
            return false;
        }
        let trims = memory.reserved > self.needed + self.needed / 10 || self.limit.is_some_and(|limit| held > limit);
        if trims {
            self.give_back::<B>(device);
        }
        trims
    }

    /// Returns free buffers to the device, so that the next step begins without any.
    pub fn give_back<B: DeviceServices>(&mut self, device: &B::Device) {
        B::memory_cleanup(device);
        self.stale = false;
    }
}
