//! `convert --to gguf` writes every weight, the tokenizer and the chat template of a model as a GGUF file. The file is read by
//! an independent crate, and blocks are decoded here as ggml's sources describe them. doc/notebook/gguf_check.py compares files
//! with ggml's own decoder and asks llama.cpp.

use crate::support::{
    files::{demo_file, ok, real_tokenizer, refused, run, tiny_model},
    golden, golden_bytes,
    spec::{E2M1, E4m3},
};
use backend_nvfp4::reference;
use gguf_rs_lib::{
    format::{GGUFTensorType, MetadataValue},
    reader::open_gguf_file,
};
use half::{bf16, f16};
use model_qwen3::{
    container::Container,
    gguf::GgufFile,
    names,
    tensors::{Stored, Tensors},
    tokenizer::Tokenizer,
};
use sha2::{Digest, Sha256};
use std::{collections::HashMap, path::Path};

/// The names of a model with one block, ours and GGUF's.
const NAMES: [(&str, &str); 13] = [
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight"),
    ("model.layers.0.self_attn.k_proj.weight", "blk.0.attn_k.weight"),
    ("model.layers.0.self_attn.v_proj.weight", "blk.0.attn_v.weight"),
    ("model.layers.0.self_attn.o_proj.weight", "blk.0.attn_output.weight"),
    ("model.layers.0.self_attn.q_norm.weight", "blk.0.attn_q_norm.weight"),
    ("model.layers.0.self_attn.k_norm.weight", "blk.0.attn_k_norm.weight"),
    ("model.layers.0.mlp.gate_proj.weight", "blk.0.ffn_gate.weight"),
    ("model.layers.0.mlp.up_proj.weight", "blk.0.ffn_up.weight"),
    ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
    ("model.layers.0.input_layernorm.weight", "blk.0.attn_norm.weight"),
    ("model.layers.0.post_attention_layernorm.weight", "blk.0.ffn_norm.weight"),
    ("model.norm.weight", "output_norm.weight"),
];

/// How far the 8-bit values of a block of 32 are off: at most half a step, and the step is rounded to f16.
fn q8_bound(block: &[f32]) -> f32 {
    block.iter().fold(0.0f32, |amax, x| amax.max(x.abs())) * (0.5 / 127.0 + 1.0 / 1024.0)
}

#[test]
fn floats_and_8_bit_weights_are_those_of_the_model() {
    let dir = tempfile::tempdir().unwrap();
    tiny_model(&dir.path().join("m"), false);
    let weights = Container::open(&dir.path().join("m/model.safetensors")).unwrap();
    for (dtype, kind) in [
        ("f32", GGUFTensorType::F32),
        ("f16", GGUFTensorType::F16),
        ("bf16", GGUFTensorType::BF16),
        ("q8-0", GGUFTensorType::Q8_0),
    ] {
        ok(dir.path(), &["convert", "m", "x.gguf", "--dtype", dtype, "--overwrite"]);
        // Other commands name the number format that loses nothing.
        let out = run(dir.path(), &["generate", "-m", "x.gguf", "-p", "a"]);
        let (error, kept) = (String::from_utf8_lossy(&out.stderr), if dtype == "q8-0" { "f32" } else { dtype });
        let remedy = format!("train-cli convert x.gguf NEW-FOLDER/model.safetensors --dtype {kept}\n");
        assert!(out.status.code() == Some(2) && error.contains(&remedy), "{dtype}: {error}");
        let file = read(&dir.path().join("x.gguf"));
        // Two blocks, the embedding, the last norm and a head of its own.
        assert_eq!(file.len(), 2 * 11 + 3, "{dtype}");
        for (name, theirs) in NAMES.into_iter().chain([("lm_head.weight", "output.weight")]) {
            let (found_kind, dims, found) = &file[theirs];
            let (values, shape) = (weights.read_dense(name).unwrap(), weights.stored(name).unwrap().shape());
            assert_eq!(*dims, shape.iter().rev().map(|size| *size as u64).collect::<Vec<_>>(), "{theirs}");
            let is_norm = shape.len() == 1;
            assert_eq!(*found_kind, if is_norm { GGUFTensorType::F32 } else { kind }, "{theirs}");
            for (i, (x, y)) in values.iter().zip(found).enumerate() {
                let expected = match dtype {
                    "f16" if !is_norm => f16::from_f32(*x).to_f32(),
                    "bf16" if !is_norm => bf16::from_f32(*x).to_f32(),
                    _ => *x,
                };
                let block = &values[i / 32 * 32..][..32.min(values.len() - i / 32 * 32)];
                let bound = if dtype == "q8-0" && !is_norm { q8_bound(block) } else { 0.0 };
                assert!((y - expected).abs() <= bound, "{dtype} {theirs}, value {i}: {y}, expected {expected}");
            }
        }
    }
    let out = run(dir.path(), &["convert", "m", "x.dat", "--to", "dat", "--dtype", "q8-0"]);
    assert_eq!(out.status.code(), Some(2), "only GGUF holds 8-bit weights");
}

