//! Training files to samples.

use crate::{
    CliError,
    data::{
        arrow,
        format::{self, Object, Row, RowOptions, Wrong},
        order::TILE,
        parquet,
        sample::{Origin, Sample},
    },
    data_files,
    model_files::TextFiles,
    progress::{self, Line},
    report,
    settings::{
        Auto, Format, LossOn, Overlong,
        extensions::{self, Reader},
    },
};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

/// How files become samples.
#[derive(Debug, Clone)]
pub struct DataOptions {
    /// Format of the files; without one, each file tells its own.
    pub format: Auto<Format>,
    /// Which tokens are supervised.
    pub loss_on: LossOn,
    /// Longest sequence, in tokens.
    pub max_seq_length: usize,
    /// What happens to a longer row.
    pub overlong: Overlong,
    /// What else is said about the rows.
    pub rows: RowOptions,
}

/// What was read from the files.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct DataReport {
    /// The formats of the files: `messages`, `messages in Parquet`.
    pub formats: BTreeSet<String>,
    /// Whether rows are documents, which a run cuts.
    pub has_documents: bool,
    /// Rows that were read.
    pub rows: usize,
    /// Sequences that they made.
    pub samples: usize,
    /// Tokens in the sequences.
    pub tokens: usize,
    /// Supervised tokens in the sequences.
    pub supervised_tokens: usize,
    /// Where the rows are that were left out, because they are too long, nothing in them is supervised, or their weight is 0.
    pub dropped: Vec<Origin>,
    /// Number of rows that were cut because they are too long.
    pub truncated: usize,
    /// What a person should know about a file: its index, and a sentence.
    pub notes: Vec<(usize, String)>,
    /// With packing: rows after packing, and the share of their tokens that is not padding.
    pub packed: Option<(usize, f64)>,
    /// Whether a header line was skipped.
    pub header_skipped: bool,
    /// Number of sequences by their length before any is dropped or cut: the key is the length, rounded up to a multiple of
    /// [`TILE`]. Documents are cut in any case, and are not counted.
    #[serde(default)]
    pub lengths: BTreeMap<usize, usize>,
    /// Tokens of the longest of these sequences.
    #[serde(default)]
    pub longest: usize,
    /// Number of these sequences that are longer than the limit.
    #[serde(default)]
    pub overlong: usize,
    /// Rows that are not used, because there are more than `--max-rows`.
    #[serde(default)]
    pub left_out: usize,
}

impl DataReport {
    /// Prints the notes about the files, which lie at `paths`.
    pub fn print_notes(&self, paths: &[PathBuf]) {
        for (file, note) in &self.notes {
            report::line(format!("note: {}: {note}", paths[*file].display()));
        }
    }

    /// How many rows are dropped and how many are cut, by a limit of `most` tokens. Nothing if every row is whole.
    pub fn lost(&self, most: usize) -> Vec<String> {
        let mut parts = vec![];
        if !self.dropped.is_empty() {
            let rows = report::count(self.dropped.len(), "row");
            parts.push(format!("{rows} dropped (longer than {most} tokens, nothing supervised, or of weight 0)"));
        }
        if self.truncated > 0 {
            parts.push(format!("{} cut at {most} tokens", report::count(self.truncated, "row")));
        }
        parts
    }

    /// The shortest multiple of [`TILE`] that a share of the sequences fits into.
    pub fn fitting(&self, share: f64) -> usize {
        let wanted = (self.lengths.values().sum::<usize>() as f64 * share).ceil() as usize;
        let mut counted = 0;
        let fits = self.lengths.iter().find(|(_, count)| {
            counted += **count;
            counted >= wanted
        });
        fits.map_or(0, |(length, _)| *length)
    }
}

/// Reads training files.
///
/// # Errors
/// If a row is malformed or too long, with its file and line; or if a file has no row to train on.
pub fn load(paths: &[PathBuf], text: &TextFiles, options: &DataOptions) -> Result<(Vec<Sample>, DataReport), CliError> {
    first(paths, text, options, usize::MAX)
}

