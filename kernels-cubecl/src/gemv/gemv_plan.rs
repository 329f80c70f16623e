//! How [`super::gemv()`] divides the tiles of a product among planes, and where the activations of the tokens lie.

use crate::codec::{pair_unit, scale_unit};
use cubecl::{
    ir::{ElemType, FloatKind},
    prelude::*,
};

/// The most rows that x may have.
pub const MAX_ROWS: usize = 16;
/// Columns that a plane takes at a time: two vectors of 32 codes for each of the four lanes of a row.
pub(super) const SPAN: usize = 256;

/// The most bytes of shared memory for activations: two cubes then fit on a multiprocessor of an H200.
const STAGED: usize = 100 << 10;
/// The most bytes of shared memory that barriers take.
const BARRIERS: usize = 1 << 10;
/// The number of planes that fit on an H200 at once: 32 a multiprocessor if each has one span in flight, 20 if it has
/// two, which take more registers. Some cubes of a larger launch would start late.
const PLANES: [usize; 2] = [4224, 2640];
/// From this number of 16-row tiles on, a tile has 16 rows for a single token too.
const TALL: usize = 384;

/// The choices that are compiled into a launch, except for the rows of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GemvPlan {
    /// Length of the sums: columns of the weights.
    pub(super) r_len: u32,
    /// Number of planes that share the columns of a tile.
    pub(super) shares: u32,
    /// Number of tiles of a cube.
    pub(super) together: u32,
    /// Number of spans, or of windows of activations, that a plane loads ahead or multiplies.
    pub(super) depth: usize,
    /// Whether a tile has 16 rows; otherwise it has eight.
    tall: bool,
    pub(super) tokens: Tokens,
    pub(super) bf16: bool,
}

/// The number of tokens, and where their activations lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Tokens {
    /// One token, in shared memory.
    One,
    /// At most `held` tokens, in shared memory.
    Staged { held: usize },
    /// At most `held` tokens, of which shared memory holds windows: the columns that one step of all planes
    /// multiplies.
    Windows { held: usize },
}

impl GemvPlan {
    /// Chooses for `rows` tokens of type `dtype`, and for weights of `r_len` columns that have `weight_rows` rows
    /// together.
    pub fn new<R: Runtime>(
        client: &ComputeClient<R>,
        rows: usize,
        weight_rows: usize,
        r_len: usize,
        dtype: StorageType,
    ) -> Self {
        // A tile of eight rows reads as many activations as one of 16, so it pays for one token only.
        let height = if rows > 1 || weight_rows.div_ceil(16) >= TALL { 16 } else { 8 };
        let spans = r_len / SPAN;
        let all = weight_rows.div_ceil(height) * spans;
        // The spans of a tile are divided evenly. A cube of many planes would leave too little room for a second
        // cube.
        let own = if all <= PLANES[0] { 1 } else { all.div_ceil(PLANES[1]).min(spans) };
        let mut shares = spans.div_ceil(own).min(if own == 1 { 16 } else { 8 });
        loop {
            match Self::with_shares(client, rows, r_len, dtype, [shares, height]) {
                Some(plan) => return plan,
                // Fewer planes need smaller windows; the windows of a single plane fit on every device.
                None => shares -= 1,
            }
        }
    }

    /// Chooses so that the sums of a token take their terms in one order for any number of `rows` up to
    /// [`MAX_ROWS`]: that of the plan for the most rows. A plan for a single token has an order of its own, so
    /// this one has room for two.
    pub fn in_one_order<R: Runtime>(
        client: &ComputeClient<R>,
        rows: usize,
        weight_rows: usize,
        r_len: usize,
        dtype: StorageType,
    ) -> Self {
        let most = Self::new(client, MAX_ROWS, weight_rows, r_len, dtype);
        let form = [most.shares as usize, most.height() as usize];
        Self::with_shares(client, rows.max(2), r_len, dtype, form).unwrap_or(most)
    }

    /// The plan in which so many planes share the columns of a tile of this height. `None` if the activations do not fit into
    /// shared memory.
    fn with_shares<R: Runtime>(
        client: &ComputeClient<R>,
        rows: usize,
        r_len: usize,
        dtype: StorageType,
        [shares, height]: [usize; 2],
    ) -> Option<Self> {
        let depth = (r_len / SPAN).div_ceil(shares).min(2);
        let of = |together| Self::of(client, rows, r_len, dtype, [shares, together, depth, height].map(|n| n as u32));
        let planes = if rows > 4 { 8 } else { 4 };
        let together = (planes / shares).max(1);
        let plan = of(together)?;
        // Windows of more than eight tokens leave room for few planes, so two tiles share them.
        let wider = (plan.windows() && rows > 8).then(|| of(together.max(2))).flatten();
        Some(wider.unwrap_or(plan))
    }

