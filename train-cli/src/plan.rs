//! Flags and config file to a checked plan. Behind this file nobody sees a flag, and what can be
//! refused without loading a model is refused here.

use crate::{
    CliError,
    args::{DtypeArg, FitArgs, LossArg, MasterArg, Nvfp4Part, RecipeArg, SaveArg, ScalesArg, StateArg},
    data::read::{DataOptions, Format, LossOn, Overlong},
    device::DeviceChoice,
    durable::check_output,
    model_files::{Companions, ModelFiles},
    train::optim::AdamwConfig,
    train::schedule::Shape,
    train::step::{Clip, StepMode},
};
use backend_nvfp4::{MasterKind, Nvfp4Parts, Precision, Recipe, Scaling, StateKind};
use burn::tensor::DType;
use std::path::{Path, PathBuf};

/// Where a model comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSource {
    /// Files.
    Files(ModelFiles),
    /// Random weights of a config.json.
    Random {
        /// The config.json.
        config: PathBuf,
    },
}

/// The loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LossKind {
    /// Cross-entropy over supervised tokens.
    CrossEntropy,
    /// Mean absolute difference of hidden states and next embeddings.
    HiddenL1,
}

/// Everything that `fit` does, resolved.
#[derive(Debug, Clone)]
pub struct FitPlan {
    /// The settings this came from, every default filled in: what config.toml holds.
    pub settings: FitArgs,
    /// The model.
    pub source: ModelSource,
    /// config.json and text files.
    pub companions: Companions,
    /// Training files; empty for random tokens.
    pub data: Vec<PathBuf>,
    /// How often their rows are repeated; empty is once.
    pub data_weights: Vec<f64>,
    /// Whether several rows become one sequence.
    pub packing: bool,
    /// Where tokenised rows are kept, if anywhere.
    pub token_cache: Option<PathBuf>,
    /// Evaluation file.
    pub eval_data: Option<PathBuf>,
    /// Share held out otherwise.
    pub val_split: f64,
    /// How files become samples.
    pub options: DataOptions,
    /// The loss.
    pub loss: LossKind,
    /// The recipe.
    pub recipe: Recipe,
    /// Last blocks that are not quantised.
    pub bf16_last_blocks: usize,
    /// Scale levels, if asked for.
    pub scaling: Option<Scaling>,
    /// Number format, if asked for.
    pub precision: Option<Precision>,
    /// Device.
    pub device: DeviceChoice,
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Its shape.
    pub shape: Shape,
    /// Steps of warm-up, or a share of the run below 1.
    pub warmup: f64,
    /// Epochs.
    pub epochs: f64,
    /// Steps, if given.
    pub max_steps: Option<usize>,
    /// Sequences in a micro-batch.
    pub batch_size: usize,
    /// Micro-batches in a step.
    pub accumulation: usize,
    /// Clipping; 0 is off.
    pub max_grad_norm: f64,
    /// How a step's backward runs.
    pub step_mode: StepMode,
    /// The norm that is clipped by.
    pub clip: Clip,
    /// Whether masters follow the number format.
    pub master_auto: bool,
    /// Whether checkpoints and an export are written.
    pub saves: bool,
    /// The share of the run after which the recipe quantises.
    pub quantise_from: f64,
    /// The share of the run over which blocks are frozen on their codes; 0 is none.
    pub damped_finish: f64,
    /// Bytes that the run may take from the device.
    pub memory_limit: Option<u64>,
    /// TFLOP/s that the device could reach, for MFU.
    pub peak_tflops: Option<f64>,
    /// AdamW.
    pub adamw: AdamwConfig,
    /// Trained blocks, from the end; 0 is everything.
    pub train_last_layers: usize,
    /// Run folder.
    pub output_dir: PathBuf,
    /// Extra export.
    pub output_dat: Option<PathBuf>,
    /// Steps between evaluations; `None` takes a twentieth of the run.
    pub eval_steps: Option<usize>,
    /// Steps between checkpoints; 0 is only the last, `None` takes a twentieth of the run.
    pub save_steps: Option<usize>,
    /// Steps between lines.
    pub logging_steps: usize,
    /// Checkpoints kept.
    pub save_total_limit: usize,
    /// Prompts answered at evaluations.
    pub sample_prompts: Vec<String>,
    /// Memory report.
    pub vram_report: Option<PathBuf>,
    /// Seed.
    pub seed: u64,
    /// Checkpoint to go on from.
    pub resume: Option<Resume>,
    /// Every file that the run reads, where it has a name: nothing is written over them.
    pub inputs: Vec<PathBuf>,
    /// Empty the run folder first.
    pub overwrite: bool,
}

