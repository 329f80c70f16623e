//! `generate`: answers a prompt with text that streams to standard output, or every prompt of a file.

use super::flags;
use crate::{
    CliError,
    args::GenerateArgs,
    device::{self, Job},
    model_files::TextFiles,
    report,
    settings::{
        Format,
        extensions::{self, Reader},
    },
    talk::{
        answer::{self, Answer},
        batch::{Batch, Listener, NewAnswer},
        entry::LONGEST,
        first_answers::Expected,
        loaded::{Loaded, Opened, thinking},
        message::checked_messages,
    },
};
use backend_nvfp4::{DeviceMemory, DeviceServices, Nvfp4Kernels, PAGE, Precision};
use model_qwen3::{
    chat_template::RenderOptions,
    file, json,
    session::{GenerateOptions, Generation, Session},
};
use serde_json::{Value, json};
use std::{cell::RefCell, collections::BTreeMap, io::Read, path::Path, time::Instant};

/// Most bytes of a file of prompts.
const LONGEST_FILE: u64 = 1 << 30;
/// Most answers to a prompt. Times the number of prompts in the longest file, it still fits into a `usize`.
const MOST_ANSWERS: usize = 1 << 20;

/// Runs the command.
///
/// # Errors
/// If a flag is out of range, or the model cannot be loaded or run.
pub fn run(args: GenerateArgs) -> Result<(), CliError> {
    flags::check(&args.sampling, "--")?;
    if args.logprobs.is_some() && !args.json && args.prompts.is_none() {
        return Err(CliError::Usage("--logprobs: text has no place for them; add --json".into()));
    }
    if args.batch_size == 0 {
        return Err(CliError::Usage("--batch-size 0: at least one answer must be made at a time".into()));
    }
    if args.answers == 0 {
        return Err(CliError::Usage("--answers 0: ask for at least one answer".into()));
    }
    if args.answers > MOST_ANSWERS {
        let text = format!("--answers {}: a prompt gets at most {MOST_ANSWERS} answers; give fewer", args.answers);
        return Err(CliError::Usage(text));
    }
    let questions = match (&args.prompts, &args.prompt) {
        (Some(file), _) => questions_of(file)?,
        (None, Some(prompt)) => vec![AskedPrompt { text: prompt_text(prompt)?, is_row: false, line: None }],
        (None, None) => return Err(CliError::Usage("give --prompt TEXT or --prompts FILE".into())),
    };
    device::run(args.model.device, args.model.compute_dtype, Generate { args, questions })
}

/// What is asked: a text, or the messages of a conversation.
struct AskedPrompt {
    /// The text, or the JSON row that holds it. The values of a row take many times as much memory.
    text: String,
    is_row: bool,
    /// Line of the file of prompts.
    line: Option<usize>,
}

impl AskedPrompt {
    /// The text, or the list of messages.
    fn asked(&self) -> Value {
        if !self.is_row {
            return self.text.clone().into();
        }
        let mut row: Value = serde_json::from_str(&self.text).expect("the row was read before");
        let key = if row.get("prompt").is_some() { "prompt" } else { "messages" };
        row[key].take()
    }
}

struct Generate {
    args: GenerateArgs,
    questions: Vec<AskedPrompt>,
}

impl Job for Generate {
    type Output = ();

    fn remedy(&self) -> &'static str {
        "give a smaller --max-tokens, for several answers a smaller --batch-size, or --kv-cache-dtype fp8"
    }

    fn run<B: Nvfp4Kernels + DeviceServices>(self, device: B::Device, precision: Precision) -> Result<(), CliError> {
        let Self { args, questions } = self;
        let mut opened = Opened::new(flags::wanted(&args.model, args.cache.kv_cache_dtype.format(precision)?))?;
        let limit = opened.config().max_position_embeddings;
        let text = opened.text();
        text.thinking = thinking(args.thinking, text);
        let options = GenerateOptions { logprobs: args.logprobs, ..flags::options(&args.sampling, text, None) };
        let prompts = prompts(&questions, &args, text, &options, limit)?;
        let longest = prompts.iter().map(|prompt| prompt.ids.len()).max().unwrap_or(0);
        let expected = match prompts.as_slice() {
            [prompt] if args.answers == 1 => Expected { steps: vec![vec![prompt.ids.len()]], together: 1 },
            // Which prompts are read together depends on when the answers before them end.
            prompts => Expected::unknown(args.batch_size.min(prompts.len() * args.answers)),
        };
        let loaded = opened.load::<B>(Some(expected), precision, &device)?;
        answer::say_sampling(&options.sampling, &loaded.text, None);
        match prompts.as_slice() {
            [prompt] if args.prompts.is_none() && args.answers == 1 => one(&args, &loaded, &options, prompt),
            prompts => all(&args, &loaded, &options, prompts, longest + options.max_tokens),
        }
    }
}

/// What is asked, as the model reads it.
struct OnePrompt<'a> {
    question: &'a AskedPrompt,
    ids: Vec<u32>,
}

