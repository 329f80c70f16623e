//! Any operation on the disk may fail: a full disk, a broken one, one that became read-only. The run then ends with a message
//! that names the cause and with exit code 1, everything that was saved before is intact, and the same command with
//! `--resume-from-checkpoint` finishes it later, with the bits of a run in which nothing failed. So it is when the process is
//! killed or interrupted in front of an operation.
//!
//! A library that is loaded before the C library (support/disk_faults.cpp) counts the operations of the real program, makes
//! one of them fail, or all from one on, or sends a signal. CI tries some; every operation with every error and signal is
//!
//!     cargo test --workspace --test promises -- --ignored every_disk_operation

use crate::support::{
    Random, emulator,
    files::{command, tiny_model},
};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};
use tempfile::TempDir;

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
    // Two operations with each error, once and for good.
    let mut random = Random::new(5);
    fail(|operations| {
        let places = spread(&mut random, operations, 10).into_iter().enumerate();
        places.map(|(i, at)| (at, ERRORS[i / 2], i % 2 == 0)).collect()
    });
}

#[test]
#[ignore = "ten cases for each operation, two runs each; a_failed_disk_operation_loses_nothing tries ten cases"]
fn every_disk_operation_may_fail() {
    fail(|operations| {
        let all = (1..=operations).flat_map(|at| ERRORS.map(|error| (at, error)));
        all.flat_map(|(at, error)| [(at, error, false), (at, error, true)]).collect()
    });
}

#[test]
fn a_signal_in_front_of_a_disk_operation_loses_nothing() {
    let mut random = Random::new(6);
    stop(|operations| {
        let places = spread(&mut random, operations, 9).into_iter().enumerate();
        places.map(|(i, at)| (at, SIGNALS[i % 3])).collect()
    });
    kill_writers(|operations| spread(&mut random, operations, 3));
}

#[test]
#[ignore = "three signals for each operation; a_signal_in_front_of_a_disk_operation_loses_nothing sends fifteen"]
fn every_disk_operation_may_be_the_last() {
    stop(|operations| (1..=operations).flat_map(|at| SIGNALS.map(|signal| (at, signal))).collect());
    kill_writers(|operations| (1..=operations).collect());
}

/// One random operation in each of `count` parts of a run.
fn spread(random: &mut Random, operations: usize, count: usize) -> Vec<usize> {
    let at = |part: usize, uniform: f32| 1 + ((part as f32 + uniform) / count as f32 * operations as f32) as usize;
    (0..count).map(|part| at(part, random.uniform())).collect()
}

/// The real program in a folder whose disk operations are counted.
struct Machine {
    dir: TempDir,
    library: PathBuf,
}

/// What happens to a program.
#[derive(Debug, Clone, Copy)]
enum Fault {
    Nothing,
    Error { at: usize, number: i32, for_good: bool },
    Signal { at: usize, number: i32 },
}

impl Machine {
    /// None, with a message, where there can be none.
    fn new() -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let library = library(dir.path())?;
        tiny_model(&dir.path().join("m"), true);
        let machine = Self { dir, library };
        fs::create_dir(machine.folder()).unwrap();
        Some(machine)
    }

    /// The folder where the program runs.
    fn folder(&self) -> PathBuf {
        self.dir.path().join("work")
    }

    fn empty(&self) {
        fs::remove_dir_all(self.folder()).unwrap();
        fs::create_dir(self.folder()).unwrap();
    }

    fn run(&self, words: &[&str], fault: Fault) -> Output {
        let (at, error, for_good, signal) = match fault {
            Fault::Nothing => (0, 0, false, 0),
            Fault::Error { at, number, for_good } => (at, number, for_good, 0),
            Fault::Signal { at, number } => (at, 0, false, number),
        };
        let mut command = command(&self.folder(), words);
        command.env("LD_PRELOAD", &self.library).env("FAULT_ROOT", self.folder());
        command.env("FAULT_COUNT", self.dir.path().join("count")).env("FAULT_AT", at.to_string());
        command.env("FAULT_ERRNO", error.to_string()).env("FAULT_SIGNAL", signal.to_string());
        command.env("FAULT_FOR_GOOD", u8::from(for_good).to_string()).stdin(Stdio::null());
        command.output().unwrap()
    }

    /// Runs the program to its end. Returns the number of its operations.
    fn operations(&self, words: &[&str]) -> usize {
        let out = self.run(words, Fault::Nothing);
        assert!(out.status.success(), "{words:?}: {}", String::from_utf8_lossy(&out.stderr));
        fs::read_to_string(self.dir.path().join("count")).unwrap().trim().parse().unwrap()
    }

    fn fit(&self, more: &[&str], fault: Fault) -> Output {
        let words = "fit -m ../m -d ../m/demo.tsv --device cpu --max-seq-length 64 --learning-rate 1e-3 --max-steps 4 \
                     --save-steps 2 --eval-steps 2 --output-dat extra.dat -o r";
        let words: Vec<&str> = words.split_whitespace().chain(more.iter().copied()).collect();
        self.run(&words, fault)
    }

    /// A run to its end: the number of its operations, and what it leaves behind.
    fn whole(&self) -> (usize, Outcome) {
        assert!(self.fit(&[], Fault::Nothing).status.success());
        let operations = fs::read_to_string(self.dir.path().join("count")).unwrap().trim().parse().unwrap();
        assert!(operations > 100, "the library saw {operations} operations; it does not work");
        (operations, outcome(&self.folder()))
    }
}

