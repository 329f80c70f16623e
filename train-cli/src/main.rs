//! The program: parses the command line, runs the command, and maps its error to an exit code.

#![forbid(unsafe_code)]

use clap::Parser;
use std::{io::Write, process::ExitCode};
use train_cli::{CliError, args, device, execute, host_memory, memory::host, replaced, report, watchdog};

#[global_allocator]
static ALLOCATOR: host_memory::Allocator = host_memory::Allocator;

fn main() -> ExitCode {
    host_memory::on_exhausted(|bytes| {
        let error = host::is_full(bytes);
        report::last_error(&error);
        std::process::exit(i32::from(error.exit_code()))
    });
    let cli = match args::Cli::try_parse_from(args::with_dashes(std::env::args_os())) {
        Ok(cli) => cli,
        Err(error) => match replaced::answer(&error) {
            Some(answer) => {
                let error = CliError::Usage(answer);
                report::error(&error);
                return ExitCode::from(error.exit_code());
            }
            // Help and the version are results. What could not be written is an error.
            None => {
                let code = u8::try_from(error.exit_code()).unwrap_or(2);
                return match error.print().and_then(|()| std::io::stdout().flush()) {
                    Err(failure) if !report::is_unwanted(&failure) => {
                        let failure = CliError::unwritten(failure);
                        report::error(&failure);
                        ExitCode::from(failure.exit_code())
                    }
                    _ => ExitCode::from(code),
                };
            }
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
