//! How a run was made: the command lines that started and resumed it, the number of its steps, and why it ended before the last
//! one. `run.json` in its folder holds this.

use super::{checkpoint::CONFIG, record_file};
use crate::{CliError, durable, report};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The file in the run folder.
pub const RECORD: &str = "run.json";
/// Largest record that is read. A command line may name thousands of files, and the record keeps every command line that made
/// steps.
const LARGEST: u64 = 64 << 20;

/// How a run was made. A record of an older version may not have all.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct History {
    /// The command line that started it.
    #[serde(flatten)]
    pub first: Call,
    /// Those that resumed it, and made steps of the model that is there now.
    pub resumed: Vec<Call>,
    /// Steps of the whole run.
    pub steps: Option<usize>,
    /// Why it ended before its last step, or before its export. None if it did not, if it still runs, or if its process could not
    /// say: it was killed, stood still, or had a bug.
    pub ended: Option<String>,
}

/// Whether a folder is that of a run. A model folder may have a config.toml too, but no record of a run.
pub fn is_run(folder: &Path) -> bool {
    [CONFIG, RECORD].iter().all(|file| folder.join(file).is_file())
}

/// A command line of a run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Call {
    /// The version of the program.
    pub version: String,
    /// The words of the command, the program's name first.
    pub command: Vec<String>,
    /// When it was given.
    pub started: String,
    /// The step after which it began.
    pub after: usize,
}

impl History {
    /// Reads the record of a run. None if there is none.
    ///
    /// # Errors
    /// If it cannot be read, or is broken.
    pub fn read(run: &Path) -> Result<Option<Self>, CliError> {
        record_file::read(&run.join(RECORD), LARGEST)
    }

    /// All command lines, in order.
    pub fn calls(&self) -> impl Iterator<Item = &Call> {
        std::iter::once(&self.first).chain(&self.resumed)
    }

    /// This history, continued by `call` in a run that now has `steps` steps. What was resumed at the same step or later has made
    /// nothing that is still there.
    fn continued(mut self, call: Call, steps: usize) -> Self {
        self.resumed.retain(|earlier| earlier.after < call.after);
        self.resumed.push(call);
        Self { steps: Some(steps), ended: None, ..self }
    }

    fn write(&self, run: &Path) -> Result<(), CliError> {
        let text = serde_json::to_string(self).expect("plain data is always valid JSON");
        durable::write_bytes(&run.join(RECORD), text.as_bytes()).map(|_| ())
    }
}

impl Call {
    /// The command line of this process, which begins after step `after`.
    fn now(after: usize) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            command: std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect(),
            started: jiff::Timestamp::now().to_string(),
            after,
        }
    }

    /// The command line as a shell reads it.
    pub fn line(&self) -> String {
        let words: Vec<String> = self.command.iter().skip(1).map(|word| report::quoted(word)).collect();
        format!("train-cli {}", words.join(" "))
    }

    /// When it was given, to the second.
    pub fn time(&self) -> &str {
        self.started.split('.').next().unwrap_or(&self.started)
    }
}

/// Writes the record of a run of `steps` steps that begins now. `earlier` is its record if it has begun before and made no
/// checkpoint.
///
/// # Errors
/// If it cannot be written.
pub(super) fn begin(run: &Path, earlier: Option<History>, steps: usize) -> Result<(), CliError> {
    add(run, earlier, 0, steps)
}

/// Adds to the record of a run that it is resumed after step `after`, and has `steps` steps from now on.
///
/// # Errors
/// If it cannot be written.
pub fn resume(run: &Path, after: usize, steps: usize) -> Result<(), CliError> {
    // A broken record keeps nobody from training.
    add(run, History::read(run).unwrap_or_default(), after, steps)
}

/// Adds the command line of this process, which begins after step `after`, to an earlier record if there is one.
fn add(run: &Path, earlier: Option<History>, after: usize, steps: usize) -> Result<(), CliError> {
    let call = Call::now(after);
    let history = match earlier {
        Some(earlier) => earlier.continued(call, steps),
        None => History { first: call, steps: Some(steps), ..History::default() },
    };
    history.write(run)
}

/// Adds to the record of a run why it ended, if it ended early.
///
/// # Errors
/// If the record cannot be read or written.
pub fn end(run: &Path, reason: Option<String>) -> Result<(), CliError> {
    match History::read(run)? {
        Some(history) if history.ended != reason => History { ended: reason, ..history }.write(run),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_has_the_command_lines_whose_steps_are_there() {
        let call = |after: usize| Call { after, ..Call::default() };
        let mut history = History { first: call(0), steps: Some(4), ..History::default() };
        let mut resumed = |after: usize| {
            history = History { ended: Some("SIGTERM ended it".into()), ..history.clone() }.continued(call(after), 9);
            assert_eq!((history.steps, &history.ended), (Some(9), &None));
            history.calls().map(|call| call.after).collect::<Vec<_>>()
        };
        assert_eq!(resumed(4), [0, 4]);
        assert_eq!(resumed(6), [0, 4, 6]);
        // It made no step, or the run went back behind its steps.
        assert_eq!(resumed(6), [0, 4, 6]);
        assert_eq!(resumed(2), [0, 2]);
    }

    #[test]
    fn a_record_of_an_older_version_is_read_and_continued() {
        let run = tempfile::tempdir().unwrap();
        let old = r#"{"version": "0.1.0", "command": ["x", "fit", "-d", "two words"], "started": "2026-01-02T03:04:05.678Z"}"#;
        std::fs::write(run.path().join(RECORD), old).unwrap();
        let first = History::read(run.path()).unwrap().unwrap();
        assert_eq!(
            (first.first.line(), first.first.time()),
            ("train-cli fit -d 'two words'".into(), "2026-01-02T03:04:05")
        );
        assert_eq!((first.steps, first.resumed.len(), &first.ended), (None, 0, &None));
        resume(run.path(), 3, 7).unwrap();
        end(run.path(), Some("SIGINT ended it".into())).unwrap();
        let now = History::read(run.path()).unwrap().unwrap();
        assert_eq!((&now.first, now.resumed[0].after, now.steps), (&first.first, 3, Some(7)));
        assert_eq!(now.ended.as_deref(), Some("SIGINT ended it"));
    }
}
