//! The lines that a run prints before it trains: what is trained, on what, and how.

use crate::{
    data::read::DataReport,
    peak,
    plan::{ModelSource, Plan},
    report,
    run::{cost, inputs::Inputs},
    settings::Clip,
};
use backend_nvfp4::{MasterKind, Precision, Scaling};
use model_qwen3::tensors::Tensors;

/// Prints the header of a run that computes in `precision`.
pub fn print(plan: &Plan, inputs: &Inputs, scaling: Scaling, precision: Precision) {
    report::label("model", model(plan, inputs, scaling));
    if inputs.source.as_ref().is_some_and(Tensors::has_input_scales) {
        let text =
            "the model's files give the scales of activations; training measures them anew, and the export has none";
        report::label("inputs", text);
    }
    report::label("data", data(inputs));
    let (takes, rows) = (inputs.config.max_position_embeddings, &plan.settings.data);
    let wanted = rows.max_seq_length.is_some() && !rows.packing;
    if let Some(text) = misfit(&inputs.report, inputs.max_seq_length, takes, wanted) {
        report::label("lengths", text);
    }
    let (master, states) = (plan.master(precision), plan.settings.memory.optimizer_state_mode);
    report::label("step", step(plan, master));
    let layers = inputs.config.num_hidden_layers;
    let dense = (plan.settings.bf16_last_blocks(layers), layers);
    if let Some(cost) = cost::of(plan.recipe, dense, master, states) {
        report::label("cost", cost);
    }
    let order = inputs.order(plan);
    let (steps, size) = (order.steps, plan.sequences_per_step().min(order.limit));
    let (rate, seed) = (plan.settings.optimizer.learning_rate, plan.settings.advanced.seed);
    let (steps, size) = (report::count(steps, "step"), report::count(size, "sequence"));
    report::label("plan", format!("{steps} of {size} · learning rate {rate:e} · seed {seed}"));
    let warmup = plan.warmup(order.steps);
    if warmup > 0 && warmup >= order.steps {
        let warmup = report::count(warmup, "step");
        report::label(
            "warm-up",
            format!("{warmup}, and the run has {steps}: the learning rate does not reach {rate:e}"),
        );
    }
    if let Some((source, peak)) = peak(plan, precision.name()) {
        report::label("peak", format!("{peak} TFLOP/s {source} · the share that is reached is `mfu` in metrics.jsonl"));
    } else if let Some(card) = peak::card(plan.settings.recipe.device) {
        let precision = precision.name();
        report::label("peak", format!("it is not known for {card} in {precision}; --peak-tflops N sets it, for `mfu`"));
    }
    report::label("run", plan.output_dir.display().to_string());
}

/// The peak of the device in TFLOP/s, and where it is from. None if it is not known.
pub(super) fn peak(plan: &Plan, precision: &str) -> Option<(String, f64)> {
    if let Some(peak) = plan.settings.logging.peak_tflops {
        return Some(("by --peak-tflops".to_owned(), peak));
    }
    // The table is one of bf16.
    let name = peak::card(plan.settings.recipe.device).filter(|_| precision == Precision::Bf16.name())?;
    let peak = peak::by_name(&name)?;
    Some((format!("in bf16, by NVIDIA's figures for {name}"), peak))
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

fn data(inputs: &Inputs) -> String {
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
    parts.extend(found.lost(inputs.max_seq_length));
    if let Some((rows, full)) = found.packed {
        parts.push(format!("packed into {}, {:.0}% full", report::count(rows, "sequence"), full * 100.0));
    }
    parts.join(" · ")
}

/// Share of the rows that may be longer than the limit before a person is told.
const MANY: f64 = 0.1;

/// The limit may be so many times as long as the longest row before a person is told.
const FAR: usize = 4;

/// What to say if the limit on the length of sequences does not fit the lengths of the rows. `takes` is the most that the model
/// takes, and `wanted` says whether a person has set the limit, to have one row in each sequence.
fn misfit(found: &DataReport, limit: usize, takes: usize, wanted: bool) -> Option<String> {
    let (rows, longest) = (found.lengths.values().sum::<usize>(), found.longest);
    let (most, all) = (found.fitting(0.95), found.fitting(1.0));
    if found.overlong as f64 > MANY * rows as f64 {
        let mut text = format!("{} of {} are longer than {limit} tokens", found.overlong, report::count(rows, "row"));
        if most < all && most > limit && most <= takes {
            text += &format!("; --max-seq-length {most} has room for 95 % of them");
        }
        if longest <= takes {
            text += &format!("; --max-seq-length {} has room for all", all.min(takes));
        } else {
            text += &format!("; the longest has {longest}, and the model takes at most {takes}");
        }
        return Some(text);
    }
    (wanted && longest > 0 && limit > FAR * longest).then(|| {
        format!(
            "--max-seq-length {limit} is more than {FAR} times the longest row, which has {longest} tokens; {all} is enough, or \
             --packing puts several rows into one sequence"
        )
    })
}

fn step(plan: &Plan, master: MasterKind) -> String {
    let norm = plan.settings.optimizer.max_grad_norm;
    let which = if plan.clip == Clip::Exact { "this step's" } else { "the previous step's" };
    let clipping = if norm > 0.0 {
        format!("gradient clipping {norm:?}, using {which} norm")
    } else {
        "no gradient clipping".to_owned()
    };
    let states = plan.settings.memory.optimizer_state_mode.name();
    format!("{} master weights · {states} optimizer states · {clipping}", master.name())
}

#[cfg(test)]
mod tests {
    use super::misfit;
    use crate::data::read::DataReport;

    #[test]
    fn a_limit_that_does_not_fit_the_rows_is_told_with_one_that_does() {
        let of = |overlong| DataReport {
            lengths: [(128, 80), (256, 17), (1024, 3)].into(),
            longest: 1000,
            overlong,
            ..DataReport::default()
        };
        assert_eq!(misfit(&of(10), 100, 40960, true), None);
        let told = |limit, takes| misfit(&of(11), limit, takes, false).unwrap();
        let fits = "11 of 100 rows are longer than 100 tokens; --max-seq-length 256 has room for 95 % of them; \
                    --max-seq-length 1024 has room for all";
        assert_eq!(told(100, 40960), fits);
        assert_eq!(
            told(100, 512),
            "11 of 100 rows are longer than 100 tokens; --max-seq-length 256 has room for 95 % of them; the longest has 1000, \
             and the model takes at most 512"
        );
        assert!(!told(300, 40960).contains("95 %"));
        // The limit is far too long.
        let long = |limit, wanted| misfit(&of(0), limit, 40960, wanted);
        assert_eq!((long(4000, true), long(4001, false)), (None, None));
        assert!(long(4001, true).unwrap().contains("1000 tokens; 1024 is enough"));
        assert_eq!(misfit(&DataReport::default(), 4001, 40960, true), None);
    }
}
