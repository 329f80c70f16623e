//! All writing of files, so that a crash or a full disk leaves no half-written one. No other file of this crate writes,
//! renames or removes, and none but this one makes a folder. (Two libraries write files of their own: CubeCL writes compiled
//! kernels, and rustyline the history of `chat`.)
//!
//! A file appears under its name complete or not at all: it is written under a temporary name beside it, synced and
//! renamed, and its folder is synced. A folder of files appears the same way. It ends with `manifest.json`, which is
//! written last and lists size and SHA-256 of every other file.

use crate::CliError;
use model_qwen3::{ModelError, file, json};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::{BufWriter, Read, Write},
    path::{Path, PathBuf},
    sync::{
        Arc,
        mpsc::{self, SyncSender},
    },
    thread,
};

/// The list of a folder's files, which is written last.
pub const MANIFEST: &str = "manifest.json";
/// Largest manifest that is read. A checkpoint has ten files, and each takes a hundred and fifty bytes.
const LARGEST_MANIFEST: u64 = 1 << 20;
/// Most bytes of what a lock says about its holder. It says about sixty.
const LONGEST_HOLDER: u64 = 4096;

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

/// A folder that is being written. Nothing appears under its name before [`Self::commit`] or [`Self::replace`].
#[derive(Debug)]
pub struct PendingFolder {
    target: PathBuf,
    temporary: PathBuf,
    files: BTreeMap<String, FileRecord>,
    /// Held as long as the folder is written.
    _lock: Option<File>,
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

#[derive(Debug, Serialize, Deserialize)]
struct Manifest {
    version: u32,
    files: BTreeMap<String, FileRecord>,
}

impl PendingFolder {
    /// Starts a folder that will be called `target`.
    ///
    /// # Errors
    /// If the temporary folder cannot be made.
    pub fn new(target: &Path) -> Result<Self, CliError> {
        let temporary = sibling(target);
        sweep_abandoned(target)?;
        loop {
            fs::create_dir_all(&temporary).map_err(CliError::io(&temporary))?;
            // Until it is locked, another process may take it for abandoned and remove it.
            let lock = File::open(&temporary).ok().filter(|folder| folder.lock().is_ok());
            if lock.as_ref().is_none_or(|folder| is_at(folder, &temporary)) && temporary.is_dir() {
                return Ok(Self { target: target.to_owned(), temporary, files: BTreeMap::new(), _lock: lock });
            }
        }
    }

    /// Writes one file into the folder.
    ///
    /// # Errors
    /// If writing fails.
    pub fn file(
        &mut self,
        name: &str,
        write: impl FnOnce(&mut dyn Write) -> Result<(), CliError>,
    ) -> Result<(), CliError> {
        let record = written(&self.temporary.join(name), write)?;
        self.files.insert(name.to_owned(), record);
        Ok(())
    }

    /// Writes several files into the folder at the same time, each from a thread of its own.
    ///
    /// # Errors
    /// If writing one of them fails.
    pub fn files(
        &mut self,
        names: &[&str],
        write: impl Fn(&str, &mut dyn Write) -> Result<(), CliError> + Sync,
    ) -> Result<(), CliError> {
        let (folder, write) = (&self.temporary, &write);
        let records = thread::scope(|scope| {
            let begin = |name: &&str| {
                let (name, path) = ((*name).to_owned(), folder.join(name));
                let one = move || written(&path, |out| write(&name, out));
                thread::Builder::new().spawn_scoped(scope, one).map_err(CliError::io(folder))
            };
            let threads: Vec<_> = names.iter().map(begin).collect();
            // All have ended when the first error is returned.
            let ended: Vec<_> = threads.into_iter().map(|thread| thread.and_then(joined)).collect();
            ended.into_iter().collect::<Result<Vec<_>, CliError>>()
        })?;
        self.files.extend(names.iter().map(|name| (*name).to_owned()).zip(records));
        Ok(())
    }

    /// The folder before the commit, for checks.
    pub fn path(&self) -> &Path {
        &self.temporary
    }

