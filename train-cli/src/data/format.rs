//! Data formats: how a file becomes rows. A row is a conversation or a document; [`super::read`] makes samples of both. The
//! rows of JSON formats are objects, which also stand in the rows of a table (`parquet.rs`).
//!
//! A new format is a variant of [`Format`]. The compiler then asks for it in `stored`.

use crate::{
    data::{
        conversation::{Conversation, empty},
        sample::Origin,
        tool_calls,
    },
    error::place_of,
    settings::{
        Auto, Format, MOST_WEIGHT,
        extensions::{self, Reader},
    },
};
use model_qwen3::json;
use serde::de::IgnoredAny;
use serde_json::{Map, Value, json};
use std::{borrow::Cow, path::Path};

/// A row, before the chat template and the tokenizer.
pub(super) enum Row<'a> {
    Conversation(Conversation),
    /// A text of its own, which ends with the end-of-text token.
    Document(Cow<'a, str>),
    /// Names of columns.
    Header,
}

/// A row with its place in its file and its weight, or what is wrong there.
pub(super) type FoundRow<'a> = (Origin, Result<(Row<'a>, f64), Wrong>);

/// What is wrong with a row.
#[derive(Debug, Clone)]
pub(super) struct Wrong {
    /// Lines below the first line of the row.
    pub(super) below: usize,
    /// The byte of the line, counted from 1, if it is known.
    pub(super) column: Option<usize>,
    /// What is wrong.
    pub(super) reason: String,
}

impl From<String> for Wrong {
    fn from(reason: String) -> Self {
        Self { below: 0, column: None, reason }
    }
}

impl From<serde_json::Error> for Wrong {
    fn from(error: serde_json::Error) -> Self {
        let (below, column, reason) = place_of(&error);
        Self { below, column, reason }
    }
}

/// What the settings say about rows, besides their format.
#[derive(Debug, Clone, Default)]
pub struct RowOptions {
    /// What stands between the documents of a text file.
    pub separator: Option<String>,
    /// The key of a row's weight.
    pub weight: Option<String>,
}

/// The format of a file by its name and, if it is JSON, by the keys of its first row.
///
/// # Errors
/// If neither tells: the place and what is wrong.
pub(super) fn inferred(path: &Path, content: &str) -> Result<Format, (Origin, Wrong)> {
    let nowhere = |reason: &str| (Origin::default(), reason.to_owned().into());
    match extensions::reader(path) {
        Some(Reader::Text(format)) => Ok(format),
        Some(Reader::Json) => match objects(content).next() {
            None => Err(nowhere(NO_ROWS)),
            Some((place, row)) => row.and_then(|row| Ok(by_keys(&row)?)).map_err(|wrong| (place, wrong)),
        },
        Some(Reader::Parquet | Reader::Arrow) | None => Err(nowhere(&format!(
            "the file name does not tell the data format ({} do); give --format",
            extensions::known()
        ))),
    }
}

