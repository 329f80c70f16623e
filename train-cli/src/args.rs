//! The command line: commands and their flags. Plain data; the settings of a training run, with their
//! flags, are in [`crate::settings`].

use crate::settings::{
    Auto, DeviceChoice, Format, HeadFormat, Layer, LossOn, ResumeFrom,
    fields::{COMMON, longest},
    parser, with_flags,
};
use backend_nvfp4::{Precision, Recipe, Scaling};
use clap::{ArgMatches, Args, FromArgMatches, Parser, Subcommand, ValueEnum, builder::NonEmptyStringValueParser};
use std::{ffi::OsString, net::IpAddr, path::PathBuf};

/// Train Qwen3 to work with weights in NVFP4, export the result and talk to it.
///
/// NVFP4 is a 4-bit number format: 16 values share one 8-bit scale, and a tensor has one more f32 scale.
#[derive(Debug, Parser)]
#[command(name = "train-cli", version, long_version = VERSION, about, after_help = EXIT_CODES)]
pub struct Cli {
    /// The command to run.
    #[command(subcommand)]
    pub command: Command,
}

/// What `--version` prints.
const VERSION: &str = concat!(
    env!("CARGO_PKG_VERSION"),
    " (",
    env!("BUILT_FROM"),
    ")\nBurn ",
    env!("BURN_VERSION"),
    ", CubeCL ",
    env!("CUBECL_VERSION"),
    "\nbackends: CPU (NdArray), CUDA, Vulkan"
);

const EXIT_CODES: &str = "Exit codes: 0 success, 1 system error, 2 wrong usage or configuration, 3 invalid data, \
4 too little memory on the device or the machine, 5 training diverged, 6 corrupt file, failed check of an export or difference found by parity, 7 device error, 101 a bug in train-cli, 128 plus the number of a signal that ended it (serve ends with 0).\n\
Try it without any file: train-cli fit --demo";

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train all parameters of a Qwen3 model
    Fit(Box<FitArgs>),
    /// Estimate the memory that a training run with these flags needs; takes the flags of fit except --demo and --dry-run, and trains nothing
    #[command(mut_arg("demo", |demo| demo.hide(true)), mut_arg("dry_run", |it| it.hide(true)))]
    Estimate(Box<EstimateArgs>),
    /// Look at training data before a run: rows as the model sees them, and what a run would leave out; make rows from templates
    #[command(subcommand)]
    Data(DataCommand),
    /// Write a model as a .dat file with 4-bit weights, and check that the file works
    ExportDat(ExportArgs),
    /// Write a model as a Hugging Face folder for other programs: in bf16, or in NVFP4 as compressed-tensors or ModelOpt
    ExportHf(ExportHfArgs),
    /// Convert a model to a .dat, safetensors or GGUF file
    Convert(ConvertArgs),
    /// List the tensors of a model
    Inspect(InspectArgs),
    /// Answer a prompt
    Generate(GenerateArgs),
    /// Hold a conversation
    Chat(ChatArgs),
    /// Answer over HTTP, as OpenAI's interface does, and show a page to talk to the model
    Serve(ServeArgs),
    /// Measure how well a model predicts text, and how far back it finds a number in it
    #[command(subcommand)]
    Eval(EvalCommand),
    /// Look at training runs: list them, show one, compare several
    #[command(subcommand)]
    Runs(RunsCommand),
    /// Compare a model's results with values that Hugging Face computed, or compare two models, or one model with two kinds of rounding
    Parity(ParityArgs),
    /// Check whether this machine has what the program needs, say how to install what is missing, and test its GPUs
    Doctor(DoctorArgs),
    /// Measure the speed of a device
    Bench(BenchArgs),
    /// Print the script that completes commands and flags in a shell
    Completions(CompletionsArgs),
    /// Print the manual page of the program, or of a command; read it with: train-cli man fit | man -l -
    Man(ManArgs),
}

/// Accepts flags that are typed with `_` for `-`: `--learning_rate` is `--learning-rate`.
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

/// The command line of `fit`: how to start, and the settings that were typed.
#[derive(Debug, Clone)]
pub struct FitArgs {
    /// How to start.
    pub launch: StartArgs,
    /// The settings that were typed; they win over a config file and over defaults.
    pub typed: Layer,
}

