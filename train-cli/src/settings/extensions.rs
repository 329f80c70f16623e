//! How a training file is read, by its extension.

use crate::settings::Format;
use std::path::Path;

/// How a training file is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reader {
    /// As JSON, whose keys tell the format.
    Json,
    /// As text of this format.
    Text(Format),
    /// As a Parquet table.
    Parquet,
    /// As an Arrow table.
    Arrow,
}

impl Reader {
    /// The kind of table that it reads, if it reads one.
    pub fn table(self) -> Option<&'static str> {
        match self {
            Self::Parquet => Some("Parquet"),
            Self::Arrow => Some("Arrow"),
            Self::Json | Self::Text(_) => None,
        }
    }
}

/// The extensions of training files, and how a file with each of them is read.
const EXTENSIONS: [(&str, Reader); 8] = [
    ("jsonl", Reader::Json),
    ("json", Reader::Json),
    ("parquet", Reader::Parquet),
    ("arrow", Reader::Arrow),
    ("feather", Reader::Arrow),
    ("tsv", Reader::Text(Format::Tsv)),
    ("txt", Reader::Text(Format::Text)),
    ("md", Reader::Text(Format::Text)),
];

/// How a file is read, if its extension is known, in capitals or not.
pub fn reader(path: &Path) -> Option<Reader> {
    let extension = path.extension()?.to_str()?;
    EXTENSIONS.iter().find(|(known, _)| known.eq_ignore_ascii_case(extension)).map(|(_, reader)| *reader)
}

/// Whether a file holds a JSON object in each line, by its extension.
pub fn is_jsonl(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("jsonl"))
}

/// All known extensions in words: `.jsonl, .json, … or .md`.
pub fn known() -> String {
    in_words(EXTENSIONS.iter().map(|(extension, _)| *extension).collect())
}

/// The extensions of texts in words: `.txt or .md`.
pub fn of_texts() -> String {
    let texts = EXTENSIONS.iter().filter(|(_, reader)| *reader == Reader::Text(Format::Text));
    in_words(texts.map(|(extension, _)| *extension).collect())
}

fn in_words(extensions: Vec<&str>) -> String {
    let (last, others) = extensions.split_last().expect("the table has extensions of each kind");
    let others: Vec<String> = others.iter().map(|extension| format!(".{extension}")).collect();
    format!("{} or .{last}", others.join(", "))
}
