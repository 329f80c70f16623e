//! The tokenizer of tokenizer.json. The file's size and the memory for reading it are limited, and a panic of the tokenizer
//! library on a hostile file becomes an error. The file may ask for truncation, padding and BPE dropout. These are settings of
//! the program that wrote it and are ignored, because every text must give all of its tokens, and always the same ones. A
//! normalizer or pre-tokenizer that makes text longer and longer is refused, and so is a decoder that is not byte-level: no
//! tokenizer of Qwen3 has one, and a few lines of them can take all memory.

use crate::{
    ModelError,
    config::OneOrMany,
    file::read_text,
    json, limits,
    pieces::{BytePairs, LONGEST, PIECE, Pieces},
};
use serde::{
    Deserialize, Deserializer,
    de::{Error, IgnoredAny, MapAccess, SeqAccess, Visitor},
};
use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::Arc,
};
use tokenizers::{DecoderWrapper, NormalizerWrapper, PreTokenizerWrapper};

/// The work of the library, in the messages of its limits.
const WHAT: &str = "tokenizer";
/// Largest tokenizer.json that is read. That of Qwen3 has 11 MB.
pub const LARGEST: u64 = 64 << 20;
/// Most memory that reading may take: this, and a byte for each byte of the file. A run with the file of Qwen3 takes 66 MiB more
/// than one with a small file.
const MEMORY: usize = 64 << 20;
const MEMORY_PER_BYTE: usize = 1;
/// Most memory that making the tokens of a text may take, if the tokenizer does not find words as Qwen3's does. It then has a
/// limit of time, too: another expression for words may take minutes on a short text.
const MEMORY_OF_A_PIECE: usize = 128 << 20;
/// Most tokens of the vocabulary, and most merges (a merge makes one token of two). Qwen3 has 151,643 tokens. A token of a few
/// characters takes 15 bytes of the file, and a few hundred bytes of memory.
pub(crate) const MOST_TOKENS: usize = 3 << 16;
/// Most added tokens, which a text may spell out. Qwen3 has 26. Each takes about a kilobyte of memory.
pub(crate) const MOST_ADDED: usize = 1 << 14;
/// Most parts of a normalizer or a pre-tokenizer. Those of Qwen3 have one and two; each part takes time.
const MOST_PARTS: usize = 8;
/// Largest generation_config.json that is read. That of Qwen3 has 200 bytes.
const LARGEST_GENERATION: u64 = 1 << 20;

/// The keys that a tokenizer.json may have. Reading them also counts the tokens and merges. At any other key the library would
/// stop too, but would say that a comma is missing.
#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
#[allow(dead_code, reason = "only the names of the fields count")]
struct Keys {
    version: IgnoredAny,
    truncation: IgnoredAny,
    padding: IgnoredAny,
    added_tokens: Counted<MOST_ADDED>,
    normalizer: IgnoredAny,
    pre_tokenizer: IgnoredAny,
    post_processor: IgnoredAny,
    decoder: IgnoredAny,
    model: ModelKeys,
}

/// The keys that the model of a tokenizer.json may have.
#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
#[allow(dead_code, reason = "only the names of the fields count")]
struct ModelKeys {
    r#type: IgnoredAny,
    dropout: IgnoredAny,
    unk_token: IgnoredAny,
    continuing_subword_prefix: IgnoredAny,
    end_of_word_suffix: IgnoredAny,
    fuse_unk: IgnoredAny,
    byte_fallback: IgnoredAny,
    ignore_merges: IgnoredAny,
    vocab: Counted<MOST_TOKENS>,
    merges: Counted<MOST_TOKENS>,
}

/// An object or a list whose entries are counted and not kept.
#[derive(Default)]
struct Counted<const MOST: usize>;

impl<'de, const MOST: usize> Deserialize<'de> for Counted<MOST> {
    fn deserialize<Source: Deserializer<'de>>(source: Source) -> Result<Self, Source::Error> {
        source.deserialize_any(Self)
    }
}

impl<'de, const MOST: usize> Visitor<'de> for Counted<MOST> {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tokens or a list of merges")
    }

    fn visit_map<Source: MapAccess<'de>>(self, mut map: Source) -> Result<Self, Source::Error> {
        count(MOST, || Ok(map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some())).map(|()| self)
    }

    fn visit_seq<Source: SeqAccess<'de>>(self, mut list: Source) -> Result<Self, Source::Error> {
        count(MOST, || Ok(list.next_element::<IgnoredAny>()?.is_some())).map(|()| self)
    }
}

