//! `export-hf --activations nvfp4`: folders for 4-bit weights and 4-bit activations. Their tensors and their config are those that
//! compressed-tensors and nvidia-modelopt themselves write (`golden/foreign/w4a4.json`), the scales of activations come from the
//! model's own forward, and a folder that is read back computes what the model in memory does.

use crate::{
    foreign::logits_of,
    support::{
        Cpu,
        files::{ok, run, tensors_of, tiny_model},
        golden, golden_bytes,
    },
};
use backend_nvfp4::{GivenScale, LinearSpec, Nvfp4Linear, PackedWeight, Precision, Recipe, Scaling};
use model_qwen3::{
    ModelError,
    bytes::FloatType,
    calibration::InputMaxima,
    config::Qwen3Config,
    container::Container,
    foreign::{Foreign, Library},
    model::{Qwen3, ids_tensor},
    names,
    repack::{Repacked, StoreAs},
    session::Session,
    tensors::{Stored, Tensors},
    weights::{self, Purpose, to_host},
    write::{write_safetensors, write_shard},
};
use serde_json::Value;
use std::{collections::BTreeMap, fs, path::Path, sync::Arc};
use train_cli::{
    data::{
        format::RowOptions,
        read::{self, DataOptions},
    },
    model_files::TextFiles,
    settings::{LossOn, Overlong},
};

const LIBRARIES: [(&str, Library); 2] =
    [("compressed-tensors", Library::CompressedTensors), ("modelopt", Library::ModelOpt)];
const MODELS: [&str; 2] = ["tiny-tied", "tiny-untied"];

fn w4a4() -> Value {
    serde_json::from_slice(&golden_bytes("foreign/w4a4.json")).unwrap()
}

/// The largest magnitudes of inputs in the golden file, by the names of weights.
fn golden_maxima(of_model: &Value) -> BTreeMap<String, f32> {
    let float = |hex: &Value| f32::from_bits(u32::from_str_radix(hex.as_str().unwrap(), 16).unwrap().swap_bytes());
    let maxima = of_model["maxima"].as_object().unwrap().iter();
    maxima.map(|(layer, hex)| (format!("{layer}.weight"), float(hex))).collect()
}

/// A tiny model of transformers with its weights in bf16, in `folder`.
fn in_bf16(name: &str, folder: &Path) -> Container {
    let source = Container::open(&golden("hf-qwen3").join(name)).unwrap();
    let path = folder.join(format!("{name}.safetensors"));
    let failed = |e| ModelError::Io { path: path.clone(), source: e };
    let rounded = Repacked::new(&source, StoreAs::Float(FloatType::Bf16));
    write_safetensors(&rounded, fs::File::create(&path).unwrap(), failed).unwrap();
    Container::open(&path).unwrap()
}

/// What the linear layers of a model read in these rows, in f32 and without quantization.
fn measured(tensors: &dyn Tensors, config: &Qwen3Config, rows: &[Vec<u32>]) -> BTreeMap<String, f32> {
    let (spec, device) = (LinearSpec::new(Recipe::W4, Scaling::Two, Precision::F32).each_row(), Default::default());
    let model: Qwen3<Cpu> = weights::load(tensors, config, spec, Purpose::Infer, &device).unwrap();
    let inputs = Arc::new(InputMaxima::default());
    for row in rows {
        let ids = || ids_tensor(std::slice::from_ref(row), config, &device).unwrap();
        let watched = to_host(model.calibrate(ids(), inputs.clone())).unwrap();
        assert_eq!(watched, to_host(model.forward(ids(), |_| {})).unwrap(), "who watches changes nothing");
    }
    inputs.by_weight().unwrap()
}

