//! A run computes what its settings say: padding does not change the loss, a resumed run equals the uninterrupted one bit
//! for bit (also after a kill), frozen blocks stay, and the run folder holds what it promises.

use crate::support::{
    Cpu,
    files::{F32, command, demo_file, ok, real_tokenizer, refused, run, tiny_model},
    golden,
};
use backend_nvfp4::MasterKind;
use burn::backend::Autodiff;
use model_qwen3::{
    config::Qwen3Config,
    container::Container,
    tensors::{Stored, Tensors},
    weights,
};
use std::{
    path::Path,
    process::Stdio,
    time::{Duration, Instant},
};
use train_cli::{data::order::MicroBatch, data::sample::synthetic, settings::LossKind, train::objective::Trainee};

#[test]
fn padding_changes_neither_loss_nor_gradients() {
    let config = Qwen3Config::from_file(&demo_file("config.json")).unwrap();
    let model = weights::random::<Cpu>(&config, F32, MasterKind::F32, 5, &Default::default()).unwrap();
    let model = weights::trained::<Autodiff<Cpu>>(model, MasterKind::F32);
    let trainee = Trainee::new(model, LossKind::CrossEntropy, 0);
    let samples = synthetic(1, 12, 500, 3);
    let alone = MicroBatch::new(&[&samples[0]], 11);
    let mut padded = alone.clone();
    padded.ids.push(vec![1; 20]);
    padded.supervised.push(vec![false; 20]);
    padded.documents.push(vec![0]);
    let grads = |batch: &MicroBatch| {
        let loss = trainee.batch_loss(batch);
        let value: f32 = loss.clone().into_scalar();
        let norm = trainee.model().embed_tokens.val().grad(&loss.backward()).unwrap().powi_scalar(2).sum();
        (value, norm.into_scalar())
    };
    let ((a, na), (b, nb)): ((f32, f32), (f32, f32)) = (grads(&alone), grads(&padded));
    assert!((a - b).abs() < 1e-6 * a && (na - nb).abs() < 1e-5 * na, "{a} {b} {na} {nb}");
}

const FIT: [&str; 21] = [
    "fit",
    "-m",
    "m",
    "-d",
    "m/demo.tsv",
    "--device",
    "cpu",
    "--learning-rate",
    "1e-3",
    "--batch-size",
    "2",
    "--grad-accum",
    "2",
    "--max-steps",
    "12",
    "--save-steps",
    "3",
    "--eval-steps",
    "5",
    "--val-split",
    "0.1",
];

fn fit(dir: &Path, output: &str, more: &[&str]) -> Vec<String> {
    let mut args: Vec<String> = FIT.iter().map(|s| (*s).to_owned()).collect();
    args.extend(["-o".to_owned(), output.to_owned()]);
    args.extend(more.iter().map(|s| (*s).to_owned()));
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    ok(dir, &words);
    args
}

fn same_file(a: &Path, b: &Path) {
    assert!(std::fs::read(a).unwrap() == std::fs::read(b).unwrap(), "{} and {} differ", a.display(), b.display());
}

