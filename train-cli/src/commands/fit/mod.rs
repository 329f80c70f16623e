//! `fit`: trains a model and exports it. The page to read first: a command line becomes a plan, and a run folder is opened for
//! it. The other pages, in the order of a run:
//!
//! | file | what it does |
//! |---|---|
//! | `ready.rs` | reads and checks the inputs; makes model, optimizer and state |
//! | `first_steps.rs` | makes the first steps on a device that only records kernels, so that they are compiled ahead |
//! | `attempts.rs` | trains to the last step, from a checkpoint again after a bad step |
//! | `ending.rs` | compares, exports and records the trained model |

mod attempts;
mod ending;
mod first_steps;
mod ready;

use crate::{
    CliError,
    ahead::Ahead,
    args::FitArgs,
    commands::demo,
    device::{self, Job},
    durable,
    interrupt::{Interruption, SaveRequests},
    outputs::{check_free, check_output_folder},
    plan::Plan,
    report,
    run::checkpoint::CONFIG,
    run::folder,
    run::header,
    run::history,
    run::located::located,
    run::recorded_outputs,
    run::resume::{self, Resume, Resumed},
    run::summary,
    run::tensorboard,
    settings::{DeviceChoice, Layer, ReportTo},
    watchdog,
};
use backend_nvfp4::{DeviceServices, Master, Nvfp4Kernels, Precision};
use ending::{check_length, completed, is_complete, reason};
pub use first_steps::FirstSteps;
use model_qwen3::file;
pub use ready::Ready;
pub(crate) use ready::scaling;
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
            resume::resumed_run(from, named_folder(args)?.as_deref())?.map(|run| folder::Lock::of(&run)).transpose()?
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
    let is_recorded = (resumed.is_some() || restarts) && !names_output;
    let dry_run = args.launch.dry_run;
    let fit = Fit { args, plan, device, lock, resumed, restarts, unnamed, is_recorded, overwrite, dry_run };
    device::run(device, precision, fit)?;
    if args.launch.demo && !dry_run {
        report::line("then train a model of your own:");
        report::command("train-cli fit -m <your Qwen3 folder> -d <your.jsonl> --dry-run");
    }
    Ok(())
}

/// The run folder that was typed, or that the file of settings names.
fn named_folder(args: &FitArgs) -> Result<Option<PathBuf>, CliError> {
    let folder = |layer: &Layer| layer.get("output_dir").and_then(|dir| dir.as_str()).map(PathBuf::from);
    match (folder(&args.typed), &args.launch.config) {
        (None, Some(file)) => Ok(folder(&settings_of(file)?)),
        (typed, _) => Ok(typed),
    }
}

/// The settings of a file.
fn settings_of(file: &Path) -> Result<Layer, CliError> {
    file::open(file, "check the path").map_err(CliError::of_flag("--config"))?;
    Layer::of_file(file)
}

/// The plan of a command line, the checkpoint that it resumes from, and whether it restarts a run that has no checkpoint yet.
/// Only the state of the checkpoint is verified, not its weights.
///
/// # Errors
/// If the settings or the checkpoint are refused.
pub fn planned(args: &FitArgs) -> Result<(Plan, Option<Resumed>, bool), CliError> {
    let resume = match &args.launch.resume_from_checkpoint {
        Some(from) => resume::find(from, named_folder(args)?.as_deref())?,
        None => None,
    };
    if let Some(Resume::Beginning(run)) = &resume {
        let none = if run.exists() { "has no checkpoint yet" } else { "is not there" };
        report::line(format!("{} {none}: the run starts at its first step", run.display()));
    }
    let plan = plan_of(args, resume.as_ref())?;
    Ok(match resume {
        Some(Resume::At(resumed)) => (plan, Some(*resumed), false),
        Some(Resume::Beginning(_)) => (plan, None, true),
        None => (plan, None, false),
    })
}

