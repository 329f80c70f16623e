//! Nothing is lost and nothing lies: signals, kills before the first checkpoint, locks, outputs that cannot be written, and
//! inputs that are no files. Every test runs the program as a process of its own.

use crate::{
    gpu_checkpoints,
    support::{
        faulty_disk::preloaded,
        files::{Cost, command, cost, demo_file, ok, program, refused, run, send, tiny_model},
        golden,
    },
};
use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::{fs::PermissionsExt, process::ExitStatusExt},
    path::Path,
    process::{Child, Command, Output, Stdio},
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

/// Starts a run and waits until it has made a step. Whoever runs the tests may ignore SIGHUP, as nohup does; the run does not.
fn after_its_first_step(folder: &Path, args: &[&str]) -> Child {
    let mut command = Command::new("env");
    command.arg("--default-signal=HUP").arg(program()).args(args).current_dir(folder).stdin(Stdio::null());
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let step = lines.by_ref().map(|line| line.unwrap()).find(|line| line.contains("tok/s"));
    assert!(step.is_some(), "the run printed no step");
    // Somebody must read what the run prints.
    std::thread::spawn(move || lines.for_each(drop));
    child
}

/// Runs the program under a limit that the shell's `ulimit` sets, such as `-f 100`.
fn limited(folder: &Path, limit: &str, args: &[&str]) -> Output {
    let line = format!("ulimit {limit}; exec \"$0\" \"$@\"");
    Command::new("sh").args(["-c", &line]).arg(program()).args(args).current_dir(folder).output().unwrap()
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
    assert!(
        out.status.success() && stderr.contains("has no checkpoint yet: the run starts at its first step"),
        "{stderr}"
    );
    same_weights(d, ["whole", "killed"]);
    // A name that was mistyped shows.
    let out = run(d, &[&fit("typo")[..], &["--resume-from-checkpoint", "--dry-run"]].concat());
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && stderr.contains("typo is not there: the run starts at its first step"), "{stderr}");

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
    // A dry run is refused as the run is, and so is one whose folder cannot be made.
    let stderr = refused(d, &[&fit("r")[..], &["--dry-run"]].concat(), 2);
    assert!(stderr.contains(&own), "{stderr}");
    drop(lock);
    for (output, code, said) in [("m/config.json/r", 2, "m/config.json is a file"), ("/proc/r", 1, "/proc/r: ")] {
        let stderr = refused(d, &[&fit(output)[..], &["--dry-run"]].concat(), code);
        assert!(stderr.contains(said), "{stderr}");
    }
    ok(d, &[&fit("new/deep/r")[..], &["--dry-run"]].concat());
    assert!(!d.join("new").exists(), "a dry run leaves something");
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
        &["fit", "--help"],
        &["--version"],
    ] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let out = command(d, args).stdout(full).output().unwrap();
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{args:?}: {stderr}");
        assert!(stderr.contains("standard output"), "{args:?}: {stderr}");
        // A reader that has closed its end of a pipe wanted no more.
        let (reader, closed) = std::io::pipe().unwrap();
        drop(reader);
        let out = command(d, args).stdout(closed).output().unwrap();
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success() && !stderr.contains("error"), "{args:?}: {stderr}");
    }
}

/// After an answer that could not be written, the program computes no other: nobody would get it.
#[test]
fn no_answer_is_made_after_one_that_could_not_be_written() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    fs::write(d.join("talk.txt"), "one\ntwo\nthree\n").unwrap();
    let model = ["-m", "m", "--device", "cpu", "--max-tokens", "3", "--json"];
    // chat prints figures after each answer. generate prints them once, after all answers.
    for (words, figures) in
        [(&["generate", "--prompts", "talk.txt", "--batch-size", "1"][..], 0), (&["chat", "--script", "talk.txt"], 1)]
    {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let (reader, closed) = std::io::pipe().unwrap();
        drop(reader);
        for (sink, code) in [(Stdio::from(full), 1), (Stdio::from(closed), 0)] {
            let out = command(d, &[words, &model].concat()).stdout(sink).output().unwrap();
            let stderr = String::from_utf8_lossy(&out.stderr);
            assert_eq!(out.status.code(), Some(code), "{words:?}: {stderr}");
            assert_eq!(stderr.matches("answer tokens").count(), figures, "{words:?}: {stderr}");
        }
    }
}

#[test]
fn outputs_are_refused_before_the_training() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    fs::create_dir(d.join("sealed")).unwrap();
    fs::set_permissions(d.join("sealed"), fs::Permissions::from_mode(0o555)).unwrap();
    assert!(Command::new("mkfifo").arg(d.join("pipe.dat")).status().unwrap().success());
    fs::create_dir(d.join("listed")).unwrap();
    fs::write(d.join("listed/manifest.json"), r#"{"version": 1, "files": {}}"#).unwrap();
    let long = "n".repeat(246) + ".dat";
    for (more, said) in [
        (&["--output-dat", "model.bin"][..], "must end in .dat"),
        (&["--output-dat", "/dev/null"], "a pipe or a device"),
        (&["--output-dat", "pipe.dat"], "a pipe or a device"),
        (&["--output-dat", "nowhere/model.dat"], "there is no folder nowhere"),
        (&["--output-dat", "m/config.json/model.dat"], "there is no folder m/config.json"),
        (&["--output-dat", "model.dat", "--save-strategy", "no"], "--save-strategy no"),
        (&["--output-dat", &long], "the name has 250 bytes"),
        (&["--token-cache", "m/config.json"], "--token-cache m/config.json: this is a file"),
        (&["--tokenizer", "m/config.json"], "--tokenizer m/config.json: this is a file"),
        (&["--memory-limit", "99999999999999999999GiB"], "--memory-limit 99999999999999999999GiB"),
        (&["--output-dat", "listed/model.dat"], "holds only the files that its manifest lists"),
        (&["--token-cache", "listed"], "holds only the files that its manifest lists"),
        (&["--token-cache", "listed/new/cache"], "listed is a checkpoint or an export"),
        (&["--output-dat", "model.dat", "--vram-report", "model.dat"], "this is the file of --output-dat"),
        (&["--output-dat", "r/x.dat"], "--output-dat r/x.dat: this must be outside the run folder"),
        (&["--vram-report", "r/vram.json"], "--vram-report r/vram.json: this must be outside the run folder"),
        (&["--token-cache", "./r/tokens"], "--token-cache ./r/tokens: this must be outside the run folder"),
        (&["--token-cache", "m/../r/tokens"], "this must be outside the run folder"),
        (&["--recipe", "bf16", "--scales", "two"], "--scales changes nothing"),
        (&["--bf16-last-blocks", "99"], "--bf16-last-blocks 99: the model has"),
        (&["--peak-tflops=-1"], "--peak-tflops"),
    ] {
        let stderr = refused(d, &[&fit("r")[..], more].concat(), 2);
        assert!(stderr.contains(said), "{more:?}: {stderr}");
        assert!(!d.join("r/config.toml").exists(), "{more:?}");
    }
    assert!(refused(d, &fit("m/config.json"), 2).contains("--output-dir m/config.json: this is a file"));
    let stderr = refused(d, &fit("listed/new/r"), 2);
    assert!(stderr.contains("--output-dir listed/new/r: listed is a checkpoint or an export"), "{stderr}");
    assert_eq!(fs::read_dir(d.join("listed")).unwrap().count(), 1);
    // A run that nobody names would lie in the current folder.
    let words = ["fit", "-m", "../m", "-d", "../m/demo.tsv", "--device", "cpu", "--dry-run"];
    assert!(refused(&d.join("listed"), &words, 2).contains(": . is a checkpoint or an export"));
    // Nobody writes to /proc. To whom no folder is sealed (root) the other one is none.
    let is_root = fs::write(d.join("sealed/probe"), "").is_ok();
    for folder in ["/proc", "sealed"].iter().filter(|folder| **folder != "sealed" || !is_root) {
        let output = format!("{folder}/model.dat");
        let stderr = refused(d, &[&fit("r")[..], &["--output-dat", &output]].concat(), 1);
        assert!(stderr.contains(folder) && !d.join("r/config.toml").exists(), "{stderr}");
    }
    let stderr = refused(d, &["parity", "-m", "m", "--expected", "m/model.safetensors", "--dump", "/dev/null"], 2);
    assert!(stderr.contains("a pipe or a device"), "{stderr}");
}

