//! The lines that a run prints before it trains: what is trained, on what, and how.

use crate::{
    peak,
    plan::{ModelSource, Plan},
    report,
    run::{cost, inputs::Inputs},
    settings::Clip,
};
use backend_nvfp4::{Precision, Scaling};
use model_qwen3::container::Container;

/// Prints the header of a run that computes in `precision`.
pub fn print(plan: &Plan, inputs: &Inputs, scaling: Scaling, precision: Precision) {
    report::label("model", model(plan, inputs, scaling));
    if inputs.source.as_ref().is_some_and(Container::has_input_scales) {
        let text =
            "the model's files give the scales of activations; training measures them anew, and the export has none";
        report::label("inputs", text);
    }
    report::label("data", data(plan, inputs));
    report::label("step", step(plan));
    let (master, states) = (plan.master(precision), plan.settings.memory.optimizer_state_mode);
    if let Some(cost) = cost::of(plan.recipe, master, states) {
        report::label("cost", cost);
    }
    let (steps, size) = (inputs.order(plan).steps, plan.sequences_per_step());
    let (rate, seed) = (plan.settings.optimizer.learning_rate, plan.settings.advanced.seed);
    let (steps, size) = (report::count(steps, "step"), report::count(size, "sequence"));
    report::label("plan", format!("{steps} of {size} · learning rate {rate:e} · seed {seed}"));
    if let Some((source, peak)) = peak(plan, precision.name()) {
        report::label("peak", format!("{peak} TFLOP/s {source} · the share that is reached is `mfu` in metrics.jsonl"));
    }
    report::label("run", plan.output_dir.display().to_string());
}

/// The peak of the device in TFLOP/s, and where it is from. None if it is not known.
pub(super) fn peak(plan: &Plan, precision: &str) -> Option<(String, f64)> {
    if let Some(peak) = plan.settings.logging.peak_tflops {
        return Some(("by --peak-tflops".to_owned(), peak));
    }
    // The table is one of bf16.
    let (name, peak) = peak::of(plan.settings.recipe.device).filter(|_| precision == Precision::Bf16.name())?;
    Some((format!("in bf16, by NVIDIA's data sheet of {name}"), peak))
}

fn model(plan: &Plan, inputs: &Inputs, scaling: Scaling) -> String {
    let name = match &plan.source {
        ModelSource::Files(files) => files.weights.display().to_string(),
        ModelSource::Random { config } => format!("{} (random weights)", config.display()),
    };
    let parameters = report::short(inputs.config.num_params() as f64);
    let layers = inputs.config.num_hidden_layers;
    let shared = if plan.settings.recipe.share_scales { ", shared by q, k and v, and by gate and up" } else { "" };
    let levels = match (scaling, inputs.stored_scaling()) {
        (Scaling::Two, Some(Scaling::Single)) => {
            "two-level scales (those of the file are single-level; --scales single keeps them)"
        }
        (Scaling::Two, _) => "two-level scales",
        (Scaling::Single, _) => "single-level scales",
    };
    let dense = match plan.settings.bf16_last_blocks(layers) {
        0 => String::new(),
        dense => format!(" · last {} not quantized", report::count(dense, "block")),
    };
    let layers = report::count(layers, "layer");
    let recipe = plan.recipe.name();
    format!("{name} · {parameters} parameters · {layers} · recipe {recipe} · {levels}{shared}{dense}")
}

fn data(plan: &Plan, inputs: &Inputs) -> String {
    let limit = plan.max_seq_length(inputs.config.max_position_embeddings);
    let found = &inputs.report;
    let (tokens, supervised) = (report::short(found.tokens as f64), report::short(found.supervised_tokens as f64));
    let formats = found.formats.iter().cloned().collect::<Vec<_>>().join(" and ");
    let rows = report::count(found.rows, "row");
    let mut parts = vec![
        if formats.is_empty() { rows } else { format!("{rows} of {formats}") },
        format!("{} train / {} eval", inputs.train.len(), inputs.eval.len()),
        format!("{tokens} tokens, {supervised} supervised"),
    ];
    if found.left_out > 0 {
        parts.push(format!("{} left out by --max-rows", report::count(found.left_out, "row")));
    }
    if !found.dropped.is_empty() {
        let rows = report::count(found.dropped.len(), "row");
        parts.push(format!("{rows} dropped (longer than {limit} tokens, or nothing supervised)"));
    }
    if !found.truncated.is_empty() {
        parts.push(format!("{} cut at {limit} tokens", report::count(found.truncated.len(), "row")));
    }
    if let Some((rows, full)) = found.packed {
        parts.push(format!("packed into {}, {:.0}% full", report::count(rows, "row"), full * 100.0));
    }
    parts.join(" · ")
}

fn step(plan: &Plan) -> String {
    let (memory, norm) = (&plan.settings.memory, plan.settings.optimizer.max_grad_norm);
    let master = memory.master_weights.map_or("bf16 (f32 where activations are f32)", |master| master.name());
    let which = if plan.clip == Clip::Exact { "this step's" } else { "the previous step's" };
    let clipping = if norm > 0.0 {
        format!("gradient clipping {norm:?}, using {which} norm")
    } else {
        "no gradient clipping".to_owned()
    };
    format!("{master} master weights · {} optimizer states · {clipping}", memory.optimizer_state_mode.name())
}
