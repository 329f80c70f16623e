//! The choices of a linear layer: which of its products read NVFP4 operands, how these are quantized, and the number
//! format of the rest.

use burn::tensor::DType;
use kernels_cubecl::{
    quantize::{BlockShape, QuantizeSpec, Rounding, Scaling},
    rng::Stream,
};

/// How a linear layer `y = x · Wᵀ` computes its three products: the forward, dgrad (`dx = dy · W`) and wgrad
/// (`dW = dyᵀ · x`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Recipe {
    /// Nothing is quantized. Other recipes are measured against this one.
    Bf16,
    /// The forward and dgrad read NVFP4 weights. The straight-through estimator takes the gradient of the quantized
    /// weight for that of the master weight.
    W4,
    /// Like `W4`, but the forward and wgrad read NVFP4 activations, so that training sees what 4-bit inference runs. dx
    /// passes straight through the quantization of activations.
    W4a4,
    /// All three products read NVFP4 operands (NVIDIA, "Pretraining LLMs with NVFP4", arXiv 2509.25149, §4).
    Nvfp4(Nvfp4Parts),
}

/// The parts of [`Recipe::Nvfp4`]. Each can be left out to measure its effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Nvfp4Parts {
    /// Weights share a scale over 16x16 values: the codes of W are then those of its transpose.
    pub square_blocks: bool,
    /// A random Hadamard transform rotates the operands of wgrad along the tokens.
    pub hadamard: bool,
    /// Output gradients are rounded stochastically.
    pub stochastic: bool,
}

impl Nvfp4Parts {
    /// The recipe as published.
    pub const ALL: Self = Self { square_blocks: true, hadamard: true, stochastic: true };
}

/// What the rest of the program asks a recipe.
impl Recipe {
    /// Whether the forward and dgrad multiply NVFP4 weights.
    pub fn packs_weights(self) -> bool {
        match self {
            Self::Bf16 => false,
            Self::W4 | Self::W4a4 | Self::Nvfp4(_) => true,
        }
    }

    /// Which values of a weight share a scale.
    pub(crate) const fn weight_blocks(self) -> BlockShape {
        match self {
            Self::Nvfp4(Nvfp4Parts { square_blocks: true, .. }) => BlockShape::Square,
            Self::Bf16 | Self::W4 | Self::W4a4 | Self::Nvfp4(_) => BlockShape::Row,
        }
    }

    /// Whether the forward multiplies NVFP4 activations.
    pub fn packs_activations(self) -> bool {
        match self {
            Self::Bf16 | Self::W4 => false,
            Self::W4a4 | Self::Nvfp4(_) => true,
        }
    }

    /// How dgrad and wgrad pack output gradients, if they do. wgrad then packs the activations again, across tokens.
    pub fn packs_gradients(self) -> Option<Nvfp4Parts> {
        match self {
            Self::Bf16 | Self::W4 | Self::W4a4 => None,
            Self::Nvfp4(parts) => Some(parts),
        }
    }

    /// The name on the command line and in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::W4 => "w4",
            Self::W4a4 => "w4a4",
            Self::Nvfp4(_) => "nvfp4",
        }
    }
}

/// Which rows of quantized activations share a tensor scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ActivationScale {
    /// All rows of a call, as in training.
    AllRows,
    /// Each row has its own, so that the result for a token does not depend on the other tokens of the call. Inference
    /// does this.
    EachRow,
    /// All rows have one that the layer's file gives, so that the result for a token does not depend on other tokens either.
    Given(GivenScale),
}

/// A tensor scale that does not come from the values that it scales, with its reciprocal: a file holds one of them, and the
/// other is rounded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GivenScale {
    /// The bits, because specifications are compared.
    scale: u32,
    reciprocal: u32,
}

impl GivenScale {
    /// The scale `1 / reciprocal`. `None` if either is not a positive finite number.
    pub fn of_reciprocal(reciprocal: f32) -> Option<Self> {
        Self::of_both(1.0 / reciprocal, reciprocal)
    }

    /// This scale. `None` if it or its reciprocal is not a positive finite number.
    pub fn of_scale(scale: f32) -> Option<Self> {
        Self::of_both(scale, 1.0 / scale)
    }

    fn of_both(scale: f32, reciprocal: f32) -> Option<Self> {
        let positive = |x: f32| x > 0.0 && x.is_finite();
        (positive(scale) && positive(reciprocal))
            .then(|| Self { scale: scale.to_bits(), reciprocal: reciprocal.to_bits() })
    }

