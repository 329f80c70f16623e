//! A conversation: its messages, how the template renders them, and its files.

use crate::{
    CliError, durable,
    model_files::TextFiles,
    outputs::{check_output, is_taken},
    talk::{answer::Answer, entry, known_tokens::KnownTokens, transcript},
};
use model_qwen3::{chat_template::RenderOptions, file};
use serde_json::{Value, json};
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

/// The messages of a conversation.
#[derive(Debug, Clone, Default)]
pub struct Dialog {
    /// The system message.
    pub system: Option<String>,
    /// Whether the model thinks before an answer; None leaves it to the template.
    pub thinking: Option<bool>,
    /// User and assistant in turn, except in a conversation from a file.
    turns: Vec<Value>,
    known: KnownTokens,
    /// The files that it wrote or loaded, which it may replace.
    files: BTreeSet<PathBuf>,
}

/// A conversation up to where the next answer begins.
#[derive(Debug)]
pub struct Prompt {
    text: String,
    /// Its tokens.
    pub ids: Vec<u32>,
}

impl Dialog {
    /// A conversation that has not begun.
    pub fn new(system: Option<String>, thinking: Option<bool>) -> Self {
        Self { system, thinking, ..Self::default() }
    }

    /// Adds what the user says.
    pub fn ask(&mut self, text: &str) {
        self.say("user", text);
    }

    /// Adds the answer to a prompt. Its tokens are remembered, unless a text of `--stop` ended it: they then include tokens of that
    /// text, which is no part of the answer. Those of an answer without a text belong to no part of the conversation.
    pub fn reply(&mut self, prompt: &Prompt, answer: &Answer) {
        if !answer.ended_by_text && !answer.text.is_empty() {
            self.known.learn(&prompt.text, &prompt.ids, &answer.text, &answer.generation.ids);
        }
        self.say("assistant", &answer.text);
    }

    fn say(&mut self, role: &str, text: &str) {
        self.turns.push(json!({"role": role, "content": text}));
    }

    /// Takes back what the user said last, and everything after it. Returns whether there was anything.
    pub fn undo(&mut self) -> bool {
        let last = self.turns.iter().rposition(|turn| turn["role"] == "user");
        self.turns.truncate(last.unwrap_or(self.turns.len()));
        last.is_some()
    }

    /// Forgets all turns.
    pub fn reset(&mut self) {
        self.turns.clear();
    }

    /// Number of messages, without that of the system.
    pub fn message_count(&self) -> usize {
        self.turns.len()
    }

    /// The conversation up to where the next answer begins.
    ///
    /// # Errors
    /// If the template refuses the conversation.
    pub fn prompt(&self, files: &TextFiles) -> Result<Prompt, CliError> {
        let options =
            RenderOptions { add_generation_prompt: true, enable_thinking: self.thinking, ..Default::default() };
        let messages: Vec<Value> = self.messages().collect();
        let text = files.template.render(&messages, options)?;
        Ok(Prompt { ids: self.known.of(&text, &files.tokenizer)?, text })
    }

    /// Writes the conversation in the format that the file's name says. `inputs` are the files that the command reads. Returns
    /// whether an older file was replaced: one that the conversation wrote or loaded.
    ///
    /// # Errors
    /// If the file is one of the inputs, no regular file, or somebody else's, or cannot be written.
    pub fn save(&mut self, path: &Path, inputs: &[PathBuf]) -> Result<bool, CliError> {
        check_output("/save", path, inputs)?;
        let exists = is_taken(path);
        if exists && !path.canonicalize().is_ok_and(|file| self.files.contains(&file)) {
            let text = "the file exists, and this conversation has neither written nor loaded it; choose another name";
            return Err(CliError::Usage(format!("/save {}: {text}", path.display())));
        }
        durable::write_bytes(path, transcript::written(path, self.messages()).as_bytes())?;
        self.files.extend(path.canonicalize());
        Ok(exists)
    }

