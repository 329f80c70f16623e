//! Every flag: its name, the names other tools give it, its help. Plain data; [`crate::plan`] gives
//! it meaning. The same names with `_` are the keys of a config file.

use crate::{
    data::read::{Format, LossOn, Overlong},
    device::DeviceChoice,
    train::schedule::Shape,
    train::step::{Clip, StepMode},
};
use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::{Deserialize, Serialize};
use std::{ffi::OsString, path::PathBuf};

/// Train Qwen3 in NVFP4, export it and talk to it.
#[derive(Debug, Parser)]
#[command(name = "train-cli", version, about, after_help = EXIT_CODES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const EXIT_CODES: &str = "Exit codes: 0 done, 1 system error, 2 usage or configuration, 3 invalid data, \
4 out of device memory, 5 diverged, 6 corrupt or not verified, 7 device, 101 a bug of ours.\n\
Try it without any file: train-cli fit --demo";

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train all parameters of a Qwen3 model.
    Fit(Box<FitArgs>),
    /// Say what memory a run of `fit` with the same flags would take.
    Estimate(Box<FitArgs>),
    /// Write a trained checkpoint as a .dat file and check it.
    ExportDat(ExportArgs),
    /// Convert a model between .dat and safetensors.
    Convert(ConvertArgs),
    /// List the tensors of a .dat or safetensors file.
    Inspect(InspectArgs),
    /// Answer a prompt.
    Generate(GenerateArgs),
    /// Compare with values that Hugging Face computed.
    Parity(ParityArgs),
    /// Time what a device can do.
    Bench(BenchArgs),
}

/// Flags that a person may spell with `_` instead of `-`: `--learning_rate` is `--learning-rate`.
pub fn with_dashes(args: impl Iterator<Item = OsString>) -> impl Iterator<Item = OsString> {
    args.map(|arg| match arg.to_str() {
        Some(text) if text.starts_with("--") => {
            let (flag, value) = text.split_once('=').map_or((text, None), |(f, v)| (f, Some(v)));
            let flag = flag.replace('_', "-");
            value.map_or(flag.clone(), |v| format!("{flag}={v}")).into()
        }
        _ => arg,
    })
}

/// `--recipe`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum RecipeArg {
    /// No quantisation.
    Bf16,
    /// NVFP4 weights, straight-through.
    W4,
    /// NVFP4 weights and activations.
    W4a4,
    /// All three products in NVFP4: 16x16 weight blocks, Hadamard, stochastic gradients.
    Nvfp4,
}

/// `--nvfp4-without`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Nvfp4Part {
    /// 16x16 weight blocks.
    SquareBlocks,
    /// The Hadamard transform of wgrad's operands.
    Hadamard,
    /// Stochastic rounding of gradients.
    Stochastic,
}

/// `--compute-dtype`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum DtypeArg {
    /// bf16 on CUDA, f32 elsewhere.
    Auto,
    /// f32, no tensor cores.
    #[value(alias = "float32")]
    F32,
    /// f32 storage, TF32 tensor cores where there are any.
    Tf32,
    /// f16.
    #[value(alias = "float16")]
    F16,
    /// bf16.
    #[value(alias = "bfloat16")]
    Bf16,
}

/// `--scales`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum ScalesArg {
    /// E4M3 block scales only, as the origin's files.
    Single,
    /// And one f32 scale a tensor.
    Two,
}

/// `--optimizer-state-mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum StateArg {
    /// f32 moments.
    F32,
    /// 8-bit block-wise moments.
    #[value(alias = "8bit", alias = "8-bit")]
    Int8,
    /// bf16 moments, rounded stochastically.
    Bf16,
    /// 4-bit block-wise moments.
    #[value(alias = "4bit", alias = "4-bit")]
    Int4,
}

/// `--master-weights`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum MasterArg {
    /// bf16 where activations are bf16, else f32.
    Auto,
    /// f32.
    F32,
    /// bf16 and 8 more bits for the optimizer.
    Bf16Residual,
    /// bf16, rounded stochastically.
    Bf16,
    /// bf16, rounded to nearest: loses small steps.
    Bf16Nearest,
    /// NVFP4, rounded stochastically; the embedding in bf16.
    Nvfp4,
}

