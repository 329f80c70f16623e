//! Runs the CUDA C++ of a launch on the CPU. The text is compiled with the machine's C++ compiler and the emulator's own
//! headers; the program runs one launch: it reads grid, scalars and buffers from a file and writes the buffers back.
//!
//! The emulator (`cuda/`) knows fragments, asynchronous copies and barriers by the tables of the PTX ISA, for Hopper also its
//! copy engine and its products of warpgroups. It refuses a
//! launch that accesses memory outside its buffers, whose units wait for each other forever, or whose units race for a byte:
//! two write it, or one reads what another wrote. In shared memory a write after another unit's read counts as well.

mod identity;
mod text;

pub(crate) use text::BARRIER;

use kernels_cubecl::cuda_source::{Executor, Launch, TensorMap};
use sha2::{Digest, Sha256};
use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Arc, Mutex, OnceLock},
};

/// The emulator's sources. Headers come first.
const SOURCES: [(&str, &str); 10] = [
    ("machine.h", include_str!("cuda/machine.h")),
    ("internal.h", include_str!("cuda/internal.h")),
    ("numbers.h", include_str!("cuda/numbers.h")),
    ("ptx.h", include_str!("cuda/ptx.h")),
    ("cuda.h", include_str!("cuda/cuda.h")),
    ("units.cpp", include_str!("cuda/units.cpp")),
    ("memory.cpp", include_str!("cuda/memory.cpp")),
    ("fragments.cpp", include_str!("cuda/fragments.cpp")),
    ("hopper.cpp", include_str!("cuda/hopper.cpp")),
    ("main.cpp", include_str!("cuda/main.cpp")),
];

/// Options for a kernel's text. The instrumentation reports every access to memory to the emulator.
/// Without exceptions Clang selects instructions the fast way.
const OPTIONS: [&str; 7] =
    ["-std=c++20", "-O0", "-w", "-fsanitize=thread", "-fno-strict-aliasing", "-ffp-contract=off", "-fno-exceptions"];

/// The machine's C++ compiler, or None.
pub(crate) fn compiler() -> Option<&'static str> {
    static FOUND: OnceLock<Option<String>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let name = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
        let asked = Command::new(&name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        asked.is_ok_and(|status| status.success()).then_some(name)
    });
    found.as_deref()
}

/// How the compiler is told which linker to call. Where gold is installed, it links in half of the time of the usual one.
fn linker() -> &'static [&'static str] {
    static GOLD: OnceLock<bool> = OnceLock::new();
    let is_installed = || {
        let asked = Command::new("ld.gold").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        asked.is_ok_and(|status| status.success())
    };
    if *GOLD.get_or_init(is_installed) { &["-fuse-ld=gold"] } else { &[] }
}

/// The executor that runs launches as they are.
pub(crate) fn executor() -> Executor {
    Arc::new(run)
}

/// Runs a launch and leaves its results in the buffers. The error says what the kernel did wrong, and where. A launch
/// that has run before (another architecture has the same text) is not run again.
pub(crate) fn run(launch: &Launch, buffers: &mut [Vec<u8>]) -> Result<(), String> {
    run_without(launch, None, buffers)
}

/// Runs a launch as if the barrier of that number were not in its text.
pub(crate) fn run_without(launch: &Launch, barrier: Option<usize>, buffers: &mut [Vec<u8>]) -> Result<(), String> {
    static DONE: Mutex<BTreeMap<[u8; 32], Arc<Vec<u8>>>> = Mutex::new(BTreeMap::new());
    let program = program(launch)?;
    let input = contents(launch, buffers);
    let hash = Sha256::new().chain_update(program.as_os_str().as_encoded_bytes()).chain_update(format!("{barrier:?}"));
    let key: [u8; 32] = hash.chain_update(&input).finalize().into();
    let known = DONE.lock().map_err(|e| e.to_string())?.get(&key).cloned();
    let output = match known {
        Some(output) => output,
        None => {
            let output = Arc::new(execute(&program, barrier, &input).map_err(|e| format!("{}: {e}", launch.entry))?);
            DONE.lock().map_err(|e| e.to_string())?.insert(key, output.clone());
            output
        }
    };
    let mut rest = &output[..];
    for buffer in buffers {
        let (own, others) = rest.split_at(buffer.len());
        buffer.copy_from_slice(own);
        rest = others;
    }
    Ok(())
}

