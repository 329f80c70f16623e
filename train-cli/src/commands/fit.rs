//! `fit`: trains a model and exports it. The page to read first: prepare the inputs, load or resume the model, open the
//! run folder, train, then show and export the result.

use crate::{
    CliError,
    args::FitArgs,
    commands::{demo, export},
    data::order::Order,
    device::{self, Job},
    durable::{self, FileRecord},
    interrupt::Interruption,
    memory::vram::VramReport,
    plan::Plan,
    progress::Reading,
    report,
    run::beginning::Beginning,
    run::checkpoint::{self, CONFIG, FINAL, Head, Resume, Resumed, TrainerState},
    run::evaluations::Evaluations,
    run::export_format::ExportFormat,
    run::folder,
    run::header,
    run::inputs::Inputs,
    run::journal::Journal,
    run::located::located,
    run::preflight::{self, Forecast, Undo},
    run::received,
    run::sample_answers::Samples,
    run::saving::Saver,
    run::summary,
    run::trained,
    settings::{DeviceChoice, Layer, SaveStrategy},
    train::chunked_adamw::{AdamwConfig, ChunkedAdamw},
    train::clip::Clipping,
    train::damp::DampedFinish,
    train::guard::{self, Back, Guard},
    train::learner,
    train::objective::Trainee,
    train::parameters,
    train::schedule::Schedule,
    train::step::Stepper,
    train::training_loop::Run,
};
use backend_nvfp4::{BlockShape, DeviceServices, LinearSpec, MasterKind, Nvfp4Kernels, Precision, Scaling};
use burn::{backend::Autodiff, module::AutodiffModule, tensor::DType};
use model_qwen3::{
    container::Container,
    model::Qwen3,
    weights::{self, Purpose},
};
use serde::Deserialize;
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// What a user can do whose device has not enough memory.
const REMEDY: &str = "use a smaller --max-seq-length or --batch-size, --optimizer-state-mode int4, or --master-weights \
                      nvfp4. Checkpoints that were saved are intact";

/// Runs the command.
///
/// # Errors
/// Every error of a run, with its exit code.
pub fn run(args: &FitArgs) -> Result<(), CliError> {
    if args.launch.demo {
        demo::unpack()?;
    }
    // No other process may change a run while its checkpoint is read.
    let lock = match &args.launch.resume_from_checkpoint {
        Some(from) => {
            checkpoint::resumed_run(from, typed_folder(args))?.map(|run| folder::Lock::of(&run)).transpose()?
        }
        None => None,
    };
    let (plan, resumed, restarts) = planned(args)?;
    // Nobody has named the run folder, and its name may be taken by the time the run begins.
    let named =
        args.typed.get("output_dir").is_some() || !args.launch.demo && plan.settings.saving.output_dir.is_some();
    let unnamed = !named && resumed.is_none() && !restarts;
    let overwrite = args.launch.overwrite || restarts;
    if !args.launch.dry_run {
        report::line(format!("train-cli {} · fit", env!("CARGO_PKG_VERSION")));
    }
    let (device, precision) = (device::resolved(plan.settings.recipe.device), plan.settings.recipe.compute_dtype);
    let names_output = args.launch.config.is_some() || args.typed.get("output_dat").is_some();
    let is_received = (resumed.is_some() || restarts) && !names_output;
    let dry_run = args.launch.dry_run;
    let fit = Fit { plan, device, lock, resumed, restarts, unnamed, is_received, overwrite, dry_run };
    device::run(device, precision, fit)
}

/// The run folder that was typed.
fn typed_folder(args: &FitArgs) -> Option<&Path> {
    args.typed.get("output_dir").and_then(|dir| dir.as_str()).map(Path::new)
}

/// The plan of a command line, the checkpoint that it resumes from, and whether it restarts a run that has no checkpoint
/// yet. Typed settings win over those of the config file, of the checkpoint or of the demo, and these over defaults.
pub(crate) fn planned(args: &FitArgs) -> Result<(Plan, Option<Resumed>, bool), CliError> {
    let launch = &args.launch;
    let resume = match &launch.resume_from_checkpoint {
        Some(from) => checkpoint::resume(from, typed_folder(args))?,
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
        if launch.config.is_none() {
            received::check_memory_report(&settings, &args.typed, run)?;
        }
    }
    if let Some(run) = &restarted {
        report::line(format!("{} has no checkpoint yet: the run starts at its first step", run.display()));
    }
    // The settings that are recorded name the model itself, not the run that it was found in.
    if let Some(model) = &mut settings.model.model {
        *model = located(model)?.weights;
    }
    Ok((Plan::new(settings)?, resumed, restarted.is_some()))
}

