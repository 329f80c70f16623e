//! The logs of a run: files with one JSON object a line. `metrics.jsonl` has a line for each step, each evaluation and each step
//! that was left out, `samples.jsonl` one for each sample answer. Lines are appended without waiting for the disk.

use crate::{CliError, durable};
use model_qwen3::{file, json};
use serde::{Deserialize, Deserializer, Serialize, de::DeserializeOwned};
use std::path::Path;

/// The log of steps and evaluations.
pub(super) const METRICS: &str = "metrics.jsonl";
/// The log of sample answers.
pub(super) const SAMPLES: &str = "samples.jsonl";
/// Largest log that is read. The metrics of a million steps have about 250 MB.
const LARGEST: u64 = 4 << 30;

/// A line of the log of steps and evaluations.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum Logged {
    Step(StepFigures),
    Evaluation(EvaluationFigures),
    LeftOut(LeftOut),
}

/// The figures of a step. A log of an older version may not have all.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct StepFigures {
    /// Counted from 1.
    pub(super) step: usize,
    /// Passes over the data.
    pub(super) epoch: Option<f64>,
    /// Mean loss of a supervised token.
    pub(super) loss: f64,
    /// Global gradient norm before clipping.
    pub(super) grad_norm: Option<f64>,
    pub(super) learning_rate: Option<f64>,
    /// Without padding.
    pub(super) tokens_per_second: Option<f64>,
    /// Device memory after the step.
    pub(super) memory_mib: Option<u64>,
    /// The most device memory during the step.
    pub(super) peak_memory_mib: Option<u64>,
    /// What the model computes in a second, in TFLOP.
    pub(super) model_tflops: Option<f64>,
    /// The share of the device's peak that this is.
    pub(super) mfu: Option<f64>,
    /// Blocks that are frozen on their codes.
    pub(super) frozen_blocks: Option<usize>,
}

/// The figures of an evaluation.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct EvaluationFigures {
    /// The step before.
    pub(super) step: usize,
    /// Mean loss of a supervised token under the run's recipe. JSON has no NaN: it is null.
    #[serde(deserialize_with = "or_nan")]
    pub(super) eval_loss: f64,
    pub(super) eval_perplexity: Option<f64>,
    /// With quantized weights and nothing else quantized.
    #[serde(alias = "eval_loss_quantised")]
    pub(super) eval_loss_quantized: Option<f64>,
    /// With nothing quantized.
    pub(super) eval_loss_master: Option<f64>,
    /// Percentage of the NVFP4 codes that differ from those before the first step.
    pub(super) codes_changed_pct: Option<f64>,
}

/// A step that was left out.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct LeftOut {
    pub(super) step: usize,
    /// Why.
    pub(super) left_out: String,
    /// The places of its rows.
    #[serde(default)]
    pub(super) rows: Vec<String>,
}

/// An answer to a sample prompt.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct SampleAnswer {
    /// The step before.
    pub(super) step: usize,
    pub(super) prompt: String,
    pub(super) answer: String,
}

fn or_nan<'de, Source: Deserializer<'de>>(source: Source) -> Result<f64, Source::Error> {
    Option::deserialize(source).map(|number| number.unwrap_or(f64::NAN))
}

/// Adds a line to a log of a run.
///
/// # Errors
/// If the file cannot be written.
pub(super) fn append(run: &Path, log: &str, line: &impl Serialize) -> Result<(), CliError> {
    let text = serde_json::to_string(line).expect("plain data is always valid JSON");
    durable::append_line(&run.join(log), &text)
}

/// The lines of a log; none if there is no such file. A line that is not whole is left out: a power failure may leave half a
/// line, or zeros.
///
/// # Errors
/// If the file cannot be read.
pub(super) fn lines<Wanted: DeserializeOwned>(run: &Path, log: &str) -> Result<Vec<Wanted>, CliError> {
    Ok(parsed(run, log)?.into_iter().map(|(_, line)| line).collect())
}

/// The number of steps of a run that were left out, as its log has them.
///
/// # Errors
/// If the log cannot be read.
pub fn steps_left_out(run: &Path) -> Result<usize, CliError> {
    let all: Vec<Logged> = lines(run, METRICS)?;
    Ok(all.iter().filter(|line| matches!(line, Logged::LeftOut(_))).count())
}

/// Removes the lines of steps after `step`, which the resumed run logs again.
///
/// # Errors
/// If a file cannot be written.
pub(super) fn drop_after(run: &Path, step: usize) -> Result<(), CliError> {
    for log in [METRICS, SAMPLES].into_iter().filter(|log| run.join(log).exists()) {
        let kept = parsed(run, log)?.into_iter().filter(|(_, after): &(_, After)| after.step <= step);
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

/// What every line says.
#[derive(Deserialize)]
struct After {
    step: usize,
}

/// The whole lines of a log, and what they say.
fn parsed<Wanted: DeserializeOwned>(run: &Path, log: &str) -> Result<Vec<(String, Wanted)>, CliError> {
    let path = run.join(log);
    if !path.exists() {
        return Ok(vec![]);
    }
    let bytes = file::read_bytes(&path, LARGEST, "")?;
    let text = String::from_utf8_lossy(&bytes);
    let wanted = |line: &str| json::parse(line).and_then(serde_json::from_value).ok();
    // A list would also be read as a type with so many fields.
    Ok(text
        .lines()
        .filter(|line| line.starts_with('{'))
        .filter_map(|line| Some((line.to_owned(), wanted(line)?)))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn a_log_of_an_older_version_is_read() {
        let run = tempfile::tempdir().unwrap();
        let text = "{\"step\": 2, \"loss\": 3.5}\n\
                    {\"step\": 3, \"eval_loss\": 2.5, \"eval_loss_quantised\": 2.75}\n\
                    {\"step\": 4, \"eval_loss\": null}\n\
                    {\"step\": 5, \"left_out\": \"the loss is NaN\", \"rows\": [\"a.tsv:1\"]}\n\
                    {\"step\": 6}\nhalf a li";
        std::fs::write(run.path().join(METRICS), text).unwrap();
        let found: Vec<Logged> = lines(run.path(), METRICS).unwrap();
        let [
            Logged::Step(step),
            Logged::Evaluation(evaluated),
            Logged::Evaluation(no_number),
            Logged::LeftOut(left_out),
        ] = &found[..]
        else {
            panic!("{found:?}")
        };
        assert_eq!((step.step, step.loss, step.grad_norm), (2, 3.5, None));
        assert_eq!((evaluated.eval_loss, evaluated.eval_loss_quantized), (2.5, Some(2.75)));
        assert!(no_number.eval_loss.is_nan());
        assert_eq!(left_out.rows, ["a.tsv:1"]);
        // What is written anew has the names of this version, and null for what is no number.
        let written = serde_json::to_value(evaluated).unwrap();
        assert_eq!((&written["eval_loss_quantized"], &written["eval_loss_master"]), (&json!(2.75), &Value::Null));
        assert_eq!(serde_json::to_value(no_number).unwrap()["eval_loss"], Value::Null);
    }
}
