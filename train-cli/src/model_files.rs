//! The files of a model. The user names a folder, or a `.dat` or `.safetensors` file with config.json and tokenizer
//! beside it.

use crate::{
    CliError,
    durable::{self, PendingFolder},
    outputs::check_folder,
    report,
};
use model_qwen3::{
    ModelError,
    chat_template::ChatTemplate,
    config::Qwen3Config,
    container::Container,
    gguf::GgufFile,
    names,
    sampling::Sampling,
    tensors::Tensors,
    tokenizer::{GenerationConfig, Tokenizer},
};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// The files that turn text into tokens and back.
const TEXT: [&str; 4] = ["generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];

/// The fields of a message in which rows of data have thoughts.
const THOUGHTS: [&str; 2] = ["reasoning_content", "thinking"];

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
pub fn untie(config: &mut Map<String, Value>, tensors: &dyn Tensors) -> bool {
    const TIED: &str = "tie_word_embeddings";
    let has_head = tensors.names().iter().any(|name| name == names::HEAD);
    let unties = has_head && config.get(TIED) == Some(&Value::Bool(true));
    if unties {
        config.insert(TIED.to_owned(), false.into());
    }
    unties
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
        let folder = if path.exists() && !path.is_dir() { durable::parent(path) } else { path };
        Self { weights: path.to_owned(), folder: folder.to_owned() }
    }

    /// Whether the weights are a GGUF file, which `convert` reads.
    pub fn is_gguf(&self) -> bool {
        self.weights.extension().is_some_and(|extension| extension == "gguf")
    }

    /// Refuses a GGUF file, and says how to convert it without loss.
    ///
    /// # Errors
    /// If the weights are one, or a broken one.
    pub fn refuse_gguf(self) -> Result<Self, CliError> {
        if self.is_gguf() {
            let file = report::quoted(&self.weights.display().to_string());
            let flags = GgufFile::open(&self.weights)?.flags_of_convert();
            let text = format!("mkdir NEW-FOLDER && train-cli convert {file} NEW-FOLDER/model.safetensors {flags}");
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
        // A link is called by its own name. Only a path that ends in `..` must be followed to have one.
        let followed = || self.weights.canonicalize().unwrap_or_else(|_| self.weights.clone());
        let path = if self.weights.file_name().is_some() { self.weights.clone() } else { followed() };
        // What follows the last point of a folder's name is no extension: Qwen3-0.6B.
        let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
        name.map_or_else(|| "model".into(), |n| n.to_string_lossy().into_owned())
    }

    /// Opens the weights of the model that `config` describes.
    ///
    /// # Errors
    /// If there are none or they are broken.
    pub fn open_weights(&self, config: &Qwen3Config) -> Result<Container, ModelError> {
        let weights = Container::open(&self.weights)?;
        if weights.cache_scales() > 0 {
            let scales = report::count(weights.cache_scales(), "scale");
            report::line(format!("note: the model's files have {scales} for a KV cache in 8 bits, which are not used"));
        }
        if config.tie_word_embeddings { weights.without_copied_head() } else { Ok(weights) }
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
    /// SHA-256 of the template's text.
    pub template_sha256: String,
    /// Whether answers think unless somebody asks for it: as in training, if that is known. None leaves it to the template.
    pub thinking: Option<bool>,
    /// How the model's authors sample, if a file says so.
    generation: Option<GenerationConfig>,
    /// The fields with thoughts, as rows have them, that the template does not render.
    pub not_rendered: Vec<&'static str>,
    /// Whether the template knows thoughts. Such a model thinks unless it is told not to.
    knows_thoughts: bool,
    /// Ids that end an answer.
    pub stop_ids: Vec<u32>,
}

impl TextFiles {
    /// Reads a folder's tokenizer, chat template and generation config.
    ///
    /// # Errors
    /// If one of them is missing or broken, or no stop token is known.
    pub fn open(folder: &Path, config: &Qwen3Config) -> Result<Self, CliError> {
        // The folder of a model is known to be a folder: only --tokenizer can name something else.
        check_folder("--tokenizer", folder)?;
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
        let mut stop_ids = generation.as_ref().map_or_else(Vec::new, |file| file.eos_token_ids.clone());
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
        let source = ChatTemplate::source(folder)?;
        let template_sha256 = durable::digest_of(source.as_bytes());
        let knows_thoughts = source.contains("<think>");
        // As `message.thinking` or `message['thinking']`; most templates also read `enable_thinking`.
        let reads = |field: &str| ['.', '\'', '"'].iter().any(|before| source.contains(&format!("{before}{field}")));
        let not_rendered = THOUGHTS.into_iter().filter(|field| !reads(field)).collect();
        let template = ChatTemplate::new(source).map_err(|error| match error {
            ModelError::Template(reason) => ModelError::Template(format!("{}: {reason}", folder.display())),
            error => error,
        })?;
        Ok(Self {
            folder: folder.to_owned(),
            tokenizer,
            template,
            template_sha256,
            thinking: None,
            generation,
            not_rendered,
            knows_thoughts,
            stop_ids,
        })
    }

    /// How tokens are chosen where nobody asks for anything else, and who says so: generation_config.json, or Qwen3's model
    /// card, which has other values for a model that thinks. `thinking` says whether it is asked to; None leaves that to its
    /// training.
    pub fn sampling(&self, thinking: Option<bool>) -> (Sampling, &'static str) {
        let thinks = thinking.or(self.thinking).unwrap_or(self.knows_thoughts);
        let neutral = Sampling::GREEDY;
        match &self.generation {
            Some(file) => {
                let found = Sampling {
                    temperature: file.temperature.unwrap_or(neutral.temperature),
                    top_p: file.top_p.unwrap_or(neutral.top_p),
                    top_k: file.top_k.unwrap_or(neutral.top_k),
                    min_p: file.min_p.unwrap_or(neutral.min_p),
                    repetition_penalty: file.repetition_penalty.unwrap_or(neutral.repetition_penalty),
                    ..neutral
                };
                (found, "generation_config.json")
            }
            None if thinks => {
                (Sampling::CARD_THINKING, "the model card of Qwen3, thinking; there is no generation_config.json")
            }
            None => (Sampling::CARD, "the model card of Qwen3; there is no generation_config.json"),
        }
    }

    /// The ids that end an answer, as generation_config.json has them.
    pub fn eos_token_ids(&self) -> &[u32] {
        self.generation.as_ref().map_or(&[], |file| &file.eos_token_ids)
    }

    /// The files that they were read from.
    pub fn files(&self) -> impl Iterator<Item = PathBuf> {
        text_files(&self.folder)
    }
}
