//! Haystacks: long texts with one fact to be found again. A haystack is made of plain sentences without digits; the needle is a
//! sentence that gives a number to a name, somewhere among them; the question behind them asks for the number. The digits of a
//! number are all different, so that a small model can learn to copy it.
//!
//! A haystack depends on the seed and on its place in the series alone, so that the same flags make the same rows again.

use crate::{CliError, model_files::TextFiles, report};
use backend_nvfp4::{Stream, reference};
use model_qwen3::chat_template::RenderOptions;
use serde_json::{Value, json};

/// What a haystack is made of.
const SENTENCES: [&str; 16] = [
    "The grass is green and the sky is blue.",
    "A boat went down the river.",
    "Nobody was at home.",
    "The train to the north was late again.",
    "She put the book back on the shelf.",
    "It rained for most of the night.",
    "He sold apples at the market.",
    "The old bridge was closed for repairs.",
    "They sang until the lamp went out.",
    "A letter came from the other side of the sea.",
    "The cat slept on the warm stone.",
    "Tea was served in the garden.",
    "The road led through a dark forest.",
    "Children played on the frozen lake.",
    "The clock in the hall had stopped.",
    "A farmer counted his sheep.",
];
/// The names to which a number may belong.
const NAMES: [&str; 8] = ["Anna", "Boris", "Clara", "David", "Emma", "Felix", "Greta", "Hugo"];

/// What a series of haystacks is made by.
#[derive(Debug, Clone, Copy)]
pub struct Series {
    /// Random seed.
    pub seed: u64,
    /// Number of digits of the number, from 1 to 10.
    pub digits: usize,
}

/// A haystack with its question.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Haystack {
    /// The text with the question behind it.
    pub question: String,
    /// The number that is asked for.
    pub answer: String,
    /// The tokens of the prompt.
    pub prompt: Vec<u32>,
}

impl Series {
    /// The haystack `number` of the series: prompt and answer have at most `length` tokens, and as many as whole sentences allow.
    /// `depth` says where the needle is: 0 in front of all sentences, 1 behind them.
    ///
    /// # Errors
    /// If not even the needle fits, or the template refuses the question.
    pub fn haystack(&self, text: &TextFiles, number: u32, length: usize, depth: f64) -> Result<Haystack, CliError> {
        let (mut draws, name, answer) = self.needle(number);
        let (mut tokens, room) = room(text, length, name, &answer)?;
        let mut sentences: Vec<&str> = Vec::new();
        while tokens <= room {
            let sentence = SENTENCES[draws.below(SENTENCES.len())];
            tokens += text.tokenizer.encode(&format!("{sentence}\n"))?.len();
            sentences.push(sentence);
        }
        // The tokens of a text need not be those of its sentences one by one.
        loop {
            let question = question(&sentences, depth, name, &answer);
            let prompt = rendered(text, &question)?;
            if prompt.len() <= room || sentences.pop().is_none() {
                return Ok(Haystack { question, answer, prompt });
            }
        }
    }

    /// Refuses a length that has no room for the needle and the question of the haystack `number`.
    ///
    /// # Errors
    /// If there is no room, or the template refuses the question.
    pub fn check(&self, text: &TextFiles, number: u32, length: usize) -> Result<(), CliError> {
        let (_, name, answer) = self.needle(number);
        room(text, length, name, &answer).map(drop)
    }

    /// The name and the number in a haystack, and the random numbers for its sentences.
    fn needle(&self, number: u32) -> (Draws, &'static str, String) {
        let mut draws = Draws { stream: Stream { seed: self.seed, step: number, stream: 0 }, taken: 0 };
        let mut left: Vec<u32> = (0..10).collect();
        let answer = (0..self.digits.min(10)).map(|_| left.swap_remove(draws.below(left.len())).to_string()).collect();
        let name = NAMES[draws.below(NAMES.len())];
        (draws, name, answer)
    }
}

