//! A broken file gives an error that names the entry and the offset. It causes no panic, and its memory has a bound
//! that grows with the file.

use crate::support::{
    Random,
    files::{Cost, cost, forge, ok, refused, run, tiny_model},
};
use arrow_ipc::{
    Field, KeyValue, KeyValueArgs, Message, MessageArgs, MessageHeader, MetadataVersion, Schema, SchemaArgs,
};
use flatbuffers::{FlatBufferBuilder, WIPOffset};
use model_qwen3::{
    ModelError,
    container::Container,
    dat::{DatFile, DatWriter, ElementType},
    tensors::Tensors,
};
use parquet::{
    basic::{Compression, ZstdLevel},
    data_type::{ByteArray, ByteArrayType},
    file::{properties::WriterProperties, writer::SerializedFileWriter},
    schema::parser::parse_message_type,
};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// A small NVFP4 file with every kind of entry.
fn small_dat() -> Vec<u8> {
    let mut w = DatWriter::new(Vec::new(), 4).unwrap();
    let mut put = |key: &str, element, dims: &[usize], byte: u8| {
        w.entry(key, element, dims).unwrap();
        let len = dims.iter().product::<usize>() * element.size();
        w.payload(&vec![byte; len]).unwrap();
    };
    put("model.norm.weight", ElementType::F16, &[16], 0x3C);
    put("lm_head.weight.qdata", ElementType::U8, &[2, 8], 0x21);
    put("lm_head.weight.scale", ElementType::F8E4m3, &[2, 1], 0x38);
    put("lm_head.weight.scale_2", ElementType::F32, &[1], 0x3C);
    w.finish()
}

fn open(dir: &Path, bytes: &[u8]) -> Result<Container, ModelError> {
    let path: PathBuf = dir.join("x.dat");
    std::fs::write(&path, bytes).unwrap();
    Container::open(&path)
}

fn error(dir: &Path, bytes: &[u8]) -> String {
    open(dir, bytes).map(|_| ()).expect_err("a broken file was accepted").to_string()
}

#[test]
fn a_file_that_is_cut_at_any_byte_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let whole = small_dat();
    open(dir.path(), &whole).unwrap();
    for cut in 0..whole.len() {
        let text = error(dir.path(), &whole[..cut]);
        assert!(
            text.contains("at byte") && (text.contains("entry") || text.contains("header")),
            "cut at {cut}: {text}"
        );
    }
    let mut longer = whole;
    longer.push(0);
    assert!(error(dir.path(), &longer).contains("the file goes on after the last of 4 entries"));
}

/// A file of one entry: a count, a key, and the bytes of the header after the key.
fn entry(count: &[u8], key: &[u8], rest: &[u8]) -> Vec<u8> {
    [count, &[key.len() as u8], key, rest].concat()
}

#[test]
fn a_header_with_wrong_numbers_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let long = [0x80u8; 12];
    let huge = [0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x01];
    let too_big = [0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x02];
    let at = |rest: &[u8]| entry(&[1], b"k", rest);
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("more than 64 bits", long.to_vec()),
        ("more than 64 bits", too_big.to_vec()),
        ("zero last byte", vec![0x81, 0x00]),
        ("more than 64 bits", [&[1u8][..], &long].concat()),
        ("more than 64 bits", at(&long)),
        ("more than 64 bits", at(&[&[6u8][..], &long].concat())),
        ("more than 64 bits", at(&[&[6u8, 1][..], &long].concat())),
        ("entries declared", huge.to_vec()),
        ("key of", [&[1u8][..], &huge].concat()),
        ("key of 0 bytes", vec![1, 0, 6, 1, 1]),
        ("not UTF-8", entry(&[1], &[0xFF, 0xFE], &[6, 1, 1])),
        ("control characters", entry(&[1], b"a\0b", &[6, 1, 1])),
        ("rank", at(&[6, 9])),
        ("rank", at(&[&[6u8][..], &huge].concat())),
        ("bytes left in file", at(&[&[6u8, 1][..], &huge].concat())),
        ("bytes left in file", at(&[&[6u8, 2][..], &huge, &huge].concat())),
        ("bytes left in file", at(&[0, 1, 5, 1, 2, 3])),
        ("holds nothing", at(&[6, 1, 0])),
    ];
    for (expected, bytes) in cases {
        let text = error(dir.path(), &bytes);
        assert!(text.contains(expected), "{bytes:?}: {text}");
    }
    let known = [0u64, 1, 2, 3, 4, 5, 6, 7, 11, 15, 100, 101];
    for id in 0..=255u64 {
        let mut bytes = entry(&[1], b"k", &[]);
        bytes.extend(if id < 128 { vec![id as u8] } else { vec![id as u8 & 0x7F | 0x80, (id >> 7) as u8] });
        bytes.extend([1, 1]);
        bytes.extend([0; 8]);
        let path = dir.path().join("t.dat");
        std::fs::write(&path, &bytes).unwrap();
        let text = DatFile::open(&path).map(|_| ()).map_err(|e| e.to_string());
        let refused = matches!(&text, Err(t) if t.contains(&format!("unknown type id {id}")));
        assert_eq!(refused, !known.contains(&id), "type id {id}: {text:?}");
    }
}

