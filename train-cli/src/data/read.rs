//! Files to token sequences with a mask of what is supervised.
//!
//! Conversations are rendered by the model's own template. What the template opens for the assistant
//! is prompt; what the assistant says, its end token included, is supervised: a model that never
//! sees its end token supervised never learns to stop.

use crate::{
    CliError,
    model_files::TextFiles,
    settings::{Format, LossOn, Overlong},
};
use backend_nvfp4::{Stream, reference};
use model_qwen3::chat_template::RenderOptions;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

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

    pub(crate) fn piece(&self, range: std::ops::Range<usize>) -> Self {
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
