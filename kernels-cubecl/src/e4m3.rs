//! Numbers as E4M3 bytes and back, four bytes in a word, the first one lowest: how a cache keeps keys and values in half the
//! memory.
//! ```text
//! for i { bytes[i] = e4m3(x[i]) }        for i { y[i] = value(bytes[i]) }               // the plain loops
//! ```
//! A number becomes the nearest one that has a byte, ties to even. Magnitudes above 448, the largest one, become 448; NaN stays
//! NaN. There is no scale. Reads two bytes and writes one for each number, or the reverse: bound by memory.

use crate::{
    codec::{e4m3_byte, e4m3_decode},
    device::{flat_launch, vector_size},
    error::{KernelError, expect_len},
};
use cubecl::prelude::*;

/// Bytes in a word.
pub const BYTES_PER_WORD: usize = 4;

/// Writes the bytes of `x` (float of type `dtype`) to `words`.
///
/// # Errors
/// If the length of `x` is not four times that of `words`.
pub fn encode<R: Runtime>(
    client: &ComputeClient<R>,
    x: ArrayArg<R>,
    words: ArrayArg<R>,
    dtype: StorageType,
) -> Result<(), KernelError> {
    expect_len("E4M3 encode", "x", x.size(), words.size() * BYTES_PER_WORD)?;
    let vector = vector_size(client, dtype, BYTES_PER_WORD);
    let (count, dim) = flat_launch(words.size());
    // SAFETY: there are four numbers for each word, and units stop at the last word.
    unsafe { encode_kernel::launch_unchecked(client, count, dim, vector, x, words, dtype) };
    Ok(())
}

/// Writes the numbers of the bytes in `words` to `y` (float of type `dtype`).
///
/// # Errors
/// If the length of `y` is not four times that of `words`.
pub fn decode<R: Runtime>(
    client: &ComputeClient<R>,
    words: ArrayArg<R>,
    y: ArrayArg<R>,
    dtype: StorageType,
) -> Result<(), KernelError> {
    expect_len("E4M3 decode", "y", y.size(), words.size() * BYTES_PER_WORD)?;
    let vector = vector_size(client, dtype, BYTES_PER_WORD);
    let (count, dim) = flat_launch(words.size());
    // SAFETY: there is room for four numbers for each word, and units stop at the last word.
    unsafe { decode_kernel::launch_unchecked(client, count, dim, vector, words, y, dtype) };
    Ok(())
}

#[cube(launch_unchecked)]
fn encode_kernel<F: Float, N: Size>(x: &Array<Vector<F, N>>, words: &mut Array<u32>, #[define(F)] _dtype: StorageType) {
    if ABSOLUTE_POS < words.len() {
        let n = N::value();
        let mut word = 0u32;
        #[unroll]
        for part in 0..comptime!(BYTES_PER_WORD / n) {
            let values = x[ABSOLUTE_POS * comptime!(BYTES_PER_WORD / n) + part];
            #[unroll]
            for i in 0..n {
                word |= e4m3_byte(f32::cast_from(values[i])) << comptime!(8 * (part * n + i) as u32);
            }
        }
        words[ABSOLUTE_POS] = word;
    }
}

#[cube(launch_unchecked)]
fn decode_kernel<F: Float, N: Size>(words: &Array<u32>, y: &mut Array<Vector<F, N>>, #[define(F)] _dtype: StorageType) {
    if ABSOLUTE_POS < words.len() {
        let word = words[ABSOLUTE_POS];
        let n = N::value();
        #[unroll]
        for part in 0..comptime!(BYTES_PER_WORD / n) {
            let mut values = Vector::<f32, N>::empty();
            #[unroll]
            for i in 0..n {
                values[i] = e4m3_decode((word >> comptime!(8 * (part * n + i) as u32)) & 0xFFu32);
            }
            y[ABSOLUTE_POS * comptime!(BYTES_PER_WORD / n) + part] = Vector::cast_from(values);
        }
    }
}
