//! The answers of OpenAI's interface: whole, or in pieces (`chunk`).

use super::{
    logprobs::{self, Place},
    request::Request,
};
use crate::talk::answer::{Answer, LENGTH};
use model_qwen3::{json, sampling::Logprobs, session::Generation, tokenizer::Tokenizer};
use serde_json::{Value, json};

/// Which of the two interfaces a reply belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Interface {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completion,
}

/// What all replies to one request have in common.
#[derive(Debug, Clone)]
pub(super) struct Reply {
    /// The interface.
    pub(super) interface: Interface,
    /// The reply's own name.
    pub(super) id: String,
    /// Seconds since 1970.
    pub(super) created: i64,
    /// The model's name.
    pub(super) model: String,
    /// Whether calls of tools are taken out of the text.
    pub(super) calls_tools: bool,
}

/// What begins and ends a call in the text of Qwen3.
const CALL: [&str; 2] = ["<tool_call>", "</tool_call>"];
/// What ends a thought.
const THOUGHT_END: &str = "</think>";

impl Reply {
    /// The reply with these answers, one for each choice.
    pub(super) fn whole(&self, answers: &[&Answer], request: &Request, tokenizer: &Tokenizer) -> Value {
        let choice = |(index, answer): (usize, &&Answer)| -> Value {
            let tokens = tokens_of(answer, 0);
            let logprobs = request.logprobs.map(|_| self.logprobs(&tokens, &mut Place::default(), tokenizer));
            let (content, calls) = self.content_and_calls(index, &answer.text);
            let mut choice = json!({"index": index, "logprobs": logprobs, "finish_reason": reason(answer, &calls)});
            match self.interface {
                Interface::Completion => choice["text"] = answer.text.clone().into(),
                Interface::Chat => {
                    choice["message"] = json!({"role": "assistant", "content": content});
                    if let Some(calls) = calls {
                        choice["message"]["tool_calls"] = calls;
                    }
                }
            }
            choice
        };
        let choices: Value = answers.iter().enumerate().map(choice).collect();
        let object = if self.interface == Interface::Chat { "chat.completion" } else { "text_completion" };
        self.envelope(object, choices, usage(answers, request))
    }

    /// The first piece of a choice.
    pub(super) fn opening(&self, index: usize) -> Option<Value> {
        let delta = json!({"role": "assistant", "content": ""});
        (self.interface == Interface::Chat).then(|| self.chunk(index, delta, Value::Null, Value::Null))
    }

    /// A piece with text and its tokens, if log probabilities are wanted. `sent` says what the pieces before it held.
    pub(super) fn text(
        &self,
        index: usize,
        text: &str,
        tokens: &[(u32, Logprobs)],
        sent: &mut Sent,
        tokenizer: &Tokenizer,
    ) -> Value {
        let delta = if self.interface == Interface::Chat { json!({"content": text}) } else { text.into() };
        let logprobs = self.logprobs_of_piece(tokens, &mut sent.place, tokenizer);
        sent.tokens += tokens.len();
        self.chunk(index, delta, logprobs, Value::Null)
    }

    /// The last pieces of a choice, behind those of `sent`.
    pub(super) fn closing(&self, index: usize, answer: &Answer, sent: &mut Sent, tokenizer: &Tokenizer) -> Vec<Value> {
        let (content, calls) = self.content_and_calls(index, &answer.text);
        let mut pieces = Vec::new();
        if self.calls_tools {
            // Only now it is certain what belongs to a call.
            let mut delta = json!({"content": content});
            if let Some(Value::Array(mut calls)) = calls.clone() {
                calls.iter_mut().enumerate().for_each(|(i, call)| call["index"] = i.into());
                delta["tool_calls"] = calls.into();
            }
            pieces.push(self.chunk(index, delta, Value::Null, Value::Null));
        }
        let delta = if self.interface == Interface::Chat { json!({}) } else { "".into() };
        let rest = self.logprobs_of_piece(&tokens_of(answer, sent.tokens), &mut sent.place, tokenizer);
        pieces.push(self.chunk(index, delta, rest, reason(answer, &calls).into()));
        pieces
    }

    /// The piece behind all others, with the numbers of tokens.
    pub(super) fn usage(&self, answers: &[&Answer], request: &Request) -> Value {
        self.envelope(self.chunk_object(), json!([]), usage(answers, request))
    }

