//! What a run finds in its own folder is not believed: files that are pipes, checkpoints that someone has changed together
//! with their manifest, exports that were damaged. The newest good checkpoint is resumed, and what is missing is made again.

use crate::support::{
    faulty_disk::{self, Fault, Machine},
    files::{command, forge, names, ok, program, run, send, tiny_model},
};
use safetensors::{SafeTensors, tensor::TensorView};
use serde_json::Value;
use std::{
    fs,
    io::{BufRead, BufReader},
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

/// A run of six steps that keeps the checkpoints of its second, fourth and sixth.
const FIT: &str = "fit -m m -d m/demo.tsv --device cpu --max-seq-length 64 --learning-rate 1e-3 --max-steps 6 \
                   --save-steps 2 --save-total-limit 3 --eval-steps 0 --output-dat r.dat -o r";

/// A folder in which that run is complete, and the bytes of its export.
fn complete(d: &Path) -> Vec<u8> {
    tiny_model(&d.join("m"), true);
    ok(d, &FIT.split_whitespace().collect::<Vec<_>>());
    fs::read(d.join("r/final/model.dat")).unwrap()
}

/// The exit code of a command, and what it says. It must end within a minute.
fn ended(d: &Path, words: &[&str]) -> (Option<i32>, String) {
    let said = d.join("said");
    let mut child = command(d, words).stdout(Stdio::null()).stderr(fs::File::create(&said).unwrap()).spawn().unwrap();
    let started = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if started.elapsed() > Duration::from_secs(60) {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("{words:?} hangs: {}", fs::read_to_string(&said).unwrap());
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    (status.code(), fs::read_to_string(&said).unwrap())
}

/// Replaces a file by a pipe that nobody writes to.
fn pipe(file: &Path) {
    fs::remove_file(file).unwrap();
    assert!(Command::new("mkfifo").arg(file).status().unwrap().success());
}

const RESUME: [&str; 3] = ["fit", "--resume-from-checkpoint", "r"];

#[test]
fn a_model_folder_that_has_a_file_of_settings_is_a_model() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    fs::write(d.join("m/config.toml"), "learning_rate = 1e-4\n").unwrap();
    let (code, said) = ended(d, &["generate", "-m", "m", "-p", "Hi", "--max-tokens", "2", "--device", "cpu"]);
    assert_eq!(code, Some(0), "{said}");
}

/// The weights can be read, and are not those that the export's manifest lists.
#[test]
fn a_file_is_verified_against_the_manifest_of_its_folder() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    complete(d);
    let verified = |path: &str| ended(d, &["inspect", path, "--verify"]);
    assert_eq!(verified("r/final/model.dat").0, Some(0));
    let manifest = d.join("r/final/manifest.json");
    let mut changed: Value = serde_json::from_slice(&fs::read(&manifest).unwrap()).unwrap();
    changed["files"]["model.dat"]["sha256"] = "0".repeat(64).into();
    fs::write(&manifest, changed.to_string()).unwrap();
    for path in ["r/final", "r/final/model.dat"] {
        let (code, said) = verified(path);
        assert!(code == Some(6) && said.contains("model.dat: SHA-256 "), "{path}: {code:?}: {said}");
    }
}

/// Another process may be writing a checkpoint just now, so that what lies in the folder says nothing before the lock is held.
#[test]
fn a_run_that_another_process_holds_is_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    complete(d);
    let checkpoints: Vec<_> =
        (2..=6).step_by(2).map(|step| d.join(format!("r/checkpoint-{step}/manifest.json"))).collect();
    checkpoints.iter().for_each(|manifest| fs::write(manifest, "half of a mani").unwrap());
    let held = train_cli::durable::lock(&d.join("r")).unwrap();
    let (code, said) = ended(d, &RESUME);
    assert!(code == Some(2) && said.contains(&format!("process {} on", std::process::id())), "{said}");
    assert!(!said.contains("checkpoint-"), "{said}");
    drop(held);
    let (code, said) = ended(d, &RESUME);
    assert!(code == Some(6) && said.contains("checkpoint-6"), "{said}");
}

