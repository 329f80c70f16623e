//! A run that is killed or interrupted at any moment, its first step and its export included, is finished by the same command
//! with `--resume-from-checkpoint`, and ends with the bits of a run that nobody stopped. Killed exports and conversions leave
//! nothing or everything, and of two runs for one folder one wins. All processes are real.
//!
//! CI kills two hundred training runs, and stops a few of the others. These stop hundreds:
//!
//!     cargo test --workspace --test promises -- --ignored hundred
//!
//! This one kills training runs as often as `KILLS` says, a thousand times without it, at moments that follow from `SEED`. A
//! thousand take about twenty minutes; several processes with seeds of their own share them:
//!
//!     SEED=9 KILLS=1000 cargo test --workspace --test promises -- --ignored a_thousand_kills

use crate::support::{
    Random,
    files::{command, names, ok, run, send, tiny_model},
};
use serde_json::Value;
use std::{
    fs,
    path::Path,
    process::{Child, ExitStatus, Stdio},
    time::{Duration, Instant},
};

#[test]
fn a_hundred_kills_end_with_the_same_bits() {
    stop(100, 1, "-KILL");
}

#[test]
fn another_hundred_kills_end_with_the_same_bits() {
    stop(100, 2, "-KILL");
}

#[test]
#[ignore = "it takes about twenty minutes; the two tests of a hundred kills are made always"]
fn a_thousand_kills_end_with_the_same_bits() {
    let number = |name: &str, default: usize| {
        std::env::var(name)
            .map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name} is no number: {text}")))
    };
    stop(number("KILLS", 1000), number("SEED", 9) as u64, "-KILL");
}

#[test]
#[cfg(unix)]
fn interrupted_runs_end_with_the_same_bits() {
    stop(3, 3, "-INT");
    stop(3, 4, "-TERM");
}

#[test]
#[cfg(unix)]
#[ignore = "a hundred signals; interrupted_runs_end_with_the_same_bits sends six"]
fn one_hundred_signals_end_with_the_same_bits() {
    stop(50, 5, "-INT");
    stop(50, 6, "-TERM");
}

#[test]
fn killed_exports_and_conversions_leave_all_or_nothing() {
    kill_writers(6, 7);
}

#[test]
#[ignore = "two hundred kills; killed_exports_and_conversions_leave_all_or_nothing makes twelve"]
fn two_hundred_killed_exports_leave_all_or_nothing() {
    kill_writers(100, 8);
}

#[test]
fn of_two_runs_for_one_folder_one_wins() {
    race(3);
}

#[test]
#[ignore = "fifty races; of_two_runs_for_one_folder_one_wins makes three"]
fn a_hundred_runs_race_in_pairs_and_one_of_each_wins() {
    race(50);
}

/// Starts a command and stops it by a signal after `after`, or lets it end before. What it says goes into `stderr`.
fn stopped(d: &Path, words: &[&str], after: Duration, signal: &str) -> ExitStatus {
    let said = fs::File::create(d.join("stderr")).unwrap();
    let mut child = command(d, words).stdout(Stdio::null()).stderr(said).spawn().unwrap();
    let until = Instant::now() + after;
    while Instant::now() < until && child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(1));
    }
    if child.try_wait().unwrap().is_none() {
        send(&child, signal);
    }
    child.wait().unwrap()
}

fn fit(output: &str) -> Vec<&str> {
    let words =
        "fit -m m -d m/demo.tsv --device cpu --max-seq-length 64 --learning-rate 1e-3 --max-steps 12 --save-steps 4";
    words.split(' ').chain(["--eval-steps", "6", "--output-dat", "../out.dat", "-o", output]).collect()
}

