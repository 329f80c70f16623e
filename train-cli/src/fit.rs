//! `fit`: model, data, Learner, export. The page to read first.

use crate::{
    CliError,
    args::FitArgs,
    checkpoint::{self, Head, TrainerState},
    data::{self, Order, Sample},
    demo,
    device::{self, Job},
    durable, export,
    generate::answer,
    model_files::TextFiles,
    optim::ChunkedAdamw,
    plan::{self, FitPlan, ModelSource, Resume},
    report,
    schedule::Schedule,
    train::{self, Between, Run, StepReport, Trainee},
    vram::VramReport,
};
use backend_nvfp4::{LinearSpec, Nvfp4Backend, Nvfp4Linear, Precision, Recipe, Scaling, quantize::View, reference};
use burn::{
    backend::Autodiff,
    module::{AutodiffModule, Module, ParamId},
};
use model_qwen3::{
    checkpoint::{Checkpoint, Stored, Tensors},
    config::Qwen3Config,
    model::Qwen3,
    weights::{self, Field, Purpose, fields},
};
use serde_json::json;
use std::{collections::HashSet, fs, path::PathBuf, sync::Arc, time::Instant};

/// Runs the command.
///
/// # Errors
/// Whatever goes wrong, with its exit code.
pub fn run(mut flags: FitArgs) -> Result<(), CliError> {
    let demo = if flags.demo { Some(demo::unpack(&mut flags)?) } else { None };
    if flags.resume_from_checkpoint.is_some() && flags.config.is_none() {
        // A run goes on as it was started.
        let saved = flags.output_dir.as_ref().map(|dir| dir.join("config.toml")).filter(|p| p.exists());
        flags.config = saved;
    }
    let dry_run = flags.dry_run;
    let plan = plan::fit(flags)?;
    if dry_run {
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
        let Self { plan, demo } = self;
        let mut vram = VramReport::new(plan.vram_report.as_deref());
        vram.note::<B>(&device, 0, "start")?;

        // The model and its text.
        let config = match &plan.source {
            ModelSource::Files(files) => files.config()?,
            ModelSource::Random { config } => Qwen3Config::from_file(config)?,
        };
        if plan.train_last_layers > config.num_hidden_layers {
            let (n, layers) = (plan.train_last_layers, config.num_hidden_layers);
            return Err(CliError::Usage(format!("--train-last-layers {n}: the model has {layers}")));
        }
        let text = TextFiles::open(&plan.text_folder, &config)?;
        let source = match &plan.source {
            ModelSource::Files(files) => Some(files.checkpoint()?),
            ModelSource::Random { .. } => None,
        };
        let scaling = plan.scaling.unwrap_or_else(|| stored_scaling(source.as_ref()));
        let spec = LinearSpec { recipe: plan.recipe, scaling, precision };

        // The data.
        let (samples, eval, data_report) = samples(&plan, &text, &config)?;
        let data_sha256 = data_digest(&plan)?;

        // The run folder, and where the run begins.
        let resumed = prepare_folder(&plan)?;
        let found = serde_json::to_string_pretty(&data_report).expect("plain data serialises");
        durable::write_bytes(&plan.output_dir.join("data_report.json"), found.as_bytes())?;
        let resumed = resumed.map(|folder| Ok::<_, CliError>((checkpoint::open(&folder)?, folder))).transpose()?;
        if let Some((state, folder)) = &resumed {
            check_unchanged(&plan, state, &data_sha256)?;
            report::label("resume", format!("{} · step {}", folder.display(), state.global_step));
        }
        let trainer_file = |folder: &PathBuf| Checkpoint::open(&folder.join(checkpoint::MODEL));
        let model: Qwen3<Autodiff<B>> = match (&resumed, &source) {
            (Some((state, folder)), _) => {
                let saved = trainer_file(folder)?;
                let saved = HeadAs { tensors: &saved, nvfp4: state.head == Head::Nvfp4 };
                weights::load(&saved, &config, spec, Purpose::Train, &device)?
            }
            (None, Some(source)) => weights::load(source, &config, spec, Purpose::Train, &device)?,
            (None, None) => weights::random(&config, spec, plan.seed, &device),
        };
        let model = freeze(model, plan.train_last_layers);
        vram.note::<B>(&device, 0, "model_loaded")?;

        // The order of samples, the schedule, the optimizer.
        let size = plan.batch_size * plan.accumulation;
        let limit = match plan.max_steps {
            Some(steps) => steps * size,
            None => ((samples.len() as f64 * plan.epochs).round() as usize).max(1),
        };
        let steps = limit.div_ceil(size);
        let start = resumed.as_ref().map_or(0, |(state, _)| state.global_step);
        let train_order = Order {
            samples: Arc::new(samples),
            batch_size: plan.batch_size,
            accumulation: plan.accumulation,
            steps,
            limit,
            seed: plan.seed,
            start,
        };
        let warmup = if plan.warmup < 1.0 { (plan.warmup * steps as f64).round() } else { plan.warmup } as usize;
        let schedule =
            Schedule { peak: plan.learning_rate, warmup: warmup.min(steps), total: steps, shape: plan.shape };
        let inner = model.valid();
        let mut optimizer = ChunkedAdamw::new(plan.adamw, undecayed(&inner));
        if let Some((_, folder)) = &resumed {
            checkpoint::load_optimizer(folder, &inner, &mut optimizer)?;
        }

        header(&plan, &config, &train_order, eval.len(), &data_report, spec);
        let prompts = prompts(&plan, &train_order.samples, &eval, demo.as_ref());
        let before =
            prompts.iter().map(|p| answer(&inner, &text, p, MAX_SAMPLE_TOKENS)).collect::<Result<Vec<_>, _>>()?;
        let codes_before = quantised_codes(&inner)?;
        drop(inner);

        // Train.
        let state = TrainerState {
            version: 1,
            global_step: start,
            max_steps: steps,
            epoch: 0.0,
            data_sha256,
            head: head_of(&model),
            two_level: scaling == Scaling::Two,
            settings: plan.settings.clone(),
        };
        let eval_tokens = eval.iter().map(Sample::supervised_tokens).sum::<usize>();
        let between = Keeper {
            plan: plan.clone(),
            text: text.clone(),
            prompts: prompts.clone(),
            order: train_order.clone(),
            state: state.clone(),
            eval_every: plan.eval_steps.unwrap_or_else(|| steps.div_ceil(20)),
            last_eval: Arc::default(),
        };
        let last_eval = between.last_eval.clone();
        let started = Instant::now();
        let model = if start < steps {
            let run = Run {
                train: train_order.clone(),
                eval: eval_order(eval, plan.batch_size, eval_tokens),
                optimizer,
                schedule,
                max_grad_norm: plan.max_grad_norm,
                logging_steps: plan.logging_steps,
                vram,
                between: Box::new(between),
            };
            train::run(Trainee::new(model, plan.loss), run)?
        } else {
            report::line(format!("step {start} of {steps}: nothing left to train"));
            model.valid()
        };
        let runtime = started.elapsed().as_secs_f64();

        // What came of it.
        for (prompt, before) in prompts.iter().zip(&before) {
            let after = answer(&model, &text, prompt, MAX_SAMPLE_TOKENS)?;
            report::label("before", format!("{prompt} → {}", clipped(before)));
            report::label("after", format!("{prompt} → {}", clipped(&after)));
        }
        let changed = codes_changed(&codes_before, &quantised_codes(&model)?);
        if let Some(share) = changed {
            report::label("nvfp4", format!("{:.1}% of codes changed", share * 100.0));
        }
        let target = export::Target { scaling, head: state.head == Head::Nvfp4, recipe: plan.recipe };
        let final_folder = plan.output_dir.join("final");
        let like = source.as_ref().filter(|s| s.dat().is_some() && plan.scaling.is_none());
        let exported = export::model_to_folder(&model, &config, &text, &plan.text_folder, target, like, &final_folder)?;
        if let Some(extra) = &plan.output_dat {
            export::model_to_dat(&model, &text, target, like, extra)?;
        }
        write_results(&plan, &train_order, start, runtime, *last_eval.lock().expect("no holder panics"), changed)?;
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
    last_eval: Arc<std::sync::Mutex<Option<f32>>>,
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
            }),
        )
    }

    fn evaluates(&self, step: usize) -> bool {
        step == self.order.steps || self.eval_every > 0 && step.is_multiple_of(self.eval_every)
    }

    fn after_evaluation(&mut self, model: &Qwen3<B>, r: &StepReport) -> Result<(), CliError> {
        *self.last_eval.lock().expect("no holder panics") = Some(r.loss);
        self.log("metrics.jsonl", json!({"step": r.step, "eval_loss": r.loss, "eval_perplexity": r.loss.exp()}))?;
        for prompt in &self.prompts {
            let text = answer(model, &self.text, prompt, MAX_SAMPLE_TOKENS)?;
            self.log("samples.jsonl", json!({"step": r.step, "prompt": prompt, "answer": text}))?;
            report::line(format!("{:>11}  {prompt} → {}", "sample", clipped(&text)));
        }
        Ok(())
    }

    fn maybe_save(&mut self, model: &Qwen3<B>, optimizer: &ChunkedAdamw<B>, step: usize) -> Result<(), CliError> {
        let due = step == self.order.steps || self.plan.save_steps > 0 && step.is_multiple_of(self.plan.save_steps);
        if !due {
            return Ok(());
        }
        self.state.global_step = step;
        self.state.epoch = self.order.epochs(step);
        let (run, text) = (&self.plan.output_dir, &self.plan.text_folder);
        let saved = checkpoint::save(run, text, model, optimizer, &self.state, self.plan.save_total_limit)?;
        report::line(format!("{:>11}  {}", "saved", saved.display()));
        Ok(())
    }
}