/// The prompts of all questions. Each must fit into the model together with its answer.
fn prompts<'a>(
    questions: &'a [AskedPrompt],
    args: &GenerateArgs,
    text: &TextFiles,
    options: &GenerateOptions,
    limit: usize,
) -> Result<Vec<OnePrompt<'a>>, CliError> {
    let prompt = |question: &'a AskedPrompt| {
        let at = |e: CliError| match question.line {
            None => e,
            Some(line) => CliError::Usage(format!("--prompts, line {line}: {e}")),
        };
        let ids = prompt_ids(question.asked(), args, text).map_err(at)?;
        check_length(&ids, options, limit).map_err(at)?;
        Ok(OnePrompt { question, ids })
    };
    questions.iter().map(prompt).collect()
}

/// Answers one prompt.
fn one<B: Nvfp4Kernels + DeviceMemory>(
    args: &GenerateArgs,
    loaded: &Loaded<B>,
    options: &GenerateOptions,
    prompt: &OnePrompt,
) -> Result<(), CliError> {
    let Loaded { model, text, .. } = loaded;
    let mut session = Session::new(model, prompt.ids.len() + options.max_tokens)?;
    let streams = !args.json && !args.no_stream;
    let answer = Answer::of(&mut session, text, &prompt.ids, options, &args.sampling.stop, streams, report::is_lost)?;
    if streams {
        report::stream("\n");
        report::line(answer.figures());
        return Ok(());
    }
    print_answer(&answer, prompt.question, args, loaded)?;
    if !args.json {
        report::line(answer.figures());
    }
    Ok(())
}

/// Answers every prompt as often as the flags say, some at a time, and prints the answers in order. It ends where an answer
/// cannot be printed. Prompt and answer together have at most `capacity` tokens.
fn all<B: Nvfp4Kernels + DeviceMemory>(
    args: &GenerateArgs,
    loaded: &Loaded<B>,
    options: &GenerateOptions,
    prompts: &[OnePrompt],
    capacity: usize,
) -> Result<(), CliError> {
    let Loaded { model, text, .. } = loaded;
    let started = Instant::now();
    let complete = RefCell::new(BTreeMap::new());
    let wanted = prompts.len() * args.answers;
    let together = args.batch_size.min(wanted);
    let mut batch = Batch::new(model, text, together * capacity.next_multiple_of(PAGE), together)?;
    let (mut begun, mut printed, mut tokens) = (0, 0, 0);
    while printed < wanted {
        while begun < wanted && batch.has_room(prompts[begun / args.answers].ids.len(), options) {
            let mut options = options.clone();
            options.sampling.seed = options.sampling.seed.wrapping_add((begun % args.answers) as u64);
            let (prompt, ends) = (prompts[begun / args.answers].ids.clone(), args.sampling.stop.clone());
            let listener = AnswerPlace { number: begun, complete: &complete };
            batch.begin(NewAnswer { prompt, options, ends, listener })?;
            begun += 1;
        }
        batch.step()?;
        while let Some(answer) = complete.borrow_mut().remove(&printed) {
            let answer = answer?;
            print_answer(&answer, prompts[printed / args.answers].question, args, loaded)?;
            if report::is_lost() {
                return Ok(());
            }
            tokens += answer.generation.ids.len();
            printed += 1;
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    let (answers, made) = (report::count(printed, "answer"), report::count(tokens, "answer token"));
    report::line(format!("{answers} · {made} in {seconds:.1} s · {:.1} tokens/s", tokens as f64 / seconds));
    Ok(())
}

/// Keeps an answer until those in front of it are printed.
struct AnswerPlace<'a> {
    number: usize,
    complete: &'a RefCell<BTreeMap<usize, Result<Answer, CliError>>>,
}

impl Listener for AnswerPlace<'_> {
    fn hear(&mut self, _piece: &str, _generation: &Generation) {}

    fn complete(self, answer: Result<Answer, CliError>) {
        self.complete.borrow_mut().insert(self.number, answer);
    }
}

/// Prints a complete answer. Those of a file of prompts are JSON; several answers to one prompt have an empty line in between.
fn print_answer<B: Nvfp4Kernels + DeviceMemory>(
    answer: &Answer,
    question: &AskedPrompt,
    args: &GenerateArgs,
    loaded: &Loaded<B>,
) -> Result<(), CliError> {
    if !args.json && args.prompts.is_none() {
        let end = if args.answers > 1 { "\n" } else { "" };
        report::result(format!("{}{end}", answer.text));
        return Ok(());
    }
    let mut found = answer.json(question.asked());
    // What the device's memory pool holds now: model, caches, and what answers needed.
    found["device_memory_mib"] = B::memory_in_use(&loaded.model.device()).map(|memory| memory.reserved >> 20).into();
    if args.logprobs.is_some() {
        found["logprobs"] = answer.logprobs(&loaded.text.tokenizer)?;
    }
    report::result(found.to_string());
    Ok(())
}

