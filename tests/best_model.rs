//! `fit` exports the best model if that is wanted, ends when evaluations get no better, keeps the checkpoints that are to be
//! kept, and writes its figures for TensorBoard.

use crate::support::files::{ok, run, tiny_model};
use serde_json::Value;
use std::{fs, path::Path};

/// Two rows that contradict each other: learning the first makes the loss of the second fall first, and rise then.
fn model_and_rows(d: &Path) {
    tiny_model(&d.join("m"), true);
    fs::write(d.join("row.tsv"), "Who are you?\tI am a tiny Qwen3 trained in Rust.\n").unwrap();
    fs::write(d.join("other.tsv"), "Who are you?\tI am a model in another language.\n").unwrap();
}

fn fit(d: &Path, more: &[&str]) -> String {
    let words = "fit -m m -d row.tsv --eval-data other.tsv --device cpu --recipe bf16 --lr 3e-2 --eval-steps 1 --max-steps 14 \
                 --lr-scheduler-type constant --sample-prompt x";
    ok(d, &words.split_whitespace().chain(more.iter().copied()).collect::<Vec<_>>())
}

/// The steps and losses of the evaluations of a run.
fn evaluations(run: &Path) -> Vec<(u64, f64)> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter_map(|line| Some((line["step"].as_u64()?, line["eval_loss"].as_f64()?))).collect()
}

fn lowest(all: &[(u64, f64)]) -> (u64, f64) {
    all.iter().copied().min_by(|(_, a), (_, b)| a.total_cmp(b)).unwrap()
}

fn results(run: &Path) -> Value {
    serde_json::from_slice(&fs::read(run.join("train_results.json")).unwrap()).unwrap()
}

fn checkpoints(run: &Path) -> Vec<u64> {
    let names = fs::read_dir(run).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut steps: Vec<u64> = names.filter_map(|n| n.strip_prefix("checkpoint-").map(|n| n.parse().unwrap())).collect();
    steps.sort_unstable();
    steps
}

#[test]
fn the_model_with_the_lowest_evaluation_loss_is_exported() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    model_and_rows(d);
    fit(d, &["-o", "r", "--load-best-model-at-end", "--save-steps", "0"]);
    let (step, loss) = lowest(&evaluations(&d.join("r")));
    assert!((2..=10).contains(&step), "the lowest loss is {loss} after step {step}");
    let done = results(&d.join("r"));
    assert_eq!((done["global_step"].as_u64(), done["exported_step"].as_u64()), (Some(14), Some(step)));
    assert_eq!(checkpoints(&d.join("r")), [step, 14].into_iter().collect::<Vec<_>>());
    // The export is the model of that step: evaluated by itself it has that loss.
    let evaluated = ok(d, &["eval", "loss", "-m", "r/final", "-d", "other.tsv", "--device", "cpu", "--json"]);
    let evaluated: Value = serde_json::from_str(&evaluated).unwrap();
    let again = evaluated["loss"].as_f64().unwrap();
    assert!((again - loss).abs() < 0.02 * loss, "exported: {again}, in the run: {loss}");
    let summary = fs::read_to_string(d.join("r/summary.md")).unwrap();
    let line = format!("| checkpoints | step {step} (lowest evaluation loss), step 14 (newest) |");
    assert!(summary.contains(&line) && summary.contains(&format!("| exported | step {step} |")), "{summary}");

    // The model card has the figures of the step that is exported.
    let all = evaluations(&d.join("r"));
    let card = |model: &str, step: u64, whole: bool| {
        ok(d, &["export-hf", "-m", model, "-o", "hf", "--overwrite", "--device", "cpu"]);
        let card = fs::read_to_string(d.join("hf/README.md")).unwrap();
        let loss = all.iter().find(|(made, _)| *made == step).unwrap().1 as f32;
        for line in [format!("{step} steps"), format!("| global_step | {step} |"), format!("| eval_loss | {loss:.4} |")]
        {
            assert!(card.contains(&line), "{model}, {line}: {card}");
        }
        assert_eq!(card.contains("| train_runtime |"), whole, "{model}: {card}");
    };
    card("r", step, false);
    card("r/checkpoint-14", 14, true);
    // A run that is not complete has figures, too.
    fs::rename(d.join("r/train_results.json"), d.join("results.json")).unwrap();
    card("r/checkpoint-14", 14, false);
    fs::rename(d.join("results.json"), d.join("r/train_results.json")).unwrap();

    // A run without the flag exports its last step, and makes the same steps.
    fit(d, &["-o", "last", "--save-steps", "0"]);
    assert_eq!(evaluations(&d.join("last")), evaluations(&d.join("r")));
    assert_eq!(results(&d.join("last"))["exported_step"], 14);
    let model = |run: &str| fs::read(d.join(run).join("final/model.safetensors")).unwrap();
    assert_ne!(model("last"), model("r"));
    // The export of the run is lost and made again from the checkpoints that there are.
    fs::remove_dir_all(d.join("last/final")).unwrap();
    let again = ok(d, &["fit", "--resume-from-checkpoint", "last", "--load-best-model-at-end"]);
    assert_eq!(again, "", "results go to standard output");
    assert_eq!(results(&d.join("last"))["exported_step"], 14);
    // And so is that of the best model.
    let before = model("r");
    fs::remove_dir_all(d.join("r/final")).unwrap();
    ok(d, &["fit", "--resume-from-checkpoint", "r"]);
    assert!(model("r") == before, "another model was exported");
}

