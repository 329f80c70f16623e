//! The small files of a model folder, made from what a GGUF file says: config.json, tokenizer.json and the chat template.

use super::gguf_file::{GgufFile, KINDS, ReadValue};
use crate::{
    ModelError,
    config::Qwen3Config,
    names,
    pieces::WORDS,
    tensors::{Tensors, row_count},
    tokenizer::{MOST_ADDED, MOST_TOKENS, Tokenizer, too_many},
};
use serde_json::{Map, json};

/// GGUF's numbers for the kinds of tokens that become added tokens, which a text may spell out.
const CONTROL: f64 = 3.0;
const USER_DEFINED: f64 = 4.0;
/// And for ids that stand for nothing.
const UNUSED: f64 = 5.0;

impl GgufFile {
    /// The files by name.
    ///
    /// # Errors
    /// If the file is no Qwen3, has no tokenizer, or another one than Qwen3 has.
    pub fn small_files(&self) -> Result<Vec<(&'static str, String)>, ModelError> {
        let pretty = |value: serde_json::Value| serde_json::to_string_pretty(&value).expect("plain data serializes");
        let (config, tokenizer) = (pretty(self.config()?), self.tokenizer()?.to_string());
        Qwen3Config::from_json(&config, self.path())?;
        self.check_tokens(&tokenizer)?;
        let mut files = vec![("config.json", config), ("tokenizer.json", tokenizer)];
        if let Some(ReadValue::Text(template)) = self.key("tokenizer.chat_template") {
            files.push(("chat_template.jinja", template.clone()));
        }
        Ok(files)
    }

    fn config(&self) -> Result<serde_json::Value, ModelError> {
        let architecture = self.text("general.architecture")?;
        if architecture != "qwen3" {
            return Err(
                self.bad(format!("its architecture is {architecture:?}; only dense Qwen3 models are supported"))
            );
        }
        if let Some(kind) = self.key("qwen3.rope.scaling.type").filter(|kind| **kind != ReadValue::Text("none".into()))
        {
            return Err(self.bad(format!("rope.scaling.type is {kind:?}; scaled rotary angles are not supported")));
        }
        let mut config = Map::from_iter([("model_type".to_owned(), json!("qwen3"))]);
        for (ours, theirs) in [
            ("num_hidden_layers", "block_count"),
            ("max_position_embeddings", "context_length"),
            ("hidden_size", "embedding_length"),
            ("intermediate_size", "feed_forward_length"),
            ("num_attention_heads", "attention.head_count"),
            ("num_key_value_heads", "attention.head_count_kv"),
            ("head_dim", "attention.key_length"),
            ("rope_theta", "rope.freq_base"),
        ] {
            let number = self.number(&format!("qwen3.{theirs}"))?;
            // A size is written as one. What is none is refused with the whole.
            let whole = number.fract() == 0.0 && (0.0..1e15).contains(&number);
            config.insert(ours.into(), if whole { json!(number as u64) } else { json!(number) });
        }
        // As its decimals say: 1e-6 is no f32.
        let eps = self.number("qwen3.attention.layer_norm_rms_epsilon")? as f32;
        config.insert("rms_norm_eps".into(), json!(eps.to_string().parse::<f64>().unwrap_or(f64::from(eps))));
        let embedding =
            self.stored(names::EMBEDDING).ok_or_else(|| ModelError::missing(self.path(), names::EMBEDDING))?;
        config.insert("vocab_size".into(), json!(row_count(&embedding.shape())));
        config.insert("tie_word_embeddings".into(), json!(self.stored(names::HEAD).is_none()));
        if let Some(ReadValue::Number(id)) = self.key("tokenizer.ggml.eos_token_id") {
            config.insert("eos_token_id".into(), json!(*id as u64));
        }
        Ok(config.into())
    }

