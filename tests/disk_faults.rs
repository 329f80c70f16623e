//! Any operation on the disk may fail: a full disk, a broken one, one that became read-only. The run then ends with a message
//! that names the cause and with exit code 1, everything that was saved before is intact, and the same command with
//! `--resume-from-checkpoint` finishes it later, with the bits of a run in which nothing failed.
//!
//! A library that is loaded before the C library (support/disk_faults.cpp) counts the operations of the real program and
//! makes one of them fail, or all from one on. CI tries some; every operation with every error is
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

/// What the system can say, and its number on Linux.
const ERRORS: [(&str, i32); 5] = [
    ("No space left on device", 28),
    ("Input/output error", 5),
    ("Read-only file system", 30),
    ("Permission denied", 13),
    ("Disk quota exceeded", 122),
];

#[test]
fn a_failed_disk_operation_loses_nothing() {
    let mut random = Random::new(5);
    // Two operations with each error, once and for good.
    fail(|operations| {
        let mut cases = Vec::new();
        for (i, error) in ERRORS.iter().enumerate() {
            for part in 0..2 {
                let at = ((i * 2 + part) as f32 + random.uniform()) / 10.0 * operations as f32;
                cases.push((1 + at as usize, *error, part == 0));
            }
        }
        cases
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

/// The number of the operation that fails, how, and whether all later ones do, too.
type Case = (usize, (&'static str, i32), bool);

fn fail(cases: impl FnOnce(usize) -> Vec<Case>) {
    let dir = tempfile::tempdir().unwrap();
    let Some(library) = library(dir.path()) else { return };
    let d = dir.path().join("work");
    tiny_model(&dir.path().join("m"), true);
    fs::create_dir(&d).unwrap();
    let count = dir.path().join("count");
    let run = |more: &[&str], at: usize, error: i32, for_good: bool| -> Output {
        let args = "fit -m ../m -d ../m/demo.tsv --device cpu --max-seq-length 64 --learning-rate 1e-3 --max-steps 4 \
                    --save-steps 2 --eval-steps 2 --output-dat extra.dat -o r";
        let args: Vec<&str> = args.split_whitespace().chain(more.iter().copied()).collect();
        let mut command = command(&d, &args);
        command.env("LD_PRELOAD", &library).env("FAULT_ROOT", &d).env("FAULT_COUNT", &count);
        command.env("FAULT_AT", at.to_string()).env("FAULT_ERRNO", error.to_string());
        command.env("FAULT_FOR_GOOD", u8::from(for_good).to_string()).stdin(Stdio::null());
        command.output().unwrap()
    };
    assert!(run(&[], 0, 0, false).status.success());
    let operations: usize = fs::read_to_string(&count).unwrap().trim().parse().unwrap();
    assert!(operations > 100, "the library saw {operations} operations; it does not work");
    let whole = outcome(&d);
    let mut failures = 0;
    for (at, (text, error), for_good) in cases(operations) {
        fs::remove_dir_all(&d).unwrap();
        fs::create_dir(&d).unwrap();
        let out = run(&[], at, error, for_good);
        let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
        let case = format!("operation {at} of {operations}: {text}, for good: {for_good}\n{stderr}");
        assert!(!stderr.contains("panicked"), "{case}");
        if out.status.success() {
            // An operation that the run can do without.
            assert!(outcome(&d) == whole, "exit code 0, but the outcome differs: {case}");
            continue;
        }
        failures += 1;
        assert!([Some(1), Some(2)].contains(&out.status.code()), "{:?}: {case}", out.status);
        let said =
            stderr.lines().find(|line| line.starts_with("error: ")).unwrap_or_else(|| panic!("no error: {case}"));
        assert!(said.contains(text) && names_a_path(said), "the message does not name cause and path: {case}");
        let resumed = run(&["--resume-from-checkpoint"], 0, 0, false);
        let stderr = String::from_utf8_lossy(&resumed.stderr);
        assert!(resumed.status.success(), "the run cannot be finished: {case}\nresumed: {stderr}");
        assert!(outcome(&d) == whole, "the finished run differs: {case}\nresumed: {stderr}");
    }
    assert!(failures > 0, "nothing failed");
}

fn names_a_path(message: &str) -> bool {
    ["r/", "r:", "extra.dat", "work"].iter().any(|part| message.contains(part))
}

/// The names and digests of what a run leaves behind that has the same bytes each time.
fn outcome(d: &Path) -> Vec<(PathBuf, Option<Vec<u8>>)> {
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
