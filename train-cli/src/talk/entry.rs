//! What a person enters in a conversation: something to say, or a command that begins with a slash. It is typed, or read from
//! a script.

use crate::{CliError, durable, talk::transcript};
use model_qwen3::file;
use rustyline::{Behavior, Config, DefaultEditor, error::ReadlineError};
use serde_json::Value;
use std::{
    io::{self, BufRead, IsTerminal, Read},
    path::{Path, PathBuf},
};

/// What was entered.
#[derive(Debug, PartialEq, Eq)]
pub enum Entry {
    /// A message to answer.
    Say(String),
    /// Sets the system message, or removes it.
    System(Option<String>),
    /// Forgets the conversation.
    Reset,
    /// Takes the last message and its answer back.
    Undo,
    /// Writes the conversation to a file.
    Save(PathBuf),
    /// Continues the conversation of a file.
    Load(PathBuf),
    /// Shows how much of the context is used, and how fast answers were.
    Stats,
    /// Changes how tokens are chosen: a name and a value.
    Set(String, String),
    /// Turns thinking on or off, or leaves it to the template.
    Think(Option<bool>),
    /// Shows the commands.
    Help,
    /// Ends the program.
    Exit,
}

/// The commands, as `/help` shows them.
pub const HELP: &str = "\
/system [TEXT]      set the system message; without a text, remove it
/reset              forget the conversation
/undo               take the last message and its answer back
/save FILE          write the conversation: as JSON if the name ends in .jsonl, else as text
/load FILE          continue a conversation that /save wrote
/set NAME VALUE     temperature, top-p, top-k, min-p, repetition-penalty, max-tokens or seed
/think on|off|auto  think before the answer; auto does as in training
/stats              tokens of the conversation, and speed
/exit               end; so does Ctrl-D
A line that ends with \\ continues on the next one. Text between two lines of \"\"\" is one message.
Ctrl-C stops an answer, or discards the message that is being typed.";

impl Entry {
    /// Reads what was entered outside quotation marks.
    ///
    /// # Errors
    /// What is wrong with a command.
    fn parse(text: &str) -> Result<Self, String> {
        let Some(command) = text.strip_prefix('/') else { return Ok(Self::Say(text.to_owned())) };
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        let rest = rest.trim();
        let file = || match rest {
            "" => Err(format!("/{name} needs the name of a file")),
            path => Ok(expanded(path)),
        };
        Ok(match name {
            "system" => Self::System((!rest.is_empty()).then(|| rest.to_owned())),
            "save" => Self::Save(file()?),
            "load" => Self::Load(file()?),
            "set" => {
                let (name, value) = rest.split_once(char::is_whitespace).ok_or("/set needs a name and a value")?;
                Self::Set(name.replace('_', "-"), value.trim().to_owned())
            }
            "think" => Self::Think(match rest {
                "" | "on" | "true" => Some(true),
                "off" | "false" => Some(false),
                "auto" => None,
                _ => return Err(format!("/think {rest}: say on, off or auto")),
            }),
            _ if !rest.is_empty() => return Err(format!("/{command}: there is no such command; /help shows them")),
            "reset" | "clear" => Self::Reset,
            "undo" => Self::Undo,
            "stats" => Self::Stats,
            "help" | "?" => Self::Help,
            "exit" | "quit" | "bye" => Self::Exit,
            _ => return Err(format!("/{name}: there is no such command; /help shows them")),
        })
    }
}

/// The path of a file. As in a shell, `~/` is the user's folder.
fn expanded(path: &str) -> PathBuf {
    let in_home = path.strip_prefix("~/").and_then(|rest| Some(dirs::home_dir()?.join(rest)));
    in_home.unwrap_or_else(|| path.into())
}

