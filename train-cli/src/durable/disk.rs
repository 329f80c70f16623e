//! Operations on folders and names. What they change is synced.

use crate::CliError;
use std::{
    fs::{self, File},
    path::Path,
};

/// Makes a folder and the folders above it, where they do not exist, and syncs the names of what it makes.
///
/// # Errors
/// If the system fails.
pub fn make_folder(path: &Path) -> Result<(), CliError> {
    if path.is_dir() {
        return Ok(());
    }
    make_folder(parent(path))?;
    match fs::create_dir(path) {
        // Another process has just made it.
        Err(_) if path.is_dir() => Ok(()),
        Err(error) => Err(CliError::io(path)(error)),
        Ok(()) => sync_folder(parent(path)),
    }
}

/// Makes a folder, and the folders above it where they do not exist. Returns whether the folder is new: of several processes
/// that make it at once, one gets `true`.
///
/// # Errors
/// If the system fails.
pub fn make_new_folder(path: &Path) -> Result<bool, CliError> {
    make_folder(parent(path))?;
    match fs::create_dir(path) {
        Ok(()) => sync_folder(parent(path)).map(|()| true),
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(CliError::io(path)(error)),
    }
}

/// Removes a file, or a folder with everything in it.
///
/// # Errors
/// If the system fails.
pub fn remove(path: &Path) -> Result<(), CliError> {
    let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    removed.map_err(CliError::io(path))
}

/// Removes a folder that holds nothing.
///
/// # Errors
/// If it holds something, or the system fails.
pub fn remove_empty(folder: &Path) -> Result<(), CliError> {
    fs::remove_dir(folder).map_err(CliError::io(folder))
}

/// Renames a file or a folder.
///
/// # Errors
/// If the system fails.
pub fn rename(from: &Path, to: &Path) -> Result<(), CliError> {
    fs::rename(from, to).map_err(CliError::io(from))?;
    sync_folder(parent(to))
}

/// Whether a path is that of an open file.
#[cfg(unix)]
pub(super) fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let same = |a: fs::Metadata, b: fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
    file.metadata().is_ok_and(|file| path.metadata().is_ok_and(|found| same(file, found)))
}

/// Elsewhere an open file cannot be removed.
#[cfg(not(unix))]
pub(super) fn is_at(_: &File, _: &Path) -> bool {
    true
}

/// Asks the system to drop its cached copy of a synced file, so that the next read comes from the disk.
#[cfg(target_os = "linux")]
pub(super) fn forget_cached(path: &Path) {
    // If the system keeps the copy, the file is read from memory.
    if let Ok(file) = File::open(path) {
        let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
    }
}

/// Elsewhere the file may be read from memory.
#[cfg(not(target_os = "linux"))]
pub(super) fn forget_cached(_: &Path) {}

/// The folder that holds a file or folder: `.` for a mere name.
pub fn parent(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Syncs the names in a folder. An error has its whole path, because a message about `.` would help nobody.
pub(super) fn sync_folder(folder: &Path) -> Result<(), CliError> {
    let whole = || std::path::absolute(folder).unwrap_or_else(|_| folder.to_owned());
    File::open(folder).and_then(|f| f.sync_all()).map_err(|e| CliError::io(&whole())(e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_cannot_be_synced_is_named_by_its_whole_path() {
        let text = sync_folder(&Path::new(".").join("no-such-folder")).unwrap_err().to_string();
        let whole = std::env::current_dir().unwrap().join("no-such-folder");
        assert!(text.starts_with(&whole.display().to_string()), "{text}");
    }
}
