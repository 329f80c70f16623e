//! Train Qwen3 in NVFP4, export it and talk to it. `main` parses, dispatches and maps errors to exit
//! codes; everything it calls is here, so that tests can call it too.
//!
//! | module | its one idea |
//! |---|---|
//! | [`args`] | every flag, plain data |
//! | [`plan`] | flags and config file to a checked plan; flags end there |
//! | [`device`], [`kernel_cache`] | which backend runs a job; where compiled kernels are kept |
//! | [`fit`] | the `fit` command: model, data, Learner, export |
//! | `inputs`, `run_folder` | what a run reads; where it writes |
//! | [`train`] | the learning strategy: steps, evaluations, figures |
//! | [`mod@step`], [`gradients`] | one optimizer step, streaming or whole; what becomes of gradients |
//! | [`damp`], [`codes`] | blocks frozen on their codes towards the end; how many codes changed |
//! | [`data`], [`token_cache`] | files to token sequences with a mask; kept on disk |
//! | [`rows`], [`mod@order`] | which samples a run has, packed; their order, step after step |
//! | [`optim`], [`schedule`] | chunked AdamW; the learning rate |
//! | [`mod@estimate`], [`vram`], [`pool`] | memory before a run, in it, and given back |
//! | [`checkpoint`] | training state on disk and back |
//! | [`durable`] | the only code that writes files |
//! | [`export`], [`convert`], [`inspect`], [`generate`], [`parity`], [`mod@bench`], [`demo`] | one command a file |
//! | [`report`] | the only code that prints |

#![forbid(unsafe_code)]

pub mod args;
pub mod bench;
pub mod checkpoint;
pub mod codes;
pub mod convert;
pub mod damp;
pub mod data;
pub mod demo;
pub mod device;
pub mod durable;
mod error;
pub mod estimate;
pub mod export;
pub mod fit;
pub mod generate;
pub mod gradients;
mod inputs;
pub mod inspect;
pub mod kernel_cache;
pub mod model_files;
pub mod optim;
pub mod order;
pub mod parity;
pub mod plan;
pub mod pool;
pub mod report;
pub mod rows;
mod run_folder;
pub mod schedule;
pub mod step;
pub mod token_cache;
pub mod train;
pub mod vram;

pub use error::CliError;

use args::{Cli, Command};

/// Runs one command.
///
/// # Errors
/// Whatever goes wrong, with its exit code.
pub fn run(cli: Cli) -> Result<(), CliError> {
    match cli.command {
        Command::Fit(args) => fit::run(*args),
        Command::Estimate(args) => estimate::run(*args),
        Command::ExportDat(args) => export::run(args),
        Command::Convert(args) => convert::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Generate(args) => generate::run(args),
        Command::Parity(args) => parity::run(args),
        Command::Bench(args) => bench::run(args),
    }
}
