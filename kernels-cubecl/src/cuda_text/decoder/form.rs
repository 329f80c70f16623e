//! What is compiled into a kernel: sizes, how the columns of each product are shared out, and what lies in shared memory.

use super::args::{ActivationRounding, DecoderBlock, DecoderShape, MAX_TOKENS, NAME, Weight};
use crate::error::{KernelError, require};
use cubecl::prelude::*;

/// Units of a cube, and warps.
pub(super) const UNITS: usize = 512;
const WARPS: usize = UNITS / 32;
/// The most shares of a sequence's keys.
pub(super) const SPLITS: usize = 64;
/// Warps of a team, which takes a share of the keys.
pub(super) const TEAM: usize = 4;
/// Columns that a warp multiplies at a time, and rows of a tile.
const SPAN: usize = 256;
const TILE: usize = 8;
/// Bytes for 32 numbers of each token, and the tensor scales of the weights.
pub(super) const SHARED_FOUND: usize = MAX_TOKENS * 32 * 4 + 32;
/// Bytes of a span of codes with their scales, in the ring of a warp.
pub(super) const SLOT: usize = 1280;
/// Bytes behind a row of activations.
const PADDING: usize = 64;
/// Columns of activations that all warps of a tile share evenly.
pub(super) const EVEN: usize = MOST_SPLIT * SPAN;
/// The most warps that share a tile.
const MOST_SPLIT: usize = 8;
/// The most values of a hidden state: a norm adds 32 sums of 256 squares.
const MOST_HIDDEN: usize = 8192;
/// The most query heads of a key head that a team takes together: the columns of a product of tensor cores.
const MOST_HEADS: usize = 8;

/// One of the four products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct ProductForm {
    /// Columns of the weights.
    cols: usize,
    /// Tiles of eight rows.
    tiles: usize,
    /// Weights that a warp multiplies together.
    parts: usize,
    /// Warps that share the columns of a tile.
    pub(super) split: usize,
    /// Whether the weights are codes.
    pub(super) codes: bool,
    /// How activations are rounded: 0 not, 1 each token by itself, 2 by a given scale.
    pub(super) scales: u8,
}

/// A form of the kernel. Its text depends on nothing else.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct DecoderForm {
    /// Places for tokens: 1, 2, 4, 8 or 16.
    pub(super) tokens: usize,
    pub(super) cubes: usize,
    pub(super) hidden: usize,
    pub(super) intermediate: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    /// Query heads that a team takes together.
    pub(super) heads_together: usize,
    /// The bits of the norms' epsilon.
    pub(super) eps: u32,
    /// Whether the caches hold E4M3 bytes.
    pub(super) cache_bytes: bool,
    /// Columns of activations that lie in shared memory at once.
    pub(super) chunk: usize,
    /// Places of the ring.
    pub(super) depth: usize,
    /// q, k and v; o; gate and up; down.
    pub(super) products: [ProductForm; 4],
}

impl DecoderForm {
    /// The form for packed weights, activations that are not rounded, and caches in bf16.
    ///
    /// # Errors
    /// If the kernel does not take these sizes.
    pub(super) fn new<R: Runtime>(
        client: &ComputeClient<R>,
        shape: DecoderShape,
        tokens: usize,
        cubes: usize,
    ) -> Result<Self, KernelError> {
        let DecoderShape { hidden, intermediate, heads, kv_heads, head_dim, eps } = shape;
        let queries = heads * head_dim;
        require(NAME, (1..=MAX_TOKENS).contains(&tokens), || format!("{tokens} tokens; it takes 1 to {MAX_TOKENS}"))?;
        require(NAME, cubes > 0, || "no cubes".into())?;
        require(NAME, [hidden, intermediate, queries].iter().all(|n| *n > 0 && n.is_multiple_of(SPAN)), || {
            format!("{hidden}, {intermediate} and {queries} columns; it takes multiples of {SPAN}")
        })?;
        require(NAME, hidden <= MOST_HIDDEN, || {
            format!("hidden states of {hidden} values; it takes at most {MOST_HIDDEN}")
        })?;
        require(NAME, matches!(head_dim, 64 | 128), || format!("E = {head_dim}; it must be 64 or 128"))?;
        require(NAME, kv_heads > 0 && heads.is_multiple_of(kv_heads), || {
            format!("{heads} query heads for {kv_heads} key heads")
        })?;
        let group = heads / kv_heads;
        let places = places(tokens);
        let product = |cols: usize, rows: usize, parts: usize| {
            let (tiles, spans) = (rows / TILE, cols / SPAN);
            let split = split(tiles, spans, parts, cubes);
            ProductForm { cols, tiles, parts, split, codes: true, scales: 0 }
        };
        let products = [
            product(hidden, (heads + 2 * kv_heads) * head_dim, 1),
            product(queries, hidden, 1),
            product(hidden, intermediate, 2),
            product(intermediate, hidden, 1),
        ];
        let most = client.properties().hardware.max_shared_memory_size;
        let form = |(together, depth)| {
            let form = Self {
                tokens: places,
                cubes,
                hidden,
                intermediate,
                heads,
                kv_heads,
                head_dim,
                heads_together: together,
                eps: eps.to_bits(),
                cache_bytes: false,
                chunk: 0,
                depth,
                products,
            };
            let whole = Self { chunk: form.longest(), ..form };
            // Where activations come in pieces, the running sums of all rounds are kept, and the pieces are smaller.
            whole.fitted(most).fitted(most)
        };
        let fits = |form: &Self| {
            let longest = form.longest();
            let pieces = form.chunk == longest || form.chunk >= EVEN;
            // One cube prepares all columns of a token.
            let row = form.activations_bytes() >= longest * 4;
            pieces && row && form.shared_bytes() <= most
        };
        // More heads together go before a deeper ring: keys are then read fewer times.
        let together = (1..=group.min(MOST_HEADS)).rev().filter(|n| group.is_multiple_of(*n));
        let form = together.flat_map(|together| [(together, 3), (together, 2)]).map(form).find(fits);
        let reason = || format!("{most} bytes of shared memory are not enough for {tokens} tokens");
        form.ok_or_else(|| KernelError::Shape { kernel: NAME, reason: reason() })
    }

