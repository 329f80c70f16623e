//! The guard: a step whose loss or gradient norm is not finite leaves no trace in the weights, in every way to make and to
//! clip a step. The data do it themselves: one row has a token for which the model's weights make a loss, a gradient, an
//! activation or a block scale overflow.

use crate::{
    gpu_checkpoints::device,
    support::files::{run, tiny_model},
};
use model_qwen3::{config::Qwen3Config, container::Container, tensors::Tensors, tokenizer::Tokenizer};
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::Value;
use std::{fs, path::Path, sync::Arc};
use train_cli::data::{
    order::{Made, Order},
    sample::synthetic,
};

/// What overflows for the token `~`.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Overflow {
    /// The square of its gradient. Its loss is large.
    Gradient,
    /// The sum of the losses of twelve of them.
    Loss,
    /// The product of gate and up in the first block, which makes every later activation of the token NaN. Where activations
    /// are quantized, so are the scales.
    Activation,
    /// Gate and up in the first block, whose product is then NaN. Quantized, it has a code like any other number.
    Gate,
}

/// A model folder with this weakness, and training rows of which the given ones contain `~`.
fn weak_model(folder: &Path, overflow: Overflow, rows: usize, bad: &[usize]) {
    tiny_model(folder, false);
    let config = Qwen3Config::from_file(&folder.join("config.json")).unwrap();
    let tokenizer = Tokenizer::from_file(&folder.join("tokenizer.json")).unwrap();
    let token = *tokenizer.encode("~").unwrap().last().unwrap() as usize;
    edit_weights(folder, |name, values| match overflow {
        Overflow::Activation => overflow_in_the_mlp(name, values, token, &config, [1e20, 1e20]),
        Overflow::Gate => overflow_in_the_mlp(name, values, token, &config, [-3e38, 3e38]),
        // The first feature of every token is 1, so that the final norm makes it 8 in every row.
        _ if name == "model.embed_tokens.weight" => {
            values.chunks_mut(config.hidden_size).for_each(|row| row[0] = 1.0);
        }
        _ if name == "lm_head.weight" => {
            let row = &mut values[token * config.hidden_size..][..config.hidden_size];
            row.fill(0.0);
            row[0] = if overflow == Overflow::Loss { -4.1e37 } else { -1e25 };
        }
        _ => {}
    });
    let row = |n: usize| format!("question {n}\t{}\n", if bad.contains(&n) { "~~~~~~~~~~~~" } else { "an answer" });
    fs::write(folder.join("rows.tsv"), (1..=rows).map(row).collect::<String>()).unwrap();
}

/// Gives the token, and no other, a first feature, which one row of gate and of up multiplies by these large numbers. No other
/// weight reads or writes the first feature, so that its gradient is zero for every other token and it stays zero.
fn overflow_in_the_mlp(name: &str, values: &mut [f32], token: usize, config: &Qwen3Config, [gate, up]: [f32; 2]) {
    let width = config.hidden_size;
    let part = name.rsplit('.').nth(1).unwrap();
    match part {
        "embed_tokens" => {
            values.chunks_mut(width).for_each(|row| row[0] = 0.0);
            values[token * width..][..width].fill(0.0);
            values[token * width] = 1.0;
        }
        "q_proj" | "k_proj" | "v_proj" | "gate_proj" | "up_proj" => {
            values.chunks_mut(width).for_each(|row| row[0] = 0.0);
            if name.contains("layers.0.mlp") {
                values[..width].fill(0.0);
                values[0] = if part == "gate_proj" { gate } else { up };
            }
        }
        "o_proj" | "down_proj" => {
            let row = values.len() / width;
            values[..row].fill(0.0);
        }
        "norm" => values[0] = 0.0,
        _ => {}
    }
}

