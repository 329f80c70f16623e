//! The host's memory in which a checkpoint waits until it is written to the disk.
//!
//! Training waits while the files are copied there. Memory that the system has never given to the process is slow to write:
//! each of its pages is cleared first. So a thread touches the blocks before the first checkpoint, and every checkpoint uses
//! them again.

use crate::CliError;
use backend_nvfp4::host_memory;
use rayon::{
    iter::{IndexedParallelIterator, ParallelIterator},
    slice::{ParallelSlice, ParallelSliceMut},
};
use std::{
    io::Write,
    sync::{Arc, Mutex, MutexGuard},
    thread,
};

/// Bytes that are taken from the system at a time.
const BLOCK: usize = 32 << 20;

/// Bytes that one thread copies at a time.
const PART: usize = 256 << 10;

/// Blocks of memory that no file uses.
#[derive(Debug, Clone, Default)]
pub(super) struct Blocks(Arc<Mutex<Vec<Vec<u8>>>>);

impl Blocks {
    /// Lets a thread take `bytes` bytes, while the program goes on. What the host refuses is asked for again by the first file.
    ///
    /// # Errors
    /// If there is no thread.
    pub(super) fn taking(bytes: u64) -> Result<Self, CliError> {
        let blocks = Self::default();
        let (count, taken) = (bytes.div_ceil(BLOCK as u64), blocks.clone());
        let all = move || (0..count).map_while(|_| new_block()).for_each(|block| taken.free().push(block));
        let thread = thread::Builder::new().name("memory for checkpoints".into()).spawn(all);
        thread.map_err(CliError::no_thread("memory for checkpoints"))?;
        Ok(blocks)
    }

    /// An empty file.
    pub(super) fn file(&self) -> WaitingFile {
        WaitingFile { blocks: self.clone(), used: vec![], len: 0 }
    }

    fn free(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        self.0.lock().expect("no thread panics while it holds the lock")
    }
}

/// A block that the system has given, or None if it refuses.
fn new_block() -> Option<Vec<u8>> {
    let mut block = vec![];
    host_memory::may_be_refused(|| block.try_reserve_exact(BLOCK)).ok()?;
    block.resize(BLOCK, 0);
    Some(block)
}

/// A file in the host's memory. If there is not enough, writing fails, and the process goes on.
#[derive(Debug)]
pub(super) struct WaitingFile {
    blocks: Blocks,
    used: Vec<Vec<u8>>,
    len: usize,
}

impl WaitingFile {
    /// Writes the file's bytes.
    ///
    /// # Errors
    /// If `out` fails.
    pub(super) fn write_to(&self, out: &mut dyn Write) -> std::io::Result<()> {
        let mut rest = self.len;
        self.used.iter().try_for_each(|block| {
            let bytes = &block[..rest.min(BLOCK)];
            rest -= bytes.len();
            out.write_all(bytes)
        })
    }
}

impl Write for WaitingFile {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let at = self.len % BLOCK;
        if at == 0 {
            let free = self.blocks.free().pop();
            self.used.push(free.or_else(new_block).ok_or(std::io::ErrorKind::OutOfMemory)?);
        }
        let block = self.used.last_mut().expect("a block was begun");
        let count = bytes.len().min(BLOCK - at);
        let parts = block[at..at + count].par_chunks_mut(PART).zip(bytes.par_chunks(PART));
        parts.for_each(|(to, from)| to.copy_from_slice(&from[..to.len()]));
        self.len += count;
        Ok(count)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Drop for WaitingFile {
    /// The next file gets the blocks.
    fn drop(&mut self) {
        self.blocks.free().append(&mut self.used);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_holds_what_was_written_and_gives_its_blocks_to_the_next() {
        let blocks = Blocks::default();
        let bytes: Vec<u8> = (0..2 * BLOCK + PART / 2 + 5).map(|i| (i % 251) as u8).collect();
        // In pieces that end within a part, at a part, and beyond a block.
        for sizes in [[7, PART, 3], [PART - 1, 2, BLOCK], [BLOCK, BLOCK, 1]] {
            let mut file = blocks.file();
            let mut rest = &bytes[..];
            for size in sizes {
                let (piece, more) = rest.split_at(size);
                file.write_all(piece).unwrap();
                rest = more;
            }
            file.write_all(rest).unwrap();
            assert!(blocks.free().is_empty(), "a block of a file is free");
            let mut written = vec![];
            file.write_to(&mut written).unwrap();
            assert!(written == bytes, "the bytes are not those that were written");
            drop(file);
            assert_eq!(blocks.free().len(), 3, "a later file takes the blocks of the one before");
        }
        // Nothing of an older file follows a shorter one.
        let mut file = blocks.file();
        file.write_all(b"short").unwrap();
        let mut written = vec![];
        file.write_to(&mut written).unwrap();
        assert_eq!(written, b"short");
    }
}
