//! Everything that can be wrong with a model's files, or with what a caller wants from the model.

use crate::limits::Limit;
use std::path::{Path, PathBuf};

/// Why a model could not be read, built or run.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The operating system refused to read or write a file.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file does not exist.
    #[error("{}: no such file{}{hint}", path.display(), if hint.is_empty() { "" } else { "; " })]
    Missing {
        /// The file.
        path: PathBuf,
        /// What to do. May be empty.
        hint: String,
    },
    /// The machine has not the memory for what a file holds.
    #[error(
        "{}: {bytes} bytes of this file must be in memory at once, and this machine does not have so much free; end other \
         programs, or use a smaller file",
        path.display()
    )]
    Memory {
        /// The file.
        path: PathBuf,
        /// The bytes that were asked for.
        bytes: u64,
    },
    /// A folder does not hold the weights of exactly one model.
    #[error("{}: {reason}", path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// What it holds instead, and what to do.
        reason: String,
    },
    /// config.json has a value that no dense Qwen3 has.
    #[error("{}: {field} is {value}: {reason}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// The field.
        field: &'static str,
        /// The field's value.
        value: String,
        /// Why the value is refused.
        reason: String,
    },
    /// A text file could not be parsed.
    #[error("{}: {reason}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// The parser's message.
        reason: String,
    },
    /// A `.dat` file is broken.
    #[error("{}: {at} at byte {offset}: {reason}; the file is damaged or not a .dat file", path.display())]
    Dat {
        /// The file.
        path: PathBuf,
        /// The entry, or the header.
        at: String,
        /// The position in the file.
        offset: u64,
        /// What is wrong there.
        reason: String,
    },
    /// A safetensors file is broken, or the tensors of a file do not make the model that config.json describes.
    #[error("{}: {reason}", path.display())]
    Weights {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong, with up to ten names.
        reason: String,
    },
    /// The number format of an output cannot hold what a file holds.
    #[error("{}: {reason}", path.display())]
    Format {
        /// The file with the values.
        path: PathBuf,
        /// What cannot be held, and what to do.
        reason: String,
    },
    /// The operating system gave no thread.
    #[error(
        "the system gives no thread for the {what}: {source}; it is out of memory, or of threads (ulimit -v, ulimit -u)"
    )]
    Thread {
        /// What the thread was for.
        what: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Earlier work took too much and still keeps its threads.
    #[error("{what}: {limit}")]
    GivenUp {
        /// What is not tried.
        what: &'static str,
        /// Why.
        limit: Limit,
    },
    /// The chat template failed.
    #[error("chat template: {0}")]
    Template(String),
    /// The tokenizer failed.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// A cache of 8-bit numbers cannot hold a token of this model.
    #[error(
        "a token has {width} key numbers, but a cache of 8-bit numbers takes a multiple of 4; leave --kv-cache-dtype out"
    )]
    CacheWidth {
        /// The key numbers of a token.
        width: usize,
    },
    /// A token id or a length is beyond what the model was built for.
    #[error("{what} is {value}; the model takes at most {limit}")]
    TooLarge {
        /// What is too large.
        what: &'static str,
        /// The value that is too large.
        value: usize,
        /// The limit.
        limit: usize,
    },
    /// The device failed.
    #[error("device: {0}")]
    Device(String),
    /// The model computed something that is no number.
    #[error("the model computed NaN: its weights are broken, or the number format overflows; try --compute-dtype f32")]
    NotANumber,
    /// A packed tensor is invalid, or a read from the device failed.
    #[error("{name}: {source}")]
    Nvfp4 {
        /// The tensor.
        name: String,
        /// What is wrong.
        source: backend_nvfp4::Nvfp4Error,
    },
}

impl ModelError {
    /// Makes an error of a limit that the work named `what` reached. `otherwise` makes it of one that the file is the reason for.
    pub fn limited<Failure: From<Self>>(
        what: &'static str,
        limit: Limit,
        otherwise: impl FnOnce(Limit) -> Failure,
    ) -> Failure {
        match limit {
            Limit::Thread(source) => Self::Thread { what, source }.into(),
            limit @ Limit::GivenUp(_) => Self::GivenUp { what, limit }.into(),
            limit => otherwise(limit),
        }
    }

    /// Makes an I/O error of a file. `hint` says what to do if the file does not exist.
    pub fn io(path: &Path, hint: &str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| match source.kind() {
            std::io::ErrorKind::NotFound => Self::Missing { path: path.to_owned(), hint: hint.to_owned() },
            _ => Self::Io { path: path.to_owned(), source },
        }
    }

    pub(crate) fn parse(path: &Path, reason: impl ToString) -> Self {
        Self::Parse { path: path.to_owned(), reason: reason.to_string() }
    }

    pub(crate) fn folder(path: &Path, reason: impl ToString) -> Self {
        Self::Folder { path: path.to_owned(), reason: reason.to_string() }
    }

    pub(crate) fn weights(path: &Path, reason: impl ToString) -> Self {
        Self::Weights { path: path.to_owned(), reason: reason.to_string() }
    }

    /// A tensor that is needed does not exist.
    pub(crate) fn missing(path: &Path, name: &str) -> Self {
        Self::weights(path, format!("there is no tensor {name:?}"))
    }

    /// Names the tensor of an NVFP4 error.
    pub(crate) fn nvfp4(name: &str) -> impl Fn(backend_nvfp4::Nvfp4Error) -> Self {
        move |source| Self::Nvfp4 { name: name.to_owned(), source }
    }
}
