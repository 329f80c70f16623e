//! The sums of a matrix's columns. The gradient of a norm's weight needs them: many cubes have each summed some rows,
//! and this kernel adds their partial sums.
//!
//! ```text
//! for row { for c { sums[c] += x[row][c] } }                                       // the plain loop
//! ```
//! A cube takes two vectors of columns and all rows, 128 rows at a time, in a fixed order. It reads `4 * rows * cols`
//! bytes; matrices are small, so that the latency of a few loads bounds it.

use crate::{
    device::vector_size,
    error::{KernelError, expect_len, index},
};
use cubecl::prelude::*;

/// Rows that a cube reads at a time: two units read each of them.
const ROWS: u32 = 128;

/// `sums[c] = sum over rows of x[row, c]`, all f32.
///
/// # Errors
/// If a buffer does not fit `[rows, cols]`.
pub fn column_sums<R: Runtime>(
    client: &ComputeClient<R>,
    x: ArrayArg<R>,
    sums: ArrayArg<R>,
    [rows, cols]: [usize; 2],
) -> Result<(), KernelError> {
    const NAME: &str = "column_sums";
    expect_len(NAME, "x", x.size(), rows * cols)?;
    expect_len(NAME, "sums", sums.size(), cols)?;
    if cols == 0 {
        return Ok(());
    }
    let vector = vector_size(client, f32::as_type_native_unchecked().storage_type(), cols);
    let cubes = index(NAME, "columns", (cols / vector).div_ceil(2))?;
    // SAFETY: the buffers hold `rows * cols` and `cols` elements; units past the last column read and write nothing.
    unsafe {
        column_sums_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes, 1, 1),
            CubeDim::new_1d(ROWS * 2),
            vector,
            x,
            sums,
        );
    }
    Ok(())
}

#[cube(launch_unchecked)]
fn column_sums_kernel<N: Size>(x: &Array<Vector<f32, N>>, sums: &mut Array<Vector<f32, N>>) {
    let width = sums.len();
    let column = (CUBE_POS_X * 2u32 + UNIT_POS % 2u32) as usize;
    let mut sum = Vector::<f32, N>::new(0.0f32);
    if column < width {
        let mut at = ((UNIT_POS / 2u32) as usize) * width + column;
        while at < x.len() {
            sum += x[at];
            at += width * comptime!(ROWS as usize);
        }
    }
    let mut shared = SharedMemory::<Vector<f32, N>>::new(comptime!(ROWS as usize * 2));
    shared[UNIT_POS as usize] = sum;
    sync_cube();
    #[unroll]
    for halving in 1..8u32 {
        let units = comptime!((ROWS * 2) >> halving);
        if UNIT_POS < units {
            let other = shared[(UNIT_POS + units) as usize];
            shared[UNIT_POS as usize] += other;
        }
        sync_cube();
    }
    if UNIT_POS < 2u32 && column < width {
        sums[column] = shared[UNIT_POS as usize];
    }
}