#[test]
fn inputs_that_may_never_end_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    for name in ["pipe.tsv", "m/pipe.dat", "pipe.safetensors", "pipe.gguf"] {
        assert!(Command::new("mkfifo").arg(d.join(name)).status().unwrap().success());
    }
    let model = "--model m/pipe.dat";
    for (args, named) in [
        (&["fit", "-m", "m", "-d", "pipe.tsv", "--dry-run"][..], "--data pipe.tsv"),
        (&["fit", "-m", "m", "-d", "/dev/zero", "--format", "text", "--dry-run"], "--data /dev/zero"),
        (&["fit", "-m", "m", "-d", "m/demo.tsv", "--eval-data", "pipe.tsv", "--dry-run"], "--eval-data pipe.tsv"),
        (&["fit", "-m", "m/pipe.dat", "-d", "m/demo.tsv", "--dry-run"], model),
        (&["fit", "-m", "/dev/zero", "-d", "m/demo.tsv", "--dry-run"], "--model /dev/zero"),
        (&["fit", "-c", "pipe.tsv"], "--config pipe.tsv"),
        (&["inspect", "m/pipe.dat"], "PATH m/pipe.dat"),
        (&["inspect", "pipe.safetensors"], "PATH pipe.safetensors"),
        (&["generate", "-m", "m/pipe.dat", "-p", "hi", "--device", "cpu"], model),
        (&["chat", "-m", "m/pipe.dat", "--device", "cpu"], model),
        (&["eval", "loss", "-m", "m/pipe.dat", "-d", "m/demo.tsv", "--device", "cpu"], model),
        (&["parity", "-m", "m", "--expected", "pipe.safetensors"], "--expected pipe.safetensors"),
        (&["export-dat", "-m", "m/pipe.dat", "--output-dat", "new.dat"], model),
        (&["convert", "pipe.safetensors", "new.dat", "--dtype", "bf16"], "INPUT pipe.safetensors"),
        (&["convert", "pipe.gguf", "new.dat", "--dtype", "bf16"], "INPUT pipe.gguf"),
        (&["data", "make", "pipe.tsv", "-o", "new.tsv"], "RECIPE pipe.tsv"),
    ] {
        let stderr = refused(d, args, 2);
        let said = format!("error: {named}: this is a pipe or a device; a regular file is needed");
        assert!(stderr.contains(&said), "{args:?}: {stderr}");
    }
    for args in [&["generate", "-m", "m", "-p", "-"][..], &["chat", "-m", "m"]] {
        let endless = fs::File::open("/dev/zero").unwrap();
        let ended = command(d, &[args, &["--device", "cpu"]].concat()).stdin(endless).output().unwrap();
        let stderr = String::from_utf8_lossy(&ended.stderr);
        assert!(ended.status.code() == Some(2) && stderr.contains("more than 64 MiB"), "{args:?}: {stderr}");
    }
}

/// The record of a run is UTF-8. A path that is not may come from a folder of data files, or from the working directory.
#[test]
#[cfg(target_os = "linux")]
fn a_path_that_no_record_can_hold_is_refused() {
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt};
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let rows = d.join("m/demo.tsv");
    fs::create_dir(d.join("rows")).unwrap();
    fs::copy(rows, d.join("rows").join(OsStr::from_bytes(b"dat\xff.tsv"))).unwrap();
    let said = refused(d, &["fit", "-m", "m", "-d", "rows", "--device", "cpu", "-o", "r"], 2);
    assert!(said.contains("--data ") && said.contains(".tsv: the path is not UTF-8"), "{said}");
    let folder = d.join(OsStr::from_bytes(b"nu\xff"));
    fs::create_dir(&folder).unwrap();
    let said = refused(&folder, &["fit", "--demo"], 2);
    assert!(said.contains("--init-config ") && said.contains("config.json: the path is not UTF-8"), "{said}");
    // The path of a config file is no setting. The record shows it only as a word of the command line, with U+FFFD for the byte.
    let config = OsStr::from_bytes(b"run\xff.toml");
    let text = "model = \"m\"\ndata = [\"m/demo.tsv\"]\ndevice = \"cpu\"\nmax_steps = 1\noutput_dir = \"c\"\n";
    fs::write(d.join(config), text).unwrap();
    let out = command(d, &["fit", "--config"]).arg(config).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    assert!(fs::read_to_string(d.join("c/run.json")).unwrap().contains("run\u{fffd}.toml"));
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