/// A checkpoint's f32 head, shown as quantised where training quantises it.
struct HeadAs<'a> {
    tensors: &'a Checkpoint,
    nvfp4: bool,
}

impl Tensors for HeadAs<'_> {
    fn path(&self) -> &std::path::Path {
        self.tensors.path()
    }

    fn names(&self) -> Vec<String> {
        self.tensors.names()
    }

    fn stored(&self, name: &str) -> Option<Stored> {
        self.tensors.stored(name)
    }

    fn trains_quantised(&self, name: &str) -> bool {
        name == "lm_head.weight" && self.nvfp4
    }

    fn read_rows(&self, name: &str, rows: std::ops::Range<usize>) -> Result<Vec<f32>, model_qwen3::ModelError> {
        self.tensors.read_rows(name, rows)
    }

    fn read_packed(&self, name: &str) -> Result<reference::Packed, model_qwen3::ModelError> {
        self.tensors.read_packed(name)
    }
}

fn stored_scaling(source: Option<&Checkpoint>) -> Scaling {
    let packed = |s: &Checkpoint| {
        s.names().iter().find_map(|n| match s.stored(n) {
            Some(Stored::Packed { scaling, .. }) => Some(scaling),
            _ => None,
        })
    };
    source.and_then(packed).unwrap_or(Scaling::Two)
}