    /// Replaces the conversation by that of a file.
    ///
    /// # Errors
    /// If the file cannot be read, or holds no conversation. The conversation then stays as it is.
    pub fn load(&mut self, path: &Path) -> Result<(), CliError> {
        let text = file::read_text(path, entry::LONGEST, "check the path").map_err(CliError::of_flag("/load"))?;
        let mut messages = transcript::messages(path, &text)?;
        self.system = None;
        if messages.first().is_some_and(|message| message["role"] == "system") {
            self.system = messages.remove(0)["content"].as_str().map(str::to_owned);
        }
        self.turns = messages;
        self.files.extend(path.canonicalize());
        Ok(())
    }

    fn messages(&self) -> impl Iterator<Item = Value> {
        let system = self.system.iter().map(|text| json!({"role": "system", "content": text}));
        system.chain(self.turns.iter().cloned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use model_qwen3::{
        session::{Generation, StopReason},
        tokenizer::Tokenizer,
    };

    #[test]
    fn a_saved_conversation_comes_back() {
        let folder = tempfile::tempdir().unwrap();
        let mut dialog = Dialog { system: Some("Be short.".into()), ..Dialog::default() };
        dialog.ask("你好\nHi");
        dialog.say("assistant", "Hello.");
        let json = "{\"role\": \"user\", \"content\": \"a\"}\n{\"role\": \"bot\"}\n";
        for (name, broken, reason) in [
            ("talk.jsonl", json, "talk.jsonl:2: a message needs"),
            ("talk.txt", "# train-cli transcript\nuser:\n> a\nbot:\n", "talk.txt:4: \"bot:\" is no role"),
        ] {
            let file = folder.path().join(name);
            assert!(!dialog.save(&file, &[]).unwrap());
            let mut loaded = Dialog::default();
            loaded.ask("forgotten");
            loaded.load(&file).unwrap();
            assert_eq!((&loaded.system, &loaded.turns), (&dialog.system, &dialog.turns));
            assert!(loaded.undo() && loaded.message_count() == 0 && !loaded.undo());
            std::fs::write(&file, broken).unwrap();
            let error = dialog.load(&file).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
            assert_eq!(dialog.message_count(), 2);
        }
    }

    #[test]
    fn only_files_of_the_conversation_are_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let [own, others] = ["own.txt", "others.txt"].map(|name| folder.path().join(name));
        std::fs::write(&others, "# train-cli transcript\nuser:\n> a\n").unwrap();
        let mut dialog = Dialog::default();
        dialog.ask("b");
        assert!(!dialog.save(&own, &[]).unwrap() && dialog.save(&own, &[]).unwrap());
        let before = std::fs::read(&others).unwrap();
        let error = dialog.save(&others, &[]).unwrap_err().to_string();
        assert!(error.contains("neither written nor loaded it; choose another name"), "{error}");
        assert_eq!(std::fs::read(&others).unwrap(), before);
        dialog.load(&others).unwrap();
        dialog.ask("c");
        assert!(dialog.save(&others, &[]).unwrap() && std::fs::read(&others).unwrap() != before);
    }

    /// The tokens of an answer that has no text, or that a text of `--stop` ended, do not belong to the conversation.
    #[test]
    fn only_tokens_of_shown_text_are_remembered() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo/tokenizer.json");
        let tokenizer = Tokenizer::from_file(&path).unwrap();
        let remembered = |text: &str, ended_by_text: bool| {
            let ids = tokenizer.encode("model: ").unwrap();
            let prompt = Prompt { text: "model: ".into(), ids };
            let generation = Generation { ids: vec![7, 8], stop: StopReason::Caller, logprobs: vec![] };
            let answer = Answer {
                generation,
                text: text.into(),
                prompt_tokens: prompt.ids.len(),
                cached_tokens: 0,
                ended_by_text,
                seconds_to_first_token: 0.0,
                seconds: 0.0,
            };
            let mut dialog = Dialog::default();
            dialog.reply(&prompt, &answer);
            let known = dialog.known.of(&format!("model: {text}"), &tokenizer).unwrap();
            known.ends_with(&[7, 8])
        };
        assert!(remembered("Hello", false));
        assert!(!remembered("Hello", true));
        assert!(!remembered("", false));
    }
}
