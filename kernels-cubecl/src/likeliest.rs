//! The most likely tokens: the largest logits of each row and their columns, so that the host need not read a vocabulary of
//! logits for each token. ```text for row { sort the columns by x[row][column], the largest first, of equal ones the first
//! column; take `count` }    // the plain loop ``` One launch takes `count` from each part of a row, a second one from these. A
//! cube finds one value after another: the largest of the cube, then the smallest column that has it, and takes it out. NaN is
//! never taken; a row that has one says so. Reads each logit once: bound by memory for few values, and by the barriers of a cube
//! for many.

use crate::{
    error::{KernelError, expect_len, index, require},
    reduce::cube_max,
};
use cubecl::prelude::*;

const NAME: &str = "likeliest";
/// Units of a cube.
const UNITS: usize = 256;
/// Columns of a part of a row.
const PART: usize = 2048;
/// The most values that are taken from a row.
pub const MOST: usize = 64;
/// Below every logit. It is a kernel's argument, because CubeCL cannot write it in a kernel.
pub(crate) const LOWEST: f32 = f32::NEG_INFINITY;
/// The most columns: a column is exact as f32.
pub(crate) const MOST_COLUMNS: usize = 1 << 24;

/// Number of words that a row of the result has: whether a logit is NaN (0 or 1), then `count` columns, then `count` logits as
/// the bits of f32.
pub const fn words(count: usize) -> usize {
    1 + 2 * count
}

/// Writes the result (u32, [`words`] a row) for logits `x` (f32, `rows` x `cols`).
///
/// # Errors
/// If a buffer does not fit the shape, or `count` is 0 or more than [`MOST`] or `cols`.
pub fn likeliest<R: Runtime>(
    client: &ComputeClient<R>,
    x: ArrayArg<R>,
    out: ArrayArg<R>,
    [rows, cols]: [usize; 2],
    count: usize,
) -> Result<(), KernelError> {
    require(NAME, (1..=MOST.min(cols)).contains(&count) && cols <= MOST_COLUMNS, || {
        format!("{count} of {cols} columns; it takes 1 to {MOST} of at most {MOST_COLUMNS}")
    })?;
    expect_len(NAME, "x", x.size(), rows * cols)?;
    expect_len(NAME, "out", out.size(), rows * words(count))?;
    if rows == 0 {
        return Ok(());
    }
    let parts = cols.div_ceil(PART);
    let len = rows * parts * words(count);
    let found = client.empty(len * 4);
    let part = |handle: cubecl::server::Handle| {
        // SAFETY: the buffer was made with this length.
        unsafe { ArrayArg::from_raw_parts(handle, len) }
    };
    let cubes = |parts: usize| Ok::<_, KernelError>(CubeCount::Static(parts as u32, index(NAME, "rows", rows)?, 1));
    let units = CubeDim::new_1d(UNITS as u32);
    let (cols, count) = (index(NAME, "columns", cols)?, count as u32);
    // SAFETY: buffer lengths were checked; a cube reads columns below the end of its row, and writes its own words.
    unsafe {
        parts_kernel::launch_unchecked(client, cubes(parts)?, units, x, part(found.clone()), cols, LOWEST, count);
        let each = (parts * count as usize).div_ceil(UNITS);
        join_kernel::launch_unchecked(client, cubes(1)?, units, part(found), out, parts as u32, LOWEST, count, each);
    }
    Ok(())
}

/// Takes `count` values of each part.
#[cube(launch_unchecked)]
fn parts_kernel(x: &Array<f32>, out: &mut Array<u32>, cols: u32, lowest: f32, #[comptime] count: u32) {
    let each = comptime!(PART / UNITS);
    let mut values = Array::<f32>::new(each);
    let mut columns = Array::<f32>::new(each);
    let mut nan = 0.0f32;
    #[unroll]
    for i in 0..each {
        let column = CUBE_POS_X * comptime!(PART as u32) + comptime!((i * UNITS) as u32) + UNIT_POS;
        values[i] = lowest;
        columns[i] = f32::cast_from(column);
        if column < cols {
            let value = x[(CUBE_POS_Y as usize) * (cols as usize) + (column as usize)];
            if is_nan(value) {
                nan = 1.0f32;
            } else {
                values[i] = value;
            }
        }
    }
    let first = (CUBE_POS_Y * CUBE_COUNT_X + CUBE_POS_X) * comptime!(words(count as usize) as u32);
    take(out, first, &mut values, &columns, nan, lowest, count, each);
}

/// Takes `count` values of what was taken from the parts of a row.
#[cube(launch_unchecked)]
fn join_kernel(
    found: &Array<u32>,
    out: &mut Array<u32>,
    parts: u32,
    lowest: f32,
    #[comptime] count: u32,
    #[comptime] each: usize,
) {
    let size = comptime!(words(count as usize) as u32);
    let first = CUBE_POS_Y * parts * size;
    let mut values = Array::<f32>::new(each);
    let mut columns = Array::<f32>::new(each);
    let mut nan = 0.0f32;
    #[unroll]
    for i in 0..each {
        let n = comptime!((i * UNITS) as u32) + UNIT_POS;
        values[i] = lowest;
        columns[i] = 0.0f32;
        if n < parts * count {
            let at = first + n / count * size;
            let column = at + 1u32 + n % count;
            columns[i] = f32::cast_from(found[column as usize]);
            values[i] = f32::reinterpret(found[(column + count) as usize]);
            nan = max(nan, f32::cast_from(found[at as usize]));
        }
    }
    take(out, CUBE_POS_Y * size, &mut values, &columns, nan, lowest, count, each);
}

/// Takes the `count` largest values of the cube, and writes them and their columns from `first` on.
#[cube]
fn take(
    out: &mut Array<u32>,
    first: u32,
    values: &mut Array<f32>,
    columns: &Array<f32>,
    nan: f32,
    lowest: f32,
    #[comptime] count: u32,
    #[comptime] each: usize,
) {
    let nan = cube_max(nan);
    if UNIT_POS == 0u32 {
        out[first as usize] = u32::cast_from(nan);
    }
    for n in 0..count {
        let mut own = values[0usize];
        #[unroll]
        for i in 1..each {
            own = max(own, values[i]);
        }
        let best = cube_max(own);
        // The smallest column with this value; of units without one, none.
        let mut nearest = f32::new(-3.0e38f32);
        #[unroll]
        for i in 0..each {
            if values[i] == best {
                nearest = max(nearest, 0.0f32 - columns[i]);
            }
        }
        let column = 0.0f32 - cube_max(nearest);
        #[unroll]
        for i in 0..each {
            if values[i] == best && columns[i] == column {
                values[i] = lowest;
            }
        }
        if UNIT_POS == 0u32 {
            out[(first + 1u32 + n) as usize] = u32::cast_from(column);
            out[(first + 1u32 + count + n) as usize] = u32::reinterpret(best);
        }
    }
}

/// Integer operations: a compiler with fast math may take `x != x` for false.
#[cube]
pub(crate) fn is_nan(x: f32) -> bool {
    (u32::reinterpret(x) & 0x7FFF_FFFFu32) > 0x7F80_0000u32
}
