//! A table as text, and as Markdown. On a terminal its columns share the width: texts are broken into lines inside their
//! columns. Without a width, as for a file or a pipe, each row is one line, which scripts can read.

use crate::wrapping;
use textwrap::core::display_width;

/// A table of texts. Its cells have no line breaks and no control characters.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Table {
    heads: Vec<String>,
    rows: Vec<Vec<String>>,
    /// Which columns hold numbers: they are aligned at the right, and never broken.
    numbers: Vec<usize>,
}

/// Spaces between two columns.
const GAP: usize = 2;

/// Where long words are broken, a column that has some keeps at least this width.
const LEAST: usize = 16;

impl Table {
    /// A table with these heads. Each row has a cell for each of them.
    pub fn new<T: AsRef<str>>(heads: &[T], rows: impl IntoIterator<Item = Vec<String>>) -> Self {
        let row = |cells: Vec<String>| cells.iter().map(|cell| on_one_line(cell)).collect();
        Self {
            heads: heads.iter().map(|head| on_one_line(head.as_ref())).collect(),
            rows: rows.into_iter().map(row).collect(),
            numbers: vec![],
        }
    }

    /// The same table with numbers in these columns.
    pub fn with_numbers(self, columns: &[usize]) -> Self {
        Self { numbers: columns.to_vec(), ..self }
    }

    /// The table in Markdown.
    pub fn markdown(&self) -> String {
        let line = |cells: &[String]| {
            let cells: Vec<String> = cells.iter().map(|cell| cell.replace('|', "\\|")).collect();
            format!("| {} |", cells.join(" | "))
        };
        let rule = format!("|{}", "---|".repeat(self.heads.len()));
        let rows = self.rows.iter().map(|row| line(row));
        [line(&self.heads), rule].into_iter().chain(rows).collect::<Vec<_>>().join("\n")
    }

    /// The table as text, in at most `width` columns of a terminal. If its columns cannot share them, each row becomes a list.
    pub fn text(&self, width: Option<usize>) -> String {
        let whole = self.widths(display_width);
        let Some(columns) = width.filter(|columns| total(&whole) > *columns) else { return self.laid_out(&whole) };
        let narrow = |breaks_words: bool| {
            let least = self.widths(|cell| match wrapping::longest(cell, false) {
                word if breaks_words => wrapping::longest(cell, true).max(word.min(LEAST)),
                word => word,
            });
            let least =
                (0..whole.len()).map(|column| if self.is_number(column) { whole[column] } else { least[column] });
            shared(&whole, &least.collect::<Vec<_>>(), columns)
        };
        match narrow(false).or_else(|| narrow(true)) {
            Some(widths) => self.laid_out(&widths),
            None => self.lists(columns),
        }
    }

    /// The heads, if there are any, and the rows.
    fn lines(&self) -> impl Iterator<Item = &Vec<String>> {
        let has_heads = self.heads.iter().any(|head| !head.is_empty());
        has_heads.then_some(&self.heads).into_iter().chain(&self.rows)
    }

    /// For each column the largest width of its cells.
    fn widths(&self, width: impl Fn(&str) -> usize) -> Vec<usize> {
        let largest = |column: usize| self.lines().map(|cells| width(&cells[column])).max().unwrap_or(0);
        (0..self.heads.len()).map(largest).collect()
    }

    fn is_number(&self, column: usize) -> bool {
        self.numbers.contains(&column)
    }

    /// The rows, each in as many lines as its highest cell has. A column is as wide as its widest line.
    fn laid_out(&self, widths: &[usize]) -> String {
        let broken = |cells: &Vec<String>| -> Vec<Vec<String>> {
            cells.iter().zip(widths).map(|(cell, width)| wrapping::cell(cell, *width)).collect()
        };
        let rows: Vec<Vec<Vec<String>>> = self.lines().map(broken).collect();
        let used = |column: usize| rows.iter().flat_map(|row| &row[column]).map(|line| display_width(line)).max();
        let used: Vec<usize> = (0..widths.len()).map(|column| used(column).unwrap_or(0)).collect();
        let line = |row: &[Vec<String>], number: usize| {
            let cells = row.iter().zip(&used).enumerate().map(|(column, (cell, width))| {
                let text = cell.get(number).map_or("", String::as_str);
                let padding = " ".repeat(width.saturating_sub(display_width(text)));
                if self.is_number(column) { padding + text } else { text.to_owned() + &padding }
            });
            cells.collect::<Vec<_>>().join(&" ".repeat(GAP)).trim_end().to_owned()
        };
        let height = |row: &[Vec<String>]| row.iter().map(Vec::len).max().unwrap_or(0);
        let lines = rows.iter().flat_map(|row| (0..height(row)).map(|number| line(row, number)).collect::<Vec<_>>());
        lines.collect::<Vec<_>>().join("\n")
    }