/// Checks that a prompt has tokens, and fits into the model together with its answer.
fn check_length(prompt: &[u32], options: &GenerateOptions, limit: usize) -> Result<(), CliError> {
    if prompt.is_empty() {
        return Err(CliError::Usage("the prompt has no tokens; write one, or leave out --raw".into()));
    }
    if prompt.len().saturating_add(options.max_tokens) <= limit {
        return Ok(());
    }
    let tokens = report::count(prompt.len(), "token");
    if prompt.len() >= limit {
        return Err(CliError::Usage(format!(
            "the prompt has {tokens}; the model takes at most {limit} with its answer; shorten the prompt"
        )));
    }
    Err(CliError::Usage(format!(
        "the prompt ({tokens}) plus --max-tokens {} is too long: the model takes at most {limit} tokens; lower --max-tokens",
        options.max_tokens,
    )))
}

fn prompt_text(prompt: &str) -> Result<String, CliError> {
    if prompt != "-" {
        return Ok(prompt.to_owned());
    }
    let (mut prompt, bad) = (Vec::new(), |reason: String| CliError::Usage(format!("--prompt -: {reason}")));
    let read = std::io::stdin().take(LONGEST + 1).read_to_end(&mut prompt);
    read.map_err(|e| bad(format!("cannot read standard input: {e}")))?;
    if prompt.len() as u64 > LONGEST {
        return Err(bad(format!("standard input has more than {} MiB", LONGEST >> 20)));
    }
    let prompt = String::from_utf8(prompt).map_err(|e| bad(format!("cannot read standard input: {e}")))?;
    Ok(file::without_mark(&prompt).trim_end_matches(['\r', '\n']).to_owned())
}

/// The prompts of a file.
fn questions_of(path: &Path) -> Result<Vec<AskedPrompt>, CliError> {
    let rows = has_rows(path)?;
    let content = file::read_text(path, LONGEST_FILE, "check the path").map_err(CliError::of_flag("--prompts"))?;
    let mut questions = Vec::new();
    let lines = file::without_mark(&content).lines().enumerate().map(|(i, line)| (i + 1, line));
    for (line, text) in lines.filter(|(_, text)| !text.trim().is_empty()) {
        let bad = |reason: String| CliError::data(path, Some(line), reason);
        if rows {
            let row = json::parse(text).map_err(|e| CliError::not_json(path, line, &e))?;
            check_row(row).map_err(bad)?;
        }
        questions.push(AskedPrompt { text: text.to_owned(), is_row: rows, line: Some(line) });
    }
    if questions.is_empty() {
        return Err(CliError::data(path, None, "there is no prompt in it"));
    }
    Ok(questions)
}

/// Whether the lines of a file of prompts are rows in JSON, by its extension.
fn has_rows(path: &Path) -> Result<bool, CliError> {
    match extensions::reader(path) {
        Some(Reader::Text(Format::Tsv)) => Err(CliError::Usage(format!(
            "--prompts {}: its rows have answers, too, which would be read as a part of the prompts; give a file of the first \
             column: cut -f 1 {} > prompts.txt",
            path.display(),
            report::quoted(&path.display().to_string())
        ))),
        Some(Reader::Text(_)) | None => Ok(false),
        Some(Reader::Json) if extensions::is_jsonl(path) => Ok(true),
        Some(Reader::Json | Reader::Parquet | Reader::Arrow) => Err(CliError::Usage(format!(
            "--prompts {}: give a .jsonl file, or a text with a prompt in each line",
            path.display()
        ))),
    }
}

/// Checks that a row holds a prompt or messages, and no other key. Another key would have no effect, and nobody would notice.
fn check_row(row: Value) -> Result<(), String> {
    let needed = || "a row needs a text \"prompt\", or a list \"messages\"".to_owned();
    let Value::Object(mut row) = row else { return Err(needed()) };
    match (row.remove("prompt"), row.remove("messages")) {
        (Some(Value::String(_)), None) => {}
        (None, Some(Value::Array(messages))) => drop(checked_messages(messages)?),
        _ => return Err(needed()),
    }
    match row.keys().next() {
        None => Ok(()),
        Some(key) => Err(format!("the key {key:?} of a row is not known; leave it out: flags hold for all rows")),
    }
}

fn prompt_ids(asked: Value, args: &GenerateArgs, text: &TextFiles) -> Result<Vec<u32>, CliError> {
    let mut messages = Vec::new();
    if let Some(system) = &args.system_prompt {
        messages.push(json!({"role": "system", "content": system}));
    }
    match asked {
        Value::Array(_) if args.raw => {
            return Err(CliError::Usage("--raw: messages need the chat template; leave out --raw".into()));
        }
        Value::Array(list) => {
            let list = checked_messages(list).map_err(CliError::Usage)?;
            if args.system_prompt.is_some() && list.iter().any(|message| message["role"] == "system") {
                return Err(CliError::Usage("the row has a system message; leave out --system-prompt".into()));
            }
            messages.extend(list);
        }
        asked if args.raw => return Ok(text.tokenizer.encode(asked.as_str().unwrap_or_default())?),
        asked => messages.push(json!({"role": "user", "content": asked})),
    }
    let options = RenderOptions { add_generation_prompt: true, enable_thinking: text.thinking, ..Default::default() };
    Ok(text.tokenizer.encode(&text.template.render(&messages, options)?)?)
}
