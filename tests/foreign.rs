//! `export-hf`: folders for other programs. NVFP4 weights have the bytes that compressed-tensors and nvidia-modelopt
//! themselves write (`golden/foreign`); bf16 weights are the model's own, rounded; every folder is read back.

use crate::support::{
    Cpu,
    files::{names, ok, refused, run, tensors_of, tiny_model},
    golden, golden_bytes,
};
use backend_nvfp4::{GivenScale, LinearSpec, MasterKind, Precision, Recipe, Scaling, reference};
use model_qwen3::{
    ModelError,
    bytes::FloatType,
    config::Qwen3Config,
    container::Container,
    foreign::{Foreign, Library},
    model::{Qwen3, ids_tensor},
    repack::{Repacked, StoreAs},
    tensors::{Stored, Tensors},
    weights::{self, Purpose, to_host},
    write::{write_safetensors, write_shard},
};
use serde_json::Value;
use std::{collections::BTreeMap, fs, path::Path};

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
        let float = match dtype {
            "float32" => FloatType::F32,
            "float16" => FloatType::F16,
            _ => FloatType::Bf16,
        };
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
        // Other weights keep their type there, and are bf16 here.
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
        // A download may end before its last file.
        let (shard, aside) = (d.join(&out).join("model-00002-of-").display().to_string(), d.join("aside"));
        let shard = files
            .iter()
            .map(|file| d.join(&out).join(file))
            .find(|file| file.display().to_string().starts_with(&shard));
        let shard = shard.unwrap();
        fs::rename(&shard, &aside).unwrap();
        let said = refused(d, &["generate", "-m", &out, "-p", "hi", "--device", "cpu"], 2);
        assert!(said.contains("model-00002-of-") && said.contains("the model's index names it"), "{said}");
        fs::rename(&aside, &shard).unwrap();
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
fn a_quantized_folder_of_several_files_is_that_of_one_file() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    for format in ["compressed-tensors", "modelopt"] {
        let words = ["export-hf", "-m", "m", "--format", format, "--device", "cpu", "-o"];
        let several = format!("several-{format}");
        ok(d, &[&words[..], &[format]].concat());
        ok(d, &[&words[..], &[&several, "--max-shard-size", "0.02MB"]].concat());
        let files = names(&d.join(&several));
        let third = files.iter().any(|file| file.starts_with("model-00003-of-"));
        assert!(third && files.contains("model.safetensors.index.json"), "{files:?}");
        let (a, b) = (Container::open(&d.join(format)).unwrap(), Container::open(&d.join(&several)).unwrap());
        assert_eq!(a.names(), b.names());
        let mut packed = 0;
        for name in a.names() {
            if let Some(Stored::Packed { .. }) = a.stored(&name) {
                let [one, other] = [&a, &b].map(|file| file.read_packed(&name).unwrap());
                assert_eq!((one.codes, one.scales, one.global), (other.codes, other.scales, other.global), "{name}");
                packed += 1;
            } else {
                assert_eq!(a.read_dense(&name).unwrap(), b.read_dense(&name).unwrap(), "{name}");
            }
        }
        assert!(packed > 10, "{packed}");
        assert_eq!(answer(d, format), answer(d, &several));
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
        assert!(out.status.success() && stderr.contains("products of 8-bit scale"), "{stderr}");
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
    // The card of a run's export says what that of its checkpoint says, and has the name of the run.
    let of_run = fs::read_to_string(d.join("b/README.md")).unwrap();
    for text in ["\n# r\n", "All parameters were trained with", "recipe w4, 2 steps", "| eval_loss |"] {
        assert!(card.contains(text) && of_run.contains(text), "{text}: {card}\n{of_run}");
    }
    // Its activations are measured on the rows of the run, as long as they are there.
    let w4a4 = ["export-hf", "-m", "r", "-o", "a", "--format", "modelopt", "--activations", "nvfp4", "--device", "cpu"];
    let out = run(d, &[&w4a4[..], &["--calibration-rows", "2"]].concat());
    let said = String::from_utf8_lossy(&out.stderr);
    let rows = d.join("m/demo.tsv").display().to_string();
    assert!(out.status.success() && said.contains("measured on 2 sequences"), "{said}");
    assert!(said.contains(&format!(" of the training rows, {rows}")), "{said}");
    fs::rename(d.join("m/demo.tsv"), d.join("m/elsewhere.tsv")).unwrap();
    let out = run(d, &[&w4a4[..], &["--overwrite"]].concat());
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.code() == Some(2) && said.contains("demo.tsv: no such file"), "{said}");
    assert!(said.contains("the scales of activations must be measured"), "{said}");
    fs::rename(d.join("m/elsewhere.tsv"), d.join("m/demo.tsv")).unwrap();
    ok(d, &[&fit[..9], &["--recipe", "bf16", "-o", "s", "--train-last-layers", "1", "--device", "cpu"]].concat());
    ok(d, &["export-hf", "-m", "s/final/model.safetensors", "-o", "c", "--device", "cpu"]);
    let of_last = fs::read_to_string(d.join("c/README.md")).unwrap();
    assert!(
        of_last.contains("# s\n") && of_last.contains("The last 1 block and the final norm were trained"),
        "{of_last}"
    );
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
        ("mine", &["--overwrite"], "train-cli did not export it"),
        ("m", &["--overwrite"], "the model is read from there"),
        ("file", &[], "--output-dir file: this is a file; give a folder"),
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
    // A link stands for the folder that it leads to, and one that leads nowhere is refused before the work.
    fs::create_dir(d.join("disk")).unwrap();
    std::os::unix::fs::symlink("disk", d.join("link")).unwrap();
    std::os::unix::fs::symlink("nowhere", d.join("dangling")).unwrap();
    for flags in [&[][..], &["--overwrite"]] {
        ok(d, &[&export[..], &["link"], flags].concat());
        assert!(d.join("link").is_symlink() && d.join("disk/model.safetensors").exists());
    }
    let said = refused(d, &[&export[..], &["dangling"]].concat(), 2);
    assert!(said.contains("--output-dir dangling: this is a link that leads nowhere; give a folder"), "{said}");
    let said = refused(d, &[&export[..], &[&"n".repeat(240)]].concat(), 2);
    assert!(said.contains("the name has more than 225 bytes"), "{said}");
}