#[test]
fn nvfp4_weights_keep_their_codes_and_scales() {
    let dir = tempfile::tempdir().unwrap();
    let demo = demo_file("").display().to_string();
    let config = demo_file("config.json").display().to_string();
    let words = ["--init-config", &config, "--tokenizer", &demo, "--synthetic", "--device", "cpu", "--max-steps", "1"];
    let more = ["--max-seq-length", "32", "--eval-steps", "0", "-o", "r"];
    for (recipe, scales) in [("w4", "two"), ("w4", "single"), ("w4a4", "two")] {
        let flags = ["fit", "--overwrite", "--recipe", recipe, "--scales", scales];
        ok(dir.path(), &[&flags[..], &words, &more].concat());
        ok(dir.path(), &["convert", "r", "x.gguf", "--to", "gguf", "--dtype", "nvfp4", "--overwrite"]);
        let file = read(&dir.path().join("x.gguf"));
        let weights = Container::open(&dir.path().join("r/final/model.dat")).unwrap();
        let error = String::from_utf8_lossy(&run(dir.path(), &["inspect", "x.gguf"]).stderr).into_owned();
        assert!(error.contains("NEW-FOLDER/model.safetensors --dtype nvfp4\n"), "{error}");
        // The seven linear layers of each of three blocks have a tensor scale beside them; the head is the embedding.
        assert_eq!(file.len(), 3 * (11 + 7) + 2);
        for (name, theirs) in NAMES {
            let (kind, _, found) = &file[theirs];
            let Some(Stored::Packed { rows, cols, .. }) = weights.stored(name) else {
                assert!(found == &weights.read_dense(name).unwrap(), "{theirs}");
                continue;
            };
            assert_eq!(*kind, GGUFTensorType::NVFP4, "{theirs}");
            let packed = weights.read_packed(name).unwrap();
            let scale = &file[&theirs.replace(".weight", ".scale")].2;
            assert_eq!(scale, &[packed.global], "{theirs}");
            let without = backend_nvfp4::Packed { global: 1.0, ..packed };
            assert!(found == &reference::dequantize(&without, rows, cols), "{theirs}");
        }
        // What was not trained for 4-bit activations says that it must not run with them.
        let keys = keys(&dir.path().join("x.gguf"));
        let kept = keys.get("general.tensor_extra.prec_a4").map(|value| array(value).len());
        assert_eq!(kept, (recipe == "w4").then_some(21), "{recipe}");
    }
    // A dense copy is quantized where and as its training quantized: in squares, and the last of three blocks is not.
    let flags = ["fit", "--overwrite", "--recipe", "nvfp4", "--bf16-last-blocks", "1"];
    ok(dir.path(), &[&flags[..], &words, &more].concat());
    ok(dir.path(), &["convert", "r", "copy.safetensors", "--dtype", "bf16"]);
    ok(dir.path(), &["convert", "copy.safetensors", "x.gguf", "--dtype", "nvfp4", "--overwrite"]);
    // Without --dtype the output is NVFP4 if the input is, and else bf16.
    let out = run(dir.path(), &["convert", "copy.safetensors", "default.gguf"]);
    assert!(String::from_utf8_lossy(&out.stderr).contains("bf16, because the input has no NVFP4 weights"));
    ok(dir.path(), &["convert", "copy.safetensors", "named.gguf", "--dtype", "bf16"]);
    ok(dir.path(), &["convert", "r", "default2.gguf"]);
    ok(dir.path(), &["convert", "r", "named2.gguf", "--dtype", "nvfp4"]);
    for (default, named) in [("default.gguf", "named.gguf"), ("default2.gguf", "named2.gguf")] {
        let bytes = |name| std::fs::read(dir.path().join(name)).unwrap();
        assert!(bytes(default) == bytes(named), "{default}");
    }
    let file = read(&dir.path().join("x.gguf"));
    for (block, kind) in [GGUFTensorType::NVFP4, GGUFTensorType::NVFP4, GGUFTensorType::F16].into_iter().enumerate() {
        for layer in ["attn_q", "attn_output", "ffn_down"] {
            assert_eq!(file[&format!("blk.{block}.{layer}.weight")].0, kind, "block {block}, {layer}");
        }
    }
    let weights = Container::open(&dir.path().join("r/final/model.dat")).unwrap();
    for (name, theirs) in NAMES {
        let Some(Stored::Packed { rows, cols, .. }) = weights.stored(name) else { continue };
        let without = backend_nvfp4::Packed { global: 1.0, ..weights.read_packed(name).unwrap() };
        assert!(file[theirs].2 == reference::dequantize(&without, rows, cols), "{theirs}");
    }
    // It stays dense on the way back.
    std::fs::create_dir(dir.path().join("back")).unwrap();
    ok(dir.path(), &["convert", "x.gguf", "back/m.dat", "--dtype", "nvfp4"]);
    let back = Container::open(&dir.path().join("back/m.dat")).unwrap();
    for (block, packed) in [true, true, false].into_iter().enumerate() {
        let stored = back.stored(&format!("model.layers.{block}.mlp.down_proj.weight")).unwrap();
        assert_eq!(matches!(stored, Stored::Packed { .. }), packed, "block {block}");
    }
    let whole = std::fs::read(dir.path().join("x.gguf")).unwrap();
    for cut in [whole.len() / 2, 300, 30] {
        std::fs::write(dir.path().join("cut.gguf"), &whole[..cut]).unwrap();
        let out = run(dir.path(), &["convert", "cut.gguf", "back/cut.dat", "--dtype", "nvfp4"]);
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert!(stderr.contains("cut.gguf: ") && stderr.contains("damaged or cut off"), "{cut} bytes: {stderr}");
    }
    // How a checkpoint is quantized is the business of its run.
    let out = run(dir.path(), &["convert", "r/checkpoint-1", "y.gguf", "--dtype", "nvfp4"]);
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.code() == Some(2) && stderr.contains("export-dat"), "{stderr}");
    tiny_model(&dir.path().join("m"), true);
    let out = run(dir.path(), &["convert", "m", "y.gguf", "--to", "gguf", "--dtype", "nvfp4"]);
    let stderr = String::from_utf8_lossy(&out.stderr);
    // The file, the tensor and its K, which is the size of the MLP.
    let named = ["m: ", "\"model.layers.0.mlp.down_proj.weight\" has shape [64, 96]", "K = 96 is not a multiple of 64"];
    assert!(out.status.code() == Some(2) && named.iter().all(|words| stderr.contains(words)), "{stderr}");
    assert!(!dir.path().join("y.gguf").exists());
}

