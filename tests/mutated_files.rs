//! Files that are broken at random. Every reader gets its own valid file with one to three changes (a flipped bit, a missing
//! range, a huge number, ten thousand brackets …) and must answer with an error or with what the file says, but never with a
//! panic. A change that made a reader panic can be repeated: the message names reader and seed.
//!
//! CI breaks files for twenty seconds for each reader that is fuzzed, too, and as long for all others together. A minute for each
//! reader, in four parts, is
//!
//!     PART=1/4 cargo test --workspace --test promises -- --ignored a_minute_for_each_reader

use crate::support::{
    Random,
    faulty_disk::part,
    files::{Cost, cost, demo_file, forge, ok, tiny_model},
    golden,
};
use model_qwen3::{
    chat_template::{ChatTemplate, RenderOptions},
    config::Qwen3Config,
    container::Container,
    gguf::GgufFile,
    tensors::{Stored, Tensors, row_ranges},
    tokenizer::{GenerationConfig, Tokenizer},
};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value, json};
use std::{
    fs,
    io::Read,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use train_cli::{
    commands::parity::Parity,
    data::{
        format::RowOptions,
        read::{self, DataOptions},
        token_cache,
    },
    device, durable,
    model_files::TextFiles,
    run::checkpoint,
    settings::{DeviceChoice, Layer, LossOn, Overlong},
};

/// Files up to this length are read from every prefix.
const SMALL: usize = 4096;

/// A reader, the file that is broken for it, and how it reads. What it returns says whether the file was accepted.
struct Reader {
    name: &'static str,
    file: PathBuf,
    read: Box<dyn Fn(&Path) -> bool>,
    /// A command of the program that reads the file.
    command: String,
    /// Whether the manifest of the file's folder is made to fit the broken file. Its digest would be the first to be refused.
    forged: bool,
}

/// The readers that are fuzzed, too (doc/notebook/fuzzing.md): the name of the target, and that of the reader.
const FUZZED: [(&str, &str); 7] = [
    ("dat", ".dat"),
    ("safetensors", "safetensors"),
    ("manifest", "manifest.json"),
    ("config", "config.json"),
    ("tokenizer", "tokenizer.json"),
    ("jsonl", "messages"),
    ("template", "chat template"),
];

/// How long each of these, and all others together, are given broken files in CI.
const SMOKE: Duration = Duration::from_secs(20);
/// Each reader gets so many of them at least, on a slow machine, too.
const FEWEST: u64 = 40;

#[test]
fn broken_files_make_no_reader_of_weights_panic() {
    smoke(&FUZZED[..3]);
}

#[test]
fn broken_files_make_no_parser_of_text_panic() {
    smoke(&FUZZED[3..]);
}

/// Gives broken files to each of these readers for [`SMOKE`].
fn smoke(fuzzed: &[(&str, &str)]) {
    let dir = tempfile::tempdir().unwrap();
    let readers = readers(dir.path());
    for (_, name) in fuzzed {
        let reader = readers.iter().find(|reader| reader.name == *name).unwrap();
        let (accepted, refused) = broken(reader, SMOKE);
        assert!(accepted > 5 && refused > 50, "{}: {accepted} were accepted and {refused} refused", reader.name);
    }
}

#[test]
fn broken_files_make_no_other_reader_panic() {
    let dir = tempfile::tempdir().unwrap();
    let (mut accepted, mut refused) = (0, 0);
    let mut readers = readers(dir.path());
    readers.retain(|reader| FUZZED.iter().all(|(_, name)| reader.name != *name));
    for reader in &readers {
        let (more, others) = broken(reader, SMOKE / readers.len() as u32);
        (accepted, refused) = (accepted + more, refused + others);
    }
    assert!(accepted > 20 && refused > 200, "{accepted} broken files were accepted and {refused} refused");
}

/// Gives broken files to a reader for so long. Returns how many it accepted, and how many it refused.
fn broken(reader: &Reader, time: Duration) -> (usize, usize) {
    let (mut accepted, mut refused) = (0, 0);
    let valid = fs::read(&reader.file).unwrap();
    assert!((reader.read)(&reader.file), "{}: the valid file is refused", reader.name);
    let started = Instant::now();
    for seed in 0.. {
        if seed >= FEWEST && started.elapsed() > time {
            break;
        }
        let taken = read_broken(reader, &valid, seed);
        accepted += usize::from(taken);
        refused += usize::from(!taken);
    }
    // Every beginning of a small file, and some of a larger one.
    let step = if valid.len() <= SMALL { 1 } else { valid.len().div_ceil(100) };
    for cut in (0..valid.len()).step_by(step) {
        read_bytes(reader, &valid[..cut], &format!("the first {cut} bytes"));
    }
    reader.write(&valid);
    (accepted, refused)
}

/// What fuzzing found worth keeping (doc/notebook/fuzzing.md), for the readers that it was made for.
#[test]
fn the_files_of_the_fuzzers_make_no_reader_panic() {
    let dir = tempfile::tempdir().unwrap();
    let readers = readers(dir.path());
    for (target, name) in FUZZED {
        let reader = readers.iter().find(|reader| reader.name == name).unwrap();
        let packed = fs::read(golden("").join(format!("../fuzz/corpus/{target}.gz"))).unwrap();
        let mut all = Vec::new();
        flate2::read::GzDecoder::new(&packed[..]).read_to_end(&mut all).unwrap();
        let (mut rest, mut files) = (all.as_slice(), 0);
        while let Some((length, more)) = rest.split_first_chunk::<4>() {
            let (file, after) = more.split_at(u32::from_le_bytes(*length) as usize);
            read_bytes(reader, file, &format!("file {files} of the corpus {target}"));
            (rest, files) = (after, files + 1);
        }
        assert!(files > 50, "{target}: {files} files");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn broken_files_cost_the_program_little_time_and_memory() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("two.tsv"), "a\tb\nc\td\n").unwrap();
    for reader in readers(dir.path()) {
        let words: Vec<&str> = reader.command.split(' ').collect();
        let valid = fs::read(&reader.file).unwrap();
        let whole = cost(dir.path(), &words).memory;
        for (kind, seed) in (0..CHANGES).flat_map(|kind| [(kind, 1), (kind, 2)]) {
            let mut bytes = valid.clone();
            apply(&mut bytes, &mut Random::new(seed), kind);
            reader.write(&bytes);
            let Cost { status, seconds, memory } = cost(dir.path(), &words);
            let mib = [memory >> 20, whole >> 20];
            let case = format!(
                "{}, change {kind}, seed {seed}: {status}, {seconds:.1} s of processor time, {} MiB; {} MiB for the valid file",
                reader.name, mib[0], mib[1]
            );
            // 101 is a panic, and none is a signal.
            assert!(status.code().is_some_and(|code| code < 100), "{case}");
            assert!(seconds <= 2.0, "{case}");
            // What the program holds without the file is in both.
            assert!(memory <= whole + (64 << 20) + 2 * bytes.len() as u64, "{case}");
        }
        reader.write(&valid);
    }
}

#[test]
#[ignore = "a minute for each of some thirty readers; three tests take twenty seconds for each of seven, and for the others"]
fn a_minute_for_each_reader() {
    let dir = tempfile::tempdir().unwrap();
    for reader in part(readers(dir.path())) {
        let valid = fs::read(&reader.file).unwrap();
        let (started, mut slowest) = (Instant::now(), Duration::ZERO);
        let mut seed = 1000;
        while started.elapsed() < Duration::from_secs(60) {
            let one = Instant::now();
            read_broken(&reader, &valid, seed);
            slowest = slowest.max(one.elapsed());
            seed += 1;
        }
        reader.write(&valid);
        eprintln!("{}: {} files, the slowest took {slowest:.1?}", reader.name, seed - 1000);
    }
}

fn read_broken(reader: &Reader, valid: &[u8], seed: u64) -> bool {
    let mut random = Random::new(seed);
    let mut bytes = valid.to_vec();
    for _ in 0..=random.below(3) {
        change(&mut bytes, &mut random);
    }
    read_bytes(reader, &bytes, &format!("seed {seed}"))
}

fn read_bytes(reader: &Reader, bytes: &[u8], what: &str) -> bool {
    reader.write(bytes);
    let read = catch_unwind(AssertUnwindSafe(|| (reader.read)(&reader.file)));
    read.unwrap_or_else(|_| panic!("{} panicked on {what}", reader.name))
}

/// Breaks a file in one of [`CHANGES`] ways.
fn change(bytes: &mut Vec<u8>, random: &mut Random) {
    let kind = random.below(CHANGES);
    apply(bytes, random, kind);
}

const CHANGES: usize = 14;

fn apply(bytes: &mut Vec<u8>, random: &mut Random, kind: usize) {
    let at = random.below(bytes.len().max(1));
    let end = (at + 1 + random.below(64)).min(bytes.len());
    let range = at.min(bytes.len())..end.max(at.min(bytes.len()));
    match kind {
        0 => bytes.truncate(at),
        1 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
        2 => bytes[range].fill(0),
        3 => bytes[range].fill(0xFF),
        4 => drop(bytes.drain(range)),
        5 => {
            let again = bytes[range.clone()].to_vec();
            bytes.splice(range.start..range.start, again);
        }
        6 => bytes[range].reverse(),
        7 => insert(bytes, at, &random.bits().to_le_bytes()),
        8 => replace_number(bytes, at, random),
        9 => insert(bytes, at, "[".repeat(10_000).as_bytes()),
        10 => insert(bytes, at, "{\"a\":".repeat(10_000).as_bytes()),
        11 => insert(bytes, at, &b"\x00\xC3\x28\xED\xA0\x80\xF0\x9F"[..1 + random.below(8)]),
        12 => {
            let all = bytes.clone();
            bytes.extend(all);
        }
        _ => insert(bytes, at, ["null", "-1", "true", "{{", "}}", "{%", "\"", "\n", "\t"][random.below(9)].as_bytes()),
    }
}

fn insert(bytes: &mut Vec<u8>, at: usize, what: &[u8]) {
    let at = at.min(bytes.len());
    bytes.splice(at..at, what.iter().copied());
}

/// Replaces the first number after a place: digits by other digits, or eight bytes by a large integer.
fn replace_number(bytes: &mut Vec<u8>, at: usize, random: &mut Random) {
    let numbers = ["0", "-1", "1e999", "18446744073709551615", "18446744073709551616", "4294967296", "0.5", "1e-400"];
    let Some(start) = (at..bytes.len()).find(|&i| bytes[i].is_ascii_digit()) else { return };
    let end = (start..bytes.len()).find(|&i| !bytes[i].is_ascii_digit()).unwrap_or(bytes.len());
    if random.below(2) == 0 {
        bytes.splice(start..end, numbers[random.below(numbers.len())].bytes());
    } else if at + 8 <= bytes.len() {
        let value = [0u64, 1, u64::MAX, u64::MAX / 2, 1 << 32, 1 << 62][random.below(6)];
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }
}

fn readers(dir: &Path) -> Vec<Reader> {
    let m = dir.join("m");
    tiny_model(&m, true);
    let config = Qwen3Config::from_file(&m.join("config.json")).unwrap();
    let text = TextFiles::open(&m, &config).unwrap();
    let mut all = Vec::from(tensor_readers(dir, &m));
    all.extend(text_readers(dir, &m));
    all.extend(row_readers(dir, &text));
    all.push(token_cache_reader(dir, text));
    all.push(gguf_reader(dir));
    all.extend(run_readers(dir));
    all.extend(checkpoint_readers(dir));
    all.push(parity_reader(dir));
    all
}

impl Reader {
    fn new(
        name: &'static str,
        file: PathBuf,
        command: impl Into<String>,
        read: impl Fn(&Path) -> bool + 'static,
    ) -> Self {
        Self { name, file, read: Box::new(read), command: command.into(), forged: false }
    }

    fn write(&self, bytes: &[u8]) {
        fs::write(&self.file, bytes).unwrap();
        if self.forged {
            forge(self.file.parent().unwrap(), self.file.file_name().unwrap().to_str().unwrap());
        }
    }
}

/// Files of weights.
fn tensor_readers(dir: &Path, m: &Path) -> [Reader; 3] {
    ok(dir, &["convert", "m", "packed.dat", "--to", "dat", "--dtype", "nvfp4"]);
    fs::copy(m.join("model.safetensors"), dir.join("x.safetensors")).unwrap();
    let shards = dir.join("shards");
    fs::create_dir(&shards).unwrap();
    fs::copy(m.join("model.safetensors"), shards.join("a.safetensors")).unwrap();
    let names = Container::open(&m.join("model.safetensors")).unwrap().names().into_iter();
    let map: serde_json::Map<String, Value> = names.map(|name| (name, json!("a.safetensors"))).collect();
    let index = shards.join("model.safetensors.index.json");
    fs::write(&index, json!({"metadata": {}, "weight_map": map}).to_string()).unwrap();
    let opens = |path: &Path| Container::open(path).is_ok_and(|file| reads_all(&file));
    [
        Reader::new(".dat", dir.join("packed.dat"), "inspect packed.dat --verify", opens),
        Reader::new("safetensors", dir.join("x.safetensors"), "inspect x.safetensors --verify", opens),
        Reader::new("index", index, "inspect shards --verify", |path| Container::open(path.parent().unwrap()).is_ok()),
    ]
}

/// Reads the small files of a model.
const PREVIEW: &str = "data preview two.tsv -m m";

/// The small files of a model.
fn text_readers(dir: &Path, m: &Path) -> [Reader; 5] {
    let tokenizer = dir.join("t/tokenizer.json");
    fs::create_dir(dir.join("t")).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json", "config.json"] {
        fs::copy(m.join(name), tokenizer.with_file_name(name)).unwrap();
    }
    let source: Value = serde_json::from_slice(&fs::read(m.join("tokenizer_config.json")).unwrap()).unwrap();
    let template = dir.join("template").join("chat_template.jinja");
    fs::create_dir(template.parent().unwrap()).unwrap();
    fs::write(&template, source["chat_template"].as_str().unwrap()).unwrap();
    fs::write(template.with_file_name("tokenizer_config.json"), "{}").unwrap();
    for name in ["tokenizer.json", "config.json"] {
        fs::copy(m.join(name), template.with_file_name(name)).unwrap();
    }
    let generation = |path: &Path| GenerationConfig::from_folder(path.parent().unwrap()).is_ok();
    let encodes = |path: &Path| Tokenizer::from_file(path).is_ok_and(|t| t.encode("Hello, 你好!").is_ok());
    [
        Reader::new("config.json", m.join("config.json"), PREVIEW, |path| Qwen3Config::from_file(path).is_ok()),
        Reader::new("generation_config.json", m.join("generation_config.json"), PREVIEW, generation),
        Reader::new("tokenizer.json", tokenizer, "data preview two.tsv -m m --tokenizer t", encodes),
        Reader::new("chat template", template, "data preview two.tsv -m m --tokenizer template", renders),
        Reader::new("tokenizer_config.json", m.join("tokenizer_config.json"), PREVIEW, renders),
    ]
}

