//! A model's file and its config.json must agree: a missing, an unknown and a half tensor is refused by its name, by
//! training as by inference; what a file holds can be listed and compared.

use crate::support::{
    Cpu,
    files::{F32, ok, run, tiny_model},
    golden,
    scripted::{read_tensors, write_tensors},
    spec,
};
use backend_nvfp4::Packed;
use model_qwen3::{
    ModelError,
    config::Qwen3Config,
    container::Container,
    tensors::{Stored, Tensors},
    weights::{self, Purpose},
};
use serde_json::Value;
use std::{collections::BTreeMap, ops::Range, path::Path, sync::Mutex};

/// Both commands that load a model refuse it with exit code 6 and these words.
fn refused(dir: &Path, model: &str, words: &[&str]) {
    for args in [
        vec!["generate", "-m", model, "-p", "hi", "--device", "cpu", "--max-tokens", "1"],
        vec!["fit", "-m", model, "-d", "whole/demo.tsv", "--device", "cpu", "--max-steps", "1", "-o", "run"],
    ] {
        let out = run(dir, &args);
        let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(6), "{args:?}: {stderr}");
        for word in words {
            assert!(stderr.contains(word), "{args:?} does not say {word:?}: {stderr}");
        }
        assert!(!stderr.contains("panicked"), "{stderr}");
        let _ = std::fs::remove_dir_all(dir.join("run"));
    }
}

/// The tensors of a file, and the names of NVFP4 tensors that were read from it.
struct Heard(Container, Mutex<Vec<String>>);

impl Tensors for Heard {
    fn path(&self) -> &Path {
        self.0.path()
    }

    fn names(&self) -> Vec<String> {
        self.0.names()
    }

    fn stored(&self, name: &str) -> Option<Stored> {
        self.0.stored(name)
    }

    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<Vec<f32>, ModelError> {
        self.0.read_rows(name, rows)
    }

    fn read_packed(&self, name: &str) -> Result<Packed, ModelError> {
        self.1.lock().unwrap().push(name.to_owned());
        self.0.read_packed(name)
    }
}

/// Tensors are read before the loader asks for them. In another order than the loader's, it would read them again.
#[test]
fn each_nvfp4_tensor_is_read_once() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    ok(d, &["convert", "m", "x.dat", "--dtype", "nvfp4", "--head", "nvfp4"]);
    let config = Qwen3Config::from_file(&d.join("m/config.json")).unwrap();
    let heard = Heard(Container::open(&d.join("x.dat")).unwrap(), Mutex::default());
    weights::load::<Cpu>(&heard, &config, F32, Purpose::Infer, &Default::default()).unwrap();
    let is_packed = |name: &String| matches!(heard.stored(name), Some(Stored::Packed { .. }));
    let mut packed: Vec<String> = heard.names().into_iter().filter(is_packed).collect();
    let mut read = heard.1.lock().unwrap().clone();
    assert!(packed.len() > 7 && packed.iter().any(|name| name == "lm_head.weight"), "{packed:?}");
    packed.sort();
    read.sort();
    assert_eq!(read, packed);
}

#[test]
fn missing_and_unknown_tensors_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    for tied in [true, false] {
        tiny_model(&d.join("whole"), tied);
        tiny_model(&d.join("m"), tied);
        let file = d.join("m/model.safetensors");
        let whole = read_tensors(&file);
        ok(d, &["generate", "-m", "m", "-p", "hi", "--device", "cpu", "--max-tokens", "1"]);
        // Each kind of tensor: embedding, norm, linear layer, head norm.
        let mut kinds = vec!["model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"];
        kinds.push("model.layers.0.self_attn.k_norm.weight");
        if !tied {
            kinds.push("lm_head.weight");
        }
        for name in kinds {
            let mut without = whole.clone();
            assert!(without.remove(name).is_some());
            write_tensors(&file, &without);
            refused(d, "m", &[name]);
        }
        for name in ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias", "extra"] {
            let mut more = whole.clone();
            more.insert(name.to_owned(), (vec![16], vec![0.5; 16]));
            write_tensors(&file, &more);
            refused(d, "m", &[name]);
        }
        if tied {
            // A copy of the embedding as head is the same model; what else is there is still unknown.
            let mut copied = whole.clone();
            copied.insert("lm_head.weight".into(), copied["model.embed_tokens.weight"].clone());
            write_tensors(&file, &copied);
            ok(d, &["generate", "-m", "m", "-p", "hi", "--device", "cpu", "--max-tokens", "1"]);
            copied.insert("extra".into(), (vec![16], vec![0.5; 16]));
            write_tensors(&file, &copied);
            refused(d, "m", &["extra"]);
        }
        // A tensor under another name is one that is missing and one that is unknown.
        let mut renamed = whole.clone();
        let tensor = renamed.remove("model.norm.weight").unwrap();
        renamed.insert("norm.weight".into(), tensor);
        write_tensors(&file, &renamed);
        refused(d, "m", &["model.norm.weight"]);
    }
}

