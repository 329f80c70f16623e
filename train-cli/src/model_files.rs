//! A model as the user names it: a folder, a `.dat` or a `.safetensors` file with its folder's
//! config.json and tokenizer beside it.

use crate::CliError;
use model_qwen3::{
    ModelError,
    chat_template::ChatTemplate,
    checkpoint::Checkpoint,
    config::Qwen3Config,
    tokenizer::{GenerationConfig, Tokenizer},
};
use std::path::{Path, PathBuf};

/// The small files that travel with a model's weights.
pub const COMPANIONS: [&str; 5] =
    ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];

/// Where a model's files are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelFiles {
    /// The weights: folder or file.
    pub weights: PathBuf,
    /// The folder of config.json and tokenizer.
    pub folder: PathBuf,
}

impl ModelFiles {
    /// Files of the model at `path`.
    pub fn new(path: &Path) -> Self {
        let folder = if path.is_file() {
            path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_owned()
        } else {
            path.to_owned()
        };
        Self { weights: path.to_owned(), folder }
    }

    /// Its name, for run folders and headers.
    pub fn name(&self) -> String {
        let path = self.weights.canonicalize().unwrap_or_else(|_| self.weights.clone());
        path.file_stem().map_or_else(|| "model".into(), |n| n.to_string_lossy().into_owned())
    }

    /// Opens the weights.
    ///
    /// # Errors
    /// If there are none or they are broken.
    pub fn checkpoint(&self) -> Result<Checkpoint, ModelError> {
        Checkpoint::open(&self.weights)
    }

    /// Reads config.json.
    ///
    /// # Errors
    /// If it is missing or not a dense Qwen3.
    pub fn config(&self) -> Result<Qwen3Config, ModelError> {
        Qwen3Config::from_file(&self.folder.join("config.json"))
    }
}

/// Everything about text: tokenizer, template, stop tokens.
#[derive(Debug, Clone)]
pub struct TextFiles {
    /// Text to ids and back.
    pub tokenizer: Tokenizer,
    /// Conversations to text.
    pub template: ChatTemplate,
    /// How the authors sample.
    pub generation: GenerationConfig,
    /// Ids that end an answer.
    pub stop_ids: Vec<u32>,
}

impl TextFiles {
    /// Reads a folder's tokenizer, template and generation config.
    ///
    /// # Errors
    /// If one is missing or broken, or no stop token is known.
    pub fn open(folder: &Path, config: &Qwen3Config) -> Result<Self, CliError> {
        let tokenizer = Tokenizer::from_file(&folder.join("tokenizer.json"))?;
        if tokenizer.vocab_size() > config.vocab_size {
            return Err(CliError::Usage(format!(
                "{}: the tokenizer has {} ids, config.json says vocab_size {}",
                folder.display(),
                tokenizer.vocab_size(),
                config.vocab_size
            )));
        }
        let generation = GenerationConfig::from_folder(folder)?;
        let mut stop_ids = generation.eos_token_ids.clone();
        stop_ids.extend(&config.eos_token_ids);
        stop_ids.extend(["<|im_end|>", "<|endoftext|>"].iter().filter_map(|t| tokenizer.id(t)));
        stop_ids.sort_unstable();
        stop_ids.dedup();
        if stop_ids.is_empty() {
            return Err(CliError::Usage(format!("{}: no stop token in its files", folder.display())));
        }
        Ok(Self { tokenizer, template: ChatTemplate::from_folder(folder)?, generation, stop_ids })
    }
}
