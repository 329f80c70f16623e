//! A `.dat` file that is read and written keeps its bytes, every container holds the same values, and training at a rate
//! of 0 changes nothing.

use crate::support::{
    files::{names, ok, refused, run, tiny_model},
    scripted::{read_tensors, write_tensors},
};
use backend_nvfp4::Scaling;
use half::{bf16, f16};
use model_qwen3::{
    ModelError,
    bytes::FloatType,
    container::Container,
    tensors::{Stored, Tensors},
    write::write_dat,
};
use std::path::Path;

fn rewritten(path: &Path) -> Vec<u8> {
    let checkpoint = Container::open(path).unwrap();
    let failed = |e| ModelError::Io { path: path.to_owned(), source: e };
    write_dat(&checkpoint, checkpoint.dat(), Vec::new(), failed).unwrap()
}

#[test]
fn reading_and_writing_a_dat_gives_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    for tied in [true, false] {
        let model = dir.path().join(format!("tied-{tied}"));
        tiny_model(&model, tied);
        for (dtype, scales) in [("f16", "two"), ("bf16", "two"), ("f32", "two"), ("nvfp4", "two"), ("nvfp4", "single")]
        {
            let dat = model.join(format!("{dtype}-{scales}.dat"));
            let (from, to) = (model.to_str().unwrap(), dat.to_str().unwrap());
            let levels = if dtype == "nvfp4" { vec!["--scales", scales] } else { vec![] };
            ok(dir.path(), &[&["convert", from, to, "--to", "dat", "--dtype", dtype][..], &levels].concat());
            assert_eq!(rewritten(&dat), std::fs::read(&dat).unwrap(), "{dtype} {scales}");
            ok(dir.path(), &["inspect", to, "--verify"]);
        }
    }
}

/// f32 weights go into a `.dat` file and back unchanged, and f16 and bf16 ones are rounded once.
#[test]
fn floats_survive_every_container() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let a = Container::open(&d.join("m")).unwrap();
    let sorted = |c: &Container| {
        let mut names = c.names();
        names.sort();
        names
    };
    for (dtype, stored) in [("f32", FloatType::F32), ("f16", FloatType::F16), ("bf16", FloatType::Bf16)] {
        let round = |x: f32| match stored {
            FloatType::F16 => f16::from_f32(x).to_f32(),
            FloatType::Bf16 => bf16::from_f32(x).to_f32(),
            FloatType::F32 => x,
        };
        let (dat, back) = (format!("{dtype}.dat"), format!("{dtype}/model.safetensors"));
        std::fs::create_dir(d.join(dtype)).unwrap();
        ok(d, &["convert", "m", &dat, "--to", "dat", "--dtype", dtype]);
        ok(d, &["convert", &dat, &back, "--to", "safetensors", "--dtype", dtype]);
        let b = Container::open(&d.join(dtype)).unwrap();
        assert_eq!(sorted(&a), sorted(&b), "{dtype}");
        for name in a.names() {
            assert_eq!(b.stored(&name).unwrap().float(), Some(stored), "{dtype}: {name}");
            let expected: Vec<f32> = a.read_dense(&name).unwrap().into_iter().map(round).collect();
            assert!(expected == b.read_dense(&name).unwrap(), "{dtype}: {name}");
        }
    }
}

#[test]
fn nvfp4_safetensors_hold_the_same_codes_as_dat() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), false);
    for (scales, expected) in [("two", Scaling::Two), ("single", Scaling::Single)] {
        let nvfp4 = ["--dtype", "nvfp4", "--overwrite"];
        for name in ["q.dat", "q.safetensors"] {
            ok(d, &[&["convert", "m", name, "--scales", scales][..], &nvfp4].concat());
        }
        let [a, b] = ["q.dat", "q.safetensors"].map(|name| Container::open(&d.join(name)).unwrap());
        let mut packed = 0;
        for name in a.names() {
            assert_eq!(a.stored(&name), b.stored(&name), "{name}");
            if let Some(Stored::Packed { scaling, .. }) = a.stored(&name) {
                assert_eq!(a.read_packed(&name).unwrap(), b.read_packed(&name).unwrap(), "{name}");
                assert_eq!(scaling, expected, "{name}");
                packed += 1;
            }
        }
        assert_eq!(packed, 2 * 7 + 1);
        // The levels of scales survive the way through safetensors.
        ok(d, &[&["convert", "q.safetensors", "back.dat"][..], &nvfp4].concat());
        assert!(std::fs::read(d.join("back.dat")).unwrap() == std::fs::read(d.join("q.dat")).unwrap(), "{scales}");
    }
}

