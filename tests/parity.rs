//! The model computes what Hugging Face's computes, in f32 on the CPU and on the GPU: logits, hidden states, loss, every
//! gradient, greedy tokens, and 20 steps of AdamW.

use crate::support::{
    Gpu,
    files::{ok, run, tiny_model_with_spread},
    golden, gpu,
    scripted::{read_tensors, write_tensors},
    skipped,
};
use backend_nvfp4::Precision;
use model_qwen3::config::Qwen3Config;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::Value;
use std::path::Path;
use train_cli::{
    commands::parity::{Comparison, Parity},
    device,
    settings::DeviceChoice,
};

fn compare(fixture: &str, device: DeviceChoice, precision: Precision) -> Comparison {
    let folder = golden(&format!("hf-qwen3/{fixture}"));
    let expected = folder.join("expected.safetensors");
    let job = Parity { model: &folder, tokenizer: None, expected: &expected, dump: None };
    device::run(device, Some(precision), job).unwrap()
}

fn check_f32(fixture: &str, device: DeviceChoice) {
    let found = compare(fixture, device, Precision::F32);
    let mut kinds = [0; 5];
    for d in &found.differences {
        let (kind, value, bound) = match d.key.as_str() {
            "logits" => (0, d.max, 1e-4),
            "loss" => (1, d.max, 1e-5),
            "train.losses" | "train.grad_norms" => (2, d.max, 1e-3),
            k if k.starts_with("hidden.") => (3, d.max, 1e-4),
            k if k.starts_with("grad.") => (4, d.frobenius, 1e-3),
            k => panic!("unexpected key {k}"),
        };
        kinds[kind] += 1;
        assert!(value < bound, "{fixture} on {device}: {} differs by {value:e}, bound {bound:e}", d.key);
    }
    assert!(kinds.iter().all(|&n| n > 0), "compared: {kinds:?}");
    assert_eq!(found.greedy, Some((48, 48)), "{fixture} on {device}: greedy tokens");
}

#[test]
fn the_cpu_computes_what_hugging_face_computes() {
    check_f32("tiny-tied", DeviceChoice::Cpu);
    check_f32("tiny-untied", DeviceChoice::Cpu);
}

#[test]
fn the_gpu_computes_what_hugging_face_computes() {
    let device = match gpu() {
        Gpu::Vulkan => DeviceChoice::Vulkan,
        Gpu::Cuda => DeviceChoice::Cuda(0),
        Gpu::Missing => return skipped(),
    };
    check_f32("tiny-tied", device);
    check_f32("tiny-untied", device);
    if let Gpu::Cuda = gpu() {
        tensor_cores(device);
    }
}

/// Compares in TF32, which keeps 11 significant bits (2^-11 = 4.9e-4 a rounding), and in bf16, which keeps 8 (2^-8 =
/// 3.9e-3). The errors of a few roundings in each of 2 or 3 blocks add like a random walk: ten roundings bound a logit
/// and a hidden state, thirty bound a gradient.
fn tensor_cores(device: DeviceChoice) {
    for (precision, unit) in [(Precision::Tf32, 4.9e-4), (Precision::Bf16, 3.9e-3)] {
        for fixture in ["tiny-tied", "tiny-untied"] {
            for d in compare(fixture, device, precision).differences {
                let bound = match d.key.as_str() {
                    k if k.starts_with("grad.") => 30.0 * unit,
                    k if k.starts_with("train.") => 20.0 * unit,
                    _ => 10.0 * unit,
                };
                let value = if d.key.starts_with("grad.") { d.frobenius } else { d.max };
                eprintln!("{precision:?} {fixture} {} {value:.2e}", d.key);
                assert!(value < bound, "{precision:?} {fixture}: {} differs by {value:e}, bound {bound:e}", d.key);
            }
        }
    }
}

