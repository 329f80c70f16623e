//! What the fuzzed readers have in common: the place of their file.

use model_qwen3::{
    container::Container,
    tensors::{Stored, Tensors, row_ranges},
};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Writes the bytes that a fuzzer has made to a file in memory, and returns its path. Each process has its own.
pub fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let folder = PathBuf::from(format!("/dev/shm/fuzz-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("the system has a folder in memory");
    let path = folder.join(name);
    fs::write(&path, bytes).expect("the file can be written");
    path
}

/// Reads every value of a file of tensors.
pub fn read_all(path: &Path) {
    let Ok(file) = Container::open(path) else { return };
    for name in file.names() {
        match file.stored(&name) {
            Some(Stored::Packed { .. }) => drop(file.read_packed(&name)),
            Some(Stored::Dense { shape, .. }) => {
                let _ = row_ranges(&shape, 1 << 20).try_for_each(|rows| file.read_rows(&name, rows).map(drop));
            }
            None => {}
        }
    }
}
