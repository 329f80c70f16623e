//! `fit`: model, data, Learner, export. The page to read first.

use crate::{
    CliError,
    args::FitArgs,
    commands::demo,
    commands::export,
    commands::generate::answer,
    data::order::Order,
    data::sample::Sample,
    device::{self, Job},
    durable,
    memory::estimate::{self, Estimate},
    memory::vram::VramReport,
    model_files::TextFiles,
    plan::{self, FitPlan, Resume},
    report,
    run::checkpoint::{self, Head, TrainerState},
    run::folder::{check_free, check_unchanged, open_folder, toml_of},
    run::inputs::{Inputs, eval_order, packed_scaling},
    train::codes::Codes,
    train::damp::DampedFinish,
    train::learner::{self as train, Between, Run, StepReport, Trainee},
    train::optim::ChunkedAdamw,
    train::schedule::Schedule,
    train::step::Stepper,
};
use backend_nvfp4::{Block, LinearSpec, MasterKind, Nvfp4Backend, Precision, Recipe, Scaling, reference};
use burn::{
    backend::Autodiff,
    module::{AutodiffModule, Module, ParamId},
    tensor::DType,
};
use model_qwen3::{
    container::Container,
    model::Qwen3,
    names,
    tensors::{Stored, Tensors},
    weights::{self, Field, Purpose, fields},
};
use serde_json::json;
use std::{collections::HashSet, path::PathBuf, sync::Arc, time::Instant};

/// Runs the command.
///
/// # Errors
/// Whatever goes wrong, with its exit code.
pub fn run(mut flags: FitArgs) -> Result<(), CliError> {
    let demo = if flags.demo { Some(demo::unpack(&mut flags)?) } else { None };
    let dry_run = flags.dry_run;
    let plan = plan::fit(flags)?;
    if dry_run {
        let inputs = Inputs::read(&plan)?;
        check_free(&plan)?;
        inputs.header(&plan, inputs.scaling(&plan));
        report::result(toml_of(&plan.settings)?);
        return Ok(());
    }
    report::line(format!("train-cli {} · fit", env!("CARGO_PKG_VERSION")));
    let (device, precision) = (plan.device, plan.precision);
    device::run(device, precision, Fit { plan, demo })
}

struct Fit {
    plan: FitPlan,
    demo: Option<demo::Demo>,
}

impl Job for Fit {
    type Output = ();

