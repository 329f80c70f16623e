//! How much memory is free: on a device before a run takes any, and on the disk of a folder.

use crate::{CliError, kernel_cache, settings::DeviceChoice};
use std::path::Path;

/// Bytes that are free on a device; None if it does not say. The CPU's memory is the host's, and so is that of a card
/// that shares it.
pub fn on_device(device: DeviceChoice) -> Option<u64> {
    match device {
        DeviceChoice::Cuda(_) if kernel_cache::memory_is_the_hosts() => on_host(),
        DeviceChoice::Cuda(index) => {
            let context = cudarc::driver::CudaContext::new(index).ok()?;
            context.mem_get_info().ok().map(|(free, _total)| free as u64)
        }
        DeviceChoice::Cpu => on_host(),
        DeviceChoice::Vulkan | DeviceChoice::Auto => None,
    }
}

/// Bytes of the host that a process can take without swapping, by Linux's count.
fn on_host() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().trim_end_matches(" kB").parse::<u64>().ok().map(|kib| kib << 10)
}

/// Bytes that are free on the disk where a file or folder lies, or will lie.
///
/// # Errors
/// If the system does not say.
pub fn on_disk(path: &Path) -> Result<u64, CliError> {
    let path = std::path::absolute(path).map_err(CliError::io(path))?;
    let existing = path.ancestors().find(|folder| folder.exists()).unwrap_or(&path);
    fs4::available_space(existing).map_err(CliError::io(existing))
}
