//! Devices without a GPU, for the runtime of [`crate::any_cuda`]. A launch becomes CUDA C++ text together with its grid,
//! buffers and scalars. The device records it or hands it to an executor, as [`OnLaunch`] says. Tests compile the recorded text
//! for GPUs that the machine does not have, and run it on the CPU. A program that is about to use a GPU rehearses its work here,
//! so that kernels can be compiled ahead ([`crate::compile_ahead`]).

mod launch;
mod properties;
mod server;

use launch::{Entry, devices};
pub use launch::{Executor, IsCompiled, Launch, OnLaunch, TensorMap};
pub(crate) use {
    launch::Compiler,
    server::{SourceServer, one_at_a_time},
};

/// A device that is known by its compute capability only. The number is its place in the list of devices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SourceDevice(u16);

impl SourceDevice {
    /// A new device of compute capability `arch` (90 is 9.0).
    pub fn new(arch: u32, on_launch: OnLaunch) -> Self {
        let entry = Entry { arch, on_launch, ..Entry::default() };
        let mut devices = devices();
        // The server of a device has its properties for good.
        let fits = |other: &Entry| other.idle && other.arch == arch && other.stands_for() == entry.stands_for();
        let place = devices.iter().position(fits).unwrap_or(devices.len());
        match devices.get_mut(place) {
            Some(idle) => *idle = entry,
            None => devices.push(entry),
        }
        Self(u16::try_from(place).expect("fewer than 65,536 devices"))
    }

    /// Returns the launches that were recorded since the last call. Synchronize the client first.
    pub fn take_launches(&self) -> Vec<Launch> {
        devices().get_mut(usize::from(self.0)).map(|entry| std::mem::take(&mut entry.launches)).unwrap_or_default()
    }

    /// Lets another device of this architecture take its place, which stands for the same GPU or for none, as this one does.
    /// CubeCL runs a thread for each device until the process ends, which looks for work many thousand times a second: a hundred
    /// of them take half of the processor.
    pub fn give_back(&self) {
        if let Some(entry) = devices().get_mut(usize::from(self.0)) {
            let on_launch = match std::mem::take(&mut entry.on_launch) {
                // The next device needs a server with the same properties. Until then nothing is to be recorded.
                OnLaunch::Rehearse { properties, .. } => {
                    OnLaunch::Rehearse { properties, is_compiled: Box::new(|_| true) }
                }
                OnLaunch::Record | OnLaunch::Run(_) => OnLaunch::Record,
            };
            *entry = Entry { arch: entry.arch, on_launch, idle: true, ..Entry::default() };
        }
    }

    /// The device with this place in the list of devices.
    pub(crate) fn numbered(number: u16) -> Self {
        Self(number)
    }

    /// Its place in the list of devices.
    pub(crate) fn number(&self) -> u16 {
        self.0
    }
}
