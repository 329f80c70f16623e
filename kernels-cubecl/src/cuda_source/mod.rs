//! Devices without a GPU, for the runtime of [`crate::any_cuda`]. A launch becomes CUDA C++ text together with its grid,
//! buffers and scalars, which the device either records or hands to an executor. Tests compile the recorded text for GPUs
//! that the machine does not have, and run it on the CPU. A program that is about to use a GPU rehearses its work here, so
//! that kernels can be compiled ahead ([`crate::compile_ahead`]).

mod launch;
mod properties;
mod server;

use cubecl::ir::DeviceProperties;
use launch::{Entry, Rehearsed, devices};
pub use launch::{Executor, IsCompiled, Launch, TensorMap};
use std::collections::HashSet;
pub(crate) use {
    launch::Compiler,
    server::{SourceServer, one_at_a_time},
};

/// A device that is known by its compute capability only. The number is its place in the list of devices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SourceDevice(u16);

impl SourceDevice {
    /// A new device of compute capability `arch` (90 is 9.0) that records launches and computes nothing.
    pub fn recording(arch: u32) -> Self {
        Self::add(Entry { arch, ..Entry::default() })
    }

    /// A new device that stands for a GPU of compute capability `arch` with these properties. It records each kernel
    /// once, except those that the GPU would refuse, and those of which `is_compiled` says by their key that they are
    /// compiled. It keeps no values, and every value that is read from it is 0.
    pub fn rehearsing(arch: u32, properties: DeviceProperties, is_compiled: IsCompiled) -> Self {
        let rehearsed = Rehearsed { properties, is_compiled, seen: HashSet::new() };
        Self::add(Entry { arch, rehearsed: Some(rehearsed), ..Entry::default() })
    }

    /// A new device of compute capability `arch` that runs each launch by `executor`. An error of the executor is the
    /// error of the next read or synchronization.
    pub fn running(arch: u32, executor: Executor) -> Self {
        Self::add(Entry { arch, executor: Some(executor), ..Entry::default() })
    }

    /// Returns the launches that were recorded since the last call. Synchronize the client first.
    pub fn take_launches(&self) -> Vec<Launch> {
        devices().get_mut(usize::from(self.0)).map(|entry| std::mem::take(&mut entry.launches)).unwrap_or_default()
    }

    /// Lets another device of this architecture take its place. CubeCL runs a thread for each device until the process
    /// ends, which looks for work many thousand times a second: a hundred of them take half of the processor.
    pub fn give_back(&self) {
        if let Some(entry) = devices().get_mut(usize::from(self.0)) {
            let reusable = entry.rehearsed.is_none();
            *entry = Entry { arch: entry.arch, idle: reusable, ..Entry::default() };
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

    fn add(entry: Entry) -> Self {
        let mut devices = devices();
        // The server of a device has its properties for good.
        let fits = |other: &Entry| other.idle && other.arch == entry.arch && entry.rehearsed.is_none();
        let place = devices.iter().position(fits).unwrap_or(devices.len());
        match devices.get_mut(place) {
            Some(idle) => *idle = entry,
            None => devices.push(entry),
        }
        Self(u16::try_from(place).expect("fewer than 65,536 devices"))
    }
}