#[test]
fn tensors_of_another_shape_are_refused_with_both_shapes() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("whole"), true);
    tiny_model(&d.join("m"), true);
    let file = d.join("m/model.safetensors");
    let whole = read_tensors(&file);
    for (name, shape) in [
        // The transpose has as many values.
        ("model.layers.0.mlp.down_proj.weight", vec![96, 64]),
        ("model.layers.0.input_layernorm.weight", vec![1, 64]),
        ("model.embed_tokens.weight", vec![511, 64]),
    ] {
        let mut other = whole.clone();
        let (was, values) = other.get_mut(name).unwrap();
        let said = format!("{was:?}");
        values.truncate(shape.iter().product());
        *was = shape.clone();
        write_tensors(&file, &other);
        refused(d, "m", &[name, &said, &format!("{shape:?}")]);
    }
}

#[test]
fn nvfp4_codes_without_their_scales_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("whole"), true);
    tiny_model(&d.join("m"), true);
    ok(d, &["convert", "whole", "m/model.safetensors", "--dtype", "nvfp4", "--overwrite"]);
    let file = d.join("m/model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    let whole = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let name = "model.layers.0.mlp.up_proj.weight";
    for missing in [format!("{name}_scale"), name.to_owned()] {
        let kept = whole.tensors().into_iter().filter(|(key, _)| *key != missing);
        std::fs::write(&file, safetensors::serialize(kept, None).unwrap()).unwrap();
        refused(d, "m", &[&missing]);
    }
}

/// A file that is not there is no damaged file.
#[test]
fn a_folder_without_the_weights_of_one_model_is_refused() {
    for (files, reason) in [
        (&[][..], "the folder holds neither model.safetensors nor a .dat file; give"),
        (&["a.dat", "b.dat"], "the folder holds 2 .dat files; name one of them"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        files.iter().for_each(|file| std::fs::write(dir.path().join(file), "").unwrap());
        let out = run(dir.path(), &["inspect", "."]);
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.code() == Some(2) && stderr.contains(reason), "{stderr}");
    }
}

/// The lines of `inspect --json`.
fn inspected(dir: &Path, args: &[&str]) -> Vec<Value> {
    let text = ok(dir, &[&["inspect", "--json"][..], args].concat());
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
}

#[test]
fn inspect_lists_every_entry_where_it_lies_and_the_scales_of_every_nvfp4_tensor() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), false);
    for (file, container, scales) in
        [("q.dat", "dat", "two"), ("s.dat", "dat", "single"), ("q.safetensors", "safetensors", "two")]
    {
        ok(d, &["convert", "m", file, "--to", container, "--dtype", "nvfp4", "--scales", scales]);
        let lines = inspected(d, &[file, "--verify"]);
        let (summary, rest) = lines.split_last().unwrap();
        let (tensors, entries): (Vec<&Value>, Vec<&Value>) = rest.iter().partition(|line| line["tensor"].is_string());

        // Entries lie side by side up to the end of the file.
        let number = |line: &Value, key: &str| line[key].as_u64().unwrap_or_else(|| panic!("{key} in {line}"));
        let mut places: Vec<(u64, u64)> = entries.iter().map(|e| (number(e, "offset"), number(e, "bytes"))).collect();
        places.sort_unstable();
        let length = std::fs::metadata(d.join(file)).unwrap().len();
        assert_eq!(places.last().map(|(at, bytes)| at + bytes), Some(length), "{file}");
        for pair in places.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{file}: {pair:?} overlap");
        }
        // What an entry says of itself is true of its bytes.
        let bytes = std::fs::read(d.join(file)).unwrap();
        let checkpoint = Container::open(&d.join(file)).unwrap();
        let norm = entries.iter().find(|e| e["key"] == "model.norm.weight").unwrap();
        assert_eq!(
            (norm["dtype"].as_str().unwrap().to_lowercase().as_str(), &norm["shape"]),
            ("f16", &serde_json::json!([64]))
        );
        let at = number(norm, "offset") as usize;
        let halves = bytes[at..at + 128].chunks(2).map(|b| half::f16::from_le_bytes([b[0], b[1]]).to_f32());
        assert_eq!(halves.collect::<Vec<_>>(), checkpoint.read_dense("model.norm.weight").unwrap());

        let (mut values, mut packed) = (0, 0);
        for name in checkpoint.names() {
            let stored = checkpoint.stored(&name).unwrap();
            let count = stored.shape().iter().product::<usize>() as u64;
            values += count;
            let line = tensors.iter().find(|line| line["tensor"] == name.as_str());
            let Stored::Packed { rows, cols, .. } = stored else {
                assert!(line.is_none(), "{name} is dense");
                continue;
            };
            packed += count;
            let line = line.unwrap_or_else(|| panic!("no line of {name}"));
            assert_eq!((number(line, "rows"), number(line, "cols")), (rows as u64, cols as u64));
            let q = checkpoint.read_packed(&name).unwrap();
            let scales = q.scales.iter().map(|&b| (spec::E4m3::value(b) * f64::from(q.global)) as f32);
            let low = scales.clone().fold(f32::MAX, f32::min);
            let high = scales.fold(0.0, f32::max);
            for (key, expected) in [("scale_min", low), ("scale_max", high)] {
                let said = line[key].as_f64().unwrap() as f32;
                assert!((said - expected).abs() <= 1e-6 * expected, "{name} {key}: {said}, {expected}");
            }
            assert_eq!(line["tensor_scale"].as_f64().map(|g| g as f32), (scales_levels(file) == 2).then_some(q.global));
            assert_eq!(number(line, "zero_blocks"), q.scales.iter().filter(|b| **b == 0).count() as u64);
        }
        let expected = BTreeMap::from([
            ("tensors", checkpoint.names().len() as u64),
            ("values", values),
            ("nvfp4_values", packed),
        ]);
        for (key, count) in expected {
            assert_eq!(summary[key].as_u64(), Some(count), "{file}: {key}");
        }
        assert_eq!(summary["verified"], true);
        assert_eq!(inspected(d, &[file]).last().unwrap()["verified"], false);
    }
}