/// Where entries come from.
pub enum Source {
    /// A person at a terminal, with a history.
    Terminal(Box<DefaultEditor>, Option<PathBuf>),
    /// The lines of a script, or of standard input that is not a terminal.
    Lines(Box<dyn Iterator<Item = std::io::Result<String>>>),
    /// What the user and the system say in a saved conversation.
    Saved(std::vec::IntoIter<Entry>),
}

impl Source {
    /// The entries of a script, or of standard input.
    ///
    /// # Errors
    /// If the script cannot be read, or the terminal is not usable.
    pub fn new(script: Option<&Path>) -> Result<Self, CliError> {
        if let Some(script) = script {
            return Self::of_file(script);
        }
        if !std::io::stdin().is_terminal() {
            return Ok(Self::Lines(Box::new(lines_of(std::io::stdin().lock()))));
        }
        let unusable = |e: ReadlineError| CliError::Usage(format!("the terminal cannot be used: {e}; give --script"));
        // The editor draws on the terminal, and not into a file that takes the results.
        let behavior = if io::stdout().is_terminal() { Behavior::Stdio } else { Behavior::PreferTerm };
        let config = Config::builder().behavior(behavior).build();
        let mut editor = DefaultEditor::with_config(config).map_err(unusable)?;
        let history = dirs::state_dir().map(|folder| folder.join("train-cli").join("history"));
        // The first conversation has none.
        let _ = history.as_ref().map(|file| editor.load_history(file));
        Ok(Self::Terminal(Box::new(editor), history))
    }

    fn of_file(path: &Path) -> Result<Self, CliError> {
        let text = file::read_text(path, LONGEST, "check the path").map_err(CliError::of_flag("--script"))?;
        if !transcript::is_saved(path, &text) {
            let lines: Vec<_> = file::without_mark(&text).lines().map(|line| Ok(line.to_owned())).collect();
            return Ok(Self::Lines(Box::new(lines.into_iter())));
        }
        let said = |message: Value| {
            let content = message["content"].as_str().unwrap_or_default().to_owned();
            match message["role"].as_str() {
                Some("user") => Some(Entry::Say(content)),
                Some("system") => Some(Entry::System(Some(content))),
                _ => None,
            }
        };
        let entries: Vec<_> = transcript::messages(path, &text)?.into_iter().filter_map(said).collect();
        Ok(Self::Saved(entries.into_iter()))
    }

    /// Whether a person types, who sees an error and can try again.
    pub fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal(..))
    }

    /// Whether it is a saved conversation that sets a system message.
    pub fn has_system(&self) -> bool {
        let sets = |entry: &Entry| matches!(entry, Entry::System(Some(_)));
        matches!(self, Self::Saved(entries) if entries.as_slice().iter().any(sets))
    }

    /// The next entry, or what is wrong with it; None at the end.
    ///
    /// # Errors
    /// If standard input cannot be read.
    pub fn next_entry(&mut self) -> Result<Option<Result<Entry, String>>, CliError> {
        match self {
            Self::Saved(entries) => Ok(entries.next().map(Ok)),
            Self::Lines(lines) => assembled(|_| scripted(lines)),
            Self::Terminal(editor, history) => assembled(|prompt| typed(editor, history.as_deref(), prompt)),
        }
    }
}

/// What a source gives when it is asked for a line.
enum EntryLine {
    Text(String),
    /// Ctrl-C: what was typed so far is discarded.
    Interrupted,
    /// There is no further line.
    End,
}