    fn run<B: Nvfp4Backend>(self, device: B::Device, precision: Precision) -> Result<(), CliError> {
        let Self { mut plan, demo } = self;
        plan.adamw.master = plan.master(precision);
        plan.master_auto = false;
        plan.adamw.float = precision.dtype();
        let mut vram = VramReport::new(plan.vram_report.as_deref());
        vram.note::<B>(&device, 0, "start")?;

        let inputs = Inputs::read(&plan)?;
        let estimate = Estimate::of(&inputs.config, &plan, precision);
        if let Some(limit) = plan.memory_limit.filter(|limit| estimate.peak() > *limit) {
            estimate.table().iter().for_each(report::line);
            return Err(CliError::Memory { needed: estimate.peak(), limit, saved: None });
        }
        let scaling = inputs.scaling(&plan);
        if scaling == Scaling::Single && (plan.damped_finish > 0.0 || plan.adamw.master == MasterKind::Nvfp4) {
            let text = "--damped-finish and --master-weights nvfp4 keep codes with two-level scales: --scales two";
            return Err(CliError::Usage(text.into()));
        }
        let spec = LinearSpec::new(plan.recipe, scaling, precision);
        let (config, source) = (&inputs.config, &inputs.source);

        // Where the run begins.
        let resumed = match &plan.resume {
            None => None,
            Some(Resume::Latest) => Some(checkpoint::latest(&plan.output_dir)?),
            Some(Resume::At(path)) => Some(path.clone()),
        };
        let resumed = resumed.map(|folder| Ok::<_, CliError>((checkpoint::open(&folder)?, folder))).transpose()?;
        if let Some((state, folder)) = &resumed {
            check_unchanged(&plan, state, &inputs.sha256, precision)?;
            if state.global_step == state.max_steps && plan.output_dir.join("train_results.json").exists() {
                report::line(format!("{}: complete at step {}", plan.output_dir.display(), state.global_step));
                return Ok(());
            }
            report::label("resume", format!("{} · step {}", folder.display(), state.global_step));
        } else {
            check_free(&plan)?;
        }
        let trainer_file = |folder: &PathBuf| Container::open(&folder.join(checkpoint::MODEL));
        let model: Qwen3<Autodiff<B>> = match (&resumed, &source) {
            (Some((state, folder)), _) => {
                let saved = trainer_file(folder)?;
                let saved = HeadAs { tensors: &saved, nvfp4: state.head == Head::Nvfp4 };
                weights::load(&saved, config, spec, Purpose::Train(plan.adamw.master), &device)?
            }
            (None, Some(source)) => weights::load(source, config, spec, Purpose::Train(plan.adamw.master), &device)?,
            (None, None) => weights::random(config, spec, plan.adamw.master, plan.seed, &device)?,
        };
        let model = freeze(model, plan.train_last_layers).with_bf16_last_blocks(plan.bf16_last_blocks);
        let frozen = match plan.train_last_layers {
            0 => 0,
            last => model.layers.len() - last,
        };
        vram.note::<B>(&device, 0, "model_loaded")?;

        // The folder, the order of samples, the schedule, the optimizer.
        let start = resumed.as_ref().map_or(0, |(state, _)| state.global_step);
        let _lock = open_folder(&plan, &inputs, resumed.is_some().then_some(start))?;
        let train_order = Order { start, ..inputs.order(&plan) };
        let steps = train_order.steps;
        let warmup = if plan.warmup < 1.0 { (plan.warmup * steps as f64).round() } else { plan.warmup } as usize;
        let schedule =
            Schedule { peak: plan.learning_rate, warmup: warmup.min(steps), total: steps, shape: plan.shape };
        let inner = model.valid();
        let mut optimizer = ChunkedAdamw::new(plan.adamw, undecayed(&inner));
        if let Some((_, folder)) = &resumed {
            checkpoint::load_optimizer(folder, &inner, &mut optimizer)?;
        }

        inputs.header(&plan, scaling);
        report::label("products", B::tiers(&device).join(" · "));
        let text = &inputs.text;
        let prompts = prompts(&plan, &inputs, demo.as_ref())?;
        let ask = |model: &Qwen3<B>| {
            prompts.iter().map(|p| answer(model, text, p, MAX_SAMPLE_TOKENS)).collect::<Result<Vec<_>, _>>()
        };
        // What a whole run changed can be told only by one that saw its beginning.
        let before = if start == 0 { Some((ask(&inner)?, Codes::of(&inner, spec)?)) } else { None };
        drop(inner);

        // Train.
        let state = TrainerState {
            version: 1,
            global_step: start,
            max_steps: steps,
            epoch: 0.0,
            inputs_sha256: inputs.sha256.clone(),
            precision: precision.name().to_owned(),
            head: Head::of(&model),
            two_level: scaling == Scaling::Two,
            settings: plan.settings.clone(),
            last_norm: resumed.as_ref().and_then(|(state, _)| state.last_norm),
        };
        let between = Keeper {
            plan: plan.clone(),
            text: text.clone(),
            prompts: prompts.clone(),
            order: train_order.clone(),
            state: state.clone(),
            eval_every: plan.eval_steps.unwrap_or_else(|| steps.div_ceil(20)),
            save_every: plan.save_steps.unwrap_or_else(|| steps.div_ceil(20)),
            last_eval: Arc::default(),
            flops: estimate::flops_a_token(config, plan.options.max_seq_length.min(config.max_position_embeddings)),
            codes: before.as_ref().map(|(_, codes)| codes.clone()),
        };
        let last_eval = between.last_eval.clone();
        let started = Instant::now();
        // Rounded, at least the last step is quantised, and nothing freezes before.
        let quantise_from = ((plan.quantise_from * steps as f64).round() as usize).min(steps.saturating_sub(1));
        let mut damped = DampedFinish::new(plan.damped_finish, steps);
        damped.start = damped.start.max(quantise_from);
        let model = if start < steps {
            let run = Run {
                train: train_order.clone(),
                eval: eval_order(inputs.eval.clone(), plan.batch_size),
                stepper: Stepper {
                    mode: plan.step_mode,
                    clip: plan.clip,
                    max_grad_norm: plan.max_grad_norm,
                    last_norm: state.last_norm,
                    buffer: if plan.adamw.master == MasterKind::F32 { DType::F32 } else { precision.dtype() },
                    optimizer,
                    seed: plan.seed,
                    accumulation: plan.accumulation,
                },
                schedule,
                recipe: plan.recipe,
                quantise_from,
                damped,
                memory_limit: plan.memory_limit,
                logging_steps: plan.logging_steps,
                vram,
                between: Box::new(between),
            };
            train::run(Trainee::new(model, plan.loss, frozen), run)?
        } else {
            report::line(format!("step {start} of {steps}: nothing left to train"));
            model.valid()
        };
        let runtime = started.elapsed().as_secs_f64();
        // The export is checked beside the model, where the step's buffers and the optimizer's states were.
        B::memory_cleanup(&device);

        // What came of it.
        let mut changed = None;
        if let Some((before, codes)) = before {
            for ((prompt, before), after) in prompts.iter().zip(&before).zip(ask(&model)?) {
                report::label("before", format!("{} → {}", clipped(prompt), clipped(before)));
                report::label("after", format!("{} → {}", clipped(prompt), clipped(&after)));
            }
            changed = codes.changed_in(&model)?;
        }
        if let Some(share) = changed {
            report::label("nvfp4", format!("{:.1}% of codes changed", share * 100.0));
        }
        write_results(&plan, &train_order, start, runtime, *last_eval.lock().expect("no holder panics"), changed)?;
        if !plan.saves {
            report::line(format!("done in {} · nothing saved, as asked", report::duration(runtime)));
            return Ok(());
        }
        let dense_from = model.layers.len().saturating_sub(plan.bf16_last_blocks);
        let target = export::ExportFormat { scaling, head: state.head == Head::Nvfp4, recipe: plan.recipe, dense_from };
        // A file that holds NVFP4 is exported as it was stored, unless the recipe quantises by other blocks.
        let ours = plan.bf16_last_blocks > 0 || spec.weights().block == Block::Square;
        let nvfp4 =
            |s: &&Container| s.dat().is_some() && plan.scaling.is_none() && packed_scaling(s).is_some() && !ours;
        let like = source.as_ref().filter(nvfp4);
        let folder = plan.output_dir.join("final");
        let exported = export::model_to_folder(&model, text, &plan.companions, target, like, &folder)?;
        report::label("export", exported.display().to_string());
        if let Some(extra) = &plan.output_dat {
            export::model_to_dat(&model, text, target, like, extra)?;
        }
        report::line(format!("done in {} · {}", report::duration(runtime), plan.output_dir.display()));
        next_steps(&plan, &exported, prompts.first());
        Ok(())
    }
}