impl FitPlan {
    /// How masters are stored when activations are `precision`.
    pub fn master(&self, precision: Precision) -> MasterKind {
        if self.master_auto && precision == Precision::Bf16 { MasterKind::Bf16 } else { self.adamw.master }
    }
}

/// Which checkpoint to go on from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resume {
    /// The newest valid one of the run folder.
    Latest,
    /// This one.
    At(PathBuf),
}

/// Which checkpoint `--resume-from-checkpoint` means. Fills in the run's folder and its settings: a run
/// goes on as it was started.
fn resumed(flags: &mut FitArgs) -> Result<Option<Resume>, CliError> {
    let Some(text) = flags.resume_from_checkpoint.clone() else { return Ok(None) };
    let given = PathBuf::from(&text);
    let (run, resume) = match text.as_str() {
        "false" => return Ok(None),
        "latest" | "true" => match &flags.output_dir {
            Some(run) => (run.clone(), Resume::Latest),
            None => {
                return Err(CliError::Usage(
                    "--resume-from-checkpoint needs the run's folder: --output-dir RUN".into(),
                ));
            }
        },
        _ if given.join("config.toml").exists() => (given, Resume::Latest),
        _ if given.join("trainer_state.json").exists() => {
            let parent = given.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
            (parent.to_owned(), Resume::At(given))
        }
        _ => return Err(CliError::Usage(format!("{text}: no such checkpoint, and no run folder"))),
    };
    let same = |a: &Path, b: &Path| a.canonicalize().ok() == b.canonicalize().ok();
    if let Some(dir) = flags.output_dir.as_ref().filter(|dir| !same(dir, &run)) {
        let text = format!("--output-dir {}: the checkpoint belongs to {}", dir.display(), run.display());
        return Err(CliError::Usage(text));
    }
    let settings = run.join("config.toml");
    if !settings.exists() {
        return Err(CliError::Usage(format!("{}: no run there (no config.toml)", run.display())));
    }
    flags.config.get_or_insert(settings);
    flags.output_dir = Some(run);
    Ok(Some(resume))
}