#[test]
fn a_huge_sparse_file_is_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("sparse.dat");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(1 << 40).unwrap();
    // A first byte of zero declares no entries; a terabyte follows.
    assert!(DatFile::open(&path).unwrap_err().to_string().contains("goes on after the last of 0 entries"));
}

#[test]
fn codes_and_scales_that_do_not_fit_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = |entries: &[(&str, ElementType, &[usize])]| {
        let mut w = DatWriter::new(Vec::new(), entries.len()).unwrap();
        for (key, element, dims) in entries {
            w.entry(key, *element, dims).unwrap();
            w.payload(&vec![0x38; dims.iter().product::<usize>() * element.size()]).unwrap();
        }
        w.finish()
    };
    use ElementType::{F8E4m3, F16, F32, I64, U8};
    let q = ("x.weight.qdata", U8, &[2usize, 8][..]);
    let s = ("x.weight.scale", F8E4m3, &[2usize, 1][..]);
    for (expected, bytes) in [
        ("has no \"x.weight.scale\"", file(&[q])),
        ("has no \"x.weight.qdata\"", file(&[s])),
        ("has no \"x.weight.qdata\"", file(&[("x.weight.scale_2", F32, &[1])])),
        ("same key", file(&[q, s, q])),
        ("not bytes", file(&[("x.weight.qdata", F16, &[2, 8]), s])),
        ("holds no tensors", file(&[])),
        ("not E4M3", file(&[q, ("x.weight.scale", F16, &[2, 1])])),
        ("are needed", file(&[q, ("x.weight.scale", F8E4m3, &[2, 2])])),
        ("are needed", file(&[("x.weight.qdata", U8, &[2, 9]), s])),
        ("one f32", file(&[q, s, ("x.weight.scale_2", F16, &[1])])),
        ("stored twice", file(&[q, s, ("x.weight", F16, &[2, 16])])),
        ("weights are f16", file(&[("x.weight", I64, &[2])])),
    ] {
        let text = error(dir.path(), &bytes);
        assert!(text.contains(expected), "{expected}: {text}");
    }
    // The origin also spells keys without `.weight`.
    let c = open(dir.path(), &file(&[("x.qdata", U8, &[2, 8]), ("x.scale", F8E4m3, &[2, 1])])).unwrap();
    assert_eq!(c.names(), ["x.weight"]);
}

#[test]
fn every_flipped_bit_is_an_error_or_another_value_but_never_a_panic() {
    let dir = tempfile::tempdir().unwrap();
    let whole = small_dat();
    for bit in 0..whole.len() * 8 {
        let mut bytes = whole.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        if let Ok(checkpoint) = open(dir.path(), &bytes) {
            for name in checkpoint.names() {
                let _ = checkpoint.read_dense(&name);
                let _ = checkpoint.read_packed(&name);
            }
        }
    }
}