struct Fit {
    plan: Plan,
    device: DeviceChoice,
    /// Keeps the folder of a run that is resumed to this process.
    lock: Option<folder::Lock>,
    resumed: Option<Resumed>,
    /// Whether a run that ended before its first checkpoint begins again.
    restarts: bool,
    /// Whether the program chooses the name of the run folder.
    unnamed: bool,
    /// Whether only the record of a run names the file of `--output-dat`.
    is_received: bool,
    overwrite: bool,
    dry_run: bool,
}

impl Job for Fit {
    type Output = ();

    fn remedy(&self) -> &'static str {
        REMEDY
    }

    fn run<B: Nvfp4Kernels + DeviceServices>(self, device: B::Device, precision: Precision) -> Result<(), CliError> {
        let Self { plan, device: choice, lock, resumed, restarts, unnamed, is_received, overwrite, dry_run } = self;
        if resumed.is_none() && !unnamed {
            folder::check_free(&plan, overwrite)?;
        }
        // The lock ends with the run.
        let (plan, mut lock) = match (lock, unnamed, dry_run) {
            (Some(lock), ..) => (plan, Some(lock)),
            (None, true, true) => (plan, None),
            (None, true, false) => {
                let (lock, folder) = folder::Lock::of_new(&plan.output_dir)?;
                (plan.in_folder(folder), Some(lock))
            }
            (None, false, _) => {
                let lock = folder::Lock::of(&plan.output_dir)?;
                (plan, Some(lock))
            }
        };
        let ready = Ready::new(plan, choice, precision, resumed.as_ref())?;
        match &resumed {
            None if dry_run && unnamed => {}
            None => {
                folder::check_free(&ready.plan, overwrite)?;
                if restarts {
                    folder::check_not_begun(&ready.plan.output_dir)?;
                }
            }
            Some(resumed) => {
                let (plan, state) = (&ready.plan, &resumed.state);
                folder::check_unchanged(plan, &ready.inputs, state, precision)?;
                if is_complete(plan, state, ready.inputs.order(plan).steps)? {
                    if !dry_run {
                        summarize(&plan.output_dir);
                    }
                    report::line(format!("{} is complete at step {}", plan.output_dir.display(), state.global_step));
                    return Ok(());
                }
                report::label("resume", format!("{} · step {}", resumed.folder.display(), state.global_step));
            }
        }
        header::print(&ready.plan, &ready.inputs, ready.spec.scaling, precision);
        ready.forecast.lines().into_iter().for_each(|(label, line)| report::label(label, line));
        report::label("products", B::tiers(&device).join(" · "));
        if dry_run {
            report::result(ready.plan.settings.toml()?);
            return Ok(());
        }
        lock.iter_mut().for_each(folder::Lock::begins);
        match resumed {
            None => folder::create(&ready.plan, &ready.inputs)?,
            Some(_) => folder::record_settings(&ready.plan)?,
        }
        if let Some(file) = ready.plan.settings.saving.output_dat.as_ref().filter(|_| is_received) {
            received::set_aside(file, &ready.plan.output_dir)?;
        }
        // From here to the end of the export, a first signal ends the run where it can be resumed.
        let signals = Arc::new(Interruption::listen().map_err(CliError::io(Path::new("signals")))?);
        let trained = ready.guarded::<B>(resumed, &signals, &device);
        let ended = trained.and_then(|trained| ready.finish::<B>(trained, &signals, &device));
        // However the run has ended, its folder says so.
        summarize(&ready.plan.output_dir);
        ended
    }
}

/// What watches the steps of a run: for bad ones, for signals, and for the memory that they take.
struct Watchers {
    guard: Guard,
    interruption: Arc<Interruption>,
    vram: VramReport,
}

/// What a run has when its last step is made.
struct Outcome<B: Nvfp4Kernels> {
    model: Qwen3<B>,
    beginning: Option<Beginning>,
    samples: Samples,
    journal: Journal,
    head: Head,
}