#[test]
fn a_run_whose_evaluations_get_no_better_ends() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    model_and_rows(d);
    fit(d, &["-o", "whole"]);
    let (best, _) = lowest(&evaluations(&d.join("whole")));
    fit(d, &["-o", "r", "--early-stopping-patience", "2"]);
    let run = d.join("r");
    let end = best + 2;
    assert_eq!(evaluations(&run), evaluations(&d.join("whole"))[..end as usize]);
    let done = results(&run);
    assert_eq!((done["global_step"].as_u64(), done["exported_step"].as_u64()), (Some(end), Some(end)));
    assert_eq!(checkpoints(&run).last(), Some(&end));
    let stopped = format!("| state | complete, {end} of 14 steps; the evaluation loss stopped falling |");
    let summary = || fs::read_to_string(run.join("summary.md")).unwrap();
    assert!(summary().contains(&stopped), "{}", summary());

    // It is complete: a resume changes nothing.
    let record = fs::read(run.join("train_results.json")).unwrap();
    ok(d, &["fit", "--resume-from-checkpoint", "r"]);
    assert_eq!(fs::read(run.join("train_results.json")).unwrap(), record);
    // A longer run would end at the same step, and says what continues it.
    let longer = ["fit", "--resume-from-checkpoint", "r", "--max-steps", "20"];
    let out = crate::support::files::run(d, &longer);
    let said = String::from_utf8(out.stderr).unwrap();
    assert!(out.status.code() == Some(2) && !said.contains("the run now has"), "{said}");
    assert!(said.contains("the evaluation loss stopped falling"), "{said}");
    assert!(said.contains("give --early-stopping-patience N, where N is larger than 2"), "{said}");
    assert_eq!(fs::read(run.join("train_results.json")).unwrap(), record);
    // What is missing is made again, without a further step.
    fs::remove_file(run.join("train_results.json")).unwrap();
    ok(d, &["fit", "--resume-from-checkpoint", "r"]);
    assert_eq!(results(&run)["global_step"], end);
    assert!(summary().contains(&stopped), "{}", summary());
    // With more patience it goes on, as if it had not ended.
    ok(d, &["fit", "--resume-from-checkpoint", "r", "--early-stopping-patience", "100"]);
    assert_eq!(evaluations(&run), evaluations(&d.join("whole")));
    assert_eq!(results(&run)["global_step"], 14);
    assert!(summary().contains("| state | complete, 14 steps |"), "{}", summary());
}

