//! Any operation on the disk may fail: a full disk, a broken one, one that became read-only. The run then ends with a message
//! that names the cause and with exit code 1, everything that was saved before is intact, and the same command with
//! `--resume-from-checkpoint` finishes it later, with the bits of a run in which nothing failed. So it is when the process is
//! killed or interrupted in front of an operation.
//!
//! A library that is loaded before the C library (support/disk_faults.cpp) counts the operations of the real program, makes
//! one of them fail, or all from one on, or sends a signal. CI tries some; every operation with every error and signal is
//!
//!     cargo test --workspace --test promises -- --ignored every_disk_operation
//!
//! Several processes share them: with `PART=3/12`, this is the third of twelve.

use crate::support::{
    Random,
    faulty_disk::{FIT, Fault, Machine, finish, outcome, part},
    files::{names, send},
};
use std::{
    fs,
    os::unix::process::ExitStatusExt,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

/// What the system can say, and its number on Linux.
const ERRORS: [(&str, i32); 5] = [
    ("No space left on device", 28),
    ("Input/output error", 5),
    ("Read-only file system", 30),
    ("Permission denied", 13),
    ("Disk quota exceeded", 122),
];

/// SIGKILL, SIGINT and SIGTERM.
const SIGNALS: [i32; 3] = [9, 2, 15];

#[test]
fn a_failed_disk_operation_loses_nothing() {
    // An operation with each error, once or for good.
    let mut random = Random::new(5);
    fail(|operations| {
        let places = spread(&mut random, operations, 6).into_iter().enumerate();
        places.map(|(i, at)| (at, ERRORS[i % 5], i % 2 == 0)).collect()
    });
}

#[test]
#[ignore = "ten cases for each operation, two runs each; a_failed_disk_operation_loses_nothing tries six cases"]
fn every_disk_operation_may_fail() {
    fail(|operations| {
        let all = (1..=operations).flat_map(|at| ERRORS.map(|error| (at, error)));
        part(all.flat_map(|(at, error)| [(at, error, false), (at, error, true)]).collect())
    });
}

#[test]
fn a_signal_in_front_of_a_disk_operation_loses_nothing() {
    let mut random = Random::new(6);
    stop(|operations| {
        let places = spread(&mut random, operations, 6).into_iter().enumerate();
        places.map(|(i, at)| (at, SIGNALS[i % 3])).collect()
    });
    kill_writers(|operations| spread(&mut random, operations, 2));
}

#[test]
#[ignore = "three signals for each operation; a_signal_in_front_of_a_disk_operation_loses_nothing sends ten"]
fn every_disk_operation_may_be_the_last() {
    stop(|operations| part((1..=operations).flat_map(|at| SIGNALS.map(|signal| (at, signal))).collect()));
    kill_writers(|operations| part((1..=operations).collect()));
}

/// A dry run says that the run folder cannot be made, also where the run would name it.
#[test]
fn a_dry_run_tries_to_make_the_run_folder() {
    let Some(machine) = Machine::new() else { return };
    let (dry, read_only) = (["--dry-run"], Fault::Error { at: 1, number: 30, for_good: true });
    let words: Vec<&str> =
        FIT.split_whitespace().chain(dry).filter(|word| !["--output-dat", "extra.dat"].contains(word)).collect();
    let unnamed: Vec<&str> = words.iter().copied().filter(|word| !["-o", "r"].contains(word)).collect();
    for words in [words, unnamed] {
        let out = machine.run(&words, read_only);
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.code() == Some(1) && stderr.contains("Read-only file system"), "{words:?}: {stderr}");
        machine.operations(&words);
        assert!(names(&machine.folder()).is_empty(), "{words:?} left {:?}", names(&machine.folder()));
    }
}

