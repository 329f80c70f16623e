//! Saved conversations: how the messages are written to a file, and how they are read again.
//!
//! A file whose name ends in `.jsonl` holds one JSON object a line. Every other file is text: the line `TITLE`, and for each
//! message a line with its role and a colon, followed by the lines of the message, each behind `MARK`. A line that begins
//! with the mark is therefore always a part of a message, and what stands behind the mark never has a meaning of its own. Only
//! a line feed ends a line; a carriage return is a part of the message.

use crate::{CliError, settings::extensions};
use model_qwen3::{file, json::Budget};
use serde_json::{Value, json};
use std::path::Path;

/// The first line of a conversation as text.
const TITLE: &str = "# train-cli transcript";
/// What stands in front of each line of a message.
const MARK: &str = "> ";
/// Who says a message.
const ROLES: [&str; 3] = ["system", "user", "assistant"];
/// Most messages of a conversation as text: each takes hundreds of bytes of memory, and may have eight in the file.
const MOST: usize = 50_000;

/// What a file of this name holds for a conversation of these messages.
pub(super) fn written(path: &Path, messages: impl Iterator<Item = Value>) -> String {
    if extensions::is_jsonl(path) {
        return messages.map(|message| format!("{message}\n")).collect();
    }
    let block = |message: Value| {
        let lines = text_of(&message, "content").split('\n').map(|line| format!("{MARK}{line}\n"));
        format!("\n{}:\n{}", text_of(&message, "role"), lines.collect::<String>())
    };
    format!("{TITLE}\n{}", messages.map(block).collect::<String>())
}

/// The messages of a file that holds `text`.
///
/// # Errors
/// If the file is no saved conversation, with the number of the line.
pub(super) fn messages(path: &Path, text: &str) -> Result<Vec<Value>, CliError> {
    let text = file::without_mark(text);
    if extensions::is_jsonl(path) { of_json(path, text) } else { of_text(path, text) }
}

/// Whether a file that holds `text` is a saved conversation, and not a script. An editor may have changed the ends of its
/// lines: [`messages`] then refuses it.
pub(super) fn is_saved(path: &Path, text: &str) -> bool {
    let first = file::without_mark(text).lines().next().unwrap_or_default();
    extensions::is_jsonl(path) || first.trim_end() == TITLE
}

fn of_json(path: &Path, text: &str) -> Result<Vec<Value>, CliError> {
    let (mut messages, budget) = (Vec::new(), Budget::of(text.len()));
    for (i, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let message = budget.parse(line).map_err(|e| CliError::not_json(path, i + 1, &e))?;
        let known = message["role"].as_str().is_some_and(|role| ROLES.contains(&role));
        if !known || !message["content"].is_string() {
            let reason = "a message needs the \"role\" system, user or assistant, and a text as \"content\"";
            return Err(bad(path, i + 1, reason.into()));
        }
        messages.push(message);
    }
    Ok(messages)
}

/// A message of a text, as far as it was read.
struct Message<'a> {
    role: &'a str,
    /// The number of the line with the role.
    line: usize,
    content: Option<String>,
}

fn of_text(path: &Path, text: &str) -> Result<Vec<Value>, CliError> {
    let mut lines = text.strip_suffix('\n').unwrap_or(text).split('\n').zip(1..);
    if lines.next().is_none_or(|(first, _)| first != TITLE) {
        let reason = format!(
            "a saved conversation begins with the line {TITLE:?}, and its lines end with LF; give a file that /save wrote"
        );
        return Err(bad(path, 1, reason));
    }
    let (mut messages, mut open) = (Vec::<Message<'_>>::new(), false);
    for (line, number) in lines {
        if line.is_empty() {
            open = false;
            continue;
        }
        // Some editors remove a space at the end of a line.
        if let Some(said) = line.strip_prefix(MARK).or_else(|| (line == MARK.trim_end()).then_some("")) {
            let Some(message) = messages.last_mut().filter(|_| open) else {
                return Err(bad(path, number, "no role stands above this line; write it, for example user:".into()));
            };
            message.content = Some(match message.content.take() {
                Some(content) => content + "\n" + said,
                None => said.to_owned(),
            });
            continue;
        }
        let Some(role) = line.strip_suffix(':').filter(|role| ROLES.contains(role)) else {
            let begun: String = line.chars().take(40).collect();
            let reason = format!(
                "{begun:?} is no role (system:, user: or assistant:); a line of a message begins with {MARK:?}"
            );
            return Err(bad(path, number, reason));
        };
        if messages.len() == MOST {
            return Err(bad(path, number, format!("a conversation has at most {MOST} messages; remove the others")));
        }
        messages.push(Message { role, line: number, content: None });
        open = true;
    }
    let complete = |Message { role, line, content }: Message<'_>| {
        let reason = || format!("the message has no text; an empty message has one line {MARK:?} below its role");
        content.map(|content| json!({"role": role, "content": content})).ok_or_else(|| bad(path, line, reason()))
    };
    messages.into_iter().map(complete).collect()
}