/// Templates that would overflow the stack, or write more than the memory holds.
#[test]
fn hostile_templates_are_errors() {
    use model_qwen3::chat_template::{ChatTemplate, RenderOptions};
    let refused = |source: String| {
        let shown: String = source.chars().take(60).collect();
        let rendered = ChatTemplate::new(source).and_then(|t| t.render(&[], RenderOptions::default()));
        rendered.expect_err(&shown).to_string()
    };
    let many = |text: &str, n: usize| text.repeat(n);
    // Deep, but not too deep for the stack: any answer is right, and none ends the process.
    for source in [
        format!("{{{{ {}1 }}}}", many("not ", 16_000)),
        format!("{{{{ {}1 }}}}", many("-", 60_000)),
        format!("{{{{ {}1{} }}}}", many("(", 30_000), many(")", 30_000)),
        format!("{{{{ 1{} }}}}", many("~1", 30_000)),
        format!("{{{{ 1{} }}}}", many("|int", 16_000)),
        format!("{{{{ a{} }}}}", many(".a", 30_000)),
        format!("{{{{ {}1 }}}}", many("1 if 1 else ", 5_000)),
        format!("{}{}", many("{%if 1%}", 3_500), many("{%endif%}", 3_500)),
        format!("{{%if 0%}}{}{{%endif%}}", many("{%elif 0%}", 6_000)),
        "{{ 'abc'[::-9223372036854775808] }}{{ [1, 2][::-9223372036854775808] }}".to_owned(),
        "{% for i in [-9223372036854775807] %}{{ 'abc'[::i - 1] }}{{ 'abc'[i - 1:] }}{% endfor %}".to_owned(),
    ] {
        let _ = ChatTemplate::new(source).and_then(|t| t.render(&[], RenderOptions::default()));
    }
    assert!(refused(many(" ", 100_000)).contains("at most 65536"));
    assert!(refused("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}".into()).contains("recursion"));
    assert!(refused("{{ [1]|tojson(indent=1000000000000) }}".into()).contains("indent=1000000000000"));
    assert!(refused("{{ '{:>1000000000000}'.format('x') }}".into()).contains("at most 256"));
    assert!(
        refused("{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}".into())
            .contains("fuel")
    );
}

/// Texts that double, in each way that templates have, and one whose time no count of steps limits. Rendering cannot be stopped,
/// so that the program ends.
#[test]
#[cfg(target_os = "linux")]
fn a_template_that_takes_memory_or_time_without_end_ends_the_program_with_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let words = ["generate", "-m", "m", "--device", "cpu", "-p", "hello", "--max-tokens", "1"];
    let usual = cost(d, &words).memory;
    let looped = |change: &str| {
        format!("{{% set n = namespace(x='aaaaaaaa') %}}{{% for i in range(60) %}}{change}{{% endfor %}}")
    };
    let limits = ["more than 48 MiB", "bytes; at most", "recursion", "too large"];
    for template in [
        looped("{% set n.x = n.x ~ n.x %}"),
        looped("{% set n.x = n.x + n.x %}"),
        looped("{% set n.x = [n.x, n.x]|join %}"),
        looped("{% set n.x = n.x|replace('a', 'aa') %}"),
        looped("{% set n.x = '%s%s'|format(n.x, n.x) %}"),
        "{% macro m(n) %}{% if n %}{% set x = m(n - 1) %}{{ x }}{{ x }}{% else %}aaaaaaaa{% endif %}{% endmacro %}{{ m(60) }}".into(),
    ] {
        fs::write(d.join("m/chat_template.jinja"), &template).unwrap();
        let stderr = refused(d, &words, 2);
        assert!(limits.iter().any(|limit| stderr.contains(limit)), "{template}: {stderr}");
        let Cost { seconds, memory, .. } = cost(d, &words);
        assert!(seconds <= 2.0 && memory <= usual + (64 << 20), "{template}: {seconds} s, {} MiB", memory >> 20);
    }
    let searched = "{% set x = 'a' * 4000000 %}{% for i in range(100000) %}{% if 'b' in x %}{% endif %}{% endfor %}";
    fs::write(d.join("m/chat_template.jinja"), searched).unwrap();
    let stderr = refused(d, &words, 2);
    assert!(stderr.contains("more than 2 seconds"), "{stderr}");
}

#[test]
fn a_config_that_no_qwen3_has_is_refused_before_anything_is_allocated() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let path = d.join("m/config.json");
    let good: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for (field, value) in [
        ("num_hidden_layers", 16_777_216u64),
        ("hidden_size", 16_777_216),
        ("num_attention_heads", 16_777_216),
        ("head_dim", 16_777_216),
        ("intermediate_size", 1 << 40),
        ("vocab_size", 1 << 40),
    ] {
        let mut config = good.clone();
        config[field] = value.into();
        fs::write(&path, config.to_string()).unwrap();
        let stderr = refused(d, &["fit", "--init-config", "m/config.json", "-d", "m/demo.tsv", "--dry-run"], 2);
        assert!(stderr.contains(field) && stderr.contains("whole number from 1 to"), "{field}: {stderr}");
    }
}

/// Weights that are not finite reach no file.
#[test]
fn a_checkpoint_of_weights_that_are_not_finite_is_not_written() {
    use backend_nvfp4::{LinearSpec, MasterKind, Precision, Recipe, Scaling};
    use burn::{backend::NdArray, tensor::Tensor};
    use model_qwen3::{config::Qwen3Config, weights, write::write_safetensors};
    let dir = tempfile::tempdir().unwrap();
    tiny_model(dir.path(), true);
    let config = Qwen3Config::from_file(&dir.path().join("config.json")).unwrap();
    let spec = LinearSpec::new(Recipe::W4, Scaling::Two, Precision::F32);
    let mut model = weights::random::<NdArray>(&config, spec, MasterKind::F32, 5, &Default::default()).unwrap();
    let write = |model: &_| {
        let failed = |e| model_qwen3::ModelError::io("memory".as_ref(), "")(e);
        write_safetensors(&weights::Live::new(model), Vec::new(), failed)
    };
    write(&model).unwrap();
    let norm = model.norm.val();
    let mut values: Vec<f32> = norm.to_data().to_vec().unwrap();
    values[1] = f32::NAN;
    model.norm = model.norm.map(|_| Tensor::from_floats(values.as_slice(), &Default::default()));
    let error = write(&model).unwrap_err().to_string();
    assert!(error.contains("model.norm.weight") && error.contains("NaN"), "{error}");
}