/// The file that `main.cpp` reads.
fn contents(launch: &Launch, buffers: &[Vec<u8>]) -> Vec<u8> {
    let mut words = vec![launch.shared as u64];
    words.extend(launch.cubes.iter().chain(&launch.units).map(|n| u64::from(*n)));
    words.push(buffers.len() as u64);
    words.extend(buffers.iter().map(|buffer| buffer.len() as u64));
    words.push(launch.arguments.len() as u64);
    words.extend(launch.arguments.iter().map(|n| *n as u64));
    words.push(launch.maps.len() as u64);
    for TensorMap { dims, tile, size } in &launch.maps {
        words.extend(dims.iter().chain(tile).chain([size]).map(|n| *n as u64));
    }
    words.extend([launch.info.len() as u64, launch.static_info as u64]);
    words.extend(&launch.info);
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    buffers.iter().for_each(|buffer| bytes.extend(buffer));
    bytes
}

/// What the program writes when it reads `input` and leaves out a barrier.
fn execute(program: &Path, barrier: Option<usize>, input: &[u8]) -> Result<Vec<u8>, String> {
    let folder = tempfile::tempdir().map_err(|e| e.to_string())?;
    let file = folder.path().join("launch");
    fs::write(&file, input).map_err(|e| e.to_string())?;
    let done = Command::new(program).arg(&file).args(barrier.map(|n| n.to_string())).output();
    let done = done.map_err(|e| format!("{}: {e}", program.display()))?;
    if done.status.success() {
        return fs::read(file.with_extension("out")).map_err(|e| e.to_string());
    }
    Err(format!("{}{}", String::from_utf8_lossy(&done.stderr), done.status))
}

/// The program for a launch's text. Programs are kept in the target folder, named by what they are made of.
fn program(launch: &Launch) -> Result<PathBuf, String> {
    type Built = HashMap<String, Arc<OnceLock<Result<PathBuf, String>>>>;
    static BUILT: Mutex<Option<Built>> = Mutex::new(None);
    let text = text::for_the_host(launch);
    let mut hash = Sha256::new();
    SOURCES.iter().for_each(|(_, source)| hash.update(source));
    OPTIONS.iter().for_each(|option| hash.update(option));
    // The translation of the text, which is not hashed itself: its temporaries differ from run to run.
    hash.update(include_bytes!("text.rs"));
    hash.update(compiler_name()?);
    hash.update(identity::identity(&launch.text));
    // Arrays in shared memory come in any order, and the gaps between them depend on it.
    hash.update(launch.shared.to_le_bytes());
    let name = short(hash);
    let place = {
        let mut built = BUILT.lock().map_err(|e| e.to_string())?;
        built.get_or_insert_default().entry(name.clone()).or_default().clone()
    };
    // Two tests that launch one kernel wait for one compilation.
    place.get_or_init(|| compile(&text, &folder().join(&name))).clone()
}

fn compile(text: &str, program: &Path) -> Result<PathBuf, String> {
    if !program.exists() {
        let machine = machine()?;
        let source = program.with_extension("cpp");
        fs::write(&source, text).map_err(|e| e.to_string())?;
        let object = program.with_extension("o");
        let header = machine[0].with_file_name("cuda.h");
        let mut compiler = Command::new(compiler_name()?);
        call(compiler.args(OPTIONS).arg("-include").arg(header).arg("-c").arg(&source).arg("-o").arg(&object))?;
        // Another process may do the same: the program appears whole.
        let part = program.with_extension(format!("{}", std::process::id()));
        call(Command::new(compiler_name()?).args(linker()).arg(&object).args(machine).arg("-o").arg(&part))?;
        fs::rename(&part, program).map_err(|e| e.to_string())?;
        fs::remove_file(&object).map_err(|e| e.to_string())?;
        fs::remove_file(&source).map_err(|e| e.to_string())?;
    }
    Ok(program.to_owned())
}

