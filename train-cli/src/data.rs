//! Files to token sequences with a mask of what is supervised, and their order in a run.
//!
//! Conversations are rendered by the model's own template. What the template opens for the assistant
//! is prompt; what the assistant says, its end token included, is supervised: a model that never
//! sees its end token supervised never learns to stop.

use crate::{CliError, model_files::TextFiles};
use backend_nvfp4::{Stream, reference};
use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::tensor::backend::Backend;
use model_qwen3::chat_template::RenderOptions;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::Arc,
};

/// How a file is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// By extension: .tsv, .jsonl, .txt.
    Auto,
    /// A line is `{"messages": [{"role": …, "content": …}, …]}`.
    Messages,
    /// A line is `prompt<TAB>target`; `#` starts a comment.
    Tsv,
    /// One document, cut into sequences, all of it supervised.
    Text,
}

/// What is supervised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum LossOn {
    /// Every assistant turn, with its end token.
    #[value(alias = "completion")]
    Assistant,
    /// Every token.
    All,
}

/// What happens to a row longer than the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Overlong {
    /// The run does not start.
    Error,
    /// It is left out and counted.
    Drop,
    /// Its end is cut off and counted.
    Truncate,
    /// It is cut into several, each of which is learnt; they do not see each other.
    Split,
}

/// Choices that turn files into samples.
#[derive(Debug, Clone, Copy)]
pub struct DataOptions {
    /// File format.
    pub format: Format,
    /// What is supervised.
    pub loss_on: LossOn,
    /// Longest sequence.
    pub max_seq_length: usize,
    /// What happens to longer ones.
    pub overlong: Overlong,
}

impl DataOptions {
    /// Pieces of a sample that the limit allows.
    fn fitted(&self, sample: Sample) -> Vec<Sample> {
        let most = self.max_seq_length;
        match self.overlong {
            _ if sample.ids.len() <= most => vec![sample],
            Overlong::Error | Overlong::Drop => vec![],
            Overlong::Truncate => vec![sample.piece(0..most)],
            Overlong::Split => {
                let starts = (0..sample.ids.len()).step_by(most);
                starts.map(|at| sample.piece(at..(at + most).min(sample.ids.len()))).collect()
            }
        }
    }
}

/// A token sequence with its mask.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sample {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Whether predicting this token counts.
    pub supervised: Vec<bool>,
    /// The first user message, for sample answers; empty for plain text.
    pub prompt: String,
    /// Where each document begins, of several that were packed into one row; the first at 0.
    pub documents: Vec<usize>,
    /// Which of the files it came from.
    pub file: usize,
}

impl Sample {
    /// One document.
    pub(crate) fn new(ids: Vec<u32>, supervised: Vec<bool>, prompt: String) -> Self {
        Self { ids, supervised, prompt, documents: vec![0], file: 0 }
    }

    fn piece(&self, range: std::ops::Range<usize>) -> Self {
        Self::new(self.ids[range.clone()].to_vec(), self.supervised[range].to_vec(), self.prompt.clone())
    }

    /// Tokens whose prediction counts. The first token is never predicted.
    pub fn supervised_tokens(&self) -> usize {
        self.supervised.iter().skip(1).filter(|s| **s).count()
    }
}

/// What came out of the files.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct DataReport {
    /// Rows read.
    pub rows: usize,
    /// Sequences made.
    pub samples: usize,
    /// Tokens in them.
    pub tokens: usize,
    /// Supervised tokens in them.
    pub supervised_tokens: usize,
    /// Lines that were too long and left out.
    pub dropped: Vec<usize>,
    /// Lines that were cut.
    pub truncated: Vec<usize>,
    /// Rows after packing, if it was asked for, and the share of their tokens that is no padding.
    pub packed: Option<(usize, f64)>,
    /// A header line that was skipped.
    pub header_skipped: bool,
}

