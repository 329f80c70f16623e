//! How a matrix is cut into cubes and units, each of which owns 16 columns of a row or of two, and how these get to
//! registers.
//!
//! Where columns lie side by side a unit reads its own. The transpose is read where it lies: a cube brings 64 of its
//! columns and 64 of its rows into shared memory along the rows of what is stored and takes them out across, two
//! neighbouring rows at a time, and codes go back the same way, so that both sides of memory see whole sectors.

use crate::{
    device::vector_size,
    error::{KernelError, expect_len, index},
    hadamard::{SIGNS, rotate},
    layout::{BLOCK, scale_index, scales_per_row},
    quantize::Block,
};
use cubecl::prelude::*;

/// Rows, columns and strides of a dense matrix. Swapped strides quantise the transpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct View {
    /// Rows R.
    pub rows: usize,
    /// Columns C: blocks run along them.
    pub cols: usize,
    /// Elements from a row to the next.
    pub row_stride: usize,
    /// Elements from a column to the next.
    pub col_stride: usize,
}

impl View {
    /// A contiguous row-major matrix.
    pub fn row_major(rows: usize, cols: usize) -> Self {
        Self { rows, cols, row_stride: cols, col_stride: 1 }
    }

    /// The transpose of a contiguous row-major matrix of `rows` x `cols`: `cols` rows, `rows` columns.
    pub fn transposed(rows: usize, cols: usize) -> Self {
        Self { rows: cols, cols: rows, row_stride: 1, col_stride: cols }
    }
}

/// Units of a cube.
pub(super) const fn units(along: bool) -> u32 {
    if along { 256 } else { TILE * TILE / 32 }
}
/// Rows, and columns, of the transpose that a cube takes.
const TILE: u32 = 64;
/// Pairs of rows of the transpose, and one more against bank conflicts.
const PITCH: u32 = TILE / 2 + 1;
/// Words of codes and scales of a row of the transpose, and one more.
const MADE: u32 = 13;

/// How a matrix is cut into cubes and units: see [`own()`].
pub(super) struct Plan<R: Runtime> {
    pub(super) count: CubeCount,
    pub(super) cubes: usize,
    pub(super) dim: CubeDim,
    pub(super) vector: usize,
    /// Whether columns are neighbours in memory; else rows are.
    pub(super) along: bool,
    /// Rows that a unit owns, [`gap()`] apart.
    pub(super) lines: usize,
    pub(super) place: PlaceLaunch<R>,
}

impl<R: Runtime> Plan<R> {
    pub(super) fn new(
        client: &ComputeClient<R>,
        dtype: StorageType,
        view: View,
        block: Block,
    ) -> Result<Self, KernelError> {
        const NAME: &str = "quantize";
        let View { rows, cols, row_stride, col_stride } = view;
        let along = col_stride == 1;
        expect_len(NAME, "stride of what lies side by side", if along { 1 } else { row_stride }, 1)?;
        let (count, step, whole) = if along { (rows, row_stride, cols) } else { (cols, col_stride, rows) };
        expect_len(NAME, "stride of what does not", if count > 1 { step } else { whole }, whole)?;
        let (blocks, lines) = (index(NAME, "columns", scales_per_row(cols))?, index(NAME, "rows", rows)?);
        let own_lines = if along && block == Block::Row { 1 } else { 2 };
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
            place: PlaceLaunch::new(lines, index(NAME, "columns", cols)?, index(NAME, "stride", step)?),
        })
    }
}

/// [`View`] on the device.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Place {
    pub(super) rows: u32,
    pub(super) cols: u32,
    /// From a row to the next, or from a column to the next where rows lie side by side.
    stride: u32,
}

/// The (first) row and the first column that a unit owns. Eight units one after another, with two rows each, share a 16x16
/// block; with one row each, sixteen share 256 columns of a row.
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

/// Rows between the two that a unit owns.
pub(super) const fn gap(along: bool) -> u32 {
    if along { 8 } else { 1 }
}

/// Two values, for which 16-bit types have instructions.
type Pair<F> = Vector<F, Const<2>>;

/// 16 columns of a row.
#[derive(CubeType)]
pub(super) struct Row {
    pub(super) values: Array<f32>,
    /// Their largest magnitude.
    pub(super) amax: f32,
    /// Finite if they all are, unless they are very large.
    pub(super) sum: f32,
}

