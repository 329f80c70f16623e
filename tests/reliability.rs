//! Nothing is lost and nothing lies: signals, kills before the first checkpoint, locks, outputs that cannot be written, and
//! inputs that are no files. Every test runs the program as a process of its own.

use crate::support::{
    files::{command, demo_file, ok, run, tiny_model},
    golden,
};
use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::process::ExitStatusExt,
    path::Path,
    process::{Child, Command, Stdio},
};

const FIT: [&str; 16] = [
    "fit",
    "-m",
    "m",
    "-d",
    "m/demo.tsv",
    "--device",
    "cpu",
    "--max-seq-length",
    "64",
    "--learning-rate",
    "1e-3",
    "--max-steps",
    "30",
    "--save-steps",
    "0",
    "--eval-steps",
];

/// The words of a run of thirty steps that saves only its last.
fn fit(output: &'static str) -> Vec<&'static str> {
    [&FIT[..], &["0", "-o", output]].concat()
}

/// Starts a run and waits until it has made a step.
fn after_its_first_step(folder: &Path, args: &[&str]) -> Child {
    let mut child = command(folder, args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let step = lines.by_ref().map(|line| line.unwrap()).find(|line| line.contains("loss"));
    assert!(step.is_some(), "the run printed no step");
    // Somebody must read what the run prints.
    std::thread::spawn(move || lines.for_each(drop));
    child
}

fn send(child: &Child, signal: &str) {
    assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
}

/// The standard error of a command that must end with `code`.
fn refused(folder: &Path, args: &[&str], code: i32) -> String {
    let out = run(folder, args);
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(code), "{args:?}: {stderr}");
    stderr
}

fn same_weights(folder: &Path, runs: [&str; 2]) {
    let [a, b] = runs.map(|run| fs::read(folder.join(run).join("final/model.dat")).unwrap());
    assert!(a == b, "{} and {} export other weights", runs[0], runs[1]);
}

#[test]
fn a_signal_saves_and_the_resumed_run_is_the_uninterrupted_one() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    ok(d, &fit("whole"));
    for (signal, code, name) in [("-INT", 130, "interrupted"), ("-TERM", 143, "terminated"), ("-HUP", 129, "hung-up")] {
        let mut words = fit(name);
        words.extend(["--gradient-accumulation-steps", "1"]);
        let mut child = after_its_first_step(d, &words);
        send(&child, signal);
        let status = child.wait().unwrap();
        assert_eq!(status.code(), Some(code), "{signal}: {status}");
        let saved: Vec<_> = fs::read_dir(d.join(name)).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert!(saved.iter().any(|f| f.to_string_lossy().starts_with("checkpoint-")), "{signal}: {saved:?}");
        assert!(!d.join(name).join("final").exists(), "{signal}: the run ended before the signal");
        ok(d, &["fit", "--resume-from-checkpoint", name]);
        same_weights(d, ["whole", name]);
    }
}

#[test]
fn two_signals_at_once_end_the_run_and_harm_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    ok(d, &fit("whole"));
    let mut child = after_its_first_step(d, &fit("twice"));
    send(&child, "-INT");
    send(&child, "-INT");
    let status = child.wait().unwrap();
    // The first signal may have ended the run before the second arrived.
    assert!(status.code() == Some(130) || status.signal() == Some(2), "{status}");
    let mut words = fit("twice");
    words.extend(["--resume-from-checkpoint"]);
    ok(d, &words);
    same_weights(d, ["whole", "twice"]);
}

#[test]
fn a_run_that_was_killed_before_its_first_checkpoint_starts_again() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    ok(d, &fit("whole"));
    let mut child = after_its_first_step(d, &fit("killed"));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(d.join("killed/config.toml").exists());
    let stderr = refused(d, &fit("killed"), 2);
    assert!(stderr.contains("--resume-from-checkpoint"), "{stderr}");
    // The folder knows the settings of the run.
    let out = run(d, &["fit", "--resume-from-checkpoint", "killed"]);
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && stderr.contains("starts at its first step"), "{stderr}");
    same_weights(d, ["whole", "killed"]);

    // Killed before the folder was made, or before anything but its lock was in it.
    for name in ["not-made", "locked"] {
        if name == "locked" {
            fs::create_dir(d.join(name)).unwrap();
            fs::write(d.join(name).join("lock"), "").unwrap();
        }
        let mut words = fit(name);
        words.push("--resume-from-checkpoint");
        ok(d, &words);
        same_weights(d, ["whole", name]);
    }
    // A folder that is no run is not taken for one.
    let stderr = refused(d, &["fit", "--resume-from-checkpoint", "m"], 2);
    assert!(stderr.contains("no checkpoint"), "{stderr}");
}

#[test]
fn a_run_folder_belongs_to_one_process_and_the_other_is_told_which() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    fs::create_dir(d.join("r")).unwrap();
    let lock = train_cli::durable::lock(&d.join("r")).unwrap();
    let stderr = refused(d, &fit("r"), 2);
    let own = format!("process {} on ", std::process::id());
    assert!(stderr.contains(&own) && stderr.contains("since 20"), "{stderr}");
    drop(lock);
    // Of two that start together one trains.
    let mut children =
        [(); 2].map(|()| command(d, &fit("r")).stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap());
    let mut codes: Vec<_> = children.iter_mut().map(|child| child.wait().unwrap().code()).collect();
    codes.sort_unstable();
    assert_eq!(codes, [Some(0), Some(2)]);
}