/// A resumed run says of itself what an uninterrupted one says, from any working directory, and can be made longer.
#[test]
fn a_resumed_run_is_one_run() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let short = |output: &'static str, steps: &'static str| {
        let mut words = fit(output);
        let at = words.iter().position(|word| *word == "30").unwrap();
        words[at] = steps;
        words
    };
    ok(d, &short("whole", "20"));
    ok(d, &short("r", "10"));
    let elsewhere = tempfile::tempdir().unwrap();
    let run_folder = d.join("r").display().to_string();
    let resume = ["fit", "--resume-from-checkpoint", &run_folder];
    let out = run(elsewhere.path(), &[&resume[..], &["--max-steps", "20"]].concat());
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success() && stderr.contains("now has 20 steps, 10 before"), "{stderr}");
    assert!(stderr.contains("before  ") && stderr.contains("after  "), "{stderr}");
    let results = |name: &str| -> serde_json::Value {
        serde_json::from_slice(&fs::read(d.join(name).join("train_results.json")).unwrap()).unwrap()
    };
    for key in ["global_step", "epoch", "train_samples", "steps_left_out"] {
        assert_eq!(results("r")[key], results("whole")[key], "{key}");
    }
    assert!(results("r")["codes_changed_pct"].as_f64().is_some_and(|share| share > 0.0), "{}", results("r"));
    let steps = fs::read_to_string(d.join("r/metrics.jsonl")).unwrap().matches("grad_norm").count();
    assert_eq!(steps, 20);
    let out = run(elsewhere.path(), &[&resume[..], &["--max-steps", "15"]].concat());
    assert_eq!(out.status.code(), Some(2), "{}", String::from_utf8_lossy(&out.stderr));
    assert!(String::from_utf8_lossy(&out.stderr).contains("has made 20 steps"));
}

/// What a complete run lacks is made again: its record alone does not make it complete.
#[test]
fn a_complete_run_without_its_outputs_makes_them_again() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let mut words = fit("r");
    words.extend(["--output-dat", "r.dat"]);
    ok(d, &words);
    let exported = fs::read(d.join("r.dat")).unwrap();
    let resume = || {
        let out = run(d, &["fit", "--resume-from-checkpoint", "r"]);
        let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.success(), "{stderr}");
        stderr
    };
    assert!(resume().contains("is complete at step 30"));
    for lost in ["r.dat", "r.dat.trained.json", "r/train_results.json", "r/final/model.dat"] {
        fs::remove_file(d.join(lost)).unwrap();
        assert!(!resume().contains("is complete"), "{lost}");
        assert!(d.join(lost).exists() && fs::read(d.join("r.dat")).unwrap() == exported, "{lost}");
        assert!(resume().contains("is complete at step 30"), "{lost}");
    }
}

/// A checkpoint whose weights are not finite is skipped, although its manifest is right.
#[test]
fn the_newest_good_checkpoint_is_resumed() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let mut words = fit("r");
    let at = words.iter().position(|word| *word == "--save-steps").unwrap();
    words[at + 1] = "10";
    ok(d, &words);
    let folder = d.join("r/checkpoint-30");
    let mut bytes = fs::read(folder.join("model.safetensors")).unwrap();
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&f32::NAN.to_le_bytes());
    let digest = |bytes: &[u8]| -> String {
        use sha2::Digest;
        sha2::Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
    };
    let old = digest(&fs::read(folder.join("model.safetensors")).unwrap());
    let manifest = fs::read_to_string(folder.join("manifest.json")).unwrap();
    assert!(manifest.contains(&old));
    fs::write(folder.join("manifest.json"), manifest.replace(&old, &digest(&bytes))).unwrap();
    fs::write(folder.join("model.safetensors"), &bytes).unwrap();
    let exported = fs::read(d.join("r/final/model.dat")).unwrap();
    let stderr = refused(d, &["export-dat", "--checkpoint", "r/checkpoint-30", "--output-dat", "x.dat"], 6);
    assert!(stderr.contains("NaN") && !d.join("x.dat").exists(), "{stderr}");
    fs::remove_file(d.join("r/train_results.json")).unwrap();
    let out = run(d, &["fit", "--resume-from-checkpoint", "r"]);
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success(), "{stderr}");
    assert!(stderr.contains("skipping r/checkpoint-30") && stderr.contains("NaN"), "{stderr}");
    assert!(stderr.contains("checkpoint-20 · step 20"), "{stderr}");
    assert!(fs::read(d.join("r/final/model.dat")).unwrap() == exported);
}

/// A GPU says how much memory is free, through Vulkan too. A run that needs more is refused before it begins.
#[test]
fn a_run_that_needs_more_memory_than_is_free_on_a_gpu_is_refused() {
    let Some(device) = gpu_checkpoints::device() else { return };
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let mut config: serde_json::Value = serde_json::from_slice(&fs::read(d.join("m/config.json")).unwrap()).unwrap();
    for (key, value) in [("hidden_size", 8192), ("intermediate_size", 65_536), ("num_hidden_layers", 200)] {
        config[key] = value.into();
    }
    fs::write(d.join("m/huge.json"), config.to_string()).unwrap();
    for (file, fits) in [("m/config.json", true), ("m/huge.json", false)] {
        let inputs = ["--init-config", file, "--tokenizer", "m", "-d", "m/demo.tsv", "--device", device];
        let line = ok(d, &[&["estimate", "--json"][..], &inputs].concat());
        let forecast: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert!(forecast["free"].as_u64() > Some(0) && forecast["fits"] == fits, "{forecast}");
        let fit = [&["fit", "--dry-run", "-o", "r"][..], &inputs].concat();
        let out = run(d, &fit);
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(if fits { 0 } else { 4 }), "{stderr}");
        assert!(stderr.contains(" are free") && stderr.contains("error: the run would need") != fits, "{stderr}");
    }
}