/// Counts the entries that `next` reads, at most `most`, until it says that there are no more.
fn count<Failure: Error>(most: usize, mut next: impl FnMut() -> Result<bool, Failure>) -> Result<(), Failure> {
    let mut count = 0;
    while next()? {
        count += 1;
        if count > most {
            return Err(Failure::custom(too_many(most)));
        }
    }
    Ok(())
}

/// What is said of a tokenizer that has more than `most` tokens or merges of a kind.
pub(crate) fn too_many(most: usize) -> String {
    let what = if most == MOST_ADDED { "added tokens" } else { "tokens or merges" };
    format!("there are more than {most} {what}")
}

/// Turns text into token ids and back.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: Arc<BytePairs>,
    /// Where a long text is cut, if that is known.
    pieces: Option<Pieces>,
}

impl Tokenizer {
    /// Reads a tokenizer.json.
    ///
    /// # Errors
    /// If the file is missing, too large or broken.
    pub fn from_file(path: &Path) -> Result<Self, ModelError> {
        let hint = "give --tokenizer FOLDER if the tokenizer.json is in another folder";
        Self::from_text(read_text(path, LARGEST, hint)?, path)
    }

    /// Parses the text of a tokenizer.json. `path` is for error messages.
    pub(crate) fn from_text(text: String, path: &Path) -> Result<Self, ModelError> {
        read(text, path, |text| {
            let inner = BytePairs::from_bytes(text).and_then(complete)?;
            Ok(Self { pieces: Pieces::of(&inner), inner: Arc::new(inner) })
        })
    }

    /// The ids of a text. Special tokens that the text spells out (`<|im_end|>`) become their ids; none is added.
    ///
    /// # Errors
    /// If the tokenizer fails, or a piece of the text that cannot be cut is too long.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        let mut ids = Vec::new();
        self.encode_onto(text, &mut ids)?;
        Ok(ids)
    }

    /// Puts the ids of a text behind others.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_onto(&self, text: &str, ids: &mut Vec<u32>) -> Result<(), ModelError> {
        self.pieces(text).try_for_each(|piece| self.encode_piece(piece).map(|more| ids.extend(more)))
    }

    /// The pieces of a text, in order, whose ids together are those of the text.
    pub fn pieces<'a>(&'a self, text: &'a str) -> impl Iterator<Item = &'a str> {
        let cut = self.pieces.as_ref().map(|pieces| pieces.split(text, PIECE));
        let whole = if cut.is_none() { Some(text) } else { None };
        cut.into_iter().flatten().chain(whole)
    }

    fn encode_piece(&self, text: &str) -> Result<Vec<u32>, ModelError> {
        if text.len() > LONGEST {
            let reason = match &self.pieces {
                Some(_) => "without a place to cut it: it needs a space or a punctuation mark somewhere",
                None => {
                    "in one text: it may not be cut, because the tokenizer does not find words or added tokens as Qwen3's does"
                }
            };
            return Err(ModelError::Tokenizer(format!("{} bytes {reason}; at most {LONGEST} are allowed", text.len())));
        }
        if self.pieces.is_some() {
            return ids_of(&self.inner, text);
        }
        let (inner, given) = (self.inner.clone(), text.to_owned());
        let reached = |limit| ModelError::Tokenizer(format!("a text of {} bytes: {limit}", text.len()));
        limits::within(WHAT, MEMORY_OF_A_PIECE, move || ids_of(&inner, &given))
            .map_err(|limit| ModelError::limited(WHAT, limit, reached))?
    }

    /// The text of ids, without special tokens.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String, ModelError> {
        self.inner.decode(ids, true).map_err(|e| ModelError::Tokenizer(e.to_string()))
    }

    /// The text of ids, with special tokens.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn decode_all(&self, ids: &[u32]) -> Result<String, ModelError> {
        self.inner.decode(ids, false).map_err(|e| ModelError::Tokenizer(e.to_string()))
    }

    /// The bytes of a token: what it adds to a text, or the name of a special token. They may be a part of a character. None if
    /// no token has the id.
    pub fn bytes(&self, id: u32) -> Option<Vec<u8>> {
        let token = self.inner.id_to_token(id)?;
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder().contains_key(&id);
        let bytes: Option<Vec<u8>> = if added { None } else { token.chars().map(byte_of).collect() };
        Some(bytes.unwrap_or_else(|| token.into_bytes()))
    }

    /// Whether a token is special: [`Self::decode`] leaves it out.
    pub fn is_special(&self, id: u32) -> bool {
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder();
        added.get(&id).is_some_and(|token| token.special)
    }

    /// The id of a token, if it is in the vocabulary.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The largest id plus one.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab(true).values().max().map_or(0, |&id| id as usize + 1)
    }
}

