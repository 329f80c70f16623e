//! `fit`: trains a model and exports it. The page to read first: prepare the inputs, load or resume the model, open the
//! run folder, train, then show and export the result.

use crate::{
    CliError,
    args::FitArgs,
    commands::{demo, export},
    data::order::Order,
    device::{self, Job},
    durable,
    interrupt::Interruption,
    memory::estimate::Estimate,
    memory::vram::VramReport,
    plan::Plan,
    report,
    run::checkpoint::{self, CONFIG, Head, Resume, Resumed, TrainerState},
    run::folder::{self, FINAL},
    run::header,
    run::inputs::{Inputs, packed_scaling},
    run::journal::Journal,
    run::sample::{Samples, beginning},
    settings::{Layer, SaveStrategy},
    train::clip::Clipping,
    train::codes::Codes,
    train::damp::DampedFinish,
    train::learner,
    train::objective::Trainee,
    train::optim::{AdamwConfig, ChunkedAdamw},
    train::schedule::Schedule,
    train::step::Stepper,
    train::trained,
    train::training_loop::Run,
};
use backend_nvfp4::{Block, DeviceServices, LinearSpec, MasterKind, Nvfp4Kernels, Precision, Recipe, Scaling};
use burn::{backend::Autodiff, module::AutodiffModule, tensor::DType};
use model_qwen3::{
    container::Container,
    model::Qwen3,
    weights::{self, Purpose},
};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

/// Runs the command.
///
/// # Errors
/// Every error of a run, with its exit code.
pub fn run(args: &FitArgs) -> Result<(), CliError> {
    if args.launch.demo {
        demo::unpack()?;
    }
    let (plan, resumed, restarts) = planned(args)?;
    let overwrite = args.launch.overwrite || restarts;
    if args.launch.dry_run {
        let inputs = Inputs::read(&plan)?;
        if resumed.is_none() {
            folder::check_free(&plan, overwrite)?;
        }
        header::print(&plan, &inputs, inputs.scaling(&plan));
        report::result(plan.settings.toml()?);
        return Ok(());
    }
    report::line(format!("train-cli {} · fit", env!("CARGO_PKG_VERSION")));
    let (device, precision) = (plan.settings.recipe.device, plan.settings.recipe.compute_dtype);
    device::run(device, precision, Fit { plan, resumed, overwrite })
}

/// The plan of a command line, the checkpoint that it resumes from, and whether it restarts a run that has no checkpoint
/// yet. Typed settings win over those of the config file, of the checkpoint or of the demo, and these over defaults.
pub(crate) fn planned(args: &FitArgs) -> Result<(Plan, Option<Resumed>, bool), CliError> {
    let launch = &args.launch;
    let output_dir = args.typed.get("output_dir").and_then(|dir| dir.as_str()).map(Path::new);
    let resume = match &launch.resume_from_checkpoint {
        Some(text) => checkpoint::resume(text, output_dir)?,
        None => None,
    };
    let begun = match &resume {
        Some(Resume::Beginning(run)) => Some(run.join(CONFIG)).filter(|file| file.exists()),
        _ => None,
    };
    let base = match (&launch.config, &resume, begun) {
        (Some(file), ..) => Layer::of_file(file)?,
        (None, Some(Resume::At(resumed)), _) => Layer::from(&resumed.state.settings),
        (None, _, Some(file)) => Layer::of_file(&file)?,
        (None, _, None) if launch.demo => demo::settings(),
        (None, ..) => Layer::default(),
    };
    let mut settings = base.under(args.typed.clone()).over_defaults()?;
    let (resumed, restarted) = match resume {
        Some(Resume::At(resumed)) => (Some(*resumed), None),
        Some(Resume::Beginning(run)) => (None, Some(run)),
        None => (None, None),
    };
    if let Some(run) = resumed.as_ref().map(|resumed| &resumed.run).or(restarted.as_ref()) {
        settings.saving.output_dir = Some(run.clone());
    }
    if let Some(run) = &restarted {
        report::line(format!("{} has no checkpoint yet: the run starts at its first step", run.display()));
    }
    Ok((Plan::new(settings)?, resumed, restarted.is_some()))
}

struct Fit {
    plan: Plan,
    resumed: Option<Resumed>,
    overwrite: bool,
}

impl Job for Fit {
    type Output = ();