/// What a run has made stays, by whatever path it is named.
#[test]
fn a_checkpoint_and_the_export_of_a_run_are_never_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let fit = ["fit", "-m", "m", "-d", "m/demo.tsv", "--max-seq-length", "64", "--max-steps", "2", "-o", "r"];
    ok(d, &[&fit[..], &["--eval-steps", "0", "--device", "cpu"]].concat());
    std::os::unix::fs::symlink("r/checkpoint-2", d.join("link")).unwrap();
    for (model, out, reason) in [
        ("m", "r/checkpoint-2", "it is a part of a run"),
        ("m", "link", "it is a part of a run"),
        ("m", "r/checkpoint-4", "it is a part of a run"),
        ("r/checkpoint-2", "r/final", "it is a part of a run"),
        ("m", "r/checkpoint-2/hf", "r/checkpoint-2 is a checkpoint or an export"),
        ("m", "link/hf", "link is a checkpoint or an export"),
        ("m", "r/final/hf", "r/final is a checkpoint or an export"),
    ] {
        let said = refused(d, &["export-hf", "-m", model, "--device", "cpu", "--overwrite", "-o", out], 2);
        assert!(said.contains(reason), "{out}: {said}");
    }
    for kept in ["r/checkpoint-2", "r/final"] {
        ok(d, &["inspect", kept, "--verify"]);
    }
}

/// Copies a folder that `export-hf` wrote in a library's format, and gives the input of each NVFP4 layer a tensor scale, as the
/// library does for W4A4. `value` is what its file holds: the scale itself, or for compressed-tensors its reciprocal.
fn with_input_scales(from: &Path, to: &Path, library: &str, value: f32) {
    let (key, shape) = match library {
        "modelopt" => ("input_scale", serde_json::json!([])),
        _ => ("input_global_scale", serde_json::json!([1])),
    };
    with_numbers(from, to, |layers| {
        assert_eq!(layers.len(), 14, "{layers:?}");
        layers.iter().map(|layer| (format!("{layer}.{key}"), shape.clone(), value)).collect()
    });
}

/// Copies such a folder, and adds f32 tensors of one number to its file: those that `added` makes of the names of the NVFP4 layers.
fn with_numbers(from: &Path, to: &Path, added: impl Fn(&[String]) -> Vec<(String, Value, f32)>) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        // The manifest would refuse the changed weights.
        if entry.file_name() != "manifest.json" {
            fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
    let path = to.join("model.safetensors");
    let file = fs::read(&path).unwrap();
    let length = usize::try_from(u64::from_le_bytes(file[..8].try_into().unwrap())).unwrap();
    let mut header: serde_json::Map<String, Value> = serde_json::from_slice(&file[8..8 + length]).unwrap();
    let mut payload = file[8 + length..].to_vec();
    let layers: Vec<String> =
        header.keys().filter_map(|key| Some(key.strip_suffix(".weight_scale")?.to_owned())).collect();
    for (key, shape, value) in added(&layers) {
        let offsets = [payload.len(), payload.len() + 4];
        let entry = serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": offsets});
        header.insert(key, entry);
        payload.extend(value.to_le_bytes());
    }
    let header = Value::Object(header).to_string();
    fs::write(path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &payload].concat()).unwrap();
}