#[test]
fn results_that_could_not_be_written_are_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    for args in [
        &["inspect", "m"][..],
        &["generate", "-m", "m", "-p", "hi", "--max-tokens", "3", "--device", "cpu"],
        &["generate", "-m", "m", "-p", "hi", "--max-tokens", "3", "--device", "cpu", "--json"],
        &["fit", "-m", "m", "-d", "m/demo.tsv", "--dry-run", "-o", "r"],
    ] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let out = command(d, args).stdout(full).output().unwrap();
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{args:?}: {stderr}");
        assert!(stderr.contains("standard output"), "{args:?}: {stderr}");
    }
}

#[test]
fn outputs_are_refused_before_the_training() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    fs::create_dir(d.join("sealed")).unwrap();
    assert!(Command::new("mkfifo").arg(d.join("pipe.dat")).status().unwrap().success());
    for (more, said) in [
        (&["--output-dat", "model.bin"][..], "must end in .dat"),
        (&["--output-dat", "/dev/null"], "a pipe or a device"),
        (&["--output-dat", "pipe.dat"], "a pipe or a device"),
        (&["--output-dat", "nowhere/model.dat"], "there is no folder nowhere"),
        (&["--output-dat", "model.dat", "--save-strategy", "no"], "--save-strategy no"),
        (&["--recipe", "bf16", "--scales", "two"], "--scales changes nothing"),
        (&["--bf16-last-blocks", "99"], "--bf16-last-blocks 99: the model has"),
        (&["--peak-tflops=-1"], "--peak-tflops"),
    ] {
        let stderr = refused(d, &[&fit("r")[..], more].concat(), 2);
        assert!(stderr.contains(said), "{more:?}: {stderr}");
        assert!(!d.join("r/config.toml").exists(), "{more:?}");
    }
    let stderr = refused(d, &["parity", "-m", "m", "--expected", "m/model.safetensors", "--dump", "/dev/null"], 2);
    assert!(stderr.contains("a pipe or a device"), "{stderr}");
}

#[test]
fn inputs_that_may_never_end_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    for name in ["pipe.tsv", "m/pipe.dat", "pipe.safetensors"] {
        assert!(Command::new("mkfifo").arg(d.join(name)).status().unwrap().success());
    }
    for args in [
        &["fit", "-m", "m", "-d", "pipe.tsv", "--dry-run"][..],
        &["fit", "-m", "m", "-d", "/dev/zero", "--format", "text", "--dry-run"],
        &["fit", "-m", "m", "-d", "m/demo.tsv", "--eval-data", "pipe.tsv", "--dry-run"],
        &["fit", "-c", "pipe.tsv"],
        &["inspect", "m/pipe.dat"],
        &["inspect", "pipe.safetensors"],
        &["generate", "-m", "m/pipe.dat", "-p", "hi", "--device", "cpu"],
        &["parity", "-m", "m", "--expected", "pipe.safetensors"],
    ] {
        let stderr = refused(d, args, 2);
        assert!(stderr.contains("a regular file is needed"), "{args:?}: {stderr}");
    }
}

#[test]
fn overwrite_keeps_what_no_run_wrote() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    ok(d, &fit("r"));
    for name in ["checkpoint-notes.txt", "stale-notes", "checkpoint-+3"] {
        fs::write(d.join("r").join(name), "mine").unwrap();
        let stderr = refused(d, &[&fit("r")[..], &["--overwrite"]].concat(), 2);
        assert!(stderr.contains(name) && stderr.contains("nothing was removed"), "{stderr}");
        assert!(d.join("r/final/model.dat").exists());
        fs::remove_file(d.join("r").join(name)).unwrap();
    }
    ok(d, &[&fit("r")[..], &["--overwrite"]].concat());
}

#[test]
fn parity_says_so_when_a_model_is_damaged() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let fixture = golden("hf-qwen3/tiny-tied");
    for entry in fs::read_dir(&fixture).unwrap().map(|e| e.unwrap()) {
        fs::copy(entry.path(), d.join(entry.file_name())).unwrap();
    }
    let args = ["parity", "-m", ".", "--expected", "expected.safetensors", "--device", "cpu"];
    assert!(ok(d, &args).contains("PASS"));
    // One bit of one weight, the lowest of its exponent.
    let file = d.join("model.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last - 4000] ^= 0x40;
    fs::write(&file, bytes).unwrap();
    let out = run(d, &args);
    assert_eq!(out.status.code(), Some(6), "{}", String::from_utf8_lossy(&out.stderr));
    assert!(String::from_utf8_lossy(&out.stdout).contains("FAIL"));
    assert!(String::from_utf8_lossy(&out.stderr).contains("parity failed"));
}

/// The tokenizer's file may ask for truncation, padding and dropout: a text must give all its tokens nevertheless.
#[test]
fn truncation_padding_and_dropout_of_a_tokenizer_are_not_obeyed() {
    let dir = tempfile::tempdir().unwrap();
    let path = demo_file("tokenizer.json");
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let plain = model_qwen3::tokenizer::Tokenizer::from_file(&path).unwrap();
    json["truncation"] =
        serde_json::json!({"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0});
    json["padding"] = serde_json::json!({
        "strategy": {"Fixed": 32}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "!",
    });
    json["model"]["dropout"] = serde_json::json!(1.0);
    let changed = dir.path().join("tokenizer.json");
    fs::write(&changed, json.to_string()).unwrap();
    let changed = model_qwen3::tokenizer::Tokenizer::from_file(&changed).unwrap();
    let text = "A sentence with more than a handful of words, so that a limit of four tokens would cut it.";
    let ids = plain.encode(text).unwrap();
    assert!(ids.len() > 8);
    assert_eq!(changed.encode(text).unwrap(), ids);
}
