//! How a matrix is divided among cubes and units, and how a unit's values reach its registers. A unit owns 16 columns
//! of one row or of two.
//!
//! Where columns are neighbors in memory, a unit reads its own values. A transpose is read without being made first:
//! a cube copies 64 of its columns and 64 of its rows into shared memory in the order of memory, and units take their
//! values out across it, from two neighboring rows at a time. Codes go back the same way, so that reads and writes
//! both touch whole sectors of memory.

use crate::{
    device::vector_size,
    error::{KernelError, index, require},
    hadamard::{SIGNS, rotate},
    layout::{BLOCK, scales_per_row},
    mma::Pair,
    quantize::spec::BlockShape,
};
use cubecl::prelude::*;

/// Rows, columns and strides of a dense matrix. Swapped strides describe its transpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct View {
    /// Number of rows.
    pub rows: usize,
    /// Number of columns. Blocks of 16 run along them.
    pub cols: usize,
    /// Elements between the starts of two neighboring rows.
    pub row_stride: usize,
    /// Elements between two neighboring columns.
    pub col_stride: usize,
}

impl View {
    /// A contiguous row-major matrix.
    pub fn row_major(rows: usize, cols: usize) -> Self {
        Self { rows, cols, row_stride: cols, col_stride: 1 }
    }

    /// The transpose of a contiguous row-major matrix of `rows` x `cols`; the view has `cols` rows and `rows`
    /// columns.
    pub fn transposed(rows: usize, cols: usize) -> Self {
        Self { rows: cols, cols: rows, row_stride: 1, col_stride: cols }
    }
}

/// Number of units of a cube.
pub(super) const fn units(along: bool) -> u32 {
    if along { 256 } else { TILE * TILE / 32 }
}
/// Rows, and also columns, of a transpose that a cube takes.
const TILE: u32 = 64;
/// Words between columns in shared memory: one for each pair of rows, and one more against bank conflicts.
const PITCH: u32 = TILE / 2 + 1;
/// Words between rows of results in shared memory: eight of codes, four of scales, and one more.
const MADE: u32 = 13;

/// The launch geometry of a matrix. [`own()`] says which values a unit owns.
pub(super) struct QuantizeGrid<R: Runtime> {
    pub(super) count: CubeCount,
    pub(super) cubes: usize,
    pub(super) dim: CubeDim,
    pub(super) vector: usize,
    /// Whether columns are neighbors in memory; otherwise rows are.
    pub(super) along: bool,
    /// Number of rows that a unit owns, [`gap()`] apart.
    pub(super) lines: usize,
    pub(super) place: DeviceViewLaunch<R>,
}

impl<R: Runtime> QuantizeGrid<R> {
    pub(super) fn new(
        client: &ComputeClient<R>,
        dtype: StorageType,
        view: View,
        block: BlockShape,
    ) -> Result<Self, KernelError> {
        const NAME: &str = "quantize";
        let View { rows, cols, row_stride, col_stride } = view;
        let along = col_stride == 1;
        require(NAME, along || row_stride == 1, || {
            format!("the strides are {row_stride} (rows) and {col_stride} (columns); one of them must be 1")
        })?;
        let (count, step, whole) = if along { (rows, row_stride, cols) } else { (cols, col_stride, rows) };
        require(NAME, count <= 1 || step == whole, || {
            format!("a stride of {step} leaves gaps between rows of {whole} values; the matrix must be contiguous")
        })?;
        let (blocks, lines) = (index(NAME, "columns", scales_per_row(cols))?, index(NAME, "rows", rows)?);
        let own_lines = if along && block == BlockShape::Row { 1 } else { 2 };
        let (x, y) = if along {
            (blocks.div_ceil(16), lines.div_ceil(16 * own_lines))
        } else {
            (lines.div_ceil(TILE), blocks.div_ceil(TILE / 16))
        };
        Ok(Self {
            count: CubeCount::Static(x, y, 1),
            cubes: (x * y) as usize,
            dim: CubeDim::new_1d(units(along)),
            vector: if step.is_multiple_of(BLOCK) { vector_size(client, dtype, 8) } else { 1 },
            along,
            lines: own_lines as usize,
            place: DeviceViewLaunch::new(lines, index(NAME, "columns", cols)?, index(NAME, "stride", step)?),
        })
    }
}

/// A [`View`] on the device.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct DeviceView {
    pub(super) rows: u32,
    pub(super) cols: u32,
    /// Elements between neighboring rows, or between neighboring columns where rows are neighbors in memory.
    stride: u32,
}

