//! The settings themselves, in groups that are the headings of `--help`: for each its help text (the doc comment of its field),
//! its default, its range, and whether a resumed run may change it.

use crate::{
    replaced::not_of_the_guard,
    settings::{
        choices::{
            Auto, Clip, Decay, DeviceChoice, Format, HeadFormat, LossKind, LossOn, Nvfp4Part, Overlong, Recompute,
            ReportTo, SaveStrategy, by_name, parser,
        },
        defaults::{
            BF16_BLOCK_IN, EVALUATION_SHARE, FEWEST_SPLIT, MOST_EVALUATED, RUNS, SAVING_SHARE, SHORTEST_SEQUENCE,
            advised_blocks, longest, part_of_the_run, parts_of_the_run,
        },
        extensions,
    },
};
use backend_nvfp4::{MasterKind, Nvfp4Parts, Precision, Recipe, Scaling, StateKind};
use clap::{
    ArgAction::Set,
    Args,
    builder::{NonEmptyStringValueParser, PathBufValueParser, TypedValueParser},
};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The heading of the ten flags that most people need: none, so that `--help` shows them first.
pub const COMMON: Option<&str> = None;

/// The help of `--tokenizer`, of every command that reads a model.
pub(crate) const TOKENIZER: &str = "Folder that holds tokenizer and chat template, and config.json too if there is none beside the model \
     [default: the model's folder]";

/// The settings of a run, by the headings of `--help`.
#[derive(Debug, Clone, Default, PartialEq, Args, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// The model.
    #[command(flatten)]
    #[serde(flatten)]
    pub model: ModelSettings,
    /// Training and evaluation data.
    #[command(flatten)]
    #[serde(flatten)]
    pub data: DataSettings,
    /// What is quantized, and in which format the rest is computed.
    #[command(flatten)]
    #[serde(flatten)]
    pub recipe: RecipeSettings,
    /// The optimizer and its schedule.
    #[command(flatten)]
    #[serde(flatten)]
    pub optimizer: OptimizerSettings,
    /// What a run keeps in device memory.
    #[command(flatten)]
    #[serde(flatten)]
    pub memory: MemorySettings,
    /// Checkpoints and exports.
    #[command(flatten)]
    #[serde(flatten)]
    pub saving: SavingSettings,
    /// Evaluation and progress.
    #[command(flatten)]
    #[serde(flatten)]
    pub logging: LoggingSettings,
    /// What few runs change.
    #[command(flatten)]
    #[serde(flatten)]
    pub advanced: AdvancedSettings,
}

/// Settings of the model.
#[derive(Debug, Clone, Default, PartialEq, Args, Serialize, Deserialize)]
#[serde(default)]
#[command(next_help_heading = "Model")]
pub struct ModelSettings {
    /// Model to train: a model folder, a run folder, a checkpoint, a .dat file or a .safetensors file
    #[arg(short, long, value_name = "PATH", aliases = ["model-name-or-path", "input-dat", "weight", "model-dir"])]
    #[arg(help_heading = COMMON)]
    pub model: Option<PathBuf>,
    /// Start from random weights in the shape of this config.json, instead of --model
    #[arg(long, value_name = "FILE", conflicts_with = "model")]
    pub init_config: Option<PathBuf>,
    /// Folder that holds tokenizer and chat template.
    #[arg(long, value_name = "DIR", help = TOKENIZER)]
    pub tokenizer: Option<PathBuf>,
    /// Train only the last N blocks (transformer layers) and the final norm; 0 trains all parameters
    #[arg(long, value_name = "N", alias = "num-layers", allow_negative_numbers = true)]
    pub train_last_layers: usize,
}

impl ModelSettings {
    /// Number of last blocks that are trained, with the final norm. `None` if all parameters are.
    pub fn last_trained(&self) -> Option<usize> {
        (self.train_last_layers > 0).then_some(self.train_last_layers)
    }
}