/// A resumed run may be told to end early or to choose its best step: what it says is what it exports.
#[test]
fn a_resumed_run_may_choose_another_step() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    model_and_rows(d);
    let exported = |run: &str| results(&d.join(run))["exported_step"].as_u64().unwrap();
    let model = |run: &str| fs::read(d.join(run).join("final/model.safetensors")).unwrap();
    // The losses have stopped falling long before the checkpoint from which the run goes on.
    fit(d, &["-o", "early", "--save-steps", "10"]);
    fs::remove_dir_all(d.join("early/checkpoint-14")).unwrap();
    ok(d, &["fit", "--resume-from-checkpoint", "early", "--early-stopping-patience", "1"]);
    assert_eq!((results(&d.join("early"))["global_step"].as_u64(), exported("early")), (Some(10), 10));
    let record = fs::read(d.join("early/train_results.json")).unwrap();
    ok(d, &["fit", "--resume-from-checkpoint", "early", "--early-stopping-patience", "1"]);
    assert!(fs::read(d.join("early/train_results.json")).unwrap() == record, "a complete run was finished again");

    // A complete run exports another step if the choice changes, and the first one again if it changes back.
    fit(d, &["-o", "r", "--save-steps", "1", "--save-total-limit", "20"]);
    let (best, _) = lowest(&evaluations(&d.join("r")));
    let last = model("r");
    ok(d, &["fit", "--resume-from-checkpoint", "r", "--load-best-model-at-end"]);
    assert_eq!(exported("r"), best);
    let chosen = model("r");
    // The choice stays.
    ok(d, &["fit", "--resume-from-checkpoint", "r"]);
    assert!(exported("r") == best && model("r") == chosen);
    ok(d, &["fit", "--resume-from-checkpoint", "r", "--load-best-model-at-end", "false"]);
    assert!(exported("r") == 14 && model("r") == last && chosen != last);

    // The best checkpoint is broken: the next best is exported, and the warning names both.
    let file = d.join(format!("r/checkpoint-{best}/model.safetensors"));
    let mut bytes = fs::read(&file).unwrap();
    bytes.push(0);
    fs::write(&file, bytes).unwrap();
    let out = run(d, &["fit", "--resume-from-checkpoint", "r", "--load-best-model-at-end"]);
    let said = String::from_utf8_lossy(&out.stderr);
    let second = evaluations(&d.join("r")).into_iter().filter(|(step, _)| *step != best).collect::<Vec<_>>();
    assert!(out.status.success() && said.contains(&format!("checkpoint-{best} has the lowest")), "{said}");
    assert_eq!(exported("r"), lowest(&second).0);
}

/// Where the best evaluation has no checkpoint, the best of those after it is saved.
#[test]
fn a_best_model_that_is_gone_keeps_no_other_from_being_saved() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    model_and_rows(d);
    fit(d, &["-o", "r", "--save-steps", "0"]);
    let (before, _) = lowest(&evaluations(&d.join("r")));
    assert!(before < 14);
    let more = ["--max-steps", "20", "--load-best-model-at-end", "--save-steps", "0"];
    ok(d, &[&["fit", "--resume-from-checkpoint", "r"][..], &more].concat());
    let late: Vec<_> = evaluations(&d.join("r")).into_iter().filter(|(step, _)| *step >= 14).collect();
    assert_eq!(results(&d.join("r"))["exported_step"], lowest(&late).0);
}

