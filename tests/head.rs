//! The output head of files with NVFP4 weights: as the model has it, or as `--head` asks. With a head in NVFP4 and
//! single-level scales, `convert` writes the layout of the system that this project replaces, entry for entry.

use crate::support::{
    Cpu,
    files::{F32, ok, run, tiny_model},
    scripted::{read_tensors, write_tensors},
};
use backend_nvfp4::{BlockShape, MasterKind, Packed, QuantizeSpec, Rounding, Scaling, View, reference};
use model_qwen3::{
    ModelError,
    bytes::FloatType,
    config::Qwen3Config,
    container::Container,
    dat::ElementType,
    gguf::GgufFile,
    names::{self, Spelling},
    repack::{Repacked, StoreAs},
    tensors::{Stored, Tensors},
    weights,
    write::write_shard,
};
use serde_json::Value;
use std::{fs, path::Path};

/// Sizes of Qwen3-4B, and those of a model in its shape that is small enough for a test.
const SIZES: [(usize, usize); 6] = [(151_936, 512), (9728, 48), (4096, 64), (2560, 32), (1024, 16), (128, 16)];

/// The entries of the NVFP4 file of Qwen3-4B that the replaced system made: key, type and shape, in the order of the file.
fn inventory() -> Vec<(String, ElementType, Vec<usize>)> {
    let mut entries = vec![("model.embed_tokens.weight".to_owned(), ElementType::F16, vec![151_936, 2560])];
    let nvfp4 = |name: String, rows: usize, cols: usize| {
        let codes = (format!("{name}.weight.qdata"), ElementType::U8, vec![rows, cols / 2]);
        [codes, (format!("{name}.weight.scale"), ElementType::F8E4m3, vec![rows, cols / 16])]
    };
    for i in 0..36 {
        let at = |part: &str| format!("model.layers.{i}.{part}");
        let norm = |part: &str, len: usize| (at(part) + ".weight", ElementType::F16, vec![len]);
        entries.extend(nvfp4(at("self_attn.q_proj"), 4096, 2560));
        entries.extend(nvfp4(at("self_attn.k_proj"), 1024, 2560));
        entries.extend(nvfp4(at("self_attn.v_proj"), 1024, 2560));
        entries.extend(nvfp4(at("self_attn.o_proj"), 2560, 4096));
        entries.extend([norm("self_attn.q_norm", 128), norm("self_attn.k_norm", 128)]);
        entries.extend(nvfp4(at("mlp.gate_proj"), 9728, 2560));
        entries.extend(nvfp4(at("mlp.up_proj"), 9728, 2560));
        entries.extend(nvfp4(at("mlp.down_proj"), 2560, 9728));
        entries.extend([norm("input_layernorm", 2560), norm("post_attention_layernorm", 2560)]);
    }
    entries.push(("model.norm.weight".to_owned(), ElementType::F16, vec![2560]));
    entries.extend(nvfp4("lm_head".to_owned(), 151_936, 2560));
    entries
}

/// A shape of Qwen3-4B in the small model. Codes have half the columns of their matrix, scales a sixteenth.
fn in_small(shape: &[usize], divisor: usize) -> Vec<usize> {
    let small = |size: usize| SIZES.iter().find(|(large, _)| *large == size).map(|(_, small)| *small).unwrap();
    let last = shape.len() - 1;
    shape.iter().enumerate().map(|(i, n)| if i == last { small(n * divisor) / divisor } else { small(*n) }).collect()
}

/// A folder as Hugging Face has it: tensors in bf16, in the order of their names, and the head is the embedding.
fn downloaded(folder: &Path) {
    tiny_model(folder, true);
    let path = folder.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for (key, size) in [
        ("hidden_size", 32),
        ("intermediate_size", 48),
        ("num_hidden_layers", 36),
        ("num_attention_heads", 4),
        ("num_key_value_heads", 1),
        ("head_dim", 16),
    ] {
        config[key] = size.into();
    }
    fs::write(&path, config.to_string()).unwrap();
    let config = Qwen3Config::from_file(&path).unwrap();
    let model = weights::random::<Cpu>(&config, F32, MasterKind::F32, 11, &Default::default()).unwrap();
    let live = weights::Live::new(&model);
    let tensors = Repacked::new(&live, StoreAs::Float(FloatType::Bf16));
    let mut names = tensors.names();
    names.sort();
    let file = folder.join("model.safetensors");
    let failed = |e| ModelError::Io { path: file.clone(), source: e };
    write_shard(&tensors, &names, Spelling::ModelOpt, fs::File::create(&file).unwrap(), failed).unwrap();
}