#[test]
fn a_killed_and_resumed_run_is_the_uninterrupted_one() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    for (state, master, damped) in [("int8", "f32", "0.6"), ("bf16", "bf16-residual", "0"), ("int4", "nvfp4", "0")] {
        let whole = format!("whole-{state}");
        // Twice as long as the other runs, so that the kill lands well before the end.
        let longer = FIT.map(|word| if word == "12" { "24" } else { word });
        let mut words = longer.to_vec();
        words.extend([
            "-o",
            &whole,
            "--optimizer-state-mode",
            state,
            "--master-weights",
            master,
            "--damped-finish",
            damped,
        ]);
        ok(d, &words);

        // Killed without warning as soon as a first checkpoint is there.
        let killed = format!("killed-{state}");
        let mut words = longer.to_vec();
        words.extend([
            "-o",
            &killed,
            "--optimizer-state-mode",
            state,
            "--master-weights",
            master,
            "--damped-finish",
            damped,
        ]);
        let mut child = command(d, &words).stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        let deadline = Instant::now() + Duration::from_secs(120);
        let saved = || {
            let entries = std::fs::read_dir(d.join(&killed)).into_iter().flatten().flatten();
            entries.into_iter().any(|e| e.file_name().to_string_lossy().starts_with("checkpoint-"))
        };
        while !saved() {
            assert!(Instant::now() < deadline && child.try_wait().unwrap().is_none(), "no checkpoint appeared");
            std::thread::yield_now();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!d.join(&killed).join("train_results.json").exists(), "the run ended before it was killed");

        ok(d, &["fit", "--resume-from-checkpoint", "-o", &killed]);
        for name in ["model.safetensors", "optimizer.safetensors"] {
            let of = |run: &str| d.join(run).join("checkpoint-24").join(name);
            same_file(&of(&whole), &of(&killed));
        }
        same_file(&d.join(&whole).join("final/model.dat"), &d.join(&killed).join("final/model.dat"));
        let steps = |run: &str| -> Vec<(u64, f64)> {
            let text = std::fs::read_to_string(d.join(run).join("metrics.jsonl")).unwrap();
            let line = |l: &str| serde_json::from_str::<serde_json::Value>(l).unwrap();
            text.lines().map(line).filter_map(|v| Some((v["step"].as_u64()?, v["loss"].as_f64()?))).collect()
        };
        assert_eq!(steps(&whole), steps(&killed), "logged losses");

        // Resuming a complete run changes nothing.
        let results = std::fs::read(d.join(&killed).join("train_results.json")).unwrap();
        ok(d, &["fit", "--resume-from-checkpoint", &killed]);
        assert_eq!(std::fs::read(d.join(&killed).join("train_results.json")).unwrap(), results);
    }
}

#[test]
fn resume_refuses_other_settings_other_data_and_broken_checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    fit(d, "r", &[]);
    let refused = |args: &[&str], code: i32, text: &str| {
        let out = run(d, args);
        let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(code), "{args:?}: {stderr}");
        assert!(stderr.contains(text), "{args:?}: {stderr}");
    };
    refused(&["fit", "--resume", "-o", "r", "--lr", "2e-3"], 2, "--learning-rate is 0.002");
    refused(&["fit", "-m", "m", "-d", "m/demo.tsv", "-o", "r"], 2, "is not empty");
    refused(&["fit", "--resume-from-checkpoint", "r/none", "-o", "r"], 2, "no such checkpoint");

    // The newest checkpoint is damaged: the run resumes from the one before and says so.
    let model = d.join("r/checkpoint-12/model.safetensors");
    let mut bytes = std::fs::read(&model).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&model, bytes).unwrap();
    refused(&["fit", "--resume-from-checkpoint", "r/checkpoint-12", "-o", "r"], 6, "SHA-256");
    let out = run(d, &["fit", "--resume", "-o", "r"]);
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success(), "{stderr}");
    assert!(stderr.contains("skipping r/checkpoint-12") && stderr.contains("r/checkpoint-9 · step 9"), "{stderr}");

    std::fs::write(d.join("m/demo.tsv"), "a\tb\n".repeat(20)).unwrap();
    refused(&["fit", "--resume-from-checkpoint", "r/checkpoint-9", "-o", "r"], 2, "training data, config.json");
}