impl FromArgMatches for FitArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self { launch: StartArgs::from_arg_matches(matches)?, typed: Layer::of_flags(matches)? })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for FitArgs {
    fn augment_args(command: clap::Command) -> clap::Command {
        StartArgs::augment_args(with_flags(command))
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

/// Flags of `fit` that are no settings of the run: a config file and a checkpoint do not hold them.
#[derive(Debug, Clone, Default, Args)]
pub struct StartArgs {
    /// Train a tiny built-in model on built-in data, on the CPU unless --device says otherwise; needs no files
    #[arg(long, conflicts_with = "config", display_order = 0, help_heading = COMMON)]
    pub demo: bool,
    /// Resume an interrupted run: its run folder, or one of its checkpoints; without a value, the run of --output-dir
    #[arg(long, value_name = "PATH", num_args = 0..=1, default_missing_value = "latest", alias = "resume")]
    #[arg(help_heading = "Saving")]
    pub resume_from_checkpoint: Option<ResumeFrom>,
    /// Delete the older run in the run folder first
    #[arg(long, help_heading = "Saving")]
    pub overwrite: bool,
    /// Read settings from this TOML file; flags on the command line override the file
    #[arg(short, long, value_name = "FILE", help_heading = "Advanced")]
    pub config: Option<PathBuf>,
    /// Read the data, check everything that can be checked before training, print the plan and all settings, and stop;
    /// writes only the files of --demo and of --token-cache
    #[arg(long, help_heading = "Advanced")]
    pub dry_run: bool,
}

/// Flags of `estimate`.
#[derive(Debug, Args)]
pub struct EstimateArgs {
    /// Flags of the run.
    #[command(flatten)]
    pub fit: FitArgs,
    /// Print one JSON object, with all memory in bytes
    #[arg(long, help_heading = "Advanced")]
    pub json: bool,
}

/// What `data` shows.
#[derive(Debug, Subcommand)]
pub enum DataCommand {
    /// Show the first rows as the model sees them, and mark the tokens that the loss counts
    Preview(PreviewArgs),
    /// Count rows and tokens, and name the rows that a run would leave out
    Stats(StatsArgs),
    /// Make rows from a recipe: templates whose slots are filled from pools of texts; and show how often each text occurs
    Make(MakeArgs),
}

/// Flags of `data make`.
#[derive(Debug, Args)]
pub struct MakeArgs {
    /// Recipe: a TOML file with templates and pools
    pub recipe: PathBuf,
    /// File to write: .tsv, or .jsonl with a list of messages in each row
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// Total number of rows, shared among the templates in proportion to their own counts [default: the recipe's]
    #[arg(long, value_name = "N")]
    pub count: Option<usize>,
    /// Random seed for what is drawn, and for the order of the rows if the recipe shuffles them [default: the recipe's, else 0]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Replace an older file
    #[arg(long)]
    pub overwrite: bool,
    /// Print one JSON object with all counts
    #[arg(long)]
    pub json: bool,
}

/// Training files, and how they become tokens.
#[derive(Debug, Args)]
pub struct RowsArgs {
    /// Training files, folders of them, or patterns such as 'rows/*.jsonl'
    #[arg(required = true, value_name = "PATH")]
    pub files: Vec<PathBuf>,
    /// Model whose tokenizer and chat template make the tokens: a model folder, a run folder, a checkpoint or a model file
    #[arg(short, long, value_name = "PATH")]
    pub model: PathBuf,
    /// Folder that holds tokenizer and chat template, and config.json too if there is none beside the model [default: the model's
    /// folder]
    #[arg(long, value_name = "DIR")]
    pub tokenizer: Option<PathBuf>,
    /// Maximum length of a training sequence, in tokens.
    #[arg(long, value_name = "N", help = longest("Maximum length of a training sequence, in tokens"))]
    pub max_seq_length: Option<std::num::NonZeroUsize>,
    /// Format of the data files
    #[arg(long, default_value = "auto", value_parser = parser::<Auto<Format>>())]
    pub format: Auto<Format>,
    /// What stands between the documents of a .txt or .md file, for example '<|endoftext|>'. Without it the file is one
    /// document
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, value_parser = NonEmptyStringValueParser::new())]
    pub document_separator: Option<String>,
    /// Which tokens the loss counts
    #[arg(long, value_enum, default_value_t)]
    pub loss_on: LossOn,
}

