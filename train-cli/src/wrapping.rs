//! How a text is broken into lines that fit a terminal: between words, and between Chinese characters, which need no space.
//! Without a width, as for a file or a pipe, every line stays whole.

use textwrap::{
    WordSeparator,
    core::{Word, break_words, display_width},
    wrap_algorithms::wrap_first_fit,
};

/// Breaks the lines of a text. A line continues where its text begins: behind a label, which two spaces or more end, or else two
/// columns further in than its first word.
pub fn lines(text: &str, width: Option<usize>) -> String {
    let Some(columns) = width else { return text.to_owned() };
    let broken = text.split('\n').map(|line| {
        match text_after_label(line).filter(|at| display_width(&line[..*at]) <= columns / 2) {
            Some(at) => hanging(&line[..at], &line[at..], width),
            None => {
                let indent = line.len() - line.trim_start_matches(' ').len();
                continued(&line[..indent], &line[indent..], columns, indent + 2)
            }
        }
    });
    broken.collect::<Vec<_>>().join("\n")
}

/// Where the text of a line begins that has a label.
fn text_after_label(line: &str) -> Option<usize> {
    let label = line.len() - line.trim_start_matches(' ').len();
    let gap = label + line[label..].find("  ")?;
    Some(line.len() - line[gap..].trim_start_matches(' ').len())
}

/// Breaks a text that stands behind `first`. Its lines are indented as far as `first` reaches. A word that is longer than a line
/// stays whole, so that a path can be copied.
pub fn hanging(first: &str, text: &str, width: Option<usize>) -> String {
    match width {
        Some(columns) => continued(first, text, columns, display_width(first)),
        None => format!("{first}{text}"),
    }
}

/// Breaks a text behind `first` into lines of at most `columns`, and indents all but the first line.
fn continued(first: &str, text: &str, columns: usize, indent: usize) -> String {
    let room = |taken: usize| columns.saturating_sub(taken).max(1);
    let lines = fitted(&words(text), room(display_width(first)), room(indent));
    format!("{first}{}", lines.join(&format!("\n{}", " ".repeat(indent))))
}

/// Breaks the text of a table's cell into lines of at most `columns`. A word that is longer is broken, too: behind a sign such as
/// a slash if it has one, else anywhere.
pub fn cell(text: &str, columns: usize) -> Vec<String> {
    let short = words(text).into_iter().flat_map(|word| if word.width > columns { signs(&word) } else { vec![word] });
    fitted(&break_words(short, columns), columns, columns)
}

/// The width of the longest part of a cell that stays whole: a word, or if long words are broken a part of one.
pub fn longest(text: &str, breaks_words: bool) -> usize {
    let words = words(text);
    let parts = words.iter().flat_map(|word| if breaks_words { signs(word) } else { vec![*word] });
    parts.map(|part| part.width).max().unwrap_or(0)
}

/// The lines of words: the first of at most `first` columns, the others of at most `rest`.
fn fitted(words: &[Word<'_>], first: usize, rest: usize) -> Vec<String> {
    let joined = |line: &[Word<'_>]| {
        let line: String = line.iter().flat_map(|word| [word.word, word.whitespace]).collect();
        line.trim_end_matches(' ').to_owned()
    };
    wrap_first_fit(words, &[first as f64, rest as f64]).into_iter().map(joined).collect()
}

/// The parts of a text between which a line may end.
fn words(text: &str) -> Vec<Word<'_>> {
    WordSeparator::AsciiSpace.find_words(text).flat_map(|word| parts(&word, ends_between)).collect()
}

/// The parts of a word, each of which but the last ends with a sign.
fn signs<'a>(word: &Word<'a>) -> Vec<Word<'a>> {
    parts(word, |before, _| "/.-,:=".contains(before))
}

/// A word in parts, which end where `ends` says so of the characters on both sides.
fn parts<'a>(word: &Word<'a>, ends: impl Fn(char, char) -> bool) -> Vec<Word<'a>> {
    let text: &'a str = word.word;
    let following = text.char_indices().skip(1);
    let cuts = text.chars().zip(following).filter(|(before, (_, after))| ends(*before, *after));
    let (mut parts, mut from) = (Vec::new(), 0);
    for to in cuts.map(|(_, (at, _))| at).chain([text.len()]) {
        parts.push(Word::from(&text[from..to]));
        from = to;
    }
    if let Some(last) = parts.last_mut() {
        last.whitespace = word.whitespace;
    }
    parts
}

