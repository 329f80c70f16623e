//! What is compiled into a kernel, and the shared memory that it takes.

use crate::{
    cuda_text::hopper::{ALIGNMENT, BARRIERS, Number, PIECE, SHARED},
    error::{KernelError, require},
    gemm::{args::Gemm, shape::NAME},
    operands::Product,
};
use cubecl::prelude::*;

/// Rows of a tile.
pub(super) const TILE_ROWS: usize = 128;
/// Values of `r` in a stage.
pub(super) const STAGE_DEPTH: usize = 64;
/// The most products of one launch: a kernel's parameters may take 4 KiB, and a tensor map takes 128 bytes.
const MOST: usize = 4;
/// Bytes of 64 rows of a stage.
const BOX: usize = 64 * STAGE_DEPTH * 2;

/// What a tensor map leads to. The last columns of a tile's result may have a map of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mapped {
    A,
    B,
    Out,
    Edge,
}

impl Mapped {
    /// The name of the operand in the kernel's text.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::A => "a",
            Self::B => "b",
            Self::Out => "out",
            Self::Edge => "edge",
        }
    }
}

/// A form of the kernel. Its text depends on nothing else.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct HopperGemmForm {
    pub(super) cols: usize,
    pub(super) a_across: bool,
    pub(super) b_across: bool,
    /// Number of products, of left and of right operands.
    pub(super) parts: usize,
    pub(super) lefts: usize,
    pub(super) rights: usize,
    /// Tensor scales of each product.
    pub(super) scales: usize,
    pub(super) summed: bool,
    pub(super) accumulate: bool,
    /// Whether the sums of squares of tiles are written.
    pub(super) measured: bool,
    pub(super) operand: Number,
    pub(super) result: Number,
}

impl HopperGemmForm {
    /// The form of these products in tiles of `cols` columns.
    ///
    /// # Errors
    /// If there is no kernel for them.
    pub(super) fn of<R: Runtime>(products: &Gemm<R>, cols: usize) -> Result<Self, KernelError> {
        let number = |ty| {
            let reason = || format!("numbers of type {ty} have no instruction of Hopper");
            Number::of(ty).ok_or_else(|| KernelError::Shape { kernel: NAME, reason: reason() })
        };
        let (operand, result) = (number(products.types.0)?, number(products.types.1)?);
        require(NAME, operand != Number::F32, || "Hopper's instructions multiply 16-bit numbers, not f32".into())?;
        let stored_sums = !products.accumulate || result == Number::F32;
        require(NAME, stored_sums, || "no Hopper kernel adds to 16-bit results".into())?;
        let parts = products.shapes.len();
        require(NAME, parts <= MOST, || format!("{parts} products; a Hopper kernel takes at most {MOST}"))?;
        let empty = products.shapes.iter().find(|s| s.i * s.j * s.r == 0);
        require(NAME, empty.is_none(), || format!("a Hopper kernel takes no empty product, and here is {empty:?}"))?;
        Ok(Self {
            cols,
            a_across: products.product == Product::Tn,
            b_across: products.product != Product::Nt,
            parts,
            lefts: products.a.len(),
            rights: products.b.len(),
            scales: products.scales.len() / parts,
            summed: products.summed(),
            accumulate: products.accumulate,
            measured: !products.squares.is_empty(),
            operand,
            result,
        })
    }

    /// Number of results.
    pub(super) fn results(&self) -> usize {
        if self.summed { 1 } else { self.parts }
    }

    /// Whether the last columns of a tile need a map of their own: 16-bit results are stored in pieces of 64 columns.
    pub(super) fn has_edge(&self) -> bool {
        self.result != Number::F32 && !self.cols.is_multiple_of(PIECE)
    }

    /// Every tensor map, in the order of the kernel's parameters: the operand and its number.
    pub(super) fn maps(&self) -> Vec<(Mapped, usize)> {
        let edges = if self.has_edge() { self.results() } else { 0 };
        let groups =
            [(Mapped::A, self.lefts), (Mapped::B, self.rights), (Mapped::Out, self.results()), (Mapped::Edge, edges)];
        groups.into_iter().flat_map(|(of, count)| (0..count).map(move |n| (of, n))).collect()
    }

    /// Stages of the ring in shared memory.
    pub(super) fn stages(&self) -> usize {
        (SHARED - ALIGNMENT - BARRIERS - self.results_bytes()) / self.stage_bytes()
    }

    /// Bytes of shared memory.
    pub(super) fn shared_bytes(&self) -> usize {
        ALIGNMENT + BARRIERS + self.results_bytes() + self.stages() * self.stage_bytes()
    }

    fn boxes(&self) -> usize {
        self.cols.div_ceil(PIECE)
    }

    fn stage_bytes(&self) -> usize {
        (2 + self.boxes()) * BOX
    }

    fn results_bytes(&self) -> usize {
        2 * self.boxes() * BOX
    }
}