    /// The scale.
    pub fn scale(self) -> f32 {
        f32::from_bits(self.scale)
    }

    /// The reciprocal of the scale: 2688 over the largest magnitude that has a code.
    pub fn reciprocal(self) -> f32 {
        f32::from_bits(self.reciprocal)
    }
}

/// The specification of a linear layer: everything but its weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LinearSpec {
    /// Which products are quantized.
    pub recipe: Recipe,
    /// The scale levels of quantized weights.
    pub scaling: Scaling,
    /// The number format of the dense products.
    pub precision: Precision,
    /// Which values of a weight share a scale.
    pub block: BlockShape,
    /// Whether the weights of layers that read the same activations share one tensor scale. Inference engines multiply
    /// such weights as one matrix.
    pub shares_scale: bool,
    /// Which rows of quantized activations share a tensor scale.
    pub activation_scale: ActivationScale,
    /// Whether each row of activations is the newest token of a sequence: see
    /// [`Nvfp4Kernels::token_products`](crate::Nvfp4Kernels::token_products).
    pub newest_tokens: bool,
    /// The random numbers for rounding gradients: this stream for dgrad and the next one for wgrad.
    pub stream: Stream,
}

impl LinearSpec {
    /// A specification for training, with the weight blocks of its recipe, a tensor scale for each weight, and stream 0.
    pub const fn new(recipe: Recipe, scaling: Scaling, precision: Precision) -> Self {
        Self {
            recipe,
            scaling,
            precision,
            block: recipe.weight_blocks(),
            shares_scale: false,
            activation_scale: ActivationScale::AllRows,
            newest_tokens: false,
            stream: Stream { seed: 0, step: 0, stream: 0 },
        }
    }

    /// The same specification with the random numbers of the linear layer `index` among those that share it.
    #[must_use]
    pub fn slot(self, index: u32) -> Self {
        let stream = Stream { stream: self.stream.stream + 2 * index, ..self.stream };
        Self { stream, ..self }
    }

    /// The same specification for inference: see [`ActivationScale::EachRow`].
    #[must_use]
    pub fn each_row(self) -> Self {
        Self { activation_scale: ActivationScale::EachRow, ..self }
    }

    /// The same specification for activations each row of which is the newest token of a sequence.
    #[must_use]
    pub fn of_newest_tokens(self) -> Self {
        Self { newest_tokens: true, ..self }
    }

    /// The same specification without quantization.
    #[must_use]
    pub fn unquantized(self) -> Self {
        Self { recipe: Recipe::Bf16, ..self }
    }

    /// How weights are quantized: to nearest.
    pub fn weights(&self) -> QuantizeSpec {
        QuantizeSpec { scaling: self.scaling, block: self.block, rounding: Rounding::Nearest }
    }

    /// How the weight of a layer is quantized, if it is, and by itself.
    pub fn codes_of_one(&self) -> Option<QuantizeSpec> {
        (self.recipe.packs_weights() && !self.shares_scale).then(|| self.weights())
    }

    /// How output gradients are quantized, for wgrad or for dgrad.
    pub(crate) fn gradients(&self, parts: Nvfp4Parts, wgrad: bool) -> QuantizeSpec {
        let stream = Stream { stream: self.stream.stream + u32::from(wgrad), ..self.stream };
        let rounding = if parts.stochastic { Rounding::Stochastic(stream) } else { Rounding::Nearest };
        QuantizeSpec { rounding, ..self.activations() }
    }

    /// Whether the operation that makes activations also quantizes them for the layers that read them.
    pub(crate) fn quantizes_early(&self) -> bool {
        self.recipe.packs_activations() && self.activation_scale == ActivationScale::AllRows
    }

    /// How activations are quantized: 1x16 blocks along the features, to nearest, two-level.
    pub fn activations(&self) -> QuantizeSpec {
        QuantizeSpec { scaling: Scaling::Two, block: BlockShape::Row, rounding: Rounding::Nearest }
    }
}

/// The number format of activations and dense matrix products. Sums are always f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Precision {
    /// f32 without tensor cores, which comparisons with other implementations use.
    F32,
    /// f32 in memory; tensor cores may compute products in TF32.
    Tf32,
    /// f16.
    F16,
    /// bf16.
    Bf16,
}

impl Precision {
    /// The dtype of activations.
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 | Self::Tf32 => DType::F32,
            Self::F16 => DType::F16,
            Self::Bf16 => DType::BF16,
        }
    }

    /// The name on the command line and in files.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Tf32 => "tf32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }
}