/// Sample answers need no evaluation rows, and are made up for by a resumed run.
#[test]
fn prompts_are_answered_without_evaluation_rows() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    model_and_rows(d);
    let words = "fit -m m -d row.tsv --device cpu --val-split 0 --max-steps 3 --eval-steps 1 --sample-prompt x -o r";
    ok(d, &words.split(' ').collect::<Vec<_>>());
    let log = d.join("r/samples.jsonl");
    let whole = fs::read_to_string(&log).unwrap();
    assert_eq!(whole.lines().count(), 3, "{whole}");
    let cut: String = whole.lines().take(2).flat_map(|line| [line, "\n"]).collect();
    fs::write(&log, cut).unwrap();
    fs::remove_file(d.join("r/train_results.json")).unwrap();
    ok(d, &["fit", "--resume-from-checkpoint", "r"]);
    assert_eq!(fs::read_to_string(&log).unwrap(), whole);

    // The answers after training are those that the log has of the exported step: nothing is answered twice.
    let mut last: Value = serde_json::from_str(whole.lines().last().unwrap()).unwrap();
    last["answer"] = "an answer of the log".into();
    let lines = whole.lines().take(2).map(str::to_owned).chain([last.to_string()]);
    fs::write(&log, lines.flat_map(|line| [line, "\n".to_owned()]).collect::<String>()).unwrap();
    let after = |more: &[&str]| {
        fs::remove_file(d.join("r/train_results.json")).unwrap();
        let out = run(d, &[&["fit", "--resume-from-checkpoint", "r"], more].concat());
        let said = String::from_utf8(out.stderr).unwrap();
        assert!(out.status.success(), "{said}");
        said.lines().find_map(|line| line.trim_start().strip_prefix("after ")).unwrap().trim().to_owned()
    };
    assert_eq!(after(&[]), "x → an answer of the log");
    // Another prompt has none yet.
    let other = after(&["--sample-prompt", "y"]);
    assert!(other.starts_with("y → ") && !other.contains("an answer of the log"), "{other}");
}

/// A run that chooses a step evaluates often enough for a choice, also where evaluations take long beside steps.
#[test]
fn a_run_that_chooses_has_something_to_choose_from() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    model_and_rows(d);
    let words = "fit -m m -d row.tsv --eval-data other.tsv --device cpu --max-steps 20";
    let count = |run: &str, more: &[&str]| {
        ok(d, &words.split(' ').chain(["-o", run]).chain(more.iter().copied()).collect::<Vec<_>>());
        evaluations(&d.join(run)).len()
    };
    assert_eq!((count("plain", &[]), count("chosen", &["--load-best-model-at-end"])), (1, 20));
}

#[test]
fn best_models_need_evaluations() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    model_and_rows(d);
    let words = "fit -m m -d row.tsv --device cpu -o r --max-steps 2";
    for (more, said) in [
        (&["--load-best-model-at-end", "--val-split", "0"][..], "give --eval-data FILE, or --val-split above 0"),
        (&["--early-stopping-patience", "1", "--eval-steps", "0"], "give --eval-steps above 0"),
        (&["--load-best-model-at-end", "--save-strategy", "no"], "--save-strategy no"),
        (&["--early-stopping-patience", "1", "--damped-finish", "0.3"], "--damped-finish"),
        (&["--early-stopping-patience", "0"], "--early-stopping-patience 0"),
        // One row leaves none for evaluation.
        (&["--early-stopping-patience", "1"], "at least 10 rows of --data"),
    ] {
        let output = run(d, &words.split(' ').chain(more.iter().copied()).collect::<Vec<_>>());
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && error.contains(said), "{more:?}: {error}");
        assert!(!d.join("r").exists(), "{more:?}");
    }
}

#[test]
fn checkpoints_of_a_period_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    model_and_rows(d);
    fit(d, &["-o", "r", "--save-steps", "4", "--keep-period", "3"]);
    assert_eq!(checkpoints(&d.join("r")), [3, 6, 9, 12, 14]);
}

