//! Files that are broken at random. Every reader gets its own valid file with one to three changes (a flipped bit, a missing
//! range, a huge number, ten thousand brackets …) and must answer with an error or with what the file says, but never with a
//! panic. A change that made a reader panic can be repeated: the message names reader and seed.
//!
//! CI makes some hundred files. A minute for each reader is
//!
//!     cargo test --workspace --test promises -- --ignored a_minute_for_each_reader

use crate::support::{
    Random,
    files::{demo_file, ok, tiny_model},
};
use model_qwen3::{
    chat_template::{ChatTemplate, RenderOptions},
    config::Qwen3Config,
    container::Container,
    tensors::{Stored, Tensors, row_ranges},
    tokenizer::{GenerationConfig, Tokenizer},
};
use serde_json::json;
use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use train_cli::{
    data::{
        read::{self, DataOptions},
        token_cache,
    },
    durable,
    model_files::TextFiles,
    settings::{Layer, LossOn, Overlong},
};

/// A reader, the file that is broken for it, and how it reads. What it returns says whether the file was accepted.
struct Reader {
    name: &'static str,
    file: PathBuf,
    read: Box<dyn Fn(&Path) -> bool>,
}

#[test]
fn broken_files_make_no_reader_panic() {
    let dir = tempfile::tempdir().unwrap();
    let (mut accepted, mut refused) = (0, 0);
    for reader in readers(dir.path()) {
        let valid = fs::read(&reader.file).unwrap();
        assert!((reader.read)(&reader.file), "{}: the valid file is refused", reader.name);
        for seed in 0..40 {
            let taken = read_broken(&reader, &valid, seed);
            accepted += usize::from(taken);
            refused += usize::from(!taken);
        }
        // Every beginning of a file, or some of a large one.
        for cut in (0..valid.len()).step_by(valid.len().div_ceil(100)) {
            read_bytes(&reader, &valid[..cut], &format!("the first {cut} bytes"));
        }
        fs::write(&reader.file, &valid).unwrap();
    }
    assert!(accepted > 20 && refused > 200, "{accepted} broken files were accepted and {refused} refused");
}

