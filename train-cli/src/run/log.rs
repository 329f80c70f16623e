//! The logs of a run: files with one JSON object a line. `metrics.jsonl` has a line for each step and each evaluation,
//! `samples.jsonl` one for each sample answer. Lines are appended without waiting for the disk.

use crate::{CliError, durable};
use model_qwen3::{file, json};
use serde_json::Value;
use std::path::Path;

/// The log of steps and evaluations.
pub(super) const METRICS: &str = "metrics.jsonl";
/// The log of sample answers.
pub(super) const SAMPLES: &str = "samples.jsonl";
/// Largest log that is read. The metrics of a million steps have about 250 MB.
const LARGEST: u64 = 4 << 30;

/// Adds a line to a log of a run.
///
/// # Errors
/// If the file cannot be written.
pub(super) fn append(run: &Path, log: &str, line: &Value) -> Result<(), CliError> {
    durable::append_line(&run.join(log), &line.to_string())
}

/// The lines of a log; none if there is no such file. A line that is not whole is left out: a power failure may leave half a
/// line, or zeros. A key that was renamed has its new name.
///
/// # Errors
/// If the file cannot be read.
pub(super) fn lines(run: &Path, log: &str) -> Result<Vec<Value>, CliError> {
    Ok(parsed(run, log)?.into_iter().map(|(_, value)| renamed(value)).collect())
}

/// A line of an older version with the keys of this one.
fn renamed(mut line: Value) -> Value {
    if let Some(keys) = line.as_object_mut()
        && let Some(loss) = keys.remove("eval_loss_quantised")
    {
        keys.insert("eval_loss_quantized".into(), loss);
    }
    line
}

/// Removes the lines of steps after `step`, which the resumed run logs again.
///
/// # Errors
/// If a file cannot be written.
pub(super) fn drop_after(run: &Path, step: usize) -> Result<(), CliError> {
    for log in [METRICS, SAMPLES].into_iter().filter(|log| run.join(log).exists()) {
        let kept = |value: &Value| value["step"].as_u64().is_some_and(|made| made as usize <= step);
        let kept = parsed(run, log)?.into_iter().filter(|(_, value)| kept(value));
        let text: String = kept.flat_map(|(line, _)| [line, "\n".to_owned()]).collect();
        durable::write_bytes(&run.join(log), text.as_bytes())?;
    }
    Ok(())
}

/// Waits until the lines so far are on the disk.
///
/// # Errors
/// If the system refuses.
pub(super) fn sync(run: &Path) -> Result<(), CliError> {
    [METRICS, SAMPLES].iter().try_for_each(|log| durable::sync_file(&run.join(log)))
}

/// The whole lines of a log, and their values.
fn parsed(run: &Path, log: &str) -> Result<Vec<(String, Value)>, CliError> {
    let path = run.join(log);
    if !path.exists() {
        return Ok(vec![]);
    }
    let bytes = file::read_bytes(&path, LARGEST, "")?;
    let text = String::from_utf8_lossy(&bytes);
    Ok(text.lines().filter_map(|line| Some((line.to_owned(), json::parse(line).ok()?))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_of_an_older_version_is_read() {
        let run = tempfile::tempdir().unwrap();
        let text = "{\"step\": 3, \"eval_loss\": 2.5, \"eval_loss_quantised\": 2.75}\nhalf a li";
        std::fs::write(run.path().join(METRICS), text).unwrap();
        let expected = serde_json::json!({"step": 3, "eval_loss": 2.5, "eval_loss_quantized": 2.75});
        assert_eq!(lines(run.path(), METRICS).unwrap(), [expected]);
    }
}
