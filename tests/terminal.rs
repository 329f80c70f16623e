//! What people read on a terminal fits it: tables share its width, texts are broken between words, and nothing is Markdown. A pipe
//! gets whole lines, which scripts can read.

use crate::support::files::{ok, run, terminal, tiny_model};
use std::{fs, path::Path};

/// The lines of a terminal, without the marks for colors and for what is erased.
fn plain(text: &str) -> Vec<String> {
    let mut parts = text.split("\u{1b}[");
    let first = parts.next().unwrap_or_default().to_owned();
    let text = parts.fold(first, |text, part| {
        let end = part.find(|c: char| c.is_ascii_alphabetic()).map_or(part.len(), |at| at + 1);
        text + &part[end..]
    });
    text.split(['\r', '\n']).filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

/// The columns that a line takes. A Chinese character takes two.
fn columns(line: &str) -> usize {
    line.chars().map(|c| if ('\u{2e80}'..='\u{ff60}').contains(&c) { 2 } else { 1 }).sum()
}

/// A line of what a command prints that is longer than the terminal.
fn longer(lines: &[String], width: usize) -> Option<&String> {
    lines.iter().find(|line| columns(line) > width)
}

const LONG: &str = "runs/20261127-a-run-with-a-long-name";

/// Two run folders, with an answer in Chinese.
fn two_runs(d: &Path) {
    tiny_model(&d.join("m"), true);
    for (output, rate) in [(LONG, "1e-3"), ("runs/two", "1e-4")] {
        let words =
            "fit -m m -d m/demo.tsv --device cpu --max-seq-length 64 --max-steps 2 --eval-steps 1 --sample-prompt a";
        let words: Vec<&str> = words.split(' ').chain(["--learning-rate", rate, "-o", output]).collect();
        ok(d, &words);
        let answer = "我是用 Rust 訓練的小小 Qwen3，會回答問題。".repeat(4);
        let line = serde_json::json!({"step": 2, "prompt": "你是誰？你會做什麼？", "answer": answer});
        fs::write(d.join(output).join("samples.jsonl"), format!("{line}\n")).unwrap();
    }
}

#[test]
fn tables_fit_the_terminal_and_a_pipe_gets_whole_lines() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    two_runs(d);
    let compare = format!("runs compare {LONG} runs/two");
    for args in ["runs list", compare.as_str(), "inspect m", "inspect runs/two/final"] {
        let piped = ok(d, &args.split(' ').collect::<Vec<_>>());
        for width in [80, 120] {
            let Some(text) = terminal(d, width, args) else { return };
            let lines = plain(&text);
            assert_eq!(longer(&lines, width), None, "{args}, {width} columns: {text}");
            let letters = |text: &str| {
                let mut letters: Vec<char> = text.chars().filter(|c| !c.is_whitespace()).collect();
                letters.sort_unstable();
                letters
            };
            if args.starts_with("inspect") {
                assert_eq!(letters(&lines.concat()), letters(&piped), "{args}: something is not shown: {text}");
            }
        }
    }
    // One line for each run, and for each tensor one with as many words as the first line has.
    assert_eq!(ok(d, &["runs", "list"]).lines().count(), 3);
    let piped = ok(d, &["inspect", "m"]);
    let rows: Vec<usize> = piped.lines().map(|line| line.split_whitespace().count()).collect();
    assert!(rows.len() > 10 && rows[..rows.len() - 1].iter().all(|words| *words == 6), "{piped}");
}

#[test]
fn a_summary_on_a_terminal_is_no_markdown() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    two_runs(d);
    for width in [80, 120] {
        let Some(text) = terminal(d, width, &format!("runs show {LONG}")) else { return };
        // The command stays one line, which can be copied.
        let (commands, lines): (Vec<_>, Vec<_>) =
            plain(&text).into_iter().partition(|line| line.starts_with("    train-cli fit "));
        assert_eq!(commands.len(), 1, "{text}");
        assert_eq!(longer(&lines, width), None, "{width} columns: {text}");
        assert!(!lines.iter().any(|line| line.contains(['|', '#']) || line.contains("![")), "{text}");
        for heading in ["Data", "Evaluations", "Last answers", "Exported files", "Settings that are not the defaults"] {
            assert!(lines.iter().any(|line| line == heading), "no {heading}: {text}");
        }
        let shown: String = lines.concat().split_whitespace().collect();
        assert!(shown.contains("complete,2steps") && shown.contains("losses:runs/20261127"), "{text}");
    }
    let markdown = fs::read_to_string(d.join(LONG).join("summary.md")).unwrap();
    let piped = String::from_utf8(run(d, &["runs", "show", LONG]).stdout).unwrap();
    let figures = |text: &str| text.split("## Last answers").next().unwrap().to_owned();
    assert_eq!(figures(&piped), figures(&markdown));
}

/// The commands of a conversation, and its figures, which are longer than the terminal is wide.
#[test]
fn what_chat_says_is_broken_between_words() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    fs::write(d.join("script.txt"), "/help\n/stats\n").unwrap();
    for width in [50, 80] {
        let Some(text) = terminal(d, width, "chat -m m --device cpu --script script.txt") else { return };
        let mut lines = plain(&text);
        // The progress of loading takes two lines of a narrow terminal, and is taken away.
        lines.retain(|line| !line.contains("loading ·"));
        assert_eq!(longer(&lines, width), None, "{width} columns: {text}");
        let begins = |start: &str| lines.iter().any(|line| line.starts_with(start));
        assert!(begins("/system [TEXT]      set the system message"), "{text}");
        // What continues a line is indented: by the width of the names, and by two columns where there is no name.
        assert!(width > 50 || begins(&" ".repeat(20)), "{text}");
        assert!(
            begins("A line that ends with") && lines.iter().any(|line| line.ends_with("is one message.")),
            "{text}"
        );
        assert!(lines.iter().any(|line| line.starts_with("  ") && line.ends_with("is one message.")), "{text}");
    }
}
