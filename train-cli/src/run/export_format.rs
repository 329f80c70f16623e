//! How trained weights are exported: which tensors become NVFP4, with which scales. A checkpoint that answers is read through
//! the same format, so that it answers as its export would.

use super::checkpoint::{HeadStorage, TrainerState};
use crate::settings::HeadFormat;
use backend_nvfp4::{BlockShape, LinearSpec, Precision, Recipe, Scaling};
use model_qwen3::{
    bytes::FloatType,
    config::Qwen3Config,
    container::Container,
    repack::{HeadAs, StoreAs},
};

/// How a trained model is exported.
#[derive(Debug, Clone, Copy)]
pub struct ExportFormat {
    /// Whether NVFP4 tensors have a scale of their own.
    pub scaling: Scaling,
    /// How the head is stored.
    pub head: HeadAs,
    /// The recipe of the run. A run with recipe bf16 exports no NVFP4.
    pub recipe: Recipe,
    /// The first block that the recipe does not quantize.
    pub dense_from: usize,
    /// Whether weights that are multiplied together share one tensor scale.
    pub shares_scale: bool,
}

impl From<HeadStorage> for HeadAs {
    /// How a head is exported that was trained so.
    fn from(trained: HeadStorage) -> Self {
        match trained {
            HeadStorage::Nvfp4 => Self::OwnNvfp4,
            HeadStorage::Tied | HeadStorage::Dense => Self::Float(FloatType::F16),
        }
    }
}

impl ExportFormat {
    /// The format of a run's export, from the state of a checkpoint.
    pub fn of_checkpoint(state: &TrainerState, config: &Qwen3Config) -> Self {
        let (settings, layers) = (&state.settings, config.num_hidden_layers);
        let format = Self {
            scaling: state.scaling(),
            head: state.head.into(),
            recipe: settings.recipe.resolved(),
            dense_from: layers.saturating_sub(settings.bf16_last_blocks(layers)),
            shares_scale: settings.recipe.share_scales,
        };
        format.with_head(settings.saving.head)
    }

    /// The same format with the head as somebody asked for it, if anybody did.
    #[must_use]
    pub fn with_head(self, wanted: Option<HeadFormat>) -> Self {
        let head = match wanted {
            Some(HeadFormat::Nvfp4) => HeadAs::Nvfp4,
            Some(HeadFormat::Bf16) => HeadAs::Float(FloatType::Bf16),
            None => self.head,
        };
        Self { head, ..self }
    }

    /// The same format for a file that must hold NVFP4: weights of recipe bf16 are quantized as recipe w4 does it.
    #[must_use]
    pub fn quantized(self) -> Self {
        Self { recipe: if self.recipe.packs_weights() { self.recipe } else { Recipe::W4 }, ..self }
    }

    /// How tensors are stored: as in `like`, or in NVFP4 with the blocks by which training quantized.
    pub fn store_as<'a>(&self, like: Option<&'a Container>) -> StoreAs<'a> {
        match (self.recipe.packs_weights(), like) {
            (false, _) => StoreAs::Float(FloatType::Bf16),
            (true, Some(like)) => StoreAs::Like(like),
            (true, None) => StoreAs::Nvfp4 {
                scaling: self.scaling,
                head: self.head,
                block: self.block(),
                shares_scale: self.shares_scale,
                dense_from: self.dense_from,
            },
        }
    }

    /// Which values share a block scale.
    pub fn block(&self) -> BlockShape {
        self.spec(Precision::F32).weights().block
    }

    /// How linear layers compute under the recipe.
    pub fn spec(&self, precision: Precision) -> LinearSpec {
        LinearSpec::new(self.recipe, self.scaling, precision)
    }
}