    /// Each row as a list: its first cell, and below it the other cells with their heads.
    fn lists(&self, columns: usize) -> String {
        let names = self.heads.iter().skip(1).map(|head| display_width(head)).max().unwrap_or(0).min(columns / 2);
        let indent = GAP + names + GAP;
        let mut lines = Vec::new();
        for row in &self.rows {
            lines.extend(wrapping::cell(row.first().map_or("", String::as_str), columns));
            for (head, cell) in self.heads.iter().zip(row).skip(1) {
                let heads = wrapping::cell(head, names.max(1));
                let texts = wrapping::cell(cell, columns.saturating_sub(indent).max(1));
                for number in 0..heads.len().max(texts.len()) {
                    let part = |list: &[String]| list.get(number).cloned().unwrap_or_default();
                    let (head, text) = (part(&heads), part(&texts));
                    let padding = " ".repeat(names.saturating_sub(display_width(&head)));
                    lines.push(format!("  {head}{padding}  {text}").trim_end().to_owned());
                }
            }
        }
        lines.join("\n")
    }
}

/// The width of a table whose columns have these widths.
fn total(widths: &[usize]) -> usize {
    widths.iter().sum::<usize>() + GAP * widths.len().saturating_sub(1)
}

/// Makes the widest columns narrower, none narrower than its least width, until the table fits. None if it cannot fit.
fn shared(whole: &[usize], least: &[usize], columns: usize) -> Option<Vec<usize>> {
    let mut widths = whole.to_vec();
    while total(&widths) > columns {
        let wide = (0..widths.len()).filter(|column| widths[*column] > least[*column]);
        let widest = wide.max_by_key(|column| widths[*column])?;
        widths[widest] -= 1;
    }
    Some(widths)
}

/// A text without line breaks and control characters.
fn on_one_line(text: &str) -> String {
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(cells: &[&str]) -> Vec<String> {
        cells.iter().map(|cell| (*cell).to_owned()).collect()
    }

    fn runs() -> Table {
        let heads = ["run", "started", "recipe", "state", "loss", "evaluation loss", "note"];
        let one = [
            "20261126-233736_demo",
            "2026-11-26 23:37:36",
            "w4",
            "complete, 60 steps",
            "0.1540",
            "0.1468",
            "你是誰？我是小小的模型。",
        ];
        let two = ["mine", "2026-11-26 23:40:01", "w4a4", "not complete, 7 steps", "12.1540", "–", ""];
        Table::new(&heads, [row(&one), row(&two)]).with_numbers(&[4])
    }

    #[test]
    fn a_table_fits_its_terminal() {
        for width in [60, 80, 100, 120, 160] {
            let text = runs().text(Some(width));
            assert!(text.lines().all(|line| display_width(line) <= width), "{width}:\n{text}");
            // Every letter is there, and no word is broken where the words fit.
            let letters = |text: &str| {
                let mut letters: Vec<char> = text.chars().filter(|c| !c.is_whitespace()).collect();
                letters.sort_unstable();
                letters
            };
            if width >= 80 {
                assert_eq!(letters(&text), letters(&runs().text(None)), "{width}:\n{text}");
                assert!(text.contains("20261126-233736_demo") && text.contains("complete,"), "{width}:\n{text}");
                assert!(text.starts_with("run  "), "{width}: a list\n{text}");
            }
        }
    }

    #[test]
    fn a_file_gets_one_line_for_each_row() {
        let text = runs().text(None);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        assert_eq!(lines, runs().text(Some(200)).lines().collect::<Vec<_>>(), "a wide terminal gets the same");
        // Numbers end in one column, and texts begin in one.
        let end = |line: &str, word: &str| line.find(word).map(|at| display_width(&line[..at]) + word.len());
        assert_eq!(end(lines[1], "0.1540"), end(lines[2], "12.1540"), "{text}");
        assert_eq!(lines[1].find("w4"), lines[2].find("w4a4"), "{text}");
    }

    /// A Chinese character takes two columns.
    #[test]
    fn chinese_cells_are_aligned() {
        let rows = [row(&["你是誰？", "a"]), row(&["who", "b"])];
        assert_eq!(Table::new(&["prompt", "x"], rows).text(None), "prompt    x\n你是誰？  a\nwho       b");
    }

    #[test]
    fn a_row_that_cannot_share_the_width_is_a_list() {
        let digest = "d8be8281cebcd2e011196d164e8afe2a01cf0a684031b350d94e5772df5e79f4";
        let heads = ["", "a-run", "b-run", "c-run", "d-run", "e-run"];
        let wide = Table::new(&heads, [row(&["SHA-256", digest, digest, digest, digest, digest])]);
        let text = wide.text(Some(80));
        assert!(text.starts_with(&format!("SHA-256\n  a-run  {digest}\n  b-run  ")), "{text}");
        let narrow = wide.text(Some(40));
        assert!(narrow.lines().all(|line| display_width(line) <= 40), "{narrow}");
        assert_eq!(narrow.lines().count(), 1 + 5 * 3, "{narrow}");
    }

    #[test]
    fn a_narrow_column_is_broken_where_words_end() {
        let table = Table::new(&["a", "b"], [row(&["one two three", "four"])]);
        assert_eq!(table.text(Some(13)), "a        b\none two  four\nthree");
        // Without heads there is no line for them, and a bar of a cell ends no cell of Markdown.
        let plain = Table::new(&["", ""], [row(&["a|b", "x\ny\u{1b}z"])]);
        assert_eq!(plain.text(None), "a|b  x y z");
        assert_eq!(plain.markdown(), "|  |  |\n|---|---|\n| a\\|b | x y z |");
    }
}