/// Whether a line may end between two characters that no space separates: one of them is Chinese, or as wide, and neither is a
/// sign that belongs to the other.
fn ends_between(before: char, after: char) -> bool {
    let width = |c: char| display_width(c.encode_utf8(&mut [0; 4]));
    let (left, right) = (width(before), width(after));
    left.min(right) > 0
        && left.max(right) > 1
        && !"（「『【《〈".contains(before)
        && !"，。、；：？！）」』】》〉…,.;:?!)".contains(after)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_fit_and_keep_words_whole() {
        let text = "the library libnvrtc is not found; install the CUDA 13 toolkit, or: pip install --target cuda \
                    'nvidia-cuda-nvrtc==13.*' 'nvidia-cuda-runtime==13.*', then set CUDA_PATH as doc/guide/first-run.md says";
        for width in [80, 120] {
            let shown = hanging("–   NVRTC    ", text, Some(width));
            assert!(shown.lines().count() > 1, "{shown}");
            assert!(shown.lines().all(|line| display_width(line) <= width), "{width}: {shown}");
            assert!(shown.lines().skip(1).all(|line| line.starts_with(&" ".repeat(13))), "{shown}");
            assert_eq!(shown.split_whitespace().skip(2).collect::<Vec<_>>(), text.split(' ').collect::<Vec<_>>());
        }
        assert_eq!(hanging("a  ", text, None), format!("a  {text}"), "a file gets one line");
    }

    #[test]
    fn chinese_text_is_broken_between_its_characters() {
        let text = "我是用 Rust 訓練的小小 Qwen3，會回答問題。".repeat(4);
        for width in [40, 80, 120] {
            let shown = hanging("  after     ", &text, Some(width));
            let lines: Vec<&str> = shown.lines().collect();
            assert!(lines.iter().all(|line| display_width(line) <= width), "{width}: {shown}");
            // The longest word of this text has seven columns, and a space stands in front of it.
            assert!(lines.iter().rev().skip(1).all(|line| display_width(line) + 8 > width), "{width}: {shown}");
            assert!(lines.iter().all(|line| !line.trim_start().starts_with(['，', '。'])), "{shown}");
            let letters = |text: &str| text.chars().filter(|c| !c.is_whitespace()).collect::<String>();
            assert_eq!(letters(&shown), letters(&format!("after{text}")));
        }
    }

    #[test]
    fn a_line_continues_where_its_text_begins() {
        let shown = |text: &str| lines(text, Some(24));
        assert_eq!(
            shown("/undo  take the last message back\n/exit  end"),
            "/undo  take the last\n       message back\n/exit  end"
        );
        assert_eq!(shown("warning: the last checkpoint is broken"), "warning: the last\n  checkpoint is broken");
        assert_eq!(
            shown("  saved  runs/mine/checkpoint-1000"),
            "  saved  runs/mine/checkpoint-1000",
            "a path stays whole"
        );
        // What stands in front of a gap is no label if it takes most of the line.
        assert_eq!(shown("a sentence, and then  two spaces"), "a sentence, and then\n  two spaces");
        assert_eq!(lines("warning: a\n  b  c", None), "warning: a\n  b  c");
        assert_eq!(shown("\n\n"), "\n\n");
    }

    #[test]
    fn a_long_word_of_a_cell_is_broken_behind_a_sign() {
        assert_eq!(cell("model.layers.0.self_attn.q_proj.weight", 24), ["model.layers.0.", "self_attn.q_proj.weight"]);
        assert_eq!(cell("sha d8be8281cebc", 8), ["sha", "d8be8281", "cebc"]);
        assert_eq!(cell("你是誰？", 4), ["你是", "誰？"]);
        assert_eq!(cell("", 4), [""]);
        assert_eq!((longest("a two-part word", false), longest("a two-part word", true)), (8, 4));
    }
}