/// A plan with its inputs, on a device that computes in `spec.precision`.
struct Ready {
    plan: Plan,
    inputs: Inputs,
    forecast: Forecast,
    spec: LinearSpec,
    master: MasterKind,
}

impl Ready {
    /// Reads the inputs, and refuses what needs more memory or disk than there is, or other scale levels.
    fn new(
        plan: Plan,
        device: DeviceChoice,
        precision: Precision,
        resumed: Option<&Resumed>,
    ) -> Result<Self, CliError> {
        let inputs = Inputs::read(&plan)?;
        let (scaling, master) = (scaling(&plan, resumed), plan.master(precision));
        preflight::check_settings(&plan, &inputs, scaling, master)?;
        let forecast = Forecast::of(&plan, &inputs, device, precision);
        forecast.check(&plan, &inputs).inspect_err(|error| {
            if error.exit_code() == 4 {
                forecast.estimate.table().iter().for_each(report::line);
            }
        })?;
        let shares_scale = plan.settings.recipe.share_scales;
        let spec = LinearSpec { shares_scale, ..LinearSpec::new(plan.recipe, scaling, precision) };
        Ok(Self { plan, inputs, forecast, spec, master })
    }

    /// Trains to the last step. Where the guard finds that a bad step has changed weights, the run goes back.
    fn guarded<B: Nvfp4Kernels + DeviceServices>(
        &self,
        mut from: Option<Resumed>,
        signals: &Arc<Interruption>,
        device: &B::Device,
    ) -> Result<Outcome<B>, CliError> {
        let record = from.as_ref().map(|resumed| resumed.state.guard.clone()).unwrap_or_default();
        let guard = Guard::new(self.plan.settings.advanced.guard, record);
        loop {
            let error = match self.attempt(from.as_ref(), &guard, signals, device) {
                Ok(trained) => return Ok(trained),
                Err(error) => error,
            };
            // What a device computed that has failed says nothing about a step.
            let Some(back) = guard.back().filter(|_| !error.is_of_the_device()) else {
                let left_out = guard.record().left_out.len();
                if left_out > 0 {
                    let steps = report::count(left_out, "step");
                    report::line(format!("{steps} were left out before the run ended; metrics.jsonl lists them"));
                }
                return Err(error);
            };
            let run = &self.plan.output_dir;
            from = match back {
                Back::Newest { .. } => checkpoint::newest(run, usize::MAX)?,
                Back::Older { bad } => checkpoint::newest(run, bad.saturating_sub(guard::FAR))?,
            };
            let to = from.as_ref().map_or(0, |resumed| resumed.state.global_step);
            let place = if to == 0 { "its beginning".to_owned() } else { format!("checkpoint-{to}") };
            match back {
                Back::Newest { bad } => report::line(format!(
                    "warning: step {bad} changed weights before its gradient was found to be not finite: the run goes back \
                     to {place} and leaves it out"
                )),
                Back::Older { bad } => {
                    guard.leave_out(to + 1..=bad, &format!("the run went back from step {bad} to {place}"));
                    report::line(format!(
                        "warning: too many steps were not finite, up to step {bad}: the run goes back to {place} and leaves \
                         out all steps between"
                    ));
                }
            }
        }
    }

