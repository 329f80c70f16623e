//! The manifest of a folder: which files it holds, with size and SHA-256.

use super::{disk::forget_cached, threads::at_once};
use crate::CliError;
use model_qwen3::{ModelError, file, json};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{cmp::Reverse, collections::BTreeMap, fs, io::Read, path::Path};

/// The list of a folder's files, which is written last.
pub const MANIFEST: &str = "manifest.json";

/// Largest manifest that is read. A checkpoint has ten files, and each takes a hundred and fifty bytes.
const LARGEST_MANIFEST: u64 = 1 << 20;

/// Checks a folder against its manifest: it holds every file listed, unchanged, and no other.
///
/// # Errors
/// If anything differs.
pub fn verify(folder: &Path) -> Result<(), CliError> {
    compare(folder, u64::MAX)
}

/// Checks a folder that has just been written, before anything is given up for it: its manifest, the names of its files, their
/// sizes and their digests. On Linux, cached copies of the files are dropped first, so that the files are
/// read from the disk.
///
/// # Errors
/// If anything differs.
pub fn read_back(folder: &Path) -> Result<(), CliError> {
    manifest_of(folder)?.files.keys().for_each(|name| forget_cached(&folder.join(name)));
    compare(folder, u64::MAX)
}

/// As [`read_back`], where somebody waits: the digests of large files are not compared, and files may be read from memory.
///
/// # Errors
/// If anything differs.
pub fn read_back_quickly(folder: &Path) -> Result<(), CliError> {
    compare(folder, QUICK)
}

/// Largest file whose digest [`read_back_quickly`] compares. To read the weights of a checkpoint takes as long as to write them.
const QUICK: u64 = 16 << 20;

/// Checks those files of a folder that its manifest lists and `read` names. Other files may lie beside them.
///
/// # Errors
/// If one of them is missing or differs.
pub fn verify_listed(folder: &Path, read: impl Fn(&str) -> bool) -> Result<(), CliError> {
    let manifest = manifest_of(folder)?;
    compare_files(folder, manifest.files.iter().filter(|(name, _)| read(name)), u64::MAX)
}

/// Whether a folder has a manifest that lists a file of this content.
pub fn lists(folder: &Path, content: &FileRecord) -> bool {
    manifest_of(folder).is_ok_and(|manifest| manifest.files.values().any(|record| record == content))
}

/// What is recorded of a file, so that damage to it is found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Its size.
    pub bytes: u64,
    /// Its SHA-256.
    pub sha256: String,
}

impl FileRecord {
    /// The record of a file.
    ///
    /// # Errors
    /// If it is no regular file or cannot be read.
    pub fn of(path: &Path) -> Result<Self, ModelError> {
        let (bytes, sha256) = digest(path)?;
        Ok(Self { bytes, sha256 })
    }
}

/// The list of files.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Manifest {
    pub(super) version: u32,
    pub(super) files: BTreeMap<String, FileRecord>,
}

/// Whether a folder has a manifest: a file that it does not list does not belong there.
pub fn is_listed_folder(folder: &Path) -> bool {
    manifest_of(folder).is_ok()
}

/// The manifest of a folder.
pub(super) fn manifest_of(folder: &Path) -> Result<Manifest, CliError> {
    let path = folder.join(MANIFEST);
    let text = file::read_text(&path, LARGEST_MANIFEST, "").map_err(CliError::damaged(&path))?;
    let manifest = json::parse(&text).and_then(serde_json::from_value::<Manifest>);
    let manifest = manifest.map_err(|e| CliError::corrupt(&path, e))?;
    if manifest.version != 1 {
        return Err(CliError::corrupt(
            &path,
            format!("manifest version {}; this program reads version 1", manifest.version),
        ));
    }
    Ok(manifest)
}

/// Compares a folder with its manifest, and the digests of files of at most `largest` bytes.
fn compare(folder: &Path, largest: u64) -> Result<(), CliError> {
    let manifest = manifest_of(folder)?;
    for entry in fs::read_dir(folder).map_err(CliError::io(folder))? {
        let name = entry.map_err(CliError::io(folder))?.file_name().to_string_lossy().into_owned();
        if name != MANIFEST && !manifest.files.contains_key(&name) {
            return Err(CliError::corrupt(folder, format!("{name} is not in the manifest")));
        }
    }
    compare_files(folder, manifest.files.iter(), largest)
}