/// A folder for 4-bit activations becomes a file with the scales of activations, as llama.cpp's converter writes them: one f32
/// beside the weight, and nothing that forbids 4-bit activations. The file can be read again.
#[test]
fn the_scales_of_activations_are_in_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let (config, demo) = (demo_file("config.json").display().to_string(), demo_file("").display().to_string());
    let rows = demo_file("demo.tsv").display().to_string();
    let words = ["--init-config", &config, "--tokenizer", &demo, "--synthetic", "--device", "cpu", "--max-steps", "1"];
    ok(d, &[&["fit", "--max-seq-length", "32", "--eval-steps", "0", "-o", "r"][..], &words].concat());
    for format in ["compressed-tensors", "modelopt"] {
        let export = ["export-hf", "-m", "r", "-o", format, "--format", format, "--device", "cpu"];
        let calibrate = ["--activations", "nvfp4", "--calibration-data", &rows, "--calibration-rows", "2"];
        ok(d, &[&export[..], &calibrate].concat());
        let out = run(d, &["convert", format, "x.gguf", "--dtype", "nvfp4", "--overwrite"]);
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success() && !stderr.contains("the output has none"), "{stderr}");
        let (file, folder) = (read(&d.join("x.gguf")), Container::open(&d.join(format)).unwrap());
        let back = GgufFile::open(&d.join("x.gguf")).unwrap();
        assert_eq!(file.len(), 3 * (11 + 7 + 7) + 2, "{format}");
        let mut scales = 0;
        for (name, theirs) in NAMES {
            let Some(given) = folder.input_scale(name).unwrap() else { continue };
            let (kind, dims, found) = &file[&theirs.replace(".weight", ".input_scale")];
            assert_eq!(
                (*kind, &dims[..], &found[..]),
                (GGUFTensorType::F32, &[1][..], &[given.scale()][..]),
                "{theirs}"
            );
            assert_eq!(back.input_scale(name).unwrap().unwrap().scale(), given.scale(), "{theirs}");
            scales += 1;
        }
        assert_eq!(scales, 7, "{format}");
        assert!(!keys(&d.join("x.gguf")).contains_key("general.tensor_extra.prec_a4"), "{format}");
        // Other number formats have no such scales, and the program says so.
        for (input, output, dtype) in [(format, "y.gguf", "q8-0"), ("x.gguf", "y.safetensors", "bf16")] {
            let out = run(d, &["convert", input, output, "--dtype", dtype, "--overwrite"]);
            let stderr = String::from_utf8_lossy(&out.stderr);
            assert!(out.status.success() && stderr.contains("the output has none"), "{input} {dtype}: {stderr}");
        }
    }
}

