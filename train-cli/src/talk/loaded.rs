//! A model that answers, on a device: what [`crate::run::stored_model`] finds and loads, with the text files that it needs.

use super::first_answers::{Expected, FirstAnswers};
use crate::{
    CliError, ahead::Ahead, device, model_files::TextFiles, report, run::stored_model::StoredModel,
    settings::DeviceChoice,
};
use backend_nvfp4::{CacheFormat, Nvfp4Kernels, Precision, Recipe};
use model_qwen3::{config::Qwen3Config, model::Qwen3};
use std::path::{Path, PathBuf};

/// Which model is wanted, and how it computes.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    /// The path of the model.
    pub model: &'a Path,
    /// The folder of tokenizer and chat template. If there is none, the model's own is taken.
    pub tokenizer: Option<&'a Path>,
    /// Whether activations are quantized. If nobody says, they are as the model was trained.
    pub w4a4: Option<bool>,
    /// How caches keep keys and values.
    pub cache: CacheFormat,
    /// Where it computes.
    pub device: DeviceChoice,
}

/// A model whose files are open.
pub struct Opened<'a> {
    wanted: Wanted<'a>,
    stored: StoredModel,
    recipe: Recipe,
}

impl<'a> Opened<'a> {
    /// Opens the model that is wanted, and prints what was chosen.
    ///
    /// # Errors
    /// If its files are missing or broken, or `--w4a4` does not fit them.
    pub fn new(wanted: Wanted<'a>) -> Result<Self, CliError> {
        let stored = StoredModel::open("--model", wanted.model, wanted.tokenizer)?;
        let recipe = stored.recipe(wanted.w4a4)?;
        Ok(Self { wanted, stored, recipe })
    }

    /// The tokenizer, chat template and stop tokens of the model.
    pub fn text(&mut self) -> &mut TextFiles {
        &mut self.stored.text
    }

    /// The shape of the model.
    pub fn config(&self) -> &Qwen3Config {
        &self.stored.config
    }

    /// Loads the model. Where answers are `expected`, the kernels that they need are compiled meanwhile.
    ///
    /// # Errors
    /// If the weights are broken.
    pub fn load<B: Nvfp4Kernels>(
        self,
        expected: Option<Expected>,
        precision: Precision,
        device: &B::Device,
    ) -> Result<Loaded<B>, CliError> {
        let Self { wanted, stored, recipe } = self;
        let choice = device::resolved(wanted.device);
        let first = |expected| FirstAnswers { stored: &stored, recipe, cache: wanted.cache, expected };
        let ahead = expected.map(|expected| Ahead::compile(choice, precision, first(expected)));
        let model = stored.load(recipe, precision, device)?.with_cache_format(wanted.cache);
        if let Some(ahead) = ahead {
            ahead.finish();
        }
        let config = stored.files.config_file(wanted.tokenizer);
        let inputs = stored.files.weight_files().into_iter().chain([config]).chain(stored.text.files()).collect();
        Ok(Loaded { model, text: stored.text, inputs })
    }
}

/// A model with what turns text into its tokens.
pub struct Loaded<B: Nvfp4Kernels> {
    /// The model.
    pub model: Qwen3<B>,
    /// The tokenizer, chat template and stop tokens of the model.
    pub text: TextFiles,
    /// The files that were read, and those beside them. None of them may be overwritten.
    pub inputs: Vec<PathBuf>,
}

/// Whether answers think: as somebody asked, else as in training. Says if the two differ.
pub fn thinking(asked: Option<bool>, text: &TextFiles) -> Option<bool> {
    if let (Some(asked), Some(trained)) = (asked, text.thinking)
        && asked != trained
    {
        let word = |thinks: bool| if thinks { "on" } else { "off" };
        report::label("thinking", format!("{}, unlike in training ({})", word(asked), word(trained)));
    }
    asked.or(text.thinking)
}