/// The plan of a command line, which resumes at `resume` if there is one. Typed settings win over those of the config file, of the
/// run or of the demo, and these over defaults.
fn plan_of(args: &FitArgs, resume: Option<&Resume>) -> Result<Plan, CliError> {
    let launch = &args.launch;
    let begun = match resume {
        Some(Resume::Beginning(run)) => Some(run.join(CONFIG)).filter(|file| file.exists()),
        _ => None,
    };
    let mut base = match (&launch.config, resume, begun) {
        (Some(file), ..) => settings_of(file)?,
        (None, Some(Resume::At(resumed)), _) => last_settings(resumed),
        (None, _, Some(file)) => Layer::of_file(&file)?,
        (None, _, None) if launch.demo => demo::settings(),
        (None, ..) => Layer::default(),
    };
    let typed = |key: &str| args.typed.get(key).is_some();
    // A length that is typed wins over that of a file, which may be said as a number of steps.
    if resume.is_none() && typed("num_train_epochs") {
        base.remove("max_steps");
    }
    let mut settings = base.under(args.typed.clone()).over_defaults()?;
    let run = resume.map(|resume| match resume {
        Resume::At(resumed) => &resumed.run,
        Resume::Beginning(run) => run,
    });
    if let Some(run) = run {
        settings.saving.output_dir = Some(run.clone());
        if launch.config.is_none() {
            let named = settings.logging.vram_report.as_deref();
            recorded_outputs::check_memory_report(named.filter(|_| !typed("vram_report")))?;
        }
    }
    // The settings that are recorded name the model itself, not the run that it was found in.
    // The plan refuses an empty path.
    if let Some(model) = settings.model.model.as_mut().filter(|model| !model.as_os_str().is_empty()) {
        *model = located("--model", model)?.weights;
    }
    let plan = Plan::new(settings)?;
    // What a new run would replace may be the output of another run, whose command or file of settings was used again.
    if resume.is_none() {
        let (saving, logging) = (&plan.settings.saving, &plan.settings.logging);
        let outputs = [("--output-dat", &saving.output_dat), ("--vram-report", &logging.vram_report)];
        for (flag, file) in outputs.into_iter().filter_map(|(flag, file)| Some((flag, file.as_deref()?))) {
            check_free(flag, file, launch.overwrite)?;
        }
    }
    Ok(plan)
}

/// The settings of a run that resumes at a checkpoint. Where a resumed run may change them, they are those of the last command
/// that trained in its folder: if that one was killed, or had no step to make, no checkpoint has them.
fn last_settings(resumed: &Resumed) -> Layer {
    let (saved, file) = (Layer::from(&resumed.state.settings), resumed.run.join(CONFIG));
    if !file.exists() {
        return saved;
    }
    // Every run records its seed, almost at the end of the file: without it, the file was cut, or no run has written it.
    let last = Layer::of_file(&file).and_then(|last| match last.get("seed") {
        Some(_) => Ok(last),
        None => Err(CliError::corrupt(&file, "it has no seed")),
    });
    match last {
        Ok(last) => saved.with_free_of(last),
        Err(error) => {
            report::line(format!(
                "warning: the settings of the checkpoint are used, as those of the run are damaged: {error}"
            ));
            saved
        }
    }
}

/// Checks that a run can resume from `found`, then verifies the files of the checkpoint, which may take minutes. If they are
/// broken and an older checkpoint is resumed, the run is planned and checked again with the settings of that one.
fn resumable(
    args: &FitArgs,
    plan: Plan,
    found: Resumed,
    device: DeviceChoice,
    precision: Precision,
) -> Result<(Ready, Resumed), CliError> {
    let checked = |plan: Plan, at: &Resumed| {
        let ready = Ready::new(plan, device, precision, Some(at))?;
        check_length(&args.typed, &ready.plan, &at.state, ready.inputs.order(&ready.plan).steps)?;
        folder::check_unchanged(&ready.plan, &ready.inputs, at, precision)?;
        Ok::<_, CliError>(ready)
    };
    let ready = checked(plan, &found)?;
    let from = args.launch.resume_from_checkpoint.as_ref().expect("the flag said where the checkpoint is");
    let newest = found.folder.clone();
    let verified = resume::verified(from, found)?;
    if verified.folder == newest {
        return Ok((ready, verified));
    }
    let plan = plan_of(args, Some(&Resume::At(Box::new(verified.clone()))))?;
    Ok((checked(plan, &verified)?, verified))
}

struct Fit<'a> {
    args: &'a FitArgs,
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
    is_recorded: bool,
    overwrite: bool,
    dry_run: bool,
}

