//! What a model was trained for: its recipe, the blocks that stayed unquantized, its scale levels, its chat template, and
//! whether its answers think. An export records this in `trained.json`, and a single file in `NAME.trained.json` beside it. A
//! checkpoint needs no such file, because it has the settings of its run.

use super::checkpoint::{self, TrainerState};
use crate::{
    CliError,
    durable::{self, PendingFolder},
    model_files::{ModelFiles, TextFiles},
    report,
    settings::{Settings, by_name, name_of},
};
use backend_nvfp4::{MasterKind, Nvfp4Parts, Recipe, Scaling};
use model_qwen3::{chat_template::ChatTemplate, config::Qwen3Config, file, json, safetensors::WHOLE};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// The record of an export folder. That of a single file has the file's name and a point in front.
pub const TRAINED: &str = "trained.json";
/// Most bytes of a record. It has some hundred.
const LONGEST_RECORD: u64 = 64 << 10;

/// What is to be known of a model whose training rows have no thoughts, although its chat template knows them.
pub const WITHOUT_THOUGHTS: &str = "the model was trained without thoughts; ask it with enable_thinking false";

/// What a model was trained for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trained {
    /// The recipe.
    #[serde(with = "by_name")]
    pub recipe: Recipe,
    /// Number of blocks at the end of the model that the recipe did not quantize.
    #[serde(default)]
    pub bf16_last_blocks: usize,
    /// Scale levels of NVFP4 weights.
    #[serde(default = "two_levels", with = "by_name")]
    pub scales: Scaling,
    /// Whether squares of 16x16 weights share a block scale in recipe nvfp4. None if they do what the published recipe does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub square_blocks: Option<bool>,
    /// Whether weights that are multiplied together share a tensor scale.
    #[serde(default)]
    pub shares_scale: bool,
    /// SHA-256 of the chat template's text, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat_template_sha256: Option<String>,
    /// Whether the answers of the training rows think, if their chat template knows thoughts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thinking: Option<bool>,
}

/// What a record without the key means, whatever the default of new runs is.
fn two_levels() -> Scaling {
    Scaling::Two
}

impl Trained {
    /// What a run with these settings trains a model of `layers` blocks for.
    pub fn by(
        settings: &Settings,
        layers: usize,
        scales: Scaling,
        template_sha256: String,
        thinking: Option<bool>,
    ) -> Self {
        // Of the parts of recipe nvfp4, only the blocks concern a trained model. NVFP4 master weights have no square ones.
        let packed = settings.memory.master_weights == Some(MasterKind::Nvfp4);
        let (recipe, square_blocks) = match settings.recipe.resolved() {
            Recipe::Nvfp4(parts) => (Recipe::Nvfp4(Nvfp4Parts::ALL), (packed || !parts.square_blocks).then_some(false)),
            other => (other, None),
        };
        Self {
            recipe,
            bf16_last_blocks: settings.bf16_last_blocks(layers),
            scales,
            square_blocks,
            shares_scale: settings.recipe.share_scales,
            chat_template_sha256: Some(template_sha256),
            thinking,
        }
    }

    /// The recipe by which the weights are quantized.
    pub fn recipe_of_weights(&self) -> Recipe {
        match (self.recipe, self.square_blocks) {
            (Recipe::Nvfp4(parts), Some(square_blocks)) => Recipe::Nvfp4(Nvfp4Parts { square_blocks, ..parts }),
            (recipe, _) => recipe,
        }
    }

    /// Says that the model does not think, for a form of it that has no place for this record.
    pub fn say_without_thoughts(&self) {
        if self.thinking == Some(false) {
            report::line(format!("note: {WITHOUT_THOUGHTS} (in train-cli: --thinking false)"));
        }
    }

    /// What the model of a checkpoint is being trained for.
    ///
    /// # Errors
    /// If the checkpoint's config or chat template cannot be read.
    pub(super) fn of_checkpoint(state: &TrainerState, folder: &Path) -> Result<Self, CliError> {
        let layers = Qwen3Config::from_file(&folder.join("config.json"))?.num_hidden_layers;
        let template = durable::digest_of(ChatTemplate::source(folder)?.as_bytes());
        Ok(Self::by(&state.settings, layers, state.scaling(), template, state.thinking))
    }