/// What a run would be refused for after loading is refused before, and `--dry-run` refuses the same.
#[test]
fn a_dry_run_refuses_what_a_run_refuses() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let mut config: serde_json::Value = serde_json::from_slice(&fs::read(d.join("m/config.json")).unwrap()).unwrap();
    for (key, value) in [("hidden_size", 8192), ("intermediate_size", 65_536), ("num_hidden_layers", 200)] {
        config[key] = value.into();
    }
    let mut wide: serde_json::Value = serde_json::from_slice(&fs::read(d.join("m/config.json")).unwrap()).unwrap();
    wide["vocab_size"] = (1 << 17).into();
    for (folder, config) in [("huge", config), ("wide", wide)] {
        fs::create_dir(d.join(folder)).unwrap();
        for name in ["tokenizer.json", "tokenizer_config.json"] {
            fs::copy(d.join("m").join(name), d.join(folder).join(name)).unwrap();
        }
        fs::write(d.join(folder).join("config.json"), config.to_string()).unwrap();
    }
    for dry in [&["--dry-run"][..], &[]] {
        let with = |words: &[&str], code| {
            let all = [&["fit", "-d", "m/demo.tsv", "-o", "r"], words, dry].concat();
            let stderr = refused(d, &all, code);
            assert!(!d.join("r/config.toml").exists(), "{all:?}");
            stderr
        };
        // A limit makes no memory free.
        let huge = ["--init-config", "huge/config.json", "--device", "cpu"];
        for limit in [&[][..], &["--memory-limit", "900000GiB"]] {
            let stderr = with(&[&huge[..], limit].concat(), 4);
            assert!(stderr.contains("are free") && stderr.contains("optimizer states"), "{limit:?}: {stderr}");
            assert!(stderr.contains("error: the run would need") && !stderr.contains("warning"), "{limit:?}: {stderr}");
        }
        // A million checkpoints of 50 MB fit onto no disk.
        let disk = ["--init-config", "wide/config.json", "--device", "cpu", "--save-steps", "1"];
        let stderr = with(&[&disk[..], &["--max-steps", "1048576", "--save-total-limit", "1048576"]].concat(), 1);
        let said =
            stderr.contains("1048576 checkpoints and the export need") && stderr.contains("are free on this disk");
        assert!(said && stderr.contains("(--save-total-limit)"), "{stderr}");
        assert!(with(&["-m", "m", "--device", "cuda:99"], 7).contains("cuda:99"));
        assert!(with(&["-m", "m", "--device", "cpu", "--compute-dtype", "tf32"], 2).contains("tf32"));
        assert!(with(&["-m", "m", "--device", "cpu", "--memory-limit", "1MiB"], 4).contains("--memory-limit"));
        assert!(with(&["-m", "m", "--device", "cpu", "--data", "absent.tsv"], 2).contains("absent.tsv"));
    }
    // What makes no sense is refused by `estimate`, too. A run for which there is too little memory is predicted.
    fs::write(d.join("nine.tsv"), "a question\tanswer\n".repeat(9)).unwrap();
    for (words, said) in [
        (&["-d", "m/demo.tsv", "--device", "vulkan", "--compute-dtype", "tf32"][..], "only CUDA has TF32"),
        (&["-d", "m/demo.tsv", "--device", "cpu", "--compute-dtype", "bf16"], "the CPU computes in f32"),
        (
            &["-d", "nine.tsv", "--device", "cpu", "--early-stopping-patience", "2", "--val-split", "0.5"],
            "there are no evaluation rows",
        ),
    ] {
        for command in [&["estimate", "-m", "m"][..], &["fit", "--dry-run", "-o", "r", "-m", "m"]] {
            let stderr = refused(d, &[command, words].concat(), 2);
            assert!(stderr.contains(said), "{command:?} {words:?}: {stderr}");
        }
    }
    let out = run(d, &["estimate", "-m", "m", "-d", "m/demo.tsv", "--device", "cpu", "--memory-limit", "1MiB"]);
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && stderr.contains("fit would refuse this run: the run would need"), "{stderr}");
    // The same forecast, from the rows that there are.
    let line = |words: &[&str]| {
        let out = run(d, &[words, &["-m", "m", "-d", "m/demo.tsv", "--device", "cpu"][..]].concat());
        let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
        let needed = stderr.lines().find(|line| line.contains("at the peak")).unwrap_or_else(|| panic!("{stderr}"));
        needed.split(';').next().unwrap().to_owned()
    };
    assert_eq!(line(&["estimate"]), line(&["fit", "--dry-run"]));
    // A forecast needs neither the card nor its driver.
    let out = run(d, &["estimate", "-m", "m", "-d", "m/demo.tsv", "--device", "cuda"]);
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && stderr.contains("at the peak") && !stderr.contains("panicked"), "{stderr}");
    // A number means a card of this machine.
    let stderr = refused(d, &["estimate", "-m", "m", "-d", "m/demo.tsv", "--device", "cuda:99"], 7);
    assert!(stderr.contains("cuda:99") && stderr.contains("a forecast without a card"), "{stderr}");
    refused(d, &["estimate", "-m", "m", "-d", "absent.tsv"], 2);
}

/// A limit is compared with what the rows need that there are, not with what rows of --max-seq-length would need.
#[test]
fn a_memory_limit_is_judged_by_the_real_rows() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let mut config: serde_json::Value = serde_json::from_slice(&fs::read(d.join("m/config.json")).unwrap()).unwrap();
    config["vocab_size"] = (1 << 17).into();
    config["max_position_embeddings"] = 4096.into();
    fs::write(d.join("m/config.json"), config.to_string()).unwrap();
    fs::write(d.join("short.tsv"), "a question\tanswer\n".repeat(20)).unwrap();
    fs::write(d.join("long.tsv"), format!("question\t{}\n", "answer ".repeat(8000))).unwrap();
    let words = |data: &'static str| {
        let words =
            ["fit", "--init-config", "m/config.json", "--tokenizer", "m", "-d", data, "--device", "cpu", "-o", "r"];
        [&words[..], &["--dry-run", "--overlong", "truncate", "--memory-limit", "400MiB"]].concat()
    };
    ok(d, &words("short.tsv"));
    // A run never has more sequences at once than it trains on.
    ok(d, &[&words("short.tsv")[..], &["--batch-size", "4096", "--num-train-epochs", "1"]].concat());
    let stderr = refused(d, &words("long.tsv"), 4);
    assert!(stderr.contains("the run would need") && stderr.contains("--memory-limit is 400 MiB"), "{stderr}");
}

/// A training file that no memory holds is an error, not the end of the process. The files are sparse: they take no disk.
#[test]
#[cfg(target_os = "linux")]
fn a_file_that_is_larger_than_the_memory_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    for name in ["huge.txt", "huge.arrow"] {
        let file = fs::File::create(d.join(name)).unwrap();
        let words = ["fit", "-m", "m", "-d", name, "--device", "cpu", "--dry-run"];
        file.set_len(1 << 40).unwrap();
        let stderr = refused(d, &words, 3);
        assert!(stderr.contains(name) && stderr.contains("1024.0 GiB") && stderr.contains("split it"), "{stderr}");
        // With the limit on this process there is not so much memory, however much the machine has.
        file.set_len(16 << 30).unwrap();
        let out = limited(d, "-v 8000000", &words);
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(4), "{stderr}");
        assert!(
            stderr.contains(name) && stderr.contains("17179869184 bytes") && stderr.contains("smaller file"),
            "{stderr}"
        );
    }
}

/// A write beyond the limit on the sizes of files is an error with a message, not the end of the process.
#[test]
fn a_file_that_becomes_larger_than_the_limit_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let out = limited(d, "-f 100", &fit("r"));
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.code() == Some(1) && stderr.contains("File too large"), "{:?}: {stderr}", out.status);
}