/// Changes the f32 tensors of a model folder, each by its name.
fn edit_weights(folder: &Path, edit: impl Fn(&str, &mut [f32])) {
    let path = folder.join("model.safetensors");
    let container = Container::open(&path).unwrap();
    let edited = |name: String| {
        let mut values = container.read_dense(&name).unwrap();
        edit(&name, &mut values);
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        (container.stored(&name).unwrap().shape(), name, bytes)
    };
    let tensors: Vec<_> = container.names().into_iter().map(edited).collect();
    let view = |shape: &[usize], bytes| TensorView::new(Dtype::F32, shape.to_vec(), bytes).unwrap();
    let views = tensors.iter().map(|(shape, name, bytes)| (name, view(shape, bytes)));
    fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
}

const FIT: [&str; 15] = [
    "fit",
    "-m",
    "m",
    "-d",
    "m/rows.tsv",
    "--device",
    "cpu",
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
fn a_run_whose_first_step_is_bad_is_saved_without_states() {
    let Some(device) = device() else { return };
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    weak_model(&d.join("m"), Overflow::Gradient, 2, &[1, 2]);
    // The step is not made, or it is undone. A limit counts as room for the copy on a device that does not say what is free.
    for (clip, undone) in [(&["--clip", "exact"][..], false), (&["--max-grad-norm", "0"], true)] {
        let mut words = FIT.to_vec();
        words.extend(["-o", "run", "--overwrite", "--max-steps", "1", "--memory-limit", "8GiB", "--recipe", "bf16"]);
        words.extend(clip);
        let place = words.iter().position(|word| *word == "cpu").unwrap();
        words[place] = device;
        let out = run(d, &words);
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success() && said.contains("step 1 is left out"), "{said}");
        assert_eq!(said.contains("undone from a copy"), undone, "{said}");
        let header = fs::read(d.join("run/checkpoint-1/optimizer.safetensors")).unwrap();
        assert!(!String::from_utf8_lossy(&header).contains(".steps"), "it has a state");
    }
}

#[test]
fn a_step_that_is_not_finite_leaves_no_trace() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    for (overflow, recipe, what) in [
        (Overflow::Gradient, "bf16", "the gradient norm is inf"),
        (Overflow::Loss, "bf16", "the loss is inf"),
        (Overflow::Activation, "bf16", "the loss is NaN"),
        (Overflow::Activation, "nvfp4", "the loss is NaN"),
        (Overflow::Gate, "w4a4", "the loss is NaN"),
    ] {
        weak_model(&d.join("m"), overflow, 12, &[5]);
        // Seeds that put the row near the beginning, before any checkpoint, and behind one.
        for (seed, clip) in
            [("1", &["--max-grad-norm", "0"][..]), ("2", &["--clip", "previous"]), ("3", &["--clip", "exact"])]
        {
            let late = clip.contains(&"previous") || clip.contains(&"0");
            let fit = |recompute: &str, undo_copy: &str| {
                let mut words = FIT.to_vec();
                words.extend(["--seed", seed, "--overwrite", "--recompute", recompute, "-o", "run"]);
                words.extend(["--recipe", recipe, "--undo-copy", undo_copy]);
                words.extend(clip);
                let out = run(d, &words);
                let said = String::from_utf8_lossy(&out.stderr).into_owned();
                assert!(out.status.success(), "{said}");
                // Other systems do not say how much memory is free, and then there is no copy.
                let copies = undo_copy == "true" && cfg!(target_os = "linux");
                let holds = late && copies;
                assert_eq!(said.contains("undone from a copy"), holds, "{said}");
                // A loss is known before the update.
                let replays = late && !copies && overflow == Overflow::Gradient;
                assert_eq!(said.contains("the run goes back to"), replays, "{said}");
                let folder = d.join("run");
                let left_out = lines(&folder, "left_out");
                assert_eq!(left_out.len(), 1, "{overflow:?} {recipe} {clip:?} {recompute}: {left_out:?}");
                assert_eq!(left_out[0]["left_out"], what);
                let row = left_out[0]["rows"][0].as_str().unwrap();
                assert!(row.ends_with("m/rows.tsv:5"), "{row}");
                assert_eq!(lines(&folder, "grad_norm").len(), 11, "the other steps are made once");
                let results: Value =
                    serde_json::from_slice(&fs::read(folder.join("train_results.json")).unwrap()).unwrap();
                assert_eq!((&results["steps_left_out"], &results["global_step"]), (&1.into(), &12.into()));
                (left_out[0]["step"].clone(), fs::read(folder.join("checkpoint-12/model.safetensors")).unwrap())
            };
            // A run that goes back to a checkpoint never makes the step again. A copy must give the same weights.
            let (a, replayed) = fit("always", "false");
            for recompute in ["always", "never"] {
                let (b, copied) = fit(recompute, "true");
                assert_eq!(a, b);
                assert!(replayed == copied, "{overflow:?} {recipe} {clip:?} at step {a}: the weights differ");
            }
        }
    }
}