/// The first row and the first column that a unit owns. With two rows a unit, eight consecutive units share a 16x16
/// block; with one row a unit, sixteen share 256 columns of a row.
#[cube]
pub(super) fn own(#[comptime] along: bool, #[comptime] lines: usize) -> (u32, u32) {
    if comptime!(!along) {
        let pairs = comptime!(TILE / 2);
        (CUBE_POS_X * TILE + UNIT_POS_X % pairs * 2u32, CUBE_POS_Y * TILE + UNIT_POS_X / pairs * 16u32)
    } else if comptime!(lines == 2) {
        let row = CUBE_POS_Y * 32u32 + UNIT_POS_X / 128u32 * 16u32 + UNIT_POS_X % 8u32;
        (row, CUBE_POS_X * 256u32 + UNIT_POS_X / 8u32 % 16u32 * 16u32)
    } else {
        (CUBE_POS_Y * 16u32 + UNIT_POS_X / 16u32, CUBE_POS_X * 256u32 + UNIT_POS_X % 16u32 * 16u32)
    }
}

/// Distance between the two rows of a unit.
pub(super) const fn gap(along: bool) -> u32 {
    if along { 8 } else { 1 }
}

/// The values of 16 columns of a row.
#[derive(CubeType)]
pub(super) struct RowBlock {
    pub(super) values: Array<f32>,
    /// The largest magnitude of `values`.
    pub(super) amax: f32,
    /// A sum that is finite if all values are, unless they are very large.
    pub(super) sum: f32,
}

/// Hadamard-transforms the values of a row.
#[cube]
pub(super) fn rotate_row(row: &mut RowBlock) {
    rotate(&mut row.values, SIGNS.runtime());
    // If all values are NaN, what `max` returns depends on the device; use 0.
    row.amax = amax_of(&row.values);
    row.amax = select(row.amax >= 0.0f32, row.amax, 0.0f32);
    // Every transformed value is a sum of all 16, so it is NaN or infinite if one of them was. (From 2^124 on other
    // sums can overflow: NaN then has the code -6 instead of 6.)
    row.sum = row.values[0] + row.amax;
}

/// Loads the 16 columns from `col` on of a unit's rows, the first of which is `row`.
#[cube]
pub(super) fn load_rows<F: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    row: u32,
    col: u32,
    place: DeviceView,
    #[comptime] along: bool,
    #[comptime] lines: usize,
) -> Sequence<RowBlock> {
    if comptime!(along) {
        let mut rows = Sequence::new();
        #[unroll]
        for line in 0..lines {
            rows.push(load_row_along::<F, N>(x, row + comptime!(line as u32 * gap(true)), col, place));
        }
        rows
    } else {
        load_rows_across::<F, N>(x, place)
    }
}

/// Loads 16 columns of `row` where columns are neighbors. Outside the matrix it loads the first block instead; such a
/// unit stores nothing.
#[cube]
fn load_row_along<F: Float, N: Size>(x: &Array<Vector<F, N>>, row: u32, col: u32, place: DeviceView) -> RowBlock {
    let n = N::value();
    let inside = row < place.rows && col < place.cols;
    let first = select(inside, (row as usize) * (place.stride as usize) + (col as usize), 0usize) / n;
    let mut values = Array::<f32>::new(16usize);
    let mut sum = 0.0f32;
    #[unroll]
    for part in 0..comptime!(16 / n) {
        let vector = x[first + part];
        #[unroll]
        for i in 0..n {
            let value = f32::cast_from(vector[i]);
            values[comptime!(part * n + i)] = value;
            sum += value;
        }
    }
    let amax = amax_of(&values);
    RowBlock { values, amax, sum }
}