/// Reads training files.
///
/// # Errors
/// With file and line, if a row is malformed or too long, or nothing supervised is left.
pub fn load(paths: &[PathBuf], text: &TextFiles, options: DataOptions) -> Result<(Vec<Sample>, DataReport), CliError> {
    let mut samples = Vec::new();
    let mut report = DataReport::default();
    for (file, path) in paths.iter().enumerate() {
        let content = read(path)?;
        let format = match (options.format, path.extension().and_then(|e| e.to_str())) {
            (Format::Auto, Some("tsv")) => Format::Tsv,
            (Format::Auto, Some("jsonl" | "json")) => Format::Messages,
            (Format::Auto, Some("txt" | "md")) => Format::Text,
            (Format::Auto, _) => {
                return Err(bad(path, None, "its name does not tell the format: give --format tsv, messages or text"));
            }
            (format, _) => format,
        };
        let before = samples.len();
        match format {
            Format::Text => documents(&content, text, options, &mut samples, &mut report)?,
            _ => rows(path, &content, format, text, options, &mut samples, &mut report)?,
        }
        if samples.len() == before {
            let reason = match report.dropped.len() {
                0 => "no rows in it".to_owned(),
                n => format!(
                    "nothing to learn: {n} rows dropped, longer than --max-seq-length {}",
                    options.max_seq_length
                ),
            };
            return Err(bad(path, None, reason));
        }
        samples[before..].iter_mut().for_each(|s| s.file = file);
    }
    report.samples = samples.len();
    report.tokens = samples.iter().map(|s| s.ids.len()).sum();
    report.supervised_tokens = samples.iter().map(Sample::supervised_tokens).sum();
    Ok((samples, report))
}

/// Most random rows; longer runs see them again.
const SYNTHETIC_ROWS: usize = 1024;

/// Random ids, all supervised: for timing and for memory reports. At most 1,024 rows.
pub fn synthetic(rows: usize, len: usize, vocab: usize, seed: u64) -> Vec<Sample> {
    let draw = |row: usize, i: usize| {
        let stream = Stream { seed, step: row as u32, stream: 0xDA7A };
        reference::philox(i as u32, stream)[0] % vocab as u32
    };
    (0..rows.min(SYNTHETIC_ROWS))
        .map(|row| Sample::new((0..len).map(|i| draw(row, i)).collect(), vec![true; len], String::new()))
        .collect()
}

fn read(path: &Path) -> Result<String, CliError> {
    let bytes = std::fs::read(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => CliError::Usage(format!("{}: no such file", path.display())),
        _ => CliError::io(path)(e),
    })?;
    let bytes = bytes.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(&bytes);
    match std::str::from_utf8(bytes) {
        Ok(text) => Ok(text.to_owned()),
        Err(e) => {
            let line = bytes[..e.valid_up_to()].iter().filter(|b| **b == b'\n').count() + 1;
            Err(bad(path, Some(line), "not UTF-8"))
        }
    }
}

fn documents(
    content: &str,
    text: &TextFiles,
    options: DataOptions,
    samples: &mut Vec<Sample>,
    report: &mut DataReport,
) -> Result<(), CliError> {
    report.rows += 1;
    let mut ids = text.tokenizer.encode(content)?;
    ids.extend(text.tokenizer.id("<|endoftext|>"));
    for piece in ids.chunks(options.max_seq_length).filter(|p| p.len() > 1) {
        samples.push(Sample::new(piece.to_vec(), vec![true; piece.len()], String::new()));
    }
    Ok(())
}

