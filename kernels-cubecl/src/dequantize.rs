//! NVFP4 to dense: `y[r, c] = (code[r, c] * scale[r, c / 16]) * g`, or without `g`.
//! ```text
//! for r { for c { y[r][c] = e2m1(code[r][c]) * e4m3(scale[r][c / 16]) * g } }      // the plain loop
//! ```
//! `code * scale` has at most six significant bits and is exact in f32, f16 and bf16; the product
//! with `g` rounds once in f32, the store rounds to the output type. A unit decodes one word of eight
//! codes and writes them as one or two vectors. Moves 4.5 bits in and one output value out: bound by memory.

use crate::{
    codec::{e2m1_decode, e4m3_decode},
    error::{KernelError, expect_blocks, expect_len},
    layout::{code_of, scales_per_row, words_per_row},
    quantize::{flat_launch, vector_size},
};
use cubecl::prelude::*;

/// Writes the `rows` x `cols` matrix to `y` (float of type `dtype`); without `global` as `code * scale` alone.
///
/// # Errors
/// If C is not a multiple of 16 or a buffer does not fit the shape.
pub fn dequantize<R: Runtime>(
    client: &ComputeClient<R>,
    codes: ArrayArg<R>,
    scales: ArrayArg<R>,
    global: Option<ArrayArg<R>>,
    y: ArrayArg<R>,
    dtype: StorageType,
    rows: usize,
    cols: usize,
) -> Result<(), KernelError> {
    const NAME: &str = "dequantize";
    expect_blocks(NAME, "columns", cols)?;
    expect_len(NAME, "codes", codes.size(), rows * words_per_row(cols))?;
    expect_len(NAME, "scales", scales.size(), rows * scales_per_row(cols))?;
    expect_len(NAME, "y", y.size(), rows * cols)?;
    let mut globals = SequenceArg::new();
    if let Some(global) = global {
        expect_len(NAME, "global", global.size(), 1)?;
        globals.push(global);
    }
    let (count, dim) = flat_launch(rows * words_per_row(cols));
    let vector = vector_size(client, dtype, 8);
    // SAFETY: buffer lengths were checked against the shape; the kernel stops at the last word.
    unsafe {
        dequantize_kernel::launch_unchecked(client, count, dim, vector, codes, scales, globals, y, dtype);
    }
    Ok(())
}

#[cube(launch_unchecked)]
fn dequantize_kernel<F: Float, N: Size>(
    codes: &Array<u32>,
    scales: &Array<u8>,
    globals: &Sequence<Array<f32>>,
    y: &mut Array<Vector<F, N>>,
    #[define(F)] _dtype: StorageType,
) {
    if ABSOLUTE_POS < codes.len() {
        let word = codes[ABSOLUTE_POS];
        // Rows are whole blocks: the scales follow each other as the pairs of words do.
        let scale = e4m3_decode(u32::cast_from(scales[ABSOLUTE_POS / 2usize]));
        let n = N::value();
        #[unroll]
        for part in 0..comptime!(8 / n) {
            let mut values = Vector::<F, N>::empty();
            #[unroll]
            for i in 0..n {
                let mut value = e2m1_decode(code_of(word, comptime!((part * n + i) as u32).runtime())) * scale;
                #[unroll]
                for g in 0..globals.len() {
                    value *= globals.index(g)[0];
                }
                values[i] = F::cast_from(value);
            }
            y[ABSOLUTE_POS * comptime!(8 / n) + part] = values;
        }
    }
}
