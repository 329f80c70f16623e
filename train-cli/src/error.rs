//! Why a command can fail, and the exit code of each reason.

use crate::{
    interrupt::Signal,
    report::{count, quoted, size},
};
use backend_nvfp4::Nvfp4Error;
use model_qwen3::ModelError;
use std::{
    io::ErrorKind,
    path::{Path, PathBuf},
};

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// Flags or settings do not make sense.
    #[error("{0}")]
    Usage(String),
    /// Training data is invalid.
    #[error(
        "{}{}{}: {reason}",
        path.display(),
        [*line, *column].iter().flatten().map(|n| format!(":{n}")).collect::<String>(),
        row.map(|row| format!(", row {row}")).unwrap_or_default()
    )]
    Data {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: Option<usize>,
        /// The byte of the line, counted from 1.
        column: Option<usize>,
        /// The number of the row, counted from 1, if the line has several.
        row: Option<usize>,
        /// What is wrong.
        reason: String,
    },
    /// The loss or the gradient stopped being finite.
    #[error(
        "diverged at step {step}: {what} is {value}; {}. {hint}",
        if *updated { "the update was applied before the norm was known" } else { "nothing was updated" }
    )]
    Diverged {
        /// The optimizer step.
        step: usize,
        /// `loss` or `gradient norm`.
        what: &'static str,
        /// The value of the loss or norm.
        value: f32,
        /// Whether the step has updated weights.
        updated: bool,
        /// What to do.
        hint: String,
    },
    /// A run needs more device memory than `--memory-limit` allows.
    #[error(
        "{} {} of device memory, but --memory-limit is {}; {}",
        if stopped.is_some() { "the run holds" } else { "the run would need" },
        size(*needed),
        size(*limit),
        beyond_the_limit(stopped.as_ref())
    )]
    Memory {
        /// Bytes that the run needs or holds.
        needed: u64,
        /// The limit in bytes.
        limit: u64,
        /// For a run that was stopped: after which step, and the checkpoint that it left.
        stopped: Option<(usize, Option<PathBuf>)>,
    },
    /// A run would need more memory than is free on its device.
    #[error(
        "the run would need {} on {device}, where {} are free; end other programs that use its memory, or use a smaller \
         --max-seq-length or --batch-size, --optimizer-state-mode int4, or --master-weights nvfp4",
        size(*needed),
        size(*free)
    )]
    Full {
        /// The device.
        device: String,
        /// Bytes that the run would need.
        needed: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// An allocation on the device failed.
    #[error("the device is out of memory{} ({reason}); {remedy}", amounts(reason, *free))]
    OutOfMemory {
        /// What the device said.
        reason: String,
        /// Bytes that are free on it after the failure, if it says so.
        free: Option<u64>,
        /// What to do.
        remedy: &'static str,
    },
    /// The host refused memory.
    #[error(
        "the host is out of memory: {} were asked for in one piece{}; {remedy}",
        size(*bytes),
        free.map(|bytes| format!(", and {} are free now", size(bytes))).unwrap_or_default()
    )]
    HostIsFull {
        /// Bytes that were asked for.
        bytes: u64,
        /// Bytes that are free, if the system says so.
        free: Option<u64>,
        /// What to do.
        remedy: &'static str,
    },
    /// The files of a run do not fit onto the disk.
    #[error(
        "{}: {} {}, but {} are free on this disk; {remedy}",
        path.display(),
        match *checkpoints {
            0 => "the export needs".to_owned(),
            many => format!("{} and the export need", count(many, "checkpoint")),
        },
        size(*needed),
        size(*free)
    )]
    Disk {
        /// Where they would be written.
        path: PathBuf,
        /// Number of checkpoints on this disk.
        checkpoints: usize,
        /// Bytes that the files need.
        needed: u64,
        /// Bytes that are free.
        free: u64,
        /// What to do.
        remedy: String,
    },
    /// A signal asked a run to end.
    #[error(
        "{} ended the run after step {step}{}",
        signal.name(),
        match saved {
            Some(checkpoint) => format!("; it was saved. Resume it with: {}", resuming(checkpoint)),
            None => "; nothing was saved, because of --save-strategy no".to_owned(),
        }
    )]
    Interrupted {
        /// The signal.
        signal: Signal,
        /// Optimizer steps done.
        step: usize,
        /// The checkpoint that was saved.
        saved: Option<PathBuf>,
    },
    /// A signal stopped an answer of a conversation that nobody types.
    #[error("{} stopped the answer, and with it the conversation", .0.name())]
    Stopped(Signal),
    /// A file is damaged, or does not contain what was written to it.
    #[error("{}: {reason}", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A step, an evaluation or sample answers have been waiting for the device for too long.
    #[error(
        "{work} has made no progress for {seconds} s: the device does not answer. Checkpoints that were saved are intact; \
         resume the run with --resume-from-checkpoint"
    )]
    Stuck {
        /// What stands still.
        work: String,
        /// Seconds since its last sign of progress.
        seconds: u64,
    },
    /// An operation on the device failed, and with it every later one.
    #[error(
        "the device failed ({0}); what it computed since is not used. Start the command again; resume a run from its newest \
         checkpoint, which is intact"
    )]
    DeviceFailed(String),
    /// A device is missing or failed.
    #[error("device {device}: {reason}")]
    Device {
        /// The name that the user gave it.
        device: String,
        /// What is wrong.
        reason: String,
    },
    /// The operating system refused to read or write a file.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The model or one of its files is broken.
    #[error(transparent)]
    Model(#[from] ModelError),
}