/// A host that refuses memory in the middle of a run ends it with a message and not by an abort, and its checkpoints are whole.
/// After the first checkpoint the process gets no more memory in large pieces: in a step, and while a checkpoint is written.
#[test]
fn a_run_to_which_the_host_gives_no_memory_says_so_and_can_be_resumed() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let Some(library) = preloaded(d, "refused_memory", include_str!("support/refused_memory.cpp")) else { return };
    tiny_model(&d.join("m"), true);
    let words = |output: &'static str| {
        let words = "fit -m m -d m/demo.tsv --device cpu --max-seq-length 64 --max-steps 8 --save-steps 1 --eval-steps 0 \
                     --learning-rate 1e-3 -o";
        words.split_whitespace().chain([output]).collect::<Vec<_>>()
    };
    ok(d, &words("whole"));
    for (output, largest) in [("in-a-step", 100_000), ("in-a-checkpoint", 1 << 20)] {
        let mut refused = command(d, &words(output));
        refused.env("LD_PRELOAD", &library).env("REFUSE_FROM", largest.to_string());
        let out = refused.env("REFUSE_WHEN", d.join(output).join("checkpoint-1")).output().unwrap();
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(4), "{stderr}");
        let message = stderr.lines().last().unwrap();
        assert!(message.starts_with("error: the host is out of memory: "), "{stderr}");
        let flags = ["--max-seq-length", "--batch-size", "--optimizer-state-mode"];
        let parts = ["iB were asked for in one piece", "iB are free now"].into_iter().chain(flags);
        assert!(parts.into_iter().all(|part| message.contains(part)), "{stderr}");

        let mut resumed = words(output);
        resumed.push("--resume-from-checkpoint");
        ok(d, &resumed);
        for name in ["final/model.dat", "checkpoint-8/model.safetensors", "checkpoint-8/optimizer.safetensors"] {
            let read = |run: &str| fs::read(d.join(run).join(name)).unwrap();
            assert!(read(output) == read("whole"), "{name} differs");
        }
    }
}

/// A system that gives a program some threads and no more ends it with a message, whoever asked for the thread: the program or
/// a library. What was saved is whole.
#[test]
fn a_program_to_which_the_system_gives_no_thread_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let Some(library) = preloaded(d, "refused_threads", include_str!("support/refused_threads.cpp")) else { return };
    tiny_model(&d.join("m"), true);
    let rows = fs::read_to_string(d.join("m/demo.tsv")).unwrap();
    fs::write(d.join("few.tsv"), rows.split_inclusive('\n').take(3).collect::<String>()).unwrap();
    let fit = "fit -m m -d few.tsv --device cpu --max-seq-length 64 --max-steps 1 --val-split 0 --save-steps 1 -o r";
    let generate = "generate -m m --device cpu -p hello --max-tokens 1";
    let table = golden("tables/messages.parquet").display().to_string();
    let stats = format!("data stats -m m {table}");
    for (words, least) in [(fit, 30), (generate, 3), (&stats, 2)] {
        let words: Vec<&str> = words.split(' ').collect();
        let mut given = 0;
        loop {
            let _ = fs::remove_dir_all(d.join("r"));
            let mut refused = command(d, &words);
            refused.env("LD_PRELOAD", &library).env("GIVE_THREADS", given.to_string());
            let out = refused.output().unwrap();
            let stderr = String::from_utf8_lossy(&out.stderr);
            if out.status.success() {
                break;
            }
            let message = stderr.lines().last().unwrap_or_default();
            let expected =
                out.status.code() == Some(4) && message.starts_with("error: the system gives no thread for the ");
            assert!(
                expected && !stderr.contains("panicked"),
                "after {given} threads, {words:?}: {}: {stderr}",
                out.status
            );
            given += 1;
        }
        assert!(given >= least, "{words:?} needs {given} threads");
    }
}

/// A learning rate of which no model learns is warned of within the first steps, and the warning stays: in the summary, in the
/// record of the run, and after a resume.
#[test]
fn a_run_that_diverges_at_once_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let words = |output, rate, steps| {
        let words =
            ["fit", "-m", "m", "-d", "m/demo.tsv", "--device", "cpu", "--max-seq-length", "64", "--eval-steps", "0"];
        let run = [
            "--warmup-steps",
            "0",
            "--max-grad-norm",
            "0",
            "--learning-rate",
            rate,
            "--max-steps",
            steps,
            "-o",
            output,
        ];
        [&words[..], &run].concat()
    };
    let results = |name: &str| -> serde_json::Value {
        serde_json::from_slice(&fs::read(d.join(name).join("train_results.json")).unwrap()).unwrap()
    };
    let summary = |name: &str| fs::read_to_string(d.join(name).join("summary.md")).unwrap();
    let out = run(d, &words("wild", "1", "6"));
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success(), "{stderr}");
    let warned = "warning: the loss has risen from ";
    let at = |text: &str| stderr.find(text).unwrap_or_else(|| panic!("{text:?} is not said: {stderr}"));
    assert!(at(warned) < at("the run ends with 1 warning about its loss"), "{stderr}");
    let recorded = results("wild")["loss_warnings"].clone();
    assert_eq!(recorded.as_array().unwrap().len(), 1, "{recorded}");
    assert!(summary("wild").contains(recorded[0].as_str().unwrap()) && stderr.contains(recorded[0].as_str().unwrap()));
    let out = run(d, &["fit", "--resume-from-checkpoint", "wild", "--max-steps", "8"]);
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && !stderr.contains(warned), "it is warned of again: {stderr}");
    assert_eq!(results("wild")["loss_warnings"][0], recorded[0]);
    assert!(summary("wild").contains("has risen from"));
    // A good one has no warning.
    ok(d, &words("good", "1e-3", "6"));
    assert_eq!(results("good")["loss_warnings"], serde_json::json!([]));
    assert!(!summary("good").contains("Warnings about the loss"));
}

/// A signal in the last step ends the run before its evaluation. The resumed run has no step left, and makes it.
#[test]
fn an_evaluation_that_a_signal_prevented_in_the_last_step_is_made() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let fit =
        ["fit", "-m", "m", "-d", "m/demo.tsv", "--device", "cpu", "--max-steps", "2", "--eval-steps", "2", "-o", "r"];
    ok(d, &fit);
    let log = |name: &str| fs::read_to_string(d.join("r").join(name)).unwrap();
    let (metrics, samples) = (log("metrics.jsonl"), log("samples.jsonl"));
    // As if the signal had come: the checkpoint of the last step is there, and nothing that follows it.
    let steps: String =
        metrics.lines().filter(|line| !line.contains("eval_loss")).map(|line| line.to_owned() + "\n").collect();
    assert_eq!(steps.lines().count(), 2);
    fs::write(d.join("r/metrics.jsonl"), steps).unwrap();
    fs::write(d.join("r/samples.jsonl"), "").unwrap();
    fs::remove_dir_all(d.join("r/final")).unwrap();
    fs::remove_file(d.join("r/train_results.json")).unwrap();
    ok(d, &["fit", "--resume-from-checkpoint", "r"]);
    assert_eq!((log("metrics.jsonl"), log("samples.jsonl")), (metrics, samples));
}

