//! Renders the model's own chat template (Jinja) as Hugging Face does: with trimmed blocks, Python's string methods, and
//! `tojson` with Python's separators and without escapes.

use crate::{
    ModelError,
    file::read_text,
    json,
    limits::{self, Limit},
    template_cycles::line_of_cycle,
};
use minijinja::{
    Environment, Error, ErrorKind, Value,
    machinery::parse,
    syntax::SyntaxConfig,
    value::{Kwargs, Serde},
};
use serde::Serialize;
use serde_json::Value as Json;
use std::{io, path::Path, sync::Arc};

/// The name of the template in messages of the library.
const NAME: &str = "chat";
/// Longest text that a template may render. The longest context of Qwen3 has about 1 M tokens.
const LONGEST: usize = 16 << 20;
/// Steps that a template may take, so that none runs forever. That of Qwen3 takes about 40 for each message.
const FUEL: u64 = 10_000_000;
/// Longest source of a template. That of Qwen3 has 4 KiB.
const LONGEST_SOURCE: usize = 64 << 10;
/// Largest tokenizer_config.json that is read. That of Qwen3 has 10 KB; a model with thousands of added tokens lists each.
const LARGEST_CONFIG: u64 = 16 << 20;
/// Memory that compiling or rendering may take, besides [`TIMES`] what it is given: a text that is doubled needs few steps.
const MOST_MEMORY: usize = 48 << 20;
/// How many times the bytes of the messages rendering may take: what a template sets, and the text twice while it grows.
const TIMES: usize = 4;
/// Widest indentation of `tojson`, and longest width of a format. Both multiply the text.
const WIDEST: usize = 256;

/// A compiled chat template.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    env: Arc<Environment<'static>>,
}

/// What a template renders besides the messages.
#[derive(Debug, Clone, Copy, Default)]
pub struct RenderOptions<'a> {
    /// Tool schemas.
    pub tools: Option<&'a Json>,
    /// Whether the text ends with the beginning of an assistant turn.
    pub add_generation_prompt: bool,
    /// The template's variable `enable_thinking`. It is undefined if `None`.
    pub enable_thinking: Option<bool>,
}

impl ChatTemplate {
    /// Reads the text of a folder's template from chat_template.jinja or from the field in tokenizer_config.json.
    ///
    /// # Errors
    /// If there is no template.
    pub fn source(folder: &Path) -> Result<String, ModelError> {
        let file = folder.join("chat_template.jinja");
        if file.exists() {
            return read_text(&file, LONGEST_SOURCE as u64, "");
        }
        let path = folder.join("tokenizer_config.json");
        let text = read_text(
            &path,
            LARGEST_CONFIG,
            "a chat template is read from it or from chat_template.jinja; give --tokenizer FOLDER if they are in another folder",
        )?;
        let config = json::parse(&text).map_err(|e| ModelError::parse(&path, e))?;
        match config.get("chat_template").and_then(Json::as_str) {
            Some(source) => Ok(source.to_owned()),
            None => Err(ModelError::parse(
                &path,
                "there is no chat_template in it; add the field, or the file chat_template.jinja",
            )),
        }
    }

    /// Compiles a template.
    ///
    /// # Errors
    /// If the template does not compile.
    pub fn new(source: String) -> Result<Self, ModelError> {
        if source.len() > LONGEST_SOURCE {
            let text = format!("its source has {} bytes; at most {LONGEST_SOURCE} are allowed", source.len());
            return Err(ModelError::Template(text));
        }
        within_limits(0, move || Self::compiled(source))
    }

    fn compiled(source: String) -> Result<Self, ModelError> {
        let mut env = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(template)?;
        if let Some(line) = line_of_cycle(&parse(&source, NAME, syntax.clone()).map_err(template)?) {
            let text =
                format!("line {line} may store a namespace in a namespace, and one that holds itself has no end");
            return Err(ModelError::Template(text));
        }
        env.set_syntax(syntax);
        env.set_fuel(Some(FUEL));
        env.set_unknown_method_callback(|state, value, method, args| {
            if method == "format" {
                check_widths(value.as_str().unwrap_or_default())?;
            }
            minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
        });
        env.add_filter("tojson", tojson);
        env.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        env.add_template_owned(NAME, source).map_err(template)?;
        Ok(Self { env: Arc::new(env) })
    }

