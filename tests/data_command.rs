//! `data preview` shows the tokens that the loss counts, and `data stats` counts what a run would train on and leave out.

use crate::support::{
    files::{demo_file, ok, peak_memory, refused, run, tiny_model},
    golden,
};
use model_qwen3::tokenizer::Tokenizer;
use serde_json::Value;
use std::{fs, path::Path};

/// Rows of a question and an answer; an answer of weight 0 is not learned.
fn rows(folder: &Path, rows: &[(&str, &str, f64)]) {
    let row = |(question, answer, weight): &(&str, &str, f64)| {
        serde_json::json!({"messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer, "weight": weight},
        ]})
        .to_string()
            + "\n"
    };
    fs::write(folder.join("rows.jsonl"), rows.iter().map(row).collect::<String>()).unwrap();
}

fn rendered(question: &str, answer: &str) -> String {
    format!("<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>")
}

fn tokens(text: &str) -> usize {
    Tokenizer::from_file(&demo_file("tokenizer.json")).unwrap().encode(text).unwrap().len()
}

#[test]
fn a_preview_marks_what_the_loss_counts() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    rows(d, &[("hi", "yo", 1.0), ("who?", "me 你好", 1.0), ("no", "more", 1.0)]);
    let shown = |more: &[&str]| ok(d, &[&["data", "preview", "rows.jsonl", "-m", "m"][..], more].concat());
    let text = shown(&["-n", "2"]);
    assert!(text.contains(&rendered("hi", "yo").replace("yo<|im_end|>", "⟦yo<|im_end|>⟧")), "{text}");
    assert!(text.contains("⟦me 你好<|im_end|>⟧") && !text.contains("more"), "{text}");
    let (all, counted) = (tokens(&rendered("hi", "yo")), tokens("yo<|im_end|>"));
    assert!(text.contains(&format!("rows.jsonl:1 · {all} tokens · the loss counts {counted}")), "{text}");
    let text = shown(&["-n", "1", "--loss-on", "all"]);
    assert!(text.contains("<|im_start|>⟦user\nhi"), "the first token is never predicted: {text}");
    // What a text holds does nothing to a terminal.
    fs::write(d.join("rows.jsonl"), "{\"prompt\": \"q\", \"completion\": \"a\\u001b[2Jb\\r\"}\n").unwrap();
    assert!(shown(&[]).contains("⟦a\\u{1b}[2Jb\\r<|im_end|>⟧"), "{}", shown(&[]));
    // Only as much of a document is read as is shown.
    fs::write(d.join("long.txt"), "one two three.\n".repeat(100_000)).unwrap();
    let text = ok(d, &["data", "preview", "long.txt", "-m", "m", "-n", "2", "--max-seq-length", "16"]);
    assert_eq!(text.matches("16 tokens, as many as --max-seq-length allows").count(), 2, "{text}");
    let missing = run(d, &["data", "preview", "none.jsonl", "-m", "m"]);
    assert_eq!(missing.status.code(), Some(2), "{}", String::from_utf8_lossy(&missing.stderr));
}

#[test]
fn stats_count_what_a_run_would_take_and_leave_out() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let long = "word ".repeat(40);
    rows(
        d,
        &[("hi", "yo", 1.0), ("hi", "yo", 1.0), ("hi", &long, 1.0), ("hi", "not this", 0.0), ("bye", "so long", 1.0)],
    );
    let args = ["data", "stats", "rows.jsonl", "-m", "m", "--max-seq-length", "64"];
    let found: Value = serde_json::from_str(&ok(d, &[&args[..], &["--json"]].concat())).unwrap();
    let lengths = [rendered("hi", "yo"), rendered("bye", "so long"), rendered("hi", &long)].map(|text| tokens(&text));
    assert!(lengths[1] <= 64 && lengths[2] > 64, "{lengths:?}");
    let all = 2 * lengths[0] + lengths[1] + lengths[2];
    assert_eq!(
        [&found["rows"], &found["sequences"], &found["tokens"]].map(|n| n.as_u64().unwrap()),
        [5, 4, all as u64]
    );
    assert_eq!(found["duplicates"], 1);
    assert_eq!(found["not_supervised"], serde_json::json!(["rows.jsonl:4"]));
    assert_eq!(found["overlong"], serde_json::json!(["rows.jsonl:3"]));
    assert_eq!([&found["lengths"]["shortest"], &found["lengths"]["longest"]], [lengths[0], lengths[2]]);
    let counted: u64 =
        found["lengths"]["histogram"].as_array().unwrap().iter().map(|bin| bin[1].as_u64().unwrap()).sum();
    assert_eq!(counted, 4);
    // The run takes what is not left out: the rows that fit.
    let fitting = 2 * lengths[0] + lengths[1];
    assert_eq!(found["packed"]["rows"], fitting.div_ceil(64));
    let filled = found["packed"]["filled"].as_f64().unwrap();
    assert!((filled - fitting as f64 / (fitting.div_ceil(64) * 64) as f64).abs() < 1e-9, "{found}");
    let words = "fit -m m -d rows.jsonl --device cpu --max-seq-length 64 --val-split 0 --dry-run";
    let plan = run(d, &words.split(' ').collect::<Vec<_>>());
    let said = String::from_utf8_lossy(&plan.stdout).into_owned() + &String::from_utf8_lossy(&plan.stderr);
    assert!(said.contains(&format!("3 train / 0 eval · {fitting} tokens")), "{said}");
    let table = ok(d, &args);
    for part in [
        "rows        5 · 4 sequences",
        "1 row in which the loss counts nothing or whose weight is 0: rows.jsonl:4",
        "--overlong decides",
    ] {
        assert!(table.contains(part), "{part}: {table}");
    }
    // Rows are counted whole, so that none is left out for its length.
    rows(d, &[("hi", "not this", 0.0)]);
    let stderr = refused(d, &args, 3);
    assert!(stderr.contains("no row is left: 1 row dropped, not supervised or of weight 0"), "{stderr}");
}