/// The logits of a folder's model for a few tokens.
fn logits(folder: &Path, recipe: Recipe) -> Vec<f32> {
    let config = Qwen3Config::from_file(&folder.join("config.json")).unwrap();
    logits_of(&Container::open(folder).unwrap(), &config, recipe)
}

/// The logits of a model of these tensors for a few tokens.
pub(crate) fn logits_of(tensors: &dyn Tensors, config: &Qwen3Config, recipe: Recipe) -> Vec<f32> {
    let spec = LinearSpec::new(recipe, Scaling::Two, Precision::F32).each_row();
    let device = Default::default();
    let model: Qwen3<Cpu> = weights::load(tensors, config, spec, Purpose::Infer, &device).unwrap();
    let ids = ids_tensor(&[(1..25).collect()], config, &device).unwrap();
    to_host(model.logits(model.forward(ids, |_| {}))).unwrap()
}

fn distance(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt()
}

/// What is made of a folder with scales of activations has them too, or the program says that it has none. `fits` are the logits of
/// the folder's model.
fn scales_go_where_there_is_a_place_for_them(d: &Path, library: &str, wide: &str, fits: &[f32]) {
    // An export for either library carries the scales over.
    let given = |folder: &str| -> Vec<f32> {
        let file = Container::open(&d.join(folder)).unwrap();
        let mut names = file.names();
        names.sort();
        names.iter().filter_map(|name| Some(file.input_scale(name).unwrap()?.scale())).collect()
    };
    let export = ["export-hf", "-m", wide, "--device", "cpu"];
    for (format, flags) in [("compressed-tensors", &[][..]), ("modelopt", &["--activations", "nvfp4"])] {
        let out = format!("{library}-kept-{format}");
        ok(d, &[&export[..], &["-o", &out, "--format", format], flags].concat());
        assert_eq!((given(&out).len(), given(&out)), (14, given(wide)), "{out}");
        if format == library {
            assert_eq!(logits(&d.join(&out), Recipe::W4a4), fits, "{out}");
        }
        let config: Value = serde_json::from_slice(&fs::read(d.join(&out).join("config.json")).unwrap()).unwrap();
        let group = &config["quantization_config"]["config_groups"]["group_0"];
        assert_eq!(group["input_activations"]["num_bits"], 4, "{out}");
        let card = fs::read_to_string(d.join(&out).join("README.md")).unwrap();
        assert!(card.contains("activations are NVFP4 too, with tensor scales that the model gave"), "{card}");
    }
    // What else is made of such a folder has no scales, and the program says so.
    let back = format!("{library}-back");
    let fit = ["fit", "-m", wide, "-d", "m/demo.tsv", "--max-seq-length", "64", "--max-steps", "1", "-o", "fitted"];
    for words in [
        [&export[..], &["-o", &back, "--format", library, "--activations", "bf16"]].concat(),
        [&export[..], &["-o", "dense", "--overwrite"]].concat(),
        [&fit[..], &["--device", "cpu", "--overwrite"]].concat(),
        vec!["export-dat", "-m", wide, "--output-dat", "x.dat", "--device", "cpu", "--overwrite"],
    ] {
        let out = run(d, &words);
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success() && stderr.contains("give the scales of activations"), "{words:?}: {stderr}");
    }
    assert!(given(&back).is_empty());
}