/// The undo copy comes first, then the place where a checkpoint waits, and each only where it fits with a tenth to spare.
#[test]
fn a_run_takes_more_memory_where_there_is_room() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let mut config: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(d.join("m/config.json")).unwrap()).unwrap();
    config["vocab_size"] = (1 << 17).into();
    fs::write(d.join("m/config.json"), config.to_string()).unwrap();
    let estimate = |more: &[&str]| {
        let mut words = vec!["estimate", "--init-config", "m/config.json", "--tokenizer", "m", "-d", "m/demo.tsv"];
        words.extend(["--device", "cuda", "--optimizer-state-mode", "f32", "--max-seq-length", "32"]);
        words.extend(more);
        let out = run(d, &words);
        assert!(out.status.success());
        let text = String::from_utf8_lossy(&out.stderr).into_owned();
        let copy = text.contains("is undone from a copy of weights and states (81 MiB)\n");
        (copy, text.contains("more from the first checkpoint on"), text)
    };
    // The peak is 131 MiB, and a copy of weights and states 81 MiB.
    for (limit, copy, beside) in [
        ("140MiB", false, false),
        ("230MiB", false, false),
        ("240MiB", true, false),
        ("320MiB", true, false),
        ("330MiB", true, true),
    ] {
        let (has_copy, is_beside, text) = estimate(&["--memory-limit", limit]);
        assert_eq!((has_copy, is_beside), (copy, beside), "{limit}: {text}");
    }
    // Before both come the activations of the blocks.
    for (words, line) in [
        (&["--memory-limit", "140MiB"][..], "all 2 blocks run a second time"),
        (&["--memory-limit", "230MiB"], "no block runs a second time"),
        (&["--memory-limit", "230MiB", "--recompute", "always"], "all 2 blocks run a second time"),
        (&["--memory-limit", "140MiB", "--recompute", "never"], "no block runs a second time"),
    ] {
        assert!(estimate(words).2.contains(line), "{words:?}: {}", estimate(words).2);
    }
    let (copy, beside, text) = estimate(&["--memory-limit", "240MiB", "--undo-copy", "false"]);
    assert!(!copy && beside && text.contains("newest checkpoint"), "{text}");
    let (_, beside, text) = estimate(&["--memory-limit", "330MiB", "--save-strategy", "no"]);
    assert!(!beside, "{text}");
}

/// The temporary files of a killed process go when the same file is written again; those of a living one stay.
#[test]
fn temporary_files_of_dead_processes_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    // Process 1 lives, but whoever wrote the file holds no lock on it any more. Numbers of processes come again.
    let [dead, living, other] = [".tmp-1-x.dat", ".tmp-2-x.dat", ".tmp-1-y.dat"].map(|name| d.join(name));
    let [dead_folder, living_folder] = [".tmp-3-x.dat", ".tmp-4-x.dat"].map(|name| d.join(name));
    [&dead, &living, &other].into_iter().for_each(|path| fs::write(path, "left").unwrap());
    [&dead_folder, &living_folder].into_iter().for_each(|path| fs::create_dir(path).unwrap());
    let _held = [&living, &living_folder].map(|path| {
        let file = fs::File::open(path).unwrap();
        file.lock().unwrap();
        file
    });
    ok(d, &["convert", "m", "x.dat", "--to", "dat", "--dtype", "nvfp4"]);
    let left = [&dead, &dead_folder, &living, &living_folder, &other].map(|path| path.exists());
    assert_eq!(left, [false, false, true, true, true]);
}

/// A token cache whose digest is right, but that holds what no training file can hold.
#[test]
fn a_forged_token_cache_is_made_again() {
    use safetensors::{SafeTensors, tensor::TensorView};
    use sha2::Digest;
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let words = ["fit", "-m", "m", "-d", "m/demo.tsv", "--device", "cpu", "--token-cache", "c", "--dry-run"];
    ok(d, &words);
    let path = fs::read_dir(d.join("c")).unwrap().next().unwrap().unwrap().path();
    let good = fs::read(&path).unwrap();
    let report = SafeTensors::read_metadata(&good).unwrap().1.metadata().clone().unwrap()["report"].clone();
    let infinity = f64::INFINITY.to_le_bytes();
    let cases: [(&str, &[u8]); 7] = [
        // Nothing is changed here: what is only written again is taken.
        ("ids", &[]),
        ("ids", &[0xff; 4]),
        ("files", &[7, 0, 0, 0]),
        ("lengths", &[0; 4]),
        ("lengths", &[0xff; 4]),
        ("prompt_lengths", &[0xff; 4]),
        ("weights", &infinity),
    ];
    for (name, value) in cases {
        let parsed = SafeTensors::deserialize(&good).unwrap();
        let names = ["ids", "supervised", "lengths", "files", "lines", "rows", "weights", "prompts", "prompt_lengths"];
        let mut tensors: Vec<_> =
            names.map(|n| (n, parsed.tensor(n).unwrap(), parsed.tensor(n).unwrap().data().to_vec())).into();
        let at = names.iter().position(|n| *n == name).unwrap();
        tensors[at].2[..value.len()].copy_from_slice(value);
        let mut digest = sha2::Sha256::new();
        tensors.iter().for_each(|(_, _, bytes)| digest.update(bytes));
        let digest: String = digest.finalize().iter().map(|b| format!("{b:02x}")).collect();
        let metadata = [("report".to_owned(), report.clone()), ("sha256".to_owned(), digest)].into();
        let views = tensors
            .iter()
            .map(|(n, view, bytes)| (*n, TensorView::new(view.dtype(), view.shape().to_vec(), bytes).unwrap()));
        fs::write(&path, safetensors::serialize(views, Some(metadata)).unwrap()).unwrap();
        let out = run(d, &words);
        let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.success(), "{name}: {stderr}");
        assert_eq!(stderr.contains("is damaged; it is made again"), !value.is_empty(), "{name}: {stderr}");
        assert_eq!(fs::read(&path).unwrap().len(), good.len(), "{name}");
    }
}