#[test]
fn a_downloaded_model_becomes_the_file_of_the_replaced_system() {
    let inventory = inventory();
    // The figures of that file: its entries, and the bytes of their values.
    let bytes =
        |(_, element, dims): &(String, ElementType, Vec<usize>)| dims.iter().product::<usize>() * element.size();
    assert_eq!((inventory.len(), inventory.iter().map(bytes).sum::<usize>()), (652, 3_040_832_512));

    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    downloaded(&d.join("hf"));
    fs::create_dir(d.join("o")).unwrap();
    let convert = ["convert", "hf", "o/out.dat", "--to", "dat", "--dtype", "nvfp4"];
    ok(d, &[&convert[..], &["--scales", "single", "--head", "nvfp4"]].concat());
    let file = Container::open(&d.join("o/out.dat")).unwrap();
    let found = file.dat().unwrap().entries();
    assert_eq!(found.len(), 652);
    for (entry, (key, element, dims)) in found.iter().zip(&inventory) {
        let divisor = if key.ends_with(".qdata") {
            2
        } else if key.ends_with(".scale") {
            16
        } else {
            1
        };
        assert_eq!((&entry.key, entry.element, &entry.dims), (key, *element, &in_small(dims, divisor)));
    }
    // The head has the codes of the embedding, by the formula of that system.
    let source = Container::open(&d.join("hf")).unwrap();
    for name in [names::EMBEDDING, "model.layers.35.mlp.down_proj.weight"] {
        let shape = source.stored(name).unwrap().shape();
        let spec = QuantizeSpec { scaling: Scaling::Single, block: BlockShape::Row, rounding: Rounding::Nearest };
        let expected =
            reference::quantize(&source.read_dense(name).unwrap(), View::row_major(shape[0], shape[1]), spec);
        let ours = file.read_packed(if name == names::EMBEDDING { names::HEAD } else { name }).unwrap();
        assert_eq!(ours, expected, "{name}");
    }
    ok(d, &["inspect", "o/out.dat", "--verify"]);
    let said = ok(d, &["generate", "-m", "o/out.dat", "-p", "hi", "--max-tokens", "2", "--device", "cpu", "--json"]);
    assert!(said.contains("tokens"), "{said}");
}

/// The head of a file.
fn head(path: &Path) -> Option<Stored> {
    let file = Container::open(path).unwrap();
    file.names().iter().any(|name| name == names::HEAD).then(|| file.stored(names::HEAD).unwrap())
}

#[test]
fn convert_writes_the_head_that_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let two = Some(Stored::Packed { rows: 512, cols: 64, scaling: Scaling::Two });
    let bf16 = Some(Stored::Dense { float: FloatType::Bf16, shape: vec![512, 64] });
    for tied in [true, false] {
        let model = format!("m-{tied}");
        tiny_model(&d.join(&model), tied);
        fs::create_dir(d.join(format!("o-{tied}"))).unwrap();
        let own = if tied { None } else { two.clone() };
        let dense = if tied { None } else { bf16.clone() };
        for (words, expected) in [(&[][..], &own), (&["--head", "nvfp4"], &two), (&["--head", "bf16"], &dense)] {
            for name in [format!("o-{tied}/x.dat"), format!("o-{tied}/x.safetensors")] {
                ok(d, &[&["convert", &model, &name, "--dtype", "nvfp4", "--overwrite"], words].concat());
                assert_eq!(&head(&d.join(&name)), expected, "tied {tied}, {words:?}");
            }
        }
    }
    for words in [&["x.dat", "--dtype", "bf16"][..], &["x.gguf", "--dtype", "nvfp4"]] {
        let out = run(d, &[&["convert", "m-true"], words, &["--head", "nvfp4", "--overwrite"]].concat());
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.code() == Some(2) && stderr.contains("--head works only with --dtype nvfp4"), "{stderr}");
    }
}

/// Some files of tied models spell out the head. Every command takes them as files without it.
#[test]
fn a_head_that_is_a_copy_of_the_embedding_is_no_head() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    for folder in ["plain", "spelled"] {
        tiny_model(&d.join(folder), true);
        fs::create_dir(d.join(format!("of-{folder}"))).unwrap();
    }
    let file = d.join("spelled/model.safetensors");
    let mut tensors = read_tensors(&file);
    tensors.insert(names::HEAD.to_owned(), tensors[names::EMBEDDING].clone());
    write_tensors(&file, &tensors);
    for (name, words) in [
        ("x.dat", &["--dtype", "nvfp4"][..]),
        ("x.safetensors", &["--dtype", "nvfp4"]),
        ("h.dat", &["--dtype", "nvfp4", "--head", "nvfp4"]),
        ("y.safetensors", &["--dtype", "bf16"]),
    ] {
        let [plain, spelled] = ["plain", "spelled"].map(|model| {
            let output = format!("of-{model}/{name}");
            ok(d, &[&["convert", model, &output], words].concat());
            fs::read(d.join(output)).unwrap()
        });
        assert!(plain == spelled, "{name}");
    }
    ok(d, &["convert", "spelled", "x.gguf", "--dtype", "bf16"]);
    assert!(GgufFile::open(&d.join("x.gguf")).unwrap().stored(names::HEAD).is_none());
    let export = ["export-dat", "-m", "spelled", "--device", "cpu", "--output-dat"];
    ok(d, &[&export[..], &["e.dat"]].concat());
    ok(d, &[&export[..], &["l.dat", "--like", "of-plain/x.dat"]].concat());
    ok(d, &["export-hf", "-m", "spelled", "-o", "hf", "--device", "cpu"]);
    assert_eq!(["e.dat", "l.dat", "hf"].map(|out| head(&d.join(out))), [None, None, None]);
}

