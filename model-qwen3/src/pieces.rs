//! Cuts a long text into pieces that have the tokens of the whole. The tokenizer library takes up to 350 bytes of memory
//! for each byte of a text, so that it gets a piece at a time.

use serde_json::json;
use tokenizers::{
    AddedToken, DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, TokenizerImpl,
    models::bpe::BPE,
};

/// The library's tokenizer with a model of Qwen3's kind. The library's type for any kind of model would first hold all values of
/// the file in memory, because it learns the kind only from them.
pub(crate) type BytePairs =
    TokenizerImpl<BPE, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// Bytes after which a piece ends at the next place where it may.
pub(crate) const PIECE: usize = 64 << 10;
/// Longest piece: with it the library takes 64 MiB. Texts that people write have a space, a punctuation mark or another place to
/// cut them much earlier.
pub(crate) const LONGEST: usize = 192 << 10;
/// How every Qwen since the second splits a text into words before it makes tokens of each (`qwen2` in GGUF).
pub(crate) const WORDS: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// ASCII that normalization makes of other characters: of the Kelvin sign, the Greek question mark and the Greek varia.
const MADE_BY_NFC: [char; 3] = ['K', ';', '`'];

/// Where a tokenizer's texts may be cut.
#[derive(Debug, Clone)]
pub(crate) struct Pieces {
    /// Tokens that are found before words are. A text is not cut within one.
    added: Vec<String>,
}

impl Pieces {
    /// None if the tokenizer does not find words as Qwen3's does: then nothing is known of where its texts may be cut.
    pub(crate) fn of(tokenizer: &BytePairs) -> Option<Self> {
        let splitter = serde_json::to_value(tokenizer.get_pre_tokenizer()?).ok()?;
        let words = json!({"type": "Split", "pattern": {"Regex": WORDS}, "behavior": "Isolated", "invert": false});
        let bytes = &splitter["pretokenizers"][1];
        let splits = splitter["pretokenizers"].as_array().is_some_and(|parts| parts.len() == 2 && parts[0] == words)
            && bytes["type"] == "ByteLevel"
            && bytes["add_prefix_space"] == false
            && bytes["use_regex"] == false;
        let normalizes = tokenizer.get_normalizer().is_none_or(|one| matches!(one, NormalizerWrapper::NFC(_)));
        let added = tokenizer.get_added_tokens_decoder();
        // The others change text beside them, or are looked for where normalization may have made them of other characters.
        let stays = |text: &str| text.is_ascii() && !text.contains(MADE_BY_NFC);
        let plain = |t: &AddedToken| !(t.lstrip || t.rstrip || t.single_word) && (!t.normalized || stays(&t.content));
        let plain = added.values().all(plain);
        let added = added.into_values().map(|token| token.content).collect();
        (splits && normalizes && plain).then_some(Self { added })
    }

    /// The pieces of a text, in order. Each but the last has `least` bytes or more.
    pub(crate) fn split<'a>(&'a self, mut text: &'a str, least: usize) -> impl Iterator<Item = &'a str> {
        std::iter::from_fn(move || {
            let (piece, rest) = text.split_at(self.end(text, least));
            text = rest;
            (!piece.is_empty()).then_some(piece)
        })
    }

    /// The first place after `least` bytes where a text may be cut, or else its end.
    fn end(&self, text: &str, least: usize) -> usize {
        if text.len() <= least {
            return text.len();
        }
        let from = text.floor_char_boundary(least);
        let Some(mut before) = text[from..].chars().next() else { return text.len() };
        for (at, next) in text[from..].char_indices().skip(1) {
            if parts_words(before, next) && !self.is_within_a_token(text, from + at) {
                return from + at;
            }
            before = next;
        }
        text.len()
    }

    /// Whether a token begins before byte `at` of a text and ends behind it.
    fn is_within_a_token(&self, text: &str, at: usize) -> bool {
        let bytes = text.as_bytes();
        self.added
            .iter()
            .any(|token| (1..token.len().min(at + 1)).any(|before| bytes[at - before..].starts_with(token.as_bytes())))
    }
}