#[test]
fn bad_scales_and_values_are_refused_by_the_program() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("m");
    tiny_model(&folder, true);
    ok(&folder, &["convert", "model.safetensors", "m.dat", "--to", "dat", "--dtype", "nvfp4"]);
    std::fs::remove_file(folder.join("model.safetensors")).unwrap();
    let path = folder.join("m.dat");
    let good = std::fs::read(&path).unwrap();
    let dat = DatFile::open(&path).unwrap();
    let offset = |suffix: &str| dat.entries().iter().find(|e| e.key.ends_with(suffix)).unwrap().offset as usize;
    let generate = ["generate", "-m", "m.dat", "-p", "hi", "--device", "cpu", "--max-tokens", "1"];
    ok(&folder, &generate);
    let export = ["export-hf", "-m", "m.dat", "-o", "out", "--format", "compressed-tensors", "--device", "cpu"];
    let readers = [
        &generate[..],
        &["inspect", "m.dat", "--verify"],
        &["convert", "m.dat", "x.safetensors", "--dtype", "bf16"],
        &["convert", "m.dat", "x.safetensors", "--dtype", "nvfp4"],
        &export,
    ];
    for (what, at, bytes) in [
        ("scale byte 0x7f", offset("q_proj.weight.scale"), &[0x7F][..]),
        ("scale byte 0xff", offset("q_proj.weight.scale"), &[0xFF][..]),
        ("scale byte 0xb8", offset("q_proj.weight.scale"), &[0xB8][..]),
        ("tensor scale NaN", offset("q_proj.weight.scale_2"), &[0, 0, 0xC0, 0x7F][..]),
        ("tensor scale -1", offset("q_proj.weight.scale_2"), &[0, 0, 0x80, 0xBF][..]),
        ("NaN at value 0", offset("model.norm.weight"), &[0, 0x7E][..]),
    ] {
        let mut bad = good.clone();
        bad[at..at + bytes.len()].copy_from_slice(bytes);
        std::fs::write(&path, bad).unwrap();
        for args in readers {
            let text = refused(&folder, args, 6);
            assert!(text.contains(what) && text.contains(".weight"), "{what}, {args:?}: {text}");
        }
        assert!(!folder.join("x.safetensors").exists() && !folder.join("out").exists(), "{what}");
    }
}

#[test]
fn a_broken_safetensors_index_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("m");
    tiny_model(&folder, true);
    let index = folder.join("model.safetensors.index.json");
    let names = Container::open(&folder).unwrap().names();
    let map = |shard: &str| -> serde_json::Value {
        let map: serde_json::Map<_, _> = names.iter().map(|n| (n.clone(), shard.into())).collect();
        serde_json::json!({"weight_map": map})
    };
    std::fs::write(&index, map("model.safetensors").to_string()).unwrap();
    Container::open(&folder).unwrap();
    for (expected, text) in [
        ("not a plain file name", map("../m/model.safetensors").to_string()),
        ("not a plain file name", map("/etc/passwd").to_string()),
        ("no such file", map("missing.safetensors").to_string()),
        ("does not place there", serde_json::json!({"weight_map": {"a": "model.safetensors"}}).to_string()),
        ("EOF", "{".into()),
    ] {
        std::fs::write(&index, text).unwrap();
        let error = Container::open(&folder).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn shards_together_are_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, sharded) = (dir.path().join("m"), dir.path().join("s"));
    tiny_model(&whole, false);
    std::fs::create_dir(&sharded).unwrap();
    let source = Container::open(&whole).unwrap();
    let mut map = serde_json::Map::new();
    for (shard, part) in ["a.safetensors", "b.safetensors"].iter().zip([0, 1]) {
        let names: Vec<String> =
            source.names().into_iter().enumerate().filter(|(i, _)| i % 2 == part).map(|x| x.1).collect();
        let mut out = model_qwen3::safetensors::header(
            &names
                .iter()
                .map(|n| (n.clone(), safetensors::Dtype::F32, source.stored(n).unwrap().shape()))
                .collect::<Vec<_>>(),
        );
        for name in &names {
            out.extend(source.read_dense(name).unwrap().iter().flat_map(|v| v.to_le_bytes()));
            map.insert(name.clone(), (*shard).into());
        }
        std::fs::write(sharded.join(shard), out).unwrap();
    }
    let index = serde_json::json!({"weight_map": map});
    std::fs::write(sharded.join("model.safetensors.index.json"), index.to_string()).unwrap();
    let read = Container::open(&sharded).unwrap();
    assert_eq!(read.names().len(), source.names().len());
    for name in source.names() {
        assert_eq!(read.read_dense(&name).unwrap(), source.read_dense(&name).unwrap(), "{name}");
    }
}

