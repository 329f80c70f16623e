//! `export-hf`: folders for other programs. NVFP4 weights have the bytes that compressed-tensors and nvidia-modelopt
//! themselves write (`golden/foreign`); bf16 weights are the model's own, rounded; every folder is read back.

use crate::support::{
    files::{ok, run, tiny_model},
    golden, golden_bytes,
};
use model_qwen3::{
    ModelError,
    bytes::FloatType,
    container::Container,
    foreign::{Foreign, Library},
    repack::{Repacked, StoreAs},
    tensors::{Stored, Tensors},
    write::{write_safetensors, write_shard},
};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::{collections::BTreeMap, fs, path::Path};

/// The tensors of a safetensors file: type, shape, SHA-256 of the bytes.
fn tensors_of(file: &[u8]) -> BTreeMap<String, Value> {
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

#[test]
fn nvfp4_has_the_bytes_of_compressed_tensors_and_of_modelopt() {
    let expected: BTreeMap<String, Value> = serde_json::from_slice(&golden_bytes("foreign/foreign.json")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let failed = |e| ModelError::Io { path: dir.path().into(), source: e };
    for (case, expected) in &expected {
        let [name, library, dtype] = case.split(' ').collect::<Vec<_>>()[..] else { panic!("{case}") };
        let source = Container::open(&golden("hf-qwen3").join(name)).unwrap();
        // The model in the type that the library was given.
        let file = dir.path().join(format!("{name}-{dtype}.safetensors"));
        let float = if dtype == "float32" { FloatType::F32 } else { FloatType::Bf16 };
        write_safetensors(&Repacked::new(&source, StoreAs::Float(float)), fs::File::create(&file).unwrap(), failed)
            .unwrap();
        let source = Container::open(&file).unwrap();
        let format = match library {
            "modelopt" => Library::ModelOpt,
            _ => Library::CompressedTensors,
        };
        let tensors = Foreign::new(&source, format, usize::MAX);
        let bytes = write_shard(&tensors, &tensors.names(), format.spelling(), Vec::new(), failed).unwrap();
        let ours = tensors_of(&bytes);
        let theirs = expected["tensors"].as_object().unwrap();
        // A model in f32 keeps other weights in f32 there, and in bf16 here.
        let compared: Vec<&String> =
            theirs.keys().filter(|name| float == FloatType::Bf16 || name.contains("_proj.")).collect();
        assert!(compared.iter().filter(|name| name.contains("q_proj")).count() >= 6, "{case}: {compared:?}");
        for name in compared {
            assert_eq!(ours.get(name), Some(&theirs[name]), "{case}: {name}");
        }
        assert_eq!(ours.len(), theirs.len(), "{case}");
    }
}

/// What config.json says about the weights is what the libraries themselves write there, but for the name of the writer.
#[test]
fn the_quantization_config_is_that_of_compressed_tensors_and_of_modelopt() {
    let expected: BTreeMap<String, Value> = serde_json::from_slice(&golden_bytes("foreign/foreign.json")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    for (name, tied) in [("tiny-tied", true), ("tiny-untied", false)] {
        tiny_model(&d.join(name), tied);
        for library in ["compressed-tensors", "modelopt"] {
            let out = format!("{name}-{library}");
            ok(d, &["export-hf", "-m", name, "-o", &out, "--format", library, "--device", "cpu"]);
            let read =
                |file: &str| -> Value { serde_json::from_slice(&fs::read(d.join(&out).join(file)).unwrap()).unwrap() };
            let mut ours = read("config.json")["quantization_config"].clone();
            let mut theirs = expected[&format!("{name} {library} bfloat16")]["quantization_config"].clone();
            if library == "modelopt" {
                assert_eq!(ours["producer"]["name"], "train-cli");
                ours["producer"] = Value::Null;
                theirs["producer"] = Value::Null;
                // The library's older file says the same.
                let older = &read("hf_quant_config.json")["quantization"];
                assert_eq!(
                    (&older["exclude_modules"], &older["quant_algo"]),
                    (&theirs["ignore"], &theirs["quant_algo"])
                );
                assert_eq!((&older["group_size"], older.get("kv_cache_quant_algo")), (&16.into(), Some(&Value::Null)));
            }
            assert_eq!(ours, theirs, "{name} {library}");
        }
    }
}

/// The greedy answer of a model.
fn answer(folder: &Path, model: &str) -> String {
    ok(folder, &["generate", "-m", model, "-p", "Who are you?", "--raw", "--max-new-tokens", "8", "--temperature", "0"])
}

#[test]
fn a_folder_in_bf16_holds_the_rounded_weights_in_as_many_files_as_wanted() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    for tied in [true, false] {
        let (model, out) = (format!("m-{tied}"), format!("out-{tied}"));
        tiny_model(&d.join(&model), tied);
        ok(d, &["export-hf", "-m", &model, "-o", &out, "--max-shard-size", "0.1MB", "--device", "cpu"]);
        let files: Vec<String> =
            fs::read_dir(d.join(&out)).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        let shards = files.iter().filter(|name| name.starts_with("model-") && name.ends_with(".safetensors")).count();
        assert!(shards > 2, "{files:?}");
        for name in
            ["config.json", "tokenizer.json", "generation_config.json", "README.md", "model.safetensors.index.json"]
        {
            assert!(files.iter().any(|file| file == name), "{name} is missing: {files:?}");
        }
        let (a, b) = (Container::open(&d.join(&model)).unwrap(), Container::open(&d.join(&out)).unwrap());
        assert_eq!(a.names().len(), b.names().len());
        for name in a.names() {
            let rounded = FloatType::Bf16.decode(&FloatType::Bf16.encode(&a.read_dense(&name).unwrap()));
            assert_eq!(b.read_dense(&name).unwrap(), rounded, "{name}");
        }
        answer(d, &out);
    }
}

#[test]
fn nvfp4_weights_keep_their_codes_where_scales_are_equal() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    ok(d, &["convert", "m", "m/x.dat", "--to", "dat", "--dtype", "nvfp4"]);
    for format in ["compressed-tensors", "modelopt"] {
        let out = run(d, &["export-hf", "-m", "m/x.dat", "-o", format, "--format", format, "--device", "cpu"]);
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success() && stderr.contains("8-bit scales"), "{stderr}");
        let (a, b) = (Container::open(&d.join("m/x.dat")).unwrap(), Container::open(&d.join(format)).unwrap());
        let (mut kept, mut rescaled) = (0, 0);
        for name in a.names() {
            let Some(Stored::Packed { .. }) = a.stored(&name) else { continue };
            let (own, exported) = (a.read_packed(&name).unwrap(), b.read_packed(&name).unwrap());
            // Reading the reciprocal of the tensor scale may miss its last bit.
            if (own.global / exported.global - 1.0).abs() < 2e-7 {
                assert_eq!((own.codes, own.scales), (exported.codes, exported.scales), "{format}: {name}");
                kept += 1;
            } else {
                assert!(exported.global > own.global, "{format}: {name}");
                rescaled += 1;
            }
        }
        // Of q, k and v one keeps its scale, of gate and up one, and o and down: four of seven in each of two blocks.
        assert_eq!((kept, rescaled), (8, 6), "{format}");
        let config: Value = serde_json::from_slice(&fs::read(d.join(format).join("config.json")).unwrap()).unwrap();
        let ignored = &config["quantization_config"]["ignore"];
        assert_eq!(ignored.as_array().map(Vec::len), Some(if format == "modelopt" { 2 } else { 1 }), "{ignored}");
        // Both describe one model.
        assert_eq!(answer(d, format), answer(d, "compressed-tensors"));
    }
}

