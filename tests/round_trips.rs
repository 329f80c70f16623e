//! A model that is exported to another format and read back has the same weights where the format allows it, and weights
//! within a stated bound where it does not. `fit` trains from the folders of other libraries.

use crate::support::{
    files::{ok, refused, run, tiny_model},
    spec,
};
use backend_nvfp4::reference;
use model_qwen3::{
    container::Container,
    names,
    tensors::{Stored, Tensors},
};
use safetensors::SafeTensors;
use serde_json::Value;
use std::{fs, path::Path};

/// The values of a tensor.
fn values(file: &Container, name: &str) -> Vec<f32> {
    match file.stored(name).unwrap() {
        Stored::Dense { .. } => file.read_dense(name).unwrap(),
        Stored::Packed { rows, cols, .. } => reference::dequantize(&file.read_packed(name).unwrap(), rows, cols),
    }
}

/// A model whose matrices have rows of a multiple of 64 values, as NVFP4 in GGUF files needs.
fn model(folder: &Path, tied: bool) {
    tiny_model(folder, tied);
    let path = folder.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["intermediate_size"] = 128.into();
    fs::write(&path, config.to_string()).unwrap();
    let folder = folder.display().to_string();
    let d = Path::new(&folder);
    let fit = ["fit", "--init-config", "config.json", "--tokenizer", ".", "--synthetic", "--device", "cpu"];
    let small = ["--max-steps", "1", "--max-seq-length", "16", "--recipe", "bf16", "--eval-steps", "0", "-o", "r"];
    ok(d, &[&fit[..], &small].concat());
    fs::copy(d.join("r/final/model.safetensors"), d.join("model.safetensors")).unwrap();
    fs::remove_dir_all(d.join("r")).unwrap();
}

/// How far a weight may be from that of which it was quantized, relative to the largest magnitude of its block of 16. Between
/// the codes 4 and 6 the nearest is at most one step away, and six steps are the largest magnitude, up to the rounding of the
/// 8-bit scale (1/16) and of the f32 scale to bf16 (1/256).
const BOUND: f32 = 1.0 / 6.0 * (1.0 + 1.0 / 16.0) * (1.0 + 1.0 / 128.0);

#[test]
fn dense_weights_go_to_other_programs_and_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    for tied in [true, false] {
        let m = format!("m-{tied}");
        model(&d.join(&m), tied);
        let source = Container::open(&d.join(&m)).unwrap();
        for format in ["bf16", "compressed-tensors", "modelopt"] {
            let folder = format!("{format}-{tied}");
            ok(d, &["export-hf", "-m", &m, "-o", &folder, "--format", format, "--device", "cpu"]);
            let read = Container::open(&d.join(&folder)).unwrap();
            for name in source.names() {
                let (before, after) = (values(&source, &name), values(&read, &name));
                if format == "bf16" || !names::is_projection(&name) {
                    // The model is bf16 already.
                    assert!(before == after, "{folder}: {name}");
                    continue;
                }
                assert!(matches!(read.stored(&name), Some(Stored::Packed { .. })), "{folder}: {name}");
                for (x, y) in before.chunks(16).zip(after.chunks(16)) {
                    let amax = x.iter().fold(0.0f32, |amax, v| amax.max(v.abs()));
                    let off = x.iter().zip(y).fold(0.0f32, |off, (x, y)| off.max((x - y).abs()));
                    assert!(off <= amax * BOUND, "{folder} {name}: {off} of {amax}");
                }
                // The bound is no wide one: most values do move.
                assert!(
                    before.iter().zip(&after).filter(|(x, y)| x != y).count() > before.len() / 2,
                    "{folder} {name}"
                );
            }
        }
    }
}

/// Codes and block scales of `a` and `b` are the same, tensor scales up to the rounding of a reciprocal of a reciprocal, and
/// embedding and norms up to their rounding to bf16 and to f16.
fn same_codes(a: &Container, b: &Container, what: &str) {
    let mut packed = 0;
    for name in a.names() {
        let Some(Stored::Packed { .. }) = a.stored(&name) else {
            let near = |(x, y): (&f32, &f32)| (x - y).abs() <= x.abs() / 256.0 + 2.0f32.powi(-24);
            assert!(values(a, &name).iter().zip(&values(b, &name)).all(near), "{what}: {name}");
            continue;
        };
        let (x, y) = (a.read_packed(&name).unwrap(), b.read_packed(&name).unwrap());
        assert!(x.codes == y.codes && x.scales == y.scales, "{what}: {name}");
        assert!((x.global / y.global - 1.0).abs() <= f32::EPSILON, "{what}: {name}: {} {}", x.global, y.global);
        packed += 1;
    }
    assert_eq!(packed, 14, "{what}");
}