/// Refuses a separator of documents if none of the files is a text.
///
/// # Errors
/// If so.
pub fn check_separator(paths: &[PathBuf], format: Auto<Format>, separator: Option<&str>) -> Result<(), CliError> {
    let by_name = |path: &PathBuf| extensions::reader(path) == Some(Reader::Text(Format::Text));
    let is_text = |path| format.map_or_else(|| by_name(path), |format| format == Format::Text);
    match separator.filter(|_| !paths.iter().any(is_text)) {
        None => Ok(()),
        Some(separator) => {
            let text = "it stands between the documents of a text, and no file is one";
            let texts = extensions::of_texts();
            Err(CliError::Usage(format!("--document-separator {separator:?}: {text} ({texts}); leave it out")))
        }
    }
}

/// Reads training files until there are `enough` sequences, or more of them by one row.
///
/// # Errors
/// As [`load`], for what is read.
pub fn first(
    paths: &[PathBuf],
    text: &TextFiles,
    options: &DataOptions,
    enough: usize,
) -> Result<(Vec<Sample>, DataReport), CliError> {
    let (samples, report, left_out) = (vec![], DataReport::default(), BTreeMap::new());
    let mut reader = RowReader { text, options, enough, index: 0, samples, report, left_out };
    for (index, path) in paths.iter().enumerate() {
        if reader.samples.len() >= enough {
            break;
        }
        reader.index = index;
        reader.file(path)?;
    }
    let RowReader { samples, mut report, .. } = reader;
    report.samples = samples.len();
    report.tokens = samples.iter().map(|s| s.ids.len()).sum();
    report.supervised_tokens = samples.iter().map(Sample::supervised_tokens).sum();
    report.print_notes(paths);
    Ok((samples, report))
}

struct RowReader<'a> {
    text: &'a TextFiles,
    options: &'a DataOptions,
    /// Sequences after which no row is read.
    enough: usize,
    /// The index of the file.
    index: usize,
    samples: Vec<Sample>,
    report: DataReport,
    /// In how many rows of the file a field stands that the chat template does not render.
    left_out: BTreeMap<&'static str, usize>,
}