/// The ids of a text that is not cut.
fn ids_of(tokenizer: &BytePairs, text: &str) -> Result<Vec<u32>, ModelError> {
    match catch_unwind(AssertUnwindSafe(|| tokenizer.encode_fast(text, false))) {
        Ok(Ok(encoding)) => Ok(encoding.get_ids().to_vec()),
        Ok(Err(e)) => Err(ModelError::Tokenizer(e.to_string())),
        Err(_) => Err(ModelError::Tokenizer("the tokenizer library panicked on this text".into())),
    }
}

/// The byte that a character of a byte-level token stands for. Bytes of printable characters are these characters. The other
/// bytes, in order, are the characters from U+0100 on.
fn byte_of(c: char) -> Option<u8> {
    let byte = match u32::from(c) {
        c @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => c,
        c @ 0x100..=0x120 => c - 0x100,
        c @ 0x121..=0x142 => c - 0x121 + 0x7F,
        0x143 => 0xAD,
        _ => return None,
    };
    u8::try_from(byte).ok()
}

/// What `work` makes of the text of a tokenizer.json, in which no key may be unknown or stand twice. The memory for it is limited.
/// `path` is for error messages.
pub(crate) fn read<Answer: Send + 'static>(
    text: String,
    path: &Path,
    work: impl FnOnce(&str) -> tokenizers::Result<Answer> + Send + 'static,
) -> Result<Answer, ModelError> {
    let memory = MEMORY + MEMORY_PER_BYTE * text.len();
    let checked = move || {
        serde_json::from_str::<Keys>(&text)?;
        json::check(&text)?;
        work(&text)
    };
    let reached = |limit| ModelError::parse(path, limit);
    let made =
        limits::memory_within(WHAT, memory, checked).map_err(|limit| ModelError::limited(WHAT, limit, reached))?;
    made.map_err(|e| ModelError::parse(path, e))
}

/// The tokenizer without truncation, padding and dropout, if it is of the kind of Qwen3's.
fn complete(mut inner: BytePairs) -> tokenizers::Result<BytePairs> {
    if let Some(normalizer) = inner.get_normalizer().filter(|normalizer| !keeps_length(normalizer)) {
        return Err(format!("the normalizer {normalizer:?} is not one of Qwen3, which has NFC").into());
    }
    if inner.get_pre_tokenizer().is_some_and(|splitter| !splits_once(splitter)) {
        return Err("its pre-tokenizer is not one of Qwen3, which splits text and then takes its bytes once".into());
    }
    if !matches!(inner.get_decoder(), Some(DecoderWrapper::ByteLevel(_))) {
        return Err("its decoder is not byte-level, as that of Qwen3 is".into());
    }
    inner.with_truncation(None)?.with_padding(None);
    if inner.get_model().dropout.is_some() {
        let mut model = inner.get_model().clone();
        model.dropout = None;
        inner.with_model(model);
    }
    Ok(inner)
}

/// Whether a pre-tokenizer converts text to byte-level characters at most once, and has few parts. Each conversion makes text
/// longer that is not ASCII, and thirty of them take all memory.
fn splits_once(splitter: &PreTokenizerWrapper) -> bool {
    use PreTokenizerWrapper::{ByteLevel, Sequence, Split};
    match splitter {
        ByteLevel(_) | Split(_) => true,
        Sequence(all) => {
            let parts: &[PreTokenizerWrapper] = all.as_ref();
            let known = parts.iter().all(|part| matches!(part, ByteLevel(_) | Split(_)));
            let bytes = parts.iter().filter(|part| matches!(part, ByteLevel(_))).count();
            known && bytes <= 1 && parts.len() <= MOST_PARTS
        }
        _ => false,
    }
}

/// Whether a normalizer rewrites characters in Unicode's normal forms only.
fn keeps_length(normalizer: &NormalizerWrapper) -> bool {
    use NormalizerWrapper::{NFC, NFD, NFKC, NFKD, Sequence};
    match normalizer {
        NFC(_) | NFD(_) | NFKC(_) | NFKD(_) => true,
        Sequence(all) => {
            let parts: &[NormalizerWrapper] = all.as_ref();
            parts.len() <= MOST_PARTS && parts.iter().all(|one| matches!(one, NFC(_) | NFD(_) | NFKC(_) | NFKD(_)))
        }
        _ => false,
    }
}

