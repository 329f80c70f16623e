//! The choice of the width of tiles.

use super::form::TILE_ROWS;
use crate::{gemm::shape::GemmShape, operands::Product};

/// The widths that there are. Where `b` lies across, its rows are copied in pieces of 64.
pub fn hopper_columns(product: Product) -> &'static [usize] {
    if product == Product::Nt { &[256, 192, 160, 128] } else { &[256, 192, 128] }
}

/// The number of tiles of these products.
pub(super) fn tiles(shapes: &[GemmShape], cols: usize) -> usize {
    shapes.iter().map(|s| s.i.div_ceil(TILE_ROWS) * s.j.div_ceil(cols)).sum()
}

/// The number of sums of squares of a result: each of the two warpgroups that make a tile writes one.
pub fn hopper_squares(shape: &GemmShape, cols: usize) -> usize {
    2 * tiles(&[*shape], cols)
}

/// The width with which a device of `processors` finishes soonest. Each multiprocessor makes its share of whole tiles. The
/// time of a tile grows with its columns, and reading its rows of `a` costs as much as 40 columns.
pub(super) fn columns(shapes: &[GemmShape], product: Product, processors: usize) -> usize {
    let cost = |cols: &usize| tiles(shapes, *cols).div_ceil(processors) * (*cols + 40);
    hopper_columns(product).iter().copied().min_by_key(cost).unwrap_or(TILE_ROWS)
}