/// Settings of training and evaluation data.
#[derive(Debug, Clone, PartialEq, Args, Serialize, Deserialize)]
#[serde(default)]
#[command(next_help_heading = "Data")]
pub struct DataSettings {
    /// Training files, folders of them, or patterns.
    #[arg(short, long, value_name = "PATH", alias = "dataset", alias = "train-data", alias = "train-file")]
    #[arg(help_heading = COMMON, help = format!(
        "Training file ({}); or a pattern such as 'rows/*.jsonl'; or a folder, which stands for the training files in it, except \
         .md files, hidden files, dataset_info.json and state.json. May be given several times",
        extensions::known()
    ))]
    pub data: Vec<PathBuf>,
    /// Maximum length of a training sequence, in tokens. `longest` has the default.
    #[arg(long, value_name = "N", help_heading = COMMON, help = longest("Maximum length of a training sequence, in tokens"))]
    #[arg(aliases = ["max-length", "seq-len", "cutoff-len", "max-seq-len"])]
    pub max_seq_length: Option<usize>,
    /// How often an epoch uses each row, one number for each --data: `2,0.5` uses each row of the first file twice, and half
    /// of the rows of the second [default: 1]
    #[arg(long, value_name = "N", value_delimiter = ',')]
    pub data_weights: Vec<f64>,
    /// Key of JSON rows, or column of a table, with a number that says how often an epoch uses the row. A row with 2 is used
    /// twice, half of the rows with 0.5 are used, and a row with 0 is never used
    #[arg(long, value_name = "NAME")]
    pub weight_column: Option<String>,
    /// Use at most this many rows of the training files, chosen at random by --seed. In a text file a row is a
    /// document. If the whole file is one document, each sequence that is cut from it counts as a row
    #[arg(long, value_name = "N", aliases = ["max-samples", "max-train-samples"])]
    pub max_rows: Option<usize>,
    /// Evaluation file, instead of held-out training rows
    #[arg(long, value_name = "FILE", alias = "valid-data")]
    pub eval_data: Option<PathBuf>,
    /// Share of the training rows that are held out.
    #[arg(long, value_name = "SHARE", alias = "val-size", alias = "val-set-size", help = format!(
        "Share of the training rows that is held out for evaluation, drawn at random. With 0, or with fewer than {FEWEST_SPLIT} rows, \
         none is held out. Otherwise at least 1 row is held out. Drawing ends at a row with \
         which the held-out rows would make more than {MOST_EVALUATED} sequences (a long row makes several); the first row is always taken"
    ))]
    pub val_split: f64,
    /// Format of the data files
    #[arg(long, alias = "format-type", value_parser = parser::<Auto<Format>>())]
    #[serde(with = "by_name")]
    pub format: Auto<Format>,
    /// What stands between the documents of a .txt or .md file, for example '<|endoftext|>'. Without it the file is one
    /// document
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, value_parser = NonEmptyStringValueParser::new())]
    pub document_separator: Option<String>,
    /// Train on random tokens instead of files, for measurements
    #[arg(long, num_args = 0..=1, default_missing_value = "true", action = Set, value_name = "BOOL")]
    pub synthetic: bool,
    /// Which tokens the loss counts
    #[arg(long)]
    pub loss_on: LossOn,
    /// What to do with rows longer than --max-seq-length. Documents (plain text) are always split
    #[arg(long, alias = "excess-length-strategy")]
    pub overlong: Overlong,
    /// Pack several rows into one sequence; packed rows do not attend to each other
    #[arg(long, num_args = 0..=1, default_missing_value = "true", action = Set, value_name = "BOOL")]
    #[arg(alias = "sample-packing")]
    pub packing: bool,
    /// Folder that caches tokenized rows, so that later runs read them instead of tokenizing again
    #[arg(long, value_name = "DIR")]
    pub token_cache: Option<PathBuf>,
}

impl Default for DataSettings {
    fn default() -> Self {
        Self {
            data: vec![],
            max_seq_length: None,
            data_weights: vec![],
            weight_column: None,
            max_rows: None,
            eval_data: None,
            val_split: 0.02,
            format: None,
            document_separator: None,
            synthetic: false,
            loss_on: LossOn::default(),
            overlong: Overlong::Drop,
            packing: false,
            token_cache: None,
        }
    }
}