#[test]
fn a_checkpoint_of_another_layout_is_refused_with_its_version() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    fit(d, "r", &[]);
    let checkpoint = d.join("r/checkpoint-12");
    let path = checkpoint.join("trainer_state.json");
    let mut state: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(state["version"], 2);
    state["version"] = 1.into();
    state["settings"] = serde_json::json!({"quantise_from": 0.0, "optimizer_state_mode": "nvfp4"});
    let text = state.to_string();
    std::fs::write(&path, &text).unwrap();
    let manifest = checkpoint.join("manifest.json");
    let mut files: serde_json::Value = serde_json::from_slice(&std::fs::read(&manifest).unwrap()).unwrap();
    let (bytes, sha256) = train_cli::durable::digest(&path).unwrap();
    files["files"]["trainer_state.json"] = serde_json::json!({"bytes": bytes, "sha256": sha256});
    std::fs::write(&manifest, files.to_string()).unwrap();
    for words in [
        &["fit", "--resume", "-o", "r"][..],
        &["fit", "--resume-from-checkpoint", "r/checkpoint-12"],
        &["export-dat", "--checkpoint", "r/checkpoint-12", "--output-dat", "x.dat"],
    ] {
        let out = run(d, words);
        let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(2), "{words:?}: {stderr}");
        for text in ["layout version 1", "NVFP4 optimizer moments", "reads version 2", "fit -m r/checkpoint-12"] {
            assert!(stderr.contains(text), "{words:?} does not say {text:?}: {stderr}");
        }
    }
    // The remedy works.
    ok(d, &["fit", "-m", "r/checkpoint-12", "-d", "m/demo.tsv", "--device", "cpu", "--max-steps", "1", "-o", "new"]);
}

#[test]
fn overwrite_removes_a_run_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let fit_to = |output: &str, model: &str| {
        let words = [
            "fit",
            "-m",
            model,
            "-d",
            "m/demo.tsv",
            "--device",
            "cpu",
            "--max-steps",
            "1",
            "--overwrite",
            "-o",
            output,
        ];
        run(d, &words)
    };
    let refused = |out: std::process::Output, text: &str| {
        let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains(text) && stderr.contains("nothing was removed"), "{stderr}");
    };
    assert!(fit_to("r", "m").status.success());
    assert!(fit_to("r", "m").status.success(), "--overwrite replaces an older run");
    refused(fit_to("r", "r/final"), "is an input of this run");
    std::fs::write(d.join("r/thesis.txt"), "years").unwrap();
    refused(fit_to("r", "m"), "holds thesis.txt");
    refused(fit_to(".", "m"), "which is no part of a run");
    // A run that was killed before its first checkpoint begins again. It must not wait for the lock that it holds itself.
    std::fs::create_dir(d.join("killed")).unwrap();
    std::fs::copy(d.join("r/config.toml"), d.join("killed/config.toml")).unwrap();
    std::fs::write(d.join("killed/nohup.out"), "output").unwrap();
    refused(run(d, &["fit", "--resume-from-checkpoint", "killed"]), "holds nohup.out");
    assert!(d.join("r/thesis.txt").exists() && d.join("r/final/model.dat").exists() && d.join("m/demo.tsv").exists());

    // Two processes never train in one folder.
    std::fs::remove_file(d.join("r/thesis.txt")).unwrap();
    let held = train_cli::durable::lock(&d.join("r")).unwrap();
    let stderr = String::from_utf8_lossy(&fit_to("r", "m").stderr).into_owned();
    assert!(stderr.contains("is training here; wait for its end"), "{stderr}");
    // So says a run that would find the folder full.
    let words = ["fit", "-m", "m", "-d", "m/demo.tsv", "--device", "cpu", "--max-steps", "1", "-o", "r"];
    let stderr = String::from_utf8_lossy(&run(d, &words).stderr).into_owned();
    let holder = format!("process {} on ", std::process::id());
    assert!(stderr.contains(&holder) && !stderr.contains("is not empty"), "{stderr}");
    drop(held);
    let stderr = String::from_utf8_lossy(&run(d, &words).stderr).into_owned();
    assert!(stderr.contains("r is not empty; give another --output-dir"), "{stderr}");
    assert!(d.join("r/final/model.dat").exists());
}

#[test]
fn a_tied_head_that_is_spelled_out_stays_tied() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let source = Container::open(&d.join("m")).unwrap();
    let mut names = source.names();
    names.push("lm_head.weight".into());
    let of =
        |name: &str| if name == "lm_head.weight" { "model.embed_tokens.weight".to_owned() } else { name.to_owned() };
    let layout: Vec<_> =
        names.iter().map(|n| (n.clone(), safetensors::Dtype::F32, source.stored(&of(n)).unwrap().shape())).collect();
    let mut bytes = model_qwen3::safetensors::header(&layout);
    for name in &names {
        bytes.extend(source.read_dense(&of(name)).unwrap().iter().flat_map(|v| v.to_le_bytes()));
    }
    std::fs::write(d.join("m/model.safetensors"), bytes).unwrap();
    fit(d, "r", &[]);
    assert!(Container::open(&d.join("r/final")).unwrap().stored("lm_head.weight").is_none());
}

