//! Flags of the commands that describe a training run: `fit` and `estimate`.

use crate::settings::{Layer, ResumeFrom, fields::COMMON, with_flags};
use clap::{ArgMatches, Args, FromArgMatches};
use std::path::PathBuf;

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
    /// Resume an interrupted run. The value is its run folder or one of its checkpoints; without a value, the run of --output-dir
    /// is resumed
    #[arg(long, value_name = "PATH", num_args = 0..=1, default_missing_value = "latest", alias = "resume")]
    #[arg(help_heading = "Saving")]
    pub resume_from_checkpoint: Option<ResumeFrom>,
    /// Delete the older run in the run folder first
    #[arg(long, help_heading = "Saving")]
    pub overwrite: bool,
    /// Read settings from this TOML file; flags on the command line override the file
    #[arg(short, long, value_name = "FILE", help_heading = "Advanced")]
    pub config: Option<PathBuf>,
    /// Read the data, check everything that can be checked before training, print the plan and all settings, and stop. This
    /// writes no files but the demo's data and config (with --demo, to runs/demo-files) and the cache (with --token-cache)
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
