//! Everything that can be wrong with a model's files or with what is asked of the model.

use std::path::{Path, PathBuf};

/// Why a model could not be read, built or run.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The operating system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A file is missing where one is needed.
    #[error("{}: no such file; {hint}", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
        /// What to do.
        hint: String,
    },
    /// config.json has a value that no dense Qwen3 can have.
    #[error("{}: {field} is {value}: {reason}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// The field.
        field: &'static str,
        /// Its value.
        value: String,
        /// Why it is refused.
        reason: String,
    },
    /// A text file is not what it should be.
    #[error("{}: {reason}", path.display())]
    Parse {
        /// The file.
        path: PathBuf,
        /// The parser's words.
        reason: String,
    },
    /// A `.dat` file is broken.
    #[error("{}: {at} at byte {offset}: {reason}", path.display())]
    Dat {
        /// The file.
        path: PathBuf,
        /// Which entry, or the header.
        at: String,
        /// Where in the file.
        offset: u64,
        /// What is wrong there.
        reason: String,
    },
    /// A tensor file does not hold the model that config.json describes.
    #[error("{}: {reason}", path.display())]
    Weights {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong, with up to ten names.
        reason: String,
    },
    /// A chat template failed.
    #[error("chat template: {0}")]
    Template(String),
    /// The tokenizer failed.
    #[error("tokenizer: {0}")]
    Tokenizer(String),
    /// A token id or a length is outside what the model was built for.
    #[error("{what} is {value}, the model takes at most {limit}")]
    TooLarge {
        /// What was asked.
        what: &'static str,
        /// The value.
        value: usize,
        /// The limit.
        limit: usize,
    },
    /// The device failed.
    #[error("device: {0}")]
    Device(String),
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
    /// An I/O error with its path; `hint` says what to do if the file does not exist.
    pub fn io(path: &Path, hint: &str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| match source.kind() {
            std::io::ErrorKind::NotFound => Self::Missing { path: path.to_owned(), hint: hint.to_owned() },
            _ => Self::Io { path: path.to_owned(), source },
        }
    }

    pub(crate) fn parse(path: &Path, reason: impl ToString) -> Self {
        Self::Parse { path: path.to_owned(), reason: reason.to_string() }
    }

    pub(crate) fn weights(path: &Path, reason: impl ToString) -> Self {
        Self::Weights { path: path.to_owned(), reason: reason.to_string() }
    }
}

/// Reads a text file of at most `limit` bytes.
pub(crate) fn read_text(path: &Path, limit: u64, hint: &str) -> Result<String, ModelError> {
    let size = std::fs::metadata(path).map_err(ModelError::io(path, hint))?.len();
    if size > limit {
        return Err(ModelError::parse(path, format!("{size} bytes, at most {limit} are read")));
    }
    let bytes = std::fs::read(path).map_err(ModelError::io(path, hint))?;
    String::from_utf8(bytes).map_err(|e| ModelError::parse(path, format!("not UTF-8: {e}")))
}
