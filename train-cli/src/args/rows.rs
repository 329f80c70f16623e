//! Flags of `data`, which looks at training rows and makes them.

use crate::settings::{AUTO, Auto, Format, LossOn, TOKENIZER, defaults::longest, parser};
use clap::{Args, Subcommand, builder::NonEmptyStringValueParser};
use std::path::PathBuf;

/// What `data` shows.
#[derive(Debug, Subcommand)]
pub enum DataCommand {
    /// Show the first rows as the model sees them, and mark the tokens that the loss counts
    Preview(PreviewArgs),
    /// Count rows and tokens, and name the rows that a run would leave out
    Stats(StatsArgs),
    /// Make rows from a data recipe (templates whose slots are filled from pools of texts), and show how often each text occurs
    Make(MakeArgs),
}

/// Flags of `data make`.
#[derive(Debug, Args)]
pub struct MakeArgs {
    /// Data recipe: a TOML file with templates and pools
    pub recipe: PathBuf,
    /// File to write: .tsv, or .jsonl with a list of messages in each row
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// Total number of rows. Each template gets a share in proportion to its `count` in the data recipe or, if it has none, to the number
    /// of its combinations [default: that of the data recipe]
    #[arg(long, value_name = "N")]
    pub count: Option<usize>,
    /// Random seed for what is drawn, and for the order of the rows if the data recipe shuffles them [default: that of the data
    /// recipe, or 0 if it has none]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Replace an older file
    #[arg(long)]
    pub overwrite: bool,
    /// Print one JSON object with all counts
    #[arg(long)]
    pub json: bool,
}

/// Training files, and how they become tokens.
#[derive(Debug, Args)]
pub struct RowsArgs {
    /// Training files, folders of them, or patterns such as 'rows/*.jsonl'
    #[arg(required = true, value_name = "PATH")]
    pub files: Vec<PathBuf>,
    /// Model whose tokenizer and chat template make the tokens: a model folder, a run folder, a checkpoint or a model file
    #[arg(short, long, value_name = "PATH")]
    pub model: PathBuf,
    /// Folder that holds tokenizer and chat template.
    #[arg(long, value_name = "DIR", help = TOKENIZER)]
    pub tokenizer: Option<PathBuf>,
    /// Maximum length of a training sequence, in tokens.
    #[arg(long, value_name = "N", help = longest("Maximum length of a training sequence, in tokens"))]
    pub max_seq_length: Option<std::num::NonZeroUsize>,
    /// Format of the data files
    #[arg(long, default_value = AUTO, value_parser = parser::<Auto<Format>>())]
    pub format: Auto<Format>,
    /// What stands between the documents of a .txt or .md file, for example '<|endoftext|>'. Without it the file is one
    /// document
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true, value_parser = NonEmptyStringValueParser::new())]
    pub document_separator: Option<String>,
    /// Key of JSON rows, or column of a table, with a number that says how often an epoch uses the row. A row with 0 is left out
    #[arg(long, value_name = "NAME")]
    pub weight_column: Option<String>,
    /// Which tokens the loss counts
    #[arg(long, value_enum, default_value_t)]
    pub loss_on: LossOn,
}

/// Flags of `data preview`.
#[derive(Debug, Args)]
pub struct PreviewArgs {
    /// Which rows.
    #[command(flatten)]
    pub rows: RowsArgs,
    /// Number of sequences to show. A row may give several
    #[arg(short = 'n', long = "rows", value_name = "N", default_value_t = 5)]
    pub count: usize,
}

/// Flags of `data stats`.
#[derive(Debug, Args)]
pub struct StatsArgs {
    /// Which rows.
    #[command(flatten)]
    pub rows: RowsArgs,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}
