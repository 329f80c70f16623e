//! The host's memory in which a checkpoint waits until it is written to the disk.
//!
//! Training waits while the files are copied there. Memory that the system has never given to the process is slow to write:
//! each of its pages is cleared first. So a thread touches the blocks before the first checkpoint, and every checkpoint uses
//! them again.

use crate::{CliError, memory::host};
use backend_nvfp4::host_memory;
use rayon::{
    iter::{IndexedParallelIterator, ParallelIterator},
    slice::{ParallelSlice, ParallelSliceMut},
};
use std::{
    io::Write,
    sync::{Arc, Mutex, MutexGuard, Weak},
    thread,
};

/// Bytes that are taken from the system at a time.
const BLOCK: usize = 32 << 20;

/// Bytes that one thread copies at a time.
const PART: usize = 256 << 10;

/// The memory of all files. The system gets it back when the last file and the last of these handles are dropped.
#[derive(Debug, Clone)]
pub(super) struct Blocks(Arc<Mutex<Stock>>);

#[derive(Debug)]
struct Stock {
    /// Blocks that no file uses.
    free: Vec<Vec<u8>>,
    /// Blocks that are still to be taken.
    missing: u64,
}

impl Blocks {
    /// Lets a thread take `bytes` bytes, while the program goes on. It stops when the host has less than is still missing and
    /// `bytes` beside it, since other programs may have begun meanwhile. A file takes from the system what is missing then.
    ///
    /// # Errors
    /// If there is no thread.
    pub(super) fn taking(bytes: u64) -> Result<Self, CliError> {
        let blocks = Self(Arc::new(Mutex::new(Stock { free: vec![], missing: bytes.div_ceil(BLOCK as u64) })));
        let taken = Arc::downgrade(&blocks.0);
        let take = move || while take_one(&taken, bytes) {};
        let thread = thread::Builder::new().name("memory for checkpoints".into()).spawn(take);
        thread.map_err(CliError::no_thread("memory for checkpoints"))?;
        Ok(blocks)
    }

    /// An empty file.
    pub(super) fn file(&self) -> WaitingFile {
        WaitingFile { blocks: self.clone(), used: vec![], len: 0 }
    }

    /// A block for a file, or None if the host refuses.
    fn block(&self) -> Option<Vec<u8>> {
        let mut stock = stock(&self.0);
        if let Some(block) = stock.free.pop() {
            return Some(block);
        }
        stock.missing = stock.missing.saturating_sub(1);
        drop(stock);
        new_block()
    }
}

/// Takes one of the blocks that are missing, as long as there are files to come. Returns whether it did.
fn take_one(blocks: &Weak<Mutex<Stock>>, beside: u64) -> bool {
    let Some(blocks) = blocks.upgrade() else { return false };
    let available = host::available();
    if !stock(&blocks).counts_one(available, beside) {
        return false;
    }
    let block = new_block();
    let taken = block.is_some();
    stock(&blocks).free.extend(block);
    taken
}

impl Stock {
    /// Counts one of the missing blocks as taken, unless there is none, or the host has less than `beside` bytes besides all of
    /// them. Returns whether it did. A file that takes a block at the same time counts it before or after this, not meanwhile.
    fn counts_one(&mut self, available: Option<u64>, beside: u64) -> bool {
        let lacks = available.is_some_and(|free| free < self.missing * BLOCK as u64 + beside);
        let counts = self.missing > 0 && !lacks;
        self.missing -= u64::from(counts);
        counts
    }
}

fn stock(blocks: &Mutex<Stock>) -> MutexGuard<'_, Stock> {
    blocks.lock().expect("no thread panics while it holds the lock")
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
        if bytes.is_empty() {
            return Ok(0);
        }
        let at = self.len % BLOCK;
        if at == 0 {
            self.used.push(self.blocks.block().ok_or(std::io::ErrorKind::OutOfMemory)?);
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
        stock(&self.blocks.0).free.append(&mut self.used);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(missing: u64) -> Blocks {
        Blocks(Arc::new(Mutex::new(Stock { free: vec![], missing })))
    }

    #[test]
    fn a_file_holds_what_was_written_and_gives_its_blocks_to_the_next() {
        let blocks = blocks(0);
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
            assert!(stock(&blocks.0).free.is_empty(), "a block of a file is free");
            let mut written = vec![];
            file.write_to(&mut written).unwrap();
            assert!(written == bytes, "the bytes are not those that were written");
            drop(file);
            assert_eq!(stock(&blocks.0).free.len(), 3, "a later file takes the blocks of the one before");
        }
        // Nothing of an older file follows a shorter one.
        let mut file = blocks.file();
        file.write_all(b"short").unwrap();
        let mut written = vec![];
        file.write_to(&mut written).unwrap();
        assert_eq!(written, b"short");
    }

    #[test]
    fn a_file_that_comes_too_early_takes_no_memory_twice() {
        let blocks = blocks(3);
        let taken = Arc::downgrade(&blocks.0);
        let mut file = blocks.file();
        assert!(take_one(&taken, 0));
        // It finds one block, and takes another itself.
        file.write_all(&vec![1; BLOCK + 1]).unwrap();
        assert!(take_one(&taken, 0) && !take_one(&taken, 0), "another block is missing, and no more");
        drop(file);
        assert_eq!(stock(&blocks.0).free.len(), 3);
    }

    /// Files and the thread count blocks at the same time. With the count read and changed under two locks, as it was, the thread
    /// counted below zero and panicked.
    #[test]
    fn files_and_the_thread_count_a_block_once() {
        let blocks = Blocks(Arc::new(Mutex::new(Stock { free: vec![], missing: 20_000 })));
        let counted =
            |count: &(dyn Fn(&mut Stock) -> bool + Sync)| (0..20_000).filter(|_| count(&mut stock(&blocks.0))).count();
        let file = |stock: &mut Stock| {
            let counts = stock.missing > 0;
            stock.missing = stock.missing.saturating_sub(1);
            counts
        };
        let (one, other) = rayon::join(|| counted(&|stock| stock.counts_one(None, 0)), || counted(&file));
        assert_eq!((one + other, stock(&blocks.0).missing), (20_000, 0));
    }

    #[test]
    fn no_memory_is_taken_that_others_need_or_nobody_wants() {
        let blocks = blocks(3);
        let taken = Arc::downgrade(&blocks.0);
        if cfg!(target_os = "linux") {
            assert!(!take_one(&taken, u64::MAX / 2), "the host has no such memory");
        }
        drop(blocks);
        assert!(!take_one(&taken, 0), "there will be no more files");
    }
}
