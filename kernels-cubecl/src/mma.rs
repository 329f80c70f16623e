//! What the tensor-core kernels share: tiles in shared memory, and fragments of the instruction `mma.sync` m16n8k16, which
//! computes ```text sum[i, j] += sum_r a[i, r] * b[r, j]                              // 16 rows, 8 columns, 16 summed values for
//! i in 0..16 { for j in 0..8 { for r in 0..16 { sum[i][j] += a[i][r] * b[r][j] } } }    // the plain loop ``` The 32 lanes of
//! the instruction hold a fragment of `a`, `b` and `sum` each. An *octet* is the eight neighboring 16-bit values that one copy
//! moves.
//!
//! A tile is `rows` by `width` octets. Octet `o` of row `row` is at `row * width + (o ^ (row % 8))`, or `o ^ (row / 2
//! % 4)` where a row has four octets. With this swizzle, `cp.async` writes whole rows and `ldmatrix` reads a column
//! of eight rows, both without bank conflicts. An operand's *outer* index is the one that is not summed. An operand
//! is stored *along* the summed index (a row of the tile is one outer index) or *across* it (a row is one summed
//! index); `ldmatrix` transposes the second kind on its way to registers.

use cubecl::{
    cmma::{MatrixIdent, MmaDefinition},
    ir::{ElemType, FloatKind, features::MmaConfig},
    prelude::{
        barrier::{Barrier, copy_async_checked},
        *,
    },
};

/// Units of a cube: four planes.
pub(crate) const UNITS: u32 = 128;

/// The eight neighboring values that one copy moves.
pub(crate) type Octet<F> = Vector<F, Const<8>>;
/// The two neighboring values that one register holds.
pub(crate) type Pair<F> = Vector<F, Const<2>>;

/// Whether the device has the instructions that these kernels need for operands of type `dtype`.
pub fn supported<R: Runtime>(client: &ComputeClient<R>, dtype: StorageType) -> bool {
    let f32 = ElemType::Float(FloatKind::F32).into();
    let config = MmaConfig { a_type: dtype, b_type: dtype, cd_type: f32, m: 16, n: 8, k: 16 };
    let features = client.features();
    features.matmul.mma.contains(&config) && features.matmul.ldmatrix.contains(&dtype) && features.copy_async
}

/// A matrix in global memory, counted in octets: `rows` rows, `stride` octets from a row to the next, columns up to
/// `end`.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct TileSource {
    pub(crate) rows: u32,
    pub(crate) stride: u32,
    pub(crate) end: u32,
}

/// Starts the copies of `rows` x `width` octets, from row `row` and octet `col` on, into the tile at `base`. Places
/// outside the matrix become zero. `UNITS / width` must be a multiple of 8: then the copies of a unit have one octet
/// column, and its addresses grow by constants.
#[cube]
pub(crate) fn fill<F: Float>(
    x: &Array<Octet<F>>,
    source: TileSource,
    row: u32,
    col: u32,
    tile: &mut SharedMemory<Octet<F>>,
    base: u32,
    #[comptime] rows: u32,
    #[comptime] width: u32,
) {
    let r = row + UNIT_POS / width;
    let c = UNIT_POS % width;
    let to = base + place(UNIT_POS / width, c, width);
    let at = (r as usize) * (source.stride as usize) + ((col + c) as usize);
    let whole = col + c < source.end;
    #[unroll]
    for pass in 0..comptime!(rows * width / UNITS) {
        let down = comptime!(pass * UNITS / width);
        let inside = whole && r + down < source.rows;
        let from = at + comptime!(down as usize) * (source.stride as usize);
        let to = (to + comptime!(pass * UNITS)) as usize;
        // A copy of length 0 writes zeros and reads nothing, wherever it points.
        let end = from + select(inside, 1usize, 0usize);
        copy_async_checked(&x.slice(from, end), &mut tile.slice_mut(to, to + 1usize), 8u32);
    }
}

/// One barrier for each of the `stages` that copies fill ahead.
#[cube]
pub(crate) fn ring(#[comptime] stages: usize) -> Sequence<Shared<Barrier>> {
    let mut filled = Sequence::<Shared<Barrier>>::new();
    #[unroll]
    for _ in 0..stages {
        filled.push(Barrier::shared(CUBE_DIM, UNIT_POS == 0));
    }
    filled
}

/// Marks the end of this unit's copies into a stage; a unit that waits for the stage then sees them.
#[cube]
pub(crate) fn sent(filled: &Sequence<Shared<Barrier>>, #[comptime] stage: usize) {
    filled.index(stage).commit_copy_async();
    filled.index(stage).arrive();
}

/// A matrix whose rows have `width` octets, all of which belong to it.
#[cube]
pub(crate) fn whole_rows(rows: u32, #[comptime] width: u32) -> TileSource {
    TileSource { rows, stride: width.runtime(), end: width.runtime() }
}

/// The position of an octet in a tile.
#[cube]
pub(crate) fn place(row: u32, octet: u32, #[comptime] width: u32) -> u32 {
    row * width + (octet ^ swizzle(row, width))
}

#[cube]
fn swizzle(row: u32, #[comptime] width: u32) -> u32 {
    if comptime!(width == 4) { row / 2u32 % 4u32 } else { row % 8u32 }
}

