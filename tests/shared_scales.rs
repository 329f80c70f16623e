//! `fit --share-scales`: weights that are multiplied together are quantized with one tensor scale, in the forward pass as in
//! the export, so that an export for other programs changes none of their codes and block scales.

use crate::support::{
    Cpu, Cube, RECIPES,
    files::{ok, run, tiny_model},
    host, on_gpu,
    scripted::{read_tensors, write_tensors},
};
use backend_nvfp4::{LinearSpec, MasterKind, Nvfp4Kernels, Precision, Scaling};
use burn::tensor::{Int, Tensor};
use burn_cubecl::CubeRuntime;
use model_qwen3::{
    ModelError,
    bytes::FloatType,
    config::Qwen3Config,
    container::Container,
    model::ids_tensor,
    names,
    repack::{HeadAs, Repacked, StoreAs},
    tensors::{Stored, Tensors},
    weights::{self, Purpose},
    write::write_dat,
};
use std::{fs, path::Path};

/// A model whose v and up matrices are smaller than q, k and gate by this factor. Its dense weights are f16, so that exports
/// round none of them.
fn uneven_model(folder: &Path, factor: f32) {
    tiny_model(folder, true);
    let path = folder.join("model.safetensors");
    let mut tensors = read_tensors(&path);
    for (name, (_, values)) in &mut tensors {
        let small = name.contains("v_proj") || name.contains("up_proj");
        for value in values {
            *value = if small { *value * factor } else { half::f16::from_f32(*value).to_f32() };
        }
    }
    write_tensors(&path, &tensors);
}

/// The training forward multiplies the codes that the export holds, in every recipe and on every backend.
fn forward_multiplies_what_is_exported<B: Nvfp4Kernels>(device: B::Device) {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    uneven_model(d, 1.0 / 1024.0);
    let config = Qwen3Config::from_file(&d.join("config.json")).unwrap();
    let source = Container::open(&d.join("model.safetensors")).unwrap();
    let ids: Tensor<B, 2, Int> = ids_tensor(&[(1..40).collect()], &config, &device).unwrap();
    for recipe in RECIPES.into_iter().filter(|recipe| recipe.packs_weights()) {
        let own = LinearSpec::new(recipe, Scaling::Two, Precision::F32);
        let shared = LinearSpec { shares_scale: true, ..own };
        let logits = |tensors: &dyn Tensors, spec: LinearSpec, purpose: Purpose| {
            let model = weights::load::<B>(tensors, &config, spec, purpose, &device).unwrap();
            host(model.logits(model.forward(ids.clone(), |_| {})))
        };
        let train = Purpose::Train(MasterKind::F32);
        let [with, without] = [shared, own].map(|spec| logits(&source, spec, train));
        let file = d.join("exported.dat");
        let format = StoreAs::Nvfp4 {
            scaling: Scaling::Two,
            head: HeadAs::Float(FloatType::F16),
            block: shared.block,
            shares_scale: true,
            dense_from: usize::MAX,
        };
        let failed = |e| ModelError::Io { path: file.clone(), source: e };
        write_dat(&Repacked::new(&source, format), None, fs::File::create(&file).unwrap(), failed).unwrap();
        let exported = logits(&Container::open(&file).unwrap(), own, Purpose::Infer);
        assert_eq!(with, exported, "{}", recipe.name());
        assert_ne!(without, exported, "{}: scales of their own give other codes", recipe.name());
    }
}

#[test]
fn the_forward_on_the_cpu_multiplies_what_is_exported() {
    forward_multiplies_what_is_exported::<Cpu>(Default::default());
}

#[test]
fn the_forward_on_the_gpu_multiplies_what_is_exported() {
    fn on_cube<R: CubeRuntime>() {
        forward_multiplies_what_is_exported::<Cube<R>>(R::Device::default());
    }
    on_gpu!(on_cube);
}

/// The matrices of a file that have one tensor scale in common, by name.
fn groups_with_one_scale(file: &Container) -> (usize, usize) {
    let (mut one, mut several) = (0, 0);
    for block in 0..2 {
        for first in ["self_attn.q_proj", "mlp.gate_proj"] {
            let group = names::multiplied_together(&format!("model.layers.{block}.{first}.weight"));
            assert!(group.len() > 1, "{group:?}");
            let scales: Vec<f32> = group.iter().map(|name| file.read_packed(name).unwrap().global).collect();
            *if scales.iter().all(|scale| *scale == scales[0]) { &mut one } else { &mut several } += 1;
        }
    }
    (one, several)
}