/// Flags of `data preview`.
#[derive(Debug, Args)]
pub struct PreviewArgs {
    /// Which rows.
    #[command(flatten)]
    pub rows: RowsArgs,
    /// Number of rows to show
    #[arg(short = 'n', long = "rows", value_name = "N", default_value_t = 5)]
    pub count: usize,
}

/// Flags of `data stats`.
#[derive(Debug, Args)]
pub struct StatsArgs {
    /// Which rows.
    #[command(flatten)]
    pub rows: RowsArgs,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

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
    /// Lengths of the texts with question and answer, in tokens, separated by commas
    #[arg(long, value_name = "N", value_delimiter = ',', required = true)]
    pub lengths: Vec<usize>,
    /// At how many positions the number is hidden, spread from the beginning of the text to its end
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub depths: usize,
    /// Number of texts for each length and each position of the number
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub tries: usize,
    /// Digits of the hidden number; no digit occurs twice
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub digits: usize,
    /// Random seed for texts and numbers
    #[arg(long, value_name = "N", default_value_t = 42)]
    pub seed: u64,
    /// Write the texts as training rows to this .jsonl file, and ask nothing. Take another --seed than for measuring
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
    /// Files to measure, folders of such files, or patterns such as 'rows/*.jsonl'; training files have the same formats
    #[arg(short, long, value_name = "PATH", num_args = 1.., required = true)]
    pub data: Vec<PathBuf>,
    /// Format of the files
    #[arg(long, default_value = "auto", value_parser = parser::<Auto<Format>>())]
    pub format: Auto<Format>,
    /// Which tokens the loss counts
    #[arg(long, value_enum, default_value_t)]
    pub loss_on: LossOn,
    /// Maximum length of a sequence, in tokens.
    #[arg(long, value_name = "N")]
    #[arg(help = longest("Maximum length of a sequence, in tokens; longer ones are cut into several"))]
    pub max_seq_length: Option<std::num::NonZeroUsize>,
    /// Round an unquantized model as this recipe does in a forward pass, and then measure it: bf16 rounds nothing, w4 the
    /// weights, w4a4 and nvfp4 the weights and activations. Give the flag several times to compare recipes
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

/// Flags of `export-dat`.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// Model to export: a checkpoint, a run folder, a model folder, a .dat file or a .safetensors file
    #[arg(short, long, alias = "checkpoint", value_name = "PATH")]
    pub model: PathBuf,
    /// Folder of tokenizer and chat template, and of config.json if the model has none [default: the model's folder]
    #[arg(long, value_name = "DIR")]
    pub tokenizer: Option<PathBuf>,
    /// .dat file to write
    #[arg(long, value_name = "FILE")]
    pub output_dat: PathBuf,
    /// Use the order, names and number formats of the tensors of this .dat file, and its kind of scales (see --scales)
    #[arg(long, value_name = "FILE")]
    pub like: Option<PathBuf>,
    /// Which scales NVFP4 weights have [default: as the model has them, if its weights are NVFP4; otherwise as --scales of its training run; without a run, two]
    #[arg(long, conflicts_with = "like", value_parser = parser::<Scaling>())]
    pub scales: Option<Scaling>,
    /// How the output head is stored [default: in NVFP4 if the file with which training began holds a head in NVFP4. Otherwise a
    /// separate head is stored in f16, and a head that is the embedding gets no copy of its own]
    #[arg(long, conflicts_with = "like")]
    pub head: Option<HeadFormat>,
    /// Device that checks the written file: auto, cpu, cuda, cuda:N or vulkan
    #[arg(long, default_value = "auto")]
    pub device: DeviceChoice,
}

/// The format that `export-hf` writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum HfFormat {
    /// Every weight in bf16
    Bf16,
    /// Linear layers in NVFP4, in the layout of compressed-tensors
    CompressedTensors,
    /// Linear layers in NVFP4, in the layout of nvidia-modelopt
    Modelopt,
}