const OPTIONS: DataOptions = DataOptions {
    format: None,
    loss_on: LossOn::Assistant,
    max_seq_length: 64,
    overlong: Overlong::Split,
    rows: RowOptions { separator: None, weight: None },
};

/// Training files of every format.
fn row_readers(dir: &Path, text: &TextFiles) -> Vec<Reader> {
    let (user, answer) =
        (json!({"role": "user", "content": "a"}), json!({"role": "assistant", "content": "b", "weight": 1}));
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let turn = |from: &str, value: &str| json!({"from": from, "value": value});
    let turns = [turn("human", "a"), turn("function_call", "{\"name\": \"f\"}"), turn("gpt", "b")];
    let alpaca = json!([{"instruction": "a", "input": "b", "output": "c"}, {"instruction": "d", "output": "e"}]);
    let pair = json!({"prompt": "a", "completion": "b"});
    let lists = json!({"prompt": [user], "completion": [answer]});
    let files = [
        ("messages", "a.jsonl", json!({"messages": [user, answer], "tools": tools}).to_string()),
        ("sharegpt", "b.json", json!([{"conversations": turns}]).to_string()),
        ("alpaca", "c.json", alpaca.to_string()),
        ("completion", "d.jsonl", format!("{pair}\n{lists}")),
        ("documents", "e.jsonl", "{\"text\": \"one two three\"}\n{\"text\": \"四五六\"}\n".into()),
        ("tsv", "f.tsv", "# comment\nprompt\ttarget\na\tb\n你\t好\n".into()),
        ("text", "g.txt", "One line.\n\nTwo lines, 你好.\n".into()),
    ];
    let reader = |(name, file, content): (_, &str, String)| {
        let command = format!("data stats {file} -m m");
        let (file, text) = (dir.join(file), text.clone());
        fs::write(&file, content).unwrap();
        Reader::new(name, file, command, move |path| read::load(&[path.to_owned()], &text, &OPTIONS).is_ok())
    };
    let mut all: Vec<Reader> = files.into_iter().map(reader).collect();
    for name in [
        "messages.parquet",
        "alpaca.parquet",
        "messages.arrow",
        "alpaca.arrow",
        "completion.feather",
        "completion_zstd.feather",
        "completion_lz4.feather",
    ] {
        let (file, text) = (dir.join(name), text.clone());
        fs::copy(golden(&format!("tables/{name}")), &file).unwrap();
        let command = format!("data stats {name} -m m");
        let read = move |path: &Path| read::load(&[path.to_owned()], &text, &OPTIONS).is_ok();
        all.push(Reader::new("table", file, command, read));
    }
    all
}