#[test]
fn rate_zero_then_export_like_is_the_identity() {
    let dir = tempfile::tempdir().unwrap();
    for (tied, scales) in [(true, "two"), (true, "single"), (false, "two"), (false, "single")] {
        let folder = dir.path().join(format!("{tied}-{scales}"));
        tiny_model(&folder, tied);
        let convert = ["convert", "model.safetensors", "model.dat", "--dtype", "nvfp4", "--scales", scales];
        ok(&folder, &convert);
        // Without a flag the scales become two-level.
        for flags in [&[][..], &["--scales", scales]] {
            let run = fit_at_rate_zero(&folder, flags);
            let like = ["--output-dat", "out.dat", "--like", "model.dat", "--device", "cpu"];
            ok(&folder, &[&["export-dat", "--overwrite", "--checkpoint", "run/checkpoint-2"][..], &like].concat());
            let original = std::fs::read(folder.join("model.dat")).unwrap();
            assert!(original == std::fs::read(folder.join("out.dat")).unwrap(), "tied {tied}, {scales}: bytes differ");
            let exported = std::fs::read(folder.join("run/final/model.dat")).unwrap();
            let keeps = scales == "two" || !flags.is_empty();
            assert!((original == exported) == keeps, "tied {tied}, {scales}, {flags:?}: the export of the run");
            let says =
                run.contains("two-level scales (those of the file are single-level; --scales single keeps them)");
            assert_eq!(says, !keeps, "{run}");
        }
    }
}

/// A file of a model of another shape is no pattern. Nothing is left of the attempt.
#[test]
fn export_like_a_file_of_another_shape_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let mut tensors = read_tensors(&d.join("m/model.safetensors"));
    tensors.insert("model.embed_tokens.weight".into(), (vec![16, 64], vec![0.5; 16 * 64]));
    std::fs::create_dir(d.join("o")).unwrap();
    write_tensors(&d.join("o/model.safetensors"), &tensors);
    ok(d, &["convert", "o/model.safetensors", "o/like.dat", "--dtype", "nvfp4"]);
    let before = names(d);
    let words = ["export-dat", "-m", "m", "--output-dat", "x.dat", "--device", "cpu", "--like", "o/like.dat"];
    let said = refused(d, &words, 2);
    let reason = "--like o/like.dat: the model has no model.embed_tokens.weight of shape [16, 64]; give the file";
    assert!(said.contains(reason), "{said}");
    assert_eq!(names(d), before);
}

/// What a file with NVFP4 keeps dense stays dense, also if nothing is known of its training.
#[test]
fn linear_layers_that_are_dense_beside_nvfp4_stay_dense() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(d, true);
    ok(d, &["convert", "model.safetensors", "model.dat", "--dtype", "nvfp4"]);
    fit_at_rate_zero(d, &["--bf16-last-blocks", "1"]);
    ok(d, &["export-hf", "-m", "run", "-o", "hf", "--format", "modelopt", "--device", "cpu"]);
    std::fs::create_dir(d.join("o")).unwrap();
    ok(d, &["convert", "hf", "o/a.dat", "--dtype", "nvfp4"]);
    ok(d, &["convert", "hf", "o/b.safetensors", "--dtype", "nvfp4"]);
    let export = ["export-dat", "-m", "hf", "--device", "cpu", "--output-dat"];
    ok(d, &[&export[..], &["o/c.dat"]].concat());
    for path in ["hf", "o/a.dat", "o/b.safetensors", "o/c.dat"] {
        let file = Container::open(&d.join(path)).unwrap();
        let packed = |block: usize| {
            let stored = file.stored(&format!("model.layers.{block}.mlp.down_proj.weight")).unwrap();
            matches!(stored, Stored::Packed { .. })
        };
        assert_eq!([packed(0), packed(1)], [true, false], "{path}");
    }
    let said = refused(d, &[&export[..], &["o/d.dat", "--like", "model.dat"]].concat(), 2);
    assert!(said.contains("--like model.dat: the model has linear layers that are not quantized"), "{said}");
}

/// Trains `model.dat` of a folder at a rate of 0, and returns what the run says.
fn fit_at_rate_zero(folder: &Path, flags: &[&str]) -> String {
    let fit = ["fit", "-m", "model.dat", "-d", "demo.tsv", "-o", "run", "--overwrite", "--device", "cpu"];
    let rate = ["--learning-rate", "0", "--weight-decay", "0.1", "--max-steps", "2", "--batch-size", "2"];
    let out = run(folder, &[&fit[..], &rate, &["--eval-steps", "0", "--val-split", "0"], flags].concat());
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success(), "{said}");
    said
}