#[test]
fn an_export_of_a_run_says_how_it_was_trained_and_leaves_its_last_blocks_dense() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let fit = ["fit", "-m", "m", "-d", "m/demo.tsv", "--max-seq-length", "64", "--max-steps", "2", "-o", "r"];
    ok(d, &[&fit[..], &["--recipe", "w4", "--bf16-last-blocks", "1", "--device", "cpu"]].concat());
    ok(
        d,
        &[
            "export-hf",
            "--checkpoint",
            "r/checkpoint-2",
            "-o",
            "h",
            "--format",
            "compressed-tensors",
            "--device",
            "cpu",
        ],
    );
    let card = fs::read_to_string(d.join("h/README.md")).unwrap();
    assert!(card.contains("recipe w4, 2 steps") && card.contains("| eval_loss |"), "{card}");
    let config: Value = serde_json::from_slice(&fs::read(d.join("h/config.json")).unwrap()).unwrap();
    let ignored = config["quantization_config"]["ignore"].as_array().unwrap();
    assert_eq!(ignored.len(), 8, "{ignored:?}");
    assert!(ignored.iter().skip(1).all(|name| name.as_str().unwrap().starts_with("model.layers.1.")), "{ignored:?}");
    ok(d, &["export-hf", "-m", "r", "-o", "b", "--device", "cpu"]);
}

#[test]
fn a_folder_with_anything_else_in_it_is_never_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let export = ["export-hf", "-m", "m", "--device", "cpu", "-o"];
    fs::create_dir(d.join("mine")).unwrap();
    fs::write(d.join("mine/notes.txt"), "mine").unwrap();
    fs::write(d.join("file"), "mine").unwrap();
    for (out, flags, reason) in [
        ("mine", &[][..], "is not empty"),
        ("mine", &["--overwrite"], "no export of train-cli"),
        ("m", &["--overwrite"], "the model is read from there"),
        ("file", &[], "not a folder"),
        ("none/out", &[], "there is no folder none"),
        ("out", &["--max-shard-size", "5"], "--max-shard-size 5: the unit is missing"),
    ] {
        let done = run(d, &[&export[..], &[out], flags].concat());
        let stderr = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.code() == Some(2) && stderr.contains(reason), "{out} {flags:?}: {stderr}");
    }
    assert_eq!(fs::read(d.join("mine/notes.txt")).unwrap(), b"mine");
    ok(d, &[&export[..], &["out"]].concat());
    assert_eq!(run(d, &[&export[..], &["out"]].concat()).status.code(), Some(2));
    ok(d, &[&export[..], &["out", "--overwrite"]].concat());
}