    fn run<B: Nvfp4Kernels + DeviceServices>(self, device: B::Device, precision: Precision) -> Result<(), CliError> {
        let Self { plan, resumed, overwrite } = self;
        let mut vram = VramReport::new(plan.settings.logging.vram_report.as_deref());
        vram.note::<B>(&device, 0, "start")?;

        if resumed.is_none() {
            folder::check_free(&plan, overwrite)?;
        }
        // The lock ends with the run.
        let _lock = folder::lock(&plan.output_dir)?;
        let ready = Ready::new(plan, precision)?;
        match &resumed {
            None => folder::check_free(&ready.plan, overwrite)?,
            Some(resumed) => {
                let (plan, state) = (&ready.plan, &resumed.state);
                folder::check_unchanged(plan, state, &ready.inputs.sha256, precision)?;
                if state.global_step == state.max_steps && outputs_exist(plan) {
                    report::line(format!("{} is complete at step {}", plan.output_dir.display(), state.global_step));
                    return Ok(());
                }
                report::label("resume", format!("{} · step {}", resumed.folder.display(), state.global_step));
            }
        }
        let model = ready.model::<B>(resumed.as_ref(), &device)?;
        vram.note::<B>(&device, 0, "model_loaded")?;

        match &resumed {
            None => folder::create(&ready.plan, &ready.inputs)?,
            Some(resumed) => folder::reopen(&ready.plan.output_dir, resumed.state.global_step)?,
        }
        let optimizer = ready.optimizer(resumed.as_ref(), &model)?;
        header::print(&ready.plan, &ready.inputs, ready.spec.scaling);
        report::label("products", B::tiers(&device).join(" · "));

        let samples = Samples::of(&ready.plan, &ready.inputs)?;
        let before = if resumed.is_none() { Some(Before::of(&model, &samples, ready.spec)?) } else { None };
        let state = ready.state(resumed.as_ref(), &model);
        let order = Order { start: state.global_step, ..ready.inputs.order(&ready.plan) };
        let codes = before.as_ref().map(|before| before.codes.clone());
        let journal = Journal::new(&ready.plan, &ready.inputs, samples.clone(), order.clone(), state.clone(), codes);
        let started = Instant::now();
        let model = ready.train(model, optimizer, &state, order, journal.clone(), vram)?;
        let runtime = started.elapsed().as_secs_f64();
        // The export is checked in the memory that the optimizer's states and the step's buffers had.
        B::memory_cleanup(&device);

        let changed = before.map(|before| before.compare(&model, &samples)).transpose()?.flatten();
        let exported = ready.export(&model, state.head)?;
        // The record of a complete run comes last: a resume of a run without it finishes the export.
        journal.finish(runtime, changed)?;
        ready.conclude(exported.as_deref(), runtime, samples.prompts.first());
        Ok(())
    }
}

/// A plan with its inputs, on a device that computes in `spec.precision`.
struct Ready {
    plan: Plan,
    inputs: Inputs,
    spec: LinearSpec,
    master: MasterKind,
}

impl Ready {
    /// Reads the inputs, and refuses what needs more memory than the limit or other scale levels.
    fn new(plan: Plan, precision: Precision) -> Result<Self, CliError> {
        let inputs = Inputs::read(&plan)?;
        let estimate = Estimate::of(&inputs.config, &plan, precision);
        if let Some(limit) = plan.memory_limit.filter(|limit| estimate.peak() > *limit) {
            estimate.table().iter().for_each(report::line);
            return Err(CliError::Memory { needed: estimate.peak(), limit, saved: None });
        }
        let (scaling, master) = (inputs.scaling(&plan), plan.master(precision));
        let keeps_codes = plan.settings.recipe.damped_finish > 0.0 || master == MasterKind::Nvfp4;
        if scaling == Scaling::Single && keeps_codes {
            let text = "--damped-finish and --master-weights nvfp4 keep NVFP4 codes with two-level scales, but the scale \
                        levels of this run are single; give --scales two";
            return Err(CliError::Usage(text.into()));
        }
        let spec = LinearSpec::new(plan.recipe, scaling, precision);
        Ok(Self { plan, inputs, spec, master })
    }