/// How the folder of `export-hf` tells other programs to compute with activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ActivationsArg {
    /// Activations are not quantized
    Bf16,
    /// The activations that linear layers read are NVFP4. Each layer has one f32 scale for them, which --calibration-data
    /// gives
    Nvfp4,
}

/// Flags of `export-hf`.
#[derive(Debug, Args)]
pub struct ExportHfArgs {
    /// Model to export: a run folder, a checkpoint, a model folder, or a .dat or .safetensors file
    #[arg(short, long, alias = "checkpoint", value_name = "PATH")]
    pub model: PathBuf,
    /// Folder of tokenizer and chat template, and of config.json if the model has none [default: the model's folder]
    #[arg(long, value_name = "DIR")]
    pub tokenizer: Option<PathBuf>,
    /// Folder to write
    #[arg(short, long, value_name = "DIR")]
    pub output_dir: PathBuf,
    /// Format of the weights
    #[arg(long, default_value = "bf16")]
    pub format: HfFormat,
    /// How programs that load the folder compute with activations; nvfp4 needs --calibration-data, and a --format with NVFP4
    #[arg(long, default_value = "bf16")]
    pub activations: ActivationsArg,
    /// With --activations nvfp4: files whose rows the model reads to measure its activations; folders of such files, or
    /// patterns such as 'rows/*.jsonl'. The formats are those of fit --data
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub calibration_data: Vec<PathBuf>,
    /// Number of sequences of --calibration-data that the model reads, from the beginning of the files. A row of more than 2048
    /// tokens is cut into several sequences [default: 64]
    #[arg(long, value_name = "N")]
    pub calibration_rows: Option<std::num::NonZeroUsize>,
    /// Largest size of one file of weights
    #[arg(long, default_value = "5GB", alias = "shard", value_name = "SIZE")]
    pub max_shard_size: String,
    /// Replace an older export in the folder
    #[arg(long)]
    pub overwrite: bool,
    /// Device that measures activations and checks the written folder: auto, cpu, cuda, cuda:N or vulkan
    #[arg(long, default_value = "auto")]
    pub device: DeviceChoice,
}

/// The container that `convert` writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ContainerArg {
    /// The .dat container
    Dat,
    /// One safetensors file
    Safetensors,
    /// A GGUF file with config, tokenizer and chat template, for llama.cpp, Ollama and LM Studio
    Gguf,
}

/// The number format that `convert` writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WeightArg {
    /// NVFP4 for linear layers, and for the head if the model has a separate one and --head does not say otherwise; f16 for
    /// embedding and norms. (In a GGUF file the head is f16, and norms are f32)
    Nvfp4,
    /// 8-bit integers with a scale for each 32 weights; GGUF only
    Q8_0,
    /// f16
    #[value(alias = "float16")]
    F16,
    /// bf16
    #[value(alias = "bfloat16")]
    Bf16,
    /// f32
    F32,
}

/// Flags of `convert`.
#[derive(Debug, Args)]
pub struct ConvertArgs {
    /// Model to read: a model folder, a run folder, a checkpoint, or a .dat, .safetensors or .gguf file
    pub input: PathBuf,
    /// File to write. A GGUF file contains config and tokenizer. For a .dat or .safetensors file, convert puts config.json and the
    /// tokenizer's files into the same folder, unless they are there already
    pub output: PathBuf,
    /// For a GGUF output: folder that holds tokenizer and chat template, and config.json too if there is none beside the model
    /// [default: the model's folder]
    #[arg(long, value_name = "DIR")]
    pub tokenizer: Option<PathBuf>,
    /// Container to write [default: by the extension of the output]
    #[arg(long)]
    pub to: Option<ContainerArg>,
    /// Number format of the written weights
    #[arg(long)]
    pub dtype: WeightArg,
    /// Which scales NVFP4 weights have
    #[arg(long, default_value = "two", value_parser = parser::<Scaling>())]
    pub scales: Scaling,
    /// With --dtype nvfp4, in .dat and .safetensors files: how the output head is stored [default: a separate head in NVFP4;
    /// a head that is the embedding gets no copy of its own]
    #[arg(long)]
    pub head: Option<HeadFormat>,
    /// Replace an older file
    #[arg(long)]
    pub overwrite: bool,
}