/// Whether a word of [`WORDS`] always ends between two neighboring characters, whatever stands before and behind them, and
/// normalization (NFC) changes neither because of the other.
fn parts_words(before: char, next: char) -> bool {
    // Digits are words by themselves. A word that holds a letter ends with its letters.
    let ends = match before {
        '0'..='9' => next.is_ascii(),
        'a'..='z' | 'A'..='Z' => next.is_ascii() && !next.is_ascii_alphabetic(),
        // Kana, and the Chinese characters of Unicode's first version.
        'ぁ'..='ゖ' | 'ァ'..='ヺ' | '一'..='龥' => is_punctuation(next),
        // White space belongs to what follows it, but the last newline before a word ends one.
        '\n' => !next.is_whitespace(),
        _ => false,
    };
    // A space begins a word, or is one.
    ends || next == ' ' && !before.is_whitespace()
}

/// Marks of a Chinese or Japanese text, and ASCII that is no letter.
fn is_punctuation(c: char) -> bool {
    matches!(c, '、' | '。' | '「' | '」' | '『' | '』' | '！' | '，' | '：' | '；' | '？' | '（' | '）')
        || c.is_ascii() && !c.is_ascii_alphabetic()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn tokenizer(change: impl FnOnce(&mut serde_json::Value)) -> BytePairs {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../train-cli/assets/demo/tokenizer.json");
        let mut value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        change(&mut value);
        BytePairs::from_bytes(value.to_string()).unwrap()
    }

    /// Pieces of a text have the tokens of the whole, wherever the first place is looked for.
    #[test]
    fn pieces_have_the_tokens_of_the_whole() {
        let tokenizer = tokenizer(|_| {});
        let pieces = Pieces::of(&tokenizer).unwrap();
        let ids = |text: &str| tokenizer.encode_fast(text, false).unwrap().get_ids().to_vec();
        // Characters that words, numbers, contractions, white space, normalization and added tokens treat in ways of their own.
        let alphabet = [
            " ",
            "  ",
            "\n",
            "\r\n",
            "\t",
            "a",
            "I'm",
            "they'LL",
            "'s",
            "b'",
            "12",
            "７",
            ".",
            "...",
            "!?\n",
            "中文",
            "、",
            "。",
            "カ",
            "が",
            "\u{3099}",
            "e\u{301}",
            "\u{301}",
            "\u{3000}",
            "\u{a0}",
            "한",
            "\u{1100}\u{1161}",
            "🙂",
            "👍🏽",
            "_",
            "<|im_end|>",
            "<|im_",
            "end|>",
            "<",
            "|",
            ">",
            "क्",
            "ि",
            "ß",
            "é",
            "\u{212a}",
            "x",
        ];
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize
        };
        let mut cuts = 0;
        for _ in 0..3000 {
            let text: String = (0..1 + random() % 30).map(|_| alphabet[random() % alphabet.len()]).collect();
            for least in [0, 1, 3, 10] {
                let parts: Vec<&str> = pieces.split(&text, least).collect();
                cuts += parts.len() - 1;
                assert_eq!(parts.concat(), text);
                let joined: Vec<u32> = parts.iter().flat_map(|part| ids(part)).collect();
                assert_eq!(joined, ids(&text), "{parts:?}");
            }
        }
        assert!(cuts > 20_000, "{cuts} cuts");
    }

    #[test]
    fn texts_of_a_tokenizer_that_finds_words_otherwise_are_not_cut() {
        let known = |change: &dyn Fn(&mut serde_json::Value)| Pieces::of(&tokenizer(|value| change(value))).is_some();
        assert!(known(&|_| {}));
        assert!(known(&|value| value["normalizer"] = serde_json::Value::Null));
        assert!(!known(&|value| value["normalizer"] = json!({"type": "NFKC"})));
        assert!(!known(&|value| value["pre_tokenizer"]["pretokenizers"][0]["pattern"] = json!({"Regex": "a b"})));
        assert!(!known(&|value| value["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = true.into()));
        assert!(!known(&|value| value["added_tokens"][0]["rstrip"] = true.into()));
        assert!(known(&|value| value["added_tokens"][0]["normalized"] = true.into()));
        let kelvin = |value: &mut serde_json::Value| {
            value["added_tokens"][0]["normalized"] = true.into();
            value["added_tokens"][0]["content"] = "<K>".into();
        };
        assert!(!known(&kelvin));
    }
}