impl RowReader<'_> {
    fn file(&mut self, path: &Path) -> Result<(), CliError> {
        let _line = Line::of(&format!("reading {}", path.display()));
        match extensions::reader(path) {
            Some(Reader::Parquet) => self.table(path, parquet::objects(path)?),
            Some(Reader::Arrow) => self.table(path, arrow::objects(path)?),
            Some(Reader::Json | Reader::Text(_)) | None => self.text(path),
        }?;
        for (field, rows) in std::mem::take(&mut self.left_out) {
            let rows = report::count(rows, "row");
            self.note(format!("the chat template leaves out {field:?}, which stands in {rows}"));
        }
        Ok(())
    }

    /// Says on a terminal how far reading has come.
    fn show(&self, path: &Path) {
        let (rows, sequences) = (report::count(self.report.rows, "row"), report::count(self.samples.len(), "sequence"));
        progress::doing(&format!("reading {} · {rows}, {sequences}", path.display()));
    }

    /// Notes a sentence about the file.
    fn note(&mut self, sentence: String) {
        self.report.notes.push((self.index, sentence));
    }

    /// Makes samples of the rows of a table.
    fn table(&mut self, path: &Path, objects: impl Iterator<Item = Object>) -> Result<(), CliError> {
        let options = self.options;
        let table = format::table(options.format, objects, &options.rows);
        let (format, rows) = table.map_err(|(place, wrong)| bad_row(path, place, wrong))?;
        self.rows(path, format, rows)
    }

    /// Makes samples of the rows of a text file or a JSON file.
    fn text(&mut self, path: &Path) -> Result<(), CliError> {
        let at = |(place, wrong): (Origin, Wrong)| bad_row(path, place, wrong);
        let options = self.options;
        let content = text_of(path)?;
        let format = match options.format {
            Some(format) => format,
            None => format::inferred(path, &content).map_err(at)?,
        };
        if let Some(separator) = options.rows.separator.as_ref().filter(|_| format == Format::Text)
            && !content.contains(separator.as_str())
        {
            self.note(format!("it does not contain {separator:?}, so it is one document"));
        }
        let rows = format::rows(format, &content, &options.rows).map_err(|reason| bad(path, None, reason))?;
        self.rows(path, format, rows)
    }

    /// Makes samples of the rows of a file.
    fn rows<'a>(
        &mut self,
        path: &Path,
        format: Format,
        rows: impl Iterator<Item = format::FoundRow<'a>>,
    ) -> Result<(), CliError> {
        self.report.has_documents |= matches!(format, Format::Documents | Format::Text);
        self.report.formats.insert(match extensions::reader(path).and_then(Reader::table) {
            Some(table) => format!("{} in {table}", format.name()),
            None => format.name(),
        });
        let (samples, dropped) = (self.samples.len(), self.report.dropped.len());
        for (place, row) in rows {
            let place = Origin { file: self.index as u32, ..place };
            let before = self.samples.len();
            if self.report.rows.is_multiple_of(SHOWN_EACH) {
                self.show(path);
            }
            let (row, weight) = row.map_err(|wrong| bad_row(path, place, wrong))?;
            self.row(path, row, place).map_err(|error| of_row(path, place, error))?;
            self.weigh(before, weight, place);
            if self.samples.len() >= self.enough {
                return Ok(());
            }
        }
        if self.samples.len() > samples {
            return Ok(());
        }
        let reasons = match self.options.max_seq_length {
            usize::MAX => "not supervised or of weight 0".to_owned(),
            most => format!("longer than --max-seq-length {most}, not supervised, or of weight 0"),
        };
        Err(match self.report.dropped.len() - dropped {
            0 => bad(path, None, "no rows in it; each row is a training example"),
            n => {
                let dropped = report::count(n, "row");
                bad(path, None, format!("no row is left: {dropped} dropped, {reasons}"))
            }
        })
    }

    /// Makes samples of a row.
    fn row(&mut self, path: &Path, row: Row, place: Origin) -> Result<(), CliError> {
        match row {
            Row::Header => {
                self.report.header_skipped = true;
                Ok(())
            }
            Row::Document(content) => self.document(path, &content, place),
            Row::Conversation(conversation) => {
                self.report.rows += 1;
                let (text, loss_on) = (self.text, self.options.loss_on);
                for field in conversation.left_out_by(text) {
                    *self.left_out.entry(field).or_default() += 1;
                }
                conversation.samples(text, loss_on, |mut sample| {
                    sample.origins[0] = place;
                    self.take(sample, place)
                })
            }
        }
    }

    /// Gives the samples of the row at a place, those from `first` on, its weight.
    fn weigh(&mut self, first: usize, weight: f64, place: Origin) {
        if weight == 0.0 && self.samples.len() > first {
            self.samples.truncate(first);
            self.report.dropped.push(place);
        }
        self.samples[first..].iter_mut().for_each(|sample| sample.weight = weight);
    }

    /// Cuts a document into sequences.
    fn document(&mut self, path: &Path, content: &str, place: Origin) -> Result<(), CliError> {
        self.report.rows += 1;
        let most = self.options.max_seq_length;
        let mut ids = Vec::new();
        // Pieces, because the ids of a whole book take memory.
        let mut pieces = self.text.tokenizer.pieces(content);
        // The rest of a long document is read only if its sequences are wanted.
        while self.samples.len() < self.enough {
            let Some(piece) = pieces.next() else {
                ids.extend(self.text.tokenizer.id("<|endoftext|>"));
                self.sequences(&mut ids, most, place);
                self.sequence(ids, place);
                return Ok(());
            };
            ids.extend(self.text.tokenizer.encode(piece)?);
            self.sequences(&mut ids, most, place);
            self.show(path);
        }
        Ok(())
    }

    /// Takes the sequences of `most` tokens that are complete.
    fn sequences(&mut self, ids: &mut Vec<u32>, most: usize, place: Origin) {
        let complete = ids.len() / most * most;
        ids.drain(..complete).collect::<Vec<u32>>().chunks(most).for_each(|piece| self.sequence(piece.to_vec(), place));
    }

    /// Adds a sequence of a document. One token alone predicts nothing.
    fn sequence(&mut self, ids: Vec<u32>, place: Origin) {
        if ids.len() > 1 {
            let supervised = vec![true; ids.len()];
            let mut sample = Sample::new(ids, supervised, String::new());
            sample.origins[0] = place;
            self.samples.push(sample);
        }
    }

    /// Adds a sample of the row at a place, or as much of it as the limit on its length allows.
    fn take(&mut self, sample: Sample, place: Origin) -> Result<(), CliError> {
        let (len, most) = (sample.ids.len(), self.options.max_seq_length);
        *self.report.lengths.entry(len.next_multiple_of(TILE)).or_default() += 1;
        self.report.longest = self.report.longest.max(len);
        self.report.overlong += usize::from(len > most);
        let mut pieces = match self.options.overlong {
            _ if len <= most => vec![sample],
            Overlong::Error => {
                let text = format!("{len} tokens exceed --max-seq-length {most}; raise it, or use --overlong drop");
                return Err(CliError::Usage(text));
            }
            Overlong::Drop => vec![],
            Overlong::Truncate => vec![sample.piece(0..most)],
            Overlong::Split => sample.pieces(most).collect(),
        };
        pieces.retain(|piece| piece.supervised_tokens() > 0);
        if pieces.is_empty() {
            self.report.dropped.push(place);
        } else if len > most {
            self.report.truncated += 1;
        }
        self.samples.extend(pieces);
        Ok(())
    }
}

