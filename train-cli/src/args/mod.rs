//! The command line: the commands, each with the flags of a file of this folder. Plain data; the settings of a training run,
//! with their flags, are in [`crate::settings`].

pub(crate) mod converting;
mod looking;
pub(crate) mod measuring;
mod rows;
mod talking;
mod training;

use crate::report;
use clap::{
    Parser, Subcommand,
    builder::styling::{Ansi256Color, Color, Style, Styles},
};
use std::ffi::OsString;

pub use converting::{
    ActivationsArg, ContainerArg, ConvertArgs, ExportArgs, ExportHfArgs, HfFormat, InspectArgs, WeightArg,
};
pub use looking::{CompareArgs, CompletionsArgs, DoctorArgs, ListArgs, ManArgs, RunsCommand, ShowArgs};
pub use measuring::{BenchArgs, BenchWhat, EvalCommand, EvalLossArgs, NeedleArgs, ParityArgs};
pub use rows::{DataCommand, MakeArgs, PreviewArgs, RowsArgs, StatsArgs};
pub(crate) use talking::CONTEXT;
pub use talking::{CacheArgs, ChatArgs, GenerateArgs, ModelArgs, SamplingArgs, ServeArgs};
pub use training::{EstimateArgs, FitArgs, StartArgs};

/// Train Qwen3 to work with weights in NVFP4, export the result and talk to it.
///
/// NVFP4 is a 4-bit number format: 16 values share one 8-bit scale, and the whole tensor has a
/// further scale, in f32.
#[derive(Debug, Parser)]
#[command(name = "train-cli", version, long_version = VERSION, about, after_help = EXIT_CODES, styles = STYLES)]
pub struct Cli {
    /// The command to run.
    #[command(subcommand)]
    pub command: Command,
}

/// How a terminal shows values that an error suggests, and those that it refuses: clap's green and yellow cannot be read on white.
const STYLES: Styles = Styles::styled()
    .valid(Style::new().bold().fg_color(Some(Color::Ansi256(Ansi256Color(report::GREEN)))))
    .invalid(Style::new().bold());

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
4 too little memory on the device or the machine, 5 too many training steps whose loss or gradient is not finite, 6 corrupt file, failed check of an export or difference found by parity, 7 device error, 101 a bug in train-cli, 128 plus the number of a signal that ended it (serve ends with 0 after a first signal).\n\
Try it without any file: train-cli fit --demo";

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train all parameters of a Qwen3 model
    Fit(Box<FitArgs>),
    /// Estimate the memory that fit needs. It accepts the flags of fit except --demo and --dry-run, and trains nothing
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
    /// Answer requests over HTTP, in the format of OpenAI's API, and serve a page to talk to the model
    Serve(ServeArgs),
    /// Measure how well a model predicts text, and whether it finds a number that is hidden far back in a long text
    #[command(subcommand)]
    Eval(EvalCommand),
    /// Look at training runs: list them, show one, compare several
    #[command(subcommand)]
    Runs(RunsCommand),
    /// Compare a model's results with values that Hugging Face computed, or compare two models, or one model with two kinds of
    /// rounding
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
        // A prompt may begin like a flag.
        Some(text) if text.starts_with("--") && !text.contains(char::is_whitespace) => {
            let (flag, value) = text.split_once('=').map_or((text, None), |(f, v)| (f, Some(v)));
            let flag = flag.replace('_', "-");
            value.map_or(flag.clone(), |v| format!("{flag}={v}")).into()
        }
        _ => arg,
    })
}