impl Haystack {
    /// The haystack as a training row.
    pub fn row(&self) -> Value {
        json!({"messages": [
            {"role": "user", "content": self.question}, {"role": "assistant", "content": self.answer},
        ]})
    }
}

/// How many tokens a prompt with nothing but the needle has, and how many a prompt may have.
fn room(text: &TextFiles, length: usize, name: &str, answer: &str) -> Result<(usize, usize), CliError> {
    let tokens = rendered(text, &question(&[], 0.0, name, answer))?.len();
    let behind = text.tokenizer.encode(answer)?.len() + 1;
    if tokens + behind > length {
        let needed = report::count(tokens + behind, "token");
        let text = format!("--lengths {length}: the needle and its question have {needed}; give larger lengths");
        return Err(CliError::Usage(text));
    }
    Ok((tokens, length - behind))
}

fn question(sentences: &[&str], depth: f64, name: &str, answer: &str) -> String {
    let before = (depth * sentences.len() as f64).round() as usize;
    let needle = format!("The number of {name} is {answer}.");
    let lines = sentences[..before].iter().copied().chain([needle.as_str()]).chain(sentences[before..].iter().copied());
    let text: String = lines.flat_map(|line| [line, "\n"]).collect();
    format!("{text}What is the number of {name}? Answer with the number alone.")
}

/// The tokens of a question, without thinking.
fn rendered(text: &TextFiles, question: &str) -> Result<Vec<u32>, CliError> {
    let options = RenderOptions { add_generation_prompt: true, enable_thinking: Some(false), ..Default::default() };
    Ok(text.tokenizer.encode(&text.template.render(&[json!({"role": "user", "content": question})], options)?)?)
}

/// Random numbers one after another.
struct Draws {
    stream: Stream,
    taken: u32,
}

impl Draws {
    fn below(&mut self, n: usize) -> usize {
        let [word, ..] = reference::philox(self.taken, self.stream);
        self.taken += 1;
        ((u64::from(word) * n as u64) >> 32) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use model_qwen3::config::Qwen3Config;
    use std::path::Path;

    fn demo() -> TextFiles {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo");
        TextFiles::open(&demo, &Qwen3Config::from_file(&demo.join("config.json")).unwrap()).unwrap()
    }

    #[test]
    fn a_haystack_has_the_length_and_the_depth_that_are_asked_for() {
        let (text, series) = (demo(), Series { seed: 3, digits: 4 });
        for (number, length) in [200, 333, 1000].into_iter().enumerate() {
            let mut places = Vec::new();
            for depth in [0.0, 0.5, 1.0] {
                let found = series.haystack(&text, number as u32, length, depth).unwrap();
                let whole = found.prompt.len() + text.tokenizer.encode(&found.answer).unwrap().len() + 1;
                assert!(whole <= length && whole + 60 > length, "{whole} of {length}");
                assert_eq!(found.question.matches(&found.answer).count(), 1);
                let mut digits: Vec<char> = found.answer.chars().collect();
                digits.sort_unstable();
                digits.dedup();
                assert_eq!(digits.len(), 4, "{}", found.answer);
                places.push(found.question.find(&found.answer).unwrap() as f64 / found.question.len() as f64);
            }
            assert!(places[0] < 0.25 && (0.25..0.75).contains(&places[1]) && places[2] > places[1] + 0.1, "{places:?}");
        }
    }

    #[test]
    fn a_haystack_is_made_again_by_its_seed_and_number() {
        let text = demo();
        let made = |seed, number| Series { seed, digits: 4 }.haystack(&text, number, 300, 0.3).unwrap();
        assert_eq!(made(1, 5), made(1, 5));
        assert!(made(1, 5) != made(2, 5) && made(1, 5) != made(1, 6));
        let needed = [0, 20].map(|length| {
            let error = Series { seed: 1, digits: 4 }.haystack(&text, 0, length, 0.5).unwrap_err().to_string();
            assert!(error.contains(&format!("--lengths {length}: ")), "{error}");
            error.split_once(" have ").unwrap().1.to_owned()
        });
        assert_eq!(needed[0], needed[1]);
    }
}
