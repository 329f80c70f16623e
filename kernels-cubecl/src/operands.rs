//! What products read: the storage order of their operands, and the buffers of a packed matrix.

use crate::{
    error::{KernelError, expect_blocks, expect_len, require},
    layout::{scales_per_row, words_per_row},
};
use cubecl::prelude::*;

/// How the operands of a product are stored: which of their dimensions is summed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Product {
    /// `a[i, r] * w[j, r]`.
    Nt,
    /// `a[i, r] * w[r, j]`.
    Nn,
    /// `a[r, i] * w[r, j]`.
    Tn,
}

/// The buffers of a packed `rows` x `cols` matrix. Those of a master weight that a step updates are
/// [`Updated`](crate::adamw::Updated).
pub struct PackedArgs<R: Runtime, Buffer = ArrayArg<R>> {
    /// u32, `rows` x `cols / 8`.
    pub codes: Buffer,
    /// u8, `rows` x `cols / 16`.
    pub scales: Buffer,
    /// f32, 1.
    pub global: ArrayArg<R>,
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub cols: usize,
}

/// The buffers of a packed matrix on the device: vectors of code words, scales (one or several in a word), tensor
/// scale.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct PackedBuffers<Codes: CubePrimitive, Scales: CubePrimitive> {
    pub(crate) codes: Array<Codes>,
    pub(crate) scales: Array<Scales>,
    pub(crate) global: Array<f32>,
}

impl<R: Runtime> PackedArgs<R> {
    /// The buffers as a kernel takes them.
    pub(crate) fn launch<Codes: CubePrimitive, Scales: CubePrimitive>(self) -> PackedBuffersLaunch<Codes, Scales, R> {
        PackedBuffersLaunch::new(self.codes, self.scales, self.global)
    }

    pub(crate) fn check(&self, kernel: &'static str) -> Result<(), KernelError> {
        expect_blocks(kernel, "columns of a packed operand", self.cols)?;
        expect_len(kernel, "codes", self.codes.size(), self.rows * words_per_row(self.cols))?;
        expect_len(kernel, "scales", self.scales.size(), self.rows * scales_per_row(self.cols))?;
        expect_len(kernel, "global", self.global.size(), 1)
    }

    /// Checks both operands of `self · wᵀ`, and that they fit each other and `out`.
    pub(crate) fn check_product(&self, kernel: &'static str, w: &Self, out: &ArrayArg<R>) -> Result<(), KernelError> {
        self.check(kernel)?;
        w.check(kernel)?;
        require(kernel, self.cols == w.cols, || {
            format!("a has {} columns and w has {}; both are summed over", self.cols, w.cols)
        })?;
        expect_len(kernel, "out", out.size(), self.rows * w.rows)
    }
}