/// `--save-strategy`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum SaveArg {
    /// Checkpoints and an export.
    Steps,
    /// Neither: to measure.
    No,
}

/// `--loss`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum LossArg {
    /// Cross-entropy.
    #[value(alias = "cross-entropy", alias = "token-ce")]
    Ce,
    /// L1 between hidden states and the next tokens' embeddings: a debug loss.
    #[value(alias = "l1", alias = "scalar-l1")]
    Scalar,
}

/// Flags of `fit`. Unset ones take the config file's value, then the default.
#[derive(Debug, Clone, Default, PartialEq, Args, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FitArgs {
    /// Train an embedded tiny model on embedded data, here and now, on the CPU
    #[arg(long, conflicts_with = "config")]
    #[serde(skip)]
    pub demo: bool,
    /// Read settings from a TOML file; flags win
    #[arg(short, long, value_name = "FILE")]
    #[serde(skip)]
    pub config: Option<PathBuf>,
    /// Show the resolved plan and stop
    #[arg(long)]
    #[serde(skip)]
    pub dry_run: bool,
    /// Go on with a run: its folder, one of its checkpoints, or `latest` of --output-dir
    #[arg(long, value_name = "PATH", num_args = 0..=1, default_missing_value = "latest", alias = "resume")]
    #[serde(skip)]
    pub resume_from_checkpoint: Option<String>,
    /// Replace an older run in the output folder
    #[arg(long)]
    #[serde(skip)]
    pub overwrite: bool,

    /// Model folder, .dat file or .safetensors file
    #[arg(short, long, value_name = "PATH", alias = "model-name-or-path", alias = "input-dat", alias = "weight")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<PathBuf>,
    /// Start from random weights of this config.json
    #[arg(long, value_name = "FILE", conflicts_with = "model")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub init_config: Option<PathBuf>,
    /// Folder of tokenizer, chat template and, where the model has none, config.json [default: the model's]
    #[arg(long, value_name = "DIR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<PathBuf>,
    /// Training file; may be given more than once
    #[arg(short, long, value_name = "FILE", alias = "dataset", alias = "train-data", alias = "train-file")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<Vec<PathBuf>>,
    /// How often the rows of each --data file are repeated, in their order: 2, 0.5, … [default: 1]
    #[arg(long, value_name = "N", value_delimiter = ',')]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data_weights: Option<Vec<f64>>,
    /// Evaluation file
    #[arg(long, value_name = "FILE", alias = "valid-data")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eval_data: Option<PathBuf>,
    /// Share of the training rows that are held out, at most 200 rows [default: 0.02]
    #[arg(long, value_name = "SHARE", alias = "val-size", alias = "val-set-size")]
    pub val_split: Option<f64>,
    /// File format [default: auto]
    #[arg(long, alias = "format-type")]
    pub format: Option<Format>,
    /// Train on random tokens instead of a file
    #[arg(long, num_args = 0..=1, default_missing_value = "true")]
    pub synthetic: Option<bool>,
    /// What is supervised [default: assistant]
    #[arg(long)]
    pub loss_on: Option<LossOn>,
    /// The loss [default: ce]
    #[arg(long, alias = "loss-mode")]
    pub loss: Option<LossArg>,
    /// Longest sequence in tokens [default: 2048, or what the model takes]
    #[arg(
        long,
        value_name = "N",
        alias = "max-length",
        alias = "seq-len",
        alias = "cutoff-len",
        alias = "max-seq-len"
    )]
    pub max_seq_length: Option<usize>,
    /// Rows longer than that [default: drop]
    #[arg(long, alias = "excess-length-strategy")]
    pub overlong: Option<Overlong>,
    /// Pack several rows into one sequence; they do not see each other
    #[arg(long, num_args = 0..=1, default_missing_value = "true", alias = "sample-packing")]
    pub packing: Option<bool>,
    /// Keep tokenised rows in this folder, and read them from there
    #[arg(long, value_name = "DIR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_cache: Option<PathBuf>,

    /// Which products run on NVFP4 operands [default: w4]
    #[arg(long)]
    pub recipe: Option<RecipeArg>,
    /// Parts of recipe nvfp4 to leave out
    #[arg(long, value_name = "PART", value_delimiter = ',')]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nvfp4_without: Option<Vec<Nvfp4Part>>,
    /// Last blocks whose linear layers are not quantised [default: 0]
    #[arg(long, value_name = "N")]
    pub bf16_last_blocks: Option<usize>,
    /// Share of the run after which the recipe begins to quantise [default: 0]
    #[arg(long, value_name = "SHARE", alias = "quantize-from")]
    pub quantise_from: Option<f64>,
    /// Scale levels of NVFP4 weights [default: those of the model's file, else two]
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scales: Option<ScalesArg>,
    /// Number format of activations and dense products [default: auto]
    #[arg(long, alias = "dtype", alias = "precision")]
    pub compute_dtype: Option<DtypeArg>,
    /// auto, cpu, cuda, cuda:N or vulkan [default: auto]
    #[arg(long)]
    #[serde(with = "device_text")]
    pub device: Option<DeviceChoice>,

    /// Highest learning rate [default: 1e-5]
    #[arg(long, value_name = "RATE", alias = "lr")]
    pub learning_rate: Option<f64>,
    /// Its shape after warm-up [default: cosine]
    #[arg(long, alias = "lr-schedule", alias = "scheduler")]
    pub lr_scheduler_type: Option<Shape>,
    /// Warm-up: steps, or a share of the run below 1 [default: 0.03]
    #[arg(long, value_name = "N", alias = "warmup-ratio")]
    pub warmup_steps: Option<f64>,
    /// Passes over the data [default: 1]
    #[arg(long, value_name = "N", alias = "epochs")]
    pub num_train_epochs: Option<f64>,
    /// Optimizer steps; wins over epochs
    #[arg(long, value_name = "N", alias = "steps", alias = "iters")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_steps: Option<usize>,
    /// Sequences that go through the model together [default: 1]
    #[arg(long, value_name = "N", alias = "per-device-train-batch-size", alias = "micro-batch-size")]
    pub batch_size: Option<usize>,
    /// Batches in an optimizer step [default: 1]
    #[arg(long, value_name = "N", alias = "grad-accumulation-steps", alias = "grad-accum")]
    pub gradient_accumulation_steps: Option<usize>,
    /// Clip the gradient's global norm; 0 is off [default: 1.0]
    #[arg(long, value_name = "NORM", alias = "grad-clip")]
    pub max_grad_norm: Option<f64>,
    /// Decoupled weight decay, not on norms and embedding [default: 0.0]
    #[arg(long)]
    pub weight_decay: Option<f64>,
    /// [default: 0.9]
    #[arg(long, alias = "beta1")]
    pub adam_beta1: Option<f64>,
    /// [default: 0.999]
    #[arg(long, alias = "beta2")]
    pub adam_beta2: Option<f64>,
    /// [default: 1e-8]
    #[arg(long, alias = "eps")]
    pub adam_epsilon: Option<f64>,
    /// One graph, or block by block in little memory [default: streaming]
    #[arg(long)]
    pub step_mode: Option<StepMode>,
    /// The norm that clipping goes by: this step's, or the last step's [default: this step's, where that costs no second pass]
    #[arg(long)]
    pub clip: Option<Clip>,
    /// Over this last share of the run, freeze block after block on its NVFP4 codes [default: 0]
    #[arg(long, value_name = "SHARE")]
    pub damped_finish: Option<f64>,
    /// Refuse or stop a run that needs more device memory: 20GiB
    #[arg(long, value_name = "SIZE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_limit: Option<String>,
    /// The device's peak, to report MFU against
    #[arg(long, value_name = "TFLOPS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak_tflops: Option<f64>,
    /// How weights are stored [default: auto]
    #[arg(long, alias = "master-dtype")]
    pub master_weights: Option<MasterArg>,
    /// How AdamW's moments are stored [default: int8]
    #[arg(long)]
    pub optimizer_state_mode: Option<StateArg>,
    /// Rows of a matrix that the optimizer updates in one launch; 0 takes all [default: 0]
    #[arg(long, value_name = "N", alias = "optimizer-step-chunk-rows")]
    pub step_chunk_rows: Option<usize>,
    /// Train only the last N blocks and the final norm; 0 trains everything [default: 0]
    #[arg(long, value_name = "N", alias = "num-layers")]
    pub train_last_layers: Option<usize>,

    /// Run folder [default: runs/TIME_MODEL]
    #[arg(short, long, value_name = "DIR", alias = "out-dir", alias = "output", alias = "checkpoint-dir")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_dir: Option<PathBuf>,
    /// Also write the trained model to this .dat file
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output_dat: Option<PathBuf>,
    /// Evaluate every N steps; 0 only at the end [default: a twentieth of the run]
    #[arg(long, value_name = "N", alias = "steps-per-eval")]
    pub eval_steps: Option<usize>,
    /// Save a checkpoint every N steps; 0 only at the end [default: a twentieth of the run]
    #[arg(long, value_name = "N", alias = "save-every", alias = "save-every-steps")]
    pub save_steps: Option<usize>,
    /// Whether to save at all [default: steps]
    #[arg(long)]
    pub save_strategy: Option<SaveArg>,
    /// Print every N steps [default: 1]
    #[arg(long, value_name = "N", alias = "steps-per-report", alias = "log-every")]
    pub logging_steps: Option<usize>,
    /// Checkpoints that are kept, at least 2 [default: 2]
    #[arg(long, value_name = "N")]
    pub save_total_limit: Option<usize>,
    /// Prompt that is answered at each evaluation; may be given more than once
    #[arg(long, value_name = "TEXT", alias = "prompt")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sample_prompt: Option<Vec<String>>,
    /// Write memory in use at each phase of each step to this JSON file
    #[arg(long, value_name = "FILE", alias = "train-step-vram-report")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vram_report: Option<PathBuf>,
    /// Of shuffling, initial weights and everything random [default: 42]
    #[arg(long, alias = "random-seed", value_parser = clap::value_parser!(u64).range(..=i64::MAX as u64))]
    pub seed: Option<u64>,
}