/// The lines of `parity --json` on one prompt, and the exit code.
fn compared(d: &Path, more: &[&str]) -> (Vec<Value>, Option<i32>) {
    let out = run(d, &[&["parity", "-m", "m", "-p", "Hello", "--json", "--device", "cpu"], more].concat());
    let said = String::from_utf8_lossy(&out.stderr);
    let lines = String::from_utf8_lossy(&out.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!([Some(0), Some(6)].contains(&out.status.code()), "{said}");
    (lines, out.status.code())
}

#[test]
fn a_damaged_tensor_is_named_with_the_first_layer_that_differs() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model_with_spread(&d.join("m"), true, 0.1);
    tiny_model_with_spread(&d.join("n"), true, 0.1);
    let (same, code) = compared(d, &["--against", "n"]);
    assert_eq!(code, Some(0));
    assert_eq!(same.last().unwrap()["verdict"], "PASS");
    let layers: Vec<&str> = same.iter().filter_map(|row| row["layer"].as_str()).collect();
    assert_eq!(layers, ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "logits"]);
    assert!(same.iter().filter(|row| row["layer"].is_string()).all(|row| row["max"] == 0.0), "the models are equal");
    assert_eq!(same.iter().filter(|row| row["rank"].is_u64()).count(), 10);

    let file = d.join("n/model.safetensors");
    let whole = read_tensors(&file);
    for (tensor, layer) in [
        ("model.layers.1.mlp.up_proj.weight", "model.layers.1"),
        ("model.layers.0.self_attn.k_norm.weight", "model.layers.0"),
        ("model.norm.weight", "model.norm"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
    ] {
        let mut damaged = whole.clone();
        damaged.get_mut(tensor).unwrap().1.iter_mut().for_each(|value| *value *= 1.01);
        write_tensors(&file, &damaged);
        let (found, code) = compared(d, &["--against", "n"]);
        let verdict = found.last().unwrap();
        assert_eq!((code, &verdict["verdict"]), (Some(6), &"FAIL".into()), "{tensor}");
        assert_eq!((&verdict["first_divergent"], &verdict["weight"]), (&layer.into(), &tensor.into()), "{tensor}");
        // A larger tolerance lets it pass.
        assert_eq!(compared(d, &["--against", "n", "--tolerance", "0.5"]).1, Some(0), "{tensor}");
        let text = run(d, &["parity", "-m", "m", "--against", "n", "-p", "Hello", "--device", "cpu"]);
        let said = String::from_utf8_lossy(&text.stderr);
        assert!(said.contains(&format!("the first layer that differs is {layer}")) && said.contains(tensor), "{said}");
    }
}

#[test]
fn packed_weights_compute_what_dequantized_ones_compute_and_recipes_stand_side_by_side() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model_with_spread(&d.join("m"), true, 0.1);
    std::fs::create_dir(d.join("packed")).unwrap();
    ok(d, &["convert", "m", "packed/model.dat", "--dtype", "nvfp4"]);
    let words =
        ["parity", "-m", "packed", "--recipe", "w4", "--against-recipe", "bf16", "-p", "Hello", "--device", "cpu"];
    let refused = run(d, &[&words[..], &["--tolerance", "-1"]].concat());
    assert_eq!(refused.status.code(), Some(2));
    assert!(ok(d, &words).contains("PASS · nearest to its bound of 1.0e-4"));
    // A recipe that rounds differs from one that does not, within the tolerance of NVFP4.
    let largest = |rows: &[Value]| rows.iter().filter_map(|row| row["relative"].as_f64()).fold(0.0, f64::max);
    let (w4, code) = compared(d, &["--recipe", "w4", "--against-recipe", "bf16"]);
    assert!(code == Some(0) && (0.01..0.5).contains(&largest(&w4)), "{w4:?}");
    assert_eq!(w4.last().unwrap()["limit"], 0.5);
    let (same, _) = compared(d, &["--recipe", "w4", "--against-recipe", "w4"]);
    assert_eq!(largest(&same), 0.0);
    // The packed file and its origin under the recipe by which it was packed: the file holds the embedding in f16, and its origin
    // in f32.
    let (equal, code) = compared(d, &["--recipe", "w4", "--against", "packed"]);
    assert!(code == Some(0) && largest(&equal) > 1e-4, "{equal:?}");
    let limit = equal.last().unwrap()["limit"].as_f64().unwrap();
    assert!((0.001..0.002).contains(&limit), "{limit}");
    // A damaged embedding is found beside one in f16, too.
    let file = d.join("m/model.safetensors");
    let whole = read_tensors(&file);
    let mut damaged = whole.clone();
    damaged.get_mut("model.embed_tokens.weight").unwrap().1.iter_mut().for_each(|value| *value *= 1.01);
    write_tensors(&file, &damaged);
    let (found, code) = compared(d, &["--recipe", "w4", "--against", "packed"]);
    assert_eq!((code, &found.last().unwrap()["first_divergent"]), (Some(6), &"model.embed_tokens".into()));
    write_tensors(&file, &whole);
    for (words, reason) in [
        (&["parity", "-m", "m"][..], "--model has nothing to be compared with; give --expected FILE, or"),
        (
            &["parity", "-m", "m", "-p", "hi"],
            "--prompt: two models are compared on a prompt, and there is one; give --against",
        ),
        (&["parity", "-m", "m", "--recipe", "w4"], "--prompt is missing"),
        (&["parity", "-m", "m", "--against", "m", "--expected", "x"], "cannot be used with"),
    ] {
        let out = run(d, words);
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.code() == Some(2) && stderr.contains(reason), "{words:?}: {stderr}");
    }
}

