//! What is compiled into a kernel, and the shared memory that it takes.

use crate::{
    attention::Heads,
    cuda_text::hopper::{ALIGNMENT, BARRIERS, Number, PIECE, SHARED},
};

/// Rows that a cube owns: 64 for each of two warpgroups.
pub(super) const ROWS: usize = 128;
/// Rows of a warpgroup, which are copied and stored together.
pub(super) const OWN_ROWS: usize = 64;

/// Which kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kernel {
    Forward,
    /// The gradients of keys and values.
    Keys,
    /// The gradient of queries.
    Queries,
}

/// What is compiled into a kernel.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct HopperAttentionForm {
    pub(super) kernel: Kernel,
    pub(super) heads: Heads,
    pub(super) number: Number,
}

impl HopperAttentionForm {
    /// Rows of a block: keys, or for [`Kernel::Keys`] queries.
    pub(super) fn block(&self) -> usize {
        if self.kernel == Kernel::Keys { 64 } else { 128 }
    }

    /// Stages of the ring in shared memory: as many as there is room for, and no more than hide the copies.
    pub(super) fn stages(&self) -> usize {
        let room = SHARED - ALIGNMENT - BARRIERS - self.own_bytes();
        (room / self.stage_bytes()).min(4)
    }

    /// Bytes of shared memory.
    pub(super) fn shared_bytes(&self) -> usize {
        ALIGNMENT + BARRIERS + self.own_bytes() + self.stages() * self.stage_bytes()
    }

    /// The height of boxes in which the matrix of this name is copied.
    pub(super) fn box_rows(&self, name: &str) -> usize {
        match (self.kernel, name) {
            (Kernel::Forward | Kernel::Queries, "k" | "v") => self.block(),
            _ => OWN_ROWS,
        }
    }

    /// Bytes of a row of a head in shared memory, in all its boxes.
    fn row_bytes(&self) -> usize {
        self.heads.dim as usize / PIECE * 128
    }

    /// The rows of a cube: of one matrix in the forward kernel, of two in the others.
    fn own_bytes(&self) -> usize {
        let matrices = if self.kernel == Kernel::Forward { 1 } else { 2 };
        matrices * ROWS * self.row_bytes()
    }

    /// A block of each of two matrices, and what belongs to its queries.
    fn stage_bytes(&self) -> usize {
        let values = if self.kernel == Kernel::Keys { 2 * self.block() * 4 } else { 0 };
        2 * self.block() * self.row_bytes() + values
    }
}