#[test]
#[ignore = "it takes a quarter of an hour; broken_files_make_no_reader_panic makes some hundred files"]
fn a_minute_for_each_reader() {
    let dir = tempfile::tempdir().unwrap();
    for reader in readers(dir.path()) {
        let valid = fs::read(&reader.file).unwrap();
        let (started, mut slowest) = (Instant::now(), Duration::ZERO);
        let mut seed = 1000;
        while started.elapsed() < Duration::from_secs(60) {
            let one = Instant::now();
            read_broken(&reader, &valid, seed);
            slowest = slowest.max(one.elapsed());
            seed += 1;
        }
        fs::write(&reader.file, &valid).unwrap();
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
    fs::write(&reader.file, bytes).unwrap();
    let read = catch_unwind(AssertUnwindSafe(|| (reader.read)(&reader.file)));
    read.unwrap_or_else(|_| panic!("{} panicked on {what}", reader.name))
}

/// Breaks a file in one of some ways.
fn change(bytes: &mut Vec<u8>, random: &mut Random) {
    let at = random.below(bytes.len().max(1));
    let end = (at + 1 + random.below(64)).min(bytes.len());
    let range = at.min(bytes.len())..end.max(at.min(bytes.len()));
    match random.below(14) {
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
    ok(dir, &["convert", "m", "packed.dat", "--to", "dat", "--dtype", "nvfp4"]);
    let text = {
        let config = Qwen3Config::from_file(&m.join("config.json")).unwrap();
        TextFiles::open(&m, &config).unwrap()
    };
    let mut all: Vec<Reader> = Vec::new();
    let mut add = |name, file: PathBuf, read: Box<dyn Fn(&Path) -> bool>| all.push(Reader { name, file, read });

    fs::copy(m.join("model.safetensors"), dir.join("x.safetensors")).unwrap();
    for (name, file) in [(".dat", "packed.dat"), ("safetensors", "x.safetensors")] {
        add(name, dir.join(file), Box::new(|path| Container::open(path).is_ok_and(|file| reads_all(&file))));
    }
    let index = dir.join("shards");
    fs::create_dir(&index).unwrap();
    fs::copy(m.join("model.safetensors"), index.join("a.safetensors")).unwrap();
    let names = Container::open(&m.join("model.safetensors")).unwrap().names();
    let map: serde_json::Map<String, serde_json::Value> =
        names.into_iter().map(|name| (name, json!("a.safetensors"))).collect();
    let index = index.join("model.safetensors.index.json");
    fs::write(&index, json!({"metadata": {}, "weight_map": map}).to_string()).unwrap();
    add("index", index, Box::new(|path| Container::open(path.parent().unwrap()).is_ok()));

    add("config.json", m.join("config.json"), Box::new(|path| Qwen3Config::from_file(path).is_ok()));
    let generation = m.join("generation_config.json");
    add(
        "generation_config.json",
        generation,
        Box::new(|path| GenerationConfig::from_folder(path.parent().unwrap()).is_ok()),
    );
    let tokenizer = dir.join("tokenizer.json");
    fs::copy(m.join("tokenizer.json"), &tokenizer).unwrap();
    let encodes = |path: &Path| Tokenizer::from_file(path).is_ok_and(|t| t.encode("Hello, 你好!").is_ok());
    add("tokenizer.json", tokenizer, Box::new(encodes));
    let template = dir.join("template");
    fs::create_dir(&template).unwrap();
    let source: serde_json::Value =
        serde_json::from_slice(&fs::read(m.join("tokenizer_config.json")).unwrap()).unwrap();
    let template = template.join("chat_template.jinja");
    fs::write(&template, source["chat_template"].as_str().unwrap()).unwrap();
    fs::write(template.with_file_name("tokenizer_config.json"), "{}").unwrap();
    add("chat template", template, Box::new(renders));
    let config = m.join("tokenizer_config.json");
    add("tokenizer_config.json", config, Box::new(renders));

    let rows = [
        (
            "messages",
            "a.jsonl",
            r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 1}], "tools": [{"type": "function", "function": {"name": "f"}}]}"#,
        ),
        (
            "sharegpt",
            "b.json",
            r#"[{"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "{\"name\": \"f\"}"}, {"from": "gpt", "value": "b"}]}]"#,
        ),
        (
            "alpaca",
            "c.json",
            r#"[{"instruction": "a", "input": "b", "output": "c"}, {"instruction": "d", "output": "e"}]"#,
        ),
        (
            "completion",
            "d.jsonl",
            "{\"prompt\": \"a\", \"completion\": \"b\"}\n{\"prompt\": [{\"role\": \"user\", \"content\": \"a\"}], \"completion\": [{\"role\": \"assistant\", \"content\": \"b\"}]}",
        ),
        ("documents", "e.jsonl", "{\"text\": \"one two three\"}\n{\"text\": \"四五六\"}\n"),
        ("tsv", "f.tsv", "# comment\nprompt\ttarget\na\tb\n你\t好\n"),
        ("text", "g.txt", "One line.\n\nTwo lines, 你好.\n"),
    ];
    let options =
        DataOptions { format: None, loss_on: LossOn::Assistant, max_seq_length: 64, overlong: Overlong::Split };
    for (name, file, content) in rows {
        let (file, text) = (dir.join(file), text.clone());
        fs::write(&file, content).unwrap();
        add(name, file, Box::new(move |path| read::load(&[path.to_owned()], &text, options).is_ok()));
    }
    // A broken cache is made again.
    let (tsv, cache) = (dir.join("rows.tsv"), dir.join("cache"));
    fs::write(&tsv, "a\tb\nc\td\n").unwrap();
    token_cache::load(Some(&cache), &[tsv.clone()], &text, options).unwrap();
    let kept = fs::read_dir(&cache).unwrap().next().unwrap().unwrap().path();
    let expected = read::load(&[tsv.clone()], &text, options).unwrap().0;
    let same = move |_: &Path| {
        let found = token_cache::load(Some(&cache), &[tsv.clone()], &text, options).unwrap().0;
        assert!(found == expected, "a broken token cache was believed");
        true
    };
    add("token cache", kept, Box::new(same));

    let settings = dir.join("settings.toml");
    fs::write(&settings, "data = [\"rows.tsv\"]\nlearning_rate = 1e-5\nrecipe = \"w4\"\npacking = true\n").unwrap();
    add("settings", settings, Box::new(|path| Layer::of_file(path).is_ok_and(|layer| layer.over_defaults().is_ok())));
    let folder = dir.join("folder");
    let mut pending = durable::PendingFolder::new(&folder).unwrap();
    pending.copy(&demo_file("config.json"), "config.json").unwrap();
    pending.commit().unwrap();
    add(
        "manifest.json",
        folder.join("manifest.json"),
        Box::new(|path| durable::verify(path.parent().unwrap()).is_ok()),
    );
    all
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
    ChatTemplate::from_folder(path.parent().unwrap()).is_ok_and(|template| template.render(&messages, options).is_ok())
}