/// The rows of a file.
///
/// # Errors
/// If its rows cannot have the weights that are wanted.
pub(super) fn rows<'a>(
    format: Format,
    content: &'a str,
    options: &'a RowOptions,
) -> Result<Box<dyn Iterator<Item = FoundRow<'a>> + 'a>, String> {
    let stored = stored(format);
    if let (Stored::Lines | Stored::Text, Some(key)) = (&stored, &options.weight) {
        return Err(format!("--weight-column {key}: rows of the format {} have no columns with names", format.name()));
    }
    Ok(match (stored, &options.separator) {
        (Stored::Objects(row), _) => Box::new(weighted(objects(content), row, options)),
        (Stored::Lines, _) => Box::new(tsv(content).map(|(line, row)| {
            let row = row.map(|row| (row, 1.0)).map_err(Wrong::from);
            (Origin::of_line(line), row)
        })),
        (Stored::Text, None) => {
            Box::new(std::iter::once((Origin::default(), Ok((Row::Document(content.into()), 1.0)))))
        }
        (Stored::Text, Some(separator)) => {
            let of = |(place, text): (Origin, &'a str)| (place, Ok((Row::Document(text.into()), 1.0)));
            Box::new(documents(content, separator).map(of))
        }
    })
}

/// The rows of a table whose rows are `objects`, and their format: the one that is given, or that of the first row.
///
/// # Errors
/// If the first row is broken or of no known format, or `format` is one of texts: the place, and what is wrong.
pub(super) fn table(
    format: Auto<Format>,
    objects: impl Iterator<Item = Object>,
    options: &RowOptions,
) -> Result<(Format, impl Iterator<Item = FoundRow<'static>>), (Origin, Wrong)> {
    let mut objects = objects.peekable();
    let format = match (format, objects.peek()) {
        (Some(format), _) => format,
        (None, Some((place, Ok(row)))) => by_keys(row).map_err(|reason| (*place, reason.into()))?,
        (None, Some((place, Err(wrong)))) => return Err((*place, wrong.clone())),
        (None, None) => return Err((Origin::default(), NO_ROWS.to_owned().into())),
    };
    let Stored::Objects(row) = stored(format) else {
        let text = "a table has rows with named columns; use the format of its rows, or leave --format out";
        return Err((Origin::default(), format!("--format {}: {text}", format.name()).into()));
    };
    Ok((format, weighted(objects, row, options)))
}

/// The rows of objects with their weights.
fn weighted<'r>(
    objects: impl Iterator<Item = Object>,
    row: OfObject,
    options: &RowOptions,
) -> impl Iterator<Item = FoundRow<'r>> {
    let of = move |object: Map<String, Value>| {
        let weight = options.weight.as_deref().map_or(Ok(1.0), |key| weight(&object, key))?;
        Ok::<_, String>((row(object)?, weight))
    };
    objects.map(move |(place, object)| (place, object.and_then(|object| Ok(of(object)?))))
}

/// How often a run uses a row, as the row says.
fn weight(row: &Map<String, Value>, key: &str) -> Result<f64, String> {
    let given = row.get(key).ok_or_else(|| format!("no {key:?}, which --weight-column names"))?;
    let number = given.as_f64().filter(|number| (0.0..=MOST_WEIGHT).contains(number));
    number.ok_or_else(|| format!("{key:?} is {given}; a weight is a number from 0 to {MOST_WEIGHT}"))
}

/// The documents of a text with their places: what stands between separators. The line break around a separator belongs to
/// it. A document of nothing but white space is none.
fn documents<'a>(content: &'a str, separator: &'a str) -> impl Iterator<Item = (Origin, &'a str)> {
    let (mut line, mut row, mut before) = (1, 0, 0);
    content.split(separator).filter_map(move |piece| {
        let (first, breaks) = (line, piece.matches('\n').count() + separator.matches('\n').count());
        line += breaks;
        let text = piece.strip_prefix("\r\n").or(piece.strip_prefix('\n')).unwrap_or(piece);
        let first = first + usize::from(text.len() < piece.len());
        let text = text.strip_suffix("\r\n").or(text.strip_suffix('\n')).unwrap_or(text);
        if text.trim().is_empty() {
            return None;
        }
        row += 1;
        // Documents that share a line are counted.
        let shares_line = std::mem::replace(&mut before, line) == first && !separator.ends_with('\n');
        Some((Origin { row: if shares_line { row } else { 0 }, ..Origin::of_line(first) }, text))
    })
}

/// How a file of a format holds its rows.
enum Stored {
    /// As JSON objects, each of which becomes a row by this function.
    Objects(OfObject),
    /// As lines with a tab.
    Lines,
    /// As one text, which a separator may divide into documents.
    Text,
}

fn stored(format: Format) -> Stored {
    match format {
        Format::Messages => Stored::Objects(messages),
        Format::Sharegpt => Stored::Objects(sharegpt),
        Format::Alpaca => Stored::Objects(alpaca),
        Format::Completion => Stored::Objects(completion),
        Format::Documents => Stored::Objects(document),
        Format::Tsv => Stored::Lines,
        Format::Text => Stored::Text,
    }
}

type OfObject = fn(Map<String, Value>) -> Result<Row<'static>, String>;

const NO_ROWS: &str = "no rows in it; each row is a training example";