/// Settings of the recipe: which matrix products read NVFP4, and the number format of the rest.
#[derive(Debug, Clone, PartialEq, Args, Serialize, Deserialize)]
#[serde(default)]
#[command(next_help_heading = "Recipe")]
pub struct RecipeSettings {
    /// What training quantizes to NVFP4
    #[arg(long, value_parser = parser::<Recipe>(), help_heading = COMMON)]
    #[serde(with = "by_name")]
    pub recipe: Recipe,
    /// Device to train on: auto, cpu, cuda, cuda:N or vulkan
    #[arg(long, help_heading = COMMON)]
    pub device: DeviceChoice,
    /// For experiments: recipe nvfp4 uses three techniques that keep training accurate. Name those that you want to switch
    /// off, separated by commas
    #[arg(long, value_name = "PART", value_delimiter = ',')]
    pub nvfp4_without: Vec<Nvfp4Part>,
    /// Number of blocks at the end of the model whose linear layers are not quantized. `advised_blocks` has the default.
    #[arg(long, value_name = "N", help = advised_blocks())]
    pub bf16_last_blocks: Option<usize>,
    /// Share of the run that trains without quantization before the recipe starts
    #[arg(long, value_name = "SHARE", alias = "quantise-from")]
    pub quantize_from: f64,
    /// Damped finish: during this last share of the run, freeze the blocks (transformer layers) one after another at
    /// their NVFP4 values. A frozen block no longer learns; the others continue to learn
    #[arg(long, value_name = "SHARE")]
    pub damped_finish: f64,
    /// Which scales NVFP4 weights have
    #[arg(long, value_parser = parser::<Auto<Scaling>>())]
    #[serde(with = "by_name")]
    pub scales: Auto<Scaling>,
    /// In each block, use one matrix scale for the three weights q, k and v together, and one for the two weights gate and up
    /// together. Inference engines join q, k and v into one matrix, and gate and up into a second, and each joined matrix has one
    /// matrix scale. Without this flag, these weights have different matrix scales: export-hf with an NVFP4 format then gives the
    /// weights of a joined matrix the largest one. For this it may have to round their 8-bit scales again, which can change a few
    /// 4-bit codes
    #[arg(long, num_args = 0..=1, default_missing_value = "true", action = Set, value_name = "BOOL")]
    pub share_scales: bool,
    /// Number format in which the model computes
    #[arg(long, alias = "dtype", alias = "precision", value_parser = parser::<Auto<Precision>>())]
    #[serde(with = "by_name")]
    pub compute_dtype: Auto<Precision>,
}

impl Default for RecipeSettings {
    fn default() -> Self {
        Self {
            recipe: Recipe::W4,
            device: DeviceChoice::Auto,
            nvfp4_without: vec![],
            bf16_last_blocks: None,
            quantize_from: 0.0,
            damped_finish: 0.0,
            scales: None,
            share_scales: false,
            compute_dtype: None,
        }
    }
}

impl RecipeSettings {
    /// The recipe without the parts that are left out.
    pub fn resolved(&self) -> Recipe {
        let has = |part| !self.nvfp4_without.contains(&part);
        match self.recipe {
            Recipe::Nvfp4(_) => Recipe::Nvfp4(Nvfp4Parts {
                square_blocks: has(Nvfp4Part::SquareBlocks),
                hadamard: has(Nvfp4Part::Hadamard),
                stochastic: has(Nvfp4Part::Stochastic),
            }),
            other => other,
        }
    }
}

