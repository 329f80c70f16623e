//! Conversations to samples.
//!
//! The model's own template renders a conversation. The text with which the template opens an assistant turn belongs to
//! the prompt. The assistant's text is supervised, with its end token, because a model that is never taught its end
//! token never learns to stop.

use crate::{
    CliError,
    data::{sample::Sample, tool_calls},
    model_files::TextFiles,
    settings::LossOn,
};
use model_qwen3::{ModelError, chat_template::RenderOptions, tokenizer::Tokenizer};
use serde_json::{Value, json};
use std::{borrow::Cow, ops::Range};

/// Most messages of a row. The beginning of the conversation is rendered for each answer, which takes seconds for more.
const MOST_MESSAGES: usize = 1000;

/// A conversation as the template takes it.
pub(super) struct Conversation {
    messages: Vec<Value>,
    tools: Option<Value>,
    /// Indices of the messages that the loss leaves out, whoever wrote them.
    unsupervised: Vec<usize>,
}

impl Conversation {
    /// A user message and its answer.
    ///
    /// # Errors
    /// If one of them is empty.
    pub(super) fn of_pair(prompt: &str, answer: &str) -> Result<Self, String> {
        if prompt.trim().is_empty() || answer.trim().is_empty() {
            return Err("prompt or answer is empty; a row needs both".into());
        }
        let messages =
            vec![json!({"role": "user", "content": prompt}), json!({"role": "assistant", "content": answer})];
        Ok(Self { messages, tools: None, unsupervised: vec![] })
    }

    /// Messages `{"role": …, "content": …}` and the tools that they may call. A message with `"weight": 0` is read, but not
    /// learned.
    ///
    /// # Errors
    /// What is wrong with which message.
    pub(super) fn of_messages(mut messages: Vec<Value>, tools: Option<Value>) -> Result<Self, String> {
        let mut unsupervised = Vec::new();
        if messages.len() > MOST_MESSAGES {
            return Err(format!("{} messages; a row has at most {MOST_MESSAGES}. Split it", messages.len()));
        }
        for (i, message) in messages.iter_mut().enumerate() {
            let weight = check(message).map_err(|e| format!("message {}: {e}", i + 1))?;
            if !weight {
                unsupervised.push(i);
            }
        }
        if !messages.iter().any(|m| m["role"] == "assistant") {
            return Err("no assistant message, so there is nothing to learn; add one or remove the row".into());
        }
        Ok(Self { messages, tools, unsupervised })
    }

    /// This conversation with the system message that its row has beside the messages, if there is one.
    ///
    /// # Errors
    /// If it begins with another system message.
    pub(super) fn with_system(mut self, system: Option<&str>) -> Result<Self, String> {
        let Some(text) = system else { return Ok(self) };
        if let Some(own) = self.messages.first().filter(|message| message["role"] == "system") {
            if own["content"] == text {
                return Ok(self);
            }
            return Err(
                "a system message stands both in \"system\" and among the messages; leave one of them out".into()
            );
        }
        self.messages.insert(0, json!({"role": "system", "content": text}));
        self.unsupervised.iter_mut().for_each(|message| *message += 1);
        Ok(self)
    }