impl Job for Fit<'_> {
    type Output = ();

    fn remedy(&self) -> &'static str {
        REMEDY
    }

    fn run<B: Nvfp4Kernels + DeviceServices>(self, device: B::Device, precision: Precision) -> Result<(), CliError> {
        let Self { args, plan, device: choice, lock, resumed, restarts, unnamed, is_recorded, overwrite, dry_run } =
            self;
        if resumed.is_none() {
            check_output_folder("--output-dir", &plan.output_dir)?;
        }
        if resumed.is_none() && !unnamed {
            // If another run is writing to the folder, the error names its process instead of the files. A run that restarts
            // holds the lock itself.
            let is_held = lock.is_some();
            let named =
                |error| if is_held { Err(error) } else { durable::check_unheld(&plan.output_dir).and(Err(error)) };
            folder::check_free(&plan, overwrite).or_else(named)?;
        }
        // The lock ends with the run.
        let (plan, mut lock) = match lock {
            Some(lock) => (plan, lock),
            None if unnamed => {
                let (lock, folder) = folder::Lock::of_new(&plan.output_dir)?;
                (Plan::in_folder(plan.settings, folder)?, lock)
            }
            None => {
                let lock = folder::Lock::of(&plan.output_dir)?;
                (plan, lock)
            }
        };
        // A request that comes before the first step is answered after it.
        let requests = SaveRequests::listen().map_err(CliError::io(Path::new("signals")))?;
        let (ready, resumed) = match resumed {
            Some(found) => {
                let (ready, resumed) = resumable(args, plan, found, choice, precision)?;
                (ready, Some(resumed))
            }
            None => (Ready::new(plan, choice, precision, None)?, None),
        };
        match &resumed {
            None => {
                folder::check_free(&ready.plan, overwrite)?;
                if restarts {
                    folder::check_not_begun(&ready.plan.output_dir)?;
                }
            }
            Some(resumed) => {
                if is_done(&ready, resumed, dry_run)? {
                    return Ok(());
                }
                let step = resumed.state.global_step;
                report::label("resume", format!("{} · step {step}", resumed.folder.display()));
            }
        }
        header::print(&ready.plan, &ready.inputs, ready.spec.scaling, precision);
        ready.forecast.lines().into_iter().for_each(|(label, line)| report::label(label, line));
        report::label("products", B::tiers(&device).join(" · "));
        if dry_run {
            report::result(ready.plan.settings.toml()?);
            return Ok(());
        }
        // The run folder is not made yet, so that a signal which ends the program here leaves nothing behind.
        // In f32 the host rounds masters to bf16: a rehearsal would make every value of the embedding there.
        if precision.dtype().size() == 2 || ready.master.dense() == Master::Exact {
            Ahead::compile(choice, precision, FirstSteps(&ready)).finish();
        }
        lock.begins();
        match &resumed {
            None => folder::create(&ready.plan, &ready.inputs, restarts)?,
            Some(resumed) => {
                let steps = ready.inputs.order(&ready.plan).steps;
                history::resume(&ready.plan.output_dir, resumed.state.global_step, steps)?;
            }
        }
        if let Some(file) = ready.plan.settings.saving.output_dat.as_ref().filter(|_| is_recorded) {
            recorded_outputs::set_aside(file, &ready.plan.output_dir)?;
        }
        // From here to the end of the export, a first signal ends the run where it can be resumed.
        let signals = Arc::new(Interruption::listen().map_err(CliError::io(Path::new("signals")))?);
        let run = ready.plan.output_dir.clone();
        watchdog::when_stuck(move |error| record_end(&run, Some(reason(error))));
        let trained = ready.guarded::<B>(resumed, &signals, &requests, &device);
        let ended = trained.and_then(|trained| ready.finish::<B>(trained, &signals, &device));
        // The run folder records why the run ended early: its evaluation loss stopped falling, an error, or a signal.
        let reason = ended.as_ref().map_or_else(|error| Some(reason(error)), Clone::clone);
        record_end(&ready.plan.output_dir, reason);
        ended.map(|_| ())
    }
}

/// Whether the run that is to be resumed is complete. Says so, and writes its summary.
fn is_done(ready: &Ready, resumed: &Resumed, dry_run: bool) -> Result<bool, CliError> {
    let (plan, state) = (&ready.plan, &resumed.state);
    let steps = ready.inputs.order(plan).steps;
    if !is_complete(plan, state, steps)? {
        return Ok(false);
    }
    if !dry_run {
        if plan.settings.logging.report_to == ReportTo::Tensorboard && tensorboard::write_if_missing(&plan.output_dir)?
        {
            report::line("wrote the figures of the run for TensorBoard");
        }
        summarize(&plan.output_dir);
    }
    report::line(completed(plan, state, steps));
    Ok(true)
}

/// Records why a run ended, if it ended early, and writes its summary. The run is what it is without them.
fn record_end(run: &Path, reason: Option<String>) {
    if let Err(error) = history::end(run, reason) {
        report::line(format!("warning: why the run ended could not be recorded: {error}"));
    }
    summarize(run);
}

/// Writes the summary of a run. The run is what it is without one.
fn summarize(run: &Path) {
    if let Err(error) = summary::write(run) {
        report::line(format!("warning: the summary of the run could not be written: {error}"));
    }
}
