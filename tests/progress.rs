//! A terminal shows at its bottom how far long work has come; where standard error is a file, nothing of that is in it.

use crate::support::{
    files::{program, run, tiny_model},
    skipped_for,
};
use std::{path::Path, process::Command};

const FIT: &str =
    "fit -m m -d m/demo.tsv --device cpu --max-seq-length 64 --max-steps 3 --eval-steps 3 --logging-steps 3";

/// What the program writes to a terminal of 100 columns, which util-linux's `script` makes.
fn on_a_terminal(d: &Path, args: &str) -> Option<String> {
    let line = format!("stty cols 100; exec '{}' {args}", program().display());
    let out = Command::new("script").args(["-qec", &line, "/dev/null"]).current_dir(d).env("TERM", "xterm").output();
    let Ok(out) = out else {
        skipped_for("util-linux's `script` is not installed");
        return None;
    };
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(out.status.success(), "{text}");
    Some(text)
}

#[test]
fn a_terminal_shows_how_far_a_run_has_come() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let Some(text) = on_a_terminal(d, &format!("{FIT} -o r")) else { return };
    for part in ["0/3 steps", "the first step", "3/3 steps", "100 %", "evaluating", "exporting · ", "loading"] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    // What is written has bytes and a rate, and the line of memory says what it counts.
    let rates = |text: &str, what: &str| {
        let lines = text.split(['\r', '\n']).filter(|line| line.contains(what));
        assert!(lines.clone().any(|line| line.contains(" of ") && line.contains("B/s")), "{what} in {text}");
    };
    rates(&text, "exporting · ");
    assert!(text.contains("  held MiB"), "{text}");
    // Other commands that write models show it, too.
    for (args, what) in [
        ("convert m m.dat --dtype nvfp4", "converting · "),
        ("convert m m.gguf --dtype q8-0", "converting · "),
        ("export-hf -m r -o hf", "exporting · "),
        ("export-dat --checkpoint r/checkpoint-3 --output-dat e.dat --device cpu", "exporting · "),
    ] {
        rates(&on_a_terminal(d, args).unwrap_or_default(), what);
    }
    // The line is gone when the run ends: what follows the last erased line is words.
    let last = text.rsplit("\u{1b}[2K").next().unwrap();
    assert!(!last.contains("steps ·") && last.contains("next:"), "{last:?}");
    // Every line is whole: the bar does not stand in it.
    let lines: Vec<&str> = text.split(['\n', '\r']).filter(|line| line.contains("3/3  ")).collect();
    assert_eq!(lines.len(), 1, "{lines:?}");
}

#[test]
fn a_file_has_plain_lines_only() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let out = run(d, &format!("{FIT} -o r").split(' ').collect::<Vec<_>>());
    let text = String::from_utf8(out.stderr).unwrap();
    assert!(text.contains("3/3  ") && !text.contains(['\r', '\u{1b}', '━']) && !text.contains("steps ·"), "{text}");
    assert!(run(d, &["runs", "show", "r"]).stderr.is_empty());
}
