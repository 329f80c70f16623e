//! How the tiles of a product with few rows are shared out among planes, and where the tokens' values lie.

use super::SPAN;
use crate::codec::{pair_unit, scale_unit};
use cubecl::{
    ir::{ElemType, FloatKind},
    prelude::*,
};

/// Bytes of shared memory that the tokens' values take at most: two cubes find a place on a multiprocessor of an H200.
const STAGED: usize = 100 << 10;
/// Room that barriers take in shared memory, at most.
const BARRIERS: usize = 1 << 10;
/// Planes that find a place at once, each with one span on its way, or with two, which take more registers: 32 and 20 a
/// multiprocessor of an H200. With more some cubes start late.
const PLANES: [usize; 2] = [4224, 2640];
/// Tiles of 16 rows from which on one token's are not halved.
const TALL: usize = 384;

/// Everything about a launch that is compiled in, but the weights' rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Plan {
    /// Columns.
    pub(super) k: u32,
    /// Planes that share a tile's columns.
    pub(super) shares: u32,
    /// Tiles of a cube.
    pub(super) together: u32,
    /// Spans, or windows of tokens, that a plane has on their way or multiplies.
    pub(super) depth: usize,
    /// Whether a tile has 16 rows, or eight.
    tall: bool,
    pub(super) tokens: Tokens,
    pub(super) bf16: bool,
}

/// How many tokens there are, and where their values lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Tokens {
    /// One, in shared memory.
    One,
    /// At most `held`, in shared memory.
    Staged { held: usize },
    /// At most `held`, in shared memory in windows: what a step of all planes multiplies.
    Windows { held: usize },
}

impl Plan {
    /// For `rows` rows of type `dtype` times weights of `n` rows together, `k` columns.
    pub fn new<R: Runtime>(client: &ComputeClient<R>, rows: usize, n: usize, k: usize, dtype: StorageType) -> Self {
        // More tokens are more to read for a tile: it is not halved.
        let height = if rows > 1 || n.div_ceil(16) >= TALL { 16 } else { 8 };
        let spans = k / SPAN;
        let all = n.div_ceil(height) * spans;
        // Spans of a plane, as even as they get. Many planes to a cube would leave too little room for a second cube.
        let own = if all <= PLANES[0] { 1 } else { all.div_ceil(PLANES[1]).min(spans) };
        let mut shares = spans.div_ceil(own).min(if own == 1 { 16 } else { 8 });
        let planes = if rows > 4 { 8 } else { 4 };
        loop {
            let depth = spans.div_ceil(shares).min(2);
            let of = |together| Self::of(client, rows, k, dtype, [shares, together, depth, height].map(|n| n as u32));
            let together = (planes / shares).max(1);
            match of(together) {
                // Windows of more than eight tokens leave room for few planes: two tiles read them.
                Some(plan) if plan.windows() && rows > 8 => return of(together.max(2)).unwrap_or(plan),
                Some(plan) => return plan,
                // Fewer planes, smaller windows: one's find a place on every device.
                None => shares -= 1,
            }
        }
    }

    /// With `[shares, together, depth, height]` as they are given: planes that share a tile's columns, tiles of a cube,
    /// spans that a plane has on their way, rows of a tile (16 or 8). None if a cube has no planes or more than 32, or the
    /// tokens' values find no place.
    pub fn of<R: Runtime>(
        client: &ComputeClient<R>,
        rows: usize,
        k: usize,
        dtype: StorageType,
        [shares, together, depth, height]: [u32; 4],
    ) -> Option<Self> {
        let planes = shares.saturating_mul(together);
        if shares == 0 || together == 0 || depth == 0 || planes > 32 {
            return None;
        }
        let held = rows.next_power_of_two();
        let tokens = if rows == 1 { Tokens::One } else { Tokens::Staged { held } };
        let (bf16, tall) = (is_bf16(dtype), height == 16);
        let staged = Self { k: k as u32, shares, together, depth: depth as usize, tall, tokens, bf16 };
        // One window is filled while another is read.
        let windows = Self { tokens: Tokens::Windows { held }, depth: staged.depth.max(2), ..staged };
        let room = client.properties().hardware.max_shared_memory_size;
        let fits = |plan: &Self| {
            let (values, sums) = (plan.staged_chunks() * 16, plan.shared_sums() * 4);
            values <= STAGED && values + sums + BARRIERS <= room
        };
        [staged, windows].into_iter().find(fits)
    }

