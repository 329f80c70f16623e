//! A packed matrix to a dense one: `y[row, c] = (code[row, c] * scale[row, c / 16]) * g`, or without `g`.
//! ```text
//! for row { for c { y[row][c] = e2m1(code[row][c]) * e4m3(scale[row][c / 16]) * g } }   // the plain loop
//! ```
//! `code * scale` has at most six significant bits and is exact in f32, f16 and bf16. The product with `g` rounds
//! once in f32, and the store rounds to the output type. A unit decodes one word of eight codes and writes them as
//! one or two vectors, so that neighboring units write neighboring memory. Reads 4.5 bits and writes one output value
//! for each value: bound by memory.

use crate::{
    codec::{e2m1_decode, e2m1_pairs, e4m3_decode, e4m3_pair, pair_unit, scale_unit},
    device::{bit_casts, flat_launch, sequence, vector_size},
    error::{KernelError, expect_len},
    layout::{code_of, words_per_row},
    operands::PackedArgs,
};
use cubecl::{
    ir::{ElemType, FloatKind},
    prelude::*,
};

/// Words that a unit loads at once on CUDA.
const WORDS: usize = 4;

/// Writes the matrix `w` to `y` (float of type `dtype`). It writes `code * scale`, times the tensor scale if `scaled`.
///
/// # Errors
/// If the columns are not a multiple of 16 or a buffer does not fit the shape.
pub fn dequantize<R: Runtime>(
    client: &ComputeClient<R>,
    w: PackedArgs<R>,
    scaled: bool,
    y: ArrayArg<R>,
    dtype: StorageType,
) -> Result<(), KernelError> {
    const NAME: &str = "dequantize";
    w.check(NAME)?;
    let PackedArgs { codes, scales, global, rows, cols } = w;
    expect_len(NAME, "y", y.size(), rows * cols)?;
    let words = rows * words_per_row(cols);
    let vector = vector_size(client, dtype, 8);
    let pairs = bit_casts(client) && dtype.size() == 2 && !scaled;
    // SAFETY: buffer lengths were checked against the shape; the kernels stop at the last word.
    unsafe {
        if pairs {
            let bf16 = dtype == StorageType::Scalar(ElemType::Float(FloatKind::BF16));
            let (count, dim) = flat_launch(words.div_ceil(WORDS));
            dequantize_pairs_kernel::launch_unchecked(client, count, dim, codes, scales, y, bf16, dtype);
        } else {
            let (count, dim) = flat_launch(words);
            let globals = sequence(scaled.then_some(global));
            dequantize_kernel::launch_unchecked(client, count, dim, vector, codes, scales, globals, y, dtype);
        }
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
    // Rows consist of whole blocks, so words and scales continue across rows.
    if ABSOLUTE_POS < codes.len() {
        let word = codes[ABSOLUTE_POS];
        let scale = e4m3_decode(u32::cast_from(scales[ABSOLUTE_POS / 2usize]));
        let n = N::value();
        #[unroll]
        for part in 0..comptime!(8 / n) {
            let mut values = Vector::<f32, N>::empty();
            #[unroll]
            for i in 0..n {
                let mut value = e2m1_decode(code_of(word, comptime!((part * n + i) as u32))) * scale;
                #[unroll]
                for level in 0..globals.len() {
                    value *= globals.index(level)[0];
                }
                values[i] = value;
            }
            y[ABSOLUTE_POS * comptime!(8 / n) + part] = Vector::cast_from(values);
        }
    }
}

/// The same in 16 bits and without `g`: decodes two codes at a time by shifts and exact products, `WORDS` words a
/// unit.
#[cube(launch_unchecked)]
fn dequantize_pairs_kernel<F: Float>(
    codes: &Array<u32>,
    scales: &Array<u8>,
    y: &mut Array<Vector<F, Const<8>>>,
    #[comptime] bf16: bool,
    #[define(F)] _dtype: StorageType,
) {
    let cube = (CUBE_POS_Y * CUBE_COUNT_X + CUBE_POS_X) as usize;
    let first = cube * comptime!(256 * WORDS) + UNIT_POS as usize;
    let mut words = Array::<u32>::new(WORDS);
    let mut bytes = Array::<u32>::new(WORDS);
    #[unroll]
    for i in 0..WORDS {
        let at = min(first + comptime!(i * 256), codes.len() - 1usize);
        words[i] = codes[at];
        bytes[i] = u32::cast_from(scales[at / 2usize]);
    }
    #[unroll]
    for i in 0..WORDS {
        let at = first + comptime!(i * 256);
        if at < codes.len() {
            y[at] = values_by_pairs::<F>(words[i], bytes[i], bf16);
        }
    }
}

/// `code * scale` of the eight codes of a word, in 16 bits.
#[cube]
pub(crate) fn values_by_pairs<F: Float>(word: u32, scale: u32, #[comptime] bf16: bool) -> Vector<F, Const<8>> {
    let unit = Vector::<F, Const<2>>::new(F::new(comptime!(1.0 / pair_unit(bf16) / scale_unit(bf16))));
    let scale = e4m3_pair::<F>(scale, bf16);
    let pairs = e2m1_pairs::<F>(word, bf16);
    let mut values = Vector::<F, Const<8>>::empty();
    #[unroll]
    for k in 0..4usize {
        let pair = pairs[k] * scale * unit;
        values[k] = pair[0];
        values[comptime!(k + 4)] = pair[1];
    }
    values
}
