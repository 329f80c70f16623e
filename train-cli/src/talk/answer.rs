//! An answer: its text as it grows, and its figures.

use crate::{CliError, memory::surplus::Surplus, model_files::TextFiles, report, talk::stop_text::StopText};
use backend_nvfp4::{DeviceMemory, Nvfp4Kernels};
use model_qwen3::{
    sampling::{Logprobs, Sampling},
    session::{GenerateOptions, Generation, Progress, Session, StopReason},
    tokenizer::{TextStream, Tokenizer},
};
use serde_json::{Value, json};
use std::{ops::ControlFlow, time::Instant};

/// How an answer ended that has as many tokens as it may have.
pub const LENGTH: &str = "length";
/// How an answer ended that was stopped by Ctrl-C.
pub const INTERRUPTED: &str = "interrupted";

/// The text of an answer while it grows.
pub struct Growing {
    stream: TextStream,
    until: StopText,
    text: String,
    prompt_tokens: usize,
    cached_tokens: usize,
    ended_by_text: bool,
    started: Instant,
    seconds_to_first_token: Option<f64>,
}

impl Growing {
    /// An answer that begins now and ends in front of a text of `ends`. The prompt has `prompt_tokens` tokens, of which the
    /// session had read `cached_tokens`.
    pub fn new(prompt_tokens: usize, cached_tokens: usize, ends: &[String]) -> Self {
        Self {
            stream: TextStream::default(),
            until: StopText::new(ends),
            text: String::new(),
            prompt_tokens,
            cached_tokens,
            ended_by_text: false,
            started: Instant::now(),
            seconds_to_first_token: None,
        }
    }

    /// Takes a token. Returns the text that is now certain.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn push(&mut self, id: u32, tokenizer: &Tokenizer) -> Result<String, CliError> {
        self.seconds_to_first_token.get_or_insert_with(|| self.started.elapsed().as_secs_f64());
        let (certain, found) = self.until.push(&self.stream.push(id, tokenizer)?);
        self.ended_by_text = found;
        self.text += &certain;
        Ok(certain)
    }

    /// Whether a text of `ends` was found.
    pub fn has_ended(&self) -> bool {
        self.ended_by_text
    }

    /// The answer, and the end of its text: of one that stops within a character, and what looked like the beginning of a
    /// text of `ends`.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn finish(mut self, generation: Generation, tokenizer: &Tokenizer) -> Result<(Answer, String), CliError> {
        let mut rest = String::new();
        if !self.ended_by_text {
            let (certain, found) = self.until.push(&self.stream.finish(tokenizer)?);
            self.ended_by_text = found;
            rest = certain + &self.until.finish();
        }
        let seconds = self.started.elapsed().as_secs_f64();
        let answer = Answer {
            generation,
            text: self.text + &rest,
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            ended_by_text: self.ended_by_text,
            seconds_to_first_token: self.seconds_to_first_token.unwrap_or(seconds),
            seconds,
        };
        Ok((answer, rest))
    }
}

/// An answer with the times it took.
#[derive(Debug)]
pub struct Answer {
    /// The tokens.
    pub generation: Generation,
    /// Their text.
    pub text: String,
    /// Number of tokens of the prompt.
    pub prompt_tokens: usize,
    /// Number of tokens of the prompt that an earlier turn had read.
    pub cached_tokens: usize,
    /// Whether a text of `ends` ended the answer.
    pub ended_by_text: bool,
    /// Seconds until the first token was made.
    pub seconds_to_first_token: f64,
    /// Seconds that the whole answer took.
    pub seconds: f64,
}

