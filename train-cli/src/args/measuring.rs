//! Flags of the commands that measure a model or a device: `eval`, `parity` and `bench`.

use super::talking::{CacheArgs, ModelArgs};
use crate::{
    settings::{AUTO, Auto, CacheDtype, DeviceChoice, Format, HeadFormat, LossOn, defaults::longest, parser},
    tolerance,
};
use backend_nvfp4::{Precision, Recipe};
use clap::{Args, Subcommand, ValueEnum, builder::NonEmptyStringValueParser};
use model_qwen3::bytes::FloatType;
use std::path::PathBuf;

/// What `eval` measures.
#[derive(Debug, Subcommand)]
pub enum EvalCommand {
    /// Measure the mean loss per token of some files, and the perplexity
    Loss(EvalLossArgs),
    /// Hide a number in long texts, and count how often the model finds it
    Needle(NeedleArgs),
}

/// Flags of `eval needle`.
#[derive(Debug, Args)]
pub struct NeedleArgs {
    /// Which model is asked.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Number format of the KV cache.
    #[command(flatten)]
    pub cache: CacheArgs,
    /// Lengths to test, in tokens, separated by commas; a length includes the question and the answer
    #[arg(long, value_name = "N", value_delimiter = ',', required = true)]
    pub lengths: Vec<usize>,
    /// How many depths to test. A depth is a place in a text where the number is hidden. The depths are spread evenly from the
    /// beginning of the text to its end; with 1, the only depth is the middle. Each text hides its number at one depth
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub depths: usize,
    /// Number of texts for each length and each depth
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub tries: usize,
    /// Number of digits of the hidden number; no digit occurs twice
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub digits: usize,
    /// Random seed for texts and numbers
    #[arg(long, value_name = "N", default_value_t = 42)]
    pub seed: u64,
    /// Write the texts as training rows to this .jsonl file, and do not ask the model. When you later
    /// measure a model that was trained on these rows, give another --seed
    #[arg(long, value_name = "FILE")]
    pub write_rows: Option<PathBuf>,
    /// Print one JSON object for each length
    #[arg(long)]
    pub json: bool,
}

/// Flags of `eval loss`.
#[derive(Debug, Args)]
pub struct EvalLossArgs {
    /// Which model predicts.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Files to measure, folders of such files, or patterns such as 'rows/*.jsonl'; the formats are those of training files
    #[arg(short, long, value_name = "PATH", num_args = 1.., required = true)]
    pub data: Vec<PathBuf>,
    /// Format of the files
    #[arg(long, default_value = AUTO, value_parser = parser::<Auto<Format>>())]
    pub format: Auto<Format>,
    /// What stands between the documents of a .txt or .md file, for example '<|endoftext|>'. Without it the file is one
    /// document
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, value_parser = NonEmptyStringValueParser::new())]
    pub document_separator: Option<String>,
    /// Which tokens the loss counts
    #[arg(long, value_enum, default_value_t)]
    pub loss_on: LossOn,
    /// Maximum length of a sequence, in tokens.
    #[arg(long, value_name = "N")]
    #[arg(help = longest("Maximum length of a sequence, in tokens; longer ones are cut into several"))]
    pub max_seq_length: Option<std::num::NonZeroUsize>,
    /// Round the model as this recipe does in a forward pass, and then measure it: bf16 rounds nothing, w4 the weights, w4a4 and
    /// nvfp4 the weights and activations. (Weights that are NVFP4 already keep their values under every recipe.) Give the flag
    /// several times to compare recipes
    #[arg(hide_possible_values = true)]
    #[arg(long = "recipe", value_name = "RECIPE", value_parser = parser::<Recipe>(), conflicts_with = "w4a4")]
    pub recipes: Vec<Recipe>,
    /// Number of sequences that are computed together
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub batch_size: usize,
    /// Print one JSON object for each --recipe
    #[arg(long)]
    pub json: bool,
}

/// Flags of `parity`.
#[derive(Debug, Args)]
pub struct ParityArgs {
    /// Model to check: a model folder, a run folder, a checkpoint, a .dat file or a .safetensors file
    #[arg(short, long, value_name = "PATH")]
    pub model: PathBuf,
    /// Compare with values that Hugging Face computed; tests/golden/make_parity_fixture.py makes the file
    #[arg(long, value_name = "FILE")]
    pub expected: Option<PathBuf>,
    /// Compare with this model, block by block. Without this flag, --against-recipe compares the model with itself under
    /// another recipe
    #[arg(long, value_name = "PATH", conflicts_with = "expected")]
    pub against: Option<PathBuf>,
    /// Recipe for the first model, --model: its weights and activations are rounded as in a forward pass of this recipe. With
    /// bf16 nothing is rounded, and NVFP4 weights are expanded to floats of the same values [default: as `generate` rounds its
    /// weights and activations]
    #[arg(long, value_name = "RECIPE", value_parser = parser::<Recipe>(), conflicts_with = "expected")]
    #[arg(hide_possible_values = true)]
    pub recipe: Option<Recipe>,
    /// Recipe for the second model. The second model is the one that --against names; without --against, it is --model again
    /// [default: as `generate` rounds its weights and activations]
    #[arg(long, value_name = "RECIPE", value_parser = parser::<Recipe>(), conflicts_with = "expected")]
    #[arg(hide_possible_values = true)]
    pub against_recipe: Option<Recipe>,
    /// Prompt on which two models are compared
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true, conflicts_with = "expected")]
    pub prompt: Option<String>,
    /// Use the prompt unchanged, without the chat template
    // A flag that is required is not missed where it conflicts with another one, so both are said.
    #[arg(long, requires = "prompt", conflicts_with = "expected")]
    pub raw: bool,
    /// Folder that holds tokenizer and chat template, and config.json too if there is none beside a model. With --expected,
    /// no tokenizer is needed, and only config.json is read from this folder [default: each model's folder]
    #[arg(long, value_name = "DIR")]
    pub tokenizer: Option<PathBuf>,
    /// The largest relative difference of a layer that passes. `tolerance_help` has the default.
    #[arg(long, value_name = "DIFFERENCE", conflicts_with = "expected", help = tolerance_help())]
    pub tolerance: Option<f64>,
    /// Write the values that train-cli computed to this safetensors file; its tensors have the same names as those of
    /// the file for --expected
    #[arg(long, value_name = "FILE", requires = "expected", conflicts_with_all = ["against", "recipe", "against_recipe", "prompt"])]
    pub dump: Option<PathBuf>,
    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,
    /// Device to run on: auto, cpu, cuda, cuda:N or vulkan
    #[arg(long, default_value_t)]
    pub device: DeviceChoice,
    /// Number format of activations and matrix products
    #[arg(long, alias = "dtype", default_value = "f32", value_parser = parser::<Auto<Precision>>())]
    pub compute_dtype: Auto<Precision>,
}