    /// The form with as many columns of activations as `most` bytes of shared memory hold.
    fn fitted(self, most: usize) -> Self {
        let bytes = most.saturating_sub(self.other_bytes()) / self.rows();
        let chunk = self.longest().min(bytes.saturating_sub(PADDING) / 4 / SPAN * SPAN);
        Self { chunk, ..self }
    }

    /// The form for the weights, activations and caches of a block.
    ///
    /// # Errors
    /// If weights that read the same activations are stored in two ways.
    pub(super) fn for_block<R: Runtime>(mut self, block: &DecoderBlock<R>) -> Result<Self, KernelError> {
        let DecoderBlock { weights, rounded, caches, .. } = block;
        self.cache_bytes = caches.bytes;
        let packed = weights.each_ref().map(|w| matches!(w, Weight::Packed(_)));
        for (n, members) in [&packed[..3], &packed[3..4], &packed[4..6], &packed[6..]].into_iter().enumerate() {
            require(NAME, members.iter().all(|p| *p == members[0]), || {
                "some weights that read the same activations are packed, and some are not".into()
            })?;
            self.products[n].codes = members[0];
            self.products[n].scales = match rounded[n] {
                ActivationRounding::Not => 0,
                ActivationRounding::EachRow => 1,
                ActivationRounding::By { .. } => 2,
            };
        }
        Ok(self)
    }

    /// Bytes of the sums that warps exchange: of two rounds; or, where activations come in pieces, both running sums of all
    /// rounds.
    pub(super) fn sums_bytes(&self) -> usize {
        let sums =
            |p: &ProductForm| if p.cols > self.chunk { 2 * p.rounds(self.cubes) } else { p.rounds(self.cubes).min(2) };
        let most = self.products.iter().map(|p| sums(p) * p.parts).max().unwrap_or(2);
        most * WARPS * self.tokens * TILE * 4
    }

    /// Columns of the widest activations.
    fn longest(&self) -> usize {
        self.products.iter().map(|p| p.cols).max().unwrap_or(0)
    }

    /// Whether activations are rounded by one cube for all: with more than two tokens, or if they come in pieces.
    pub(super) fn prepares(&self) -> bool {
        self.tokens > 2 || self.chunk < self.longest()
    }

    /// Rows of activations in shared memory: each serves two tokens.
    pub(super) fn rows(&self) -> usize {
        self.tokens.min(8)
    }

    /// Bytes from a row of activations to the next: four a column, and as many more as keep two rows in different banks.
    pub(super) fn stride(&self) -> usize {
        self.chunk * 4 + PADDING
    }

    fn activations_bytes(&self) -> usize {
        self.rows() * self.stride()
    }

    /// Bytes of shared memory besides activations.
    fn other_bytes(&self) -> usize {
        self.sums_bytes() + SHARED_FOUND + WARPS * self.depth * SLOT
    }

    /// Bytes of shared memory.
    pub(super) fn shared_bytes(&self) -> usize {
        self.other_bytes() + self.activations_bytes().max(WARPS / TEAM * self.team_bytes())
    }

    /// Bytes of a team of attention, which has its memory in the place of activations.
    pub(super) fn team_bytes(&self) -> usize {
        let (heads, dim) = (self.heads_together, self.head_dim);
        (heads + 2) * dim * 2 + TEAM * heads * (dim + 2) * 4
    }
}

impl ProductForm {
    /// Rounds in which the cubes take all tiles.
    fn rounds(&self, cubes: usize) -> usize {
        rounds(self.tiles, self.split, cubes)
    }
}

fn rounds(tiles: usize, split: usize, cubes: usize) -> usize {
    tiles.div_ceil(cubes).div_ceil(WARPS / split)
}

/// Places for tokens of the kernel that takes this many.
pub(super) fn places(tokens: usize) -> usize {
    tokens.next_power_of_two()
}

/// The number of warps that share a tile: the choice with which a warp has least to do. A round costs as much as three spans
/// besides. It does not depend on the tokens, because it decides in which order a sum takes its terms. Pieces of activations
/// change nothing in that order: each carries on the sums of the one before, and ends where all warps have as many spans.
fn split(tiles: usize, spans: usize, parts: usize, cubes: usize) -> usize {
    let cost = |split: &usize| rounds(tiles, *split, cubes) * (spans.div_ceil(*split) * parts + 3);
    [2, 4, MOST_SPLIT].into_iter().min_by_key(cost).unwrap_or(MOST_SPLIT)
}
