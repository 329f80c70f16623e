//! `data make`: writes the rows of a recipe to a file, and says how often each template, answer and text occurs in them.

use crate::{
    CliError,
    args::MakeArgs,
    data::{
        format::{HEADER, is_header},
        make::{Balance, Counted, MadeRow, RowRecipe},
    },
    durable,
    outputs::{check_free, check_output},
    report,
};
use model_qwen3::file;
use serde_json::json;
use std::path::Path;

/// Largest recipe that is read.
const LARGEST: u64 = 64 << 20;

/// Runs the command.
///
/// # Errors
/// If the recipe is wrong, the file exists, or its format cannot hold a row.
pub(super) fn run(args: &MakeArgs) -> Result<(), CliError> {
    let text = file::read_text(&args.recipe, LARGEST, "give the TOML file of a recipe");
    let text = text.map_err(CliError::of_flag("RECIPE"))?;
    let wrong = |reason: String| CliError::Usage(format!("{}: {reason}", args.recipe.display()));
    let recipe = RowRecipe::parse(&text).map_err(wrong)?;
    let written = RowFormat::of(&args.output)?;
    check_output("--output", &args.output, std::slice::from_ref(&args.recipe))?;
    check_free("--output", &args.output, args.overwrite)?;
    let seed = args.seed.unwrap_or(recipe.seed);
    let (rows, balance) = recipe.rows(seed, args.count).map_err(wrong)?;
    let text = written.text(&rows, recipe.header.as_deref()).map_err(wrong)?;
    durable::write_bytes(&args.output, text.as_bytes())?;
    if args.json {
        let mut line = json!(balance);
        line["file"] = json!(args.output.display().to_string());
        line["seed"] = json!(seed);
        report::result(line.to_string());
    } else {
        report::result(table(&balance, &args.output));
    }
    Ok(())
}

/// The format of a file of rows.
#[derive(Clone, Copy)]
enum RowFormat {
    Tsv,
    Messages,
}

impl RowFormat {
    fn of(path: &Path) -> Result<Self, CliError> {
        let extension = path.extension().and_then(|extension| extension.to_str()).map(str::to_ascii_lowercase);
        match extension.as_deref() {
            Some("tsv") => Ok(Self::Tsv),
            Some("jsonl") => Ok(Self::Messages),
            _ => Err(CliError::Usage(format!("--output {}: the name must end in .tsv or .jsonl", path.display()))),
        }
    }

    fn text(self, rows: &[MadeRow], header: Option<&str>) -> Result<String, String> {
        match self {
            Self::Tsv => {
                let first = header.map(first_line).transpose()?.unwrap_or_default();
                let lines = rows.iter().map(tsv).collect::<Result<String, _>>()?;
                let columns = HEADER.join("\t");
                // A comment in front of it does not help.
                let reads_as_header = |row: &MadeRow| is_header(&row.prompt, &row.answer);
                if rows.first().is_some_and(reads_as_header) && !header.is_some_and(names_columns) {
                    let remedy = format!("add header = {columns:?}, or write a .jsonl file");
                    return Err(format!("the first row would be read as a header; {remedy}"));
                }
                Ok(first + &lines)
            }
            Self::Messages => Ok(rows.iter().map(messages).collect()),
        }
    }
}

/// A header as the first line of a tab-separated file, if a run that reads the file skips it.
fn first_line(header: &str) -> Result<String, String> {
    let is_comment = header.starts_with('#') && !header.contains(['\n', '\r']);
    if !names_columns(header) && !is_comment {
        let why = "a .tsv file can begin with names of columns, such as \"prompt\\ttarget\", or with one line that starts with #";
        return Err(format!("header {header:?}: {why}; write one of these, or leave the header out"));
    }
    Ok(format!("{header}\n"))
}

/// Whether a run that reads the file takes a first line for the names of its columns.
fn names_columns(line: &str) -> bool {
    line.split_once('\t').is_some_and(|(prompt, answer)| is_header(prompt, answer))
}

/// A row as a line of a tab-separated file, if it can be one.
fn tsv(row: &MadeRow) -> Result<String, String> {
    let MadeRow { prompt, answer } = row;
    let breaks = |text: &str| text.contains(['\t', '\n', '\r']);
    if breaks(prompt) || breaks(answer) || prompt.trim_start().starts_with('#') {
        let why = "contains a tab or a line break, or its prompt begins with #, which a .tsv file cannot hold";
        return Err(format!("the row {prompt:?}, {answer:?} {why}; write a .jsonl file"));
    }
    Ok(format!("{prompt}\t{answer}\n"))
}

/// A row as a line of JSON.
fn messages(row: &MadeRow) -> String {
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    format!("{}\n", json!({"messages": [message("user", &row.prompt), message("assistant", &row.answer)]}))
}

/// The balance for a person.
fn table(balance: &Balance, output: &Path) -> String {
    let duplicates = match balance.duplicates {
        0 => String::new(),
        n => format!(" · {} left out", report::count(n, "duplicate")),
    };
    let mut lines = vec![format!("{} in {}{duplicates}", report::count(balance.rows, "row"), output.display())];
    let mut section = |title: &str, all: &[Counted], shown: usize| {
        lines.push(format!("\n{title}"));
        lines.extend(all.iter().take(shown).map(|Counted { what, rows }| {
            let share = 100.0 * *rows as f64 / balance.rows.max(1) as f64;
            format!("{rows:>9}  {share:>5.1} %  {}", shortened(what))
        }));
        if all.len() > shown {
            lines.push(format!("           and {} more", all.len() - shown));
        }
    };
    section("rows of each template", &balance.templates, usize::MAX);
    section("rows with each answer", &balance.answers, SHOWN);
    lines.push("\nrows with each text of a pool".into());
    lines.extend(balance.pools.iter().map(|(name, texts)| {
        let counts = || texts.iter().map(|text| text.rows);
        let (least, most) = (counts().min().unwrap_or(0), counts().max().unwrap_or(0));
        format!("  {name:<12} {}, each in {least} to {most} rows", report::count(texts.len(), "text"))
    }));
    if balance.pools.is_empty() {
        lines.push("  the recipe has no pools".into());
    }
    lines.join("\n")
}

/// Answers that a table shows.
const SHOWN: usize = 20;

/// The beginning of a text, on one line.
fn shortened(text: &str) -> String {
    const LONGEST: usize = 50;
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}