/// Compares files of a folder with their records. A processor hashes less in a second than a disk reads, so that the largest ones,
/// of which a checkpoint has two, are read at the same time.
fn compare_files<'a>(
    folder: &Path,
    files: impl Iterator<Item = (&'a String, &'a FileRecord)>,
    largest: u64,
) -> Result<(), CliError> {
    let mut files: Vec<_> = files.collect();
    files.sort_by_key(|(_, record)| Reverse(record.bytes));
    let lane = |first: usize| {
        let mut own = files.iter().skip(first).step_by(LANES);
        move || own.try_for_each(|(name, record)| compare_named(folder, name, record, largest))
    };
    at_once("checksum of a file", (0..LANES.min(files.len())).map(lane)).map(|_| ())
}

/// Threads that read the files of a folder, of which somebody else may have made a thousand.
const LANES: usize = 4;

/// Compares a file of a folder with its record.
fn compare_named(folder: &Path, name: &str, record: &FileRecord, largest: u64) -> Result<(), CliError> {
    if Path::new(name).file_name().is_none_or(|n| n != name) {
        return Err(CliError::corrupt(folder, format!("{name:?} in manifest.json is not a plain file name")));
    }
    compare_file(&folder.join(name), record, largest)
}

/// Compares a file with its record.
fn compare_file(path: &Path, record: &FileRecord, largest: u64) -> Result<(), CliError> {
    let (_, bytes) = file::open(path, "").map_err(CliError::damaged(path))?;
    // A file of another size need not be read.
    if bytes != record.bytes {
        return Err(CliError::corrupt(path, format!("{bytes} bytes; manifest.json says {}", record.bytes)));
    }
    if bytes > largest {
        return Ok(());
    }
    let (_, sha256) = digest(path).map_err(CliError::damaged(path))?;
    if sha256 != record.sha256 {
        return Err(CliError::corrupt(path, format!("SHA-256 {sha256}; manifest.json says {}", record.sha256)));
    }
    Ok(())
}

/// The SHA-256 of bytes.
pub fn digest_of(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// The size and the SHA-256 of a file.
///
/// # Errors
/// If it is no regular file or cannot be read.
pub fn digest(path: &Path) -> Result<(u64, String), ModelError> {
    let (mut file, _) = file::open(path, "")?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    let mut bytes = 0;
    loop {
        let n = file.read(&mut buffer).map_err(ModelError::io(path, ""))?;
        if n == 0 {
            return Ok((bytes, hex(&hash.finalize())));
        }
        hash.update(&buffer[..n]);
        bytes += n as u64;
    }
}

/// Bytes in hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::durable::PendingFolder;
    use std::{fs::OpenOptions, os::unix::fs::FileExt};

    #[test]
    fn a_change_of_any_file_is_found_and_named() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("folder");
        let mut folder = PendingFolder::new(&target).unwrap();
        let large = vec![7; QUICK as usize + 1];
        for (name, content) in [("a", &large), ("b", &vec![1; 10]), ("c", &large)] {
            folder.file(name, |out| out.write_all(content).map_err(CliError::io(&target))).unwrap();
        }
        let folder = folder.commit().unwrap();
        verify(&folder).unwrap();
        for name in ["a", "b", "c"] {
            let file = OpenOptions::new().read(true).write(true).open(folder.join(name)).unwrap();
            let mut last = [0];
            let at = file.metadata().unwrap().len() - 1;
            file.read_exact_at(&mut last, at).unwrap();
            file.write_all_at(&[last[0] ^ 1], at).unwrap();
            let said = verify(&folder).unwrap_err().to_string();
            assert!(said.contains(&folder.join(name).display().to_string()) && said.contains("SHA-256"), "{said}");
            // The large ones are not read where somebody waits.
            assert_eq!(read_back_quickly(&folder).is_err(), name == "b");
            file.write_all_at(&last, at).unwrap();
        }
        verify_listed(&folder, |name| name != "b").unwrap();
    }
}
