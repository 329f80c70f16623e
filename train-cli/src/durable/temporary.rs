//! Temporary names. A process writes under one and holds a lock on what it writes, so that others know whether it lives. A folder
//! that is removed has one until all of it is gone.

use super::disk::{is_at, parent, remove, rename};
use crate::CliError;
use std::{
    fs::{self, File, OpenOptions},
    io,
    path::{Path, PathBuf},
};

/// Whether a file or folder of this name is temporary.
pub fn is_temporary(name: &str) -> bool {
    let process = name.strip_prefix(TEMPORARY).and_then(|rest| rest.split_once('-'));
    name == PROBE || process.is_some_and(|(id, _)| !id.is_empty() && id.bytes().all(|b| b.is_ascii_digit()))
}

/// The start of a temporary name. The number of the process follows, a hyphen, and the name that the file will get.
const TEMPORARY: &str = ".tmp-";
/// The file of [`super::probe`].
pub(super) const PROBE: &str = ".tmp-probe";

/// Removes temporary files that a process left in a folder when it died.
///
/// # Errors
/// If the folder cannot be read or cleaned.
pub fn sweep(folder: &Path) -> Result<(), CliError> {
    for entry in fs::read_dir(folder).map_err(CliError::io(folder))? {
        let path = entry.map_err(CliError::io(folder))?.path();
        if path.file_name().is_some_and(|n| is_temporary(&n.to_string_lossy())) {
            remove_unless_held(&path)?;
        }
    }
    Ok(())
}

/// Removes a file, or a folder with everything in it, unless it is temporary and a process that lives writes it.
///
/// # Errors
/// If the system fails.
pub fn remove_unless_held(path: &Path) -> Result<(), CliError> {
    if !path.file_name().is_some_and(|name| is_temporary(&name.to_string_lossy())) {
        return remove(path);
    }
    match opened(path) {
        // The lock is held here until the file is gone, so that nobody else removes it. A system that locks no such file
        // does not keep it either.
        Ok(file) => match file.try_lock() {
            Err(fs::TryLockError::WouldBlock) => Ok(()),
            Ok(()) | Err(fs::TryLockError::Error(_)) => remove(path),
        },
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(_) => remove(path),
    }
}

/// Removes a folder. It gets a temporary name first, so that a process that is killed meanwhile leaves no part of it under its own.
///
/// # Errors
/// If the system fails. What is then left has the temporary name, or is the whole folder.
pub fn remove_folder(folder: &Path) -> Result<(), CliError> {
    let aside = sibling(folder);
    rename(folder, &aside)?;
    remove(&aside)
}

/// Removes the temporary files of this target that processes left when they died: whoever writes one holds a lock on it,
/// which ends with the process. An export of 4B parameters leaves gigabytes.
pub(super) fn sweep_abandoned(target: &Path) -> Result<(), CliError> {
    let folder = parent(target);
    let end = format!("-{}", target.file_name().unwrap_or_default().to_string_lossy());
    let Ok(entries) = fs::read_dir(folder) else { return Ok(()) };
    for path in entries.filter_map(|entry| entry.ok().map(|entry| entry.path())) {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let process = name.strip_prefix(TEMPORARY).and_then(|rest| rest.strip_suffix(&end)?.parse::<u32>().ok());
        // The lock is held here until the file is gone, so that nobody else removes it.
        let abandoned = process.and_then(|_| opened(&path).ok()).filter(claim).filter(|file| is_at(file, &path));
        if let Some(_lock) = abandoned {
            remove(&path)?;
        }
    }
    Ok(())
}

/// Opens a temporary file or folder. Refuses anything else of such a name, which this program has not made: opening a pipe would
/// block forever.
fn opened(path: &Path) -> io::Result<File> {
    let kind = fs::symlink_metadata(path)?.file_type();
    if kind.is_file() || kind.is_dir() { File::open(path) } else { Err(io::ErrorKind::InvalidInput.into()) }
}

/// Locks a temporary file or folder. Returns whether that was possible: not if its writer still lives, and not where the
/// system locks no such file, which then stays.
fn claim(file: &File) -> bool {
    file.try_lock().is_ok()
}

/// Makes a temporary file and locks it. Until it is locked, another process may take it for abandoned and remove it; it is
/// made again then.
pub(super) fn claimed(path: &Path) -> Result<File, CliError> {
    loop {
        // `create_new` does not follow a link that someone planted.
        let file = OpenOptions::new().write(true).create_new(true).open(path).map_err(CliError::io(path))?;
        // Waits for whoever removes it. Where the system locks no such file, nobody does.
        if file.lock().is_err() || is_at(&file, path) {
            return Ok(file);
        }
    }
}

/// The temporary name beside a path.
pub(super) fn sibling(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    parent(path).join(format!("{TEMPORARY}{}-{name}", std::process::id()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    #[test]
    fn only_temporary_files_that_nobody_writes_are_swept() {
        let dir = folder();
        let at = |name: &str| dir.path().join(name);
        let names = [".tmp-x", ".tmp-7", ".tmp-7-model.dat", ".tmp-8-held", ".tmp-probe", ".old-mine", "notes"];
        names.iter().for_each(|name| fs::write(at(name), b"").unwrap());
        let held = File::open(at(".tmp-8-held")).unwrap();
        held.lock().unwrap();
        sweep(dir.path()).unwrap();
        let left: Vec<_> = names.into_iter().filter(|name| at(name).exists()).collect();
        assert_eq!(left, [".tmp-x", ".tmp-7", ".tmp-8-held", ".old-mine", "notes"]);
        drop(held);
        sweep(dir.path()).unwrap();
        assert!(!at(".tmp-8-held").exists());
    }
}