/// Makes a plan of the flags of `fit` and its config file.
///
/// # Errors
/// If they are incomplete, contradictory or out of range, or an output is an input.
pub fn fit(mut flags: FitArgs) -> Result<FitPlan, CliError> {
    let resume = resumed(&mut flags)?;
    let (demo, config, overwrite) = (flags.demo, flags.config.clone(), flags.overwrite);
    let file = match &config {
        Some(path) => read_config(path)?,
        None => FitArgs::default(),
    };
    let s = defaults(merged(flags, file));
    let usage = |text: String| Err(CliError::Usage(text));

    let source = match (&s.model, &s.init_config) {
        (Some(model), None) => ModelSource::Files(ModelFiles::new(model)),
        (None, Some(config)) => ModelSource::Random { config: config.clone() },
        (Some(_), Some(_)) => return usage("--model and --init-config exclude each other".into()),
        (None, None) if demo => return usage("--demo is for fit".into()),
        (None, None) => return usage("no model: give --model PATH, or --init-config FILE, or try --demo".into()),
    };
    let (model_folder, config_file) = match &source {
        ModelSource::Files(files) => (files.folder.clone(), files.config_file(s.tokenizer.as_deref())),
        ModelSource::Random { config } if config.is_dir() => (config.clone(), config.join("config.json")),
        ModelSource::Random { config } => (ModelFiles::new(config).folder, config.clone()),
    };
    let companions = Companions { config: config_file, text: s.tokenizer.clone().unwrap_or(model_folder) };
    let synthetic = s.synthetic == Some(true);
    let data = s.data.clone().unwrap_or_default();
    if data.is_empty() && !synthetic {
        return usage("no training data: give --data FILE, or --synthetic".into());
    }
    if synthetic && !data.is_empty() {
        return usage("--synthetic takes no --data".into());
    }
    if synthetic && s.token_cache.is_some() {
        return usage("--synthetic has no rows for --token-cache".into());
    }

    let number = |flag: &str, value: Option<f64>, low: f64, high: f64| match value {
        Some(v) if (low..=high).contains(&v) => Ok(v),
        Some(v) => Err(CliError::Usage(format!("--{flag} {v}: between {low} and {high}"))),
        None => unreachable!("defaults fill every field"),
    };
    let count = |flag: &str, value: Option<usize>, low: usize| match value {
        Some(v) if v > MOST => Err(CliError::Usage(format!("--{flag} {v}: at most {MOST}"))),
        Some(v) if v >= low => Ok(v),
        Some(v) => Err(CliError::Usage(format!("--{flag} {v}: at least {low}"))),
        None => unreachable!("defaults fill every field"),
    };
    if let Some(steps) = s.max_steps {
        count("max-steps", Some(steps), 1)?;
    }
    let quantised = matches!(s.optimizer_state_mode, Some(StateArg::Int8 | StateArg::Int4 | StateArg::Nvfp4));
    if s.master_weights == Some(MasterArg::Nvfp4) && !quantised {
        return usage("--master-weights nvfp4 needs --optimizer-state-mode int8, int4 or nvfp4".into());
    }
    if s.master_weights == Some(MasterArg::Nvfp4) && s.recipe == Some(RecipeArg::Bf16) {
        return usage("--master-weights nvfp4 has no unquantised weights for --recipe bf16: take w4".into());
    }
    if s.master_weights == Some(MasterArg::Nvfp4) && s.bf16_last_blocks > Some(0) {
        return usage("--bf16-last-blocks needs masters that are not NVFP4".into());
    }
    let square = |parts: &Vec<Nvfp4Part>| parts.contains(&Nvfp4Part::SquareBlocks);
    if s.master_weights == Some(MasterArg::Nvfp4) && s.nvfp4_without.as_ref().is_some_and(square) {
        return usage("--nvfp4-without square-blocks: NVFP4 masters have 1x16 blocks in any case".into());
    }
    if s.damped_finish.is_some_and(|share| share > 0.0) {
        if s.recipe == Some(RecipeArg::Bf16) || s.master_weights == Some(MasterArg::Nvfp4) {
            return usage(
                "--damped-finish freezes masters on their codes: it needs a recipe that quantises dense masters".into(),
            );
        }
        if s.scales == Some(ScalesArg::Single) {
            return usage("--damped-finish needs --scales two".into());
        }
    }
    if let Some(share) = s.quantise_from.filter(|share| *share > 0.0) {
        if s.recipe == Some(RecipeArg::Bf16) || s.master_weights == Some(MasterArg::Nvfp4) {
            return usage("--quantise-from needs a recipe that quantises dense masters".into());
        }
        let finish = s.damped_finish.unwrap_or(0.0);
        if finish > 0.0 && share + finish > 1.0 {
            return usage(format!("--quantise-from {share}: --damped-finish {finish} would begin before it"));
        }
    }
    if s.nvfp4_without.is_some() && s.recipe != Some(RecipeArg::Nvfp4) {
        return usage("--nvfp4-without is about --recipe nvfp4".into());
    }
    if s.compute_dtype == Some(DtypeArg::F16) {
        return usage("--compute-dtype f16: gradients underflow in f16; train in bf16 or f32".into());
    }
    let name = match &source {
        ModelSource::Files(files) => files.name(),
        ModelSource::Random { config } => ModelFiles::new(config).name(),
    };
    let output_dir = s.output_dir.clone().unwrap_or_else(|| {
        let time = jiff::Timestamp::now().strftime("%Y%m%dT%H%M%SZ").to_string();
        PathBuf::from("runs").join(format!("{time}_{name}"))
    });
    if let Some(cache) = s.token_cache.as_ref().filter(|cache| cache.starts_with(&output_dir)) {
        return usage(format!("--token-cache {}: outside the run's folder, please", cache.display()));
    }
    let mut inputs = data.clone();
    inputs.extend(s.eval_data.clone());
    inputs.push(companions.config.clone());
    inputs.extend(companions.text_files());
    if let ModelSource::Files(files) = &source {
        inputs.extend(files.weight_files());
    }
    for output in [&s.output_dat, &s.vram_report].into_iter().flatten() {
        check_output(output, &inputs)?;
    }
    Ok(FitPlan {
        source,
        companions,
        data_weights: weights(&s, data.len())?,
        data,
        packing: s.packing == Some(true),
        token_cache: s.token_cache.clone(),
        eval_data: s.eval_data.clone(),
        val_split: number("val-split", s.val_split, 0.0, 0.9)?,
        options: DataOptions {
            format: s.format.unwrap_or(Format::Auto),
            loss_on: s.loss_on.unwrap_or(LossOn::Assistant),
            // Unset, it is cut to what the model takes once that is known.
            max_seq_length: count("max-seq-length", s.max_seq_length.or(Some(DEFAULT_SEQUENCE)), 2)?,
            overlong: s.overlong.unwrap_or(Overlong::Drop),
        },
        loss: match s.loss {
            Some(LossArg::Scalar) => LossKind::HiddenL1,
            _ => LossKind::CrossEntropy,
        },
        recipe: recipe(&s),
        bf16_last_blocks: count("bf16-last-blocks", s.bf16_last_blocks, 0)?,
        scaling: s.scales.map(scaling),
        precision: s.compute_dtype.and_then(precision),
        device: s.device.unwrap_or(DeviceChoice::Auto),
        learning_rate: number("learning-rate", s.learning_rate, 0.0, 1.0)?,
        shape: s.lr_scheduler_type.unwrap_or(Shape::Cosine),
        warmup: number("warmup-steps", s.warmup_steps, 0.0, 1e9)?,
        epochs: number("num-train-epochs", s.num_train_epochs, 1e-6, 1e6)?,
        max_steps: s.max_steps,
        batch_size: count("batch-size", s.batch_size, 1)?,
        accumulation: count("gradient-accumulation-steps", s.gradient_accumulation_steps, 1)?,
        max_grad_norm: number("max-grad-norm", s.max_grad_norm, 0.0, f64::MAX)?,
        step_mode: s.step_mode.unwrap_or(StepMode::Streaming),
        clip: s.clip.unwrap_or(Clip::Previous),
        master_auto: s.master_weights == Some(MasterArg::Auto),
        quantise_from: number("quantise-from", s.quantise_from, 0.0, 0.99)?,
        damped_finish: number("damped-finish", s.damped_finish, 0.0, 0.9)?,
        memory_limit: s.memory_limit.as_deref().map(bytes).transpose()?,
        peak_tflops: s.peak_tflops,
        saves: s.save_strategy != Some(SaveArg::No),
        adamw: AdamwConfig {
            beta1: number("adam-beta1", s.adam_beta1, 0.0, 0.999_999)?,
            beta2: number("adam-beta2", s.adam_beta2, 0.0, 0.999_999)?,
            eps: number("adam-epsilon", s.adam_epsilon, 1e-30, 1.0)?,
            weight_decay: number("weight-decay", s.weight_decay, 0.0, 10.0)?,
            state: match s.optimizer_state_mode {
                Some(StateArg::F32) => StateKind::F32,
                Some(StateArg::Bf16) => StateKind::Bf16,
                Some(StateArg::Int4) => StateKind::Int4,
                Some(StateArg::Nvfp4) => StateKind::Nvfp4,
                Some(StateArg::Int8) | None => StateKind::Int8,
            },
            master: match s.master_weights {
                Some(MasterArg::Bf16Residual) => MasterKind::Bf16Residual,
                Some(MasterArg::Bf16) => MasterKind::Bf16,
                Some(MasterArg::Bf16Nearest) => MasterKind::Bf16Nearest,
                Some(MasterArg::Nvfp4) => MasterKind::Nvfp4,
                Some(MasterArg::F32 | MasterArg::Auto) | None => MasterKind::F32,
            },
            seed: s.seed.unwrap_or(42),
            float: DType::F32,
            chunk_rows: count("step-chunk-rows", s.step_chunk_rows, 0)?,
        },
        train_last_layers: count("train-last-layers", s.train_last_layers, 0)?,
        output_dir,
        output_dat: s.output_dat.clone(),
        eval_steps: s.eval_steps,
        save_steps: s.save_steps,
        logging_steps: count("logging-steps", s.logging_steps, 1)?,
        save_total_limit: count("save-total-limit", s.save_total_limit, 2)?,
        sample_prompts: s.sample_prompt.clone().unwrap_or_default(),
        vram_report: s.vram_report.clone(),
        seed: s.seed.unwrap_or(42),
        resume,
        inputs,
        overwrite,
        settings: s,
    })
}