/// Another dimension may be any number, because no bytes stand for it: a loop over rows would not end, and a product overflow.
#[test]
fn huge_shapes_of_nothing_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let many = 1u64 << 62;
    let one = |name: &str, dtype: &str, shape: [u64; 2]| {
        format!("{name:?}:{{\"dtype\":{dtype:?},\"shape\":{shape:?},\"data_offsets\":[0,0]}}")
    };
    let packed = format!("{},{}", one("x.qdata", "U8", [0, 1 << 63]), one("x.scale", "F8_E4M3", [0, 1 << 60]));
    for header in [one("a", "F16", [many, 0]), one("a", "F16", [0, many]), packed] {
        let header = format!("{{{header}}}");
        let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
        std::fs::write(dir.path().join("x.safetensors"), file).unwrap();
        let convert = ["convert", "x.safetensors", "o.dat", "--dtype", "bf16"];
        for words in [&["inspect", "x.safetensors", "--verify"][..], &convert] {
            let output = run(dir.path(), words);
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.code() == Some(6) && said.contains("more rows or columns"), "{words:?}: {said}");
        }
    }
}

/// A damaged safetensors file ends a command with the exit code of a damaged .dat file, and the message says what it may be.
#[test]
fn a_damaged_safetensors_file_is_called_so() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let good = std::fs::read(d.join("m/model.safetensors")).unwrap();
    let (mut huge, mut garbled) = (good.clone(), good.clone());
    huge[7] = 1;
    garbled[8] = 0xFF;
    let (cut, short) = (good[..good.len() - 1].to_vec(), good[..4].to_vec());
    let no_json = [&2u64.to_le_bytes()[..], b"{]"].concat();
    for bytes in [huge, garbled, cut, short, no_json] {
        std::fs::write(d.join("m/model.safetensors"), bytes).unwrap();
        for words in [&["inspect", "m"][..], &["generate", "-m", "m", "-p", "a", "--device", "cpu"]] {
            let output = run(d, words);
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            let expected = said.contains("model.safetensors: ") && said.contains("; the file is damaged, cut off or");
            assert!(output.status.code() == Some(6) && expected, "{words:?}: {said}");
        }
    }
}

/// Files of every kind that has values or tables, which can be read.
#[cfg(target_os = "linux")]
fn files_with_values(d: &Path) {
    for folder in ["m", "t", "shards", "ids"] {
        tiny_model(&d.join(folder), true);
    }
    std::fs::create_dir(d.join("g")).unwrap();
    std::fs::write(d.join("two.tsv"), "a\tb\nc\td\n").unwrap();
    std::fs::write(d.join("recipe.toml"), "[[rows]]\npairs = [['a', 'b']]\n").unwrap();
    std::fs::write(d.join("p.jsonl"), "{\"prompt\": \"a\"}\n").unwrap();
    std::fs::write(d.join("rows.jsonl"), "{\"prompt\": \"a\", \"completion\": \"b\"}\n").unwrap();
    std::fs::write(d.join("chat.jsonl"), "{\"role\": \"user\", \"content\": \"a\"}\n").unwrap();
    std::fs::write(d.join("chat.txt"), "# train-cli transcript\nuser:\n> a\n").unwrap();
    std::fs::write(d.join("rows.json"), "[{\"prompt\": \"a\", \"completion\": \"b\"}]\n").unwrap();
    std::fs::copy(d.join("m/model.safetensors"), d.join("x.safetensors")).unwrap();
    ok(d, &["convert", "m", "x.gguf", "--dtype", "q8-0"]);
    let names = Container::open(&d.join("m")).unwrap().names().into_iter();
    let map: serde_json::Map<_, _> = names.map(|n| (n, "model.safetensors".into())).collect();
    let index = d.join("shards/model.safetensors.index.json");
    std::fs::write(&index, serde_json::json!({"weight_map": map}).to_string()).unwrap();
    let fit = "fit -m m -d two.tsv --device cpu --max-seq-length 32 --max-steps 1 --eval-steps 0 -o r";
    ok(d, &fit.split(' ').collect::<Vec<_>>());
}

