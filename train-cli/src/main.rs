//! The program: parses the command line, runs the command, and maps its error to an exit code.

#![forbid(unsafe_code)]

use clap::Parser;
use std::process::ExitCode;
use train_cli::{CliError, args, device, execute, replaced, report, watchdog};

fn main() -> ExitCode {
    let cli = match args::Cli::try_parse_from(args::with_dashes(std::env::args_os())) {
        Ok(cli) => cli,
        Err(error) => match replaced::answer(&error) {
            Some(answer) => {
                let error = CliError::Usage(answer);
                report::error(&error);
                return ExitCode::from(error.exit_code());
            }
            None => error.exit(),
        },
    };
    device::configure();
    match watchdog::run(|| execute(cli)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report::error(&error);
            ExitCode::from(error.exit_code())
        }
    }
}