    /// What the model of these files was trained for, if they say so.
    ///
    /// # Errors
    /// If the record is broken.
    pub fn of(files: &ModelFiles) -> Result<Option<Self>, CliError> {
        if !checkpoint::is_checkpoint(&files.folder) {
            return Self::beside(files);
        }
        Self::of_checkpoint(&checkpoint::read_state(&files.folder)?, &files.folder).map(Some)
    }

    /// The record beside a model's weights, if there is one: that of the file, else that of its folder.
    ///
    /// # Errors
    /// If it is broken.
    pub(super) fn beside(files: &ModelFiles) -> Result<Option<Self>, CliError> {
        let of_file = weights_file(files).map(|file| record_of(&file));
        let Some(path) = of_file.into_iter().chain([files.folder.join(TRAINED)]).find(|path| path.exists()) else {
            return Ok(None);
        };
        let text = file::read_text(&path, LONGEST_RECORD, "export the model again")?;
        json::parse(&text).and_then(serde_json::from_value).map(Some).map_err(|e| CliError::corrupt(&path, e))
    }

    /// Writes the record into a folder of an export.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn write(&self, folder: &mut PendingFolder) -> Result<(), CliError> {
        folder.file(TRAINED, |out| out.write_all(&self.bytes()).map_err(CliError::io(Path::new(TRAINED))))
    }

    fn bytes(&self) -> Vec<u8> {
        serde_json::to_vec_pretty(self).expect("plain data serializes")
    }

    /// Writes the record beside a single file of weights that was just written, if something is known of its training.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn put_beside(known: Option<&Self>, weights: &Path) -> Result<(), CliError> {
        match known {
            Some(trained) => durable::write_bytes(&record_of(weights), &trained.bytes()).map(|_| ()),
            None => Ok(()),
        }
    }

    /// Whether the record beside a single file of weights is that of an export folder. Of one model both have the same bytes.
    pub fn is_beside(weights: &Path, folder: &Path) -> bool {
        let read = |path: &Path| file::read_text(path, LONGEST_RECORD, "").ok();
        let record = read(&record_of(weights));
        record.is_some() && record == read(&folder.join(TRAINED))
    }

    /// Removes the record beside a single file of weights that is about to be replaced. A process that is killed before it
    /// writes the new record leaves weights without one, the older or the new ones, but never new weights beside the older
    /// record.
    ///
    /// # Errors
    /// If it cannot be removed.
    pub fn forget(weights: &Path) -> Result<(), CliError> {
        let path = record_of(weights);
        if path.exists() { durable::remove(&path) } else { Ok(()) }
    }

    /// Says that NVFP4 weights get other scale levels than in training.
    pub fn say_other_scales(&self, written: Scaling) {
        if self.recipe.packs_weights() && self.scales != written {
            let text = format!("{}, unlike in training ({})", name_of(written), name_of(self.scales));
            report::label("scales", text);
        }
    }

    /// Whether a chat template is another than that of the training.
    pub fn has_another_template(&self, text: &TextFiles) -> bool {
        self.chat_template_sha256.as_ref().is_some_and(|sha256| *sha256 != text.template_sha256)
    }
}

/// The record of a single file of weights.
fn record_of(weights: &Path) -> PathBuf {
    let name = weights.file_name().unwrap_or_default().to_string_lossy();
    weights.with_file_name(format!("{name}.{TRAINED}"))
}

/// The file of the weights. Of a folder it is the only one, which may be in shards and then has no record of its own.
fn weights_file(files: &ModelFiles) -> Option<PathBuf> {
    if !files.weights.is_dir() {
        return Some(files.weights.clone());
    }
    let single = files.weights.join(WHOLE);
    if single.exists() {
        return Some(single);
    }
    let entries = std::fs::read_dir(&files.weights).ok()?;
    let paths = entries.filter_map(|e| e.ok().map(|e| e.path()));
    let mut dats = paths.filter(|path| path.extension().is_some_and(|e| e == "dat"));
    dats.next().filter(|_| dats.next().is_none())
}