/// The number of the operation that fails, how, and whether all later ones do, too.
type Case = (usize, (&'static str, i32), bool);

fn fail(cases: impl FnOnce(usize) -> Vec<Case>) {
    let Some(machine) = Machine::new() else { return };
    let (operations, whole) = machine.whole();
    let mut failures = 0;
    for (at, (text, number), for_good) in cases(operations) {
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
        assert!([Some(1), Some(2)].contains(&out.status.code()), "{:?}: {case}", out.status);
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
        // A run that does not listen yet or no more ends at once; else it saves first.
        let expected = [Some(0), Some(128 + number), None].contains(&out.status.code());
        assert!(expected && !stderr.contains("panicked"), "{:?}: {case}", out.status);
        finish(&machine, &whole, &case);
        let entries = |folder: &Path| fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name());
        let names = entries(&machine.folder()).chain(entries(&machine.folder().join("r")));
        let hidden: Vec<_> = names.filter(|name| name.to_string_lossy().starts_with('.')).collect();
        assert!(hidden.is_empty(), "{hidden:?}: {case}");
    }
}

/// Finishes a run, which must end as if nothing had happened.
fn finish(machine: &Machine, whole: &Outcome, case: &str) {
    let resumed = machine.fit(&["--resume-from-checkpoint"], Fault::Nothing);
    let stderr = String::from_utf8_lossy(&resumed.stderr);
    assert!(resumed.status.success(), "the run cannot be finished: {case}\nresumed: {stderr}");
    assert!(outcome(&machine.folder()) == *whole, "the finished run differs: {case}\nresumed: {stderr}");
}

/// Kills `export-dat` and `convert` in front of these operations: the target is not there, or complete, and the next call
/// cleans up.
fn kill_writers(mut cases: impl FnMut(usize) -> Vec<usize>) {
    let Some(machine) = Machine::new() else { return };
    let d = machine.folder();
    assert!(machine.fit(&[], Fault::Nothing).status.success());
    fs::rename(d.join("r"), machine.dir.path().join("r")).unwrap();
    for words in [
        &["export-dat", "--checkpoint", "../r/checkpoint-4", "--output-dat", "x.dat", "--device", "cpu"][..],
        &["convert", "../m/model.safetensors", "x.dat", "--to", "dat", "--dtype", "nvfp4"],
    ] {
        machine.empty();
        let operations = machine.operations(words);
        let whole = fs::read(d.join("x.dat")).unwrap();
        for (i, at) in cases(operations).into_iter().enumerate() {
            let case = format!("{words:?}, killed in front of operation {at} of {operations}");
            machine.empty();
            // Every second call finds an older file.
            let older = i % 2 == 1;
            if older {
                fs::write(d.join("x.dat"), b"older").unwrap();
            }
            machine.run(words, Fault::Signal { at, number: 9 });
            match fs::read(d.join("x.dat")) {
                Ok(found) => assert!(found == whole || older && found == b"older", "{case}: another file"),
                Err(_) => assert!(!older, "{case}: the older file is gone"),
            }
            machine.operations(words);
            let names: Vec<_> = fs::read_dir(&d).unwrap().map(|e| e.unwrap().file_name()).collect();
            assert!(names == ["x.dat"] && fs::read(d.join("x.dat")).unwrap() == whole, "{case}: {names:?}");
        }
    }
}

fn names_a_path(message: &str) -> bool {
    ["r/", "r:", "extra.dat", "work"].iter().any(|part| message.contains(part))
}

type Outcome = Vec<(PathBuf, Option<Vec<u8>>)>;

/// The names and contents of what a run leaves behind that has the same bytes each time.
fn outcome(d: &Path) -> Outcome {
    let exported = ["r/final/model.dat", "r/final/config.json", "r/final/trained.json", "extra.dat"];
    let saved = ["r/checkpoint-4/model.safetensors", "r/checkpoint-4/optimizer.safetensors"];
    exported.iter().chain(&saved).map(|name| (name.into(), fs::read(d.join(name)).ok())).collect()
}

/// The library, compiled into `folder`; None, with a message, where that is not possible.
fn library(folder: &Path) -> Option<PathBuf> {
    let Some(compiler) = emulator::compiler().filter(|_| cfg!(target_os = "linux")) else {
        eprintln!("SKIPPED: disk faults need Linux and a C++ compiler");
        return None;
    };
    let (source, library) = (folder.join("disk_faults.cpp"), folder.join("disk_faults.so"));
    fs::write(&source, include_str!("support/disk_faults.cpp")).unwrap();
    let mut compile = Command::new(compiler);
    compile.args(["-std=c++20", "-shared", "-fPIC", "-O1"]).arg(&source).arg("-o").arg(&library).arg("-ldl");
    let out = compile.output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    Some(library)
}
