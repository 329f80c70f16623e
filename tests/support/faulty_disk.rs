//! The real program in a folder whose disk operations a library counts, records and makes fail (disk_faults.cpp).

use super::{
    emulator,
    files::{command, tiny_model},
    skipped_for,
};
use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};
use tempfile::TempDir;

/// The real program in a folder whose disk operations are counted.
pub(crate) struct Machine {
    pub(crate) dir: TempDir,
    library: PathBuf,
}

/// What happens to a program.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fault {
    Nothing,
    /// Every operation is appended to [`Machine::log`].
    Recorded,
    Error {
        at: usize,
        number: i32,
        for_good: bool,
    },
    Signal {
        at: usize,
        number: i32,
    },
    /// The opening or reading of a file fails, and every later one.
    Unread {
        at: usize,
        number: i32,
    },
    /// Operations that read are counted, and none fails.
    Reads,
    /// No file of a checkpoint is synced as long as [`Machine::hold`] exists.
    Slow,
    /// Nothing is deleted whose path ends so.
    Keeps(&'static str),
}

/// A run of six steps that saves three times. After the last checkpoint it deletes the first.
pub(crate) const FIT: &str = "fit -m ../m -d ../m/demo.tsv --device cpu --max-seq-length 64 --learning-rate 1e-3 \
     --max-steps 6 --save-steps 2 --eval-steps 2 --output-dat extra.dat -o r";

impl Machine {
    /// None where there can be none; the test is then counted as skipped.
    pub(crate) fn new() -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let library = preloaded(dir.path(), "disk_faults", include_str!("disk_faults.cpp"))?;
        tiny_model(&dir.path().join("m"), true);
        let machine = Self { dir, library };
        fs::create_dir(machine.folder()).unwrap();
        Some(machine)
    }

    /// The folder where the program runs.
    pub(crate) fn folder(&self) -> PathBuf {
        self.dir.path().join("work")
    }

    /// Where a recorded program's operations are.
    pub(crate) fn log(&self) -> PathBuf {
        self.dir.path().join("log")
    }

    /// The file that makes the disk slow.
    pub(crate) fn hold(&self) -> PathBuf {
        self.dir.path().join("hold")
    }

    pub(crate) fn empty(&self) {
        fs::remove_dir_all(self.folder()).unwrap();
        fs::create_dir(self.folder()).unwrap();
    }

    pub(crate) fn run(&self, words: &[&str], fault: Fault) -> Output {
        self.command(words, fault).output().unwrap()
    }

    /// The program, not started yet.
    pub(crate) fn command(&self, words: &[&str], fault: Fault) -> Command {
        let (at, error, for_good, signal) = match fault {
            Fault::Nothing | Fault::Recorded | Fault::Reads | Fault::Slow | Fault::Keeps(_) => (0, 0, false, 0),
            Fault::Unread { at, number } => (at, number, true, 0),
            Fault::Error { at, number, for_good } => (at, number, for_good, 0),
            Fault::Signal { at, number } => (at, 0, false, number),
        };
        let mut command = command(&self.folder(), words);
        command.env("LD_PRELOAD", &self.library).env("FAULT_ROOT", self.folder());
        command.env("FAULT_COUNT", self.dir.path().join("count")).env("FAULT_AT", at.to_string());
        command.env("FAULT_ERRNO", error.to_string()).env("FAULT_SIGNAL", signal.to_string());
        command.env("FAULT_FOR_GOOD", u8::from(for_good).to_string()).stdin(Stdio::null());
        match fault {
            Fault::Recorded => command.env("FAULT_LOG", self.log()),
            Fault::Slow => command.env("FAULT_HOLD", self.hold()),
            Fault::Keeps(end) => command.env("FAULT_KEEPS", end),
            Fault::Reads | Fault::Unread { .. } => command.env("FAULT_READS", "1"),
            _ => &mut command,
        };
        command
    }

    /// Runs the program to its end. Returns the number of its operations.
    pub(crate) fn operations(&self, words: &[&str]) -> usize {
        let out = self.run(words, Fault::Nothing);
        assert!(out.status.success(), "{words:?}: {}", String::from_utf8_lossy(&out.stderr));
        self.counted()
    }

    /// The number of operations of the program that ran last.
    pub(crate) fn counted(&self) -> usize {
        fs::read_to_string(self.dir.path().join("count")).unwrap().trim().parse().unwrap()
    }

    pub(crate) fn fit(&self, more: &[&str], fault: Fault) -> Output {
        let words: Vec<&str> = FIT.split_whitespace().chain(more.iter().copied()).collect();
        self.run(&words, fault)
    }

    /// A run to its end: the number of its operations, and what it leaves behind.
    pub(crate) fn whole(&self) -> (usize, Outcome) {
        assert!(self.fit(&[], Fault::Nothing).status.success());
        let operations = self.counted();
        assert!(operations > 100, "the library saw {operations} operations; it does not work");
        (operations, outcome(&self.folder()))
    }
}

/// Finishes a run, which must end as if nothing had happened.
pub(crate) fn finish(machine: &Machine, whole: &Outcome, case: &str) {
    let resumed = machine.fit(&["--resume-from-checkpoint"], Fault::Nothing);
    let stderr = String::from_utf8_lossy(&resumed.stderr);
    assert!(resumed.status.success(), "the run cannot be finished: {case}\nresumed: {stderr}");
    assert!(outcome(&machine.folder()) == *whole, "the finished run differs: {case}\nresumed: {stderr}");
}

/// The cases of this process: all, or those that `PART` gives it.
pub(crate) fn part<T>(cases: Vec<T>) -> Vec<T> {
    let Ok(text) = std::env::var("PART") else { return cases };
    let part =
        text.split_once('/').and_then(|(part, of)| Some((part.parse::<usize>().ok()?, of.parse::<usize>().ok()?)));
    let (part, of) =
        part.filter(|(part, of)| (1..=*of).contains(part)).expect("PART is a number, a slash and a number");
    cases.into_iter().enumerate().filter(|(i, _)| i % of == part - 1).map(|(_, case)| case).collect()
}

pub(crate) type Outcome = Vec<(PathBuf, Option<Vec<u8>>)>;

/// The names and contents of what a run leaves behind that has the same bytes each time.
pub(crate) fn outcome(d: &Path) -> Outcome {
    let exported = ["r/final/model.dat", "r/final/config.json", "r/final/trained.json", "extra.dat"];
    let saved = ["r/checkpoint-6/model.safetensors", "r/checkpoint-6/optimizer.safetensors", "r/samples.jsonl"];
    exported.iter().chain(&saved).map(|name| (name.into(), fs::read(d.join(name)).ok())).collect()
}

/// A library for LD_PRELOAD, compiled from `text` into `folder`. None where that is not possible; the test is then counted as
/// skipped.
pub(crate) fn preloaded(folder: &Path, name: &str, text: &str) -> Option<PathBuf> {
    let Some(compiler) = emulator::compiler().filter(|_| cfg!(target_os = "linux")) else {
        skipped_for(&format!("{name}.cpp needs Linux and a C++ compiler (apt-get install g++)"));
        return None;
    };
    let (source, library) = (folder.join(format!("{name}.cpp")), folder.join(format!("{name}.so")));
    fs::write(&source, text).unwrap();
    let mut compile = Command::new(compiler);
    compile.args(["-std=c++20", "-shared", "-fPIC", "-O1"]).arg(&source).arg("-o").arg(&library).arg("-ldl");
    let out = compile.output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    Some(library)
}
