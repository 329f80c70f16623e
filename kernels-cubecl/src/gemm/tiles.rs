//! The choice of the width of tiles. A cube makes 128 rows of y, and 128, 160 or 64 columns: the width whose last wave
//! of tiles leaves least of the device idle.

use super::shape::GemmShape;
use crate::{cuda_text::hopper::is_hopper, device::processors, mma::UNITS};
use cubecl::prelude::*;

/// Rows of y that a cube makes. Columns after the first 128 lie in a separate region of shared memory.
pub(super) const TILE: u32 = 128;
/// Values of the summed index in a stage.
pub(super) const DEPTH: u32 = 64;
/// Stages of the ring.
pub(super) const STAGES: usize = 3;
/// Planes that make a tile.
pub(super) const PLANES: u32 = UNITS / 32;

/// The widths of tiles that this device can have: a ring of tiles with 160 columns takes 108 KiB of shared memory.
pub fn tile_columns<R: Runtime>(client: &ComputeClient<R>) -> Vec<usize> {
    let room = client.properties().hardware.max_shared_memory_size;
    let needed = |cols: &usize| STAGES * (TILE as usize + cols) * DEPTH as usize * 2;
    [TILE as usize, 160, 64].into_iter().filter(|cols| needed(cols) <= room).collect()
}

/// The number of tiles of a product.
pub(super) fn tiles(shape: &GemmShape, cols: usize) -> usize {
    shape.i.div_ceil(TILE as usize) * shape.j.div_ceil(cols)
}

/// The number of sums of squares of a result in tiles of `cols` columns: each of the planes that make a tile writes one.
pub fn mma_squares(shape: &GemmShape, cols: usize) -> usize {
    PLANES as usize * tiles(shape, cols)
}

/// The width of tiles with which a device of `processors` finishes soonest. Each multiprocessor makes its share of whole
/// tiles; a single tile keeps two thirds of a multiprocessor busy; narrow tiles read more for the same product.
pub(super) fn columns(shapes: &[GemmShape], processors: usize, offered: &[usize]) -> usize {
    let cost = |&cols: &usize| {
        let tiles = shapes.iter().map(|shape| tiles(shape, cols)).sum::<usize>().div_ceil(processors);
        let alone = if tiles == 1 { 3 } else { 2 };
        let narrow = if cols < TILE as usize { 120 } else { 100 };
        tiles * cols * alone * narrow
    };
    offered.iter().copied().min_by_key(cost).unwrap_or(TILE as usize)
}

/// Whether these products gain by one launch. On Hopper every tile of one launch follows another at once. Elsewhere separate
/// products do if one of them has fewer than three tiles for each multiprocessor; products that are summed do if one of them sums
/// fewer than 4,096 values. Otherwise the larger code of a joint launch costs more than it saves.
pub fn gains_together<R: Runtime>(client: &ComputeClient<R>, shapes: &[GemmShape], summed: bool) -> bool {
    let few = |s: &GemmShape| tiles(s, TILE as usize) < 3 * processors(client);
    let short = |s: &GemmShape| if summed { s.r < 64 * DEPTH as usize } else { few(s) };
    shapes.len() > 1 && (is_hopper(client) || shapes.iter().any(short))
}
