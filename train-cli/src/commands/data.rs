//! `data`: training files as a run would see them, without a run. `preview` shows rows with the tokens that the loss counts;
//! `stats` counts, and names what a run would leave out.

use crate::{
    CliError,
    args::{DataCommand, PreviewArgs, RowsArgs, StatsArgs},
    commands::data_make,
    data::{
        format::RowOptions,
        read::{self, DataOptions},
        rows,
        sample::{Origin, Sample},
    },
    data_files,
    model_files::TextFiles,
    plan, report,
    run::located::located,
    settings::Overlong,
    wrapping,
};
use model_qwen3::{config::Qwen3Config, tokenizer::Tokenizer};
use serde::Serialize;
use std::{
    collections::{BTreeSet, HashSet},
    path::PathBuf,
};

/// Runs the command.
///
/// # Errors
/// If a file or the tokenizer cannot be read.
pub fn run(command: &DataCommand) -> Result<(), CliError> {
    match command {
        DataCommand::Preview(args) => preview(args),
        DataCommand::Stats(args) => stats(args),
        DataCommand::Make(args) => data_make::run(args),
    }
}

fn preview(args: &PreviewArgs) -> Result<(), CliError> {
    let (text, most) = opened(&args.rows)?;
    let options = DataOptions { max_seq_length: most, overlong: Overlong::Truncate, ..options(&args.rows) };
    let files = files(&args.rows)?;
    let (samples, _) = read::first(&files, &text, &options, args.count)?;
    let marks = Marks::for_stdout();
    report::result(marks.legend());
    for sample in samples.iter().take(args.count) {
        let origin = sample.origins[0];
        let place = origin.in_file(&files[origin.file as usize]);
        let (tokens, counted) = (report::count(sample.ids.len(), "token"), sample.supervised_tokens());
        let full = if sample.ids.len() == most { ", as many as --max-seq-length allows" } else { "" };
        report::result(format!("\n{place} · {tokens}{full} · the loss counts {counted}"));
        report::result(marked(sample, &text.tokenizer, marks)?);
    }
    Ok(())
}

/// The text of a sample, with marks around the tokens that the loss counts.
fn marked(sample: &Sample, tokenizer: &Tokenizer, marks: Marks) -> Result<String, CliError> {
    // The first token is never predicted.
    let counts = |i: usize| i > 0 && sample.supervised[i];
    let (mut shown, mut from) = (String::new(), 0);
    for to in 1..=sample.ids.len() {
        if to < sample.ids.len() && counts(to) == counts(from) {
            continue;
        }
        let piece = visible(&tokenizer.decode_all(&sample.ids[from..to])?);
        let [begin, end] = if counts(from) { marks.0 } else { ["", ""] };
        shown.extend([begin, &piece, end]);
        from = to;
    }
    Ok(shown)
}

/// A text whose control characters do nothing to a terminal: they are escaped, but for tabs and the ends of lines.
fn visible(text: &str) -> String {
    let escaped = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    text.chars().map(|c| if escaped(c) { c.escape_default().to_string() } else { c.to_string() }).collect()
}