type Samples = (Vec<Sample>, Vec<Sample>, data::DataReport);

fn samples(plan: &FitPlan, text: &TextFiles, config: &Qwen3Config) -> Result<Samples, CliError> {
    if plan.options.max_seq_length > config.max_position_embeddings {
        let (flag, limit) = (plan.options.max_seq_length, config.max_position_embeddings);
        return Err(CliError::Usage(format!("--max-seq-length {flag}: the model takes at most {limit}")));
    }
    if plan.data.is_empty() {
        let rows = plan.max_steps.unwrap_or(8) * plan.batch_size * plan.accumulation;
        let made = data::synthetic(rows, plan.options.max_seq_length, config.vocab_size, plan.seed);
        let tokens = made.iter().map(|s| s.ids.len()).sum();
        let report = data::DataReport { rows, samples: rows, tokens, supervised_tokens: tokens, ..Default::default() };
        return Ok((made, vec![], report));
    }
    let (all, report) = data::load(&plan.data, text, plan.options)?;
    let (train, eval) = match &plan.eval_data {
        Some(path) => (all, data::load(std::slice::from_ref(path), text, plan.options)?.0),
        None => data::split(all, plan.val_split, plan.seed),
    };
    Ok((train, eval, report))
}

fn data_digest(plan: &FitPlan) -> Result<String, CliError> {
    let mut all = String::new();
    for path in plan.data.iter().chain(&plan.eval_data) {
        all += &durable::digest(path).map_err(CliError::io(path))?.1;
    }
    Ok(all)
}

