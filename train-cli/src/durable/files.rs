//! Writing of single files.

use super::{
    disk::{parent, sync_folder},
    manifest::{FileRecord, hex},
    temporary::{PROBE, claimed, sibling, sweep_abandoned},
    threads::joined,
};
use crate::CliError;
use sha2::{Digest, Sha256};
use std::{
    fs::{self, File, OpenOptions},
    io::{BufWriter, Write},
    path::Path,
    sync::{
        Arc,
        mpsc::{self, SyncSender},
    },
    thread,
};

/// Writes a file that appears complete or not at all, replacing an old one. Returns its SHA-256.
///
/// # Errors
/// If writing fails; the old file is then untouched.
pub fn write_file(path: &Path, write: impl FnOnce(&mut dyn Write) -> Result<(), CliError>) -> Result<String, CliError> {
    write_checked(path, write, |_| Ok(()))
}

/// Writes a file as [`write_file`] does, but lets `check` read the finished file under its temporary name before it
/// replaces an old one.
///
/// # Errors
/// If writing or the check fails; the old file is then untouched.
pub fn write_checked(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> Result<(), CliError>,
    check: impl FnOnce(&Path) -> Result<(), CliError>,
) -> Result<String, CliError> {
    let temporary = sibling(path);
    sweep_abandoned(path)?;
    let result = write_synced(&temporary, write).and_then(|(digest, _lock)| {
        check(&temporary)?;
        fs::rename(&temporary, path).map_err(CliError::io(path))?;
        sync_folder(parent(path))?;
        Ok(digest)
    });
    if result.is_err() {
        // Nobody can use the temporary file.
        let _ = fs::remove_file(&temporary);
    }
    result
}

/// Writes a small file whose content is in memory. Returns its SHA-256.
///
/// # Errors
/// As [`write_file`].
pub fn write_bytes(path: &Path, bytes: &[u8]) -> Result<String, CliError> {
    write_file(path, |out| out.write_all(bytes).map_err(CliError::io(path)))
}

/// Appends one line to a file, which is made if it does not exist. The line is not synced: a crash of the machine may lose
/// the lines since [`sync_file`].
///
/// # Errors
/// If writing fails.
pub fn append_line(path: &Path, line: &str) -> Result<(), CliError> {
    append_by(OpenOptions::new().create(true), path, format!("{line}\n").as_bytes())
}

/// Appends bytes to a file that exists. They are not synced.
///
/// # Errors
/// If there is no such file, or writing fails.
pub fn append_bytes(path: &Path, bytes: &[u8]) -> Result<(), CliError> {
    append_by(&mut OpenOptions::new(), path, bytes)
}

fn append_by(options: &mut OpenOptions, path: &Path, bytes: &[u8]) -> Result<(), CliError> {
    options.append(true).open(path).and_then(|mut file| file.write_all(bytes)).map_err(CliError::io(path))
}

/// Syncs a file that lines were appended to, if it exists, and its name.
///
/// # Errors
/// If the system refuses.
pub fn sync_file(path: &Path) -> Result<(), CliError> {
    if !path.exists() {
        return Ok(());
    }
    File::open(path).and_then(|file| file.sync_all()).map_err(CliError::io(path))?;
    sync_folder(parent(path))
}

/// Checks that a file can be written, synced and renamed in a folder, where `output` will be made.
///
/// # Errors
/// If the system refuses. The error names the output.
pub fn probe(folder: &Path, output: &Path) -> Result<(), CliError> {
    // The name is the same for every process, so that the next probe removes what a kill leaves of this one.
    let path = folder.join(PROBE);
    write_bytes(&path, b"").map_err(|error| match error {
        CliError::Io { source, .. } => CliError::io(output)(source),
        other => other,
    })?;
    match fs::remove_file(&path) {
        // Another process that probes the folder has removed it.
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(CliError::io(output)),
    }
}

/// Writes a new file. Returns its record.
pub(super) fn written(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> Result<(), CliError>,
) -> Result<FileRecord, CliError> {
    let (sha256, _) = write_synced(path, write)?;
    let bytes = fs::metadata(path).map_err(CliError::io(path))?.len();
    Ok(FileRecord { bytes, sha256 })
}

/// Writes a new file. Returns its SHA-256, and the file, which is locked as long as it is open.
pub(super) fn write_synced(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> Result<(), CliError>,
) -> Result<(String, File), CliError> {
    let file = claimed(path)?;
    thread::scope(|scope| {
        // To make a large content, to write it and to hash it take similar times: each has a thread.
        let (to_disk, pieces) = mpsc::sync_channel::<Arc<[u8]>>(AHEAD);
        let disk = move || {
            let mut file = file;
            pieces.into_iter().try_for_each(|piece| file.write_all(&piece))?;
            file.sync_all().map(|()| file)
        };
        let disk =
            thread::Builder::new().spawn_scoped(scope, disk).map_err(CliError::no_thread("writing of a file"))?;
        let (to_hash, pieces) = mpsc::sync_channel::<Arc<[u8]>>(AHEAD);
        let hash = move || pieces.into_iter().fold(Sha256::new(), |hash, piece| hash.chain_update(piece)).finalize();
        let hash =
            thread::Builder::new().spawn_scoped(scope, hash).map_err(CliError::no_thread("checksum of a file"))?;

        let mut out = BufWriter::with_capacity(PIECE, ToDiskAndHash { to_disk, to_hash });
        let made = write(&mut out).and_then(|()| out.flush().map_err(CliError::io(path)));
        // What is left after an error is not written. The other threads end when nothing more can come.
        let (pieces, _) = out.into_parts();
        drop(pieces);
        // A disk that fails is the cause of whatever else failed.
        let file = joined(disk).map_err(CliError::io(path))?;
        made.map(|()| (hex(&joined(hash)), file))
    })
}

/// Bytes that are handed to the disk and to the hash at a time.
const PIECE: usize = 1 << 20;
/// Pieces that may wait for them: as much as is read from a device at a time, so that both have work while the next read
/// waits for the device.
const AHEAD: usize = 256;

/// Takes a content apart for the disk and for the hash.
struct ToDiskAndHash {
    to_disk: SyncSender<Arc<[u8]>>,
    to_hash: SyncSender<Arc<[u8]>>,
}

impl Write for ToDiskAndHash {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let piece: Arc<[u8]> = Arc::from(&bytes[..bytes.len().min(PIECE)]);
        let failed = |_| std::io::Error::other("the file cannot be written");
        self.to_disk.send(piece.clone()).map_err(failed)?;
        self.to_hash.send(piece.clone()).map_err(failed)?;
        Ok(piece.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    #[test]
    fn a_failed_write_leaves_the_old_file_and_nothing_else() {
        let dir = folder();
        let path = dir.path().join("a");
        write_bytes(&path, b"old").unwrap();
        let failed = write_file(&path, |out| {
            out.write_all(b"half").map_err(CliError::io(&path))?;
            Err(CliError::Usage("stop".into()))
        });
        assert!(failed.is_err());
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
