//! Reading files: small text files within a limit, and ranges of large ones.

use crate::ModelError;
use std::{
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::Path,
};

/// Reads a text file of at most `limit` bytes. `hint` says what to do if there is no such file.
pub(crate) fn read_text(path: &Path, limit: u64, hint: &str) -> Result<String, ModelError> {
    let size = std::fs::metadata(path).map_err(ModelError::io(path, hint))?.len();
    if size > limit {
        return Err(ModelError::parse(path, format!("the file has {size} bytes; at most {limit} are read")));
    }
    let bytes = std::fs::read(path).map_err(ModelError::io(path, hint))?;
    String::from_utf8(bytes).map_err(|e| ModelError::parse(path, format!("the file is not UTF-8: {e}")))
}

/// Fills `buffer` from byte `offset` of a file.
pub(crate) fn read_at(mut file: &File, path: &Path, offset: u64, buffer: &mut [u8]) -> Result<(), ModelError> {
    file.seek(SeekFrom::Start(offset)).and_then(|_| file.read_exact(buffer)).map_err(ModelError::io(path, ""))
}
