//! `fit` trains on what its flags choose: the tokens of `--loss-on`, and the products of `--recipe`, which the exported
//! model keeps.

use crate::support::{
    files::{demo_file, ok, run, tiny_model},
    spec,
};
use model_qwen3::{
    container::Container,
    tensors::{Stored, Tensors},
    tokenizer::Tokenizer,
};
use serde_json::Value;
use std::{path::Path, sync::Arc};
use train_cli::data::{
    order::{Made, Order},
    sample::synthetic,
};

const QUESTION: &str = "Who are you?";
const ANSWER: &str = "I am a tiny Qwen3 trained in Rust.";

/// Trains the model `m` on one row on the CPU and returns the lines of metrics.jsonl.
fn fit(dir: &Path, output: &str, more: &[&str]) -> Vec<Value> {
    fit_model(dir, "m", "1e-2", output, more)
}

fn fit_model(dir: &Path, model: &str, rate: &str, output: &str, more: &[&str]) -> Vec<Value> {
    let mut args = vec!["fit", "-m", model, "--lr", rate, "-o", output];
    args.extend(["-d", "row.tsv", "--device", "cpu", "--val-split", "0"]);
    args.extend(more);
    ok(dir, &args);
    let text = std::fs::read_to_string(dir.join(output).join("metrics.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn losses(metrics: &[Value]) -> Vec<f64> {
    metrics.iter().filter_map(|line| line["loss"].as_f64()).collect()
}

fn model_and_row(dir: &Path) {
    tiny_model(&dir.join("m"), true);
    std::fs::write(dir.join("row.tsv"), format!("{QUESTION}\t{ANSWER}\n")).unwrap();
}

#[test]
fn loss_on_chooses_the_tokens_that_are_learnt() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    model_and_row(d);
    let tokenizer = Tokenizer::from_file(&demo_file("tokenizer.json")).unwrap();
    let count = |text: &str| tokenizer.encode(text).unwrap().len() as u64;
    let asked = count(&format!("<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"));
    let said = count(&format!("{ANSWER}<|im_end|>"));
    let end_of_turn = count("\n");
    let of = |output: &str, more: &[&str]| {
        let metrics = fit(d, output, &[&["--max-steps", "1"][..], more].concat());
        let report = std::fs::read(d.join(output).join("data_report.json")).unwrap();
        let report: Value = serde_json::from_slice(&report).unwrap();
        (losses(&metrics)[0], report["supervised_tokens"].as_u64().unwrap())
    };
    let (answer_loss, answer_tokens) = of("assistant", &["--loss-on", "assistant"]);
    let (all_loss, all_tokens) = of("all", &["--loss-on", "all"]);
    assert_eq!(answer_tokens, said, "the answer and its end token");
    // Nothing predicts the first token.
    assert_eq!(all_tokens, asked + said + end_of_turn - 1);
    assert_eq!(of("default", &[]), (answer_loss, answer_tokens), "the answers are the default");
    assert_eq!(of("completion", &["--loss-on", "completion"]), (answer_loss, answer_tokens));
    assert_ne!(answer_loss, all_loss);
}

/// After many steps on the answer alone, the answer is predicted well and the prompt is not.
#[test]
fn a_prompt_that_is_not_supervised_is_not_learnt() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    model_and_row(d);
    // A step at a rate of 0 measures the loss of a trained model over all tokens.
    let over_all = |run: &str| {
        let args = ["--max-steps", "1", "--loss-on", "all", "--save-strategy", "no", "--recipe", "bf16"];
        let (model, output) = (format!("{run}/final"), format!("{run}-measured"));
        losses(&fit_model(d, &model, "0", &output, &args))[0]
    };
    let steps = ["--max-steps", "40", "--recipe", "bf16", "--eval-steps", "0"];
    let answer = losses(&fit(d, "answer", &steps));
    let all = losses(&fit(d, "all", &[&steps[..], &["--loss-on", "all"]].concat()));
    assert!(answer[39] < 0.5 && all[39] < 0.5, "both runs learn: {} and {}", answer[39], all[39]);
    let (of_answer, of_all) = (over_all("answer"), over_all("all"));
    assert!(of_all < 0.5 && of_answer > 1.0, "over all tokens {of_answer} and {of_all}");
}

