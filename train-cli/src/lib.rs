//! Train Qwen3 in NVFP4, export the result and talk to it.
//!
//! `main` parses the command line, calls [`execute`] and maps errors to exit codes. Everything else is in this library, so
//! that tests can call it. Imports point downwards: the folders from [`commands`] to [`data`] use only those below them, and
//! the files that follow.
//!
//! | room | what it holds |
//! |---|---|
//! | [`commands`] | one file or folder for each command |
//! | [`serve`] | answers over HTTP |
//! | [`talk`] | a model that answers: loading it, an answer, a conversation |
//! | [`run`] | a training run on disk: its inputs, folder, journal and checkpoints |
//! | [`train`] | the training step, the optimizer and the loop around them |
//! | [`memory`] | device memory: predicted, measured and returned |
//! | [`data`] | files to micro-batches |
//! | [`plan`] | settings to a checked plan |
//! | [`args`] | the commands and their flags |
//! | [`settings`] | every choice of a training run: its flag, key, default and range |
//! | [`device`], [`peak`] | which backend runs a job; how fast cards are at most |
//! | [`ahead`], [`kernel_cache`] | kernels that are compiled before they are needed; where compiled kernels are kept |
//! | [`model_files`], [`data_files`] | the files of a model; those that `--data` names |
//! | [`tolerance`] | how far two computations of the same values may differ |
//! | `toml_text` | TOML, read within a limit of memory |
//! | [`outputs`] | checks of output paths before the work begins |
//! | [`replaced`] | flags and values of earlier programs, and what to use instead |
//! | [`durable`], [`report`], [`progress`] | writing files; printing; the line that shows how far work has come |
//! | [`table`], [`wrapping`] | tables and lines that fit a terminal |
//! | [`interrupt`], [`watchdog`] | signals that ask a run to end or to save; work that never ends |
//!
//! # Letters
//! A capital letter has one meaning in this crate. Names of tensors end in the letters of their shape, as in [`model_qwen3`].
//!
//! | letter | meaning |
//! |---|---|
//! | `M` | tokens of a micro-batch |
//! | `D` | hidden size |
//! | `V` | vocabulary |
//! | `H`, `G`, `E` | query heads, key and value heads, head size |
//! | `S` | keys |
//! | `B`, `R` | type parameters: the backend, the CubeCL runtime |
//! | `J`, `L` | type parameters: a job of a device, who listens to an answer |
//! | `T` | type parameter: any type |

#![forbid(unsafe_code)]

pub mod ahead;
pub mod args;
pub mod commands;
pub mod data;
pub mod data_files;
pub mod device;
pub mod device_failure;
pub mod durable;
mod error;
pub mod interrupt;
pub mod kernel_cache;
pub mod memory;
pub mod model_files;
pub mod nvrtc;
pub mod outputs;
pub mod peak;
pub mod plan;
pub mod progress;
pub mod replaced;
pub mod report;
pub mod run;
pub mod serve;
pub mod settings;
pub mod table;
pub mod talk;
pub mod tolerance;
mod toml_text;
pub mod train;
pub mod watchdog;
pub mod wrapping;

pub use backend_nvfp4::host_memory;
pub use error::CliError;

use args::{Cli, Command};

/// Runs one command.
///
/// # Errors
/// Every error of a command, with its exit code.
pub fn execute(cli: Cli) -> Result<(), CliError> {
    interrupt::fail_writes_beyond_the_limit().map_err(CliError::io("signals".as_ref()))?;
    match cli.command {
        Command::Fit(args) => commands::fit::run(&args),
        Command::Estimate(args) => commands::estimate::run(&args),
        Command::Data(command) => commands::data::run(&command),
        Command::ExportDat(args) => commands::export::run(args),
        Command::ExportHf(args) => commands::export_hf::run(&args),
        Command::Convert(args) => commands::convert::run(&args),
        Command::Inspect(args) => commands::inspect::run(&args),
        Command::Generate(args) => commands::generate::run(args),
        Command::Chat(args) => commands::chat::run(args),
        Command::Serve(args) => commands::serve::run(args),
        Command::Eval(command) => commands::eval::run(command),
        Command::Parity(args) => commands::parity::run(args),
        Command::Doctor(args) => commands::doctor::run(&args),
        Command::Bench(args) => commands::bench::run(args),
        Command::Runs(command) => commands::runs::run(&command),
        Command::Completions(args) => {
            commands::shell::completions(args.shell);
            Ok(())
        }
        Command::Man(args) => commands::shell::man(&args.command),
    }?;
    report::all_printed().map_err(CliError::unwritten)
}