/// What stands in front of the tokens that the loss counts, and behind them.
#[derive(Clone, Copy)]
struct Marks([&'static str; 2]);

impl Marks {
    /// Bold and green on a terminal, else brackets.
    fn for_stdout() -> Self {
        Self(report::marks(report::BOLD_GREEN).unwrap_or(["⟦", "⟧"]))
    }

    fn legend(self) -> String {
        let [begin, end] = self.0;
        format!("The loss counts the tokens that are marked {begin}like this{end}.")
    }
}

fn stats(args: &StatsArgs) -> Result<(), CliError> {
    let (text, most) = opened(&args.rows)?;
    // Whole rows, however long.
    let options = DataOptions { max_seq_length: usize::MAX, overlong: Overlong::Error, ..options(&args.rows) };
    let (mut samples, mut found) = (Vec::new(), Stats { max_seq_length: most, ..Stats::default() });
    let files = files(&args.rows)?;
    for file in &files {
        let (mut read, report) = read::load(std::slice::from_ref(file), &text, &options)?;
        if report.has_documents {
            // A run cuts documents, whatever --overlong says. One token alone predicts nothing.
            read = read.iter().flat_map(|s| s.pieces(most)).filter(|s| s.ids.len() > 1).collect();
        }
        let place = |origin: &Origin| origin.in_file(file);
        found.formats.extend(report.formats);
        found.rows += report.rows;
        found.not_supervised.extend(report.dropped.iter().map(place));
        found.overlong.extend(read.iter().filter(|s| s.ids.len() > most).map(|s| place(&s.origins[0])));
        samples.extend(read);
    }
    found.count(samples);
    report::result(if args.json {
        serde_json::to_string(&found).expect("plain data serializes")
    } else {
        wrapping::lines(&found.table(files.len()), report::width())
    });
    Ok(())
}

/// What `data stats` counts.
#[derive(Debug, Default, Serialize)]
struct Stats {
    formats: BTreeSet<String>,
    rows: usize,
    sequences: usize,
    tokens: usize,
    supervised_tokens: usize,
    lengths: Lengths,
    /// Sequences whose tokens are those of an earlier one.
    duplicates: usize,
    /// Rows in which the loss counts nothing, or whose weight is 0.
    not_supervised: Vec<String>,
    max_seq_length: usize,
    /// Sequences that are longer.
    overlong: Vec<String>,
    packed: Packing,
}

/// Lengths of sequences, in tokens.
#[derive(Debug, Default, Serialize)]
struct Lengths {
    shortest: usize,
    median: usize,
    /// 90 of 100 sequences have at most so many.
    p90: usize,
    p99: usize,
    longest: usize,
    /// Upper bounds, each twice the one before, with the number of sequences between.
    histogram: Vec<(usize, usize)>,
}

/// What `--packing` would make.
#[derive(Debug, Default, Serialize)]
struct Packing {
    rows: usize,
    /// The share of their tokens that is not padding.
    filled: f64,
}

impl Stats {
    fn count(&mut self, samples: Vec<Sample>) {
        self.sequences = samples.len();
        self.tokens = samples.iter().map(|s| s.ids.len()).sum();
        self.supervised_tokens = samples.iter().map(Sample::supervised_tokens).sum();
        self.lengths = Lengths::of(samples.iter().map(|s| s.ids.len()).collect());
        let different: HashSet<&[u32]> = samples.iter().map(|s| &s.ids[..]).collect();
        self.duplicates = samples.len() - different.len();
        let most = self.max_seq_length;
        let fitting: Vec<Sample> = samples.into_iter().filter(|s| s.ids.len() <= most).collect();
        let tokens: usize = fitting.iter().map(|s| s.ids.len()).sum();
        let rows = rows::pack(fitting, most).len();
        self.packed = Packing { rows, filled: tokens as f64 / (rows * most).max(1) as f64 };
    }

    fn table(&self, files: usize) -> String {
        let percent = |part: f64| format!("{:.1} %", 100.0 * part);
        let (n, most) = (&self.lengths, self.max_seq_length);
        let formats: Vec<&str> = self.formats.iter().map(String::as_str).collect();
        let share = percent(self.supervised_tokens as f64 / self.tokens.max(1) as f64);
        let mut lines = vec![
            format!("files       {files} · {}", formats.join(", ")),
            format!("rows        {} · {}", self.rows, report::count(self.sequences, "sequence")),
            format!("tokens      {} · the loss counts {} ({share})", self.tokens, self.supervised_tokens),
            format!(
                "length      {} to {} · median {} · 90 % have at most {}, 99 % at most {}",
                n.shortest, n.longest, n.median, n.p90, n.p99
            ),
        ];
        let highest = n.histogram.iter().map(|(_, count)| *count).max().unwrap_or(1).max(1);
        lines.extend(n.histogram.iter().map(|(bound, count)| {
            format!("  up to {bound:>7}  {count:>8}  {}", "█".repeat((count * 40).div_ceil(highest)))
        }));
        lines.push(format!(
            "duplicates  {} with the tokens of an earlier one",
            report::count(self.duplicates, "sequence")
        ));
        lines.push(format!(
            "left out    {} in which the loss counts nothing or whose weight is 0{}",
            report::count(self.not_supervised.len(), "row"),
            listed(&self.not_supervised)
        ));
        lines.push(format!(
            "overlong    {} longer than --max-seq-length {most}{}",
            report::count(self.overlong.len(), "sequence"),
            listed(&self.overlong)
        ));
        if !self.overlong.is_empty() {
            lines.push("            --overlong decides about them".into());
        }
        let packed = report::count(self.packed.rows, "row");
        lines.push(format!("packing     {packed} of {most} tokens, {} of them filled", percent(self.packed.filled)));
        lines.join("\n")
    }
}

impl Lengths {
    fn of(mut lengths: Vec<usize>) -> Self {
        lengths.sort_unstable();
        let at = |share: f64| lengths[((lengths.len() as f64 * share).ceil() as usize).clamp(1, lengths.len()) - 1];
        let (Some(&shortest), Some(&longest)) = (lengths.first(), lengths.last()) else { return Self::default() };
        let bounds = std::iter::successors(Some(shortest.next_power_of_two()), |bound| Some(bound * 2));
        let until = longest.next_power_of_two();
        let up_to = |bound: usize| lengths.partition_point(|length| *length <= bound);
        let histogram = bounds.take_while(|bound| *bound <= until).map(|b| (b, up_to(b) - up_to(b / 2))).collect();
        Self { shortest, median: at(0.5), p90: at(0.9), p99: at(0.99), longest, histogram }
    }
}

/// The first places of a list.
fn listed(places: &[String]) -> String {
    const SHOWN: usize = 5;
    let shown = places[..places.len().min(SHOWN)].join(", ");
    match places.len() {
        0 => String::new(),
        n if n > SHOWN => format!(": {shown} and {} more", n - SHOWN),
        _ => format!(": {shown}"),
    }
}

/// The model's tokenizer and template, and the longest sequence.
fn opened(args: &RowsArgs) -> Result<(TextFiles, usize), CliError> {
    let files = located("--model", &args.model)?;
    let config = Qwen3Config::from_file(&files.config_file(args.tokenizer.as_deref()))?;
    let text = TextFiles::open(args.tokenizer.as_ref().unwrap_or(&files.folder), &config)?;
    let wanted = args.max_seq_length.map(usize::from);
    Ok((text, plan::max_seq_length(wanted, config.max_position_embeddings)?))
}

/// The files that are named.
fn files(args: &RowsArgs) -> Result<Vec<PathBuf>, CliError> {
    let files = data_files::all_named_by("PATH", &args.files)?;
    read::check_separator(&files, args.format, args.document_separator.as_deref())?;
    Ok(files)
}

fn options(args: &RowsArgs) -> DataOptions {
    let rows = RowOptions { separator: args.document_separator.clone(), weight: args.weight_column.clone() };
    DataOptions { format: args.format, loss_on: args.loss_on, overlong: Overlong::Drop, max_seq_length: 0, rows }
}

#[cfg(test)]
mod tests {
    use super::Lengths;

    #[test]
    fn lengths_are_counted_between_powers_of_two() {
        let n = Lengths::of((1..=100).collect());
        assert_eq!([n.shortest, n.median, n.p90, n.p99, n.longest], [1, 50, 90, 99, 100]);
        let expected = [(1, 1), (2, 1), (4, 2), (8, 4), (16, 8), (32, 16), (64, 32), (128, 36)];
        assert_eq!(n.histogram, expected);
        let one = Lengths::of(vec![7]);
        assert_eq!((one.median, one.histogram), (7, vec![(8, 1)]));
        assert!(Lengths::of(vec![]).histogram.is_empty());
    }
}