/// A GGUF file, of which `convert` makes a model.
fn gguf_reader(dir: &Path) -> Reader {
    let (file, out) = (dir.join("x.gguf"), dir.join("gguf"));
    fs::create_dir(&out).unwrap();
    ok(dir, &["convert", "m", "x.gguf", "--dtype", "q8-0"]);
    let read = |path: &Path| {
        let Ok(file) = GgufFile::open(path) else { return false };
        file.small_files().is_ok() && file.names().iter().all(|name| file.read_dense(name).is_ok())
    };
    Reader::new("GGUF", file, "convert x.gguf gguf/x.safetensors --dtype bf16 --overwrite".to_owned(), read)
}

/// A broken token cache is made again.
fn token_cache_reader(dir: &Path, text: TextFiles) -> Reader {
    let (rows, cache) = ([dir.join("rows.tsv")], dir.join("cache"));
    fs::write(&rows[0], "a\tb\nc\td\n").unwrap();
    let expected = token_cache::load(Some(&cache), &rows, &text, &OPTIONS).unwrap().0;
    let kept = fs::read_dir(&cache).unwrap().next().unwrap().unwrap().path();
    let command =
        "fit -m m -d rows.tsv --token-cache cache --max-seq-length 64 --overlong split --dry-run --device cpu -o r";
    Reader::new("token cache", kept, command, move |_| {
        let found = token_cache::load(Some(&cache), &rows, &text, &OPTIONS).unwrap().0;
        assert!(found == expected, "a broken token cache was believed");
        true
    })
}