/// A file that the system refuses to read is not a damaged one: no checkpoint is set aside for it.
#[test]
fn a_file_that_cannot_be_read_loses_nothing() {
    let mut random = Random::new(7);
    unread(|reads| {
        let places = spread(&mut random, reads, 12).into_iter().enumerate();
        places.map(|(i, at)| (at, UNREAD[i % 3])).collect()
    });
}

#[test]
#[ignore = "three errors for each operation; a_file_that_cannot_be_read_loses_nothing tries twelve cases"]
fn every_file_may_be_unreadable() {
    unread(|reads| part((1..=reads).flat_map(|at| UNREAD.map(|error| (at, error))).collect()));
}

/// What the system can say where a file is read.
const UNREAD: [(&str, i32); 3] = [("Permission denied", 13), ("Input/output error", 5), ("Too many open files", 24)];

/// Resumes a run that was killed between its first checkpoint and its last. From one of these operations on, nothing can be read.
fn unread(cases: impl FnOnce(usize) -> Vec<(usize, (&'static str, i32))>) {
    let Some(machine) = Machine::new() else { return };
    let (operations, whole) = machine.whole();
    let (r, killed) = (machine.folder().join("r"), machine.dir.path().join("killed"));
    machine.empty();
    machine.fit(&[], Fault::Signal { at: operations * 5 / 9, number: 9 });
    let is_killed = r.join("checkpoint-2").is_dir() && !r.join("checkpoint-6").exists();
    assert!(is_killed, "{:?}", names(&r));
    fs::rename(&r, &killed).unwrap();
    let again = || {
        machine.empty();
        let copied = Command::new("cp").arg("-r").arg(&killed).arg(&r).status().unwrap();
        assert!(copied.success());
    };
    again();
    assert!(machine.fit(&["--resume-from-checkpoint"], Fault::Reads).status.success());
    let reads = machine.counted();
    assert!(reads > 100, "the library saw {reads} operations that read; it does not work");
    let mut failures = 0;
    for (at, (text, number)) in cases(reads) {
        again();
        let out = machine.fit(&["--resume-from-checkpoint"], Fault::Unread { at, number });
        let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
        let case = format!("from operation {at} of {reads}: {text}\n{stderr}");
        assert!(!stderr.contains("panicked"), "{case}");
        if !out.status.success() {
            failures += 1;
            let said = stderr.lines().find(|line| line.starts_with("error: ")).unwrap_or_default();
            // A file that its disk cannot read is damaged, and a warning says so.
            let (codes, place) = if number == 5 { (&[1, 6][..], &*stderr) } else { (&[1][..], said) };
            let code = out.status.code().unwrap_or_default();
            assert!(codes.contains(&code) && place.contains(text), "exit code {code}: {case}");
            let aside = names(&r).into_iter().find(|name| name.starts_with("stale-"));
            assert!(number == 5 || aside.is_none(), "{aside:?}: {case}");
        }
        finish(&machine, &whole, &case);
    }
    assert!(failures > 0, "nothing failed");
}

#[test]
fn steps_are_made_while_a_checkpoint_is_written() {
    let Some(machine) = Machine::new() else { return };
    let (_, whole) = machine.whole();
    let r = machine.folder().join("r");
    let said = || fs::read_to_string(machine.dir.path().join(SAID)).unwrap();
    // The next checkpoint is due: training has come as far as it can.
    let mut run =
        held_run(&machine, || said().contains("note: a checkpoint is due while the one before is still being written"));
    let made = fs::read_to_string(r.join("metrics.jsonl")).is_ok_and(|log| log.contains("\"step\":3"));
    let saved = r.join("checkpoint-2").exists();
    fs::remove_file(machine.hold()).unwrap();
    let succeeds = run.wait().unwrap().success();
    let said = said();
    assert!(
        succeeds && said.contains("note: a checkpoint is due while the one before is still being written"),
        "{said}"
    );
    // It has waited for the checkpoint as long as a few steps take, and says that it waits no longer.
    assert!(said.contains("note: training does not wait until a checkpoint is written"), "{said}");
    assert!(made && !saved, "step 3 is made: {made}; the checkpoint before it is complete: {saved}");
    assert!(outcome(&machine.folder()) == whole, "the outcome differs");
}

/// The first signal waits for the checkpoint that is being written. The second one does not wait.
#[test]
fn a_second_signal_ends_the_run_at_once() {
    let Some(machine) = Machine::new() else { return };
    let (_, whole) = machine.whole();
    let r = machine.folder().join("r");
    let is_begun = || r.exists() && names(&r).iter().any(|name| name.contains("-checkpoint-2"));
    let mut run = held_run(&machine, is_begun);
    assert!(is_begun(), "no checkpoint is being written");
    // Signals that wait together count as one, so that it may take more than two.
    let (mut sent, started) = (0, Instant::now());
    while run.try_wait().unwrap().is_none() && started.elapsed() < Duration::from_secs(60) {
        send(&run, "-INT");
        sent += 1;
        std::thread::sleep(Duration::from_millis(20));
    }
    let status = run.try_wait().unwrap();
    if status.is_none() {
        run.kill().unwrap();
        run.wait().unwrap();
    }
    assert!(sent > 1 && status.is_some_and(|status| status.signal() == Some(2)), "{sent} signals: {status:?}");
    fs::remove_file(machine.hold()).unwrap();
    finish(&machine, &whole, "after two signals");
}

/// The file of what [`held_run`] says.
const SAID: &str = "said.txt";

/// A run whose checkpoints cannot be completed until [`Machine::hold`] is removed, when it has got so far, or after a minute.
fn held_run(machine: &Machine, so_far: impl Fn() -> bool) -> Child {
    machine.empty();
    fs::write(machine.hold(), "").unwrap();
    let words: Vec<&str> = FIT.split_whitespace().collect();
    let mut command = machine.command(&words, Fault::Slow);
    let said = fs::File::create(machine.dir.path().join(SAID)).unwrap();
    let run = command.stdout(Stdio::null()).stderr(said).spawn().unwrap();
    let started = Instant::now();
    while !so_far() && started.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(1));
    }
    run
}