    /// The model with the weights of the checkpoint, of its files, or random ones.
    fn model<B: Nvfp4Kernels>(
        &self,
        resumed: Option<&Resumed>,
        device: &B::Device,
    ) -> Result<Qwen3<Autodiff<B>>, CliError> {
        let (config, spec, master) = (&self.inputs.config, self.spec, self.master);
        let model: Qwen3<B> = match (resumed, &self.inputs.source) {
            (Some(resumed), _) => resumed.model(config, spec, master, device)?,
            (None, Some(source)) => weights::load(source, config, spec, Purpose::Train(master), device)?,
            (None, None) => weights::random(config, spec, master, self.plan.settings.advanced.seed, device)?,
        };
        let model = weights::trained(model, master);
        let model = trained::last_blocks(model, self.plan.settings.model.train_last_layers);
        Ok(model.with_bf16_last_blocks(self.plan.settings.recipe.bf16_last_blocks))
    }

    /// The optimizer, with its states after a resume.
    fn optimizer<B: Nvfp4Kernels>(
        &self,
        resumed: Option<&Resumed>,
        model: &Qwen3<Autodiff<B>>,
    ) -> Result<ChunkedAdamw<B>, CliError> {
        let (s, advanced) = (&self.plan.settings.optimizer, &self.plan.settings.advanced);
        let config = AdamwConfig {
            beta1: s.adam_beta1,
            beta2: s.adam_beta2,
            eps: s.adam_epsilon,
            weight_decay: s.weight_decay,
            state: self.plan.settings.memory.optimizer_state_mode,
            master: self.master,
            chunk_rows: advanced.step_chunk_rows,
            seed: advanced.seed,
            float: self.spec.precision.dtype(),
        };
        let model = model.valid();
        let mut optimizer = ChunkedAdamw::new(config, trained::undecayed(&model));
        if let Some(resumed) = resumed {
            resumed.optimizer(&model, &mut optimizer)?;
        }
        Ok(optimizer)
    }

    /// The state of the run before its next step.
    fn state<B: Nvfp4Kernels>(&self, resumed: Option<&Resumed>, model: &Qwen3<Autodiff<B>>) -> TrainerState {
        let (steps, head) = (self.inputs.order(&self.plan).steps, Head::of(model));
        let new = TrainerState::new(self.plan.settings.clone(), steps, &self.inputs.sha256, self.spec, head);
        match resumed {
            None => new,
            Some(resumed) => new.after(&resumed.state),
        }
    }

    /// Trains from the step after `state` to the last.
    fn train<B: Nvfp4Kernels + DeviceServices>(
        &self,
        model: Qwen3<Autodiff<B>>,
        optimizer: ChunkedAdamw<B>,
        state: &TrainerState,
        order: Order,
        journal: Journal,
        vram: VramReport,
    ) -> Result<Qwen3<B>, CliError> {
        let (s, steps) = (&self.plan.settings, order.steps);
        if state.global_step >= steps {
            report::line(format!("step {} of {steps}: nothing is left to train", state.global_step));
            return Ok(model.valid());
        }
        let warmup = s.optimizer.warmup_steps;
        let warmup = if warmup < 1.0 { (warmup * steps as f64).round() } else { warmup } as usize;
        // After rounding, at least the last step is quantized, and no block freezes before.
        let quantize_from = ((s.recipe.quantize_from * steps as f64).round() as usize).min(steps.saturating_sub(1));
        let mut damped = DampedFinish::new(s.recipe.damped_finish, steps);
        damped.start = damped.start.max(quantize_from);
        let fixed = match s.model.train_last_layers {
            0 => 0,
            last => model.layers.len() - last,
        };
        let run = Run {
            train: order,
            eval: self.inputs.eval_order(&self.plan),
            stepper: Stepper {
                mode: s.memory.step_mode,
                clipping: Clipping {
                    clip: self.plan.clip,
                    max_norm: s.optimizer.max_grad_norm,
                    last_norm: state.last_norm,
                },
                buffer: if self.master == MasterKind::F32 { DType::F32 } else { self.spec.precision.dtype() },
                optimizer,
                seed: s.advanced.seed,
                accumulation: s.optimizer.gradient_accumulation_steps,
            },
            schedule: Schedule {
                peak: s.optimizer.learning_rate,
                warmup: warmup.min(steps),
                total: steps,
                decay: s.optimizer.lr_scheduler_type,
            },
            recipe: self.plan.recipe,
            quantize_from,
            damped,
            memory_limit: self.plan.memory_limit,
            logging_steps: s.logging.logging_steps,
            vram,
            interruption: Interruption::listen().map_err(CliError::io(Path::new("signals")))?,
            between: Box::new(journal),
        };
        learner::run(Trainee::new(model, s.advanced.loss, fixed), run)
    }