/// The keys by which the format of a JSON row is known: those that all of its rows have.
const KNOWN: [(&[&str], Format); 5] = [
    (&["messages"], Format::Messages),
    (&["conversations"], Format::Sharegpt),
    (&["instruction", "output"], Format::Alpaca),
    (&["prompt", "completion"], Format::Completion),
    (&["text"], Format::Documents),
];

/// Whether all rows of some format have this key.
pub(super) fn is_needed(key: &str) -> bool {
    KNOWN.iter().any(|(keys, _)| keys.contains(&key))
}

/// The format of a JSON row.
fn by_keys(row: &Map<String, Value>) -> Result<Format, String> {
    let has = |keys: &[&str]| keys.iter().all(|key| row.contains_key(*key));
    KNOWN.into_iter().find(|(keys, _)| has(keys)).map(|(_, format)| format).ok_or_else(|| {
        let keys: Vec<&str> = row.keys().map(String::as_str).collect();
        format!(
            "a row with the keys {keys:?} is of no known format; a row has \"messages\", or \"conversations\", or \
             \"instruction\" and \"output\", or \"prompt\" and \"completion\", or \"text\""
        )
    })
}

/// `{"messages": [{"role": …, "content": …}, …], "system": …, "tools": […]}`, where the last two are optional.
fn messages(mut row: Map<String, Value>) -> Result<Row<'static>, String> {
    let messages = list(&mut row, "messages")?;
    let tools = tools(&mut row)?;
    conversation(&row, messages, tools)
}

/// `{"conversations": [{"from": …, "value": …}, …], "system": …, "tools": …}`, where the last two are optional, and so is the
/// `weight` of a turn. The call of a function is JSON in the value.
fn sharegpt(mut row: Map<String, Value>) -> Result<Row<'static>, String> {
    let mut messages = Vec::new();
    let turns = list(&mut row, "conversations")?;
    let calls = json::Budget::of(turns.iter().filter_map(|turn| turn["value"].as_str()).map(str::len).sum());
    for (i, turn) in turns.into_iter().enumerate() {
        let at = |what: &str| format!("turn {}: {what}", i + 1);
        let text = |key: &str| {
            turn.get(key).and_then(Value::as_str).ok_or_else(|| at(&format!("no {key:?}; it must be text")))
        };
        let (from, value) = (text("from")?, text("value")?);
        if value.trim().is_empty() {
            return Err(at(&empty("value")));
        }
        let mut message = match from {
            "human" | "user" => json!({"role": "user", "content": value}),
            "gpt" | "assistant" => json!({"role": "assistant", "content": value}),
            "system" => json!({"role": "system", "content": value}),
            "observation" | "tool" => json!({"role": "tool", "content": value}),
            "function_call" => {
                let call = calls.parse(value).map_err(|e| at(&format!("the call is not JSON: {e}")))?;
                let calls = if let Value::Array(calls) = call { calls } else { vec![call] };
                let calls: Vec<_> =
                    calls.into_iter().map(|call| json!({"type": "function", "function": call})).collect();
                json!({"role": "assistant", "content": "", "tool_calls": calls})
            }
            _ => return Err(at(&format!("{from:?} is unknown; use human, gpt, system, observation or function_call"))),
        };
        if let Some(weight) = turn.get("weight") {
            message["weight"] = weight.clone();
        }
        messages.push(message);
    }
    let tools = tools(&mut row)?;
    conversation(&row, messages, tools)
}

/// `{"instruction": …, "input": …, "output": …, "system": …, "history": [[prompt, answer], …]}`, where `input`, `system` and
/// `history` are optional. The input follows the instruction on a line of its own, or is the prompt if the instruction is empty.
/// The history holds the earlier turns, which are supervised too, as in LLaMA-Factory.
fn alpaca(row: Map<String, Value>) -> Result<Row<'static>, String> {
    let (instruction, input) = (text(&row, "instruction")?, optional(&row, "input")?);
    let instruction = Some(instruction).filter(|instruction| !instruction.trim().is_empty());
    let prompt = instruction.into_iter().chain(input).collect::<Vec<_>>().join("\n");
    if prompt.is_empty() {
        return Err(empty("instruction"));
    }
    let answer = text(&row, "output")?;
    if answer.trim().is_empty() {
        return Err(empty("output"));
    }
    let mut messages = history(&row)?;
    messages.extend([json!({"role": "user", "content": prompt}), json!({"role": "assistant", "content": answer})]);
    conversation(&row, messages, None)
}