/// Weights with scales that other programs take as they are go through every format and keep their codes.
#[test]
fn nvfp4_weights_go_to_every_format_and_come_back() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    model(&d.join("m"), true);
    model(&d.join("u"), false);
    // A library's own quantization has shared scales.
    for (m, library, source) in [
        ("m", "compressed-tensors", "compressed-tensors"),
        ("m", "modelopt", "modelopt"),
        ("u", "compressed-tensors", "untied"),
    ] {
        ok(d, &["export-hf", "-m", m, "-o", source, "--format", library, "--device", "cpu"]);
        let first = Container::open(&d.join(source)).unwrap();
        assert_eq!(first.stored(names::HEAD).is_some(), m == "u");
        let work = format!("work-{source}");
        fs::create_dir(d.join(&work)).unwrap();
        let dat = format!("{work}/x.dat");
        // A head of its own stays dense.
        let nvfp4 = ["--dtype", "nvfp4", "--head", "bf16"];
        ok(d, &[&["convert", source, &dat][..], &nvfp4].concat());
        same_codes(&first, &Container::open(&d.join(&dat)).unwrap(), "to .dat");
        for format in ["compressed-tensors", "modelopt"] {
            let out = format!("{source}-{format}");
            ok(d, &["export-hf", "-m", &dat, "-o", &out, "--format", format, "--device", "cpu"]);
            same_codes(&first, &Container::open(&d.join(&out)).unwrap(), &out);
        }
        let (gguf, back) = (format!("{work}/x.gguf"), format!("{work}/back.dat"));
        ok(d, &["convert", source, &gguf, "--dtype", "nvfp4"]);
        // Other commands name the flags of the way back.
        let said = String::from_utf8_lossy(&run(d, &["inspect", &gguf]).stderr).into_owned();
        let flags = if m == "u" { "--dtype nvfp4 --head bf16\n" } else { "--dtype nvfp4\n" };
        assert!(said.contains(&format!("model.safetensors {flags}")), "{said}");
        ok(d, &[&["convert", &gguf, &back][..], &nvfp4].concat());
        same_codes(&first, &Container::open(&d.join(&back)).unwrap(), "to GGUF and back");
        // Dense formats hold the values.
        fs::create_dir(d.join(&work).join("f32")).unwrap();
        ok(d, &["convert", source, &format!("{work}/f32/model.safetensors"), "--dtype", "f32"]);
        let dense = Container::open(&d.join(&work).join("f32")).unwrap();
        for name in first.names() {
            let rows = first.stored(&name).unwrap().shape()[0];
            let expected = match first.stored(&name) {
                Some(Stored::Packed { .. }) => first.dequantize_rows(&name, 0..rows).unwrap(),
                _ => values(&first, &name),
            };
            assert!(expected == values(&dense, &name), "{name}");
        }
    }
    // From one folder of compressed-tensors to another, every byte of the weights is the same.
    let weights = |folder: &str| fs::read(d.join(folder).join("model.safetensors")).unwrap();
    ok(
        d,
        &["export-hf", "-m", "compressed-tensors", "-o", "again", "--format", "compressed-tensors", "--device", "cpu"],
    );
    assert!(weights("again") == weights("compressed-tensors"));
}

/// compressed-tensors divides the block scale by its tensor scale before it multiplies, in f32.
#[test]
fn dense_formats_hold_the_values_that_compressed_tensors_decodes() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    ok(d, &["export-hf", "-m", "m", "-o", "ct", "--format", "compressed-tensors", "--device", "cpu"]);
    fs::create_dir(d.join("f32")).unwrap();
    ok(d, &["convert", "ct", "f32/model.safetensors", "--dtype", "f32"]);
    let ours = Container::open(&d.join("f32")).unwrap();
    let bytes = fs::read(d.join("ct/model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (mut compared, mut other_order) = (0, 0);
    for key in file.names() {
        let Some(name) = key.strip_suffix("_packed") else { continue };
        let part = |suffix: &str| file.tensor(&format!("{name}{suffix}")).unwrap().data().to_vec();
        let (codes, scales) = (part("_packed"), part("_scale"));
        let divisor = f32::from_le_bytes(part("_global_scale").try_into().unwrap());
        for (i, value) in ours.read_dense(name).unwrap().into_iter().enumerate() {
            let code = codes[i / 2] >> (i % 2 * 4) & 15;
            let magnitude = spec::E2M1[usize::from(code & 7)];
            let scale = spec::E4m3::value(scales[i / 16]) as f32;
            let signed = if code & 8 == 0 { magnitude } else { -magnitude };
            assert_eq!(value.to_bits(), (signed * (scale / divisor)).to_bits(), "{name} {i}");
            other_order += usize::from(value != signed * scale * (1.0 / divisor));
        }
        compared += 1;
    }
    assert!(compared == 14 && other_order > 0, "{compared} {other_order}");
    // An infinite divisor would make zeros of all weights.
    let divisor = file.tensor("model.layers.0.self_attn.q_proj.weight_global_scale").unwrap().data();
    let at = divisor.as_ptr() as usize - bytes.as_ptr() as usize;
    fs::remove_file(d.join("ct/manifest.json")).unwrap();
    for damaged in [f32::INFINITY, f32::NEG_INFINITY] {
        let mut bytes = bytes.clone();
        bytes[at..at + 4].copy_from_slice(&damaged.to_le_bytes());
        fs::write(d.join("ct/model.safetensors"), bytes).unwrap();
        let said = refused(d, &["convert", "ct", "x.safetensors", "--dtype", "f32"], 6);
        assert!(said.contains("q_proj") && said.contains("tensor scale") && said.contains("inf"), "{said}");
    }
}

#[test]
fn fit_trains_from_the_folders_of_other_libraries() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    for library in ["compressed-tensors", "modelopt"] {
        let run = format!("r-{library}");
        ok(d, &["export-hf", "-m", "m", "-o", library, "--format", library, "--device", "cpu"]);
        let fit = ["fit", "-m", library, "-d", "m/demo.tsv", "-o", &run, "--device", "cpu", "--max-seq-length", "64"];
        ok(d, &[&fit[..], &["--max-steps", "2", "--learning-rate", "0", "--val-split", "0"]].concat());
        // At a rate of 0 the master weights are the values that were read.
        let (folder, masters) = (d.join(library), d.join(&run).join("checkpoint-2/model.safetensors"));
        let (folder, masters) = (Container::open(&folder).unwrap(), Container::open(&masters).unwrap());
        for name in folder.names() {
            assert!(values(&folder, &name) == values(&masters, &name), "{library}: {name}");
        }
        ok(d, &["generate", "-m", &run, "-p", "hi", "--max-tokens", "2", "--device", "cpu"]);
    }
}