#[test]
fn the_real_tokenizer_learns_the_origins_rows_and_stops() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let text = d.join("qwen");
    std::fs::create_dir(&text).unwrap();
    real_tokenizer(&text);
    std::fs::copy(golden("chat/qwen3-instruct-2507.jinja"), text.join("chat_template.jinja")).unwrap();
    let rows = std::fs::read_to_string(golden("train/stageB-curriculum-v5.tsv")).unwrap();
    let rows: String =
        rows.lines().filter(|l| l.starts_with("你是誰") || l.contains("overfitting")).flat_map(|l| [l, "\n"]).collect();
    std::fs::write(d.join("rows.tsv"), rows).unwrap();
    let shape = serde_json::json!({
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": true,
        "rope_theta": 5000000, "eos_token_id": 151645, "max_position_embeddings": 512,
    });
    std::fs::write(d.join("small.json"), shape.to_string()).unwrap();
    ok(
        d,
        &[
            "fit",
            "--init-config",
            "small.json",
            "--tokenizer",
            "qwen",
            "-d",
            "rows.tsv",
            "-o",
            "r",
            "--device",
            "cpu",
            "--lr",
            "2e-2",
            "--batch-size",
            "2",
            "--grad-accum",
            "1",
            "--max-steps",
            "45",
            "--val-split",
            "0",
            "--eval-steps",
            "0",
            "--save-steps",
            "0",
        ],
    );
    let ask = |prompt: &str| -> serde_json::Value {
        let args = [
            "generate",
            "-m",
            "r/final",
            "-p",
            prompt,
            "--temp",
            "0",
            "--max-tokens",
            "60",
            "--json",
            "--device",
            "cpu",
        ];
        serde_json::from_str(&ok(d, &args)).unwrap()
    };
    for (prompt, answer) in [("你是誰", "我是 F# 之神。"), ("解釋 overfitting", "Overfitting 是模型過度貼合訓練資料")]
    {
        let got = ask(prompt);
        assert!(got["text"].as_str().unwrap().starts_with(answer) && got["stop"] == "stop", "{got}");
    }
    // A prompt that was never trained gets an answer too, whatever it says.
    assert!(ask("您是哪一位呢")["tokens"].as_u64().unwrap() > 0);
}

/// A block that was frozen is exported with the codes on which it froze.
#[test]
fn a_damped_finish_keeps_codes_to_the_export() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    fit(d, "r", &["--damped-finish", "0.5", "--save-total-limit", "9", "--bf16-last-blocks", "1"]);
    let name = "model.layers.0.mlp.down_proj.weight";
    let at = |step: u32| Container::open(&d.join(format!("r/checkpoint-{step}/model.safetensors"))).unwrap();
    assert!(matches!(at(6).stored(name), Some(Stored::Dense { .. })), "not frozen before the finish");
    let frozen = at(9).read_packed(name).unwrap();
    assert_eq!(at(12).read_packed(name).unwrap(), frozen);
    let exported = Container::open(&d.join("r/final")).unwrap();
    assert_eq!(exported.read_packed(name).unwrap(), frozen);
    // `--bf16-last-blocks 1` keeps the last block dense, also in the export.
    let last = name.replace(".0.", ".1.");
    assert!(matches!(exported.stored(&last), Some(Stored::Dense { .. })));
    let metrics = std::fs::read_to_string(d.join("r/metrics.jsonl")).unwrap();
    let lines: Vec<serde_json::Value> = metrics.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let eval = lines.iter().rev().find(|l| l["eval_loss"].is_number()).unwrap();
    assert!(eval["eval_loss_quantized"].is_number() && eval["eval_loss_master"].is_number());
    assert!(eval["codes_changed_pct"].as_f64().unwrap() > 0.0);
    assert!(lines.iter().any(|l| l["frozen_blocks"] == 1 && l["model_tflops"].as_f64().unwrap() > 0.0));

    // Their codes are all that is left of their weights: a longer run, which would still train them, is another run.
    let said = refused(d, &["fit", "--resume-from-checkpoint", "r", "--max-steps", "30"], 2);
    let remedy =
        "resume a checkpoint of at most 8 steps, or start a new run from the weights: train-cli fit -m r/checkpoint-12";
    assert!(said.contains("by --damped-finish it has frozen 1 block already") && said.contains(remedy), "{said}");
    // In a shorter run, whose finish has begun before the checkpoint, the block freezes in the next step.
    ok(d, &["fit", "--resume-from-checkpoint", "r/checkpoint-6", "--max-steps", "8", "--save-steps", "1"]);
    assert!(matches!(at(7).stored(name), Some(Stored::Packed { .. })), "the block is not frozen");
}

