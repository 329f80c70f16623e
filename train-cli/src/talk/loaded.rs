//! A model that answers, on a device: what [`crate::run::stored_model`] finds and loads, with the text files that it needs.

use crate::{CliError, model_files::TextFiles, report, run::stored_model::StoredModel};
use backend_nvfp4::{Nvfp4Kernels, Precision};
use model_qwen3::model::Qwen3;
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

impl<B: Nvfp4Kernels> Loaded<B> {
    /// Loads the model that is wanted, and prints what was chosen.
    ///
    /// # Errors
    /// If its files are missing or broken, or `--w4a4` does not fit them.
    pub fn new(wanted: Wanted<'_>, precision: Precision, device: &B::Device) -> Result<Self, CliError> {
        let stored = StoredModel::open(wanted.model, wanted.tokenizer)?;
        let model = stored.load(stored.recipe(wanted.w4a4)?, precision, device)?;
        let config = stored.files.config_file(wanted.tokenizer);
        let inputs = stored.files.weight_files().into_iter().chain([config]).chain(stored.text.files()).collect();
        Ok(Self { model, text: stored.text, inputs })
    }
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