/// Loads 16 columns of two rows where rows are neighbors: all units fill the tile of the cube, then each takes its
/// columns out of it, two rows at a time, because 16-bit types have instructions for pairs. Places outside the matrix
/// stay unfilled; their units store nothing.
#[cube]
fn load_rows_across<F: Float, N: Size>(x: &Array<Vector<F, N>>, place: DeviceView) -> Sequence<RowBlock> {
    let n = N::value();
    // A unit copies a vector in a pass, or two values where there are no vectors.
    let wide = comptime!(n.max(2) as u32);
    let width = comptime!(TILE / wide);
    let passes = comptime!(TILE * width / units(false));
    let mut tile = SharedMemory::<Pair<F>>::new(comptime!((TILE * PITCH) as usize));
    let (down, along) = (UNIT_POS_X / width, UNIT_POS_X % width * wide);
    let (row, col) = (CUBE_POS_X * TILE + along, CUBE_POS_Y * TILE + down);
    let from = (col as usize) * (place.stride as usize) + (row as usize);
    let to = down * PITCH + along / 2u32;
    #[unroll]
    for pass in 0..passes {
        let further = comptime!(pass * TILE / passes);
        let from = from + (further as usize) * (place.stride as usize);
        let to = to + comptime!(further * PITCH);
        if row < place.rows && col + further < place.cols {
            if comptime!(n == 1) {
                let mut pair = Pair::<F>::empty();
                pair[0] = x[from][0];
                pair[1] = x[select(row + 1u32 < place.rows, from + 1usize, from)][0];
                tile[to as usize] = pair;
            } else {
                let vector = x[from / n];
                #[unroll]
                for i in 0..comptime!(n / 2) {
                    let mut pair = Pair::<F>::empty();
                    pair[0] = vector[comptime!(2 * i)];
                    pair[1] = vector[comptime!(2 * i + 1)];
                    tile[(to + comptime!(i as u32)) as usize] = pair;
                }
            }
        }
    }
    sync_cube();
    let (mut upper, mut lower) = (Array::<f32>::new(16usize), Array::<f32>::new(16usize));
    let pairs = comptime!(TILE / 2);
    let first = UNIT_POS_X / pairs * comptime!(16 * PITCH) + UNIT_POS_X % pairs;
    let mut top = Pair::new(F::new(0.0));
    let mut bottom = Pair::new(F::new(0.0));
    let mut sum = Pair::new(F::new(0.0));
    #[unroll]
    for i in 0..16usize {
        let pair = tile[(first + comptime!(i as u32 * PITCH)) as usize];
        // The largest and the smallest value, since the magnitude of a pair has no instruction.
        top = max(top, pair);
        bottom = min(bottom, pair);
        sum += pair;
        upper[i] = f32::cast_from(pair[0]);
        lower[i] = f32::cast_from(pair[1]);
    }
    let mut rows = Sequence::new();
    let upper_amax = max(f32::cast_from(top[0]), -f32::cast_from(bottom[0]));
    let lower_amax = max(f32::cast_from(top[1]), -f32::cast_from(bottom[1]));
    rows.push(RowBlock { values: upper, amax: upper_amax, sum: f32::cast_from(sum[0]) });
    rows.push(RowBlock { values: lower, amax: lower_amax, sum: f32::cast_from(sum[1]) });
    rows
}

#[cube]
fn amax_of(values: &Array<f32>) -> f32 {
    let mut amax = 0.0f32;
    #[unroll]
    for i in 0..16usize {
        amax = max(amax, values[i].abs());
    }
    amax
}

/// What becomes of the 16 columns of a row.
#[derive(CubeType)]
pub(super) struct MadeBlock {
    /// The codes.
    pub(super) words: Vector<u32, Const<2>>,
    /// The byte of the scale.
    pub(super) scale: u32,
}

/// Moves the results of a cube across its tile, so that four units write the 32 bytes of codes of a row, or its 128 bytes of
/// 16-bit values. [`place_across()`] says where a unit's results then lie.
#[cube]
pub(super) fn moved_across(blocks: &Sequence<MadeBlock>) -> Sequence<MadeBlock> {
    let mut made = SharedMemory::<u32>::new(comptime!((TILE * MADE) as usize));
    let pairs = comptime!(TILE / 2);
    let at = UNIT_POS_X % pairs * comptime!(2 * MADE) + UNIT_POS_X / pairs * 3u32;
    #[unroll]
    for line in 0..2usize {
        let at = (at + comptime!(line as u32 * MADE)) as usize;
        let block = blocks.index(line);
        made[at] = block.words[0];
        made[at + 1usize] = block.words[1];
        made[at + 2usize] = block.scale;
    }
    sync_cube();
    let mut moved = Sequence::<MadeBlock>::new();
    #[unroll]
    for pass in 0..2usize {
        let at = UNIT_POS_X + comptime!(pass as u32 * units(false));
        let from = (at / 4u32 * MADE + at % 4u32 * 3u32) as usize;
        let mut words = Vector::<u32, Const<2>>::empty();
        words[0] = made[from];
        words[1] = made[from + 1usize];
        moved.push(MadeBlock { words, scale: made[from + 2usize] });
    }
    moved
}

/// The row and the column of the block that a unit has after [`moved_across()`].
#[cube]
pub(super) fn place_across(#[comptime] pass: usize) -> (u32, u32) {
    let at = UNIT_POS_X + comptime!(pass as u32 * units(false));
    (CUBE_POS_X * TILE + at / 4u32, CUBE_POS_Y * TILE + at % 4u32 * 16u32)
}