    /// The path of a written file before the commit, for checks.
    pub fn path_of(&self, name: &str) -> PathBuf {
        self.temporary.join(name)
    }

    /// Copies a file into the folder.
    ///
    /// # Errors
    /// If reading or writing fails.
    pub fn copy(&mut self, from: &Path, name: &str) -> Result<(), CliError> {
        let (mut source, _) = file::open(from, "")?;
        self.file(name, |out| std::io::copy(&mut source, out).map(|_| ()).map_err(CliError::io(from)))
    }

    /// Writes the manifest, syncs, and gives the folder its name, which must be free. Returns the path.
    ///
    /// # Errors
    /// If any of it fails. Nothing has appeared then.
    pub fn commit(mut self) -> Result<PathBuf, CliError> {
        self.complete()?;
        fs::rename(&self.temporary, &self.target).map_err(CliError::io(&self.target))?;
        sync_folder(parent(&self.target))?;
        Ok(self.target.clone())
    }

    /// Commits the folder in place of an older one of the same name, if there is one. Returns the path.
    ///
    /// # Errors
    /// If any of it fails. The older folder then keeps its name, unless the system refuses to rename it back: the error
    /// says where it is.
    pub fn replace(mut self) -> Result<PathBuf, CliError> {
        self.complete()?;
        swap(&self.temporary, &self.target)?;
        Ok(self.target.clone())
    }