fn rows(
    path: &Path,
    content: &str,
    format: Format,
    text: &TextFiles,
    options: DataOptions,
    samples: &mut Vec<Sample>,
    report: &mut DataReport,
) -> Result<(), CliError> {
    let mut first = true;
    for (i, line) in content.lines().enumerate() {
        let number = i + 1;
        let line = line.trim_end_matches('\r');
        if line.trim().is_empty() || format == Format::Tsv && line.starts_with('#') {
            continue;
        }
        let at = |reason: String| bad(path, Some(number), reason);
        let (messages, tools) = match format {
            Format::Tsv => {
                let (prompt, target) =
                    line.split_once('\t').ok_or_else(|| at("no tab: a row is prompt<TAB>target".into()))?;
                if std::mem::take(&mut first) && (prompt, target) == ("prompt", "target") {
                    report.header_skipped = true;
                    continue;
                }
                if prompt.trim().is_empty() || target.trim().is_empty() {
                    return Err(at("prompt or target is empty".into()));
                }
                let user = json!({"role": "user", "content": prompt});
                (vec![user, json!({"role": "assistant", "content": target})], None)
            }
            _ => parse_messages(line).map_err(at)?,
        };
        report.rows += 1;
        for sample in conversation(&messages, tools.as_ref(), text, options.loss_on).map_err(|e| match e {
            CliError::Data { reason, .. } => at(reason),
            other => at(other.to_string()),
        })? {
            let (len, most) = (sample.ids.len(), options.max_seq_length);
            if len > most && options.overlong == Overlong::Error {
                return Err(at(format!("{len} tokens, --max-seq-length is {most}; raise it, or --overlong drop")));
            }
            let mut pieces = options.fitted(sample);
            pieces.retain(|piece| piece.supervised_tokens() > 0);
            if pieces.is_empty() {
                report.dropped.push(number);
            } else if len > most {
                report.truncated.push(number);
            }
            samples.extend(pieces);
        }
    }
    Ok(())
}

fn parse_messages(line: &str) -> Result<(Vec<Value>, Option<Value>), String> {
    let mut row: Value = serde_json::from_str(line).map_err(|e| format!("not JSON: {e}"))?;
    let Some(messages) = row.get_mut("messages").and_then(Value::as_array_mut) else {
        return Err("no \"messages\" list in it".into());
    };
    let mut messages = std::mem::take(messages);
    for (i, message) in messages.iter_mut().enumerate() {
        check_message(message).map_err(|e| format!("message {}: {e}", i + 1))?;
    }
    if !messages.iter().any(|m| m["role"] == "assistant") {
        return Err("no assistant message: nothing to learn".into());
    }
    let tools = row.get("tools").cloned().filter(|t| !t.is_null());
    Ok((messages, tools))
}

/// Templates render what they do not know as nothing: what they would swallow is refused here. Content
/// in text parts is joined.
fn check_message(message: &mut Value) -> Result<(), String> {
    match message.get("role").and_then(Value::as_str) {
        None => return Err("no \"role\"".into()),
        Some("system" | "user" | "assistant" | "tool") => {}
        Some(role) => return Err(format!("role {role:?}: system, user, assistant or tool is needed")),
    }
    let calls = message.get("tool_calls").is_some_and(|c| c.as_array().is_some_and(|c| !c.is_empty()));
    let text = match message.get("content") {
        Some(Value::String(text)) => text.clone(),
        None | Some(Value::Null) if calls => String::new(),
        Some(Value::Array(parts)) => {
            let texts: Option<Vec<&str>> = parts.iter().map(|p| p.get("text").and_then(Value::as_str)).collect();
            texts.ok_or("\"content\" holds a part that is not text")?.concat()
        }
        _ => return Err("\"content\" must be text".into()),
    };
    if text.trim().is_empty() && !calls {
        return Err("\"content\" is empty".into());
    }
    message["content"] = text.into();
    Ok(())
}

