//! Model folders for tests, and the real program as a process.

use crate::support::{Cpu, golden, golden_bytes, skipped_for};
use backend_nvfp4::{LinearSpec, MasterKind, Precision, Recipe, Scaling};
use model_qwen3::{ModelError, config::Qwen3Config, weights, write::write_safetensors};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::{
    collections::{BTreeMap, BTreeSet},
    io::Read,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::OnceLock,
};
use train_cli::durable::FileRecord;

pub(crate) const F32: LinearSpec = LinearSpec::new(Recipe::Bf16, Scaling::Two, Precision::F32);

/// A file of the demo.
pub(crate) fn demo_file(name: &str) -> PathBuf {
    golden("").join("../../train-cli/assets/demo").join(name)
}

/// A folder with the demo's tokenizer, a smaller Qwen3 shape, random weights and training rows.
pub(crate) fn tiny_model(folder: &Path, tied: bool) {
    tiny_model_with_spread(folder, tied, 0.02);
}

/// As [`tiny_model`], with weights of standard deviation `spread`.
pub(crate) fn tiny_model_with_spread(folder: &Path, tied: bool, spread: f64) {
    std::fs::create_dir_all(folder).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "demo.tsv"] {
        std::fs::copy(demo_file(name), folder.join(name)).unwrap();
    }
    let text = std::fs::read_to_string(demo_file("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    for (key, value) in [("hidden_size", 64), ("intermediate_size", 96), ("num_hidden_layers", 2)] {
        config[key] = value.into();
    }
    config["tie_word_embeddings"] = tied.into();
    config["initializer_range"] = spread.into();
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let config = Qwen3Config::from_file(&folder.join("config.json")).unwrap();
    let model = weights::random::<Cpu>(&config, F32, MasterKind::F32, 11, &Default::default()).unwrap();
    let path = folder.join("model.safetensors");
    let out = std::fs::File::create(&path).unwrap();
    let failed = |e| ModelError::Io { path: path.clone(), source: e };
    write_safetensors(&weights::Live::new(&model), out, failed).unwrap();
}

/// Qwen's real tokenizer, unpacked once into `folder`.
pub(crate) fn real_tokenizer(folder: &Path) -> PathBuf {
    let packed = golden_bytes("tokenizer/tokenizer.json.gz");
    let mut text = String::new();
    flate2::read::GzDecoder::new(&packed[..]).read_to_string(&mut text).unwrap();
    let path = folder.join("tokenizer.json");
    std::fs::write(&path, text).unwrap();
    path
}

/// The path of the program, which is built here in the profile of the test run.
pub(crate) fn program() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        if let Some(path) = std::env::var_os("TRAIN_CLI") {
            return path.into();
        }
        let test = std::env::current_exe().unwrap();
        let folder = test.parent().and_then(Path::parent).unwrap().to_owned();
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        // The whole workspace: one package by itself has other features, and its dependencies would be built again.
        cargo.args(["build", "--quiet", "--workspace", "--bins"]);
        if folder.ends_with("release") {
            cargo.arg("--release");
        }
        assert!(cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status().unwrap().success());
        folder.join("train-cli")
    })
}

/// The program with these arguments, ready to start in `folder`.
pub(crate) fn command(folder: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(program());
    command.args(args).current_dir(folder).stdin(Stdio::null());
    command
}

pub(crate) fn run(folder: &Path, args: &[&str]) -> Output {
    command(folder, args).output().unwrap()
}

/// Runs the program, which must succeed, and returns its standard output.
pub(crate) fn ok(folder: &Path, args: &[&str]) -> String {
    let out = run(folder, args);
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{args:?} ended with {}:\n{stderr}", out.status);
    String::from_utf8(out.stdout).unwrap()
}

/// Runs the program, which must end with exit code `code`, and returns its standard error.
pub(crate) fn refused(folder: &Path, args: &[&str], code: i32) -> String {
    let out = run(folder, args);
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(code), "{args:?}: {stderr}");
    stderr
}

/// Sends a signal, such as `-INT`, to a process that has not been waited for: it may have ended meanwhile.
pub(crate) fn send(child: &Child, signal: &str) {
    assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
}

/// The program at a terminal of so many columns, which util-linux's `script` makes, ready to start.
pub(crate) fn at_terminal(folder: &Path, columns: usize, args: &str) -> Command {
    let line = format!("stty rows 40 cols {columns}; exec '{}' {args}", program().display());
    let mut script = Command::new("script");
    script.args(["-qec", &line, "/dev/null"]).current_dir(folder).env("TERM", "xterm").env_remove("NO_COLOR");
    script
}