/// The messages of the turns before a row of Alpaca.
fn history(row: &Map<String, Value>) -> Result<Vec<Value>, String> {
    let turns = match row.get("history") {
        None | Some(Value::Null) => return Ok(vec![]),
        Some(Value::String(text)) if text.trim().is_empty() => return Ok(vec![]),
        Some(Value::Array(turns)) => turns,
        Some(_) => return Err("\"history\" is no list; write pairs of a prompt and its answer".into()),
    };
    let mut messages = Vec::new();
    for (i, turn) in turns.iter().enumerate() {
        let [Value::String(prompt), Value::String(answer)] = turn.as_array().map_or(&[][..], Vec::as_slice) else {
            return Err(format!(
                "turn {} of \"history\" is no pair of a prompt and its answer, both of them text",
                i + 1
            ));
        };
        if prompt.trim().is_empty() || answer.trim().is_empty() {
            return Err(format!(
                "turn {} of \"history\" has an empty prompt or answer; write it, or remove the turn",
                i + 1
            ));
        }
        messages.push(json!({"role": "user", "content": prompt}));
        messages.push(json!({"role": "assistant", "content": answer}));
    }
    Ok(messages)
}

/// `{"prompt": …, "completion": …, "system": …}`: two texts, or two lists of messages, and optionally a third text. Texts become a
/// user's message and its answer.
fn completion(mut row: Map<String, Value>) -> Result<Row<'static>, String> {
    if row.get("prompt").is_some_and(Value::is_array) {
        let mut messages = list(&mut row, "prompt")?;
        messages.extend(list(&mut row, "completion")?);
        let tools = tools(&mut row)?;
        return conversation(&row, messages, tools);
    }
    let pair = Conversation::of_pair(text(&row, "prompt")?, text(&row, "completion")?)?;
    Ok(Row::Conversation(pair.with_system(optional(&row, "system")?)?))
}

/// `{"text": …}`.
fn document(row: Map<String, Value>) -> Result<Row<'static>, String> {
    match text(&row, "text")? {
        "" => Err(empty("text")),
        text => Ok(Row::Document(text.to_owned().into())),
    }
}

/// The names of the columns of tab-separated rows, in files that this program writes.
pub const HEADER: [&str; 2] = ["prompt", "target"];

/// Whether a prompt and an answer are names of columns, in any case of their letters. A first line of these is a header.
pub fn is_header(prompt: &str, answer: &str) -> bool {
    let is_any = |text: &str, names: &[&str]| names.iter().any(|name| text.trim().eq_ignore_ascii_case(name));
    is_any(prompt, &["prompt", "instruction", "question", "input"])
        && is_any(answer, &["target", "completion", "response", "answer", "output"])
}

/// A line is a prompt, a tab and the answer. Lines that start with `#` are comments, and a first line may be a header.
fn tsv(content: &str) -> impl Iterator<Item = (usize, Result<Row<'_>, String>)> {
    let mut first = true;
    lines(content).filter(|(_, line)| !line.starts_with('#')).map(move |(number, line)| {
        let Some((prompt, answer)) = line.split_once('\t') else {
            return (number, Err("no tab; a row is a prompt, a tab and the answer".into()));
        };
        if std::mem::take(&mut first) && is_header(prompt, answer) {
            return (number, Ok(Row::Header));
        }
        (number, Conversation::of_pair(prompt, answer).map(Row::Conversation))
    })
}

/// A JSON object with its place in its file, or what is wrong there.
pub(super) type Object = (Origin, Result<Map<String, Value>, Wrong>);

