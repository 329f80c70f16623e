//! Which matrix products of a linear layer run on NVFP4 operands, and how.

use crate::{
    Stream,
    quantize::{Block, QuantizeSpec, Rounding, Scaling},
};
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
    /// All three products on NVFP4 operands (NVIDIA, "Pretraining LLMs with NVFP4", arXiv 2509.25149, §4).
    Nvfp4(Nvfp4Parts),
}

/// The parts of [`Recipe::Nvfp4`], each of which can be left out to see what it is worth.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Nvfp4Parts {
    /// Weights share a scale over 16x16 values, so that forward and dgrad read the same quantised weight.
    pub square_blocks: bool,
    /// The operands of wgrad are rotated by a random Hadamard transform along the tokens.
    pub hadamard: bool,
    /// Output gradients are rounded stochastically.
    pub stochastic: bool,
}

impl Nvfp4Parts {
    /// The recipe as published.
    pub const ALL: Self = Self { square_blocks: true, hadamard: true, stochastic: true };
}

impl Recipe {
    /// Whether the forward multiplies NVFP4 activations.
    pub fn packs_activations(self) -> bool {
        matches!(self, Self::W4a4 | Self::Nvfp4(_))
    }

    /// Name on the command line and in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::W4 => "w4",
            Self::W4a4 => "w4a4",
            Self::Nvfp4(_) => "nvfp4",
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
    /// Which values of a weight share a scale.
    pub block: Block,
    /// What the stochastic rounding of gradients draws from: this stream and the next.
    pub stream: Stream,
}

impl LinearSpec {
    /// A specification with the weight blocks of its recipe, that draws from stream 0.
    pub const fn new(recipe: Recipe, scaling: Scaling, precision: Precision) -> Self {
        let square = matches!(recipe, Recipe::Nvfp4(Nvfp4Parts { square_blocks: true, .. }));
        let block = if square { Block::Square } else { Block::Row };
        Self { recipe, scaling, precision, block, stream: Stream { seed: 0, step: 0, stream: 0 } }
    }

    /// For the `index`-th linear layer of those that share this specification: its own random numbers.
    #[must_use]
    pub fn slot(self, index: u32) -> Self {
        let stream = Stream { stream: self.stream.stream + 2 * index, ..self.stream };
        Self { stream, ..self }
    }

    /// The weight quantiser: to nearest.
    pub fn weights(&self) -> QuantizeSpec {
        QuantizeSpec { scaling: self.scaling, block: self.block, rounding: Rounding::Nearest }
    }

    /// The quantiser of output gradients, for dgrad or for wgrad.
    pub(crate) fn gradients(&self, parts: Nvfp4Parts, wgrad: bool) -> QuantizeSpec {
        let stream = Stream { stream: self.stream.stream + u32::from(wgrad), ..self.stream };
        let rounding = if parts.stochastic { Rounding::Stochastic(stream) } else { Rounding::Nearest };
        QuantizeSpec { rounding, ..self.activations() }
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