impl Answer {
    /// Answers a prompt, streams the text if `shows`, and ends in front of a text of `ends`, or if `stops` says so.
    ///
    /// # Errors
    /// As [`Session::answer`].
    pub fn of<B: Nvfp4Kernels + DeviceMemory>(
        session: &mut Session<'_, B>,
        text: &TextFiles,
        prompt: &[u32],
        options: &GenerateOptions,
        ends: &[String],
        shows: bool,
        stops: impl Fn() -> bool,
    ) -> Result<Self, CliError> {
        let mut growing = Growing::new(prompt.len(), session.cached(prompt), ends);
        let (mut failed, mut surplus, device) = (None, Surplus::default(), session.device());
        let show = |piece: &str| {
            if shows && !piece.is_empty() {
                report::stream(piece);
            }
        };
        let generation = session.answer(prompt, options, |progress| {
            surplus.after_step::<B>(&device, matches!(progress, Progress::Read(_)));
            if let Progress::Token(id) = progress {
                match growing.push(id, &text.tokenizer) {
                    Ok(piece) => show(&piece),
                    Err(e) => failed = Some(e),
                }
            }
            if failed.is_some() || growing.has_ended() || stops() {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        })?;
        if let Some(error) = failed {
            return Err(error);
        }
        let (answer, rest) = growing.finish(generation, &text.tokenizer)?;
        show(&rest);
        Ok(answer)
    }

    /// Tokens a second, without the first.
    pub fn rate(&self) -> f64 {
        let (tokens, decoding) = (self.generation.ids.len(), self.seconds - self.seconds_to_first_token);
        if decoding > 0.0 { tokens.saturating_sub(1) as f64 / decoding } else { 0.0 }
    }

    /// Why it ended.
    pub fn stop(&self) -> &'static str {
        match self.generation.stop {
            _ if self.ended_by_text => "stop",
            StopReason::StopToken(_) => "stop",
            StopReason::MaxTokens => LENGTH,
            StopReason::Caller => INTERRUPTED,
        }
    }

    /// The answer to `question` as JSON.
    pub fn json(&self, question: impl Into<Value>) -> Value {
        json!({
            "prompt": question.into(), "text": self.text, "ids": self.generation.ids, "stop": self.stop(),
            "prompt_tokens": self.prompt_tokens, "cached_tokens": self.cached_tokens, "tokens": self.generation.ids.len(),
            "seconds_to_first_token": self.seconds_to_first_token, "tokens_per_second": self.rate(),
        })
    }

    /// What `--logprobs` says about each token.
    ///
    /// # Errors
    /// If the tokenizer fails.
    pub fn logprobs(&self, tokenizer: &Tokenizer) -> Result<Value, CliError> {
        let named = |id: u32, logprob: f32| -> Result<Value, CliError> {
            Ok(json!({"id": id, "token": tokenizer.decode_all(&[id])?, "logprob": logprob}))
        };
        let one = |(id, p): (&u32, &Logprobs)| -> Result<Value, CliError> {
            let mut token = named(*id, p.chosen)?;
            token["top"] =
                p.top.iter().map(|(id, logprob)| named(*id, *logprob)).collect::<Result<Value, CliError>>()?;
            Ok(token)
        };
        self.generation.ids.iter().zip(&self.generation.logprobs).map(one).collect()
    }

    /// One line of figures.
    pub fn figures(&self) -> String {
        let cached = match self.cached_tokens {
            0 => String::new(),
            cached => format!(" ({cached} cached)"),
        };
        format!(
            "{}{cached} prompt + {} answer tokens · first after {:.2} s · {:.1} tokens/s · {}",
            self.prompt_tokens,
            self.generation.ids.len(),
            self.seconds_to_first_token,
            self.rate(),
            self.stop()
        )
    }
}

/// Says how tokens are chosen unless a flag or a request says otherwise, and where these defaults come from.
pub fn say_defaults(text: &TextFiles, thinking: Option<bool>) {
    let (defaults, source) = text.sampling(thinking);
    report::label("sampling", format!("{} by default, from {source}", values(&defaults).join(", ")));
}

/// Says how the tokens of an answer are chosen, and which of these values are defaults.
pub fn say_sampling(used: &Sampling, text: &TextFiles, thinking: Option<bool>) {
    let (defaults, source) = text.sampling(thinking);
    // The most likely token is kept by every filter.
    let has_effect = |value: &str| used.temperature > 0.0 || value.starts_with("temp") || value.starts_with("rep");
    let both = values(used).into_iter().zip(values(&defaults)).filter(|(value, _)| has_effect(value));
    let (same, asked): (Vec<_>, Vec<_>) = both.partition(|(value, default)| value == default);
    let listed = |list: Vec<(String, String)>, whence: String| {
        let list: Vec<String> = list.into_iter().map(|(value, _)| value).collect();
        (!list.is_empty()).then(|| format!("{} {whence}", list.join(", ")))
    };
    let parts = [listed(asked, "by flag".into()), listed(same, format!("by default, from {source}"))];
    report::label("sampling", parts.into_iter().flatten().collect::<Vec<_>>().join("; "));
}

/// The values by which tokens are chosen, with their names.
pub fn values(s: &Sampling) -> [String; 5] {
    [
        format!("temperature {}", s.temperature),
        format!("top-p {}", s.top_p),
        format!("top-k {}", s.top_k),
        format!("min-p {}", s.min_p),
        format!("repetition-penalty {}", s.repetition_penalty),
    ]
}