/// One sample of a conversation, or one a turn where the template renders earlier turns differently
/// once later ones follow (templates that drop old thinking do).
fn conversation(
    messages: &[Value],
    tools: Option<&Value>,
    text: &TextFiles,
    loss_on: LossOn,
) -> Result<Vec<Sample>, CliError> {
    let render = |messages: &[Value], add_generation_prompt| {
        text.template.render(messages, RenderOptions { tools, add_generation_prompt, enable_thinking: None })
    };
    let user = messages.iter().find(|m| m["role"] == "user");
    let prompt = user.and_then(|m| m["content"].as_str()).unwrap_or_default().to_owned();
    let full = render(messages, false)?;
    if loss_on == LossOn::All {
        let ids = text.tokenizer.encode(&full)?;
        let supervised = vec![true; ids.len()];
        return Ok(vec![Sample::new(ids, supervised, prompt)]);
    }
    // Where each assistant turn begins and ends in its own render.
    let mut turns = Vec::new();
    for i in (0..messages.len()).filter(|&i| messages[i]["role"] == "assistant") {
        let opened = render(&messages[..i], true)?;
        let closed = render(&messages[..=i], false)?;
        if !closed.starts_with(&opened) {
            let reason = "the template renders an answer other than it opens one".into();
            return Err(CliError::Data { path: PathBuf::new(), line: None, reason });
        }
        let end = closed.trim_end().len();
        turns.push((closed, opened.len(), end));
    }
    if turns.iter().all(|(closed, _, end)| full.starts_with(&closed[..*end])) {
        let spans: Vec<_> = turns.iter().map(|(_, start, end)| *start..*end).collect();
        return Ok(vec![sample(&full, &spans, prompt, text)?]);
    }
    turns
        .iter()
        .map(|(closed, start, end)| sample(closed, std::slice::from_ref(&(*start..*end)), prompt.clone(), text))
        .collect()
}

/// Encodes prompt and answers apart, as generation will see them.
fn sample(
    rendered: &str,
    spans: &[std::ops::Range<usize>],
    prompt: String,
    text: &TextFiles,
) -> Result<Sample, CliError> {
    let mut out = Sample::new(vec![], vec![], prompt);
    let mut at = 0;
    for span in spans {
        for (piece, supervised) in [(&rendered[at..span.start], false), (&rendered[span.clone()], true)] {
            let ids = text.tokenizer.encode(piece)?;
            out.supervised.extend(std::iter::repeat_n(supervised, ids.len()));
            out.ids.extend(ids);
        }
        if out.ids.last().is_none_or(|id| !text.stop_ids.contains(id)) {
            let reason = "an answer does not end in a stop token: the model would never learn to stop".into();
            return Err(CliError::Data { path: PathBuf::new(), line: None, reason });
        }
        at = span.end;
    }
    Ok(out)
}

fn bad(path: &Path, line: Option<usize>, reason: impl ToString) -> CliError {
    CliError::Data { path: path.to_owned(), line, reason: reason.to_string() }
}

/// Splits off evaluation rows: `share` of them, at most 200, at least one of ten or more.
pub fn split(samples: Vec<Sample>, share: f64, seed: u64) -> (Vec<Sample>, Vec<Sample>) {
    let n = samples.len();
    let wanted = (n as f64 * share).round() as usize;
    let count = if share <= 0.0 || n < 10 { 0 } else { wanted.clamp(1, 200) };
    let order = permutation(n, seed, u32::MAX);
    let held: std::collections::HashSet<usize> = order[..count].iter().copied().collect();
    let (mut train, mut eval) = (Vec::new(), Vec::new());
    for (i, sample) in samples.into_iter().enumerate() {
        if held.contains(&i) { eval.push(sample) } else { train.push(sample) }
    }
    (train, eval)
}

/// Packs samples into rows of at most `most` tokens, the longest first into the fullest row that takes it (best fit,
/// decreasing). Documents of a row see neither each other nor each other's positions, and the first token of each is
/// not predicted.
pub fn pack(samples: Vec<Sample>, most: usize) -> Vec<Sample> {
    let mut order: Vec<usize> = (0..samples.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(samples[i].ids.len()), i));
    let mut rows: Vec<Sample> = Vec::new();
    // Rows by what they still take; of equals the first made.
    let mut open: BTreeSet<(usize, usize)> = BTreeSet::new();
    let mut samples: Vec<Option<Sample>> = samples.into_iter().map(Some).collect();
    for i in order {
        let sample = samples[i].take().expect("each once");
        let len = sample.ids.len();
        let Some(&(room, row)) = open.range((len, 0)..).next() else {
            open.insert((most.saturating_sub(len), rows.len()));
            rows.push(sample);
            continue;
        };
        open.remove(&(room, row));
        open.insert((room - len, row));
        let packed = &mut rows[row];
        packed.documents.push(packed.ids.len());
        packed.ids.extend(sample.ids);
        let first = packed.supervised.len();
        packed.supervised.extend(sample.supervised);
        packed.supervised[first] = false;
    }
    rows
}