/// A file with very many values, by the name of one that can be read; a command that reads it, and a part of what it says.
#[cfg(target_os = "linux")]
type ManyValues = (&'static str, Vec<u8>, &'static str, &'static str);

/// A value of a text may have two bytes there, and two hundred in memory.
#[cfg(target_os = "linux")]
fn with_many_values(d: &Path) -> Vec<ManyValues> {
    let lists = format!("{{\"prompt\": [{}[0]]}}", "[0],".repeat(1 << 20));
    let objects = format!("{{\"prompt\": [{}{{}}]}}", "{\"a\":0},".repeat(1 << 19));
    // Values of each line that are not too many, and are too many together.
    let lines = |line: &str, end: &str| {
        let inner = if end.is_empty() { "" } else { "}" };
        format!("{{{line}, \"x\": [{}[0]]{inner}{end}}}\n", "[0],".repeat(50_000)).repeat(20)
    };
    let toml =
        format!("{}x = [{}[0]]\n", std::fs::read_to_string(d.join("recipe.toml")).unwrap(), "[0],".repeat(1 << 20));
    let header = |json: &str| [&(json.len() as u64).to_le_bytes()[..], json.as_bytes()].concat();
    // A list of four million texts of one character, and a million keys.
    let key =
        |name: &str, kind: u32| [&(name.len() as u64).to_le_bytes()[..], name.as_bytes(), &kind.to_le_bytes()].concat();
    let gguf =
        |keys: u64, rest: Vec<u8>| [b"GGUF\x03\0\0\0\0\0\0\0\0\0\0\0".as_slice(), &keys.to_le_bytes(), &rest].concat();
    let texts = [
        key("a", 9),
        8u32.to_le_bytes().to_vec(),
        (4u64 << 20).to_le_bytes().to_vec(),
        [1, 0, 0, 0, 0, 0, 0, 0, b'a'].repeat(4 << 20),
    ]
    .concat();
    let keys: Vec<u8> = (0..1 << 20).flat_map(|n| [key(&format!("{n:x}"), 0), vec![0]].concat()).collect();
    // As many merges more.
    let mut merges = std::fs::read(d.join("x.gguf")).unwrap();
    let name = b"tokenizer.ggml.merges";
    let count = merges.windows(name.len()).position(|window| window == name).unwrap() + name.len() + 8;
    let first = count + 8;
    let more = u64::from_le_bytes(merges[count..first].try_into().unwrap()) + 200_000;
    merges[count..first].copy_from_slice(&more.to_le_bytes());
    merges.splice(first..first, [&[3, 0, 0, 0, 0, 0, 0, 0][..], b"a b"].concat().repeat(200_000));
    let tokens = std::fs::read_to_string(d.join("ids/tokenizer.json")).unwrap();
    // A field that no model has.
    let modelled =
        tokens.replacen("\"type\": \"BPE\"", &format!("\"type\": \"BPE\", \"x\": [{}[0]]", "[0],".repeat(1 << 20)), 1);
    // One token whose id leaves room for sixteen million others.
    let ids = tokens.replacen("\"id\": 509", "\"id\": 16000000", 1);
    let many = "more values than are read";
    let convert = "convert x.gguf g/x.safetensors --dtype bf16 --overwrite";
    let generate = "generate -m m --device cpu --max-tokens 1 --prompts p.jsonl";
    // The arguments of a call may have values of every kind.
    let call = r#""messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": {"y": 0"#;
    let chat = "chat -m m --device cpu --max-tokens 1 --script chat.jsonl";
    let chat_of_text = "chat -m m --device cpu --max-tokens 1 --script chat.txt";
    let transcript = format!("# train-cli transcript\n{}", "user:\n>\n".repeat(4 << 20));
    let export = "export-dat --checkpoint r/checkpoint-1 --output-dat o.dat";
    vec![
        ("x.safetensors", header(&lists), "inspect x.safetensors", many),
        ("shards/model.safetensors.index.json", lists.clone().into(), "inspect shards", many),
        ("t/tokenizer_config.json", objects.clone().into(), "data preview two.tsv -m t", many),
        ("t/tokenizer.json", modelled.into(), "data preview two.tsv -m m --tokenizer t", "unknown field `x`"),
        ("t/config.json", lists.replace("prompt", "rope_scaling").into(), "data preview two.tsv -m t", "are read"),
        ("rows.jsonl", lists.clone().into(), "data stats rows.jsonl -m m", many),
        ("rows.jsonl", objects.into(), "data stats rows.jsonl -m m", many),
        ("rows.json", format!("[{lists}]").into(), "data stats rows.json -m m", many),
        ("recipe.toml", toml.into(), "data make recipe.toml -o made.tsv --overwrite", "MiB of memory"),
        ("p.jsonl", lists.clone().into(), generate, many),
        ("p.jsonl", (lines(call, "}}]}]") + "{\"prompt\": 1}\n").into(), generate, "a row needs"),
        ("chat.jsonl", lines("\"role\": \"user\", \"content\": \"a\"", "").into(), chat, many),
        ("chat.txt", transcript.into(), chat_of_text, "at most 50000 messages"),
        ("x.gguf", gguf(1, texts), convert, "values of a list are declared"),
        ("x.gguf", merges, convert, "more than 196608 tokens or merges"),
        ("x.gguf", gguf(1 << 20, keys), convert, "keys are declared"),
        ("ids/tokenizer.json", ids.into(), "convert ids ids.gguf --dtype q8-0 --overwrite", "has an id over"),
        ("r/checkpoint-1/trainer_state.json", lists.into(), export, many),
    ]
}

/// Each file has a reader of its own.
#[test]
#[cfg(target_os = "linux")]
fn values_without_number_take_no_memory_without_bound() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    files_with_values(d);
    for (file, bytes, command, expected) in with_many_values(d) {
        let words: Vec<&str> = command.split(' ').collect();
        let (usual, good) = (cost(d, &words).memory, std::fs::read(d.join(file)).unwrap());
        std::fs::write(d.join(file), &bytes).unwrap();
        if file.starts_with("r/") {
            forge(&d.join("r/checkpoint-1"), "trainer_state.json");
        }
        let output = run(d, &words);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code().is_some_and(|code| (2..8).contains(&code)), "{file}: {}: {said}", output.status);
        assert!(said.contains(expected), "{file}: {said}");
        let Cost { seconds, memory, .. } = cost(d, &words);
        let case = format!("{file}: {seconds} s, {} MiB; {} MiB for a good file", memory >> 20, usual >> 20);
        eprintln!("{case}");
        assert!(seconds <= 2.0 && memory <= usual + (64 << 20) + 2 * bytes.len() as u64, "{case}");
        std::fs::write(d.join(file), good).unwrap();
    }
}