fn eval_order(samples: Vec<Sample>, batch_size: usize, tokens: usize) -> Order {
    // One step holds all batches, so that each loss is divided by all supervised tokens.
    let n = samples.len();
    debug_assert!(n == 0 || tokens > 0);
    Order {
        samples: Arc::new(samples),
        batch_size,
        accumulation: n.div_ceil(batch_size).max(1),
        steps: usize::from(n > 0),
        limit: n,
        seed: 0,
        start: 0,
    }
}

/// Makes the run folder, or finds the checkpoint to go on from.
fn prepare_folder(plan: &FitPlan) -> Result<Option<PathBuf>, CliError> {
    let dir = &plan.output_dir;
    let filled = fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_some());
    match &plan.resume {
        Some(Resume::Latest) => return checkpoint::latest(dir).map(Some),
        Some(Resume::At(path)) => return Ok(Some(path.clone())),
        None if filled && plan.overwrite => fs::remove_dir_all(dir).map_err(CliError::io(dir))?,
        None if filled => {
            let text = "is not empty: give another --output-dir, or --resume-from-checkpoint, or --overwrite";
            return Err(CliError::Usage(format!("{} {text}", dir.display())));
        }
        None => {}
    }
    fs::create_dir_all(dir).map_err(CliError::io(dir))?;
    durable::write_bytes(&dir.join("config.toml"), toml_of(&plan.settings)?.as_bytes())?;
    let run = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "command": std::env::args().collect::<Vec<_>>(),
        "started": jiff::Timestamp::now().to_string(),
    });
    durable::write_bytes(&dir.join("run.json"), run.to_string().as_bytes())?;
    Ok(None)
}

fn toml_of(settings: &FitArgs) -> Result<String, CliError> {
    toml::to_string(settings).map_err(|e| CliError::Usage(format!("settings: {e}")))
}

