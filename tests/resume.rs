//! A run of two hundred steps that is resumed after its first step, in the middle or before its last one is the run that
//! nobody stopped: weights, optimizer states, losses and gradient norms have the same bits. So have several runs of one
//! command. And the command that an interrupted run prints resumes it as it stands.

use crate::support::files::{command, ok, program, send, tiny_model};
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