/// The JSON objects of a file: one in each line, or those of one array.
fn objects(content: &str) -> Box<dyn Iterator<Item = Object> + '_> {
    let object = |value: Result<Value, Wrong>| match value {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err("a row must be a JSON object".to_owned().into()),
        Err(wrong) => Err(wrong),
    };
    if content.trim_start().starts_with('[') {
        return Box::new(elements(content).map(move |(place, value)| (place, object(value))));
    }
    let of_line = move |line: &str| {
        object(json::parse(line).map_err(|error| if error.is_eof() { cut_line().into() } else { Wrong::from(error) }))
    };
    Box::new(lines(content).map(move |(number, line)| (Origin::of_line(number), of_line(line))))
}

/// The elements of a JSON array, each with its place. After an error there are none. An array that does not end is an error: what
/// is missing may be the larger part of it.
fn elements(content: &str) -> impl Iterator<Item = (Origin, Result<Value, Wrong>)> {
    let (mut line, mut at, mut ended, mut row) = (1, 0, false, 0);
    // Where the line begins.
    let mut begin = 0;
    std::iter::from_fn(move || {
        let begin_of_line = |from: usize, to: usize| content[from..to].rfind('\n').map(|end| from + end + 1);
        let skipped = |rest: &str| rest.len() - rest.trim_start().len();
        let mut to = at + skipped(&content[at..]);
        if ended {
            return None;
        }
        // The bracket that opens the array, or what follows an element.
        let (first, mark) = (at == 0, content[to..].chars().next());
        let closes = |at: usize| content[at..].starts_with(']');
        to += usize::from(first || mark == Some(','));
        to += skipped(&content[to..]);
        line += content[at..to].matches('\n').count();
        begin = begin_of_line(at, to).unwrap_or(begin);
        let closed = closes(to) && (first || mark == Some(']'));
        if closed || !first && mark != Some(',') {
            ended = true;
            let rest = content[to + usize::from(closed)..].trim_start();
            let wrong = match (closed, rest.is_empty()) {
                (true, true) => return None,
                (true, false) => "text follows the end of the array",
                (false, true) => "the array does not end; the file may have been cut",
                (false, false) => "no comma stands between two rows of the array",
            };
            return Some((Origin::of_line(line), Err(wrong.to_owned().into())));
        }
        let mut values = serde_json::Deserializer::from_str(&content[to..]).into_iter::<IgnoredAny>();
        let Some(value) = values.next() else {
            ended = true;
            let wrong = "the array does not end; the file may have been cut".to_owned().into();
            return Some((Origin::of_line(line), Err(wrong)));
        };
        row += 1;
        let before = &content[begin..to];
        // If an element begins its line, the number of the line is enough.
        let shares_line = !before.trim_start().is_empty();
        let place = Origin { row: if shares_line { row } else { 0 }, ..Origin::of_line(line) };
        let end = to + values.byte_offset();
        let value = value.and_then(|_| json::parse(&content[to..end])).map_err(|error| {
            let wrong = Wrong::from(error);
            // Columns are counted from the element: it may stand behind others in its line.
            let before = if wrong.below == 0 { before.len() } else { 0 };
            Wrong { column: wrong.column.map(|column| column + before), ..wrong }
        });
        ended = value.is_err();
        line += content[to..end].matches('\n').count();
        begin = begin_of_line(to, end).unwrap_or(begin);
        at = end;
        Some((place, value))
    })
}

/// The lines that are not empty, counted from 1.
fn lines(content: &str) -> impl Iterator<Item = (usize, &str)> {
    content.lines().enumerate().map(|(i, line)| (i + 1, line)).filter(|(_, line)| !line.trim().is_empty())
}

/// What is wrong with a line that ends within a JSON object.
fn cut_line() -> String {
    "the object does not end in this line; write each row in one line, or all rows in one array ([ … ]); or the file was cut".into()
}

/// The conversation of a row, after its field `system` if it has one.
fn conversation(row: &Map<String, Value>, messages: Vec<Value>, tools: Option<Value>) -> Result<Row<'static>, String> {
    let conversation = Conversation::of_messages(messages, tools)?;
    Ok(Row::Conversation(conversation.with_system(optional(row, "system")?)?))
}

