//! NVFP4 to dense: `y[r, c] = (code[r, c] * scale[r, c / 16]) * g`, optionally transposed on the way.
//!
//! `code * scale` has at most six significant bits and is exact in f32, f16 and bf16; the product
//! with `g` rounds once in f32, the store rounds to the output type. Moves 4.5 bits in and one
//! output value out: bound by memory.

use crate::{
    codec::{e2m1_decode, e4m3_decode},
    error::{KernelError, expect_blocks, expect_len, index},
    layout::{code_of, scale_index, scales_per_row, word_index, words_per_row},
    quantize::flat_launch,
};
use cubecl::prelude::*;

/// Writes the `rows` x `cols` matrix to `y` (float of type `dtype`), as `cols` x `rows` if `transpose`.
///
/// # Errors
/// If C is not a multiple of 16 or a buffer does not fit the shape.
pub fn dequantize<R: Runtime>(
    client: &ComputeClient<R>,
    codes: ArrayArg<R>,
    scales: ArrayArg<R>,
    global: ArrayArg<R>,
    y: ArrayArg<R>,
    dtype: StorageType,
    rows: usize,
    cols: usize,
    transpose: bool,
) -> Result<(), KernelError> {
    const NAME: &str = "dequantize";
    expect_blocks(NAME, "columns", cols)?;
    expect_len(NAME, "codes", codes.size(), rows * words_per_row(cols))?;
    expect_len(NAME, "scales", scales.size(), rows * scales_per_row(cols))?;
    expect_len(NAME, "global", global.size(), 1)?;
    expect_len(NAME, "y", y.size(), rows * cols)?;
    let (count, dim) = flat_launch(rows * words_per_row(cols));
    let (row_stride, col_stride) = if transpose { (1, rows) } else { (cols, 1) };
    // SAFETY: buffer lengths were checked against the shape; the kernel stops at the last word.
    unsafe {
        dequantize_kernel::launch_unchecked(
            client,
            count,
            dim,
            codes,
            scales,
            global,
            y,
            index(NAME, "columns", cols)?,
            index(NAME, "row stride", row_stride)?,
            index(NAME, "column stride", col_stride)?,
            dtype,
        );
    }
    Ok(())
}

#[cube(launch_unchecked)]
fn dequantize_kernel<F: Float>(
    codes: &Array<u32>,
    scales: &Array<u8>,
    global: &Array<f32>,
    y: &mut Array<F>,
    cols: u32,
    row_stride: u32,
    col_stride: u32,
    #[define(F)] _dtype: StorageType,
) {
    if ABSOLUTE_POS < codes.len() {
        let words = (cols / 8u32) as usize;
        let row = u32::cast_from(ABSOLUTE_POS / words);
        let first = u32::cast_from(ABSOLUTE_POS % words) * 8u32;
        let word = codes[word_index(row, first, cols)];
        let scale = e4m3_decode(u32::cast_from(scales[scale_index(row, first, cols)]));
        for i in 0..8u32 {
            let c = first + i;
            let value = (e2m1_decode(code_of(word, c)) * scale) * global[0];
            let at = (row as usize) * (row_stride as usize) + (c as usize) * (col_stride as usize);
            y[at] = F::cast_from(value);
        }
    }
}