/// Training samples repeated by the weights of their files; no weights is once. After the split: a row that was held
/// out has no copy in training.
pub fn weigh(samples: Vec<Sample>, weights: &[f64], seed: u64) -> Vec<Sample> {
    if weights.is_empty() {
        return samples;
    }
    let mut files: Vec<Vec<Sample>> = vec![vec![]; weights.len()];
    samples.into_iter().for_each(|s| files[s.file].push(s));
    let own = |(file, (samples, weight)): (usize, (Vec<Sample>, &f64))| weighted(samples, *weight, seed, file as u32);
    files.into_iter().zip(weights).enumerate().flat_map(own).collect()
}

/// `samples` times `weight`: whole copies, and of what is left a seeded choice.
fn weighted(samples: Vec<Sample>, weight: f64, seed: u64, file: u32) -> Vec<Sample> {
    let n = samples.len();
    if n == 0 {
        return samples;
    }
    let wanted = ((n as f64 * weight).round() as usize).max(1);
    let order = permutation(n, seed, u32::MAX - 1 - file);
    (0..wanted).map(|i| samples[if i / n < wanted / n { i % n } else { order[i % n] }].clone()).collect()
}

/// Fisher and Yates by counter-based numbers: the order of epoch `epoch`.
fn permutation(n: usize, seed: u64, epoch: u32) -> Vec<usize> {
    let mut order: Vec<usize> = (0..n).collect();
    for i in (1..n).rev() {
        let [a, b, ..] = reference::philox(i as u32, Stream { seed, step: epoch, stream: 0x5EED });
        order.swap(i, ((u64::from(a) << 32 | u64::from(b)) % (i as u64 + 1)) as usize);
    }
    order
}

/// A few sequences that go through the model together.
#[derive(Debug, Clone)]
pub struct MicroBatch {
    /// Token ids.
    pub ids: Vec<Vec<u32>>,
    /// Masks.
    pub supervised: Vec<Vec<bool>>,
    /// Where the documents of each row begin.
    pub documents: Vec<Vec<usize>>,
    /// Supervised tokens of the whole optimizer step: what its loss is divided by.
    pub divisor: usize,
    /// Whether the optimizer steps after it.
    pub ends_step: bool,
}

/// Tokens that a row of `len` takes: beyond one tile of a GPU's products whole ones, which the products read in any
/// case, so that buffers are of few sizes. What quantises activations sees the padding too.
pub fn padded_len(len: usize) -> usize {
    const TILE: usize = 128;
    if len > TILE { len.next_multiple_of(TILE) } else { len }
}

impl MicroBatch {
    /// A batch of samples.
    pub fn new(samples: &[&Sample], divisor: usize) -> Self {
        Self {
            ids: samples.iter().map(|s| s.ids.clone()).collect(),
            supervised: samples.iter().map(|s| s.supervised.clone()).collect(),
            documents: samples.iter().map(|s| s.documents.clone()).collect(),
            divisor,
            ends_step: false,
        }
    }

    /// A batch of rows that are one document each.
    pub fn of(ids: Vec<Vec<u32>>, supervised: Vec<Vec<bool>>, divisor: usize) -> Self {
        let documents = vec![vec![0]; ids.len()];
        Self { ids, supervised, documents, divisor, ends_step: true }
    }

    /// Tokens of a row, padding included.
    pub fn tokens_a_row(&self) -> usize {
        padded_len(self.ids.iter().map(Vec::len).max().unwrap_or(0))
    }

