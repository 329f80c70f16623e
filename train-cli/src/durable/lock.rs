//! The lock on a folder: a file that a process holds, and which says who it is.

use super::{disk::is_at, temporary::is_temporary};
use crate::CliError;
use std::{
    fs::{self, File, OpenOptions},
    io::{Read, Seek, Write},
    path::Path,
    thread,
    time::{Duration, Instant},
};

/// The file in a folder that a process locks. It says who has locked it.
pub const LOCK: &str = "lock";

/// The first word of a lock's text.
const HOLDER: &str = "process ";

/// What stands before the time in a lock's text.
const SINCE: &str = ", since ";

/// How long the text of a lock is waited for. It takes its holder two calls of the system to write it.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

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
            let holder = format!("{HOLDER}{pid} on {host}{SINCE}{now:.0}");
            file.set_len(0).and_then(|()| file.write_all(holder.as_bytes())).map_err(CliError::io(&path))?;
            Ok(file)
        }
        Err(fs::TryLockError::WouldBlock) => Err(held_by(&holder_of(&file), folder)),
        Err(fs::TryLockError::Error(e)) => Err(CliError::io(&path)(e)),
    }
}

/// Refuses a folder that another process holds. Changes nothing.
///
/// # Errors
/// If another process holds it. The message names that process.
pub fn check_unheld(folder: &Path) -> Result<(), CliError> {
    let path = folder.join(LOCK);
    // Opening a pipe would wait for whoever writes to it.
    let file = path.symlink_metadata().is_ok_and(|found| found.is_file()).then(|| File::open(&path).ok()).flatten();
    let Some(file) = file else { return Ok(()) };
    match file.try_lock() {
        Err(fs::TryLockError::WouldBlock) => Err(held_by(&holder_of(&file), folder)),
        Ok(()) | Err(fs::TryLockError::Error(_)) => Ok(()),
    }
}

fn held_by(holder: &str, folder: &Path) -> CliError {
    let text = "is training here; wait for its end, or choose another --output-dir";
    CliError::Usage(format!("{}: {holder} {text}", folder.display()))
}

/// Who holds a lock, by the text of its file. A process that has just locked the file writes its text in the next moment, so that
/// the text is waited for.
fn holder_of(mut file: &File) -> String {
    let begun = Instant::now();
    loop {
        let mut text = String::new();
        let read = file.rewind().and_then(|()| file.take(LONGEST_HOLDER).read_to_string(&mut text));
        // The text ends with a time in UTC.
        if read.is_ok() && text.starts_with(HOLDER) && text.contains(SINCE) && text.ends_with('Z') {
            return text;
        }
        if begun.elapsed() > LONGEST_WAIT {
            return "another train-cli".to_owned();
        }
        thread::sleep(Duration::from_millis(10));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_holder_that_has_not_written_its_name_yet_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let mut held = File::create(dir.path().join(LOCK)).unwrap();
        held.lock().unwrap();
        let named = "process 7 on host, since 2026-01-01T00:00:00Z";
        thread::scope(|scope| {
            let locked = scope.spawn(|| lock(dir.path()).unwrap_err().to_string());
            let checked = scope.spawn(|| check_unheld(dir.path()).unwrap_err().to_string());
            thread::sleep(Duration::from_millis(100));
            held.write_all(named.as_bytes()).unwrap();
            for refused in [locked.join().unwrap(), checked.join().unwrap()] {
                assert!(refused.contains(&format!("{named} is training here")), "{refused}");
            }
        });
        drop(held);
        check_unheld(dir.path()).unwrap();
    }
}