/// Files of a run.
fn run_readers(dir: &Path) -> [Reader; 2] {
    let settings = dir.join("settings.toml");
    fs::write(&settings, "data = [\"rows.tsv\"]\nlearning_rate = 1e-5\nrecipe = \"w4\"\npacking = true\n").unwrap();
    let folder = dir.join("folder");
    let mut pending = durable::PendingFolder::new(&folder).unwrap();
    pending.copy(&demo_file("config.json"), "config.json").unwrap();
    pending.copy(&dir.join("m/model.safetensors"), "model.safetensors").unwrap();
    pending.commit().unwrap();
    let layered = |path: &Path| Layer::of_file(path).is_ok_and(|layer| layer.over_defaults().is_ok());
    let verifies = |path: &Path| durable::verify(path.parent().unwrap()).is_ok();
    [
        Reader::new("settings", settings, "fit -c settings.toml -m m --dry-run --device cpu -o r", layered),
        Reader::new("manifest.json", folder.join("manifest.json"), "inspect folder --verify", verifies),
    ]
}

/// Files of a checkpoint besides its weights. `export-dat` opens a checkpoint as a resumed run does.
fn checkpoint_readers(dir: &Path) -> [Reader; 2] {
    let fit = "fit -m m -d rows.tsv --device cpu --max-seq-length 32 --max-steps 2 --eval-steps 0 -o r";
    ok(dir, &fit.split(' ').collect::<Vec<_>>());
    let checkpoint = dir.join("r/checkpoint-2");
    let opens = |path: &Path| checkpoint::open(path.parent().unwrap()).is_ok();
    let command = "export-dat --checkpoint r/checkpoint-2 --output-dat exported.dat --device cpu";
    ["optimizer.safetensors", "trainer_state.json"]
        .map(|name| Reader { forged: true, ..Reader::new(name, checkpoint.join(name), command, opens) })
}

