//! The choices of a quantizer.

use crate::rng::Stream;

/// The levels of scales that a tensor has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scaling {
    /// E4M3 block scales only.
    Single,
    /// E4M3 block scales and one f32 tensor scale.
    Two,
}

/// The values that share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BlockShape {
    /// One row, 16 columns.
    Row,
    /// 16 rows, 16 columns. A matrix and its transpose then have the same codes.
    Square,
}

/// How a value between two codes is rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    /// To nearest, ties to the even code.
    Nearest,
    /// Up or down at random, with the probabilities that make the expected value exact.
    Stochastic(Stream),
}

/// The choices of a quantizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantizeSpec {
    /// Single- or two-level.
    pub scaling: Scaling,
    /// 1x16 or 16x16.
    pub block: BlockShape,
    /// Nearest or stochastic.
    pub rounding: Rounding,
}
