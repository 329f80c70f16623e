//! A run of two hundred steps that is resumed after its first step, in the middle or before its last one is the run that
//! nobody stopped: weights, optimizer states, losses and gradient norms have the same bits. So have several runs of one
//! command. And the command that an interrupted run prints resumes it as it stands, with the settings of the last command.

use crate::support::files::{command, ok, program, refused, run, send, tiny_model};
use serde_json::Value;
use std::{
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

/// A run of two hundred short steps over a small model.
const FIT: &str = "fit -m m -d m/rows.tsv --device cpu --max-seq-length 32 --learning-rate 1e-3 --max-steps 200 \
                   --eval-steps 0 --val-split 0 --sample-prompt hello";

fn fit<'a>(output: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    FIT.split_whitespace().chain(["-o", output]).chain(more.iter().copied()).collect()
}

fn model(d: &Path) {
    tiny_model(&d.join("m"), true);
    let row = |n: usize| format!("question {n}\tanswer {}\n", n * n);
    fs::write(d.join("m/rows.tsv"), (0..12).map(row).collect::<String>()).unwrap();
}

/// What must have the same bits, with its name.
fn outcome(run: &Path) -> Vec<(String, Vec<u8>)> {
    let files = ["checkpoint-200/model.safetensors", "checkpoint-200/optimizer.safetensors", "final/model.dat"];
    let mut all: Vec<_> = files.map(|name| (name.to_owned(), fs::read(run.join(name)).unwrap())).into();
    let steps: Vec<String> = fs::read_to_string(run.join("metrics.jsonl"))
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .map(|line| format!("{} {} {} {}\n", line["step"], line["loss"], line["grad_norm"], line["learning_rate"]))
        .collect();
    assert_eq!(steps.len(), 200, "{}", run.display());
    all.push(("losses and norms".to_owned(), steps.concat().into_bytes()));
    all
}

#[test]
fn a_run_that_is_resumed_anywhere_is_the_uninterrupted_run() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    model(d);
    // Three fresh runs, of which two leave the checkpoints that are resumed.
    ok(d, &fit("plain", &["--save-steps", "0"]));
    ok(d, &fit("early", &["--save-steps", "7", "--keep-period", "7"]));
    ok(d, &fit("late", &["--save-steps", "1", "--keep-period", "50"]));
    let expected = outcome(&d.join("plain"));
    let same = |run: &str, case: &str| {
        for ((name, a), (_, b)) in expected.iter().zip(outcome(&d.join(run))) {
            assert!(*a == b, "{case}: {name} differs");
        }
    };
    same("early", "a second run");
    same("late", "a third run");
    // Later checkpoints first: those that are newer than the one that is resumed are set aside.
    for checkpoint in ["late/checkpoint-199", "late/checkpoint-50", "early/checkpoint-7"] {
        ok(d, &["fit", "--resume-from-checkpoint", checkpoint]);
        same(checkpoint.split('/').next().unwrap(), checkpoint);
    }
    // The checkpoint of the first step, of a run that was killed after it.
    let mut child = command(d, &fit("first", &["--save-steps", "1", "--save-total-limit", "200"]))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let (first, started) = (d.join("first/checkpoint-1"), Instant::now());
    while !first.exists() && started.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    ok(d, &["fit", "--resume-from-checkpoint", "first/checkpoint-1"]);
    same("first", "first/checkpoint-1");
}

/// Settings that a resumed run may change stay changed, also if the command that changed them saved no checkpoint: it had no step
/// to make, or was killed. Damage to the file that has them ends nothing.
#[test]
fn a_plain_resume_has_the_settings_of_the_last_command() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    model(d);
    let words = "fit -m m -d m/rows.tsv --device cpu --max-seq-length 32 --max-steps 6 --save-steps 2 --save-total-limit 9 \
                 --eval-steps 0 --val-split 0 --sample-prompt hello --logging-steps 1 -o r";
    ok(d, &words.split_whitespace().collect::<Vec<_>>());
    let resumed = |from: &str, more: &[&str]| {
        let out = run(d, &[&["fit", "--resume-from-checkpoint", from], more].concat());
        let said = String::from_utf8(out.stderr).unwrap();
        assert!(out.status.success(), "{said}");
        let results: Value = serde_json::from_slice(&fs::read(d.join("r/train_results.json")).unwrap()).unwrap();
        (said, results["global_step"].as_u64().unwrap())
    };
    // A run that is made shorter is complete, and stays so.
    assert_eq!(resumed("r/checkpoint-4", &["--max-steps", "4"]).1, 4);
    let record = fs::read(d.join("r/train_results.json")).unwrap();
    let (said, made) = resumed("r", &[]);
    assert!(made == 4 && said.contains("r is complete at step 4: --max-steps 4 ended it"), "{said}");
    assert!(fs::read(d.join("r/train_results.json")).unwrap() == record, "it was exported again");

    // One that is killed after it was made longer is trained to its new end.
    let longer = ["fit", "--resume-from-checkpoint", "r", "--max-steps", "100", "--save-steps", "0"];
    let mut child = command(d, &longer).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.trim_start().starts_with("5/100 ")), "the run printed no step");
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(
        !d.join("r/train_results.json").exists() && !d.join("r/checkpoint-100").exists(),
        "it ended before the kill"
    );
    assert_eq!(resumed("r", &[]).1, 100);

    for damaged in ["= 3", "", "recipe = \"w4\"\n"] {
        fs::write(d.join("r/config.toml"), damaged).unwrap();
        let (said, made) = resumed("r", &[]);
        assert!(made == 100 && said.contains("r is complete at step 100"), "{damaged:?}: {said}");
        assert!(said.contains("warning: the settings of the checkpoint are used"), "{damaged:?}: {said}");
    }
}

