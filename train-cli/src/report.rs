//! The only code that prints. Results go to standard output, progress and messages to standard
//! error, one plain line each, so that either can be kept in a file.

use crate::CliError;
use backend_nvfp4::Precision;
use std::io::Write;

/// A line of progress.
pub fn line(text: impl AsRef<str>) {
    to_stderr(&format!("{}\n", text.as_ref()));
}

/// A labelled line of the header.
pub fn label(name: &str, text: impl AsRef<str>) {
    to_stderr(&format!("  {name:<9} {}\n", text.as_ref()));
}

/// A line of result.
pub fn result(text: impl AsRef<str>) {
    stream(&format!("{}\n", text.as_ref()));
}

/// Text of an answer as it grows.
pub fn stream(text: &str) {
    // A closed pipe ends the output, not the run.
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// What runs where: nothing is chosen silently.
pub fn chosen_device(device: &str, precision: Precision) {
    label("device", format!("{device} · {}", precision.name()));
}

/// An error with its causes.
pub fn error(error: &CliError) {
    line(format!("error: {error}"));
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        let text = inner.to_string();
        if !error.to_string().contains(&text) {
            line(format!("caused by: {text}"));
        }
        cause = inner.source();
    }
}

/// A count with a unit: 1.2k, 3.4M.
pub fn short(value: f64) -> String {
    match value {
        v if v >= 1e9 => format!("{:.2}B", v / 1e9),
        v if v >= 1e6 => format!("{:.1}M", v / 1e6),
        v if v >= 1e4 => format!("{:.1}k", v / 1e3),
        v => format!("{v:.0}"),
    }
}

/// Seconds as m:ss or h:mm:ss.
pub fn duration(seconds: f64) -> String {
    let s = seconds.max(0.0).round() as u64;
    if s >= 3600 {
        format!("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60)
    } else {
        format!("{}:{:02}", s / 60, s % 60)
    }
}

fn to_stderr(text: &str) {
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}