/// Trains the model `m`, and says what its exports to other programs change: codes and block scales.
fn trained(d: &Path, out: &str, flags: &[&str]) -> (Container, [(usize, usize); 2]) {
    let fit = ["fit", "-m", "m", "-d", "m/demo.tsv", "-o", out, "--device", "cpu", "--max-seq-length", "64"];
    let steps = ["--max-steps", "3", "--learning-rate", "1e-8", "--eval-steps", "0", "--val-split", "0", "--overwrite"];
    ok(d, &[&fit[..], &steps, flags].concat());
    let file = Container::open(&d.join(out).join("final")).unwrap();
    let changed = ["compressed-tensors", "modelopt"].map(|format| {
        let folder = format!("{out}-{format}");
        let words = ["export-hf", "-m", out, "-o", &folder, "--format", format, "--device", "cpu", "--overwrite"];
        let done = run(d, &words);
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(done.status.success(), "{said}");
        let exported = Container::open(&d.join(&folder)).unwrap();
        let (mut codes, mut scales) = (0, 0);
        for name in file.names() {
            let Some(Stored::Packed { .. }) = file.stored(&name) else { continue };
            let (a, b) = (file.read_packed(&name).unwrap(), exported.read_packed(&name).unwrap());
            let nibbles = |words: &[u32]| -> Vec<u8> {
                words.iter().flat_map(|word| word.to_le_bytes()).flat_map(|byte| [byte & 15, byte >> 4]).collect()
            };
            // Minus zero is no other value than zero.
            let differ = |(a, b): &(&u8, &u8)| a != b && (**a | **b) & 7 != 0;
            codes += nibbles(&a.codes).iter().zip(&nibbles(&b.codes)).filter(differ).count();
            // A scale byte of another tensor scale stands for another value, unless the two differ by a power of two.
            if (a.global / b.global - 1.0).abs() > 2e-7 {
                let value = |byte: u8, global: f32| backend_nvfp4::reference::e4m3_decode(byte) * global;
                let moved = |(x, y): &(&u8, &u8)| (value(**x, a.global) - value(**y, b.global)).abs() > 2e-7 * a.global;
                scales += a.scales.iter().zip(&b.scales).filter(moved).count();
            } else {
                assert_eq!(a.scales, b.scales, "{format}: {name}");
            }
        }
        // The command says so.
        assert!(said.contains(&format!("This changed {codes} of ")), "{format}, {codes}: {said}");
        (codes, scales)
    });
    (file, changed)
}

#[test]
fn an_export_for_other_programs_changes_nothing_that_was_trained_with_shared_scales() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    // Block scales of v and up become subnormal numbers beside those of q, k and gate.
    uneven_model(&d.join("m"), 2.0f32.powi(-17));
    for recipe in ["w4", "w4a4", "nvfp4"] {
        let (file, changed) = trained(d, "own", &["--recipe", recipe, "--bf16-last-blocks", "0"]);
        assert_eq!(groups_with_one_scale(&file), (0, 4), "{recipe}");
        assert!(changed.iter().all(|(codes, scales)| *codes > 0 && *scales > 0), "{recipe}: {changed:?}");
        let (file, changed) = trained(d, "shared", &["--recipe", recipe, "--bf16-last-blocks", "0", "--share-scales"]);
        assert_eq!(groups_with_one_scale(&file), (4, 0), "{recipe}");
        assert_eq!(changed, [(0, 0); 2], "{recipe}");
        // The checkpoint knows how it was trained.
        ok(d, &["export-dat", "--checkpoint", "shared/checkpoint-3", "--output-dat", "again.dat", "--device", "cpu"]);
        let again = fs::read(d.join("again.dat")).unwrap();
        assert!(again == fs::read(d.join("shared/final/model.dat")).unwrap(), "{recipe}");
        let _ = fs::remove_file(d.join("again.dat"));
    }
    // Blocks that a damped finish freezes share their scales, too, and a file with scales of its own is no pattern.
    let (file, changed) = trained(d, "frozen", &["--share-scales", "--damped-finish", "0.7"]);
    assert_eq!((groups_with_one_scale(&file), changed), ((4, 0), [(0, 0); 2]));
    let words = ["export-dat", "--checkpoint", "shared/checkpoint-3", "--output-dat", "no.dat", "--like"];
    let out = run(d, &[&words[..], &["own/final/model.dat"]].concat());
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.code() == Some(2) && said.contains("export without --like"), "{said}");
}