    fn complete(&mut self) -> Result<(), CliError> {
        let manifest = Manifest { version: 1, files: std::mem::take(&mut self.files) };
        let text = serde_json::to_string_pretty(&manifest).expect("plain data serializes");
        let path = self.temporary.join(MANIFEST);
        write_synced(&path, |out| out.write_all(text.as_bytes()).map_err(CliError::io(&path)))?;
        sync_folder(&self.temporary)
    }
}

/// Where an older folder waits while a new one takes its name.
fn aside_of(target: &Path) -> PathBuf {
    parent(target).join(aside_name(&target.file_name().unwrap_or_default().to_string_lossy()))
}

/// The name of an older folder that waits while a new one takes the name `target`.
pub fn aside_name(target: &str) -> String {
    format!(".old-{target}")
}

/// Ends the replacement of `target` that a killed process left unfinished: the older folder gets its name back if the
/// new one had not taken it, and is removed if it had.
///
/// # Errors
/// If the system refuses.
pub fn finish_replacement(target: &Path) -> Result<(), CliError> {
    let aside = aside_of(target);
    match (aside.exists(), target.exists()) {
        (false, _) => Ok(()),
        (true, true) => give_up(&aside, target),
        (true, false) => fs::rename(&aside, target).map_err(CliError::io(&aside)),
    }
}

/// Gives the folder `new` the name `target`. An older folder steps aside first and comes back if the new one cannot take
/// its place. [`finish_replacement`] mends what a kill between the two renames leaves.
fn swap(new: &Path, target: &Path) -> Result<(), CliError> {
    finish_replacement(target)?;
    let aside = aside_of(target);
    let replaces = target.exists();
    if replaces {
        fs::rename(target, &aside).map_err(CliError::io(target))?;
    }
    if let Err(error) = fs::rename(new, target) {
        // Should the way back fail too, the error names the folder that holds the older one.
        let back = if replaces { fs::rename(&aside, target).map_err(CliError::io(&aside)) } else { Ok(()) };
        return Err(back.err().unwrap_or_else(|| CliError::io(target)(error)));
    }
    sync_folder(parent(target))?;
    if replaces {
        // The new folder is in place, whatever happens to the old one now.
        let _ = give_up(&aside, target);
    }
    Ok(())
}

/// Removes a folder that another one has replaced. Files that somebody has put into it, which its manifest does not list, go
/// into the new folder, unless it has files of these names. Weights get a name by which no command takes them for those of the
/// new folder.
fn give_up(old: &Path, new: &Path) -> Result<(), CliError> {
    if let Ok(manifest) = manifest_of(old) {
        for entry in fs::read_dir(old).map_err(CliError::io(old))? {
            let path = entry.map_err(CliError::io(old))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let holds_weights = WEIGHTS.iter().any(|end| name.ends_with(end));
            let kept = new.join(if holds_weights { format!("{name}.older") } else { name.clone() });
            if name != MANIFEST && !manifest.files.contains_key(&name) && kept.symlink_metadata().is_err() {
                fs::rename(&path, &kept).map_err(CliError::io(&path))?;
            }
        }
        sync_folder(new)?;
    }
    remove(old)
}

/// The ends of the names of files that a command takes for weights, or for what belongs to them.
const WEIGHTS: [&str; 5] = [".safetensors", ".safetensors.index.json", ".dat", ".gguf", ".trained.json"];

impl Drop for PendingFolder {
    fn drop(&mut self) {
        // After a commit there is no such folder; after a failure nobody can use it.
        let _ = fs::remove_dir_all(&self.temporary);
    }
}

/// Whether a file or folder of this name is temporary.
pub fn is_temporary(name: &str) -> bool {
    let process = name.strip_prefix(TEMPORARY).and_then(|rest| rest.split_once('-'));
    name == PROBE || process.is_some_and(|(id, _)| !id.is_empty() && id.bytes().all(|b| b.is_ascii_digit()))
}

/// The start of a temporary name. The number of the process follows, a hyphen, and the name that the file will get.
const TEMPORARY: &str = ".tmp-";
/// The file of [`probe`].
const PROBE: &str = ".tmp-probe";

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
    match File::open(path) {
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

/// Removes the temporary files of this target that processes left when they died: whoever writes one holds a lock on it,
/// which ends with the process. An export of 4B parameters leaves gigabytes.
fn sweep_abandoned(target: &Path) -> Result<(), CliError> {
    let folder = parent(target);
    let end = format!("-{}", target.file_name().unwrap_or_default().to_string_lossy());
    let Ok(entries) = fs::read_dir(folder) else { return Ok(()) };
    for path in entries.filter_map(|entry| entry.ok().map(|entry| entry.path())) {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let process = name.strip_prefix(TEMPORARY).and_then(|rest| rest.strip_suffix(&end)?.parse::<u32>().ok());
        // The lock is held here until the file is gone, so that nobody else removes it.
        let abandoned = process.and_then(|_| File::open(&path).ok()).filter(claim).filter(|file| is_at(file, &path));
        if let Some(_lock) = abandoned {
            remove(&path)?;
        }
    }
    Ok(())
}

/// Locks a temporary file or folder. Returns whether that was possible: not if its writer still lives, and not where the
/// system locks no such file, which then stays.
fn claim(file: &File) -> bool {
    file.try_lock().is_ok()
}

/// Makes a temporary file and locks it. Until it is locked, another process may take it for abandoned and remove it; it is
/// made again then.
fn claimed(path: &Path) -> Result<File, CliError> {
    loop {
        // `create_new` does not follow a link that someone planted.
        let file = OpenOptions::new().write(true).create_new(true).open(path).map_err(CliError::io(path))?;
        // Waits for whoever removes it. Where the system locks no such file, nobody does.
        if file.lock().is_err() || is_at(&file, path) {
            return Ok(file);
        }
    }
}

/// Checks that a file can be written, synced and renamed in a folder.
///
/// # Errors
/// If the system refuses.
pub fn probe(folder: &Path) -> Result<(), CliError> {
    // The name is the same for every process, so that the next probe removes what a kill leaves of this one.
    let path = folder.join(PROBE);
    write_bytes(&path, b"")?;
    match fs::remove_file(&path) {
        // Another process that probes the folder has removed it.
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(CliError::io(folder)),
    }
}

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

/// Checks a folder against its manifest: it holds every file listed, unchanged, and no other.
///
/// # Errors
/// If anything differs.
pub fn verify(folder: &Path) -> Result<(), CliError> {
    compare(folder, u64::MAX)
}

/// Checks a folder that has just been written, before anything is given up for it: its manifest, the names and the sizes of
/// its files, and the digests of those that are quickly read.
///
/// # Errors
/// If anything differs.
pub fn read_back(folder: &Path) -> Result<(), CliError> {
    compare(folder, QUICK)
}

/// Largest file whose digest [`read_back`] compares. The weights of a checkpoint would take as long again as to write them.
const QUICK: u64 = 16 << 20;

/// Checks the files of a folder that its manifest lists. Other files may lie beside them.
///
/// # Errors
/// If one of them is missing or differs.
pub fn verify_listed(folder: &Path) -> Result<(), CliError> {
    let manifest = manifest_of(folder)?;
    manifest.files.iter().try_for_each(|(name, record)| compare_named(folder, name, record, u64::MAX))
}

/// The manifest of a folder.
fn manifest_of(folder: &Path) -> Result<Manifest, CliError> {
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
    manifest.files.iter().try_for_each(|(name, record)| compare_named(folder, name, record, largest))
}

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

/// The file in a folder that a process locks. It says who has locked it.
pub const LOCK: &str = "lock";

/// Locks a folder for this process until the handle is dropped or the process ends.
///
/// # Errors
/// If another process holds it; the message names that process.
pub fn lock(folder: &Path) -> Result<File, CliError> {
    let path = folder.join(LOCK);
    let open = OpenOptions::new().create(true).truncate(false).read(true).write(true).open(&path);
    let mut file = open.map_err(CliError::io(&path))?;
    match file.try_lock() {
        // Whoever held it has just removed it: a lock on a file without a name keeps nobody out.
        Ok(()) if !is_at(&file, &path) => lock(folder),
        Ok(()) => {
            let host = gethostname::gethostname();
            let (pid, host, now) = (std::process::id(), host.to_string_lossy(), jiff::Timestamp::now());
            let holder = format!("process {pid} on {host}, since {now:.0}");
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

/// Whether a path is that of an open file.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let same = |a: fs::Metadata, b: fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
    file.metadata().is_ok_and(|file| path.metadata().is_ok_and(|found| same(file, found)))
}

/// Elsewhere an open file cannot be removed.
#[cfg(not(unix))]
fn is_at(_: &File, _: &Path) -> bool {
    true
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

/// Writes a new file. Returns its record.
fn written(path: &Path, write: impl FnOnce(&mut dyn Write) -> Result<(), CliError>) -> Result<FileRecord, CliError> {
    let (sha256, _) = write_synced(path, write)?;
    let bytes = fs::metadata(path).map_err(CliError::io(path))?.len();
    Ok(FileRecord { bytes, sha256 })
}

/// Writes a new file. Returns its SHA-256, and the file, which is locked as long as it is open.
fn write_synced(
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
        let disk = thread::Builder::new().spawn_scoped(scope, disk).map_err(CliError::io(path))?;
        let (to_hash, pieces) = mpsc::sync_channel::<Arc<[u8]>>(AHEAD);
        let hash = move || pieces.into_iter().fold(Sha256::new(), |hash, piece| hash.chain_update(piece)).finalize();
        let hash = thread::Builder::new().spawn_scoped(scope, hash).map_err(CliError::io(path))?;

        let mut out = BufWriter::with_capacity(PIECE, Pieces { to_disk, to_hash });
        let made = write(&mut out).and_then(|()| out.flush().map_err(CliError::io(path)));
        // What is left after an error is not written. The other threads end when nothing more can come.
        let (pieces, _) = out.into_parts();
        drop(pieces);
        // A disk that fails is the cause of whatever else failed.
        let file = joined(disk).map_err(CliError::io(path))?;
        made.map(|()| (hex(&joined(hash)), file))
    })
}

fn joined<T>(thread: thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Bytes that are handed to the disk and to the hash at a time.
const PIECE: usize = 1 << 20;
/// Pieces that may wait for them: as much as is read from a device at a time, so that both have work while the next read
/// waits for the device.
const AHEAD: usize = 256;

/// Takes a content apart for the disk and for the hash.
struct Pieces {
    to_disk: SyncSender<Arc<[u8]>>,
    to_hash: SyncSender<Arc<[u8]>>,
}

impl Write for Pieces {
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

/// Bytes in hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn sibling(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    parent(path).join(format!("{TEMPORARY}{}-{name}", std::process::id()))
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn sync_folder(folder: &Path) -> Result<(), CliError> {
    File::open(folder).and_then(|f| f.sync_all()).map_err(CliError::io(folder))
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

    fn folder_with(target: &Path, content: &str) -> PendingFolder {
        let mut pending = PendingFolder::new(target).unwrap();
        pending.file("x", |out| out.write_all(content.as_bytes()).map_err(CliError::io(target))).unwrap();
        pending
    }

    #[test]
    fn a_folder_is_replaced_by_a_complete_one_and_comes_back_if_that_fails() {
        let dir = folder();
        let target = dir.path().join("final");
        let content = || fs::read_to_string(target.join("x")).unwrap();
        folder_with(&target, "old").replace().unwrap();
        let next = folder_with(&target, "new");
        assert_eq!(content(), "old", "nothing changes before the commit");
        drop(next);
        verify(&target).unwrap();
        assert!(swap(&dir.path().join("missing"), &target).is_err());
        assert_eq!(content(), "old", "the old folder came back");
        folder_with(&target, "new").replace().unwrap();
        assert_eq!(content(), "new");
        verify(&target).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left");
    }

    #[test]
    fn a_replacement_that_a_kill_interrupted_is_finished() {
        let dir = folder();
        let target = dir.path().join("final");
        let content = || fs::read_to_string(target.join("x")).unwrap();
        folder_with(&target, "old").replace().unwrap();
        // Killed between the two renames: the older folder comes back.
        fs::rename(&target, aside_of(&target)).unwrap();
        finish_replacement(&target).unwrap();
        assert_eq!(content(), "old");
        // Killed after the second rename: the older folder goes, and the next replacement works.
        fs::create_dir(aside_of(&target)).unwrap();
        folder_with(&target, "new").replace().unwrap();
        assert_eq!(content(), "new");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left");
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

    #[test]
    fn a_file_that_lies_in_a_replaced_folder_goes_into_the_new_one() {
        let dir = folder();
        let target = dir.path().join("final");
        folder_with(&target, "old").replace().unwrap();
        fs::write(target.join("notes"), b"mine").unwrap();
        fs::write(target.join("model.safetensors"), b"of the older run").unwrap();
        assert!(verify(&target).is_err());
        verify_listed(&target).unwrap();
        folder_with(&target, "new").replace().unwrap();
        let content = |name: &str| fs::read_to_string(target.join(name)).unwrap();
        assert_eq!((content("x").as_str(), content("notes").as_str()), ("new", "mine"));
        // Somebody else's weights must not be taken for those of the new folder.
        assert!(!target.join("model.safetensors").exists());
        assert_eq!(content("model.safetensors.older"), "of the older run");
        // So it is if a kill came before the file was moved.
        fs::create_dir(aside_of(&target)).unwrap();
        fs::write(aside_of(&target).join("more"), b"too").unwrap();
        fs::copy(target.join(MANIFEST), aside_of(&target).join(MANIFEST)).unwrap();
        finish_replacement(&target).unwrap();
        assert_eq!(content("more"), "too");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing else is left");
    }

    #[test]
    fn every_flipped_byte_and_every_added_file_is_found() {
        let dir = folder();
        let target = dir.path().join("c");
        let mut pending = PendingFolder::new(&target).unwrap();
        pending.file("x", |out| out.write_all(b"some content").map_err(CliError::io(&target))).unwrap();
        assert!(!target.exists());
        pending.commit().unwrap();
        verify(&target).unwrap();
        let x = target.join("x");
        for i in 0..12 {
            let mut bytes = b"some content".to_vec();
            bytes[i] ^= 1;
            fs::write(&x, bytes).unwrap();
            assert!(matches!(verify(&target), Err(CliError::Corrupt { .. })), "byte {i}");
        }
        fs::write(&x, b"some content").unwrap();
        verify(&target).unwrap();
        fs::write(target.join("y"), b"").unwrap();
        assert!(verify(&target).unwrap_err().to_string().contains("not in the manifest"));
    }
}