fn bad(path: &Path, line: usize, reason: String) -> CliError {
    CliError::data(path, Some(line), reason)
}

fn text_of<'a>(message: &'a Value, key: &str) -> &'a str {
    message[key].as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "talk.txt";

    fn message(role: &str, content: &str) -> Value {
        json!({"role": role, "content": content})
    }

    /// Parts of messages that a reader could take for something else.
    const PARTS: [&str; 14] = [
        "\n",
        "\r",
        "\r\n",
        "> ",
        ">",
        "user:",
        "\n\nassistant:\n> ",
        TITLE,
        " ",
        "\u{feff}",
        "\u{2028}",
        "你好，",
        "🎈",
        "{\"role\": \"user\"}",
    ];

    /// All messages of at most three such parts, the empty one among them: alone, and one after another.
    #[test]
    fn every_message_comes_back_as_it_was() {
        let mut contents = vec![String::new()];
        let mut longest = contents.clone();
        for _ in 0..3 {
            longest = longest.iter().flat_map(|text| PARTS.map(|part| format!("{text}{part}"))).collect();
            contents.extend(longest.iter().cloned());
        }
        let said = contents.iter().zip(ROLES.iter().cycle()).map(|(content, role)| message(role, content));
        let said: Vec<Value> = said.collect();
        assert!(said.len() > 2900 && said.len() < MOST);
        for name in [TEXT, "talk", "talk.jsonl", "CAPITALS.JSONL"] {
            let path = Path::new(name);
            for conversation in said.chunks(1).chain([&said[..], &[]]) {
                let text = written(path, conversation.iter().cloned());
                assert!(is_saved(path, &text), "{name}: {text:?}");
                let read = messages(path, &text).unwrap_or_else(|e| panic!("{e}: {text:?}"));
                assert!(read == conversation, "{name}: {text:?} was read as {read:?}");
            }
        }
    }

    #[test]
    fn a_text_shows_who_says_what() {
        let said = [message("system", "Be short."), message("user", "你好\nHi"), message("assistant", "")];
        let text = "# train-cli transcript\n\nsystem:\n> Be short.\n\nuser:\n> 你好\n> Hi\n\nassistant:\n> \n";
        assert_eq!(written(Path::new(TEXT), said.iter().cloned()), text);
        // An editor has removed the space behind the last mark, and the end of the last line.
        assert_eq!(messages(Path::new(TEXT), text.trim_end()).unwrap(), said);
    }

    #[test]
    fn what_is_no_conversation_is_refused_with_its_line() {
        let many = format!("{TITLE}\n{}", "user:\n>\n".repeat(MOST + 1));
        for (text, line, reason) in [
            ("", 1, "begins with the line"),
            ("user:\n> a\n", 1, "begins with the line"),
            ("# train-cli transcript\r\nuser:\r\n> a\r\n", 1, "lines end with LF"),
            ("# train-cli transcript\n> a\n", 2, "no role stands above"),
            ("# train-cli transcript\nuser:\n> a\n\n> b\n", 5, "no role stands above"),
            ("# train-cli transcript\n\nuser:\n> a\nb\n", 5, "\"b\" is no role"),
            ("# train-cli transcript\nbot:\n> a\n", 2, "\"bot:\" is no role"),
            ("# train-cli transcript\nuser:\n>a\n", 3, "\">a\" is no role"),
            ("# train-cli transcript\nuser:\nassistant:\n> a\n", 2, "the message has no text"),
            ("# train-cli transcript\nuser:\n> a\nassistant:\n", 4, "the message has no text"),
            (many.as_str(), 2 * MOST + 2, "at most 50000 messages"),
        ] {
            let error = messages(Path::new(TEXT), text).unwrap_err().to_string();
            assert!(error.starts_with(&format!("{TEXT}:{line}: ")) && error.contains(reason), "{error}");
        }
    }

    #[test]
    fn a_script_is_no_saved_conversation() {
        let is_saved = |text: &str| is_saved(Path::new(TEXT), text);
        assert!(!is_saved("") && !is_saved("Hello\n# train-cli transcript\n") && !is_saved("user:\n> a\n"));
        assert!(is_saved("\u{feff}# train-cli transcript\r\n"), "its messages would be taken for a script");
    }
}
