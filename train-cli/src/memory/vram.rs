//! The report of `--vram-report`: memory in use at each phase of each step, and the seconds that the phase took, as JSON
//! with the field names of the project's predecessor. The report waits for the device at each phase, which makes steps
//! slower.

use crate::{CliError, durable, kernel_cache, memory::host};
use backend_nvfp4::{DeviceMemory, MemoryUse};
use serde_json::{Value, json};
use std::{
    path::{Path, PathBuf},
    time::Instant,
};

/// The measurements of a run.
#[derive(Debug)]
pub struct VramReport {
    path: Option<PathBuf>,
    created: String,
    last: Instant,
    meter: Meter,
    samples: Vec<Value>,
}

impl VramReport {
    /// A report that is written to `path`, or nowhere.
    pub fn new(path: Option<&Path>) -> Self {
        Self {
            path: path.map(Path::to_owned),
            created: now(),
            last: Instant::now(),
            meter: Meter::new(),
            samples: vec![],
        }
    }

    /// Measures the memory in use at the end of a phase. It waits for the device.
    ///
    /// # Errors
    /// If the device failed.
    pub fn note<B: DeviceMemory>(&mut self, device: &B::Device, step: usize, phase: &str) -> Result<(), CliError> {
        if self.path.is_none() {
            return Ok(());
        }
        B::sync(device).map_err(|e| CliError::Device { device: B::name(device), reason: format!("{e:?}") })?;
        let memory = B::memory_in_use(device);
        let held = mib(self.held(memory));
        let (pid, total) = (memory.map_or(held, |m| mib(m.in_use)), held);
        self.samples.push(json!({
            "TimestampUtc": now(),
            "GlobalStep": step,
            "Phase": phase,
            "Seconds": self.last.elapsed().as_secs_f64(),
            "PidMemoryMiB": pid,
            "TotalMemoryMiB": total,
        }));
        self.last = Instant::now();
        Ok(())
    }

    /// Bytes that the run holds while its device's pool has `memory` in use. On a device with memory of its own, this is the
    /// memory taken from it; on a device that shares the host's memory, what the host has come to use since the run began; on
    /// the CPU, this process's memory.
    pub fn held(&self, memory: Option<MemoryUse>) -> u64 {
        match (memory, self.meter.began) {
            (None, _) => host::resident().unwrap_or(0),
            (Some(m), None) => m.reserved,
            (Some(m), Some(began)) => host::in_use().map_or(m.reserved, |now| now.saturating_sub(began)),
        }
    }

    /// Writes the measurements that were made so far.
    ///
    /// # Errors
    /// If writing fails.
    pub fn write(&self) -> Result<(), CliError> {
        let Some(path) = &self.path else { return Ok(()) };
        let report = json!({"Pid": std::process::id(), "CreatedUtc": self.created, "Samples": self.samples});
        let text = serde_json::to_string_pretty(&report).expect("plain data serializes");
        durable::write_bytes(path, text.as_bytes()).map(|_| ())
    }
}

/// How a run's memory is counted.
#[derive(Debug)]
struct Meter {
    /// Bytes of the host that were in use when the run began, if the device shares the host's memory.
    began: Option<u64>,
}

impl Meter {
    fn new() -> Self {
        Self { began: if kernel_cache::memory_is_the_hosts() { host::in_use() } else { None } }
    }
}

fn mib(bytes: u64) -> u64 {
    bytes >> 20
}

fn now() -> String {
    jiff::Timestamp::now().to_string()
}
