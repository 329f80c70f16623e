//! What the tensor-core kernels share: tiles in shared memory and fragments of mma.sync m16n8k16.
//!
//! A tile is `rows` by `width` chunks of eight 16-bit values, chunk `c` of row `r` at
//! `r * width + (c ^ (r % 8))`, or `c ^ (r / 2 % 4)` where a row is four chunks: cp.async writes whole rows and ldmatrix
//! reads a column of eight rows without a bank conflict. An operand is stored along the summed dimension (a row is one outer index) or
//! across it (a row is one summed index); ldmatrix transposes the second kind on the way to registers.

use cubecl::{
    cmma::{MatrixIdent, MmaDefinition},
    ir::{ElemType, FloatKind, features::MmaConfig},
    prelude::{
        barrier::{Barrier, copy_async_checked},
        *,
    },
};

/// The eight values that one copy moves.
pub(crate) type Chunk<F> = Vector<F, Const<8>>;
/// The two neighbouring values that one register holds.
pub(crate) type Pair<F> = Vector<F, Const<2>>;

/// Whether the device has what these kernels need for operands of type `dtype`.
pub fn supported<R: Runtime>(client: &ComputeClient<R>, dtype: StorageType) -> bool {
    let f32 = ElemType::Float(FloatKind::F32).into();
    let config = MmaConfig { a_type: dtype, b_type: dtype, cd_type: f32, m: 16, n: 8, k: 16 };
    let features = client.features();
    features.matmul.mma.contains(&config) && features.matmul.ldmatrix.contains(&dtype) && features.copy_async
}

/// A matrix in global memory, in chunks: `rows` rows, `stride` from one to the next, columns up to `end`.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Source {
    pub(crate) rows: u32,
    pub(crate) stride: u32,
    pub(crate) end: u32,
}

/// Starts the copies of `rows` x `width` chunks from row `row`, chunk `col` into the tile at `base`; zero outside.
/// `units / width` is a multiple of 8: a unit's copies lie under each other, its addresses grow by constants.
#[cube]
pub(crate) fn fill<F: Float>(
    x: &Array<Chunk<F>>,
    source: Source,
    row: u32,
    col: u32,
    tile: &mut SharedMemory<Chunk<F>>,
    base: u32,
    #[comptime] rows: u32,
    #[comptime] width: u32,
    #[comptime] units: u32,
) {
    let r = row + UNIT_POS / width;
    let c = UNIT_POS % width;
    let to = base + place(UNIT_POS / width, c, width);
    let at = (r as usize) * (source.stride as usize) + ((col + c) as usize);
    let whole = col + c < source.end;
    #[unroll]
    for pass in 0..comptime!(rows * width / units) {
        let down = comptime!(pass * units / width);
        let inside = whole && r + down < source.rows;
        let from = at + comptime!(down as usize) * (source.stride as usize);
        let to = (to + comptime!(pass * units)) as usize;
        // A copy of length 0 reads nothing, wherever it points, and writes zeros.
        let end = from + select(inside, 1usize, 0usize);
        copy_async_checked(&x.slice(from, end), &mut tile.slice_mut(to, to + 1usize), 8u32);
    }
}

/// A barrier for each of the `stages` that copies fill ahead.
#[cube]
pub(crate) fn ring(#[comptime] stages: usize) -> Sequence<Shared<Barrier>> {
    let mut filled = Sequence::<Shared<Barrier>>::new();
    #[unroll]
    for _ in 0..stages {
        filled.push(Barrier::shared(CUBE_DIM, UNIT_POS == 0));
    }
    filled
}

/// Ends what this unit copies into a stage: who waits for the stage sees it.
#[cube]
pub(crate) fn sent(filled: &Sequence<Shared<Barrier>>, #[comptime] stage: usize) {
    filled.index(stage).commit_copy_async();
    filled.index(stage).arrive();
}

/// Rows of `width` chunks, all of them.
#[cube]
pub(crate) fn whole_rows(rows: u32, #[comptime] width: u32) -> Source {
    Source { rows, stride: width.runtime(), end: width.runtime() }
}

/// Where chunk `chunk` of row `row` lies in a tile.
#[cube]
pub(crate) fn place(row: u32, chunk: u32, #[comptime] width: u32) -> u32 {
    row * width + (chunk ^ swizzle(row, width))
}

#[cube]
fn swizzle(row: u32, #[comptime] width: u32) -> u32 {
    if comptime!(width == 4) { row / 2u32 % 4u32 } else { row % 8u32 }
}

/// The left operand of 16 outer indices from `outer + offset` and 16 summed ones from `16 * part`.
/// `outer` is a multiple of 8, and no carry leads from it and `offset` past 64 where the tile is stored across.
#[cube]
pub(crate) fn left<F: Float>(
    tile: &SharedMemory<Chunk<F>>,
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
    def.load_matrix::<Chunk<F>, Const<2>>(
        &tile.slice(at as usize, (at + 1u32) as usize),
        MatrixIdent::A,
        4usize,
        across,
    )
}

/// Two right operands: outer indices from `outer + offset` (registers 0, 1) and 8 further (2, 3).
#[cube]
pub(crate) fn right<F: Float>(
    tile: &SharedMemory<Chunk<F>>,
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
    def.load_matrix::<Chunk<F>, Const<2>>(
        &tile.slice(at as usize, (at + 1u32) as usize),
        MatrixIdent::B,
        4usize,
        across,
    )
}

/// The chunk whose address this lane gives to ldmatrix: block (`down`, `along`) of 8 outer by 8 summed values.
/// One term depends on the lane alone; the fragment's own place is an xor and a sum of constants.
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
        // Chunks of a row, or eight of them, that the swizzle permutes among themselves.
        let span = comptime!(width.min(8));
        let own = ((along * 8u32 + lane) * width + (down ^ swizzle(lane, width))) ^ (outer / 8u32 % span);
        let ahead = comptime!(offset / 8 / span * span + part * 16 * width);
        (own ^ comptime!(offset / 8 % span)) + outer / comptime!(8 * span) * span + ahead
    } else {
        let own = (down * 8u32 + lane) * width + (along ^ lane);
        (own ^ comptime!(part * 2 % 8)) + outer * width + comptime!(part / 4 * 8 + offset * width)
    }
}

/// `sum += a x b[half]`. Lane `l` holds columns `2 * (l % 4)` and the next of rows `l / 4` (`sum[0]`) and
/// `l / 4 + 8` (`sum[1]`).
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

/// `n` sums of 16x8, zero.
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

/// Two neighbouring 16x8 sums as the left operand of a product that sums over their 16 columns.
#[cube]
pub(crate) fn as_left<F: Float>(low: &Array<Pair<f32>>, high: &Array<Pair<f32>>) -> Array<Pair<F>> {
    let mut a = Array::<Pair<F>>::new(4usize);
    a[0] = Pair::cast_from(low[0]);
    a[1] = Pair::cast_from(low[1]);
    a[2] = Pair::cast_from(high[0]);
    a[3] = Pair::cast_from(high[1]);
    a
}