#[test]
fn many_bad_steps_take_the_run_back_and_then_end_it() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    weak_model(&d.join("m"), Overflow::Gradient, 24, &(1..=24).collect::<Vec<_>>());
    let out = run(d, &[&FIT[..], &["-o", "r", "--recipe", "bf16"]].concat());
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(5), "{stderr}");
    assert_eq!(stderr.matches("leaves out all steps between").count(), 2, "{stderr}");
    // The step that ended the run is not among those that were left out.
    assert_eq!(lines(&d.join("r"), "left_out").len(), 8);
    assert!(stderr.contains("8 steps were left out") && !d.join("r/final").exists(), "{stderr}");
    let summary = fs::read_to_string(d.join("r/summary.md")).unwrap();
    assert!(summary.contains("left out") && summary.contains("m/rows.tsv:"), "{summary}");
    assert!(summary.contains("not complete, 8 of 24 steps"), "{summary}");

    let out = run(d, &[&FIT[..], &["-o", "unguarded", "--recipe", "bf16", "--guard", "false"]].concat());
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.code() == Some(5) && stderr.contains("diverged at step 1"), "{stderr}");
}

/// The line of the row that is micro-batch `number`, counted from 0, of a run over `rows` rows with seed 1.
fn line_of(rows: usize, number: usize) -> usize {
    let mut samples = synthetic(rows, 2, 10, 0);
    samples.iter_mut().zip(1..).for_each(|(sample, line)| sample.origins[0].line = line);
    let samples = Arc::new(samples);
    let order = Order {
        samples,
        batch_size: 1,
        accumulation: 1,
        steps: rows,
        limit: rows,
        seed: 1,
        start: 0,
        made: Made::default(),
    };
    order.step(number)[0].origins[0][0].line as usize
}

/// A run of [`FIT`] with seed 1 and these words, which must succeed. Returns what it printed.
fn guarded(d: &Path, words: &[&str]) -> String {
    let fixed = ["-o", "run", "--overwrite", "--seed", "1", "--eval-steps", "0"];
    let out = run(d, &[&FIT[..], &fixed, words].concat());
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success(), "{words:?}: {said}");
    said
}