/// Tokens of the context of `bench decode` without `--context`.
pub(crate) const DECODE_CONTEXT: u32 = 1024;
/// Tokens of the prompt of `bench prefill` without `--context`.
pub(crate) const PREFILL_CONTEXT: u32 = 4096;
/// Answers that `bench decode` makes together without `--batch-size`.
pub(crate) const BATCH_SIZES: [u16; 2] = [1, 16];
/// Whether `bench` rounds activations to NVFP4 without `--w4a4`.
pub(crate) const W4A4: bool = true;
/// How `bench` stores the head without `--head`.
pub(crate) const HEAD: HeadFormat = HeadFormat::Nvfp4;

/// The help of `parity --tolerance`.
fn tolerance_help() -> String {
    let of = |precision| tolerance::hidden(precision, 3);
    format!(
        "The embedding, each block, the final norm and the logits pass if the norm of the difference, divided by the norm of the \
         second model's values, is at most this [default: {5} if only one of the two models has weights rounded to 4 bits (dequantized \
         NVFP4 weights count as rounded), or only one has 4-bit activations. Otherwise the largest of the numbers that apply: {0} if the \
         models compute in f32, {1:.2} in bf16, {2:.3} in f16 and TF32; {3:.4} if only one of them stores a weight in f16; {4:.3} if only \
         one stores a weight in bf16. For a model of more than 3 blocks, each of these numbers but {5} is multiplied by the square root \
         of a third of the number of blocks]",
        of(Precision::F32),
        of(Precision::Bf16),
        of(Precision::F16),
        tolerance::stored(FloatType::F16, 3),
        tolerance::stored(FloatType::Bf16, 3),
        tolerance::NVFP4,
    )
}

/// Flags of `bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// What to measure
    #[arg(value_enum)]
    pub what: BenchWhat,
    /// bench kernels: measure only kernels whose name in the output contains this text
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub filter: String,
    /// bench decode and prefill: a model's config.json (not a file of settings). What is measured is a model of these sizes with
    /// random weights [default: the sizes of Qwen3-4B]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Tokens in front of what is measured.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..), help = format!(
        "bench decode: number of tokens in the context when an answer begins. bench prefill: number of tokens of the prompt \
         [default: {DECODE_CONTEXT} for decode, {PREFILL_CONTEXT} for prefill]"
    ))]
    pub context: Option<u32>,
    /// Answers that are made together.
    #[arg(long = "batch-size", value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64), help = format!(
        "bench decode: number of answers that are generated at the same time. Give the flag several times to compare numbers [default: {} \
         and {}]",
        BATCH_SIZES[0], BATCH_SIZES[1]
    ))]
    pub batch_sizes: Vec<u16>,
    /// Whether activations are rounded.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL", help = format!(
        "bench decode and prefill: whether activations are rounded to NVFP4; the weights always are [default: {W4A4}]"
    ))]
    pub w4a4: Option<bool>,
    /// The number format of the head.
    #[arg(long, hide_possible_values = true, help = format!(
        "bench decode and prefill: number format in which the head is read: nvfp4 or bf16 [default: {}]",
        HEAD.name()
    ))]
    pub head: Option<HeadFormat>,
    /// bench decode and prefill: number format in which the keys and values of past tokens (KV cache) are kept
    #[arg(long, value_name = "FORMAT", default_value = AUTO, value_parser = parser::<CacheDtype>())]
    pub kv_cache_dtype: CacheDtype,
    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,
    /// bench kernels: the highest speed of a matrix product that was measured on your card, in TFLOP/s
    /// (doc/notebook/bench_torch.py measures it). The last column then shows the speed of each product as a share of it
    #[arg(long, value_name = "TFLOPS")]
    pub matrix_ceiling: Option<f64>,
    /// GPU to measure: auto, cuda, cuda:N or vulkan. The CPU is not measured
    #[arg(long, default_value_t)]
    pub device: DeviceChoice,
}

/// What `bench` measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BenchWhat {
    /// The kernels that take most of the time, at the shapes of Qwen3-4B
    Kernels,
    /// Speed of answering, in tokens per second, of a model with random weights
    Decode,
    /// Speed of reading a prompt, in tokens per second, of a model with random weights
    Prefill,
}
