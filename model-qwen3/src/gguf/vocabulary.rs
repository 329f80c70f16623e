//! The tokens of a tokenizer.json, as a GGUF file lists them.

use super::file_header::MetadataValue;
use crate::{
    ModelError,
    file::read_text,
    tokenizer::{self, LARGEST},
};
use serde::Deserialize;
use std::{collections::BTreeMap, path::Path};

/// The largest id of a token. That of Qwen3 is 151,668.
const LARGEST_ID: usize = 1 << 20;

/// The tokens by id, and the merges that make them.
#[derive(Debug, Clone)]
pub struct Vocabulary {
    tokens: Vec<Option<(String, TokenKind)>>,
    merges: Vec<String>,
    /// The token that fills and begins texts, if there is one.
    padding: Option<u32>,
}

/// GGUF's numbers for the kinds of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TokenKind {
    Normal = 1,
    /// The token steers the model and is not shown.
    Control = 3,
    UserDefined = 4,
    /// The id stands for nothing.
    Unused = 5,
}

/// What is needed of a tokenizer.json.
#[derive(Deserialize)]
struct TokenizerJson {
    model: Model,
    #[serde(default)]
    added_tokens: Vec<Added>,
}

#[derive(Deserialize)]
struct Model {
    vocab: BTreeMap<String, u64>,
    merges: Vec<Merge>,
}

/// Two tokens that become one: `"a b"` or `["a", "b"]`.
#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Both(String),
    Pair(String, String),
}

#[derive(Deserialize)]
struct Added {
    id: u64,
    content: String,
    #[serde(default)]
    special: bool,
}

impl Vocabulary {
    /// Reads a tokenizer.json.
    ///
    /// # Errors
    /// If the file is missing or broken, or is not of the kind of Qwen3's (byte-level BPE).
    pub fn from_file(path: &Path) -> Result<Self, ModelError> {
        let text = read_text(path, LARGEST, "a GGUF file holds the tokenizer; name its folder by --tokenizer")?;
        tokenizer::read(text, path, |text| {
            let bad = |e| {
                let text = "it is not a byte-level BPE tokenizer as Qwen3 has it; GGUF needs vocab and merges";
                format!("{text}: {e}")
            };
            let file: TokenizerJson = serde_json::from_str(text).map_err(bad)?;
            Self::of(file).ok_or_else(|| format!("a token has an id over {LARGEST_ID}").into())
        })
    }

    fn of(file: TokenizerJson) -> Option<Self> {
        let mut tokens: Vec<Option<(String, TokenKind)>> = vec![];
        let mut set = |id: u64, text: String, kind: TokenKind| {
            let id = usize::try_from(id).ok().filter(|id| *id <= LARGEST_ID)?;
            tokens.resize(tokens.len().max(id + 1), None);
            tokens[id] = Some((text, kind));
            Some(())
        };
        for (text, id) in file.model.vocab {
            set(id, text, TokenKind::Normal)?;
        }
        for Added { id, content, special } in file.added_tokens {
            set(id, content, if special { TokenKind::Control } else { TokenKind::UserDefined })?;
        }
        let merge = |merge| match merge {
            Merge::Both(both) => both,
            Merge::Pair(left, right) => format!("{left} {right}"),
        };
        let merges = file.model.merges.into_iter().map(merge).collect();
        let is_padding =
            |token: &Option<(String, TokenKind)>| token.as_ref().is_some_and(|(t, _)| t == "<|endoftext|>");
        let padding = tokens.iter().position(is_padding).map(|id| id as u32);
        Some(Self { tokens, merges, padding })
    }

    /// The keys that describe the tokenizer of a model with `size` ids.
    pub(super) fn keys(&self, size: usize) -> Vec<(String, MetadataValue)> {
        let all = (0..size.max(self.tokens.len())).map(|id| {
            let token = self.tokens.get(id).cloned().flatten();
            token.unwrap_or_else(|| (format!("[PAD{id}]"), TokenKind::Unused))
        });
        let (tokens, kinds): (Vec<String>, Vec<TokenKind>) = all.unzip();
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