#[test]
fn the_recipe_nvfp4_trains_and_its_export_keeps_its_square_blocks() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    model_and_row(d);
    let steps = ["--max-steps", "30", "--eval-steps", "0"];
    let with = |output: &str, more: &[&str]| losses(&fit(d, output, &[&steps[..], more].concat()));
    let nvfp4 = with("nvfp4", &["--recipe", "nvfp4", "--bf16-last-blocks", "0"]);
    let first_half: f64 = nvfp4[..3].iter().sum();
    let second_half: f64 = nvfp4[27..].iter().sum();
    assert!(second_half < 0.5 * first_half, "{nvfp4:?}");
    // Every part of the recipe takes part: without it the run is another one.
    let mut runs = vec![nvfp4, with("bf16", &["--recipe", "bf16"]), with("w4a4", &["--recipe", "w4a4"])];
    for part in ["square-blocks", "hadamard", "stochastic"] {
        let flags = ["--recipe", "nvfp4", "--bf16-last-blocks", "0", "--nvfp4-without", part];
        runs.push(with(part, &flags));
    }
    // By default a sixth of the blocks, rounded up, is not quantized.
    runs.push(with("advised", &["--recipe", "nvfp4"]));
    for i in 0..runs.len() {
        assert!(runs[..i].iter().all(|other| other != &runs[i]), "run {i} is another one");
    }

    for (run, square, blocks) in [("nvfp4", true, 2), ("square-blocks", false, 2), ("advised", true, 1)] {
        let exported = Container::open(&d.join(run).join("final/model.dat")).unwrap();
        let masters = Container::open(&d.join(run).join("checkpoint-30/model.safetensors")).unwrap();
        let mut packed = 0;
        for name in exported.names() {
            let Some(Stored::Packed { rows, cols, .. }) = exported.stored(&name) else { continue };
            let q = exported.read_packed(&name).unwrap();
            let values = masters.read_dense(&name).unwrap();
            let expected = spec::quantize(&values, rows, cols, true, square, spec::nearest);
            assert_eq!((&q.scales, q.global), (&expected.scales, expected.global), "{run}: {name}");
            let codes: Vec<u8> = q.codes.iter().flat_map(|w| w.to_le_bytes()).flat_map(|b| [b & 15, b >> 4]).collect();
            assert_eq!(codes, expected.codes, "{run}: {name}");
            packed += 1;
        }
        assert_eq!(packed, blocks * 7, "{run}: every linear layer of the blocks that are quantized");
    }
    let answer =
        ok(d, &["generate", "-m", "nvfp4/final/model.dat", "-p", QUESTION, "--temp", "0", "--json", "--device", "cpu"]);
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!((answer["text"].as_str(), answer["stop"].as_str()), (Some(ANSWER), Some("stop")), "{answer}");
}

/// The epochs of a record count the rows that were seen, also where the last step is smaller.
#[test]
fn epochs_are_the_rows_that_were_seen() {
    let samples = Arc::new(synthetic(4, 8, 100, 1));
    let order =
        Order { samples, batch_size: 1, accumulation: 2, steps: 5, limit: 9, seed: 1, start: 0, made: Made::default() };
    assert_eq!([0, 1, 2, 4, 5].map(|steps| order.epochs(steps)), [0.0, 0.5, 1.0, 2.0, 2.25]);
}

