//! The model computes what Hugging Face's computes, in f32 on the CPU and on the GPU: logits, hidden states, loss, every
//! gradient, greedy tokens, and 20 steps of AdamW.

use crate::support::{Gpu, golden, gpu, skipped};
use backend_nvfp4::Precision;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use train_cli::{
    commands::parity::{Comparison, Parity},
    device,
    settings::DeviceChoice,
};

fn compare(fixture: &str, device: DeviceChoice, precision: Precision) -> Comparison {
    let folder = golden(&format!("hf-qwen3/{fixture}"));
    let expected = folder.join("expected.safetensors");
    let job = Parity { model: &folder, expected: &expected, dump: None };
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
        let job = Parity { model: &folder, expected: &path, dump: None };
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
