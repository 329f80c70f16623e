//! The host's memory, by Linux's count. Other systems do not say.

/// Bytes that a process can take without swapping.
pub fn available() -> Option<u64> {
    bytes_of(&meminfo()?, "MemAvailable:")
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
    fn memory_in_use_is_read_from_meminfo() {
        let text = "MemTotal:       125513724 kB\nMemFree:  100 kB\nMemAvailable:   25513724 kB\n";
        assert_eq!(in_use_by(text), Some(100_000_000 << 10));
        assert_eq!(in_use_by("MemTotal: 5 kB\n"), None);
    }
}