/// Counts a test as skipped because no terminal can be made.
pub(crate) fn no_terminal() {
    skipped_for("util-linux's `script` is not installed");
}

/// Runs the program, which must succeed, and returns what it writes to a terminal of so many columns, which util-linux's `script`
/// makes.
pub(crate) fn terminal(folder: &Path, columns: usize, args: &str) -> Option<String> {
    let Ok(out) = at_terminal(folder, columns, args).output() else {
        no_terminal();
        return None;
    };
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(out.status.success(), "{args}: {text}");
    Some(text)
}

/// Runs the program, which must succeed, and returns the most bytes of memory that it held.
#[cfg(target_os = "linux")]
pub(crate) fn peak_memory(folder: &Path, args: &[&str]) -> u64 {
    let Cost { status, memory, .. } = cost(folder, args);
    assert!(status.success(), "{args:?} ended with {status}");
    memory
}

/// What a process has used.
#[cfg(target_os = "linux")]
pub(crate) struct Cost {
    pub(crate) status: std::process::ExitStatus,
    /// Seconds of processor time.
    pub(crate) seconds: f64,
    /// The most bytes of memory that it held.
    pub(crate) memory: u64,
}

/// Runs the program and measures it.
#[cfg(target_os = "linux")]
pub(crate) fn cost(folder: &Path, args: &[&str]) -> Cost {
    use wait4::Wait4;
    let mut child = command(folder, args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let file = format!("/proc/{}/status", child.id());
    let mut memory = 0;
    loop {
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        // A process that has ended, and waits to be asked for its status, has no such line any more. (The peak that the
        // system gives with the status is that of the parent, if that was higher.)
        match text.lines().find_map(|line| line.strip_prefix("VmHWM:")) {
            Some(peak) => memory = peak.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10,
            None if memory > 0 => break,
            None => {}
        }
        std::thread::yield_now();
    }
    let used = child.wait4().unwrap();
    Cost { status: used.status, seconds: (used.rusage.utime + used.rusage.stime).as_secs_f64(), memory }
}

/// Puts the size and the digest of a changed file into the manifest of its folder, as someone does who forges it.
pub(crate) fn forge(folder: &Path, name: &str) {
    let manifest = folder.join("manifest.json");
    let mut value: Value = serde_json::from_slice(&std::fs::read(&manifest).unwrap()).unwrap();
    value["files"][name] = serde_json::to_value(FileRecord::of(&folder.join(name)).unwrap()).unwrap();
    std::fs::write(manifest, value.to_string()).unwrap();
}

/// The names of what is in a folder.
pub(crate) fn names(folder: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// The commands of the program with the words that call them: `fit`, `data preview`.
pub(crate) fn commands(program: &clap::Command) -> Vec<(String, clap::Command)> {
    let of = |command: &clap::Command| -> Vec<(String, clap::Command)> {
        let shown = command.get_subcommands().filter(|c| c.get_name() != "help" && !c.is_hide_set());
        shown.map(|c| (c.get_name().to_owned(), c.clone())).collect()
    };
    let mut all = Vec::new();
    for (name, command) in of(program) {
        match of(&command) {
            parts if parts.is_empty() => all.push((name, command)),
            parts => all.extend(parts.into_iter().map(|(part, command)| (format!("{name} {part}"), command))),
        }
    }
    all
}

/// The tensors of a safetensors file: type, shape, SHA-256 of the bytes.
pub(crate) fn tensors_of(file: &[u8]) -> BTreeMap<String, Value> {
    let length = usize::try_from(u64::from_le_bytes(file[..8].try_into().unwrap())).unwrap();
    let header: BTreeMap<String, Value> = serde_json::from_slice(&file[8..8 + length]).unwrap();
    let described = |entry: Value| {
        let at = |n: usize| 8 + length + usize::try_from(entry["data_offsets"][n].as_u64().unwrap()).unwrap();
        let hash = Sha256::digest(&file[at(0)..at(1)]);
        let hash: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
        serde_json::json!([entry["dtype"], entry["shape"], hash])
    };
    let tensors = header.into_iter().filter(|(name, _)| name != "__metadata__");
    tensors.map(|(name, entry)| (name, described(entry))).collect()
}