mod device_text {
    use super::DeviceChoice;
    use serde::{Deserialize, Deserializer, Serializer};

    #[allow(clippy::ref_option)]
    pub(super) fn serialize<S: Serializer>(d: &Option<DeviceChoice>, s: S) -> Result<S::Ok, S::Error> {
        match d {
            Some(d) => s.serialize_str(&d.to_string()),
            None => s.serialize_none(),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Option<DeviceChoice>, D::Error> {
        let text = String::deserialize(d)?;
        text.parse().map(Some).map_err(serde::de::Error::custom)
    }
}

/// Flags of `export-dat`.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// Checkpoint folder that `fit` saved
    #[arg(long, value_name = "DIR")]
    pub checkpoint: PathBuf,
    /// The .dat file to write
    #[arg(long, value_name = "FILE")]
    pub output_dat: PathBuf,
    /// Keep this file's order, keys, types and scale levels
    #[arg(long, value_name = "FILE")]
    pub like: Option<PathBuf>,
    /// Scale levels [default: the run's]
    #[arg(long, conflicts_with = "like")]
    pub scales: Option<ScalesArg>,
    /// Where the check runs: auto, cpu, cuda, cuda:N or vulkan
    #[arg(long, default_value = "auto")]
    pub device: DeviceChoice,
}

/// `--to`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ContainerArg {
    /// The origin's container.
    Dat,
    /// One safetensors file; as a model it needs config.json and tokenizer beside it.
    Safetensors,
}

