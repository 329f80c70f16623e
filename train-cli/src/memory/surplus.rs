//! Gives free buffers back while a model reads and answers. The pool reuses a free buffer only for a buffer of exactly the same
//! size. So each length of a prompt leaves buffers of its own behind, and where attention has no kernel of its own, so does
//! every eighth token of an answer. [`super::pool`] does this for training.

use backend_nvfp4::DeviceMemory;

/// Steps without new lengths after which the pool is looked at, which takes some tenths of a millisecond.
const STEPS: usize = 64;
/// Bytes that the pool may hold beside those in use. A chunk of a prompt takes about a hundred MB in Qwen3-4B.
const SPARE: u64 = 128 << 20;
/// Or one byte for so many in use, if that is more: larger models have larger activations.
const IN_USE_FOR_A_SPARE: u64 = 32;

/// What was done since the pool was last looked at.
#[derive(Debug, Default)]
pub struct Surplus {
    steps: usize,
}

impl Surplus {
    /// Looks at the pool after a step over tokens of another number than before (`is_new`), or after some steps that were not.
    pub fn after_step<B: DeviceMemory>(&mut self, device: &B::Device, is_new: bool) {
        self.steps += 1;
        if is_new || self.steps >= STEPS {
            self.steps = 0;
            give_back::<B>(device);
        }
    }
}

/// Gives free buffers back to the device if there are many.
fn give_back<B: DeviceMemory>(device: &B::Device) {
    if let Some(memory) = B::memory_in_use(device)
        && memory.reserved > memory.in_use + SPARE.max(memory.in_use / IN_USE_FOR_A_SPARE)
    {
        B::memory_cleanup(device);
    }
}