/// llm-compressor and nvidia-modelopt put scales for an 8-bit cache beside the weights. They change nothing, and the program says
/// that it does not use them. A number that would change something is refused.
#[test]
fn scales_of_an_8_bit_cache_are_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    for (library, keys) in [
        ("compressed-tensors", ["self_attn.k_scale", "self_attn.v_scale"]),
        ("modelopt", ["self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"]),
    ] {
        ok(d, &["export-hf", "-m", "m", "-o", library, "--format", library, "--device", "cpu"]);
        let (plain, scaled) = (d.join(library), d.join(format!("{library}-8")));
        let numbers = |keys: &[&str]| -> Vec<_> {
            let of = |key: &&str| (format!("model.layers.0.{key}"), serde_json::json!([1]), 0.5);
            keys.iter().map(of).collect()
        };
        with_numbers(&plain, &scaled, |_| numbers(&keys));
        assert_eq!(Container::open(&scaled).unwrap().names(), Container::open(&plain).unwrap().names());
        assert_eq!(logits(&scaled, Recipe::W4), logits(&plain, Recipe::W4));
        let folder = scaled.to_str().unwrap();
        for command in [
            &["generate", "-m", folder, "-p", "Who?", "--raw", "--max-new-tokens", "2", "--device", "cpu"][..],
            &["convert", folder, "copy.dat", "--dtype", "nvfp4", "--overwrite"],
        ] {
            let out = run(d, command);
            let stderr = String::from_utf8_lossy(&out.stderr);
            let note = "note: the model's files have 2 scales for a KV cache in 8 bits, which are not used";
            assert!(out.status.success() && stderr.contains(note), "{command:?}: {stderr}");
        }
        let other = d.join(format!("{library}-other"));
        with_numbers(&plain, &other, |_| numbers(&["self_attn.o_proj.pre_quant_scale"]));
        let said = refused(d, &["generate", "-m", other.to_str().unwrap(), "-p", "Who?", "--device", "cpu"], 6);
        assert!(
            said.contains("a tensor that this model does not have: model.layers.0.self_attn.o_proj.pre_quant"),
            "{said}"
        );
    }
}

/// Training begins with the values that the library itself decodes: compressed-tensors divides by the reciprocal of the tensor
/// scale, which rounds some values in another way.
#[test]
fn training_begins_with_the_values_of_the_library() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    for library in ["compressed-tensors", "modelopt"] {
        ok(d, &["export-hf", "-m", "m", "-o", library, "--format", library, "--device", "cpu"]);
        let file = Container::open(&d.join(library)).unwrap();
        let config = Qwen3Config::from_file(&d.join(library).join("config.json")).unwrap();
        let (spec, device) = (LinearSpec::new(Recipe::W4, Scaling::Two, Precision::F32), Default::default());
        let model: Qwen3<Cpu> = weights::load(&file, &config, spec, Purpose::Train(MasterKind::F32), &device).unwrap();
        let (live, mut differ) = (weights::Live::new(&model), 0);
        for name in file.names() {
            let Some(Stored::Packed { rows, cols, .. }) = file.stored(&name) else { continue };
            let expected = file.dequantize_rows(&name, 0..rows).unwrap();
            let multiplied = reference::dequantize(&file.read_packed(&name).unwrap(), rows, cols);
            differ += expected.iter().zip(&multiplied).filter(|(a, b)| a != b).count();
            assert!(live.read_rows(&name, 0..rows).unwrap() == expected, "{library}: {name}");
        }
        assert_eq!(differ > 0, library == "compressed-tensors", "{library}: {differ}");
    }
}

