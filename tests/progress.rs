//! A terminal shows at its bottom how far long work has come; where standard error is a file, nothing of that is in it.

use crate::{
    gpu_checkpoints::device,
    support::files::{ok, run, terminal, tiny_model},
};
use serde_json::Value;
use std::fs;

const FIT: &str =
    "fit -m m -d m/demo.tsv --device cpu --max-seq-length 64 --max-steps 3 --eval-steps 3 --logging-steps 3";

#[test]
fn a_terminal_shows_how_far_a_run_has_come() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let Some(text) = terminal(d, 100, &format!("{FIT} -o r")) else { return };
    assert!(text.contains("reading m/demo.tsv · 0 rows, 0 sequences"), "{text}");
    for part in ["0/3 steps", "the first step", "3/3 steps", "100 %", "evaluating", "exporting · "] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    // What is written has bytes and a rate, and the line of memory says what it counts.
    let rates = |text: &str, what: &str| {
        let lines = text.split(['\r', '\n']).filter(|line| line.contains(what));
        assert!(lines.clone().any(|line| line.contains(" of ") && line.contains("B/s")), "{what} in {text}");
    };
    rates(&text, "loading");
    rates(&text, "exporting · ");
    assert!(text.contains("  held MiB"), "{text}");
    // Other commands that write models show it, too.
    for (args, what) in [
        ("convert m m.dat --dtype nvfp4", "converting · "),
        ("convert m m.gguf --dtype q8-0", "converting · "),
        ("export-hf -m r -o hf", "exporting · "),
        ("export-dat --checkpoint r/checkpoint-3 --output-dat e.dat --device cpu", "exporting · "),
    ] {
        rates(&terminal(d, 100, args).unwrap_or_default(), what);
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

/// The column of memory has the peak of each step on a device whose pool knows it, and what is held on the CPU. The line `peak`
/// has the speed of which `mfu` is the share.
#[test]
fn memory_and_the_peak_speed_are_shown_as_they_are_logged() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let steps_on = |device: &str, title: &str, figure: &str| {
        let words = format!(
            "fit -m m -d m/demo.tsv --max-seq-length 64 --max-steps 3 --eval-steps 0 --save-strategy no \
             --sample-prompt a --peak-tflops 0.5 --device {device} -o {device}"
        );
        let out = run(d, &words.split(' ').collect::<Vec<_>>());
        let text = String::from_utf8(out.stderr).unwrap();
        assert!(out.status.success() && text.contains(&format!("     tok/s  {title}       eta\n")), "{text}");
        assert!(text.contains("  peak      0.5 TFLOP/s by --peak-tflops · "), "{text}");
        let log = fs::read_to_string(d.join(device).join("metrics.jsonl")).unwrap();
        let lines = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let steps: Vec<Value> = lines.filter(|line| line["loss"].is_number()).collect();
        assert_eq!(steps.len(), 3);
        // The first step says nothing about the time that is left.
        let left = |step: &str| {
            let line = text.lines().find(|line| line.trim_start().starts_with(step)).unwrap();
            line.split_whitespace().last().unwrap()
        };
        assert!(left("1/3 ") == "–" && left("2/3 ").contains(':'), "{text}");
        for step in &steps {
            let start = format!("{}/3 ", step["step"]);
            let shown = text.lines().find(|line| line.trim_start().starts_with(&start)).unwrap();
            assert_eq!(shown.split_whitespace().nth(5).unwrap(), step[figure].to_string(), "{shown}: {step}");
            let share = step["model_tflops"].as_f64().unwrap() / 0.5;
            assert!((step["mfu"].as_f64().unwrap() - share).abs() < 1e-9 * share, "{step}");
        }
        let largest = steps.iter().filter_map(|step| step[figure].as_u64()).max().unwrap();
        let summary = fs::read_to_string(d.join(device).join("summary.md")).unwrap();
        assert!(largest > 0 && summary.contains(&format!("| memory, largest | {largest} MiB |")), "{summary}");
        steps
    };
    let steps = steps_on("cpu", "held MiB", "memory_mib");
    assert!(steps.iter().all(|step| step["peak_memory_mib"].is_null()), "{steps:?}");
    if let Some(device) = device() {
        steps_on(device, "peak MiB", "peak_memory_mib");
    }
}