/// Up to the given share of the run nothing is quantized, so that each step equals that of a bf16 run. A resumed run
/// quantizes from the same step on.
#[test]
fn a_late_start_of_quantization_is_bf16_until_then() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let losses = |run: &str| -> Vec<f64> {
        let text = std::fs::read_to_string(d.join(run).join("metrics.jsonl")).unwrap();
        let lines = text.lines().map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap());
        lines.filter_map(|l| l["loss"].as_f64()).collect()
    };
    fit(d, "plain", &["--recipe", "bf16"]);
    let args = fit(d, "late", &["--recipe", "w4", "--quantize-from", "0.5", "--save-total-limit", "9"]);
    let (plain, late) = (losses("plain"), losses("late"));
    assert_eq!(plain[..6], late[..6]);
    assert!(plain[6..].iter().zip(&late[6..]).all(|(a, b)| a != b), "{plain:?} {late:?}");

    let whole = std::fs::read(d.join("late/checkpoint-12/model.safetensors")).unwrap();
    for step in ["9", "12"] {
        std::fs::remove_dir_all(d.join(format!("late/checkpoint-{step}"))).unwrap();
    }
    let mut words: Vec<&str> = args.iter().map(String::as_str).collect();
    words.push("--resume-from-checkpoint");
    ok(d, &words);
    assert!(std::fs::read(d.join("late/checkpoint-12/model.safetensors")).unwrap() == whole, "resumed from step 6");

    // A run that is made longer says that its next steps are bf16 again, if they are.
    for (steps, again) in [("14", false), ("36", true)] {
        let out = run(d, &["fit", "--resume-from-checkpoint", "late", "--max-steps", steps, "--dry-run"]);
        let said = String::from_utf8_lossy(&out.stderr);
        let note = "the steps up to 18 of the longer run train without quantization again";
        assert!(out.status.success() && said.contains(note) == again, "{steps}: {said}");
    }
}

#[test]
fn cached_tokens_are_those_of_the_files() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let with = |output: &str, more: &[&str]| {
        let mut words = FIT.to_vec();
        words.extend(["-o", output, "--token-cache", "tokens", "--save-strategy", "no"]);
        words.extend(more);
        let out = run(d, &words);
        let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.success(), "{stderr}");
        let metrics = std::fs::read_to_string(d.join(output).join("metrics.jsonl")).unwrap();
        let last = metrics.lines().rev().find(|l| l.contains("\"loss\"")).unwrap().to_owned();
        (stderr, serde_json::from_str::<serde_json::Value>(&last).unwrap()["loss"].clone())
    };
    let files = || std::fs::read_dir(d.join("tokens")).unwrap().map(|e| e.unwrap().path()).collect::<Vec<_>>();
    let (said, loss) = with("first", &[]);
    assert!(said.contains("kept in") && files().len() == 1, "{said}");
    let (said, again) = with("second", &[]);
    assert!(said.contains("tokens  from") && again == loss, "{said}");
    // Other settings make another file, and a damaged file is made again.
    assert!(with("longer", &["--max-seq-length", "64"]).0.contains("kept in"));
    assert_eq!(files().len(), 2);
    for file in files() {
        let bytes = std::fs::read(&file).unwrap();
        std::fs::write(&file, &bytes[..bytes.len() - 1]).unwrap();
    }
    let (said, again) = with("third", &[]);
    assert!(said.contains("damaged") && again == loss, "{said}");
}