#[test]
fn a_pipe_in_a_run_folder_hangs_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let exported = complete(d);
    pipe(&d.join("r/final/manifest.json"));
    let (code, said) = ended(d, &["inspect", "r/final", "--verify"]);
    assert!(code == Some(6) && said.contains("a regular file is needed"), "{code:?}: {said}");
    // A broken export, record or checkpoint is made again.
    for name in
        ["train_results.json", "final/model.dat", "checkpoint-6/manifest.json", "checkpoint-6/trainer_state.json"]
    {
        pipe(&d.join("r").join(name));
        let (code, said) = ended(d, &RESUME);
        assert!(code == Some(0) && !said.contains("is complete"), "{name}: {code:?}: {said}");
        let skipped = said.contains("skipping r/checkpoint-6") && said.contains("a regular file is needed");
        assert_eq!(skipped, name.starts_with("checkpoint"), "{name}: {said}");
        assert!(fs::read(d.join("r/final/model.dat")).unwrap() == exported, "{name}");
        assert_eq!(ended(d, &["inspect", "r/final", "--verify"]).0, Some(0), "{name}");
    }
    // Names that somebody else has taken.
    fs::remove_file(d.join("r/train_results.json")).unwrap();
    for name in [".tmp-77-notes", ".tmp-78-final", "checkpoint-9"] {
        fs::write(d.join("r").join(name), "").unwrap();
        pipe(&d.join("r").join(name));
    }
    fs::write(d.join("r/checkpoint-8"), "notes").unwrap();
    let (code, said) = ended(d, &RESUME);
    assert!(code == Some(0) && said.contains("resume") && said.contains("checkpoint-6"), "{code:?}: {said}");
    assert_eq!(fs::read(d.join("r/checkpoint-8")).unwrap(), b"notes");
    for name in ["checkpoint-8", "checkpoint-9"] {
        fs::remove_file(d.join("r").join(name)).unwrap();
    }
    // A file of the lock's name that no process of ours has written.
    fs::create_dir(d.join("other")).unwrap();
    fs::write(d.join("other/lock"), "the key is under the mat").unwrap();
    for more in [&["--dry-run"][..], &[]] {
        let words = [&["fit", "-m", "m", "-d", "m/demo.tsv", "--device", "cpu", "-o", "other"][..], more].concat();
        let (code, said) = ended(d, &words);
        assert!(code == Some(2) && said.contains("no lock of train-cli"), "{code:?}: {said}");
        assert_eq!(fs::read(d.join("other/lock")).unwrap(), b"the key is under the mat");
    }
    // What only serves a comparison is left out; logs are not.
    fs::remove_file(d.join("r/train_results.json")).unwrap();
    pipe(&d.join("r/beginning.safetensors"));
    let (code, said) = ended(d, &RESUME);
    assert!(code == Some(0) && said.contains("beginning.safetensors is missing or damaged"), "{code:?}: {said}");
    fs::remove_file(d.join("r/train_results.json")).unwrap();
    pipe(&d.join("r/metrics.jsonl"));
    let (code, said) = ended(d, &RESUME);
    assert!(code == Some(2) && said.contains("metrics.jsonl: this is a pipe"), "{code:?}: {said}");
}

/// Changes an entry of a safetensors file: its bytes, or its name.
fn edit(path: &Path, name: &str, new_name: &str, change: impl Fn(&mut Vec<u8>)) {
    let file = fs::read(path).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let edited: Vec<_> = tensors
        .iter()
        .map(|(key, view)| {
            let mut bytes = view.data().to_vec();
            if key == name {
                change(&mut bytes);
            }
            (if key == name { new_name } else { key }, view.dtype(), view.shape().to_vec(), bytes)
        })
        .collect();
    assert!(edited.iter().any(|(key, ..)| *key == new_name), "there is no {name}");
    let views = edited.iter().map(|(key, dtype, shape, bytes)| {
        // An entry that became shorter has one dimension.
        let whole = shape.iter().product::<usize>() * dtype.bitsize() / 8 == bytes.len();
        let shape = if whole { shape.clone() } else { vec![bytes.len() * 8 / dtype.bitsize()] };
        (*key, TensorView::new(*dtype, shape, bytes).unwrap())
    });
    let new = safetensors::serialize(views, None).unwrap();
    fs::write(path, new).unwrap();
}

