//! The tokens of a conversation, as the model read and made them. The text of an answer may have other tokens than the model
//! made: the model can spell a word in another way than the tokenizer, or stop within a character. A later turn takes the known
//! tokens, so that the model reads each token once.

use crate::CliError;
use model_qwen3::tokenizer::Tokenizer;

/// A rendered conversation up to the end of its last answer, with its tokens.
#[derive(Debug, Clone, Default)]
pub struct KnownTokens {
    text: String,
    ids: Vec<u32>,
    ends: Vec<End>,
}

/// Where an answer ends.
#[derive(Debug, Clone, Copy)]
struct End {
    /// Bytes of the text.
    bytes: usize,
    /// Number of tokens.
    tokens: usize,
}

impl KnownTokens {
    /// The tokens of a rendered conversation. Up to the last answer that it shares with the known conversation, these are the known
    /// tokens. The tokenizer makes those of the rest.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn of(&self, text: &str, tokenizer: &Tokenizer) -> Result<Vec<u32>, CliError> {
        let End { bytes, tokens } = self.shared(text).last().copied().unwrap_or(End { bytes: 0, tokens: 0 });
        let mut ids = self.ids[..tokens].to_vec();
        tokenizer.encode_onto(&text[bytes..], &mut ids)?;
        Ok(ids)
    }

    /// Learns the tokens of an answer and of the conversation before it, for which [`Self::of`] gave `prompt_ids`.
    pub fn learn(&mut self, prompt: &str, prompt_ids: &[u32], answer: &str, answer_ids: &[u32]) {
        self.ends = self.shared(prompt).to_vec();
        self.text = [prompt, answer].concat();
        self.ids = [prompt_ids, answer_ids].concat();
        self.ends.push(End { bytes: self.text.len(), tokens: self.ids.len() });
    }

    /// The answers that a text begins with.
    fn shared(&self, text: &str) -> &[End] {
        let same = self.text.bytes().zip(text.bytes()).take_while(|(a, b)| a == b).count();
        &self.ends[..self.ends.partition_point(|end| end.bytes <= same)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn tokens_of_shared_answers_stay_as_they_were() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo/tokenizer.json");
        let tokenizer = Tokenizer::from_file(&path).unwrap();
        let encode = |text: &str| tokenizer.encode(text).unwrap();
        // A token for each character, which the tokenizer would not choose.
        let spelled = |text: &str| -> Vec<u32> { text.chars().flat_map(|c| encode(&c.to_string())).collect() };
        let mut known = KnownTokens::default();
        let (first, second) = ("user: Who are you? model: ", "<|im_end|>user: And now? model: ");
        let prompt = known.of(first, &tokenizer).unwrap();
        assert_eq!(prompt, encode(first));
        let answer = spelled("I am the model");
        assert_ne!(answer, encode("I am the model"));
        known.learn(first, &prompt, "I am the model", &answer);
        let one_turn = [&prompt[..], &answer].concat();
        let text = format!("{first}I am the model{second}");
        let longer = known.of(&text, &tokenizer).unwrap();
        assert_eq!(longer, [&one_turn[..], &encode(second)].concat());
        // An answer that ends within a character, whose text has a mark in its place.
        let cut = encode("你")[..1].to_vec();
        known.learn(&text, &longer, "\u{fffd}", &cut);
        let more = known.of(&format!("{text}\u{fffd}<|im_end|>"), &tokenizer).unwrap();
        assert_eq!(more, [&longer[..], &cut, &encode("<|im_end|>")].concat());
        // The second turn is taken back, or its question is another one.
        for second in ["<|im_end|>user: Another? model: ", "<|im_end|>"] {
            let text = format!("{first}I am the model{second}");
            assert_eq!(known.of(&text, &tokenizer).unwrap(), [&one_turn[..], &encode(second)].concat());
        }
        // Nothing is known of an answer that was made shorter.
        let changed = format!("{first}I am the mode{second}");
        assert_eq!(known.of(&changed, &tokenizer).unwrap(), encode(&changed));
    }
}