/// Settings of the optimizer and of the schedule.
#[derive(Debug, Clone, PartialEq, Args, Serialize, Deserialize)]
#[serde(default)]
#[command(next_help_heading = "Optimizer")]
pub struct OptimizerSettings {
    /// Number of passes over the data
    #[arg(long, value_name = "N", alias = "epochs", help_heading = COMMON)]
    pub num_train_epochs: f64,
    /// Peak learning rate
    #[arg(long, value_name = "RATE", alias = "lr", help_heading = COMMON)]
    pub learning_rate: f64,
    /// Number of sequences in a micro-batch, which the model processes at once
    #[arg(long, value_name = "N", alias = "per-device-train-batch-size", alias = "micro-batch-size")]
    #[arg(help_heading = COMMON)]
    pub batch_size: usize,
    /// Number of micro-batches whose gradients are summed before each optimizer step
    #[arg(long, value_name = "N", alias = "grad-accumulation-steps", alias = "grad-accum")]
    pub gradient_accumulation_steps: usize,
    /// Number of optimizer steps; overrides --num-train-epochs
    #[arg(long, value_name = "N", alias = "steps", alias = "iters")]
    pub max_steps: Option<usize>,
    /// Learning-rate schedule after warm-up
    #[arg(long, alias = "lr-schedule", alias = "scheduler")]
    pub lr_scheduler_type: Decay,
    /// Length of the warm-up: a number of steps, or a share of the run if below 1
    #[arg(long, value_name = "N", alias = "warmup-ratio")]
    pub warmup_steps: f64,
    /// Global gradient norm above which gradients are scaled down; 0 turns clipping off
    #[arg(long, value_name = "NORM", alias = "grad-clip")]
    pub max_grad_norm: f64,
    /// The norm by which gradients are clipped: that of this step's gradients, or that of the previous step's gradients
    #[arg(long, value_parser = parser::<Auto<Clip>>())]
    #[serde(with = "by_name")]
    pub clip: Auto<Clip>,
    /// Decoupled weight decay of matrices; norms and the embedding do not decay
    #[arg(long, value_name = "RATE")]
    pub weight_decay: f64,
    /// Decay rate of AdamW's first moment
    #[arg(long, value_name = "RATE", alias = "beta1")]
    pub adam_beta1: f64,
    /// Decay rate of AdamW's second moment
    #[arg(long, value_name = "RATE", alias = "beta2")]
    pub adam_beta2: f64,
    /// Value added to the denominator of AdamW's update
    #[arg(long, value_name = "VALUE", alias = "eps")]
    pub adam_epsilon: f64,
}

impl Default for OptimizerSettings {
    fn default() -> Self {
        Self {
            num_train_epochs: 1.0,
            learning_rate: 1e-5,
            batch_size: 1,
            gradient_accumulation_steps: 1,
            max_steps: None,
            lr_scheduler_type: Decay::Cosine,
            warmup_steps: 0.03,
            max_grad_norm: 1.0,
            clip: None,
            weight_decay: 0.0,
            adam_beta1: 0.9,
            adam_beta2: 0.999,
            adam_epsilon: 1e-8,
        }
    }
}

/// Settings that decide how much device memory a run needs.
#[derive(Debug, Clone, PartialEq, Args, Serialize, Deserialize)]
#[serde(default)]
#[command(next_help_heading = "Memory")]
pub struct MemorySettings {
    /// Which blocks run a second time in the backward pass, because their activations are not kept. This changes memory and
    /// speed, but not the results
    #[arg(long)]
    pub recompute: Recompute,
    /// How the master weights are stored. They are the weights that the optimizer updates
    #[arg(long, alias = "master-dtype", value_parser = parser::<Auto<MasterKind>>())]
    #[serde(with = "by_name")]
    pub master_weights: Auto<MasterKind>,
    /// How AdamW's two moments are stored. The bytes per parameter that are given below are for both moments together. Where the
    /// model computes in f32 or TF32 (on the CPU always), `bf16` stores the moments in f32, and takes 8 bytes per parameter
    #[arg(long, value_parser = parser::<StateKind>())]
    #[serde(with = "by_name")]
    pub optimizer_state_mode: StateKind,
    /// Limit on device memory, for example 20GiB: a run that is predicted to exceed it does not start, and a run that
    /// exceeds it saves a checkpoint and stops
    #[arg(long, value_name = "SIZE")]
    pub memory_limit: Option<String>,
}

impl Default for MemorySettings {
    fn default() -> Self {
        Self {
            recompute: Recompute::Auto,
            master_weights: None,
            optimizer_state_mode: StateKind::Int8,
            memory_limit: None,
        }
    }
}

