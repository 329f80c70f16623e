//! Blocks of 64 keys and values in shared memory, in two stages: `cp.async` fills one while the kernel reads the
//! other.

use super::{BLOCK_ROWS, Heads};
use crate::mma::{Octet, TileSource, fill, ring, sent, whole_rows};
use cubecl::prelude::{barrier::Barrier, *};

/// Two stages of blocks of one key head.
#[derive(CubeType)]
pub(crate) struct KeyBlocks<F: Float> {
    pub(crate) k: SharedMemory<Octet<F>>,
    pub(crate) v: SharedMemory<Octet<F>>,
    filled: Sequence<Shared<Barrier>>,
    source: TileSource,
    /// The first octet of the head in a row of all heads.
    column: u32,
    #[cube(comptime)]
    width: u32,
}

/// Reserves shared memory for the blocks of key head `kv_head`, one of `keys` rows.
#[cube]
pub(crate) fn key_blocks<F: Float>(keys: u32, kv_head: u32, #[comptime] heads: Heads) -> KeyBlocks<F> {
    let width = heads.width();
    let room = comptime!((2 * BLOCK_ROWS * width) as usize);
    KeyBlocks::<F> {
        k: SharedMemory::<Octet<F>>::new_aligned(room, 128usize),
        v: SharedMemory::<Octet<F>>::new_aligned(room, 128usize),
        filled: ring(2usize),
        source: whole_rows(keys, comptime!(heads.kv_heads * width)),
        column: kv_head * width,
        width,
    }
}

/// Starts the copies of a block into `stage`, and marks the end of all copies that this unit has started.
#[cube]
pub(crate) fn send_block<F: Float>(
    k: &Array<Octet<F>>,
    v: &Array<Octet<F>>,
    blocks: &mut KeyBlocks<F>,
    block: u32,
    #[comptime] stage: usize,
) {
    let (source, column, width) = (blocks.source, blocks.column, comptime!(blocks.width));
    let base = comptime!(stage as u32 * BLOCK_ROWS * width);
    fill(k, source, block * BLOCK_ROWS, column, &mut blocks.k, base, BLOCK_ROWS, width);
    fill(v, source, block * BLOCK_ROWS, column, &mut blocks.v, base, BLOCK_ROWS, width);
    sent(&blocks.filled, stage);
}

/// Waits for block `now` in `stage`, and starts the copies of the next one into the other stage, if it is before
/// `end`.
#[cube]
pub(crate) fn turn_block<F: Float>(
    k: &Array<Octet<F>>,
    v: &Array<Octet<F>>,
    blocks: &mut KeyBlocks<F>,
    now: u32,
    end: u32,
    phase: u32,
    #[comptime] stage: usize,
) {
    blocks.filled.index(stage).wait_parity(phase);
    // From here on no unit reads the other stage.
    sync_cube();
    if now + 1u32 < end {
        send_block(k, v, blocks, now + 1u32, comptime!(1 - stage));
    }
}