    /// Renders messages, which are objects with `role`, `content` and other fields that the template reads.
    ///
    /// # Errors
    /// If the template refuses the messages.
    pub fn render(&self, messages: &[Json], options: RenderOptions<'_>) -> Result<String, ModelError> {
        let RenderOptions { tools, add_generation_prompt, enable_thinking } = options;
        let given = messages.iter().chain(tools).map(bytes_of).sum();
        let context = Value::from(Serde(&RenderContext { messages, tools, add_generation_prompt, enable_thinking }));
        let env = self.env.clone();
        let render = move || env.get_template(NAME).and_then(|t| t.render(context));
        let text = within_limits(given, move || render().map_err(template))?;
        if text.len() > LONGEST {
            return Err(ModelError::Template(format!(
                "it rendered {} bytes; at most {LONGEST} are allowed",
                text.len()
            )));
        }
        Ok(text)
    }
}

/// The variables of a template. What is None is undefined.
#[derive(Serialize)]
struct RenderContext<'a> {
    messages: &'a [Json],
    #[serde(skip_serializing_if = "Option::is_none")]
    tools: Option<&'a Json>,
    add_generation_prompt: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    enable_thinking: Option<bool>,
}

/// Refuses a format whose numbers would make a huge text.
fn check_widths(format: &str) -> Result<(), Error> {
    let numbers = format.split(|c: char| !c.is_ascii_digit()).filter(|n| !n.is_empty());
    match numbers.into_iter().find(|n| n.parse::<usize>().is_ok_and(|n| n > WIDEST) || n.len() > 6) {
        Some(n) => Err(Error::new(ErrorKind::InvalidOperation, format!("a width of {n}; at most {WIDEST} is allowed"))),
        None => Ok(()),
    }
}

/// Runs `work`, which was given so many bytes, within limits.
fn within_limits<Answer: Send + 'static>(
    given: usize,
    work: impl FnOnce() -> Result<Answer, ModelError> + Send + 'static,
) -> Result<Answer, ModelError> {
    const WHAT: &str = "chat template";
    let reached = |limit: Limit| ModelError::Template(limit.to_string());
    limits::within(WHAT, MOST_MEMORY + TIMES * given, work)
        .map_err(|limit| ModelError::limited(WHAT, limit, reached))?
}

/// Bytes of the texts of a JSON value, and some for each value.
fn bytes_of(value: &Json) -> usize {
    64 + match value {
        Json::String(text) => text.len(),
        Json::Array(values) => values.iter().map(bytes_of).sum(),
        Json::Object(fields) => fields.iter().map(|(key, value)| key.len() + bytes_of(value)).sum(),
        Json::Null | Json::Bool(_) | Json::Number(_) => 0,
    }
}

fn template(e: Error) -> ModelError {
    ModelError::Template(format!("{e:#}"))
}

/// The filter `tojson`, as Python's `json.dumps(value, ensure_ascii=False)`, with an optional `indent`.
fn tojson(value: Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    let mut out = Vec::new();
    let failed = |e: serde_json::Error| Error::new(ErrorKind::BadSerialization, e.to_string());
    match indent {
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, Python)).map_err(failed)?,
        Some(n) if n > WIDEST => {
            let text = format!("tojson(indent={n}); at most {WIDEST} is allowed");
            return Err(Error::new(ErrorKind::InvalidOperation, text));
        }
        Some(n) => {
            let spaces = " ".repeat(n);
            let pretty = serde_json::ser::PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, pretty)).map_err(failed)?;
        }
    }
    let text = String::from_utf8(out).map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))?;
    Ok(Value::from_safe_string(text))
}

/// Writes JSON with Python's separators `", "` and `": "`.
struct Python;

impl serde_json::ser::Formatter for Python {
    fn begin_array_value<Out: ?Sized + io::Write>(&mut self, w: &mut Out, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { w.write_all(b", ") }
    }

    fn begin_object_key<Out: ?Sized + io::Write>(&mut self, w: &mut Out, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { w.write_all(b", ") }
    }

    fn begin_object_value<Out: ?Sized + io::Write>(&mut self, w: &mut Out) -> io::Result<()> {
        w.write_all(b": ")
    }
}