/// Stops runs by a signal at random moments.
fn stop(times: usize, seed: u64, signal: &str) {
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
        let (mut steps, mut logged) = (0, 0);
        // A run is killed up to three times, and then left alone.
        for _ in 0..3 {
            let mut words = fit("killed");
            words.extend(resumes.then_some("--resume-from-checkpoint"));
            // A run that resumes late ends soon.
            let left = 1.0 - 0.8 * steps as f64 / 12.0;
            let after = length.mul_f64(left * f64::from(random.uniform()));
            let status = stopped(&d, &words, after, signal);
            let expected = [Some(0), Some(130), Some(143)].contains(&status.code());
            // A signal that arrives before the program listens ends it at once, as SIGKILL does at any time: no step is made then.
            // And one that arrives when everything is written finds nothing to save.
            let killed = d.join("killed");
            let idle = self::logged(&killed) <= logged || killed.join("train_results.json").exists();
            let at_once = status.code().is_none() && (signal == "-KILL" || idle);
            assert!(expected || at_once, "{status}, with {logged} steps before");
            (resumes, kills) = (true, kills + usize::from(!status.success()));
            // A checkpoint is begun after each save interval. It is complete before the next step is logged or, if that takes
            // longer than four steps, before the next checkpoint is begun.
            let (saved, begun) = (newest(&killed), begun(&killed));
            let said = fs::read_to_string(d.join("stderr")).unwrap();
            let late = said.contains("note: training does not wait until a checkpoint is written");
            logged = self::logged(&killed);
            let seen = format!("{logged} steps are made, {begun} of a checkpoint that was begun, {saved} are saved");
            assert!(saved >= steps && logged <= begun.max(saved) + 5 && begun <= saved + 4, "{seen}");
            assert!(late || logged <= saved + 4, "{seen}");
            steps = saved;
            // It ended before its signal, which does not count.
            if status.success() {
                break;
            }
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

/// Kills `export-dat` and `convert` at random moments: the target is not there, or complete, and the next call cleans up.
fn kill_writers(times: usize, seed: u64) {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let words = "fit -m m -d m/demo.tsv --device cpu --max-seq-length 64 --max-steps 2 --eval-steps 0 -o r";
    ok(d, &words.split(' ').collect::<Vec<_>>());
    let mut random = Random::new(seed);
    for words in [
        "export-dat --checkpoint r/checkpoint-2 --output-dat out/x.dat --device cpu --overwrite",
        "convert m/model.safetensors out/x.dat --to dat --dtype nvfp4 --overwrite",
    ] {
        let words: Vec<&str> = words.split(' ').collect();
        fs::create_dir(d.join("out")).unwrap();
        let started = Instant::now();
        ok(d, &words);
        let length = started.elapsed();
        let whole = fs::read(d.join("out/x.dat")).unwrap();
        // `convert` puts the model's small files beside its output.
        let expected = names(&d.join("out"));
        assert_eq!(expected.contains("config.json"), words[0] == "convert", "{expected:?}");
        assert!(!expected.iter().any(|name| name.starts_with('.')), "{expected:?}");
        let (mut kills, mut tries) = (0, 0);
        while kills < times {
            // A call that had ended before it was to be killed says nothing.
            tries += 1;
            assert!(tries <= 10 * times, "of {tries} calls only {kills} were killed");
            let kill = kills;
            // Every second call finds an older file.
            if kill % 2 == 0 {
                let _ = fs::remove_file(d.join("out/x.dat"));
            } else {
                fs::write(d.join("out/x.dat"), "an older file").unwrap();
            }
            let status = stopped(d, &words, length.mul_f64(f64::from(random.uniform())), "-KILL");
            kills += usize::from(status.code().is_none());
            if let Ok(found) = fs::read(d.join("out/x.dat")) {
                let older = kill % 2 == 1 && found == b"an older file";
                assert!(found == whole || older, "kill {kill} of {words:?} left another file");
            } else {
                assert!(kill % 2 == 0, "kill {kill} of {words:?} removed the older file");
            }
        }
        ok(d, &words);
        assert_eq!(names(&d.join("out")), expected, "{words:?}");
        assert!(fs::read(d.join("out/x.dat")).unwrap() == whole);
        fs::remove_dir_all(d.join("out")).unwrap();
    }
}

/// Starts two runs for one folder at the same moment. One trains, for long enough that the other comes meanwhile. The other names
/// the process that trains, its host, and since when.
fn race(times: usize) {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    for round in 0..times {
        let words = "fit -m m -d m/demo.tsv --device cpu --max-seq-length 64 --max-steps 20 --eval-steps 0 -o";
        let output = format!("r{round}");
        let words: Vec<&str> = words.split(' ').chain([output.as_str()]).collect();
        let start = || command(d, &words).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let both = [start(), start()];
        let ids = both.each_ref().map(Child::id);
        let both = both.map(|child| child.wait_with_output().unwrap());
        let won = both.iter().filter(|out| out.status.success()).count();
        let said = both.iter().map(|out| String::from_utf8_lossy(&out.stderr)).collect::<String>();
        assert_eq!(won, 1, "round {round}: {said}");
        let loser = both.iter().position(|out| !out.status.success()).unwrap();
        let stderr = String::from_utf8_lossy(&both[loser].stderr);
        assert_eq!(both[loser].status.code(), Some(2), "round {round}: {stderr}");
        let winner = format!("process {} on ", ids[1 - loser]);
        let said = stderr.split_once(&winner).and_then(|(_, rest)| rest.split_once(", since 20"));
        let is_named = said.is_some_and(|(host, _)| !host.trim().is_empty() && !host.contains('\n'));
        assert!(is_named, "round {round}, won by {}: {stderr}", ids[1 - loser]);
        ok(d, &["inspect", &format!("{output}/final"), "--verify"]);
    }
}

/// The number in the name of the newest checkpoint.
fn newest(run: &Path) -> usize {
    let names = fs::read_dir(run).into_iter().flatten().map(|e| e.unwrap().file_name().into_string().unwrap());
    names.filter_map(|name| name.strip_prefix("checkpoint-")?.parse().ok()).max().unwrap_or(0)
}

/// The step of the checkpoint that a process had begun to write when it was killed; 0 if there is none.
fn begun(run: &Path) -> usize {
    let names = fs::read_dir(run).into_iter().flatten().map(|e| e.unwrap().file_name().into_string().unwrap());
    let step = |name: String| name.strip_prefix(".tmp-")?.split_once("-checkpoint-")?.1.parse().ok();
    names.filter_map(step).max().unwrap_or(0)
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
            for key in ["tokens_per_second", "memory_mib", "model_tflops", "seconds", "answering", "settings"] {
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