/// A model that went through GGUF has the same weights and answers the same.
#[test]
fn a_gguf_file_becomes_a_model_again() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let config = demo_file("config.json").display().to_string();
    let demo = demo_file("").display().to_string();
    let mut untied: serde_json::Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    untied["tie_word_embeddings"] = false.into();
    std::fs::write(d.join("untied.json"), untied.to_string()).unwrap();
    for (config, recipe, scales, dtypes) in [
        (config.as_str(), "w4", "two", &["nvfp4"][..]),
        (config.as_str(), "w4", "single", &["nvfp4"]),
        (config.as_str(), "bf16", "auto", &["f32", "bf16", "f16", "q8-0"]),
        ("untied.json", "w4", "two", &["nvfp4"]),
        ("untied.json", "bf16", "auto", &["f32", "q8-0"]),
    ] {
        let words = ["fit", "--init-config", config, "--tokenizer", &demo, "--synthetic", "--device", "cpu"];
        let more = ["--max-steps", "1", "--max-seq-length", "32", "--eval-steps", "0", "-o", "r", "--overwrite"];
        let scales = if recipe == "bf16" { vec![] } else { vec!["--scales", scales] };
        ok(d, &[&words[..], &more, &["--recipe", recipe], &scales].concat());
        let tied = config != "untied.json";
        for dtype in dtypes {
            let _ = std::fs::remove_dir_all(d.join("back"));
            std::fs::create_dir(d.join("back")).unwrap();
            ok(d, &["convert", "r", "x.gguf", "--dtype", dtype, "--overwrite"]);
            let kept = if *dtype == "nvfp4" { "back/m.dat" } else { "back/m.safetensors" };
            let number = if *dtype == "q8-0" { "f32" } else { dtype };
            let levels: &[&str] = match *dtype {
                // A head of its own is f16 in the GGUF file, and would become NVFP4.
                "nvfp4" if scales.contains(&"single") => &["--scales", "single", "--head", "bf16"],
                "nvfp4" => &["--scales", "two", "--head", "bf16"],
                _ => &[],
            };
            let said = ok(d, &[&["convert", "x.gguf", kept, "--dtype", number][..], levels].concat());
            assert!(said.contains(kept), "{said}");
            let name = if *dtype == "nvfp4" { "r/final/model.dat" } else { "r/final/model.safetensors" };
            let (ours, back) = (Container::open(&d.join(name)).unwrap(), Container::open(&d.join(kept)).unwrap());
            let sorted = |container: &Container| {
                let mut names = container.names();
                names.sort();
                names
            };
            assert_eq!(sorted(&ours), sorted(&back), "{dtype}");
            for name in ours.names() {
                match ours.stored(&name).unwrap() {
                    Stored::Packed { .. } => {
                        assert_eq!(ours.read_packed(&name).unwrap(), back.read_packed(&name).unwrap(), "{name}");
                    }
                    Stored::Dense { .. } => {
                        let (a, b) = (ours.read_dense(&name).unwrap(), back.read_dense(&name).unwrap());
                        let expected = |x: f32| match *dtype {
                            "f16" => f16::from_f32(x).to_f32(),
                            "nvfp4" if name == names::HEAD => bf16::from_f32(x).to_f32(),
                            _ => x,
                        };
                        let is_norm = ours.stored(&name).unwrap().shape().len() == 1;
                        assert_eq!(a.len(), b.len(), "{dtype} {name}");
                        for (x, y) in a.chunks(32).zip(b.chunks(32)) {
                            let bound = if *dtype == "q8-0" && !is_norm { q8_bound(x) } else { 0.0 };
                            let off = x.iter().zip(y).fold(0.0f32, |off, (x, y)| off.max((expected(*x) - y).abs()));
                            assert!(off <= bound, "{dtype} {name}: {off} of {bound}");
                        }
                    }
                }
            }
            // The folder is whole: it has the sizes, the tokenizer and the template.
            let answer = |model: &str| {
                let words =
                    ["generate", "-m", model, "-p", "Who are you? 你好", "--max-tokens", "8", "--device", "cpu"];
                ok(d, &[&words[..], &["--temperature", "0"]].concat())
            };
            // The head of an untied model was f16, and is bf16 now.
            if matches!(*dtype, "f32" | "bf16") || *dtype == "nvfp4" && tied {
                assert_eq!(answer(kept), answer("r/final"), "{dtype}");
            }
        }
    }
}