/// The tokens of a tokenizer are counted before it is read, because a short one takes much more memory than its text. As many
/// short tokens as are read stay within the memory that a hostile file may take.
#[test]
#[cfg(target_os = "linux")]
fn a_tokenizer_with_too_many_tokens_or_merges_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    std::fs::create_dir(d.join("t")).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(d.join("m").join(name), d.join("t").join(name)).unwrap();
    }
    let config = std::fs::read_to_string(d.join("m/config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    config["vocab_size"] = (1 << 18).into();
    std::fs::write(d.join("t/config.json"), config.to_string()).unwrap();
    let args = ["data", "preview", "m/demo.tsv", "-m", "t"];
    let usual = cost(d, &args).memory;
    let good = std::fs::read_to_string(d.join("t/tokenizer.json")).unwrap();
    let write = |key: &str, entries: &str| {
        let many = good.replacen(key, &format!("{key}{entries}"), 1);
        assert!(many.len() > good.len(), "the file has no {key}");
        std::fs::write(d.join("t/tokenizer.json"), &many).unwrap();
        many.len() as u64
    };
    let tokens = |count: usize| -> String { (0..count).map(|n| format!("\"~{n:x}\": {},", 600 + n)).collect() };
    let merges = "[\"a\", \"b\"],".repeat(200_000);
    let added = "{\"id\": 0},".repeat(20_000);
    for (key, entries, expected) in [
        ("\"vocab\": {", tokens(200_000), "there are more than 196608 tokens or merges"),
        ("\"merges\": [", merges, "there are more than 196608 tokens or merges"),
        ("\"added_tokens\": [", added, "there are more than 16384 added tokens"),
    ] {
        write(key, &entries);
        let said = refused(d, &args, 2);
        assert!(said.contains("t/tokenizer.json") && said.contains(expected), "{said}");
    }
    let size = write("\"vocab\": {", &tokens(196_000));
    let Cost { status, memory, .. } = cost(d, &args);
    assert!(status.success() && memory <= usual + (64 << 20) + 2 * size, "{status}, {memory} bytes, usually {usual}");
}

/// The description of an Arrow table of one megabyte that stands for a gigabyte: a thousand keys have the same value.
#[test]
#[cfg(target_os = "linux")]
fn an_arrow_table_whose_description_shares_its_bytes_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let mut parts = FlatBufferBuilder::new();
    let value = parts.create_string(&"x".repeat(1 << 20));
    let mut pair = |n: usize| {
        let key = Some(parts.create_string(&n.to_string()));
        KeyValue::create(&mut parts, &KeyValueArgs { key, value: Some(value) })
    };
    let pairs: Vec<_> = (0..1000).map(&mut pair).collect();
    let custom_metadata = Some(parts.create_vector(&pairs));
    let fields = Some(parts.create_vector::<WIPOffset<Field<'_>>>(&[]));
    let schema = Schema::create(&mut parts, &SchemaArgs { fields, custom_metadata, ..SchemaArgs::default() });
    let (version, header_type) = (MetadataVersion::V5, MessageHeader::Schema);
    let header = Some(schema.as_union_value());
    let message = MessageArgs { version, header_type, header, ..MessageArgs::default() };
    let message = Message::create(&mut parts, &message);
    parts.finish(message, None);
    let (mark, described) = ([0xff; 4], parts.finished_data());
    let size = (described.len() as u32).to_le_bytes();
    let file = [&mark[..], &size, described, &mark, &[0; 4]].concat();
    std::fs::write(d.join("x.arrow"), &file).unwrap();
    let args = ["data", "stats", "-m", "m", "x.arrow"];
    let said = refused(d, &args, 3);
    assert!(said.contains("x.arrow") && said.contains("parts that share their bytes"), "{said}");
    let (used, usual) = (cost(d, &args).memory, cost(d, &["data", "stats", "-m", "m", "m/demo.tsv"]).memory);
    assert!(used <= usual + (64 << 20) + 2 * file.len() as u64, "{used} bytes, usually {usual}");
}

/// Words that a tokenizer finds by an expression which may be tried in too many ways take seconds, not hours.
#[test]
fn an_expression_for_words_has_a_limit_of_time() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let path = d.join("m/tokenizer.json");
    let mut tokenizer: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let words = &mut tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"];
    assert!(words.is_string(), "{words}");
    // From each place to the end of the text and back.
    *words = r"a(?=a*c)|\w".into();
    std::fs::write(&path, tokenizer.to_string()).unwrap();
    std::fs::write(d.join("short.txt"), "aaaaaaaaaa b").unwrap();
    ok(d, &["data", "stats", "short.txt", "-m", "m"]);
    std::fs::write(d.join("long.txt"), "a".repeat(100_000)).unwrap();
    let said = refused(d, &["data", "stats", "long.txt", "-m", "m"], 3);
    assert!(said.contains("a text of 100000 bytes: it took more than 2 seconds"), "{said}");
}