fn fit(d: &Path, model: &str, out: &str, flags: &[&str]) {
    let words = ["fit", "-m", model, "-d", "m/demo.tsv", "-o", out, "--device", "cpu", "--max-seq-length", "64"];
    let steps = ["--max-steps", "2", "--learning-rate", "1e-3", "--eval-steps", "0", "--val-split", "0"];
    ok(d, &[&words[..], &steps, flags].concat());
}

#[test]
fn an_export_has_the_head_that_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let two = Some(Stored::Packed { rows: 512, cols: 64, scaling: Scaling::Two });
    fit(d, "m", "plain", &[]);
    fit(d, "m", "r", &["--head", "nvfp4", "--output-dat", "extra.dat"]);
    assert_eq!(head(&d.join("plain/final")), None);
    assert_eq!((head(&d.join("r/final")), head(&d.join("extra.dat"))), (two.clone(), two.clone()));
    // Training is the same, and so is the export of a checkpoint of either run.
    let export = |run: &str, out: &str, flags: &[&str]| {
        let checkpoint = format!("{run}/checkpoint-2");
        let words = ["export-dat", "--checkpoint", &checkpoint, "--output-dat", out, "--device", "cpu"];
        ok(d, &[&words[..], flags].concat());
        fs::read(d.join(out)).unwrap()
    };
    let with = fs::read(d.join("extra.dat")).unwrap();
    assert!(
        export("plain", "a.dat", &["--head", "nvfp4"]) == with && export("r", "b.dat", &["--head", "nvfp4"]) == with
    );
    let without = fs::read(d.join("plain/final/model.dat")).unwrap();
    assert!(export("plain", "c.dat", &["--head", "bf16"]) == without);
    // A head that training quantizes can be exported in bf16, beside the embedding.
    fs::create_dir(d.join("q")).unwrap();
    ok(d, &["convert", "m", "q/q.dat", "--dtype", "nvfp4", "--head", "nvfp4"]);
    fit(d, "q/q.dat", "s", &["--head", "bf16"]);
    assert_eq!(head(&d.join("s/final")), Some(Stored::Dense { float: FloatType::Bf16, shape: vec![512, 64] }));
    let embedding = Container::open(&d.join("s/final")).unwrap().stored(names::EMBEDDING);
    assert_eq!(embedding, Some(Stored::Dense { float: FloatType::F16, shape: vec![512, 64] }));
    let out = run(
        d,
        &[
            "export-dat",
            "--checkpoint",
            "r/checkpoint-2",
            "--output-dat",
            "e.dat",
            "--head",
            "nvfp4",
            "--like",
            "a.dat",
        ],
    );
    assert_eq!(out.status.code(), Some(2), "--like says which head there is");
}

/// Other programs go by config.json: where the head is a matrix of its own, it says so.
#[test]
fn a_head_of_its_own_reaches_other_formats() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    for folder in ["q", "dense", "back"] {
        fs::create_dir(d.join(folder)).unwrap();
    }
    ok(d, &["convert", "m", "q/q.dat", "--dtype", "nvfp4", "--head", "nvfp4"]);
    ok(d, &["convert", "q/q.dat", "dense/model.safetensors", "--dtype", "bf16"]);
    ok(d, &["convert", "q/q.dat", "x.gguf", "--dtype", "bf16"]);
    ok(d, &["convert", "x.gguf", "back/model.safetensors", "--dtype", "bf16"]);
    for format in ["bf16", "compressed-tensors", "modelopt"] {
        ok(d, &["export-hf", "-m", "q/q.dat", "-o", format, "--format", format, "--device", "cpu"]);
    }
    let Packed { codes, scales, global } =
        Container::open(&d.join("q/q.dat")).unwrap().read_packed(names::HEAD).unwrap();
    let values = reference::dequantize(&Packed { codes, scales, global }, 512, 64);
    let values = FloatType::Bf16.decode(&FloatType::Bf16.encode(&values));
    for folder in ["dense", "back", "bf16", "compressed-tensors", "modelopt"] {
        let file = Container::open(&d.join(folder)).unwrap();
        assert!(file.read_dense(names::HEAD).unwrap() == values, "{folder}");
        let config: Value = serde_json::from_slice(&fs::read(d.join(folder).join("config.json")).unwrap()).unwrap();
        assert_eq!(config["tie_word_embeddings"], Value::Bool(false), "{folder}");
    }
    // A tied model stays one.
    ok(d, &["export-hf", "-m", "m", "-o", "tied", "--device", "cpu"]);
    let config: Value = serde_json::from_slice(&fs::read(d.join("tied/config.json")).unwrap()).unwrap();
    assert_eq!(config["tie_word_embeddings"], Value::Bool(true));
}
