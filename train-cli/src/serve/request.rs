//! Requests of OpenAI's interface, checked. A field is refused if it would change the answer and this server does not have what
//! it asks for.

use super::{json_fields::Fields, refusal::Refusal};
use crate::{model_files::TextFiles, talk::message::checked_messages};
use model_qwen3::{chat_template::RenderOptions, sampling::Sampling, session::GenerateOptions};
use serde_json::{Value, json};

/// Most choices of a request.
const MOST_CHOICES: u64 = 8;
/// Most texts that end an answer.
const MOST_STOPS: usize = 16;
/// Most bytes of such a text: every token is compared with it.
const LONGEST_STOP: usize = 1024;
/// Fields that many clients send and that change no answer here.
const WITHOUT_EFFECT: [&str; 8] = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
];

/// A question.
#[derive(Debug)]
pub(super) struct Request {
    /// The tokens of each prompt.
    pub(super) prompts: Vec<Vec<u32>>,
    /// Answers of each prompt.
    pub(super) choices: usize,
    /// How tokens are chosen, without the limits of prompt and context.
    pub(super) sampling: Sampling,
    /// Tokens of an answer, at most.
    pub(super) max_tokens: Option<usize>,
    /// Texts that end an answer.
    pub(super) ends: Vec<String>,
    /// Whether an answer continues past the model's stop tokens, as measurements of speed need it.
    ignores_stop_tokens: bool,
    /// Whether the answer comes in pieces.
    pub(super) streams: bool,
    /// Whether the last piece holds the numbers of tokens.
    pub(super) streams_usage: bool,
    /// Whether log probabilities are wanted, and of how many of the most likely tokens.
    pub(super) logprobs: Option<usize>,
    /// Whether the model may call tools, whose calls are taken out of the text.
    pub(super) calls_tools: bool,
    /// Which model is asked.
    pub(super) model: Option<String>,
}

impl Request {
    /// A question to `/v1/chat/completions`. `fresh_seed` is used if the request has none.
    ///
    /// # Errors
    /// If a field is wrong or unknown, or the chat template refuses the messages.
    pub(super) fn chat(body: &[u8], text: &TextFiles, fresh_seed: u64) -> Result<Self, Refusal> {
        let mut fields = Fields::of(body)?;
        let wanted = fields.flag("logprobs")?.unwrap_or(false);
        let top = fields.whole("top_logprobs", 0..=20)?;
        if top.is_some() && !wanted {
            return Err(Refusal::field("top_logprobs", "set \"logprobs\" to true"));
        }
        let longest = fields.whole("max_completion_tokens", 1..=u64::from(u32::MAX))?;
        let logprobs = wanted.then_some(top.unwrap_or(0) as usize);
        let messages = messages(fields.take("messages"))?;
        let tools = tools(&mut fields)?;
        let thinking = thinking(&mut fields)?.or(text.thinking);
        fields.only("response_format", &[json!({"type": "text"})])?;
        fields.only("modalities", &[json!(["text"])])?;
        let mut request = Self::common(fields, text, thinking, fresh_seed)?;
        let options = RenderOptions { tools: tools.as_ref(), add_generation_prompt: true, enable_thinking: thinking };
        let rendered = text.template.render(&messages, options);
        let prompt = rendered.and_then(|prompt| text.tokenizer.encode(&prompt));
        request.prompts = vec![prompt.map_err(|e| Refusal::of_text("messages", e))?];
        request.max_tokens = longest.map(|most| most as usize).or(request.max_tokens);
        request.calls_tools = tools.is_some();
        request.logprobs = logprobs;
        Ok(request)
    }

    /// A question to `/v1/completions`.
    ///
    /// # Errors
    /// If a field is wrong or unknown.
    pub(super) fn completion(body: &[u8], text: &TextFiles, fresh_seed: u64) -> Result<Self, Refusal> {
        let mut fields = Fields::of(body)?;
        let prompt = fields.take("prompt").ok_or_else(|| Refusal::field("prompt", "the field is missing"))?;
        let logprobs = fields.whole("logprobs", 0..=5)?.map(|count| count as usize);
        fields.only("echo", &[json!(false)])?;
        fields.only("suffix", &[json!("")])?;
        fields.only("best_of", &[json!(1)])?;
        let mut request = Self::common(fields, text, None, fresh_seed)?;
        // As OpenAI has it.
        request.max_tokens.get_or_insert(16);
        request.logprobs = logprobs;
        request.prompts = prompts(prompt, text)?;
        Ok(request)
    }