    /// Exports the trained model to `final/`, and to `--output-dat` if it is set. Returns the folder, or `None` if nothing
    /// is saved.
    fn export<B: Nvfp4Kernels>(&self, model: &Qwen3<B>, head: Head) -> Result<Option<PathBuf>, CliError> {
        let (plan, text) = (&self.plan, &self.inputs.text);
        if plan.settings.saving.save_strategy == SaveStrategy::No {
            return Ok(None);
        }
        let dense_from = model.layers.len().saturating_sub(plan.settings.recipe.bf16_last_blocks);
        let (scaling, recipe) = (self.spec.scaling, plan.recipe);
        let format = export::ExportFormat { scaling, head: head == Head::Nvfp4, recipe, dense_from };
        let like = self.original();
        let exported =
            export::model_to_folder(model, text, &plan.companions, format, like, &plan.output_dir.join(FINAL))?;
        report::label("export", exported.display().to_string());
        if let Some(extra) = &plan.settings.saving.output_dat {
            export::model_to_dat(model, text, format, like, extra)?;
        }
        Ok(Some(exported))
    }

    /// Says that the run is done, and what to do with its export.
    fn conclude(&self, exported: Option<&Path>, runtime: f64, prompt: Option<&String>) {
        let done = report::duration(runtime);
        match exported {
            Some(exported) => {
                report::line(format!("done in {done} · {}", self.plan.output_dir.display()));
                next_steps(self.plan.recipe, exported, prompt);
            }
            None => report::line(format!("done in {done} · nothing was saved, because of --save-strategy no")),
        }
    }

    /// The model's own file if its layout serves for the export: a .dat file with NVFP4 weights, quantized in the blocks
    /// that the run quantizes in.
    fn original(&self) -> Option<&Container> {
        let s = &self.plan.settings.recipe;
        let same_blocks = s.bf16_last_blocks == 0 && self.spec.weights().block == Block::Row;
        let serves = |file: &&Container| file.dat().is_some() && packed_scaling(file).is_some();
        self.inputs.source.as_ref().filter(serves).filter(|_| s.scales.is_none() && same_blocks)
    }
}

/// Whether a run has its record and everything that it was to export.
fn outputs_exist(plan: &Plan) -> bool {
    let saving = &plan.settings.saving;
    let exported = saving.save_strategy == SaveStrategy::No
        || plan.output_dir.join(FINAL).join(durable::MANIFEST).exists()
            && saving.output_dat.as_ref().is_none_or(|file| file.exists());
    exported && plan.output_dir.join("train_results.json").exists()
}

/// Answers and NVFP4 codes of a model before its first step.
struct Before {
    answers: Vec<String>,
    codes: Arc<Codes>,
}

impl Before {
    fn of<B: Nvfp4Kernels>(model: &Qwen3<Autodiff<B>>, samples: &Samples, spec: LinearSpec) -> Result<Self, CliError> {
        let model = model.valid();
        Ok(Self { answers: samples.answers(&model)?, codes: Arc::new(Codes::of(&model, spec)?) })
    }

    /// Prints the answers before and after training. Returns the share of NVFP4 codes that changed, if there are any.
    fn compare<B: Nvfp4Kernels>(&self, model: &Qwen3<B>, samples: &Samples) -> Result<Option<f64>, CliError> {
        for ((prompt, before), after) in samples.prompts.iter().zip(&self.answers).zip(samples.answers(model)?) {
            report::label("before", format!("{} → {}", beginning(prompt), beginning(before)));
            report::label("after", format!("{} → {}", beginning(prompt), beginning(&after)));
        }
        let changed = self.codes.changed_in(model)?;
        if let Some(share) = changed {
            report::label("nvfp4", format!("{:.1}% of codes changed", share * 100.0));
        }
        Ok(changed)
    }
}

fn next_steps(recipe: Recipe, exported: &Path, prompt: Option<&String>) {
    let prompt = report::quoted(prompt.map_or("hello", |p| p));
    let folder = report::quoted(&exported.display().to_string());
    let mode = if recipe.packs_activations() { " --w4a4" } else { "" };
    report::line("next:");
    report::line(format!("  train-cli generate -m {folder} -p {prompt}{mode}"));
    report::line(format!("  train-cli inspect {folder} --verify"));
    report::line("  train-cli fit -m <your Qwen3 folder> -d <your.jsonl> --dry-run");
}