/// The next entry of the lines that `next` gives, which shows a prompt to a person.
fn assembled(
    mut next: impl FnMut(&str) -> Result<EntryLine, CliError>,
) -> Result<Option<Result<Entry, String>>, CliError> {
    let mut text = String::new();
    let mut quoted = false;
    loop {
        let prompt = if text.is_empty() && !quoted { "> " } else { "… " };
        let line = match next(prompt)? {
            EntryLine::Text(line) => line,
            EntryLine::Interrupted => {
                text.clear();
                quoted = false;
                continue;
            }
            EntryLine::End if quoted => {
                return Ok(Some(Err(format!(
                    "the {QUOTES} is not closed; write {QUOTES} alone on a line behind the text"
                ))));
            }
            EntryLine::End => {
                return Ok(Some(text).filter(|text| !text.trim().is_empty()).map(|text| Entry::parse(&text)));
            }
        };
        if line.trim() == QUOTES {
            let is_blank = text.trim().is_empty();
            if quoted && !is_blank {
                return Ok(Some(Ok(Entry::Say(text.trim_end_matches('\n').to_owned()))));
            }
            if is_blank {
                text.clear();
            }
            quoted = !quoted;
            continue;
        }
        match line.strip_suffix('\\') {
            _ if quoted => text = text + &line + "\n",
            Some(line) => text = text + line + "\n",
            None => text += &line,
        }
        if text.len() as u64 > LONGEST {
            return Err(CliError::Usage(format!("a message has more than {} MiB", LONGEST >> 20)));
        }
        if !quoted && !line.ends_with('\\') {
            if !text.trim().is_empty() {
                return Ok(Some(Entry::parse(&text)));
            }
            text.clear();
        }
    }
}

/// The next line of a script, or of standard input that is not a terminal.
fn scripted(lines: &mut impl Iterator<Item = io::Result<String>>) -> Result<EntryLine, CliError> {
    match lines.next() {
        None => Ok(EntryLine::End),
        Some(Ok(line)) => Ok(EntryLine::Text(line)),
        Some(Err(error)) if error.kind() == io::ErrorKind::InvalidData => {
            Err(CliError::Usage(format!("standard input: {error}")))
        }
        Some(Err(error)) => Err(CliError::io(Path::new("standard input"))(error)),
    }
}

/// The next line that a person types.
fn typed(editor: &mut DefaultEditor, history: Option<&Path>, prompt: &str) -> Result<EntryLine, CliError> {
    match editor.readline(prompt) {
        Ok(line) => {
            // A history that cannot be kept is no reason to end a conversation.
            let _ = editor.add_history_entry(&line);
            if let Some(file) = history {
                let _ = file.parent().map(durable::make_folder);
                let _ = editor.append_history(file);
            }
            Ok(EntryLine::Text(line))
        }
        Err(ReadlineError::Interrupted) => Ok(EntryLine::Interrupted),
        Err(ReadlineError::Eof) => Ok(EntryLine::End),
        Err(e) => Err(CliError::Usage(format!("the terminal cannot be read: {e}; give --script"))),
    }
}

/// What begins and ends a message of several lines.
const QUOTES: &str = "\"\"\"";

/// Most bytes of a script, of a saved conversation, and of a text on standard input.
pub(crate) const LONGEST: u64 = 64 << 20;

