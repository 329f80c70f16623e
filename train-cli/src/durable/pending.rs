//! A folder of files that appears complete or not at all, and may take the place of an older one.

use super::{
    disk::{is_at, parent, remove, sync_folder},
    files::{write_synced, written},
    manifest::{FileRecord, MANIFEST, Manifest, manifest_of},
    temporary::{sibling, sweep_abandoned},
    threads::at_once,
};
use crate::CliError;
use model_qwen3::file;
use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
};

/// A folder that is being written. Nothing appears under its name before [`Self::commit`] or [`Self::replace`].
#[derive(Debug)]
pub struct PendingFolder {
    target: PathBuf,
    temporary: PathBuf,
    files: BTreeMap<String, FileRecord>,
    /// Held as long as the folder is written.
    _lock: Option<File>,
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
        let one = |name: &&str| {
            let (name, path) = ((*name).to_owned(), folder.join(name));
            move || written(&path, |out| write(&name, out))
        };
        let records = at_once("writing of a file", names.iter().map(one))?;
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

impl Drop for PendingFolder {
    fn drop(&mut self) {
        // After a commit there is no such folder; after a failure nobody can use it.
        let _ = fs::remove_dir_all(&self.temporary);
    }
}

/// The name of an older folder that waits while a new one takes the name `target`.
pub fn aside_name(target: &str) -> String {
    format!(".old-{target}")
}

/// Where an older folder waits while a new one takes its name.
fn aside_of(target: &Path) -> PathBuf {
    parent(target).join(aside_name(&target.file_name().unwrap_or_default().to_string_lossy()))
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

#[cfg(test)]
mod tests {
    use super::super::{verify, verify_listed, write_bytes};
    use super::*;
    use std::{
        sync::atomic::{AtomicBool, Ordering},
        thread,
    };

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
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

    /// Between the making of a folder and its lock, it looks like one that a dead process left.
    #[test]
    fn a_folder_that_is_begun_while_others_sweep_is_there() {
        let dir = folder();
        let target = dir.path().join("c");
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !done.load(Ordering::Acquire) {
                        sweep_abandoned(&target).unwrap();
                    }
                });
            }
            let begun = (0..2000)
                .map(|_| PendingFolder::new(&target).and_then(|pending| write_bytes(&pending.path_of("x"), b"")));
            let failed: Vec<_> = begun.filter_map(Result::err).collect();
            done.store(true, Ordering::Release);
            assert!(failed.is_empty(), "{} failed: {}", failed.len(), failed[0]);
        });
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
    fn a_file_that_lies_in_a_replaced_folder_goes_into_the_new_one() {
        let dir = folder();
        let target = dir.path().join("final");
        folder_with(&target, "old").replace().unwrap();
        fs::write(target.join("notes"), b"mine").unwrap();
        fs::write(target.join("model.safetensors"), b"of the older run").unwrap();
        assert!(verify(&target).is_err());
        verify_listed(&target, |_| true).unwrap();
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