/// Longest sample answer.
const MAX_SAMPLE_TOKENS: usize = 48;

/// Logs, evaluations and checkpoints of a run.
struct Keeper {
    plan: FitPlan,
    text: TextFiles,
    prompts: Vec<String>,
    order: Order,
    state: TrainerState,
    eval_every: usize,
    save_every: usize,
    last_eval: Arc<std::sync::Mutex<Option<f32>>>,
    /// Operations a token.
    flops: f64,
    /// The codes at the beginning, of a run that saw it.
    codes: Option<Codes>,
}

impl Keeper {
    fn log(&self, file: &str, line: serde_json::Value) -> Result<(), CliError> {
        durable::append_line(&self.plan.output_dir.join(file), &line.to_string())
    }
}

impl<B: Nvfp4Backend> Between<B> for Keeper {
    fn after_step(&mut self, r: &StepReport) -> Result<(), CliError> {
        self.log(
            "metrics.jsonl",
            json!({
                "step": r.step, "epoch": self.order.epochs(r.step), "loss": r.loss, "grad_norm": r.grad_norm,
                "learning_rate": r.lr, "tokens_per_second": r.tokens_per_second, "memory_mib": r.memory_mib,
                "model_tflops": self.flops * r.tokens_per_second / 1e12,
                "mfu": self.plan.peak_tflops.map(|peak| self.flops * r.tokens_per_second / 1e12 / peak),
                "frozen_blocks": r.frozen_blocks,
            }),
        )
    }