    /// The plan with the given `[shares, together, depth, height]`: planes that share the columns of a tile, tiles of
    /// a cube, spans that a plane loads ahead, and rows of a tile (16 or 8). None if a cube would have no planes or
    /// more than 32, or if the activations do not fit into shared memory.
    pub fn of<R: Runtime>(
        client: &ComputeClient<R>,
        rows: usize,
        r_len: usize,
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
        let staged = Self { r_len: r_len as u32, shares, together, depth: depth as usize, tall, tokens, bf16 };
        // One window is filled while another is read.
        let windows = Self { tokens: Tokens::Windows { held }, depth: staged.depth.max(2), ..staged };
        let room = client.properties().hardware.max_shared_memory_size;
        let fits = |plan: &Self| {
            let (values, sums) = (plan.staged_octets() * 16, plan.shared_sums() * 4);
            values <= STAGED && values + sums + BARRIERS <= room
        };
        [staged, windows].into_iter().find(fits)
    }

    /// Whether the plan serves `rows` tokens of type `dtype` and sums of `r_len` values.
    pub(super) fn is_for(self, rows: usize, r_len: usize, dtype: StorageType) -> bool {
        let one = self.tokens != Tokens::One || rows == 1;
        one && rows <= self.held() && self.r_len as usize == r_len && self.bf16 == is_bf16(dtype)
    }

    /// Number of rows of a tile.
    pub(super) fn height(self) -> u32 {
        if self.tall { 16 } else { 8 }
    }

    /// Number of rows of a tile whose sums a lane holds.
    pub(super) fn halves(self) -> usize {
        if self.tall { 2 } else { 1 }
    }

    /// Number of spans of a row.
    pub(super) fn spans(self) -> u32 {
        self.r_len / SPAN as u32
    }

    /// Number of rows of the weight that a cube takes.
    pub(super) fn lines(self) -> u32 {
        self.together * self.height()
    }

    /// Number of planes of a cube.
    fn planes(self) -> u32 {
        self.shares * self.together
    }

    /// Number of units of a cube.
    pub(super) fn units(self) -> u32 {
        self.planes() * 32
    }

    /// Number of right operands; each has eight tokens.
    pub(super) fn groups(self) -> usize {
        match self.tokens {
            Tokens::One => 1,
            Tokens::Staged { held } | Tokens::Windows { held } => held.div_ceil(8),
        }
    }

    /// Number of sums that a plane has of its tile.
    pub(super) fn sums_of_plane(self) -> u32 {
        self.height() * if self.tokens == Tokens::One { 1 } else { self.groups() as u32 * 8 }
    }

    /// Number of sums in shared memory, of planes that share tiles.
    pub(super) fn shared_sums(self) -> usize {
        if self.shares > 1 { (self.planes() * self.sums_of_plane()) as usize } else { 1 }
    }

    /// Octets of shared memory that the activations take.
    pub(super) fn staged_octets(self) -> usize {
        match self.tokens {
            Tokens::One => self.r_len as usize / 8 + 6,
            Tokens::Staged { held } => held * self.stride() as usize,
            Tokens::Windows { .. } => self.depth * self.window(),
        }
    }

    /// Number of tokens of a right operand whose sums a lane holds.
    pub(super) fn columns(self) -> usize {
        if self.tokens == Tokens::One { 1 } else { 2 }
    }

    /// Octets between two tokens in shared memory. One octet in nine is left free, and a row is an odd multiple of
    /// four octets, so that the eight lanes that are served together use different banks.
    pub(super) fn stride(self) -> u32 {
        let columns = if self.windows() { self.shares * SPAN as u32 } else { self.r_len };
        (columns / 64 * 9) | 4
    }

    /// Whether the activations lie in windows.
    pub(super) fn windows(self) -> bool {
        matches!(self.tokens, Tokens::Windows { .. })
    }

    /// Number of octets of a window.
    pub(super) fn window(self) -> usize {
        self.held() * self.stride() as usize
    }

    /// Number of tokens for which shared memory has room.
    pub(super) fn held(self) -> usize {
        match self.tokens {
            Tokens::One => 1,
            Tokens::Staged { held } | Tokens::Windows { held } => held,
        }
    }

    /// Number of steps after which all planes are done.
    pub(super) fn steps(self) -> u32 {
        self.spans().div_ceil(self.shares)
    }

    /// The factor on the activations of a single token. It keeps the small units of bf16 codes from making sums
    /// subnormal.
    pub(super) fn value_unit(self) -> f32 {
        if self.bf16 { 2.0f32.powi(63) } else { 1.0 }
    }

    /// The factor on finished sums that undoes the units of codes, scales and activations.
    pub(super) fn factor(self) -> f32 {
        let unit = if self.tokens == Tokens::One { self.value_unit() } else { scale_unit(self.bf16) };
        1.0 / pair_unit(self.bf16) / unit
    }
}

fn is_bf16(dtype: StorageType) -> bool {
    dtype == StorageType::Scalar(ElemType::Float(FloatKind::BF16))
}
