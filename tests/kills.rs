//! A run that is killed at any moment, its first step and its export included, is finished by the same command with
//! `--resume-from-checkpoint`, and ends with the bits of a run that nobody killed. Every kill is a SIGKILL of a real process.
//!
//! CI makes a few kills. Two hundred, of which the last result is in the notebook:
//!
//!     cargo test --workspace --test promises -- --ignored two_hundred_kills

use crate::support::{
    Random,
    files::{command, ok, run, tiny_model},
};
use serde_json::Value;
use std::{
    fs,
    path::Path,
    process::Stdio,
    time::{Duration, Instant},
};

#[test]
fn killed_runs_end_with_the_same_bits() {
    kill(6, 1);
}

#[test]
#[ignore = "it takes about twenty minutes; killed_runs_end_with_the_same_bits makes six kills"]
fn two_hundred_kills_end_with_the_same_bits() {
    kill(200, 2);
}

fn fit(output: &str) -> Vec<&str> {
    let words =
        "fit -m m -d m/demo.tsv --device cpu --max-seq-length 64 --learning-rate 1e-3 --max-steps 12 --save-steps 4";
    words.split(' ').chain(["--eval-steps", "6", "--output-dat", "../out.dat", "-o", output]).collect()
}

/// Kills runs at random moments, each as often as it takes to end.
fn kill(times: usize, seed: u64) {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path().join("work");
    tiny_model(&d.join("m"), true);
    let started = Instant::now();
    ok(&d, &fit("whole"));
    let length = started.elapsed();
    let whole = outcome(&d, "whole");
    let mut random = Random::new(seed);
    let mut kills = 0;
    while kills < times {
        let _ = fs::remove_dir_all(d.join("killed"));
        let _ = fs::remove_file(dir.path().join("out.dat"));
        let mut resumes = false;
        let mut steps = 0;
        // A run is killed up to three times, and then left alone.
        for _ in 0..3 {
            let mut words = fit("killed");
            words.extend(resumes.then_some("--resume-from-checkpoint"));
            let mut child = command(&d, &words).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
            let until = Instant::now() + length.mul_f64(f64::from(random.uniform()));
            while Instant::now() < until && child.try_wait().unwrap().is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
            child.kill().unwrap();
            child.wait().unwrap();
            (resumes, kills) = (true, kills + 1);
            // No more than one save interval is lost.
            let saved = newest(&d.join("killed"));
            let logged = logged(&d.join("killed"));
            assert!(saved >= steps && logged <= saved + 5, "{logged} steps are made and {saved} saved");
            steps = saved;
        }
        let mut words = fit("killed");
        words.push("--resume-from-checkpoint");
        let out = run(&d, &words);
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "after {kills} kills: {stderr}");
        let killed = outcome(&d, "killed");
        for ((name, a), (_, b)) in whole.iter().zip(&killed) {
            assert!(a == b, "after {kills} kills (seed {seed}): {name} differs\n{stderr}");
        }
        let left: Vec<_> = fs::read_dir(d.join("killed")).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert!(left.iter().all(|name| !name.to_string_lossy().starts_with('.')), "{left:?}");
    }
}

/// The number in the name of the newest checkpoint.
fn newest(run: &Path) -> usize {
    let names = fs::read_dir(run).into_iter().flatten().map(|e| e.unwrap().file_name().into_string().unwrap());
    names.filter_map(|name| name.strip_prefix("checkpoint-")?.parse().ok()).max().unwrap_or(0)
}

fn logged(run: &Path) -> usize {
    fs::read_to_string(run.join("metrics.jsonl")).map_or(0, |text| text.matches("grad_norm").count())
}

/// What must be equal: the exports, the last checkpoint, and every log without times, speeds and memory.
fn outcome(d: &Path, name: &str) -> Vec<(&'static str, Vec<u8>)> {
    let run = d.join(name);
    let files = [
        "final/model.dat",
        "checkpoint-12/model.safetensors",
        "checkpoint-12/optimizer.safetensors",
        "samples.jsonl",
        "beginning.safetensors",
        "../../out.dat",
    ];
    let mut all: Vec<_> =
        files.map(|file| (file, fs::read(run.join(file)).unwrap_or_else(|e| panic!("{file}: {e}")))).into();
    let timeless = |text: String| -> Vec<u8> {
        let line = |line: &str| {
            let mut value: Value = serde_json::from_str(line).unwrap();
            for key in ["tokens_per_second", "memory_mib", "model_tflops", "seconds", "settings"] {
                value.as_object_mut().unwrap().remove(key);
            }
            for key in ["train_runtime", "train_samples_per_second", "train_steps_per_second"] {
                value.as_object_mut().unwrap().remove(key);
            }
            value.to_string() + "\n"
        };
        text.lines().map(line).collect::<String>().into_bytes()
    };
    all.push(("metrics.jsonl", timeless(fs::read_to_string(run.join("metrics.jsonl")).unwrap())));
    for file in ["train_results.json", "checkpoint-12/trainer_state.json"] {
        let value: Value = serde_json::from_slice(&fs::read(run.join(file)).unwrap()).unwrap();
        all.push((file, timeless(value.to_string())));
    }
    all
}