    fn chunk_object(&self) -> &'static str {
        if self.interface == Interface::Chat { "chat.completion.chunk" } else { "text_completion" }
    }

    fn chunk(&self, index: usize, delta: Value, logprobs: Value, finish_reason: Value) -> Value {
        let field = if self.interface == Interface::Chat { "delta" } else { "text" };
        let choice = json!({"index": index, field: delta, "logprobs": logprobs, "finish_reason": finish_reason});
        self.envelope(self.chunk_object(), json!([choice]), Value::Null)
    }

    fn envelope(&self, object: &str, choices: Value, usage: Value) -> Value {
        json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model, "choices": choices,
            "usage": usage,
        })
    }

    /// The text in front of the calls of tools, and the calls. A call that is no JSON stays text.
    fn content_and_calls(&self, index: usize, text: &str) -> (Value, Option<Value>) {
        if !self.calls_tools {
            return (text.into(), None);
        }
        // A thought may speak of calls.
        let thought = text.rfind(THOUGHT_END).map_or(0, |at| at + THOUGHT_END.len());
        let mut content = text[..thought].to_owned();
        let mut parts = text[thought..].split(CALL[0]);
        content += parts.next().unwrap_or_default();
        let mut calls = Vec::new();
        for part in parts {
            let (call, rest) = part.split_once(CALL[1]).unwrap_or((part, ""));
            let Some(function) = function(call) else { return (text.into(), None) };
            let id = format!("call_{}_{index}_{}", self.id, calls.len());
            calls.push(json!({"id": id, "type": "function", "function": function}));
            content += rest;
        }
        if calls.is_empty() {
            return (text.into(), None);
        }
        let content = content.trim_end();
        (if content.is_empty() { Value::Null } else { content.into() }, Some(calls.into()))
    }

    /// The log probabilities of a piece of an answer, or null if it has none.
    fn logprobs_of_piece(&self, found: &[(u32, Logprobs)], place: &mut Place, tokenizer: &Tokenizer) -> Value {
        if found.is_empty() { Value::Null } else { self.logprobs(found, place, tokenizer) }
    }

    /// The log probabilities of tokens as the interface writes them. The tokens follow those that brought the text to `place`.
    fn logprobs(&self, found: &[(u32, Logprobs)], place: &mut Place, tokenizer: &Tokenizer) -> Value {
        match self.interface {
            Interface::Chat => logprobs::of_chat(found, tokenizer),
            Interface::Completion => logprobs::of_completion(found, place, tokenizer),
        }
    }
}

/// What the pieces of a choice have held so far: tokens with log probabilities, and their text.
#[derive(Debug, Clone, Default)]
pub(super) struct Sent {
    tokens: usize,
    place: Place,
}

/// The tokens of an answer with their log probabilities, without the first `sent`.
fn tokens_of(answer: &Answer, sent: usize) -> Vec<(u32, Logprobs)> {
    let Generation { ids, logprobs, .. } = &answer.generation;
    ids.iter().copied().zip(logprobs.iter().cloned()).skip(sent).collect()
}

/// The function that a call names, with its arguments as JSON text.
fn function(call: &str) -> Option<Value> {
    let call = json::parse(call.trim()).ok()?;
    let arguments = match call.get("arguments") {
        None | Some(Value::Null) => "{}".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(arguments) => arguments.to_string(),
    };
    Some(json!({"name": call.get("name")?.as_str()?, "arguments": arguments}))
}

/// Why an answer ended.
fn reason(answer: &Answer, calls: &Option<Value>) -> &'static str {
    match answer.stop() {
        _ if calls.is_some() => "tool_calls",
        LENGTH => "length",
        _ => "stop",
    }
}

/// Numbers of tokens. The choices of a prompt share it.
fn usage(answers: &[&Answer], request: &Request) -> Value {
    let prompts: usize = request.prompts.iter().map(Vec::len).sum();
    let tokens: usize = answers.iter().map(|answer| answer.generation.ids.len()).sum();
    let cached: usize = answers.iter().step_by(request.choices).map(|answer| answer.cached_tokens).sum();
    json!({
        "prompt_tokens": prompts, "completion_tokens": tokens, "total_tokens": prompts + tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    })
}
