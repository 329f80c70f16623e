//! The origin's memory report: memory in use at each phase of each step, as JSON with its fields.

use crate::{CliError, durable};
use backend_nvfp4::Nvfp4Backend;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Samples of a run; written after each step.
#[derive(Debug)]
pub struct VramReport {
    path: Option<PathBuf>,
    created: String,
    samples: Vec<Value>,
}

impl VramReport {
    /// Records to `path`, or nowhere.
    pub fn new(path: Option<&Path>) -> Self {
        Self { path: path.map(Path::to_owned), created: now(), samples: vec![] }
    }

    /// Notes memory in use in a phase. Waits for the device.
    ///
    /// # Errors
    /// If the device failed.
    pub fn note<B: Nvfp4Backend>(&mut self, device: &B::Device, step: usize, phase: &str) -> Result<(), CliError> {
        if self.path.is_none() {
            return Ok(());
        }
        B::sync(device).map_err(|e| CliError::Device { device: B::name(device), reason: format!("{e:?}") })?;
        let (pid, total) = match B::memory_in_use(device) {
            Some(m) => (mib(m.in_use), mib(m.reserved)),
            None => (resident_mib(), resident_mib()),
        };
        self.samples.push(json!({
            "TimestampUtc": now(),
            "Epoch": 1,
            "StepInEpoch": step,
            "GlobalStep": step,
            "Phase": phase,
            "PidMemoryMiB": pid,
            "TotalMemoryMiB": total,
        }));
        Ok(())
    }

    /// Writes what was noted so far.
    ///
    /// # Errors
    /// If writing fails.
    pub fn write(&self) -> Result<(), CliError> {
        let Some(path) = &self.path else { return Ok(()) };
        let report = json!({"Pid": std::process::id(), "CreatedUtc": self.created, "Samples": self.samples});
        let text = serde_json::to_string_pretty(&report).expect("plain data serialises");
        durable::write_bytes(path, text.as_bytes()).map(|_| ())
    }
}

/// Memory in MiB for the progress line.
pub fn held_mib<B: Nvfp4Backend>(device: &B::Device) -> u64 {
    mib(held_bytes::<B>(device))
}

/// What is taken from the device, or the process's memory on the CPU.
pub fn held_bytes<B: Nvfp4Backend>(device: &B::Device) -> u64 {
    B::memory_in_use(device).map_or_else(|| resident_mib() << 20, |m| m.reserved)
}

fn mib(bytes: u64) -> u64 {
    bytes >> 20
}

/// Resident memory of this process; 0 where the system does not tell.
fn resident_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
    line.and_then(|l| l.trim().trim_end_matches(" kB").parse::<u64>().ok()).map_or(0, |kib| kib >> 10)
}

fn now() -> String {
    jiff::Timestamp::now().to_string()
}