/// Settings of checkpoints and exports.
#[derive(Debug, Clone, PartialEq, Args, Serialize, Deserialize)]
#[serde(default)]
#[command(next_help_heading = "Saving")]
pub struct SavingSettings {
    /// The run folder.
    #[arg(short, long, value_name = "DIR", alias = "out-dir", alias = "output", alias = "checkpoint-dir")]
    #[arg(value_parser = PathBufValueParser::new().try_map(not_of_the_guard))]
    #[arg(help_heading = COMMON, help = format!(
        "Run folder: receives the settings, logs, checkpoints and the exported model [default: {RUNS}/TIME_MODEL]"
    ))]
    pub output_dir: Option<PathBuf>,
    /// Also write the trained model to this .dat file
    #[arg(long, value_name = "FILE")]
    pub output_dat: Option<PathBuf>,
    /// How the export of a 4-bit recipe stores the output head [default: NVFP4 if the model's file has an NVFP4 head.
    /// Otherwise f16 for a separate head; a tied head (one that is the embedding) is not stored a second time]
    #[arg(long)]
    pub head: Option<HeadFormat>,
    /// Number of steps between checkpoints; 0 saves only the last step. [`SavingSettings::save_every`] has the default.
    #[arg(long, value_name = "N", alias = "save-every", alias = "save-every-steps", help = parts_of_the_run(
        "Number of steps between checkpoints; 0 saves only the last step. The signal SIGUSR1 asks for a checkpoint after \
         the current step",
        &format!(
            ". With this default, a checkpoint is left out while the previous one is still being written, and also if training \
             would otherwise spend more than {:.0} % of its time waiting for checkpoints. The one after the last step is always \
             written",
            100.0 * SAVING_SHARE
        ),
    ))]
    pub save_steps: Option<usize>,
    /// Number of checkpoints to keep, at least 2; older ones are deleted
    #[arg(long, value_name = "N")]
    pub save_total_limit: usize,
    /// Also save checkpoints after all steps that are multiples of N, and keep them
    #[arg(long, value_name = "N")]
    pub keep_period: Option<usize>,
    /// Save a checkpoint whenever the evaluation loss is lower than ever before. The best checkpoint so far is not deleted, and
    /// at the end the run exports it instead of the last step
    #[arg(long, num_args = 0..=1, default_missing_value = "true", action = Set, value_name = "BOOL")]
    pub load_best_model_at_end: bool,
    /// Whether to save checkpoints and export the trained model
    #[arg(long)]
    pub save_strategy: SaveStrategy,
}

impl SavingSettings {
    /// Number of steps between checkpoints, in a run of so many steps; 0 if only the last is saved.
    pub fn save_every(&self, steps: usize) -> usize {
        self.save_steps.unwrap_or_else(|| part_of_the_run(steps))
    }

    /// Number of checkpoints that a run of so many steps saves, at most.
    pub fn checkpoints(&self, steps: usize) -> usize {
        let periodic = self.keep_period.map_or(0, |period| steps / period);
        match self.save_every(steps) {
            _ if self.load_best_model_at_end => steps,
            0 => 1 + periodic,
            every => steps.div_ceil(every) + periodic,
        }
    }

    /// Number of checkpoints that it keeps, at most.
    pub fn kept(&self, steps: usize) -> usize {
        let periodic = self.keep_period.map_or(0, |period| steps / period);
        self.save_total_limit + periodic + usize::from(self.load_best_model_at_end)
    }
}

impl Default for SavingSettings {
    fn default() -> Self {
        Self {
            output_dir: None,
            output_dat: None,
            head: None,
            save_steps: None,
            save_total_limit: 2,
            keep_period: None,
            load_best_model_at_end: false,
            save_strategy: SaveStrategy::Steps,
        }
    }
}

