//! The lock on a folder: a file that a process holds, and which says who it is.

use super::{disk::is_at, temporary::is_temporary};
use crate::CliError;
use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Seek, Write},
    path::Path,
};

/// The file in a folder that a process locks. It says who has locked it.
pub const LOCK: &str = "lock";

/// The first word of a lock's text.
const HOLDER: &str = "process ";

/// Most bytes of a lock's text that are read. The text has about sixty.
const LONGEST_HOLDER: u64 = 4096;

/// Locks a folder for this process until the handle is dropped or the process ends.
///
/// # Errors
/// If another process holds it (the message names that process), or if the folder has another file called `lock`.
pub fn lock(folder: &Path) -> Result<File, CliError> {
    let path = folder.join(LOCK);
    let foreign = || {
        let text = "this is no lock of train-cli; move it away, or choose another --output-dir";
        Err(CliError::Usage(format!("{}: {text}", path.display())))
    };
    if path.symlink_metadata().is_ok_and(|found| !found.is_file()) {
        return foreign();
    }
    let open = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path);
    let mut file = open.map_err(CliError::io(&path))?;
    match file.try_lock() {
        // Whoever held it has just removed it: a lock on a file without a name keeps nobody out.
        Ok(()) if !is_at(&file, &path) => lock(folder),
        Ok(()) => {
            let mut said = Vec::new();
            (&file).take(LONGEST_HOLDER).read_to_end(&mut said).map_err(CliError::io(&path))?;
            // A process that dies may leave its name, or a part of it.
            let ours = said.len().min(HOLDER.len());
            if said[..ours] != HOLDER.as_bytes()[..ours] {
                return foreign();
            }
            file.rewind().map_err(CliError::io(&path))?;
            let host = gethostname::gethostname();
            let (pid, host, now) = (std::process::id(), host.to_string_lossy(), jiff::Timestamp::now());
            let holder = format!("{HOLDER}{pid} on {host}, since {now:.0}");
            file.set_len(0).and_then(|()| file.write_all(holder.as_bytes())).map_err(CliError::io(&path))?;
            Ok(file)
        }
        Err(fs::TryLockError::WouldBlock) => {
            let mut holder = String::new();
            // The holder may be writing its name just now.
            let _ = file.take(LONGEST_HOLDER).read_to_string(&mut holder);
            let holder = if holder.is_empty() { "another train-cli".to_owned() } else { holder };
            let text = "is training here; wait for its end, or choose another --output-dir";
            Err(CliError::Usage(format!("{}: {holder} {text}", folder.display())))
        }
        Err(fs::TryLockError::Error(e)) => Err(CliError::io(&path)(e)),
    }
}

/// Whether a folder holds nothing but what a process leaves that ends before it writes its first file: a lock, temporary
/// files.
///
/// # Errors
/// If the folder cannot be read.
pub fn is_untouched(folder: &Path) -> Result<bool, CliError> {
    for entry in fs::read_dir(folder).map_err(CliError::io(folder))? {
        let name = entry.map_err(CliError::io(folder))?.file_name();
        if name != LOCK && !is_temporary(&name.to_string_lossy()) {
            return Ok(false);
        }
    }
    Ok(true)
}