/// What a program that includes the emulator's headers writes to standard output.
pub(crate) fn output_of(source: &str) -> Result<Vec<u8>, String> {
    let machine = machine()?;
    let folder = tempfile::tempdir().map_err(|e| e.to_string())?;
    let (path, program) = (folder.path().join("main.cpp"), folder.path().join("main"));
    fs::write(&path, source).map_err(|e| e.to_string())?;
    let include = format!("-I{}", machine[0].parent().unwrap_or(Path::new(".")).display());
    call(Command::new(compiler_name()?).args(["-std=c++20", "-O1"]).arg(include).arg(&path).arg("-o").arg(&program))?;
    Ok(Command::new(&program).output().map_err(|e| e.to_string())?.stdout)
}

/// The object files of the emulator itself. They are kept in the target folder, named by what they are made of, beside the headers.
fn machine() -> Result<&'static [PathBuf], String> {
    static OBJECTS: OnceLock<Result<Vec<PathBuf>, String>> = OnceLock::new();
    let built = OBJECTS.get_or_init(|| {
        let mut hash = Sha256::new_with_prefix(compiler_name()?);
        SOURCES.iter().for_each(|(_, source)| hash.update(source));
        let machine = folder().join(format!("machine-{}", short(hash)));
        if !machine.exists() {
            fs::create_dir_all(folder()).map_err(|e| e.to_string())?;
            let part = tempfile::tempdir_in(folder()).map_err(|e| e.to_string())?;
            compile_machine(part.path())?;
            // Another process may have been faster: its files are the same.
            let done = fs::rename(part.path(), &machine);
            done.or_else(|e| if machine.exists() { Ok(()) } else { Err(e) }).map_err(|e| e.to_string())?;
            precompile(&machine.join("cuda.h"))?;
        }
        let names = SOURCES.iter().map(|(name, _)| Path::new(name)).filter(|name| is_text(name));
        Ok(names.map(|name| machine.join(name).with_extension("o")).collect())
    });
    built.as_deref().map_err(Clone::clone)
}

fn compile_machine(folder: &Path) -> Result<(), String> {
    for (name, source) in SOURCES {
        fs::write(folder.join(name), source).map_err(|e| e.to_string())?;
    }
    for path in SOURCES.iter().map(|(name, _)| folder.join(name)).filter(|path| is_text(path)) {
        let object = path.with_extension("o");
        call(Command::new(compiler_name()?).args(["-std=c++20", "-O2", "-c"]).arg(&path).arg("-o").arg(&object))?;
    }
    Ok(())
}

/// Precompiles the headers, which are half of what the compiler reads for a small kernel. GCC and Clang take the precompiled form
/// in place of `header`, if it is there. Clang remembers where the headers lie.
fn precompile(header: &Path) -> Result<(), String> {
    let part = header.with_extension(format!("{}", std::process::id()));
    let header_only = ["-x", "c++-header"];
    call(Command::new(compiler_name()?).args(OPTIONS).args(header_only).arg(header).arg("-o").arg(&part))?;
    fs::rename(part, header.with_extension("h.gch")).map_err(|e| e.to_string())
}

fn is_text(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "cpp")
}

fn short(hash: Sha256) -> String {
    hash.finalize().iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

fn compiler_name() -> Result<&'static str, String> {
    compiler().ok_or_else(|| "no C++ compiler: install g++ or set CXX".into())
}

fn folder() -> &'static Path {
    Path::new(concat!(env!("CARGO_TARGET_TMPDIR"), "/emulator"))
}

/// How the error of a text begins that the C++ compiler refuses. No test takes that for a defect that was found.
pub(crate) const NOT_COMPILED: &str = "not compiled";

fn call(command: &mut Command) -> Result<(), String> {
    let done = command.output().map_err(|e| format!("{command:?}: {e}"))?;
    if done.status.success() {
        return Ok(());
    }
    let message = String::from_utf8_lossy(&done.stderr);
    Err(format!("{NOT_COMPILED} by {command:?}: {}", message.chars().take(4000).collect::<String>()))
}