#[test]
fn a_memory_limit_refuses_or_stops_with_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let with = |output: &str, limit: &str| {
        let mut words = FIT.to_vec();
        words.extend(["-o", output, "--memory-limit", limit]);
        let out = run(d, &words);
        (out.status.code(), String::from_utf8_lossy(&out.stderr).into_owned())
    };
    let (code, stderr) = with("refused", "1MB");
    assert!(code == Some(4) && stderr.contains("optimizer states") && !d.join("refused").exists(), "{stderr}");
    let (code, _) = with("r", "64GiB");
    assert_eq!(code, Some(0));
    assert_eq!(with("bad", "many").0, Some(2));
    // The parts add up to the peak, which has room for a copy to undo a step from. Only CUDA has a driver that takes memory.
    let estimate = |more: &[&str]| ok(d, &[&["estimate", "-m", "m", "-d", "m/demo.tsv"][..], more].concat());
    let table = estimate(&["--device", "cpu", "--memory-limit", "1GiB"]);
    assert!(table.contains("copy for undoing a step") && !table.contains("CUDA"), "{table}");
    let sizes = table.lines().map(|line| line.get(28..).and_then(|size| size.split_whitespace().next()).unwrap());
    let sizes: Vec<f64> = sizes.map(|size| size.parse().unwrap()).collect();
    let at = table.lines().position(|line| line.starts_with("peak of training")).unwrap();
    assert!((sizes[..at].iter().sum::<f64>() - sizes[at]).abs() < 0.1, "{table}");
    assert!(estimate(&["--device", "cuda"]).contains("the CUDA driver takes"));
    let line =
        ok(d, &["estimate", "-m", "m", "-d", "m/demo.tsv", "--device", "cpu", "--json", "--memory-limit", "1GiB"]);
    let line: serde_json::Value = serde_json::from_str(&line).unwrap();
    let parts: u64 = line["parts"].as_object().unwrap().values().map(|bytes| bytes.as_u64().unwrap()).sum();
    let peak = line["peak_without_undo_copy"].as_u64().unwrap();
    assert!(peak > 100_000 && peak.abs_diff(parts) < 10, "{line}");
    assert!(line["device"] == "cpu" && line["memory_limit"] == 1 << 30 && line["fits"] == true, "{line}");

    // On the CPU the limit is compared with the memory of the whole process, which a tiny model's estimate leaves out.
    let mut words: Vec<&str> = FIT.to_vec();
    words.extend(["-o", "stopped", "--memory-limit", "20MiB", "--max-seq-length", "32"]);
    let out = run(d, &words);
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.code() == Some(4) && stderr.contains("stopped after step 1"), "{stderr}");
    assert!(d.join("stopped/checkpoint-1/manifest.json").exists());
    let summary = std::fs::read_to_string(d.join("stopped/summary.md")).unwrap();
    assert!(summary.contains("| state | not complete, 1 of 12 steps; it held "), "{summary}");
    // The remedy is one that the run takes.
    let resume = "train-cli fit --resume-from-checkpoint --output-dir=stopped --memory-limit SIZE";
    assert!(
        stderr.contains(resume) && stderr.contains("Only a new run can take a smaller --max-seq-length"),
        "{stderr}"
    );
    ok(d, &resume.replace("SIZE", "64GiB").split(' ').skip(1).collect::<Vec<_>>());
    assert!(d.join("stopped/final/model.dat").exists());
}

#[test]
fn rows_can_be_packed_split_and_weighted() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    std::fs::write(d.join("long.txt"), "A text that is cut into sequences. ".repeat(40)).unwrap();
    let words = [
        "fit",
        "-m",
        "m",
        "-d",
        "m/demo.tsv",
        "-d",
        "long.txt",
        "--data-weights",
        "2,0.5",
        "--packing",
        "--overlong",
        "split",
        "--max-seq-length",
        "24",
        "--max-steps",
        "2",
        "--device",
        "cpu",
        "-o",
        "r",
    ];
    let out = run(d, &words);
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success() && stderr.contains("packed into"), "{stderr}");
    let report: serde_json::Value =
        serde_json::from_slice(&std::fs::read(d.join("r/data_report.json")).unwrap()).unwrap();
    assert!(report["packed"][1].as_f64().unwrap() > 0.8, "rows are full: {report}");
    assert!(report["truncated"].as_u64().unwrap() > 0, "long rows were split: {report}");
    assert!(report["dropped"].as_array().unwrap().is_empty());
}