/// The smallest scale of single-level files loses small blocks. Trained, they get two-level scales, which keep them.
#[test]
fn training_a_single_level_file_exports_two_levels() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    tiny_model(folder, true);
    ok(folder, &["convert", "model.safetensors", "model.dat", "--dtype", "nvfp4", "--scales", "single"]);
    let levels = |path: &str| {
        let file = Container::open(&folder.join(path)).unwrap();
        let scaling = |name: &String| match file.stored(name) {
            Some(Stored::Packed { scaling, .. }) => Some(scaling),
            _ => None,
        };
        let all: Vec<Scaling> = file.names().iter().filter_map(scaling).collect();
        assert!(all.len() == 14 && all.iter().all(|one| *one == all[0]), "{path}: {all:?}");
        all[0]
    };
    assert_eq!(levels("model.dat"), Scaling::Single);
    for (flags, expected) in [(&[][..], Scaling::Two), (&["--scales", "single"], Scaling::Single)] {
        fit_at_rate_zero(folder, flags);
        assert_eq!(levels("run/final/model.dat"), expected, "{flags:?}");
        let export = ["export-dat", "--checkpoint", "run/checkpoint-2", "--output-dat", "out.dat", "--device", "cpu"];
        ok(folder, &[&export[..], &["--overwrite"]].concat());
        assert_eq!(levels("out.dat"), expected, "{flags:?}");
    }
}

#[test]
fn convert_replaces_no_file_unasked_and_follows_the_name() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    std::fs::write(d.join("a.dat"), "older").unwrap();
    let refused = |words: &[&str], said: &str| {
        let out = run(d, &[&["convert", "m"], words, &["--dtype", "f16"]].concat());
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.code() == Some(2) && stderr.contains(said), "{words:?}: {stderr}");
    };
    refused(&["a.dat"], "a.dat: the file exists");
    assert_eq!(std::fs::read(d.join("a.dat")).unwrap(), b"older");
    refused(&["b.safetensors", "--to", "dat"], "b.safetensors: the name must end in .dat");
    refused(&["b.bin"], "b.bin: the name must end in .dat, .safetensors or .gguf");
    refused(&["c.dat/"], "c.dat/: this is the name of a folder; leave out the separator");
    for words in [&["c.dat", "--scales", "single"][..], &["c.gguf", "--scales", "single"]] {
        refused(words, "--scales works only with --dtype nvfp4, in .dat and .safetensors files");
    }
    std::os::unix::fs::symlink("nothing", d.join("c.dat")).unwrap();
    refused(&["c.dat"], "c.dat: the file exists");
    assert_eq!(std::fs::read_link(d.join("c.dat")).unwrap(), std::path::Path::new("nothing"));
    let error = String::from_utf8_lossy(&run(d, &["convert", "none", "c.dat", "--dtype", "f16"]).stderr).into_owned();
    assert!(error.contains("INPUT none: no such file") && error.contains("convert also takes a .gguf file"), "{error}");
    assert!(!d.join("b.safetensors").exists() && !d.join("b.bin").exists());
    ok(d, &["convert", "m", "a.dat", "--dtype", "f16", "--overwrite"]);
    ok(d, &["convert", "m", "b.safetensors", "--dtype", "f16"]);
    for file in ["a.dat", "b.safetensors"] {
        ok(d, &["inspect", file, "--verify"]);
    }
}

#[test]
fn an_input_is_never_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    tiny_model(&dir.path().join("m"), true);
    ok(dir.path(), &["convert", "m", "a.dat", "--to", "dat", "--dtype", "f16"]);
    std::fs::hard_link(dir.path().join("a.dat"), dir.path().join("b.dat")).unwrap();
    let before = std::fs::read(dir.path().join("a.dat")).unwrap();
    for output in ["a.dat", "./a.dat", "b.dat"] {
        let out = run(dir.path(), &["convert", "a.dat", output, "--to", "dat", "--dtype", "nvfp4"]);
        assert_eq!(out.status.code(), Some(2));
        assert!(String::from_utf8_lossy(&out.stderr).contains("never overwritten"));
    }
    assert_eq!(std::fs::read(dir.path().join("a.dat")).unwrap(), before);
}