#[test]
fn w4a4_has_the_bytes_of_compressed_tensors_and_of_modelopt() {
    let golden = w4a4();
    let dir = tempfile::tempdir().unwrap();
    let failed = |e| ModelError::Io { path: dir.path().into(), source: e };
    for name in MODELS {
        let source = in_bf16(name, dir.path());
        let amax = golden_maxima(&golden[name]);
        for (library, format) in LIBRARIES {
            let tensors = Foreign::new(&source, format, usize::MAX).with_inputs(&amax).unwrap();
            let bytes = write_shard(&tensors, &tensors.names(), format.spelling(), Vec::new(), failed).unwrap();
            let (ours, theirs) = (tensors_of(&bytes), golden[name][library]["tensors"].as_object().unwrap());
            let given =
                theirs.keys().filter(|key| key.ends_with(".input_scale") || key.ends_with(".input_global_scale"));
            assert_eq!(given.count(), amax.len(), "{name} {library}");
            assert_eq!(ours.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>(), "{name} {library}");
            for (key, theirs) in theirs {
                assert_eq!(&ours[key], theirs, "{name} {library}: {key}");
            }
        }
    }
}

#[test]
fn the_model_measures_the_inputs_that_transformers_measures() {
    let golden = w4a4();
    let dir = tempfile::tempdir().unwrap();
    let rows: Vec<Vec<u32>> = serde_json::from_value(golden["rows"].clone()).unwrap();
    for name in MODELS {
        let config =
            Qwen3Config::from_file(&crate::support::golden("hf-qwen3").join(name).join("config.json")).unwrap();
        let (ours, theirs) = (measured(&in_bf16(name, dir.path()), &config, &rows), golden_maxima(&golden[name]));
        assert_eq!(ours.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>(), "{name}");
        for (layer, theirs) in &theirs {
            // Both compute in f32, and sum in other orders.
            assert!((ours[layer] / theirs - 1.0).abs() < 4e-6, "{name} {layer}: {} and {theirs}", ours[layer]);
        }
    }
}

#[test]
fn layers_that_are_multiplied_together_share_the_largest_scale() {
    let dir = tempfile::tempdir().unwrap();
    let source = in_bf16("tiny-tied", dir.path());
    let mut amax = golden_maxima(&w4a4()["tiny-tied"]);
    let scale = |amax: &BTreeMap<String, f32>, part: &str| {
        let foreign = Foreign::new(&source, Library::ModelOpt, usize::MAX).with_inputs(amax);
        foreign.map(|tensors| tensors.input_scale(&format!("model.layers.1.{part}.weight")).unwrap().unwrap().scale())
    };
    amax.insert("model.layers.1.self_attn.v_proj.weight".into(), 1344.0);
    for part in ["q_proj", "k_proj", "v_proj"] {
        assert_eq!(scale(&amax, &format!("self_attn.{part}")), Ok(0.5), "{part}");
    }
    assert_ne!(scale(&amax, "self_attn.o_proj"), Ok(0.5));
    // What has no scale is refused by its name.
    for wrong in [Some(0.0), Some(f32::NAN), Some(f32::INFINITY), None] {
        let mut amax = golden_maxima(&w4a4()["tiny-tied"]);
        let name = "model.layers.2.mlp.down_proj.weight".to_owned();
        amax.remove(&name);
        amax.extend(wrong.map(|value| (name.clone(), value)));
        assert_eq!(scale(&amax, "self_attn.o_proj"), Err(name), "{wrong:?}");
    }
}

/// The sequences that the files of a calibration make.
fn rows_of(model: &Path, data: &str, count: usize) -> Vec<Vec<u32>> {
    let config = Qwen3Config::from_file(&model.join("config.json")).unwrap();
    let text = TextFiles::open(model, &config).unwrap();
    let (loss_on, overlong, rows) = (LossOn::default(), Overlong::Split, RowOptions::default());
    let options = DataOptions { format: None, loss_on, max_seq_length: 2048, overlong, rows };
    let (samples, _) = read::load(&[model.join(data)], &text, &options).unwrap();
    samples.into_iter().take(count).map(|sample| sample.ids).collect()
}

