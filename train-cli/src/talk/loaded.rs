//! A model that answers, on a device: what [`crate::run::stored_model`] finds and loads, with the text files that it needs.

use crate::{CliError, args::ModelArgs, model_files::TextFiles, report, run::stored_model::StoredModel};
use backend_nvfp4::{Nvfp4Kernels, Precision};
use model_qwen3::model::Qwen3;

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
        let stored = StoredModel::open(&args.model, args.tokenizer.as_deref())?;
        let model = stored.load(stored.recipe(args.w4a4)?, precision, device)?;
        Ok(Self { model, text: stored.text })
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