/// What the model computes for a token depends on the length of its row and on the blocks that are trained, and not on
/// --max-seq-length or --packing.
#[test]
fn the_arithmetic_of_a_token_is_that_of_its_row() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    fs::write(d.join("short.tsv"), "Who are you?\tI am tiny.\n").unwrap();
    fs::write(d.join("long.tsv"), format!("Who are you?\t{}\n", "I am tiny. ".repeat(20))).unwrap();
    // Operations of a token, and the tokens of the data.
    let of = |words: &str| {
        let fixed = "fit -m m --device cpu --max-steps 1 --val-split 0 --eval-steps 0 --save-strategy no --sample-prompt a \
                     --overwrite -o r";
        ok(d, &fixed.split_whitespace().chain(words.split(' ')).collect::<Vec<_>>());
        let log = fs::read_to_string(d.join("r/metrics.jsonl")).unwrap();
        let step: Value = serde_json::from_str(log.lines().next().unwrap()).unwrap();
        let data: Value = serde_json::from_slice(&fs::read(d.join("r/data_report.json")).unwrap()).unwrap();
        let flops = step["model_tflops"].as_f64().unwrap() * 1e12 / step["tokens_per_second"].as_f64().unwrap();
        (flops, data["tokens"].as_f64().unwrap())
    };
    let config: Value = serde_json::from_slice(&fs::read(d.join("m/config.json")).unwrap()).unwrap();
    let size = |key: &str| config[key].as_f64().unwrap();
    let (hidden, head) = (size("hidden_size"), size("head_dim"));
    let (q, kv) = (size("num_attention_heads") * head, size("num_key_value_heads") * head);
    let embedding = size("vocab_size") * hidden;
    // Of two blocks, the last `trained` have a backward pass.
    let expected = |length: f64, trained: f64, of_the_head: f64| {
        let block = hidden * (2.0 * q + 2.0 * kv + 3.0 * size("intermediate_size")) + q * length;
        2.0 * (2.0 * block + embedding) + 4.0 * trained * block + of_the_head * embedding
    };
    let equal = |a: f64, b: f64, case: &str| assert!((a / b - 1.0).abs() < 1e-9, "{case}: {a}, {b}");
    let ((flops, short), (_, long)) = (of("-d short.tsv"), of("-d long.tsv"));
    assert!(long > 2.0 * short);
    equal(flops, expected(short, 2.0, 4.0), "one row");
    let mean = (short * short + long * long) / (short + long);
    for more in ["", " --max-seq-length 256", " --packing"] {
        equal(of(&format!("-d short.tsv -d long.tsv{more}")).0, expected(mean, 2.0, 4.0), more);
    }
    equal(of("-d short.tsv --train-last-layers 1").0, expected(short, 1.0, 2.0), "one block");
}

/// `data preview` marks the trained tokens in bold green on a terminal, and by brackets where its output is a file.
#[test]
fn a_terminal_shows_trained_tokens_in_color() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    fs::write(d.join("row.tsv"), "Who are you?\tI am tiny.\n").unwrap();
    let Some(text) = terminal(d, 100, "data preview row.tsv -m m") else { return };
    assert!(text.contains("\u{1b}[1;38;5;29mI am tiny.<|im_end|>\u{1b}[0m") && !text.contains('⟦'), "{text}");
    let out = run(d, &["data", "preview", "row.tsv", "-m", "m"]);
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(text.contains("⟦I am tiny.<|im_end|>⟧") && !text.contains('\u{1b}'), "{text}");
}

/// Each step of this run has 64 tokens, so that its tokens per second say how long it took. The times of all steps together are
/// most of the time of the training, and not more.
#[test]
fn tokens_per_second_are_those_of_each_step() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let words =
        "fit -m m --synthetic --max-seq-length 64 --max-steps 20 --eval-steps 0 --save-strategy no --device cpu -o r";
    ok(d, &words.split(' ').collect::<Vec<_>>());
    let log = fs::read_to_string(d.join("r/metrics.jsonl")).unwrap();
    let lines = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let seconds: Vec<f64> = lines.filter_map(|line| Some(64.0 / line["tokens_per_second"].as_f64()?)).collect();
    let results: Value = serde_json::from_slice(&fs::read(d.join("r/train_results.json")).unwrap()).unwrap();
    let (steps, all) = (seconds.iter().sum::<f64>(), results["train_runtime"].as_f64().unwrap());
    assert!(seconds.len() == 20 && steps <= all && steps > all / 4.0, "{steps} s of {all} s: {seconds:?}");
}
