//! Renders the model's own chat template (Jinja) as Hugging Face does: with trimmed blocks, Python's string methods, and
//! `tojson` with Python's separators and without escapes.

use crate::{ModelError, file::read_text, json};
use minijinja::{
    Environment, Error, ErrorKind, Value,
    syntax::SyntaxConfig,
    value::{Kwargs, Serde},
};
use serde::Serialize;
use serde_json::Value as Json;
use std::{
    io,
    path::Path,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

/// Longest text that a template may render. The longest context of Qwen3 has about 1 M tokens.
const LONGEST: usize = 16 << 20;
/// Steps that a template may take, so that none runs forever.
const FUEL: u64 = 50_000_000;
/// Longest source of a template. That of Qwen3 has 4 KiB. A longer one could nest deeper than [`STACK`].
const LONGEST_SOURCE: usize = 64 << 10;
/// Largest tokenizer_config.json that is read. That of Qwen3 has 10 KB; a model with thousands of added tokens lists each.
const LARGEST_CONFIG: u64 = 16 << 20;
/// Stack of the thread in which templates are compiled and rendered: 4 KiB for each byte of the longest source.
const STACK: usize = 256 << 20;
/// Longest time that compiling or rendering may take.
const LONGEST_TIME: Duration = Duration::from_secs(20);
/// Memory by which the process may grow meanwhile: a text that is doubled needs few steps.
const MOST_GROWTH: u64 = 256 << 20;
/// How often time and memory are looked at.
const LOOK: Duration = Duration::from_millis(2);
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
    /// Compiles a folder's template.
    ///
    /// # Errors
    /// If there is no template or it does not compile.
    pub fn from_folder(folder: &Path) -> Result<Self, ModelError> {
        Self::new(Self::source(folder)?)
    }

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
        on_a_large_stack(move || Self::compiled(source))
    }

    fn compiled(source: String) -> Result<Self, ModelError> {
        let mut env = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(template)?;
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
        env.add_template_owned("chat", source).map_err(template)?;
        Ok(Self { env: Arc::new(env) })
    }

    /// Renders messages, which are objects with `role`, `content` and other fields that the template reads.
    ///
    /// # Errors
    /// If the template refuses the messages.
    pub fn render(&self, messages: &[Json], options: RenderOptions<'_>) -> Result<String, ModelError> {
        let mut context = serde_json::Map::new();
        context.insert("messages".into(), Json::Array(messages.to_vec()));
        if let Some(tools) = options.tools {
            context.insert("tools".into(), tools.clone());
        }
        context.insert("add_generation_prompt".into(), options.add_generation_prompt.into());
        if let Some(thinking) = options.enable_thinking {
            context.insert("enable_thinking".into(), thinking.into());
        }
        let env = self.env.clone();
        let render = move || env.get_template("chat").and_then(|t| t.render(Value::from(Serde(&context))));
        let text = on_a_large_stack(move || render().map_err(template))?;
        if text.len() > LONGEST {
            return Err(ModelError::Template(format!(
                "it rendered {} bytes; at most {LONGEST} are allowed",
                text.len()
            )));
        }
        Ok(text)
    }
}

/// Refuses a format whose numbers would make a huge text.
fn check_widths(format: &str) -> Result<(), Error> {
    let numbers = format.split(|c: char| !c.is_ascii_digit()).filter(|n| !n.is_empty());
    match numbers.into_iter().find(|n| n.parse::<usize>().is_ok_and(|n| n > WIDEST) || n.len() > 6) {
        Some(n) => Err(Error::new(ErrorKind::InvalidOperation, format!("a width of {n}; at most {WIDEST} is allowed"))),
        None => Ok(()),
    }
}

/// The name of the thread in which a template is compiled and rendered. A panic there becomes an error.
pub const THREAD: &str = "chat template";

/// Runs `work` on a thread of its own, with limits on its stack, its time and its memory. A panic of the template library
/// becomes an error with its message. A thread cannot be ended: after an error by time or memory the program should end.
fn on_a_large_stack<Value: Send + 'static>(
    work: impl FnOnce() -> Result<Value, ModelError> + Send + 'static,
) -> Result<Value, ModelError> {
    let (sender, done) = mpsc::channel();
    let thread = std::thread::Builder::new().name(THREAD.into()).stack_size(STACK);
    let (began, before) = (Instant::now(), resident());
    let failed = |text: String| Err(ModelError::Template(text));
    // Nobody listens any more if a limit was reached.
    let thread = match thread.spawn(move || drop(sender.send(work()))) {
        Ok(thread) => thread,
        Err(error) => return Err(ModelError::io("a thread for the chat template".as_ref(), "")(error)),
    };
    loop {
        match done.recv_timeout(LOOK) {
            Ok(result) => return result,
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => {}
        }
        if resident() > before + MOST_GROWTH {
            return failed(format!("it took more than {} MiB of memory", MOST_GROWTH >> 20));
        }
        if began.elapsed() > LONGEST_TIME {
            return failed(format!("it took more than {} seconds", LONGEST_TIME.as_secs()));
        }
    }
    let panic = thread.join().err();
    let text = panic
        .as_ref()
        .and_then(|panic| panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied()));
    failed(format!("the template library panicked on it: {}", text.unwrap_or("without a message")))
}

/// Bytes of memory that the process holds; 0 where the system does not say.
fn resident() -> u64 {
    let pages = || std::fs::read_to_string("/proc/self/statm").ok()?.split(' ').nth(1)?.parse::<u64>().ok();
    pages().unwrap_or(0) * 4096
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
