//! The program: parses the command line, runs the command, and maps its error to an exit code.

#![forbid(unsafe_code)]

use clap::Parser;
use std::process::ExitCode;
use train_cli::{args, device, execute, report, watchdog};

fn main() -> ExitCode {
    let cli = args::Cli::parse_from(args::with_dashes(std::env::args_os()));
    device::configure();
    match watchdog::run(|| execute(cli)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report::error(&error);
            ExitCode::from(error.exit_code())
        }
    }
}