    /// The fields with thoughts that stand in its messages, and that the chat template does not render.
    pub(super) fn left_out_by(&self, text: &TextFiles) -> impl Iterator<Item = &'static str> {
        let stands = move |field: &str| {
            self.messages
                .iter()
                .any(|message| message[field].as_str().is_some_and(|thought| !thought.trim().is_empty()))
        };
        text.not_rendered.iter().copied().filter(move |field| stands(field))
    }

    /// Gives the samples of the conversation to `take`. There is one, unless the template renders earlier turns differently
    /// once later turns follow, as templates do that drop old thinking: then there is one for each assistant turn.
    pub(super) fn samples(
        &self,
        text: &TextFiles,
        loss_on: LossOn,
        mut take: impl FnMut(Sample) -> Result<(), CliError>,
    ) -> Result<(), CliError> {
        let user = self.messages.iter().find(|m| m["role"] == "user");
        let prompt = user.and_then(|m| m["content"].as_str()).unwrap_or_default().to_owned();
        let full = self.render(text, self.messages.len(), false).map_err(|e| self.explained(e))?;
        if loss_on == LossOn::All {
            let ids = text.tokenizer.encode(&full)?;
            let supervised = vec![true; ids.len()];
            return take(Sample::new(ids, supervised, prompt));
        }
        // The range of each assistant turn in the text up to its end. That text is a part of the whole conversation, unless the
        // template renders earlier turns differently once later turns follow.
        let mut turns: Vec<(usize, Range<usize>)> = Vec::new();
        let mut grows = true;
        let learned = |i: &usize| self.messages[*i]["role"] == "assistant" && !self.unsupervised.contains(i);
        for i in (0..self.messages.len()).filter(learned) {
            // The last turn ends where the whole conversation does, which is rendered already.
            let is_last = i + 1 == self.messages.len();
            let closed = if is_last { Cow::Borrowed(&*full) } else { self.render(text, i + 1, false)?.into() };
            let end = closed.trim_end().len();
            // A template may render anything: an opening that is longer than the whole turn, too.
            let begin = self.begin_of(text, i, &closed)?.filter(|begin| *begin <= end).ok_or_else(|| {
                let reason =
                    "the chat template renders an answer in another way than it opens one; use another template";
                CliError::Usage(reason.into())
            })?;
            let before = turns.last().map_or(0, |(_, turn)| turn.end);
            grows &= before <= begin && full.starts_with(&closed[..end]);
            turns.push((i, begin..end));
        }
        if grows {
            let turns: Vec<_> = turns.into_iter().map(|(_, turn)| turn).collect();
            return take(encode(&full, &turns, prompt, text, &mut SharedBeginning::default())?);
        }
        // Each sample repeats all earlier turns. It is made after the one before it was taken, so that memory holds one that is
        // too long, and not all of them.
        let mut beginning = SharedBeginning::default();
        turns.iter().try_for_each(|(i, turn)| {
            let rendered = self.render(text, i + 1, false)?;
            take(encode(&rendered, std::slice::from_ref(turn), prompt.clone(), text, &mut beginning)?)
        })
    }

    /// Where the answer of assistant turn `i` begins in `closed`, the text up to the end of that turn. None if `closed` does not
    /// contain the text with which the template opens an answer.
    fn begin_of(&self, text: &TextFiles, i: usize, closed: &str) -> Result<Option<usize>, CliError> {
        if i > 0 {
            let opened = self.render(text, i, true)?;
            return Ok(closed.starts_with(&opened).then_some(opened.len()));
        }
        // No message stands before the first turn, and templates read a first message. So the opening is taken from the answer
        // that would follow; only tools, as JSON, may stand before the first turn.
        let next = self.render(text, 1, true)?;
        let opening = next.strip_prefix(closed).filter(|opening| !opening.is_empty());
        Ok(opening.and_then(|opening| Some(closed.find(opening)? + opening.len())))
    }

    /// The error of a template that does not render the conversation, with the likely cause if no user message begins it.
    fn explained(&self, error: CliError) -> CliError {
        match self.messages.iter().map(|m| m["role"].as_str().unwrap_or_default()).find(|role| *role != "system") {
            Some(role) if role != "user" => CliError::Usage(format!(
                "the conversation begins with a message of role {role:?}, and the chat template fails ({error}); begin it with \
                 a user message"
            )),
            _ => error,
        }
    }

    /// The first `count` messages as text, and the beginning of an answer if `opens_answer`.
    fn render(&self, text: &TextFiles, count: usize, opens_answer: bool) -> Result<String, CliError> {
        let options =
            RenderOptions { tools: self.tools.as_ref(), add_generation_prompt: opens_answer, enable_thinking: None };
        Ok(text.template.render(&self.messages[..count], options)?)
    }
}

/// Refuses a message that a template would silently render as nothing, and joins content that is in parts. Returns whether
/// the message is to be learned, as its weight says.
fn check(message: &mut Value) -> Result<bool, String> {
    match message.get("role").and_then(Value::as_str) {
        None => return Err("no \"role\"; a message needs \"role\" and \"content\"".into()),
        Some("system" | "user" | "assistant" | "tool") => {}
        // OpenAI's newer name.
        Some("developer") => message["role"] = "system".into(),
        Some(role) => return Err(format!("role {role:?} is unknown; use system, user, assistant or tool")),
    }
    if let Some(calls) = message.get_mut("tool_calls") {
        *calls = tool_calls::list(calls.take(), "tool_calls")?.unwrap_or_default();
        if !calls.is_null() {
            tool_calls::check(calls)?;
        }
    }
    let calls = message.get("tool_calls").is_some_and(|c| c.as_array().is_some_and(|c| !c.is_empty()));
    let text = match message.get("content") {
        Some(Value::String(text)) => text.clone(),
        None | Some(Value::Null) if calls => String::new(),
        Some(Value::Array(parts)) => {
            let texts: Option<Vec<&str>> = parts.iter().map(|p| p.get("text").and_then(Value::as_str)).collect();
            texts.ok_or("\"content\" holds a part that is not text; only text is supported")?.concat()
        }
        _ => return Err("\"content\" must be text or a list of text parts".into()),
    };
    if text.trim().is_empty() && !calls {
        return Err(empty("content"));
    }
    message["content"] = text.into();
    for key in ["reasoning_content", "thinking"] {
        if message.get(key).is_some_and(|thought| !thought.is_null() && !thought.is_string()) {
            return Err(format!("{key:?} must be text"));
        }
    }
    match message.as_object_mut().and_then(|message| message.remove("weight")) {
        // A table has a weight for every message if one message has one.
        None | Some(Value::Null) => Ok(true),
        Some(weight) => match weight.as_f64() {
            Some(0.0) => Ok(false),
            Some(1.0) => Ok(true),
            _ => Err(format!("weight {weight}; it must be 0 or 1")),
        },
    }
}