/// `--dtype` of `convert`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WeightArg {
    /// Linear layers NVFP4, the rest f16.
    Nvfp4,
    /// f16.
    F16,
    /// bf16.
    Bf16,
    /// f32.
    F32,
}

/// Flags of `convert`.
#[derive(Debug, Args)]
pub struct ConvertArgs {
    /// Model folder, .dat file or .safetensors file
    pub input: PathBuf,
    /// File to write
    pub output: PathBuf,
    /// Container
    #[arg(long)]
    pub to: ContainerArg,
    /// What weights become
    #[arg(long)]
    pub dtype: WeightArg,
    /// Scale levels of NVFP4
    #[arg(long, default_value = "two")]
    pub scales: ScalesArg,
}

/// Flags of `inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// A .dat or safetensors file, or a model folder
    pub path: PathBuf,
    /// One JSON object a line
    #[arg(long)]
    pub json: bool,
    /// Read every byte: scales, finite values, checkpoint manifest
    #[arg(long)]
    pub verify: bool,
}

/// Flags of `generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// Model folder, .dat file or .safetensors file
    #[arg(short, long, value_name = "PATH", alias = "weight")]
    pub model: PathBuf,
    /// Folder of tokenizer, chat template and, where the model has none, config.json [default: the model's]
    #[arg(long, value_name = "DIR")]
    pub tokenizer: Option<PathBuf>,
    /// What to ask; `-` reads standard input
    #[arg(short, long)]
    pub prompt: String,
    /// System message
    #[arg(long, alias = "system")]
    pub system_prompt: Option<String>,
    /// Take the prompt as it is, without the chat template
    #[arg(long, conflicts_with = "system_prompt")]
    pub raw: bool,
    /// Let a thinking model think, or not
    #[arg(long, num_args = 0..=1, default_missing_value = "true")]
    pub thinking: Option<bool>,
    /// Most tokens of the answer
    #[arg(long, alias = "max-new-tokens", default_value_t = 256)]
    pub max_tokens: usize,
    /// 0 is greedy [default: the model's]
    #[arg(long, alias = "temp")]
    pub temperature: Option<f32>,
    /// Nucleus [default: the model's]
    #[arg(long, alias = "topp")]
    pub top_p: Option<f32>,
    /// Candidates; 0 is all [default: the model's]
    #[arg(long)]
    pub top_k: Option<usize>,
    /// Least likelihood relative to the likeliest
    #[arg(long, default_value_t = 0.0)]
    pub min_p: f32,
    /// 1 is off [default: the model's]
    #[arg(long)]
    pub repetition_penalty: Option<f32>,
    /// Seed of the draws
    #[arg(long, default_value_t = 42)]
    pub seed: u64,
    /// Quantise activations too, as W4A4 inference does
    #[arg(long)]
    pub w4a4: bool,
    /// One JSON object instead of streamed text
    #[arg(long)]
    pub json: bool,
    /// auto, cpu, cuda, cuda:N or vulkan
    #[arg(long, default_value = "auto")]
    pub device: DeviceChoice,
    /// Number format
    #[arg(long, alias = "dtype", default_value = "auto")]
    pub compute_dtype: DtypeArg,
}