/// What a fixture says must be comparable: a value that is no number would agree with everything.
#[test]
fn a_fixture_that_compares_nothing_is_refused() {
    let folder = golden("hf-qwen3/tiny-tied");
    let file = std::fs::read(folder.join("expected.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("fixture.safetensors");
    let error = |keep: &dyn Fn(&str, Dtype) -> bool, logit: f32| {
        let tensors: Vec<_> = tensors
            .iter()
            .filter(|(name, view)| keep(name, view.dtype()))
            .map(|(name, view)| {
                let mut data = view.data().to_vec();
                if name == "logits" {
                    data[40..44].copy_from_slice(&logit.to_le_bytes());
                }
                (name, view.dtype(), view.shape().to_vec(), data)
            })
            .collect();
        let views = tensors
            .iter()
            .map(|(name, dtype, shape, data)| (*name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
        std::fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
        let job = Parity { model: &folder, tokenizer: None, expected: &path, dump: None };
        let error =
            device::run(DeviceChoice::Cpu, Some(Precision::F32), job).err().map(|e| (e.exit_code(), e.to_string()));
        error.unwrap_or_else(|| panic!("the fixture is taken"))
    };
    let without_training = |name: &str, _: Dtype| !name.starts_with("train.");
    for value in [f32::NAN, f32::INFINITY] {
        let (code, text) = error(&without_training, value);
        assert!(code == 6 && text.contains(&format!("\"logits\" holds the value {value}")), "{text}");
    }
    let (code, text) = error(&|name, dtype| without_training(name, dtype) && dtype != Dtype::F32, 0.0);
    assert!(code == 6 && text.contains("there is no float tensor in it"), "{text}");
}

/// Fixtures of the right names whose ids and shapes are those of no batch.
#[test]
fn forged_fixtures_are_refused() {
    let folder = golden("hf-qwen3/tiny-tied");
    let file = std::fs::read(folder.join("expected.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let config = Qwen3Config::from_file(&folder.join("config.json")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("fixture.safetensors");
    let beyond = (config.vocab_size as i32).to_le_bytes();
    type Change<'a> = &'a dyn Fn(&mut Vec<usize>, &mut Vec<u8>);
    let first = |value: [u8; 4]| move |_: &mut Vec<usize>, data: &mut Vec<u8>| data[..4].copy_from_slice(&value);
    let reshaped = |of: fn(&[usize]) -> Vec<usize>| {
        move |shape: &mut Vec<usize>, data: &mut Vec<u8>| {
            *shape = of(shape);
            data.truncate(shape.iter().product::<usize>() * 4);
        }
    };
    let unsupervised = |_: &mut Vec<usize>, data: &mut Vec<u8>| {
        data.chunks_mut(4).for_each(|label| label.copy_from_slice(&(-100i32).to_le_bytes()));
    };
    let cases: [(&str, Change, &str); 10] = [
        ("input_ids", &first(beyond), "each an id below"),
        ("input_ids", &first((-1i32).to_le_bytes()), "each an id below"),
        ("input_ids", &reshaped(|shape| vec![0, shape[1]]), "\"input_ids\" must hold 1 to"),
        ("labels", &reshaped(|shape| vec![shape[0], shape[1] - 1]), "must have the shape of \"input_ids\""),
        ("labels", &unsupervised, "supervise at least one token"),
        ("generate.prompt", &reshaped(|_| vec![0]), "\"generate.prompt\" must hold 1 to"),
        ("generate.ids", &first(beyond), "each an id below"),
        ("train.data", &reshaped(|shape| vec![shape[1], shape[2]]), "it must be [steps, batch, 2 or more tokens]"),
        ("train.data", &reshaped(|shape| vec![shape[0], 0, shape[2]]), "it must be [steps, batch, 2 or more tokens]"),
        ("train.data", &reshaped(|shape| vec![shape[0], shape[1], 1]), "it must be [steps, batch, 2 or more tokens]"),
    ];
    for (name, change, reason) in cases {
        let forged: Vec<_> = tensors
            .iter()
            .map(|(key, view)| {
                let (mut shape, mut data) = (view.shape().to_vec(), view.data().to_vec());
                if key == name {
                    change(&mut shape, &mut data);
                }
                (key, view.dtype(), shape, data)
            })
            .collect();
        assert!(forged.iter().any(|(key, ..)| *key == name), "there is no {name}");
        let views = forged.iter().map(|(key, dtype, shape, data)| {
            (*key, TensorView::new(*dtype, shape.clone(), data).unwrap_or_else(|e| panic!("{key}: {e}")))
        });
        std::fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
        let job = Parity { model: &folder, tokenizer: None, expected: &path, dump: None };
        let error =
            device::run(DeviceChoice::Cpu, Some(Precision::F32), job).err().map(|e| (e.exit_code(), e.to_string()));
        let (code, said) = error.unwrap_or_else(|| panic!("{name}, {reason}: the fixture is taken"));
        assert!(code == 6 && said.contains(reason), "{name}: {code}: {said}");
    }
}