/// What is wrong with an empty field that a row needs.
pub(super) fn empty(key: &str) -> String {
    format!("{key:?} is empty; write it or remove the row")
}

/// Encodes prompts and answers separately, as generation will see them, up to the end of the last answer. `beginning` is the
/// first prompt of the sample before, if that may begin as this one does.
fn encode(
    rendered: &str,
    answers: &[Range<usize>],
    prompt: String,
    text: &TextFiles,
    beginning: &mut SharedBeginning,
) -> Result<Sample, CliError> {
    let mut sample = Sample::new(vec![], vec![], prompt);
    let mut at = 0;
    for answer in answers {
        let asked = &rendered[at..answer.start];
        if at == 0 {
            beginning.encode_onto(asked, &text.tokenizer, &mut sample.ids)?;
        } else {
            text.tokenizer.encode_onto(asked, &mut sample.ids)?;
        }
        sample.supervised.resize(sample.ids.len(), false);
        text.tokenizer.encode_onto(&rendered[answer.clone()], &mut sample.ids)?;
        sample.supervised.resize(sample.ids.len(), true);
        if sample.ids.last().is_none_or(|id| !text.stop_ids.contains(id)) {
            let reason = "the chat template does not end an answer with a stop token, so the model would never learn \
                          to stop; use another template";
            return Err(CliError::Usage(reason.into()));
        }
        at = answer.end;
    }
    Ok(sample)
}

/// The pieces of the prompt that was encoded last, each with its ids. If each turn of a conversation is a sample, its prompt
/// usually begins with the prompt of the turn before: the pieces that both share are not encoded again.
#[derive(Default)]
struct SharedBeginning {
    pieces: Vec<(String, Vec<u32>)>,
}

impl SharedBeginning {
    /// Puts the ids of a text behind others, and returns how many bytes of it were encoded.
    fn encode_onto(&mut self, asked: &str, tokenizer: &Tokenizer, ids: &mut Vec<u32>) -> Result<usize, ModelError> {
        let mut encoded = 0;
        for (i, piece) in tokenizer.pieces(asked).enumerate() {
            if self.pieces.get(i).is_none_or(|(before, _)| before != piece) {
                self.pieces.truncate(i);
                self.pieces.push((piece.to_owned(), tokenizer.encode(piece)?));
                encoded += piece.len();
            }
            ids.extend(&self.pieces[i].1);
        }
        Ok(encoded)
    }
}

#[cfg(test)]
mod tests {
    use super::SharedBeginning;
    use model_qwen3::tokenizer::Tokenizer;
    use std::path::Path;

    #[test]
    fn what_two_texts_share_is_encoded_once() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo/tokenizer.json");
        let tokenizer = Tokenizer::from_file(&file).unwrap();
        let (mut beginning, mut content, mut encoded) = (SharedBeginning::default(), String::new(), 0);
        for turn in 0..40 {
            // A template that drops thoughts changes the end of the text before.
            content.truncate(content.len().saturating_sub(7));
            content += &format!("<|im_start|>user\nQuestion {turn}: {}<|im_end|>\n", "why is that so, ".repeat(1000));
            let mut ids = vec![];
            encoded += beginning.encode_onto(&content, &tokenizer, &mut ids).unwrap();
            assert!(ids == tokenizer.encode(&content).unwrap(), "turn {turn}: the ids differ");
        }
        // The last pieces of each text are new.
        assert!(content.len() > 600_000 && encoded < 40 * (128 << 10), "{encoded} of {} bytes", content.len());
        // A text that begins otherwise, and one that is shorter.
        for other in ["something else", "", &content[..100_000]] {
            let mut ids = vec![7];
            beginning.encode_onto(other, &tokenizer, &mut ids).unwrap();
            assert!(ids[0] == 7 && ids[1..] == tokenizer.encode(other).unwrap(), "{} bytes", other.len());
        }
    }
}
