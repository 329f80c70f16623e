//! The host's memory, by Linux's count. Other systems do not say.

use crate::{CliError, device};
use std::path::Path;

/// Bytes that this process can take without swapping, and without exceeding the limit of its container or its own.
pub fn available() -> Option<u64> {
    let free = bytes_of(&meminfo()?, "MemAvailable:")?;
    [in_container(Path::new("/sys/fs/cgroup")), in_address_space()].into_iter().flatten().chain([free]).min()
}

/// The error of a host that refuses `bytes` bytes of memory.
pub fn is_full(bytes: usize) -> CliError {
    CliError::HostIsFull { bytes: bytes as u64, free: available(), remedy: device::remedy() }
}

/// What the limit on the addresses of this process (`ulimit -v`) leaves.
fn in_address_space() -> Option<u64> {
    let limits = std::fs::read_to_string("/proc/self/limits").ok()?;
    let limit = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    // "unlimited" is no number.
    let limit: u64 = limit.split_whitespace().next()?.parse().ok()?;
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    Some(limit.saturating_sub(bytes_of(&status, "VmSize:")?))
}

/// What the control group of a container leaves: its limit less what is used, in version 2 or 1 of Linux's control groups.
fn in_container(root: &Path) -> Option<u64> {
    let number = |name: &str| std::fs::read_to_string(root.join(name)).ok()?.trim().parse::<u64>().ok();
    let names = [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")];
    // "max" is no number: there is no limit.
    names.into_iter().find_map(|(limit, used)| Some(number(limit)?.saturating_sub(number(used)?)))
}

/// Bytes that are in use.
pub fn in_use() -> Option<u64> {
    in_use_by(&meminfo()?)
}

/// Bytes of this process that are in memory.
pub fn resident() -> Option<u64> {
    bytes_of(&std::fs::read_to_string("/proc/self/status").ok()?, "VmRSS:")
}

fn meminfo() -> Option<String> {
    std::fs::read_to_string("/proc/meminfo").ok()
}

fn in_use_by(meminfo: &str) -> Option<u64> {
    bytes_of(meminfo, "MemTotal:")?.checked_sub(bytes_of(meminfo, "MemAvailable:")?)
}

/// A number of KiB behind its name, in bytes.
fn bytes_of(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().trim_end_matches(" kB").parse::<u64>().ok().map(|kib| kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_has_what_its_limit_leaves() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(in_container(root.path()), None);
        let write = |name: &str, text: &str| std::fs::write(root.path().join(name), text).unwrap();
        write("memory.current", "300\n");
        write("memory.max", "max\n");
        assert_eq!(in_container(root.path()), None);
        write("memory.max", "1000\n");
        assert_eq!(in_container(root.path()), Some(700));
    }

    #[test]
    fn memory_in_use_is_read_from_meminfo() {
        let text = "MemTotal:       125513724 kB\nMemFree:  100 kB\nMemAvailable:   25513724 kB\n";
        assert_eq!(in_use_by(text), Some(100_000_000 << 10));
        assert_eq!(in_use_by("MemTotal: 5 kB\n"), None);
    }
}