/// The recipe that settings name.
pub fn recipe(s: &FitArgs) -> Recipe {
    match s.recipe {
        Some(RecipeArg::Bf16) => Recipe::Bf16,
        Some(RecipeArg::W4a4) => Recipe::W4a4,
        Some(RecipeArg::Nvfp4) => Recipe::Nvfp4(parts(s.nvfp4_without.as_deref().unwrap_or_default())),
        Some(RecipeArg::W4) | None => Recipe::W4,
    }
}

/// The parts of recipe nvfp4 that are left.
fn parts(without: &[Nvfp4Part]) -> Nvfp4Parts {
    Nvfp4Parts {
        square_blocks: !without.contains(&Nvfp4Part::SquareBlocks),
        hadamard: !without.contains(&Nvfp4Part::Hadamard),
        stochastic: !without.contains(&Nvfp4Part::Stochastic),
    }
}

/// One weight a file, or none.
fn weights(s: &FitArgs, files: usize) -> Result<Vec<f64>, CliError> {
    let weights = s.data_weights.clone().unwrap_or_default();
    if !weights.is_empty() && weights.len() != files {
        return Err(CliError::Usage(format!("--data-weights: {} for {files} --data files", weights.len())));
    }
    match weights.iter().find(|w| !(0.001..=1000.0).contains(*w)) {
        Some(w) => Err(CliError::Usage(format!("--data-weights {w}: between 0.001 and 1000"))),
        None => Ok(weights),
    }
}