/// The lines of a text that may never end, without a byte order mark in front of it.
fn lines_of(mut text: impl BufRead) -> impl Iterator<Item = io::Result<String>> {
    let lines = std::iter::from_fn(move || {
        let mut line = Vec::new();
        match text.by_ref().take(LONGEST + 1).read_until(b'\n', &mut line) {
            Ok(0) => None,
            Ok(_) if line.len() as u64 > LONGEST => {
                let reason = format!("a line has more than {} MiB", LONGEST >> 20);
                Some(Err(io::Error::new(io::ErrorKind::InvalidData, reason)))
            }
            Ok(_) => {
                let line = line.strip_suffix(b"\n").unwrap_or(&line);
                let line = line.strip_suffix(b"\r").unwrap_or(line);
                let line = String::from_utf8(line.to_vec());
                Some(line.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error)))
            }
            Err(error) => Some(Err(error)),
        }
    });
    lines.enumerate().map(|(i, line)| match line {
        Ok(line) if i == 0 => Ok(file::without_mark(&line).to_owned()),
        line => line,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slash_begins_a_command() {
        let parse = |text: &str| Entry::parse(text);
        assert_eq!(parse("What is 1/2?"), Ok(Entry::Say("What is 1/2?".into())));
        assert_eq!(parse("/system Be short."), Ok(Entry::System(Some("Be short.".into()))));
        assert_eq!(parse("/system"), Ok(Entry::System(None)));
        assert_eq!(parse("/set top_p 0.5"), Ok(Entry::Set("top-p".into(), "0.5".into())));
        assert_eq!(parse("/think auto"), Ok(Entry::Think(None)));
        for wrong in ["/rest", "/reset all", "/save", "/set seed", "/think maybe"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_message_may_have_several_lines() {
        let lines = ["", "one \\", "two", "\"\"\"", "/three", "", "four", "\"\"\"", "five", "/stats", "six"];
        let mut source = Source::Lines(Box::new(lines.map(|line| Ok(line.to_owned())).into_iter()));
        let entered: Vec<Entry> = std::iter::from_fn(|| source.next_entry().unwrap()).map(Result::unwrap).collect();
        let say = |text: &str| Entry::Say(text.into());
        // Text between quotation marks is no command, whatever it begins with.
        assert_eq!(entered, [say("one \ntwo"), say("/three\n\nfour"), say("five"), Entry::Stats, say("six")]);
    }

    /// What comes out of lines and presses of Ctrl-C, which is `^C` here.
    fn entered(lines: &[&str]) -> Vec<Result<Entry, String>> {
        let mut lines = lines.iter();
        let mut next = |_: &str| -> Result<EntryLine, CliError> {
            Ok(match lines.next() {
                None => EntryLine::End,
                Some(&"^C") => EntryLine::Interrupted,
                Some(line) => EntryLine::Text((*line).to_owned()),
            })
        };
        std::iter::from_fn(|| assembled(&mut next).unwrap()).collect()
    }

    #[test]
    fn ctrl_c_discards_a_message_of_several_lines() {
        let say = |text: &str| -> Result<Entry, String> { Ok(Entry::Say(text.into())) };
        assert_eq!(entered(&["\"\"\"", "one", "^C", "/stats", "two"]), [Ok(Entry::Stats), say("two")]);
        assert_eq!(entered(&["one\\", "^C", "two"]), [say("two")]);
        assert_eq!(entered(&["\"\"\"", "^C", "\"\"\"", "/one", "\"\"\"", "^C"]), [say("/one")]);
    }

    #[test]
    fn quotation_marks_that_are_not_closed_are_an_error() {
        for lines in [&["\"\"\"", "/reset"][..], &["\"\"\"", "one"], &["\"\"\""], &["one\\", "\"\"\"", "two"]] {
            let found = entered(lines);
            let [Err(error)] = &found[..] else { panic!("{lines:?}: {found:?}") };
            assert!(error.starts_with("the \"\"\" is not closed; "), "{error}");
        }
        // A pair with nothing in between is no message, and neither is a blank line. They leave nothing behind.
        let found = entered(&["\"\"\"", "", "\"\"\"", "  ", "/stats"]);
        assert!(matches!(&found[..], [Ok(Entry::Stats)]), "{found:?}");
    }

    #[test]
    fn a_saved_conversation_is_said_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let rows = [("system", "Two\nlines."), ("user", "/undo\n\"\"\"\nx"), ("assistant", "no")];
        let rows = rows.map(|(role, content)| serde_json::json!({"role": role, "content": content}));
        for name in ["talk.jsonl", "talk.txt"] {
            let file = folder.path().join(name);
            std::fs::write(&file, transcript::written(&file, rows.iter().cloned())).unwrap();
            let mut source = Source::new(Some(&file)).unwrap();
            let entered: Vec<Entry> = std::iter::from_fn(|| source.next_entry().unwrap()).map(Result::unwrap).collect();
            let expected = [Entry::System(Some("Two\nlines.".into())), Entry::Say("/undo\n\"\"\"\nx".into())];
            assert_eq!(entered, expected, "{name}");
        }
    }
}