/// Flags of `parity`.
#[derive(Debug, Args)]
pub struct ParityArgs {
    /// Model folder
    #[arg(short, long, value_name = "DIR")]
    pub model: PathBuf,
    /// What Hugging Face computed: tests/golden/make_parity_fixture.py makes it
    #[arg(long, value_name = "FILE")]
    pub expected: PathBuf,
    /// Write our values under the same keys
    #[arg(long, value_name = "FILE")]
    pub dump: Option<PathBuf>,
    /// One JSON object a line
    #[arg(long)]
    pub json: bool,
    /// auto, cpu, cuda, cuda:N or vulkan
    #[arg(long, default_value = "auto")]
    pub device: DeviceChoice,
    /// Number format [default: f32, without tensor cores]
    #[arg(long, alias = "dtype", default_value = "f32")]
    pub compute_dtype: DtypeArg,
}

/// Flags of `bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// What to time
    #[arg(value_enum)]
    pub what: BenchWhat,
    /// Only rows whose name contains this
    #[arg(long, default_value = "")]
    pub filter: String,
    /// One JSON object a line
    #[arg(long)]
    pub json: bool,
    /// TFLOP/s that a product can reach there, for the last column: doc/bench_torch.py measures cuBLAS
    #[arg(long, value_name = "TFLOPS")]
    pub matrix_ceiling: Option<f64>,
    /// auto, cuda, cuda:N or vulkan
    #[arg(long, default_value = "auto")]
    pub device: DeviceChoice,
}

/// What `bench` times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BenchWhat {
    /// Every kernel at the shapes of Qwen3-4B.
    Kernels,
}