/// What the metadata of a Parquet file say of its rows, in Thrift's compact protocol.
#[test]
fn hostile_metadata_of_parquet_are_refused() {
    fn number(n: u64) -> Vec<u8> {
        let byte = n as u8 & 127;
        if n < 128 { vec![byte] } else { [vec![byte | 128], number(n >> 7)].concat() }
    }
    fn list(items: &[Vec<u8>]) -> Vec<u8> {
        [vec![0x19, 0xfc], number(items.len() as u64), items.concat()].concat()
    }
    let i64_of = |n: u64| [vec![0x16], number(2 * n)].concat();
    let root = b"\x48\x01s\x15\x02\x00".to_vec();
    let leaf = b"\x15\x0c\x25\x00\x18\x04text\x25\x00\x00".to_vec();
    // One column of so many values and bytes.
    let groups = |values: u64, bytes: u64| {
        // Compressed by gzip, from byte 4 of the file on.
        let start = b"\x26\x08\x1c\x15\x0c\x19\x15\x00\x19\x18\x04text\x15\x04".to_vec();
        let chunk = [start, i64_of(values), i64_of(bytes), i64_of(100), b"\x26\x08\x00\x00".to_vec()].concat();
        vec![[list(&[chunk]), i64_of(bytes), i64_of(1), vec![0]].concat()]
    };
    let dir = tempfile::tempdir().unwrap();
    tiny_model(&dir.path().join("m"), true);
    // Groups in groups: the library would need a stack of so many levels.
    let deep = |levels: usize| {
        [vec![root.clone()], vec![b"\x35\x00\x18\x01g\x15\x02\x00".to_vec(); levels], vec![leaf.clone()]]
    };
    for (schema, groups, expected) in [
        (vec![root.clone(), leaf.clone()], groups(20_000_000, 100), "more than 1048576 values"),
        (vec![root.clone(), leaf.clone()], groups(1, 17 << 20), "texts of more than 16 MiB"),
        (deep(100_000).concat(), groups(1, 100), "nests groups 100001 levels deep; at most 64"),
        // A page of 60 bytes that says it has 2 GiB.
        (vec![root.clone(), leaf.clone()], groups(1, 100), "MiB of memory"),
    ] {
        let meta = [b"\x15\x02".to_vec(), list(&schema), i64_of(1), list(&groups), vec![0]].concat();
        let sizes = [b"\x15\x00\x15".to_vec(), number((1 << 32) - 2), b"\x15".to_vec(), number(120)].concat();
        let page = [&sizes[..], b"\x2c\x15\x02\x15\x00\x15\x06\x15\x06\x00\x00", &[0x78; 60]].concat();
        let file = [&b"PAR1"[..], &page, &meta, &(meta.len() as u32).to_le_bytes(), b"PAR1"].concat();
        std::fs::write(dir.path().join("x.parquet"), file).unwrap();
        let output = run(dir.path(), &["data", "stats", "-m", "m", "x.parquet"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(3) && said.contains(expected), "{expected}: {output:?}");
    }
}

/// A page of 200 MB in a file of 6 MB is ordinary: texts that repeat themselves compress so well.
#[test]
fn a_large_page_of_parquet_is_read() {
    const ROWS: usize = 1024;
    let dir = tempfile::tempdir().unwrap();
    tiny_model(&dir.path().join("m"), true);
    let path = dir.path().join("x.parquet");
    let schema = Arc::new(parse_message_type("message rows { required binary text (UTF8); }").unwrap());
    let level = Compression::ZSTD(ZstdLevel::try_new(1).unwrap());
    let properties = WriterProperties::builder().set_compression(level).set_dictionary_enabled(false);
    let properties = Arc::new(properties.set_data_page_size_limit(1 << 30).build());
    let file = std::fs::File::create(&path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, properties).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    let mut random = Random::new(3);
    let texts: Vec<ByteArray> = (0..ROWS)
        .map(|_| {
            (0..10_000)
                .map(|_| char::from(b" abcdefghijklmno"[random.below(16)]))
                .collect::<String>()
                .repeat(20)
                .into_bytes()
        })
        .map(ByteArray::from)
        .collect();
    column.typed::<ByteArrayType>().write_batch(&texts, None, None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
    let size = std::fs::metadata(&path).unwrap().len();
    // Twice the size of the file, and what a row may take, would not be enough for the page.
    assert!((4 << 20..16 << 20).contains(&size), "{size} bytes");
    ok(dir.path(), &["data", "preview", "-m", "m", "-n", "1", "x.parquet"]);
}

/// A namespace that holds itself would overflow the stack wherever it is printed or compared.
#[test]
fn a_template_whose_namespace_could_hold_itself_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    for template in [
        "{% set ns = namespace() %}\n{% set ns.a = ns %}{{ ns }}",
        "{% set ns = namespace() %}\n{% set ns.a = [ns] %}{{ [ns, ns] | sort }}",
    ] {
        std::fs::write(d.join("m/chat_template.jinja"), template).unwrap();
        let output = run(d, &["generate", "-m", "m", "-p", "a", "--max-tokens", "1", "--device", "cpu"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && said.contains("line 2 may store a namespace"), "{output:?}");
    }
}