    /// Loads the model of a checkpoint, or that of the run's beginning, and trains it to the last step.
    fn attempt<B: Nvfp4Kernels + DeviceServices>(
        &self,
        from: Option<&Resumed>,
        guard: &Guard,
        interruption: &Arc<Interruption>,
        device: &B::Device,
    ) -> Result<Outcome<B>, CliError> {
        let (plan, inputs) = (&self.plan, &self.inputs);
        let mut vram = VramReport::new(plan.settings.logging.vram_report.as_deref());
        vram.note::<B>(device, 0, "start")?;
        let model = self.model::<B>(from, device)?;
        vram.note::<B>(device, 0, "model_loaded")?;
        folder::reopen(&plan.output_dir, from.map_or(0, |resumed| resumed.state.global_step))?;
        let optimizer = self.optimizer(from, &model)?;
        // The memory of a device with a pool is planned for training. The host has some to spare.
        let packs = B::memory_in_use(device).is_none();
        let samples = Samples::of(plan, inputs, packs)?;
        let beginning = match from {
            None => Some(Beginning::record(&plan.output_dir, &model.valid(), &samples, self.spec)?),
            Some(_) => Beginning::read(&plan.output_dir, self.spec),
        };
        let state = self.state(from, &model);
        let order = Order { start: state.global_step, ..inputs.order(plan) };
        let codes = beginning.as_ref().map(|beginning| beginning.codes.clone());
        let (guard, interruption) = (guard.clone(), interruption.clone());
        let bytes = self.forecast.estimate.checkpoint();
        let saver = Saver::new(&plan.output_dir, &plan.companions, bytes, self.forecast.saving);
        let journal =
            Journal::new(plan, inputs, samples.clone(), order.clone(), state.clone(), guard.clone(), codes, saver)?;
        let watchers = Watchers { guard, interruption, vram };
        let trained = self.train(model, optimizer, &state, order, journal.clone(), watchers);
        // A checkpoint may still be being written, however the training ended. It waits on a device that may have failed.
        if trained.as_ref().is_err_and(CliError::is_of_the_device) {
            journal.abandon_checkpoint();
        }
        match (trained, journal.wait_for_checkpoint()) {
            (Ok(model), Ok(_)) => Ok(Outcome { model, beginning, samples, journal, head: state.head }),
            (Ok(_), Err(error)) | (Err(error), Ok(_)) => Err(error),
            // Training and writing share the device, which reports a failed launch once, to either of them.
            (Err(_), Err(unsaved)) if unsaved.is_of_the_device() => Err(unsaved),
            (Err(error), Err(unsaved)) => {
                report::line(format!("warning: the last checkpoint could not be written: {unsaved}"));
                Err(error)
            }
        }
    }

    /// Compares, exports and records a trained model.
    fn finish<B: Nvfp4Kernels + DeviceServices>(
        &self,
        trained: Outcome<B>,
        signals: &Interruption,
        device: &B::Device,
    ) -> Result<(), CliError> {
        let Outcome { model, beginning, samples, journal, head } = trained;
        let (runtime, last) = (journal.seconds(), self.inputs.order(&self.plan).steps);
        let made = journal.made();
        if made < last {
            report::line(format!(
                "the evaluation loss has stopped falling: the run ends after step {made} of {last}. To go on, resume it with a \
                 larger --early-stopping-patience"
            ));
        }
        let go_on = || self.unless_interrupted(signals, made);
        go_on()?;
        let (model, step) = self.best_or_last(model, made, &journal, device)?;
        // The export is checked in the memory that the optimizer's states and the step's buffers had.
        B::memory_cleanup(device);
        let changed = beginning.map(|beginning| beginning.compare(&model, &samples)).transpose()?.flatten();
        let exported = self.export(&model, head, &go_on)?;
        let step = exported.as_ref().map(|_| step);
        let (folder, extra) = exported.unzip();
        // The record of a complete run comes last: a resume of a run without it finishes the export.
        journal.finish(step, runtime, changed, extra.flatten().as_ref())?;
        self.conclude(folder.as_deref(), runtime, samples.prompts.first());
        Ok(())
    }

    /// Ends a run whose steps are made, if a signal asks for it. Its last checkpoint is complete, and a resumed run makes what is
    /// missing.
    fn unless_interrupted(&self, signals: &Interruption, step: usize) -> Result<(), CliError> {
        let Some(signal) = signals.received() else { return Ok(()) };
        let saved = checkpoint::list(&self.plan.output_dir)?.into_iter().next().map(|(_, folder)| folder);
        Err(CliError::Interrupted { signal, step, saved })
    }