fn scales_levels(file: &str) -> usize {
    if file.starts_with('s') { 1 } else { 2 }
}

#[test]
fn a_parity_dump_holds_every_value_and_compares_equal_with_itself() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let model = golden("hf-qwen3/tiny-tied").canonicalize().unwrap();
    let (model, expected) = (model.to_str().unwrap().to_owned(), model.join("expected.safetensors"));
    let parity = |expected: &str, more: &[&str]| -> Vec<Value> {
        let args = [&["parity", "-m", &model, "--expected", expected, "--device", "cpu", "--json"][..], more].concat();
        ok(d, &args).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let against_hugging_face = parity(expected.to_str().unwrap(), &["--dump", "dump.safetensors"]);
    // A file that is there already is not replaced.
    std::fs::write(d.join("taken"), "mine").unwrap();
    let out = run(d, &["parity", "-m", &model, "--expected", "dump.safetensors", "--device", "cpu", "--dump", "taken"]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.code() == Some(2) && said.contains("--dump taken: the file exists; choose another"), "{said}");
    assert_eq!(std::fs::read(d.join("taken")).unwrap(), b"mine");
    // The file of a model alone needs its config.json, which --tokenizer gives.
    std::fs::copy(Path::new(&model).join("model.safetensors"), d.join("alone.safetensors")).unwrap();
    let alone = ["parity", "-m", "alone.safetensors", "--expected", "dump.safetensors", "--device", "cpu"];
    let out = run(d, &alone);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success() && said.contains("--tokenizer"), "{said}");
    ok(d, &[&alone[..], &["--tokenizer", &model]].concat());
    let itself = parity("dump.safetensors", &[]);
    assert_eq!(itself.len(), against_hugging_face.len());
    for line in &itself {
        if line["verdict"].is_string() {
            assert_eq!(line["verdict"], "PASS");
        } else if line["key"] == "generate.ids" {
            assert_eq!(line["equal"], line["of"]);
        } else {
            assert_eq!((line["max"].as_f64(), line["frobenius"].as_f64()), (Some(0.0), Some(0.0)), "{line}");
        }
    }

    // Read with another library: the fixture's keys and shapes, and values that differ by what was printed.
    let bytes = [std::fs::read(&expected).unwrap(), std::fs::read(d.join("dump.safetensors")).unwrap()];
    let [theirs, ours] = [0, 1].map(|i| safetensors::SafeTensors::deserialize(&bytes[i]).unwrap());
    let mut compared = 0;
    for (name, tensor) in theirs.tensors() {
        let own = ours.tensor(&name).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!((own.shape(), own.dtype()), (tensor.shape(), tensor.dtype()), "{name}");
        let floats = |data: &[u8]| -> Vec<f64> {
            data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]).into()).collect()
        };
        if tensor.dtype() != safetensors::Dtype::F32 {
            assert_eq!(own.data(), tensor.data(), "{name}");
            continue;
        }
        let (a, b) = (floats(own.data()), floats(tensor.data()));
        let largest = b.iter().fold(f64::MIN_POSITIVE, |m, x| m.max(x.abs()));
        let worst = a.iter().zip(&b).fold(0.0f64, |m, (x, y)| m.max((x - y).abs())) / largest;
        let line = against_hugging_face.iter().find(|line| line["key"] == name.as_str()).unwrap();
        assert!((line["max"].as_f64().unwrap() - worst).abs() <= 1e-12, "{name}: {line}, the dump has {worst}");
        compared += 1;
    }
    assert!(compared > 20, "{compared} tensors were compared");
}
