//! Log probabilities of tokens as OpenAI's two interfaces write them. A token may be a part of a character, as most tokens of
//! rare Chinese characters and of emoji are. Then only its bytes say which token it is.

use model_qwen3::{sampling::Logprobs, tokenizer::Tokenizer};
use serde_json::{Map, Value, json};
use std::fmt::Write;

/// Log probabilities for `/v1/chat/completions`.
pub(super) fn of_chat(found: &[(u32, Logprobs)], tokenizer: &Tokenizer) -> Value {
    let named = |id: u32, logprob: f32| {
        let bytes = bytes_of(id, tokenizer);
        json!({"token": String::from_utf8_lossy(&bytes), "bytes": bytes, "logprob": logprob})
    };
    let one = |(id, found): &(u32, Logprobs)| {
        let mut token = named(*id, found.chosen);
        token["top_logprobs"] = found.top.iter().map(|(id, logprob)| named(*id, *logprob)).collect();
        token
    };
    json!({"content": found.iter().map(one).collect::<Value>()})
}

/// Log probabilities for `/v1/completions`. The tokens follow those that brought the text to `place`.
pub(super) fn of_completion(found: &[(u32, Logprobs)], place: &mut Place, tokenizer: &Tokenizer) -> Value {
    let (mut tokens, mut chosen, mut tops, mut offsets) = (vec![], vec![], vec![], vec![]);
    for (id, found) in found {
        let bytes = bytes_of(*id, tokenizer);
        offsets.push(place.characters);
        // The text has no special tokens.
        if !tokenizer.is_special(*id) {
            place.add(&bytes);
        }
        tokens.push(spelled(&bytes));
        chosen.push(found.chosen);
        let top = found.top.iter().map(|(id, logprob)| (spelled(&bytes_of(*id, tokenizer)), Value::from(*logprob)));
        tops.push(top.collect::<Map<String, Value>>());
    }
    json!({"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets})
}

/// How far a text has come that grows by tokens.
#[derive(Debug, Clone, Default)]
pub(super) struct Place {
    /// Its characters that are complete.
    characters: usize,
    /// The bytes behind them, which begin a character.
    begun: Vec<u8>,
}

impl Place {
    /// Adds the bytes of a token. Bytes that are no part of a character count as one: the text has a replacement character for
    /// them.
    fn add(&mut self, bytes: &[u8]) {
        let mut all = std::mem::take(&mut self.begun);
        all.extend_from_slice(bytes);
        let mut rest = &all[..];
        while let Err(error) = std::str::from_utf8(rest) {
            let (whole, broken) = rest.split_at(error.valid_up_to());
            self.characters += String::from_utf8_lossy(whole).chars().count();
            let Some(length) = error.error_len() else {
                self.begun = broken.to_vec();
                return;
            };
            self.characters += 1;
            rest = &broken[length..];
        }
        self.characters += String::from_utf8_lossy(rest).chars().count();
    }
}

/// The bytes of a token. A model may have more ids than its tokenizer has tokens: these have no bytes.
fn bytes_of(id: u32, tokenizer: &Tokenizer) -> Vec<u8> {
    tokenizer.bytes(id).unwrap_or_default()
}

/// The text of a token. Where it is not whole characters, its bytes are spelled as OpenAI does it, for example `bytes:\xe4\xbd`.
fn spelled(bytes: &[u8]) -> String {
    if let Ok(text) = std::str::from_utf8(bytes) {
        return text.to_owned();
    }
    let mut text = "bytes:".to_owned();
    for chunk in bytes.utf8_chunks() {
        text += chunk.valid();
        for byte in chunk.invalid() {
            // Writing to a String does not fail.
            let _ = write!(text, "\\x{byte:02x}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{collections::BTreeSet, path::Path};

    /// Each token of a text, and all of them as the most likely ones.
    fn found(text: &str, tokenizer: &Tokenizer) -> Vec<(u32, Logprobs)> {
        let ids = tokenizer.encode(text).unwrap();
        let top: Vec<(u32, f32)> = ids.iter().map(|id| (*id, -2.0)).collect();
        ids.iter().map(|id| (*id, Logprobs { chosen: -1.0, top: top.clone() })).collect()
    }

    #[test]
    fn parts_of_characters_are_told_apart_by_their_bytes() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo/tokenizer.json");
        let tokenizer = Tokenizer::from_file(&file).unwrap();
        let text = "a 佢哋🎈 é\u{FFFD}b";
        let found = found(text, &tokenizer);
        let ids: BTreeSet<u32> = found.iter().map(|(id, _)| *id).collect();
        assert!(ids.len() > text.chars().count(), "no token is a part of a character: {ids:?}");

        let chat = of_chat(&found, &tokenizer);
        let bytes = |tokens: &Value| -> Vec<u8> {
            let tokens = tokens.as_array().unwrap().iter();
            tokens.flat_map(|token| serde_json::from_value::<Vec<u8>>(token["bytes"].clone()).unwrap()).collect()
        };
        assert_eq!(bytes(&chat["content"]), text.as_bytes());
        assert_eq!(bytes(&chat["content"][0]["top_logprobs"]), text.as_bytes());

        let mut place = Place::default();
        let completion = of_completion(&found, &mut place, &tokenizer);
        assert_eq!(completion["top_logprobs"][0].as_object().unwrap().len(), ids.len(), "{completion}");
        assert!(completion["tokens"].to_string().contains(r"bytes:\\xe4"), "{completion}");
        let mut end = 0;
        for (i, (id, _)) in found.iter().enumerate() {
            let complete = text.char_indices().filter(|(at, c)| at + c.len_utf8() <= end).count();
            assert_eq!(completion["text_offset"][i], complete, "token {i} of {completion}");
            end += tokenizer.bytes(*id).unwrap().len();
        }
        assert_eq!((place.characters, end), (text.chars().count(), text.len()));
    }

    #[test]
    fn characters_are_counted_as_the_text_shows_them() {
        let bytes = b"a\xe4\xbd\xe4\xbd\xa2\xff\xf0\x9f\x8e\x88\xf0\x9f\xc3\xa9\x80";
        for cut in 0..=bytes.len() {
            let mut place = Place::default();
            place.add(&bytes[..cut]);
            place.add(&bytes[cut..]);
            assert_eq!(place.characters, String::from_utf8_lossy(bytes).chars().count(), "cut at {cut}");
            assert!(place.begun.is_empty());
        }
    }
}