    /// Whether it was made for `rows` rows of `k` columns of type `dtype`, or for no fewer rows.
    pub(super) fn is_for(self, rows: usize, k: usize, dtype: StorageType) -> bool {
        let one = self.tokens != Tokens::One || rows == 1;
        one && rows <= self.held() && self.k as usize == k && self.bf16 == is_bf16(dtype)
    }

    /// Rows of a tile.
    pub(super) fn height(self) -> u32 {
        if self.tall { 16 } else { 8 }
    }

    /// Of those, a lane's.
    pub(super) fn halves(self) -> usize {
        if self.tall { 2 } else { 1 }
    }

    /// Spans of a row.
    pub(super) fn spans(self) -> u32 {
        self.k / SPAN as u32
    }

    /// Rows of the weight that a cube takes.
    pub(super) fn lines(self) -> u32 {
        self.together * self.height()
    }

    /// Planes of a cube.
    fn planes(self) -> u32 {
        self.shares * self.together
    }

    pub(super) fn units(self) -> u32 {
        self.planes() * 32
    }

    /// Right operands, and tokens in each.
    pub(super) fn groups(self) -> usize {
        match self.tokens {
            Tokens::One => 1,
            Tokens::Staged { held } | Tokens::Windows { held } => held.div_ceil(8),
        }
    }

    /// Sums that a plane has of its tile.
    pub(super) fn sums_of_plane(self) -> u32 {
        self.height() * if self.tokens == Tokens::One { 1 } else { self.groups() as u32 * 8 }
    }

    /// Sums of the planes that share tiles.
    pub(super) fn shared_sums(self) -> usize {
        if self.shares > 1 { (self.planes() * self.sums_of_plane()) as usize } else { 1 }
    }

    /// Chunks of shared memory that the tokens' values take.
    pub(super) fn staged_chunks(self) -> usize {
        match self.tokens {
            Tokens::One => self.k as usize / 8 + 6,
            Tokens::Staged { held } => held * self.stride() as usize,
            Tokens::Windows { .. } => self.depth * self.window(),
        }
    }

    /// Tokens whose sums a lane holds, of a right operand's.
    pub(super) fn columns(self) -> usize {
        if self.tokens == Tokens::One { 1 } else { 2 }
    }

    /// Chunks from one staged token to the next. A chunk is left free after eight, and an odd multiple of four is a row:
    /// the eight lanes that are served at a time meet different banks.
    pub(super) fn stride(self) -> u32 {
        let columns = if self.windows() { self.shares * SPAN as u32 } else { self.k };
        (columns / 64 * 9) | 4
    }

    /// Whether tokens' values lie in windows.
    pub(super) fn windows(self) -> bool {
        matches!(self.tokens, Tokens::Windows { .. })
    }

    /// Chunks of a window.
    pub(super) fn window(self) -> usize {
        self.held() * self.stride() as usize
    }

    /// Tokens that find a place in shared memory.
    pub(super) fn held(self) -> usize {
        match self.tokens {
            Tokens::One => 1,
            Tokens::Staged { held } | Tokens::Windows { held } => held,
        }
    }

    /// Steps in which all planes are done.
    pub(super) fn steps(self) -> u32 {
        self.spans().div_ceil(self.shares)
    }

    /// What one token's values are multiplied by.
    pub(super) fn value_unit(self) -> f32 {
        if self.bf16 { 2.0f32.powi(63) } else { 1.0 }
    }

    /// What gives the units back.
    pub(super) fn factor(self) -> f32 {
        let unit = if self.tokens == Tokens::One { self.value_unit() } else { scale_unit(self.bf16) };
        1.0 / pair_unit(self.bf16) / unit
    }
}

fn is_bf16(dtype: StorageType) -> bool {
    dtype == StorageType::Scalar(ElemType::Float(FloatKind::BF16))
}
