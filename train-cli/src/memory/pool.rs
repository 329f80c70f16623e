//! The device's memory pool, kept at what a step needs. Freed buffers wait for others of exactly their size: steps over
//! batches of other lengths cannot use them and take more. Steps of one length never give anything back.

use backend_nvfp4::DeviceServices;

/// What is known of the device's pool.
#[derive(Debug)]
pub struct Pool {
    /// Bytes that are not to be held.
    limit: Option<u64>,
    /// The most that a step took which began with nothing left over.
    needed: u64,
    /// Whether the last step began with buffers of others.
    stale: bool,
}

impl Pool {
    /// Before the first step, with nothing left over.
    pub fn new(limit: Option<u64>) -> Self {
        Self { limit, needed: 0, stale: false }
    }

    /// Gives back what steps of other lengths left, if it is much or more than may be `held`; tells whether it did.
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

    /// Gives back what is free; the next step begins with nothing left over.
    pub fn give_back<B: DeviceServices>(&mut self, device: &B::Device) {
        B::memory_cleanup(device);
        self.stale = false;
    }
}
