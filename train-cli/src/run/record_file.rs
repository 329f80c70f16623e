//! A record in the folder of a run: a JSON file that is read whole, if it is there.

use crate::CliError;
use model_qwen3::{file, json};
use serde::de::DeserializeOwned;
use std::path::Path;

/// Reads a record of at most `limit` bytes. None if there is none.
///
/// # Errors
/// If it cannot be read, or is broken.
pub(super) fn read<T: DeserializeOwned>(path: &Path, limit: u64) -> Result<Option<T>, CliError> {
    if !path.exists() {
        return Ok(None);
    }
    let text = file::read_text(path, limit, "")?;
    json::parse(&text).and_then(serde_json::from_value).map(Some).map_err(|e| CliError::corrupt(path, e))
}