/// Settings of evaluation and progress.
#[derive(Debug, Clone, PartialEq, Args, Serialize, Deserialize)]
#[serde(default)]
#[command(next_help_heading = "Logging")]
pub struct LoggingSettings {
    /// Number of steps between evaluations; 0 evaluates only after the last step. The default is that of checkpoints, or more
    /// if evaluations take long.
    #[arg(long, value_name = "N", alias = "steps-per-eval", help = parts_of_the_run(
        "Number of steps between evaluations; 0 evaluates only after the last step",
        &format!(
            "; a larger interval if evaluations would otherwise take more than {:.0} % of the run's time (with \
             --load-best-model-at-end or --early-stopping-patience, evaluations may take any share of it)",
            100.0 * EVALUATION_SHARE
        ),
    ))]
    pub eval_steps: Option<usize>,
    /// End the run after this many evaluations in a row without a new lowest loss
    #[arg(long, value_name = "N")]
    pub early_stopping_patience: Option<usize>,
    /// Number of steps between progress lines
    #[arg(long, value_name = "N", alias = "steps-per-report", alias = "log-every")]
    pub logging_steps: usize,
    /// Where loss, gradient norm, speed and the other figures go
    #[arg(long)]
    pub report_to: ReportTo,
    /// Prompt to answer at each evaluation; give the flag once for each prompt [default: the
    /// prompts of the first training row and of the first evaluation row]
    #[arg(long, value_name = "TEXT", alias = "prompt", allow_hyphen_values = true)]
    pub sample_prompt: Vec<String>,
    /// Write the memory in use and the time of each phase of each step to this JSON file; this makes steps slower
    #[arg(long, value_name = "FILE", alias = "train-step-vram-report")]
    pub vram_report: Option<PathBuf>,
    /// Peak speed of the device in TFLOP/s, to report model FLOPs utilization (MFU) [default: the known peak of this card, if
    /// the program knows the card]
    #[arg(long, value_name = "TFLOPS")]
    pub peak_tflops: Option<f64>,
}

impl Default for LoggingSettings {
    fn default() -> Self {
        Self {
            eval_steps: None,
            early_stopping_patience: None,
            logging_steps: 1,
            report_to: ReportTo::Jsonl,
            sample_prompt: vec![],
            vram_report: None,
            peak_tflops: None,
        }
    }
}

/// Settings that few runs change.
#[derive(Debug, Clone, PartialEq, Args, Serialize, Deserialize)]
#[serde(default)]
#[command(next_help_heading = "Advanced")]
pub struct AdvancedSettings {
    /// Loss function
    #[arg(long, alias = "loss-mode")]
    pub loss: LossKind,
    /// For debugging: how many rows of a matrix the optimizer updates in one kernel launch; 0 means all
    #[arg(long, value_name = "N", alias = "optimizer-step-chunk-rows")]
    pub step_chunk_rows: usize,
    /// Random seed for shuffling, initial weights and stochastic rounding
    #[arg(long, value_name = "N", alias = "random-seed")]
    pub seed: u64,
    /// Leave out a step whose loss or gradient is not finite; with false, the first such step ends the run
    #[arg(long, num_args = 0..=1, default_missing_value = "true", action = Set, value_name = "BOOL")]
    pub guard: bool,
    /// During each step, keep a copy of weights and optimizer state if memory allows. Blocks are updated one by one. If a
    /// gradient turns out not to be finite, some blocks may already be updated. The run then restores them from the copy; without a
    /// copy, it goes back to a checkpoint
    #[arg(long, num_args = 0..=1, default_missing_value = "true", action = Set, value_name = "BOOL")]
    pub undo_copy: bool,
}

impl Default for AdvancedSettings {
    fn default() -> Self {
        Self { loss: LossKind::CrossEntropy, step_chunk_rows: 0, seed: 42, guard: true, undo_copy: true }
    }
}

/// Largest weight of a file, and of a row.
pub const MOST_WEIGHT: f64 = 1000.0;

