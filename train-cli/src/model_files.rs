//! The files of a model. The user names a folder, or a `.dat` or `.safetensors` file with config.json and tokenizer
//! beside it. A folder that a run exported also records how the model was trained.

use crate::{CliError, durable::PendingFolder, report, settings::by_name};
use backend_nvfp4::{Nvfp4Parts, Recipe};
use model_qwen3::{
    ModelError,
    chat_template::ChatTemplate,
    config::Qwen3Config,
    container::Container,
    file, names,
    tensors::Tensors,
    tokenizer::{GenerationConfig, Tokenizer},
    weights::head_is_a_copy,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// The files that turn text into tokens and back.
const TEXT: [&str; 4] = ["generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];

/// Where the small files are that belong to a model's weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Companions {
    /// The config.json, which may have another name.
    pub config: PathBuf,
    /// The folder of tokenizer and chat template.
    pub text: PathBuf,
}

impl Companions {
    /// Copies the files into a folder that is being written.
    ///
    /// # Errors
    /// If a file cannot be read or written.
    pub fn copy_into(&self, folder: &mut PendingFolder) -> Result<(), CliError> {
        folder.copy(&self.config, "config.json")?;
        for path in self.text_files() {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            folder.copy(&path, &name)?;
        }
        Ok(())
    }

    /// The text files that exist.
    pub fn text_files(&self) -> impl Iterator<Item = PathBuf> {
        text_files(&self.text)
    }
}

fn text_files(folder: &Path) -> impl Iterator<Item = PathBuf> {
    TEXT.iter().map(|name| folder.join(name)).filter(|p| p.exists())
}

/// Makes a config.json say that the head is not the embedding, if these tensors have a head of their own. Hugging Face's loader
/// goes by config.json alone. Returns whether it said something else before.
///
/// # Errors
/// If the head cannot be read.
pub fn untie(config: &mut Map<String, Value>, tensors: &dyn Tensors) -> Result<bool, CliError> {
    const TIED: &str = "tie_word_embeddings";
    let has_head = tensors.names().iter().any(|name| name == names::HEAD);
    if config.get(TIED) != Some(&Value::Bool(true)) || !has_head || head_is_a_copy(tensors)? {
        return Ok(false);
    }
    config.insert(TIED.to_owned(), false.into());
    Ok(true)
}

/// Where a model's files are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelFiles {
    /// The file or folder with the weights.
    pub weights: PathBuf,
    /// The folder with config.json and tokenizer.
    pub folder: PathBuf,
}

impl ModelFiles {
    /// Finds the files of the model at `path`.
    pub fn new(path: &Path) -> Self {
        let folder = if path.exists() && !path.is_dir() {
            path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_owned()
        } else {
            path.to_owned()
        };
        Self { weights: path.to_owned(), folder }
    }

    /// Whether the weights are a GGUF file, which `convert` reads.
    pub fn is_gguf(&self) -> bool {
        self.weights.extension().is_some_and(|extension| extension == "gguf")
    }

    /// Refuses a GGUF file.
    ///
    /// # Errors
    /// If the weights are one.
    pub fn refuse_gguf(self) -> Result<Self, CliError> {
        if self.is_gguf() {
            let file = report::quoted(&self.weights.display().to_string());
            let text = format!("train-cli convert {file} NEW-FOLDER/model.safetensors --dtype bf16");
            return Err(CliError::Usage(format!("{file}: a GGUF file is converted first: {text}")));
        }
        Ok(self)
    }

    /// The model's config.json, or the one in the tokenizer's folder if the model has none.
    pub fn config_file(&self, tokenizer: Option<&Path>) -> PathBuf {
        let own = self.folder.join("config.json");
        tokenizer.map(|t| t.join("config.json")).filter(|other| !own.exists() && other.exists()).unwrap_or(own)
    }

    /// All files beside the weights, none of which may be overwritten.
    pub fn weight_files(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&self.weights).ok();
        let inside = entries.into_iter().flatten().filter_map(|e| e.ok().map(|e| e.path()));
        inside.chain([self.weights.clone()]).collect()
    }

    /// The model's name, for run folders and headers.
    pub fn name(&self) -> String {
        let path = self.weights.canonicalize().unwrap_or_else(|_| self.weights.clone());
        // What follows the last point of a folder's name is no extension: Qwen3-0.6B.
        let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
        name.map_or_else(|| "model".into(), |n| n.to_string_lossy().into_owned())
    }

    /// Opens the weights.
    ///
    /// # Errors
    /// If there are none or they are broken.
    pub fn open_weights(&self) -> Result<Container, ModelError> {
        Container::open(&self.weights)
    }
}

/// How an exported model was trained. Its folder records it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trained {
    /// The recipe.
    #[serde(with = "by_name")]
    pub recipe: Recipe,
}

/// The file of [`Trained`].
pub const TRAINED: &str = "trained.json";
/// Most bytes of it. It has a hundred.
const LONGEST_RECORD: u64 = 64 << 10;

impl Trained {
    /// The record beside a model's weights, if there is one.
    ///
    /// # Errors
    /// If it is broken.
    pub fn of(files: &ModelFiles) -> Result<Option<Self>, CliError> {
        let path = files.folder.join(TRAINED);
        if !path.exists() {
            return Ok(None);
        }
        let text = file::read_text(&path, LONGEST_RECORD, "export the model again")?;
        serde_json::from_str(&text).map(Some).map_err(|e| CliError::corrupt(&path, e))
    }

    /// Writes the record of a recipe into a folder.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write(recipe: Recipe, folder: &mut PendingFolder) -> Result<(), CliError> {
        // Which parts of the recipe are left out concerns training only.
        let recipe = if let Recipe::Nvfp4(_) = recipe { Recipe::Nvfp4(Nvfp4Parts::ALL) } else { recipe };
        let text = serde_json::to_string_pretty(&Self { recipe }).expect("plain data serializes");
        folder.file(TRAINED, |out| out.write_all(text.as_bytes()).map_err(CliError::io(Path::new(TRAINED))))
    }
}

/// A model's tokenizer, chat template and stop tokens.
#[derive(Debug, Clone)]
pub struct TextFiles {
    /// The folder that they were read from.
    folder: PathBuf,
    /// Turns text into ids and back.
    pub tokenizer: Tokenizer,
    /// Renders conversations as text.
    pub template: ChatTemplate,
    /// How the model's authors sample.
    pub generation: GenerationConfig,
    /// Ids that end an answer.
    pub stop_ids: Vec<u32>,
}

impl TextFiles {
    /// Reads a folder's tokenizer, chat template and generation config.
    ///
    /// # Errors
    /// If one of them is missing or broken, or no stop token is known.
    pub fn open(folder: &Path, config: &Qwen3Config) -> Result<Self, CliError> {
        let tokenizer = Tokenizer::from_file(&folder.join("tokenizer.json"))?;
        if tokenizer.vocab_size() > config.vocab_size {
            return Err(CliError::Usage(format!(
                "{}: the tokenizer has {} ids, but vocab_size in config.json is {}; use the tokenizer of this model",
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
            return Err(CliError::Usage(format!(
                "{}: its files name no stop token; add eos_token_id to generation_config.json",
                folder.display()
            )));
        }
        let template = ChatTemplate::from_folder(folder)?;
        Ok(Self { folder: folder.to_owned(), tokenizer, template, generation, stop_ids })
    }

    /// The files that they were read from.
    pub fn files(&self) -> impl Iterator<Item = PathBuf> {
        text_files(&self.folder)
    }
}