    /// The model to export, and its step: that of the best checkpoint if it is wanted, else the last one.
    fn best_or_last<B: Nvfp4Kernels>(
        &self,
        last: Qwen3<B>,
        made: usize,
        journal: &Journal,
        device: &B::Device,
    ) -> Result<(Qwen3<B>, usize), CliError> {
        let run = &self.plan.output_dir;
        let mut kept = checkpoint::list(run)?;
        loop {
            let is_kept = |step| step == made || kept.iter().any(|(saved, _)| *saved == step);
            let Some((step, loss, is_lowest)) = journal.best(is_kept) else { return Ok((last, made)) };
            let which = if is_lowest { "of the run" } else { "of the checkpoints that are kept" };
            let state = match kept.iter().find(|(saved, _)| *saved == step && step != made) {
                None => Ok(None),
                Some((_, folder)) => checkpoint::open(folder).map(|state| Some((folder.clone(), state))),
            };
            match state {
                Err(error) => {
                    report::line(format!(
                        "warning: checkpoint-{step} has the lowest evaluation loss, but is broken: {error}"
                    ));
                    kept.retain(|(saved, _)| *saved != step);
                    continue;
                }
                Ok(best) => {
                    report::label("best", format!("step {step} · evaluation loss {loss:.4}, the lowest {which}"));
                    let Some((folder, state)) = best else { return Ok((last, made)) };
                    drop(last);
                    let best = Resumed { run: run.clone(), state, folder };
                    return Ok((self.model::<B>(Some(&best), device)?.valid(), step));
                }
            }
        }
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
            (None, Some(source)) => {
                weights::load(&Reading::of(source, "loading"), config, spec, Purpose::Train(master), device)?
            }
            (None, None) => weights::random(config, spec, master, self.plan.settings.advanced.seed, device)?,
        };
        let model = weights::trained(model, master);
        let model = parameters::last_blocks(model, self.plan.settings.model.train_last_layers);
        Ok(model.with_bf16_last_blocks(self.plan.settings.bf16_last_blocks(config.num_hidden_layers)))
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
        let mut optimizer = ChunkedAdamw::new(config, parameters::undecayed(&model));
        if let Some(resumed) = resumed {
            resumed.optimizer(&model, &mut optimizer)?;
        }
        Ok(optimizer)
    }

    /// The state of the run before its next step.
    fn state<B: Nvfp4Kernels>(&self, resumed: Option<&Resumed>, model: &Qwen3<Autodiff<B>>) -> TrainerState {
        let (steps, head) = (self.inputs.order(&self.plan).steps, Head::of(model));
        let mut new = TrainerState::new(self.plan.settings.clone(), steps, &self.inputs.sha256, self.spec, head);
        new.thinking = self.inputs.thinking;
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
        watchers: Watchers,
    ) -> Result<Qwen3<B>, CliError> {
        let (s, steps) = (&self.plan.settings, order.steps);
        if state.global_step >= steps {
            // But an evaluation may be missing, if a signal came in the last step.
            report::line(format!("step {} of {steps}: nothing is left to train", state.global_step));
        }
        let warmup = s.optimizer.warmup_steps;
        let warmup = if warmup < 1.0 { (warmup * steps as f64).round() } else { warmup } as usize;
        // No block freezes before the recipe begins.
        let quantize_from = self.plan.quantize_from(steps);
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
                undo: matches!(self.forecast.undo, Undo::Copy { .. }),
                gathers: self.forecast.gathers == Some(true),
                kept: self.forecast.kept,
                pool: self.forecast.pool(),
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
            guard: watchers.guard,
            memory_limit: self.plan.memory_limit,
            logging_steps: s.logging.logging_steps,
            vram: watchers.vram,
            interruption: watchers.interruption,
            between: Box::new(journal),
        };
        learner::run(Trainee::new(model, s.advanced.loss, fixed), run)
    }

    /// Exports the trained model to `final/`, and to `--output-dat` if it is set. Returns the folder, and the size and digest
    /// of the file; `None` if nothing is saved.
    fn export<B: Nvfp4Kernels>(
        &self,
        model: &Qwen3<B>,
        head: Head,
        go_on: &dyn Fn() -> Result<(), CliError>,
    ) -> Result<Option<(PathBuf, Option<FileRecord>)>, CliError> {
        let (plan, text) = (&self.plan, &self.inputs.text);
        if plan.settings.saving.save_strategy == SaveStrategy::No {
            return Ok(None);
        }
        let layers = model.layers.len();
        let dense_from = layers.saturating_sub(plan.settings.bf16_last_blocks(layers));
        let (scaling, recipe) = (self.spec.scaling, plan.recipe);
        let shares_scale = self.spec.shares_scale;
        let format = ExportFormat { scaling, head: head.into(), recipe, dense_from, shares_scale };
        let format = format.with_head(plan.settings.saving.head);
        let template = text.template_sha256.clone();
        let trained = trained::Trained::by(&plan.settings, layers, scaling, template, self.inputs.thinking);
        let form = export::Form { format, like: self.original(), trained: &trained };
        let exported = export::model_to_folder(model, text, &plan.companions, &form, &plan.output_dir.join(FINAL))?;
        report::label("export", exported.display().to_string());
        go_on()?;
        let extra = plan.settings.saving.output_dat.as_ref();
        let extra = extra.map(|file| export::model_to_dat(model, text, &form, file)).transpose()?;
        Ok(Some((exported, extra)))
    }

    /// Says that the run is done, and what to do with its export.
    fn conclude(&self, exported: Option<&Path>, runtime: f64, prompt: Option<&String>) {
        let done = report::duration(runtime);
        match exported {
            Some(exported) => {
                report::line(format!("done in {done} · {}", self.plan.output_dir.display()));
                next_steps(exported, prompt);
            }
            None => report::line(format!("done in {done} · nothing was saved, because of --save-strategy no")),
        }
    }

    /// The model's own file if its layout serves for the export: a .dat file with NVFP4 weights and the scale levels of the
    /// run, if the run quantizes every transformer block, with 1x16 scales and a tensor scale for each matrix.
    fn original(&self) -> Option<&Container> {
        let (s, spec) = (&self.plan.settings, self.spec);
        let dense = s.bf16_last_blocks(self.inputs.config.num_hidden_layers);
        let same_blocks = dense == 0 && spec.weights().block == BlockShape::Row;
        let same_scales = self.inputs.stored_scaling() == Some(spec.scaling) && !spec.shares_scale;
        let serves = same_blocks && same_scales && s.saving.head.is_none();
        self.inputs.source.as_ref().filter(|file| serves && file.dat().is_some())
    }
}