/// Refuses to go on with other data or other settings that change the numbers.
fn check_unchanged(plan: &FitPlan, state: &TrainerState, data_sha256: &str) -> Result<(), CliError> {
    if state.data_sha256 != data_sha256 {
        return Err(CliError::Usage(
            "the training data changed since the checkpoint: a resumed run reads the same files".into(),
        ));
    }
    let free = [
        "output_dir",
        "output_dat",
        "eval_steps",
        "save_steps",
        "logging_steps",
        "save_total_limit",
        "sample_prompt",
        "vram_report",
    ];
    let table = |s: &FitArgs| match serde_json::to_value(s) {
        Ok(serde_json::Value::Object(map)) => map,
        _ => unreachable!("settings are a table"),
    };
    let (old, new) = (table(&state.settings), table(&plan.settings));
    let keys: HashSet<&String> = old.keys().chain(new.keys()).collect();
    for key in keys {
        if old.get(key) != new.get(key) && !free.contains(&key.as_str()) {
            let show = |v: Option<&serde_json::Value>| v.map_or("unset".into(), ToString::to_string);
            return Err(CliError::Usage(format!(
                "--{} is {}, the checkpoint was made with {}: a resumed run keeps it",
                key.replace('_', "-"),
                show(new.get(key)),
                show(old.get(key))
            )));
        }
    }
    Ok(())
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

fn head_of<B: Nvfp4Backend>(model: &Qwen3<B>) -> Head {
    Head::of(model)
}

fn header(plan: &FitPlan, config: &Qwen3Config, order: &Order, eval: usize, data: &data::DataReport, spec: LinearSpec) {
    let params = report::short(config.num_params() as f64);
    let layers = config.num_hidden_layers;
    let levels = if spec.scaling == Scaling::Two { "two-level" } else { "single-level" };
    let name = match &plan.source {
        ModelSource::Files(files) => files.weights.display().to_string(),
        ModelSource::Random { config } => format!("{} (random weights)", config.display()),
    };
    report::label(
        "model",
        format!("{name} · {params} params · {layers} layers · recipe {} · {levels} scales", spec.recipe.name()),
    );
    let skipped = match (data.dropped.len(), data.truncated.len()) {
        (0, 0) => String::new(),
        (d, t) => format!(" · {d} dropped, {t} cut"),
    };
    report::label(
        "data",
        format!(
            "{} rows · {} train / {eval} eval · {} tokens, {} supervised{skipped}",
            data.rows,
            order.samples.len(),
            report::short(data.tokens as f64),
            report::short(data.supervised_tokens as f64)
        ),
    );
    let size = plan.batch_size * plan.accumulation;
    report::label(
        "plan",
        format!("{} steps × {size} sequences · lr {:e} · seed {}", order.steps, plan.learning_rate, plan.seed),
    );
    report::label("run", plan.output_dir.display().to_string());
}

fn prompts(plan: &FitPlan, train: &[Sample], eval: &[Sample], demo: Option<&demo::Demo>) -> Vec<String> {
    if let Some(demo) = demo {
        return demo.prompts.clone();
    }
    if !plan.sample_prompts.is_empty() {
        return plan.sample_prompts.clone();
    }
    [train.first(), eval.first()].into_iter().flatten().map(|s| s.prompt.clone()).filter(|p| !p.is_empty()).collect()
}

/// The codes of every quantised layer, as an export would write them.
fn quantised_codes<B: Nvfp4Backend>(model: &Qwen3<B>) -> Result<Vec<Vec<u32>>, CliError> {
    let spec = model.spec();
    if spec.recipe == Recipe::Bf16 {
        return Ok(vec![]);
    }
    let mut out = Vec::new();
    for (_, field) in fields(model) {
        if let Field::Linear(Nvfp4Linear::Master(_)) = field {
            let shape = field.shape();
            let values = field.to_host()?;
            out.push(reference::quantize(&values, View::row_major(shape[0], shape[1]), spec.weights()).codes);
        }
    }
    Ok(out)
}

fn codes_changed(before: &[Vec<u32>], after: &[Vec<u32>]) -> Option<f64> {
    let (mut changed, mut all) = (0u64, 0u64);
    for (a, b) in before.iter().flatten().zip(after.iter().flatten()) {
        let diff = a ^ b;
        changed += (0..8).filter(|i| diff >> (4 * i) & 15 != 0).count() as u64;
        all += 8;
    }
    (all > 0).then(|| changed as f64 / all as f64)
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
    let cut = text.char_indices().nth(100).map_or(text.len(), |(i, _)| i);
    if cut < text.len() { format!("{} …", &text[..cut]) } else { text.to_owned() }
}

fn next_steps(plan: &FitPlan, exported: &std::path::Path, prompt: Option<&String>) {
    let prompt = prompt.map_or("hello", |p| p);
    report::line("next:");
    report::line(format!("  train-cli generate -m {} -p \"{prompt}\"", exported.display()));
    report::line(format!("  train-cli inspect {} --verify", exported.display()));
    report::line(format!(
        "  train-cli fit -c {} -m <your Qwen3 folder> -d <your.jsonl> --dry-run",
        plan.output_dir.join("config.toml").display()
    ));
}