/// A file that another program's package wrote has the values that the package reads, and its sizes, tokenizer and template are
/// enough to answer.
#[test]
fn a_gguf_file_of_another_program_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let foreign = golden("gguf/foreign.gguf").canonicalize().unwrap();
    let expected: serde_json::Value = serde_json::from_slice(&golden_bytes("gguf/foreign.json")).unwrap();
    ok(d, &["convert", foreign.to_str().unwrap(), "model.safetensors", "--dtype", "f32"]);
    let copy = Container::open(&d.join("model.safetensors")).unwrap();
    let direct = GgufFile::open(&foreign).unwrap();
    let digests = expected["tensors"].as_object().unwrap();
    assert_eq!(copy.names().len(), digests.len());
    for (name, digest) in digests {
        for container in [&copy as &dyn Tensors, &direct] {
            let values = match container.stored(name).unwrap() {
                Stored::Packed { rows, cols, .. } => {
                    reference::dequantize(&container.read_packed(name).unwrap(), rows, cols)
                }
                Stored::Dense { .. } => container.read_dense(name).unwrap(),
            };
            // The package reads a code of minus zero as zero.
            let values = values.into_iter().map(|x| x + 0.0);
            let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
            let found: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(digest, &found, "{name}");
        }
    }
    let config: serde_json::Value = serde_json::from_slice(&std::fs::read(d.join("config.json")).unwrap()).unwrap();
    for (key, size) in expected["config"].as_object().unwrap() {
        assert_eq!(&config[key], size, "{key}");
    }
    let text = "Who are you? 你是誰？";
    let [ours, theirs] =
        [demo_file("tokenizer.json"), d.join("tokenizer.json")].map(|p| Tokenizer::from_file(&p).unwrap());
    assert_eq!(ours.encode(text).unwrap(), theirs.encode(text).unwrap());
    let answered = ["generate", "-m", ".", "-p", text, "--max-tokens", "4", "--device", "cpu", "--temp", "0", "--json"];
    let answer: serde_json::Value = serde_json::from_str(&ok(d, &answered)).unwrap();
    assert!(answer["prompt_tokens"].as_u64() > Some(10) && answer["tokens"].as_u64() > Some(0), "{answer}");
}

/// The tokenizer that a GGUF file describes is that of Qwen3.
#[test]
fn the_tokenizer_of_a_gguf_file_gives_the_same_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let path = real_tokenizer(&d.join("m"));
    let real = Tokenizer::from_file(&path).unwrap();
    let mut config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(d.join("m/config.json")).unwrap()).unwrap();
    // The smallest model that has so many tokens.
    let small = [("hidden_size", 16), ("intermediate_size", 16), ("num_hidden_layers", 1), ("vocab_size", 151_936)];
    small.into_iter().for_each(|(key, size)| config[key] = size.into());
    std::fs::write(d.join("big.json"), config.to_string()).unwrap();
    let init =
        ["fit", "--init-config", "big.json", "--tokenizer", "m", "--synthetic", "--device", "cpu", "--max-steps", "1"];
    ok(d, &[&init[..], &["--max-seq-length", "16", "-o", "r", "--recipe", "bf16", "--eval-steps", "0"]].concat());
    ok(d, &["convert", "r", "x.gguf", "--dtype", "f16"]);
    std::fs::create_dir(d.join("back")).unwrap();
    ok(d, &["convert", "x.gguf", "back/m.safetensors", "--dtype", "f16"]);
    let back = Tokenizer::from_file(&d.join("back/tokenizer.json")).unwrap();
    let texts: serde_json::Value = serde_json::from_slice(&golden_bytes("tokenizer/encodings.json")).unwrap();
    let mut compared = 0;
    for text in texts["encodings"].as_array().unwrap().iter().filter_map(|case| case["text"].as_str()) {
        assert_eq!(real.encode(text).unwrap(), back.encode(text).unwrap(), "{text:?}");
        let ids = real.encode(text).unwrap();
        assert_eq!(
            (real.decode(&ids).unwrap(), real.decode_all(&ids).unwrap()),
            (back.decode(&ids).unwrap(), back.decode_all(&ids).unwrap())
        );
        compared += 1;
    }
    assert!(compared > 30, "{compared}");
}