/// The scale levels of a run's NVFP4 weights. A resumed run keeps its own: older versions took those of the model file.
pub(crate) fn scaling(plan: &Plan, resumed: Option<&Resumed>) -> Scaling {
    let default = resumed.map_or(Scaling::Two, |resumed| resumed.state.scaling());
    plan.settings.recipe.scales.unwrap_or(default)
}

/// Writes the summary of a run. The run is what it is without one.
fn summarize(run: &Path) {
    if let Err(error) = summary::write(run) {
        report::line(format!("warning: the summary of the run could not be written: {error}"));
    }
}

/// Whether a run whose newest checkpoint has this state has made its `steps` steps, or ended early, and has its record and
/// everything that it was to export, undamaged.
fn is_complete(plan: &Plan, state: &TrainerState, steps: usize) -> Result<bool, CliError> {
    let (saving, run) = (&plan.settings.saving, &plan.output_dir);
    let Some(results) = folder::results(run)? else { return Ok(false) };
    let evaluations = Evaluations::logged(run, plan.quantize_from(steps))?;
    let patience = plan.settings.logging.early_stopping_patience;
    let stalled = patience.is_some_and(|patience| evaluations.have_stalled(patience));
    let done = state.max_steps == steps && (state.global_step == steps || stalled);
    let made = results["global_step"] == state.global_step;
    // Which step is exported is a setting that a resumed run may change. Older records do not say.
    let kept = checkpoint::list(run)?;
    let best = evaluations.best_of(|step| kept.iter().any(|(saved, _)| *saved == step));
    let wanted = best.filter(|_| saving.load_best_model_at_end).map_or(state.global_step, |(step, _)| step);
    let is_wanted = results.get("exported_step").is_none_or(|step| step.is_null() || *step == wanted);
    let exported = saving.save_strategy == SaveStrategy::No
        || durable::verify_listed(&plan.output_dir.join(FINAL), |_| true).is_ok()
            && saving.output_dat.as_ref().is_none_or(|file| is_recorded(file, &results["output_dat"]));
    Ok(done && made && is_wanted && exported)
}

/// Whether a file is there as the record of a run describes it.
fn is_recorded(file: &Path, record: &serde_json::Value) -> bool {
    let expected = FileRecord::deserialize(record);
    FileRecord::of(file).is_ok_and(|found| expected.is_ok_and(|expected| expected == found))
}

fn next_steps(exported: &Path, prompt: Option<&String>) {
    let prompt = report::quoted(prompt.map_or("hello", |p| p));
    let folder = report::quoted(&exported.display().to_string());
    report::line("next:");
    report::line(format!("  train-cli generate -m {folder} -p {prompt}"));
    report::line(format!("  train-cli chat -m {folder}"));
    report::line(format!("  train-cli inspect {folder} --verify"));
    report::line("  train-cli fit -m <your Qwen3 folder> -d <your.jsonl> --dry-run");
}