/// A tokenizer that makes text longer and longer, or sampling settings that no sampler has.
#[test]
fn hostile_small_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let change = |name: &str, with: &dyn Fn(&mut serde_json::Value), message: &str| {
        let path = d.join("m").join(name);
        let good = fs::read(&path).unwrap();
        let mut value: serde_json::Value = serde_json::from_slice(&good).unwrap();
        with(&mut value);
        fs::write(&path, value.to_string()).unwrap();
        let out = run(d, &["generate", "-m", "m", "-p", "hello", "--device", "cpu", "--max-tokens", "1"]);
        let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.code() == Some(2) && stderr.contains(message), "{name}: {stderr}");
        fs::write(&path, good).unwrap();
    };
    let doubling = serde_json::json!({"type": "Replace", "pattern": {"String": "l"}, "content": "ll"});
    let many = serde_json::json!({"type": "Sequence", "normalizers": vec![doubling; 40]});
    change("tokenizer.json", &|t| t["normalizer"] = many.clone(), "normalizer");
    let bytes =
        serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false});
    let often = serde_json::json!({"type": "Sequence", "pretokenizers": vec![bytes; 30]});
    change("tokenizer.json", &|t| t["pre_tokenizer"] = often.clone(), "pre-tokenizer");
    let forms =
        serde_json::json!({"type": "Sequence", "normalizers": vec![serde_json::json!({"type": "NFKD"}); 20_000]});
    change("tokenizer.json", &|t| t["normalizer"] = forms.clone(), "normalizer");
    change("tokenizer.json", &|t| t["decoder"] = serde_json::json!({"type": "BPEDecoder", "suffix": ""}), "decoder");
    change("generation_config.json", &|c| c["temperature"] = serde_json::json!(-1.0), "temperature is -1");
    change("generation_config.json", &|c| c["top_p"] = serde_json::json!(7.0), "top_p is 7");
    let row = |n: usize| {
        let turn = |role: &str| serde_json::json!({"role": role, "content": "hello"});
        let messages: Vec<_> = (0..n).flat_map(|_| [turn("user"), turn("assistant")]).collect();
        serde_json::json!({"messages": messages}).to_string()
    };
    fs::write(d.join("long.jsonl"), row(2) + "\n" + &row(501)).unwrap();
    let stderr = refused(d, &["fit", "-m", "m", "-d", "long.jsonl", "--device", "cpu", "--dry-run"], 3);
    assert!(stderr.contains("long.jsonl:2") && stderr.contains("1002 messages"), "{stderr}");
    // A download that was cut, and arrays that are none.
    let rows = [r#"{"text": "one"}"#, r#"{"text": "two"}"#];
    for (text, message) in [
        (format!("[{},\n{},", rows[0], rows[1]), "the array does not end"),
        (format!("[{},\n{}", rows[0], rows[1]), "the array does not end"),
        (format!("[{}\n{}]", rows[0], rows[1]), "no comma stands between two rows"),
        (format!("[{}]\nx", rows[0]), "text follows the end of the array"),
    ] {
        fs::write(d.join("cut.json"), &text).unwrap();
        let stderr = refused(d, &["fit", "-m", "m", "-d", "cut.json", "--device", "cpu", "--dry-run"], 3);
        assert!(stderr.contains("cut.json:") && stderr.contains(message), "{text}: {stderr}");
    }
    fs::write(d.join("whole.json"), format!(" [ {} ,\n{}\n] \n", rows[0], rows[1])).unwrap();
    ok(d, &["fit", "-m", "m", "-d", "whole.json", "--device", "cpu", "--dry-run"]);
    // Templates whose text does not depend on the messages.
    let template = fs::read(d.join("m/chat_template.jinja")).ok();
    for text in [" ", "x ", "{{ 'a ' }}", "{{ messages | length }} "] {
        fs::write(d.join("m/chat_template.jinja"), text).unwrap();
        let stderr = refused(d, &["data", "stats", "-m", "m", "m/demo.tsv"], 3);
        assert!(stderr.contains("another way than it opens one") && !stderr.contains("panicked"), "{text:?}: {stderr}");
    }
    match template {
        Some(text) => fs::write(d.join("m/chat_template.jinja"), text).unwrap(),
        None => fs::remove_file(d.join("m/chat_template.jinja")).unwrap(),
    }
    // One of two values would be lost.
    let good = fs::read_to_string(d.join("m/tokenizer.json")).unwrap();
    let twice = good.replacen("\"vocab\": {", "\"vocab\": {\"a\": 0, \"a\": 1, ", 1);
    assert!(twice != good);
    fs::write(d.join("m/tokenizer.json"), twice).unwrap();
    let stderr = refused(d, &["data", "stats", "-m", "m", "m/demo.tsv"], 2);
    assert!(stderr.contains("tokenizer.json") && stderr.contains("\"a\" stands twice"), "{stderr}");
    fs::write(d.join("m/tokenizer.json"), good).unwrap();
    let header = r#"{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}"#;
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 4]].concat();
    fs::write(d.join("twice.safetensors"), bytes).unwrap();
    let stderr = refused(d, &["inspect", "twice.safetensors"], 6);
    assert!(stderr.contains("twice.safetensors") && stderr.contains("\"a\" stands twice"), "{stderr}");
    fs::write(d.join("twice.jsonl"), row(1) + "\n{\"prompt\": \"a\", \"completion\": \"b\", \"prompt\": \"c\"}")
        .unwrap();
    let stderr = refused(d, &["fit", "-m", "m", "-d", "twice.jsonl", "--device", "cpu", "--dry-run"], 3);
    assert!(stderr.contains("twice.jsonl:2") && stderr.contains("\"prompt\" stands twice"), "{stderr}");
    // No small file of a model is large.
    fs::File::create(d.join("m/generation_config.json")).unwrap().set_len(3 << 30).unwrap();
    let stderr = refused(d, &["convert", "m/model.safetensors", "x.dat", "--to", "dat", "--dtype", "nvfp4"], 2);
    assert!(stderr.contains("generation_config.json") && stderr.contains("at most"), "{stderr}");
}

/// A key that stands twice in a small file is refused, also where the program ignores the key.
#[test]
fn an_ignored_key_stands_once_as_every_other() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    fs::write(d.join("m/trained.json"), r#"{"recipe": "w4"}"#).unwrap();
    let generate = ["generate", "-m", "m", "-p", "hello", "--device", "cpu", "--max-tokens", "1"];
    for (name, code) in [("config.json", 2), ("generation_config.json", 2), ("trained.json", 6)] {
        let path = d.join("m").join(name);
        let good = fs::read_to_string(&path).unwrap();
        fs::write(&path, good.replacen('{', "{\"ignored\": 1, ", 1)).unwrap();
        ok(d, &generate);
        fs::write(&path, good.replacen('{', "{\"ignored\": 1, \"ignored\": [2], ", 1)).unwrap();
        let stderr = refused(d, &generate, code);
        assert!(stderr.contains(name) && stderr.contains("\"ignored\" stands twice"), "{name}: {stderr}");
        fs::write(&path, good).unwrap();
    }
}