/// A fixture of `parity` that takes little time to compare.
fn parity_reader(dir: &Path) -> Reader {
    let file = dir.join("fixture.safetensors");
    let ids = |ids: &[i32]| ids.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>();
    let tensors = [
        ("input_ids", Dtype::I32, vec![1, 4], ids(&[1, 2, 3, 4])),
        ("labels", Dtype::I32, vec![1, 4], ids(&[-100, 2, 3, 4])),
        ("generate.prompt", Dtype::I32, vec![1, 2], ids(&[1, 2])),
        ("generate.ids", Dtype::I32, vec![1, 4], ids(&[1, 2, 3, 4])),
        ("train.data", Dtype::I32, vec![1, 1, 4], ids(&[1, 2, 3, 4])),
        ("loss", Dtype::F32, vec![1], 6.0f32.to_le_bytes().to_vec()),
        ("train.losses", Dtype::F32, vec![1], 6.0f32.to_le_bytes().to_vec()),
    ];
    let views =
        tensors.iter().map(|(name, dtype, shape, data)| (*name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    fs::write(&file, safetensors::serialize(views, None).unwrap()).unwrap();
    let model = dir.join("m");
    let read = move |path: &Path| {
        let job = Parity { model: &model, tokenizer: None, expected: path, dump: None };
        device::run(DeviceChoice::Cpu, None, job).is_ok()
    };
    Reader::new("parity fixture", file, "parity -m m --expected fixture.safetensors --device cpu", read)
}

/// Reads every value of a file of tensors.
fn reads_all(file: &Container) -> bool {
    file.names().iter().all(|name| match file.stored(name) {
        Some(Stored::Packed { .. }) => file.read_packed(name).is_ok(),
        Some(Stored::Dense { shape, .. }) => row_ranges(&shape, 1 << 20).all(|rows| file.read_rows(name, rows).is_ok()),
        None => false,
    })
}

fn renders(path: &Path) -> bool {
    let messages = [json!({"role": "user", "content": "a"}), json!({"role": "assistant", "content": "b"})];
    let options = RenderOptions { add_generation_prompt: true, ..Default::default() };
    ChatTemplate::source(path.parent().unwrap())
        .and_then(ChatTemplate::new)
        .is_ok_and(|template| template.render(&messages, options).is_ok())
}