/// Inputs may lie in another folder than before, since their contents are compared. The file of settings names the run, too, and
/// the output of another run is not replaced because its settings are used again.
#[test]
fn inputs_may_be_moved_and_settings_may_name_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    model(d);
    let words = "fit -m m -d m/rows.tsv --device cpu --max-seq-length 32 --max-steps 2 --eval-steps 0 --val-split 0 -o r \
                 --output-dat r.dat --warmup-steps 100";
    let out = run(d, &words.split(' ').filter(|word| !word.is_empty()).collect::<Vec<_>>());
    let said = String::from_utf8_lossy(&out.stderr);
    let told = "warm-up   100 steps, and the run has 2 steps: the learning rate does not reach 1e-5";
    assert!(out.status.success() && said.contains(told), "{said}");
    let rates: Vec<f64> = fs::read_to_string(d.join("r/metrics.jsonl"))
        .unwrap()
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).unwrap()["learning_rate"].as_f64())
        .collect();
    // A warm-up that is longer than the run ends below the highest rate.
    assert!((rates[1] / rates[0] - 2.0).abs() < 1e-9 && rates[1] < 1e-5, "{rates:?}");
    let written = fs::read(d.join("r.dat")).unwrap();
    let out = run(d, &["fit", "-c", "r/config.toml", "-o", "again", "--seed", "1"]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.code() == Some(2) && said.contains("r.dat: the file exists"), "{said}");
    assert!(fs::read(d.join("r.dat")).unwrap() == written);
    fs::create_dir(d.join("x")).unwrap();
    fs::rename(d.join("m"), d.join("x/m")).unwrap();
    // They may have another name, too, but for the part of it that tells the format of rows.
    fs::rename(d.join("x/m"), d.join("x/n")).unwrap();
    fs::copy(d.join("x/n/rows.tsv"), d.join("x/other.tsv")).unwrap();
    fs::copy(d.join("x/n/rows.tsv"), d.join("x/other.txt")).unwrap();
    let moved = |rows: &'static str| {
        ["fit", "--resume-from-checkpoint", "r", "-m", "x/n", "-d", rows, "--compute-dtype", "f32", "--max-steps", "3"]
    };
    refused(d, &moved("x/other.txt"), 2);
    ok(d, &moved("x/other.tsv"));
    // A setting that cannot change is an error, and nothing is said of rows that other versions chose.
    let said = refused(d, &[&moved("x/other.tsv")[..], &["--val-split", "0.3"]].concat(), 2);
    assert!(said.contains("--val-split is 0.3, but the checkpoint was made with --val-split 0"), "{said}");
    assert!(!said.contains("warning"), "{said}");
    fs::write(d.join("s.toml"), "output_dir = \"r\"\nmodel = \"x/n\"\ndata = [\"x/n/rows.tsv\"]\n").unwrap();
    let out = run(d, &["fit", "-c", "s.toml", "--resume-from-checkpoint"]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(!said.contains("needs the run folder"), "{said}");
}

/// One folder has a name that a shell takes apart unless it is quoted, the other a name that --resume-from-checkpoint takes for no
/// folder.
#[test]
#[cfg(unix)]
fn the_printed_command_resumes_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    model(d);
    ok(d, &fit("plain", &["--save-steps", "0"]));
    // A folder where the program has the name that the command calls it by.
    fs::create_dir(d.join("bin")).unwrap();
    std::os::unix::fs::symlink(program(), d.join("bin/train-cli")).unwrap();
    for run in ["my $run", "false"] {
        interrupted_and_resumed(d, run);
        assert!(outcome(&d.join(run)) == outcome(&d.join("plain")), "the resumed run {run} differs");
    }
}

/// Interrupts a run, and resumes it by the command that it prints.
#[cfg(unix)]
fn interrupted_and_resumed(d: &Path, run: &str) {
    let mut command = command(d, &fit(run, &["--save-steps", "0"]));
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.contains("tok/s")), "the run printed no step");
    send(&child, "-INT");
    let said: Vec<String> = lines.collect();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{said:?}");
    let printed = said.iter().find_map(|line| line.split_once("Resume it with: ")).expect("a command").1;
    assert!(printed.starts_with("train-cli fit "), "{printed}");
    let path = format!("{}:{}", d.join("bin").display(), std::env::var("PATH").unwrap());
    let out = Command::new("sh").args(["-c", printed]).current_dir(d).env("PATH", path).output().unwrap();
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && stderr.contains(&format!("{run}/checkpoint-")), "{printed}: {stderr}");
}
