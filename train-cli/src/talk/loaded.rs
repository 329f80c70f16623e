//! One way from a path to a model that answers. The path is a model folder, a `.dat` or `.safetensors` file, a run folder
//! (its export, or its newest checkpoint), or a checkpoint. A folder that a run exported says how its model was trained, and
//! the model runs as that.

use crate::{
    CliError,
    args::ModelArgs,
    model_files::{ModelFiles, TextFiles, Trained},
    progress::Reading,
    report,
    run::{checkpoint, folder::FINAL},
};
use backend_nvfp4::{LinearSpec, Nvfp4Kernels, Precision, Recipe, Scaling};
use model_qwen3::{
    config::Qwen3Config,
    container::Container,
    model::Qwen3,
    tensors::{Stored, Tensors},
    weights::{self, Purpose},
};
use std::path::Path;

/// A model with what turns text into its tokens.
pub struct Loaded<B: Nvfp4Kernels> {
    /// The model.
    pub model: Qwen3<B>,
    /// Its tokenizer, chat template and stop tokens.
    pub text: TextFiles,
}

impl<B: Nvfp4Kernels> Loaded<B> {
    /// Loads the model that the flags name, and prints what was chosen.
    ///
    /// # Errors
    /// If its files are missing or broken, or `--w4a4` does not fit them.
    pub fn new(args: &ModelArgs, precision: Precision, device: &B::Device) -> Result<Self, CliError> {
        let files = located(&args.model)?;
        let config = Qwen3Config::from_file(&files.config_file(args.tokenizer.as_deref()))?;
        let text = TextFiles::open(args.tokenizer.as_ref().unwrap_or(&files.folder), &config)?;
        let weights = files.open_weights()?;
        let spec = LinearSpec::new(recipe(args, &files, &weights)?, Scaling::Two, precision).each_row();
        let model = weights::load(&Reading::of(&weights, "loading"), &config, spec, Purpose::Infer, device)?;
        Ok(Self { model, text })
    }
}

/// The files of the model at a path, which may be a run folder.
///
/// # Errors
/// If it is a run folder that has nothing yet, or whose checkpoints cannot be read.
pub fn located(path: &Path) -> Result<ModelFiles, CliError> {
    let exported = path.join(FINAL);
    let found = if exported.is_dir() {
        exported
    } else if path.join(checkpoint::CONFIG).exists() {
        let newest = checkpoint::newest(path, usize::MAX)?;
        let nothing = || CliError::Usage(format!("{}: the run has no checkpoint and no export yet", path.display()));
        newest.ok_or_else(nothing)?.folder
    } else {
        return ModelFiles::new(path).refuse_gguf();
    };
    report::label("model", found.display().to_string());
    Ok(ModelFiles::new(&found))
}

/// The recipe by which NVFP4 weights are multiplied. Dense weights stay dense under any recipe.
fn recipe(args: &ModelArgs, files: &ModelFiles, weights: &Container) -> Result<Recipe, CliError> {
    let packed = weights.names().iter().any(|n| matches!(weights.stored(n), Some(Stored::Packed { .. })));
    if !packed {
        report::label("weights", "dense");
        return match args.w4a4 {
            Some(true) => {
                let text = "--w4a4: the model has no NVFP4 weights; leave --w4a4 out, or convert the model to nvfp4";
                Err(CliError::Usage(text.into()))
            }
            _ => Ok(Recipe::W4),
        };
    }
    let trained = Trained::of(files)?.map(|trained| trained.recipe);
    let packs = args.w4a4.or(trained.map(Recipe::packs_activations)).unwrap_or(false);
    let activations = if packs { "nvfp4, activations nvfp4" } else { "nvfp4, activations not quantized" };
    let why = match trained {
        Some(recipe) if recipe.packs_activations() == packs => format!(", as in training ({})", recipe.name()),
        Some(recipe) => format!(", unlike in training ({})", recipe.name()),
        None => String::new(),
    };
    report::label("weights", format!("{activations}{why}"));
    Ok(if packs { Recipe::W4a4 } else { Recipe::W4 })
}