impl CliError {
    /// The exit code: 1 system, 2 usage and settings, 3 training data, 4 out of memory, 5 diverged, 6 damaged file
    /// or failed check, 7 device, 128 and its number for a signal.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Io { .. } | Self::Disk { .. } => 1,
            Self::Usage(_) => 2,
            Self::Data { .. } => 3,
            Self::Memory { .. } | Self::Full { .. } | Self::OutOfMemory { .. } | Self::HostIsFull { .. } => 4,
            Self::Diverged { .. } => 5,
            Self::Corrupt { .. } => 6,
            Self::Interrupted { signal, .. } | Self::Stopped(signal) => signal.exit_code(),
            Self::DeviceFailed(_) | Self::Device { .. } | Self::Stuck { .. } => 7,
            Self::Model(error) => match error {
                ModelError::Io { .. } => 1,
                ModelError::Memory { .. } | ModelError::Thread { .. } | ModelError::GivenUp { .. } => 4,
                ModelError::Missing { .. } | ModelError::Config { .. } | ModelError::TooLarge { .. } => 2,
                ModelError::Folder { .. } | ModelError::Format { .. } | ModelError::CacheWidth { .. } => 2,
                ModelError::Parse { .. } | ModelError::Template(_) | ModelError::Tokenizer(_) => 2,
                ModelError::Device(_) | ModelError::Nvfp4 { source: Nvfp4Error::Device(_), .. } => 7,
                ModelError::Dat { .. } | ModelError::Weights { .. } | ModelError::Nvfp4 { .. } => 6,
                ModelError::NotANumber => 6,
            },
        }
    }

    /// Whether it is the device that failed or has no memory, so that what it computed is worthless.
    pub(crate) fn is_of_the_device(&self) -> bool {
        matches!(self, Self::OutOfMemory { .. }) || self.exit_code() == 7
    }

    /// The error of results that standard output did not take.
    pub fn unwritten(error: std::io::Error) -> Self {
        Self::io("standard output".as_ref())(error)
    }

    /// The system gave no thread for `what`.
    pub(crate) fn no_thread(what: &'static str) -> impl Fn(std::io::Error) -> Self {
        move |source| ModelError::Thread { what, source }.into()
    }

    pub(crate) fn io(path: &Path) -> impl Fn(std::io::Error) -> Self {
        move |source| Self::Io { path: path.to_owned(), source }
    }

    /// Whether the system refused memory, a thread or the reading of a file. The file may be good.
    pub(crate) fn is_of_the_system(&self) -> bool {
        match self {
            Self::Io { source, .. } | Self::Model(ModelError::Io { source, .. }) => refuses(source),
            other => other.exit_code() == 4,
        }
    }

    /// A file of a checked folder could not be read. The folder is damaged, unless the system refuses to read it.
    pub(crate) fn damaged(path: &Path) -> impl Fn(ModelError) -> Self {
        move |error| match error {
            ModelError::Io { source, .. } if !refuses(&source) => Self::corrupt(path, source),
            ModelError::Missing { .. } => Self::corrupt(path, "there is no such file"),
            ModelError::Parse { reason, .. } => Self::corrupt(path, reason),
            other => other.into(),
        }
    }

    /// Names the flag that gave the path, in the error of a file that is not there or is not what the flag takes.
    pub(crate) fn of_flag(flag: &str) -> impl Fn(ModelError) -> Self {
        move |error| match error {
            ModelError::Missing { .. } | ModelError::Folder { .. } | ModelError::Parse { .. } => {
                Self::Usage(format!("{flag} {error}"))
            }
            error => error.into(),
        }
    }

    /// Something is wrong in a file of data, or in one of its lines.
    pub(crate) fn data(path: &Path, line: Option<usize>, reason: impl ToString) -> Self {
        Self::Data { path: path.to_owned(), line, column: None, row: None, reason: reason.to_string() }
    }

    /// A line of a file is not JSON.
    pub(crate) fn not_json(path: &Path, line: usize, error: &serde_json::Error) -> Self {
        let (below, column, reason) = place_of(error);
        Self::Data { path: path.to_owned(), line: Some(line + below), column, row: None, reason }
    }

    pub(crate) fn corrupt(path: &Path, reason: impl ToString) -> Self {
        Self::Corrupt { path: path.to_owned(), reason: reason.to_string() }
    }
}

