//! Which matrix products of a linear layer run on NVFP4 operands, and how.

use crate::quantize::{Block, QuantizeSpec, Rounding, Scaling};
use burn::tensor::DType;

/// How a linear layer computes. The three products of `y = x · Wᵀ` are the forward, dgrad
/// (`dx = dy · W`) and wgrad (`dW = dyᵀ · x`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Recipe {
    /// No quantisation: the yardstick.
    Bf16,
    /// NVFP4 weights in forward and dgrad; the straight-through estimator takes the gradient of the
    /// quantised weight for that of the master weight.
    W4,
    /// As `W4`, and the forward reads NVFP4 activations: trains what 4-bit inference runs. wgrad
    /// reads the quantised activations too, dx passes straight through their quantisation.
    W4a4,
}

impl Recipe {
    /// Name on the command line and in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::W4 => "w4",
            Self::W4a4 => "w4a4",
        }
    }
}

/// What a linear layer needs to know besides its weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LinearSpec {
    /// Which products are quantised.
    pub recipe: Recipe,
    /// Scale levels of quantised weights.
    pub scaling: Scaling,
    /// Number format of the dense products.
    pub precision: Precision,
}

impl LinearSpec {
    /// The weight quantiser: 1x16 blocks, to nearest.
    pub fn weights(&self) -> QuantizeSpec {
        QuantizeSpec { scaling: self.scaling, block: Block::Row, rounding: Rounding::Nearest }
    }

    /// The activation quantiser: 1x16 blocks along the features, to nearest, two-level.
    pub fn activations(&self) -> QuantizeSpec {
        QuantizeSpec { scaling: Scaling::Two, block: Block::Row, rounding: Rounding::Nearest }
    }
}

/// Number format of activations and dense matrix products. Sums are always f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Precision {
    /// f32 with no tensor cores: the format of the parity proofs.
    F32,
    /// f32 storage; products may run on tensor cores in TF32.
    Tf32,
    /// f16.
    F16,
    /// bf16.
    Bf16,
}

impl Precision {
    /// The type that activations are stored in.
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 | Self::Tf32 => DType::F32,
            Self::F16 => DType::F16,
            Self::Bf16 => DType::BF16,
        }
    }

    /// Name on the command line and in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Tf32 => "tf32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }
}