/// The manifest of these checkpoints is right, as if a broken program had written them.
#[test]
fn a_checkpoint_whose_content_is_wrong_is_skipped() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let exported = complete(d);
    let folder = d.join("r/checkpoint-6");
    let (optimizer, state) = (folder.join("optimizer.safetensors"), folder.join("trainer_state.json"));
    let good = [&optimizer, &state].map(|file| fs::read(file).unwrap());
    let norm = "model.norm.weight";
    let first = |bytes: [u8; 4]| move |all: &mut Vec<u8>| all[..4].copy_from_slice(&bytes);
    let key = |part: &str| format!("{norm}.{part}");
    let refused = |name: &str, reason: &str| {
        forge(&folder, name);
        let words = ["export-dat", "--checkpoint", "r/checkpoint-6", "--output-dat", "x.dat", "--device", "cpu"];
        let (code, said) = ended(d, &words);
        assert!(code == Some(6) && said.contains(reason), "{name}, {reason}: {code:?}: {said}");
        fs::write(&optimizer, &good[0]).unwrap();
        fs::write(&state, &good[1]).unwrap();
        forge(&folder, name);
    };
    let steps = (i32::MAX).to_le_bytes();
    for (part, value, reason) in [
        ("steps", steps, "counts 2147483647 updates in a run of 6 steps"),
        ("steps", (-1i32).to_le_bytes(), "counts -1 updates"),
        ("m", f32::NAN.to_le_bytes(), "holds the value NaN"),
        ("v", f32::INFINITY.to_le_bytes(), "holds the value inf"),
        ("v", (-1.0f32).to_le_bytes(), "holds the value -1"),
    ] {
        edit(&optimizer, &key(part), &key(part), first(value));
        refused("optimizer.safetensors", reason);
    }
    let scales = "model.layers.0.mlp.up_proj.weight.v.absmax";
    edit(&optimizer, scales, scales, first(f32::NAN.to_le_bytes()));
    refused("optimizer.safetensors", "holds the value NaN");
    edit(&optimizer, &key("m"), &key("m"), |bytes| bytes.truncate(bytes.len() - 4));
    refused("optimizer.safetensors", "it must be F32 [64]");
    edit(&optimizer, &key("v"), &key("w"), |_| {});
    refused("optimizer.safetensors", "there is no \"model.norm.weight.v\"");
    edit(&optimizer, &key("steps"), "elsewhere.steps", |_| {});
    refused("optimizer.safetensors", "is no state of a tensor of this checkpoint");
    for (field, value, reason) in [
        ("global_step", 5.into(), "that of step 6"),
        ("max_steps", 4.into(), "global_step is 6, and max_steps 4"),
        ("seconds", (-1.0).into(), "seconds is -1"),
        ("answering", (-2.0).into(), "answering is -2"),
        ("last_norm", 1e300.into(), "last_norm is inf"),
    ] as [(&str, Value, &str); 5]
    {
        let mut changed: Value = serde_json::from_slice(&good[1]).unwrap();
        changed[field] = value;
        fs::write(&state, changed.to_string()).unwrap();
        refused("trainer_state.json", reason);
    }
    let twice = String::from_utf8(good[1].clone()).unwrap().replacen('{', "{\"global_step\": 6,", 1);
    fs::write(&state, twice).unwrap();
    refused("trainer_state.json", "\"global_step\" stands twice");
    let manifest = fs::read_to_string(folder.join("manifest.json")).unwrap();
    fs::write(folder.join("manifest.json"), manifest.replacen('{', "{\"version\": 1,", 1)).unwrap();
    let (code, said) = ended(d, &["inspect", "r/checkpoint-6", "--verify"]);
    assert!(code == Some(6) && said.contains("\"version\" stands twice"), "{code:?}: {said}");
    fs::write(folder.join("manifest.json"), manifest).unwrap();
    // The run goes on from the checkpoint before.
    edit(&optimizer, &key("m"), &key("m"), first(f32::NAN.to_le_bytes()));
    forge(&folder, "optimizer.safetensors");
    fs::remove_file(d.join("r/train_results.json")).unwrap();
    let (code, said) = ended(d, &RESUME);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("skipping r/checkpoint-6") && said.contains("checkpoint-4 · step 4"), "{said}");
    assert!(fs::read(d.join("r/final/model.dat")).unwrap() == exported);
}

