//! Train Qwen3 in NVFP4, export the result and talk to it.
//!
//! `main` parses the command line, calls [`run`] and maps errors to exit codes. Everything else is in
//! this library, so that tests can call it. Imports point downwards: a room in this table uses only
//! rooms below it.
//!
//! | room | what it holds |
//! |---|---|
//! | [`commands`] | one file for each command |
//! | [`run`] | a training run on disk: its folder, inputs and checkpoints |
//! | [`train`] | the training step, the optimizer and the loop around them |
//! | [`memory`] | device memory: predicted, measured and returned |
//! | [`data`] | files to micro-batches |
//! | [`plan`] | flags and config file to a checked plan |
//! | [`args`] | every flag |
//! | [`device`], [`kernel_cache`] | which backend runs a job; where compiled kernels are kept |
//! | [`model_files`] | the files of a model folder: config, tokenizer, weights |
//! | [`durable`], [`report`] | writing files; printing |

#![forbid(unsafe_code)]

pub mod args;
pub mod commands;
pub mod data;
pub mod device;
pub mod durable;
mod error;
pub mod kernel_cache;
pub mod memory;
pub mod model_files;
pub mod plan;
pub mod report;
pub mod run;
pub mod train;

pub use error::CliError;

use args::{Cli, Command};

/// Runs one command.
///
/// # Errors
/// Whatever goes wrong, with its exit code.
pub fn run(cli: Cli) -> Result<(), CliError> {
    match cli.command {
        Command::Fit(args) => commands::fit::run(*args),
        Command::Estimate(args) => commands::estimate::run(*args),
        Command::ExportDat(args) => commands::export::run(args),
        Command::Convert(args) => commands::convert::run(&args),
        Command::Inspect(args) => commands::inspect::run(&args),
        Command::Generate(args) => commands::generate::run(args),
        Command::Parity(args) => commands::parity::run(args),
        Command::Bench(args) => commands::bench::run(args),
    }
}