fn read(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn a_folder_with_4_bit_activations_is_the_model_in_memory_with_these_scales() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let golden = w4a4();
    for (name, tied) in MODELS.into_iter().zip([true, false]) {
        tiny_model(&d.join(name), tied);
        let config = Qwen3Config::from_file(&d.join(name).join("config.json")).unwrap();
        let source = Container::open(&d.join(name)).unwrap();
        let amax = measured(&source, &config, &rows_of(&d.join(name), "demo.tsv", 5));
        for (library, format) in LIBRARIES {
            let (out, data) = (format!("{name}-{library}"), format!("{name}/demo.tsv"));
            let export = ["export-hf", "-m", name, "-o", &out, "--format", library, "--device", "cpu"];
            let calibrate = ["--activations", "nvfp4", "--calibration-data", &data, "--calibration-rows", "5"];
            let done = run(d, &[&export[..], &calibrate].concat());
            let stderr = String::from_utf8_lossy(&done.stderr);
            assert!(done.status.success() && stderr.contains("measured on 5 sequences"), "{stderr}");

            // The config is the library's own.
            let folder = d.join(&out);
            let without_producer = |mut value: Value| {
                value["producer"] = Value::Null;
                value
            };
            let theirs = &golden[name][library];
            let ours = read(&folder.join("config.json"))["quantization_config"].clone();
            assert_eq!(without_producer(ours), without_producer(theirs["quantization_config"].clone()), "{out}");
            if format == Library::ModelOpt {
                let ours = without_producer(read(&folder.join("hf_quant_config.json")));
                assert_eq!(ours, without_producer(theirs["hf_quant_config"].clone()), "{out}");
            }

            // Each layer has the scale of what it reads in these rows.
            let back = Container::open(&folder).unwrap();
            assert_eq!(amax.len(), 14);
            for (layer, amax) in &amax {
                let given = back.input_scale(layer).unwrap().unwrap();
                match format {
                    Library::ModelOpt => assert_eq!(given.scale(), amax / 2688.0, "{out}: {layer}"),
                    Library::CompressedTensors => assert_eq!(given.reciprocal(), 1.0 / amax * 2688.0, "{out}: {layer}"),
                }
            }

            // The model in memory, whose weights know nothing of these scales, computes the same with them.
            let plain = Foreign::new(&source, format, usize::MAX);
            let (found, expected) =
                (logits_of(&back, &config, Recipe::W4a4), logits_with(&plain, &config, &amax, format));
            assert_eq!(found, expected, "{out}");
            assert_ne!(found, logits_of(&plain, &config, Recipe::W4a4), "{out}: scales of each row");
            let generate = ["generate", "-m", &out, "-p", "Who?", "--raw", "--max-new-tokens", "2", "--device", "cpu"];
            let stderr = String::from_utf8_lossy(&run(d, &generate).stderr).into_owned();
            assert!(stderr.contains("activations nvfp4 with the scales of the file"), "{out}: {stderr}");
            let card = fs::read_to_string(folder.join("README.md")).unwrap();
            assert!(card.contains("activations are NVFP4 too, with tensor scales that 5 sequences"), "{card}");
        }
    }
}