#[test]
fn activations_have_the_scales_that_a_folder_gives_them() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let golden: Value = serde_json::from_slice(&golden_bytes("foreign/activations.json")).unwrap();
    let mut of_libraries = vec![];
    for library in ["compressed-tensors", "modelopt"] {
        ok(d, &["export-hf", "-m", "m", "-o", library, "--format", library, "--device", "cpu"]);
        let plain = d.join(library);
        // 2^-8 scales magnitudes up to 10.5, and 2^-14 only those up to 0.16.
        let [wide, narrow] = [256.0, 16384.0].map(|reciprocal| {
            let folder = d.join(format!("{library}-{reciprocal}"));
            let value = if library == "modelopt" { 1.0 / reciprocal } else { reciprocal };
            with_input_scales(&plain, &folder, library, value);
            folder
        });
        assert_eq!(Container::open(&wide).unwrap().names(), Container::open(&plain).unwrap().names());
        // The library itself gives its tensors these keys, types and shapes.
        let mut given = tensors_of(&fs::read(wide.join("model.safetensors")).unwrap());
        given.retain(|key, _| key.contains(".input_scale") || key.contains(".input_global"));
        assert_eq!(given.len(), 14, "{library}: {given:?}");
        for (key, ours) in given {
            let theirs = &golden["keys"][library][&key];
            assert_eq!([&ours[0], &ours[1]], [&theirs[0], &theirs[1]], "{library}: {key}");
        }

        // Without quantized activations the scales have no effect.
        let exact = logits(&plain, Recipe::W4);
        assert_eq!(logits(&wide, Recipe::W4), exact);
        // A scale that all values fit rounds about as much as a scale of each row; one that clips rounds more.
        let rows = distance(&logits(&plain, Recipe::W4a4), &exact);
        let (fits, clips) = (logits(&wide, Recipe::W4a4), logits(&narrow, Recipe::W4a4));
        let (fitting, clipping) = (distance(&fits, &exact), distance(&clips, &exact));
        assert!(fitting > 0.5 * rows && fitting < 2.0 * rows, "{library}: {fitting}, a scale of each row {rows}");
        assert!(clipping > 2.0 * fitting, "{library}: {clipping} and {fitting}");
        of_libraries.push(fits);

        // The program uses them unless it is told otherwise.
        let wide = wide.file_name().unwrap().to_str().unwrap();
        let generate = ["generate", "-m", wide, "-p", "Who?", "--raw", "--max-new-tokens", "2", "--device", "cpu"];
        for (flags, label) in
            [(&[][..], "activations nvfp4 with the scales of the file"), (&["--w4a4", "false"], "not quantized")]
        {
            let out = run(d, &[&generate[..], flags].concat());
            let stderr = String::from_utf8_lossy(&out.stderr);
            assert!(out.status.success() && stderr.contains(label), "{library} {flags:?}: {stderr}");
        }

        scales_go_where_there_is_a_place_for_them(d, library, wide, of_libraries.last().unwrap());

        let zero = d.join(format!("{library}-zero"));
        with_input_scales(&plain, &zero, library, 0.0);
        let refused = Container::open(&zero).unwrap();
        let name = "model.layers.0.self_attn.q_proj.weight";
        let message = refused.input_scale(name).unwrap_err().to_string();
        assert!(message.contains(name) && message.contains("is 0; a positive number is needed"), "{message}");
    }
    // Both give the same scales; their weights differ in their last bits.
    let size = distance(&of_libraries[0], &vec![0.0; of_libraries[0].len()]);
    assert!(distance(&of_libraries[0], &of_libraries[1]) < 1e-5 * size);
}

/// The file of one library holds a scale, that of the other one its reciprocal. The reciprocals of these values are rounded, so
/// that their own reciprocals are other numbers.
#[test]
fn scales_of_activations_go_from_one_library_to_the_other() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    for (library, other, value) in
        [("compressed-tensors", "modelopt", 250.0f32), ("modelopt", "compressed-tensors", 0.0035)]
    {
        assert_ne!(1.0 / (1.0 / value), value, "{library}: this value is no case");
        ok(d, &["export-hf", "-m", "m", "-o", library, "--format", library, "--device", "cpu"]);
        let (given, kept) = (format!("{library}-given"), format!("{library}-kept"));
        with_input_scales(&d.join(library), &d.join(&given), library, value);
        ok(d, &["export-hf", "-m", &given, "-o", &kept, "--format", other, "--device", "cpu"]);
        let file = Container::open(&d.join(&kept)).unwrap();
        let scales: Vec<_> = file.names().iter().filter_map(|name| file.input_scale(name).unwrap()).collect();
        let held = |scale: &GivenScale| if other == "modelopt" { scale.scale() } else { scale.reciprocal() };
        assert_eq!(scales.iter().map(held).collect::<Vec<_>>(), vec![1.0 / value; 14], "{library}");
    }
}

#[test]
fn a_given_scale_quantizes_as_compressed_tensors_does() {
    let golden: Value = serde_json::from_slice(&golden_bytes("foreign/activations.json")).unwrap();
    let floats = |hex: &Value| -> Vec<f32> {
        let hex = hex.as_str().unwrap();
        let float = |at| f32::from_bits(u32::from_str_radix(&hex[at..at + 8], 16).unwrap().swap_bytes());
        (0..hex.len()).step_by(8).map(float).collect()
    };
    let (x, cols) = (floats(&golden["values"]), usize::try_from(golden["columns"].as_u64().unwrap()).unwrap());
    let rounded = golden["rounded"].as_object().unwrap();
    assert_eq!((rounded.len(), x.len()), (3, 8 * cols));
    for (reciprocal, expected) in rounded {
        let ours = reference::rounded_by(&x, cols, reciprocal.parse().unwrap());
        for (i, (a, b)) in ours.iter().zip(floats(expected)).enumerate() {
            // Products are rounded in another order.
            assert!((a - b).abs() <= 3e-7 * b.abs(), "{reciprocal}, value {i}, {}: {a}, expected {b}", x[i]);
        }
    }
}