/// The numbers of updates that the optimizer's states of a checkpoint count.
fn updates(checkpoint: &Path) -> Vec<i32> {
    let file = fs::read(checkpoint.join("optimizer.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let steps = tensors.iter().filter(|(name, _)| name.ends_with(".steps"));
    steps.map(|(_, view)| i32::from_le_bytes(view.data().try_into().unwrap())).collect()
}

/// Steps of a run with one bad step.
const STEPS: usize = 10;

/// Every way to clip, with and without a copy of the weights to undo a step from. The largest norm is so large that nothing is
/// clipped.
const WAYS: [&[&str]; 4] = [
    &["--max-grad-norm", "0", "--undo-copy", "false"],
    &["--max-grad-norm", "0"],
    &["--clip", "previous", "--max-grad-norm", "1000000"],
    &["--clip", "exact", "--max-grad-norm", "1000000"],
];

/// A model and the rows of a run whose step `step`, counted from 1, is bad. Of two micro-batches the first or the second is.
fn with_bad_step(d: &Path, overflow: Overflow, accumulation: usize, step: usize) {
    let rows = STEPS * accumulation;
    let bad = line_of(rows, (step - 1) * accumulation + step % accumulation);
    weak_model(&d.join("m"), overflow, rows, &[bad]);
}

/// Runs that model in number formats and in some ways to clip. Each run must leave out the bad step and no other, and all must
/// end with the same weights and states.
fn leaves_no_trace(d: &Path, formats: &[&str], accumulation: usize, step: usize, ways: &[&[&str]]) {
    let mut expected = None;
    for way in ways {
        let (accumulated, steps) = (accumulation.to_string(), STEPS.to_string());
        let words = ["--gradient-accumulation-steps", &accumulated, "--max-steps", &steps];
        let said = guarded(d, &[&words[..], formats, way].concat());
        let case = format!("step {step}, {formats:?}, {accumulation} micro-batches, {way:?}: {said}");
        let left_out: Vec<u64> =
            lines(&d.join("run"), "left_out").iter().map(|line| line["step"].as_u64().unwrap()).collect();
        assert_eq!(left_out, [step as u64], "{case}");
        let folder = d.join(format!("run/checkpoint-{STEPS}"));
        let found = updates(&folder);
        assert!(!found.is_empty() && found.iter().all(|n| *n == STEPS as i32 - 1), "{found:?}: {case}");
        let files = ["model.safetensors", "optimizer.safetensors"].map(|f| fs::read(folder.join(f)).unwrap());
        assert!(*expected.get_or_insert(files.clone()) == files, "the state differs: {case}");
    }
}

/// Every step of the first six and a later one, in every way to clip, with one micro-batch and with two, of which either is
/// the bad one. The run that goes back to a checkpoint never makes the bad step again: weights and states of the others must
/// be the same bits.
#[test]
fn a_bad_step_leaves_no_trace_wherever_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    for accumulation in [1, 2] {
        for step in [1, 2, 3, 4, 5, 6, 9] {
            with_bad_step(d, Overflow::Gradient, accumulation, step);
            leaves_no_trace(d, &["--recipe", "bf16"], accumulation, step, &WAYS);
            // A loss that is NaN is noticed before the update, in whatever way gradients are clipped.
            with_bad_step(d, Overflow::Activation, accumulation, step);
            leaves_no_trace(d, &["--recipe", "bf16"], accumulation, step, &WAYS[1..]);
            // So is one whose activations have scales that are not finite, and one that is infinite. One number of micro-batches
            // is enough for each step.
            if accumulation == 1 + step % 2 {
                leaves_no_trace(d, &["--recipe", "nvfp4"], accumulation, step, &WAYS[1..]);
                // Also one whose activations get codes like other numbers.
                with_bad_step(d, Overflow::Gate, accumulation, step);
                leaves_no_trace(d, &["--recipe", "nvfp4"], accumulation, step, &WAYS[2..]);
                with_bad_step(d, Overflow::Loss, accumulation, step);
                leaves_no_trace(d, &["--recipe", "bf16"], accumulation, step, &WAYS[1..]);
            }
        }
    }
}

/// AdamW leaves a bad step out in each of its forms: with 4-bit states, and with master weights that are NVFP4 codes. (The head
/// of this model does not fit the f16 of an export.)
#[test]
fn a_bad_step_leaves_no_trace_in_four_bits() {
    let states = ["--recipe", "bf16", "--optimizer-state-mode", "int4"];
    let codes = "--recipe w4 --master-weights nvfp4 --optimizer-state-mode int4 --head nvfp4";
    let codes: Vec<&str> = codes.split(' ').collect();
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    for (accumulation, step) in [(1, 1), (2, 6)] {
        with_bad_step(d, Overflow::Gradient, accumulation, step);
        leaves_no_trace(d, &states, accumulation, step, &WAYS);
        leaves_no_trace(d, &codes, accumulation, step, &WAYS);
        with_bad_step(d, Overflow::Activation, accumulation, step);
        leaves_no_trace(d, &codes, accumulation, step, &WAYS[2..]);
    }
}

/// Decay multiplies every weight of this run by -9 in a step, until the model computes NaN. The run goes back to a checkpoint,
/// whether or not it asks the model for sample answers before.
#[test]
fn sample_answers_do_not_end_a_run_that_goes_back() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    tiny_model(&d.join("m"), true);
    let words = "fit -m m -d m/demo.tsv --device cpu --val-split 0 --batch-size 8 --sample-prompt hi --save-steps 5 --seed 1 \
                 --learning-rate 1 --lr-scheduler-type constant --max-grad-norm 0 --weight-decay 10 --adam-epsilon 1e-30 \
                 --recipe bf16 --max-steps 26 -o";
    let outcome = |name: &str, eval_steps: &str| {
        let words: Vec<&str> = words.split_whitespace().chain([name, "--eval-steps", eval_steps]).collect();
        let out = run(d, &words);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.success() && said.contains("the run goes back to checkpoint-"), "{said}");
        let model = fs::read(d.join(name).join("checkpoint-26/model.safetensors")).unwrap();
        (said, lines(&d.join(name), "left_out"), model)
    };
    let (said, left_out, model) = outcome("unasked", "0");
    assert!(!said.contains("no sample answers"), "{said}");
    let bad = left_out.iter().find(|line| line["left_out"] == "the loss is NaN").unwrap()["step"].to_string();
    let asked = outcome("asked", &bad);
    let warning = format!("warning: no sample answers after step {bad}: the model computes NaN");
    assert!(asked.0.contains(&warning), "{}", asked.0);
    assert!((asked.1, asked.2) == (left_out, model), "the evaluation changed the run: {}", asked.0);
}