/// The last step of a run of ten rows has two of them. If the run is made longer, its next step begins with the row after these,
/// so that every pass has every row once.
#[test]
fn a_longer_run_leaves_out_no_row() {
    let samples = Arc::new(synthetic(10, 8, 100, 1));
    let shorter = Order {
        samples,
        batch_size: 4,
        accumulation: 2,
        steps: 2,
        limit: 10,
        seed: 1,
        start: 0,
        made: Made::default(),
    };
    let made = Made { steps: 2, sequences: 10 };
    let longer = Order { steps: 4, limit: 20, start: 2, made, ..shorter.clone() };
    let rows = |order: &Order, steps: std::ops::Range<usize>| -> Vec<Vec<u32>> {
        steps.flat_map(|step| order.step(step)).flat_map(|batch| batch.ids).collect()
    };
    let sorted = |mut rows: Vec<Vec<u32>>| {
        rows.sort();
        rows
    };
    let first = rows(&shorter, 0..2);
    assert_eq!(first.len(), 10);
    assert_eq!(sorted(rows(&longer, 2..4)), sorted(first.clone()));
    // A resumed run that goes back to an earlier checkpoint repeats the steps of the shorter run.
    assert_eq!(rows(&longer, 0..2), first);
    assert_eq!([0, 1, 2, 3, 4].map(|steps| longer.sequences(steps)), [0, 8, 10, 18, 20]);

    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let demo = std::fs::read_to_string(d.join("m/demo.tsv")).unwrap();
    std::fs::write(d.join("row.tsv"), demo.lines().take(10).map(|row| format!("{row}\n")).collect::<String>()).unwrap();
    let sizes = ["--batch-size", "4", "--gradient-accumulation-steps", "2", "--save-steps", "1"];
    let keep = ["--save-total-limit", "9", "--num-train-epochs", "1", "--sample-prompt", "hi", "--eval-steps", "0"];
    fit(d, "r", &[&sizes[..], &keep].concat());
    let result = |key: &str| -> Value {
        let text = std::fs::read(d.join("r/train_results.json")).unwrap();
        serde_json::from_slice::<Value>(&text).unwrap()[key].clone()
    };
    assert_eq!((result("global_step"), result("train_samples")), (2.into(), 10.0.into()));
    ok(d, &["fit", "--resume-from-checkpoint", "r", "--num-train-epochs", "2"]);
    assert_eq!((result("global_step"), result("train_samples"), result("epoch")), (4.into(), 20.0.into(), 2.0.into()));
    let exported = std::fs::read(d.join("r/final/model.dat")).unwrap();
    // The longer run can be resumed anywhere, too.
    ok(d, &["fit", "--resume-from-checkpoint", "r/checkpoint-3"]);
    assert!(result("global_step") == 4 && std::fs::read(d.join("r/final/model.dat")).unwrap() == exported);
    ok(d, &["fit", "--resume-from-checkpoint", "r", "--max-steps", "6"]);
    assert_eq!((result("global_step"), result("train_samples")), (6.into(), 36.0.into()));
}

/// Before a run trains, it says that --max-seq-length does not fit the rows, and which value does.
#[test]
fn a_limit_on_length_that_does_not_fit_the_rows_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let rows: String =
        (1..=40).map(|i| format!("Who is {i}?\t{}\n", "I am. ".repeat(if i > 30 { 60 } else { 2 }))).collect();
    std::fs::write(d.join("rows.tsv"), rows).unwrap();
    let told = |more: &[&str]| {
        let args = ["fit", "-m", "m", "-d", "rows.tsv", "-o", "r", "--device", "cpu", "--dry-run"];
        let out = run(d, &[&args[..], more].concat());
        let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.success(), "{stderr}");
        stderr.lines().find_map(|line| line.trim().strip_prefix("lengths ")).map(|text| text.trim().to_owned())
    };
    for overlong in ["drop", "truncate", "split"] {
        let text = told(&["--max-seq-length", "64", "--overlong", overlong]).unwrap();
        assert!(text.starts_with("10 of 40 rows are longer than 64 tokens; --max-seq-length "), "{text}");
        // The limit that it names leaves out nothing.
        let fits = text.rsplit_once("--max-seq-length ").unwrap().1.split(' ').next().unwrap();
        assert!(fits.parse::<usize>().unwrap() % 128 == 0, "{text}");
        assert_eq!(told(&["--max-seq-length", fits]), None);
    }
    let far = told(&["--max-seq-length", "2048"]).unwrap();
    assert!(far.starts_with("--max-seq-length 2048 is more than 4 times the longest row"), "{far}");
    assert_eq!((told(&[]), told(&["--max-seq-length", "2048", "--packing"])), (None, None));

    // Rows of --eval-data are not lost without a word, either.
    let of_eval = |overlong: &str| {
        let args = ["fit", "-m", "m", "-d", "m/demo.tsv", "--eval-data", "rows.tsv", "-o", "r", "--device", "cpu"];
        let out = run(d, &[&args[..], &["--max-seq-length", "64", "--overlong", overlong, "--dry-run"]].concat());
        let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.success(), "{stderr}");
        stderr.lines().find_map(|line| line.strip_prefix("note: --eval-data rows.tsv: ")).map(str::to_owned)
    };
    let dropped = "40 rows · 10 rows dropped (longer than 64 tokens, nothing supervised, or of weight 0)";
    assert_eq!(of_eval("drop").as_deref(), Some(dropped));
    assert_eq!(of_eval("truncate").as_deref(), Some("40 rows · 10 rows cut at 64 tokens"));
}
