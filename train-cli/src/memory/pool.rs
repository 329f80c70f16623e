//! Keeps the device's memory pool as small as a step allows. The pool reuses a free buffer only for a buffer of exactly
//! the same size. A step over batches of another length cannot use it and allocates more, so free buffers are returned
//! to the device when there are many. As long as all steps have one length, nothing is returned.
//!
//! Where the activations of blocks are kept, those of another length take more than that. The pool then holds what the
//! forecast of the run says, and returns free buffers before it would hold more.

use backend_nvfp4::{DeviceMemory, MemoryUse};

/// What is known about the device's pool.
#[derive(Debug)]
pub struct Pool {
    /// Limit on device memory, in bytes.
    limit: Option<u64>,
    /// The most memory that a step took that began without free buffers.
    needed: u64,
    /// Whether the pool may hold free buffers of earlier steps.
    stale: bool,
    /// Bytes that the kept activations of each token take.
    kept: u64,
    /// What the pool may hold where activations are kept.
    forecast: u64,
    /// Tokens of the last batch.
    tokens: usize,
    /// The most that the pool held before it gave something back since the last step ended, in bytes.
    highest: u64,
}

impl Pool {
    /// A pool before the first step, without free buffers. The activations of each token of a batch that are kept take
    /// `kept` bytes, and with them the pool may hold as much as `forecast`.
    pub fn new(limit: Option<u64>, kept: u64, forecast: u64) -> Self {
        Self { limit, needed: 0, stale: false, kept, forecast, tokens: 0, highest: 0 }
    }

    /// Returns free buffers to the device if they and the activations of a batch of `tokens` tokens would be too much.
    pub fn before_batch<B: DeviceMemory>(&mut self, device: &B::Device, tokens: usize) {
        if self.kept == 0 || std::mem::replace(&mut self.tokens, tokens) == tokens {
            return;
        }
        let Some(memory) = B::memory_in_use(device) else { return };
        if memory.reserved + self.kept * tokens as u64 > self.most() {
            self.highest = self.highest.max(memory.reserved);
            self.give_back::<B>(device);
        }
    }

    /// The most memory that a step took which has just ended with `memory` in use, in bytes, if the device has a pool. The pool
    /// keeps what a step frees, so that it holds this peak until it gives something back.
    pub fn peak_of_step(&mut self, memory: Option<MemoryUse>) -> Option<u64> {
        let highest = std::mem::take(&mut self.highest);
        memory.map(|memory| memory.reserved.max(highest))
    }

    /// The most that the pool may hold: a tenth more than a step needs, or what was forecast, but never more than the limit.
    fn most(&self) -> u64 {
        let needed = self.needed + self.needed / 10;
        let most = if self.kept == 0 { needed } else { needed.max(self.forecast) };
        self.limit.map_or(most, |limit| most.min(limit))
    }

    /// Returns free buffers to the device if the pool holds more than it may, or if the run holds more memory than the
    /// limit. Returns whether it did.
    pub fn after_step<B: DeviceMemory>(&mut self, device: &B::Device, memory: Option<MemoryUse>, held: u64) -> bool {
        let Some(memory) = memory else { return false };
        if !std::mem::replace(&mut self.stale, true) {
            self.needed = self.needed.max(memory.reserved);
            return false;
        }
        let trims = memory.reserved > self.most() || self.limit.is_some_and(|limit| held > limit);
        if trims {
            self.give_back::<B>(device);
        }
        trims
    }

    /// Returns free buffers to the device, so that the next step begins without any.
    pub fn give_back<B: DeviceMemory>(&mut self, device: &B::Device) {
        B::memory_cleanup(device);
        self.stale = false;
    }
}