/// Bytes from `20GiB`, `500 MB`, `24g`.
fn bytes(text: &str) -> Result<u64, CliError> {
    let bad = || CliError::Usage(format!("--memory-limit {text}: a number and a unit are needed, as 20GiB"));
    let at = text.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(bad)?;
    let (number, unit) = (text[..at].parse::<f64>().map_err(|_| bad())?, text[at..].trim().to_ascii_lowercase());
    let unit = match unit.as_str() {
        "mib" | "m" => 1u64 << 20,
        "gib" | "g" => 1 << 30,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        _ => return Err(bad()),
    };
    Ok((number * unit as f64) as u64)
}

/// Longest sequence where none is given.
const DEFAULT_SEQUENCE: usize = 2048;

/// The largest count that any flag takes: products of three stay far from overflow.
const MOST: usize = 1 << 20;

/// The number format that a flag names; `None` leaves it to the device.
pub fn precision(arg: DtypeArg) -> Option<Precision> {
    match arg {
        DtypeArg::Auto => None,
        DtypeArg::F32 => Some(Precision::F32),
        DtypeArg::Tf32 => Some(Precision::Tf32),
        DtypeArg::F16 => Some(Precision::F16),
        DtypeArg::Bf16 => Some(Precision::Bf16),
    }
}

