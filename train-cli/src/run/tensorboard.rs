//! The figures of a run as TensorBoard reads them: `--report-to tensorboard` writes a file of events beside `metrics.jsonl`.
//!
//! The file is a sequence of TFRecords. A record is the length of its data (u64), a checksum of the length (u32), the data,
//! and a checksum of the data (u32), all little-endian. A checksum is the CRC-32C, rotated right by 15 bits, plus a constant
//! (TensorFlow, `core/lib/hash/crc32c.h:Mask`). The data is a message `Event` in protobuf (TensorFlow,
//! `core/util/event.proto`), of which three fields are written: `wall_time` (1), `step` (2) and `summary` (5), whose values
//! have a `tag` (1) and a `simple_value` (2); the first event has a `file_version` (3) instead of a summary.

use super::log::{self, Logged};
use crate::{CliError, durable};
use crc::{CRC_32_ISCSI, Crc};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// How the name of a file of events begins. TensorBoard looks for it.
const NAME: &str = "events.out.tfevents.";

/// Whether a file of a run folder is one of events.
pub(super) fn is_events(name: &str) -> bool {
    name.starts_with(NAME)
}

/// Removes the file of an earlier process, which may have events of steps that are made again.
///
/// # Errors
/// If the folder cannot be read or written.
pub(super) fn remove(run: &Path) -> Result<(), CliError> {
    for entry in fs::read_dir(run).map_err(CliError::io(run))? {
        let entry = entry.map_err(CliError::io(run))?;
        if is_events(&entry.file_name().to_string_lossy()) {
            durable::remove(&entry.path())?;
        }
    }
    Ok(())
}

/// Writes the figures of a complete run as events, if there is no file of them. Returns whether it did.
///
/// # Errors
/// If the log cannot be read, or the file not be written.
pub fn write_if_missing(run: &Path) -> Result<bool, CliError> {
    for entry in fs::read_dir(run).map_err(CliError::io(run))? {
        if is_events(&entry.map_err(CliError::io(run))?.file_name().to_string_lossy()) {
            return Ok(false);
        }
    }
    Events::begin(run).map(|_| true)
}

/// The events of a run.
#[derive(Debug, Clone)]
pub(super) struct Events(PathBuf);

impl Events {
    /// Begins a new file with the figures that the run has logged so far.
    ///
    /// # Errors
    /// If the log cannot be read, or the file not be written.
    pub(super) fn begin(run: &Path) -> Result<Self, CliError> {
        let now = jiff::Timestamp::now();
        let events = Self(run.join(format!("{NAME}{}.train-cli", now.as_second())));
        let mut first = event(0);
        field(&mut first, 3, b"brain.Event:2");
        let logged = log::lines(run, log::METRICS)?;
        let bytes: Vec<u8> =
            std::iter::once(record(&first)).chain(logged.iter().filter_map(of_line)).flatten().collect();
        durable::write_bytes(&events.0, &bytes)?;
        Ok(events)
    }

    /// Adds the figures of a line of the log.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(super) fn add(&self, line: &Logged) -> Result<(), CliError> {
        let Some(bytes) = of_line(line) else { return Ok(()) };
        durable::append_bytes(&self.0, &bytes)
    }
}

/// The record of a line of the log. None if it is that of a step that was left out.
fn of_line(line: &Logged) -> Option<Vec<u8>> {
    let (prefix, step) = match line {
        Logged::Step(made) => ("train", made.step),
        Logged::Evaluation(made) => ("eval", made.step),
        Logged::LeftOut(_) => return None,
    };
    let figures = serde_json::to_value(line).expect("plain data is always valid JSON");
    let mut summary = vec![];
    for (key, value) in figures.as_object()?.iter().filter(|(key, _)| *key != "step") {
        let Some(number) = value.as_f64() else { continue };
        let mut one = vec![];
        field(&mut one, 1, format!("{prefix}/{}", key.trim_start_matches("eval_")).as_bytes());
        one.push(2 << 3 | FIXED_32);
        one.extend((number as f32).to_le_bytes());
        field(&mut summary, 1, &one);
    }
    let mut event = event(step as u64);
    field(&mut event, 5, &summary);
    Some(record(&event)).filter(|_| !summary.is_empty())
}

const VARINT: u8 = 0;
const FIXED_64: u8 = 1;
const BYTES: u8 = 2;
const FIXED_32: u8 = 5;

/// An event of this moment without content.
fn event(step: u64) -> Vec<u8> {
    let seconds = jiff::Timestamp::now().as_millisecond() as f64 / 1e3;
    let mut event = vec![1 << 3 | FIXED_64];
    event.extend(seconds.to_le_bytes());
    event.push(2 << 3 | VARINT);
    varint(&mut event, step);
    event
}

/// Adds a field of bytes to a message.
fn field(message: &mut Vec<u8>, number: u8, bytes: &[u8]) {
    message.push(number << 3 | BYTES);
    varint(message, bytes.len() as u64);
    message.extend(bytes);
}

fn varint(message: &mut Vec<u8>, mut value: u64) {
    while value >= 128 {
        message.push(value as u8 | 128);
        value >>= 7;
    }
    message.push(value as u8);
}

fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    [&length[..], &checksum(&length), data, &checksum(data)].concat()
}

fn checksum(bytes: &[u8]) -> [u8; 4] {
    let crc = Crc::<u32>::new(&CRC_32_ISCSI).checksum(bytes);
    crc.rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::{
        super::log::{LeftOut, StepFigures},
        *,
    };

    /// The bytes after the time, by the rules of protobuf; `doc/notebook/tensorboard_check.py` reads files by TensorBoard.
    #[test]
    fn an_event_is_a_message_of_protobuf() {
        let record = of_line(&Logged::Step(StepFigures { step: 300, loss: 1.5, ..StepFigures::default() })).unwrap();
        let data = &record[12..record.len() - 4];
        assert_eq!(
            data[9..],
            [0x10, 0xac, 0x02, 0x2a, 0x13, 0x0a, 0x11, 0x0a, 0x0a]
                .into_iter()
                .chain(*b"train/loss")
                .chain([0x15, 0x00, 0x00, 0xc0, 0x3f])
                .collect::<Vec<u8>>()
        );
        assert_eq!(checksum(b"123456789"), 0xe306_9283u32.rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes());
    }

    #[test]
    fn a_line_without_figures_is_no_event() {
        let line = LeftOut { step: 3, left_out: "the loss is NaN".into(), rows: vec![] };
        assert!(of_line(&Logged::LeftOut(line)).is_none());
    }
}