/// Flags of `inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Model to read: a .dat file, a .safetensors file, a model folder, a run folder or a checkpoint
    pub path: PathBuf,
    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,
    /// Read every byte: check that scales are valid, that values are finite, and that the files match the folder's
    /// manifest.json if it has one
    #[arg(long)]
    pub verify: bool,
}

/// Flags of `generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    /// Which model answers.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Prompt to answer; `-` reads it from standard input
    #[arg(short, long, required_unless_present = "prompts", conflicts_with = "prompts")]
    pub prompt: Option<String>,
    /// Answer every prompt of a file: of a .jsonl file with a `prompt` or `messages` in each row, or of a text file with a
    /// prompt in each line. Answers are printed in the file's order, each as one JSON object
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// With --prompts or --answers: number of answers that are made together
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub batch_size: usize,
    /// System message
    #[arg(long, alias = "system")]
    pub system_prompt: Option<String>,
    /// Send the prompt without the chat template
    #[arg(long, conflicts_with = "system_prompt")]
    pub raw: bool,
    /// Turn thinking before the answer on or off, for models that can think [default: as the model was trained, else the chat template's choice]
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub thinking: Option<bool>,
    /// How tokens are chosen.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Number of answers to each prompt. The first one draws with --seed, the next one with the number after it
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1)]
    pub answers: usize,
    /// Print an answer when it is complete, instead of piece by piece
    #[arg(long)]
    pub no_stream: bool,
    /// Print one JSON object for each answer instead of its text
    #[arg(long)]
    pub json: bool,
    /// With --json or --prompts: also print, for each token of the answer, its log probability and the log probabilities of
    /// the N tokens that were most likely at that position
    #[arg(long, value_name = "N")]
    pub logprobs: Option<usize>,
}

/// Tokens of a conversation, if nobody says how many.
pub(crate) const CONTEXT: usize = 8192;

/// The help of `--context`, which is the longest `what`.
fn context_help(what: &str) -> String {
    format!(
        "Maximum length of {what}, in tokens; its memory is allocated at the start [default: {CONTEXT}, or the model's limit \
         if that is lower]"
    )
}

/// Flags of `chat`.
#[derive(Debug, Args)]
pub struct ChatArgs {
    /// Which model answers.
    #[command(flatten)]
    pub model: ModelArgs,
    /// System message
    #[arg(long, alias = "system")]
    pub system_prompt: Option<String>,
    /// Turn thinking before the answer on or off, for models that can think [default: as the model was trained, else the chat template's choice]
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub thinking: Option<bool>,
    /// Maximum length of the conversation, in tokens.
    #[arg(long, value_name = "N", help = context_help("the conversation"))]
    pub context: Option<std::num::NonZeroUsize>,
    /// Read messages, and commands such as /reset, from this file instead of the terminal. From a .jsonl file that /save
    /// wrote, send its system and user messages again
    #[arg(long, value_name = "FILE")]
    pub script: Option<PathBuf>,
    /// How tokens are chosen.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Print one JSON object for each turn instead of streaming the text
    #[arg(long)]
    pub json: bool,
}

/// Which model answers, and where.
#[derive(Debug, Args)]
pub struct ModelArgs {
    /// Model to run: a model folder, a run folder, a checkpoint, a .dat file or a .safetensors file
    #[arg(short, long, value_name = "PATH", aliases = ["weight", "model-dir"])]
    pub model: PathBuf,
    /// Folder that holds tokenizer and chat template, and config.json too if there is none beside the model [default: the model's
    /// folder]
    #[arg(long, value_name = "DIR")]
    pub tokenizer: Option<PathBuf>,
    /// Quantize activations to NVFP4 too, as 4-bit inference (W4A4) does [default: as the model was trained]
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub w4a4: Option<bool>,
    /// Device to run on: auto, cpu, cuda, cuda:N or vulkan
    #[arg(long, default_value = "auto")]
    pub device: DeviceChoice,
    /// Number format in which the model computes
    #[arg(long, alias = "dtype", default_value = "auto", value_parser = parser::<Auto<Precision>>())]
    pub compute_dtype: Auto<Precision>,
}

