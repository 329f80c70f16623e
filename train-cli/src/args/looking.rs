//! Flags of the commands that show runs, the machine, and the program itself.

use crate::settings::defaults::RUNS;
use clap::{Args, Subcommand};
use std::path::PathBuf;

/// What `runs` shows.
#[derive(Debug, Subcommand)]
pub enum RunsCommand {
    /// List the runs of a folder, one line each
    List(ListArgs),
    /// Show the summary of a run: figures, evaluations, answers, exported files, settings. If the output goes to a
    /// pipe or a file, it is Markdown
    Show(ShowArgs),
    /// Compare the figures of several runs side by side, and the settings that differ
    Compare(CompareArgs),
}

/// Flags of `runs list`.
#[derive(Debug, Args)]
pub struct ListArgs {
    /// Folder that holds run folders
    #[arg(default_value = RUNS, value_name = "DIR")]
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
    /// Print one JSON object for each check, each on its own line
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