/// The scale levels that a flag names.
pub fn scaling(arg: ScalesArg) -> Scaling {
    match arg {
        ScalesArg::Single => Scaling::Single,
        ScalesArg::Two => Scaling::Two,
    }
}

fn read_config(path: &Path) -> Result<FitArgs, CliError> {
    let text =
        std::fs::read_to_string(path).map_err(|e| CliError::Usage(format!("--config {}: {e}", path.display())))?;
    toml::from_str(&text).map_err(|e| CliError::Usage(format!("{}: {e}", path.display())))
}

/// Flags over file.
fn merged(flags: FitArgs, mut file: FitArgs) -> FitArgs {
    // A model named by a flag replaces the file's, whichever way the file names it.
    if flags.model.is_some() || flags.init_config.is_some() {
        (file.model, file.init_config) = (None, None);
    }
    macro_rules! either {
        ($($field:ident),* $(,)?) => {
            FitArgs { $($field: flags.$field.or(file.$field),)* ..FitArgs::default() }
        };
    }
    either!(
        model,
        init_config,
        tokenizer,
        data,
        data_weights,
        eval_data,
        val_split,
        format,
        synthetic,
        loss_on,
        loss,
        max_seq_length,
        overlong,
        packing,
        token_cache,
        recipe,
        nvfp4_without,
        bf16_last_blocks,
        scales,
        compute_dtype,
        device,
        learning_rate,
        lr_scheduler_type,
        warmup_steps,
        num_train_epochs,
        max_steps,
        batch_size,
        gradient_accumulation_steps,
        max_grad_norm,
        weight_decay,
        adam_beta1,
        adam_beta2,
        adam_epsilon,
        step_mode,
        clip,
        quantise_from,
        damped_finish,
        memory_limit,
        peak_tflops,
        master_weights,
        optimizer_state_mode,
        step_chunk_rows,
        train_last_layers,
        output_dir,
        output_dat,
        eval_steps,
        save_steps,
        save_strategy,
        logging_steps,
        save_total_limit,
        sample_prompt,
        vram_report,
        seed,
    )
}

/// Settings with every default filled in.
pub(crate) fn defaults(mut s: FitArgs) -> FitArgs {
    macro_rules! fill {
        ($($field:ident = $value:expr),* $(,)?) => { $(s.$field.get_or_insert($value);)* };
    }
    fill!(
        val_split = 0.02,
        format = Format::Auto,
        synthetic = false,
        loss_on = LossOn::Assistant,
        loss = LossArg::Ce,
        overlong = Overlong::Drop,
        packing = false,
        bf16_last_blocks = 0,
        step_mode = StepMode::Streaming,
        quantise_from = 0.0,
        damped_finish = 0.0,
        master_weights = MasterArg::Auto,
        save_strategy = SaveArg::Steps,
        recipe = RecipeArg::W4,
        compute_dtype = DtypeArg::Auto,
        device = DeviceChoice::Auto,
        learning_rate = 1e-5,
        lr_scheduler_type = Shape::Cosine,
        warmup_steps = 0.03,
        num_train_epochs = 1.0,
        batch_size = 1,
        gradient_accumulation_steps = 1,
        max_grad_norm = 1.0,
        weight_decay = 0.0,
        adam_beta1 = 0.9,
        adam_beta2 = 0.999,
        adam_epsilon = 1e-8,
        optimizer_state_mode = StateArg::Int8,
        step_chunk_rows = 0,
        train_last_layers = 0,
        logging_steps = 1,
        save_total_limit = 2,
        seed = 42,
    );
    // This step's norm is free where all gradients are there before one is applied; else it costs a second pass.
    let free = s.step_mode == Some(StepMode::Whole) || s.gradient_accumulation_steps > Some(1);
    s.clip.get_or_insert(if free { Clip::Exact } else { Clip::Previous });
    s
}
