//! How a matrix is cut into cubes and units, each of which owns 16 columns of a row, and how these get to registers.
//!
//! Where columns lie side by side a unit reads its own. The transpose is read where it lies: a cube brings 64 of its
//! columns and 64 of its rows into shared memory along the rows of what is stored and takes them out across, and codes go
//! back the same way, so that both sides of memory see whole sectors.

use crate::{
    device::vector_size,
    error::{KernelError, expect_len, index},
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
pub(super) const UNITS: u32 = 256;
/// Rows, and columns, of the transpose that a cube takes.
const TILE: u32 = 64;
/// Values from a row of the tile to the next: of 16 bits an odd number of words, against bank conflicts.
const PITCH: u32 = TILE + 2;

/// How a matrix is cut into cubes and units: see [`own()`].
pub(super) struct Plan<R: Runtime> {
    pub(super) count: CubeCount,
    pub(super) cubes: usize,
    pub(super) dim: CubeDim,
    pub(super) vector: usize,
    /// Whether columns are neighbours in memory; else rows are.
    pub(super) along: bool,
    /// Rows of a block that a unit owns, eight apart.
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
        let own_lines = if along && block == Block::Square { 2 } else { 1 };
        let (x, y) = if along {
            (blocks.div_ceil(16), lines.div_ceil(16 * own_lines))
        } else {
            (lines.div_ceil(TILE), blocks.div_ceil(TILE / 16))
        };
        Ok(Self {
            count: CubeCount::Static(x, y, 1),
            cubes: (x * y) as usize,
            dim: CubeDim::new_1d(UNITS),
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

/// The (first) row and the first column that a unit owns. Sixteen units one after another, or eight with two rows each,
/// share a 16x16 block.
#[cube]
pub(super) fn own(#[comptime] along: bool, #[comptime] lines: usize) -> (u32, u32) {
    if comptime!(!along) {
        (CUBE_POS_X * TILE + UNIT_POS % TILE, CUBE_POS_Y * TILE + UNIT_POS / TILE * 16u32)
    } else if comptime!(lines == 2) {
        let row = CUBE_POS_Y * 32u32 + UNIT_POS / 128u32 * 16u32 + UNIT_POS % 8u32;
        (row, CUBE_POS_X * 256u32 + UNIT_POS / 8u32 % 16u32 * 16u32)
    } else {
        (CUBE_POS_Y * 16u32 + UNIT_POS / 16u32, CUBE_POS_X * 256u32 + UNIT_POS % 16u32 * 16u32)
    }
}

/// 16 columns of `row` where columns lie side by side, zeros outside the matrix.
#[cube]
pub(super) fn row_of<F: Float, N: Size>(x: &Array<Vector<F, N>>, row: u32, col: u32, place: Place) -> Array<f32> {
    let mut values = zeros();
    if row < place.rows && col < place.cols {
        let n = N::value();
        let first = ((row as usize) * (place.stride as usize) + (col as usize)) / n;
        #[unroll]
        for part in 0..comptime!(16 / n) {
            let vector = x[first + part];
            #[unroll]
            for i in 0..n {
                values[comptime!(part * n + i)] = f32::cast_from(vector[i]);
            }
        }
    }
    values
}

/// The same where rows lie side by side: all units fill the cube's tile and take their 16 columns out of it.
#[cube]
pub(super) fn row_across<F: Float, N: Size>(x: &Array<Vector<F, N>>, place: Place) -> Array<f32> {
    let n = N::value();
    let n = comptime!(n as u32);
    let mut tile = SharedMemory::<F>::new(comptime!((TILE * PITCH) as usize));
    let (row0, col0) = (CUBE_POS_X * TILE, CUBE_POS_Y * TILE);
    let width = comptime!(TILE / n);
    #[unroll]
    for pass in 0..comptime!(TILE * width / UNITS) {
        let at = UNIT_POS + comptime!(pass * UNITS);
        let (down, along) = (at / width, at % width * n);
        let (row, col) = (row0 + along, col0 + down);
        let mut vector = Vector::<F, N>::new(F::new(0.0));
        if row < place.rows && col < place.cols {
            vector = x[((col as usize) * (place.stride as usize) + (row as usize)) / comptime!(n as usize)];
        }
        #[unroll]
        for i in 0..comptime!(n as usize) {
            tile[(down * PITCH + along + comptime!(i as u32)) as usize] = vector[i];
        }
    }
    sync_cube();
    let mut values = zeros();
    let first = UNIT_POS / TILE * comptime!(16 * PITCH) + UNIT_POS % TILE;
    #[unroll]
    for i in 0..16usize {
        values[i] = f32::cast_from(tile[(first + comptime!(i as u32 * PITCH)) as usize]);
    }
    values
}

#[cube]
fn zeros() -> Array<f32> {
    let mut values = Array::<f32>::new(16usize);
    #[unroll]
    for i in 0..16usize {
        values[i] = 0.0f32;
    }
    values
}

/// Brings what the units of a cube made across their tile back along it: four of them write a row's 32 bytes of codes.
#[cube]
pub(super) fn store_across(
    words: Vector<u32, Const<2>>,
    scale: u32,
    codes: &mut Array<Vector<u32, Const<2>>>,
    scales: &mut Array<u8>,
    place: Place,
) {
    let mut made = SharedMemory::<u32>::new(comptime!((TILE * 13) as usize));
    let at = ((UNIT_POS % TILE) * 13u32 + UNIT_POS / TILE * 3u32) as usize;
    made[at] = words[0];
    made[at + 1usize] = words[1];
    made[at + 2usize] = scale;
    sync_cube();
    let (down, block) = (UNIT_POS / 4u32, UNIT_POS % 4u32);
    let (row, col) = (CUBE_POS_X * TILE + down, CUBE_POS_Y * TILE + block * 16u32);
    if row < place.rows && col < place.cols {
        let from = (down * 13u32 + block * 3u32) as usize;
        let mut words = Vector::<u32, Const<2>>::empty();
        words[0] = made[from];
        words[1] = made[from + 1usize];
        let at = scale_index(row, col, place.cols);
        codes[at] = words;
        scales[at] = u8::cast_from(made[from + 2usize]);
    }
}