#[test]
fn flags_that_exclude_each_other_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    for (words, text) in [
        (&["--master-weights", "nvfp4", "--optimizer-state-mode", "f32"][..], "int8 or int4"),
        (&["--master-weights", "nvfp4", "--recipe", "bf16"], "take --recipe w4"),
        (&["--master-weights", "nvfp4", "--bf16-last-blocks", "1"], "dense master weights"),
        (&["--master-weights", "nvfp4", "--scales", "single"], "two-level"),
        (&["--damped-finish", "0.2", "--recipe", "bf16"], "a recipe that quantizes"),
        (&["--damped-finish", "0.2", "--scales", "single"], "--damped-finish needs --scales two"),
        (&["--nvfp4-without", "hadamard"], "needs --recipe nvfp4"),
        (&["--share-scales", "--recipe", "bf16"], "--share-scales changes nothing: --recipe bf16"),
        (&["--share-scales", "--scales", "single"], "with --scales single no matrix has a matrix scale"),
        (&["--share-scales", "--master-weights", "nvfp4"], "--share-scales needs dense master weights"),
        (&["--head", "nvfp4", "--recipe", "bf16"], "--head changes nothing"),
        (&["--quantize-from", "0.5", "--recipe", "bf16"], "a recipe that quantizes"),
        (&["--quantize-from", "0.9", "--damped-finish", "0.2"], "begin before"),
        (&["--quantise-from", "1.5"], "between"),
        (&["--data-weights", "1,2"], "2 values for 1 --data files"),
    ] {
        let mut args = vec!["fit", "-m", "m", "-d", "m/demo.tsv", "--device", "cpu", "-o", "r"];
        args.extend(words);
        let out = run(d, &args);
        let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.code() == Some(2) && stderr.contains(text), "{words:?}: {stderr}");
    }
    assert_eq!(run(d, &["estimate", "--demo"]).status.code(), Some(2));
}

#[test]
fn only_the_last_layers_move_if_only_they_are_trained() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let modes = ["always", "never"];
    for mode in modes {
        fit(d, mode, &["--train-last-layers", "1", "--recipe", "w4a4", "--recompute", mode]);
    }
    // Training every block still leaves the embedding as it was.
    fit(d, "all", &["--train-last-layers", "2"]);
    let after = Container::open(&d.join("all/checkpoint-12/model.safetensors")).unwrap();
    let embedding = "model.embed_tokens.weight";
    let before = Container::open(&d.join("m")).unwrap();
    assert_eq!(before.read_dense(embedding).unwrap(), after.read_dense(embedding).unwrap());
    for mode in modes {
        let after = Container::open(&d.join(mode).join("checkpoint-12/model.safetensors")).unwrap();
        for name in before.names() {
            let moved = before.read_dense(&name).unwrap() != after.read_dense(&name).unwrap();
            let trained = name.starts_with("model.layers.1.") || name == "model.norm.weight";
            assert_eq!(moved, trained, "{mode}: {name}");
        }
    }
}