/// Rows after which a terminal shows how many there are.
const SHOWN_EACH: usize = 128;
/// How files begin that gzip, bzip2, xz, zstd and zip have made.
const COMPRESSED: [&[u8]; 5] = [b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PK\x03\x04"];

/// The text of a file, without a byte-order mark.
fn text_of(path: &Path) -> Result<String, CliError> {
    let mut bytes = data_files::read_whole(path)?;
    if bytes.starts_with(b"\xEF\xBB\xBF") {
        bytes.drain(..3);
    }
    if COMPRESSED.iter().any(|beginning| bytes.starts_with(beginning)) {
        return Err(bad(
            path,
            None,
            "the file is compressed; unpack it first, for example with gunzip, unzstd or unzip",
        ));
    }
    let line = |before: &[u8]| Some(before.iter().filter(|byte| **byte == b'\n').count() + 1);
    if let Some(at) = bytes.iter().position(|byte| *byte == 0) {
        return Err(bad(path, line(&bytes[..at]), "a byte that is 0, which no text has; save the file as UTF-8"));
    }
    String::from_utf8(bytes).map_err(|e| {
        let valid = &e.as_bytes()[..e.utf8_error().valid_up_to()];
        bad(path, line(valid), "not UTF-8; save the file as UTF-8")
    })
}

fn bad(path: &Path, line: Option<usize>, reason: impl ToString) -> CliError {
    CliError::data(path, line, reason)
}

/// What is wrong with the row at a place.
fn bad_row(path: &Path, place: Origin, Wrong { below, column, reason }: Wrong) -> CliError {
    let line = Some(place.line as usize).filter(|line| *line > 0).map(|line| line + below);
    let column = column.filter(|_| line.is_some());
    // A column says more than the number of the row.
    let row = Some(place.row as usize).filter(|row| *row > 0 && column.is_none());
    CliError::Data { path: path.to_owned(), line, column, row, reason }
}

/// The error of the row at a place. A machine that has no memory is not the row's fault.
fn of_row(path: &Path, place: Origin, error: CliError) -> CliError {
    match error.exit_code() {
        2 | 3 => bad_row(path, place, error.to_string().into()),
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::DataReport;

    #[test]
    fn a_share_of_the_sequences_fits_into_a_length() {
        let report = DataReport { lengths: [(128, 90), (256, 5), (1024, 5)].into(), ..DataReport::default() };
        assert_eq!(
            [0.5, 0.9, 0.901, 0.95, 0.951, 1.0].map(|share| report.fitting(share)),
            [128, 128, 256, 256, 1024, 1024]
        );
        assert_eq!(DataReport::default().fitting(1.0), 0);
    }
}
