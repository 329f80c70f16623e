//! The compile-time form of a product, and the tile of it that a cube makes.

use cubecl::prelude::*;

/// How the operands of a product are stored, the columns of its tiles, and whether the squares of its results are summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct GemmForm {
    pub(super) cols: u32,
    pub(super) a_across: bool,
    pub(super) b_across: bool,
    pub(super) measured: bool,
}

impl GemmForm {
    /// Number of blocks of eight columns that a plane makes.
    pub(super) fn blocks(self) -> usize {
        self.cols as usize / 16
    }

    /// Number of fragments of sums that a plane keeps.
    pub(super) fn sums(self) -> usize {
        self.blocks() * 4
    }
}

/// The tile of a product that a cube makes: its first row and column, and the shape of the product.
#[derive(CubeType, Clone, Copy)]
pub(super) struct TilePlace {
    pub(super) i0: u32,
    pub(super) j0: u32,
    pub(super) i_len: u32,
    pub(super) j_len: u32,
    pub(super) r_len: u32,
}
