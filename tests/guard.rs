//! The guard: a step whose loss or gradient norm is not finite leaves no trace in the weights, in every way to make and to
//! clip a step. The data do it themselves: one row has a token whose row of the head is so large that its loss, or the
//! gradient, overflows.

use crate::support::{
    Cpu,
    files::{F32, ok, run, tiny_model},
};
use backend_nvfp4::{MasterKind, Nvfp4Linear};
use burn::tensor::{Tensor, TensorData};
use model_qwen3::{
    ModelError, config::Qwen3Config, model::Qwen3, tokenizer::Tokenizer, weights, write::write_safetensors,
};
use serde_json::Value;
use std::{fs, path::Path};

/// Weight of the token `~` in the head. The loss of `~` is 8 times that: finite, but the square of its gradient is not.
const STEEP: f32 = -1e25;
/// With this weight the sum of the losses of twelve `~` is infinite.
const STEEPER: f32 = -4.1e37;

/// A model folder in which `~` has a large weight, and training rows of which the given ones contain `~`.
fn steep_model(folder: &Path, weight: f32, rows: usize, bad: &[usize]) {
    tiny_model(folder, false);
    let config = Qwen3Config::from_file(&folder.join("config.json")).unwrap();
    let tokenizer = Tokenizer::from_file(&folder.join("tokenizer.json")).unwrap();
    let token = *tokenizer.encode("~").unwrap().last().unwrap() as usize;
    let mut model: Qwen3<Cpu> = weights::random(&config, F32, MasterKind::F32, 11, &Default::default()).unwrap();
    // The first feature of every token is 1, so that the final norm makes it 8 in every row.
    let (vocabulary, width) = (config.vocab_size, config.hidden_size);
    let values = |tensor: Tensor<Cpu, 2>| tensor.into_data().to_vec::<f32>().unwrap();
    let tensor =
        |v: Vec<f32>| Tensor::<Cpu, 2>::from_data(TensorData::new(v, [vocabulary, width]), &Default::default());
    model.embed_tokens = model.embed_tokens.map(|embedding| {
        let mut values = values(embedding);
        values.chunks_mut(width).for_each(|row| row[0] = 1.0);
        tensor(values)
    });
    let steep = |head: Tensor<Cpu, 2>| {
        let mut values = values(head);
        values[token * width..(token + 1) * width].fill(0.0);
        values[token * width] = weight;
        tensor(values)
    };
    model.lm_head = model.lm_head.map(|head| match head {
        Nvfp4Linear::Master(head) | Nvfp4Linear::Dense(head) => Nvfp4Linear::Dense(head.map(steep)),
        _ => panic!("a random head is dense"),
    });
    let path = folder.join("model.safetensors");
    let failed = |e| ModelError::Io { path: path.clone(), source: e };
    write_safetensors(&weights::Live::new(&model), fs::File::create(&path).unwrap(), failed).unwrap();
    let row = |n: usize| format!("question {n}\t{}\n", if bad.contains(&n) { "~~~~~~~~~~~~" } else { "an answer" });
    fs::write(folder.join("rows.tsv"), (1..=rows).map(row).collect::<String>()).unwrap();
}

const FIT: [&str; 17] = [
    "fit",
    "-m",
    "m",
    "-d",
    "m/rows.tsv",
    "--device",
    "cpu",
    "--recipe",
    "bf16",
    "--val-split",
    "0",
    "--learning-rate",
    "1e-3",
    "--save-steps",
    "4",
    "--sample-prompt",
    "hello",
];

fn lines(run: &Path, key: &str) -> Vec<Value> {
    let text = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    text.lines().map(|l| serde_json::from_str(l).unwrap()).filter(|l: &Value| !l[key].is_null()).collect()
}

#[test]
fn a_step_that_is_not_finite_leaves_no_trace() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    for (weight, what) in [(STEEP, "the gradient norm is inf"), (STEEPER, "the loss is inf")] {
        steep_model(&d.join("m"), weight, 12, &[5]);
        // Seeds that put the row near the beginning, before any checkpoint, and behind one.
        for (seed, clip) in
            [("1", &["--max-grad-norm", "0"][..]), ("2", &["--clip", "previous"]), ("3", &["--clip", "exact"])]
        {
            let fit = |mode: &str| {
                let mut words = FIT.to_vec();
                words.extend(["--seed", seed, "--overwrite", "--step-mode", mode, "-o", mode]);
                words.extend(clip);
                ok(d, &words);
                let run = d.join(mode);
                let left_out = lines(&run, "left_out");
                assert_eq!(left_out.len(), 1, "{what} {clip:?} {mode}: {left_out:?}");
                assert_eq!(left_out[0]["left_out"], what);
                let row = left_out[0]["rows"][0].as_str().unwrap();
                assert!(row.ends_with("m/rows.tsv:5"), "{row}");
                assert_eq!(lines(&run, "grad_norm").len(), 11, "the other steps are made once");
                let results: Value =
                    serde_json::from_slice(&fs::read(run.join("train_results.json")).unwrap()).unwrap();
                assert_eq!((&results["steps_left_out"], &results["global_step"]), (&1.into(), &12.into()));
                (left_out[0]["step"].clone(), fs::read(run.join("checkpoint-12/model.safetensors")).unwrap())
            };
            // The whole graph knows its norm before the update. Streaming has to go back, unless it clips exactly.
            let ((a, whole), (b, streaming)) = (fit("whole"), fit("streaming"));
            assert_eq!(a, b);
            assert!(whole == streaming, "{what} {clip:?} at step {a}: the weights differ");
        }
    }
}

#[test]
fn many_bad_steps_take_the_run_back_and_then_end_it() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    steep_model(&d.join("m"), STEEP, 24, &(1..=24).collect::<Vec<_>>());
    let out = run(d, &[&FIT[..], &["-o", "r"]].concat());
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(5), "{stderr}");
    assert_eq!(stderr.matches("leaves out all steps between").count(), 2, "{stderr}");
    assert!(stderr.contains("9 steps were left out") && !d.join("r/final").exists(), "{stderr}");

    let out = run(d, &[&FIT[..], &["-o", "unguarded", "--guard", "false"]].concat());
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.code() == Some(5) && stderr.contains("diverged at step 1"), "{stderr}");
}
