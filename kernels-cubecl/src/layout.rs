//! The positions of codes and scales in memory. (`codec::e2m1_word` puts eight codes into a word.)
//!
//! A packed matrix of `rows` rows and `cols` columns (`cols` is a multiple of 16) consists of
//! * `codes`: `rows x cols/8` words of 32 bits. The code of column `c` is in word `c / 8` of its row, in the four
//!   bits from `4 * (c % 8)` up. Read as little-endian bytes, two codes share a byte and the **low nibble holds the
//!   even column**: the order of the `.dat` files, of cuBLAS and of compressed-tensors.
//! * `scales`: `rows x cols/16` E4M3 bytes, row-major and not swizzled, one for 16 columns of a row. Where 16x16
//!   values share a scale, its byte is repeated in each of the 16 rows, so that readers need not know.
//! * `global`: one f32 `g`, the tensor scale. A value is `code * scale * g`. A single-level tensor holds `g = 1`.

use cubecl::prelude::*;

/// Columns of a row that share one scale.
pub const BLOCK: usize = 16;
/// 4-bit codes in a 32-bit word.
pub const CODES_PER_WORD: usize = 8;

/// [`BLOCK`] and [`CODES_PER_WORD`] as kernels compute with them.
const COLUMNS: u32 = BLOCK as u32;
const CODES: u32 = CODES_PER_WORD as u32;

/// Number of 32-bit code words in a row of `cols` columns.
pub const fn words_per_row(cols: usize) -> usize {
    cols / CODES_PER_WORD
}

/// Number of scale bytes in a row of `cols` columns.
pub const fn scales_per_row(cols: usize) -> usize {
    cols / BLOCK
}

/// Index of the word that holds the code at (`row`, `col`).
#[cube]
pub(crate) fn word_index(row: u32, col: u32, cols: u32) -> usize {
    (row as usize) * ((cols / CODES) as usize) + ((col / CODES) as usize)
}

/// Index of the scale of the value at (`row`, `col`).
#[cube]
pub(crate) fn scale_index(row: u32, col: u32, cols: u32) -> usize {
    (row as usize) * ((cols / COLUMNS) as usize) + ((col / COLUMNS) as usize)
}

/// Extracts the 4-bit code of column `col` from its word.
#[cube]
pub(crate) fn code_of(word: u32, col: u32) -> u32 {
    (word >> ((col % CODES) * 4u32)) & 15u32
}