/// Tokens that a text stream decodes together, at most. A character has at most 4 bytes, and a token at least one.
const LONGEST_UNSETTLED: usize = 128;

/// Text that grows token by token and never shows a part of a character.
#[derive(Debug, Default)]
pub struct TextStream {
    ids: Vec<u32>,
    /// All text of the ids before this index was shown. The ids from it on are decoded together.
    settled: usize,
    /// Bytes of the text of the later ids that were shown.
    shown: usize,
}

impl TextStream {
    /// Adds a token. Returns the text that is now certain.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn push(&mut self, id: u32, tokenizer: &Tokenizer) -> Result<String, ModelError> {
        self.ids.push(id);
        let text = tokenizer.decode(&self.ids[self.settled..])?;
        // An unfinished character decodes to the replacement character. After so many tokens there is none
        // that could still be finished.
        let may_end = self.ids.len() - self.settled <= LONGEST_UNSETTLED;
        if may_end && text.ends_with('\u{FFFD}') || text.len() <= self.shown {
            return Ok(String::new());
        }
        // After a character that did not end in time, the text may be another one.
        let new = text.get(self.shown..).unwrap_or_default().to_owned();
        self.shown = text.len();
        // Decoding only the last tokens keeps the time of a long text linear.
        if self.ids.len() - self.settled > LONGEST_UNSETTLED / 2 {
            self.settled = self.ids.len() - 1;
            self.shown = tokenizer.decode(&self.ids[self.settled..])?.len();
        }
        Ok(new)
    }

    /// The text that was not shown, when the last token ends within a character.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn finish(self, tokenizer: &Tokenizer) -> Result<String, ModelError> {
        let text = tokenizer.decode(&self.ids[self.settled..])?;
        Ok(text.get(self.shown..).unwrap_or_default().to_owned())
    }
}

/// generation_config.json, which says how the model's authors sample and which tokens end an answer.
#[derive(Debug, Clone)]
pub struct GenerationConfig {
    /// Ids that end an answer.
    pub eos_token_ids: Vec<u32>,
    /// Temperature, if the file names one and turns sampling on.
    pub temperature: Option<f32>,
    /// Probability mass of the candidates (top-p), if the file names it.
    pub top_p: Option<f32>,
    /// Number of candidates (top-k), if the file names it.
    pub top_k: Option<usize>,
    /// Minimum probability relative to the most likely token (min-p), if the file names it.
    pub min_p: Option<f32>,
    /// Repetition penalty, if the file names it.
    pub repetition_penalty: Option<f32>,
}

impl GenerationConfig {
    /// Reads a folder's generation_config.json. None without the file.
    ///
    /// # Errors
    /// If the file is broken.
    pub fn from_folder(folder: &Path) -> Result<Option<Self>, ModelError> {
        #[derive(Deserialize)]
        struct Raw {
            eos_token_id: Option<OneOrMany>,
            do_sample: Option<bool>,
            temperature: Option<f32>,
            top_p: Option<f32>,
            top_k: Option<usize>,
            min_p: Option<f32>,
            repetition_penalty: Option<f32>,
        }
        let path = folder.join("generation_config.json");
        if !path.exists() {
            return Ok(None);
        }
        let text = read_text(&path, LARGEST_GENERATION, "")?;
        let raw: Raw = json::read(&text).map_err(|e| ModelError::parse(&path, e))?;
        // What transformers accepts; top-p 0 leaves the most likely token.
        for (name, value, least, most) in [
            ("temperature", raw.temperature, 0.0, 100.0),
            ("top_p", raw.top_p, 0.0, 1.0),
            ("min_p", raw.min_p, 0.0, 1.0),
            ("repetition_penalty", raw.repetition_penalty, 0.01, 100.0),
        ] {
            if let Some(value) = value.filter(|value| !(least..=most).contains(value)) {
                let text = format!("{name} is {value}; it must be between {least} and {most}");
                return Err(ModelError::parse(&path, text));
            }
        }
        Ok(Some(Self {
            eos_token_ids: raw.eos_token_id.map_or_else(Vec::new, OneOrMany::into_vec),
            temperature: match raw.do_sample {
                Some(false) => None,
                // A file that asks for sampling need not name the neutral temperature.
                Some(true) => raw.temperature.or(Some(1.0)),
                None => raw.temperature,
            },
            top_p: raw.top_p,
            top_k: raw.top_k,
            min_p: raw.min_p,
            repetition_penalty: raw.repetition_penalty,
        }))
    }
}