/// An id that stands for nothing keeps its place, and so do the ids after it.
#[test]
fn a_tokenizer_with_a_hole_keeps_its_ids() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let path = d.join("m/tokenizer.json");
    let mut tokenizer: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let merged: Vec<String> =
        tokenizer["model"]["merges"].as_array().unwrap().iter().map(ToString::to_string).collect();
    let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
    let lonely =
        |token: &&String| token.chars().count() == 1 && !merged.iter().any(|merge| merge.contains(token.as_str()));
    let hole = vocab.keys().find(lonely).unwrap().clone();
    vocab.remove(&hole);
    std::fs::write(&path, tokenizer.to_string()).unwrap();
    ok(d, &["convert", "m", "x.gguf", "--dtype", "f16"]);
    std::fs::create_dir(d.join("back")).unwrap();
    ok(d, &["convert", "x.gguf", "back/m.safetensors", "--dtype", "f16"]);
    let back = Tokenizer::from_file(&d.join("back/tokenizer.json")).unwrap();
    for token in tokenizer["added_tokens"].as_array().unwrap() {
        let (text, id) = (token["content"].as_str().unwrap(), token["id"].as_u64().unwrap());
        assert_eq!(back.id(text), Some(id as u32), "{text}");
    }
}

#[test]
fn broken_gguf_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    ok(d, &["convert", "m", "x.gguf", "--dtype", "q8-0"]);
    let whole = std::fs::read(d.join("x.gguf")).unwrap();
    let values = open_gguf_file(d.join("x.gguf")).unwrap().tensor_infos().len();
    assert!(values > 20);
    // Each prefix that ends in what stands before the values, and some that end among them.
    let head = whole.windows(4).position(|w| w == b"blk.").unwrap();
    let steps = (0..head).step_by(997).chain((head..whole.len()).step_by(whole.len() / 60));
    let path = d.join("y.gguf");
    for end in steps {
        std::fs::write(&path, &whole[..end]).unwrap();
        assert!(GgufFile::open(&path).is_err(), "a file of {end} of {} bytes is read", whole.len());
    }
    // A flipped bit gives an error or other values, but no panic and no large allocation.
    for bit in (0..head * 8).step_by(509).chain((head * 8..(head + 4096) * 8).step_by(61)) {
        let mut broken = whole.clone();
        broken[bit / 8] ^= 1 << (bit % 8);
        std::fs::write(&path, &broken).unwrap();
        if let Ok(file) = GgufFile::open(&path) {
            let _ = file.small_files();
            file.names().iter().for_each(|name| drop(file.read_dense(name)));
        }
    }
    // A file whose angles are scaled: the key of its template, which has as many letters, becomes that of the scaling.
    let at = whole.windows(23).position(|w| w == b"tokenizer.chat_template").unwrap();
    let scaled = [&whole[..at], b"qwen3.rope.scaling.type", &whole[at + 23..]].concat();
    std::fs::write(d.join("scaled.gguf"), scaled).unwrap();
    for (args, said) in [
        (&["convert", "scaled.gguf", "z.safetensors", "--dtype", "bf16"][..], "scaled rotary angles are not supported"),
        (&["convert", "x.gguf", "z.gguf", "--dtype", "f16"], "a GGUF file cannot be converted to GGUF"),
        (&["generate", "-m", "x.gguf", "-p", "a"], "train-cli convert x.gguf"),
        (&["fit", "-m", "x.gguf", "-d", "m/demo.tsv"], "train-cli convert x.gguf"),
        (&["inspect", "x.gguf"], "train-cli convert x.gguf"),
    ] {
        let out = run(d, args);
        let error = String::from_utf8_lossy(&out.stderr);
        assert!(!out.status.success() && error.contains(said), "{args:?}: {error}");
    }
}

/// A flipped sign of a block scale is no other weight.
#[test]
fn a_damaged_scale_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let (config, demo) = (demo_file("config.json").display().to_string(), demo_file("").display().to_string());
    let init = ["fit", "--init-config", &config, "--tokenizer", &demo, "--synthetic", "--device", "cpu"];
    ok(d, &[&init[..], &["--max-steps", "1", "--max-seq-length", "16", "--eval-steps", "0", "-o", "r"]].concat());
    ok(d, &["convert", "r", "x.gguf", "--dtype", "nvfp4"]);
    let mut file = open_gguf_file(d.join("x.gguf")).unwrap();
    let block = file.load_tensor_data("blk.1.attn_q.weight").unwrap().unwrap().as_slice()[..36].to_vec();
    let mut bytes = std::fs::read(d.join("x.gguf")).unwrap();
    let at = bytes.windows(36).position(|window| window == block).unwrap();
    bytes[at] |= 0x80;
    std::fs::write(d.join("x.gguf"), bytes).unwrap();
    std::fs::create_dir(d.join("back")).unwrap();
    for dtype in ["bf16", "nvfp4"] {
        let said = refused(d, &["convert", "x.gguf", "back/m.safetensors", "--dtype", dtype], 6);
        let named = "x.gguf: \"model.layers.1.self_attn.q_proj.weight\": scale byte 0x";
        assert!(said.contains(named) && said.contains("row 0, block 0 is NaN or negative"), "{dtype}: {said}");
    }
}

