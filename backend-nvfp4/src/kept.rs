//! Keys and values of past tokens, as a cache keeps them: in the number format in which the model computes, or as 8-bit numbers in
//! half the memory of 16-bit ones.

use burn::tensor::{
    backend::Backend,
    ops::{FloatTensor, IntTensor},
};
use kernels_cubecl::e4m3::BYTES_PER_WORD;

/// How a cache keeps keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CacheFormat {
    /// In the number format in which the model computes.
    #[default]
    Computed,
    /// As E4M3 bytes without a scale: see [`kernels_cubecl::e4m3`]. A row has a multiple of 4 numbers.
    E4m3,
}

impl CacheFormat {
    /// Whether a row of a cache can have `width` numbers.
    pub fn fits(self, width: usize) -> bool {
        self == Self::Computed || width.is_multiple_of(BYTES_PER_WORD)
    }
}

/// Keys or values of tokens, a row of `G*E` numbers for each. They are written in place when nothing else holds them.
#[derive(Debug, Clone)]
pub enum Kept<B: Backend> {
    /// In the number format in which the model computes, `[rows, G*E]`.
    Computed(FloatTensor<B>),
    /// E4M3 bytes, four in a U32 word: `[rows, G*E / 4]`.
    E4m3(IntTensor<B>),
}