    /// The fields that both have. Nothing may be left. `thinking` says whether the model is asked to think.
    fn common(mut fields: Fields, text: &TextFiles, thinking: Option<bool>, fresh_seed: u64) -> Result<Self, Refusal> {
        let (model, _) = text.sampling(thinking);
        let seed = match fields.take("seed") {
            None => fresh_seed,
            Some(value) => value
                .as_u64()
                .or(value.as_i64().map(|seed| seed as u64))
                .ok_or_else(|| Refusal::field("seed", "a whole number is needed"))?,
        };
        let sampling = Sampling {
            temperature: fields.number("temperature", 0.0..=2.0)?.unwrap_or(model.temperature),
            top_p: fields.number("top_p", Sampling::TOP_P)?.unwrap_or(model.top_p),
            top_k: fields.whole("top_k", 0..=1 << 20)?.map_or(model.top_k, |k| k as usize),
            min_p: fields.number("min_p", Sampling::MIN_P)?.unwrap_or(model.min_p),
            repetition_penalty: fields
                .number("repetition_penalty", Sampling::REPETITION_PENALTY)?
                .unwrap_or(model.repetition_penalty),
            seed,
        };
        let streams = fields.flag("stream")?.unwrap_or(false);
        let request = Self {
            prompts: vec![],
            choices: fields.whole("n", 1..=MOST_CHOICES)?.unwrap_or(1) as usize,
            sampling,
            max_tokens: fields.whole("max_tokens", 1..=u64::from(u32::MAX))?.map(|most| most as usize),
            ends: ends(fields.take("stop"))?,
            ignores_stop_tokens: fields.flag("ignore_eos")?.unwrap_or(false),
            streams,
            streams_usage: usage(fields.take("stream_options"), streams)?,
            logprobs: None,
            calls_tools: false,
            model: fields.text("model")?,
        };
        for penalty in ["presence_penalty", "frequency_penalty"] {
            fields.only(penalty, &[json!(0), json!(0.0)])?;
        }
        fields.only("logit_bias", &[json!({})])?;
        fields.only("parallel_tool_calls", &[json!(true)])?;
        fields.ignore(&WITHOUT_EFFECT);
        fields.end()?;
        Ok(request)
    }

    /// How the answer `choice` of a prompt is made. It has at most `room` tokens.
    pub(super) fn options(&self, choice: usize, room: usize, text: &TextFiles) -> GenerateOptions {
        GenerateOptions {
            max_tokens: self.max_tokens.map_or(room, |most| most.min(room)),
            sampling: Sampling { seed: self.sampling.seed.wrapping_add(choice as u64), ..self.sampling },
            stop_ids: if self.ignores_stop_tokens { vec![] } else { text.stop_ids.clone() },
            logprobs: self.logprobs,
        }
    }
}

/// The messages of a conversation, as chat templates read them.
fn messages(value: Option<Value>) -> Result<Vec<Value>, Refusal> {
    let checked = match value {
        Some(Value::Array(list)) => checked_messages(list),
        _ => Err("a list is needed".into()),
    };
    checked.map_err(|reason| Refusal::field("messages", reason))
}

/// The tools of a request, if the model may call any.
fn tools(fields: &mut Fields) -> Result<Option<Value>, Refusal> {
    let tools = match fields.take("tools") {
        None => None,
        Some(Value::Array(list)) if list.is_empty() => None,
        Some(Value::Array(list)) => {
            if let Some(i) = list.iter().position(|tool| !is_tool(tool)) {
                return Err(Refusal::field("tools", format_args!("tool {} {NEEDED_IN_TOOL}", i + 1)));
            }
            Some(list.into())
        }
        Some(_) => return Err(Refusal::field("tools", "a list is needed")),
    };
    match fields.take("tool_choice") {
        None => Ok(tools),
        Some(choice) if choice == "auto" => Ok(tools),
        Some(choice) if choice == "none" => Ok(None),
        Some(_) => Err(Refusal::field("tool_choice", "this server has \"auto\" and \"none\"")),
    }
}

/// What [`is_tool`] asks for.
const NEEDED_IN_TOOL: &str = "needs \"type\": \"function\" and a \"function\" with a text as \"name\"; its \"parameters\" must be an \
                              object, its \"description\" a text, and \"strict\" true or false";