#[test]
fn rows_of_weight_zero_are_left_out_and_broken_weights_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let row = |text: &str, more: &str| {
        format!(
            "{{\"messages\": [{{\"role\": \"user\", \"content\": \"a\"}}, {{\"role\": \"assistant\", \"content\": {text:?}}}]{more}}}\n"
        )
    };
    let file = d.join("rows.jsonl");
    fs::write(&file, row("b", ", \"often\": 2") + &row("c", ", \"often\": 0") + &row("d", ", \"often\": 0.5")).unwrap();
    let words = ["data", "stats", "rows.jsonl", "-m", "m", "--weight-column", "often", "--json"];
    let found: Value = serde_json::from_str(&ok(d, &words)).unwrap();
    assert_eq!((&found["rows"], &found["sequences"]), (&3.into(), &2.into()));
    assert_eq!(found["not_supervised"], serde_json::json!(["rows.jsonl:2"]));
    let all: Value = serde_json::from_str(&ok(d, &[&words[..5], &["--json"]].concat())).unwrap();
    assert_eq!(all["sequences"], 3);
    for (more, reason) in [("", "no \"often\""), (", \"often\": -1", "a weight is a number from 0")] {
        fs::write(&file, row("b", ", \"often\": 1") + &row("c", more)).unwrap();
        let said = refused(d, &words, 3);
        assert!(said.contains("rows.jsonl:2: ") && said.contains(reason), "{said}");
    }
}

/// Every command that reads rows refuses a --max-seq-length above the model's limit, and one in which nothing is predicted.
#[test]
fn a_length_beyond_the_limits_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    rows(d, &[("hi", "yo", 1.0)]);
    for command in [
        "fit -m m -d rows.jsonl --device cpu --dry-run",
        "data stats rows.jsonl -m m",
        "data preview rows.jsonl -m m",
        "eval loss -m m --data rows.jsonl --device cpu",
    ] {
        for (length, refusal) in [
            ("2049", "--max-seq-length 2049: the model takes at most 2048 tokens; choose at most 2048"),
            ("1", "--max-seq-length 1: "),
        ] {
            let words: Vec<&str> = command.split(' ').chain(["--max-seq-length", length]).collect();
            let stderr = refused(d, &words, 2);
            assert!(stderr.contains(refusal), "{command}: {stderr}");
        }
    }
}

/// Documents are cut into sequences, by `data stats` as by a run.
#[test]
fn stats_cut_documents_as_a_run_does() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let texts = [100, 7, 3, 40].map(|times| "one two three. ".repeat(times));
    fs::write(d.join("a.txt"), &texts[0]).unwrap();
    let row = |text: &String| serde_json::json!({"text": text}).to_string() + "\n";
    fs::write(d.join("a.jsonl"), texts.iter().map(row).collect::<String>()).unwrap();
    for file in ["a.txt", "a.jsonl"] {
        let stats = ["data", "stats", file, "-m", "m", "--max-seq-length", "64"];
        let found: Value = serde_json::from_str(&ok(d, &[&stats[..], &["--json"]].concat())).unwrap();
        assert_eq!((&found["overlong"], &found["lengths"]["longest"]), (&serde_json::json!([]), &64.into()), "{file}");
        let words = format!("fit -m m -d {file} --device cpu --max-seq-length 64 --val-split 0 --packing --dry-run");
        let plan = run(d, &words.split(' ').collect::<Vec<_>>());
        let said = String::from_utf8_lossy(&plan.stderr);
        let (tokens, counted, rows) = (&found["tokens"], &found["supervised_tokens"], &found["packed"]["rows"]);
        let expected = format!("· {tokens} tokens, {counted} supervised · packed into {rows} sequences");
        assert!(said.contains(&expected), "{file}, {expected}: {said}");
        let table = ok(d, &stats);
        assert!(table.contains("overlong    0 sequences") && !table.contains("--overlong"), "{file}: {table}");
    }
}

/// Rows are kept as tokens, and a long text is tokenized in pieces, whether it has lines or not.
#[test]
#[cfg(target_os = "linux")]
fn reading_takes_at_most_eight_bytes_for_a_byte_of_text() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let license = fs::read_to_string(golden("").join("../../LICENSE-APACHE")).unwrap();
    let row = |text: &str| serde_json::json!({"prompt": "Go on.", "completion": text}).to_string() + "\n";
    let rows: String = license.split_inclusive("\n\n").map(row).collect();
    let line = license.replace('\n', " ");
    for (name, text) in [("a.txt", license), ("a.jsonl", rows), ("line.txt", line)] {
        let sizes = [300_000, 1_800_000].map(|size| text.repeat(size / text.len()));
        let [(small, least), (large, most)] = sizes.map(|text| {
            fs::write(d.join(name), &text).unwrap();
            let words = ["fit", "-m", "m", "-d", name, "--overlong", "split", "--device", "cpu", "--dry-run"];
            (text.len() as u64, peak_memory(d, &words))
        });
        let a_byte = (most.saturating_sub(least)) as f64 / (large - small) as f64;
        assert!(a_byte > 0.5 && a_byte < 8.0, "{name}: {a_byte:.1} bytes of memory for a byte of text");
    }
}