/// Flags of `serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Which model answers.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Address to listen at: 127.0.0.1 serves this machine only, 0.0.0.0 also other machines, and then --api-key-file is
    /// required
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub host: IpAddr,
    /// Port to listen at; 0 lets the system choose one
    #[arg(long, value_name = "N", default_value_t = 8080)]
    pub port: u16,
    /// File with a key that requests must hold (Authorization: Bearer KEY). A file that other users can read is refused
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// The model's name in replies [default: the name of its file or folder]
    #[arg(long, value_name = "NAME")]
    pub model_name: Option<String>,
    /// Maximum length of a prompt and its answer, in tokens.
    #[arg(long, value_name = "N", help = context_help("a prompt and its answer"))]
    pub context: Option<std::num::NonZeroUsize>,
    /// Number of answers that are made at once, each with --context tokens; others wait
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub parallel: usize,
}

/// How tokens are chosen.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Maximum number of tokens in an answer
    #[arg(long, value_name = "N", alias = "max-new-tokens", default_value_t = 256)]
    pub max_tokens: usize,
    /// Sampling temperature; 0 always takes the most likely token [default: that of generation_config.json; without this file 0.7, or 0.6 if the model thinks]
    #[arg(long, alias = "temp")]
    pub temperature: Option<f32>,
    /// Sample from the most likely tokens whose probabilities sum to this (nucleus) [default: that of generation_config.json; without this file 0.8, or 0.95 if the model thinks]
    #[arg(long, value_name = "P", alias = "topp")]
    pub top_p: Option<f32>,
    /// Number of most likely tokens to sample from; 0 takes all [default: that of generation_config.json; without this file 20]
    #[arg(long, value_name = "N")]
    pub top_k: Option<usize>,
    /// Minimum probability, relative to the most likely token (min-p) [default: that of generation_config.json, or 0]
    #[arg(long, value_name = "P")]
    pub min_p: Option<f32>,
    /// Penalty on tokens that already occurred; 1 turns it off [default: that of generation_config.json, or 1]
    #[arg(long, value_name = "FACTOR")]
    pub repetition_penalty: Option<f32>,
    /// End the answer in front of this text; may be given several times
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Random seed for sampling
    #[arg(long, value_name = "N", default_value_t = 42)]
    pub seed: u64,
}

/// What `runs` shows.
#[derive(Debug, Subcommand)]
pub enum RunsCommand {
    /// One line for each run in a folder
    List(ListArgs),
    /// The summary of a run: figures, evaluations, answers, exported files, settings
    Show(ShowArgs),
    /// The figures of several runs side by side, and the settings that differ
    Compare(CompareArgs),
}

/// Flags of `runs list`.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// Folder that holds run folders
    #[arg(default_value = "runs", value_name = "DIR")]
    pub folder: PathBuf,
    /// Print one JSON object for each run
    #[arg(long)]
    pub json: bool,
}

/// Flags of `runs show`.
#[derive(Debug, Args)]
pub struct ShowArgs {
    /// Run folder
    #[arg(value_name = "RUN")]
    pub run: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Flags of `runs compare`.
#[derive(Debug, Args)]
pub struct CompareArgs {
    /// Run folders
    #[arg(required = true, num_args = 2.., value_name = "RUN")]
    pub runs: Vec<PathBuf>,
    /// Also draw the losses of all runs into this SVG file
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    /// Print the table as Markdown
    #[arg(long)]
    pub markdown: bool,
    /// Print one JSON object for each run, with its figures and the settings that differ between the runs
    #[arg(long, conflicts_with = "markdown")]
    pub json: bool,
}

/// Flags of `doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Print one JSON object for each line
    #[arg(long)]
    pub json: bool,
}

/// Flags of `completions`.
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// Shell that reads the script
    pub shell: clap_complete::Shell,
}