/// Whether a value describes a function that the model may call.
fn is_tool(tool: &Value) -> bool {
    let function = &tool["function"];
    let fits = |key: &str, is: fn(&Value) -> bool| function[key].is_null() || is(&function[key]);
    tool["type"] == "function"
        && function["name"].as_str().is_some_and(|name| !name.is_empty())
        && fits("parameters", Value::is_object)
        && fits("description", Value::is_string)
        && fits("strict", Value::is_boolean)
}

/// Whether the model thinks before its answer; None leaves it to its training, and that to the template.
fn thinking(fields: &mut Fields) -> Result<Option<bool>, Refusal> {
    let bad = |reason: &str| Refusal::field("chat_template_kwargs", reason);
    match fields.take("chat_template_kwargs") {
        None => Ok(None),
        Some(Value::Object(given)) if given.iter().all(|(key, value)| key == "enable_thinking" || value.is_null()) => {
            match given.get("enable_thinking") {
                None | Some(Value::Null) => Ok(None),
                Some(value) => {
                    value.as_bool().map(Some).ok_or_else(|| bad("enable_thinking is neither true nor false"))
                }
            }
        }
        Some(_) => Err(bad("an object with \"enable_thinking\" is needed")),
    }
}

fn ends(stop: Option<Value>) -> Result<Vec<String>, Refusal> {
    let list = match stop {
        None => return Ok(vec![]),
        Some(Value::Array(list)) if list.len() <= MOST_STOPS => list,
        Some(text @ Value::String(_)) => vec![text],
        Some(_) => return Err(Refusal::field("stop", format_args!("a text or up to {MOST_STOPS} texts are needed"))),
    };
    let fits = |text: &&str| !text.is_empty() && text.len() <= LONGEST_STOP;
    let text = |value: &Value| value.as_str().filter(fits).map(str::to_owned);
    list.iter()
        .map(text)
        .collect::<Option<_>>()
        .ok_or_else(|| Refusal::field("stop", format_args!("a text of 1 to {LONGEST_STOP} bytes is needed")))
}

fn usage(options: Option<Value>, streams: bool) -> Result<bool, Refusal> {
    // OpenAI pads the pieces of a stream unless a client says no. This server never does.
    let known = |(key, value): (&String, &Value)| {
        value.is_null() || key == "include_usage" || key == "include_obfuscation" && *value == false
    };
    match options {
        None => Ok(false),
        Some(Value::Object(options)) if streams && options.iter().all(known) => match options.get("include_usage") {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(wanted)) => Ok(*wanted),
            Some(_) => Err(Refusal::field("stream_options", "include_usage is neither true nor false")),
        },
        Some(_) => Err(Refusal::field("stream_options", "with \"stream\": true, {\"include_usage\": true} is known")),
    }
}

/// The prompts of a completion: a text, several texts, tokens, or several lists of tokens.
fn prompts(prompt: Value, text: &TextFiles) -> Result<Vec<Vec<u32>>, Refusal> {
    let bad = |reason: String| Refusal::field("prompt", reason);
    let encoded = |prompt: &str| text.tokenizer.encode(prompt).map_err(|e| Refusal::of_text("prompt", e));
    let ids = |list: &[Value]| -> Option<Vec<u32>> {
        list.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect()
    };
    let neither = || bad("a text, texts, token ids or lists of them are needed".into());
    let all = match prompt {
        Value::String(prompt) => vec![encoded(&prompt)?],
        Value::Array(list) if list.len() > MOST_CHOICES as usize && !list[0].is_u64() => {
            return Err(bad(format!("{} prompts; at most {MOST_CHOICES} are taken", list.len())));
        }
        Value::Array(list) if list.iter().all(Value::is_u64) => vec![ids(&list).ok_or_else(neither)?],
        Value::Array(list) => {
            let each = |value: &Value| match value {
                Value::String(prompt) => encoded(prompt),
                Value::Array(list) => ids(list).ok_or_else(neither),
                _ => Err(neither()),
            };
            list.iter().map(each).collect::<Result<_, _>>()?
        }
        _ => return Err(neither()),
    };
    if all.iter().any(Vec::is_empty) || all.is_empty() {
        return Err(bad("it has no tokens".into()));
    }
    Ok(all)
}