    fn evaluates(&self, step: usize) -> bool {
        step == self.order.steps || self.eval_every > 0 && step.is_multiple_of(self.eval_every)
    }

    fn after_evaluation(&mut self, model: &Qwen3<B>, r: &StepReport) -> Result<(), CliError> {
        *self.last_eval.lock().expect("no holder panics") = Some(r.loss);
        let changed = match &self.codes {
            Some(before) => before.changed_in(model)?,
            None => None,
        };
        self.log(
            "metrics.jsonl",
            json!({
                "step": r.step, "eval_loss": r.loss, "eval_perplexity": r.loss.exp(),
                "eval_loss_quantised": r.quantised_loss, "eval_loss_master": r.master_loss,
                "codes_changed_pct": changed.map(|c| c * 100.0),
            }),
        )?;
        for prompt in &self.prompts {
            let text = answer(model, &self.text, prompt, MAX_SAMPLE_TOKENS)?;
            self.log("samples.jsonl", json!({"step": r.step, "prompt": prompt, "answer": text}))?;
            report::line(format!("{:>11}  {prompt} → {}", "sample", clipped(&text)));
        }
        Ok(())
    }

    fn maybe_save(
        &mut self,
        model: &Qwen3<B>,
        stepper: &Stepper<B>,
        step: usize,
        forced: bool,
    ) -> Result<(), CliError> {
        let due = step == self.order.steps || self.save_every > 0 && step.is_multiple_of(self.save_every);
        if !(self.plan.saves && (due || forced)) {
            return Ok(());
        }
        self.state.global_step = step;
        self.state.epoch = self.order.epochs(step);
        self.state.last_norm = stepper.last_norm;
        let (run, files) = (&self.plan.output_dir, &self.plan.companions);
        let saved = checkpoint::save(run, files, model, &stepper.optimizer, &self.state, self.plan.save_total_limit)?;
        report::line(format!("{:>11}  {}", "saved", saved.display()));
        Ok(())
    }
}

/// A checkpoint's f32 head, shown as quantised where training quantises it.
struct HeadAs<'a> {
    tensors: &'a Container,
    nvfp4: bool,
}

impl Tensors for HeadAs<'_> {
    fn keeps_codes(&self, name: &str) -> bool {
        matches!(self.tensors.stored(name), Some(Stored::Packed { .. }))
    }

    fn path(&self) -> &std::path::Path {
        self.tensors.path()
    }

    fn names(&self) -> Vec<String> {
        self.tensors.names()
    }

    fn stored(&self, name: &str) -> Option<Stored> {
        self.tensors.stored(name)
    }

    fn trains_quantized(&self, name: &str) -> bool {
        name == names::HEAD && self.nvfp4
    }

    fn read_rows(&self, name: &str, rows: std::ops::Range<usize>) -> Result<Vec<f32>, model_qwen3::ModelError> {
        self.tensors.read_rows(name, rows)
    }

    fn read_packed(&self, name: &str) -> Result<reference::Packed, model_qwen3::ModelError> {
        self.tensors.read_packed(name)
    }
}

