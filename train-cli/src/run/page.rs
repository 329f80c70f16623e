//! A page of headings, texts and tables, as Markdown for a file, and laid out for a terminal.

use crate::{table::Table, wrapping};
use std::path::PathBuf;

/// A page.
#[derive(Debug, Clone, PartialEq)]
pub struct Page {
    /// The heading of the page.
    pub title: String,
    /// What stands below it.
    pub sections: Vec<Section>,
}

/// A part of a page.
#[derive(Debug, Clone, PartialEq)]
pub struct Section {
    /// The heading of the part, if it has one.
    pub heading: Option<&'static str>,
    /// What stands below it.
    pub content: Content,
}

/// What a part of a page holds.
#[derive(Debug, Clone, PartialEq)]
pub enum Content {
    /// A paragraph.
    Text(String),
    /// A command, which can be copied.
    Command(String),
    /// A picture that lies beside the page: what it shows, and its path.
    Picture(&'static str, PathBuf),
    /// A table.
    Table(Table),
    /// A list.
    List(Vec<String>),
}

impl Page {
    /// The page in Markdown.
    pub fn markdown(&self) -> String {
        let section = |Section { heading, content }: &Section| {
            let content = match content {
                Content::Text(text) => text.clone(),
                Content::Command(command) => format!("    {command}"),
                Content::Picture(what, path) => {
                    let name = path.file_name().unwrap_or_default().to_string_lossy();
                    format!("![{what}]({name})")
                }
                Content::Table(table) => table.markdown(),
                Content::List(items) => items.iter().map(|item| format!("- {item}")).collect::<Vec<_>>().join("\n"),
            };
            heading.map_or(content.clone(), |heading| format!("## {heading}\n{content}"))
        };
        let sections: Vec<String> = self.sections.iter().map(section).collect();
        format!("# {}\n\n{}\n", self.title, sections.join("\n\n"))
    }

    /// The page for a terminal of `columns`: headings at its left edge, and below them what they head, two columns further in.
    /// `bold` stands in front of a heading and behind it. A picture is named if it is there.
    pub fn text(&self, columns: usize, bold: [&str; 2]) -> String {
        let [begin, end] = bold;
        let inner = columns.saturating_sub(INDENT.len()).max(1);
        let section = |Section { heading, content }: &Section| {
            let content = match content {
                Content::Text(text) => wrapping::hanging("", text, Some(inner)),
                Content::Command(command) => format!("  {command}"),
                Content::Picture(what, path) if path.exists() => format!("{what}: {}", path.display()),
                Content::Picture(..) => return None,
                Content::Table(table) => table.text(Some(inner)),
                Content::List(items) => {
                    let item = |item: &String| wrapping::hanging("- ", item, Some(inner));
                    items.iter().map(item).collect::<Vec<_>>().join("\n")
                }
            };
            let content: Vec<String> = content.lines().map(|line| format!("{INDENT}{line}")).collect();
            let heading = heading.map_or(String::new(), |heading| format!("{begin}{heading}{end}\n"));
            Some(heading + &content.join("\n"))
        };
        let sections: Vec<String> = self.sections.iter().filter_map(section).collect();
        format!("{begin}{}{end}\n\n{}\n", self.title, sections.join("\n\n"))
    }
}

/// How far the sections of a page are indented on a terminal.
const INDENT: &str = "  ";

#[cfg(test)]
mod tests {
    use super::*;
    use textwrap::core::display_width;

    fn page() -> Page {
        let section = |heading, content| Section { heading, content };
        let answers =
            [("Who are you?", "I am a tiny Qwen3 trained in Rust."), ("你是誰？", "我是用 Rust 訓練的小小 Qwen3。")];
        let answers = answers.map(|(prompt, answer)| vec![prompt.repeat(3), answer.repeat(3)]);
        let warning = "the loss of step 7 is ten times that of the steps before it; the learning rate may be too high for these rows";
        Page {
            title: "demo".into(),
            sections: vec![
                section(None, Content::Command("train-cli fit --demo".into())),
                section(None, Content::Picture("losses", "/nowhere/loss.svg".into())),
                section(Some("Last answers"), Content::Table(Table::new(&["prompt", "answer"], answers))),
                section(Some("Warnings"), Content::List(vec![warning.into(), "short".into()])),
            ],
        }
    }

    #[test]
    fn a_page_for_a_terminal_fits_it_and_has_no_signs_of_markdown() {
        for columns in [80, 120] {
            let text = page().text(columns, ["", ""]);
            assert!(text.lines().all(|line| display_width(line) <= columns), "{columns}:\n{text}");
            assert!(!text.contains(['|', '#', '*', '!']), "{text}");
            assert!(text.starts_with("demo\n\n    train-cli fit --demo\n\nLast answers\n  prompt  "), "{text}");
            assert!(text.contains("\n\nWarnings\n  - the loss of step 7"), "{text}");
            // A cell that goes on is indented further.
            let goes_on =
                |line: &str| line.starts_with("    ") && !line.starts_with("     ") && !line.contains("train-cli");
            assert_eq!(text.lines().any(goes_on), columns == 80, "the second line of the warning is indented: {text}");
            // A picture that is not there is not named.
            assert!(!text.contains("loss.svg"), "{text}");
        }
        assert!(page().text(80, ["<b>", "</b>"]).contains("\n<b>Warnings</b>\n"));
    }

    #[test]
    fn a_page_in_markdown_has_a_line_for_each_row() {
        let text = page().markdown();
        assert!(text.starts_with("# demo\n\n    train-cli fit --demo\n\n![losses](loss.svg)\n\n## Last answers\n| prompt | answer |\n|---|---|\n"));
        assert!(text.ends_with("these rows\n- short\n"), "{text}");
    }
}
