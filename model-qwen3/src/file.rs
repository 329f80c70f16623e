//! Reads files: only regular ones, small files whole and within a limit, and ranges of large ones. A size that a file declares,
//! even its own length, cannot end the process: if the machine does not have that much memory, reading is an error.

use crate::ModelError;
use backend_nvfp4::host_memory;
use positioned_io::ReadAt;
use std::{fs::File, io::Read, path::Path};

/// Opens a file and returns its size. Pipes and devices are refused: they may never end. `hint` says what to do if there is
/// no such file.
///
/// # Errors
/// If there is no such file, or it is not a regular one.
pub fn open(path: &Path, hint: &str) -> Result<(File, u64), ModelError> {
    // Opening a pipe would wait for whoever writes to it.
    let metadata = std::fs::metadata(path).map_err(ModelError::io(path, hint))?;
    if !metadata.is_file() {
        let what = if metadata.is_dir() { "a folder" } else { "a pipe or a device" };
        return Err(ModelError::parse(path, format!("this is {what}; a regular file is needed")));
    }
    let file = File::open(path).map_err(ModelError::io(path, hint))?;
    Ok((file, metadata.len()))
}

/// Reads a text file of at most `limit` bytes. `hint` says what to do if there is no such file.
///
/// # Errors
/// If there is no such file, or it is too large or not UTF-8.
pub fn read_text(path: &Path, limit: u64, hint: &str) -> Result<String, ModelError> {
    let bytes = read_bytes(path, limit, hint)?;
    String::from_utf8(bytes).map_err(|e| ModelError::parse(path, format!("the file is not UTF-8: {e}")))
}

/// A text without the byte order mark that some editors put in front of it.
pub fn without_mark(text: &str) -> &str {
    text.trim_start_matches('\u{feff}')
}

/// Reads a file of at most `limit` bytes. `hint` says what to do if there is no such file.
///
/// # Errors
/// If there is no such file, it is too large, or the machine has not the memory.
pub fn read_bytes(path: &Path, limit: u64, hint: &str) -> Result<Vec<u8>, ModelError> {
    let (file, size) = open(path, hint)?;
    if size > limit {
        return Err(ModelError::parse(path, format!("the file has {size} bytes; at most {limit} are read")));
    }
    let mut bytes = room(path, size)?;
    file.take(limit).read_to_end(&mut bytes).map_err(ModelError::io(path, hint))?;
    Ok(bytes)
}

/// Fills `buffer` from byte `offset` of a file. Several threads may read one file.
pub(crate) fn read_at(file: &File, path: &Path, offset: u64, buffer: &mut [u8]) -> Result<(), ModelError> {
    file.read_exact_at(offset, buffer).map_err(ModelError::io(path, ""))
}

/// As many zeros, to be filled from a file.
pub(crate) fn zeros(path: &Path, bytes: u64) -> Result<Vec<u8>, ModelError> {
    let mut buffer = room(path, bytes)?;
    buffer.resize(bytes as usize, 0);
    Ok(buffer)
}

/// An empty buffer for so many bytes of a file.
fn room(path: &Path, bytes: u64) -> Result<Vec<u8>, ModelError> {
    let mut buffer = Vec::new();
    let mut reserves = |bytes| host_memory::may_be_refused(|| buffer.try_reserve_exact(bytes).is_ok());
    let reserved = usize::try_from(bytes).is_ok_and(&mut reserves);
    if reserved { Ok(buffer) } else { Err(ModelError::Memory { path: path.to_owned(), bytes }) }
}