fn text<'a>(row: &'a Map<String, Value>, key: &str) -> Result<&'a str, String> {
    row.get(key).and_then(Value::as_str).ok_or_else(|| format!("no {key:?}; it must be text"))
}

/// The text of a field that a row may lack. None if it is blank.
fn optional<'a>(row: &'a Map<String, Value>, key: &str) -> Result<Option<&'a str>, String> {
    match row.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.as_str()).filter(|text| !text.trim().is_empty())),
        Some(_) => Err(format!("{key:?} is no text; write it as text, or leave it out")),
    }
}

fn list(row: &mut Map<String, Value>, key: &str) -> Result<Vec<Value>, String> {
    match row.remove(key) {
        Some(Value::Array(values)) => Ok(values),
        _ => Err(format!("the row has no {key:?} list")),
    }
}

/// The tools of a row: a list, or its JSON text.
fn tools(row: &mut Map<String, Value>) -> Result<Option<Value>, String> {
    tool_calls::list(row.remove("tools").unwrap_or_default(), "tools")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_has_the_documents_between_its_separators() {
        let of = |text, separator| {
            documents(text, separator).map(|(place, text)| (place.line, place.row, text)).collect::<Vec<_>>()
        };
        let end = "<|end|>";
        // A document that does not begin its line is counted.
        assert_eq!(of("a\nb<|end|>c", end), [(1, 0, "a\nb"), (2, 2, "c")]);
        assert_eq!(of("a<|end|>b<|end|>\nc", end), [(1, 0, "a"), (1, 2, "b"), (2, 0, "c")]);
        assert_eq!(of("a\n\nb\n\nc", "\n\n"), [(1, 0, "a"), (3, 0, "b"), (5, 0, "c")]);
        let spaced = of("a\n<|end|>\nb\n\n<|end|>\n \n<|end|>\nc\n", end);
        assert_eq!(spaced, [(1, 0, "a"), (3, 0, "b\n"), (8, 0, "c")]);
        assert_eq!(of("no separator\n", end), [(1, 0, "no separator")]);
        assert_eq!(of("a\r\n<|end|>\r\nb\r\n", end), [(1, 0, "a"), (3, 0, "b")]);
    }

    #[test]
    fn a_weight_is_a_number_from_0_to_1000() {
        let of = |row: Value| weight(row.as_object().unwrap(), "w");
        assert_eq!((of(json!({"w": 0.5})), of(json!({"w": 1000}))), (Ok(0.5), Ok(1000.0)));
        for row in [json!({}), json!({"w": "1"}), json!({"w": -1}), json!({"w": 1001}), json!({"w": null})] {
            assert!(of(row.clone()).unwrap_err().contains("\"w\""), "{row}");
        }
    }

    #[test]
    fn an_array_has_the_lines_of_its_elements() {
        let rows = |text| elements(text).map(|(place, value)| (place.line, value.ok())).collect::<Vec<_>>();
        let expected = vec![(2, Some(json!({"a": "]"}))), (3, Some(json!(2))), (5, Some(json!([3])))];
        assert_eq!(rows("\n[{\"a\": \"]\"},\n2,\n\n [3]\n ]\n"), expected);
        assert_eq!(rows("[]"), []);
        assert_eq!(rows("[1,\n{\"a\"}, 2]"), [(1, Some(json!(1))), (2, None)]);
        // An error has its own place in the file.
        let places = |text| {
            let wrong = elements(text)
                .find_map(|(at, value)| value.err().map(|wrong| (at.line + wrong.below as u32, wrong.column)));
            wrong.unwrap()
        };
        assert_eq!(places("[1,\n{\"a\"}, 2]"), (2, Some(5)));
        assert_eq!(places("[1, {\"a\"}, 2]"), (1, Some(9)));
        assert_eq!(places("[1,\n{\"a\":\n {\"b\":: 3}}]"), (3, Some(7)));
        // What does not begin its line is counted.
        let counted = |text| elements(text).map(|(place, _)| (place.line, place.row)).collect::<Vec<_>>();
        assert_eq!(counted("[1, [2],\n 3, 4,\n5]"), [(1, 1), (1, 2), (2, 0), (2, 4), (3, 0)]);
    }
}
