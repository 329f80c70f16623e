//! Where codes and scales lie in memory. (Eight codes are put together where they are made: `codec::e2m1_word`.)
//!
//! A packed matrix of R rows and C columns (C a multiple of 16) is
//! * `codes`: R x C/8 words of 32 bits. Code `c` of a row sits in word `c / 8`, bits `4 * (c % 8)`
//!   and up. Read as little-endian bytes this is two codes a byte, **low nibble = even column**, the
//!   order of the `.dat` files, of cuBLAS and of compressed-tensors.
//! * `scales`: R x C/16 bytes, E4M3, row-major and not swizzled: one for 16 columns of a row.
//!   For 16x16 blocks the byte is repeated in each of the 16 rows, so that readers need not care.
//! * `global`: one f32 `g`; a value is `code * scale * g`. Single-level tensors hold `g = 1`.

use cubecl::prelude::*;

/// Columns that share one scale.
pub const BLOCK: usize = 16;
/// 4-bit codes in a 32-bit word.
pub const CODES_PER_WORD: usize = 8;

/// 32-bit code words in a row of `cols` columns.
pub const fn words_per_row(cols: usize) -> usize {
    cols / CODES_PER_WORD
}

/// Scale bytes in a row of `cols` columns.
pub const fn scales_per_row(cols: usize) -> usize {
    cols / BLOCK
}

/// Index of the word that holds column `col` of row `row`.
#[cube]
pub(crate) fn word_index(row: u32, col: u32, cols: u32) -> usize {
    (row as usize) * ((cols / 8u32) as usize) + ((col / 8u32) as usize)
}

/// Index of the scale of column `col` of row `row`.
#[cube]
pub(crate) fn scale_index(row: u32, col: u32, cols: u32) -> usize {
    (row as usize) * ((cols / 16u32) as usize) + ((col / 16u32) as usize)
}

/// The 4-bit code of column `col` out of its word.
#[cube]
pub(crate) fn code_of(word: u32, col: u32) -> u32 {
    (word >> ((col % 8u32) * 4u32)) & 15u32
}
