//! The tokens of a tokenizer.json, as a GGUF file lists them.

use super::file_header::MetadataValue;
use crate::{ModelError, file::read_text, json, tokenizer::LARGEST};
use serde_json::Value as Json;
use std::path::Path;

/// Most tokens. Qwen3 has 151,669.
const MOST: u64 = 16 << 20;

/// The tokens by id, and the merges that make them.
#[derive(Debug, Clone)]
pub struct Vocabulary {
    tokens: Vec<Option<(String, Kind)>>,
    merges: Vec<String>,
    /// The token that fills and begins texts, if there is one.
    padding: Option<u32>,
}

/// GGUF's numbers for the kinds of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Normal = 1,
    /// The token steers the model and is not shown.
    Control = 3,
    UserDefined = 4,
    /// The id stands for nothing.
    Unused = 5,
}

impl Vocabulary {
    /// Reads a tokenizer.json.
    ///
    /// # Errors
    /// If the file is missing or broken, or is not of the kind of Qwen3's (byte-level BPE).
    pub fn from_file(path: &Path) -> Result<Self, ModelError> {
        let text = read_text(path, LARGEST, "a GGUF file holds the tokenizer; name its folder by --tokenizer")?;
        let file = json::parse(&text).map_err(|e| ModelError::parse(path, e))?;
        Self::of(&file).ok_or_else(|| {
            ModelError::parse(path, "it is not a byte-level BPE tokenizer as Qwen3 has it; GGUF needs vocab and merges")
        })
    }

    fn of(file: &Json) -> Option<Self> {
        let model = file.get("model")?;
        let mut tokens: Vec<Option<(String, Kind)>> = vec![];
        let mut set = |id: &Json, text: &str, kind: Kind| {
            let id = usize::try_from(id.as_u64().filter(|id| *id < MOST)?).ok()?;
            tokens.resize(tokens.len().max(id + 1), None);
            tokens[id] = Some((text.to_owned(), kind));
            Some(())
        };
        for (text, id) in model.get("vocab")?.as_object()? {
            set(id, text, Kind::Normal)?;
        }
        for token in file.get("added_tokens").and_then(Json::as_array).into_iter().flatten() {
            let special = token.get("special").and_then(Json::as_bool).unwrap_or(false);
            let kind = if special { Kind::Control } else { Kind::UserDefined };
            set(token.get("id")?, token.get("content")?.as_str()?, kind)?;
        }
        // Either "a b" or ["a", "b"].
        let merge = |merge: &Json| match merge {
            Json::String(both) => Some(both.clone()),
            Json::Array(parts) => Some(format!("{} {}", parts.first()?.as_str()?, parts.get(1)?.as_str()?)),
            _ => None,
        };
        let merges = model.get("merges")?.as_array()?.iter().map(merge).collect::<Option<_>>()?;
        let is_padding = |token: &Option<(String, Kind)>| token.as_ref().is_some_and(|(t, _)| t == "<|endoftext|>");
        let padding = tokens.iter().position(is_padding).map(|id| id as u32);
        Some(Self { tokens, merges, padding })
    }

    /// The keys that describe the tokenizer of a model with `size` ids.
    pub(super) fn keys(&self, size: usize) -> Vec<(String, MetadataValue)> {
        let all = (0..size.max(self.tokens.len())).map(|id| {
            let token = self.tokens.get(id).cloned().flatten();
            token.unwrap_or_else(|| (format!("[PAD{id}]"), Kind::Unused))
        });
        let (tokens, kinds): (Vec<String>, Vec<Kind>) = all.unzip();
        let kinds = kinds.into_iter().map(|kind| kind as i32).collect();
        let mut keys = vec![
            ("model", MetadataValue::Text("gpt2".into())),
            ("pre", MetadataValue::Text("qwen2".into())),
            ("tokens", MetadataValue::Texts(tokens)),
            ("token_type", MetadataValue::I32s(kinds)),
            ("merges", MetadataValue::Texts(self.merges.clone())),
            ("add_bos_token", MetadataValue::Bool(false)),
        ];
        if let Some(id) = self.padding {
            keys.extend([("padding_token_id", MetadataValue::U32(id)), ("bos_token_id", MetadataValue::U32(id))]);
        }
        keys.into_iter().map(|(key, value)| (format!("tokenizer.ggml.{key}"), value)).collect()
    }
}
