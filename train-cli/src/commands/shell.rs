//! `completions` and `man`: what a shell and a manual need to know of the command line.

use crate::{CliError, args::Cli, report};
use clap::CommandFactory;
use clap_complete::Shell;

/// Prints the script that completes commands and flags in a shell.
pub fn completions(shell: Shell) {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "train-cli", &mut script);
    let mut script = String::from_utf8_lossy(&script).into_owned();
    if shell == Shell::Bash {
        // clap_complete spells the hyphen of the program's name in two ways, so that bash finds none of the commands.
        script = script.replace("train__subcmd__cli", "train__cli");
    }
    report::stream(&script);
}

/// Prints the manual page of a command, or of the program.
///
/// # Errors
/// If there is no such command.
pub fn man(words: &[String]) -> Result<(), CliError> {
    let mut command = Cli::command();
    command.build();
    let mut found = &command;
    for word in words {
        let missing = || CliError::Usage(format!("there is no command {:?}; see train-cli --help", words.join(" ")));
        found = found.find_subcommand(word).ok_or_else(missing)?;
    }
    let mut page = Vec::new();
    let written = clap_mangen::Man::new(found.clone()).render(&mut page);
    written.map_err(CliError::unwritten)?;
    report::stream(&String::from_utf8_lossy(&page));
    Ok(())
}