    fn tokenizer(&self) -> Result<serde_json::Value, ModelError> {
        let (model, pre) = (self.text("tokenizer.ggml.model")?, self.text("tokenizer.ggml.pre")?);
        if (model, pre) != ("gpt2", "qwen2") {
            let reason = format!("its tokenizer is {model:?} with {pre:?}; that of Qwen3 is \"gpt2\" with \"qwen2\"");
            return Err(self.bad(reason));
        }
        let (tokens, merges) = (self.texts("tokenizer.ggml.tokens")?, self.texts("tokenizer.ggml.merges")?);
        let Some(ReadValue::Numbers(kinds)) = self.key(KINDS).filter(|kinds| kinds.len() == tokens.len()) else {
            return Err(self.bad("it does not have a kind for each token"));
        };
        let spelled = kinds.iter().filter(|kind| [CONTROL, USER_DEFINED].contains(kind)).count();
        for (count, most) in [(tokens.len(), MOST_TOKENS), (merges.len(), MOST_TOKENS), (spelled, MOST_ADDED)] {
            if count > most {
                return Err(self.bad(too_many(most)));
            }
        }
        let (mut vocab, mut added) = (Map::new(), vec![]);
        // An id that stands for nothing between others keeps its place, or the library would give it to a token after it.
        let used = kinds.iter().rposition(|kind| *kind != UNUSED).map_or(0, |last| last + 1);
        for (id, (token, kind)) in tokens.iter().zip(kinds).enumerate().take(used) {
            match *kind {
                CONTROL | USER_DEFINED => added.push(json!({
                    "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": *kind == CONTROL,
                })),
                _ => {
                    vocab.insert(token.clone(), json!(id));
                }
            }
        }
        let pairs = merges.iter().map(|merge| merge.split_once(' ').map(|(a, b)| json!([a, b])));
        let pairs: Option<Vec<_>> = pairs.collect();
        let pairs = pairs.ok_or_else(|| self.bad("a merge is not two tokens with a space between"))?;
        let byte_level =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
        let split = json!({"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": false});
        Ok(json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
            "post_processor": byte_level, "decoder": byte_level,
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": "", "end_of_word_suffix": "",
                "fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": pairs,
            },
        }))
    }

    /// Refuses a tokenizer in which a token has another id than in the file.
    fn check_tokens(&self, tokenizer: &str) -> Result<(), ModelError> {
        let made = Tokenizer::from_text(tokenizer.to_owned(), self.path())?;
        let kinds = match self.key(KINDS) {
            Some(ReadValue::Numbers(kinds)) => kinds.as_slice(),
            _ => &[],
        };
        let tokens = self.texts("tokenizer.ggml.tokens")?.iter().zip(kinds).enumerate();
        for (id, (token, _)) in tokens.filter(|(_, (_, kind))| **kind != UNUSED) {
            if made.id(token) != Some(id as u32) {
                return Err(self.bad(format!("its token {id} is {token:?}, but that has the id {:?}", made.id(token))));
            }
        }
        Ok(())
    }

    fn text(&self, key: &str) -> Result<&str, ModelError> {
        match self.key(key) {
            Some(ReadValue::Text(text)) => Ok(text),
            _ => Err(self.bad(format!("it has no text {key:?}"))),
        }
    }

    fn texts(&self, key: &str) -> Result<&[String], ModelError> {
        match self.key(key) {
            Some(ReadValue::Texts(texts)) => Ok(texts),
            _ => Err(self.bad(format!("it has no list of texts {key:?}"))),
        }
    }

    fn number(&self, key: &str) -> Result<f64, ModelError> {
        match self.key(key) {
            Some(ReadValue::Number(number)) => Ok(*number),
            _ => Err(self.bad(format!("it has no number {key:?}"))),
        }
    }
}

impl ReadValue {
    fn len(&self) -> usize {
        match self {
            Self::Numbers(all) => all.len(),
            Self::Texts(all) => all.len(),
            _ => 1,
        }
    }
}