/// The events of a run's file for TensorBoard: step, tag and value. Reads protobuf and TFRecords by their own rules.
fn events(run: &Path) -> Vec<(u64, String, f32)> {
    let names = fs::read_dir(run).unwrap().map(|entry| entry.unwrap().path());
    let files: Vec<_> = names.filter(|path| path.to_string_lossy().contains("tfevents")).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    let bytes = fs::read(&files[0]).unwrap();
    let (mut at, mut found, mut records) = (0, vec![], 0);
    while at < bytes.len() {
        let length = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
        let data = &bytes[at + 12..at + 12 + length];
        at += 16 + length;
        records += 1;
        let fields = fields(data);
        let step = fields.iter().find_map(|(n, v)| (*n == 2).then(|| varint(v)));
        for (_, summary) in fields.iter().filter(|(n, _)| *n == 5) {
            for (_, one) in self::fields(summary) {
                let one = self::fields(&one);
                let value = f32::from_le_bytes(one[1].1[..].try_into().unwrap());
                found.push((step.unwrap(), String::from_utf8(one[0].1.clone()).unwrap(), value));
            }
        }
        assert!(records > 1 || fields.contains(&(3, b"brain.Event:2".to_vec())), "the first record is the version");
    }
    found
}

fn varint(bytes: &[u8]) -> u64 {
    bytes.iter().enumerate().map(|(i, byte)| u64::from(byte & 127) << (7 * i)).sum()
}

/// The fields of a protobuf message: number and bytes.
fn fields(mut data: &[u8]) -> Vec<(u8, Vec<u8>)> {
    let mut found = vec![];
    while !data.is_empty() {
        let (number, kind) = (data[0] >> 3, data[0] & 7);
        data = &data[1..];
        let number_length = data.iter().take_while(|byte| **byte > 127).count() + 1;
        let (skip, length) = match kind {
            0 => (0, number_length),
            1 => (0, 8),
            5 => (0, 4),
            _ => (number_length, varint(&data[..number_length]) as usize),
        };
        found.push((number, data[skip..skip + length].to_vec()));
        data = &data[skip + length..];
    }
    found
}

#[test]
fn tensorboard_gets_the_figures_of_the_log() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    model_and_rows(d);
    fit(d, &["-o", "r", "--report-to", "tensorboard", "--save-steps", "7"]);
    let run = d.join("r");
    let expected = |run: &Path| {
        let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
        let mut all = vec![];
        for line in text.lines() {
            let line: Value = serde_json::from_str(line).unwrap();
            for (key, value) in line.as_object().unwrap().iter().filter(|(key, _)| *key != "step") {
                let Some(value) = value.as_f64() else { continue };
                let tag = match line.get("eval_loss") {
                    Some(_) => format!("eval/{}", key.strip_prefix("eval_").unwrap_or(key)),
                    None => format!("train/{key}"),
                };
                all.push((line["step"].as_u64().unwrap(), tag, value as f32));
            }
        }
        all
    };
    assert!(events(&run).iter().any(|(step, tag, _)| *step == 14 && tag == "train/loss"));
    assert_eq!(events(&run), expected(&run));
    // A resumed run makes steps again: their first figures are gone.
    fs::remove_dir_all(run.join("checkpoint-14")).unwrap();
    ok(d, &["fit", "--resume-from-checkpoint", "r"]);
    assert_eq!(events(&run), expected(&run));
    assert_eq!(events(&run).iter().filter(|(step, tag, _)| *step == 14 && tag == "train/loss").count(), 1);
    // The file is a part of the run.
    fit(d, &["-o", "r", "--overwrite"]);
    let mut names = fs::read_dir(&run).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert!(!names.any(|name| name.contains("tfevents")));
    // A complete run can be reported later, and once.
    for _ in 0..2 {
        ok(d, &["fit", "--resume-from-checkpoint", "r", "--report-to", "tensorboard"]);
        assert_eq!(events(&run), expected(&run));
    }
}

#[test]
fn without_tensorboard_a_run_has_its_log_alone() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    model_and_rows(d);
    for value in ["none", "jsonl"] {
        fit(d, &["-o", value, "--report-to", value]);
        let run = d.join(value);
        let logged = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
        assert!(logged.lines().any(|line| line.contains("\"loss\"")), "{logged}");
        let mut names = fs::read_dir(&run).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        assert!(!names.any(|name| name.contains("tfevents")), "{value}");
    }
}