/// The smallest and the largest value of each number. Counts end at 2^20, so that products of three of them
/// cannot overflow.
pub const RANGES: [(&str, f64, f64); 28] = [
    ("train_last_layers", 0.0, MOST),
    ("val_split", 0.0, 0.9),
    ("max_seq_length", SHORTEST_SEQUENCE as f64, MOST),
    ("max_rows", 1.0, 9.2e18),
    ("bf16_last_blocks", 0.0, MOST),
    ("quantize_from", 0.0, 0.99),
    ("damped_finish", 0.0, 0.9),
    ("num_train_epochs", 1e-6, 1e6),
    ("learning_rate", 0.0, 1.0),
    ("batch_size", 1.0, MOST),
    ("gradient_accumulation_steps", 1.0, MOST),
    ("max_steps", 1.0, MOST),
    ("warmup_steps", 0.0, 1e9),
    ("max_grad_norm", 0.0, f64::MAX),
    ("weight_decay", 0.0, 10.0),
    ("adam_beta1", 0.0, 0.999_999),
    ("adam_beta2", 0.0, 0.999_999),
    ("adam_epsilon", 1e-30, 1.0),
    ("step_chunk_rows", 0.0, MOST),
    ("save_steps", 0.0, f64::MAX),
    ("save_total_limit", LEAST_KEPT as f64, MOST),
    ("keep_period", 1.0, f64::MAX),
    ("eval_steps", 0.0, f64::MAX),
    ("early_stopping_patience", 1.0, MOST),
    ("logging_steps", 1.0, MOST),
    ("peak_tflops", 1e-3, f64::MAX),
    ("seed", 0.0, 9.2e18),
    ("data_weights", 0.001, MOST_WEIGHT),
];

const MOST: f64 = (1 << 20) as f64;

/// The lowest `--save-total-limit`.
pub const LEAST_KEPT: usize = 2;

/// Settings that a resumed run may change: they change no number that a step computes from the weights before it, or
/// extend the run.
pub(super) const FREE: [&str; 22] = [
    "max_steps",
    "num_train_epochs",
    "guard",
    "undo_copy",
    "output_dir",
    "output_dat",
    "eval_steps",
    "save_steps",
    "logging_steps",
    "save_total_limit",
    "keep_period",
    "load_best_model_at_end",
    "early_stopping_patience",
    "report_to",
    "sample_prompt",
    "vram_report",
    "memory_limit",
    "recompute",
    "peak_tflops",
    "token_cache",
    "device",
    "compute_dtype",
];

/// Inputs of a run. Their contents are compared with those of the checkpoint, so that they may lie elsewhere.
pub(super) const INPUTS: [&str; 5] = ["model", "init_config", "tokenizer", "data", "eval_data"];

impl Settings {
    /// Every path that is given, with its flag.
    pub fn paths(&mut self) -> impl Iterator<Item = (&'static str, &mut PathBuf)> {
        let Self { model, data, saving, logging, .. } = self;
        let single = [
            ("--model", &mut model.model),
            ("--init-config", &mut model.init_config),
            ("--tokenizer", &mut model.tokenizer),
            ("--eval-data", &mut data.eval_data),
            ("--token-cache", &mut data.token_cache),
            ("--output-dir", &mut saving.output_dir),
            ("--output-dat", &mut saving.output_dat),
            ("--vram-report", &mut logging.vram_report),
        ];
        let single = single.into_iter().filter_map(|(flag, path)| Some((flag, path.as_mut()?)));
        single.chain(data.data.iter_mut().map(|path| ("--data", path)))
    }

    /// Number of blocks at the end of a model of `layers` blocks whose linear layers are not quantized: as wanted, else
    /// those that are advised for recipe nvfp4. NVFP4 master weights exclude them.
    pub fn bf16_last_blocks(&self, layers: usize) -> usize {
        let packed = self.memory.master_weights == Some(MasterKind::Nvfp4);
        let advised = matches!(self.recipe.recipe, Recipe::Nvfp4(_)) && !packed;
        self.recipe.bf16_last_blocks.unwrap_or(if advised { layers.div_ceil(BF16_BLOCK_IN) } else { 0 })
    }

    /// Whether a run chooses a step by comparing evaluations.
    pub fn compares_evaluations(&self) -> bool {
        self.logging.early_stopping_patience.is_some() || self.saving.load_best_model_at_end
    }
}
