//! A model on disk: its shape, its text files, its weights, and what it was trained for. [`StoredModel::load`] puts it on a
//! device so that it computes what it was trained to compute. A checkpoint's master weights are quantized while they are read,
//! exactly as its export quantizes them.

use super::{checkpoint, export_format::ExportFormat, located::located, trained::Trained};
use crate::{
    CliError,
    model_files::{ModelFiles, TextFiles},
    progress::Reading,
    report,
    settings::defaults::{SCALING, master_weights},
};
use backend_nvfp4::{LinearSpec, Nvfp4Kernels, Precision, Recipe, Scaling};
use model_qwen3::{
    bytes::FloatType,
    config::Qwen3Config,
    container::Container,
    model::Qwen3,
    repack::{Repacked, StoreAs},
    tensors::Tensors,
    weights::{self, Purpose},
};
use std::path::Path;

/// A model on disk.
pub struct StoredModel {
    /// Where its files are.
    pub files: ModelFiles,
    /// Its shape.
    pub config: Qwen3Config,
    /// Its tokenizer, chat template and stop tokens.
    pub text: TextFiles,
    /// Its weights as they are stored: the master weights of a checkpoint.
    pub weights: Container,
    /// What it was trained for, if that is recorded.
    pub trained: Option<Trained>,
    /// How the master weights of a checkpoint would be exported.
    export: Option<ExportFormat>,
}

impl StoredModel {
    /// Opens the model at a path, which `flag` gave. `tokenizer` is the folder of its text files, if they are not beside the
    /// weights.
    ///
    /// # Errors
    /// If a file is missing or broken.
    pub fn open(flag: &str, path: &Path, tokenizer: Option<&Path>) -> Result<Self, CliError> {
        let files = located(flag, path)?;
        let config = Qwen3Config::from_file(&files.config_file(tokenizer))?;
        let mut text = TextFiles::open(tokenizer.unwrap_or(&files.folder), &config)?;
        // A file of another name in a checkpoint's folder is not the checkpoint.
        let of_checkpoint = files.weights.is_dir() || files.weights.file_name().is_some_and(|n| n == checkpoint::MODEL);
        let state = if of_checkpoint && checkpoint::is_checkpoint(&files.folder) {
            Some(checkpoint::read_state(&files.folder)?)
        } else {
            None
        };
        let trained = match &state {
            Some(state) => Some(Trained::of_checkpoint(state, &files.folder)?),
            None => Trained::beside(&files)?,
        };
        if let Some(trained) = &trained {
            text.thinking = trained.thinking;
            if trained.has_another_template(&text) {
                let text = "it differs from the one in training; --tokenizer FOLDER takes that of another folder";
                report::label("template", text);
            }
        }
        let weights = match &state {
            Some(_) => Container::open(&files.folder.join(checkpoint::MODEL))?,
            None => files.open_weights(&config)?,
        };
        let export = state.as_ref().map(|state| ExportFormat::of_checkpoint(state, &config));
        Ok(Self { files, config, text, weights, trained, export })
    }

    /// Shows the weights as the model runs with them: those of a checkpoint as its export would have them.
    pub fn with_tensors<T>(&self, read: impl FnOnce(&dyn Tensors) -> T) -> T {
        match &self.export {
            Some(format) => read(&Repacked::new(&self.weights, format.store_as(None))),
            None => read(&self.weights),
        }
    }

    /// Whether the model runs with NVFP4 weights.
    pub fn is_packed(&self) -> bool {
        self.with_tensors(|tensors| tensors.holds_nvfp4())
    }

    /// Whether its files hold NVFP4 weights, and no others from which a recipe could quantize.
    pub fn is_stored_packed(&self) -> bool {
        self.weights.holds_nvfp4()
    }