/// The logits of a model whose layers are given the scales of activations by hand.
fn logits_with(tensors: &dyn Tensors, config: &Qwen3Config, amax: &BTreeMap<String, f32>, format: Library) -> Vec<f32> {
    let (spec, device) = (LinearSpec::new(Recipe::W4a4, Scaling::Two, Precision::F32).each_row(), Default::default());
    let mut model: Qwen3<Cpu> = weights::load(tensors, config, spec, Purpose::Infer, &device).unwrap();
    let calibrated = |layer: &Nvfp4Linear<Cpu>, name: String| {
        let Nvfp4Linear::Packed(PackedWeight { weight, input: None }) = layer.clone() else {
            panic!("{name} is not NVFP4, or has a scale already")
        };
        let input = match format {
            Library::ModelOpt => GivenScale::of_scale(amax[&name] / 2688.0),
            Library::CompressedTensors => GivenScale::of_reciprocal(1.0 / amax[&name] * 2688.0),
        };
        Nvfp4Linear::Packed(PackedWeight { weight, input: Some(input.unwrap()) })
    };
    for (i, block) in model.layers.iter_mut().enumerate() {
        let (a, m) = (&mut block.self_attn, &mut block.mlp);
        for (part, layer) in [
            ("self_attn.q_proj", &mut a.q_proj),
            ("self_attn.k_proj", &mut a.k_proj),
            ("self_attn.v_proj", &mut a.v_proj),
            ("self_attn.o_proj", &mut a.o_proj),
            ("mlp.gate_proj", &mut m.gate_proj),
            ("mlp.up_proj", &mut m.up_proj),
            ("mlp.down_proj", &mut m.down_proj),
        ] {
            *layer = calibrated(layer, format!("model.layers.{i}.{part}.weight"));
        }
    }
    let ids = ids_tensor(&[(1..25).collect()], config, &device).unwrap();
    to_host(model.logits(model.forward(ids, |_| {}))).unwrap()
}

#[test]
fn a_run_is_calibrated_as_it_runs_and_its_dense_blocks_get_no_scales() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let fit = ["fit", "-m", "m", "-d", "m/demo.tsv", "--max-seq-length", "64", "--max-steps", "2", "-o", "r"];
    ok(d, &[&fit[..], &["--recipe", "w4", "--bf16-last-blocks", "1", "--device", "cpu"]].concat());
    let config = Qwen3Config::from_file(&d.join("r/final/config.json")).unwrap();
    let amax = measured(&Container::open(&d.join("r/final")).unwrap(), &config, &rows_of(&d.join("m"), "demo.tsv", 3));
    // A checkpoint holds dense weights, and runs with those of its export. Its embedding and its norms are not rounded.
    for (model, close) in [("r/final", 0.0), ("r/checkpoint-2", 0.01)] {
        let export = ["export-hf", "--overwrite", "-m", model, "-o", "out", "--format", "modelopt", "--device", "cpu"];
        let calibrate = ["--activations", "nvfp4", "--calibration-data", "m/demo.tsv", "--calibration-rows", "3"];
        ok(d, &[&export[..], &calibrate].concat());
        let back = Container::open(&d.join("out")).unwrap();
        for name in back.names().iter().filter(|name| names::is_projection(name)) {
            let given = back.input_scale(name).unwrap().map(GivenScale::scale);
            if name.starts_with("model.layers.1.") {
                assert!(matches!(back.stored(name), Some(Stored::Dense { .. })) && given.is_none(), "{model} {name}");
            } else {
                let (given, expected) = (given.unwrap(), amax[name] / 2688.0);
                assert!((given / expected - 1.0).abs() <= close, "{model} {name}: {given}, expected {expected}");
            }
        }
        // It answers with 4-bit activations.
        let text = TextFiles::open(&d.join("out"), &config).unwrap();
        let spec = LinearSpec::new(Recipe::W4a4, Scaling::Two, Precision::F32).each_row();
        let model: Qwen3<Cpu> = weights::load(&back, &config, spec, Purpose::Infer, &Default::default()).unwrap();
        let prompt = text.tokenizer.encode("Who are you?").unwrap();
        assert!(Session::new(&model, prompt.len()).unwrap().read(&prompt).unwrap().iter().all(|x| x.is_finite()));
    }
}

