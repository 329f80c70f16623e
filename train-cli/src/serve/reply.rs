//! The answers of OpenAI's interface: whole, or in pieces (`chunk`).

use super::{
    logprobs::{self, Place},
    request::Request,
};
use crate::talk::{
    answer::{Answer, LENGTH},
    stop_text::StopText,
};
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

    /// A piece with text and its tokens, if log probabilities are wanted. `sent` says what the pieces before it held. Text that
    /// could belong to a call of a tool is held back, so that a piece may have nothing to say.
    pub(super) fn text(
        &self,
        index: usize,
        text: &str,
        tokens: &[(u32, Logprobs)],
        sent: &mut Sent,
        tokenizer: &Tokenizer,
    ) -> Option<Value> {
        let text = if self.calls_tools { sent.in_front_of_calls(text) } else { text.to_owned() };
        if text.is_empty() && tokens.is_empty() {
            return None;
        }
        let delta = if self.interface == Interface::Chat { json!({"content": text}) } else { text.into() };
        let logprobs = self.logprobs_of_piece(tokens, &mut sent.place, tokenizer);
        sent.tokens += tokens.len();
        Some(self.chunk(index, delta, logprobs, Value::Null))
    }

    /// The last pieces of a choice, behind those of `sent`.
    pub(super) fn closing(&self, index: usize, answer: &Answer, sent: &mut Sent, tokenizer: &Tokenizer) -> Vec<Value> {
        let (content, calls) = self.content_and_calls(index, &answer.text);
        let mut pieces = Vec::new();
        // Only now it is certain what belongs to a call.
        let rest = content.as_str().filter(|_| self.calls_tools).map_or("", |content| &content[sent.bytes..]);
        if !rest.is_empty() || calls.is_some() {
            let mut delta = json!({"content": Some(rest).filter(|rest| !rest.is_empty())});
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
        let thought = end_of_thought(text);
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

/// What the pieces of a choice have held so far.
#[derive(Debug, Clone, Default)]
pub(super) struct Sent {
    /// Tokens with log probabilities, and their text.
    tokens: usize,
    place: Place,
    /// Bytes of text, if the request has tools.
    bytes: usize,
    /// The text behind them that is held back.
    held: String,
}

impl Sent {
    /// Hears more text. Returns what can be sent: the text up to where a call of a tool begins or could begin, without white space
    /// in front of the call. [`Reply::content_and_calls`] begins with the same text once the answer is complete.
    fn in_front_of_calls(&mut self, piece: &str) -> String {
        self.held += piece;
        let thought = end_of_thought(&self.held);
        let (certain, _) = StopText::new(&[CALL[0].to_owned()]).push(&self.held[thought..]);
        let end = self.held[..thought + certain.len()].trim_end().len();
        self.bytes += end;
        self.held.drain(..end).collect()
    }
}

/// Where the thought in a text ends, or 0. A thought may speak of calls without making one.
fn end_of_thought(text: &str) -> usize {
    text.rfind(THOUGHT_END).map_or(0, |at| at + THOUGHT_END.len())
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

#[cfg(test)]
mod tests {
    use super::*;
    use model_qwen3::session::StopReason;
    use std::path::{Path, PathBuf};

    fn reply(calls_tools: bool) -> Reply {
        let (id, model) = ("x".to_owned(), "m".to_owned());
        Reply { interface: Interface::Chat, id, created: 0, model, calls_tools }
    }

    const CALLS: &str = "Wait.\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>\n<tool_call>{\"name\": \
                         \"now\"}</tool_call>";

    fn demo_tokenizer() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo/tokenizer.json")
    }

    fn answer_of(text: &str) -> Answer {
        Answer {
            generation: Generation { ids: vec![], stop: StopReason::StopToken(511), logprobs: vec![] },
            text: text.into(),
            prompt_tokens: 1,
            cached_tokens: 0,
            ended_by_text: false,
            seconds_to_first_token: 0.0,
            seconds: 0.0,
        }
    }

    fn calls() -> Value {
        let call = |id: &str, name: &str, arguments: &str| {
            let function = json!({"name": name, "arguments": arguments});
            json!({"id": id, "type": "function", "function": function})
        };
        json!([call("call_x_2_0", "add", "{\"a\":1}"), call("call_x_2_1", "now", "{}")])
    }

    #[test]
    fn calls_are_taken_out_of_the_text_if_the_request_has_tools() {
        assert_eq!(reply(true).content_and_calls(2, CALLS), ("Wait.".into(), Some(calls())));
        assert_eq!(reply(false).content_and_calls(2, CALLS), (CALLS.into(), None));
        let alone = "<tool_call>{\"name\": \"now\"}</tool_call>";
        assert_eq!(reply(true).content_and_calls(0, alone).0, Value::Null);
        for text in [
            "no call",
            "<tool_call>{\"name\": now}</tool_call>",
            "<tool_call>{\"arguments\": {}}</tool_call>",
            "<think>\n<tool_call>{\"name\": \"now\"}</tool_call>\n</think>\n\nNo.",
        ] {
            assert_eq!(reply(true).content_and_calls(0, text), (text.into(), None), "{text}");
        }
    }

    #[test]
    fn calls_stand_in_the_last_pieces_of_a_stream() {
        let tokenizer = Tokenizer::from_file(&demo_tokenizer()).unwrap();
        let answer = answer_of(CALLS);
        let pieces = reply(true).closing(2, &answer, &mut Sent::default(), &tokenizer);
        let [first, last] = &pieces[..] else { panic!("{pieces:?}") };
        let mut expected = calls();
        expected[0]["index"] = 0.into();
        expected[1]["index"] = 1.into();
        assert_eq!(first["choices"][0]["delta"], json!({"content": "Wait.", "tool_calls": expected}));
        assert_eq!(last["choices"][0]["finish_reason"], "tool_calls");
        let pieces = reply(false).closing(2, &answer, &mut Sent::default(), &tokenizer);
        assert!(pieces.len() == 1 && pieces[0]["choices"][0]["finish_reason"] == "stop", "{pieces:?}");
    }

    /// However an answer is cut into pieces, the text that is streamed and the text of the whole reply are the same, and text in
    /// front of a call does not wait for the call.
    #[test]
    fn text_is_streamed_up_to_a_call() {
        let tokenizer = Tokenizer::from_file(&demo_tokenizer()).unwrap();
        for (text, at_once) in [
            (CALLS, "Wait."),
            ("no call", "no call"),
            ("a < b, <tool box> ", "a < b, <tool box>"),
            ("Hello.\n\n<tool_call>{\"name\": now}</tool_call> ", "Hello."),
            ("<think>\n<tool_call>{\"name\": \"now\"}</tool_call>\n</think>\n\nNo.", "<think>"),
            ("A <tool_call>{\"name\": \"now\"}</tool_call> B \n", "A"),
            ("你好<tool_call>{\"name\": \"now\"}</tool_call>", "你好"),
        ] {
            let whole = reply(true).content_and_calls(2, text);
            let characters: Vec<String> = text.chars().map(String::from).collect();
            for length in 1..=characters.len() {
                let (mut sent, mut streamed) = (Sent::default(), String::new());
                for piece in characters.chunks(length) {
                    let piece = reply(true).text(2, &piece.concat(), &[], &mut sent, &tokenizer);
                    streamed += piece.map_or(String::new(), |piece| content(&piece)).as_str();
                }
                assert!(streamed.starts_with(at_once), "{text}: {streamed}");
                let pieces = reply(true).closing(2, &answer_of(text), &mut sent, &tokenizer);
                streamed.extend(pieces.iter().map(content));
                assert_eq!(streamed, whole.0.as_str().unwrap_or_default(), "{text} in pieces of {length}");
                let called = pieces.iter().any(|piece| piece["choices"][0]["delta"]["tool_calls"].is_array());
                assert_eq!(called, whole.1.is_some(), "{text}");
            }
        }
    }

    /// The text of a piece.
    fn content(piece: &Value) -> String {
        piece["choices"][0]["delta"]["content"].as_str().unwrap_or_default().to_owned()
    }
}