    /// How the model was trained to be run. Dense weights stay dense under any recipe. `w4a4` overrides whether activations
    /// are quantized. Says what was chosen, and whether it is what the model was trained for.
    ///
    /// # Errors
    /// If `w4a4` asks for quantized activations and there are no NVFP4 weights.
    pub fn recipe(&self, w4a4: Option<bool>) -> Result<Recipe, CliError> {
        let trained = self.trained.as_ref().map(|trained| trained.recipe);
        if !self.is_packed() {
            let why = match trained {
                Some(recipe) if recipe.packs_weights() => format!(", unlike in training ({})", recipe.name()),
                _ => String::new(),
            };
            report::label("weights", format!("dense{why}"));
            return match w4a4 {
                Some(true) => {
                    let text =
                        "--w4a4: the model has no NVFP4 weights; leave --w4a4 out, or convert the model to nvfp4";
                    Err(CliError::Usage(text.into()))
                }
                _ => Ok(Recipe::W4),
            };
        }
        let given = self.weights.has_input_scales();
        let packs = w4a4.unwrap_or(given || trained.is_some_and(Recipe::packs_activations));
        let activations = match (packs, given) {
            (true, true) => "nvfp4, activations nvfp4 with the scales of the file",
            (true, false) => "nvfp4, activations nvfp4",
            (false, _) => "nvfp4, activations not quantized",
        };
        let why = match trained {
            Some(recipe) if recipe.packs_activations() == packs && recipe.packs_weights() => {
                format!(", as in training ({})", recipe.name())
            }
            Some(recipe) => format!(", unlike in training ({})", recipe.name()),
            None => String::new(),
        };
        report::label("weights", format!("{activations}{why}"));
        Ok(if packs { Recipe::W4a4 } else { Recipe::W4 })
    }

    /// Loads the model for inference under a recipe of [`Self::recipe`].
    ///
    /// # Errors
    /// If the weights are broken or do not fit the config.
    pub fn load<B: Nvfp4Kernels>(
        &self,
        recipe: Recipe,
        precision: Precision,
        device: &B::Device,
    ) -> Result<Qwen3<B>, CliError> {
        let spec = answering(recipe, precision);
        let load = |tensors: &dyn Tensors| {
            weights::load(&Reading::of(tensors, "loading"), &self.config, spec, Purpose::Infer, device)
        };
        Ok(self.with_tensors(load)?)
    }

    /// Makes an outline of the model that [`Self::load`] loads.
    ///
    /// # Errors
    /// If the weights do not fit the config.
    pub fn outline<B: Nvfp4Kernels>(
        &self,
        recipe: Recipe,
        precision: Precision,
        device: &B::Device,
    ) -> Result<Qwen3<B>, CliError> {
        let spec = answering(recipe, precision);
        Ok(self.with_tensors(|tensors| weights::outline(tensors, &self.config, spec, device))?)
    }

    /// Loads the model so that a forward rounds as a recipe does. Under bf16 nothing is rounded, and NVFP4 weights are
    /// dequantized. Under the others NVFP4 weights keep their codes, and dense weights are quantized in each forward, except in
    /// the blocks that training left unquantized.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn load_under<B: Nvfp4Kernels>(
        &self,
        recipe: Recipe,
        precision: Precision,
        device: &B::Device,
    ) -> Result<Qwen3<B>, CliError> {
        if self.is_stored_packed() && recipe.packs_weights() {
            let recipe = if recipe.packs_activations() { Recipe::W4a4 } else { Recipe::W4 };
            return self.load(recipe, precision, device);
        }
        let scaling = self.trained.as_ref().map_or(SCALING, |trained| trained.scales);
        let shares_scale = self.trained.as_ref().is_some_and(|trained| trained.shares_scale);
        let spec = LinearSpec { shares_scale, ..LinearSpec::new(recipe, scaling, precision) };
        let dequantized = Repacked::new(&self.weights, StoreAs::Float(FloatType::F32));
        let tensors: &dyn Tensors = if self.is_stored_packed() { &dequantized } else { &self.weights };
        let reading = Reading::of(tensors, "loading");
        let model = weights::load(&reading, &self.config, spec, Purpose::Train(master_weights(precision)), device)?;
        Ok(model.with_bf16_last_blocks(self.trained.as_ref().map_or(0, |trained| trained.bf16_last_blocks)))
    }
}

/// How a model that answers computes: with an activation scale for each token, so that tokens do not depend on each other's.
fn answering(recipe: Recipe, precision: Precision) -> LinearSpec {
    LinearSpec::new(recipe, Scaling::Two, precision).each_row()
}