/// One random operation in each of `count` parts of a run.
fn spread(random: &mut Random, operations: usize, count: usize) -> Vec<usize> {
    let at = |part: usize, uniform: f32| 1 + ((part as f32 + uniform) / count as f32 * operations as f32) as usize;
    (0..count).map(|part| at(part, random.uniform())).collect()
}

/// The number of the operation that fails, how, and whether all later ones do, too.
type Case = (usize, (&'static str, i32), bool);

fn fail(cases: impl FnOnce(usize) -> Vec<Case>) {
    let Some(machine) = Machine::new() else { return };
    let (operations, whole) = machine.whole();
    let mut failures = 0;
    let cases = cases(operations);
    for (i, (at, (text, number), for_good)) in cases.iter().copied().enumerate() {
        if cases.len() > 100 && i % 50 == 0 {
            eprintln!("case {i} of {}", cases.len());
        }
        machine.empty();
        let out = machine.fit(&[], Fault::Error { at, number, for_good });
        let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
        let case = format!("operation {at} of {operations}: {text}, for good: {for_good}\n{stderr}");
        assert!(!stderr.contains("panicked"), "{case}");
        if out.status.success() {
            // An operation that the run can do without.
            assert!(outcome(&machine.folder()) == whole, "exit code 0, but the outcome differs: {case}");
            continue;
        }
        failures += 1;
        assert_eq!(out.status.code(), Some(1), "{case}");
        let said =
            stderr.lines().find(|line| line.starts_with("error: ")).unwrap_or_else(|| panic!("no error: {case}"));
        assert!(said.contains(text) && names_a_path(said), "the message does not name cause and path: {case}");
        finish(&machine, &whole, &case);
    }
    assert!(failures > 0, "nothing failed");
}

/// Sends signals to runs in front of these operations.
fn stop(cases: impl FnOnce(usize) -> Vec<(usize, i32)>) {
    let Some(machine) = Machine::new() else { return };
    let (operations, whole) = machine.whole();
    for (at, number) in cases(operations) {
        machine.empty();
        let out = machine.fit(&[], Fault::Signal { at, number });
        let stderr = String::from_utf8_lossy(&out.stderr);
        let case = format!("signal {number} in front of operation {at} of {operations}\n{stderr}");
        // A run listens from its first step until everything is written: it is not ended at once then, and saves first.
        let r = machine.folder().join("r");
        let listens = fs::read_to_string(r.join("metrics.jsonl")).is_ok_and(|log| log.contains("grad_norm"))
            && !r.join("train_results.json").exists();
        let at_once = out.status.code().is_none() && (number == 9 || !listens);
        let expected = at_once || [Some(0), Some(128 + number)].contains(&out.status.code());
        assert!(expected && !stderr.contains("panicked"), "{:?}: {case}", out.status);
        finish(&machine, &whole, &case);
        let entries = |folder: &Path| fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name());
        let names = entries(&machine.folder()).chain(entries(&machine.folder().join("r")));
        let hidden: Vec<_> = names.filter(|name| name.to_string_lossy().starts_with('.')).collect();
        assert!(hidden.is_empty(), "{hidden:?}: {case}");
    }
}

/// Kills `export-dat` and `convert` in front of these operations: the target is not there, or complete, and the next call
/// cleans up.
fn kill_writers(mut cases: impl FnMut(usize) -> Vec<usize>) {
    let Some(machine) = Machine::new() else { return };
    let d = machine.folder();
    assert!(machine.fit(&[], Fault::Nothing).status.success());
    fs::rename(d.join("r"), machine.dir.path().join("r")).unwrap();
    for words in [
        &["export-dat", "--checkpoint", "../r/checkpoint-4", "--output-dat", "x.dat", "--device", "cpu", "--overwrite"]
            [..],
        &["convert", "../m/model.safetensors", "x.dat", "--to", "dat", "--dtype", "nvfp4", "--overwrite"],
    ] {
        machine.empty();
        let operations = machine.operations(words);
        let whole = fs::read(d.join("x.dat")).unwrap();
        // `convert` puts the model's small files beside its output.
        let expected = names(&d);
        assert!(!expected.iter().any(|name| name.starts_with('.')), "{expected:?}");
        assert_eq!(expected.contains("config.json"), words[0] == "convert", "{expected:?}");
        for (i, at) in cases(operations).into_iter().enumerate() {
            let case = format!("{words:?}, killed in front of operation {at} of {operations}");
            machine.empty();
            // Every second call finds an older file.
            let older = i % 2 == 1;
            let record = d.join("x.dat.trained.json");
            if older {
                fs::write(d.join("x.dat"), b"older").unwrap();
                fs::write(&record, b"older").unwrap();
            }
            machine.run(words, Fault::Signal { at, number: 9 });
            match fs::read(d.join("x.dat")) {
                Ok(found) => {
                    assert!(found == whole || older && found == b"older", "{case}: another file");
                    // The new weights would run as the older ones were trained.
                    let of_older = fs::read(&record).is_ok_and(|record| record == b"older");
                    assert!(found == b"older" || !of_older, "{case}: the older record is beside the new file");
                }
                Err(_) => assert!(!older, "{case}: the older file is gone"),
            }
            machine.operations(words);
            let left = names(&d);
            assert!(left == expected && fs::read(d.join("x.dat")).unwrap() == whole, "{case}: {left:?}");
        }
    }
}

fn names_a_path(message: &str) -> bool {
    let said = message.trim_start_matches("error: ");
    said.starts_with("r:") || ["r/", "extra.dat", "work"].iter().any(|part| said.contains(part))
}