/// Loads the left operand of 16 outer indices from `outer + offset` on and of 16 summed indices from `16 * part` on.
/// `outer` is a multiple of 8. Where the tile is stored across, adding `offset` to `outer` must not carry past 64.
#[cube]
pub(crate) fn left<F: Float>(
    tile: &SharedMemory<Octet<F>>,
    base: u32,
    outer: u32,
    #[comptime] offset: u32,
    #[comptime] part: u32,
    #[comptime] width: u32,
    #[comptime] across: bool,
) -> Array<Pair<F>> {
    let block = UNIT_POS_PLANE / 8u32;
    let at = base + corner(outer, offset, part, block % 2u32, block / 2u32, width, across);
    let def = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    def.load_matrix::<Octet<F>, Const<2>>(
        &tile.slice(at as usize, (at + 1u32) as usize),
        MatrixIdent::A,
        4usize,
        across,
    )
}

/// Loads two right operands, of the eight outer indices from `outer + offset` on (registers 0 and 1) and of the next
/// eight (registers 2 and 3).
#[cube]
pub(crate) fn right<F: Float>(
    tile: &SharedMemory<Octet<F>>,
    base: u32,
    outer: u32,
    #[comptime] offset: u32,
    #[comptime] part: u32,
    #[comptime] width: u32,
    #[comptime] across: bool,
) -> Array<Pair<F>> {
    let block = UNIT_POS_PLANE / 8u32;
    let at = base + corner(outer, offset, part, block / 2u32, block % 2u32, width, across);
    let def = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    def.load_matrix::<Octet<F>, Const<2>>(
        &tile.slice(at as usize, (at + 1u32) as usize),
        MatrixIdent::B,
        4usize,
        across,
    )
}

/// The octet whose address this lane gives to `ldmatrix`, for the 8x8 block `down` along the outer and `along` along
/// the summed index. One term depends on the lane alone; the position of the fragment adds constants to it by xor and
/// sum.
#[cube]
fn corner(
    outer: u32,
    #[comptime] offset: u32,
    #[comptime] part: u32,
    down: u32,
    along: u32,
    #[comptime] width: u32,
    #[comptime] across: bool,
) -> u32 {
    let lane = UNIT_POS_PLANE % 8u32;
    if comptime!(across) {
        // The octets among which the swizzle permutes: a row, or eight of it.
        let span = comptime!(width.min(8));
        let own = ((along * 8u32 + lane) * width + (down ^ swizzle(lane, width))) ^ (outer / 8u32 % span);
        let ahead = comptime!(offset / 8 / span * span + part * 16 * width);
        (own ^ comptime!(offset / 8 % span)) + outer / comptime!(8 * span) * span + ahead
    } else {
        let own = (down * 8u32 + lane) * width + (along ^ lane);
        (own ^ comptime!(part * 2 % 8)) + outer * width + comptime!(part / 4 * 8 + offset * width)
    }
}

/// The first of the two rows of a 16x8 fragment of sums that this lane holds; the other is eight rows below.
#[cube]
pub(crate) fn lane_row() -> u32 {
    UNIT_POS_PLANE / 4u32
}

/// The first of the two neighboring columns of a fragment of sums that this lane holds.
#[cube]
pub(crate) fn lane_col() -> u32 {
    (UNIT_POS_PLANE % 4u32) * 2u32
}

/// The sum over the four lanes that share a row of a fragment of sums. Every one of them gets it.
#[cube]
pub(crate) fn row_sum(x: f32) -> f32 {
    let mut sum = x;
    sum += plane_shuffle_xor(sum, 1u32);
    sum += plane_shuffle_xor(sum, 2u32);
    sum
}

/// The maximum over the four lanes that share a row of a fragment of sums. Every one of them gets it.
#[cube]
pub(crate) fn row_max(x: f32) -> f32 {
    let mut best = x;
    best = max(best, plane_shuffle_xor(best, 1u32));
    best = max(best, plane_shuffle_xor(best, 2u32));
    best
}

/// `sum += a x b[half]`. A lane holds the columns [`lane_col()`] and the next of the rows [`lane_row()`] (`sum[0]`)
/// and `lane_row() + 8` (`sum[1]`).
#[cube]
pub(crate) fn multiply<F: Float>(
    a: &Array<Pair<F>>,
    b: &Array<Pair<F>>,
    #[comptime] half: usize,
    sum: &mut Array<Pair<f32>>,
) {
    let def = MmaDefinition::<F, F, f32>::new(16usize, 8usize, 16usize);
    let mut one = Array::<Pair<F>>::new(2usize);
    one[0] = b[comptime!(half * 2)];
    one[1] = b[comptime!(half * 2 + 1)];
    def.execute_inplace(a, &one, sum);
}

/// Zeros for `n` fragments of 16x8 sums.
#[cube]
pub(crate) fn zero_sums(#[comptime] n: usize) -> Sequence<Array<Pair<f32>>> {
    let mut sums = Sequence::<Array<Pair<f32>>>::new();
    #[unroll]
    for _ in 0..n {
        let mut pair = Array::<Pair<f32>>::new(2usize);
        pair[0] = Pair::new(0.0f32);
        pair[1] = Pair::new(0.0f32);
        sums.push(pair);
    }
    sums
}

/// Turns two neighboring 16x8 fragments of sums into the left operand of a product that sums over their 16 columns.
#[cube]
pub(crate) fn as_left<F: Float>(low: &Array<Pair<f32>>, high: &Array<Pair<f32>>) -> Array<Pair<F>> {
    let mut a = Array::<Pair<F>>::new(4usize);
    a[0] = Pair::cast_from(low[0]);
    a[1] = Pair::cast_from(low[1]);
    a[2] = Pair::cast_from(high[0]);
    a[3] = Pair::cast_from(high[1]);
    a
}