/// Three bad steps in a row take a run to a checkpoint that is at least a hundred steps older, or to the oldest one. The
/// steps between are left out with their rows, and the run completes.
#[test]
fn a_run_that_goes_far_back_completes() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path();
    for (rows, bad, save, to) in [(24, 10..=12, "4", 4), (140, 125..=127, "10", 20)] {
        let lines_of_bad: Vec<usize> = bad.clone().map(|step| line_of(rows, step - 1)).collect();
        weak_model(&d.join("m"), Overflow::Gradient, rows, &lines_of_bad);
        let mut words: Vec<&str> = FIT.to_vec();
        let at = |flag: &str| FIT.iter().position(|word| *word == flag).unwrap() + 1;
        words[at("--save-steps")] = save;
        // So many steps at a larger rate would move a hidden feature so far that every row has the gradient of a bad one.
        words[at("--learning-rate")] = "1e-6";
        words.extend(["-o", "run", "--overwrite", "--seed", "1", "--eval-steps", "0", "--recipe", "bf16"]);
        words.extend(["--clip", "exact", "--save-total-limit", "50"]);
        let out = run(d, &words);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.success(), "{said}");
        let last = *bad.end();
        let line = format!("up to step {last}: the run goes back to checkpoint-{to} and leaves out all steps between");
        assert!(said.matches(&line).count() == 1, "{line}: {said}");
        let left_out = lines(&d.join("run"), "left_out");
        let steps: Vec<usize> = left_out.iter().map(|line| line["step"].as_u64().unwrap() as usize).collect();
        assert_eq!(steps, (to + 1..=last).collect::<Vec<_>>());
        for (step, line) in steps.iter().zip(&left_out) {
            let row = line["rows"][0].as_str().unwrap();
            assert!(row.ends_with(&format!("m/rows.tsv:{}", line_of(rows, step - 1))), "{line}");
            let reason = line["left_out"].as_str().unwrap();
            let expected = if bad.contains(step) { "the gradient norm is inf" } else { "the run went back from step" };
            assert!(reason.contains(expected), "{line}");
        }
        let made = rows - left_out.len();
        assert_eq!(lines(&d.join("run"), "grad_norm").len(), made);
        let results: Value = serde_json::from_slice(&fs::read(d.join("run/train_results.json")).unwrap()).unwrap();
        assert_eq!((&results["global_step"], &results["steps_left_out"]), (&rows.into(), &left_out.len().into()));
        let found = updates(&d.join(format!("run/checkpoint-{rows}")));
        assert!(!found.is_empty() && found.iter().all(|n| *n == made as i32), "{found:?}");
    }
}