/// A converted file can be used as it is: the small files lie beside it.
#[test]
fn convert_puts_the_small_files_beside_its_output() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    std::fs::create_dir(d.join("n")).unwrap();
    std::fs::write(d.join("n/tokenizer_config.json"), "{}").unwrap();
    let out = run(d, &["convert", "m", "n/x.dat", "--dtype", "nvfp4"]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && said.contains("tokenizer_config.json; the model's file"), "{said}");
    for name in ["config.json", "tokenizer.json", "generation_config.json"] {
        let of = |folder: &str| std::fs::read(d.join(folder).join(name)).unwrap();
        assert!(of("n") == of("m") && said.contains(name), "{name}: {said}");
    }
    assert_eq!(std::fs::read(d.join("n/tokenizer_config.json")).unwrap(), b"{}");
    // The config.json of another model stays as it is, so that the file would not load beside it.
    for (folder, tied, field) in
        [("wider", true, "intermediate_size is 128, and 96"), ("untied", false, "tie_word_embeddings")]
    {
        tiny_model(&d.join(folder), tied);
        let path = d.join(folder).join("config.json");
        if folder == "wider" {
            let text = std::fs::read_to_string(&path).unwrap();
            std::fs::write(&path, text.replace("\"intermediate_size\":96", "\"intermediate_size\":128")).unwrap();
        }
        let before = std::fs::read(&path).unwrap();
        let out = run(d, &["convert", "m", &format!("{folder}/x.dat"), "--dtype", "nvfp4"]);
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.code() == Some(2) && said.contains(field), "{folder}: {said}");
        assert!(!d.join(folder).join("x.dat").exists() && std::fs::read(&path).unwrap() == before, "{folder}");
    }
    // The shards of a folder would still be loaded.
    std::fs::create_dir(d.join("shards")).unwrap();
    std::fs::write(d.join("shards/model.safetensors.index.json"), "{}").unwrap();
    let said = refused(d, &["convert", "m", "shards/model.safetensors", "--dtype", "bf16"], 2);
    assert!(said.contains("shards holds shards and model.safetensors.index.json"), "{said}");
    assert!(!d.join("shards/model.safetensors").exists());
    // A config.json in a run folder would hide its checkpoints.
    std::fs::create_dir(d.join("run")).unwrap();
    ["config.toml", "run.json"].iter().for_each(|name| std::fs::write(d.join("run").join(name), "").unwrap());
    let said = refused(d, &["convert", "m", "run/x.safetensors", "--dtype", "bf16"], 2);
    assert!(said.contains("run is a run folder"), "{said}");
    assert!(!d.join("run/x.safetensors").exists() && !d.join("run/config.json").exists());
    ok(d, &["convert", "m", "run/x.gguf", "--dtype", "bf16"]);
    // How an export was trained goes with its codes; a pipe of that name is the user's, and is not waited for.
    let (config, demo) = (demo_file("config.json").display().to_string(), demo_file("").display().to_string());
    let init =
        ["fit", "--init-config", &config, "--tokenizer", &demo, "--synthetic", "--device", "cpu", "--max-steps", "1"];
    ok(d, &[&init[..], &["--max-seq-length", "16", "--recipe", "w4a4", "--eval-steps", "0", "-o", "r"]].concat());
    std::fs::create_dir(d.join("p")).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(d.join("p/config.json")).status().unwrap().success());
    let out = run(d, &["convert", "r", "p/x.dat", "--dtype", "nvfp4"]);
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && said.contains("config.json; the model's file"), "{said}");
    assert_eq!(
        std::fs::read(d.join("p/x.dat.trained.json")).unwrap(),
        std::fs::read(d.join("r/final/trained.json")).unwrap()
    );
}