#[test]
fn no_more_sequences_are_read_than_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let mut config = read(&d.join("m/config.json"));
    config["max_position_embeddings"] = 128.into();
    fs::write(d.join("m/config.json"), config.to_string()).unwrap();
    // One document, which is cut into more sequences than the model is to read.
    fs::write(d.join("long.txt"), "What a row makes, and no more: 1, 2, 3. ".repeat(40)).unwrap();
    let export = ["export-hf", "--overwrite", "-m", "m", "-o", "out", "--format", "modelopt", "--device", "cpu"];
    let calibrate = ["--activations", "nvfp4", "--calibration-data", "long.txt", "--calibration-rows", "2"];
    let done = run(d, &[&export[..], &calibrate].concat());
    let stderr = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success() && stderr.contains("measured on 2 sequences, 256 tokens"), "{stderr}");
    // A model without a run has no rows of its own.
    let done = run(d, &[&export[..], &calibrate[..2]].concat());
    let stderr = String::from_utf8_lossy(&done.stderr);
    let said = "--activations nvfp4: the scales of activations must be measured; name files";
    assert!(done.status.code() == Some(2) && stderr.contains(said), "{stderr}");
    // By default there are more.
    let done = run(d, &[&export[..], &calibrate[..4]].concat());
    let stderr = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success() && !stderr.contains("measured on 2 sequences"), "{stderr}");
}

#[test]
fn flags_of_a_calibration_that_do_not_fit_are_refused_before_anything_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    // There is no such model, and no such file.
    let export = ["export-hf", "-m", "none", "-o", "out", "--device", "cpu"];
    let (nvfp4, data) = (["--activations", "nvfp4"], ["--calibration-data", "none.tsv"]);
    for (flags, reason) in [
        ([&nvfp4[..], &data].concat(), "--activations nvfp4: --format bf16 describes no 4-bit activations"),
        ([&nvfp4[..], &data, &["--format", "bf16"]].concat(), "give --format compressed-tensors or --format modelopt"),
        (
            [&data[..], &["--format", "modelopt"]].concat(),
            "--calibration-data: activations are measured only if --activations nvfp4",
        ),
        (
            vec!["--format", "modelopt", "--calibration-rows", "5"],
            "--calibration-rows: activations are measured only if --activations nvfp4",
        ),
        ([&nvfp4[..], &data, &["--format", "modelopt", "--calibration-rows", "0"]].concat(), "--calibration-rows"),
        ([&nvfp4[..], &data, &["--format", "modelopt"]].concat(), "none: no such file"),
    ] {
        let done = run(d, &[&export[..], &flags].concat());
        let stderr = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.code() == Some(2) && stderr.contains(reason), "{flags:?}: {stderr}");
    }
    assert!(!d.join("out").exists());
}

/// A model's tensors with some of zeros.
struct Zeroed(Container, &'static str);

impl Tensors for Zeroed {
    fn path(&self) -> &Path {
        self.0.path()
    }

    fn names(&self) -> Vec<String> {
        self.0.names()
    }

    fn stored(&self, name: &str) -> Option<Stored> {
        self.0.stored(name)
    }

    fn read_rows(&self, name: &str, rows: std::ops::Range<usize>) -> Result<Vec<f32>, ModelError> {
        let factor = if name == self.1 { 0.0 } else { 1.0 };
        Ok(self.0.read_rows(name, rows)?.into_iter().map(|value| value * factor).collect())
    }

    fn read_packed(&self, name: &str) -> Result<backend_nvfp4::Packed, ModelError> {
        self.0.read_packed(name)
    }
}

#[test]
fn rows_that_give_a_layer_no_scale_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    // The norm before the MLP of the second block makes zeros of everything.
    let zeroed = Zeroed(Container::open(&d.join("m")).unwrap(), "model.layers.1.post_attention_layernorm.weight");
    let path = d.join("model.safetensors");
    let failed = |e| ModelError::Io { path: path.clone(), source: e };
    write_safetensors(&zeroed, fs::File::create(&path).unwrap(), failed).unwrap();
    fs::rename(&path, d.join("m/model.safetensors")).unwrap();
    let export = ["export-hf", "-m", "m", "-o", "out", "--format", "modelopt", "--device", "cpu"];
    let done = run(d, &[&export[..], &["--activations", "nvfp4", "--calibration-data", "m/demo.tsv"]].concat());
    let stderr = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.code() == Some(3) && stderr.contains("give other rows"), "{stderr}");
    assert!(stderr.contains("m/demo.tsv: ") && stderr.contains("model.layers.1.mlp."), "{stderr}");
    assert!(!d.join("out").exists());
}