/// The weights of a checkpoint may take minutes to read. What is wrong with the outputs, the device or the memory is said before.
#[test]
fn a_resumed_run_reads_the_weights_last() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let exported = complete(d);
    fs::remove_file(d.join("r/train_results.json")).unwrap();
    let weights = |step: usize| d.join(format!("r/checkpoint-{step}/model.safetensors"));
    let good = [2, 4, 6].map(|step| fs::read(weights(step)).unwrap());
    let damage = |step: usize| {
        let mut bytes = fs::read(weights(step)).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(weights(step), bytes).unwrap();
    };
    [2, 4, 6].into_iter().for_each(damage);
    let named = ["fit", "--resume-from-checkpoint", "r/checkpoint-6"];
    for resume in [RESUME, named] {
        for (more, expected, reason) in [
            (&["--output-dat", "nowhere/x.dat"][..], 2, "--output-dat nowhere/x.dat"),
            (&["--vram-report", "m"], 2, "--vram-report m"),
            (&["--vram-report", "r/config.toml"], 2, "must be outside the run folder"),
            (&["--max-seq-length", "32"], 2, "--max-seq-length is 32, but the checkpoint was made"),
            (&["--device", "cuda:99"], 7, "cuda:99"),
            (&["--memory-limit", "1MiB"], 4, "--memory-limit is"),
            (&[], 6, if resume == RESUME { "every checkpoint is damaged" } else { "SHA-256" }),
        ] {
            for dry in [&["--dry-run"][..], &[]] {
                let (code, said) = ended(d, &[&resume[..], more, dry].concat());
                assert!(code == Some(expected) && said.contains(reason), "{resume:?} {more:?}: {code:?}: {said}");
                assert!(more.is_empty() || !said.contains("SHA-256"), "{resume:?} {more:?}: {said}");
            }
        }
    }
    // The plan is that of the checkpoint that is resumed.
    fs::write(weights(4), &good[1]).unwrap();
    let (code, said) = ended(d, &RESUME);
    assert!(code == Some(0) && said.contains("checkpoint-4 · step 4"), "{code:?}: {said}");
    assert_eq!(said.matches("skipping r/checkpoint-6").count(), 1, "{said}");
    assert!(fs::read(d.join("r/final/model.dat")).unwrap() == exported);
}

/// A run is complete if its outputs are what they were when they were written.
#[test]
fn a_damaged_output_is_made_again() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    complete(d);
    let exported = fs::read(d.join("r.dat")).unwrap();
    let results: Value = serde_json::from_slice(&fs::read(d.join("r/train_results.json")).unwrap()).unwrap();
    assert_eq!(results["output_dat"]["bytes"], exported.len(), "{results}");
    assert!(ended(d, &RESUME).1.contains("is complete at step 6"));
    let mut flipped = exported.clone();
    flipped[exported.len() / 2] ^= 1;
    for damaged in [&flipped[..], &exported[..exported.len() - 1], b""] {
        fs::write(d.join("r.dat"), damaged).unwrap();
        let (code, said) = ended(d, &RESUME);
        assert!(code == Some(0) && !said.contains("is complete"), "{code:?}: {said}");
        assert!(fs::read(d.join("r.dat")).unwrap() == exported);
    }
    pipe(&d.join("r.dat"));
    let (code, said) = ended(d, &RESUME);
    assert!(code == Some(2) && said.contains("a pipe or a device"), "{code:?}: {said}");
    fs::remove_file(d.join("r.dat")).unwrap();
    assert_eq!(ended(d, &RESUME).0, Some(0));
    // Another name is another output.
    let (code, said) = ended(d, &[&RESUME[..], &["--output-dat", "other.dat"]].concat());
    assert!(code == Some(0) && !said.contains("is complete"), "{code:?}: {said}");
    assert!(fs::read(d.join("other.dat")).unwrap() == exported);
    assert!(ended(d, &[&RESUME[..], &["--output-dat", "other.dat"]].concat()).1.contains("is complete at step 6"));
}

/// A complete run whose checkpoints somebody has deleted, to free the disk, is not begun again: that would delete its export.
#[test]
fn a_complete_run_without_checkpoints_is_not_begun_again() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let exported = complete(d);
    for step in [2, 4, 6] {
        fs::remove_dir_all(d.join(format!("r/checkpoint-{step}"))).unwrap();
    }
    for left in ["final", "train_results.json"] {
        let (code, said) = ended(d, &RESUME);
        assert!(code == Some(2) && said.contains("has no checkpoint to resume from"), "{code:?}: {said}");
        assert!(fs::read(d.join("r.dat")).unwrap() == exported && d.join("r/metrics.jsonl").exists(), "{left}");
        if left == "final" {
            assert!(fs::read(d.join("r/final/model.dat")).unwrap() == exported);
            fs::remove_dir_all(d.join("r/final")).unwrap();
        }
    }
}

