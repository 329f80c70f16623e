//! A model as the user names it: a folder, a `.dat` or a `.safetensors` file with its folder's
//! config.json and tokenizer beside it.

use crate::{CliError, durable::PendingFolder};
use model_qwen3::{
    ModelError,
    chat_template::ChatTemplate,
    checkpoint::Checkpoint,
    config::Qwen3Config,
    tokenizer::{GenerationConfig, Tokenizer},
};
use std::path::{Path, PathBuf};

/// The files of a model's text side.
const TEXT: [&str; 4] = ["generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];

/// The small files that travel with a model's weights, and where they come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Companions {
    /// The config.json that was used, whatever it is called.
    pub config: PathBuf,
    /// The folder of tokenizer and template.
    pub text: PathBuf,
}

impl Companions {
    /// Copies them into a folder in the making.
    ///
    /// # Errors
    /// If one cannot be read or written.
    pub fn copy_into(&self, folder: &mut PendingFolder) -> Result<(), CliError> {
        folder.copy(&self.config, "config.json")?;
        for path in self.text_files() {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            folder.copy(&path, &name)?;
        }
        Ok(())
    }

    /// The text files that are there.
    pub fn text_files(&self) -> impl Iterator<Item = PathBuf> {
        TEXT.iter().map(|name| self.text.join(name)).filter(|p| p.exists())
    }
}

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

    /// Its config.json, or that of the tokenizer's folder where it has none.
    pub fn config_file(&self, tokenizer: Option<&Path>) -> PathBuf {
        let own = self.folder.join("config.json");
        tokenizer.map(|t| t.join("config.json")).filter(|other| !own.exists() && other.exists()).unwrap_or(own)
    }

    /// The weight files, for guards against overwriting.
    pub fn weight_files(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&self.weights).ok();
        let inside = entries.into_iter().flatten().filter_map(|e| e.ok().map(|e| e.path()));
        inside.chain([self.weights.clone()]).collect()
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