/// The number that every Unix gives to a disk which cannot read or write. Rust has no name for it.
const EIO: i32 = 5;

/// Whether the system refuses to read a file that may be good: this user may not read it, or too many files are open. A file
/// that is missing or cut, or that its disk cannot read, is damaged.
fn refuses(error: &std::io::Error) -> bool {
    let damaged = [ErrorKind::NotFound, ErrorKind::UnexpectedEof, ErrorKind::IsADirectory, ErrorKind::NotADirectory];
    let is_damaged = damaged.contains(&error.kind()) || cfg!(unix) && error.raw_os_error() == Some(EIO);
    !is_damaged
}

/// The command that resumes the run of a checkpoint. It names the run by --output-dir, because --resume-from-checkpoint gives
/// `latest`, `false` and `checkpoint-5` other meanings, and would take `-x` for a flag.
fn resuming(checkpoint: &Path) -> String {
    let run = checkpoint.parent().unwrap_or(checkpoint).display().to_string();
    format!("train-cli fit --resume-from-checkpoint --output-dir={}", quoted(&run))
}

/// What to do about a run that needs more memory than its limit allows. A resumed run keeps the settings that change its numbers.
fn beyond_the_limit(stopped: Option<&(usize, Option<PathBuf>)>) -> String {
    let smaller = "a smaller --max-seq-length or --batch-size, --optimizer-state-mode int4, or --master-weights nvfp4";
    match stopped {
        None => format!("use {smaller}"),
        Some((step, None)) => format!(
            "it was stopped after step {step}, and nothing was saved, because of --save-strategy no; start a new run with a \
             larger --memory-limit, or use {smaller}"
        ),
        Some((step, Some(checkpoint))) => format!(
            "it was stopped after step {step} and saved as {}. Only a new run can take {smaller}. The stopped run can be \
             resumed with --recompute always and --undo-copy false, which save memory, or with a larger limit: {} \
             --memory-limit SIZE",
            checkpoint.display(),
            resuming(checkpoint)
        ),
    }
}

/// Where a JSON text is broken, and how: lines below its first, the byte of the line, counted from 1, and the reason.
pub(crate) fn place_of(error: &serde_json::Error) -> (usize, Option<usize>, String) {
    let (line, column, text) = (error.line(), error.column(), error.to_string());
    let said = text.strip_suffix(&format!(" at line {line} column {column}")).unwrap_or(&text);
    // An error without a place says line 0.
    (line.saturating_sub(1), (line > 0).then_some(column), format!("not JSON: {said}"))
}

/// What was asked for and what is free, as far as the device says. It names the size of a buffer in its message only.
fn amounts(reason: &str, free: Option<u64>) -> String {
    let digits = reason.split_once("size: ").map(|(_, rest)| rest.split(|c: char| !c.is_ascii_digit()).next());
    let asked: Option<u64> = digits.flatten().and_then(|digits| digits.parse().ok());
    let asked = asked.map(|bytes| format!("{} were asked for in one piece", size(bytes)));
    let free = free.map(|bytes| format!("{} are free now", size(bytes)));
    match (asked, free) {
        (None, None) => String::new(),
        (Some(one), None) | (None, Some(one)) => format!(": {one}"),
        (Some(asked), Some(free)) => format!(": {asked}, and {free}"),
    }
}