/// Somebody has put a file into an export. It stays when the run is resumed, and when the export is made again.
#[test]
fn a_file_that_lies_in_an_export_stays() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let exported = complete(d);
    let (notes, summary) = (d.join("r/final/notes.txt"), d.join("r/summary.md"));
    fs::write(&notes, "mine").unwrap();
    fs::remove_file(&summary).unwrap();
    // A dry run writes nothing.
    for (dry, summarized) in [(&["--dry-run"][..], false), (&[], true)] {
        let (code, said) = ended(d, &[&RESUME[..], dry].concat());
        assert!(code == Some(0) && said.contains("is complete at step 6"), "{code:?}: {said}");
        assert_eq!(summary.exists(), summarized, "{dry:?}");
    }
    fs::write(d.join("r/final/model.dat"), "damaged").unwrap();
    let (code, said) = ended(d, &RESUME);
    assert!(code == Some(0) && !said.contains("is complete"), "{code:?}: {said}");
    assert!(fs::read(d.join("r/final/model.dat")).unwrap() == exported);
    assert_eq!(fs::read_to_string(&notes).unwrap(), "mine");
}

/// A run that was started so that a closed terminal does not end it, as by nohup.
#[test]
#[cfg(target_os = "linux")]
fn a_run_that_ignores_a_closed_terminal_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let script = format!("trap '' HUP; exec {} {FIT}", program().display());
    let mut child = Command::new("sh")
        .args(["-c", &script])
        .current_dir(d)
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.contains("tok/s")), "the run printed no step");
    send(&child, "-HUP");
    assert!(child.try_wait().unwrap().is_none(), "the run had ended before the signal");
    let said: Vec<String> = lines.collect();
    assert_eq!(child.wait().unwrap().code(), Some(0), "{said:?}");
    assert!(d.join("r/checkpoint-6").exists() && d.join("r/final/model.dat").exists());
}

#[test]
fn an_old_checkpoint_that_cannot_be_deleted_is_warned_of() {
    let Some(machine) = Machine::new() else { return };
    let words = faulty_disk::FIT.replace("--save-steps 2", "--save-steps 1");
    let out = machine.run(&words.split_whitespace().collect::<Vec<_>>(), Fault::Keeps("checkpoint-1"));
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{said}");
    assert!(said.contains("warning: an old checkpoint cannot be deleted") && said.contains("checkpoint-1"), "{said}");
    assert!(machine.folder().join("r/checkpoint-6").exists() && !machine.folder().join("r/checkpoint-2").exists());
    assert!(machine.folder().join("r/final/model.dat").exists());
    // What is left of it has a temporary name, so that nobody takes it for a checkpoint.
    assert!(!machine.folder().join("r/checkpoint-1").exists());
    assert!(names(&machine.folder().join("r")).iter().any(|name| name.ends_with("-checkpoint-1")));
}

