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
/// Rows of a tile.
pub(super) const HEIGHT: u32 = 16;
/// The number of planes that fit on an H200 at once: 32 a multiprocessor if each has one span in flight, 20 if it has
/// two, which take more registers. Some cubes of a larger launch would start late.
const PLANES: [usize; 2] = [4224, 2640];

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
    /// Number of tokens for which shared memory has room.
    pub(super) held: usize,
    /// Whether shared memory holds windows of the activations: the columns that one step of all planes multiplies. Otherwise it
    /// holds all columns.
    pub(super) windows: bool,
    pub(super) bf16: bool,
}

impl GemvPlan {
    /// Chooses for `rows` tokens of type `dtype`, and for weights of `r_len` columns that have `weight_rows` rows
    /// together. As many planes share a tile as for [`MAX_ROWS`] tokens: so the sums of a token take their terms in
    /// one order, whatever the number of tokens.
    pub fn new<R: Runtime>(
        client: &ComputeClient<R>,
        rows: usize,
        weight_rows: usize,
        r_len: usize,
        dtype: StorageType,
    ) -> Self {
        let spans = r_len / SPAN;
        let all = weight_rows.div_ceil(HEIGHT as usize) * spans;
        // The spans of a tile are divided evenly. A cube of many planes would leave too little room for a second
        // cube.
        let own = if all <= PLANES[0] { 1 } else { all.div_ceil(PLANES[1]).min(spans) };
        let mut shares = spans.div_ceil(own).min(if own == 1 { 16 } else { 8 });
        loop {
            match Self::with_shares(client, MAX_ROWS, r_len, dtype, shares) {
                // Fewer tokens need less room.
                Some(most) => return Self::with_shares(client, rows, r_len, dtype, shares).unwrap_or(most),
                // Fewer planes need smaller windows; the windows of a single plane fit on every device.
                None => shares -= 1,
            }
        }
    }

    /// The plan in which so many planes share the columns of a tile. `None` if the activations do not fit into shared memory.
    fn with_shares<R: Runtime>(
        client: &ComputeClient<R>,
        rows: usize,
        r_len: usize,
        dtype: StorageType,
        shares: usize,
    ) -> Option<Self> {
        let depth = (r_len / SPAN).div_ceil(shares).min(2);
        let of = |together| Self::of(client, rows, r_len, dtype, [shares, together, depth].map(|n| n as u32));
        let planes = if rows > 4 { 8 } else { 4 };
        let together = (planes / shares).max(1);
        let plan = of(together)?;
        // Windows of more than eight tokens leave room for few planes, so two tiles share them.
        let wider = (plan.windows && rows > 8).then(|| of(together.max(2))).flatten();
        Some(wider.unwrap_or(plan))
    }

    /// The plan with the given `[shares, together, depth]`: planes that share the columns of a tile, tiles of a cube, and spans
    /// that a plane loads ahead. None if a cube would have no planes or more than 32, or if the activations do not fit
    /// into shared memory.
    pub fn of<R: Runtime>(
        client: &ComputeClient<R>,
        rows: usize,
        r_len: usize,
        dtype: StorageType,
        [shares, together, depth]: [u32; 3],
    ) -> Option<Self> {
        let planes = shares.saturating_mul(together);
        if shares == 0 || together == 0 || depth == 0 || planes > 32 {
            return None;
        }
        let (held, bf16) = (rows.next_power_of_two(), is_bf16(dtype));
        let whole = Self { r_len: r_len as u32, shares, together, depth: depth as usize, held, windows: false, bf16 };
        // One window is filled while another is read.
        let windows = Self { windows: true, depth: whole.depth.max(2), ..whole };
        let room = client.properties().hardware.max_shared_memory_size;
        let fits = |plan: &Self| {
            let (values, sums) = (plan.staged_octets() * 16, plan.shared_sums() * 4);
            values <= STAGED && values + sums + BARRIERS <= room
        };
        [whole, windows].into_iter().find(fits)
    }

    /// Whether the plan serves `rows` tokens of type `dtype` and sums of `r_len` values.
    pub(super) fn is_for(self, rows: usize, r_len: usize, dtype: StorageType) -> bool {
        rows <= self.held && self.r_len as usize == r_len && self.bf16 == is_bf16(dtype)
    }

    /// Number of spans of a row.
    pub(super) fn spans(self) -> u32 {
        self.r_len / SPAN as u32
    }

    /// Number of rows of the weight that a cube takes.
    pub(super) fn lines(self) -> u32 {
        self.together * HEIGHT
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
        self.held.div_ceil(8)
    }

    /// Number of sums that a plane has of its tile.
    pub(super) fn sums_of_plane(self) -> u32 {
        HEIGHT * self.groups() as u32 * 8
    }

    /// Number of sums in shared memory, of planes that share tiles.
    pub(super) fn shared_sums(self) -> usize {
        if self.shares > 1 { (self.planes() * self.sums_of_plane()) as usize } else { 1 }
    }

    /// Octets of shared memory that the activations take.
    pub(super) fn staged_octets(self) -> usize {
        if self.windows { self.depth * self.window() } else { self.window() }
    }

    /// Octets between two tokens in shared memory. One octet in nine is left free, and a row is an odd multiple of
    /// four octets, so that the eight lanes that are served together use different banks.
    pub(super) fn stride(self) -> u32 {
        let columns = if self.windows { self.shares * SPAN as u32 } else { self.r_len };
        (columns / 64 * 9) | 4
    }

    /// Number of octets of a window, or of all columns.
    pub(super) fn window(self) -> usize {
        self.held * self.stride() as usize
    }

    /// Number of steps after which all planes are done.
    pub(super) fn steps(self) -> u32 {
        self.spans().div_ceil(self.shares)
    }

    /// The factor on finished sums that undoes the units of codes and scales.
    pub(super) fn factor(self) -> f32 {
        1.0 / pair_unit(self.bf16) / scale_unit(self.bf16)
    }
}

fn is_bf16(dtype: StorageType) -> bool {
    dtype == StorageType::Scalar(ElemType::Float(FloatKind::BF16))
}