    /// The ids of rows of that many tokens.
    pub fn padded(&self) -> Vec<Vec<u32>> {
        let t = self.tokens_a_row();
        let pad = |row: &Vec<u32>| row.iter().copied().chain(std::iter::repeat(0)).take(t).collect();
        self.ids.iter().map(pad).collect()
    }

    /// Of every token, its position in its document and where in its row that begins. Padding belongs to the last.
    pub fn places(&self) -> (Vec<u32>, Vec<u32>) {
        let t = self.tokens_a_row();
        let (mut positions, mut starts) = (Vec::new(), Vec::new());
        for documents in &self.documents {
            for (i, &start) in documents.iter().enumerate() {
                let end = documents.get(i + 1).copied().unwrap_or(t);
                positions.extend(0..(end - start) as u32);
                starts.extend(std::iter::repeat_n(start as u32, end - start));
            }
        }
        (positions, starts)
    }
}

/// The order of samples over a run. What a step sees is a function of its number alone, so that a
/// resumed run needs no saved position.
#[derive(Debug, Clone)]
pub struct Order {
    /// The samples.
    pub samples: Arc<Vec<Sample>>,
    /// Sequences in a micro-batch.
    pub batch_size: usize,
    /// Micro-batches in a step.
    pub accumulation: usize,
    /// Steps of the run.
    pub steps: usize,
    /// Sequences after which the run ends, if epochs and not steps are counted.
    pub limit: usize,
    /// Shuffles.
    pub seed: u64,
    /// The first step that is run: above 0 after a resume.
    pub start: usize,
}

impl Order {
    /// The micro-batches of a step.
    pub fn step(&self, step: usize) -> Vec<MicroBatch> {
        let n = self.samples.len();
        let size = self.batch_size * self.accumulation;
        let range = step * size..((step + 1) * size).min(self.limit);
        let mut epoch = (usize::MAX, Vec::new());
        let picked: Vec<&Sample> = range
            .map(|i| {
                if epoch.0 != i / n {
                    epoch = (i / n, permutation(n, self.seed, (i / n) as u32));
                }
                &self.samples[epoch.1[i % n]]
            })
            .collect();
        let divisor = picked.iter().map(|s| s.supervised_tokens()).sum();
        let mut batches: Vec<_> = picked.chunks(self.batch_size).map(|c| MicroBatch::new(c, divisor)).collect();
        if let Some(last) = batches.last_mut() {
            last.ends_step = true;
        }
        batches
    }

    /// Epochs done after `steps` steps.
    pub fn epochs(&self, steps: usize) -> f64 {
        (steps * self.batch_size * self.accumulation).min(self.limit) as f64 / self.samples.len() as f64
    }
}

struct Steps<'a> {
    order: &'a Order,
    micro: std::vec::IntoIter<MicroBatch>,
    next: usize,
}

impl Iterator for Steps<'_> {
    type Item = MicroBatch;

    fn next(&mut self) -> Option<MicroBatch> {
        loop {
            if let Some(batch) = self.micro.next() {
                return Some(batch);
            }
            if self.next >= self.order.steps {
                return None;
            }
            self.micro = self.order.step(self.next).into_iter();
            self.next += 1;
        }
    }
}

impl DataLoaderIterator<MicroBatch> for Steps<'_> {
    fn progress(&self) -> Progress {
        Progress::new(self.next, self.order.steps)
    }
}