/// With `last` above 0, trains only the last blocks and the final norm.
fn freeze<B: Nvfp4Backend>(mut model: Qwen3<Autodiff<B>>, last: usize) -> Qwen3<Autodiff<B>> {
    if last == 0 {
        return model;
    }
    let frozen = model.layers.len() - last;
    model.embed_tokens = model.embed_tokens.no_grad();
    model.lm_head = model.lm_head.map(Module::no_grad);
    model.layers =
        model.layers.into_iter().enumerate().map(|(i, b)| if i < frozen { b.no_grad() } else { b }).collect();
    model
}

/// Norms and embedding are not decayed.
fn undecayed<B: Nvfp4Backend>(model: &Qwen3<B>) -> HashSet<ParamId> {
    let linear = |f: &Field<'_, B>| matches!(f, Field::Linear(_));
    fields(model).iter().filter(|(_, f)| !linear(f)).filter_map(|(_, f)| f.id()).collect()
}

/// The prompts that are answered during training: those asked for, else the first of the training and
/// of the evaluation rows.
fn prompts(plan: &FitPlan, inputs: &Inputs, demo: Option<&demo::Demo>) -> Result<Vec<String>, CliError> {
    let first = |samples: &[Sample]| samples.first().map(|s| s.prompt.clone()).filter(|p| !p.is_empty());
    let mut prompts = match demo {
        Some(demo) => demo.prompts.clone(),
        None if !plan.sample_prompts.is_empty() => plan.sample_prompts.clone(),
        None => first(&inputs.train).into_iter().chain(first(&inputs.eval)).collect(),
    };
    let mut kept = Vec::new();
    for prompt in prompts.drain(..) {
        let tokens = inputs.text.tokenizer.encode(&prompt)?.len();
        // The template adds a few dozen tokens at most.
        if tokens + MAX_SAMPLE_TOKENS + 128 <= inputs.config.max_position_embeddings {
            kept.push(prompt);
        } else {
            report::line(format!("note: a sample prompt of {tokens} tokens is too long to be answered, and left out"));
        }
    }
    Ok(kept)
}

fn write_results(
    plan: &FitPlan,
    order: &Order,
    start: usize,
    runtime: f64,
    eval_loss: Option<f32>,
    codes_changed: Option<f64>,
) -> Result<(), CliError> {
    let done = order.steps.saturating_sub(start) as f64;
    let samples = (order.limit.saturating_sub(start * order.batch_size * order.accumulation)) as f64;
    let result = json!({
        "epoch": order.epochs(order.steps),
        "global_step": order.steps,
        "train_runtime": runtime,
        "train_samples": samples,
        "train_samples_per_second": samples / runtime,
        "train_steps_per_second": done / runtime,
        "eval_loss": eval_loss,
        "codes_changed_pct": codes_changed.map(|c| c * 100.0),
    });
    let text = serde_json::to_string_pretty(&result).expect("plain data serialises");
    durable::write_bytes(&plan.output_dir.join("train_results.json"), text.as_bytes()).map(|_| ())
}

/// The beginning of a long answer.
fn clipped(text: &str) -> String {
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let cut = text.char_indices().nth(100).map_or(text.len(), |(i, _)| i);
    if cut < text.len() { format!("{} …", &text[..cut]) } else { text }
}

fn next_steps(plan: &FitPlan, exported: &std::path::Path, prompt: Option<&String>) {
    let prompt = quoted(prompt.map_or("hello", |p| p));
    let folder = quoted(&exported.display().to_string());
    let mode = if matches!(plan.recipe, Recipe::W4a4 | Recipe::Nvfp4(_)) { " --w4a4" } else { "" };
    report::line("next:");
    report::line(format!("  train-cli generate -m {folder} -p {prompt}{mode}"));
    report::line(format!("  train-cli inspect {folder} --verify"));
    report::line("  train-cli fit -m <your Qwen3 folder> -d <your.jsonl> --dry-run");
}

/// A word that a shell reads as it is, on one line.
fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "-_./:,+@".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return text.to_owned();
    }
    let text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    format!("'{}'", text.replace('\'', "'\\''"))
}
