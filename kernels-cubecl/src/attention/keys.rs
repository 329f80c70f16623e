//! Blocks of 64 keys and values on their way through shared memory: two stages, of which cp.async fills one while the other
//! is read.

use super::{BLOCK, UNITS};
use crate::mma::{Chunk, Source, fill, ring, sent, whole_rows};
use cubecl::prelude::{barrier::Barrier, *};

/// The two stages of one key head.
#[derive(CubeType)]
pub(crate) struct KeyBlocks<F: Float> {
    pub(crate) k: SharedMemory<Chunk<F>>,
    pub(crate) v: SharedMemory<Chunk<F>>,
    filled: Sequence<Shared<Barrier>>,
    source: Source,
    /// The head's first chunk in a row of all heads.
    column: u32,
    #[cube(comptime)]
    width: u32,
}

/// Room for the blocks of head `kv_head` of `len` keys.
#[cube]
pub(crate) fn key_blocks<F: Float>(
    len: u32,
    kv_head: u32,
    #[comptime] kv_heads: u32,
    #[comptime] dim: u32,
) -> KeyBlocks<F> {
    let width = comptime!(dim / 8);
    let room = comptime!((2 * BLOCK * width) as usize);
    KeyBlocks::<F> {
        k: SharedMemory::<Chunk<F>>::new_aligned(room, 128usize),
        v: SharedMemory::<Chunk<F>>::new_aligned(room, 128usize),
        filled: ring(2usize),
        source: whole_rows(len, comptime!(kv_heads * width)),
        column: kv_head * width,
        width,
    }
}

/// Starts the copies of a block into `stage`, and ends what else this unit has begun.
#[cube]
pub(crate) fn send_block<F: Float>(
    k: &Array<Chunk<F>>,
    v: &Array<Chunk<F>>,
    blocks: &mut KeyBlocks<F>,
    block: u32,
    #[comptime] stage: usize,
) {
    let (source, column, width) = (blocks.source, blocks.column, comptime!(blocks.width));
    let base = comptime!(stage as u32 * BLOCK * width);
    fill(k, source, block * BLOCK, column, &mut blocks.k, base, BLOCK, width, UNITS);
    fill(v, source, block * BLOCK, column, &mut blocks.v, base, BLOCK, width, UNITS);
    sent(&blocks.filled, stage);
}

/// Waits for block `now` in `stage` and starts the next one, if it is before `end`, in the other.
#[cube]
pub(crate) fn turn_block<F: Float>(
    k: &Array<Chunk<F>>,
    v: &Array<Chunk<F>>,
    blocks: &mut KeyBlocks<F>,
    now: u32,
    end: u32,
    phase: u32,
    #[comptime] stage: usize,
) {
    blocks.filled.index(stage).wait_parity(phase);
    // Nobody reads the other stage any more.
    sync_cube();
    if now + 1u32 < end {
        send_block(k, v, blocks, now + 1u32, comptime!(1 - stage));
    }
}
