//! The number formats of a KV cache: the one in which the model computes, or 8-bit numbers in half the memory of 16-bit ones.

use burn::tensor::{
    backend::Backend,
    ops::{FloatTensor, IntTensor},
};
use kernels_cubecl::e4m3::BYTES_PER_WORD;

/// The number format of a KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum CacheFormat {
    /// In the number format in which the model computes.
    #[default]
    Native,
    /// As E4M3 bytes without a scale: see [`kernels_cubecl::e4m3`]. A row has a multiple of 4 numbers.
    E4m3,
}

impl CacheFormat {
    /// Whether a row of a cache can have `width` numbers.
    pub fn fits(self, width: usize) -> bool {
        self == Self::Native || width.is_multiple_of(BYTES_PER_WORD)
    }
}

/// The keys or the values of tokens, a row of `G*E` numbers for each. They are written in place when nothing else holds the buffer.
#[derive(Debug, Clone)]
pub enum CacheBuffer<B: Backend> {
    /// In the number format in which the model computes, `[rows, G*E]`.
    Native(FloatTensor<B>),
    /// E4M3 bytes, four in a U32 word: `[rows, G*E / 4]`.
    E4m3(IntTensor<B>),
}