/// Burn's view of the order: micro-batches, step after step.
impl<B: Backend> DataLoader<B, MicroBatch> for Order {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<MicroBatch> + 'a> {
        Box::new(Steps { order: self, micro: vec![].into_iter(), next: self.start })
    }

    fn num_items(&self) -> usize {
        self.steps
    }

    fn to_device(&self, _device: &B::Device) -> Arc<dyn DataLoader<B, MicroBatch>> {
        Arc::new(self.clone())
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<B, MicroBatch>> {
        Arc::new(Self { start, steps: end, ..self.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(n: usize) -> Vec<Sample> {
        synthetic(n, 4, 100, 1)
    }

    #[test]
    fn an_epoch_shows_every_sample_once_in_a_new_order() {
        let order = Order {
            samples: Arc::new(samples(10)),
            batch_size: 3,
            accumulation: 1,
            steps: 7,
            limit: 20,
            seed: 5,
            start: 0,
        };
        let seen: Vec<Vec<u32>> = (0..7).flat_map(|s| order.step(s)).flat_map(|b| b.ids).collect();
        assert_eq!(seen.len(), 20);
        let sorted = |ids: &[Vec<u32>]| {
            let mut ids = ids.to_vec();
            ids.sort();
            ids
        };
        assert_eq!(sorted(&seen[..10]), sorted(&seen[10..]));
        assert_ne!(seen[..10], seen[10..]);
        let resumed = Order { start: 4, ..order.clone() };
        let all: Vec<_> = DataLoader::<burn::backend::NdArray, _>::iter(&order).map(|b| b.ids).collect();
        let rest: Vec<_> = DataLoader::<burn::backend::NdArray, _>::iter(&resumed).map(|b| b.ids).collect();
        assert_eq!(all[4..], rest[..]);
    }

    #[test]
    fn packing_keeps_every_document_whole_and_apart() {
        let lengths = [5usize, 30, 7, 12, 29, 3, 64, 20];
        let all: Vec<Sample> = lengths.iter().zip(synthetic(8, 64, 100, 2)).map(|(&len, s)| s.piece(0..len)).collect();
        let rows = pack(all.clone(), 64);
        assert_eq!(rows.len(), 3, "170 tokens fill three rows of 64");
        let mut found = Vec::new();
        for row in &rows {
            assert!(row.ids.len() <= 64 && row.ids.len() == row.supervised.len());
            for (i, &start) in row.documents.iter().enumerate() {
                let end = row.documents.get(i + 1).copied().unwrap_or(row.ids.len());
                assert_eq!(row.supervised[start], start == 0, "the first token of a document is not predicted");
                found.push(row.ids[start..end].to_vec());
            }
        }
        let sorted = |mut ids: Vec<Vec<u32>>| {
            ids.sort();
            ids
        };
        assert_eq!(sorted(found), sorted(all.into_iter().map(|s| s.ids).collect()));
        let (positions, starts) = MicroBatch::new(&[&rows[1]], 1).places();
        for i in 0..positions.len() {
            assert_eq!(positions[i] + starts[i], i as u32);
        }
    }

    #[test]
    fn rows_longer_than_a_tile_fill_whole_ones() {
        let batch = |lengths: &[usize]| {
            let ids: Vec<Vec<u32>> = lengths.iter().map(|&n| vec![7; n]).collect();
            let supervised = lengths.iter().map(|&n| vec![true; n]).collect();
            MicroBatch::of(ids, supervised, 1)
        };
        for (lengths, tokens) in [(&[3usize, 100][..], 100), (&[128], 128), (&[129, 5], 256), (&[2000], 2048)] {
            let batch = batch(lengths);
            assert_eq!(batch.tokens_a_row(), tokens);
            assert!(batch.padded().iter().all(|row| row.len() == tokens));
            let (positions, starts) = batch.places();
            assert_eq!((positions.len(), starts.len()), (tokens * lengths.len(), tokens * lengths.len()));
        }
    }

    #[test]
    fn weights_repeat_and_thin_out() {
        let all = samples(10);
        let of = |weight| weighted(all.clone(), weight, 3, 0);
        assert_eq!((of(1.0).len(), of(2.5).len(), of(0.3).len()), (10, 25, 3));
        assert!(all.iter().all(|s| (2..=3).contains(&of(2.5).iter().filter(|t| *t == s).count())));
    }

    #[test]
    fn split_is_disjoint_and_small_sets_keep_their_rows() {
        let (train, eval) = split(samples(64), 0.02, 3);
        assert_eq!((train.len(), eval.len()), (63, 1));
        assert!(!train.contains(&eval[0]));
        assert_eq!(split(samples(9), 0.5, 3).1.len(), 0);
    }
}