/// Flags of `man`.
#[derive(Debug, Args)]
pub struct ManArgs {
    /// Command, for example fit, or data preview
    #[arg(value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// Flags of `parity`.
#[derive(Debug, Args)]
pub struct ParityArgs {
    /// Model to check: a model folder, a run folder, a checkpoint, a .dat file or a .safetensors file
    #[arg(short, long, value_name = "PATH")]
    pub model: PathBuf,
    /// Compare with values that Hugging Face computed; tests/golden/make_parity_fixture.py makes the file
    #[arg(long, value_name = "FILE", required_unless_present_any = ["against", "recipe", "against_recipe"])]
    pub expected: Option<PathBuf>,
    /// Compare with this model, layer by layer [default: the same model, with --against-recipe]
    #[arg(long, value_name = "PATH", conflicts_with = "expected")]
    pub against: Option<PathBuf>,
    /// Round the model as this recipe does in a forward pass; bf16 rounds nothing and dequantizes NVFP4 weights [default: as
    /// the model runs]
    #[arg(long, value_name = "RECIPE", value_parser = parser::<Recipe>(), conflicts_with = "expected")]
    #[arg(hide_possible_values = true)]
    pub recipe: Option<Recipe>,
    /// Round the other model as this recipe does [default: as that model runs]
    #[arg(long, value_name = "RECIPE", value_parser = parser::<Recipe>(), conflicts_with = "expected")]
    #[arg(hide_possible_values = true)]
    pub against_recipe: Option<Recipe>,
    /// Prompt on which two models are compared
    #[arg(short, long, value_name = "TEXT", conflicts_with = "expected")]
    pub prompt: Option<String>,
    /// Take the prompt without the chat template
    #[arg(long, requires = "prompt")]
    pub raw: bool,
    /// Folder that holds tokenizer and chat template, and config.json too if there is none beside a model [default: each model's
    /// folder]
    #[arg(long, value_name = "DIR", conflicts_with = "expected")]
    pub tokenizer: Option<PathBuf>,
    /// A layer passes if its relative difference is at most this [default: 0.0001 in f32, 0.04 in bf16, 0.005 in f16 and TF32, and
    /// more for a model of more than three blocks; 0.5 if the weights, or the activations, of only one of the
    /// two models are rounded to 4 bits]
    #[arg(long, value_name = "DIFFERENCE", conflicts_with = "expected")]
    pub tolerance: Option<f64>,
    /// Write the values that train-cli computed to this safetensors file; its tensors have the same names as those of
    /// the file for --expected
    #[arg(long, value_name = "FILE", requires = "expected")]
    pub dump: Option<PathBuf>,
    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,
    /// Device to run on: auto, cpu, cuda, cuda:N or vulkan
    #[arg(long, default_value = "auto")]
    pub device: DeviceChoice,
    /// Number format of activations and matrix products
    #[arg(long, alias = "dtype", default_value = "f32", value_parser = parser::<Auto<Precision>>())]
    pub compute_dtype: Auto<Precision>,
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
    /// bench decode and prefill: measure a model of these sizes, with random weights: a config.json [default: the sizes of
    /// Qwen3-4B]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// bench decode: number of tokens in the context when an answer begins. bench prefill: number of tokens of the prompt [default:
    /// 1024 for decode, 4096 for prefill]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub context: Option<u32>,
    /// bench decode: number of answers that are made together. Give the flag several times to compare numbers [default: 1 and 16]
    #[arg(long = "batch-size", value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub batch_sizes: Vec<u16>,
    /// bench decode and prefill: whether activations are rounded to NVFP4; the weights always are [default: true]
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub w4a4: Option<bool>,
    /// bench decode and prefill: number format in which the head is read: nvfp4 or bf16 [default: nvfp4]
    #[arg(long, hide_possible_values = true)]
    pub head: Option<HeadFormat>,
    /// Print one JSON object per line
    #[arg(long)]
    pub json: bool,
    /// bench kernels: the speed in TFLOP/s of the fastest matrix product that your card makes in practice, which
    /// doc/notebook/bench_torch.py measures. The last column of the output then shows the speed of each matrix product as a
    /// share of this speed
    #[arg(long, value_name = "TFLOPS")]
    pub matrix_ceiling: Option<f64>,
    /// GPU to measure: auto, cuda, cuda:N or vulkan. The CPU is not measured
    #[arg(long, default_value = "auto")]
    pub device: DeviceChoice,
}

/// What `bench` measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BenchWhat {
    /// Every kernel, at the shapes of Qwen3-4B
    Kernels,
    /// Tokens a second of answers, by a model with random weights
    Decode,
    /// Tokens a second while a prompt is read, by a model with random weights
    Prefill,
}