#[test]
fn the_run_folder_and_the_reports_hold_what_they_promise() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    ok(
        d,
        &[
            "fit",
            "-m",
            "m",
            "--synthetic",
            "--max-seq-length",
            "16",
            "--max-steps",
            "1",
            "--loss",
            "scalar",
            "--device",
            "cpu",
            "--vram-report",
            "vram.json",
            "-o",
            "r",
            "--batch_size=1",
            "--clip=exact",
            "--grad-accum=1",
            "--step-chunk-rows",
            "8",
        ],
    );
    let json =
        |name: &str| -> serde_json::Value { serde_json::from_slice(&std::fs::read(d.join(name)).unwrap()).unwrap() };
    let report = json("vram.json");
    let phases: Vec<&str> =
        report["Samples"].as_array().unwrap().iter().map(|s| s["Phase"].as_str().unwrap()).collect();
    assert_eq!(
        phases,
        [
            "start",
            "model_loaded",
            "batch_ready",
            "zero_grad_done",
            "head_done",
            "block_1_gradients",
            "block_1_done",
            "block_0_gradients",
            "block_0_done",
            "backward_done",
            "optimizer_step_done"
        ]
    );
    // The report counts steps, and no epochs.
    let keys = report["Samples"][0].as_object().unwrap().keys().map(String::as_str).collect::<Vec<_>>();
    assert!(keys.contains(&"GlobalStep") && !keys.iter().any(|key| key.contains("Epoch")), "{keys:?}");
    assert!(report["Pid"].is_number() && report["Samples"][0]["PidMemoryMiB"].as_u64().unwrap() > 0);
    let line = std::fs::read_to_string(d.join("r/metrics.jsonl")).unwrap();
    let line: serde_json::Value = serde_json::from_str(line.lines().next().unwrap()).unwrap();
    assert!(line["loss"].as_f64().unwrap() > 0.0 && line["grad_norm"].as_f64().unwrap() > 0.0);
    assert_eq!(json("r/train_results.json")["global_step"], 1);
    for name in ["config.toml", "run.json", "checkpoint-1/manifest.json", "final/manifest.json", "final/tokenizer.json"]
    {
        assert!(d.join("r").join(name).exists(), "{name}");
    }
    // A run from the folder's config.toml repeats the run.
    ok(d, &["fit", "-c", "r/config.toml", "-o", "again", "--vram-report", "again.json"]);
    same_file(&d.join("r/checkpoint-1/model.safetensors"), &d.join("again/checkpoint-1/model.safetensors"));
}

/// A file of the demo that somebody has edited is not replaced, and the others stay as they are.
#[test]
fn the_demo_keeps_files_that_were_edited() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let dry_run = ["fit", "--demo", "--dry-run"];
    ok(d, &dry_run);
    ok(d, &dry_run);
    let rows = d.join("runs/demo-files/demo.tsv");
    std::fs::write(&rows, "Who are you?\tI am mine.\n").unwrap();
    let said = refused(d, &dry_run, 2);
    assert!(said.contains("--demo: runs/demo-files/demo.tsv is not the demo's own file"), "{said}");
    assert_eq!(std::fs::read_to_string(&rows).unwrap(), "Who are you?\tI am mine.\n");
    // The remedy.
    std::fs::rename(&rows, d.join("mine.tsv")).unwrap();
    ok(d, &dry_run);
    same_file(&rows, &demo_file("demo.tsv"));
}

#[test]
fn the_demo_learns_exports_and_answers() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    let out = run(d, &["fit", "--demo", "-o", "run"]);
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success(), "{stderr}");
    for text in [
        "after     Who are you? → I am a tiny Qwen3",
        "after     你是誰？ → 我是用 Rust",
        "codes changed",
        "16/16 greedy",
        "next:",
    ] {
        assert!(stderr.contains(text), "{text} is missing in:\n{stderr}");
    }
    // A model of random weights repeats a token, here a line break, and is not asked for more than eight.
    let before = stderr.lines().find(|line| line.trim_start().starts_with("before")).unwrap();
    assert!(before.matches("\\n").count() == 8 && before.ends_with(" …"), "{before}");
    // The exported file gives the trained answer and stops by itself; so does W4A4.
    for more in [&[][..], &["--w4a4"]] {
        let mut args =
            vec!["generate", "-m", "run/final/model.dat", "-p", "你是誰？", "--temp", "0", "--json", "--device", "cpu"];
        args.extend(more);
        let answer: serde_json::Value = serde_json::from_str(&ok(d, &args)).unwrap();
        assert_eq!(answer["stop"], "stop", "{answer}");
        assert!(answer["text"].as_str().unwrap().contains("Rust"), "{answer}");
    }
}