/// A resumed run writes into the folder around its checkpoint. So that folder must be a run folder, and a link to a checkpoint
/// stands for the checkpoint in its own run.
#[test]
#[cfg(unix)]
fn a_checkpoint_is_resumed_in_its_own_run_or_not_at_all() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    complete(d);
    let (checkpoint, theirs) = (d.join("r/checkpoint-6"), d.join("theirs"));
    fs::create_dir_all(theirs.join("final")).unwrap();
    let files = ["final/thesis.txt", "summary.md"].map(|name| theirs.join(name));
    files.iter().for_each(|file| fs::write(file, "mine").unwrap());
    fs::create_dir(theirs.join("backup")).unwrap();
    for name in names(&checkpoint) {
        fs::copy(checkpoint.join(&name), theirs.join("backup").join(&name)).unwrap();
    }
    std::os::unix::fs::symlink("../r/checkpoint-6", theirs.join("best")).unwrap();
    let there = names(&theirs);
    let resumed = |from: &Path, checkpoint: &str, steps: &str| {
        let out = run(from, &["fit", "--resume-from-checkpoint", checkpoint, "--max-steps", steps]);
        assert_eq!(names(&theirs), there);
        assert!(files.iter().all(|file| fs::read(file).unwrap() == b"mine"));
        (out.status.code(), String::from_utf8(out.stderr).unwrap())
    };
    let (code, said) = resumed(d, "theirs/backup", "7");
    let remedy = "start a new run from its weights: train-cli fit -m theirs/backup";
    assert!(code == Some(2) && said.contains("theirs, which is no run folder"), "{code:?}: {said}");
    assert!(said.contains(remedy), "{said}");
    let (code, said) = resumed(d, "theirs/best", "7");
    assert!(code == Some(0) && d.join("r/checkpoint-7").exists(), "{code:?}: {said}");
    let (code, said) = resumed(&d.join("r/checkpoint-7"), ".", "8");
    assert!(code == Some(0) && d.join("r/checkpoint-8").exists(), "{code:?}: {said}");
    assert!(!d.join("r/checkpoint-7/lock").exists());
    // A run of an older version has no run.json.
    fs::remove_file(d.join("r/run.json")).unwrap();
    let (code, said) = resumed(d, "r/checkpoint-8", "9");
    assert!(code == Some(0) && d.join("r/checkpoint-9").exists(), "{code:?}: {said}");
}

/// A copy of a run that is made longer leaves the `.dat` file of the original where that one can be found.
#[test]
fn a_copy_of_a_run_keeps_the_export_of_the_original() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    complete(d);
    let exported = fs::read(d.join("r.dat")).unwrap();
    assert!(Command::new("cp").args(["-r", "r", "copy"]).current_dir(d).status().unwrap().success());
    let longer = |run: &'static str, steps: &'static str| {
        let (code, said) = ended(d, &["fit", "--resume-from-checkpoint", run, "--max-steps", steps]);
        assert_eq!(code, Some(0), "{said}");
        said
    };
    assert!(longer("copy", "7").contains("r.dat.kept-1"));
    assert!(fs::read(d.join("r.dat.kept-1")).unwrap() == exported && fs::read(d.join("r.dat")).unwrap() != exported);
    // From then on the file is the copy's. What a run that has only moved exported is its own.
    assert!(!longer("copy", "8").contains(".kept-"));
    fs::rename(d.join("copy"), d.join("moved")).unwrap();
    assert!(!longer("moved", "9").contains(".kept-"));
}

/// Whoever made a run folder chose the outputs that its record names.
#[test]
fn outputs_that_only_a_received_run_names_replace_no_file_of_the_user() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    complete(d);
    let settings = fs::read_to_string(d.join("r/config.toml")).unwrap();
    let received = |report: &str| {
        fs::create_dir_all(d.join("x")).unwrap();
        let own = d.join("own.dat");
        let lines = settings.lines().filter(|line| !line.starts_with("output_d") && !line.starts_with("vram_report"));
        let lines: Vec<&str> = lines.collect();
        let text = format!("{report}output_dat = {own:?}\n{}\n", lines.join("\n"));
        fs::write(d.join("x/config.toml"), text).unwrap();
    };
    fs::write(d.join("own.dat"), "the user's model").unwrap();
    fs::write(d.join("own.txt"), "the user's text").unwrap();
    received(&format!("vram_report = {:?}\n", d.join("own.txt")));
    let resume = ["fit", "--resume-from-checkpoint", "x"];
    let (code, said) = ended(d, &resume);
    assert!(code == Some(2) && said.contains("no memory report"), "{code:?}: {said}");
    assert_eq!(fs::read_to_string(d.join("own.txt")).unwrap(), "the user's text");
    received("");
    let (code, said) = ended(d, &resume);
    assert!(code == Some(0) && said.contains("own.dat.kept-1"), "{code:?}: {said}");
    assert_eq!(fs::read_to_string(d.join("own.dat.kept-1")).unwrap(), "the user's model");
    assert!(fs::read(d.join("own.dat")).unwrap().len() > 1000);
    // What the run has exported itself is replaced.
    let (code, said) = ended(d, &[&resume[..], &["--max-steps", "8"]].concat());
    assert!(code == Some(0) && !said.contains(".kept-"), "{code:?}: {said}");
}