/// Rotates a row's values.
#[cube]
pub(super) fn rotated_row(row: &mut Row) {
    rotate(&mut row.values, SIGNS.runtime());
    // Where no value is a number the maximum is of none. (What `max` makes of that is the device's affair.)
    row.amax = amax_of(&row.values);
    row.amax = select(row.amax >= 0.0f32, row.amax, 0.0f32);
    // Each is a sum of all: not a number, or infinite, if a value was. (Values from 2^124 on can overflow in other sums only:
    // what is not a number then has the code -6 instead of 6.)
    row.sum = row.values[0] + row.amax;
}

/// The 16 columns from `col` on of a unit's rows, the first of which is `row`.
#[cube]
pub(super) fn rows_of<F: Float, N: Size>(
    x: &Array<Vector<F, N>>,
    row: u32,
    col: u32,
    place: Place,
    #[comptime] along: bool,
    #[comptime] lines: usize,
) -> Sequence<Row> {
    if comptime!(along) {
        let mut rows = Sequence::new();
        #[unroll]
        for line in 0..lines {
            rows.push(row_along::<F, N>(x, row + comptime!(line as u32 * gap(true)), col, place));
        }
        rows
    } else {
        rows_across::<F, N>(x, place)
    }
}

/// 16 columns of `row` where columns lie side by side; of the first where `row` or `col` lies outside, whose unit makes
/// nothing.
#[cube]
fn row_along<F: Float, N: Size>(x: &Array<Vector<F, N>>, row: u32, col: u32, place: Place) -> Row {
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
    Row { values, amax, sum }
}

/// The same of two rows where rows lie side by side: all units fill the cube's tile and take their columns out of it. What
/// lies outside the matrix is not filled, and a unit that owns it makes nothing.
#[cube]
fn rows_across<F: Float, N: Size>(x: &Array<Vector<F, N>>, place: Place) -> Sequence<Row> {
    let n = N::value();
    // A vector a pass, or two values where there are no vectors.
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
        // Both ends, since a pair's magnitude has no instruction.
        top = max(top, pair);
        bottom = min(bottom, pair);
        sum += pair;
        upper[i] = f32::cast_from(pair[0]);
        lower[i] = f32::cast_from(pair[1]);
    }
    let mut rows = Sequence::new();
    let upper_amax = max(f32::cast_from(top[0]), -f32::cast_from(bottom[0]));
    let lower_amax = max(f32::cast_from(top[1]), -f32::cast_from(bottom[1]));
    rows.push(Row { values: upper, amax: upper_amax, sum: f32::cast_from(sum[0]) });
    rows.push(Row { values: lower, amax: lower_amax, sum: f32::cast_from(sum[1]) });
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

/// Brings what the units of a cube made across their tile back along it: four of them write a row's 32 bytes of codes.
#[cube]
pub(super) fn store_across(
    words: &Sequence<Vector<u32, Const<2>>>,
    made_scales: &Sequence<u32>,
    codes: &mut Array<Vector<u32, Const<2>>>,
    scales: &mut Array<u8>,
    place: Place,
) {
    let mut made = SharedMemory::<u32>::new(comptime!((TILE * MADE) as usize));
    let pairs = comptime!(TILE / 2);
    let at = UNIT_POS_X % pairs * comptime!(2 * MADE) + UNIT_POS_X / pairs * 3u32;
    #[unroll]
    for line in 0..2usize {
        let at = (at + comptime!(line as u32 * MADE)) as usize;
        let words = *words.index(line);
        made[at] = words[0];
        made[at + 1usize] = words[1];
        made[at + 2usize] = *made_scales.index(line);
    }
    sync_cube();
    #[unroll]
    for pass in 0..2u32 {
        let at = UNIT_POS_X + comptime!(pass * units(false));
        let (down, block) = (at / 4u32, at % 4u32);
        let (row, col) = (CUBE_POS_X * TILE + down, CUBE_POS_Y * TILE + block * 16u32);
        if row < place.rows && col < place.cols {
            let from = (down * MADE + block * 3u32) as usize;
            let mut words = Vector::<u32, Const<2>>::empty();
            words[0] = made[from];
            words[1] = made[from + 1usize];
            let at = scale_index(row, col, place.cols);
            codes[at] = words;
            scales[at] = u8::cast_from(made[from + 2usize]);
        }
    }
}
