//! How much memory is free: on a device before a run takes any, and on the disk of a folder; and whether a device uses the host's
//! memory.

use crate::{CliError, device, kernel_cache, memory::host, settings::DeviceChoice};
use std::path::Path;

/// Bytes that are free on a device; None if it does not say. If the device uses the host's memory, the host says how much is
/// free; a GPU behind Vulkan may be allowed only a part of that.
pub fn on_device(device: DeviceChoice) -> Option<u64> {
    match device {
        _ if is_the_hosts(device) != Some(true) => device::free(device),
        DeviceChoice::Vulkan => [host::available(), device::free(device)].into_iter().flatten().min(),
        DeviceChoice::Cuda(_) | DeviceChoice::Cpu | DeviceChoice::Auto => host::available(),
    }
}

/// Whether the memory of a device is the host's; None if it does not say.
pub fn is_the_hosts(device: DeviceChoice) -> Option<bool> {
    match device {
        DeviceChoice::Cpu => Some(true),
        DeviceChoice::Cuda(_) => Some(kernel_cache::memory_is_the_hosts()),
        DeviceChoice::Vulkan => device::vulkan_adapter()?.memory_is_the_hosts(),
        DeviceChoice::Auto => None,
    }
}

/// The disk where a file or folder lies, or will lie.
pub struct Disk {
    /// What tells it from other disks.
    pub id: u64,
    /// Bytes that are free on it.
    pub free: u64,
}

impl Disk {
    /// The disk of a path.
    ///
    /// # Errors
    /// If the system does not say.
    pub fn of(path: &Path) -> Result<Self, CliError> {
        let path = std::path::absolute(path).map_err(CliError::io(path))?;
        let existing = path.ancestors().find(|folder| folder.exists()).unwrap_or(&path);
        let id = id(existing).map_err(CliError::io(existing))?;
        Ok(Self { id, free: fs4::available_space(existing).map_err(CliError::io(existing))? })
    }
}

#[cfg(unix)]
fn id(path: &Path) -> std::io::Result<u64> {
    use std::os::unix::fs::MetadataExt;
    Ok(path.metadata()?.dev())
}

/// Elsewhere all paths count as one disk, which asks for more than is needed rather than less.
#[cfg(not(unix))]
fn id(_path: &Path) -> std::io::Result<u64> {
    Ok(0)
}