#[test]
fn sizes_tokens_and_template_are_in_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let m = dir.path().join("m");
    tiny_model(&m, true);
    ok(dir.path(), &["convert", "m", "x.gguf", "--to", "gguf", "--dtype", "bf16"]);
    let keys = keys(&dir.path().join("x.gguf"));
    let text = |key: &str| keys[key].as_str().unwrap_or_else(|| panic!("{key} is no text")).to_owned();
    let number = |key: &str| number(&keys[key]).unwrap_or_else(|| panic!("{key} is no number"));
    assert_eq!([text("general.architecture"), text("tokenizer.ggml.model")], ["qwen3", "gpt2"]);
    assert_eq!(text("tokenizer.ggml.pre"), "qwen2");
    let config: serde_json::Value = serde_json::from_slice(&std::fs::read(m.join("config.json")).unwrap()).unwrap();
    for (key, ours) in [
        ("block_count", "num_hidden_layers"),
        ("context_length", "max_position_embeddings"),
        ("embedding_length", "hidden_size"),
        ("feed_forward_length", "intermediate_size"),
        ("attention.head_count", "num_attention_heads"),
        ("attention.head_count_kv", "num_key_value_heads"),
        ("attention.key_length", "head_dim"),
        ("attention.value_length", "head_dim"),
        ("rope.freq_base", "rope_theta"),
        ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ] {
        let expected = config[ours].as_f64().unwrap();
        assert!((number(&format!("qwen3.{key}")) - expected).abs() <= 1e-6 * expected, "{key}");
    }
    let tokenizer: serde_json::Value =
        serde_json::from_slice(&std::fs::read(m.join("tokenizer.json")).unwrap()).unwrap();
    let (tokens, kinds) = (array(&keys["tokenizer.ggml.tokens"]), array(&keys["tokenizer.ggml.token_type"]));
    assert_eq!([tokens.len(), kinds.len()], [config["vocab_size"].as_u64().unwrap() as usize; 2]);
    for (token, id) in tokenizer["model"]["vocab"].as_object().unwrap() {
        assert_eq!(tokens[id.as_u64().unwrap() as usize].as_str(), Some(token.as_str()));
    }
    let end = number("tokenizer.ggml.eos_token_id") as usize;
    assert_eq!((tokens[end].as_str(), self::number(&kinds[end])), (Some("<|im_end|>"), Some(3.0)));
    assert_eq!(array(&keys["tokenizer.ggml.merges"]).len(), tokenizer["model"]["merges"].as_array().unwrap().len());
    let template: serde_json::Value =
        serde_json::from_slice(&std::fs::read(m.join("tokenizer_config.json")).unwrap()).unwrap();
    assert_eq!(Some(text("tokenizer.chat_template").as_str()), template["chat_template"].as_str());
}

/// The keys of a file.
fn keys(path: &Path) -> HashMap<String, MetadataValue> {
    open_gguf_file(path).unwrap().metadata().data.clone()
}

fn number(value: &MetadataValue) -> Option<f64> {
    value.as_f64().or_else(|| value.as_i64().map(|x| x as f64)).or_else(|| value.as_u64().map(|x| x as f64))
}

fn array(value: &MetadataValue) -> &[MetadataValue] {
    let MetadataValue::Array(array) = value else { panic!("{value:?} is no array") };
    &array.values
}

type Tensor = (GGUFTensorType, Vec<u64>, Vec<f32>);

/// The tensors of a file: types, dimensions and values.
fn read(path: &Path) -> HashMap<String, Tensor> {
    let mut file = open_gguf_file(path).unwrap();
    let infos: Vec<_> = file.tensor_infos().to_vec();
    let mut tensor = |name: &str| file.load_tensor_data(name).unwrap().unwrap().as_slice().to_vec();
    let decoded = infos.iter().map(|info| {
        let values = decode(info.tensor_type, &tensor(&info.name));
        (info.name.clone(), (info.tensor_type, info.shape.dims().to_vec(), values))
    });
    decoded.collect()
}

fn decode(kind: GGUFTensorType, bytes: &[u8]) -> Vec<f32> {
    let half = |b: &[u8]| f16::from_le_bytes([b[0], b[1]]).to_f32();
    match kind {
        GGUFTensorType::F32 => bytes.chunks(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        GGUFTensorType::F16 => bytes.chunks(2).map(half).collect(),
        GGUFTensorType::BF16 => bytes.chunks(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        GGUFTensorType::Q8_0 => {
            let block = |b: &[u8]| b[2..].iter().map(|x| half(b) * f32::from(x.cast_signed())).collect::<Vec<_>>();
            bytes.chunks(34).flat_map(block).collect()
        }
        GGUFTensorType::NVFP4 => bytes.chunks(36).flat_map(nvfp4).collect(),
        _ => panic!("{kind:?}"),
    }
}

/// A block of 64 values: four scales, then 8 bytes for each 16 values, of which byte j holds values j and j + 8.
fn nvfp4(block: &[u8]) -> Vec<f32> {
    let value = |code: u8| E2M1[usize::from(code & 7)] * if code & 8 == 0 { 1.0 } else { -1.0 };
    let mut values = Vec::new();
    for (scale, codes) in block[..4].iter().zip(block[4..].chunks(8)) {
        let halves = [0, 4].map(|shift| codes.iter().map(move |byte| byte >> shift & 0xF));
        values.extend(halves.into_iter().flatten().map(|code| value(code) * E4m3::value(*scale) as f32));
    }
    values
}
